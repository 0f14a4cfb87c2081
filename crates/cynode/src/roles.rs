//! The interface to the crates of the roles.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::fs::{DirBuilderExt as _, PermissionsExt},
    path::Path,
    process::ExitCode,
};

use cynode_service::listen::ListenError;
use rustix::{
    fs::Mode,
    process::{Pid, Signal, geteuid, getppid, set_parent_process_death_signal},
};

use crate::{
    cli::{EgressArgs, EgressKind, Globals, RoleArgs, Section, Settings},
    failure::{Failure, USAGE},
    postgres,
    state::{Lock, LockState, StateDir},
};

/// Reads the worker's configuration, completely, before anything starts.
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

/// Reads the orchestrator's configuration.
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

/// Reads the git egress role's configuration.
pub fn git_config(
    globals: &Globals,
    settings: &Settings,
) -> Result<cynode_egress::Config, Failure> {
    let state = StateDir::new(globals)?;
    cynode_egress::Config::load(
        globals.config.as_deref(),
        Some(state.path().to_owned()),
        &settings.overrides(Section::Egress),
    )
    .map_err(|error| bad_config(&error, Section::Egress))
}

fn bad_config(error: &dyn std::error::Error, section: Section) -> Failure {
    let remedy = format!(
        "Correct the configuration file, the CYNODE_{}_* variables or the flags.",
        section.name().to_uppercase()
    );
    Failure::new(USAGE, "config", chain(error)).remedy(remedy)
}

/// The worker's URL on this machine.
pub fn worker_url(config: &cynode_worker::Config) -> String {
    local_url(
        config.listen,
        config.tls.cert.is_some(),
        config.tls.name.as_deref(),
    )
}

/// The user API's URL on this machine.
pub fn api_url(config: &cynode_orchestrator::Config) -> String {
    local_url(
        config.listen,
        config.tls.cert.is_some(),
        config.tls.name.as_deref(),
    )
}

/// The URL for nodes on this machine.
pub fn control_url(config: &cynode_orchestrator::Config) -> String {
    local_url(
        config.control_listen,
        config.tls.cert.is_some(),
        config.tls.name.as_deref(),
    )
}

