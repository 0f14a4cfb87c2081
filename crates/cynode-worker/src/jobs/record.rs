//! A job's record on disk and in memory.

use std::{sync::Arc, time::Instant};

use cynode_api::{
    ExecId, Job, JobOutput, JobProgress, JobRun, JobState, JobStop, NodeId, SessionId,
    job_limits::REMEMBER_SECONDS,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use tokio::sync::watch;

use super::{
    callback::OpenCallback,
    denials::StepDenials,
    outcome::{self, JobOutcome},
};
use crate::inference::JobUsage;

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
    /// The request without its specification. Removed when the job ends: the fingerprint then
    /// suffices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) request: Option<JobRun>,
    /// The job has a specification, which is stored in a separate file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) has_specification: bool,
    /// The exec of the second runner, which replaces a killed first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) second_exec: Option<ExecId>,
    /// Hash of the request: tells a retry from a different request under the same id. Empty if the
    /// job was stopped before its request arrived.
    pub(crate) fingerprint: String,
    /// Output and artifacts exist only on disk, from the end of the job to its acknowledgement.
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
            progress: None,
            artifacts: Vec::new(),
            artifacts_omitted: 0,
            error: None,
            reported_by: cynode_api::Reporter::Worker,
            late_result: None,
            created_by: None,
            command: None,
            acknowledged: false,
        };
        Self {
            request: Some(request),
            has_specification: false,
            second_exec: None,
            fingerprint,
            job,
            session_id: SessionId::generate(),
            stop: None,
            acknowledged_at: None,
        }
    }

    /// The record of a job that was stopped before its request arrived. Its result counts as
    /// acknowledged, because no caller waits for it.
    pub(crate) fn stopped_before_start(stop: &JobStop, node_id: NodeId) -> Self {
        let empty = JobRun::command(stop.task_id, stop.job_id, "", [""; 0]);
        let mut record = Self::new(empty, String::new(), node_id, None);
        record.stop = Some(StopRequester::Caller);
        record.set_outcome(JobOutcome::canceled());
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

    /// Records the end of the job. A stop that was requested earlier makes it canceled, whatever the
    /// outcome of its command.
    pub(crate) fn set_outcome(&mut self, outcome: JobOutcome) {
        let JobOutcome {
            state,
            exit_code,
            signal,
            output,
            error,
            reported_by,
            artifacts,
            has_result: _,
        } = outcome;
        (self.job.state, self.job.error) = match self.stop {
            None => (state, error),
            Some(StopRequester::Caller) => (JobState::Canceled, None),
            Some(StopRequester::Node) => (JobState::Canceled, Some(outcome::node_stopped())),
        };
        self.job.reported_by = reported_by;
        self.job.artifacts = artifacts.to_json();
        self.job.artifacts_omitted = artifacts.omitted;
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
        self.drop_output();
    }

    fn drop_output(&mut self) {
        self.job.output.stdout = String::new();
        self.job.output.stderr = String::new();
        self.job.artifacts = Vec::new();
    }

    /// The form of the record that is kept in memory.
    pub(crate) fn without_output(mut self) -> Self {
        self.drop_output();
        self
    }

    /// Returns whether the retention period of the id has passed.
    pub(crate) fn is_expired(&self, now: OffsetDateTime) -> bool {
        let retention =
            time::Duration::seconds(i64::try_from(REMEMBER_SECONDS).unwrap_or(i64::MAX));
        self.acknowledged_at.is_some_and(|at| now - at > retention)
    }
}

/// Hash of a request that ignores its version and the order of its members.
pub(crate) fn fingerprint(request: &JobRun) -> String {
    let mut hash = Sha256::new();
    let rest = JobRun {
        version: None,
        job: None,
        ..request.clone()
    };
    hash.update(serde_json::to_vec(&rest).unwrap_or_default());
    if let Some(job) = &request.job {
        let mut job = serde_json::to_value(job).unwrap_or_default();
        job.sort_all_objects();
        hash.update(b"\n");
        hash.update(serde_json::to_vec(&job).unwrap_or_default());
    }
    hex::encode(hash.finalize())
}

