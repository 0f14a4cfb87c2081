//! Carrying out what a tool call became, and making its result.

use axum::{
    body::{Body, BodyDataStream},
    response::Response,
};
use cynode_api::{
    AuditBody, AuditDecision, AuditKind, AuditResult, Base64Bytes, ErrorCode, Problem, TaskId,
};
use cynode_service::{ApiError, compute, json};
use futures_util::StreamExt as _;
use http::{Method, Request, StatusCode, header};
use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::{Value, json};
use tower::ServiceExt as _;
use uuid::Uuid;

use super::{
    Asked, ByTool, Gateway,
    plan::{Call, Part, Plan, Shape},
    text,
    tools::Tool,
};
use crate::turns::Turns;

/// The longest answer that becomes a result. Pages of output, listings and searches have half of that.
const MAX_ANSWER: usize = 8 * 1024 * 1024;
/// Answers that are read at once, each of them whole; others wait for their turn.
const ANSWERS_AT_ONCE: usize = 16;
static ANSWERS: Turns = Turns::new(ANSWERS_AT_ONCE);

/// Where in the gate a call was refused: goes with its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stage(pub(crate) &'static str);

/// A tool call that came to no good end.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) stage: &'static str,
    pub(super) error: ApiError,
    /// Whether the gate has written it down.
    pub(super) is_recorded: bool,
}

impl Failed {
    /// One that nobody but the gateway knows of.
    fn here(stage: &'static str, error: ApiError) -> Self {
        Self {
            stage,
            error,
            is_recorded: false,
        }
    }

    pub(super) fn result(self, asked: &Asked<'_>) -> CallToolResult {
        let request_id = asked.request_id;
        let Problem {
            status,
            code,
            detail,
            remedy,
            extensions,
            ..
        } = *self.error.0;
        if status >= 500 {
            tracing::warn!(request_id, code, detail, "A tool failed.");
        }
        let mut failure = json!({"code": code, "stage": self.stage, "message": detail, "remedy": remedy, "request_id": request_id});
        if let Value::Object(members) = &mut failure {
            // What belongs to one code, such as the hunks that do not apply.
            for (name, value) in extensions {
                members.entry(name).or_insert(value);
            }
        }
        let told = format!("{code} ({}): {detail}\n{remedy}", self.stage);
        let mut answer =
            CallToolResult::error(vec![ContentBlock::text(text::of(&json!({ "text": told })))]);
        answer.structured_content = Some(failure);
        answer
    }
}

/// A call that was refused before there was a call of the user API.
#[derive(Debug)]
pub(super) struct Refused<'a> {
    pub(super) tool: &'a str,
    pub(super) stage: &'static str,
    pub(super) error: ApiError,
    /// As far as the arguments name one.
    pub(super) task_id: Option<TaskId>,
}

