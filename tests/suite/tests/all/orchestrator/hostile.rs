//! Malformed requests to every route of the user API and of the control plane: each is refused by
//! name, and nothing changes.

mod addresses;
mod others;
mod registration;

use std::{collections::BTreeSet, process::Command};

use anyhow::{Context as _, Result, ensure};
use cynode_api::Problem;
use cynode_tests::{Answer, postgres_programs};
use http::Method;
use serde_json::{Value, json};

use super::cluster::{Cluster, session, text};
use crate::api::code_of;

const SOME_ID: &str = "01890000-0000-7000-8000-000000000001";

/// Statuses that refuse the request itself. Other statuses concern the caller or the server.
const REFUSED: [u16; 8] = [400, 403, 404, 409, 412, 413, 415, 422];

/// Every route that takes JSON, with a valid body. A route without a row fails the test.
fn good(route: &str) -> Option<Value> {
    Some(match route {
        "POST /v1/projects"
        | "POST /v1/tasks"
        | "POST /v1/users"
        | "POST /v1/groups"
        | "PATCH /v1/projects/{id}"
        | "PATCH /v1/tasks/{id}" => {
            json!({"name": "hostile"})
        }
        "POST /v1/tokens" => json!({"kind": "user"}),
        "POST /v1/tokens/{id}/renew" => json!({"expires_in_seconds": 60}),
        "PUT /v1/policies/{id}" => json!({"text": ""}),
        "POST /v1/policies:test" => json!({"action": "task.list"}),
        "PUT /v1/settings/{key}" | "PUT /v1/preferences/{scope}/{scope_id}/{key}" => {
            json!({"value": 1})
        }
        "POST /v1/images" => json!({"image_ref": "localhost/hostile:1"}),
        "PATCH /v1/images/{id}" => json!({"is_allowed": true}),
        "POST /v1/credentials" => json!({
            "project_id": SOME_ID, "name": "hostile", "url": "https://forge.example",
            "secret": "long enough to be one",
        }),
        "POST /v1/credentials/{id}/rotate" => json!({"secret": "long enough to be one"}),
        "POST /v1/repositories" => json!({
            "project_id": SOME_ID, "name": "hostile", "provider": "git",
            "url": "https://forge.example/hostile",
        }),
        "POST /v1/promotions" => json!({
            "task_id": SOME_ID, "repository": "hostile", "changeset": SOME_ID, "title": "hostile",
        }),
        "POST /v1/promotions/{id}/approve" | "POST /v1/promotions/{id}/reject" => {
            json!({"commit": "a".repeat(40)})
        }
        "POST /v1/credentials/{id}/disable" | "POST /v1/promotions/{id}/cancel" => json!({}),
        "POST /v1/nodes/{id}/drain" => json!({"drain": true}),
        "POST /v1/nodes/keys" => json!({"reusable": true}),
        "POST /v1/jobs" => json!({"command": ["true"]}),
        "POST /v1/sessions" => session(),
        "PATCH /v1/sessions/{id}" => json!({"labels": {"a": "b"}}),
        "POST /v1/sessions/{id}/end" | "POST /v1/sessions/{id}/resume" => json!({}),
        "POST /v1/sessions/{id}/signal" | "POST /v1/sessions/{id}/execs/{exec_id}/signal" => {
            json!({"signal": "KILL"})
        }
        "POST /v1/sessions/{id}/exec" => json!({"argv": ["touch", "made"], "timeout_ms": 10_000}),
        "POST /v1/sessions/{id}/execs/{exec_id}/stdin" => json!({"data_b64": "YQ=="}),
        "POST /v1/sessions/{id}/files:list" => json!({"path": "."}),
        "POST /v1/sessions/{id}/files:search" => json!({"pattern": "x"}),
        "POST /v1/sessions/{id}/files:patch" => {
            json!({"diff": "--- /dev/null\n+++ b/made\n@@ -0,0 +1 @@\n+x\n"})
        }
        "POST /v1/sessions/{id}/files:edit" => {
            json!({"path": "kept", "old": "no such text", "new": "text"})
        }
        "POST /v1/sessions/{id}/files:move" => json!({"from": "kept", "to": "moved"}),
        "POST /v1/sessions/{id}/files:mkdir" => json!({"path": "made"}),
        "POST /v1/sessions/{id}/export" => json!({"format": "tar"}),
        _ => return None,
    })
}

/// Strings that accept any character.
const ANY_TEXT: [&str; 9] = [
    "old",
    "new",
    "stdin",
    "stdin_b64",
    "data",
    "data_b64",
    "pattern",
    "glob",
    "diff",
];
/// Members that accept any value.
const ANY_VALUE: [&str; 3] = ["value", "metadata", "capabilities"];

