//! Permits that callers take in turns.
//!
//! Permits bound how many bodies are spooled or read whole at once. The bytes come from callers and sandboxes, who may stop in the middle.
//!
//! Invariants: a permit is held only while bytes come, so it goes back after two seconds of silence; a free one goes to the waiting caller
//! that holds the fewest; and whoever holds more than a waiting caller gives one back at its next piece. However many stalled or slow
//! bodies a caller has, another one waits for about two seconds at most.

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

/// After this much silence of its body a permit goes back.
const SILENCE: Duration = Duration::from_secs(2);
/// A permit is held at least this long while bytes come, so that two callers do not take turns with every piece.
const SLICE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Turns {
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

    /// Counts the permits that waiting callers get now. They are sent when the lock is free: to wake a task can also end it, and then its
    /// permit comes back here.
    fn grants(&mut self, turns: &'static Turns) -> Vec<(oneshot::Sender<Permit>, Permit)> {
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
                    turns,
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

impl Turns {
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
                    turns: self,
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

    /// The pieces of a body, which hold a permit while they come.
    pub(crate) const fn read(&'static self, caller: CallerId, pieces: BodyDataStream) -> InTurns {
        InTurns {
            turns: self,
            caller,
            pieces,
            permit: None,
            takes_permit: false,
        }
    }

    /// A body whose pieces hold a permit while they come.
    pub(crate) fn body(&'static self, caller: CallerId, body: Body) -> Body {
        let pieces = InTurns {
            takes_permit: true,
            ..self.read(caller, body.into_data_stream())
        };
        Body::from_stream(stream::unfold(pieces, async |mut pieces| {
            pieces.next().await.map(|piece| (piece, pieces))
        }))
    }
}

#[derive(Debug)]
pub(crate) struct Permit {
    turns: &'static Turns,
    caller: CallerId,
    since: Instant,
}

impl Permit {
    /// Whether it is somebody else's turn.
    fn is_due(&self) -> bool {
        let held = self.since.elapsed();
        if held < self.turns.slice {
            return false;
        }
        let state = self.turns.state.lock();
        let own = state.held(self.caller);
        state.waiting.iter().any(|waiter| {
            !waiter.grant.is_closed()
                && (held >= self.turns.silence || state.held(waiter.caller) < own)
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.turns.state.lock();
        state.free += 1;
        if let Some(held) = state.held.get_mut(&self.caller) {
            *held -= 1;
            if *held == 0 {
                state.held.remove(&self.caller);
            }
        }
        let grants = state.grants(self.turns);
        drop(state);
        send(grants);
    }
}

fn send(grants: Vec<(oneshot::Sender<Permit>, Permit)>) {
    for (grant, permit) in grants {
        // Whoever waited may be gone; the permit goes back then.
        drop(grant.send(permit));
    }
}

#[derive(Debug)]
pub(crate) struct InTurns {
    turns: &'static Turns,
    caller: CallerId,
    pieces: BodyDataStream,
    permit: Option<Permit>,
    takes_permit: bool,
}

impl InTurns {
    /// From now on pieces need a permit.
    pub(crate) async fn begin(&mut self) {
        self.takes_permit = true;
        if self.permit.is_none() {
            self.permit = Some(self.turns.acquire(self.caller).await);
        }
    }

    /// Gives the permit back until the next piece.
    pub(crate) fn rest(&mut self) {
        self.permit = None;
    }

    /// The next piece; with a permit once reading has begun.
    pub(crate) async fn next(&mut self) -> Option<Result<Bytes, axum::Error>> {
        if self.permit.as_ref().is_some_and(Permit::is_due) {
            self.permit = None;
        }
        let piece =
            if let Ok(piece) = tokio::time::timeout(self.turns.silence, self.pieces.next()).await {
                piece
            } else {
                self.permit = None;
                self.pieces.next().await
            };
        if self.takes_permit && matches!(piece, Some(Ok(_))) && self.permit.is_none() {
            self.permit = Some(self.turns.acquire(self.caller).await);
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

    fn turns(permits: usize) -> &'static Turns {
        Box::leak(Box::new(Turns::with(permits, SHORT, Duration::ZERO)))
    }

    /// A body that never ends, and never stops for long.
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
    async fn a_silent_body_gives_its_permit_back_and_takes_one_again_when_bytes_come() {
        let turns = turns(1);
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let pieces = stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|piece| (piece, receiver))
        });
        let mut body = turns.read(user(1), Body::from_stream(pieces).into_data_stream());
        body.begin().await;
        let send = async || {
            sender
                .send(Ok::<_, std::io::Error>(Bytes::from_static(b"piece")))
                .await
                .expect("it is read")
        };
        send().await;
        assert!(body.next().await.is_some_and(|piece| piece.is_ok()));
        let reading = tokio::spawn(async move {
            let piece = body.next().await;
            (piece.is_some_and(|piece| piece.is_ok()), body)
        });
        // Nothing comes: the only permit is free again.
        let other = tokio::time::timeout(PATIENCE, turns.acquire(user(2)))
            .await
            .expect("given back");
        send().await;
        assert!(
            is_waiting(&reading).await,
            "its piece is there, and it has no permit"
        );
        drop(other);
        let (came, body) = reading.await.expect("read");
        assert!(came && body.permit.is_some());
    }

    #[tokio::test]
    async fn slow_bodies_give_a_permit_to_a_caller_that_has_fewer() {
        let turns = turns(8);
        // Each piece comes long before the silence would count.
        for _ in 0..9 {
            let mut body = turns.read(user(1), slow());
            tokio::spawn(async move {
                body.begin().await;
                while body.next().await.is_some() {}
            });
        }
        while turns.state.lock().held(user(1)) < 8 {
            tokio::task::yield_now().await;
        }
        for caller in 2..=5 {
            drop(
                tokio::time::timeout(PATIENCE, turns.acquire(user(caller)))
                    .await
                    .expect("it has its turn"),
            );
        }
    }

    #[tokio::test]
    async fn a_free_permit_goes_to_the_caller_with_the_fewest_and_then_by_order() {
        let turns = turns(3);
        let (one, two, _three) = (
            turns.acquire(user(1)).await,
            turns.acquire(user(1)).await,
            turns.acquire(user(1)).await,
        );
        let (told, mut heard) = tokio::sync::mpsc::unbounded_channel();
        for (name, caller) in [("again", 1), ("first", 2), ("second", 3), ("gone", 4)] {
            let told = told.clone();
            let waiting = tokio::spawn(async move {
                let permit = turns.acquire(user(caller)).await;
                told.send(name).expect("somebody hears it");
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
        assert_eq!(heard.recv().await, Some("first"));
        drop(two);
        assert_eq!(heard.recv().await, Some("second"));
        let state = turns.state.lock();
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
    async fn a_permit_that_is_not_needed_any_more_is_not_lost() {
        let turns = turns(1);
        let held = turns.acquire(user(1)).await;
        let waiting = tokio::spawn(turns.acquire(user(2)));
        assert!(is_waiting(&waiting).await);
        waiting.abort();
        drop(waiting.await);
        drop(held);
        drop(turns.acquire(user(3)).await);
        assert_eq!(turns.state.lock().free, 1);
    }
}
