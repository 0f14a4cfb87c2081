//! Per-caller budgets for bytes in flight.
//!
//! Invariant: a caller who sends much and stalls exhausts only its own budget. Bytes are counted
//! from before they are stored until they are released.

use std::{collections::BTreeMap, time::Duration};

use axum::body::{Body, HttpBody as _};
use bytes::Bytes;
use cynode_api::{ErrorCode, artifact_limits};
use cynode_service::{ApiError, body, connections::CallerId};
use futures_util::{StreamExt as _, stream};
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

/// A caller's spooled bodies, until they are forwarded.
const MAX_SPOOLED: u64 = 1 << 30;
/// A caller's artifacts that are still being uploaded.
const MAX_STAGED: u64 = 2 << 30;
/// Upload buffers for a caller's artifacts.
const MAX_STAGING_BYTES: u64 = 32 << 20;
/// A body is buffered in memory up to this size, and spooled to a file beyond it.
pub(crate) const MAX_BUFFERED_BYTES: usize = 256 * 1024;
/// The step by which the reservation of a body of unknown size grows.
const RESERVATION_STEP: u64 = 16 << 20;
/// How long a body waits for the caller's other bodies.
const RESERVATION_TIMEOUT: Duration = body::MAX_PAUSE;

/// The bytes that one caller may have in flight; its further bodies wait.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    timeout: Duration,
    used: Mutex<BTreeMap<CallerId, u64>>,
    freed: Notify,
}

pub(crate) static SPOOLED: Budget = Budget::new(MAX_SPOOLED);
static STAGED: Budget = Budget::new(MAX_STAGED);
static STAGING: Budget = Budget::new(MAX_STAGING_BYTES);

impl Budget {
    const fn new(limit: u64) -> Self {
        Self::with(limit, RESERVATION_TIMEOUT)
    }

    const fn with(limit: u64, timeout: Duration) -> Self {
        Self {
            limit,
            timeout,
            used: Mutex::new(BTreeMap::new()),
            freed: Notify::const_new(),
        }
    }

    /// An empty reservation, which grows on demand.
    pub(crate) const fn reservation(&'static self, caller: CallerId) -> Reservation {
        Reservation {
            budget: self,
            caller: caller.share(),
            bytes: 0,
        }
    }

    fn add(&self, caller: CallerId, bytes: u64) -> bool {
        let mut used = self.used.lock();
        let present = used.get(&caller).copied().unwrap_or(0);
        let fits = bytes <= self.limit.saturating_sub(present);
        if fits {
            used.insert(caller, present + bytes);
        }
        fits
    }
}

#[derive(Debug)]
pub(crate) struct Reservation {
    budget: &'static Budget,
    caller: CallerId,
    bytes: u64,
}

impl Reservation {
    /// Whether this many bytes are reserved.
    pub(crate) const fn covers(&self, bytes: u64) -> bool {
        bytes <= self.bytes
    }

