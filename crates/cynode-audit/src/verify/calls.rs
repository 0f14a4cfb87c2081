//! Checks that each intent has at most one outcome, and each outcome an intent.

use std::collections::{HashMap, HashSet, VecDeque};

use serde_json::Value;
use uuid::Uuid;

use super::problems::{ProblemKind, Problems};
use crate::Link;

/// The number of closed calls to remember. They distinguish a duplicate outcome from an outcome
/// without an intent.
const MAX_RECENT_CALLS: usize = 65_536;

#[derive(Debug, Default)]
struct RecentCalls {
    order: VecDeque<Uuid>,
    calls: HashSet<Uuid>,
}

impl RecentCalls {
    fn insert(&mut self, call: Uuid) {
        if self.calls.insert(call) {
            self.order.push_back(call);
        }
        if self.order.len() > MAX_RECENT_CALLS
            && let Some(oldest) = self.order.pop_front()
        {
            self.calls.remove(&oldest);
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Intents without an outcome, by call. More than one per call is reported separately.
    open: HashMap<Uuid, u64>,
    without_id: u64,
    /// Denied calls: they may have an outcome, and are not open without one.
    denied: RecentCalls,
    closed: RecentCalls,
}

impl Calls {
    pub(super) fn take(
        &mut self,
        cursor: i64,
        link: &Link,
        is_truncated: bool,
        problems: &mut Problems,
    ) {
        let call = link
            .body
            .get("call_id")
            .and_then(Value::as_str)
            .and_then(|text| Uuid::parse_str(text).ok());
        match link.body.get("kind").and_then(Value::as_str) {
            Some("intent") => {
                let is_denied = link.body.get("decision").and_then(Value::as_str) == Some("deny");
                let Some(call) = call else {
                    self.without_id += u64::from(!is_denied);
                    return;
                };
                if self.open.contains_key(&call)
                    || self.denied.calls.contains(&call)
                    || self.closed.calls.contains(&call)
                {
                    problems.add_for_record(
                        ProblemKind::IntentDoubled,
                        cursor,
                        link,
                        format!("call {call} already has an intent"),
                    );
                }
                if is_denied {
                    self.denied.insert(call);
                } else {
                    *self.open.entry(call).or_default() += 1;
                }
            }
            Some("outcome") => {
                let Some(call) = call else {
                    problems.add_for_record(
                        ProblemKind::OutcomeWithoutIntent,
                        cursor,
                        link,
                        "the record has no call id".to_owned(),
                    );
                    return;
                };
                if self.close(call) {
                    self.closed.insert(call);
                } else if self.closed.calls.contains(&call) {
                    problems.add_for_record(
                        ProblemKind::OutcomeDoubled,
                        cursor,
                        link,
                        format!("call {call} already has an outcome"),
                    );
                } else if !is_truncated {
                    problems.add_for_record(
                        ProblemKind::OutcomeWithoutIntent,
                        cursor,
                        link,
                        format!("call {call} has no open intent"),
                    );
                }
            }
            _ => {}
        }
    }

    fn close(&mut self, call: Uuid) -> bool {
        match self.open.get_mut(&call) {
            Some(count) if *count > 1 => *count -= 1,
            Some(_) => drop(self.open.remove(&call)),
            // The stale entry in `order` is harmless.
            None => return self.denied.calls.remove(&call),
        }
        true
    }

    pub(super) fn open(&self) -> u64 {
        self.open.values().sum::<u64>() + self.without_id
    }
}
