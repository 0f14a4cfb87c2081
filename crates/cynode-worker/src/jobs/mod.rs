//! Jobs: each runs one command or one specification to completion once, and retains its result and
//! its artifacts until acknowledged.
//!
//! Invariants: a job is on disk before its caller is answered, and its end is on disk before it is
//! published. A worker crash therefore neither runs a command twice nor loses its result; the next
//! worker resumes every job (`drive.rs`). After the acknowledgement the id stays reserved for a
//! day, so that a delayed request runs nothing.

mod artifacts;
mod attempts;
mod callback;
mod denials;
mod directory;
mod document;
mod drive;
mod files;
mod finish;
mod foreign;
mod outcome;
mod plan;
mod record;
mod runner;
mod steps;

use std::{
    collections::{BTreeMap, HashSet},
    fs::File,
    io,
    sync::Arc,
    time::Duration,
};

use cynode_api::{
    ErrorCode, ExecVia, Job, JobId, JobRun, JobState, JobStop, Problem, SessionId, WorkspaceRef,
    job_limits::MAX_UNACKNOWLEDGED, sba::JobSpec,
};
use cynode_service::ApiError;
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    execs::Exec,
    inference::{JobUsage, check_source},
    journal::{Journal, blocking, interrupted},
    runtime::Image,
    sessions::{JobAdmission, JobSandboxRequest, Sessions, check_version, journal_error},
};

pub(crate) use artifacts::KeptArtifact;
pub(crate) use callback::CALLBACK_PATH;
use outcome::JobOutcome;
pub(crate) use record::JobEntry;
use record::{JobRecord, StopRequester, fingerprint};

/// How often expired ids are removed.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(60);
/// How long a worker that shuts down waits for its jobs to end.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(45);

#[derive(Debug)]
pub(crate) struct Jobs {
    sessions: Arc<Sessions>,
    journal: Journal,
    by_id: Mutex<BTreeMap<JobId, Arc<JobEntry>>>,
    /// Held from the lookup of an id to its admission. The value is true once the worker is shutting
    /// down and admits no more jobs.
    admission_lock: tokio::sync::Mutex<bool>,
    drivers: TaskTracker,
    /// Ids of changed jobs, for the reports to the orchestrator. Lossy: the orchestrator polls for
    /// missed changes.
    changes: mpsc::Sender<JobId>,
}

/// A job, with its result once it has ended.
#[derive(Debug)]
pub(crate) struct JobWithResult {
    pub(crate) job: Job,
    /// The job's result as JSON.
    pub(crate) result: Option<Vec<u8>>,
}

impl Jobs {
    /// Reads the jobs of an earlier worker process without resuming them.
    pub(crate) fn open(
        sessions: Arc<Sessions>,
        journal: Journal,
        changes: mpsc::Sender<JobId>,
    ) -> io::Result<Arc<Self>> {
        let mut by_id = BTreeMap::new();
        for id in journal.jobs()? {
            if let Some(record) = journal.job::<JobRecord>(id)? {
                let usage = sessions.inference.usage_of(id, &journal.job_directory(id));
                by_id.insert(id, Arc::new(JobEntry::new(record, usage)));
            }
        }
        for directory in journal.unrecorded_jobs()? {
            journal.discard(&directory)?;
        }
        Ok(Arc::new(Self {
            sessions,
            journal,
            by_id: Mutex::new(by_id),
            admission_lock: tokio::sync::Mutex::new(false),
            drivers: TaskTracker::new(),
            changes,
        }))
    }

    /// Resumes every unfinished job.
    pub(crate) fn resume(self: &Arc<Self>) {
        let entries: Vec<Arc<JobEntry>> = self.by_id.lock().values().cloned().collect();
        for entry in &entries {
            self.spawn_drive(entry);
        }
        let jobs: HashSet<JobId> = self.by_id.lock().keys().copied().collect();
        for session_id in self.sessions.sandboxes_of_other_jobs(&jobs) {
            tracing::error!(%session_id, "Ending a job's sandbox whose job record is gone.");
            let jobs = Arc::clone(self);
            self.drivers
                .spawn(async move { jobs.drop_sandbox(session_id).await });
        }
    }

