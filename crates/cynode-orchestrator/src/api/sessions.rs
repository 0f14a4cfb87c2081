//! Sessions: created, listed and ended here; calls that concern their content are forwarded to the
//! node.

use std::time::Duration;

use axum::{
    Extension, Json,
    body::Body as HttpBody,
    extract::{FromRequest, FromRequestParts, MatchedPath, OriginalUri, Request, State},
    response::{IntoResponse as _, Response},
};
use cynode_api::{
    Artifact, CallId, EditRequest, ErrorCode, Exec, ExecForm, ExecId, ExecRequest, ExecResult,
    ExportFormat, ExportRequest, FileEdited, FileWritten, Flags, ImportResult, ListRequest,
    ListResult, MkdirRequest, MoveRequest, OutputPage, Page, PatchRequest, PatchResult, Problem,
    SearchRequest, SearchResult, Session, SessionEnd, SessionId, SessionPatch, SessionState,
    SignalExec, SignalSession, StdinWrite, TaskId, UserSessionCreate, artifact_limits,
};
use cynode_service::{ApiError, JsonBody, QueryParams, checks::check_reason, json};
use futures_util::TryStreamExt as _;
use http::{StatusCode, header};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{
    Body, Id, check_version, page_request, patches,
    requests::{check_session, check_session_name},
    states,
};
use crate::{
    Orchestrator, budget,
    caller::{Caller, Person},
    db::{ExportSource, NewArtifact, Order, SessionAt, SessionQuery},
    fleet::response_for,
    forward,
    gate::{self, AdmittedPatch, AuthorizedSession},
};

/// The base of an export that names what the workspace began with.
const INITIAL_STATE: &str = "brought";
/// How long a node may take to change a session.
const PATCH_TIMEOUT: Duration = Duration::from_secs(30);

