//! Policies: read, changed, tried.

use axum::{Json, extract::State};
use cynode_api::{
    ErrorCode, Page, Policy, PolicyPut, PolicyRule, PolicyTest, PolicyVerdict, Problem, file_limits,
};
use cynode_policy::{
    Action, CallContext, MAX_DOCUMENT_BYTES, Policies as Set, Principal, Resource, within_workspace,
};
use cynode_service::{ApiError, QueryParams};
use http::StatusCode;
use tokio::task::block_in_place;

use super::{Body, NamePaging, Path, check_version};
use crate::{
    Orchestrator,
    caller::{Caller, Person},
    db::PolicyRow,
    gate::policy_limits,
    policies,
};

/// Policy documents in total.
const MAX_POLICIES: usize = 200;

fn object(row: PolicyRow) -> Policy {
    // Stored documents were validated before.
    let set = Set::parse([(row.id.as_str(), row.text.as_str())]).ok();
    let rules = set
        .iter()
        .flat_map(Set::rules)
        .map(|rule| PolicyRule {
            name: rule.to_string(),
            effect: rule.effect.as_str().to_owned(),
        })
        .collect();
    Policy {
        id: row.id,
        text: row.text,
        revision: row.revision,
        updated_at: row.updated_at,
        updated_by: row.updated_by,
        is_default: row.is_default,
        rules,
    }
}

fn check_id(id: &str) -> Result<(), ApiError> {
    let plain = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'_' | b'-')
    };
    if (1..=100).contains(&id.len()) && id.bytes().all(plain) {
        Ok(())
    } else {
        Err(ApiError::invalid(
            "id: must be 1 to 100 of a-z, 0-9, '.', '_' and '-'",
        ))
    }
}

/// List the policies in force.
#[utoipa::path(get, path = "/v1/policies", tag = "policies", params(NamePaging),
    responses((status = 200, body = Page<Policy>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    QueryParams(paging): QueryParams<NamePaging>,
) -> Result<Json<Page<Policy>>, ApiError> {
    let limit = paging.limit()?;
    let after = paging.after()?;
    let (_, mut rows) = orchestrator.db.policies().await?;
    rows.sort_by(|one, other| one.id.cmp(&other.id));
    let rows = rows
        .into_iter()
        .filter(|row| after.as_ref().is_none_or(|after| row.id > *after));
    Ok(Json(block_in_place(|| {
        crate::db::page(rows.map(object), limit, |policy| policy.id.clone())
    })))
}

/// Show a policy.
#[utoipa::path(get, path = "/v1/policies/{id}", tag = "policies", params(("id" = String, Path)),
    responses((status = 200, body = Policy), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Path(id): Path<String>,
) -> Result<Json<Policy>, ApiError> {
    let (_, rows) = orchestrator.db.policies().await?;
    let found = rows.into_iter().find(|row| row.id == id);
    found
        .map(|row| block_in_place(|| object(row)))
        .map(Json)
        .ok_or_else(|| ApiError::new(ErrorCode::NotFound, "there is no such policy"))
}

/// Create or change a policy. It is validated together with all others, and takes effect everywhere
/// within a second.
#[utoipa::path(put, path = "/v1/policies/{id}", tag = "policies", params(("id" = String, Path)), request_body = PolicyPut,
    responses((status = 200, body = Policy), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn put(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Path(id): Path<String>,
    Body(body): Body<PolicyPut>,
) -> Result<Json<Policy>, ApiError> {
    check_version(body.version)?;
    check_id(&id)?;
    if body.text.len() > MAX_DOCUMENT_BYTES {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!(
                "text: is longer than {MAX_DOCUMENT_BYTES} bytes; split it into several documents"
            ),
        ));
    }
    let is_default = id == policies::DEFAULT && body.text == cynode_policy::DEFAULTS;
    let check = |rows: &[PolicyRow]| {
        if rows.len() > MAX_POLICIES {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("there may be at most {MAX_POLICIES} policies"),
            ));
        }
        Ok(block_in_place(|| {
            policies::check(rows, &caller.principal())
        })?)
    };
    let row = orchestrator
        .db
        .put_policy(
            &id,
            Some(&body.text),
            body.if_revision,
            is_default,
            &caller.user_name,
            check,
        )
        .await?;
    orchestrator.policies.refresh(&orchestrator.db).await?;
    Ok(Json(block_in_place(|| object(row))))
}

/// Delete a policy. Calls that only it allowed are denied from then on.
#[utoipa::path(delete, path = "/v1/policies/{id}", tag = "policies", params(("id" = String, Path)),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn delete(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    if check_id(&id).is_err() {
        return Err(ApiError::new(
            ErrorCode::NotFound,
            "there is no such policy",
        ));
    }
    orchestrator
        .db
        .put_policy(&id, None, None, false, &caller.user_name, |rows| {
            block_in_place(|| policies::check(rows, &caller.principal())).map_err(ApiError::from)
        })
        .await?;
    orchestrator.policies.refresh(&orchestrator.db).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Evaluate a decision and the rules behind it, without any effect.
