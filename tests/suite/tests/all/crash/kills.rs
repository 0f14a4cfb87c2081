//! The worker killed again and again in the middle of its work.

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
use cynode_client::WorkerClient;
use cynode_tests::{Options, Random, RunningWorker, World, eventually, session, sh};

/// What the worker is doing at a moment, as far as it can be told from outside.
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
struct Known {
    request: SessionCreate,
    /// The command that wrote its file, once that was answered.
    marked: Option<ExecId>,
    ending: bool,
    ended: bool,
}

/// What was asked for, and what was answered.
#[derive(Debug, Default)]
struct Book {
    sessions: Mutex<HashMap<SessionId, Known>>,
    open: [AtomicUsize; 4],
}

struct Open<'a>(&'a AtomicUsize);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Book {
    fn open(&self, phase: Phase) -> Open<'_> {
        let counter = &self.open[phase as usize];
        counter.fetch_add(1, Ordering::SeqCst);
        Open(counter)
    }

    fn change(&self, id: SessionId, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.sessions.lock().expect("not poisoned").get_mut(&id) {
            change(known);
        }
    }
}

fn mark(id: SessionId) -> ExecRequest {
    ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..sh(&format!("echo {id} > mark; cat mark"))
    }
}

/// One after the other: a session is made, marked, and every second one ended. Until the worker is gone.
async fn traffic(client: WorkerClient, book: Arc<Book>, warm: bool) {
    for round in 0_u64.. {
        let request = if warm {
            SessionCreate::new(TaskId::generate(), SessionId::generate(), "default")
        } else {
            session()
        };
        let id = request.session_id;
        book.sessions.lock().expect("not poisoned").insert(
            id,
            Known {
                request: request.clone(),
                marked: None,
                ending: false,
                ended: false,
            },
        );
        {
            let _open = book.open(if warm {
                Phase::WarmCreate
            } else {
                Phase::ColdCreate
            });
            if client.create_session(&request).await.is_err() {
                return;
            }
        }
        {
            let _open = book.open(Phase::Exec);
            let exec = mark(id);
            if client.exec(id, &exec).await.is_err() {
                return;
            }
            book.change(id, |known| known.marked = exec.exec_id);
        }
        if round.is_multiple_of(2) {
            let _open = book.open(Phase::End);
            book.change(id, |known| known.ending = true);
            if client
                .end_session(id, &SessionEnd::default())
                .await
                .is_err()
            {
                return;
            }
            book.change(id, |known| known.ended = true);
        }
    }
}

/// Spares that were begun and are not there yet, by the worker's log from `from` on.
fn refilling(worker: &RunningWorker, from: usize) -> Result<bool> {
    let log = fs_err::read(worker.log())?;
    let log = String::from_utf8_lossy(&log[from.min(log.len())..]);
    Ok(log.matches("Making a spare sandbox.").count()
        > log.matches("A spare sandbox is ready.").count())
}

fn under_way(worker: &RunningWorker, book: &Book, from: usize) -> Result<Vec<Phase>> {
    let mut phases: Vec<Phase> = PHASES[..4]
        .iter()
        .copied()
        .filter(|phase| book.open[*phase as usize].load(Ordering::SeqCst) > 0)
        .collect();
    if refilling(worker, from)? {
        phases.push(Phase::Refill);
    }
    Ok(phases)
}

/// Kills the worker so many times and looks at everything after each. Says which phases were hit.
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
    let book = Arc::new(Book::default());
    let mut hits: BTreeMap<Phase, usize> = BTreeMap::new();
    // Where the log of this worker begins: a spare that it began at its start is told before it takes calls.
    let mut from = 0;
    for round in 0..rounds {
        let client = worker.client()?;
        let mut calls = tokio::task::JoinSet::new();
        for warm in [true, false] {
            calls.spawn(traffic(client.clone(), Arc::clone(&book), warm));
        }
        let wanted = PHASES[round % PHASES.len()];
        eventually(
            "the worker does what it is to be killed in",
            Duration::from_secs(60),
            async || Ok(under_way(&worker, &book, from)?.contains(&wanted)),
        )
        .await?;
        // A random moment within it: some phases last for less than a thread's turn, so each try comes sooner than the last.
        let mut phases = Vec::new();
        for narrower in 0..15 {
            tokio::time::sleep(Duration::from_micros(random.below(20_000 >> narrower))).await;
            phases = under_way(&worker, &book, from)?;
            if phases.contains(&wanted) {
                break;
            }
            eventually("it does so again", Duration::from_secs(60), async || {
                Ok(under_way(&worker, &book, from)?.contains(&wanted))
            })
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
        check(&worker, &book)
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
            "soak: kills: {rounds}, phases hit {hits:?}, no session lost or mixed up; CYNODE_SEED={}",
            random.seed()
        );
    }
    Ok(())
}

/// Every session that was answered is there and is itself; those that were not answered can be had by asking again.
async fn check(worker: &RunningWorker, book: &Book) -> Result<()> {
    let client = worker.client()?;
    let sessions = std::mem::take(&mut *book.sessions.lock().expect("not poisoned"));
    for (id, known) in sessions {
        if known.ended {
            let found = client.get_session(id).await?;
            ensure!(
                found.state == SessionState::Ended,
                "ended, and now {found:?}"
            );
            continue;
        }
        let made = client.create_session(&known.request).await?;
        ensure!(
            made.session_id == id && made.task_id == known.request.task_id,
            "{made:?} for {:?}",
            known.request
        );
        if made.state == SessionState::Running {
            if let Some(exec_id) = known.marked {
                let found = client.get_exec(id, exec_id).await?;
                ensure!(
                    found.state == ExecState::Exited,
                    "answered, and now {found:?}"
                );
            }
            let holds = client
                .exec(
                    id,
                    &if known.marked.is_some() {
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
                known.ending && matches!(made.state, SessionState::Ended | SessionState::Ending),
                "{made:?}"
            );
        }
    }
    Ok(())
}
