//! The largest request that each route accepts, and large responses that nobody reads: the memory
//! of both roles stays bounded.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{Answer, Http, memory, reset_memory_peak};
use futures_util::future::try_join_all;
use http::Method;
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpSocket, TcpStream},
};

use super::{
    cluster::{Cluster, session},
    hostile::ExistingIds,
};

/// The memory bound of a role.
const MAX_MEMORY: u64 = 300 << 20;
const MIB: usize = 1 << 20;
/// The largest JSON body.
const MAX_JSON_BODY: usize = 10 * MIB;

/// The payload of a route.
enum Payload {
    /// JSON of the maximum length, with the maximum number of values, and beyond both.
    Json,
    /// Responses that nobody reads, this many.
    Unread(usize),
    /// This many bytes.
    Bytes(usize),
    /// An archive of many entries, into a directory with a long path.
    Archive,
    /// Nothing: the call has no body, and its response is short or streams.
    Call,
}

/// A row for each route that takes no JSON. A route without a row fails the test.
#[expect(clippy::match_same_arms, reason = "one arm for each kind of route")]
fn largest(route: &str) -> Option<Payload> {
    let (method, path) = route.split_once(' ')?;
    let path = path.replace("/v1/worker/", "/v1/");
    Some(match (method, path.as_str()) {
        (
            "GET",
            "/v1/artifacts"
            | "/v1/audit"
            | "/v1/audit/checkpoints"
            | "/v1/audit/verify"
            | "/v1/events"
            | "/v1/groups"
            | "/v1/images"
            | "/v1/jobs"
            | "/v1/nodes"
            | "/v1/policies"
            | "/v1/preferences"
            | "/v1/preferences/{scope}/{scope_id}"
            | "/v1/projects"
            | "/v1/sessions"
            | "/v1/sessions/{id}/execs"
            | "/v1/settings"
            | "/v1/tasks"
            | "/v1/tokens"
            | "/v1/users",
        ) => Payload::Unread(20),
        (
            "GET",
            "/v1/sessions/{id}/execs/{exec_id}/output"
            | "/v1/jobs/{id}/output"
            | "/v1/jobs/{job_id}/output"
            | "/v1/sessions/{id}/files"
            | "/v1/sessions/{id}/files:watch",
        ) => Payload::Unread(20),
        (
            "GET",
            "/v1/artifacts/{id}/content"
            | "/v1/jobs/{job_id}/artifacts"
            | "/v1/tasks/{task_id}/artifacts/{path}",
        ) => Payload::Unread(20),
        ("PUT", "/v1/sessions/{id}/files" | "/v1/tasks/{task_id}/artifacts/{path}") => {
            Payload::Bytes(100 * MIB)
        }
        ("POST", "/v1/sessions/{id}/import") => Payload::Archive,
        (
            "GET",
            "/v1/artifacts/{id}"
            | "/v1/groups/{id}"
            | "/v1/images/{id}"
            | "/v1/jobs/{id}"
            | "/v1/jobs/{job_id}"
            | "/v1/nodes/{id}"
            | "/v1/policies/{id}"
            | "/v1/projects/{id}"
            | "/v1/sessions/{id}"
            | "/v1/sessions/{id}/execs/{exec_id}"
            | "/v1/sessions/{id}/pty"
            | "/v1/settings/{key}"
            | "/v1/tasks/{id}"
            | "/v1/tokens/{id}"
            | "/v1/users/{id}"
            | "/v1/calls/{id}",
        )
        | (
            "DELETE",
            "/v1/images/{id}" | "/v1/policies/{id}" | "/v1/tokens/{id}" | "/v1/sessions/{id}/files",
        )
        | ("HEAD", "/v1/sessions/{id}/files")
        | ("POST", "/v1/jobs/{id}/stop" | "/v1/calls/{id}/bar") => Payload::Call,
        _ => return None,
    })
}

/// Fills the tables with the largest possible rows.
fn fill(cluster: &Cluster, ids: &ExistingIds) -> Result<()> {
    let text = "repeat('x', 65000)";
    let list = format!("jsonb_build_array({text})");
    let object = format!("jsonb_build_object('x', {text})");
    let user = "(select id from users where is_admin order by created_at limit 1)";
    for statement in [
        format!(
            "insert into tasks (id, name, description, requirements, acceptance_criteria, metadata, owner_id, created_by)
             select gen_random_uuid(), 't', {text}, {list}, {list}, {object}, {user}, 'x' from generate_series(1, 300)"
        ),
        format!(
            "insert into projects (id, name, slug, scope, metadata, owner_id, created_by)
             select gen_random_uuid(), 'p', 'p-' || n, {text}, {object}, {user}, 'x' from generate_series(1, 200) n"
        ),
        format!("insert into system_settings (key, value, updated_by) select 'x.' || n, \
                 to_jsonb({text}), 'x' from generate_series(1, 200) n"),
        format!(
            "insert into preferences (scope, scope_id, key, value, updated_by)
             select 'task', '{}', 'x.' || n, to_jsonb({text}), 'x' from generate_series(1, 200) n",
            ids.task
        ),
    ] {
        cluster.control_plane.postgres.query(&statement)?;
    }
    Ok(())
}

