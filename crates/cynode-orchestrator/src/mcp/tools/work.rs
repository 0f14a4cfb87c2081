//! Artifacts, events, and what a database of work holds: projects, tasks, jobs, preferences, settings, nodes.

use std::collections::BTreeMap;

use cynode_api::{
    Artifact, ArtifactId, Base64Bytes, EventPage, Job, JobCreate, JobId, JobState, LimitsRequest,
    NetworkPolicy, Node, Page, Preference, PreferenceScope, Project, ProjectId, Retry, Setting,
    Task, TaskCreate, TaskId, TaskPatch, TaskStatus, ValuePut, WorkspaceRef,
};
use cynode_service::ApiError;
use http::Method;
use serde_json::{Map, Value};
use uuid::Uuid;

use super::{
    AGENTS, ALL, Arguments, Kind, MANAGERS, Tool, arguments, workspace, workspace::FileContent,
};
use crate::mcp::plan::{Call, Plan, Shape, word, words};

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::new::<ArtifactPut, Artifact>(
            "artifact.put",
            ALL,
            Kind::Adds,
            "Keep bytes as an artifact of the task. A path that is there gets a new version.",
        ),
        Tool::new::<ArtifactGet, FileContent>(
            "artifact.get",
            ALL,
            Kind::Reads,
            "Read an artifact of the task, by its path (the newest version) or its id.",
        ),
        Tool::new::<OfTask, Page<Artifact>>(
            "artifact.list",
            ALL,
            Kind::Reads,
            "List the artifacts of the task, every version.",
        ),
        Tool::new::<EventList, EventPage>(
            "events.list",
            AGENTS,
            Kind::Reads,
            "What happened to the jobs and sessions of the task. With wait_ms it waits for something new; pass next_cursor back as after.",
        ),
        Tool::new::<ProjectGet, Project>(
            "db.project.get",
            AGENTS,
            Kind::Reads,
            "Show a project: the task's own when no other is named.",
        ),
        Tool::new::<ProjectList, Page<Project>>(
            "db.project.list",
            AGENTS,
            Kind::Reads,
            "List the projects that the caller may see.",
        ),
        Tool::new::<TaskNew, Task>("db.task.create", MANAGERS, Kind::Adds, "Create a task."),
        Tool::new::<TaskGet, Task>("db.task.get", AGENTS, Kind::Reads, "Show a task."),
        Tool::new::<TaskList, Page<Task>>(
            "db.task.list",
            AGENTS,
            Kind::Reads,
            "List the tasks that the caller may see.",
        ),
        Tool::new::<TaskUpdate, Task>(
            "db.task.update",
            MANAGERS,
            Kind::Changes,
            "Change a task: what is absent stays.",
        ),
        Tool::new::<JobNew, Job>(
            "db.job.create",
            MANAGERS,
            Kind::Adds,
            "Start a job: one command in a sandbox of its own, to its end. Answers at once; db.job.get or events.list tell when it has ended.",
        ),
        Tool::new::<OfJob, Job>(
            "db.job.get",
            AGENTS,
            Kind::Reads,
            "Show a job: its state, and when it has ended its exit code and output.",
        ),
        Tool::new::<JobList, Page<Job>>(
            "db.job.list",
            AGENTS,
            Kind::Reads,
            "List the jobs of a task.",
        ),
        Tool::new::<JobStop, Job>("db.job.stop", MANAGERS, Kind::Changes, "Stop a job."),
        Tool::new::<PreferenceGet, Preference>(
            "db.preference.get",
            AGENTS,
            Kind::Reads,
            "Show one preference of a task or its project, or of another scope.",
        ),
        Tool::new::<PreferenceList, Page<Preference>>(
            "db.preference.list",
            AGENTS,
            Kind::Reads,
            "List the preferences of a scope: the task's own when none is named.",
        ),
        Tool::new::<Effective, Page<Preference>>(
            "db.preference.effective",
            AGENTS,
            Kind::Reads,
            "Which preferences count for the task, each from the narrowest scope that has it.",
        ),
        Tool::new::<PreferenceSet, Preference>(
            "db.preference.set",
            MANAGERS,
            Kind::Changes,
            "Set a preference of the task or of its project.",
        ),
        Tool::new::<SettingGet, Setting>(
            "db.system_setting.get",
            AGENTS,
            Kind::Reads,
            "Show a setting of the system.",
        ),
        Tool::new::<Nothing, Page<Setting>>(
            "db.system_setting.list",
            AGENTS,
            Kind::Reads,
            "List the settings of the system.",
        ),
        Tool::new::<Nodes, Page<Node>>(
            "node.list",
            AGENTS,
            Kind::Reads,
            "List the nodes that sandboxes run on.",
        ),
        Tool::new::<NodeGet, Node>("node.get", AGENTS, Kind::Reads, "Show a node."),
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
    OfTask {
        task_id: TaskId,
        limit: Option<u32>,
        cursor: Option<String>,
    }
    EventList {
        task_id: TaskId,
        /// The cursor after which to begin.
        after: Option<u64>,
        /// At most 60,000.
        wait_ms: Option<u64>,
        limit: Option<u32>,
    }
    ProjectList {
        task_id: TaskId,
        limit: Option<u32>,
        cursor: Option<String>,
    }
    ProjectGet {
        task_id: TaskId,
        project_id: Option<ProjectId>,
    }
    TaskNew {
        name: String,
        project_id: Option<ProjectId>,
        description: Option<String>,
        requirements: Option<Vec<String>>,
        acceptance_criteria: Option<Vec<String>>,
        profile: Option<String>,
        #[schema(value_type = Option<Object>)]
        metadata: Option<Map<String, Value>>,
    }
    TaskGet {
        task_id: TaskId,
    }
    TaskList {
        project_id: Option<ProjectId>,
        limit: Option<u32>,
        cursor: Option<String>,
    }
    TaskUpdate {
        task_id: TaskId,
        name: Option<String>,
        description: Option<String>,
        requirements: Option<Vec<String>>,
        acceptance_criteria: Option<Vec<String>>,
        status: Option<TaskStatus>,
        #[schema(value_type = Option<Object>)]
        metadata: Option<Map<String, Value>>,
    }
    JobNew {
        task_id: TaskId,
        /// By which the same call again is the same job.
        job_id: Option<JobId>,
        command: Vec<String>,
        image_ref: Option<String>,
        /// `new`, `workspace:<uuid>` or `artifact:<uuid>`.
        workspace_ref: Option<String>,
        env: Option<BTreeMap<String, String>>,
        /// 3,600 by default, 10,800 at most.
        timeout_seconds: Option<u64>,
        limits: Option<LimitsRequest>,
        network_policy: Option<NetworkPolicy>,
        retry: Option<Retry>,
    }
    OfJob {
        task_id: TaskId,
        job_id: JobId,
    }
    JobStop {
        task_id: TaskId,
        job_id: JobId,
    }
    JobList {
        task_id: TaskId,
        state: Option<JobState>,
        limit: Option<u32>,
        cursor: Option<String>,
    }
    PreferenceGet {
        task_id: TaskId,
        key: String,
        /// `task` when absent.
        scope: Option<PreferenceScope>,
        scope_id: Option<Uuid>,
    }
    PreferenceList {
        task_id: TaskId,
        /// `task` when absent.
        scope: Option<PreferenceScope>,
        scope_id: Option<Uuid>,
    }
    PreferenceSet {
        task_id: TaskId,
        key: String,
        #[schema(value_type = Value)]
        value: Value,
        /// `task` when absent.
        scope: Option<PreferenceScope>,
        scope_id: Option<Uuid>,
        /// Refused unless the value's revision is this one; 0 means that there is none yet.
        if_revision: Option<i64>,
    }
    Effective {
        task_id: TaskId,
    }
    SettingGet {
        key: String,
    }
    Nothing {
    }
    Nodes {
        limit: Option<u32>,
        cursor: Option<String>,
    }
    NodeGet {
        node_id: Uuid,
    }
}

