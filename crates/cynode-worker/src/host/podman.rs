//! Checks of Podman and its host.

use std::{os::unix::fs::DirBuilderExt as _, path::Path};

use cynode_api::Unenforced;
use serde_json::Value;

use super::{Check, run};
use crate::{
    config::Config,
    idrange, rootless,
    runtime::{IdSpace, podman_ids, seccomp},
};

pub(super) const INSTALL: &str =
    "Install it: apt-get install podman runc uidmap (or run scripts/setup).";

#[derive(Debug)]
pub(super) struct PodmanEngine {
    pub(super) check: Check,
    pub(super) version: Option<String>,
    info: Value,
}

pub(super) async fn engine(config: &Config) -> PodmanEngine {
    let version = match run(&config.podman, &["--version"]).await {
        Ok(text) => text.trim().trim_start_matches("podman version ").to_owned(),
        Err(error) => {
            return PodmanEngine {
                check: Check::problem(
                    "container engine",
                    format!("'{}' does not run: {error}", config.podman),
                    INSTALL,
                ),
                version: None,
                info: Value::Null,
            };
        }
    };
    let command = config.podman_command();
    let arguments: Vec<&str> = command[1..]
        .iter()
        .map(String::as_str)
        .chain(["info", "--format", "json"])
        .collect();
    match run(&command[0], &arguments).await {
        Ok(text) => {
            let socket = match &config.podman_socket {
                Some(socket) => format!("the service at {}", socket.display()),
                None => "a private service".to_owned(),
            };
            let check = if major(&version) >= 4 {
                Check::ok("container engine", format!("Podman {version}, {socket}"))
            } else {
                Check::problem(
                    "container engine",
                    format!("Podman {version} is too old"),
                    "Install Podman 4 or newer.",
                )
            };
            PodmanEngine {
                check,
                version: Some(version),
                info: serde_json::from_str(&text).unwrap_or(Value::Null),
            }
        }
        Err(error) => PodmanEngine {
            check: Check::problem(
                "container engine",
                format!("Podman {version} can't use its store: {error}"),
                "Run 'podman info' and fix the error that it reports.",
            ),
            version: Some(version),
            info: Value::Null,
        },
    }
}

impl PodmanEngine {
    pub(super) fn ids(&self) -> IdSpace {
        podman_ids(&self.info)
    }

    pub(super) fn is_rootless(&self) -> bool {
        self.info["host"]["security"]["rootless"]
            .as_bool()
            .unwrap_or(!rustix::process::geteuid().is_root())
    }
}

/// Checks that an ordinary user has enough ids for sandboxes.
pub(super) async fn privileges(config: &Config) -> Check {
    const NAME: &str = "privileges";
    match rootless::inspect_namespace(config).await {
        Err(error) => Check::problem(
            NAME,
            error,
            "Install uidmap (apt-get install uidmap) and assign the user subordinate ids \
             (scripts/setup does both), or run the worker as root.",
        ),
        Ok(namespace) => match rootless::too_few(namespace.ids) {
            Some((problem, remedy)) => Check::problem(NAME, problem, remedy),
            None => Check::adapted(
                NAME,
                format!(
                    "an ordinary user with {} subordinate ids: each sandbox gets its own {}, and \
                     a worker can have {} sandboxes",
                    namespace.ids,
                    rootless::ROOTLESS_BLOCK_SIZE,
                    idrange::sandboxes_within(namespace.ids)
                ),
            ),
        },
    }
}

/// Checks which limits Podman can set for an ordinary user: those of delegated controllers, none in
/// cgroup version 1.
pub(super) fn cgroups(config: &Config, engine: &PodmanEngine) -> Check {
    const NAME: &str = "cgroups";
    let host = &engine.info["host"];
    let version = host["cgroupVersion"]
        .as_str()
        .unwrap_or("of unknown version");
    let delegated: Vec<&str> = host["cgroupControllers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let missing: Vec<Unenforced> = [
        ("memory", Unenforced::Memory),
        ("cpu", Unenforced::Cpus),
        ("pids", Unenforced::Pids),
    ]
    .into_iter()
    .filter_map(|(controller, limit)| (!delegated.contains(&controller)).then_some(limit))
    .collect();
    if missing.is_empty() {
        return Check::ok(
            NAME,
            format!("{version}, with memory, cpu and pids delegated to this user"),
        );
    }
    let names = serde_json::to_string(&missing).unwrap_or_default();
    let detail =
        format!("{version}: the limits {names} are not enforced for an ordinary user here");
    if missing
        .iter()
        .all(|name| config.allow_unenforced.contains(name))
    {
        Check::adapted(
            NAME,
            format!("{detail}, as worker.allow_unenforced permits"),
        )
    } else {
        Check::problem(
            NAME,
            detail,
            format!(
                "Run the worker as root, or boot with cgroup v2 and have systemd delegate cpu, \
                 memory and pids to users, or allow it: {}.",
                config.allowance(&missing)
            ),
        )
    }
}

