//! The capabilities of this host, determined by trial.
//!
//! `cynode doctor` prints them, and the worker adapts to them at startup. Each check reports that
//! all is well, what was chosen instead and why, or what is wrong and how to fix it.

mod checks;
mod docker;
mod models;
mod podman;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    config::{Config, Engine},
    process,
    runtime::{IdSpace, docker_ids},
};

pub(crate) use docker::missing as missing_allowances;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Ok,
    /// Not the usual setup; the worker adapted to it.
    Adapted,
    Problem,
}

#[derive(Clone, Debug, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub status: Status,
    pub detail: String,
    /// The remedy, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            detail: detail.into(),
            fix: None,
        }
    }

    fn adapted(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Adapted,
            detail: detail.into(),
            fix: None,
        }
    }

    fn problem(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Problem,
            detail: detail.into(),
            fix: Some(fix.into()),
        }
    }
}

/// How the worker runs sandboxes on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// The OCI runtime that ran the trial container.
    pub oci_runtime: String,
    pub cgroup_manager: String,
    pub max_nofile: u64,
    /// How the runtime separates the ids of sandboxes.
    pub ids: IdSpace,
}

#[derive(Clone, Debug, Serialize)]
pub struct HostReport {
    pub checks: Vec<Check>,
    /// `None` if no container could be run.
    pub choice: Option<Choice>,
}

impl HostReport {
    #[must_use]
    pub fn problems(&self) -> Vec<&Check> {
        self.checks
            .iter()
            .filter(|check| check.status == Status::Problem)
            .collect()
    }
}

/// Runs all checks.
pub async fn examine(config: &Config) -> HostReport {
    let agent = agent_binary(config);
    let (mut checks, runtime) = match config.engine {
        Engine::Podman => with_podman(config, &agent).await,
        Engine::Docker => with_docker(config, &agent).await,
    };
    checks.push(match &agent {
        Ok(path) => Check::ok("agent", path.display().to_string()),
        Err(error) => Check::problem("agent", error.clone(), AGENT_FIX),
    });
    let (rlimits, max_nofile) = checks::rlimits();
    checks.push(rlimits);
    checks.push(checks::memory(config, runtime.as_ref(), max_nofile));
    checks.push(checks::inotify(config.max_sandboxes));
    checks.push(checks::loop_devices(config).await);
    checks.push(checks::disk(&config.state_dir));
    checks.push(checks::git().await);
    checks.push(models::check(&config.inference).await);
    let choice = runtime.map(
        |TrialSetup {
             oci_runtime,
             cgroup_manager,
             ids,
         }| Choice {
            oci_runtime,
            cgroup_manager,
            max_nofile,
            ids,
        },
    );
    HostReport { checks, choice }
}

/// The setup in which the trial container ran.
struct TrialSetup {
    oci_runtime: String,
    cgroup_manager: String,
    ids: IdSpace,
}

async fn with_podman(
    config: &Config,
    agent: &Result<PathBuf, String>,
) -> (Vec<Check>, Option<TrialSetup>) {
    let engine = podman::engine(config).await;
    let (runtime, name) = match (&engine.version, agent) {
        (Some(_), Ok(agent)) => podman::oci_runtime(config, agent).await,
        (None, _) => (
            Check::problem(
                "OCI runtime",
                "can't be tested without Podman",
                podman::INSTALL,
            ),
            None,
        ),
        (_, Err(error)) => (untested(error), None),
    };
    let rootless = engine.is_rootless();
    let mut checks = vec![engine.check.clone()];
    checks.push(if rootless {
        podman::privileges(config).await
    } else {
        checks::root()
    });
    checks.push(if rootless {
        podman::cgroups(config, &engine)
    } else {
        checks::cgroups()
    });
    checks.extend([runtime, checks::cgroup_manager()]);
    checks.extend((!rootless).then(checks::id_ranges));
    checks.extend(podman::store(&engine));
    let image = podman::inspect_default_image(config).await;
    checks.push(podman::default_image(
        config,
        engine.version.is_some(),
        &image,
    ));
    let ids = engine.ids();
    checks.extend(podman::image_copies(
        config,
        ids,
        &image.unwrap_or_default(),
    ));
    (
        checks,
        name.map(|oci_runtime| TrialSetup {
            oci_runtime,
            cgroup_manager: checks::choose_cgroup_manager().to_owned(),
            ids,
        }),
    )
}

async fn with_docker(
    config: &Config,
    agent: &Result<PathBuf, String>,
) -> (Vec<Check>, Option<TrialSetup>) {
    let docker = crate::docker(config);
    let engine = docker::engine(config, &docker).await;
    let mut checks = vec![engine.check, checks::root_for_docker()];
    let Some(info) = engine.info else {
        return (checks, None);
    };
    checks.push(docker::id_space(config, &info));
    checks.push(docker::cgroups(&info));
    let (runtime, name) = match agent {
        Ok(agent) => docker::oci_runtime(config, &docker, &info, agent).await,
        Err(error) => (untested(error), None),
    };
    checks.push(runtime);
    checks.extend(docker::store(&info));
    checks.push(docker::default_image(config, &docker).await);
    let cgroup_manager = info
        .cgroup_driver
        .map(|driver| driver.to_string())
        .unwrap_or_default();
    let setup = name
        .zip(docker_ids(&info).ok())
        .map(|(oci_runtime, ids)| TrialSetup {
            oci_runtime,
            cgroup_manager,
            ids,
        });
    (checks, setup)
}