/// The git egress role's URL on this machine.
pub fn git_url(config: &cynode_egress::Config) -> String {
    local_url(
        config.listen,
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

const DOCTOR_REMEDY: &str = "Run 'cynode doctor' to check this machine.";

/// Runs the worker until it is stopped.
pub async fn run_worker(globals: &Globals, args: RoleArgs) -> Result<ExitCode, Failure> {
    check_holder(&StateDir::new(globals)?, "worker")?;
    if let Some(parent) = args.parent {
        end_with(parent, Signal::TERM)?;
    }
    let config = worker_config(globals, &args.settings)?;
    cynode_service::telemetry::init();
    enter_user_namespace(&config)
        .await
        .map_err(|error| Failure::internal(error).remedy(DOCTOR_REMEDY))?;
    match cynode_worker::run(config).await {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(cynode_worker::Error::Listen(error)) if !matches!(error, ListenError::Bind { .. }) => {
            Err(Failure::new(USAGE, "config", chain(&error)))
        }
        Err(error) => Err(Failure::internal(chain(&error)).remedy(DOCTOR_REMEDY)),
    }
}

/// Runs the orchestrator until it is stopped.
pub async fn run_orchestrator(globals: &Globals, args: RoleArgs) -> Result<ExitCode, Failure> {
    check_holder(&StateDir::new(globals)?, "orchestrator")?;
    if let Some(parent) = args.parent {
        end_with(parent, Signal::TERM)?;
    }
    let config = orchestrator_config(globals, &args.settings)?;
    cynode_service::telemetry::init();
    // PostgreSQL's user can traverse the state directory, so files must be private.
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

/// Runs an egress role until it is stopped. Not within a runtime: under root the role becomes
/// another user, which it can only on the single thread of its process.
pub fn run_egress(globals: &Globals, args: &EgressArgs) -> Result<ExitCode, Failure> {
    let EgressKind::Git = args.role;
    let state = StateDir::new(globals)?;
    check_holder(&state, "git role")?;
    if let Some(parent) = args.common.parent {
        end_with(parent, Signal::TERM)?;
    }
    let config = git_config(globals, &args.common.settings)?;
    cynode_service::telemetry::init();
    if geteuid().is_root() {
        make_traversable(state.path(), &config.directory())?;
    }
    match cynode_egress::run_git(config) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(cynode_egress::Error::Listen(error)) if !matches!(error, ListenError::Bind { .. }) => {
            Err(Failure::new(USAGE, "config", chain(&error)))
        }
        Err(error) => Err(Failure::internal(chain(&error)).remedy(DOCTOR_REMEDY)),
    }
}

/// Lets other users through to a directory below the state directory: under root the role is one of
/// them. They can't list what is above it.
fn make_traversable(state: &Path, directory: &Path) -> std::io::Result<()> {
    let Some(parent) = directory.parent().filter(|_| directory.starts_with(state)) else {
        return Ok(());
    };
    std::fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(parent)?;
    for above in parent
        .ancestors()
        .take_while(|above| above.starts_with(state))
    {
        let mode = fs_err::metadata(above)?.permissions().mode();
        fs_err::set_permissions(above, PermissionsExt::from_mode(mode | 0o011))?;
    }
    Ok(())
}

/// Runs the private PostgreSQL: this process becomes the server.
pub fn run_postgres(globals: &Globals, parent: Option<i32>) -> Result<ExitCode, Failure> {
    let state = StateDir::new(globals)?;
    // Held until this process becomes the server: starting one ends all processes in the data
    // directory.
    let _unsupervised = match check_holder(&state, "postgres")? {
        Holder::Supervisor => None,
        Holder::Nobody => Some(lock_unsupervised(&state)?),
    };
    postgres::run(&state, parent).map(|never| match never {})
}

/// The holder of the state directory of a role that may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The parent of this process.
    Supervisor,
    Nobody,
}

/// Refuses a role that is started by hand while `up` holds the state directory: it would conflict
/// with the running one. The roles of `up` are recognized by their parent process.
pub fn check_holder(state: &StateDir, role: &str) -> Result<Holder, Failure> {
    match Lock::holder(state)? {
        None => Ok(Holder::Nobody),
        Some(LockState::HeldBy(Some(pid)))
            if getppid().is_some_and(|parent| u32::try_from(parent.as_raw_pid()) == Ok(pid)) =>
        {
            Ok(Holder::Supervisor)
        }
        Some(LockState::Acquired(_)) => Err(Failure::internal(
            "a query for the holder of the state directory acquired it",
        )),
        Some(LockState::HeldBy(pid)) => Err(held_failure(state, role, pid)),
    }
}

fn held_failure(state: &StateDir, role: &str, pid: Option<u32>) -> Failure {
    let pid = pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
    let message = format!(
        "{} belongs to a running CyNode, pid {pid}, which runs the {role} itself",
        state.path().display()
    );
    Failure::new(USAGE, "already_running", message).remedy(
        "See 'cynode status'. Stop it with 'cynode down' first, or choose another directory with \
         --state-dir.",
    )
}

/// Locks the state directory for a server without a supervisor, unless a server runs there.
fn lock_unsupervised(state: &StateDir) -> Result<Lock, Failure> {
    let lock = match Lock::acquire(state)? {
        LockState::Acquired(lock) => lock,
        LockState::HeldBy(pid) => return Err(held_failure(state, "postgres", pid)),
    };
    match postgres::Server::new(state).postmaster() {
        None => Ok(lock),
        Some(pid) => Err(Failure::new(
            USAGE,
            "already_running",
            format!(
                "PostgreSQL is already running on {}, pid {pid}",
                state.path().display()
            ),
        )
        .remedy("Use the running one, or stop it with 'cynode down'.")),
    }
}

/// Enters the user namespace of an ordinary user's worker by executing this program again. Does
/// nothing for root.
pub async fn enter_user_namespace(config: &cynode_worker::Config) -> Result<(), String> {
    cynode_worker::enter_user_namespace(config)
        .await
        .map_err(|error| chain(&error))
}

/// Removes the sandboxes that a stopped worker left. Returns a summary.
pub async fn cleanup(config: &cynode_worker::Config) -> Result<String, Failure> {
    let report = cynode_worker::cleanup(config).await.map_err(|error| {
        Failure::internal(chain(&error)).remedy("Run 'cynode doctor', then 'cynode down' again.")
    })?;
    Ok(report.to_string())
}

/// Checks this machine and returns the worker's report as JSON.
pub async fn examine(config: &cynode_worker::Config) -> Result<serde_json::Value, Failure> {
    let report = cynode_worker::host::examine(config).await;
    serde_json::to_value(report).map_err(|error| Failure::internal(error.to_string()))
}

/// Requests this signal from the kernel when the supervisor exits, so that a killed `up` leaves no
/// orphaned roles. Sandboxes keep running: the next worker adopts them.
pub fn end_with(parent: i32, signal: Signal) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(signal)).map_err(std::io::Error::from)?;
    if getppid().map(Pid::as_raw_pid) == Some(parent) {
        Ok(())
    } else {
        Err(Failure::internal(
            "the supervisor exited before its role started",
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
    fn a_way_is_traversable_and_can_t_be_listed() {
        let root = tempfile::tempdir().expect("temporary directory");
        let (state, elsewhere) = (root.path().join("state"), root.path().join("elsewhere"));
        let mode = |path: &Path| {
            let metadata = fs_err::metadata(path).expect("there");
            metadata.permissions().mode() & 0o777
        };
        for directory in [&state, &elsewhere] {
            std::fs::DirBuilder::new()
                .mode(0o700)
                .create(directory)
                .expect("created");
        }
        make_traversable(&state, &state.join("egress/git")).expect("made");
        make_traversable(&state, &elsewhere.join("git")).expect("not ours");
        assert_eq!((mode(&state), mode(&state.join("egress"))), (0o711, 0o711));
        assert_eq!(mode(&elsewhere), 0o700);
        assert_eq!(mode(root.path()), 0o700);
    }

    #[test]
    fn a_role_starts_alone_or_as_a_child_of_the_holder() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let globals = Globals {
            output: crate::cli::OutputFormat::Table,
            state_dir: Some(directory.path().to_owned()),
            config: None,
            ca: None,
        };
        let state = StateDir::new(&globals).expect("a path");
        assert_eq!(check_holder(&state, "worker").ok(), Some(Holder::Nobody));
        // This process holds the lock, and is not its own child.
        let LockState::Acquired(lock) = Lock::acquire(&state).expect("lock") else {
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
        assert!(lock_unsupervised(&state).is_err());
        let parent = getppid().expect("a parent").as_raw_pid().to_string();
        fs_err::write(directory.path().join("up.lock"), parent).expect("written");
        assert_eq!(
            check_holder(&state, "worker").ok(),
            Some(Holder::Supervisor)
        );
        drop(lock);
        assert!(lock_unsupervised(&state).is_ok());
    }
}
