//! The control socket of one sandbox.
//!
//! Invariant: a connection is accepted only if its peer is the container's process 1, by the
//! process id from the kernel; other processes in the sandbox are rejected. All reads are bounded
//! in size and time.

use std::{
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use cynode_sba_proto::{
    Decoder, Frame, Hello, MAX_AGENT_FRAME, MAX_WORKER_FRAME, OLDEST_PROTOCOL, OLDEST_WORKER_FRAME,
    PROTOCOL, Reply, Role, proxy,
};
use tokio::{
    io::AsyncReadExt as _,
    net::{UnixListener, UnixStream},
    sync::{Mutex, Semaphore, mpsc, watch},
    task::AbortHandle,
};

use crate::process;

/// The name of the socket in the directory that the sandbox sees as `/run/cynode`.
const SOCKET: &str = "control.sock";
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Parked connections of one agent, which normally opens few.
const MAX_PARKED: usize = 16;
/// Concurrent connections that have not sent a hello.
const MAX_UNGREETED: usize = 32;
/// How long a request waits for a parked connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("failed to open the control socket in {directory}")]
    Listen {
        directory: PathBuf,
        source: io::Error,
    },
    #[error(
        "the agent in the sandbox did not offer a connection within {} s",
        CONNECTION_TIMEOUT.as_secs()
    )]
    NoConnection,
    #[error("the agent disconnected")]
    Gone,
    #[error("the agent has no such exec")]
    NoSuchExec,
    #[error("the agent did not read for {} s", .0.as_secs())]
    Stalled(Duration),
    #[error("the request has {size} bytes, but this session's agent accepts {limit}")]
    TooLarge { size: usize, limit: usize },
    #[error("the agent violated the protocol: {0}")]
    Protocol(String),
}

/// The container's process 1, by process id and start time, so that a reused id is not mistaken for
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct InitProcess {
    pub(crate) pid: i32,
    pub(crate) start_time: u64,
}

impl InitProcess {
    pub(crate) fn of(pid: i32) -> Option<Self> {
        Some(Self {
            pid,
            start_time: process::start_time(pid).ok()??,
        })
    }

    /// Returns false only if the process is known to be gone.
    pub(crate) fn is_alive(self) -> bool {
        process::start_time(self.pid).map_or(true, |start_time| start_time == Some(self.start_time))
    }
}

/// A connection after the hello.
#[derive(Debug)]
pub(crate) struct AgentConnection {
    pub(crate) stream: UnixStream,
    pub(crate) decoder: Decoder,
    /// Largest frame that the agent accepts.
    pub(crate) max_frame: usize,
    /// The newest version of encoded patches that the agent reads; 0 if it reads diffs only.
    pub(crate) encoded_patches: u32,
    /// The newest version of the runner's protocol that the agent relays; 0 if it has no runner.
    pub(crate) runner: u32,
}

#[derive(Debug)]
struct LinkState {
    /// Requests take parked connections in FIFO order.
    parked: Mutex<mpsc::Receiver<AgentConnection>>,
    park: mpsc::Sender<AgentConnection>,
    /// True while the agent's watch connection is open.
    present: watch::Sender<bool>,
    /// The version of the preamble that the agent's listeners send; 0 if it has none.
    listeners: AtomicU8,
    init: watch::Sender<Option<InitProcess>>,
}

#[derive(Debug)]
pub(crate) struct AgentLink {
    shared: Arc<LinkState>,
    accepting: AbortHandle,
}

impl Drop for AgentLink {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl AgentLink {
    /// Opens the socket in `directory`. Connections wait until the container's process is known.
    pub(crate) fn listen(directory: &Path, init: Option<InitProcess>) -> Result<Self, LinkError> {
        let failed = |source| LinkError::Listen {
            directory: directory.to_owned(),
            source,
        };
        let listener = bind(directory, SOCKET).map_err(failed)?;
        let (park, parked) = mpsc::channel(MAX_PARKED);
        let shared = Arc::new(LinkState {
            parked: Mutex::new(parked),
            park,
            present: watch::Sender::new(false),
            listeners: AtomicU8::new(0),
            init: watch::Sender::new(init),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared))).abort_handle();
        Ok(Self { shared, accepting })
    }

