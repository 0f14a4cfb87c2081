//! The connections to the worker: one idle watch connection, and a few parked ones for requests.
//!
//! The agent always initiates connections and retries forever, so a restarted worker only has to
//! wait for its agents.

use std::{
    cell::Cell,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::PathBuf,
    rc::Rc,
    time::Duration,
};

use cynode_api::{ErrorCode, ExecId};
use cynode_sba_proto::{
    AgentError, Decoder, FileOp, Frame, Hello, MAX_DATA, MAX_WORKER_FRAME, PARKED_CONNECTIONS,
    PROTOCOL, Reply, Request, Role, encode_message,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest, unix::AsyncFd},
    net::{UnixStream, unix::OwnedReadHalf},
    sync::{Notify, oneshot},
};

use crate::{
    exec::{Exec, Execs},
    files,
    peer::Peer,
    processes::Processes,
    sys::{self, Fork},
};

const INITIAL_RETRY_DELAY: Duration = Duration::from_millis(10);
const LONGEST_RETRY_DELAY: Duration = Duration::from_millis(250);
/// File operations that take longer are killed: the worker has stopped waiting long before.
const FILE_OPERATION_TIMEOUT: Duration = Duration::from_secs(3_600);
/// Time from the worker's disconnect to killing the child that serves the connection.
const FILE_GRACE_PERIOD: Duration = Duration::from_secs(2);
/// How often to check whether a child is stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub(crate) struct Link {
    control: PathBuf,
    execs: Rc<Execs>,
    parked: Cell<usize>,
    slot_free: Notify,
}

impl Link {
    pub(crate) fn new(control: PathBuf, execs: Rc<Execs>) -> Rc<Self> {
        Rc::new(Self {
            control,
            execs,
            parked: Cell::new(0),
            slot_free: Notify::new(),
        })
    }

    /// Keeps the watch connection open and the number of parked connections constant.
    pub(crate) async fn run(self: Rc<Self>) {
        tokio::task::spawn_local(Rc::clone(&self).watch());
        loop {
            while self.parked.get() < PARKED_CONNECTIONS {
                self.parked.set(self.parked.get() + 1);
                tokio::task::spawn_local(Rc::clone(&self).park());
            }
            self.slot_free.notified().await;
        }
    }

    fn release_slot(&self) {
        self.parked.set(self.parked.get() - 1);
        self.slot_free.notify_one();
    }

    async fn connect(&self, role: Role) -> UnixStream {
        let mut hello = Vec::new();
        encode_message(
            &Reply::Hello(Hello {
                protocol: PROTOCOL,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                role,
                max_frame: Some(MAX_WORKER_FRAME),
                encoded_patches: Some(cynode_patch::WIRE_VERSION),
            }),
            &mut hello,
        );
        let mut pause = INITIAL_RETRY_DELAY;
        loop {
            if let Ok(mut stream) = UnixStream::connect(&self.control).await
                && stream.write_all(&hello).await.is_ok()
            {
                return stream;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_RETRY_DELAY);
        }
    }

    async fn watch(self: Rc<Self>) {
        loop {
            let mut stream = self.connect(Role::Watch).await;
            let mut ignored = [0; 64];
            while matches!(stream.read(&mut ignored).await, Ok(count) if count > 0) {}
            tokio::time::sleep(INITIAL_RETRY_DELAY).await;
        }
    }

