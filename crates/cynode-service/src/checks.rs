//! Bounds of what sessions and jobs may ask for, each refusal naming its field. The orchestrator looks before it writes anything
//! down; a node looks again, because it trusts nobody.

use std::collections::BTreeMap;

use cynode_api::{
    ErrorCode, LimitsRequest,
    exec_limits::{MAX_ARGV, MAX_ARGV_BYTES},
    session_limits::{MAX_LABEL_BYTES, MAX_LABELS, MAX_LIFETIME_SECONDS, MAX_REASON_BYTES, MIN_DISK_BYTES, MIN_MEMORY_BYTES, MIN_NOFILE, MIN_PIDS},
};

use crate::ApiError;

/// How long a session may live, or do nothing.
pub fn check_seconds(field: &str, seconds: u64) -> Result<u64, ApiError> {
    if (1..=MAX_LIFETIME_SECONDS).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(ApiError::invalid(format!("{field}: must lie between 1 and {MAX_LIFETIME_SECONDS}")))
    }
}

/// Why a session is ended.
pub fn check_reason(reason: &str) -> Result<(), ApiError> {
    if reason.len() > MAX_REASON_BYTES { Err(ApiError::invalid(format!("reason: more than {MAX_REASON_BYTES} bytes"))) } else { Ok(()) }
}

/// Limits that some machine may have. What is absent has a default.
pub fn check_limits(request: &LimitsRequest) -> Result<(), ApiError> {
    if request.cpus.is_some_and(|cpus| !(0.01..=1_024.0).contains(&cpus)) {
        return Err(ApiError::invalid("limits.cpus: must lie between 0.01 and 1024"));
    }
    if request.pids.is_some_and(|pids| !(MIN_PIDS..=1 << 20).contains(&pids)) {
        return Err(ApiError::invalid(format!("limits.pids: must lie between {MIN_PIDS} and {}", 1 << 20)));
    }
    if request.nofile.is_some_and(|nofile| nofile < MIN_NOFILE) {
        return Err(ApiError::invalid(format!("limits.nofile: must be at least {MIN_NOFILE}")));
    }
    for (name, value, least) in [("memory_bytes", request.memory_bytes, MIN_MEMORY_BYTES), ("disk_bytes", request.disk_bytes, MIN_DISK_BYTES)] {
        if value.is_some_and(|value| value < least) {
            return Err(ApiError::invalid(format!("limits.{name}: must be at least {least}")));
        }
        if value.is_some_and(|value| value > 1 << 50) {
            return Err(ApiError::invalid(format!("limits.{name}: is beyond any machine")));
        }
    }
    Ok(())
}

/// A command that can be passed to a process; `field` is its name in the request.
pub fn check_argv(field: &str, argv: &[String]) -> Result<(), ApiError> {
    if argv.first().is_none_or(String::is_empty) {
        return Err(ApiError::invalid(format!("{field}: must hold the command's name first")));
    }
    if argv.len() > MAX_ARGV || argv.iter().map(|argument| argument.len() + 1).sum::<usize>() > MAX_ARGV_BYTES {
        return Err(ApiError::new(ErrorCode::TooLarge, format!("{field}: more than {MAX_ARGV} arguments or {MAX_ARGV_BYTES} bytes")));
    }
    match argv.iter().position(|argument| argument.contains('\0')) {
        Some(index) => Err(ApiError::invalid(format!("{field}[{index}]: holds a NUL character"))),
        None => Ok(()),
    }
}

/// Names and values that a process's environment can hold. `CYNODE_` belongs to the system.
pub fn check_env(env: &BTreeMap<String, String>, max_count: usize, max_bytes: usize) -> Result<(), ApiError> {
    if env.len() > max_count {
        return Err(ApiError::new(ErrorCode::TooLarge, format!("env: more than {max_count} variables")));
    }
    if env.iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>() > max_bytes {
        return Err(ApiError::new(ErrorCode::TooLarge, format!("env: more than {max_bytes} bytes")));
    }
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(ApiError::invalid(format!("env: {name:?} is not a name that a variable can have")));
        }
        if value.contains('\0') {
            return Err(ApiError::invalid(format!("env.{name}: the value holds a NUL character")));
        }
        if name.starts_with("CYNODE_") {
            return Err(ApiError::invalid(format!("env.{name}: names that begin with CYNODE_ are set by the system")));
        }
    }
    Ok(())
}

pub fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if labels.len() > MAX_LABELS {
        return Err(ApiError::new(ErrorCode::TooLarge, format!("labels: more than {MAX_LABELS}")));
    }
    match labels.iter().find(|(name, value)| {
        name.is_empty() || name.len() > MAX_LABEL_BYTES || value.len() > MAX_LABEL_BYTES || name.contains(['=', '\0', '\n']) || value.contains('\0')
    }) {
        Some((name, _)) => Err(ApiError::invalid(format!("labels: {name:?} is not a label (names without '=', at most {MAX_LABEL_BYTES} bytes each)"))),
        None => Ok(()),
    }
}