    /// Grows the reservation to a total. Waits for the caller's other bodies up to the timeout.
    pub(crate) async fn grow_to(&mut self, bytes: u64) -> Result<(), ApiError> {
        let more = bytes.saturating_sub(self.bytes);
        let deadline = Instant::now() + self.budget.timeout;
        loop {
            let freed = self.budget.freed.notified();
            if self.budget.add(self.caller, more) {
                self.bytes += more;
                return Ok(());
            }
            if tokio::time::timeout_at(deadline, freed).await.is_err() {
                let detail = format!(
                    "the bodies that this caller sends at once would exceed {} bytes",
                    self.budget.limit
                );
                return Err(ApiError::new(ErrorCode::TooManyRequests, detail));
            }
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut used = self.budget.used.lock();
        if let Some(present) = used.get_mut(&self.caller) {
            *present = present.saturating_sub(self.bytes);
            if *present == 0 {
                used.remove(&self.caller);
            }
        }
        drop(used);
        self.budget.freed.notify_waiters();
    }
}

/// Forwards each piece of a body once it is reserved. `target` maps the bytes read so far to the
/// bytes to reserve.
fn metered(
    reserved: Reservation,
    body: Body,
    target: impl Fn(u64) -> u64 + Send + 'static,
) -> Body {
    let state = (body.into_data_stream(), reserved, 0_u64, target);
    Body::from_stream(stream::unfold(
        state,
        move |(mut pieces, mut reserved, mut read, target)| async move {
            let mut piece = pieces.next().await?;
            read += piece.as_ref().map_or(0, |piece: &Bytes| piece.len() as u64);
            if !reserved.covers(target(read).min(read)) {
                piece = reserved
                    .grow_to(target(read))
                    .await
                    .map_err(|error| axum::Error::new(BodyError(error)))
                    .and(piece);
            }
            Some((piece, (pieces, reserved, read, target)))
        },
    ))
}

/// Meters an artifact that is being uploaded.
pub(crate) fn staged(caller: CallerId, body: Body) -> Body {
    let (size, largest) = (body.size_hint().exact(), artifact_limits::MAX_BYTES);
    metered(STAGED.reservation(caller), body, move |read| {
        size.unwrap_or(read + RESERVATION_STEP).min(largest)
    })
}

/// Reserves the upload buffer of one artifact.
pub(crate) async fn staging_memory(caller: CallerId, bytes: u64) -> Result<Reservation, ApiError> {
    let mut reserved = STAGING.reservation(caller);
    reserved.grow_to(bytes).await?;
    Ok(reserved)
}

/// A refusal that travels through a body stream.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.detail)]
pub(crate) struct BodyError(pub(crate) ApiError);

/// The error for a body that could not be read completely.
pub(crate) fn problem(error: &(dyn std::error::Error + 'static)) -> ApiError {
    refusal(error).unwrap_or_else(|| body::problem(error, "the body could not be read completely"))
}

/// The [`BodyError`] in a chain of errors, if there is one.
pub(crate) fn refusal(error: &(dyn std::error::Error + 'static)) -> Option<ApiError> {
    let mut cause = Some(error);
    while let Some(inner) = cause {
        if let Some(BodyError(error)) = inner.downcast_ref::<BodyError>() {
            return Some(error.clone());
        }
        cause = inner.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn user(number: u128) -> CallerId {
        CallerId::User(Uuid::from_u128(number))
    }

    fn budget(limit: u64) -> &'static Budget {
        Box::leak(Box::new(Budget::with(limit, Duration::from_millis(50))))
    }

    async fn grown(
        budget: &'static Budget,
        caller: CallerId,
        bytes: u64,
    ) -> Result<Reservation, ApiError> {
        let mut reservation = budget.reservation(caller);
        reservation.grow_to(bytes).await?;
        Ok(reservation)
    }

    #[tokio::test]
    // invariant: no-starvation
    async fn each_caller_has_its_own_budget() {
        let budget = budget(100);
        let mut first = grown(budget, user(1), 60).await.expect("there is room");
        let refused = grown(budget, user(1), 41).await.expect_err("there is not");
        assert!(refused.is(ErrorCode::TooManyRequests), "{refused:?}");
        let _others = grown(budget, user(2), 100).await.expect("another caller's");
        first.grow_to(100).await.expect("to its limit");
        assert!(first.covers(100) && !first.covers(101) && first.grow_to(101).await.is_err());
        // A waiting body proceeds when bytes are released.
        let budget: &'static Budget = Box::leak(Box::new(Budget::with(100, RESERVATION_TIMEOUT)));
        let (_others, first) = (
            grown(budget, user(2), 100).await,
            grown(budget, user(1), 1).await,
        );
        let waiting = tokio::spawn(grown(budget, user(1), 100));
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(!waiting.is_finished());
        drop(first);
        drop(waiting.await.expect("ran").expect("there is room"));
        assert_eq!(
            budget.used.lock().keys().copied().collect::<Vec<_>>(),
            [user(2)]
        );
    }

    #[tokio::test]
    async fn agents_of_a_user_share_a_budget() {
        let budget = budget(100);
        let agent = |token| CallerId::Agent {
            user: Uuid::from_u128(1),
            token: Uuid::from_u128(token),
        };
        let _one = grown(budget, agent(1), 60).await.expect("there is room");
        assert!(!budget.add(agent(2).share(), 41) && budget.add(user(1), 100));
    }

    #[tokio::test]
    async fn stalled_bodies_delay_only_their_own_caller() {
        let budget = budget(3 << 20);
        let stalled = |caller| {
            let pieces = stream::iter([(), ()])
                .map(|()| Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; 1 << 20])));
            metered(
                budget.reservation(caller),
                Body::from_stream(pieces.chain(stream::pending())),
                |read| read,
            )
            .into_data_stream()
        };
        let mut held = Vec::new();
        for _ in 0..3 {
            let mut body = stalled(user(1));
            assert!(body.next().await.is_some_and(|piece| piece.is_ok()));
            held.push(body);
        }
        let refused = stalled(user(1))
            .next()
            .await
            .expect("a piece")
            .expect_err("too many");
        assert!(problem(&refused).is(ErrorCode::TooManyRequests));
        assert!(
            stalled(user(2))
                .next()
                .await
                .is_some_and(|piece| piece.is_ok())
        );
        drop(held);
        assert!(
            stalled(user(1))
                .next()
                .await
                .is_some_and(|piece| piece.is_ok())
        );
    }
}
