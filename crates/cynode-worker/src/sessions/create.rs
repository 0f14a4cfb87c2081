//! From a request to a running sandbox.

use std::{collections::BTreeMap, io, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc, time::Duration};

use cynode_api::{
    ErrorCode, ExecVia, LABEL_AGENT_COMPATIBLE, LABEL_NODE_ID, LABEL_SANDBOX_ID, Problem, SandboxId, Session, SessionCreate, SessionId, SessionState,
    Unenforced, WorkspaceRef,
};
use cynode_sba_proto::{AGENT_BINARY, HOME, WORKSPACE};
use cynode_service::ApiError;
use time::OffsetDateTime;

use super::{CREATE_WAIT, Entry, Live, Sessions, environment, journal_error, runtime_problem, validate};
use crate::{
    execs::SessionExecs,
    idrange::IdBlocks,
    journal::SessionRecord,
    runtime::{self, Image, Mount, Spec},
    sandbox::{AgentLink, InitProcess, namespace},
};

/// From start to the agent's first connection.
const AGENT_WAIT: Duration = Duration::from_secs(20);

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
    pub(crate) async fn create(self: &Arc<Self>, request: SessionCreate) -> Result<Created, ApiError> {
        let checked = validate::check(&request, self.max_nofile)?;
        if let Some(existing) = self.existing(&request)? {
            return self.outcome(&existing, false).await;
        }
        self.wait_until_settled().await;
        let image = self.image(&request.image_ref).await?;
        let entry = {
            let _gate = self.gate.lock().await;
            if let Some(existing) = self.existing(&request)? {
                return self.outcome(&existing, false).await;
            }
            if self.live_count() >= self.config.max_sandboxes {
                return Err(ApiError::new(ErrorCode::NoCapacity, format!("{} sandboxes run on this node already", self.config.max_sandboxes)));
            }
            let session_id = request.session_id;
            let workspace = self.workspace(request.workspace_ref.as_ref().unwrap_or(&WorkspaceRef::New), request.task_id, session_id)?;
            // A date of deletion from an earlier end no longer holds.
            self.keep_workspace(workspace.workspace_id, false).map_err(|error| journal_error(&error))?;
            let now = OffsetDateTime::now_utc();
            let record = SessionRecord {
                session: Session {
                    session_id,
                    task_id: request.task_id,
                    state: SessionState::Creating,
                    end_reason: None,
                    image_ref: request.image_ref.clone(),
                    image_digest: Some(image.digest.clone().unwrap_or_else(|| image.id.clone())),
                    workspace_id: workspace.workspace_id,
                    node_id: self.node_id,
                    warm: false,
                    limits: checked.limits,
                    unenforced: vec![Unenforced::Disk],
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
                image_id: image.id.clone(),
                image_env: environment::clean_image_env(&image.env),
                id_block: workspace.id_block,
                idle_timeout_seconds: checked.idle_seconds,
                init: None,
                disposal: None,
            };
            self.admit(record)?
        };
        let sessions = Arc::clone(self);
        tokio::spawn({
            let entry = Arc::clone(&entry);
            async move { sessions.bring_up(&entry).await }
        });
        self.outcome(&entry, true).await
    }

    /// Writes a new session down and makes it known.
    fn admit(&self, record: SessionRecord) -> Result<Arc<Entry>, ApiError> {
        let session_id = record.session.session_id;
        let written = self.journal.write_session(&record).and_then(|()| SessionExecs::open(&self.journal.session_directory(session_id)));
        match written {
            Ok(execs) => {
                let entry = Entry::new(record, execs);
                self.known.lock().insert(session_id, Arc::clone(&entry));
                Ok(entry)
            }
            Err(error) => {
                drop(self.journal.discard(&self.journal.session_directory(session_id)));
                if record.request.workspace_ref.as_ref().is_none_or(|reference| *reference == WorkspaceRef::New) {
                    drop(self.delete_workspace(record.session.workspace_id));
                }
                Err(journal_error(&error))
            }
        }
    }

    /// The session that has this id already, if it is the same request. One that failed is no obstacle to trying again.
    fn existing(&self, request: &SessionCreate) -> Result<Option<Arc<Entry>>, ApiError> {
        let Some(entry) = self.known.lock().get(&request.session_id).cloned() else { return Ok(None) };
        let record = entry.record();
        if record.request != *request {
            return Err(ApiError::new(ErrorCode::SessionIdInUse, format!("session {} was made by another request", request.session_id)));
        }
        Ok((record.session.state != SessionState::Failed).then_some(entry))
    }

    /// Waits for the session to run, within the time that a caller is made to wait.
    async fn outcome(&self, entry: &Arc<Entry>, new: bool) -> Result<Created, ApiError> {
        let mut state = entry.state.subscribe();
        let settled = tokio::time::timeout(CREATE_WAIT, state.wait_for(|state| *state != SessionState::Creating)).await.map(|state| state.map(|state| *state));
        match settled {
            Err(_) => Ok(Created::Creating(entry.object())),
            Ok(Ok(SessionState::Failed)) if new => {
                Err(entry.failure.lock().clone().unwrap_or_else(|| ApiError::new(ErrorCode::Internal, "the session could not be created")))
            }
            Ok(_) if new => Ok(Created::New(entry.object())),
            Ok(_) => Ok(Created::Existing(entry.object())),
        }
    }

    /// An image that sessions may use.
    async fn image(&self, reference: &str) -> Result<Image, ApiError> {
        let reference = if reference == "default" { self.config.default_image.as_str() } else { reference };
        let image = self.runtime.image(reference).await.map_err(|error| match error {
            runtime::Error::NotFound(_) => Problem::new(ErrorCode::ImageNotFound, format!("the image {reference} is not on this node")),
            other => runtime_problem(&other),
        })?;
        if image.labels.get(LABEL_AGENT_COMPATIBLE).is_none_or(|value| value != "true") {
            return Err(ApiError::new(ErrorCode::ImageNotCompatible, format!("the image {reference} does not carry the label {LABEL_AGENT_COMPATIBLE}=true")));
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
        match self.start_container(&record).await {
            Ok(live) => {
                let millis = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
                *entry.live.lock() = Some(Arc::clone(&live));
                entry.touch();
                let written = self.update(entry, |record| {
                    record.init = Some(live.init);
                    record.session.create_duration_ms = Some(millis);
                    // An end that was asked for meanwhile stays asked for.
                    if record.session.state == SessionState::Creating {
                        record.session.state = SessionState::Running;
                    }
                });
                metrics::histogram!("cynode_session_create_seconds", "warm" => "false").record(started.elapsed().as_secs_f64());
                match written {
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
        self.clear_sandbox(record.sandbox_id).await;
        let new_workspace = record.request.workspace_ref.as_ref().is_none_or(|reference| *reference == WorkspaceRef::New);
        if new_workspace && entry.execs.list().is_empty() {
            drop(self.delete_workspace(record.session.workspace_id));
        }
        *entry.failure.lock() = Some(error.clone());
        let written = self.update(entry, |record| {
            record.session.state = SessionState::Failed;
            record.session.end_reason = Some(error.0.detail.clone());
            record.session.ended_at = Some(OffsetDateTime::now_utc());
        });
        if let Err(error) = written {
            tracing::error!(%error, "Recording a failed session failed.");
            entry.state.send_replace(SessionState::Failed);
        }
    }

    async fn start_container(&self, record: &SessionRecord) -> Result<Arc<Live>, ApiError> {
        let container = record.container();
        let runtime_failed = |error: runtime::Error| ApiError::from(runtime_problem(&error));
        let host_failed = |error: io::Error| {
            ApiError::new(
                if error.kind() == io::ErrorKind::StorageFull { ErrorCode::NoSpace } else { ErrorCode::Internal },
                format!("preparing the sandbox: {error}"),
            )
        };
        let directory = self.journal.sandbox_directory(record.sandbox_id);
        self.prepare_sandbox(&directory).map_err(host_failed)?;
        let (workspace, home) = self.prepare_workspace(record.session.workspace_id, record.id_block).map_err(host_failed)?;
        let by_agent = self.config.exec_via == ExecVia::Agent;
        let link = by_agent.then(|| AgentLink::listen(&directory, None)).transpose().map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        let spec = self.spec(record, &directory, &workspace, &home);
        match self.runtime.create(&spec).await {
            Ok(_) => {}
            Err(runtime::Error::NameInUse(_)) => {
                // Of a try that a crash cut off. The name is ours alone, so what has it is ours.
                self.runtime.remove(&container).await.map_err(runtime_failed)?;
                self.runtime.create(&spec).await.map_err(runtime_failed)?;
            }
            Err(error) => return Err(runtime_failed(error)),
        }
        self.runtime.start(&container).await.map_err(runtime_failed)?;
        let pid = self.runtime.inspect(&container).await.map_err(runtime_failed)?.pid;
        let init = InitProcess::of(pid).ok_or_else(|| ApiError::new(ErrorCode::Internal, "the sandbox's process 1 ended at once"))?;
        // Before any command can run inside. A host that does not let us is no worse than without it.
        if let Err(error) = namespace::bound(pid).await {
            tracing::warn!(container, %error, "A sandbox's share of inotify could not be bounded.");
        }
        if let Some(link) = &link {
            link.set_init(init);
            if !link.present(AGENT_WAIT).await {
                return Err(ApiError::new(ErrorCode::AgentUnavailable, "the agent in the sandbox did not connect"));
            }
        }
        Ok(Live::new(container, init, Arc::clone(&self.runtime), link))
    }

    /// The directory that is mounted at `/run/cynode`: the agent's binary, and room for the sockets.
    fn prepare_sandbox(&self, directory: &Path) -> io::Result<()> {
        fs_err::create_dir_all(directory)?;
        fs_err::set_permissions(directory, std::fs::Permissions::from_mode(0o755))?;
        let binary = directory.join("cynode-sba");
        match fs_err::hard_link(&self.agent_binary, &binary) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    fn spec(&self, record: &SessionRecord, directory: &Path, workspace: &Path, home: &Path) -> Spec {
        let argv = match self.config.exec_via {
            ExecVia::Agent => vec![AGENT_BINARY.to_owned(), "agent".to_owned()],
            // Idle, and ended by TERM at once.
            ExecVia::Runtime => ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"].map(str::to_owned).to_vec(),
        };
        let mount = |source: &Path, target: &str, read_only| Mount { source: source.to_owned(), target: target.to_owned(), read_only };
        Spec {
            name: record.container(),
            labels: BTreeMap::from([
                (LABEL_SANDBOX_ID.to_owned(), record.sandbox_id.to_string()),
                (LABEL_NODE_ID.to_owned(), self.node_id.to_string()),
                (LABEL_SESSION_ID.to_owned(), record.session.session_id.to_string()),
            ]),
            image_id: record.image_id.clone(),
            argv,
            env: vec![("PATH".to_owned(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned())],
            ids: IdBlocks::map(record.id_block),
            mounts: vec![mount(directory, "/run/cynode", true), mount(workspace, WORKSPACE, false), mount(home, HOME, false)],
            limits: record.session.limits,
        }
    }

    /// The session whose container carries these labels.
    pub(super) fn session_of(labels: &BTreeMap<String, String>) -> Option<SessionId> {
        labels.get(LABEL_SESSION_ID)?.parse().ok()
    }
}

const LABEL_SESSION_ID: &str = "io.cynodeai.session.id";
