//! The control socket of one sandbox.
//!
//! What must stay true: a connection counts only when its peer is the container's process 1, by the process id that the
//! kernel names. Whoever else connects from inside is turned away. All that is read is bounded, in size and in time.

use std::{
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use cynode_sba_proto::{
    Decoder, Frame, Hello, MAX_AGENT_FRAME, MAX_WORKER_FRAME, OLDEST_PROTOCOL, OLDEST_WORKER_FRAME,
    PROTOCOL, Reply, Role,
};
use tokio::{
    io::AsyncReadExt as _,
    net::{UnixListener, UnixStream},
    sync::{Mutex, Semaphore, mpsc, watch},
    task::AbortHandle,
};

use crate::process;

const HELLO: Duration = Duration::from_secs(5);
/// Parked connections kept; an agent opens few.
const MAX_PARKED: usize = 16;
/// Connections at once that have not said hello.
const MAX_UNGREETED: usize = 32;
/// How long a request waits for a parked connection.
const TAKE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("can't open the control socket in {directory}")]
    Listen {
        directory: PathBuf,
        source: io::Error,
    },
    #[error("the agent in the sandbox did not offer a connection within {} s", TAKE.as_secs())]
    NoConnection,
    #[error("the agent went away")]
    Gone,
    #[error("the agent knows no such exec")]
    NoSuchExec,
    #[error("the agent took nothing of what was sent to it for {} s", .0.as_secs())]
    Stalled(Duration),
    #[error("the agent of this session takes requests of {limit} bytes, and this one has {size}")]
    TooLarge { size: usize, limit: usize },
    #[error("the agent broke the protocol: {0}")]
    Protocol(String),
}

/// The container's process 1: its id and when it started, so that a reused id is not mistaken for it.
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

    /// False only when it is known to be gone.
    pub(crate) fn is_alive(self) -> bool {
        process::start_time(self.pid).map_or(true, |found| found == Some(self.start_time))
    }
}

/// A connection that has said hello.
#[derive(Debug)]
pub(crate) struct Greeted {
    pub(crate) stream: UnixStream,
    pub(crate) decoder: Decoder,
    /// Largest frame that the agent takes.
    pub(crate) max_frame: usize,
}

#[derive(Debug)]
struct Shared {
    /// Requests wait for connections in the order in which they came.
    parked: Mutex<mpsc::Receiver<Greeted>>,
    park: mpsc::Sender<Greeted>,
    /// Whether the agent's watch connection is open.
    present: watch::Sender<bool>,
    init: watch::Sender<Option<InitProcess>>,
}

#[derive(Debug)]
pub(crate) struct AgentLink {
    shared: Arc<Shared>,
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
        let listener = bind(directory).map_err(failed)?;
        let (park, parked) = mpsc::channel(MAX_PARKED);
        let shared = Arc::new(Shared {
            parked: Mutex::new(parked),
            park,
            present: watch::Sender::new(false),
            init: watch::Sender::new(init),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared))).abort_handle();
        Ok(Self { shared, accepting })
    }

    pub(crate) fn set_init(&self, init: InitProcess) {
        self.shared.init.send_replace(Some(init));
    }

    /// Waits until the agent is there.
    pub(crate) async fn present(&self, limit: Duration) -> bool {
        let mut present = self.shared.present.subscribe();
        matches!(
            tokio::time::timeout(limit, present.wait_for(|present| *present)).await,
            Ok(Ok(_))
        )
    }

    /// Waits until the agent, once there, is gone.
    pub(crate) async fn absent(&self) {
        let mut present = self.shared.present.subscribe();
        drop(present.wait_for(|present| *present).await);
        drop(present.wait_for(|present| !*present).await);
    }

    /// A parked connection.
    pub(crate) async fn take(&self) -> Result<Greeted, LinkError> {
        let taking = async {
            let mut parked = self.shared.parked.lock().await;
            while let Some(connection) = parked.recv().await {
                // A parked connection has nothing to say; one that is readable is closed or confused.
                if is_quiet(&connection.stream) {
                    return Ok(connection);
                }
            }
            Err(LinkError::Gone)
        };
        tokio::time::timeout(TAKE, taking)
            .await
            .unwrap_or(Err(LinkError::NoConnection))
    }
}