    async fn drop_sandbox(&self, id: SessionId) {
        self.sessions.reconciled().await;
        match self.sessions.end_job_sandbox(id).await {
            Ok(()) => drop(self.sessions.forget_job_sandbox(id)),
            Err(error) => {
                tracing::error!(
                    session_id = %id,
                    error = %error,
                    "Failed to end an orphaned sandbox; the next start retries."
                );
            }
        }
    }

    /// Runs a job, or returns the job that an identical request created earlier. The job is on disk
    /// when this returns.
    pub(crate) async fn run(self: &Arc<Self>, request: JobRun) -> Result<Arc<JobEntry>, ApiError> {
        check_version(request.version)?;
        drive::check_command(&request)?;
        if let Some(job) = &request.job {
            check_specification(&request, job, self.sessions.config.exec_via)?;
        }
        self.sessions.check_job(&request)?;
        if matches!(
            request.sandbox.workspace_ref,
            Some(WorkspaceRef::Artifact(_))
        ) {
            self.sessions.upstream()?;
        }
        let fingerprint = fingerprint(&request);
        if let Some(existing) = self.existing(&request, &fingerprint)? {
            return Ok(existing);
        }
        let inference = request.job.as_ref().and_then(|job| job.inference.as_ref());
        if let Some(inference) = inference {
            self.sessions.inference.check_job(inference).await?;
        }
        self.sessions.wait_until_reconciled().await?;
        let image = self
            .sessions
            .any_image(
                &request.sandbox.image_ref,
                request.sandbox.image_digest.as_deref(),
            )
            .await;
        // Runs to completion even if the caller disconnects: an admitted job is always run.
        let jobs = Arc::clone(self);
        let admitted =
            tokio::spawn(async move { jobs.admit(request, fingerprint, image).await }).await;
        admitted
            .map_err(|_| ApiError::new(ErrorCode::Internal, "accepting the job was interrupted"))?
    }

    async fn admit(
        self: &Arc<Self>,
        mut request: JobRun,
        fingerprint: String,
        image: Result<Image, ApiError>,
    ) -> Result<Arc<JobEntry>, ApiError> {
        let stopping = self.admission_lock.lock().await;
        let id = request.job_id;
        if let Some(existing) = self.existing(&request, &fingerprint)? {
            return Ok(existing);
        }
        // A job with an unreadable record may have run already, so it must not run now.
        self.check_readable(id)?;
        if *stopping {
            return Err(ApiError::new(
                ErrorCode::ShuttingDown,
                "the worker is shutting down",
            ));
        }
        if self
            .by_id
            .lock()
            .values()
            .filter(|entry| !entry.is_acknowledged())
            .count()
            >= MAX_UNACKNOWLEDGED
        {
            let detail = format!("this node has {MAX_UNACKNOWLEDGED} unacknowledged jobs");
            return Err(Problem::new(ErrorCode::NoCapacity, detail)
                .with_remedy("Acknowledge the jobs whose results are known.")
                .into());
        }
        let specification = request.job.take();
        let image = match image {
            Ok(image) => image,
            // A wrong image is an error of the job, not of this call: the job fails.
            Err(error)
                if error.is(ErrorCode::ImageNotFound)
                    || error.is(ErrorCode::ImageDigestMismatch) =>
            {
                let mut record = JobRecord::new(request, fingerprint, self.sessions.node_id, None);
                record.has_specification = specification.is_some();
                let outcome = JobOutcome::failed(&error);
                let entry = JobEntry::new(record.clone(), self.usage(id));
                self.complete_result(&entry, &outcome).await;
                record.set_outcome(outcome);
                return self.record_job(record).await;
            }
            Err(error) => return Err(error),
        };
        let mut record = JobRecord::new(
            request.clone(),
            fingerprint,
            self.sessions.node_id,
            Some(image.digest.clone()),
        );
        record.has_specification = specification.is_some();
        let models = specification.as_deref().map(allowed_models);
        let admitted = JobSandboxRequest {
            run: &request,
            session_id: record.session_id,
            allowed_models: models.unwrap_or_default(),
        };
        let reservation = self
            .sessions
            .reserve(admitted, image, JobAdmission::CheckCapacity)
            .await?;
        let recorded = async {
            if let Some(specification) = specification {
                let files = self.files(id);
                blocking(move || files.write_specification(&specification))
                    .await
                    .map_err(|error| journal_error(&error))?;
            }
            self.record_job(record).await
        };
        let entry = match recorded.await {
            Ok(entry) => entry,
            Err(error) => {
                reservation.cancel().await;
                drop(self.journal.discard(&self.journal.job_directory(id)));
                return Err(error);
            }
        };
        if let Err(error) = reservation.commit().await {
            // The job is on disk, so it counts as accepted: its driver retries, and fails the job if
            // that fails too.
            tracing::error!(
                job_id = %id,
                error = %error,
                "Failed to record the sandbox of a job."
            );
        }
        self.spawn_drive(&entry);
        Ok(entry)
    }

