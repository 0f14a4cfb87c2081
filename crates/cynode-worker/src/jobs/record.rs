//! A job's record on disk and in memory, and its outcome.

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

/// Error codes specific to jobs; all others are those of the API.
const RUNNER_INTERRUPTED: &str = "runner_interrupted";
const OOM_KILLED: &str = "oom_killed";
const NODE_STOPPED: &str = "node_stopped";

/// Who requested the stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopRequester {
    Caller,
    /// The worker is shutting down and ends its sandboxes.
    Node,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JobRecord {
    /// Dropped at the end of the job; the fingerprint then suffices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) request: Option<JobRun>,
    /// Hash of the request: tells a retry from a different request under the same id. Empty if the
    /// job was stopped before its request arrived.
    pub(crate) fingerprint: String,
    /// The on-disk record alone has the output, from the end of the job to its acknowledgement.
    pub(crate) job: Job,
    /// The job's sandbox.
    pub(crate) session_id: SessionId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stop: Option<StopRequester>,
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
            reported_by: cynode_api::Reporter::Worker,
            late_result: None,
            created_by: None,
            command: None,
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

    /// The record of a job that was stopped before its request arrived. Nobody waits for a result.
    pub(crate) fn stopped_before_start(stop: &JobStop, node_id: NodeId) -> Self {
        let empty = JobRun::command(stop.task_id, stop.job_id, "", [""; 0]);
        let mut record = Self::new(empty, String::new(), node_id, None);
        record.stop = Some(StopRequester::Caller);
        record.conclude(JobOutcome::canceled());
        record.acknowledge();
        record
    }

    /// Returns whether `request` is the one that created this job.
    pub(crate) fn matches(&self, request: &JobRun, fingerprint: &str) -> bool {
        if self.fingerprint.is_empty() {
            self.job.task_id == request.task_id
        } else {
            self.fingerprint == fingerprint
        }
    }

    pub(crate) fn is_final(&self) -> bool {
        self.job.state.is_final()
    }

    /// Records the end. A job that was told to stop first is canceled, whatever its command did.
    pub(crate) fn conclude(&mut self, outcome: JobOutcome) {
        let JobOutcome {
            state,
            exit_code,
            signal,
            output,
            error,
        } = outcome;
        (self.job.state, self.job.error) = match self.stop {
            None => (state, error),
            Some(StopRequester::Caller) => (JobState::Canceled, None),
            Some(StopRequester::Node) => (
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

    /// Marks the result as received by the caller. The record then only reserves the id.
    pub(crate) fn acknowledge(&mut self) {
        self.acknowledged_at = Some(OffsetDateTime::now_utc());
        self.job.acknowledged = true;
        self.drop_streams();
    }

    fn drop_streams(&mut self) {
        self.job.output.stdout = String::new();
        self.job.output.stderr = String::new();
    }

    /// The record as held in memory.
    pub(crate) fn without_streams(mut self) -> Self {
        self.drop_streams();
        self
    }

    /// Returns whether the retention of the id is over.
    pub(crate) fn is_forgotten(&self, now: OffsetDateTime) -> bool {
        let retention =
            time::Duration::seconds(i64::try_from(REMEMBER_SECONDS).unwrap_or(i64::MAX));
        self.acknowledged_at.is_some_and(|at| now - at > retention)
    }
}

/// Hash of a request that ignores its version and the order of its members.
pub(crate) fn fingerprint(request: &JobRun) -> String {
    let mut request = JobRun {
        version: None,
        ..request.clone()
    };
    if let Some(job) = &mut request.job {
        job.sort_all_objects();
    }
    hex::encode(Sha256::digest(
        serde_json::to_vec(&request).unwrap_or_default(),
    ))
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JobOutcome {
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

impl JobOutcome {
    fn without_exit(state: JobState, error: Option<JobError>) -> Self {
        Self {
            state,
            exit_code: None,
            signal: None,
            output: JobOutput::default(),
            error,
        }
    }

    /// The command did not run.
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

    /// The progress of the command is unknown.
    pub(crate) fn interrupted(detail: impl Into<String>) -> Self {
        Self::without_exit(JobState::Failed, Some(problem(RUNNER_INTERRUPTED, detail)))
    }

    pub(crate) fn canceled() -> Self {
        Self::without_exit(JobState::Canceled, None)
    }

    /// The outcome of a command that was started.
    pub(crate) fn from_exec(result: Result<ExecResult, ApiError>) -> Self {
        let ExecResult {
            exit,
            stdout,
            stderr,
            encoding,
            truncated,
            ..
        } = match result {
            Ok(result) => result,
            Err(error) if error.is(ErrorCode::AgentUnavailable) => {
                return Self::interrupted(error.into_problem().detail);
            }
            Err(error) => return Self::failed(&error),
        };
        let (state, error) = if exit.lost {
            (
                JobState::Failed,
                Some(problem(
                    RUNNER_INTERRUPTED,
                    "the sandbox was lost before the command's exit was observed",
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

/// A job known to this worker.
#[derive(Debug)]
pub(crate) struct JobEntry {
    pub(super) record: Mutex<JobRecord>,
    /// Held while a change of the record is computed, written to disk and published.
    pub(super) writing: tokio::sync::Mutex<()>,
    pub(super) changed: watch::Sender<()>,
}

impl JobEntry {
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

    /// The job without its output.
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

    /// Waits until `holds` returns true.
    pub(crate) async fn wait_until(&self, holds: impl Fn(&JobRecord) -> bool) {
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

    pub(crate) async fn wait_until_ended(&self) {
        self.wait_until(JobRecord::is_final).await;
    }
}

#[cfg(test)]
mod tests;
