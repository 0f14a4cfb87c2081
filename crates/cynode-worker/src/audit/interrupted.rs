//! Model calls whose process died before they ended.
//!
//! Invariant: each allowed call in the trail gets an end. A process that starts writes the end of
//! the calls that an earlier one left open, from the records it finds on the disk.

use std::collections::HashMap;

use serde_json::Value;
use uuid::Uuid;

use super::decision::{
    AuditedSandbox, DecisionOutcome, ModelCall, ModelUsage, NodeAction, NodeDecision, owner_of,
};

/// Calls that are looked after. A node has fewer requests in flight.
const MAX_OPEN_CALLS: usize = 10_000;
const CALL: &str = "model.call";
const ENDED: &str = "model.ended";

/// Calls without an end, in the records seen so far.
#[derive(Debug, Default)]
pub(super) struct OpenCalls(HashMap<Uuid, Value>);

impl OpenCalls {
    /// Takes the next record of the trail.
    pub(super) fn see(&mut self, body: &Value) {
        let text = |pointer: &str| body.pointer(pointer).and_then(Value::as_str);
        let Some(call) = text("/detail/call").and_then(|call| Uuid::parse_str(call).ok()) else {
            return;
        };
        // A call whose caller gave up has a second record, with its result.
        let is_begun = text("/decision") == Some("allow") && text("/result").is_none();
        match text("/action") {
            Some(CALL) if is_begun && self.0.len() < MAX_OPEN_CALLS => {
                self.0.insert(call, body.clone());
            }
            Some(CALL | ENDED) => drop(self.0.remove(&call)),
            _ => {}
        }
    }

    /// The ends of the calls.
    pub(super) fn into_ends(self) -> impl Iterator<Item = NodeDecision> {
        self.0.into_iter().filter_map(|(call, body)| {
            let text = |pointer: &str| Some(body.pointer(pointer)?.as_str()?.to_owned());
            Some(NodeDecision {
                sandbox: AuditedSandbox {
                    owner: owner_of(&body)?,
                    task_id: text("/task_id")?.parse().ok()?,
                },
                action: NodeAction::ModelOutcome {
                    call: ModelCall {
                        call,
                        model: text("/detail/model")?,
                        endpoint: text("/detail/endpoint")?,
                    },
                    usage: ModelUsage::default(),
                },
                outcome: DecisionOutcome::Failed {
                    code: "interrupted".to_owned(),
                },
            })
        })
    }
}
