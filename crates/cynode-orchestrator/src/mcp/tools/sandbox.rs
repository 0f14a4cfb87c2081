//! `sandbox.create` and related tools: shorthands for the session tools that use a job's id as the
//! session id. Also the tools for allowed images.

use std::collections::BTreeMap;

use cynode_api::{
    ALLOW_PM_IMAGES, Base64Bytes, ExecId, ExecRequest, FileWritten, Image, ImageCreate, JobId,
    OutputPage, Page, Session, SessionId, TaskId, WorkspaceDisposal,
};
use cynode_service::ApiError;
use http::Method;

use super::{
    Arguments, MANAGERS, Tool, ToolEffect, arguments,
    sessions::{self, Constraints, ExecAnswer},
    workspace::{self, FileContent, FileWrite},
};
use crate::mcp::plan::{ApiRequest, ExecPlan, Plan};

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::new::<Create, Session>(
            "sandbox.create",
            MANAGERS,
            ToolEffect::Additive,
            "Create a sandbox whose session has the id of a job. \
             The same as sandbox.session.create, with defaults.",
        ),
        Tool::new::<Exec, ExecAnswer>(
            "sandbox.exec",
            MANAGERS,
            ToolEffect::Destructive,
            "Run a command in the sandbox of a job.",
        ),
        Tool::new::<PutFile, FileWritten>(
            "sandbox.put_file",
            MANAGERS,
            ToolEffect::Destructive,
            "Write a file into the sandbox of a job.",
        ),
        Tool::new::<GetFile, FileContent>(
            "sandbox.get_file",
            MANAGERS,
            ToolEffect::ReadOnly,
            "Read a file from the sandbox of a job.",
        ),
        Tool::new::<StreamLogs, OutputPage>(
            "sandbox.stream_logs",
            MANAGERS,
            ToolEffect::ReadOnly,
            "Read the output of a command in the sandbox, by default the most recent one. \
             Pass next_seq back as after_seq.",
        ),
        Tool::new::<Destroy, Session>(
            "sandbox.destroy",
            MANAGERS,
            ToolEffect::Destructive,
            "End the sandbox of a job and delete its workspace.",
        ),
        Tool::new::<ListImages, Page<Image>>(
            "sandbox.allowed_images.list",
            MANAGERS,
            ToolEffect::ReadOnly,
            "List the images that sandboxes may use.",
        ),
        Tool::new::<AddImage, Image>(
            "sandbox.allowed_images.add",
            MANAGERS,
            ToolEffect::Additive,
            "Allow another image. Works only while a system setting permits agents to do so.",
        )
        .enabled_by(ALLOW_PM_IMAGES),
    ]
}

arguments! {
    Create {
        task_id: TaskId,
        job_id: JobId,
        image_ref: Option<String>,
        workspace_ref: Option<String>,
        constraints: Option<Constraints>,
    }
    Exec {
        task_id: TaskId,
        job_id: JobId,
        argv: Vec<String>,
        /// 600,000 when absent.
        timeout_ms: Option<u64>,
        cwd: Option<String>,
        env: Option<BTreeMap<String, String>>,
        stdin: Option<String>,
        background: Option<bool>,
    }
    PutFile {
        task_id: TaskId,
        job_id: JobId,
        path: String,
        content: Option<String>,
        content_b64: Option<Base64Bytes>,
        mode: Option<String>,
    }
    GetFile {
        task_id: TaskId,
        job_id: JobId,
        path: String,
        /// 262,144 by default, 1,048,576 at most.
        max_bytes: Option<u64>,
    }
    StreamLogs {
        task_id: TaskId,
        job_id: JobId,
        /// The most recent command when absent.
        exec_id: Option<ExecId>,
        after_seq: Option<u64>,
        tail_bytes: Option<u64>,
        max_bytes: Option<u64>,
        /// How long to wait for new output: at most 60,000.
        wait_ms: Option<u64>,
    }
    Destroy {
        task_id: TaskId,
        job_id: JobId,
        reason: Option<String>,
    }
    ListImages {
        limit: Option<u32>,
        cursor: Option<String>,
    }
    AddImage {
        task_id: TaskId,
        /// Including registry and repository.
        image_ref: String,
        image_digest: Option<String>,
    }
}

const DEFAULT_TIMEOUT_MS: u64 = 600_000;

/// The session that shares its id with a job.
fn session(job: JobId) -> SessionId {
    SessionId::from_uuid(*job.as_uuid())
}

impl Arguments for Create {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let (image, workspace) = (
            self.image_ref.unwrap_or_default(),
            self.workspace_ref.unwrap_or_default(),
        );
        let or_default = |text: &str| {
            if text.is_empty() {
                "default".to_owned()
            } else {
                text.to_owned()
            }
        };
        sessions::create_for_job(
            self.task_id,
            self.job_id,
            &or_default(&image),
            &or_default(&workspace),
            &self.constraints.unwrap_or_default(),
        )
    }
}

impl Arguments for Exec {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let request = ExecRequest {
            argv: self.argv,
            cwd: self.cwd,
            env: self.env.unwrap_or_default(),
            timeout_ms: self.timeout_ms.unwrap_or(DEFAULT_TIMEOUT_MS),
            stdin: self.stdin,
            background: self.background.unwrap_or_default(),
            ..ExecRequest::default()
        };
        let exec = ExecPlan::new(self.task_id, session(self.job_id), request);
        Ok(Plan::Exec(Box::new(exec)))
    }
}

impl Arguments for PutFile {
    fn into_plan(self) -> Result<Plan, ApiError> {
        workspace::write(FileWrite {
            task_id: self.task_id,
            session_id: session(self.job_id),
            path: &self.path,
            content: workspace::content(self.content, self.content_b64)?,
            if_match: None,
            mode: self.mode.as_deref(),
        })
    }
}

impl Arguments for GetFile {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(workspace::read(
            self.task_id,
            session(self.job_id),
            &self.path,
            workspace::part(None, None, self.max_bytes)?,
        ))
    }
}

impl Arguments for StreamLogs {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let execs = format!("/v1/sessions/{}/execs", session(self.job_id));
        let path = self
            .exec_id
            .map_or_else(|| execs.clone(), |id| format!("{execs}/{id}/output"));
        let request = ApiRequest::get(path, self.task_id);
        let request = sessions::output(
            request,
            self.after_seq,
            self.tail_bytes,
            self.max_bytes,
            self.wait_ms,
        )?;
        Ok(if self.exec_id.is_some() {
            Plan::Request(request)
        } else {
            Plan::LastOutput(request)
        })
    }
}

impl Arguments for Destroy {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let workspace = WorkspaceDisposal::Delete;
        sessions::end(self.task_id, session(self.job_id), self.reason, workspace)
    }
}

impl Arguments for ListImages {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let request = ApiRequest::get("/v1/images", None).query("allowed", Some(true));
        Ok(Plan::Request(
            request
                .query("limit", self.limit)
                .query("cursor", self.cursor),
        ))
    }
}

impl Arguments for AddImage {
    fn into_plan(self) -> Result<Plan, ApiError> {
        // The full reference as name: a shorter one could take over the name of another image.
        let body = ImageCreate {
            name: Some(self.image_ref.clone()),
            image_ref: self.image_ref,
            image_digest: self.image_digest,
            description: None,
            is_allowed: Some(true),
            version: None,
            capabilities: None,
        };
        Ok(Plan::Request(
            ApiRequest::new(Method::POST, "/v1/images", self.task_id).json(&body)?,
        ))
    }
}
