//! Validation of session and job requests; each error names its field. The orchestrator validates
//! before it stores anything; a node validates again, because it trusts no caller.

use std::collections::BTreeMap;

use cynode_api::{
    ErrorCode, LimitsRequest,
    exec_limits::{
        MAX_ARGUMENT_BYTES, MAX_ARGUMENT_LENGTH, MAX_ARGV, MAX_ARGV_BYTES, POINTER_BYTES,
    },
    sba::is_node_variable,
    session_limits::{
        MAX_LABEL_BYTES, MAX_LABELS, MAX_LIFETIME_SECONDS, MAX_REASON_BYTES, MIN_DISK_BYTES,
        MIN_MEMORY_BYTES, MIN_NOFILE, MIN_PIDS,
    },
};

use crate::ApiError;

/// Validates a lifetime or idle time.
pub fn check_seconds(field: &str, seconds: u64) -> Result<u64, ApiError> {
    if (1..=MAX_LIFETIME_SECONDS).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(ApiError::invalid(format!(
            "{field}: must be between 1 and {MAX_LIFETIME_SECONDS}"
        )))
    }
}

/// Validates the reason for ending a session.
pub fn check_reason(reason: &str) -> Result<(), ApiError> {
    if reason.len() > MAX_REASON_BYTES {
        Err(ApiError::invalid(format!(
            "reason: more than {MAX_REASON_BYTES} bytes"
        )))
    } else {
        Ok(())
    }
}

/// Validates limits. Absent ones have defaults.
pub fn check_limits(request: &LimitsRequest) -> Result<(), ApiError> {
    if request
        .cpus
        .is_some_and(|cpus| !(0.01..=1_024.0).contains(&cpus))
    {
        return Err(ApiError::invalid(
            "limits.cpus: must be between 0.01 and 1024",
        ));
    }
    if request
        .pids
        .is_some_and(|pids| !(MIN_PIDS..=1 << 20).contains(&pids))
    {
        return Err(ApiError::invalid(format!(
            "limits.pids: must be between {MIN_PIDS} and {}",
            1 << 20
        )));
    }
    if request.nofile.is_some_and(|nofile| nofile < MIN_NOFILE) {
        return Err(ApiError::invalid(format!(
            "limits.nofile: must be at least {MIN_NOFILE}"
        )));
    }
    for (name, value, min) in [
        ("memory_bytes", request.memory_bytes, MIN_MEMORY_BYTES),
        ("disk_bytes", request.disk_bytes, MIN_DISK_BYTES),
    ] {
        if value.is_some_and(|value| value < min) {
            return Err(ApiError::invalid(format!(
                "limits.{name}: must be at least {min}"
            )));
        }
        if value.is_some_and(|value| value > 1 << 50) {
            return Err(ApiError::invalid(format!(
                "limits.{name}: is more than any machine has"
            )));
        }
    }
    Ok(())
}

/// Validates argv and environment against the limits of `execve`. Variables that the sandbox adds
/// count too, so the kernel may still fail with `E2BIG`.
pub fn check_arguments(argv: &[String], env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let too_large = |detail: String| {
        Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("{detail}; pass it in a file or as standard input"),
        ))
    };
    let max_length = MAX_ARGUMENT_LENGTH - 1;
    if argv.first().is_none_or(String::is_empty) {
        return Err(ApiError::invalid("argv: must start with the command"));
    }
    let mut total = 0_usize;
    for (index, argument) in argv.iter().enumerate() {
        if argument.contains('\0') {
            return Err(ApiError::invalid(format!(
                "argv[{index}]: contains a NUL character"
            )));
        }
        if argument.len() > max_length {
            return too_large(format!(
                "argv[{index}]: {} bytes; the kernel accepts at most {max_length} per argument",
                argument.len()
            ));
        }
        total = total.saturating_add(argument.len() + 1 + POINTER_BYTES);
    }
    check_env(env, usize::MAX, usize::MAX)?;
    for (name, value) in env {
        let length = name.len() + 1 + value.len();
        if length > max_length {
            return too_large(format!(
                "env.{}: {length} bytes; the kernel accepts at most {max_length} per variable",
                shown(name)
            ));
        }
        total = total.saturating_add(length + 1 + POINTER_BYTES);
    }
    if total > MAX_ARGUMENT_BYTES {
        return too_large(format!(
            "argv and env: {total} bytes with a terminator and a pointer each; the kernel accepts \
             at most {MAX_ARGUMENT_BYTES}"
        ));
    }
    Ok(())
}

/// A name, truncated for messages.
fn shown(name: &str) -> String {
    name.chars().take(64).collect()
}

/// Validates a command; `field` is its name in the request.
pub fn check_argv(field: &str, argv: &[String]) -> Result<(), ApiError> {
    if argv.first().is_none_or(String::is_empty) {
        return Err(ApiError::invalid(format!(
            "{field}: must start with the command"
        )));
    }
    if argv.len() > MAX_ARGV
        || argv
            .iter()
            .map(|argument| argument.len() + 1)
            .sum::<usize>()
            > MAX_ARGV_BYTES
    {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("{field}: more than {MAX_ARGV} arguments or {MAX_ARGV_BYTES} bytes"),
        ));
    }
    match argv.iter().position(|argument| argument.contains('\0')) {
        Some(index) => Err(ApiError::invalid(format!(
            "{field}[{index}]: contains a NUL character"
        ))),
        None => Ok(()),
    }
}

