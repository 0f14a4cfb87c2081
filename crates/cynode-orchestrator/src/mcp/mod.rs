//! `/mcp` and `/mcp/coding`: the user API as tools, for agents.
//!
//! A tool call is authenticated like any other call (`identity/`). The gateway finds the tool,
//! checks that it is open to the caller and enabled, parses its arguments (`tools/`) and turns them
//! into a request to the user API (`plan.rs`), which passes the gate and does the work (`run.rs`).
//! No state is kept between calls, so any orchestrator can answer any of them.
//!
//! `/mcp/coding` has few tools with defaults, for a token that names exactly one task. The gateway
//! fills in that task, and the token's own session where a call names none (`own_session.rs`).
//!
//! Invariant: a caller can't tell a tool that it may not use from one that does not exist. The
//! audit trail can.

mod duplicates;
mod help;
mod own_session;
mod plain;
mod plan;
mod progress;
mod run;
mod schema;
mod surface;
mod text;
mod tools;
mod view;

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::any,
};
use cynode_api::{ErrorCode, TaskId, TokenKind};
use cynode_service::{ApiError, compute, edge, json};
use futures_util::FutureExt as _;
use http::request::Parts;
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock,
        Implementation, ListToolsResult, PaginatedRequestParams, ProgressNotificationParam,
        ServerCapabilities, ServerConfig, Tool as ListedTool,
    },
    service::RequestContext,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService, session::never::NeverSessionManager,
    },
};
use serde_json::{Value, json};

use crate::{
    Orchestrator,
    caller::Caller,
    gate::{self, Refusal, Stage},
};
use plan::OwnSession;
use progress::Running;
use run::{ToolFailure, ToolOutput};
use surface::ToolSet;
use tools::Tool;
use view::View;

/// The interval of progress notifications, for clients that request them.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Clone)]
struct Gateway {
    orchestrator: Orchestrator,
    /// The user API behind authentication: from the gate on.
    routes: Router,
    surface: ToolSet,
}

type Service = StreamableHttpService<Gateway, NeverSessionManager>;

/// The routes of the gateway. `routes` is the user API from the gate on.
pub(crate) fn routes(orchestrator: &Orchestrator, routes: &Router) -> Router {
    let gateway = |surface| Gateway {
        orchestrator: orchestrator.clone(),
        routes: routes.clone(),
        surface,
    };
    let service = |surface| -> Service {
        let gateway = gateway(surface);
        let config = StreamableHttpServerConfig::default()
            .with_legacy_session_mode(false)
            .with_json_response(true)
            .with_max_request_body_bytes(edge::MAX_BODY)
            .with_allowed_hosts(orchestrator.config.mcp_hosts())
            .enforce_origin_validation();
        StreamableHttpService::new(
            move || Ok(gateway.clone()),
            Arc::new(NeverSessionManager::default()),
            config,
        )
    };
    let dotted = service(ToolSet::Full { underscored: false });
    let underscored = service(ToolSet::Full { underscored: true });
    let coding = gateway(ToolSet::Coding);
    Router::new()
        .route(
            "/mcp",
            any(move |request: Request| {
                let service = if wants_underscores(&request) {
                    underscored
                } else {
                    dotted
                };
                async move { service.handle(request).await }
            }),
        )
        .merge(
            Router::new()
                .route_service("/mcp/coding", service(ToolSet::Coding))
                .layer(middleware::from_fn_with_state(coding, admit_to_coding)),
        )
        .layer(middleware::from_fn_with_state(
            orchestrator.clone(),
            limit_body,
        ))
}

fn wants_underscores(request: &Request) -> bool {
    let query = request.uri().query();
    query.is_some_and(|query| query.split('&').any(|pair| pair == "names=underscore"))
}

/// Refuses tokens that do not determine the task of every call on `/mcp/coding`.
async fn admit_to_coding(State(gateway): State<Gateway>, request: Request, next: Next) -> Response {
    let Some(caller) = request.extensions().get::<Caller>().cloned() else {
        return ApiError::new(ErrorCode::Unauthorized, "no bearer token was sent").into_response();
    };
    if caller.kind == TokenKind::ProjectManager
        && caller.project_id.is_none()
        && caller.task_ids.len() == 1
    {
        return next.run(request).await;
    }
    let error = ApiError::new(
        ErrorCode::Forbidden,
        "/mcp/coding needs the token of a project manager for exactly one task",
    )
    .with_remedy(
        "Create one with 'cynode token create --kind project_manager --task TASK', or use /mcp, \
         whose tools name the task.",
    );
    let running = Running::default();
    let request_id = request
        .headers()
        .get("x-request-id")
        .and_then(|id| id.to_str().ok());
    let client = Client {
        caller: &caller,
        surface: ToolSet::Coding,
        request_id,
        body_bytes: 0,
        running: &running,
    };
    let call = ToolCall {
        client: &client,
        name: "",
        task_id: None,
    };
    let refusal = Stage::AgentType.refuse()(error);
    match gateway.record_refusal(call, &refusal).await {
        Ok(()) => refusal.error.into_response(),
        Err(error) => error.into_response(),
    }
}

