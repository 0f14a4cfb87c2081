//! The worker is killed repeatedly in the middle of its work.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ExecId, ExecRequest, ExecState, SessionCreate, SessionEnd, SessionId, SessionState, TaskId,
};
use cynode_client::SessionClient;
use cynode_tests::{Options, Random, RunningWorker, World, eventually, session, sh};

/// The worker's current activity, as far as it is visible from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    ColdCreate,
    WarmCreate,
    Exec,
    End,
    Refill,
}

const PHASES: [Phase; 5] = [
    Phase::ColdCreate,
    Phase::WarmCreate,
    Phase::Exec,
    Phase::End,
    Phase::Refill,
];

#[derive(Clone, Debug)]
struct SessionHistory {
    request: SessionCreate,
    /// The command that wrote the file, once its response arrived.
    marked: Option<ExecId>,
    ending: bool,
    ended: bool,
}

/// The requests sent and the responses received.
#[derive(Debug, Default)]
struct Ledger {
    sessions: Mutex<HashMap<SessionId, SessionHistory>>,
    open: [AtomicUsize; 4],
}

struct InFlightGuard<'a>(&'a AtomicUsize);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Ledger {
    fn open(&self, phase: Phase) -> InFlightGuard<'_> {
        let counter = &self.open[phase as usize];
        counter.fetch_add(1, Ordering::SeqCst);
        InFlightGuard(counter)
    }

    fn change(&self, id: SessionId, change: impl FnOnce(&mut SessionHistory)) {
        if let Some(history) = self.sessions.lock().expect("not poisoned").get_mut(&id) {
            change(history);
        }
    }
}

fn mark(id: SessionId) -> ExecRequest {
    ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..sh(&format!("echo {id} > mark; cat mark"))
    }
}

/// Creates sessions one after the other, marks each, and ends every second one, until the worker is
/// gone.
async fn traffic(client: SessionClient, ledger: Arc<Ledger>, warm: bool) {
    for round in 0_u64.. {
        let request = if warm {
            SessionCreate::new(TaskId::generate(), SessionId::generate(), "default")
        } else {
            session()
        };
        let id = request.session_id;
        ledger.sessions.lock().expect("not poisoned").insert(
            id,
            SessionHistory {
                request: request.clone(),
                marked: None,
                ending: false,
                ended: false,
            },
        );
        {
            let _open = ledger.open(if warm {
                Phase::WarmCreate
            } else {
                Phase::ColdCreate
            });
            if client.create_session(&request).await.is_err() {
                return;
            }
        }
        {
            let _open = ledger.open(Phase::Exec);
            let exec = mark(id);
            if client.exec(id, &exec).await.is_err() {
                return;
            }
            ledger.change(id, |history| history.marked = exec.exec_id);
        }
        if round.is_multiple_of(2) {
            let _open = ledger.open(Phase::End);
            ledger.change(id, |history| history.ending = true);
            if client
                .end_session(id, &SessionEnd::default())
                .await
                .is_err()
            {
                return;
            }
            ledger.change(id, |history| history.ended = true);
        }
    }
}

/// The number of spares that the worker has begun but not finished, by its log from `from` on.
fn refilling(worker: &RunningWorker, from: usize) -> Result<bool> {
    let log = fs_err::read(worker.log())?;
    let log = String::from_utf8_lossy(&log[from.min(log.len())..]);
    Ok(log.matches("Starting a spare sandbox.").count()
        > log.matches("A spare sandbox is ready.").count())
}

fn phases_under_way(worker: &RunningWorker, ledger: &Ledger, from: usize) -> Result<Vec<Phase>> {
    let mut phases: Vec<Phase> = PHASES[..4]
        .iter()
        .copied()
        .filter(|phase| ledger.open[*phase as usize].load(Ordering::SeqCst) > 0)
        .collect();
    if refilling(worker, from)? {
        phases.push(Phase::Refill);
    }
    Ok(phases)
}

