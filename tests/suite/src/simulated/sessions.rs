//! Sessions, their execs and their files.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension, Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, Path, State},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use cynode_api::{
    ErrorCode, Exec, ExecAccepted, ExecId, ExecOutcome, ExecRequest, ExecState, OutputQuery, Page,
    Session, SessionCreate, SessionEnd, SessionId, SessionOutcome, SessionPatch, SessionState,
    SignalExec, SignalOutcome, SignalSession, Stream, StreamEvent, TaskId, WorkspaceDisposal,
    WorkspaceId, WorkspaceRef,
    exec_limits::{DEFAULT_OUTPUT_BYTES, MAX_WAIT_MS},
    session_limits::{DEFAULT_IDLE_SECONDS, DEFAULT_LIFETIME_SECONDS},
};
use cynode_service::{
    ApiError, JsonBody, QueryParams,
    events::accepts_events,
    output::{DEFAULT_PAGE_BYTES, OutputRequest},
};
use cynode_worker::calls::{ResultRecorder, with_result};
use futures_util::stream;
use http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use time::OffsetDateTime;

use super::{
    Disk, Files, SessionEntry, Shared, check_limits, check_version, files, id, patches,
    run::{Run, absolute},
};

pub(super) type ApiResult<T> = Result<T, ApiError>;

pub(super) fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/v1/worker/sessions", post(create).get(list))
        .route("/v1/worker/sessions/{id}", get(show).patch(patch))
        .route("/v1/worker/sessions/{id}/end", post(end))
        .route("/v1/worker/sessions/{id}/resume", post(resume))
        .route("/v1/worker/sessions/{id}/signal", post(signal_all))
        .route("/v1/worker/sessions/{id}/exec", post(exec))
        .route("/v1/worker/sessions/{id}/execs", get(execs))
        .route("/v1/worker/sessions/{id}/execs/{exec_id}", get(show_exec))
        .route(
            "/v1/worker/sessions/{id}/execs/{exec_id}/output",
            get(exec_output),
        )
        .route(
            "/v1/worker/sessions/{id}/execs/{exec_id}/signal",
            post(signal_exec),
        )
        .merge(files::routes())
        .merge(patches::routes())
        .layer(DefaultBodyLimit::disable())
}

/// Cuts a list to a page. The cursor of the next page is the id of the last item.
pub(super) fn page<T>(
    mut items: Vec<T>,
    limit: Option<usize>,
    id: impl Fn(&T) -> String,
) -> ApiResult<Page<T>> {
    let limit = limit.unwrap_or(1_000);
    if !(1..=1_000).contains(&limit) {
        return Err(ApiError::invalid("limit: must lie between 1 and 1000"));
    }
    let next_cursor = (items.len() > limit).then(|| id(&items[limit - 1]));
    items.truncate(limit);
    Ok(Page { items, next_cursor })
}

fn after(seconds: u64) -> OffsetDateTime {
    OffsetDateTime::now_utc() + Duration::from_secs(seconds)
}

impl SessionEntry {
    pub(super) fn object(&self) -> Session {
        let running = self
            .execs
            .iter()
            .filter(|(_, run)| run.end().is_none())
            .count();
        Session {
            running_execs: u32::try_from(running).unwrap_or(u32::MAX),
            ..self.session.clone()
        }
    }
}

impl Disk {
    fn entry(&mut self, text: &str) -> ApiResult<&mut SessionEntry> {
        let id: SessionId = id(text, ErrorCode::SessionNotFound)?;
        self.sessions.get_mut(&id).ok_or_else(|| {
            ApiError::new(
                ErrorCode::SessionNotFound,
                format!("no session {id} on this node"),
            )
        })
    }

    /// A running session.
    pub(super) fn live(&mut self, text: &str) -> ApiResult<(&mut SessionEntry, Files)> {
        let workspace = self.entry(text)?.session.workspace_id;
        let files = self
            .workspaces
            .get(&workspace)
            .map(|(_, files)| Arc::clone(files))
            .unwrap_or_default();
        let entry = self.entry(text)?;
        match entry.session.state {
            SessionState::Running => Ok((entry, files)),
            SessionState::Ending | SessionState::Ended => Err(ApiError::new(
                ErrorCode::SessionEnded,
                "the session has ended",
            )),
            state => Err(ApiError::new(
                ErrorCode::NotRunning,
                format!("the session is {state}"),
            )),
        }
    }

