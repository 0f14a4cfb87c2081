//! What an orchestrator remembers of a caller makes calls fast. It lets nobody do anything, and refuses nobody.

use std::time::Duration;

use anyhow::{Result, ensure};
use cynode_api::{AuditDecision, AuditKind, AuditResult};
use cynode_tests::{Answer, eventually};
use http::Method;
use serde_json::{Value, json};

use super::{Told, body, call, done, intact, of_action, told};
use crate::plane::small::{Small, session, text};

fn sh(script: &str) -> Value {
    json!({"argv": ["sh", "-c", script], "timeout_ms": 20_000})
}

// proves: CYNAI.SANDBX.AccessControlAuditing
#[tokio::test]
async fn what_is_remembered_of_a_caller_lets_nobody_do_anything_and_refuses_nobody() -> Result<()> {
    let mut small = Small::start().await?;
    let (client, admin) = (small.orchestrator.client()?, small.orchestrator.token()?);
    let ((ada_id, ada), (bob_id, _)) = (small.user("ada").await?, small.user("bob").await?);
    let id = small.session(&ada, &session()).await?;
    let path = format!("/v1/sessions/{id}/exec");
    let exec = |token: &str, script: &str| {
        anyhow::Ok(
            small
                .request_by(token, Method::POST, &path)?
                .json(&sh(script)),
        )
    };
    let owned_by = |user: &str| {
        small.plane.postgres.ask(&format!(
            "update sessions set owner_id = '{user}'; update tasks set owner_id = '{user}'"
        ))
    };
    // Twice: the second time she is known.
    for _ in 0..2 {
        done(&client, exec(&ada, "true")?).await?;
    }
    let never = async || {
        let calls = of_action(&client, "session.exec").await?;
        let outcomes = calls
            .iter()
            .filter(|record| record.body.kind == AuditKind::Outcome)
            .count();
        ensure!(
            calls.len() == 2 * outcomes,
            "every call has its outcome: {calls:?}"
        );
        anyhow::Ok(
            calls
                .into_iter()
                .filter(|record| record.body.result == Some(AuditResult::NotStarted))
                .collect::<Vec<_>>(),
        )
    };
    ensure!(never().await?.is_empty(), "what was remembered was right");

    // The session is another's now: for her it is not there, and what she asked for did not happen.
    owned_by(&bob_id)?;
    let (answer, Told { intent, .. }) = call(&client, exec(&ada, "touch taken")?).await?;
    assert_eq!(answer.outcome(), (404, "session_not_found".to_owned()));
    assert_eq!(
        (intent.body.decision, intent.body.stage.as_deref()),
        (Some(AuditDecision::Deny), Some("policy"))
    );
    let first = never().await?;
    let [first] = &first[..] else {
        anyhow::bail!("one that was begun by what was remembered: {first:?}")
    };
    assert_eq!(
        (
            first.body.stage.as_deref(),
            first.body.decision,
            first.body.status
        ),
        (Some("authenticate"), None, None)
    );
    told(&client, &first.body.call_id.expect("of a call").to_string()).await?;

    // And hers again: what is remembered now refuses nobody.
    owned_by(&ada_id)?;
    let (answer, _) = done(&client, exec(&ada, "test ! -e taken")?).await?;
    assert_eq!(body(&answer)?["exit_code"], 0, "{answer:?}");
    assert_eq!(
        never().await?.len(),
        1,
        "a refusal is made sure of before it is written"
    );

    // A token that was revoked is good for nothing at once, however often it was good.
    let made = small
        .make(
            &admin,
            "/v1/tokens",
            &json!({"kind": "user", "user": "ada"}),
        )
        .await?;
    let theirs = text(&made["token"])?;
    for _ in 0..2 {
        done(&client, exec(&theirs, "true")?).await?;
    }
    done(
        &client,
        small.request(
            Method::DELETE,
            &format!("/v1/tokens/{}", text(&made["id"])?),
        )?,
    )
    .await?;
    // What is long, or waits to be asked for, is not even taken.
    let before = of_action(&client, "session.exec").await?.len();
    let long = vec![b' '; 17 << 20];
    let refused = Answer::of(
        small
            .request_by(&theirs, Method::POST, &path)?
            .header("content-type", "application/json")
            .body(long.clone()),
    )
    .await?;
    assert_eq!(refused.outcome(), (401, "unauthorized".to_owned()));
    assert_eq!(of_action(&client, "session.exec").await?.len(), before);
    for _ in 0..2 {
        let refused = Answer::of(exec(&theirs, "touch taken")?).await?;
        assert_eq!(refused.outcome(), (401, "unauthorized".to_owned()));
    }
    assert_eq!(
        never().await?.len(),
        2,
        "the second time it is not known any more"
    );
    assert_eq!(
        of_action(&client, "authenticate").await?.len(),
        1,
        "the same from the same is counted"
    );
    let (answer, _) = done(&client, exec(&ada, "test ! -e taken")?).await?;
    assert_eq!(body(&answer)?["exit_code"], 0, "{answer:?}");

    // What can't be read is refused as it was before, in her name.
    for (bytes, status) in [(b"{\"argv\":".to_vec(), 400), (long, 413)] {
        let bad = small
            .request_by(&ada, Method::POST, &path)?
            .header("content-type", "application/json")
            .body(bytes);
        let (answer, Told { intent, .. }) = call(&client, bad).await?;
        assert_eq!(
            (
                answer.status,
                intent
                    .body
                    .subject
                    .and_then(|subject| subject.name)
                    .as_deref()
            ),
            (status, Some("ada"))
        );
    }
    intact(&client).await?;
    small.worker.shut_down().await
}

// proves: CYNAI.SANDBX.AccessControlAuditing
#[tokio::test]
async fn who_goes_away_while_it_is_made_sure_who_they_are_has_done_nothing() -> Result<()> {
    let mut small = Small::start().await?;
    let client = small.orchestrator.client()?;
    let (_, ada) = small.user("ada").await?;
    let id = small.session(&ada, &session()).await?;
    let exec = |script: &str| {
        anyhow::Ok(
            small
                .request_by(&ada, Method::POST, &format!("/v1/sessions/{id}/exec"))?
                .json(&sh(script)),
        )
    };
    for _ in 0..2 {
        done(&client, exec("true")?).await?;
    }
    let records = |kind: &str| {
        small.plane.postgres.ask(&format!(
            "select count(*) from audit_events where action = 'session.exec' and kind = '{kind}'"
        ))
    };

    // She is known, so her call is written down; whether that is right, nobody can say yet.
    let held = small.plane.postgres.hold("api_tokens")?;
    let call = tokio::spawn(exec("touch taken")?.send());
    eventually(
        "its intent is written",
        Duration::from_secs(30),
        async || Ok(records("intent")? == "3"),
    )
    .await?;
    assert_eq!(records("outcome")?, "2");
    call.abort();
    eventually(
        "it is closed although nobody waits",
        Duration::from_secs(60),
        async || Ok(records("outcome")? == "3"),
    )
    .await?;
    drop(held);
    let last = of_action(&client, "session.exec")
        .await?
        .into_iter()
        .rfind(|record| record.body.kind == AuditKind::Outcome);
    assert_eq!(
        last.and_then(|record| record.body.result),
        Some(AuditResult::NotStarted)
    );
    let (answer, _) = done(&client, exec("test ! -e taken")?).await?;
    assert_eq!(body(&answer)?["exit_code"], 0, "{answer:?}");
    intact(&client).await?;
    small.worker.shut_down().await
}
