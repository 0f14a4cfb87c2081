//! The connections to the worker: one idle watch connection, and a few parked ones for requests.
//!
//! The agent always initiates connections and retries forever, so a restarted worker only has to
//! wait for its agents.

use std::{cell::Cell, io, path::PathBuf, rc::Rc, time::Duration};

use cynode_api::{ErrorCode, ExecId};
use cynode_sba_proto::{
    AgentError, Decoder, Frame, Hello, MAX_DATA, MAX_WORKER_FRAME, PARKED_CONNECTIONS, PROTOCOL,
    Reply, Request, Role, encode_message, proxy, runner,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::{UnixStream, unix::OwnedReadHalf},
    sync::Notify,
};

use crate::{
    exec::{Exec, Execs},
    file_child, files, has_listeners,
    relay::Relay,
};

const INITIAL_RETRY_DELAY: Duration = Duration::from_millis(10);
const LONGEST_RETRY_DELAY: Duration = Duration::from_millis(250);

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
                runner: Some(runner::VERSION),
                listeners: has_listeners().then_some(proxy::VERSION),
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
            Ok(Ok(Request::File { op })) => {
                if let Ok(stream) = stream.into_std() {
                    file_child::start(&self.execs.processes, stream, decoder, |peer| {
                        files::serve(op, peer)
                    });
                }
            }
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
            Ok(Ok(Request::Runner { exec_id })) => match self.runner(exec_id) {
                Ok(relay) => relay.serve(stream, decoder).await,
                Err(refusal) => drop(send_reply(&mut stream, &Reply::Error(refusal)).await),
            },
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

    fn runner(&self, exec_id: ExecId) -> Result<Rc<Relay>, AgentError> {
        let exec = self
            .execs
            .get(exec_id)
            .ok_or_else(|| unknown_exec(exec_id))?;
        exec.runner.clone().ok_or_else(|| {
            AgentError::new(
                ErrorCode::InvalidRequest,
                format!("the exec {exec_id} is not a job's runner"),
            )
        })
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

pub(crate) async fn send_reply(
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
