//! Malformed paths, queries and headers.

use anyhow::{Context as _, Result, ensure};
use cynode_tests::Answer;
use http::{HeaderValue, Method};
use serde_json::Value;

use super::{ExistingIds, REFUSED, SOME_ID, database_state, problem_of, session_state};
use crate::{
    api::code_of,
    orchestrator::cluster::{Cluster, text},
};

/// Values in place of a path parameter.
fn invalid_path_segments() -> Vec<String> {
    let mut parts: Vec<String> = [
        "%ff",
        "%00",
        "a%00b",
        "%C3%28",
        "..%2f..%2fv1%2fusers",
        "'%20or%201=1",
        "null",
        "-1",
        "%F0%9F%92%A9",
        "%",
    ]
    .map(str::to_owned)
    .to_vec();
    parts.push("x".repeat(20_000));
    parts
}

/// Reports whether this is a valid artifact path.
fn is_a_path(odd: &str) -> bool {
    odd.len() < 1_000 && !["%ff", "%00", "a%00b", "%C3%28"].contains(&odd) && !odd.contains("..")
}

#[tokio::test]
async fn malformed_paths_are_refused_on_every_route_and_change_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let ids = ExistingIds::make(&cluster).await?;
    let before = (
        database_state(&cluster)?,
        session_state(&cluster, &ids).await?,
    );
    let document = cynode_orchestrator::openapi();
    let (mut sent, mut wrong) = (0, Vec::new());
    for (path, operations) in document["paths"].as_object().context("paths")? {
        for (method, operation) in operations.as_object().context("operations")? {
            let parameters = operation["parameters"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            for parameter in parameters
                .iter()
                .filter(|parameter| parameter["in"] == "path")
            {
                let name = format!("{{{}}}", text(&parameter["name"])?);
                for odd in invalid_path_segments() {
                    // These are valid names for new things.
                    let is_name = name == "{key}" || path.starts_with("/v1/policies");
                    if method == "put"
                        && ((is_name && ["null", "-1"].contains(&odd.as_str()))
                            || (name == "{path}" && is_a_path(&odd)))
                    {
                        continue;
                    }
                    let address = ids
                        .path(&path.replacen(&name, "@odd@", 1))?
                        .replacen("@odd@", &odd, 1);
                    let mut request = cluster.request(method.to_uppercase().parse()?, &address)?;
                    if operation["requestBody"]["content"]["application/json"].is_object() {
                        request = request.header("content-type", "application/json").body(
                            super::good(&format!("{} {path}", method.to_uppercase()))
                                .context("a row")?
                                .to_string(),
                        );
                    }
                    let answer = Answer::of(request).await?;
                    sent += 1;
                    let refused =
                        (400..500).contains(&answer.status) && REFUSED.contains(&answer.status);
                    if !refused || (method != "head" && problem_of(&answer).is_err()) {
                        let odd: String = odd.chars().take(30).collect();
                        wrong.push(format!(
                            "{method} {path} with {name} = {odd}: {} {:?}",
                            answer.status,
                            String::from_utf8_lossy(&answer.body)
                        ));
                    }
                }
            }
        }
    }
    ensure!(
        wrong.is_empty(),
        "of {sent} paths {} got a wrong response: {wrong:#?}",
        wrong.len()
    );
    ensure!(sent > 500, "only {sent} were sent");
    assert_eq!(
        (
            database_state(&cluster)?,
            session_state(&cluster, &ids).await?
        ),
        before
    );
    Ok(())
}

/// Invalid values of a query parameter, by its type.
fn invalid_values(schemas: &Value, schema: &Value) -> Vec<&'static str> {
    let name = schema["$ref"]
        .as_str()
        .and_then(|name| name.rsplit('/').next())
        .unwrap_or_default();
    let schema = if name.is_empty() {
        schema
    } else {
        &schemas[name]
    };
    let types = super::types(schemas, schema);
    let mut odd = vec!["%ff", "a%ffb", "%C3%28"];
    if types.contains("integer") {
        odd.extend([
            "-1",
            "1.5",
            "1e3",
            "99999999999999999999999",
            "x",
            "",
            "%00",
            "1%00",
        ]);
    } else if types.contains("boolean") {
        odd.extend(["yes", "", "%00", "1"]);
    } else if !schema["enum"].is_null() || schema["format"] == "uuid" {
        odd.extend(["x", "", "%00", "null"]);
    } else {
        odd.extend(["%00", "a%00b"]);
    }
    odd
}

