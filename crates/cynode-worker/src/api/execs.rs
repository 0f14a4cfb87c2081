//! Exec routes.

use std::{path::Path, sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::{FromRequest as _, State},
    response::Response,
};
use cynode_api::{
    ErrorCode, Exec as ExecObject, ExecAccepted, ExecForm, ExecId, ExecOutcome, ExecRequest,
    ExecResult, ExecVia, OutputPage, Page, Problem, SessionId, SignalExec, SignalOutcome, StdinOf,
    StdinOutcome, StdinWrite,
    exec_limits::{MAX_OUTPUT_BYTES, MAX_REQUEST_BYTES, MAX_STDIN_BYTES, MAX_TIMEOUT_MS},
};
use cynode_sba_proto::{MAX_DATA, Request, WORKSPACE};
use cynode_service::{
    ApiError, JsonBody, QueryParams, checks::check_arguments, compute, edge,
    events::accepts_events, json, multipart,
};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use utoipa::IntoParams;

use super::{
    Api, gone,
    output::{self, OutputQuery},
    sessions::{Id, page, parse_id},
};
use crate::{
    calls::{Noting, told},
    execs::{self, Begun, Command, Exec, Input, Offered, Spooling},
    sessions::{Entry, Live, check_version, exec_environment},
};

/// How often free space is looked at while input comes.
const CHECK_ROOM_EVERY: usize = 16 * 1024 * 1024;
/// How long a write to standard input waits for a command that reads nothing.
const STDIN: Duration = Duration::from_secs(30);

