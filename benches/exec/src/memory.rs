//! The memory of idle sessions.

use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::{Plan, ours::Ours};

/// Sessions created concurrently.
const AT_ONCE: usize = 5;
/// Time for allocators and caches to settle.
const REST: Duration = Duration::from_secs(3);

/// Memory in KiB with a number of idle sessions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    pub(crate) sessions: usize,
    /// PSS of the agents.
    pub(crate) agents: u64,
    /// PSS of Podman's monitor processes.
    pub(crate) monitors: u64,
    pub(crate) worker: u64,
    /// Growth of the worker since it had no session.
    pub(crate) worker_growth: i64,
}

pub(crate) async fn measure(plan: &Plan, ours: &Ours) -> Result<Vec<Idle>> {
    // A first session makes the worker allocate its fixed buffers and connections.
    let first = ours.session().await?;
    ours.end(first).await?;
    tokio::time::sleep(REST).await;
    let before = resident(ours.pid())?;
    let mut sessions = Vec::new();
    let mut rows = Vec::new();
    for wanted in plan.idle_sessions {
        while sessions.len() < wanted {
            let mut creating = tokio::task::JoinSet::new();
            for _ in 0..AT_ONCE.min(wanted - sessions.len()) {
                let (client, request) = (ours.client.clone(), cynode_tests::session());
                creating.spawn(async move { client.create_session(&request).await });
            }
            for session in creating.join_all().await {
                sessions.push(session?.session_id);
            }
        }
        tokio::time::sleep(REST).await;
        let (mut agents, mut monitors) = (0, 0);
        for session in &sessions {
            let pid = ours.sandbox(*session)?.pid;
            agents += proportional(pid)?;
            monitors += proportional(field(&format!("/proc/{pid}/status"), "PPid:")?)?;
        }
        let worker = resident(ours.pid())?;
        rows.push(Idle {
            sessions: sessions.len(),
            agents,
            monitors,
            worker,
            worker_growth: worker.cast_signed() - before.cast_signed(),
        });
    }
    Ok(rows)
}

fn field(path: &str, name: &str) -> Result<u64> {
    let text = fs_err::read_to_string(path)?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .with_context(|| format!("{path} has no {name}"))?;
    line.split_ascii_whitespace()
        .next()
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("{path}: {name} is no number"))
}

fn resident(pid: u32) -> Result<u64> {
    field(&format!("/proc/{pid}/status"), "VmRSS:")
}

fn proportional(pid: u64) -> Result<u64> {
    field(&format!("/proc/{pid}/smaps_rollup"), "Pss:")
}
