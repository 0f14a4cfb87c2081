//! Who adds records to the trail: one task that chains what comes and commits many records together.
//!
//! What must stay true: an intent that was answered for is in the database; one that was given up is not, or has the outcome
//! that nothing was begun. An outcome that can't be written now is written when the database is back, as long as this process
//! lives; if it does not, another one closes the call. No call gets two outcomes: once somebody else has taken this writer for
//! dead, it adds nothing to what it began before.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use cynode_api::{AuditBody, AuditKind, AuditResult, ErrorCode};
use cynode_audit::{Chain, Head, Link};
use cynode_service::ApiError;
use parking_lot::Mutex;
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::OwnHeads;
use crate::db::{Added, Db, Own, to_json};

/// How long a call waits for its intent. Without one it does nothing.
const INTENT: Duration = Duration::from_secs(5);
/// How long an answer waits for its outcome.
const OUTCOME: Duration = Duration::from_secs(5);
/// A commit that takes longer is given up, and tried again by another connection. The server gives up before.
const STATEMENT: Duration = Duration::from_secs(35);
/// So many records wait at most; then calls are refused at once.
const MOST_WAITING: usize = 10_000;
/// So many are committed together.
const BATCH: usize = 500;
/// How long until the next try while the database does not answer.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// After so many records a checkpoint is due.
const CHECKPOINT_RECORDS: usize = 1_000;

struct Entry {
    at: OffsetDateTime,
    body: AuditBody,
    done: oneshot::Sender<()>,
    /// A record that nobody waits for any more is still written.
    lasting: bool,
}

/// What calls have of the writer. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Audit {
    entries: mpsc::UnboundedSender<Entry>,
    waiting: Arc<AtomicUsize>,
    /// The stream that is written to now.
    stream: Arc<Mutex<Uuid>>,
    /// Where the streams of this process stand.
    pub(crate) heads: OwnHeads,
    /// Enough was written for a checkpoint.
    pub(crate) due: Arc<Notify>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("action", &self.body.action)
            .finish_non_exhaustive()
    }
}

/// The answer to a call whose outcome is not written yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending;

impl Audit {
    /// Opens a stream and starts to write. The task ends when everything that came before the stop is written.
    pub(crate) async fn open(
        db: &Db,
        writer: String,
        stop: CancellationToken,
    ) -> Result<(Self, tokio::task::JoinHandle<()>), ApiError> {
        let (entries, incoming) = mpsc::unbounded_channel();
        if cfg!(feature = "unaudited") {
            if std::env::var_os("CYNODE_UNAUDITED").is_none() {
                return Err(ApiError::new(
                    ErrorCode::Internal,
                    "this build keeps no audit trail; it is for measurements only, and runs with CYNODE_UNAUDITED set",
                ));
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
            own: db.own(),
            writer,
            chain: Chain::new(stream),
            open: BTreeMap::new(),
            lost: HashSet::new(),
            since_checkpoint: 0,
            audit: audit.clone(),
        };
        let handle = tokio::spawn(task.run(incoming, stop));
        Ok((audit, handle))
    }

    /// The stream that is written to now.
    pub(crate) fn stream(&self) -> Uuid {
        *self.stream.lock()
    }

    /// How many records wait to be written.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether so many wait that calls are refused.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting() > MOST_WAITING
    }

