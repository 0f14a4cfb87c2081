//! An open call: writes its intent, derives its outcome from the answer, and records it before the
//! answer is sent.

use std::time::Instant;

use axum::{
    body::{Body, HttpBody as _},
    response::{IntoResponse as _, Response},
};
use bytes::{Bytes, BytesMut};
use cynode_api::{AuditBody, AuditDecision, AuditKind, AuditResult, ErrorCode, RESULT_HEADER};
use cynode_policy::Action;
use cynode_service::ApiError;
use futures_util::{StreamExt as _, stream};
use http::{StatusCode, header};
use serde_json::{Map, Value, json};

use super::{
    Stage, detail,
    routes::{Effect, RouteSpec},
};
use crate::{Orchestrator, audit::not_started};

/// Longer answers are not parsed for the record.
const MAX_RECORDED_ANSWER_BYTES: u64 = 64 * 1024;
/// Bounds a problem document, including what it lists.
const MAX_PROBLEM: usize = 4 * 1024 * 1024;
/// Longer events are forwarded in pieces.
const MAX_EVENT: usize = 4 * 1024 * 1024;

/// A call whose intent is recorded and whose outcome is not. If its caller disconnects before the
/// outcome is known, a background task determines it.
#[derive(Debug)]
pub(crate) struct OpenCall {
    intent: Option<AuditBody>,
    /// Whether the handler was called. Until then the call has had no effect.
    is_started: bool,
    opened_at: Instant,
    orchestrator: Orchestrator,
}

impl OpenCall {
    /// Writes the intent, which opens the call.
    pub(crate) async fn open(
        orchestrator: &Orchestrator,
        intent: AuditBody,
    ) -> Result<Self, ApiError> {
        orchestrator.audit.intent(intent.clone()).await?;
        Ok(Self {
            intent: Some(intent),
            is_started: false,
            opened_at: Instant::now(),
            orchestrator: orchestrator.clone(),
        })
    }

    /// Marks the call as started: from here on only the node knows its outcome.
    pub(crate) fn start(&mut self) {
        self.is_started = true;
    }

    /// Records that the call was not started, and returns its id.
    pub(crate) async fn abort(self) -> Option<uuid::Uuid> {
        let audit = self.orchestrator.audit.clone();
        let intent = self.close()?;
        let call_id = intent.call_id;
        let outcome = AuditBody {
            decision: None,
            rules: Vec::new(),
            stage: Some(Stage::Authenticate.as_str().to_owned()),
            ..not_started(intent)
        };
        // The writer retries in the background if this fails.
        let _written_later = audit.outcome(outcome).await;
        call_id
    }

    /// Records the outcome of the call and releases its answer.
    pub(crate) async fn conclude(self, route: &RouteSpec, response: Response) -> Response {
        if route.action == Action::SessionExec && is_stream(&response) {
            let (mut parts, body) = response.into_parts();
            parts.headers.remove(RESULT_HEADER);
            return Response::from_parts(parts, exec_events(self, body));
        }
        let (response, outcome) = read(response).await;
        let is = |code: ErrorCode| outcome.code.as_deref() == Some(code.as_str());
        let never_sent = response
            .extensions()
            .get::<ApiError>()
            .is_some_and(|error| error.extensions.get("sent") == Some(&Value::Bool(false)));
        // Behind the gate, `unauthorized` means that the token was revoked during the call.
        if route.effect == Effect::Node
            && (is(ErrorCode::NodeUnreachable) && !never_sent || is(ErrorCode::Unauthorized))
        {
            // The node may or may not have received the call. Dropping the open call lets a
            // background task ask the node until it knows.
            return response;
        }
        let unknown = route.effect != Effect::Node && is(ErrorCode::NodeUnreachable);
        let orchestrator = self.orchestrator.clone();
        if route.action == Action::SessionExec
            && response.status() == StatusCode::ACCEPTED
            && let Some(intent) = &self.intent
        {
            orchestrator.follow_exec(intent).await;
        }
        let Some(intent) = self.close() else {
            return response;
        };
        let call_id = intent.call_id;
        let mut record = outcome.record(intent);
        if never_sent {
            record.result = Some(AuditResult::NotStarted);
        } else if unknown {
            record.result = Some(AuditResult::Unknown);
        }
        match orchestrator.audit.outcome(record).await {
            Ok(()) => response,
            Err(_) => pending(call_id).into_response(),
        }
    }