    pub(crate) fn set_init(&self, init: InitProcess) {
        self.shared.init.send_replace(Some(init));
    }

    /// Waits until the agent is connected; returns false on timeout.
    pub(crate) async fn present(&self, limit: Duration) -> bool {
        let mut present = self.shared.present.subscribe();
        matches!(
            tokio::time::timeout(limit, present.wait_for(|present| *present)).await,
            Ok(Ok(_))
        )
    }

    /// Returns whether the agent forwards connections to proxies in a way that this worker knows.
    /// Known once the agent is present.
    pub(crate) fn has_listeners(&self) -> bool {
        self.shared.listeners.load(Ordering::Relaxed) == proxy::VERSION
    }

    /// Waits until a connected agent has disconnected.
    pub(crate) async fn absent(&self) {
        let mut present = self.shared.present.subscribe();
        drop(present.wait_for(|present| *present).await);
        drop(present.wait_for(|present| !*present).await);
    }

    /// Takes a parked connection.
    pub(crate) async fn take(&self) -> Result<AgentConnection, LinkError> {
        let taking = async {
            let mut parked = self.shared.parked.lock().await;
            while let Some(connection) = parked.recv().await {
                // A parked connection is silent; one that is readable is closed or misbehaves.
                if is_quiet(&connection.stream) {
                    return Ok(connection);
                }
            }
            Err(LinkError::Gone)
        };
        tokio::time::timeout(CONNECTION_TIMEOUT, taking)
            .await
            .unwrap_or(Err(LinkError::NoConnection))
    }
}

/// Binds through `/proc/self/fd`: socket paths are limited to 107 bytes, and state directories can
/// be longer.
pub(crate) fn bind(directory: &Path, name: &str) -> io::Result<UnixListener> {
    use rustix::fs::{Mode, OFlags};
    let handle = rustix::fs::open(
        directory,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let path = directory.join(name);
    match fs_err::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(format!(
        "/proc/self/fd/{}/{name}",
        std::os::fd::AsRawFd::as_raw_fd(&handle)
    ))?;
    // Any process in the sandbox may connect; who is served depends on the peer check of the
    // socket. On the host, the parent directories are not accessible.
    fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
    Ok(listener)
}

async fn accept(listener: UnixListener, shared: Arc<LinkState>) {
    let ungreeted = Arc::new(Semaphore::new(MAX_UNGREETED));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "Failed to accept on a control socket.");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Peers other than process 1 are closed at once, before they cost anything. While the
        // container starts, process 1 is not known yet, and connections wait.
        let init = *shared.init.borrow();
        let is_init_known = init.is_some();
        if is_init_known && !is_init(&stream, init) {
            metrics::counter!("cynode_control_strangers_total").increment(1);
            continue;
        }
        let Ok(permit) = Arc::clone(&ungreeted).try_acquire_owned() else {
            continue;
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let greeting = greet(stream, &shared, is_init_known);
            let greeted = tokio::time::timeout(HELLO_TIMEOUT, greeting).await;
            drop(permit);
            match greeted {
                Ok(Ok((Role::Watch, connection))) => {
                    shared.present.send_replace(true);
                    watch_agent(connection).await;
                    shared.present.send_replace(false);
                }
                // Connections beyond the limit are closed.
                Ok(Ok((Role::Request, connection))) => drop(shared.park.try_send(connection)),
                Ok(Err(error)) => tracing::debug!(%error, "Rejected a control connection."),
                Err(_) => {}
            }
        });
    }
}