    fn enter(&self, body: AuditBody, lasting: bool) -> oneshot::Receiver<()> {
        let (done, waits) = oneshot::channel();
        if cfg!(feature = "unaudited") {
            done.send(()).ok();
            return waits;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if self
            .entries
            .send(Entry {
                at: OffsetDateTime::now_utc(),
                body,
                done,
                lasting,
            })
            .is_err()
        {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        waits
    }

    /// Writes an intent. Before this says yes, nothing may be done.
    pub(crate) async fn intent(&self, body: AuditBody) -> Result<(), ApiError> {
        if self.is_full() {
            return Err(unavailable());
        }
        let mut waits = Waits {
            of: self.enter(body.clone(), false),
            audit: self,
            body: Some(body),
        };
        if matches!(timeout(INTENT, &mut waits.of).await, Ok(Ok(()))) {
            waits.body = None;
            return Ok(());
        }
        // It may have come at the last moment; then nothing was begun, and that is written.
        Err(unavailable())
    }

    /// Writes an outcome. When that can't be waited for, it is written later.
    pub(crate) async fn outcome(&self, body: AuditBody) -> Result<(), Pending> {
        let waits = self.enter(body, true);
        timeout(OUTCOME, waits)
            .await
            .ok()
            .and_then(Result::ok)
            .ok_or(Pending)
    }

    /// Writes records of something that changes nothing, all together.
    pub(crate) async fn note(&self, bodies: Vec<AuditBody>) -> Result<(), ApiError> {
        if self.is_full() {
            return Err(unavailable());
        }
        let mut last = None;
        for body in bodies {
            last = Some(self.enter(body, true));
        }
        match last {
            Some(waits) => timeout(INTENT, waits)
                .await
                .ok()
                .and_then(Result::ok)
                .ok_or_else(unavailable),
            None => Ok(()),
        }
    }

    /// Writes a record without waiting.
    pub(crate) fn tell(&self, body: AuditBody) {
        drop(self.enter(body, true));
    }
}

/// Who waits for an intent and goes away may leave one behind that was written: then it gets its outcome.
struct Waits<'a> {
    of: oneshot::Receiver<()>,
    audit: &'a Audit,
    body: Option<AuditBody>,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let Some(body) = self.body.take() else { return };
        self.of.close();
        if self.of.try_recv().is_ok() {
            self.audit.tell(not_started(body));
        }
    }
}

fn unavailable() -> ApiError {
    ApiError::new(
        ErrorCode::StoreUnavailable,
        "the audit trail can't take a record now; nothing was done",
    )
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
    own: Own,
    writer: String,
    chain: Chain,
    /// Calls without an outcome, and the record in which each began.
    open: BTreeMap<Uuid, u64>,
    /// Calls that somebody else closes.
    lost: HashSet<Uuid>,
    since_checkpoint: usize,
    audit: Audit,
}

impl Writer {
    async fn run(mut self, mut incoming: mpsc::UnboundedReceiver<Entry>, stop: CancellationToken) {
        // What begins the stream says whose it is.
        self.write(vec![self.first()], &stop).await;
        let mut entries = Vec::with_capacity(BATCH);
        loop {
            tokio::select! {
                biased;
                _ = incoming.recv_many(&mut entries, BATCH) => {}
                // Calls still run while listeners drain; the queue's other end is held by them.
                () = stopped(&stop, &self.audit) => break,
            }
            self.audit
                .waiting
                .fetch_sub(entries.len(), Ordering::Relaxed);
            let batch = std::mem::take(&mut entries);
            if !self.write(batch, &stop).await {
                break;
            }
        }
        if let Err(error) = self.db.close_stream(self.chain.stream()).await {
            tracing::debug!(error = %error.0, "The stream was not closed; it is found by its silence.");
        }
    }

    fn first(&self) -> Entry {
        let mut body = AuditBody::new(AuditKind::Stream, "audit.stream");
        body.detail.insert("writer".to_owned(), json!(self.writer));
        body.detail
            .insert("version".to_owned(), json!(env!("CARGO_PKG_VERSION")));
        Entry {
            at: OffsetDateTime::now_utc(),
            body,
            done: oneshot::channel().0,
            lasting: true,
        }
    }

    /// Writes a batch, however long the database takes. Says whether it could before the end.
    async fn write(&mut self, mut batch: Vec<Entry>, stop: &CancellationToken) -> bool {
        // Whoever gave up waiting did nothing: that needs no record.
        batch.retain(|entry| entry.lasting || !entry.done.is_closed());
        while !batch.is_empty() {
            let links = self.chained(&mut batch);
            if links.is_empty() {
                return true;
            }
            match self.commit(&links, stop).await {
                Some(Added::Written) => {
                    batch = self.written(batch, &links);
                }
                Some(Added::Doubled) if self.drop_closed(&mut batch).await => {}
                Some(added @ (Added::Closed | Added::Doubled)) => {
                    // Doubled, and no call of ours: somebody put records where ours belong. `verify` says which.
                    if added == Added::Doubled {
                        tracing::error!(
                            "Records that are not ours stand in the audit trail: 'cynode audit verify' says which."
                        );
                        tokio::time::sleep(FIRST_PAUSE).await;
                        drop(self.db.skip_foreign_records().await);
                    }
                    if !self.reopen(stop).await {
                        return false;
                    }
                    batch.insert(0, self.first());
                }
                // One of them is to blame: each by itself.
                Some(Added::Refused) if batch.len() > 1 => {
                    for entry in batch {
                        if !Box::pin(self.write(vec![entry], stop)).await {
                            return false;
                        }
                    }
                    return true;
                }
                Some(Added::Refused) => {
                    for entry in &mut batch {
                        entry.body.detail =
                            serde_json::Map::from_iter([("unwritable".to_owned(), json!(true))]);
                    }
                    tokio::time::sleep(LONGEST_PAUSE).await;
                }
                None => return false,
            }
        }
        true
    }

