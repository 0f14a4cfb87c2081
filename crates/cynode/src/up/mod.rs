//! `up`: starts the roles as processes of their own, watches them, and ends with them.
//!
//! Invariants: one `up` per state directory; `endpoints.json` is there only while everything is ready; a plain SIGTERM
//! ends the worker and keeps the sandboxes, a shutdown asked of the worker (`down`) ends this process too; no role outlives it.

mod child;
mod detach;
mod logs;
mod role;
mod stack;
mod supervisor;

use std::{process::ExitCode, time::Duration};

use tokio::time::{Instant, sleep};

use crate::{
    cli::{Format, Globals, Up},
    failure::{Failure, USAGE},
    output,
    state::{Endpoints, Lock, Locked, StateDir},
};

pub use stack::{REGISTRATION_KEY, Stack};

/// How long roles of an `up` that was killed may take to end.
const PREDECESSORS: Duration = Duration::from_secs(30);

pub async fn run(globals: &Globals, args: Up) -> Result<ExitCode, Failure> {
    if args.background {
        // A session of its own: the terminal's signals and its closing don't reach us.
        rustix::process::setsid().map_err(std::io::Error::from)?;
    }
    let state = StateDir::new(globals)?;
    state.create()?;
    let lock = match acquire(&state).await? {
        Locked::Ours(lock) => lock,
        Locked::Theirs(pid) => return already_running(globals, &args, &state, pid),
    };
    state.check_restored()?;
    // What a killed predecessor left.
    state.remove_endpoints();
    let stack = Stack::plan(globals, args.settings, args.worker_only)?;
    if args.detach {
        drop(lock);
        let endpoints = detach::run(globals, &stack.settings, args.worker_only, &state).await?;
        announce(globals, &endpoints)?;
        return Ok(ExitCode::SUCCESS);
    }
    predecessors(&state).await?;
    let result = supervisor::run(
        stack.roles(globals, &state)?,
        &stack.endpoints(),
        &state,
        !args.background,
    )
    .await;
    drop(lock);
    result
}

/// The lock of `up`, which commands that only ask hold for a moment.
pub async fn acquire(state: &StateDir) -> Result<Locked, Failure> {
    let mut locked = Lock::acquire(state)?;
    for _ in 0..5 {
        if matches!(locked, Locked::Ours(_)) {
            break;
        }
        sleep(Duration::from_millis(40)).await;
        locked = Lock::acquire(state)?;
    }
    Ok(locked)
}

/// Roles end with their `up`, however that ends, but not in the same moment: their addresses are theirs until then.
async fn predecessors(state: &StateDir) -> Result<(), Failure> {
    let deadline = Instant::now() + PREDECESSORS;
    while (Lock::worker_runs(state)? || Lock::orchestrator_runs(state)?)
        && Instant::now() < deadline
    {
        sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

fn already_running(
    globals: &Globals,
    args: &Up,
    state: &StateDir,
    pid: Option<u32>,
) -> Result<ExitCode, Failure> {
    let pid = pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
    if !args.detach {
        return Err(Failure::new(
            USAGE,
            "already_running",
            format!("CyNode is already running here, pid {pid}"),
        )
        .remedy("Use it, or stop it with 'cynode down'."));
    }
    output::note(&format!("CyNode is already running, pid {pid}"));
    match state.endpoints()? {
        Some(endpoints) => announce(globals, &endpoints)?,
        None => output::note("It is not ready yet: see 'cynode status'."),
    }
    Ok(ExitCode::SUCCESS)
}

fn announce(globals: &Globals, endpoints: &Endpoints) -> Result<(), Failure> {
    match globals.output {
        Format::Json => output::json(endpoints)?,
        Format::Table => output::line(
            endpoints
                .api
                .as_ref()
                .or(endpoints.worker.as_ref())
                .map_or("", String::as_str),
        )?,
    }
    Ok(())
}
