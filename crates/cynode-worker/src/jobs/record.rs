//! A job as it is on disk and in memory, and what its end says.

use cynode_api::{
    ErrorCode, ExecResult, Job, JobError, JobOutput, JobRun, JobState, JobStop, NodeId, SessionId,
    job_limits::REMEMBER_SECONDS,
};
use cynode_service::ApiError;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use tokio::sync::watch;

/// Codes of a job's own; the others are those of the API.
const RUNNER_INTERRUPTED: &str = "runner_interrupted";
const OOM_KILLED: &str = "oom_killed";
const NODE_STOPPED: &str = "node_stopped";

/// Who wants it to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stop {
    Caller,
    /// The worker was told to end its sandboxes.
    Node,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JobRecord {
    /// Until its end; from then on its fingerprint is enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) request: Option<JobRun>,
    /// Of the request, so that a repetition can be told from another request. Empty when it was stopped before one came.
    pub(crate) fingerprint: String,
    /// With the streams only on disk, from its end to its acknowledgement.
    pub(crate) job: Job,
    /// Its sandbox.
    pub(crate) session_id: SessionId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stop: Option<Stop>,
    #[serde(default, with = "time::serde::rfc3339::option")]
    pub(crate) acknowledged_at: Option<OffsetDateTime>,
}

impl JobRecord {
    pub(crate) fn new(
        request: JobRun,
        fingerprint: String,
        node_id: NodeId,
        image_digest: Option<String>,
    ) -> Self {
        let job = Job {
            job_id: request.job_id,
            task_id: request.task_id,
            state: JobState::Accepted,
            exit_code: None,
            signal: None,
            output: JobOutput::default(),
            started_at: None,
            ended_at: None,
            node_id: Some(node_id),
            image_ref: request.sandbox.image_ref.clone(),
            image_digest,
            sba_result: None,
            artifacts: Vec::new(),
            error: None,
            reported_by: "worker".to_owned(),
            late_result: None,
            created_by: None,
            acknowledged: false,
        };
        Self {
            request: Some(request),
            fingerprint,
            job,
            session_id: SessionId::generate(),
            stop: None,
            acknowledged_at: None,
        }
    }

    /// Of a job that was stopped before anybody asked to run it. Nobody waits for a result.
    pub(crate) fn never_to_run(stop: &JobStop, node_id: NodeId) -> Self {
        let nothing = JobRun::command(stop.task_id, stop.job_id, "", [""; 0]);
        let mut record = Self::new(nothing, String::new(), node_id, None);
        record.stop = Some(Stop::Caller);
        record.conclude(Outcome::canceled());
        record.acknowledge();
        record
    }

    /// Whether this request made it, or would have.
    pub(crate) fn is_of(&self, request: &JobRun, fingerprint: &str) -> bool {
        if self.fingerprint.is_empty() {
            self.job.task_id == request.task_id
        } else {
            self.fingerprint == fingerprint
        }
    }

    pub(crate) fn is_final(&self) -> bool {
        self.job.state.is_final()
    }

    /// Writes down how it ended. What was told to stop before that was seen is canceled, however its command took it.
    pub(crate) fn conclude(&mut self, outcome: Outcome) {
        let Outcome {
            state,
            exit_code,
            signal,
            output,
            error,
        } = outcome;
        (self.job.state, self.job.error) = match self.stop {
            None => (state, error),
            Some(Stop::Caller) => (JobState::Canceled, None),
            Some(Stop::Node) => (
                JobState::Canceled,
                Some(problem(
                    NODE_STOPPED,
                    "the node was told to stop and to end its sandboxes",
                )),
            ),
        };
        self.job.exit_code = exit_code;
        self.job.signal = signal;
        self.job.output = output;
        self.job.ended_at = Some(OffsetDateTime::now_utc());
        self.request = None;
    }

    /// The caller has the result: what is left says only that the id was used, for what, and how it ended.
    pub(crate) fn acknowledge(&mut self) {
        self.acknowledged_at = Some(OffsetDateTime::now_utc());
        self.job.acknowledged = true;
        self.drop_streams();
    }

    fn drop_streams(&mut self) {
        self.job.output.stdout = String::new();
        self.job.output.stderr = String::new();
    }

    /// As it is kept in memory.
    pub(crate) fn without_streams(mut self) -> Self {
        self.drop_streams();
        self
    }

    /// Whether its id may be used again.
    pub(crate) fn is_forgotten(&self, now: OffsetDateTime) -> bool {
        let remember = time::Duration::seconds(i64::try_from(REMEMBER_SECONDS).unwrap_or(i64::MAX));
        self.acknowledged_at.is_some_and(|at| now - at > remember)
    }
}

