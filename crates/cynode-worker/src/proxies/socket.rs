//! The socket of one sandbox's proxies.
//!
//! Invariant: a connection is served only if its peer is a process in the pid namespace of the
//! sandbox's process 1, by the process id from the kernel. The socket is mounted into one sandbox
//! only; the check also keeps out processes of the host.

use std::{
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Proxies, connection, pace::RequestRate, peer::Owner};
use crate::{
    process,
    sandbox::{InitProcess, bind},
    sessions::{Live, SessionEntry},
};

/// The name of the socket in the directory that the sandbox sees as `/run/cynode`.
const SOCKET: &str = "proxy.sock";
/// Connections that a sandbox may have in any case.
const GUARANTEED_CONNECTIONS: usize = 8;
/// Connections of a sandbox, while others leave room.
const MAX_CONNECTIONS: usize = 64;

/// One sandbox's proxies. They end when this is dropped or closed.
#[derive(Debug)]
pub(crate) struct ProxySocket {
    shared: Arc<SandboxProxies>,
    _closing: DropGuard,
}

#[derive(Debug)]
pub(super) struct SandboxProxies {
    pub(super) proxies: Arc<Proxies>,
    init: Mutex<Option<KnownInit>>,
    owner: Mutex<Option<Owner>>,
    guaranteed: Arc<Semaphore>,
    own_extra: Arc<Semaphore>,
    pub(super) rate: RequestRate,
    connection_rate: RequestRate,
    pub(super) closing: CancellationToken,
}

/// Process 1 and its pid namespace, as `/proc/<pid>/ns/pid` names it.
#[derive(Debug)]
struct KnownInit {
    init: InitProcess,
    namespace: PathBuf,
}

/// The permits of a connection.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    _own: OwnedSemaphorePermit,
    _extra: Option<OwnedSemaphorePermit>,
}

impl ProxySocket {
    /// Opens the socket in `directory`. Nobody is served until the container's process is known
    /// and the sandbox belongs to someone.
    pub(crate) fn listen(directory: &Path, proxies: &Arc<Proxies>) -> io::Result<Self> {
        let listener = bind(directory, SOCKET)?;
        let closing = CancellationToken::new();
        let shared = Arc::new(SandboxProxies {
            proxies: Arc::clone(proxies),
            init: Mutex::default(),
            owner: Mutex::default(),
            guaranteed: Arc::new(Semaphore::new(GUARANTEED_CONNECTIONS)),
            own_extra: Arc::new(Semaphore::new(MAX_CONNECTIONS - GUARANTEED_CONNECTIONS)),
            rate: RequestRate::default(),
            connection_rate: RequestRate::default(),
            closing: closing.clone(),
        });
        let accepting = accept(listener, Arc::clone(&shared));
        let closed = closing.clone();
        tokio::spawn(async move { closed.run_until_cancelled(accepting).await });
        Ok(Self {
            shared,
            _closing: closing.drop_guard(),
        })
    }

    pub(crate) fn set_init(&self, init: InitProcess) {
        let known = process::pid_namespace(init.pid)
            .filter(|namespace| process::own_pid_namespace().as_ref() != Some(namespace))
            .map(|namespace| KnownInit { init, namespace });
        if known.is_none() {
            tracing::debug!(
                pid = init.pid,
                "A sandbox without a pid namespace of its own has no proxies."
            );
        }
        *self.shared.init.lock() = known;
    }

    /// Serves the sandbox on behalf of the session or job that it belongs to from now on.
    pub(crate) fn set_owner(&self, entry: &Arc<SessionEntry>, live: &Arc<Live>) {
        *self.shared.owner.lock() = Some(Owner::new(entry, live));
    }

    /// Ends all connections: the sandbox is about to be removed.
    pub(crate) fn close(&self) {
        self.shared.closing.cancel();
    }
}

impl SandboxProxies {
    pub(super) fn owner(&self) -> Option<(Arc<SessionEntry>, Arc<Live>)> {
        self.owner.lock().as_ref().and_then(Owner::upgrade)
    }

    /// Whether the peer is a process of this sandbox, by the credentials that the kernel recorded
    /// on connect. A peer that has exited can't be told from others and is refused.
    fn is_inside(&self, stream: &UnixStream) -> bool {
        let Ok(credentials) = rustix::net::sockopt::socket_peercred(stream.as_fd()) else {
            return false;
        };
        let namespace = process::pid_namespace(credentials.pid.as_raw_nonzero().get());
        let known = self.init.lock();
        known.as_ref().is_some_and(|known| {
            namespace.as_ref() == Some(&known.namespace) && known.init.is_alive()
        })
    }

    fn permit(&self) -> Option<ConnectionPermit> {
        let own = |semaphore: &Arc<Semaphore>| Arc::clone(semaphore).try_acquire_owned().ok();
        if let Some(own) = own(&self.guaranteed) {
            return Some(ConnectionPermit {
                _own: own,
                _extra: None,
            });
        }
        Some(ConnectionPermit {
            _own: own(&self.own_extra)?,
            _extra: Some(own(&self.proxies.extra)?),
        })
    }
}

/// Serves connections, at a rate: beyond it they wait in the socket's queue, where they cost the
/// sandbox and not the worker.
async fn accept(listener: UnixListener, shared: Arc<SandboxProxies>) {
    loop {
        shared.connection_rate.wait().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "Failed to accept on the socket of a sandbox's proxies.");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        if !shared.is_inside(&stream) {
            metrics::counter!("cynode_proxy_strangers_total").increment(1);
            continue;
        }
        let Some(permit) = shared.permit() else {
            metrics::counter!("cynode_proxy_connections_refused_total").increment(1);
            continue;
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let closing = shared.closing.clone();
            let serving = connection::serve(stream, shared, permit);
            closing.run_until_cancelled(serving).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncReadExt as _, time::Instant};

    use super::super::pace::{BURST, REQUEST_INTERVAL};
    use super::*;

    /// The clock is virtual: it advances only while the socket makes connections wait.
    #[tokio::test(start_paused = true)]
    // invariant: no-starvation
    async fn connections_are_accepted_at_a_rate() {
        const MORE: u32 = 50;
        let directory = tempfile::tempdir().expect("a directory");
        let proxies = Arc::new(Proxies::default());
        let _socket = ProxySocket::listen(directory.path(), &proxies).expect("listens");
        let began = Instant::now();
        // Nobody is inside yet, so every accepted connection is closed at once.
        for _ in 0..BURST + MORE {
            let stream = UnixStream::connect(directory.path().join(SOCKET)).await;
            let read = stream.expect("connected").read(&mut [0]).await;
            assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
        }
        assert!(
            began.elapsed() >= REQUEST_INTERVAL * (MORE - 1),
            "{:?}",
            began.elapsed()
        );
    }
}
