//! System settings and preferences.

use axum::{Json, extract::State};
use cynode_api::{
    ErrorCode, KEYS, Page, Preference, PreferenceScope, Problem, ProjectId, SECRET_SHAPES, Setting,
    TaskId, ValuePut, text_limits,
};
use cynode_policy::ShapeSetting;
use cynode_service::{ApiError, QueryParams};
use serde::Deserialize;
use utoipa::IntoParams;
use uuid::Uuid;

use super::{Body, NamePaging, Path, after_name, check_version, name_limit};
use crate::{
    Orchestrator,
    caller::{Caller, Person},
    db::{PageRequest, PreferenceContext},
};

const MAX_KEY: usize = 200;

fn check_key(key: &str, put: &ValuePut, is_setting: bool) -> Result<(), ApiError> {
    check_version(put.version)?;
    let plain = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'_' | b'-')
    };
    if key.is_empty() || key.len() > MAX_KEY || !key.bytes().all(plain) {
        return Err(ApiError::invalid(format!(
            "key: must be 1 to {MAX_KEY} of a-z, 0-9, '.', '_' and '-'"
        )));
    }
    if serde_json::to_string(&put.value).map_or(0, |text| text.len())
        > text_limits::MAX_METADATA_BYTES
    {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!(
                "value: is longer than {} bytes",
                text_limits::MAX_METADATA_BYTES
            ),
        ));
    }
    match KEYS.iter().find(|known| known.name == key) {
        Some(known) if known.is_setting != is_setting => Err(ApiError::invalid(format!(
            "key: {key} is a {}",
            if known.is_setting {
                "system setting"
            } else {
                "preference"
            }
        ))),
        Some(known) => known
            .kind
            .check(&put.value)
            .map_err(|why| ApiError::invalid(format!("value: {why}"))),
        None => Ok(()),
    }
}

/// The treatment of credential shapes is configured for the system, and projects can tighten it.
fn check_shapes(scope: PreferenceScope, value: &serde_json::Value) -> Result<(), ApiError> {
    if scope != PreferenceScope::Project {
        return Err(ApiError::invalid(format!(
            "key: {SECRET_SHAPES} is a preference of projects; for the whole system set orchestrator.secret_shapes"
        )));
    }
    serde_json::from_value::<ShapeSetting>(value.clone())
        .map(drop)
        .map_err(|error| ApiError::invalid(format!("value: {error}")))
}

