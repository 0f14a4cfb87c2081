//! Sessions: persistent sandboxes.
//!
//! A session is a record in the journal and, while it runs, a live container. Each step of its
//! lifecycle is journaled before it is executed and is idempotent, so after a crash the reconciler
//! resumes every session where it stopped.

mod create;
mod end;
mod environment;
mod fill;
mod job;
mod life;
mod live;
mod pool;
mod pool_slots;
mod pressure;
mod reconcile;
mod recover;
mod reference;
mod remedy;
mod start;
mod validate;
mod workspace;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::{
    ErrorCode, JobId, NodeId, Problem, SandboxId, Session, SessionId, SessionPatch, SessionState,
    TaskId, WorkspaceRef,
};
use cynode_service::{
    ApiError,
    checks::{check_labels, check_seconds},
};
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::sync::watch;

use crate::{
    audit::{AuditedSandbox, NodeTrail},
    capacity::{Capacity, ParentCgroup},
    config::Config,
    disk::Disks,
    execs::SessionExecs,
    idrange::IdBlocks,
    inference::Inference,
    journal::{Journal, SessionRecord, blocking, interrupted},
    proxies::Proxies,
    runtime::{self, Runtime},
};

pub(crate) use create::CreateOutcome;
pub(crate) use end::EndRequest;
pub(crate) use environment::exec_environment;
pub(crate) use fill::Upstream;
pub(crate) use job::{JobAdmission, JobSandboxRequest};
pub(crate) use live::{Activity, Live, OpenWatch};
pub(crate) use validate::check_version;

/// How long a caller waits while the worker still recovers earlier sessions.
const RECONCILE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a create call waits before it returns a session in state `creating`.
const CREATE_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Sessions {
    pub(crate) config: Config,
    pub(crate) node_id: NodeId,
    /// Where this node records what it decides by itself.
    pub(crate) audit: NodeTrail,
    /// The way of sandboxes to models.
    pub(crate) inference: Arc<Inference>,
    pub(crate) runtime: Arc<dyn Runtime>,
    journal: Journal,
    ids: IdBlocks,
    /// The agent's binary in this worker's store, named by its hash.
    agent_binary: PathBuf,
    /// The resources of this node available to sandboxes.
    pub(crate) capacity: Capacity,
    /// The cgroup of all sandboxes, on hosts that have one.
    parent: Option<ParentCgroup>,
    disks: Result<Disks, String>,
    /// The image that `default` resolves to: from the configuration, or from the orchestrator.
    pub(crate) default_image: Mutex<String>,
    /// The source of artifacts, once this node is registered with an orchestrator.
    upstream: Mutex<Option<Upstream>>,
    pool: pool::Pool,
    pub(crate) proxies: Arc<Proxies>,
    /// Sandboxes whose removal failed, with their id blocks.
    pending_removals: Mutex<Vec<(SandboxId, u32)>>,
    by_id: Mutex<HashMap<SessionId, Arc<SessionEntry>>>,
    /// Held from the lookup of a session id to the admission, so that concurrent calls with one id
    /// create one session.
    admission_lock: tokio::sync::Mutex<()>,
    /// Why earlier sessions are not all recovered yet; `None` once they are.
    unreconciled: watch::Sender<Option<String>>,
}

/// The dependencies of `Sessions`.
#[derive(Debug)]
pub(crate) struct SessionsConfig {
    pub(crate) config: Config,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) journal: Journal,
    pub(crate) audit: NodeTrail,
    pub(crate) inference: Arc<Inference>,
    pub(crate) node_id: NodeId,
    pub(crate) ids: IdBlocks,
    pub(crate) agent_binary: PathBuf,
    pub(crate) capacity: Capacity,
    pub(crate) parent: Option<ParentCgroup>,
    /// An error says why workspaces can't have their own disks on this host.
    pub(crate) disks: Result<Disks, String>,
}

#[derive(Debug)]
pub(crate) struct SessionEntry {
    record: Mutex<SessionRecord>,
    /// Held while a change of the record is computed, written to disk and published.
    writing: tokio::sync::Mutex<()>,
    live: Mutex<Option<Arc<Live>>>,
    pub(crate) execs: Arc<SessionExecs>,
    state: watch::Sender<SessionState>,
    last_activity: Mutex<Instant>,
    /// Held while the session's container is created or removed.
    step: Arc<tokio::sync::Mutex<()>>,
    /// Why creation failed, for the waiting caller.
    failure: Mutex<Option<ApiError>>,
}

impl SessionEntry {
    fn new(record: SessionRecord, execs: SessionExecs) -> Arc<Self> {
        Arc::new(Self {
            state: watch::Sender::new(record.session.state),
            record: Mutex::new(record),
            writing: tokio::sync::Mutex::new(()),
            live: Mutex::new(None),
            execs: Arc::new(execs),
            last_activity: Mutex::new(Instant::now()),
            step: Arc::default(),
            failure: Mutex::new(None),
        })
    }

