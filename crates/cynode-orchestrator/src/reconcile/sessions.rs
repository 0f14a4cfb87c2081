//! Sessions: what was left half way is brought on, and what nodes say of the rest is written down.

use std::collections::HashMap;

use cynode_api::{Session, SessionId, SessionState};
use cynode_client::SessionFilter;
use cynode_service::ApiError;
use futures_util::{StreamExt as _, stream};

use crate::{
    Orchestrator,
    db::{NodeRow, SessionRow},
    fleet::Failed,
    sessions::is_passing,
};

const BATCH: i64 = 64;
const AT_ONCE: usize = 16;
/// Between two tries of something that did not work.
const RETRY: i32 = 2;

pub(super) async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    let waiting = orchestrator.db.lease_sessions(BATCH).await?;
    stream::iter(waiting)
        .for_each_concurrent(AT_ONCE, async |row| {
            let id = row.session_id;
            if let Err(error) = step(orchestrator, row).await {
                tracing::debug!(session_id = %id, error = %error.0, "A session did not get further.");
                drop(orchestrator.db.release_session(id, RETRY).await);
            }
        })
        .await;
    let nodes = orchestrator.db.nodes().await?;
    stream::iter(nodes)
        .for_each_concurrent(AT_ONCE, async |node| {
            if let Err(error) = observe(orchestrator, &node).await {
                tracing::debug!(node = node.name, error = %error.0, "The sessions of a node can't be looked at.");
            }
        })
        .await;
    orchestrator.told();
    Ok(())
}

async fn step(orchestrator: &Orchestrator, row: SessionRow) -> Result<(), ApiError> {
    match (&row.ending, row.state) {
        (Some(end), _) => match orchestrator.tell_end(&row, end).await {
            Ok(_) => Ok(()),
            // It never came to be: there is nothing to end.
            Err(Failed::Refused(error)) if error.0.is(cynode_api::ErrorCode::SessionNotFound) => {
                let reason = end.reason.clone().unwrap_or_else(|| "ended before it was made".to_owned());
                orchestrator.db.set_session_state(row.session_id, &[SessionState::Ending, SessionState::Creating], SessionState::Ended, &reason).await.map(drop)
            }
            Err(failed) => Err(failed.problem()),
        },
        (None, SessionState::Creating) => match orchestrator.bring_up(&row).await {
            Err(error) if is_passing(&error) => Err(error),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Compares what a node has with what is written down.
async fn observe(orchestrator: &Orchestrator, node: &NodeRow) -> Result<(), ApiError> {
    let (live, read_at) = orchestrator.db.sessions_of(node.id).await?;
    if live.is_empty() {
        return Ok(());
    }
    if node.is_lost {
        for (id, _) in live {
            let from = [SessionState::Creating, SessionState::Running, SessionState::Ending];
            orchestrator.db.set_session_state(id, &from, SessionState::Lost, "its node was not heard of for too long").await?;
        }
        return Ok(());
    }
    if node.silent_seconds > orchestrator.config.unreachable_after() {
        return Ok(());
    }
    let client = orchestrator.fleet.client_of(node)?;
    let found = client.list_sessions(&SessionFilter::default()).await.map_err(|error| Failed::from(error).problem())?;
    let found: HashMap<SessionId, Session> = found.into_iter().map(|session| (session.session_id, session)).collect();
    for (id, state) in live {
        match found.get(&id) {
            Some(session) => orchestrator.db.observe_session(session, read_at).await?,
            // One that is being made may not have come to the node yet.
            None if state == SessionState::Running => {
                orchestrator.db.set_session_state(id, &[SessionState::Running], SessionState::Lost, "its node does not know it any more").await?;
            }
            None => {}
        }
    }
    Ok(())
}