    /// The records of a batch, without those on calls that are no longer ours. The chain stays where it was.
    fn chained(&mut self, batch: &mut Vec<Entry>) -> Vec<Link> {
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

    /// Where the oldest call that stays open after these records begins.
    fn open_from(&self, links: &[Link]) -> u64 {
        let mut open = self.open.clone();
        note(&mut open, links);
        open.values()
            .min()
            .copied()
            .unwrap_or_else(|| links.last().map_or(1, |link| link.seq + 1))
    }

    async fn commit(&mut self, links: &[Link], stop: &CancellationToken) -> Option<Added> {
        let open_from = self.open_from(links);
        let mut pause = FIRST_PAUSE;
        let started = std::time::Instant::now();
        loop {
            let stream = self.chain.stream();
            match self
                .own
                .with(STATEMENT, async |connection| {
                    Db::append_audit(connection, stream, open_from, links).await
                })
                .await
            {
                Ok(added) => {
                    metrics::histogram!("cynode_audit_commit_seconds")
                        .record(started.elapsed().as_secs_f64());
                    metrics::histogram!("cynode_audit_batch_records")
                        .record(f64::from(u32::try_from(links.len()).unwrap_or(u32::MAX)));
                    return Some(added);
                }
                Err(error) if error.0.is(ErrorCode::AlreadyExists) => return Some(Added::Doubled),
                Err(error) if !error.0.is(ErrorCode::StoreUnavailable) => {
                    tracing::error!(error = %error.0, "Records of the audit trail are refused by the database; it is tried again.");
                    return Some(Added::Refused);
                }
                Err(_) => {}
            }
            metrics::gauge!("cynode_audit_lag_seconds").set(started.elapsed().as_secs_f64());
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // The process ends: what is not written is closed by another one.
                () = super::given_up(stop) => return None,
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Tells who waits. Intents that nobody waits for any more get their outcome.
    fn written(&mut self, batch: Vec<Entry>, links: &[Link]) -> Vec<Entry> {
        metrics::gauge!("cynode_audit_lag_seconds").set(0.0);
        note(&mut self.open, links);
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
            let intent = (entry.body.kind == AuditKind::Intent && !entry.lasting)
                .then(|| entry.body.clone());
            if entry.done.send(()).is_err()
                && let Some(intent) = intent
            {
                late.push(Entry {
                    at: OffsetDateTime::now_utc(),
                    body: not_started(intent),
                    done: oneshot::channel().0,
                    lasting: true,
                });
            }
        }
        late
    }

    /// Takes outcomes of calls that somebody else closed out of a batch. Says whether it is worth trying again.
    async fn drop_closed(&mut self, batch: &mut Vec<Entry>) -> bool {
        let calls: Vec<Uuid> = batch
            .iter()
            .filter(|entry| entry.body.kind == AuditKind::Outcome)
            .filter_map(|entry| entry.body.call_id)
            .collect();
        let Ok(closed) = self.db.closed_calls(&calls).await else {
            tokio::time::sleep(FIRST_PAUSE).await;
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

    /// Somebody took this writer for dead: it begins anew, and leaves what it began to them.
    async fn reopen(&mut self, stop: &CancellationToken) -> bool {
        tracing::warn!(stream = %self.chain.stream(), "This writer of the audit trail was taken for dead; it goes on in a new stream.");
        self.lost.extend(std::mem::take(&mut self.open).into_keys());
        let stream = Uuid::now_v7();
        while self.db.open_stream(stream, &self.writer).await.is_err() {
            tokio::select! {
                () = tokio::time::sleep(LONGEST_PAUSE) => {}
                () = super::given_up(stop) => return false,
            }
        }
        self.chain = Chain::new(stream);
        *self.audit.stream.lock() = stream;
        true
    }
}

/// Notes what records open and close.
fn note(open: &mut BTreeMap<Uuid, u64>, links: &[Link]) {
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

/// Comes when the orchestrator has stopped and nothing waits.
async fn stopped(stop: &CancellationToken, audit: &Audit) {
    stop.cancelled().await;
    while audit.waiting() > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
