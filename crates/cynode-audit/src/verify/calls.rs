//! Each intent has at most one outcome, and each outcome an intent.

use std::collections::{HashMap, HashSet, VecDeque};

use serde_json::Value;
use uuid::Uuid;

use super::problems::{Problems, What};
use crate::Link;

/// How many closed calls are remembered, to tell an outcome that came twice from one that was never asked for.
const MAX_RECENT: usize = 65_536;

#[derive(Debug, Default)]
struct Recent {
    order: VecDeque<Uuid>,
    calls: HashSet<Uuid>,
}

impl Recent {
    fn insert(&mut self, call: Uuid) {
        if self.calls.insert(call) {
            self.order.push_back(call);
        }
        if self.order.len() > MAX_RECENT
            && let Some(oldest) = self.order.pop_front()
        {
            self.calls.remove(&oldest);
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Calls {
    /// How many intents of each call have no outcome yet. More than one is a problem of its own.
    open: HashMap<Uuid, u64>,
    nameless: u64,
    /// A denied call may have an outcome, and is not open without one.
    denied: Recent,
    closed: Recent,
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
                    self.nameless += u64::from(!is_denied);
                    return;
                };
                if self.open.contains_key(&call)
                    || self.denied.calls.contains(&call)
                    || self.closed.calls.contains(&call)
                {
                    problems.of_record(
                        What::IntentDoubled,
                        cursor,
                        link,
                        format!("call {call} has another intent"),
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
                    problems.of_record(
                        What::OutcomeWithoutIntent,
                        cursor,
                        link,
                        "it names no call".to_owned(),
                    );
                    return;
                };
                if self.close(call) {
                    self.closed.insert(call);
                } else if self.closed.calls.contains(&call) {
                    problems.of_record(
                        What::OutcomeDoubled,
                        cursor,
                        link,
                        format!("call {call} has its outcome already"),
                    );
                } else if !is_truncated {
                    problems.of_record(
                        What::OutcomeWithoutIntent,
                        cursor,
                        link,
                        format!("call {call} has no open intent before it"),
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
            // Its place in the order of the recent ones stays; there it harms nothing.
            None => return self.denied.calls.remove(&call),
        }
        true
    }

    pub(super) fn open(&self) -> u64 {
        self.open.values().sum::<u64>() + self.nameless
    }
}