    /// True for the sandbox of a job, which session calls can't see.
    fn belongs_to_job(&self) -> bool {
        self.record.lock().job_id.is_some()
    }

    /// The ids of the session, of its job and of its task.
    pub(crate) fn owner(&self) -> (SessionId, Option<JobId>, TaskId) {
        let record = self.record.lock();
        (
            record.session.session_id,
            record.job_id,
            record.session.task_id,
        )
    }

    /// The sandbox as the audit trail names it, and the models that it may use.
    pub(crate) fn model_access(&self) -> (AuditedSandbox, Vec<String>) {
        let record = self.record.lock();
        let sandbox = AuditedSandbox::from(&*record);
        (sandbox, record.request.allowed_models.clone())
    }

    /// Whether the workspace was empty when the session began.
    pub(crate) fn began_empty(&self) -> bool {
        let record = self.record.lock();
        matches!(record.request.workspace_ref, None | Some(WorkspaceRef::New))
    }

    pub(crate) fn record(&self) -> SessionRecord {
        self.record.lock().clone()
    }

    fn state(&self) -> SessionState {
        *self.state.borrow()
    }

    pub(crate) fn touch(&self) {
        *self.last_activity.lock() = Instant::now();
    }

    fn idle_for(&self) -> Duration {
        let active = self
            .live
            .lock()
            .as_ref()
            .is_some_and(|live| live.is_active());
        if active {
            Duration::ZERO
        } else {
            self.last_activity.lock().elapsed()
        }
    }

    pub(crate) fn id(&self) -> SessionId {
        self.record.lock().session.session_id
    }

    /// The session as callers see it.
    pub(crate) fn object(&self) -> Session {
        let record = self.record();
        let mut session = record.session;
        session.running_execs = self.execs.running_count();
        if session.state == SessionState::Running {
            session.proxies = record.has_proxies;
            let idle_for = time::Duration::try_from(self.idle_for()).unwrap_or_default();
            let left = time::Duration::seconds(
                i64::try_from(record.idle_timeout_seconds).unwrap_or(i64::MAX),
            )
            .saturating_sub(idle_for);
            session.idle_expires_at = OffsetDateTime::now_utc()
                .saturating_add(left)
                .min(session.expires_at);
        }
        session
    }
}

impl Sessions {
    pub(crate) fn new(means: SessionsConfig) -> std::io::Result<Arc<Self>> {
        let SessionsConfig {
            config,
            runtime,
            journal,
            audit,
            inference,
            node_id,
            ids,
            agent_binary,
            capacity,
            parent,
            disks,
        } = means;
        let mut by_id = HashMap::new();
        for record in recover::recover(&journal, &ids, config.workspace_grace_seconds)? {
            let execs = SessionExecs::open(&journal.session_directory(record.session.session_id))?;
            by_id.insert(record.session.session_id, SessionEntry::new(record, execs));
        }
        Ok(Arc::new(Self {
            default_image: Mutex::new(config.default_image.clone()),
            upstream: Mutex::default(),
            config,
            node_id,
            audit,
            inference,
            runtime,
            journal,
            ids,
            agent_binary,
            capacity,
            parent,
            disks,
            pool: pool::Pool::default(),
            proxies: Arc::default(),
            pending_removals: Mutex::default(),
            by_id: Mutex::new(by_id),
            admission_lock: tokio::sync::Mutex::new(()),
            unreconciled: watch::Sender::new(Some("recovering earlier sessions".to_owned())),
        }))
    }

    /// Looks up a session in any state. The sandbox of a job is not found.
    pub(crate) fn get(&self, id: SessionId) -> Result<Arc<SessionEntry>, ApiError> {
        let entry = self
            .by_id
            .lock()
            .get(&id)
            .cloned()
            .filter(|entry| !entry.belongs_to_job());
        entry.ok_or_else(|| {
            ApiError::new(
                ErrorCode::SessionNotFound,
                format!("no session {id} on this node"),
            )
        })
    }

    /// Looks up a running session with its container.
    pub(crate) fn live(&self, id: SessionId) -> Result<(Arc<SessionEntry>, Arc<Live>), ApiError> {
        let entry = self.get(id)?;
        match entry.state() {
            SessionState::Running => {}
            SessionState::Ending | SessionState::Ended => {
                return Err(self.refusal(ErrorCode::SessionEnded, &entry));
            }
            _ => return Err(self.refusal(ErrorCode::NotRunning, &entry)),
        }
        entry.touch();
        let live = entry.live.lock().clone().ok_or_else(|| {
            ApiError::new(
                ErrorCode::NotRunning,
                format!("session {id} is being recovered after a worker restart"),
            )
        })?;
        Ok((entry, live))
    }

