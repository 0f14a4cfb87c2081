//! The cost of one short command with the trail, without it, and of a bare commit in the same
//! database.

use std::time::Duration;

use anyhow::Result;
use cynode_bench::{
    rivals::{Rivals, run, time_of},
    samples::{Samples, timed},
    through::{Stack, run_true},
};
use cynode_tests::World;
use sqlx::{Connection as _, PgConnection};

/// Rounds of ours between two rounds of `podman exec`.
const SLOW_EVERY: u32 = 20;
/// Pause after Podman's exec: its cleanup runs after it returns, and must not slow the next
/// measurement.
const SETTLE: Duration = Duration::from_millis(300);
const WARM: u32 = 3;
/// Consecutive execs of ours in a row, as in a loop, before consecutive ones of Podman.
const ROW: u32 = 100;
const TRUE: &[&str] = &["true"];

#[derive(Debug)]
pub(crate) struct Cost {
    pub(crate) audited: Samples,
    pub(crate) unaudited: Samples,
    pub(crate) at_node: Samples,
    pub(crate) commit: Samples,
    pub(crate) podman: Samples,
}

impl Cost {
    pub(crate) fn ways(&self) -> [&Samples; 5] {
        [
            &self.audited,
            &self.unaudited,
            &self.at_node,
            &self.commit,
            &self.podman,
        ]
    }

    /// The median cost of the trail, in milliseconds.
    pub(crate) fn added(&self) -> f64 {
        self.audited.p50().as_secs_f64() - self.unaudited.p50().as_secs_f64()
    }

    /// The cost of the trail, in bare commits.
    pub(crate) fn in_commits(&self) -> f64 {
        self.added() / self.commit.p50().as_secs_f64()
    }

    pub(crate) fn against_podman(&self) -> f64 {
        times_faster(&self.audited, &self.podman)
    }
}

/// Sequential commands, as an agent runs them, with the machine to themselves.
#[derive(Debug)]
pub(crate) struct Alone {
    pub(crate) audited: Samples,
    pub(crate) podman: Samples,
}

impl Alone {
    pub(crate) fn ways(&self) -> [&Samples; 2] {
        [&self.audited, &self.podman]
    }

    pub(crate) fn against_podman(&self) -> f64 {
        times_faster(&self.audited, &self.podman)
    }
}

fn times_faster(ours: &Samples, theirs: &Samples) -> f64 {
    theirs.p50().as_secs_f64() / ours.p50().as_secs_f64()
}

pub(crate) async fn alone(rounds: u32, world: &World, audited: &Stack) -> Result<Alone> {
    let session = audited.session().await?;
    let rivals = Rivals::of(world, &audited.ours.sandbox(session)?).await?;
    let mut alone = Alone {
        audited: Samples::new("exec by the orchestrator, audited"),
        podman: Samples::new("podman exec"),
    };
    run(&mut rivals.podman_exec(TRUE))?;
    for round in 0..rounds {
        if round % ROW == 0 {
            for _ in 0..ROW / SLOW_EVERY {
                alone.podman.push(time_of(&mut rivals.podman_exec(TRUE))?);
            }
            tokio::time::sleep(SETTLE).await;
            for _ in 0..WARM {
                run_true(&audited.through, session).await?;
            }
        }
        push(&mut alone.audited, run_true(&audited.through, session)).await?;
    }
    Ok(alone)
}

pub(crate) async fn measure(
    rounds: u32,
    world: &World,
    audited: &Stack,
    without: &Stack,
) -> Result<Cost> {
    let (session, other) = (audited.session().await?, without.session().await?);
    let rivals = Rivals::of(world, &audited.ours.sandbox(session)?).await?;
    let mut database = PgConnection::connect(audited.database()).await?;
    sqlx::query("create schema bench")
        .execute(&mut database)
        .await?;
    sqlx::query(
        "create table bench.bare ( \
         number bigint generated always as identity primary key, body text not null)",
    )
    .execute(&mut database)
    .await?;
    let mut cost = Cost {
        audited: Samples::new("exec by the orchestrator, audited"),
        unaudited: Samples::new("exec by the orchestrator, without a trail"),
        at_node: Samples::new("exec at the node"),
        commit: Samples::new("one bare commit"),
        podman: Samples::new("podman exec"),
    };
    run(&mut rivals.podman_exec(TRUE))?;
    for round in 0..rounds {
        if round % SLOW_EVERY == 0 {
            cost.podman.push(time_of(&mut rivals.podman_exec(TRUE))?);
            tokio::time::sleep(SETTLE).await;
            for _ in 0..WARM {
                run_true(&audited.through, session).await?;
                bare(&mut database).await?;
                run_true(&without.through, other).await?;
                run_true(&audited.ours.client, session).await?;
            }
        }
        push(&mut cost.audited, run_true(&audited.through, session)).await?;
        push(&mut cost.commit, bare(&mut database)).await?;
        push(&mut cost.unaudited, run_true(&without.through, other)).await?;
        push(&mut cost.at_node, run_true(&audited.ours.client, session)).await?;
    }
    sqlx::query("drop schema bench cascade")
        .execute(&mut database)
        .await?;
    Ok(cost)
}

pub(crate) async fn push(
    samples: &mut Samples,
    work: impl Future<Output = Result<()>>,
) -> Result<()> {
    let (time, result) = timed(work).await;
    result?;
    samples.push(time);
    Ok(())
}

/// Commits a row of the size of a record.
async fn bare(database: &mut PgConnection) -> Result<()> {
    sqlx::query("insert into bench.bare (body) values (repeat('x', 700))")
        .execute(database)
        .await?;
    Ok(())
}
