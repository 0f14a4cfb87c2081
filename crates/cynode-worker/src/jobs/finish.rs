//! Collects the artifacts and the result of a job after its command or runner has ended.
//!
//! Each step is idempotent: if the worker is killed, the next one starts over with what is left of
//! the sandbox.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use cynode_api::{
    JobId, JobState, Reporter,
    sba::{
        FailureCode, InferenceUsage, JobResult, ResultArtifact, ResultStatus, StepResult,
        StepStatus, StreamEncoding,
    },
};
use cynode_service::ApiError;

use super::{
    Jobs,
    artifacts::{self, ArtifactList},
    directory::{self, ClaimedResult},
    drive::exec_id,
    files::JobFiles,
    outcome::JobOutcome,
    plan::Plan,
    record::JobEntry,
    steps::Steps,
};
use crate::journal::blocking;

/// Time to copy all artifacts through the agent. After it, they are read from the disk.
const ARTIFACTS_TIMEOUT: Duration = Duration::from_secs(900);
/// Attempts to copy artifacts while the node's disk is full or the runtime does not respond.
const TAKE_ATTEMPTS: u32 = 10;
const RETRY_DELAY: Duration = Duration::from_secs(1);

impl Jobs {
    pub(super) fn files(&self, id: JobId) -> JobFiles {
        JobFiles::new(self.journal.job_directory(id))
    }

