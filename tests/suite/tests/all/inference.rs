//! Requests to models, from a process in a sandbox to a scripted model server and back.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, ExecResult, JobRun, JobState, SessionId, sba::JobSpec};
use cynode_client::SessionClient;
use cynode_tests::{
    Options, World, eventually, job,
    models::{COMPLETION_TOKENS, ModelApi, ModelReply, ModelServer, PROMPT_TOKENS},
    on_every_runtime, session, sh,
};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(60);
const MODEL: &str = "llama3.2";

/// Shell functions: `get PATH`, `post PATH BODY` and `request METHOD PATH BODY` print an answer with
/// its head. The input of `nc` stays open: its end would end the request.
const FUNCTIONS: &str = r#"
request() {
    pipe=$(mktemp -u) && mkfifo "$pipe"
    timeout 30 nc 127.0.0.1 11434 <"$pipe" &
    exec 3>"$pipe"
    printf '%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %s\r\n\r\n%s' \
        "$1" "$2" "${#3}" "$3" >&3
    wait $!
    exec 3>&-
}
get() { request GET "$1" ''; }
post() { request POST "$1" "$2"; }
chat() { post /api/chat "{\"model\":\"$1\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}"; }
openai() { post /v1/chat/completions "{\"model\":\"$1\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"stream\":true}"; }
"#;

/// Options of a worker with this model server.
fn options(server: &ModelServer) -> Options {
    Options::default().set("inference", &format!("{{ url = {:?} }}", server.url()))
}

async fn run(client: &SessionClient, id: SessionId, text: &str) -> Result<ExecResult> {
    Ok(client.exec(id, &sh(&format!("{FUNCTIONS}{text}"))).await?)
}

/// The status and the body of an answer.
async fn ask(client: &SessionClient, id: SessionId, text: &str) -> Result<(u16, String)> {
    let printed = run(client, id, text).await?;
    let (head, body) = printed
        .stdout
        .split_once("\r\n\r\n")
        .with_context(|| format!("no answer: {printed:?}"))?;
    let status = head.split(' ').nth(1).context("a status")?.parse()?;
    Ok((status, body.to_owned()))
}

async fn refusal(client: &SessionClient, id: SessionId, text: &str) -> Result<(u16, String)> {
    let (status, body) = ask(client, id, text).await?;
    let body: Value = serde_json::from_str(&body).with_context(|| body.clone())?;
    ensure!(
        body["remedy"].is_string() && body["request_id"].is_string(),
        "{body}"
    );
    Ok((status, body["code"].as_str().unwrap_or_default().to_owned()))
}

on_every_runtime!(a_sandbox_uses_the_models_that_it_may_and_no_others);

// proves: REQ-SANDBX-0106, CYNAI.SANDBX.NodeLocalInference
async fn a_sandbox_uses_the_models_that_it_may_and_no_others(world: World) -> Result<()> {
    let server = ModelServer::start(ModelApi::Ollama, &["llama3.2:latest", "other"]).await?;
    let worker = world.worker(&options(&server)).await?;
    let client = worker.client()?;
    let mut request = session();
    request.allowed_models = vec![MODEL.to_owned()];
    let id = client.create_session(&request).await?.session_id;
    let none = client.create_session(&session()).await?.session_id;

    let (status, body) = ask(&client, id, "chat llama3.2").await?;
    ensure!(
        status == 200 && body.contains("short ") && body.contains("\"done\":true"),
        "{body}"
    );
    let (status, body) = ask(&client, id, "openai llama3.2:latest").await?;
    ensure!(status == 200 && body.contains("data: [DONE]"), "{body}");
    // This wget does not know NO_PROXY.
    let wget = "wget -Y off -qO- http://localhost:11434/api/tags";
    let listed: Value = serde_json::from_str(&run(&client, id, wget).await?.stdout)?;
    assert_eq!(
        listed["models"].as_array().map(Vec::len),
        Some(1),
        "{listed}"
    );
    assert_eq!(listed["models"][0]["name"], "llama3.2:latest");

    let not_allowed = (403, "model_not_allowed".to_owned());
    assert_eq!(refusal(&client, id, "chat other").await?, not_allowed);
    assert_eq!(refusal(&client, none, "chat llama3.2").await?, not_allowed);
    let (_, listed) = ask(&client, none, "get /v1/models").await?;
    ensure!(!listed.contains("llama3.2"), "{listed}");
    for text in [
        "post /api/pull '{\"model\":\"llama3.2\"}'",
        "request DELETE /api/delete '{\"model\":\"llama3.2\"}'",
        "get '/api/tags?x=1'",
    ] {
        assert_eq!(
            refusal(&client, id, text).await?,
            (404, "not_found".to_owned()),
            "{text}"
        );
    }
    let sent = server.computations();
    assert_eq!(sent.len(), 2, "{sent:?}");
    assert_eq!(sent[1].body["model"], MODEL);

    drop(server);
    let away = refusal(&client, id, "chat llama3.2").await?;
    assert_eq!(away, (503, "inference_unavailable".to_owned()));
    Ok(())
}

