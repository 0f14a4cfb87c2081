//! Users, groups and tokens.

use std::time::Duration;

use axum::{Json, extract::State};
use cynode_api::{
    DEFAULT_TOKEN_SECONDS, ErrorCode, Group, GroupCreate, GroupId, MAX_TOKEN_SECONDS, Page,
    Problem, Token, TokenCreate, TokenCreated, TokenId, TokenKind, TokenRenew, User, UserCreate,
    UserId,
};
use cynode_policy::{Action, CallContext, Resource};
use cynode_service::{ApiError, QueryParams};
use http::StatusCode;
use serde::Deserialize;
use time::OffsetDateTime;
use utoipa::IntoParams;

use super::{Body, Id, Paging, check_name, check_version, page_request};
use crate::{
    Orchestrator,
    caller::{self, Caller, Person},
    db::{NewToken, Order, PageRequest},
    keys,
};

/// Who creates the token in the administrator's file. No user has this name.
const SYSTEM: &str = "system";
/// Users in one group.
const MAX_MEMBERS: usize = 1_000;

/// Create a user. Administrators only.
#[utoipa::path(post, path = "/v1/users", tag = "identity", request_body = UserCreate,
    responses((status = 201, body = User), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create_user(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<UserCreate>,
) -> Result<(StatusCode, Json<User>), ApiError> {
    check_version(body.version)?;
    check_name("name", &body.name)?;
    if body.name == SYSTEM || body.name.parse::<UserId>().is_ok() {
        return Err(ApiError::invalid("name: must not be 'system' or an id"));
    }
    // The right to create users does not include creating administrators.
    if body.is_admin && !caller.scope.is_admin {
        return Err(ApiError::new(
            ErrorCode::Forbidden,
            "only an administrator can create administrators",
        ));
    }
    Ok((
        StatusCode::CREATED,
        Json(
            orchestrator
                .db
                .insert_user(
                    UserId::generate(),
                    &body.name,
                    body.is_admin,
                    &caller.user_name,
                )
                .await?,
        ),
    ))
}

/// List users: all for an administrator, oneself for others.
#[utoipa::path(get, path = "/v1/users", tag = "identity", params(Paging),
    responses((status = 200, body = Page<User>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list_users(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(paging): QueryParams<Paging>,
) -> Result<Json<Page<User>>, ApiError> {
    Ok(Json(
        orchestrator
            .db
            .list_users(&caller.scope, &paging.request()?)
            .await?,
    ))
}

/// Show a user.
#[utoipa::path(get, path = "/v1/users/{id}", tag = "identity", params(("id" = UserId, Path)),
    responses((status = 200, body = User), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show_user(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<UserId>,
) -> Result<Json<User>, ApiError> {
    let user = if caller.scope.is_admin || caller.scope.user_id == id {
        orchestrator.db.user(&id.to_string()).await?
    } else {
        None
    };
    user.map(Json)
        .ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("there is no user {id}")))
}

/// Create a group. Administrators only.
#[utoipa::path(post, path = "/v1/groups", tag = "identity", request_body = GroupCreate,
    responses((status = 201, body = Group), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create_group(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<GroupCreate>,
) -> Result<(StatusCode, Json<Group>), ApiError> {
    check_version(body.version)?;
    check_name("name", &body.name)?;
    if body.members.len() > MAX_MEMBERS {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("members: names more than {MAX_MEMBERS}"),
        ));
    }
    let mut members = Vec::new();
    for (index, name) in body.members.iter().enumerate() {
        let user = orchestrator.db.user(name).await?;
        members.push(
            user.ok_or_else(|| {
                ApiError::invalid(format!("members[{index}]: there is no such user"))
            })?
            .id,
        );
    }
    let id = GroupId::generate();
    orchestrator
        .db
        .insert_group(id, &body.name, &members, &caller.user_name)
        .await?;
    Ok((
        StatusCode::CREATED,
        Json(group(&orchestrator, &caller, id).await?),
    ))
}

async fn group(
    orchestrator: &Orchestrator,
    caller: &Caller,
    id: GroupId,
) -> Result<Group, ApiError> {
    let page = PageRequest {
        limit: 1,
        ..PageRequest::default()
    };
    let found = orchestrator
        .db
        .list_groups(&caller.scope, Some(id), &page)
        .await?
        .items
        .pop();
    found.ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("there is no group {id}")))
}

