//! The sandbox of a job: a session that is visible only to its job.
//!
//! It is created, adopted and ended like any other session and counts as one. Unlike others it is
//! not listed and accepts no calls; its container is named after the job; it neither expires nor
//! idles, because the job has a deadline; and its output outlives it.

use std::{collections::HashSet, io, os::fd::OwnedFd, path::Path, sync::Arc};

use cynode_api::{
    ErrorCode, JobId, JobRun, SandboxId, SessionCreate, SessionId, SessionState, Unenforced,
    WorkspaceRef, session_limits::MAX_LIFETIME_SECONDS,
};
use cynode_service::ApiError;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use tokio::sync::MutexGuard;

use super::{
    EndRequest, Live, SessionEntry, Sessions, blocking,
    create::new_record,
    journal_error, validate,
    workspace::{RequestedDisk, job_directory},
};
use crate::{
    journal::{Disposal, SessionRecord, WorkspaceRecord},
    runtime::Image,
};

/// Admission of one more sandbox. Holds the admission lock, so nothing else is admitted meanwhile.
#[derive(Debug)]
pub(crate) struct Reservation<'a> {
    sessions: &'a Arc<Sessions>,
    record: SessionRecord,
    _lock: MutexGuard<'a, ()>,
}

/// The sandbox that a job needs.
#[derive(Debug)]
pub(crate) struct JobSandboxRequest<'a> {
    pub(crate) run: &'a JobRun,
    pub(crate) session_id: SessionId,
    /// The models that the job's specification allows.
    pub(crate) allowed_models: Vec<String>,
}

/// Whether admission may fail because the node is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobAdmission {
    CheckCapacity,
    /// Admitted before by a worker that crashed.
    AlreadyGranted,
}

impl Reservation<'_> {
    /// Journals the sandbox and starts it.
    pub(crate) async fn commit(self) -> Result<Arc<SessionEntry>, ApiError> {
        let (entry, _step) = self.sessions.record_session(self.record).await?;
        self.sessions.spawn_bring_up(&entry);
        Ok(entry)
    }

    pub(crate) async fn cancel(self) {
        if !self
            .record
            .request
            .workspace_ref
            .as_ref()
            .is_none_or(WorkspaceRef::is_new_workspace)
        {
            return;
        }
        if let Err(error) = self
            .sessions
            .delete_workspace(self.record.session.workspace_id)
            .await
        {
            tracing::warn!(
                %error,
                "Failed to delete an unused workspace; the next start retries."
            );
        }
    }
}

impl Sessions {
    /// Rejects a job whose sandbox can't be created.
    pub(crate) fn check_job(&self, run: &JobRun) -> Result<(), ApiError> {
        validate::check_version(run.version)?;
        validate::check(&session_of(run, SessionId::generate()), &self.capacity)
            .map(drop)
            .map_err(|mut error| {
                error.detail.insert_str(0, "sandbox.");
                error
            })
    }

