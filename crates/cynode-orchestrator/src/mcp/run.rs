//! Runs the plan of a tool call and builds its result.

use axum::{
    body::{Body, BodyDataStream},
    response::Response,
};
use cynode_api::{
    AuditBody, AuditDecision, AuditKind, AuditResult, Base64Bytes, ErrorCode, Problem,
    SessionState, WorkspaceDisposal,
};
use cynode_service::{ApiError, compute, json};
use futures_util::StreamExt as _;
use http::{Method, Request, StatusCode, header};
use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::{Value, json};
use tower::ServiceExt as _;
use uuid::Uuid;

use super::{
    Client, Gateway, ToolCall,
    plan::{ApiBody, ApiRequest, ExecPlan, ExportPlan, FilePart, Plan, ResultFormat},
    progress::FollowedExec,
    text,
    tools::Tool,
    view::View,
};
use crate::{
    caller::ToolOrigin,
    fair_permits::FairPermits,
    gate::{Refusal, Stage, ToolBody},
};

/// Size limit of an answer. Pages of output, listings and searches are limited to half of it.
const MAX_ANSWER: usize = 8 * 1024 * 1024;
/// Answers that are buffered at once; further ones take turns.
const MAX_CONCURRENT_ANSWERS: usize = 16;
static ANSWERS: FairPermits = FairPermits::new(MAX_CONCURRENT_ANSWERS);

/// The result of a tool call.
#[derive(Debug)]
pub(super) struct ToolOutput {
    pub(super) value: Value,
    /// A note for the model, such as that the session was resumed.
    pub(super) note: Option<String>,
}

impl From<Value> for ToolOutput {
    fn from(value: Value) -> Self {
        Self { value, note: None }
    }
}

impl ToolOutput {
    /// Puts a note before the existing one, if any.
    pub(super) fn with_note_before(self, note: Option<String>) -> Self {
        let note = match (note, self.note) {
            (Some(first), Some(second)) => Some(format!("{first} {second}")),
            (first, second) => first.or(second),
        };
        Self { note, ..self }
    }
}

/// What becomes of the workspace of a session that was ended.
fn workspace_note(session: &Value, workspace: WorkspaceDisposal) -> String {
    let id = session["workspace_id"].as_str().unwrap_or_default();
    let is_over = session["state"] == json!(SessionState::Ended);
    match (workspace, is_over) {
        (WorkspaceDisposal::Keep, true) => format!("Its workspace {id} is kept."),
        (WorkspaceDisposal::Keep, false) => format!("Its workspace {id} will be kept."),
        (WorkspaceDisposal::Delete, true) => format!("Its workspace {id} is deleted."),
        (WorkspaceDisposal::Delete, false) => format!("Its workspace {id} will be deleted."),
    }
}

/// A tool call without a result.
#[derive(Debug)]
pub(super) struct ToolFailure {
    pub(super) refusal: Refusal,
    /// Whether the gate has already recorded the failure.
    pub(super) is_recorded: bool,
}

impl ToolFailure {
    pub(super) fn recorded(stage: Stage, error: ApiError) -> Self {
        Self {
            refusal: Refusal { stage, error },
            is_recorded: true,
        }
    }

    /// A failure that the gate has not seen, so the gateway records it.
    pub(super) fn unrecorded(stage: Stage, error: ApiError) -> Self {
        Self {
            refusal: Refusal { stage, error },
            is_recorded: false,
        }
    }

    pub(super) fn result(self, client: &Client<'_>, view: &View) -> CallToolResult {
        let request_id = client.request_id;
        let stage = self.refusal.stage.as_str();
        let Problem {
            status,
            code,
            detail,
            remedy,
            extensions,
            ..
        } = *self.refusal.error.into_problem();
        if status >= 500 {
            tracing::warn!(request_id, code, detail, "A tool failed.");
        }
        let remedy = client.surface.spelled(&remedy);
        let mut failure = json!({
            "code": code, "stage": stage, "message": detail, "remedy": remedy,
            "request_id": request_id,
        });
        if let Value::Object(members) = &mut failure {
            // Fields of single codes, such as the hunks that do not apply.
            for (name, value) in extensions {
                members.entry(name).or_insert(value);
            }
        }
        let text = text::failure(&failure, view);
        if client.surface.is_coding() {
            text::bound(&mut failure, view);
        }
        let mut answer = CallToolResult::error(vec![ContentBlock::text(text)]);
        answer.structured_content = Some(failure);
        answer
    }
}

