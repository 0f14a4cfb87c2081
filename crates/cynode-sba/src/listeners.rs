//! The listeners on loopback: a child of process 1 that forwards connections to the worker.
//!
//! Tools that only speak TCP reach the worker's proxies through it. It is a fork of this program
//! without any state of process 1, so it costs little memory, and hostile code that kills or stops
//! it gains nothing: process 1 starts another. It parses nothing and decides nothing; the worker
//! does, and any process of the sandbox may use the worker's socket directly.
//!
//! Invariants: process 1 owns the child, so the sweep after an exec spares it. A connection that is
//! not read blocks only itself, and the number of connections is bounded. A port that a program of
//! the sandbox has taken is left to that program and retried.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use cynode_sba_proto::proxy::{Listener, PROXY_SOCKET};
use rustix::pipe::PipeFlags;
use tokio::{
    io::{AsyncWriteExt as _, Interest, copy},
    net::{TcpListener, TcpStream, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::Instant,
};

use crate::{
    processes::Processes,
    sys::{self, Fork},
};

/// Connections that are forwarded at once; more wait.
const MAX_CONNECTIONS: usize = 64;
/// How long to try to reach the worker, which may be restarting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may go on sending after the worker has closed its end.
const LINGER: Duration = Duration::from_secs(2);
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(10);
const LONGEST_RETRY_DELAY: Duration = Duration::from_secs(2);
/// How long process 1 waits for the first child before it serves the worker.
const READY_TIMEOUT: Duration = Duration::from_secs(1);
/// A child that ran for longer is started again at once.
const LONG_LIFE: Duration = Duration::from_secs(10);

/// Process 1's view of the child.
#[derive(Debug)]
pub(crate) struct Listeners {
    child: Option<Child>,
    /// Closed by the child once it listens.
    ready: Option<OwnedFd>,
    next_start: Instant,
    delay: Duration,
}

#[derive(Debug)]
struct Child {
    pid: i32,
    started: Instant,
    ended: oneshot::Receiver<i32>,
}

impl Listeners {
    pub(crate) fn new() -> Self {
        Self {
            child: None,
            ready: None,
            next_start: Instant::now(),
            delay: FIRST_RETRY_DELAY,
        }
    }

    /// Waits until the child is to be started. Can be canceled and called again.
    pub(crate) async fn due(&mut self) {
        if let Some(child) = &mut self.child {
            let _status = (&mut child.ended).await;
            self.delay = if child.started.elapsed() >= LONG_LIFE {
                FIRST_RETRY_DELAY
            } else {
                (self.delay * 2).min(LONGEST_RETRY_DELAY)
            };
            self.next_start = Instant::now() + self.delay;
            self.child = None;
        }
        tokio::time::sleep_until(self.next_start).await;
    }

    /// Waits until a child that was just started listens.
    pub(crate) async fn ready(&mut self) {
        if let Some(ready) = self.ready.take()
            && let Ok(ready) = sys::watch(ready, Interest::READABLE)
        {
            drop(tokio::time::timeout(READY_TIMEOUT, ready.readable()).await);
        }
    }

    /// Starts the child. Outside of the async runtime, because the child has one of its own. If
    /// that fails, it is due again later.
    pub(crate) fn start(&mut self, processes: &Processes) {
        let pipe = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        let forked = pipe
            .map_err(io::Error::from)
            .and_then(|(ready, ready_in)| Ok((sys::fork()?, ready, ready_in)));
        match forked {
            Ok((Fork::Child, _, ready)) => {
                let run = std::panic::AssertUnwindSafe(|| run(Path::new(PROXY_SOCKET), ready));
                let _ended = std::panic::catch_unwind(run);
                sys::exit_now(70)
            }
            Ok((Fork::Parent(pid), ready, _)) => {
                self.ready = Some(ready);
                self.child = Some(Child {
                    pid,
                    started: Instant::now(),
                    ended: processes.adopt(pid),
                });
            }
            Err(_) => {
                self.delay = (self.delay * 2).min(LONGEST_RETRY_DELAY);
                self.next_start = Instant::now() + self.delay;
            }
        }
    }

    /// Kills a child that is stopped: only code in the sandbox does that, and it would stay so.
    pub(crate) fn kill_stopped(&self) {
        if let Some(child) = &self.child
            && sys::is_stopped(child.pid)
        {
            drop(sys::kill(child.pid, libc::SIGKILL));
        }
    }
}

/// The main function of the child.
fn run(socket: &Path, ready: OwnedFd) {
    sys::block_all_signals();
    sys::set_name(c"cynode-listen");
    sys::close_all_but(&[ready.as_raw_fd()]);
    let listeners: Vec<_> = Listener::ALL
        .into_iter()
        .flat_map(|listener| {
            [
                IpAddr::V4(Ipv4Addr::LOCALHOST),
                IpAddr::V6(Ipv6Addr::LOCALHOST),
            ]
            .map(|address| {
                let address = SocketAddr::new(address, listener.port());
                (listener, address, std::net::TcpListener::bind(address))
            })
        })
        .collect();
    drop(ready);
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
    else {
        return;
    };
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let local = tokio::task::LocalSet::new();
    let socket: Rc<Path> = socket.into();
    for (listener, address, bound) in listeners {
        let (socket, permits) = (Rc::clone(&socket), Arc::clone(&permits));
        local.spawn_local(async move {
            if let Some(accepting) = retry(address, bound).await {
                accept(listener, accepting, socket, permits).await;
            }
        });
    }
    runtime.block_on(local);
}

/// Binds an address until that succeeds; returns `None` if there is no such address. `bound` is the
/// first attempt.
async fn retry(
    address: SocketAddr,
    mut bound: io::Result<std::net::TcpListener>,
) -> Option<TcpListener> {
    let mut delay = FIRST_RETRY_DELAY;
    loop {
        let listening = bound.and_then(|bound| {
            bound.set_nonblocking(true)?;
            TcpListener::from_std(bound)
        });
        match listening {
            Ok(listening) => return Some(listening),
            Err(error) if is_absent(&error) => return None,
            Err(_) => tokio::time::sleep(delay).await,
        }
        delay = (delay * 2).min(LONGEST_RETRY_DELAY);
        bound = std::net::TcpListener::bind(address);
    }
}

/// Forwards every connection.
async fn accept(
    listener: Listener,
    accepting: TcpListener,
    socket: Rc<Path>,
    permits: Arc<Semaphore>,
) {
    loop {
        let Ok((client, _)) = accepting.accept().await else {
            // Most likely out of descriptors.
            tokio::time::sleep(FIRST_RETRY_DELAY).await;
            continue;
        };
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
            return;
        };
        tokio::task::spawn_local(serve(listener, client, Rc::clone(&socket), permit));
    }
}