impl Gateway {
    pub(super) async fn run(
        &self,
        asked: &Asked<'_>,
        tool: &'static Tool,
        plan: Plan,
    ) -> Result<Value, Failed> {
        match plan {
            Plan::Call(call) => self.call(asked, tool, call).await,
            Plan::Answer(answer) => {
                self.note_answer(asked, tool)
                    .await
                    .map_err(|error| Failed {
                        stage: "audit",
                        error,
                        is_recorded: true,
                    })?;
                Ok(answer)
            }
            Plan::NewTask(mut new) => {
                new.project_id = new.project_id.or(asked.caller.project_id);
                let call = Call::new(Method::POST, "/v1/tasks", None)
                    .json(&new)
                    .map_err(|error| Failed::here("arguments", error))?;
                self.call(asked, tool, call).await
            }
            Plan::OwnProject(task) => {
                let of = self
                    .call(asked, tool, Call::get(format!("/v1/tasks/{task}"), task))
                    .await?;
                let missing =
                    || ApiError::new(ErrorCode::NotFound, format!("task {task} has no project"));
                let id = of["project_id"]
                    .as_str()
                    .ok_or_else(|| Failed::here("run", missing()))?;
                self.call(asked, tool, Call::get(format!("/v1/projects/{id}"), task))
                    .await
            }
            Plan::LastOutput(call) => {
                let (mut last, mut cursor) = (None, None);
                loop {
                    let execs = self
                        .call(
                            asked,
                            tool,
                            Call::get(call.path.clone(), call.task).query("cursor", cursor.take()),
                        )
                        .await?;
                    let started =
                        execs["items"]
                            .as_array()
                            .into_iter()
                            .flatten()
                            .filter_map(|exec| {
                                Some((exec["started_at"].as_str()?, exec["exec_id"].as_str()?))
                            });
                    let newest = started.max().map(|(at, id)| (at.to_owned(), id.to_owned()));
                    last = last.max(newest);
                    cursor = execs["next_cursor"].as_str().map(str::to_owned);
                    if cursor.is_none() {
                        break;
                    }
                }
                let missing = || {
                    ApiError::new(
                        ErrorCode::ExecNotFound,
                        "no command has been run in this sandbox",
                    )
                };
                let (_, id) = last.ok_or_else(|| Failed::here("run", missing()))?;
                let path = format!("{}/{id}/output", call.path);
                self.call(asked, tool, Call { path, ..call }).await
            }
            Plan::Missing(task, remedy) => {
                // Whether the caller is good for the task is found out first.
                self.call(asked, tool, Call::get(format!("/v1/tasks/{task}"), task))
                    .await?;
                let error = ApiError::new(
                    ErrorCode::Unavailable,
                    format!(
                        "{} needs a service that this system does not have yet",
                        tool.name
                    ),
                );
                Err(Failed::here(
                    "run",
                    ApiError(Box::new(error.0.with_remedy(remedy))),
                ))
            }
        }
    }

    /// A call of the user API, in the caller's name.
    async fn call(
        &self,
        asked: &Asked<'_>,
        tool: &'static Tool,
        call: Call,
    ) -> Result<Value, Failed> {
        let broken = |_| {
            Failed::here(
                "arguments",
                ApiError::invalid("what is named is too long for an address"),
            )
        };
        let mut request = Request::builder()
            .method(call.method.clone())
            .uri(call.uri())
            .body(Body::from(call.body))
            .map_err(broken)?;
        let headers = request.headers_mut();
        for (name, value) in call.headers {
            headers.insert(name, value);
        }
        if let Some(id) = asked.request_id.and_then(|id| id.parse().ok()) {
            headers.insert("x-request-id", id);
        }
        request.extensions_mut().insert(asked.caller.clone());
        request.extensions_mut().insert(ByTool {
            name: tool.name,
            task: call.task,
        });
        let Ok(response) = self.routes.clone().oneshot(request).await;
        let response = response.map(|body| ANSWERS.body(asked.caller.id(), body));
        if response.status().is_success() {
            return shaped(response, call.shape).await.map_err(|error| Failed {
                stage: "run",
                error,
                is_recorded: true,
            });
        }
        let stage = response.extensions().get::<Stage>().map(|stage| stage.0);
        let error = problem(response).await;
        let stage = match stage {
            // Whether something is not there or not theirs is for the record alone.
            Some(_) if error.0.status == 404 => "task",
            Some(stage) => stage,
            None => stage_of(&error),
        };
        Err(Failed {
            stage,
            error,
            is_recorded: true,
        })
    }
}

/// Where a call was refused that came as far as being carried out.
fn stage_of(error: &ApiError) -> &'static str {
    let is = |code: ErrorCode| error.0.is(code);
    if is(ErrorCode::DeniedByPolicy) || is(ErrorCode::ImageNotAllowed) {
        "policy"
    } else if is(ErrorCode::InvalidRequest) || is(ErrorCode::TooLarge) {
        "arguments"
    } else if is(ErrorCode::QuotaExceeded) {
        "limits"
    } else if is(ErrorCode::SecretInInput) {
        "secrets"
    } else {
        "run"
    }
}

/// The problem that an answer is.
async fn problem(response: Response) -> ApiError {
    if let Some(error) = response.extensions().get::<ApiError>() {
        return error.clone();
    }
    let status = response.status();
    let bytes = axum::body::to_bytes(response.into_body(), MAX_ANSWER)
        .await
        .unwrap_or_default();
    match serde_json::from_slice::<Problem>(&bytes) {
        Ok(problem) => problem.into(),
        Err(_) => ApiError::new(
            ErrorCode::Internal,
            format!("an answer with status {status} could not be read"),
        ),
    }
}

