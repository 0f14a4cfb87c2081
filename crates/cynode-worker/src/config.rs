//! The worker's configuration, section `[worker]`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use cynode_api::{ExecVia, Unenforced};
use cynode_service::{ConfigError, config, listen};
use serde::Deserialize;

use crate::{capacity, control, rootless};

/// What `make up` builds and loads.
pub const DEFAULT_IMAGE: &str = "localhost/cynode/sba-runner:latest";

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    #[serde(skip)]
    pub state_dir: PathBuf,
    pub listen: SocketAddr,
    pub tls: TlsFiles,
    pub insecure_listen: bool,
    /// What `image_ref: "default"` means.
    pub default_image: String,
    pub exec_via: ExecVia,
    pub max_sandboxes: usize,
    /// Memory of the machine that no sandbox gets, neither one nor all together; an eighth, at most 2 GiB, when absent.
    pub reserved_memory_bytes: Option<u64>,
    /// How many times the memory for sandboxes their limits may add up to. When absent, `max_sandboxes` default sandboxes fit.
    pub memory_overcommit: Option<f64>,
    /// Processes of one sandbox, at most.
    pub max_pids: u32,
    /// The cgroup that all sandboxes run below. Workers of one machine that have it in common share its memory.
    pub cgroup_parent: String,
    pub workspace_grace_seconds: u64,
    /// The agent's binary; looked for beside this program when absent.
    pub agent_binary: Option<PathBuf>,
    pub engine: Engine,
    pub docker_socket: PathBuf,
    pub podman: String,
    /// The socket of a Podman service that somebody else runs.
    pub podman_socket: Option<PathBuf>,
    pub podman_root: Option<PathBuf>,
    pub podman_runroot: Option<PathBuf>,
    /// A further, read-only image store.
    pub podman_image_store: Option<PathBuf>,
    /// How long the container runtime may take for a call before it counts as hung.
    pub runtime_timeout_seconds: u64,
    /// The OCI runtime by name (`runsc`, `kata`, …); found out when absent.
    pub oci_runtime: Option<String>,
    /// What may go unenforced on this host. Anything else that can't be enforced is refused.
    pub allow_unenforced: BTreeSet<Unenforced>,
    /// Sandboxes of the default image with default limits that are made ahead.
    pub pool_size: usize,
    /// New work is refused while less than this is free where the state directory lies.
    pub min_free_bytes: u64,
    /// The control plane that this node belongs to (`http://127.0.0.1:12082`); on its own when absent.
    pub orchestrator_url: Option<String>,
    /// A file with the key by which the node registers there.
    pub registration_key_file: Option<PathBuf>,
    /// What the node is called there; the host's name when absent.
    pub name: Option<String>,
    /// Where orchestrators reach the Worker API; the address that it listens on when absent.
    pub api_url: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// A file with a token that may read `/metrics` from beyond this machine, besides the worker's own; made when it is not there.
    pub metrics_token_file: Option<PathBuf>,
    /// A terminal whose client is not heard of for this long, though it is asked, is ended.
    pub pty_timeout_seconds: u64,
    /// Connections to the Worker API at the same time.
    pub max_connections: usize,
}

/// What runs the containers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    #[default]
    Podman,
    Docker,
}

/// Certificate chain, key and authority, as PEM files.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsFiles {
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    /// Who signed the certificates of the orchestrators; no other is trusted then. When absent, whom the system trusts and `CYNODE_CA_FILE`.
    pub ca: Option<PathBuf>,
    /// The name in the certificate, by which those on this machine call; the address when absent.
    pub name: Option<String>,
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
            pool_size: 10,
            min_free_bytes: 1 << 30,
            orchestrator_url: None,
            registration_key_file: None,
            name: None,
            api_url: None,
            labels: BTreeMap::new(),
            metrics_token_file: None,
            pty_timeout_seconds: 120,
            max_connections: listen::CONNECTIONS,
        }
    }
}

impl Config {
    /// Reads the file, then `CYNODE_WORKER_*`, then the flags.
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
        // Not everything that uses them runs where this process does.
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
                message: format!("must lie between 1 and {MAX_SANDBOXES}"),
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
            let message = format!("must lie between {} and {}", range.start(), range.end());
            return Err(ConfigError::Value {
                key: "worker.max_connections".to_owned(),
                message,
            });
        }
        capacity::check_config(&read)?;
        read.check_orchestrator()?;
        Ok(read)
    }

    /// Keys and tokens go to the orchestrator and back, so the way there has to be as safe as the listener.
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
                "leads beyond this machine without TLS: give an https address, or --insecure-listen to do without",
            );
        }
        if self.listen.ip().is_unspecified() && self.api_url.is_none() {
            return bad(
                "api_url",
                "must say where orchestrators reach this worker, which listens on every address",
            );
        }
        Ok(())
    }

    /// Where this worker keeps its own things.
    #[must_use]
    pub fn directory(&self) -> PathBuf {
        self.state_dir.join("worker")
    }

    /// The setting that allows all of these to go unenforced, besides those that are allowed already.
    pub(crate) fn allowance(&self, more: &[Unenforced]) -> String {
        let names: BTreeSet<Unenforced> =
            self.allow_unenforced.iter().chain(more).copied().collect();
        format!(
            "worker.allow_unenforced = {}",
            serde_json::to_string(&names).unwrap_or_default()
        )
    }

    /// Podman's program with the arguments that choose its store.
    #[must_use]
    pub fn podman_command(&self) -> Vec<String> {
        // An ordinary user's Podman needs a runtime directory, which not every session has.
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

/// Above this the range of ids that one worker claims would not suffice for kept workspaces too.
const MAX_SANDBOXES: usize = 400;
