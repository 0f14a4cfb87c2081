//! Promotions: asked for, followed, and decided by persons.

use std::time::Duration;

use axum::{Extension, Json, extract::State};
use cynode_api::{
    CallId, ErrorCode, Page, Problem, Promotion, PromotionCreate, PromotionDecision, PromotionId,
    PromotionState, TaskId, is_repository_name, promotion_limits,
};
use cynode_service::{ApiError, QueryParams, checks::check_reason};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{
    Body, Id, check_version, credentials::Versioned, jobs::preferred_wait, page_request, states,
};
use crate::{
    Orchestrator,
    caller::Person,
    db::{self, Missing, Order},
};

/// Promote a changeset: an artifact of the task becomes a commit, a branch, and a pull request, as
/// far as `until` says. Responds at once; with `Prefer: wait=N` when the promotion has ended or
/// waits for a person, or after N seconds. Repeating it continues the same promotion.
#[utoipa::path(post, path = "/v1/promotions", tag = "git", request_body = PromotionCreate,
    responses((status = 201, body = Promotion), (status = 200, body = Promotion, description = "A dry run, or the promotion exists"), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    call: Option<Extension<CallId>>,
    headers: HeaderMap,
    Body(body): Body<PromotionCreate>,
) -> Result<(StatusCode, Json<Promotion>), ApiError> {
    check_version(body.version)?;
    check(&body)?;
    let is_dry_run = body.dry_run;
    let call_id = call.map(|Extension(id)| id);
    let create = orchestrator.create_promotion(&caller, body, call_id);
    let (mut promotion, is_new) = Box::pin(create).await?;
    if let Some(seconds) = preferred_wait(&headers).filter(|_| !is_dry_run) {
        let limit = Duration::from_secs(seconds);
        promotion = orchestrator
            .wait_for_promotion(&caller, promotion.id, limit, |promotion| {
                promotion.state.is_final() || promotion.state == PromotionState::AwaitingApproval
            })
            .await?;
    }
    let status = if is_new {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(promotion)))
}

fn check(body: &PromotionCreate) -> Result<(), ApiError> {
    use promotion_limits::{MAX_BODY_BYTES, MAX_MESSAGE_BYTES, MAX_TITLE_BYTES};
    let is_line = !body.title.trim().is_empty() && !body.title.chars().any(char::is_control);
    if body.title.len() > MAX_TITLE_BYTES || !is_line {
        return Err(ApiError::invalid(format!(
            "title: must be a single line of 1 to {MAX_TITLE_BYTES} bytes"
        )));
    }
    if !is_repository_name(&body.repository) {
        return Err(ApiError::invalid(
            "repository: must be the name or id of a repository",
        ));
    }
    for (field, text, limit) in [
        ("message", &body.message, MAX_MESSAGE_BYTES),
        ("body", &body.body, MAX_BODY_BYTES),
    ] {
        let Some(text) = text else { continue };
        if text.len() > limit {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("{field}: exceeds {limit} bytes"),
            ));
        }
        if text.trim().is_empty() {
            return Err(ApiError::invalid(format!("{field}: must not be empty")));
        }
    }
    Ok(())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PromotionQuery {
    /// A state, or several separated by commas.
    state: Option<String>,
    task_id: Option<TaskId>,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
    /// `oldest` first by default.
    #[param(inline)]
    order: Option<Order>,
    /// Any part of the id's text: 1 to 36 of 0-9, a-f and '-'.
    id_part: Option<String>,
}

/// List promotions of the caller's tasks and projects.
#[utoipa::path(get, path = "/v1/promotions", tag = "git", params(PromotionQuery),
    responses((status = 200, body = Page<Promotion>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<PromotionQuery>,
) -> Result<Json<Page<Promotion>>, ApiError> {
    let states = states::<PromotionState>(query.state.as_deref())?;
    let page = page_request(
        query.limit,
        query.cursor.as_deref(),
        query.order,
        query.id_part,
    )?;
    Ok(Json(
        orchestrator
            .db
            .list_promotions(&caller.scope, &states, query.task_id, &page)
            .await?,
    ))
}

/// Show a promotion.
#[utoipa::path(get, path = "/v1/promotions/{id}", tag = "git", params(("id" = PromotionId, Path)),
    responses((status = 200, body = Promotion), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Id(id): Id<PromotionId>,
) -> Result<Json<Promotion>, ApiError> {
    // The gate has decided whether the caller may, which a rule may have permitted.
    let row = orchestrator.db.any_promotion(id).await?;
    let row = row.ok_or_else(|| db::Error::from(Missing::Promotion(id)))?;
    Ok(Json(row.promotion))
}

/// Approve a promotion that waits for a person. The decision names the commit that was looked at;
/// it lapses when commit, base or rules change.
#[utoipa::path(post, path = "/v1/promotions/{id}/approve", tag = "git", params(("id" = PromotionId, Path)), request_body = PromotionDecision,
    responses((status = 200, body = Promotion), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn approve(
    state: State<Orchestrator>,
    person: Person,
    id: Id<PromotionId>,
    decision: Body<PromotionDecision>,
) -> Result<Json<Promotion>, ApiError> {
    decide(state, person, id, decision, true).await
}

/// Reject a promotion that waits for a person. It ends.
#[utoipa::path(post, path = "/v1/promotions/{id}/reject", tag = "git", params(("id" = PromotionId, Path)), request_body = PromotionDecision,
    responses((status = 200, body = Promotion), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn reject(
    state: State<Orchestrator>,
    person: Person,
    id: Id<PromotionId>,
    decision: Body<PromotionDecision>,
) -> Result<Json<Promotion>, ApiError> {
    decide(state, person, id, decision, false).await
}

async fn decide(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<PromotionId>,
    Body(decision): Body<PromotionDecision>,
    approves: bool,
) -> Result<Json<Promotion>, ApiError> {
    check_version(decision.version)?;
    decision.reason.as_deref().map_or(Ok(()), check_reason)?;
    // Whatever a rule says, no program decides about a program's work.
    if caller.kind != cynode_api::TokenKind::User {
        return Err(ApiError::new(
            ErrorCode::Forbidden,
            "only people decide about promotions",
        ));
    }
    Ok(Json(
        orchestrator
            .decide_promotion(&caller, id, decision, approves)
            .await?,
    ))
}

/// Cancel a promotion. A stage that is under way is finished first.
#[utoipa::path(post, path = "/v1/promotions/{id}/cancel", tag = "git", params(("id" = PromotionId, Path)), request_body = Versioned,
    responses((status = 200, body = Promotion), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn cancel(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<PromotionId>,
    Body(body): Body<Versioned>,
) -> Result<Json<Promotion>, ApiError> {
    check_version(body.version)?;
    Ok(Json(orchestrator.cancel_promotion(&caller, id).await?))
}
