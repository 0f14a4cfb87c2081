//! Three hostile tenants attack an orchestrator and a node while eight honest ones work: no honest
//! call fails, health checks are answered, and memory stays bounded.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    LimitsRequest, ListRequest, PatchRequest, SessionEnd, SessionId, TaskCreate, UserSessionCreate,
    exec_form,
};
use cynode_client::{PutOptions, UserClient};
use cynode_tests::{Random, memory, sh};
use http::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{Tally, length};
use crate::orchestrator::nodes::Fleet;

const HONEST: usize = 8;
const HOSTILE: usize = 3;
/// The timeout of an honest call.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// The memory bound of either process.
const MEMORY_LIMIT: u64 = 300 << 20;
/// How long an attack keeps what it occupies.
const STALL: Duration = Duration::from_secs(10);
/// Connections of one trickling attack; three tenants together exceed a listener's capacity.
const TRICKLES: usize = 1_500;

/// The addresses and credentials of one tenant.
#[derive(Clone, Debug)]
struct Tenant {
    api: String,
    control: String,
    token: String,
    client: UserClient,
}

impl Tenant {
    /// A separate user with a separate token.
    async fn new(fleet: &Fleet, name: &str) -> Result<Self> {
        let admin = fleet.orchestrator.client()?;
        let (api, control) = (fleet.orchestrator.url()?, fleet.orchestrator.control_url()?);
        post(&admin, "/v1/users", &json!({"name": name})).await?;
        let token =
            post(&admin, "/v1/tokens", &json!({"kind": "user", "user": name})).await?["token"]
                .as_str()
                .context("a token")?
                .to_owned();
        Ok(Self {
            client: UserClient::new(&api, &token)?,
            api,
            control,
            token,
        })
    }

    async fn session(&self) -> Result<SessionId> {
        let limits = LimitsRequest {
            memory_bytes: Some(64 << 20),
            disk_bytes: Some(64 << 20),
            pids: Some(64),
            ..Default::default()
        };
        let request = UserSessionCreate {
            session_id: Some(SessionId::generate()),
            limits: Some(limits),
            ..Default::default()
        };
        Ok(self
            .client
            .sessions()
            .create_user_session(&request)
            .await?
            .session_id)
    }

    /// The head of a request, as bytes.
    fn head(&self, method: &str, path: &str, rest: &str) -> String {
        format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n{rest}\r\n",
            self.token
        )
    }
}

async fn post(client: &UserClient, path: &str, body: &Value) -> Result<Value> {
    let answer = client
        .sessions()
        .request(Method::POST, path)
        .json(body)
        .send()
        .await?;
    let status = answer.status();
    let text = answer.text().await?;
    ensure!(status.is_success(), "{path}: {status} {text}");
    Ok(serde_json::from_str(&text)?)
}

fn address(url: &str) -> &str {
    url.trim_start_matches("http://").trim_end_matches('/')
}

/// One honest round: everything that a client does in a day, with every response checked.
async fn honest_round(tenant: &Tenant, random: &mut Random, done: &mut Tally) -> Result<()> {
    let task = tenant
        .client
        .create_task(&TaskCreate {
            name: format!("work {}", random.number()),
            ..Default::default()
        })
        .await?;
    done.count("task");
    ensure!(
        tenant
            .client
            .tasks(None)
            .await?
            .iter()
            .any(|found| found.id == task.id),
        "a task is missing from its owner's list"
    );
    done.count("list of tasks");
    let (sessions, id) = (tenant.client.sessions(), tenant.session().await?);
    done.count("create");
    for _ in 0..4 {
        let word = random.number().to_string();
        let ran = sessions.exec(id, &sh(&format!("echo {word}"))).await?;
        ensure!(
            ran.stdout == format!("{word}\n") && ran.exit.exit_code == Some(0),
            "{ran:?}"
        );
        done.count("exec");
        sessions
            .put_file(id, Path::new("file"), word.clone(), &PutOptions::default())
            .await?;
        done.count("put");
        let read = sessions.exec(id, &sh("cat file")).await?;
        ensure!(read.stdout == word, "{read:?}");
        let diff = format!("--- /dev/null\n+++ b/new-{word}\n@@ -0,0 +1 @@\n+{word}\n");
        sessions
            .patch_files(
                id,
                &PatchRequest {
                    diff,
                    ..Default::default()
                },
            )
            .await?;
        done.count("patch");
        let listed = sessions.list_files(id, &ListRequest::default()).await?;
        ensure!(
            listed
                .entries
                .iter()
                .any(|entry| entry.path == format!("new-{word}")),
            "{listed:?}"
        );
        done.count("list");
    }
    sessions.end_session(id, &SessionEnd::default()).await?;
    done.count("end");
    Ok(())
}

