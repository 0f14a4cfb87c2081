//! Denials of the proxy while a step of a job ran.
//!
//! Invariants: `ext_net_required` rests on a denial that was recorded during the step that failed,
//! never on what the sandbox says or prints. The first denial of a step is on disk before the
//! sandbox learns of it. Only the step that ran last can have failed, so one record suffices.

use cynode_api::{
    JobId,
    sba::{FailureCode, JobResult, ResultStatus, limits::MAX_MESSAGE_BYTES},
};
use serde::{Deserialize, Serialize};

use super::{
    Jobs,
    files::JobFiles,
    plan::Plan,
    record::JobEntry,
    steps::{Steps, named},
};
use crate::{journal::blocking, proxies::DeniedTarget};

/// The kind of step that runs programs, which may use the network.
const NETWORK_STEP: &str = "run_command";

/// The first denial while a step ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StepDenial {
    step: u64,
    host: String,
    port: u16,
}

#[derive(Debug, Default)]
pub(super) struct StepDenials {
    in_flight: Option<u64>,
    last: Option<StepDenial>,
}

impl StepDenials {
    /// Sets the step that denials concern from now on.
    pub(super) const fn set_step(&mut self, in_flight: Option<u64>) {
        self.in_flight = in_flight;
    }

    /// Returns the denial if it is the first one of its step.
    fn add(&mut self, target: &DeniedTarget) -> Option<StepDenial> {
        let step = self.in_flight?;
        if self.last.as_ref().is_some_and(|last| last.step == step) {
            return None;
        }
        let denial = StepDenial {
            step,
            host: target.host.clone(),
            port: target.port,
        };
        self.last = Some(denial.clone());
        Some(denial)
    }
}

impl Jobs {
    /// Records that the proxy denied something to a job.
    pub(crate) async fn denied(&self, id: JobId, target: &DeniedTarget) {
        let Ok(entry) = self.get(id) else { return };
        // Others wait until the first denial of the step is on disk.
        let _writing = entry.denying.lock().await;
        let Some(denial) = entry.denials.lock().add(target) else {
            return;
        };
        let files = self.files(id);
        if let Err(error) = blocking(move || files.write_denial(&denial)).await {
            tracing::error!(job_id = %id, %error, "Failed to record a denial of a job's step.");
        }
    }
}

impl JobEntry {
    fn last_denial(&self, files: &JobFiles) -> Option<StepDenial> {
        let known = self.denials.lock().last.clone();
        known.or_else(|| files.denial().ok().flatten())
    }

    /// Says in the result of a job that its last step failed for lack of network access, if the
    /// proxy denied it some.
    pub(super) fn explain_failure(
        &self,
        result: &mut JobResult,
        plan: &Plan,
        steps: &Steps,
        files: &JobFiles,
    ) {
        let has_failed = result.status == ResultStatus::Failure
            && result.failure_code == Some(FailureCode::StepFailed)
            && (steps.succeeded() as u64) < steps.ended();
        let Some(failed) = steps.ended().checked_sub(1).filter(|_| has_failed) else {
            return;
        };
        let runs_programs = plan
            .step(failed)
            .is_some_and(|step| step.kind == NETWORK_STEP);
        let denial = self.last_denial(files);
        if let Some(denial) = denial.filter(|denial| runs_programs && denial.step == failed) {
            explain(result, &denial);
        }
    }
}

fn explain(result: &mut JobResult, denial: &StepDenial) {
    let said = result.failure_message.take().unwrap_or_default();
    let mut message = format!(
        "the proxy denied {}:{} while {} ran, and the step failed: {said}",
        denial.host,
        denial.port,
        named(denial.step)
    );
    message.truncate(message.floor_char_boundary(MAX_MESSAGE_BYTES));
    result.failure_code = Some(FailureCode::ExtNetRequired);
    result.failure_message = Some(message);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(host: &str) -> DeniedTarget {
        DeniedTarget {
            host: host.to_owned(),
            port: 443,
            rule: "rule",
        }
    }

    #[test]
    fn the_first_denial_of_a_step_is_kept_and_those_between_steps_are_not() {
        let mut denials = StepDenials::default();
        assert_eq!(denials.add(&target("early")), None);
        denials.set_step(Some(0));
        let first = denials.add(&target("a")).expect("the first");
        assert_eq!((first.step, first.host.as_str()), (0, "a"));
        assert_eq!(denials.add(&target("b")), None);
        denials.set_step(None);
        assert_eq!(denials.add(&target("between")), None);
        denials.set_step(Some(1));
        let second = denials.add(&target("c")).expect("of the next step");
        assert_eq!((second.step, second.host.as_str()), (1, "c"));
    }

    #[test]
    fn a_message_names_the_destination_and_stays_within_its_bound() {
        let long = "ä".repeat(MAX_MESSAGE_BYTES / 2);
        for (said, shown) in [("exit code 7", "exit code 7"), (long.as_str(), "ää")] {
            let mut result = JobResult::failed(None, FailureCode::StepFailed, said);
            let denial = StepDenial {
                step: 3,
                host: "example.com".to_owned(),
                port: 443,
            };
            explain(&mut result, &denial);
            assert_eq!(result.failure_code, Some(FailureCode::ExtNetRequired));
            let message = result.failure_message.expect("a message");
            assert!(message.starts_with("the proxy denied example.com:443 while step 4 ran"));
            assert!(message.contains(shown) && message.len() <= MAX_MESSAGE_BYTES);
        }
    }
}
