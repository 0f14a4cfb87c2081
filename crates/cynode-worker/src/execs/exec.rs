//! One exec: its record, output, readers and end.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use cynode_api::{
    ByteCounts, ErrorCode, Exec as ExecObject, ExecExit, ExecId, ExecResult, ExecState,
    StreamHashes,
};
use cynode_service::ApiError;
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    answer::Answer,
    collect::{Collector, SpillSpace},
    hashes::Hashes,
    registry::{ExecEnd, ExecRecord},
    spool::{Piece, Spool, SpoolReader},
};

/// Size of an output page as JSON, regardless of the limit in the request; the last piece may
/// exceed it.
const MAX_PAGE_BYTES: u64 = 4 * 1024 * 1024;
/// Pieces in one page, however small they are.
const MAX_PAGE_PIECES: usize = 4_096;

/// Estimated size of an exec's record without its command.
const RECORD_OVERHEAD_BYTES: usize = 1_024;

/// A piece of standard input, `None` at its end. The sender reports whether the command accepted
/// it.
pub(super) type Stdin = (Option<Vec<u8>>, oneshot::Sender<bool>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) spool: Spool,
    pub(super) collector: Option<Collector>,
    /// Running hashes of the output; dropped when the exec ends.
    pub(super) hashes: Option<Box<Hashes>>,
    pub(super) ended: Option<ExecEnd>,
    /// The error that the start failed with.
    pub(super) failed: Option<ApiError>,
    started: bool,
    pub(super) expired: bool,
    /// The next sequence number that each attached reader needs.
    pub(super) readers: HashMap<u64, u64>,
}

impl Inner {
    /// Feeds a stored piece to the collector and the hashes.
    fn feed(&mut self, piece: &Piece) {
        if let Some(collector) = &mut self.collector {
            collector.push(piece.stream, &piece.data);
        }
        if let Some(hashes) = &mut self.hashes {
            hashes.push(piece.stream, &piece.data);
        }
    }
}

#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) record: ExecRecord,
    pub(super) inner: Mutex<Inner>,
    /// Version counter: incremented on output, on the end, and when a reader advances.
    changed: watch::Sender<u64>,
    pub(super) stdin: Mutex<Option<mpsc::Sender<Stdin>>>,
    watchers: AtomicUsize,
    reader_ids: AtomicU64,
    spill_space: Arc<SpillSpace>,
}

impl Exec {
    pub(super) fn new(
        record: ExecRecord,
        spool: Spool,
        collector: Option<Collector>,
        hashes: Option<Box<Hashes>>,
        spill_space: Arc<SpillSpace>,
    ) -> Self {
        Self {
            record,
            inner: Mutex::new(Inner {
                spool,
                collector,
                hashes,
                ended: None,
                failed: None,
                started: false,
                expired: false,
                readers: HashMap::new(),
            }),
            changed: watch::Sender::new(0),
            stdin: Mutex::new(None),
            watchers: AtomicUsize::new(0),
            reader_ids: AtomicU64::new(0),
            spill_space,
        }
    }

    pub(crate) fn id(&self) -> ExecId {
        self.record.exec_id
    }

