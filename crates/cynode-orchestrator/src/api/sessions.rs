//! Sessions: made, found and ended here; all that happens in them is passed on to their node as it comes.

use std::time::Duration;

use axum::{
    Json,
    body::Body as HttpBody,
    extract::{FromRequest as _, OriginalUri, Request, State},
    response::{IntoResponse as _, Response},
};
use cynode_api::{
    Artifact, ErrorCode, Exec, ExecForm, ExecId, ExecRequest, ExecResult, ExportFormat,
    ExportRequest, FileWritten, Flags, ImportResult, ListRequest, ListResult, MkdirRequest,
    MoveRequest, OutputPage, Page, PatchRequest, PatchResult, Problem, SearchRequest, SearchResult,
    Session, SessionEnd, SessionId, SessionPatch, SessionState, SignalExec, SignalSession,
    StdinWrite, TaskId, UserSessionCreate, artifact_limits,
};
use cynode_service::{ApiError, QueryParams, checks::check_reason};
use futures_util::TryStreamExt as _;
use http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;

use super::{Body, Id, after, check_version, limit};
use crate::{
    Orchestrator, budget,
    caller::{Caller, Person},
    db::{NewArtifact, SessionAt},
    fleet::{Failed, answer_for},
    forward,
    gate::{self, Called, Decided},
};

/// How long a node may take to change a session.
const PATCH: Duration = Duration::from_secs(30);

/// Create a session. Everything has a default. Answers when it runs; after 60 s with 202 and the state `creating`.
#[utoipa::path(post, path = "/v1/sessions", tag = "sessions", request_body = UserSessionCreate,
    responses((status = 201, body = Session), (status = 200, body = Session, description = "The same request came before"), (status = 202, body = Session), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<UserSessionCreate>,
) -> Result<(StatusCode, Json<Session>), ApiError> {
    check_version(body.version)?;
    let (status, session) = orchestrator.create_session(&caller, body).await?;
    Ok((status, Json(session)))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct SessionQuery {
    #[param(value_type = Option<SessionState>)]
    state: Option<String>,
    task_id: Option<TaskId>,
    /// `name=value`, or `name` for any value.
    label: Option<String>,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
}

/// List sessions, oldest first, as their nodes last described them.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions", params(SessionQuery),
    responses((status = 200, body = Page<Session>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<SessionQuery>,
) -> Result<Json<Page<Session>>, ApiError> {
    let state = query
        .state
        .map(|text| text.parse::<SessionState>())
        .transpose()
        .map_err(|error| ApiError::invalid(format!("state: {error}")))?;
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
    orchestrator
        .db
        .list_sessions(
            &caller.scope,
            state,
            query.task_id,
            label,
            after(query.cursor.as_deref())?,
            limit(query.limit)?,
        )
        .await
        .map(Json)
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
    orchestrator.show_session(row).await.map(Json)
}

/// Change a session's limits of time, counted from now, or its labels.
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
    let session = answer_for(
        id,
        orchestrator
            .fleet
            .call(row.node_id, PATCH, client.patch_session(id, &patch))
            .await,
    )
    .map_err(Failed::problem)?;
    orchestrator
        .write_down(row.node_id, session, row.read_at)
        .await
        .map(Json)
}

/// End a session. 200 also when it has ended already.
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
    orchestrator.end_session(row, end).await.map(Json)
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
    orchestrator.resume_session(row).await.map(Json)
}

/// Passes a call on to the node of a session that the caller may know of. The address there is made of ids that were read as
/// ids and of the route's own words: nothing that a caller wrote in a path gets into it.
async fn pass(
    orchestrator: &Orchestrator,
    caller: &Caller,
    (id, exec_id): (SessionId, Option<ExecId>),
    below: &str,
    uri: &http::Uri,
    request: Request,
) -> Result<Response, ApiError> {
    // What was decided on is what is called.
    let decided = request.extensions().get::<Decided>().copied();
    let Decided(SessionAt { node_id, state }) = decided.ok_or_else(|| {
        ApiError::new(
            ErrorCode::SessionNotFound,
            format!("there is no session {id}"),
        )
    })?;
    if state == SessionState::Creating {
        return Err(ApiError::new(
            ErrorCode::NotRunning,
            format!("session {id} is creating"),
        ));
    }
    let client = orchestrator.fleet.client(&orchestrator.db, node_id).await?;
    let below = below.replace("{id}", &id.to_string()).replace(
        "{exec_id}",
        &exec_id.map(|id| id.to_string()).unwrap_or_default(),
    );
    let query = uri
        .query()
        .map_or_else(String::new, |query| format!("?{query}"));
    let path = format!("/v1/worker{below}{query}");
    let is_websocket = request
        .headers()
        .get(http::header::UPGRADE)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"));
    let revoked = orchestrator.over(caller, node_id);
    if is_websocket && below.ends_with("/pty") {
        let closed = orchestrator.note_closed_terminal(
            caller,
            id,
            request.extensions().get::<Called>().copied(),
        );
        forward::upgrade(&client, &path, request, revoked, closed).await
    } else {
        forward::forward(&client, &path, request, revoked).await
    }
}

