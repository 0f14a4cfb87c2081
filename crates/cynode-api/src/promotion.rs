//! Promotions: a changeset on its way from an artifact to a branch and a pull request.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{ArtifactId, JobId, ProjectId, PromotionId, RepositoryId, SessionId, TaskId};

pub mod promotion_limits {
    pub const MAX_TITLE_BYTES: usize = 256;
    pub const MAX_MESSAGE_BYTES: usize = 16 * 1024;
    pub const MAX_BODY_BYTES: usize = 64 * 1024;
    pub const MAX_BRANCH_BYTES: usize = 200;
    pub const MAX_CHANGESET_BYTES: u64 = 50 * 1024 * 1024;
    /// Files and verdicts that an answer lists.
    pub const MAX_LISTED: usize = 1_000;
}

/// How far a promotion goes. Each stage includes those before it.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum PromotionStage {
    /// The changeset applies to the base and every rule permits it.
    Applied,
    /// The commit is built.
    Committed,
    /// Checks and approval are done, and the branch is pushed.
    Pushed,
    /// The pull request is open.
    #[default]
    Opened,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PromotionState {
    /// Waits for, or is with, the git role.
    Working,
    /// Checks run in sandboxes.
    Checking,
    /// Waits for a person.
    AwaitingApproval,
    /// Reached the requested stage.
    Done,
    Failed,
    Rejected,
    Canceled,
}

impl PromotionStage {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Committed => "committed",
            Self::Pushed => "pushed",
            Self::Opened => "opened",
        }
    }
}

impl std::str::FromStr for PromotionState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_value(text.into()).map_err(|_| {
            format!(
                "unknown state '{text}'; expected one of working, checking, awaiting_approval, \
                 done, failed, rejected, canceled"
            )
        })
    }
}

impl PromotionState {
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(
            self,
            Self::Done | Self::Failed | Self::Rejected | Self::Canceled
        )
    }

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Working => "working",
            Self::Checking => "checking",
            Self::AwaitingApproval => "awaiting_approval",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Rejected => "rejected",
            Self::Canceled => "canceled",
        }
    }
}

/// The form of a changeset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChangesetFormat {
    /// A unified diff, as `session export` makes it.
    #[default]
    Patch,
    /// A git bundle; its commits only supply a tree.
    Bundle,
    /// A tar of files to write; `.cynode/deleted` lists paths to remove, one per line.
    Files,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PromotionCreate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub task_id: TaskId,
    /// The name or id of a repository of the task's project.
    pub repository: String,
    /// The artifact of the task.
    pub changeset: ArtifactId,
    #[serde(default)]
    pub format: ChangesetFormat,
    /// The commit that the changeset was made against. Absent: the commit of the session that
    /// exported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The branch that the pull request targets; the default branch when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The last part of the branch `cynode/<task>/<branch>`; made from the title when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// The commit message; the title when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    pub title: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    #[serde(default)]
    pub until: PromotionStage,
    /// Builds and inspects the commit, and stores no promotion.
    #[serde(default)]
    pub dry_run: bool,
}

/// One rule's verdict on one path, or on the whole change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PromotionVerdict {
    /// `paths`, `sensitive`, `symlinks`, `modes`, `size`, `secrets`, `branch`, `policy`, `check`.
    pub rule: String,
    pub allowed: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PromotedFile {
    pub path: String,
    /// `create`, `modify`, `delete`.
    pub operation: String,
    pub mode: String,
    pub size: u64,
    pub added_lines: u32,
    pub removed_lines: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PromotionCheck {
    pub name: String,
    pub job_id: JobId,
    /// The commit that the check ran on. A pass counts for this commit only.
    pub commit: String,
    pub state: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PromotionError {
    pub code: String,
    pub detail: String,
    /// Rejected hunks, the newer base, or the verdicts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub conflict: Option<serde_json::Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Promotion {
    pub id: PromotionId,
    pub task_id: TaskId,
    pub project_id: ProjectId,
    pub repository_id: RepositoryId,
    pub repository: String,
    pub state: PromotionState,
    pub until: PromotionStage,
    /// The last stage that is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reached: Option<PromotionStage>,
    pub changeset: ArtifactId,
    pub changeset_sha256: String,
    pub format: ChangesetFormat,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    pub target: String,
    pub branch: String,
    pub title: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_request: Option<String>,
    #[serde(default)]
    pub files: Vec<PromotedFile>,
    #[serde(default)]
    pub verdicts: Vec<PromotionVerdict>,
    #[serde(default)]
    pub checks: Vec<PromotionCheck>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approved_by: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<PromotionError>,
    pub created_by: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
}

/// A person's decision. It names what was shown, and lapses when one of these changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PromotionDecision {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub commit: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
