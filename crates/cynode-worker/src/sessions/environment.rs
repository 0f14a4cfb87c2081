//! The environment of commands in a session.

use std::collections::BTreeMap;

use cynode_sba_proto::{HOME, WORKSPACE};

use crate::journal::SessionRecord;

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What an image may bring along at most.
const MAX_IMAGE_ENV: usize = 128;
const MAX_IMAGE_ENV_BYTES: usize = 64 * 1024;

/// What an image's environment may keep: no variable that loads code into programs, none of ours, none that is huge.
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
                && !name.starts_with("CYNODE_")
                && !name.starts_with("BASH_FUNC_")
                && !name.to_ascii_lowercase().ends_with("_proxy")
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

/// What a command sees: ours and the image's below the session's below its own; the `CYNODE_` variables above all.
pub(crate) fn exec_environment(
    record: &SessionRecord,
    own: &BTreeMap<String, String>,
) -> Vec<(String, String)> {
    let mut env: BTreeMap<String, String> = BTreeMap::from([
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ("PATH".to_owned(), PATH.to_owned()),
    ]);
    env.extend(record.image_env.iter().cloned());
    // An image's own directories first, but never without the usual ones.
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
    env.extend(own.clone());
    env.extend([
        (
            "CYNODE_TASK_ID".to_owned(),
            record.session.task_id.to_string(),
        ),
        match record.job_id {
            Some(job_id) => ("CYNODE_JOB_ID".to_owned(), job_id.to_string()),
            None => (
                "CYNODE_SESSION_ID".to_owned(),
                record.session.session_id.to_string(),
            ),
        },
        ("CYNODE_WORKSPACE_DIR".to_owned(), WORKSPACE.to_owned()),
    ]);
    env.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_images_environment_can_not_load_code_or_pose_as_ours() {
        let env = [
            ("LD_PRELOAD", "/evil.so"),
            ("CYNODE_TASK_ID", "forged"),
            ("BASH_ENV", "/evil"),
            ("https_proxy", "http://evil"),
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
    fn a_giant_environment_is_cut() {
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