// invariant: bounded
#[tokio::test]
async fn a_stream_arrives_piece_by_piece_and_a_client_that_hangs_up_ends_it() -> Result<()> {
    let world = World::new()?;
    let server = ModelServer::start(ModelApi::Ollama, &[MODEL]).await?;
    let worker = world.worker(&options(&server)).await?;
    let client = worker.client()?;
    let mut request = session();
    request.allowed_models = vec![MODEL.to_owned()];
    let id = client.create_session(&request).await?.session_id;

    // The first piece is there, although the server never sends another.
    server.reply(ModelReply::Stall);
    let text =
        "openai llama3.2 >/tmp/out & until grep one /tmp/out; do sleep 0.1; done; killall nc";
    let first = run(&client, id, text).await?;
    ensure!(first.stdout.contains("one "), "{first:?}");
    eventually("the server sees the end", TIMEOUT, async || {
        Ok(server.abandoned() == 1 && server.open() == 0)
    })
    .await?;

    // Before the answer begins.
    server.reply(ModelReply::Silence);
    let mut silent = sh(&format!("{FUNCTIONS}chat llama3.2"));
    (silent.background, silent.timeout_ms) = (true, 0);
    client.exec_background(id, &silent).await?;
    eventually("the server computes", TIMEOUT, async || {
        Ok(server.open() == 1)
    })
    .await?;
    run(&client, id, "killall nc").await?;
    eventually("the server sees the end", TIMEOUT, async || {
        Ok(server.abandoned() == 2 && server.open() == 0)
    })
    .await?;

    // With the sandbox.
    server.reply(ModelReply::Endless);
    client.exec_background(id, &silent).await?;
    eventually("the server computes", TIMEOUT, async || {
        Ok(server.open() == 1)
    })
    .await?;
    client
        .end_session(id, &cynode_api::SessionEnd::default())
        .await?;
    eventually("the server sees the end", TIMEOUT, async || {
        Ok(server.abandoned() == 3 && server.open() == 0)
    })
    .await
}

// invariant: no-starvation
#[tokio::test]
async fn a_sandbox_has_so_many_requests_at_once_and_others_have_their_own() -> Result<()> {
    let world = World::new()?;
    let server = ModelServer::start(ModelApi::Ollama, &[MODEL]).await?;
    let limits = format!(
        "{{ url = {:?}, max_requests_per_sandbox = 2, idle_seconds = 3 }}",
        server.url()
    );
    let worker = world
        .worker(&Options::default().set("inference", &limits))
        .await?;
    let client = worker.client()?;
    let mut request = session();
    request.allowed_models = vec![MODEL.to_owned()];
    let greedy = client.create_session(&request).await?.session_id;
    request.session_id = SessionId::generate();
    let other = client.create_session(&request).await?.session_id;
    server.reply(ModelReply::Silence);
    server.reply(ModelReply::Silence);
    let mut open = sh(&format!("{FUNCTIONS}chat llama3.2 & chat llama3.2 & wait"));
    (open.background, open.timeout_ms) = (true, 0);
    client.exec_background(greedy, &open).await?;
    eventually("two requests are in flight", TIMEOUT, async || {
        Ok(server.open() == 2)
    })
    .await?;
    let refused = refusal(&client, greedy, "chat llama3.2").await?;
    assert_eq!(refused, (429, "too_many_requests".to_owned()));
    assert_eq!(ask(&client, other, "chat llama3.2").await?.0, 200);

    server.reply(ModelReply::Stall);
    let (status, body) = ask(&client, other, "openai llama3.2").await?;
    ensure!(
        status == 200 && body.contains("has sent nothing for 3 s"),
        "{body}"
    );
    Ok(())
}

/// A job with steps that run shell scripts, and models.
fn steps(models: &[&str], source: Option<&str>, scripts: &[&str]) -> Result<JobRun> {
    let mut request = job("");
    request.sandbox.command.clear();
    let steps: Vec<Value> = scripts
        .iter()
        .map(|text| {
            let argv = json!(["/bin/sh", "-c", format!("{FUNCTIONS}{text}")]);
            json!({"type": "run_command", "args": {"argv": argv}})
        })
        .collect();
    let mut inference = json!({"allowed_models": models});
    if let Some(source) = source {
        inference["source"] = json!(source);
    }
    let specification = json!({
        "protocol_version": "1.0",
        "job_id": request.job_id,
        "task_id": request.task_id,
        "constraints": {"max_runtime_seconds": 100, "max_output_bytes": 1_048_576},
        "inference": inference,
        "steps": steps,
    });
    request.job = Some(Box::new(JobSpec::parse(
        specification.to_string().as_bytes(),
    )?));
    Ok(request)
}