/// The size of the body that a tool call arrived in.
#[derive(Clone, Copy, Debug)]
struct BodyBytes(usize);

/// Reads the body before the MCP library parses it, within the limits of every JSON body.
async fn limit_body(
    State(orchestrator): State<Orchestrator>,
    request: Request,
    next: Next,
) -> Response {
    let (mut parts, body) = request.into_parts();
    let Some(caller) = parts.extensions.get::<Caller>() else {
        return ApiError::new(ErrorCode::Unauthorized, "no bearer token was sent").into_response();
    };
    match gate::json_body(&orchestrator, caller, body).await {
        Ok((bytes, room)) => {
            let text = bytes.clone();
            let duplicate =
                compute::run(bytes.len(), move || duplicates::duplicate_name(&text)).await;
            if let Some(name) = duplicate {
                return ApiError::invalid(format!("'{name}' occurs twice in one object"))
                    .into_response();
            }
            parts.extensions.insert(BodyBytes(bytes.len()));
            next.run(Request::from_parts(parts, json::body(bytes, room)))
                .await
        }
        Err(error) => error.into_response(),
    }
}

/// The client of a tool call, from the HTTP request that it arrived in.
struct Client<'a> {
    caller: &'a Caller,
    surface: ToolSet,
    request_id: Option<&'a str>,
    body_bytes: usize,
    /// The command that the call is running.
    running: &'a Running,
}

fn client<'a>(
    context: &'a RequestContext<RoleServer>,
    surface: ToolSet,
    running: &'a Running,
) -> Result<Client<'a>, ErrorData> {
    let parts = context.extensions.get::<Parts>();
    let parts = parts.and_then(|parts| Some((parts, parts.extensions.get::<Caller>()?)));
    let (parts, caller) =
        parts.ok_or_else(|| ErrorData::internal_error("the caller is not authenticated", None))?;
    let request_id = parts
        .headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok());
    let body_bytes = parts.extensions.get::<BodyBytes>().map_or(0, |size| size.0);
    Ok(Client {
        caller,
        surface,
        request_id,
        body_bytes,
        running,
    })
}

fn unknown_tool() -> ErrorData {
    let (code, remedy) = (ErrorCode::UnknownTool, ErrorCode::UnknownTool.remedy());
    ErrorData::invalid_params(
        code.as_str(),
        Some(json!({"code": code.as_str(), "message": code.title(), "remedy": remedy})),
    )
}

impl ServerHandler for Gateway {
    fn get_info(&self) -> ServerConfig {
        let mut info = ServerConfig::default();
        info.capabilities = ServerCapabilities::builder().enable_tools().build();
        info.server_info = Implementation::new("cynode", env!("CARGO_PKG_VERSION"));
        info.instructions = Some(self.surface.instructions());
        info
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let running = Running::default();
        let client = client(&context, self.surface, &running)?;
        let tools = self
            .surface
            .tools()
            .iter()
            .filter(|tool| tool.audience.includes(client.caller.kind))
            .map(|tool| self.surface.listed(tool))
            .collect();
        Ok(ListToolsResult::with_all_items(tools).with_cache_scope(CacheScope::Private))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let running = Running::default();
        let client = client(&context, self.surface, &running)?;
        let token = context.meta.get_progress_token();
        let call = AssertUnwindSafe(self.call_for(&client, request)).catch_unwind();
        let progress = async {
            let Some(token) = token else {
                return std::future::pending().await;
            };
            let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
            ticks.tick().await;
            let mut seconds = 0.0;
            loop {
                ticks.tick().await;
                seconds += PROGRESS_INTERVAL.as_secs_f64();
                let mut progress = ProgressNotificationParam::new(token.clone(), seconds);
                progress.message = self.last_line(&running).await;
                drop(context.peer.notify_progress(progress).await);
            }
        };
        tokio::select! {
            result = call => {
                // Without an answer after a panic, the client would wait forever.
                let panicked = |_| Err(ErrorData::internal_error("the tool panicked", None));
                result.unwrap_or_else(panicked).map(Into::into)
            }
            // The call in progress is abandoned, as if a caller of the user API disconnected.
            () = context.ct.cancelled() => {
                Err(ErrorData::internal_error("the call was cancelled", None))
            }
            () = progress => Err(ErrorData::internal_error("progress ended", None)),
        }
    }

    fn get_tool(&self, name: &str) -> Option<ListedTool> {
        self.surface
            .find(name)
            .map(|tool| self.surface.listed(tool))
    }
}

