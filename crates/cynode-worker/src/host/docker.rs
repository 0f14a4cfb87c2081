//! Checks of Docker, by the daemon's information and by a trial container.

use std::{collections::BTreeMap, path::Path, time::Duration};

use bollard::models::SystemInfo;
use bytes::Bytes;
use cynode_api::{LABEL_SANDBOX_ID, Limits, Unenforced};

use super::Check;
use crate::{
    config::Config,
    runtime::{Docker, IdMap, IdSpace, Runtime as _, RuntimeError, Spec, docker_ids},
};

pub(super) const INSTALL: &str =
    "Install and start it (apt-get install docker.io), or set worker.docker_socket to its socket.";

#[derive(Debug)]
pub(super) struct DockerEngine {
    pub(super) check: Check,
    /// `None` if the daemon does not answer.
    pub(super) info: Option<SystemInfo>,
}

pub(super) async fn engine(config: &Config, docker: &Docker) -> DockerEngine {
    const NAME: &str = "container engine";
    match docker.info().await {
        Err(error) => DockerEngine {
            check: Check::problem(NAME, error.to_string(), INSTALL),
            info: None,
        },
        Ok(info) => {
            let version = info
                .server_version
                .as_deref()
                .unwrap_or("of unknown version");
            let mut numbers = version
                .split(['.', '-', '+'])
                .map(|part| part.parse::<u32>().unwrap_or(0));
            let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
            let check = if number >= (20, 10) {
                Check::ok(
                    NAME,
                    format!("Docker {version} at {}", config.docker_socket.display()),
                )
            } else {
                Check::problem(
                    NAME,
                    format!("Docker {version} is too old"),
                    "Install Docker 20.10 or newer.",
                )
            };
            DockerEngine {
                check,
                info: Some(info),
            }
        }
    }
}

/// The properties of the daemon that invalidate a cached host profile when they change.
pub(super) fn fingerprint(info: &SystemInfo) -> String {
    let mut runtimes: Vec<&String> = info
        .runtimes
        .iter()
        .flat_map(BTreeMap::from_iter)
        .map(|(name, _)| name)
        .collect();
    runtimes.sort();
    format!(
        "Docker {:?} {:?} {:?} {:?} {runtimes:?}",
        info.server_version, info.docker_root_dir, info.security_options, info.default_runtime
    )
}

/// Checks how the daemon maps the ids of sandboxes.
pub(super) fn id_space(config: &Config, info: &SystemInfo) -> Check {
    const NAME: &str = "user namespace";
    let space = match docker_ids(info) {
        Ok(space) => space,
        Err(error) => {
            return Check::problem(
                NAME,
                error,
                "Change the daemon's configuration accordingly, or use Podman.",
            );
        }
    };
    let missing = missing(config, space);
    let (detail, remedy) = match space {
        IdSpace::Shared(map) => (
            format!(
                "userns-remap: all sandboxes share the ids from {}",
                map.first
            ),
            "use Podman, which gives each sandbox its own ids",
        ),
        _ => (
            "none: ids in a sandbox equal those of the host".to_owned(),
            "set \"userns-remap\": \"default\" in /etc/docker/daemon.json and restart the daemon, \
             or use Podman",
        ),
    };
    if missing.is_empty() {
        Check::adapted(
            NAME,
            format!("{detail}, as worker.allow_unenforced permits"),
        )
    } else {
        Check::problem(
            NAME,
            detail,
            format!("Allow it: {}. Or {remedy}.", config.allowance(&missing)),
        )
    }
}

/// The separations that the id space does not provide and the configuration does not waive.
pub(crate) fn missing(config: &Config, space: IdSpace) -> Vec<Unenforced> {
    space
        .unenforced()
        .iter()
        .filter(|name| !config.allow_unenforced.contains(name))
        .copied()
        .collect()
}

pub(super) fn cgroups(info: &SystemInfo) -> Check {
    const NAME: &str = "cgroups";
    let driver = info
        .cgroup_driver
        .map(|driver| driver.to_string())
        .unwrap_or_default();
    let version = info
        .cgroup_version
        .map(|version| version.to_string())
        .unwrap_or_default();
    let missing: Vec<&str> = [
        ("memory", info.memory_limit),
        ("swap", info.swap_limit),
        ("cpu quota", info.cpu_cfs_quota),
        ("pids", info.pids_limit),
    ]
    .into_iter()
    .filter_map(|(name, present)| (present != Some(true)).then_some(name))
    .collect();
    if missing.is_empty() {
        Check::ok(NAME, format!("version {version}, driver {driver}"))
    } else {
        Check::problem(
            NAME,
            format!(
                "version {version}, driver {driver}: no limits for {}",
                missing.join(", ")
            ),
            "Enable these controllers (kernel parameters cgroup_enable=memory swapaccount=1), or \
             boot with cgroup v2.",
        )
    }
}

