//! The `cynode` program as people and scripts use it.

mod cp;
mod exec;
mod shell;
mod up;

use std::{
    ffi::OsStr,
    io::Write as _,
    os::unix::process::ExitStatusExt as _,
    process::{Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{IMAGE, Options, RunningWorker, World};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The result of a `cynode` command.
#[derive(Debug)]
pub(crate) struct CommandResult {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl CommandResult {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The standard output of a successful command.
    pub(crate) fn success(self) -> Result<String> {
        ensure!(self.code == Some(0), "{self:?}");
        Ok(self.text())
    }

    pub(crate) fn json(self) -> Result<Value> {
        serde_json::from_str(&self.success()?).context("stdout is not one JSON document")
    }

    /// The exit code and the code in the only `cynode: error[…]` line.
    pub(crate) fn failure(&self) -> (i32, String) {
        let mut codes = self
            .stderr
            .lines()
            .filter_map(|line| line.strip_prefix("cynode: error[")?.split_once("]: "));
        let code = codes.next().map_or_else(String::new, |(code, message)| {
            if message.is_empty() {
                String::new()
            } else {
                code.to_owned()
            }
        });
        assert!(
            codes.next().is_none(),
            "more than one error: {}",
            self.stderr
        );
        (self.code.unwrap_or(-1), code)
    }
}

/// A `cynode` command in a clean environment.
pub(crate) fn cynode(world: &World) -> Result<Command> {
    let mut command = Command::new(World::cynode()?);
    for name in [
        "CYNODE_URL",
        "CYNODE_TOKEN",
        "CYNODE_CONFIG",
        "CYNODE_CA_FILE",
        "DATABASE_URL",
        "PG_BIN",
    ] {
        command.env_remove(name);
    }
    command
        .env("CYNODE_STATE_DIR", world.state_dir())
        .env("XDG_STATE_HOME", world.directory().join("home"))
        .current_dir(world.directory());
    Ok(command)
}

/// The timeout of a command.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Starts `session exec` of a script that first prints `begun`, and returns after that line.
fn begin_exec(
    mut command: Command,
    id: &str,
    script: &str,
) -> Result<(
    std::process::Child,
    std::io::BufReader<std::process::ChildStdout>,
)> {
    use std::io::BufRead as _;
    command
        .args(["session", "exec", id, "--", "sh", "-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut stdout = std::io::BufReader::new(child.stdout.take().context("stdout")?);
    let mut line = String::new();
    stdout.read_line(&mut line)?;
    ensure!(line == "begun\n", "{line:?}");
    Ok((child, stdout))
}

pub(crate) fn run(command: &mut Command, stdin: &[u8]) -> Result<CommandResult> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut input = child.stdin.take().context("stdin")?;
    let pid = Pid::from_raw(child.id().cast_signed()).context("a pid")?;
    let output = std::thread::scope(|scope| {
        // A program may close its input without reading it.
        scope.spawn(move || drop(input.write_all(stdin)));
        let (ended, waiting) = mpsc::channel::<()>();
        scope.spawn(move || {
            if waiting.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout) {
                // The program may have exited just now.
                kill_process(pid, Signal::KILL).ok();
            }
        });
        let output = child.wait_with_output();
        drop(ended);
        output
    })?;
    ensure!(
        output.status.signal() != Some(9),
        "{command:?} did not end within {TIMEOUT:?}: {output:?}"
    );
    Ok(CommandResult {
        code: output.status.code(),
        stdout: output.stdout,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// A worker and a command line configured for it.
struct Cli {
    worker: RunningWorker,
    world: World,
}

impl Cli {
    async fn new() -> Result<Self> {
        let world = World::new()?;
        let worker = world.worker(&Options::default()).await?;
        Ok(Self { worker, world })
    }

    fn command(&self) -> Result<Command> {
        let mut command = cynode(&self.world)?;
        command
            .env("CYNODE_URL", self.worker.url()?)
            .env("CYNODE_TOKEN", self.worker.token()?);
        Ok(command)
    }

    fn run(&self, arguments: &[impl AsRef<OsStr>]) -> Result<CommandResult> {
        self.run_with(arguments, b"")
    }

    fn run_with(&self, arguments: &[impl AsRef<OsStr>], stdin: &[u8]) -> Result<CommandResult> {
        run(self.command()?.args(arguments), stdin)
    }

    /// The exit code and problem code of a failure with `--output json`: a problem document on
    /// stderr, in one line.
    fn problem(&self, arguments: &[&str]) -> Result<(i32, String)> {
        let ran = self.run(&[&["--output", "json"], arguments].concat())?;
        ensure!(
            ran.stdout.is_empty() && ran.stderr.lines().count() == 1,
            "{ran:?}"
        );
        let problem: Value = serde_json::from_str(&ran.stderr)?;
        ensure!(
            problem["exit"] == ran.code.context("an exit code")?,
            "{ran:?}"
        );
        for member in ["type", "title", "detail", "remedy"] {
            ensure!(
                problem[member]
                    .as_str()
                    .is_some_and(|text| !text.is_empty()),
                "{member} is missing: {ran:?}"
            );
        }
        Ok((
            ran.code.unwrap_or(-1),
            problem["code"].as_str().unwrap_or_default().to_owned(),
        ))
    }

    /// Creates a session and returns its id.
    fn create(&self, arguments: &[&str]) -> Result<String> {
        let printed = self
            .run(&[&["session", "create", "--memory", "256m"], arguments].concat())?
            .success()?;
        Ok(printed.trim_end().to_owned())
    }

    /// Runs a script in the session, which must succeed, and returns its output.
    fn sh(&self, id: &str, script: &str) -> Result<String> {
        self.run(&["session", "exec", id, "--", "/bin/sh", "-c", script])?
            .success()
    }
}

#[tokio::test]
async fn sessions_are_made_listed_shown_ended_and_resumed() -> Result<()> {
    let cli = Cli::new().await?;
    let made = cli.run(&[
        "session",
        "create",
        "--memory",
        "256m",
        "--cpus",
        "0.5",
        "--pids",
        "64",
        "--label",
        "team=red",
        "--env",
        "COLOUR=blue",
        "--lifetime",
        "1h",
        "--idle",
        "10m",
    ])?;
    let id = made.text().trim_end().to_owned();
    assert_eq!(
        (made.code, made.text()),
        (Some(0), format!("{id}\n")),
        "stdout is not just the id: {made:?}"
    );
    assert!(
        id.parse::<cynode_api::SessionId>().is_ok() && made.stderr.contains("running"),
        "{made:?}"
    );
    let as_json = cli
        .run(&[
            "session", "create", "--output", "json", "--memory", "256m", "--image", IMAGE,
        ])?
        .json()?;
    let other = as_json["session_id"].as_str().context("an id")?.to_owned();
    assert_eq!(
        (&as_json["state"], &as_json["pty_allowed"]),
        (&"running".into(), &false.into())
    );

    let shown = cli
        .run(&["session", "show", &id, "--output", "json"])?
        .json()?;
    assert_eq!(
        (
            &shown["limits"]["cpus"],
            &shown["limits"]["pids"],
            &shown["labels"]["team"]
        ),
        (&0.5.into(), &64.into(), &"red".into())
    );
    assert_eq!(cli.sh(&id, "echo $COLOUR")?, "blue\n");
    let task = shown["task_id"].as_str().context("a task")?;
    let same = cli.run(&[
        "session", "create", "--memory", "256m", "--id", &other, "--task", task,
    ])?;
    assert_eq!(same.failure(), (64, "session_id_in_use".to_owned()));
    let table = cli.run(&["session", "show", &id])?.success()?;
    for part in [
        id.as_str(),
        "state       running",
        "memory 256 MiB, cpus 0.5, pids 64",
        "terminal    not allowed",
        "team=red",
    ] {
        assert!(table.contains(part), "{part} is missing in {table}");
    }

    let ids = |arguments: &[&str]| -> Result<Vec<String>> {
        let list = cli
            .run(&[&["session", "list", "--output", "json"], arguments].concat())?
            .json()?;
        Ok(list["items"]
            .as_array()
            .context("items")?
            .iter()
            .map(|item| item["session_id"].as_str().unwrap_or_default().to_owned())
            .collect())
    };
    assert_eq!(ids(&[])?, [other.clone(), id.clone()], "newest first");
    assert_eq!(
        (
            ids(&["--label", "team=red"])?,
            ids(&["--task", task])?,
            ids(&["--state", "lost"])?
        ),
        (vec![id.clone()], vec![id.clone()], vec![])
    );
    let table = cli.run(&["session", "list"])?.success()?;
    assert!(
        table.starts_with("SESSION") && table.lines().count() == 3 && table.contains("team=red"),
        "{table}"
    );

    let ended = cli.run(&[
        "session",
        "end",
        &id,
        "--keep-workspace",
        "--reason",
        "a break",
    ])?;
    assert_eq!((ended.code, ended.text().as_str()), (Some(0), ""));
    assert!(ended.stderr.contains("; kept workspace"), "{ended:?}");
    assert_eq!(
        cli.run(&["session", "exec", &id, "true"])?.failure(),
        (64, "session_ended".to_owned())
    );
    let all = cli
        .run(&["session", "end", "--all", "--output", "json"])?
        .json()?;
    assert_eq!(all["items"][0]["session_id"], other);
    assert_eq!(
        cli.run(&["session", "end", "--all", "--output", "json"])?
            .json()?["items"]
            .as_array()
            .map(Vec::len),
        Some(0)
    );
    assert!(cli.world.containers()?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_session_that_has_ended_can_be_resumed_with_its_files() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    cli.sh(&id, "echo kept > file")?;
    for _ in 0..2 {
        cli.run(&["session", "end", &id, "--keep-workspace"])?
            .success()?;
        let ended = cli.run(&["session", "exec", &id, "true"])?;
        assert!(
            ended.failure() == (64, "session_ended".to_owned())
                && ended
                    .stderr
                    .contains(&format!("cynode session resume {id}")),
            "{ended:?}"
        );
        assert_eq!(
            cli.run(&["session", "resume", &id])?.success()?,
            format!("{id}\n")
        );
        assert_eq!(cli.sh(&id, "cat file")?, "kept\n");
    }
    // Without its files the session can't be resumed.
    cli.run(&["session", "end", &id])?.success()?;
    let ended = cli.run(&["session", "exec", &id, "true"])?;
    assert!(
        ended.failure() == (64, "session_ended".to_owned())
            && ended.stderr.contains("It can't be resumed"),
        "{ended:?}"
    );
    assert_eq!(
        cli.run(&["session", "resume", &id])?.failure(),
        (64, "not_resumable".to_owned())
    );
    Ok(())
}

#[tokio::test]
async fn failures_print_one_line_and_exit_as_documented() -> Result<()> {
    const ID: &str = "01890000-0000-7000-8000-000000000001";
    let cli = Cli::new().await?;
    for arguments in [
        vec!["session", "show", ID],
        vec!["session", "exec", "not-an-id", "true"],
        vec!["session", "exec", "00000000", "true"],
        vec!["session", "exec", ID, "true"],
        vec!["session", "end", ID],
        vec!["session", "resume", ID],
        vec!["session", "shell", ID],
        vec!["session", "cp", "-", &format!("{ID}:x")],
    ] {
        let ran = cli.run(&arguments)?;
        assert_eq!(
            (ran.failure(), ran.text().as_str()),
            ((64, "session_not_found".to_owned()), ""),
            "{arguments:?}: {ran:?}"
        );
        assert!(ran.stderr.contains("\n  remedy: "), "{ran:?}");
        assert_eq!(
            cli.problem(&arguments)?,
            (64, "session_not_found".to_owned())
        );
    }
    for arguments in [
        vec![],
        vec!["nonsense"],
        vec!["session"],
        vec!["session", "create", "--colour"],
        vec!["session", "create", "--memory", "lots"],
        vec!["session", "create", "--env", "novalue"],
        vec!["session", "create", "--workspace", "/etc"],
        vec!["session", "exec", ID],
        vec!["session", "exec", ID, "--timeout", "4h", "true"],
        vec!["session", "list", "--state", "odd"],
        vec!["session", "end"],
        vec!["session", "cp", "a", "b"],
        vec!["session", "cp", &format!("{ID}:a"), &format!("{ID}:b")],
        vec!["--output", "xml", "status"],
        vec!["completions", "tcl"],
    ] {
        let ran = cli.run(&arguments)?;
        assert_eq!(
            (ran.failure(), ran.text().as_str()),
            ((64, "usage".to_owned()), ""),
            "{arguments:?}: {ran:?}"
        );
        if !arguments.contains(&"--output") {
            assert_eq!(cli.problem(&arguments)?, (64, "usage".to_owned()));
        }
    }
    let refused = cli.run(&[
        "session",
        "create",
        "--image",
        "localhost/cynode/none:latest",
    ])?;
    assert_eq!(refused.failure(), (64, "image_not_found".to_owned()));

    // A wrong token, no listener, no running worker.
    let wrong = run(
        cli.command()?
            .env("CYNODE_TOKEN", "wrong")
            .args(["session", "list"]),
        b"",
    )?;
    assert_eq!(wrong.failure(), (77, "unauthorized".to_owned()));
    assert!(
        wrong
            .stderr
            .contains("is a worker, and the token is not its token"),
        "{wrong:?}"
    );
    let elsewhere = cli.run(&["task", "list"])?;
    assert!(
        elsewhere.failure() == (64, "not_found".to_owned())
            && elsewhere
                .stderr
                .contains("is a worker, which only serves sessions"),
        "{elsewhere:?}"
    );
    let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let nobody = run(
        cli.command()?
            .env("CYNODE_URL", format!("http://{free}"))
            .args(["session", "list"]),
        b"",
    )?;
    assert_eq!(nobody.failure(), (69, "unreachable".to_owned()));
    let status = run(
        cli.command()?
            .env("CYNODE_URL", format!("http://{free}"))
            .arg("status"),
        b"",
    )?;
    assert!(
        status.code == Some(69) && status.text().contains("not ready"),
        "{status:?}"
    );
    let nothing = run(cynode(&cli.world)?.args(["session", "list"]), b"")?;
    assert_eq!(nothing.failure(), (69, "unreachable".to_owned()));
    assert!(nothing.stderr.contains("cynode up"), "{nothing:?}");
    let half = run(
        cynode(&cli.world)?
            .env("CYNODE_URL", cli.worker.url()?)
            .args(["session", "list"]),
        b"",
    )?;
    assert_eq!(half.failure(), (64, "usage".to_owned()));
    for url in [
        "nonsense",
        "ftp://127.0.0.1",
        "http://user:secret@127.0.0.1:1",
    ] {
        let ran = run(
            cli.command()?
                .env("CYNODE_URL", url)
                .args(["session", "list"]),
            b"",
        )?;
        assert_eq!(ran.failure(), (64, "usage".to_owned()), "{url}");
        assert!(!ran.stderr.contains("secret"), "{ran:?}");
    }

    for arguments in [["--help"], ["--version"]] {
        let ran = cli.run(&arguments)?;
        assert!(
            ran.code == Some(0) && ran.text().contains("cynode") && ran.stderr.is_empty(),
            "{ran:?}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn completions_are_a_valid_bash_script() -> Result<()> {
    let world = World::new()?;
    let script = run(cynode(&world)?.args(["completions", "bash"]), b"")?.success()?;
    let check = r#"source /dev/stdin && complete -p cynode && COMP_WORDS=(cynode session sh) COMP_CWORD=2 && _cynode cynode sh session && printf '%s\n' "${COMPREPLY[@]}""#;
    let ran = run(
        Command::new("bash").args(["--norc", "-c", check]),
        script.as_bytes(),
    )?
    .success()?;
    assert!(
        ran.contains("cynode") && ran.contains("\nshell\n") && ran.contains("show"),
        "{ran}"
    );
    Ok(())
}
