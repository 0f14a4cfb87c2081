//! Verifies the whole trail.

use cynode_api::AuditVerdict;
use cynode_audit::Verifier;
use time::OffsetDateTime;
use tokio::{sync::mpsc, task::block_in_place};

use super::{Error, Signer, heads::OVERDUE};
use crate::db::{Snapshot, StoredRecord};

/// Records between progress reports.
const PROGRESS_RECORDS: u64 = 20_000;
/// Batches of records that wait while another is verified.
const BATCHES_AHEAD: usize = 1;

impl Signer {
    /// Verifies all records up to now, and reports progress (checked, total) by the channel.
    pub(crate) async fn verify(
        &self,
        progress: mpsc::Sender<(u64, u64)>,
    ) -> Result<AuditVerdict, Error> {
        // The local lines first: the database must contain what they name.
        let checkpoints = self.checkpoints.clone();
        let read = tokio::task::spawn_blocking(move || {
            std::io::Result::Ok((checkpoints.lines()?, checkpoints.interim_line()?))
        })
        .await;
        let (witness, interim) = read.map_err(|_| Error::Interrupted)?.map_err(|error| {
            tracing::error!(%error, "The checkpoint file can't be read.");
            Error::CheckpointsUnreadable
        })?;
        // And the heads that this process committed.
        let (own, now) = (self.audit.heads.newest(), OffsetDateTime::now_utc());
        let mut trail = self.db.audit_snapshot().await?;
        let mut verifier = Verifier::new(self.checkpoints.key.public());
        verifier.ends_at(trail.last);
        // CPU-bound: must not block other calls.
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
        let (mut checked, mut reported_at) = (0_u64, 0);
        let count = trail.count;
        let mut batches = read_ahead(trail);
        loop {
            // Without the empty batch at the end, records may be missing.
            let records = batches.recv().await.ok_or(Error::Interrupted)??;
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
            if checked - reported_at >= PROGRESS_RECORDS {
                reported_at = checked;
                // The client has disconnected.
                if progress.send((checked, count)).await.is_err() {
                    return Err(Error::Interrupted);
                }
            }
        }
        if let Some(seconds) = self.overdue(&verifier, now).await {
            verifier.overdue(seconds);
        }
        Ok(verifier.finish())
    }

    /// How many seconds records have waited for an overdue checkpoint.
    async fn overdue(&self, verifier: &Verifier, now: OffsetDateTime) -> Option<i64> {
        let own = self
            .audit
            .heads
            .overdue()
            .and_then(|age| i64::try_from(age.as_secs()).ok());
        let waiting = verifier
            .unsigned()
            .filter(|unsigned| now - unsigned.since > OVERDUE);
        let Some(waiting) = waiting else { return own };
        // Records that waited for the database are old when they are committed. If they can be
        // signed now, nothing is overdue.
        let is_signed = own.is_none()
            && self.sign_once().await.is_ok()
            && self.checkpoints.cursor() >= waiting.last_cursor;
        (!is_signed).then(|| own.unwrap_or_else(|| (now - waiting.since).whole_seconds()))
    }
}

/// Reads the batches of a trail in a task of its own, the empty one at the end included, so that
/// the database reads while the processor verifies.
fn read_ahead(mut trail: Snapshot) -> mpsc::Receiver<Result<Vec<StoredRecord>, Error>> {
    let (sender, receiver) = mpsc::channel(BATCHES_AHEAD);
    tokio::spawn(async move {
        loop {
            let batch = trail.next().await.map_err(Error::from);
            let is_last = batch.as_ref().map_or(true, Vec::is_empty);
            if sender.send(batch).await.is_err() || is_last {
                return;
            }
        }
    });
    receiver
}
