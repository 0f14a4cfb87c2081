//! What the supervisor must know of a role: how it is started and stopped, and by what it is known to be ready.

use std::{ffi::OsString, path::PathBuf};

use cynode_api::NodeState;
use cynode_client::{Error, Readiness, SessionFilter, Surface, Trust, UserClient, WorkerClient};
use rustix::process::Signal;

use crate::{postgres, state::StateDir};

#[derive(Debug)]
pub struct Role {
    pub name: &'static str,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Where it listens, for people.
    pub place: String,
    pub probe: Probe,
    /// By which it ends in order.
    pub stop: Signal,
    /// It is started when this one is ready, and stopped before it.
    pub needs: Option<&'static str>,
    /// Its own clean end is the end of all.
    pub ends_all: bool,
    /// `DATABASE_URL` is for it.
    pub takes_database: bool,
}

/// How a role is asked whether it is ready. Ready, and ours: another program at the same address does not take our token.
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
        node_of: Option<NodeOf>,
    },
}

/// The orchestrator that must have a worker as a node.
#[derive(Debug)]
pub struct NodeOf {
    pub orchestrator: String,
    /// The worker's address there.
    pub api_url: String,
}

impl Probe {
    pub async fn look(&self, state: &StateDir, pid: u32) -> Result<(), String> {
        match self {
            Self::Postgres(server) if server.is_ready(pid) => Ok(()),
            Self::Postgres(_) => Err("it is starting".to_owned()),
            Self::Orchestrator { url, authority } => {
                orchestrator(url, trust(authority.as_ref()), state)
                    .await
                    .map(drop)
            }
            Self::Worker {
                url,
                authority,
                node_of,
            } => {
                worker(url, trust(authority.as_ref()), state).await?;
                match node_of {
                    Some(node_of) => registered(node_of, trust(authority.as_ref()), state).await,
                    None => Ok(()),
                }
            }
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
        Ok(None) => Err("it is starting".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn answer(readiness: Result<Readiness, Error>) -> Result<(), String> {
    match readiness {
        Ok(Readiness::Ready) => Ok(()),
        Ok(Readiness::NotReady(reason)) => Err(reason),
        Err(error @ Error::Unreachable { .. }) if error.chain().contains("certificate") => {
            Err(error.chain())
        }
        Err(Error::Unreachable { .. }) => Err("it does not answer yet".to_owned()),
        Err(error) => Err(error.chain()),
    }
}

fn refused(error: &Error, url: &str, flag: &str) -> String {
    if error.status() == Some(401) {
        format!("another program answers at {url}; give another address with {flag}")
    } else {
        error.chain()
    }
}

async fn orchestrator(
    url: &str,
    trust: Trust<'_>,
    state: &StateDir,
) -> Result<Vec<cynode_api::Node>, String> {
    let client = UserClient::trusting(url, &token(state, "admin.token")?, trust)
        .map_err(|error| error.chain())?;
    answer(client.readyz().await)?;
    client
        .nodes()
        .await
        .map_err(|error| refused(&error, url, "--api-listen"))
}

async fn worker(url: &str, trust: Trust<'_>, state: &StateDir) -> Result<(), String> {
    let client =
        WorkerClient::trusting(url, &token(state, "worker.token")?, Surface::Worker, trust)
            .map_err(|error| error.chain())?;
    answer(client.readyz().await)?;
    client
        .list_sessions_page(&SessionFilter::default(), None)
        .await
        .map(drop)
        .map_err(|error| refused(&error, url, "--worker-listen"))
}

/// Whether the orchestrator has this worker as a node that takes work.
async fn registered(node_of: &NodeOf, trust: Trust<'_>, state: &StateDir) -> Result<(), String> {
    let nodes = orchestrator(&node_of.orchestrator, trust, state).await?;
    match nodes.iter().find(|node| node.api_url == node_of.api_url) {
        Some(node) if node.state == NodeState::Ready => Ok(()),
        Some(node) => Err(node
            .reason
            .clone()
            .unwrap_or_else(|| "the orchestrator does not take it for ready".to_owned())),
        None => Err("it has not registered with the orchestrator yet".to_owned()),
    }
}
