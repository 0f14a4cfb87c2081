//! The one place where the binary meets the roles' own crates.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    process::ExitCode,
};

use cynode_service::listen::ListenError;
use rustix::{
    fs::Mode,
    process::{Pid, Signal, getppid, set_parent_process_death_signal},
};

use crate::{
    cli::{Globals, RoleArgs, Section, Settings},
    failure::{Failure, USAGE},
    postgres,
    state::{Lock, Locked, StateDir},
};

/// The worker's configuration, read whole before anything starts.
pub fn worker_config(
    globals: &Globals,
    settings: &Settings,
) -> Result<cynode_worker::Config, Failure> {
    let state = StateDir::new(globals)?;
    cynode_worker::Config::load(
        globals.config.as_deref(),
        Some(state.path().to_owned()),
        &settings.overrides(Section::Worker),
    )
    .map_err(|error| bad_config(&error, Section::Worker))
}

/// The orchestrator's, likewise.
pub fn orchestrator_config(
    globals: &Globals,
    settings: &Settings,
) -> Result<cynode_orchestrator::Config, Failure> {
    let state = StateDir::new(globals)?;
    cynode_orchestrator::Config::load(
        globals.config.as_deref(),
        state.path(),
        std::env::vars(),
        settings.overrides(Section::Orchestrator),
    )
    .map_err(|error| bad_config(&error, Section::Orchestrator))
}

fn bad_config(error: &dyn std::error::Error, section: Section) -> Failure {
    let remedy = format!(
        "Correct the configuration: file, then CYNODE_{}_*, then flags.",
        section.name().to_uppercase()
    );
    Failure::new(USAGE, "config", chain(error)).remedy(remedy)
}

/// The worker's address for those on this machine.
pub fn worker_url(config: &cynode_worker::Config) -> String {
    local_url(
        config.listen,
        config.tls.cert.is_some(),
        config.tls.name.as_deref(),
    )
}

/// The user API's, likewise.
pub fn api_url(config: &cynode_orchestrator::Config) -> String {
    local_url(
        config.listen,
        config.tls.cert.is_some(),
        config.tls.name.as_deref(),
    )
}

/// The control plane's, likewise.
pub fn control_url(config: &cynode_orchestrator::Config) -> String {
    local_url(
        config.control_listen,
        config.tls.cert.is_some(),
        config.tls.name.as_deref(),
    )
}

fn local_url(mut address: SocketAddr, tls: bool, name: Option<&str>) -> String {
    if let (true, Some(name)) = (tls, name) {
        return format!("https://{name}:{}", address.port());
    }
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() {
            Ipv4Addr::LOCALHOST.into()
        } else {
            Ipv6Addr::LOCALHOST.into()
        });
    }
    format!("{}://{address}", if tls { "https" } else { "http" })
}

const DOCTOR: &str = "Run 'cynode doctor' to see what this machine lacks.";

/// The worker role, until it is told to stop.
pub async fn run_worker(globals: &Globals, args: RoleArgs) -> Result<ExitCode, Failure> {
    check_holder(&StateDir::new(globals)?, "worker")?;
    if let Some(parent) = args.parent {
        end_with(parent, Signal::TERM)?;
    }
    let config = worker_config(globals, &args.settings)?;
    cynode_service::telemetry::init();
    enter(&config)
        .await
        .map_err(|error| Failure::internal(error).remedy(DOCTOR))?;
    match cynode_worker::run(config).await {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(cynode_worker::Error::Listen(error)) if !matches!(error, ListenError::Bind { .. }) => {
            Err(Failure::new(USAGE, "config", chain(&error)))
        }
        Err(error) => Err(Failure::internal(chain(&error)).remedy(DOCTOR)),
    }
}

/// The orchestrator role, until it is told to stop.
pub async fn run_orchestrator(globals: &Globals, args: RoleArgs) -> Result<ExitCode, Failure> {
    check_holder(&StateDir::new(globals)?, "orchestrator")?;
    if let Some(parent) = args.parent {
        end_with(parent, Signal::TERM)?;
    }
    let config = orchestrator_config(globals, &args.settings)?;
    cynode_service::telemetry::init();
    // Others may get through the state directory: PostgreSQL's user does.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let _runs = Lock::mark_orchestrator(&StateDir::new(globals)?)?;
    match cynode_orchestrator::run(config).await {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(cynode_orchestrator::Error::Listen(error))
            if !matches!(error, ListenError::Bind { .. }) =>
        {
            Err(Failure::new(USAGE, "config", chain(&error)))
        }
        Err(error @ cynode_orchestrator::Error::NoDatabase) => {
            Err(Failure::new(USAGE, "config", chain(&error)))
        }
        Err(error) => Err(Failure::internal(chain(&error))),
    }
}

