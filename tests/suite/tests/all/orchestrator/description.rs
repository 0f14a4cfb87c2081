//! The user API's description.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use cynode_tests::{ControlPlane, repository};
use serde_json::Value;

/// `CYNODE_REGENERATE=1` rewrites the file instead of comparing.
#[tokio::test]
async fn the_served_user_api_document_is_the_checked_in_one() -> Result<()> {
    let path = repository().join("openapi/orchestrator.json");
    let current = serde_json::to_string_pretty(&cynode_orchestrator::openapi())? + "\n";
    if std::env::var_os("CYNODE_REGENERATE").is_some_and(|value| value == "1") {
        fs_err::write(&path, &current)?;
    }
    let checked_in = fs_err::read_to_string(&path)?;
    assert!(
        checked_in == current,
        "openapi/orchestrator.json is not what the code describes; if the change is meant, run \
         this test with CYNODE_REGENERATE=1"
    );

    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let served = reqwest::Client::builder()
        .no_proxy()
        .build()?
        .get(format!("{}/openapi.json", orchestrator.url()?))
        .send()
        .await?
        .text()
        .await?;
    assert_eq!(
        serde_json::from_str::<Value>(&served)?,
        serde_json::from_str::<Value>(&checked_in)?
    );

    // Every operation documents its refusals, and operation ids are unique.
    let document: Value = serde_json::from_str(&checked_in)?;
    let mut names = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().context("paths")? {
        for (method, operation) in operations.as_object().context("operations")? {
            assert!(
                operation["responses"]["default"].is_object(),
                "{method} {path} describes no refusal"
            );
            assert!(
                names.insert(operation["operationId"].to_string()),
                "{method} {path} reuses an operation id"
            );
        }
    }
    Ok(())
}

/// Calls on a session have the same description on both sides, as far as they are the same: their
/// input, and their successful output. The gate adds its flags to the response of an import.
#[test]
fn forwarded_calls_are_described_like_those_of_the_worker() -> Result<()> {
    let (ours, theirs) = (cynode_orchestrator::openapi(), cynode_worker::openapi());
    let mut compared = 0;
    for (path, operations) in theirs["paths"].as_object().context("paths")? {
        let Some(below) = path
            .strip_prefix("/v1/worker/sessions/{id}/")
            // The gate sends patches in another form than its callers do.
            .filter(|below| !["end", "resume", "export", "import", "files:patch"].contains(below))
        else {
            continue;
        };
        for (method, operation) in operations.as_object().context("operations")? {
            let passed_on = &ours["paths"][format!("/v1/sessions/{{id}}/{below}")][method];
            let names = |operation: &Value| -> BTreeSet<String> {
                operation["parameters"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(|parameter| format!("{} in {}", parameter["name"], parameter["in"]))
                    .collect()
            };
            assert_eq!(names(passed_on), names(operation), "{method} {path}");
            assert_eq!(
                passed_on["requestBody"]["content"], operation["requestBody"]["content"],
                "{method} {path}"
            );
            let good = |operation: &Value| -> Vec<(String, Value)> {
                let responses = operation["responses"].as_object().into_iter().flatten();
                responses
                    .filter(|(status, _)| status.starts_with(['1', '2']))
                    .map(|(status, response)| (status.clone(), response["content"].clone()))
                    .collect()
            };
            assert_eq!(good(passed_on), good(operation), "{method} {path}");
            compared += 1;
        }
    }
    assert!(compared > 15, "only {compared} were compared");
    Ok(())
}
