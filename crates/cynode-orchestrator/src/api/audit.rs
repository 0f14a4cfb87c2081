//! The audit trail, for those who may read it.

use std::time::Duration;

use axum::{Json, body::Body as HttpBody, extract::State, response::Response};
use cynode_api::{
    AuditCheckpoints, AuditDecision, AuditPage, AuditVerifyLine, ErrorCode, JobId, Problem,
    SessionId, TaskId, event_limits,
};
use cynode_service::{ApiError, QueryParams};
use futures_util::{StreamExt as _, stream};
use http::header;
use serde::Deserialize;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::{sync::mpsc, time::Instant};
use utoipa::IntoParams;
use uuid::Uuid;

use crate::{Orchestrator, caller::Person, db::AuditFilter};

/// The poll interval of a waiting reader.
const POLL_INTERVAL: Duration = Duration::from_millis(300);
const MAX_TEXT_BYTES: usize = 200;
const MAX_TAIL: u32 = 1_000_000;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AuditQuery {
    /// The cursor of the last record that the reader has; 0 for all that are kept.
    after: Option<i64>,
    /// Instead of `after`: start this many records before the end.
    tail: Option<u32>,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    /// How long to wait for a record, up to 60,000.
    wait_ms: Option<u64>,
    task_id: Option<TaskId>,
    session_id: Option<SessionId>,
    job_id: Option<JobId>,
    call_id: Option<Uuid>,
    /// The name of a user, or the id of a user or a token.
    subject: Option<String>,
    #[param(value_type = Option<AuditDecision>)]
    decision: Option<String>,
    /// Such as `session.exec`.
    action: Option<String>,
    /// RFC 3339.
    since: Option<String>,
    until: Option<String>,
}

fn time(field: &str, text: Option<&String>) -> Result<Option<OffsetDateTime>, ApiError> {
    text.map(|text| OffsetDateTime::parse(text, &Rfc3339))
        .transpose()
        .map_err(|error| ApiError::invalid(format!("{field}: {error}")))
}

fn text(field: &str, text: Option<String>) -> Result<Option<String>, ApiError> {
    match text {
        Some(text) if text.len() > MAX_TEXT_BYTES || text.contains('\0') => Err(ApiError::invalid(
            format!("{field}: must be a text of at most {MAX_TEXT_BYTES} bytes"),
        )),
        text => Ok(text),
    }
}

/// List records in commit order. Administrators only, unless a policy allows others.
#[utoipa::path(get, path = "/v1/audit", tag = "audit", params(AuditQuery),
    responses((status = 200, body = AuditPage), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    QueryParams(query): QueryParams<AuditQuery>,
) -> Result<Json<AuditPage>, ApiError> {
    let limit = super::limit(query.limit)?;
    if query
        .wait_ms
        .is_some_and(|wait| wait > event_limits::MAX_WAIT_MS)
    {
        return Err(ApiError::invalid(format!(
            "wait_ms: must be at most {}",
            event_limits::MAX_WAIT_MS
        )));
    }
    if !query
        .decision
        .as_deref()
        .is_none_or(|decision| matches!(decision, "allow" | "deny"))
    {
        return Err(ApiError::invalid("decision: must be allow or deny"));
    }
    let filter = AuditFilter {
        task_id: query.task_id,
        session_id: query.session_id,
        job_id: query.job_id,
        call_id: query.call_id,
        subject: text("subject", query.subject)?,
        decision: query.decision,
        action: text("action", query.action)?,
        since: time("since", query.since.as_ref())?,
        until: time("until", query.until.as_ref())?,
    };
    let after = match (query.after, query.tail) {
        (Some(_), Some(_)) => return Err(ApiError::invalid("tail: can't be combined with after")),
        (Some(after), None) if after < 0 => {
            return Err(ApiError::invalid("after: must not be negative"));
        }
        (None, Some(tail)) if tail > MAX_TAIL => {
            return Err(ApiError::invalid(format!(
                "tail: must be at most {MAX_TAIL}"
            )));
        }
        (None, Some(tail)) => (orchestrator.db.audit_last().await? - i64::from(tail)).max(0),
        (after, None) => after.unwrap_or(0),
    };
    let between = orchestrator.db.audit_between(&filter).await?;
    let deadline = Instant::now() + Duration::from_millis(query.wait_ms.unwrap_or(0));
    loop {
        let page = orchestrator
            .db
            .audit_page(&filter, after, between, limit)
            .await?;
        if !page.items.is_empty() || Instant::now() >= deadline || orchestrator.stop.is_cancelled()
        {
            return Ok(Json(page));
        }
        tokio::time::sleep_until((Instant::now() + POLL_INTERVAL).min(deadline)).await;
    }
}

