//! Records that an egress role writes by itself: fetched and merged once, and only what a role may
//! say.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use cynode_api::{
    AuditBody, AuditDecision, AuditKind, AuditRecord, AuditSubject, EgressAuditAck,
    EgressAuditBatch, EgressAuditVerdict, SessionId, TaskId,
};
use cynode_tests::{ControlPlane, eventually};
use cynode_trail::{TotalLedger, Trail, TrailMetrics, TrailSettings, Verdict};
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::{net::TcpListener, task::JoinHandle};
use uuid::Uuid;

use super::{TIMEOUT, assert_trail_intact, records_of_action, wait_until_signed};
use crate::orchestrator::simulated::{ONE, SimulatedFleet};

const TOKEN: &str = "cyn_the-token-of-the-git-role-in-this-test";

/// What the handlers share.
struct Shared {
    trail: Trail<TotalLedger>,
    instance: Uuid,
    /// Acknowledgments that get lost before the role acts on them.
    lost: AtomicUsize,
    /// The role answers no fetch.
    is_silent: AtomicBool,
}

/// A role that only keeps its trail.
struct RoleDouble {
    shared: Arc<Shared>,
    address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Drop for RoleDouble {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl RoleDouble {
    /// Starts a role with its trail in a directory, at an address of its choice or a given one.
    async fn start(
        directory: PathBuf,
        instance: Uuid,
        address: Option<SocketAddr>,
    ) -> Result<Self> {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = TcpListener::bind(address.unwrap_or(any)).await?;
        let address = listener.local_addr()?;
        let settings = TrailSettings {
            directory,
            writer: subject(instance),
            name: "this role",
            thread: "egress-audit",
            metrics: TrailMetrics {
                backlog_records: "test_backlog_records",
                backlog_bytes: "test_backlog_bytes",
                lag_seconds: "test_lag_seconds",
                refused: "test_refused_total",
            },
            keep_bytes: None,
        };
        let shared = Arc::new(Shared {
            trail: Trail::open(settings, TotalLedger::new(1 << 30))?,
            instance,
            lost: AtomicUsize::new(0),
            is_silent: AtomicBool::new(false),
        });
        let router = Router::new()
            .route("/v1/egress/audit", get(fetch))
            .route("/v1/egress/audit/ack", post(acknowledge))
            .fallback(accept)
            .with_state(Arc::clone(&shared));
        let serving = tokio::spawn(async move {
            axum::serve(listener, router).await.ok();
        });
        Ok(Self {
            shared,
            address,
            serving,
        })
    }

    async fn record(&self, body: AuditBody) -> Result<()> {
        let body = serde_json::to_value(body)?;
        let trail = &self.shared.trail;
        let record = trail.with_ledger(|ledger| ledger.admit(body, false));
        let record = record.context("admitted")?;
        Ok(trail.write(OffsetDateTime::now_utc(), record, true).await?)
    }

    async fn is_drained(&self) -> Result<bool> {
        Ok(self.shared.trail.next_batch().await?.is_none())
    }
}

fn is_authorized(headers: &HeaderMap) -> bool {
    let given = headers.get(header::AUTHORIZATION);
    given.is_some_and(|given| given == format!("Bearer {TOKEN}").as_str())
}

/// Whatever else orchestrators call.
async fn accept() -> StatusCode {
    StatusCode::NO_CONTENT
}

async fn fetch(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    if !is_authorized(&headers) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if shared.is_silent.load(Ordering::SeqCst) {
        // The caller must not keep the connection for the next role.
        let close = [(header::CONNECTION, "close")];
        return (StatusCode::SERVICE_UNAVAILABLE, close).into_response();
    }
    let mut batch = shared.trail.next_batch().await.expect("readable");
    if batch.is_none() {
        let stored = shared.trail.stored();
        drop(tokio::time::timeout(Duration::from_secs(1), stored).await);
        batch = shared.trail.next_batch().await.expect("readable");
    }
    let Some(batch) = batch else {
        return StatusCode::NO_CONTENT.into_response();
    };
    Json(EgressAuditBatch {
        version: 1,
        role: "git".to_owned(),
        instance: shared.instance,
        stream: batch.stream,
        records: batch.records,
    })
    .into_response()
}

async fn acknowledge(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    Json(ack): Json<EgressAuditAck>,
) -> StatusCode {
    if !is_authorized(&headers) {
        return StatusCode::UNAUTHORIZED;
    }
    let lose = |lost: usize| lost.checked_sub(1);
    let order = Ordering::SeqCst;
    if shared.lost.fetch_update(order, order, lose).is_ok() {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    let verdict = match ack.verdict {
        EgressAuditVerdict::Stored { next } => Verdict::Stored { next },
        EgressAuditVerdict::OutOfOrder { expected } => Verdict::OutOfOrder { expected },
        EgressAuditVerdict::Refused { records } => Verdict::Refused(
            records
                .into_iter()
                .map(|one| (one.seq, one.reason))
                .collect(),
        ),
    };
    let concluded = shared.trail.conclude(ack.stream, verdict).await;
    concluded.expect("stored");
    StatusCode::NO_CONTENT
}

fn subject(instance: Uuid) -> AuditSubject {
    AuditSubject {
        kind: "egress".to_owned(),
        name: Some("git".to_owned()),
        instance: Some(instance),
        ..AuditSubject::default()
    }
}

/// A push that the role permits.
fn push(instance: Uuid, task: TaskId, session: Option<SessionId>, branch: &str) -> AuditBody {
    let mut body = AuditBody::new(AuditKind::Event, "git.push");
    body.subject = Some(subject(instance));
    body.task_id = Some(task);
    body.session_id = session;
    body.resource = Some("repository:web".to_owned());
    body.decision = Some(AuditDecision::Allow);
    body.detail.insert("branch".to_owned(), json!(branch));
    body
}

struct World {
    role: RoleDouble,
    token_file: PathBuf,
    session_id: SessionId,
    task_id: TaskId,
    fleet: SimulatedFleet,
    _node: cynode_tests::SimulatedWorker,
}

impl World {
    async fn start() -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let directory = control_plane.world.directory().to_owned();
        let role = RoleDouble::start(directory.join("role"), Uuid::now_v7(), None).await?;
        let token_file = directory.join("role.token");
        fs_err::write(&token_file, TOKEN)?;
        let settings = settings(&role, &token_file)?;
        let settings = settings
            .each_ref()
            .map(|(key, value)| (*key, value.as_str()));
        let fleet = SimulatedFleet::start_on(control_plane, &settings).await?;
        let node = fleet.node("node", &[ONE]).await?;
        let session = fleet.session(ONE).await?;
        Ok(Self {
            role,
            token_file,
            session_id: session.session_id,
            task_id: session.task_id,
            fleet,
            _node: node,
        })
    }

    fn push(&self, branch: &str) -> AuditBody {
        let instance = self.role.shared.instance;
        push(instance, self.task_id, Some(self.session_id), branch)
    }

    async fn branches(&self) -> Result<Vec<String>> {
        let merged = records_of_action(&self.fleet.client, "git.push").await?;
        let branch = |record: &AuditRecord| {
            let branch = record.body.detail.get("branch").and_then(Value::as_str);
            branch.map(str::to_owned).context("a branch")
        };
        merged.iter().map(branch).collect()
    }

    async fn wait_until_drained(&self) -> Result<()> {
        eventually("the role's records are fetched", TIMEOUT, async || {
            self.role.is_drained().await
        })
        .await
    }
}

/// Settings of an orchestrator that fetches from the role.
fn settings(role: &RoleDouble, token_file: &Path) -> Result<[(&'static str, String); 2]> {
    let token_file = token_file.to_str().context("a path in UTF-8")?;
    Ok([
        ("egress_git_url", format!("http://{}", role.address)),
        ("egress_git_token_file", token_file.to_owned()),
    ])
}

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|number| format!("{prefix}-{number}"))
        .collect()
}

/// Acknowledgments are lost, and the orchestrator is killed while it merges.
#[tokio::test]
// invariant: nothing-lost
async fn the_records_of_a_role_are_merged_once_whoever_is_killed_or_not_heard() -> Result<()> {
    const ROUNDS: usize = 3;
    const RECORDS: usize = 1_200;
    let mut world = World::start().await?;
    let mut expected = BTreeSet::new();
    for round in 0..ROUNDS {
        world.role.shared.lost.store(2, Ordering::SeqCst);
        let names = names(&format!("round-{round}"), RECORDS);
        let records = names.iter().map(|name| world.role.record(world.push(name)));
        for recorded in futures_util::future::join_all(records).await {
            recorded?;
        }
        expected.extend(names);
        // Killed at another point each time.
        tokio::time::sleep(Duration::from_millis(150 * round as u64)).await;
        let settings = settings(&world.role, &world.token_file)?;
        let settings = settings
            .each_ref()
            .map(|(key, value)| (*key, value.as_str()));
        world.fleet.kill_and_restart(&settings).await?;
    }
    world.wait_until_drained().await?;
    let found = world.branches().await?;
    let distinct: BTreeSet<String> = found.iter().cloned().collect();
    assert_eq!(found.len(), distinct.len(), "records were doubled");
    assert_eq!(distinct, expected, "records were lost");
    wait_until_signed(&world.fleet.control_plane, &world.fleet.orchestrator).await?;
    assert_trail_intact(&world.fleet.client).await?;
    Ok(())
}

/// What a role may not write becomes a record of the role, and the rest is merged.
#[tokio::test]
async fn a_role_writes_only_about_existing_tasks_and_their_sessions() -> Result<()> {
    let world = World::start().await?;
    let instance = world.role.shared.instance;
    let other = world.fleet.session(ONE).await?;
    let mut as_user = world.push("as-a-user");
    as_user.subject = Some(AuditSubject {
        kind: "user".to_owned(),
        name: Some("ada".to_owned()),
        ..AuditSubject::default()
    });
    let mut closes = world.push("closes-a-call");
    closes.kind = AuditKind::Outcome;
    closes.call_id = Some(Uuid::now_v7());
    for body in [
        world.push("first"),
        push(instance, TaskId::generate(), None, "unknown-task"),
        push(instance, world.task_id, Some(other.session_id), "foreign"),
        push(Uuid::now_v7(), world.task_id, None, "another-instance"),
        as_user,
        closes,
        push(instance, world.task_id, None, "last"),
    ] {
        world.role.record(body).await?;
    }
    world.wait_until_drained().await?;
    assert_eq!(world.branches().await?, ["first", "last"]);
    let refused = records_of_action(&world.fleet.client, "audit.refused").await?;
    assert_eq!(refused.len(), 5, "{refused:#?}");
    for record in &refused {
        assert_eq!(record.body.subject, Some(subject(instance)));
        assert!(record.body.task_id.is_none() && record.body.session_id.is_none());
    }
    assert_trail_intact(&world.fleet.client).await?;
    Ok(())
}

/// Another instance at the same address is accepted, but not unnoticed.
#[tokio::test]
async fn another_instance_of_a_role_is_recorded_before_its_records_count() -> Result<()> {
    let mut world = World::start().await?;
    world.role.record(world.push("first")).await?;
    world.wait_until_drained().await?;
    let (first, address) = (world.role.shared.instance, world.role.address);
    world.role.shared.is_silent.store(true, Ordering::SeqCst);
    world.role.serving.abort();
    let directory = world.fleet.control_plane.world.directory().join("another");
    let second = Uuid::now_v7();
    let mut started = None;
    eventually("the address is free", TIMEOUT, async || {
        let role = RoleDouble::start(directory.clone(), second, Some(address)).await;
        started = role.ok();
        Ok(started.is_some())
    })
    .await?;
    world.role = started.context("a role")?;
    world.role.record(world.push("second")).await?;
    world.wait_until_drained().await?;
    assert_eq!(world.branches().await?, ["first", "second"]);
    let instances = records_of_action(&world.fleet.client, "egress.instance").await?;
    let found: Vec<_> = instances
        .iter()
        .map(|record| {
            let instance = record
                .body
                .subject
                .as_ref()
                .and_then(|subject| subject.instance);
            (instance, record.body.detail.get("previous").cloned())
        })
        .collect();
    assert_eq!(
        found,
        [(Some(first), None), (Some(second), Some(json!(first)))]
    );
    let second_push = records_of_action(&world.fleet.client, "git.push")
        .await?
        .pop();
    let second_push = second_push.context("a record")?;
    ensure!(instances[1].cursor < second_push.cursor);
    assert_trail_intact(&world.fleet.client).await?;
    Ok(())
}
