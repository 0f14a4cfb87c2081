//! `sandbox.create` and its kin, thin forms of the session calls in which a job's id is the session's; and which images there are.

use std::collections::BTreeMap;

use cynode_api::{
    ALLOW_PM_IMAGES, Base64Bytes, ExecId, ExecRequest, FileWritten, Image, ImageCreate, JobId,
    OutputPage, Page, Session, SessionEnd, SessionId, TaskId,
};
use cynode_service::ApiError;
use http::Method;

use super::{
    Arguments, Kind, MANAGERS, Tool, arguments,
    sessions::{self, Constraints, ExecAnswer},
    workspace::{self, FileContent},
};
use crate::mcp::plan::{Call, Plan};

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::new::<Create, Session>(
            "sandbox.create",
            MANAGERS,
            Kind::Adds,
            "Create a sandbox whose session has the id of a job. The same as sandbox.session.create, with defaults.",
        ),
        Tool::new::<Exec, ExecAnswer>("sandbox.exec", MANAGERS, Kind::Changes, "Run a command in the sandbox of a job."),
        Tool::new::<PutFile, FileWritten>("sandbox.put_file", MANAGERS, Kind::Changes, "Write a file into the sandbox of a job."),
        Tool::new::<GetFile, FileContent>("sandbox.get_file", MANAGERS, Kind::Reads, "Read a file from the sandbox of a job."),
        Tool::new::<StreamLogs, OutputPage>(
            "sandbox.stream_logs",
            MANAGERS,
            Kind::Reads,
            "Read what the sandbox's last command, or the one that is named, has written; call again with next_seq as after_seq.",
        ),
        Tool::new::<Destroy, Session>("sandbox.destroy", MANAGERS, Kind::Changes, "End the sandbox of a job and delete its workspace."),
        Tool::new::<ListImages, Page<Image>>("sandbox.allowed_images.list", MANAGERS, Kind::Reads, "List the images that sandboxes may be made of."),
        Tool::new::<AddImage, Image>(
            "sandbox.allowed_images.add",
            MANAGERS,
            Kind::Adds,
            "Allow another image. Only while an administrator lets agents do that (a system setting).",
        )
        .while_enabled(ALLOW_PM_IMAGES),
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
        /// The last command's when absent.
        exec_id: Option<ExecId>,
        after_seq: Option<u64>,
        tail_bytes: Option<u64>,
        max_bytes: Option<u64>,
        /// How long to wait for something new: at most 60,000.
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
        /// With registry and repository.
        image_ref: String,
        image_digest: Option<String>,
    }
}

const TIMEOUT_MS: u64 = 600_000;

fn session(job: JobId) -> SessionId {
    SessionId::from_uuid(*job.as_uuid())
}

impl Arguments for Create {
    fn plan(self) -> Result<Plan, ApiError> {
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
        sessions::create(
            self.task_id,
            Some(session(self.job_id)),
            &or_default(&image),
            &or_default(&workspace),
            &self.constraints.unwrap_or_default(),
        )
    }
}

impl Arguments for Exec {
    fn plan(self) -> Result<Plan, ApiError> {
        let body = ExecRequest {
            argv: self.argv,
            cwd: self.cwd,
            env: self.env.unwrap_or_default(),
            timeout_ms: self.timeout_ms.unwrap_or(TIMEOUT_MS),
            stdin: self.stdin,
            background: self.background.unwrap_or_default(),
            ..ExecRequest::default()
        };
        Ok(Plan::Call(
            Call::new(
                Method::POST,
                format!("/v1/sessions/{}/exec", session(self.job_id)),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

impl Arguments for PutFile {
    fn plan(self) -> Result<Plan, ApiError> {
        let bytes = workspace::content(self.content, self.content_b64)?;
        workspace::write(
            self.task_id,
            session(self.job_id),
            &self.path,
            bytes,
            None,
            self.mode.as_deref(),
        )
    }
}

impl Arguments for GetFile {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(workspace::read(
            self.task_id,
            session(self.job_id),
            &self.path,
            workspace::part(None, None, self.max_bytes)?,
        ))
    }
}

impl Arguments for StreamLogs {
    fn plan(self) -> Result<Plan, ApiError> {
        let execs = format!("/v1/sessions/{}/execs", session(self.job_id));
        let path = self
            .exec_id
            .map_or_else(|| execs.clone(), |id| format!("{execs}/{id}/output"));
        let call = Call::get(path, self.task_id);
        let call = sessions::output(
            call,
            self.after_seq,
            self.tail_bytes,
            self.max_bytes,
            self.wait_ms,
        )?;
        Ok(if self.exec_id.is_some() {
            Plan::Call(call)
        } else {
            Plan::LastOutput(call)
        })
    }
}

impl Arguments for Destroy {
    fn plan(self) -> Result<Plan, ApiError> {
        let body = SessionEnd {
            reason: self.reason,
            ..SessionEnd::default()
        };
        Ok(Plan::Call(
            Call::new(
                Method::POST,
                format!("/v1/sessions/{}/end", session(self.job_id)),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

impl Arguments for ListImages {
    fn plan(self) -> Result<Plan, ApiError> {
        let call = Call::get("/v1/images", None).query("allowed", Some(true));
        Ok(Plan::Call(
            call.query("limit", self.limit).query("cursor", self.cursor),
        ))
    }
}

impl Arguments for AddImage {
    fn plan(self) -> Result<Plan, ApiError> {
        // By no shorter name: that of an image that is there already would come to mean this one.
        let body = ImageCreate {
            name: Some(self.image_ref.clone()),
            image_ref: self.image_ref,
            image_digest: self.image_digest,
            description: None,
            is_allowed: Some(true),
            version: None,
            capabilities: None,
        };
        Ok(Plan::Call(
            Call::new(Method::POST, "/v1/images", self.task_id).json(&body)?,
        ))
    }
}
