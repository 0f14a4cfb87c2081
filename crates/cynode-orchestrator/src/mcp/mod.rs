//! `/mcp`: the user API as tools, for agents.
//!
//! A tool call is authenticated like any other call (`identity/`). The gateway finds the tool,
//! checks that it is open to the caller and enabled, parses its arguments (`tools/`) and turns them
//! into a request to the user API (`plan.rs`), which passes the gate and does the work (`run.rs`).
//! No state is kept between calls, so any orchestrator can answer any of them.
//!
//! Invariant: a caller can't tell a tool that it may not use from one that does not exist. The
//! audit trail can.

mod help;
mod plan;
mod run;
mod schema;
mod text;
mod tools;

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
};
use cynode_api::{ErrorCode, TaskId};
use cynode_service::{ApiError, compute, edge, json};
use futures_util::FutureExt as _;
use http::request::Parts;
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock,
        Implementation, ListToolsResult, PaginatedRequestParams, ProgressNotificationParam,
        ServerCapabilities, ServerConfig, Tool as ListedTool, ToolAnnotations,
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
use run::ToolFailure;
use tools::{Kind, Tool};

/// The interval of progress notifications, for clients that request them.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Clone)]
struct Gateway {
    orchestrator: Orchestrator,
    /// The user API behind authentication: from the gate on.
    routes: Router,
}

/// The `/mcp` route. `routes` is the user API from the gate on.
pub(crate) fn routes(orchestrator: &Orchestrator, routes: Router) -> Router {
    let gateway = Gateway {
        orchestrator: orchestrator.clone(),
        routes,
    };
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true)
        .with_max_request_body_bytes(edge::MAX_BODY)
        .with_allowed_hosts(orchestrator.config.mcp_hosts())
        .enforce_origin_validation();
    Router::new()
        .route_service(
            "/mcp",
            StreamableHttpService::new(
                move || Ok(gateway.clone()),
                Arc::new(NeverSessionManager::default()),
                config,
            ),
        )
        .layer(middleware::from_fn_with_state(
            orchestrator.clone(),
            limit_body,
        ))
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
    /// Whether the client uses tool names without dots.
    underscored: bool,
    request_id: Option<&'a str>,
    body_bytes: usize,
}

fn client(context: &RequestContext<RoleServer>) -> Result<Client<'_>, ErrorData> {
    let parts = context.extensions.get::<Parts>();
    let parts = parts.and_then(|parts| Some((parts, parts.extensions.get::<Caller>()?)));
    let (parts, caller) =
        parts.ok_or_else(|| ErrorData::internal_error("the caller is not authenticated", None))?;
    let underscored = parts
        .uri
        .query()
        .is_some_and(|query| query.split('&').any(|pair| pair == "names=underscore"));
    let request_id = parts
        .headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok());
    let body_bytes = parts.extensions.get::<BodyBytes>().map_or(0, |size| size.0);
    Ok(Client {
        caller,
        underscored,
        request_id,
        body_bytes,
    })
}

/// A tool as clients see it.
fn listed(tool: &Tool, underscored: bool) -> ListedTool {
    let name = if underscored {
        tool.underscored()
    } else {
        tool.name.to_owned()
    };
    let annotations = ToolAnnotations::new()
        .read_only(tool.kind == Kind::Reads)
        .destructive(tool.kind == Kind::Changes)
        .open_world(false);
    ListedTool::new(name, tool.description, Arc::clone(&tool.input))
        .with_raw_output_schema(Arc::clone(&tool.output))
        .with_annotations(annotations)
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
        info.instructions = Some(
            "Sandboxes for agents: sessions, commands, files, artifacts. Call help.list first."
                .to_owned(),
        );
        info
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let client = client(&context)?;
        let tools = tools::all()
            .iter()
            .filter(|tool| tool.audience.includes(client.caller.kind))
            .map(|tool| listed(tool, client.underscored))
            .collect();
        Ok(ListToolsResult::with_all_items(tools).with_cache_scope(CacheScope::Private))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let client = client(&context)?;
        let token = context.meta.get_progress_token();
        let mut call =
            std::pin::pin!(AssertUnwindSafe(self.call_for(&client, request)).catch_unwind());
        let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
        ticks.tick().await;
        let mut seconds = 0.0;
        loop {
            tokio::select! {
                result = &mut call => {
                    // Without an answer after a panic, the client would wait forever.
                    let panicked = |_| Err(ErrorData::internal_error("the tool panicked", None));
                    return result.unwrap_or_else(panicked).map(Into::into);
                }
                // The call in progress is abandoned, as if a caller of the user API disconnected.
                () = context.ct.cancelled() => {
                    return Err(ErrorData::internal_error("the call was cancelled", None));
                }
                _ = ticks.tick(), if token.is_some() => {
                    seconds += PROGRESS_INTERVAL.as_secs_f64();
                    if let Some(token) = &token {
                        let progress = ProgressNotificationParam::new(token.clone(), seconds);
                        drop(context.peer.notify_progress(progress).await);
                    }
                }
            }
        }
    }

    fn get_tool(&self, name: &str) -> Option<ListedTool> {
        let dotted = tools::find(name, false);
        dotted
            .map(|tool| listed(tool, false))
            .or_else(|| tools::find(name, true).map(|tool| listed(tool, true)))
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
        let task_id = arguments
            .get("task_id")
            .and_then(Value::as_str)
            .and_then(|id| id.parse::<TaskId>().ok());
        let call = ToolCall {
            client,
            name: &name,
            task_id,
        };
        let Some(tool) = tools::find(&name, client.underscored) else {
            return self.refuse_unknown(call, Stage::Tool).await;
        };
        if !tool.audience.includes(client.caller.kind) {
            return self.refuse_unknown(call, Stage::Allowlist).await;
        }
        if let Some(error) = self.disabled(tool).await {
            return Ok(self.refuse(call, Stage::Enabled.refuse()(error)).await);
        }
        // A call may last for hours, so only the plan outlives this, not the large arguments.
        match compute::run(client.body_bytes, move || tool.plan(&arguments)).await {
            Ok(plan) => Ok(match self.run(client, tool, plan).await {
                Ok(result) => succeeded(result),
                Err(failure) if failure.is_recorded => failure.result(client),
                Err(failure) => self.refuse(call, failure.refusal).await,
            }),
            Err(error) => Ok(self.refuse(call, Stage::Arguments.refuse()(error)).await),
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
            Err(error) => Ok(ToolFailure::recorded(Stage::Audit, error).result(call.client)),
        }
    }

    /// Records a refusal and answers with it.
    async fn refuse(&self, call: ToolCall<'_>, refusal: Refusal) -> CallToolResult {
        let failure = match self.record_refusal(call, &refusal).await {
            Ok(()) => ToolFailure::recorded(refusal.stage, refusal.error),
            Err(error) => ToolFailure::recorded(Stage::Audit, error),
        };
        failure.result(call.client)
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
                    format!("{} is disabled", tool.name),
                );
                Some(error.with_remedy(remedy))
            }
            Err(error) => Some(error.into()),
        }
    }
}

fn succeeded(result: Value) -> CallToolResult {
    let mut answer = CallToolResult::success(vec![ContentBlock::text(text::render(&result))]);
    answer.structured_content = Some(result);
    answer
}
