//! Files that a task produced or received.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{ArtifactId, Flags, SessionId, TaskId};

pub mod artifact_limits {
    pub const MAX_BYTES: u64 = 1 << 30;
    pub const MAX_PATH: usize = 1_024;

    /// Whether a text is a path within a task: relative, without '..', without control characters.
    #[must_use]
    pub fn is_path(path: &str) -> bool {
        !path.is_empty()
            && path.len() <= MAX_PATH
            && !path.chars().any(char::is_control)
            && path
                .split('/')
                .all(|part| !part.is_empty() && part != "." && part != "..")
    }
}

/// One immutable version of a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Artifact {
    pub id: ArtifactId,
    pub task_id: TaskId,
    pub path: String,
    /// Starts at 1 for each path.
    pub version: i64,
    /// In hexadecimal.
    pub sha256: String,
    pub size: i64,
    pub media_type: String,
    pub created_by: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(flatten)]
    pub flags: Flags,
    /// The session that exported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// The commit that it was exported against.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_commit: Option<String>,
}
