//! The registry of a session's execs, and the log that recovers them after a restart.

use std::{
    collections::BTreeMap,
    io::{self, BufWriter, Write as _},
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
    collect::{Collector, SpillSpace},
    exec::{Exec, lost_exit},
    input::InputUsage,
    spool::Spool,
};

/// Finished execs that a session retains.
const MAX_FINISHED: usize = 2_000;
/// Finishing an exec trims the registry if its output exceeds this, and on every `TRIM_INTERVAL`th
/// exec.
const TRIM_THRESHOLD_BYTES: u64 = 256 * 1024;
const TRIM_INTERVAL: u64 = 64;
/// Total size of the records of finished execs, including their commands.
const MAX_RECORD_BYTES: usize = 8 * 1024 * 1024;
/// The log is compacted once it has grown by this much.
const COMPACT_THRESHOLD_BYTES: u64 = 8 * 1024 * 1024;

/// The log entry of an exec's start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ExecRecord {
    pub(crate) exec_id: ExecId,
    /// Truncated to `MAX_SHOWN_ARGV_BYTES`.
    pub(crate) argv: Vec<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) argv_truncated: bool,
    pub(crate) cwd: String,
    pub(crate) background: bool,
    pub(crate) timeout_ms: u64,
    pub(crate) max_output_bytes: u64,
    /// Hash of the request: tells a retry from a different request under the same id.
    pub(crate) fingerprint: String,
    #[serde(with = "time::serde::rfc3339")]
    pub(crate) started_at: OffsetDateTime,
}

/// The log entry of an exec's end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ExecEnd {
    pub(super) exec_id: ExecId,
    pub(super) exit: ExecExit,
    #[serde(with = "time::serde::rfc3339")]
    pub(super) ended_at: OffsetDateTime,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LogLine {
    Start(ExecRecord),
    End(ExecEnd),
    /// The start failed, so the exec never ran.
    Void(ExecId),
}

/// All execs of one session.
#[derive(Debug)]
pub(crate) struct SessionExecs {
    directory: PathBuf,
    log: Mutex<Log>,
    by_id: Mutex<BTreeMap<ExecId, Arc<Exec>>>,
    running: AtomicUsize,
    finished: AtomicU64,
    /// Record bytes added since the last trim.
    recorded: AtomicUsize,
    spill_space: Arc<SpillSpace>,
    /// Standard input that commands have not read yet.
    pub(crate) input_usage: InputUsage,
}

#[derive(Debug, Default)]
struct Log {
    /// Open from the first append until the next compaction, so that sessions without activity hold
    /// no file descriptor.
    file: Option<fs_err::File>,
    appended: u64,
    /// The last line may be incomplete.
    torn: bool,
}

/// The exec that a request opened, or the one that an earlier attempt opened.
pub(crate) enum OpenExec {
    New(Arc<Exec>),
    Existing(Arc<Exec>),
}

