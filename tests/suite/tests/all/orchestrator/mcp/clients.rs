//! The official MCP clients.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_tests::repository;
use serde_json::{Value, json};

use super::{McpAgent, task};
use crate::orchestrator::cluster::Cluster;

/// Runs a program on the Python client and returns its report.
async fn python(program: &str, arguments: &[&str]) -> Result<Value> {
    let python = repository().join("target/mcp/bin/python");
    ensure!(
        python.is_file(),
        "the official client is not installed; 'scripts/setup test' installs it"
    );
    let script = repository()
        .join("tests/suite/tests/all/orchestrator/mcp")
        .join(program);
    let mut command = tokio::process::Command::new(python);
    command.arg(script).args(arguments).kill_on_drop(true);
    let ran = tokio::time::timeout(Duration::from_secs(120), command.output())
        .await
        .context("timed out")??;
    ensure!(
        ran.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&ran.stderr)
    );
    Ok(serde_json::from_slice(&ran.stdout)?)
}

#[tokio::test]
// invariant: tools
async fn the_official_python_client_works_with_the_current_and_an_older_revision() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    for (mode, revision) in [("auto", "2026-07-28"), ("legacy", "2025-11-25")] {
        let task = task(&cluster, &admin, mode).await?;
        let agent = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?;
        let url = format!("{}/mcp", cluster.orchestrator.url()?);
        let seen = python("client.py", &[&url, &agent.token, &task, mode]).await?;
        assert_eq!(
            (seen["version"].as_str(), seen["server"].as_str()),
            (Some(revision), Some("cynode"))
        );
        assert_eq!(seen["tools"], json!(agent.names().await?));
        assert_eq!(
            (
                seen["exec"]["exit_code"].as_i64(),
                seen["exec"]["stdout"].as_str()
            ),
            (Some(0), Some("42\n"))
        );
        assert_eq!(seen["output"]["chunks"][0]["data"], "later\n");
        assert_eq!(seen["read"]["content"], "one\n");
        assert_eq!(seen["failure"]["code"], "not_found");
        ensure!(
            seen["progress"].as_i64().is_some_and(|times| times > 0),
            "a long command reported no progress: {seen}"
        );
        ensure!(
            seen["unknown"]
                .as_str()
                .is_some_and(|text| text.contains("unknown_tool")),
            "{seen}"
        );
    }
    cluster.worker.shut_down().await
}

#[tokio::test]
// invariant: tools
async fn the_official_python_client_does_a_coding_round_without_optional_arguments() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    for (mode, revision) in [("auto", "2026-07-28"), ("legacy", "2025-11-25")] {
        let task = task(&cluster, &admin, mode).await?;
        let agent = McpAgent {
            path: "/mcp/coding",
            ..McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?
        };
        let url = format!("{}/mcp/coding", cluster.orchestrator.url()?);
        let seen = python("coding.py", &[&url, &agent.token, mode]).await?;
        assert_eq!(seen["version"].as_str(), Some(revision));
        assert_eq!(seen["tools"], json!(agent.names().await?));
        assert_eq!(
            (
                seen["before"].as_str(),
                seen["after"].as_str(),
                seen["search"].as_str(),
                seen["read"].as_str(),
                seen["list"].as_str()
            ),
            (
                Some("exit code 1"),
                Some("exit code 0\nstdout:\npassed\n"),
                Some("double.py:2:     return x + x + 1\n"),
                Some("def double(x):\n    return x + x\n"),
                Some("check.sh 39\ndouble.py 32\n")
            )
        );
        ensure!(
            seen["progress"]
                .as_array()
                .is_some_and(|lines| lines.contains(&json!("working hard"))),
            "progress does not carry the last line of output: {seen}"
        );
    }
    cluster.worker.shut_down().await
}
