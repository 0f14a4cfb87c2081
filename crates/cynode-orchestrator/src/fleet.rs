//! The worker nodes and their clients.

use std::{
    collections::HashMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use cynode_api::{ErrorCode, NodeId, Problem, Session, SessionId};
use cynode_client::{Error as ClientError, SessionClient, Surface, Trust};
use parking_lot::Mutex;

use crate::{
    db::{self, Db, NodeRow},
    keys::Keys,
};

/// How long a client is reused without reading its node's row. Address and tokens change rarely,
/// and old tokens stay valid for a while.
const CLIENT_TTL: Duration = Duration::from_secs(2);
/// The back-off after a node did not answer: the first one, and the longest.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// Why no client of a node could be built.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error("the address of node {node} is invalid: {reason}")]
    Address { node: String, reason: String },
}

impl Error {
    /// Whether a retry may succeed.
    pub(crate) const fn is_transient(&self) -> bool {
        match self {
            Self::Db(error) => error.is_transient(),
            Self::Address { .. } => true,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Fleet {
    keys: Keys,
    /// The authority of the nodes' certificates.
    authority: Option<PathBuf>,
    clients: Mutex<HashMap<NodeId, CachedClient>>,
    /// Nodes that this orchestrator can't connect to at the moment, and why.
    connection_errors: Mutex<HashMap<NodeId, String>>,
    /// Nodes that did not answer a call, and until when they get no new work.
    backoffs: Mutex<HashMap<NodeId, Backoff>>,
}

#[derive(Clone, Copy, Debug)]
struct Backoff {
    until: Instant,
    pause: Duration,
}

#[derive(Debug)]
struct CachedClient {
    at: Instant,
    api_url: String,
    epoch: i64,
    client: SessionClient,
}

impl Fleet {
    pub(crate) fn new(keys: Keys, authority: Option<PathBuf>) -> Self {
        Self {
            keys,
            authority,
            clients: Mutex::default(),
            connection_errors: Mutex::default(),
            backoffs: Mutex::default(),
        }
    }

    /// Whether the node is backed off. It may still send heartbeats.
    pub(crate) fn is_backed_off(&self, id: NodeId) -> bool {
        self.backoffs
            .lock()
            .get(&id)
            .is_some_and(|quiet| quiet.until > Instant::now())
    }

    /// Calls a node with a timeout. A failure starts or extends its back-off.
    pub(crate) async fn call<T>(
        &self,
        id: NodeId,
        limit: Duration,
        call: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, CallError> {
        let answer = tokio::time::timeout(limit, call).await;
        let mut quiet = self.backoffs.lock();
        if matches!(answer, Ok(Ok(_) | Err(ClientError::Problem(_)))) {
            quiet.remove(&id);
        } else {
            let pause = quiet
                .get(&id)
                .map_or(FIRST_BACKOFF, |known| (known.pause * 2).min(MAX_BACKOFF));
            quiet.insert(
                id,
                Backoff {
                    until: Instant::now() + pause,
                    pause,
                },
            );
        }
        drop(quiet);
        answer.map_or_else(
            |_| {
                Err(CallError::Unknown(format!(
                    "no answer for {} s",
                    limit.as_secs()
                )))
            },
            |answer| answer.map_err(CallError::from),
        )
    }

    /// Why this orchestrator can't connect to the node, if so.
    pub(crate) fn connection_error(&self, id: NodeId) -> Option<String> {
        self.connection_errors.lock().get(&id).cloned()
    }

    /// Checks whether a node is reachable. Only a failed connection counts, a slow node does not.
    pub(crate) async fn probe(&self, node: &NodeRow) {
        let tried = match self.client_for(node) {
            Ok(client) => client.reach().await.map_err(|error| {
                (
                    matches!(
                        error,
                        ClientError::Unreachable {
                            never_sent: true,
                            ..
                        }
                    ),
                    error.chain(),
                )
            }),
            Err(error) => Err((true, error.to_string())),
        };
        let mut connection_errors = self.connection_errors.lock();
        match tried {
            Err((true, why)) => {
                if connection_errors.get(&node.id) != Some(&why) {
                    tracing::warn!(node = node.name, node_id = %node.id, why, "A node is unreachable from this orchestrator.");
                }
                connection_errors.insert(node.id, why);
            }
            Ok(()) | Err((false, _)) => {
                if connection_errors.remove(&node.id).is_some() {
                    tracing::info!(node = node.name, node_id = %node.id, "A node is reachable again.");
                }
            }
        }
    }

    /// A client of a node's Worker API.
    pub(crate) async fn client(&self, db: &Db, id: NodeId) -> Result<SessionClient, Error> {
        if let Some(known) = self.clients.lock().get(&id)
            && known.at.elapsed() < CLIENT_TTL
        {
            return Ok(known.client.clone());
        }
        self.client_for(&db.node(id).await?)
    }

    /// A client for a row that was just read. Connections are reused while address and tokens stay
    /// the same.
    pub(crate) fn client_for(&self, node: &NodeRow) -> Result<SessionClient, Error> {
        let mut all = self.clients.lock();
        if let Some(known) = all.get_mut(&node.id)
            && known.api_url == node.api_url
            && known.epoch == node.token_epoch
        {
            known.at = Instant::now();
            return Ok(known.client.clone());
        }
        let trust = self
            .authority
            .as_deref()
            .map_or(Trust::Environment, Trust::Only);
        let client = SessionClient::trusting(
            &node.api_url,
            &self.keys.worker_token(node.id, node.token_epoch),
            Surface::Worker,
            trust,
        )
        .map_err(|error| Error::Address {
            node: node.name.clone(),
            reason: error.to_string(),
        })?;
        all.insert(
            node.id,
            CachedClient {
                at: Instant::now(),
                api_url: node.api_url.clone(),
                epoch: node.token_epoch,
                client: client.clone(),
            },
        );
        Ok(client)
    }
}

/// Why a call to a node failed, as far as it decides what comes next.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The node certainly did not receive the call.
    #[error("the node does not answer: {0}")]
    NotSent(String),
    /// The node may have received the call.
    #[error("the node does not answer: {0}")]
    Unknown(String),
    /// The node refused the call.
    #[error("{0}")]
    Refused(Box<Problem>),
}

impl From<ClientError> for CallError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Problem(problem) if problem.is(ErrorCode::Unauthorized) => {
                Self::Unknown(problem.detail)
            }
            ClientError::Problem(problem) => Self::Refused(problem),
            error @ ClientError::Unreachable {
                never_sent: true, ..
            } => Self::NotSent(error.chain()),
            error => Self::Unknown(error.chain()),
        }
    }
}

impl CallError {
    /// Whether a retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::NotSent(_) | Self::Unknown(_) => true,
            Self::Refused(problem) => is_transient_refusal(problem),
        }
    }

    /// Whether the node refused the call with one of these codes.
    pub(crate) fn is_refusal(&self, codes: &[ErrorCode]) -> bool {
        matches!(self, Self::Refused(problem) if codes.iter().any(|code| problem.is(*code)))
    }
}

/// Whether a node that refused a call may accept it later.
pub(crate) fn is_transient_refusal(problem: &Problem) -> bool {
    [
        ErrorCode::ShuttingDown,
        ErrorCode::RuntimeUnavailable,
        ErrorCode::NodeUnreachable,
        ErrorCode::StoreUnavailable,
        ErrorCode::Unauthorized,
    ]
    .iter()
    .any(|code| problem.is(*code))
}

/// Checks that a node's response concerns the requested session.
pub(crate) fn response_for(
    id: SessionId,
    answer: Result<Session, CallError>,
) -> Result<Session, CallError> {
    let session = answer?;
    if session.session_id == id {
        Ok(session)
    } else {
        Err(CallError::Unknown(
            "the response concerns another session".to_owned(),
        ))
    }
}
