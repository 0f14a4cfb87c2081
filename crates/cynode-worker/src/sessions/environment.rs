//! The environment of commands in a session.

use std::collections::BTreeMap;

use cynode_api::sba::is_node_variable;
use cynode_sba_proto::{ARTIFACTS, HOME, WORKSPACE, proxy::Listener};

use crate::{jobs::CALLBACK_PATH, journal::SessionRecord};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Variables taken from an image, by count and by total size.
const MAX_IMAGE_ENV: usize = 128;
const MAX_IMAGE_ENV_BYTES: usize = 64 * 1024;

/// Filters an image's environment: drops variables that load code into programs, those that the
/// node sets, and excess size.
pub(super) fn clean_image_env(env: &[(String, String)]) -> Vec<(String, String)> {
    const DANGEROUS: &[&str] = &[
        "BASH_ENV",
        "ENV",
        "PROMPT_COMMAND",
        "PYTHONSTARTUP",
        "PYTHONPATH",
        "PERL5OPT",
        "PERL5LIB",
        "RUBYOPT",
        "NODE_OPTIONS",
        "GCONV_PATH",
        "GLIBC_TUNABLES",
        "IFS",
        "HOME",
        "USER",
        "LOGNAME",
        "PWD",
    ];
    let mut bytes = 0;
    env.iter()
        .filter(|(name, value)| {
            let safe = !name.is_empty()
                && !name.contains(['=', '\0'])
                && !value.contains('\0')
                && !name.starts_with("LD_")
                && !name.starts_with("BASH_FUNC_")
                && !is_node_variable(name)
                && !DANGEROUS.contains(&name.as_str());
            if safe {
                bytes += name.len() + value.len();
            }
            safe && bytes <= MAX_IMAGE_ENV_BYTES
        })
        .take(MAX_IMAGE_ENV)
        .cloned()
        .collect()
}

/// The environment of a command, in ascending precedence: defaults, the image's, the session's, the
/// exec's, and the reserved `CYNODE_` variables.
pub(crate) fn exec_environment(
    record: &SessionRecord,
    exec_env: &BTreeMap<String, String>,
) -> Vec<(String, String)> {
    let mut env: BTreeMap<String, String> = BTreeMap::from([
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ("PATH".to_owned(), PATH.to_owned()),
    ]);
    env.extend(record.image_env.iter().cloned());
    // The image's directories come first, but the standard ones are always included.
    let mut path = env.remove("PATH").unwrap_or_default();
    for directory in PATH.split(':') {
        if !path.split(':').any(|known| known == directory) {
            path.push(':');
            path.push_str(directory);
        }
    }
    env.insert("PATH".to_owned(), path);
    env.extend(
        [("HOME", HOME), ("USER", "agent"), ("LOGNAME", "agent")]
            .map(|(name, value)| (name.to_owned(), value.to_owned())),
    );
    env.extend(record.request.env.clone());
    env.extend(exec_env.clone());
    env.extend([
        (
            "CYNODE_TASK_ID".to_owned(),
            record.session.task_id.to_string(),
        ),
        ("CYNODE_WORKSPACE_DIR".to_owned(), WORKSPACE.to_owned()),
    ]);
    if record.job_id.is_none() {
        let id = record.session.session_id.to_string();
        env.insert("CYNODE_SESSION_ID".to_owned(), id);
    }
    // A session can work for a job too.
    if let Some(job_id) = record.job_id.or(record.request.job_id) {
        env.insert("CYNODE_JOB_ID".to_owned(), job_id.to_string());
    }
    if record.has_proxies {
        env.extend(proxy_environment(record.job_id.is_some()));
    }
    // A sandbox that an earlier version started has no such directory.
    if record.has_job_directory {
        env.insert("CYNODE_ARTIFACTS_DIR".to_owned(), ARTIFACTS.to_owned());
    }
    env.into_iter().collect()
}

/// Where a sandbox's proxies are. Addresses rather than names for what many programs parse; the
/// clients of model servers know `localhost`.
fn proxy_environment(of_job: bool) -> impl Iterator<Item = (String, String)> {
    let proxy = format!("http://127.0.0.1:{}", Listener::Proxy.port());
    let own = "localhost,127.0.0.1,::1".to_owned();
    let both_cases = |name: &str, value: &str| {
        [name.to_owned(), name.to_ascii_lowercase()].map(|name| (name, value.to_owned()))
    };
    let callback = of_job.then(|| {
        let url = format!(
            "http://127.0.0.1:{}{CALLBACK_PATH}",
            Listener::Callback.port()
        );
        ("CYNODE_CALLBACK_URL".to_owned(), url)
    });
    let models = format!("http://localhost:{}", Listener::Inference.port());
    [
        both_cases("HTTP_PROXY", &proxy),
        both_cases("HTTPS_PROXY", &proxy),
        both_cases("NO_PROXY", &own),
    ]
    .into_iter()
    .flatten()
    .chain([("OLLAMA_BASE_URL".to_owned(), models)])
    .chain(callback)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    // invariant: no-secrets-inside
    fn an_image_environment_cannot_load_code_or_set_reserved_variables() {
        let env = [
            ("LD_PRELOAD", "/evil.so"),
            ("CYNODE_TASK_ID", "forged"),
            ("BASH_ENV", "/evil"),
            ("https_proxy", "http://evil"),
            ("OLLAMA_BASE_URL", "http://evil"),
            ("GOPATH", "/go"),
            ("PATH", "/go/bin"),
        ];
        let env: Vec<_> = env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        assert_eq!(
            clean_image_env(&env),
            [
                ("GOPATH".to_owned(), "/go".to_owned()),
                ("PATH".to_owned(), "/go/bin".to_owned())
            ]
        );
    }

    #[test]
    fn a_giant_environment_is_truncated() {
        let env: Vec<_> = (0..10_000)
            .map(|number| (format!("V{number}"), "x".repeat(100)))
            .collect();
        assert!(clean_image_env(&env).len() <= MAX_IMAGE_ENV);
        let env = vec![
            ("BIG".to_owned(), "x".repeat(1 << 20)),
            ("SMALL".to_owned(), "y".to_owned()),
        ];
        assert!(clean_image_env(&env).is_empty());
    }
}