/// The session's and the exec's id of a path.
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
            "cwd: holds a NUL character or is too long",
        ));
    }
    let least = u64::from(!request.background);
    if !(least..=MAX_TIMEOUT_MS).contains(&request.timeout_ms) {
        return Err(ApiError::invalid(format!(
            "timeout_ms: must lie between {least} and {MAX_TIMEOUT_MS}{}",
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
        return Err(ApiError::invalid("stdin and stdin_b64 exclude one another"));
    }
    if request
        .stdin
        .as_ref()
        .map_or(0, String::len)
        .max(request.stdin_b64.as_ref().map_or(0, |bytes| bytes.0.len()))
        > MAX_STDIN_BYTES
    {
        let detail = format!(
            "stdin: more than {MAX_STDIN_BYTES} bytes; send it as multipart/form-data, or use stdin_open and the stdin call"
        );
        return Err(ApiError::new(ErrorCode::TooLarge, detail));
    }
    Ok(())
}

/// Run a command. The answer is its result, an event stream (`Accept: text/event-stream`), or, with `background`, its id. As
/// `multipart/form-data` it takes a part `request` and then a part `stdin`, which is taken whole before the command starts.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/exec", tag = "execs", params(("id" = SessionId, Path)),
    request_body(content((ExecRequest = "application/json"), (ExecForm = "multipart/form-data"))),
    responses((status = 200, content((ExecResult = "application/json"), (String = "text/event-stream"))), (status = 202, body = ExecAccepted), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn start(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    headers: HeaderMap,
    noting: Option<Extension<Noting>>,
    request: axum::extract::Request,
) -> Result<Response, ApiError> {
    let begun = std::time::Instant::now();
    let (mut request, form) = take(&headers, request).await?;
    check(&request)?;
    let (entry, live) = api.sessions.live(id)?;
    api.sessions.check_room_for_work()?;
    let (input, sha256) = match form {
        Some(form) if request.stdin.is_none() && request.stdin_b64.is_none() => {
            let (input, sha256) = spool(&api, &entry, form).await?;
            (input, Some(sha256))
        }
        Some(_) => {
            return Err(ApiError::invalid(
                "request: stdin and stdin_b64 are not there when input comes as a part of its own",
            ));
        }
        // A repetition is known by the whole request.
        None => (Input::default(), None),
    };
    let background = request.background;
    let exec = run(&api, &entry, live, &mut request, (input, sha256), noting).await?;
    let accepted = ExecAccepted { exec_id: exec.id() };
    if background && !accepts_events(&headers) {
        return Ok(told(&accepted, (StatusCode::ACCEPTED, Json(accepted))));
    }
    if accepts_events(&headers) {
        return Ok(told(
            &accepted,
            output::stream(exec.attach(0)?, true, api.stop.clone()),
        ));
    }
    let _watching = exec.watch();
    let answer = exec.answer().await?;
    metrics::histogram!("cynode_exec_seconds").record(begun.elapsed().as_secs_f64());
    let outcome = ExecOutcome {
        exec_id: answer.exec_id,
        exit: answer.exit.clone(),
    };
    Ok(told(&outcome, answer.into_response().await?))
}

/// The request, and its input when that comes as a part of its own.
async fn take(
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
    let (bytes, form) = multipart::ExecForm::open(request.into_body(), &boundary).await?;
    let nodes = json::count(&bytes)?;
    let _room = json::room(bytes.len(), nodes).await;
    let request = compute::apart(bytes.len(), || edge::parse(&bytes)).await?;
    Ok((request, Some(form)))
}

/// Takes input whole, before anything is started.
async fn spool(
    api: &Api,
    entry: &Entry,
    mut form: multipart::ExecForm,
) -> Result<(Input, String), ApiError> {
    let mut spooling = Spooling::new(&entry.execs.rooms);
    let mut unchecked = 0;
    while let Some(piece) = form.next_piece().await? {
        unchecked += piece.len();
        if unchecked > CHECK_ROOM_EVERY {
            api.sessions.check_room_for_work()?;
            unchecked = 0;
        }
        spooling.push(&piece, entry.execs.directory()).await?;
    }
    spooling.finish().await
}

/// Starts the command, or finds the one that the same request started.
async fn run(
    api: &Api,
    entry: &Entry,
    live: Arc<Live>,
    request: &mut ExecRequest,
    (input, sha256): (Input, Option<String>),
    noting: Option<Extension<Noting>>,
) -> Result<Arc<Exec>, ApiError> {
    let cwd = Path::new(WORKSPACE).join(request.cwd.as_deref().unwrap_or("."));
    let cwd = if request.cwd.is_none() {
        WORKSPACE.to_owned()
    } else {
        cwd.to_string_lossy().into_owned()
    };
    let begun = entry.execs.begin(request, cwd, sha256.as_deref())?;
    if let (Some(Extension(noting)), Begun::New(exec) | Begun::Existing(exec)) = (noting, &begun) {
        // It may run from here on, whether its caller hears of it or not.
        noting.note(&ExecAccepted { exec_id: exec.id() });
    }
    let exec = match begun {
        Begun::Existing(exec) => {
            exec.started().await?;
            return Ok(exec);
        }
        Begun::New(exec) => exec,
    };
    // Counted until the caller's own place is taken, so that it is never seen as abandoned before.
    let _watching = exec.watch();
    let stdin = request
        .stdin
        .take()
        .map(String::into_bytes)
        .or(request.stdin_b64.take().map(|bytes| bytes.0));
    let command = Command {
        argv: std::mem::take(&mut request.argv),
        env: exec_environment(&entry.record(), &request.env),
        input: stdin.map_or(input, Input::from),
        stdin_open: request.stdin_open,
        again: false,
    };
    let (execs, started) = (Arc::clone(&entry.execs), Arc::clone(&exec));
    let via = api.sessions.config.exec_via;
    // A caller who goes away in this moment must not leave a command that is neither started nor void.
    let starting = tokio::spawn(async move {
        match via {
            ExecVia::Agent => execs::start_by_agent(live, execs, started, command).await,
            ExecVia::Runtime => execs::start_by_runtime(live, execs, started, command).await,
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
pub(super) struct ListQuery {
    /// 1 to 1000; 1000 by default.
    limit: Option<usize>,
    cursor: Option<String>,
}

/// List the commands of a session, oldest first.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/execs", tag = "execs", params(("id" = SessionId, Path), ListQuery),
    responses((status = 200, body = Page<ExecObject>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    QueryParams(query): QueryParams<ListQuery>,
) -> Result<Json<Page<ExecObject>>, ApiError> {
    let entry = with_execs(&api, id)?;
    page(
        entry.execs.list(),
        query.limit,
        query.cursor.as_deref(),
        |exec| exec.id(),
        |exec| Some(exec.object()),
    )
    .map(Json)
}

/// A session whose execs can be asked for: one that has ended has none.
fn with_execs(api: &Api, id: SessionId) -> Result<Arc<Entry>, ApiError> {
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
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/execs/{exec_id}", tag = "execs", params(("id" = SessionId, Path), ("exec_id" = ExecId, Path)),
    responses((status = 200, body = ExecObject), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(api): State<Api>,
    ExecPath(id, exec_id): ExecPath,
) -> Result<Json<ExecObject>, ApiError> {
    Ok(Json(with_execs(&api, id)?.execs.get(exec_id)?.object()))
}

/// Read output, while the command runs and after; or follow it as an event stream, resumed by `Last-Event-ID`.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/execs/{exec_id}/output", tag = "execs", params(("id" = SessionId, Path), ("exec_id" = ExecId, Path), OutputQuery),
    responses((status = 200, content((OutputPage = "application/json"), (String = "text/event-stream"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn output(
    State(api): State<Api>,
    ExecPath(id, exec_id): ExecPath,
    headers: HeaderMap,
    QueryParams(query): QueryParams<OutputQuery>,
) -> Result<Response, ApiError> {
    let entry = with_execs(&api, id)?;
    entry.touch();
    let exec = entry.execs.get(exec_id)?;
    output::Asked::new(&query, &headers)?
        .answer(&exec, api.stop.clone())
        .await
}

/// Signal a command: its process group, or everything that it started.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/execs/{exec_id}/signal", tag = "execs", params(("id" = SessionId, Path), ("exec_id" = ExecId, Path)), request_body = SignalExec,
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json")))]
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
            execs::signal_by_runtime(&live, exec_id, request.signal.number())
        }
        ExecVia::Runtime => return Err(ApiError::new(ErrorCode::ExecEnded, "the exec has ended")),
    }
    Ok(told(&outcome, StatusCode::NO_CONTENT))
}

/// Write to a command's standard input. Answers when the command's pipe has taken it, or after 30 s in which it took nothing.
#[utoipa::path(post, path = "/v1/worker/sessions/{id}/execs/{exec_id}/stdin", tag = "execs", params(("id" = SessionId, Path), ("exec_id" = ExecId, Path)), request_body = StdinWrite,
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json")))]
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
    let sha256 = StdinOf {
        stdin: execs::hex(&Sha256::digest(&data)),
    };
    let outcome = StdinOutcome {
        exec_id,
        bytes: StdinOf {
            stdin: data.len() as u64,
        },
        sha256,
        eof: request.eof,
    };
    let fed = tokio::select! {
        fed = feed(data, request.eof, |piece| exec.offer_stdin(piece, STDIN)) => fed,
        // Nothing of it can take anything any more, whether that has been noticed everywhere or not.
        () = gone(&live) => Err(stdin_closed()),
    };
    if fed.is_err() {
        // That the session has ended says more than that its command has.
        api.sessions.live(id)?;
    }
    fed.map(|()| told(&outcome, StatusCode::NO_CONTENT))
}

fn stdin_closed() -> ApiError {
    ApiError::new(ErrorCode::StdinClosed, "the exec takes no more input")
}

/// Offers input piece by piece until one is not taken. `taken` counts what must not be sent again: what the command has, and
/// what is on its way to it.
async fn feed<F: Future<Output = Offered>>(
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
        let (length, end) = (piece.as_ref().map_or(0, Vec::len), piece.is_none());
        let offered = offer(piece).await;
        match offered {
            Offered::Taken => taken += length,
            // It has read all there was and is gone: that is an end too.
            Offered::Closed if end && taken > 0 => return Ok(()),
            Offered::Closed => return Err(stdin_closed()),
            Offered::Waiting | Offered::Refused => {
                if offered == Offered::Waiting {
                    taken += length;
                }
                let detail = format!(
                    "the command read nothing for {} s; {taken} of {} bytes are with it or on their way to it, the rest was not sent",
                    STDIN.as_secs(),
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
        answers: &[Offered],
    ) -> Result<(), (String, serde_json::Value)> {
        let mut answers = answers.iter();
        let mut offered = Vec::new();
        let data: Vec<u8> = (0..=250).cycle().take(size).collect();
        let fed = feed(data.clone(), eof, |piece: Option<Vec<u8>>| {
            offered.extend(piece.unwrap_or_default());
            std::future::ready(
                *answers
                    .next()
                    .expect("no piece is offered after one that was not taken"),
            )
        })
        .await;
        assert!(data.starts_with(&offered), "in order, without a gap");
        fed.map_err(|error| {
            (
                error.0.code,
                error.0.extensions.get("taken").cloned().unwrap_or_default(),
            )
        })
    }

    #[tokio::test]
    async fn input_that_is_not_read_is_refused_with_the_number_of_bytes_that_were_taken() {
        use Offered::{Closed, Refused, Taken, Waiting};
        let full = |taken: usize| Err(("stdin_full".to_owned(), taken.into()));
        let closed = || Err(("stdin_closed".to_owned(), serde_json::Value::Null));
        assert_eq!(
            outcome(2 * MAX_DATA + 1, true, &[Taken, Taken, Taken, Taken]).await,
            Ok(())
        );
        assert_eq!(
            outcome(3 * MAX_DATA, false, &[Taken, Waiting]).await,
            full(2 * MAX_DATA)
        );
        assert_eq!(
            outcome(3 * MAX_DATA, false, &[Taken, Refused]).await,
            full(MAX_DATA)
        );
        assert_eq!(outcome(10, false, &[Refused]).await, full(0));
        assert_eq!(outcome(10, true, &[Taken, Waiting]).await, full(10));
        assert_eq!(outcome(10, true, &[Closed]).await, closed());
        assert_eq!(
            outcome(10, true, &[Taken, Closed]).await,
            Ok(()),
            "all was read, and the command has ended"
        );
        assert_eq!(outcome(0, true, &[Closed]).await, closed());
        assert_eq!(outcome(0, false, &[]).await, Ok(()));
    }
}
