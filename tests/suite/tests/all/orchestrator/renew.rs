//! Renewed tokens: the id stays, the old secret is dead, and who may renew which.

use std::time::Duration;

use anyhow::{Result, ensure};
use cynode_api::{AuditDecision, AuditKind, TokenId};
use cynode_client::AuditFilter;
use cynode_tests::{Answer, RunningOrchestrator, eventually};
use http::Method;
use serde_json::{Value, json};

use super::{
    audit::{assert_trail_intact, records},
    cluster::{Cluster, session, text},
};

/// A token that the API has answered.
struct Issued {
    id: String,
    secret: String,
}

impl Issued {
    fn of(answer: &Value) -> Result<Self> {
        Ok(Self {
            id: text(&answer["id"])?,
            secret: text(&answer["token"])?,
        })
    }
}

async fn create(cluster: &Cluster, by: &str, body: Value) -> Result<Issued> {
    Issued::of(&cluster.make(by, "/v1/tokens", &body).await?)
}

/// Renews a token and returns the answer, whatever it is.
async fn renew(cluster: &Cluster, by: &str, id: &str, body: Value) -> Result<Answer> {
    let path = format!("/v1/tokens/{id}/renew");
    Answer::of(cluster.request_by(by, Method::POST, &path)?.json(&body)).await
}

async fn renew_ok(cluster: &Cluster, by: &str, id: &str) -> Result<Issued> {
    let answer = renew(cluster, by, id, json!({})).await?;
    ensure!(answer.status == 200, "{:?}", answer.outcome());
    Issued::of(&serde_json::from_slice(&answer.body)?)
}

#[tokio::test]
// invariant: fail-closed
async fn a_renewal_keeps_the_id_and_ends_the_old_secret_on_every_orchestrator() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let other = cluster.second().await?;
    let (_, ann) = cluster.user("ann").await?;
    let id = cluster.session(&ann, &session()).await?;
    let token = create(&cluster, &ann, json!({"kind": "user"})).await?;
    let http = reqwest::Client::builder().no_proxy().build()?;
    let exec = async |orchestrator: &RunningOrchestrator, secret: &str| -> Result<u16> {
        let request = http
            .post(format!("{}/v1/sessions/{id}/exec", orchestrator.url()?))
            .bearer_auth(secret)
            .json(&json!({"argv": ["true"], "timeout_ms": 20_000}));
        Ok(Answer::of(request).await?.status)
    };
    // Both orchestrators cache the identity of the old secret.
    for orchestrator in [&cluster.orchestrator, &other] {
        for _ in 0..2 {
            assert_eq!(exec(orchestrator, &token.secret).await?, 200);
        }
    }
    let renewed = renew_ok(&cluster, &ann, &token.id).await?;
    assert_eq!(renewed.id, token.id);
    ensure!(renewed.secret != token.secret && renewed.secret.starts_with("cyn_"));
    for orchestrator in [&other, &cluster.orchestrator] {
        assert_eq!(exec(orchestrator, &token.secret).await?, 401);
        assert_eq!(exec(orchestrator, &renewed.secret).await?, 200);
    }
    // A token can renew itself, too, and the answer is the only place with the secret.
    let again = renew_ok(&cluster, &renewed.secret, &token.id).await?;
    assert_eq!(exec(&other, &renewed.secret).await?, 401);
    assert_eq!(exec(&other, &again.secret).await?, 200);

    let client = cluster.orchestrator.client()?;
    let filter = AuditFilter {
        action: Some("token.renew".to_owned()),
        ..AuditFilter::default()
    };
    let found = records(&client, &filter).await?;
    assert_eq!(found.len(), 4, "{found:?}");
    for record in &found {
        assert_eq!(
            record.body.resource.as_deref(),
            Some(format!("token:{}", token.id).as_str())
        );
        let hides =
            |secret: &str| !serde_json::to_string(record).is_ok_and(|it| it.contains(secret));
        ensure!(
            [&token, &renewed, &again]
                .iter()
                .all(|it| hides(&it.secret))
        );
    }
    let outcomes: Vec<_> = found
        .iter()
        .filter(|record| record.body.kind == AuditKind::Outcome)
        .map(|record| (record.body.status, &record.body.detail["id"]))
        .collect();
    assert_eq!(outcomes, [(Some(200), &json!(token.id)); 2]);
    assert_trail_intact(&client).await?;
    cluster.worker.shut_down().await
}

