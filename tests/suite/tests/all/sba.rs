//! Jobs with a specification, run by `cynode-sba` in their sandbox.

mod artifacts;
mod ends;
mod foreign;
pub(crate) mod restarts;
mod steps;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    Job, JobRun, JobState, Reporter,
    sba::{JobResult, StepResult, StepStatus},
};
use cynode_client::SessionClient;
use cynode_tests::{World, eventually, sba_job, specification};
use serde_json::Value;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// How a job ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) job: Job,
    pub(crate) result: JobResult,
}

impl Ended {
    /// Checks that the result is whole and that the job's object agrees with it.
    pub(crate) fn of(job: Job) -> Result<Self> {
        let json = job
            .sba_result
            .as_ref()
            .with_context(|| format!("no result: {job:?}"))?;
        let result = JobResult::parse(json.to_string().as_bytes())
            .with_context(|| format!("not a result: {json}"))?;
        ensure!(result.job_id == Some(job.job_id), "{json}");
        let code = result
            .failure_code
            .as_ref()
            .map(|code| code.as_str().to_owned());
        ensure!(
            (job.state == JobState::Completed) == code.is_none(),
            "{job:?}"
        );
        if job.state != JobState::Canceled {
            let error = job.error.as_ref().map(|error| error.code.clone());
            ensure!(error == code, "{error:?} is not {code:?}: {job:?}");
        }
        ensure!(
            code.is_none() == result.failure_message.is_none(),
            "a failure has a code and a message: {json}"
        );
        Ok(Self { job, result })
    }

    pub(crate) async fn after(client: &SessionClient, request: &JobRun) -> Result<Self> {
        Self::of(client.run_job(request).await?)
    }

    /// State, failure code and who reported them.
    pub(crate) fn verdict(&self) -> (JobState, &str, &str) {
        let code = self.result.failure_code.as_ref();
        (
            self.job.state,
            code.map_or("", |code| code.as_str()),
            self.job.reported_by.as_str(),
        )
    }

    pub(crate) fn message(&self) -> &str {
        self.result.failure_message.as_deref().unwrap_or_default()
    }

    pub(crate) fn statuses(&self) -> Vec<StepStatus> {
        self.result.steps.iter().map(|step| step.status).collect()
    }

    pub(crate) fn step(&self, index: usize) -> Result<&StepResult> {
        let step = self.result.steps.get(index);
        step.with_context(|| format!("no step {index}: {self:?}"))
    }

    pub(crate) fn stdout(&self, index: usize) -> Result<&str> {
        Ok(self.step(index)?.stdout.as_deref().unwrap_or_default())
    }

    /// Fails unless the job ended with a success that the worker reported.
    pub(crate) fn success(self) -> Result<Self> {
        let is_success = self.verdict() == (JobState::Completed, "", Reporter::Worker.as_str());
        ensure!(is_success, "{self:#?}");
        Ok(self)
    }
}

/// Runs steps to their end.
async fn run(client: &SessionClient, steps: &[Value]) -> Result<Ended> {
    Ended::after(client, &sba_job(&specification(steps))).await
}

/// Waits until a job is at a step.
async fn until_step(client: &SessionClient, request: &JobRun, index: u64) -> Result<()> {
    eventually("the job is at the step", TIMEOUT, async || {
        let job = client.job(request.job_id).await?;
        ensure!(!job.state.is_final(), "it has ended: {job:?}");
        Ok(job
            .progress
            .is_some_and(|progress| progress.step == Some(index)))
    })
    .await
}

async fn no_container(world: &World) -> Result<()> {
    eventually("the job's sandbox is gone", TIMEOUT, async || {
        Ok(world.containers()?.is_empty())
    })
    .await
}
