//! `status`: does it run, and how is it?

use std::process::ExitCode;

use cynode_api::SessionState;
use cynode_client::{Readiness, SessionFilter};
use serde::Serialize;

use crate::{
    cli::{Format, Globals},
    connect,
    failure::{Failure, UNREACHABLE},
    output::{self, Colour},
    state::{Lock, Locked, StateDir},
};

#[derive(Debug, Serialize)]
struct Status {
    version: &'static str,
    state_dir: String,
    ready: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Of `cynode up`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    roles: Vec<RoleStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sessions: Option<Sessions>,
}

#[derive(Debug, Serialize)]
struct RoleStatus {
    role: &'static str,
    url: String,
    ready: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Debug, Default, Serialize)]
struct Sessions {
    creating: usize,
    running: usize,
    other: usize,
    running_execs: u64,
}

pub async fn run(globals: &Globals) -> Result<ExitCode, Failure> {
    let status = look(globals).await?;
    match globals.output {
        Format::Json => output::json(&status)?,
        Format::Table => print(&status)?,
    }
    Ok(if status.ready { ExitCode::SUCCESS } else { ExitCode::from(UNREACHABLE) })
}

async fn look(globals: &Globals) -> Result<Status, Failure> {
    let state = StateDir::new(globals)?;
    let pid = match Lock::holder(&state)? {
        Some(Locked::Theirs(pid)) => pid,
        _ => None,
    };
    let mut status = Status {
        version: env!("CARGO_PKG_VERSION"),
        state_dir: state.path().display().to_string(),
        ready: false,
        reason: None,
        pid,
        roles: Vec::new(),
        sessions: None,
    };
    let client = match connect::client(globals) {
        Ok(client) => client,
        Err(failure) if failure.exit == UNREACHABLE => {
            status.reason = Some(if pid.is_some() { "it is starting" } else { "it is not running; start it with 'cynode up'" }.to_owned());
            return Ok(status);
        }
        Err(failure) => return Err(failure),
    };
    let reason = match client.readyz().await {
        Ok(Readiness::Ready) => None,
        Ok(Readiness::NotReady(reason)) => Some(reason),
        Err(error) => Some(error.chain()),
    };
    status.ready = reason.is_none();
    status.reason.clone_from(&reason);
    status.roles.push(RoleStatus { role: "worker", url: client.base().to_owned(), ready: reason.is_none(), reason });
    // A worker that is not ready may still know its sessions; one that is, must.
    match client.list_sessions(&SessionFilter::default()).await {
        Ok(list) => {
            let mut sessions = Sessions::default();
            for session in list {
                match session.state {
                    SessionState::Creating => sessions.creating += 1,
                    SessionState::Running => sessions.running += 1,
                    _ => sessions.other += 1,
                }
                sessions.running_execs += u64::from(session.running_execs);
            }
            status.sessions = Some(sessions);
        }
        Err(error) if status.ready => return Err(error.into()),
        Err(_) => {}
    }
    Ok(status)
}

fn print(status: &Status) -> Result<(), Failure> {
    let word = if status.ready { output::paint("ready", Colour::Green) } else { output::paint("not ready", Colour::Red) };
    output::line(&format!("CyNode {}: {word}", status.version))?;
    let say = |name: &str, value: &str| output::line(&format!("  {name:<10}{}", crate::sanitize::line(value)));
    if let Some(reason) = &status.reason {
        say("reason", reason)?;
    }
    for role in &status.roles {
        say(role.role, &role.url)?;
    }
    if let Some(pid) = status.pid {
        say("pid", &pid.to_string())?;
    }
    say("state", &status.state_dir)?;
    if let Some(sessions) = &status.sessions {
        say(
            "sessions",
            &format!("{} running, {} creating, {} other; {} commands running", sessions.running, sessions.creating, sessions.other, sessions.running_execs),
        )?;
    }
    Ok(())
}
