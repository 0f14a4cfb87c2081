//! Unattended promotions, on each kind of forge, by command and by tool.

use anyhow::{Context as _, Result, ensure};
use cynode_tests::eventually;
use serde_json::{Value, json};

use super::{FIX, GitFixture, TIMEOUT};

/// What must be on the server after the fix was promoted.
fn assert_promoted(fixture: &GitFixture, promotion: &Value) -> Result<()> {
    assert_eq!(promotion["state"], "done", "{promotion}");
    let branch = promotion["branch"].as_str().context("a branch")?;
    ensure!(
        branch.starts_with("cynode/") && branch.contains(&fixture.task[..8]),
        "{branch}"
    );
    let commit = fixture.served.tip(branch)?;
    assert_eq!(promotion["commit"], commit.as_str());
    assert_eq!(
        fixture.served.file(&commit, "sum.sh")?,
        "#!/bin/sh\necho $(($1 + $2))"
    );
    // One commit on the base, whose message names the task.
    let base = fixture.served.tip("main")?;
    assert_eq!(
        fixture
            .served
            .git(&["rev-list", &format!("{base}..{commit}")], b"")?,
        commit
    );
    let message = fixture
        .served
        .git(&["log", "-1", "--format=%B", &commit], b"")?;
    ensure!(
        message.starts_with("Add the sum") && message.contains(&fixture.task),
        "{message}"
    );
    assert_eq!(fixture.served.updates(branch)?, 1);
    let pulls = fixture.server.pulls();
    let [pull] = &pulls[..] else {
        anyhow::bail!("{pulls:?}")
    };
    assert_eq!(promotion["pull_request"], pull.url.as_str());
    assert_eq!(
        (
            pull.repository.as_str(),
            pull.head.as_str(),
            pull.commit.as_str(),
            pull.base.as_str(),
        ),
        (super::PATH, branch, commit.as_str(), "main")
    );
    ensure!(pull.title.contains("Add the sum"), "{pull:?}");
    fixture.assert_presented()
}

async fn an_agent_s_change_becomes_a_pull_request(provider: &'static str) -> Result<()> {
    let fixture = GitFixture::start(provider).await?;
    let session = fixture.session("shop@main")?;
    assert_ne!(fixture.sh(&session, "sh test.sh")?.code, Some(0));
    fixture.sh(&session, FIX)?.success()?;
    fixture.sh(&session, "sh test.sh")?.success()?;

    let dry = fixture.promote(&session, "shop", &["--dry-run"])?.json()?;
    assert_eq!(dry["files"][0]["path"], "sum.sh", "{dry}");
    ensure!(
        dry["verdicts"]
            .as_array()
            .is_some_and(|verdicts| !verdicts.is_empty()
                && verdicts.iter().all(|verdict| verdict["allowed"] == true)),
        "{dry}"
    );
    fixture.assert_untouched()?;

    let promotion = fixture.promote(&session, "shop", &[])?.json()?;
    assert_promoted(&fixture, &promotion)?;
    let id = promotion["id"].as_str().context("an id")?;
    assert_eq!(fixture.promotion(&id[28..])?["state"], "done");
    let listed = fixture.json(&["promotion", "list", "--all"])?;
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1));
    fixture.cli(&["audit", "verify"])?.success()?;
    fixture.down()
}

// proves: REQ-SANDBX-0123 with orchestrator::git::inside::*, ISC-08, ISC-09
#[tokio::test]
async fn an_agent_s_change_becomes_a_pull_request_on_github() -> Result<()> {
    an_agent_s_change_becomes_a_pull_request("github").await
}

// part of: ISC-09
#[tokio::test]
async fn an_agent_s_change_becomes_a_merge_request_on_gitlab() -> Result<()> {
    an_agent_s_change_becomes_a_pull_request("gitlab").await
}

/// The same by MCP tools, on Gitea.
// part of: ISC-09
#[tokio::test]
async fn an_agent_promotes_by_its_tools() -> Result<()> {
    let fixture = GitFixture::start("gitea").await?;
    let created = fixture.cli(&[
        "token",
        "create",
        "--kind",
        "project_manager",
        "--task",
        &fixture.task,
    ])?;
    let tools = Tools::new(&fixture, created.success()?.trim())?;
    let session = tools
        .call(
            "sandbox.session.create",
            json!({
                "task_id": fixture.task,
                "session_id": "new",
                "image_ref": "default",
                "workspace_ref": "git:shop@main",
                "constraints": {},
            }),
        )
        .await?["session_id"]
        .clone();
    let ran = tools
        .call(
            "sandbox.session.exec",
            json!({
                "task_id": fixture.task,
                "session_id": session,
                "argv": ["sh", "-ec", format!("{FIX}; sh test.sh")],
                "timeout_ms": 20_000,
                "cwd": ".",
                "env": {},
            }),
        )
        .await?;
    assert_eq!(ran["exit_code"], 0, "{ran}");
    let exported = tools
        .call(
            "sandbox.workspace.export_patch",
            json!({"task_id": fixture.task, "session_id": session}),
        )
        .await?;
    let changeset = exported["artifact"]["id"]
        .as_str()
        .or_else(|| exported["id"].as_str())
        .with_context(|| format!("{exported}"))?
        .to_owned();
    let arguments = json!({
        "task_id": fixture.task,
        "repository": "shop",
        "changeset": changeset,
        "title": "Add the sum",
    });
    // The call is resumable: repeated, it tells how far the same promotion is.
    let mut promotion = Value::Null;
    eventually("the promotion is done", TIMEOUT, async || {
        promotion = tools.call("git.promote", arguments.clone()).await?;
        ensure!(promotion["state"] != "failed", "{promotion}");
        Ok(promotion["state"] == "done")
    })
    .await?;
    assert_promoted(&fixture, &promotion)?;
    fixture.down()
}

/// A client of the tools.
struct Tools {
    http: reqwest::Client,
    url: String,
    token: String,
}

impl Tools {
    fn new(fixture: &GitFixture, token: &str) -> Result<Self> {
        let endpoints = fixture.stack.endpoints()?;
        Ok(Self {
            http: reqwest::Client::builder().no_proxy().build()?,
            url: endpoints["mcp"].as_str().context("an address")?.to_owned(),
            token: token.to_owned(),
        })
    }

    async fn call(&self, tool: &str, arguments: Value) -> Result<Value> {
        let request = json!({
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": tool, "arguments": arguments},
        });
        let answer: Value = self
            .http
            .post(&self.url)
            .bearer_auth(&self.token)
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", "2025-06-18")
            .json(&request)
            .send()
            .await?
            .json()
            .await?;
        let result = &answer["result"];
        ensure!(result["isError"] == false, "{tool}: {answer}");
        Ok(result["structuredContent"].clone())
    }
}