impl ToolFailure {
    fn is_missing_program(&self) -> bool {
        let error = &self.refusal.error;
        error.is(ErrorCode::ExecFailed) && error.extensions.get("errno") == Some(&json!("ENOENT"))
    }
}

impl Gateway {
    pub(super) async fn run(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        plan: Plan,
    ) -> Result<ToolOutput, ToolFailure> {
        match plan {
            Plan::InOwnSession(own, plan) => {
                Box::pin(self.run_in_own_session(client, tool, own, *plan)).await
            }
            Plan::CreateOwnSession(own, body) => {
                Box::pin(self.create_own_session(client, tool, own, *body)).await
            }
            plan => self.run_plan(client, tool, plan).await,
        }
    }

    /// Runs a plan that does not depend on the token's own session.
    pub(super) async fn run_plan(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        plan: Plan,
    ) -> Result<ToolOutput, ToolFailure> {
        let value = match plan {
            Plan::Export(export) => return self.export(client, tool, *export).await,
            Plan::End(request, workspace) => {
                let value = self.call(client, tool, *request).await?;
                let note = Some(workspace_note(&value, workspace));
                return Ok(ToolOutput { value, note });
            }
            Plan::InOwnSession(..) | Plan::CreateOwnSession(..) => {
                let error = ApiError::new(ErrorCode::Internal, "the plan is nested");
                Err(ToolFailure::unrecorded(Stage::Run, error))
            }
            Plan::Request(request) => self.call(client, tool, request).await,
            Plan::Exec(exec) => Box::pin(self.exec(client, tool, *exec)).await,
            Plan::Answer(answer) => {
                self.record_answer(client, tool)
                    .await
                    .map_err(|error| ToolFailure::recorded(Stage::Audit, error))?;
                Ok(client.surface.spelled_in(answer))
            }
            Plan::NewTask(mut new) => {
                new.project_id = new.project_id.or(client.caller.project_id);
                let request = ApiRequest::new(Method::POST, "/v1/tasks", None)
                    .json(&new)
                    .map_err(|error| ToolFailure::unrecorded(Stage::Arguments, error))?;
                self.call(client, tool, request).await
            }
            Plan::TaskProject(task) => {
                let shown = self
                    .call(
                        client,
                        tool,
                        ApiRequest::get(format!("/v1/tasks/{task}"), task),
                    )
                    .await?;
                let missing =
                    || ApiError::new(ErrorCode::NotFound, format!("task {task} has no project"));
                let id = shown["project_id"]
                    .as_str()
                    .ok_or_else(|| ToolFailure::unrecorded(Stage::Run, missing()))?;
                self.call(
                    client,
                    tool,
                    ApiRequest::get(format!("/v1/projects/{id}"), task),
                )
                .await
            }
            Plan::LastOutput(request) => {
                let (mut last, mut cursor) = (None, None);
                loop {
                    let execs = self
                        .call(
                            client,
                            tool,
                            ApiRequest::get(request.path.clone(), request.task)
                                .query("cursor", cursor.take()),
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
                let (_, id) = last.ok_or_else(|| ToolFailure::unrecorded(Stage::Run, missing()))?;
                let path = format!("{}/{id}/output", request.path);
                self.call(client, tool, ApiRequest { path, ..request })
                    .await
            }
            Plan::Unavailable(task, remedy) => {
                // Checks access to the task first, as every tool does.
                self.call(
                    client,
                    tool,
                    ApiRequest::get(format!("/v1/tasks/{task}"), task),
                )
                .await?;
                let error = ApiError::new(
                    ErrorCode::Unavailable,
                    format!(
                        "{} needs a service that this system does not provide yet",
                        client.surface.spelled(tool.name)
                    ),
                );
                Err(ToolFailure::unrecorded(
                    Stage::Run,
                    error.with_remedy(remedy),
                ))
            }
        };
        value.map(Into::into)
    }

    /// Exports what changed since the session began, or since the last commit if that is unknown: a
    /// kept workspace has no snapshot, or the agent is older.
    async fn export(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        export: ExportPlan,
    ) -> Result<ToolOutput, ToolFailure> {
        let has_no_snapshot = |failure: &ToolFailure| {
            [ErrorCode::NotARepository, ErrorCode::InvalidRequest]
                .iter()
                .any(|code| failure.refusal.error.is(*code))
        };
        let (result, since) = match self.call(client, tool, export.since_start).await {
            Err(failure) if has_no_snapshot(&failure) => (
                self.call(client, tool, export.since_commit).await,
                "the last commit (HEAD)",
            ),
            result => (result, "the session began"),
        };
        let note = Some(format!("The patch has the changes since {since}."));
        result.map(|value| ToolOutput { value, note })
    }

    /// Runs a command. If its program does not exist, nothing has started, and the fallback runs.
    async fn exec(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        exec: ExecPlan,
    ) -> Result<Value, ToolFailure> {
        let mut exec = exec;
        loop {
            client.running.set(FollowedExec {
                session: exec.session,
                exec: exec.exec_id,
            });
            let request = exec
                .request()
                .map_err(|error| ToolFailure::unrecorded(Stage::Arguments, error))?;
            match self.call(client, tool, request).await {
                Err(failure) if failure.is_missing_program() => {
                    exec = exec.fall_back().ok_or(failure)?;
                }
                result => return result,
            }
        }
    }

    /// Sends a request to the user API in the caller's name.
    pub(super) async fn call(
        &self,
        client: &Client<'_>,
        tool: &'static Tool,
        api_request: ApiRequest,
    ) -> Result<Value, ToolFailure> {
        let too_long = |_| {
            ToolFailure::unrecorded(
                Stage::Arguments,
                ApiError::invalid("the names in the arguments are too long for a URL"),
            )
        };
        let mut request = Request::builder()
            .method(api_request.method.clone())
            .uri(api_request.uri())
            .body(Body::empty())
            .map_err(too_long)?;
        match api_request.body {
            ApiBody::Empty => {}
            ApiBody::Json { bytes, value } => {
                request.extensions_mut().insert(ToolBody { bytes, value });
            }
            ApiBody::Bytes(bytes) => *request.body_mut() = Body::from(bytes),
        }
        let headers = request.headers_mut();
        for (name, value) in api_request.headers {
            headers.insert(name, value);
        }
        if let Some(id) = client.request_id.and_then(|id| id.parse().ok()) {
            headers.insert("x-request-id", id);
        }
        request.extensions_mut().insert(client.caller.clone());
        request.extensions_mut().insert(ToolOrigin {
            name: tool.name,
            task: api_request.task,
        });
        let Ok(response) = self.routes.clone().oneshot(request).await;
        let response = response.map(|body| ANSWERS.body(client.caller.id(), body));
        if response.status().is_success() {
            return result_of(response, api_request.format)
                .await
                .map_err(|error| ToolFailure::recorded(Stage::Run, error));
        }
        let stage = response.extensions().get::<Stage>().copied();
        let error = problem(response).await;
        let stage = match stage {
            // Only the record tells a missing target from one that the caller may not access.
            Some(_) if error.status == 404 => Stage::Task,
            Some(stage) => stage,
            None => handler_stage(&error),
        };
        Err(ToolFailure::recorded(stage, error))
    }
}

/// The stage to report for an error of a handler, behind the gate.
fn handler_stage(error: &ApiError) -> Stage {
    let is = |code: ErrorCode| error.is(code);
    if is(ErrorCode::DeniedByPolicy) || is(ErrorCode::ImageNotAllowed) {
        Stage::Policy
    } else if is(ErrorCode::InvalidRequest) || is(ErrorCode::TooLarge) {
        Stage::Arguments
    } else if is(ErrorCode::QuotaExceeded) {
        Stage::Limits
    } else if is(ErrorCode::SecretInInput) {
        Stage::Secrets
    } else {
        Stage::Run
    }
}

/// The error that an answer carries.
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
            format!("the answer with status {status} could not be parsed"),
        ),
    }
}