fn is_quiet(stream: &UnixStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// Checks the peer's credentials, which the kernel recorded on connect.
fn is_init(stream: &UnixStream, init: Option<InitProcess>) -> bool {
    let Ok(credentials) = rustix::net::sockopt::socket_peercred(stream.as_fd()) else {
        return false;
    };
    init.is_some_and(|init| credentials.pid.as_raw_nonzero().get() == init.pid && init.is_alive())
}

/// `checked`: the peer has already been identified as process 1.
async fn greet(
    stream: UnixStream,
    shared: &LinkState,
    checked: bool,
) -> Result<(Role, AgentConnection), LinkError> {
    let mut init_changes = shared.init.subscribe();
    let init = *init_changes
        .wait_for(Option::is_some)
        .await
        .map_err(|_| LinkError::Gone)?;
    if !checked && !is_init(&stream, init) {
        metrics::counter!("cynode_control_strangers_total").increment(1);
        return Err(LinkError::Protocol("the peer is not process 1".to_owned()));
    }
    let mut connection = AgentConnection {
        stream,
        decoder: Decoder::new(MAX_AGENT_FRAME),
        max_frame: OLDEST_WORKER_FRAME,
        encoded_patches: 0,
        runner: 0,
    };
    match connection.read().await? {
        Frame::Json(json) => match serde_json::from_slice(&json) {
            Ok(Reply::Hello(Hello {
                protocol: OLDEST_PROTOCOL..=PROTOCOL,
                role,
                max_frame,
                encoded_patches,
                runner,
                listeners,
                ..
            })) => {
                let listeners = listeners.unwrap_or_default();
                shared.listeners.store(listeners, Ordering::Relaxed);
                connection.encoded_patches = encoded_patches.unwrap_or_default();
                connection.runner = runner.unwrap_or_default();
                connection.max_frame = max_frame
                    .unwrap_or(OLDEST_WORKER_FRAME)
                    .min(MAX_WORKER_FRAME);
                Ok((role, connection))
            }
            Ok(Reply::Hello(hello)) => Err(LinkError::Protocol(format!(
                "protocol {} is not supported",
                hello.protocol
            ))),
            _ => Err(LinkError::Protocol("no hello".to_owned())),
        },
        _ => Err(LinkError::Protocol("no hello".to_owned())),
    }
}

async fn watch_agent(mut connection: AgentConnection) {
    let mut ignored = [0; 64];
    while matches!(connection.stream.read(&mut ignored).await, Ok(count) if count > 0) {}
}

impl AgentConnection {
    /// Reads the next frame. An agent that exceeds its limits is disconnected.
    pub(crate) async fn read(&mut self) -> Result<Frame, LinkError> {
        loop {
            if let Some(frame) = self
                .decoder
                .next_frame()
                .map_err(|error| LinkError::Protocol(error.to_string()))?
            {
                return Ok(frame);
            }
            self.stream.readable().await.map_err(|_| LinkError::Gone)?;
            let mut buffer = vec![0; 64 * 1024];
            match self.stream.try_read(&mut buffer) {
                Ok(0) => return Err(LinkError::Gone),
                Ok(count) => self.decoder.extend(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(LinkError::Gone),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cynode_sba_proto::encode_message;
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[tokio::test]
    async fn what_an_agent_does_not_announce_it_does_not_have() {
        for (announced, expected) in [
            (None, (OLDEST_WORKER_FRAME, 0, 0, 0)),
            (Some(3), (3, 3, 3, 3)),
        ] {
            let (worker, mut agent) = UnixStream::pair().expect("a pair");
            let (park, parked) = mpsc::channel(1);
            let shared = LinkState {
                parked: Mutex::new(parked),
                park,
                present: watch::Sender::new(false),
                listeners: AtomicU8::new(0),
                init: watch::Sender::new(InitProcess::of(1)),
            };
            let hello = Reply::Hello(Hello {
                protocol: PROTOCOL,
                version: "1".to_owned(),
                role: Role::Request,
                max_frame: announced,
                encoded_patches: announced.and_then(|version| version.try_into().ok()),
                runner: announced.and_then(|version| version.try_into().ok()),
                listeners: announced.and_then(|version| version.try_into().ok()),
            });
            let mut bytes = Vec::new();
            encode_message(&hello, &mut bytes);
            agent.write_all(&bytes).await.expect("sent");
            let (_, connection) = greet(worker, &shared, true).await.expect("greeted");
            let read = (
                connection.max_frame,
                connection.encoded_patches,
                connection.runner,
                shared.listeners.load(Ordering::Relaxed),
            );
            assert_eq!(read, expected);
        }
    }
}