    pub(super) fn announce(&self) {
        self.changed.send_modify(|version| *version += 1);
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(crate) fn is_running(&self) -> bool {
        let inner = self.inner.lock();
        inner.ended.is_none() && inner.failed.is_none()
    }

    pub(crate) fn ended_at(&self) -> Option<OffsetDateTime> {
        self.inner.lock().ended.as_ref().map(|ended| ended.ended_at)
    }

    pub(crate) fn to_api(&self) -> ExecObject {
        let inner = self.inner.lock();
        let state = match &inner.ended {
            None => ExecState::Running,
            Some(ended) if ended.exit.lost => ExecState::Lost,
            Some(_) => ExecState::Exited,
        };
        ExecObject {
            exec_id: self.id(),
            state,
            argv: self.record.argv.clone(),
            argv_truncated: self.record.argv_truncated,
            cwd: self.record.cwd.clone(),
            background: self.record.background,
            started_at: self.record.started_at,
            ended_at: inner.ended.as_ref().map(|ended| ended.ended_at),
            exit: inner.ended.as_ref().map(|ended| ended.exit.clone()),
        }
    }

    /// Waits for the start; returns the error if it fails.
    pub(crate) async fn started(&self) -> Result<(), ApiError> {
        let mut changes = self.changes();
        loop {
            {
                let inner = self.inner.lock();
                if let Some(error) = &inner.failed {
                    return Err(error.clone());
                }
                if inner.started || inner.ended.is_some() {
                    return Ok(());
                }
            }
            changes
                .changed()
                .await
                .map_err(|_| ApiError::new(ErrorCode::Internal, "the exec was dropped"))?;
        }
    }

    /// How the exec ended, if it has.
    pub(crate) fn exit(&self) -> Option<ExecExit> {
        self.inner
            .lock()
            .ended
            .as_ref()
            .map(|ended| ended.exit.clone())
    }

    /// Waits for the end, or for the failure of the start.
    pub(crate) async fn ended(&self) {
        let mut changes = self.changes();
        while self.is_running() && changes.changed().await.is_ok() {}
    }

    /// The result of an exec that has ended, with the output of earlier ones before its own.
    pub(crate) fn result_after(&self, earlier: &[Arc<Self>]) -> Result<ExecResult, ApiError> {
        let mut collector = Collector::new(self.record.max_output_bytes, &self.spill_space);
        let mut bytes = ByteCounts::default();
        for exec in earlier.iter().map(AsRef::as_ref).chain([self]) {
            let inner = exec.inner.lock();
            let mut reader = inner.spool.read_after(0);
            while let Ok(Some(piece)) = reader.next(&inner.spool) {
                collector.push(piece.stream, &piece.data);
            }
            if let Some(ended) = &inner.ended {
                bytes.stdout += ended.exit.bytes.stdout;
                bytes.stderr += ended.exit.bytes.stderr;
            }
        }
        let (stdout, stderr, mut truncated) = collector.finish();
        truncated.stdout |= bytes.stdout > stdout.len();
        truncated.stderr |= bytes.stderr > stderr.len();
        let answer = Answer {
            exec_id: self.id(),
            exit: self.exit().unwrap_or_else(|| lost_exit(self)),
            stdout,
            stderr,
            truncated,
        };
        answer.into_result()
    }

    /// Waits for the end and reads the whole result into memory.
    pub(crate) async fn result(&self) -> Result<ExecResult, ApiError> {
        self.answer().await?.into_result()
    }

    /// Waits for the end. Long output stays on disk.
    pub(crate) async fn answer(&self) -> Result<Answer, ApiError> {
        let mut changes = self.changes();
        loop {
            {
                let inner = self.inner.lock();
                if let Some(error) = &inner.failed {
                    return Err(error.clone());
                }
                if let Some(ended) = &inner.ended {
                    let (stdout, stderr, mut truncated) = match &inner.collector {
                        Some(collector) => collector.finish(),
                        None => collect(
                            &inner.spool,
                            self.record.max_output_bytes,
                            &self.spill_space,
                        )
                        .finish(),
                    };
                    // Output dropped before it was collected counts as truncated.
                    truncated.stdout |= ended.exit.bytes.stdout > stdout.len();
                    truncated.stderr |= ended.exit.bytes.stderr > stderr.len();
                    return Ok(Answer {
                        exec_id: self.id(),
                        exit: ended.exit.clone(),
                        stdout,
                        stderr,
                        truncated,
                    });
                }
            }
            changes
                .changed()
                .await
                .map_err(|_| ApiError::new(ErrorCode::Internal, "the exec was dropped"))?;
        }
    }

    /// Returns true once the command is known to have started.
    pub(crate) fn is_started(&self) -> bool {
        self.inner.lock().started
    }

    /// Stores a piece of output. Returns false for a duplicate.
    pub(super) fn append_output(&self, piece: &Piece) -> io::Result<bool> {
        let mut inner = self.inner.lock();
        if piece.seq <= inner.spool.last_seq() {
            return Ok(false);
        }
        inner.spool.append(piece)?;
        inner.feed(piece);
        drop(inner);
        self.announce();
        Ok(true)
    }

    /// Collects no output for a result: the caller streams it, and collecting would write all of it
    /// a second time. A result that somebody requests later is read from the stored output.
    pub(crate) fn skip_collecting(&self) {
        self.inner.lock().collector = None;
    }

    /// Re-reads the output that an earlier worker process stored. If some was dropped, the hash of
    /// the whole can't be computed.
    pub(super) fn recover_output(&self) {
        let mut inner = self.inner.lock();
        inner.collector = (!self.record.background)
            .then(|| Collector::new(self.record.max_output_bytes, &self.spill_space));
        inner.hashes = (inner.spool.first_seq() == 1).then(Box::default);
        let mut reader = inner.spool.read_after(0);
        while inner.collector.is_some() || inner.hashes.is_some() {
            match reader.next(&inner.spool) {
                Ok(Some(piece)) => inner.feed(&piece),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, exec_id = %self.id(), "Failed to read stored output.");
                    inner.hashes = None;
                    return;
                }
            }
        }
    }

    /// Hashes of the whole streams, or `None` if the lengths don't match the bytes hashed.
    pub(super) fn sha256(&self, bytes: ByteCounts) -> Option<StreamHashes> {
        self.inner
            .lock()
            .hashes
            .as_ref()
            .and_then(|hashes| hashes.digests(bytes))
    }

    /// Drops old output, but waits for attached readers that still need it: a slow reader throttles
    /// its own command.
    pub(super) async fn make_room(&self) {
        let mut changes = self.changes();
        loop {
            {
                let mut inner = self.inner.lock();
                match inner.spool.droppable() {
                    None => return,
                    Some(next) if inner.readers.values().all(|needed| *needed >= next) => {
                        inner.spool.drop_oldest();
                    }
                    Some(_) => {}
                }
                if inner.spool.droppable().is_none() {
                    return;
                }
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    pub(super) fn last_seq(&self) -> u64 {
        self.inner.lock().spool.last_seq()
    }

    pub(super) fn set_started(&self) {
        self.inner.lock().started = true;
        self.announce();
    }

    /// Reads a page of stored output. Pieces are never split; a page has at least one if any is
    /// left.
    pub(crate) fn page(&self, after_seq: u64, max_bytes: u64) -> Result<Page, ApiError> {
        let inner = self.inner.lock();
        self.check_not_expired(&inner)?;
        let mut reader = inner.spool.read_after(after_seq);
        let lost_before_seq = (after_seq.saturating_add(1) < inner.spool.first_seq())
            .then(|| inner.spool.first_seq());
        let mut pieces = Vec::new();
        let (mut bytes, mut written) = (0, 0);
        while bytes < max_bytes && written < MAX_PAGE_BYTES && pieces.len() < MAX_PAGE_PIECES {
            match reader
                .next(&inner.spool)
                .map_err(|error| unreadable(&error))?
            {
                Some(piece) => {
                    bytes += piece.data.len() as u64;
                    written += written_bytes(&piece.data);
                    pieces.push(piece);
                }
                None => break,
            }
        }
        let next_seq = pieces.last().map_or_else(
            || {
                after_seq
                    .min(inner.spool.last_seq())
                    .max(lost_before_seq.map_or(0, |seq| seq - 1))
            },
            |piece| piece.seq,
        );
        let exit = inner
            .ended
            .as_ref()
            .filter(|_| next_seq >= inner.spool.last_seq())
            .map(|ended| ended.exit.clone());
        Ok(Page {
            pieces,
            next_seq,
            lost_before_seq,
            exit,
        })
    }

    /// The sequence number before the newest pieces that hold at least `tail_bytes`.
    pub(crate) fn before_tail(&self, tail_bytes: u64) -> Result<u64, ApiError> {
        let inner = self.inner.lock();
        self.check_not_expired(&inner)?;
        inner
            .spool
            .before_tail(tail_bytes)
            .map_err(|error| unreadable(&error))
    }

    fn check_not_expired(&self, inner: &Inner) -> Result<(), ApiError> {
        if inner.expired {
            Err(ApiError::new(
                ErrorCode::OutputExpired,
                format!(
                    "the output of exec {} was dropped to make room for newer output",
                    self.id()
                ),
            ))
        } else {
            Ok(())
        }
    }

    /// Attaches a reader. Output that it still needs is not dropped while it lives.
    pub(crate) fn attach(self: &Arc<Self>, after_seq: u64) -> Result<Reader, ApiError> {
        let mut inner = self.inner.lock();
        self.check_not_expired(&inner)?;
        let lost_before_seq = (after_seq.saturating_add(1) < inner.spool.first_seq())
            .then(|| inner.spool.first_seq());
        let reader = inner.spool.read_after(after_seq);
        let id = self.reader_ids.fetch_add(1, Ordering::Relaxed);
        inner.readers.insert(id, reader.next_seq());
        drop(inner);
        Ok(Reader {
            watching: self.watch(),
            reader,
            id,
            lost_before_seq,
        })
    }

    /// Registers a caller that waits for this exec.
    pub(crate) fn watch(self: &Arc<Self>) -> WatchGuard {
        self.watchers.fetch_add(1, Ordering::SeqCst);
        self.announce();
        WatchGuard(Arc::clone(self))
    }

    pub(super) fn is_watched(&self) -> bool {
        self.watchers.load(Ordering::SeqCst) > 0
    }

    /// Frees the collected output of an ended exec once nobody waits for it: the files still have
    /// it.
    pub(super) fn release(&self) {
        let mut inner = self.inner.lock();
        if inner.ended.is_some() && !self.is_watched() {
            inner.collector = None;
        }
    }

    /// Approximate size of the record, in memory and in the log.
    pub(super) fn record_bytes(&self) -> usize {
        RECORD_OVERHEAD_BYTES
            + self.record.cwd.len()
            + self
                .record
                .argv
                .iter()
                .map(|argument| argument.len() + 32)
                .sum::<usize>()
    }

    /// Forwards standard input; returns false if the command accepts no more.
    pub(crate) async fn write_stdin(&self, data: Option<Vec<u8>>) -> bool {
        let Some(sender) = self.stdin.lock().clone() else {
            return false;
        };
        let end = data.is_none();
        let (taken, answer) = oneshot::channel();
        if sender.send((data, taken)).await.is_err() {
            return false;
        }
        if end {
            self.stdin.lock().take();
        }
        answer.await.unwrap_or(false)
    }
}

/// Length of output as JSON: a control character takes six bytes.
fn written_bytes(data: &[u8]) -> u64 {
    data.iter()
        .map(|byte| {
            if *byte < 0x20 {
                6
            } else {
                1 + u64::from(matches!(byte, b'"' | b'\\'))
            }
        })
        .sum()
}

fn unreadable(error: &io::Error) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        format!("reading stored output: {error}"),
    )
}