    /// Admits a job's sandbox and allocates its workspace.
    pub(crate) async fn reserve(
        self: &Arc<Self>,
        job: JobSandboxRequest<'_>,
        image: Image,
        admission: JobAdmission,
    ) -> Result<Reservation<'_>, ApiError> {
        let JobSandboxRequest {
            run,
            session_id,
            allowed_models,
        } = job;
        let request = SessionCreate {
            allowed_models,
            ..session_of(run, session_id)
        };
        let checked = validate::check(&request, &self.capacity)?;
        let sandbox_id = SandboxId::from_uuid(*run.job_id.as_uuid());
        let lock = self.admission_lock.lock().await;
        if admission == JobAdmission::CheckCapacity {
            self.check_room()?;
            self.check_capacity(checked.limits.memory_bytes)?;
        }
        if !self.limits_disks() {
            self.check_enforced(&[Unenforced::Disk])?;
        }
        // Ids are random, so a collision is a caller's mistake. Without this check the other
        // container would be mistaken for the job's.
        if self
            .by_id
            .lock()
            .values()
            .any(|entry| entry.record.lock().sandbox_id == sandbox_id)
            || self.is_spare(sandbox_id)
        {
            return Err(ApiError::new(
                ErrorCode::JobIdInUse,
                format!("{sandbox_id} is the id of another sandbox on this node"),
            ));
        }
        let disk = RequestedDisk {
            bytes: checked.limits.disk_bytes,
            explicit: false,
        };
        let reference = run.sandbox.workspace_ref.clone().unwrap_or_default();
        let WorkspaceRecord {
            workspace_id,
            id_block,
            ..
        } = self
            .workspace(&reference, run.task_id, session_id, disk)
            .await?;
        let mut record = new_record(request, &checked, image, self.node_id);
        record.sandbox_id = sandbox_id;
        record.job_id = Some(run.job_id);
        record.id_block = id_block;
        record.session.workspace_id = workspace_id;
        Ok(Reservation {
            sessions: self,
            record,
            _lock: lock,
        })
    }

    /// Looks up the sandbox of a job in any state.
    pub(crate) fn job_sandbox(&self, id: SessionId) -> Option<Arc<SessionEntry>> {
        self.by_id
            .lock()
            .get(&id)
            .cloned()
            .filter(|entry| entry.belongs_to_job())
    }

    /// Returns whether a session directory exists that could not be read.
    pub(crate) fn is_unreadable(&self, id: SessionId) -> bool {
        self.journal.session_directory(id).exists()
    }

    /// Sandboxes of jobs that are not in `jobs`.
    pub(crate) fn sandboxes_of_other_jobs(&self, jobs: &HashSet<JobId>) -> Vec<SessionId> {
        let by_id = self.by_id.lock();
        by_id
            .iter()
            .filter(|(_, entry)| {
                entry
                    .record
                    .lock()
                    .job_id
                    .is_some_and(|id| !jobs.contains(&id))
            })
            .map(|(id, _)| *id)
            .collect()
    }

    /// Opens the job directory of a sandbox in which nothing is to run any more. Removes its
    /// container first, so that nothing changes there. `None` if its disk is gone or in other use.
    pub(crate) async fn open_job_directory(
        self: &Arc<Self>,
        id: SessionId,
    ) -> Result<Option<OwnedFd>, ApiError> {
        let Some(entry) = self.job_sandbox(id) else {
            return Ok(None);
        };
        let _step = entry.step.lock().await;
        if !matches!(entry.state(), SessionState::Running | SessionState::Lost) {
            return Ok(None);
        }
        let record = entry.record();
        let workspace_id = record.session.workspace_id;
        let is_used_elsewhere = self.by_id.lock().values().any(|other| {
            let other = other.record.lock();
            other.session.workspace_id == workspace_id
                && other.session.session_id != id
                && other.is_live()
        });
        if is_used_elsewhere {
            return Ok(None);
        }
        if let Some(live) = entry.live.lock().take() {
            live.close();
        }
        self.remove_sandbox(record.sandbox_id, record.id_block)
            .await?;
        entry.execs.mark_all_lost();
        let (image, data) = self.journal.workspace_disk(workspace_id);
        let workspace = self
            .journal
            .workspace(workspace_id)
            .map_err(|error| journal_error(&error))?;
        let Some(workspace) = workspace.filter(|_| image.exists() || data.exists()) else {
            return Ok(None);
        };
        self.prepare_disk(workspace_id, workspace.disk_bytes)
            .await
            .map_err(|error| journal_error(&error))?;
        blocking(move || open_confined(&data))
            .await
            .map_err(|error| journal_error(&error))
    }

    /// Ends a job's sandbox.
    pub(crate) async fn end_job_sandbox(self: &Arc<Self>, id: SessionId) -> Result<(), ApiError> {
        let Some(entry) = self.job_sandbox(id) else {
            return Ok(());
        };
        // A workspace that existed before the job outlives it.
        let is_new_workspace = entry
            .record()
            .request
            .workspace_ref
            .as_ref()
            .is_none_or(WorkspaceRef::is_new_workspace);
        let workspace = if is_new_workspace {
            Disposal::Delete
        } else {
            Disposal::Keep
        };
        self.end_entry(
            &entry,
            EndRequest {
                reason: "the job has ended".to_owned(),
                workspace,
            },
        )
        .await
    }

    /// Drops an ended sandbox of a job and its output. Returns false while it is live.
    pub(crate) fn forget_job_sandbox(&self, id: SessionId) -> bool {
        let Some(entry) = self.job_sandbox(id) else {
            return true;
        };
        if entry.record.lock().is_live() {
            return false;
        }
        self.by_id.lock().remove(&id);
        entry.execs.expire_all();
        if let Err(error) = self.journal.discard(&self.journal.session_directory(id)) {
            tracing::warn!(
                session_id = %id,
                %error,
                "Failed to drop the output of a job; the next start retries."
            );
        }
        drop(self.empty_trash());
        true
    }
}

impl SessionEntry {
    /// Waits until commands can run; fails with the final state if they never can.
    pub(crate) async fn until_live(&self) -> Result<Arc<Live>, SessionState> {
        let mut states = self.state.subscribe();
        loop {
            let state = *states.borrow_and_update();
            match state {
                SessionState::Creating => {}
                // After a worker restart the container is adopted a little later.
                SessionState::Running => {
                    if let Some(live) = self.live.lock().clone() {
                        return Ok(live);
                    }
                }
                ended => return Err(ended),
            }
            if states.changed().await.is_err() {
                return Err(SessionState::Lost);
            }
        }
    }

    /// Why the sandbox has no container.
    pub(crate) fn failure(&self) -> ApiError {
        let failure = self.failure.lock().clone();
        failure.unwrap_or_else(|| {
            ApiError::new(
                ErrorCode::Internal,
                self.record
                    .lock()
                    .session
                    .end_reason
                    .clone()
                    .unwrap_or_default(),
            )
        })
    }
}

/// Opens the job directory on a disk, if it has one.
fn open_confined(data: &Path) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = rustix::fs::openat(CWD, data, flags | OFlags::NOFOLLOW, Mode::empty())?;
    let name = job_directory(Path::new(""));
    let confined = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    match rustix::fs::openat2(&top, name, flags, Mode::empty(), confined) {
        Ok(opened) => Ok(Some(opened)),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn session_of(run: &JobRun, session_id: SessionId) -> SessionCreate {
    SessionCreate {
        workspace_ref: run.sandbox.workspace_ref.clone(),
        limits: run.sandbox.limits,
        network_policy: run.sandbox.network_policy,
        max_lifetime_seconds: Some(MAX_LIFETIME_SECONDS),
        idle_timeout_seconds: Some(MAX_LIFETIME_SECONDS),
        ..SessionCreate::new(run.task_id, session_id, run.sandbox.image_ref.clone())
    }
}
