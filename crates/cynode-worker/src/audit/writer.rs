//! The writer: one thread that appends what is queued and flushes it to the disk once for all.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use cynode_api::AuditResult;
use serde_json::json;
use time::OffsetDateTime;
use tokio::sync::oneshot;

use super::{MAX_LOCAL_BYTES, RecordError, Shared, ledger::NewRecord};

/// Records per flush.
const BATCH: usize = 500;
/// How often counts whose interval is over are looked for.
const TICK: Duration = Duration::from_millis(500);

#[expect(clippy::large_enum_variant, reason = "nearly all commands are records")]
pub(super) enum Command {
    Record(Entry),
    /// Writes all counts.
    Flush(oneshot::Sender<()>),
    Stop,
}

/// A record, and the channel that reports when it is durable.
pub(super) struct Entry {
    pub(super) at: OffsetDateTime,
    pub(super) record: NewRecord,
    pub(super) done: Option<oneshot::Sender<Result<(), RecordError>>>,
    /// An effect follows the record.
    pub(super) permits_effect: bool,
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    /// Failures are logged once until a write succeeds.
    is_failing: bool,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            is_failing: false,
        }
    }

    pub(super) fn run(mut self, incoming: &Receiver<Command>) {
        let mut next_tick = Instant::now() + TICK;
        loop {
            let wait = next_tick.saturating_duration_since(Instant::now());
            let mut next = match incoming.recv_timeout(wait) {
                Ok(command) => Some(command),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(Command::Stop),
            };
            let (mut entries, mut flushed, mut stops) = (Vec::new(), Vec::new(), false);
            while let Some(command) = next {
                match command {
                    Command::Record(entry) => entries.push(entry),
                    Command::Flush(done) => flushed.push(done),
                    Command::Stop => stops = true,
                }
                if stops || entries.len() >= BATCH {
                    break;
                }
                next = incoming.try_recv().ok();
            }
            self.write(entries);
            if Instant::now() >= next_tick || !flushed.is_empty() || stops {
                next_tick = Instant::now() + TICK;
                self.write_counts(!flushed.is_empty() || stops);
                self.report();
            }
            for done in flushed {
                done.send(()).ok();
            }
            if stops {
                return;
            }
        }
    }

    /// Writes records, and completes those who wait for them.
    fn write(&mut self, mut entries: Vec<Entry>) {
        // Who gave up has done nothing.
        entries.retain(|entry| {
            let is_wanted = entry.done.as_ref().is_none_or(|done| !done.is_closed());
            if !is_wanted {
                let mut ledger = self.shared.ledger.lock();
                ledger.not_written(&entry.record, entry.at, Instant::now());
            }
            is_wanted
        });
        if entries.is_empty() {
            return;
        }
        let records = entries
            .iter()
            .map(|entry| (entry.at, entry.record.body.clone()))
            .collect();
        let appended = self.shared.store.lock().append(records);
        match appended {
            Ok(()) => {
                self.is_failing = false;
                self.shared.stored.notify_one();
                let late = entries.into_iter().filter_map(completed).collect();
                self.write_late(late);
                self.evict();
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::error!(%error, "The node can't record its decisions; it refuses what needs a record.");
                }
                let mut ledger = self.shared.ledger.lock();
                for entry in entries {
                    ledger.not_written(&entry.record, entry.at, Instant::now());
                    if let Some(done) = entry.done {
                        done.send(Err(RecordError::Unavailable)).ok();
                    }
                }
            }
        }
    }

    /// Outcomes of effects whose caller gave up before it learned of the record.
    fn write_late(&self, late: Vec<NewRecord>) {
        if late.is_empty() {
            return;
        }
        let now = OffsetDateTime::now_utc();
        let released: Vec<_> = late
            .iter()
            .map(|record| (Some(record.owner), record.cost))
            .collect();
        let records = late.into_iter().map(|record| (now, record.body)).collect();
        let mut store = self.shared.store.lock();
        if let Err(error) = store.append(records) {
            tracing::warn!(%error, "An abandoned decision has no outcome in the node's audit trail.");
        } else {
            self.shared.ledger.lock().replace([], released.into_iter());
        }
    }

    fn write_counts(&mut self, all: bool) {
        let due = self.shared.ledger.lock().due(Instant::now(), all);
        let at = OffsetDateTime::now_utc();
        let entries = due.into_iter().map(|record| Entry {
            at,
            record,
            done: None,
            permits_effect: false,
        });
        self.write(entries.collect());
    }

    fn evict(&self) {
        if self.shared.is_shipped {
            return;
        }
        let mut store = self.shared.store.lock();
        if self.shared.ledger.lock().total() <= MAX_LOCAL_BYTES {
            return;
        }
        let before: Vec<_> = store.pending().collect();
        match store.evict(MAX_LOCAL_BYTES) {
            Ok(()) => self.shared.ledger.lock().replace(before, store.pending()),
            Err(error) => {
                tracing::warn!(%error, "Old records of the node's audit trail were not removed.");
            }
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "these are sizes and times")]
    fn report(&self) {
        let backlog = self.shared.store.lock().backlog();
        *self.shared.backlog.lock() = backlog;
        let lag = backlog
            .oldest
            .filter(|_| self.shared.is_shipped)
            .map_or(0.0, |oldest| {
                (OffsetDateTime::now_utc() - oldest).as_seconds_f64()
            });
        metrics::gauge!("cynode_node_audit_backlog_records").set(backlog.records as f64);
        metrics::gauge!("cynode_node_audit_backlog_bytes").set(backlog.bytes as f64);
        metrics::gauge!("cynode_node_audit_lag_seconds").set(lag.max(0.0));
    }
}

/// Completes who waits for a record. If nobody does any more, its effect does not follow: returns
/// the record that says so.
fn completed(entry: Entry) -> Option<NewRecord> {
    let is_lost = entry.done?.send(Ok(())).is_err();
    if !is_lost || !entry.permits_effect {
        return None;
    }
    let mut record = entry.record;
    record.body["result"] = json!(AuditResult::NotStarted);
    Some(record)
}