/// A body, how it is sent, and the expected response.
struct Case {
    what: String,
    body: Vec<u8>,
    status: &'static [u16],
    /// The name that the detail must contain.
    named: String,
}

fn case(
    what: impl Into<String>,
    body: impl Into<Vec<u8>>,
    status: &'static [u16],
    named: &str,
) -> Case {
    Case {
        what: what.into(),
        body: body.into(),
        status,
        named: named.to_owned(),
    }
}

/// The valid body with one member replaced by raw JSON.
fn replace_member(good: &Value, name: &str, value: &str) -> String {
    let mut body = good.clone();
    body[name] = json!("@here@");
    body.to_string().replace("\"@here@\"", value)
}

/// Bodies that no route accepts.
fn cases_for_any(good: &Value) -> Vec<Case> {
    let text = good.to_string();
    let member = |member: &str| {
        format!(
            "{}{}{member}}}",
            &text[..text.len() - 1],
            if text == "{}" { "" } else { "," }
        )
    };
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let mut not_utf8 = member("\"surprise\":\"?\"").into_bytes();
    if let Some(at) = not_utf8.iter().rposition(|byte| *byte == b'?') {
        not_utf8[at] = 0xff;
    }
    vec![
        case("broken", "{broken", &[400], "line 1"),
        case("null", "null", &[400], "a JSON object"),
        case("a list", "[]", &[400], "a JSON object"),
        case("a list of it", format!("[{text}]"), &[400], "a JSON object"),
        case("a text", "\"text\"", &[400], "a JSON object"),
        case("a number", "17", &[400], "a JSON object"),
        case("deep lists", deep(100_000), &[400], "a JSON object"),
        case(
            "deep within",
            member(&format!("\"surprise\":{}", deep(100_000))),
            &[400],
            "",
        ),
        case(
            "something after it",
            format!("{text} x"),
            &[400],
            "after the body",
        ),
        case(
            "it twice",
            format!("{text}{text}"),
            &[400],
            "after the body",
        ),
        case(
            "an unknown member",
            member("\"surprise\":1"),
            &[400],
            "surprise",
        ),
        case(
            "a member twice",
            member("\"version\":1,\"version\":1"),
            &[400],
            "version",
        ),
        case("not UTF-8", not_utf8, &[400], ""),
        case("NUL as a byte", member("\"surprise\":\"a\0b\""), &[400], ""),
        case(
            "UTF-16",
            text.encode_utf16()
                .flat_map(u16::to_le_bytes)
                .collect::<Vec<_>>(),
            &[400],
            "",
        ),
        case(
            "a byte order mark",
            format!("\u{feff}{text}"),
            &[400],
            "a JSON object",
        ),
        case(
            "another version",
            member("\"version\":2"),
            &[422],
            "version 2",
        ),
        case("no version", member("\"version\":\"1\""), &[400], "version"),
        case(
            "10 MiB and one more",
            vec![b' '; (10 << 20) + 1],
            &[413],
            "10485760",
        ),
        case(
            "10 MiB and one more of it",
            format!("{}{text}", " ".repeat((10 << 20) + 1)),
            &[413],
            "10485760",
        ),
    ]
}

/// The types that a member accepts; empty if it accepts any.
fn types(schemas: &Value, schema: &Value) -> BTreeSet<String> {
    if let Some(name) = schema["$ref"]
        .as_str()
        .and_then(|name| name.rsplit('/').next())
    {
        return types(schemas, &schemas[name]);
    }
    let mut found = BTreeSet::new();
    for part in schema["oneOf"]
        .as_array()
        .into_iter()
        .chain(schema["anyOf"].as_array())
        .flatten()
    {
        found.extend(types(schemas, part));
    }
    match &schema["type"] {
        Value::String(one) => drop(found.insert(one.clone())),
        Value::Array(several) => found.extend(
            several
                .iter()
                .filter_map(|one| one.as_str().map(str::to_owned)),
        ),
        _ => {}
    }
    found
}

