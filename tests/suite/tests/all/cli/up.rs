//! `up --worker-only`, `status`, `down` and `doctor`: a worker on this machine.

use std::{
    io::BufRead as _, os::unix::fs::PermissionsExt as _, path::Path, process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result};
use cynode_tests::{Options, World, eventually};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{CommandResult, begin_exec, cynode, run};

/// A machine without a running worker.
struct Machine {
    world: World,
}

impl Machine {
    fn new() -> Result<Self> {
        let world = World::new()?;
        world.config(&Options::default())?;
        Ok(Self { world })
    }

    fn command(&self) -> Result<Command> {
        let mut command = cynode(&self.world)?;
        command.env("CYNODE_CONFIG", self.world.directory().join("cynode.toml"));
        Ok(command)
    }

    fn run(&self, arguments: &[&str]) -> Result<CommandResult> {
        run(self.command()?.args(arguments), b"")
    }

    /// Starts in the background; the processes are killed with the test in any case.
    fn up(&self) -> Result<String> {
        let printed = self.run(&["up", "--worker-only", "--detach"])?.success()?;
        self.world.kill_on_cleanup(self.up_pid()?)?;
        self.world.kill_on_cleanup(self.worker_pid()?)?;
        Ok(printed.trim_end().to_owned())
    }

    fn endpoints(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&fs_err::read(
            self.world.state_dir().join("endpoints.json"),
        )?)?)
    }

    fn up_pid(&self) -> Result<u32> {
        Ok(u32::try_from(
            self.endpoints()?["pid"].as_u64().context("a pid")?,
        )?)
    }

    /// The supervisor's only child.
    fn worker_pid(&self) -> Result<u32> {
        let up = self.up_pid()?;
        let children = fs_err::read_to_string(format!("/proc/{up}/task/{up}/children"))?;
        children
            .trim()
            .parse()
            .with_context(|| format!("the children of {up}: {children:?}"))
    }

    fn create(&self) -> Result<String> {
        Ok(self
            .run(&["session", "create", "--memory", "256m"])?
            .success()?
            .trim_end()
            .to_owned())
    }

    fn sh(&self, id: &str, script: &str) -> Result<String> {
        self.run(&["session", "exec", id, "--", "sh", "-c", script])?
            .success()
    }
}

fn kill(pid: u32, signal: Signal) -> Result<()> {
    Ok(kill_process(
        Pid::from_raw(pid.cast_signed()).context("a pid")?,
        signal,
    )?)
}

fn is_gone(pid: u32) -> bool {
    // A zombie has an empty command line.
    fs_err::read(format!("/proc/{pid}/cmdline")).map_or(true, |line| line.is_empty())
}

#[tokio::test]
async fn up_runs_in_the_background_and_down_leaves_nothing() -> Result<()> {
    let machine = Machine::new()?;
    let before = machine.run(&["status"])?;
    assert!(
        before.code == Some(69) && before.text().contains("not running"),
        "{before:?}"
    );
    let url = machine.up()?;
    assert!(
        url.starts_with("http://127.0.0.1:"),
        "stdout is not just the address: {url:?}"
    );
    let endpoints = machine.endpoints()?;
    assert_eq!(
        (&endpoints["version"], endpoints["worker"].as_str()),
        (&1.into(), Some(url.as_str()))
    );
    for name in ["endpoints.json", "worker.token"] {
        let path = machine.world.state_dir().join(name);
        assert_eq!(
            fs_err::metadata(&path)?.permissions().mode() & 0o777,
            0o600,
            "{name}"
        );
        assert_eq!(fs_err::read_to_string(&path)?.lines().count(), 1, "{name}");
    }
    // Commands need nothing but the files of the state directory.
    let id = machine.create()?;
    assert_eq!(
        machine.sh(&id, "echo precious > file; echo works")?,
        "works\n"
    );
    let status = machine.run(&["status", "--output", "json"])?.json()?;
    assert_eq!(
        (
            &status["ready"],
            &status["pid"],
            &status["sessions"]["running"],
            &status["roles"][0]["url"]
        ),
        (
            &true.into(),
            &endpoints["pid"],
            &1.into(),
            &url.as_str().into()
        )
    );
    let status = machine.run(&["status"])?.success()?;
    assert!(
        status.contains(": ready\n") && status.contains(&url) && status.contains("1 running"),
        "{status}"
    );

    let again = machine.run(&["up", "--worker-only", "--detach"])?;
    assert_eq!((again.code, again.text()), (Some(0), format!("{url}\n")));
    assert!(
        again.stderr.contains("already running") && machine.endpoints()? == endpoints,
        "{again:?}"
    );
    assert_eq!(
        machine.run(&["up", "--worker-only"])?.failure(),
        (64, "already_running".to_owned())
    );

    let down = machine.run(&["down"])?;
    assert_eq!((down.code, down.text().as_str()), (Some(0), ""));
    assert!(
        down.stderr
            .contains("has stopped; its sandboxes have ended"),
        "{down:?}"
    );
    machine.world.assert_clean().await?;
    assert!(!machine.world.state_dir().join("endpoints.json").exists());
    assert_eq!(machine.run(&["status"])?.code, Some(69));
    assert_eq!(
        machine.run(&["session", "list"])?.failure(),
        (69, "unreachable".to_owned())
    );
    let twice = machine.run(&["down"])?;
    assert!(
        twice.code == Some(0) && twice.stderr.contains("nothing was running"),
        "{twice:?}"
    );
    assert_eq!(
        machine.run(&["down", "--output", "json"])?.json()?["was_running"],
        false
    );

    // The session's files were kept, and a new container finds them.
    machine.up()?;
    assert_eq!(
        machine.run(&["session", "resume", &id])?.success()?,
        format!("{id}\n")
    );
    assert_eq!(machine.sh(&id, "cat file")?, "precious\n");
    machine.run(&["down"])?.success()?;
    machine.world.assert_clean().await
}