fn major(version: &str) -> u32 {
    version
        .split('.')
        .next()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0)
}

/// Finds an OCI runtime that works here, by running a container: the agent in an otherwise empty
/// root file system.
pub(super) async fn oci_runtime(config: &Config, agent: &Path) -> (Check, Option<String>) {
    const NAME: &str = "OCI runtime";
    let root = match prepare_root(agent) {
        Ok(root) => root,
        Err(error) => {
            return (
                Check::problem(
                    NAME,
                    format!("failed to prepare the trial: {error}"),
                    "Check the free space and permissions of the temporary directory.",
                ),
                None,
            );
        }
    };
    let candidates: Vec<String> = match &config.oci_runtime {
        Some(name) => vec![name.clone()],
        None => vec!["crun".to_owned(), "runc".to_owned()],
    };
    let mut failures = Vec::new();
    for name in candidates {
        match trial(config, &name, root.path()).await {
            Ok(()) if failures.is_empty() => {
                return (
                    Check::ok(NAME, format!("{name} ran a container")),
                    Some(name),
                );
            }
            Ok(()) => {
                return (
                    Check::adapted(
                        NAME,
                        format!("{name} ran a container; {}", failures.join("; ")),
                    ),
                    Some(name),
                );
            }
            Err(error) => failures.push(format!(
                "{name} failed: {}",
                error.chars().take(200).collect::<String>()
            )),
        }
    }
    (
        Check::problem(
            NAME,
            failures.join("; "),
            "Install runc (apt-get install runc), or set worker.oci_runtime to one that works.",
        ),
        None,
    )
}

struct TrialRoot(std::path::PathBuf);

