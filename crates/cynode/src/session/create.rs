//! `session create` and `session resume`: both wait for a running sandbox.

use std::{path::Path, process::ExitCode, time::Duration};

use cynode_api::{
    API_VERSION, LimitsRequest, Session, SessionCreate, SessionId, SessionState, TaskId,
    UserSessionCreate, WorkspaceRef,
};
use cynode_client::{SessionClient, Surface};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::{
    bring::{self, BringOptions, UploadedDirectory},
    cli::{Create, Globals, OutputFormat},
    commands::{repository, run::task_or_new},
    connect,
    directories::Directories,
    failure::{Failure, INTERNAL},
    output::{self, Progress},
    resolve, sanitize,
};

/// Pulling a large image takes minutes.
const CREATE_TIMEOUT: Duration = Duration::from_mins(15);
const POLL_INTERVAL: Duration = Duration::from_millis(300);
/// Submodules and files in Git LFS that are named.
const MAX_SHOWN: usize = 10;

pub async fn create(
    client: &SessionClient,
    globals: &Globals,
    args: Create,
) -> Result<ExitCode, Failure> {
    let task = match args.task.as_deref() {
        // A worker has no tasks: it takes any id.
        Some(task) if client.surface() == Surface::Worker => Some(task.parse().map_err(|_| {
            Failure::usage(format!("'{task}' is not a task's id"))
                .remedy("Write the whole id: this server is a worker.")
        })?),
        Some(task) => Some(resolve::task(&connect::user_client(globals)?, task).await?),
        None => None,
    };
    let (directory, repository) = (args.directory.clone(), args.repo.clone());
    let options = BringOptions {
        gitignore: args.gitignore,
    };
    let mut request = UserSessionCreate {
        task_id: task,
        ..request(args)
    };
    if client.surface() == Surface::Worker {
        check_for_worker(&request, directory.is_some(), repository.is_some())?;
    }
    if let Some(repository) = &repository {
        let client = connect::user_client(globals)?;
        let id = *request.session_id.get_or_insert_with(SessionId::generate);
        let name = || format!("session {id}");
        let (task, workspace) =
            repository::workspace(&client, repository, request.task_id, None, name).await?;
        request.task_id = Some(task);
        request.workspace_ref = Some(workspace);
    }
    let uploaded = match &directory {
        Some(directory) => Some(bring_in(globals, &mut request, directory, &options).await?),
        None => None,
    };
    let progress = Progress::start("creating the session");
    let session = match client.surface() {
        Surface::User => client.create_user_session(&request).await?,
        Surface::Worker => client.create_session(&worker_request(request)).await?,
    };
    let session = wait_until_running(client, session, progress).await?;
    match &directory {
        Some(directory) => {
            if let Some(directories) = Directories::of(client.base()) {
                directories.remember_brought(&bring::root(directory)?, session.session_id);
            }
            warn_of_missing_snapshot(client, session.session_id).await;
        }
        None => super::remember(client, session.session_id),
    }
    print(globals, &session, uploaded.as_ref())
}

/// Says in time that the changes will not come out as a patch.
async fn warn_of_missing_snapshot(client: &SessionClient, id: SessionId) {
    if let Some(reason) = super::diff::missing_snapshot(client, id).await {
        output::message(&format!(
            "cynode: 'session diff' and 'session pull' will need a commit as --base: {}",
            sanitize::line(&reason)
        ));
    }
}

/// Refuses what only an orchestrator can do.
fn check_for_worker(
    request: &UserSessionCreate,
    has_directory: bool,
    has_repository: bool,
) -> Result<(), Failure> {
    let needs = |what: &str, remedy: &str| {
        Err(Failure::usage(format!(
            "{what} needs an orchestrator; this server is a worker"
        ))
        .remedy(remedy))
    };
    if has_directory {
        return needs(
            "bringing a directory in",
            "Use an orchestrator, or copy the directory into the session with \
             'cynode session cp -r DIR :.'.",
        );
    }
    if has_repository {
        return needs("--repo", "Use an orchestrator, or omit --repo.");
    }
    if request.name.is_some() {
        return needs("--name", "Use an orchestrator, or omit --name.");
    }
    if !request.node_labels.is_empty() {
        return needs("--node-label", "Use an orchestrator, or omit --node-label.");
    }
    Ok(())
}

/// Brings a directory in as the session's workspace.
async fn bring_in(
    globals: &Globals,
    request: &mut UserSessionCreate,
    directory: &Path,
    options: &BringOptions,
) -> Result<UploadedDirectory, Failure> {
    let client = connect::user_client(globals)?;
    bring::root(directory)?;
    let id = *request.session_id.get_or_insert_with(SessionId::generate);
    let task = task_or_new(&client, request.task_id, || format!("session {id}")).await?;
    let uploaded = bring::upload(&client, task, directory, options).await?;
    request.task_id = Some(task);
    request.workspace_ref = Some(WorkspaceRef::Artifact(uploaded.artifact));
    Ok(uploaded)
}

pub async fn resume(
    client: &SessionClient,
    globals: &Globals,
    id: SessionId,
) -> Result<ExitCode, Failure> {
    let progress = Progress::start("resuming the session");
    let session = client.resume_session(id).await?;
    let session = wait_until_running(client, session, progress).await?;
    super::remember(client, session.session_id);
    print(globals, &session, None)
}