/// Kills the worker in each round and checks all state after each kill. Prints the phases that
/// were hit.
pub(crate) async fn kill_again_and_again(rounds: usize) -> Result<()> {
    let mut random = Random::seeded();
    let world = World::new()?;
    let options = Options::default().set("pool_size", "2");
    let mut worker = world.worker(&options).await?;
    let witness = worker
        .client()?
        .create_session(&session())
        .await?
        .session_id;
    let running = ExecRequest {
        background: true,
        timeout_ms: 0,
        ..sh("while :; do sleep 1; done")
    };
    let running = worker
        .client()?
        .exec_background(witness, &running)
        .await?
        .exec_id;
    let ledger = Arc::new(Ledger::default());
    let mut hits: BTreeMap<Phase, usize> = BTreeMap::new();
    // The start of this worker's log: a spare begun at startup is logged before the worker takes
    // calls.
    let mut from = 0;
    for round in 0..rounds {
        let client = worker.client()?;
        let mut calls = tokio::task::JoinSet::new();
        for warm in [true, false] {
            calls.spawn(traffic(client.clone(), Arc::clone(&ledger), warm));
        }
        let wanted = PHASES[round % PHASES.len()];
        eventually(
            "the worker enters the phase to be killed in",
            Duration::from_secs(60),
            async || Ok(phases_under_way(&worker, &ledger, from)?.contains(&wanted)),
        )
        .await?;
        // A random moment within the phase. Some phases are shorter than a scheduling quantum, so
        // each attempt comes earlier than the last.
        let mut phases = Vec::new();
        for narrower in 0..15 {
            tokio::time::sleep(Duration::from_micros(random.below(20_000 >> narrower))).await;
            phases = phases_under_way(&worker, &ledger, from)?;
            if phases.contains(&wanted) {
                break;
            }
            eventually(
                "the worker enters the phase again",
                Duration::from_secs(60),
                async || Ok(phases_under_way(&worker, &ledger, from)?.contains(&wanted)),
            )
            .await?;
        }
        worker.kill()?;
        #[expect(clippy::print_stdout, reason = "the report of the run")]
        {
            println!("kill {}: during {phases:?}", round + 1);
        }
        for phase in phases {
            *hits.entry(phase).or_default() += 1;
        }
        calls.join_all().await;
        from = fs_err::metadata(worker.log())?.len().try_into()?;
        worker = world.worker(&options).await?;
        check(&worker, &ledger)
            .await
            .with_context(|| format!("after kill {}", round + 1))?;
        let witness = worker.client()?.get_exec(witness, running).await?;
        ensure!(witness.state == ExecState::Running, "{witness:?}");
    }
    ensure!(
        rounds < PHASES.len() || PHASES.iter().all(|phase| hits.contains_key(phase)),
        "not every phase was hit: {hits:?}"
    );
    worker.shut_down().await?;
    world.assert_clean().await?;
    #[expect(clippy::print_stdout, reason = "the report of the run")]
    {
        println!(
            "soak: kills: {rounds}, phases hit {hits:?}, no session lost or mixed up; \
             CYNODE_SEED={}",
            random.seed()
        );
    }
    Ok(())
}

/// Every session whose creation was answered exists unchanged; the others appear when their request
/// is repeated.
async fn check(worker: &RunningWorker, ledger: &Ledger) -> Result<()> {
    let client = worker.client()?;
    let sessions = std::mem::take(&mut *ledger.sessions.lock().expect("not poisoned"));
    for (id, history) in sessions {
        if history.ended {
            let found = client.get_session(id).await?;
            ensure!(
                found.state == SessionState::Ended,
                "ended, and now {found:?}"
            );
            continue;
        }
        let made = client.create_session(&history.request).await?;
        ensure!(
            made.session_id == id && made.task_id == history.request.task_id,
            "{made:?} for {:?}",
            history.request
        );
        if made.state == SessionState::Running {
            if let Some(exec_id) = history.marked {
                let found = client.get_exec(id, exec_id).await?;
                ensure!(
                    found.state == ExecState::Exited,
                    "answered, and now {found:?}"
                );
            }
            let holds = client
                .exec(
                    id,
                    &if history.marked.is_some() {
                        sh("cat mark")
                    } else {
                        mark(id)
                    },
                )
                .await?;
            ensure!(holds.stdout == format!("{id}\n"), "{id} holds {holds:?}");
            client.end_session(id, &SessionEnd::default()).await?;
        } else {
            ensure!(
                history.ending && matches!(made.state, SessionState::Ended | SessionState::Ending),
                "{made:?}"
            );
        }
    }
    Ok(())
}
