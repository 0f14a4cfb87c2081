//! The Worker API from a foreign client's view: authentication, refusals, and the description.

mod bodies;
pub(crate) mod listener;
mod pty;

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use cynode_api::{ErrorCode, SessionEnd};
use cynode_client::SessionFilter;
use cynode_tests::{Answer, Http, Options, World, exec, repository, session};
use http::{Method, header};
use serde_json::{Value, json};

const SOME_ID: &str = "01890000-0000-7000-8000-000000000001";

/// Every method and path of the description, with ids filled in.
fn routes() -> Result<Vec<(Method, String)>> {
    let document = serde_json::to_value(cynode_worker::openapi())?;
    let paths = document["paths"].as_object().context("paths")?;
    let mut routes = Vec::new();
    for (path, operations) in paths {
        for method in operations.as_object().context("operations")?.keys() {
            let address = path
                .replace("{id}", SOME_ID)
                .replace("{exec_id}", SOME_ID)
                .replace("{job_id}", SOME_ID);
            assert!(
                !address.contains('{'),
                "{address} has a parameter unknown to this test"
            );
            routes.push((
                Method::from_bytes(method.to_uppercase().as_bytes())?,
                address,
            ));
        }
    }
    Ok(routes)
}

/// Checks that a response is a complete problem document and returns its code.
pub(crate) fn code_of(answer: &Answer) -> Result<String> {
    assert_eq!(
        answer.header("content-type"),
        "application/problem+json",
        "{answer:?}"
    );
    let document: Value = serde_json::from_slice(&answer.body)?;
    let member = |name: &str| {
        document[name]
            .as_str()
            .filter(|text| !text.is_empty())
            .with_context(|| format!("no {name} in {document}"))
    };
    let code = member("code")?;
    let known = ErrorCode::ALL
        .iter()
        .find(|known| known.as_str() == code)
        .with_context(|| format!("the code {code} is unknown"))?;
    assert_eq!(
        (member("type")?, member("title")?),
        (format!("urn:cynode:error:{code}").as_str(), known.title())
    );
    assert_eq!(
        (document["status"].as_u64(), known.status()),
        (Some(answer.status.into()), answer.status)
    );
    assert!(member("remedy")?.ends_with('.') && !member("detail")?.is_empty());
    assert_eq!(member("request_id")?, answer.header("x-request-id"));
    Ok(code.to_owned())
}