impl Arguments for ArtifactPut {
    fn plan(self) -> Result<Plan, ApiError> {
        let call = Call::new(
            Method::PUT,
            format!(
                "/v1/tasks/{}/artifacts/{}",
                self.task_id,
                words("path", &self.path)?
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
        let call = call.header("content-type", Some(media_type))?;
        Ok(Plan::Call(call.bytes(workspace::content(
            self.content,
            self.content_b64,
        )?)))
    }
}

impl Arguments for ArtifactGet {
    fn plan(self) -> Result<Plan, ApiError> {
        let part = workspace::part(None, None, self.max_bytes)?;
        let call = match (self.path, self.id) {
            (Some(path), None) => Call::get(
                format!(
                    "/v1/tasks/{}/artifacts/{}",
                    self.task_id,
                    words("path", &path)?
                ),
                self.task_id,
            ),
            (None, Some(id)) => Call::get(format!("/v1/artifacts/{id}/content"), self.task_id),
            _ => {
                return Err(ApiError::invalid(
                    "path: send either the path or the id of an artifact",
                ));
            }
        };
        Ok(Plan::Call(call.shaped(Shape::File(part))))
    }
}

fn page(call: Call, limit: Option<u32>, cursor: Option<String>) -> Plan {
    Plan::Call(call.query("limit", limit).query("cursor", cursor))
}

impl Arguments for OfTask {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(page(
            Call::get("/v1/artifacts", self.task_id).query("task_id", Some(self.task_id)),
            self.limit,
            self.cursor,
        ))
    }
}

impl Arguments for EventList {
    fn plan(self) -> Result<Plan, ApiError> {
        let call = Call::get("/v1/events", self.task_id)
            .query("task_id", Some(self.task_id))
            .query("after", self.after);
        Ok(Plan::Call(
            call.query("wait_ms", self.wait_ms)
                .query("limit", self.limit),
        ))
    }
}

impl Arguments for ProjectGet {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(match self.project_id {
            Some(id) => Plan::Call(Call::get(format!("/v1/projects/{id}"), self.task_id)),
            None => Plan::OwnProject(self.task_id),
        })
    }
}