/// Each member with values that it must not have.
fn cases_for_members(good: &Value, schemas: &Value, schema: &Value) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, member) in schema["properties"].as_object().into_iter().flatten() {
        if name == "version" || ANY_VALUE.contains(&name.as_str()) {
            continue;
        }
        let types = types(schemas, member);
        let is = |kind: &str| types.contains(kind);
        let mut add = |value: &str, status: &'static [u16], named: &str| {
            cases.push(case(
                format!("{name}: {}", &value[..value.len().min(40)]),
                replace_member(good, name, value),
                status,
                named,
            ));
        };
        for (kind, value) in [
            ("array", "[[]]"),
            ("object", "{\"surprise\":{}}"),
            ("integer", "7.5"),
            ("string", "\"no such\""),
            ("boolean", "true"),
            ("null", "null"),
        ] {
            let taken = is(kind) || (kind == "integer" && is("number"));
            if !taken {
                add(value, &[400], name);
            }
        }
        if is("integer") {
            for value in ["-1", "1e400", "99999999999999999999999", "\"7\"", "7.5"] {
                if member["minimum"] == 0 || value != "-1" {
                    add(value, &[400], "");
                }
            }
        }
        if is("string") && !ANY_TEXT.contains(&name.as_str()) {
            add("\"a\\u0000b\"", &[400], name);
            add(&format!("\"{}\"", "x".repeat(2 << 20)), &REFUSED, "");
        }
        if is("array") {
            for value in ["[\"a\\u0000b\"]", "[1]", "[null]", "[[\"x\"]]"] {
                add(value, &[400], name);
            }
            add(
                &format!("[{}]", vec!["\"x\""; 200_000].join(",")),
                &REFUSED,
                "",
            );
        }
        if is("object") {
            for value in ["{\"a\\u0000b\":\"x\"}", "{\"a\":\"b\\u0000\"}", "{\"a\":1}"] {
                add(value, &[400], name);
            }
            add("{\"a\":\"1\",\"a\":\"2\"}", &[400], "");
        }
    }
    cases
}

/// The problem document of a response, which must be complete.
fn problem_of(answer: &Answer) -> Result<Problem> {
    ensure!(
        answer.header("content-type") == "application/problem+json",
        "not a problem document"
    );
    code_of(answer)?;
    answer.problem()
}

/// Ids of existing things, for each path parameter.
pub(super) struct ExistingIds {
    pub(super) session: String,
    exec: String,
    project: String,
    pub(super) task: String,
    image: String,
    node: String,
    job: String,
    token: String,
    /// Of a credential, a repository and a promotion.
    of_git: String,
}

impl ExistingIds {
    pub(super) async fn make(cluster: &Cluster) -> Result<Self> {
        let admin = cluster.orchestrator.token()?;
        let project = cluster
            .make(&admin, "/v1/projects", &json!({"name": "p"}))
            .await?;
        let task = cluster
            .make(
                &admin,
                "/v1/tasks",
                &json!({"name": "t", "project_id": project["id"]}),
            )
            .await?;
        let id = cluster.session(&admin, &session()).await?;
        let exec = json!({
            "argv": ["sh", "-c", "echo x > kept; cat"],
            "timeout_ms": 600_000,
            "background": true,
            "stdin_open": true
        });
        let exec = cluster
            .make(&admin, &format!("/v1/sessions/{id}/exec"), &exec)
            .await?;
        let list = async |path: &str| -> Result<String> {
            let answer = Answer::of(cluster.request(Method::GET, path)?).await?;
            text(&serde_json::from_slice::<Value>(&answer.body)?["items"][0]["id"])
        };
        // Wait for its end, so that nothing changes in the background any more.
        let job = cluster
            .request(Method::POST, "/v1/jobs")?
            .header("prefer", "wait=60")
            .json(&json!({"command": ["true"], "task_id": task["id"]}));
        let job: Value = serde_json::from_slice(&Answer::of(job).await?.body)?;
        ensure!(job["state"] == "completed", "{job}");
        let token = cluster
            .make(&admin, "/v1/tokens", &json!({"kind": "user"}))
            .await?;
        insert_git_objects(cluster, &text(&project["id"])?, &text(&task["id"])?)?;
        Ok(Self {
            session: id,
            exec: text(&exec["exec_id"])?,
            project: text(&project["id"])?,
            task: text(&task["id"])?,
            image: list("/v1/images").await?,
            node: list("/v1/nodes").await?,
            job: text(&job["job_id"])?,
            token: text(&token["id"])?,
            of_git: SOME_ID.to_owned(),
        })
    }

    /// A body about the existing project and task.
    fn within(&self, mut body: Value) -> Value {
        for (name, id) in [("project_id", &self.project), ("task_id", &self.task)] {
            if body.get(name).is_some() {
                body[name] = json!(id);
            }
        }
        body
    }

