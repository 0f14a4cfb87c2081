//! `up`: starts the roles as child processes, supervises them, and ends with them.
//!
//! Invariants: one `up` per state directory; `endpoints.json` exists only while all roles are
//! ready; SIGTERM ends the roles and keeps the sandboxes; a shutdown of the worker over its API
//! (`down`) ends this process too; no role outlives it.

mod child;
mod detach;
mod logs;
mod role;
mod stack;
mod supervisor;

use std::{process::ExitCode, time::Duration};

use tokio::time::{Instant, sleep};

use crate::{
    cli::{Globals, OutputFormat, Up},
    failure::{Failure, USAGE},
    output,
    state::{Endpoints, Lock, LockState, StateDir},
};

pub use stack::{REGISTRATION_KEY, Stack};

/// How long to wait for the roles of a killed `up`.
const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(30);

pub async fn run(globals: &Globals, args: Up) -> Result<ExitCode, Failure> {
    if args.background {
        // A new session: signals and the hangup of the terminal don't reach this process.
        rustix::process::setsid().map_err(std::io::Error::from)?;
    }
    let state = StateDir::new(globals)?;
    state.create()?;
    let lock = match acquire(&state).await? {
        LockState::Acquired(lock) => lock,
        LockState::HeldBy(pid) => return already_running(globals, &args, &state, pid),
    };
    state.check_restored()?;
    // A killed predecessor may have left the file.
    state.remove_endpoints();
    let stack = Stack::plan(globals, args.settings, args.worker_only)?;
    if args.detach {
        drop(lock);
        let endpoints = detach::run(globals, &stack.settings, args.worker_only, &state).await?;
        announce(globals, &endpoints)?;
        return Ok(ExitCode::SUCCESS);
    }
    wait_for_predecessors(&state).await?;
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

/// Acquires the lock of `up`. Retries, because queries for its holder take it for a moment.
pub async fn acquire(state: &StateDir) -> Result<LockState, Failure> {
    let mut locked = Lock::acquire(state)?;
    for _ in 0..5 {
        if matches!(locked, LockState::Acquired(_)) {
            break;
        }
        sleep(Duration::from_millis(40)).await;
        locked = Lock::acquire(state)?;
    }
    Ok(locked)
}

/// Waits for the roles of a killed `up`, which end shortly after it: they still hold their
/// addresses.
async fn wait_for_predecessors(state: &StateDir) -> Result<(), Failure> {
    let deadline = Instant::now() + PREDECESSOR_TIMEOUT;
    while (Lock::worker_runs(state)? || Lock::orchestrator_runs(state)? || Lock::git_runs(state)?)
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
        .remedy("Use the running one, or stop it with 'cynode down'."));
    }
    output::message(&format!("CyNode is already running, pid {pid}"));
    match state.endpoints()? {
        Some(endpoints) => announce(globals, &endpoints)?,
        None => output::message("CyNode is not ready yet; see 'cynode status'."),
    }
    Ok(ExitCode::SUCCESS)
}

fn announce(globals: &Globals, endpoints: &Endpoints) -> Result<(), Failure> {
    match globals.output {
        OutputFormat::Json => output::json(endpoints)?,
        OutputFormat::Table => output::line(
            endpoints
                .api
                .as_ref()
                .or(endpoints.worker.as_ref())
                .map_or("", String::as_str),
        )?,
    }
    Ok(())
}
