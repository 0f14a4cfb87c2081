//! Projects and tasks.

use axum::{Json, extract::State};
use cynode_api::{
    ErrorCode, Page, Problem, Project, ProjectCreate, ProjectId, ProjectPatch, Task, TaskCreate,
    TaskId, TaskPatch, TaskStatus, text_limits,
};
use cynode_service::{ApiError, QueryParams};
use http::StatusCode;
use serde::Deserialize;
use time::OffsetDateTime;
use utoipa::IntoParams;

use super::{
    Body, Id, Paging, check_metadata, check_name, check_text, check_version, page_by_name,
    page_request,
};
use crate::{Orchestrator, caller::Person, db::Order};

/// Create a project.
#[utoipa::path(post, path = "/v1/projects", tag = "work", request_body = ProjectCreate,
    responses((status = 201, body = Project), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create_project(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<ProjectCreate>,
) -> Result<(StatusCode, Json<Project>), ApiError> {
    check_version(body.version)?;
    check_name("name", &body.name)?;
    check_text("scope", body.scope.as_ref())?;
    check_metadata(body.metadata.as_ref())?;
    let id = body.id.unwrap_or_else(ProjectId::generate);
    let slug = match body.slug {
        Some(slug) if is_slug(&slug) => slug,
        Some(_) => {
            return Err(ApiError::invalid(format!(
                "slug: must be 1 to {} of a-z, 0-9 and '-'",
                text_limits::MAX_SLUG
            )));
        }
        None => slug_of(&body.name, id),
    };
    let now = OffsetDateTime::now_utc();
    let project = Project {
        id,
        name: body.name,
        slug,
        scope: body.scope,
        metadata: body.metadata.unwrap_or_default(),
        created_by: caller.user_name.clone(),
        created_at: now,
        updated_at: now,
    };
    Ok((
        StatusCode::CREATED,
        Json(
            orchestrator
                .db
                .insert_project(&project, &caller.scope)
                .await?,
        ),
    ))
}

fn is_slug(slug: &str) -> bool {
    (1..=text_limits::MAX_SLUG).contains(&slug.len())
        && slug
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

/// The name in URL-safe characters with a part of the id, so that projects may share a name.
fn slug_of(name: &str, id: ProjectId) -> String {
    let plain: String = name
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() {
                c.to_ascii_lowercase()
            } else {
                '-'
            }
        })
        .take(40)
        .collect();
    let id = id.to_string();
    format!("{}-{}", plain.trim_matches('-'), &id[id.len() - 12..])
        .trim_matches('-')
        .to_owned()
}

