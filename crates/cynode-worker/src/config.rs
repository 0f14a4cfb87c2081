//! The worker's configuration, section `[worker]`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use cynode_api::{ExecVia, Unenforced};
use cynode_service::{
    ConfigError, config,
    listen::{self, TlsFiles},
};
use serde::Deserialize;

use crate::{InferenceConfig, capacity, control, rootless, runtime::IdSpace};

/// The image that `make up` builds and loads.
pub const DEFAULT_IMAGE: &str = "localhost/cynode/sba-runner:latest";

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    #[serde(skip)]
    pub state_dir: PathBuf,
    pub listen: SocketAddr,
    pub tls: TlsFiles,
    pub insecure_listen: bool,
    /// The image that `image_ref: "default"` resolves to.
    pub default_image: String,
    pub exec_via: ExecVia,
    pub max_sandboxes: usize,
    /// Memory of the machine that is not available to sandboxes. Default: an eighth, at most 2 GiB.
    pub reserved_memory_bytes: Option<u64>,
    /// Maximum sum of the memory limits of all sandboxes, as a multiple of the memory available to
    /// them. Default: enough for `max_sandboxes` sandboxes with default limits.
    pub memory_overcommit: Option<f64>,
    /// Maximum number of processes in one sandbox.
    pub max_pids: u32,
    /// The parent cgroup of all sandboxes. Workers on one machine with the same parent share its
    /// limits of memory and processes.
    pub cgroup_parent: String,
    pub workspace_grace_seconds: u64,
    /// The agent's binary. Default: next to this program.
    pub agent_binary: Option<PathBuf>,
    pub engine: Engine,
    pub docker_socket: PathBuf,
    pub podman: String,
    /// The socket of a Podman service not managed by this worker.
    pub podman_socket: Option<PathBuf>,
    pub podman_root: Option<PathBuf>,
    pub podman_runroot: Option<PathBuf>,
    /// An additional, read-only image store.
    pub podman_image_store: Option<PathBuf>,
    /// Timeout of calls to the container runtime.
    pub runtime_timeout_seconds: u64,
    /// The OCI runtime by name (`runsc`, `kata`, …). Default: detected.
    pub oci_runtime: Option<String>,
    /// Limits that may go unenforced on this host. A sandbox whose other limits can't be enforced
    /// is rejected.
    pub allow_unenforced: BTreeSet<Unenforced>,
    /// Number of warm sandboxes with the default image and limits. Default: 10, or 2 for an
    /// ordinary user, because Podman then copies the image for each.
    pub pool_size: Option<usize>,
    /// New work is rejected while the file system of the state directory has less free space.
    pub min_free_bytes: u64,
    /// The orchestrator of this node (`http://127.0.0.1:12082`). Default: none, a standalone
    /// worker.
    pub orchestrator_url: Option<String>,
    /// A file with the key for registration with the orchestrator.
    pub registration_key_file: Option<PathBuf>,
    /// The node's name at the orchestrator. Default: the host name.
    pub name: Option<String>,
    /// The URL at which orchestrators reach the Worker API. Default: the listen address.
    pub api_url: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// A file with a token, besides the worker's own, that may read `/metrics` from other machines;
    /// created if missing.
    pub metrics_token_file: Option<PathBuf>,
    /// A terminal ends when its client has not answered pings for this long.
    pub pty_timeout_seconds: u64,
    /// Maximum number of concurrent connections to the Worker API.
    pub max_connections: usize,
    pub inference: InferenceConfig,
}

/// The container engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    #[default]
    Podman,
    Docker,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            state_dir: PathBuf::new(),
            listen: SocketAddr::from(([127, 0, 0, 1], 12_090)),
            tls: TlsFiles::default(),
            insecure_listen: false,
            default_image: DEFAULT_IMAGE.to_owned(),
            exec_via: ExecVia::Agent,
            max_sandboxes: 200,
            reserved_memory_bytes: None,
            memory_overcommit: None,
            max_pids: 4_096,
            cgroup_parent: "cynode".to_owned(),
            workspace_grace_seconds: 86_400,
            agent_binary: None,
            engine: Engine::Podman,
            docker_socket: PathBuf::from("/var/run/docker.sock"),
            podman: "podman".to_owned(),
            podman_socket: None,
            podman_root: None,
            podman_runroot: None,
            podman_image_store: None,
            runtime_timeout_seconds: 30,
            oci_runtime: None,
            allow_unenforced: BTreeSet::new(),
            pool_size: None,
            min_free_bytes: 1 << 30,
            orchestrator_url: None,
            registration_key_file: None,
            name: None,
            api_url: None,
            labels: BTreeMap::new(),
            metrics_token_file: None,
            pty_timeout_seconds: 120,
            max_connections: listen::CONNECTIONS,
            inference: InferenceConfig::default(),
        }
    }
}

