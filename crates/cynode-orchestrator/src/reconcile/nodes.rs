//! Nodes: those that are silent for too long are given up, and what they were left with is cleared when they are back.

use cynode_service::ApiError;

use crate::{Orchestrator, fleet::Failed};

pub(super) async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    let lost = orchestrator.db.give_up_silent_nodes(orchestrator.config.node_lost_after).await?;
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
    for (job_id, task_id, node_id) in orchestrator.db.left_behind(orchestrator.config.unreachable_after()).await? {
        // It was given to that node again, which knew it, and has told its end.
        if orchestrator.db.any_job(job_id).await?.is_some_and(|job| job.node_id == Some(node_id)) {
            orchestrator.db.forget_left_behind(job_id, node_id).await?;
            continue;
        }
        let client = orchestrator.fleet.client(&orchestrator.db, node_id).await?;
        let stopped = client.stop_job(task_id, job_id).await.map_err(Failed::from);
        match stopped {
            Ok(job) if !job.state.is_final() => continue,
            Ok(job) => {
                orchestrator.db.keep_late_result(job_id, &crate::db::to_json(&super::jobs::storable(job))).await?;
                drop(client.ack_job(job_id).await);
            }
            Err(Failed::Refused(error)) if error.0.is(cynode_api::ErrorCode::JobNotFound) => {}
            Err(_) => continue,
        }
        orchestrator.db.forget_left_behind(job_id, node_id).await?;
    }
    Ok(())
}