/// Converts an answer into the result of a tool.
async fn result_of(response: Response, format: ResultFormat) -> Result<Value, ApiError> {
    match format {
        ResultFormat::Object => object(response).await,
        ResultFormat::Preference(key) => {
            let list = object(response).await?;
            let found = list["items"]
                .as_array()
                .and_then(|items| items.iter().find(|item| item["key"] == key.as_str()))
                .cloned();
            found.ok_or_else(|| {
                ApiError::new(ErrorCode::NotFound, "the scope has no such preference")
            })
        }
        ResultFormat::File(part) => file(response, part).await,
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
    let read = compute::run(bytes.len(), || serde_json::from_slice(&bytes)).await;
    read.map_err(|error| {
        ApiError::new(
            ErrorCode::Internal,
            format!("the answer could not be parsed: {error}"),
        )
    })
}

/// The error for an answer that can't be read completely, although the call succeeded.
fn too_long(error: &axum::Error) -> ApiError {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        if error.is::<http_body_util::LengthLimitError>() {
            let error = ApiError::new(
                ErrorCode::TooLarge,
                format!("the call succeeded, but its answer exceeds {MAX_ANSWER} bytes"),
            );
            return error
                .with_remedy("Request less: a smaller limit, max_bytes or max_output_bytes.");
        }
        cause = error.source();
    }
    connection_lost()
}

