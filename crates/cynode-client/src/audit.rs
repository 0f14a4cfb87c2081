//! The audit trail: records, checkpoints and verification.

use std::time::Duration;

use bytes::BytesMut;
use cynode_api::{
    AuditCheckpoints, AuditDecision, AuditPage, AuditVerifyLine, JobId, SessionId, TaskId,
    event_limits,
};
use http::Method;
use reqwest::Response;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    Error, Result, UserClient,
    client::{check_status, display_url, send},
    user::query,
};

/// The longest line of a verification: a verdict with the maximum number of problems.
const MAX_LINE_BYTES: usize = 4 * 1024 * 1024;

/// The records to read; all by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    pub task: Option<TaskId>,
    pub session: Option<SessionId>,
    pub job: Option<JobId>,
    pub call: Option<String>,
    /// The name or id of the acting subject.
    pub subject: Option<String>,
    pub decision: Option<AuditDecision>,
    pub action: Option<String>,
    pub since: Option<OffsetDateTime>,
    pub until: Option<OffsetDateTime>,
}

/// A page of unparsed records. Hashes cover all members of a record, including those unknown to
/// this version.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RawAuditPage {
    pub items: Vec<Value>,
    /// Pass this as `after` to get the next page.
    pub next_cursor: i64,
    /// The page has fewer records than requested, but more follow.
    #[serde(default)]
    pub truncated: bool,
}

/// A verification in progress.
#[derive(Debug)]
pub struct AuditVerification {
    response: Response,
    url: String,
    pending: BytesMut,
    has_ended: bool,
}

impl AuditVerification {
    /// The next line; `None` after the verdict. A response without a verdict is an error.
    pub async fn next(&mut self) -> Result<Option<AuditVerifyLine>> {
        if self.has_ended {
            return Ok(None);
        }
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line = self.pending.split_to(end + 1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return self.parse(&line).map(Some);
            }
            if self.pending.len() > MAX_LINE_BYTES {
                return Err(Error::answer(
                    &self.url,
                    format!("a line is longer than {MAX_LINE_BYTES} bytes"),
                ));
            }
            match self
                .response
                .chunk()
                .await
                .map_err(|error| Error::broken(&self.url, error))?
            {
                Some(chunk) => self.pending.extend_from_slice(&chunk),
                None if self.pending.trim_ascii().is_empty() => {
                    return Err(Error::Broken {
                        url: self.url.clone(),
                        source: None,
                    });
                }
                None => {
                    let line = self.pending.split();
                    return self.parse(&line).map(Some);
                }
            }
        }
    }

    fn parse(&mut self, line: &[u8]) -> Result<AuditVerifyLine> {
        let line = serde_json::from_slice(line).map_err(|error| Error::answer(&self.url, error))?;
        self.has_ended = matches!(line, AuditVerifyLine::Verdict { .. });
        Ok(line)
    }
}

fn rfc3339(at: Option<OffsetDateTime>) -> Result<Option<String>> {
    at.map(|at| at.format(&Rfc3339))
        .transpose()
        .map_err(|error| Error::Setup(format!("can't format the time: {error}")))
}

impl UserClient {
    /// The records after a cursor, in order; waits for new ones up to `wait`.
    pub async fn audit(
        &self,
        after: i64,
        filter: &AuditFilter,
        wait: Duration,
    ) -> Result<AuditPage> {
        self.audit_page(after, filter, wait).await
    }

    /// The same, unparsed.
    pub async fn raw_audit(
        &self,
        after: i64,
        filter: &AuditFilter,
        wait: Duration,
    ) -> Result<RawAuditPage> {
        self.audit_page(after, filter, wait).await
    }

    async fn audit_page<T: DeserializeOwned>(
        &self,
        after: i64,
        filter: &AuditFilter,
        wait: Duration,
    ) -> Result<T> {
        let wait_ms = u64::try_from(wait.as_millis())
            .unwrap_or(u64::MAX)
            .min(event_limits::MAX_WAIT_MS);
        let query = query([
            ("after", Some(after.to_string())),
            ("limit", Some(event_limits::MAX_PAGE.to_string())),
            ("task_id", filter.task.map(|id| id.to_string())),
            ("session_id", filter.session.map(|id| id.to_string())),
            ("job_id", filter.job.map(|id| id.to_string())),
            ("call_id", filter.call.clone()),
            ("subject", filter.subject.clone()),
            (
                "decision",
                filter.decision.map(|decision| decision.as_str().to_owned()),
            ),
            ("action", filter.action.clone()),
            ("since", rfc3339(filter.since)?),
            ("until", rfc3339(filter.until)?),
            ("wait_ms", Some(wait_ms.to_string())),
        ]);
        self.0.get("/v1/audit", &query).await
    }

    /// The retained checkpoints and the key that verifies them.
    pub async fn audit_checkpoints(&self) -> Result<AuditCheckpoints> {
        self.0.get("/v1/audit/checkpoints", &()).await
    }

    /// Has the server verify the whole trail, without a timeout.
    pub async fn verify_audit(&self) -> Result<AuditVerification> {
        let response =
            check_status(send(self.0.request(Method::GET, "/v1/audit/verify")).await?).await?;
        Ok(AuditVerification {
            url: display_url(response.url()),
            response,
            pending: BytesMut::new(),
            has_ended: false,
        })
    }
}
