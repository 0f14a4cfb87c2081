//! Artifacts of tasks: streamed in and out.

use axum::{
    Json,
    body::Body as HttpBody,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use cynode_api::{Artifact, ArtifactId, ErrorCode, Page, Problem, TaskId, artifact_limits};
use cynode_service::{ApiError, QueryParams};
use futures_util::TryStreamExt as _;
use http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{Id, Path, page_request};
use crate::{
    Orchestrator, budget,
    caller::Person,
    db::{NewArtifact, Order},
    gate::SeedScan,
};

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ArtifactQuery {
    task_id: TaskId,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
    /// `oldest` first by default.
    #[param(inline)]
    order: Option<Order>,
    /// Any part of the id's text: 1 to 36 of 0-9, a-f and '-'.
    id_part: Option<String>,
}

/// List the artifacts of a task, every version.
#[utoipa::path(get, path = "/v1/artifacts", tag = "artifacts", params(ArtifactQuery),
    responses((status = 200, body = Page<Artifact>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<ArtifactQuery>,
) -> Result<Json<Page<Artifact>>, ApiError> {
    let page = page_request(
        query.limit,
        query.cursor.as_deref(),
        query.order,
        query.id_part,
    )?;
    orchestrator.db.task(&caller.scope, query.task_id).await?;
    Ok(Json(
        orchestrator.db.list_artifacts(query.task_id, &page).await?,
    ))
}

/// Show an artifact.
#[utoipa::path(get, path = "/v1/artifacts/{id}", tag = "artifacts", params(("id" = ArtifactId, Path)),
    responses((status = 200, body = Artifact), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<ArtifactId>,
) -> Result<Json<Artifact>, ApiError> {
    Ok(Json(orchestrator.readable_artifact(&caller, id).await?))
}

/// The bytes of an artifact.
#[utoipa::path(get, path = "/v1/artifacts/{id}/content", tag = "artifacts", params(("id" = ArtifactId, Path)),
    responses((status = 200, body = Vec<u8>, content_type = "*/*"), (status = 304), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn content(
    State(orchestrator): State<Orchestrator>,
    person: Person,
    id: Id<ArtifactId>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let Json(artifact) = show(State(orchestrator.clone()), person, id).await?;
    send(&orchestrator, &artifact, &headers).await
}

/// A path within a task: relative, without '..', in plain UTF-8.
fn check_path(path: &str) -> Result<(), ApiError> {
    if artifact_limits::is_path(path) {
        Ok(())
    } else {
        Err(ApiError::invalid(format!(
            "path: must be relative, without '.' or '..', of 1 to {} bytes",
            artifact_limits::MAX_PATH
        )))
    }
}

/// An optional header that must be valid: an unreadable one is not treated as absent.
fn checked(
    headers: &HeaderMap,
    name: &str,
    expectation: &str,
    good: impl Fn(&str) -> bool,
) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(name) else {
        return Ok(None);
    };
    let text = value.to_str().ok().filter(|text| good(text));
    text.map(|text| Some(text.to_owned()))
        .ok_or_else(|| ApiError::invalid(format!("{name}: must be {expectation}")))
}

/// Store a new version of a path. `X-Content-SHA256` is verified when present.
#[utoipa::path(put, path = "/v1/tasks/{task_id}/artifacts/{*path}", tag = "artifacts", params(("task_id" = TaskId, Path), ("path" = String, Path)),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 201, body = Artifact), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn put(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Path((task, path)): Path<(String, String)>,
    request: Request,
) -> Result<(StatusCode, Json<Artifact>), ApiError> {
    let task_id: TaskId = task
        .parse()
        .map_err(|_| ApiError::new(ErrorCode::NotFound, "there is no such task"))?;
    check_path(&path)?;
    orchestrator.db.task(&caller.scope, task_id).await?;
    let (parts, body) = request.into_parts();
    let expected = checked(
        &parts.headers,
        "x-content-sha256",
        "64 hexadecimal digits",
        |text| text.len() == 64 && text.bytes().all(|c| c.is_ascii_hexdigit()),
    )?;
    let media_type = checked(
        &parts.headers,
        "content-type",
        "a media type of at most 200 characters",
        |text| (1..=200).contains(&text.len()),
    )?;
    let media_type = media_type.unwrap_or_else(|| "application/octet-stream".to_owned());
    let _memory = budget::staging_memory(caller.id(), orchestrator.blobs.buffered()).await?;
    let bytes = budget::staged(caller.id(), body)
        .into_data_stream()
        .map_err(|error| budget::problem(&error));
    let staged = orchestrator
        .blobs
        .stage(bytes, artifact_limits::MAX_BYTES, expected.as_deref())
        .await?;
    let flags = match orchestrator
        .check_seed(parts.extensions.get::<SeedScan>(), &path, &staged)
        .await
    {
        Ok(flags) => flags,
        Err(error) => {
            orchestrator.blobs.discard(&staged).await;
            return Err(error);
        }
    };
    let new = NewArtifact {
        task_id,
        path: &path,
        staged: &staged,
        media_type: &media_type,
        created_by: &caller.user_name,
        flags: &flags,
        source: None,
    };
    Ok((
        StatusCode::CREATED,
        Json(
            orchestrator
                .db
                .insert_artifact(&new, &orchestrator.blobs)
                .await?,
        ),
    ))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct GetQuery {
    /// The newest version when absent.
    version: Option<i64>,
}

/// The bytes of a path's newest version, or of the requested one.
#[utoipa::path(get, path = "/v1/tasks/{task_id}/artifacts/{*path}", tag = "artifacts", params(("task_id" = TaskId, Path), ("path" = String, Path), GetQuery),
    responses((status = 200, body = Vec<u8>, content_type = "*/*"), (status = 304), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn get(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Path((task, path)): Path<(String, String)>,
    headers: HeaderMap,
    QueryParams(query): QueryParams<GetQuery>,
) -> Result<Response, ApiError> {
    let task_id: TaskId = task
        .parse()
        .map_err(|_| ApiError::new(ErrorCode::NotFound, "there is no such task"))?;
    if query.version.is_some_and(|version| version < 1) {
        return Err(ApiError::invalid("version: must be at least 1"));
    }
    orchestrator.db.task(&caller.scope, task_id).await?;
    check_path(&path)
        .map_err(|_| ApiError::new(ErrorCode::NotFound, "the task has no such artifact"))?;
    let artifact = orchestrator
        .db
        .artifact_at(task_id, &path, query.version)
        .await?;
    send(&orchestrator, &artifact, &headers).await
}

pub(super) async fn send(
    orchestrator: &Orchestrator,
    artifact: &Artifact,
    headers: &HeaderMap,
) -> Result<Response, ApiError> {
    let tag = format!("\"sha256:{}\"", artifact.sha256);
    if headers
        .get(header::IF_NONE_MATCH)
        .is_some_and(|value| value.as_bytes() == tag.as_bytes())
    {
        return Ok((StatusCode::NOT_MODIFIED, [(header::ETAG, tag)]).into_response());
    }
    let bytes = orchestrator.blobs.get(&artifact.sha256).await?;
    let mut response = Response::new(HttpBody::from_stream(bytes));
    let mut set = |name: http::HeaderName, value: &str| {
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(name, value);
        }
    };
    set(header::CONTENT_TYPE, &artifact.media_type);
    set(header::CONTENT_LENGTH, &artifact.size.to_string());
    set(header::ETAG, &tag);
    set(
        http::HeaderName::from_static("x-content-sha256"),
        &artifact.sha256,
    );
    set(
        http::HeaderName::from_static("x-artifact-id"),
        &artifact.id.to_string(),
    );
    set(
        http::HeaderName::from_static("x-artifact-version"),
        &artifact.version.to_string(),
    );
    // A browser must never render content of a sandbox as a page of this origin.
    set(header::CONTENT_DISPOSITION, "attachment");
    set(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    Ok(response)
}