fn connection_lost() -> ApiError {
    ApiError::new(
        ErrorCode::NodeUnreachable,
        "the connection broke during the answer",
    )
}

async fn file(response: Response, part: FilePart) -> Result<Value, ApiError> {
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
    let (bytes, truncated) = read_part(body.into_data_stream(), part).await?;
    let mut result = json!({"sha256": sha256, "size": size, "truncated": truncated});
    match as_text(bytes, truncated) {
        Ok(text) => result["content"] = text.into(),
        Err(bytes) => {
            result["content_b64"] = serde_json::to_value(Base64Bytes(bytes)).unwrap_or_default();
        }
    }
    Ok(result)
}

/// Decodes UTF-8. Drops a character that truncation has split; returns the bytes if they are not
/// text.
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

/// Reads the requested lines up to the size limit. Returns whether they were truncated.
async fn read_part(
    mut pieces: BodyDataStream,
    part: FilePart,
) -> Result<(Vec<u8>, bool), ApiError> {
    let (mut line, mut bytes) = (1_u64, Vec::new());
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|_| connection_lost())?;
        for segment in piece.split_inclusive(|byte| *byte == b'\n') {
            if part.end_line.is_some_and(|end| line > end) {
                return Ok((bytes, false));
            }
            if line >= part.start_line {
                let room = part.max_bytes - bytes.len();
                bytes.extend_from_slice(&segment[..segment.len().min(room)]);
                if segment.len() > room {
                    return Ok((bytes, true));
                }
            }
            line += u64::from(segment.ends_with(b"\n"));
        }
    }
    Ok((bytes, false))
}

impl Gateway {
    fn intent(&self, client: &Client<'_>, tool: &str) -> AuditBody {
        // Callers choose these texts freely, so they may contain a secret.
        let clean = |text: &str| !self.orchestrator.is_secret(text);
        let is_name = (1..=64).contains(&tool.len())
            && tool
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'));
        let mut body = AuditBody::new(AuditKind::Intent, "tool.call");
        body.call_id = Some(Uuid::now_v7());
        body.request_id = client.request_id.filter(|id| clean(id)).map(str::to_owned);
        body.subject = Some(client.caller.subject());
        if is_name && clean(tool) {
            body.detail.insert("tool".to_owned(), json!(tool));
        }
        body
    }

    /// Records a tool call that was refused before the gate saw it.
    pub(super) async fn record_refusal(
        &self,
        call: ToolCall<'_>,
        refusal: &Refusal,
    ) -> Result<(), ApiError> {
        let mut intent = self.intent(call.client, call.name);
        intent.task_id = call.task_id;
        refusal.record_tool_call(&self.orchestrator, intent).await
    }

    /// Records a tool call that the gateway answered itself.
    async fn record_answer(&self, client: &Client<'_>, tool: &Tool) -> Result<(), ApiError> {
        let mut intent = self.intent(client, tool.name);
        intent.decision = Some(AuditDecision::Allow);
        let outcome = AuditBody {
            kind: AuditKind::Outcome,
            result: Some(AuditResult::Done),
            status: Some(200),
            ..intent.clone()
        };
        Ok(self
            .orchestrator
            .audit
            .write_all(vec![intent, outcome])
            .await?)
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
        let (bytes, truncated) = read_part(
            Body::from_stream(stream::iter(pieces)).into_data_stream(),
            FilePart {
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
    async fn a_range_of_lines_is_cut_across_pieces_within_its_byte_limit() {
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
    fn a_split_character_is_dropped_and_binary_content_stays_base64() {
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
