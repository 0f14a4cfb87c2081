//! The database goes away under load: nothing happens without a record, and everything is told in the end.

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
use cynode_client::WorkerClient;
use cynode_tests::{Answer, Held, Trail, Witness, eventually, sh, until_settled, whole_trail};
use http::Method;
use serde_json::json;
use uuid::Uuid;

use super::small::{Small, session};

const PATIENCE: Duration = Duration::from_secs(60);
/// Who was refused tries again a little later.
const AGAIN: Duration = Duration::from_millis(50);
const CALLERS: usize = 6;
/// Commands that are under way when the database goes, and end while it is away.
const HELD: usize = 3;
/// So many calls must be good before it goes, and after it has come back.
const GOOD: usize = 20;

/// What becomes of the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Away {
    Killed,
    /// It is stopped, and when it is back somebody has taken the writer of the trail for dead.
    TakenForDead,
    /// It takes calls and does not answer.
    Frozen,
    /// It answers, and takes no record.
    Full,
}

/// A database that is away, until it is brought back.
struct Gone(Away, Option<Held>);

impl Gone {
    fn take(small: &mut Small, away: Away) -> Result<Self> {
        let postgres = &mut small.plane.postgres;
        let mut frozen = None;
        match away {
            Away::Killed => postgres.kill()?,
            Away::TakenForDead => {
                postgres.stop()?;
                postgres.change_while_stopped(
                    "update audit_streams set closed_at = now() where closed_at is null",
                )?;
            }
            Away::Frozen => frozen = Some(postgres.freeze()?),
            Away::Full => {
                let refuse =
                    "begin raise exception 'no space is left' using errcode = 'disk_full'; end";
                postgres.ask(&format!(
                    "create function refuse() returns trigger language plpgsql as $$ {refuse} $$"
                ))?;
                postgres.ask("create trigger refuse before insert on audit_events for each statement execute function refuse()").map(drop)?;
            }
        }
        Ok(Self(away, frozen))
    }

    async fn bring_back(self, small: &mut Small) -> Result<()> {
        match self.0 {
            Away::Killed | Away::TakenForDead => {
                small.plane.postgres.start_again(&small.plane.world).await?
            }
            Away::Frozen => drop(self.1),
            Away::Full => drop(
                small
                    .plane
                    .postgres
                    .ask("drop trigger refuse on audit_events")?,
            ),
        }
        Ok(())
    }
}

/// Callers of one session. Each command writes a line that no other one writes: its own id.
struct Load {
    witness: Witness,
    path: String,
    stopped: AtomicBool,
    /// How each command was answered; none when its call broke off.
    ended: Mutex<BTreeMap<ExecId, Option<Answer>>>,
}

impl Load {
    /// Runs a command that leaves its line, and does something more.
    async fn run(&self, id: ExecId, more: &str) -> Option<Answer> {
        let body = json!({"exec_id": id, "argv": ["/bin/sh", "-c", format!("echo {id} >> lines; {more}")], "timeout_ms": 60_000});
        let answer = self.witness.call(Method::POST, &self.path, &body).await;
        self.ended
            .lock()
            .expect("not poisoned")
            .insert(id, answer.clone());
        answer
    }

    async fn go_on(&self) {
        while !self.stopped.load(Ordering::SeqCst) {
            let answer = self.run(ExecId::generate(), "true").await;
            if answer.is_none_or(|answer| answer.status != 200) {
                tokio::time::sleep(AGAIN).await;
            }
        }
    }

    fn ended(&self) -> BTreeMap<ExecId, Option<Answer>> {
        self.ended.lock().expect("not poisoned").clone()
    }

    /// How many were answered so.
    fn count(&self, wanted: &str) -> usize {
        self.ended
            .lock()
            .expect("not poisoned")
            .values()
            .filter(|answer| answered(answer.as_ref()) == wanted)
            .count()
    }
}

/// The code of a refusal, or that it was good, or that it broke off.
fn answered(answer: Option<&Answer>) -> String {
    match answer.map(Answer::outcome) {
        None => "broke off".to_owned(),
        Some((200, _)) => "good".to_owned(),
        Some((_, code)) => code,
    }
}

