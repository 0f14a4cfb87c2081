//! `artifact.*` and `events.list`.

use cynode_api::{Artifact, ArtifactId, Base64Bytes, EventPage, Page, TaskId};
use cynode_service::ApiError;
use http::Method;

use super::{
    AGENTS, ALL, Arguments, Tool, ToolEffect, arguments, work::page, workspace,
    workspace::FileContent,
};
use crate::mcp::plan::{ApiRequest, Plan, ResultFormat, segments};

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::new::<ArtifactPut, Artifact>(
            "artifact.put",
            ALL,
            ToolEffect::Additive,
            "Store an artifact of the task. An existing path gets a new version.",
        ),
        Tool::new::<ArtifactGet, FileContent>(
            "artifact.get",
            ALL,
            ToolEffect::ReadOnly,
            "Read an artifact of the task, by its path (the newest version) or its id.",
        ),
        Tool::new::<ArtifactList, Page<Artifact>>(
            "artifact.list",
            ALL,
            ToolEffect::ReadOnly,
            "List the artifacts of the task in all versions.",
        ),
        Tool::new::<EventList, EventPage>(
            "events.list",
            AGENTS,
            ToolEffect::ReadOnly,
            "List the events of the task's jobs and sessions. With wait_ms it waits for new ones; \
             pass next_cursor back as after.",
        ),
    ]
}

arguments! {
    ArtifactPut {
        task_id: TaskId,
        /// Relative, without `.` and `..`.
        path: String,
        content: Option<String>,
        content_b64: Option<Base64Bytes>,
        /// `application/octet-stream` when absent.
        media_type: Option<String>,
    }
    ArtifactGet {
        task_id: TaskId,
        path: Option<String>,
        id: Option<ArtifactId>,
        /// 262,144 by default, 1,048,576 at most.
        max_bytes: Option<u64>,
    }
    ArtifactList {
        task_id: TaskId,
        limit: Option<u32>,
        cursor: Option<String>,
    }
    EventList {
        task_id: TaskId,
        /// The cursor to continue from.
        after: Option<u64>,
        /// At most 60,000.
        wait_ms: Option<u64>,
        limit: Option<u32>,
    }
}

impl Arguments for ArtifactPut {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let request = ApiRequest::new(
            Method::PUT,
            format!(
                "/v1/tasks/{}/artifacts/{}",
                self.task_id,
                segments("path", &self.path)?
            ),
            self.task_id,
        );
        let media_type = self
            .media_type
            .as_deref()
            .unwrap_or(if self.content.is_some() {
                "text/plain; charset=utf-8"
            } else {
                "application/octet-stream"
            });
        let request = request.header("content-type", Some(media_type))?;
        Ok(Plan::Request(request.bytes(workspace::content(
            self.content,
            self.content_b64,
        )?)))
    }
}

impl Arguments for ArtifactGet {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let part = workspace::part(None, None, self.max_bytes)?;
        let request = match (self.path, self.id) {
            (Some(path), None) => ApiRequest::get(
                format!(
                    "/v1/tasks/{}/artifacts/{}",
                    self.task_id,
                    segments("path", &path)?
                ),
                self.task_id,
            ),
            (None, Some(id)) => {
                ApiRequest::get(format!("/v1/artifacts/{id}/content"), self.task_id)
            }
            _ => {
                return Err(ApiError::invalid(
                    "path: send either the path or the id of an artifact",
                ));
            }
        };
        Ok(Plan::Request(request.with_format(ResultFormat::File(part))))
    }
}

impl Arguments for ArtifactList {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(page(
            ApiRequest::get("/v1/artifacts", self.task_id).query("task_id", Some(self.task_id)),
            self.limit,
            self.cursor,
        ))
    }
}

impl Arguments for EventList {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let request = ApiRequest::get("/v1/events", self.task_id)
            .query("task_id", Some(self.task_id))
            .query("after", self.after);
        Ok(Plan::Request(
            request
                .query("wait_ms", self.wait_ms)
                .query("limit", self.limit),
        ))
    }
}
