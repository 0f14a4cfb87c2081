//! `session end`.

use std::process::ExitCode;

use cynode_api::{API_VERSION, Session, SessionEnd, SessionId, SessionState, WorkspaceDisposal};
use cynode_client::{SessionClient, SessionFilter};
use serde_json::json;

use crate::{
    cli::{End, Globals, OutputFormat},
    directories::Directories,
    failure::Failure,
    output::{self, Progress},
};

pub async fn run(
    client: &SessionClient,
    globals: &Globals,
    args: End,
) -> Result<ExitCode, Failure> {
    let ids = match &args.sessions[..] {
        _ if args.all => live_sessions(client).await?,
        [] => vec![super::target(client, None).await?],
        names => {
            let mut ids = Vec::new();
            for name in names {
                ids.push(super::target(client, Some(name)).await?);
            }
            ids
        }
    };
    let directories = Directories::of(client.base());
    let workspace = if args.keep_workspace {
        WorkspaceDisposal::Keep
    } else {
        WorkspaceDisposal::Delete
    };
    let body = SessionEnd {
        version: Some(API_VERSION),
        reason: args.reason,
        workspace: Some(workspace),
    };
    let progress = Progress::start("ending");
    let mut ended = Vec::new();
    let mut first_failure = None;
    for id in &ids {
        progress.set_message(format!("ending session {id}"));
        match client.end_session(*id, &body).await {
            Ok(session) => {
                if let Some(directories) = &directories {
                    directories.forget(*id);
                }
                ended.push(session);
            }
            // Continue with the other sessions.
            Err(error) => {
                let failure = Failure::from(error);
                if ids.len() > 1 && globals.output == OutputFormat::Table {
                    output::message(&format!("session {id}:"));
                }
                failure.report(globals.output);
                first_failure.get_or_insert(Failure::reported(failure.exit));
            }
        }
    }
    drop(progress);
    match (globals.output, &ended[..]) {
        (OutputFormat::Json, [session]) if !args.all && ids.len() == 1 => output::json(session)?,
        // The failure was reported.
        (OutputFormat::Json, []) if !args.all && ids.len() == 1 => {}
        (OutputFormat::Json, sessions) => output::json(&json!({ "items": sessions }))?,
        (OutputFormat::Table, sessions) => {
            for session in sessions {
                output::message(&told(session, workspace));
            }
        }
    }
    first_failure.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// What became of a session and of its workspace.
fn told(session: &Session, workspace: WorkspaceDisposal) -> String {
    let (id, workspace_id) = (session.session_id, session.workspace_id);
    let is_over = session.state == SessionState::Ended;
    match (workspace, is_over) {
        (WorkspaceDisposal::Keep, true) => {
            format!("ended session {id}; kept workspace {workspace_id}")
        }
        (WorkspaceDisposal::Delete, true) => {
            format!("ended session {id}; deleted workspace {workspace_id}")
        }
        (WorkspaceDisposal::Keep, false) => {
            format!(
                "session {id} is {}; its workspace will be kept",
                session.state
            )
        }
        (WorkspaceDisposal::Delete, false) => {
            format!(
                "session {id} is {}; its workspace will be deleted",
                session.state
            )
        }
    }
}

async fn live_sessions(client: &SessionClient) -> Result<Vec<SessionId>, Failure> {
    let sessions = client.list_sessions(&SessionFilter::default()).await?;
    Ok(sessions
        .iter()
        .filter(|session| !matches!(session.state, SessionState::Ended | SessionState::Failed))
        .map(|session| session.session_id)
        .collect())
}
