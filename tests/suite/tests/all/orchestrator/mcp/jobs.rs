//! Jobs with a specification, as agents start them and learn how they ended.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{McpAgent, task};
use crate::orchestrator::cluster::{Cluster, text};

fn specification(script: &str) -> Value {
    json!({
        "protocol_version": "1.0",
        "constraints": {"max_runtime_seconds": 60, "max_output_bytes": 65_536},
        "steps": [
            {"type": "write_file", "args": {"path": "a", "content": "text\n"}},
            {"type": "run_command", "id": "last", "args": {"argv": [script], "shell": true}},
        ],
    })
}

/// Waits for the final event of a job, as an agent does.
async fn final_event(agent: &McpAgent<'_>, task: &str, job: &str) -> Result<Value> {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let mut after = json!(null);
    loop {
        let mut arguments = json!({"task_id": task, "wait_ms": 5_000});
        if !after.is_null() {
            arguments["after"] = after;
        }
        let page = agent.call_ok("events.list", arguments).await?;
        let events = page["items"].as_array().context("items")?;
        let is_final = |event: &&Value| {
            event["job_id"] == job
                && !matches!(event["state"].as_str(), Some("accepted" | "in_progress"))
        };
        if let Some(event) = events.iter().find(is_final) {
            return Ok(event.clone());
        }
        after = page["next_cursor"].clone();
        ensure!(
            std::time::Instant::now() < deadline,
            "no final event of {job}"
        );
    }
}

// proves: CYNAI.SBAGNT.JobLifecycle with
// a_running_job_is_followed_step_by_step and a_job_goes_on_while_its_worker_is_gone
// part of: CYNAI.SBAGNT.WorkerApiIntegration, CYNAI.SBAGNT.FailureCodes
// invariant: jobs
#[tokio::test]
async fn managers_and_analysts_learn_how_a_job_ended_and_why() -> Result<()> {
    let cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "by tools").await?;
    let manager = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?;
    let analyst = McpAgent::with_token_for(&cluster, &admin, "project_analyst", &[&task]).await?;
    let other = self::task(&cluster, &admin, "another").await?;
    let stranger = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&other]).await?;
    for (script, state, code) in [
        ("cat a; echo x > /job/artifacts/x", "completed", Value::Null),
        ("cat a; exit 3", "failed", json!("step_failed")),
        (
            "head -c 70000 /dev/zero",
            "failed",
            json!("constraint_violation"),
        ),
    ] {
        let made = manager
            .call_ok(
                "db.job.create",
                json!({"task_id": task, "job": specification(script)}),
            )
            .await?;
        let job = text(&made["job_id"])?;
        for agent in [&manager, &analyst] {
            let event = final_event(agent, &task, &job).await?;
            assert_eq!(
                (
                    &event["state"],
                    event.get("failure_code").unwrap_or(&Value::Null)
                ),
                (&json!(state), &code),
                "{event}"
            );
            assert_eq!(event["result_ref"], format!("/v1/jobs/{job}"));
            let arguments = json!({"task_id": task, "job_id": job});
            let shown = agent.call_ok("db.job.get", arguments.clone()).await?;
            assert_eq!(
                (&shown["state"], &shown["sba_result"]["failure_code"]),
                (&json!(state), &code),
                "{shown}"
            );
            assert_eq!(
                shown["sba_result"]["steps"].as_array().map(Vec::len),
                Some(2)
            );
            assert_eq!(shown["reported_by"], "worker");
            // What a model reads says it too.
            let answer = agent.call("db.job.get", arguments).await?;
            let words = text(&answer["result"]["content"][0]["text"])?;
            let expected = code.as_str().unwrap_or("all successful");
            assert!(words.contains(expected), "{expected} is not in {words}");
        }
        let refused = json!({"task_id": other, "job_id": job});
        assert_eq!(
            stranger.call_refused("db.job.get", refused).await?.0,
            "job_not_found"
        );
        if code.is_null() {
            let kept = json!({"task_id": task, "path": format!("jobs/{job}/x")});
            let kept = analyst.call_ok("artifact.get", kept).await?;
            assert_eq!(kept["content"], "x\n");
        }
    }
    // All that is wrong with a specification is told at once.
    let mut broken = specification("true");
    broken["steps"][0]["args"] = json!({"path": 1, "content": "", "owner": "me"});
    let answer = manager
        .call("db.job.create", json!({"task_id": task, "job": broken}))
        .await?;
    let failure = &answer["result"]["structuredContent"];
    for path in ["job.steps[0].args.path", "job.steps[0].args.owner"] {
        assert!(
            failure["message"]
                .as_str()
                .is_some_and(|text| text.contains(path)),
            "{failure}"
        );
    }
    analyst
        .assert_unknown(
            "db.job.create",
            json!({"task_id": task, "job": specification("true")}),
        )
        .await
}
