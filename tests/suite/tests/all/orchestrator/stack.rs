//! `up` with every role, and the supervision of the roles.

use std::{os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{ControlPlane, Options, World, eventually};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::cli::{CommandResult, cynode, run};

/// A machine on which `up` runs everything.
pub(crate) struct Stack {
    pub(crate) world: World,
}

pub(crate) fn kill(pid: u32, signal: Signal) -> Result<()> {
    Ok(kill_process(
        Pid::from_raw(pid.cast_signed()).context("a pid")?,
        signal,
    )?)
}

fn is_gone(pid: u32) -> bool {
    // A zombie has an empty command line.
    fs_err::read(format!("/proc/{pid}/cmdline")).map_or(true, |line| line.is_empty())
}

impl Stack {
    pub(crate) fn new() -> Result<Self> {
        let world = World::new()?;
        let config = world.config(&Options::default())?;
        let text = fs_err::read_to_string(&config)?;
        fs_err::write(
            config,
            format!(
                "{text}[orchestrator]\nlisten = \"127.0.0.1:0\"\ncontrol_listen = \"127.0.0.1:0\"\n\
                 [egress.git]\nlisten = \"127.0.0.1:0\"\n"
            ),
        )?;
        Ok(Self { world })
    }

    pub(crate) fn command(&self) -> Result<Command> {
        let mut command = cynode(&self.world)?;
        command.env("CYNODE_CONFIG", self.world.directory().join("cynode.toml"));
        Ok(command)
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Result<CommandResult> {
        run(self.command()?.args(arguments), b"")
    }

    /// Starts in the background; the processes are killed with the test in any case.
    pub(crate) fn up(&self) -> Result<String> {
        self.up_with(&[])
    }

    pub(crate) fn up_with(&self, arguments: &[&str]) -> Result<String> {
        let printed = self
            .run(&[&["up", "--detach"], arguments].concat())?
            .success()?;
        self.world.kill_on_cleanup(self.up_pid()?)?;
        Ok(printed.trim_end().to_owned())
    }

    pub(crate) fn endpoints(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&fs_err::read(
            self.world.state_dir().join("endpoints.json"),
        )?)?)
    }

    pub(crate) fn up_pid(&self) -> Result<u32> {
        Ok(u32::try_from(
            self.endpoints()?["pid"].as_u64().context("a pid")?,
        )?)
    }

    /// The supervisor's child with this text in its command line.
    pub(crate) fn child(&self, text: &str) -> Result<u32> {
        let up = self.up_pid()?;
        let children = fs_err::read_to_string(format!("/proc/{up}/task/{up}/children"))?;
        let found = children.split_whitespace().find(|pid| {
            let command = fs_err::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&command)
                .replace('\0', " ")
                .contains(text)
        });
        Ok(found
            .with_context(|| format!("{text} is not among {children:?}"))?
            .parse()?)
    }

    /// PostgreSQL's own process: once ready, it no longer runs our program.
    fn postgres(&self) -> Result<u32> {
        self.child("bin/postgres -D")
    }

    fn data(&self) -> PathBuf {
        self.world.state_dir().join("postgres/data")
    }

    /// Processes whose working directory is the data directory.
    pub(crate) fn postgres_processes(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for entry in fs_err::read_dir("/proc")?.flatten() {
            if fs_err::read_link(entry.path().join("cwd"))
                .is_ok_and(|directory| directory.starts_with(self.world.directory()))
            {
                found.push(entry.path().display().to_string());
            }
        }
        Ok(found)
    }

    pub(crate) fn down(&self) -> Result<()> {
        self.run(&["down"])?.success().map(drop)
    }

    pub(crate) async fn assert_clean(&self) -> Result<()> {
        self.world.assert_clean().await?;
        let left = self.postgres_processes()?;
        ensure!(left.is_empty(), "still there: {left:?}");
        Ok(())
    }

    /// Waits until the API works again.
    async fn answers(&self) -> Result<()> {
        eventually("the API responds", Duration::from_secs(60), async || {
            Ok(self.run(&["task", "list"])?.code == Some(0))
        })
        .await
    }
}

