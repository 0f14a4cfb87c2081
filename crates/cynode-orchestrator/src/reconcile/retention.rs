//! Retention of events, artifacts, job output, audit records, and the blobs behind them.

use std::{sync::Arc, time::Duration};

use cynode_api::{AuditBody, AuditKind};
use futures_util::{StreamExt as _, TryStreamExt as _};
use time::OffsetDateTime;

use super::{Error, Reconciler};
use crate::{Config, audit::Signer, blobs::Blobs, db::Db};

/// Younger blobs are skipped: their reference may not be committed yet.
const MIN_BLOB_AGE: Duration = Duration::from_hours(1);
/// Incomplete uploads that are older are abandoned.
const MAX_UPLOAD_AGE: Duration = Duration::from_hours(24);
/// A seed that nothing was started from for this long is built anew the next time.
const UNUSED_SEED_DAYS: i32 = 7;
/// Blobs per transaction.
const BATCH: usize = 50;

#[derive(Debug)]
pub(crate) struct Retention {
    pub(crate) db: Db,
    pub(crate) blobs: Blobs,
    pub(crate) config: Arc<Config>,
    pub(crate) signer: Signer,
}

impl Reconciler for Retention {
    const NAME: &'static str = "retention";
    const INTERVAL: Duration = Duration::from_secs(600);

    async fn round(&self) -> Result<(), Error> {
        let (db, config) = (&self.db, &self.config);
        while db.expire_events(config.event_days).await? > 0 {}
        if let Some(days) = config.artifact_days {
            while db.expire_artifacts(days).await? > 0 {}
        }
        while db.expire_outputs(config.output_days).await? > 0 {}
        db.expire_seeds(UNUSED_SEED_DAYS).await?;
        db.backfill_output_sizes(&self.blobs).await?;
        if let Some(days) = config.audit_days {
            self.truncate_audit(days).await?;
        }
        let now = OffsetDateTime::now_utc();
        self.blobs.sweep_incoming(now - MAX_UPLOAD_AGE).await?;
        let mut batches = self
            .blobs
            .stored_before(now - MIN_BLOB_AGE)
            .try_chunks(BATCH)
            .boxed();
        let mut removed = 0;
        while let Some(hashes) = batches.try_next().await.map_err(|error| error.1)? {
            removed += db.remove_unreferenced(&self.blobs, &hashes).await?;
        }
        if removed > 0 {
            tracing::info!(removed, "Unreferenced blobs were removed.");
        }
        Ok(())
    }
}

impl Retention {
    /// Truncates the audit trail. The truncation itself is signed and recorded.
    async fn truncate_audit(&self, days: u32) -> Result<(), Error> {
        if !self.db.has_expired_records(days).await? {
            return Ok(());
        }
        // A tampered trail must not be truncated and signed over as if it were merely old.
        self.signer.sign_once().await?;
        let (progress, mut reports) = tokio::sync::mpsc::channel(1);
        let (verdict, ()) = tokio::join!(self.signer.verify(progress), async {
            while reports.recv().await.is_some() {}
        });
        let verdict = verdict?;
        if !verdict.intact {
            tracing::error!(
                problems = verdict.problems.len(),
                "The audit trail is not intact, so it is not truncated; run 'cynode audit verify'."
            );
            return Ok(());
        }
        let checkpoints = &self.signer.checkpoints;
        let mut removed = 0;
        while let Some((count, line)) = self.db.truncate_audit(days, &checkpoints.key).await? {
            removed += count;
            if let Err(error) = tokio::task::block_in_place(|| checkpoints.restart(&line)) {
                tracing::error!(%error, "The checkpoint file could not be restarted.");
            }
        }
        if removed == 0 {
            return Ok(());
        }
        let mut body = AuditBody::new(AuditKind::Event, "audit.truncate");
        body.detail.insert("records".to_owned(), removed.into());
        body.detail.insert("days".to_owned(), days.into());
        self.signer.audit.write_all(vec![body]).await?;
        Ok(())
    }
}
