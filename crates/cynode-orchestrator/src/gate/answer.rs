//! What came of a call: read off its answer, and written before that goes out.

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
    facts,
    rules::{Effect, Rule},
};
use crate::{Orchestrator, audit::not_started};

/// An answer that is read for its record is at most so long.
const MAX_READ: u64 = 64 * 1024;
/// And a problem, with all that it lists.
const MAX_PROBLEM: usize = 4 * 1024 * 1024;
/// The longest event that is held together.
const MAX_EVENT: usize = 4 * 1024 * 1024;

/// A call that was begun. If its caller goes away before there is an outcome, somebody finds out what came of it.
#[derive(Debug)]
pub(crate) struct Begun {
    intent: Option<AuditBody>,
    /// Whether it was gone on with. As long as not, nothing was done.
    is_carried_out: bool,
    at: Instant,
    orchestrator: Orchestrator,
}

impl Begun {
    pub(crate) fn new(orchestrator: &Orchestrator, intent: AuditBody) -> Self {
        Self {
            intent: Some(intent),
            is_carried_out: false,
            at: Instant::now(),
            orchestrator: orchestrator.clone(),
        }
    }

    /// From here on only the node knows what came of it.
    pub(crate) fn carry_out(&mut self) {
        self.is_carried_out = true;
    }

    /// It was not gone on with: nothing was done. Says which call it was.
    pub(crate) async fn never(self) -> Option<uuid::Uuid> {
        let audit = self.orchestrator.audit.clone();
        let intent = self.ended()?;
        let call_id = intent.call_id;
        let outcome = AuditBody {
            decision: None,
            rules: Vec::new(),
            stage: Some("authenticate".to_owned()),
            ..not_started(intent)
        };
        // When that can't be waited for, it is written later.
        let _later = audit.outcome(outcome).await;
        call_id
    }

    /// The intent; its outcome is known now.
    fn ended(mut self) -> Option<AuditBody> {
        self.intent.take()
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        match self.intent.take() {
            Some(intent) if self.is_carried_out => {
                self.orchestrator.abandoned.leave(intent, self.at)
            }
            Some(intent) => self.orchestrator.audit.tell(not_started(intent)),
            None => {}
        }
    }
}

/// What an answer says of a call.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) status: u16,
    pub(crate) code: Option<String>,
    /// The rules that refused it.
    pub(crate) rules: Vec<String>,
    pub(crate) detail: Map<String, Value>,
}

impl Said {
    pub(crate) fn outcome(self, intent: AuditBody) -> AuditBody {
        // Some of it is decided only while a call is carried out, such as which image it may use.
        let denied = self.code.as_deref() == Some(ErrorCode::DeniedByPolicy.as_str());
        AuditBody {
            kind: AuditKind::Outcome,
            result: Some(AuditResult::of_status(self.status)),
            status: Some(self.status),
            code: self.code,
            detail: facts::bounded(self.detail),
            decision: denied.then_some(AuditDecision::Deny),
            stage: if denied {
                Some("policy".to_owned())
            } else {
                intent.stage.clone()
            },
            rules: self.rules,
            ..intent
        }
    }
}

/// Reads off an answer what the record says of it. What nodes say in a header is for the record only.
pub(crate) async fn read(response: Response) -> (Response, Said) {
    let mut response = response;
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
        .map(|error| &error.0);
    let mut code = problem.map(|problem| problem.code.clone());
    // A secret that was found only while the call was carried out: the record says where it was, as it does of others.
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
    // What somebody stored says of itself what it is; only a refusal is a problem, and only an answer of ours is read.
    let is_problem =
        !response.status().is_success() && kind.starts_with("application/problem+json");
    let is_stored =
        response.status().is_success() && response.headers().contains_key("x-content-sha256");
    let is_short = response
        .body()
        .size_hint()
        .upper()
        .is_some_and(|size| size <= MAX_READ)
        || is_problem;
    if code.is_none()
        && is_short
        && !is_stored
        && (is_problem || kind.starts_with("application/json"))
    {
        let (parts, body) = response.into_parts();
        let Ok(bytes) = axum::body::to_bytes(body, MAX_PROBLEM).await else {
            return (
                ApiError::new(ErrorCode::NodeUnreachable, "the answer broke off").into_response(),
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
                told(&members, &mut detail);
            }
        }
        // What is sent is what was read.
        let mut parts = parts;
        parts.headers.remove(header::CONTENT_LENGTH);
        response = Response::from_parts(parts, Body::from(bytes));
    }
    let status = response.status().as_u16();
    (
        response,
        Said {
            status,
            code,
            rules,
            detail,
        },
    )
}

/// What is said of an answer that was lost on its way.
fn lost() -> Said {
    Said {
        status: 503,
        code: Some(ErrorCode::NodeUnreachable.as_str().to_owned()),
        rules: Vec::new(),
        detail: Map::new(),
    }
}

