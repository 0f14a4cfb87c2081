//! `down`: stops CyNode and leaves nothing running.
//!
//! The worker is asked over its API, because only it can end its sandboxes in order; `up` and the other roles end with it. When it
//! does not answer, `up` is signalled and what the worker left is removed from here.

use std::{process::ExitCode, time::Duration};

use cynode_client::{Error, Sandboxes, Surface, WorkerClient};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::{
    cli::{Down, Format, Globals},
    connect,
    failure::{Failure, INTERNAL},
    output::{self, Progress},
    postgres, roles,
    state::{Lock, Locked, StateDir},
    up,
};

/// Ending many sandboxes takes a while.
const END: Duration = Duration::from_mins(2);
/// `up` itself waits 30 s for worker and orchestrator, and then for PostgreSQL.
const DRAIN: Duration = Duration::from_secs(75);
const POLL: Duration = Duration::from_millis(50);

#[derive(Debug, Serialize)]
struct Outcome {
    was_running: bool,
    sandboxes: Sandboxes,
    #[serde(skip_serializing_if = "Option::is_none")]
    cleanup: Option<String>,
}

pub async fn run(globals: &Globals, args: &Down) -> Result<ExitCode, Failure> {
    let state = StateDir::new(globals)?;
    let config = roles::worker_config(globals, &args.settings)?;
    // What sandboxes left may belong to ids that can only be touched from where the worker lives. The rest is done all the same.
    if config.directory().exists()
        && let Err(error) = roles::enter(&config).await
    {
        output::note(&format!("cynode: {error}"));
    }
    let sandboxes = if args.keep_sessions {
        Sandboxes::Keep
    } else {
        Sandboxes::End
    };
    let progress = Progress::start("stopping CyNode");
    let supervised = is_up(&state)?;
    let asked = ask_worker(globals, &state, &config, sandboxes).await?;
    let mut clean = asked;
    if asked {
        progress.say(if args.keep_sessions {
            "the worker is stopping"
        } else {
            "the worker is ending its sandboxes"
        });
        clean = wait_until(END, || Ok(!is_up(&state)? && !Lock::worker_runs(&state)?)).await?;
        if !clean {
            output::note("cynode: the worker did not stop in time");
        }
    }
    if is_up(&state)? {
        progress.say("stopping the supervisor");
        stop_up(&state).await?;
    }
    let left = end_roles(&state).await?;
    state.remove_endpoints();
    let cleanup = match (clean, sandboxes) {
        (false, Sandboxes::End) => {
            progress.say("removing sandboxes");
            Some(roles::cleanup(&config).await?)
        }
        _ => None,
    };
    drop(progress);
    let was_running = supervised || asked || left;
    match globals.output {
        Format::Json => output::json(&Outcome {
            was_running,
            sandboxes,
            cleanup,
        })?,
        Format::Table => {
            output::note(match (was_running, sandboxes) {
                (false, _) => "nothing was running",
                (true, Sandboxes::End) => "CyNode has stopped; its sandboxes have ended",
                (true, Sandboxes::Keep) => "CyNode has stopped; its sandboxes keep running",
            });
            if let Some(cleanup) = cleanup {
                output::note(&cleanup);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks the worker to stop; false when it does not answer.
async fn ask_worker(
    globals: &Globals,
    state: &StateDir,
    config: &cynode_worker::Config,
    sandboxes: Sandboxes,
) -> Result<bool, Failure> {
    // A worker can run without `up`; then there are no endpoints.
    let endpoints = state.endpoints()?.unwrap_or_default();
    let url = endpoints
        .worker
        .unwrap_or_else(|| roles::worker_url(config));
    let Some(token) = state.token("worker.token")? else {
        return Ok(false);
    };
    let authority = endpoints.ca.as_deref().or(config.tls.ca.as_deref());
    let client = WorkerClient::trusting(
        &url,
        &token,
        Surface::Worker,
        connect::trust(globals, authority),
    )?;
    match client.shutdown(sandboxes).await {
        Ok(()) => Ok(true),
        // Nobody there, somebody else's, or one that can't: the offline way does it.
        Err(Error::Unreachable { .. } | Error::Broken { .. }) => Ok(false),
        Err(error) if error.status() == Some(401) => Ok(false),
        Err(error) => {
            output::note(&format!(
                "cynode: the worker refused to stop by itself: {}",
                error.chain()
            ));
            Ok(false)
        }
    }
}

/// Waits for the roles of an `up` that was killed, which end by themselves, and ends the PostgreSQL of one. Says whether there were any.
async fn end_roles(state: &StateDir) -> Result<bool, Failure> {
    let orchestrator = Lock::orchestrator_runs(state)?;
    if orchestrator && !wait_until(DRAIN, || Ok(!Lock::orchestrator_runs(state)?)).await? {
        output::note(
            "cynode: an orchestrator that this command did not start still runs on this state directory",
        );
    }
    let server = postgres::Server::of(state);
    if !server.has_directory() {
        return Ok(orchestrator);
    }
    // Nobody starts it meanwhile.
    match up::acquire(state).await? {
        Locked::Ours(lock) => {
            let ended = server.end_leftovers()?;
            drop(lock);
            Ok(ended || orchestrator)
        }
        Locked::Theirs(_) => Err(Failure::new(
            INTERNAL,
            "still_running",
            "'cynode up' was started meanwhile",
        )),
    }
}

fn is_up(state: &StateDir) -> Result<bool, Failure> {
    Ok(Lock::holder(state)?.is_some())
}

async fn stop_up(state: &StateDir) -> Result<(), Failure> {
    for (signal, patience) in [
        (Signal::TERM, DRAIN),
        (Signal::KILL, Duration::from_secs(5)),
    ] {
        // Read anew each time: while the lock is held, its holder is alive and this is its id.
        let Some(Locked::Theirs(pid)) = Lock::holder(state)? else {
            return Ok(());
        };
        let pid = pid
            .and_then(|pid| i32::try_from(pid).ok())
            .and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| {
            Failure::internal(format!(
                "'cynode up' runs, but its id can't be read from {}/up.lock",
                state.path().display()
            ))
        })?;
        match kill_process(pid, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(std::io::Error::from(error).into()),
        }
        if wait_until(patience, || Ok(!is_up(state)?)).await? {
            return Ok(());
        }
    }
    Err(
        Failure::new(INTERNAL, "still_running", "'cynode up' does not end")
            .remedy("See the process list; it may be stuck in the kernel."),
    )
}

async fn wait_until(
    patience: Duration,
    condition: impl Fn() -> Result<bool, Failure>,
) -> Result<bool, Failure> {
    let deadline = Instant::now() + patience;
    while !condition()? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        sleep(POLL).await;
    }
    Ok(true)
}
