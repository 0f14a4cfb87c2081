//! A repeatable source of randomness.

use std::time::{SystemTime, UNIX_EPOCH};

/// A pseudo-random number generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    /// Seeds from `CYNODE_SEED`, or from the clock. Prints the seed so that a run can be repeated.
    #[must_use]
    pub fn seeded() -> Self {
        Self::from_env_or(|| {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(1, |since| since.as_secs() ^ u64::from(since.subsec_nanos()))
        })
    }

    /// Seeds from `CYNODE_SEED`, or with the default.
    #[must_use]
    pub fn with_default_seed(seed: u64) -> Self {
        Self::from_env_or(|| seed)
    }

    fn from_env_or(default: impl FnOnce() -> u64) -> Self {
        let from_env = std::env::var("CYNODE_SEED")
            .ok()
            .and_then(|text| text.parse().ok());
        let seed = from_env.unwrap_or_else(default);
        #[expect(
            clippy::print_stdout,
            reason = "the seed allows repeating a failed run"
        )]
        {
            println!("seed: CYNODE_SEED={seed}");
        }
        Self { seed, state: seed }
    }

    /// The initial seed.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// Derives an independent generator, for a task that runs concurrently with others.
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

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// Shuffles the items.
    #[must_use]
    pub fn shuffled<T, const N: usize>(&mut self, mut items: [T; N]) -> [T; N] {
        for last in (1..N).rev() {
            let other = self.below(last as u64 + 1);
            items.swap(last, usize::try_from(other).unwrap_or(0));
        }
        items
    }
}