fn untested(error: &str) -> Check {
    Check::problem(
        "OCI runtime",
        format!("can't be tested without the agent: {error}"),
        AGENT_FIX,
    )
}

/// Checks that the default image is loaded and labeled as compatible.
fn default_image(
    config: &Config,
    labels: Result<std::collections::BTreeMap<String, String>, String>,
    fix: &str,
) -> Check {
    const NAME: &str = "default image";
    match labels {
        Ok(labels)
            if labels
                .get(cynode_api::LABEL_AGENT_COMPATIBLE)
                .is_some_and(|value| value == "true") =>
        {
            Check::ok(NAME, config.default_image.clone())
        }
        Ok(_) => Check::problem(
            NAME,
            format!(
                "{} does not carry the label {}",
                config.default_image,
                cynode_api::LABEL_AGENT_COMPATIBLE
            ),
            fix,
        ),
        Err(_) => Check::problem(NAME, format!("{} is not loaded", config.default_image), fix),
    }
}

const AGENT_FIX: &str = "Build it with 'cargo xtask sba', or set worker.agent_binary.";

/// The agent's binary: from the configuration, or next to this program.
pub(crate) fn agent_binary(config: &Config) -> Result<PathBuf, String> {
    if let Some(path) = &config.agent_binary {
        return if path.is_file() {
            Ok(path.clone())
        } else {
            Err(format!(
                "worker.agent_binary: {} is not a file",
                path.display()
            ))
        };
    }
    let program = std::env::current_exe()
        .map_err(|error| format!("failed to locate this program: {error}"))?;
    let directory = program.parent().unwrap_or(Path::new("/"));
    // A build tree has the static binary apart from the one that tests link with.
    let candidates = [
        directory.join("../sba/cynode-sba"),
        directory.join("cynode-sba"),
        directory.join("../lib/cynode/cynode-sba"),
        PathBuf::from("/usr/lib/cynode/cynode-sba"),
    ];
    candidates
        .iter()
        .find(|path| path.is_file())
        .cloned()
        .ok_or_else(|| {
            format!(
                "cynode-sba is neither next to {} nor in a standard location",
                program.display()
            )
        })
}

#[derive(Serialize, Deserialize)]
struct CachedSetup {
    key: String,
    choice: Choice,
}

/// The setup for this host. A cached one is valid until the next boot with the same engine, so that
/// a restarted worker skips the trial.
pub(crate) async fn choose(config: &Config) -> Result<Choice, HostReport> {
    let cache = config.directory().join("host.json");
    let key = key(config).await;
    let cached = fs_err::read(&cache)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<CachedSetup>(&bytes).ok());
    if let Some(CachedSetup { choice, .. }) =
        cached.filter(|cached| cached.key == key && !key.is_empty())
    {
        return Ok(choice);
    }
    let report = examine(config).await;
    for check in &report.checks {
        match check.status {
            Status::Ok => tracing::debug!(
                check = check.name,
                detail = check.detail,
                "Checked the host."
            ),
            Status::Adapted => tracing::info!(
                check = check.name,
                detail = check.detail,
                "Adapted to the host."
            ),
            Status::Problem => tracing::warn!(
                check = check.name,
                detail = check.detail,
                fix = check.fix,
                "The host has a problem."
            ),
        }
    }
    match &report.choice {
        Some(choice) => {
            if let Ok(bytes) = serde_json::to_vec(&CachedSetup {
                key,
                choice: choice.clone(),
            }) {
                drop(cynode_service::files::replace(&cache, &bytes));
            }
            Ok(choice.clone())
        }
        None => Err(report),
    }
}

/// The inputs that determine the choice: the boot, the engine, and the configuration.
async fn key(config: &Config) -> String {
    let boot = fs_err::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let engine = match config.engine {
        Engine::Podman => run(&config.podman, &["--version"]).await.ok(),
        Engine::Docker => crate::docker(config)
            .info()
            .await
            .ok()
            .map(|info| docker::fingerprint(&info)),
    };
    // An ordinary user's subordinate ids may have changed.
    let ids = fs_err::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let ids: Vec<&str> = ids.split_ascii_whitespace().collect();
    engine
        .map(|engine| {
            format!(
                "{} {} {:?} {}",
                boot.trim(),
                engine.trim(),
                config.oci_runtime,
                ids.join(" ")
            )
        })
        .unwrap_or_default()
}

/// Runs a program for at most 30 s; returns its output, or the last line of its errors.
pub(crate) async fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let mut command = process::command(program);
    command
        .args(arguments)
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    match tokio::time::timeout(std::time::Duration::from_secs(30), command.output()).await {
        Err(_) => Err("timed out after 30 s".to_owned()),
        Ok(Err(error)) => Err(error.to_string()),
        Ok(Ok(output)) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(Ok(output)) => {
            let text = String::from_utf8_lossy(&output.stderr);
            Err(text
                .trim()
                .lines()
                .last()
                .unwrap_or("failed without a message")
                .to_owned())
        }
    }
}
