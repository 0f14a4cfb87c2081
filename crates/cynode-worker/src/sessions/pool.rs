//! Warm sandboxes: made ahead, each proven by a command, claimed by one write to the journal.
//!
//! What must stay true: a spare has never run a command of anybody's, and is used once. It has an empty workspace of its own
//! and no task; a session that claims it is in the journal before its caller hears of it, with the sandbox's process and
//! workspace. Spares themselves are in no journal: a worker that dies leaves containers that no session wants, and the next
//! one removes them. So what a spare depends on (profile, agent, OCI runtime) never outlives the worker that chose it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use cynode_api::{ErrorCode, ExecId, ExecVia, Limits, NetworkPolicy, SandboxId, SessionState, WorkspaceId};
use cynode_sba_proto::{AGENT_BINARY, ExecStart, Frame, Reply, Request};
use cynode_service::ApiError;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Entry, Sessions, blocking,
    start::{Sandbox, Started},
};
use crate::{
    journal::{SessionRecord, WorkspaceRecord},
    sandbox::{ANSWER, unavailable},
};

/// How often the pool is looked at when nothing was claimed.
const LOOK: Duration = Duration::from_secs(5);
/// Made at once: each takes most of a processor.
const AT_ONCE: usize = 2;
/// After a failure, at first and at most.
const PAUSE: Duration = Duration::from_secs(1);
/// How often the record of a claimed workspace is tried; when all fail, the next start makes it from the session's.
const RECORD_TRIES: u32 = 10;
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// What a spare must have in common with a request to serve it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Key {
    pub(super) image_id: String,
    pub(super) limits: Limits,
    pub(super) network_policy: NetworkPolicy,
}

#[derive(Debug)]
pub(super) struct Spare {
    key: Key,
    sandbox: Sandbox,
    started: Started,
}

#[derive(Debug, Default)]
pub(super) struct Pool {
    spares: Mutex<Vec<Spare>>,
    making: AtomicUsize,
    /// A spare was claimed or given up.
    changed: Notify,
    /// Spares on their way out.
    leaving: TaskTracker,
}

impl Pool {
    /// Spares that are there or being made.
    pub(super) fn count(&self) -> usize {
        self.spares.lock().len() + self.making.load(Ordering::SeqCst)
    }

    #[expect(clippy::cast_precision_loss, reason = "a few")]
    fn measure(&self) {
        metrics::gauge!("cynode_pool_ready").set(self.spares.lock().len() as f64);
    }
}

impl Sessions {
    /// Takes a spare that fits. One whose process is gone serves nobody.
    pub(super) fn claim(self: &Arc<Self>, key: &Key) -> Option<Spare> {
        if self.config.pool_size == 0 {
            return None;
        }
        let found = loop {
            let found = {
                let mut spares = self.pool.spares.lock();
                let position = spares.iter().position(|spare| spare.key == *key);
                position.map(|position| spares.remove(position))
            };
            match found {
                Some(spare) if !spare.started.live.init.is_alive() => self.throw_away(spare),
                found => break found,
            }
        };
        metrics::counter!("cynode_pool_claims_total", "result" => if found.is_some() { "hit" } else { "miss" }).increment(1);
        self.pool.measure();
        self.pool.changed.notify_one();
        found
    }