/// The client chooses the session's id, so that the request is idempotent.
fn request(args: Create) -> UserSessionCreate {
    let limits = LimitsRequest {
        disk_bytes: args.disk,
        nofile: args.nofile,
        ..args.limits.request()
    };
    UserSessionCreate {
        version: Some(API_VERSION),
        task_id: None,
        name: args.name,
        session_id: Some(args.id.unwrap_or_else(SessionId::generate)),
        image_ref: Some(args.image),
        workspace_ref: args.workspace,
        env: args.env.into_iter().collect(),
        limits: (limits != LimitsRequest::default()).then_some(limits),
        network_policy: args.network.map(Into::into),
        max_lifetime_seconds: args.lifetime.map(|time| time.as_secs().max(1)),
        idle_timeout_seconds: args.idle.map(|time| time.as_secs().max(1)),
        pty_allowed: args.pty.then_some(true),
        labels: args.label.into_iter().collect(),
        node_labels: args.node_label.into_iter().collect(),
        workspace_depth: args.depth,
    }
}

/// The request for a worker, which has no tasks but requires a task id.
fn worker_request(request: UserSessionCreate) -> SessionCreate {
    let task = request.task_id.unwrap_or_else(TaskId::generate);
    let (id, image) = (
        request.session_id.unwrap_or_else(SessionId::generate),
        request.image_ref.unwrap_or_else(|| "default".to_owned()),
    );
    SessionCreate {
        workspace_ref: request.workspace_ref,
        env: request.env,
        limits: request.limits,
        network_policy: request.network_policy,
        max_lifetime_seconds: request.max_lifetime_seconds,
        idle_timeout_seconds: request.idle_timeout_seconds,
        pty_allowed: request.pty_allowed,
        labels: request.labels,
        ..SessionCreate::new(task, id, image)
    }
}

pub async fn wait_until_running(
    client: &SessionClient,
    mut session: Session,
    progress: Progress,
) -> Result<Session, Failure> {
    let deadline = Instant::now() + CREATE_TIMEOUT;
    while session.state == SessionState::Creating {
        if Instant::now() > deadline {
            return Err(Failure::new(
                INTERNAL,
                "not_running",
                format!("session {} is still being created", session.session_id),
            )
            .remedy(format!("See 'cynode session show {}'.", session.session_id)));
        }
        progress.set_message(format!("creating session {}", session.session_id));
        sleep(POLL_INTERVAL).await;
        session = client.get_session(session.session_id).await?;
    }
    drop(progress);
    if session.state == SessionState::Running {
        return Ok(session);
    }
    let reason = session.end_reason.as_deref().unwrap_or("no reason given");
    Err(Failure::new(
        INTERNAL,
        "session_failed",
        format!(
            "session {} is {}: {reason}",
            session.session_id, session.state
        ),
    ))
}

/// What the repository names and the workspace lacks.
fn missing_from_seed(session: &Session) -> Vec<String> {
    let Some(notes) = &session.seed_notes else {
        return Vec::new();
    };
    [
        ("submodules", &notes.submodules, notes.submodules_total),
        ("files in Git LFS", &notes.lfs_files, notes.lfs_files_total),
    ]
    .into_iter()
    .filter(|(_, _, total)| *total > 0)
    .map(|(kind, names, total)| {
        let shown: Vec<String> = names
            .iter()
            .take(MAX_SHOWN)
            .map(|name| sanitize::line(name))
            .collect();
        let more = if total > shown.len() as u64 {
            ", …"
        } else {
            ""
        };
        format!(
            "cynode: not fetched: {total} {kind}: {}{more}",
            shown.join(", ")
        )
    })
    .collect()
}

fn print(
    globals: &Globals,
    session: &Session,
    uploaded: Option<&UploadedDirectory>,
) -> Result<ExitCode, Failure> {
    match globals.output {
        OutputFormat::Json => {
            let mut document = json!(session);
            if let Some(uploaded) = uploaded {
                document["brought"] = json!({
                    "artifact_id": uploaded.artifact,
                    "files": uploaded.files,
                    "bytes": uploaded.bytes,
                    "left_out": uploaded.skipped,
                });
            }
            output::json(&document)?;
        }
        OutputFormat::Table => {
            output::line(&session.session_id.to_string())?;
            if let Some(uploaded) = uploaded {
                let left_out = match uploaded.skipped.len() {
                    0 => String::new(),
                    count => format!("; left out {count}"),
                };
                output::message(&format!(
                    "brought in {} files, {}{left_out}",
                    uploaded.files,
                    output::size(uploaded.bytes)
                ));
            }
            let took = session
                .create_duration_ms
                .map(|ms| format!(" in {ms} ms"))
                .unwrap_or_default();
            let warm = if session.warm { ", from the pool" } else { "" };
            let name = session.name.as_ref().map_or_else(String::new, |name| {
                format!("; name {}", sanitize::line(name))
            });
            output::message(&format!(
                "running{took}{warm}{name}; image {}, workspace {}, task {}",
                sanitize::line(&session.image_ref),
                session.workspace_id,
                session.task_id
            ));
            if let Some(commit) = &session.base_commit {
                output::message(&format!("begins with commit {}", sanitize::line(commit)));
            }
            for note in missing_from_seed(session) {
                output::message(&note);
            }
            if !session.unenforced.is_empty() {
                output::message(&format!(
                    "not enforced on this machine: {}",
                    super::list::unenforced(session)
                ));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