async fn honest(tenant: Tenant, mut random: Random, stop: CancellationToken) -> Result<Tally> {
    let mut done = Tally::default();
    while !stop.is_cancelled() {
        tokio::time::timeout(
            CALL_LIMIT * 8,
            honest_round(&tenant, &mut random, &mut done),
        )
        .await
        .context("an honest round hung")??;
    }
    Ok(done)
}

type Attack = for<'a> fn(
    &'a Tenant,
    SessionId,
) -> std::pin::Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

const ATTACKS: [(&str, Attack); 15] = [
    ("trickling heads at the control port", |tenant, _| {
        Box::pin(trickle(
            &tenant.control,
            "POST /v1/nodes/register HTTP/1.1\r\nhost: x\r\n".to_owned(),
        ))
    }),
    ("trickling heads at the user API", |tenant, _| {
        Box::pin(trickle(
            &tenant.api,
            format!(
                "GET /v1/tasks HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n",
                tenant.token
            ),
        ))
    }),
    ("trickling bodies", |tenant, _| {
        Box::pin(trickle(
            &tenant.api,
            tenant.head(
                "POST",
                "/v1/tasks",
                "content-type: application/json\r\ncontent-length: 900000\r\n",
            ),
        ))
    }),
    ("stalled uploads", |tenant, session| {
        Box::pin(stalled_uploads(tenant, session))
    }),
    ("unread listings", |tenant, session| {
        Box::pin(unread_listings(tenant, session))
    }),
    ("pages of large tasks", |tenant, _| {
        Box::pin(large_tasks(tenant))
    }),
    ("arrays of zeros", |tenant, _| Box::pin(zeros(tenant))),
    ("an archive below a long path", |tenant, session| {
        Box::pin(long_path(tenant, session))
    }),
    ("a diff of spaces", |tenant, session| {
        Box::pin(spaces(tenant, session))
    }),
    ("bad tokens", |tenant, _| Box::pin(bad_tokens(tenant))),
    ("limits beyond the host", |tenant, _| {
        Box::pin(huge_limits(tenant))
    }),
    ("calls that hang up", |tenant, session| {
        Box::pin(hang_up(tenant, session))
    }),
    ("slow forms", |tenant, session| {
        Box::pin(slow_forms(tenant, session))
    }),
    ("diffs of many files", |tenant, session| {
        Box::pin(many_files(tenant, session))
    }),
    ("disks of new sizes", |tenant, _| {
        Box::pin(new_disks(tenant))
    }),
];

/// Many connections that each send a byte now and then and never finish.
async fn trickle(url: &str, head: String) -> Result<()> {
    let mut connections = Vec::new();
    for _ in 0..TRICKLES {
        let Ok(Ok(mut stream)) =
            tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(address(url))).await
        else {
            break;
        };
        drop(stream.write_all(head.as_bytes()).await);
        connections.push(stream);
    }
    let until = Instant::now() + STALL;
    let mut pace = tokio::time::interval(Duration::from_secs(1));
    while Instant::now() < until {
        for stream in &mut connections {
            drop(stream.try_write(b"x"));
        }
        pace.tick().await;
    }
    Ok(())
}

/// Opens connections that send a head and part of a body, and then nothing.
async fn open(url: &str, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let mut connections = Vec::new();
    for _ in 0..count {
        let Ok(mut stream) = TcpStream::connect(address(url)).await else {
            break;
        };
        drop(tokio::time::timeout(Duration::from_secs(2), stream.write_all(bytes)).await);
        connections.push(stream);
    }
    connections
}

