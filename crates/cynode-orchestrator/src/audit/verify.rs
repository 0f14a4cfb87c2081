//! Looks through the whole trail and says whether it is as it was written.

use cynode_api::{AuditVerdict, ErrorCode};
use cynode_audit::Verifier;
use cynode_service::ApiError;
use tokio::{sync::mpsc, task::block_in_place};

use crate::Orchestrator;

/// How often it is told how far it is.
const TELL: u64 = 20_000;

/// Verifies everything up to now. How far it is comes by the channel.
pub(crate) async fn verify(orchestrator: &Orchestrator, told: mpsc::Sender<(u64, u64)>) -> Result<AuditVerdict, ApiError> {
    // The lines outside the database first: what they name must be in it.
    let checkpoints = orchestrator.checkpoints.clone();
    let witness = tokio::task::spawn_blocking(move || checkpoints.lines()).await.map_err(|_| internal())?.map_err(|error| {
        tracing::error!(%error, "The file of checkpoints can't be read.");
        ApiError::new(ErrorCode::Internal, "the file of checkpoints can't be read")
    })?;
    let mut trail = orchestrator.db.audit_snapshot().await?;
    let mut verifier = Verifier::new(orchestrator.checkpoints.key.public());
    verifier.ends_at(trail.last);
    // Others' calls do not wait for that.
    block_in_place(|| {
        for (number, line) in &trail.checkpoints {
            verifier.checkpoint_line(*number, line);
        }
        for line in &witness {
            verifier.witness(line);
        }
    });
    let (mut checked, mut told_at) = (0_u64, 0);
    loop {
        let records = trail.next().await?;
        if records.is_empty() {
            break;
        }
        block_in_place(|| {
            for (cursor, link) in &records {
                verifier.record(*cursor, link);
            }
        });
        checked += records.len() as u64;
        if checked - told_at >= TELL {
            told_at = checked;
            // Who asked may be gone; then there is nobody to go on for.
            if told.send((checked, trail.count)).await.is_err() {
                return Err(internal());
            }
        }
    }
    Ok(verifier.finish())
}

fn internal() -> ApiError {
    ApiError::new(ErrorCode::Internal, "verifying was interrupted")
}
