//! Job routes.

use std::sync::Arc;

use axum::{
    Json,
    body::{Body, Bytes},
    extract::State,
    response::{IntoResponse as _, Response},
};
use cynode_api::{
    ErrorCode, ExecExit, ExecId, Job, JobAck, JobId, JobRun, JobState, JobStop, OutputPage,
    OutputQuery, Page, Problem, TaskId,
};
use cynode_service::{ApiError, JsonBody, QueryParams, output::OutputRequest};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use serde::Deserialize;
use time::OffsetDateTime;
use tokio::time::Instant;
use tokio_util::io::ReaderStream;
use utoipa::IntoParams;

use super::{
    Api,
    output::answer,
    sessions::{Id, page, parse_id},
};
use crate::{
    jobs::{JobEntry, JobWithResult},
    sessions::check_version,
};

impl<S: Send + Sync> axum::extract::FromRequestParts<S> for Id<JobId> {
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
        parse_id(&path, "job_id", ErrorCode::JobNotFound).map(Id)
    }
}

/// Returns whether the caller prefers not to wait for the end (RFC 7240).
fn responds_async(headers: &HeaderMap) -> bool {
    let values = headers
        .get_all("prefer")
        .iter()
        .filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|preference| {
        preference
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .eq_ignore_ascii_case("respond-async")
    })
}

/// Responds with a job and its result. The stored JSON of the result is copied unparsed, because
/// parsed it would take many times the memory.
fn respond(job: JobWithResult) -> Result<Response, ApiError> {
    let JobWithResult { job, result } = job;
    let mut json = serde_json::to_vec(&job)
        .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
    if let Some(result) = result {
        // The last byte closes the object.
        json.pop();
        json.extend_from_slice(b",\"sba_result\":");
        json.extend_from_slice(&result);
        json.push(b'}');
    }
    let kind = HeaderValue::from_static("application/json");
    Ok(([(header::CONTENT_TYPE, kind)], Bytes::from(json)).into_response())
}

/// Waits for the end of a job. Fails if the worker shuts down: the next worker resumes the job.
async fn result(api: &Api, entry: &JobEntry) -> Result<JobWithResult, ApiError> {
    tokio::select! {
        () = entry.wait_until_ended() => api.jobs.object(entry).await,
        () = api.stop.cancelled() => Err(ApiError::new(
            ErrorCode::ShuttingDown,
            "the worker is shutting down; the job and its result are retained",
        )),
    }
}

