//! New programs under a running stack: sandboxes don't notice.

use std::{path::PathBuf, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{IMAGE, World, eventually};
use rustix::process::Signal;
use serde_json::Value;

use super::stack::{Stack, kill};
use crate::cli::{CommandResult, run};

const TIMEOUT: Duration = Duration::from_secs(90);

/// Copies of `cynode` and its agent: at another path, and with a different agent binary.
fn new_programs(stack: &Stack) -> Result<PathBuf> {
    let directory = stack.world.directory().join("new");
    fs_err::create_dir_all(&directory)?;
    let old = World::cynode()?;
    let agent = old
        .parent()
        .context("a directory")?
        .join("../sba/cynode-sba");
    let program = directory.join("cynode");
    fs_err::copy(&old, &program)?;
    fs_err::copy(agent, directory.join("cynode-sba"))?;
    // Appended after the loaded segments.
    let mut bytes = fs_err::read(directory.join("cynode-sba"))?;
    bytes.extend_from_slice(b"newer");
    fs_err::write(directory.join("cynode-sba"), bytes)?;
    Ok(program)
}

/// The stack's command line, run by another program.
fn run_with_program(program: &PathBuf, stack: &Stack, arguments: &[&str]) -> Result<CommandResult> {
    let model = stack.command()?;
    let mut command = Command::new(program);
    for (name, value) in model.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    run(
        command.current_dir(stack.world.directory()).args(arguments),
        b"",
    )
}

/// Settings with an image that the tests have.
fn settings() -> [String; 2] {
    [
        format!("orchestrator.default_image={IMAGE}"),
        format!("orchestrator.seed_images=[{IMAGE:?}]"),
    ]
}

/// The numbers that a counter has printed so far.
fn counter_output(stack: &Stack, session: &str) -> Result<Vec<u64>> {
    let text = stack
        .run(&["session", "exec", session, "--", "cat", "count"])?
        .success()?;
    text.lines().map(|line| Ok(line.parse()?)).collect()
}

/// Checks that the numbers are consecutive.
fn without_gap(numbers: &[u64]) -> bool {
    numbers
        .iter()
        .zip(1..)
        .all(|(number, expected)| *number == expected)
}

#[tokio::test]
// invariant: upgrade
async fn sessions_commands_and_jobs_go_on_while_every_program_is_replaced() -> Result<()> {
    let stack = Stack::new()?;
    let settings = settings();
    let up = ["--set", &settings[0], "--set", &settings[1]];
    stack.up_with(&up)?;
    let old = World::cynode()?;
    let new = new_programs(&stack)?;

    let session = stack
        .run(&["session", "create", "--memory", "64m"])?
        .success()?
        .trim_end()
        .to_owned();
    let counter = "i=0; while :; do i=$((i+1)); echo $i >> count; echo $i; sleep 0.1; done";
    stack
        .run(&[
            "session", "exec", "--detach", &session, "--", "sh", "-c", counter,
        ])?
        .success()?;
    let ticks = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo $i; sleep 0.1; done; exit 5";
    let job = stack
        .run(&[
            "run", "--detach", "--memory", "64m", "--", "sh", "-c", ticks,
        ])?
        .success()?
        .trim_end()
        .to_owned();
    let state = |stack: &Stack| -> Result<Value> {
        Ok(stack
            .run(&["job", "show", &job, "--output", "json"])?
            .json()?["state"]
            .clone())
    };
    eventually("the job runs", TIMEOUT, async || {
        Ok(state(&stack)? == "in_progress")
    })
    .await?;
    eventually("the command counts", TIMEOUT, async || {
        Ok(counter_output(&stack, &session)?.len() > 3)
    })
    .await?;

    // Like a service manager: a signal to the supervisor alone.
    let before = counter_output(&stack, &session)?;
    kill(stack.up_pid()?, Signal::TERM)?;
    eventually("everything has stopped", TIMEOUT, async || {
        Ok(stack.run(&["status"])?.text().contains("not running"))
    })
    .await?;
    assert_eq!(
        stack.world.containers()?.len(),
        2,
        "not both sandboxes exist"
    );
    run_with_program(&new, &stack, &[&["up", "--detach"], &up[..]].concat())?.success()?;
    stack.world.kill_on_cleanup(stack.up_pid()?)?;
    for role in ["worker --parent", "orchestrator --parent"] {
        assert_eq!(
            fs_err::read_link(format!("/proc/{}/exe", stack.child(role)?))?,
            new,
            "{role}"
        );
    }
    let goes_on = async |seen: &[u64]| {
        let more = async || Ok(counter_output(&stack, &session)?.len() > seen.len() + 3);
        eventually("the command continues", TIMEOUT, more).await?;
        let numbers = counter_output(&stack, &session)?;
        ensure!(without_gap(&numbers), "{numbers:?}");
        Ok(numbers)
    };
    let numbers = goes_on(&before).await?;
    // New sandboxes use the new agent, and the old one stays for those it serves.
    let later = stack
        .run(&["session", "create", "--memory", "64m"])?
        .success()?
        .trim_end()
        .to_owned();
    let agents = fs_err::read_dir(stack.world.state_dir().join("worker/agents"))?.count();
    assert_eq!(agents, 2);
    stack.run(&["session", "end", &later])?.success()?;

    // Like a user, and back to the previous programs.
    let kept = run_with_program(&new, &stack, &["down", "--keep-sessions"])?;
    assert!(
        kept.code == Some(0) && kept.stderr.contains("sandboxes keep running"),
        "{kept:?}"
    );
    run_with_program(&old, &stack, &[&["up", "--detach"], &up[..]].concat())?.success()?;
    stack.world.kill_on_cleanup(stack.up_pid()?)?;
    goes_on(&numbers).await?;

    eventually("the job ends", TIMEOUT, async || {
        Ok(state(&stack)? == "failed")
    })
    .await?;
    let ended = stack
        .run(&["job", "show", &job, "--output", "json"])?
        .json()?;
    assert_eq!(ended["exit_code"], 5, "{ended}");
    let numbers: Vec<u64> = stack
        .run(&["job", "logs", &job])?
        .success()?
        .lines()
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    assert!(numbers.len() == 300 && without_gap(&numbers), "{numbers:?}");
    stack.down()?;
    stack.assert_clean().await
}
