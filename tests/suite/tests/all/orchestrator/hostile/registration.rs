//! The routes that nodes call.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ArtifactId, ErrorCode, SessionCreate, WorkspaceRef};
use cynode_tests::{
    Answer, ControlPlane, Options, Relay, RunningOrchestrator, eventually, session,
};
use http::Method;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{SOME_ID, case, cases_for_any, database_state, problem_of, replace_member};
use crate::{
    api::code_of,
    orchestrator::cluster::{Cluster, text},
};

const TIMEOUT: Duration = Duration::from_secs(60);

fn registration(psk: &str) -> Value {
    json!({
        "psk": psk, "node_id": SOME_ID, "node_name": "one", "api_url": "http://127.0.0.1:9",
        "capability": {"version": "0", "engine": "podman", "rootless": false, "cpus": 2, "memory_bytes": 1024, "max_sandboxes": 3},
    })
}

#[tokio::test]
async fn malformed_requests_of_a_node_are_refused_and_change_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let key = text(
        &cluster
            .make(&admin, "/v1/nodes/keys", &json!({"reusable": true}))
            .await?["psk"],
    )?;
    let good = registration(&key);
    let node = Answer::of(
        cluster
            .control("", Method::POST, "/v1/nodes/register")?
            .json(&good),
    )
    .await?;
    let token = text(&serde_json::from_slice::<Value>(&node.body)?["node_token"])?;
    let beat = json!({"running_sandboxes": 0});
    let status = json!({});
    let batch = json!({
        "stream": SOME_ID,
        "records": [{"seq": 1, "at": "2026-01-02T03:04:05Z", "body": {}, "hash": "0".repeat(64)}],
    });
    let job_status = format!("/v1/nodes/jobs/{SOME_ID}/status");
    let before = database_state(&cluster)?;
    for (path, good) in [
        ("/v1/nodes/register", &good),
        ("/v1/nodes/heartbeat", &beat),
        (job_status.as_str(), &status),
        ("/v1/nodes/audit:batch", &batch),
    ] {
        let mut cases = cases_for_any(good);
        if ["/v1/nodes/register", "/v1/nodes/audit:batch"].contains(&path) {
            // These have lower limits.
            cases
                .iter_mut()
                .filter(|case| case.named == "10485760")
                .for_each(|case| case.named = "1048576".to_owned());
        }
        let mut add = |name: &str, values: &[&str]| {
            cases.extend(values.iter().map(|value| {
                case(
                    format!("{name}: {value}"),
                    replace_member(good, name, value),
                    &[400],
                    name,
                )
            }));
        };
        match path {
            "/v1/nodes/register" => {
                add("psk", &["1", "null", "[]", "\"a\\u0000b\""]);
                add("node_id", &["1", "\"x\"", "{}"]);
                add(
                    "node_name",
                    &["\"\"", "\" \"", "\"a\\nb\"", "1", "\"a\\u0000b\""],
                );
                let long = format!("{:?}", "x".repeat(300));
                add("node_name", &[&long]);
                add(
                    "api_url",
                    &[
                        "\"\"",
                        "\"x\"",
                        "\"ftp://x\"",
                        "\"unix:///x\"",
                        "\"http://\"",
                        "\"http://a b\"",
                        "\"http://u:p@x\"",
                        "\"http://x/?q\"",
                        "\"http://x/#f\"",
                        "7",
                    ],
                );
                add(
                    "capability",
                    &[
                        "7",
                        "[]",
                        "{}",
                        "{\"cpus\":-1}",
                        "{\"version\":\"0\",\"engine\":\"x\",\"rootless\":1}",
                    ],
                );
            }
            "/v1/nodes/heartbeat" => {
                add(
                    "running_sandboxes",
                    &["-1", "1.5", "\"1\"", "99999999999999999999999", "null"],
                );
                add("not_ready", &["1", "[]", "\"a\\u0000b\""]);
                add(
                    "api_url",
                    &["\"\"", "\"http://u:p@x\"", "\"http://x/?q\"", "7"],
                );
                add(
                    "config_revision",
                    &["\"1\"", "1.5", "99999999999999999999999"],
                );
            }
            "/v1/nodes/audit:batch" => {
                add("stream", &["1", "null", "\"x\"", "[]"]);
                add("records", &["7", "null", "{}", "[]", "[1]"]);
                let record = |change: &str| {
                    format!(
                        "[{{\"seq\":1,\"at\":\"2026-01-02T03:04:05Z\",\"body\":{{}},\"hash\":\"{}\",{change}}}]",
                        "0".repeat(64)
                    )
                };
                let (unknown, double) = (record("\"weather\":1"), record("\"seq\":1"));
                add("records", &[unknown.as_str(), double.as_str()]);
            }
            // The content is ignored, but it must be an object.
            _ => cases.retain(|case| {
                !["an unknown member", "another version", "no version"]
                    .contains(&case.what.as_str())
            }),
        }
        for case in cases {
            let request = cluster
                .control(&token, Method::POST, path)?
                .header("content-type", "application/json")
                .body(case.body);
            let answer = Answer::of(request).await?;
            let detail = problem_of(&answer)
                .with_context(|| format!("{path}: {}: {answer:?}", case.what))?
                .detail;
            ensure!(
                case.status.contains(&answer.status) && detail.contains(&case.named),
                "{path}: {}: {} naming {:?}: {detail}",
                case.what,
                answer.status,
                case.named
            );
            ensure!(!detail.contains("u:p@x"), "a password comes back: {detail}");
        }
    }
    // Another node's job, an unknown job, and an invalid id.
    for odd in [SOME_ID, "x", "%ff", "%00"] {
        let answer = Answer::of(
            cluster
                .control(
                    &token,
                    Method::POST,
                    &format!("/v1/nodes/jobs/{odd}/status"),
                )?
                .json(&json!({})),
        )
        .await?;
        code_of(&answer)?;
        assert_eq!(answer.status, if odd == "%ff" { 400 } else { 404 }, "{odd}");
    }
    for path in [
        "/v1/nodes/heartbeat",
        "/v1/nodes/config",
        "/v1/nodes/audit:batch",
        job_status.as_str(),
    ] {
        let method = if path.ends_with("config") {
            Method::GET
        } else {
            Method::POST
        };
        for token in ["x", admin.as_str()] {
            assert_eq!(
                code_of(
                    &Answer::of(
                        cluster
                            .control(token, method.clone(), path)?
                            .json(&json!({}))
                    )
                    .await?
                )?,
                "unauthorized",
                "{path}"
            );
        }
    }
    let wrong = Answer::of(
        cluster
            .control("", Method::POST, "/v1/nodes/register")?
            .json(&registration("cyn_wrong")),
    )
    .await?;
    assert_eq!(code_of(&wrong)?, "unauthorized");
    assert_eq!(database_state(&cluster)?, before);
    Ok(())
}

