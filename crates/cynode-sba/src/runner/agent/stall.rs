//! Notices a model that makes no progress.
//!
//! A turn is stale if everything in it was there before: the same calls with the same results, or
//! no call at all. What a program counts or times does not make a result a new one, so digits are
//! not compared.

use std::collections::BTreeSet;

use sha2::{Digest as _, Sha256};

/// Stale turns in a row.
pub(super) const MAX_STALE_TURNS: u32 = 6;

#[derive(Debug, Default)]
pub(super) struct Stall {
    seen: BTreeSet<[u8; 32]>,
    stale_turns: u32,
    is_new: bool,
}

impl Stall {
    /// Notes a call and its result.
    pub(super) fn note(&mut self, name: &str, arguments: &str, result: &str) {
        let mut hasher = Sha256::new();
        for text in [name, arguments] {
            hasher.update(text.as_bytes());
            hasher.update([0xff]);
        }
        let letters = result.bytes().filter(|byte| !byte.is_ascii_digit());
        hasher.update(letters.collect::<Vec<u8>>());
        self.is_new |= self.seen.insert(hasher.finalize().into());
    }

    /// Ends a turn; true if there were too many stale ones.
    pub(super) fn end_turn(&mut self) -> bool {
        self.stale_turns = if std::mem::take(&mut self.is_new) {
            0
        } else {
            self.stale_turns + 1
        };
        self.stale_turns >= MAX_STALE_TURNS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_that_repeat_others_are_stale_whatever_their_order() {
        let mut stall = Stall::default();
        let calls = [("read_file", "a"), ("run_command", "b")];
        for (turn, (name, arguments)) in calls.iter().cycle().take(7).enumerate() {
            stall.note(name, arguments, &format!("took {turn} ms"));
            assert!(!stall.end_turn(), "{turn}");
        }
        stall.note("read_file", "a", "took 7 ms");
        assert!(stall.end_turn());
    }

    #[test]
    fn a_change_before_the_same_check_is_progress() {
        let mut stall = Stall::default();
        for edit in 0..100 {
            stall.note("write_file", &format!("edit {edit}"), "ok");
            assert!(!stall.end_turn());
            stall.note("run_command", "make test", "failed");
            assert!(!stall.end_turn());
        }
        for turn in 2..=MAX_STALE_TURNS {
            assert_eq!(stall.end_turn(), turn == MAX_STALE_TURNS);
        }
    }
}
