//! The checks of a repository: commands that must succeed on a commit before it is pushed.
//!
//! Invariants: the role's own commit is checked, in a fresh sandbox without a network, and only an
//! exit code that a worker saw counts. The ids of the jobs can't be predicted, so that no other job
//! can pass for one.

use cynode_api::{
    API_VERSION, ArtifactId, DEFAULT_IMAGE_KEY, GitSeed, JobCreate, JobId, JobRun, JobSandbox,
    JobState, NetworkPolicy, PromotionCheck, Reporter, Repository, RepositoryCheck, Retry,
    WorkspaceRef,
};

use crate::{
    Orchestrator,
    caller::Scope,
    db::{self, JobRow, NewJob, PromotionRow, to_json},
    git_workspaces,
    jobs::accepted,
};

const DEFAULT_TIMEOUT_SECONDS: u32 = 600;
/// A check sees the commit without its history.
const DEPTH: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    #[error(transparent)]
    Seed(#[from] git_workspaces::Error),
    #[error("no allowed image goes by '{0}'")]
    ImageNotAllowed(String),
}

#[derive(Debug)]
pub(crate) enum ChecksOutcome {
    Running,
    Passed,
    /// What failed, for people.
    Failed(String),
}

/// Starts the checks of a commit that have not started, and says how they go.
pub(crate) async fn run(
    orchestrator: &Orchestrator,
    row: &mut PromotionRow,
    repository: &Repository,
) -> Result<ChecksOutcome, Error> {
    let commit = row.promotion.commit.clone().unwrap_or_default();
    let mut seed = None;
    let mut checks = Vec::with_capacity(repository.checks.len());
    let mut outcome = ChecksOutcome::Passed;
    for check in &repository.checks {
        let job_id = orchestrator.keys.check_job(
            row.promotion.id,
            row.progress.round,
            repository.revision,
            &check.name,
            &commit,
        );
        let job = match orchestrator.db.any_job(job_id).await? {
            Some(job) => Some(job),
            None => {
                let seed = match seed {
                    Some(seed) => seed,
                    None => *seed.insert(seeded(orchestrator, row, repository, &commit).await?),
                };
                start(orchestrator, row, check, job_id, seed).await?
            }
        };
        let check = shown(check, job_id, &commit, job.as_ref());
        outcome = worse(outcome, verdict(&check, job.as_ref()));
        checks.push(check);
    }
    row.promotion.checks = checks;
    if !matches!(outcome, ChecksOutcome::Running) {
        stop(orchestrator, row).await?;
    }
    Ok(outcome)
}

/// Stops the checks of a promotion that no longer matter.
pub(crate) async fn stop(orchestrator: &Orchestrator, row: &PromotionRow) -> Result<(), db::Error> {
    for check in &row.promotion.checks {
        // Changes nothing about a job that has ended.
        orchestrator.db.request_stop(check.job_id).await?;
    }
    orchestrator.jobs_due.notify_one();
    Ok(())
}

async fn seeded(
    orchestrator: &Orchestrator,
    row: &PromotionRow,
    repository: &Repository,
    commit: &str,
) -> Result<ArtifactId, Error> {
    let request = GitSeed {
        version: API_VERSION,
        call: row.on_behalf().call(repository),
        reference: format!("refs/heads/{}", row.promotion.branch),
        commit: commit.to_owned(),
        depth: Some(DEPTH),
    };
    let created_by = &row.promotion.created_by;
    let (artifact, _) = orchestrator
        .seed_artifact(repository, &request, created_by)
        .await?;
    Ok(artifact.id)
}

