//! The callback of a job's own runner: `POST` of its status or its result to `CYNODE_CALLBACK_URL`.
//!
//! Invariants: only a job with a runner of its own accepts anything, and only until that runner has
//! exited; every process of the sandbox can call, so for other jobs any step could post a success.
//! The first result counts, and it is on disk before its caller is answered. It decides the outcome
//! together with the exit that the worker sees ([`judge`](super::foreign)).

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cynode_api::{
    JobId, JobProgress,
    document::{Bounds, JsonValue, get},
    sba::{
        JobResult, TodoSummary,
        limits::{MAX_RESULT_BYTES, MAX_RESULT_NODES},
    },
};
use http::{Method, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde::Deserialize;
use time::OffsetDateTime;

use super::{
    Jobs,
    document::{Document, DocumentError},
    plan::Plan,
    record::JobEntry,
    runner::shown_progress,
};
use crate::{
    journal::blocking,
    proxies::{ProxyPeer, ProxyRefusal, ProxyResponse},
};

/// The path of `CYNODE_CALLBACK_URL`.
pub(crate) const CALLBACK_PATH: &str = "/v1/job";
/// Time for all of a body.
const MAX_BODY_TIME: Duration = Duration::from_secs(60);
/// Pause between two pieces of a body.
const MAX_BODY_PAUSE: Duration = Duration::from_secs(10);
/// Violations of the format that an answer repeats, in characters.
const MAX_SHOWN_CHARACTERS: usize = 2_000;
/// A report of the status.
const STATUS_BOUNDS: Bounds = Bounds {
    bytes: 256 * 1024,
    nodes: 2_048,
    depth: 8,
};
/// Between reports of progress to the orchestrator.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// What a job with a runner of its own accepts.
#[derive(Debug)]
pub(super) struct OpenCallback {
    pub(super) plan: Plan,
    /// The time that the job may take.
    pub(super) limit: Duration,
}

/// How far the runner is.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StatusReport {
    #[serde(rename = "status")]
    _status: InProgress,
    step: Option<u64>,
    activity: Option<String>,
    todo: Option<TodoReport>,
    #[serde(default)]
    tokens: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum InProgress {
    InProgress,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TodoReport {
    total: u64,
    done: u64,
    open: Vec<String>,
}

#[derive(Debug)]
enum Report {
    Status(StatusReport),
    Result(Box<JobResult>),
}

impl Report {
    fn parse(json: &[u8]) -> Result<Self, String> {
        let read = (json.len() <= STATUS_BOUNDS.bytes)
            .then(|| JsonValue::read(json, STATUS_BOUNDS).ok())
            .flatten();
        let is_status = read.is_some_and(|read| match read {
            JsonValue::Object(members) => {
                get(&members, "status") == Some(&JsonValue::Text("in_progress".to_owned()))
            }
            _ => false,
        });
        if is_status {
            let report = serde_json::from_slice(json).map_err(|error| error.to_string())?;
            return Ok(Self::Status(report));
        }
        let result = JobResult::parse(json).map_err(|error| error.to_string())?;
        Ok(Self::Result(Box::new(result)))
    }
}

/// Why a report is not accepted.
fn not_allowed(message: &str) -> ProxyRefusal {
    ProxyRefusal::new(
        StatusCode::FORBIDDEN,
        "callback_not_allowed",
        message,
        "Only a job with a specification and a command of its own reports here; others report by \
         their exit or through cynode-sba.",
    )
}

fn has_ended() -> ProxyRefusal {
    ProxyRefusal::new(
        StatusCode::CONFLICT,
        "job_ended",
        "the job's runner has ended",
        "Report before the runner exits.",
    )
}

fn invalid(status: StatusCode, code: &'static str, message: &str) -> ProxyRefusal {
    let shown: String = message
        .chars()
        .take(MAX_SHOWN_CHARACTERS)
        .map(|shown| if shown.is_control() { '?' } else { shown })
        .collect();
    ProxyRefusal::new(
        status,
        code,
        shown,
        "POST a result of the job format, or {\"status\": \"in_progress\"}, as JSON.",
    )
}

fn not_stored(error: &std::io::Error) -> ProxyRefusal {
    ProxyRefusal::new(
        StatusCode::SERVICE_UNAVAILABLE,
        "unavailable",
        format!("the report could not be stored: {}", error.kind()),
        "Try again in a moment.",
    )
}

impl Jobs {
    /// Answers a request to the callback of a sandbox.
    pub(crate) async fn callback(
        self: &Arc<Self>,
        peer: &ProxyPeer,
        request: http::Request<Incoming>,
    ) -> ProxyResponse {
        match self.take_report(peer, request).await {
            Ok(()) => {
                let mut response = ProxyResponse::default();
                *response.status_mut() = StatusCode::NO_CONTENT;
                response
            }
            Err(refusal) => {
                tracing::debug!(
                    session_id = %peer.session_id,
                    request_id = peer.request_id,
                    code = refusal.code,
                    message = refusal.message,
                    "Refused a report to a job's callback."
                );
                let mut response = refusal.into_response(&peer.request_id);
                // What is left of the body is not read.
                let close = header::HeaderValue::from_static("close");
                response.headers_mut().insert(header::CONNECTION, close);
                response
            }
        }
    }

    async fn take_report(
        self: &Arc<Self>,
        peer: &ProxyPeer,
        request: http::Request<Incoming>,
    ) -> Result<(), ProxyRefusal> {
        if request.uri().path() != CALLBACK_PATH {
            let message = format!("only {CALLBACK_PATH} is served here");
            return Err(invalid(StatusCode::NOT_FOUND, "not_found", &message));
        }
        if request.method() != Method::POST {
            let status = StatusCode::METHOD_NOT_ALLOWED;
            return Err(invalid(
                status,
                "method_not_allowed",
                "only POST is served here",
            ));
        }
        let Some(job_id) = peer.job_id else {
            return Err(not_allowed("the sandbox belongs to a session"));
        };
        let entry = self.get(job_id).map_err(|_| has_ended())?;
        if entry.callback.lock().await.is_none() {
            return Err(closed(&entry));
        }
        // One body of a job arrives at a time.
        let _receiving = entry.receiving.lock().await;
        let files = self.files(job_id);
        let document = Document::new(files.directory(), MAX_RESULT_BYTES, MAX_RESULT_NODES);
        let reading = read_body(request.into_body(), document);
        let document = tokio::time::timeout(MAX_BODY_TIME, reading)
            .await
            .unwrap_or_else(|_| Err(too_slow()))?;
        let report = document.parse(Report::parse).await.map_err(refusal)?;
        // Keeps the end of the runner from being judged while its report is stored.
        let callback = entry.callback.lock().await;
        let Some(open) = callback.as_ref() else {
            return Err(closed(&entry));
        };
        match report {
            Report::Status(report) => {
                self.take_status(&entry, open, job_id, report);
                Ok(())
            }
            Report::Result(result) => {
                open.plan.check_result(&result, None).map_err(|reason| {
                    invalid(StatusCode::BAD_REQUEST, "invalid_request", &reason)
                })?;
                self.keep_report(job_id, &result).await
            }
        }
    }

    fn take_status(
        &self,
        entry: &JobEntry,
        open: &OpenCallback,
        job_id: JobId,
        report: StatusReport,
    ) {
        let steps = open.plan.steps.len() as u64;
        let progress = JobProgress {
            step: report.step,
            steps: Some(steps),
            activity: report.activity,
            remaining_seconds: 0,
            todo: report.todo.map(|todo| TodoSummary {
                total: todo.total,
                done: todo.done,
                open: todo.open,
            }),
            tokens: report.tokens,
        };
        let started_at = entry.job().started_at;
        let limit = time::Duration::try_from(open.limit).unwrap_or(time::Duration::MAX);
        let deadline = started_at
            .unwrap_or_else(OffsetDateTime::now_utc)
            .saturating_add(limit);
        let shown = shown_progress(progress, Some(steps));
        if entry.set_progress(shown, deadline, PROGRESS_INTERVAL) {
            self.announce(job_id);
        }
    }

    /// Stores the first result; the same one again is accepted, because an answer may be lost.
    async fn keep_report(&self, job_id: JobId, result: &JobResult) -> Result<(), ProxyRefusal> {
        let json = serde_json::to_vec(result)
            .map_err(|error| not_stored(&std::io::Error::other(error)))?;
        let files = self.files(job_id);
        let is_first_or_same = blocking(move || match files.reported()? {
            Some(earlier) => Ok(earlier == json),
            None => files.write_reported(&json).map(|()| true),
        });
        match is_first_or_same.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(ProxyRefusal::new(
                StatusCode::CONFLICT,
                "result_exists",
                "another result of this job was reported before",
                "Report one result, at the end.",
            )),
            Err(error) => Err(not_stored(&error)),
        }
    }
}

/// Why a job accepts nothing.
fn closed(entry: &JobEntry) -> ProxyRefusal {
    let record = entry.record();
    let has_own_runner = record.has_specification
        && record
            .request
            .as_ref()
            .is_some_and(|run| !run.sandbox.command.is_empty());
    if record.is_final() || has_own_runner {
        has_ended()
    } else if record.has_specification {
        not_allowed("the job is run by cynode-sba, which reports to the node itself")
    } else {
        not_allowed("the job has no specification, and its exit is its result")
    }
}

fn too_slow() -> ProxyRefusal {
    invalid(
        StatusCode::REQUEST_TIMEOUT,
        "request_timeout",
        "the body arrived too slowly",
    )
}

fn refusal(error: DocumentError) -> ProxyRefusal {
    match error {
        DocumentError::TooLarge { .. } => invalid(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too_large",
            &error.to_string(),
        ),
        DocumentError::Stored(error) => not_stored(&error),
        DocumentError::Invalid(reason) => {
            invalid(StatusCode::BAD_REQUEST, "invalid_request", &reason)
        }
    }
}

async fn read_body(mut body: Incoming, mut document: Document) -> Result<Document, ProxyRefusal> {
    loop {
        let frame = tokio::time::timeout(MAX_BODY_PAUSE, body.frame())
            .await
            .map_err(|_| too_slow())?;
        match frame {
            None => return Ok(document),
            Some(Ok(frame)) => {
                let piece = frame.into_data().unwrap_or_else(|_| Bytes::new());
                document.push(&piece).map_err(refusal)?;
            }
            Some(Err(_)) => {
                return Err(invalid(
                    StatusCode::BAD_REQUEST,
                    "invalid_request",
                    "the body broke off",
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::sba::FailureCode;

    use super::*;

    #[test]
    fn a_report_is_a_status_or_a_result_and_nothing_else() {
        let kind = |text: &str| match Report::parse(text.as_bytes()) {
            Ok(Report::Status(status)) => format!("step {:?}", status.step),
            Ok(Report::Result(result)) => format!("{:?}", result.status),
            Err(_) => "refused".to_owned(),
        };
        let failed = JobResult::failed(Some(JobId::generate()), FailureCode::StepFailed, "m");
        let failed = serde_json::to_string(&failed).expect("JSON");
        for (text, expected) in [
            (r#"{"status":"in_progress"}"#, "step None"),
            (
                r#"{"status":"in_progress","step":2,"activity":"a","tokens":3}"#,
                "step Some(2)",
            ),
            (r#"{"status":"in_progress","stp":2}"#, "refused"),
            (
                r#"{"status":"in_progress","status":"in_progress"}"#,
                "refused",
            ),
            (r#"{"status":"in_progress","step":-1}"#, "refused"),
            (r#"{"status":"done"}"#, "refused"),
            (failed.as_str(), "Failure"),
            ("[]", "refused"),
            ("", "refused"),
        ] {
            assert_eq!(kind(text), expected, "{text}");
        }
    }
}
