//! `session end`.

use std::process::ExitCode;

use cynode_api::{API_VERSION, SessionEnd, SessionId, SessionState, WorkspaceDisposal};
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
                let kept = if args.keep_workspace {
                    format!("; kept workspace {}", session.workspace_id)
                } else {
                    String::new()
                };
                output::message(&format!("ended session {}{kept}", session.session_id));
            }
        }
    }
    first_failure.map_or(Ok(ExitCode::SUCCESS), Err)
}

async fn live_sessions(client: &SessionClient) -> Result<Vec<SessionId>, Failure> {
    let sessions = client.list_sessions(&SessionFilter::default()).await?;
    Ok(sessions
        .iter()
        .filter(|session| !matches!(session.state, SessionState::Ended | SessionState::Failed))
        .map(|session| session.session_id)
        .collect())
}