/// The private PostgreSQL's role: this process becomes the server.
pub fn run_postgres(globals: &Globals, parent: Option<i32>) -> Result<ExitCode, Failure> {
    let state = StateDir::new(globals)?;
    // Held until this process becomes the server: preparing one ends whatever works in the data directory.
    let _unsupervised = match check_holder(&state, "postgres")? {
        Holder::Supervisor => None,
        Holder::Nobody => Some(alone(&state)?),
    };
    postgres::run(&state, parent).map(|never| match never {})
}

/// Who holds the state directory of a role that may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The parent of this process.
    Supervisor,
    Nobody,
}

/// Refuses a role that somebody starts by hand while `up` holds the state directory: it would take away the database or the
/// addresses of the running one. The roles that `up` starts are known by their parent, which no other process has.
pub fn check_holder(state: &StateDir, role: &str) -> Result<Holder, Failure> {
    match Lock::holder(state)? {
        None => Ok(Holder::Nobody),
        Some(Locked::Theirs(Some(pid)))
            if getppid().is_some_and(|parent| u32::try_from(parent.as_raw_pid()) == Ok(pid)) =>
        {
            Ok(Holder::Supervisor)
        }
        Some(Locked::Ours(_)) => Err(Failure::internal(
            "asking who holds the state directory took it",
        )),
        Some(Locked::Theirs(pid)) => Err(is_held(state, role, pid)),
    }
}

fn is_held(state: &StateDir, role: &str, pid: Option<u32>) -> Failure {
    let pid = pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
    let what = format!(
        "{} belongs to a running CyNode, pid {pid}, which starts its {role} itself",
        state.path().display()
    );
    Failure::new(USAGE, "already_running", what).remedy("See 'cynode status'. Stop it with 'cynode down' first, or choose another directory with --state-dir.")
}

/// The state directory for a server without a supervisor, if none is running there.
fn alone(state: &StateDir) -> Result<Lock, Failure> {
    let lock = match Lock::acquire(state)? {
        Locked::Ours(lock) => lock,
        Locked::Theirs(pid) => return Err(is_held(state, "postgres", pid)),
    };
    match postgres::Server::of(state).postmaster() {
        None => Ok(lock),
        Some(pid) => Err(Failure::new(
            USAGE,
            "already_running",
            format!(
                "PostgreSQL is already running on {}, pid {pid}",
                state.path().display()
            ),
        )
        .remedy("Use it, or stop it with 'cynode down'.")),
    }
}

/// Moves an ordinary user's process to where workers of that user live, by running this program anew. For root nothing
/// changes.
pub async fn enter(config: &cynode_worker::Config) -> Result<(), String> {
    cynode_worker::enter_user_namespace(config)
        .await
        .map_err(|error| chain(&error))
}

/// Removes what a worker left behind that is no longer running. Says what it did.
pub async fn cleanup(config: &cynode_worker::Config) -> Result<String, Failure> {
    let report = cynode_worker::cleanup(config).await.map_err(|error| {
        Failure::internal(chain(&error)).remedy("Run 'cynode doctor', then 'cynode down' again.")
    })?;
    Ok(report.to_string())
}

/// What this machine can do, as the JSON of the worker's report.
pub async fn examine(config: &cynode_worker::Config) -> Result<serde_json::Value, Failure> {
    let report = cynode_worker::host::examine(config).await;
    serde_json::to_value(report).map_err(|error| Failure::internal(error.to_string()))
}

/// Asks the kernel for this signal when the supervisor is gone, so that a killed `up` leaves no role that nobody watches.
/// Sandboxes go on: the next worker adopts them.
pub fn end_with(parent: i32, signal: Signal) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(signal)).map_err(std::io::Error::from)?;
    if getppid().map(Pid::as_raw_pid) == Some(parent) {
        Ok(())
    } else {
        Err(Failure::internal(
            "the supervisor ended before its role began",
        ))
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    cynode_service::telemetry::Chain(error).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_starts_alone_or_as_a_child_of_the_holder() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let globals = Globals {
            output: crate::cli::Format::Table,
            state_dir: Some(directory.path().to_owned()),
            config: None,
            ca: None,
        };
        let state = StateDir::new(&globals).expect("a path");
        assert_eq!(check_holder(&state, "worker").ok(), Some(Holder::Nobody));
        // This test's own process holds it, and so is not its child.
        let Locked::Ours(lock) = Lock::acquire(&state).expect("lock") else {
            panic!("taken")
        };
        let refused = check_holder(&state, "worker").expect_err("held by another");
        assert_eq!(refused.exit, USAGE);
        assert!(
            refused
                .message()
                .contains(&format!("pid {}", std::process::id()))
                && refused.remedy_text().is_some(),
            "{refused:?}"
        );
        assert!(alone(&state).is_err());
        let parent = getppid().expect("a parent").as_raw_pid().to_string();
        fs_err::write(directory.path().join("up.lock"), parent).expect("written");
        assert_eq!(
            check_holder(&state, "worker").ok(),
            Some(Holder::Supervisor)
        );
        drop(lock);
        assert!(alone(&state).is_ok());
    }
}