/// Tells requests apart. One with and one without the version are the same, and so are two whose members come in another order.
pub(crate) fn fingerprint(request: &JobRun) -> String {
    let mut request = JobRun {
        version: None,
        ..request.clone()
    };
    if let Some(job) = &mut request.job {
        job.sort_all_objects();
    }
    crate::execs::hex(&Sha256::digest(
        serde_json::to_vec(&request).unwrap_or_default(),
    ))
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    state: JobState,
    exit_code: Option<i32>,
    signal: Option<String>,
    output: JobOutput,
    error: Option<JobError>,
}

fn problem(code: &str, detail: impl Into<String>) -> JobError {
    JobError {
        code: code.to_owned(),
        detail: detail.into(),
    }
}

impl Outcome {
    fn without_exit(state: JobState, error: Option<JobError>) -> Self {
        Self {
            state,
            exit_code: None,
            signal: None,
            output: JobOutput::default(),
            error,
        }
    }

    /// Its command did not run, and why.
    pub(crate) fn failed(error: &ApiError) -> Self {
        let errno = error
            .0
            .extensions
            .get("errno")
            .and_then(|errno| errno.as_str());
        let detail = errno.map_or_else(
            || error.0.detail.clone(),
            |errno| format!("{errno}: {}", error.0.detail),
        );
        Self::without_exit(JobState::Failed, Some(problem(&error.0.code, detail)))
    }

    /// Nobody knows how far its command came.
    pub(crate) fn interrupted(detail: impl Into<String>) -> Self {
        Self::without_exit(JobState::Failed, Some(problem(RUNNER_INTERRUPTED, detail)))
    }

    pub(crate) fn canceled() -> Self {
        Self::without_exit(JobState::Canceled, None)
    }

    /// Of a command that was started.
    pub(crate) fn of(result: Result<ExecResult, ApiError>) -> Self {
        let ExecResult {
            exit,
            stdout,
            stderr,
            encoding,
            truncated,
            ..
        } = match result {
            Ok(result) => result,
            Err(error) if error.0.is(ErrorCode::AgentUnavailable) => {
                return Self::interrupted(error.0.detail);
            }
            Err(error) => return Self::failed(&error),
        };
        let (state, error) = if exit.lost {
            (
                JobState::Failed,
                Some(problem(
                    RUNNER_INTERRUPTED,
                    "the sandbox went away, and how its command ended was not seen",
                )),
            )
        } else if exit.timed_out {
            (JobState::Timeout, None)
        } else if exit.oom_killed {
            (
                JobState::Failed,
                Some(problem(
                    OOM_KILLED,
                    "the sandbox's memory limit was reached",
                )),
            )
        } else if exit.exit_code == Some(0) {
            (JobState::Completed, None)
        } else {
            (JobState::Failed, None)
        };
        Self {
            state,
            exit_code: exit.exit_code,
            signal: exit.signal,
            output: JobOutput {
                stdout,
                stderr,
                encoding,
                truncated,
                truncated_by: None,
            },
            error,
        }
    }
}

/// A job that this worker knows.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(super) record: Mutex<JobRecord>,
    /// Held from the reading of the record to the moment when its change is on disk and seen.
    pub(super) writing: tokio::sync::Mutex<()>,
    pub(super) changed: watch::Sender<()>,
}

impl Entry {
    pub(crate) fn new(record: JobRecord) -> Self {
        Self {
            record: Mutex::new(record.without_streams()),
            writing: tokio::sync::Mutex::new(()),
            changed: watch::Sender::new(()),
        }
    }

    pub(crate) fn record(&self) -> JobRecord {
        self.record.lock().clone()
    }

    /// Its object without the streams.
    pub(crate) fn job(&self) -> Job {
        self.record.lock().job.clone()
    }

    pub(crate) fn is_final(&self) -> bool {
        self.record.lock().is_final()
    }

    pub(crate) fn is_acknowledged(&self) -> bool {
        self.record.lock().acknowledged_at.is_some()
    }

    pub(super) fn set(&self, record: JobRecord) {
        *self.record.lock() = record.without_streams();
        self.changed.send_replace(());
    }

