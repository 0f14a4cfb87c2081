//! A budget that callers share fairly.
//!
//! Invariants: a caller that holds something gets no more than half of the budget, so however much
//! one caller asks for, others find room. Free budget goes to the waiting caller that holds the
//! least, then in order of arrival. A request that does not fit is overtaken by smaller ones for a
//! while only, so it is never starved.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

use crate::connections::CallerId;

/// How long smaller requests may overtake one that does not fit.
const OVERTAKING: Duration = Duration::from_secs(2);

tokio::task_local! {
    static CALLER: CallerId;
}

/// Runs a future on behalf of a caller: what it takes from a budget counts against that caller.
pub async fn on_behalf_of<F: Future>(caller: CallerId, future: F) -> F::Output {
    CALLER.scope(caller.share(), future).await
}

#[derive(Debug)]
pub(crate) struct FairBudget {
    capacity: usize,
    overtaking: Duration,
    state: Mutex<BudgetState>,
}

#[derive(Debug)]
struct BudgetState {
    free: usize,
    /// What each caller holds. Work of the role itself is not counted.
    held: BTreeMap<CallerId, usize>,
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    caller: Option<CallerId>,
    amount: usize,
    since: Instant,
    grant: oneshot::Sender<Share>,
}

impl BudgetState {
    fn held(&self, caller: Option<CallerId>) -> usize {
        caller.map_or(0, |caller| self.held.get(&caller).copied().unwrap_or(0))
    }

    /// Whether the caller's own part of the budget has room.
    fn is_within_part(&self, capacity: usize, caller: Option<CallerId>, amount: usize) -> bool {
        let held = self.held(caller);
        held == 0 || held + amount <= capacity / 2
    }

    fn take(&mut self, caller: Option<CallerId>, amount: usize) {
        self.free -= amount;
        if let Some(caller) = caller {
            *self.held.entry(caller).or_default() += amount;
        }
    }

    /// Assigns free budget to waiting callers. Shares are sent after the lock is released: waking a
    /// task can end it, and its share then returns here.
    fn grants(&mut self, budget: &'static FairBudget) -> Vec<(oneshot::Sender<Share>, Share)> {
        self.waiting.retain(|waiter| !waiter.grant.is_closed());
        let mut grants = Vec::new();
        while let Some(place) = self.next(budget) {
            let Some(Waiter {
                caller,
                amount,
                grant,
                ..
            }) = self.waiting.remove(place)
            else {
                break;
            };
            self.take(caller, amount);
            grants.push((
                grant,
                Share {
                    budget,
                    caller,
                    amount,
                },
            ));
        }
        grants
    }

    /// The place of the waiter that is next, if it fits.
    fn next(&self, budget: &FairBudget) -> Option<usize> {
        let mut order: Vec<usize> = (0..self.waiting.len())
            .filter(|place| {
                let Waiter { caller, amount, .. } = &self.waiting[*place];
                self.is_within_part(budget.capacity, *caller, *amount)
            })
            .collect();
        order.sort_by_key(|place| (self.held(self.waiting[*place].caller), *place));
        for place in order {
            let waiter = &self.waiting[place];
            if waiter.amount <= self.free {
                return Some(place);
            }
            if waiter.since.elapsed() >= budget.overtaking {
                return None;
            }
        }
        None
    }
}

impl FairBudget {
    pub(crate) const fn new(capacity: usize) -> Self {
        Self::with(capacity, OVERTAKING)
    }

    const fn with(capacity: usize, overtaking: Duration) -> Self {
        Self {
            capacity,
            overtaking,
            state: Mutex::new(BudgetState {
                free: capacity,
                held: BTreeMap::new(),
                waiting: VecDeque::new(),
            }),
        }
    }

    /// Waits for a share of the budget, on behalf of the current caller. Larger amounts than the
    /// whole budget get all of it.
    pub(crate) async fn acquire(&'static self, amount: usize) -> Share {
        let caller = CALLER.try_with(|caller| *caller).ok();
        self.acquire_for(caller, amount.min(self.capacity)).await
    }

    async fn acquire_for(&'static self, caller: Option<CallerId>, amount: usize) -> Share {
        let granted = {
            let (grant, granted) = oneshot::channel();
            let mut state = self.state.lock();
            state.waiting.push_back(Waiter {
                caller,
                amount,
                since: Instant::now(),
                grant,
            });
            let grants = state.grants(self);
            drop(state);
            send(grants);
            granted
        };
        granted
            .await
            .expect("a waiter is only removed when it is granted a share")
    }

    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.state.lock().free
    }
}

