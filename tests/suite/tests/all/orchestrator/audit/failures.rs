//! Invalid tokens: the first attempt of a source is recorded at once, further ones in a complete
//! count.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{AuditKind, AuditRecord};
use cynode_tests::{ControlPlane, RunningOrchestrator};
use serde_json::{Value, json};

use super::{assert_trail_intact, records_of_action};

/// Presents invalid tokens, many at once, and returns the statuses of the responses.
async fn try_tokens(
    orchestrator: &RunningOrchestrator,
    path: &str,
    tokens: impl Iterator<Item = String>,
) -> Result<Vec<u16>> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let url = if path.starts_with("/v1/nodes") {
        orchestrator.control_url()?
    } else {
        orchestrator.url()?
    };
    let tries: Vec<_> = tokens
        .map(|token| {
            tokio::spawn(
                http.post(format!("{url}{path}"))
                    .bearer_auth(token)
                    .json(&json!({}))
                    .send(),
            )
        })
        .collect();
    let mut statuses = Vec::new();
    for each in tries {
        statuses.push(each.await??.status().as_u16());
    }
    Ok(statuses)
}

/// The counts in the records of a route.
fn counts<'a>(records: &'a [AuditRecord], route: &str) -> Vec<&'a Value> {
    let of_route = records.iter().filter(|record| {
        record.body.kind == AuditKind::Authentication && record.body.detail["route"] == route
    });
    of_route
        .map(|record| &record.body.detail["count"])
        .collect()
}

#[tokio::test]
async fn many_bad_tokens_of_one_source_leave_a_few_records_that_count_them_all() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let mut orchestrator = control_plane.orchestrator("", &[]).await?;
    // More at once than may wait: the rest is refused at once, and counted too.
    let statuses = try_tokens(
        &orchestrator,
        "/v1/tasks",
        (0..80).map(|_| "cyn_nobodys".to_owned()),
    )
    .await?;
    ensure!(
        statuses.iter().all(|status| matches!(status, 401 | 429)) && statuses.contains(&401),
        "{statuses:?}"
    );
    try_tokens(
        &orchestrator,
        "/mcp",
        (0..3).map(|_| "cyn_nobodys".to_owned()),
    )
    .await?;
    try_tokens(
        &orchestrator,
        "/v1/nodes/heartbeat",
        (0..20).map(|number| format!("cyn_nobodys-{number}")),
    )
    .await?;
    let now = records_of_action(&orchestrator.client()?, "authenticate").await?;
    assert_eq!(counts(&now, "user_api"), [&json!(1)], "{now:#?}");
    assert_eq!(counts(&now, "mcp"), [&json!(1)], "{now:#?}");
    assert_eq!(
        counts(&now, "control"),
        [&json!(1); 4],
        "another number of tokens was recorded at once: {now:#?}"
    );
    ensure!(
        now.iter()
            .all(|record| record.body.detail["address"] == "127.0.0.1"),
        "{now:#?}"
    );

    // Pending counts are recorded when the orchestrator stops.
    orchestrator.stop().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let all = records_of_action(&orchestrator.client()?, "authenticate").await?;
    for (route, expected) in [("user_api", 80), ("mcp", 3), ("control", 20)] {
        assert_eq!(
            counts(&all, route)
                .iter()
                .filter_map(|count| count.as_u64())
                .sum::<u64>(),
            expected,
            "{all:#?}"
        );
    }
    let last = &all
        .iter()
        .rfind(|record| record.body.detail["route"] == "control")
        .context("a record of the control route")?
        .body
        .detail;
    assert_eq!(
        (last["tokens"].as_array().map(Vec::len), &last["address"]),
        (Some(16), &json!("127.0.0.1")),
        "{last:?}"
    );
    ensure!(
        last["first_at"].is_string() && last["last_at"].is_string(),
        "{last:?}"
    );
    assert_trail_intact(&orchestrator.client()?).await?;
    Ok(())
}
