//! Nodes: those that are silent for too long are given up, and what they were left with is cleared when they are back.

use std::time::Duration;

use cynode_api::ErrorCode;
use cynode_service::ApiError;

use crate::{Orchestrator, db::LeftBehind, fleet::Failed};

/// No call takes longer.
const CALL: Duration = Duration::from_secs(15);

pub(super) async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    let lost = orchestrator
        .db
        .give_up_silent_nodes(orchestrator.config.node_lost_after)
        .await?;
    for id in &lost {
        tracing::warn!(node_id = %id, "A node was not heard of for too long; its work is given up.");
    }
    if !lost.is_empty() {
        orchestrator.jobs_wait.notify_one();
        orchestrator.sessions_wait.notify_one();
    }
    clear_leftovers(orchestrator).await
}

/// A node that comes back may still run what went elsewhere meanwhile.
async fn clear_leftovers(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    for left in orchestrator
        .db
        .left_behind(orchestrator.config.unreachable_after())
        .await?
    {
        let Some(place) = orchestrator.leftover_lanes.enter(Some(left.node_id)) else {
            continue;
        };
        let orchestrator = orchestrator.clone();
        tokio::spawn(async move {
            if let Err(error) = clear(&orchestrator, &left).await {
                tracing::debug!(job_id = %left.job_id, error = %error.0, "What a node was left with can't be cleared yet.");
            }
            drop(place);
        });
    }
    Ok(())
}

async fn clear(orchestrator: &Orchestrator, left: &LeftBehind) -> Result<(), ApiError> {
    let LeftBehind {
        job_id,
        task_id,
        node_id,
    } = *left;
    // It was given to that node again, which knew it, and has told its end.
    if orchestrator
        .db
        .any_job(job_id)
        .await?
        .is_some_and(|job| job.node_id == Some(node_id))
    {
        return orchestrator.db.forget_left_behind(job_id, node_id).await;
    }
    let client = orchestrator.fleet.client(&orchestrator.db, node_id).await?;
    match orchestrator
        .fleet
        .call(node_id, CALL, client.stop_job(task_id, job_id))
        .await
    {
        Ok(job) if !job.state.is_final() => Ok(()),
        // One that it did not have it remembers now, so that it never runs there: that is no result.
        Ok(job) if job.acknowledged => orchestrator.db.note_stopped_on(job_id, node_id).await,
        Ok(job) => {
            orchestrator
                .db
                .keep_late_result(job_id, super::jobs::storable(job))
                .await?;
            drop(
                orchestrator
                    .fleet
                    .call(node_id, CALL, client.ack_job(job_id))
                    .await,
            );
            orchestrator.db.note_stopped_on(job_id, node_id).await
        }
        Err(Failed::Refused(error)) if error.0.is(ErrorCode::JobNotFound) => {
            orchestrator.db.forget_left_behind(job_id, node_id).await
        }
        Err(failed) => Err(failed.problem()),
    }
}
