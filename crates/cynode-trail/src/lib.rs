//! A writer's own audit trail: chained, numbered records that are durable before they take effect,
//! and that wait on disk for the orchestrator. Workers and egress roles keep one each.
//!
//! A [`Ledger`] admits records and bounds them; the `writer`, a thread, writes and flushes them with
//! others; the `store` keeps them. Who ships a batch tells the trail what the orchestrator made of
//! it ([`Trail::conclude`]).
//!
//! Invariant: what a record permits takes effect only after [`Trail::write`] has returned: then the
//! record is durable. Records leave the disk only after the orchestrator has acknowledged them.
#![forbid(unsafe_code)]

mod ledger;
mod store;
#[cfg(test)]
mod tests;
mod writer;

use std::{
    collections::BTreeMap,
    fmt, io,
    path::PathBuf,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use cynode_api::{AuditSubject, NodeAuditBatch};
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::{
    sync::{Notify, oneshot},
    time::timeout,
};
use uuid::Uuid;

pub use ledger::{Admitted, Charge, Ledger, NewRecord, TotalLedger};
pub use store::cost;
use store::{Backlog, Store};
use writer::{Command, Entry, Writer};

/// How long a caller waits for its record.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);
/// Records that wait for the disk; beyond it, records are refused immediately.
const MAX_QUEUED: usize = 4_096;
/// The age of the oldest unshipped record from which the writer is not ready.
const MAX_READY_AGE: Duration = Duration::from_mins(10);

/// Where a trail is, and whose it is.
#[derive(Clone, Debug)]
pub struct TrailSettings {
    pub directory: PathBuf,
    /// The subject of the records that the writer makes about itself.
    pub writer: AuditSubject,
    /// As messages name the writer: `this node`.
    pub name: &'static str,
    /// Of the thread that writes.
    pub thread: &'static str,
    pub metrics: TrailMetrics,
    /// What a trail that is shipped nowhere keeps, in bytes: the oldest records are dropped.
    /// `None`: records wait until they are acknowledged.
    pub keep_bytes: Option<u64>,
}

/// The names of a trail's metrics.
#[derive(Clone, Copy, Debug)]
pub struct TrailMetrics {
    pub backlog_records: &'static str,
    pub backlog_bytes: &'static str,
    pub lag_seconds: &'static str,
    pub refused: &'static str,
}

/// The disk or the queue is full, or the stream is broken. The effect must be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the audit record can't be written")]
pub struct NotWritten;

/// What the orchestrator says to a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It has all records before this one.
    Stored { next: u64 },
    /// It expects another record; `None` if none of this stream.
    OutOfOrder { expected: Option<u64> },
    /// It never stores these records, for these reasons.
    Refused(BTreeMap<u64, String>),
}

/// What a verdict changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conclusion {
    /// Shipping continues in this stream, or in the next one.
    Continued,
    /// The backlog was chained anew.
    Rebased,
    /// Nothing: the verdict concerns no record that waits.
    Stale,
}

/// The handle of a trail. Cheap to clone.
pub struct Trail<L: Ledger>(Arc<Inner<L>>);

struct Inner<L: Ledger> {
    commands: mpsc::SyncSender<Command<L>>,
    shared: Arc<Shared<L>>,
}

/// What the handles and the writer share.
struct Shared<L: Ledger> {
    /// Locked while records are written and flushed, and while a batch is read.
    store: Mutex<Store<L::Owner>>,
    /// Locked briefly. Taken after `store` where both are needed.
    ledger: Mutex<L>,
    /// Notified when there is something to ship.
    stored: Notify,
    /// As of the last tick of the writer.
    backlog: Mutex<Backlog>,
    /// Why the last batch was not shipped.
    problem: Mutex<Option<String>>,
    name: &'static str,
    metrics: TrailMetrics,
    keep_bytes: Option<u64>,
}

impl<L: Ledger> Clone for Trail<L> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<L: Ledger> fmt::Debug for Trail<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trail")
            .field("name", &self.0.shared.name)
            .finish_non_exhaustive()
    }
}

impl<L: Ledger> Trail<L> {
    /// Opens a trail. What earlier processes left is charged to the ledger; this process's records
    /// are in a new stream.
    pub fn open(settings: TrailSettings, mut ledger: L) -> io::Result<Self> {
        let store = Store::open(settings.directory, settings.writer, L::owner_of)?;
        ledger.charge(store.pending());
        let shared = Arc::new(Shared {
            backlog: Mutex::new(store.backlog()),
            store: Mutex::new(store),
            ledger: Mutex::new(ledger),
            stored: Notify::new(),
            problem: Mutex::default(),
            name: settings.name,
            metrics: settings.metrics,
            keep_bytes: settings.keep_bytes,
        });
        let (commands, incoming) = mpsc::sync_channel(MAX_QUEUED);
        let writer = Writer::new(Arc::clone(&shared));
        std::thread::Builder::new()
            .name(settings.thread.to_owned())
            .spawn(move || writer.run(&incoming))?;
        Ok(Self(Arc::new(Inner { commands, shared })))
    }

    /// Runs work on the ledger, which is locked meanwhile.
    pub fn with_ledger<T>(&self, work: impl FnOnce(&mut L) -> T) -> T {
        work(&mut self.0.shared.ledger.lock())
    }

