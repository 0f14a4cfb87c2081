//! Measured times and their percentiles.

use std::time::{Duration, Instant};

/// The times of all rounds of one measurement.
#[derive(Clone, Debug)]
pub struct Samples {
    pub way: &'static str,
    times: Vec<Duration>,
}

impl Samples {
    pub const fn new(way: &'static str) -> Self {
        Self {
            way,
            times: Vec::new(),
        }
    }

    pub fn push(&mut self, time: Duration) {
        self.times.push(time);
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.times.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// The nearest-rank percentile, a measured time; `None` without samples.
    pub fn percentile(&self, percent: usize) -> Option<Duration> {
        let mut sorted = self.times.clone();
        sorted.sort_unstable();
        sorted
            .get((sorted.len() * percent).div_ceil(100).saturating_sub(1))
            .copied()
    }

    pub fn p50(&self) -> Duration {
        self.percentile(50).unwrap_or_default()
    }
}

/// Times a future.
pub async fn timed<T>(work: impl Future<Output = T>) -> (Duration, T) {
    let started = Instant::now();
    let result = work.await;
    (started.elapsed(), result)
}

pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measured_times() {
        let mut samples = Samples::new("x");
        assert_eq!(samples.percentile(50), None);
        for milliseconds in (1..=10).rev() {
            samples.push(Duration::from_millis(milliseconds));
        }
        let shown: Vec<_> = [50, 95, 99]
            .map(|percent| samples.percentile(percent).expect("samples").as_millis())
            .to_vec();
        assert_eq!(shown, [5, 10, 10]);
    }
}