#[utoipa::path(post, path = "/v1/policies:test", tag = "policies", request_body = PolicyTest,
    responses((status = 200, body = PolicyVerdict), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn test(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<PolicyTest>,
) -> Result<Json<PolicyVerdict>, ApiError> {
    check_version(body.version)?;
    let action: Action = body.action.parse().map_err(|_| {
        ApiError::invalid(format!(
            "action: '{}' is not an action",
            body.action.chars().take(100).collect::<String>()
        ))
    })?;
    let texts = [
        ("user", &body.user),
        ("image", &body.image),
        ("path", &body.path),
        ("program", &body.program),
        ("network", &body.network),
    ];
    for (field, text) in texts {
        if text
            .as_ref()
            .is_some_and(|text| text.len() > file_limits::MAX_PATH_BYTES)
        {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!(
                    "{field}: is longer than {} bytes",
                    file_limits::MAX_PATH_BYTES
                ),
            ));
        }
    }
    let principal = principal(&orchestrator, &caller, &body).await?;
    let resource = resource(&orchestrator, &caller, action, &body).await?;
    let call = call(action, body);
    let decision = orchestrator
        .policies
        .decide(&principal, action, &resource, &call);
    Ok(Json(PolicyVerdict {
        allowed: decision.allowed,
        rules: decision.rules,
        errors: decision.errors,
    }))
}

/// The context that rules see for such a call, as the gate builds it.
fn call(action: Action, body: PolicyTest) -> CallContext {
    let none = CallContext::default();
    let limits = Some(policy_limits(body.limits.unwrap_or_default()));
    match action {
        Action::SessionExec => CallContext {
            program: body.program,
            ..none
        },
        Action::SessionPty => CallContext {
            program: body.program,
            pty: true,
            ..none
        },
        Action::SessionCreate => CallContext {
            image: body.image,
            network: body.network,
            pty: body.pty,
            limits,
            ..none
        },
        Action::JobCreate => CallContext {
            program: body.program,
            image: body.image,
            network: body.network,
            limits,
            ..none
        },
        Action::TokenCreate => CallContext {
            token_kind: body.token_kind.map(|kind| kind.as_str().to_owned()),
            ..none
        },
        // Without a path, they concern the working directory.
        Action::FileList | Action::FileSearch | Action::FileMkdir => CallContext {
            path: Some(within_workspace(body.path.as_deref().unwrap_or("."))),
            ..none
        },
        _ if action.as_str().starts_with("file.") => CallContext {
            path: body.path.as_deref().map(within_workspace),
            ..none
        },
        _ => none,
    }
}

async fn principal(
    orchestrator: &Orchestrator,
    caller: &Caller,
    body: &PolicyTest,
) -> Result<Principal, ApiError> {
    match (&body.user, body.token_id) {
        (Some(_), Some(_)) => Err(ApiError::invalid(
            "token_id: name a user or a token, not both",
        )),
        (None, None) => Ok(caller.principal()),
        (None, Some(id)) => {
            let found = orchestrator.db.authenticated(id).await?;
            found
                .map(|found| Caller::new(found, [0; 32]).principal())
                .ok_or_else(|| {
                    ApiError::new(ErrorCode::NotFound, format!("there is no valid token {id}"))
                })
        }
        (Some(name), None) => {
            let user = orchestrator
                .db
                .user(name)
                .await?
                .ok_or_else(|| ApiError::new(ErrorCode::NotFound, "there is no such user"))?;
            let groups = orchestrator.db.groups_of(user.id).await?;
            Ok(Principal::User {
                id: *user.id.as_uuid(),
                name: user.name,
                admin: user.is_admin,
                groups,
            })
        }
    }
}

async fn resource(
    orchestrator: &Orchestrator,
    caller: &Caller,
    action: Action,
    body: &PolicyTest,
) -> Result<Resource, ApiError> {
    // A session's creation names an image; only these actions concern the image itself.
    let image = body.image.as_ref().filter(|_| {
        matches!(
            action,
            Action::ImageUse | Action::ImageShow | Action::ImageUpdate | Action::ImageRemove
        )
    });
    let named = [
        body.project_id.is_some(),
        body.task_id.is_some(),
        body.session_id.is_some(),
        body.job_id.is_some(),
        image.is_some(),
    ];
    if named.iter().filter(|named| **named).count() > 1 {
        return Err(ApiError::invalid("session_id: name at most one resource"));
    }
    let about = if let Some(id) = body.session_id {
        orchestrator.session_target(caller, id).await?
    } else if let Some(id) = body.job_id {
        orchestrator.job_target(caller, id).await?
    } else if let Some(id) = body.task_id {
        orchestrator.task_target(caller, id).await?
    } else if let Some(id) = body.project_id {
        orchestrator.project_target(caller, id).await?
    } else if let Some(reference) = image {
        let chosen = orchestrator.db.allowed_image(reference).await?;
        let (agent_compatible, pinned) = chosen.map_or((false, false), |chosen| {
            (
                chosen.agent_compatible.unwrap_or_default(),
                chosen.image_digest.is_some(),
            )
        });
        return Ok(Resource::Image {
            reference: reference.clone(),
            agent_compatible,
            pinned,
        });
    } else {
        return Ok(Resource::System);
    };
    Ok(about.resource)
}