    /// Writes an admitted record. It is durable when this returns. `permits_effect`: should nobody
    /// wait any more by then, a second record says that the effect did not follow.
    pub async fn write(
        &self,
        at: OffsetDateTime,
        record: Admitted<L>,
        permits_effect: bool,
    ) -> Result<(), NotWritten> {
        let shared = &self.0.shared;
        let (done, written) = oneshot::channel();
        let entry = Entry {
            at,
            record,
            done: Some(done),
            permits_effect,
        };
        if let Err(error) = self.0.commands.try_send(Command::Record(entry)) {
            if let mpsc::TrySendError::Full(Command::Record(entry))
            | mpsc::TrySendError::Disconnected(Command::Record(entry)) = error
            {
                let mut ledger = shared.ledger.lock();
                ledger.not_written(&entry.record, at, Instant::now());
            }
            self.count_refusal();
            return Err(NotWritten);
        }
        let outcome = timeout(RECORD_TIMEOUT, written).await;
        let outcome = outcome.ok().and_then(Result::ok);
        if outcome.is_none_or(|outcome| outcome.is_err()) {
            self.count_refusal();
            return Err(NotWritten);
        }
        Ok(())
    }

    /// Counts an effect that is refused for want of a record.
    pub fn count_refusal(&self) {
        metrics::counter!(self.0.shared.metrics.refused).increment(1);
    }

    /// Why the writer should take no new work: its records have waited too long.
    pub fn check(&self) -> Result<(), String> {
        let shared = &self.0.shared;
        if shared.keep_bytes.is_some() {
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
            "audit records of {} have waited {} minutes for the orchestrator: {}",
            shared.name,
            age.whole_minutes(),
            problem.unwrap_or_else(|| "no attempt has failed".to_owned())
        ))
    }

    /// Notes why the last batch was not shipped; `None` if it was.
    pub fn set_problem(&self, problem: Option<String>) {
        *self.0.shared.problem.lock() = problem;
    }

    /// Waits until a record was stored since this was last called.
    pub async fn stored(&self) {
        self.0.shared.stored.notified().await;
    }

    /// Writes the counts that are still open, and everything that is queued.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        let inner = Arc::clone(&self.0);
        // The queue may be full.
        drop(tokio::task::spawn_blocking(move || {
            inner.commands.send(Command::Flush(done))
        }));
        drop(timeout(RECORD_TIMEOUT, flushed).await);
    }

    /// Runs work on the store off the serving threads.
    async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared<L>, &mut Store<L::Owner>) -> io::Result<T> + Send + 'static,
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
        self.with_store(move |shared, store| shared.acknowledge(store, stream, next))
            .await
    }

    /// Acts on the orchestrator's answer to a batch of this stream. It continues where the
    /// orchestrator wants to; what can't be continued is chained anew, with refused records as
    /// records of the writer.
    pub async fn conclude(&self, stream: Uuid, verdict: Verdict) -> io::Result<Conclusion> {
        self.with_store(move |shared, store| {
            let Some(waiting) = store.unacknowledged(stream) else {
                return Ok(Conclusion::Stale);
            };
            match verdict {
                Verdict::Stored { next } => {
                    if shared.acknowledge(store, stream, next)? {
                        return Ok(Conclusion::Continued);
                    }
                    let reason = "the orchestrator has other records";
                    shared.rebase(store, reason, &BTreeMap::new())
                }
                Verdict::OutOfOrder { expected } => {
                    if expected.is_some_and(|expected| store.resend(stream, expected)) {
                        return Ok(Conclusion::Continued);
                    }
                    let reason = "the orchestrator has lost records";
                    shared.rebase(store, reason, &BTreeMap::new())
                }
                Verdict::Refused(mut refused) => {
                    refused.retain(|seq, _| waiting.contains(seq));
                    if refused.is_empty() {
                        return Ok(Conclusion::Stale);
                    }
                    shared.rebase(store, "the orchestrator refused records", &refused)
                }
            }
        })
        .await
    }
}

impl<L: Ledger> Shared<L> {
    fn acknowledge(
        &self,
        store: &mut Store<L::Owner>,
        stream: Uuid,
        next: u64,
    ) -> io::Result<bool> {
        let released = store.acknowledge(stream, next)?;
        let is_known = released.is_some();
        self.ledger.lock().release(released.unwrap_or_default());
        Ok(is_known)
    }

    /// Chains the backlog anew.
    fn rebase(
        &self,
        store: &mut Store<L::Owner>,
        reason: &str,
        refused: &BTreeMap<u64, String>,
    ) -> io::Result<Conclusion> {
        tracing::warn!(
            writer = self.name,
            reason,
            refused = refused.len(),
            "The audit records continue in a new stream."
        );
        let before: Vec<_> = store.pending().collect();
        store.rebase(reason, refused)?;
        let mut ledger = self.ledger.lock();
        ledger.release(before);
        ledger.charge(store.pending());
        Ok(Conclusion::Rebased)
    }
}

impl<L: Ledger> Drop for Inner<L> {
    fn drop(&mut self) {
        // Ends the writer; with a full queue, its closing does.
        drop(self.commands.try_send(Command::Stop));
    }
}