async fn stalled_uploads(tenant: &Tenant, session: SessionId) -> Result<()> {
    let mut bytes = tenant
        .head(
            "PUT",
            &format!("/v1/sessions/{session}/files?path=big"),
            "content-length: 50000000\r\n",
        )
        .into_bytes();
    bytes.extend(vec![b'x'; 256 << 10]);
    let mut held = open(&tenant.api, 24, &bytes).await;
    let mut bytes = tenant
        .head(
            "POST",
            &format!("/v1/sessions/{session}/import?path=in"),
            "content-length: 50000000\r\n",
        )
        .into_bytes();
    bytes.extend(vec![0; 256 << 10]);
    held.extend(open(&tenant.api, 24, &bytes).await);
    tokio::time::sleep(STALL).await;
    drop(held);
    Ok(())
}

async fn unread_listings(tenant: &Tenant, session: SessionId) -> Result<()> {
    let script = "mkdir -p many; cd many; i=0; while [ $i -lt 5000 ]; do : > \"$i-$(printf %0200d \
                  0)\"; i=$((i+1)); done";
    drop(tenant.client.sessions().exec(session, &sh(script)).await);
    let body = json!({"path": "many", "depth": 10, "max_entries": 10_000}).to_string();
    let head = tenant.head(
        "POST",
        &format!("/v1/sessions/{session}/files:list"),
        &format!(
            "content-type: application/json\r\ncontent-length: {}\r\n",
            body.len()
        ),
    );
    let held = open(&tenant.api, 40, format!("{head}{body}").as_bytes()).await;
    tokio::time::sleep(STALL).await;
    drop(held);
    Ok(())
}

async fn large_tasks(tenant: &Tenant) -> Result<()> {
    for _ in 0..10 {
        drop(
            post(
                &tenant.client,
                "/v1/tasks",
                &json!({"name": "large", "metadata": {"x": "y".repeat(250_000)}}),
            )
            .await,
        );
    }
    let held = open(
        &tenant.api,
        40,
        tenant.head("GET", "/v1/tasks?limit=1000", "").as_bytes(),
    )
    .await;
    tokio::time::sleep(STALL / 2).await;
    drop(held);
    Ok(())
}

async fn zeros(tenant: &Tenant) -> Result<()> {
    let body = format!(
        "{{\"name\": \"zeros\", \"metadata\": {{\"x\": [{}0]}}}}",
        "0,".repeat(5_000_000)
    );
    let mut sent = JoinSet::new();
    for _ in 0..4 {
        let request = tenant
            .client
            .sessions()
            .request(Method::POST, "/v1/tasks")
            .header("content-type", "application/json")
            .body(body.clone());
        sent.spawn(async move { drop(request.send().await) });
    }
    sent.join_all().await;
    Ok(())
}

async fn long_path(tenant: &Tenant, session: SessionId) -> Result<()> {
    let mut archive = tar::Builder::new(Vec::new());
    for number in 0..4_000 {
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        header.set_mode(0o644);
        archive.append_data(&mut header, format!("file-{number}"), std::io::empty())?;
    }
    let (bytes, path) = (archive.into_inner()?, "a/".repeat(30_000));
    drop(
        tenant
            .client
            .sessions()
            .request(
                Method::POST,
                &format!("/v1/sessions/{session}/import?path={path}"),
            )
            .body(bytes)
            .send()
            .await,
    );
    Ok(())
}

async fn spaces(tenant: &Tenant, session: SessionId) -> Result<()> {
    let diff = format!("diff --git a/{0}b/{0}\n", "x ".repeat(44_000));
    drop(
        tenant
            .client
            .sessions()
            .patch_files(
                session,
                &PatchRequest {
                    diff,
                    ..Default::default()
                },
            )
            .await,
    );
    Ok(())
}

async fn bad_tokens(tenant: &Tenant) -> Result<()> {
    let until = Instant::now() + STALL / 2;
    let mut number = 0;
    let client = reqwest::Client::builder().no_proxy().build()?;
    while Instant::now() < until {
        number += 1;
        let request = client
            .get(format!("{}/v1/tasks", tenant.api))
            .bearer_auth(format!("cyn_{number:064}"));
        drop(request.send().await);
    }
    Ok(())
}

async fn huge_limits(tenant: &Tenant) -> Result<()> {
    for limits in [
        json!({"memory_bytes": 1_u64 << 45, "cpus": 1000}),
        json!({"memory_bytes": 1_u64 << 45}),
        json!({"cpus": 1000}),
    ] {
        let body = json!({"limits": limits});
        let answer = tenant
            .client
            .sessions()
            .request(Method::POST, "/v1/sessions")
            .json(&body)
            .send()
            .await;
        if let Ok(answer) = answer {
            ensure!(
                !answer.status().is_success(),
                "a sandbox larger than the host was admitted: {}",
                answer.text().await?
            );
        }
    }
    Ok(())
}

