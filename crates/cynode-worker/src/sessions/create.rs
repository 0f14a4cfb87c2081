//! From a request to a running sandbox.

use std::{sync::Arc, time::Instant};

use cynode_api::{
    ErrorCode, LABEL_AGENT_COMPATIBLE, NodeId, Problem, SandboxId, Session, SessionCreate,
    SessionState, Unenforced, WorkspaceId, WorkspaceRef,
};
use cynode_service::ApiError;
use time::OffsetDateTime;
use tokio::sync::OwnedMutexGuard;

use super::{
    CREATE_WAIT, Entry, Sessions, blocking, environment, journal_error,
    pool::Key,
    runtime_problem,
    start::{Sandbox, Started},
    validate,
    workspace::AskedDisk,
};
use crate::{
    disk,
    execs::SessionExecs,
    journal::SessionRecord,
    runtime::{self, Image},
};

#[derive(Debug)]
pub(crate) enum Created {
    /// By this call.
    New(Session),
    /// By an earlier call with the same body.
    Existing(Session),
    /// Not yet.
    Creating(Session),
}

impl Sessions {
    pub(crate) async fn create(
        self: &Arc<Self>,
        request: SessionCreate,
    ) -> Result<Created, ApiError> {
        let begun = Instant::now();
        let checked = validate::check(&request, &self.capacity)?;
        if let Some(existing) = self.existing(&request)? {
            return self.outcome(&existing, false).await;
        }
        self.wait_until_settled().await?;
        if matches!(request.workspace_ref, Some(WorkspaceRef::Artifact(_))) {
            self.upstream()?;
        }
        let image = self
            .image(&request.image_ref, request.image_digest.as_deref())
            .await?;
        // To its end even when the caller goes away: a session is either not there or is brought up.
        let sessions = Arc::clone(self);
        let admitted =
            tokio::spawn(async move { sessions.admit(request, &checked, image, begun).await })
                .await;
        let (entry, new) = admitted.map_err(|_| {
            ApiError::new(ErrorCode::Internal, "creating the session was interrupted")
        })??;
        self.outcome(&entry, new).await
    }

