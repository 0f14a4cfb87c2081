//! Promotions that wait for a person.

use anyhow::{Context as _, Result, ensure};
use cynode_tests::Answer;
use http::Method;
use serde_json::{Value, json};

use super::{FIX, GitFixture, TIMEOUT, refused};

impl GitFixture {
    /// A call of the user API with a token.
    async fn call(&self, token: &str, method: Method, path: &str, body: &Value) -> Result<Answer> {
        let endpoints = self.stack.endpoints()?;
        let api = endpoints["api"].as_str().context("an address")?;
        let client = reqwest::Client::builder().no_proxy().build()?;
        let request = client
            .request(method, format!("{api}{path}"))
            .bearer_auth(token)
            .json(body);
        Answer::of(request).await
    }
}

// part of: ISC-10
#[tokio::test]
async fn a_promotion_waits_for_a_person_and_no_agent_decides() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    fixture
        .register("guarded", "own", &json!({"require_approval": true}), &[])?
        .success()?;
    let session = fixture.session("guarded")?;
    fixture.sh(&session, FIX)?.success()?;
    let waiting = fixture.promote(&session, "guarded", &[])?.json()?;
    assert_eq!(waiting["state"], "awaiting_approval", "{waiting}");
    let id = waiting["id"].as_str().context("an id")?;
    let commit = waiting["commit"].as_str().context("a commit")?;
    fixture.assert_untouched()?;

    // Even a rule that permits it lets no agent decide.
    let rule = fixture.stack.world.directory().join("site.cedar");
    fs_err::write(
        &rule,
        "@id(\"everybody\")\npermit (principal, action, resource);\n",
    )?;
    fixture
        .cli(&["policy", "put", "site", rule.to_str().context("a path")?])?
        .success()?;
    let decision = json!({"version": 1, "commit": commit});
    for kind in ["project_manager", "project_analyst", "sandbox"] {
        let created = fixture.cli(&["token", "create", "--kind", kind, "--task", &fixture.task])?;
        let token = created.success()?.trim().to_owned();
        for verb in ["approve", "reject"] {
            let path = format!("/v1/promotions/{id}/{verb}");
            let answer = fixture.call(&token, Method::POST, &path, &decision).await?;
            ensure!(
                matches!(answer.status, 403 | 404),
                "{kind} {verb}: {:?}",
                answer.outcome()
            );
        }
    }
    assert_eq!(fixture.promotion(id)?["state"], "awaiting_approval");

    let wrong = fixture.cli(&[
        "--output",
        "json",
        "promotion",
        "approve",
        id,
        "--commit",
        &"0".repeat(40),
    ])?;
    let (exit, code, _) = refused(&wrong)?;
    assert_eq!((exit, code.as_str()), (64, "commit_changed"));
    // The server checks the commit itself.
    let admin = fs_err::read_to_string(fixture.stack.world.state_dir().join("admin.token"))?;
    let path = format!("/v1/promotions/{id}/approve");
    let stale = json!({"version": 1, "commit": "0".repeat(40)});
    let answer = fixture
        .call(admin.trim(), Method::POST, &path, &stale)
        .await?;
    assert_eq!(answer.status, 409, "{:?}", answer.outcome());
    fixture.assert_untouched()?;

    fixture
        .cli(&["promotion", "approve", id, "--commit", &commit[..12]])?
        .success()?;
    let done = fixture.json(&["promotion", "show", "--follow", id])?;
    assert_eq!(
        (&done["state"], &done["approved_by"]),
        (&json!("done"), &json!("admin"))
    );
    assert_eq!(done["commit"], commit);
    assert_eq!(fixture.server.pulls().len(), 1);
    fixture.down()
}

// part of: ISC-10
#[tokio::test]
async fn a_person_rejects_or_cancels_and_nothing_is_pushed() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    fixture
        .register("guarded", "own", &json!({"require_approval": true}), &[])?
        .success()?;
    let session = fixture.session("guarded")?;
    fixture.sh(&session, FIX)?.success()?;
    for (branch, command, end) in [
        (
            "one",
            vec!["promotion", "reject", "--reason", "not now"],
            "rejected",
        ),
        ("two", vec!["promotion", "cancel"], "canceled"),
    ] {
        let waiting = fixture
            .promote(&session, "guarded", &["--branch", branch])?
            .json()?;
        let id = waiting["id"].as_str().context("an id")?;
        fixture.cli(&[&command[..], &[id]].concat())?.success()?;
        cynode_tests::eventually("the promotion ends", TIMEOUT, async || {
            Ok(fixture.promotion(id)?["state"] == end)
        })
        .await?;
        // It can't be approved afterwards.
        let late = fixture.cli(&["promotion", "approve", id])?;
        ensure!(late.code == Some(64), "{late:?}");
    }
    fixture.assert_untouched()?;
    fixture.down()
}
