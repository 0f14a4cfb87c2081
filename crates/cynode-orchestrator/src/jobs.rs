//! Jobs, from a person's request to the word of the node that ran them.

use std::time::Duration;

use cynode_api::{
    ErrorCode, Job, JobCreate, JobId, JobOutput, JobRun, JobSandbox, JobState, exec_limits,
    job_limits,
};
use cynode_service::{ApiError, checks};

use crate::{
    Orchestrator,
    caller::Caller,
    db::{JobRow, NewJob, to_json},
    placement::{NodeLabels, NodeRequirements, Work, check_node_labels},
    sessions::visible,
};

impl Orchestrator {
    /// Accepts a job. The same id with the same body is the same job; the flag says whether it is new.
    pub(crate) async fn create_job(
        &self,
        caller: &Caller,
        body: JobCreate,
    ) -> Result<(JobRow, bool), ApiError> {
        check(&body)?;
        let job_id = body.job_id.unwrap_or_else(JobId::generate);
        if body.job_id.is_some()
            && let Some(existing) = self.db.any_job(job_id).await?
        {
            return self.same_job(caller, existing, &body).await;
        }
        let (task, is_new) = self
            .task_for(caller, body.task_id, || format!("job {job_id}"))
            .await?;
        let task_id = task.id;
        let image = self
            .choose_image(
                caller,
                body.image_ref.as_deref(),
                Work::Command,
                caller.preferences(&task),
            )
            .await?;
        self.check_artifact(caller, task_id, body.workspace_ref.as_ref())
            .await?;
        // One that was kept is on its node, and only there.
        let node_id = self
            .workspace_node(task_id, body.workspace_ref.as_ref())
            .await?;
        let wanted = NodeRequirements {
            labels: &body.node_labels,
            limits: body.limits.unwrap_or_default(),
        };
        match node_id {
            // Its labels never mattered to a job that has to run there.
            Some(id) => drop(
                self.fitting_node(
                    id,
                    &NodeRequirements {
                        labels: &NodeLabels::new(),
                        ..wanted
                    },
                )
                .await?,
            ),
            None => self.check_largest(&wanted).await?,
        }
        let request = JobRun {
            version: Some(cynode_api::API_VERSION),
            task_id,
            job_id,
            sandbox: JobSandbox {
                image_ref: image.image_ref.clone(),
                image_digest: image.image_digest.clone(),
                workspace_ref: body.workspace_ref.clone(),
                command: body.command.clone(),
                env: body.env.clone(),
                timeout_seconds: body.timeout_seconds,
                network_policy: body.network_policy,
                limits: body.limits,
            },
            job: None,
        };
        let object = Job {
            job_id,
            task_id,
            state: JobState::Accepted,
            exit_code: None,
            signal: None,
            acknowledged: false,
            output: JobOutput {
                encoding: "utf-8".to_owned(),
                ..JobOutput::default()
            },
            started_at: None,
            ended_at: None,
            node_id: None,
            image_ref: image.image_ref.clone(),
            image_digest: image.image_digest.clone(),
            sba_result: None,
            artifacts: Vec::new(),
            error: None,
            reported_by: "orchestrator".to_owned(),
            late_result: None,
            created_by: None,
        };
        let new = NewJob {
            body: &body,
            request: &request,
            object: &object,
            retry: body.retry.unwrap_or_default(),
            node_id,
            image_version_id: image.version_id,
            created_by: &caller.user_name,
        };
        if let Some(row) = self
            .db
            .insert_job(&new, is_new.then_some(&task), &caller.scope)
            .await?
        {
            self.told();
            self.jobs_wait.notify_one();
            return Ok((row, true));
        }
        let existing = self
            .db
            .any_job(job_id)
            .await?
            .ok_or_else(|| taken(job_id))?;
        self.same_job(caller, existing, &body).await
    }

    async fn same_job(
        &self,
        caller: &Caller,
        existing: JobRow,
        body: &JobCreate,
    ) -> Result<(JobRow, bool), ApiError> {
        let is_visible = visible(
            self.db.job(&caller.scope, existing.job_id).await,
            ErrorCode::JobNotFound,
        )?;
        if is_visible && existing.body == to_json(body) {
            Ok((existing, false))
        } else {
            Err(taken(existing.job_id))
        }
    }

    /// Waits for a job's end, up to a limit; whatever it is then.
    pub(crate) async fn wait_for_job(
        &self,
        caller: &Caller,
        id: JobId,
        limit: Duration,
    ) -> Result<JobRow, ApiError> {
        self.wait_for(caller, id, limit, |row| row.state.is_final())
            .await
    }

    /// Waits for a job to come so far, up to a limit; however far it is then.
    pub(crate) async fn wait_for(
        &self,
        caller: &Caller,
        id: JobId,
        limit: Duration,
        far: impl Fn(&JobRow) -> bool,
    ) -> Result<JobRow, ApiError> {
        let deadline = tokio::time::Instant::now() + limit;
        let mut news = self.news.subscribe();
        loop {
            let row = self.db.job(&caller.scope, id).await?;
            if far(&row) || tokio::time::Instant::now() >= deadline || self.stop.is_cancelled() {
                return Ok(row);
            }
            if !caller.is_good(self).await {
                return Err(ApiError::new(
                    ErrorCode::Unauthorized,
                    "the token is no longer valid",
                ));
            }
            // Another orchestrator may have brought it forward: its word comes by the database, or at the latest in a second.
            let next = (tokio::time::Instant::now() + Duration::from_secs(1)).min(deadline);
            drop(tokio::time::timeout_at(next, news.changed()).await);
        }
    }
}

fn check(body: &JobCreate) -> Result<(), ApiError> {
    if body.command.is_empty() {
        return Err(ApiError::invalid("command: must name a program"));
    }
    check_node_labels(&body.node_labels)?;
    if !body
        .timeout_seconds
        .is_none_or(|seconds| (1..=job_limits::MAX_TIMEOUT_SECONDS).contains(&seconds))
    {
        return Err(ApiError::invalid(format!(
            "timeout_seconds: must lie between 1 and {}",
            job_limits::MAX_TIMEOUT_SECONDS
        )));
    }
    checks::check_argv("command", &body.command)?;
    checks::check_env(&body.env, exec_limits::MAX_ENV, exec_limits::MAX_ENV_BYTES)?;
    body.limits.as_ref().map_or(Ok(()), checks::check_limits)
}

fn taken(id: JobId) -> ApiError {
    ApiError::new(
        ErrorCode::JobIdInUse,
        format!("job {id} was made by another request"),
    )
}
