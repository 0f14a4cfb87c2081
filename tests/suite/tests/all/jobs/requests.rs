//! What a job may request.

use anyhow::{Context as _, Result};
use cynode_api::{JobId, TaskId};
use cynode_client::JobFilter;
use cynode_tests::{Answer, Http, IMAGE, Options, World};
use http::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn an_invalid_job_is_refused_with_the_field_named_and_leaves_nothing() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let http = Http::new(&worker)?;
    let whole = || {
        json!({"version": 1, "task_id": TaskId::generate(), "job_id": JobId::generate(),
            "sandbox": {"image_ref": IMAGE, "command": ["true"]}})
    };
    let with = |pointer: &str, value: Value| {
        let mut body = whole();
        let (parent, name) = pointer.rsplit_once('/').context("a pointer")?;
        body.pointer_mut(parent)
            .and_then(Value::as_object_mut)
            .context("an object")?
            .insert(name.to_owned(), value);
        Ok::<_, anyhow::Error>(body)
    };
    for (pointer, value, status, named) in [
        ("/version", json!(2), 422, "version 2"),
        (
            "/job",
            json!({"protocol_version": "1.0"}),
            400,
            "job: job_id",
        ),
        (
            "/job",
            json!({"protocol_version": "2.0"}),
            400,
            "protocol_version",
        ),
        ("/odd", json!(1), 400, "odd"),
        ("/sandbox/odd", json!(1), 400, "odd"),
        ("/job_id", json!("nonsense"), 400, "job_id"),
        ("/sandbox/command", json!([]), 400, "sandbox.command"),
        ("/sandbox/command", json!([""]), 400, "sandbox.command"),
        (
            "/sandbox/command",
            json!(["a", "b\0c"]),
            400,
            "sandbox.command[1]",
        ),
        ("/sandbox/command", json!("true"), 400, "sandbox.command"),
        (
            "/sandbox/command",
            json!(vec!["x"; 5_000]),
            413,
            "sandbox.command",
        ),
        ("/sandbox/image_ref", json!(""), 400, "sandbox.image_ref"),
        ("/sandbox/image_ref", json!("a b"), 400, "sandbox.image_ref"),
        (
            "/sandbox/env",
            json!({"CYNODE_JOB_ID": "mine"}),
            400,
            "sandbox.env.CYNODE_JOB_ID",
        ),
        ("/sandbox/env", json!({"A": "\0"}), 400, "sandbox.env.A"),
        (
            "/sandbox/timeout_seconds",
            json!(0),
            400,
            "sandbox.timeout_seconds",
        ),
        (
            "/sandbox/timeout_seconds",
            json!(10_801),
            400,
            "sandbox.timeout_seconds",
        ),
        (
            "/sandbox/limits",
            json!({"pids": 1}),
            400,
            "sandbox.limits.pids",
        ),
        (
            "/sandbox/limits",
            json!([1, 2, 3, 4, 5]),
            400,
            "sandbox.limits",
        ),
        (
            "/sandbox/network_policy",
            json!("all"),
            400,
            "network_policy",
        ),
    ] {
        let answer = Answer::of(
            http.request(Method::POST, "/v1/worker/jobs:run")
                .json(&with(pointer, value.clone())?),
        )
        .await?;
        let problem = answer.problem()?;
        assert!(
            answer.status == status && problem.detail.contains(named),
            "{pointer} = {value}: {problem:?}"
        );
    }
    let body = whole()
        .to_string()
        .replacen("\"version\":1", "\"version\":1,\"version\":1", 1);
    let doubled = Answer::of(
        http.request(Method::POST, "/v1/worker/jobs:run")
            .header("content-type", "application/json")
            .body(body),
    )
    .await?;
    assert_eq!(doubled.status, 400, "{doubled:?}");
    assert!(
        worker
            .client()?
            .list_jobs(&JobFilter::default())
            .await?
            .is_empty()
    );
    assert_eq!(
        fs_err::read_dir(world.state_dir().join("worker/jobs"))?.count(),
        0
    );
    Ok(())
}
