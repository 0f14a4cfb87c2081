//! Every route of the user API against every kind of caller: who is admitted, and how.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{TaskCreate, TokenCreate, TokenKind};
use cynode_tests::ControlPlane;
use serde_json::{Value, json};

const SOME_ID: &str = "01890000-0000-7000-8000-000000000001";

/// A route, a body that it accepts, and the responses to a user and to an administrator. The ids
/// exist for nobody, so most responses are 404. Agents get 403 unless the row says otherwise.
struct Row {
    route: &'static str,
    body: Option<fn() -> Value>,
    person: u16,
    admin: u16,
    /// Project managers and analysts.
    agent: u16,
}

const fn row(route: &'static str, body: Option<fn() -> Value>, person: u16, admin: u16) -> Row {
    Row {
        route,
        body,
        person,
        admin,
        agent: 403,
    }
}

fn rows() -> Vec<Row> {
    let empty: Option<fn() -> Value> = Some(|| json!({}));
    let mut rows = vec![
        row("POST /v1/projects", Some(|| json!({"name": "p"})), 201, 201),
        row("GET /v1/projects", None, 200, 200),
        row("GET /v1/projects/{id}", None, 404, 404),
        row("PATCH /v1/projects/{id}", empty, 404, 404),
        row("POST /v1/tasks", Some(|| json!({"name": "t"})), 201, 201),
        row("GET /v1/tasks", None, 200, 200),
        row("GET /v1/tasks/{id}", None, 404, 404),
        row("PATCH /v1/tasks/{id}", empty, 404, 404),
        row(
            "POST /v1/users",
            Some(|| json!({"name": uuid_name()})),
            403,
            201,
        ),
        row("GET /v1/users", None, 200, 200),
        row("GET /v1/users/{id}", None, 404, 404),
        row(
            "POST /v1/groups",
            Some(|| json!({"name": uuid_name()})),
            403,
            201,
        ),
        row("GET /v1/groups", None, 200, 200),
        row("GET /v1/groups/{id}", None, 404, 404),
        row(
            "POST /v1/tokens",
            Some(|| json!({"kind": "user"})),
            201,
            201,
        ),
        row("GET /v1/tokens", None, 200, 200),
        row("GET /v1/tokens/{id}", None, 404, 404),
        row("POST /v1/tokens/{id}/renew", empty, 404, 404),
        row("DELETE /v1/tokens/{id}", None, 404, 404),
        row("GET /v1/settings", None, 200, 200),
        row("GET /v1/settings/{key}", None, 404, 404),
        row(
            "PUT /v1/settings/{key}",
            Some(|| json!({"value": 1})),
            403,
            200,
        ),
        row("GET /v1/preferences", None, 200, 200),
        row("GET /v1/preferences/{scope}/{scope_id}", None, 200, 200),
        row(
            "PUT /v1/preferences/{scope}/{scope_id}/{key}",
            Some(|| json!({"value": 1})),
            403,
            200,
        ),
        row(
            "POST /v1/images",
            Some(|| json!({"image_ref": format!("localhost/{}:x", uuid_name())})),
            403,
            201,
        ),
        row("GET /v1/images", None, 200, 200),
        row("GET /v1/images/{id}", None, 404, 404),
        row("PATCH /v1/images/{id}", empty, 403, 404),
        row("DELETE /v1/images/{id}", None, 403, 404),
        row("GET /v1/nodes", None, 200, 200),
        row("GET /v1/nodes/{id}", None, 404, 404),
        row("POST /v1/nodes/{id}/drain", empty, 403, 404),
        row("POST /v1/nodes/keys", empty, 403, 201),
        row("GET /v1/policies", None, 403, 200),
        row(
            "POST /v1/policies:test",
            Some(|| json!({"action": "task.list"})),
            403,
            200,
        ),
        row("GET /v1/policies/{id}", None, 403, 404),
        row("DELETE /v1/policies/{id}", None, 403, 404),
        row(
            "PUT /v1/policies/{id}",
            Some(|| json!({"text": ""})),
            403,
            200,
        ),
        row("POST /v1/credentials", Some(credential), 404, 404),
        row("GET /v1/credentials", None, 403, 200),
        row("GET /v1/credentials/{id}", None, 404, 404),
        row(
            "POST /v1/credentials/{id}/rotate",
            Some(|| json!({"secret": "long enough to be one"})),
            404,
            404,
        ),
        row("POST /v1/credentials/{id}/disable", empty, 404, 404),
        row("POST /v1/repositories", Some(repository), 404, 404),
        row("GET /v1/repositories", None, 200, 200),
        row("GET /v1/repositories/{id}", None, 404, 404),
        row("DELETE /v1/repositories/{id}", None, 404, 404),
        row("POST /v1/promotions", Some(promotion), 404, 404),
        row("GET /v1/promotions", None, 200, 200),
        row("GET /v1/promotions/{id}", None, 404, 404),
        row("POST /v1/promotions/{id}/approve", Some(decision), 404, 404),
        row("POST /v1/promotions/{id}/reject", Some(decision), 404, 404),
        row("POST /v1/promotions/{id}/cancel", empty, 404, 404),
        row("GET /v1/audit", None, 403, 200),
        row("GET /v1/audit/checkpoints", None, 403, 200),
        row("GET /v1/audit/verify", None, 403, 200),
        Row {
            agent: 200,
            ..row("GET /v1/events", None, 200, 200)
        },
        // The call is permitted, but no image is allowed.
        row(
            "POST /v1/jobs",
            Some(|| json!({"command": ["true"]})),
            403,
            403,
        ),
        row("GET /v1/jobs", None, 200, 200),
        row("GET /v1/jobs/{id}", None, 404, 404),
        row("POST /v1/jobs/{id}/stop", None, 404, 404),
        row("GET /v1/jobs/{id}/output", None, 404, 404),
        row("GET /v1/artifacts", None, 404, 404),
        row("GET /v1/artifacts/{id}", None, 404, 404),
        row("GET /v1/artifacts/{id}/content", None, 404, 404),
        row("PUT /v1/tasks/{task_id}/artifacts/{path}", None, 404, 404),
        row("GET /v1/tasks/{task_id}/artifacts/{path}", None, 404, 404),
        row("POST /v1/sessions", empty, 403, 403),
        row("GET /v1/sessions", None, 200, 200),
        row("PATCH /v1/sessions/{id}", empty, 404, 404),
        row(
            "POST /v1/sessions/{id}/export",
            Some(|| json!({"format": "tar"})),
            404,
            404,
        ),
    ];
    for route in [
        "GET /v1/sessions/{id}",
        "POST /v1/sessions/{id}/end",
        "POST /v1/sessions/{id}/resume",
    ] {
        rows.push(row(
            route,
            if route.starts_with("GET") {
                None
            } else {
                empty
            },
            404,
            404,
        ));
    }
    // Forwarded to a node, if the session exists.
    for route in [
        "POST /v1/sessions/{id}/signal",
        "POST /v1/sessions/{id}/exec",
        "GET /v1/sessions/{id}/execs",
        "GET /v1/sessions/{id}/execs/{exec_id}",
        "GET /v1/sessions/{id}/execs/{exec_id}/output",
        "POST /v1/sessions/{id}/execs/{exec_id}/signal",
        "POST /v1/sessions/{id}/execs/{exec_id}/stdin",
        "GET /v1/sessions/{id}/files",
        "HEAD /v1/sessions/{id}/files",
        "PUT /v1/sessions/{id}/files",
        "DELETE /v1/sessions/{id}/files",
        "POST /v1/sessions/{id}/files:list",
        "POST /v1/sessions/{id}/files:search",
        "POST /v1/sessions/{id}/files:patch",
        "GET /v1/sessions/{id}/files:watch",
        "POST /v1/sessions/{id}/files:edit",
        "POST /v1/sessions/{id}/files:move",
        "POST /v1/sessions/{id}/files:mkdir",
        "POST /v1/sessions/{id}/import",
        "GET /v1/sessions/{id}/pty",
    ] {
        rows.push(row(route, None, 404, 404));
    }
    rows
}

