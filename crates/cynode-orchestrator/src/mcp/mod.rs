//! `/mcp`: the system as tools, for agents.
//!
//! One tool call: the caller's token is looked at like everybody's (`caller.rs`); the tool is found, and whether it is for that kind
//! of caller and switched on; its arguments are read (`tools/`) and become a call of the user API (`plan.rs`), which passes the gate
//! and does the work (`run.rs`). Nothing is kept between two calls: any orchestrator can answer any of them.
//!
//! What must stay true: a tool that a caller may not use looks like one that there is not. The audit says which it was.

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
        ServerCapabilities, ServerConfig, Tool as Described, ToolAnnotations,
    },
    service::RequestContext,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService, session::never::NeverSessionManager,
    },
};
use serde_json::{Value, json};

pub(crate) use run::Stage;

use crate::{Orchestrator, caller::Caller, gate};
use tools::{Kind, Tool};

/// How often a client that asked for it hears that a call goes on.
const PROGRESS: Duration = Duration::from_secs(2);

/// By which tool a call of the user API comes, and for which task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByTool {
    pub(crate) name: &'static str,
    pub(crate) task: Option<cynode_api::TaskId>,
}

/// What every call of a tool has.
#[derive(Clone)]
struct Gateway {
    orchestrator: Orchestrator,
    /// The user API, behind the finding out of who calls.
    routes: Router,
}

/// The route. `routes` is the user API, from the gate on.
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
            bounded,
        ))
}

/// The size of the body that a call came in.
#[derive(Clone, Copy, Debug)]
struct BodyBytes(usize);

/// Takes the body before the protocol's own parser does, within the bounds of every JSON body.
async fn bounded(
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

/// What a request says beside the call itself.
struct Asked<'a> {
    caller: &'a Caller,
    underscored: bool,
    request_id: Option<&'a str>,
    body_bytes: usize,
}

fn asked(context: &RequestContext<RoleServer>) -> Result<Asked<'_>, ErrorData> {
    let parts = context.extensions.get::<Parts>();
    let found = parts.and_then(|parts| Some((parts, parts.extensions.get::<Caller>()?)));
    let (parts, caller) =
        found.ok_or_else(|| ErrorData::internal_error("nobody is known to call", None))?;
    let underscored = parts
        .uri
        .query()
        .is_some_and(|query| query.split('&').any(|pair| pair == "names=underscore"));
    let request_id = parts
        .headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok());
    let body_bytes = parts.extensions.get::<BodyBytes>().map_or(0, |size| size.0);
    Ok(Asked {
        caller,
        underscored,
        request_id,
        body_bytes,
    })
}

/// As clients see a tool.
fn described(tool: &Tool, underscored: bool) -> Described {
    let name = if underscored {
        tool.underscored()
    } else {
        tool.name.to_owned()
    };
    let annotations = ToolAnnotations::new()
        .read_only(tool.kind == Kind::Reads)
        .destructive(tool.kind == Kind::Changes)
        .open_world(false);
    Described::new(name, tool.about, Arc::clone(&tool.input))
        .with_raw_output_schema(Arc::clone(&tool.output))
        .with_annotations(annotations)
}

fn unknown() -> ErrorData {
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
        let asked = asked(&context)?;
        let tools = tools::all()
            .iter()
            .filter(|tool| tool.for_whom.has(asked.caller.kind))
            .map(|tool| described(tool, asked.underscored))
            .collect();
        Ok(ListToolsResult::with_all_items(tools).with_cache_scope(CacheScope::Private))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let asked = asked(&context)?;
        let token = context.meta.get_progress_token();
        let mut called =
            std::pin::pin!(AssertUnwindSafe(self.called(&asked, request)).catch_unwind());
        let mut ticks = tokio::time::interval(PROGRESS);
        ticks.tick().await;
        let mut seconds = 0.0;
        loop {
            tokio::select! {
                // Without an answer the caller would wait for ever.
                result = &mut called => return result.unwrap_or_else(|_| Err(ErrorData::internal_error("the tool broke off", None))).map(Into::into),
                // Whoever asked went away: what was begun is treated as if a caller of the user API had.
                () = context.ct.cancelled() => return Err(ErrorData::internal_error("the caller went away", None)),
                _ = ticks.tick(), if token.is_some() => {
                    seconds += PROGRESS.as_secs_f64();
                    if let Some(token) = &token {
                        drop(context.peer.notify_progress(ProgressNotificationParam::new(token.clone(), seconds)).await);
                    }
                }
            }
        }
    }

    fn get_tool(&self, name: &str) -> Option<Described> {
        let dotted = tools::find(name, false);
        dotted
            .map(|tool| described(tool, false))
            .or_else(|| tools::find(name, true).map(|tool| described(tool, true)))
    }
}

