//! Runs one command from its start to the worker's acknowledgement of its exit.
//!
//! Invariants: a command's lifetime is independent of any connection. Output is numbered here and
//! kept until the worker acknowledges it, up to a window; beyond that the pipes are not read and
//! the command blocks. A reconnected worker attaches and continues where it was. The timeout is
//! enforced here, on the monotonic clock.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet, VecDeque},
    io,
    os::fd::OwnedFd,
    rc::Rc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use cynode_api::{ErrorCode, ExecId, SignalScope, Stream};
use cynode_sba_proto::{
    AgentError, ExecStart, ExecStatus, ExitReport, MAX_DATA, OUTPUT_WINDOW_BYTES,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
    time::Instant,
};

use crate::{
    processes::Processes,
    relay::Relay,
    spawn::{self, Report, SpawnedExec},
    sys,
};

/// A start takes milliseconds, or seconds on an overloaded host.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Bounds the bookkeeping for many small chunks; large chunks reach the window first.
const MAX_UNACKED_CHUNKS: usize = 4_096;
/// The number of started ids to remember.
const MAX_RECENT_IDS: usize = 1_024;
/// The connection generation once the worker has acknowledged the exit: no connection is current.
const EXIT_ACKNOWLEDGED: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct OutputChunk {
    pub(crate) seq: u64,
    pub(crate) stream: Stream,
    pub(crate) at_ms: u64,
    pub(crate) data: Vec<u8>,
}

/// A command that is running, or has exited and is still tracked.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) id: ExecId,
    processes: Rc<Processes>,
    start: ExecStart,
    started_at: Instant,
    subreaper: i32,
    /// The command's own process, which leads its group.
    main: Cell<i32>,
    unacked: RefCell<VecDeque<OutputChunk>>,
    unacked_bytes: Cell<usize>,
    last_seq: Cell<u64>,
    /// The newest chunk that was sent on any connection; later chunks can still grow.
    sent_seq: Cell<u64>,
    stdout_bytes: Cell<u64>,
    stderr_bytes: Cell<u64>,
    /// Bytes read from each pipe, including discarded ones.
    drained: [Cell<usize>; 2],
    open_pipes: Cell<u8>,
    exit: RefCell<Option<ExitReport>>,
    kill: Notify,
    killed: Cell<bool>,
    /// The process has exited or was killed: only its output is pending.
    ended: Cell<bool>,
    /// Signals new output or the exit.
    pub(crate) activity: Notify,
    /// Signals room in the window, or that output is now discarded.
    room: Notify,
    pub(crate) stdin: RefCell<Option<Rc<AsyncFd<OwnedFd>>>>,
    /// Relays frames between the worker and the command, if that is a job's runner.
    pub(crate) runner: Option<Rc<Relay>>,
    /// The generation of the current connection: a newer connection replaces an older one.
    generation: Cell<u64>,
}

/// The commands of this sandbox.
#[derive(Debug, Default)]
pub(crate) struct Execs {
    live: RefCell<HashMap<ExecId, Rc<Exec>>>,
    /// Execs that are starting.
    starting: RefCell<HashSet<ExecId>>,
    /// Signals that a start succeeded or failed.
    start_settled: Notify,
    /// The ids of the last execs that started.
    recent: RefCell<VecDeque<ExecId>>,
    pub(crate) processes: Rc<Processes>,
}

impl Execs {
    pub(crate) fn get(&self, id: ExecId) -> Option<Rc<Exec>> {
        self.live.borrow().get(&id).cloned()
    }

    pub(crate) fn list(&self) -> Vec<ExecStatus> {
        self.live
            .borrow()
            .values()
            .map(|exec| ExecStatus {
                exec_id: exec.id,
                last_seq: exec.last_seq.get(),
                exited: exec.exit.borrow().is_some(),
                ended: exec.ended.get(),
            })
            .collect()
    }

