//! One request for a computation, from its record to the end of its answer.
//!
//! Invariants: the request leaves the node only after it is recorded, and the end of its answer
//! only after its outcome is. A call ends with its sandbox, with its client, and at its limits of
//! time and size; ending it closes the connection to the server, which stops computing.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cynode_inference::{
    AnswerFormat, AnswerScan, AnswerScanner, Refusal, RefusalCode, UpstreamRequest,
    limits::MAX_DOCUMENT_BYTES,
};
use cynode_service::{json, telemetry::Chain};
use futures_util::stream;
use http::{HeaderValue, StatusCode, header};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use uuid::Uuid;

use super::{
    Admitted, Inference, ModelClient,
    backend::{Backend, read_bounded},
    events::UsageFilter,
    usage::OpenModelCall,
};
use crate::{
    audit::{DecisionOutcome, ModelCall, ModelUsage, NodeAction, NodeDecision, RecordError},
    proxies::{ProxyBody, ProxyResponse},
};

/// An answer of a model. Embeddings are the largest.
const MAX_ANSWER_BYTES: u64 = 256 * 1024 * 1024;
// The usage of every whole document is read.
const _: () = assert!(MAX_ANSWER_BYTES <= MAX_DOCUMENT_BYTES);
/// An error of the model server.
const MAX_ERROR_BYTES: usize = 64 * 1024;
/// What a sandbox reads of it, in characters.
const MAX_ERROR_CHARACTERS: usize = 500;
/// How long reading an error may take.
const ERROR_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn record_refused(error: RecordError) -> Refusal {
    let code = match error {
        RecordError::Unavailable => RefusalCode::AuditUnavailable,
        RecordError::ShareUsed => RefusalCode::AuditBacklogFull,
    };
    Refusal::new(code, error.to_string())
}

/// The body for a sandbox: pieces, or the error that breaks it off.
type RelayedPiece = Result<Bytes, std::io::Error>;

/// A computation that is about to leave the node.
pub(super) struct Computation {
    pub(super) inference: Arc<Inference>,
    pub(super) backend: Arc<Backend>,
    pub(super) client: ModelClient,
    pub(super) request: UpstreamRequest,
    /// The name of the model.
    pub(super) model: String,
    pub(super) _admitted: Admitted,
    /// The share of memory that the body takes until it is sent.
    pub(super) room: json::Room,
}

impl Computation {
    /// Runs the call. It goes on in a task of its own, which sees that its client has left.
    pub(super) async fn run(self) -> Result<ProxyResponse, Refusal> {
        let (head, answered) = oneshot::channel();
        tokio::spawn(Box::pin(self.drive(head)));
        answered.await.unwrap_or_else(|_| {
            let message = "the call was interrupted";
            Err(Refusal::new(RefusalCode::InferenceUnavailable, message))
        })
    }

    async fn drive(mut self, head: oneshot::Sender<Result<ProxyResponse, Refusal>>) {
        let call = ModelCall {
            call: Uuid::now_v7(),
            model: self.model.clone(),
            endpoint: self.request.endpoint.path(),
        };
        let intent = NodeDecision {
            sandbox: self.client.sandbox,
            action: NodeAction::ModelRequest(call.clone()),
            outcome: DecisionOutcome::Allowed,
        };
        if let Err(error) = self.inference.trail.record(intent).await {
            drop(head.send(Err(record_refused(error))));
            return;
        }
        let open = OpenCall {
            call,
            started: Instant::now(),
            status: None,
            usage: self
                .client
                .usage
                .as_ref()
                .map(super::usage::JobUsage::begin),
        };
        let body = self.request.body.take().unwrap_or_default();
        let sent = self.send(body);
        let mut head = head;
        let response = tokio::select! {
            response = sent => response,
            () = head.closed() => Err(Failure::client_gone()),
        };
        match response {
            Ok(response) => self.stream(open, response, head).await,
            Err(failure) => {
                let open = OpenCall {
                    status: failure.status,
                    ..open
                };
                let recorded = self
                    .finish(open, Some(failure.code), &AnswerScan::default())
                    .await;
                drop(head.send(Err(recorded.err().unwrap_or(failure.refusal))));
            }
        }
    }

