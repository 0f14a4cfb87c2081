//! The role's side of the runner.

use std::{
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixDatagram as StdDatagram,
    },
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use cynode_api::Base64Bytes;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, ReadBuf},
    net::{
        UnixDatagram, UnixStream,
        unix::pipe::{Receiver, Sender},
    },
    sync::{Mutex, OwnedSemaphorePermit, Semaphore, oneshot},
    task::JoinHandle,
    time::timeout,
};

use super::{
    credential::CredentialSocket,
    wire::{self, RunRequest, RunnerReply, RunnerRequest, RunnerSettings, WireRemote},
};
use crate::git::command::{
    GitCommand, GitError, GitOutput, GitRunner, GitStream, MAX_STDERR_BYTES, Mirror, RemoteAccess,
};

/// Timeout of requests that start no program.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the runner may take to report that it ended a command.
const GRACE: Duration = Duration::from_secs(15);

/// A handle of the runner. Cheap to clone.
#[derive(Clone)]
pub(crate) struct RunnerClient(Arc<Inner>);

struct Inner {
    control: UnixDatagram,
    /// Datagrams of several callers must not wait for one another's bytes out of order.
    sending: Mutex<()>,
    /// The runner's directory, for arguments that name files of an operation.
    directory: PathBuf,
    /// Where sockets of credentials are.
    calls: PathBuf,
    uid: u32,
    permits: Arc<Semaphore>,
}

impl std::fmt::Debug for RunnerClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunnerClient").finish_non_exhaustive()
    }
}

/// A file of an operation, as it is read from the runner.
pub(crate) struct ScratchFile {
    pub(crate) length: u64,
    pub(crate) content: Box<dyn AsyncRead + Send + Unpin>,
}

/// A started command.
struct Started {
    stdout: Receiver,
    stderr: JoinHandle<String>,
    /// Dropping it ends the command.
    reply: UnixStream,
    /// Removed when the command has ended.
    credential: Option<CredentialSocket>,
    permit: OwnedSemaphorePermit,
    command: String,
    timeout: Duration,
}

fn unavailable(error: impl std::fmt::Display) -> GitError {
    GitError::Unavailable(error.to_string())
}

impl RunnerClient {
    /// Takes the way to a runner and configures it.
    pub(crate) async fn connect(
        control: OwnedFd,
        settings: RunnerSettings,
        calls: PathBuf,
        uid: u32,
        max_commands: usize,
    ) -> Result<Self, GitError> {
        let control = StdDatagram::from(control);
        control.set_nonblocking(true).map_err(unavailable)?;
        let client = Self(Arc::new(Inner {
            control: UnixDatagram::from_std(control).map_err(unavailable)?,
            sending: Mutex::new(()),
            directory: settings.directory.clone(),
            calls,
            uid,
            permits: Arc::new(Semaphore::new(max_commands)),
        }));
        client.ask(RunnerRequest::Configure(settings)).await?;
        Ok(client)
    }

    /// Resolves when the runner is gone.
    pub(crate) async fn closed(&self) {
        // The runner sends nothing here.
        let mut byte = [0; 1];
        while self
            .0
            .control
            .recv(&mut byte)
            .await
            .is_ok_and(|read| read > 0)
        {}
    }

    /// The path of a file of an operation, for arguments.
    pub(crate) fn scratch_path(&self, mirror: &Mirror, name: &str, file: &str) -> PathBuf {
        self.0
            .directory
            .join("work")
            .join(&mirror.0)
            .join(name)
            .join(file)
    }

    /// Creates the directory of an operation.
    pub(crate) async fn scratch(&self, mirror: &Mirror, name: &str) -> Result<(), GitError> {
        self.ask(RunnerRequest::Scratch {
            mirror: mirror.0.clone(),
            name: name.to_owned(),
        })
        .await
        .map(drop)
    }

    /// Opens a file of an operation.
    pub(crate) async fn read_scratch(
        &self,
        mirror: &Mirror,
        name: &str,
        file: &str,
    ) -> Result<ScratchFile, GitError> {
        let (from, to) = pipe_with(PipeFlags::CLOEXEC).map_err(unavailable)?;
        let request = RunnerRequest::Read {
            mirror: mirror.0.clone(),
            name: name.to_owned(),
            file: file.to_owned(),
        };
        match self.ask_with(request, vec![to]).await? {
            RunnerReply::Length(length) => Ok(ScratchFile {
                length,
                content: Box::new(
                    Receiver::from_owned_fd(from)
                        .map_err(unavailable)?
                        .take(length),
                ),
            }),
            other => Err(unexpected(&other)),
        }
    }

    /// The bytes and the packs of a mirror.
    pub(crate) async fn measure(&self, mirror: &Mirror) -> Result<(u64, u64), GitError> {
        let request = RunnerRequest::Measure {
            mirror: mirror.0.clone(),
        };
        match self.ask(request).await? {
            RunnerReply::Measured { bytes, packs } => Ok((bytes, packs)),
            other => Err(unexpected(&other)),
        }
    }

