//! Jobs: one command, run once in a sandbox of its own.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{
    JobId, LimitsRequest, NetworkPolicy, NodeId, TaskId, Truncated, WorkspaceRef,
    sba::{JobSpec, TodoSummary},
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobRun {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub task_id: TaskId,
    pub job_id: JobId,
    pub sandbox: JobSandbox,
    /// An SBA job specification; its ids must equal the outer ones. With `sandbox.command`, that
    /// command is the runner of the job instead of ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub job: Option<Box<JobSpec>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobSandbox {
    pub image_ref: String,
    /// The required image: its digest, or its id if it was loaded by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "new")]
    pub workspace_ref: Option<WorkspaceRef>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicy>,
    #[serde(
        default,
        deserialize_with = "crate::session::object_only",
        skip_serializing_if = "Option::is_none"
    )]
    pub limits: Option<LimitsRequest>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobStop {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub task_id: TaskId,
    pub job_id: JobId,
}

/// Confirms that the caller has the result, so that the node may drop it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobAck {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    Accepted,
    InProgress,
    Completed,
    Failed,
    Timeout,
    Canceled,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobError {
    pub code: String,
    pub detail: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobOutput {
    pub stdout: String,
    pub stderr: String,
    /// `utf-8`; `base64` for both streams if either is not UTF-8.
    pub encoding: String,
    pub truncated: Truncated,
    /// The quota because of which the full output was dropped: only these streams, or nothing, are
    /// retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncated_by: Option<String>,
}

impl Default for JobOutput {
    fn default() -> Self {
        Self {
            stdout: String::new(),
            stderr: String::new(),
            encoding: "utf-8".to_owned(),
            truncated: Truncated::default(),
            truncated_by: None,
        }
    }
}

/// Who decided the state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reporter {
    /// The node: it observed the command's exit, or the built-in runner reported through process 1.
    Worker,
    /// The sandbox's own runner, by the callback. Any process of the job could have called it.
    Sandbox,
    /// The job's result file, read after the end. Any process of the job could have written it.
    File,
    /// The orchestrator, without a report of the node.
    Orchestrator,
}

impl Reporter {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Sandbox => "sandbox",
            Self::File => "file",
            Self::Orchestrator => "orchestrator",
        }
    }
}

/// How far a running SBA job is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobProgress {
    /// The position of the current step, or of the agent's turn, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// The number of steps; absent if an agent works the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// The type of the step, or the agent's tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity: Option<String>,
    /// What is left of the job's time.
    pub remaining_seconds: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub todo: Option<TodoSummary>,
    /// Tokens of all model calls so far, prompts included.
    #[serde(default)]
    pub tokens: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    pub job_id: JobId,
    pub task_id: TaskId,
    pub state: JobState,
    pub exit_code: Option<i32>,
    /// The signal that ended the job, without `SIG`; absent if none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    #[serde(flatten)]
    pub output: JobOutput,
    #[serde(with = "time::serde::rfc3339::option")]
    pub started_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub ended_at: Option<OffsetDateTime>,
    /// Absent until the job is placed on a node.
    pub node_id: Option<NodeId>,
    pub image_ref: String,
    pub image_digest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sba_result: Option<serde_json::Value>,
    /// Of an SBA job that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<JobProgress>,
    pub artifacts: Vec<serde_json::Value>,
    /// Files below the directory of artifacts that were not kept: more or larger ones than the node
    /// keeps, or with names that it does not accept.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub artifacts_omitted: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<JobError>,
    /// `worker`, or `orchestrator` if it decided without the node. `sandbox` (the callback) and
    /// `file` (`/job/result.json`) are claims of the job's own processes.
    #[schema(value_type = String)]
    pub reported_by: Reporter,
    /// The result that a node reported after the orchestrator had abandoned the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub late_result: Option<serde_json::Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_by: Option<String>,
    /// The command and its arguments. A list holds at most the first 16 of them, each cut to 200
    /// characters. Absent on a worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    /// The result was acknowledged, and the node has dropped the output.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub acknowledged: bool,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
const fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A job as users request it; absent fields have defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobCreate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_id: Option<TaskId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_ref: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "new")]
    pub workspace_ref: Option<WorkspaceRef>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// An SBA job specification. Its ids are those of the job: outer ones may be absent, and must
    /// be equal if they are not. With `command`, that command is its runner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub job: Option<Box<JobSpec>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    #[serde(
        default,
        deserialize_with = "crate::session::object_only",
        skip_serializing_if = "Option::is_none"
    )]
    pub limits: Option<LimitsRequest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicy>,
    /// What happens to the job if its node is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// Labels that the node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_labels: BTreeMap<String, String>,
    /// With `workspace_ref: "git:…"`, the commits of history to bring; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_depth: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Retry {
    /// The job fails: its progress is unknown.
    #[default]
    Never,
    /// The job runs again on another node.
    OnNodeLoss,
}

pub mod job_limits {
    pub const DEFAULT_TIMEOUT_SECONDS: u64 = 3_600;
    pub const MAX_TIMEOUT_SECONDS: u64 = 10_800;
    /// Per stream in the job object; `output` returns everything retained.
    pub const OBJECT_BYTES: u64 = 262_144;
    /// How long a node remembers the id of an acknowledged job.
    pub const REMEMBER_SECONDS: u64 = 86_400;
    /// Words of a command in a list.
    pub const LISTED_WORDS: u32 = 16;
    /// Characters of each.
    pub const LISTED_WORD_CHARACTERS: i32 = 200;
    /// Unacknowledged jobs at which a node accepts no more.
    pub const MAX_UNACKNOWLEDGED: usize = 5_000;
}

impl JobRun {
    /// A plain command with defaults for all optional fields.
    #[must_use]
    pub fn command<S: Into<String>>(
        task_id: TaskId,
        job_id: JobId,
        image_ref: impl Into<String>,
        command: impl IntoIterator<Item = S>,
    ) -> Self {
        let sandbox = JobSandbox {
            image_ref: image_ref.into(),
            image_digest: None,
            workspace_ref: None,
            command: command.into_iter().map(Into::into).collect(),
            env: BTreeMap::new(),
            timeout_seconds: None,
            network_policy: None,
            limits: None,
        };
        Self {
            version: Some(crate::API_VERSION),
            task_id,
            job_id,
            sandbox,
            job: None,
        }
    }
}

impl JobState {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Timeout => "timeout",
            Self::Canceled => "canceled",
        }
    }

    #[must_use]
    pub const fn is_final(self) -> bool {
        !matches!(self, Self::Accepted | Self::InProgress)
    }
}

impl std::fmt::Display for JobState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for JobState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_value(text.into()).map_err(|_| {
            format!(
                "unknown state '{text}'; expected one of accepted, in_progress, completed, \
                 failed, timeout, canceled"
            )
        })
    }
}
