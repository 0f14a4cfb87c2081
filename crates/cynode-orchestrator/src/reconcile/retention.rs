//! What is kept for a time: events, artifacts, output of jobs, and the bytes behind them.

use std::time::Duration;

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
    let now = OffsetDateTime::now_utc();
    orchestrator.blobs.sweep_incoming(now - UNFINISHED).await?;
    let mut batches = orchestrator.blobs.stored_before(now - YOUNG).try_chunks(BATCH).boxed();
    let mut removed = 0;
    while let Some(hashes) = batches.try_next().await.map_err(|error| error.1)? {
        removed += db.remove_unneeded(&orchestrator.blobs, &hashes).await?;
    }
    if removed > 0 {
        tracing::info!(removed, "Bytes that nobody needs any more were removed.");
    }
    Ok(())
}
