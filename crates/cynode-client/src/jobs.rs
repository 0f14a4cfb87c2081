//! Jobs: one run to an end.

use cynode_api::{API_VERSION, Job, JobId, JobRun, JobStop, OutputPage, TaskId};
use http::Method;

use crate::{
    OutputQuery, Result, WorkerClient,
    client::{json, send},
};

/// When the answer to a run comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobRunMode {
    /// At the job's end.
    Wait,
    /// At once, with the job accepted.
    Async,
}

impl WorkerClient {
    pub async fn run_job(&self, run: &JobRun, mode: JobRunMode) -> Result<Job> {
        let mut request = self.request(Method::POST, "/v1/worker/jobs:run").json(run);
        if mode == JobRunMode::Async {
            request = request.header("Prefer", "respond-async");
        }
        json(send(request).await?).await
    }

    pub async fn get_job(&self, id: JobId) -> Result<Job> {
        self.get(&format!("/v1/worker/jobs/{id}"), &()).await
    }

    pub async fn job_output(&self, id: JobId, query: &OutputQuery) -> Result<OutputPage> {
        self.get(&format!("/v1/worker/jobs/{id}/output"), query).await
    }

    /// Tells the node that the result is kept elsewhere, so that it may forget it.
    pub async fn ack_job(&self, id: JobId) -> Result<()> {
        self.call_empty(Method::POST, &format!("/v1/worker/jobs/{id}/ack"), &serde_json::json!({ "version": API_VERSION })).await
    }

    pub async fn stop_job(&self, task_id: TaskId, job_id: JobId) -> Result<()> {
        self.call_empty(Method::POST, "/v1/worker/jobs:stop", &JobStop { version: Some(API_VERSION), task_id, job_id }).await
    }
}
