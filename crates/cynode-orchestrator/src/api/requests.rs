//! Validates the requests that create sessions and jobs.

use cynode_api::{
    ErrorCode, JobCreate, UserSessionCreate, WorkspaceRef, exec_limits, job_limits, session_limits,
};
use cynode_service::{ApiError, checks};

use crate::placement::NodeLabels;

pub(super) fn check_session(body: &UserSessionCreate) -> Result<(), ApiError> {
    body.name.as_deref().map_or(Ok(()), check_session_name)?;
    checks::check_env(
        &body.env,
        session_limits::MAX_ENV,
        session_limits::MAX_ENV_BYTES,
    )?;
    checks::check_labels(&body.labels)?;
    body.limits.as_ref().map_or(Ok(()), checks::check_limits)?;
    for (field, seconds) in [
        ("max_lifetime_seconds", body.max_lifetime_seconds),
        ("idle_timeout_seconds", body.idle_timeout_seconds),
    ] {
        seconds.map_or(Ok(0), |seconds| checks::check_seconds(field, seconds))?;
    }
    check_depth(body.workspace_ref.as_ref(), body.workspace_depth)?;
    check_node_labels(&body.node_labels)
}

/// A depth is one of commits, so it needs a repository.
fn check_depth(wanted: Option<&WorkspaceRef>, depth: Option<u32>) -> Result<(), ApiError> {
    match (depth, wanted) {
        (None, _) => Ok(()),
        (Some(0), _) => Err(ApiError::invalid("workspace_depth: must be at least 1")),
        (Some(_), Some(WorkspaceRef::Git { .. })) => Ok(()),
        (Some(_), _) => Err(ApiError::invalid(
            "workspace_depth: needs a repository as the workspace_ref",
        )),
    }
}

pub(super) fn check_session_name(name: &str) -> Result<(), ApiError> {
    if cynode_api::is_session_name(name) {
        return Ok(());
    }
    Err(ApiError::invalid(format!(
        "name: must be {} to {} of a-z, 0-9 and '-', with a hyphen inside, and not of hex digits \
         only",
        session_limits::MIN_NAME,
        session_limits::MAX_NAME
    )))
}

pub(super) fn check_job(body: &JobCreate) -> Result<(), ApiError> {
    if body.command.is_empty() && body.job.is_none() {
        return Err(ApiError::invalid(
            "command: must name a program; or give the job a specification, in job",
        ));
    }
    check_depth(body.workspace_ref.as_ref(), body.workspace_depth)?;
    check_node_labels(&body.node_labels)?;
    if !body
        .timeout_seconds
        .is_none_or(|seconds| (1..=job_limits::MAX_TIMEOUT_SECONDS).contains(&seconds))
    {
        return Err(ApiError::invalid(format!(
            "timeout_seconds: must lie between 1 and {}",
            job_limits::MAX_TIMEOUT_SECONDS
        )));
    }
    if !body.command.is_empty() {
        checks::check_argv("command", &body.command)?;
    }
    checks::check_env(&body.env, exec_limits::MAX_ENV, exec_limits::MAX_ENV_BYTES)?;
    body.limits.as_ref().map_or(Ok(()), checks::check_limits)
}

/// Fails for labels that no node can have.
fn check_node_labels(labels: &NodeLabels) -> Result<(), ApiError> {
    use session_limits::{MAX_LABEL_BYTES, MAX_LABELS};
    if labels.len() > MAX_LABELS {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("node_labels: more than {MAX_LABELS}"),
        ));
    }
    match labels.iter().find(|(name, value)| {
        name.is_empty() || name.len() > MAX_LABEL_BYTES || value.len() > MAX_LABEL_BYTES
    }) {
        Some((name, _)) => Err(ApiError::invalid(format!(
            "node_labels: {name:?} is not a label (1 to {MAX_LABEL_BYTES} bytes)"
        ))),
        None => Ok(()),
    }
}