pub(super) fn collect(spool: &Spool, limit: u64, spill_space: &Arc<SpillSpace>) -> Collector {
    let mut collector = Collector::new(limit, spill_space);
    let mut reader = spool.read_after(0);
    while let Ok(Some(piece)) = reader.next(spool) {
        collector.push(piece.stream, &piece.data);
    }
    collector
}

#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) next_seq: u64,
    pub(crate) lost_before_seq: Option<u64>,
    pub(crate) exit: Option<ExecExit>,
}

/// Marks a caller that waits. A foreground exec that nobody watches is killed after a while.
#[derive(Debug)]
pub(crate) struct WatchGuard(Arc<Exec>);

impl Drop for WatchGuard {
    fn drop(&mut self) {
        if self.0.watchers.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.release();
        }
        self.0.announce();
    }
}

/// A position in an exec's output.
#[derive(Debug)]
pub(crate) struct Reader {
    watching: WatchGuard,
    reader: SpoolReader,
    id: u64,
    pub(crate) lost_before_seq: Option<u64>,
}

/// The next event for a reader.
#[derive(Debug)]
pub(crate) enum ReaderEvent {
    Piece(Piece),
    Exit(ExecExit, OffsetDateTime),
    Pending,
}

impl Reader {
    pub(crate) fn exec(&self) -> &Arc<Exec> {
        &self.watching.0
    }

