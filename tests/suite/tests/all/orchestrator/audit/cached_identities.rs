//! Cached identities make calls fast. No call takes effect and none is denied on a cached identity
//! alone.

use std::time::Duration;

use anyhow::{Result, ensure};
use cynode_api::{AuditDecision, AuditKind, AuditResult};
use cynode_tests::{Answer, eventually};
use http::Method;
use serde_json::{Value, json};

use super::{CallRecord, assert_trail_intact, body, call, call_ok, call_record, records_of_action};
use crate::orchestrator::cluster::{Cluster, session, text};

fn sh(script: &str) -> Value {
    json!({"argv": ["sh", "-c", script], "timeout_ms": 20_000})
}

#[tokio::test]
// invariant: control-plane
async fn no_call_takes_effect_or_is_denied_on_an_unverified_cached_identity() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let (client, admin) = (
        cluster.orchestrator.client()?,
        cluster.orchestrator.token()?,
    );
    let ((ada_id, ada), (bob_id, _)) = (cluster.user("ada").await?, cluster.user("bob").await?);
    let id = cluster.session(&ada, &session()).await?;
    let path = format!("/v1/sessions/{id}/exec");
    let exec = |token: &str, script: &str| {
        anyhow::Ok(
            cluster
                .request_by(token, Method::POST, &path)?
                .json(&sh(script)),
        )
    };
    let owned_by = |user: &str| {
        cluster.control_plane.postgres.query(&format!(
            "update sessions set owner_id = '{user}'; update tasks set owner_id = '{user}'"
        ))
    };
    // Twice: the second call uses the cache.
    for _ in 0..2 {
        call_ok(&client, exec(&ada, "true")?).await?;
    }
    let never = async || {
        let calls = records_of_action(&client, "session.exec").await?;
        let outcomes = calls
            .iter()
            .filter(|record| record.body.kind == AuditKind::Outcome)
            .count();
        ensure!(
            calls.len() == 2 * outcomes,
            "a call has no outcome: {calls:?}"
        );
        anyhow::Ok(
            calls
                .into_iter()
                .filter(|record| record.body.result == Some(AuditResult::NotStarted))
                .collect::<Vec<_>>(),
        )
    };
    ensure!(
        never().await?.is_empty(),
        "a call on a valid cached identity was not started"
    );

    // The session now has another owner: for her it doesn't exist, and her command did not run.
    owned_by(&bob_id)?;
    let (answer, CallRecord { intent, .. }) = call(&client, exec(&ada, "touch taken")?).await?;
    assert_eq!(answer.outcome(), (404, "session_not_found".to_owned()));
    assert_eq!(
        (intent.body.decision, intent.body.stage.as_deref()),
        (Some(AuditDecision::Deny), Some("policy"))
    );
    let first = never().await?;
    let [first] = &first[..] else {
        anyhow::bail!("started on a cached identity: {first:?}")
    };
    assert_eq!(
        (
            first.body.stage.as_deref(),
            first.body.decision,
            first.body.status
        ),
        (Some("authenticate"), None, None)
    );
    call_record(
        &client,
        &first
            .body
            .call_id
            .expect("the record has a call id")
            .to_string(),
    )
    .await?;

    // The session is hers again: the cached refusal denies nobody.
    owned_by(&ada_id)?;
    let (answer, _) = call_ok(&client, exec(&ada, "test ! -e taken")?).await?;
    assert_eq!(body(&answer)?["exit_code"], 0, "{answer:?}");
    assert_eq!(
        never().await?.len(),
        1,
        "a refusal was recorded before it was verified"
    );

    // A revoked token is invalid at once, however often it was used.
    let made = cluster
        .make(
            &admin,
            "/v1/tokens",
            &json!({"kind": "user", "user": "ada"}),
        )
        .await?;
    let theirs = text(&made["token"])?;
    for _ in 0..2 {
        call_ok(&client, exec(&theirs, "true")?).await?;
    }
    call_ok(
        &client,
        cluster.request(
            Method::DELETE,
            &format!("/v1/tokens/{}", text(&made["id"])?),
        )?,
    )
    .await?;
    // A long body, or one that waits for `100 Continue`, is not even read.
    let before = records_of_action(&client, "session.exec").await?.len();
    let long = vec![b' '; 17 << 20];
    let refused = Answer::of(
        cluster
            .request_by(&theirs, Method::POST, &path)?
            .header("content-type", "application/json")
            .body(long.clone()),
    )
    .await?;
    assert_eq!(refused.outcome(), (401, "unauthorized".to_owned()));
    assert_eq!(
        records_of_action(&client, "session.exec").await?.len(),
        before
    );
    for _ in 0..2 {
        let refused = Answer::of(exec(&theirs, "touch taken")?).await?;
        assert_eq!(refused.outcome(), (401, "unauthorized".to_owned()));
    }
    assert_eq!(
        never().await?.len(),
        2,
        "the stale identity was still cached"
    );
    assert_eq!(
        records_of_action(&client, "authenticate").await?.len(),
        1,
        "repeated attempts were not counted"
    );
    let (answer, _) = call_ok(&client, exec(&ada, "test ! -e taken")?).await?;
    assert_eq!(body(&answer)?["exit_code"], 0, "{answer:?}");

    // A malformed body is refused as before, on her behalf.
    for (bytes, status) in [(b"{\"argv\":".to_vec(), 400), (long, 413)] {
        let bad = cluster
            .request_by(&ada, Method::POST, &path)?
            .header("content-type", "application/json")
            .body(bytes);
        let (answer, CallRecord { intent, .. }) = call(&client, bad).await?;
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
    assert_trail_intact(&client).await?;
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn a_caller_that_disconnects_during_verification_has_no_effect() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.orchestrator.client()?;
    let (_, ada) = cluster.user("ada").await?;
    let id = cluster.session(&ada, &session()).await?;
    let exec = |script: &str| {
        anyhow::Ok(
            cluster
                .request_by(&ada, Method::POST, &format!("/v1/sessions/{id}/exec"))?
                .json(&sh(script)),
        )
    };
    for _ in 0..2 {
        call_ok(&client, exec("true")?).await?;
    }
    let records = |kind: &str| {
        cluster.control_plane.postgres.query(&format!(
            "select count(*) from audit_events where action = 'session.exec' and kind = '{kind}'"
        ))
    };

    // Her identity is cached, so the intent is written before the identity is verified.
    let held = cluster.control_plane.postgres.lock_table("api_tokens")?;
    let call = tokio::spawn(exec("touch taken")?.send());
    eventually(
        "the intent is recorded",
        Duration::from_secs(30),
        async || Ok(records("intent")? == "3"),
    )
    .await?;
    assert_eq!(records("outcome")?, "2");
    call.abort();
    eventually(
        "the call is closed without a waiting caller",
        Duration::from_secs(60),
        async || Ok(records("outcome")? == "3"),
    )
    .await?;
    drop(held);
    let last = records_of_action(&client, "session.exec")
        .await?
        .into_iter()
        .rfind(|record| record.body.kind == AuditKind::Outcome);
    assert_eq!(
        last.and_then(|record| record.body.result),
        Some(AuditResult::NotStarted)
    );
    let (answer, _) = call_ok(&client, exec("test ! -e taken")?).await?;
    assert_eq!(body(&answer)?["exit_code"], 0, "{answer:?}");
    assert_trail_intact(&client).await?;
    cluster.worker.shut_down().await
}
