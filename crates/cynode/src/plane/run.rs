//! `run`: one job from its creation to its end.
//!
//! The job's id is chosen here, so that a request whose answer was lost can be sent again and is the same job.

use std::{path::Path, process::ExitCode, time::Duration};

use cynode_api::{
    API_VERSION, JobCreate, JobId, JobState, LimitsRequest, Retry, TaskCreate, WorkspaceRef,
};
use cynode_client::UserClient;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep},
};

use super::{
    Outcome,
    follow::{Ended, Follower},
    made,
};
use crate::{
    cli::{Format, Globals, JobRun, Run},
    connect,
    failure::{Failure, INTERNAL, UNREACHABLE},
    output,
    session::{
        exit_code,
        transfer::{flagged, send_tree},
    },
};

const TIMED_OUT: u8 = 124;
/// As a shell says it of what Ctrl-C ended.
const INTERRUPTED: u8 = 130;
/// How long a request whose answer did not come is sent again.
const PATIENCE: Duration = Duration::from_mins(1);

pub async fn run(globals: &Globals, args: Run) -> Outcome {
    let client = connect::plane(globals)?;
    let id = JobId::generate();
    let mut request = request(&args, id);
    if let Some(directory) = &args.workspace {
        fill(&client, &mut request, directory, id).await?;
    }
    complete(&client, globals, &request, id, args.detach, args.raw).await
}

/// The same for a job that a file describes.
pub async fn from_file(client: &UserClient, globals: &Globals, args: &JobRun) -> Outcome {
    let text = if args.file == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        fs_err::read_to_string(&args.file)
    };
    let text = text.map_err(|error| Failure::usage(error.to_string()))?;
    let mut request: JobCreate = serde_json::from_str(&text).map_err(|error| {
        Failure::usage(format!("{}: {error}", args.file.display()))
            .remedy("See POST /v1/jobs in /openapi.json.")
    })?;
    let id = *request.job_id.get_or_insert_with(JobId::generate);
    complete(client, globals, &request, id, args.detach, args.raw).await
}

async fn complete(
    client: &UserClient,
    globals: &Globals,
    request: &JobCreate,
    id: JobId,
    detach: bool,
    raw: bool,
) -> Outcome {
    create(client, request).await?;
    if detach {
        let job = client.job(id).await?;
        return made(
            globals,
            &job,
            &id.to_string(),
            &format!(
                "the job is {}; see 'cynode job logs --follow {id}'",
                job.state
            ),
        );
    }
    let mut follower = Follower::new(client, id, raw);
    let ended = async {
        match globals.output {
            Format::Table => follower.print(true).await,
            Format::Json => quietly(client, id).await,
        }
    };
    let ended = tokio::select! {
        ended = ended => ended?,
        () = left(client, id) => {
            output::note(&format!("cynode: no longer waiting; see 'cynode job show {id}'"));
            return Ok(ExitCode::from(INTERRUPTED));
        }
    };
    if globals.output == Format::Json {
        output::json(&ended.job)?;
    }
    finish(&ended)
}

fn request(args: &Run, id: JobId) -> JobCreate {
    let limits = LimitsRequest {
        memory_bytes: args.memory,
        cpus: args.cpus,
        ..LimitsRequest::default()
    };
    JobCreate {
        version: Some(API_VERSION),
        task_id: args.task,
        job_id: Some(id),
        image_ref: args.image.clone(),
        command: args.command.clone(),
        env: args.env.iter().cloned().collect(),
        timeout_seconds: super::seconds(args.timeout),
        limits: (limits != LimitsRequest::default()).then_some(limits),
        retry: args.retry.then_some(Retry::OnNodeLoss),
        node_labels: args.node_label.iter().cloned().collect(),
        ..JobCreate::default()
    }
}

/// Sends a directory as an artifact of the job's task, for the job to begin with.
async fn fill(
    client: &UserClient,
    request: &mut JobCreate,
    directory: &Path,
    id: JobId,
) -> Result<(), Failure> {
    if !directory.is_dir() {
        return Err(Failure::usage(format!(
            "{} is not a directory",
            directory.display()
        )));
    }
    let task = match request.task_id {
        Some(task) => task,
        None => {
            client
                .create_task(&TaskCreate {
                    name: format!("job {id}"),
                    ..TaskCreate::default()
                })
                .await?
                .id
        }
    };
    let path = format!("inputs/{id}.tar");
    let (sent, skipped) = send_tree(directory, async |body| {
        client
            .put_artifact(task, &path, Some("application/x-tar"), body)
            .await
    })
    .await?;
    for name in skipped {
        output::note(&format!(
            "cynode: left out: {}",
            crate::sanitize::line(&name)
        ));
    }
    flagged(&sent.flags);
    request.task_id = Some(task);
    request.workspace_ref = Some(WorkspaceRef::Artifact(sent.id));
    Ok(())
}