    pub(super) fn path(&self, path: &str) -> Result<String> {
        let id = match path
            .trim_start_matches("/v1/worker")
            .trim_start_matches("/v1")
            .split('/')
            .nth(1)
            .unwrap_or_default()
        {
            "sessions" => &self.session,
            "projects" => &self.project,
            "tasks" => &self.task,
            "images" => &self.image,
            "nodes" => &self.node,
            "jobs" => &self.job,
            "tokens" => &self.token,
            "credentials" | "repositories" | "promotions" => &self.of_git,
            _ => SOME_ID,
        };
        let path = path
            .replace("{id}", id)
            .replace("{exec_id}", &self.exec)
            .replace("{task_id}", &self.task);
        let path = path
            .replace("{scope}", "task")
            .replace("{scope_id}", &self.task)
            .replace("{key}", "hostile.key")
            .replace("{path}", "a/b")
            .replace("{job_id}", &self.job);
        ensure!(
            !path.contains('{'),
            "{path} has a parameter unknown to this test"
        );
        Ok(path)
    }
}

/// A credential, a repository and an ended promotion, which no git role has seen.
fn insert_git_objects(cluster: &Cluster, project: &str, task: &str) -> Result<()> {
    let at = "2026-01-01T00:00:00Z";
    let repository = json!({
        "id": SOME_ID, "project_id": project, "name": "kept", "provider": "git",
        "url": "https://forge.example/kept", "revision": 1, "created_by": "admin", "created_at": at,
    });
    let promotion = json!({
        "id": SOME_ID, "task_id": task, "project_id": project, "repository_id": SOME_ID,
        "repository": "kept", "state": "done", "until": "applied", "changeset": SOME_ID,
        "changeset_sha256": "", "format": "patch", "target": "main", "branch": "b", "title": "t",
        "message": "m", "created_by": "admin", "created_at": at, "updated_at": at,
    });
    let progress = json!({
        "principal": {"kind": "user", "id": SOME_ID, "name": "admin", "admin": true, "groups": []},
        "at": 0, "author": "admin",
    });
    let statements = [
        format!(
            "insert into credentials (id, project_id, name, role, url, username, key_id, encapsulated, ciphertext, held, created_by)
             values ('{SOME_ID}', '{project}', 'kept', 'git', 'https://forge.example', 'x', '', '', '', '', 'admin')"
        ),
        format!(
            "insert into repositories (id, project_id, name, object, revision, created_by)
             values ('{SOME_ID}', '{project}', 'kept', '{repository}', 1, 'admin')"
        ),
        format!(
            "insert into promotions (id, task_id, repository_id, changeset, branch, state, until, object, progress, owner_id, created_by)
             select '{SOME_ID}', '{task}', '{SOME_ID}', '{SOME_ID}', 'b', 'done', 'applied', '{promotion}', '{progress}', owner_id, 'admin'
             from tasks where id = '{task}'"
        ),
    ];
    for statement in statements {
        cluster.control_plane.postgres.query(&statement)?;
    }
    Ok(())
}