impl SessionExecs {
    /// Opens a session's execs, recovering those of an earlier worker process.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        let directory = directory.join("execs");
        fs_err::create_dir_all(&directory)?;
        let path = directory.join("log");
        let spill_space = SpillSpace::new(directory.clone(), KEPT_PER_SESSION);
        let mut by_id = BTreeMap::new();
        if let Ok(text) = fs_err::read(&path) {
            for line in text
                .split(|byte| *byte == b'\n')
                .filter(|line| !line.is_empty())
            {
                match serde_json::from_slice(line) {
                    Ok(LogLine::Start(record)) => {
                        let spool = Spool::recover(directory.clone(), record.exec_id)?;
                        by_id.insert(
                            record.exec_id,
                            Arc::new(Exec::new(
                                record,
                                spool,
                                None,
                                None,
                                Arc::clone(&spill_space),
                            )),
                        );
                    }
                    Ok(LogLine::End(ended)) => {
                        if let Some(exec) = by_id.get(&ended.exec_id) {
                            let mut inner = exec.inner.lock();
                            inner.expired = ended.exit.bytes.stdout + ended.exit.bytes.stderr > 0
                                && inner.spool.last_seq() == 0;
                            inner.ended = Some(ended);
                        }
                    }
                    Ok(LogLine::Void(exec_id)) => {
                        by_id.remove(&exec_id);
                    }
                    // A crash may truncate the last line. It was never acknowledged to the agent,
                    // so skipping it is safe.
                    Err(error) => {
                        tracing::warn!(
                            %error,
                            path = %path.display(),
                            "Skipping an unreadable line of an exec log."
                        );
                    }
                }
            }
        }
        let running = AtomicUsize::new(0);
        for exec in by_id.values().filter(|exec| exec.is_running()) {
            running.fetch_add(1, Ordering::Relaxed);
            exec.recover_output();
        }
        let execs = Self {
            directory,
            log: Mutex::default(),
            by_id: Mutex::new(by_id),
            running,
            finished: AtomicU64::new(0),
            recorded: AtomicUsize::new(0),
            spill_space,
            input_usage: InputUsage::default(),
        };
        execs.compact()?;
        Ok(execs)
    }

    /// Registers a request. A retry with the same id and the same request returns the existing
    /// exec. `input` is the hash of standard input sent outside the request itself.
    pub(crate) fn register(
        &self,
        request: &ExecRequest,
        cwd: String,
        input: Option<&str>,
    ) -> Result<OpenExec, ApiError> {
        let fingerprint = fingerprint(request, input);
        let exec_id = request.exec_id.unwrap_or_else(ExecId::generate);
        let mut by_id = self.by_id.lock();
        if let Some(exec) = by_id.get(&exec_id) {
            return if exec.record.fingerprint == fingerprint {
                Ok(OpenExec::Existing(Arc::clone(exec)))
            } else {
                Err(ApiError::new(
                    ErrorCode::ExecIdInUse,
                    format!("exec {exec_id} belongs to a different request"),
                ))
            };
        }
        if self.running.load(Ordering::Relaxed) >= MAX_RUNNING {
            return Err(ApiError::new(
                ErrorCode::PidsExhausted,
                format!("{MAX_RUNNING} execs are already running in this session"),
            ));
        }
        let max_output_bytes = request.max_output_bytes.unwrap_or(DEFAULT_OUTPUT_BYTES);
        let (argv, argv_truncated) = truncate_argv(&request.argv);
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
            (!record.background).then(|| Collector::new(max_output_bytes, &self.spill_space));
        let exec = Arc::new(Exec::new(
            record,
            Spool::new(self.directory.clone(), exec_id),
            collector,
            Some(Box::default()),
            Arc::clone(&self.spill_space),
        ));
        by_id.insert(exec_id, Arc::clone(&exec));
        self.running.fetch_add(1, Ordering::Relaxed);
        Ok(OpenExec::New(exec))
    }

    /// The directory of the session's exec records and output.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Discards an exec whose start failed: it never ran.
    pub(crate) fn void(&self, exec: &Exec, error: ApiError) {
        let mut by_id = self.by_id.lock();
        if let Err(error) = self.append(&LogLine::Void(exec.id())) {
            tracing::warn!(%error, "Failed to record that an exec's start failed.");
        }
        if by_id.remove(&exec.id()).is_some() {
            self.running.fetch_sub(1, Ordering::Relaxed);
        }
        drop(by_id);
        let mut inner = exec.inner.lock();
        inner.failed = Some(error);
        inner.spool.clear();
        drop(inner);
        exec.announce();
    }

    /// Ends the exec: records the exit, then notifies waiters. Waiters are notified even if
    /// recording fails.
    pub(crate) fn finish(self: &Arc<Self>, exec: &Exec, exit: ExecExit) {
        if let Err(error) = self.try_finish(exec, exit.clone()) {
            tracing::error!(%error, exec_id = %exec.id(), "Failed to record an exec's end.");
            self.set_ended(
                exec,
                ExecEnd {
                    exec_id: exec.id(),
                    exit,
                    ended_at: OffsetDateTime::now_utc(),
                },
            );
        }
    }

    /// Ends the exec: records the exit, then notifies waiters. If recording fails, nothing has
    /// changed.
    pub(crate) fn try_finish(self: &Arc<Self>, exec: &Exec, exit: ExecExit) -> io::Result<()> {
        let ended = ExecEnd {
            exec_id: exec.id(),
            exit,
            ended_at: OffsetDateTime::now_utc(),
        };
        // Hold the lock until the end is set: a compaction in between would drop the line.
        let mut log = self.log.lock();
        self.append_to(&mut log, &LogLine::End(ended.clone()))?;
        self.set_ended(exec, ended);
        Ok(())
    }

    fn set_ended(self: &Arc<Self>, exec: &Exec, ended: ExecEnd) {
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
        // A trim visits every exec, so it would slow down each end in a long session. Small execs
        // trigger it only occasionally.
        let is_due = self
            .finished
            .fetch_add(1, Ordering::Relaxed)
            .is_multiple_of(TRIM_INTERVAL)
            || self.recorded.load(Ordering::Relaxed) > MAX_RECORD_BYTES;
        if bytes > TRIM_THRESHOLD_BYTES || is_due {
            // Compaction of the log may block.
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

    /// Enforces the limits: the oldest finished execs lose their output first, then their records.
    fn trim(&self) {
        self.recorded.store(0, Ordering::Relaxed);
        let mut by_id = self.by_id.lock();
        let mut finished: Vec<Arc<Exec>> = by_id
            .values()
            .filter(|exec| !exec.is_running())
            .cloned()
            .collect();
        finished.sort_by_key(|exec| exec.ended_at());
        let mut retained: u64 = by_id
            .values()
            .map(|exec| exec.inner.lock().spool.bytes())
            .sum();
        for exec in &finished {
            if retained <= KEPT_PER_SESSION {
                break;
            }
            let mut inner = exec.inner.lock();
            let bytes = inner.spool.bytes();
            if bytes > 0 && inner.readers.is_empty() {
                inner.spool.clear();
                inner.expired = true;
                retained -= bytes;
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
            // Attached readers see that output is missing.
            inner.expired = true;
            drop(inner);
            by_id.remove(&exec.id());
        }
        drop(by_id);
        if self.log.lock().appended > COMPACT_THRESHOLD_BYTES
            && let Err(error) = self.compact()
        {
            tracing::warn!(%error, "Failed to compact an exec log.");
        }
    }

    /// Rewrites the log with the execs that are still retained.
    fn compact(&self) -> io::Result<()> {
        // Lock order everywhere: the registry, the log, one exec.
        let by_id = self.by_id.lock();
        let mut log = self.log.lock();
        let mut bytes = Vec::new();
        for exec in by_id.values() {
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
        self.by_id.lock().get(&id).cloned().ok_or_else(|| {
            ApiError::new(
                ErrorCode::ExecNotFound,
                format!("no exec {id} in this session"),
            )
        })
    }

    /// Lists the execs by start time, then id.
    pub(crate) fn list(&self) -> Vec<Arc<Exec>> {
        let mut all: Vec<_> = self.by_id.lock().values().cloned().collect();
        all.sort_by_key(|exec| (exec.record.started_at, exec.id()));
        all
    }

    pub(crate) fn running(&self) -> Vec<Arc<Exec>> {
        self.by_id
            .lock()
            .values()
            .filter(|exec| exec.is_running())
            .cloned()
            .collect()
    }

    pub(crate) fn running_count(&self) -> u32 {
        u32::try_from(self.running.load(Ordering::Relaxed)).unwrap_or(u32::MAX)
    }

    /// Removes every exec and its output. The directory stays: a resumed session writes to it
    /// again.
    pub(crate) fn forget_all(&self) -> io::Result<()> {
        let mut by_id = self.by_id.lock();
        for exec in by_id.values() {
            exec.inner.lock().spool.clear();
        }
        by_id.clear();
        self.running.store(0, Ordering::Relaxed);
        drop(by_id);
        self.compact()
    }

    /// Drops the output of all execs. Attached readers see that output is missing.
    pub(crate) fn expire_all(&self) {
        for exec in self.by_id.lock().values() {
            let mut inner = exec.inner.lock();
            inner.spool.clear();
            inner.expired = true;
            drop(inner);
            exec.announce();
        }
    }

    /// Closes the log file. The execs stay listed, but no more will run.
    pub(crate) fn close_log(&self) -> io::Result<()> {
        self.compact()
    }

    /// Ends all running execs as lost: their sandbox is gone.
    pub(crate) fn mark_all_lost(self: &Arc<Self>) {
        for exec in self.running() {
            let exit = lost_exit(&exec);
            self.finish(&exec, exit);
        }
    }
}

/// Hashes what is written to it, so that a long request is never serialized whole.
struct HashWriter(Sha256);

impl io::Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn fingerprint(request: &ExecRequest, input: Option<&str>) -> String {
    let mut hash = BufWriter::new(HashWriter(Sha256::new()));
    let written = serde_json::to_writer(&mut hash, request)
        .map_err(io::Error::from)
        .and_then(|()| hash.write_all(input.unwrap_or_default().as_bytes()))
        .and_then(|()| hash.flush());
    debug_assert!(written.is_ok(), "writing to a hash failed");
    hex::encode(hash.into_parts().0.0.finalize())
}

/// Truncates a command for lists and records; returns whether arguments were dropped.
fn truncate_argv(argv: &[String]) -> (Vec<String>, bool) {
    let mut left = MAX_SHOWN_ARGV_BYTES;
    let mut retained = Vec::new();
    for argument in argv {
        let Some(rest) = left
            .checked_sub(argument.len() + 1)
            .filter(|_| retained.len() < MAX_ARGV)
        else {
            return (retained, true);
        };
        left = rest;
        retained.push(argument.clone());
    }
    (retained, false)
}

#[cfg(test)]
mod tests;
