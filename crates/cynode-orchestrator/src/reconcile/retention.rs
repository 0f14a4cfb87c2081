//! What is kept for a time: events, artifacts, output of jobs, and the bytes behind them.

use std::time::Duration;

use cynode_api::{AuditBody, AuditKind};
use cynode_service::ApiError;
use futures_util::{StreamExt as _, TryStreamExt as _};
use time::OffsetDateTime;

use crate::Orchestrator;

/// Bytes are not looked at before this: somebody may be about to say what they are for.
const YOUNG: Duration = Duration::from_hours(1);
/// What nobody finished sending by then, nobody will.
const UNFINISHED: Duration = Duration::from_hours(24);
/// So many are looked at together.
const BATCH: usize = 50;

pub(super) async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    let (db, config) = (&orchestrator.db, &orchestrator.config);
    while db.expire_events(config.event_days).await? > 0 {}
    if let Some(days) = config.artifact_days {
        while db.expire_artifacts(days).await? > 0 {}
    }
    while db.expire_outputs(config.output_days).await? > 0 {}
    db.measure_outputs(&orchestrator.blobs).await?;
    if let Some(days) = config.audit_days {
        truncate_audit(orchestrator, days).await?;
    }
    let now = OffsetDateTime::now_utc();
    orchestrator.blobs.sweep_incoming(now - UNFINISHED).await?;
    let mut batches = orchestrator
        .blobs
        .stored_before(now - YOUNG)
        .try_chunks(BATCH)
        .boxed();
    let mut removed = 0;
    while let Some(hashes) = batches.try_next().await.map_err(|error| error.1)? {
        removed += db.remove_unneeded(&orchestrator.blobs, &hashes).await?;
    }
    if removed > 0 {
        tracing::info!(removed, "Bytes that nobody needs any more were removed.");
    }
    Ok(())
}

/// Removes records that are too old. That this was done is signed, and is a record itself.
async fn truncate_audit(orchestrator: &Orchestrator, days: u32) -> Result<(), ApiError> {
    if !orchestrator.db.has_old_records(days).await? {
        return Ok(());
    }
    // What was changed must not be forgotten, and signed over, as if it were only old.
    crate::audit::sign_once(orchestrator).await?;
    let (told, mut heard) = tokio::sync::mpsc::channel(1);
    let (verdict, ()) = tokio::join!(crate::audit::verify(orchestrator, told), async {
        while heard.recv().await.is_some() {}
    });
    let verdict = verdict?;
    if !verdict.intact {
        tracing::error!(
            problems = verdict.problems.len(),
            "The audit trail is not whole, so nothing of it is removed: 'cynode audit verify' says what is wrong."
        );
        return Ok(());
    }
    let mut removed = 0;
    while let Some((count, line)) = orchestrator
        .db
        .truncate_audit(days, &orchestrator.checkpoints.key)
        .await?
    {
        removed += count;
        if let Err(error) = tokio::task::block_in_place(|| orchestrator.checkpoints.restart(&line))
        {
            tracing::error!(%error, "The file of checkpoints could not be begun anew.");
        }
    }
    if removed == 0 {
        return Ok(());
    }
    let mut body = AuditBody::new(AuditKind::Event, "audit.truncate");
    body.detail.insert("records".to_owned(), removed.into());
    body.detail.insert("days".to_owned(), days.into());
    orchestrator.audit.note(vec![body]).await
}
