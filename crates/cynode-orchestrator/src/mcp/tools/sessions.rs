//! `sandbox.session.*`: sandboxes that outlive a command.

use std::collections::BTreeMap;

use cynode_api::{
    ExecAccepted, ExecId, ExecRequest, ExecResult, LimitsRequest, NetworkPolicy, OutputPage, Page,
    Session, SessionEnd, SessionId, SessionState, SignalExec, SignalName, SignalScope,
    SignalSession, TaskId, UserSessionCreate, WorkspaceDisposal, WorkspaceRef,
};
use cynode_service::ApiError;
use http::Method;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    Arguments, MANAGERS, Tool, ToolEffect, arguments,
    workspace::{DEFAULT_READ, at_most},
};
use crate::mcp::plan::{ApiRequest, ExecPlan, Plan};

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::new::<Create, Session>(
            "sandbox.session.create",
            MANAGERS,
            ToolEffect::Additive,
            "Create a sandbox that runs until it is ended: a container with a workspace at \
             /workspace. Answers when it runs. For the defaults, pass 'default' as image_ref, \
             'new' as session_id and workspace_ref, and {} as constraints.",
        ),
        Tool::new::<ExecArguments, ExecAnswer>(
            "sandbox.session.exec",
            MANAGERS,
            ToolEffect::Destructive,
            "Run a command in a session and wait until it exits. argv is executed without a shell; \
             use [\"sh\", \"-c\", \"…\"] for one. With background: true it keeps running, and \
             sandbox.session.output reads its output.",
        ),
        Tool::new::<Output, OutputPage>(
            "sandbox.session.output",
            MANAGERS,
            ToolEffect::ReadOnly,
            "Read the output of a command so far, or the end of it (tail_bytes). \
             With wait_ms it waits for more. Pass next_seq back as after_seq.",
        ),
        Tool::new::<Signal, Empty>(
            "sandbox.session.signal",
            MANAGERS,
            ToolEffect::Destructive,
            "Send a signal to one command (exec_id), or to every process in the session.",
        ),
        Tool::new::<ShowSession, Session>(
            "sandbox.session.get",
            MANAGERS,
            ToolEffect::ReadOnly,
            "Show a session: its state, limits, image and end.",
        ),
        Tool::new::<List, Page<Session>>(
            "sandbox.session.list",
            MANAGERS,
            ToolEffect::ReadOnly,
            "List the sessions of a task, oldest first.",
        ),
        Tool::new::<End, Session>(
            "sandbox.session.end",
            MANAGERS,
            ToolEffect::Destructive,
            "End a session. Its workspace is deleted unless workspace is 'keep'; \
             export files that you need first.",
        ),
    ]
}

/// The empty result of tools that only report success.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Empty {}

/// The exit of a command, or its id if it runs in the background.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes an answer that is forwarded unchanged")]
pub(crate) enum ExecAnswer {
    Ended(ExecResult),
    Accepted(ExecAccepted),
}

/// The limits of a session. Absent ones have defaults.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Constraints {
    limits: Option<LimitsRequest>,
    network_policy: Option<NetworkPolicy>,
    max_lifetime_seconds: Option<u64>,
    idle_timeout_seconds: Option<u64>,
    pty_allowed: Option<bool>,
}

arguments! {
    Create {
        task_id: TaskId,
        /// `new`, or a UUID that makes the call idempotent.
        session_id: String,
        /// The reference of an allowed image, or `default`.
        image_ref: String,
        /// `new`, `workspace:<uuid>` for a workspace that an earlier session of the task kept, or
        /// `artifact:<uuid>`, or `git:<repository>[@<ref>]` for a repository of the project.
        workspace_ref: String,
        constraints: Constraints,
    }
    ExecArguments {
        task_id: TaskId,
        session_id: SessionId,
        argv: Vec<String>,
        /// 1 to 10,800,000; with `background` also 0 for no timeout.
        timeout_ms: u64,
        /// Relative paths start at `/workspace`; `.` is the workspace.
        cwd: String,
        env: BTreeMap<String, String>,
        stdin: Option<String>,
        background: Option<bool>,
        /// Per stream: 262,144 by default, 1,048,576 at most.
        max_output_bytes: Option<u64>,
    }
    Output {
        task_id: TaskId,
        session_id: SessionId,
        exec_id: ExecId,
        after_seq: Option<u64>,
        tail_bytes: Option<u64>,
        max_bytes: Option<u64>,
        /// How long to wait for new output: at most 60,000.
        wait_ms: Option<u64>,
    }
    Signal {
        task_id: TaskId,
        session_id: SessionId,
        signal: SignalName,
        /// Every process in the session when absent.
        exec_id: Option<ExecId>,
        scope: Option<SignalScope>,
    }
    ShowSession {
        task_id: TaskId,
        session_id: SessionId,
    }
    List {
        task_id: TaskId,
        state: Option<SessionState>,
        limit: Option<u32>,
        cursor: Option<String>,
    }
    End {
        task_id: TaskId,
        session_id: SessionId,
        reason: String,
        workspace: Option<WorkspaceDisposal>,
    }
}

/// The end of a session. The workspace is named explicitly: a session that has ended before keeps
/// its workspace otherwise.
pub(super) fn end(
    task: TaskId,
    session: SessionId,
    reason: Option<String>,
    workspace: WorkspaceDisposal,
) -> Result<Plan, ApiError> {
    let body = SessionEnd {
        version: None,
        reason,
        workspace: Some(workspace),
    };
    let path = format!("/v1/sessions/{session}/end");
    let request = ApiRequest::new(Method::POST, path, task).json(&body)?;
    Ok(Plan::End(Box::new(request), workspace))
}