/// Binds through `/proc/self/fd`, because a socket's own path may have only 107 bytes and state directories can be long.
fn bind(directory: &Path) -> io::Result<UnixListener> {
    use rustix::fs::{Mode, OFlags};
    let handle = rustix::fs::open(
        directory,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let path = directory.join("control.sock");
    match fs_err::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(format!(
        "/proc/self/fd/{}/control.sock",
        std::os::fd::AsRawFd::as_raw_fd(&handle)
    ))?;
    // Anybody inside may connect; the peer check sorts them out. On the host the directories above are closed.
    fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
    Ok(listener)
}

async fn accept(listener: UnixListener, shared: Arc<Shared>) {
    let ungreeted = Arc::new(Semaphore::new(MAX_UNGREETED));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "Accepting on a control socket failed.");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Whoever is not process 1 is closed here at once, before it costs anything. While the container starts, its
        // process is not known yet, and connections wait for that.
        let init = *shared.init.borrow();
        let known = init.is_some();
        if known && !is_init(&stream, init) {
            metrics::counter!("cynode_control_strangers_total").increment(1);
            continue;
        }
        let Ok(permit) = Arc::clone(&ungreeted).try_acquire_owned() else {
            continue;
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let greeted = tokio::time::timeout(HELLO, greet(stream, &shared, known)).await;
            drop(permit);
            match greeted {
                Ok(Ok((Role::Watch, connection))) => {
                    shared.present.send_replace(true);
                    watch_agent(connection).await;
                    shared.present.send_replace(false);
                }
                // An agent parks few; what is beyond the limit is closed.
                Ok(Ok((Role::Request, connection))) => drop(shared.park.try_send(connection)),
                Ok(Err(error)) => tracing::debug!(%error, "Turned a control connection away."),
                Err(_) => {}
            }
        });
    }
}

fn is_quiet(stream: &UnixStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// The peer as the kernel recorded it when it connected.
fn is_init(stream: &UnixStream, init: Option<InitProcess>) -> bool {
    let Ok(credentials) = rustix::net::sockopt::socket_peercred(stream.as_fd()) else {
        return false;
    };
    init.is_some_and(|init| credentials.pid.as_raw_nonzero().get() == init.pid && init.is_alive())
}

/// `checked`: the peer is known to be process 1.
async fn greet(
    stream: UnixStream,
    shared: &Shared,
    checked: bool,
) -> Result<(Role, Greeted), LinkError> {
    let mut known = shared.init.subscribe();
    let init = *known
        .wait_for(Option::is_some)
        .await
        .map_err(|_| LinkError::Gone)?;
    if !checked && !is_init(&stream, init) {
        metrics::counter!("cynode_control_strangers_total").increment(1);
        return Err(LinkError::Protocol("the peer is not process 1".to_owned()));
    }
    let mut connection = Greeted {
        stream,
        decoder: Decoder::new(MAX_AGENT_FRAME),
        max_frame: OLDEST_WORKER_FRAME,
    };
    match connection.read().await? {
        Frame::Json(json) => match serde_json::from_slice(&json) {
            Ok(Reply::Hello(Hello {
                protocol: OLDEST_PROTOCOL..=PROTOCOL,
                role,
                max_frame,
                ..
            })) => {
                connection.max_frame = max_frame
                    .unwrap_or(OLDEST_WORKER_FRAME)
                    .min(MAX_WORKER_FRAME);
                Ok((role, connection))
            }
            Ok(Reply::Hello(hello)) => Err(LinkError::Protocol(format!(
                "protocol {} is not served",
                hello.protocol
            ))),
            _ => Err(LinkError::Protocol("no hello".to_owned())),
        },
        _ => Err(LinkError::Protocol("no hello".to_owned())),
    }
}

async fn watch_agent(mut connection: Greeted) {
    let mut ignored = [0; 64];
    while matches!(connection.stream.read(&mut ignored).await, Ok(count) if count > 0) {}
}

impl Greeted {
    /// The next frame. The agent keeps within the limits that it was told, or it is cut off.
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
