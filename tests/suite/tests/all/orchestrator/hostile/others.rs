//! Other users' things don't exist, on any route.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use cynode_tests::Answer;
use http::Method;
use serde_json::{Value, json};

use super::{SOME_ID, database_state, good, insert_git_objects};
use crate::{
    api::code_of,
    orchestrator::cluster::{Cluster, session, text},
};

/// Routes that check for an administrator first, whatever they name.
const FOR_ADMINISTRATORS: [&str; 10] = [
    "GET /v1/policies/{id}",
    "PUT /v1/policies/{id}",
    "DELETE /v1/policies/{id}",
    "PATCH /v1/images/{id}",
    "DELETE /v1/images/{id}",
    "POST /v1/nodes/{id}/drain",
    "PUT /v1/settings/{key}",
    "GET /v1/nodes/{id}",
    "GET /v1/images/{id}",
    "GET /v1/settings/{key}",
];

/// Everything that a user can own, by the type of its id.
async fn resources(
    cluster: &Cluster,
    token: &str,
    user: &str,
) -> Result<BTreeMap<&'static str, String>> {
    let project = cluster
        .make(token, "/v1/projects", &json!({"name": "hers"}))
        .await?;
    let task = cluster
        .make(
            token,
            "/v1/tasks",
            &json!({"name": "hers", "project_id": project["id"]}),
        )
        .await?;
    let mut body = session();
    body["task_id"] = task["id"].clone();
    let session = cluster.session(token, &body).await?;
    let exec =
        json!({"argv": ["cat"], "timeout_ms": 600_000, "background": true, "stdin_open": true});
    let exec = cluster
        .make(token, &format!("/v1/sessions/{session}/exec"), &exec)
        .await?;
    let job = cluster
        .request_by(token, Method::POST, "/v1/jobs")?
        .header("prefer", "wait=60")
        .json(&json!({"command": ["echo", "hers"], "task_id": task["id"]}));
    let job: Value = serde_json::from_slice(&Answer::of(job).await?.body)?;
    ensure!(job["state"] == "completed", "{job}");
    let task = text(&task["id"])?;
    let artifact = Answer::of(
        cluster
            .request_by(
                token,
                Method::PUT,
                &format!("/v1/tasks/{task}/artifacts/a/b"),
            )?
            .body("hers"),
    )
    .await?;
    let artifact: Value = serde_json::from_slice(&artifact.body)?;
    let made = cluster
        .make(token, "/v1/tokens", &json!({"kind": "user"}))
        .await?;
    let group = cluster
        .make(
            &cluster.orchestrator.token()?,
            "/v1/groups",
            &json!({"name": "hers", "members": ["ann"]}),
        )
        .await?;
    insert_git_objects(cluster, &text(&project["id"])?, &task)?;
    Ok(BTreeMap::from([
        ("CredentialId", SOME_ID.to_owned()),
        ("RepositoryId", SOME_ID.to_owned()),
        ("PromotionId", SOME_ID.to_owned()),
        ("ProjectId", text(&project["id"])?),
        ("TaskId", task),
        ("SessionId", session),
        ("ExecId", text(&exec["exec_id"])?),
        ("JobId", text(&job["job_id"])?),
        ("ArtifactId", text(&artifact["id"])?),
        ("TokenId", text(&made["id"])?),
        ("GroupId", text(&group["id"])?),
        ("UserId", user.to_owned()),
    ]))
}