impl Config {
    /// Reads the file, then `CYNODE_WORKER_*`, then the flags; later sources take precedence.
    pub fn load(
        path: Option<&Path>,
        state_dir: Option<PathBuf>,
        flags: &[(String, String)],
    ) -> Result<Self, ConfigError> {
        let mut read: Self = config::load(path, "worker", std::env::vars(), flags.iter().cloned())?;
        read.state_dir = state_dir.unwrap_or_else(|| {
            config::default_state_dir(rustix::process::geteuid().is_root(), |name| {
                std::env::var(name).ok()
            })
        });
        // Other processes that use these paths may have a different working directory.
        let absolute = |path: &Path| {
            std::path::absolute(path).map_err(|source| ConfigError::Read {
                path: path.to_owned(),
                source,
            })
        };
        let stores = [
            &mut read.podman_root,
            &mut read.podman_runroot,
            &mut read.podman_image_store,
        ];
        for path in stores.into_iter().flatten().chain([&mut read.state_dir]) {
            *path = absolute(path)?;
        }
        if read.podman.contains('/') {
            read.podman = absolute(Path::new(&read.podman))?.display().to_string();
        }
        if read.max_sandboxes == 0 || read.max_sandboxes > MAX_SANDBOXES {
            return Err(ConfigError::Value {
                key: "worker.max_sandboxes".to_owned(),
                message: format!("must be between 1 and {MAX_SANDBOXES}"),
            });
        }
        if read.runtime_timeout_seconds == 0 {
            return Err(ConfigError::Value {
                key: "worker.runtime_timeout_seconds".to_owned(),
                message: "must be at least 1".to_owned(),
            });
        }
        if read.pty_timeout_seconds == 0 {
            return Err(ConfigError::Value {
                key: "worker.pty_timeout_seconds".to_owned(),
                message: "must be at least 1".to_owned(),
            });
        }
        let range = listen::CONNECTIONS_RANGE;
        if !range.contains(&(read.max_connections as u64)) {
            let message = format!("must be between {} and {}", range.start(), range.end());
            return Err(ConfigError::Value {
                key: "worker.max_connections".to_owned(),
                message,
            });
        }
        capacity::check_config(&read)?;
        read.check_orchestrator()?;
        read.inference.check()?;
        Ok(read)
    }

    /// Keys and tokens travel to and from the orchestrator, so that connection must be as secure as
    /// the listener.
    fn check_orchestrator(&self) -> Result<(), ConfigError> {
        let Some(url) = &self.orchestrator_url else {
            return Ok(());
        };
        let bad = |key: &str, message: &str| {
            Err(ConfigError::Value {
                key: format!("worker.{key}"),
                message: message.to_owned(),
            })
        };
        if !url.starts_with("https://")
            && !control::is_on_this_machine(url)
            && !self.insecure_listen
        {
            return bad(
                "orchestrator_url",
                "is not on this machine and not https: use an https URL, or --insecure-listen to \
                 allow plain http",
            );
        }
        if self.listen.ip().is_unspecified() && self.api_url.is_none() {
            return bad(
                "api_url",
                "is required when listen is an unspecified address: orchestrators need a URL for \
                 this worker",
            );
        }
        Ok(())
    }

    /// The number of warm sandboxes, before the limit of the id blocks.
    pub(crate) fn wanted_pool_size(&self, ids: IdSpace) -> usize {
        self.pool_size.unwrap_or(match ids {
            IdSpace::Within(_) => 2,
            IdSpace::Own | IdSpace::Shared(_) | IdSpace::Host => 10,
        })
    }

    /// The worker's directory in the state directory.
    #[must_use]
    pub fn directory(&self) -> PathBuf {
        self.state_dir.join("worker")
    }

    /// The setting that also allows `more` to go unenforced.
    pub(crate) fn allowance(&self, more: &[Unenforced]) -> String {
        let names: BTreeSet<Unenforced> =
            self.allow_unenforced.iter().chain(more).copied().collect();
        format!(
            "worker.allow_unenforced = {}",
            serde_json::to_string(&names).unwrap_or_default()
        )
    }

    /// Podman's program and the arguments that select its store.
    #[must_use]
    pub fn podman_command(&self) -> Vec<String> {
        // Rootless Podman needs a runtime directory, which not every login session has.
        let mut command = Vec::new();
        if !rustix::process::geteuid().is_root()
            && let Ok(directory) = rootless::runtime_directory()
        {
            command.extend([
                "env".to_owned(),
                format!("XDG_RUNTIME_DIR={}", directory.display()),
            ]);
        }
        command.push(self.podman.clone());
        let mut option = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                command.extend([name.to_owned(), value]);
            }
        };
        let text = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        option("--root", text(&self.podman_root));
        option("--runroot", text(&self.podman_runroot));
        if let Some(store) = &self.podman_image_store {
            option("--storage-driver", Some("overlay".to_owned()));
            option(
                "--storage-opt",
                Some(format!("additionalimagestore={}", store.display())),
            );
        }
        command
    }
}

/// With more sandboxes, the id range of one worker would not suffice for retained workspaces.
const MAX_SANDBOXES: usize = 400;
