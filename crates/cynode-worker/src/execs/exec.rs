//! One exec as the worker knows it: its output, its readers, its end.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use cynode_api::{
    Bytes, ErrorCode, Exec as ExecObject, ExecExit, ExecId, ExecResult, ExecState, StreamHashes,
};
use cynode_service::ApiError;
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    answer::Answer,
    collect::{Collector, Overflow},
    hashes::Hashes,
    record::{Ended, ExecRecord},
    spool::{Piece, Spool, SpoolReader},
};

/// What a page of output may have as JSON, whatever was asked for; it may go over this by one piece.
const MAX_PAGE_BYTES: u64 = 4 * 1024 * 1024;
/// Pieces in one page at most, however small they are.
const MAX_PAGE_PIECES: usize = 4_096;

/// An exec's bookkeeping without its command.
const RECORD_BYTES: usize = 1_024;

/// A piece of standard input; `None` is its end. The answer says whether it was taken.
pub(super) type Stdin = (Option<Vec<u8>>, oneshot::Sender<bool>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) spool: Spool,
    pub(super) collector: Option<Collector>,
    /// Of the output so far; gone when it ended.
    pub(super) hashes: Option<Box<Hashes>>,
    pub(super) ended: Option<Ended>,
    /// The start failed with this.
    pub(super) failed: Option<ApiError>,
    started: bool,
    pub(super) expired: bool,
    /// The next piece that each attached reader needs.
    pub(super) readers: HashMap<u64, u64>,
}

impl Inner {
    /// Shows a piece that is kept to those who want all of it.
    fn pass(&mut self, piece: &Piece) {
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
    /// Counts changes: output, end, a reader's progress.
    changed: watch::Sender<u64>,
    pub(super) stdin: Mutex<Option<mpsc::Sender<Stdin>>>,
    watchers: AtomicUsize,
    reader_ids: AtomicU64,
    overflow: Arc<Overflow>,
}

impl Exec {
    pub(super) fn new(
        record: ExecRecord,
        spool: Spool,
        collector: Option<Collector>,
        hashes: Option<Box<Hashes>>,
        overflow: Arc<Overflow>,
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
            overflow,
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

    pub(crate) fn object(&self) -> ExecObject {
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

    /// Waits until it has started, or returns why it did not.
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

    /// Waits for the end and gives the whole answer.
    pub(crate) async fn result(&self) -> Result<ExecResult, ApiError> {
        self.answer().await?.into_result()
    }

    /// Waits for the end. The answer may be long, and is not taken into memory for that.
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
                        None => collect(&inner.spool, self.record.max_output_bytes, &self.overflow)
                            .finish(),
                    };
                    // What was dropped before it was collected is missing too.
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

    /// Whether the command is known to have been started.
    pub(crate) fn is_started(&self) -> bool {
        self.inner.lock().started
    }

    /// Takes in a piece of output. False when it was there already.
    pub(super) fn keep(&self, piece: &Piece) -> io::Result<bool> {
        let mut inner = self.inner.lock();
        if piece.seq <= inner.spool.last_seq() {
            return Ok(false);
        }
        inner.spool.append(piece)?;
        inner.pass(piece);
        drop(inner);
        self.announce();
        Ok(true)
    }

    /// Takes in what an earlier worker kept. What it had dropped is missing: then the hash of the whole is not known.
    pub(super) fn read_again(&self) {
        let mut inner = self.inner.lock();
        inner.collector = (!self.record.background)
            .then(|| Collector::new(self.record.max_output_bytes, &self.overflow));
        inner.hashes = (inner.spool.first_seq() == 1).then(Box::default);
        let mut reader = inner.spool.read_after(0);
        while inner.collector.is_some() || inner.hashes.is_some() {
            match reader.next(&inner.spool) {
                Ok(Some(piece)) => inner.pass(&piece),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, exec_id = %self.id(), "Kept output can't be read.");
                    inner.hashes = None;
                    return;
                }
            }
        }
    }

    /// Hashes of the whole streams, if it was these many bytes that passed here.
    pub(super) fn sha256(&self, bytes: Bytes) -> Option<StreamHashes> {
        self.inner
            .lock()
            .hashes
            .as_ref()
            .and_then(|hashes| hashes.of(bytes))
    }