    /// Sends the request, and waits for the beginning of a useful answer.
    fn send(
        &mut self,
        body: Vec<u8>,
    ) -> impl Future<Output = Result<reqwest::Response, Failure>> + Send + use<> {
        let limit = Duration::from_secs(self.inference.config.first_byte_seconds);
        let length = HeaderValue::from(body.len());
        let body = json::body(body.into(), std::mem::take(&mut self.room));
        let request = self
            .backend
            .computation(&self.request.endpoint.path())
            .header(header::CONTENT_LENGTH, length)
            .body(reqwest::Body::wrap_stream(body.into_data_stream()));
        let expected = self.request.answer;
        async move {
            let answered = tokio::time::timeout(limit, request.send()).await;
            let response = answered
                .map_err(|_| {
                    let seconds = limit.as_secs();
                    let message = format!("the model did not begin to answer within {seconds} s");
                    Failure::unavailable("timed_out", message, None)
                })?
                .map_err(|error| {
                    tracing::debug!(error = %Chain(&error.without_url()), "The model server failed.");
                    let message = "the node's model server does not answer";
                    Failure::unavailable("upstream_unreachable", message, None)
                })?;
            let status = response.status().as_u16();
            if response.status() != StatusCode::OK {
                return Err(Failure::of_error(response).await);
            }
            let format = response
                .headers()
                .get(header::CONTENT_TYPE)
                .and_then(|kind| AnswerFormat::of_content_type(kind.to_str().ok()?));
            if format != Some(expected) && format != Some(AnswerFormat::Json) {
                let message = "the model server's answer has another format than it should";
                return Err(Failure::unavailable(
                    "upstream_malformed",
                    message,
                    Some(status),
                ));
            }
            Ok(response)
        }
    }

    async fn stream(
        self,
        open: OpenCall,
        mut response: reqwest::Response,
        head: oneshot::Sender<Result<ProxyResponse, Refusal>>,
    ) {
        let open = OpenCall {
            status: Some(response.status().as_u16()),
            ..open
        };
        let kind = response.headers().get(header::CONTENT_TYPE).cloned();
        let kind = kind.unwrap_or(HeaderValue::from_static("application/json"));
        let format = kind.to_str().ok().and_then(AnswerFormat::of_content_type);
        let format = format.unwrap_or(AnswerFormat::Json);
        let (pieces, body) = mpsc::channel::<RelayedPiece>(1);
        let body = stream::unfold(body, async |mut body| {
            let piece = body.recv().await?;
            Some((piece, body))
        });
        let mut answer = ProxyResponse::new(ProxyBody::from_stream(body));
        answer
            .headers_mut()
            .insert(header::CONTENT_TYPE, content_type(format));
        if head.send(Ok(answer)).is_err() {
            let scan = AnswerScan::default();
            drop(self.finish(open, Some("client_gone"), &scan).await);
            return;
        }
        let drops_usage = format == AnswerFormat::Events && !self.request.asks_for_usage;
        let mut pump = Pump {
            pieces,
            scanner: AnswerScanner::new(format),
            filter: drops_usage.then(UsageFilter::default),
            idle: Duration::from_secs(self.inference.config.idle_seconds),
            deadline: open.started + Duration::from_secs(self.inference.config.request_seconds),
        };
        let mut end = pump.run(&mut response).await;
        // Closes the connection to the server, unless its answer is complete.
        drop(response);
        let Pump {
            pieces,
            scanner,
            filter,
            ..
        } = pump;
        let scan = scanner.finish();
        if end.is_none() && !scan.has_ended {
            end = Some(AnswerEnd::Incomplete);
        }
        if scan.is_external {
            self.backend.mark_external(&self.model).await;
        }
        let code = match (&end, scan.is_external) {
            (_, true) => Some("model_not_local"),
            (Some(end), false) => Some(end.code()),
            (None, false) => None,
        };
        let recorded = self.finish(open, code, &scan).await;
        let rest = filter.map(UsageFilter::finish).unwrap_or_default();
        if end.is_none() && recorded.is_ok() && !rest.is_empty() {
            drop(pieces.send(Ok(rest)).await);
        }
        let message = match (end, recorded) {
            (_, Err(refusal)) => refusal.message,
            (Some(AnswerEnd::ClientGone | AnswerEnd::Incomplete) | None, Ok(())) => return,
            (Some(end), Ok(())) => end.message(),
        };
        drop(pieces.send(broken_off(format, &message)).await);
    }

