//! Which models jobs and sessions get, and which node.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, Job, JobCreate, JobState, PreferenceScope, ProjectCreate, SessionId, TaskCreate,
    TaskId, TokenCreate, TokenKind, UserSessionCreate,
};
use cynode_client::UserClient;
use cynode_tests::{
    models::{ModelApi, ModelServer, PROMPT_TOKENS},
    sh,
};
use serde_json::{Value, json};

use super::nodes::{Fleet, TIMEOUT, run_to_end, wait_for_node};

const KEY: &str = "inference.allowed_models";

/// A job with one step that asks a model.
fn asking(task: TaskId, models: &[&str]) -> Result<JobCreate> {
    let script = format!(
        "wget -qO- --post-data '{{\"model\":\"{}\",\"messages\":[{{\"role\":\"user\",\"content\":\"x\"}}]}}' \
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
    let agent = client
        .create_token(&TokenCreate {
            kind: TokenKind::ProjectManager,
            task_ids: vec![task],
            ..token_defaults()
        })
        .await?;
    let agent = UserClient::new(&fleet.orchestrator.url()?, &agent.token)?;

    // Nothing is set: a person's job keeps its models, an agent's has none.
    let refused = agent
        .create_job(&asking(task, &["a"])?)
        .await
        .expect_err("none");
    ensure!(refused.is(ErrorCode::ModelNotAllowed), "{refused}");
    let session = async || -> Result<String> {
        let made = client
            .sessions()
            .create_user_session(&UserSessionCreate {
                task_id: Some(task),
                session_id: Some(SessionId::generate()),
                ..Default::default()
            })
            .await?;
        let ask = sh("wget -qO- http://localhost:11434/v1/models");
        let ran = client.sessions().exec(made.session_id, &ask).await?;
        let listed: Value = serde_json::from_str(&ran.stdout).context(ran.stderr)?;
        let ids = listed["data"].as_array().into_iter().flatten();
        Ok(ids.filter_map(|model| model["id"].as_str()).collect())
    };
    assert_eq!(session().await?, "");

    let denied = agent
        .put_preference(PreferenceScope::Task, &task.to_string(), KEY, json!(["a"]))
        .await
        .expect_err("agents allow nothing");
    ensure!(denied.is(ErrorCode::DeniedByPolicy), "{denied}");
    let invalid = client
        .put_preference(PreferenceScope::System, "-", KEY, json!("a"))
        .await
        .expect_err("a list");
    ensure!(invalid.is(ErrorCode::InvalidRequest), "{invalid}");
    client
        .put_preference(PreferenceScope::System, "-", KEY, json!(["a", "b"]))
        .await?;
    assert_eq!(session().await?, "ab");
    client
        .put_preference(PreferenceScope::Task, &task.to_string(), KEY, json!(["b"]))
        .await?;
    assert_eq!(session().await?, "b");

    for by in [&client, &agent] {
        let refused = by
            .create_job(&asking(task, &["a"])?)
            .await
            .expect_err("not allowed");
        ensure!(refused.is(ErrorCode::ModelNotAllowed), "{refused}");
        let done = by.create_job(&asking(task, &["a", "b"])?).await?;
        cynode_tests::eventually("the job ends", TIMEOUT, async || {
            Ok(client.job(done.job_id).await?.state.is_final())
        })
        .await?;
        let done = client.job(done.job_id).await?;
        assert_eq!(done.state, JobState::Completed, "{done:?}");
    }
    // The sandbox of a job has the cut list, whatever its caller named.
    let sent = server.computations();
    ensure!(
        sent.iter().all(|request| request.body["model"] == "b"),
        "{sent:?}"
    );
    Ok(())
}

fn token_defaults() -> TokenCreate {
    TokenCreate {
        kind: TokenKind::User,
        user: None,
        project_id: None,
        task_ids: Vec::new(),
        job_id: None,
        session_id: None,
        version: None,
        expires_in_seconds: None,
    }
}