    /// Removes a mirror with everything in it.
    pub(crate) async fn remove(&self, mirror: &Mirror) -> Result<(), GitError> {
        self.ask(RunnerRequest::Remove {
            mirror: mirror.0.clone(),
        })
        .await
        .map(drop)
    }

    async fn ask(&self, request: RunnerRequest) -> Result<RunnerReply, GitError> {
        self.ask_with(request, Vec::new()).await
    }

    async fn ask_with(
        &self,
        request: RunnerRequest,
        streams: Vec<OwnedFd>,
    ) -> Result<RunnerReply, GitError> {
        let answered = timeout(REQUEST_TIMEOUT, async {
            let mut reply = self.send(&request, streams).await?;
            wire::read_reply(&mut reply).await
        });
        match answered.await {
            Ok(Ok(RunnerReply::Failed(reason))) => Err(GitError::Unavailable(reason)),
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) => Err(unavailable(error)),
            Err(_) => Err(unavailable("it does not answer")),
        }
    }

    /// Sends a request; the answer comes on the returned socket.
    async fn send(&self, request: &RunnerRequest, streams: Vec<OwnedFd>) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        let theirs = OwnedFd::from(theirs.into_std()?);
        let descriptors: Vec<_> = std::iter::once(&theirs)
            .chain(&streams)
            .map(OwnedFd::as_fd)
            .collect();
        let _turn = self.0.sending.lock().await;
        wire::send(&self.0.control, request, &descriptors).await?;
        Ok(ours)
    }

    async fn start(&self, mirror: &Mirror, command: GitCommand) -> Result<Started, GitError> {
        let name = command
            .args
            .first()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let waited = timeout(command.timeout, Arc::clone(&self.0.permits).acquire_owned());
        let permit = waited
            .await
            .map_err(|_| GitError::Timeout {
                command: name.clone(),
                timeout: command.timeout,
            })?
            .map_err(unavailable)?;
        let credential = match &command.remote {
            Some(remote) => self.offer_credential(remote).map_err(unavailable)?,
            None => None,
        };
        let request = RunnerRequest::Run(Box::new(RunRequest {
            mirror: mirror.0.clone(),
            args: command
                .args
                .iter()
                .map(|argument| Base64Bytes(argument.as_encoded_bytes().to_vec()))
                .collect(),
            index: command.index,
            quarantine: command.quarantine,
            timeout_ms: u64::try_from(command.timeout.as_millis()).unwrap_or(u64::MAX),
            remote: command.remote.map(|remote| WireRemote {
                scheme: remote.scheme,
                host: remote.host,
                port: remote.port,
                addresses: remote.addresses,
                ca: remote.ca,
                credential_socket: credential.as_ref().map(|socket| socket.path().to_owned()),
            }),
        }));
        let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(unavailable);
        let ((stdin, input), (output, stdout), (errors, stderr)) = (pipe()?, pipe()?, pipe()?);
        let reply = self
            .send(&request, vec![stdin, stdout, stderr])
            .await
            .map_err(unavailable)?;
        write_input(input, command.input).map_err(unavailable)?;
        let errors = Receiver::from_owned_fd(errors).map_err(unavailable)?;
        Ok(Started {
            stdout: Receiver::from_owned_fd(output).map_err(unavailable)?,
            stderr: tokio::spawn(read_errors(errors)),
            reply,
            credential,
            permit,
            command: name,
            timeout: command.timeout,
        })
    }

    fn offer_credential(&self, remote: &RemoteAccess) -> io::Result<Option<CredentialSocket>> {
        remote
            .credential
            .as_ref()
            .map(|credential| CredentialSocket::open(&self.0.calls, remote, credential, self.0.uid))
            .transpose()
    }
}

/// Writes standard input in the background. git may end before it has read everything.
fn write_input(to: OwnedFd, input: Bytes) -> io::Result<()> {
    let mut to = Sender::from_owned_fd(to)?;
    tokio::spawn(async move { drop(to.write_all(&input).await) });
    Ok(())
}

/// The beginning of standard error. The rest is read and dropped, so that git does not block.
async fn read_errors(mut from: Receiver) -> String {
    let (mut kept, mut buffer) = (Vec::new(), [0; 4_096]);
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let room = MAX_STDERR_BYTES - kept.len();
        kept.extend_from_slice(&buffer[..length.min(room)]);
    }
    String::from_utf8_lossy(&kept).into_owned()
}

fn unexpected(reply: &RunnerReply) -> GitError {
    unavailable(format!("it answered {reply:?}"))
}

/// What a command's end says of it.
struct Ending {
    stderr: JoinHandle<String>,
    command: String,
    timeout: Duration,
}

