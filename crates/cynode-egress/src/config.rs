//! The configuration of the git egress role, section `[egress.git]`.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use cynode_service::{
    ConfigError, config,
    listen::{self, TlsFiles},
};
use serde::Deserialize;

/// The section of all egress roles.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct EgressSection {
    git: Config,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    #[serde(skip)]
    pub state_dir: PathBuf,
    pub listen: SocketAddr,
    pub tls: TlsFiles,
    pub insecure_listen: bool,
    /// The directory of the key, the audit stream and the mirrors. Default: `egress/git` in the
    /// state directory.
    pub directory: Option<PathBuf>,
    /// A file with the token that orchestrators send; created if missing. Default: `token` in the
    /// directory.
    pub token_file: Option<PathBuf>,
    /// A file with another token that may read `/metrics` from other machines; created if missing.
    pub metrics_token_file: Option<PathBuf>,
    /// The git program, version 2.37 or later.
    pub git: PathBuf,
    /// Under root: the user id of the role. Default: that of the user `cynode-git`, or 61286.
    pub role_uid: Option<u32>,
    /// Under root: the user id of the processes that run git. Default: that of the user
    /// `cynode-git-runner`, or 61287.
    pub runner_uid: Option<u32>,
    /// Address space of one git process.
    pub memory_bytes: u64,
    /// Size of one mirror, and of one file in it.
    pub mirror_bytes: u64,
    /// git commands that run at once; others wait.
    pub max_commands: usize,
    /// Timeout of one git command that does not fetch.
    pub command_timeout_seconds: u64,
    /// Timeout of a fetch, a push and the building of a seed.
    pub transfer_timeout_seconds: u64,
    /// Maximum number of concurrent connections.
    pub max_connections: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            state_dir: PathBuf::new(),
            listen: SocketAddr::from(([127, 0, 0, 1], 12_086)),
            tls: TlsFiles::default(),
            insecure_listen: false,
            directory: None,
            token_file: None,
            metrics_token_file: None,
            git: PathBuf::from("git"),
            role_uid: None,
            runner_uid: None,
            memory_bytes: 2 << 30,
            mirror_bytes: 4 << 30,
            max_commands: 8,
            command_timeout_seconds: 120,
            transfer_timeout_seconds: 1_800,
            max_connections: listen::CONNECTIONS,
        }
    }
}

/// With less memory git can't index the packs of ordinary repositories.
const MIN_MEMORY_BYTES: u64 = 256 << 20;
const MIN_MIRROR_BYTES: u64 = 1 << 20;
/// The largest `max_commands`.
const MAX_COMMANDS: usize = 64;
/// The longest timeout that can be configured.
const MAX_TIMEOUT_SECONDS: u64 = 86_400;

impl Config {
    /// Reads the file, then `CYNODE_EGRESS_GIT__*`, then the flags (`git.listen`); later sources
    /// take precedence.
    pub fn load(
        path: Option<&Path>,
        state_dir: Option<PathBuf>,
        flags: &[(String, String)],
    ) -> Result<Self, ConfigError> {
        Self::read(path, state_dir, std::env::vars(), flags)
    }