    /// Starts a command and waits until it runs or has failed to start.
    ///
    /// An id starts at most once. A worker that died between its request and the reply repeats the
    /// request while the first one may still be in flight: the first to arrive wins, and the other
    /// gets `ExecIdInUse`.
    pub(crate) async fn start(self: &Rc<Self>, start: ExecStart) -> Result<Rc<Exec>, AgentError> {
        let id = start.exec_id;
        while self.starting.borrow().contains(&id) {
            self.start_settled.notified().await;
        }
        if self.live.borrow().contains_key(&id) || self.recent.borrow().contains(&id) {
            return Err(AgentError::new(
                ErrorCode::ExecIdInUse,
                "an exec with this id already exists",
            ));
        }
        self.starting.borrow_mut().insert(id);
        let result = self.launch(start).await;
        self.starting.borrow_mut().remove(&id);
        if result.is_ok() {
            let mut recent = self.recent.borrow_mut();
            recent.push_back(id);
            if recent.len() > MAX_RECENT_IDS {
                recent.pop_front();
            }
        }
        self.start_settled.notify_waiters();
        result
    }

    async fn launch(self: &Rc<Self>, start: ExecStart) -> Result<Rc<Exec>, AgentError> {
        let started_at = Instant::now();
        let SpawnedExec {
            subreaper,
            stdin,
            stdout,
            stderr,
            report,
            runner,
        } = spawn::spawn(&start)?;
        let subreaper_end = self.processes.adopt(subreaper);
        let report = register(report, Interest::READABLE)?;
        let main = match tokio::time::timeout(START_TIMEOUT, read_report(&report)).await {
            Ok(Ok(Some(Report::Started { pid }))) => pid,
            Ok(Ok(Some(other))) => return Err(spawn::start_error(&start, other)),
            // The command runs before its subreaper reports that, and hostile code can kill the
            // subreaper in between.
            Ok(Ok(None) | Err(_)) | Err(_) => {
                self.processes.end_tree(subreaper).await;
                return Err(AgentError::new(
                    ErrorCode::ExecFailed,
                    "the command's supervisor was killed or stopped before it could report the \
                     start",
                ));
            }
        };
        let runner = runner.map(Relay::new).transpose().map_err(|error| {
            AgentError::new(ErrorCode::Internal, format!("watching a socket: {error}"))
        })?;
        let exec = Rc::new(Exec {
            id: start.exec_id,
            processes: Rc::clone(&self.processes),
            start,
            started_at,
            subreaper,
            main: Cell::new(main),
            unacked: RefCell::default(),
            unacked_bytes: Cell::default(),
            last_seq: Cell::default(),
            sent_seq: Cell::default(),
            stdout_bytes: Cell::default(),
            stderr_bytes: Cell::default(),
            drained: Default::default(),
            open_pipes: Cell::new(2),
            exit: RefCell::default(),
            kill: Notify::new(),
            killed: Cell::default(),
            ended: Cell::default(),
            activity: Notify::new(),
            room: Notify::new(),
            stdin: RefCell::new(
                stdin
                    .map(|fd| register(fd, Interest::WRITABLE).map(Rc::new))
                    .transpose()?,
            ),
            runner,
            generation: Cell::default(),
        });
        let (stdout, stderr) = (
            Rc::new(register(stdout, Interest::READABLE)?),
            Rc::new(register(stderr, Interest::READABLE)?),
        );
        self.live.borrow_mut().insert(exec.id, Rc::clone(&exec));
        tokio::task::spawn_local(Rc::clone(&exec).read(Stream::Stdout, Rc::clone(&stdout)));
        tokio::task::spawn_local(Rc::clone(&exec).read(Stream::Stderr, Rc::clone(&stderr)));
        tokio::task::spawn_local({
            let (execs, exec) = (Rc::clone(self), Rc::clone(&exec));
            async move {
                exec.supervise(report, &stdout, &stderr).await;
                drop(subreaper_end.await);
                execs.forget_if_done(&exec);
            }
        });
        Ok(exec)
    }

