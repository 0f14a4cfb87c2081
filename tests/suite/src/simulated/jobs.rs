//! Jobs: accepted, interpreted once, and kept until they are acknowledged.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, State},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use cynode_api::{
    ErrorCode, ExecExit, ExecId, ExecVia, Job, JobAck, JobError, JobId, JobOutput, JobRun,
    JobState, JobStop, OutputQuery, Page, SignalName, TaskId,
    job_limits::{DEFAULT_TIMEOUT_SECONDS, OBJECT_BYTES},
};
use cynode_service::{ApiError, JsonBody, QueryParams, output::OutputRequest};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use time::OffsetDateTime;

use super::{
    JobEntry, Shared, check_limits, check_version, id,
    run::Run,
    sessions::{output_answer, page},
};

type ApiResult<T> = Result<T, ApiError>;

pub(super) fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/v1/worker/jobs:run", post(run))
        .route("/v1/worker/jobs:stop", post(stop))
        .route("/v1/worker/jobs", get(list))
        .route("/v1/worker/jobs/{id}", get(show))
        .route("/v1/worker/jobs/{id}/output", get(output))
        .route("/v1/worker/jobs/{id}/ack", post(acknowledge))
}

fn no_job(id: JobId) -> ApiError {
    ApiError::new(ErrorCode::JobNotFound, format!("no job {id} on this node"))
}

impl Shared {
    fn job(&self, id: JobId) -> ApiResult<Job> {
        self.state()
            .jobs
            .get(&id)
            .map(|entry| entry.job.clone())
            .ok_or_else(|| no_job(id))
    }

    fn change_job(&self, id: JobId, change: impl FnOnce(&mut JobEntry)) {
        if let Some(entry) = self.state().jobs.get_mut(&id) {
            change(entry);
        }
        self.changed.send_modify(|count| *count += 1);
        // There may be no receiver.
        self.job_updates.send(id).ok();
    }

    async fn wait_for_end(&self, id: JobId) -> ApiResult<Job> {
        let mut changes = self.changed.subscribe();
        loop {
            let job = self.job(id)?;
            if job.state.is_final() || changes.changed().await.is_err() {
                return Ok(job);
            }
        }
    }

    fn new_job(&self, request: &JobRun) -> Job {
        Job {
            job_id: request.job_id,
            task_id: request.task_id,
            state: JobState::Accepted,
            exit_code: None,
            signal: None,
            output: JobOutput::default(),
            started_at: None,
            ended_at: None,
            node_id: Some(self.node_id),
            image_ref: request.sandbox.image_ref.clone(),
            image_digest: None,
            sba_result: None,
            artifacts: Vec::new(),
            error: None,
            reported_by: cynode_api::Reporter::Worker,
            late_result: None,
            progress: None,
            artifacts_omitted: 0,
            created_by: None,
            command: None,
            acknowledged: false,
        }
    }

    /// A job that was stopped before its request arrived never runs.
    fn bar(&self, request: &JobStop) {
        self.state().jobs.entry(request.job_id).or_insert_with(|| {
            let nothing = JobRun::command(request.task_id, request.job_id, "", [""; 0]);
            let job = Job {
                state: JobState::Canceled,
                ended_at: Some(OffsetDateTime::now_utc()),
                acknowledged: true,
                ..self.new_job(&nothing)
            };
            JobEntry {
                request: None,
                job,
                run: None,
                stopped: true,
            }
        });
    }