    /// Makes a spare the sandbox of a session: one write.
    pub(super) async fn bind(self: &Arc<Self>, spare: Spare, mut record: SessionRecord, begun: Instant) -> Result<Arc<Entry>, ApiError> {
        let Spare { sandbox, started, .. } = &spare;
        record.sandbox_id = sandbox.sandbox_id;
        record.id_block = sandbox.id_block;
        record.init = Some(started.live.init);
        record.session.workspace_id = sandbox.workspace_id;
        record.session.unenforced.clone_from(&started.unenforced);
        record.session.warm = true;
        record.session.state = SessionState::Running;
        record.session.create_duration_ms = u64::try_from(begun.elapsed().as_millis()).ok();
        let workspace = WorkspaceRecord {
            workspace_id: sandbox.workspace_id,
            task_id: record.session.task_id,
            id_block: sandbox.id_block,
            delete_at: None,
            disk_bytes: sandbox.disk_bytes,
        };
        let (entry, step) = match self.write_down(record).await {
            Ok(written) => written,
            Err(error) => {
                self.throw_away(spare);
                return Err(error);
            }
        };
        let live = spare.started.live;
        *entry.live.lock() = Some(Arc::clone(&live));
        self.watch(&entry, live);
        metrics::histogram!("cynode_session_create_seconds", "warm" => "true").record(begun.elapsed().as_secs_f64());
        // The workspace's own record repeats what the session's says and is made from it when it is missing. Whoever ends the
        // session waits for it by the step's lock; the caller need not.
        let journal = self.journal.clone();
        tokio::spawn(async move {
            for _ in 0..RECORD_TRIES {
                let (journal, workspace) = (journal.clone(), workspace.clone());
                match blocking(move || journal.write_workspace(&workspace)).await {
                    Ok(()) => break,
                    Err(error) => tracing::error!(%error, "Recording the workspace of a claimed sandbox failed."),
                }
                tokio::time::sleep(PAUSE).await;
            }
            drop(step);
        });
        Ok(entry)
    }

    pub(super) fn is_spare(&self, id: SandboxId) -> bool {
        self.pool.spares.lock().iter().any(|spare| spare.sandbox.sandbox_id == id)
    }

    /// Makes room for a sandbox that somebody wants now.
    pub(super) fn give_up_a_spare(self: &Arc<Self>) {
        if let Some(spare) = self.pool.spares.lock().pop() {
            self.throw_away(spare);
        }
    }

    fn throw_away(self: &Arc<Self>, spare: Spare) {
        let sessions = Arc::clone(self);
        self.pool.leaving.spawn(async move { sessions.remove_spare(&spare.sandbox, Some(&spare.started)).await });
    }

    async fn remove_spare(&self, sandbox: &Sandbox, started: Option<&Started>) {
        if let Some(started) = started {
            started.live.close();
        }
        if !self.clear_sandbox(sandbox.sandbox_id, sandbox.id_block).await {
            return;
        }
        let removed = match self.release_workspace(sandbox.workspace_id).await {
            Ok(()) => self.journal.discard(&self.journal.workspace_directory(sandbox.workspace_id)),
            Err(error) => Err(error),
        };
        match removed {
            Ok(()) => self.ids.give_back(sandbox.id_block),
            Err(error) => tracing::warn!(%error, "Removing the workspace of a spare sandbox failed; the next start tries again."),
        }
        drop(self.empty_trash().await);
    }