pub(super) fn store(info: &SystemInfo) -> Vec<Check> {
    let driver = info.driver.as_deref().unwrap_or("unknown");
    let storage = match driver {
        "overlay2" | "overlayfs" | "btrfs" | "zfs" => Check::ok(
            "storage driver",
            format!(
                "{driver} at {}",
                info.docker_root_dir.as_deref().unwrap_or("unknown")
            ),
        ),
        "vfs" => Check::problem(
            "storage driver",
            "vfs copies the whole image for every sandbox",
            "Set \"storage-driver\": \"overlay2\" in /etc/docker/daemon.json and restart the \
             daemon.",
        ),
        other => Check::adapted("storage driver", other),
    };
    let seccomp = if info
        .security_options
        .iter()
        .flatten()
        .any(|option| option.split(',').any(|part| part == "name=seccomp"))
    {
        Check::ok("seccomp", "on")
    } else {
        Check::problem(
            "seccomp",
            "off",
            "Use a kernel with CONFIG_SECCOMP_FILTER and a Docker built with seccomp.",
        )
    };
    vec![storage, seccomp]
}

/// Checks that the OCI runtime is known and can run a sandbox: the agent, in an otherwise empty
/// image, with all options that the worker uses.
pub(super) async fn oci_runtime(
    config: &Config,
    docker: &Docker,
    info: &SystemInfo,
    agent: &Path,
) -> (Check, Option<String>) {
    const NAME: &str = "OCI runtime";
    let known = info.runtimes.clone().unwrap_or_default();
    let name = config
        .oci_runtime
        .clone()
        .or_else(|| info.default_runtime.clone())
        .unwrap_or_else(|| "runc".to_owned());
    if !known.contains_key(&name) {
        let mut names: Vec<String> = known.into_keys().collect();
        names.sort();
        let fix = format!(
            "Install it and add it to \"runtimes\" in /etc/docker/daemon.json, or set \
             worker.oci_runtime to one of: {}.",
            names.join(", ")
        );
        return (
            Check::problem(NAME, format!("the daemon does not know '{name}'"), fix),
            None,
        );
    }
    match trial(docker, agent).await {
        Ok(()) => (
            Check::ok(NAME, format!("{name} ran a container")),
            Some(name),
        ),
        Err(error) => (
            Check::problem(
                NAME,
                format!("{name} failed to run a container: {error}"),
                "See the daemon's log, or set worker.oci_runtime to another runtime.",
            ),
            None,
        ),
    }
}

/// How long the trial container may take to exit.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(20);

async fn trial(docker: &Docker, agent: &Path) -> Result<(), RuntimeError> {
    let name = format!("cynode-trial-{}", uuid::Uuid::new_v4().simple());
    let binary =
        fs_err::read(agent).map_err(|error| RuntimeError::Unavailable(error.to_string()))?;
    docker
        .import(
            &name,
            layer(&binary).map_err(|error| RuntimeError::Unavailable(error.to_string()))?,
        )
        .await?;
    let ran = run_trial(docker, &name).await;
    let removed = docker.remove(&name).await;
    let forgotten = docker.remove_image(&name).await;
    ran.and(removed).and(forgotten)
}

async fn run_trial(docker: &Docker, name: &str) -> Result<(), RuntimeError> {
    let ids = match docker.ids().await? {
        IdSpace::Shared(map) => map,
        _ => IdMap {
            first: 0,
            count: 65_536,
        },
    };
    let spec = Spec {
        name: name.to_owned(),
        labels: BTreeMap::from([(LABEL_SANDBOX_ID.to_owned(), "trial".to_owned())]),
        image_id: format!("{name}:latest"),
        argv: ["/cynode-sba", "--version"].map(str::to_owned).to_vec(),
        env: Vec::new(),
        ids,
        mounts: Vec::new(),
        limits: Limits {
            memory_bytes: 64 << 20,
            pids: 16,
            ..Limits::default()
        },
        cgroup_parent: None,
    };
    docker.create(&spec).await?;
    docker.start(name).await?;
    let deadline = tokio::time::Instant::now() + TRIAL_TIMEOUT;
    loop {
        let container = docker.inspect(name).await?;
        match container.exit_code {
            Some(0) => return Ok(()),
            Some(code) => {
                return Err(RuntimeError::Refused {
                    call: "trial",
                    message: format!("the container exited with code {code}"),
                });
            }
            None if tokio::time::Instant::now() >= deadline => {
                return Err(RuntimeError::Timeout {
                    call: "trial",
                    limit: TRIAL_TIMEOUT,
                });
            }
            None => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

fn layer(binary: &[u8]) -> std::io::Result<Bytes> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut entry = |path: &str, kind: tar::EntryType, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, path, bytes)
    };
    for directory in ["dev", "proc", "sys", "etc", "run", "tmp"] {
        entry(directory, tar::EntryType::Directory, &[])?;
    }
    entry("cynode-sba", tar::EntryType::Regular, binary)?;
    archive.into_inner().map(Bytes::from)
}

pub(super) async fn default_image(config: &Config, docker: &Docker) -> Check {
    const FIX: &str = "Build and load it ('make images', then 'podman save IMAGE | docker load'), \
                       or set worker.default_image to an image on this node.";
    let labels = docker
        .image(&config.default_image)
        .await
        .map(|image| image.labels);
    super::default_image(config, labels.map_err(|error| error.to_string()), FIX)
}
