//! The rate at which one sandbox may start computations.
//!
//! Each computation leaves two records in the audit trail. Without a rate, a loop in a sandbox fills
//! the trail of the node and of the orchestrator for as long as it runs.

use std::{collections::HashMap, time::Duration};

use cynode_api::SessionId;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Computations that a sandbox may start at once.
pub(super) const BURST: u32 = 600;
/// Time between computations after the burst. A model takes longer for an answer.
const INTERVAL: Duration = Duration::from_millis(250);
/// Sandboxes that are remembered before those with a whole burst are forgotten.
const MAX_REMEMBERED: usize = 1_024;

/// When the computations of each sandbox so far would have started at the steady rate.
#[derive(Debug, Default)]
pub(super) struct ComputationRate(Mutex<HashMap<SessionId, Instant>>);

impl ComputationRate {
    /// Counts a computation. Returns how long the sandbox has to wait if it has started too many.
    pub(super) fn count(&self, sandbox: SessionId, now: Instant) -> Result<(), Duration> {
        let mut earned_at = self.0.lock();
        if earned_at.len() >= MAX_REMEMBERED {
            earned_at.retain(|_, at| *at > now);
        }
        let at = earned_at.entry(sandbox).or_insert(now);
        let next = (*at).max(now) + INTERVAL;
        let early = next.saturating_duration_since(now + INTERVAL * BURST);
        if !early.is_zero() {
            return Err(early);
        }
        *at = next;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_starts_at_once_and_then_one_by_one_for_each_sandbox() {
        let rate = ComputationRate::default();
        let (greedy, modest) = (SessionId::generate(), SessionId::generate());
        let now = Instant::now();
        for number in 0..BURST {
            assert_eq!(rate.count(greedy, now), Ok(()), "{number}");
        }
        assert_eq!(rate.count(greedy, now), Err(INTERVAL));
        assert_eq!(rate.count(modest, now), Ok(()));
        // Refused ones count nothing.
        assert_eq!(rate.count(greedy, now + INTERVAL), Ok(()));
        assert!(rate.count(greedy, now + INTERVAL).is_err());
        let later = now + INTERVAL * (2 * BURST);
        for number in 0..BURST {
            assert_eq!(rate.count(greedy, later), Ok(()), "{number}");
        }
        assert!(rate.count(greedy, later).is_err());
    }

    #[test]
    fn sandboxes_that_have_not_computed_for_a_while_are_forgotten() {
        let rate = ComputationRate::default();
        let now = Instant::now();
        for _ in 0..MAX_REMEMBERED {
            rate.count(SessionId::generate(), now).expect("the first");
        }
        let last = SessionId::generate();
        rate.count(last, now + 2 * INTERVAL).expect("the first");
        assert_eq!(rate.0.lock().len(), 1);
    }
}
