//! The database fails under load: nothing takes effect without a record, and every call gets its
//! outcome in the end.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{AuditRecord, AuditResult, ExecId, SessionId};
use cynode_client::SessionClient;
use cynode_tests::{
    Answer, AuditTrail, ControlPlane, HoldGuard, Postgres, RecordingCaller, eventually, sh,
    wait_until_settled, whole_trail,
};
use http::Method;
use serde_json::json;
use uuid::Uuid;

use super::cluster::{Cluster, session};

const TIMEOUT: Duration = Duration::from_secs(60);
/// The delay before a refused caller retries.
const RETRY_DELAY: Duration = Duration::from_millis(50);
const CALLERS: usize = 6;
/// Commands in flight when the database fails; they end during the outage.
const COMMANDS_IN_FLIGHT: usize = 3;
/// Calls that must succeed before the outage, and again after it.
const MIN_SUCCESSES: usize = 20;

/// A failure of the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outage {
    Killed,
    /// Stopped; meanwhile somebody declares the writer of the trail dead.
    DeclaredDead,
    /// Accepts connections but doesn't respond.
    Frozen,
    /// Responds, but accepts no audit records.
    Full,
}

/// Lets the database refuse every audit record, as if its disk were full.
fn refuse_records(postgres: &Postgres) -> Result<()> {
    let refuse = "begin raise exception 'no space is left' using errcode = 'disk_full'; end";
    postgres.query(&format!(
        "create function refuse() returns trigger language plpgsql as $$ {refuse} $$"
    ))?;
    postgres
        .query(
            "create trigger refuse before insert on audit_events for each statement execute \
             function refuse()",
        )
        .map(drop)
}

/// An outage in progress, until it is ended.
struct ActiveOutage(Outage, Option<HoldGuard>);

impl ActiveOutage {
    fn begin(cluster: &mut Cluster, outage: Outage) -> Result<Self> {
        let postgres = &mut cluster.control_plane.postgres;
        let mut frozen = None;
        match outage {
            Outage::Killed => postgres.kill()?,
            Outage::DeclaredDead => {
                postgres.stop()?;
                postgres.execute_while_stopped(
                    "update audit_streams set closed_at = now() where closed_at is null",
                )?;
            }
            Outage::Frozen => frozen = Some(postgres.freeze()?),
            Outage::Full => refuse_records(postgres)?,
        }
        Ok(Self(outage, frozen))
    }

    async fn end(self, cluster: &mut Cluster) -> Result<()> {
        match self.0 {
            Outage::Killed | Outage::DeclaredDead => {
                cluster
                    .control_plane
                    .postgres
                    .restart(&cluster.control_plane.world)
                    .await?;
            }
            Outage::Frozen => drop(self.1),
            Outage::Full => drop(
                cluster
                    .control_plane
                    .postgres
                    .query("drop trigger refuse on audit_events")?,
            ),
        }
        Ok(())
    }
}

/// Callers of one session. Each command writes a unique line: its own id.
struct Load {
    recorder: RecordingCaller,
    path: String,
    stopped: AtomicBool,
    /// The response to each command; `None` if the connection broke.
    responses: Mutex<BTreeMap<ExecId, Option<Answer>>>,
}

impl Load {
    /// Runs a command that writes its line and then runs `more`.
    async fn run(&self, id: ExecId, more: &str) -> Option<Answer> {
        let body = json!({
            "exec_id": id,
            "argv": ["/bin/sh", "-c", format!("echo {id} >> lines; {more}")],
            "timeout_ms": 60_000
        });
        let answer = self.recorder.call(Method::POST, &self.path, &body).await;
        self.responses
            .lock()
            .expect("not poisoned")
            .insert(id, answer.clone());
        answer
    }

