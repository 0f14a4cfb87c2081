//! Who sends a request to a proxy.

use std::sync::Arc;

use cynode_api::{JobId, SessionId, TaskId};

use crate::sessions::{Live, SessionEntry};

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
    pub(crate) sandbox: Arc<SessionEntry>,
    /// The running sandbox. `live.activity()` keeps it from being idle while the guard lives.
    pub(crate) live: Arc<Live>,
}