#[tokio::test]
async fn resources_of_others_are_not_found() -> Result<()> {
    let cluster = Cluster::start().await?;
    let (ann, hers) = cluster.user("ann").await?;
    let (_, his) = cluster.user("bob").await?;
    let things = resources(&cluster, &hers, &ann).await?;
    let before = database_state(&cluster)?;
    let document = cynode_orchestrator::openapi();
    let mut tried = 0;
    for (path, operations) in document["paths"].as_object().context("paths")? {
        for (method, operation) in operations.as_object().context("operations")? {
            let route = format!("{} {path}", method.to_uppercase());
            let parameters = operation["parameters"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            if !path.contains('{') || FOR_ADMINISTRATORS.contains(&route.as_str()) {
                continue;
            }
            // Preferences belong to four kinds of things.
            let scopes = if path.contains("{scope}") {
                vec!["TaskId", "ProjectId", "UserId", "GroupId"]
            } else {
                vec![""]
            };
            for scope in scopes {
                let mut address = path.replace("{path}", "a/b").replace("{key}", "some.key");
                if !scope.is_empty() {
                    address = address
                        .replace("{scope}", &scope.trim_end_matches("Id").to_lowercase())
                        .replace("{scope_id}", &things[scope]);
                }
                for parameter in parameters
                    .iter()
                    .filter(|parameter| parameter["in"] == "path")
                {
                    let kind = parameter["schema"]["$ref"]
                        .as_str()
                        .and_then(|name| name.rsplit('/').next())
                        .unwrap_or_default();
                    if let Some(id) = things.get(kind) {
                        address =
                            address.replace(&format!("{{{}}}", text(&parameter["name"])?), id);
                    }
                }
                ensure!(
                    !address.contains('{'),
                    "{address}: the owner is unknown to this test"
                );
                let mut request =
                    cluster.request_by(&his, method.to_uppercase().parse()?, &address)?;
                if let Some(body) = good(&route) {
                    request = request.json(&body);
                }
                let answer = Answer::of(request).await?;
                tried += 1;
                assert_eq!(answer.status, 404, "{route} as {address}: {answer:?}");
                if method != "head" {
                    code_of(&answer)?;
                }
            }
        }
    }
    ensure!(tried > 40, "only {tried} were tried");
    // References in bodies and queries.
    for (path, body) in [
        (
            "/v1/tasks",
            json!({"name": "his", "project_id": things["ProjectId"]}),
        ),
        (
            "/v1/tokens",
            json!({"kind": "project_manager", "project_id": things["ProjectId"]}),
        ),
        (
            "/v1/tokens",
            json!({"kind": "project_analyst", "task_ids": [things["TaskId"]]}),
        ),
        (
            "/v1/tokens",
            json!({
                "kind": "sandbox",
                "task_ids": [things["TaskId"]],
                "session_id": things["SessionId"]
            }),
        ),
        ("/v1/tokens", json!({"kind": "user", "user": "ann"})),
        ("/v1/tokens", json!({"kind": "user", "user": "nobody"})),
        (
            "/v1/jobs",
            json!({"command": ["true"], "task_id": things["TaskId"]}),
        ),
        ("/v1/sessions", json!({"task_id": things["TaskId"]})),
    ] {
        let answer = Answer::of(cluster.request_by(&his, Method::POST, path)?.json(&body)).await?;
        assert_eq!(
            (answer.status, code_of(&answer)?.as_str()),
            (404, "not_found"),
            "{path} {body}: {answer:?}"
        );
    }
    for (path, body) in [
        (
            "/v1/projects",
            json!({"name": "his", "id": things["ProjectId"]}),
        ),
        ("/v1/tasks", json!({"name": "his", "id": things["TaskId"]})),
        (
            "/v1/jobs",
            json!({"command": ["echo", "hers"], "job_id": things["JobId"]}),
        ),
        ("/v1/sessions", json!({"session_id": things["SessionId"]})),
    ] {
        let answer = Answer::of(cluster.request_by(&his, Method::POST, path)?.json(&body)).await?;
        code_of(&answer)?;
        assert_eq!(answer.status, 409, "{path} {body}: {answer:?}");
    }
    for path in ["/v1/artifacts?task_id=", "/v1/preferences?task_id="] {
        let answer = Answer::of(cluster.request_by(
            &his,
            Method::GET,
            &format!("{path}{}", things["TaskId"]),
        )?)
        .await?;
        assert_eq!(
            (answer.status, code_of(&answer)?.as_str()),
            (404, "not_found"),
            "{path}"
        );
    }
    // A list filtered by them is empty.
    for path in [
        "/v1/tasks?project_id=",
        "/v1/jobs?task_id=",
        "/v1/sessions?task_id=",
        "/v1/events?task_id=",
    ] {
        let id = &things[if path.contains("project_id") {
            "ProjectId"
        } else {
            "TaskId"
        }];
        let answer =
            Answer::of(cluster.request_by(&his, Method::GET, &format!("{path}{id}"))?).await?;
        assert_eq!(
            (
                answer.status,
                serde_json::from_slice::<Value>(&answer.body)?["items"].clone()
            ),
            (200, json!([])),
            "{path}"
        );
    }
    assert_eq!(database_state(&cluster)?, before);
    Ok(())
}
