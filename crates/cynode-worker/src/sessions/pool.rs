//! Warm sandboxes: made ahead, each proven by a command, claimed by one write to the journal.
//!
//! What must stay true: a spare has never run a command of anybody's, and is used once. It has an empty workspace of its own
//! and no task; a session that claims it is in the journal before its caller hears of it, with the sandbox's process and
//! workspace. Spares themselves are in no journal: a worker that dies leaves containers that no session wants, and the next
//! one removes them. So what a spare depends on (profile, agent, OCI runtime) never outlives the worker that chose it.

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
/// The pool has at most this part of the blocks of ids: kept workspaces hold theirs, and an ordinary user has few.
const PART_OF_IDS: usize = 4;
/// How long somebody who needs a spare's ids waits for its removal.
const GIVING_UP: Duration = Duration::from_secs(30);

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
    places: Mutex<Places<Spare>>,
    /// A spare was claimed or given up.
    changed: Notify,
    /// A spare is gone, and its ids may be free.
    gone: Notify,
    /// Spares on their way out.
    leaving: TaskTracker,
}

/// Spares by what is to become of them.
#[derive(Debug)]
struct Places<S> {
    ready: Vec<S>,
    making: usize,
    /// Of those that are being made, so many are no longer wanted. A start is not cut off in the middle: they go when they are
    /// there.
    unwanted: usize,
    /// Being removed.
    leaving: usize,
}

impl<S> Default for Places<S> {
    fn default() -> Self {
        Self {
            ready: Vec::new(),
            making: 0,
            unwanted: 0,
            leaving: 0,
        }
    }
}

/// Which spare was given up.
#[derive(Debug, PartialEq, Eq)]
enum GivenUp<S> {
    Ready(S),
    /// One that is being made.
    Coming,
    /// There is none.
    None,
}

impl<S> Places<S> {
    /// Spares that are there or being made, and wanted.
    fn count(&self) -> usize {
        self.ready.len() + self.making - self.unwanted
    }

    /// One was made. It is given back when it is no longer wanted, to be removed.
    fn made(&mut self, spare: S) -> Option<S> {
        self.making -= 1;
        if self.unwanted == 0 {
            self.ready.push(spare);
            return None;
        }
        self.unwanted -= 1;
        self.leaving += 1;
        Some(spare)
    }

    /// One could not be made.
    fn failed(&mut self) {
        self.making -= 1;
        self.unwanted = self.unwanted.min(self.making);
    }

    fn give_up(&mut self) -> GivenUp<S> {
        if let Some(spare) = self.ready.pop() {
            self.leaving += 1;
            return GivenUp::Ready(spare);
        }
        if self.unwanted < self.making {
            self.unwanted += 1;
            return GivenUp::Coming;
        }
        GivenUp::None
    }
}

/// How many of the wanted spares there are ids for; `None` when all sandboxes share theirs.
fn bounded(wanted: usize, blocks: Option<usize>) -> usize {
    wanted.min(blocks.map_or(usize::MAX, |blocks| blocks / PART_OF_IDS))
}

impl Pool {
    /// Spares that are there or being made.
    pub(super) fn count(&self) -> usize {
        self.places.lock().count()
    }

    #[expect(clippy::cast_precision_loss, reason = "a few")]
    fn measure(&self) {
        metrics::gauge!("cynode_pool_ready").set(self.places.lock().ready.len() as f64);
    }
}

impl Sessions {
    /// How many spares are kept.
    fn pool_size(&self) -> usize {
        bounded(self.config.pool_size, self.ids.count())
    }

    /// What the memory limits of the spares, and of so many more, add up to.
    pub(super) fn spare_memory(&self, more: usize) -> u64 {
        self.capacity
            .default_limits()
            .memory_bytes
            .saturating_mul((self.pool.count() + more) as u64)
    }

