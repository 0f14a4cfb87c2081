//! New programs under a running stack: what runs in sandboxes does not notice.

use std::{path::PathBuf, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{IMAGE, World, eventually};
use rustix::process::Signal;
use serde_json::Value;

use super::stack::{Stack, kill};
use crate::cli::{Ran, run};

const PATIENCE: Duration = Duration::from_secs(90);

/// `cynode` and its agent, copied: programs at another place, and an agent with other bytes.
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
    // Behind what is loaded.
    let mut bytes = fs_err::read(directory.join("cynode-sba"))?;
    bytes.extend_from_slice(b"newer");
    fs_err::write(directory.join("cynode-sba"), bytes)?;
    Ok(program)
}

/// The same command line as the stack's, by another program.
fn by(program: &PathBuf, stack: &Stack, arguments: &[&str]) -> Result<Ran> {
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

/// Settings by which the stack has an image that the tests have.
fn settings() -> [String; 2] {
    [
        format!("orchestrator.default_image={IMAGE}"),
        format!("orchestrator.seed_images=[{IMAGE:?}]"),
    ]
}

/// The numbers that a counter has said so far.
fn counted(stack: &Stack, session: &str) -> Result<Vec<u64>> {
    let text = stack
        .run(&["session", "exec", session, "--", "cat", "count"])?
        .good()?;
    text.lines().map(|line| Ok(line.parse()?)).collect()
}

/// One number after the other, none left out, none twice.
fn without_gap(numbers: &[u64]) -> bool {
    numbers
        .iter()
        .zip(1..)
        .all(|(number, expected)| *number == expected)
}

#[tokio::test]
async fn sessions_commands_and_jobs_go_on_while_every_program_is_replaced() -> Result<()> {
    let stack = Stack::new()?;
    let settings = settings();
    let up = ["--set", &settings[0], "--set", &settings[1]];
    stack.up_with(&up)?;
    let old = World::cynode()?;
    let new = new_programs(&stack)?;

    let session = stack
        .run(&["session", "create", "--memory", "64m"])?
        .good()?
        .trim_end()
        .to_owned();
    let counter = "i=0; while :; do i=$((i+1)); echo $i >> count; echo $i; sleep 0.1; done";
    stack
        .run(&[
            "session", "exec", "--detach", &session, "--", "sh", "-c", counter,
        ])?
        .good()?;
    let ticks = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo $i; sleep 0.1; done; exit 5";
    let job = stack
        .run(&[
            "run", "--detach", "--memory", "64m", "--", "sh", "-c", ticks,
        ])?
        .good()?
        .trim_end()
        .to_owned();
    let state = |stack: &Stack| -> Result<Value> {
        Ok(stack
            .run(&["job", "show", &job, "--output", "json"])?
            .json()?["state"]
            .clone())
    };
    eventually("the job runs", PATIENCE, async || {
        Ok(state(&stack)? == "in_progress")
    })
    .await?;
    eventually("the command counts", PATIENCE, async || {
        Ok(counted(&stack, &session)?.len() > 3)
    })
    .await?;

    // As a service manager stops it: a signal to the supervisor alone.
    let before = counted(&stack, &session)?;
    kill(stack.up_pid()?, Signal::TERM)?;
    eventually("everything has stopped", PATIENCE, async || {
        Ok(stack.run(&["status"])?.text().contains("not running"))
    })
    .await?;
    assert_eq!(
        stack.world.containers()?.len(),
        2,
        "both sandboxes are there"
    );
    by(&new, &stack, &[&["up", "--detach"], &up[..]].concat())?.good()?;
    stack.world.remember(stack.up_pid()?)?;
    for role in ["worker --parent", "orchestrator --parent"] {
        assert_eq!(
            fs_err::read_link(format!("/proc/{}/exe", stack.child(role)?))?,
            new,
            "{role}"
        );
    }
    let goes_on = async |seen: &[u64]| {
        let more = async || Ok(counted(&stack, &session)?.len() > seen.len() + 3);
        eventually("the command goes on", PATIENCE, more).await?;
        let numbers = counted(&stack, &session)?;
        ensure!(without_gap(&numbers), "{numbers:?}");
        Ok(numbers)
    };
    let numbers = goes_on(&before).await?;
    // What is made now is made with the new agent, and the old one stays for whom it serves.
    let later = stack
        .run(&["session", "create", "--memory", "64m"])?
        .good()?
        .trim_end()
        .to_owned();
    let agents = fs_err::read_dir(stack.world.state_dir().join("worker/agents"))?.count();
    assert_eq!(agents, 2);
    stack.run(&["session", "end", &later])?.good()?;

    // As a person does it, and back to the programs of before.
    let kept = by(&new, &stack, &["down", "--keep-sessions"])?;
    assert!(
        kept.code == Some(0) && kept.stderr.contains("sandboxes keep running"),
        "{kept:?}"
    );
    by(&old, &stack, &[&["up", "--detach"], &up[..]].concat())?.good()?;
    stack.world.remember(stack.up_pid()?)?;
    goes_on(&numbers).await?;

    eventually("the job ends", PATIENCE, async || {
        Ok(state(&stack)? == "failed")
    })
    .await?;
    let ended = stack
        .run(&["job", "show", &job, "--output", "json"])?
        .json()?;
    assert_eq!(ended["exit_code"], 5, "{ended}");
    let said: Vec<u64> = stack
        .run(&["job", "logs", &job])?
        .good()?
        .lines()
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    assert!(said.len() == 300 && without_gap(&said), "{said:?}");
    stack.down()?;
    stack.assert_clean().await
}
