//! A role as the supervisor sees it: how to start and stop it, and how to probe its readiness.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use cynode_api::NodeState;
use cynode_client::{
    Error, GitRole, Readiness, SessionClient, SessionFilter, Surface, Trust, UserClient,
};
use rustix::process::Signal;

use crate::{postgres, state::StateDir};

#[derive(Debug)]
pub struct Role {
    /// Names its log file, too.
    pub name: &'static str,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Its address, for messages.
    pub address: String,
    pub probe: Probe,
    /// The signal for a graceful shutdown.
    pub stop_signal: Signal,
    /// The role that must be ready first, and that is stopped afterwards.
    pub needs: Option<&'static str>,
    /// Its clean exit ends all roles.
    pub ends_stack: bool,
    /// Whether it inherits `DATABASE_URL`.
    pub needs_database_url: bool,
}

/// A readiness check. It authenticates, because another program may listen at the same address.
#[derive(Debug)]
pub enum Probe {
    Postgres(postgres::Server),
    Orchestrator {
        url: String,
        authority: Option<PathBuf>,
    },
    Worker {
        url: String,
        authority: Option<PathBuf>,
        registration: Option<NodeRegistration>,
    },
    Git {
        url: String,
        authority: Option<PathBuf>,
        token_file: PathBuf,
    },
}

/// The orchestrator that a worker must be registered with.
#[derive(Debug)]
pub struct NodeRegistration {
    pub orchestrator: String,
    /// The worker's URL, as registered.
    pub api_url: String,
}

impl Probe {
    pub async fn check(&self, state: &StateDir, pid: u32) -> Result<(), String> {
        match self {
            Self::Postgres(server) if server.is_ready(pid) => Ok(()),
            Self::Postgres(_) => Err("starting".to_owned()),
            Self::Orchestrator { url, authority } => {
                check_orchestrator(url, trust(authority.as_ref()), state)
                    .await
                    .map(drop)
            }
            Self::Worker {
                url,
                authority,
                registration,
            } => {
                check_worker(url, trust(authority.as_ref()), state).await?;
                match registration {
                    Some(registration) => {
                        check_registration(registration, trust(authority.as_ref()), state).await
                    }
                    None => Ok(()),
                }
            }
            Self::Git {
                url,
                authority,
                token_file,
            } => check_git(url, trust(authority.as_ref()), token_file).await,
        }
    }
}

fn trust(authority: Option<&PathBuf>) -> Trust<'_> {
    authority
        .map(PathBuf::as_path)
        .map_or(Trust::Environment, Trust::Also)
}

fn token(state: &StateDir, name: &str) -> Result<String, String> {
    match state.token(name) {
        Ok(Some(token)) => Ok(token),
        Ok(None) => Err("starting".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn check_readiness(readiness: Result<Readiness, Error>) -> Result<(), String> {
    match readiness {
        Ok(Readiness::Ready) => Ok(()),
        Ok(Readiness::NotReady(reason)) => Err(reason),
        Err(error @ Error::Unreachable { .. }) if error.chain().contains("certificate") => {
            Err(error.chain())
        }
        Err(Error::Unreachable { .. }) => Err("no response yet".to_owned()),
        Err(error) => Err(error.chain()),
    }
}

fn call_failure(error: &Error, url: &str, flag: &str) -> String {
    if error.status() == Some(401) {
        format!("another program listens at {url}; choose another address with {flag}")
    } else {
        error.chain()
    }
}

async fn check_orchestrator(
    url: &str,
    trust: Trust<'_>,
    state: &StateDir,
) -> Result<Vec<cynode_api::Node>, String> {
    let client = UserClient::trusting(url, &token(state, "admin.token")?, trust)
        .map_err(|error| error.chain())?;
    check_readiness(client.readyz().await)?;
    client
        .nodes()
        .await
        .map_err(|error| call_failure(&error, url, "--api-listen"))
}

async fn check_worker(url: &str, trust: Trust<'_>, state: &StateDir) -> Result<(), String> {
    let client =
        SessionClient::trusting(url, &token(state, "worker.token")?, Surface::Worker, trust)
            .map_err(|error| error.chain())?;
    check_readiness(client.readyz().await)?;
    client
        .list_sessions_page(&SessionFilter::default(), None)
        .await
        .map(drop)
        .map_err(|error| call_failure(&error, url, "--worker-listen"))
}

async fn check_git(url: &str, trust: Trust<'_>, token_file: &Path) -> Result<(), String> {
    let token = fs_err::read_to_string(token_file).map_err(|error| error.to_string())?;
    let client = SessionClient::trusting(url, &token, Surface::Worker, trust)
        .map_err(|error| error.chain())?;
    check_readiness(client.readyz().await)?;
    let role = GitRole::new(url, &token, trust).map_err(|error| error.chain())?;
    role.info()
        .await
        .map(drop)
        .map_err(|error| call_failure(&error, url, "--git-listen"))
}

/// Checks that the worker is a ready node of the orchestrator.
async fn check_registration(
    registration: &NodeRegistration,
    trust: Trust<'_>,
    state: &StateDir,
) -> Result<(), String> {
    let nodes = check_orchestrator(&registration.orchestrator, trust, state).await?;
    let node = nodes
        .iter()
        .find(|node| node.api_url == registration.api_url);
    match node {
        Some(node) if node.state == NodeState::Ready => Ok(()),
        Some(node) => Err(node
            .reason
            .clone()
            .unwrap_or_else(|| "the node is not ready".to_owned())),
        None => Err("not registered with the orchestrator yet".to_owned()),
    }
}
