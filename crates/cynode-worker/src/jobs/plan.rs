//! What the worker knows of a specification: enough to judge what the runner reports.
//!
//! The steps of an agent's job are its tool calls, which nobody knows before. Such a job therefore
//! has any number of steps within the bounds of a result, and its success depends on the criteria
//! that the job has a check for.

use cynode_api::{
    JobId,
    sba::{
        Criterion, JobResult, JobSpec, ResultStatus, StepResult, StepStatus, Verifier,
        limits::MAX_STEPS,
    },
};

use super::steps::named;

/// The types of an agent's steps.
const AGENT_TOOLS: [&str; 6] = [
    "run_command",
    "write_file",
    "read_file",
    "apply_unified_diff",
    "list_tree",
    "search",
];
/// The type of an agent's step that was interrupted: its start does not tell what it is.
const TOOL_CALL: &str = "tool_call";

/// A step of the job.
#[derive(Clone, Debug)]
pub(super) struct PlannedStep {
    pub(super) kind: &'static str,
    pub(super) id: Option<String>,
    pub(super) is_idempotent: bool,
}

/// Any step of an agent. It is never run twice.
static AGENT_STEP: PlannedStep = PlannedStep {
    kind: TOOL_CALL,
    id: None,
    is_idempotent: false,
};

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) job_id: JobId,
    pub(super) steps: Vec<PlannedStep>,
    /// An agent makes the steps.
    pub(super) is_agents: bool,
    /// The positions of criteria that the job has a check for.
    checked_criteria: Vec<u64>,
    pub(super) max_runtime_seconds: u64,
}

impl Plan {
    pub(super) fn of(job: &JobSpec) -> Self {
        let steps = job.steps.iter().map(|step| PlannedStep {
            kind: step.action.name(),
            id: step.id.clone(),
            is_idempotent: step.idempotent,
        });
        let criteria = job
            .context
            .iter()
            .flat_map(|context| &context.acceptance_criteria);
        Self {
            job_id: job.job_id,
            steps: steps.collect(),
            is_agents: job.steps.is_empty(),
            checked_criteria: (0..)
                .zip(criteria)
                .filter(|(_, criterion)| matches!(criterion, Criterion::Checked(_)))
                .map(|(index, _)| index)
                .collect(),
            max_runtime_seconds: job.constraints.max_runtime_seconds,
        }
    }

    /// The number of steps, if it is known before.
    pub(super) fn count(&self) -> Option<u64> {
        (!self.is_agents).then_some(self.steps.len() as u64)
    }

    /// The step at a position, if the job can have one there.
    pub(super) fn step(&self, index: u64) -> Option<&PlannedStep> {
        let index = usize::try_from(index).ok()?;
        if self.is_agents {
            return (index < MAX_STEPS).then_some(&AGENT_STEP);
        }
        self.steps.get(index)
    }

    /// Whether every step of a job has succeeded, so that its success is beyond doubt. That of an
    /// agent's job never is.
    pub(super) fn is_complete(&self, succeeded: usize) -> bool {
        !self.is_agents && succeeded == self.steps.len()
    }

    /// Rejects a step's result that belongs to another step.
    pub(super) fn check_step_result(&self, index: u64, result: &StepResult) -> Result<(), String> {
        let Some(step) = self.step(index) else {
            return Err(format!("the job has no {}", named(index)));
        };
        let is_kind = if self.is_agents {
            AGENT_TOOLS.contains(&result.kind.as_str())
                || (result.kind == TOOL_CALL && result.status == StepStatus::Interrupted)
        } else {
            result.kind == step.kind
        };
        if result.index != index || !is_kind || result.id != step.id {
            return Err(format!(
                "the result of {} is that of another step",
                named(index)
            ));
        }
        Ok(())
    }

    /// Rejects a result of another job, and a success without the success of every step, or of
    /// every check. `succeeded` is the number of steps that the journal has as successful.
    pub(super) fn check_result(
        &self,
        result: &JobResult,
        succeeded: Option<usize>,
    ) -> Result<(), String> {
        if result.job_id != Some(self.job_id) {
            return Err("the result is that of another job".to_owned());
        }
        if result.status != ResultStatus::Success {
            return Ok(());
        }
        if self.is_agents {
            return self.check_criteria(result);
        }
        match succeeded {
            Some(succeeded) if succeeded != self.steps.len() => Err(format!(
                "the result is a success, but only {succeeded} of {} steps succeeded",
                self.steps.len()
            )),
            _ => Ok(()),
        }
    }

    fn check_criteria(&self, result: &JobResult) -> Result<(), String> {
        let is_met = |index: &u64| {
            result.criteria.iter().any(|criterion| {
                criterion.index == *index
                    && criterion.is_met
                    && criterion.verified_by == Verifier::Job
            })
        };
        match self.checked_criteria.iter().find(|index| !is_met(index)) {
            Some(index) => Err(format!(
                "the result is a success, but the check of criterion {index} did not succeed"
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{TaskId, sba::FailureCode};
    use serde_json::json;

    use super::*;

    fn agents_plan() -> Plan {
        let job = json!({
            "protocol_version": "1.0",
            "job_id": JobId::generate(),
            "task_id": TaskId::generate(),
            "constraints": {"max_runtime_seconds": 1, "max_output_bytes": 1},
            "inference": {"allowed_models": ["m"]},
            "context": {"acceptance_criteria": ["a", {"text": "b", "check": {"argv": ["true"]}}]},
            "steps": [],
        });
        Plan::of(&JobSpec::from_value(job).expect("valid"))
    }

    fn success(plan: &Plan, criteria: &serde_json::Value) -> JobResult {
        let json = json!({
            "protocol_version": "1.0", "job_id": plan.job_id, "status": "success", "steps": [],
            "artifacts": [], "failure_code": null, "failure_message": null, "criteria": criteria,
        });
        JobResult::parse(json.to_string().as_bytes()).expect("valid")
    }

    #[test]
    fn an_agents_success_needs_every_check_of_the_job() {
        let plan = agents_plan();
        let check = |criteria| plan.check_result(&success(&plan, &criteria), Some(0));
        let criterion = |index: u64, is_met: bool, by: &str| json!([{"index": index, "is_met": is_met, "verified_by": by}]);
        assert!(check(criterion(1, true, "job")).is_ok());
        assert!(check(criterion(1, true, "model")).is_err());
        assert!(check(criterion(1, false, "job")).is_err());
        assert!(check(criterion(0, true, "job")).is_err());
        assert!(check(json!([])).is_err());
        let failure = JobResult::failed(Some(plan.job_id), FailureCode::NoProgress, "x");
        assert!(plan.check_result(&failure, Some(0)).is_ok());
    }

    #[test]
    fn an_agents_steps_are_its_tools_and_never_complete_the_job() {
        let plan = agents_plan();
        let check = |index: u64, kind: &str, status: &str| {
            let json = json!({"index": index, "type": kind, "status": status}).to_string();
            plan.check_step_result(3, &StepResult::parse(json.as_bytes()).expect("valid"))
        };
        assert!(check(3, "search", "success").is_ok());
        assert!(check(3, "run_command", "failure").is_ok());
        assert!(check(3, "tool_call", "interrupted").is_ok());
        assert!(check(3, "tool_call", "success").is_err());
        assert!(check(3, "rm", "success").is_err());
        assert!(check(2, "search", "success").is_err());
        assert!(!plan.is_complete(0));
        assert!(plan.step(MAX_STEPS as u64).is_none() && plan.count().is_none());
    }
}