/// What of an object that was made or changed the record says.
fn told(members: &Map<String, Value>, detail: &mut Map<String, Value>) {
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

/// Writes the outcome of a call, and lets its answer go.
pub(crate) async fn conclude(
    orchestrator: &Orchestrator,
    rule: &Rule,
    begun: Begun,
    response: Response,
) -> Response {
    if rule.action == Action::SessionExec && is_stream(&response) {
        let (mut parts, body) = response.into_parts();
        parts.headers.remove(RESULT_HEADER);
        return Response::from_parts(parts, exec_events(orchestrator.clone(), begun, body));
    }
    let (response, said) = read(response).await;
    let is = |code: ErrorCode| said.code.as_deref() == Some(code.as_str());
    let never_sent = response
        .extensions()
        .get::<ApiError>()
        .is_some_and(|error| error.0.extensions.get("sent") == Some(&Value::Bool(false)));
    // Behind the gate a token that is not good is one that was revoked while the call went on.
    if rule.effect == Effect::Node
        && (is(ErrorCode::NodeUnreachable) && !never_sent || is(ErrorCode::Unauthorized))
    {
        // Nobody knows whether it came there: the node is asked until it says so.
        return response;
    }
    let unknown = rule.effect != Effect::Node && is(ErrorCode::NodeUnreachable);
    if rule.action == Action::SessionExec
        && response.status() == StatusCode::ACCEPTED
        && let Some(intent) = &begun.intent
    {
        orchestrator.follow_exec(intent).await;
    }
    let Some(intent) = begun.ended() else {
        return response;
    };
    let call_id = intent.call_id;
    let mut outcome = said.outcome(intent);
    if never_sent {
        outcome.result = Some(AuditResult::NotStarted);
    } else if unknown {
        outcome.result = Some(AuditResult::Unknown);
    }
    match orchestrator.audit.outcome(outcome).await {
        Ok(()) => response,
        Err(_) => pending(call_id).into_response(),
    }
}

/// The answer to a call that was done, and whose outcome is not written yet.
fn pending(call_id: Option<uuid::Uuid>) -> ApiError {
    let mut error = ApiError::new(
        ErrorCode::OutcomePending,
        "the call was carried out or refused, and that can't be written down now",
    );
    error.0 = Box::new(error.0.with("call_id", call_id.map(|id| id.to_string())));
    error
}

fn is_stream(response: &Response) -> bool {
    response.status() == StatusCode::OK
        && response
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

struct Events {
    pieces: axum::body::BodyDataStream,
    held: BytesMut,
    begun: Option<Begun>,
    orchestrator: Orchestrator,
}

/// The events of a command, as they come; how it ended only when that is written.
fn exec_events(orchestrator: Orchestrator, begun: Begun, body: Body) -> Body {
    let events = Events {
        pieces: body.into_data_stream(),
        held: BytesMut::new(),
        begun: Some(begun),
        orchestrator,
    };
    Body::from_stream(stream::unfold(Some(events), async |events| {
        let mut events = events?;
        loop {
            if let Some(whole) = events.whole() {
                return match events.release(whole).await {
                    Ok(bytes) => Some((Ok(bytes), Some(events))),
                    Err(error) => Some((Err(error), None)),
                };
            }
            match events.pieces.next().await {
                Some(Ok(piece)) => events.held.extend_from_slice(&piece),
                Some(Err(error)) => return Some((Err(std::io::Error::other(error)), None)),
                None if events.held.is_empty() => return None,
                None => {
                    let rest = events.held.split().freeze();
                    return Some((Ok(rest), Some(events)));
                }
            }
        }
    }))
}

impl Events {
    /// Whole events that have come: all before the exit, or the exit.
    fn whole(&mut self) -> Option<Bytes> {
        let mut end = 0;
        while let Some(length) = find(&self.held[end..], b"\n\n") {
            if is_exit(&self.held[end..end + length]) {
                return Some(
                    self.held
                        .split_to(if end == 0 { length + 2 } else { end })
                        .freeze(),
                );
            }
            end += length + 2;
        }
        if end == 0 && self.held.len() > MAX_EVENT {
            end = self.held.len();
        }
        (end > 0).then(|| self.held.split_to(end).freeze())
    }

    async fn release(&mut self, bytes: Bytes) -> Result<Bytes, std::io::Error> {
        if is_exit(&bytes)
            && let Some(intent) = self.begun.take().and_then(Begun::ended)
        {
            let data = find(&bytes, b"data: ")
                .map(|at| &bytes[at + 6..])
                .unwrap_or_default();
            let mut detail: Map<String, Value> = serde_json::from_slice(data).unwrap_or_default();
            for name in ["seq", "at", "exit", "truncated"] {
                detail.remove(name);
            }
            let outcome = Said {
                status: 200,
                code: None,
                rules: Vec::new(),
                detail,
            }
            .outcome(intent);
            if self.orchestrator.audit.outcome(outcome).await.is_err() {
                return Err(std::io::Error::other(
                    "how it ended can't be written down now",
                ));
            }
        }
        Ok(bytes)
    }
}

fn is_exit(event: &[u8]) -> bool {
    event.starts_with(b"event: exit\n")
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    memchr::memmem::find(bytes, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_status_means_is_what_the_record_says() {
        let intent = AuditBody::new(AuditKind::Intent, "session.exec");
        for (status, result) in [
            (200, AuditResult::Done),
            (202, AuditResult::Done),
            (304, AuditResult::Done),
            (404, AuditResult::Refused),
            (503, AuditResult::Failed),
        ] {
            let outcome = Said {
                status,
                code: None,
                rules: Vec::new(),
                detail: Map::new(),
            }
            .outcome(intent.clone());
            assert_eq!(
                (outcome.kind, outcome.result, outcome.status),
                (AuditKind::Outcome, Some(result), Some(status))
            );
        }
    }
}
