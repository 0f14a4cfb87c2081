//! The sandbox of a job: a session that only its job knows of.
//!
//! It is made, adopted and ended like any other and counts as one. It differs in this: it is not listed and has no calls; its
//! container bears the job's id; it neither expires nor idles, because the job has a deadline; its output stays after its end.

use std::{collections::HashSet, sync::Arc};

use cynode_api::{
    ErrorCode, JobId, JobRun, SandboxId, SessionCreate, SessionId, SessionState, Unenforced,
    WorkspaceRef, session_limits::MAX_LIFETIME_SECONDS,
};
use cynode_service::ApiError;
use tokio::sync::MutexGuard;

use super::{Ending, Entry, Live, Sessions, create::new_record, validate, workspace::AskedDisk};
use crate::{
    journal::{Disposal, SessionRecord, WorkspaceRecord},
    runtime::Image,
};

/// Room for one more sandbox. Nobody else is admitted while it is held.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    sessions: &'a Arc<Sessions>,
    record: SessionRecord,
    _gate: MutexGuard<'a, ()>,
}

/// Whether a sandbox may be refused because the node is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    MustBeFree,
    /// It was admitted before, by a worker that died.
    WasPromised,
}

impl Place<'_> {
    /// Writes the sandbox down and starts to bring it up.
    pub(crate) async fn take(self) -> Result<Arc<Entry>, ApiError> {
        let (entry, _step) = self.sessions.write_down(self.record).await?;
        self.sessions.spawn_bring_up(&entry);
        Ok(entry)
    }

    pub(crate) async fn give_up(self) {
        if !self
            .record
            .request
            .workspace_ref
            .as_ref()
            .is_none_or(WorkspaceRef::is_made)
        {
            return;
        }
        if let Err(error) = self
            .sessions
            .delete_workspace(self.record.session.workspace_id)
            .await
        {
            tracing::warn!(%error, "Deleting a workspace that nothing used failed; the next start does it.");
        }
    }
}

impl Sessions {
    /// Refuses what no sandbox can be made of.
    pub(crate) fn check_job(&self, run: &JobRun) -> Result<(), ApiError> {
        validate::check_version(run.version)?;
        validate::check(&session_of(run, SessionId::generate()), &self.capacity)
            .map(drop)
            .map_err(|mut error| {
                error.0.detail.insert_str(0, "sandbox.");
                error
            })
    }

    /// Finds room for a job's sandbox, with a workspace.
    pub(crate) async fn place(
        self: &Arc<Self>,
        run: &JobRun,
        session_id: SessionId,
        image: Image,
        room: Room,
    ) -> Result<Place<'_>, ApiError> {
        let request = session_of(run, session_id);
        let checked = validate::check(&request, &self.capacity)?;
        let sandbox_id = SandboxId::from_uuid(*run.job_id.as_uuid());
        let gate = self.gate.lock().await;
        if room == Room::MustBeFree {
            self.check_room()?;
            self.check_capacity(checked.limits.memory_bytes)?;
        }
        if !self.limits_disks() {
            self.check_enforced(&[Unenforced::Disk])?;
        }
        // Ids are ours and random, so this is somebody's mistake; but a name that is taken would be taken for our own.
        if self
            .known
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
        let disk = AskedDisk {
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
        Ok(Place {
            sessions: self,
            record,
            _gate: gate,
        })
    }

    /// The sandbox of a job, whatever its state.
    pub(crate) fn of_job(&self, id: SessionId) -> Option<Arc<Entry>> {
        self.known
            .lock()
            .get(&id)
            .cloned()
            .filter(|entry| entry.is_jobs())
    }

    /// Whether there is something of a sandbox that can't be read.
    pub(crate) fn is_unreadable(&self, id: SessionId) -> bool {
        self.journal.session_directory(id).exists()
    }

    /// Sandboxes of jobs that are not among these.
    pub(crate) fn of_other_jobs(&self, jobs: &HashSet<JobId>) -> Vec<SessionId> {
        let known = self.known.lock();
        known
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

    /// Ends a job's sandbox for good.
    pub(crate) async fn end_of_job(self: &Arc<Self>, id: SessionId) -> Result<(), ApiError> {
        let Some(entry) = self.of_job(id) else {
            return Ok(());
        };
        // One that was there before the job is there after it.
        let is_made = entry
            .record()
            .request
            .workspace_ref
            .as_ref()
            .is_none_or(WorkspaceRef::is_made);
        let workspace = if is_made {
            Disposal::Delete
        } else {
            Disposal::Keep
        };
        self.end_entry(
            &entry,
            Ending {
                reason: "the job has ended".to_owned(),
                workspace,
            },
        )
        .await
    }

    /// Drops what is left of a job's sandbox, its output. False while it has not ended.
    pub(crate) fn forget_of_job(&self, id: SessionId) -> bool {
        let Some(entry) = self.of_job(id) else {
            return true;
        };
        if entry.record.lock().is_live() {
            return false;
        }
        self.known.lock().remove(&id);
        entry.execs.expire_all();
        if let Err(error) = self.journal.discard(&self.journal.session_directory(id)) {
            tracing::warn!(session_id = %id, %error, "Dropping the output of a job failed; the next start does it.");
        }
        drop(self.empty_trash());
        true
    }
}

impl Entry {
    /// Waits until commands can be run; or tells the state in which they never can.
    pub(crate) async fn until_live(&self) -> Result<Arc<Live>, SessionState> {
        let mut states = self.state.subscribe();
        loop {
            let state = *states.borrow_and_update();
            match state {
                SessionState::Creating => {}
                // After a restart of the worker it has its container back a while later.
                SessionState::Running => {
                    if let Some(live) = self.live.lock().clone() {
                        return Ok(live);
                    }
                }
                over => return Err(over),
            }
            if states.changed().await.is_err() {
                return Err(SessionState::Lost);
            }
        }
    }

    /// Why it has no container.
    pub(crate) fn failure(&self) -> ApiError {
        let known = self.failure.lock().clone();
        known.unwrap_or_else(|| {
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