fn credential() -> Value {
    json!({
        "project_id": SOME_ID, "name": "forge", "url": "https://forge.example",
        "secret": "long enough to be one",
    })
}

fn repository() -> Value {
    json!({
        "project_id": SOME_ID, "name": "site", "provider": "git",
        "url": "https://forge.example/site",
    })
}

fn promotion() -> Value {
    json!({"task_id": SOME_ID, "repository": "site", "changeset": SOME_ID, "title": "a"})
}

fn decision() -> Value {
    json!({"commit": "a".repeat(40)})
}

fn uuid_name() -> String {
    format!("n-{}", uuid::Uuid::new_v4().simple())
}

fn described() -> Result<BTreeSet<String>> {
    let document = serde_json::to_value(cynode_orchestrator::openapi())?;
    let mut routes = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().context("paths")? {
        for method in operations.as_object().context("operations")?.keys() {
            routes.insert(format!("{} {path}", method.to_uppercase()));
        }
    }
    Ok(routes)
}

#[tokio::test]
async fn every_route_admits_exactly_its_callers() -> Result<()> {
    let rows = rows();
    let listed: BTreeSet<String> = rows.iter().map(|row| row.route.to_owned()).collect();
    let described = described()?;
    ensure!(
        listed == described,
        "without a row: {:?}; without a route: {:?}",
        described.difference(&listed),
        listed.difference(&described)
    );

    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let client = orchestrator.client()?;
    let url = orchestrator.url()?;
    let http = reqwest::Client::builder()
        .no_proxy()
        .timeout(std::time::Duration::from_secs(30))
        .build()?;
    let admin = orchestrator.token()?;
    let post = async |path: &str, body: Value| -> Result<Value> {
        let answer = http
            .post(format!("{url}{path}"))
            .bearer_auth(&admin)
            .json(&body)
            .send()
            .await?;
        ensure!(
            answer.status().is_success(),
            "{path}: {}",
            answer.text().await?
        );
        Ok(answer.json().await?)
    };
    let task = client
        .create_task(&TaskCreate {
            name: "t".to_owned(),
            ..Default::default()
        })
        .await?;
    post("/v1/users", json!({"name": "ann"})).await?;
    let token = async |kind: TokenKind, tasks: bool| -> Result<String> {
        let request = TokenCreate {
            version: None,
            kind,
            user: (kind == TokenKind::User).then(|| "ann".to_owned()),
            project_id: None,
            task_ids: if tasks { vec![task.id] } else { Vec::new() },
            job_id: None,
            session_id: None,
            expires_in_seconds: None,
        };
        Ok(client.create_token(&request).await?.token)
    };
    let person = token(TokenKind::User, false).await?;
    let (manager, analyst) = (
        token(TokenKind::ProjectManager, true).await?,
        token(TokenKind::ProjectAnalyst, true).await?,
    );
    let revoked = client
        .create_token(&TokenCreate {
            version: None,
            kind: TokenKind::User,
            user: None,
            project_id: None,
            task_ids: Vec::new(),
            job_id: None,
            session_id: None,
            expires_in_seconds: None,
        })
        .await?;
    client.revoke_token(revoked.id).await?;

    let mut wrong = BTreeMap::new();
    for row in &rows {
        let (method, path) = row.route.split_once(' ').context("method and path")?;
        let path = path
            .replace("{id}", SOME_ID)
            .replace("{exec_id}", SOME_ID)
            .replace("{task_id}", SOME_ID)
            .replace("{scope}", "system")
            .replace("{scope_id}", SOME_ID)
            .replace("{key}", "some.key")
            .replace("{path}", "a/b");
        let path = if row.route == "GET /v1/artifacts" {
            format!("{path}?task_id={SOME_ID}")
        } else {
            path
        };
        let callers = [
            (None, 401),
            (Some(&revoked.token), 401),
            (Some(&person), row.person),
            (Some(&admin), row.admin),
            (Some(&manager), row.agent),
            (Some(&analyst), row.agent),
        ];
        for (number, (token, expected)) in callers.into_iter().enumerate() {
            let mut request = http.request(method.parse()?, format!("{url}{path}"));
            if let Some(token) = token {
                request = request.bearer_auth(token);
            }
            if let Some(body) = row.body {
                request = request.json(&body());
            }
            let answer = request.send().await?;
            let status = answer.status().as_u16();
            if status != expected {
                wrong.insert(
                    format!("{} by caller {number}", row.route),
                    format!("{status} instead of {expected}: {}", answer.text().await?),
                );
            }
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// Paths that lead elsewhere for a parser that treats backslashes as slashes, or decodes twice.
#[tokio::test]
async fn no_path_leads_from_a_callers_session_to_that_of_another() -> Result<()> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let address = orchestrator.url()?.trim_start_matches("http://").to_owned();
    let token = orchestrator.token()?;
    for step in [
        "..\\..\\x",
        "%2e%2e%5c%2e%2e",
        "..%2f..%2fx",
        "%2e%2e",
        "..",
    ] {
        let mut stream = tokio::net::TcpStream::connect(&address).await?;
        let request = format!(
            "GET /v1/sessions/{SOME_ID}/execs/{step} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \
             {token}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        ensure!(
            answer.starts_with("HTTP/1.1 404") && answer.contains("exec_not_found"),
            "{step}: {answer}"
        );
    }
    Ok(())
}

/// A client that announces a body and withholds it doesn't delay a call that takes none.
#[tokio::test]
async fn a_call_that_takes_no_body_does_not_wait_for_one() -> Result<()> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let address = orchestrator.url()?.trim_start_matches("http://").to_owned();
    let token = orchestrator.token()?;
    for (request, status) in [
        ("GET /v1/tasks".to_owned(), 200),
        (format!("DELETE /v1/tokens/{SOME_ID}"), 404),
        (format!("DELETE /v1/images/{SOME_ID}"), 404),
        (format!("POST /v1/jobs/{SOME_ID}/stop"), 404),
    ] {
        let mut stream = tokio::net::TcpStream::connect(&address).await?;
        let head = format!(
            "{request} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: \
             9\r\nConnection: close\r\n\r\nnot yet,"
        );
        stream.write_all(head.as_bytes()).await?;
        let expected = format!("HTTP/1.1 {status} ");
        let mut answer = vec![0; expected.len()];
        let read = tokio::time::timeout(
            std::time::Duration::from_secs(10),
            stream.read_exact(&mut answer),
        )
        .await;
        read.with_context(|| format!("{request}: no answer"))??;
        assert_eq!(String::from_utf8_lossy(&answer), expected, "{request}");
    }
    Ok(())
}
