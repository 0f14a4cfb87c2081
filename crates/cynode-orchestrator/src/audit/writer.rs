//! The audit writer: one task that chains records and commits them in batches.
//!
//! Invariants: an acknowledged intent is in the database; an abandoned intent is absent or has the
//! outcome `not_started`. An outcome that can't be written now is written when the database is
//! back, as long as this process lives; otherwise another orchestrator closes the call. No call
//! gets two outcomes: a writer that is considered dead adds nothing to its earlier calls.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use cynode_api::{AuditBody, AuditKind, AuditResult};
use cynode_audit::{Chain, Head, Link};
use parking_lot::Mutex;
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Error, OwnHeads};
use crate::db::{self, AppendOutcome, Db, DedicatedConnection, to_json};

/// How long a call waits for its intent. Without an intent the call fails.
const INTENT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a response waits for its outcome.
const OUTCOME_TIMEOUT: Duration = Duration::from_secs(5);
/// A slower commit is retried on another connection. PostgreSQL's own timeout is shorter.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(35);
/// Bounds the queue of records; beyond it, calls are rejected immediately.
const QUEUE_CAPACITY: usize = 10_000;
/// How long shutdown waits for a database that does not accept records.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);
/// Records per commit.
const BATCH: usize = 500;
/// The back-off while the database does not answer: the first one, and the longest.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(1);
/// Records after which a checkpoint is due.
const CHECKPOINT_RECORDS: usize = 1_000;

struct QueuedRecord {
    at: OffsetDateTime,
    body: AuditBody,
    done: oneshot::Sender<()>,
    /// Whether the record is written even when nobody waits for it any more.
    must_write: bool,
}

/// The handle of the writer. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Audit {
    entries: mpsc::UnboundedSender<QueuedRecord>,
    waiting: Arc<AtomicUsize>,
    /// The current stream.
    stream: Arc<Mutex<Uuid>>,
    /// The heads of this process's streams.
    pub(crate) heads: OwnHeads,
    /// Notified when a checkpoint is due.
    pub(crate) due: Arc<Notify>,
}

impl std::fmt::Debug for QueuedRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuedRecord")
            .field("action", &self.body.action)
            .finish_non_exhaustive()
    }
}

/// The outcome was not written in time; it is written later.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutcomePending;

impl Audit {
    /// Opens a stream and starts the writer. The task ends when all records that were queued before
    /// the stop are written.
    pub(crate) async fn open(
        db: &Db,
        writer: String,
        stop: CancellationToken,
    ) -> Result<(Self, tokio::task::JoinHandle<()>), Error> {
        let (entries, incoming) = mpsc::unbounded_channel();
        if cfg!(feature = "unaudited") {
            if std::env::var_os("CYNODE_UNAUDITED").is_none() {
                return Err(Error::Unaudited);
            }
            tracing::error!("This build keeps no audit trail. It is for measurements only.");
        }
        let stream = Uuid::now_v7();
        db.open_stream(stream, &writer).await?;
        let audit = Self {
            entries,
            waiting: Arc::default(),
            stream: Arc::new(Mutex::new(stream)),
            heads: OwnHeads::default(),
            due: Arc::default(),
        };
        let task = Writer {
            db: db.clone(),
            connection: db.dedicated(),
            writer,
            chain: Chain::new(stream),
            open: BTreeMap::new(),
            lost: HashSet::new(),
            since_checkpoint: 0,
            audit: audit.clone(),
            abandon: CancellationToken::new(),
        };
        let handle = tokio::spawn(task.run(incoming, stop));
        Ok((audit, handle))
    }

    /// The current stream.
    pub(crate) fn stream(&self) -> Uuid {
        *self.stream.lock()
    }