/// The response to a registration may be lost, so it can be repeated; but not by somebody who finds
/// the key later.
#[tokio::test]
// invariant: control-plane
async fn a_key_for_one_node_is_used_up_once_the_node_has_its_token() -> Result<()> {
    let cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let key = text(&cluster.make(&admin, "/v1/nodes/keys", &json!({})).await?["psk"])?;
    let register = async || -> Result<Answer> {
        Answer::of(
            cluster
                .control("", Method::POST, "/v1/nodes/register")?
                .json(&registration(&key)),
        )
        .await
    };
    let first = register().await?;
    let again = register().await?;
    assert_eq!(
        (first.status, again.status),
        (201, 201),
        "a repeated registration was refused"
    );
    let token = |answer: &Answer| -> Result<String> {
        text(&serde_json::from_slice::<Value>(&answer.body)?["node_token"])
    };
    let beat = async |token: &str| -> Result<u16> {
        Ok(Answer::of(
            cluster
                .control(token, Method::POST, "/v1/nodes/heartbeat")?
                .json(&json!({"running_sandboxes": 0})),
        )
        .await?
        .status)
    };
    assert_eq!(
        beat(&token(&first)?).await?,
        401,
        "the replaced token is still valid"
    );
    assert_eq!(beat(&token(&again)?).await?, 200);
    let taken_over = register().await?;
    assert_eq!(code_of(&taken_over)?, "unauthorized");
    assert_eq!(
        beat(&token(&again)?).await?,
        200,
        "the token of the node is no longer valid"
    );
    Ok(())
}

/// A worker whose address changes no longer needs its key.
#[tokio::test]
async fn a_node_that_registered_once_comes_back_at_another_address_without_its_key() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane
        .orchestrator("", &[("heartbeat_seconds", "1")])
        .await?;
    let client = orchestrator.client()?;
    let http = reqwest::Client::builder().no_proxy().build()?;
    let made: Value = http
        .post(format!("{}/v1/nodes/keys", orchestrator.url()?))
        .bearer_auth(orchestrator.token()?)
        .json(&json!({}))
        .send()
        .await?
        .json()
        .await?;
    let path = control_plane.world.directory().join("single.key");
    fs_err::write(&path, text(&made["psk"])?)?;
    let options = Options::default()
        .set(
            "orchestrator_url",
            &format!("{:?}", orchestrator.control_url()?),
        )
        .set(
            "registration_key_file",
            &format!("{:?}", path.display().to_string()),
        );
    let mut worker = control_plane.world.worker(&options).await?;
    let at = async |url: &str| Ok(client.nodes().await?.iter().any(|node| node.api_url == url));
    let patience = std::time::Duration::from_secs(60);
    let first = worker.url()?;
    eventually("the node has registered", patience, async || {
        at(&first).await
    })
    .await?;
    let id = client.nodes().await?[0].id;
    worker.kill()?;
    let worker = control_plane.world.worker(&options).await?;
    let second = worker.url()?;
    assert_ne!(first, second);
    eventually("the node reports its new address", patience, async || {
        at(&second).await
    })
    .await?;
    let nodes = client.nodes().await?;
    assert_eq!((nodes.len(), nodes[0].id), (1, id));
    Ok(())
}

