//! Permits that are shared fairly between callers.
//!
//! Permits bound how many bodies are spooled or buffered at once. The bytes come from callers and
//! sandboxes, which may stall at any point.
//!
//! Invariants: a body holds a permit only while bytes arrive, and returns it after two seconds of
//! silence. A free permit goes to the waiting caller that holds the fewest. A caller that holds
//! more than a waiting one returns a permit at its next piece. However many stalled or slow bodies
//! one caller has, another waits about two seconds at most.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use axum::body::{Body, BodyDataStream};
use bytes::Bytes;
use cynode_service::connections::CallerId;
use futures_util::{StreamExt as _, stream};
use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

/// A body that is silent for this long returns its permit.
const SILENCE: Duration = Duration::from_secs(2);
/// A permit is held at least this long while bytes arrive, so that callers do not alternate with
/// every piece.
const SLICE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct FairPermits {
    state: Mutex<State>,
    silence: Duration,
    slice: Duration,
}

#[derive(Debug)]
struct State {
    free: usize,
    held: BTreeMap<CallerId, usize>,
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    caller: CallerId,
    grant: oneshot::Sender<Permit>,
}

impl State {
    fn held(&self, caller: CallerId) -> usize {
        self.held.get(&caller).copied().unwrap_or(0)
    }

    /// Assigns free permits to waiting callers. They are sent after the lock is released: waking a
    /// task can end it, and its permit then returns here.
    fn grants(&mut self, pool: &'static FairPermits) -> Vec<(oneshot::Sender<Permit>, Permit)> {
        self.waiting.retain(|waiter| !waiter.grant.is_closed());
        let mut grants = Vec::new();
        while self.free > 0 {
            let fewest = self
                .waiting
                .iter()
                .enumerate()
                .min_by_key(|(place, waiter)| (self.held(waiter.caller), *place));
            let Some(Waiter { caller, grant }) = fewest
                .map(|(place, _)| place)
                .and_then(|place| self.waiting.remove(place))
            else {
                break;
            };
            self.count(caller);
            grants.push((
                grant,
                Permit {
                    pool,
                    caller,
                    since: Instant::now(),
                },
            ));
        }
        grants
    }

    fn count(&mut self, caller: CallerId) {
        self.free -= 1;
        *self.held.entry(caller).or_default() += 1;
    }
}

impl FairPermits {
    pub(crate) const fn new(permits: usize) -> Self {
        Self::with(permits, SILENCE, SLICE)
    }

    const fn with(permits: usize, silence: Duration, slice: Duration) -> Self {
        let state = State {
            free: permits,
            held: BTreeMap::new(),
            waiting: VecDeque::new(),
        };
        Self {
            state: Mutex::new(state),
            silence,
            slice,
        }
    }

    pub(crate) async fn acquire(&'static self, caller: CallerId) -> Permit {
        let granted = {
            let mut state = self.state.lock();
            if state.free > 0 && state.waiting.is_empty() {
                state.count(caller);
                return Permit {
                    pool: self,
                    caller,
                    since: Instant::now(),
                };
            }
            let (grant, granted) = oneshot::channel();
            state.waiting.push_back(Waiter { caller, grant });
            let grants = state.grants(self);
            drop(state);
            send(grants);
            granted
        };
        granted
            .await
            .expect("a waiter is only removed when it is granted a permit")
    }

    /// Reads a body. Its pieces need a permit from [`PermittedPieces::require_permit`] on.
    pub(crate) const fn read(
        &'static self,
        caller: CallerId,
        pieces: BodyDataStream,
    ) -> PermittedPieces {
        PermittedPieces {
            pool: self,
            caller,
            pieces,
            permit: None,
            needs_permit: false,
        }
    }

    /// A body that holds a permit while its pieces arrive.
    pub(crate) fn body(&'static self, caller: CallerId, body: Body) -> Body {
        let pieces = PermittedPieces {
            needs_permit: true,
            ..self.read(caller, body.into_data_stream())
        };
        Body::from_stream(stream::unfold(pieces, async |mut pieces| {
            pieces.next().await.map(|piece| (piece, pieces))
        }))
    }
}

#[derive(Debug)]
pub(crate) struct Permit {
    pool: &'static FairPermits,
    caller: CallerId,
    since: Instant,
}

