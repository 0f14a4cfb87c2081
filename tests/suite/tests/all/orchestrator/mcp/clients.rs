//! The official MCP clients.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_tests::repository;
use serde_json::{Value, json};

use super::{McpAgent, task};
use crate::orchestrator::cluster::Cluster;

/// Runs the Python client and returns its report.
async fn python(cluster: &Cluster, agent: &McpAgent<'_>, task: &str, mode: &str) -> Result<Value> {
    let program = repository().join("target/mcp/bin/python");
    ensure!(
        program.is_file(),
        "the official client is not installed; 'scripts/setup test' installs it"
    );
    let script = repository().join("tests/suite/tests/all/orchestrator/mcp/client.py");
    let mut command = tokio::process::Command::new(program);
    command
        .arg(script)
        .arg(format!("{}/mcp", cluster.orchestrator.url()?))
        .args([&agent.token, task, mode])
        .kill_on_drop(true);
    let ran = tokio::time::timeout(Duration::from_secs(120), command.output())
        .await
        .context("timed out")??;
    ensure!(
        ran.status.success(),
        "{mode}: {}",
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
        let seen = python(&cluster, &agent, &task, mode).await?;
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