/// The lines that commands have left, as the node itself says.
async fn lines(node: &WorkerClient, id: SessionId) -> Result<Vec<String>> {
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

async fn under_load(away: Away) -> Result<()> {
    let mut small = Small::start().await?;
    let (client, node) = (small.orchestrator.client()?, small.worker.client()?);
    let id: SessionId = small
        .session(&small.orchestrator.token()?, &session())
        .await?
        .parse()?;
    let witness = Witness::new(client.clone());
    let load = Arc::new(Load {
        witness: witness.clone(),
        path: format!("/v1/sessions/{id}/exec"),
        stopped: AtomicBool::new(false),
        ended: Mutex::default(),
    });
    let call = |load: Arc<Load>| async move { load.go_on().await };
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| tokio::spawn(call(Arc::clone(&load))))
        .collect();
    eventually("calls are good", PATIENCE, async || {
        Ok(load.count("good") >= GOOD)
    })
    .await?;
    let held: Vec<ExecId> = (0..HELD).map(|_| ExecId::generate()).collect();
    let holders: Vec<_> = held
        .iter()
        .map(|exec| {
            let (load, exec) = (Arc::clone(&load), *exec);
            tokio::spawn(async move {
                load.run(exec, "while ! test -e go; do sleep 0.1; done")
                    .await
            })
        })
        .collect();
    let begun = async || {
        let there = lines(&node, id).await?;
        Ok(held.iter().all(|exec| there.contains(&exec.to_string())))
    };
    eventually("the commands that will be held have begun", PATIENCE, begun).await?;

    let gone = Gone::take(&mut small, away)?;
    let refused = load.count("store_unavailable");
    // The node needs nobody to go on.
    node.exec(id, &sh("touch go")).await?;
    for holder in holders {
        let answer = holder.await?.context("it broke off")?;
        let problem = answer.problem()?;
        ensure!(
            (answer.status, problem.code.as_str()) == (503, "outcome_pending"),
            "{problem:?}"
        );
    }
    // Who waits for a database that says nothing at all may wait as long as it does.
    if away != Away::Frozen {
        eventually("calls are refused", PATIENCE, async || {
            Ok(load.count("store_unavailable") >= refused + CALLERS)
        })
        .await?;
    }
    gone.bring_back(&mut small).await?;
    let good = load.count("good");
    eventually(
        "calls are good again, by themselves",
        PATIENCE,
        async || Ok(load.count("good") >= good + GOOD),
    )
    .await?;
    load.stopped.store(true, Ordering::SeqCst);
    for caller in callers {
        caller.await?;
    }

    until_settled(&client, PATIENCE).await?;
    let trail = Trail::new(whole_trail(&client).await?);
    trail.check(&witness.answered())?;
    let ended = load.ended();
    check(&trail, &ended, &lines(&node, id).await?)?;
    let told = of_commands(&trail)?;
    for exec in &held {
        let (intent, outcome) = told.get(exec).context("it is told")?;
        // Who was taken for dead leaves what it had begun to others, and goes on elsewhere.
        ensure!(
            away != Away::TakenForDead || intent.stream != outcome.stream,
            "{outcome:?} is in the stream that was closed"
        );
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for answer in ended.values() {
        *counts.entry(answered(answer.as_ref())).or_default() += 1;
    }
    #[expect(clippy::print_stdout, reason = "the report of what was hit")]
    {
        println!("{away:?}: {counts:?}");
    }
    Ok(())
}

/// The one intent and the one outcome of each command.
fn of_commands(trail: &Trail) -> Result<HashMap<ExecId, (&AuditRecord, &AuditRecord)>> {
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

/// What is on record, what callers were told and what was done are the same.
fn check(trail: &Trail, ended: &BTreeMap<ExecId, Option<Answer>>, lines: &[String]) -> Result<()> {
    let told = of_commands(trail)?;
    let mut left: HashMap<&str, usize> = HashMap::new();
    for line in lines {
        *left.entry(line).or_default() += 1;
    }
    for (id, answer) in ended {
        let times = left.remove(id.to_string().as_str()).unwrap_or(0);
        let record = told.get(id);
        let result = record.and_then(|(_, outcome)| outcome.body.result);
        let seen = format!(
            "{id}: {}, done {times} times, told as {record:?}",
            answered(answer.as_ref())
        );
        ensure!(times <= 1, "{seen}");
        // Whatever was done was written down before, and what is written of its end is so.
        ensure!(
            (times == 1) == (result == Some(AuditResult::Done)),
            "{seen}"
        );
        match (answered(answer.as_ref()).as_str(), answer) {
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
            // A node that could not say that it lives is asked later what became of the call.
            ("broke off" | "node_unreachable", _) => {}
            _ => ensure!(false, "{seen}"),
        }
    }
    ensure!(left.is_empty(), "nobody asked for {left:?}");
    Ok(())
}

// proves: ISC-22
#[tokio::test]
async fn while_the_database_is_dead_nothing_is_begun_and_what_was_is_told_when_it_is_back()
-> Result<()> {
    under_load(Away::Killed).await
}

#[tokio::test]
async fn a_writer_that_was_taken_for_dead_goes_on_and_what_it_had_begun_is_told_once() -> Result<()>
{
    under_load(Away::TakenForDead).await
}

#[tokio::test]
async fn a_database_that_hangs_lets_nothing_happen_without_a_record() -> Result<()> {
    under_load(Away::Frozen).await
}

#[tokio::test]
async fn while_no_record_can_be_written_nothing_is_done() -> Result<()> {
    under_load(Away::Full).await
}
