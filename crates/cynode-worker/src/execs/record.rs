//! The execs of a session and the log that finds them again.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use cynode_api::{
    ErrorCode, ExecExit, ExecId, ExecRequest,
    exec_limits::{
        DEFAULT_OUTPUT_BYTES, KEPT_PER_SESSION, MAX_ARGV, MAX_RUNNING, MAX_SHOWN_ARGV_BYTES,
    },
};
use cynode_service::ApiError;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;

use super::{
    collect::{Collector, Overflow},
    exec::{Exec, lost_exit},
    hex,
    input::Rooms,
    spool::Spool,
};

/// Finished execs that a session remembers.
const MAX_FINISHED: usize = 2_000;
/// An exec that kept more than this, and every so many-th, has the limits looked at.
const TRIM_BYTES: u64 = 256 * 1024;
const TRIM_EVERY: u64 = 64;
/// What the records of finished execs may take, commands and all.
const MAX_RECORD_BYTES: usize = 8 * 1024 * 1024;
/// The log is written anew when it has grown by this.
const COMPACT_AFTER: u64 = 8 * 1024 * 1024;

/// An exec as the log has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ExecRecord {
    pub(crate) exec_id: ExecId,
    /// As much of it as is shown.
    pub(crate) argv: Vec<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) argv_truncated: bool,
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
pub(super) struct Ended {
    pub(super) exec_id: ExecId,
    pub(super) exit: ExecExit,
    #[serde(with = "time::serde::rfc3339")]
    pub(super) ended_at: OffsetDateTime,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LogLine {
    Start(ExecRecord),
    End(Ended),
    /// It never ran: the start failed.
    Void(ExecId),
}

/// All execs of one session.
#[derive(Debug)]
pub(crate) struct SessionExecs {
    directory: PathBuf,
    log: Mutex<Log>,
    known: Mutex<BTreeMap<ExecId, Arc<Exec>>>,
    running: AtomicUsize,
    finished: AtomicU64,
    /// Bytes of records since the limits were last looked at.
    recorded: AtomicUsize,
    overflow: Arc<Overflow>,
    /// What input takes that commands have not read yet.
    pub(crate) rooms: Rooms,
}

#[derive(Debug, Default)]
struct Log {
    /// Open from the first line on until the log is written anew: sessions that only are remembered hold no descriptor.
    file: Option<fs_err::File>,
    appended: u64,
    /// The last line may be half written.
    torn: bool,
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
        let overflow = Overflow::new(directory.clone(), KEPT_PER_SESSION);
        let mut known = BTreeMap::new();
        if let Ok(text) = fs_err::read(&path) {
            for line in text
                .split(|byte| *byte == b'\n')
                .filter(|line| !line.is_empty())
            {
                match serde_json::from_slice(line) {
                    Ok(LogLine::Start(record)) => {
                        let spool = Spool::recover(directory.clone(), record.exec_id)?;
                        known.insert(
                            record.exec_id,
                            Arc::new(Exec::new(record, spool, None, None, Arc::clone(&overflow))),
                        );
                    }
                    Ok(LogLine::End(ended)) => {
                        if let Some(exec) = known.get(&ended.exec_id) {
                            let mut inner = exec.inner.lock();
                            inner.expired = ended.exit.bytes.stdout + ended.exit.bytes.stderr > 0
                                && inner.spool.last_seq() == 0;
                            inner.ended = Some(ended);
                        }
                    }
                    Ok(LogLine::Void(exec_id)) => {
                        known.remove(&exec_id);
                    }
                    // The last line may be cut off by a crash: the agent was never told of it, so it says nothing.
                    Err(error) => {
                        tracing::warn!(%error, path = %path.display(), "A line of an exec log can't be read; it is passed over.")
                    }
                }
            }
        }
        let running = AtomicUsize::new(0);
        for exec in known.values().filter(|exec| exec.is_running()) {
            running.fetch_add(1, Ordering::Relaxed);
            exec.read_again();
        }
        let execs = Self {
            directory,
            log: Mutex::default(),
            known: Mutex::new(known),
            running,
            finished: AtomicU64::new(0),
            recorded: AtomicUsize::new(0),
            overflow,
            rooms: Rooms::default(),
        };
        execs.compact()?;
        Ok(execs)
    }

