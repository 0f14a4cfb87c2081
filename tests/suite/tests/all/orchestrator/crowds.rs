//! Many trickling connections and stalled bodies: everybody else gets through.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{NodeKeyCreate, NodeState, exec_form};
use cynode_tests::{Answer, SimulatedWorker, eventually, memory};
use http::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
};

use super::{
    cluster::text,
    policy::{ONE, PolicyFixture, object, refusal},
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Connections that start a request, send a byte of it now and then, and reconnect when they are
/// closed.
struct Crowd(JoinSet<()>);

impl Crowd {
    fn connect(&mut self, url: &str, number: usize, begin: &str) {
        for _ in 0..number {
            let (address, begin) = (
                url.trim_start_matches("http://").to_owned(),
                begin.to_owned(),
            );
            self.0.spawn(async move {
                let mut returns = tokio::time::interval(Duration::from_secs(1));
                loop {
                    drop(trickle(&address, &begin).await);
                    returns.tick().await;
                }
            });
        }
    }
}

async fn trickle(address: &str, begin: &str) -> Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(begin.as_bytes()).await?;
    let mut pace = tokio::time::interval(Duration::from_millis(500));
    loop {
        pace.tick().await;
        stream.write_all(b"x").await?;
    }
}

/// A client that opens a new connection for each call.
fn client_without_pool() -> Result<reqwest::Client> {
    Ok(reqwest::Client::builder()
        .no_proxy()
        .pool_max_idle_per_host(0)
        .timeout(TIMEOUT)
        .build()?)
}

/// Checks for `rounds` rounds that legitimate callers get through. Returns the durations of the
/// health checks.
async fn check_callers_get_through(
    fixture: &PolicyFixture,
    rounds: usize,
    user: &str,
) -> Result<Vec<Duration>> {
    let (http, client) = (client_without_pool()?, fixture.orchestrator.client()?);
    let (url, control) = (
        fixture.orchestrator.url()?,
        fixture.orchestrator.control_url()?,
    );
    let mut took = Vec::new();
    for round in 0..rounds {
        for address in [&url, &control] {
            let began = Instant::now();
            let health = http
                .get(format!("{address}/healthz"))
                .send()
                .await
                .with_context(|| format!("health, round {round}"))?;
            ensure!(health.status().is_success(), "{health:?}");
            took.push(began.elapsed());
        }
        for token in [&fixture.admin, user] {
            object(
                &Answer::of(http.get(format!("{url}/v1/tasks")).bearer_auth(token))
                    .await
                    .with_context(|| format!("round {round}"))?,
            )?;
        }
    }
    // The existing node's heartbeats arrive, and another node registers.
    let node_of = async |id| {
        client
            .nodes()
            .await?
            .into_iter()
            .find(|node| node.id == id)
            .context("the node is known")
    };
    let before = node_of(fixture.node.node_id()).await?.last_heartbeat_at;
    let has_arrived = async || {
        node_of(fixture.node.node_id())
            .await
            .map(|node| node.state == NodeState::Ready && node.last_heartbeat_at > before)
    };
    eventually("the node's heartbeat arrives", TIMEOUT, has_arrived).await?;
    let late = SimulatedWorker::start("late", &[ONE]).await?;
    late.join(
        &control,
        &client.create_node_key(&NodeKeyCreate::default()).await?.psk,
    )
    .await?;
    ensure!(node_of(late.node_id()).await?.state == NodeState::Ready);
    Ok(took)
}

/// A crowd at each address without a token, and one with a sandbox's token whose bodies trickle.
async fn measure_under_crowd(
    fixture: &PolicyFixture,
    number: usize,
    rounds: usize,
) -> Result<Vec<Duration>> {
    let (url, control) = (
        fixture.orchestrator.url()?,
        fixture.orchestrator.control_url()?,
    );
    let (_, ann) = fixture.user("ann").await?;
    let task = fixture.task(&ann).await?;
    let session = fixture.session(&ann, &task).await?;
    let sandbox = text(
        &fixture
            .make(
                &ann,
                "/v1/tokens",
                &json!({"kind": "sandbox", "task_ids": [task], "session_id": session}),
            )
            .await?["token"],
    )?;
    let with_token = format!(
        "POST /mcp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \
         {sandbox}\r\nContent-Type: application/json\r\nAccept: application/json, \
         text/event-stream\r\nContent-Length: 1000000\r\n\r\n{{"
    );
    let mut crowd = Crowd(JoinSet::new());
    crowd.connect(
        &control,
        number,
        "POST /v1/nodes/heartbeat HTTP/1.1\r\nX-Long: ",
    );
    crowd.connect(
        &control,
        number / 8,
        "POST /v1/nodes/register HTTP/1.1\r\nHost: \
         x\r\nContent-Type: application/json\r\nContent-Length: \
         100000\r\n\r\n{",
    );
    crowd.connect(&url, number / 2, "GET /v1/tasks HTTP/1.1\r\nX-Long: ");
    crowd.connect(&url, number / 2, &with_token);
    // The token's share is full once its next call is refused.
    let call = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    eventually("the crowd is connected", TIMEOUT, async || {
        let answer = Answer::of(
            client_without_pool()?
                .post(format!("{url}/mcp"))
                .bearer_auth(&sandbox)
                .header("accept", "application/json, text/event-stream")
                .json(&call),
        )
        .await?;
        Ok(answer.status == 429)
    })
    .await?;
    let refused = Answer::of(
        client_without_pool()?
            .post(format!("{url}/mcp"))
            .bearer_auth(&sandbox)
            .json(&call),
    )
    .await?;
    ensure!(
        refused.status != 429 || refusal(&refused, 429, "too_many_requests").is_ok(),
        "{refused:?}"
    );
    check_callers_get_through(fixture, rounds, &ann).await
}