#[tokio::test]
// invariant: fail-closed
async fn every_route_refuses_callers_without_the_token() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let http = Http::new(&worker)?;
    let routes = routes()?;
    assert!(routes.len() >= 30, "{routes:?}");
    let token = worker.token()?;
    let wrong = [
        None,
        Some(String::new()),
        Some("Bearer".to_owned()),
        Some("Bearer ".to_owned()),
        Some("Bearer wrong".to_owned()),
        Some(format!("Bearer {}", &token[..token.len() - 1])),
        Some(format!("Bearer {token}x")),
        Some(format!("Basic {token}")),
        Some(token.clone()),
    ];
    for (method, path) in &routes {
        for authorization in &wrong {
            // Every route would refuse this body with another code, if it read it.
            let mut request = http
                .anonymous(method.clone(), path)
                .header(header::CONTENT_TYPE, "application/json")
                .body("{broken");
            if let Some(value) = authorization {
                request = request.header(header::AUTHORIZATION, value);
            }
            let answer = Answer::of(request).await?;
            assert_eq!(
                (answer.status, answer.header("www-authenticate")),
                (401, "Bearer"),
                "{method} {path} {authorization:?}"
            );
            if *method != Method::HEAD {
                assert_eq!(code_of(&answer)?, "unauthorized", "{method} {path}");
            }
        }
        // With the token the route exists: any refusal has another reason.
        let answer = Answer::of(
            http.request(method.clone(), path)
                .json(&json!({"version": 2})),
        )
        .await?;
        assert!(
            ![401, 405].contains(&answer.status),
            "{method} {path}: {}",
            answer.status
        );
        assert!(
            answer
                .problem()
                .is_ok_and(|problem| problem.detail != "no such address")
                || answer.status == 200
                || *method == Method::HEAD,
            "{method} {path}: {answer:?}"
        );
    }
    let lower = http
        .anonymous(Method::GET, "/v1/worker/sessions")
        .header(header::AUTHORIZATION, format!("bearer  {token}"));
    assert_eq!(
        Answer::of(lower).await?.status,
        200,
        "the case of the scheme matters"
    );
    for (first, second) in [("right", "wrong"), ("wrong", "right"), ("right", "right")] {
        let value =
            |which: &str| format!("Bearer {}", if which == "right" { &token } else { which });
        let doubled = http
            .anonymous(Method::GET, "/v1/worker/sessions")
            .header(header::AUTHORIZATION, value(first))
            .header(header::AUTHORIZATION, value(second));
        let answer = Answer::of(doubled).await?;
        assert_eq!(
            (answer.status, code_of(&answer)?.as_str()),
            (400, "invalid_request"),
            "{first}, {second}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn health_readiness_metrics_and_description_need_no_token_and_reveal_no_secret() -> Result<()>
{
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let http = Http::new(&worker)?;
    let mut request = session();
    request.env.insert("SECRET".into(), "hidden-in-env".into());
    let made = worker.client()?.create_session(&request).await?;
    worker
        .client()?
        .exec(made.session_id, &exec(["echo", "hidden-in-output"]))
        .await?;
    let secrets = [
        worker.token()?,
        made.session_id.to_string(),
        made.task_id.to_string(),
        "hidden-in".to_owned(),
    ];
    for (path, kind, part) in [
        ("/healthz", "text/plain; charset=utf-8", "ok\n"),
        ("/readyz", "text/plain; charset=utf-8", "ready\n"),
        (
            "/metrics",
            "text/plain; version=0.0.4",
            "cynode_exec_seconds_count 1",
        ),
        ("/openapi.json", "application/json", "\"openapi\":\"3.1"),
    ] {
        let answer = Answer::of(http.anonymous(Method::GET, path)).await?;
        let text = String::from_utf8_lossy(&answer.body);
        assert_eq!(
            (answer.status, answer.header("content-type")),
            (200, kind),
            "{path}"
        );
        assert!(
            text.contains(part) && secrets.iter().all(|secret| !text.contains(secret)),
            "{path}: {text}"
        );
    }
    let metrics = String::from_utf8(
        Answer::of(http.anonymous(Method::GET, "/metrics"))
            .await?
            .body
            .to_vec(),
    )?;
    for name in [
        "cynode_session_create_seconds_bucket",
        "cynode_http_request_seconds_bucket",
    ] {
        assert!(metrics.contains(name), "{name} is missing in {metrics}");
    }
    // A forwarded request needs the worker's token.
    let elsewhere = || {
        http.anonymous(Method::GET, "/metrics")
            .header("x-forwarded-for", "192.0.2.1")
    };
    assert_eq!(
        Answer::of(elsewhere()).await?.outcome(),
        (401, "unauthorized".to_owned())
    );
    assert_eq!(
        Answer::of(elsewhere().bearer_auth("cyn_wrong"))
            .await?
            .status,
        401
    );
    assert_eq!(
        Answer::of(elsewhere().bearer_auth(worker.token()?))
            .await?
            .status,
        200
    );
    Ok(())
}

/// `CYNODE_REGENERATE=1` rewrites the file instead of comparing.
#[tokio::test]
async fn the_served_openapi_document_is_the_checked_in_one() -> Result<()> {
    let path = repository().join("openapi/worker.json");
    let current = serde_json::to_string_pretty(&cynode_worker::openapi())? + "\n";
    if std::env::var_os("CYNODE_REGENERATE").is_some_and(|value| value == "1") {
        fs_err::write(&path, &current)?;
    }
    let checked_in = fs_err::read_to_string(&path)?;
    assert!(
        checked_in == current,
        "openapi/worker.json is not what the code describes; if the change is meant, run this \
         test with CYNODE_REGENERATE=1"
    );

    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let served = Answer::of(Http::new(&worker)?.anonymous(Method::GET, "/openapi.json")).await?;
    assert_eq!(
        serde_json::from_slice::<Value>(&served.body)?,
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

#[tokio::test]
async fn every_refusal_is_a_complete_problem_with_its_request_id() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let (client, http) = (worker.client()?, Http::new(&worker)?);
    let (running, ended) = (
        client.create_session(&session()).await?.session_id,
        client.create_session(&session()).await?.session_id,
    );
    client.end_session(ended, &SessionEnd::default()).await?;
    let sessions = "/v1/worker/sessions";
    let of = |id: &dyn std::fmt::Display, rest: &str| format!("{sessions}/{id}{rest}");
    let post = |path: &str, body: Value| http.request(Method::POST, path).json(&body);
    let get = |path: &str| http.request(Method::GET, path);
    for (request, expected) in [
        (http.anonymous(Method::GET, sessions), "unauthorized"),
        (get("/v2/nothing"), "not_found"),
        (get("/"), "not_found"),
        (get("/v1/worker"), "not_found"),
        (get(&of(&running, "/nothing")), "not_found"),
        (http.request(Method::DELETE, sessions), "method_not_allowed"),
        (
            http.request(Method::PUT, &of(&running, "/exec")),
            "method_not_allowed",
        ),
        (
            http.request(Method::GET, &of(&running, "/files:list")),
            "method_not_allowed",
        ),
        (
            http.anonymous(Method::POST, "/healthz"),
            "method_not_allowed",
        ),
        (
            http.anonymous(Method::DELETE, "/openapi.json"),
            "method_not_allowed",
        ),
        (get(&of(&SOME_ID, "")), "session_not_found"),
        (get("/v1/worker/jobs/nonsense"), "job_not_found"),
        (
            get(&format!("/v1/worker/jobs/{SOME_ID}/output")),
            "job_not_found",
        ),
        (
            post(&format!("/v1/worker/jobs/{SOME_ID}/ack"), json!({})),
            "job_not_found",
        ),
        (
            post(
                "/v1/worker/jobs:run",
                json!({"task_id": SOME_ID, "job_id": SOME_ID, "sandbox": {"image_ref": "default"}}),
            ),
            "invalid_request",
        ),
        (
            post(
                "/v1/worker/jobs:run",
                json!({
                    "task_id": SOME_ID,
                    "job_id": SOME_ID,
                    "sandbox": {"image_ref": "default"},
                    "job": {}
                }),
            ),
            "invalid_request",
        ),
        (get("/v1/worker/jobs:run"), "method_not_allowed"),
        (get("/v1/worker/calls/nonsense"), "not_found"),
        (
            post(&format!("/v1/worker/calls/{SOME_ID}"), json!({})),
            "method_not_allowed",
        ),
        (
            get(sessions).header("X-Cynode-Call", "nonsense"),
            "invalid_request",
        ),
        (
            get(sessions)
                .header("X-Cynode-Call", SOME_ID)
                .header("X-Cynode-Call", SOME_ID),
            "invalid_request",
        ),
        (get("/v1/worker/jobs?state=odd"), "invalid_request"),
        (
            get(&of(&running, &format!("/execs/{SOME_ID}"))),
            "exec_not_found",
        ),
        (
            get(&of(&running, "/execs/nonsense/output")),
            "exec_not_found",
        ),
        (get(&of(&ended, "/execs")), "session_ended"),
        (get(&of(&running, "/pty")), "pty_not_allowed"),
        (get(&of(&running, "/files?path=missing")), "not_found"),
        (get(&of(&running, "/files?path=/workspace")), "not_a_file"),
        (get(&of(&running, "/files")), "invalid_request"),
        (get(&format!("{sessions}?limit=0")), "invalid_request"),
        (
            post(
                &of(&running, "/exec"),
                json!({"argv": ["/none"], "timeout_ms": 1000}),
            ),
            "exec_failed",
        ),
        (
            post(
                &of(&running, "/exec"),
                json!({"argv": ["true"], "timeout_ms": 1000, "version": 2}),
            ),
            "unsupported_version",
        ),
        (
            post(
                &of(&running, "/files:patch"),
                json!({"diff": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}),
            ),
            "patch_rejected",
        ),
        (
            post(&of(&running, "/export"), json!({"format": "patch"})),
            "exec_failed",
        ),
        (
            http.request(Method::POST, sessions)
                .body("x")
                .header("content-type", "text/plain"),
            "unsupported_media_type",
        ),
    ] {
        let described = format!("{request:?}");
        let answer = Answer::of(request).await?;
        assert_eq!(code_of(&answer)?, expected, "{described}");
    }
    // The caller's request id is echoed, unless it could corrupt a log.
    let long = "x".repeat(65);
    for (given, kept) in [
        ("abc-123", true),
        (long.as_str(), false),
        ("two words", false),
        ("", false),
    ] {
        let answer = Answer::of(get("/v2/nothing").header("X-Request-Id", given)).await?;
        assert_eq!(answer.header("x-request-id") == given, kept, "{given:?}");
        assert_eq!(code_of(&answer)?, "not_found");
    }
    assert!(
        !Answer::of(get(sessions))
            .await?
            .header("x-request-id")
            .is_empty()
    );
    // A response without a body still carries a request id.
    let stat = Answer::of(http.request(Method::HEAD, &of(&running, "/files?path=missing"))).await?;
    assert_eq!(
        (
            stat.status,
            stat.body.len(),
            stat.header("x-request-id").is_empty()
        ),
        (404, 0, false)
    );
    Ok(())
}

#[tokio::test]
async fn lists_come_in_pages() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let (client, http) = (worker.client()?, Http::new(&worker)?);
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(
            client
                .create_session(&session())
                .await?
                .session_id
                .to_string(),
        );
    }
    let page = async |query: &str| {
        let answer =
            Answer::of(http.request(Method::GET, &format!("/v1/worker/sessions{query}"))).await?;
        assert_eq!(answer.status, 200, "{query}: {answer:?}");
        let page: Value = serde_json::from_slice(&answer.body)?;
        let found: Vec<String> = page["items"]
            .as_array()
            .context("items")?
            .iter()
            .map(|item| item["session_id"].as_str().unwrap_or_default().to_owned())
            .collect();
        Ok::<_, anyhow::Error>((found, page["next_cursor"].as_str().map(str::to_owned)))
    };
    let (first, cursor) = page("?limit=2").await?;
    assert_eq!(first, ids[..2]);
    let (second, end) = page(&format!("?limit=2&cursor={}", cursor.context("a cursor")?)).await?;
    assert_eq!((second, end), (ids[2..].to_vec(), None));
    assert_eq!(page("").await?, (ids.clone(), None));
    assert_eq!(page("?limit=3").await?, (ids, None));
    for query in [
        "?limit=0",
        "?limit=1001",
        "?limit=x",
        "?cursor=x",
        "?state=odd",
        "?task_id=x",
        "?colour=blue",
        "?limit=1&limit=2",
    ] {
        let answer =
            Answer::of(http.request(Method::GET, &format!("/v1/worker/sessions{query}"))).await?;
        let problem = answer.problem()?;
        let named = query
            .trim_start_matches('?')
            .split('=')
            .next()
            .unwrap_or_default();
        assert!(
            answer.status == 400 && problem.detail.contains(named),
            "{query}: {problem:?}"
        );
    }
    assert_eq!(
        client.list_sessions(&SessionFilter::default()).await?.len(),
        3
    );
    Ok(())
}
