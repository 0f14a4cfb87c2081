//! Sandbox images that may be used, and their versions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{ImageId, ImageVersionId};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageCreate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// The logical name; the repository's last part when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// With registry and repository; `localhost/…` names one that the operator loads on the nodes.
    pub image_ref: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Map<String, Value>>,
    /// Whether it may be used; false when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_allowed: Option<bool>,
}

/// What is absent stays. The versions that `image_version` names, or all of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImagePatch {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_version: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_allowed: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    pub id: ImageId,
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    pub versions: Vec<ImageVersion>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
    pub updated_by: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageVersion {
    pub id: ImageVersionId,
    pub version: String,
    pub image_ref: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    #[schema(value_type = Object)]
    pub capabilities: Map<String, Value>,
    pub is_allowed: bool,
    /// Nodes by name, with `available`, `pulling`, `failed` or `evicted`.
    #[serde(default)]
    pub nodes: BTreeMap<String, String>,
    #[serde(default)]
    pub state: ImageState,
}

impl ImageVersion {
    /// Whether sessions and agents' jobs can use it; `None` until a node has inspected it.
    #[must_use]
    pub fn agent_compatible(&self) -> Option<bool> {
        self.capabilities
            .get("agent_compatible")
            .map(|value| *value == Value::Bool(true))
    }
}

/// Whether a version can be used, or what it waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImageState {
    /// A node has it.
    Available,
    /// No node has reported it: it is to be loaded on one.
    #[default]
    AwaitingNode,
    /// Nodes have another image under this reference than the one that is pinned: that one is to be loaded again, or theirs to be pinned by adding
    /// the reference once more.
    AwaitingPinned,
}

/// The images in a node's store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LocalImages {
    pub items: Vec<crate::LocalImage>,
}