    /// Waits until this holds.
    pub(crate) async fn until(&self, holds: impl Fn(&JobRecord) -> bool) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if holds(&self.record.lock()) {
                return;
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    pub(crate) async fn ended(&self) {
        self.until(JobRecord::is_final).await;
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{Bytes, ExecExit, ExecId, ExecVia, JobId, Problem, TaskId, Truncated};

    use super::*;

    fn run() -> JobRun {
        JobRun::command(TaskId::generate(), JobId::generate(), "default", ["true"])
    }

    fn result(change: impl FnOnce(&mut ExecExit)) -> ExecResult {
        let mut exit = ExecExit {
            exit_code: Some(0),
            signal: None,
            timed_out: false,
            oom_killed: false,
            no_space: false,
            bytes: Bytes::default(),
            sha256: None,
            duration_ms: 1,
            via: ExecVia::Agent,
            lost: false,
        };
        change(&mut exit);
        let (stdout, stderr, encoding) = ("out".to_owned(), "err".to_owned(), "utf-8".to_owned());
        ExecResult {
            exec_id: ExecId::generate(),
            exit,
            stdout,
            stderr,
            encoding,
            truncated: Truncated::default(),
        }
    }

    fn concluded(stop: Option<Stop>, outcome: Outcome) -> Job {
        let request = run();
        let mut record = JobRecord::new(
            request.clone(),
            fingerprint(&request),
            NodeId::generate(),
            None,
        );
        record.stop = stop;
        record.conclude(outcome);
        assert!(record.is_final() && record.request.is_none());
        record.job
    }

    #[test]
    fn each_end_of_a_command_is_one_state_of_its_job() {
        let code = |job: &Job| job.error.as_ref().map(|error| error.code.clone());
        for (outcome, state, error) in [
            (Outcome::of(Ok(result(|_| {}))), JobState::Completed, None),
            (
                Outcome::of(Ok(result(|exit| exit.exit_code = Some(3)))),
                JobState::Failed,
                None,
            ),
            (
                Outcome::of(Ok(result(|exit| {
                    (exit.exit_code, exit.signal) = (None, Some("SEGV".to_owned()))
                }))),
                JobState::Failed,
                None,
            ),
            (
                Outcome::of(Ok(result(|exit| exit.timed_out = true))),
                JobState::Timeout,
                None,
            ),
            (
                Outcome::of(Ok(result(|exit| {
                    (exit.exit_code, exit.oom_killed) = (Some(137), true)
                }))),
                JobState::Failed,
                Some(OOM_KILLED),
            ),
            (
                Outcome::of(Ok(result(|exit| {
                    (exit.exit_code, exit.lost) = (None, true)
                }))),
                JobState::Failed,
                Some(RUNNER_INTERRUPTED),
            ),
            (
                Outcome::failed(&ApiError::new(ErrorCode::ImageNotFound, "none")),
                JobState::Failed,
                Some("image_not_found"),
            ),
            (Outcome::canceled(), JobState::Canceled, None),
        ] {
            let job = concluded(None, outcome.clone());
            assert_eq!(
                (job.state, code(&job).as_deref()),
                (state, error),
                "{outcome:?}"
            );
            assert_eq!(
                concluded(Some(Stop::Caller), outcome.clone()).state,
                JobState::Canceled
            );
            let stopped = concluded(Some(Stop::Node), outcome);
            assert_eq!(
                (stopped.state, code(&stopped).as_deref()),
                (JobState::Canceled, Some(NODE_STOPPED))
            );
        }
    }

    #[test]
    fn a_command_that_can_not_be_started_says_its_errno() {
        let error: ApiError = Problem::new(ErrorCode::ExecFailed, "no such command")
            .with("errno", "ENOENT")
            .into();
        let job = concluded(None, Outcome::failed(&error));
        let error = job.error.expect("an error");
        assert_eq!(
            (error.code.as_str(), error.detail.as_str()),
            ("exec_failed", "ENOENT: no such command")
        );
    }

    #[test]
    fn what_is_acknowledged_is_remembered_for_a_day_and_holds_no_output() {
        let request = run();
        let mut record = JobRecord::new(
            request.clone(),
            fingerprint(&request),
            NodeId::generate(),
            None,
        );
        record.conclude(Outcome::of(Ok(result(|_| {}))));
        let now = OffsetDateTime::now_utc();
        assert!(
            !record.is_forgotten(now + time::Duration::days(1_000)),
            "nobody has its result"
        );
        record.acknowledge();
        assert!(
            record.job.output.stdout.is_empty()
                && record.job.output.stderr.is_empty()
                && record.job.acknowledged
        );
        assert!(
            !record.is_forgotten(now + time::Duration::hours(23))
                && record.is_forgotten(now + time::Duration::hours(25))
        );
    }

    #[test]
    fn requests_are_told_apart_by_all_that_they_say() {
        let first = run();
        assert_eq!(
            fingerprint(&first),
            fingerprint(&JobRun {
                version: None,
                ..first.clone()
            })
        );
        let mut other = first.clone();
        other.sandbox.command.push("x".to_owned());
        assert_ne!(fingerprint(&first), fingerprint(&other));
        assert_ne!(
            fingerprint(&first),
            fingerprint(&JobRun {
                task_id: TaskId::generate(),
                ..first.clone()
            })
        );
    }
}
