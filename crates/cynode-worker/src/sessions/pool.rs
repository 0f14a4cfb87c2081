//! A pool of warm sandboxes, each started ahead and checked by a command, and claimed with one
//! journal write.
//!
//! Invariants: no caller's command has ever run in a spare, and a spare is used once. It has its
//! own empty workspace and no task. A session that claims a spare is journaled with the sandbox's
//! process and workspace before the caller is answered. Spares themselves are not journaled: after
//! a crash their containers are orphans, which the next worker removes. A spare's seccomp profile,
//! agent and OCI runtime therefore always match the worker that uses it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::{
    ErrorCode, ExecId, ExecVia, Limits, NetworkPolicy, SandboxId, SessionState, WorkspaceId,
};
use cynode_sba_proto::{AGENT_BINARY, ExecStart, Frame, Reply, Request};
use cynode_service::ApiError;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    SessionEntry, Sessions, blocking,
    pool_slots::{Eviction, PoolSlots},
    start::{Sandbox, StartedSandbox},
};
use crate::{
    journal::{SessionRecord, WorkspaceRecord},
    sandbox::{REPLY_TIMEOUT, unavailable},
};

/// How often the pool is checked when nothing was claimed.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Each start takes most of a CPU.
const MAX_CONCURRENT_STARTS: usize = 2;
/// Back-off after a failed start.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
/// Attempts to write the record of a claimed workspace. If all fail, the next worker start
/// recreates it from the session's record.
const RECORD_ATTEMPTS: u32 = 10;
/// The pool leaves the other id blocks to sessions: retained workspaces keep theirs, and a rootless
/// worker has few.
const ID_BLOCKS_PER_SPARE: usize = 4;
/// How long an allocation waits for the ids of an evicted spare.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(30);

/// The properties that a spare and a request must share.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PoolKey {
    pub(super) image_id: String,
    pub(super) limits: Limits,
    pub(super) network_policy: NetworkPolicy,
}

#[derive(Debug)]
pub(super) struct Spare {
    key: PoolKey,
    sandbox: Sandbox,
    started: StartedSandbox,
}

#[derive(Debug, Default)]
pub(super) struct Pool {
    slots: Mutex<PoolSlots<Spare>>,
    /// Notified when a spare is claimed or evicted.
    changed: Notify,
    /// Notified when a spare is removed and its ids may be free.
    removed: Notify,
    /// Removals in flight.
    removing: TaskTracker,
}

/// The pool size that the id blocks allow; `None` if all sandboxes share one range.
fn effective_size(wanted: usize, blocks: Option<usize>) -> usize {
    wanted.min(blocks.map_or(usize::MAX, |blocks| blocks / ID_BLOCKS_PER_SPARE))
}

impl Pool {
    /// Spares that are ready or starting.
    pub(super) fn count(&self) -> usize {
        self.slots.lock().count()
    }

    #[expect(clippy::cast_precision_loss, reason = "a few")]
    fn measure(&self) {
        metrics::gauge!("cynode_pool_ready").set(self.slots.lock().ready.len() as f64);
    }
}

impl Sessions {
    /// The effective size of the pool.
    fn pool_size(&self) -> usize {
        effective_size(self.wanted_pool_size(), self.ids.count())
    }

    fn wanted_pool_size(&self) -> usize {
        self.config.wanted_pool_size(self.ids.space())
    }

    /// Sum of the memory limits of the spares and of `more` further ones.
    pub(super) fn spare_memory(&self, more: usize) -> u64 {
        self.capacity
            .default_limits()
            .memory_bytes
            .saturating_mul((self.pool.count() + more) as u64)
    }

    /// Takes a matching spare; discards those whose process has died.
    pub(super) fn claim(self: &Arc<Self>, key: &PoolKey) -> Option<Spare> {
        if self.pool_size() == 0 {
            return None;
        }
        let spare = loop {
            let spare = {
                let ready = &mut self.pool.slots.lock().ready;
                let position = ready.iter().position(|spare| spare.key == *key);
                position.map(|position| ready.remove(position))
            };
            match spare {
                Some(spare) if !spare.started.live.init.is_alive() => self.discard_spare(spare),
                spare => break spare,
            }
        };
        let result = if spare.is_some() { "hit" } else { "miss" };
        metrics::counter!("cynode_pool_claims_total", "result" => result).increment(1);
        self.pool.measure();
        self.pool.changed.notify_one();
        spare
    }

