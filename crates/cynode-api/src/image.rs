//! Registered sandbox images and their versions.

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
    /// The logical name; by default the last component of the repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// With registry and repository; `localhost/…` is an image that the operator loads on the
    /// nodes.
    pub image_ref: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Map<String, Value>>,
    /// Whether sandboxes may use the image; false by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_allowed: Option<bool>,
}

/// Absent fields are unchanged. Applies to `image_version`, or to all versions if it is absent.
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
    /// The state on each node, by name: `available`, `pulling`, `failed` or `evicted`.
    #[serde(default)]
    pub nodes: BTreeMap<String, String>,
    #[serde(default)]
    pub state: ImageState,
}

impl ImageVersion {
    /// Whether sessions and agent jobs can use the image; `None` until a node has inspected it.
    #[must_use]
    pub fn agent_compatible(&self) -> Option<bool> {
        self.capabilities
            .get("agent_compatible")
            .map(|value| *value == Value::Bool(true))
    }
}

/// Whether a version is usable, or what it waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImageState {
    /// At least one node has the image.
    Available,
    /// No node has reported the image: load it on one.
    #[default]
    AwaitingNode,
    /// Nodes have an image under this reference that differs from the pinned one: load the pinned
    /// image again, or add the reference again to pin theirs.
    AwaitingPinned,
}

/// The images in the store of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LocalImages {
    pub items: Vec<crate::LocalImage>,
}
