//! Validates the requests that create sessions and jobs.

use cynode_api::{
    ErrorCode, JobCreate, UserSessionCreate, exec_limits, is_model_name, job_limits,
    sba::limits::{MAX_MODEL_BYTES, MAX_MODELS},
    session_limits,
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
    check_node_labels(&body.node_labels)
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
    check_prompt(body)?;
    if body.command.is_empty() && body.job.is_none() && body.prompt.is_none() {
        return Err(ApiError::invalid(
            "command: must name a program; or give the job a specification, in job, or an agent's \
             work, in prompt",
        ));
    }
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

/// Fails for a prompt beside another kind of work, and for what only a prompt can have.
fn check_prompt(body: &JobCreate) -> Result<(), ApiError> {
    use job_limits::{MAX_CHECK_BYTES, MAX_CHECKS, MAX_PROMPT_BYTES};
    let Some(prompt) = &body.prompt else {
        for (name, is_absent) in [
            ("allowed_models", body.allowed_models.is_empty()),
            ("checks", body.checks.is_empty()),
        ] {
            if !is_absent {
                return Err(ApiError::invalid(format!(
                    "{name}: belongs to a prompt; a specification has its own in job"
                )));
            }
        }
        return Ok(());
    };
    for (name, is_absent) in [
        ("command", body.command.is_empty()),
        ("job", body.job.is_none()),
    ] {
        if !is_absent {
            return Err(ApiError::invalid(format!(
                "{name}: must be left out of a job with a prompt"
            )));
        }
    }
    let is_empty = |text: &str| text.trim().is_empty();
    if is_empty(prompt) {
        return Err(ApiError::invalid("prompt: must say what to do"));
    }
    if let Some(index) = body.checks.iter().position(|check| is_empty(check)) {
        return Err(ApiError::invalid(format!(
            "checks[{index}]: must be a shell command"
        )));
    }
    if let Some(index) = body
        .allowed_models
        .iter()
        .position(|name| !is_model_name(name))
    {
        return Err(ApiError::invalid(format!(
            "allowed_models[{index}]: is not the name of a model (1 to {MAX_MODEL_BYTES} bytes)"
        )));
    }
    let longest = body
        .checks
        .iter()
        .map(String::len)
        .max()
        .unwrap_or_default();
    for (name, length, most) in [
        ("prompt", prompt.len(), MAX_PROMPT_BYTES),
        ("checks", body.checks.len(), MAX_CHECKS),
        ("checks: one of them", longest, MAX_CHECK_BYTES),
        ("allowed_models", body.allowed_models.len(), MAX_MODELS),
    ] {
        if length > most {
            let message = format!("{name}: {length} is more than {most}");
            return Err(ApiError::new(ErrorCode::TooLarge, message));
        }
    }
    Ok(())
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
