//! Creates sessions: from a request to a running sandbox.

use std::{sync::Arc, time::Instant};

use cynode_api::{
    ErrorCode, LABEL_AGENT_COMPATIBLE, NodeId, Problem, SandboxId, Session, SessionCreate,
    SessionState, Unenforced, WorkspaceId, WorkspaceRef,
};
use cynode_service::ApiError;
use time::OffsetDateTime;
use tokio::sync::OwnedMutexGuard;

use super::{
    CREATE_TIMEOUT, SessionEntry, Sessions, blocking, environment, journal_error,
    pool::PoolKey,
    runtime_problem,
    start::{Sandbox, StartedSandbox},
    validate,
    workspace::RequestedDisk,
};
use crate::{
    disk,
    execs::SessionExecs,
    journal::SessionRecord,
    runtime::{self, Image},
};

/// The outcome of a create or resume call.
#[derive(Debug)]
pub(crate) enum CreateOutcome {
    /// Created by this call.
    New(Session),
    /// Created by an earlier call with the same body.
    Existing(Session),
    /// Still being created.
    Creating(Session),
}

impl Sessions {
    pub(crate) async fn create(
        self: &Arc<Self>,
        request: SessionCreate,
    ) -> Result<CreateOutcome, ApiError> {
        let begun_at = Instant::now();
        let checked = validate::check(&request, &self.capacity)?;
        if let Some(existing) = self.existing(&request)? {
            return self.wait_for_outcome(&existing, false).await;
        }
        self.wait_until_reconciled().await?;
        if matches!(request.workspace_ref, Some(WorkspaceRef::Artifact(_))) {
            self.upstream()?;
        }
        let image = self
            .image(&request.image_ref, request.image_digest.as_deref())
            .await?;
        // Runs to completion even if the caller disconnects: an admitted session is always started.
        let sessions = Arc::clone(self);
        let admitted =
            tokio::spawn(async move { sessions.admit(request, &checked, image, begun_at).await })
                .await;
        let (entry, new) = admitted.map_err(|_| {
            ApiError::new(ErrorCode::Internal, "creating the session was interrupted")
        })??;
        self.wait_for_outcome(&entry, new).await
    }

    /// Allocates a workspace and a record and starts the sandbox, or returns the session of an
    /// identical earlier request.
    async fn admit(
        self: &Arc<Self>,
        request: SessionCreate,
        checked: &validate::ValidatedRequest,
        image: Image,
        begun_at: Instant,
    ) -> Result<(Arc<SessionEntry>, bool), ApiError> {
        let _admission = self.admission_lock.lock().await;
        if let Some(existing) = self.existing(&request)? {
            return Ok((existing, false));
        }
        self.check_room()?;
        if !self.limits_disks() {
            self.check_enforced(&[Unenforced::Disk])?;
        }
        let key = PoolKey {
            image_id: image.id.clone(),
            limits: checked.limits,
            network_policy: request.network_policy.unwrap_or_default(),
        };
        let reference = request.workspace_ref.clone().unwrap_or(WorkspaceRef::New);
        let mut record = new_record(request, checked, image, self.node_id);
        if reference == WorkspaceRef::New
            && let Some(spare) = self.claim(&key)
        {
            return Ok((self.bind(spare, record, begun_at).await?, true));
        }
        self.check_capacity(checked.limits.memory_bytes)?;
        let session = &mut record.session;
        let disk = RequestedDisk {
            bytes: checked.limits.disk_bytes,
            explicit: record
                .request
                .limits
                .is_some_and(|limits| limits.disk_bytes.is_some()),
        };
        let workspace = self
            .workspace(&reference, session.task_id, session.session_id, disk)
            .await?;
        session.workspace_id = workspace.workspace_id;
        session.limits.disk_bytes = workspace.disk_bytes.unwrap_or(session.limits.disk_bytes);
        record.id_block = workspace.id_block;
        let (entry, _step) = self.record_session(record).await?;
        self.spawn_bring_up(&entry);
        Ok((entry, true))
    }

    /// Rejects new sessions while the host's disk is nearly full, so that running ones can
    /// continue.
    pub(crate) fn check_room(&self) -> Result<(), ApiError> {
        self.check_free(
            self.config.min_free_bytes,
            "new sessions are rejected until space is freed",
        )
    }

