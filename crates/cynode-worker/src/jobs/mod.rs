//! Jobs: one command each, run to its end once, its result kept until somebody has it.
//!
//! What must stay true: a job is on disk before its caller hears of it, and its end before anybody does. A worker that dies
//! at any moment neither runs a command twice nor loses its result; the next one takes every job up (`drive.rs`). The result
//! stays until it is acknowledged; then the id is remembered for a day, so that a request that comes late runs nothing.

mod drive;
mod record;

use std::{
    collections::{BTreeMap, HashSet},
    io,
    sync::Arc,
    time::Duration,
};

use cynode_api::{
    ErrorCode, Job, JobId, JobRun, JobState, JobStop, Problem, SessionId, WorkspaceRef,
    job_limits::MAX_UNACKNOWLEDGED,
};
use cynode_service::ApiError;
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    execs::Exec,
    journal::{Journal, blocking, interrupted},
    runtime::Image,
    sessions::{Room, Sessions, check_version, journal_error},
};

pub(crate) use record::Entry;
use record::{JobRecord, Outcome, Stop, fingerprint};

/// How often it is looked for ids that need no longer be remembered.
const FORGET_EVERY: Duration = Duration::from_secs(60);
/// How long a worker that stops waits for its jobs to end.
const STOP_WAIT: Duration = Duration::from_secs(45);

#[derive(Debug)]
pub(crate) struct Jobs {
    sessions: Arc<Sessions>,
    journal: Journal,
    known: Mutex<BTreeMap<JobId, Arc<Entry>>>,
    /// Held from the look for an id to its admission; holds whether the worker stops and takes no more.
    gate: tokio::sync::Mutex<bool>,
    drivers: TaskTracker,
    /// Jobs to which something happened, for who tells the orchestrator. Nobody waits for it: what is lost, is asked for.
    news: mpsc::Sender<JobId>,
}

impl Jobs {
    /// Reads what an earlier worker left. Nothing is done yet.
    pub(crate) fn open(
        sessions: Arc<Sessions>,
        journal: Journal,
        news: mpsc::Sender<JobId>,
    ) -> io::Result<Arc<Self>> {
        let mut known = BTreeMap::new();
        for id in journal.jobs()? {
            if let Some(record) = journal.job::<JobRecord>(id)? {
                known.insert(id, Arc::new(Entry::new(record)));
            }
        }
        Ok(Arc::new(Self {
            sessions,
            journal,
            known: Mutex::new(known),
            gate: tokio::sync::Mutex::new(false),
            drivers: TaskTracker::new(),
            news,
        }))
    }

    /// Takes up every job where it was.
    pub(crate) fn take_up(self: &Arc<Self>) {
        let entries: Vec<Arc<Entry>> = self.known.lock().values().cloned().collect();
        for entry in &entries {
            self.spawn_drive(entry);
        }
        let jobs: HashSet<JobId> = self.known.lock().keys().copied().collect();
        for session_id in self.sessions.of_other_jobs(&jobs) {
            tracing::error!(%session_id, "A sandbox of a job has no job: the job's record is gone. It is ended.");
            let jobs = Arc::clone(self);
            self.drivers
                .spawn(async move { jobs.drop_sandbox(session_id).await });
        }
    }

    async fn drop_sandbox(&self, id: SessionId) {
        self.sessions.settled().await;
        match self.sessions.end_of_job(id).await {
            Ok(()) => drop(self.sessions.forget_of_job(id)),
            Err(error) => {
                tracing::error!(session_id = %id, error = %error.0, "Ending it failed; the next start tries again.")
            }
        }
    }

    /// Runs a job, or finds the one that the same request made before. It is on disk when this returns.
    pub(crate) async fn run(self: &Arc<Self>, request: JobRun) -> Result<Arc<Entry>, ApiError> {
        check_version(request.version)?;
        if request.job.is_some() {
            return Err(Problem::new(
                ErrorCode::JobKindUnsupported,
                "job: this worker does not run SBA job specifications yet",
            )
            .with_remedy("Send sandbox.command, or use a worker that runs them.")
            .into());
        }
        drive::check_command(&request)?;
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
        self.sessions.wait_until_settled().await?;
        let image = self
            .sessions
            .any_image(
                &request.sandbox.image_ref,
                request.sandbox.image_digest.as_deref(),
            )
            .await;
        // To its end even when the caller goes away: a job is either not there or is driven.
        let jobs = Arc::clone(self);
        let admitted =
            tokio::spawn(async move { jobs.admit(request, fingerprint, image).await }).await;
        admitted
            .map_err(|_| ApiError::new(ErrorCode::Internal, "accepting the job was interrupted"))?
    }

