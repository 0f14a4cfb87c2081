//! Validates session requests; each rejection names its field.

use cynode_api::{
    API_VERSION, ErrorCode, Limits, SessionCreate, WorkspaceRef, is_model_name,
    sba::limits::MAX_MODELS,
    session_limits::{DEFAULT_IDLE_SECONDS, DEFAULT_LIFETIME_SECONDS, MAX_ENV, MAX_ENV_BYTES},
};
use cynode_service::{
    ApiError,
    checks::{check_env, check_labels, check_seconds},
};
use time::OffsetDateTime;

use super::reference::check_reference;
use crate::capacity::Capacity;

/// A request with its defaults applied.
#[derive(Debug)]
pub(super) struct ValidatedRequest {
    pub(super) limits: Limits,
    pub(super) lifetime_seconds: u64,
    pub(super) idle_seconds: u64,
}

pub(crate) fn check_version(version: Option<u32>) -> Result<(), ApiError> {
    match version {
        None | Some(API_VERSION) => Ok(()),
        Some(other) => Err(ApiError::new(
            ErrorCode::UnsupportedVersion,
            format!("version {other} is not supported"),
        )),
    }
}

/// A node reaches no repositories.
pub(super) fn only_orchestrators_resolve() -> ApiError {
    ApiError::invalid("workspace_ref: only an orchestrator resolves repositories")
}

pub(super) fn check(
    request: &SessionCreate,
    capacity: &Capacity,
) -> Result<ValidatedRequest, ApiError> {
    check_version(request.version)?;
    check_reference(&request.image_ref)?;
    check_env(&request.env, MAX_ENV, MAX_ENV_BYTES)?;
    check_labels(&request.labels)?;
    check_models(&request.allowed_models)?;
    if let Some(WorkspaceRef::Git { .. }) = request.workspace_ref {
        return Err(only_orchestrators_resolve());
    }
    Ok(ValidatedRequest {
        limits: capacity.limits(request.limits.unwrap_or_default())?,
        lifetime_seconds: check_seconds(
            "max_lifetime_seconds",
            request
                .max_lifetime_seconds
                .unwrap_or(DEFAULT_LIFETIME_SECONDS),
        )?,
        idle_seconds: check_seconds(
            "idle_timeout_seconds",
            request.idle_timeout_seconds.unwrap_or(DEFAULT_IDLE_SECONDS),
        )?,
    })
}

fn check_models(names: &[String]) -> Result<(), ApiError> {
    if names.len() > MAX_MODELS || !names.iter().all(|name| is_model_name(name)) {
        return Err(ApiError::invalid(format!(
            "allowed_models: must be at most {MAX_MODELS} names of models"
        )));
    }
    Ok(())
}

pub(super) fn after(from: OffsetDateTime, seconds: u64) -> OffsetDateTime {
    from.saturating_add(time::Duration::seconds(
        i64::try_from(seconds).unwrap_or(i64::MAX),
    ))
}
