//! A role's audit records, as orchestrators fetch them.

use std::time::Duration;

use cynode_api::{EgressAuditAck, EgressAuditBatch};
use http::{Method, StatusCode};

use crate::{
    GitRole, Result,
    client::{check_status, json, send},
};

/// The role reads or writes its disk, and waits for records.
const AUDIT_TIMEOUT: Duration = Duration::from_secs(30);

impl GitRole {
    /// The oldest records that are not acknowledged. If there are none, waits for some.
    pub async fn audit_batch(&self, wait: Duration) -> Result<Option<EgressAuditBatch>> {
        let wait_ms = wait.as_millis();
        let request = self
            .request(Method::GET, &format!("/v1/egress/audit?wait_ms={wait_ms}"))
            .timeout(wait + AUDIT_TIMEOUT);
        let response = send(request).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        json(response).await.map(Some)
    }

    /// Tells the role what was done with a batch.
    pub async fn acknowledge_audit(&self, ack: &EgressAuditAck) -> Result<()> {
        let request = self
            .request(Method::POST, "/v1/egress/audit/ack")
            .timeout(AUDIT_TIMEOUT)
            .json(ack);
        check_status(send(request).await?).await.map(drop)
    }
}