    /// Takes the intent, because the outcome is known.
    fn close(mut self) -> Option<AuditBody> {
        self.intent.take()
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        match self.intent.take() {
            Some(intent) if self.is_started => {
                self.orchestrator.abandoned.add(intent, self.opened_at);
            }
            Some(intent) => self
                .orchestrator
                .audit
                .enqueue_detached(not_started(intent)),
            None => {}
        }
    }
}

/// The outcome of a call, as its answer states it.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) status: u16,
    pub(crate) code: Option<String>,
    /// The rules that denied it.
    pub(crate) rules: Vec<String>,
    pub(crate) detail: Map<String, Value>,
}

impl Outcome {
    /// The audit record of the outcome.
    pub(crate) fn record(self, intent: AuditBody) -> AuditBody {
        // Handlers decide some things late, such as which image a call may use.
        let denied = self.code.as_deref() == Some(ErrorCode::DeniedByPolicy.as_str());
        AuditBody {
            kind: AuditKind::Outcome,
            result: Some(AuditResult::from_status(self.status)),
            status: Some(self.status),
            code: self.code,
            detail: detail::bounded(self.detail),
            decision: denied.then_some(AuditDecision::Deny),
            stage: if denied {
                Some(Stage::Policy.as_str().to_owned())
            } else {
                intent.stage.clone()
            },
            rules: self.rules,
            ..intent
        }
    }
}

/// Derives the outcome from an answer. The node's result header is for the record only and is
/// removed.
pub(crate) async fn read(mut response: Response) -> (Response, Outcome) {
    let mut detail = Map::new();
    if let Some(result) = response.headers_mut().remove(RESULT_HEADER)
        && let Ok(Value::Object(members)) = serde_json::from_slice(result.as_bytes())
    {
        detail = members;
    }
    for (header, name) in [
        ("x-content-sha256", "sha256"),
        ("x-artifact-id", "artifact_id"),
        ("x-artifact-version", "version"),
    ] {
        if let Some(value) = response
            .headers()
            .get(header)
            .and_then(|value| value.to_str().ok())
        {
            detail.entry(name).or_insert_with(|| json!(value));
        }
    }
    let problem = response
        .extensions()
        .get::<ApiError>()
        .map(|error| &**error);
    let mut code = problem.map(|problem| problem.code.clone());
    // A secret found by the handler is recorded by its place, as one found by the gate is.
    if let Some(problem) = problem.filter(|problem| problem.is(ErrorCode::SecretInInput)) {
        for name in ["field", "path", "what"] {
            detail.extend(
                problem
                    .extensions
                    .get(name)
                    .map(|value| (name.to_owned(), value.clone())),
            );
        }
    }
    let rules = problem
        .and_then(|problem| problem.extensions.get("rules"))
        .and_then(|rules| serde_json::from_value(rules.clone()).ok())
        .unwrap_or_default();
    let kind = response
        .headers()
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    // Stored content has a content type of its uploader's choice: it is neither parsed nor taken
    // for a problem document.
    let is_problem =
        !response.status().is_success() && kind.starts_with("application/problem+json");
    let is_stored =
        response.status().is_success() && response.headers().contains_key("x-content-sha256");
    let is_short = response
        .body()
        .size_hint()
        .upper()
        .is_some_and(|size| size <= MAX_RECORDED_ANSWER_BYTES)
        || is_problem;
    if code.is_none()
        && is_short
        && !is_stored
        && (is_problem || kind.starts_with("application/json"))
    {
        let (parts, body) = response.into_parts();
        let Ok(bytes) = axum::body::to_bytes(body, MAX_PROBLEM).await else {
            return (
                ApiError::new(
                    ErrorCode::NodeUnreachable,
                    "the connection to the node broke during the answer",
                )
                .into_response(),
                lost(),
            );
        };
        if let Ok(Value::Object(members)) = serde_json::from_slice(&bytes) {
            if is_problem {
                code = members
                    .get("code")
                    .and_then(Value::as_str)
                    .map(str::to_owned);
            } else {
                describe_object(&members, &mut detail);
            }
        }
        let mut parts = parts;
        parts.headers.remove(header::CONTENT_LENGTH);
        response = Response::from_parts(parts, Body::from(bytes));
    }
    let status = response.status().as_u16();
    (
        response,
        Outcome {
            status,
            code,
            rules,
            detail,
        },
    )
}

/// The outcome of a call whose answer was lost.
fn lost() -> Outcome {
    Outcome {
        status: 503,
        code: Some(ErrorCode::NodeUnreachable.as_str().to_owned()),
        rules: Vec::new(),
        detail: Map::new(),
    }
}

