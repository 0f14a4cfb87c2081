//! `up`: starts the roles as processes of their own, watches them, and ends with them.
//!
//! Invariants: one `up` per state directory; `endpoints.json` is there only while everything is ready; a plain SIGTERM
//! ends the worker and keeps the sandboxes, a shutdown asked of the worker (`down`) ends this process too.

mod detach;
mod logs;
mod supervisor;

use std::{ffi::OsString, net::TcpListener, process::ExitCode, time::Duration};

use crate::{
    cli::{Format, Globals, Settings, Up},
    failure::{Failure, USAGE},
    output, roles,
    state::{Endpoints, Lock, Locked, StateDir},
};

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
    // What a killed predecessor left.
    state.remove_endpoints();
    let settings = with_fixed_port(globals, args.settings)?;
    let config = roles::worker_config(globals, &settings)?;
    let url = roles::worker_url(&config);
    if args.detach {
        drop(lock);
        let endpoints = detach::run(globals, &settings, &state).await?;
        announce(globals, &endpoints)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut arguments = vec!["worker".into(), "--parent".into(), std::process::id().to_string().into()];
    arguments.extend(common_arguments(globals, &state, &settings)?);
    let role = supervisor::Role { name: "worker", program: std::env::current_exe()?, arguments, url };
    let result = supervisor::run(role, &state, !args.background).await;
    state.remove_endpoints();
    drop(lock);
    result
}

async fn acquire(state: &StateDir) -> Result<Locked, Failure> {
    let mut locked = Lock::acquire(state)?;
    // Somebody who only asks holds it for a moment.
    for _ in 0..5 {
        if matches!(locked, Locked::Ours(_)) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(40)).await;
        locked = Lock::acquire(state)?;
    }
    Ok(locked)
}

fn already_running(globals: &Globals, args: &Up, state: &StateDir, pid: Option<u32>) -> Result<ExitCode, Failure> {
    let pid = pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
    if !args.detach {
        return Err(
            Failure::new(USAGE, "already_running", format!("CyNode is already running here, pid {pid}")).remedy("Use it, or stop it with 'cynode down'.")
        );
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
        Format::Table => output::line(endpoints.api.as_ref().or(endpoints.worker.as_ref()).map_or("", String::as_str))?,
    }
    Ok(())
}

/// Port 0 means any free one. It is chosen here, so that a restarted worker keeps its address.
fn with_fixed_port(globals: &Globals, mut settings: Settings) -> Result<Settings, Failure> {
    let listen = roles::worker_config(globals, &settings)?.listen;
    if listen.port() == 0 {
        settings.worker_listen = Some(TcpListener::bind(listen)?.local_addr()?.to_string());
    }
    Ok(settings)
}

/// The flags that give a child the same view of the world.
fn common_arguments(globals: &Globals, state: &StateDir, settings: &Settings) -> Result<Vec<OsString>, Failure> {
    let mut arguments = vec!["--state-dir".into(), state.path().into()];
    if let Some(config) = &globals.config {
        arguments.extend(["--config".into(), std::path::absolute(config)?.into()]);
    }
    for (key, value) in settings.overrides() {
        arguments.extend(["--set".into(), format!("{key}={value}").into()]);
    }
    Ok(arguments)
}
