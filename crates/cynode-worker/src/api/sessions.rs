//! Session routes.

use std::sync::Arc;

use axum::{Json, extract::State, response::Response};
use cynode_api::{
    ExecVia, Page, Problem, Session, SessionCreate, SessionEnd, SessionId, SessionOutcome,
    SessionPatch, SessionState, SignalOutcome, SignalSession, TaskId,
};
use cynode_sba_proto::Request;
use cynode_service::{
    ApiError, JsonBody, QueryParams,
    pages::{PageBuilder, json_size},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Api;
use crate::{
    calls::with_result,
    execs::kill_everything_by_runtime,
    sessions::{CreateOutcome, SessionEntry, check_version},
};

/// An id in a path. A value that is not a UUID is reported as not found.
pub(super) struct Id<T>(pub(super) T);

impl<S: Send + Sync> axum::extract::FromRequestParts<S> for Id<SessionId> {
    type Rejection = ApiError;

    async fn from_request_parts(
        parts: &mut http::request::Parts,
        state: &S,
    ) -> Result<Self, Self::Rejection> {
        let path =
            axum::extract::Path::<std::collections::HashMap<String, String>>::from_request_parts(
                parts, state,
            )
            .await
            .map_err(|error| ApiError::invalid(error.body_text()))?;
        parse_id(&path, "id", cynode_api::ErrorCode::SessionNotFound).map(Id)
    }
}

pub(super) fn parse_id<T: std::str::FromStr>(
    path: &std::collections::HashMap<String, String>,
    name: &str,
    missing: cynode_api::ErrorCode,
) -> Result<T, ApiError> {
    let text = path.get(name).map(String::as_str).unwrap_or_default();
    text.parse().map_err(|_| {
        ApiError::new(
            missing,
            format!(
                "'{}' is not an id",
                text.chars().take(100).collect::<String>()
            ),
        )
    })
}

/// Create a session. Responds once it runs, or after 60 s with 202 and the state `creating`.
#[utoipa::path(post, path = "/v1/worker/sessions", tag = "sessions", request_body = SessionCreate,
    responses(
        (status = 201, body = Session),
        (status = 200, body = Session, description = "An identical earlier request created it"),
        (status = 202, body = Session),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create(
    State(api): State<Api>,
    JsonBody(request): JsonBody<SessionCreate>,
) -> Result<Response, ApiError> {
    create_response(api.sessions.create(request).await)
}

fn create_response(outcome: Result<CreateOutcome, ApiError>) -> Result<Response, ApiError> {
    outcome.map(|outcome| match outcome {
        CreateOutcome::New(session) => session_response(StatusCode::CREATED, session),
        CreateOutcome::Existing(session) => session_response(StatusCode::OK, session),
        CreateOutcome::Creating(session) => session_response(StatusCode::ACCEPTED, session),
    })
}

/// The response with a session that was created or changed.
fn session_response(status: StatusCode, session: Session) -> Response {
    with_result(&SessionOutcome::from(&session), (status, Json(session)))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct SessionListQuery {
    #[param(value_type = Option<SessionState>)]
    state: Option<String>,
    task_id: Option<TaskId>,
    /// `name=value`, or `name` for any value.
    label: Option<String>,
    /// 1 to 1000; 1000 by default.
    limit: Option<usize>,
    cursor: Option<String>,
}

/// List sessions, oldest first.
#[utoipa::path(get, path = "/v1/worker/sessions", tag = "sessions", params(SessionListQuery),
    responses(
        (status = 200, body = Page<Session>),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(api): State<Api>,
    QueryParams(query): QueryParams<SessionListQuery>,
) -> Result<Json<Page<Session>>, ApiError> {
    let state = query
        .state
        .map(|text| text.parse::<SessionState>())
        .transpose()
        .map_err(|error| ApiError::invalid(format!("state: {error}")))?;
    let has_label = |session: &Session| {
        query
            .label
            .as_ref()
            .is_none_or(|label| match label.split_once('=') {
                Some((name, value)) => session.labels.get(name).is_some_and(|found| found == value),
                None => session.labels.contains_key(label),
            })
    };
    let object = |entry: &Arc<SessionEntry>| {
        let session = entry.object();
        let matches = state.is_none_or(|state| session.state == state)
            && query.task_id.is_none_or(|task| session.task_id == task)
            && has_label(&session);
        matches.then_some(session)
    };
    page(
        api.sessions.entries(),
        query.limit,
        query.cursor.as_deref(),
        |entry| entry.id(),
        object,
    )
    .map(Json)
}

/// A page of a list; the cursor of the next page is the id of the last item. Objects are built one
/// by one until the page is full; entries without one are skipped.
pub(super) fn page<E, T: Serialize, I: PartialEq + ToString + std::str::FromStr>(
    entries: Vec<E>,
    limit: Option<usize>,
    cursor: Option<&str>,
    id: impl Fn(&E) -> I,
    object: impl Fn(&E) -> Option<T>,
) -> Result<Page<T>, ApiError> {
    let limit = limit.unwrap_or(1_000);
    if !(1..=1_000).contains(&limit) {
        return Err(ApiError::invalid("limit: must be between 1 and 1000"));
    }
    let first = match cursor {
        None => 0,
        Some(cursor) => {
            let after = cursor
                .parse::<I>()
                .map_err(|_| ApiError::invalid("cursor: is invalid"))?;
            entries
                .iter()
                .position(|entry| id(entry) == after)
                .map_or(entries.len(), |position| position + 1)
        }
    };
    let (mut page, mut last) = (PageBuilder::new(limit), None);
    for entry in entries.into_iter().skip(first) {
        let Some(item) = object(&entry) else { continue };
        let size = json_size(&item);
        if !page.add(item, size) {
            return Ok(Page {
                items: page.into_items(),
                next_cursor: last.map(|last| id(&last).to_string()),
            });
        }
        last = Some(entry);
    }
    Ok(Page {
        items: page.into_items(),
        next_cursor: None,
    })
}

/// Show a session.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}", tag = "sessions",
    params(("id" = SessionId, Path)),
    responses(
        (status = 200, body = Session),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
) -> Result<Json<Session>, ApiError> {
    Ok(Json(api.sessions.get(id)?.object()))
}

/// Change a session's labels, or its time limits, counted from now.
#[utoipa::path(patch, path = "/v1/worker/sessions/{id}", tag = "sessions",
    params(("id" = SessionId, Path)), request_body = SessionPatch,
    responses(
        (status = 200, body = Session),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn patch(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<SessionPatch>,
) -> Result<Response, ApiError> {
    api.sessions
        .patch(id, request)
        .await
        .map(|session| session_response(StatusCode::OK, session))
}

/// End a session. Responds with 200 also if it has already ended.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/end", tag = "sessions",
    params(("id" = SessionId, Path)), request_body = SessionEnd,
    responses(
        (status = 200, body = Session),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn end(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<SessionEnd>,
) -> Result<Response, ApiError> {
    api.sessions
        .end(id, request)
        .await
        .map(|session| session_response(StatusCode::OK, session))
}

#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SessionResume {
    version: Option<u32>,
}

/// Start a new container for a lost or ended session on its retained workspace.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/resume", tag = "sessions",
    params(("id" = SessionId, Path)), request_body = SessionResume,
    responses(
        (status = 201, body = Session),
        (status = 200, body = Session, description = "The session is already running"),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn resume(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<SessionResume>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    create_response(api.sessions.resume(id).await)
}

/// Signal all processes in the sandbox except process 1. Works without a free process slot inside.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/signal", tag = "sessions",
    params(("id" = SessionId, Path)), request_body = SignalSession,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn signal(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    JsonBody(request): JsonBody<SignalSession>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    let (_, live) = api.sessions.live(id)?;
    match api.sessions.config.exec_via {
        ExecVia::Agent => {
            live.link()?
                .call(&Request::SignalAll {
                    signal: request.signal.number(),
                })
                .await?;
        }
        ExecVia::Runtime => kill_everything_by_runtime(&live, request.signal.number()),
    }
    Ok(with_result(
        &SignalOutcome {
            exec_id: None,
            signal: request.signal,
            scope: None,
        },
        StatusCode::NO_CONTENT,
    ))
}
