//! A session's running container.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use cynode_api::ErrorCode;
use cynode_service::ApiError;
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::sync::watch;

use crate::{
    disk::Claim,
    process,
    runtime::Runtime,
    sandbox::{AgentLink, InitProcess},
};

/// How often something that waits looks whether the sandbox is still there.
const LOOK: Duration = Duration::from_secs(1);

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
    /// When everything in it was last killed to save the node's disk.
    stopped: Mutex<Option<OffsetDateTime>>,
    stopping: AtomicUsize,
    /// What its disk had of the node's before anything ran in it; not known of one that was adopted.
    first_claim: Option<Claim>,
    /// Whether so little is left of the node's disk that output has to wait.
    no_room: watch::Sender<bool>,
}

impl Live {
    pub(crate) fn new(
        container: String,
        init: InitProcess,
        runtime: Arc<dyn Runtime>,
        link: Option<AgentLink>,
        first_claim: Option<Claim>,
    ) -> Arc<Self> {
        Arc::new(Self {
            first_claim,
            container,
            init,
            runtime,
            link,
            closed: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            last_active: Mutex::new(Instant::now()),
            oom_kills: AtomicU64::new(process::oom_kills(init.pid).unwrap_or(0)),
            stopped: Mutex::new(None),
            stopping: AtomicUsize::new(0),
            no_room: watch::Sender::new(false),
        })
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
        process::oom_kills(self.init.pid)
            .is_some_and(|count| self.oom_kills.swap(count, Ordering::SeqCst) < count)
    }

    /// Everything in it is about to be killed because it fills the node's disk.
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

    /// Whether everything in it was killed for that after this moment.
    pub(crate) fn was_stopped_after(&self, moment: OffsetDateTime) -> bool {
        self.stopped.lock().is_some_and(|stopped| stopped >= moment)
    }

    pub(super) const fn first_claim(&self) -> Option<Claim> {
        self.first_claim
    }

    pub(super) fn set_no_room(&self, no_room: bool) {
        self.no_room
            .send_if_modified(|now| std::mem::replace(now, no_room) != no_room);
    }

    /// Waits while the last of the node's disk is kept for records: what a command says stays with its agent.
    pub(crate) async fn room_for_output(&self) {
        if *self.no_room.borrow() {
            let mut no_room = self.no_room.subscribe();
            while !self.is_gone()
                && tokio::time::timeout(LOOK, no_room.wait_for(|no_room| !*no_room))
                    .await
                    .is_err()
            {}
        }
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
