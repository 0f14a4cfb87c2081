//! Jobs on a worker: run, look, read, acknowledge, stop.

use std::time::Duration;

use cynode_api::{
    API_VERSION, Job, JobAck, JobId, JobRun, JobState, JobStop, OutputPage, Page, TaskId,
    job_limits::DEFAULT_TIMEOUT_SECONDS,
};
use http::{Method, header};

use crate::{
    Error, ExecEvents, OutputQuery, Result, WorkerClient,
    client::{CALL, accept, json, send},
    execs::EVENT_STREAM,
};

const JOBS: &str = "/v1/worker/jobs";
/// The most pages that a whole list may take: a server that never ends its list must not hold us.
const MAX_PAGES: usize = 1_000;

/// Which jobs a list shows.
#[derive(Clone, Copy, Debug, Default)]
pub struct JobFilter {
    pub state: Option<JobState>,
    pub task_id: Option<TaskId>,
}

fn of(id: JobId, rest: &str) -> String {
    format!("{JOBS}/{id}{rest}")
}

impl WorkerClient {
    /// Runs a job and waits for its end, which says how its command ended. The same request again is the same job.
    pub async fn run_job(&self, request: &JobRun) -> Result<Job> {
        // The node's deadline decides; ours only stops us from hanging on a dead connection.
        let patience = Duration::from_secs(
            request
                .sandbox
                .timeout_seconds
                .unwrap_or(DEFAULT_TIMEOUT_SECONDS),
        ) + CALL;
        json(
            send(
                self.request(Method::POST, &format!("{JOBS}:run"))
                    .timeout(patience)
                    .json(request),
            )
            .await?,
        )
        .await
    }

    /// Hands a job over and returns when the node has it on disk.
    pub async fn run_job_async(&self, request: &JobRun) -> Result<Job> {
        let request = self
            .request(Method::POST, &format!("{JOBS}:run"))
            .header("Prefer", "respond-async")
            .timeout(CALL)
            .json(request);
        json(send(request).await?).await
    }

    pub async fn job(&self, id: JobId) -> Result<Job> {
        self.get(&of(id, ""), &()).await
    }

    pub async fn job_output(&self, id: JobId, query: &OutputQuery) -> Result<OutputPage> {
        self.get(&of(id, "/output"), query).await
    }

    /// Follows a job's output from after `last_seq`; 0 is from the start. A job that has not started is waited for.
    pub async fn job_output_stream(&self, id: JobId, last_seq: u64) -> Result<ExecEvents> {
        let request = self
            .request(Method::GET, &of(id, "/output"))
            .header(header::ACCEPT, EVENT_STREAM)
            .header("Last-Event-ID", last_seq.to_string());
        Ok(ExecEvents::new(
            accept(send(request).await?).await?,
            last_seq,
        ))
    }

    /// Says that the result is known, so that the node may forget it.
    pub async fn ack_job(&self, id: JobId) -> Result<()> {
        self.call_empty(
            Method::POST,
            &of(id, "/ack"),
            &JobAck {
                version: Some(API_VERSION),
            },
        )
        .await
    }

    /// Stops a job and returns it as it ended.
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

    /// All jobs of the node that are not acknowledged, without their streams.
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