    /// Stops tracking a command once the worker has its exit and no process of it is left.
    pub(crate) fn forget_if_done(&self, exec: &Exec) {
        let acknowledged =
            exec.exit.borrow().is_some() && exec.generation.get() == EXIT_ACKNOWLEDGED;
        if acknowledged && !self.processes.is_owned(exec.subreaper) {
            self.live.borrow_mut().remove(&exec.id);
        }
    }

    /// Kills all processes of all commands.
    pub(crate) async fn end_all(&self) {
        let live: Vec<_> = self.live.borrow().values().cloned().collect();
        for exec in live {
            self.processes.end_tree(exec.subreaper).await;
        }
    }

    /// Sends a signal. SIGKILL for the tree kills all processes of the exec reliably.
    pub(crate) fn signal(
        &self,
        id: ExecId,
        signal: i32,
        scope: SignalScope,
    ) -> Result<(), AgentError> {
        let exec = self.get(id).ok_or_else(|| {
            AgentError::new(ErrorCode::ExecEnded, "no process of this exec is left")
        })?;
        match scope {
            SignalScope::Tree if signal == libc::SIGKILL => exec.kill.notify_one(),
            SignalScope::Tree => Processes::signal_tree(exec.subreaper, signal),
            SignalScope::Group => {
                if exec.exit.borrow().is_some() || sys::kill(-exec.main.get(), signal).is_err() {
                    return Err(AgentError::new(
                        ErrorCode::ExecEnded,
                        "the exec's process group has ended",
                    ));
                }
            }
        }
        Ok(())
    }
}

fn register(fd: OwnedFd, interest: Interest) -> Result<AsyncFd<OwnedFd>, AgentError> {
    sys::watch(fd, interest)
        .map_err(|error| AgentError::new(ErrorCode::Internal, format!("watching a pipe: {error}")))
}

/// The next report of a subreaper; `None` if it is gone.
async fn read_report(pipe: &AsyncFd<OwnedFd>) -> io::Result<Option<Report>> {
    let mut buffer = [0; Report::SIZE];
    // Reports are far smaller than PIPE_BUF, so each read returns a whole one.
    let count = pipe
        .async_io(Interest::READABLE, |fd| {
            rustix::io::read(fd, &mut buffer).map_err(io::Error::from)
        })
        .await?;
    Ok(if count == Report::SIZE {
        Report::decode(buffer)
    } else {
        None
    })
}

fn index(stream: Stream) -> usize {
    match stream {
        Stream::Stdout => 0,
        Stream::Stderr => 1,
    }
}

impl Exec {
    /// Reads one pipe until end of file, and keeps the output from before the exit.
    async fn read(self: Rc<Self>, stream: Stream, pipe: Rc<AsyncFd<OwnedFd>>) {
        let mut buffer = Vec::new();
        loop {
            while self.exit.borrow().is_none()
                && (self.unacked_bytes.get() >= OUTPUT_WINDOW_BYTES
                    || self.unacked.borrow().len() >= MAX_UNACKED_CHUNKS)
            {
                self.room.notified().await;
            }
            // Allocated only while there is something to read: an idle command needs no buffer.
            match pipe.readable().await {
                Ok(mut ready) => {
                    buffer.resize(MAX_DATA, 0);
                    match ready
                        .try_io(|fd| rustix::io::read(fd, &mut buffer[..]).map_err(io::Error::from))
                    {
                        Err(_would_block) => continue,
                        Ok(Ok(0) | Err(_)) => break,
                        Ok(Ok(count)) => self.keep(stream, &buffer[..count]),
                    }
                    buffer = Vec::new();
                }
                Err(_) => break,
            }
        }
        self.open_pipes.set(self.open_pipes.get() - 1);
        self.activity.notify_waiters();
    }