    /// Waits for one request and serves it.
    async fn park(self: Rc<Self>) {
        let mut stream = self.connect(Role::Request).await;
        let mut decoder = Decoder::new(MAX_WORKER_FRAME);
        let request = first_request(&mut stream, &mut decoder).await;
        if request.is_err() {
            // The worker disconnected: avoid a busy loop while it closes connections immediately.
            tokio::time::sleep(INITIAL_RETRY_DELAY).await;
        }
        self.release_slot();
        match request {
            Err(_) => {}
            Ok(Err(refusal)) => drop(send_reply(&mut stream, &Reply::Error(refusal)).await),
            Ok(Ok(Request::File { op })) => serve_file(&self.execs, op, stream, decoder),
            Ok(Ok(Request::Exec(start))) => match self.execs.start(start).await {
                Ok(exec) => self.serve_exec(exec, 0, stream, decoder, true).await,
                Err(refusal) => drop(send_reply(&mut stream, &Reply::Error(refusal)).await),
            },
            Ok(Ok(Request::Attach { exec_id, after_seq })) => match self.execs.get(exec_id) {
                Some(exec) => {
                    self.serve_exec(exec, after_seq, stream, decoder, false)
                        .await;
                }
                None => drop(send_reply(&mut stream, &Reply::Error(unknown_exec(exec_id))).await),
            },
            Ok(Ok(Request::Execs)) => drop(
                send_reply(
                    &mut stream,
                    &Reply::Execs {
                        execs: self.execs.list(),
                    },
                )
                .await,
            ),
            Ok(Ok(Request::Signal {
                exec_id,
                signal,
                scope,
            })) => {
                let reply = self
                    .execs
                    .signal(exec_id, signal, scope)
                    .map_or_else(Reply::Error, |()| Reply::Ok { changed: None });
                drop(send_reply(&mut stream, &reply).await);
            }
            Ok(Ok(Request::SignalAll { signal })) => {
                self.execs.processes.signal_all(signal);
                drop(send_reply(&mut stream, &Reply::Ok { changed: None }).await);
            }
            Ok(Ok(Request::Unknown)) => {
                drop(
                    send_reply(
                        &mut stream,
                        &Reply::Error(AgentError::new(
                            ErrorCode::InvalidRequest,
                            "this agent does not support the request",
                        )),
                    )
                    .await,
                );
            }
        }
    }

    /// Sends output and exit, and receives acknowledgements and standard input, until the worker
    /// has everything or disconnects.
    async fn serve_exec(
        &self,
        exec: Rc<Exec>,
        after_seq: u64,
        stream: UnixStream,
        decoder: Decoder,
        started: bool,
    ) {
        let generation = exec.attach(after_seq);
        let (reader, mut writer) = stream.into_split();
        if started
            && send_reply(&mut writer, &Reply::Started { pid: 0 })
                .await
                .is_err()
        {
            return;
        }
        let (replies, mut from_reader) = tokio::sync::mpsc::channel(16);
        let reading = read_worker(Rc::clone(&exec), reader, decoder, replies);
        let writing = async {
            let mut sent = after_seq;
            let mut exit_sent = false;
            let mut out = Vec::new();
            while exec.is_attached(generation) {
                let activity = exec.activity.notified();
                out.clear();
                while let Ok(reply) = from_reader.try_recv() {
                    encode_message(&reply, &mut out);
                }
                let (now_sent, exit) = exec.pending(sent, &mut out);
                sent = now_sent;
                if let Some(report) = exit.filter(|_| !exit_sent) {
                    encode_message(&Reply::Exited(report), &mut out);
                    exit_sent = true;
                }
                if out.is_empty() {
                    tokio::select! {
                        () = activity => {}
                        reply = from_reader.recv() => match reply {
                            Some(reply) => {
                                encode_message(&reply, &mut out);
                                if writer.write_all(&out).await.is_err() {
                                    return;
                                }
                            }
                            None => return,
                        },
                    }
                } else if writer.write_all(&out).await.is_err() {
                    return;
                }
                // An idle exec must not keep a large buffer.
                if out.capacity() > MAX_DATA {
                    out = Vec::new();
                }
            }
        };
        tokio::select! {
            () = reading => {}
            () = writing => {}
        }
        self.execs.forget_if_done(&exec);
    }
}

fn unknown_exec(id: ExecId) -> AgentError {
    AgentError::new(ErrorCode::ExecNotFound, format!("there is no exec {id}"))
}

async fn send_reply(
    stream: &mut (impl tokio::io::AsyncWrite + Unpin),
    reply: &Reply,
) -> io::Result<()> {
    let mut out = Vec::new();
    encode_message(reply, &mut out);
    stream.write_all(&out).await
}