    /// All sessions, oldest first, without the sandboxes of jobs.
    pub(crate) fn entries(&self) -> Vec<Arc<SessionEntry>> {
        let mut entries: Vec<Arc<SessionEntry>> = self
            .by_id
            .lock()
            .values()
            .filter(|entry| !entry.belongs_to_job())
            .cloned()
            .collect();
        entries.sort_by_cached_key(|entry| {
            let record = entry.record.lock();
            (record.session.created_at, record.session.session_id)
        });
        entries
    }

    pub(crate) fn live_count(&self) -> usize {
        self.by_id
            .lock()
            .values()
            .filter(|entry| entry.record.lock().is_live())
            .count()
    }

    /// Sum of the memory limits of all live sandboxes, without unclaimed spares.
    fn promised_memory(&self) -> u64 {
        let by_id = self.by_id.lock();
        let records = by_id.values().map(|entry| entry.record.lock());
        records
            .filter(|record| record.is_live())
            .fold(0, |sum, record| {
                record.session.limits.memory_bytes.saturating_add(sum)
            })
    }

    /// Waits until the worker accepts new work, up to `RECONCILE_TIMEOUT`.
    pub(crate) async fn wait_until_reconciled(&self) -> Result<(), ApiError> {
        let mut unreconciled = self.unreconciled.subscribe();
        match tokio::time::timeout(RECONCILE_TIMEOUT, unreconciled.wait_for(Option::is_none)).await
        {
            Ok(_) => Ok(()),
            Err(_) => Err(ApiError::new(
                ErrorCode::RuntimeUnavailable,
                self.unreconciled().unwrap_or_default(),
            )),
        }
    }

    /// Waits until all earlier sessions are recovered.
    pub(crate) async fn reconciled(&self) {
        drop(
            self.unreconciled
                .subscribe()
                .wait_for(Option::is_none)
                .await,
        );
    }

    /// Why the worker does not accept new work yet, if so.
    pub(crate) fn unreconciled(&self) -> Option<String> {
        self.unreconciled.borrow().clone()
    }

    /// Changes a record on disk, then in memory. Runs to completion even if the caller disconnects,
    /// so that the two stay consistent.
    async fn update(
        &self,
        entry: &Arc<SessionEntry>,
        change: impl FnOnce(&mut SessionRecord) + Send + 'static,
    ) -> std::io::Result<()> {
        let (journal, entry) = (self.journal.clone(), Arc::clone(entry));
        let updated = tokio::spawn(async move {
            let _writing = entry.writing.lock().await;
            let mut changed = entry.record();
            change(&mut changed);
            let changed =
                blocking(move || journal.write_session(&changed).map(|()| changed)).await?;
            let state = changed.session.state;
            *entry.record.lock() = changed;
            entry.state.send_replace(state);
            Ok(())
        });
        updated.await.unwrap_or_else(|_| Err(interrupted()))
    }

    pub(crate) async fn patch(
        &self,
        id: SessionId,
        patch: SessionPatch,
    ) -> Result<Session, ApiError> {
        check_version(patch.version)?;
        let entry = self.get(id)?;
        if !matches!(
            entry.state(),
            SessionState::Running | SessionState::Creating
        ) {
            return Err(self.refusal(ErrorCode::SessionEnded, &entry));
        }
        if let Some(labels) = &patch.labels {
            check_labels(labels)?;
        }
        let lifetime = patch
            .max_lifetime_seconds
            .map(|seconds| check_seconds("max_lifetime_seconds", seconds))
            .transpose()?;
        let idle = patch
            .idle_timeout_seconds
            .map(|seconds| check_seconds("idle_timeout_seconds", seconds))
            .transpose()?;
        self.update(&entry, move |record| {
            if let Some(seconds) = lifetime {
                record.session.expires_at = validate::after(OffsetDateTime::now_utc(), seconds);
            }
            if let Some(seconds) = idle {
                record.idle_timeout_seconds = seconds;
            }
            if let Some(labels) = patch.labels {
                record.session.labels = labels;
            }
        })
        .await
        .map_err(|error| journal_error(&error))?;
        entry.touch();
        Ok(entry.object())
    }
}

pub(crate) fn journal_error(error: &std::io::Error) -> ApiError {
    let code = if error.kind() == std::io::ErrorKind::StorageFull {
        ErrorCode::NoSpace
    } else {
        ErrorCode::Internal
    };
    ApiError::new(code, format!("writing the journal: {error}"))
}

/// Maps a runtime error to the problem that callers see.
pub(crate) fn runtime_problem(error: &runtime::RuntimeError) -> Problem {
    let code = match error {
        runtime::RuntimeError::Timeout { .. }
        | runtime::RuntimeError::Unavailable(_)
        | runtime::RuntimeError::Unreached(_) => ErrorCode::RuntimeUnavailable,
        runtime::RuntimeError::NotFound(_)
        | runtime::RuntimeError::NameInUse(_)
        | runtime::RuntimeError::Refused { .. } => ErrorCode::Internal,
    };
    Problem::new(code, error.to_string())
}
