//! Who sends a request to a proxy.

use std::sync::{Arc, Weak};

use cynode_api::{JobId, SessionId, TaskId};

use crate::sessions::{Live, SessionEntry};

/// The session or job that a sandbox belongs to.
#[derive(Debug)]
pub(super) struct Owner {
    entry: Weak<SessionEntry>,
    live: Weak<Live>,
}

impl Owner {
    pub(super) fn new(entry: &Arc<SessionEntry>, live: &Arc<Live>) -> Self {
        Self {
            entry: Arc::downgrade(entry),
            live: Arc::downgrade(live),
        }
    }

    pub(super) fn upgrade(&self) -> Option<(Arc<SessionEntry>, Arc<Live>)> {
        Some((self.entry.upgrade()?, self.live.upgrade()?))
    }
}

/// The sandbox that a request came from, as the kernel identified it. Nothing here is what the
/// sandbox says.
#[derive(Clone, Debug)]
pub(crate) struct ProxyPeer {
    /// The session, or the one that is a job's sandbox.
    pub(crate) session_id: SessionId,
    /// The job, if the sandbox belongs to one.
    pub(crate) job_id: Option<JobId>,
    pub(crate) task_id: TaskId,
    /// The id of this request, which refusals and records repeat.
    pub(crate) request_id: String,
    /// The sandbox's record, with its limits (`sandbox.record().session.limits`).
    #[allow(dead_code, reason = "for handlers of requests to models")]
    pub(crate) sandbox: Arc<SessionEntry>,
    /// The running sandbox.
    pub(crate) live: Arc<Live>,
}

impl ProxyPeer {
    pub(super) fn new(sandbox: Arc<SessionEntry>, live: Arc<Live>) -> Self {
        let (session_id, job_id, task_id) = sandbox.owner();
        Self {
            session_id,
            job_id,
            task_id,
            request_id: uuid::Uuid::now_v7().to_string(),
            sandbox,
            live,
        }
    }
}
