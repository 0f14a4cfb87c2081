//! `status`: shows whether CyNode runs and is ready.

use std::process::ExitCode;

use cynode_api::SessionState;
use cynode_client::{Error, Readiness, SessionClient, SessionFilter, Surface, UserClient};
use serde::Serialize;

use crate::{
    cli::{Globals, OutputFormat},
    connect,
    failure::{Failure, UNREACHABLE},
    output::{self, Colour},
    postgres,
    state::{Endpoints, Lock, LockState, StateDir},
};

#[derive(Debug, Serialize)]
struct Status {
    version: &'static str,
    state_dir: String,
    ready: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// The process id of `cynode up`.
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
    let status = collect(globals).await?;
    match globals.output {
        OutputFormat::Json => output::json(&status)?,
        OutputFormat::Table => print(&status)?,
    }
    Ok(if status.ready {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(UNREACHABLE)
    })
}

async fn collect(globals: &Globals) -> Result<Status, Failure> {
    let state = StateDir::new(globals)?;
    let pid = match Lock::holder(&state)? {
        Some(LockState::HeldBy(pid)) => pid,
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
    let starting = if pid.is_some() {
        "starting"
    } else {
        "not running; start it with 'cynode up'"
    };
    if !connect::is_url_set() {
        let Some(endpoints) = state.endpoints()?.filter(|_| pid.is_some()) else {
            status.reason = Some(starting.to_owned());
            return Ok(status);
        };
        status.roles = roles(globals, &endpoints, &state).await?;
    }
    let client = match connect::client(globals).await {
        Ok(client) => client,
        Err(failure) if failure.exit == UNREACHABLE => {
            status.reason = Some(failure.message().to_owned());
            return Ok(status);
        }
        Err(failure) => return Err(failure),
    };
    if status.roles.is_empty() {
        let role = match client.surface() {
            Surface::User => "orchestrator",
            Surface::Worker => "worker",
        };
        status
            .roles
            .push(role_status(role, client.base(), client.readyz().await));
    }
    status.reason = status
        .roles
        .iter()
        .find_map(|role| Some(format!("{}: {}", role.role, role.reason.as_ref()?)));
    status.ready = status.reason.is_none();
    // Only a ready server must be able to list its sessions.
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

/// The roles that `up` runs on this machine.
async fn roles(
    globals: &Globals,
    endpoints: &Endpoints,
    state: &StateDir,
) -> Result<Vec<RoleStatus>, Failure> {
    let mut roles = Vec::new();
    let trust = connect::trust(globals, endpoints.ca.as_deref());
    if let (Some(api), Some(token)) = (&endpoints.api, state.token("admin.token")?) {
        roles.push(role_status(
            "orchestrator",
            api,
            UserClient::trusting(api, &token, trust)?.readyz().await,
        ));
    }
    if let (Some(worker), Some(token)) = (&endpoints.worker, state.token("worker.token")?) {
        roles.push(role_status(
            "worker",
            worker,
            SessionClient::trusting(worker, &token, Surface::Worker, trust)?
                .readyz()
                .await,
        ));
    }
    if let Some(git) = &endpoints.git {
        // Readiness needs no token.
        let client = SessionClient::trusting(git, "", Surface::Worker, trust)?;
        roles.push(role_status("git", git, client.readyz().await));
    }
    let server = postgres::Server::new(state);
    if endpoints.api.is_some() && server.was_started() {
        let reason = server
            .running()
            .is_none()
            .then(|| "not accepting connections".to_owned());
        roles.push(RoleStatus {
            role: "postgres",
            url: server.socket_directory().display().to_string(),
            ready: reason.is_none(),
            reason,
        });
    }
    Ok(roles)
}

fn role_status(role: &'static str, url: &str, readiness: Result<Readiness, Error>) -> RoleStatus {
    let reason = match readiness {
        Ok(Readiness::Ready) => None,
        Ok(Readiness::NotReady(reason)) => Some(reason),
        Err(error) => Some(error.chain()),
    };
    RoleStatus {
        role,
        url: url.to_owned(),
        ready: reason.is_none(),
        reason,
    }
}

fn print(status: &Status) -> Result<(), Failure> {
    let (word, colour) = if status.ready {
        ("ready", Colour::Green)
    } else {
        ("not ready", Colour::Red)
    };
    output::line_with_colored_end(&format!("CyNode {}: ", status.version), word, colour)?;
    let print_field = |name: &str, value: &str| {
        output::line(&format!("  {name:<14}{}", crate::sanitize::line(value)))
    };
    if let Some(reason) = &status.reason {
        print_field("reason", reason)?;
    }
    for role in &status.roles {
        let word = role
            .reason
            .as_ref()
            .map(|reason| format!(": {reason}"))
            .unwrap_or_default();
        print_field(role.role, &format!("{}{word}", role.url))?;
    }
    if let Some(pid) = status.pid {
        print_field("pid", &pid.to_string())?;
    }
    print_field("state", &status.state_dir)?;
    if let Some(sessions) = &status.sessions {
        print_field(
            "sessions",
            &format!(
                "{} running, {} creating, {} other; {} commands running",
                sessions.running, sessions.creating, sessions.other, sessions.running_execs
            ),
        )?;
    }
    Ok(())
}
