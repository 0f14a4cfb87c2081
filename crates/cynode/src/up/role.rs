//! What the supervisor must know of a role: how it is started and stopped, and by what it is known to be ready.

use std::{ffi::OsString, path::PathBuf};

use cynode_api::NodeState;
use cynode_client::{Error, Readiness, SessionFilter, UserClient, WorkerClient};
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
    },
    Worker {
        url: String,
        /// The orchestrator that must have it as a node.
        node_of: Option<String>,
    },
}

impl Probe {
    pub async fn look(&self, state: &StateDir, pid: u32) -> Result<(), String> {
        match self {
            Self::Postgres(server) if server.is_ready(pid) => Ok(()),
            Self::Postgres(_) => Err("it is starting".to_owned()),
            Self::Orchestrator { url } => orchestrator(url, state).await.map(drop),
            Self::Worker { url, node_of } => {
                worker(url, state).await?;
                match node_of {
                    Some(api) => registered(api, url, state).await,
                    None => Ok(()),
                }
            }
        }
    }
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
        Err(Error::Unreachable { .. }) => Err("it does not answer yet".to_owned()),
        Err(error) => Err(error.chain()),
    }
}

fn refused(error: &Error, url: &str, flag: &str) -> String {
    if error.status() == Some(401) { format!("another program answers at {url}; give another address with {flag}") } else { error.chain() }
}

async fn orchestrator(url: &str, state: &StateDir) -> Result<Vec<cynode_api::Node>, String> {
    let client = UserClient::new(url, &token(state, "admin.token")?).map_err(|error| error.chain())?;
    answer(client.readyz().await)?;
    client.nodes().await.map_err(|error| refused(&error, url, "--api-listen"))
}

async fn worker(url: &str, state: &StateDir) -> Result<(), String> {
    let client = WorkerClient::new(url, &token(state, "worker.token")?).map_err(|error| error.chain())?;
    answer(client.readyz().await)?;
    client.list_sessions_page(&SessionFilter::default(), None).await.map(drop).map_err(|error| refused(&error, url, "--worker-listen"))
}

/// Whether the orchestrator has this worker as a node that takes work.
async fn registered(api: &str, url: &str, state: &StateDir) -> Result<(), String> {
    let nodes = orchestrator(api, state).await?;
    match nodes.iter().find(|node| node.api_url.trim_end_matches('/') == url) {
        Some(node) if node.state == NodeState::Ready => Ok(()),
        Some(node) => Err(node.reason.clone().unwrap_or_else(|| "the orchestrator does not take it for ready".to_owned())),
        None => Err("it has not registered with the orchestrator yet".to_owned()),
    }
}