async fn hang_up(tenant: &Tenant, session: SessionId) -> Result<()> {
    for _ in 0..20 {
        let body = json!({"argv": ["sh", "-c", "sleep 0.2; echo ran >> ran"], "timeout_ms": 5000})
            .to_string();
        let rest = format!(
            "connection: keep-alive, X-Cynode-Call\r\ncontent-type: \
             application/json\r\ncontent-length: {}\r\n",
            body.len()
        );
        let head = tenant.head("POST", &format!("/v1/sessions/{session}/exec"), &rest);
        drop(open(&tenant.api, 1, format!("{head}{body}").as_bytes()).await);
    }
    Ok(())
}

/// Commands as forms whose request is long and whose input never ends.
async fn slow_forms(tenant: &Tenant, session: SessionId) -> Result<()> {
    let mut request = br#"{"argv": ["true"], "timeout_ms": 1000"#.to_vec();
    request.resize(15_000_000, b' ');
    request.push(b'}');
    let (form, _) = exec_form("B", &request);
    let mut bytes = tenant
        .head(
            "POST",
            &format!("/v1/sessions/{session}/exec"),
            "content-type: multipart/form-data; boundary=B\r\ncontent-length: 50000000\r\n",
        )
        .into_bytes();
    bytes.extend(form);
    let held = open(&tenant.api, 24, &bytes).await;
    tokio::time::sleep(STALL).await;
    drop(held);
    Ok(())
}

/// Diffs as large as a body may be: of more files than one may have, and of one file.
async fn many_files(tenant: &Tenant, session: SessionId) -> Result<()> {
    let hunk = "@@ -0,0 +1 @@\n+\n";
    let file = format!("--- a/q\n+++ b/q\n{hunk}");
    let mut sent = JoinSet::new();
    let diffs = [
        file.repeat(200_000),
        file.repeat(9_000),
        file.clone() + &hunk.repeat(90_000),
    ];
    for diff in diffs.iter().cycle().take(12).cloned() {
        let request = PatchRequest {
            diff,
            dry_run: true,
            ..Default::default()
        };
        let sessions = tenant.client.sessions().clone();
        sent.spawn(async move { drop(sessions.patch_files(session, &request).await) });
    }
    sent.join_all().await;
    Ok(())
}

/// Sandboxes whose disks have sizes that nobody has used yet.
async fn new_disks(tenant: &Tenant) -> Result<()> {
    let mut sent = JoinSet::new();
    for number in 0..4_u64 {
        let size = (1 << 30) + u64::from(std::process::id()) * 4096 + number * (1 << 20);
        let body = json!({"limits": {"disk_bytes": size, "memory_bytes": 64 << 20}});
        let request = tenant
            .client
            .sessions()
            .request(Method::POST, "/v1/sessions")
            .json(&body);
        let sessions = tenant.client.sessions().clone();
        sent.spawn(async move {
            let Ok(answer) = request.send().await else {
                return;
            };
            let created: Value = answer.json().await.unwrap_or_default();
            if let Some(id) = created["session_id"]
                .as_str()
                .and_then(|id| id.parse().ok())
            {
                drop(sessions.end_session(id, &SessionEnd::default()).await);
            }
        });
    }
    sent.join_all().await;
    Ok(())
}

/// One hostile tenant: two attacks at a time, in its own order.
async fn hostile(tenant: Tenant, mut random: Random, stop: CancellationToken) -> Result<Tally> {
    let mut done = Tally::default();
    let mut session = tenant.session().await?;
    while !stop.is_cancelled() {
        let mut pick =
            || ATTACKS[usize::try_from(random.below(ATTACKS.len() as u64)).expect("below a usize")];
        let (first, second) = (pick(), pick());
        tokio::select! {
            () = stop.cancelled() => break,
            both = async { tokio::join!(first.1(&tenant, session), second.1(&tenant, session)) } => {
                both.0.with_context(|| first.0)?;
                both.1.with_context(|| second.0)?;
            }
        }
        done.count(first.0);
        done.count(second.0);
        // Damage to its own sandbox is the tenant's own loss.
        if tenant
            .client
            .sessions()
            .exec(session, &sh("true"))
            .await
            .is_err()
            && let Ok(next) = tenant.session().await
        {
            session = next;
        }
    }
    Ok(done)
}

