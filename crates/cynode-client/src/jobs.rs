//! Jobs on a worker: run, inspect, read, acknowledge, stop.

use std::time::Duration;

use cynode_api::{
    API_VERSION, Job, JobAck, JobId, JobRun, JobState, JobStop, OutputPage, OutputQuery, Page,
    TaskId, job_limits::DEFAULT_TIMEOUT_SECONDS,
};
use http::{Method, header};

use crate::{
    ArtifactBody, Error, ExecEvents, Result, SessionClient,
    client::{CALL_TIMEOUT, MAX_PAGES, check_status, json, send},
    execs::EVENT_STREAM,
};

const JOBS: &str = "/v1/worker/jobs";
/// The jobs to list.
#[derive(Clone, Copy, Debug, Default)]
pub struct JobFilter {
    pub state: Option<JobState>,
    pub task_id: Option<TaskId>,
}

fn job_path(id: JobId, rest: &str) -> String {
    format!("{JOBS}/{id}{rest}")
}

impl SessionClient {
    /// Runs a job and waits for it to end. Idempotent: the same request again is the same job.
    pub async fn run_job(&self, request: &JobRun) -> Result<Job> {
        // The node enforces the deadline; this timeout only detects a dead connection.
        let timeout = Duration::from_secs(
            request
                .sandbox
                .timeout_seconds
                .unwrap_or(DEFAULT_TIMEOUT_SECONDS),
        ) + CALL_TIMEOUT;
        json(
            send(
                self.request(Method::POST, &format!("{JOBS}:run"))
                    .timeout(timeout)
                    .json(request),
            )
            .await?,
        )
        .await
    }

    /// Submits a job and returns once the node has stored it.
    pub async fn run_job_async(&self, request: &JobRun) -> Result<Job> {
        let request = self
            .request(Method::POST, &format!("{JOBS}:run"))
            .header("Prefer", "respond-async")
            .timeout(CALL_TIMEOUT)
            .json(request);
        json(send(request).await?).await
    }

    pub async fn job(&self, id: JobId) -> Result<Job> {
        self.get(&job_path(id, ""), &()).await
    }

    pub async fn job_output(&self, id: JobId, query: &OutputQuery) -> Result<OutputPage> {
        self.get(&job_path(id, "/output"), query).await
    }

    /// Streams the output of a job after `last_seq`; 0 is the start. Waits for the job to start.
    pub async fn job_output_stream(&self, id: JobId, last_seq: u64) -> Result<ExecEvents> {
        let request = self
            .request(Method::GET, &job_path(id, "/output"))
            .header(header::ACCEPT, EVENT_STREAM)
            .header("Last-Event-ID", last_seq.to_string());
        Ok(ExecEvents::new(
            check_status(send(request).await?).await?,
            last_seq,
        ))
    }

    /// A file that the job left below its directory of artifacts. The body is streamed, without a
    /// timeout.
    pub async fn job_artifact(&self, id: JobId, path: &str) -> Result<ArtifactBody> {
        let request = self
            .request(Method::GET, &job_path(id, "/artifacts"))
            .query(&[("path", path)]);
        Ok(ArtifactBody::new(check_status(send(request).await?).await?))
    }

    /// Acknowledges the result, so that the node may drop it.
    pub async fn ack_job(&self, id: JobId) -> Result<()> {
        self.call_empty(
            Method::POST,
            &job_path(id, "/ack"),
            &JobAck {
                version: Some(API_VERSION),
            },
        )
        .await
    }

    /// Stops a job and returns its final state.
    pub async fn stop_job(&self, task_id: TaskId, job_id: JobId) -> Result<Job> {
        self.call(
            Method::POST,
            &format!("{JOBS}:stop"),
            &JobStop {
                version: Some(API_VERSION),
                task_id,
                job_id,
            },
        )
        .await
    }

    pub async fn list_jobs_page(
        &self,
        filter: &JobFilter,
        cursor: Option<String>,
    ) -> Result<Page<Job>> {
        let mut query = Vec::new();
        query.extend(filter.state.map(|state| ("state", state.to_string())));
        query.extend(filter.task_id.map(|task| ("task_id", task.to_string())));
        query.extend(cursor.map(|cursor| ("cursor", cursor)));
        self.get(JOBS, &query).await
    }

    /// All unacknowledged jobs of the node, without their output.
    pub async fn list_jobs(&self, filter: &JobFilter) -> Result<Vec<Job>> {
        let mut jobs = Vec::new();
        let mut cursor = None;
        for _ in 0..MAX_PAGES {
            let page = self.list_jobs_page(filter, cursor).await?;
            jobs.extend(page.items);
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(jobs);
            }
        }
        Err(Error::answer(
            self.base(),
            format!("the list has more than {MAX_PAGES} pages"),
        ))
    }
}
