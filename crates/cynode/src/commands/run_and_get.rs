//! `run --get`: runs the command in a session, fetches files out of its workspace, and ends it.
//!
//! A job's sandbox is gone when its end is known, so a session takes its place. Invariant: the
//! session is ended whatever happens; if this process is killed, its limits end it.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use backon::{ConstantBuilder, Retryable as _};
use cynode_api::{
    API_VERSION, ErrorCode, LimitsRequest, SessionEnd, SessionId, TaskId, UserSessionCreate,
    WorkspaceDisposal, WorkspaceRef,
};
use cynode_client::{SessionClient, UserClient};
use serde_json::{Value, json};

use super::{CommandResult, repository, run::task_or_new};
use crate::{
    apply::Received,
    bring::{self, BringOptions},
    cli::{Exec, Globals, OutputFormat, Run},
    failure::Failure,
    output::{self, Progress},
    sanitize::line,
    session::{
        create::wait_until_running,
        exec::{EndedExec, exit_result, run_to_end},
        fetch::{WorkspacePath, fetch},
    },
    staged::{outlast_signals, unless_interrupted},
};

/// The same default as for jobs.
const DEFAULT_TIMEOUT: Duration = Duration::from_hours(1);
/// Time beyond the command's timeout in which the session may exist, for its creation and for
/// fetching.
const MARGIN: Duration = Duration::from_hours(1);
/// If this process is killed, its session ends after this idle time.
const IDLE_TIMEOUT: Duration = Duration::from_mins(10);
/// Attempts to end a session that was still being created when a signal came.
const END_ATTEMPTS: usize = 20;
const END_DELAY: Duration = Duration::from_millis(250);
/// Fetched files that are listed by name.
const MAX_SHOWN: usize = 20;

pub async fn run(
    client: &UserClient,
    globals: &Globals,
    args: Run,
    task: Option<TaskId>,
) -> CommandResult {
    let paths = args
        .get
        .iter()
        .map(|path| WorkspacePath::parse(path))
        .collect::<Result<Vec<_>, _>>()?;
    let directory = bring::root(args.workspace.as_deref().unwrap_or(Path::new(".")))?;
    let session = SessionId::generate();
    let request = unless_interrupted(prepare(client, &args, session, task)).await?;
    let created = unless_interrupted(create(client.sessions(), &request)).await;
    let run = SandboxRun {
        client: client.sessions(),
        globals,
        session,
        directory,
    };
    // A session that was refused does not come later.
    let attempts = match &created {
        Err(failure) if failure.is_refusal() => 0,
        _ => END_ATTEMPTS,
    };
    let result = match created {
        Ok(()) => run.run(&args, &paths).await,
        Err(failure) => Err(failure),
    };
    end(client.sessions(), session, attempts).await;
    result
}

/// Brings the directory in, and describes the session.
async fn prepare(
    client: &UserClient,
    args: &Run,
    session: SessionId,
    task: Option<TaskId>,
) -> Result<UserSessionCreate, Failure> {
    let limits = args.limits.request();
    let timeout = args.timeout.unwrap_or(DEFAULT_TIMEOUT);
    let mut request = UserSessionCreate {
        version: Some(API_VERSION),
        task_id: task,
        session_id: Some(session),
        image_ref: args.image.clone(),
        limits: (limits != LimitsRequest::default()).then_some(limits),
        max_lifetime_seconds: Some((timeout + MARGIN).as_secs()),
        idle_timeout_seconds: Some(IDLE_TIMEOUT.as_secs()),
        node_labels: args.node_label.iter().cloned().collect(),
        workspace_depth: args.depth,
        ..UserSessionCreate::default()
    };
    if let Some(directory) = &args.workspace {
        let options = BringOptions {
            gitignore: args.gitignore,
        };
        let task = task_or_new(client, task, || format!("session {session}")).await?;
        let uploaded = bring::upload(client, task, directory, &options).await?;
        request.task_id = Some(task);
        request.workspace_ref = Some(WorkspaceRef::Artifact(uploaded.artifact));
    }
    if let Some(repository) = &args.repo {
        let name = || format!("session {session}");
        let (task, workspace) = repository::workspace(client, repository, task, None, name).await?;
        request.task_id = Some(task);
        request.workspace_ref = Some(workspace);
    }
    Ok(request)
}

async fn create(client: &SessionClient, request: &UserSessionCreate) -> Result<(), Failure> {
    let progress = Progress::start("creating the sandbox");
    let session = client.create_user_session(request).await?;
    wait_until_running(client, session, progress).await?;
    Ok(())
}

