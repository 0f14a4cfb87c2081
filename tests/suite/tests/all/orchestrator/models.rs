//! Which models jobs and sessions get, and which node.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, Job, JobCreate, JobState, PreferenceScope, ProjectCreate, SessionId, TaskCreate,
    TaskId, UserSessionCreate,
};
use cynode_client::UserClient;
use cynode_tests::{
    Answer, Http, eventually,
    models::{ModelApi, ModelServer, PROMPT_TOKENS},
    sh,
};
use http::Method;
use serde_json::{Value, json};

use super::nodes::{Fleet, TIMEOUT, run_to_end, wait_for_node};

const KEY: &str = "inference.allowed_models";

/// A job with one step that asks a model.
fn asking(task: TaskId, models: &[&str]) -> Result<JobCreate> {
    let script = format!(
        "wget -Y off -qO- --post-data '{{\"model\":\"{}\",\"messages\":[{{\"role\":\"user\",\"content\":\"x\"}}]}}' \
         http://localhost:11434/v1/chat/completions",
        models.last().copied().unwrap_or_default()
    );
    Ok(serde_json::from_value(json!({
        "limits": {"memory_bytes": 64 << 20, "disk_bytes": 32 << 20},
        "job": {
            "protocol_version": "1.0", "job_id": cynode_api::JobId::generate(), "task_id": task,
            "constraints": {"max_runtime_seconds": 60, "max_output_bytes": 100_000},
            "inference": {"allowed_models": models},
            "steps": [{"type": "run_command", "args": {"argv": ["/bin/sh", "-c", script]}}],
        },
    }))?)
}

async fn task(client: &UserClient) -> Result<TaskId> {
    let project = client
        .create_project(&ProjectCreate {
            name: "models".to_owned(),
            ..Default::default()
        })
        .await?;
    let request = TaskCreate {
        name: "ask".to_owned(),
        project_id: Some(project.id),
        ..Default::default()
    };
    Ok(client.create_task(&request).await?.id)
}

fn failure(job: &Job) -> (JobState, &str, &str) {
    let error = job.error.as_ref();
    (
        job.state,
        error.map_or("", |error| error.code.as_str()),
        error.map_or("", |error| error.detail.as_str()),
    )
}

// part of: CYNAI.SBAGNT.JobInferenceModel, CYNAI.SANDBX.NodeLocalInference
#[tokio::test]
async fn a_job_goes_to_a_node_that_serves_one_of_its_models_or_fails_with_the_reason() -> Result<()>
{
    let fleet = Fleet::new().await?;
    let server = ModelServer::start(ModelApi::Ollama, &["llama3.2:latest"]).await?;
    let inference = format!("{{ url = {:?} }}", server.url());
    let _worker = fleet
        .node_with("near", |options| options.set("inference", &inference))
        .await?;
    let client = fleet.orchestrator.client()?;
    let node = wait_for_node(&client, "near", |node| {
        let inference = node.capability.inference.as_ref();
        inference.is_some_and(|inference| !inference.models.is_empty())
    })
    .await?;
    let inference = node.capability.inference.context("a model server")?;
    assert_eq!(inference.models, ["llama3.2:latest"]);
    let shown = fleet.run(&["node", "show", "near"])?.success()?;
    ensure!(shown.contains("ollama: llama3.2:latest"), "{shown}");

    let task = task(&client).await?;
    let done = run_to_end(&client, &asking(task, &["absent", "llama3.2"])?).await?;
    assert_eq!(done.state, JobState::Completed, "{done:?}");
    let result = done.sba_result.context("a result")?;
    assert_eq!(result["usage"]["prompt_tokens"], PROMPT_TOKENS, "{result}");

    let refused = run_to_end(&client, &asking(task, &["absent"])?).await?;
    let (state, code, detail) = failure(&refused);
    assert_eq!((state, code), (JobState::Failed, "inference_unavailable"));
    ensure!(
        detail.contains("near: serves none of \"absent\""),
        "{detail}"
    );
    let mut elsewhere = asking(task, &["llama3.2"])?;
    let spec = elsewhere.job.as_mut().context("a job")?;
    let inference = spec.inference.as_mut().context("models")?;
    inference.source = Some(cynode_api::sba::InferenceSource::ApiEgress);
    let refused = client
        .create_job(&elsewhere)
        .await
        .expect_err("no provider");
    ensure!(
        refused.to_string().contains("job.inference.source"),
        "{refused}"
    );

    // The server loses its model, and the node says so.
    server.set_models(&[]);
    wait_for_node(&client, "near", |node| {
        let inference = node.capability.inference.as_ref();
        inference.is_some_and(|inference| inference.models.is_empty())
    })
    .await?;
    let refused = run_to_end(&client, &asking(task, &["llama3.2"])?).await?;
    assert_eq!(failure(&refused).1, "inference_unavailable");
    Ok(())
}

