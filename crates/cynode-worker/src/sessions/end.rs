//! Ends sessions, marks them lost, and resumes them.

use std::sync::Arc;

use cynode_api::{
    ErrorCode, SandboxId, Session, SessionEnd, SessionId, SessionState, WorkspaceDisposal,
};
use cynode_service::{ApiError, checks::check_reason};
use time::OffsetDateTime;

use super::{
    CreateOutcome, Live, SessionEntry, Sessions, check_version, journal_error, validate,
    workspace::RequestedDisk,
};

use crate::{journal::Disposal, process};

/// Why a session ends, and what becomes of its workspace.
#[derive(Clone, Debug)]
pub(crate) struct EndRequest {
    pub(crate) reason: String,
    pub(crate) workspace: Disposal,
}

impl Sessions {
    /// Ends a session. A session that has already ended keeps its first end, except for a workspace
    /// that the request names explicitly.
    pub(crate) async fn end(
        self: &Arc<Self>,
        id: SessionId,
        request: SessionEnd,
    ) -> Result<Session, ApiError> {
        check_version(request.version)?;
        let reason = request
            .reason
            .unwrap_or_else(|| "ended by the caller".to_owned());
        check_reason(&reason)?;
        let entry = self.get(id)?;
        let requested = request.workspace;
        let workspace = match requested.unwrap_or_default() {
            WorkspaceDisposal::Delete => Disposal::Delete,
            WorkspaceDisposal::Keep => Disposal::Keep,
        };
        self.end_entry(&entry, EndRequest { reason, workspace })
            .await?;
        if let Some(requested) = requested {
            // Runs to completion even if the caller disconnects.
            let (sessions, entry) = (Arc::clone(self), Arc::clone(&entry));
            let settled =
                tokio::spawn(async move { sessions.settle_workspace(&entry, requested).await })
                    .await;
            settled.map_err(|_| {
                ApiError::new(ErrorCode::Internal, "ending the session was interrupted")
            })??;
        }
        Ok(entry.object())
    }

    /// Makes the workspace of a session that an earlier request has ended what this request asks
    /// for: a kept one can be deleted, and one that is kept for a while can be kept.
    async fn settle_workspace(
        &self,
        entry: &Arc<SessionEntry>,
        requested: WorkspaceDisposal,
    ) -> Result<(), ApiError> {
        let _step = entry.step.lock().await;
        let record = entry.record();
        let disposal = record.disposal.unwrap_or_default();
        // The session may have been resumed meanwhile.
        if record.session.state != SessionState::Ended {
            return Ok(());
        }
        let id = record.session.workspace_id;
        let change = match (requested, disposal) {
            (WorkspaceDisposal::Delete, Disposal::Delete) => return Ok(()),
            (WorkspaceDisposal::Delete, Disposal::Keep | Disposal::KeepForAWhile) => {
                // Admissions of other sessions may take the workspace.
                let _admission = self.admission_lock.lock().await;
                self.check_workspace_unused(id, record.session.session_id)?;
                self.delete_workspace(id)
                    .await
                    .map_err(|error| journal_error(&error))?;
                Disposal::Delete
            }
            (WorkspaceDisposal::Keep, _) => {
                let workspace = self.journal.workspace(id);
                if workspace.map_err(|error| journal_error(&error))?.is_none() {
                    return Err(ApiError::new(
                        ErrorCode::WorkspaceNotFound,
                        format!(
                            "session {} has ended before, and its workspace is gone",
                            record.session.session_id
                        ),
                    ));
                }
                if disposal != Disposal::KeepForAWhile {
                    return Ok(());
                }
                self.keep_workspace(id, false)
                    .await
                    .map_err(|error| journal_error(&error))?;
                Disposal::Keep
            }
        };
        self.update(entry, move |record| record.disposal = Some(change))
            .await
            .map_err(|error| journal_error(&error))?;
        drop(self.empty_trash());
        Ok(())
    }

