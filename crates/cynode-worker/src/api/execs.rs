//! Exec routes.

use std::{path::Path, sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::{FromRequest as _, State},
    response::Response,
};
use cynode_api::{
    ErrorCode, Exec as ExecObject, ExecAccepted, ExecForm, ExecId, ExecOutcome, ExecRequest,
    ExecResult, ExecVia, OutputPage, OutputQuery, Page, Problem, SessionId, SignalExec,
    SignalOutcome, StdinField, StdinOutcome, StdinWrite,
    exec_limits::{MAX_OUTPUT_BYTES, MAX_REQUEST_BYTES, MAX_STDIN_BYTES, MAX_TIMEOUT_MS},
};
use cynode_sba_proto::{MAX_DATA, Request, WORKSPACE};
use cynode_service::{
    ApiError, JsonBody, QueryParams, checks::check_arguments, compute, edge,
    events::accepts_events, json, multipart, output::OutputRequest,
};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use utoipa::IntoParams;

use super::{
    Api, output,
    sessions::{Id, page, parse_id},
    wait_until_gone,
};
use crate::{
    calls::{ResultRecorder, with_result},
    execs::{self, Exec, ExecCommand, ExecInput, InputSpool, OpenExec, StdinDelivery},
    sessions::{Live, SessionEntry, check_version, exec_environment},
};

/// Free space is re-checked after this many bytes of input.
const SPACE_CHECK_BYTES: usize = 16 * 1024 * 1024;
/// How long a write to standard input waits for a command that does not read.
const STDIN_TIMEOUT: Duration = Duration::from_secs(30);

/// The session id and the exec id in a path.
pub(super) struct ExecPath(SessionId, ExecId);

impl<S: Send + Sync> axum::extract::FromRequestParts<S> for ExecPath {
    type Rejection = ApiError;

    async fn from_request_parts(
        parts: &mut http::request::Parts,
        state: &S,
    ) -> Result<Self, Self::Rejection> {
        let path =
            axum::extract::Path::<std::collections::HashMap<String, String>>::from_request_parts(
                parts, state,
            )
            .await
            .map_err(|error| ApiError::invalid(error.body_text()))?;
        Ok(Self(
            parse_id(&path, "id", ErrorCode::SessionNotFound)?,
            parse_id(&path, "exec_id", ErrorCode::ExecNotFound)?,
        ))
    }
}

fn check(request: &ExecRequest) -> Result<(), ApiError> {
    check_version(request.version)?;
    check_arguments(&request.argv, &request.env)?;
    if request
        .cwd
        .as_ref()
        .is_some_and(|cwd| cwd.contains('\0') || cwd.len() > 4_095)
    {
        return Err(ApiError::invalid(
            "cwd: contains a NUL character or is too long",
        ));
    }
    let min = u64::from(!request.background);
    if !(min..=MAX_TIMEOUT_MS).contains(&request.timeout_ms) {
        return Err(ApiError::invalid(format!(
            "timeout_ms: must be between {min} and {MAX_TIMEOUT_MS}{}",
            if request.background {
                ""
            } else {
                " (0 only with background)"
            }
        )));
    }
    if request
        .max_output_bytes
        .is_some_and(|bytes| bytes > MAX_OUTPUT_BYTES)
    {
        return Err(ApiError::invalid(format!(
            "max_output_bytes: at most {MAX_OUTPUT_BYTES}"
        )));
    }
    if request.stdin.is_some() && request.stdin_b64.is_some() {
        return Err(ApiError::invalid(
            "stdin and stdin_b64 are mutually exclusive",
        ));
    }
    if request
        .stdin
        .as_ref()
        .map_or(0, String::len)
        .max(request.stdin_b64.as_ref().map_or(0, |bytes| bytes.0.len()))
        > MAX_STDIN_BYTES
    {
        let detail = format!(
            "stdin: more than {MAX_STDIN_BYTES} bytes; send it as multipart/form-data, or use \
             stdin_open and the stdin call"
        );
        return Err(ApiError::new(ErrorCode::TooLarge, detail));
    }
    Ok(())
}

