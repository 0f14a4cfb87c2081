//! Sessions: sandboxes that stay.
//!
//! Each session is a record in the journal and, while it runs, a live container. Every step of its life is written down
//! before it is done, and each step can be done again: after a crash the reconciler takes each session up where it was.

mod create;
mod end;
mod environment;
mod fill;
mod job;
mod life;
mod live;
mod pool;
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
    ErrorCode, NodeId, Problem, SandboxId, Session, SessionId, SessionPatch, SessionState,
};
use cynode_service::{
    ApiError,
    checks::{check_labels, check_seconds},
};
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::sync::watch;

use crate::{
    capacity::{Capacity, Parent},
    config::Config,
    disk::Disks,
    execs::SessionExecs,
    idrange::IdBlocks,
    journal::{Journal, SessionRecord, blocking, interrupted},
    runtime::{self, Runtime},
};

pub(crate) use create::Created;
pub(crate) use end::Ending;
pub(crate) use environment::exec_environment;
pub(crate) use fill::Upstream;
pub(crate) use job::Room;
pub(crate) use live::{Activity, Live};
pub(crate) use validate::check_version;

/// How long a caller waits for a worker that still takes up what an earlier one left.
const SETTLE_WAIT: Duration = Duration::from_secs(10);

/// How long a caller of create waits before it is answered with `creating`.
const CREATE_WAIT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Sessions {
    pub(crate) config: Config,
    pub(crate) node_id: NodeId,
    pub(crate) runtime: Arc<dyn Runtime>,
    journal: Journal,
    ids: IdBlocks,
    /// The agent's binary in this worker's own store, by its hash.
    agent_binary: PathBuf,
    /// What this node has for sandboxes.
    pub(crate) capacity: Capacity,
    /// The cgroup of all sandboxes, where the host has one.
    parent: Option<Parent>,
    disks: Result<Disks, String>,
    /// What `default` means: as configured, until an orchestrator says otherwise.
    pub(crate) default_image: Mutex<String>,
    /// Where artifacts come from, once an orchestrator knows this node.
    upstream: Mutex<Option<Upstream>>,
    pool: pool::Pool,
    /// Sandboxes that could not be removed, with their ids.
    doomed: Mutex<Vec<(SandboxId, u32)>>,
    known: Mutex<HashMap<SessionId, Arc<Entry>>>,
    /// Held from the look for a session's id to its admission: of two callers at once, one creates.
    gate: tokio::sync::Mutex<()>,
    /// Why not everything that an earlier worker left is seen to; `None` once it is.
    unsettled: watch::Sender<Option<String>>,
}

/// What a worker brings to its sessions.
#[derive(Debug)]
pub(crate) struct Means {
    pub(crate) config: Config,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) journal: Journal,
    pub(crate) node_id: NodeId,
    pub(crate) ids: IdBlocks,
    pub(crate) agent_binary: PathBuf,
    pub(crate) capacity: Capacity,
    pub(crate) parent: Option<Parent>,
    /// Or why workspaces can't have disks of their own here.
    pub(crate) disks: Result<Disks, String>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    record: Mutex<SessionRecord>,
    /// Held from the reading of the record to the moment when its change is on disk and seen.
    writing: tokio::sync::Mutex<()>,
    live: Mutex<Option<Arc<Live>>>,
    pub(crate) execs: Arc<SessionExecs>,
    state: watch::Sender<SessionState>,
    last_activity: Mutex<Instant>,
    /// Held while the session's container is made or removed: one such step at a time.
    step: Arc<tokio::sync::Mutex<()>>,
    /// Why creation failed, for the caller who waits.
    failure: Mutex<Option<ApiError>>,
}

impl Entry {
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