    /// Copies the artifacts of a job whose command was started.
    pub(super) async fn take_artifacts(self: &Arc<Self>, entry: &Arc<JobEntry>) -> ArtifactList {
        let record = entry.record();
        let files = self.files(record.job.job_id);
        let Some(sandbox) = self.sessions.job_sandbox(record.session_id) else {
            return ArtifactList::default();
        };
        if sandbox.execs.get(exec_id(&record)).is_err() {
            return ArtifactList::default();
        }
        for attempt in 1..=TAKE_ATTEMPTS {
            match self.try_to_take(entry, &files).await {
                Ok(list) => return list,
                Err(error) => tracing::warn!(
                    job_id = %record.job.job_id,
                    error = %error,
                    attempt,
                    "Failed to take the artifacts of a job."
                ),
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
        ArtifactList {
            omitted: 1,
            ..ArtifactList::default()
        }
    }

    async fn try_to_take(
        self: &Arc<Self>,
        entry: &JobEntry,
        files: &JobFiles,
    ) -> Result<ArtifactList, ApiError> {
        let own = files.clone();
        let kept = blocking(move || ArtifactList::read(&own)).await;
        if let Ok(Some(list)) = kept {
            return Ok(list);
        }
        self.sessions.check_room_for_work()?;
        let record = entry.record();
        let live = match self.sessions.job_sandbox(record.session_id) {
            Some(sandbox) => sandbox.until_live().await.ok(),
            None => None,
        };
        if let Some(live) = live.filter(|live| live.has_agent() && !live.is_gone()) {
            let taking = artifacts::take_by_agent(&live, files);
            match tokio::time::timeout(ARTIFACTS_TIMEOUT, taking).await {
                Ok(Ok(list)) => return Ok(list),
                Ok(Err(error)) => tracing::warn!(
                    job_id = %record.job.job_id,
                    error = %error,
                    "Failed to take the artifacts of a job through its agent."
                ),
                Err(_) => tracing::warn!(
                    job_id = %record.job.job_id,
                    "The agent did not deliver the artifacts of a job in time."
                ),
            }
        }
        let Some(directory) = self.sessions.open_job_directory(record.session_id).await? else {
            return Ok(ArtifactList::default());
        };
        let files = files.clone();
        blocking(move || artifacts::take_from_disk(&directory, &files))
            .await
            .map_err(|error| crate::sessions::journal_error(&error))
    }

    /// Reads the result file of a job whose sandbox is gone; `None` if its job directory is gone too.
    pub(super) async fn read_result_on_disk(
        self: &Arc<Self>,
        entry: &JobEntry,
    ) -> Option<ClaimedResult> {
        let opened = self
            .sessions
            .open_job_directory(entry.record().session_id)
            .await;
        let directory: OwnedFd = match opened {
            Ok(directory) => directory?,
            Err(error) => {
                tracing::warn!(error = %error, "Failed to open the directory of a job.");
                return None;
            }
        };
        blocking(move || Ok(directory::read_result_on_disk(&directory)))
            .await
            .ok()
    }

    /// Stores a result that a sandbox claims, and returns the outcome that it decides.
    pub(super) async fn keep_result(
        &self,
        entry: &JobEntry,
        mut result: JobResult,
        reported_by: Reporter,
    ) -> Option<JobOutcome> {
        let files = self.files(entry.record().job.job_id);
        result.usage = entry.usage.settled().await;
        let json = serde_json::to_vec(&result).ok()?;
        drop(result);
        self.store_result(&files, json).await;
        let verdict = blocking(move || files.verdict()).await.ok()?;
        Some(JobOutcome::from_verdict(verdict, reported_by))
    }

    /// Makes and stores a result for a job that has a specification but no result.
    pub(super) async fn complete_result(&self, entry: &JobEntry, outcome: &JobOutcome) {
        let record = entry.record();
        if !record.has_specification || outcome.has_result {
            return;
        }
        let id = record.job.job_id;
        let files = self.files(id);
        let status = match outcome.state {
            _ if record.stop.is_some() => JobState::Canceled,
            state => state,
        };
        let (own, outcome) = (files.clone(), outcome.clone());
        let usage = entry.usage.settled().await;
        let made = blocking(move || Ok(made_result(&own, id, status, &outcome, usage))).await;
        self.store_result(&files, made.unwrap_or_default()).await;
    }

    /// Stores a result, retrying until it succeeds.
    async fn store_result(&self, files: &JobFiles, json: Vec<u8>) {
        let json = Arc::new(json);
        loop {
            let (files, json) = (files.clone(), Arc::clone(&json));
            match blocking(move || files.write_result(&json)).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(%error, "Failed to store the result of a job; retrying.");
                }
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }
}

/// The JSON of a result that the worker makes, with the steps that the runner has reported.
fn made_result(
    files: &JobFiles,
    id: JobId,
    state: JobState,
    outcome: &JobOutcome,
    usage: Option<InferenceUsage>,
) -> Vec<u8> {
    let (code, default) = match state {
        JobState::Canceled => (FailureCode::Canceled, "the job was stopped"),
        JobState::Timeout => (FailureCode::Timeout, "the job ran out of time"),
        _ => (FailureCode::Internal, "the runner ended without a result"),
    };
    let error = outcome
        .error
        .as_ref()
        .filter(|_| state != JobState::Canceled);
    let code = error.map_or(code, |error| failure_code(&error.code));
    let message = error.map_or(default, |error| error.detail.as_str());
    let mut result = JobResult::failed(Some(id), code, message);
    result.usage = usage;
    if state == JobState::Timeout {
        result.status = ResultStatus::Timeout;
    }
    let artifacts = outcome.artifacts.artifacts.iter();
    result.artifacts = artifacts
        .map(|kept| ResultArtifact {
            path: kept.path.clone(),
            size: Some(kept.size),
            sha256: Some(kept.sha256.clone()),
        })
        .collect();
    let json = serde_json::to_vec(&result).unwrap_or_default();
    match reported_steps(files) {
        Ok(steps) => with_steps(&json, &steps),
        Err(error) => {
            tracing::warn!(job_id = %id, %error, "Made a result without the steps of its job.");
            json
        }
    }
}

fn failure_code(code: &str) -> FailureCode {
    let known = FailureCode::ALL.iter().find(|known| known.as_str() == code);
    known
        .cloned()
        .unwrap_or_else(|| FailureCode::Other(code.to_owned()))
}

/// The step results in the journal, and one for the interrupted step, as comma-separated JSON.
fn reported_steps(files: &JobFiles) -> std::io::Result<Vec<u8>> {
    let steps = Steps::open(&files.steps())?;
    let mut json = Vec::new();
    for index in 0..steps.ended() {
        if index > 0 {
            json.push(b',');
        }
        json.extend(steps.result(index)?);
    }
    let Some(index) = steps.in_flight() else {
        return Ok(json);
    };
    let job =
        cynode_api::sba::JobSpec::parse(&files.specification()?).map_err(std::io::Error::other)?;
    let plan = Plan::of(&job);
    let Some(step) = plan.step(index) else {
        return Ok(json);
    };
    let interrupted = StepResult {
        index,
        id: step.id.clone(),
        kind: step.kind.to_owned(),
        status: StepStatus::Interrupted,
        exit_code: None,
        stdout: None,
        stderr: None,
        encoding: StreamEncoding::Utf8,
        output: None,
        error: Some("nobody saw how the step ended".to_owned()),
        truncated: false,
        started_at: None,
        ended_at: None,
    };
    if index > 0 {
        json.push(b',');
    }
    json.extend(serde_json::to_vec(&interrupted)?);
    Ok(json)
}

/// Inserts steps into the JSON of a result that has none.
fn with_steps(result: &[u8], steps: &[u8]) -> Vec<u8> {
    const EMPTY: &[u8] = b"\"steps\":[]";
    // The first match is the field itself: only a version, an id and a status precede it.
    let Some(at) = memchr::memmem::find(result, EMPTY) else {
        return result.to_vec();
    };
    let at = at + EMPTY.len() - 1;
    [&result[..at], steps, &result[at..]].concat()
}
