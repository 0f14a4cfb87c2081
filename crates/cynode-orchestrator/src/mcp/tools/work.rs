//! Projects, tasks, jobs, preferences, settings and nodes.

use std::collections::BTreeMap;

use cynode_api::{
    Job, JobCreate, JobId, JobState, LimitsRequest, NetworkPolicy, Node, Page, Preference,
    PreferenceScope, Project, ProjectId, Retry, Setting, Task, TaskCreate, TaskId, TaskPatch,
    TaskStatus, ValuePut, WorkspaceRef,
};
use cynode_service::ApiError;
use http::Method;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::{AGENTS, Arguments, MANAGERS, Tool, ToolEffect, arguments};
use crate::{
    db::to_json,
    mcp::plan::{ApiRequest, Plan, ResultFormat, segment},
};

/// What a tool returns of the result of a job.
const RESULT_BYTES: usize = 64 * 1024;

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::new::<ProjectGet, Project>(
            "db.project.get",
            AGENTS,
            ToolEffect::ReadOnly,
            "Show a project, by default that of the task.",
        ),
        Tool::new::<ProjectList, Page<Project>>(
            "db.project.list",
            AGENTS,
            ToolEffect::ReadOnly,
            "List the projects that the caller may see.",
        ),
        Tool::new::<TaskNew, Task>(
            "db.task.create",
            MANAGERS,
            ToolEffect::Additive,
            "Create a task.",
        ),
        Tool::new::<TaskGet, Task>("db.task.get", AGENTS, ToolEffect::ReadOnly, "Show a task."),
        Tool::new::<TaskList, Page<Task>>(
            "db.task.list",
            AGENTS,
            ToolEffect::ReadOnly,
            "List the tasks that the caller may see.",
        ),
        Tool::new::<TaskUpdate, Task>(
            "db.task.update",
            MANAGERS,
            ToolEffect::Destructive,
            "Change a task. Absent fields stay unchanged.",
        ),
        Tool::new::<JobNew, Job>(
            "db.job.create",
            MANAGERS,
            ToolEffect::Additive,
            "Start a job in its own sandbox: one command, or a job specification with steps \
             (job: {protocol_version: \"1.0\", constraints: {max_runtime_seconds, \
             max_output_bytes}, steps: [{type, args}]}). Answers immediately; poll db.job.get or \
             events.list for its end.",
        ),
        Tool::new::<JobGet, Job>(
            "db.job.get",
            AGENTS,
            ToolEffect::ReadOnly,
            "Show a job: its state and, once it has ended, its exit code, output, result and \
             artifacts.",
        ),
        Tool::new::<JobList, Page<Job>>(
            "db.job.list",
            AGENTS,
            ToolEffect::ReadOnly,
            "List the jobs of a task.",
        ),
        Tool::new::<JobStop, Job>(
            "db.job.stop",
            MANAGERS,
            ToolEffect::Destructive,
            "Stop a job.",
        ),
        Tool::new::<PreferenceGet, Preference>(
            "db.preference.get",
            AGENTS,
            ToolEffect::ReadOnly,
            "Show one preference of a task or its project, or of another scope.",
        ),
        Tool::new::<PreferenceList, Page<Preference>>(
            "db.preference.list",
            AGENTS,
            ToolEffect::ReadOnly,
            "List the preferences of a scope, by default the task's.",
        ),
        Tool::new::<PreferenceEffective, Page<Preference>>(
            "db.preference.effective",
            AGENTS,
            ToolEffect::ReadOnly,
            "List the preferences in effect for the task, each from its narrowest scope.",
        ),
        Tool::new::<PreferenceSet, Preference>(
            "db.preference.set",
            MANAGERS,
            ToolEffect::Destructive,
            "Set a preference of the task or its project.",
        ),
        Tool::new::<SettingGet, Setting>(
            "db.system_setting.get",
            AGENTS,
            ToolEffect::ReadOnly,
            "Show a system setting.",
        ),
        Tool::new::<SettingList, Page<Setting>>(
            "db.system_setting.list",
            AGENTS,
            ToolEffect::ReadOnly,
            "List the system settings.",
        ),
        Tool::new::<NodeList, Page<Node>>(
            "node.list",
            AGENTS,
            ToolEffect::ReadOnly,
            "List the nodes on which sandboxes run.",
        ),
        Tool::new::<NodeGet, Node>("node.get", AGENTS, ToolEffect::ReadOnly, "Show a node."),
    ]
}

arguments! {
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
        /// Makes the call idempotent.
        job_id: Option<JobId>,
        /// With `job`, the command is the runner of the job.
        command: Option<Vec<String>>,
        /// A job specification of cynode-sba; its ids may be left out.
        #[schema(value_type = Option<Object>)]
        job: Option<Map<String, Value>>,
        image_ref: Option<String>,
        /// `new`, `workspace:<uuid>`, `artifact:<uuid>` or `git:<repository>[@<ref>]`.
        workspace_ref: Option<String>,
        env: Option<BTreeMap<String, String>>,
        /// 3,600 by default, 10,800 at most.
        timeout_seconds: Option<u64>,
        limits: Option<LimitsRequest>,
        network_policy: Option<NetworkPolicy>,
        retry: Option<Retry>,
    }
    JobGet {
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
        /// The revision that the value must have; 0 if it must not exist yet.
        if_revision: Option<i64>,
    }
    PreferenceEffective {
        task_id: TaskId,
    }
    SettingGet {
        key: String,
    }
    SettingList {
    }
    NodeList {
        limit: Option<u32>,
        cursor: Option<String>,
    }
    NodeGet {
        node_id: Uuid,
    }
}