    /// Records the outcome, and counts the usage.
    async fn finish(
        &self,
        open: OpenCall,
        failure: Option<&str>,
        scan: &AnswerScan,
    ) -> Result<(), Refusal> {
        let duration = open.started.elapsed();
        let usage = ModelUsage {
            prompt_tokens: scan.usage.map(|usage| usage.prompt_tokens),
            completion_tokens: scan.usage.map(|usage| usage.completion_tokens),
            duration,
            status: open.status,
        };
        if let Some(job) = open.usage {
            job.end(&self.model, scan.usage, duration).await;
        }
        metrics::counter!(
            "cynode_model_calls_total", "outcome" => failure.unwrap_or("done").to_owned()
        )
        .increment(1);
        metrics::histogram!("cynode_model_call_seconds").record(duration.as_secs_f64());
        let outcome = failure.map_or(DecisionOutcome::Done, |code| DecisionOutcome::Failed {
            code: code.to_owned(),
        });
        let decision = NodeDecision {
            sandbox: self.client.sandbox,
            action: NodeAction::ModelOutcome {
                call: open.call,
                usage,
            },
            outcome,
        };
        let recorded = self.inference.trail.record(decision).await;
        recorded.map_err(record_refused)
    }
}

/// A call that has left the node.
struct OpenCall {
    call: ModelCall,
    started: Instant,
    /// The status of the server's answer.
    status: Option<u16>,
    /// Of a job.
    usage: Option<OpenModelCall>,
}

/// Why there is no answer.
struct Failure {
    /// For the record.
    code: &'static str,
    refusal: Refusal,
    status: Option<u16>,
}

impl Failure {
    fn unavailable(code: &'static str, message: impl Into<String>, status: Option<u16>) -> Self {
        Self {
            code,
            refusal: Refusal::new(RefusalCode::InferenceUnavailable, message),
            status,
        }
    }

    fn client_gone() -> Self {
        Self::unavailable("client_gone", "the client has hung up", None)
    }

    /// What an error of the server means to a sandbox.
    async fn of_error(response: reqwest::Response) -> Self {
        let status = response.status();
        let read = tokio::time::timeout(ERROR_TIMEOUT, read_bounded(response, MAX_ERROR_BYTES));
        let body = read
            .await
            .map_or_else(|_| Vec::new(), Result::unwrap_or_default);
        let told = error_text(&body);
        let with = |what: &str| match &told {
            Some(told) => format!("{what}: {told}"),
            None => what.to_owned(),
        };
        let is_about_the_request = matches!(status.as_u16(), 400 | 413 | 422);
        if is_about_the_request {
            let message = with("the model server does not accept the request");
            return Self {
                code: "upstream_refused",
                refusal: Refusal::new(RefusalCode::InvalidRequest, message),
                status: Some(status.as_u16()),
            };
        }
        let message = with(&format!(
            "the model server answered with {}",
            status.as_u16()
        ));
        Self::unavailable("upstream_failed", message, Some(status.as_u16()))
    }
}

/// The text of an error, without what names files and hosts of the server.
fn error_text(body: &[u8]) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    let error = &body["error"];
    let text = error.as_str().or_else(|| error["message"].as_str())?;
    let words = text.split_whitespace().map(|word| {
        if word.contains(['/', '\\', '@']) {
            "…"
        } else {
            word
        }
    });
    let text = words.collect::<Vec<_>>().join(" ");
    let plain = text.chars().filter(|c| !c.is_control());
    Some(plain.take(MAX_ERROR_CHARACTERS).collect())
}

const fn content_type(format: AnswerFormat) -> HeaderValue {
    HeaderValue::from_static(match format {
        AnswerFormat::Json => "application/json",
        AnswerFormat::Lines => "application/x-ndjson",
        AnswerFormat::Events => "text/event-stream",
    })
}

