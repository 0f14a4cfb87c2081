//! Connections outside the pool, for statements that every call waits for.
//!
//! The pool pings the server whenever a connection is returned, and hands connections out in turn:
//! each statement meets another server process, which has to build its plan and load its pages
//! anew. Next to commands of two milliseconds that is significant.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::SessionId;
use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{ACQUIRE_TIMEOUT, Db, Error, LOOKUP_TIMEOUT, PlacedSession, identity::Authenticated};

/// Connections are replaced after this: the database may have failed over.
const MAX_CONNECTION_AGE: Duration = Duration::from_mins(5);

/// A connection that is kept open and replaced when it breaks.
#[derive(Debug)]
pub(crate) struct DedicatedConnection {
    options: Arc<PgConnectOptions>,
    connection: Option<(PgConnection, Instant)>,
}

impl DedicatedConnection {
    /// With short lock and statement timeouts, so that a held lock delays the caller only briefly.
    pub(super) fn with_short_timeouts(options: &PgConnectOptions) -> Self {
        Self::new(&options.clone().options([
            ("lock_timeout", "1000"),
            ("statement_timeout", "5000"),
            ("idle_in_transaction_session_timeout", "5000"),
        ]))
    }

    pub(super) fn new(options: &PgConnectOptions) -> Self {
        // The few statements are always the same and go by keys: one generic plan suffices.
        let planned = [
            ("plan_cache_mode", "force_generic_plan"),
            ("enable_seqscan", "off"),
            ("enable_hashjoin", "off"),
            ("enable_mergejoin", "off"),
        ];
        Self {
            options: Arc::new(options.clone().options(planned)),
            connection: None,
        }
    }

    /// Whether the connection was used before, and so may be broken.
    const fn is_old(&self) -> bool {
        self.connection.is_some()
    }

    /// Runs `work` on the connection. A connection on which work failed or timed out is dropped.
    pub(crate) async fn with<T>(
        &mut self,
        limit: Duration,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (mut connection, since) = match self
            .connection
            .take()
            .filter(|(_, since)| since.elapsed() < MAX_CONNECTION_AGE)
        {
            Some(kept) => kept,
            None => (
                timeout(ACQUIRE_TIMEOUT, self.options.connect())
                    .await
                    .map_err(|_| Error::Unavailable)??,
                Instant::now(),
            ),
        };
        let result = timeout(limit, work(&mut connection))
            .await
            .map_err(|_| Error::Unavailable)?;
        if result
            .as_ref()
            .err()
            .is_none_or(|error| matches!(error, Error::Duplicate))
        {
            self.connection = Some((connection, since));
        }
        result
    }
}

/// The identity of a token, and the session that was looked up with it. `None` for an invalid
/// token.
pub(crate) type IdentityLookup = Option<(Authenticated, Option<PlacedSession>)>;

/// The lookup that every call begins with.
#[derive(Debug)]
pub(super) struct LookupRequest {
    pub(super) hash: [u8; 32],
    pub(super) session: Option<SessionId>,
    answer: oneshot::Sender<Result<IdentityLookup, Error>>,
}

/// Lookups per statement.
const BATCH: usize = 64;
/// Lookups that wait for a statement.
const QUEUE_CAPACITY: usize = 4_096;

/// Batches identity lookups on one connection: lookups that arrive while a statement is in flight
/// share the next one.
#[derive(Clone, Debug)]
pub(super) struct Lookups(mpsc::Sender<LookupRequest>);

impl Lookups {
    pub(super) fn spawn(mut dedicated: DedicatedConnection) -> Self {
        let (sender, mut receiver) = mpsc::channel(QUEUE_CAPACITY);
        tokio::spawn(async move {
            let mut requests = Vec::with_capacity(BATCH);
            while receiver.recv_many(&mut requests, BATCH).await > 0 {
                // Drops the lookups of callers that have gone away.
                requests.retain(|request: &LookupRequest| !request.answer.is_closed());
                if requests.is_empty() {
                    continue;
                }
                match answers(&mut dedicated, &requests).await {
                    Ok(found) => requests
                        .drain(..)
                        .zip(found)
                        .for_each(|(request, found)| drop(request.answer.send(found))),
                    Err(error) => requests
                        .drain(..)
                        .for_each(|request| drop(request.answer.send(Err(error.clone())))),
                }
            }
        });
        Self(sender)
    }

    pub(super) async fn ask(
        &self,
        hash: [u8; 32],
        session: Option<SessionId>,
    ) -> Result<IdentityLookup, Error> {
        let (answer, receiver) = oneshot::channel();
        self.0
            .send(LookupRequest {
                hash,
                session,
                answer,
            })
            .await
            .map_err(|_| Error::Unavailable)?;
        receiver.await.map_err(|_| Error::Unavailable)?
    }
}

/// A connection that broke while idle is noticed only when a statement fails: then the lookup is
/// retried once.
async fn answers(
    dedicated: &mut DedicatedConnection,
    requests: &[LookupRequest],
) -> Result<Vec<Result<IdentityLookup, Error>>, Error> {
    let was_old = dedicated.is_old();
    match dedicated
        .with(LOOKUP_TIMEOUT, async |connection| {
            Db::authenticate_all(connection, requests).await
        })
        .await
    {
        Err(Error::Unavailable) if was_old && !dedicated.is_old() => {
            dedicated
                .with(LOOKUP_TIMEOUT, async |connection| {
                    Db::authenticate_all(connection, requests).await
                })
                .await
        }
        found => found,
    }
}
