//! State changes of jobs and sessions, and the progress of jobs, in order.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{JobId, JobProgress, ProjectId, SessionId, TaskId};

pub mod event_limits {
    pub const MAX_WAIT_MS: u64 = 60_000;
    pub const MAX_PAGE: u32 = 1_000;
    pub const DEFAULT_PAGE: u32 = 100;
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Increases by one with each event.
    pub cursor: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    /// `job.state`, `job.progress`, `session.state`, …
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project_id: Option<ProjectId>,
    pub task_id: TaskId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    pub state: String,
    /// Where to read the result, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result_ref: Option<String>,
    /// Why a job failed: the code of its error, or of the failure in its result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_code: Option<String>,
    /// How far a running job is, in an event `job.progress`: counts, without the items of its todo
    /// list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<JobProgress>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventPage {
    pub items: Vec<Event>,
    /// Pass this as `after` to get the next page.
    pub next_cursor: i64,
}