    /// Turns a spare into the sandbox of a session with one journal write.
    pub(super) async fn bind(
        self: &Arc<Self>,
        spare: Spare,
        mut record: SessionRecord,
        begun_at: Instant,
    ) -> Result<Arc<SessionEntry>, ApiError> {
        let Spare {
            sandbox, started, ..
        } = &spare;
        record.sandbox_id = sandbox.sandbox_id;
        record.id_block = sandbox.id_block;
        record.init = Some(started.live.init);
        record.has_job_directory = true;
        record.has_proxies = started.live.has_proxies();
        record.session.workspace_id = sandbox.workspace_id;
        record.session.unenforced.clone_from(&started.unenforced);
        record.session.warm = true;
        record.session.state = SessionState::Running;
        record.session.create_duration_ms = u64::try_from(begun_at.elapsed().as_millis()).ok();
        let workspace = WorkspaceRecord {
            workspace_id: sandbox.workspace_id,
            task_id: record.session.task_id,
            id_block: sandbox.id_block,
            delete_at: None,
            disk_bytes: sandbox.disk_bytes,
        };
        let (entry, step) = match self.record_session(record).await {
            Ok(written) => written,
            Err(error) => {
                self.discard_spare(spare);
                return Err(error);
            }
        };
        let live = spare.started.live;
        live.serve_proxies(&entry);
        *entry.live.lock() = Some(Arc::clone(&live));
        self.watch(&entry, live);
        metrics::histogram!("cynode_session_create_seconds", "warm" => "true")
            .record(begun_at.elapsed().as_secs_f64());
        // The workspace's record repeats the session's and can be recreated from it, so the caller
        // need not wait. Ending the session waits for the step lock.
        let journal = self.journal.clone();
        tokio::spawn(async move {
            for _ in 0..RECORD_ATTEMPTS {
                let (journal, workspace) = (journal.clone(), workspace.clone());
                match blocking(move || journal.write_workspace(&workspace)).await {
                    Ok(()) => break,
                    Err(error) => {
                        tracing::error!(%error, "Failed to record a claimed workspace.");
                    }
                }
                tokio::time::sleep(FIRST_BACKOFF).await;
            }
            drop(step);
        });
        Ok(entry)
    }

    /// Returns whether a spare other than `id` uses this id block.
    pub(super) fn spare_uses_block(&self, id: SandboxId, id_block: u32) -> bool {
        self.pool
            .slots
            .lock()
            .ready
            .iter()
            .any(|spare| spare.sandbox.id_block == id_block && spare.sandbox.sandbox_id != id)
    }

    pub(super) fn is_spare(&self, id: SandboxId) -> bool {
        self.pool
            .slots
            .lock()
            .ready
            .iter()
            .any(|spare| spare.sandbox.sandbox_id == id)
    }

    /// Evicts a spare to make room. Returns false if there is none.
    pub(super) fn evict_spare(self: &Arc<Self>) -> bool {
        // A separate statement: the lock must be released before the removal starts.
        let eviction = self.pool.slots.lock().evict();
        match eviction {
            Eviction::Ready(spare) => self.spawn_removal(spare),
            Eviction::Starting => {}
            Eviction::None => return false,
        }
        self.pool.measure();
        true
    }

    /// Allocates a block of ids, evicting spares when none is free. The caller holds the admission
    /// lock, so no new spare takes a freed block.
    pub(super) async fn allocate_id_block(self: &Arc<Self>) -> Option<u32> {
        let deadline = tokio::time::Instant::now() + EVICTION_TIMEOUT;
        loop {
            let mut removed = std::pin::pin!(self.pool.removed.notified());
            removed.as_mut().enable();
            if let Some(block) = self.ids.allocate() {
                return Some(block);
            }
            let pending = {
                let slots = self.pool.slots.lock();
                slots.removing + slots.evicted
            };
            if pending == 0 && !self.evict_spare() {
                return None;
            }
            tokio::time::timeout_at(deadline, removed).await.ok()?;
        }
    }

    fn discard_spare(self: &Arc<Self>, spare: Spare) {
        self.pool.slots.lock().removing += 1;
        self.spawn_removal(spare);
    }

