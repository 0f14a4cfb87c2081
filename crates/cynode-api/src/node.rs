//! Worker nodes as the control plane sees them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{Limits, LimitsRequest, NodeId, Unenforced};

/// The capabilities that a node reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Capability {
    /// The version of `cynode` on the node.
    pub version: String,
    pub engine: String,
    pub rootless: bool,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub max_sandboxes: usize,
    /// Absent for workers without upper limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest: Option<LargestLimits>,
    /// The maximum sum of the memory limits of all sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised_memory_bytes: Option<u64>,
    /// The newest version of encoded patches that the worker reads. Absent for workers that read
    /// diffs only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoded_patches: Option<u32>,
    /// The newest version of the runner's protocol that the worker speaks. Absent for workers that
    /// run plain commands only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner: Option<u32>,
    /// The model server of the node. Absent if none is configured, and for workers that know none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inference: Option<NodeInference>,
    #[serde(default)]
    pub unenforced: BTreeSet<Unenforced>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The images in the node's store.
    #[serde(default)]
    pub images: Vec<LocalImage>,
}

/// The model server of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeInference {
    /// Absent until the server has answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<ModelServerKind>,
    /// The models that the server itself runs. Those that it has run elsewhere are not among them.
    #[serde(default)]
    pub models: Vec<String>,
    /// Why the server can't be used now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// The API of a model server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModelServerKind {
    Ollama,
    Openai,
}

impl ModelServerKind {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ollama => "ollama",
            Self::Openai => "openai",
        }
    }
}

/// The largest limits that a node grants one sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LargestLimits {
    pub memory_bytes: u64,
    pub cpus: f64,
    pub pids: u32,
    /// The capacity of the file system with the workspaces. Absent for workers that don't bound
    /// disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
}

/// A requested limit that a node can't grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// The name of the limit in a request.
    pub limit: &'static str,
    /// The largest value, with its unit.
    pub max: String,
}

impl LargestLimits {
    /// The first requested limit that exceeds these. Absent limits fit every node.
    #[must_use]
    pub fn requested_excess(&self, request: LimitsRequest) -> Option<Excess> {
        let LimitsRequest {
            memory_bytes,
            cpus,
            pids,
            disk_bytes,
            ..
        } = request;
        let requested = Limits {
            memory_bytes: memory_bytes.unwrap_or(0),
            cpus: cpus.unwrap_or(0.0),
            pids: pids.unwrap_or(0),
            disk_bytes: disk_bytes.unwrap_or(0),
            ..Limits::default()
        };
        self.excess(&requested)
    }

    /// The first limit that exceeds these.
    #[must_use]
    pub fn excess(&self, limits: &Limits) -> Option<Excess> {
        let Self {
            memory_bytes,
            cpus,
            pids,
            disk_bytes,
        } = *self;
        let disk_bytes = disk_bytes.unwrap_or(u64::MAX);
        let beyond = [
            (
                limits.memory_bytes > memory_bytes,
                "memory_bytes",
                format!("{memory_bytes} bytes of memory"),
            ),
            (limits.cpus > cpus, "cpus", format!("{cpus} processors")),
            (limits.pids > pids, "pids", format!("{pids} processes")),
            (
                limits.disk_bytes > disk_bytes,
                "disk_bytes",
                format!("{disk_bytes} bytes of disk"),
            ),
        ];
        beyond
            .into_iter()
            .find_map(|(is_beyond, limit, max)| is_beyond.then_some(Excess { limit, max }))
    }
}

/// An image in a node's store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LocalImage {
    pub reference: String,
    /// `sha256:…`: the digest in the registry, or the image id if it was loaded by hand.
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
    /// The node's id, from its state directory; a new one is assigned if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_id: Option<NodeId>,
    pub node_name: String,
    /// The URL of the node's Worker API.
    pub api_url: String,
    pub capability: Capability,
}

/// The configuration that a node follows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeConfig {
    /// Increases with every change; heartbeats report the revision in force.
    pub revision: i64,
    pub heartbeat_seconds: u64,
    /// The image that `image_ref: "default"` selects.
    pub default_image: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeRegistered {
    pub node_id: NodeId,
    /// Authenticates the node to this API.
    pub node_token: String,
    /// Authenticates the orchestrator to the node's Worker API.
    pub worker_token: String,
    pub config: NodeConfig,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Heartbeat {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub running_sandboxes: usize,
    /// Why the node takes no new work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_ready: Option<String>,
    /// The configuration revision in force on the node.
    #[serde(default)]
    pub config_revision: i64,
    /// Sent if it has changed since the last heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capability: Option<Capability>,
    /// The new URL of the node's Worker API. Sent after a change until the orchestrator has
    /// accepted it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_url: Option<String>,
    /// Hashes (SHA-256, hexadecimal) of the rotated tokens that the node has adopted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adopted: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeartbeatAnswer {
    pub config_revision: i64,
    /// Tokens to switch to: the old ones stay valid until the node has reported the new ones as
    /// adopted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotate: Option<NewTokens>,
    /// Asks the node to report its full capability again: the orchestrator's view is incomplete.
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
    /// Reachable, but unable to take work.
    NotReady,
    /// Takes no new work; running work continues.
    Draining,
    /// No recent heartbeat, or the orchestrator can't connect to the node.
    Unreachable,
    /// Unreachable for so long that its work is abandoned.
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
    /// `false` cancels the drain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<bool>,
}

/// Requests a key with which a node registers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeKeyCreate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// Valid for more than one node.
    #[serde(default)]
    pub reusable: bool,
    /// One day by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeKeyCreated {
    pub id: uuid::Uuid,
    /// The registration key. It is shown only once.
    pub psk: String,
    #[serde(with = "time::serde::rfc3339")]
    pub expires_at: OffsetDateTime,
}
