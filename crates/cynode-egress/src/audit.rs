//! What a role records of its operations.
//!
//! Invariant: a record with a decision is durable before the operation has an effect, one with the
//! result before the answer leaves. Neither holds a credential or content, only names, ids and
//! hashes.

use async_trait::async_trait;
use cynode_api::{AuditDecision, AuditResult, CallId, EgressCall, PromotionId, SessionId, TaskId};
use serde_json::{Map, Value};
use uuid::Uuid;

/// Where a role records.
#[async_trait]
pub(crate) trait AuditSink: std::fmt::Debug + Send + Sync {
    /// Returns when the record is durable.
    async fn record(&self, record: RoleRecord) -> Result<(), NotRecorded>;
}

/// The role can't record. The effect must be refused, with `audit_unavailable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the role can't record its decisions")]
pub(crate) struct NotRecorded;

/// As policies name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoleAction {
    Fetch,
    Commit,
    Push,
    PullRequest,
}

impl RoleAction {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Fetch => "git.fetch",
            Self::Commit => "git.commit",
            Self::Push => "git.push",
            Self::PullRequest => "git.pr",
        }
    }
}

/// A decision before an operation, or the result after it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RoleRecord {
    pub(crate) action: RoleAction,
    /// Shared by the records of one operation.
    pub(crate) operation: Uuid,
    pub(crate) task_id: TaskId,
    pub(crate) session_id: Option<SessionId>,
    pub(crate) promotion_id: Option<PromotionId>,
    /// The orchestrator's call on whose behalf this is.
    pub(crate) call_id: Option<CallId>,
    /// The repository's name.
    pub(crate) repository: String,
    pub(crate) outcome: RoleOutcome,
    /// The rules that decided, as `document/rule`.
    pub(crate) rules: Vec<String>,
    /// `reference`, `branch`, `commit`, `url` and others. Numbers are integers.
    pub(crate) detail: Map<String, Value>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RoleOutcome {
    /// The effect follows.
    Allowed,
    /// Refused with an error code, without effect.
    Denied { code: String },
    /// The end of an operation that was allowed.
    Ended {
        result: AuditResult,
        code: Option<String>,
    },
}

impl RoleOutcome {
    pub(crate) const fn decision(&self) -> Option<AuditDecision> {
        match self {
            Self::Allowed => Some(AuditDecision::Allow),
            Self::Denied { .. } => Some(AuditDecision::Deny),
            Self::Ended { .. } => None,
        }
    }
}

impl RoleRecord {
    /// The record of an operation that is permitted and about to begin.
    pub(crate) fn allowed(action: RoleAction, call: &EgressCall, repository: &str) -> Self {
        Self {
            action,
            operation: Uuid::now_v7(),
            task_id: call.task_id,
            session_id: call.session_id,
            promotion_id: call.promotion_id,
            call_id: call.call_id,
            repository: repository.to_owned(),
            outcome: RoleOutcome::Allowed,
            rules: Vec::new(),
            detail: Map::new(),
        }
    }

    /// The same, for an operation that is refused.
    pub(crate) fn denied(
        action: RoleAction,
        call: &EgressCall,
        repository: &str,
        code: &str,
    ) -> Self {
        Self {
            outcome: RoleOutcome::Denied {
                code: code.to_owned(),
            },
            ..Self::allowed(action, call, repository)
        }
    }

    #[must_use]
    pub(crate) fn by_rules(mut self, rules: impl IntoIterator<Item = String>) -> Self {
        self.rules.extend(rules);
        self
    }

    #[must_use]
    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.detail.insert(name.to_owned(), value.into());
        self
    }

    /// The record of this operation's end, with the same detail.
    pub(crate) fn ended(&self, result: AuditResult, code: Option<&str>) -> Self {
        Self {
            outcome: RoleOutcome::Ended {
                result,
                code: code.map(ToOwned::to_owned),
            },
            rules: Vec::new(),
            ..self.clone()
        }
    }
}
