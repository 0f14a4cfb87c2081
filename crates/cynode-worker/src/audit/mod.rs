//! The node's own audit trail: what a node decides without the orchestrator.
//!
//! A decision is admitted by the `ledger`, which counts repeats and bounds what one sandbox can
//! fill; written and flushed with others by the `writer`, a thread; kept in the `store`, chained
//! and numbered; and sent to the orchestrator by `ship`.
//!
//! Invariant: a decision takes effect, and its answer leaves the node, only after
//! [`NodeTrail::record`] has returned: then its record is durable. Without the record the effect is
//! refused. Records leave the disk only after the orchestrator has acknowledged them.

mod decision;
mod interrupted;
mod ledger;
mod ship;
mod store;
#[cfg(test)]
mod tests;
mod writer;

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use cynode_api::{NodeAuditBatch, NodeId};
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::{
    sync::{Notify, oneshot},
    time::timeout,
};
use uuid::Uuid;

pub use decision::{
    AuditedSandbox, DecisionOutcome, ModelCall, ModelUsage, NodeAction, NodeDecision, ProxyTarget,
    SandboxOwner,
};
use ledger::{Admission, Ledger};
pub(crate) use ship::run as ship;
use store::{Backlog, Store};
use writer::{Command, Entry, Writer};

/// How long a decision waits for its record.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);
/// Decisions that wait for the disk; beyond it, decisions are refused immediately.
const MAX_QUEUED: usize = 4_096;
/// What a node without an orchestrator keeps, in bytes.
const MAX_LOCAL_BYTES: u64 = 64 * 1024 * 1024;
/// The age of the oldest unshipped record from which the node is not ready.
const MAX_READY_AGE: Duration = Duration::from_mins(10);

/// The handle of the node's trail. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeTrail(Arc<Trail>);

#[derive(Debug)]
struct Trail {
    commands: mpsc::SyncSender<Command>,
    shared: Arc<Shared>,
}

/// What the handle, the writer and the shipper share.
#[derive(Debug)]
struct Shared {
    /// Locked while records are written and flushed, and while a batch is read.
    store: Mutex<Store>,
    /// Locked briefly. Taken after `store` where both are needed.
    ledger: Mutex<Ledger>,
    /// Notified when there is something to ship.
    stored: Notify,
    /// As of the last tick of the writer.
    backlog: Mutex<Backlog>,
    /// Why the last batch was not shipped.
    problem: Mutex<Option<String>>,
    is_shipped: bool,
}

/// Why a decision is not recorded. Its effect must be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The disk or the whole backlog is full, or the stream is broken.
    #[error("the node can't record its decisions")]
    Unavailable,
    /// This sandbox has used its share of the backlog. Others are not affected.
    #[error("this sandbox has used its share of the node's unshipped audit records")]
    ShareUsed,
}

impl RecordError {
    /// The code for answers to the sandbox, as docs/errors.md lists it.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Unavailable => cynode_api::ErrorCode::AuditUnavailable.as_str(),
            Self::ShareUsed => cynode_api::ErrorCode::AuditBacklogFull.as_str(),
        }
    }
}

impl NodeTrail {
    /// Opens the trail below a directory. Its records wait for the orchestrator; this process's
    /// records are in a new stream.
    pub fn open(directory: PathBuf, node_id: NodeId) -> io::Result<Self> {
        Self::start(directory, node_id, true)
    }

    /// Opens the trail of a node without an orchestrator. The newest records are kept.
    pub fn open_local(directory: PathBuf, node_id: NodeId) -> io::Result<Self> {
        Self::start(directory, node_id, false)
    }

    fn start(directory: PathBuf, node_id: NodeId, is_shipped: bool) -> io::Result<Self> {
        let mut store = Store::open(directory, node_id)?;
        end_open_calls(&mut store, node_id);
        let ledger = Ledger::new(node_id, is_shipped, store.pending());
        let shared = Arc::new(Shared {
            backlog: Mutex::new(store.backlog()),
            store: Mutex::new(store),
            ledger: Mutex::new(ledger),
            stored: Notify::new(),
            problem: Mutex::default(),
            is_shipped,
        });
        let (commands, incoming) = mpsc::sync_channel(MAX_QUEUED);
        let writer = Writer::new(Arc::clone(&shared));
        std::thread::Builder::new()
            .name("node-audit".to_owned())
            .spawn(move || writer.run(&incoming))?;
        Ok(Self(Arc::new(Trail { commands, shared })))
    }