#[tokio::test]
async fn sandboxes_outlive_an_up_that_was_killed() -> Result<()> {
    let machine = Machine::new()?;
    machine.up()?;
    let id = machine.create()?;
    machine
        .run(&[
            "session",
            "exec",
            &id,
            "--detach",
            "--",
            "sh",
            "-c",
            "echo $$ > pid; exec sleep 4646",
        ])?
        .success()?;
    eventually(
        "the background command has started",
        Duration::from_secs(10),
        async || Ok(machine.sh(&id, "cat pid").is_ok()),
    )
    .await?;
    let containers = machine.world.containers()?;
    let (up, worker) = (machine.up_pid()?, machine.worker_pid()?);

    kill(up, Signal::KILL)?;
    eventually(
        "the worker ends with its supervisor",
        Duration::from_secs(30),
        async || Ok(is_gone(worker)),
    )
    .await?;
    assert_eq!(
        machine.run(&["status"])?.code,
        Some(69),
        "stale files had an effect"
    );
    assert_eq!(
        machine.run(&["session", "list"])?.failure(),
        (69, "unreachable".to_owned())
    );
    assert_eq!(machine.world.containers()?, containers);

    machine.up()?;
    assert_ne!(machine.up_pid()?, up);
    assert_eq!(machine.world.containers()?, containers);
    assert_eq!(
        machine.sh(&id, "tr '\\0' ' ' < /proc/$(cat pid)/cmdline")?,
        "sleep 4646 "
    );
    // SIGTERM doesn't end sandboxes either: only `down` does.
    kill(machine.up_pid()?, Signal::TERM)?;
    eventually("up has stopped", Duration::from_secs(30), async || {
        Ok(!machine.world.state_dir().join("endpoints.json").exists())
    })
    .await?;
    assert_eq!(machine.world.containers()?, containers);
    let down = machine.run(&["down"])?;
    assert!(
        down.code == Some(0) && down.stderr.contains("removed 1 container"),
        "{down:?}"
    );
    machine.world.assert_clean().await
}

#[tokio::test]
async fn sandboxes_can_be_kept_over_a_down() -> Result<()> {
    let machine = Machine::new()?;
    machine.up()?;
    let id = machine.create()?;
    let containers = machine.world.containers()?;
    let down = machine.run(&["down", "--keep-sessions"])?;
    assert!(
        down.code == Some(0) && down.stderr.contains("keep running"),
        "{down:?}"
    );
    assert_eq!(
        (machine.world.containers()?, machine.run(&["status"])?.code),
        (containers.clone(), Some(69))
    );
    machine.up()?;
    assert_eq!(machine.sh(&id, "echo still here")?, "still here\n");
    assert_eq!(machine.world.containers()?, containers);
    machine.run(&["down"])?.success()?;
    machine.world.assert_clean().await
}