impl Gateway {
    /// One call, from its name to its result. Only a tool that there is not, for this caller, is an error of the protocol.
    async fn called(
        &self,
        asked: &Asked<'_>,
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
        let refusal = |stage: &'static str, error: ApiError| run::Refused {
            tool: &name,
            stage,
            error,
            task_id,
        };
        let Some(tool) = tools::find(&name, asked.underscored) else {
            return self.unknown(asked, &refusal("tool", no_tool())).await;
        };
        if !tool.for_whom.has(asked.caller.kind) {
            return self.unknown(asked, &refusal("allowlist", no_tool())).await;
        }
        if let Some(error) = self.disabled(tool).await {
            return Ok(self.refused(asked, &refusal("enabled", error)).await);
        }
        // The arguments are large, and a call may last for hours: only the plan outlives this.
        match compute::apart(asked.body_bytes, move || tool.plan(&arguments)).await {
            Ok(plan) => Ok(match self.run(asked, tool, plan).await {
                Ok(result) => succeeded(result),
                Err(failed) if failed.is_recorded => failed.result(asked),
                Err(failed) => {
                    self.refused(asked, &refusal(failed.stage, failed.error))
                        .await
                }
            }),
            Err(error) => Ok(self.refused(asked, &refusal("arguments", error)).await),
        }
    }

    async fn unknown(
        &self,
        asked: &Asked<'_>,
        refused: &run::Refused<'_>,
    ) -> Result<CallToolResult, ErrorData> {
        match self.note(asked, refused).await {
            Ok(()) => Err(unknown()),
            Err(error) => Ok(run::Failed {
                stage: "audit",
                error,
                is_recorded: true,
            }
            .result(asked)),
        }
    }

    /// Writes a refusal down, and answers it.
    async fn refused(&self, asked: &Asked<'_>, refused: &run::Refused<'_>) -> CallToolResult {
        match self.note(asked, refused).await {
            Ok(()) => run::Failed {
                stage: refused.stage,
                error: refused.error.clone(),
                is_recorded: true,
            }
            .result(asked),
            Err(error) => run::Failed {
                stage: "audit",
                error,
                is_recorded: true,
            }
            .result(asked),
        }
    }

    /// Why a tool is switched off, if it is.
    async fn disabled(&self, tool: &Tool) -> Option<ApiError> {
        let key = tool.enabled_by?;
        match self.orchestrator.db.setting(key).await {
            Ok(Some(setting)) if setting.value == Value::Bool(true) => None,
            Ok(_) => {
                let remedy = format!(
                    "Have an administrator set {key} to true ('cynode setting set'), or use an image that is allowed."
                );
                let error = ApiError::new(
                    ErrorCode::ToolDisabled,
                    format!("{} is switched off", tool.name),
                );
                Some(ApiError(Box::new(error.0.with_remedy(remedy))))
            }
            Err(error) => Some(error),
        }
    }
}

fn no_tool() -> ApiError {
    ApiError::new(
        ErrorCode::UnknownTool,
        "there is no such tool for this caller",
    )
}

fn succeeded(result: Value) -> CallToolResult {
    let mut answer = CallToolResult::success(vec![ContentBlock::text(text::of(&result))]);
    answer.structured_content = Some(result);
    answer
}