    fn keep(&self, stream: Stream, data: &[u8]) {
        let drained = &self.drained[index(stream)];
        drained.set(drained.get() + data.len());
        if self.exit.borrow().is_some() {
            // The exit is recorded, so output is discarded. The pipe stays open so that processes
            // that the command left behind don't get SIGPIPE.
            return;
        }
        let counter = match stream {
            Stream::Stdout => &self.stdout_bytes,
            Stream::Stderr => &self.stderr_bytes,
        };
        counter.set(counter.get() + data.len() as u64);
        self.unacked_bytes
            .set(self.unacked_bytes.get() + data.len());
        let mut unacked = self.unacked.borrow_mut();
        match unacked.back_mut() {
            // Merges small writes: a program that writes byte by byte must not create one chunk per
            // byte.
            Some(last)
                if last.seq > self.sent_seq.get()
                    && last.stream == stream
                    && last.data.len() + data.len() <= MAX_DATA =>
            {
                last.data.extend_from_slice(data);
            }
            _ => {
                let seq = self.last_seq.get() + 1;
                self.last_seq.set(seq);
                unacked.push_back(OutputChunk {
                    seq,
                    stream,
                    at_ms: now_ms(),
                    data: data.to_vec(),
                });
            }
        }
        drop(unacked);
        self.activity.notify_waiters();
    }

    /// Waits for the command's exit, its timeout or a kill; then drains the pipes and records the
    /// exit.
    async fn supervise(
        &self,
        report: AsyncFd<OwnedFd>,
        stdout: &AsyncFd<OwnedFd>,
        stderr: &AsyncFd<OwnedFd>,
    ) {
        let kill_all_count = self.processes.kill_all_count();
        let deadline = (self.start.timeout_ms > 0)
            .then(|| self.started_at + Duration::from_millis(self.start.timeout_ms));
        let mut timed_out = false;
        let ended = tokio::select! {
            ended = main_end(&report) => ended,
            () = deadline_passed(deadline) => {
                timed_out = true;
                self.end_at_deadline(&report).await
            }
            () = self.kill.notified() => {
                self.end_tree().await;
                None
            }
        };
        let duration_ms = u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        if ended.is_none() {
            // Killed by the agent, or its subreaper was killed from inside: no process of it may
            // survive.
            self.processes.end_tree(self.subreaper).await;
        }
        let by_us =
            timed_out || self.killed.get() || self.processes.kill_all_count() != kill_all_count;
        let (code, signal, lost) = match ended.map(sys::decode_status) {
            Some((code, signal)) => (code, signal, false),
            None => (None, Some(libc::SIGKILL), !by_us),
        };
        self.ended.set(true);
        self.drain(stdout, stderr).await;
        self.stdin.borrow_mut().take();
        *self.exit.borrow_mut() = Some(ExitReport {
            code,
            signal,
            timed_out,
            lost,
            duration_ms,
            stdout_bytes: self.stdout_bytes.get(),
            stderr_bytes: self.stderr_bytes.get(),
            last_seq: self.last_seq.get(),
        });
        self.activity.notify_waiters();
        self.room.notify_waiters();
        if ended.is_some() && !timed_out {
            // Processes that the command left behind can still be killed.
            tokio::select! {
                () = self.kill.notified() => self.end_tree().await,
                () = subreaper_end(&report) => {}
            }
        }
    }

    /// SIGTERM to the group, a grace period for the whole tree, then SIGKILL to the tree.
    async fn end_at_deadline(&self, report: &AsyncFd<OwnedFd>) -> Option<i32> {
        drop(sys::kill(-self.main.get(), libc::SIGTERM));
        let mut status = None;
        let grace = Duration::from_millis(self.start.grace_ms);
        let tree_ended = tokio::time::timeout(grace, async {
            status = main_end(report).await;
            subreaper_end(report).await;
        });
        if tree_ended.await.is_err() {
            self.end_tree().await;
        }
        status
    }

    async fn end_tree(&self) {
        self.killed.set(true);
        self.processes.end_tree(self.subreaper).await;
    }

