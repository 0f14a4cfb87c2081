//! Files that a task produced or was given.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{ArtifactId, Flags, TaskId};

pub mod artifact_limits {
    pub const MAX_BYTES: u64 = 1 << 30;
    pub const MAX_PATH: usize = 1_024;
}

/// One version of a path. It never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Artifact {
    pub id: ArtifactId,
    pub task_id: TaskId,
    pub path: String,
    /// From 1, for each path.
    pub version: i64,
    /// In hexadecimal digits.
    pub sha256: String,
    pub size: i64,
    pub media_type: String,
    pub created_by: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(flatten)]
    pub flags: Flags,
}