/// The duration of health checks, each on a new connection, like a load balancer's.
async fn probe(url: String, stop: CancellationToken) -> Result<Vec<Duration>> {
    let mut taken = Vec::new();
    let mut pace = tokio::time::interval(Duration::from_millis(20));
    pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !stop.is_cancelled() {
        pace.tick().await;
        let begun = Instant::now();
        let probe = async {
            let mut stream = TcpStream::connect(address(&url)).await?;
            stream
                .write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                .await?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await?;
            ensure!(
                answer.starts_with(b"HTTP/1.1 200"),
                "{}",
                String::from_utf8_lossy(&answer)
            );
            Ok(())
        };
        tokio::time::timeout(CALL_LIMIT, probe)
            .await
            .context("a health check hung")??;
        taken.push(begun.elapsed());
    }
    taken.sort();
    Ok(taken)
}

/// Run by `make soak`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn soak_eight_honest_tenants_work_beside_three_hostile_ones() -> Result<()> {
    let mut random = Random::seeded();
    let (seed, length) = (random.seed(), length(180));
    let fleet = Fleet::new().await?;
    let mut worker = fleet
        .node_with("one", |options| options.set("pool_size", "2"))
        .await?;
    let (stop, stop_hostile) = (CancellationToken::new(), CancellationToken::new());
    let mut honest_tasks = JoinSet::new();
    for number in 0..HONEST {
        let tenant = Tenant::new(&fleet, &format!("honest-{number}")).await?;
        let (random, stop) = (random.fork(), stop.clone());
        honest_tasks.spawn(async move {
            honest(tenant, random, stop)
                .await
                .with_context(|| format!("honest tenant {number}"))
        });
    }
    let mut hostile_tasks = JoinSet::new();
    for number in 0..HOSTILE {
        let tenant = Tenant::new(&fleet, &format!("hostile-{number}")).await?;
        hostile_tasks.spawn(hostile(tenant, random.fork(), stop_hostile.clone()));
    }
    let probes = [
        fleet.orchestrator.url()?,
        fleet.orchestrator.control_url()?,
        worker.url()?,
    ]
    .map(|url| tokio::spawn(probe(url, stop.clone())));
    // The first failure ends the run.
    let failed = tokio::select! {
        failed = honest_tasks.join_next() => failed,
        () = tokio::time::sleep(length) => None,
    };
    if let Some(failed) = failed {
        failed??;
    }
    stop_hostile.cancel();
    stop.cancel();
    let (mut worked, mut attacked) = (Tally::default(), Tally::default());
    while let Some(done) = honest_tasks.join_next().await {
        worked.add(&done??);
    }
    while let Some(done) = hostile_tasks.join_next().await {
        attacked.add(&done??);
    }
    let mut latencies = BTreeMap::new();
    for (name, probe) in ["api", "control", "worker"].into_iter().zip(probes) {
        let taken = probe.await??;
        let (p99, most) = (taken[taken.len() * 99 / 100], taken[taken.len() - 1]);
        latencies.insert(
            name,
            format!(
                "{} checks, p99 {} ms, slowest {} ms",
                taken.len(),
                p99.as_millis(),
                most.as_millis()
            ),
        );
    }
    let peaks = [memory(fleet.orchestrator.pid())?.1, worker.memory()?.1];
    #[expect(clippy::print_stdout, reason = "the report of the run")]
    {
        println!(
            "soak: tenants: {HONEST} honest and {HOSTILE} hostile for {} s; every honest call \
             right: {worked}; attacks: {attacked}; /healthz {latencies:?}; peak memory \
             orchestrator {} MiB, worker {} MiB; CYNODE_SEED={seed}",
            length.as_secs(),
            peaks[0] >> 20,
            peaks[1] >> 20
        );
    }
    ensure!(
        peaks.iter().all(|peak| *peak < MEMORY_LIMIT),
        "peak memory {peaks:?}"
    );
    worker.shut_down().await?;
    Ok(())
}