/// The ids in a path.
pub(super) struct Ids(SessionId, Option<ExecId>);

impl<S: Send + Sync> axum::extract::FromRequestParts<S> for Ids {
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

/// Routes that are passed on: the node's own description holds for them.
macro_rules! passed_on {
    ($($(#[doc = $doc:literal])* $name:ident: $method:ident, $path:literal, [$($parameter:tt)*], [$($body:tt)*], [$($answers:tt)*];)*) => {
        $(
            $(#[doc = $doc])*
            #[utoipa::path($method, path = $path, tag = "sessions", params(("id" = SessionId, Path), $($parameter)*), $($body)*
                responses($($answers)*, (status = "default", body = Problem, content_type = "application/problem+json")))]
            pub(super) async fn $name(
                State(orchestrator): State<Orchestrator>,
                Person(caller): Person,
                Ids(id, exec_id): Ids,
                OriginalUri(uri): OriginalUri,
                request: Request,
            ) -> Result<Response, ApiError> {
                let below = $path.strip_prefix("/v1").unwrap_or_default();
                pass(&orchestrator, &caller, (id, exec_id), below, &uri, request).await
            }
        )*
    };
}

passed_on! {
    /// Signal everything in the sandbox but process 1.
    signal: post, "/v1/sessions/{id}/signal", [], [request_body = SignalSession,], [(status = 204)];
    /// Run a command. With `Accept: text/event-stream` its output as it comes. As `multipart/form-data` it takes a part `request` and
    /// then a part `stdin`, which is taken whole before the command starts.
    exec: post, "/v1/sessions/{id}/exec", [], [request_body(content((ExecRequest = "application/json"), (ExecForm = "multipart/form-data"))),],
        [(status = 200, content((ExecResult = "application/json"), (String = "text/event-stream"))), (status = 202, body = cynode_api::ExecAccepted)];
    /// List a session's commands.
    execs: get, "/v1/sessions/{id}/execs", [("limit" = Option<u32>, Query), ("cursor" = Option<String>, Query)], [], [(status = 200, body = Page<Exec>)];
    /// Show a command.
    show_exec: get, "/v1/sessions/{id}/execs/{exec_id}", [("exec_id" = ExecId, Path)], [], [(status = 200, body = Exec)];
    /// A command's output, while it runs and after.
    exec_output: get, "/v1/sessions/{id}/execs/{exec_id}/output",
        [("exec_id" = ExecId, Path), ("after_seq" = Option<u64>, Query), ("max_bytes" = Option<u64>, Query), ("wait_ms" = Option<u64>, Query), ("tail_bytes" = Option<u64>, Query)],
        [], [(status = 200, content((OutputPage = "application/json"), (String = "text/event-stream")))];
    /// Signal a command.
    signal_exec: post, "/v1/sessions/{id}/execs/{exec_id}/signal", [("exec_id" = ExecId, Path)], [request_body = SignalExec,], [(status = 204)];
    /// Write to a command's standard input.
    stdin: post, "/v1/sessions/{id}/execs/{exec_id}/stdin", [("exec_id" = ExecId, Path)], [request_body = StdinWrite,], [(status = 204)];
    /// Read a file.
    read_file: get, "/v1/sessions/{id}/files", [("path" = Option<String>, Query), ("path_b64" = Option<String>, Query), ("recursive" = Option<bool>, Query)], [],
        [(status = 200, body = Vec<u8>, content_type = "application/octet-stream"), (status = 206, body = Vec<u8>, content_type = "application/octet-stream")];
    /// A file's size, mode and hash.
    stat_file: head, "/v1/sessions/{id}/files", [("path" = Option<String>, Query), ("path_b64" = Option<String>, Query), ("recursive" = Option<bool>, Query)], [], [(status = 200)];
    /// Write a file, whole or not at all.
    write_file: put, "/v1/sessions/{id}/files", [("path" = Option<String>, Query), ("path_b64" = Option<String>, Query), ("recursive" = Option<bool>, Query)],
        [request_body(content = Vec<u8>, content_type = "application/octet-stream"),], [(status = 201, body = FileWritten), (status = 200, body = FileWritten)];
    /// Delete a file or a directory.
    delete_file: delete, "/v1/sessions/{id}/files", [("path" = Option<String>, Query), ("path_b64" = Option<String>, Query), ("recursive" = Option<bool>, Query)], [], [(status = 204)];
    /// List files.
    list_files: post, "/v1/sessions/{id}/files:list", [], [request_body = ListRequest,], [(status = 200, body = ListResult)];
    /// Search in files.
    search_files: post, "/v1/sessions/{id}/files:search", [], [request_body = SearchRequest,], [(status = 200, body = SearchResult)];
    /// Apply a unified diff, whole or not at all.
    patch_files: post, "/v1/sessions/{id}/files:patch", [], [request_body = PatchRequest,], [(status = 200, body = PatchResult)];
    /// Move a file.
    move_file: post, "/v1/sessions/{id}/files:move", [], [request_body = MoveRequest,], [(status = 204)];
    /// Make a directory.
    mkdir: post, "/v1/sessions/{id}/files:mkdir", [], [request_body = MkdirRequest,], [(status = 204)];
    /// Unpack a tar archive into the sandbox.
    import: post, "/v1/sessions/{id}/import", [("path" = Option<String>, Query), ("path_b64" = Option<String>, Query), ("recursive" = Option<bool>, Query)],
        [request_body(content = Vec<u8>, content_type = "application/x-tar"),],
        [(status = 204), (status = 200, body = ImportResult, description = "Some of it looks like credentials")];
    /// Open a terminal (WebSocket), where the session allows it.
    pty: get, "/v1/sessions/{id}/pty", [("cols" = Option<u16>, Query), ("rows" = Option<u16>, Query), ("argv" = Option<Vec<String>>, Query)], [], [(status = 101)];
}

/// Export the workspace, as a patch against a commit or as a tar archive: an artifact of the session's task. With
/// `Accept: application/octet-stream`, or the type of the bytes, the bytes themselves and no artifact.
#[utoipa::path(post, path = "/v1/sessions/{id}/export", tag = "sessions", params(("id" = SessionId, Path)), request_body = ExportRequest,
    responses((status = 201, body = Artifact), (status = 200, content((Vec<u8> = "application/x-tar"), (Vec<u8> = "text/x-diff"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn export(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Ids(id, _): Ids,
    OriginalUri(uri): OriginalUri,
    request: Request,
) -> Result<Response, ApiError> {
    let below = "/sessions/{id}/export";
    let wants_bytes = gate::wants_bytes(request.headers());
    let (mut parts, body) = request.into_parts();
    let Body(export) =
        Body::<ExportRequest>::from_request(Request::from_parts(parts.clone(), body), &()).await?;
    let is_patch = export.format == ExportFormat::Patch;
    parts.headers.remove(http::header::CONTENT_LENGTH);
    let request = Request::from_parts(
        parts,
        HttpBody::from(crate::db::to_json(&export).to_string()),
    );
    let answer = pass(&orchestrator, &caller, (id, None), below, &uri, request).await?;
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
                format!("the export broke off: {error}"),
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
    let task_id = orchestrator.db.session(&caller.scope, id).await?.task_id;
    let path = format!("exports/{id}.{extension}");
    let new = NewArtifact {
        task_id,
        path: &path,
        staged: &staged,
        media_type,
        created_by: &caller.user_name,
        flags: &Flags::default(),
    };
    let artifact = orchestrator
        .db
        .insert_artifact(&new, &orchestrator.blobs)
        .await?;
    Ok((StatusCode::CREATED, Json(artifact)).into_response())
}