    /// Whether only its job knows of it.
    fn is_jobs(&self) -> bool {
        self.record.lock().job_id.is_some()
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

    /// The session as callers see it.
    pub(crate) fn id(&self) -> SessionId {
        self.record.lock().session.session_id
    }

    pub(crate) fn object(&self) -> Session {
        let record = self.record();
        let mut session = record.session;
        session.running_execs = self.execs.running_count();
        if session.state == SessionState::Running {
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
    pub(crate) fn new(means: Means) -> std::io::Result<Arc<Self>> {
        let Means {
            config,
            runtime,
            journal,
            node_id,
            ids,
            agent_binary,
            capacity,
            parent,
            disks,
        } = means;
        let mut known = HashMap::new();
        for record in recover::recover(&journal, &ids, config.workspace_grace_seconds)? {
            let execs = SessionExecs::open(&journal.session_directory(record.session.session_id))?;
            known.insert(record.session.session_id, Entry::new(record, execs));
        }
        Ok(Arc::new(Self {
            default_image: Mutex::new(config.default_image.clone()),
            upstream: Mutex::default(),
            config,
            node_id,
            runtime,
            journal,
            ids,
            agent_binary,
            capacity,
            parent,
            disks,
            pool: pool::Pool::default(),
            doomed: Mutex::default(),
            known: Mutex::new(known),
            gate: tokio::sync::Mutex::new(()),
            unsettled: watch::Sender::new(Some("taking up what an earlier worker left".to_owned())),
        }))
    }

    /// The session, whatever its state. The sandbox of a job looks like none.
    pub(crate) fn get(&self, id: SessionId) -> Result<Arc<Entry>, ApiError> {
        let found = self
            .known
            .lock()
            .get(&id)
            .cloned()
            .filter(|entry| !entry.is_jobs());
        found.ok_or_else(|| {
            ApiError::new(
                ErrorCode::SessionNotFound,
                format!("no session {id} on this node"),
            )
        })
    }

    /// The session with its container, for a call into it.
    pub(crate) fn live(&self, id: SessionId) -> Result<(Arc<Entry>, Arc<Live>), ApiError> {
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
                format!("session {id} is being taken up again after a restart of the worker"),
            )
        })?;
        Ok((entry, live))
    }

    /// Oldest first, without those of jobs.
    pub(crate) fn entries(&self) -> Vec<Arc<Entry>> {
        let mut entries: Vec<Arc<Entry>> = self
            .known
            .lock()
            .values()
            .filter(|entry| !entry.is_jobs())
            .cloned()
            .collect();
        entries.sort_by_cached_key(|entry| {
            let record = entry.record.lock();
            (record.session.created_at, record.session.session_id)
        });
        entries
    }

    pub(crate) fn live_count(&self) -> usize {
        self.known
            .lock()
            .values()
            .filter(|entry| entry.record.lock().is_live())
            .count()
    }

    /// What the memory limits of all sandboxes add up to, those that wait to be claimed not counted.
    fn promised_memory(&self) -> u64 {
        let known = self.known.lock();
        let records = known.values().map(|entry| entry.record.lock());
        records
            .filter(|record| record.is_live())
            .fold(0, |sum, record| {
                record.session.limits.memory_bytes.saturating_add(sum)
            })
    }

    /// Waits until new work can be taken, for as long as a caller can be made to wait.
    pub(crate) async fn wait_until_settled(&self) -> Result<(), ApiError> {
        let mut unsettled = self.unsettled.subscribe();
        match tokio::time::timeout(SETTLE_WAIT, unsettled.wait_for(Option::is_none)).await {
            Ok(_) => Ok(()),
            Err(_) => Err(ApiError::new(
                ErrorCode::RuntimeUnavailable,
                self.unsettled().unwrap_or_default(),
            )),
        }
    }

    /// Waits until everything that an earlier worker left is seen to.
    pub(crate) async fn settled(&self) {
        drop(self.unsettled.subscribe().wait_for(Option::is_none).await);
    }

    /// Why new work has to wait, if it has to.
    pub(crate) fn unsettled(&self) -> Option<String> {
        self.unsettled.borrow().clone()
    }

    /// Changes a record: written down first, then seen. Goes to its end even when the caller goes away, so that what is on
    /// disk and what is seen do not part.
    async fn update(
        &self,
        entry: &Arc<Entry>,
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

/// A runtime's failure as a caller sees it.
pub(crate) fn runtime_problem(error: &runtime::Error) -> Problem {
    let code = match error {
        runtime::Error::Timeout { .. }
        | runtime::Error::Unavailable(_)
        | runtime::Error::Unreached(_) => ErrorCode::RuntimeUnavailable,
        runtime::Error::NotFound(_)
        | runtime::Error::NameInUse(_)
        | runtime::Error::Refused { .. } => ErrorCode::Internal,
    };
    Problem::new(code, error.to_string())
}