#[tokio::test]
// invariant: no-starvation
async fn trickling_connections_keep_nobody_out() -> Result<()> {
    let fixture = PolicyFixture::start_with(&[("max_connections", "64")]).await?;
    measure_under_crowd(&fixture, 200, 5).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn soak_thousands_of_trickling_connections_keep_nobody_out() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let mut took = measure_under_crowd(&fixture, 4_150, 200).await?;
    took.sort();
    let (middle, late, last) = (
        took[took.len() / 2],
        took[took.len() * 99 / 100],
        took[took.len() - 1],
    );
    #[expect(clippy::print_stdout, reason = "the report of the run")]
    {
        println!(
            "4,150 trickling connections to each address: health after {middle:?} (p50), {late:?} \
             (p99), {last:?} (most) of {}",
            took.len()
        );
    }
    Ok(())
}

#[tokio::test]
// invariant: no-starvation
async fn stalled_uploads_hold_up_nobody_else() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let mut sessions = Vec::new();
    for name in ["ann", "bob"] {
        let (_, token) = fixture.user(name).await?;
        let task = fixture.task(&token).await?;
        sessions.push((fixture.session(&token, &task).await?, token));
    }
    let ((stalls, ann), (other, bob)) = (&sessions[0], &sessions[1]);
    let url = fixture.orchestrator.url()?;
    let address = url.trim_start_matches("http://");
    // More uploads than are spooled to files at once, each larger than the memory buffer.
    let mut stalled = Vec::new();
    for number in 0..12 {
        let mut stream = TcpStream::connect(address).await?;
        let head = format!(
            "PUT /v1/sessions/{stalls}/files?path={number} HTTP/1.1\r\nHost: x\r\nAuthorization: \
             Bearer {ann}\r\nConnection: close\r\nContent-Length: 400000\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(&vec![b'x'; 399_999]).await?;
        stalled.push(stream);
    }
    let put = async |session: &str, token: &str| {
        let request = client_without_pool()?
            .put(format!("{url}/v1/sessions/{session}/files?path=whole"))
            .bearer_auth(token)
            .body(vec![b'y'; 1_000_000]);
        object(
            &tokio::time::timeout(Duration::from_secs(20), Answer::of(request))
                .await
                .context("the upload waits for the stalled ones")??,
        )
    };
    put(other, bob).await?;
    put(stalls, ann).await?;
    // The stalled uploads continue when their bytes arrive.
    for stream in &mut stalled {
        stream.write_all(b"x").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        ensure!(answer.starts_with("HTTP/1.1 20"), "{answer}");
    }
    let written = fixture
        .call(
            ann,
            Method::GET,
            &format!("/v1/sessions/{stalls}/files?path=7"),
            &Value::Null,
        )
        .await?;
    ensure!(
        written.status == 200 && written.body.len() == 400_000,
        "{}",
        written.status
    );
    Ok(())
}

#[tokio::test]
// invariant: no-starvation
async fn slow_forms_hold_neither_memory_nor_the_budget_of_others() -> Result<()> {
    const FORMS: usize = 20;
    let fixture = PolicyFixture::start().await?;
    let mut sessions = Vec::new();
    for name in ["ann", "bob"] {
        let (_, token) = fixture.user(name).await?;
        let task = fixture.task(&token).await?;
        sessions.push((fixture.session(&token, &task).await?, token));
    }
    let ((slow, ann), (other, bob)) = (&sessions[0], &sessions[1]);
    let url = fixture.orchestrator.url()?;
    let address = url.trim_start_matches("http://");
    let before = memory(fixture.orchestrator.pid())?.0;
    // Valid requests of 15 MB, most of it white space, whose input never ends.
    let mut request = br#"{"argv": ["true"], "timeout_ms": 1000"#.to_vec();
    request.resize(15_000_000, b' ');
    request.push(b'}');
    let (form, _) = exec_form("B", &request);
    let mut forms = JoinSet::new();
    for _ in 0..FORMS {
        let head = format!(
            "POST /v1/sessions/{slow}/exec HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \
             {ann}\r\nContent-Type: multipart/form-data; boundary=B\r\nContent-Length: \
             40000000\r\n\r\n"
        );
        let (address, form) = (address.to_owned(), form.clone());
        forms.spawn(async move {
            let mut stream = TcpStream::connect(address).await?;
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&form).await?;
            stream.write_all(&vec![b'x'; 100_000]).await?;
            anyhow::Ok(stream)
        });
    }
    let mut open = Vec::new();
    while let Some(stream) = forms.join_next().await {
        open.push(stream??);
    }
    let exec = async |session: &str, token: &str| {
        let request = client_without_pool()?
            .post(format!("{url}/v1/sessions/{session}/exec"))
            .bearer_auth(token)
            .json(&json!({"argv": ["true"], "timeout_ms": 5000, "stdin": "y".repeat(100_000)}));
        object(
            &tokio::time::timeout(Duration::from_secs(20), Answer::of(request))
                .await
                .context("the command waits for the slow forms")??,
        )
    };
    exec(other, bob).await?;
    exec(slow, ann).await?;
    let after = memory(fixture.orchestrator.pid())?.1;
    ensure!(
        after < before + (150 << 20),
        "{} MiB, after {} MiB",
        after >> 20,
        before >> 20
    );
    Ok(())
}