#[tokio::test]
async fn malformed_queries_are_refused_on_every_route_and_change_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let ids = ExistingIds::make(&cluster).await?;
    let before = (
        database_state(&cluster)?,
        session_state(&cluster, &ids).await?,
    );
    let document = cynode_orchestrator::openapi();
    let schemas = &document["components"]["schemas"];
    let (mut sent, mut wrong) = (0, Vec::new());
    for (path, operations) in document["paths"].as_object().context("paths")? {
        for (method, operation) in operations.as_object().context("operations")? {
            let parameters = operation["parameters"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            let address = ids.path(path)?;
            let mut queries = Vec::new();
            for parameter in parameters
                .iter()
                .filter(|parameter| parameter["in"] == "query")
            {
                let name = text(&parameter["name"])?;
                // A list accepts any value, any number of times.
                if parameter["schema"]["type"] == "array" {
                    continue;
                }
                queries.extend(
                    invalid_values(schemas, &parameter["schema"])
                        .into_iter()
                        .map(|odd| format!("{name}={odd}")),
                );
                let twice = if parameter["schema"]["type"] == "integer" {
                    "1"
                } else {
                    SOME_ID
                };
                queries.push(format!("{name}={twice}&{name}={twice}"));
            }
            if !queries.is_empty() {
                queries.extend(["surprise=1", "%ff=1", "limit%00=1"].map(str::to_owned));
            }
            for query in queries {
                let answer = Answer::of(cluster.request(
                    method.to_uppercase().parse()?,
                    &format!("{address}?{query}"),
                )?)
                .await?;
                sent += 1;
                if answer.status != 400 || (method != "head" && problem_of(&answer).is_err()) {
                    wrong.push(format!(
                        "{method} {path}?{query}: {} {:?}",
                        answer.status,
                        String::from_utf8_lossy(&answer.body)
                    ));
                }
            }
        }
    }
    ensure!(
        wrong.is_empty(),
        "of {sent} queries {} got a wrong response: {wrong:#?}",
        wrong.len()
    );
    ensure!(sent > 300, "only {sent} were sent");
    assert_eq!(
        (
            database_state(&cluster)?,
            session_state(&cluster, &ids).await?
        ),
        before
    );
    Ok(())
}

#[tokio::test]
async fn malformed_headers_are_refused_and_change_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let ids = ExistingIds::make(&cluster).await?;
    let before = (
        database_state(&cluster)?,
        session_state(&cluster, &ids).await?,
    );
    let (artifact, files) = (
        format!("/v1/tasks/{}/artifacts/a/b", ids.task),
        format!("/v1/sessions/{}/files?path=made", ids.session),
    );
    let long = "x".repeat(300);
    let other_hash = "0".repeat(64);
    for (path, name, value, status) in [
        (&artifact, "x-content-sha256", &b"\xff"[..], 400),
        (&artifact, "x-content-sha256", b"", 400),
        (&artifact, "x-content-sha256", b"abc", 400),
        (&artifact, "x-content-sha256", other_hash.as_bytes(), 412),
        (&artifact, "content-type", b"text/\xff", 400),
        (&artifact, "content-type", long.as_bytes(), 400),
        (&files, "x-content-sha256", b"\xff", 400),
        (&files, "x-content-sha256", other_hash.as_bytes(), 400),
        (&files, "x-mode", b"\xff", 400),
        (&files, "x-mode", b"7777", 400),
        (&files, "if-none-match", b"\xff", 400),
    ] {
        let request = cluster
            .request(Method::PUT, path)?
            .header(name, HeaderValue::from_bytes(value)?)
            .body("bytes");
        let answer = Answer::of(request).await?;
        problem_of(&answer)
            .with_context(|| format!("{path} with {name}: {value:?}: {answer:?}"))?;
        assert_eq!(
            answer.status, status,
            "{path} with {name}: {value:?}: {answer:?}"
        );
    }
    let events = cluster
        .request(Method::GET, "/v1/events")?
        .header("accept", "text/event-stream")
        .header("last-event-id", HeaderValue::from_bytes(b"\xff")?);
    assert_eq!(code_of(&Answer::of(events).await?)?, "invalid_request");
    // The caller is never guessed from a malformed header.
    for value in [&b"Bearer \xff"[..], b"Bearer \xc3\xbc", b"Bearer"] {
        let request = reqwest::Client::builder()
            .no_proxy()
            .build()?
            .get(format!("{}/v1/users", cluster.orchestrator.url()?));
        assert_eq!(
            code_of(
                &Answer::of(request.header("authorization", HeaderValue::from_bytes(value)?))
                    .await?
            )?,
            "unauthorized",
            "{value:?}"
        );
    }
    assert_eq!(
        (
            database_state(&cluster)?,
            session_state(&cluster, &ids).await?
        ),
        before
    );
    Ok(())
}

#[tokio::test]
async fn every_refusal_has_one_request_id() -> Result<()> {
    let cluster = Cluster::start().await?;
    let ids = ExistingIds::make(&cluster).await?;
    let exec = format!("/v1/sessions/{}/exec", ids.session);
    let none = format!("/v1/sessions/{}/execs/{SOME_ID}", ids.session);
    for (method, path, given) in [
        // By the orchestrator, by the node on a forwarded call, and by the node on the
        // orchestrator's own call.
        (Method::POST, "/v1/projects", None),
        (Method::POST, exec.as_str(), None),
        (Method::GET, none.as_str(), None),
        (Method::GET, none.as_str(), Some("mine-17")),
        (Method::POST, exec.as_str(), Some("mine-18")),
    ] {
        let mut request = cluster.request(method.clone(), path)?;
        if method == Method::POST {
            request = request
                .header("content-type", "application/json")
                .body("{\"surprise\":1}");
        }
        if let Some(given) = given {
            request = request.header("x-request-id", given);
        }
        let answer = Answer::of(request).await?;
        // The route compares the id in the body with the one in the header.
        code_of(&answer)?;
        let id = answer.header("x-request-id").to_owned();
        assert!(given.is_none_or(|given| given == id), "{path}: {id}");
    }
    Ok(())
}