/// The result that an answer becomes.
async fn shaped(response: Response, shape: Shape) -> Result<Value, ApiError> {
    match shape {
        Shape::Object => object(response).await,
        Shape::Preference(key) => {
            let list = object(response).await?;
            let found = list["items"]
                .as_array()
                .and_then(|items| items.iter().find(|item| item["key"] == key.as_str()))
                .cloned();
            found.ok_or_else(|| {
                ApiError::new(ErrorCode::NotFound, "the scope has no such preference")
            })
        }
        Shape::File(part) => file(response, part).await,
    }
}

async fn object(response: Response) -> Result<Value, ApiError> {
    if response.status() == StatusCode::NO_CONTENT {
        return Ok(json!({}));
    }
    let bytes = axum::body::to_bytes(response.into_body(), MAX_ANSWER)
        .await
        .map_err(|error| too_long(&error))?;
    if bytes.is_empty() {
        return Ok(json!({}));
    }
    let mut scan = json::Scan::up_to(usize::MAX);
    scan.feed(&bytes)?;
    let _room = json::room(bytes.len(), scan.nodes()).await;
    let read = compute::apart(bytes.len(), || serde_json::from_slice(&bytes)).await;
    read.map_err(|error| {
        ApiError::new(
            ErrorCode::Internal,
            format!("an answer could not be read: {error}"),
        )
    })
}

/// An answer that can't be taken whole. What was asked for has been done.
fn too_long(error: &axum::Error) -> ApiError {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        if error.is::<http_body_util::LengthLimitError>() {
            let error = ApiError::new(
                ErrorCode::TooLarge,
                format!(
                    "the answer is longer than {MAX_ANSWER} bytes; what was asked for was done"
                ),
            );
            return ApiError(Box::new(error.0.with_remedy(
                "Ask for less: a smaller limit, max_bytes or max_output_bytes.",
            )));
        }
        cause = error.source();
    }
    broke_off()
}

fn broke_off() -> ApiError {
    ApiError::new(ErrorCode::NodeUnreachable, "the answer broke off")
}

async fn file(response: Response, part: Part) -> Result<Value, ApiError> {
    let (parts, body) = response.into_parts();
    let text = |name: &str| {
        parts
            .headers
            .get(name)
            .and_then(|value| value.to_str().ok())
    };
    let (sha256, size) = (
        text("x-content-sha256"),
        text(header::CONTENT_LENGTH.as_str()).and_then(|size| size.parse::<u64>().ok()),
    );
    let (bytes, truncated) = taken(body.into_data_stream(), part).await?;
    let mut result = json!({"sha256": sha256, "size": size, "truncated": truncated});
    match as_text(bytes, truncated) {
        Ok(text) => result["content"] = text.into(),
        Err(bytes) => {
            result["content_b64"] = serde_json::to_value(Base64Bytes(bytes)).unwrap_or_default()
        }
    }
    Ok(result)
}

/// Text, when it is; a letter that the end cuts through is left out.
fn as_text(bytes: Vec<u8>, truncated: bool) -> Result<String, Vec<u8>> {
    String::from_utf8(bytes).or_else(|error| {
        let (whole, cut) = (
            error.utf8_error().valid_up_to(),
            error.utf8_error().error_len().is_none(),
        );
        let mut bytes = error.into_bytes();
        if !truncated || !cut {
            return Err(bytes);
        }
        bytes.truncate(whole);
        String::from_utf8(bytes).map_err(std::string::FromUtf8Error::into_bytes)
    })
}

/// The lines that are wanted, as far as there is room; and whether there was more of them.
async fn taken(mut pieces: BodyDataStream, part: Part) -> Result<(Vec<u8>, bool), ApiError> {
    let (mut line, mut bytes) = (1_u64, Vec::new());
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|_| broke_off())?;
        for each in piece.split_inclusive(|byte| *byte == b'\n') {
            if part.end_line.is_some_and(|end| line > end) {
                return Ok((bytes, false));
            }
            if line >= part.start_line {
                let room = part.max_bytes - bytes.len();
                bytes.extend_from_slice(&each[..each.len().min(room)]);
                if each.len() > room {
                    return Ok((bytes, true));
                }
            }
            line += u64::from(each.ends_with(b"\n"));
        }
    }
    Ok((bytes, false))
}