/// Connections with a pending response that nobody reads, and with tiny socket buffers.
async fn unread(
    address: SocketAddr,
    token: &str,
    method: &str,
    path: &str,
    body: &str,
) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4_096)?;
    let mut stream = socket.connect(address).await?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: \
         application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    Ok(stream)
}

/// Waits until each connection has a response.
async fn wait_for_responses(streams: &[TcpStream]) -> Result<()> {
    for stream in streams {
        let mut first = [0; 12];
        // A connection may already be closed to make room for another.
        tokio::time::timeout(Duration::from_secs(60), stream.peek(&mut first))
            .await
            .context("no answer")??;
    }
    Ok(())
}

fn archive() -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for number in 0..9_000 {
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        header.set_mode(0o644);
        archive.append_data(&mut header, format!("{number:05}"), std::io::empty())?;
    }
    Ok(archive.into_inner()?)
}

/// One of the two roles, as its callers see it.
struct Role<'a> {
    name: &'static str,
    http: Http,
    token: String,
    address: SocketAddr,
    document: Value,
    ids: &'a ExistingIds,
}

impl Role<'_> {
    /// Sends everything to one route.
    async fn send(&self, route: &str, operation: &Value) -> Result<()> {
        let (method, path) = route.split_once(' ').context("a method and a path")?;
        let takes_json = operation["requestBody"]["content"]["application/json"].is_object();
        let largest = if takes_json {
            Payload::Json
        } else {
            largest(route).with_context(|| format!("{route} has no row"))?
        };
        let address = self.ids.path(path)?;
        let parsed: Method = method.parse()?;
        let has = |name: &str| {
            operation["parameters"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|parameter| parameter["name"] == name)
        };
        let query = [
            ("limit", "1000"),
            ("max_bytes", "16777216"),
            ("path", "large"),
            ("task_id", &self.ids.task),
        ];
        let query: Vec<String> = query
            .iter()
            .filter(|(name, _)| has(name))
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let target = format!("{address}?{}", query.join("&"));
        let sent = |body: Vec<u8>, kind: &str, path: &str| {
            Answer::of(
                self.http
                    .request(parsed.clone(), path)
                    .header("content-type", kind)
                    .body(body),
            )
        };
        let statuses: Vec<u16> = match largest {
            Payload::Json => {
                let beside = |value: String| format!("{{\"surprise\":{value}}}").into_bytes();
                let text = || beside(format!("\"{}\"", "x".repeat(MAX_JSON_BODY - 20)));
                let many = || beside(format!("[{}0]", "0,".repeat(240_000)));
                let zeros = || beside(format!("[{}0]", "0,".repeat((MAX_JSON_BODY - 20) / 2)));
                let bodies = [text(), many(), many(), zeros()];
                try_join_all(
                    bodies
                        .into_iter()
                        .map(|body| sent(body, "application/json", &address)),
                )
                .await?
                .iter()
                .map(|answer| answer.status)
                .collect()
            }
            Payload::Unread(count) => {
                let streams = try_join_all(
                    (0..count).map(|_| unread(self.address, &self.token, method, &target, "")),
                )
                .await?;
                wait_for_responses(&streams).await?;
                Vec::new()
            }
            Payload::Bytes(size) => vec![
                sent(vec![b'x'; size], "application/octet-stream", &target)
                    .await?
                    .status,
            ],
            Payload::Archive => {
                let long = |length: usize| format!("{address}?path={}", "d/".repeat(length / 2));
                let statuses = [
                    sent(archive()?, "application/x-tar", &long(4_090)),
                    sent(archive()?, "application/x-tar", &long(60_000)),
                ];
                let statuses: Vec<u16> = try_join_all(statuses)
                    .await?
                    .iter()
                    .map(|answer| answer.status)
                    .collect();
                ensure!(
                    statuses[1] == 400,
                    "{route}: a path of 60,000 bytes is answered with {}",
                    statuses[1]
                );
                statuses
            }
            Payload::Call => vec![sent(Vec::new(), "application/json", &target).await?.status],
        };
        ensure!(
            statuses
                .iter()
                .all(|status| *status < 500 || *status == 507),
            "{} {route}: {statuses:?}",
            self.name
        );
        ensure!(
            !takes_json || statuses.iter().all(|status| [400, 413].contains(status)),
            "{} {route}: {statuses:?}",
            self.name
        );
        Ok(())
    }
}