/// Stores a check's job under its id. Repeating it starts nothing twice.
async fn start(
    orchestrator: &Orchestrator,
    row: &PromotionRow,
    check: &RepositoryCheck,
    job_id: JobId,
    seed: ArtifactId,
) -> Result<Option<JobRow>, Error> {
    let db = &orchestrator.db;
    let reference = match &check.image_ref {
        Some(reference) => reference.clone(),
        None => db
            .setting(DEFAULT_IMAGE_KEY)
            .await?
            .and_then(|setting| setting.value.as_str().map(str::to_owned))
            .unwrap_or_else(|| orchestrator.config.default_image.clone()),
    };
    let image = db.allowed_image(&reference).await?;
    let image = image.ok_or(Error::ImageNotAllowed(reference))?;
    let body = JobCreate {
        task_id: Some(row.promotion.task_id),
        job_id: Some(job_id),
        image_ref: Some(image.image_ref.clone()),
        workspace_ref: Some(WorkspaceRef::Artifact(seed)),
        command: check.argv.clone(),
        timeout_seconds: Some(
            check
                .timeout_seconds
                .unwrap_or(DEFAULT_TIMEOUT_SECONDS)
                .into(),
        ),
        network_policy: Some(NetworkPolicy::None),
        retry: Some(Retry::OnNodeLoss),
        ..JobCreate::default()
    };
    let request = JobRun {
        version: Some(API_VERSION),
        task_id: row.promotion.task_id,
        job_id,
        sandbox: JobSandbox {
            image_ref: image.image_ref,
            image_digest: image.image_digest,
            workspace_ref: body.workspace_ref.clone(),
            command: body.command.clone(),
            env: body.env.clone(),
            timeout_seconds: body.timeout_seconds,
            network_policy: body.network_policy,
            limits: None,
        },
        job: None,
    };
    let new = NewJob {
        body: &to_json(&body),
        request: &request,
        spec: None,
        object: &accepted(&request),
        retry: Retry::OnNodeLoss,
        allowed_models: &[],
        node_id: None,
        image_version_id: image.version_id,
        created_by: &row.promotion.created_by,
    };
    let scope = Scope {
        is_admin: false,
        sees_all: true,
        user_id: row.owner_id,
    };
    let job = db.insert_job(&new, None, &scope).await?;
    orchestrator.jobs_due.notify_one();
    match job {
        Some(job) => Ok(Some(job)),
        None => Ok(db.any_job(job_id).await?),
    }
}

fn shown(
    check: &RepositoryCheck,
    job_id: JobId,
    commit: &str,
    job: Option<&JobRow>,
) -> PromotionCheck {
    let state = job.map_or(JobState::Accepted, |job| job.state);
    PromotionCheck {
        name: check.name.clone(),
        job_id,
        commit: commit.to_owned(),
        state: state.to_string(),
        exit_code: job.and_then(|job| job.object.exit_code),
    }
}

fn verdict(check: &PromotionCheck, job: Option<&JobRow>) -> ChecksOutcome {
    let Some(job) = job.filter(|job| job.state.is_final()) else {
        return ChecksOutcome::Running;
    };
    // What a process inside has reported proves nothing.
    let was_seen = job.object.reported_by == Reporter::Worker;
    if job.state == JobState::Completed && job.object.exit_code == Some(0) && was_seen {
        return ChecksOutcome::Passed;
    }
    let error = job.object.error.as_ref();
    let reason = match (error, job.object.exit_code) {
        (Some(error), _) => format!("{}: {}", error.code, error.detail),
        (None, Some(0)) => "its worker did not see its end".to_owned(),
        (None, Some(code)) => format!("exit code {code}"),
        (None, None) => check.state.clone(),
    };
    ChecksOutcome::Failed(format!("the check '{}' did not pass: {reason}", check.name))
}

/// One failure fails all, at once; all must have passed.
fn worse(one: ChecksOutcome, other: ChecksOutcome) -> ChecksOutcome {
    match (one, other) {
        (failed @ ChecksOutcome::Failed(_), _) | (_, failed @ ChecksOutcome::Failed(_)) => failed,
        (ChecksOutcome::Running, _) | (_, ChecksOutcome::Running) => ChecksOutcome::Running,
        (ChecksOutcome::Passed, ChecksOutcome::Passed) => ChecksOutcome::Passed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failed_check_fails_all_and_a_running_one_keeps_them_waiting() {
        let failed = || ChecksOutcome::Failed("no".to_owned());
        for (one, other, expected) in [
            (ChecksOutcome::Passed, ChecksOutcome::Passed, "Passed"),
            (ChecksOutcome::Passed, ChecksOutcome::Running, "Running"),
            (ChecksOutcome::Running, ChecksOutcome::Passed, "Running"),
            (ChecksOutcome::Running, failed(), "Failed"),
            (failed(), ChecksOutcome::Passed, "Failed"),
        ] {
            let found = format!("{:?}", worse(one, other));
            assert!(found.starts_with(expected), "{found}");
        }
    }
}