/// List groups: all for an administrator, one's own for others.
#[utoipa::path(get, path = "/v1/groups", tag = "identity", params(Paging),
    responses((status = 200, body = Page<Group>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list_groups(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(paging): QueryParams<Paging>,
) -> Result<Json<Page<Group>>, ApiError> {
    Ok(Json(
        orchestrator
            .db
            .list_groups(&caller.scope, None, &paging.request()?)
            .await?,
    ))
}

/// Show a group.
#[utoipa::path(get, path = "/v1/groups/{id}", tag = "identity", params(("id" = GroupId, Path)),
    responses((status = 200, body = Group), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show_group(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<GroupId>,
) -> Result<Json<Group>, ApiError> {
    Ok(Json(group(&orchestrator, &caller, id).await?))
}

/// Create a token. It is shown once.
#[utoipa::path(post, path = "/v1/tokens", tag = "identity", request_body = TokenCreate,
    responses((status = 201, body = TokenCreated), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create_token(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<TokenCreate>,
) -> Result<(StatusCode, Json<TokenCreated>), ApiError> {
    check_version(body.version)?;
    let expires_at = expiry(body.expires_in_seconds)?;
    let user_id = match &body.user {
        None => caller.scope.user_id,
        Some(name) => {
            let user = orchestrator
                .db
                .user(name)
                .await?
                .filter(|user| caller.scope.is_admin || user.id == caller.scope.user_id);
            user.ok_or_else(|| ApiError::new(ErrorCode::NotFound, "there is no such user"))?
                .id
        }
    };
    check_scope(&orchestrator, &caller, &body).await?;
    authorize_creation(&orchestrator, &caller, &body).await?;
    let token = keys::random_token();
    let new = NewToken {
        id: TokenId::generate(),
        hash: caller::hash(&token),
        kind: body.kind,
        user_id,
        project_id: body.project_id,
        task_ids: body.task_ids,
        job_id: body.job_id,
        session_id: body.session_id,
        created_by: caller.user_name.clone(),
        expires_at,
    };
    orchestrator.db.insert_token(&new).await?;
    Ok((
        StatusCode::CREATED,
        Json(TokenCreated {
            id: new.id,
            token,
            expires_at,
        }),
    ))
}

fn expiry(seconds: Option<u64>) -> Result<OffsetDateTime, ApiError> {
    let seconds = seconds.unwrap_or(DEFAULT_TOKEN_SECONDS);
    if !(1..=MAX_TOKEN_SECONDS).contains(&seconds) {
        return Err(ApiError::invalid(format!(
            "expires_in_seconds: must lie between 1 and {MAX_TOKEN_SECONDS}"
        )));
    }
    Ok(OffsetDateTime::now_utc() + Duration::from_secs(seconds))
}

/// Authorizes every project and task that the token covers.
async fn authorize_creation(
    orchestrator: &Orchestrator,
    caller: &Caller,
    body: &TokenCreate,
) -> Result<(), ApiError> {
    let call = CallContext {
        token_kind: Some(body.kind.as_str().to_owned()),
        ..CallContext::default()
    };
    let check =
        |resource: &Resource| orchestrator.check(caller, Action::TokenCreate, resource, &call);
    if body.project_id.is_none() && body.task_ids.is_empty() {
        check(&Resource::System)?;
    }
    if let Some(id) = body.project_id {
        check(&orchestrator.project_target(caller, id).await?.resource)?;
    }
    for id in &body.task_ids {
        check(&orchestrator.task_target(caller, *id).await?.resource)?;
    }
    Ok(())
}

/// A token names its scope, and nothing that its creator may not access.
async fn check_scope(
    orchestrator: &Orchestrator,
    caller: &Caller,
    body: &TokenCreate,
) -> Result<(), ApiError> {
    let names_one = body.job_id.is_some() != body.session_id.is_some();
    match body.kind {
        TokenKind::User
            if body.project_id.is_some()
                || !body.task_ids.is_empty()
                || body.job_id.is_some()
                || body.session_id.is_some() =>
        {
            return Err(ApiError::invalid(
                "kind: a user's token names no project, task, job or session",
            ));
        }
        TokenKind::ProjectManager | TokenKind::ProjectAnalyst => {
            if body.project_id.is_none() && body.task_ids.is_empty() {
                return Err(ApiError::invalid(
                    "project_id: an agent's token names a project or tasks",
                ));
            }
            if body.job_id.is_some() || body.session_id.is_some() {
                return Err(ApiError::invalid(
                    "job_id: only a sandbox's token names a job or session",
                ));
            }
        }
        TokenKind::Sandbox
            if body.task_ids.len() != 1 || !names_one || body.project_id.is_some() =>
        {
            return Err(ApiError::invalid(
                "task_ids: a sandbox's token names exactly one task, and a job or a session",
            ));
        }
        TokenKind::User | TokenKind::Sandbox => {}
    }
    if body.task_ids.len() > 1_000 {
        return Err(ApiError::invalid("task_ids: names more than 1000"));
    }
    if let Some(id) = body.project_id {
        orchestrator.db.project(&caller.scope, id).await?;
    }
    for id in &body.task_ids {
        orchestrator.db.task(&caller.scope, *id).await?;
    }
    if let Some(id) = body.session_id
        && !body
            .task_ids
            .contains(&orchestrator.db.session(&caller.scope, id).await?.task_id)
    {
        return Err(ApiError::invalid("session_id: belongs to another task"));
    }
    if let Some(id) = body.job_id
        && !body
            .task_ids
            .contains(&orchestrator.db.job(&caller.scope, id).await?.task_id)
    {
        return Err(ApiError::invalid("job_id: belongs to another task"));
    }
    Ok(())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TokenQuery {
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
    /// `oldest` first by default.
    #[param(inline)]
    order: Option<Order>,
    /// Any part of the id's text: 1 to 36 of 0-9, a-f and '-'.
    id_part: Option<String>,
}

/// List tokens: all for an administrator, one's own for others. The secrets are not stored.
#[utoipa::path(get, path = "/v1/tokens", tag = "identity", params(TokenQuery),
    responses((status = 200, body = Page<Token>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list_tokens(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<TokenQuery>,
) -> Result<Json<Page<Token>>, ApiError> {
    let page = page_request(
        query.limit,
        query.cursor.as_deref(),
        query.order,
        query.id_part,
    )?;
    Ok(Json(
        orchestrator.db.list_tokens(&caller.scope, &page).await?,
    ))
}

/// Show a token's record.
#[utoipa::path(get, path = "/v1/tokens/{id}", tag = "identity", params(("id" = TokenId, Path)),
    responses((status = 200, body = Token), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show_token(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<TokenId>,
) -> Result<Json<Token>, ApiError> {
    Ok(Json(orchestrator.db.token(&caller.scope, id).await?))
}

/// Renew a token: it keeps its id, its kind and its scope, and gets a new secret, which is shown
/// once. The old one is invalid from the next call on. The caller must be allowed to create such a
/// token.
#[utoipa::path(post, path = "/v1/tokens/{id}/renew", tag = "identity", params(("id" = TokenId, Path)), request_body = TokenRenew,
    responses((status = 200, body = TokenCreated), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn renew_token(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<TokenId>,
    Body(body): Body<TokenRenew>,
) -> Result<Json<TokenCreated>, ApiError> {
    check_version(body.version)?;
    let expires_at = expiry(body.expires_in_seconds)?;
    let current = orchestrator.db.token(&caller.scope, id).await?;
    if current.created_by == SYSTEM {
        return Err(ApiError::new(
            ErrorCode::Forbidden,
            "the administrator's token is renewed by its file",
        )
        .with_remedy("Create another token with 'cynode token create'."));
    }
    let same = TokenCreate {
        version: None,
        kind: current.kind,
        user: None,
        project_id: current.project_id,
        task_ids: current.task_ids,
        job_id: current.job_id,
        session_id: current.session_id,
        expires_in_seconds: None,
    };
    check_scope(&orchestrator, &caller, &same).await?;
    authorize_creation(&orchestrator, &caller, &same).await?;
    let token = keys::random_token();
    orchestrator
        .db
        .renew_token(&caller.scope, id, &caller::hash(&token), expires_at)
        .await?;
    Ok(Json(TokenCreated {
        id,
        token,
        expires_at,
    }))
}

/// Revoke a token. It is invalid from the next call on.
#[utoipa::path(delete, path = "/v1/tokens/{id}", tag = "identity", params(("id" = TokenId, Path)),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn revoke_token(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<TokenId>,
) -> Result<StatusCode, ApiError> {
    orchestrator.db.revoke_token(&caller.scope, id).await?;
    Ok(StatusCode::NO_CONTENT)
}