    fn read(
        path: Option<&Path>,
        state_dir: Option<PathBuf>,
        environment: impl IntoIterator<Item = (String, String)>,
        flags: &[(String, String)],
    ) -> Result<Self, ConfigError> {
        let section: EgressSection =
            config::load(path, "egress", environment, flags.iter().cloned())?;
        let mut read = section.git;
        read.state_dir = state_dir.unwrap_or_else(|| {
            config::default_state_dir(rustix::process::geteuid().is_root(), |name| {
                std::env::var(name).ok()
            })
        });
        // The process that runs git has another working directory.
        let paths = [
            &mut read.directory,
            &mut read.token_file,
            &mut read.metrics_token_file,
        ];
        for path in paths.into_iter().flatten().chain([&mut read.state_dir]) {
            *path = absolute(path)?;
        }
        if read.git.components().count() > 1 {
            read.git = absolute(&read.git)?;
        }
        read.check()?;
        Ok(read)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let bad = |key: &str, message: String| {
            Err(ConfigError::Value {
                key: format!("egress.git.{key}"),
                message,
            })
        };
        if self.memory_bytes < MIN_MEMORY_BYTES {
            return bad(
                "memory_bytes",
                format!("must be at least {MIN_MEMORY_BYTES}"),
            );
        }
        if self.mirror_bytes < MIN_MIRROR_BYTES {
            return bad(
                "mirror_bytes",
                format!("must be at least {MIN_MIRROR_BYTES}"),
            );
        }
        if !(1..=MAX_COMMANDS).contains(&self.max_commands) {
            return bad(
                "max_commands",
                format!("must be between 1 and {MAX_COMMANDS}"),
            );
        }
        for (key, value) in [
            ("command_timeout_seconds", self.command_timeout_seconds),
            ("transfer_timeout_seconds", self.transfer_timeout_seconds),
        ] {
            if !(1..=MAX_TIMEOUT_SECONDS).contains(&value) {
                return bad(key, format!("must be between 1 and {MAX_TIMEOUT_SECONDS}"));
            }
        }
        let range = listen::CONNECTIONS_RANGE;
        if !range.contains(&(self.max_connections as u64)) {
            return bad(
                "max_connections",
                format!("must be between {} and {}", range.start(), range.end()),
            );
        }
        for (key, uid) in [("role_uid", self.role_uid), ("runner_uid", self.runner_uid)] {
            if uid == Some(0) {
                return bad(key, "must not be root's".to_owned());
            }
        }
        if self.role_uid.is_some() && self.role_uid == self.runner_uid {
            return bad(
                "runner_uid",
                "must differ from role_uid: git could read the role's key".to_owned(),
            );
        }
        Ok(())
    }

    /// The role's directory.
    #[must_use]
    pub fn directory(&self) -> PathBuf {
        self.directory
            .clone()
            .unwrap_or_else(|| self.state_dir.join("egress/git"))
    }

    /// The file with the token that orchestrators send.
    #[must_use]
    pub fn token_file(&self) -> PathBuf {
        self.token_file
            .clone()
            .unwrap_or_else(|| self.directory().join("token"))
    }

    pub(crate) fn command_timeout(&self) -> Duration {
        Duration::from_secs(self.command_timeout_seconds)
    }

    pub(crate) fn transfer_timeout(&self) -> Duration {
        Duration::from_secs(self.transfer_timeout_seconds)
    }
}

fn absolute(path: &Path) -> Result<PathBuf, ConfigError> {
    std::path::absolute(path).map_err(|source| ConfigError::Read {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(environment: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Config, String> {
        let own = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        Config::read(
            None,
            Some(PathBuf::from("/var/lib/cynode")),
            own(environment),
            &own(flags),
        )
        .map_err(|error| error.to_string())
    }

    #[test]
    fn the_directory_and_the_token_are_below_the_state_directory_by_default() {
        let config = read(&[], &[]).expect("defaults");
        assert_eq!(config.directory(), Path::new("/var/lib/cynode/egress/git"));
        assert_eq!(
            config.token_file(),
            Path::new("/var/lib/cynode/egress/git/token")
        );
        assert_eq!(config.listen.port(), 12_086);
    }

    #[test]
    fn flags_win_over_the_environment_and_nested_keys_are_set() {
        let config = read(
            &[
                ("CYNODE_EGRESS_GIT__LISTEN", "127.0.0.1:1"),
                ("CYNODE_EGRESS_GIT__TLS__NAME", "git.example"),
            ],
            &[("git.listen", "127.0.0.1:2")],
        )
        .expect("valid");
        assert_eq!(config.listen.port(), 2);
        assert_eq!(config.tls.name.as_deref(), Some("git.example"));
    }

    #[test]
    fn unknown_keys_and_values_out_of_range_are_refused_by_name() {
        for (flags, expected) in [
            (vec![("git.surprise", "1")], "surprise"),
            (vec![("git.memory_bytes", "1")], "egress.git.memory_bytes"),
            (vec![("git.max_commands", "0")], "egress.git.max_commands"),
            (vec![("git.role_uid", "0")], "egress.git.role_uid"),
            (
                vec![("git.role_uid", "7"), ("git.runner_uid", "7")],
                "must differ",
            ),
            (
                vec![("git.command_timeout_seconds", "0")],
                "egress.git.command_timeout_seconds",
            ),
        ] {
            let error = read(&[], &flags).expect_err("refused");
            assert!(error.contains(expected), "{error}");
        }
    }
}
