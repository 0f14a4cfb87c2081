//! Connections outside the pool, for what every call waits for.
//!
//! The pool asks the server once more whenever a connection comes back, and gives them out in turn: each statement meets another
//! server process, which has to find its plan and its pages anew. Beside commands that take two milliseconds that counts.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::{ErrorCode, SessionId};
use cynode_service::ApiError;
use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{ACQUIRE, Db, PlacedSession, SOON, identity::Authenticated};

/// A connection is not used for longer: the database may have moved.
const AGE: Duration = Duration::from_mins(5);

/// A connection that is kept, and made anew after it broke.
#[derive(Debug)]
pub(crate) struct Own {
    options: Arc<PgConnectOptions>,
    connection: Option<(PgConnection, Instant)>,
}

impl Own {
    /// One that waits for locks and statements no longer than this: whoever holds one holds up little.
    pub(super) fn impatient(options: &PgConnectOptions) -> Self {
        Self::new(&options.clone().options([
            ("lock_timeout", "1000"),
            ("statement_timeout", "5000"),
            ("idle_in_transaction_session_timeout", "5000"),
        ]))
    }

    pub(super) fn new(options: &PgConnectOptions) -> Self {
        // A few statements, always the same, by keys: planned once.
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

    /// Whether it was used before, and may have broken since.
    const fn is_old(&self) -> bool {
        self.connection.is_some()
    }

    /// Does something with the connection. One that broke, or on which something was left half done, is not used again.
    pub(crate) async fn with<T>(
        &mut self,
        limit: Duration,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let (mut connection, since) = match self
            .connection
            .take()
            .filter(|(_, since)| since.elapsed() < AGE)
        {
            Some(kept) => kept,
            None => (
                timeout(ACQUIRE, self.options.connect())
                    .await
                    .map_err(|_| late())?
                    .map_err(super::problem)?,
                Instant::now(),
            ),
        };
        let result = timeout(limit, work(&mut connection))
            .await
            .map_err(|_| late())?;
        if result
            .as_ref()
            .err()
            .is_none_or(|error| error.0.is(ErrorCode::AlreadyExists))
        {
            self.connection = Some((connection, since));
        }
        result
    }
}

fn late() -> ApiError {
    ApiError::new(ErrorCode::StoreUnavailable, "the database does not answer")
}

/// Whom a token speaks for, and where the session is that was asked about with it.
pub(crate) type Found = Option<(Authenticated, Option<PlacedSession>)>;

/// A question that every call begins with.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) hash: [u8; 32],
    pub(super) session: Option<SessionId>,
    answer: oneshot::Sender<Result<Found, ApiError>>,
}

/// So many are answered together.
const BATCH: usize = 64;
/// And so many wait.
const WAITING: usize = 4_096;

/// Asks by one connection: what comes while a question is under way goes with the next.
#[derive(Clone, Debug)]
pub(super) struct Lookups(mpsc::Sender<Asked>);

impl Lookups {
    pub(super) fn spawn(mut own: Own) -> Self {
        let (sender, mut receiver) = mpsc::channel(WAITING);
        tokio::spawn(async move {
            let mut asked = Vec::with_capacity(BATCH);
            while receiver.recv_many(&mut asked, BATCH).await > 0 {
                // Who went away meanwhile needs no answer.
                asked.retain(|asked: &Asked| !asked.answer.is_closed());
                if asked.is_empty() {
                    continue;
                }
                match answers(&mut own, &asked).await {
                    Ok(found) => asked
                        .drain(..)
                        .zip(found)
                        .for_each(|(asked, found)| drop(asked.answer.send(found))),
                    Err(error) => asked
                        .drain(..)
                        .for_each(|asked| drop(asked.answer.send(Err(error.clone())))),
                }
            }
        });
        Self(sender)
    }

    pub(super) async fn ask(
        &self,
        hash: [u8; 32],
        session: Option<SessionId>,
    ) -> Result<Found, ApiError> {
        let (answer, waits) = oneshot::channel();
        self.0
            .send(Asked {
                hash,
                session,
                answer,
            })
            .await
            .map_err(|_| late())?;
        waits.await.map_err(|_| late())?
    }
}

/// A connection that broke while nobody used it is found out by the question that fails: that one is asked again.
async fn answers(own: &mut Own, asked: &[Asked]) -> Result<Vec<Result<Found, ApiError>>, ApiError> {
    let was_old = own.is_old();
    match own
        .with(SOON, async |connection| {
            Db::authenticate_all(connection, asked).await
        })
        .await
    {
        Err(error) if was_old && !own.is_old() && error.0.is(ErrorCode::StoreUnavailable) => {
            own.with(SOON, async |connection| {
                Db::authenticate_all(connection, asked).await
            })
            .await
        }
        found => found,
    }
}