    /// Removes a spare already counted in `removing`.
    fn spawn_removal(self: &Arc<Self>, spare: Spare) {
        let sessions = Arc::clone(self);
        self.pool.removing.spawn(async move {
            sessions
                .remove_spare(&spare.sandbox, Some(&spare.started))
                .await;
            sessions.pool.slots.lock().removing -= 1;
            sessions.pool.removed.notify_waiters();
        });
    }

    async fn remove_spare(&self, sandbox: &Sandbox, started: Option<&StartedSandbox>) {
        if let Some(started) = started {
            started.live.close();
        }
        if !self
            .clear_sandbox(sandbox.sandbox_id, sandbox.id_block)
            .await
        {
            return;
        }
        let removed = match self.release_workspace(sandbox.workspace_id).await {
            Ok(()) => self
                .journal
                .discard(&self.journal.workspace_directory(sandbox.workspace_id)),
            Err(error) => Err(error),
        };
        match removed {
            Ok(()) => self.ids.release(sandbox.id_block),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "Failed to remove the workspace of a spare sandbox; the next start retries."
                );
            }
        }
        drop(self.empty_trash().await);
    }

    /// Keeps the pool full until stopped, then empties it.
    pub(crate) async fn run_pool(self: Arc<Self>, stop: CancellationToken) {
        if self.pool_size() == 0 || self.config.exec_via != ExecVia::Agent {
            return;
        }
        if self.pool_size() < self.wanted_pool_size() {
            tracing::warn!(
                pool_size = self.pool_size(),
                "Too few ids for worker.pool_size; the pool is smaller."
            );
        }
        if stop.run_until_cancelled(self.reconciled()).await.is_none() {
            return;
        }
        let mut backoff = FIRST_BACKOFF;
        loop {
            let filled = self.fill(&stop).await;
            let wait = match &filled {
                Ok(()) => {
                    backoff = FIRST_BACKOFF;
                    CHECK_INTERVAL
                }
                Err(error) => {
                    tracing::warn!(error = %error, "Failed to start a spare sandbox; retrying.");
                    metrics::counter!("cynode_pool_failures_total").increment(1);
                    backoff = (backoff * 2).min(LONGEST_BACKOFF);
                    backoff
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                () = self.pool.changed.notified(), if filled.is_ok() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
        let spares = std::mem::take(&mut self.pool.slots.lock().ready);
        for spare in spares {
            self.discard_spare(spare);
        }
        self.pool.removing.close();
        self.pool.removing.wait().await;
    }

    /// Removes spares that no longer match the defaults, and starts missing ones.
    async fn fill(self: &Arc<Self>, stop: &CancellationToken) -> Result<(), ApiError> {
        let image_id = self.image("default", None).await?.id;
        let key = PoolKey {
            image_id,
            limits: self.capacity.default_limits(),
            network_policy: NetworkPolicy::default(),
        };
        let stale: Vec<Spare> = {
            let ready = &mut self.pool.slots.lock().ready;
            let (good, stale) = std::mem::take(ready)
                .into_iter()
                .partition(|spare| spare.key == key && spare.started.live.init.is_alive());
            *ready = good;
            stale
        };
        for spare in stale {
            self.discard_spare(spare);
        }
        let mut starting = tokio::task::JoinSet::new();
        let mut failed = None;
        loop {
            while failed.is_none() && starting.len() < MAX_CONCURRENT_STARTS && !stop.is_cancelled()
            {
                let Some(id_block) = self.reserve_spare().await else {
                    break;
                };
                let (sessions, key) = (Arc::clone(self), key.clone());
                starting.spawn(async move { sessions.start_spare(key, id_block).await });
            }
            match starting.join_next().await {
                None => return failed.map_or(Ok(()), Err),
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => failed = Some(error),
                Some(Err(_)) => {
                    failed = Some(ApiError::new(
                        ErrorCode::Internal,
                        "starting a spare sandbox was interrupted",
                    ));
                }
            }
        }
    }

    /// Reserves a slot and a block of ids for one more spare, if there is capacity.
    async fn reserve_spare(&self) -> Option<u32> {
        // Must not compete with an admission in progress.
        let _admission = self.admission_lock.lock().await;
        let count = self.pool.count();
        let is_full = self.live_count() + count >= self.config.max_sandboxes
            || self.promised_memory().saturating_add(self.spare_memory(1))
                > self.capacity.promised_memory_bytes;
        if count >= self.pool_size() || is_full || self.check_room().is_err() {
            return None;
        }
        let id_block = self.ids.allocate()?;
        self.pool.slots.lock().starting += 1;
        Some(id_block)
    }

    async fn start_spare(self: &Arc<Self>, key: PoolKey, id_block: u32) -> Result<(), ApiError> {
        tracing::debug!("Starting a spare sandbox.");
        let sandbox = Sandbox {
            sandbox_id: SandboxId::generate(),
            image_id: key.image_id.clone(),
            workspace_id: WorkspaceId::generate(),
            id_block,
            disk_bytes: self.limits_disks().then_some(key.limits.disk_bytes),
            keeps_job_directory: false,
            limits: key.limits,
        };
        let made = match self.start(&sandbox).await {
            Ok(started) => match check_spare(&started).await {
                Ok(()) => Ok(started),
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        match made {
            Ok(started) => {
                let evicted = self.pool.slots.lock().add_started(Spare {
                    key,
                    sandbox,
                    started,
                });
                if let Some(spare) = evicted {
                    tracing::debug!("A spare sandbox was evicted while it started.");
                    self.spawn_removal(spare);
                } else {
                    tracing::debug!("A spare sandbox is ready.");
                }
                self.pool.measure();
                Ok(())
            }
            Err(error) => {
                self.remove_spare(&sandbox, None).await;
                self.pool.slots.lock().start_failed();
                self.pool.removed.notify_waiters();
                Err(error)
            }
        }
    }
}

/// Runs a command in a spare to check that it can serve a session.
async fn check_spare(started: &StartedSandbox) -> Result<(), ApiError> {
    let request = Request::Exec(ExecStart {
        exec_id: ExecId::generate(),
        argv: vec![AGENT_BINARY.to_owned(), "--version".to_owned()],
        cwd: "/".to_owned(),
        env: Vec::new(),
        timeout_ms: 10_000,
        grace_ms: 0,
        drain_ms: 0,
        stdin: false,
        runner: false,
    });
    let mut channel = started
        .live
        .link()?
        .open(&request)
        .await
        .map_err(unavailable)?;
    match channel.reply(REPLY_TIMEOUT).await? {
        Reply::Started { .. } => {}
        other => return Err(crate::sandbox::unexpected(&format!("{other:?}"))),
    }
    let failed = |outcome: &str| {
        ApiError::new(
            ErrorCode::AgentUnavailable,
            format!("the first command in a spare sandbox {outcome}"),
        )
    };
    let ended = async {
        loop {
            match channel.next().await.map_err(unavailable)? {
                Frame::Output { seq, .. } => {
                    channel.send(&Frame::Ack(seq)).await.map_err(unavailable)?;
                }
                Frame::Json(json) => match serde_json::from_slice(&json) {
                    Ok(Reply::Exited(report)) if report.code == Some(0) => {
                        return channel.send(&Frame::ACK_EXIT).await.map_err(unavailable);
                    }
                    _ => return Err(failed("failed")),
                },
                _ => return Err(failed("got an unexpected reply")),
            }
        }
    };
    tokio::time::timeout(REPLY_TIMEOUT, ended)
        .await
        .map_err(|_| failed("timed out"))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::Config,
        runtime::{IdMap, IdSpace},
    };

    #[test]
    fn a_pool_leaves_most_of_the_ids_to_sessions() {
        // A rootless worker with 65,536 ids, root, a runtime with one shared range, and hardly any
        // ids.
        assert_eq!(
            [
                effective_size(10, Some(32)),
                effective_size(10, Some(512)),
                effective_size(10, None),
                effective_size(10, Some(3))
            ],
            [8, 10, 10, 0]
        );
    }

    #[test]
    fn the_pool_of_an_ordinary_user_is_small_unless_configured() {
        let within = IdSpace::Within(IdMap {
            first: 1,
            count: 65_536,
        });
        let mut config = Config::default();
        assert_eq!(config.wanted_pool_size(within), 2);
        assert_eq!(config.wanted_pool_size(IdSpace::Own), 10);
        config.pool_size = Some(5);
        assert_eq!(config.wanted_pool_size(within), 5);
    }
}