impl Permit {
    /// Whether the permit should go to a waiting caller.
    fn is_due(&self) -> bool {
        let held = self.since.elapsed();
        if held < self.pool.slice {
            return false;
        }
        let state = self.pool.state.lock();
        let own = state.held(self.caller);
        state.waiting.iter().any(|waiter| {
            !waiter.grant.is_closed()
                && (held >= self.pool.silence || state.held(waiter.caller) < own)
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        state.free += 1;
        if let Some(held) = state.held.get_mut(&self.caller) {
            *held -= 1;
            if *held == 0 {
                state.held.remove(&self.caller);
            }
        }
        let grants = state.grants(self.pool);
        drop(state);
        send(grants);
    }
}

fn send(grants: Vec<(oneshot::Sender<Permit>, Permit)>) {
    for (grant, permit) in grants {
        // If the waiter is gone, dropping the permit returns it.
        drop(grant.send(permit));
    }
}

#[derive(Debug)]
pub(crate) struct PermittedPieces {
    pool: &'static FairPermits,
    caller: CallerId,
    pieces: BodyDataStream,
    permit: Option<Permit>,
    needs_permit: bool,
}

impl PermittedPieces {
    /// Acquires a permit, which all further pieces need.
    pub(crate) async fn require_permit(&mut self) {
        self.needs_permit = true;
        if self.permit.is_none() {
            self.permit = Some(self.pool.acquire(self.caller).await);
        }
    }

    /// Returns the permit until the next piece.
    pub(crate) fn release(&mut self) {
        self.permit = None;
    }

    /// The next piece, with a permit if one is required.
    pub(crate) async fn next(&mut self) -> Option<Result<Bytes, axum::Error>> {
        if self.permit.as_ref().is_some_and(Permit::is_due) {
            self.permit = None;
        }
        let piece =
            if let Ok(piece) = tokio::time::timeout(self.pool.silence, self.pieces.next()).await {
                piece
            } else {
                self.permit = None;
                self.pieces.next().await
            };
        if self.needs_permit && matches!(piece, Some(Ok(_))) && self.permit.is_none() {
            self.permit = Some(self.pool.acquire(self.caller).await);
        }
        piece
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn user(number: u128) -> CallerId {
        CallerId::User(Uuid::from_u128(number))
    }

    const SHORT: Duration = Duration::from_millis(50);
    const PATIENCE: Duration = Duration::from_secs(30);

    fn pool(permits: usize) -> &'static FairPermits {
        Box::leak(Box::new(FairPermits::with(permits, SHORT, Duration::ZERO)))
    }

    /// A body that never ends and never stalls.
    fn slow() -> BodyDataStream {
        let pieces = stream::repeat(()).then(async |()| {
            tokio::time::sleep(SHORT / 10).await;
            Ok::<_, std::io::Error>(Bytes::from_static(b"piece"))
        });
        Body::from_stream(pieces).into_data_stream()
    }

    async fn is_waiting<T>(task: &tokio::task::JoinHandle<T>) -> bool {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        !task.is_finished()
    }

    #[tokio::test]
    // invariant: no-starvation
    async fn a_silent_body_returns_its_permit_and_takes_one_when_bytes_arrive() {
        let permits = pool(1);
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let pieces = stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|piece| (piece, receiver))
        });
        let mut body = permits.read(user(1), Body::from_stream(pieces).into_data_stream());
        body.require_permit().await;
        let send = async || {
            sender
                .send(Ok::<_, std::io::Error>(Bytes::from_static(b"piece")))
                .await
                .expect("it is read");
        };
        send().await;
        assert!(body.next().await.is_some_and(|piece| piece.is_ok()));
        let reading = tokio::spawn(async move {
            let piece = body.next().await;
            (piece.is_some_and(|piece| piece.is_ok()), body)
        });
        // The body is silent, so the only permit is free again.
        let other = tokio::time::timeout(PATIENCE, permits.acquire(user(2)))
            .await
            .expect("given back");
        send().await;
        assert!(
            is_waiting(&reading).await,
            "the body was read without a permit"
        );
        drop(other);
        let (came, body) = reading.await.expect("read");
        assert!(came && body.permit.is_some());
    }

    #[tokio::test]
    // invariant: no-starvation
    async fn slow_bodies_yield_a_permit_to_a_caller_with_fewer() {
        let permits = pool(8);
        // Each piece arrives long before the silence counts.
        for _ in 0..9 {
            let mut body = permits.read(user(1), slow());
            tokio::spawn(async move {
                body.require_permit().await;
                while body.next().await.is_some() {}
            });
        }
        while permits.state.lock().held(user(1)) < 8 {
            tokio::task::yield_now().await;
        }
        for caller in 2..=5 {
            drop(
                tokio::time::timeout(PATIENCE, permits.acquire(user(caller)))
                    .await
                    .expect("a permit"),
            );
        }
    }

    #[tokio::test]
    async fn a_free_permit_goes_to_the_caller_with_the_fewest_then_in_arrival_order() {
        let permits = pool(3);
        let (one, two, _three) = (
            permits.acquire(user(1)).await,
            permits.acquire(user(1)).await,
            permits.acquire(user(1)).await,
        );
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        for (name, caller) in [("again", 1), ("first", 2), ("second", 3), ("gone", 4)] {
            let sender = sender.clone();
            let waiting = tokio::spawn(async move {
                let permit = permits.acquire(user(caller)).await;
                sender.send(name).expect("the receiver is open");
                std::future::pending::<()>().await;
                drop(permit);
            });
            assert!(is_waiting(&waiting).await);
            if name == "gone" {
                waiting.abort();
                drop(waiting.await);
            }
        }
        drop(one);
        assert_eq!(receiver.recv().await, Some("first"));
        drop(two);
        assert_eq!(receiver.recv().await, Some("second"));
        let state = permits.state.lock();
        assert_eq!(
            (
                state.free,
                state.held(user(1)),
                state.held(user(2)),
                state.held(user(3))
            ),
            (0, 1, 1, 1)
        );
    }

    #[tokio::test]
    async fn an_aborted_waiter_loses_no_permit() {
        let permits = pool(1);
        let held = permits.acquire(user(1)).await;
        let waiting = tokio::spawn(permits.acquire(user(2)));
        assert!(is_waiting(&waiting).await);
        waiting.abort();
        drop(waiting.await);
        drop(held);
        drop(permits.acquire(user(3)).await);
        assert_eq!(permits.state.lock().free, 1);
    }
}
