//! Other ways into the same container, and a similar container made by Podman alone.

use std::{
    io::Read as _,
    path::PathBuf,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use cynode_tests::World;
use reqwest::Client;
use serde_json::{Value, json};

use crate::ours::{Ours, Sandbox};

/// Timeout of a call to Podman's service, so that a hung one does not block the run.
const CALL_TIMEOUT: Duration = Duration::from_mins(1);
/// Size of the id range of a sandbox.
const ID_RANGE: u64 = 65_536;

#[derive(Debug)]
pub struct Rivals {
    podman: Vec<String>,
    service: Client,
    sandbox: Sandbox,
    id: String,
    runc_root: Option<PathBuf>,
    /// The start of an id range that no session uses.
    pub id_block: u64,
}

impl Rivals {
    pub async fn of(world: &World, sandbox: &Sandbox) -> Result<Self> {
        let command = world.podman();
        let podman = std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|part| part.to_string_lossy().into_owned())
            .collect();
        let service = Client::builder()
            .unix_socket(Ours::podman_socket(world))
            .timeout(CALL_TIMEOUT)
            .build()?;
        let found: Value = service
            .get(format!(
                "http://podman/v1.41/containers/{}/json",
                sandbox.container
            ))
            .send()
            .await?
            .error_for_status()?
            .json()
            .await?;
        let id = found["Id"]
            .as_str()
            .context("Podman names no id")?
            .to_owned();
        let map = fs_err::read_to_string(format!("/proc/{}/uid_map", sandbox.pid))?;
        let first: u64 = map
            .split_ascii_whitespace()
            .nth(1)
            .context("an id map")?
            .parse()?;
        // Podman runs runc with its default root; an unprivileged user's is below the runtime
        // directory.
        let roots = [
            Some(PathBuf::from("/run/runc")),
            std::env::var_os("XDG_RUNTIME_DIR")
                .map(|directory| PathBuf::from(directory).join("runc")),
            Some(world.directory().join("run/runc")),
        ];
        let runc_root = roots
            .into_iter()
            .flatten()
            .find(|root| root.join(&id).join("state.json").is_file());
        Ok(Self {
            podman,
            service,
            sandbox: sandbox.clone(),
            id,
            runc_root,
            id_block: first + 256 * ID_RANGE,
        })
    }

    pub fn podman(&self) -> Command {
        let mut command = Command::new(&self.podman[0]);
        command.args(&self.podman[1..]).stdin(Stdio::null());
        command
    }

    pub fn container(&self) -> &str {
        &self.sandbox.container
    }

    /// `podman exec CONTAINER ARGV`.
    pub fn podman_exec(&self, argv: &[&str]) -> Command {
        let mut command = self.podman();
        command.args(["exec", self.container()]).args(argv);
        command
    }

    /// Create, start attached and inspect over the socket of a running service.
    pub async fn rest_exec(&self, argv: &[&str]) -> Result<()> {
        let base = "http://podman/v1.41";
        let body = json!({ "AttachStdout": true, "AttachStderr": true, "Cmd": argv });
        let created: Value = self
            .service
            .post(format!("{base}/containers/{}/exec", self.id))
            .json(&body)
            .send()
            .await?
            .error_for_status()?
            .json()
            .await?;
        let exec = created["Id"].as_str().context("no exec id")?;
        let started = self
            .service
            .post(format!("{base}/exec/{exec}/start"))
            .json(&json!({ "Detach": false, "Tty": false }))
            .send()
            .await?
            .error_for_status()?;
        started.bytes().await?;
        loop {
            let state: Value = self
                .service
                .get(format!("{base}/exec/{exec}/json"))
                .send()
                .await?
                .error_for_status()?
                .json()
                .await?;
            if state["Running"] == false {
                ensure!(
                    state["ExitCode"] == 0,
                    "the exec by REST ended with {}",
                    state["ExitCode"]
                );
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// `None` if Podman's runtime is not runc, or keeps its state elsewhere.
    pub fn runc_exec(&self, argv: &[&str]) -> Option<Command> {
        let mut command = Command::new("runc");
        command
            .arg("--root")
            .arg(self.runc_root.as_ref()?)
            .args(["exec", &self.id])
            .args(argv)
            .stdin(Stdio::null());
        Some(command)
    }

    /// Into every namespace of the container's process 1, as its user.
    pub fn nsenter(&self, argv: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args([
                "--all",
                "--setuid",
                "1000",
                "--setgid",
                "1000",
                "--target",
                &self.sandbox.pid.to_string(),
            ])
            .args(argv)
            .stdin(Stdio::null());
        command
    }

    /// `podman run -d` of a container with a sandbox's image, limits, mounts and an id map of the
    /// same size.
    pub fn podman_run(&self, name: &str, workspace: &str) -> Command {
        let map = format!("0:{}:{ID_RANGE}", self.id_block);
        let mut command = self.podman();
        command.args([
            "run",
            "--detach",
            "--name",
            name,
            "--uidmap",
            &map,
            "--gidmap",
            &map,
            "--network",
            "none",
            "--ipc",
            "none",
            "--cgroupns",
            "private",
        ]);
        command.args([
            "--user",
            "1000:1000",
            "--cap-drop",
            "all",
            "--security-opt",
            "no-new-privileges",
            "--read-only",
            "--read-only-tmpfs=false",
        ]);
        command.args([
            "--memory",
            "256m",
            "--memory-swap",
            "256m",
            "--cpus",
            "1",
            "--pids-limit",
            "512",
        ]);
        command.args([
            "--ulimit",
            "nofile=1024:1024",
            "--ulimit",
            "nproc=2048:2048",
            "--ulimit",
            "core=0:0",
        ]);
        command.args([
            "--log-driver",
            "none",
            "--no-hosts",
            "--hostname",
            "sandbox",
            "--stop-timeout",
            "0",
        ]);
        command.args([
            "--mount",
            "type=tmpfs,destination=/tmp,tmpfs-size=128m",
            "--mount",
            "type=tmpfs,destination=/run,tmpfs-size=16m",
        ]);
        command.args([
            "--mount",
            "type=tmpfs,destination=/dev/shm,tmpfs-size=64m",
            "--volume",
            &format!("{workspace}:/workspace:nosuid,nodev,private"),
        ]);
        command.args([cynode_tests::IMAGE, "sleep", "1000000"]);
        command
    }
}

/// Runs a command that must succeed.
pub fn run(command: &mut Command) -> Result<Output> {
    let output = command
        .output()
        .with_context(|| format!("starting {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!(
            "{:?} ended with {}: {}",
            command,
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(output)
}

/// Times a command that must succeed.
pub fn time_of(command: &mut Command) -> Result<Duration> {
    let started = Instant::now();
    run(command)?;
    Ok(started.elapsed())
}

/// Runs a command, discards its output, and returns its length.
pub fn drain(command: &mut Command) -> Result<u64> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut output = child.stdout.take().context("a pipe")?;
    let mut buffer = vec![0; 128 * 1024];
    let mut total = 0;
    loop {
        match output.read(&mut buffer)? {
            0 => break,
            count => total += count as u64,
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(total)
}