    async fn admit(
        self: &Arc<Self>,
        request: JobRun,
        fingerprint: String,
        image: Result<Image, ApiError>,
    ) -> Result<Arc<Entry>, ApiError> {
        let stopping = self.gate.lock().await;
        let id = request.job_id;
        if let Some(existing) = self.existing(&request, &fingerprint)? {
            return Ok(existing);
        }
        // Whether it ran is not known, so it does not run now.
        self.check_readable(id)?;
        if *stopping {
            return Err(ApiError::new(
                ErrorCode::ShuttingDown,
                "the worker is stopping",
            ));
        }
        if self
            .known
            .lock()
            .values()
            .filter(|entry| !entry.is_acknowledged())
            .count()
            >= MAX_UNACKNOWLEDGED
        {
            let detail = format!("{MAX_UNACKNOWLEDGED} jobs on this node are not acknowledged");
            return Err(Problem::new(ErrorCode::NoCapacity, detail)
                .with_remedy("Acknowledge the jobs whose results are known.")
                .into());
        }
        let image = match image {
            Ok(image) => image,
            // A job's own failure, as everything that is wrong with what it wants to run.
            Err(error)
                if error.0.is(ErrorCode::ImageNotFound)
                    || error.0.is(ErrorCode::ImageDigestMismatch) =>
            {
                let mut record = JobRecord::new(request, fingerprint, self.sessions.node_id, None);
                record.conclude(Outcome::failed(&error));
                return self.write_down(record).await;
            }
            Err(error) => return Err(error),
        };
        let record = JobRecord::new(
            request.clone(),
            fingerprint,
            self.sessions.node_id,
            Some(image.digest.clone()),
        );
        let place = self
            .sessions
            .place(&request, record.session_id, image, Room::MustBeFree)
            .await?;
        let entry = match self.write_down(record).await {
            Ok(entry) => entry,
            Err(error) => {
                place.give_up().await;
                return Err(error);
            }
        };
        if let Err(error) = place.take().await {
            // It is accepted: whoever drives it tries once more, and says why when that fails too.
            tracing::error!(job_id = %id, error = %error.0, "Writing down the sandbox of a job failed.");
        }
        self.spawn_drive(&entry);
        Ok(entry)
    }

    async fn write_down(&self, record: JobRecord) -> Result<Arc<Entry>, ApiError> {
        let id = record.job.job_id;
        let (journal, written) = (self.journal.clone(), record.clone());
        blocking(move || journal.write_job(id, &written))
            .await
            .map_err(|error| journal_error(&error))?;
        let entry = Arc::new(Entry::new(record));
        self.known.lock().insert(id, Arc::clone(&entry));
        Ok(entry)
    }

    fn existing(
        &self,
        request: &JobRun,
        fingerprint: &str,
    ) -> Result<Option<Arc<Entry>>, ApiError> {
        let id = request.job_id;
        match self.known.lock().get(&id) {
            Some(entry) if !entry.record.lock().is_of(request, fingerprint) => Err(ApiError::new(
                ErrorCode::JobIdInUse,
                format!("job {id} was made by another request"),
            )),
            found => Ok(found.cloned()),
        }
    }

    fn check_readable(&self, id: JobId) -> Result<(), ApiError> {
        let Some(path) = self.journal.unreadable_job(id) else {
            return Ok(());
        };
        let detail = format!(
            "job {id} was made before, and its record can't be read: {}",
            path.display()
        );
        Err(Problem::new(ErrorCode::JobIdInUse, detail)
            .with_remedy("Look at that file, or use a new job_id.")
            .into())
    }

    pub(crate) fn get(&self, id: JobId) -> Result<Arc<Entry>, ApiError> {
        self.known.lock().get(&id).cloned().ok_or_else(|| {
            ApiError::new(ErrorCode::JobNotFound, format!("no job {id} on this node"))
        })
    }

    /// The job as callers see it, with its streams from its end to its acknowledgement.
    pub(crate) async fn object(&self, entry: &Entry) -> Result<Job, ApiError> {
        let job = entry.job();
        if !job.state.is_final() || job.acknowledged {
            return Ok(job);
        }
        let (journal, id) = (self.journal.clone(), job.job_id);
        match blocking(move || journal.job::<JobRecord>(id)).await {
            Ok(Some(record)) => Ok(record.job),
            Ok(None) => Err(ApiError::new(
                ErrorCode::Internal,
                format!("the record of job {id} can't be read; it is set aside"),
            )),
            Err(error) => Err(ApiError::new(
                ErrorCode::Internal,
                format!("reading the record of job {id}: {error}"),
            )),
        }
    }

    /// Jobs that are not acknowledged, by their ids, without their streams.
    pub(crate) fn entries(&self, after: Option<JobId>) -> Vec<(JobId, Arc<Entry>)> {
        let known = self.known.lock();
        let entries = known.iter().filter(|(id, entry)| {
            after.is_none_or(|after| **id > after) && !entry.is_acknowledged()
        });
        entries
            .map(|(id, entry)| (*id, Arc::clone(entry)))
            .collect()
    }