/// Reads one request. The outer error is the connection's; the inner one is reported to the worker.
async fn first_request(
    stream: &mut UnixStream,
    decoder: &mut Decoder,
) -> io::Result<Result<Request, AgentError>> {
    let bad = |message: String| Ok(Err(AgentError::new(ErrorCode::InvalidRequest, message)));
    loop {
        match decoder.next_frame() {
            Ok(Some(Frame::Json(json))) => {
                return match serde_json::from_slice(&json) {
                    Ok(request) => Ok(Ok(request)),
                    Err(error) => bad(format!("not a request: {error}")),
                };
            }
            Ok(Some(_)) => return bad("expected a request".to_owned()),
            Ok(None) => {}
            Err(error) => return bad(error.to_string()),
        }
        // Parked connections are idle, so they have no buffer until data arrives.
        stream.ready(Interest::READABLE).await?;
        let mut buffer = vec![0; 16 * 1024];
        match stream.try_read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => decoder.extend(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Receives acknowledgements and standard input. Returns when the worker has the exit or the
/// connection is unusable.
async fn read_worker(
    exec: Rc<Exec>,
    reader: OwnedReadHalf,
    mut decoder: Decoder,
    replies: tokio::sync::mpsc::Sender<Reply>,
) {
    let (stdin, mut stdin_queue) = tokio::sync::mpsc::channel::<Option<Vec<u8>>>(2);
    let feeding = {
        let exec = Rc::clone(&exec);
        async move {
            while let Some(piece) = stdin_queue.recv().await {
                let Some(data) = piece else {
                    exec.stdin.borrow_mut().take();
                    continue;
                };
                let reply = if write_stdin(&exec, &data).await {
                    Reply::StdinTaken {
                        bytes: data.len() as u64,
                    }
                } else {
                    Reply::StdinClosed
                };
                if replies.send(reply).await.is_err() {
                    return;
                }
            }
            std::future::pending::<()>().await;
        }
    };
    let reading = async move {
        loop {
            match decoder.next_frame() {
                Ok(Some(Frame::ACK_EXIT)) => return exec.acknowledge_exit(),
                Ok(Some(Frame::Ack(seq))) => {
                    exec.acknowledge(seq);
                    continue;
                }
                // The worker must send one chunk at a time; a full queue means that it violates the
                // protocol.
                Ok(Some(Frame::Data(data))) if data.len() <= MAX_DATA => {
                    if stdin.try_send(Some(data)).is_err() {
                        return;
                    }
                    continue;
                }
                Ok(Some(Frame::End)) => {
                    if stdin.try_send(None).is_err() {
                        return;
                    }
                    continue;
                }
                Ok(Some(_)) | Err(_) => return,
                Ok(None) => {}
            }
            if reader.ready(Interest::READABLE).await.is_err() {
                return;
            }
            let mut buffer = vec![0; 16 * 1024];
            match reader.try_read(&mut buffer) {
                Ok(count) if count > 0 => decoder.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
    };
    tokio::select! {
        () = feeding => {}
        () = reading => {}
    }
}

/// Writes all of `data` to the command's standard input; returns false if that is closed.
async fn write_stdin(exec: &Exec, mut data: &[u8]) -> bool {
    while !data.is_empty() {
        let Some(pipe) = exec.stdin.borrow().clone() else {
            return false;
        };
        let wrote = tokio::select! {
            wrote = pipe.async_io(Interest::WRITABLE, |fd| {
                rustix::io::write(fd, data).map_err(io::Error::from)
            }) => wrote,
            () = stdin_closed(exec) => return false,
        };
        let Ok(count) = wrote else {
            exec.stdin.borrow_mut().take();
            return false;
        };
        data = &data[count..];
    }
    true
}

/// Waits until the exec has closed its standard input.
async fn stdin_closed(exec: &Exec) {
    loop {
        let activity = exec.activity.notified();
        if exec.stdin.borrow().is_none() {
            return;
        }
        activity.await;
    }
}

/// Passes the connection to a child that serves one file operation, so that the child pays for the
/// memory.
fn serve_file(execs: &Rc<Execs>, op: FileOp, stream: UnixStream, decoder: Decoder) {
    let Ok(stream) = stream.into_std() else {
        return;
    };
    match sys::fork() {
        Ok(Fork::Child) => {
            sys::set_name(c"cynode-file");
            sys::close_all_but(stream.as_raw_fd());
            let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                stream.set_nonblocking(false)?;
                files::serve(op, &mut Peer::new(stream, decoder))
            }));
            sys::exit_now(i32::from(!matches!(served, Ok(Ok(())))))
        }
        Ok(Fork::Parent(pid)) => {
            let ended = execs.processes.adopt(pid);
            let connection = sys::watch(stream.into(), Interest::READABLE).ok();
            let processes = Rc::clone(&execs.processes);
            tokio::task::spawn_local(async move {
                supervise_file_operation(
                    &processes,
                    pid,
                    ended,
                    connection,
                    FILE_OPERATION_TIMEOUT,
                )
                .await;
            });
        }
        Err(_) => {
            // One small frame into an empty socket buffer doesn't block.
            let refusal = AgentError {
                errno: Some("EAGAIN".to_owned()),
                ..AgentError::new(
                    ErrorCode::PidsExhausted,
                    "no process slot is free for the file operation",
                )
            };
            drop(Peer::new(stream, decoder).reply(&Reply::Error(refusal)));
        }
    }
}

/// Waits for a child that serves a file operation. Kills it and its descendants when the worker
/// gives up by closing the connection, after `limit`, and immediately when the child is stopped:
/// only hostile code in the sandbox stops it, to make the caller wait forever, and a stopped child
/// can't time itself out.
async fn supervise_file_operation(
    processes: &Processes,
    pid: i32,
    ended: oneshot::Receiver<i32>,
    connection: Option<AsyncFd<OwnedFd>>,
    limit: Duration,
) {
    let mut ended = std::pin::pin!(ended);
    let closed = async {
        match &connection {
            Some(connection) => closed(connection).await,
            None => std::future::pending().await,
        }
    };
    let grace = tokio::select! {
        _ = &mut ended => return,
        () = closed => FILE_GRACE_PERIOD,
        () = stopped(pid) => Duration::ZERO,
        () = tokio::time::sleep(limit) => Duration::ZERO,
    };
    drop(connection);
    if tokio::time::timeout(grace, ended).await.is_err() {
        processes.end_tree(pid).await;
    }
}

async fn stopped(pid: i32) {
    while !sys::is_stopped(pid) {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Waits until the worker closes its end of a connection, without reading data.
async fn closed(connection: &AsyncFd<OwnedFd>) {
    loop {
        match connection.readable().await {
            Ok(mut ready) if !ready.ready().is_read_closed() => ready.clear_ready(),
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A long-running child, and its connection to the worker.
    #[expect(clippy::zombie_processes, reason = "its owner reaps it")]
    fn child(
        processes: &Processes,
    ) -> (
        i32,
        oneshot::Receiver<i32>,
        AsyncFd<OwnedFd>,
        std::os::unix::net::UnixStream,
    ) {
        let child = Command::new("sleep").arg("1000").spawn().expect("started");
        let pid = child.id().cast_signed();
        let (ours, workers) = std::os::unix::net::UnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("non-blocking");
        (
            pid,
            processes.adopt(pid),
            sys::watch(ours.into(), Interest::READABLE).expect("watched"),
            workers,
        )
    }

    #[tokio::test]
    async fn a_stopped_late_or_abandoned_file_operation_is_killed() {
        let hour = Duration::from_secs(3_600);
        for (reason, stop, limit, close) in [
            ("stopped", true, hour, false),
            ("late", false, Duration::from_millis(50), false),
            ("closed", false, hour, true),
        ] {
            let processes = Processes::default();
            let (pid, ended, connection, worker) = child(&processes);
            if stop {
                sys::kill(pid, libc::SIGSTOP).expect("stopped");
            }
            let worker = (!close).then_some(worker);
            supervise_file_operation(&processes, pid, ended, Some(connection), limit).await;
            drop(worker);
            assert!(
                !processes.is_owned(pid) && sys::kill(pid, 0).is_err(),
                "{reason}"
            );
        }
    }

    #[tokio::test]
    async fn a_running_file_operation_is_not_killed() {
        let processes = Processes::default();
        let (pid, ended, connection, _worker) = child(&processes);
        let attending = supervise_file_operation(
            &processes,
            pid,
            ended,
            Some(connection),
            Duration::from_secs(3_600),
        );
        assert!(
            tokio::time::timeout(3 * POLL_INTERVAL, attending)
                .await
                .is_err()
        );
        assert!(processes.is_owned(pid));
        processes.end_tree(pid).await;
    }
}
