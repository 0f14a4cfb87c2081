//! `down`: stops CyNode and leaves nothing running.
//!
//! Only the worker can end its sandboxes in order, so `down` requests a shutdown over its API; `up`
//! and the other roles end with it. If the worker does not answer, `down` signals `up` and removes
//! the orphaned sandboxes itself.

use std::{process::ExitCode, time::Duration};

use cynode_client::{Error, Sandboxes, SessionClient, Surface};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::{
    cli::{Down, Globals, OutputFormat},
    connect,
    failure::{Failure, INTERNAL},
    output::{self, Progress},
    postgres, roles,
    state::{Lock, LockState, StateDir},
    up,
};

/// For ending all sandboxes.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_mins(2);
/// `up` waits 30 s for the worker and the orchestrator, and then for PostgreSQL.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(75);
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug, Serialize)]
struct DownReport {
    was_running: bool,
    sandboxes: Sandboxes,
    #[serde(skip_serializing_if = "Option::is_none")]
    cleanup: Option<String>,
}

pub async fn run(globals: &Globals, args: &Down) -> Result<ExitCode, Failure> {
    let state = StateDir::new(globals)?;
    let config = roles::worker_config(globals, &args.settings)?;
    // Files of sandboxes may belong to ids that only exist in the worker's user namespace. Without
    // it, everything else still works.
    if config.directory().exists()
        && let Err(error) = roles::enter_user_namespace(&config).await
    {
        output::message(&format!("cynode: {error}"));
    }
    let sandboxes = if args.keep_sessions {
        Sandboxes::Keep
    } else {
        Sandboxes::End
    };
    let progress = Progress::start("stopping CyNode");
    let supervised = is_up(&state)?;
    let worker_answered = request_shutdown(globals, &state, &config, sandboxes).await?;
    let mut clean = worker_answered;
    if worker_answered {
        progress.set_message(if args.keep_sessions {
            "the worker is stopping"
        } else {
            "the worker is ending its sandboxes"
        });
        clean = wait_until(SHUTDOWN_TIMEOUT, || {
            Ok(!is_up(&state)? && !Lock::worker_runs(&state)?)
        })
        .await?;
        if !clean {
            output::message("cynode: the worker did not stop in time");
        }
    }
    if is_up(&state)? {
        progress.set_message("stopping the supervisor");
        stop_up(&state).await?;
    }
    let found_orphans = end_orphaned_roles(&state).await?;
    state.remove_endpoints();
    let cleanup = match (clean, sandboxes) {
        (false, Sandboxes::End) => {
            progress.set_message("removing sandboxes");
            Some(roles::cleanup(&config).await?)
        }
        _ => None,
    };
    drop(progress);
    let was_running = supervised || worker_answered || found_orphans;
    match globals.output {
        OutputFormat::Json => output::json(&DownReport {
            was_running,
            sandboxes,
            cleanup,
        })?,
        OutputFormat::Table => {
            output::message(match (was_running, sandboxes) {
                (false, _) => "nothing was running",
                (true, Sandboxes::End) => "CyNode has stopped; its sandboxes have ended",
                (true, Sandboxes::Keep) => "CyNode has stopped; its sandboxes keep running",
            });
            if let Some(cleanup) = cleanup {
                output::message(&cleanup);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Requests a shutdown of the worker; false if it does not answer.
async fn request_shutdown(
    globals: &Globals,
    state: &StateDir,
    config: &cynode_worker::Config,
    sandboxes: Sandboxes,
) -> Result<bool, Failure> {
    // A worker that runs without `up` has no endpoints file.
    let endpoints = state.endpoints()?.unwrap_or_default();
    let url = endpoints
        .worker
        .unwrap_or_else(|| roles::worker_url(config));
    let Some(token) = state.token("worker.token")? else {
        return Ok(false);
    };
    let authority = endpoints.ca.as_deref().or(config.tls.ca.as_deref());
    let client = SessionClient::trusting(
        &url,
        &token,
        Surface::Worker,
        connect::trust(globals, authority),
    )?;
    match client.shutdown(sandboxes).await {
        Ok(()) => Ok(true),
        // No worker, another one's address, or one that fails: clean up without it.
        Err(Error::Unreachable { .. } | Error::Broken { .. }) => Ok(false),
        Err(error) if error.status() == Some(401) => Ok(false),
        Err(error) => {
            output::message(&format!(
                "cynode: the worker refused to shut down: {}",
                error.chain()
            ));
            Ok(false)
        }
    }
}

/// Waits for the roles of a killed `up`, which end without a signal, and ends its PostgreSQL.
/// Returns whether there were any.
async fn end_orphaned_roles(state: &StateDir) -> Result<bool, Failure> {
    let orchestrator = Lock::orchestrator_runs(state)?;
    if orchestrator && !wait_until(DRAIN_TIMEOUT, || Ok(!Lock::orchestrator_runs(state)?)).await? {
        output::message(
            "cynode: an orchestrator that 'cynode up' did not start runs on this state directory",
        );
    }
    let git = Lock::git_runs(state)?;
    if git && !wait_until(DRAIN_TIMEOUT, || Ok(!Lock::git_runs(state)?)).await? {
        output::message(
            "cynode: a git role that 'cynode up' did not start runs on this state directory",
        );
    }
    let server = postgres::Server::new(state);
    if !server.has_directory() {
        return Ok(orchestrator || git);
    }
    // The lock keeps others from starting the server.
    match up::acquire(state).await? {
        LockState::Acquired(lock) => {
            let ended = server.end_leftovers()?;
            drop(lock);
            Ok(ended || orchestrator || git)
        }
        LockState::HeldBy(_) => Err(Failure::new(
            INTERNAL,
            "still_running",
            "'cynode up' was started while stopping",
        )),
    }
}

fn is_up(state: &StateDir) -> Result<bool, Failure> {
    Ok(Lock::holder(state)?.is_some())
}

async fn stop_up(state: &StateDir) -> Result<(), Failure> {
    for (signal, timeout) in [(Signal::TERM, DRAIN_TIMEOUT), (Signal::KILL, KILL_TIMEOUT)] {
        // The id is only valid while the lock is held, so read it before each signal.
        let Some(LockState::HeldBy(pid)) = Lock::holder(state)? else {
            return Ok(());
        };
        let pid = pid
            .and_then(|pid| i32::try_from(pid).ok())
            .and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| {
            Failure::internal(format!(
                "'cynode up' runs, but {}/up.lock has no readable process id",
                state.path().display()
            ))
        })?;
        match kill_process(pid, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(std::io::Error::from(error).into()),
        }
        if wait_until(timeout, || Ok(!is_up(state)?)).await? {
            return Ok(());
        }
    }
    Err(
        Failure::new(INTERNAL, "still_running", "'cynode up' does not exit")
            .remedy("Check the process list; the process may be stuck in the kernel."),
    )
}

async fn wait_until(
    timeout: Duration,
    condition: impl Fn() -> Result<bool, Failure>,
) -> Result<bool, Failure> {
    let deadline = Instant::now() + timeout;
    while !condition()? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(true)
}