#[tokio::test]
// invariant: supervisor
async fn up_runs_every_role_and_down_leaves_nothing() -> Result<()> {
    let stack = Stack::new()?;
    let url = stack.up()?;
    let endpoints = stack.endpoints()?;
    assert_eq!(
        endpoints["api"].as_str(),
        Some(url.as_str()),
        "stdout is not just the API's address"
    );
    let tools = endpoints["mcp"].as_str().unwrap_or_default();
    assert_eq!(tools, format!("{url}/mcp"));
    let token = fs_err::read_to_string(stack.world.state_dir().join("admin.token"))?;
    let response = reqwest::Client::builder()
        .no_proxy()
        .build()?
        .post(tools)
        .bearer_auth(token.trim())
        .header("accept", "application/json, text/event-stream");
    let listed: serde_json::Value = response
        .json(&serde_json::json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}))
        .send()
        .await?
        .json()
        .await?;
    assert!(
        listed["result"]["tools"]
            .as_array()
            .is_some_and(|tools| tools.len() > 50),
        "{listed}"
    );
    for name in ["control", "worker", "git"] {
        assert!(
            endpoints[name]
                .as_str()
                .is_some_and(|url| url.starts_with("http://127.0.0.1:")),
            "{endpoints}"
        );
    }
    for name in [
        "endpoints.json",
        "admin.token",
        "worker.token",
        "registration.key",
        "orchestrator.key",
    ] {
        let path = stack.world.state_dir().join(name);
        assert_eq!(
            fs_err::metadata(&path)?.permissions().mode() & 0o777,
            0o600,
            "{name}"
        );
        assert_eq!(fs_err::read_to_string(&path)?.lines().count(), 1, "{name}");
    }
    for (role, message) in [
        ("postgres", "ready to accept connections"),
        ("orchestrator", "The orchestrator is listening"),
        ("worker", "The worker is ready to serve"),
        ("git", "The git role is ready to serve"),
    ] {
        let log = fs_err::read_to_string(stack.world.state_dir().join(format!("log/{role}.log")))?;
        assert!(log.contains(message), "{role}: {log}");
    }
    let status = stack.run(&["status", "--output", "json"])?.json()?;
    let roles: Vec<(&str, bool)> = status["roles"]
        .as_array()
        .context("roles")?
        .iter()
        .filter_map(|role| Some((role["role"].as_str()?, role["ready"].as_bool()?)))
        .collect();
    assert_eq!(
        roles,
        [
            ("orchestrator", true),
            ("worker", true),
            ("git", true),
            ("postgres", true)
        ]
    );

    let task = stack
        .run(&["task", "create", "first"])?
        .success()?
        .trim_end()
        .to_owned();
    stack.down()?;
    stack.assert_clean().await?;
    assert!(!stack.world.state_dir().join("endpoints.json").exists());
    assert_eq!(
        stack.run(&["task", "list"])?.failure(),
        (69, "unreachable".to_owned())
    );

    // All state is back, at another address.
    stack.up()?;
    assert_eq!(
        stack
            .run(&["task", "show", &task, "--output", "json"])?
            .json()?["name"],
        "first"
    );
    stack.down()?;
    stack.assert_clean().await
}

#[tokio::test]
// invariant: supervisor
async fn roles_that_are_killed_come_back_at_their_addresses() -> Result<()> {
    let stack = Stack::new()?;
    stack.up()?;
    let endpoints = stack.endpoints()?;
    stack.run(&["task", "create", "kept"])?.success()?;
    for round in 0..2 {
        let postgres = stack.postgres()?;
        kill(postgres, Signal::KILL)?;
        eventually(
            "another PostgreSQL runs",
            Duration::from_secs(60),
            async || Ok(stack.postgres().is_ok_and(|pid| pid != postgres)),
        )
        .await?;
        stack.answers().await?;
        let orchestrator = stack.child("orchestrator --parent")?;
        kill(orchestrator, Signal::KILL)?;
        eventually(
            "another orchestrator runs",
            Duration::from_secs(60),
            async || {
                Ok(stack
                    .child("orchestrator --parent")
                    .is_ok_and(|pid| pid != orchestrator))
            },
        )
        .await?;
        stack.answers().await?;
        assert_eq!(stack.endpoints()?, endpoints, "round {round}");
    }
    let tasks = stack.run(&["task", "list", "--output", "json"])?.json()?;
    assert_eq!(tasks["items"].as_array().map(Vec::len), Some(1));
    stack.down()?;
    stack.assert_clean().await
}

#[tokio::test]
// invariant: supervisor
async fn no_role_outlives_an_up_that_was_killed_and_the_next_takes_over_at_once() -> Result<()> {
    let stack = Stack::new()?;
    stack.up()?;
    stack.run(&["task", "create", "kept"])?.success()?;
    let (up, pids) = (
        stack.up_pid()?,
        [
            stack.postgres()?,
            stack.child("orchestrator --parent")?,
            stack.child("worker --parent")?,
            stack.child("egress --role git")?,
        ],
    );
    kill(up, Signal::KILL)?;
    // Without waiting for the processes that are still exiting.
    stack.up()?;
    assert!(pids.iter().all(|pid| is_gone(*pid)), "{pids:?}");
    assert_eq!(
        stack.run(&["task", "list", "--output", "json"])?.json()?["items"][0]["name"],
        "kept"
    );

    let up = stack.up_pid()?;
    kill(up, Signal::KILL)?;
    let down = stack.run(&["down"])?;
    assert_eq!(down.code, Some(0), "{down:?}");
    stack.assert_clean().await?;

    // A plain SIGTERM also ends all roles in order: PostgreSQL last, without breaking a connection
    // in use.
    stack.up()?;
    kill(stack.up_pid()?, Signal::TERM)?;
    eventually(
        "everything has stopped",
        Duration::from_secs(60),
        async || Ok(stack.run(&["status"])?.text().contains("not running")),
    )
    .await?;
    let log = stack.world.state_dir().join("log/postgres.log");
    let is_shut_down = async || {
        Ok(fs_err::read_to_string(&log)?
            .trim_end()
            .ends_with("database system is shut down"))
    };
    eventually(
        "PostgreSQL has shut down cleanly",
        Duration::from_secs(60),
        is_shut_down,
    )
    .await?;
    stack.run(&["down"])?.success()?;
    stack.assert_clean().await
}