pub(super) fn page(request: ApiRequest, limit: Option<u32>, cursor: Option<String>) -> Plan {
    Plan::Request(request.query("limit", limit).query("cursor", cursor))
}

impl Arguments for ProjectGet {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(match self.project_id {
            Some(id) => Plan::Request(ApiRequest::get(format!("/v1/projects/{id}"), self.task_id)),
            None => Plan::TaskProject(self.task_id),
        })
    }
}

impl Arguments for ProjectList {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(page(
            ApiRequest::get("/v1/projects", self.task_id),
            self.limit,
            self.cursor,
        ))
    }
}

impl Arguments for TaskNew {
    fn into_plan(self) -> Result<Plan, ApiError> {
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
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Request(ApiRequest::get(
            format!("/v1/tasks/{}", self.task_id),
            self.task_id,
        )))
    }
}

impl Arguments for TaskList {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(page(
            ApiRequest::get("/v1/tasks", None).query("project_id", self.project_id),
            self.limit,
            self.cursor,
        ))
    }
}

impl Arguments for TaskUpdate {
    fn into_plan(self) -> Result<Plan, ApiError> {
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
        Ok(Plan::Request(
            ApiRequest::new(
                Method::PATCH,
                format!("/v1/tasks/{}", self.task_id),
                self.task_id,
            )
            .json(&body)?,
        ))
    }
}

impl Arguments for JobNew {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let invalid =
            |error: serde_json::Error| ApiError::invalid(format!("workspace_ref: {error}"));
        let workspace_ref: Option<WorkspaceRef> = self
            .workspace_ref
            .map(|text| serde_json::from_value(text.into()))
            .transpose()
            .map_err(invalid)?;
        let body = JobCreate {
            task_id: Some(self.task_id),
            job_id: self.job_id,
            image_ref: self.image_ref,
            workspace_ref,
            command: self.command.unwrap_or_default(),
            env: self.env.unwrap_or_default(),
            timeout_seconds: self.timeout_seconds,
            limits: self.limits,
            network_policy: self.network_policy,
            retry: self.retry,
            ..JobCreate::default()
        };
        let mut body = to_json(&body);
        if let Some(mut job) = self.job {
            // Models are poor at making ids up.
            job.entry("task_id").or_insert_with(|| json!(self.task_id));
            job.entry("job_id")
                .or_insert_with(|| json!(self.job_id.unwrap_or_else(JobId::generate)));
            // Not parsed here: the route lists everything that is wrong with it.
            body["job"] = Value::Object(job);
        }
        Ok(Plan::Request(
            ApiRequest::new(Method::POST, "/v1/jobs", self.task_id).json(&body)?,
        ))
    }
}

impl Arguments for JobGet {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Request(
            ApiRequest::get(format!("/v1/jobs/{}", self.job_id), self.task_id)
                .query("max_result_bytes", Some(RESULT_BYTES)),
        ))
    }
}

impl Arguments for JobStop {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Request(ApiRequest::new(
            Method::POST,
            format!("/v1/jobs/{}/stop", self.job_id),
            self.task_id,
        )))
    }
}

impl Arguments for JobList {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(page(
            ApiRequest::get("/v1/jobs", self.task_id)
                .query("task_id", Some(self.task_id))
                .query("state", self.state),
            self.limit,
            self.cursor,
        ))
    }
}

/// The path of a scope's preferences. The scopes `task` and `system` need no id.
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
                "scope_id: required with the scope {}",
                scope.as_str()
            )));
        }
    };
    Ok(format!("/v1/preferences/{}/{id}", scope.as_str()))
}

impl Arguments for PreferenceGet {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let request = ApiRequest::get(
            preferences(self.task_id, self.scope, self.scope_id)?,
            self.task_id,
        );
        Ok(Plan::Request(
            request
                .query("key", Some(&self.key))
                .with_format(ResultFormat::Preference(self.key.clone())),
        ))
    }
}

impl Arguments for PreferenceList {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Request(ApiRequest::get(
            preferences(self.task_id, self.scope, self.scope_id)?,
            self.task_id,
        )))
    }
}

impl Arguments for PreferenceSet {
    fn into_plan(self) -> Result<Plan, ApiError> {
        if !matches!(
            self.scope,
            None | Some(PreferenceScope::Task | PreferenceScope::Project)
        ) {
            return Err(ApiError::invalid(
                "scope: tools can set preferences of tasks and projects only",
            ));
        }
        let path = format!(
            "{}/{}",
            preferences(self.task_id, self.scope, self.scope_id)?,
            segment("key", &self.key)?
        );
        let body = ValuePut {
            version: None,
            value: self.value,
            if_revision: self.if_revision,
        };
        Ok(Plan::Request(
            ApiRequest::new(Method::PUT, path, self.task_id).json(&body)?,
        ))
    }
}

impl Arguments for PreferenceEffective {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Request(
            ApiRequest::get("/v1/preferences", self.task_id).query("task_id", Some(self.task_id)),
        ))
    }
}

impl Arguments for SettingGet {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Request(ApiRequest::get(
            format!("/v1/settings/{}", segment("key", &self.key)?),
            None,
        )))
    }
}

impl Arguments for SettingList {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Request(ApiRequest::get("/v1/settings", None)))
    }
}

impl Arguments for NodeList {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(page(
            ApiRequest::get("/v1/nodes", None),
            self.limit,
            self.cursor,
        ))
    }
}

impl Arguments for NodeGet {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Request(ApiRequest::get(
            format!("/v1/nodes/{}", self.node_id),
            None,
        )))
    }
}
