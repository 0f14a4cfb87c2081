//! A session's running container.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use cynode_api::{ErrorCode, file_limits::MAX_WATCHES};
use cynode_service::ApiError;
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::sync::watch;

use super::SessionEntry;
use crate::{
    disk::DiskUsage,
    process,
    proxies::ProxySocket,
    runtime::Runtime,
    sandbox::{AgentLink, InitProcess},
};

/// How often a blocked task checks that the sandbox still exists.
const ALIVE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A watch of files; counts until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenWatch(Arc<Live>);

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.0.watches.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) container: String,
    pub(crate) init: InitProcess,
    pub(crate) runtime: Arc<dyn Runtime>,
    /// Absent when commands run through the runtime's exec call.
    link: Option<AgentLink>,
    /// Absent without an agent, which listens for it.
    proxies: Option<ProxySocket>,
    /// Set when the container is about to be removed.
    closed: AtomicBool,
    active: AtomicUsize,
    last_active: Mutex<Instant>,
    oom_kills: AtomicU64,
    /// When everything in it was last killed to protect the node's disk.
    stopped: Mutex<Option<OffsetDateTime>>,
    stopping: AtomicUsize,
    /// Usage of its disk before anything ran in it; unknown for an adopted sandbox.
    initial_usage: Option<DiskUsage>,
    /// Set while the node's disk is so full that output must wait.
    output_blocked: watch::Sender<bool>,
    /// Held by the edit in progress: the agent checks a precondition and replaces the file in two
    /// steps.
    pub(crate) edits: tokio::sync::Mutex<()>,
    /// Watches of files that are open.
    watches: AtomicUsize,
}

impl Live {
    pub(crate) fn new(
        container: String,
        init: InitProcess,
        runtime: Arc<dyn Runtime>,
        link: Option<AgentLink>,
        proxies: Option<ProxySocket>,
        initial_usage: Option<DiskUsage>,
    ) -> Arc<Self> {
        Arc::new(Self {
            initial_usage,
            container,
            init,
            runtime,
            link,
            proxies,
            closed: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            last_active: Mutex::new(Instant::now()),
            oom_kills: AtomicU64::new(process::oom_kills(init.pid).unwrap_or(0)),
            stopped: Mutex::new(None),
            stopping: AtomicUsize::new(0),
            output_blocked: watch::Sender::new(false),
            edits: tokio::sync::Mutex::new(()),
            watches: AtomicUsize::new(0),
        })
    }

    /// Opens another watch of files, if the session may have one more.
    pub(crate) fn open_watch(self: &Arc<Self>) -> Option<OpenWatch> {
        let more = |open: usize| (open < MAX_WATCHES).then_some(open + 1);
        let opened = self
            .watches
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        opened.ok().map(|_| OpenWatch(Arc::clone(self)))
    }

    pub(crate) fn link(&self) -> Result<&AgentLink, ApiError> {
        self.link.as_ref().ok_or_else(|| {
            ApiError::new(
                ErrorCode::AgentRequired,
                "worker.exec_via is \"runtime\": there is no agent in this sandbox",
            )
        })
    }

    pub(crate) fn has_agent(&self) -> bool {
        self.link.is_some()
    }

    /// Returns whether processes of the sandbox reach proxies on loopback.
    pub(super) fn has_proxies(&self) -> bool {
        let has_listeners = self.link.as_ref().is_some_and(AgentLink::has_listeners);
        self.proxies.is_some() && has_listeners
    }

    /// Serves the sandbox's proxies on behalf of the session or job that it belongs to.
    pub(super) fn serve_proxies(self: &Arc<Self>, entry: &Arc<SessionEntry>) {
        if let Some(proxies) = &self.proxies {
            proxies.set_init(self.init);
            proxies.set_owner(entry, self);
        }
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        if let Some(proxies) = &self.proxies {
            proxies.close();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Returns whether the sandbox can no longer answer.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_closed() || !self.init.is_alive()
    }

    /// Marks the session active while the guard lives.
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

    /// Returns whether the kernel's OOM killer has killed a process since the last call.
    pub(crate) fn saw_oom_kill(&self) -> bool {
        process::oom_kills(self.init.pid)
            .is_some_and(|count| self.oom_kills.swap(count, Ordering::SeqCst) < count)
    }

    /// Records that everything in the sandbox is about to be killed because it fills the node's
    /// disk.
    pub(super) fn begin_stop(&self) {
        *self.stopped.lock() = Some(OffsetDateTime::now_utc());
        self.stopping.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn end_stop(&self) {
        self.stopping.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst) > 0
    }

    /// Returns whether such a kill happened after `moment`.
    pub(crate) fn was_stopped_after(&self, moment: OffsetDateTime) -> bool {
        self.stopped.lock().is_some_and(|stopped| stopped >= moment)
    }

    pub(super) const fn initial_usage(&self) -> Option<DiskUsage> {
        self.initial_usage
    }

    pub(super) fn block_output(&self, blocked: bool) {
        self.output_blocked
            .send_if_modified(|now| std::mem::replace(now, blocked) != blocked);
    }

    /// Waits while the last of the node's disk is reserved for records. Unread output stays with
    /// the agent.
    pub(crate) async fn wait_for_output_space(&self) {
        if *self.output_blocked.borrow() {
            let mut blocked = self.output_blocked.subscribe();
            while !self.is_gone()
                && tokio::time::timeout(ALIVE_CHECK_INTERVAL, blocked.wait_for(|blocked| !*blocked))
                    .await
                    .is_err()
            {}
        }
    }

    /// Last resort against a sandbox that does not respond.
    pub(crate) async fn kill_container(&self) {
        if !self.is_closed()
            && let Err(error) = self.runtime.kill(&self.container, "KILL").await
        {
            tracing::warn!(container = self.container, %error, "Failed to kill a container.");
        }
    }
}

/// Guard that marks its session active.
#[derive(Debug)]
pub(crate) struct Activity(Arc<Live>);

impl Drop for Activity {
    fn drop(&mut self) {
        *self.0.last_active.lock() = Instant::now();
        self.0.active.fetch_sub(1, Ordering::SeqCst);
    }
}