    /// The job's command, once it has been started.
    pub(crate) fn exec(&self, entry: &Entry) -> Option<Arc<Exec>> {
        let record = entry.record();
        if record.job.state == JobState::Accepted {
            return None;
        }
        self.sessions
            .of_job(record.session_id)?
            .execs
            .get(drive::exec_id(&record))
            .ok()
    }

    /// The caller has the result: the output goes, the id is remembered for a while.
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
        // While its sandbox is on its way out, whoever ends it does this.
        self.sessions.forget_of_job(entry.record().session_id);
        Ok(())
    }

    /// Stops a job and waits for its end. One that has ended stays as it ended; one that is not known never runs.
    pub(crate) async fn stop(self: &Arc<Self>, request: &JobStop) -> Result<Arc<Entry>, ApiError> {
        check_version(request.version)?;
        let entry = if let Ok(entry) = self.get(request.job_id) {
            entry
        } else {
            // To its end even when the caller goes away, as an admission.
            let (jobs, record) = (
                Arc::clone(self),
                JobRecord::never_to_run(request, self.sessions.node_id),
            );
            let barred = tokio::spawn(async move { jobs.bar(record).await }).await;
            barred.map_err(|_| {
                ApiError::new(ErrorCode::Internal, "stopping the job was interrupted")
            })??
        };
        if entry.job().task_id != request.task_id {
            return Err(ApiError::new(
                ErrorCode::JobNotFound,
                format!("no job {} of this task on this node", request.job_id),
            ));
        }
        self.ask_to_stop(&entry, Stop::Caller)
            .await
            .map_err(|error| journal_error(&error))?;
        Ok(entry)
    }

    /// Remembers the id of a job that was stopped before anybody asked to run it: its request may be on its way, or wait
    /// at the gate.
    async fn bar(&self, record: JobRecord) -> Result<Arc<Entry>, ApiError> {
        let _gate = self.gate.lock().await;
        let id = record.job.job_id;
        if let Ok(entry) = self.get(id) {
            return Ok(entry);
        }
        self.check_readable(id)?;
        self.write_down(record).await
    }

    async fn ask_to_stop(&self, entry: &Arc<Entry>, stop: Stop) -> io::Result<()> {
        let ask = move |record: &mut JobRecord| {
            let new = !record.is_final() && record.stop.is_none();
            if new {
                record.stop = Some(stop);
            }
            new
        };
        self.update(entry, ask).await
    }

    /// Stops everything that runs, and takes no more. Returns when the sandboxes are gone, or when that takes too long.
    pub(crate) async fn stop_all(&self) {
        *self.gate.lock().await = true;
        let running: Vec<Arc<Entry>> = self
            .known
            .lock()
            .values()
            .filter(|entry| !entry.is_final())
            .cloned()
            .collect();
        for entry in running {
            if let Err(error) = self.ask_to_stop(&entry, Stop::Node).await {
                tracing::error!(%error, "Recording that a job is to stop failed.");
            }
        }
        self.drivers.close();
        if tokio::time::timeout(STOP_WAIT, self.drivers.wait())
            .await
            .is_err()
        {
            tracing::warn!("Not every job could be ended in time; the next worker goes on.");
        }
    }

    /// Changes a record: written down first, then seen. `change` says whether there is something to write. Goes to its end
    /// even when the caller goes away.
    async fn update(
        &self,
        entry: &Arc<Entry>,
        change: impl FnOnce(&mut JobRecord) -> bool + Send + 'static,
    ) -> io::Result<()> {
        let (journal, entry, news) = (self.journal.clone(), Arc::clone(entry), self.news.clone());
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
            // Full, or nobody listens: then it is found out by asking.
            news.try_send(id).ok();
            Ok(())
        });
        updated.await.unwrap_or_else(|_| Err(interrupted()))
    }

    /// Forgets ids whose time is over, until it is told to stop.
    pub(crate) async fn keep_time(self: Arc<Self>, stop: CancellationToken) {
        while stop
            .run_until_cancelled(tokio::time::sleep(FORGET_EVERY))
            .await
            .is_some()
        {
            self.forget(OffsetDateTime::now_utc()).await;
        }
    }

    async fn forget(&self, now: OffsetDateTime) {
        // Nobody may find an id between the look and its end.
        let _gate = self.gate.lock().await;
        let over: Vec<JobId> = self
            .known
            .lock()
            .iter()
            .filter(|(_, entry)| entry.record.lock().is_forgotten(now))
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            let Ok(entry) = self.get(id) else { continue };
            // Its id names a container: not before that is gone.
            if !self.sessions.forget_of_job(entry.record().session_id) {
                continue;
            }
            let journal = self.journal.clone();
            match blocking(move || journal.forget_job(id)).await {
                Ok(()) => drop(self.known.lock().remove(&id)),
                Err(error) => {
                    tracing::warn!(job_id = %id, %error, "Forgetting a job failed; it is tried again.")
                }
            }
        }
    }
}