    async fn record_job(&self, record: JobRecord) -> Result<Arc<JobEntry>, ApiError> {
        let id = record.job.job_id;
        let (journal, written) = (self.journal.clone(), record.clone());
        blocking(move || journal.write_job(id, &written))
            .await
            .map_err(|error| journal_error(&error))?;
        let entry = Arc::new(JobEntry::new(record, self.usage(id)));
        self.by_id.lock().insert(id, Arc::clone(&entry));
        Ok(entry)
    }

    /// What the models of a job have used.
    fn usage(&self, id: JobId) -> Arc<JobUsage> {
        let directory = self.journal.job_directory(id);
        self.sessions.inference.usage_of(id, &directory)
    }

    fn existing(
        &self,
        request: &JobRun,
        fingerprint: &str,
    ) -> Result<Option<Arc<JobEntry>>, ApiError> {
        let id = request.job_id;
        match self.by_id.lock().get(&id) {
            Some(entry) if !entry.record.lock().matches(request, fingerprint) => {
                Err(ApiError::new(
                    ErrorCode::JobIdInUse,
                    format!("job {id} belongs to a different request"),
                ))
            }
            entry => Ok(entry.cloned()),
        }
    }

    fn check_readable(&self, id: JobId) -> Result<(), ApiError> {
        let Some(path) = self.journal.unreadable_job(id) else {
            return Ok(());
        };
        let detail = format!(
            "job {id} exists, and its record is unreadable: {}",
            path.display()
        );
        Err(Problem::new(ErrorCode::JobIdInUse, detail)
            .with_remedy("Inspect that file, or use a new job_id.")
            .into())
    }

    pub(crate) fn get(&self, id: JobId) -> Result<Arc<JobEntry>, ApiError> {
        self.by_id.lock().get(&id).cloned().ok_or_else(|| {
            ApiError::new(ErrorCode::JobNotFound, format!("no job {id} on this node"))
        })
    }

    /// The job as callers see it. Output and result are included from the end of the job until it is
    /// acknowledged.
    pub(crate) async fn object(&self, entry: &JobEntry) -> Result<JobWithResult, ApiError> {
        let job = entry.job();
        if !job.state.is_final() || job.acknowledged {
            return Ok(JobWithResult { job, result: None });
        }
        let (journal, id, files) = (self.journal.clone(), job.job_id, self.files(job.job_id));
        let read = move || {
            let Some(record) = journal.job::<JobRecord>(id)? else {
                return Ok(None);
            };
            let result = if record.has_specification {
                files.result()?
            } else {
                None
            };
            let job = record.job;
            Ok(Some(JobWithResult { job, result }))
        };
        match blocking(read).await {
            Ok(Some(whole)) => Ok(whole),
            Ok(None) => Err(ApiError::new(
                ErrorCode::Internal,
                format!("the record of job {id} is unreadable and was set aside"),
            )),
            Err(error) => Err(ApiError::new(
                ErrorCode::Internal,
                format!("reading the record of job {id}: {error}"),
            )),
        }
    }

    /// Unacknowledged jobs in the order of their ids, without output.
    pub(crate) fn entries(&self, after: Option<JobId>) -> Vec<(JobId, Arc<JobEntry>)> {
        let by_id = self.by_id.lock();
        let entries = by_id.iter().filter(|(id, entry)| {
            after.is_none_or(|after| **id > after) && !entry.is_acknowledged()
        });
        entries
            .map(|(id, entry)| (*id, Arc::clone(entry)))
            .collect()
    }