    /// The number of queued records.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether the queue is full, so that calls are rejected.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting() > QUEUE_CAPACITY
    }

    /// Queues a record. The receiver completes when it is written.
    fn enqueue(&self, body: AuditBody, must_write: bool) -> oneshot::Receiver<()> {
        let (done, written) = oneshot::channel();
        if cfg!(feature = "unaudited") {
            done.send(()).ok();
            return written;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if self
            .entries
            .send(QueuedRecord {
                at: OffsetDateTime::now_utc(),
                body,
                done,
                must_write,
            })
            .is_err()
        {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        written
    }

    /// Writes an intent. Nothing may take effect before this succeeds.
    pub(crate) async fn intent(&self, body: AuditBody) -> Result<(), Error> {
        if self.is_full() {
            return Err(Error::Unavailable);
        }
        let mut guard = IntentGuard {
            written: self.enqueue(body.clone(), false),
            audit: self,
            body: Some(body),
        };
        if matches!(
            timeout(INTENT_TIMEOUT, &mut guard.written).await,
            Ok(Ok(()))
        ) {
            guard.body = None;
            return Ok(());
        }
        // The intent may still be written; then its outcome is that nothing was started.
        Err(Error::Unavailable)
    }

    /// Writes an outcome. On a timeout it is written later.
    pub(crate) async fn outcome(&self, body: AuditBody) -> Result<(), OutcomePending> {
        let written = self.enqueue(body, true);
        timeout(OUTCOME_TIMEOUT, written)
            .await
            .ok()
            .and_then(Result::ok)
            .ok_or(OutcomePending)
    }

    /// Writes the records of a call without effects, and waits for the last of them.
    pub(crate) async fn write_all(&self, bodies: Vec<AuditBody>) -> Result<(), Error> {
        if self.is_full() {
            return Err(Error::Unavailable);
        }
        let mut last = None;
        for body in bodies {
            last = Some(self.enqueue(body, true));
        }
        match last {
            Some(written) => timeout(INTENT_TIMEOUT, written)
                .await
                .ok()
                .and_then(Result::ok)
                .ok_or(Error::Unavailable),
            None => Ok(()),
        }
    }

    /// Queues a record without waiting for it.
    pub(crate) fn enqueue_detached(&self, body: AuditBody) {
        drop(self.enqueue(body, true));
    }
}

/// Waits for an intent. If the caller goes away after the intent was written, the drop handler adds
/// its outcome.
struct IntentGuard<'a> {
    written: oneshot::Receiver<()>,
    audit: &'a Audit,
    body: Option<AuditBody>,
}

impl Drop for IntentGuard<'_> {
    fn drop(&mut self) {
        let Some(body) = self.body.take() else { return };
        self.written.close();
        if self.written.try_recv().is_ok() {
            self.audit.enqueue_detached(not_started(body));
        }
    }
}

pub(crate) fn not_started(intent: AuditBody) -> AuditBody {
    AuditBody {
        kind: AuditKind::Outcome,
        result: Some(AuditResult::NotStarted),
        detail: serde_json::Map::new(),
        ..intent
    }
}

struct Writer {
    db: Db,
    connection: DedicatedConnection,
    writer: String,
    chain: Chain,
    /// Open calls, and the sequence number of their intent.
    open: BTreeMap<Uuid, u64>,
    /// Calls that another orchestrator closes.
    lost: HashSet<Uuid>,
    since_checkpoint: usize,
    audit: Audit,
    /// Cancelled when shutdown has waited long enough for the database.
    abandon: CancellationToken,
}

impl Writer {
    async fn run(
        mut self,
        mut incoming: mpsc::UnboundedReceiver<QueuedRecord>,
        stop: CancellationToken,
    ) {
        tokio::spawn({
            let (stop, abandon) = (stop.clone(), self.abandon.clone());
            async move {
                stop.cancelled().await;
                tokio::time::sleep(SHUTDOWN_TIMEOUT).await;
                abandon.cancel();
            }
        });
        // The first record identifies the writer.
        self.write(vec![self.first()]).await;
        let mut entries = Vec::with_capacity(BATCH);
        loop {
            tokio::select! {
                biased;
                _ = incoming.recv_many(&mut entries, BATCH) => {}
                // The queue never closes, because this writer holds a sender too.
                () = stopped(&stop, &self.audit) => break,
            }
            self.audit
                .waiting
                .fetch_sub(entries.len(), Ordering::Relaxed);
            let batch = std::mem::take(&mut entries);
            if !self.write(batch).await {
                break;
            }
        }
        if let Err(error) = self.db.close_stream(self.chain.stream()).await {
            tracing::debug!(
                %error,
                "The audit stream was not closed; another orchestrator closes it after a timeout."
            );
        }
    }