/// List projects.
#[utoipa::path(get, path = "/v1/projects", tag = "work", params(Paging),
    responses((status = 200, body = Page<Project>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list_projects(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(paging): QueryParams<Paging>,
) -> Result<Json<Page<Project>>, ApiError> {
    Ok(Json(
        orchestrator
            .db
            .list_projects(&caller.scope, &caller.token_scope(), &paging.request()?)
            .await?,
    ))
}

/// Show a project.
#[utoipa::path(get, path = "/v1/projects/{id}", tag = "work", params(("id" = ProjectId, Path)),
    responses((status = 200, body = Project), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show_project(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<ProjectId>,
) -> Result<Json<Project>, ApiError> {
    Ok(Json(orchestrator.db.project(&caller.scope, id).await?))
}

/// Change a project.
#[utoipa::path(patch, path = "/v1/projects/{id}", tag = "work", params(("id" = ProjectId, Path)), request_body = ProjectPatch,
    responses((status = 200, body = Project), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn patch_project(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<ProjectId>,
    Body(patch): Body<ProjectPatch>,
) -> Result<Json<Project>, ApiError> {
    check_version(patch.version)?;
    patch
        .name
        .as_ref()
        .map_or(Ok(()), |name| check_name("name", name))?;
    check_text("scope", patch.scope.as_ref())?;
    check_metadata(patch.metadata.as_ref())?;
    Ok(Json(
        orchestrator
            .db
            .patch_project(&caller.scope, id, &patch)
            .await?,
    ))
}

/// Create a task.
#[utoipa::path(post, path = "/v1/tasks", tag = "work", request_body = TaskCreate,
    responses((status = 201, body = Task), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create_task(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<TaskCreate>,
) -> Result<(StatusCode, Json<Task>), ApiError> {
    check_version(body.version)?;
    check_name("name", &body.name)?;
    check_text("description", body.description.as_ref())?;
    check_list("requirements", &body.requirements)?;
    check_list("acceptance_criteria", &body.acceptance_criteria)?;
    check_metadata(body.metadata.as_ref())?;
    body.profile
        .as_ref()
        .map_or(Ok(()), |profile| check_name("profile", profile))?;
    if let Some(id) = body.project_id {
        orchestrator.db.project(&caller.scope, id).await?;
    }
    let now = OffsetDateTime::now_utc();
    let task = Task {
        id: body.id.unwrap_or_else(TaskId::generate),
        project_id: body.project_id,
        name: body.name,
        description: body.description,
        requirements: body.requirements,
        acceptance_criteria: body.acceptance_criteria,
        status: TaskStatus::Open,
        profile: body.profile,
        metadata: body.metadata.unwrap_or_default(),
        created_by: caller.user_name.clone(),
        created_at: now,
        updated_at: now,
    };
    Ok((
        StatusCode::CREATED,
        Json(orchestrator.db.insert_task(&task, &caller.scope).await?),
    ))
}

fn check_list(field: &str, items: &[String]) -> Result<(), ApiError> {
    let bytes: usize = items.iter().map(String::len).sum();
    if items.len() > text_limits::MAX_ITEMS || bytes > text_limits::MAX_TEXT {
        let detail = format!(
            "{field}: has more than {} items or {} bytes",
            text_limits::MAX_ITEMS,
            text_limits::MAX_TEXT
        );
        return Err(ApiError::new(ErrorCode::TooLarge, detail));
    }
    Ok(())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TaskQuery {
    project_id: Option<ProjectId>,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
    /// `oldest` first by default.
    #[param(inline)]
    order: Option<Order>,
    /// Any part of the id's text: 1 to 36 of 0-9, a-f and '-'.
    id_part: Option<String>,
    /// The whole name.
    name: Option<String>,
}

/// List tasks.
#[utoipa::path(get, path = "/v1/tasks", tag = "work", params(TaskQuery),
    responses((status = 200, body = Page<Task>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list_tasks(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<TaskQuery>,
) -> Result<Json<Page<Task>>, ApiError> {
    let page = page_request(
        query.limit,
        query.cursor.as_deref(),
        query.order,
        query.id_part,
    )?;
    let page = page_by_name(page, query.name)?;
    Ok(Json(
        orchestrator
            .db
            .list_tasks(
                &caller.scope,
                &caller.token_scope(),
                query.project_id,
                &page,
            )
            .await?,
    ))
}

/// Show a task.
#[utoipa::path(get, path = "/v1/tasks/{id}", tag = "work", params(("id" = TaskId, Path)),
    responses((status = 200, body = Task), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show_task(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<TaskId>,
) -> Result<Json<Task>, ApiError> {
    Ok(Json(orchestrator.db.task(&caller.scope, id).await?))
}

/// Change a task.
#[utoipa::path(patch, path = "/v1/tasks/{id}", tag = "work", params(("id" = TaskId, Path)), request_body = TaskPatch,
    responses((status = 200, body = Task), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn patch_task(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<TaskId>,
    Body(patch): Body<TaskPatch>,
) -> Result<Json<Task>, ApiError> {
    check_version(patch.version)?;
    patch
        .name
        .as_ref()
        .map_or(Ok(()), |name| check_name("name", name))?;
    patch
        .profile
        .as_ref()
        .map_or(Ok(()), |profile| check_name("profile", profile))?;
    check_text("description", patch.description.as_ref())?;
    patch
        .requirements
        .as_ref()
        .map_or(Ok(()), |items| check_list("requirements", items))?;
    patch
        .acceptance_criteria
        .as_ref()
        .map_or(Ok(()), |items| check_list("acceptance_criteria", items))?;
    check_metadata(patch.metadata.as_ref())?;
    Ok(Json(
        orchestrator
            .db
            .patch_task(&caller.scope, id, &patch)
            .await?,
    ))
}