    /// Opens an artifact of an ended job.
    pub(crate) async fn artifact(
        &self,
        entry: &JobEntry,
        path: String,
    ) -> Result<(KeptArtifact, File), ApiError> {
        let id = entry.job().job_id;
        let (files, named) = (self.files(id), path.clone());
        let opened = blocking(move || artifacts::open(&files, &named)).await;
        match opened {
            // A concurrent acknowledgement may have removed the file.
            _ if entry.is_acknowledged() => Err(Problem::new(
                ErrorCode::OutputExpired,
                format!("job {id} was acknowledged and its artifacts dropped"),
            )
            .with_remedy("Read the artifacts before the job is acknowledged.")
            .into()),
            Ok(Some(found)) => Ok(found),
            Ok(None) => Err(ApiError::new(
                ErrorCode::NotFound,
                format!("job {id} has no artifact {path:?}"),
            )),
            Err(error) => Err(ApiError::new(
                ErrorCode::Internal,
                format!("reading an artifact of job {id}: {error}"),
            )),
        }
    }

    /// Notifies the orchestrator of a change of a job.
    fn announce(&self, id: JobId) {
        // If the queue is full or closed, the orchestrator finds the change by polling.
        self.changes.try_send(id).ok();
    }

    /// The exec of the job's command, once it has started.
    pub(crate) fn exec(&self, entry: &JobEntry) -> Option<Arc<Exec>> {
        let record = entry.record();
        if record.job.state == JobState::Accepted {
            return None;
        }
        self.sessions
            .job_sandbox(record.session_id)?
            .execs
            .get(drive::exec_id(&record))
            .ok()
    }

    /// Drops the output of a job whose result the caller has received. The id stays reserved until
    /// it expires.
    pub(crate) async fn acknowledge(&self, id: JobId) -> Result<(), ApiError> {
        let entry = self.get(id)?;
        if !entry.is_final() {
            return Err(ApiError::new(
                ErrorCode::JobNotEnded,
                format!("job {id} is {}", entry.job().state),
            ));
        }
        let acknowledge = |record: &mut JobRecord| {
            let new = record.acknowledged_at.is_none();
            if new {
                record.acknowledge();
            }
            new
        };
        self.update(&entry, acknowledge)
            .await
            .map_err(|error| journal_error(&error))?;
        // If the sandbox is still live, its driver does this after ending it.
        self.drop_output(&entry).await;
        Ok(())
    }

    /// Drops all files of an acknowledged job except its record.
    async fn drop_output(&self, entry: &JobEntry) {
        let record = entry.record();
        let (journal, id) = (self.journal.clone(), record.job.job_id);
        let directory = journal.job_directory(id);
        if directory.exists() {
            match blocking(move || journal.discard(&directory)).await {
                Ok(()) => drop(self.sessions.empty_trash()),
                Err(error) => tracing::warn!(
                    job_id = %id,
                    %error,
                    "Failed to drop the files of a job; the next start retries."
                ),
            }
        }
        self.sessions.forget_job_sandbox(record.session_id);
    }

    /// Requests the stop of a job. An ended job keeps its result; an unknown id is reserved, so that
    /// the job can't run later.
    pub(crate) async fn stop(
        self: &Arc<Self>,
        request: &JobStop,
    ) -> Result<Arc<JobEntry>, ApiError> {
        check_version(request.version)?;
        let entry = if let Ok(entry) = self.get(request.job_id) {
            entry
        } else {
            // Runs to completion even if the caller disconnects, like an admission.
            let (jobs, record) = (
                Arc::clone(self),
                JobRecord::stopped_before_start(request, self.sessions.node_id),
            );
            let barred = tokio::spawn(async move { jobs.bar(record).await }).await;
            barred.map_err(|_| {
                ApiError::new(ErrorCode::Internal, "stopping the job was interrupted")
            })??
        };
        if entry.job().task_id != request.task_id {
            return Err(ApiError::new(
                ErrorCode::JobNotFound,
                format!("this task has no job {} on this node", request.job_id),
            ));
        }
        self.request_stop(&entry, StopRequester::Caller)
            .await
            .map_err(|error| journal_error(&error))?;
        Ok(entry)
    }

    /// Reserves the id of a job that was stopped before its request arrived: the request may be in
    /// flight or waiting for the lock.
    async fn bar(&self, record: JobRecord) -> Result<Arc<JobEntry>, ApiError> {
        let _admission = self.admission_lock.lock().await;
        let id = record.job.job_id;
        if let Ok(entry) = self.get(id) {
            return Ok(entry);
        }
        self.check_readable(id)?;
        self.record_job(record).await
    }