    /// Gives a request a workspace and a record and starts to bring it up; or finds the session that it made before.
    async fn admit(
        self: &Arc<Self>,
        request: SessionCreate,
        checked: &validate::Checked,
        image: Image,
        begun: Instant,
    ) -> Result<(Arc<Entry>, bool), ApiError> {
        let _gate = self.gate.lock().await;
        if let Some(existing) = self.existing(&request)? {
            return Ok((existing, false));
        }
        self.check_room()?;
        if !self.limits_disks() {
            self.check_enforced(&[Unenforced::Disk])?;
        }
        let key = Key {
            image_id: image.id.clone(),
            limits: checked.limits,
            network_policy: request.network_policy.unwrap_or_default(),
        };
        let reference = request.workspace_ref.clone().unwrap_or(WorkspaceRef::New);
        let mut record = new_record(request, checked, image, self.node_id);
        if reference == WorkspaceRef::New
            && let Some(spare) = self.claim(&key)
        {
            return Ok((self.bind(spare, record, begun).await?, true));
        }
        self.check_capacity(checked.limits.memory_bytes)?;
        let session = &mut record.session;
        let disk = AskedDisk {
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
        let (entry, _step) = self.write_down(record).await?;
        self.spawn_bring_up(&entry);
        Ok((entry, true))
    }

    /// Refuses new work while the host's disk is nearly full: what runs must be able to go on.
    pub(crate) fn check_room(&self) -> Result<(), ApiError> {
        self.check_free(
            self.config.min_free_bytes,
            "new sessions wait until there is room",
        )
    }

    /// Commands and files of sessions that are there may use what new sessions may not, down to what the records of their
    /// end need.
    pub(crate) fn check_room_for_work(&self) -> Result<(), ApiError> {
        self.check_free(
            self.config.min_free_bytes / 4,
            "commands and files wait until there is room",
        )
    }

    fn check_free(&self, least: u64, consequence: &str) -> Result<(), ApiError> {
        match disk::free_bytes(&self.config.state_dir) {
            Ok(free) if free < least => Err(ApiError::new(
                ErrorCode::NoSpace,
                format!(
                    "{free} bytes are free on this node, {least} are wanted (worker.min_free_bytes): {consequence}"
                ),
            )),
            Ok(_) => Ok(()),
            Err(error) => Err(journal_error(&error)),
        }
    }

    /// Refuses more sandboxes, or more memory for them, than the node takes. Those that only wait to be claimed make room.
    pub(super) fn check_capacity(self: &Arc<Self>, memory_bytes: u64) -> Result<(), ApiError> {
        let (promised, most) = (
            self.promised_memory().saturating_add(memory_bytes),
            self.capacity.promised_memory_bytes,
        );
        if promised > most {
            let detail = format!(
                "the memory limits of the sandboxes on this node would add up to {promised} bytes, more than {most}"
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
                    "{} sandboxes run on this node already",
                    self.config.max_sandboxes
                ),
            ));
        }
        if live + self.pool.count() >= self.config.max_sandboxes {
            self.give_up_a_spare();
        }
        while promised.saturating_add(self.spare_memory(0)) > most && self.give_up_a_spare() {}
        Ok(())
    }

    pub(super) fn spawn_bring_up(self: &Arc<Self>, entry: &Arc<Entry>) {
        let (sessions, entry) = (Arc::clone(self), Arc::clone(entry));
        tokio::spawn(async move { sessions.bring_up(&entry).await });
    }

    /// Writes a new session down and makes it known. Its step is held from before anybody can see it: whoever waits for it
    /// then waits for a caller that waits for nobody.
    pub(super) async fn write_down(
        &self,
        record: SessionRecord,
    ) -> Result<(Arc<Entry>, OwnedMutexGuard<()>), ApiError> {
        let session_id = record.session.session_id;
        let (journal, written) = (self.journal.clone(), record.clone());
        let opened = blocking(move || {
            journal.write_session(&written)?;
            SessionExecs::open(&journal.session_directory(session_id))
        });
        match opened.await {
            Ok(execs) => {
                let entry = Entry::new(record, execs);
                let step = Arc::clone(&entry.step).lock_owned().await;
                self.known.lock().insert(session_id, Arc::clone(&entry));
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
                    .is_none_or(WorkspaceRef::is_made)
                {
                    drop(self.delete_workspace(record.session.workspace_id).await);
                }
                Err(journal_error(&error))
            }
        }
    }

    /// The session that has this id already, if it is the same request. One that failed is no obstacle to trying again.
    fn existing(&self, request: &SessionCreate) -> Result<Option<Arc<Entry>>, ApiError> {
        let Some(entry) = self.known.lock().get(&request.session_id).cloned() else {
            return Ok(None);
        };
        let record = entry.record();
        if record.request != *request {
            return Err(ApiError::new(
                ErrorCode::SessionIdInUse,
                format!("session {} was made by another request", request.session_id),
            ));
        }
        Ok((record.session.state != SessionState::Failed).then_some(entry))
    }

    /// Waits for the session to run, within the time that a caller is made to wait.
    pub(super) async fn outcome(&self, entry: &Arc<Entry>, new: bool) -> Result<Created, ApiError> {
        let mut state = entry.state.subscribe();
        let settled = tokio::time::timeout(
            CREATE_WAIT,
            state.wait_for(|state| *state != SessionState::Creating),
        )
        .await
        .map(|state| state.map(|state| *state));
        match settled {
            Err(_) => Ok(Created::Creating(entry.object())),
            Ok(Ok(SessionState::Failed | SessionState::Lost)) if new => {
                Err(entry.failure.lock().clone().unwrap_or_else(|| {
                    ApiError::new(ErrorCode::Internal, "the session could not be created")
                }))
            }
            Ok(_) if new => Ok(Created::New(entry.object())),
            Ok(_) => Ok(Created::Existing(entry.object())),
        }
    }

    /// An image that is on this node, whatever it may be used for; the pinned one, when the caller says which.
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
                    runtime::Error::NotFound(_) => Problem::new(
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
                    "{reference} is {} on this node, and {pinned} is asked for",
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

    /// An image that sessions may use.
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

    /// Makes the container and waits for its agent. Whatever was left of an earlier try goes first.
    pub(super) async fn bring_up(self: &Arc<Self>, entry: &Arc<Entry>) {
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
            limits: record.session.limits,
        };
        match self.start(&sandbox).await {
            Ok(Started { live, unenforced }) => {
                let millis = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
                *entry.live.lock() = Some(Arc::clone(&live));
                entry.touch();
                if let Some(WorkspaceRef::Artifact(id)) = &record.request.workspace_ref
                    && !record.resumed
                    && let Err(error) = self.unpack_artifact(&live, *id).await
                {
                    return self.fail(entry, &record, error).await;
                }
                // A date of deletion from an earlier end no longer holds.
                let kept = self
                    .keep_workspace(record.session.workspace_id, false)
                    .await;
                let init = live.init;
                let update = self.update(entry, move |record| {
                    record.init = Some(init);
                    record.session.unenforced = unenforced;
                    record.session.create_duration_ms = Some(millis);
                    // An end that was asked for meanwhile stays asked for.
                    if record.session.state == SessionState::Creating {
                        record.session.state = SessionState::Running;
                    }
                });
                metrics::histogram!("cynode_session_create_seconds", "warm" => "false")
                    .record(started.elapsed().as_secs_f64());
                match kept.and(update.await) {
                    Ok(()) => self.watch(entry, live),
                    Err(error) => self.fail(entry, &record, journal_error(&error)).await,
                }
            }
            Err(error) => self.fail(entry, &record, error).await,
        }
    }

    async fn fail(&self, entry: &Arc<Entry>, record: &SessionRecord, error: ApiError) {
        tracing::warn!(session_id = %record.session.session_id, error = %error.0, "Creating a session failed.");
        metrics::counter!("cynode_session_failures_total").increment(1);
        if let Some(live) = entry.live.lock().take() {
            live.close();
        }
        let removed = self.clear_sandbox(record.sandbox_id, record.id_block).await;
        *entry.failure.lock() = Some(error.clone());
        if record.resumed {
            // As it was: its files are there, and the next try may have more luck.
            drop(self.release_workspace(record.session.workspace_id).await);
            return self.set_lost(entry, error.0.detail, false).await;
        }
        if record
            .request
            .workspace_ref
            .as_ref()
            .is_none_or(WorkspaceRef::is_made)
        {
            // Its ids must not go to another while something may still run with them.
            if removed {
                drop(self.delete_workspace(record.session.workspace_id).await);
            }
        } else {
            drop(self.release_workspace(record.session.workspace_id).await);
        }
        let update = self.update(entry, |record| {
            record.session.state = SessionState::Failed;
            record.session.end_reason = Some(error.0.detail);
            record.session.ended_at = Some(OffsetDateTime::now_utc());
        });
        if let Err(error) = update.await {
            tracing::error!(%error, "Recording a failed session failed.");
            entry.state.send_replace(SessionState::Failed);
        }
    }
}

/// The record of a session that has no workspace yet.
pub(super) fn new_record(
    request: SessionCreate,
    checked: &validate::Checked,
    image: Image,
    node_id: NodeId,
) -> SessionRecord {
    let now = OffsetDateTime::now_utc();
    SessionRecord {
        session: Session {
            session_id: request.session_id,
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
        job_id: None,
    }
}