    /// Existing sessions may use space that new ones may not, down to the reserve for journal
    /// records.
    pub(crate) fn check_room_for_work(&self) -> Result<(), ApiError> {
        self.check_free(
            self.config.min_free_bytes / 4,
            "commands and file writes are rejected until space is freed",
        )
    }

    fn check_free(&self, required: u64, consequence: &str) -> Result<(), ApiError> {
        match disk::free_bytes(&self.config.state_dir) {
            Ok(free) if free < required => Err(ApiError::new(
                ErrorCode::NoSpace,
                format!(
                    "this node has {free} bytes of free disk space, fewer than the {required} \
                     derived from worker.min_free_bytes: {consequence}"
                ),
            )),
            Ok(_) => Ok(()),
            Err(error) => Err(journal_error(&error)),
        }
    }

    /// Rejects sandboxes or memory limits beyond the node's capacity. Unclaimed spares are evicted
    /// to make room.
    pub(super) fn check_capacity(self: &Arc<Self>, memory_bytes: u64) -> Result<(), ApiError> {
        let (promised, limit) = (
            self.promised_memory().saturating_add(memory_bytes),
            self.capacity.promised_memory_bytes,
        );
        if promised > limit {
            let detail = format!(
                "the memory limits of the sandboxes on this node would add up to {promised} \
                 bytes, more than {limit}"
            );
            return Err(Problem::new(ErrorCode::NoCapacity, detail)
                .with_remedy(
                    "End sessions, ask for less memory, or raise worker.memory_overcommit.",
                )
                .into());
        }
        let live = self.live_count();
        if live >= self.config.max_sandboxes {
            return Err(ApiError::new(
                ErrorCode::NoCapacity,
                format!(
                    "this node already runs {} sandboxes, its maximum",
                    self.config.max_sandboxes
                ),
            ));
        }
        if live + self.pool.count() >= self.config.max_sandboxes {
            self.evict_spare();
        }
        while promised.saturating_add(self.spare_memory(0)) > limit && self.evict_spare() {}
        Ok(())
    }

    pub(super) fn spawn_bring_up(self: &Arc<Self>, entry: &Arc<SessionEntry>) {
        let (sessions, entry) = (Arc::clone(self), Arc::clone(entry));
        tokio::spawn(async move { sessions.bring_up(&entry).await });
    }

    /// Journals a new session and publishes it with its step lock held, so that other calls on it
    /// wait for the caller to finish the step.
    pub(super) async fn record_session(
        &self,
        record: SessionRecord,
    ) -> Result<(Arc<SessionEntry>, OwnedMutexGuard<()>), ApiError> {
        let session_id = record.session.session_id;
        let (journal, written) = (self.journal.clone(), record.clone());
        let opened = blocking(move || {
            journal.write_session(&written)?;
            SessionExecs::open(&journal.session_directory(session_id))
        });
        match opened.await {
            Ok(execs) => {
                let entry = SessionEntry::new(record, execs);
                let step = Arc::clone(&entry.step).lock_owned().await;
                self.by_id.lock().insert(session_id, Arc::clone(&entry));
                Ok((entry, step))
            }
            Err(error) => {
                drop(
                    self.journal
                        .discard(&self.journal.session_directory(session_id)),
                );
                if record
                    .request
                    .workspace_ref
                    .as_ref()
                    .is_none_or(WorkspaceRef::is_new_workspace)
                {
                    drop(self.delete_workspace(record.session.workspace_id).await);
                }
                Err(journal_error(&error))
            }
        }
    }

    /// Looks up the session of an identical earlier request. A failed one does not prevent a retry.
    fn existing(&self, request: &SessionCreate) -> Result<Option<Arc<SessionEntry>>, ApiError> {
        let Some(entry) = self.by_id.lock().get(&request.session_id).cloned() else {
            return Ok(None);
        };
        let record = entry.record();
        if record.request != *request {
            return Err(ApiError::new(
                ErrorCode::SessionIdInUse,
                format!(
                    "session {} belongs to a different request",
                    request.session_id
                ),
            ));
        }
        Ok((record.session.state != SessionState::Failed).then_some(entry))
    }

