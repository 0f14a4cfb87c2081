//! Jobs.

use std::time::Duration;

use axum::{
    Extension, Json,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use cynode_api::{
    CallId, Job, JobCreate, JobId, JobProgress, JobState, OutputPage, OutputQuery, Page, Problem,
    TaskId, exec_limits::MAX_WAIT_MS,
};
use cynode_service::{ApiError, QueryParams, output::OutputRequest};
use http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{
    Id, check_version, job_body::JobBody, output, page_request, requests::check_job, states,
};
use crate::{
    Orchestrator,
    caller::Person,
    db::{JobRow, Order},
    forward::forward,
    job_results::{self, Shown},
};

/// Bounds `Prefer: wait`, in seconds.
const MAX_WAIT_SECONDS: u64 = 3_600;
/// How long to wait for the node's progress report when a job is shown.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(1);
/// Open items in a progress report.
const MAX_PROGRESS_ITEMS: usize = 100;
/// Characters of a text in a progress report.
const MAX_PROGRESS_TEXT: usize = 256;

/// Create a job: a command, or a specification for `cynode-sba`. Responds with 202 at once; with
/// `Prefer: wait=N` when it has ended, or after N seconds. Everything that is wrong with a
/// specification is listed in `violations`, each with its path in the request.
#[utoipa::path(post, path = "/v1/jobs", tag = "jobs", request_body = JobCreate,
    responses((status = 202, body = Job), (status = 200, body = Job, description = "The job has ended, or the request is a repetition"), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    call: Option<Extension<CallId>>,
    headers: HeaderMap,
    JobBody(body): JobBody,
) -> Result<Response, ApiError> {
    check_version(body.version)?;
    check_job(&body)?;
    let wait = preferred_wait(&headers);
    let call_id = call.map(|Extension(id)| id);
    let (mut row, new) = orchestrator.create_job(&caller, body, call_id).await?;
    if let Some(seconds) = wait {
        row = orchestrator
            .wait_for_job(&caller, row.job_id, Duration::from_secs(seconds))
            .await?;
    }
    let status = if row.state.is_final() || !new {
        StatusCode::OK
    } else {
        StatusCode::ACCEPTED
    };
    // A caller that did not wait for the job gets no result in the response.
    let max_result_bytes = wait.is_none().then_some(0);
    answer(&orchestrator, status, row, max_result_bytes).await
}

/// Responds with a job. `max_result_bytes` limits the size of its result.
async fn answer(
    orchestrator: &Orchestrator,
    status: StatusCode,
    row: JobRow,
    max_result_bytes: Option<usize>,
) -> Result<Response, ApiError> {
    Ok(
        match job_results::show(&orchestrator.blobs, row, max_result_bytes).await? {
            Shown::Object(job) => (status, Json(*job)).into_response(),
            Shown::Stream(body) => {
                (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
            }
        },
    )
}

/// `Prefer: wait=N`. Unknown preferences are ignored.
pub(super) fn preferred_wait(headers: &HeaderMap) -> Option<u64> {
    let values = headers
        .get_all("prefer")
        .iter()
        .filter_map(|value| value.to_str().ok());
    let wait = values
        .flat_map(|value| value.split([',', ';']))
        .find_map(|part| {
            part.trim()
                .strip_prefix("wait=")?
                .trim()
                .parse::<u64>()
                .ok()
        });
    wait.map(|seconds| seconds.min(MAX_WAIT_SECONDS))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct JobQuery {
    /// A state, or several separated by commas.
    state: Option<String>,
    task_id: Option<TaskId>,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
    /// `oldest` first by default.
    #[param(inline)]
    order: Option<Order>,
    /// Any part of the id's text: 1 to 36 of 0-9, a-f and '-'.
    id_part: Option<String>,
}

/// List jobs, without their output.
#[utoipa::path(get, path = "/v1/jobs", tag = "jobs", params(JobQuery),
    responses((status = 200, body = Page<Job>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<JobQuery>,
) -> Result<Json<Page<Job>>, ApiError> {
    let states = states::<JobState>(query.state.as_deref())?;
    let page = page_request(
        query.limit,
        query.cursor.as_deref(),
        query.order,
        query.id_part,
    )?;
    Ok(Json(
        orchestrator
            .db
            .list_jobs(&caller.scope, &states, query.task_id, &page)
            .await?,
    ))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ShowQuery {
    /// Limits `sba_result` to about this many bytes of JSON: first the output of steps is removed,
    /// then the successful steps. 0 removes the whole result.
    max_result_bytes: Option<usize>,
}

/// Show a job, with the result of an SBA job and, while it runs, its progress.
#[utoipa::path(get, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = JobId, Path), ShowQuery),
    responses((status = 200, body = Job), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<JobId>,
    QueryParams(query): QueryParams<ShowQuery>,
) -> Result<Response, ApiError> {
    let mut row = orchestrator.db.job(&caller.scope, id).await?;
    row.object.progress = progress(&orchestrator, &row).await;
    answer(&orchestrator, StatusCode::OK, row, query.max_result_bytes).await
}

/// Asks the node for the progress of an SBA job. `None` if it does not answer in time.
async fn progress(orchestrator: &Orchestrator, row: &JobRow) -> Option<JobProgress> {
    let node_id = row.node_id.filter(|id| {
        row.has_spec() && !row.state.is_final() && !orchestrator.fleet.is_backed_off(*id)
    })?;
    let ask = async {
        let client = orchestrator
            .fleet
            .client(&orchestrator.db, node_id)
            .await
            .ok()?;
        client.job(row.job_id).await.ok()?.progress
    };
    let mut progress = tokio::time::timeout(PROGRESS_TIMEOUT, ask).await.ok()??;
    let cut = |text: &mut String| *text = text.chars().take(MAX_PROGRESS_TEXT).collect();
    progress.activity.iter_mut().for_each(cut);
    if let Some(todo) = &mut progress.todo {
        todo.open.truncate(MAX_PROGRESS_ITEMS);
        todo.open.iter_mut().for_each(cut);
    }
    Some(progress)
}

/// Stop a job. Responds when it has ended, or after a while with its state, without the result of
/// an SBA job. Stopping an ended job changes nothing.
#[utoipa::path(post, path = "/v1/jobs/{id}/stop", tag = "jobs", params(("id" = JobId, Path)),
    responses((status = 200, body = Job), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn stop(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<JobId>,
) -> Result<Response, ApiError> {
    orchestrator.db.job(&caller.scope, id).await?;
    orchestrator.db.request_stop(id).await?;
    orchestrator.jobs_due.notify_one();
    let row = orchestrator
        .wait_for_job(&caller, id, Duration::from_secs(30))
        .await?;
    answer(&orchestrator, StatusCode::OK, row, Some(0)).await
}

/// A job's output, while it runs and after it has ended, in the format of an exec's.
#[utoipa::path(get, path = "/v1/jobs/{id}/output", tag = "jobs", params(("id" = JobId, Path), OutputQuery),
    responses((status = 200, content((OutputPage = "application/json"), (String = "text/event-stream"))), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn output(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<JobId>,
    QueryParams(query): QueryParams<OutputQuery>,
    request: Request,
) -> Result<Response, ApiError> {
    let wanted = OutputRequest::new(&query, request.headers())?;
    // A reader of events waits for the maximum and reconnects after that.
    let wait = if wanted.events {
        Duration::from_millis(MAX_WAIT_MS)
    } else {
        wanted.wait
    };
    // Wait for a job that is not assigned yet.
    let row = orchestrator
        .wait_until(&caller, id, wait, |row| {
            row.node_id.is_some() || row.state.is_final()
        })
        .await?;
    if let Some(node_id) = row
        .node_id
        .filter(|_| row.output_sha256.is_none() && !row.state.is_final())
    {
        let client = orchestrator.fleet.client(&orchestrator.db, node_id).await?;
        let rest = request
            .uri()
            .query()
            .map_or_else(String::new, |query| format!("?{query}"));
        let answer = forward(
            &client,
            &format!("/v1/worker/jobs/{id}/output{rest}"),
            request,
            orchestrator.call_must_end(&caller, node_id),
        )
        .await?;
        if !matches!(answer.status(), StatusCode::NOT_FOUND | StatusCode::GONE) {
            return Ok(answer);
        }
    }
    // By now the output is stored here, or the node never had it.
    let row = orchestrator.db.job(&caller.scope, id).await?;
    match row.output_sha256.clone() {
        Some(sha256) => {
            output::stored_output(&orchestrator.blobs, &sha256, &row.into_object(), wanted).await
        }
        None if row.object.output.truncated_by.is_some() => {
            output::object_output(&row.into_object(), wanted).await
        }
        None => Ok(output::empty_response(wanted, &row.into_object())),
    }
}