    pub(crate) async fn end_entry(
        self: &Arc<Self>,
        entry: &Arc<SessionEntry>,
        ending: EndRequest,
    ) -> Result<(), ApiError> {
        // Runs to completion even if the caller disconnects.
        let (sessions, entry) = (Arc::clone(self), Arc::clone(entry));
        let ended = tokio::spawn(async move { sessions.run_end(&entry, ending).await }).await;
        ended
            .map_err(|_| ApiError::new(ErrorCode::Internal, "ending the session was interrupted"))?
    }

    async fn run_end(
        self: &Arc<Self>,
        entry: &Arc<SessionEntry>,
        ending: EndRequest,
    ) -> Result<(), ApiError> {
        let _step = entry.step.lock().await;
        match entry.state() {
            SessionState::Ended | SessionState::Failed => return Ok(()),
            // Retried with the options of the first request.
            SessionState::Ending => return self.finish_end(entry).await,
            SessionState::Creating | SessionState::Running | SessionState::Lost => {}
        }
        // Set the deletion date first: it has no effect on a live session, and a crash in between
        // must not retain the workspace for ever.
        if ending.workspace != Disposal::Delete {
            let for_a_while = ending.workspace == Disposal::KeepForAWhile;
            self.keep_workspace(entry.record().session.workspace_id, for_a_while)
                .await
                .map_err(|error| journal_error(&error))?;
        }
        self.update(entry, move |record| {
            record.session.state = SessionState::Ending;
            record.session.end_reason.get_or_insert(ending.reason);
            record.disposal = Some(ending.workspace);
        })
        .await
        .map_err(|error| journal_error(&error))?;
        self.finish_end(entry).await
    }

    /// The second half of an end, also run after a restart. The caller holds the step lock.
    pub(super) async fn finish_end(&self, entry: &Arc<SessionEntry>) -> Result<(), ApiError> {
        let record = entry.record();
        if let Some(live) = entry.live.lock().take() {
            live.close();
        }
        self.remove_sandbox(record.sandbox_id, record.id_block)
            .await?;
        entry.execs.mark_all_lost();
        let disposed = match record.disposal.unwrap_or_default() {
            Disposal::Delete => self.delete_workspace(record.session.workspace_id).await,
            Disposal::Keep | Disposal::KeepForAWhile => {
                self.release_workspace(record.session.workspace_id).await
            }
        };
        // The output of a job is retained until it is collected.
        let disposed = disposed.and_then(|()| {
            if entry.belongs_to_job() {
                entry.execs.close_log()
            } else {
                entry.execs.forget_all()
            }
        });
        disposed.map_err(|error| journal_error(&error))?;
        self.update(entry, |record| {
            record.session.state = SessionState::Ended;
            record.session.ended_at = Some(OffsetDateTime::now_utc());
            record.init = None;
        })
        .await
        .map_err(|error| journal_error(&error))?;
        drop(self.empty_trash());
        Ok(())
    }

    /// Ends all live sessions and retains their workspaces for the grace period; returns how many
    /// ended.
    pub(crate) async fn end_all(self: &Arc<Self>, reason: &str) -> usize {
        let entries: Vec<Arc<SessionEntry>> = self
            .by_id
            .lock()
            .values()
            .filter(|entry| entry.record.lock().is_live())
            .cloned()
            .collect();
        let mut ending = tokio::task::JoinSet::new();
        for entry in entries {
            let (sessions, reason) = (Arc::clone(self), reason.to_owned());
            let workspace = if entry.belongs_to_job() {
                Disposal::Delete
            } else {
                Disposal::KeepForAWhile
            };
            ending.spawn(async move {
                sessions
                    .end_entry(&entry, EndRequest { reason, workspace })
                    .await
            });
        }
        ending.join_all().await.into_iter().flatten().count()
    }