    /// Registers a request. The same id with the same request is the same exec. `input` is the hash of input that is no part of the
    /// request itself.
    pub(crate) fn begin(
        &self,
        request: &ExecRequest,
        cwd: String,
        input: Option<&str>,
    ) -> Result<Begun, ApiError> {
        let fingerprint = fingerprint(request, input);
        let exec_id = request.exec_id.unwrap_or_else(ExecId::generate);
        let mut known = self.known.lock();
        if let Some(exec) = known.get(&exec_id) {
            return if exec.record.fingerprint == fingerprint {
                Ok(Begun::Existing(Arc::clone(exec)))
            } else {
                Err(ApiError::new(
                    ErrorCode::ExecIdInUse,
                    format!("exec {exec_id} was made by another request"),
                ))
            };
        }
        if self.running.load(Ordering::Relaxed) >= MAX_RUNNING {
            return Err(ApiError::new(
                ErrorCode::PidsExhausted,
                format!("{MAX_RUNNING} execs run in this session already"),
            ));
        }
        let max_output_bytes = request.max_output_bytes.unwrap_or(DEFAULT_OUTPUT_BYTES);
        let (argv, argv_truncated) = shown(&request.argv);
        let record = ExecRecord {
            exec_id,
            argv,
            argv_truncated,
            cwd,
            background: request.background,
            timeout_ms: request.timeout_ms,
            max_output_bytes,
            fingerprint,
            started_at: OffsetDateTime::now_utc(),
        };
        self.append(&LogLine::Start(record.clone()))
            .map_err(|error| {
                ApiError::new(ErrorCode::Internal, format!("recording the exec: {error}"))
            })?;
        let collector =
            (!record.background).then(|| Collector::new(max_output_bytes, &self.overflow));
        let exec = Arc::new(Exec::new(
            record,
            Spool::new(self.directory.clone(), exec_id),
            collector,
            Some(Box::default()),
            Arc::clone(&self.overflow),
        ));
        known.insert(exec_id, Arc::clone(&exec));
        self.running.fetch_add(1, Ordering::Relaxed);
        Ok(Begun::New(exec))
    }

    /// Where the session's execs are kept.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The start failed: nothing ran, so nothing is remembered.
    pub(crate) fn void(&self, exec: &Exec, error: ApiError) {
        let mut known = self.known.lock();
        if let Err(error) = self.append(&LogLine::Void(exec.id())) {
            tracing::warn!(%error, "Recording a failed start failed.");
        }
        if known.remove(&exec.id()).is_some() {
            self.running.fetch_sub(1, Ordering::Relaxed);
        }
        drop(known);
        let mut inner = exec.inner.lock();
        inner.failed = Some(error);
        inner.spool.clear();
        drop(inner);
        exec.announce();
    }

    /// The exec has ended: recorded first, then told. When it can't be recorded it is told all the same.
    pub(crate) fn finish(self: &Arc<Self>, exec: &Exec, exit: ExecExit) {
        if let Err(error) = self.try_finish(exec, exit.clone()) {
            tracing::error!(%error, exec_id = %exec.id(), "Recording an exec's end failed.");
            self.set_ended(
                exec,
                Ended {
                    exec_id: exec.id(),
                    exit,
                    ended_at: OffsetDateTime::now_utc(),
                },
            );
        }
    }

    /// The exec has ended: recorded first, then told. Nothing has changed when that fails.
    pub(crate) fn try_finish(self: &Arc<Self>, exec: &Exec, exit: ExecExit) -> io::Result<()> {
        let ended = Ended {
            exec_id: exec.id(),
            exit,
            ended_at: OffsetDateTime::now_utc(),
        };
        // Held until the end is seen too: whoever writes the log anew must not do so in between.
        let mut log = self.log.lock();
        self.append_to(&mut log, &LogLine::End(ended.clone()))?;
        self.set_ended(exec, ended);
        Ok(())
    }

    fn set_ended(self: &Arc<Self>, exec: &Exec, ended: Ended) {
        exec.stdin.lock().take();
        let bytes = {
            let mut inner = exec.inner.lock();
            if inner.ended.replace(ended).is_none() {
                self.running.fetch_sub(1, Ordering::Relaxed);
            }
            inner.hashes = None;
            inner.spool.close();
            inner.spool.bytes()
        };
        exec.release();
        exec.announce();
        self.recorded
            .fetch_add(exec.record_bytes(), Ordering::Relaxed);
        // Looking at every exec of a long session at each end would make each the slower; small ones are looked at now and then.
        let many = self
            .finished
            .fetch_add(1, Ordering::Relaxed)
            .is_multiple_of(TRIM_EVERY)
            || self.recorded.load(Ordering::Relaxed) > MAX_RECORD_BYTES;
        if bytes > TRIM_BYTES || many {
            // It may write the log anew, which takes its time.
            let execs = Arc::clone(self);
            tokio::task::spawn_blocking(move || execs.trim());
        }
    }