/// Whether the sandbox has no such address: a kernel without IPv6.
fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT)
    )
}

async fn serve(
    listener: Listener,
    client: TcpStream,
    socket: Rc<Path>,
    _permit: OwnedSemaphorePermit,
) {
    if let Ok(worker) = tokio::time::timeout(CONNECT_TIMEOUT, connect(listener, &socket)).await {
        drop(client.set_nodelay(true));
        forward(client, worker).await;
    }
}

/// Connects to the worker, which does not listen while it restarts.
async fn connect(listener: Listener, socket: &Path) -> UnixStream {
    let mut delay = FIRST_RETRY_DELAY;
    loop {
        if let Ok(mut stream) = UnixStream::connect(socket).await
            && stream.write_all(&listener.preamble()).await.is_ok()
        {
            return stream;
        }
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(LONGEST_RETRY_DELAY);
    }
}

/// Copies in both directions until both have ended. A client that closes only its own direction
/// still gets the answer.
async fn forward(mut client: TcpStream, mut worker: UnixStream) {
    let (mut from_client, mut to_client) = client.split();
    let (mut from_worker, mut to_worker) = worker.split();
    let mut upload = std::pin::pin!(async {
        drop(copy(&mut from_client, &mut to_worker).await);
        drop(to_worker.shutdown().await);
    });
    let mut download = std::pin::pin!(async {
        drop(copy(&mut from_worker, &mut to_client).await);
        drop(to_client.shutdown().await);
    });
    tokio::select! {
        () = &mut upload => download.await,
        () = &mut download => drop(tokio::time::timeout(LINGER, upload).await),
    }
}

#[cfg(test)]
mod tests;