    /// Drops old output, waiting for attached readers that still need it: a slow reader holds up its own program.
    pub(super) async fn make_room(&self) {
        let mut changes = self.changes();
        loop {
            {
                let mut inner = self.inner.lock();
                match inner.spool.droppable() {
                    None => return,
                    Some(next) if inner.readers.values().all(|needed| *needed >= next) => {
                        inner.spool.drop_oldest()
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

    /// A page of kept output. Pieces are cut nowhere; at least one comes when there is one.
    pub(crate) fn page(&self, after_seq: u64, max_bytes: u64) -> Result<Page, ApiError> {
        let inner = self.inner.lock();
        self.check_kept(&inner)?;
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
        self.check_kept(&inner)?;
        inner
            .spool
            .before_tail(tail_bytes)
            .map_err(|error| unreadable(&error))
    }

    fn check_kept(&self, inner: &Inner) -> Result<(), ApiError> {
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

    /// A reader for a stream; while it lives, nothing that it still needs is dropped.
    pub(crate) fn attach(self: &Arc<Self>, after_seq: u64) -> Result<Reader, ApiError> {
        let mut inner = self.inner.lock();
        self.check_kept(&inner)?;
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

    /// Counts a caller who waits for this exec.
    pub(crate) fn watch(self: &Arc<Self>) -> Watching {
        self.watchers.fetch_add(1, Ordering::SeqCst);
        self.announce();
        Watching(Arc::clone(self))
    }

    pub(super) fn is_watched(&self) -> bool {
        self.watchers.load(Ordering::SeqCst) > 0
    }

    /// Nobody waits any more: an exec that has ended need not hold its answer in memory, its output being in files.
    pub(super) fn release(&self) {
        let mut inner = self.inner.lock();
        if inner.ended.is_some() && !self.is_watched() {
            inner.collector = None;
        }
    }

    /// What its record takes in memory and in the log, about.
    pub(super) fn record_bytes(&self) -> usize {
        RECORD_BYTES
            + self.record.cwd.len()
            + self
                .record
                .argv
                .iter()
                .map(|argument| argument.len() + 32)
                .sum::<usize>()
    }

    /// Passes standard input on; false when the command takes no more.
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

/// How long output is as JSON: control characters take six letters each.
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
    ApiError::new(ErrorCode::Internal, format!("reading kept output: {error}"))
}

pub(super) fn collect(spool: &Spool, limit: u64, overflow: &Arc<Overflow>) -> Collector {
    let mut collector = Collector::new(limit, overflow);
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

/// Somebody waits for the exec. A foreground exec that nobody waits for is ended after a while.
#[derive(Debug)]
pub(crate) struct Watching(Arc<Exec>);

impl Drop for Watching {
    fn drop(&mut self) {
        if self.0.watchers.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.release();
        }
        self.0.announce();
    }
}

/// A stream's place in the output.
#[derive(Debug)]
pub(crate) struct Reader {
    watching: Watching,
    reader: SpoolReader,
    id: u64,
    pub(crate) lost_before_seq: Option<u64>,
}

/// What a reader finds next.
#[derive(Debug)]
pub(crate) enum Next {
    Piece(Piece),
    Exit(ExecExit, OffsetDateTime),
    Nothing,
}

impl Reader {
    pub(crate) fn exec(&self) -> &Arc<Exec> {
        &self.watching.0
    }

    /// The last piece that was given out.
    pub(crate) fn last_seq(&self) -> u64 {
        self.reader.next_seq() - 1
    }

    pub(crate) fn next(&mut self) -> Result<Next, ApiError> {
        let exec = Arc::clone(self.exec());
        let mut inner = exec.inner.lock();
        exec.check_kept(&inner)?;
        let found = self
            .reader
            .next(&inner.spool)
            .map_err(|error| unreadable(&error))?;
        inner.readers.insert(self.id, self.reader.next_seq());
        match found {
            Some(piece) => {
                let writer_waits = inner.spool.droppable().is_some();
                drop(inner);
                if writer_waits {
                    exec.announce();
                }
                Ok(Next::Piece(piece))
            }
            None => Ok(inner.ended.as_ref().map_or(Next::Nothing, |ended| {
                Next::Exit(ended.exit.clone(), ended.ended_at)
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

/// The exit of an exec whose end nobody saw.
pub(super) fn lost_exit(exec: &Exec) -> ExecExit {
    let elapsed = OffsetDateTime::now_utc() - exec.record.started_at;
    ExecExit {
        exit_code: None,
        signal: None,
        timed_out: false,
        oom_killed: false,
        bytes: Bytes::default(),
        sha256: None,
        duration_ms: u64::try_from(elapsed.whole_milliseconds()).unwrap_or(0),
        via: cynode_api::ExecVia::Agent,
        lost: true,
        no_space: false,
    }
}
