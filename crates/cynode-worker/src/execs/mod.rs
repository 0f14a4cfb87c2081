//! The commands of a session: what runs, what ran, and the output that is kept of each.
//!
//! What must stay true: an exec is in the session's log before it is started, and its exit is in the log before the agent
//! is told that we have it. So after a crash every exec is found again, running or ended, and none is counted twice.

mod agent;
mod collect;
mod runtime;
mod spool;

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use cynode_api::{
    ErrorCode, Exec as ExecObject, ExecExit, ExecId, ExecRequest, ExecResult, ExecState, encode_streams,
    exec_limits::{DEFAULT_OUTPUT_BYTES, KEPT_PER_SESSION, MAX_RUNNING},
};
use cynode_service::ApiError;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use tokio::sync::{mpsc, oneshot, watch};

use collect::Collector;
pub(crate) use spool::Piece;
use spool::{Spool, SpoolReader};

pub(crate) use agent::{Command, adopt as adopt_by_agent, start as start_by_agent};
pub(crate) use runtime::{Leftovers, kill_everything as kill_everything_by_runtime, signal as signal_by_runtime, start as start_by_runtime};

/// Finished execs that a session remembers.
const MAX_FINISHED: usize = 2_000;
/// An exec that kept more than this, and every so many-th, has the limits looked at.
const TRIM_BYTES: u64 = 256 * 1024;
const TRIM_EVERY: u64 = 64;
/// The log is written anew when it has grown by this.
const COMPACT_AFTER: u64 = 8 * 1024 * 1024;

/// An exec as the log has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ExecRecord {
    pub(crate) exec_id: ExecId,
    pub(crate) argv: Vec<String>,
    pub(crate) cwd: String,
    pub(crate) background: bool,
    pub(crate) timeout_ms: u64,
    pub(crate) max_output_bytes: u64,
    /// Of the request, so that a repetition can be told from another request.
    pub(crate) fingerprint: String,
    #[serde(with = "time::serde::rfc3339")]
    pub(crate) started_at: OffsetDateTime,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Ended {
    exec_id: ExecId,
    exit: ExecExit,
    #[serde(with = "time::serde::rfc3339")]
    ended_at: OffsetDateTime,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LogLine {
    Start(ExecRecord),
    End(Ended),
    /// It never ran: the start failed.
    Void(ExecId),
}

/// A piece of standard input; `None` is its end. The answer says whether it was taken.
pub(crate) type Stdin = (Option<Vec<u8>>, oneshot::Sender<bool>);

#[derive(Debug)]
struct Inner {
    spool: Spool,
    collector: Option<Collector>,
    ended: Option<Ended>,
    /// The start failed with this.
    failed: Option<ApiError>,
    started: bool,
    expired: bool,
    /// The next piece that each attached reader needs.
    readers: HashMap<u64, u64>,
}

#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) record: ExecRecord,
    inner: Mutex<Inner>,
    /// Counts changes: output, end, a reader's progress.
    changed: watch::Sender<u64>,
    stdin: Mutex<Option<mpsc::Sender<Stdin>>>,
    watchers: AtomicUsize,
    reader_ids: AtomicU64,
}

impl Exec {
    fn new(record: ExecRecord, spool: Spool, collector: Option<Collector>) -> Self {
        Self {
            record,
            inner: Mutex::new(Inner { spool, collector, ended: None, failed: None, started: false, expired: false, readers: HashMap::new() }),
            changed: watch::Sender::new(0),
            stdin: Mutex::new(None),
            watchers: AtomicUsize::new(0),
            reader_ids: AtomicU64::new(0),
        }
    }

    pub(crate) fn id(&self) -> ExecId {
        self.record.exec_id
    }

