//! Jobs on a worker.

use cynode_api::{API_VERSION, Job, JobId, JobRun, JobStop, OutputPage, TaskId};
use http::Method;

use crate::{OutputQuery, Result, WorkerClient, client};

impl WorkerClient {
    /// Accepts a job without waiting for its end.
    pub async fn run_job_async(&self, request: &JobRun) -> Result<Job> {
        let sent = self.request(Method::POST, "/v1/worker/jobs:run").header("prefer", "respond-async").timeout(client::CALL).json(request);
        client::json(client::send(sent).await?).await
    }

    pub async fn job(&self, id: JobId) -> Result<Job> {
        self.get(&format!("/v1/worker/jobs/{id}"), &()).await
    }

    pub async fn job_output(&self, id: JobId, query: &OutputQuery) -> Result<OutputPage> {
        self.get(&format!("/v1/worker/jobs/{id}/output"), query).await
    }

    /// Its result is safe: the node may forget it.
    pub async fn ack_job(&self, id: JobId) -> Result<()> {
        self.call_empty(Method::POST, &format!("/v1/worker/jobs/{id}/ack"), &serde_json::json!({ "version": API_VERSION })).await
    }

    pub async fn stop_job(&self, task_id: TaskId, job_id: JobId) -> Result<Job> {
        self.call(Method::POST, "/v1/worker/jobs:stop", &JobStop { version: Some(API_VERSION), task_id, job_id }).await
    }
}