    /// Reads all output from before the exit, however slow the worker is, and later output for a
    /// short time.
    async fn drain(&self, stdout: &AsyncFd<OwnedFd>, stderr: &AsyncFd<OwnedFd>) {
        let goal: [usize; 2] =
            [(stdout, 0), (stderr, 1)].map(|(pipe, index): (&AsyncFd<OwnedFd>, usize)| {
                self.drained[index].get() + sys::bytes_waiting(pipe.get_ref())
            });
        let mut until = Instant::now() + Duration::from_millis(self.start.drain_ms);
        loop {
            let activity = self.activity.notified();
            if self.open_pipes.get() == 0 {
                return;
            }
            if tokio::time::timeout_at(until, activity).await.is_err() {
                if self
                    .drained
                    .iter()
                    .zip(goal)
                    .all(|(drained, goal)| drained.get() >= goal)
                {
                    return;
                }
                until = Instant::now() + Duration::from_millis(50);
            } else if Instant::now() >= until
                && self
                    .drained
                    .iter()
                    .zip(goal)
                    .all(|(drained, goal)| drained.get() >= goal)
            {
                return;
            }
        }
    }

    /// Makes a connection the current one for this exec; the worker has output up to `after_seq`.
    pub(crate) fn attach(&self, after_seq: u64) -> u64 {
        self.acknowledge(after_seq);
        let generation = self.generation.get() + 1;
        self.generation.set(generation);
        self.activity.notify_waiters();
        generation
    }

    pub(crate) fn is_attached(&self, generation: u64) -> bool {
        self.generation.get() == generation
    }

    pub(crate) fn acknowledge(&self, seq: u64) {
        let mut unacked = self.unacked.borrow_mut();
        let mut freed = 0;
        while unacked.front().is_some_and(|chunk| chunk.seq <= seq) {
            freed += unacked.pop_front().map_or(0, |chunk| chunk.data.len());
        }
        if freed > 0 {
            self.unacked_bytes.set(self.unacked_bytes.get() - freed);
            self.room.notify_waiters();
        }
    }

    /// Takes the oldest output: a consumer in this process needs no acknowledgements.
    pub(crate) fn take(&self) -> Option<OutputChunk> {
        let chunk = self.unacked.borrow_mut().pop_front()?;
        self.unacked_bytes
            .set(self.unacked_bytes.get() - chunk.data.len());
        self.room.notify_waiters();
        Some(chunk)
    }

    /// The exit, once its output has been taken.
    pub(crate) fn exit(&self) -> Option<ExitReport> {
        let exit = self.exit.borrow();
        exit.clone().filter(|_| self.unacked.borrow().is_empty())
    }

    /// Records that the worker has received the exit.
    pub(crate) fn acknowledge_exit(&self) {
        self.generation.set(EXIT_ACKNOWLEDGED);
        self.unacked.borrow_mut().clear();
        self.unacked_bytes.set(0);
    }

    /// Appends output after `after` as frames, up to about a window; returns the exit once all
    /// output is sent.
    pub(crate) fn pending(&self, after: u64, out: &mut Vec<u8>) -> (u64, Option<ExitReport>) {
        let mut sent = after;
        for chunk in self
            .unacked
            .borrow()
            .iter()
            .filter(|chunk| chunk.seq > after)
        {
            cynode_sba_proto::encode_output(chunk.stream, chunk.seq, chunk.at_ms, &chunk.data, out);
            sent = chunk.seq;
            if out.len() >= 2 * MAX_DATA {
                break;
            }
        }
        self.sent_seq.set(self.sent_seq.get().max(sent));
        let exit = self
            .exit
            .borrow()
            .clone()
            .filter(|_| sent >= self.last_seq.get());
        (sent, exit)
    }
}

/// The wait status of the command's own process; `None` if its subreaper died first.
async fn main_end(report: &AsyncFd<OwnedFd>) -> Option<i32> {
    loop {
        match read_report(report).await {
            Ok(Some(Report::Ended { status })) => return Some(status),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Waits until the subreaper, and thus its whole tree, is gone.
async fn subreaper_end(report: &AsyncFd<OwnedFd>) {
    while let Ok(Some(_)) = read_report(report).await {}
}

/// Never completes without a deadline.
async fn deadline_passed(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
}
