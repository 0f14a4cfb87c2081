//! Creating and ending sandboxes.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cynode_tests::World;

use crate::{
    Plan,
    ours::Ours,
    rivals::{Rivals, run},
    samples::{Samples, timed},
};

/// Pause for the cleanup of the removed container.
const SETTLE: Duration = Duration::from_millis(200);

/// The times to create and to end.
pub(crate) async fn measure(
    plan: &Plan,
    ours: &Ours,
    pooled: &Ours,
    rivals: &Rivals,
    world: &World,
) -> Result<(Vec<Samples>, Vec<Samples>)> {
    let mut warm = Samples::new("session create, warm");
    let mut session = Samples::new("session create, cold, until running");
    let mut podman = Samples::new("podman run -d");
    let mut session_end = Samples::new("session end");
    let mut podman_end = Samples::new("podman rm -f -t 0");
    let workspace = world.directory().join("rival-workspace");
    fs_err::create_dir(&workspace)?;
    let owner = u32::try_from(rivals.id_block)? + 1_000;
    std::os::unix::fs::chown(&workspace, Some(owner), Some(owner))
        .context("giving a directory to a container's user")?;
    let workspace = workspace.display().to_string();

    for round in 0..=plan.create_rounds {
        pooled.wait_for_spares(1.0).await?;
        let (warm_time, created) = timed(pooled.warm_session()).await;
        pooled.end(created?).await?;
        pooled.wait_for_spares(1.0).await?;
        tokio::time::sleep(SETTLE).await;

        let (time, created) = timed(ours.session()).await;
        let id = created?;
        let (end_time, ended) = timed(ours.end(id)).await;
        ended?;
        tokio::time::sleep(SETTLE).await;

        let name = format!("rival-{round}");
        let started = Instant::now();
        run(&mut rivals.podman_run(&name, &workspace))?;
        let podman_time = started.elapsed();
        let started = Instant::now();
        run(rivals
            .podman()
            .args(["rm", "--force", "--time", "0", &name]))?;
        let podman_end_time = started.elapsed();
        tokio::time::sleep(SETTLE).await;

        // The first round is not counted: each side copies the image's layer once per id map.
        if round > 0 {
            warm.push(warm_time);
            session.push(time);
            session_end.push(end_time);
            podman.push(podman_time);
            podman_end.push(podman_end_time);
        }
    }
    Ok((vec![warm, session, podman], vec![session_end, podman_end]))
}

/// A burst of sessions: from the first request until all run, and from the first end until all are
/// gone.
#[derive(Debug, Default)]
pub(crate) struct Burst {
    pub(crate) sessions: usize,
    pub(crate) ready: Duration,
    pub(crate) gone: Duration,
}

pub(crate) async fn burst(plan: &Plan, ours: &Ours, world: &World) -> Result<Burst> {
    let count = plan.burst;
    let started = Instant::now();
    let created = futures_util::future::join_all((0..count).map(|_| ours.session())).await;
    let ready = started.elapsed();
    let ids = created.into_iter().collect::<Result<Vec<_>>>()?;
    let started = Instant::now();
    for ended in futures_util::future::join_all(ids.into_iter().map(|id| ours.end(id))).await {
        ended?;
    }
    while !world.containers()?.is_empty() {
        tokio::time::sleep(SETTLE).await;
    }
    Ok(Burst {
        sessions: count,
        ready,
        gone: started.elapsed(),
    })
}