/// Run a job: one command, or the steps of one specification, once, in its own sandbox. Responds at
/// its end, however it ended; with `Prefer: respond-async` as soon as the job is on disk. A repeated
/// request returns the same job.
#[utoipa::path(post, path = "/v1/worker/jobs:run", tag = "jobs", request_body = JobRun,
    params(("Prefer" = Option<String>, Header,
        description = "`respond-async`: do not wait for the end")),
    responses(
        (status = 200, body = Job, description = "The job has ended"),
        (status = 202, body = Job, description = "The job is accepted"),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn run(
    State(api): State<Api>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<JobRun>,
) -> Result<Response, ApiError> {
    let entry = api.jobs.run(request).await?;
    if !responds_async(&headers) {
        return respond(result(&api, &entry).await?);
    }
    let job = api.jobs.object(&entry).await?;
    let status = if job.job.state.is_final() {
        StatusCode::OK
    } else {
        StatusCode::ACCEPTED
    };
    let applied = [("preference-applied", "respond-async")];
    Ok((status, applied, respond(job)?).into_response())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct JobListQuery {
    #[param(value_type = Option<JobState>)]
    state: Option<String>,
    task_id: Option<TaskId>,
    /// 1 to 1000; 1000 by default.
    limit: Option<usize>,
    cursor: Option<String>,
}

/// List unacknowledged jobs in the order of their ids, without their output, results and artifacts.
#[utoipa::path(get, path = "/v1/worker/jobs", tag = "jobs", params(JobListQuery),
    responses(
        (status = 200, body = Page<Job>),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(api): State<Api>,
    QueryParams(query): QueryParams<JobListQuery>,
) -> Result<Json<Page<Job>>, ApiError> {
    let state = query
        .state
        .map(|text| text.parse::<JobState>())
        .transpose()
        .map_err(|error| ApiError::invalid(format!("state: {error}")))?;
    let after = query
        .cursor
        .map(|cursor| cursor.parse::<JobId>())
        .transpose()
        .map_err(|_| ApiError::invalid("cursor: is invalid"))?;
    // Compares ids, because the cursor's job may have been acknowledged meanwhile.
    let object = |(_, entry): &(JobId, Arc<JobEntry>)| {
        let job = entry.job();
        (state.is_none_or(|state| job.state == state)
            && query.task_id.is_none_or(|task| job.task_id == task))
        .then_some(job)
    };
    page(
        api.jobs.entries(after),
        query.limit,
        None,
        |(id, _)| *id,
        object,
    )
    .map(Json)
}

/// Show a job, with its result once it has ended.
#[utoipa::path(get, path = "/v1/worker/jobs/{job_id}", tag = "jobs",
    params(("job_id" = JobId, Path)),
    responses(
        (status = 200, body = Job),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(State(api): State<Api>, Id(id): Id<JobId>) -> Result<Response, ApiError> {
    let entry = api.jobs.get(id)?;
    respond(api.jobs.object(&entry).await?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ArtifactQuery {
    /// Relative to the job's directory of artifacts.
    path: String,
}

/// Read a file that the job left in its directory of artifacts. It is retained until the job is
/// acknowledged.
#[utoipa::path(get, path = "/v1/worker/jobs/{job_id}/artifacts", tag = "jobs",
    params(("job_id" = JobId, Path), ArtifactQuery),
    responses(
        (status = 200, content_type = "application/octet-stream", body = Vec<u8>),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn artifact(
    State(api): State<Api>,
    Id(id): Id<JobId>,
    QueryParams(query): QueryParams<ArtifactQuery>,
) -> Result<Response, ApiError> {
    let entry = api.jobs.get(id)?;
    let (kept, file) = api.jobs.artifact(&entry, query.path).await?;
    let mut headers = HeaderMap::new();
    for (name, value) in [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, kept.size.to_string()),
        (header::ETAG, format!("\"sha256:{}\"", kept.sha256)),
        (HeaderName::from_static("x-content-sha256"), kept.sha256),
    ] {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    }
    let body = Body::from_stream(ReaderStream::new(tokio::fs::File::from_std(file)));
    Ok((headers, body).into_response())
}

/// Read the output of a running or finished job, as for an exec. It is retained until the job is
/// acknowledged.
#[utoipa::path(get, path = "/v1/worker/jobs/{job_id}/output", tag = "jobs",
    params(("job_id" = JobId, Path), OutputQuery),
    responses(
        (status = 200,
            content((OutputPage = "application/json"), (String = "text/event-stream"))),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn output(
    State(api): State<Api>,
    Id(id): Id<JobId>,
    headers: HeaderMap,
    QueryParams(query): QueryParams<OutputQuery>,
) -> Result<Response, ApiError> {
    let entry = api.jobs.get(id)?;
    let request = OutputRequest::new(&query, &headers)?;
    let deadline = Instant::now() + request.wait;
    if !request.events || entry.is_final() {
        drop(
            tokio::time::timeout_at(
                deadline,
                entry.wait_until(|record| record.job.state != JobState::Accepted),
            )
            .await,
        );
    } else {
        tokio::select! {
            () = entry.wait_until(|record| record.job.state != JobState::Accepted) => {}
            () = api.stop.cancelled() => {
                return Err(ApiError::new(ErrorCode::ShuttingDown, "the worker is shutting down"));
            }
        }
    }
    if entry.is_acknowledged() {
        return Err(expired(id));
    }
    if let Some(exec) = api.jobs.exec(&entry) {
        return answer(request, deadline, &exec, api.stop.clone()).await;
    }
    if entry.is_acknowledged() {
        return Err(expired(id));
    }
    let job = entry.job();
    let ended = job.state.is_final().then(|| {
        (
            ExecExit::never_ran(api.sessions.config.exec_via),
            job.ended_at.unwrap_or_else(OffsetDateTime::now_utc),
        )
    });
    Ok(request.empty_response(ExecId::from_uuid(*id.as_uuid()), 0, ended))
}

fn expired(id: JobId) -> ApiError {
    Problem::new(
        ErrorCode::OutputExpired,
        format!("job {id} was acknowledged and its output dropped"),
    )
    .with_remedy("Read the output before the job is acknowledged.")
    .into()
}

/// Acknowledge the result of a job. Its output is dropped; its id stays reserved for a day.
#[utoipa::path(post, path = "/v1/worker/jobs/{job_id}/ack", tag = "jobs",
    params(("job_id" = JobId, Path)), request_body = JobAck,
    responses(
        (status = 204),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn acknowledge(
    State(api): State<Api>,
    Id(id): Id<JobId>,
    JsonBody(request): JsonBody<JobAck>,
) -> Result<StatusCode, ApiError> {
    check_version(request.version)?;
    api.jobs.acknowledge(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Stop a job: TERM, a grace period, KILL. Responds at its end. A job that has ended keeps its
/// result; an unknown one is barred from running here.
#[utoipa::path(post, path = "/v1/worker/jobs:stop", tag = "jobs", request_body = JobStop,
    responses(
        (status = 200, body = Job),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn stop(
    State(api): State<Api>,
    JsonBody(request): JsonBody<JobStop>,
) -> Result<Response, ApiError> {
    let entry = api.jobs.stop(&request).await?;
    respond(result(&api, &entry).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefer_header_is_found_among_others() {
        let prefers = |values: &[&str]| {
            responds_async(
                &values
                    .iter()
                    .map(|value| {
                        (
                            http::HeaderName::from_static("prefer"),
                            value.parse().expect("a value"),
                        )
                    })
                    .collect(),
            )
        };
        assert!(
            prefers(&["respond-async"])
                && prefers(&["wait=10, Respond-Async"])
                && prefers(&["wait=1", "respond-async; x=y"])
        );
        assert!(!prefers(&[]) && !prefers(&["return=minimal"]) && !prefers(&["not-respond-async"]));
    }
}
