//! The path from a request of a sandbox to a model server and back, without a sandbox.

use std::{path::PathBuf, time::Duration};

use bytes::Bytes;
use cynode_api::{ModelServerKind, SessionId, TaskId};
use http::StatusCode;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use super::*;
use crate::{
    audit::{DecisionOutcome, NodeAction, SandboxOwner},
    proxies::{ProxyBody, ProxyResponse},
};
use models::{ModelApi, ModelReply, ModelServer};

// The end-to-end tests have the same server.
#[allow(
    dead_code,
    unreachable_pub,
    reason = "shared with the end-to-end tests"
)]
#[path = "../../../../tests/suite/src/models.rs"]
mod models;

const MODEL: &str = "llama3.2";
const LIMIT: Duration = Duration::from_secs(20);

/// Keeps what was recorded, and can refuse.
#[derive(Debug, Default)]
struct FakeTrail {
    decisions: Mutex<Vec<NodeDecision>>,
    refuses: Mutex<Option<RecordError>>,
}

#[async_trait]
impl ModelTrail for FakeTrail {
    async fn record(&self, decision: NodeDecision) -> Result<(), RecordError> {
        if let Some(error) = *self.refuses.lock() {
            return Err(error);
        }
        self.decisions.lock().push(decision);
        Ok(())
    }
}

struct Setup {
    server: ModelServer,
    inference: Arc<Inference>,
    trail: Arc<FakeTrail>,
    usage: Arc<JobUsage>,
    directory: tempfile::TempDir,
}

/// What a sandbox got.
struct Received {
    status: u16,
    kind: String,
    body: Bytes,
}

impl Received {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }
}

impl Setup {
    async fn new(api: ModelApi, names: &[&str]) -> Self {
        Self::with(api, names, |_| {}).await
    }

    async fn with(
        api: ModelApi,
        names: &[&str],
        change: impl FnOnce(&mut InferenceConfig),
    ) -> Self {
        let server = ModelServer::start(api, names).await.expect("a server");
        let mut config = InferenceConfig {
            url: Some(server.url()),
            ..InferenceConfig::default()
        };
        change(&mut config);
        let trail = Arc::new(FakeTrail::default());
        let recorded = Arc::<FakeTrail>::clone(&trail);
        let directory = tempfile::tempdir().expect("a directory");
        let inference = Inference::new(config, recorded, directory.path()).expect("a client");
        if let Some(backend) = &inference.backend {
            backend.refresh().await;
        }
        let usage = inference.usage_of(JobId::generate(), directory.path());
        Self {
            server,
            inference,
            trail,
            usage,
            directory,
        }
    }

    fn client(&self, models: &[&str]) -> ModelClient {
        let session_id = SessionId::generate();
        ModelClient {
            session_id,
            sandbox: AuditedSandbox {
                owner: SandboxOwner::Session(session_id),
                task_id: TaskId::generate(),
            },
            models: AllowedModels::new(models.iter().map(|name| (*name).to_owned())),
            request_id: "r-1".to_owned(),
            usage: Some(Arc::clone(&self.usage)),
            _activity: None,
        }
    }

    async fn send(&self, client: ModelClient, method: &str, path: &str, body: &Value) -> Received {
        let body = match body {
            Value::Null => ProxyBody::empty(),
            body => ProxyBody::from(body.to_string()),
        };
        let request = request(method, path, body);
        received(self.inference.answer(client, request).await).await
    }

    async fn post(&self, path: &str, body: &Value) -> Received {
        self.send(self.client(&[MODEL]), "POST", path, body).await
    }

    /// Starts a request and returns its answer as soon as it begins.
    async fn begin(&self, client: ModelClient, path: &str, body: &Value) -> ProxyResponse {
        let request = request("POST", path, ProxyBody::from(body.to_string()));
        self.inference.answer(client, request).await
    }