    /// Waits up to `CREATE_TIMEOUT` for the session to run.
    pub(super) async fn wait_for_outcome(
        &self,
        entry: &Arc<SessionEntry>,
        new: bool,
    ) -> Result<CreateOutcome, ApiError> {
        let mut state = entry.state.subscribe();
        let settled = tokio::time::timeout(
            CREATE_TIMEOUT,
            state.wait_for(|state| *state != SessionState::Creating),
        )
        .await
        .map(|state| state.map(|state| *state));
        match settled {
            Err(_) => Ok(CreateOutcome::Creating(entry.object())),
            Ok(Ok(SessionState::Failed | SessionState::Lost)) if new => {
                Err(entry.failure.lock().clone().unwrap_or_else(|| {
                    ApiError::new(ErrorCode::Internal, "the session could not be created")
                }))
            }
            Ok(_) if new => Ok(CreateOutcome::New(entry.object())),
            Ok(_) => Ok(CreateOutcome::Existing(entry.object())),
        }
    }

    /// Looks up an image on this node and checks it against a pinned digest. Does not check that
    /// sessions may use it.
    pub(crate) async fn any_image(
        &self,
        reference: &str,
        pinned: Option<&str>,
    ) -> Result<Image, ApiError> {
        let reference = self.image_name(reference);
        let image = self
            .runtime
            .image(&reference)
            .await
            .map_err(|error| -> ApiError {
                match error {
                    runtime::RuntimeError::NotFound(_) => Problem::new(
                        ErrorCode::ImageNotFound,
                        format!("the image {reference} is not on this node"),
                    )
                    .into(),
                    other => runtime_problem(&other).into(),
                }
            })?;
        match pinned {
            Some(pinned) if pinned != image.digest => {
                let detail = format!(
                    "{reference} has digest {} on this node, not the requested {pinned}",
                    image.digest
                );
                Err(ApiError::new(ErrorCode::ImageDigestMismatch, detail))
            }
            _ => Ok(image),
        }
    }

    fn image_name(&self, reference: &str) -> String {
        if reference == "default" {
            self.default_image.lock().clone()
        } else {
            reference.to_owned()
        }
    }

    /// Looks up an image that sessions may use.
    pub(super) async fn image(
        &self,
        reference: &str,
        pinned: Option<&str>,
    ) -> Result<Image, ApiError> {
        let image = self.any_image(reference, pinned).await?;
        let reference = self.image_name(reference);
        if image
            .labels
            .get(LABEL_AGENT_COMPATIBLE)
            .is_none_or(|value| value != "true")
        {
            return Err(ApiError::new(
                ErrorCode::ImageNotCompatible,
                format!(
                    "the image {reference} does not carry the label {LABEL_AGENT_COMPATIBLE}=true"
                ),
            ));
        }
        Ok(image)
    }

    /// Creates the container and waits for its agent. Leftovers of an earlier attempt are removed
    /// first.
    pub(super) async fn bring_up(self: &Arc<Self>, entry: &Arc<SessionEntry>) {
        let _step = entry.step.lock().await;
        let record = entry.record();
        if record.session.state != SessionState::Creating {
            return;
        }
        let started = std::time::Instant::now();
        let disk_bytes = match self.journal.workspace(record.session.workspace_id) {
            Ok(workspace) => workspace.and_then(|workspace| workspace.disk_bytes),
            Err(error) => return self.fail(entry, &record, journal_error(&error)).await,
        };
        let sandbox = Sandbox {
            sandbox_id: record.sandbox_id,
            image_id: record.image_id.clone(),
            workspace_id: record.session.workspace_id,
            id_block: record.id_block,
            disk_bytes,
            keeps_job_directory: record.resumed,
            limits: record.session.limits,
        };
        match self.start(&sandbox).await {
            Ok(StartedSandbox { live, unenforced }) => {
                let millis = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
                live.serve_proxies(entry);
                *entry.live.lock() = Some(Arc::clone(&live));
                entry.touch();
                if let Some(WorkspaceRef::Artifact(id)) = &record.request.workspace_ref
                    && !record.resumed
                    && let Err(error) = self.unpack_artifact(&live, *id).await
                {
                    return self.fail(entry, &record, error).await;
                }
                // Clear a deletion date set by an earlier end.
                let workspace_kept = self
                    .keep_workspace(record.session.workspace_id, false)
                    .await;
                let (init, has_proxies) = (live.init, live.has_proxies());
                let update = self.update(entry, move |record| {
                    record.init = Some(init);
                    record.has_job_directory = true;
                    record.has_proxies = has_proxies;
                    record.session.unenforced = unenforced;
                    record.session.create_duration_ms = Some(millis);
                    // Preserve an end that was requested meanwhile.
                    if record.session.state == SessionState::Creating {
                        record.session.state = SessionState::Running;
                    }
                });
                metrics::histogram!("cynode_session_create_seconds", "warm" => "false")
                    .record(started.elapsed().as_secs_f64());
                match workspace_kept.and(update.await) {
                    Ok(()) => self.watch(entry, live),
                    Err(error) => self.fail(entry, &record, journal_error(&error)).await,
                }
            }
            Err(error) => self.fail(entry, &record, error).await,
        }
    }

