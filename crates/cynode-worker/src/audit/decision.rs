//! What a node decides by itself, as it is recorded.
//!
//! Invariant: a decision names its sandbox and what was decided, never content. Prompts, responses,
//! bodies and headers have no place in these types.

use std::time::Duration;

use cynode_api::{JobId, SessionId, TaskId};
use uuid::Uuid;

use crate::journal::SessionRecord;

/// The sandbox that a decision concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AuditedSandbox {
    pub owner: SandboxOwner,
    pub task_id: TaskId,
}

/// The session or job that owns a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SandboxOwner {
    Session(SessionId),
    Job(JobId),
}

impl From<&SessionRecord> for AuditedSandbox {
    fn from(record: &SessionRecord) -> Self {
        Self {
            owner: record.job_id.map_or(
                SandboxOwner::Session(record.session.session_id),
                SandboxOwner::Job,
            ),
            task_id: record.session.task_id,
        }
    }
}

/// One decision of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeDecision {
    pub sandbox: AuditedSandbox,
    pub action: NodeAction,
    pub outcome: DecisionOutcome,
}

/// What was decided or done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeAction {
    /// A model call, recorded before it leaves the node or when it is refused.
    ModelRequest(ModelCall),
    /// The end of a model call that was allowed, with the same `call`.
    ModelOutcome { call: ModelCall, usage: ModelUsage },
    /// The proxy opened a connection for the sandbox.
    ProxyAllowed(ProxyTarget),
    /// The proxy refused a connection.
    ProxyDenied(ProxyTarget),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCall {
    /// Shared by the request and its outcome.
    pub call: Uuid,
    pub model: String,
    /// The path that the sandbox called: `/v1/chat/completions`.
    pub endpoint: String,
}

/// What a model call used. Counts that the server did not report are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelUsage {
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    pub duration: Duration,
    /// The HTTP status of the model server; absent if it did not answer.
    pub status: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyTarget {
    /// As the sandbox named it.
    pub host: String,
    pub port: u16,
    /// The rule that decided: `default/deny-all`.
    pub rule: String,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecisionOutcome {
    /// Allowed; the effect follows.
    Allowed,
    /// Refused with an error code, without effect.
    Denied { code: String },
    /// The effect succeeded.
    Done,
    /// The effect failed with an error code.
    Failed { code: String },
}
