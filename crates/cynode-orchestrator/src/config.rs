//! The orchestrator's configuration: section `[orchestrator]`.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use cynode_policy::ShapeSetting;
use cynode_service::{
    ConfigError, config,
    listen::{self, TlsFiles},
};
use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    #[serde(skip)]
    pub state_dir: PathBuf,
    /// The user API.
    pub listen: SocketAddr,
    /// The control plane, for nodes.
    pub control_listen: SocketAddr,
    pub tls: TlsFiles,
    pub insecure_listen: bool,
    /// Host names by which agents call `/mcp`, besides localhost, the listen address and the
    /// certificate's name.
    pub mcp_hosts: Vec<String>,
    /// Any PostgreSQL; the environment variable `DATABASE_URL` has the same effect.
    pub database_url: Option<String>,
    pub database_connections: u32,
    /// Concurrent connections to each of the two listeners.
    pub max_connections: usize,
    /// The key that all orchestrators of a database share; created when absent.
    pub key_file: Option<PathBuf>,
    /// A file with a reusable registration key for nodes. `up` creates one for its own worker.
    pub registration_key_file: Option<PathBuf>,
    /// A file with a token that may read `/metrics` remotely, besides administrators; created when
    /// absent.
    pub metrics_token_file: Option<PathBuf>,
    /// The meaning of `image_ref: "default"` unless a setting overrides it.
    pub default_image: String,
    /// Built-in images: allowed as soon as a node has them.
    pub seed_images: Vec<String>,
    /// A node that is silent for this many seconds is lost, and its work with it.
    pub node_lost_after: u64,
    pub heartbeat_seconds: u64,
    /// How often the tokens of nodes are rotated.
    pub rotate_tokens_hours: u32,
    /// How long events are kept.
    pub event_days: u32,
    /// How long the full output of a job is kept; the excerpt in its object stays.
    pub output_days: u32,
    /// How long artifacts are kept after they are superseded or their task has ended. For ever when
    /// absent.
    pub artifact_days: Option<u32>,
    /// With less free space in the artifact store, uploads are rejected and the orchestrator is not
    /// ready.
    pub min_free_bytes: u64,
    /// What happens to content that looks like a token of a well-known service: `true`, `false`, or
    /// `refuse`, `flag` or `off` for each of `env`, `argv`, `stdin`, `files`, `archives`, `patches`
    /// and `seeds`. The system's own secrets are always refused.
    pub secret_shapes: ShapeSetting,
    /// How long audit records are kept. For ever when absent.
    pub audit_days: Option<u32>,
    /// The number of audit checkpoints that are folded into one.
    pub audit_checkpoints: u32,
    /// The artifact store: a directory below the state directory, or `s3://bucket/prefix`.
    pub artifact_store: Option<String>,
    /// The git egress role (`cynode egress --role git`), such as `http://127.0.0.1:12086`. Without
    /// it no repository can be reached.
    pub egress_git_url: Option<String>,
    /// The file with the role's token; `egress/git/token` in the state directory when absent.
    pub egress_git_token_file: Option<PathBuf>,
    /// The authority of the role's certificate.
    pub egress_git_ca: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            state_dir: PathBuf::new(),
            listen: SocketAddr::from(([127, 0, 0, 1], 12_080)),
            control_listen: SocketAddr::from(([127, 0, 0, 1], 12_082)),
            tls: TlsFiles::default(),
            insecure_listen: false,
            mcp_hosts: Vec::new(),
            database_url: None,
            database_connections: 20,
            max_connections: listen::CONNECTIONS,
            key_file: None,
            registration_key_file: None,
            metrics_token_file: None,
            default_image: DEFAULT_IMAGE.to_owned(),
            seed_images: vec![DEFAULT_IMAGE.to_owned()],
            node_lost_after: 900,
            heartbeat_seconds: 5,
            rotate_tokens_hours: 24,
            event_days: 30,
            output_days: 30,
            artifact_days: None,
            min_free_bytes: 1 << 30,
            secret_shapes: ShapeSetting::default(),
            audit_days: None,
            audit_checkpoints: 3_600,
            artifact_store: None,
            egress_git_url: None,
            egress_git_token_file: None,
            egress_git_ca: None,
        }
    }
}

/// The image that `make up` builds.
const DEFAULT_IMAGE: &str = "localhost/cynode/sba-runner:latest";

impl Config {
    /// The host names that `/mcp` accepts, which protects it from DNS rebinding by web pages.
    pub(crate) fn mcp_hosts(&self) -> Vec<String> {
        let own = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
        let listened = (!self.listen.ip().is_unspecified()).then(|| self.listen.ip().to_string());
        own.into_iter()
            .chain(listened)
            .chain(self.tls.name.clone())
            .chain(self.mcp_hosts.iter().cloned())
            .collect()
    }

    /// Reads the file, then `CYNODE_ORCHESTRATOR_*`, then the flags.
    pub fn load(
        file: Option<&Path>,
        state_dir: &Path,
        environment: impl IntoIterator<Item = (String, String)>,
        flags: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let mut url = None;
        let environment: Vec<_> = environment
            .into_iter()
            .inspect(|(name, value)| {
                if name == "DATABASE_URL" && !value.is_empty() {
                    url = Some(value.clone());
                }
            })
            .collect();
        let mut config: Self = config::load(file, "orchestrator", environment, flags)?;
        config.database_url = config.database_url.or(url);
        state_dir.clone_into(&mut config.state_dir);
        for (key, value, range) in [
            ("heartbeat_seconds", config.heartbeat_seconds, 1..=300),
            ("node_lost_after", config.node_lost_after, 1..=604_800),
            (
                "database_connections",
                config.database_connections.into(),
                2..=1_000,
            ),
            (
                "max_connections",
                config.max_connections as u64,
                listen::CONNECTIONS_RANGE,
            ),
            (
                "audit_checkpoints",
                config.audit_checkpoints.into(),
                2..=100_000,
            ),
        ] {
            if !range.contains(&value) {
                let message = format!("must lie between {} and {}", range.start(), range.end());
                return Err(ConfigError::Value {
                    key: format!("orchestrator.{key}"),
                    message,
                });
            }
        }
        Ok(config)
    }

    #[must_use]
    pub fn key_file(&self) -> PathBuf {
        self.key_file
            .clone()
            .unwrap_or_else(|| self.state_dir.join("orchestrator.key"))
    }

    /// The file with the token of the git role.
    pub(crate) fn egress_git_token_file(&self) -> PathBuf {
        self.egress_git_token_file
            .clone()
            .unwrap_or_else(|| self.state_dir.join("egress/git/token"))
    }

    /// A node that is silent for longer gets no new work.
    pub(crate) const fn unreachable_after(&self) -> Duration {
        Duration::from_secs(self.heartbeat_seconds.saturating_mul(3))
    }
}
