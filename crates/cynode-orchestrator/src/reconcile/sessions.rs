//! Sessions: what was left half way is brought on, and what nodes say of the rest is written down.

use std::{collections::HashMap, time::Duration};

use cynode_api::{ErrorCode, Session, SessionEnd, SessionId, SessionState};
use cynode_client::SessionFilter;
use cynode_service::ApiError;

use crate::{
    Orchestrator,
    db::{NodeRow, SessionRow},
    fleet::Failed,
    sessions::is_passing,
};

const BATCH: usize = 64;
/// Between two tries of something that did not work.
const RETRY: i32 = 2;
/// Between two tries on a node that is not there.
const LATER: i32 = 30;
/// How long a node may take to list its sessions.
const LIST: Duration = Duration::from_secs(20);

pub(super) async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    let room = orchestrator.session_lanes.free().min(BATCH);
    let waiting = if room == 0 {
        Vec::new()
    } else {
        orchestrator.db.lease_sessions(room).await?
    };
    for row in waiting {
        let id = row.session_id;
        let Some(place) = orchestrator.session_lanes.enter(Some(row.node_id)) else {
            orchestrator.db.release_session(id, RETRY).await?;
            continue;
        };
        let orchestrator = orchestrator.clone();
        tokio::spawn(async move {
            match step(&orchestrator, row).await {
                Ok(None) => {}
                Ok(Some(seconds)) => drop(orchestrator.db.release_session(id, seconds).await),
                Err(error) => {
                    tracing::debug!(session_id = %id, error = %error.0, "A session did not get further.");
                    drop(orchestrator.db.release_session(id, RETRY).await);
                }
            }
            drop(place);
        });
    }
    for node in orchestrator.db.nodes().await? {
        // While one looks at a node, nobody else here does.
        let Some(place) = orchestrator.observer_lanes.enter(Some(node.id)) else {
            continue;
        };
        let orchestrator = orchestrator.clone();
        tokio::spawn(async move {
            if let Err(error) = observe(&orchestrator, &node).await {
                tracing::debug!(node = node.name, error = %error.0, "The sessions of a node can't be looked at.");
            }
            drop(place);
        });
    }
    Ok(())
}

/// One step. Says in how many seconds to try again; not at all when there is nothing left to do.
async fn step(orchestrator: &Orchestrator, row: SessionRow) -> Result<Option<i32>, ApiError> {
    let node = orchestrator.db.node(row.node_id).await?;
    if node.is_lost || node.silent_seconds > orchestrator.config.unreachable_after() {
        return Ok(Some(if node.is_lost { LATER } else { RETRY }));
    }
    match (&row.ending, row.state) {
        (Some(end), _) => match orchestrator.tell_end(&row, end).await {
            Ok(_) => Ok(None),
            // It never came to be, or is forgotten: there is nothing to end.
            Err(Failed::Refused(error)) if error.0.is(ErrorCode::SessionNotFound) => {
                orchestrator.ended_unseen(&row, end).await.map(|()| None)
            }
            Err(failed) => Err(failed.problem()),
        },
        (None, SessionState::Creating) => match orchestrator.bring_up(&row).await {
            Err(error) if is_passing(&error) => Err(error),
            _ => Ok(None),
        },
        _ => Ok(None),
    }
}

/// Compares what a node has with what is written down.
async fn observe(orchestrator: &Orchestrator, node: &NodeRow) -> Result<(), ApiError> {
    let live = orchestrator.db.sessions_of(node.id).await?;
    if node.is_lost {
        for row in live.iter().filter(|row| row.state != SessionState::Lost) {
            let from = [
                SessionState::Creating,
                SessionState::Running,
                SessionState::Ending,
            ];
            if orchestrator
                .db
                .set_session_state(
                    row.session_id,
                    &from,
                    SessionState::Lost,
                    "its node was not heard of for too long",
                )
                .await?
            {
                orchestrator.told();
            }
        }
        return Ok(());
    }
    if node.silent_seconds > orchestrator.config.unreachable_after()
        || (live.is_empty() && node.running_sandboxes == 0)
    {
        return Ok(());
    }
    let client = orchestrator.fleet.client_of(node)?;
    let found = orchestrator
        .fleet
        .call(
            node.id,
            LIST,
            client.list_sessions(&SessionFilter::default()),
        )
        .await
        .map_err(Failed::problem)?;
    let found: HashMap<SessionId, Session> = found
        .into_iter()
        .map(|session| (session.session_id, session))
        .collect();
    for row in &live {
        match found.get(&row.session_id) {
            Some(session) if row.is_news(session) => {
                orchestrator
                    .db
                    .observe_session(session, row.read_at)
                    .await?;
                orchestrator.told();
            }
            None if row.state == SessionState::Running => {
                let lost = "its node does not know it any more";
                orchestrator
                    .db
                    .set_session_state(
                        row.session_id,
                        &[SessionState::Running],
                        SessionState::Lost,
                        lost,
                    )
                    .await?;
                orchestrator.told();
            }
            // Nothing new; or one that is being made and may not have come to the node yet.
            _ => {}
        }
    }
    end_leftovers(orchestrator, node, &live, &found).await
}

/// A session that has ended here and runs there: its request came late. Others, that were never made here, are not ours.
async fn end_leftovers(
    orchestrator: &Orchestrator,
    node: &NodeRow,
    live: &[SessionRow],
    found: &HashMap<SessionId, Session>,
) -> Result<(), ApiError> {
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
    for id in orchestrator.db.ended_unseen_of(&unexpected).await? {
        let client = orchestrator.fleet.client_of(node)?;
        let end = SessionEnd {
            reason: Some("it had ended before it was made".to_owned()),
            ..SessionEnd::default()
        };
        orchestrator
            .fleet
            .call(node.id, LIST, client.end_session(id, &end))
            .await
            .map_err(Failed::problem)?;
    }
    Ok(())
}