/// Why an answer ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnswerEnd {
    ClientGone,
    Idle(Duration),
    Late,
    TooLong,
    /// The server broke it off, or said that it failed.
    Broken,
    /// The server ended it without its proper end. The client sees that itself.
    Incomplete,
}

impl AnswerEnd {
    const fn code(self) -> &'static str {
        match self {
            Self::ClientGone => "client_gone",
            Self::Idle(_) | Self::Late => "timed_out",
            Self::TooLong => "too_large",
            Self::Broken | Self::Incomplete => "upstream_incomplete",
        }
    }

    fn message(self) -> String {
        match self {
            Self::Idle(limit) => {
                format!("the model has sent nothing for {} s", limit.as_secs())
            }
            Self::Late => "the answer took longer than an answer may".to_owned(),
            Self::TooLong => format!("the answer has more than {MAX_ANSWER_BYTES} bytes"),
            Self::ClientGone | Self::Broken | Self::Incomplete => {
                "the model server broke the answer off".to_owned()
            }
        }
    }
}

/// The last piece of an answer that is broken off: an error where clients look for it, or, in a
/// document, the end of the connection.
fn broken_off(format: AnswerFormat, message: &str) -> RelayedPiece {
    let error = serde_json::json!({ "error": message });
    match format {
        AnswerFormat::Lines => Ok(Bytes::from(format!("\n{error}\n"))),
        AnswerFormat::Events => {
            let error = serde_json::json!({ "error": { "message": message } });
            Ok(Bytes::from(format!("\n\ndata: {error}\n\n")))
        }
        AnswerFormat::Json => Err(std::io::Error::other(message.to_owned())),
    }
}

/// Carries an answer from the server to the client.
struct Pump {
    pieces: mpsc::Sender<RelayedPiece>,
    scanner: AnswerScanner,
    filter: Option<UsageFilter>,
    idle: Duration,
    deadline: Instant,
}

impl Pump {
    /// Returns why the answer ended early, if it did.
    async fn run(&mut self, response: &mut reqwest::Response) -> Option<AnswerEnd> {
        let mut size = 0;
        loop {
            let limit = self.deadline.min(Instant::now() + self.idle);
            let piece = tokio::select! {
                piece = tokio::time::timeout_at(limit, response.chunk()) => piece,
                () = self.pieces.closed() => return Some(AnswerEnd::ClientGone),
            };
            let piece = match piece {
                Err(_) if limit == self.deadline => return Some(AnswerEnd::Late),
                Err(_) => return Some(AnswerEnd::Idle(self.idle)),
                Ok(Err(_)) => return Some(AnswerEnd::Broken),
                Ok(Ok(None)) => return None,
                Ok(Ok(Some(piece))) => piece,
            };
            size += piece.len() as u64;
            if size > MAX_ANSWER_BYTES {
                return Some(AnswerEnd::TooLong);
            }
            self.scanner.push(&piece);
            let piece = match &mut self.filter {
                Some(filter) => filter.push(&piece),
                None => piece,
            };
            if piece.is_empty() {
                continue;
            }
            // A slow reader blocks its own answer only, within the time for all of it.
            match tokio::time::timeout_at(self.deadline, self.pieces.send(Ok(piece))).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Some(AnswerEnd::ClientGone),
                Err(_) => return Some(AnswerEnd::Late),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_server_are_told_without_its_files_and_hosts() {
        let told = |body: &str| error_text(body.as_bytes());
        assert_eq!(
            told(r#"{"error": "\"m\" does not support tools"}"#).as_deref(),
            Some("\"m\" does not support tools")
        );
        assert_eq!(
            told(r#"{"error": {"message": "can't open /var/lib/m at http://10.0.0.1:1 x@y"}}"#)
                .as_deref(),
            Some("can't open … at … …")
        );
        let long = format!(r#"{{"error": "{}"}}"#, "x".repeat(10_000));
        assert_eq!(
            told(&long).map(|told| told.len()),
            Some(MAX_ERROR_CHARACTERS)
        );
        for none in ["", "x", "[]", r#"{"error": 1}"#] {
            assert_eq!(told(none), None);
        }
    }
}
