//! Fetches the records that an egress role writes by itself, and merges them into the trail.
//!
//! Invariant: a batch is acknowledged only after its records are committed. Every step can be
//! repeated, by any orchestrator: a record is stored once.

use std::time::Duration;

use cynode_api::{
    API_VERSION, AuditBody, AuditKind, AuditResult, EgressAuditAck, EgressAuditBatch,
    EgressAuditVerdict, node_audit_limits,
};
use serde_json::json;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    Audit, Error,
    received::{MalformedBatch, links},
    role_records::{refusals, subject},
};
use crate::{
    db::{self, Db, MergeOutcome, StreamWriter},
    egress::{self, GitEgress},
};

/// The only role there is.
const ROLE: &str = "git";
/// How long a call waits at the role for records.
const WAIT: Duration = Duration::from_secs(15);
/// Collects the records of a busy role into fewer batches.
const BATCH_INTERVAL: Duration = Duration::from_millis(100);
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// An event: another instance of a role answers, whose records are accepted from now on.
const INSTANCE_ACTION: &str = "egress.instance";

#[derive(Debug, thiserror::Error)]
enum PullError {
    #[error(transparent)]
    Egress(#[from] egress::Error),
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error("recording the role's instance: {0}")]
    Audit(#[from] Error),
    #[error("the role sent a malformed batch: {0}")]
    Malformed(#[from] MalformedBatch),
    #[error("the role at this address is {0:?}, not the {ROLE} role")]
    OtherRole(String),
    #[error(
        "the role has opened {} audit streams within an hour",
        node_audit_limits::MAX_STREAMS_PER_HOUR
    )]
    TooManyStreams,
    #[error("stream {0} has another writer")]
    Foreign(Uuid),
}

/// What one attempt did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Merged,
    Nothing,
    /// The role has to send something else.
    Refused,
}

/// Keeps the trail complete with the records of one role.
#[derive(Debug)]
pub(crate) struct RoleAudit {
    db: Db,
    audit: Audit,
    role: GitEgress,
    /// The instance that the database knows, once that was checked.
    instance: Option<Uuid>,
}

impl RoleAudit {
    pub(crate) fn new(db: Db, audit: Audit, role: GitEgress) -> Self {
        Self {
            db,
            audit,
            role,
            instance: None,
        }
    }

    pub(crate) async fn run(mut self, stop: CancellationToken) {
        if !self.role.is_configured() {
            return;
        }
        let mut backoff = FIRST_BACKOFF;
        while let Some(step) = stop.run_until_cancelled(self.step()).await {
            let pause = match step {
                Ok(Step::Merged | Step::Nothing) => {
                    backoff = FIRST_BACKOFF;
                    BATCH_INTERVAL
                }
                Ok(Step::Refused) => {
                    backoff = (backoff * 2).min(MAX_BACKOFF);
                    backoff
                }
                Err(error) => {
                    // A role that is stopped or that starts is not worth more than one line.
                    if backoff == FIRST_BACKOFF {
                        tracing::warn!(%error, "The audit records of the git role were not merged; retrying.");
                    } else {
                        tracing::debug!(%error, "The audit records of the git role were not merged; retrying.");
                    }
                    let pause = backoff;
                    backoff = (backoff * 2).min(MAX_BACKOFF);
                    pause
                }
            };
            let paused = stop.run_until_cancelled(tokio::time::sleep(pause)).await;
            if paused.is_none() {
                return;
            }
        }
    }

    /// Fetches, merges and acknowledges one batch.
    async fn step(&mut self) -> Result<Step, PullError> {
        let role = self.role.client()?;
        let batch = role.audit_batch(WAIT).await.map_err(egress::Error::from)?;
        let Some(batch) = batch else {
            return Ok(Step::Nothing);
        };
        let stream = batch.stream;
        let verdict = self.merge(batch).await?;
        let step = match verdict {
            EgressAuditVerdict::Stored { .. } => Step::Merged,
            _ => Step::Refused,
        };
        let ack = EgressAuditAck {
            version: API_VERSION,
            stream,
            verdict,
        };
        let acknowledged = role.acknowledge_audit(&ack).await;
        acknowledged.map_err(egress::Error::from)?;
        Ok(step)
    }

    async fn merge(&mut self, batch: EgressAuditBatch) -> Result<EgressAuditVerdict, PullError> {
        let (stream, instance) = (batch.stream, batch.instance);
        if batch.role != ROLE {
            return Err(PullError::OtherRole(batch.role));
        }
        self.accept(instance).await?;
        let links = links(stream, batch.records)?;
        let now = OffsetDateTime::now_utc();
        let refused = refusals(&self.db, ROLE, instance, &links, now).await?;
        if !refused.is_empty() {
            tracing::warn!(%stream, refused = refused.len(), "The git role sent audit records that it may not write.");
            return Ok(EgressAuditVerdict::Refused { records: refused });
        }
        let writer = StreamWriter::Role(ROLE, instance);
        match self.db.merge_records(writer, stream, &links).await? {
            MergeOutcome::Merged(head) => {
                // From now on this process knows what the database must have.
                self.audit.heads.committed(stream, head);
                Ok(EgressAuditVerdict::Stored { next: head.seq + 1 })
            }
            MergeOutcome::Repeated(last) => Ok(EgressAuditVerdict::Stored { next: last + 1 }),
            MergeOutcome::OutOfOrder { expected } => {
                tracing::warn!(%stream, expected, "The audit records of the git role are out of order.");
                Ok(EgressAuditVerdict::OutOfOrder { expected })
            }
            MergeOutcome::Foreign => Err(PullError::Foreign(stream)),
            MergeOutcome::TooManyStreams => Err(PullError::TooManyStreams),
        }
    }

    /// Accepts records of this instance. That another one takes a role's place is recorded first.
    async fn accept(&mut self, instance: Uuid) -> Result<(), PullError> {
        if self.instance == Some(instance) {
            return Ok(());
        }
        let known = self.db.role_instance(ROLE).await?;
        if known != Some(instance) {
            if let Some(known) = known {
                tracing::warn!(
                    %known,
                    %instance,
                    "Another instance of the git role answers; if nobody set it up anew, \
                     somebody has taken its place."
                );
            }
            let mut body = AuditBody::new(AuditKind::Event, INSTANCE_ACTION);
            body.subject = Some(subject(ROLE, instance));
            body.result = Some(AuditResult::Done);
            if let Some(known) = known {
                body.detail.insert("previous".to_owned(), json!(known));
            }
            self.audit.write_all(vec![body]).await?;
            self.db.set_role_instance(ROLE, instance).await?;
        }
        self.instance = Some(instance);
        Ok(())
    }
}
