//! Sessions: unfinished creations and ends are completed, and nodes' reports are stored.

use std::{collections::HashMap, sync::Arc, time::Duration};

use cynode_api::{ErrorCode, Session, SessionEnd, SessionId, SessionState};
use cynode_client::SessionFilter;

use super::{Error, Lanes, Reconciler};
use crate::{
    Config,
    db::{Db, NodeRow, SessionRow},
    fleet::Fleet,
    sessions::{self, Sessions},
};

const BATCH: usize = 64;
/// Between attempts.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// Between attempts on a lost node.
const LOST_NODE_DELAY: Duration = Duration::from_secs(30);
/// How long a node may take to list its sessions.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone, Debug)]
pub(crate) struct SessionReconciler {
    pub(crate) db: Db,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) config: Arc<Config>,
    pub(crate) sessions: Sessions,
    pub(crate) lanes: Lanes,
    /// One observer per node.
    pub(crate) observer_lanes: Lanes,
}

impl Reconciler for SessionReconciler {
    const NAME: &'static str = "sessions";
    const INTERVAL: Duration = Duration::from_secs(1);

    async fn round(&self) -> Result<(), Error> {
        let room = self.lanes.free().min(BATCH);
        let unfinished = if room == 0 {
            Vec::new()
        } else {
            self.db.lease_sessions(room).await?
        };
        for row in unfinished {
            let id = row.session_id;
            let Some(permit) = self.lanes.try_acquire(Some(row.node_id)) else {
                self.db.release_session(id, RETRY_DELAY).await?;
                continue;
            };
            let reconciler = self.clone();
            tokio::spawn(async move {
                match reconciler.step(row).await {
                    Ok(None) => {}
                    Ok(Some(delay)) => drop(reconciler.db.release_session(id, delay).await),
                    Err(error) => {
                        tracing::debug!(session_id = %id, %error, "A step of a session failed.");
                        drop(reconciler.db.release_session(id, RETRY_DELAY).await);
                    }
                }
                drop(permit);
            });
        }
        for node in self.db.nodes().await? {
            let Some(permit) = self.observer_lanes.try_acquire(Some(node.id)) else {
                continue;
            };
            let reconciler = self.clone();
            tokio::spawn(async move {
                if let Err(error) = reconciler.observe(&node).await {
                    tracing::debug!(
                        node = node.name,
                        %error,
                        "The sessions of a node can't be observed."
                    );
                }
                drop(permit);
            });
        }
        Ok(())
    }
}

impl SessionReconciler {
    /// Runs one step. Returns when to retry; `None` when nothing is left to do.
    async fn step(&self, row: SessionRow) -> Result<Option<Duration>, Error> {
        let node = self.db.node(row.node_id).await?;
        if !node.is_responsive(self.config.unreachable_after()) {
            return Ok(Some(if node.is_lost {
                LOST_NODE_DELAY
            } else {
                RETRY_DELAY
            }));
        }
        match (&row.ending, row.state) {
            (Some(end), _) => match self.sessions.end_on_node(&row, end).await {
                Ok(_) => Ok(None),
                // The session was never created there, or is forgotten: there is nothing to end.
                Err(sessions::Error::Call(call))
                    if call.is_refusal(&[ErrorCode::SessionNotFound]) =>
                {
                    self.sessions.mark_ended(&row, end).await?;
                    Ok(None)
                }
                Err(error) => Err(error.into()),
            },
            (None, SessionState::Creating) => match self.sessions.bring_up(&row).await {
                Err(error) if error.is_transient() => Err(error.into()),
                _ => Ok(None),
            },
            _ => Ok(None),
        }
    }

    /// Compares a node's sessions with the stored ones.
    async fn observe(&self, node: &NodeRow) -> Result<(), Error> {
        let live = self.db.sessions_on(node.id).await?;
        if node.is_lost {
            for row in live.iter().filter(|row| row.state != SessionState::Lost) {
                let from = [
                    SessionState::Creating,
                    SessionState::Running,
                    SessionState::Ending,
                ];
                if self
                    .db
                    .set_session_state(
                        row.session_id,
                        &from,
                        SessionState::Lost,
                        "the node is lost: no heartbeat for too long",
                    )
                    .await?
                {
                    self.sessions.readers.notify();
                }
            }
            return Ok(());
        }
        if node.silent_for > self.config.unreachable_after()
            || (live.is_empty() && node.running_sandboxes == 0)
        {
            return Ok(());
        }
        let client = self.fleet.client_for(node)?;
        let found = self
            .fleet
            .call(
                node.id,
                LIST_TIMEOUT,
                client.list_sessions(&SessionFilter::default()),
            )
            .await?;
        let found: HashMap<SessionId, Session> = found
            .into_iter()
            .map(|session| (session.session_id, session))
            .collect();
        for row in &live {
            match found.get(&row.session_id) {
                Some(session) if row.differs_from(session) => {
                    self.db.observe_session(session, row.read_at).await?;
                    self.sessions.readers.notify();
                }
                None if row.state == SessionState::Running => {
                    let lost = "the node no longer knows the session";
                    self.db
                        .set_session_state(
                            row.session_id,
                            &[SessionState::Running],
                            SessionState::Lost,
                            lost,
                        )
                        .await?;
                    self.sessions.readers.notify();
                }
                // Unchanged, or creating and possibly not yet on the node.
                _ => {}
            }
        }
        self.end_leftovers(node, &live, &found).await
    }

    /// Ends sessions that have ended here but run on the node, because their request arrived late.
    /// Sessions that were never created here are left alone.
    async fn end_leftovers(
        &self,
        node: &NodeRow,
        live: &[SessionRow],
        found: &HashMap<SessionId, Session>,
    ) -> Result<(), Error> {
        let runs = |session: &&Session| {
            matches!(
                session.state,
                SessionState::Creating | SessionState::Running
            )
        };
        let unexpected = found
            .values()
            .filter(runs)
            .map(|session| session.session_id)
            .filter(|id| live.iter().all(|row| row.session_id != *id));
        let unexpected: Vec<SessionId> = unexpected.collect();
        if unexpected.is_empty() {
            return Ok(());
        }
        for id in self.db.ended_before_report(&unexpected).await? {
            let client = self.fleet.client_for(node)?;
            let end = SessionEnd {
                reason: Some("the session ended before it was created".to_owned()),
                ..SessionEnd::default()
            };
            self.fleet
                .call(node.id, LIST_TIMEOUT, client.end_session(id, &end))
                .await?;
        }
        Ok(())
    }
}
