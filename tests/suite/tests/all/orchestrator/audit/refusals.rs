//! Audit records of refusals name the real stage, rule and target, even where the caller sees 404.

use anyhow::{Context as _, Result};
use cynode_api::{AuditDecision, AuditKind, AuditRecord, AuditResult};
use cynode_client::AuditFilter;
use cynode_tests::{Answer, eventually};
use http::Method;
use serde_json::json;

use super::{CallRecord, TIMEOUT, assert_trail_intact, call, call_ok, records, records_of_action};
use crate::orchestrator::cluster::{Cluster, session};

const RULES: &str = r#"
@id("no-exports")
forbid (principal, action == CyNode::Action::"session.export", resource);

@id("no-passwd")
forbid (principal, action in CyNode::Action::"files", resource)
when { context has path && context.path like "/etc/*" };
"#;

// part of: ISC-22
#[tokio::test]
// invariant: gate
async fn refusals_are_recorded_with_stage_and_rule_even_if_the_caller_sees_not_found() -> Result<()>
{
    let mut cluster = Cluster::start().await?;
    let (client, admin) = (
        cluster.orchestrator.client()?,
        cluster.orchestrator.token()?,
    );
    let ((_, ada), (bob_id, bob)) = (cluster.user("ada").await?, cluster.user("bob").await?);
    let id = cluster.session(&ada, &session()).await?;
    let exec = json!({"argv": ["true"], "timeout_ms": 10_000});

    // An invalid token. Only a fingerprint of it is kept.
    let guessed = "cyn_this-was-never-a-token-of-anybody";
    let refused = Answer::of(cluster.request_by(guessed, Method::GET, "/v1/tasks")?).await?;
    assert_eq!(refused.outcome(), (401, "unauthorized".to_owned()));
    let attempts = records_of_action(&client, "authenticate").await?;
    let [attempt] = &attempts[..] else {
        anyhow::bail!("{attempts:?}")
    };
    assert_eq!(
        (
            attempt.body.kind,
            attempt.body.decision,
            attempt.body.result
        ),
        (
            AuditKind::Authentication,
            Some(AuditDecision::Deny),
            Some(AuditResult::Refused)
        )
    );
    assert_eq!(
        (attempt.body.stage.as_deref(), attempt.body.status),
        (Some("authenticate"), Some(401))
    );
    assert_eq!(attempt.body.detail["token"].as_str().map(str::len), Some(8));
    assert_eq!(
        cluster
            .control_plane
            .postgres
            .query("select count(*) from audit_events where body::text like '%never-a-token%'")?,
        "0"
    );

    // Bob gets 404 for Ada's session; the record names Bob, the session and the policy stage.
    let path = format!("/v1/sessions/{id}/exec");
    let (answer, CallRecord { intent, outcome }) = call(
        &client,
        cluster.request_by(&bob, Method::POST, &path)?.json(&exec),
    )
    .await?;
    assert_eq!(answer.outcome(), (404, "session_not_found".to_owned()));
    assert_eq!(
        (intent.body.decision, intent.body.stage.as_deref()),
        (Some(AuditDecision::Deny), Some("policy"))
    );
    assert_eq!(
        intent.body.session_id.map(|id| id.to_string()),
        Some(id.clone())
    );
    let subject = intent.body.subject.context("the subject is recorded")?;
    assert_eq!(
        (
            subject.name.as_deref(),
            subject.user_id.map(|id| id.to_string())
        ),
        (Some("bob"), Some(bob_id))
    );
    assert_eq!(
        (outcome.body.result, outcome.body.code.as_deref()),
        (Some(AuditResult::Refused), Some("session_not_found"))
    );

    // A nonexistent session gets the same response but a different record.
    let nowhere = "/v1/sessions/01890000-0000-7000-8000-000000000001/exec";
    let (answer, CallRecord { intent, .. }) = call(
        &client,
        cluster.request_by(&bob, Method::POST, nowhere)?.json(&exec),
    )
    .await?;
    assert_eq!(answer.outcome(), (404, "session_not_found".to_owned()));
    assert_eq!(
        (
            intent.body.decision,
            intent.body.stage.as_deref(),
            intent.body.session_id
        ),
        (Some(AuditDecision::Deny), Some("resource"), None)
    );

    // No rule permits the call.
    let put = cluster
        .request_by(&bob, Method::PUT, "/v1/settings/greeting")?
        .json(&json!({"value": 1}));
    let (answer, CallRecord { intent, outcome }) = call(&client, put).await?;
    assert_eq!(answer.outcome(), (403, "denied_by_policy".to_owned()));
    assert_eq!(
        (
            intent.body.decision,
            intent.body.stage.as_deref(),
            intent.body.rules.len()
        ),
        (Some(AuditDecision::Deny), Some("policy"), 0)
    );
    assert_eq!(
        (outcome.body.status, outcome.body.code.as_deref()),
        (Some(403), Some("denied_by_policy"))
    );

    // A rule forbids the calls, even to administrators.
    call_ok(
        &client,
        cluster
            .request(Method::PUT, "/v1/policies/narrow")?
            .json(&json!({"text": RULES})),
    )
    .await?;
    let export = async || {
        Answer::of(
            cluster
                .request(Method::POST, &format!("/v1/sessions/{id}/export"))?
                .json(&json!({"format": "tar"})),
        )
        .await
    };
    eventually("the rule is in effect", TIMEOUT, async || {
        Ok(export().await?.status == 403)
    })
    .await?;
    let files = format!("/v1/sessions/{id}/files?path=");
    for (token, method, path, rule) in [
        (
            &admin,
            Method::POST,
            format!("/v1/sessions/{id}/export"),
            "narrow/no-exports",
        ),
        (
            &ada,
            Method::GET,
            format!("{files}/etc/passwd"),
            "narrow/no-passwd",
        ),
        (
            &ada,
            Method::DELETE,
            format!("{files}../etc/passwd"),
            "narrow/no-passwd",
        ),
    ] {
        let (answer, CallRecord { intent, outcome }) = call(
            &client,
            cluster
                .request_by(token, method, &path)?
                .json(&json!({"format": "tar"})),
        )
        .await?;
        assert_eq!(
            answer.outcome(),
            (403, "denied_by_policy".to_owned()),
            "{path}"
        );
        assert_eq!(
            (intent.body.decision, intent.body.stage.as_deref()),
            (Some(AuditDecision::Deny), Some("policy")),
            "{path}"
        );
        assert_eq!(intent.body.rules, [rule], "{path}");
        assert_eq!(
            (outcome.body.result, outcome.body.session_id),
            (Some(AuditResult::Refused), intent.body.session_id),
            "{path}"
        );
    }

    // An agent's token on a route that doesn't accept it.
    let project = cluster
        .make(&admin, "/v1/projects", &json!({"name": "p"}))
        .await?;
    let agent = cluster
        .make(
            &admin,
            "/v1/tokens",
            &json!({"kind": "project_manager", "project_id": project["id"]}),
        )
        .await?;
    let agent = agent["token"].as_str().context("a token")?;
    let (answer, CallRecord { intent, .. }) = call(
        &client,
        cluster.request_by(agent, Method::GET, "/v1/tasks")?,
    )
    .await?;
    assert_eq!(answer.status, 403);
    assert_eq!(
        (intent.body.decision, intent.body.stage.as_deref()),
        (Some(AuditDecision::Deny), Some("agent_type"))
    );

    let denied = records(
        &client,
        &AuditFilter {
            decision: Some(AuditDecision::Deny),
            ..Default::default()
        },
    )
    .await?;
    let is_bobs = |record: &AuditRecord| {
        record
            .body
            .subject
            .as_ref()
            .is_some_and(|subject| subject.name.as_deref() == Some("bob"))
    };
    let by_bob = denied
        .iter()
        .filter(|record| record.body.kind == AuditKind::Intent && is_bobs(record))
        .count();
    assert_eq!(by_bob, 3, "{denied:#?}");
    assert_trail_intact(&client).await?;
    cluster.worker.shut_down().await
}
