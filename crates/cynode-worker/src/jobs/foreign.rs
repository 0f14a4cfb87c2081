//! Runs a specification with a custom runner: a command of the caller, usually in the caller's own
//! image.
//!
//! Invariant: the worker itself sees only how such a runner exits. What it did is in a report by the
//! callback or else in a file, and every process of the job can make either. So the job says that
//! the sandbox or a file reported it, and it is completed only if the worker saw the runner exit
//! with 0.

use std::{sync::Arc, time::Duration};

use cynode_api::{
    ExecExit, JobRun, Reporter,
    sba::{JobResult, ResultStatus},
};
use cynode_service::compute;

use super::{
    Jobs,
    callback::OpenCallback,
    directory::{self, ClaimedResult},
    drive::Specification,
    outcome::JobOutcome,
    plan::Plan,
    record::JobEntry,
};
use crate::{journal::blocking, sessions::SessionEntry as Sandbox};

/// Time beyond the job's limit, in which a runner that enforces the limit can report the timeout.
const DEADLINE_SLACK_SECONDS: u64 = 10;
/// Attempts to read the result file while the agent does not answer.
const READ_ATTEMPTS: u32 = 3;
const RETRY_DELAY: Duration = Duration::from_secs(1);

impl Jobs {
    pub(super) async fn run_custom_runner(
        self: &Arc<Self>,
        entry: &Arc<JobEntry>,
        run: &JobRun,
        sandbox: &Arc<Sandbox>,
        specification: Specification,
    ) -> JobOutcome {
        let plan = Plan::of(&specification.job);
        let most = plan.max_runtime_seconds + DEADLINE_SLACK_SECONDS;
        let requested = run.sandbox.timeout_seconds;
        let seconds = requested.map_or(most, |requested| requested.min(most));
        *entry.callback.lock().await = Some(OpenCallback {
            plan: plan.clone(),
            limit: Duration::from_secs(seconds),
        });
        let ran = self
            .run_command(entry, run, sandbox, seconds, Some(&specification))
            .await;
        *entry.callback.lock().await = None;
        drop(specification);
        let exec = match ran {
            Ok(exec) => exec,
            Err(outcome) => return outcome,
        };
        let result = match exec.result().await {
            Ok(result) => result,
            Err(error) => return JobOutcome::from_exec(Err(error)),
        };
        let (claimed, reporter) = match self.reported_result(entry).await {
            Some(reported) => (reported, Reporter::Sandbox),
            None => (self.claimed_result(entry, sandbox).await, Reporter::File),
        };
        let claimed = claimed.and_then(|claimed| {
            plan.check_result(&claimed, None)?;
            Ok(claimed)
        });
        let outcome = match judge(&result.exit, claimed) {
            Judgement::Believed(claimed) => {
                match self.keep_result(entry, claimed, reporter).await {
                    Some(outcome) => outcome,
                    None => JobOutcome::broken("the result could not be stored"),
                }
            }
            Judgement::Broken(reason) => JobOutcome::broken(reason),
            Judgement::ByExit => return JobOutcome::from_exec(Ok(result)),
        };
        outcome.with_exec(result)
    }

    /// The result that the runner reported by the callback, if it did.
    async fn reported_result(&self, entry: &JobEntry) -> Option<ClaimedResult> {
        let files = self.files(entry.record().job.job_id);
        let json = match blocking(move || files.reported()).await {
            Ok(json) => json?,
            Err(error) => return Some(Err(format!("the report is unreadable: {error}"))),
        };
        let parsed = compute::run(json.len(), || JobResult::parse(&json)).await;
        Some(parsed.map_err(|error| format!("the report is unreadable: {error}")))
    }