    async fn run_until_stopped(&self) {
        while !self.stopped.load(Ordering::SeqCst) {
            let answer = self.run(ExecId::generate(), "true").await;
            if answer.is_none_or(|answer| answer.status != 200) {
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }
    }

    fn responses(&self) -> BTreeMap<ExecId, Option<Answer>> {
        self.responses.lock().expect("not poisoned").clone()
    }

    /// The number of responses of this kind.
    fn count(&self, wanted: &str) -> usize {
        self.responses
            .lock()
            .expect("not poisoned")
            .values()
            .filter(|answer| outcome_of(answer.as_ref()) == wanted)
            .count()
    }
}

/// The code of a refusal, `good`, or that the connection broke.
fn outcome_of(answer: Option<&Answer>) -> String {
    match answer.map(Answer::outcome) {
        None => "broke off".to_owned(),
        Some((200, _)) => "good".to_owned(),
        Some((_, code)) => code,
    }
}

/// The lines that commands have written, read from the node.
async fn lines(node: &SessionClient, id: SessionId) -> Result<Vec<String>> {
    let mut body = node.get_file(id, Path::new("lines")).await?;
    let mut text = Vec::new();
    while let Some(piece) = body.chunk().await? {
        text.extend_from_slice(&piece);
    }
    Ok(String::from_utf8(text)?
        .lines()
        .map(str::to_owned)
        .collect())
}

async fn under_load(outage: Outage) -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let (client, node) = (cluster.orchestrator.client()?, cluster.worker.client()?);
    let id: SessionId = cluster
        .session(&cluster.orchestrator.token()?, &session())
        .await?
        .parse()?;
    let recorder = RecordingCaller::new(client.clone());
    let load = Arc::new(Load {
        recorder: recorder.clone(),
        path: format!("/v1/sessions/{id}/exec"),
        stopped: AtomicBool::new(false),
        responses: Mutex::default(),
    });
    let call = |load: Arc<Load>| async move { load.run_until_stopped().await };
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| tokio::spawn(call(Arc::clone(&load))))
        .collect();
    eventually("calls succeed", TIMEOUT, async || {
        Ok(load.count("good") >= MIN_SUCCESSES)
    })
    .await?;
    let blocked: Vec<ExecId> = (0..COMMANDS_IN_FLIGHT)
        .map(|_| ExecId::generate())
        .collect();
    let holders: Vec<_> = blocked
        .iter()
        .map(|exec| {
            let (load, exec) = (Arc::clone(&load), *exec);
            tokio::spawn(async move {
                load.run(exec, "while ! test -e go; do sleep 0.1; done")
                    .await
            })
        })
        .collect();
    let started = async || {
        let lines_so_far = lines(&node, id).await?;
        Ok(blocked
            .iter()
            .all(|exec| lines_so_far.contains(&exec.to_string())))
    };
    eventually("the blocked commands have started", TIMEOUT, started).await?;

    let active = ActiveOutage::begin(&mut cluster, outage)?;
    let refused = load.count("store_unavailable");
    // The node continues without the control plane.
    node.exec(id, &sh("touch go")).await?;
    for holder in holders {
        let answer = holder.await?.context("the connection broke")?;
        let problem = answer.problem()?;
        ensure!(
            (answer.status, problem.code.as_str()) == (503, "outcome_pending"),
            "{problem:?}"
        );
    }
    // A call to a frozen database may wait as long as the outage lasts.
    if outage != Outage::Frozen {
        eventually("calls are refused", TIMEOUT, async || {
            Ok(load.count("store_unavailable") >= refused + CALLERS)
        })
        .await?;
    }
    active.end(&mut cluster).await?;
    let good = load.count("good");
    eventually(
        "calls succeed again without intervention",
        TIMEOUT,
        async || Ok(load.count("good") >= good + MIN_SUCCESSES),
    )
    .await?;
    load.stopped.store(true, Ordering::SeqCst);
    for caller in callers {
        caller.await?;
    }

    wait_until_settled(&client, TIMEOUT).await?;
    let trail = AuditTrail::new(whole_trail(&client).await?);
    trail.check(&recorder.answers())?;
    let responses = load.responses();
    check(&trail, &responses, &lines(&node, id).await?)?;
    let recorded = records_by_command(&trail)?;
    for exec in &blocked {
        let (intent, outcome) = recorded.get(exec).context("the command is recorded")?;
        // A writer declared dead leaves its open calls to others and opens a new stream.
        ensure!(
            outage != Outage::DeclaredDead || intent.stream != outcome.stream,
            "{outcome:?} is in the closed stream"
        );
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for answer in responses.values() {
        *counts.entry(outcome_of(answer.as_ref())).or_default() += 1;
    }
    #[expect(clippy::print_stdout, reason = "the report of a run")]
    {
        println!("{outage:?}: {counts:?}");
    }
    Ok(())
}

