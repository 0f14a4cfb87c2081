//! Bytes that callers have here on their way to somewhere else, counted per caller.
//!
//! Invariant: a caller who sends much and stalls fills its own budget only. Bytes count from before they are kept until they are gone.

use std::{collections::BTreeMap, time::Duration};

use axum::body::{Body, HttpBody as _};
use bytes::Bytes;
use cynode_api::{ErrorCode, artifact_limits};
use cynode_service::{ApiError, body, connections::CallerId};
use futures_util::{StreamExt as _, stream};
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

/// Bytes of a caller's bodies in files, until they have been sent on.
const MAX_SPOOLED: u64 = 1 << 30;
/// Bytes of a caller's artifacts that are not stored yet.
const MAX_STAGED: u64 = 2 << 30;
/// Memory for a caller's artifacts that are being stored.
const MAX_STAGING_BYTES: u64 = 32 << 20;
/// What one body may have in memory before it goes to a file.
pub(crate) const IN_MEMORY: usize = 256 * 1024;
/// By which the reservation of a body of unknown size grows.
const STEP: u64 = 16 << 20;
/// How long a body waits for its caller's others.
const PATIENCE: Duration = body::MAX_PAUSE;

/// What one caller may have; the rest of the caller's bodies waits.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    patience: Duration,
    used: Mutex<BTreeMap<CallerId, u64>>,
    freed: Notify,
}

pub(crate) static SPOOLED: Budget = Budget::new(MAX_SPOOLED);
static STAGED: Budget = Budget::new(MAX_STAGED);
static STAGING: Budget = Budget::new(MAX_STAGING_BYTES);

impl Budget {
    const fn new(limit: u64) -> Self {
        Self::with(limit, PATIENCE)
    }

    const fn with(limit: u64, patience: Duration) -> Self {
        Self {
            limit,
            patience,
            used: Mutex::new(BTreeMap::new()),
            freed: Notify::const_new(),
        }
    }

    /// Nothing yet; it grows.
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
    /// Whether these many bytes are reserved.
    pub(crate) const fn covers(&self, bytes: u64) -> bool {
        bytes <= self.bytes
    }

    /// Reserves so many bytes in all. Waits a while for the caller's other bodies.
    pub(crate) async fn grow_to(&mut self, bytes: u64) -> Result<(), ApiError> {
        let more = bytes.saturating_sub(self.bytes);
        let deadline = Instant::now() + self.budget.patience;
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

/// The pieces of a body, each of which is let through when it is reserved. `target` says how much to reserve when so much has come.
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
                    .map_err(|error| axum::Error::new(Refusal(error)))
                    .and(piece);
            }
            Some((piece, (pieces, reserved, read, target)))
        },
    ))
}

/// The bytes of an artifact that is being stored.
pub(crate) fn staged(caller: CallerId, body: Body) -> Body {
    let (size, largest) = (body.size_hint().exact(), artifact_limits::MAX_BYTES);
    metered(STAGED.reservation(caller), body, move |read| {
        size.unwrap_or(read + STEP).min(largest)
    })
}

/// Memory for one artifact that is being stored.
pub(crate) async fn staging_memory(caller: CallerId, bytes: u64) -> Result<Reservation, ApiError> {
    let mut reserved = STAGING.reservation(caller);
    reserved.grow_to(bytes).await?;
    Ok(reserved)
}

/// Why a body was not read on.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.0.detail)]
pub(crate) struct Refusal(pub(crate) ApiError);

/// The problem of a body that could not be read to its end.
pub(crate) fn problem(error: &(dyn std::error::Error + 'static)) -> ApiError {
    refusal(error).unwrap_or_else(|| body::problem(error, "the body could not be read to its end"))
}

/// The refusal of a budget, if that is why a body was not read on.
pub(crate) fn refusal(error: &(dyn std::error::Error + 'static)) -> Option<ApiError> {
    let mut cause = Some(error);
    while let Some(inner) = cause {
        if let Some(Refusal(refusal)) = inner.downcast_ref::<Refusal>() {
            return Some(refusal.clone());
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
    async fn a_caller_has_its_budget_and_no_more_and_others_have_theirs() {
        let budget = budget(100);
        let mut first = grown(budget, user(1), 60).await.expect("there is room");
        let refused = grown(budget, user(1), 41).await.expect_err("there is not");
        assert!(refused.0.is(ErrorCode::TooManyRequests), "{refused:?}");
        let _others = grown(budget, user(2), 100).await.expect("another caller's");
        first.grow_to(100).await.expect("to its limit");
        assert!(first.covers(100) && !first.covers(101) && first.grow_to(101).await.is_err());
        // What waits gets in when there is room.
        let budget: &'static Budget = Box::leak(Box::new(Budget::with(100, PATIENCE)));
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
    async fn bodies_that_stall_hold_up_their_own_caller_only() {
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
        assert!(problem(&refused).0.is(ErrorCode::TooManyRequests));
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