/// Copies the identifying fields of a created or changed object into the record.
fn describe_object(members: &Map<String, Value>, detail: &mut Map<String, Value>) {
    for name in [
        "id",
        "session_id",
        "job_id",
        "exec_id",
        "state",
        "node_id",
        "image_ref",
        "image_digest",
        "revision",
        "sha256",
        "size",
        "version",
        "path",
        "kind",
        "expires_at",
        "exit_code",
        "flagged",
        "flagged_total",
    ] {
        if let Some(value) = members.get(name).filter(|value| !value.is_null()) {
            detail.entry(name).or_insert_with(|| value.clone());
        }
    }
}

/// The answer to a call whose outcome is known but not yet recorded.
fn pending(call_id: Option<uuid::Uuid>) -> ApiError {
    let mut error = ApiError::new(
        ErrorCode::OutcomePending,
        "the call ended, but its outcome can't be recorded now",
    );
    error = error.with("call_id", call_id.map(|id| id.to_string()));
    error
}

fn is_stream(response: &Response) -> bool {
    response.status() == StatusCode::OK
        && response
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

struct ExecEvents {
    pieces: axum::body::BodyDataStream,
    buffer: BytesMut,
    call: Option<OpenCall>,
    orchestrator: Orchestrator,
}

/// Streams the events of a command. The exit event is held back until the outcome is recorded.
fn exec_events(call: OpenCall, body: Body) -> Body {
    let events = ExecEvents {
        pieces: body.into_data_stream(),
        buffer: BytesMut::new(),
        orchestrator: call.orchestrator.clone(),
        call: Some(call),
    };
    Body::from_stream(stream::unfold(Some(events), async |events| {
        let mut events = events?;
        loop {
            if let Some(complete) = events.next_complete() {
                return match events.release(complete).await {
                    Ok(bytes) => Some((Ok(bytes), Some(events))),
                    Err(error) => Some((Err(error), None)),
                };
            }
            match events.pieces.next().await {
                Some(Ok(piece)) => events.buffer.extend_from_slice(&piece),
                Some(Err(error)) => return Some((Err(std::io::Error::other(error)), None)),
                None if events.buffer.is_empty() => return None,
                None => {
                    let rest = events.buffer.split().freeze();
                    return Some((Ok(rest), Some(events)));
                }
            }
        }
    }))
}

impl ExecEvents {
    /// Takes the complete events from the buffer: all before the exit event, or the exit event.
    fn next_complete(&mut self) -> Option<Bytes> {
        let mut end = 0;
        while let Some(length) = find(&self.buffer[end..], b"\n\n") {
            if is_exit(&self.buffer[end..end + length]) {
                return Some(
                    self.buffer
                        .split_to(if end == 0 { length + 2 } else { end })
                        .freeze(),
                );
            }
            end += length + 2;
        }
        if end == 0 && self.buffer.len() > MAX_EVENT {
            end = self.buffer.len();
        }
        (end > 0).then(|| self.buffer.split_to(end).freeze())
    }

    async fn release(&mut self, bytes: Bytes) -> Result<Bytes, std::io::Error> {
        if is_exit(&bytes)
            && let Some(intent) = self.call.take().and_then(OpenCall::close)
        {
            let data = find(&bytes, b"data: ")
                .map(|at| &bytes[at + 6..])
                .unwrap_or_default();
            let mut detail: Map<String, Value> = serde_json::from_slice(data).unwrap_or_default();
            for name in ["seq", "at", "exit", "truncated"] {
                detail.remove(name);
            }
            let outcome = Outcome {
                status: 200,
                code: None,
                rules: Vec::new(),
                detail,
            }
            .record(intent);
            if self.orchestrator.audit.outcome(outcome).await.is_err() {
                return Err(std::io::Error::other(
                    "the outcome of the command can't be recorded now",
                ));
            }
        }
        Ok(bytes)
    }
}

fn is_exit(event: &[u8]) -> bool {
    event.starts_with(b"event: exit\n")
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    memchr::memmem::find(bytes, needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_the_result_that_its_status_implies() {
        let intent = AuditBody::new(AuditKind::Intent, "session.exec");
        for (status, result) in [
            (200, AuditResult::Done),
            (202, AuditResult::Done),
            (304, AuditResult::Done),
            (404, AuditResult::Refused),
            (503, AuditResult::Failed),
        ] {
            let outcome = Outcome {
                status,
                code: None,
                rules: Vec::new(),
                detail: Map::new(),
            }
            .record(intent.clone());
            assert_eq!(
                (outcome.kind, outcome.result, outcome.status),
                (AuditKind::Outcome, Some(result), Some(status))
            );
        }
    }
}