#[tokio::test]
// invariant: bounded
async fn every_route_takes_its_largest_request_and_leaves_large_answers_unread_within_a_bound()
-> Result<()> {
    let cluster = Cluster::start().await?;
    let ids = ExistingIds::make(&cluster).await?;
    fill(&cluster, &ids)?;
    let id = &ids.session;
    let (user, worker) = (cluster.orchestrator.token()?, cluster.worker.token()?);
    // Files with long names, and a large one.
    let name = "n".repeat(230);
    let script = format!(
        "i=0; while [ $i -lt 5000 ]; do : > {name}$i; i=$((i+1)); done; head -c 8388608 /dev/zero \
         > large"
    );
    cluster
        .make(
            &user,
            &format!("/v1/sessions/{id}/exec"),
            &json!({"argv": ["sh", "-c", script], "timeout_ms": 60_000}),
        )
        .await?;
    let address = |url: String| -> Result<SocketAddr> {
        url.trim()
            .trim_start_matches("http://")
            .parse()
            .with_context(|| url)
    };
    let roles = [
        Role {
            name: "orchestrator",
            http: Http::to(&cluster.orchestrator.url()?, &user)?,
            token: user.clone(),
            address: address(cluster.orchestrator.url()?)?,
            document: cynode_orchestrator::openapi(),
            ids: &ids,
        },
        Role {
            name: "worker",
            http: Http::new(&cluster.worker)?,
            token: worker,
            address: address(cluster.worker.url()?)?,
            document: cynode_worker::openapi(),
            ids: &ids,
        },
    ];
    let pids = [
        ("orchestrator", cluster.orchestrator.pid()),
        ("worker", cluster.worker.pid()),
    ];
    let mut peaks = BTreeSet::new();
    let mut look = |what: &str| -> Result<()> {
        for (name, pid) in pids {
            peaks.insert((memory(pid)?.1, name, what.to_owned()));
            reset_memory_peak(pid)?;
        }
        Ok(())
    };
    look("at the start")?;
    for role in &roles {
        for (path, operations) in role.document["paths"].as_object().context("paths")? {
            for (method, operation) in operations.as_object().context("operations")? {
                let route = format!("{} {path}", method.to_uppercase());
                role.send(&route, operation)
                    .await
                    .with_context(|| format!("{} {route}", role.name))?;
                look(&route)?;
            }
        }
        // Large responses to calls that take JSON.
        let base = if role.name == "worker" {
            "/v1/worker/sessions"
        } else {
            "/v1/sessions"
        };
        let list = json!({"max_entries": 10_000}).to_string();
        let search = json!({"pattern": ".", "max_results": 10_000}).to_string();
        let exec = json!({
            "argv": ["head", "-c", "16777216", "/dev/zero"],
            "timeout_ms": 60_000,
            "max_output_bytes": 16 << 20
        })
        .to_string();
        for (count, call, body) in [
            (40, "files:list", &list),
            (10, "files:search", &search),
            (6, "exec", &exec),
        ] {
            let path = format!("{base}/{id}/{call}");
            let streams = try_join_all(
                (0..count).map(|_| unread(role.address, &role.token, "POST", &path, body)),
            )
            .await?;
            wait_for_responses(&streams).await?;
            look(&format!("{call} unread"))?;
        }
    }
    // Tools have their own parser.
    let call = |arguments: String| {
        let body = format!(
            "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{{\"name\":\"help.list\",\"arguments\":{arguments}}}}}"
        );
        let request = roles[0]
            .http
            .request(Method::POST, "/mcp")
            .header("accept", "application/json, text/event-stream");
        Answer::of(
            request
                .header("content-type", "application/json")
                .body(body),
        )
    };
    let many = || format!("{{\"x\":[{}0]}}", "0,".repeat(240_000));
    let zeros = || format!("{{\"x\":[{}0]}}", "0,".repeat(MAX_JSON_BODY / 2 - 1_000));
    let answers = try_join_all([many(), many(), many(), zeros(), zeros()].map(call)).await?;
    ensure!(
        answers
            .iter()
            .map(|answer| answer.status)
            .eq([200, 200, 200, 413, 413]),
        "{answers:?}"
    );
    look("POST /mcp")?;
    let highest: Vec<String> = peaks
        .iter()
        .rev()
        .take(12)
        .map(|(peak, name, what)| format!("{} MiB: {name}: {what}", peak >> 20))
        .collect();
    ensure!(
        peaks.iter().all(|(peak, ..)| *peak < MAX_MEMORY),
        "more than {} MiB: {highest:#?}",
        MAX_MEMORY >> 20
    );
    // A reader gets everything, page after page.
    let client = cluster.orchestrator.client()?;
    ensure!(client.tasks(None).await?.len() >= 300 && client.settings().await?.len() >= 200);
    cluster.session(&user, &session()).await?;
    Ok(())
}
