//! Bounds of what a session may ask for, each refusal naming its field.

use std::collections::BTreeMap;

use cynode_api::{
    API_VERSION, ErrorCode, Limits, LimitsRequest, SessionCreate,
    exec_limits::{MAX_ARGV, MAX_ARGV_BYTES},
    session_limits::{
        DEFAULT_IDLE_SECONDS, DEFAULT_LIFETIME_SECONDS, MAX_ENV, MAX_ENV_BYTES, MAX_LABEL_BYTES, MAX_LABELS, MAX_LIFETIME_SECONDS, MIN_DISK_BYTES,
        MIN_MEMORY_BYTES, MIN_NOFILE, MIN_PIDS,
    },
};
use cynode_service::ApiError;
use time::OffsetDateTime;

/// A request with its defaults filled in.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) limits: Limits,
    pub(super) lifetime_seconds: u64,
    pub(super) idle_seconds: u64,
}

pub(crate) fn check_version(version: Option<u32>) -> Result<(), ApiError> {
    match version {
        None | Some(API_VERSION) => Ok(()),
        Some(other) => Err(ApiError::new(ErrorCode::UnsupportedVersion, format!("version {other} is unknown here"))),
    }
}

pub(super) fn check(request: &SessionCreate, max_nofile: u64) -> Result<Checked, ApiError> {
    check_version(request.version)?;
    if request.image_ref.is_empty() || request.image_ref.len() > 512 || request.image_ref.bytes().any(|byte| byte.is_ascii_control() || byte == b' ') {
        return Err(ApiError::invalid("image_ref: must be an image reference or \"default\""));
    }
    check_env(&request.env, MAX_ENV, MAX_ENV_BYTES)?;
    check_labels(&request.labels)?;
    Ok(Checked {
        limits: limits(request.limits.unwrap_or_default(), max_nofile)?,
        lifetime_seconds: lifetime(request.max_lifetime_seconds.unwrap_or(DEFAULT_LIFETIME_SECONDS))?,
        idle_seconds: idle(request.idle_timeout_seconds.unwrap_or(DEFAULT_IDLE_SECONDS))?,
    })
}

pub(super) fn lifetime(seconds: u64) -> Result<u64, ApiError> {
    if (1..=MAX_LIFETIME_SECONDS).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(ApiError::invalid(format!("max_lifetime_seconds: must lie between 1 and {MAX_LIFETIME_SECONDS}")))
    }
}

pub(super) fn idle(seconds: u64) -> Result<u64, ApiError> {
    if (1..=MAX_LIFETIME_SECONDS).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(ApiError::invalid(format!("idle_timeout_seconds: must lie between 1 and {MAX_LIFETIME_SECONDS}")))
    }
}

fn limits(request: LimitsRequest, max_nofile: u64) -> Result<Limits, ApiError> {
    let default = Limits::default();
    let at_least = |name: &str, value: u64, least: u64| {
        if value >= least { Ok(value) } else { Err(ApiError::invalid(format!("limits.{name}: must be at least {least}"))) }
    };
    let cpus = request.cpus.unwrap_or(default.cpus);
    if !(0.01..=1_024.0).contains(&cpus) {
        return Err(ApiError::invalid("limits.cpus: must lie between 0.01 and 1024"));
    }
    let pids = request.pids.unwrap_or(default.pids);
    if !(MIN_PIDS..=1 << 20).contains(&pids) {
        return Err(ApiError::invalid(format!("limits.pids: must lie between {MIN_PIDS} and {}", 1 << 20)));
    }
    let nofile = at_least("nofile", request.nofile.unwrap_or(default.nofile), MIN_NOFILE)?;
    if nofile > max_nofile {
        return Err(ApiError::new(ErrorCode::LimitUnenforceable, format!("limits.nofile: this host lets a sandbox have at most {max_nofile} open files")));
    }
    let bound = |name: &str, value: u64| if value <= 1 << 50 { Ok(value) } else { Err(ApiError::invalid(format!("limits.{name}: is beyond any machine"))) };
    Ok(Limits {
        memory_bytes: bound("memory_bytes", at_least("memory_bytes", request.memory_bytes.unwrap_or(default.memory_bytes), MIN_MEMORY_BYTES)?)?,
        cpus,
        pids,
        disk_bytes: bound("disk_bytes", at_least("disk_bytes", request.disk_bytes.unwrap_or(default.disk_bytes), MIN_DISK_BYTES)?)?,
        nofile,
    })
}

/// A command that can be passed to a process; `field` is its name in the request.
pub(crate) fn check_argv(field: &str, argv: &[String]) -> Result<(), ApiError> {
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
pub(crate) fn check_env(env: &BTreeMap<String, String>, max_count: usize, max_bytes: usize) -> Result<(), ApiError> {
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

pub(crate) fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), ApiError> {
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

pub(super) fn after(from: OffsetDateTime, seconds: u64) -> OffsetDateTime {
    from.saturating_add(time::Duration::seconds(i64::try_from(seconds).unwrap_or(i64::MAX)))
}