    /// What was recorded, in short.
    fn recorded(&self) -> Vec<String> {
        let decisions = self.trail.decisions.lock();
        let shown = decisions.iter().map(|decision| {
            let action = match &decision.action {
                NodeAction::ModelRequest(call) => {
                    format!("request {} {}", call.model, call.endpoint)
                }
                NodeAction::ModelOutcome { call, usage } => format!(
                    "outcome {} {:?} {:?} {:?}",
                    call.model, usage.prompt_tokens, usage.completion_tokens, usage.status
                ),
                other => format!("{other:?}"),
            };
            match &decision.outcome {
                DecisionOutcome::Allowed => format!("{action}: allowed"),
                DecisionOutcome::Done => format!("{action}: done"),
                DecisionOutcome::Denied { code } => format!("{action}: denied {code}"),
                DecisionOutcome::Failed { code } => format!("{action}: failed {code}"),
            }
        });
        shown.collect()
    }

    async fn eventually_recorded(&self, count: usize) -> Vec<String> {
        let deadline = tokio::time::Instant::now() + LIMIT;
        while self.recorded().len() < count {
            assert!(
                tokio::time::Instant::now() < deadline,
                "{:?}",
                self.recorded()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.recorded()
    }
}

fn request(method: &str, path: &str, body: ProxyBody) -> http::Request<ProxyBody> {
    http::Request::builder()
        .method(method)
        .uri(path)
        .body(body)
        .expect("a request")
}

async fn received(response: ProxyResponse) -> Received {
    let (head, body) = response.into_parts();
    let kind = head.headers.get(http::header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    assert_eq!(
        head.headers
            .get("x-request-id")
            .map(http::HeaderValue::as_bytes),
        Some(b"r-1".as_slice())
    );
    let body = tokio::time::timeout(LIMIT, body.collect())
        .await
        .expect("an end");
    Received {
        status: head.status.as_u16(),
        kind: kind.to_owned(),
        body: body.expect("a whole body").to_bytes(),
    }
}

fn chat(model: &str) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": "hello"}]})
}

fn stream(model: &str) -> Value {
    let mut body = chat(model);
    body["stream"] = json!(true);
    body
}

const REQUESTED: &str = "request llama3.2 /v1/chat/completions: allowed";

#[tokio::test]
async fn an_allowed_model_streams_and_its_usage_is_counted_and_recorded() {
    let setup = Setup::new(ModelApi::Ollama, &["llama3.2:latest", "other:latest"]).await;
    let answer = setup.post("/api/chat", &chat(MODEL)).await;
    assert_eq!(
        (answer.status, answer.kind.as_str()),
        (200, "application/x-ndjson")
    );
    let lines: Vec<Value> = answer
        .text()
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line"))
        .collect();
    let text: String = lines
        .iter()
        .filter_map(|line| line["message"]["content"].as_str())
        .collect();
    assert_eq!(text, "a short answer");
    assert_eq!(
        lines.last().map(|line| line["done"].clone()),
        Some(json!(true))
    );

    let answer = setup.post("/v1/chat/completions", &chat(MODEL)).await;
    assert_eq!(
        answer.json()["choices"][0]["message"]["content"],
        "a short answer"
    );
    let embedded = setup
        .post("/api/embed", &json!({"model": MODEL, "input": ["x"]}))
        .await;
    assert_eq!(embedded.json()["embeddings"][0][0], 0.25);

    assert_eq!(
        setup.recorded(),
        [
            "request llama3.2 /api/chat: allowed",
            "outcome llama3.2 Some(7) Some(3) Some(200): done",
            REQUESTED,
            "outcome llama3.2 Some(7) Some(3) Some(200): done",
            "request llama3.2 /api/embed: allowed",
            "outcome llama3.2 Some(7) Some(0) Some(200): done",
        ]
    );
    let usage = setup.usage.settled().await.expect("used");
    assert_eq!(
        (usage.requests, usage.prompt_tokens, usage.completion_tokens),
        (3, 21, 6)
    );
    let stored: PathBuf = setup.directory.path().join("usage.json");
    assert!(stored.exists());
    let sent = setup.server.computations();
    assert_eq!(sent[0].body["options"]["num_predict"], 131_072);
    assert_eq!(
        sent[0]
            .headers
            .iter()
            .filter(|(name, _)| name == "authorization")
            .count(),
        0
    );
}

#[tokio::test]
async fn a_stream_has_its_usage_only_for_clients_that_ask() {
    let setup = Setup::new(ModelApi::Openai, &[MODEL]).await;
    let plain = setup.post("/v1/chat/completions", &stream(MODEL)).await;
    assert_eq!(
        (plain.status, plain.kind.as_str()),
        (200, "text/event-stream")
    );
    assert!(
        plain.text().ends_with("data: [DONE]\n\n"),
        "{}",
        plain.text()
    );
    assert!(!plain.text().contains("\"choices\":[]"), "{}", plain.text());
    let mut asking = stream(MODEL);
    asking["stream_options"] = json!({"include_usage": true});
    let asked = setup.post("/v1/chat/completions", &asking).await;
    assert!(asked.text().contains("\"choices\":[]"), "{}", asked.text());
    assert_eq!(setup.usage.tokens(), 20);
    for sent in setup.server.computations() {
        assert_eq!(sent.body["stream_options"]["include_usage"], true);
    }
}

#[tokio::test]
async fn the_first_piece_arrives_before_the_model_has_ended() {
    let setup = Setup::new(ModelApi::Ollama, &[MODEL]).await;
    for path in ["/api/chat", "/v1/chat/completions"] {
        setup.server.reply(ModelReply::Stall);
        let response = setup
            .begin(setup.client(&[MODEL]), path, &stream(MODEL))
            .await;
        let mut body = response.into_body();
        let first = tokio::time::timeout(LIMIT, body.frame())
            .await
            .expect("in time");
        let first = first
            .expect("a piece")
            .expect("no error")
            .into_data()
            .expect("data");
        assert!(
            String::from_utf8_lossy(&first).contains("one "),
            "{first:?}"
        );
    }
}

#[tokio::test]
async fn a_model_that_is_not_allowed_is_refused_and_recorded() {
    let setup = Setup::new(ModelApi::Ollama, &[MODEL, "other"]).await;
    let refused = setup.post("/api/chat", &chat("other")).await;
    assert_eq!(
        (refused.status, refused.code().as_str()),
        (403, "model_not_allowed")
    );
    assert_eq!(refused.json()["request_id"], "r-1");
    let none = setup
        .send(
            setup.client(&[]),
            "POST",
            "/v1/chat/completions",
            &chat(MODEL),
        )
        .await;
    assert_eq!(
        (none.status, none.code().as_str()),
        (403, "model_not_allowed")
    );
    assert_eq!(
        setup.recorded(),
        [
            "request other /api/chat: denied model_not_allowed",
            "request llama3.2 /v1/chat/completions: denied model_not_allowed",
        ]
    );
    assert!(setup.server.computations().is_empty());
}

#[tokio::test]
async fn endpoints_that_change_models_do_not_exist() {
    let setup = Setup::new(ModelApi::Ollama, &[MODEL]).await;
    for (method, path, status) in [
        ("POST", "/api/pull", 404),
        ("POST", "/api/push", 404),
        ("POST", "/api/create", 404),
        ("DELETE", "/api/delete", 404),
        ("GET", "/api/tags?x", 404),
        ("GET", "http://169.254.169.254/api/tags", 404),
        ("GET", "/api/chat", 405),
    ] {
        let refused = setup
            .send(setup.client(&[MODEL]), method, path, &Value::Null)
            .await;
        assert_eq!(refused.status, status, "{method} {path}");
    }
    let unsafe_field = setup
        .post(
            "/v1/chat/completions",
            &json!({"model": MODEL, "messages": [], "web_search_options": {}}),
        )
        .await;
    assert_eq!(
        (unsafe_field.status, unsafe_field.code().as_str()),
        (400, "invalid_request")
    );
    assert!(setup.recorded().is_empty());
    let paths: Vec<String> = setup
        .server
        .received()
        .into_iter()
        .map(|sent| sent.path)
        .collect();
    assert_eq!(paths, ["/api/version", "/api/tags"]);
}

#[tokio::test]
async fn lists_and_descriptions_show_allowed_models_of_this_node_only() {
    for api in [ModelApi::Ollama, ModelApi::Openai] {
        let setup = Setup::new(api, &["llama3.2:latest", "other", "far", "x:cloud"]).await;
        let is_ollama = api == ModelApi::Ollama;
        setup.server.set_models(&[
            ("llama3.2:latest", false),
            ("other", false),
            ("far", is_ollama),
            ("x:cloud", false),
        ]);
        setup
            .inference
            .backend
            .as_ref()
            .expect("configured")
            .refresh()
            .await;
        let allowed: &[&str] = match api {
            ModelApi::Ollama => &[MODEL, "far", "x:cloud"],
            ModelApi::Openai => &[MODEL, "x:cloud"],
        };
        let get = async |path: &str| {
            setup
                .send(setup.client(allowed), "GET", path, &Value::Null)
                .await
        };
        let models = get("/v1/models").await.json();
        assert_eq!(models["data"].as_array().map(Vec::len), Some(1), "{models}");
        assert_eq!(models["data"][0]["id"], "llama3.2:latest");
        assert_eq!(
            get("/v1/models/llama3.2").await.json()["id"],
            "llama3.2:latest"
        );
        assert_eq!(get("/v1/models/other").await.status, 403);
        let tags = get("/api/tags").await;
        let shown = setup.post("/api/show", &json!({"model": MODEL})).await;
        if is_ollama {
            assert_eq!(
                tags.json()["models"].as_array().map(Vec::len),
                Some(1),
                "{}",
                tags.text()
            );
            assert_eq!(
                get("/api/version").await.json()["version"],
                "0.0.1-scripted"
            );
            assert_eq!(shown.json()["model_info"]["scripted.context_length"], 4_096);
            assert!(!shown.text().contains("secret") && !shown.text().contains("/var/lib"));
        } else {
            assert_eq!((tags.status, shown.status), (404, 404));
        }
        let report = setup.inference.report().await.expect("configured");
        let kind = if is_ollama {
            ModelServerKind::Ollama
        } else {
            ModelServerKind::Openai
        };
        assert_eq!((report.kind, report.problem), (Some(kind), None));
        let mut expected = vec!["llama3.2:latest", "other"];
        if !is_ollama {
            expected.push("far");
        }
        assert_eq!(report.models, expected);
    }
}

#[tokio::test]
async fn a_model_that_another_host_runs_is_refused() {
    let setup = Setup::new(ModelApi::Ollama, &[]).await;
    setup.server.set_models(&[("far", true), (MODEL, false)]);
    setup
        .inference
        .backend
        .as_ref()
        .expect("configured")
        .refresh()
        .await;
    let client = || setup.client(&["far", MODEL]);
    let refused = setup
        .send(client(), "POST", "/api/chat", &chat("far"))
        .await;
    assert_eq!(
        (refused.status, refused.code().as_str()),
        (403, "model_not_allowed")
    );
    assert!(
        refused.text().contains("another host"),
        "{}",
        refused.text()
    );
    assert!(setup.server.computations().is_empty());

    // One whose list does not say so is found out by its answer.
    setup.server.reply(ModelReply::Remote(vec!["x".to_owned()]));
    let first = setup
        .send(client(), "POST", "/api/chat", &chat(MODEL))
        .await;
    assert_eq!(first.status, 200);
    let second = setup
        .send(client(), "POST", "/api/chat", &chat(MODEL))
        .await;
    assert_eq!(
        (second.status, second.code().as_str()),
        (403, "model_not_allowed")
    );
    let recorded = setup.recorded();
    assert_eq!(
        recorded[recorded.len() - 2..],
        [
            "outcome llama3.2 Some(7) Some(3) Some(200): failed model_not_local",
            "request llama3.2 /api/chat: denied model_not_allowed",
        ]
    );
}

#[tokio::test]
async fn nothing_leaves_the_node_without_a_record() {
    let setup = Setup::new(ModelApi::Ollama, &[MODEL]).await;
    for (error, code) in [
        (RecordError::Unavailable, "audit_unavailable"),
        (RecordError::ShareUsed, "audit_backlog_full"),
    ] {
        *setup.trail.refuses.lock() = Some(error);
        for model in [MODEL, "other"] {
            let refused = setup.post("/api/chat", &chat(model)).await;
            assert_eq!((refused.status, refused.code().as_str()), (503, code));
        }
    }
    assert!(setup.server.computations().is_empty());
}

#[tokio::test]
async fn a_server_that_is_away_or_fails_is_unavailable() {
    let setup = Setup::new(ModelApi::Ollama, &[MODEL]).await;
    for (reply, status, code, recorded) in [
        (
            ModelReply::Error(500, "no memory at /var/lib/x".to_owned()),
            503,
            "inference_unavailable",
            "outcome llama3.2 None None Some(500): failed upstream_failed",
        ),
        (
            ModelReply::Error(400, "does not support tools".to_owned()),
            400,
            "invalid_request",
            "outcome llama3.2 None None Some(400): failed upstream_refused",
        ),
        (
            ModelReply::Redirect("http://169.254.169.254/".to_owned()),
            503,
            "inference_unavailable",
            "outcome llama3.2 None None Some(307): failed upstream_failed",
        ),
        (
            ModelReply::Bytes(b"garbage\r\n\r\n".to_vec()),
            503,
            "inference_unavailable",
            "outcome llama3.2 None None None: failed upstream_unreachable",
        ),
        (
            ModelReply::Body("text/html", b"<html>".to_vec()),
            503,
            "inference_unavailable",
            "outcome llama3.2 None None Some(200): failed upstream_malformed",
        ),
    ] {
        setup.server.reply(reply);
        let refused = setup.post("/api/chat", &chat(MODEL)).await;
        assert_eq!((refused.status, refused.code().as_str()), (status, code));
        assert!(!refused.text().contains("/var/lib"), "{}", refused.text());
        assert_eq!(setup.recorded().last().map(String::as_str), Some(recorded));
    }
    let absent = setup
        .send(
            setup.client(&["absent"]),
            "POST",
            "/api/chat",
            &chat("absent"),
        )
        .await;
    assert_eq!(
        (absent.status, absent.code().as_str()),
        (503, "inference_unavailable")
    );
    drop(setup.server);
    let count = setup.trail.decisions.lock().len();
    let client = setup.inference.answer(
        ModelClient {
            session_id: SessionId::generate(),
            sandbox: AuditedSandbox {
                owner: SandboxOwner::Job(JobId::generate()),
                task_id: TaskId::generate(),
            },
            models: AllowedModels::new([MODEL.to_owned()]),
            request_id: "r-1".to_owned(),
            usage: None,
            _activity: None,
        },
        request(
            "POST",
            "/api/chat",
            ProxyBody::from(chat(MODEL).to_string()),
        ),
    );
    let away = received(client.await).await;
    assert_eq!(
        (away.status, away.code().as_str()),
        (503, "inference_unavailable")
    );
    assert!(setup.trail.decisions.lock().len() > count);
}

#[tokio::test]
async fn garbage_in_an_answer_passes_and_is_recorded_as_incomplete() {
    let setup = Setup::new(ModelApi::Ollama, &[MODEL]).await;
    let garbage = ModelReply::Body("application/x-ndjson", b"{\"a\": nonsense\n\xff\n".to_vec());
    setup.server.reply(garbage);
    let answer = setup.post("/api/chat", &chat(MODEL)).await;
    assert_eq!((answer.status, answer.body.len()), (200, 17));
    setup.server.reply(ModelReply::Cut(vec!["one ".to_owned()]));
    let cut = setup.post("/api/chat", &chat(MODEL)).await;
    assert!(cut.text().contains("one ") && cut.text().contains("broke the answer off"));
    let recorded = setup.recorded();
    for at in [1, 3] {
        assert_eq!(
            recorded[at],
            "outcome llama3.2 None None Some(200): failed upstream_incomplete"
        );
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_ends_the_computation() {
    let setup = Setup::new(ModelApi::Ollama, &[MODEL]).await;
    for (count, reply) in [(1, ModelReply::Endless), (2, ModelReply::Stall)] {
        setup.server.reply(reply);
        let response = setup
            .begin(
                setup.client(&[MODEL]),
                "/v1/chat/completions",
                &stream(MODEL),
            )
            .await;
        let mut body = response.into_body();
        body.frame().await.expect("a piece").expect("no error");
        drop(body);
        let recorded = setup.eventually_recorded(2 * count).await;
        assert_eq!(
            recorded[2 * count - 1],
            "outcome llama3.2 None None Some(200): failed client_gone"
        );
        hung_up(&setup.server, count).await;
    }
    // Before the answer begins.
    setup.server.reply(ModelReply::Silence);
    let client = setup.client(&[MODEL]);
    let asked = stream(MODEL);
    tokio::select! {
        _ = setup.begin(client, "/v1/chat/completions", &asked) => panic!("answered"),
        () = computing(&setup.server) => {}
    }
    let recorded = setup.eventually_recorded(6).await;
    assert_eq!(
        recorded[5],
        "outcome llama3.2 None None None: failed client_gone"
    );
    hung_up(&setup.server, 3).await;
}

async fn computing(server: &ModelServer) {
    while server.open() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn hung_up(server: &ModelServer, count: usize) {
    let deadline = tokio::time::Instant::now() + LIMIT;
    while server.abandoned() < count || server.open() > 0 {
        assert!(tokio::time::Instant::now() < deadline, "{server:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn answers_have_limits_of_time() {
    let setup = Setup::with(ModelApi::Ollama, &[MODEL], |config| {
        config.first_byte_seconds = 1;
        config.idle_seconds = 1;
        config.request_seconds = 2;
    })
    .await;
    setup.server.reply(ModelReply::Silence);
    let silent = setup.post("/v1/chat/completions", &stream(MODEL)).await;
    assert_eq!(
        (silent.status, silent.code().as_str()),
        (503, "inference_unavailable")
    );
    setup.server.reply(ModelReply::Stall);
    let stalled = setup.post("/v1/chat/completions", &stream(MODEL)).await;
    let error = "\n\ndata: {\"error\":{\"message\":\"the model has sent nothing for 1 s\"}}\n\n";
    assert!(stalled.text().ends_with(error), "{}", stalled.text());
    setup.server.reply(ModelReply::Endless);
    let endless = setup.post("/api/chat", &chat(MODEL)).await;
    let error = "\n{\"error\":\"the answer took longer than an answer may\"}\n";
    assert!(endless.text().ends_with(error), "{}", endless.body.len());
    let recorded = setup.recorded();
    for at in [1, 3, 5] {
        assert!(recorded[at].ends_with("failed timed_out"), "{recorded:?}");
    }
    hung_up(&setup.server, 3).await;
}

#[tokio::test]
async fn requests_at_once_are_limited_for_each_sandbox_and_for_the_node() {
    let setup = Setup::with(ModelApi::Ollama, &[MODEL], |config| {
        config.max_requests = 4;
        config.max_requests_per_sandbox = 3;
    })
    .await;
    let greedy = SessionId::generate();
    let of = |session_id: SessionId| ModelClient {
        session_id,
        ..setup.client(&[MODEL])
    };
    let mut open = Vec::new();
    let mut start = async |session_id| {
        setup.server.reply(ModelReply::Stall);
        let response = setup
            .begin(of(session_id), "/v1/chat/completions", &stream(MODEL))
            .await;
        let status = response.status();
        open.push(response);
        status
    };
    for _ in 0..3 {
        assert_eq!(start(greedy).await, StatusCode::OK);
    }
    assert_eq!(start(greedy).await, StatusCode::TOO_MANY_REQUESTS);
    // The last place is for a sandbox that has none.
    let other = SessionId::generate();
    assert_eq!(start(other).await, StatusCode::OK);
    assert_eq!(start(other).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(
        start(SessionId::generate()).await,
        StatusCode::TOO_MANY_REQUESTS
    );
    drop(open);
    setup.eventually_recorded(8).await;
    let deadline = tokio::time::Instant::now() + LIMIT;
    while setup.inference.in_flight.lock().total > 0 {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(setup.inference.in_flight.lock().by_sandbox.is_empty());
}

/// A chat whose text has this many bytes.
fn long_chat(bytes: usize) -> Value {
    let mut body = chat(MODEL);
    body["messages"][0]["content"] = json!("x".repeat(bytes));
    body
}

#[tokio::test]
// invariant: no-starvation
async fn bodies_that_stall_keep_no_other_sandbox_waiting() {
    let setup = Setup::new(ModelApi::Ollama, &[MODEL]).await;
    let stalled = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let mut open = Vec::new();
    for _ in 0..2 {
        let session_id = SessionId::generate();
        for _ in 0..4 {
            let counter = Arc::clone(&stalled);
            let begun = futures_util::stream::iter([Ok::<_, std::io::Error>(Bytes::from(vec![
                    b' ';
                    70 * 1024
                ]))]);
            let never = futures_util::stream::once(async move {
                counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                std::future::pending().await
            });
            let body = ProxyBody::from_stream(futures_util::StreamExt::chain(begun, never));
            let client = ModelClient {
                session_id,
                ..setup.client(&[MODEL])
            };
            let inference = Arc::clone(&setup.inference);
            open.push(tokio::spawn(async move {
                inference
                    .answer(client, request("POST", "/api/chat", body))
                    .await
            }));
        }
    }
    let waiting = async {
        while stalled.load(std::sync::atomic::Ordering::SeqCst) < 8 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, waiting).await.expect("stalled");
    let long = long_chat(70 * 1024);
    let answered = tokio::time::timeout(LIMIT, setup.post("/api/chat", &long)).await;
    assert_eq!(answered.expect("an answer in time").status, 200);
    assert!(open.iter().all(|task| !task.is_finished()));
    open.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
// invariant: no-starvation
async fn a_sandbox_that_starts_too_many_computations_is_refused_before_anything_is_recorded() {
    let setup = Setup::new(ModelApi::Ollama, &[MODEL]).await;
    let greedy = setup.client(&[MODEL]);
    // As if it had used its burst far in the future, so that no delay of this test matters.
    let later = tokio::time::Instant::now() + Duration::from_secs(3_600);
    for _ in 0..rate::BURST {
        let counted = setup.inference.rate.count(greedy.session_id, later);
        counted.expect("within the burst");
    }
    let session_id = greedy.session_id;
    let again = ModelClient {
        session_id,
        ..setup.client(&[MODEL])
    };
    let refused = setup.send(greedy, "POST", "/api/chat", &chat(MODEL)).await;
    assert_eq!(
        (refused.status, refused.code().as_str()),
        (429, "too_many_requests")
    );
    assert!(setup.recorded().is_empty());
    // What computes nothing needs no record, and others are not concerned.
    let listed = setup.send(again, "GET", "/v1/models", &Value::Null).await;
    assert_eq!(listed.status, 200);
    assert_eq!(setup.post("/api/chat", &chat(MODEL)).await.status, 200);
}

#[tokio::test]
async fn bodies_are_bounded() {
    let setup = Setup::with(ModelApi::Ollama, &[MODEL], |config| {
        config.max_body_bytes = 100_000;
    })
    .await;
    let whole = setup.post("/api/chat", &long_chat(99_000)).await;
    assert_eq!(whole.status, 200);
    let refused = setup.post("/api/chat", &long_chat(100_000)).await;
    assert_eq!(
        (refused.status, refused.code().as_str()),
        (413, "too_large")
    );
    // In pieces, without a length.
    let pieces = futures_util::stream::repeat_with(|| {
        Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 1_000]))
    });
    let endless = ProxyBody::from_stream(pieces);
    let request = request("POST", "/api/chat", endless);
    let refused = setup
        .inference
        .answer(setup.client(&[MODEL]), request)
        .await;
    assert_eq!(refused.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let sent = setup.server.computations();
    assert_eq!(sent.len(), 1);
    let length = sent[0]
        .headers
        .iter()
        .find(|(name, _)| name == "content-length");
    assert!(length.is_some(), "{:?}", sent[0].headers);
}

// proves: REQ-SANDBX-0107 with a_server_beyond_loopback_must_be_allowed_by_name and
// a_listener_on_all_addresses_is_found_and_one_on_loopback_is_not
#[tokio::test]
async fn a_server_that_others_can_reach_is_not_used_unless_that_is_allowed() {
    for is_allowed in [false, true] {
        let server = ModelServer::start_at("0.0.0.0:0", ModelApi::Ollama, &[MODEL])
            .await
            .expect("a server");
        let config = InferenceConfig {
            url: Some(format!("http://127.0.0.1:{}", server.address().port())),
            allow_beyond_loopback: is_allowed,
            ..InferenceConfig::default()
        };
        let checked = probe(&config).await.expect("a check");
        assert!(
            checked
                .exposed
                .is_some_and(|reason| reason.contains("0.0.0.0"))
        );
        assert_eq!(checked.report.models.is_empty(), !is_allowed);
        assert_eq!(checked.report.problem.is_none(), is_allowed);
        assert_eq!(server.received().is_empty(), !is_allowed);
    }
}

#[tokio::test]
async fn a_job_needs_one_of_its_models_and_no_provider() {
    let inference = |models: &[&str], source: Option<InferenceSource>| JobInference {
        allowed_models: models.iter().map(|name| (*name).to_owned()).collect(),
        source,
    };
    let setup = Setup::new(ModelApi::Ollama, &["llama3.2:latest"]).await;
    let code = async |inference: &JobInference| {
        let checked = setup.inference.check_job(inference).await;
        checked.err().map(|error| error.into_problem().code)
    };
    assert_eq!(code(&inference(&["x", MODEL], None)).await, None);
    assert_eq!(
        code(&inference(&[MODEL], Some(InferenceSource::Worker))).await,
        None
    );
    assert_eq!(
        code(&inference(&["x", "y"], None)).await.as_deref(),
        Some("inference_unavailable")
    );
    assert_eq!(
        code(&inference(&[MODEL], Some(InferenceSource::ApiEgress)))
            .await
            .as_deref(),
        Some("invalid_request")
    );
    let trail = Arc::<FakeTrail>::default();
    let none = Inference::new(InferenceConfig::default(), trail, setup.directory.path());
    let none = none.expect("a client");
    let refused = none
        .check_job(&inference(&[MODEL], None))
        .await
        .expect_err("none");
    assert_eq!(refused.into_problem().code, "inference_unavailable");
    assert_eq!(none.report().await, None);
}