impl Arguments for ProjectList {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(page(
            Call::get("/v1/projects", self.task_id),
            self.limit,
            self.cursor,
        ))
    }
}

impl Arguments for TaskNew {
    fn plan(self) -> Result<Plan, ApiError> {
        let body = TaskCreate {
            version: None,
            id: None,
            project_id: self.project_id,
            name: self.name,
            description: self.description,
            requirements: self.requirements.unwrap_or_default(),
            acceptance_criteria: self.acceptance_criteria.unwrap_or_default(),
            profile: self.profile,
            metadata: self.metadata,
        };
        Ok(Plan::NewTask(Box::new(body)))
    }
}

impl Arguments for TaskGet {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Call(Call::get(
            format!("/v1/tasks/{}", self.task_id),
            self.task_id,
        )))
    }
}

impl Arguments for TaskList {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(page(
            Call::get("/v1/tasks", None).query("project_id", self.project_id),
            self.limit,
            self.cursor,
        ))
    }
}

impl Arguments for TaskUpdate {
    fn plan(self) -> Result<Plan, ApiError> {
        let body = TaskPatch {
            version: None,
            name: self.name,
            description: self.description,
            requirements: self.requirements,
            acceptance_criteria: self.acceptance_criteria,
            status: self.status,
            profile: None,
            metadata: self.metadata,
        };
        Ok(Plan::Call(
            Call::new(
                Method::PATCH,
                format!("/v1/tasks/{}", self.task_id),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

impl Arguments for JobNew {
    fn plan(self) -> Result<Plan, ApiError> {
        let wrong = |error: serde_json::Error| ApiError::invalid(format!("workspace_ref: {error}"));
        let workspace_ref: Option<WorkspaceRef> = self
            .workspace_ref
            .map(|text| serde_json::from_value(text.into()))
            .transpose()
            .map_err(wrong)?;
        let body = JobCreate {
            task_id: Some(self.task_id),
            job_id: self.job_id,
            image_ref: self.image_ref,
            workspace_ref,
            command: self.command,
            env: self.env.unwrap_or_default(),
            timeout_seconds: self.timeout_seconds,
            limits: self.limits,
            network_policy: self.network_policy,
            retry: self.retry,
            ..JobCreate::default()
        };
        Ok(Plan::Call(
            Call::new(Method::POST, "/v1/jobs", self.task_id).json(&body)?,
        ))
    }
}

impl Arguments for OfJob {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Call(Call::get(
            format!("/v1/jobs/{}", self.job_id),
            self.task_id,
        )))
    }
}

impl Arguments for JobStop {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Call(Call::new(
            Method::POST,
            format!("/v1/jobs/{}/stop", self.job_id),
            self.task_id,
        )))
    }
}

impl Arguments for JobList {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(page(
            Call::get("/v1/jobs", self.task_id)
                .query("task_id", Some(self.task_id))
                .query("state", self.state),
            self.limit,
            self.cursor,
        ))
    }
}

