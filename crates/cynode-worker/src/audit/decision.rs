//! What a node decides by itself, as it is recorded.
//!
//! Invariant: a decision names its sandbox and what was decided, never content. Prompts, responses,
//! bodies and headers have no place in these types.

use std::time::Duration;

use cynode_api::{
    AuditBody, AuditDecision, AuditKind, AuditResult, AuditSubject, JobId, NodeId, SessionId,
    TaskId,
};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::journal::SessionRecord;

/// The length of a name that a sandbox chose, in a record, in characters.
const MAX_NAME_CHARACTERS: usize = 256;

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
        let session = SandboxOwner::Session(record.session.session_id);
        Self {
            owner: record.job_id.map_or(session, SandboxOwner::Job),
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

/// Decisions with equal keys are repeats of one another.
pub(super) type RepeatKey = (String, Option<String>, Vec<String>, Option<String>);

impl NodeDecision {
    /// The record's body.
    pub(super) fn body(&self, node_id: NodeId) -> AuditBody {
        let mut body = self.sandbox.body(node_id, self.action.name());
        match &self.action {
            NodeAction::ModelRequest(call) => call.describe(&mut body),
            NodeAction::ModelOutcome { call, usage } => {
                call.describe(&mut body);
                body.status = usage.status;
                let duration = u64::try_from(usage.duration.as_millis()).unwrap_or(u64::MAX);
                let facts = [
                    ("prompt_tokens", usage.prompt_tokens),
                    ("completion_tokens", usage.completion_tokens),
                    ("duration_ms", Some(duration)),
                ];
                let facts = facts
                    .into_iter()
                    .filter_map(|(name, value)| Some((name.to_owned(), json!(value?))));
                body.detail.extend(facts);
            }
            NodeAction::ProxyAllowed(target) | NodeAction::ProxyDenied(target) => {
                let host = bounded(&target.host);
                body.resource = Some(format!("{host}:{}", target.port));
                body.rules = vec![bounded(&target.rule)];
                body.detail = [
                    ("host".to_owned(), json!(host)),
                    ("port".to_owned(), json!(target.port)),
                ]
                .into_iter()
                .collect();
            }
        }
        match &self.outcome {
            DecisionOutcome::Allowed => body.decision = Some(AuditDecision::Allow),
            DecisionOutcome::Denied { code } => {
                body.decision = Some(AuditDecision::Deny);
                body.result = Some(AuditResult::Refused);
                body.code = Some(bounded(code));
            }
            DecisionOutcome::Done => body.result = Some(AuditResult::Done),
            DecisionOutcome::Failed { code } => {
                body.result = Some(AuditResult::Failed);
                body.code = Some(bounded(code));
            }
        }
        body
    }

    /// The key under which repeats are counted. Effects are recorded one by one: only denials have
    /// a key.
    pub(super) fn repeat_key(&self, body: &AuditBody) -> Option<RepeatKey> {
        let DecisionOutcome::Denied { code } = &self.outcome else {
            return None;
        };
        let endpoint = match &self.action {
            NodeAction::ModelRequest(call) => Some(bounded(&call.endpoint)),
            _ => Some(bounded(code)),
        };
        Some((
            self.action.name().to_owned(),
            body.resource.clone(),
            body.rules.clone(),
            endpoint,
        ))
    }

    /// Whether the record may be dropped without changing what happens: a denial has no effect, and
    /// an outcome is already past.
    pub(super) const fn permits_effect(&self) -> bool {
        matches!(self.outcome, DecisionOutcome::Allowed)
    }
}

impl NodeAction {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::ModelRequest(_) => "model.call",
            Self::ModelOutcome { .. } => "model.ended",
            Self::ProxyAllowed(_) | Self::ProxyDenied(_) => "proxy.connect",
        }
    }
}

impl ModelCall {
    fn describe(&self, body: &mut AuditBody) {
        let model = bounded(&self.model);
        body.resource = Some(format!("model:{model}"));
        body.detail = [
            ("call".to_owned(), Value::from(self.call.to_string())),
            ("model".to_owned(), json!(model)),
            ("endpoint".to_owned(), json!(bounded(&self.endpoint))),
        ]
        .into_iter()
        .collect();
    }
}

impl AuditedSandbox {
    /// A record of this sandbox.
    pub(super) fn body(&self, node_id: NodeId, action: &str) -> AuditBody {
        let mut body = AuditBody::new(AuditKind::Event, action);
        body.subject = Some(AuditSubject {
            kind: "sandbox".to_owned(),
            node_id: Some(node_id),
            ..AuditSubject::default()
        });
        body.task_id = Some(self.task_id);
        match self.owner {
            SandboxOwner::Session(id) => body.session_id = Some(id),
            SandboxOwner::Job(id) => body.job_id = Some(id),
        }
        body
    }
}

/// A name that a sandbox chose, cut to a bounded length.
fn bounded(name: &str) -> String {
    let mut kept: String = name.chars().take(MAX_NAME_CHARACTERS).collect();
    if kept.len() < name.len() {
        kept.push('…');
    }
    kept
}

/// The sandbox that a stored record names.
pub(super) fn owner_of(body: &Value) -> Option<SandboxOwner> {
    let id = |name: &str| body.get(name).and_then(Value::as_str);
    let session = || Some(SandboxOwner::Session(id("session_id")?.parse().ok()?));
    let job = || Some(SandboxOwner::Job(id("job_id")?.parse().ok()?));
    session().or_else(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_sandbox_are_bounded_and_content_has_no_place() {
        let decision = NodeDecision {
            sandbox: AuditedSandbox {
                owner: SandboxOwner::Job(JobId::generate()),
                task_id: TaskId::generate(),
            },
            action: NodeAction::ModelRequest(ModelCall {
                call: Uuid::now_v7(),
                model: "ü".repeat(100_000),
                endpoint: "/v1/chat/completions".repeat(10_000),
            }),
            outcome: DecisionOutcome::Denied {
                code: "model_not_allowed".to_owned(),
            },
        };
        let body = serde_json::to_value(decision.body(NodeId::generate())).expect("serializes");
        let size = body.to_string().len();
        assert!(
            size < cynode_api::node_audit_limits::MAX_BODY_BYTES / 2,
            "{size}"
        );
        assert_eq!(owner_of(&body), Some(decision.sandbox.owner));
    }

    #[test]
    fn jobs_and_sessions_own_their_records() {
        for owner in [
            SandboxOwner::Job(JobId::generate()),
            SandboxOwner::Session(SessionId::generate()),
        ] {
            let sandbox = AuditedSandbox {
                owner,
                task_id: TaskId::generate(),
            };
            let body = sandbox.body(NodeId::generate(), "proxy.connect");
            let body = serde_json::to_value(body).expect("serializes");
            assert_eq!(owner_of(&body), Some(owner));
        }
        assert_eq!(owner_of(&json!({"kind": "stream"})), None);
    }
}