    fn exec(&mut self, text: &str, exec: &str) -> ApiResult<(ExecRequest, Arc<Run>)> {
        let entry = self.entry(text)?;
        if entry.session.state == SessionState::Ended {
            return Err(ApiError::new(
                ErrorCode::SessionEnded,
                "the session has ended",
            ));
        }
        let exec: ExecId = id(exec, ErrorCode::ExecNotFound)?;
        let found = entry.execs.iter().find(|(_, run)| run.id == exec);
        found.cloned().ok_or_else(|| {
            ApiError::new(
                ErrorCode::ExecNotFound,
                format!("no exec {exec} in this session"),
            )
        })
    }

    fn workspace(&mut self, request: &SessionCreate) -> ApiResult<WorkspaceId> {
        match request.workspace_ref.clone().unwrap_or_default() {
            WorkspaceRef::New => {
                let id = WorkspaceId::generate();
                self.workspaces
                    .insert(id, (request.task_id, Files::default()));
                Ok(id)
            }
            WorkspaceRef::Workspace(id)
                if self
                    .workspaces
                    .get(&id)
                    .is_none_or(|(task, _)| *task != request.task_id) =>
            {
                Err(ApiError::new(
                    ErrorCode::WorkspaceNotFound,
                    format!("no workspace {id} is kept for this task"),
                ))
            }
            WorkspaceRef::Workspace(id) => {
                let is_used = self.sessions.values().any(|other| {
                    other.session.workspace_id == id && other.session.state == SessionState::Running
                });
                if is_used {
                    Err(ApiError::new(
                        ErrorCode::WorkspaceInUse,
                        format!("workspace {id} is mounted in another session"),
                    ))
                } else {
                    Ok(id)
                }
            }
            WorkspaceRef::Git { .. } => Err(ApiError::invalid(
                "workspace_ref: only an orchestrator resolves repositories",
            )),
            WorkspaceRef::Artifact(_) => Err(ApiError::invalid(
                "workspace_ref: artifacts come from an orchestrator, and this node has none",
            )),
        }
    }
}

async fn create(
    State(shared): State<Arc<Shared>>,
    JsonBody(request): JsonBody<SessionCreate>,
) -> ApiResult<Response> {
    check_version(request.version)?;
    check_limits(request.limits)?;
    let id = request.session_id;
    let is_new = shared.admit_session(request)?;
    // Completes even if the caller disconnects.
    let making = Arc::clone(&shared);
    let made: tokio::task::JoinHandle<ApiResult<Session>> = tokio::spawn(async move {
        drop(
            making
                .holds_creates
                .subscribe()
                .wait_for(|hold| !hold)
                .await,
        );
        let mut state = making.state();
        let entry = state.entry(&id.to_string())?;
        if entry.session.state == SessionState::Creating {
            entry.session.state = SessionState::Running;
        }
        Ok(entry.object())
    });
    let session = made
        .await
        .map_err(|_| ApiError::new(ErrorCode::Internal, "the creation was interrupted"))??;
    Ok(changed(
        if is_new {
            StatusCode::CREATED
        } else {
            StatusCode::OK
        },
        session,
    ))
}

/// The response for a created or changed session.
fn changed(status: StatusCode, session: Session) -> Response {
    with_result(&SessionOutcome::from(&session), (status, Json(session)))
}

