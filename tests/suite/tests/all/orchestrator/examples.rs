//! Runs the programs of `examples/` against a stack of their own, as `examples/README.md` says.

use std::{process::Stdio, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::repository;

use super::{readme, stack::Stack};

/// One example takes a few seconds on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// What an example prints on stdout. It must exit with 0.
async fn printed(
    stack: &Stack,
    program: &std::path::Path,
    example: &str,
    environment: &[(&str, &str)],
) -> Result<String> {
    let mut command = readme::program(stack, program)?;
    command
        .arg(repository().join("examples").join(example))
        .envs(environment.iter().copied())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(stack.world.directory())
        .stdin(Stdio::null());
    let ran = tokio::time::timeout(TIMEOUT, command.output())
        .await
        .with_context(|| format!("{example} takes too long"))??;
    ensure!(
        ran.status.success(),
        "{example}: {}{}",
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr)
    );
    Ok(String::from_utf8(ran.stdout)?)
}

#[tokio::test]
async fn every_example_runs_and_prints_what_it_should() -> Result<()> {
    let stack = Stack::new()?;
    let url = stack.up()?;
    let token = fs_err::read_to_string(stack.world.state_dir().join("admin.token"))?;
    let as_admin = [("CYNODE_URL", url.as_str()), ("CYNODE_TOKEN", token.trim())];

    let shell = "bash".as_ref();
    assert_eq!(
        printed(&stack, shell, "session.sh", &[]).await?,
        "one\ntwo\nthe deadline ended it with 124\none\ntwo\n"
    );
    assert_eq!(
        printed(&stack, shell, "http.sh", &as_admin).await?,
        "failed, exit code 3\n6\n13 bytes\ngood evening\nended\n"
    );
    assert_eq!(
        printed(&stack, "python3".as_ref(), "agent_loop.py", &as_admin).await?,
        "attempt 1: exit code 1 AssertionError: 7 != 10\nattempt 2: exit code 0\n"
    );

    let python = repository().join("target/mcp/bin/python");
    ensure!(
        python.is_file(),
        "the official client is not installed; 'scripts/setup test' installs it"
    );
    let task = stack.run(&["task", "create", "try MCP"])?.text();
    let create = ["token", "create", "--kind", "project_manager", "--task"];
    let agent = stack.run(&[&create[..], &[task.trim()]].concat())?.text();
    let as_agent = [
        ("CYNODE_URL", url.as_str()),
        ("CYNODE_TOKEN", agent.trim()),
        ("CYNODE_TASK", task.trim()),
    ];
    assert_eq!(
        printed(&stack, &python, "mcp_agent.py", &as_agent).await?,
        "sum.py printed 45\nartifacts: result.txt\n"
    );

    let mut listed: Vec<String> = Vec::new();
    for entry in fs_err::read_dir(repository().join("examples"))? {
        listed.push(entry?.file_name().to_string_lossy().into_owned());
    }
    listed.sort();
    assert_eq!(
        listed,
        [
            "README.md",
            "agent_loop.py",
            "http.sh",
            "mcp_agent.py",
            "session.sh",
            // Of docs/first-patch.md, which has a test.
            "shop"
        ],
        "an example is not run here"
    );
    stack.down()?;
    stack.assert_clean().await
}