/// Run a command. Responds with its result, an event stream (`Accept: text/event-stream`), or its
/// id if `background` is set. As `multipart/form-data`, the body has a part `request` followed by a
/// part `stdin`, which is received completely before the command starts.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/exec", tag = "execs",
    params(("id" = SessionId, Path)),
    request_body(content((ExecRequest = "application/json"), (ExecForm = "multipart/form-data"))),
    responses(
        (status = 200,
            content((ExecResult = "application/json"), (String = "text/event-stream"))),
        (status = 202, body = ExecAccepted),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn start(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    headers: HeaderMap,
    recorder: Option<Extension<ResultRecorder>>,
    request: axum::extract::Request,
) -> Result<Response, ApiError> {
    let started_at = std::time::Instant::now();
    let (request, form) = receive(&headers, request).await?;
    check(&request)?;
    let (entry, live) = api.sessions.live(id)?;
    api.sessions.check_room_for_work()?;
    let (input, input_sha256) = match form {
        Some(form) if request.stdin.is_none() && request.stdin_b64.is_none() => {
            let (input, sha256) = spool_input(&api, &entry, form).await?;
            (input, Some(sha256))
        }
        Some(_) => {
            return Err(ApiError::invalid(
                "request: must not set stdin or stdin_b64 when the form has a part stdin",
            ));
        }
        // The fingerprint covers the whole request, including its stdin.
        None => (spool_field(&entry, &request).await?, None),
    };
    let background = request.background;
    let received = ReceivedExec {
        request,
        input,
        input_sha256,
        is_streamed: accepts_events(&headers),
    };
    let exec = run(&api, &entry, live, received, recorder).await?;
    let accepted = ExecAccepted { exec_id: exec.id() };
    if background && !accepts_events(&headers) {
        return Ok(with_result(
            &accepted,
            (StatusCode::ACCEPTED, Json(accepted)),
        ));
    }
    if accepts_events(&headers) {
        return Ok(with_result(
            &accepted,
            output::stream(exec.attach(0)?, true, api.stop.clone()),
        ));
    }
    let _watch_guard = exec.watch();
    let answer = exec.answer().await?;
    metrics::histogram!("cynode_exec_seconds").record(started_at.elapsed().as_secs_f64());
    let outcome = ExecOutcome {
        exec_id: answer.exec_id,
        exit: answer.exit.clone(),
    };
    Ok(with_result(&outcome, answer.into_response().await?))
}

/// Reads the request. For a form, also returns the stdin part, which is still unread.
async fn receive(
    headers: &HeaderMap,
    mut request: axum::extract::Request,
) -> Result<(ExecRequest, Option<multipart::ExecForm>), ApiError> {
    let Some(boundary) = multipart::boundary(headers)? else {
        request
            .extensions_mut()
            .insert(edge::BodyLimit(MAX_REQUEST_BYTES));
        let JsonBody(request) = JsonBody::from_request(request, &()).await?;
        return Ok((request, None));
    };
    let (bytes, form) =
        multipart::ExecForm::open_with_request(request.into_body(), &boundary).await?;
    let nodes = json::count(&bytes)?;
    let _room = json::room(bytes.len(), nodes).await;
    let request = compute::run(bytes.len(), || edge::parse(&bytes)).await?;
    Ok((request, Some(form)))
}

/// Receives the whole input before the command starts.
async fn spool_input(
    api: &Api,
    entry: &SessionEntry,
    mut form: multipart::ExecForm,
) -> Result<(ExecInput, String), ApiError> {
    let mut spool = InputSpool::new(&entry.execs.input_usage);
    let mut unchecked = 0;
    while let Some(piece) = form.next_piece().await? {
        unchecked += piece.len();
        if unchecked > SPACE_CHECK_BYTES {
            api.sessions.check_room_for_work()?;
            unchecked = 0;
        }
        spool.push(&piece, entry.execs.directory()).await?;
    }
    spool.finish().await
}

/// Spools the input that is a field of the request: the command may never read it, and it must
/// not stay in memory until then.
async fn spool_field(entry: &SessionEntry, request: &ExecRequest) -> Result<ExecInput, ApiError> {
    let text = request.stdin.as_deref().map(str::as_bytes);
    let bytes = request.stdin_b64.as_ref().map(|bytes| bytes.0.as_slice());
    let Some(stdin) = text.or(bytes) else {
        return Ok(ExecInput::default());
    };
    let mut spool = InputSpool::new(&entry.execs.input_usage);
    spool.push(stdin, entry.execs.directory()).await?;
    Ok(spool.finish().await?.0)
}

/// A request, and the standard input from a form or from the request's own field.
struct ReceivedExec {
    request: ExecRequest,
    input: ExecInput,
    input_sha256: Option<String>,
    /// The caller reads an event stream, so output need not be collected for a response.
    is_streamed: bool,
}

/// Starts the command, or finds the one that an identical request started.
async fn run(
    api: &Api,
    entry: &SessionEntry,
    live: Arc<Live>,
    received: ReceivedExec,
    recorder: Option<Extension<ResultRecorder>>,
) -> Result<Arc<Exec>, ApiError> {
    let ReceivedExec {
        mut request,
        input,
        input_sha256,
        is_streamed,
    } = received;
    let cwd = Path::new(WORKSPACE).join(request.cwd.as_deref().unwrap_or("."));
    let cwd = if request.cwd.is_none() {
        WORKSPACE.to_owned()
    } else {
        cwd.to_string_lossy().into_owned()
    };
    let open_exec = entry
        .execs
        .register(&request, cwd, input_sha256.as_deref())?;
    if let (Some(Extension(recorder)), OpenExec::New(exec) | OpenExec::Existing(exec)) =
        (recorder, &open_exec)
    {
        // From here on the command may run, even if the caller never learns of it.
        recorder.record(&ExecAccepted { exec_id: exec.id() });
    }
    let exec = match open_exec {
        OpenExec::Existing(exec) => {
            exec.started().await?;
            return Ok(exec);
        }
        OpenExec::New(exec) => exec,
    };
    if is_streamed {
        exec.skip_collecting();
    }
    // Held until the caller attaches its own guard, so that the exec is never seen as abandoned.
    let _watch_guard = exec.watch();
    (request.stdin, request.stdin_b64) = (None, None);
    let command = ExecCommand {
        argv: std::mem::take(&mut request.argv),
        env: exec_environment(&entry.record(), &request.env),
        input,
        stdin_open: request.stdin_open,
        is_runner: false,
        may_be_running: false,
    };
    let (execs, exec_to_start) = (Arc::clone(&entry.execs), Arc::clone(&exec));
    let via = api.sessions.config.exec_via;
    // A caller that disconnects now must not leave a command that is neither started nor voided.
    let starting = tokio::spawn(async move {
        match via {
            ExecVia::Agent => execs::start_by_agent(live, execs, exec_to_start, command).await,
            ExecVia::Runtime => execs::start_by_runtime(live, execs, exec_to_start, command).await,
        }
    });
    starting.await.map_err(|_| {
        ApiError::new(ErrorCode::Internal, "starting the command was interrupted")
    })??;
    Ok(exec)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExecListQuery {
    /// 1 to 1000; 1000 by default.
    limit: Option<usize>,
    cursor: Option<String>,
}

/// List the commands of a session, oldest first.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/execs", tag = "execs",
    params(("id" = SessionId, Path), ExecListQuery),
    responses(
        (status = 200, body = Page<ExecObject>),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    QueryParams(query): QueryParams<ExecListQuery>,
) -> Result<Json<Page<ExecObject>>, ApiError> {
    let entry = session_with_execs(&api, id)?;
    page(
        entry.execs.list(),
        query.limit,
        query.cursor.as_deref(),
        |exec| exec.id(),
        |exec| Some(exec.to_api()),
    )
    .map(Json)
}

/// Looks up a session whose execs still exist; refuses an ending or ended one.
fn session_with_execs(api: &Api, id: SessionId) -> Result<Arc<SessionEntry>, ApiError> {
    let entry = api.sessions.get(id)?;
    if matches!(
        entry.object().state,
        cynode_api::SessionState::Ending | cynode_api::SessionState::Ended
    ) {
        return Err(api.sessions.refusal(ErrorCode::SessionEnded, &entry));
    }
    Ok(entry)
}

/// Show a command.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/execs/{exec_id}", tag = "execs",
    params(("id" = SessionId, Path), ("exec_id" = ExecId, Path)),
    responses(
        (status = 200, body = ExecObject),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(api): State<Api>,
    ExecPath(id, exec_id): ExecPath,
) -> Result<Json<ExecObject>, ApiError> {
    Ok(Json(
        session_with_execs(&api, id)?.execs.get(exec_id)?.to_api(),
    ))
}

/// Read output of a running or finished command, or follow it as an event stream that resumes from
/// `Last-Event-ID`.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/execs/{exec_id}/output", tag = "execs",
    params(("id" = SessionId, Path), ("exec_id" = ExecId, Path), OutputQuery),
    responses(
        (status = 200,
            content((OutputPage = "application/json"), (String = "text/event-stream"))),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn output(
    State(api): State<Api>,
    ExecPath(id, exec_id): ExecPath,
    headers: HeaderMap,
    QueryParams(query): QueryParams<OutputQuery>,
) -> Result<Response, ApiError> {
    let entry = session_with_execs(&api, id)?;
    entry.touch();
    let exec = entry.execs.get(exec_id)?;
    let request = OutputRequest::new(&query, &headers)?;
    let deadline = Instant::now() + request.wait;
    output::answer(request, deadline, &exec, api.stop.clone()).await
}

/// Signal a command: its process group, or all processes it started.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/execs/{exec_id}/signal", tag = "execs",
    params(("id" = SessionId, Path), ("exec_id" = ExecId, Path)), request_body = SignalExec,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn signal(
    State(api): State<Api>,
    ExecPath(id, exec_id): ExecPath,
    JsonBody(request): JsonBody<SignalExec>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    let (entry, live) = api.sessions.live(id)?;
    let exec = entry.execs.get(exec_id)?;
    let outcome = SignalOutcome {
        exec_id: Some(exec_id),
        signal: request.signal,
        scope: Some(request.scope),
    };
    match api.sessions.config.exec_via {
        ExecVia::Agent => {
            let request = Request::Signal {
                exec_id,
                signal: request.signal.number(),
                scope: request.scope,
            };
            live.link()?.call(&request).await?;
        }
        ExecVia::Runtime if exec.is_running() => {
            execs::signal_by_runtime(&live, exec_id, request.signal.number()).await;
        }
        ExecVia::Runtime => return Err(ApiError::new(ErrorCode::ExecEnded, "the exec has ended")),
    }
    Ok(with_result(&outcome, StatusCode::NO_CONTENT))
}

/// Write to a command's standard input. Responds once the command's pipe has accepted the data, or
/// after 30 s without progress.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/execs/{exec_id}/stdin", tag = "execs",
    params(("id" = SessionId, Path), ("exec_id" = ExecId, Path)), request_body = StdinWrite,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn stdin(
    State(api): State<Api>,
    ExecPath(id, exec_id): ExecPath,
    JsonBody(request): JsonBody<StdinWrite>,
) -> Result<Response, ApiError> {
    check_version(request.version)?;
    let (entry, live) = api.sessions.live(id)?;
    let exec = entry.execs.get(exec_id)?;
    let data = request.data_b64.unwrap_or_default().0;
    if data.len() > MAX_STDIN_BYTES {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("data_b64: more than {MAX_STDIN_BYTES} bytes in one call"),
        ));
    }
    let sha256 = StdinField {
        stdin: hex::encode(Sha256::digest(&data)),
    };
    let outcome = StdinOutcome {
        exec_id,
        bytes: StdinField {
            stdin: data.len() as u64,
        },
        sha256,
        eof: request.eof,
    };
    let offer = |piece| exec.offer_stdin(piece, STDIN_TIMEOUT);
    let written = tokio::select! {
        written = write_stdin(data, request.eof, offer) => written,
        // The sandbox is gone, even if not every part of the worker has noticed.
        () = wait_until_gone(&live) => Err(stdin_closed()),
    };
    if written.is_err() {
        // A session that has ended is the more useful error.
        api.sessions.live(id)?;
    }
    written.map(|()| with_result(&outcome, StatusCode::NO_CONTENT))
}

fn stdin_closed() -> ApiError {
    ApiError::new(ErrorCode::StdinClosed, "the exec accepts no more input")
}

/// Offers input piece by piece until one is not accepted. `taken` counts the bytes that must not be
/// sent again: those delivered or queued.
async fn write_stdin<F: Future<Output = StdinDelivery>>(
    data: Vec<u8>,
    eof: bool,
    mut offer: impl FnMut(Option<Vec<u8>>) -> F,
) -> Result<(), ApiError> {
    let mut taken = 0;
    let pieces = data
        .chunks(MAX_DATA)
        .map(|piece| Some(piece.to_vec()))
        .chain(eof.then_some(None));
    for piece in pieces {
        let (length, is_eof) = (piece.as_ref().map_or(0, Vec::len), piece.is_none());
        let delivery = offer(piece).await;
        match delivery {
            StdinDelivery::Taken => taken += length,
            // The command has read everything and exited, so end of input is moot.
            StdinDelivery::Closed if is_eof && taken > 0 => return Ok(()),
            StdinDelivery::Closed => return Err(stdin_closed()),
            StdinDelivery::Queued | StdinDelivery::QueueFull => {
                if delivery == StdinDelivery::Queued {
                    taken += length;
                }
                let detail = format!(
                    "the command read nothing for {} s; {taken} of {} bytes are delivered or \
                     queued, the rest was not sent",
                    STDIN_TIMEOUT.as_secs(),
                    data.len()
                );
                return Err(Problem::new(ErrorCode::StdinFull, detail)
                    .with("taken", taken)
                    .into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn outcome(
        size: usize,
        eof: bool,
        answers: &[StdinDelivery],
    ) -> Result<(), (String, serde_json::Value)> {
        let mut answers = answers.iter();
        let mut offered = Vec::new();
        let data: Vec<u8> = (0..=250).cycle().take(size).collect();
        let written = write_stdin(data.clone(), eof, |piece: Option<Vec<u8>>| {
            offered.extend(piece.unwrap_or_default());
            std::future::ready(
                *answers
                    .next()
                    .expect("no piece is offered after one that was not accepted"),
            )
        })
        .await;
        assert!(
            data.starts_with(&offered),
            "input was offered out of order or with gaps"
        );
        written.map_err(|error| {
            (
                error.code.clone(),
                error.extensions.get("taken").cloned().unwrap_or_default(),
            )
        })
    }

    #[tokio::test]
    async fn unread_input_is_rejected_with_the_number_of_accepted_bytes() {
        use StdinDelivery::{Closed, QueueFull, Queued, Taken};
        let full = |taken: usize| Err(("stdin_full".to_owned(), taken.into()));
        let closed = || Err(("stdin_closed".to_owned(), serde_json::Value::Null));
        assert_eq!(
            outcome(2 * MAX_DATA + 1, true, &[Taken, Taken, Taken, Taken]).await,
            Ok(())
        );
        assert_eq!(
            outcome(3 * MAX_DATA, false, &[Taken, Queued]).await,
            full(2 * MAX_DATA)
        );
        assert_eq!(
            outcome(3 * MAX_DATA, false, &[Taken, QueueFull]).await,
            full(MAX_DATA)
        );
        assert_eq!(outcome(10, false, &[QueueFull]).await, full(0));
        assert_eq!(outcome(10, true, &[Taken, Queued]).await, full(10));
        assert_eq!(outcome(10, true, &[Closed]).await, closed());
        assert_eq!(
            outcome(10, true, &[Taken, Closed]).await,
            Ok(()),
            "input that was read completely was rejected"
        );
        assert_eq!(outcome(0, true, &[Closed]).await, closed());
        assert_eq!(outcome(0, false, &[]).await, Ok(()));
    }
}