/// A job known to this worker.
#[derive(Debug)]
pub(crate) struct JobEntry {
    pub(super) record: Mutex<JobRecord>,
    /// Held while a change of the record is computed, written to disk and published.
    pub(super) writing: tokio::sync::Mutex<()>,
    pub(super) changed: watch::Sender<()>,
    progress: Mutex<Option<ReportedProgress>>,
    /// What the job's models used, as the worker saw it.
    pub(super) usage: Arc<JobUsage>,
    pub(super) denials: Mutex<StepDenials>,
    /// Held while a denial is written to disk.
    pub(super) denying: tokio::sync::Mutex<()>,
    /// Open while a runner of the job's own may report. Held while a report is stored.
    pub(super) callback: tokio::sync::Mutex<Option<OpenCallback>>,
    /// Held while a report arrives.
    pub(super) receiving: tokio::sync::Mutex<()>,
}

/// The last progress that the built-in runner reported.
#[derive(Debug)]
struct ReportedProgress {
    progress: JobProgress,
    /// The job's deadline.
    deadline: OffsetDateTime,
    /// When the orchestrator was last notified.
    notified_at: Option<Instant>,
}

impl JobEntry {
    pub(crate) fn new(record: JobRecord, usage: Arc<JobUsage>) -> Self {
        Self {
            usage,
            record: Mutex::new(record.without_output()),
            writing: tokio::sync::Mutex::new(()),
            changed: watch::Sender::new(()),
            progress: Mutex::default(),
            denials: Mutex::default(),
            denying: tokio::sync::Mutex::default(),
            callback: tokio::sync::Mutex::default(),
            receiving: tokio::sync::Mutex::default(),
        }
    }

    /// Sets the progress. Returns whether the orchestrator should be notified: the last notification
    /// is older than `interval`.
    pub(super) fn set_progress(
        &self,
        progress: JobProgress,
        deadline: OffsetDateTime,
        interval: std::time::Duration,
    ) -> bool {
        let mut reported = self.progress.lock();
        let earlier = reported.as_ref().and_then(|reported| reported.notified_at);
        let is_due = earlier.is_none_or(|at| at.elapsed() >= interval);
        *reported = Some(ReportedProgress {
            progress,
            deadline,
            notified_at: if is_due {
                Some(Instant::now())
            } else {
                earlier
            },
        });
        is_due
    }

    /// The progress as callers see it, with the remaining time as of now. `None` unless the
    /// built-in runner has reported some.
    pub(super) fn progress(&self) -> Option<JobProgress> {
        let reported = self.progress.lock();
        let reported = reported.as_ref()?;
        let left = (reported.deadline - OffsetDateTime::now_utc()).whole_seconds();
        Some(JobProgress {
            remaining_seconds: u64::try_from(left).unwrap_or(0),
            tokens: self.usage.tokens(),
            ..reported.progress.clone()
        })
    }

    pub(crate) fn record(&self) -> JobRecord {
        self.record.lock().clone()
    }

    /// The job without its output and its result.
    pub(crate) fn job(&self) -> Job {
        let mut job = self.record.lock().job.clone();
        if job.state == JobState::InProgress {
            job.progress = self.progress();
        }
        job
    }

    pub(crate) fn is_final(&self) -> bool {
        self.record.lock().is_final()
    }

    pub(crate) fn is_acknowledged(&self) -> bool {
        self.record.lock().acknowledged_at.is_some()
    }

    pub(super) fn set(&self, record: JobRecord) {
        *self.record.lock() = record.without_output();
        self.changed.send_replace(());
    }

    /// Waits until the record satisfies `is_met`.
    pub(crate) async fn wait_until(&self, is_met: impl Fn(&JobRecord) -> bool) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if is_met(&self.record.lock()) {
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
