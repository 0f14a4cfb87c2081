//! Batches of a node's own audit records on their way to the orchestrator.
//!
//! A node numbers and chains what it decides by itself. The orchestrator stores the records
//! unchanged, so the hashes cover what the node wrote.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

/// Actions of node records that concern a sandbox.
pub const NODE_ACTIONS: [&str; 4] = ["audit.folded", "model.call", "model.ended", "proxy.connect"];

/// The first record of a stream.
pub const NODE_STREAM_ACTION: &str = "audit.stream";

/// A record that the orchestrator refused, as the node records it anew: without attribution to a
/// session or job, and with the original in its detail.
pub const NODE_REFUSED_ACTION: &str = "audit.refused";

/// The bounds of batches.
pub mod node_audit_limits {
    /// Records of a batch.
    pub const MAX_RECORDS: usize = 500;
    /// A batch as JSON.
    pub const MAX_BATCH_BYTES: usize = 1024 * 1024;
    /// The body of one record as JSON.
    pub const MAX_BODY_BYTES: usize = 8 * 1024;
    /// The age at which a record is still accepted, in days.
    pub const MAX_AGE_DAYS: i64 = 30;
    /// The time by which a node's clock may be ahead, in seconds.
    pub const MAX_AHEAD_SECONDS: i64 = 3_600;
    /// Streams that a node may open within an hour.
    pub const MAX_STREAMS_PER_HOUR: i64 = 240;
}

/// Consecutive records of one of the node's streams.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeAuditBatch {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// One stream per start of the node.
    pub stream: Uuid,
    pub records: Vec<NodeAuditRecord>,
}

/// A record as the node stored it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeAuditRecord {
    pub seq: u64,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    #[schema(value_type = Object)]
    pub body: Value,
    /// SHA-256 in hexadecimal, over this record and the hash of its predecessor in the stream.
    pub hash: String,
}

/// The records up to `next` are stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeAuditAnswer {
    pub stream: Uuid,
    /// The number of the next record that the orchestrator expects.
    pub next: u64,
}

/// A record that the orchestrator does not store; listed in the problem `audit_refused`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeAuditRefusal {
    pub seq: u64,
    pub reason: String,
}