/// The answer to a tool call of an agent.
async fn tool(fleet: &Fleet, token: &str, name: &str, arguments: &Value) -> Result<Value> {
    let call = json!({
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": name, "arguments": arguments},
    });
    let request = Http::to(&fleet.orchestrator.url()?, token)?
        .request(Method::POST, "/mcp")
        .header("accept", "application/json, text/event-stream")
        .json(&call);
    let answer: Value = serde_json::from_slice(&Answer::of(request).await?.body)?;
    let result = &answer["result"]["structuredContent"];
    ensure!(result.is_object(), "{answer}");
    Ok(result.clone())
}

/// The models that a new session sees.
async fn models_of_session(client: &UserClient, task: TaskId) -> Result<String> {
    let made = client
        .sessions()
        .create_user_session(&UserSessionCreate {
            task_id: Some(task),
            session_id: Some(SessionId::generate()),
            ..Default::default()
        })
        .await?;
    let ask = sh("wget -Y off -qO- http://localhost:11434/v1/models");
    let ran = client.sessions().exec(made.session_id, &ask).await?;
    let listed: Value = serde_json::from_str(&ran.stdout).context(ran.stderr)?;
    let ids = listed["data"].as_array().into_iter().flatten();
    Ok(ids.filter_map(|model| model["id"].as_str()).collect())
}

// invariant: fail-closed
#[tokio::test]
async fn people_allow_models_and_agents_do_not() -> Result<()> {
    let fleet = Fleet::new().await?;
    let server = ModelServer::start(ModelApi::Openai, &["a", "b"]).await?;
    let inference = format!("{{ url = {:?} }}", server.url());
    let _worker = fleet
        .node_with("near", |options| options.set("inference", &inference))
        .await?;
    let client = fleet.orchestrator.client()?;
    let task = task(&client).await?;
    let token = client
        .create_token(&serde_json::from_value(json!({
            "kind": "project_manager", "task_ids": [task],
        }))?)
        .await?
        .token;
    let by_agent = async |models: &[&str]| -> Result<Value> {
        let request = serde_json::to_value(asking(task, models)?)?;
        let arguments = json!({"task_id": task, "job": request["job"]});
        tool(&fleet, &token, "db.job.create", &arguments).await
    };

    // Nothing is set: a person's job keeps its models, an agent's and sessions have none.
    let refused = by_agent(&["a"]).await?;
    assert_eq!(refused["code"], "model_not_allowed", "{refused}");
    assert_eq!(models_of_session(&client, task).await?, "");
    let own = run_to_end(&client, &asking(task, &["b"])?).await?;
    assert_eq!(own.state, JobState::Completed, "{own:?}");
    let wider = json!({"task_id": task, "key": KEY, "value": ["a"]});
    let denied = tool(&fleet, &token, "db.preference.set", &wider).await?;
    assert_eq!(denied["code"], "denied_by_policy", "{denied}");

    let invalid = client
        .put_preference(PreferenceScope::System, "-", KEY, json!("a"))
        .await
        .expect_err("a list");
    ensure!(invalid.is(ErrorCode::InvalidRequest), "{invalid}");
    client
        .put_preference(PreferenceScope::System, "-", KEY, json!(["a", "b"]))
        .await?;
    assert_eq!(models_of_session(&client, task).await?, "ab");
    client
        .put_preference(PreferenceScope::Task, &task.to_string(), KEY, json!(["b"]))
        .await?;
    assert_eq!(models_of_session(&client, task).await?, "b");

    let refused = client.create_job(&asking(task, &["a"])?).await;
    let refused = refused.expect_err("not allowed");
    ensure!(refused.is(ErrorCode::ModelNotAllowed), "{refused}");
    let refused = by_agent(&["a"]).await?;
    assert_eq!(refused["code"], "model_not_allowed", "{refused}");
    // The list is cut before the node sees it, whatever its caller named.
    let cut = run_to_end(&client, &asking(task, &["b", "a"])?).await?;
    let result = cut.sba_result.context("a result")?;
    ensure!(cut.state == JobState::Failed, "{result}");
    let started = by_agent(&["a", "b"]).await?;
    let id = serde_json::from_value(started["job_id"].clone())?;
    eventually("the agent's job ends", TIMEOUT, async || {
        Ok(client.job(id).await?.state.is_final())
    })
    .await?;
    let done = client.job(id).await?;
    assert_eq!(done.state, JobState::Completed, "{done:?}");
    let sent = server.computations();
    ensure!(
        sent.iter().all(|request| request.body["model"] == "b"),
        "{sent:?}"
    );
    Ok(())
}
