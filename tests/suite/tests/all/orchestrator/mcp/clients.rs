//! The official MCP clients.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{World, repository};
use serde_json::{Value, json};
use tokio::process::Command;

use super::{McpAgent, bridge::Project, task};
use crate::orchestrator::cluster::Cluster;

/// The official clients, as `scripts/setup test` installs them.
#[derive(Clone, Copy, Debug)]
enum Language {
    Python,
    TypeScript,
}

impl Language {
    fn interpreter(self) -> PathBuf {
        repository().join(match self {
            Self::Python => "target/mcp/bin/python",
            Self::TypeScript => "target/mcp-typescript/node",
        })
    }

    /// Runs the program `client`, which uses every tool, or `coding`, which does a coding round,
    /// and returns its report.
    async fn run(self, program: &str, arguments: &[&str]) -> Result<Value> {
        let interpreter = self.interpreter();
        ensure!(
            interpreter.is_file(),
            "the official client is not installed; 'scripts/setup test' installs it"
        );
        let extension = match self {
            Self::Python => "py",
            Self::TypeScript => "mjs",
        };
        let program = repository().join(format!(
            "tests/suite/tests/all/orchestrator/mcp/{program}.{extension}"
        ));
        let mut command = Command::new(&interpreter);
        match self {
            Self::Python => command.arg(&program),
            // Packages are looked up from the directory of a program, or from the working directory
            // for one that is read from standard input.
            Self::TypeScript => command
                .args(["--input-type=module", "-"])
                .current_dir(interpreter.parent().context("a directory")?)
                .stdin(fs_err::File::open(&program)?.into_parts().0),
        };
        command.args(arguments).kill_on_drop(true);
        let ran = tokio::time::timeout(Duration::from_secs(120), command.output())
            .await
            .context("timed out")??;
        ensure!(
            ran.status.success(),
            "{}: {}",
            program.display(),
            String::from_utf8_lossy(&ran.stderr)
        );
        Ok(serde_json::from_slice(&ran.stdout)?)
    }
}

#[tokio::test]
// invariant: tools
async fn the_official_python_client_works_with_the_current_and_an_older_revision() -> Result<()> {
    use_every_tool(Language::Python).await
}

#[tokio::test]
// invariant: tools
async fn the_official_typescript_client_works_with_the_current_and_an_older_revision() -> Result<()>
{
    use_every_tool(Language::TypeScript).await
}

async fn use_every_tool(language: Language) -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    for (mode, revision) in [("auto", "2026-07-28"), ("legacy", "2025-11-25")] {
        let task = task(&cluster, &admin, mode).await?;
        let agent = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?;
        let url = format!("{}/mcp", cluster.orchestrator.url()?);
        let arguments = [url.as_str(), &agent.token, &task, mode];
        let seen = language.run("client", &arguments).await?;
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
        let patch = &seen["patch"];
        assert_eq!(
            (&patch["files"][0]["path"], &patch["repaired"][0]["hunk"]),
            (&json!("a.txt"), &json!(1))
        );
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

/// Fails unless the coding round went as it should.
fn assert_round(seen: &Value, revision: &str) -> Result<()> {
    assert_eq!(seen["version"].as_str(), Some(revision));
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
    Ok(())
}

#[tokio::test]
// invariant: tools
async fn the_official_python_client_does_a_coding_round_without_optional_arguments() -> Result<()> {
    do_a_coding_round(Language::Python).await
}

#[tokio::test]
// invariant: tools
async fn the_official_typescript_client_does_a_coding_round_without_optional_arguments()
-> Result<()> {
    do_a_coding_round(Language::TypeScript).await
}

async fn do_a_coding_round(language: Language) -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    for (mode, revision) in [("auto", "2026-07-28"), ("legacy", "2025-11-25")] {
        let task = task(&cluster, &admin, mode).await?;
        let agent = McpAgent {
            path: "/mcp/coding",
            ..McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?
        };
        let url = format!("{}/mcp/coding", cluster.orchestrator.url()?);
        let server = json!({"url": url, "token": agent.token});
        let seen = language.run("coding", &[&server.to_string(), mode]).await?;
        assert_eq!(seen["tools"], json!(agent.names().await?));
        assert_round(&seen, revision)?;
    }
    cluster.worker.shut_down().await
}

#[tokio::test]
// invariant: tools
async fn the_official_python_client_does_a_coding_round_through_the_bridge() -> Result<()> {
    do_a_coding_round_through_the_bridge(Language::Python).await
}

#[tokio::test]
// invariant: tools
async fn the_official_typescript_client_does_a_coding_round_through_the_bridge() -> Result<()> {
    do_a_coding_round_through_the_bridge(Language::TypeScript).await
}

async fn do_a_coding_round_through_the_bridge(language: Language) -> Result<()> {
    let mut cluster = Cluster::start().await?;
    for (mode, revision) in [("auto", "2026-07-28"), ("legacy", "2025-11-25")] {
        let project = Project::new(&cluster, mode)?;
        let environment: serde_json::Map<String, Value> = project
            .environment()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), json!(value)))
            .collect();
        let server = json!({
            "command": World::cynode()?,
            "args": ["mcp", "--workspace", project.directory],
            "env": environment,
        });
        let seen = language.run("coding", &[&server.to_string(), mode]).await?;
        assert_eq!(seen["tools"].as_array().map(Vec::len), Some(12));
        // The directory has a file of its own.
        let listed = seen["list"].as_str().unwrap_or_default();
        ensure!(listed.starts_with("a.txt 4\n"), "{listed}");
        let own = listed.replacen("a.txt 4\n", "", 1);
        let mut seen = seen.clone();
        seen["list"] = json!(own);
        assert_round(&seen, revision)?;
    }
    cluster.worker.shut_down().await
}