#[tokio::test]
// invariant: fail-closed
async fn only_who_may_create_such_a_token_renews_it_and_a_revoked_one_stays_revoked() -> Result<()>
{
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let ((_, ann), (_, bob)) = (cluster.user("ann").await?, cluster.user("bob").await?);
    let task = text(
        &cluster
            .make(&ann, "/v1/tasks", &json!({"name": "t"}))
            .await?["id"],
    )?;
    let manager = json!({"kind": "project_manager", "task_ids": [task]});
    let token = create(&cluster, &ann, manager.clone()).await?;
    let outcome = async |by: &str, id: &str, body: Value| -> Result<(u16, String)> {
        Ok(renew(&cluster, by, id, body).await?.outcome())
    };
    let refused = |status: u16, code: &str| (status, code.to_owned());

    assert_eq!(
        outcome(&bob, &token.id, json!({})).await?,
        refused(404, "not_found")
    );
    assert_eq!(
        outcome(&ann, &TokenId::generate().to_string(), json!({})).await?,
        refused(404, "not_found")
    );
    // An agent can't prolong its own life.
    assert_eq!(
        outcome(&token.secret, &token.id, json!({})).await?,
        refused(403, "forbidden")
    );
    for seconds in [0_u64, cynode_api::MAX_TOKEN_SECONDS + 1] {
        assert_eq!(
            outcome(&ann, &token.id, json!({"expires_in_seconds": seconds})).await?,
            refused(400, "invalid_request")
        );
    }
    let agents = async |secret: &str| -> Result<u16> {
        Ok(
            Answer::of(cluster.request_by(secret, Method::GET, "/v1/events")?)
                .await?
                .status,
        )
    };
    assert_eq!(agents(&token.secret).await?, 200, "a refusal renewed it");
    // An administrator can renew anybody's, and it stays that user's.
    let token = renew_ok(&cluster, &admin, &token.id).await?;
    let shown =
        Answer::of(cluster.request_by(&ann, Method::GET, &format!("/v1/tokens/{}", token.id))?)
            .await?;
    let shown: Value = serde_json::from_slice(&shown.body)?;
    assert_eq!(
        json!([shown["user"], shown["kind"], shown["task_ids"]]),
        json!(["ann", "project_manager", [task]])
    );

    // An expired token works again after a renewal.
    let short = json!({"expires_in_seconds": 1});
    let answer = renew(&cluster, &ann, &token.id, short).await?;
    let expiring = Issued::of(&serde_json::from_slice(&answer.body)?)?;
    eventually("the token expires", Duration::from_secs(30), async || {
        Ok(agents(&expiring.secret).await? == 401)
    })
    .await?;
    let token = renew_ok(&cluster, &ann, &token.id).await?;
    assert_eq!(agents(&token.secret).await?, 200);

    // Who may not create such a token may not renew one.
    let forbid = r#"forbid (principal, action == CyNode::Action::"token.create", resource)
        when { context has token_kind && context.token_kind == "project_manager" };"#;
    let put = cluster.request(Method::PUT, "/v1/policies/no-managers")?;
    let answer = Answer::of(put.json(&json!({ "text": forbid }))).await?;
    ensure!(answer.status == 200, "{:?}", answer.outcome());
    assert_eq!(
        outcome(&ann, &token.id, json!({})).await?,
        refused(403, "denied_by_policy")
    );
    let filter = AuditFilter {
        action: Some("token.renew".to_owned()),
        ..AuditFilter::default()
    };
    let client = cluster.orchestrator.client()?;
    let last = records(&client, &filter).await?.pop();
    assert_eq!(
        last.map(|record| (record.body.decision, record.body.rules.len())),
        Some((Some(AuditDecision::Deny), 1))
    );
    let delete = cluster.request(Method::DELETE, "/v1/policies/no-managers")?;
    ensure!(Answer::of(delete).await?.status < 300);

    let revoke = cluster.request_by(&ann, Method::DELETE, &format!("/v1/tokens/{}", token.id))?;
    ensure!(Answer::of(revoke).await?.status == 204);
    for by in [&ann, &admin] {
        assert_eq!(
            outcome(by, &token.id, json!({})).await?,
            refused(409, "token_revoked")
        );
    }
    assert_eq!(agents(&token.secret).await?, 401);
    // The administrator's own token belongs to its file.
    let tokens = Answer::of(cluster.request(Method::GET, "/v1/tokens")?).await?;
    let tokens: Value = serde_json::from_slice(&tokens.body)?;
    let own = text(&tokens["items"][0]["id"])?;
    assert_eq!(
        outcome(&admin, &own, json!({})).await?,
        refused(403, "forbidden")
    );
    cluster.worker.shut_down().await
}
