//! The node's own audit trail: what a node decides without the orchestrator.
//!
//! Invariant: a decision takes effect, and its answer leaves the node, only after
//! [`NodeTrail::record`] has returned: then its record is durable in the node's chained stream.
//! Without the record the effect is refused.

mod decision;

use std::{io, path::PathBuf};

use cynode_api::NodeId;

pub use decision::{
    AuditedSandbox, DecisionOutcome, ModelCall, ModelUsage, NodeAction, NodeDecision, ProxyTarget,
    SandboxOwner,
};

/// The handle of the node's trail. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeTrail {}

/// Why a decision is not recorded. Its effect must be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The disk or the whole backlog is full, or the stream is broken.
    #[error("the node can't record its decisions")]
    Unavailable,
    /// This sandbox has used its share of the backlog. Others are not affected.
    #[error("this sandbox has used its share of the node's unshipped audit records")]
    ShareUsed,
}

impl RecordError {
    /// The code for answers to the sandbox, as docs/errors.md lists it.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Unavailable => "audit_unavailable",
            Self::ShareUsed => "audit_backlog_full",
        }
    }
}

impl NodeTrail {
    /// Opens the trail below a directory and starts a new stream.
    pub fn open(directory: PathBuf, node_id: NodeId) -> io::Result<Self> {
        let _ = (directory, node_id);
        Ok(Self {})
    }

    /// Records a decision. Returns when the record is durable; the effect may follow only then.
    /// Repeats of a decision within a short interval are counted, not recorded one by one.
    pub async fn record(&self, decision: NodeDecision) -> Result<(), RecordError> {
        let _ = decision;
        Err(RecordError::Unavailable)
    }
}