    fn append(&self, line: &LogLine) -> io::Result<()> {
        self.append_to(&mut self.log.lock(), line)
    }

    fn append_to(&self, log: &mut Log, line: &LogLine) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(line)?;
        bytes.push(b'\n');
        let torn = std::mem::replace(&mut log.torn, true);
        let file = match &mut log.file {
            Some(file) => file,
            None => log.file.insert(
                fs_err::OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(self.directory.join("log"))?,
            ),
        };
        if torn {
            bytes.insert(0, b'\n');
        }
        file.write_all(&bytes)?;
        log.torn = false;
        log.appended += bytes.len() as u64;
        Ok(())
    }

    /// Keeps to the limits: the oldest finished execs lose their output, then their record.
    fn trim(&self) {
        self.recorded.store(0, Ordering::Relaxed);
        let mut known = self.known.lock();
        let mut finished: Vec<Arc<Exec>> = known
            .values()
            .filter(|exec| !exec.is_running())
            .cloned()
            .collect();
        finished.sort_by_key(|exec| exec.ended_at());
        let mut kept: u64 = known
            .values()
            .map(|exec| exec.inner.lock().spool.bytes())
            .sum();
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
        let excess = finished.len().saturating_sub(MAX_FINISHED);
        let mut record_bytes: usize = finished.iter().map(|exec| exec.record_bytes()).sum();
        for (index, exec) in finished.iter().enumerate() {
            if index >= excess && record_bytes <= MAX_RECORD_BYTES {
                break;
            }
            record_bytes -= exec.record_bytes();
            let mut inner = exec.inner.lock();
            inner.spool.clear();
            // Whoever still reads is told that there was more.
            inner.expired = true;
            drop(inner);
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
        // In this order everywhere: what is known, the log, one exec.
        let known = self.known.lock();
        let mut log = self.log.lock();
        let mut bytes = Vec::new();
        for exec in known.values() {
            serde_json::to_writer(&mut bytes, &LogLine::Start(exec.record.clone()))?;
            bytes.push(b'\n');
            if let Some(ended) = &exec.inner.lock().ended {
                serde_json::to_writer(&mut bytes, &LogLine::End(ended.clone()))?;
                bytes.push(b'\n');
            }
        }
        let path = self.directory.join("log");
        let staged = self.directory.join("log.new");
        fs_err::write(&staged, &bytes)?;
        fs_err::rename(&staged, &path)?;
        *log = Log::default();
        Ok(())
    }

    pub(crate) fn get(&self, id: ExecId) -> Result<Arc<Exec>, ApiError> {
        self.known.lock().get(&id).cloned().ok_or_else(|| {
            ApiError::new(
                ErrorCode::ExecNotFound,
                format!("no exec {id} in this session"),
            )
        })
    }

    /// By their ids, which are ordered by time when we made them.
    pub(crate) fn list(&self) -> Vec<Arc<Exec>> {
        let mut all: Vec<_> = self.known.lock().values().cloned().collect();
        all.sort_by_key(|exec| (exec.record.started_at, exec.id()));
        all
    }

    pub(crate) fn running(&self) -> Vec<Arc<Exec>> {
        self.known
            .lock()
            .values()
            .filter(|exec| exec.is_running())
            .cloned()
            .collect()
    }

    pub(crate) fn running_count(&self) -> u32 {
        u32::try_from(self.running.load(Ordering::Relaxed)).unwrap_or(u32::MAX)
    }

    /// Forgets every exec with its output. The session can be resumed, so the directory stays and is written to again.
    pub(crate) fn forget_all(&self) -> io::Result<()> {
        let mut known = self.known.lock();
        for exec in known.values() {
            exec.inner.lock().spool.clear();
        }
        known.clear();
        self.running.store(0, Ordering::Relaxed);
        drop(known);
        self.compact()
    }

    /// The output of all is dropped. Whoever still reads is told that there was more.
    pub(crate) fn expire_all(&self) {
        for exec in self.known.lock().values() {
            let mut inner = exec.inner.lock();
            inner.spool.clear();
            inner.expired = true;
            drop(inner);
            exec.announce();
        }
    }

    /// Nothing more will run: what is known stays, and no file is held open for it.
    pub(crate) fn rest(&self) -> io::Result<()> {
        self.compact()
    }

    /// Everything that runs is lost: its sandbox is gone.
    pub(crate) fn lose_all(self: &Arc<Self>) {
        for exec in self.running() {
            let exit = lost_exit(&exec);
            self.finish(&exec, exit);
        }
    }
}