/// Ends the session and deletes its workspace. The result of the command matters more than a
/// failure here.
async fn end(client: &SessionClient, id: SessionId, attempts: usize) {
    // What was fetched is complete; nothing is left to interrupt.
    drop(outlast_signals());
    let body = SessionEnd {
        version: Some(API_VERSION),
        reason: Some("the command of 'cynode run' has ended".to_owned()),
        workspace: Some(WorkspaceDisposal::Delete),
    };
    // The request that creates it may arrive later than this one.
    let ended = (async || client.end_session(id, &body).await)
        .retry(
            ConstantBuilder::new()
                .with_delay(END_DELAY)
                .with_max_times(attempts),
        )
        .when(|error| error.is(ErrorCode::SessionNotFound) || error.is_transient())
        .await;
    match ended {
        Ok(_) => {}
        Err(error) if error.is(ErrorCode::SessionNotFound) || error.is(ErrorCode::SessionEnded) => {
        }
        Err(error) => output::message(&format!(
            "cynode: session {id} was not ended: {}; it ends by itself after {} minutes",
            error.chain(),
            IDLE_TIMEOUT.as_secs() / 60
        )),
    }
}

/// A command in a session, and the files to fetch after it.
struct SandboxRun<'a> {
    client: &'a SessionClient,
    globals: &'a Globals,
    session: SessionId,
    directory: PathBuf,
}

impl SandboxRun<'_> {
    async fn run(&self, args: &Run, paths: &[WorkspacePath]) -> CommandResult {
        let exec = Exec {
            session: None,
            cwd: None,
            env: args.env.clone(),
            timeout: Some(args.timeout.unwrap_or(DEFAULT_TIMEOUT)),
            stdin: false,
            detach: false,
            raw: args.raw,
            command: args.command.clone(),
        };
        let ended = run_to_end(self.client, self.globals, self.session, &exec).await?;
        let (documents, failure) = self.fetch_all(paths).await;
        if let EndedExec::Buffered(result) = &ended {
            output::json(&json!({
                "session_id": self.session,
                "result": result,
                "fetched": documents,
            }))?;
        }
        let code = exit_result(ended.exit())?;
        match failure {
            None => Ok(code),
            Some(failure) if code == ExitCode::SUCCESS => Err(failure),
            Some(failure) => {
                // The command's own failure comes first.
                let _code = failure.report(self.globals.output);
                Ok(code)
            }
        }
    }

    /// Fetches every path. One that fails does not keep the others back.
    async fn fetch_all(&self, paths: &[WorkspacePath]) -> (Vec<Value>, Option<Failure>) {
        let is_table = self.globals.output == OutputFormat::Table;
        let mut documents = Vec::new();
        let mut first_failure = None;
        for path in paths {
            let title = path.to_string();
            let show = move |received: &Received| {
                if is_table {
                    print(&title, received);
                }
            };
            let name = path.to_string();
            match fetch(self.client, self.session, path, &self.directory, show).await {
                Ok(received) => {
                    let Received { files, left_behind } = received;
                    documents.push(json!({
                        "path": name,
                        "files": files,
                        "left_behind": left_behind,
                    }));
                }
                Err(failure) => {
                    documents.push(json!({ "path": name, "error": failure.message() }));
                    let was_interrupted = failure.message().is_empty();
                    if first_failure.is_none() {
                        first_failure = Some(failure);
                    } else if is_table {
                        let _code = failure.report(self.globals.output);
                    }
                    if was_interrupted {
                        break;
                    }
                }
            }
        }
        (documents, first_failure)
    }
}

/// Names what comes out, the files to look at first.
fn print(title: &str, received: &Received) {
    let (marked, plain): (Vec<_>, Vec<_>) = received
        .files
        .iter()
        .partition(|file| !file.warnings.is_empty());
    let bytes = received.files.iter().map(|file| file.size).sum();
    output::message(&format!(
        "fetching {title}: {} files, {}",
        received.files.len(),
        output::size(bytes)
    ));
    for file in marked.iter().chain(&plain).take(MAX_SHOWN) {
        let note = if file.warnings.is_empty() {
            String::new()
        } else {
            format!(" ({})", file.warnings.join(", "))
        };
        output::message(&format!("  {} {}{note}", file.operation, line(&file.path)));
    }
    let more = received.files.len().saturating_sub(MAX_SHOWN);
    if more > 0 {
        let unseen = marked.len().saturating_sub(MAX_SHOWN);
        let note = if unseen > 0 {
            format!(", {unseen} of them executable or run by themselves")
        } else {
            String::new()
        };
        output::message(&format!("  and {more} more{note}"));
    }
    for left in received.left_behind.iter().take(MAX_SHOWN) {
        output::message(&format!(
            "cynode: not fetched: {}: {}",
            line(&left.path),
            left.reason
        ));
    }
    let more = received.left_behind.len().saturating_sub(MAX_SHOWN);
    if more > 0 {
        output::message(&format!("cynode: not fetched: {more} more"));
    }
}