    /// Removes the container and the sockets; succeeds if they are already gone.
    pub(super) async fn remove_sandbox(
        &self,
        id: SandboxId,
        id_block: u32,
    ) -> Result<(), ApiError> {
        self.runtime
            .remove(&crate::journal::container_name(id))
            .await
            .map_err(|error| ApiError::from(super::runtime_problem(&error)))?;
        self.pending_removals
            .lock()
            .retain(|(pending, _)| *pending != id);
        // A runtime killed during a start forgets the processes it created. Kill them by their ids,
        // unless another sandbox uses the block by now.
        if let Some(ids) = self.ids.exclusive_ids(id_block)
            && !self.is_block_used_elsewhere(id, id_block)
        {
            process::kill_owned(ids).await;
        }
        crate::tree::remove(&self.journal.sandbox_directory(id)).map_err(|error| {
            ApiError::new(
                ErrorCode::Internal,
                format!("removing the sandbox's sockets: {error}"),
            )
        })
    }

    /// Returns whether a live sandbox other than `id` uses this id block.
    fn is_block_used_elsewhere(&self, id: SandboxId, id_block: u32) -> bool {
        let in_session = self.by_id.lock().values().any(|entry| {
            let record = entry.record.lock();
            record.id_block == id_block && record.sandbox_id != id && record.is_live()
        });
        in_session || self.spare_uses_block(id, id_block)
    }

    /// Like `remove_sandbox`, but schedules a retry on failure. Returns whether the sandbox is
    /// gone.
    pub(super) async fn clear_sandbox(&self, id: SandboxId, id_block: u32) -> bool {
        let removed = self.remove_sandbox(id, id_block).await;
        if let Err(error) = &removed {
            tracing::error!(
                sandbox_id = %id,
                error = %error,
                "Failed to remove a sandbox; will retry."
            );
            self.pending_removals.lock().push((id, id_block));
        }
        removed.is_ok()
    }

    /// Retries removals that failed.
    pub(super) async fn retry_removals(&self) {
        let pending = std::mem::take(&mut *self.pending_removals.lock());
        for (id, id_block) in pending {
            self.clear_sandbox(id, id_block).await;
        }
    }

    /// Deletes discarded files in the background.
    pub(crate) fn empty_trash(&self) -> tokio::task::JoinHandle<()> {
        let journal = self.journal.clone();
        tokio::task::spawn_blocking(move || journal.empty_trash())
    }

    /// Watches a live container and marks the session lost if it exits.
    pub(super) fn watch(self: &Arc<Self>, entry: &Arc<SessionEntry>, live: Arc<Live>) {
        let (sessions, entry) = (Arc::clone(self), Arc::clone(entry));
        tokio::spawn(async move {
            loop {
                match live.link() {
                    Ok(link) => {
                        tokio::select! {
                            () = link.absent() => {}
                            () = tokio::time::sleep(std::time::Duration::from_secs(5)) => {}
                        }
                    }
                    Err(_) => tokio::time::sleep(std::time::Duration::from_secs(1)).await,
                }
                if live.is_closed() {
                    return;
                }
                if !live.init.is_alive() {
                    sessions
                        .mark_lost(&entry, "the sandbox's process 1 ended")
                        .await;
                    return;
                }
            }
        });
    }

    /// Marks a session lost whose container is gone without an end.
    pub(super) async fn mark_lost(&self, entry: &Arc<SessionEntry>, reason: &str) {
        let _step = entry.step.lock().await;
        let record = entry.record();
        if !matches!(
            record.session.state,
            SessionState::Running | SessionState::Creating
        ) {
            return;
        }
        tracing::warn!(session_id = %record.session.session_id, reason, "A session is lost.");
        metrics::counter!("cynode_sessions_lost_total").increment(1);
        if let Some(live) = entry.live.lock().take() {
            live.close();
        }
        self.clear_sandbox(record.sandbox_id, record.id_block).await;
        if let Err(error) = self.release_workspace(record.session.workspace_id).await {
            tracing::warn!(%error, "Failed to unmount a lost session's disk.");
        }
        entry.execs.mark_all_lost();
        self.set_lost(entry, reason.to_owned(), true).await;
    }

