//! Delays between attempts of a request, or of starting a role.

use std::time::Duration;

use backon::ExponentialBuilder;

const FIRST_DELAY: Duration = Duration::from_millis(200);

/// Delays that double up to `max_delay`, without an end: callers bound retries by a deadline.
pub const fn backoff(max_delay: Duration) -> ExponentialBuilder {
    ExponentialBuilder::new()
        .with_min_delay(FIRST_DELAY)
        .with_max_delay(max_delay)
        .without_max_times()
}
