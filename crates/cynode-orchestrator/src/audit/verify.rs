//! Looks through the whole trail and says whether it is as it was written.

use cynode_api::{AuditVerdict, ErrorCode};
use cynode_audit::Verifier;
use cynode_service::ApiError;
use time::OffsetDateTime;
use tokio::{sync::mpsc, task::block_in_place};

use super::{checkpoints::sign_once, heads::OVERDUE};
use crate::Orchestrator;

/// How often it is told how far it is.
const TELL: u64 = 20_000;

/// Verifies everything up to now. How far it is comes by the channel.
pub(crate) async fn verify(
    orchestrator: &Orchestrator,
    told: mpsc::Sender<(u64, u64)>,
) -> Result<AuditVerdict, ApiError> {
    // The lines outside the database first: what they name must be in it.
    let checkpoints = orchestrator.checkpoints.clone();
    let read = tokio::task::spawn_blocking(move || {
        std::io::Result::Ok((checkpoints.lines()?, checkpoints.interim_line()?))
    })
    .await;
    let (witness, interim) = read.map_err(|_| internal())?.map_err(|error| {
        tracing::error!(%error, "The file of checkpoints can't be read.");
        ApiError::new(ErrorCode::Internal, "the file of checkpoints can't be read")
    })?;
    // And what this process committed.
    let (own, now) = (orchestrator.audit.heads.newest(), OffsetDateTime::now_utc());
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
        verifier.writers(&own);
        if let Some(line) = &interim {
            verifier.interim(line);
        }
    });
    for changed in trail.changed_tables().await? {
        verifier.table(changed);
    }
    let (mut checked, mut told_at) = (0_u64, 0);
    loop {
        let records = trail.next().await?;
        if records.is_empty() {
            break;
        }
        block_in_place(|| {
            for record in &records {
                verifier.record(record.cursor, &record.link);
                verifier.columns(record.cursor, &record.link, &record.columns);
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
    if let Some(seconds) = overdue(orchestrator, &verifier, now).await {
        verifier.overdue(seconds);
    }
    Ok(verifier.finish())
}

/// For how many seconds records have waited for a checkpoint that does not come.
async fn overdue(
    orchestrator: &Orchestrator,
    verifier: &Verifier,
    now: OffsetDateTime,
) -> Option<i64> {
    let own = orchestrator
        .audit
        .heads
        .overdue()
        .and_then(|age| i64::try_from(age.as_secs()).ok());
    let waiting = verifier
        .unsigned()
        .filter(|unsigned| now - unsigned.since > OVERDUE);
    let Some(waiting) = waiting else { return own };
    // Records that waited for the database themselves are old when they come. A checkpoint that can be made now is not overdue.
    let is_signed = own.is_none()
        && sign_once(orchestrator).await.is_ok()
        && orchestrator.checkpoints.cursor() >= waiting.last_cursor;
    (!is_signed).then(|| own.unwrap_or_else(|| (now - waiting.since).whole_seconds()))
}

fn internal() -> ApiError {
    ApiError::new(ErrorCode::Internal, "verifying was interrupted")
}