impl TrialRoot {
    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TrialRoot {
    fn drop(&mut self) {
        drop(fs_err::remove_dir_all(&self.0));
    }
}

fn prepare_root(agent: &Path) -> std::io::Result<TrialRoot> {
    let root = std::env::temp_dir().join(format!("cynode-trial-{}", uuid::Uuid::new_v4().simple()));
    // Created exclusively and not writable by others, whatever the umask: its contents are
    // executed.
    std::fs::DirBuilder::new().mode(0o755).create(&root)?;
    let root = TrialRoot(root);
    fs_err::set_permissions(
        root.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )?;
    for name in ["dev", "proc", "sys", "etc", "run", "tmp"] {
        fs_err::create_dir_all(root.path().join(name))?;
    }
    let binary = root.path().join("cynode-sba");
    fs_err::copy(agent, &binary)?;
    fs_err::set_permissions(&binary, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Ok(root)
}

async fn trial(config: &Config, runtime: &str, root: &Path) -> Result<(), String> {
    let command = config.podman_command();
    let profile = seccomp::write(root).map_err(|error| error.to_string())?;
    let profile = format!("seccomp={}", profile.display());
    let root = root.display().to_string();
    let mut arguments: Vec<&str> = command[1..].iter().map(String::as_str).collect();
    arguments.extend([
        "--runtime",
        runtime,
        "--cgroup-manager",
        super::checks::choose_cgroup_manager(),
        "--events-backend",
        "none",
        "run",
        "--rm",
        "--network",
        "none",
        "--ipc",
        "none",
        "--no-hosts",
    ]);
    arguments.extend([
        "--log-driver",
        "none",
        "--ulimit",
        "nofile=1024:1024",
        "--ulimit",
        "nproc=512:512",
        "--memory",
        "64m",
        "--pids-limit",
        "16",
        "--cpus",
        "1",
        "--user",
        "1000:1000",
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        "--security-opt",
        &profile,
    ]);
    arguments.extend([
        "--label",
        "io.cynodeai.sandbox.id=trial",
        "--rootfs",
        &root,
        "/cynode-sba",
        "--version",
    ]);
    run(&command[0], &arguments).await.map(drop)
}

/// Checks Podman's storage driver and seccomp.
pub(super) fn store(engine: &PodmanEngine) -> Vec<Check> {
    if engine.info.is_null() {
        return Vec::new();
    }
    let driver = engine.info["store"]["graphDriverName"]
        .as_str()
        .unwrap_or("unknown");
    let storage = match driver {
        "overlay" | "btrfs" | "zfs" => Check::ok(
            "storage driver",
            format!(
                "{driver} at {}",
                engine.info["store"]["graphRoot"]
                    .as_str()
                    .unwrap_or("unknown")
            ),
        ),
        "vfs" => Check::problem(
            "storage driver",
            "vfs copies the whole image for every sandbox",
            "Set driver = \"overlay\" in storage.conf and run 'podman system reset'.",
        ),
        other => Check::adapted("storage driver", other),
    };
    let seccomp = if engine.info["host"]["security"]["seccompEnabled"]
        .as_bool()
        .unwrap_or(false)
    {
        Check::ok("seccomp", "on")
    } else {
        Check::problem(
            "seccomp",
            "off",
            "Use a kernel with CONFIG_SECCOMP_FILTER and a Podman built with seccomp.",
        )
    };
    vec![storage, seccomp]
}

/// Inspects the default image in Podman's store.
pub(super) async fn inspect_default_image(config: &Config) -> Result<Value, String> {
    let command = config.podman_command();
    let arguments: Vec<&str> = command[1..]
        .iter()
        .map(String::as_str)
        .chain(["image", "inspect", &config.default_image])
        .collect();
    let text = run(&command[0], &arguments).await?;
    let mut images: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
    Ok(images[0].take())
}

pub(super) fn default_image(
    config: &Config,
    have_podman: bool,
    image: &Result<Value, String>,
) -> Check {
    const NAME: &str = "default image";
    const FIX: &str = "Run 'make images', or set worker.default_image to an image on this node.";
    if !have_podman {
        return Check::problem(NAME, "can't be checked without Podman", INSTALL);
    }
    let labels = image.clone().map(|image| {
        let labels = image["Labels"].as_object().cloned().unwrap_or_default();
        labels
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_str()?.to_owned())))
            .collect()
    });
    super::default_image(config, labels, FIX)
}

/// Reports what an image costs an ordinary user: native overlay can't shift ids without root, so
/// Podman copies an image for each id block that runs it.
pub(super) fn image_copies(config: &Config, ids: IdSpace, image: &Value) -> Option<Check> {
    let IdSpace::Within(map) = ids else {
        return None;
    };
    let bytes = image["Size"].as_u64()?;
    let blocks = u64::from(idrange::sandboxes_within(map.count)).min(config.max_sandboxes as u64);
    let text = |bytes: u64| match bytes / 1_000_000 {
        megabytes @ ..10_000 => format!("{megabytes} MB"),
        megabytes => format!("{} GB", megabytes / 1_000),
    };
    Some(Check::adapted(
        "image copies",
        format!(
            "each of the {blocks} id blocks keeps its own copy of an image that it has run: {} of \
             disk for the default image, {} for the {} warm sandboxes, at most {}",
            text(bytes),
            text(bytes * config.wanted_pool_size(ids) as u64),
            config.wanted_pool_size(ids),
            text(bytes * blocks)
        ),
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::runtime::IdMap;

    #[test]
    fn copies_of_images_are_reported_to_ordinary_users_only() {
        let config = Config::default();
        let image = json!({ "Size": 635_000_000 });
        let ordinary = IdSpace::Within(IdMap {
            first: 1,
            count: 65_536,
        });
        let check = image_copies(&config, ordinary, &image).expect("a check");
        assert_eq!(
            check.detail,
            "each of the 32 id blocks keeps its own copy of an image that it has run: 635 MB of \
             disk for the default image, 1270 MB for the 2 warm sandboxes, at most 20 GB"
        );
        assert!(image_copies(&config, IdSpace::Own, &image).is_none());
        assert!(image_copies(&config, ordinary, &Value::Null).is_none());
    }
}
