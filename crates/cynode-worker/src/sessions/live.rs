//! A session's running container.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use cynode_api::ErrorCode;
use cynode_service::ApiError;
use parking_lot::Mutex;

use crate::{
    process,
    runtime::Runtime,
    sandbox::{AgentLink, InitProcess},
};

#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) container: String,
    pub(crate) init: InitProcess,
    pub(crate) runtime: Arc<dyn Runtime>,
    /// Absent when commands run by the runtime's own exec.
    link: Option<AgentLink>,
    /// Set when the container is no longer wanted, before it is removed.
    closed: AtomicBool,
    active: AtomicUsize,
    last_active: Mutex<Instant>,
    oom_kills: AtomicU64,
}

impl Live {
    pub(crate) fn new(container: String, init: InitProcess, runtime: Arc<dyn Runtime>, link: Option<AgentLink>) -> Arc<Self> {
        Arc::new(Self {
            container,
            init,
            runtime,
            link,
            closed: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            last_active: Mutex::new(Instant::now()),
            oom_kills: AtomicU64::new(process::oom_kills(init.pid).unwrap_or(0)),
        })
    }

    pub(crate) fn link(&self) -> Result<&AgentLink, ApiError> {
        self.link.as_ref().ok_or_else(|| ApiError::new(ErrorCode::AgentRequired, "worker.exec_via is \"runtime\": there is no agent in this sandbox"))
    }

    pub(crate) fn has_agent(&self) -> bool {
        self.link.is_some()
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Whether nothing of it can answer any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_closed() || !self.init.is_alive()
    }

    /// Something goes on while the guard lives.
    pub(crate) fn activity(self: &Arc<Self>) -> Activity {
        self.active.fetch_add(1, Ordering::SeqCst);
        Activity(Arc::clone(self))
    }

    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn last_active(&self) -> Instant {
        *self.last_active.lock()
    }

    /// Whether the kernel has killed something for memory since the last look.
    pub(crate) fn saw_oom_kill(&self) -> bool {
        process::oom_kills(self.init.pid).is_some_and(|count| self.oom_kills.swap(count, Ordering::SeqCst) < count)
    }

    /// The last means against a sandbox that does not obey.
    pub(crate) async fn kill_container(&self) {
        if !self.is_closed()
            && let Err(error) = self.runtime.kill(&self.container, "KILL").await
        {
            tracing::warn!(container = self.container, %error, "Killing a container failed.");
        }
    }
}

#[derive(Debug)]
pub(crate) struct Activity(Arc<Live>);

impl Drop for Activity {
    fn drop(&mut self) {
        *self.0.last_active.lock() = Instant::now();
        self.0.active.fetch_sub(1, Ordering::SeqCst);
    }
}