    /// Keeps the pool full until it is told to stop; then empties it.
    pub(crate) async fn keep_pool(self: Arc<Self>, stop: CancellationToken) {
        if self.config.pool_size == 0 || self.config.exec_via != ExecVia::Agent {
            return;
        }
        if stop.run_until_cancelled(self.settled()).await.is_none() {
            return;
        }
        let mut pause = PAUSE;
        loop {
            let filled = self.fill(&stop).await;
            let wait = match &filled {
                Ok(()) => {
                    pause = PAUSE;
                    LOOK
                }
                Err(error) => {
                    tracing::warn!(error = %error.0, "Making a spare sandbox failed; trying again.");
                    metrics::counter!("cynode_pool_failures_total").increment(1);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    pause
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                () = self.pool.changed.notified(), if filled.is_ok() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
        let spares = std::mem::take(&mut *self.pool.spares.lock());
        for spare in spares {
            self.throw_away(spare);
        }
        self.pool.leaving.close();
        self.pool.leaving.wait().await;
    }

    /// Gives up what no request can get any more, and makes what is missing.
    async fn fill(self: &Arc<Self>, stop: &CancellationToken) -> Result<(), ApiError> {
        let image_id = self.image("default").await?.id;
        let key = Key { image_id, limits: Limits::default(), network_policy: NetworkPolicy::default() };
        let stale: Vec<Spare> = {
            let mut spares = self.pool.spares.lock();
            let (good, stale) = std::mem::take(&mut *spares).into_iter().partition(|spare| spare.key == key && spare.started.live.init.is_alive());
            *spares = good;
            stale
        };
        for spare in stale {
            self.throw_away(spare);
        }
        let mut making = tokio::task::JoinSet::new();
        let mut failed = None;
        loop {
            while failed.is_none() && making.len() < AT_ONCE && !stop.is_cancelled() && self.reserve_spare().await {
                let (sessions, key) = (Arc::clone(self), key.clone());
                making.spawn(async move {
                    let made = sessions.make_spare(key).await;
                    sessions.pool.making.fetch_sub(1, Ordering::SeqCst);
                    made
                });
            }
            match making.join_next().await {
                None => return failed.map_or(Ok(()), Err),
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => failed = Some(error),
                Some(Err(_)) => failed = Some(ApiError::new(ErrorCode::Internal, "making a spare sandbox was interrupted")),
            }
        }
    }

    /// Counts one more spare, when there is room for it.
    async fn reserve_spare(&self) -> bool {
        // Nobody who is being admitted may find his place taken.
        let _gate = self.gate.lock().await;
        let count = self.pool.count();
        let wanted = count < self.config.pool_size && self.live_count() + count < self.config.max_sandboxes && self.check_room().is_ok();
        if wanted {
            self.pool.making.fetch_add(1, Ordering::SeqCst);
        }
        wanted
    }

    async fn make_spare(self: &Arc<Self>, key: Key) -> Result<(), ApiError> {
        let Some(id_block) = self.ids.take() else { return Ok(()) };
        tracing::debug!("Making a spare sandbox.");
        let sandbox = Sandbox {
            sandbox_id: SandboxId::generate(),
            image_id: key.image_id.clone(),
            workspace_id: WorkspaceId::generate(),
            id_block,
            disk_bytes: self.limits_disks().then_some(key.limits.disk_bytes),
            limits: key.limits,
        };
        let made = match self.start(&sandbox).await {
            Ok(started) => match prove(&started).await {
                Ok(()) => Ok(started),
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        match made {
            Ok(started) => {
                self.pool.spares.lock().push(Spare { key, sandbox, started });
                self.pool.measure();
                tracing::debug!("A spare sandbox is ready.");
                Ok(())
            }
            Err(error) => {
                self.remove_spare(&sandbox, None).await;
                Err(error)
            }
        }
    }
}

/// Runs a command in a spare: what can do that once can do it for a session.
async fn prove(started: &Started) -> Result<(), ApiError> {
    let request = Request::Exec(ExecStart {
        exec_id: ExecId::generate(),
        argv: vec![AGENT_BINARY.to_owned(), "--version".to_owned()],
        cwd: "/".to_owned(),
        env: Vec::new(),
        timeout_ms: 10_000,
        grace_ms: 0,
        drain_ms: 0,
        stdin: false,
    });
    let mut channel = started.live.link()?.open(&request).await.map_err(unavailable)?;
    match channel.reply(ANSWER).await? {
        Reply::Started { .. } => {}
        other => return Err(crate::sandbox::unexpected(&format!("{other:?}"))),
    }
    let failed = |what: &str| ApiError::new(ErrorCode::AgentUnavailable, format!("a first command {what}"));
    let ended = async {
        loop {
            match channel.next().await.map_err(unavailable)? {
                Frame::Output { seq, .. } => channel.send(&Frame::Ack(seq)).await.map_err(unavailable)?,
                Frame::Json(json) => match serde_json::from_slice(&json) {
                    Ok(Reply::Exited(report)) if report.code == Some(0) => return channel.send(&Frame::ACK_EXIT).await.map_err(unavailable),
                    _ => return Err(failed("failed")),
                },
                _ => return Err(failed("was answered with nonsense")),
            }
        }
    };
    tokio::time::timeout(ANSWER, ended).await.map_err(|_| failed("did not end"))?
}