impl Gateway {
    fn record(&self, asked: &Asked<'_>, tool: &str) -> AuditBody {
        // What a caller chose may be anything.
        let clean = |text: &str| !self.orchestrator.is_secret(text);
        let is_name = (1..=64).contains(&tool.len())
            && tool
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'));
        let mut body = AuditBody::new(AuditKind::Intent, "tool.call");
        body.call_id = Some(Uuid::now_v7());
        body.request_id = asked.request_id.filter(|id| clean(id)).map(str::to_owned);
        body.subject = Some(asked.caller.subject());
        if is_name && clean(tool) {
            body.detail.insert("tool".to_owned(), json!(tool));
        }
        body
    }

    /// Writes down a call that was refused.
    pub(super) async fn note(
        &self,
        asked: &Asked<'_>,
        refused: &Refused<'_>,
    ) -> Result<(), ApiError> {
        let mut intent = self.record(asked, refused.tool);
        intent.decision = (refused.stage != "run").then_some(AuditDecision::Deny);
        intent.stage = Some(refused.stage.to_owned());
        intent.task_id = refused.task_id;
        let outcome = AuditBody {
            kind: AuditKind::Outcome,
            result: Some(AuditResult::of_status(refused.error.0.status)),
            status: Some(refused.error.0.status),
            code: Some(refused.error.0.code.clone()),
            ..intent.clone()
        };
        self.orchestrator.audit.note(vec![intent, outcome]).await
    }

    /// Writes down a call that was answered from what is here.
    async fn note_answer(&self, asked: &Asked<'_>, tool: &Tool) -> Result<(), ApiError> {
        let mut intent = self.record(asked, tool.name);
        intent.decision = Some(AuditDecision::Allow);
        let outcome = AuditBody {
            kind: AuditKind::Outcome,
            result: Some(AuditResult::Done),
            status: Some(200),
            ..intent.clone()
        };
        self.orchestrator.audit.note(vec![intent, outcome]).await
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures_util::stream;

    use super::*;

    async fn lines(
        pieces: &[&'static str],
        start_line: u64,
        end_line: Option<u64>,
        max_bytes: usize,
    ) -> (String, bool) {
        let pieces: Vec<Result<Bytes, std::io::Error>> = pieces
            .iter()
            .map(|piece| Ok(Bytes::from_static(piece.as_bytes())))
            .collect();
        let (bytes, truncated) = taken(
            Body::from_stream(stream::iter(pieces)).into_data_stream(),
            Part {
                start_line,
                end_line,
                max_bytes,
            },
        )
        .await
        .expect("read");
        (String::from_utf8(bytes).expect("text"), truncated)
    }

    #[tokio::test]
    async fn lines_are_counted_across_pieces_and_room_is_kept() {
        let pieces = ["one\ntw", "o\nthree", "\nfour"];
        for (start, end, room, text, truncated) in [
            (1, None, 100, "one\ntwo\nthree\nfour", false),
            (1, None, 18, "one\ntwo\nthree\nfour", false),
            (1, None, 17, "one\ntwo\nthree\nfou", true),
            (2, Some(3), 100, "two\nthree\n", false),
            (2, Some(3), 10, "two\nthree\n", false),
            (2, Some(3), 9, "two\nthree", true),
            (4, None, 100, "four", false),
            (4, Some(9), 100, "four", false),
            (9, None, 100, "", false),
        ] {
            assert_eq!(
                lines(&pieces, start, end, room).await,
                (text.to_owned(), truncated),
                "{start} {end:?} {room}"
            );
        }
    }

    #[test]
    fn a_letter_that_is_cut_through_is_left_out_and_what_is_no_text_is_bytes() {
        assert_eq!(
            as_text("aü".as_bytes()[..2].to_vec(), true),
            Ok("a".to_owned())
        );
        assert_eq!(
            as_text("aü".as_bytes()[..2].to_vec(), false),
            Err("aü".as_bytes()[..2].to_vec())
        );
        assert_eq!(as_text(vec![0xff, b'a'], true), Err(vec![0xff, b'a']));
    }
}
