//! Authentication: resolves the bearer token of each call to a [`Caller`].
//!
//! The gate runs behind [`authenticate`] and depends on this module, never the other way round:
//! what a call may do with a cached identity is passed in as a predicate.

mod cache;

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use cynode_api::{ErrorCode, SessionId};
use cynode_service::{ApiError, admin, answers::Payer, auth, connections, fair, listen::Peer};
use http::Extensions;
use tokio::sync::Semaphore;

pub(crate) use cache::{CachedIdentity, IdentityCache, MAX_CACHED_GROUPS, StaleIdentity};

use crate::{
    Orchestrator,
    audit::{EntryPoint, Failure},
    caller::{Caller, hash},
    db::{self, Authenticated, PlacedSession},
};

/// A session that was read with the token is used without another query for this long.
const SNAPSHOT_MAX_AGE: Duration = Duration::from_millis(100);
/// Delays the answer to an invalid token, so that guessing tokens is slow.
const REJECTION_DELAY: Duration = Duration::from_millis(300);
/// Bounds how many rejections wait at once. Further ones get 429 without delay; all are counted.
static DELAYED_REJECTIONS: Semaphore = Semaphore::const_new(32);

/// The token's row, and the session of the call's path if there is one.
pub(crate) type Identity = (Authenticated, Option<PlacedSession>);

/// State of the [`authenticate`] middleware.
#[derive(Clone, Debug)]
pub(crate) struct Authenticator {
    pub(crate) orchestrator: Orchestrator,
    /// Whether the call may proceed on a cached identity, because the gate verifies it in time.
    pub(crate) accepts_cached_identity: fn(&Request) -> bool,
}

/// Authenticates the caller and attaches its identity to the request.
pub(crate) async fn authenticate(
    State(authenticator): State<Authenticator>,
    mut request: Request,
    next: Next,
) -> Response {
    let Authenticator {
        orchestrator,
        accepts_cached_identity,
    } = authenticator;
    let token_hash = match auth::offered(request.headers()) {
        Ok(token) => hash(token),
        Err(error) => return error.into_response(),
    };
    let session_id = session_in_path(request.uri().path());
    let cacheable_session = session_id.filter(|_| accepts_cached_identity(&request));
    if let Some(cached) =
        cacheable_session.and_then(|id| orchestrator.identities.get(token_hash, id))
    {
        let caller = attach(
            request.extensions_mut(),
            token_hash,
            session_id,
            cached.identity.clone(),
            Instant::now(),
        );
        if let Err(error) = connections::assign_to_caller(request.extensions(), caller.id()) {
            return error.into_response();
        }
        request.extensions_mut().insert(cached);
        return fair::on_behalf_of(caller.id(), next.run(request)).await;
    }
    let read_at = Instant::now();
    match db::with_timeout(orchestrator.db.authenticate(&token_hash, session_id)).await {
        Ok(current) => {
            if let Some(session_id) = cacheable_session {
                orchestrator
                    .identities
                    .update(token_hash, session_id, &current);
            }
            let Some(identity) = current else {
                let failure = Failure::new(
                    EntryPoint::of_path(request.uri().path()),
                    peer(request.extensions()),
                    &token_hash,
                );
                return reject_token(&orchestrator, failure).await.into_response();
            };
            let caller = attach(
                request.extensions_mut(),
                token_hash,
                session_id,
                identity,
                read_at,
            );
            match connections::assign_to_caller(request.extensions(), caller.id()) {
                Ok(()) => fair::on_behalf_of(caller.id(), next.run(request)).await,
                Err(error) => error.into_response(),
            }
        }
        Err(error) => error.into_response(),
    }
}

/// Grants access to the metrics to holders of the metrics token and to administrators.
pub(crate) fn metrics_reader(
    orchestrator: &Orchestrator,
    metrics_token: Option<auth::Token>,
) -> admin::MetricsReader {
    let orchestrator = orchestrator.clone();
    Arc::new(move |offered, peer| {
        let is_metrics_token = metrics_token
            .as_ref()
            .is_some_and(|token| token.admits(&offered));
        let orchestrator = orchestrator.clone();
        Box::pin(async move {
            if is_metrics_token {
                return Ok(());
            }
            let token_hash = hash(&offered);
            match db::with_timeout(orchestrator.db.authenticate(&token_hash, None)).await? {
                Some((authenticated, _))
                    if Caller::new(authenticated.clone(), token_hash)
                        .scope
                        .is_admin =>
                {
                    Ok(())
                }
                Some(_) => Err(admin::no_reader("the token is not an administrator's")),
                None => {
                    let failure = Failure::new(EntryPoint::Metrics, peer, &token_hash);
                    Err(reject_token(&orchestrator, failure).await)
                }
            }
        })
    })
}

/// Attaches a caller to a request, and the session of its path as read at `read_at`.
fn attach(
    extensions: &mut Extensions,
    token_hash: [u8; 32],
    session_id: Option<SessionId>,
    (authenticated, placed): Identity,
    read_at: Instant,
) -> Caller {
    let caller = Caller::new(authenticated, token_hash);
    extensions.insert(Payer(caller.scope.user_id.as_uuid().as_u128()));
    extensions.insert(caller.clone());
    extensions.remove::<SessionSnapshot>();
    if let Some((session_id, placed)) = session_id.zip(placed) {
        extensions.insert(SessionSnapshot {
            session_id,
            placed,
            read_at,
        });
    }
    caller
}

fn session_in_path(path: &str) -> Option<SessionId> {
    path.strip_prefix("/v1/sessions/")?
        .split('/')
        .next()?
        .parse()
        .ok()
}

fn peer(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<Peer>().map(|peer| peer.0.ip())
}

/// The session of a call, as it was when the caller was authenticated.
#[derive(Clone, Debug)]
pub(crate) struct SessionSnapshot {
    session_id: SessionId,
    placed: PlacedSession,
    read_at: Instant,
}

impl SessionSnapshot {
    /// The snapshot, unless it is of another session or too old.
    pub(crate) fn if_fresh(self, id: SessionId) -> Option<PlacedSession> {
        (self.session_id == id && self.read_at.elapsed() < SNAPSHOT_MAX_AGE).then_some(self.placed)
    }
}

/// Rejects an invalid token: records or counts the failure and delays the answer. Valid tokens are
/// never delayed.
pub(crate) async fn reject_token(orchestrator: &Orchestrator, failure: Failure) -> ApiError {
    metrics::counter!("cynode_refused_tokens_total").increment(1);
    if orchestrator.failures.add(&failure, Instant::now())
        && let Err(error) = orchestrator.audit.write_all(vec![failure.record()]).await
    {
        orchestrator.failures.count(&failure);
        return error.into();
    }
    let Ok(_permit) = DELAYED_REJECTIONS.try_acquire() else {
        return ApiError::new(
            ErrorCode::TooManyAttempts,
            "too many invalid tokens are being tried",
        );
    };
    tokio::time::sleep(REJECTION_DELAY).await;
    ApiError::new(ErrorCode::Unauthorized, "the token is not valid here")
}