/// What a refusal record says about a tool call.
#[derive(Clone, Copy)]
struct ToolCall<'a> {
    client: &'a Client<'a>,
    name: &'a str,
    /// The task that the arguments name, if any.
    task_id: Option<TaskId>,
}

impl Gateway {
    /// Runs one tool call. Only a tool that does not exist for this caller is a protocol error.
    async fn call_for(
        &self,
        client: &Client<'_>,
        request: CallToolRequestParams,
    ) -> Result<CallToolResult, ErrorData> {
        let CallToolRequestParams {
            name, arguments, ..
        } = request;
        let arguments = arguments.unwrap_or_default();
        // On `/mcp/coding` the token names the task, before anything else is looked at.
        let task_id = if client.surface.is_coding() {
            client.caller.task_ids.first().copied()
        } else {
            arguments
                .get("task_id")
                .and_then(Value::as_str)
                .and_then(|id| id.parse::<TaskId>().ok())
        };
        let call = ToolCall {
            client,
            name: &name,
            task_id,
        };
        let Some(tool) = client.surface.find(&name) else {
            return self.refuse_unknown(call, Stage::Tool).await;
        };
        if !tool.audience.includes(client.caller.kind) {
            return self.refuse_unknown(call, Stage::Allowlist).await;
        }
        let view = View::new(client.surface, tool, &arguments);
        if let Some(error) = self.disabled(tool).await {
            let refusal = Stage::Enabled.refuse()(error);
            return Ok(self.refuse(call, refusal, &view).await);
        }
        let own = match self.own_session_for(client).await {
            Ok(own) => own,
            Err(error) => {
                let refusal = Stage::Resource.refuse()(error);
                return Ok(self.refuse(call, refusal, &view).await);
            }
        };
        // A call may last for hours, so only the plan outlives this, not the large arguments.
        let plan = compute::run(client.body_bytes, move || tool.plan(&arguments, own)).await;
        Ok(match plan {
            Ok(plan) => match self.run(client, tool, plan).await {
                Ok(output) => succeeded(output, &view),
                Err(failure) if failure.is_recorded => failure.result(client, &view),
                Err(failure) => self.refuse(call, failure.refusal, &view).await,
            },
            Err(error) => {
                let refusal = Stage::Arguments.refuse()(error);
                self.refuse(call, refusal, &view).await
            }
        })
    }

    /// The session of the token, for tools of `/mcp/coding`.
    async fn own_session_for(&self, client: &Client<'_>) -> Result<Option<OwnSession>, ApiError> {
        if client.surface.is_coding() {
            self.own_session(client.caller).await.map(Some)
        } else {
            Ok(None)
        }
    }

    async fn refuse_unknown(
        &self,
        call: ToolCall<'_>,
        stage: Stage,
    ) -> Result<CallToolResult, ErrorData> {
        let error = ApiError::new(
            ErrorCode::UnknownTool,
            "there is no such tool for this caller",
        );
        match self.record_refusal(call, &stage.refuse()(error)).await {
            Ok(()) => Err(unknown_tool()),
            Err(error) => {
                let view = View::unknown(call.client.surface);
                Ok(ToolFailure::recorded(Stage::Audit, error).result(call.client, &view))
            }
        }
    }

    /// Records a refusal and answers with it.
    async fn refuse(&self, call: ToolCall<'_>, refusal: Refusal, view: &View) -> CallToolResult {
        let failure = match self.record_refusal(call, &refusal).await {
            Ok(()) => ToolFailure::recorded(refusal.stage, refusal.error),
            Err(error) => ToolFailure::recorded(Stage::Audit, error),
        };
        failure.result(call.client, view)
    }

    /// The error for a tool that a system setting disables.
    async fn disabled(&self, tool: &Tool) -> Option<ApiError> {
        let key = tool.enabled_by?;
        match self.orchestrator.db.setting(key).await {
            Ok(Some(setting)) if setting.value == Value::Bool(true) => None,
            Ok(_) => {
                let remedy = format!(
                    "Have an administrator set {key} to true ('cynode setting set'), \
                     or use an allowed image."
                );
                let error = ApiError::new(
                    ErrorCode::ToolDisabled,
                    format!("{} is disabled", self.surface.spelled(tool.name)),
                );
                Some(error.with_remedy(remedy))
            }
            Err(error) => Some(error.into()),
        }
    }
}

fn succeeded(mut output: ToolOutput, view: &View) -> CallToolResult {
    let text = text::render(&output, view);
    if view.is_coding() {
        text::bound(&mut output.value, view);
        if let (Some(note), Value::Object(members)) = (&output.note, &mut output.value) {
            members.insert("note".to_owned(), json!(note));
        }
    }
    let mut answer = CallToolResult::success(vec![ContentBlock::text(text)]);
    answer.structured_content = Some(output.value);
    answer
}