#[tokio::test]
async fn a_worker_that_dies_is_started_again_and_a_running_exec_goes_on() -> Result<()> {
    let machine = Machine::new()?;
    let url = machine.up()?;
    let id = machine.create()?;
    let script = "echo begun; while [ ! -e go ]; do sleep 0.05; done; echo done; exit 5";
    let (mut child, stdout) = begin_exec(machine.command()?, &id, script)?;

    let worker = machine.worker_pid()?;
    kill(worker, Signal::KILL)?;
    eventually("another worker runs", Duration::from_secs(30), async || {
        Ok(machine.worker_pid().is_ok_and(|pid| pid != worker))
    })
    .await?;
    machine.world.kill_on_cleanup(machine.worker_pid()?)?;
    eventually("the worker is ready", Duration::from_secs(30), async || {
        Ok(machine.run(&["status"])?.code == Some(0))
    })
    .await?;
    assert_eq!(machine.endpoints()?["worker"], url, "the address changed");
    machine.sh(&id, "touch go")?;
    let rest: Vec<String> = stdout.lines().collect::<std::io::Result<_>>()?;
    assert_eq!(
        (child.wait()?.code(), rest),
        (Some(5), vec!["done".to_owned()])
    );
    machine.run(&["down"])?.success()?;
    machine.world.assert_clean().await
}

#[tokio::test]
async fn an_up_that_cannot_start_gives_the_reason() -> Result<()> {
    let machine = Machine::new()?;
    let unknown = machine.run(&["up", "--worker-only", "--detach", "--set", "colour=1"])?;
    assert_eq!(
        (unknown.failure(), unknown.stderr.contains("colour")),
        ((64, "config".to_owned()), true),
        "{unknown:?}"
    );
    let open = machine.run(&[
        "up",
        "--worker-only",
        "--detach",
        "--worker-listen",
        "0.0.0.0:0",
    ])?;
    assert!(
        open.code == Some(64) && open.stderr.contains("--insecure-listen"),
        "{open:?}"
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let busy = machine.run(&[
        "up",
        "--worker-only",
        "--detach",
        "--worker-listen",
        &taken.local_addr()?.to_string(),
    ])?;
    assert!(
        busy.code == Some(70) && busy.stderr.contains("can't listen on"),
        "{busy:?}"
    );
    assert!(!machine.world.state_dir().join("endpoints.json").exists());
    machine.world.assert_clean().await
}

#[tokio::test]
async fn doctor_reports_passed_adapted_and_failed_checks() -> Result<()> {
    let machine = Machine::new()?;
    let report = machine.run(&["doctor"])?;
    assert!(
        report.code == Some(0) && report.stderr.contains("this machine can run CyNode"),
        "{report:?}"
    );
    for line in report.text().lines() {
        assert!(
            ["ok ", "adapted ", "   "]
                .iter()
                .any(|word| line.starts_with(word)),
            "{line:?}"
        );
    }
    let json = machine.run(&["doctor", "--output", "json"])?.json()?;
    let checks = json["checks"].as_array().context("checks")?;
    let names: Vec<&str> = checks
        .iter()
        .filter_map(|check| check["name"].as_str())
        .collect();
    for name in [
        "container engine",
        "OCI runtime",
        "cgroups",
        "agent",
        "default image",
        "free disk",
        "PostgreSQL",
    ] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    assert!(
        checks.iter().all(|check| ["ok", "adapted"]
            .contains(&check["status"].as_str().unwrap_or_default())
            && check["detail"].is_string()),
        "{json}"
    );

    for (setting, name) in [
        ("podman=/nowhere/podman", "container engine"),
        (
            "default_image=localhost/cynode/none:latest",
            "default image",
        ),
        ("agent_binary=/nowhere/cynode-sba", "agent"),
    ] {
        let broken = machine.run(&["doctor", "--set", setting])?;
        let text = broken.text();
        assert!(
            broken.code == Some(1)
                && text
                    .lines()
                    .any(|line| line.starts_with(&format!("problem   {name}")))
                && text.contains("fix: "),
            "{setting}: {broken:?}"
        );
        let json: Value = serde_json::from_slice(
            &machine
                .run(&["doctor", "--output", "json", "--set", setting])?
                .stdout,
        )?;
        let check = json["checks"]
            .as_array()
            .context("checks")?
            .iter()
            .find(|check| check["name"] == name)
            .context("the check")?;
        assert!(
            check["status"] == "problem" && check["fix"].is_string(),
            "{check}"
        );
    }
    assert!(
        !Path::new(&machine.world.state_dir())
            .join("endpoints.json")
            .exists()
    );
    machine.world.assert_clean().await
}