/// A share of a budget, returned when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    budget: &'static FairBudget,
    caller: Option<CallerId>,
    amount: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        state.free += self.amount;
        if let Some(caller) = self.caller
            && let Some(held) = state.held.get_mut(&caller)
        {
            *held -= self.amount;
            if *held == 0 {
                state.held.remove(&caller);
            }
        }
        let grants = state.grants(self.budget);
        drop(state);
        send(grants);
    }
}

fn send(grants: Vec<(oneshot::Sender<Share>, Share)>) {
    for (grant, share) in grants {
        // If the waiter is gone, dropping the share returns it.
        drop(grant.send(share));
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn user(number: u128) -> CallerId {
        CallerId::User(Uuid::from_u128(number))
    }

    fn budget(capacity: usize) -> &'static FairBudget {
        Box::leak(Box::new(FairBudget::new(capacity)))
    }

    async fn is_waiting<T>(task: &tokio::task::JoinHandle<T>) -> bool {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        !task.is_finished()
    }

    #[tokio::test]
    // invariant: no-starvation
    async fn one_caller_gets_half_and_others_find_room() {
        let budget = budget(100);
        let first = budget.acquire_for(Some(user(1)), 30).await;
        let second = budget.acquire_for(Some(user(1)), 20).await;
        let third = tokio::spawn(budget.acquire_for(Some(user(1)), 1));
        assert!(is_waiting(&third).await, "more than half was granted");
        drop(budget.acquire_for(Some(user(2)), 50).await);
        drop(first);
        drop(third.await.expect("granted"));
        // A single large request may exceed half, up to the whole budget.
        drop(second);
        drop(budget.acquire_for(Some(user(3)), 100).await);
        assert_eq!(budget.free(), 100);
    }

    #[tokio::test]
    // invariant: no-starvation
    async fn the_caller_that_holds_least_comes_next_then_the_first_to_arrive() {
        let budget = budget(4);
        let own = budget.acquire_for(Some(user(1)), 2).await;
        let others = [
            budget.acquire_for(Some(user(2)), 1).await,
            budget.acquire_for(None, 1).await,
        ];
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        for (name, caller) in [("again", 2), ("first", 3), ("second", 4), ("gone", 5)] {
            let sender = sender.clone();
            let waiting = tokio::spawn(async move {
                let share = budget.acquire_for(Some(user(caller)), 1).await;
                sender.send(name).expect("the receiver is open");
                std::future::pending::<()>().await;
                drop(share);
            });
            assert!(is_waiting(&waiting).await);
            if name == "gone" {
                waiting.abort();
                drop(waiting.await);
            }
        }
        drop(own);
        assert_eq!(receiver.recv().await, Some("first"));
        assert_eq!(receiver.recv().await, Some("second"));
        drop(others);
        assert_eq!(receiver.recv().await, Some("again"));
    }

    #[tokio::test]
    async fn a_large_request_is_overtaken_for_a_while_only() {
        for (overtaking, is_overtaken) in [(OVERTAKING, true), (Duration::ZERO, false)] {
            let budget: &'static FairBudget = Box::leak(Box::new(FairBudget::with(10, overtaking)));
            let held = budget.acquire_for(Some(user(1)), 5).await;
            let large = tokio::spawn(budget.acquire_for(Some(user(2)), 10));
            assert!(is_waiting(&large).await);
            let small = tokio::spawn(budget.acquire_for(Some(user(3)), 1));
            assert_eq!(is_waiting(&small).await, !is_overtaken);
            drop(held);
            if is_overtaken {
                drop(small.await.expect("granted"));
                drop(large.await.expect("granted"));
            } else {
                drop(large.await.expect("granted"));
                drop(small.await.expect("granted"));
            }
        }
    }

    #[tokio::test]
    async fn work_counts_against_the_caller_on_whose_behalf_it_runs() {
        let budget = budget(2);
        let agent = |token| CallerId::Agent {
            user: Uuid::from_u128(7),
            token: Uuid::from_u128(token),
        };
        let first = on_behalf_of(agent(1), budget.acquire(1)).await;
        let second = tokio::spawn(on_behalf_of(agent(2), budget.acquire(1)));
        assert!(
            is_waiting(&second).await,
            "two agents of one user have one share"
        );
        drop(budget.acquire(1).await);
        drop(first);
        drop(second.await.expect("granted"));
    }
}