/// The signed checkpoints of the trail, one per line, and the public key that verifies them.
#[utoipa::path(get, path = "/v1/audit/checkpoints", tag = "audit",
    responses((status = 200, body = AuditCheckpoints), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn checkpoints(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
) -> Result<Response, ApiError> {
    // A failure before the first byte becomes a problem document; a later one aborts the response.
    let first = orchestrator.db.checkpoint_batch(0).await?;
    let begin = format!(
        "{{\"key\":{},\"items\":[",
        crate::db::to_json(&orchestrator.signer.checkpoints.key.public().to_text())
    );
    // The list grows with the trail, so it is streamed in batches.
    let lines = stream::try_unfold(Some((first, true)), move |state| {
        let orchestrator = orchestrator.clone();
        async move {
            let Some((lines, is_first)) = state else {
                return Ok::<_, std::io::Error>(None);
            };
            let Some((last, _)) = lines.last() else {
                return Ok(None);
            };
            let last = *last;
            let mut text = String::new();
            for (index, (_, line)) in lines.iter().enumerate() {
                if index > 0 || !is_first {
                    text.push(',');
                }
                text.push_str(&crate::db::to_json(line).to_string());
            }
            drop(lines);
            let next = orchestrator
                .db
                .checkpoint_batch(last)
                .await
                .map_err(|error| std::io::Error::other(error.to_string()))?;
            Ok(Some((text, Some((next, false)))))
        }
    });
    let (begin, end) = (
        stream::once(async move { Ok(begin) }),
        stream::once(async { Ok("]}".to_owned()) }),
    );
    let response = Response::builder()
        .header(header::CONTENT_TYPE, "application/json")
        .body(HttpBody::from_stream(begin.chain(lines).chain(end)));
    response.map_err(|_| ApiError::new(ErrorCode::Internal, "the answer could not be made"))
}

/// Verify the whole trail. Responds with lines of JSON: progress reports, and last the verdict.
#[utoipa::path(get, path = "/v1/audit/verify", tag = "audit",
    responses((status = 200, body = String, content_type = "application/x-ndjson"), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn verify(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
) -> Result<Response, ApiError> {
    let (progress_sender, progress_receiver) = mpsc::channel(16);
    let signer = orchestrator.signer.clone();
    let verifying = tokio::spawn(async move { signer.verify(progress_sender).await });
    let progress = stream::unfold(progress_receiver, async |mut progress_receiver| {
        progress_receiver
            .recv()
            .await
            .map(|(checked, of)| (AuditVerifyLine::Progress { checked, of }, progress_receiver))
    });
    let verdict = stream::once(async move {
        match verifying.await {
            Ok(Ok(verdict)) => Ok(AuditVerifyLine::Verdict { verdict }),
            Ok(Err(error)) => Err(std::io::Error::other(error.to_string())),
            Err(error) => Err(std::io::Error::other(error)),
        }
    });
    let lines = progress
        .map(Ok)
        .chain(verdict)
        .map(|line| line.map(|line| format!("{}\n", crate::db::to_json(&line))));
    let response = Response::builder()
        .header(header::CONTENT_TYPE, "application/x-ndjson")
        .body(HttpBody::from_stream(lines));
    response.map_err(|_| ApiError::new(ErrorCode::Internal, "the answer could not be made"))
}