impl Ending {
    /// Waits for the end. `reply` stays with the caller, who ends the command by dropping it.
    async fn wait(self, reply: &mut UnixStream) -> Result<(), GitError> {
        let Self {
            stderr,
            command,
            timeout: limit,
        } = self;
        let reply = match timeout(limit + GRACE, wire::read_reply(reply)).await {
            Ok(Ok(reply)) => reply,
            Ok(Err(error)) => return Err(unavailable(error)),
            Err(_) => return Err(unavailable("it does not end a command")),
        };
        // A process that git left behind may hold the stream open.
        let stderr = match timeout(Duration::from_secs(1), stderr).await {
            Ok(Ok(stderr)) => stderr,
            _ => String::new(),
        };
        match reply {
            RunnerReply::Exit(0) => Ok(()),
            RunnerReply::Exit(code) => Err(GitError::Exit {
                command,
                code,
                stderr,
            }),
            RunnerReply::Killed => Err(GitError::Killed { command }),
            RunnerReply::Timeout => Err(GitError::Timeout {
                command,
                timeout: limit,
            }),
            RunnerReply::Failed(reason) => Err(GitError::Unavailable(reason)),
            other => Err(unexpected(&other)),
        }
    }
}

#[async_trait]
impl GitRunner for RunnerClient {
    async fn prepare(&self, mirror: &Mirror) -> Result<(), GitError> {
        self.ask(RunnerRequest::Prepare {
            mirror: mirror.0.clone(),
        })
        .await
        .map(drop)
    }

    async fn run(&self, mirror: &Mirror, command: GitCommand) -> Result<GitOutput, GitError> {
        let limit = command.max_output_bytes;
        let started = self.start(mirror, command).await?;
        let (mut reply, mut stdout) = (started.reply, started.stdout);
        let _until_the_end = (started.permit, started.credential);
        let ending = Ending {
            stderr: started.stderr,
            command: started.command.clone(),
            timeout: started.timeout,
        };
        let mut output = Vec::new();
        let read = async {
            (&mut stdout)
                .take(limit.saturating_add(1))
                .read_to_end(&mut output)
                .await
        };
        match timeout(started.timeout + GRACE, read).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(unavailable(error)),
            Err(_) => return Err(unavailable("it does not end a command")),
        }
        if output.len() as u64 > limit {
            return Err(GitError::TooMuchOutput {
                command: started.command,
                limit,
            });
        }
        ending.wait(&mut reply).await?;
        Ok(GitOutput { stdout: output })
    }

    async fn stream(&self, mirror: &Mirror, command: GitCommand) -> Result<GitStream, GitError> {
        let limit = command.max_output_bytes;
        let started = self.start(mirror, command).await?;
        let (mut tell, ended) = oneshot::channel();
        let (exceeds, exceeded) = oneshot::channel::<()>();
        let mut reply = started.reply;
        let held = (started.permit, started.credential);
        let ending = Ending {
            stderr: started.stderr,
            command: started.command.clone(),
            timeout: started.timeout,
        };
        tokio::spawn(async move {
            let result = tokio::select! {
                // Dropping the reply socket ends the command.
                () = tell.closed() => return,
                Ok(()) = exceeded => Err(GitError::TooMuchOutput {
                    command: started.command,
                    limit,
                }),
                result = ending.wait(&mut reply) => result,
            };
            drop((reply, held));
            // Nobody waits for a command whose output was enough.
            drop(tell.send(result));
        });
        Ok(GitStream {
            stdout: Box::new(LimitedOutput {
                inner: started.stdout,
                left: limit,
                exceeds: Some(exceeds),
            }),
            ended,
        })
    }

    async fn accept(&self, mirror: &Mirror, quarantine: &str) -> Result<(), GitError> {
        self.ask(RunnerRequest::Accept {
            mirror: mirror.0.clone(),
            quarantine: quarantine.to_owned(),
        })
        .await
        .map(drop)
    }

    async fn forget(&self, mirror: &Mirror, name: &str) {
        let forgotten = self
            .ask(RunnerRequest::Forget {
                mirror: mirror.0.clone(),
                name: name.to_owned(),
            })
            .await;
        if let Err(error) = forgotten {
            // The next start of the runner removes it.
            tracing::warn!(%error, "Removing the files of a git operation failed.");
        }
    }
}

/// Fails when a command writes more than it may.
struct LimitedOutput {
    inner: Receiver,
    left: u64,
    exceeds: Option<oneshot::Sender<()>>,
}

impl AsyncRead for LimitedOutput {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(context, buffer);
        let length = (buffer.filled().len() - before) as u64;
        if length > self.left {
            buffer.set_filled(before);
            if let Some(exceeds) = self.exceeds.take() {
                let _nobody_waits = exceeds.send(());
            }
            return Poll::Ready(Err(io::Error::other("git wrote more than it may")));
        }
        self.left -= length;
        read
    }
}

/// How to start the runner of a role's directory.
pub(crate) fn settings(
    config: &crate::Config,
    mirrors: &Path,
    is_separate: bool,
) -> RunnerSettings {
    RunnerSettings {
        directory: mirrors.to_owned(),
        git: config.git.clone(),
        memory_bytes: config.memory_bytes,
        file_bytes: config.mirror_bytes,
        is_separate,
        launches: true,
    }
}