    /// Admits a job, or returns the one that an identical request created.
    fn admit(self: &Arc<Self>, request: JobRun) -> ApiResult<JobId> {
        let id = request.job_id;
        let mut state = self.state();
        if let Some(known) = state.jobs.get(&id) {
            let same = match &known.request {
                Some(known) => {
                    JobRun {
                        version: None,
                        ..known.clone()
                    } == JobRun {
                        version: None,
                        ..request
                    }
                }
                None => known.job.task_id == request.task_id,
            };
            return if same {
                Ok(id)
            } else {
                Err(ApiError::new(
                    ErrorCode::JobIdInUse,
                    format!("job {id} was made by another request"),
                ))
            };
        }
        let image = self.image(&request.sandbox.image_ref);
        let job = Job {
            image_digest: image.as_ref().ok().map(|image| image.digest.clone()),
            ..self.new_job(&request)
        };
        let (missing, shared) = (image.err(), Arc::clone(self));
        state.jobs.insert(
            id,
            JobEntry {
                request: Some(request.clone()),
                job,
                run: None,
                stopped: false,
            },
        );
        drop(state);
        match missing {
            // A request that can't run fails as a job, not as a call.
            Some(error) => self.fail(id, &error),
            None => drop(tokio::spawn(async move { shared.drive(id, request).await })),
        }
        Ok(id)
    }

    fn fail(&self, id: JobId, error: &ApiError) {
        let errno = error
            .extensions
            .get("errno")
            .and_then(|errno| errno.as_str());
        let detail = errno.map_or_else(
            || error.detail.clone(),
            |errno| format!("{errno}: {}", error.detail),
        );
        self.change_job(id, |entry| {
            entry.job.state = if entry.stopped {
                JobState::Canceled
            } else {
                JobState::Failed
            };
            entry.job.error = (!entry.stopped).then(|| JobError {
                code: error.code.clone(),
                detail,
            });
            entry.job.ended_at = Some(OffsetDateTime::now_utc());
        });
    }

    async fn drive(&self, id: JobId, request: JobRun) {
        let limit = Duration::from_secs(
            request
                .sandbox
                .timeout_seconds
                .unwrap_or(DEFAULT_TIMEOUT_SECONDS),
        );
        let exec_id = cynode_api::ExecId::from_uuid(*id.as_uuid());
        let stopped = self.state().jobs.get(&id).is_none_or(|entry| entry.stopped);
        let started = if stopped {
            Err(ApiError::new(
                ErrorCode::ExecEnded,
                "the job was stopped before it started",
            ))
        } else {
            Run::start(
                exec_id,
                &request.sandbox.command,
                super::Files::default(),
                Some(limit),
                self.finished_sleeps.subscribe(),
            )
        };
        let run = match started {
            Ok(run) => run,
            Err(error) => return self.fail(id, &error),
        };
        self.started.lock().expect("not poisoned").push(id);
        self.change_job(id, |entry| {
            (entry.job.state, entry.job.started_at, entry.run) = (
                JobState::InProgress,
                Some(run.started_at),
                Some(Arc::clone(&run)),
            );
            if entry.stopped {
                run.kill(SignalName::TERM);
            }
        });
        let result = run.result(OBJECT_BYTES).await;
        self.change_job(id, |entry| {
            let job = &mut entry.job;
            job.state = match &result.exit {
                _ if entry.stopped => JobState::Canceled,
                exit if exit.timed_out => JobState::Timeout,
                exit if exit.exit_code == Some(0) => JobState::Completed,
                _ => JobState::Failed,
            };
            (job.exit_code, job.signal, job.ended_at) = (
                result.exit.exit_code,
                result.exit.signal,
                Some(OffsetDateTime::now_utc()),
            );
            job.output = JobOutput {
                stdout: result.stdout,
                stderr: result.stderr,
                encoding: result.encoding,
                truncated: result.truncated,
                truncated_by: None,
            };
        });
    }
}

async fn run(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<JobRun>,
) -> ApiResult<Response> {
    check_version(request.version)?;
    if request.sandbox.command.is_empty() {
        return Err(ApiError::invalid("sandbox.command: must name a program"));
    }
    check_limits(request.sandbox.limits)?;
    let id = shared.admit(request)?;
    if headers
        .get("prefer")
        .is_none_or(|value| value != "respond-async")
    {
        return Ok(Json(shared.wait_for_end(id).await?).into_response());
    }
    let job = shared.job(id)?;
    let status = if job.state.is_final() {
        StatusCode::OK
    } else {
        StatusCode::ACCEPTED
    };
    Ok((status, [("preference-applied", "respond-async")], Json(job)).into_response())
}