/// A worker's settings with a single-use key.
async fn with_a_single_key(
    control_plane: &ControlPlane,
    orchestrator: &RunningOrchestrator,
    control: &str,
) -> Result<Options> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let made = http
        .post(format!("{}/v1/nodes/keys", orchestrator.url()?))
        .bearer_auth(orchestrator.token()?)
        .json(&json!({}))
        .send()
        .await?;
    let path = control_plane.world.directory().join("single.key");
    fs_err::write(&path, text(&made.json::<Value>().await?["psk"])?)?;
    Ok(Options::default()
        .set("orchestrator_url", &format!("{control:?}"))
        .set(
            "registration_key_file",
            &format!("{:?}", path.display().to_string()),
        ))
}

#[tokio::test]
async fn a_trailing_slash_does_not_make_another_orchestrator() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane
        .orchestrator("", &[("heartbeat_seconds", "1")])
        .await?;
    let client = orchestrator.client()?;
    let options = with_a_single_key(
        &control_plane,
        &orchestrator,
        &format!("{}/", orchestrator.control_url()?),
    )
    .await?;
    let mut worker = control_plane.world.worker(&options).await?;
    let at = async |url: &str| Ok(client.nodes().await?.iter().any(|node| node.api_url == url));
    let first = worker.url()?;
    eventually("the node has registered", TIMEOUT, async || {
        at(&first).await
    })
    .await?;
    worker.kill()?;
    let worker = control_plane.world.worker(&options).await?;
    let second = worker.url()?;
    eventually("the node reports its new address", TIMEOUT, async || {
        at(&second).await
    })
    .await
}

/// An orchestrator may report a known node as unknown by mistake: a node whose key is spent has
/// only its tokens.
#[tokio::test]
async fn a_node_that_was_refused_shows_its_tokens_again() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane
        .orchestrator("", &[("heartbeat_seconds", "1")])
        .await?;
    let client = orchestrator.client()?;
    let way = Relay::new().await?;
    way.route_to(&orchestrator.control_url()?)?;
    let _worker = control_plane
        .world
        .worker(&with_a_single_key(&control_plane, &orchestrator, &way.url()).await?)
        .await?;
    let last = async || {
        Ok::<_, anyhow::Error>(
            client
                .nodes()
                .await?
                .first()
                .map(|node| (node.id, node.last_heartbeat_at)),
        )
    };
    eventually("the node has registered", TIMEOUT, async || {
        Ok(last().await?.is_some())
    })
    .await?;
    let first = last().await?;
    // The first heartbeat spends the key.
    eventually("a heartbeat arrives", TIMEOUT, async || {
        Ok(last().await? > first)
    })
    .await?;

    let (sender, mut calls) = watch::channel(Vec::new());
    let refuse = async move |uri: http::Uri| {
        sender.send_modify(|calls: &mut Vec<String>| calls.push(uri.path().to_owned()));
        http::StatusCode::UNAUTHORIZED
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    way.route_to(&format!("http://{}", listener.local_addr()?))?;
    let refusing =
        tokio::spawn(axum::serve(listener, axum::Router::new().fallback(refuse)).into_future());
    let was_refused = |calls: &Vec<String>| {
        ["heartbeat", "register"]
            .iter()
            .all(|name| calls.iter().any(|path| path.ends_with(name)))
    };
    tokio::time::timeout(TIMEOUT, calls.wait_for(was_refused)).await??;
    let before = last().await?;
    way.route_to(&orchestrator.control_url()?)?;
    refusing.abort();
    eventually("heartbeats arrive again", TIMEOUT, async || {
        Ok(last().await? > before)
    })
    .await?;
    assert_eq!(client.nodes().await?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_missing_artifact_is_not_reported_as_a_connection_failure() -> Result<()> {
    let cluster = Cluster::start().await?;
    let id = ArtifactId::generate();
    let request = SessionCreate {
        workspace_ref: Some(WorkspaceRef::Artifact(id)),
        ..session()
    };
    let refused = cluster
        .worker
        .client()?
        .create_session(&request)
        .await
        .expect_err("the artifact does not exist");
    ensure!(
        refused.is(ErrorCode::NotFound) && refused.to_string().contains(&id.to_string()),
        "{refused}"
    );
    Ok(())
}
