//! One command from its start to the worker's acknowledgement of its end.
//!
//! What must stay true: a command's life does not depend on a connection. Output is numbered here and kept until the
//! worker has acknowledged it, up to a window; then the pipes are no longer read, and the command waits. A worker that
//! comes back attaches and goes on where it was. The deadline is kept here, on the monotonic clock.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet, VecDeque},
    io,
    os::fd::OwnedFd,
    rc::Rc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use cynode_api::{ErrorCode, ExecId, SignalScope, Stream};
use cynode_sba_proto::{AgentError, ExecStart, ExecStatus, ExitReport, MAX_DATA, WINDOW};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
    time::Instant,
};

use crate::{
    processes::Processes,
    spawn::{self, Report, Spawned},
    sys,
};

/// A start takes milliseconds; on a host that has no time left, seconds.
const START_LIMIT: Duration = Duration::from_secs(10);
/// Pieces of output below this size are held back for nothing; the limit only bounds bookkeeping.
const MAX_UNACKED_CHUNKS: usize = 4_096;
/// Ids that are remembered after the start.
const MAX_RECENT: usize = 1_024;

#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) seq: u64,
    pub(crate) stream: Stream,
    pub(crate) at_ms: u64,
    pub(crate) data: Vec<u8>,
}

/// A command, running or ended but not yet forgotten.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) id: ExecId,
    processes: Rc<Processes>,
    start: ExecStart,
    begun: Instant,
    subreaper: i32,
    /// The command's own process, which leads its group.
    main: Cell<i32>,
    unacked: RefCell<VecDeque<Chunk>>,
    unacked_bytes: Cell<usize>,
    last_seq: Cell<u64>,
    /// The newest piece that was sent to anybody; later ones can still grow.
    sent_seq: Cell<u64>,
    stdout_bytes: Cell<u64>,
    stderr_bytes: Cell<u64>,
    /// Bytes read of each pipe, kept or not.
    drained: [Cell<usize>; 2],
    open_pipes: Cell<u8>,
    exit: RefCell<Option<ExitReport>>,
    kill: Notify,
    killed: Cell<bool>,
    /// Its deadline has been kept: from here on only output is waited for.
    ended: Cell<bool>,
    /// Something new to send: output or the exit.
    pub(crate) news: Notify,
    /// Room in the window, or nobody wants the output any more.
    room: Notify,
    pub(crate) stdin: RefCell<Option<Rc<AsyncFd<OwnedFd>>>>,
    /// Counts connections: an older one gives way to a newer.
    attached: Cell<u64>,
}

/// The commands of this sandbox.
#[derive(Debug, Default)]
pub(crate) struct Execs {
    live: RefCell<HashMap<ExecId, Rc<Exec>>>,
    /// Those whose start is not decided yet.
    starting: RefCell<HashSet<ExecId>>,
    /// A start was decided.
    decided: Notify,
    /// The last that were started, whatever became of them.
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

    /// Starts a command and waits until it runs or has failed to.
    ///
    /// An id is started once. A worker that died between its request and the answer asks again, and its first request may
    /// still be on its way or half done: whichever comes first decides, and the other is told that the id is in use.
    pub(crate) async fn start(self: &Rc<Self>, start: ExecStart) -> Result<Rc<Exec>, AgentError> {
        let id = start.exec_id;
        while self.starting.borrow().contains(&id) {
            self.decided.notified().await;
        }
        if self.live.borrow().contains_key(&id) || self.recent.borrow().contains(&id) {
            return Err(AgentError::new(
                ErrorCode::ExecIdInUse,
                "an exec with this id is known",
            ));
        }
        self.starting.borrow_mut().insert(id);
        let begun = self.begin(start).await;
        self.starting.borrow_mut().remove(&id);
        if begun.is_ok() {
            let mut recent = self.recent.borrow_mut();
            recent.push_back(id);
            if recent.len() > MAX_RECENT {
                recent.pop_front();
            }
        }
        self.decided.notify_waiters();
        begun
    }