    /// Records that a session has lost its container and can be resumed.
    pub(super) async fn set_lost(
        &self,
        entry: &Arc<SessionEntry>,
        reason: String,
        keep_for_a_while: bool,
    ) {
        let workspace_kept = if keep_for_a_while {
            self.keep_workspace(entry.record().session.workspace_id, true)
                .await
        } else {
            Ok(())
        };
        let update = self.update(entry, |record| {
            record.session.state = SessionState::Lost;
            record.session.end_reason = Some(reason);
            record.session.ended_at = Some(OffsetDateTime::now_utc());
            record.init = None;
        });
        if let Err(error) = workspace_kept.and(update.await) {
            tracing::error!(%error, "Failed to record a lost session.");
            entry.state.send_replace(SessionState::Lost);
        }
    }

    /// Starts a new container for a lost, expired or ended session on its old workspace.
    pub(crate) async fn resume(self: &Arc<Self>, id: SessionId) -> Result<CreateOutcome, ApiError> {
        self.wait_until_reconciled().await?;
        let entry = self.get(id)?;
        // Runs to completion even if the caller disconnects: an admitted session is always started.
        let (sessions, resumed) = (Arc::clone(self), Arc::clone(&entry));
        let admitted = tokio::spawn(async move { sessions.admit_resumed(&resumed).await }).await;
        let new = admitted.map_err(|_| {
            ApiError::new(ErrorCode::Internal, "resuming the session was interrupted")
        })??;
        self.wait_for_outcome(&entry, new).await
    }

    /// Re-admits a session and starts its sandbox; returns false if it is already running.
    async fn admit_resumed(self: &Arc<Self>, entry: &Arc<SessionEntry>) -> Result<bool, ApiError> {
        let _step = entry.step.lock().await;
        let record = entry.record();
        let id = record.session.session_id;
        match record.session.state {
            SessionState::Running | SessionState::Creating => return Ok(false),
            SessionState::Lost | SessionState::Ended => {}
            state => {
                return Err(ApiError::new(
                    ErrorCode::NotResumable,
                    format!("session {id} is {state}"),
                ));
            }
        }
        // A sandbox whose removal failed must not keep running on the same files.
        self.remove_sandbox(record.sandbox_id, record.id_block)
            .await?;
        // As for a new session: admissions compete for the workspace and the last slot.
        let _admission = self.admission_lock.lock().await;
        self.check_room()?;
        // The node's capacity may have shrunk since the session was created. Its disk exists.
        self.capacity.check(&cynode_api::Limits {
            disk_bytes: 0,
            ..record.session.limits
        })?;
        self.check_capacity(record.session.limits.memory_bytes)?;
        let disk = RequestedDisk {
            bytes: record.session.limits.disk_bytes,
            explicit: false,
        };
        let reference = cynode_api::WorkspaceRef::Workspace(record.session.workspace_id);
        self.workspace(&reference, record.session.task_id, id, disk)
            .await
            .map_err(|error| {
                if error.is(ErrorCode::WorkspaceNotFound) {
                    ApiError::new(
                        ErrorCode::NotResumable,
                        format!("the workspace of session {id} is gone"),
                    )
                } else {
                    error
                }
            })?;
        let lifetime = record
            .request
            .max_lifetime_seconds
            .unwrap_or(cynode_api::session_limits::DEFAULT_LIFETIME_SECONDS);
        let now = OffsetDateTime::now_utc();
        self.update(entry, move |record| {
            record.sandbox_id = SandboxId::generate();
            record.disposal = None;
            record.resumed = true;
            record.session.state = SessionState::Creating;
            record.session.end_reason = None;
            record.session.ended_at = None;
            record.session.expires_at = validate::after(now, lifetime);
        })
        .await
        .map_err(|error| journal_error(&error))?;
        *entry.failure.lock() = None;
        self.spawn_bring_up(entry);
        Ok(true)
    }
}
