//! The outcome of a job: its final state, with the error, exit and output.

use cynode_api::{
    ErrorCode, ExecExit, ExecResult, JobError, JobOutput, JobState, Reporter,
    sba::{FailureCode, ResultStatus},
};
use cynode_service::ApiError;

use super::{artifacts::ArtifactList, files::Verdict};

/// Error codes that only jobs use, besides those of the API and of results.
pub(super) const RUNNER_INTERRUPTED: &str = "runner_interrupted";
pub(super) const OOM_KILLED: &str = "oom_killed";
pub(super) const NODE_STOPPED: &str = "node_stopped";

/// Longest error detail of a job, in characters; its result has the full message.
const MAX_DETAIL_CHARACTERS: usize = 1_000;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JobOutcome {
    pub(super) state: JobState,
    pub(super) exit_code: Option<i32>,
    pub(super) signal: Option<String>,
    pub(super) output: JobOutput,
    pub(super) error: Option<JobError>,
    pub(super) reported_by: Reporter,
    pub(super) artifacts: ArtifactList,
    /// The outcome stems from a stored result. If not, the worker writes a result with this outcome
    /// for a job that has a specification.
    pub(super) has_result: bool,
}

fn problem(code: &str, detail: impl Into<String>) -> JobError {
    JobError {
        code: code.to_owned(),
        detail: detail.into(),
    }
}

/// The error of a job that is canceled because its node shuts down.
pub(super) fn node_stopped() -> JobError {
    problem(
        NODE_STOPPED,
        "the node was told to stop and to end its sandboxes",
    )
}

impl JobOutcome {
    fn without_exit(state: JobState, error: Option<JobError>) -> Self {
        Self {
            state,
            exit_code: None,
            signal: None,
            output: JobOutput::default(),
            error,
            reported_by: Reporter::Worker,
            artifacts: ArtifactList::default(),
            has_result: false,
        }
    }

    /// The command could not be started.
    pub(crate) fn failed(error: &ApiError) -> Self {
        let errno = error
            .extensions
            .get("errno")
            .and_then(|errno| errno.as_str());
        let detail = errno.map_or_else(
            || error.detail.clone(),
            |errno| format!("{errno}: {}", error.detail),
        );
        Self::without_exit(JobState::Failed, Some(problem(&error.code, detail)))
    }

    /// The worker lost track of the command, and can't tell how far it came.
    pub(crate) fn interrupted(detail: impl Into<String>) -> Self {
        Self::without_exit(JobState::Failed, Some(problem(RUNNER_INTERRUPTED, detail)))
    }

    pub(crate) fn canceled() -> Self {
        Self::without_exit(JobState::Canceled, None)
    }

    /// The deadline passed, and no runner reported a result.
    pub(super) fn timed_out(detail: impl Into<String>) -> Self {
        let error = problem(FailureCode::Timeout.as_str(), detail);
        Self::without_exit(JobState::Timeout, Some(error))
    }

    /// The runner violated its protocol, or its result is invalid.
    pub(super) fn broken(detail: impl Into<String>) -> Self {
        let error = problem(FailureCode::Internal.as_str(), detail);
        Self::without_exit(JobState::Failed, Some(error))
    }

    /// The outcome that follows from a stored result.
    pub(super) fn from_verdict(verdict: Verdict, reported_by: Reporter) -> Self {
        let state = match verdict.status {
            ResultStatus::Success => JobState::Completed,
            ResultStatus::Failure => JobState::Failed,
            ResultStatus::Timeout => JobState::Timeout,
        };
        let error = verdict.failure_code.map(|code| {
            let message = verdict.failure_message.unwrap_or_default();
            let detail: String = message.chars().take(MAX_DETAIL_CHARACTERS).collect();
            problem(&code, detail)
        });
        Self {
            reported_by,
            has_result: true,
            ..Self::without_exit(state, error)
        }
    }

    /// Adds the exit and the output of the command or runner.
    pub(super) fn with_exec(self, result: ExecResult) -> Self {
        Self {
            exit_code: result.exit.exit_code,
            signal: result.exit.signal,
            output: JobOutput {
                stdout: result.stdout,
                stderr: result.stderr,
                encoding: result.encoding,
                truncated: result.truncated,
                truncated_by: None,
            },
            ..self
        }
    }

    /// The outcome of a command, from its exit or the error of its start.
    pub(crate) fn from_exec(result: Result<ExecResult, ApiError>) -> Self {
        match result {
            Ok(result) => Self::from_exit(&result.exit).with_exec(result),
            Err(error) if error.is(ErrorCode::AgentUnavailable) => {
                Self::interrupted(error.into_problem().detail)
            }
            Err(error) => Self::failed(&error),
        }
    }

    fn from_exit(exit: &ExecExit) -> Self {
        if exit.lost {
            Self::interrupted("the sandbox was lost before the command's exit was observed")
        } else if exit.timed_out {
            Self::without_exit(JobState::Timeout, None)
        } else if exit.oom_killed {
            let error = problem(OOM_KILLED, "the sandbox's memory limit was reached");
            Self::without_exit(JobState::Failed, Some(error))
        } else if exit.exit_code == Some(0) {
            Self::without_exit(JobState::Completed, None)
        } else {
            Self::without_exit(JobState::Failed, None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_verdict_maps_to_one_job_state() {
        let verdict = |status, code: Option<&str>| Verdict {
            status,
            failure_code: code.map(str::to_owned),
            failure_message: code.map(|_| "m".repeat(5_000)),
        };
        for (verdict, state, code) in [
            (
                verdict(ResultStatus::Success, None),
                JobState::Completed,
                None,
            ),
            (
                verdict(ResultStatus::Failure, Some("step_failed")),
                JobState::Failed,
                Some("step_failed"),
            ),
            (
                verdict(ResultStatus::Timeout, Some("timeout")),
                JobState::Timeout,
                Some("timeout"),
            ),
        ] {
            let outcome = JobOutcome::from_verdict(verdict, Reporter::File);
            let error = outcome.error;
            assert_eq!(
                (
                    outcome.state,
                    error.as_ref().map(|error| error.code.as_str())
                ),
                (state, code)
            );
            assert_eq!(outcome.reported_by, Reporter::File);
            assert!(error.is_none_or(|error| error.detail.len() == MAX_DETAIL_CHARACTERS));
        }
    }
}
