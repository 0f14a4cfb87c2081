//! Worker nodes as the control plane knows them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{Limits, LimitsRequest, NodeId, Unenforced};

/// What a node can do, as it says itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Capability {
    /// Of the `cynode` that runs there.
    pub version: String,
    pub engine: String,
    pub rootless: bool,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub max_sandboxes: usize,
    /// Absent from workers that give any limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest: Option<LargestLimits>,
    /// What the memory limits of all sandboxes there may add up to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised_memory_bytes: Option<u64>,
    #[serde(default)]
    pub unenforced: BTreeSet<Unenforced>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// What is loaded there.
    #[serde(default)]
    pub images: Vec<LocalImage>,
}

/// The largest limits that a node gives one sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LargestLimits {
    pub memory_bytes: u64,
    pub cpus: f64,
    pub pids: u32,
}

/// A limit that is beyond a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// Its name in a request.
    pub limit: &'static str,
    /// The most that there is of it, with its unit.
    pub most: String,
}

impl LargestLimits {
    /// The first limit that a request names and that is larger than these. What it does not name fits every node.
    #[must_use]
    pub fn excess_of(&self, request: LimitsRequest) -> Option<Excess> {
        let LimitsRequest {
            memory_bytes,
            cpus,
            pids,
            ..
        } = request;
        let named = Limits {
            memory_bytes: memory_bytes.unwrap_or(0),
            cpus: cpus.unwrap_or(0.0),
            pids: pids.unwrap_or(0),
            ..Limits::default()
        };
        self.excess(&named)
    }

    /// The first limit that is larger than these.
    #[must_use]
    pub fn excess(&self, limits: &Limits) -> Option<Excess> {
        let Self {
            memory_bytes,
            cpus,
            pids,
        } = *self;
        let beyond = [
            (
                limits.memory_bytes > memory_bytes,
                "memory_bytes",
                format!("{memory_bytes} bytes of memory"),
            ),
            (limits.cpus > cpus, "cpus", format!("{cpus} processors")),
            (limits.pids > pids, "pids", format!("{pids} processes")),
        ];
        beyond
            .into_iter()
            .find_map(|(is_beyond, limit, most)| is_beyond.then_some(Excess { limit, most }))
    }
}

/// An image that a node has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LocalImage {
    pub reference: String,
    /// `sha256:…`: the digest in its registry, or the image's id when it was loaded by hand.
    pub digest: String,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeRegister {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// The registration key.
    pub psk: String,
    /// The node's own id, kept in its state directory; a new one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_id: Option<NodeId>,
    pub node_name: String,
    /// Where its Worker API is reached.
    pub api_url: String,
    pub capability: Capability,
}

/// What a node keeps to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeConfig {
    /// Rises with every change; the node says in its heartbeat which one it has.
    pub revision: i64,
    pub heartbeat_seconds: u64,
    /// What `image_ref: "default"` means.
    pub default_image: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeRegistered {
    pub node_id: NodeId,
    /// The node's own, for this API.
    pub node_token: String,
    /// The one that the orchestrator sends to the Worker API.
    pub worker_token: String,
    pub config: NodeConfig,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Heartbeat {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub running_sandboxes: usize,
    /// The node takes no new work, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_ready: Option<String>,
    /// The configuration that is in force on the node.
    #[serde(default)]
    pub config_revision: i64,
    /// Sent when it has changed since the last heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capability: Option<Capability>,
    /// Where its Worker API is reached from now on. Sent until it has been taken when the address has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_url: Option<String>,
    /// The hashes (SHA-256, hexadecimal) of tokens that the node has taken over after a rotation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adopted: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeartbeatAnswer {
    pub config_revision: i64,
    /// Tokens to change to: the old ones go on being good until the node has said that it has the new ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotate: Option<NewTokens>,
    /// The orchestrator does not know why this node has what it has: it shall say all of it again.
    #[serde(default)]
    pub resend_capability: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewTokens {
    pub node_token: String,
    pub worker_token: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    Ready,
    /// It answers, and can't take work.
    NotReady,
    /// It takes no new work; what runs goes on.
    Draining,
    /// No heartbeat for a while, or no way from the orchestrator to it.
    Unreachable,
    /// For so long that its work is given up.
    Lost,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Node {
    pub id: NodeId,
    pub name: String,
    pub api_url: String,
    pub state: NodeState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub draining: bool,
    pub capability: Capability,
    pub running_sandboxes: usize,
    pub config_revision: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub registered_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub last_heartbeat_at: OffsetDateTime,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeDrain {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// `false` takes it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<bool>,
}

/// Asks for a key by which a node registers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeKeyCreate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// Good for more than one node.
    #[serde(default)]
    pub reusable: bool,
    /// A day when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeKeyCreated {
    pub id: uuid::Uuid,
    /// What the node registers with. It is shown once.
    pub psk: String,
    #[serde(with = "time::serde::rfc3339")]
    pub expires_at: OffsetDateTime,
}
