//! What was refused is told as truly as what was done: where the decision fell, by which rule, and of what, whatever the caller heard.

use anyhow::{Context as _, Result};
use cynode_api::{AuditDecision, AuditKind, AuditRecord, AuditResult};
use cynode_client::AuditFilter;
use cynode_tests::{Answer, eventually};
use http::Method;
use serde_json::json;

use super::{PATIENCE, Told, call, done, intact, of_action, records};
use crate::plane::small::{Small, session};

const RULES: &str = r#"
@id("no-exports")
forbid (principal, action == CyNode::Action::"session.export", resource);

@id("no-passwd")
forbid (principal, action in CyNode::Action::"files", resource)
when { context has path && context.path like "/etc/*" };
"#;

// proves: ISC-22, CYNAI.SANDBX.AccessControlAuditing
#[tokio::test]
async fn refusals_are_told_with_the_stage_and_the_rule_whatever_the_caller_was_told() -> Result<()>
{
    let mut small = Small::start().await?;
    let (client, admin) = (small.orchestrator.client()?, small.orchestrator.token()?);
    let ((_, ada), (bob_id, bob)) = (small.user("ada").await?, small.user("bob").await?);
    let id = small.session(&ada, &session()).await?;
    let exec = json!({"argv": ["true"], "timeout_ms": 10_000});

    // A token that is none. Nothing of it is kept but what tells it from another.
    let guessed = "cyn_this-was-never-a-token-of-anybody";
    let refused = Answer::of(small.request_by(guessed, Method::GET, "/v1/tasks")?).await?;
    assert_eq!(refused.outcome(), (401, "unauthorized".to_owned()));
    let tried = of_action(&client, "authenticate").await?;
    let [tried] = &tried[..] else {
        anyhow::bail!("{tried:?}")
    };
    assert_eq!(
        (tried.body.kind, tried.body.decision, tried.body.result),
        (
            AuditKind::Authentication,
            Some(AuditDecision::Deny),
            Some(AuditResult::Refused)
        )
    );
    assert_eq!(
        (tried.body.stage.as_deref(), tried.body.status),
        (Some("authenticate"), Some(401))
    );
    assert_eq!(tried.body.detail["token"].as_str().map(str::len), Some(8));
    assert_eq!(
        small
            .plane
            .postgres
            .ask("select count(*) from audit_events where body::text like '%never-a-token%'")?,
        "0"
    );

    // Somebody else's session is not there for him; that it was hers is in the record.
    let path = format!("/v1/sessions/{id}/exec");
    let (answer, Told { intent, outcome }) = call(
        &client,
        small.request_by(&bob, Method::POST, &path)?.json(&exec),
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
    let subject = intent.body.subject.context("somebody called")?;
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

    // One that nobody has is told otherwise, though he hears the same.
    let nowhere = "/v1/sessions/01890000-0000-7000-8000-000000000001/exec";
    let (answer, Told { intent, .. }) = call(
        &client,
        small.request_by(&bob, Method::POST, nowhere)?.json(&exec),
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

    // What no rule permits.
    let put = small
        .request_by(&bob, Method::PUT, "/v1/settings/greeting")?
        .json(&json!({"value": 1}));
    let (answer, Told { intent, outcome }) = call(&client, put).await?;
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

    // What a rule forbids, to administrators as well.
    done(
        &client,
        small
            .request(Method::PUT, "/v1/policies/narrow")?
            .json(&json!({"text": RULES})),
    )
    .await?;
    let export = async || {
        Answer::of(
            small
                .request(Method::POST, &format!("/v1/sessions/{id}/export"))?
                .json(&json!({"format": "tar"})),
        )
        .await
    };
    eventually("the rule counts", PATIENCE, async || {
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
        let (answer, Told { intent, outcome }) = call(
            &client,
            small
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

    // An agent's token where it is not taken.
    let project = small
        .make(&admin, "/v1/projects", &json!({"name": "p"}))
        .await?;
    let agent = small
        .make(
            &admin,
            "/v1/tokens",
            &json!({"kind": "project_manager", "project_id": project["id"]}),
        )
        .await?;
    let agent = agent["token"].as_str().context("a token")?;
    let (answer, Told { intent, .. }) =
        call(&client, small.request_by(agent, Method::GET, "/v1/tasks")?).await?;
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
    intact(&client).await?;
    small.worker.shut_down().await
}
