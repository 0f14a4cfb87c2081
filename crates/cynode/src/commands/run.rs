//! `run`: creates a job and follows it to its end.
//!
//! The client chooses the job's id, so that a request whose response was lost can be repeated.

use std::{io::Read as _, path::Path, process::ExitCode, time::Duration};

use backon::Retryable as _;
use cynode_api::{
    API_VERSION, Job, JobCreate, JobId, JobState, LimitsRequest, Retry, TaskCreate, TaskId,
    WorkspaceRef,
};
use cynode_client::UserClient;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep},
};

use super::{
    CommandResult,
    follow::{FinishedJob, Follower},
    job_file::{self, JobFile},
    print_created, progress, repository, run_and_get, timeline,
};
use crate::{
    bring::{self, BringOptions},
    cli::{Globals, JobRun, OutputFormat, Run},
    connect,
    failure::{Failure, INTERNAL, UNREACHABLE},
    output, resolve, retry, sanitize,
    session::exit_code,
};

/// The exit code of the runner for a job that failed.
const FAILED: u8 = 1;
/// The exit code of `timeout`.
const TIMED_OUT: u8 = 124;
/// The exit code that a shell gives to a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;
/// How long to repeat a request whose response was lost.
const RETRY_TIMEOUT: Duration = Duration::from_mins(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(3);

pub async fn run(globals: &Globals, args: Run) -> CommandResult {
    let client = connect::user_client(globals)?;
    let id = JobId::generate();
    let task = resolve::optional(args.task.as_deref(), async |task| {
        resolve::task(&client, task).await
    })
    .await?;
    if !args.get.is_empty() {
        return run_and_get::run(&client, globals, args, task).await;
    }
    let mut request = JobCreate {
        task_id: task,
        ..request(&args, id)
    };
    if let Some(directory) = &args.workspace {
        let options = BringOptions {
            gitignore: args.gitignore,
        };
        bring_workspace(&client, &mut request, directory, &options, id).await?;
    }
    if let Some(repository) = &args.repo {
        begin_with_repository(&client, &mut request, repository, None, id).await?;
    }
    run_job(&client, globals, &request, id, args.detach, args.raw).await
}

/// Runs a job from a JSON file.
pub async fn from_file(client: &UserClient, globals: &Globals, args: &JobRun) -> CommandResult {
    let text = if args.file == Path::new("-") {
        let mut text = Vec::new();
        std::io::stdin().read_to_end(&mut text).map(|_| text)
    } else {
        fs_err::read(&args.file)
    };
    let text = text.map_err(|error| Failure::usage(error.to_string()))?;
    let task = resolve::optional(args.task.as_deref(), async |task| {
        resolve::task(client, task).await
    })
    .await?;
    let JobFile {
        mut request,
        job_id: id,
        new_task,
    } = job_file::parse(&text, &args.file.display().to_string(), task)?;
    request.image_ref = args.image.clone().or(request.image_ref);
    request.workspace_depth = args.depth.or(request.workspace_depth);
    if let Some(repository) = &args.repo {
        begin_with_repository(client, &mut request, repository, new_task, id).await?;
    } else if let Some(id) = new_task {
        let new = TaskCreate {
            id: Some(id),
            name: format!("job {}", request.job_id.unwrap_or_else(JobId::generate)),
            ..TaskCreate::default()
        };
        client.create_task(&new).await?;
    }
    if let Some(directory) = &args.workspace {
        let options = BringOptions {
            gitignore: args.gitignore,
        };
        bring_workspace(client, &mut request, directory, &options, id).await?;
    }
    run_job(client, globals, &request, id, args.detach, args.raw).await
}

async fn run_job(
    client: &UserClient,
    globals: &Globals,
    request: &JobCreate,
    id: JobId,
    detach: bool,
    raw: bool,
) -> CommandResult {
    create(client, request).await?;
    if detach {
        let job = client.job(id).await?;
        return print_created(
            globals,
            &job,
            &id.to_string(),
            &format!(
                "the job is {}; follow it with 'cynode job logs --follow {id}'",
                job.state
            ),
        );
    }
    let mut follower = Follower::new(client, id, raw);
    let finished = async {
        match globals.output {
            OutputFormat::Table if request.job.is_some() => tokio::select! {
                finished = follower.print(true) => finished,
                never = progress::watch(client, id) => match never {},
            },
            OutputFormat::Table => follower.print(true).await,
            OutputFormat::Json => wait_for_end(client, id).await,
        }
    };
    let finished = tokio::select! {
        finished = finished => finished?,
        () = interrupted(client, id) => {
            output::message(&format!("cynode: no longer waiting; see 'cynode job show {id}'"));
            return Ok(ExitCode::from(INTERRUPTED));
        }
    };
    if globals.output == OutputFormat::Json {
        output::json(&finished.job)?;
    }
    exit_result(&finished)
}

fn request(args: &Run, id: JobId) -> JobCreate {
    let limits = args.limits.request();
    JobCreate {
        version: Some(API_VERSION),
        job_id: Some(id),
        image_ref: args.image.clone(),
        command: args.command.clone(),
        env: args.env.iter().cloned().collect(),
        timeout_seconds: super::seconds(args.timeout),
        limits: (limits != LimitsRequest::default()).then_some(limits),
        retry: args.retry.then_some(Retry::OnNodeLoss),
        node_labels: args.node_label.iter().cloned().collect(),
        workspace_depth: args.depth,
        ..JobCreate::default()
    }
}

/// Brings a directory in as the job's workspace.
async fn bring_workspace(
    client: &UserClient,
    request: &mut JobCreate,
    directory: &Path,
    options: &BringOptions,
    id: JobId,
) -> Result<(), Failure> {
    bring::root(directory)?;
    let task = task_or_new(client, request.task_id, || format!("job {id}")).await?;
    let uploaded = bring::upload(client, task, directory, options).await?;
    request.task_id = Some(task);
    request.workspace_ref = Some(WorkspaceRef::Artifact(uploaded.artifact));
    Ok(())
}

/// Makes a repository the job's workspace. A task that does not exist yet is created in the
/// repository's project.
async fn begin_with_repository(
    client: &UserClient,
    request: &mut JobCreate,
    repository: &str,
    new_task: Option<TaskId>,
    id: JobId,
) -> Result<(), Failure> {
    let existing = request.task_id.filter(|_| new_task.is_none());
    let name = || format!("job {id}");
    let (task, workspace) =
        repository::workspace(client, repository, existing, new_task, name).await?;
    request.task_id = Some(task);
    request.workspace_ref = Some(workspace);
    Ok(())
}

/// A task for an artifact: the given one, or a new one with this name.
pub async fn task_or_new(
    client: &UserClient,
    task: Option<TaskId>,
    name: impl FnOnce() -> String,
) -> Result<TaskId, Failure> {
    if let Some(task) = task {
        return Ok(task);
    }
    let request = TaskCreate {
        name: name(),
        ..TaskCreate::default()
    };
    Ok(client.create_task(&request).await?.id)
}

/// Creates the job. A request that may have arrived is repeated; one to a server that never
/// answered fails at once.
async fn create(client: &UserClient, request: &JobCreate) -> Result<(), Failure> {
    let deadline = Instant::now() + RETRY_TIMEOUT;
    let mut sent = false;
    (async || client.create_job(request).await)
        .retry(retry::backoff(MAX_RETRY_DELAY))
        .when(|error| {
            let never_sent = matches!(
                error,
                cynode_client::Error::Unreachable {
                    never_sent: true,
                    ..
                }
            );
            sent |= !never_sent;
            sent && error.is_transient() && Instant::now() < deadline
        })
        .await?;
    Ok(())
}

/// Runs a job to its end without printing anything.
pub(super) async fn to_end(
    client: &UserClient,
    request: &JobCreate,
    id: JobId,
) -> Result<Job, Failure> {
    create(client, request).await?;
    Ok(wait_for_end(client, id).await?.job)
}

/// Waits for the end of the job without printing its output.
async fn wait_for_end(client: &UserClient, id: JobId) -> Result<FinishedJob, Failure> {
    let mut pause = Duration::from_millis(20);
    loop {
        match client.job(id).await {
            Ok(job) if job.state.is_final() => return Ok(FinishedJob { job, exit: None }),
            Ok(_) => {}
            Err(error) if error.is_transient() => {}
            Err(error) => return Err(error.into()),
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Returns when the user gives up waiting. The first Ctrl-C stops the job, the second stops waiting
/// for its end.
async fn interrupted(client: &UserClient, id: JobId) {
    let (Ok(mut interrupt), Ok(mut terminate)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
    ) else {
        return std::future::pending().await;
    };
    let mut next_signal = async || {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    next_signal().await;
    output::message("cynode: stopping the job");
    let stop = async {
        if let Err(error) = client.stop_job(id).await {
            output::message(&format!(
                "cynode: the job was not stopped: {}",
                error.chain()
            ));
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = stop => {}
        () = next_signal() => {}
    }
}

/// Exits with the exit code of the command.
fn exit_result(finished: &FinishedJob) -> CommandResult {
    let job = &finished.job;
    let signal = finished
        .exit
        .as_ref()
        .and_then(|exit| exit.signal.as_deref());
    if finished.exit.as_ref().is_some_and(|exit| exit.oom_killed) {
        output::message(
            "cynode: the sandbox ran out of memory and the command was killed; run it with more \
             --memory",
        );
    }
    match job.state {
        JobState::Timeout => {
            output::message("cynode: the job timed out");
            return Ok(ExitCode::from(TIMED_OUT));
        }
        JobState::Canceled => {
            output::message("cynode: the job was stopped");
            return Ok(ExitCode::from(INTERRUPTED));
        }
        _ => {}
    }
    // Nothing in the output of an SBA job says why it failed.
    if job.state == JobState::Failed
        && job.sba_result.is_some()
        && let Some(error) = &job.error
    {
        output::message(&sanitize::line(&format!(
            "cynode: the job failed: {}: {}; see 'cynode job show {}'",
            error.code,
            timeline::cut(&error.detail),
            job.job_id
        )));
    }
    if let Some(code) = exit_code(job.exit_code, signal) {
        return Ok(code);
    }
    let (code, detail) = job.error.as_ref().map_or(
        ("job_failed", "the job failed for an unknown reason"),
        |error| (error.code.as_str(), error.detail.as_str()),
    );
    let exit = match code {
        "exec_failed" if detail.contains("ENOENT") || detail.contains("No such file") => 127,
        "exec_failed" => 126,
        "node_lost" | "no_capacity" => UNREACHABLE,
        "internal" => INTERNAL,
        // The runner's exit was not seen, but the end of the job is definite.
        _ if job.sba_result.is_some() => FAILED,
        _ => INTERNAL,
    };
    Err(Failure::new(exit, code, detail).remedy(format!("See 'cynode job show {}'.", job.job_id)))
}

#[cfg(test)]
pub(super) mod tests {
    use cynode_api::{JobError, JobOutput, NodeId, TaskId};

    use super::*;

    /// A job that has completed.
    pub(crate) fn job() -> Job {
        Job {
            job_id: JobId::generate(),
            task_id: TaskId::generate(),
            state: JobState::Completed,
            exit_code: Some(0),
            signal: None,
            acknowledged: false,
            output: JobOutput::default(),
            started_at: None,
            ended_at: None,
            node_id: Some(NodeId::generate()),
            image_ref: "x".to_owned(),
            image_digest: None,
            sba_result: None,
            progress: None,
            artifacts: Vec::new(),
            artifacts_omitted: 0,
            error: None,
            reported_by: cynode_api::Reporter::Worker,
            late_result: None,
            created_by: None,
            command: None,
        }
    }

    fn finished(state: JobState, exit_code: Option<i32>, error: Option<&str>) -> FinishedJob {
        let error = error.map(|code| JobError {
            code: code.to_owned(),
            detail: "x".to_owned(),
        });
        let job = Job {
            state,
            exit_code,
            error,
            ..job()
        };
        FinishedJob { job, exit: None }
    }

    #[test]
    fn the_exit_code_is_that_of_the_job() {
        let is = |job: &FinishedJob, number: u8| {
            exit_result(job).is_ok_and(|code| code == ExitCode::from(number))
        };
        assert!(is(&finished(JobState::Completed, Some(0), None), 0));
        assert!(is(&finished(JobState::Failed, Some(3), None), 3));
        assert!(is(&finished(JobState::Timeout, None, None), 124));
        assert!(is(&finished(JobState::Canceled, Some(143), None), 130));
        assert!(
            exit_result(&finished(JobState::Failed, None, Some("node_lost")))
                .is_err_and(|failure| failure.exit == UNREACHABLE)
        );
        for (code, has_result, exit) in [
            (None, false, INTERNAL),
            (Some("runner_interrupted"), false, INTERNAL),
            (Some("runner_interrupted"), true, FAILED),
            (Some("internal"), true, INTERNAL),
        ] {
            let mut finished = finished(JobState::Failed, None, code);
            finished.job.sba_result = has_result.then(|| serde_json::json!({}));
            assert!(
                exit_result(&finished).is_err_and(|failure| failure.exit == exit),
                "{code:?}"
            );
        }
    }
}