/// Where preferences of a scope are. The task's own need no id; what the system's are, is the same for all.
fn preferences(
    task: TaskId,
    scope: Option<PreferenceScope>,
    id: Option<Uuid>,
) -> Result<String, ApiError> {
    let scope = scope.unwrap_or(PreferenceScope::Task);
    let id = match (scope, id) {
        (PreferenceScope::Task, None) => *task.as_uuid(),
        (PreferenceScope::System, None) => Uuid::nil(),
        (_, Some(id)) => id,
        (_, None) => {
            return Err(ApiError::invalid(format!(
                "scope_id: is needed with the scope {}",
                scope.as_str()
            )));
        }
    };
    Ok(format!("/v1/preferences/{}/{id}", scope.as_str()))
}

impl Arguments for PreferenceGet {
    fn plan(self) -> Result<Plan, ApiError> {
        let call = Call::get(
            preferences(self.task_id, self.scope, self.scope_id)?,
            self.task_id,
        );
        Ok(Plan::Call(
            call.query("key", Some(&self.key))
                .shaped(Shape::Preference(self.key.clone())),
        ))
    }
}

impl Arguments for PreferenceList {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Call(Call::get(
            preferences(self.task_id, self.scope, self.scope_id)?,
            self.task_id,
        )))
    }
}

impl Arguments for PreferenceSet {
    fn plan(self) -> Result<Plan, ApiError> {
        if !matches!(
            self.scope,
            None | Some(PreferenceScope::Task | PreferenceScope::Project)
        ) {
            return Err(ApiError::invalid(
                "scope: only preferences of a task or a project can be set by a tool",
            ));
        }
        let path = format!(
            "{}/{}",
            preferences(self.task_id, self.scope, self.scope_id)?,
            word("key", &self.key)?
        );
        let body = ValuePut {
            version: None,
            value: self.value,
            if_revision: self.if_revision,
        };
        Ok(Plan::Call(
            Call::new(Method::PUT, path, self.task_id).json(&body)?,
        ))
    }
}

impl Arguments for Effective {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Call(
            Call::get("/v1/preferences", self.task_id).query("task_id", Some(self.task_id)),
        ))
    }
}

impl Arguments for SettingGet {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Call(Call::get(
            format!("/v1/settings/{}", word("key", &self.key)?),
            None,
        )))
    }
}

impl Arguments for Nothing {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Call(Call::get("/v1/settings", None)))
    }
}

impl Arguments for Nodes {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(page(Call::get("/v1/nodes", None), self.limit, self.cursor))
    }
}

impl Arguments for NodeGet {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Call(Call::get(
            format!("/v1/nodes/{}", self.node_id),
            None,
        )))
    }
}