    /// The sequence number of the last piece returned.
    pub(crate) fn last_seq(&self) -> u64 {
        self.reader.next_seq() - 1
    }

    pub(crate) fn next(&mut self) -> Result<ReaderEvent, ApiError> {
        let exec = Arc::clone(self.exec());
        let mut inner = exec.inner.lock();
        exec.check_not_expired(&inner)?;
        let piece = self
            .reader
            .next(&inner.spool)
            .map_err(|error| unreadable(&error))?;
        inner.readers.insert(self.id, self.reader.next_seq());
        match piece {
            Some(piece) => {
                let writer_waits = inner.spool.droppable().is_some();
                drop(inner);
                if writer_waits {
                    exec.announce();
                }
                Ok(ReaderEvent::Piece(piece))
            }
            None => Ok(inner.ended.as_ref().map_or(ReaderEvent::Pending, |ended| {
                ReaderEvent::Exit(ended.exit.clone(), ended.ended_at)
            })),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.exec().inner.lock().readers.remove(&self.id);
        self.exec().announce();
    }
}

/// The exit of an exec whose end was not observed.
pub(super) fn lost_exit(exec: &Exec) -> ExecExit {
    let elapsed = OffsetDateTime::now_utc() - exec.record.started_at;
    ExecExit {
        duration_ms: u64::try_from(elapsed.whole_milliseconds()).unwrap_or(0),
        lost: true,
        ..ExecExit::never_ran(cynode_api::ExecVia::Agent)
    }
}