    /// The result file, through the agent or, if that is gone, from the disk.
    async fn claimed_result(
        self: &Arc<Self>,
        entry: &JobEntry,
        sandbox: &Sandbox,
    ) -> ClaimedResult {
        for _ in 0..READ_ATTEMPTS {
            let Ok(live) = sandbox.until_live().await else {
                break;
            };
            if live.is_gone() {
                break;
            }
            // Processes that the runner left behind could change the file while it is read.
            let read = async {
                directory::kill_everything(&live).await?;
                directory::read_result(&live).await
            };
            match read.await {
                Ok(claimed) => return claimed,
                Err(error) => {
                    tracing::debug!(error = %error, "Failed to read a result file.");
                }
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
        let read = self.read_result_on_disk(entry).await;
        read.unwrap_or_else(|| Err("the disk of the job's sandbox is gone".to_owned()))
    }
}

/// What decides the outcome of a custom runner.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "made once for each job")]
enum Judgement {
    /// The result file decides.
    Believed(JobResult),
    /// The result file is missing, or contradicts the exit.
    Broken(String),
    /// The exit decides: the runner was lost, or was ended by a limit.
    ByExit,
}

fn judge(exit: &ExecExit, claimed: ClaimedResult) -> Judgement {
    // A runner that exits with 0 was not killed itself, whatever became of its processes.
    let is_killed = exit.oom_killed && exit.exit_code != Some(0);
    if exit.lost || exit.timed_out || is_killed {
        return Judgement::ByExit;
    }
    let end = match (exit.exit_code, &exit.signal) {
        (Some(code), _) => format!("exited with {code}"),
        (None, Some(signal)) => format!("was killed by {signal}"),
        (None, None) => "ended".to_owned(),
    };
    match claimed {
        Ok(result) if result.status == ResultStatus::Success && exit.exit_code != Some(0) => {
            Judgement::Broken(format!("the runner reported a success and {end}"))
        }
        Ok(result) => Judgement::Believed(result),
        Err(reason) => Judgement::Broken(format!("the runner {end}, and {reason}")),
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{
        ExecVia, JobId,
        sba::{FailureCode, ProtocolVersion},
    };

    use super::*;

    fn exit(change: impl FnOnce(&mut ExecExit)) -> ExecExit {
        let mut exit = ExecExit {
            exit_code: Some(0),
            lost: false,
            ..ExecExit::never_ran(ExecVia::Agent)
        };
        change(&mut exit);
        exit
    }

    fn success() -> JobResult {
        JobResult {
            protocol_version: ProtocolVersion::CURRENT,
            status: ResultStatus::Success,
            failure_code: None,
            failure_message: None,
            ..failure()
        }
    }

    fn failure() -> JobResult {
        JobResult::failed(Some(JobId::generate()), FailureCode::StepFailed, "failed")
    }

    #[test]
    fn a_success_needs_the_exit_code_0_and_a_failure_is_believed() {
        let shown = |exit, claimed| match judge(&exit, claimed) {
            Judgement::Believed(result) => format!("{:?}", result.status),
            Judgement::Broken(reason) => reason,
            Judgement::ByExit => "by exit".to_owned(),
        };
        let failed = |exit: &mut ExecExit| exit.exit_code = Some(3);
        let killed = |exit: &mut ExecExit| {
            (exit.exit_code, exit.signal) = (None, Some("KILL".to_owned()));
        };
        for (exit, claimed, expected) in [
            (exit(|_| {}), Ok(success()), "Success"),
            (exit(|_| {}), Ok(failure()), "Failure"),
            (exit(failed), Ok(failure()), "Failure"),
            (
                exit(failed),
                Ok(success()),
                "the runner reported a success and exited with 3",
            ),
            (
                exit(killed),
                Ok(success()),
                "the runner reported a success and was killed by KILL",
            ),
            (
                exit(|_| {}),
                Err("it is broken".to_owned()),
                "the runner exited with 0, and it is broken",
            ),
            (exit(|exit| exit.lost = true), Ok(success()), "by exit"),
            (exit(|exit| exit.timed_out = true), Ok(failure()), "by exit"),
            (
                exit(|exit| (exit.oom_killed, exit.exit_code) = (true, Some(137))),
                Ok(success()),
                "by exit",
            ),
            (
                exit(|exit| exit.oom_killed = true),
                Ok(success()),
                "Success",
            ),
        ] {
            assert_eq!(shown(exit, claimed), expected);
        }
    }
}