    async fn begin(self: &Rc<Self>, start: ExecStart) -> Result<Rc<Exec>, AgentError> {
        let begun = Instant::now();
        let Spawned {
            subreaper,
            stdin,
            stdout,
            stderr,
            report,
        } = spawn::spawn(&start)?;
        let subreaper_end = self.processes.own(subreaper);
        let report = register(report, Interest::READABLE)?;
        let main = match tokio::time::timeout(START_LIMIT, read_report(&report)).await {
            Ok(Ok(Some(Report::Started { pid }))) => pid,
            Ok(Ok(Some(other))) => return Err(spawn::start_error(&start, other)),
            // The command runs before its subreaper has said so, and hostile code can use that moment.
            Ok(Ok(None) | Err(_)) | Err(_) => {
                self.processes.end_tree(subreaper).await;
                return Err(AgentError::new(
                    ErrorCode::ExecFailed,
                    "the command's supervisor was killed or stopped before it could say that the command had started",
                ));
            }
        };
        let exec = Rc::new(Exec {
            id: start.exec_id,
            processes: Rc::clone(&self.processes),
            start,
            begun,
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
            news: Notify::new(),
            room: Notify::new(),
            stdin: RefCell::new(
                stdin
                    .map(|fd| register(fd, Interest::WRITABLE).map(Rc::new))
                    .transpose()?,
            ),
            attached: Cell::default(),
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

    /// Forgets a command once the worker has its exit and nothing of it runs.
    pub(crate) fn forget_if_done(&self, exec: &Exec) {
        let acknowledged = exec.exit.borrow().is_some() && exec.attached.get() == u64::MAX;
        if acknowledged && !self.processes.is_owned(exec.subreaper) {
            self.live.borrow_mut().remove(&exec.id);
        }
    }

    /// Ends an exec's tree when asked to kill all of it; otherwise passes the signal on.
    pub(crate) fn signal(
        &self,
        id: ExecId,
        signal: i32,
        scope: SignalScope,
    ) -> Result<(), AgentError> {
        let exec = self.get(id).ok_or_else(|| {
            AgentError::new(ErrorCode::ExecEnded, "nothing of this exec runs any more")
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

/// The next report of a subreaper; `None` when it is gone.
async fn read_report(pipe: &AsyncFd<OwnedFd>) -> io::Result<Option<Report>> {
    let mut buffer = [0; Report::SIZE];
    // Reports are far smaller than PIPE_BUF, so each is read whole.
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
    /// Reads one pipe until its end, keeping what the command wrote before it ended.
    async fn read(self: Rc<Self>, stream: Stream, pipe: Rc<AsyncFd<OwnedFd>>) {
        let mut buffer = Vec::new();
        loop {
            while self.exit.borrow().is_none()
                && (self.unacked_bytes.get() >= WINDOW
                    || self.unacked.borrow().len() >= MAX_UNACKED_CHUNKS)
            {
                self.room.notified().await;
            }
            // Held only while there is something to read: an idle command costs no buffer.
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
        self.news.notify_waiters();
    }

    fn keep(&self, stream: Stream, data: &[u8]) {
        let drained = &self.drained[index(stream)];
        drained.set(drained.get() + data.len());
        if self.exit.borrow().is_some() {
            // The answer has been given. The pipe stays open, so that what the command left running is not killed by SIGPIPE.
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
            // A program that writes byte by byte must not make a piece of each.
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
                unacked.push_back(Chunk {
                    seq,
                    stream,
                    at_ms: now_ms(),
                    data: data.to_vec(),
                });
            }
        }
        drop(unacked);
        self.news.notify_waiters();
    }

    /// Waits for the command's end, its deadline or a kill; then drains the pipes and records the exit.
    async fn supervise(
        &self,
        report: AsyncFd<OwnedFd>,
        stdout: &AsyncFd<OwnedFd>,
        stderr: &AsyncFd<OwnedFd>,
    ) {
        let killed_all = self.processes.killed_all();
        let deadline = (self.start.timeout_ms > 0)
            .then(|| self.begun + Duration::from_millis(self.start.timeout_ms));
        let mut timed_out = false;
        let ended = tokio::select! {
            ended = main_end(&report) => ended,
            () = until(deadline) => {
                timed_out = true;
                self.end_at_deadline(&report).await
            }
            () = self.kill.notified() => {
                self.end_tree().await;
                None
            }
        };
        let duration_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        if ended.is_none() {
            // Killed by us, or its subreaper was killed from inside: nothing that it started may stay.
            self.processes.end_tree(self.subreaper).await;
        }
        let by_us = timed_out || self.killed.get() || self.processes.killed_all() != killed_all;
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
        self.news.notify_waiters();
        self.room.notify_waiters();
        if ended.is_some() && !timed_out {
            // What the command left running can still be killed.
            tokio::select! {
                () = self.kill.notified() => self.end_tree().await,
                () = subreaper_end(&report) => {}
            }
        }
    }

    /// TERM to the group, a grace in which the whole tree may end, then KILL of the tree.
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

    /// Reads what the command wrote before its end, however slow the worker is, and what follows for a short while.
    async fn drain(&self, stdout: &AsyncFd<OwnedFd>, stderr: &AsyncFd<OwnedFd>) {
        let goal: [usize; 2] =
            [(stdout, 0), (stderr, 1)].map(|(pipe, index): (&AsyncFd<OwnedFd>, usize)| {
                self.drained[index].get() + sys::bytes_waiting(pipe.get_ref())
            });
        let mut until = Instant::now() + Duration::from_millis(self.start.drain_ms);
        loop {
            let news = self.news.notified();
            if self.open_pipes.get() == 0 {
                return;
            }
            if tokio::time::timeout_at(until, news).await.is_err() {
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

    /// Makes a connection the one that serves this exec; output up to `after_seq` is the worker's already.
    pub(crate) fn attach(&self, after_seq: u64) -> u64 {
        self.acknowledge(after_seq);
        let generation = self.attached.get() + 1;
        self.attached.set(generation);
        self.news.notify_waiters();
        generation
    }

    pub(crate) fn is_attached(&self, generation: u64) -> bool {
        self.attached.get() == generation
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

    /// The worker has the exit.
    pub(crate) fn acknowledge_exit(&self) {
        self.attached.set(u64::MAX);
        self.unacked.borrow_mut().clear();
        self.unacked_bytes.set(0);
    }

    /// Appends what is there after `seq` as frames, up to about a window; the exit when all was sent.
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

/// The wait status of the command's own process; `None` when its subreaper went away first.
async fn main_end(report: &AsyncFd<OwnedFd>) -> Option<i32> {
    loop {
        match read_report(report).await {
            Ok(Some(Report::Ended { status })) => return Some(status),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Waits until the subreaper is gone, and so all of its tree.
async fn subreaper_end(report: &AsyncFd<OwnedFd>) {
    while let Ok(Some(_)) = read_report(report).await {}
}

async fn until(deadline: Option<Instant>) {
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