/// The argument, unless it stands for the default.
pub(super) fn chosen(text: &str) -> Option<&str> {
    (!matches!(text, "default" | "new")).then_some(text)
}

/// The request for a new session.
pub(super) fn new_session(
    task_id: TaskId,
    session_id: Option<SessionId>,
    image_ref: &str,
    workspace_ref: &str,
    constraints: &Constraints,
) -> Result<UserSessionCreate, ApiError> {
    let workspace_ref: Option<WorkspaceRef> = chosen(workspace_ref)
        .map(|text| {
            serde_json::from_value(text.into()).map_err(|error: serde_json::Error| {
                ApiError::invalid(format!("workspace_ref: {error}"))
            })
        })
        .transpose()?;
    let &Constraints {
        limits,
        network_policy,
        max_lifetime_seconds,
        idle_timeout_seconds,
        pty_allowed,
    } = constraints;
    Ok(UserSessionCreate {
        task_id: Some(task_id),
        session_id,
        image_ref: chosen(image_ref).map(str::to_owned),
        workspace_ref,
        limits,
        network_policy,
        max_lifetime_seconds,
        idle_timeout_seconds,
        pty_allowed,
        ..UserSessionCreate::default()
    })
}

pub(super) fn create(
    task_id: TaskId,
    session_id: Option<SessionId>,
    image_ref: &str,
    workspace_ref: &str,
    constraints: &Constraints,
) -> Result<Plan, ApiError> {
    let body = new_session(task_id, session_id, image_ref, workspace_ref, constraints)?;
    Ok(Plan::Request(
        ApiRequest::new(Method::POST, "/v1/sessions", task_id).json(&body)?,
    ))
}

impl Arguments for Create {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let id = chosen(&self.session_id).map(str::parse).transpose();
        let id = id.map_err(|_| ApiError::invalid("session_id: must be a UUID, or 'new'"))?;
        create(
            self.task_id,
            id,
            &self.image_ref,
            &self.workspace_ref,
            &self.constraints,
        )
    }
}

impl Arguments for ExecArguments {
    fn into_plan(self) -> Result<Plan, ApiError> {
        at_most("max_output_bytes", self.max_output_bytes)?;
        let request = ExecRequest {
            argv: self.argv,
            cwd: Some(self.cwd),
            env: self.env,
            timeout_ms: self.timeout_ms,
            stdin: self.stdin,
            background: self.background.unwrap_or_default(),
            max_output_bytes: self.max_output_bytes,
            ..ExecRequest::default()
        };
        let exec = ExecPlan::new(self.task_id, self.session_id, request);
        Ok(Plan::Exec(Box::new(exec)))
    }
}

/// Adds the query of an output page, which is bounded even if the caller sets no limit.
pub(super) fn output(
    request: ApiRequest,
    after_seq: Option<u64>,
    tail_bytes: Option<u64>,
    max_bytes: Option<u64>,
    wait_ms: Option<u64>,
) -> Result<ApiRequest, ApiError> {
    at_most("tail_bytes", tail_bytes)?;
    at_most("max_bytes", max_bytes)?;
    let request = request
        .query("after_seq", after_seq)
        .query("tail_bytes", tail_bytes)
        .query("max_bytes", Some(max_bytes.unwrap_or(DEFAULT_READ)));
    Ok(request.query("wait_ms", wait_ms))
}

impl Arguments for Output {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let request = ApiRequest::get(
            format!(
                "/v1/sessions/{}/execs/{}/output",
                self.session_id, self.exec_id
            ),
            self.task_id,
        );
        Ok(Plan::Request(output(
            request,
            self.after_seq,
            self.tail_bytes,
            self.max_bytes,
            self.wait_ms,
        )?))
    }
}

impl Arguments for Signal {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let session = format!("/v1/sessions/{}", self.session_id);
        let request = match self.exec_id {
            Some(exec_id) => {
                let body = SignalExec {
                    version: None,
                    signal: self.signal,
                    scope: self.scope.unwrap_or_default(),
                };
                ApiRequest::new(
                    Method::POST,
                    format!("{session}/execs/{exec_id}/signal"),
                    self.task_id,
                )
                .json(&body)?
            }
            None if self.scope.is_some() => {
                return Err(ApiError::invalid(
                    "scope: applies to one command; pass its exec_id",
                ));
            }
            None => ApiRequest::new(Method::POST, format!("{session}/signal"), self.task_id).json(
                &SignalSession {
                    version: None,
                    signal: self.signal,
                },
            )?,
        };
        Ok(Plan::Request(request))
    }
}

impl Arguments for ShowSession {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Request(ApiRequest::get(
            format!("/v1/sessions/{}", self.session_id),
            self.task_id,
        )))
    }
}

impl Arguments for List {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let request = ApiRequest::get("/v1/sessions", self.task_id)
            .query("task_id", Some(self.task_id))
            .query("state", self.state);
        Ok(Plan::Request(
            request
                .query("limit", self.limit)
                .query("cursor", self.cursor),
        ))
    }
}

impl Arguments for End {
    fn into_plan(self) -> Result<Plan, ApiError> {
        let reason = Some(self.reason);
        let workspace = self.workspace.unwrap_or_default();
        end(self.task_id, self.session_id, reason, workspace)
    }
}
