//! The nodes, and how to speak to them.

use std::{
    collections::HashMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use cynode_api::{ErrorCode, NodeId, Session, SessionId};
use cynode_client::{Error as ClientError, Surface, Trust, WorkerClient};
use cynode_service::ApiError;
use parking_lot::Mutex;

use crate::{
    db::{Db, NodeRow},
    keys::Keys,
};

/// How long a node's row is good. Its address and tokens change rarely, and old tokens stay good for a while.
const FRESH: Duration = Duration::from_secs(2);
/// How long a node that did not answer gets nothing new: at first, and after many tries.
const FIRST_QUIET: Duration = Duration::from_secs(1);
const LONGEST_QUIET: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Fleet {
    keys: Keys,
    /// Who signs the nodes' certificates.
    authority: Option<PathBuf>,
    known: Mutex<HashMap<NodeId, Known>>,
    /// Nodes to which no connection could be made from here, and why. It is only for the moment, and for this orchestrator.
    troubles: Mutex<HashMap<NodeId, String>>,
    /// Nodes that did not answer a call, and until when they get nothing new.
    quiet: Mutex<HashMap<NodeId, Quiet>>,
}

#[derive(Clone, Copy, Debug)]
struct Quiet {
    until: Instant,
    pause: Duration,
}

#[derive(Debug)]
struct Known {
    at: Instant,
    api_url: String,
    epoch: i64,
    client: WorkerClient,
}

impl Fleet {
    pub(crate) fn new(keys: Keys, authority: Option<PathBuf>) -> Self {
        Self {
            keys,
            authority,
            known: Mutex::default(),
            troubles: Mutex::default(),
            quiet: Mutex::default(),
        }
    }

    /// Whether a node did not answer a moment ago. It may still send heartbeats.
    pub(crate) fn is_quiet(&self, id: NodeId) -> bool {
        self.quiet
            .lock()
            .get(&id)
            .is_some_and(|quiet| quiet.until > Instant::now())
    }

    /// A call to a node, within a limit of time. Whether it was answered is remembered.
    pub(crate) async fn call<T>(
        &self,
        id: NodeId,
        limit: Duration,
        call: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, Failed> {
        let answer = tokio::time::timeout(limit, call).await;
        let mut quiet = self.quiet.lock();
        if matches!(answer, Ok(Ok(_) | Err(ClientError::Problem(_)))) {
            quiet.remove(&id);
        } else {
            let pause = quiet
                .get(&id)
                .map_or(FIRST_QUIET, |known| (known.pause * 2).min(LONGEST_QUIET));
            quiet.insert(
                id,
                Quiet {
                    until: Instant::now() + pause,
                    pause,
                },
            );
        }
        drop(quiet);
        answer.map_or_else(
            |_| {
                Err(Failed::Unknown(format!(
                    "it has not answered for {} s",
                    limit.as_secs()
                )))
            },
            |answer| answer.map_err(Failed::from),
        )
    }

    /// Why no connection can be made to a node, if so.
    pub(crate) fn trouble(&self, id: NodeId) -> Option<String> {
        self.troubles.lock().get(&id).cloned()
    }

    /// Tries whether a node can be called from here. A node that is slow is not gone: only a connection that can't be made counts.
    pub(crate) async fn try_node(&self, node: &NodeRow) {
        let tried = match self.client_of(node) {
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
            Err(error) => Err((true, error.0.detail.clone())),
        };
        let mut troubles = self.troubles.lock();
        match tried {
            Err((true, why)) => {
                if troubles.get(&node.id) != Some(&why) {
                    tracing::warn!(node = node.name, node_id = %node.id, why, "A node can't be called from here.");
                }
                troubles.insert(node.id, why);
            }
            Ok(()) | Err((false, _)) => {
                if troubles.remove(&node.id).is_some() {
                    tracing::info!(node = node.name, node_id = %node.id, "A node can be called again.");
                }
            }
        }
    }

    /// A client for a node's Worker API.
    pub(crate) async fn client(&self, db: &Db, id: NodeId) -> Result<WorkerClient, ApiError> {
        if let Some(known) = self.known.lock().get(&id)
            && known.at.elapsed() < FRESH
        {
            return Ok(known.client.clone());
        }
        self.client_of(&db.node(id).await?)
    }

    /// The same for a row that was just read. Connections are kept as long as address and tokens stay.
    pub(crate) fn client_of(&self, node: &NodeRow) -> Result<WorkerClient, ApiError> {
        let mut all = self.known.lock();
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
        let client = WorkerClient::trusting(
            &node.api_url,
            &self.keys.worker_token(node.id, node.token_epoch),
            Surface::Worker,
            trust,
        )
        .map_err(|error| {
            ApiError::new(
                ErrorCode::NodeUnreachable,
                format!("the node {} can't be addressed: {error}", node.name),
            )
        })?;
        all.insert(
            node.id,
            Known {
                at: Instant::now(),
                api_url: node.api_url.clone(),
                epoch: node.token_epoch,
                client: client.clone(),
            },
        );
        Ok(client)
    }
}

/// What a call to a node came to, for who has to decide what is next.
#[derive(Debug)]
pub(crate) enum Failed {
    /// It certainly did not take the call.
    NotSent(String),
    /// Nobody knows.
    Unknown(String),
    /// It refused.
    Refused(ApiError),
}

impl From<ClientError> for Failed {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Problem(problem) if problem.is(ErrorCode::Unauthorized) => {
                Self::Unknown(problem.detail)
            }
            ClientError::Problem(problem) => Self::Refused(ApiError(problem)),
            error @ ClientError::Unreachable {
                never_sent: true, ..
            } => Self::NotSent(error.chain()),
            error => Self::Unknown(error.chain()),
        }
    }
}

impl Failed {
    /// As the caller is told.
    pub(crate) fn problem(self) -> ApiError {
        match self {
            Self::Refused(error) => error,
            Self::NotSent(why) | Self::Unknown(why) => ApiError::new(
                ErrorCode::NodeUnreachable,
                format!("the node does not answer: {why}"),
            ),
        }
    }
}

/// What a node says of the session that it was asked about; of another it has no say.
pub(crate) fn answer_for(
    id: SessionId,
    answer: Result<Session, Failed>,
) -> Result<Session, Failed> {
    let session = answer?;
    if session.session_id == id {
        Ok(session)
    } else {
        Err(Failed::Unknown(
            "it answered about another session".to_owned(),
        ))
    }
}