/// Validates environment variables. The node sets some itself, which callers can't override: those
/// with the prefix `CYNODE_`, and those that say where its proxies are.
pub fn check_env(
    env: &BTreeMap<String, String>,
    max_count: usize,
    max_bytes: usize,
) -> Result<(), ApiError> {
    if env.len() > max_count {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("env: more than {max_count} variables"),
        ));
    }
    if env
        .iter()
        .map(|(name, value)| name.len() + value.len() + 2)
        .sum::<usize>()
        > max_bytes
    {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("env: more than {max_bytes} bytes"),
        ));
    }
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(ApiError::invalid(format!(
                "env: {:?} is not a valid variable name",
                shown(name)
            )));
        }
        if value.contains('\0') {
            return Err(ApiError::invalid(format!(
                "env.{}: the value contains a NUL character",
                shown(name)
            )));
        }
        if name.starts_with("CYNODE_") {
            return Err(ApiError::invalid(format!(
                "env.{}: the prefix CYNODE_ is reserved for the system",
                shown(name)
            )));
        }
        if is_node_variable(name) {
            return Err(ApiError::invalid(format!(
                "env.{}: is set by the node and can't be overridden",
                shown(name)
            )));
        }
    }
    Ok(())
}

pub fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if labels.len() > MAX_LABELS {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("labels: more than {MAX_LABELS}"),
        ));
    }
    match labels.iter().find(|(name, value)| {
        name.is_empty()
            || name.len() > MAX_LABEL_BYTES
            || value.len() > MAX_LABEL_BYTES
            || name.contains(['=', '\0', '\n'])
            || value.contains('\0')
    }) {
        Some((name, _)) => Err(ApiError::invalid(format!(
            "labels: {name:?} is not a valid label (no '=' in names, at most {MAX_LABEL_BYTES} \
             bytes each)"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(argv: &[String], env: &[(&str, String)]) -> Result<(), (String, String)> {
        let env = env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        check_arguments(argv, &env).map_err(|error| (error.code.clone(), error.detail.clone()))
    }

    #[test]
    fn an_argument_and_a_variable_may_be_as_long_as_the_kernel_allows() {
        let max_length = MAX_ARGUMENT_LENGTH - 1;
        assert_eq!(
            check(
                &["a".to_owned(), "x".repeat(max_length)],
                &[("A", "x".repeat(max_length - 2))]
            ),
            Ok(())
        );
        let assert_too_large = |result: Result<(), (String, String)>, place: &str| {
            assert!(
                matches!(
                    &result,
                    Err((code, detail)) if code == "too_large" && detail.starts_with(place)
                ),
                "{result:?}"
            );
        };
        assert_too_large(
            check(&["a".to_owned(), "x".repeat(max_length + 1)], &[]),
            "argv[1]: ",
        );
        assert_too_large(
            check(&["a".to_owned()], &[("A", "x".repeat(max_length - 1))]),
            "env.A: ",
        );
    }

    #[test]
    fn argv_and_environment_are_limited_together_like_in_the_kernel() {
        // One byte, its terminator and a pointer: as many arguments as fit exactly, then one byte
        // more.
        let each = 1 + 1 + POINTER_BYTES;
        let mut argv = vec!["x".to_owned(); MAX_ARGUMENT_BYTES / each];
        argv[0] = "x".repeat(1 + MAX_ARGUMENT_BYTES % each);
        assert!(argv.len() > 4_096);
        assert_eq!(check(&argv, &[]), Ok(()));
        argv[1].push('x');
        assert!(
            check(&argv, &[]).is_err_and(|(code, detail)| code == "too_large"
                && detail.contains(&(MAX_ARGUMENT_BYTES + 1).to_string()))
        );
        argv.pop();
        assert_eq!(check(&argv, &[]), Ok(()));
        assert!(
            check(&argv, &[("A", String::new())]).is_err(),
            "the environment was not counted"
        );
    }

    #[test]
    fn invalid_arguments_and_variables_are_named() {
        for (argv, env, prefix) in [
            (vec![], vec![], "argv: "),
            (vec![""], vec![], "argv: "),
            (vec!["a", "b\0"], vec![], "argv[1]: "),
            (vec!["a"], vec![("", "")], "env: "),
            (vec!["a"], vec![("A=", "")], "env: "),
            (vec!["a"], vec![("A", "\0")], "env.A: "),
            (vec!["a"], vec![("CYNODE_X", "")], "env.CYNODE_X: "),
            (
                vec!["a"],
                vec![("OLLAMA_BASE_URL", "")],
                "env.OLLAMA_BASE_URL: ",
            ),
            (vec!["a"], vec![("https_Proxy", "")], "env.https_Proxy: "),
        ] {
            let argv: Vec<String> = argv.into_iter().map(str::to_owned).collect();
            let env: Vec<(&str, String)> = env
                .into_iter()
                .map(|(name, value)| (name, value.to_owned()))
                .collect();
            assert!(
                check(&argv, &env).is_err_and(
                    |(code, detail)| code == "invalid_request" && detail.starts_with(prefix)
                ),
                "{prefix}"
            );
        }
        let long = "=".repeat(10_000);
        assert!(
            check(&["a".to_owned()], &[(&long, String::new())])
                .is_err_and(|(_, detail)| detail.len() < 200)
        );
    }
}