/// The part of the database that callers determine.
fn database_state(cluster: &Cluster) -> Result<String> {
    let socket = cluster.control_plane.world.directory().join("pg");
    let run = |program: &str, arguments: &[&str]| -> Result<String> {
        let output = Command::new(postgres_programs()?.join(program))
            .arg("--host")
            .arg(&socket)
            .args(["--username=cynode"])
            .args(arguments)
            .arg("postgres")
            .output()?;
        ensure!(
            output.status.success(),
            "{program}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    };
    // Excludes what nodes and reconcilers write on their own.
    let tables = [
        "users",
        "groups",
        "group_members",
        "api_tokens",
        "projects",
        "tasks",
        "system_settings",
        "preferences",
        "sandbox_images",
        "policies",
        "credentials",
        "repositories",
        "promotions",
    ];
    let tables =
        tables
            .into_iter()
            .chain(["sandbox_image_versions", "artifacts", "events", "node_keys"]);
    let mut arguments: Vec<String> = ["--data-only", "--inserts"].map(str::to_owned).to_vec();
    arguments.extend(tables.map(|table| format!("--table={table}")));
    let dump = run(
        "pg_dump",
        &arguments.iter().map(String::as_str).collect::<Vec<_>>(),
    )?;
    // Only rows: each dump has its own random restrict key.
    let dump: String = dump
        .lines()
        .filter(|line| line.starts_with("INSERT"))
        .fold(String::new(), |all, line| all + line + "\n");
    let rest = "select 'job', job_id::text, state, body::text from jobs union all select 'session', session_id::text, state, body::text from sessions \
                union all select 'node', id::text, name, api_url || draining || capability from nodes order by 1, 2";
    Ok(dump + &run("psql", &["--no-align", "--tuples-only", "--command", rest])?)
}

/// A session's labels, commands and files.
async fn session_state(cluster: &Cluster, ids: &ExistingIds) -> Result<String> {
    let client = cluster.orchestrator.sessions()?;
    let id = ids.session.parse()?;
    let labels = client.get_session(id).await?.labels;
    let execs: Vec<String> = client
        .list_execs(id)
        .await?
        .items
        .iter()
        .map(|exec| format!("{} {:?}", exec.exec_id, exec.state))
        .collect();
    let listed = Answer::of(
        cluster
            .request(Method::POST, &format!("/v1/sessions/{id}/files:list"))?
            .json(&json!({"depth": 5})),
    )
    .await?;
    Ok(format!(
        "{labels:?} {execs:?} {}",
        String::from_utf8_lossy(&listed.body)
    ))
}

#[tokio::test]
async fn malformed_bodies_are_refused_on_every_route_and_change_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let ids = ExistingIds::make(&cluster).await?;
    let document = cynode_orchestrator::openapi();
    let schemas = &document["components"]["schemas"];
    let before = (
        database_state(&cluster)?,
        session_state(&cluster, &ids).await?,
    );
    let (mut sent, mut wrong) = (0, Vec::new());
    for (path, operations) in document["paths"].as_object().context("paths")? {
        for (method, operation) in operations.as_object().context("operations")? {
            let Some(name) =
                operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str()
            else {
                continue;
            };
            let route = format!("{} {path}", method.to_uppercase());
            let good = good(&route).with_context(|| format!("{route} has no row"))?;
            let good = ids.within(good);
            let schema = &schemas[name.rsplit('/').next().unwrap_or_default()];
            ensure!(
                schema["additionalProperties"] == false,
                "{route}: {name} takes unknown members"
            );
            let address = ids.path(path)?;
            let method: Method = method.to_uppercase().parse()?;
            let mut cases = cases_for_any(&good);
            let is_exec = route == "POST /v1/sessions/{id}/exec";
            if is_exec {
                // A command may be longer: up to the kernel's limit, with JSON escapes.
                cases.retain(|case| case.named != "10485760");
                cases.push(case(
                    "16 MiB and one more",
                    vec![b' '; (16 << 20) + 1],
                    &[413],
                    "16777216",
                ));
            }
            if good.get("secret").is_some() {
                // Credentials are never spooled to a file, so their bodies are short.
                for case in &mut cases {
                    if case.named == "10485760" {
                        case.named = "65536".to_owned();
                    }
                }
            }
            cases.extend(cases_for_members(&good, schemas, schema));
            for case in cases {
                let request = cluster
                    .request(method.clone(), &address)?
                    .header("content-type", "application/json")
                    .body(case.body);
                let answer = Answer::of(request)
                    .await
                    .with_context(|| format!("{route}: {}", case.what))?;
                sent += 1;
                let problem = problem_of(&answer);
                let detail = problem
                    .as_ref()
                    .map(|problem| problem.detail.clone())
                    .unwrap_or_default();
                if problem.is_err()
                    || !case.status.contains(&answer.status)
                    || !detail.contains(&case.named)
                    || detail.len() > 1_000
                {
                    let excerpt: String = String::from_utf8_lossy(&answer.body)
                        .chars()
                        .take(300)
                        .collect();
                    wrong.push(format!(
                        "{route}: {}: {} instead of {:?} naming {:?}: {excerpt}",
                        case.what, answer.status, case.status, case.named
                    ));
                }
            }
            for kind in [
                &b"text/plain"[..],
                b"application/x-www-form-urlencoded",
                b"multipart/form-data",
                b"application/jsonx",
                b"",
                b"application/json\xff",
            ] {
                let kind = http::HeaderValue::from_bytes(kind)?;
                let answer = Answer::of(
                    cluster
                        .request(method.clone(), &address)?
                        .header("content-type", &kind)
                        .body(good.to_string()),
                )
                .await?;
                sent += 1;
                // A form is accepted there, but not without a boundary.
                let status = if is_exec && kind == "multipart/form-data" {
                    400
                } else {
                    415
                };
                if answer.status != status || problem_of(&answer).is_err() {
                    wrong.push(format!("{route}: of the type {kind:?}: {answer:?}"));
                }
            }
        }
    }
    ensure!(
        wrong.is_empty(),
        "of {sent} bodies {} got a wrong response: {wrong:#?}",
        wrong.len()
    );
    ensure!(sent > 1_000, "only {sent} were sent");
    assert_eq!(
        (
            database_state(&cluster)?,
            session_state(&cluster, &ids).await?
        ),
        before
    );
    Ok(())
}