fn fingerprint(request: &ExecRequest, input: Option<&str>) -> String {
    let mut bytes = serde_json::to_vec(request).unwrap_or_default();
    bytes.extend_from_slice(input.unwrap_or_default().as_bytes());
    hex(&Sha256::digest(&bytes))
}

/// As much of a command as lists and records repeat, and whether there is more. Many long ones run at once.
fn shown(argv: &[String]) -> (Vec<String>, bool) {
    let mut left = MAX_SHOWN_ARGV_BYTES;
    let mut kept = Vec::new();
    for argument in argv {
        let Some(rest) = left
            .checked_sub(argument.len() + 1)
            .filter(|_| kept.len() < MAX_ARGV)
        else {
            return (kept, true);
        };
        left = rest;
        kept.push(argument.clone());
    }
    (kept, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(argument: &str) -> ExecRequest {
        ExecRequest {
            argv: vec!["true".to_owned(), argument.to_owned()],
            timeout_ms: 1_000,
            ..Default::default()
        }
    }

    fn run(execs: &Arc<SessionExecs>, argument: &str) -> Arc<Exec> {
        let Ok(Begun::New(exec)) = execs.begin(&request(argument), "/".to_owned(), None) else {
            panic!("a new exec")
        };
        execs.finish(&exec, lost_exit(&exec));
        exec
    }

    #[test]
    fn a_long_command_is_shown_as_far_as_there_is_room() {
        let word = "x".repeat(MAX_SHOWN_ARGV_BYTES / 4 - 1);
        assert_eq!(
            shown(&vec![word.clone(); 4]),
            (vec![word.clone(); 4], false)
        );
        assert_eq!(shown(&vec![word.clone(); 5]), (vec![word; 4], true));
        let words = vec!["x".to_owned(); MAX_ARGV + 1];
        assert_eq!(shown(&words[1..]), (words[1..].to_vec(), false));
        assert_eq!(shown(&words), (words[1..].to_vec(), true));
    }

    #[tokio::test]
    async fn another_input_is_another_request() {
        let directory = tempfile::tempdir().expect("a directory");
        let execs = SessionExecs::open(directory.path()).expect("opens");
        let request = ExecRequest {
            exec_id: Some(ExecId::generate()),
            ..request("a")
        };
        let begin = |input| execs.begin(&request, "/".to_owned(), input);
        assert!(matches!(begin(Some("aa")), Ok(Begun::New(_))));
        assert!(matches!(begin(Some("aa")), Ok(Begun::Existing(_))));
        assert!(begin(Some("bb")).is_err() && begin(None).is_err());
    }

    #[tokio::test]
    async fn long_commands_are_forgotten_before_they_fill_the_memory() {
        let directory = tempfile::tempdir().expect("a directory");
        let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
        let argument = "x".repeat(500 * 1024);
        for _ in 0..99 {
            run(&execs, &argument);
        }
        let last = run(&execs, &argument).id();
        execs.trim();
        let kept: usize = execs.list().iter().map(|exec| exec.record_bytes()).sum();
        assert!(
            (MAX_RECORD_BYTES / 2..=MAX_RECORD_BYTES).contains(&kept),
            "{kept}"
        );
        assert!(execs.get(last).is_ok(), "the newest stay");
        let log = fs_err::metadata(directory.path().join("execs/log"))
            .expect("a log")
            .len();
        assert!(log < COMPACT_AFTER + 2 * MAX_RECORD_BYTES as u64, "{log}");
    }

    #[tokio::test]
    async fn an_ended_exec_that_nobody_waits_for_holds_no_output_in_memory() {
        let directory = tempfile::tempdir().expect("a directory");
        let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
        let Ok(Begun::New(exec)) = execs.begin(&request("a"), "/".to_owned(), None) else {
            panic!("a new exec")
        };
        let watching = exec.watch();
        exec.keep(&crate::execs::Piece {
            seq: 1,
            at_ms: 0,
            stream: cynode_api::Stream::Stdout,
            data: b"text".to_vec(),
        })
        .expect("kept");
        execs.finish(
            &exec,
            ExecExit {
                bytes: cynode_api::Bytes {
                    stdout: 4,
                    stderr: 0,
                },
                ..lost_exit(&exec)
            },
        );
        assert!(exec.inner.lock().collector.is_some());
        drop(watching);
        assert!(exec.inner.lock().collector.is_none());
        let again = exec.result().await.expect("the same answer from the files");
        assert_eq!(
            (again.stdout.as_str(), again.truncated.stdout),
            ("text", false)
        );
    }

    fn say(exec: &Exec, text: &[u8]) {
        let seq = exec.last_seq() + 1;
        exec.keep(&crate::execs::Piece {
            seq,
            at_ms: 0,
            stream: cynode_api::Stream::Stdout,
            data: text.to_vec(),
        })
        .expect("kept");
    }

    #[tokio::test]
    async fn the_hash_of_the_output_survives_the_worker_while_all_of_it_is_kept() {
        for background in [false, true] {
            let directory = tempfile::tempdir().expect("a directory");
            let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
            let request = ExecRequest {
                background,
                ..request("a")
            };
            let Ok(Begun::New(exec)) = execs.begin(&request, "/".to_owned(), None) else {
                panic!("a new exec")
            };
            say(&exec, b"he");
            drop((exec, execs));

            let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
            let exec = execs.running().pop().expect("it runs");
            say(&exec, b"llo");
            let bytes = cynode_api::Bytes {
                stdout: 5,
                stderr: 0,
            };
            let sha256 = exec.sha256(bytes).expect("known");
            assert_eq!(
                (sha256.stdout, sha256.stderr),
                (hex(&Sha256::digest("hello")), hex(&Sha256::digest("")))
            );
            assert_eq!(
                exec.sha256(cynode_api::Bytes {
                    stdout: 6,
                    stderr: 0
                }),
                None,
                "a piece that never came"
            );
            execs.finish(
                &exec,
                ExecExit {
                    bytes,
                    sha256: exec.sha256(bytes),
                    ..lost_exit(&exec)
                },
            );

            let execs = SessionExecs::open(directory.path()).expect("opens");
            let exit = execs
                .get(exec.id())
                .expect("known")
                .object()
                .exit
                .expect("it has ended");
            assert_eq!(
                exit.sha256.map(|sha256| sha256.stdout),
                Some(hex(&Sha256::digest("hello")))
            );
        }
    }

    #[tokio::test]
    async fn the_hash_of_output_that_a_worker_of_before_dropped_is_not_known() {
        let directory = tempfile::tempdir().expect("a directory");
        let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
        let Ok(Begun::New(exec)) = execs.begin(&request("a"), "/".to_owned(), None) else {
            panic!("a new exec")
        };
        let piece = vec![b'x'; 64 * 1024];
        let mut all = Sha256::new();
        for _ in 0..400 {
            exec.make_room().await;
            say(&exec, &piece);
            all.update(&piece);
        }
        let bytes = cynode_api::Bytes {
            stdout: 400 * 64 * 1024,
            stderr: 0,
        };
        assert_eq!(
            exec.sha256(bytes).map(|sha256| sha256.stdout),
            Some(hex(&all.finalize())),
            "of more than is kept"
        );
        drop((exec, execs));
        let execs = SessionExecs::open(directory.path()).expect("opens");
        assert_eq!(execs.running().pop().expect("it runs").sha256(bytes), None);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_end_is_never_lost_to_a_log_that_is_written_anew() {
        let directory = tempfile::tempdir().expect("a directory");
        let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
        let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let compacting = {
            let (execs, over) = (Arc::clone(&execs), Arc::clone(&over));
            tokio::task::spawn_blocking(move || {
                while !over.load(Ordering::SeqCst) {
                    execs.compact().expect("writes");
                }
            })
        };
        for _ in 0..1_500 {
            run(&execs, "x");
        }
        over.store(true, Ordering::SeqCst);
        compacting.await.expect("ends");
        let again = SessionExecs::open(directory.path()).expect("opens");
        assert_eq!(
            again.running().len(),
            0,
            "answered, and running again after a restart"
        );
    }

    #[tokio::test]
    async fn a_line_that_was_half_written_costs_only_itself() {
        let directory = tempfile::tempdir().expect("a directory");
        let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
        let first = run(&execs, "a").id();
        {
            // A full disk took half of a line.
            let mut log = execs.log.lock();
            log.file
                .as_mut()
                .expect("open")
                .write_all(b"{\"start\":{\"exec_id\"")
                .expect("writes");
            log.torn = true;
        }
        let second = run(&execs, "b").id();
        let again = SessionExecs::open(directory.path()).expect("opens");
        assert!(
            again.get(first).is_ok_and(|exec| !exec.is_running())
                && again.get(second).is_ok_and(|exec| !exec.is_running())
        );
    }
}