/// Create a session. All fields have defaults. Responds when it runs; after 60 s with 202 and the
/// state `creating`.
#[utoipa::path(post, path = "/v1/sessions", tag = "sessions", request_body = UserSessionCreate,
    responses((status = 201, body = Session), (status = 200, body = Session, description = "The request is a repetition"), (status = 202, body = Session), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    call: Option<Extension<CallId>>,
    Body(body): Body<UserSessionCreate>,
) -> Result<(StatusCode, Json<Session>), ApiError> {
    check_version(body.version)?;
    check_session(&body)?;
    let call_id = call.map(|Extension(id)| id);
    let (session, is_new) = orchestrator.create_session(&caller, body, call_id).await?;
    let status = match (session.state, is_new) {
        (SessionState::Creating, _) => StatusCode::ACCEPTED,
        (_, true) => StatusCode::CREATED,
        (_, false) => StatusCode::OK,
    };
    Ok((status, Json(session)))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct SessionListQuery {
    /// A state, or several separated by commas.
    state: Option<String>,
    task_id: Option<TaskId>,
    /// `name=value`, or `name` for any value.
    label: Option<String>,
    /// The whole name. Live sessions of one owner have different names; ended ones may share them.
    name: Option<String>,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
    /// `oldest` first by default.
    #[param(inline)]
    order: Option<Order>,
    /// Any part of the id's text: 1 to 36 of 0-9, a-f and '-'.
    id_part: Option<String>,
}

/// List sessions as their nodes last described them.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions", params(SessionListQuery),
    responses((status = 200, body = Page<Session>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<SessionListQuery>,
) -> Result<Json<Page<Session>>, ApiError> {
    let states = states::<SessionState>(query.state.as_deref())?;
    query.name.as_deref().map_or(Ok(()), check_session_name)?;
    if query
        .label
        .as_ref()
        .is_some_and(|label| label.contains('\0'))
    {
        return Err(ApiError::invalid(
            "label: must not contain the character NUL",
        ));
    }
    let label = query.label.as_deref().map(|label| {
        label
            .split_once('=')
            .map_or((label, None), |(name, value)| (name, Some(value)))
    });
    let filter = SessionQuery {
        states: &states,
        task_id: query.task_id,
        label,
        name: query.name.as_deref(),
    };
    let page = page_request(
        query.limit,
        query.cursor.as_deref(),
        query.order,
        query.id_part.clone(),
    )?;
    Ok(Json(
        orchestrator
            .db
            .list_sessions(&caller.scope, &filter, &page)
            .await?,
    ))
}

/// Show a session.
#[utoipa::path(get, path = "/v1/sessions/{id}", tag = "sessions", params(("id" = SessionId, Path)),
    responses((status = 200, body = Session), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<SessionId>,
) -> Result<Json<Session>, ApiError> {
    let row = orchestrator.db.session(&caller.scope, id).await?;
    Ok(Json(orchestrator.sessions.show(row).await?))
}

/// Change a session's time limits, counted from now, or its labels.
#[utoipa::path(patch, path = "/v1/sessions/{id}", tag = "sessions", params(("id" = SessionId, Path)), request_body = SessionPatch,
    responses((status = 200, body = Session), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn patch(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<SessionId>,
    Body(patch): Body<SessionPatch>,
) -> Result<Json<Session>, ApiError> {
    let row = orchestrator.db.session(&caller.scope, id).await?;
    let client = orchestrator
        .fleet
        .client(&orchestrator.db, row.node_id)
        .await?;
    let session = response_for(
        id,
        orchestrator
            .fleet
            .call(row.node_id, PATCH_TIMEOUT, client.patch_session(id, &patch))
            .await,
    )?;
    Ok(Json(
        orchestrator
            .sessions
            .store_report(&row, session, row.read_at)
            .await?,
    ))
}

/// End a session. Responds with 200 also when it has already ended.
#[utoipa::path(post, path = "/v1/sessions/{id}/end", tag = "sessions", params(("id" = SessionId, Path)), request_body = SessionEnd,
    responses((status = 200, body = Session), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn end(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<SessionId>,
    Body(end): Body<SessionEnd>,
) -> Result<Json<Session>, ApiError> {
    check_version(end.version)?;
    end.reason.as_deref().map_or(Ok(()), check_reason)?;
    let row = orchestrator.db.session(&caller.scope, id).await?;
    Ok(Json(orchestrator.sessions.end(row, end).await?))
}

#[derive(Clone, Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SessionResume {
    version: Option<u32>,
}

/// Give a session whose container is gone a new one on its kept workspace.
#[utoipa::path(post, path = "/v1/sessions/{id}/resume", tag = "sessions", params(("id" = SessionId, Path)), request_body = SessionResume,
    responses((status = 200, body = Session), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn resume(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<SessionId>,
    Body(body): Body<SessionResume>,
) -> Result<Json<Session>, ApiError> {
    check_version(body.version)?;
    let row = orchestrator.db.session(&caller.scope, id).await?;
    Ok(Json(orchestrator.sessions.resume(row).await?))
}

/// A call that is forwarded to the node of its session.
pub(super) struct NodeCall {
    orchestrator: Orchestrator,
    caller: Caller,
    ids: Ids,
    /// The route's pattern, such as `/v1/sessions/{id}/exec`.
    route: String,
    query: Option<String>,
    request: Request,
}

impl FromRequest<Orchestrator> for NodeCall {
    type Rejection = ApiError;

    async fn from_request(
        request: Request,
        orchestrator: &Orchestrator,
    ) -> Result<Self, Self::Rejection> {
        let (mut parts, body) = request.into_parts();
        let Person(caller) = Person::from_request_parts(&mut parts, orchestrator).await?;
        let ids = Ids::from_request_parts(&mut parts, orchestrator).await?;
        let Ok(OriginalUri(uri)) = OriginalUri::from_request_parts(&mut parts, orchestrator).await;
        let route = parts
            .extensions
            .get::<MatchedPath>()
            .ok_or_else(|| ApiError::new(ErrorCode::Internal, "the call matched no route"))?;
        Ok(Self {
            orchestrator: orchestrator.clone(),
            caller,
            ids,
            route: route.as_str().to_owned(),
            query: uri.query().map(str::to_owned),
            request: Request::from_parts(parts, body),
        })
    }
}

impl NodeCall {
    /// The session that the gate has authorized.
    fn session(&self) -> Result<SessionAt, ApiError> {
        let session = self.request.extensions().get::<AuthorizedSession>();
        let Ids(id, _) = self.ids;
        let missing = || {
            ApiError::new(
                ErrorCode::SessionNotFound,
                format!("there is no session {id}"),
            )
        };
        session
            .map(|AuthorizedSession(session)| *session)
            .ok_or_else(missing)
    }

    /// Forwards the call to the session that the gate has authorized. The path on the node is built
    /// from the route's pattern and from parsed ids: no text of the caller's path gets into it.
    async fn forward(self) -> Result<Response, ApiError> {
        let SessionAt { node_id, state } = self.session()?;
        let Self {
            orchestrator,
            caller,
            ids: Ids(id, exec_id),
            route,
            query,
            request,
        } = self;
        if state == SessionState::Creating {
            return Err(ApiError::new(
                ErrorCode::NotRunning,
                format!("session {id} is creating"),
            ));
        }
        let client = orchestrator.fleet.client(&orchestrator.db, node_id).await?;
        let node_path = route
            .strip_prefix("/v1")
            .unwrap_or_default()
            .replace("{id}", &id.to_string())
            .replace(
                "{exec_id}",
                &exec_id.map(|id| id.to_string()).unwrap_or_default(),
            );
        let query = query.map_or_else(String::new, |query| format!("?{query}"));
        let path = format!("/v1/worker{node_path}{query}");
        let is_websocket = request
            .headers()
            .get(http::header::UPGRADE)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"));
        let must_end = orchestrator.call_must_end(&caller, node_id);
        if is_websocket && node_path.ends_with("/pty") {
            let call_id = request.extensions().get::<CallId>().copied();
            let closed = orchestrator.terminal_close_recorder(&caller, id, call_id);
            forward::upgrade(&client, &path, request, must_end, closed).await
        } else {
            forward::forward(&client, &path, request, must_end).await
        }
    }
}

/// The ids in a path.
#[derive(Clone, Copy)]
pub(super) struct Ids(SessionId, Option<ExecId>);

impl<S: Send + Sync> FromRequestParts<S> for Ids {
    type Rejection = ApiError;

    async fn from_request_parts(
        parts: &mut http::request::Parts,
        state: &S,
    ) -> Result<Self, Self::Rejection> {
        let path =
            axum::extract::Path::<std::collections::HashMap<String, String>>::from_request_parts(
                parts, state,
            )
            .await;
        let path = path.map_err(|error| ApiError::invalid(error.body_text()))?;
        let missing = |code: ErrorCode, text: &str| {
            ApiError::new(
                code,
                format!(
                    "'{}' is not an id",
                    text.chars().take(100).collect::<String>()
                ),
            )
        };
        let text = path.get("id").map(String::as_str).unwrap_or_default();
        let id = text
            .parse()
            .map_err(|_| missing(ErrorCode::SessionNotFound, text))?;
        let exec_id = path
            .get("exec_id")
            .map(|text| {
                text.parse()
                    .map_err(|_| missing(ErrorCode::ExecNotFound, text))
            })
            .transpose()?;
        Ok(Self(id, exec_id))
    }
}

// The handlers below forward their calls unchanged; the node's own documentation applies to them.

/// Signal everything in the sandbox but process 1.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/signal",
    tag = "sessions",
    params(("id" = SessionId, Path)),
    request_body = SignalSession,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn signal(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Run a command. With `Accept: text/event-stream` its output as it comes. As
/// `multipart/form-data` it takes a part `request` and then a part `stdin`, which is taken
/// whole before the command starts.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/exec",
    tag = "sessions",
    params(("id" = SessionId, Path)),
    request_body(content((ExecRequest = "application/json"), (ExecForm = "multipart/form-data"))),
    responses(
        (status = 200, content((ExecResult = "application/json"), (String = "text/event-stream"))),
        (status = 202, body = cynode_api::ExecAccepted),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn exec(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// List a session's commands.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/execs",
    tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("limit" = Option<u32>, Query),
        ("cursor" = Option<String>, Query),
    ),
    responses(
        (status = 200, body = Page<Exec>),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn execs(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Show a command.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/execs/{exec_id}",
    tag = "sessions",
    params(("id" = SessionId, Path), ("exec_id" = ExecId, Path)),
    responses(
        (status = 200, body = Exec),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn show_exec(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// A command's output, while it runs and after.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/execs/{exec_id}/output",
    tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("exec_id" = ExecId, Path),
        ("after_seq" = Option<u64>, Query),
        ("max_bytes" = Option<u64>, Query),
        ("wait_ms" = Option<u64>, Query),
        ("tail_bytes" = Option<u64>, Query),
    ),
    responses(
        (status = 200, content((OutputPage = "application/json"), (String = "text/event-stream"))),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn exec_output(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Signal a command.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/execs/{exec_id}/signal",
    tag = "sessions",
    params(("id" = SessionId, Path), ("exec_id" = ExecId, Path)),
    request_body = SignalExec,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn signal_exec(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Write to a command's standard input.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/execs/{exec_id}/stdin",
    tag = "sessions",
    params(("id" = SessionId, Path), ("exec_id" = ExecId, Path)),
    request_body = StdinWrite,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn stdin(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Read a file.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/files",
    tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("path" = Option<String>, Query),
        ("path_b64" = Option<String>, Query),
        ("recursive" = Option<bool>, Query),
    ),
    responses(
        (status = 200, body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 206, body = Vec<u8>, content_type = "application/octet-stream"),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn read_file(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// A file's size, mode and hash.
#[utoipa::path(
    head,
    path = "/v1/sessions/{id}/files",
    tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("path" = Option<String>, Query),
        ("path_b64" = Option<String>, Query),
        ("recursive" = Option<bool>, Query),
    ),
    responses(
        (status = 200),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn stat_file(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Write a file, whole or not at all.
#[utoipa::path(
    put,
    path = "/v1/sessions/{id}/files",
    tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("path" = Option<String>, Query),
        ("path_b64" = Option<String>, Query),
        ("recursive" = Option<bool>, Query),
    ),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses(
        (status = 201, body = FileWritten),
        (status = 200, body = FileWritten),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn write_file(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Delete a file or a directory.
#[utoipa::path(
    delete,
    path = "/v1/sessions/{id}/files",
    tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("path" = Option<String>, Query),
        ("path_b64" = Option<String>, Query),
        ("recursive" = Option<bool>, Query),
    ),
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn delete_file(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// List files.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/files:list",
    tag = "sessions",
    params(("id" = SessionId, Path)),
    request_body = ListRequest,
    responses(
        (status = 200, body = ListResult),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn list_files(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Search in files.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/files:search",
    tag = "sessions",
    params(("id" = SessionId, Path)),
    request_body = SearchRequest,
    responses(
        (status = 200, body = SearchResult),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn search_files(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Apply a patch, whole or not at all.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/files:patch",
    tag = "sessions",
    params(("id" = SessionId, Path)),
    request_body = PatchRequest,
    responses(
        (status = 200, body = PatchResult),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn patch_files(call: NodeCall) -> Result<Response, ApiError> {
    let SessionAt { node_id, .. } = call.session()?;
    let capability = call.orchestrator.db.node(node_id).await?.capability;
    let (mut parts, body) = call.request.into_parts();
    let patch = parts.extensions.remove::<AdmittedPatch>();
    let read = Request::from_parts(parts.clone(), body);
    let JsonBody(request) = JsonBody::<PatchRequest>::from_request(read, &()).await?;
    let outgoing = patches::outgoing(&request, patch, capability.encoded_patches)?;
    drop(request);
    parts
        .headers
        .insert(header::CONTENT_TYPE, outgoing.media_type);
    parts.headers.remove(header::CONTENT_LENGTH);
    let room = json::room(outgoing.body.len(), 0).await;
    let call = NodeCall {
        request: Request::from_parts(parts, json::body(outgoing.body, room)),
        query: outgoing.query,
        ..call
    };
    call.forward().await
}

/// Watch a file, or a directory with what is below it: `created`, `modified`, `deleted`, `moved`
/// and `overflow` as events.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/files:watch",
    tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("path" = Option<String>, Query),
        ("path_b64" = Option<String>, Query),
    ),
    responses(
        (status = 200, content_type = "text/event-stream", body = serde_json::Value),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn watch_files(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Replace an exact text in a file, once or everywhere.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/files:edit",
    tag = "sessions",
    params(("id" = SessionId, Path)),
    request_body = EditRequest,
    responses(
        (status = 200, body = FileEdited),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn edit_file(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Move a file.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/files:move",
    tag = "sessions",
    params(("id" = SessionId, Path)),
    request_body = MoveRequest,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn move_file(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Make a directory.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/files:mkdir",
    tag = "sessions",
    params(("id" = SessionId, Path)),
    request_body = MkdirRequest,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn mkdir(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Unpack a tar archive into the sandbox.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/import",
    tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("path" = Option<String>, Query),
        ("path_b64" = Option<String>, Query),
        ("recursive" = Option<bool>, Query),
    ),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses(
        (status = 204),
        (status = 200, body = ImportResult, description = "Some of it looks like credentials"),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn import(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Open a terminal (WebSocket), where the session allows it.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/pty",
    tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("cols" = Option<u16>, Query),
        ("rows" = Option<u16>, Query),
        ("argv" = Option<Vec<String>>, Query),
    ),
    responses(
        (status = 101),
        (status = "default", body = Problem, content_type = "application/problem+json"),
    ),
)]
pub(super) async fn pty(call: NodeCall) -> Result<Response, ApiError> {
    call.forward().await
}

/// Export the workspace, as a patch against a commit or as a tar archive, and store it as an
/// artifact of the session's task. The default base is the commit that the workspace was seeded
/// from, if it was. With `Accept: application/octet-stream`, or the type of the
/// bytes, responds with the bytes and stores no artifact.
#[utoipa::path(post, path = "/v1/sessions/{id}/export", tag = "sessions", params(("id" = SessionId, Path)), request_body = ExportRequest,
    responses((status = 201, body = Artifact), (status = 200, content((Vec<u8> = "application/x-tar"), (Vec<u8> = "text/x-diff"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn export(call: NodeCall) -> Result<Response, ApiError> {
    let (orchestrator, caller) = (call.orchestrator.clone(), call.caller.clone());
    let Ids(id, _) = call.ids;
    let wants_bytes = gate::wants_bytes(call.request.headers());
    let (mut parts, body) = call.request.into_parts();
    let Body(mut export) =
        Body::<ExportRequest>::from_request(Request::from_parts(parts.clone(), body), &()).await?;
    let is_patch = export.format == ExportFormat::Patch;
    let row = orchestrator.db.session(&caller.scope, id).await?;
    let base_commit = row.object.base_commit.filter(|_| is_patch);
    // A workspace from a repository differs from the commit that it came from, whatever was
    // committed in it since.
    if export.base.is_none() {
        export.base.clone_from(&base_commit);
    }
    let base_commit = base_commit.filter(|commit| {
        let base = export.base.as_deref();
        base == Some(commit) || base == Some(INITIAL_STATE)
    });
    parts.headers.remove(http::header::CONTENT_LENGTH);
    let request = Request::from_parts(
        parts,
        HttpBody::from(crate::db::to_json(&export).to_string()),
    );
    let answer = NodeCall { request, ..call }.forward().await?;
    if wants_bytes || !answer.status().is_success() {
        return Ok(answer);
    }
    let (extension, media_type) = if is_patch {
        ("patch", "text/x-diff")
    } else {
        ("tar", "application/x-tar")
    };
    let broken = |error: axum::Error| {
        budget::refusal(&error).unwrap_or_else(|| {
            ApiError::new(
                ErrorCode::NodeUnreachable,
                format!("the export was interrupted: {error}"),
            )
        })
    };
    let _memory = budget::staging_memory(caller.id(), orchestrator.blobs.buffered()).await?;
    let bytes = budget::staged(caller.id(), answer.into_body())
        .into_data_stream()
        .map_err(broken);
    let staged = orchestrator
        .blobs
        .stage(bytes, artifact_limits::MAX_BYTES, None)
        .await?;
    let path = format!("exports/{id}.{extension}");
    let new = NewArtifact {
        task_id: row.task_id,
        path: &path,
        staged: &staged,
        media_type,
        created_by: &caller.user_name,
        flags: &Flags::default(),
        source: Some(ExportSource {
            session_id: id,
            base_commit: base_commit.as_deref(),
        }),
    };
    let artifact = orchestrator
        .db
        .insert_artifact(&new, &orchestrator.blobs)
        .await?;
    Ok((StatusCode::CREATED, Json(artifact)).into_response())
}