impl Shared {
    /// Admits a request. Returns false if an identical request came before.
    fn admit_session(&self, request: SessionCreate) -> ApiResult<bool> {
        let shared = self;
        let image = shared.image(&request.image_ref);
        let mut state = shared.state();
        if let Some(known) = state.sessions.get(&request.session_id) {
            return if known.request == request {
                Ok(false)
            } else {
                Err(ApiError::new(
                    ErrorCode::SessionIdInUse,
                    format!("session {} was made by another request", request.session_id),
                ))
            };
        }
        let image = image?;
        if image.labels.is_empty() {
            return Err(ApiError::new(
                ErrorCode::ImageNotCompatible,
                "the image is not marked",
            ));
        }
        let workspace_id = state.workspace(&request)?;
        let limits = request.limits.unwrap_or_default().or_default();
        let session = Session {
            session_id: request.session_id,
            name: None,
            task_id: request.task_id,
            state: SessionState::Creating,
            end_reason: None,
            image_ref: request.image_ref.clone(),
            image_digest: Some(image.digest.clone()),
            workspace_id,
            node_id: shared.node_id,
            warm: false,
            limits,
            unenforced: Vec::new(),
            network_policy: request.network_policy.unwrap_or_default(),
            pty_allowed: request.pty_allowed.unwrap_or_default(),
            labels: request.labels.clone(),
            created_at: OffsetDateTime::now_utc(),
            expires_at: after(
                request
                    .max_lifetime_seconds
                    .unwrap_or(DEFAULT_LIFETIME_SECONDS),
            ),
            idle_expires_at: after(request.idle_timeout_seconds.unwrap_or(DEFAULT_IDLE_SECONDS)),
            ended_at: None,
            create_duration_ms: Some(0),
            running_execs: 0,
            repository_id: None,
            base_commit: None,
            seed_notes: None,
        };
        state.sessions.insert(
            request.session_id,
            SessionEntry {
                request,
                session,
                execs: Vec::new(),
            },
        );
        Ok(true)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    state: Option<SessionState>,
    task_id: Option<TaskId>,
    label: Option<String>,
    limit: Option<usize>,
    cursor: Option<SessionId>,
}

async fn list(
    State(shared): State<Arc<Shared>>,
    QueryParams(query): QueryParams<ListQuery>,
) -> ApiResult<Json<Page<Session>>> {
    let has_label = |session: &Session| {
        query
            .label
            .as_ref()
            .is_none_or(|label| match label.split_once('=') {
                Some((name, value)) => session.labels.get(name).is_some_and(|found| found == value),
                None => session.labels.contains_key(label),
            })
    };
    let mut sessions: Vec<Session> = shared
        .state()
        .sessions
        .values()
        .map(SessionEntry::object)
        .collect();
    sessions.sort_by_key(|session| (session.created_at, session.session_id));
    sessions.retain(|session| {
        query.state.is_none_or(|state| session.state == state)
            && query.task_id.is_none_or(|task| session.task_id == task)
    });
    sessions.retain(has_label);
    let start = query.cursor.map_or(0, |cursor| {
        sessions
            .iter()
            .position(|session| session.session_id == cursor)
            .map_or(sessions.len(), |place| place + 1)
    });
    Ok(Json(page(
        sessions.split_off(start),
        query.limit,
        |session| session.session_id.to_string(),
    )?))
}

async fn show(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
) -> ApiResult<Json<Session>> {
    Ok(Json(shared.state().entry(&text)?.object()))
}

async fn patch(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    JsonBody(patch): JsonBody<SessionPatch>,
) -> ApiResult<Response> {
    check_version(patch.version)?;
    let mut state = shared.state();
    let entry = state.entry(&text)?;
    if entry.session.state != SessionState::Running {
        return Err(ApiError::new(
            ErrorCode::SessionEnded,
            format!("the session is {}", entry.session.state),
        ));
    }
    if let Some(seconds) = patch.max_lifetime_seconds {
        entry.session.expires_at = after(seconds);
    }
    if let Some(seconds) = patch.idle_timeout_seconds {
        entry.session.idle_expires_at = after(seconds);
    }
    if let Some(labels) = patch.labels {
        entry.session.labels = labels;
    }
    Ok(changed(StatusCode::OK, entry.object()))
}

async fn end(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    JsonBody(end): JsonBody<SessionEnd>,
) -> ApiResult<Response> {
    check_version(end.version)?;
    let mut state = shared.state();
    let entry = state.entry(&text)?;
    if entry.session.state == SessionState::Ended {
        return Ok(changed(StatusCode::OK, entry.object()));
    }
    entry.session.state = SessionState::Ended;
    entry.session.end_reason = Some(
        end.reason
            .unwrap_or_else(|| "ended by the caller".to_owned()),
    );
    entry.session.ended_at = Some(OffsetDateTime::now_utc());
    for (_, run) in entry.execs.drain(..) {
        run.kill(cynode_api::SignalName::KILL);
    }
    let ended = entry.object();
    if end.workspace.unwrap_or_default() == WorkspaceDisposal::Delete {
        state.workspaces.remove(&ended.workspace_id);
    }
    Ok(changed(StatusCode::OK, ended))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Resume {
    version: Option<u32>,
}

async fn resume(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    JsonBody(resume): JsonBody<Resume>,
) -> ApiResult<Response> {
    check_version(resume.version)?;
    let mut state = shared.state();
    let session = state.entry(&text)?.object();
    if session.state == SessionState::Running {
        return Ok(changed(StatusCode::OK, session));
    }
    if !state.workspaces.contains_key(&session.workspace_id) {
        return Err(ApiError::new(
            ErrorCode::NotResumable,
            "the workspace of the session is gone",
        ));
    }
    let entry = state.entry(&text)?;
    (
        entry.session.state,
        entry.session.end_reason,
        entry.session.ended_at,
    ) = (SessionState::Running, None, None);
    Ok(changed(StatusCode::CREATED, entry.object()))
}

async fn signal_all(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    JsonBody(request): JsonBody<SignalSession>,
) -> ApiResult<Response> {
    check_version(request.version)?;
    for (_, run) in &shared.state().live(&text)?.0.execs {
        run.kill(request.signal);
    }
    Ok(with_result(
        &SignalOutcome {
            exec_id: None,
            signal: request.signal,
            scope: None,
        },
        StatusCode::NO_CONTENT,
    ))
}

async fn exec(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    headers: HeaderMap,
    recorder: Option<Extension<ResultRecorder>>,
    JsonBody(request): JsonBody<ExecRequest>,
) -> ApiResult<Response> {
    check_version(request.version)?;
    if request.argv.first().is_none_or(String::is_empty)
        || (request.timeout_ms == 0 && !request.background)
    {
        return Err(ApiError::invalid("argv, timeout_ms: must be given"));
    }
    let run = {
        let mut state = shared.state();
        let (entry, files) = state.live(&text)?;
        let exec_id = request.exec_id.unwrap_or_else(ExecId::generate);
        match entry.execs.iter().find(|(_, run)| run.id == exec_id) {
            Some((known, run)) if *known == request => Arc::clone(run),
            Some(_) => {
                return Err(ApiError::new(
                    ErrorCode::ExecIdInUse,
                    format!("exec {exec_id} was made by another request"),
                ));
            }
            None => {
                let limit =
                    (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms));
                let run = Run::start(
                    exec_id,
                    &request.argv,
                    files,
                    limit,
                    shared.finished_sleeps.subscribe(),
                )?;
                entry.execs.push((request.clone(), Arc::clone(&run)));
                run
            }
        }
    };
    let accepted = ExecAccepted { exec_id: run.id };
    if let Some(Extension(recorder)) = recorder {
        recorder.record(&accepted);
    }
    if accepts_events(&headers) {
        return Ok(with_result(&accepted, events(run, 0, true)));
    }
    if request.background {
        return Ok(with_result(
            &accepted,
            (StatusCode::ACCEPTED, Json(accepted)),
        ));
    }
    let result = run
        .result(request.max_output_bytes.unwrap_or(DEFAULT_OUTPUT_BYTES))
        .await;
    Ok(with_result(
        &ExecOutcome {
            exec_id: result.exec_id,
            exit: result.exit.clone(),
        },
        Json(result),
    ))
}

fn object((request, run): &(ExecRequest, Arc<Run>)) -> Exec {
    let (exit, ended_at) = run.end().unzip();
    Exec {
        exec_id: run.id,
        state: if exit.is_some() {
            ExecState::Exited
        } else {
            ExecState::Running
        },
        argv: request.argv.clone(),
        argv_truncated: false,
        cwd: absolute(request.cwd.as_deref().unwrap_or_default())
            .trim_end_matches('/')
            .to_owned(),
        background: request.background,
        started_at: run.started_at,
        ended_at,
        exit,
    }
}

async fn execs(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
) -> ApiResult<Json<Page<Exec>>> {
    let mut state = shared.state();
    let entry = state.entry(&text)?;
    if entry.session.state == SessionState::Ended {
        return Err(ApiError::new(
            ErrorCode::SessionEnded,
            "the session has ended",
        ));
    }
    Ok(Json(Page {
        items: entry.execs.iter().map(object).collect(),
        next_cursor: None,
    }))
}

async fn show_exec(
    State(shared): State<Arc<Shared>>,
    Path((text, exec)): Path<(String, String)>,
) -> ApiResult<Json<Exec>> {
    Ok(Json(object(&shared.state().exec(&text, &exec)?)))
}

async fn signal_exec(
    State(shared): State<Arc<Shared>>,
    Path((text, exec)): Path<(String, String)>,
    JsonBody(request): JsonBody<SignalExec>,
) -> ApiResult<Response> {
    check_version(request.version)?;
    let (_, run) = shared.state().exec(&text, &exec)?;
    let outcome = SignalOutcome {
        exec_id: Some(run.id),
        signal: request.signal,
        scope: Some(request.scope),
    };
    if run.kill(request.signal) {
        Ok(with_result(&outcome, StatusCode::NO_CONTENT))
    } else {
        Err(ApiError::new(ErrorCode::ExecEnded, "the exec has ended"))
    }
}

pub(super) async fn output_answer(request: OutputRequest, run: Arc<Run>) -> Response {
    if request.events {
        return events(run, request.after_seq, request.from_start);
    }
    let max_bytes = request.max_bytes.unwrap_or(DEFAULT_PAGE_BYTES);
    Json(run.page(request.after_seq, max_bytes, request.wait).await).into_response()
}

async fn exec_output(
    State(shared): State<Arc<Shared>>,
    Path((text, exec)): Path<(String, String)>,
    headers: HeaderMap,
    QueryParams(query): QueryParams<OutputQuery>,
) -> ApiResult<Response> {
    let (_, run) = shared.state().exec(&text, &exec)?;
    Ok(output_answer(OutputRequest::new(&query, &headers)?, run).await)
}

/// Streams the events of a command until it ends.
fn events(run: Arc<Run>, after_seq: u64, from_start: bool) -> Response {
    let empty = |seq| StreamEvent {
        seq,
        at: OffsetDateTime::now_utc(),
        data: None,
        data_b64: None,
        exec_id: None,
        exit: None,
        lost_before_seq: None,
    };
    let written = |name: &str, event: &StreamEvent| {
        let data = serde_json::to_string(event).expect("events serialise");
        format!("event: {name}\nid: {}\ndata: {data}\n\n", event.seq)
    };
    let start = if from_start {
        written(
            "start",
            &StreamEvent {
                exec_id: Some(run.id),
                ..empty(0)
            },
        )
    } else {
        String::new()
    };
    let pieces = stream::unfold(Some((run, after_seq, start)), move |state| async move {
        let (run, after_seq, mut text) = state?;
        // Output that is already available is sent without waiting.
        let wait = if text.is_empty() {
            Duration::from_millis(MAX_WAIT_MS)
        } else {
            Duration::ZERO
        };
        let page = run.page(after_seq, 1 << 20, wait).await;
        for chunk in page.chunks {
            let name = if chunk.stream == Stream::Stdout {
                "stdout"
            } else {
                "stderr"
            };
            text.push_str(&written(
                name,
                &StreamEvent {
                    data: chunk.data,
                    ..empty(chunk.seq)
                },
            ));
        }
        let next = page.next_seq.max(after_seq);
        if let Some(exit) = page.exit {
            text.push_str(&written(
                "exit",
                &StreamEvent {
                    exec_id: Some(run.id),
                    exit: Some(exit),
                    ..empty(next)
                },
            ));
            return Some((Ok::<_, Infallible>(Bytes::from(text)), None));
        }
        Some((Ok(Bytes::from(text)), Some((run, next, String::new()))))
    });
    (
        [(header::CONTENT_TYPE, "text/event-stream")],
        Body::from_stream(pieces),
    )
        .into_response()
}