async fn stop(
    State(shared): State<Arc<Shared>>,
    JsonBody(request): JsonBody<JobStop>,
) -> ApiResult<Json<Job>> {
    check_version(request.version)?;
    let id = request.job_id;
    shared.bar(&request);
    if shared.job(id)?.task_id != request.task_id {
        return Err(no_job(id));
    }
    if let Some(entry) = shared
        .state()
        .jobs
        .get_mut(&id)
        .filter(|entry| !entry.job.state.is_final())
    {
        entry.stopped = true;
        if let Some(run) = &entry.run {
            run.kill(SignalName::TERM);
        }
    }
    shared.wait_for_end(id).await.map(Json)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    state: Option<JobState>,
    task_id: Option<TaskId>,
    limit: Option<usize>,
    cursor: Option<JobId>,
}

async fn list(
    State(shared): State<Arc<Shared>>,
    QueryParams(query): QueryParams<ListQuery>,
) -> ApiResult<Json<Page<Job>>> {
    let jobs: Vec<Job> = shared
        .state()
        .jobs
        .values()
        .map(|entry| entry.job.clone())
        .collect();
    let fits = |job: &Job| {
        let is_wanted = query.state.is_none_or(|state| job.state == state)
            && query.task_id.is_none_or(|task| job.task_id == task);
        is_wanted && !job.acknowledged && query.cursor.is_none_or(|cursor| job.job_id > cursor)
    };
    let bare = |job: Job| Job {
        output: JobOutput {
            stdout: String::new(),
            stderr: String::new(),
            ..job.output
        },
        ..job
    };
    let items = jobs.into_iter().filter(fits).map(bare).collect();
    Ok(Json(page(items, query.limit, |job| {
        job.job_id.to_string()
    })?))
}

async fn show(State(shared): State<Arc<Shared>>, Path(text): Path<String>) -> ApiResult<Json<Job>> {
    shared.job(id(&text, ErrorCode::JobNotFound)?).map(Json)
}

async fn output(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    headers: HeaderMap,
    QueryParams(query): QueryParams<OutputQuery>,
) -> ApiResult<Response> {
    let id = id(&text, ErrorCode::JobNotFound)?;
    let request = OutputRequest::new(&query, &headers)?;
    let mut changes = shared.changed.subscribe();
    let started = async {
        while !shared
            .state()
            .jobs
            .get(&id)
            .is_none_or(|entry| entry.run.is_some() || entry.job.state.is_final())
        {
            drop(changes.changed().await);
        }
    };
    drop(tokio::time::timeout(request.wait, started).await);
    if shared.job(id)?.acknowledged {
        return Err(ApiError::new(
            ErrorCode::OutputExpired,
            format!("job {id} was acknowledged, and its output dropped"),
        ));
    }
    let (run, is_final) = shared.state().jobs.get(&id).map_or((None, false), |entry| {
        (entry.run.clone(), entry.job.state.is_final())
    });
    if let Some(run) = run {
        return Ok(output_answer(request, run).await);
    }
    let exit = ExecExit::never_ran(ExecVia::Agent);
    let ended = is_final.then(|| (exit, OffsetDateTime::now_utc()));
    Ok(request.empty_response(ExecId::from_uuid(*id.as_uuid()), 0, ended))
}

async fn acknowledge(
    State(shared): State<Arc<Shared>>,
    Path(text): Path<String>,
    JsonBody(request): JsonBody<JobAck>,
) -> ApiResult<StatusCode> {
    check_version(request.version)?;
    let id = id(&text, ErrorCode::JobNotFound)?;
    let job = shared.job(id)?;
    if !job.state.is_final() {
        return Err(ApiError::new(
            ErrorCode::JobNotEnded,
            format!("job {id} is {}", job.state),
        ));
    }
    if let Some(entry) = shared.state().jobs.get_mut(&id) {
        entry.run = None;
        entry.job.acknowledged = true;
        (entry.job.output.stdout, entry.job.output.stderr) = (String::new(), String::new());
    }
    Ok(StatusCode::NO_CONTENT)
}
