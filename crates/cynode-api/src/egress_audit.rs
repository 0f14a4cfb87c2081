//! An egress role's own audit records on their way to the orchestrator, which fetches them.
//!
//! The role chains and bounds its records like a node ([`crate::node_audit_limits`]).

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{NodeAuditRecord, NodeAuditRefusal};

/// The subject kind of a role's records. The subject's name is the role.
pub const EGRESS_SUBJECT: &str = "egress";

/// Actions of the records of the git role.
pub const EGRESS_GIT_ACTIONS: [&str; 4] = ["git.commit", "git.fetch", "git.pr", "git.push"];

pub mod egress_audit_limits {
    /// How long a call waits for records.
    pub const MAX_WAIT_MS: u64 = 20_000;
}

/// `GET /v1/egress/audit?wait_ms=`: the oldest records that are not acknowledged. Without any: 204.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EgressAuditBatch {
    pub version: u32,
    /// `git`.
    pub role: String,
    /// As in [`crate::EgressInfo`].
    pub instance: Uuid,
    pub stream: Uuid,
    /// Consecutive records of the stream.
    pub records: Vec<NodeAuditRecord>,
}

/// `POST /v1/egress/audit/ack`: what the orchestrator did with a batch. Answers 204. A verdict about
/// a stream that is not the one being fetched changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressAuditAck {
    pub version: u32,
    pub stream: Uuid,
    pub verdict: EgressAuditVerdict,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum EgressAuditVerdict {
    /// All records before `next` are stored; the role may delete them.
    Stored { next: u64 },
    /// The stream continues with another record; absent if it takes no more.
    OutOfOrder {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        expected: Option<u64>,
    },
    /// These records are not stored, nor the others of their batch. The role records them anew as
    /// its own.
    Refused { records: Vec<NodeAuditRefusal> },
}
