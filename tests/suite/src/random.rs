//! Chance that can be repeated.

use std::time::{SystemTime, UNIX_EPOCH};

/// Numbers that look random and follow from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    /// From `CYNODE_SEED`, or from the clock. The seed is printed, so that a run can be repeated.
    #[must_use]
    pub fn seeded() -> Self {
        Self::chosen(|| {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(1, |since| since.as_secs() ^ u64::from(since.subsec_nanos()))
        })
    }

    /// From `CYNODE_SEED`, or the same in each run.
    #[must_use]
    pub fn usual(seed: u64) -> Self {
        Self::chosen(|| seed)
    }

    fn chosen(otherwise: impl FnOnce() -> u64) -> Self {
        let chosen = std::env::var("CYNODE_SEED")
            .ok()
            .and_then(|text| text.parse().ok());
        let seed = chosen.unwrap_or_else(otherwise);
        #[expect(clippy::print_stdout, reason = "a run that failed is repeated with it")]
        {
            println!("seed: CYNODE_SEED={seed}");
        }
        Self { seed, state: seed }
    }

    /// What it began with.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// Another, which follows from this one and from then on goes its own way: for somebody who runs beside others.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        let seed = self.number();
        Self { seed, state: seed }
    }

    pub fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// The same in another order.
    #[must_use]
    pub fn shuffled<T, const N: usize>(&mut self, mut items: [T; N]) -> [T; N] {
        for last in (1..N).rev() {
            let chosen = self.below(last as u64 + 1);
            items.swap(last, usize::try_from(chosen).unwrap_or(0));
        }
        items
    }
}