// part of: CYNAI.SBAGNT.JobInferenceModel, CYNAI.SBAGNT.WorkerProxies
// invariant: fail-closed
#[tokio::test]
async fn a_job_uses_its_own_models_and_its_result_has_the_tokens_that_the_node_saw() -> Result<()> {
    let world = World::new()?;
    let server = ModelServer::start(ModelApi::Openai, &[MODEL, "other"]).await?;
    let worker = world.worker(&options(&server)).await?;
    let client = worker.client()?;
    let done = client
        .run_job(&steps(
            &[MODEL, "absent"],
            None,
            &[
                "openai llama3.2",
                "openai other",
                "openai llama3.2; openai absent",
            ],
        )?)
        .await?;
    assert_eq!(done.state, JobState::Completed, "{done:?}");
    let result = done.sba_result.context("a result")?;
    assert_eq!(
        result["usage"],
        json!({
            "model": MODEL, "requests": 2, "prompt_tokens": 2 * PROMPT_TOKENS,
            "completion_tokens": 2 * COMPLETION_TOKENS, "duration_ms": result["usage"]["duration_ms"],
        })
    );
    let output = |index: usize| {
        result["steps"][index]["stdout"]
            .as_str()
            .unwrap_or_default()
    };
    ensure!(output(0).contains("[DONE]"), "{result}");
    ensure!(output(1).contains("model_not_allowed"), "{result}");
    ensure!(output(2).contains("inference_unavailable"), "{result}");

    let without = client.run_job(&steps(&[MODEL], None, &["true"])?).await?;
    let result = without.sba_result.context("a result")?;
    assert_eq!(result.get("usage"), None, "{result}");

    for (models, source, code) in [
        (&["absent"][..], None, ErrorCode::InferenceUnavailable),
        (&[MODEL][..], Some("api_egress"), ErrorCode::InvalidRequest),
    ] {
        let refused = client.run_job(&steps(models, source, &["true"])?).await;
        let refused = refused.expect_err("refused");
        ensure!(refused.is(code), "{refused}");
    }
    let plain = world_without_models().await?;
    ensure!(plain.contains("has no model server"), "{plain}");
    Ok(())
}

/// The refusal of a job with models on a node without a model server.
async fn world_without_models() -> Result<String> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let refused = worker
        .client()?
        .run_job(&steps(&[MODEL], None, &["true"])?)
        .await;
    let refused = refused.expect_err("refused");
    ensure!(refused.is(ErrorCode::InferenceUnavailable), "{refused}");
    Ok(refused.to_string())
}

// invariant: fail-closed
#[tokio::test]
async fn a_model_server_that_others_can_reach_is_refused_unless_it_is_allowed_by_name() -> Result<()>
{
    let world = World::new()?;
    let server = ModelServer::start_at("0.0.0.0:0", ModelApi::Ollama, &[MODEL]).await?;
    let url = format!("http://127.0.0.1:{}", server.address().port());
    let check = |inference: &str| -> Result<Value> {
        let config = world.config(&Options::default().set("inference", inference))?;
        let ran = world
            .command()?
            .args(["doctor", "--worker-only", "--output", "json", "--config"])
            .arg(config)
            .output()?;
        let report: Value = serde_json::from_slice(&ran.stdout)
            .with_context(|| String::from_utf8_lossy(&ran.stderr).into_owned())?;
        let checks = report["checks"].as_array().context("checks")?;
        let found = checks.iter().find(|check| check["name"] == "model server");
        found.cloned().context("a check of the model server")
    };
    let found = check(&format!("{{ url = {url:?} }}"))?;
    assert_eq!(found["status"], "problem", "{found}");
    ensure!(found["detail"].to_string().contains("0.0.0.0"), "{found}");
    let found = check(&format!(
        "{{ url = {url:?}, allow_beyond_loopback = true }}"
    ))?;
    assert_eq!(found["status"], "adapted", "{found}");
    ensure!(
        server
            .received()
            .iter()
            .all(|request| request.method == "GET")
    );

    let config = world
        .config(&Options::default().set("inference", "{ url = \"http://192.0.2.1:11434\" }"))?;
    let ran = world
        .command()?
        .args(["doctor", "--worker-only", "--config"])
        .arg(config)
        .output()?;
    let told = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(ran.status.code(), Some(64), "{told}");
    ensure!(
        told.contains("worker.inference.allow_beyond_loopback"),
        "{told}"
    );
    Ok(())
}