/// The only intent and the only outcome of each command.
fn records_by_command(trail: &AuditTrail) -> Result<HashMap<ExecId, (&AuditRecord, &AuditRecord)>> {
    let mut found = HashMap::new();
    for (intent, outcome) in trail.pairs()? {
        if intent.body.action == "session.exec"
            && let Some(id) = intent.body.exec_id
        {
            ensure!(
                found.insert(id, (intent, outcome)).is_none(),
                "two calls are recorded for the command {id}"
            );
        }
    }
    Ok(found)
}

/// Checks that records, responses and effects agree.
fn check(
    trail: &AuditTrail,
    responses: &BTreeMap<ExecId, Option<Answer>>,
    lines: &[String],
) -> Result<()> {
    let recorded = records_by_command(trail)?;
    let mut left: HashMap<&str, usize> = HashMap::new();
    for line in lines {
        *left.entry(line).or_default() += 1;
    }
    for (id, answer) in responses {
        let times = left.remove(id.to_string().as_str()).unwrap_or(0);
        let record = recorded.get(id);
        let result = record.and_then(|(_, outcome)| outcome.body.result);
        let seen = format!(
            "{id}: {}, done {times} times, told as {record:?}",
            outcome_of(answer.as_ref())
        );
        ensure!(times <= 1, "{seen}");
        // Every effect was recorded before it happened, and its outcome is true.
        ensure!(
            (times == 1) == (result == Some(AuditResult::Done)),
            "{seen}"
        );
        match (outcome_of(answer.as_ref()).as_str(), answer) {
            ("good", _) => ensure!(times == 1, "{seen}"),
            ("store_unavailable", _) => ensure!(times == 0, "{seen}"),
            ("outcome_pending", Some(answer)) => {
                let named: Uuid = serde_json::from_value(
                    answer
                        .problem()?
                        .extensions
                        .get("call_id")
                        .cloned()
                        .unwrap_or_default(),
                )?;
                ensure!(
                    record.is_some_and(|(intent, outcome)| intent.body.call_id == Some(named)
                        && outcome.body.call_id == Some(named)),
                    "{seen}"
                );
            }
            // If the heartbeat was missed, the call is reconciled with the node later.
            ("broke off" | "node_unreachable", _) => {}
            _ => ensure!(false, "{seen}"),
        }
    }
    ensure!(left.is_empty(), "no caller requested {left:?}");
    Ok(())
}

// part of: ISC-22
#[tokio::test]
// invariant: intent-and-outcome
async fn nothing_starts_while_the_database_is_down_and_calls_in_flight_are_recorded_later()
-> Result<()> {
    under_load(Outage::Killed).await
}

#[tokio::test]
// invariant: intent-and-outcome
async fn a_writer_declared_dead_continues_and_its_open_calls_are_closed_once() -> Result<()> {
    under_load(Outage::DeclaredDead).await
}

#[tokio::test]
// invariant: intent-and-outcome
async fn nothing_happens_without_a_record_while_the_database_hangs() -> Result<()> {
    under_load(Outage::Frozen).await
}

#[tokio::test]
// invariant: fail-closed
async fn nothing_is_done_while_no_record_can_be_written() -> Result<()> {
    under_load(Outage::Full).await
}

#[tokio::test]
async fn an_orchestrator_stops_although_its_records_cannot_be_written() -> Result<()> {
    for outage in [Outage::Full, Outage::Killed, Outage::Frozen] {
        let mut control_plane = ControlPlane::new().await?;
        let mut orchestrator = control_plane.orchestrator("", &[]).await?;
        // The writer retries this intent from now on.
        refuse_records(&control_plane.postgres)?;
        let request = orchestrator
            .sessions()?
            .request(Method::POST, "/v1/tasks")
            .json(&json!({"name": "never recorded"}));
        assert_eq!(request.send().await?.status().as_u16(), 503, "{outage:?}");
        let frozen = match outage {
            Outage::Killed => {
                control_plane.postgres.kill()?;
                None
            }
            Outage::Frozen => Some(control_plane.postgres.freeze()?),
            Outage::Full | Outage::DeclaredDead => None,
        };
        orchestrator
            .stop()
            .await
            .with_context(|| format!("{outage:?}"))?;
        drop(frozen);
    }
    Ok(())
}