#[tokio::test]
// invariant: supervisor
async fn a_role_does_not_start_by_hand_while_up_holds_the_state_directory() -> Result<()> {
    let stack = Stack::new()?;
    stack.up()?;
    let task = stack
        .run(&["task", "create", "kept"])?
        .success()?
        .trim_end()
        .to_owned();
    let (up, postgres) = (stack.up_pid()?.to_string(), stack.postgres()?);
    let files = [
        "postgres/data/postmaster.pid",
        "postgres/socket/.s.PGSQL.5432",
        "up.lock",
    ]
    .map(|name| stack.world.state_dir().join(name));
    let state = || {
        files
            .iter()
            .map(|path| {
                Ok((
                    std::os::unix::fs::MetadataExt::ino(&fs_err::metadata(path)?),
                    fs_err::metadata(path)?.modified()?,
                ))
            })
            .collect::<Result<Vec<_>>>()
    };
    let before = state()?;
    for role in ["postgres", "orchestrator", "worker", "egress --role git"] {
        let role: Vec<&str> = role.split(' ').collect();
        for parent in [&[][..], &["--parent", &up]] {
            let refused = stack.run(&[&role[..], parent].concat())?;
            assert_eq!(
                refused.failure(),
                (64, "already_running".to_owned()),
                "{role:?} {parent:?}: {refused:?}"
            );
            assert!(
                refused.stderr.contains(&format!("pid {up}"))
                    && refused.stderr.contains("'cynode down'"),
                "{refused:?}"
            );
        }
    }
    assert_eq!(
        (stack.postgres()?, state()?),
        (postgres, before),
        "the live database was changed"
    );
    assert_eq!(
        stack
            .run(&["task", "show", &task, "--output", "json"])?
            .json()?["name"],
        "kept"
    );
    let mistyped = stack.run(&["ps"])?;
    assert!(
        mistyped.code == Some(64) && !mistyped.stderr.contains("postgres"),
        "{mistyped:?}"
    );
    stack.down()?;
    stack.assert_clean().await
}

#[tokio::test]
async fn a_configured_server_replaces_the_private_one() -> Result<()> {
    let stack = Stack::new()?;
    // A server that stands for somebody else's.
    let control_plane = ControlPlane::new().await?;
    let ran = run(
        stack
            .command()?
            .args(["up", "--detach"])
            .env("DATABASE_URL", control_plane.postgres.url()),
        b"",
    )?;
    ran.success()?;
    stack.world.kill_on_cleanup(stack.up_pid()?)?;
    stack.run(&["task", "create", "elsewhere"])?.success()?;
    assert!(!stack.data().exists());
    let worker = fs_err::read(format!("/proc/{}/environ", stack.child("worker --parent")?))?;
    assert!(
        !String::from_utf8_lossy(&worker).contains("DATABASE_URL"),
        "the worker knows the database's address"
    );
    stack.down()?;
    stack.assert_clean().await
}

#[tokio::test]
async fn settings_reach_their_role_and_invalid_ones_start_nothing() -> Result<()> {
    let stack = Stack::new()?;
    for setting in [
        "orchestrator.colour=1",
        "orchestrator.heartbeat_seconds=0",
        "worker.colour=1",
        "colour=1",
    ] {
        let refused = stack.run(&["up", "--detach", "--set", setting])?;
        assert_eq!(
            refused.failure(),
            (64, "config".to_owned()),
            "{setting}: {refused:?}"
        );
    }
    let open = stack.run(&["up", "--detach", "--api-listen", "0.0.0.0:0"])?;
    assert!(
        open.code == Some(64) && open.stderr.contains("--insecure-listen"),
        "{open:?}"
    );
    stack.up_with(&["--set", "orchestrator.default_image=localhost/some:thing"])?;
    assert_eq!(
        stack
            .run(&["setting", "get", "sandbox.default_image"])?
            .success()?,
        "localhost/some:thing\n"
    );
    stack.down()?;
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let busy = stack.run(&[
        "up",
        "--detach",
        "--control-listen",
        &taken.local_addr()?.to_string(),
    ])?;
    assert!(
        busy.code == Some(70) && busy.stderr.contains("can't listen on"),
        "{busy:?}"
    );
    assert!(!stack.world.state_dir().join("endpoints.json").exists());
    stack.assert_clean().await
}