    fn first(&self) -> QueuedRecord {
        let mut body = AuditBody::new(AuditKind::Stream, "audit.stream");
        body.detail.insert("writer".to_owned(), json!(self.writer));
        body.detail
            .insert("version".to_owned(), json!(env!("CARGO_PKG_VERSION")));
        QueuedRecord {
            at: OffsetDateTime::now_utc(),
            body,
            done: oneshot::channel().0,
            must_write: true,
        }
    }

    /// Writes a batch, however long the database takes. Returns false if shutdown came first.
    async fn write(&mut self, mut batch: Vec<QueuedRecord>) -> bool {
        // A caller that gave up did nothing, so its intent needs no record.
        batch.retain(|entry| entry.must_write || !entry.done.is_closed());
        while !batch.is_empty() {
            let links = self.chain(&mut batch);
            if links.is_empty() {
                return true;
            }
            match self.commit(&links).await {
                Some(AppendOutcome::Written) => {
                    batch = self.on_written(batch, &links);
                }
                Some(AppendOutcome::Duplicate) if self.drop_closed(&mut batch).await => {}
                Some(added @ (AppendOutcome::Closed | AppendOutcome::Duplicate)) => {
                    // A duplicate without a closed call: a third party inserted records. `verify`
                    // reports them.
                    if added == AppendOutcome::Duplicate {
                        tracing::error!(
                            "The audit trail contains foreign records; run 'cynode audit verify'."
                        );
                        tokio::time::sleep(FIRST_BACKOFF).await;
                        drop(self.db.skip_foreign_records().await);
                    }
                    if !self.reopen().await {
                        return false;
                    }
                    batch.insert(0, self.first());
                }
                // One record is at fault: write each in its own transaction.
                Some(AppendOutcome::Rejected) if batch.len() > 1 => {
                    for entry in batch {
                        if !Box::pin(self.write(vec![entry])).await {
                            return false;
                        }
                    }
                    return true;
                }
                Some(AppendOutcome::Rejected) => {
                    for entry in &mut batch {
                        entry.body.detail =
                            serde_json::Map::from_iter([("unwritable".to_owned(), json!(true))]);
                    }
                    tokio::select! {
                        () = tokio::time::sleep(MAX_BACKOFF) => {}
                        () = self.abandon.cancelled() => return false,
                    }
                }
                None => return false,
            }
        }
        true
    }

    /// Chains the records of a batch, without outcomes of calls that another orchestrator closes.
    /// `on_written` advances the writer's own chain.
    fn chain(&mut self, batch: &mut Vec<QueuedRecord>) -> Vec<Link> {
        let lost = &mut self.lost;
        batch.retain(|entry| {
            entry.body.kind != AuditKind::Outcome
                || !entry.body.call_id.is_some_and(|id| lost.remove(&id))
        });
        let mut chain = self.chain.clone();
        batch
            .iter()
            .map(|entry| chain.append(entry.at, to_json(&entry.body)))
            .collect()
    }

    /// The sequence number of the oldest intent that is still open after these records.
    fn first_open_seq(&self, links: &[Link]) -> u64 {
        let mut open = self.open.clone();
        track_open_calls(&mut open, links);
        open.values()
            .min()
            .copied()
            .unwrap_or_else(|| links.last().map_or(1, |link| link.seq + 1))
    }

