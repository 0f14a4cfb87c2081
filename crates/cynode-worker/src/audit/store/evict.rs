//! Shortens a trail that is shipped nowhere.
//!
//! Invariant: the sandboxes that take the most lose their oldest records, and the others none: a
//! busy sandbox can't push out what another did.

use std::{
    collections::{BTreeMap, HashMap},
    io,
};

use serde_json::json;

use super::{SandboxOwner, Store};

/// What each sandbox has to give up, in bytes.
pub(super) type Surplus = HashMap<Option<SandboxOwner>, u64>;

impl Store {
    /// Drops records once they take more than `max` bytes.
    pub(in crate::audit) fn evict(&mut self, max: u64) -> io::Result<()> {
        let mut taken = Surplus::new();
        for (owner, cost) in self.pending() {
            *taken.entry(owner).or_default() += cost;
        }
        if taken.values().sum::<u64>() <= max {
            return Ok(());
        }
        // Shortening costs as much as what is left, so it should not be needed soon again.
        let share = equal_share(taken.values().copied().collect(), max / 4 * 3);
        taken.retain(|_, bytes| {
            *bytes = bytes.saturating_sub(share);
            *bytes > 0
        });
        let details = vec![
            ("reason", json!("the trail was too long")),
            ("evicted_bytes", json!(taken.values().sum::<u64>())),
        ];
        self.rewrite(details, &BTreeMap::new(), taken)
    }
}

/// The most that each may keep so that all together keep no more than `total`.
fn equal_share(mut taken: Vec<u64>, total: u64) -> u64 {
    taken.sort_unstable();
    let mut left = total;
    let mut number = taken.len() as u64;
    for bytes in taken {
        let share = left / number;
        if bytes > share {
            return share;
        }
        left -= bytes;
        number -= 1;
    }
    u64::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_little_keeps_all_and_the_others_share_the_rest() {
        assert_eq!(equal_share(vec![100, 10, 100], 90), 40);
        assert_eq!(equal_share(vec![100, 10, 50], 130), 70);
        assert_eq!(equal_share(vec![10, 10], 20), u64::MAX);
        assert_eq!(equal_share(vec![], 1), u64::MAX);
    }
}
