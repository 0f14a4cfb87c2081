//! Refusals, and the one place that records them: for calls of the user API, and for tool calls
//! that never became one.

use cynode_api::{AuditBody, AuditDecision, AuditKind, AuditResult, ErrorCode};
use cynode_policy::{Action, Decision};
use cynode_service::ApiError;
use serde_json::Map;

use super::{Stage, answer::Outcome};
use crate::Orchestrator;

/// The stage at which a call was refused, and the error that answers it.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) stage: Stage,
    pub(crate) error: ApiError,
}

impl Refusal {
    /// Records the refusal of a user API call. Fails if the record can't be written; the caller
    /// then gets that error instead.
    pub(super) async fn record(
        &self,
        orchestrator: &Orchestrator,
        mut intent: AuditBody,
    ) -> Result<(), ApiError> {
        if self.stage == Stage::Secrets {
            count_secret();
        }
        intent.stage = Some(self.stage.as_str().to_owned());
        let is_denial = match self.stage {
            Stage::AgentType | Stage::Secrets | Stage::Task => true,
            Stage::Resource => intent.decision.is_none(),
            _ => false,
        };
        if is_denial {
            intent.decision = Some(AuditDecision::Deny);
        }
        let outcome = Outcome {
            status: self.error.status,
            code: Some(self.error.code.clone()),
            rules: intent.rules.clone(),
            detail: Map::new(),
        };
        let outcome = outcome.record(intent.clone());
        Ok(orchestrator.audit.write_all(vec![intent, outcome]).await?)
    }

    /// Records a tool call that was refused before it became a call of the user API.
    pub(crate) async fn record_tool_call(
        &self,
        orchestrator: &Orchestrator,
        mut intent: AuditBody,
    ) -> Result<(), ApiError> {
        intent.decision = (self.stage != Stage::Run).then_some(AuditDecision::Deny);
        intent.stage = Some(self.stage.as_str().to_owned());
        let outcome = AuditBody {
            kind: AuditKind::Outcome,
            result: Some(AuditResult::from_status(self.error.status)),
            status: Some(self.error.status),
            code: Some(self.error.code.clone()),
            ..intent.clone()
        };
        Ok(orchestrator.audit.write_all(vec![intent, outcome]).await?)
    }
}

/// The error for a call that policies deny.
pub(super) fn denied(action: Action, decision: &Decision) -> ApiError {
    let detail = match (decision.rules.as_slice(), decision.errors.as_slice()) {
        ([], []) => format!("no rule allows {} here", action.as_str()),
        (_, [error, ..]) => format!(
            "{} is denied because a rule could not be evaluated: {error}",
            action.as_str()
        ),
        (rules, []) => format!("{} is forbidden by {}", action.as_str(), rules.join(", ")),
    };
    let error = ApiError::new(ErrorCode::DeniedByPolicy, detail);
    error.with("rules", decision.rules.clone())
}

pub(super) fn count_secret() {
    metrics::counter!("cynode_secrets_refused_total").increment(1);
}