    async fn fail(&self, entry: &Arc<SessionEntry>, record: &SessionRecord, error: ApiError) {
        tracing::warn!(
            session_id = %record.session.session_id,
            error = %error,
            "Failed to create a session."
        );
        metrics::counter!("cynode_session_failures_total").increment(1);
        if let Some(live) = entry.live.lock().take() {
            live.close();
        }
        let removed = self.clear_sandbox(record.sandbox_id, record.id_block).await;
        *entry.failure.lock() = Some(error.clone());
        if record.resumed {
            // Restore the previous state: the files are intact, and a retry may succeed.
            drop(self.release_workspace(record.session.workspace_id).await);
            return self
                .set_lost(entry, error.into_problem().detail, false)
                .await;
        }
        if record
            .request
            .workspace_ref
            .as_ref()
            .is_none_or(WorkspaceRef::is_new_workspace)
        {
            // The ids must not be reused while a process may still run under them.
            if removed {
                drop(self.delete_workspace(record.session.workspace_id).await);
            }
        } else {
            drop(self.release_workspace(record.session.workspace_id).await);
        }
        let update = self.update(entry, |record| {
            record.session.state = SessionState::Failed;
            record.session.end_reason = Some(error.into_problem().detail);
            record.session.ended_at = Some(OffsetDateTime::now_utc());
        });
        if let Err(error) = update.await {
            tracing::error!(%error, "Failed to record a failed session.");
            entry.state.send_replace(SessionState::Failed);
        }
    }
}

/// The record of a session without a workspace.
pub(super) fn new_record(
    request: SessionCreate,
    checked: &validate::ValidatedRequest,
    image: Image,
    node_id: NodeId,
) -> SessionRecord {
    let now = OffsetDateTime::now_utc();
    SessionRecord {
        session: Session {
            session_id: request.session_id,
            name: None,
            task_id: request.task_id,
            state: SessionState::Creating,
            end_reason: None,
            image_ref: request.image_ref.clone(),
            image_digest: Some(image.digest.clone()),
            workspace_id: WorkspaceId::generate(),
            node_id,
            warm: false,
            limits: checked.limits,
            unenforced: Vec::new(),
            network_policy: request.network_policy.unwrap_or_default(),
            pty_allowed: request.pty_allowed.unwrap_or(false),
            labels: request.labels.clone(),
            created_at: now,
            expires_at: validate::after(now, checked.lifetime_seconds),
            idle_expires_at: validate::after(now, checked.idle_seconds),
            ended_at: None,
            create_duration_ms: None,
            running_execs: 0,
            repository_id: None,
            base_commit: None,
            seed_notes: None,
        },
        request,
        sandbox_id: SandboxId::generate(),
        image_id: image.id,
        image_env: environment::clean_image_env(&image.env),
        id_block: 0,
        idle_timeout_seconds: checked.idle_seconds,
        init: None,
        disposal: None,
        resumed: false,
        has_job_directory: false,
        has_proxies: false,
        job_id: None,
    }
}
