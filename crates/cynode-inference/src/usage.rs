//! Tokens that calls used.

use serde::Serialize;

/// Tokens of one answer, as the server counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
}

impl Usage {
    #[must_use]
    pub const fn total(self) -> u64 {
        self.prompt_tokens.saturating_add(self.completion_tokens)
    }
}

/// The sum over several calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UsageCounter {
    pub calls: u64,
    /// Calls whose usage is unknown: the sums don't contain them.
    pub unknown: u64,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
}

impl UsageCounter {
    /// Counts a call.
    pub const fn add(&mut self, usage: Option<Usage>) {
        let (unknown, usage) = match usage {
            Some(usage) => (0, usage),
            None => (
                1,
                Usage {
                    prompt_tokens: 0,
                    completion_tokens: 0,
                },
            ),
        };
        self.merge(Self {
            calls: 1,
            unknown,
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
        });
    }

    /// Adds the calls of another counter.
    pub const fn merge(&mut self, other: Self) {
        self.calls = self.calls.saturating_add(other.calls);
        self.unknown = self.unknown.saturating_add(other.unknown);
        self.prompt_tokens = self.prompt_tokens.saturating_add(other.prompt_tokens);
        self.completion_tokens = self
            .completion_tokens
            .saturating_add(other.completion_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_add_up_and_saturate() {
        let mut counter = UsageCounter::default();
        counter.add(Some(Usage {
            prompt_tokens: 3,
            completion_tokens: u64::MAX - 1,
        }));
        counter.add(None);
        let mut sum = counter;
        sum.merge(counter);
        assert_eq!(
            sum,
            UsageCounter {
                calls: 4,
                unknown: 2,
                prompt_tokens: 6,
                completion_tokens: u64::MAX,
            }
        );
        let usage = Usage {
            prompt_tokens: 1,
            completion_tokens: u64::MAX,
        };
        assert_eq!(usage.total(), u64::MAX);
    }
}