    async fn request_stop(&self, entry: &Arc<JobEntry>, stop: StopRequester) -> io::Result<()> {
        let set_stop = move |record: &mut JobRecord| {
            let new = !record.is_final() && record.stop.is_none();
            if new {
                record.stop = Some(stop);
            }
            new
        };
        self.update(entry, set_stop).await
    }

    /// Stops all jobs and admits no more. Returns when their sandboxes are gone, or after
    /// `SHUTDOWN_TIMEOUT`.
    pub(crate) async fn stop_all(&self) {
        *self.admission_lock.lock().await = true;
        let running: Vec<Arc<JobEntry>> = self
            .by_id
            .lock()
            .values()
            .filter(|entry| !entry.is_final())
            .cloned()
            .collect();
        for entry in running {
            if let Err(error) = self.request_stop(&entry, StopRequester::Node).await {
                tracing::error!(%error, "Failed to record a stop request for a job.");
            }
        }
        self.drivers.close();
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, self.drivers.wait())
            .await
            .is_err()
        {
            tracing::warn!("Not all jobs ended in time; the next worker resumes them.");
        }
    }

    /// Changes a record on disk, then in memory. `change` returns false if the record needs no
    /// change. Runs to completion even if the caller disconnects.
    async fn update(
        &self,
        entry: &Arc<JobEntry>,
        change: impl FnOnce(&mut JobRecord) -> bool + Send + 'static,
    ) -> io::Result<()> {
        let (journal, entry, changes) = (
            self.journal.clone(),
            Arc::clone(entry),
            self.changes.clone(),
        );
        let updated = tokio::spawn(async move {
            let _writing = entry.writing.lock().await;
            let mut changed = entry.record();
            if !change(&mut changed) {
                return Ok(());
            }
            let changed = blocking(move || {
                journal
                    .write_job(changed.job.job_id, &changed)
                    .map(|()| changed)
            })
            .await?;
            let id = changed.job.job_id;
            entry.set(changed);
            // If the queue is full or closed, the orchestrator finds the change by polling.
            changes.try_send(id).ok();
            Ok(())
        });
        updated.await.unwrap_or_else(|_| Err(interrupted()))
    }

    /// Removes expired ids until stopped.
    pub(crate) async fn run_timers(self: Arc<Self>, stop: CancellationToken) {
        while stop
            .run_until_cancelled(tokio::time::sleep(CLEANUP_INTERVAL))
            .await
            .is_some()
        {
            self.remove_expired(OffsetDateTime::now_utc()).await;
        }
    }

    async fn remove_expired(&self, now: OffsetDateTime) {
        // No request may use an id between the check and its removal.
        let _admission = self.admission_lock.lock().await;
        let expired: Vec<JobId> = self
            .by_id
            .lock()
            .iter()
            .filter(|(_, entry)| entry.record.lock().is_expired(now))
            .map(|(id, _)| *id)
            .collect();
        for id in expired {
            let Ok(entry) = self.get(id) else { continue };
            // The id names a container, which must be gone first.
            if !self.sessions.forget_job_sandbox(entry.record().session_id) {
                continue;
            }
            let journal = self.journal.clone();
            match blocking(move || journal.forget_job(id)).await {
                Ok(()) => {
                    self.by_id.lock().remove(&id);
                    self.sessions.inference.forget(id);
                }
                Err(error) => {
                    tracing::warn!(job_id = %id, %error, "Failed to remove a job; will retry.");
                }
            }
        }
    }
}

/// The models that a specification allows its sandbox.
fn allowed_models(job: &JobSpec) -> Vec<String> {
    let inference = job.inference.as_ref();
    inference.map_or_else(Vec::new, |inference| inference.allowed_models.clone())
}

/// Rejects a specification that this worker can't run.
fn check_specification(request: &JobRun, job: &JobSpec, via: ExecVia) -> Result<(), ApiError> {
    for (name, is_equal) in [
        ("job_id", job.job_id == request.job_id),
        ("task_id", job.task_id == request.task_id),
    ] {
        if !is_equal {
            return Err(ApiError::invalid(format!(
                "job.{name}: must equal the {name} of the request"
            )));
        }
    }
    job.inference.as_ref().map_or(Ok(()), check_source)?;
    if via == ExecVia::Runtime {
        return Err(ApiError::new(
            ErrorCode::AgentRequired,
            "job: worker.exec_via is \"runtime\", and specifications need the agent",
        ));
    }
    Ok(())
}