async fn create(client: &UserClient, request: &JobCreate) -> Result<(), Failure> {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = Duration::from_millis(200);
    let mut sent = false;
    loop {
        match client.create_job(request).await {
            Ok(_) => return Ok(()),
            // Nobody is there: said at once. An answer that was lost: asked again.
            Err(cynode_client::Error::Unreachable {
                never_sent: true, ..
            }) if sent && Instant::now() < deadline => {}
            Err(
                error @ cynode_client::Error::Unreachable {
                    never_sent: true, ..
                },
            ) => return Err(error.into()),
            Err(error) if error.is_passing() && Instant::now() < deadline => sent = true,
            Err(error) => return Err(error.into()),
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(3));
    }
}

/// Waits for the end; the object holds the output.
async fn quietly(client: &UserClient, id: JobId) -> Result<Ended, Failure> {
    let mut pause = Duration::from_millis(20);
    loop {
        match client.job(id).await {
            Ok(job) if job.state.is_final() => return Ok(Ended { job, exit: None }),
            Ok(_) => {}
            Err(error) if error.is_passing() => {}
            Err(error) => return Err(error.into()),
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// The first Ctrl-C stops the job, and its end is waited for; with the second it is left to itself.
async fn left(client: &UserClient, id: JobId) {
    let (Ok(mut interrupt), Ok(mut terminate)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
    ) else {
        return std::future::pending().await;
    };
    let mut again = async || {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    again().await;
    output::note("cynode: stopping the job");
    let stop = async {
        if let Err(error) = client.stop_job(id).await {
            output::note(&format!(
                "cynode: the job was not stopped: {}",
                error.chain()
            ));
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = stop => {}
        () = again() => {}
    }
}

/// We end as the command ended.
fn finish(ended: &Ended) -> Outcome {
    let job = &ended.job;
    let signal = ended.exit.as_ref().and_then(|exit| exit.signal.as_deref());
    if ended.exit.as_ref().is_some_and(|exit| exit.oom_killed) {
        output::note(
            "cynode: the sandbox ran out of memory and the command was killed; give it more with --memory",
        );
    }
    match job.state {
        JobState::Timeout => {
            output::note("cynode: the job was ended at its deadline");
            return Ok(ExitCode::from(TIMED_OUT));
        }
        JobState::Canceled => {
            output::note("cynode: the job was stopped");
            return Ok(ExitCode::from(INTERRUPTED));
        }
        _ => {}
    }
    if let Some(code) = exit_code(job.exit_code, signal) {
        return Ok(code);
    }
    let (code, detail) = job.error.as_ref().map_or(
        ("job_failed", "the job failed without saying why"),
        |error| (error.code.as_str(), error.detail.as_str()),
    );
    let exit = match code {
        "exec_failed" if detail.contains("ENOENT") || detail.contains("No such file") => 127,
        "exec_failed" => 126,
        "node_lost" | "no_capacity" => UNREACHABLE,
        _ => INTERNAL,
    };
    Err(Failure::new(exit, code, detail).remedy(format!("See 'cynode job show {}'.", job.job_id)))
}

#[cfg(test)]
mod tests {
    use cynode_api::{Job, JobError, JobOutput, NodeId, TaskId};

    use super::*;

    fn ended(state: JobState, exit_code: Option<i32>, error: Option<&str>) -> Ended {
        let error = error.map(|code| JobError {
            code: code.to_owned(),
            detail: "x".to_owned(),
        });
        let job = Job {
            job_id: JobId::generate(),
            task_id: TaskId::generate(),
            state,
            exit_code,
            signal: None,
            acknowledged: false,
            output: JobOutput::default(),
            started_at: None,
            ended_at: None,
            node_id: Some(NodeId::generate()),
            image_ref: "x".to_owned(),
            image_digest: None,
            sba_result: None,
            artifacts: Vec::new(),
            error,
            reported_by: "worker".to_owned(),
            late_result: None,
            created_by: None,
        };
        Ended { job, exit: None }
    }

    #[test]
    fn we_end_as_the_job_ended() {
        let is = |ended: &Ended, number: u8| {
            finish(ended).is_ok_and(|code| code == ExitCode::from(number))
        };
        assert!(is(&ended(JobState::Completed, Some(0), None), 0));
        assert!(is(&ended(JobState::Failed, Some(3), None), 3));
        assert!(is(&ended(JobState::Timeout, None, None), 124));
        assert!(is(&ended(JobState::Canceled, Some(143), None), 130));
        assert!(
            finish(&ended(JobState::Failed, None, Some("node_lost")))
                .is_err_and(|failure| failure.exit == UNREACHABLE)
        );
        assert!(
            finish(&ended(JobState::Failed, None, None))
                .is_err_and(|failure| failure.exit == INTERNAL)
        );
    }
}