    async fn commit(&mut self, links: &[Link]) -> Option<AppendOutcome> {
        let first_open_seq = self.first_open_seq(links);
        let mut pause = FIRST_BACKOFF;
        let started = std::time::Instant::now();
        loop {
            let stream = self.chain.stream();
            let append = self.connection.with(COMMIT_TIMEOUT, async |connection| {
                Db::append_audit(connection, stream, first_open_seq, links).await
            });
            let appended = tokio::select! {
                appended = append => appended,
                // Another orchestrator closes the calls that are not written.
                () = self.abandon.cancelled() => return None,
            };
            match appended {
                Ok(added) => {
                    metrics::histogram!("cynode_audit_commit_seconds")
                        .record(started.elapsed().as_secs_f64());
                    metrics::histogram!("cynode_audit_batch_records")
                        .record(f64::from(u32::try_from(links.len()).unwrap_or(u32::MAX)));
                    return Some(added);
                }
                Err(db::Error::Duplicate) => return Some(AppendOutcome::Duplicate),
                Err(error) if !error.is_transient() => {
                    tracing::error!(%error, "The database rejects audit records; they are retried one by one.");
                    return Some(AppendOutcome::Rejected);
                }
                Err(_) => {}
            }
            metrics::gauge!("cynode_audit_lag_seconds").set(started.elapsed().as_secs_f64());
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.abandon.cancelled() => return None,
            }
            pause = (pause * 2).min(MAX_BACKOFF);
        }
    }

    /// Completes the waiters, and returns outcomes for intents that nobody waits for any more.
    fn on_written(&mut self, batch: Vec<QueuedRecord>, links: &[Link]) -> Vec<QueuedRecord> {
        metrics::gauge!("cynode_audit_lag_seconds").set(0.0);
        track_open_calls(&mut self.open, links);
        if let Some(last) = links.last() {
            let head = Head {
                seq: last.seq,
                hash: last.hash,
            };
            self.chain = Chain::resume(last.stream, head);
            self.audit.heads.committed(last.stream, head);
        }
        self.since_checkpoint += links.len();
        if self.since_checkpoint >= CHECKPOINT_RECORDS {
            self.since_checkpoint = 0;
            self.audit.due.notify_one();
        }
        let mut late = Vec::new();
        for entry in batch {
            let intent = (entry.body.kind == AuditKind::Intent && !entry.must_write)
                .then(|| entry.body.clone());
            if entry.done.send(()).is_err()
                && let Some(intent) = intent
            {
                late.push(QueuedRecord {
                    at: OffsetDateTime::now_utc(),
                    body: not_started(intent),
                    done: oneshot::channel().0,
                    must_write: true,
                });
            }
        }
        late
    }

    /// Removes outcomes of calls that another orchestrator has closed. Returns whether a retry
    /// makes sense.
    async fn drop_closed(&mut self, batch: &mut Vec<QueuedRecord>) -> bool {
        let calls: Vec<Uuid> = batch
            .iter()
            .filter(|entry| entry.body.kind == AuditKind::Outcome)
            .filter_map(|entry| entry.body.call_id)
            .collect();
        let Ok(closed) = self.db.closed_calls(&calls).await else {
            tokio::time::sleep(FIRST_BACKOFF).await;
            return true;
        };
        for id in &closed {
            self.open.remove(id);
        }
        let (before, mut seen) = (batch.len(), HashSet::new());
        batch.retain(|entry| {
            entry.body.kind != AuditKind::Outcome
                || !entry
                    .body
                    .call_id
                    .is_some_and(|id| closed.contains(&id) || !seen.insert(id))
        });
        batch.len() < before
    }

    /// Continues in a new stream after this writer was considered dead. Another orchestrator closes
    /// its open calls. Returns false if shutdown came first.
    async fn reopen(&mut self) -> bool {
        tracing::warn!(stream = %self.chain.stream(), "This audit writer was considered dead; it continues in a new stream.");
        self.lost.extend(std::mem::take(&mut self.open).into_keys());
        let stream = Uuid::now_v7();
        while self.db.open_stream(stream, &self.writer).await.is_err() {
            tokio::select! {
                () = tokio::time::sleep(MAX_BACKOFF) => {}
                () = self.abandon.cancelled() => return false,
            }
        }
        self.chain = Chain::new(stream);
        *self.audit.stream.lock() = stream;
        true
    }
}

/// Tracks the calls that records open and close.
fn track_open_calls(open: &mut BTreeMap<Uuid, u64>, links: &[Link]) {
    for link in links {
        let Some(id) = link
            .body
            .get("call_id")
            .and_then(Value::as_str)
            .and_then(|id| id.parse().ok())
        else {
            continue;
        };
        match link.body.get("kind").and_then(Value::as_str) {
            Some("intent") => drop(open.insert(id, link.seq)),
            Some("outcome") => drop(open.remove(&id)),
            _ => {}
        }
    }
}

/// Completes when the orchestrator has stopped and the queue is empty.
async fn stopped(stop: &CancellationToken, audit: &Audit) {
    stop.cancelled().await;
    while audit.waiting() > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
