//! Ending a session, losing one, taking one up again.

use std::sync::Arc;

use cynode_api::{
    ErrorCode, SandboxId, Session, SessionEnd, SessionId, SessionState, WorkspaceDisposal,
};
use cynode_service::{ApiError, checks::check_reason};
use time::OffsetDateTime;

use super::{
    Created, Entry, Live, Sessions, check_version, journal_error, validate, workspace::AskedDisk,
};

use crate::{journal::Disposal, process};

/// Why and how a session ends.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    pub(crate) reason: String,
    pub(crate) workspace: Disposal,
}

impl Sessions {
    /// Ends a session. One that has ended already stays as it ended.
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
        let workspace = match request.workspace.unwrap_or_default() {
            WorkspaceDisposal::Delete => Disposal::Delete,
            WorkspaceDisposal::Keep => Disposal::Keep,
        };
        self.end_entry(&entry, Ending { reason, workspace }).await?;
        Ok(entry.object())
    }

    pub(crate) async fn end_entry(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        ending: Ending,
    ) -> Result<(), ApiError> {
        // Runs to its end even when the caller goes away.
        let (sessions, entry) = (Arc::clone(self), Arc::clone(entry));
        let ended = tokio::spawn(async move { sessions.run_end(&entry, ending).await }).await;
        ended
            .map_err(|_| ApiError::new(ErrorCode::Internal, "ending the session was interrupted"))?
    }

    async fn run_end(self: &Arc<Self>, entry: &Arc<Entry>, ending: Ending) -> Result<(), ApiError> {
        let _step = entry.step.lock().await;
        match entry.state() {
            SessionState::Ended | SessionState::Failed => return Ok(()),
            // Taken up again: as it was asked for the first time.
            SessionState::Ending => return self.finish_end(entry).await,
            SessionState::Creating | SessionState::Running | SessionState::Lost => {}
        }
        // First the date, which nobody looks at while the session lives: a crash in between must not keep it for ever.
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

    /// The second half of an end, which a restarted worker does too. The step's lock is held.
    pub(super) async fn finish_end(&self, entry: &Arc<Entry>) -> Result<(), ApiError> {
        let record = entry.record();
        if let Some(live) = entry.live.lock().take() {
            live.close();
        }
        self.remove_sandbox(record.sandbox_id, record.id_block)
            .await?;
        entry.execs.lose_all();
        let disposed = match record.disposal.unwrap_or_default() {
            Disposal::Delete => self.delete_workspace(record.session.workspace_id).await,
            Disposal::Keep | Disposal::KeepForAWhile => {
                self.release_workspace(record.session.workspace_id).await
            }
        };
        // A job's output is kept until somebody has it.
        let disposed = disposed.and_then(|()| {
            if entry.is_jobs() {
                entry.execs.rest()
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

    /// Ends every session that lives, keeping the workspaces for a while; says how many there were.
    pub(crate) async fn end_all(self: &Arc<Self>, reason: &str) -> usize {
        let entries: Vec<Arc<Entry>> = self
            .known
            .lock()
            .values()
            .filter(|entry| entry.record.lock().is_live())
            .cloned()
            .collect();
        let mut ending = tokio::task::JoinSet::new();
        for entry in entries {
            let (sessions, reason) = (Arc::clone(self), reason.to_owned());
            let workspace = if entry.is_jobs() {
                Disposal::Delete
            } else {
                Disposal::KeepForAWhile
            };
            ending.spawn(async move {
                sessions
                    .end_entry(&entry, Ending { reason, workspace })
                    .await
            });
        }
        ending.join_all().await.into_iter().flatten().count()
    }

    /// Removes container and sockets. What is gone already is fine.
    pub(super) async fn remove_sandbox(
        &self,
        id: SandboxId,
        id_block: u32,
    ) -> Result<(), ApiError> {
        self.runtime
            .remove(&crate::journal::container_name(id))
            .await
            .map_err(|error| ApiError::from(super::runtime_problem(&error)))?;
        self.doomed.lock().retain(|(doomed, _)| *doomed != id);
        // A runtime that was killed in the middle of a start forgets what it had begun. Ids that another sandbox has by now are
        // that one's.
        if let Some(ids) = self.ids.own(id_block)
            && !self.block_is_anothers(id, id_block)
        {
            process::kill_owned(&ids);
        }
        crate::tree::remove(&self.journal.sandbox_directory(id)).map_err(|error| {
            ApiError::new(
                ErrorCode::Internal,
                format!("removing the sandbox's sockets: {error}"),
            )
        })
    }

    /// Whether a live sandbox other than this one has these ids.
    fn block_is_anothers(&self, id: SandboxId, id_block: u32) -> bool {
        let is_sessions = self.known.lock().values().any(|entry| {
            let record = entry.record.lock();
            record.id_block == id_block && record.sandbox_id != id && record.is_live()
        });
        is_sessions || self.spare_has(id, id_block)
    }

    /// As `remove_sandbox`, where nothing can be done about a failure but to try again later. Says whether it is gone.
    pub(super) async fn clear_sandbox(&self, id: SandboxId, id_block: u32) -> bool {
        let removed = self.remove_sandbox(id, id_block).await;
        if let Err(error) = &removed {
            tracing::error!(sandbox_id = %id, error = %error.0, "Removing a sandbox failed; it is tried again.");
            self.doomed.lock().push((id, id_block));
        }
        removed.is_ok()
    }

    /// Tries again to remove what could not be removed.
    pub(super) async fn remove_doomed(&self) {
        let doomed = std::mem::take(&mut *self.doomed.lock());
        for (id, id_block) in doomed {
            self.clear_sandbox(id, id_block).await;
        }
    }

    /// Deletes what was thrown away, in the background.
    pub(crate) fn empty_trash(&self) -> tokio::task::JoinHandle<()> {
        let journal = self.journal.clone();
        tokio::task::spawn_blocking(move || journal.empty_trash())
    }

    /// Watches a live container: when it goes away by itself, the session is lost.
    pub(super) fn watch(self: &Arc<Self>, entry: &Arc<Entry>, live: Arc<Live>) {
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
                    sessions.lose(&entry, "the sandbox's process 1 ended").await;
                    return;
                }
            }
        });
    }

    /// The container is gone and nobody asked for that.
    pub(super) async fn lose(&self, entry: &Arc<Entry>, reason: &str) {
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
            tracing::warn!(%error, "Unmounting a lost session's disk failed.");
        }
        entry.execs.lose_all();
        self.set_lost(entry, reason.to_owned(), true).await;
    }

    /// Records that a session has no container any more and can be resumed.
    pub(super) async fn set_lost(
        &self,
        entry: &Arc<Entry>,
        reason: String,
        keep_for_a_while: bool,
    ) {
        let kept = if keep_for_a_while {
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
        if let Err(error) = kept.and(update.await) {
            tracing::error!(%error, "Recording a lost session failed.");
            entry.state.send_replace(SessionState::Lost);
        }
    }

    /// Gives a session that was lost, expired or stopped a new container on its old workspace.
    pub(crate) async fn resume(self: &Arc<Self>, id: SessionId) -> Result<Created, ApiError> {
        self.wait_until_settled().await?;
        let entry = self.get(id)?;
        // To its end even when the caller goes away: it is brought up or stays as it was.
        let (sessions, resumed) = (Arc::clone(self), Arc::clone(&entry));
        let admitted = tokio::spawn(async move { sessions.admit_again(&resumed).await }).await;
        let new = admitted.map_err(|_| {
            ApiError::new(ErrorCode::Internal, "resuming the session was interrupted")
        })??;
        self.outcome(&entry, new).await
    }

    /// Admits a session once more and starts to bring it up; false when it runs already.
    async fn admit_again(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<bool, ApiError> {
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
        // What could not be removed when it was lost must not run on beside the new one, on the same files.
        self.remove_sandbox(record.sandbox_id, record.id_block)
            .await?;
        // As for a new one: of two that want the same workspace or the last place, one gets it.
        let _gate = self.gate.lock().await;
        self.check_room()?;
        // It may have been made when this node gave more.
        self.capacity.check(&record.session.limits)?;
        self.check_capacity(record.session.limits.memory_bytes)?;
        let disk = AskedDisk {
            bytes: record.session.limits.disk_bytes,
            explicit: false,
        };
        let reference = cynode_api::WorkspaceRef::Workspace(record.session.workspace_id);
        self.workspace(&reference, record.session.task_id, id, disk)
            .await
            .map_err(|error| {
                if error.0.is(ErrorCode::WorkspaceNotFound) {
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