    fn announce(&self) {
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
            changes.changed().await.map_err(|_| ApiError::new(ErrorCode::Internal, "the exec was dropped"))?;
        }
    }

    /// Waits for the end and gives the whole answer.
    pub(crate) async fn result(&self) -> Result<ExecResult, ApiError> {
        let mut changes = self.changes();
        loop {
            {
                let inner = self.inner.lock();
                if let Some(error) = &inner.failed {
                    return Err(error.clone());
                }
                if let Some(ended) = &inner.ended {
                    let (stdout, stderr, truncated) = match &inner.collector {
                        Some(collector) => collector.finish(),
                        None => collect(&inner.spool, self.record.max_output_bytes).finish(),
                    };
                    let (stdout, stderr, encoding) = encode_streams(stdout, stderr);
                    return Ok(ExecResult { exec_id: self.id(), exit: ended.exit.clone(), stdout, stderr, encoding: encoding.to_owned(), truncated });
                }
            }
            changes.changed().await.map_err(|_| ApiError::new(ErrorCode::Internal, "the exec was dropped"))?;
        }
    }

    /// Takes in a piece of output. False when it was there already.
    fn keep(&self, piece: &Piece) -> io::Result<bool> {
        let mut inner = self.inner.lock();
        if piece.seq <= inner.spool.last_seq() {
            return Ok(false);
        }
        inner.spool.append(piece)?;
        if let Some(collector) = &mut inner.collector {
            collector.push(piece.stream, &piece.data);
        }
        drop(inner);
        self.announce();
        Ok(true)
    }

    /// Drops old output, waiting for attached readers that still need it: a slow reader holds up its own program.
    async fn make_room(&self) {
        let mut changes = self.changes();
        loop {
            {
                let mut inner = self.inner.lock();
                match inner.spool.droppable() {
                    None => return,
                    Some(next) if inner.readers.values().all(|needed| *needed >= next) => inner.spool.drop_oldest(),
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

    fn last_seq(&self) -> u64 {
        self.inner.lock().spool.last_seq()
    }

    fn set_started(&self) {
        self.inner.lock().started = true;
        self.announce();
    }

    /// A page of kept output. Pieces are cut nowhere; at least one comes when there is one.
    pub(crate) fn page(&self, after_seq: u64, max_bytes: u64) -> Result<Page, ApiError> {
        let inner = self.inner.lock();
        self.check_kept(&inner)?;
        let mut reader = inner.spool.read_after(after_seq);
        let lost_before_seq = (after_seq + 1 < inner.spool.first_seq()).then(|| inner.spool.first_seq());
        let mut pieces = Vec::new();
        let mut bytes = 0;
        while bytes < max_bytes {
            match reader.next(&inner.spool).map_err(|error| unreadable(&error))? {
                Some(piece) => {
                    bytes += piece.data.len() as u64;
                    pieces.push(piece);
                }
                None => break,
            }
        }
        let next_seq = pieces.last().map_or_else(|| after_seq.min(inner.spool.last_seq()).max(lost_before_seq.map_or(0, |seq| seq - 1)), |piece| piece.seq);
        let exit = inner.ended.as_ref().filter(|_| next_seq >= inner.spool.last_seq()).map(|ended| ended.exit.clone());
        Ok(Page { pieces, next_seq, lost_before_seq, exit })
    }

    /// The sequence number before the newest pieces that hold at least `tail_bytes`.
    pub(crate) fn before_tail(&self, tail_bytes: u64) -> Result<u64, ApiError> {
        let inner = self.inner.lock();
        self.check_kept(&inner)?;
        let mut reader = inner.spool.read_after(0);
        let mut sizes = std::collections::VecDeque::new();
        let mut bytes = 0;
        while let Some(piece) = reader.next(&inner.spool).map_err(|error| unreadable(&error))? {
            sizes.push_back((piece.seq, piece.data.len() as u64));
            bytes += piece.data.len() as u64;
            while sizes.front().is_some_and(|(_, size)| bytes - size >= tail_bytes) {
                bytes -= sizes.pop_front().map_or(0, |(_, size)| size);
            }
        }
        Ok(sizes.front().map_or(inner.spool.last_seq(), |(seq, _)| seq - 1))
    }

    fn check_kept(&self, inner: &Inner) -> Result<(), ApiError> {
        if inner.expired {
            Err(ApiError::new(ErrorCode::OutputExpired, format!("the output of exec {} was dropped to make room for newer output", self.id())))
        } else {
            Ok(())
        }
    }

    /// A reader for a stream; while it lives, nothing that it still needs is dropped.
    pub(crate) fn attach(self: &Arc<Self>, after_seq: u64) -> Result<Reader, ApiError> {
        let mut inner = self.inner.lock();
        self.check_kept(&inner)?;
        let lost_before_seq = (after_seq + 1 < inner.spool.first_seq()).then(|| inner.spool.first_seq());
        let reader = inner.spool.read_after(after_seq);
        let id = self.reader_ids.fetch_add(1, Ordering::Relaxed);
        inner.readers.insert(id, reader.next_seq());
        drop(inner);
        Ok(Reader { watching: self.watch(), reader, id, lost_before_seq })
    }

    /// Counts a caller who waits for this exec.
    pub(crate) fn watch(self: &Arc<Self>) -> Watching {
        self.watchers.fetch_add(1, Ordering::SeqCst);
        Watching(Arc::clone(self))
    }

    fn is_watched(&self) -> bool {
        self.watchers.load(Ordering::SeqCst) > 0
    }

    /// Passes standard input on; false when the command takes no more.
    pub(crate) async fn write_stdin(&self, data: Option<Vec<u8>>) -> bool {
        let Some(sender) = self.stdin.lock().clone() else { return false };
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

fn unreadable(error: &io::Error) -> ApiError {
    ApiError::new(ErrorCode::Internal, format!("reading kept output: {error}"))
}

fn collect(spool: &Spool, limit: u64) -> Collector {
    let mut collector = Collector::new(usize::try_from(limit).unwrap_or(usize::MAX));
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
        self.0.watchers.fetch_sub(1, Ordering::SeqCst);
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
        let found = self.reader.next(&inner.spool).map_err(|error| unreadable(&error))?;
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
            None => Ok(inner.ended.as_ref().map_or(Next::Nothing, |ended| Next::Exit(ended.exit.clone(), ended.ended_at))),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.exec().inner.lock().readers.remove(&self.id);
        self.exec().announce();
    }
}

/// All execs of one session.
#[derive(Debug)]
pub(crate) struct SessionExecs {
    directory: PathBuf,
    log: Mutex<Log>,
    known: Mutex<BTreeMap<ExecId, Arc<Exec>>>,
    running: AtomicUsize,
    finished: AtomicU64,
}

#[derive(Debug)]
struct Log {
    file: fs_err::File,
    appended: u64,
}

/// What `begin` found.
pub(crate) enum Begun {
    New(Arc<Exec>),
    Existing(Arc<Exec>),
}

impl SessionExecs {
    /// Opens a session's records, as an earlier worker left them.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        let directory = directory.join("execs");
        fs_err::create_dir_all(&directory)?;
        let path = directory.join("log");
        let mut known = BTreeMap::new();
        if let Ok(text) = fs_err::read(&path) {
            // The last line may be cut off by a crash; it says nothing then.
            for line in text.split(|byte| *byte == b'\n') {
                match serde_json::from_slice(line) {
                    Ok(LogLine::Start(record)) => {
                        let spool = Spool::recover(directory.clone(), record.exec_id)?;
                        let collector = (!record.background).then(|| collect(&spool, record.max_output_bytes));
                        known.insert(record.exec_id, Arc::new(Exec::new(record, spool, collector)));
                    }
                    Ok(LogLine::End(ended)) => {
                        if let Some(exec) = known.get(&ended.exec_id) {
                            let mut inner = exec.inner.lock();
                            inner.expired = ended.exit.bytes.stdout + ended.exit.bytes.stderr > 0 && inner.spool.last_seq() == 0;
                            inner.ended = Some(ended);
                            inner.collector = None;
                        }
                    }
                    Ok(LogLine::Void(exec_id)) => {
                        known.remove(&exec_id);
                    }
                    Err(_) => {}
                }
            }
        }
        let file = fs_err::OpenOptions::new().create(true).append(true).open(&path)?;
        let running = AtomicUsize::new(known.values().filter(|exec| exec.is_running()).count());
        let execs = Self { directory, log: Mutex::new(Log { file, appended: 0 }), known: Mutex::new(known), running, finished: AtomicU64::new(0) };
        execs.compact()?;
        Ok(execs)
    }

    /// Registers a request. The same id with the same request is the same exec.
    pub(crate) fn begin(&self, request: &ExecRequest, cwd: String) -> Result<Begun, ApiError> {
        let fingerprint = fingerprint(request);
        let exec_id = request.exec_id.unwrap_or_else(ExecId::generate);
        let mut known = self.known.lock();
        if let Some(exec) = known.get(&exec_id) {
            return if exec.record.fingerprint == fingerprint {
                Ok(Begun::Existing(Arc::clone(exec)))
            } else {
                Err(ApiError::new(ErrorCode::ExecIdInUse, format!("exec {exec_id} was made by another request")))
            };
        }
        if self.running.load(Ordering::Relaxed) >= MAX_RUNNING {
            return Err(ApiError::new(ErrorCode::PidsExhausted, format!("{MAX_RUNNING} execs run in this session already")));
        }
        let max_output_bytes = request.max_output_bytes.unwrap_or(DEFAULT_OUTPUT_BYTES);
        let record = ExecRecord {
            exec_id,
            argv: request.argv.clone(),
            cwd,
            background: request.background,
            timeout_ms: request.timeout_ms,
            max_output_bytes,
            fingerprint,
            started_at: OffsetDateTime::now_utc(),
        };
        self.append(&LogLine::Start(record.clone())).map_err(|error| ApiError::new(ErrorCode::Internal, format!("recording the exec: {error}")))?;
        let collector = (!record.background).then(|| Collector::new(usize::try_from(max_output_bytes).unwrap_or(usize::MAX)));
        let exec = Arc::new(Exec::new(record, Spool::new(self.directory.clone(), exec_id), collector));
        known.insert(exec_id, Arc::clone(&exec));
        self.running.fetch_add(1, Ordering::Relaxed);
        Ok(Begun::New(exec))
    }

    /// The start failed: nothing ran, so nothing is remembered.
    pub(crate) fn void(&self, exec: &Exec, error: ApiError) {
        if let Err(error) = self.append(&LogLine::Void(exec.id())) {
            tracing::warn!(%error, "Recording a failed start failed.");
        }
        if self.known.lock().remove(&exec.id()).is_some() {
            self.running.fetch_sub(1, Ordering::Relaxed);
        }
        let mut inner = exec.inner.lock();
        inner.failed = Some(error);
        inner.spool.clear();
        drop(inner);
        exec.announce();
    }

    /// The exec has ended: recorded first, then told.
    pub(crate) fn finish(&self, exec: &Exec, exit: ExecExit) {
        let ended = Ended { exec_id: exec.id(), exit, ended_at: OffsetDateTime::now_utc() };
        if let Err(error) = self.append(&LogLine::End(ended.clone())) {
            tracing::error!(%error, exec_id = %exec.id(), "Recording an exec's end failed.");
        }
        exec.stdin.lock().take();
        let bytes = {
            let mut inner = exec.inner.lock();
            if inner.ended.replace(ended).is_none() {
                self.running.fetch_sub(1, Ordering::Relaxed);
            }
            inner.spool.bytes()
        };
        exec.announce();
        // Looking at every exec of a long session at each end would make each the slower; small ones are looked at now and then.
        if bytes > TRIM_BYTES || self.finished.fetch_add(1, Ordering::Relaxed).is_multiple_of(TRIM_EVERY) {
            self.trim();
        }
    }

    fn append(&self, line: &LogLine) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(line)?;
        bytes.push(b'\n');
        let mut log = self.log.lock();
        log.file.write_all(&bytes)?;
        log.appended += bytes.len() as u64;
        Ok(())
    }

    /// Keeps to the limits: the oldest finished execs lose their output, then their record.
    fn trim(&self) {
        let mut known = self.known.lock();
        let mut finished: Vec<Arc<Exec>> = known.values().filter(|exec| !exec.is_running()).cloned().collect();
        finished.sort_by_key(|exec| exec.ended_at());
        let mut kept: u64 = known.values().map(|exec| exec.inner.lock().spool.bytes()).sum();
        for exec in &finished {
            if kept <= KEPT_PER_SESSION {
                break;
            }
            let mut inner = exec.inner.lock();
            let bytes = inner.spool.bytes();
            if bytes > 0 && inner.readers.is_empty() {
                inner.spool.clear();
                inner.expired = true;
                kept -= bytes;
            }
        }
        for exec in finished.iter().take(finished.len().saturating_sub(MAX_FINISHED)) {
            exec.inner.lock().spool.clear();
            known.remove(&exec.id());
        }
        drop(known);
        if self.log.lock().appended > COMPACT_AFTER
            && let Err(error) = self.compact()
        {
            tracing::warn!(%error, "Rewriting an exec log failed.");
        }
    }

    /// Writes the log anew with what is known now.
    fn compact(&self) -> io::Result<()> {
        let known = self.known.lock();
        let mut bytes = Vec::new();
        for exec in known.values() {
            serde_json::to_writer(&mut bytes, &LogLine::Start(exec.record.clone()))?;
            bytes.push(b'\n');
            if let Some(ended) = &exec.inner.lock().ended {
                serde_json::to_writer(&mut bytes, &LogLine::End(ended.clone()))?;
                bytes.push(b'\n');
            }
        }
        let mut log = self.log.lock();
        let path = self.directory.join("log");
        let staged = self.directory.join("log.new");
        fs_err::write(&staged, &bytes)?;
        fs_err::rename(&staged, &path)?;
        log.file = fs_err::OpenOptions::new().append(true).open(&path)?;
        log.appended = 0;
        Ok(())
    }

    pub(crate) fn get(&self, id: ExecId) -> Result<Arc<Exec>, ApiError> {
        self.known.lock().get(&id).cloned().ok_or_else(|| ApiError::new(ErrorCode::ExecNotFound, format!("no exec {id} in this session")))
    }

    /// By their ids, which are ordered by time when we made them.
    pub(crate) fn list(&self) -> Vec<Arc<Exec>> {
        let mut all: Vec<_> = self.known.lock().values().cloned().collect();
        all.sort_by_key(|exec| (exec.record.started_at, exec.id()));
        all
    }

    pub(crate) fn running(&self) -> Vec<Arc<Exec>> {
        self.known.lock().values().filter(|exec| exec.is_running()).cloned().collect()
    }

    pub(crate) fn running_count(&self) -> u32 {
        u32::try_from(self.running.load(Ordering::Relaxed)).unwrap_or(u32::MAX)
    }

    /// Everything that runs is lost: its sandbox is gone.
    pub(crate) fn lose_all(&self) {
        for exec in self.running() {
            let exit = lost_exit(&exec);
            self.finish(&exec, exit);
        }
    }
}

/// The exit of an exec whose end nobody saw.
pub(crate) fn lost_exit(exec: &Exec) -> ExecExit {
    let elapsed = OffsetDateTime::now_utc() - exec.record.started_at;
    ExecExit {
        exit_code: None,
        signal: None,
        timed_out: false,
        oom_killed: false,
        bytes: cynode_api::Bytes::default(),
        duration_ms: u64::try_from(elapsed.whole_milliseconds()).unwrap_or(0),
        via: cynode_api::ExecVia::Agent,
        lost: true,
    }
}

fn fingerprint(request: &ExecRequest) -> String {
    let bytes = serde_json::to_vec(request).unwrap_or_default();
    hex(&Sha256::digest(&bytes))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}
