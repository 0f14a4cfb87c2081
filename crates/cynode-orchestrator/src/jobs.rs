//! Jobs, from a caller's request to the result of their node.

use std::time::Duration;

use cynode_api::{
    CallId, Job, JobCreate, JobId, JobOutput, JobRun, JobSandbox, JobState, Problem, Reporter,
    sba::{JobSpec, Violations},
};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::{
    Orchestrator,
    caller::Caller,
    db::{self, JobRow, NewJob, is_visible, to_json},
    git_workspaces::{self, GitSource, SeededWorkspace},
    placement::{self, NodeLabels, NodeRequirements, Work},
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error(transparent)]
    Placement(#[from] placement::Error),
    #[error(transparent)]
    Seed(#[from] git_workspaces::Error),
    #[error("job {0} was made by another request")]
    IdInUse(JobId),
    /// The token expired or was revoked while its holder waited.
    #[error("the token is no longer valid")]
    TokenInvalid,
    /// With its context, the specification is not valid.
    #[error("{0}")]
    Invalid(#[from] Violations),
    #[error("{0}")]
    TooLarge(String),
    #[error("job.inference.allowed_models: none of {asked} is allowed for this project; {allowed}")]
    ModelNotAllowed { asked: String, allowed: String },
    /// The gate's refusal of what the context would bring into the sandbox.
    #[error("the context of the job is refused")]
    Refused(Box<Problem>),
}

impl Orchestrator {
    /// Accepts a job. A request with a known id and the same body returns that job; the flag tells
    /// whether the job is new.
    pub(crate) async fn create_job(
        &self,
        caller: &Caller,
        mut body: JobCreate,
        call_id: Option<CallId>,
    ) -> Result<(JobRow, bool), Error> {
        let mut spec = body.job.take();
        let stored_body = stored_body(&body, spec.as_deref());
        let job_id = body.job_id.unwrap_or_else(JobId::generate);
        if body.job_id.is_some()
            && let Some(existing) = self.db.any_job(job_id).await?
        {
            return self.repeated_job(caller, existing, &stored_body).await;
        }
        let name = || format!("job {job_id}");
        let git = GitSource::of(body.workspace_ref.as_ref(), body.workspace_depth);
        let (task, is_new) = match git {
            Some(git) => {
                let task = self.task_for_repository(caller, body.task_id, git, name);
                (task.await?, false)
            }
            None => self.task_for(caller, body.task_id, name).await?,
        };
        let task_id = task.id;
        let image = self
            .choose_image(
                caller,
                body.image_ref.as_deref(),
                if spec.is_some() {
                    Work::Agent
                } else {
                    Work::Command
                },
                caller.preferences(&task),
            )
            .await?;
        self.check_artifact(caller, task_id, body.workspace_ref.as_ref())
            .await?;
        // A kept workspace exists only on its node.
        let node_id = self
            .placement
            .workspace_node(task_id, body.workspace_ref.as_ref())
            .await?;
        let models = match spec.as_mut().and_then(|spec| spec.inference.as_mut()) {
            Some(inference) => {
                self.cut_models(caller, &task, inference).await?;
                inference.allowed_models.clone()
            }
            None => Vec::new(),
        };
        let wanted = NodeRequirements {
            labels: &body.node_labels,
            limits: body.limits.unwrap_or_default(),
            needs_runner: spec.is_some(),
            models: &models,
        };
        match node_id {
            // Labels are not checked for a job that is bound to a node.
            Some(id) => drop(
                self.placement
                    .check_workspace_node(
                        id,
                        &NodeRequirements {
                            labels: &NodeLabels::new(),
                            ..wanted
                        },
                    )
                    .await?,
            ),
            None => self.placement.check_grantable(&wanted).await?,
        }
        let resolved = match spec {
            Some(spec) => Some(Box::pin(self.resolve_job(caller, &task, *spec)).await?),
            None => None,
        };
        let seeded = match git {
            Some(git) => Some(Box::pin(self.seed_workspace(caller, &task, git, call_id)).await?),
            None => None,
        };
        let seed_ref = seeded.as_ref().map(SeededWorkspace::workspace_ref);
        let deadline = resolved
            .as_ref()
            .map(|resolved| resolved.spec.constraints.max_runtime_seconds);
        let request = JobRun {
            version: Some(cynode_api::API_VERSION),
            task_id,
            job_id,
            sandbox: JobSandbox {
                image_ref: image.image_ref.clone(),
                image_digest: image.image_digest.clone(),
                workspace_ref: seed_ref.or_else(|| body.workspace_ref.clone()),
                command: body.command.clone(),
                env: body.env.clone(),
                timeout_seconds: deadline.or(body.timeout_seconds),
                network_policy: body.network_policy,
                limits: body.limits,
            },
            job: None,
        };
        let object = accepted(&request);
        let new = NewJob {
            body: &stored_body,
            request: &request,
            spec: resolved.as_ref().map(|resolved| resolved.json.as_str()),
            object: &object,
            retry: body.retry.unwrap_or_default(),
            allowed_models: &models,
            node_id,
            image_version_id: image.version_id,
            created_by: &caller.user_name,
        };
        if let Some(row) = self
            .db
            .insert_job(&new, is_new.then_some(&task), &caller.scope)
            .await?
        {
            self.readers.notify();
            self.jobs_due.notify_one();
            return Ok((row, true));
        }
        let existing = self
            .db
            .any_job(job_id)
            .await?
            .ok_or(Error::IdInUse(job_id))?;
        self.repeated_job(caller, existing, &stored_body).await
    }

    async fn repeated_job(
        &self,
        caller: &Caller,
        existing: JobRow,
        body: &Value,
    ) -> Result<(JobRow, bool), Error> {
        let is_visible = is_visible(self.db.job(&caller.scope, existing.job_id).await)?;
        if is_visible && existing.body == *body {
            Ok((existing, false))
        } else {
            Err(Error::IdInUse(existing.job_id))
        }
    }

    /// Waits for a job to end, at most for `limit`, and returns its state then.
    pub(crate) async fn wait_for_job(
        &self,
        caller: &Caller,
        id: JobId,
        limit: Duration,
    ) -> Result<JobRow, Error> {
        self.wait_until(caller, id, limit, |row| row.state.is_final())
            .await
    }

    /// Waits for a job to satisfy `is_done`, at most for `limit`, and returns its state then.
    pub(crate) async fn wait_until(
        &self,
        caller: &Caller,
        id: JobId,
        limit: Duration,
        is_done: impl Fn(&JobRow) -> bool,
    ) -> Result<JobRow, Error> {
        let deadline = tokio::time::Instant::now() + limit;
        let mut news = self.readers.subscribe();
        loop {
            let row = self.db.job(&caller.scope, id).await?;
            if is_done(&row) || tokio::time::Instant::now() >= deadline || self.stop.is_cancelled()
            {
                return Ok(row);
            }
            if !caller.is_token_valid(self).await {
                return Err(Error::TokenInvalid);
            }
            // Another orchestrator may advance the job: its notification comes by the database, and
            // a poll every second covers a lost one.
            let next = (tokio::time::Instant::now() + Duration::from_secs(1)).min(deadline);
            drop(tokio::time::timeout_at(next, news.changed()).await);
        }
    }
}

/// A job before its node's first report.
pub(crate) fn accepted(request: &JobRun) -> Job {
    Job {
        job_id: request.job_id,
        task_id: request.task_id,
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
        image_ref: request.sandbox.image_ref.clone(),
        image_digest: request.sandbox.image_digest.clone(),
        sba_result: None,
        progress: None,
        artifacts: Vec::new(),
        artifacts_omitted: 0,
        error: None,
        reported_by: Reporter::Orchestrator,
        late_result: None,
        command: None,
        created_by: None,
    }
}

/// The request as it is stored, to be compared with a repetition: a specification, which may be
/// large, by its hash.
fn stored_body(body: &JobCreate, spec: Option<&JobSpec>) -> Value {
    let mut stored = to_json(body);
    if let Some(spec) = spec {
        let json = serde_json::to_vec(spec).unwrap_or_default();
        stored["job"] = json!({
            "sha256": hex::encode(Sha256::digest(&json)),
            "steps": spec.steps.len(),
        });
    }
    stored
}