    /// Records a decision. Returns when the record is durable; the effect may follow only then.
    /// Repeats of a denial within a short interval are counted, not recorded one by one.
    pub async fn record(&self, decision: NodeDecision) -> Result<(), RecordError> {
        let shared = &self.0.shared;
        let at = OffsetDateTime::now_utc();
        let admission = shared.ledger.lock().admit(&decision, at, Instant::now());
        let record = match admission {
            Admission::Record(record) => record,
            Admission::Counted => return Ok(()),
            Admission::Refused(error) => {
                metrics::counter!("cynode_node_audit_refused_total").increment(1);
                return Err(error);
            }
        };
        let (done, written) = oneshot::channel();
        let entry = Entry {
            at,
            record,
            done: Some(done),
            permits_effect: decision.permits_effect(),
        };
        if let Err(error) = self.0.commands.try_send(Command::Record(entry)) {
            if let mpsc::TrySendError::Full(Command::Record(entry))
            | mpsc::TrySendError::Disconnected(Command::Record(entry)) = error
            {
                let mut ledger = shared.ledger.lock();
                ledger.not_written(&entry.record, at, Instant::now());
            }
            metrics::counter!("cynode_node_audit_refused_total").increment(1);
            return Err(RecordError::Unavailable);
        }
        let outcome = timeout(RECORD_TIMEOUT, written).await;
        let outcome = outcome.ok().and_then(Result::ok);
        if outcome.is_none_or(|outcome| outcome.is_err()) {
            metrics::counter!("cynode_node_audit_refused_total").increment(1);
            return Err(RecordError::Unavailable);
        }
        Ok(())
    }

    /// Why the node should take no new work: its records have waited too long.
    pub(crate) fn check(&self) -> Result<(), String> {
        let shared = &self.0.shared;
        if !shared.is_shipped {
            return Ok(());
        }
        let Some(oldest) = shared.backlog.lock().oldest else {
            return Ok(());
        };
        let age = OffsetDateTime::now_utc() - oldest;
        if age < MAX_READY_AGE {
            return Ok(());
        }
        let problem = shared.problem.lock().clone();
        Err(format!(
            "audit records of this node have waited {} minutes for the orchestrator: {}",
            age.whole_minutes(),
            problem.unwrap_or_else(|| "no attempt has failed".to_owned())
        ))
    }

    /// Writes the counts that are still open, and everything that is queued.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        let trail = Arc::clone(&self.0);
        // The queue may be full.
        drop(tokio::task::spawn_blocking(move || {
            trail.commands.send(Command::Flush(done)).is_ok()
        }));
        drop(timeout(RECORD_TIMEOUT, flushed).await);
    }

    /// Runs work on the store off the serving threads.
    async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared, &mut Store) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let shared = Arc::clone(&self.0.shared);
        tokio::task::spawn_blocking(move || {
            let mut store = shared.store.lock();
            work(&shared, &mut store)
        })
        .await
        .map_err(io::Error::other)?
    }

    /// The next records to ship.
    pub async fn next_batch(&self) -> io::Result<Option<NodeAuditBatch>> {
        self.with_store(|_, store| store.next_batch()).await
    }

    /// The orchestrator has all records of a stream before `next`. Returns false if it claims more
    /// than the stream has.
    pub async fn acknowledge(&self, stream: Uuid, next: u64) -> io::Result<bool> {
        self.with_store(move |shared, store| {
            let released = store.acknowledge(stream, next)?;
            let is_known = released.is_some();
            shared.ledger.lock().release(released.unwrap_or_default());
            Ok(is_known)
        })
        .await
    }

    /// Goes back to a record that the orchestrator misses. Returns false if it is no longer held.
    pub(crate) async fn resend(&self, stream: Uuid, from: u64) -> io::Result<bool> {
        self.with_store(move |_, store| Ok(store.resend(stream, from)))
            .await
    }

    /// Chains the backlog anew.
    pub(crate) async fn rebase(
        &self,
        reason: String,
        refused: BTreeMap<u64, String>,
    ) -> io::Result<()> {
        self.with_store(move |shared, store| {
            let before: Vec<_> = store.pending().collect();
            store.rebase(&reason, &refused)?;
            shared.ledger.lock().replace(before, store.pending());
            Ok(())
        })
        .await
    }
}

/// Records the ends of the model calls that an earlier process left open.
fn end_open_calls(store: &mut Store, node_id: NodeId) {
    let at = OffsetDateTime::now_utc();
    let ends: Vec<_> = store
        .take_open_calls()
        .into_ends()
        .map(|end| {
            let body = serde_json::to_value(end.body(node_id)).expect("a body serializes");
            (at, body)
        })
        .collect();
    if ends.is_empty() {
        return;
    }
    if let Err(error) = store.append(ends) {
        tracing::warn!(%error, "Interrupted model calls have no end in the node's audit trail yet.");
    }
}

impl Drop for Trail {
    fn drop(&mut self) {
        // Ends the writer; with a full queue, its closing does.
        drop(self.commands.try_send(Command::Stop));
    }
}
