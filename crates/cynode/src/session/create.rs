//! `session create` and `session resume`: both end with a running sandbox.

use std::{process::ExitCode, time::Duration};

use cynode_api::{LimitsRequest, Session, SessionCreate, SessionId, SessionState, TaskId};
use cynode_client::WorkerClient;
use tokio::time::{Instant, sleep};

use crate::{
    cli::{Create, Format, Globals},
    failure::{Failure, INTERNAL},
    output::{self, Progress},
};

/// Pulling a large image takes minutes; longer than this it hangs.
const PATIENCE: Duration = Duration::from_mins(15);

pub async fn create(client: &WorkerClient, globals: &Globals, args: Create) -> Result<ExitCode, Failure> {
    let request = request(args);
    let progress = Progress::start("creating the session");
    let session = client.create_session(&request).await?;
    let session = until_running(client, session, progress).await?;
    print(globals, &session)
}

pub async fn resume(client: &WorkerClient, globals: &Globals, id: SessionId) -> Result<ExitCode, Failure> {
    let progress = Progress::start("resuming the session");
    let session = client.resume_session(id).await?;
    let session = until_running(client, session, progress).await?;
    print(globals, &session)
}

fn request(args: Create) -> SessionCreate {
    let limits = LimitsRequest { memory_bytes: args.memory, cpus: args.cpus, pids: args.pids, disk_bytes: args.disk, nofile: args.nofile };
    SessionCreate {
        workspace_ref: args.workspace,
        env: args.env.into_iter().collect(),
        limits: (limits != LimitsRequest::default()).then_some(limits),
        network_policy: args.network.map(Into::into),
        max_lifetime_seconds: args.lifetime.map(|time| time.as_secs().max(1)),
        idle_timeout_seconds: args.idle.map(|time| time.as_secs().max(1)),
        pty_allowed: args.pty.then_some(true),
        labels: args.label.into_iter().collect(),
        ..SessionCreate::new(args.task.unwrap_or_else(TaskId::generate), args.id.unwrap_or_else(SessionId::generate), args.image)
    }
}

async fn until_running(client: &WorkerClient, mut session: Session, progress: Progress) -> Result<Session, Failure> {
    let deadline = Instant::now() + PATIENCE;
    while session.state == SessionState::Creating {
        if Instant::now() > deadline {
            return Err(Failure::new(INTERNAL, "not_running", format!("session {} is still being created", session.session_id))
                .remedy(format!("See 'cynode session show {}'.", session.session_id)));
        }
        progress.say(format!("creating session {}", session.session_id));
        sleep(Duration::from_millis(300)).await;
        session = client.get_session(session.session_id).await?;
    }
    drop(progress);
    if session.state == SessionState::Running {
        return Ok(session);
    }
    let reason = session.end_reason.as_deref().unwrap_or("no reason was given");
    Err(Failure::new(INTERNAL, "session_failed", format!("session {} is {}: {reason}", session.session_id, session.state)))
}

fn print(globals: &Globals, session: &Session) -> Result<ExitCode, Failure> {
    match globals.output {
        Format::Json => output::json(session)?,
        Format::Table => {
            output::line(&session.session_id.to_string())?;
            let took = session.create_duration_ms.map(|ms| format!(" in {ms} ms")).unwrap_or_default();
            let warm = if session.warm { ", from the pool" } else { "" };
            output::note(&format!(
                "running{took}{warm}; image {}, workspace {}, task {}",
                crate::sanitize::line(&session.image_ref),
                session.workspace_id,
                session.task_id
            ));
            if !session.unenforced.is_empty() {
                output::note(&format!("not enforced on this machine: {}", super::list::unenforced(session)));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
