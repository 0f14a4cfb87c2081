//! Long runs: `make soak`. Each run prints its seed; `CYNODE_SEED` repeats it, and
//! `CYNODE_SOAK_SECONDS` changes the duration.

mod bombs;
mod mix;
mod tenants;

use std::{collections::BTreeMap, time::Duration};

/// The duration of a run.
fn length(seconds: u64) -> Duration {
    Duration::from_secs(
        std::env::var("CYNODE_SOAK_SECONDS")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(seconds),
    )
}

/// The number of times that each step was done.
#[derive(Debug, Default)]
struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    fn add(&mut self, other: &Self) {
        for (what, times) in &other.0 {
            *self.0.entry(what).or_default() += times;
        }
    }

    fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, (what, times)) in self.0.iter().enumerate() {
            write!(f, "{}{what} {times}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