/// List the system's settings.
#[utoipa::path(get, path = "/v1/settings", tag = "settings", params(NamePaging),
    responses((status = 200, body = Page<Setting>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list_settings(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    QueryParams(paging): QueryParams<NamePaging>,
) -> Result<Json<Page<Setting>>, ApiError> {
    let limit = paging.limit()?;
    Ok(Json(
        orchestrator
            .db
            .list_settings(paging.after()?, limit)
            .await?,
    ))
}

/// Show a setting.
#[utoipa::path(get, path = "/v1/settings/{key}", tag = "settings", params(("key" = String, Path)),
    responses((status = 200, body = Setting), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show_setting(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Path(key): Path<String>,
) -> Result<Json<Setting>, ApiError> {
    let missing = || ApiError::new(ErrorCode::NotFound, "there is no such setting");
    if key.contains('\0') {
        return Err(missing());
    }
    orchestrator
        .db
        .setting(&key)
        .await?
        .map(Json)
        .ok_or_else(missing)
}

/// Change a setting. Administrators only.
#[utoipa::path(put, path = "/v1/settings/{key}", tag = "settings", params(("key" = String, Path)), request_body = ValuePut,
    responses((status = 200, body = Setting), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn put_setting(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Path(key): Path<String>,
    Body(put): Body<ValuePut>,
) -> Result<Json<Setting>, ApiError> {
    check_key(&key, &put, true)?;
    Ok(Json(
        orchestrator
            .db
            .put_setting(&key, &put.value, put.if_revision, &caller.user_name)
            .await?,
    ))
}

/// The scope of preferences, which the caller must be able to see.
async fn check_scope(
    orchestrator: &Orchestrator,
    caller: &Caller,
    scope: &str,
    id: &str,
) -> Result<(PreferenceScope, Uuid), ApiError> {
    let missing = || ApiError::new(ErrorCode::NotFound, "there is no such scope");
    let scope: PreferenceScope = scope.parse().map_err(|_| missing())?;
    // The system has no id; any value means it.
    let id = if scope == PreferenceScope::System {
        Uuid::nil()
    } else {
        id.parse().map_err(|_| missing())?
    };
    match scope {
        PreferenceScope::Task => drop(
            orchestrator
                .db
                .task(&caller.scope, TaskId::from_uuid(id))
                .await?,
        ),
        PreferenceScope::Project => drop(
            orchestrator
                .db
                .project(&caller.scope, ProjectId::from_uuid(id))
                .await?,
        ),
        PreferenceScope::User
            if !caller.scope.is_admin && *caller.scope.user_id.as_uuid() != id =>
        {
            return Err(missing());
        }
        PreferenceScope::User => drop(
            orchestrator
                .db
                .user(&id.to_string())
                .await?
                .ok_or_else(missing)?,
        ),
        PreferenceScope::Group => {
            let found = orchestrator
                .db
                .list_groups(
                    &caller.scope,
                    Some(cynode_api::GroupId::from_uuid(id)),
                    &PageRequest {
                        limit: 1,
                        ..PageRequest::default()
                    },
                )
                .await?;
            if found.items.is_empty() {
                return Err(missing());
            }
        }
        PreferenceScope::System => {}
    }
    Ok((scope, id))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PreferenceQuery {
    /// Only the preference with this key.
    key: Option<String>,
    /// 1 to 1000; 1000 by default.
    limit: Option<u32>,
    cursor: Option<String>,
}

/// List the preferences of one scope; for `system` the id is ignored.
#[utoipa::path(get, path = "/v1/preferences/{scope}/{scope_id}", tag = "settings", params(("scope" = PreferenceScope, Path), ("scope_id" = String, Path), PreferenceQuery),
    responses((status = 200, body = Page<Preference>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list_preferences(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Path((scope, id)): Path<(String, String)>,
    QueryParams(query): QueryParams<PreferenceQuery>,
) -> Result<Json<Page<Preference>>, ApiError> {
    let (limit, after) = (name_limit(query.limit)?, after_name(query.cursor)?);
    if query.key.as_ref().is_some_and(|key| key.contains('\0')) {
        return Err(ApiError::invalid("key: must not contain the character NUL"));
    }
    let (scope, id) = check_scope(&orchestrator, &caller, &scope, &id).await?;
    Ok(Json(
        orchestrator
            .db
            .list_preferences(scope, id, query.key.as_deref(), after, limit)
            .await?,
    ))
}

/// Change a preference. Those of groups and of the system are for administrators.
#[utoipa::path(put, path = "/v1/preferences/{scope}/{scope_id}/{key}", tag = "settings",
    params(("scope" = PreferenceScope, Path), ("scope_id" = String, Path), ("key" = String, Path)), request_body = ValuePut,
    responses((status = 200, body = Preference), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn put_preference(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Path((scope, id, key)): Path<(String, String, String)>,
    Body(put): Body<ValuePut>,
) -> Result<Json<Preference>, ApiError> {
    let (scope, id) = check_scope(&orchestrator, &caller, &scope, &id).await?;
    check_key(&key, &put, false)?;
    if key == SECRET_SHAPES {
        check_shapes(scope, &put.value)?;
    }
    let preference = orchestrator
        .db
        .put_preference(
            scope,
            id,
            &key,
            &put.value,
            put.if_revision,
            &caller.user_name,
        )
        .await?;
    if key == SECRET_SHAPES {
        orchestrator.shapes.refresh(&orchestrator.db).await?;
    }
    Ok(Json(preference))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EffectiveQuery {
    task_id: Option<TaskId>,
    project_id: Option<ProjectId>,
    /// 1 to 1000; 1000 by default.
    limit: Option<u32>,
    cursor: Option<String>,
}

/// The effective preferences: task before project before user before group before system.
#[utoipa::path(get, path = "/v1/preferences", tag = "settings", params(EffectiveQuery),
    responses((status = 200, body = Page<Preference>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn effective(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<EffectiveQuery>,
) -> Result<Json<Page<Preference>>, ApiError> {
    let (limit, after) = (name_limit(query.limit)?, after_name(query.cursor)?);
    let mut context = PreferenceContext {
        task: query.task_id,
        project: query.project_id,
        user: Some(caller.scope.user_id),
    };
    if let Some(id) = query.task_id {
        context.project = orchestrator
            .db
            .task(&caller.scope, id)
            .await?
            .project_id
            .or(context.project);
    }
    if let Some(id) = query.project_id {
        orchestrator.db.project(&caller.scope, id).await?;
    }
    Ok(Json(
        orchestrator
            .db
            .effective_preferences(context, after, limit)
            .await?,
    ))
}
