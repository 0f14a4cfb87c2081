//! One short command, in every possible way.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use cynode_api::{LimitsRequest, SessionId};
use cynode_tests::exec;

use crate::{
    Plan,
    ours::Ours,
    rivals::{Rivals, run, time_of as of},
    samples::{Samples, timed},
    through::{Stack, run_true},
};

/// The rows that the report compares with each other.
pub(crate) const BY_ORCHESTRATOR: &str = "session exec by the orchestrator";
pub(crate) const PODMAN_EXEC: &str = "podman exec";

const TRUE: &[&str] = &["true"];
/// Pause after Podman's exec: its cleanup runs after it returns, and must not slow the next
/// measurement.
const SETTLE: Duration = Duration::from_millis(60);
/// Concurrent clients.
const CLIENTS: usize = 20;

pub(crate) async fn measure(
    plan: &Plan,
    stack: &Stack,
    session: SessionId,
    rivals: &Rivals,
) -> Result<Vec<Samples>> {
    let (ours, through) = (&stack.ours.client, &stack.through);
    let mut session_exec = Samples::new("session exec (HTTP, kept alive)");
    let mut by_orchestrator = Samples::new(BY_ORCHESTRATOR);
    let mut spawn = Samples::new("plain spawn on the host");
    let mut nsenter = Samples::new("nsenter, all namespaces");
    let mut runc = Samples::new("runc exec");
    let mut rest = Samples::new("Podman REST exec");
    let mut podman = Samples::new(PODMAN_EXEC);

    // Warm-up: connections, page cache, lazily bound libraries.
    for _ in 0..5 {
        run_true(ours, session).await?;
        run_true(through, session).await?;
    }
    run(&mut rivals.nsenter(TRUE))?;
    run(&mut rivals.podman_exec(TRUE))?;
    rivals.rest_exec(TRUE).await?;

    let slow_every = (plan.exec_rounds / plan.slow_rounds).max(1);
    for round in 0..plan.exec_rounds {
        let (time, result) = timed(run_true(ours, session)).await;
        result?;
        session_exec.push(time);
        let (time, result) = timed(run_true(through, session)).await;
        result?;
        by_orchestrator.push(time);
        spawn.push(of(Command::new("true").stdin(Stdio::null()))?);
        nsenter.push(of(&mut rivals.nsenter(TRUE))?);
        if round % slow_every == 0 {
            if let Some(mut command) = rivals.runc_exec(TRUE) {
                runc.push(of(&mut command)?);
            }
            let (time, result) = timed(rivals.rest_exec(TRUE)).await;
            result?;
            rest.push(time);
            tokio::time::sleep(SETTLE).await;
            podman.push(of(&mut rivals.podman_exec(TRUE))?);
            tokio::time::sleep(SETTLE).await;
        }
    }
    Ok(vec![
        session_exec,
        by_orchestrator,
        spawn,
        nsenter,
        runc,
        rest,
        podman,
    ])
}

/// Concurrent clients in one session: execs per second, and the latency of each.
#[derive(Clone, Debug)]
pub(crate) struct Parallel {
    pub(crate) clients: usize,
    pub(crate) per_second: f64,
    pub(crate) samples: Samples,
}

/// Uses a session without a CPU quota: with one CPU, the kernel would throttle it in every period.
pub(crate) async fn in_parallel(plan: &Plan, ours: &Ours) -> Result<Parallel> {
    let mut request = cynode_tests::session();
    request.limits = request.limits.map(|limits| LimitsRequest {
        cpus: std::thread::available_parallelism()
            .ok()
            .map(|cores| cores.get() as f64),
        ..limits
    });
    let session = ours.create(&request).await?;
    run_true(&ours.client, session).await?;
    let each = plan.exec_rounds.div_ceil(4);
    let started = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let client = ours.client.clone();
        clients.spawn(async move {
            let mut times = Vec::new();
            for _ in 0..each {
                let (time, result) = timed(client.exec(session, &exec(["true"]))).await;
                ensure!(result?.exit.exit_code == Some(0), "true failed");
                times.push(time);
            }
            Ok(times)
        });
    }
    let mut samples = Samples::new("session exec, 20 clients at once");
    while let Some(times) = clients.join_next().await {
        for time in times?? {
            samples.push(time);
        }
    }
    let per_second = samples.len() as f64 / started.elapsed().as_secs_f64();
    ours.end(session).await?;
    Ok(Parallel {
        clients: CLIENTS,
        per_second,
        samples,
    })
}
