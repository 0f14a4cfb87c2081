//! The roles that `up` runs, and their configuration.

use std::{
    ffi::OsString,
    net::{SocketAddr, TcpListener},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use rustix::process::Signal;

use super::role::{NodeRegistration, Probe, Role};
use crate::{
    cli::{Globals, Section, Settings},
    failure::Failure,
    git_program::{self, Unusable},
    output, postgres, roles,
    state::{Endpoints, StateDir},
};

/// File of the key that registers the worker of this machine.
pub const REGISTRATION_KEY: &str = "registration.key";

/// The configuration of all roles.
#[derive(Debug)]
pub struct Stack {
    /// With fixed ports: a restarted role keeps its address.
    pub settings: Settings,
    worker: cynode_worker::Config,
    /// `None` with `--worker-only`.
    orchestrator: Option<cynode_orchestrator::Config>,
    /// `None` if it runs elsewhere, or this machine has no git.
    git: Option<cynode_egress::Config>,
}

impl Stack {
    /// Reads the whole configuration before any role starts.
    pub fn plan(
        globals: &Globals,
        mut settings: Settings,
        worker_only: bool,
    ) -> Result<Self, Failure> {
        let mut reserved = Vec::new();
        let listen = roles::worker_config(globals, &settings)?.listen;
        fix_port(&mut settings.worker_listen, listen, &mut reserved)?;
        let worker = roles::worker_config(globals, &settings)?;
        if worker_only {
            return Ok(Self {
                settings,
                worker,
                orchestrator: None,
                git: None,
            });
        }
        let config = roles::orchestrator_config(globals, &settings)?;
        fix_port(&mut settings.api_listen, config.listen, &mut reserved)?;
        fix_port(
            &mut settings.control_listen,
            config.control_listen,
            &mut reserved,
        )?;
        let orchestrator = roles::orchestrator_config(globals, &settings)?;
        let state = StateDir::new(globals)?;
        if orchestrator.database_url.is_none() {
            postgres::Programs::find(&postgres::Server::new(&state))?;
        }
        let git = plan_git(globals, &mut settings, &orchestrator, &mut reserved)?;
        Ok(Self {
            settings,
            worker,
            orchestrator: Some(orchestrator),
            git,
        })
    }

    pub fn endpoints(&self) -> Endpoints {
        let api = self.orchestrator.as_ref().map(roles::api_url);
        Endpoints {
            version: 1,
            mcp: api.as_ref().map(|url| format!("{url}/mcp")),
            api,
            control: self.orchestrator.as_ref().map(roles::control_url),
            worker: Some(roles::worker_url(&self.worker)),
            git: self.git.as_ref().map(roles::git_url),
            ca: self.authority(),
            pid: std::process::id(),
        }
    }

    /// The CA of the certificates of this machine's roles.
    fn authority(&self) -> Option<PathBuf> {
        let authority = self
            .orchestrator
            .as_ref()
            .and_then(|config| config.tls.ca.as_ref())
            .or(self.worker.tls.ca.as_ref());
        authority.and_then(|path| std::path::absolute(path).ok())
    }

    /// The URL at which orchestrators reach this machine's worker.
    fn worker_address(&self) -> String {
        self.worker
            .api_url
            .clone()
            .unwrap_or_else(|| roles::worker_url(&self.worker))
    }

    pub fn roles(&self, globals: &Globals, state: &StateDir) -> Result<Vec<Role>, Failure> {
        let program = std::env::current_exe()?;
        let mut roles = Vec::new();
        let role = |name: &'static str, arguments: Vec<OsString>, address: String, probe| Role {
            name,
            program: program.clone(),
            arguments: [
                command(name),
                vec!["--parent".into(), std::process::id().to_string().into()],
                arguments,
            ]
            .concat(),
            address,
            probe,
            stop_signal: Signal::TERM,
            needs: None,
            ends_stack: false,
            needs_database_url: false,
        };
        let mut settings = self.settings.clone();
        if let Some(config) = &self.orchestrator {
            let mut needs = None;
            if config.database_url.is_none() {
                let server = postgres::Server::new(state);
                server.secure_sockets()?;
                settings
                    .set
                    .push(("orchestrator.database_url".to_owned(), server.url()));
                let address = server.socket_directory().display().to_string();
                let postgres = role(
                    "postgres",
                    state_arguments(state),
                    address,
                    Probe::Postgres(server),
                );
                // SIGINT is a fast shutdown.
                roles.push(Role {
                    stop_signal: Signal::INT,
                    ..postgres
                });
                needs = Some("postgres");
            }
            let key = match &config.registration_key_file {
                Some(path) => path.clone(),
                None => state.path().join(REGISTRATION_KEY),
            };
            // Both the orchestrator and the worker read the key: create it before they start.
            cynode_service::files::read_or_create_token(&key)?;
            settings.set.push((
                "orchestrator.registration_key_file".to_owned(),
                key.display().to_string(),
            ));
            if let Some(git) = &self.git {
                settings.set.extend(git_settings(git));
            }
            let url = roles::api_url(config);
            let probe = Probe::Orchestrator {
                url: url.clone(),
                authority: self.authority(),
            };
            let orchestrator = role(
                "orchestrator",
                arguments(globals, state, &settings, Section::Orchestrator)?,
                url,
                probe,
            );
            roles.push(Role {
                needs,
                needs_database_url: true,
                ..orchestrator
            });
            settings
                .set
                .extend(self.registration_settings(config, &key));
        }
        let url = roles::worker_url(&self.worker);
        let registration = self.orchestrator.as_ref().map(|config| NodeRegistration {
            orchestrator: roles::api_url(config),
            api_url: self.worker_address(),
        });
        let probe = Probe::Worker {
            url: url.clone(),
            authority: self.authority(),
            registration,
        };
        let worker = role(
            "worker",
            arguments(globals, state, &settings, Section::Worker)?,
            url,
            probe,
        );
        roles.push(Role {
            ends_stack: true,
            ..worker
        });
        if let Some(config) = &self.git {
            let token_file = config.token_file();
            // Both the orchestrator and the role read the token: create it before they start.
            create_private(token_file.parent())?;
            cynode_service::files::read_or_create_token(&token_file)?;
            let url = roles::git_url(config);
            let probe = Probe::Git {
                url: url.clone(),
                authority: config.tls.ca.clone().or_else(|| self.authority()),
                token_file,
            };
            let arguments = arguments(globals, state, &settings, Section::Egress)?;
            roles.push(role("git", arguments, url, probe));
        }
        Ok(roles)
    }

    /// Settings that register the worker with the orchestrator of this machine.
    fn registration_settings(
        &self,
        config: &cynode_orchestrator::Config,
        key: &Path,
    ) -> Vec<(String, String)> {
        [
            ("worker.orchestrator_url", roles::control_url(config)),
            ("worker.registration_key_file", key.display().to_string()),
            ("worker.api_url", self.worker_address()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .to_vec()
    }
}

/// The git role's configuration, if it runs here. Without git everything else works.
fn plan_git(
    globals: &Globals,
    settings: &mut Settings,
    orchestrator: &cynode_orchestrator::Config,
    reserved: &mut Vec<TcpListener>,
) -> Result<Option<cynode_egress::Config>, Failure> {
    let config = roles::git_config(globals, settings)?;
    if orchestrator.egress_git_url.is_some() {
        return Ok(None);
    }
    if let Err(unusable) = git_program::version(&config.git) {
        output::message(&format!(
            "cynode: starting without the git role: {}. {}",
            unusable.message(),
            Unusable::remedy()
        ));
        return Ok(None);
    }
    fix_port(&mut settings.git_listen, config.listen, reserved)?;
    roles::git_config(globals, settings).map(Some)
}

/// Settings by which the orchestrator reaches the git role of this machine.
fn git_settings(config: &cynode_egress::Config) -> Vec<(String, String)> {
    let token_file = config.token_file();
    let files = [
        ("orchestrator.egress_git_token_file", Some(&token_file)),
        ("orchestrator.egress_git_ca", config.tls.ca.as_ref()),
    ];
    let files = files
        .into_iter()
        .filter_map(|(key, path)| Some((key.to_owned(), path?.display().to_string())));
    let url = "orchestrator.egress_git_url".to_owned();
    files.chain([(url, roles::git_url(config))]).collect()
}

/// The command that runs a role.
fn command(role: &str) -> Vec<OsString> {
    match role {
        "git" => ["egress", "--role", role].map(OsString::from).to_vec(),
        _ => vec![role.into()],
    }
}

/// Creates a directory for its owner only.
fn create_private(directory: Option<&Path>) -> Result<(), Failure> {
    let Some(directory) = directory else {
        return Ok(());
    };
    Ok(std::fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(directory)?)
}

/// Replaces port 0 by a free port. Keeps its socket open in `reserved`, so that no two addresses
/// get the same port.
fn fix_port(
    flag: &mut Option<String>,
    configured: SocketAddr,
    reserved: &mut Vec<TcpListener>,
) -> Result<(), Failure> {
    if configured.port() == 0 {
        let listener = TcpListener::bind(configured)?;
        *flag = Some(listener.local_addr()?.to_string());
        reserved.push(listener);
    }
    Ok(())
}

fn state_arguments(state: &StateDir) -> Vec<OsString> {
    vec!["--state-dir".into(), state.path().into()]
}

/// The flags that pass this configuration to a child process.
pub fn arguments(
    globals: &Globals,
    state: &StateDir,
    settings: &Settings,
    section: Section,
) -> Result<Vec<OsString>, Failure> {
    let mut arguments = state_arguments(state);
    if let Some(config) = &globals.config {
        arguments.extend(["--config".into(), std::path::absolute(config)?.into()]);
    }
    for (key, value) in settings.overrides(section) {
        arguments.extend([
            "--set".into(),
            format!("{}.{key}={value}", section.name()).into(),
        ]);
    }
    Ok(arguments)
}
