//! Checks of Podman and what it runs on.

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
pub(super) struct Engine {
    pub(super) check: Check,
    pub(super) version: Option<String>,
    info: Value,
}

pub(super) async fn engine(config: &Config) -> Engine {
    let version = match run(&config.podman, &["--version"]).await {
        Ok(text) => text.trim().trim_start_matches("podman version ").to_owned(),
        Err(error) => {
            return Engine {
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
                Some(socket) => format!("its service at {}", socket.display()),
                None => "a private service of ours".to_owned(),
            };
            let check = if major(&version) >= 4 {
                Check::ok("container engine", format!("Podman {version}, by {socket}"))
            } else {
                Check::problem(
                    "container engine",
                    format!("Podman {version} is too old"),
                    "Install Podman 4 or newer.",
                )
            };
            Engine {
                check,
                version: Some(version),
                info: serde_json::from_str(&text).unwrap_or(Value::Null),
            }
        }
        Err(error) => Engine {
            check: Check::problem(
                "container engine",
                format!("Podman {version} can't use its store: {error}"),
                "Run 'podman info' and follow what it says.",
            ),
            version: Some(version),
            info: Value::Null,
        },
    }
}

impl Engine {
    pub(super) fn ids(&self) -> IdSpace {
        podman_ids(&self.info)
    }

    pub(super) fn is_rootless(&self) -> bool {
        self.info["host"]["security"]["rootless"]
            .as_bool()
            .unwrap_or(!rustix::process::geteuid().is_root())
    }
}

/// An ordinary user: how many ids there are for sandboxes.
pub(super) async fn privileges(config: &Config) -> Check {
    const NAME: &str = "privileges";
    match rootless::look(config).await {
        Err(error) => Check::problem(
            NAME,
            error,
            "Install uidmap (apt-get install uidmap), give the user ids (scripts/setup does both), or run it as root.",
        ),
        Ok(namespace) => match rootless::too_few(namespace.ids) {
            Some((problem, remedy)) => Check::problem(NAME, problem, remedy),
            None => Check::adapted(
                NAME,
                format!(
                    "an ordinary user with {} subordinate ids: each sandbox gets {} of its own, and a worker can have {} at once",
                    namespace.ids,
                    rootless::BLOCK,
                    idrange::sandboxes_within(namespace.ids)
                ),
            ),
        },
    }
}

/// Which limits Podman can set for an ordinary user: those of the controllers that were delegated, and none in version 1.
pub(super) fn cgroups(config: &Config, engine: &Engine) -> Check {
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
    let lacking: Vec<Unenforced> = [
        ("memory", Unenforced::Memory),
        ("cpu", Unenforced::Cpus),
        ("pids", Unenforced::Pids),
    ]
    .into_iter()
    .filter_map(|(controller, limit)| (!delegated.contains(&controller)).then_some(limit))
    .collect();
    if lacking.is_empty() {
        return Check::ok(
            NAME,
            format!("{version}, with memory, cpu and pids delegated to this user"),
        );
    }
    let names = serde_json::to_string(&lacking).unwrap_or_default();
    let detail =
        format!("{version}: for an ordinary user the limits {names} are not enforced here");
    if lacking
        .iter()
        .all(|name| config.allow_unenforced.contains(name))
    {
        Check::adapted(NAME, format!("{detail}, as allowed by name"))
    } else {
        Check::problem(
            NAME,
            detail,
            format!(
                "Run it as root, or boot with cgroup v2 and have systemd delegate cpu, memory and pids to users, or allow it: {}.",
                config.allowance(&lacking)
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

/// Finds an OCI runtime that runs a container here, by running one: the agent itself, in an otherwise empty root.
pub(super) async fn oci_runtime(config: &Config, agent: &Path) -> (Check, Option<String>) {
    const NAME: &str = "OCI runtime";
    let root = match prepare_root(agent) {
        Ok(root) => root,
        Err(error) => {
            return (
                Check::problem(
                    NAME,
                    format!("the trial could not be prepared: {error}"),
                    "Check free disk and permissions of the temporary directory.",
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
                "{name} did not: {}",
                error.chars().take(200).collect::<String>()
            )),
        }
    }
    (
        Check::problem(
            NAME,
            failures.join("; "),
            "Install runc (apt-get install runc), or name one that works in worker.oci_runtime.",
        ),
        None,
    )
}

struct Root(std::path::PathBuf);

impl Root {
    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        drop(fs_err::remove_dir_all(&self.0));
    }
}

fn prepare_root(agent: &Path) -> std::io::Result<Root> {
    let root = std::env::temp_dir().join(format!("cynode-trial-{}", uuid::Uuid::new_v4().simple()));
    // New, and for nobody else to write to, whatever the umask is: what is put here is run.
    std::fs::DirBuilder::new().mode(0o755).create(&root)?;
    let root = Root(root);
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

/// What Podman says of its store and of seccomp.
pub(super) fn store(engine: &Engine) -> Vec<Check> {
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

pub(super) async fn default_image(config: &Config, have_podman: bool) -> Check {
    const NAME: &str = "default image";
    const FIX: &str = "Run 'make images', or name an image on this node in worker.default_image.";
    if !have_podman {
        return Check::problem(NAME, "can't be looked for without Podman", INSTALL);
    }
    let command = config.podman_command();
    let arguments: Vec<&str> = command[1..]
        .iter()
        .map(String::as_str)
        .chain(["image", "inspect", &config.default_image])
        .collect();
    let labels = run(&command[0], &arguments).await.map(|text| {
        let images: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        let labels = images[0]["Labels"].as_object().cloned().unwrap_or_default();
        labels
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_str()?.to_owned())))
            .collect()
    });
    super::default_image(config, labels, FIX)
}
