//! The parts of a specification that the worker needs to check the reports of a runner.

use cynode_api::{
    JobId,
    sba::{JobResult, JobSpec, ResultStatus, StepResult},
};

/// A step of the job.
#[derive(Clone, Debug)]
pub(super) struct PlannedStep {
    pub(super) kind: &'static str,
    pub(super) id: Option<String>,
    pub(super) is_idempotent: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) job_id: JobId,
    pub(super) steps: Vec<PlannedStep>,
    pub(super) max_runtime_seconds: u64,
}

impl Plan {
    pub(super) fn of(job: &JobSpec) -> Self {
        let steps = job.steps.iter().map(|step| PlannedStep {
            kind: step.action.name(),
            id: step.id.clone(),
            is_idempotent: step.idempotent,
        });
        Self {
            job_id: job.job_id,
            steps: steps.collect(),
            max_runtime_seconds: job.constraints.max_runtime_seconds,
        }
    }

    /// The step at an index, if the job has so many.
    pub(super) fn step(&self, index: u64) -> Option<&PlannedStep> {
        self.steps.get(usize::try_from(index).ok()?)
    }

    /// Rejects a step's result that belongs to another step.
    pub(super) fn check_step_result(&self, index: u64, result: &StepResult) -> Result<(), String> {
        let Some(step) = self.step(index) else {
            return Err(format!("the job has no step {index}"));
        };
        if result.index != index || result.kind != step.kind || result.id != step.id {
            return Err(format!(
                "the result of step {index} is that of another step"
            ));
        }
        Ok(())
    }

    /// Rejects a result of another job, and a success unless every step succeeded. `succeeded` is the
    /// number of successful steps in the journal, if that is to be checked.
    pub(super) fn check_result(
        &self,
        result: &JobResult,
        succeeded: Option<usize>,
    ) -> Result<(), String> {
        if result.job_id != Some(self.job_id) {
            return Err("the result is that of another job".to_owned());
        }
        match succeeded {
            Some(succeeded)
                if result.status == ResultStatus::Success && succeeded != self.steps.len() =>
            {
                Err(format!(
                    "the result is a success, but only {succeeded} of {} steps succeeded",
                    self.steps.len()
                ))
            }
            _ => Ok(()),
        }
    }
}