    /// Takes a spare that fits. One whose process is gone serves nobody.
    pub(super) fn claim(self: &Arc<Self>, key: &Key) -> Option<Spare> {
        if self.pool_size() == 0 {
            return None;
        }
        let found = loop {
            let found = {
                let ready = &mut self.pool.places.lock().ready;
                let position = ready.iter().position(|spare| spare.key == *key);
                position.map(|position| ready.remove(position))
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
    pub(super) async fn bind(
        self: &Arc<Self>,
        spare: Spare,
        mut record: SessionRecord,
        begun: Instant,
    ) -> Result<Arc<Entry>, ApiError> {
        let Spare {
            sandbox, started, ..
        } = &spare;
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
        metrics::histogram!("cynode_session_create_seconds", "warm" => "true")
            .record(begun.elapsed().as_secs_f64());
        // The workspace's own record repeats what the session's says and is made from it when it is missing. Whoever ends the
        // session waits for it by the step's lock; the caller need not.
        let journal = self.journal.clone();
        tokio::spawn(async move {
            for _ in 0..RECORD_TRIES {
                let (journal, workspace) = (journal.clone(), workspace.clone());
                match blocking(move || journal.write_workspace(&workspace)).await {
                    Ok(()) => break,
                    Err(error) => {
                        tracing::error!(%error, "Recording the workspace of a claimed sandbox failed.")
                    }
                }
                tokio::time::sleep(PAUSE).await;
            }
            drop(step);
        });
        Ok(entry)
    }

    /// Whether a spare other than this one has these ids.
    pub(super) fn spare_has(&self, id: SandboxId, id_block: u32) -> bool {
        self.pool
            .places
            .lock()
            .ready
            .iter()
            .any(|spare| spare.sandbox.id_block == id_block && spare.sandbox.sandbox_id != id)
    }

    pub(super) fn is_spare(&self, id: SandboxId) -> bool {
        self.pool
            .places
            .lock()
            .ready
            .iter()
            .any(|spare| spare.sandbox.sandbox_id == id)
    }

    /// Makes room for a sandbox that somebody wants now. False when no spare is left to be given up.
    pub(super) fn give_up_a_spare(self: &Arc<Self>) -> bool {
        // A place of its own: the lock must be free when the removal begins.
        let given_up = self.pool.places.lock().give_up();
        match given_up {
            GivenUp::Ready(spare) => self.spawn_removal(spare),
            GivenUp::Coming => {}
            GivenUp::None => return false,
        }
        self.pool.measure();
        true
    }

    /// A block of ids for somebody who wants it now. When all are used, spares give up theirs. The gate is held: no new spare
    /// takes what comes free.
    pub(super) async fn take_ids(self: &Arc<Self>) -> Option<u32> {
        let deadline = tokio::time::Instant::now() + GIVING_UP;
        loop {
            let mut gone = std::pin::pin!(self.pool.gone.notified());
            gone.as_mut().enable();
            if let Some(block) = self.ids.take() {
                return Some(block);
            }
            let coming = {
                let places = self.pool.places.lock();
                places.leaving + places.unwanted
            };
            if coming == 0 && !self.give_up_a_spare() {
                return None;
            }
            tokio::time::timeout_at(deadline, gone).await.ok()?;
        }
    }

    fn throw_away(self: &Arc<Self>, spare: Spare) {
        self.pool.places.lock().leaving += 1;
        self.spawn_removal(spare);
    }

    /// Removes a spare that is counted as leaving.
    fn spawn_removal(self: &Arc<Self>, spare: Spare) {
        let sessions = Arc::clone(self);
        self.pool.leaving.spawn(async move {
            sessions
                .remove_spare(&spare.sandbox, Some(&spare.started))
                .await;
            sessions.pool.places.lock().leaving -= 1;
            sessions.pool.gone.notify_waiters();
        });
    }

    async fn remove_spare(&self, sandbox: &Sandbox, started: Option<&Started>) {
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
            Ok(()) => self.ids.give_back(sandbox.id_block),
            Err(error) => {
                tracing::warn!(%error, "Removing the workspace of a spare sandbox failed; the next start tries again.")
            }
        }
        drop(self.empty_trash().await);
    }

    /// Keeps the pool full until it is told to stop; then empties it.
    pub(crate) async fn keep_pool(self: Arc<Self>, stop: CancellationToken) {
        if self.pool_size() == 0 || self.config.exec_via != ExecVia::Agent {
            return;
        }
        if self.pool_size() < self.config.pool_size {
            tracing::warn!(
                pool_size = self.pool_size(),
                "There are few ids for sandboxes here; the pool is kept smaller than worker.pool_size."
            );
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
        let spares = std::mem::take(&mut self.pool.places.lock().ready);
        for spare in spares {
            self.throw_away(spare);
        }
        self.pool.leaving.close();
        self.pool.leaving.wait().await;
    }

    /// Gives up what no request can get any more, and makes what is missing.
    async fn fill(self: &Arc<Self>, stop: &CancellationToken) -> Result<(), ApiError> {
        let image_id = self.image("default", None).await?.id;
        let key = Key {
            image_id,
            limits: self.capacity.default_limits(),
            network_policy: NetworkPolicy::default(),
        };
        let stale: Vec<Spare> = {
            let ready = &mut self.pool.places.lock().ready;
            let (good, stale) = std::mem::take(ready)
                .into_iter()
                .partition(|spare| spare.key == key && spare.started.live.init.is_alive());
            *ready = good;
            stale
        };
        for spare in stale {
            self.throw_away(spare);
        }
        let mut making = tokio::task::JoinSet::new();
        let mut failed = None;
        loop {
            while failed.is_none() && making.len() < AT_ONCE && !stop.is_cancelled() {
                let Some(id_block) = self.reserve_spare().await else {
                    break;
                };
                let (sessions, key) = (Arc::clone(self), key.clone());
                making.spawn(async move { sessions.make_spare(key, id_block).await });
            }
            match making.join_next().await {
                None => return failed.map_or(Ok(()), Err),
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => failed = Some(error),
                Some(Err(_)) => {
                    failed = Some(ApiError::new(
                        ErrorCode::Internal,
                        "making a spare sandbox was interrupted",
                    ))
                }
            }
        }
    }

    /// Counts one more spare, when there is room and a block of ids for it.
    async fn reserve_spare(&self) -> Option<u32> {
        // Nobody who is being admitted may find his place taken.
        let _gate = self.gate.lock().await;
        let count = self.pool.count();
        let is_full = self.live_count() + count >= self.config.max_sandboxes
            || self.promised_memory().saturating_add(self.spare_memory(1))
                > self.capacity.promised_memory_bytes;
        if count >= self.pool_size() || is_full || self.check_room().is_err() {
            return None;
        }
        let id_block = self.ids.take()?;
        self.pool.places.lock().making += 1;
        Some(id_block)
    }

    async fn make_spare(self: &Arc<Self>, key: Key, id_block: u32) -> Result<(), ApiError> {
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
                let unwanted = self.pool.places.lock().made(Spare {
                    key,
                    sandbox,
                    started,
                });
                if let Some(spare) = unwanted {
                    tracing::debug!("A spare sandbox is no longer wanted.");
                    self.spawn_removal(spare);
                } else {
                    tracing::debug!("A spare sandbox is ready.");
                }
                self.pool.measure();
                Ok(())
            }
            Err(error) => {
                self.remove_spare(&sandbox, None).await;
                self.pool.places.lock().failed();
                self.pool.gone.notify_waiters();
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
    let mut channel = started
        .live
        .link()?
        .open(&request)
        .await
        .map_err(unavailable)?;
    match channel.reply(ANSWER).await? {
        Reply::Started { .. } => {}
        other => return Err(crate::sandbox::unexpected(&format!("{other:?}"))),
    }
    let failed = |what: &str| {
        ApiError::new(
            ErrorCode::AgentUnavailable,
            format!("a first command {what}"),
        )
    };
    let ended = async {
        loop {
            match channel.next().await.map_err(unavailable)? {
                Frame::Output { seq, .. } => {
                    channel.send(&Frame::Ack(seq)).await.map_err(unavailable)?
                }
                Frame::Json(json) => match serde_json::from_slice(&json) {
                    Ok(Reply::Exited(report)) if report.code == Some(0) => {
                        return channel.send(&Frame::ACK_EXIT).await.map_err(unavailable);
                    }
                    _ => return Err(failed("failed")),
                },
                _ => return Err(failed("was answered with nonsense")),
            }
        }
    };
    tokio::time::timeout(ANSWER, ended)
        .await
        .map_err(|_| failed("did not end"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_leaves_most_of_the_ids_to_sessions() {
        // Of an ordinary user with 65,536 ids, of root, of a runtime with one map for all, and of who has next to none.
        assert_eq!(
            [
                bounded(10, Some(32)),
                bounded(10, Some(512)),
                bounded(10, None),
                bounded(10, Some(3))
            ],
            [8, 10, 10, 0]
        );
    }

    #[test]
    fn spares_are_given_up_whether_they_are_there_or_come() {
        let mut places = Places {
            making: 3,
            ..Places::default()
        };
        assert_eq!(places.made("first"), None);
        assert_eq!(places.count(), 3);
        assert_eq!(
            [places.give_up(), places.give_up()],
            [GivenUp::Ready("first"), GivenUp::Coming]
        );
        assert_eq!((places.count(), places.leaving), (1, 1));
        // Whichever comes first goes; the other stays.
        assert_eq!(
            (places.made("second"), places.made("third")),
            (Some("second"), None)
        );
        assert_eq!((places.count(), places.leaving), (1, 2));
        // One that was given up and failed is not missed.
        places.making = 1;
        assert_eq!(
            [places.give_up(), places.give_up(), places.give_up()],
            [GivenUp::Ready("third"), GivenUp::Coming, GivenUp::None]
        );
        places.failed();
        assert_eq!((places.count(), places.unwanted), (0, 0));
    }
}
