//! The node's own audit trail: what a node decides without the orchestrator.
//!
//! A decision is admitted by the `ledger`, which counts repeats and bounds what one sandbox can
//! fill; written and kept by `cynode-trail`, chained and numbered; and sent to the orchestrator by
//! `ship`.
//!
//! Invariant: a decision takes effect, and its answer leaves the node, only after
//! [`NodeTrail::record`] has returned: then its record is durable. Without the record the effect is
//! refused. Records leave the disk only after the orchestrator has acknowledged them.

mod decision;
mod ledger;
mod ship;
#[cfg(test)]
mod tests;

use std::{io, path::PathBuf, time::Instant};

use cynode_api::{AuditSubject, NodeAuditBatch, NodeId};
use cynode_trail::{NotWritten, Trail, TrailMetrics, TrailSettings};
use time::OffsetDateTime;
use uuid::Uuid;

pub use decision::{
    AuditedSandbox, DecisionOutcome, ModelCall, ModelUsage, NodeAction, NodeDecision, ProxyTarget,
    SandboxOwner,
};
use ledger::{Admission, ShareLedger};
pub(crate) use ship::run as ship;

/// What a node without an orchestrator keeps, in bytes.
const MAX_LOCAL_BYTES: u64 = 64 * 1024 * 1024;

const METRICS: TrailMetrics = TrailMetrics {
    backlog_records: "cynode_node_audit_backlog_records",
    backlog_bytes: "cynode_node_audit_backlog_bytes",
    lag_seconds: "cynode_node_audit_lag_seconds",
    refused: "cynode_node_audit_refused_total",
};

/// The handle of the node's trail. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeTrail(Trail<ShareLedger>);

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

impl From<NotWritten> for RecordError {
    fn from(_: NotWritten) -> Self {
        Self::Unavailable
    }
}

impl RecordError {
    /// The code for answers to the sandbox, as docs/errors.md lists it.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Unavailable => cynode_api::ErrorCode::AuditUnavailable.as_str(),
            Self::ShareUsed => cynode_api::ErrorCode::AuditBacklogFull.as_str(),
        }
    }
}

impl NodeTrail {
    /// Opens the trail below a directory. Its records wait for the orchestrator; this process's
    /// records are in a new stream.
    pub fn open(directory: PathBuf, node_id: NodeId) -> io::Result<Self> {
        Self::start(directory, node_id, true)
    }

    /// Opens the trail of a node without an orchestrator. The newest records are kept.
    pub fn open_local(directory: PathBuf, node_id: NodeId) -> io::Result<Self> {
        Self::start(directory, node_id, false)
    }

    fn start(directory: PathBuf, node_id: NodeId, is_shipped: bool) -> io::Result<Self> {
        let settings = TrailSettings {
            directory,
            writer: AuditSubject {
                kind: "node".to_owned(),
                node_id: Some(node_id),
                ..AuditSubject::default()
            },
            name: "this node",
            thread: "node-audit",
            metrics: METRICS,
            keep_bytes: (!is_shipped).then_some(MAX_LOCAL_BYTES),
        };
        Trail::open(settings, ShareLedger::new(node_id, is_shipped)).map(Self)
    }

    /// Records a decision. Returns when the record is durable; the effect may follow only then.
    /// Repeats of a denial within a short interval are counted, not recorded one by one.
    pub async fn record(&self, decision: NodeDecision) -> Result<(), RecordError> {
        let at = OffsetDateTime::now_utc();
        let admit = |ledger: &mut ShareLedger| ledger.admit(&decision, at, Instant::now());
        match self.0.with_ledger(admit) {
            Admission::Record(record) => {
                let permits_effect = decision.permits_effect();
                Ok(self.0.write(at, record, permits_effect).await?)
            }
            Admission::Counted => Ok(()),
            Admission::Refused(error) => {
                self.0.count_refusal();
                Err(error)
            }
        }
    }

    /// Why the node should take no new work: its records have waited too long.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    /// Writes the counts that are still open, and everything that is queued.
    pub async fn flush(&self) {
        self.0.flush().await;
    }

    /// The next records to ship.
    pub async fn next_batch(&self) -> io::Result<Option<NodeAuditBatch>> {
        self.0.next_batch().await
    }

    /// The orchestrator has all records of a stream before `next`. Returns false if it claims more
    /// than the stream has.
    pub async fn acknowledge(&self, stream: Uuid, next: u64) -> io::Result<bool> {
        self.0.acknowledge(stream, next).await
    }
}
