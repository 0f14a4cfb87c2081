//! `session list`, `show` and `end`.

use std::process::ExitCode;

use cynode_api::{API_VERSION, Session, SessionEnd, SessionId, SessionState, WorkspaceDisposal};
use cynode_client::{SessionClient, SessionFilter};
use serde_json::json;
use time::OffsetDateTime;

use crate::{
    cli::{End, Format, Globals, List},
    commands::format_time,
    failure::Failure,
    output::{self, Progress},
    sanitize,
};

pub async fn list(
    client: &SessionClient,
    globals: &Globals,
    args: List,
) -> Result<ExitCode, Failure> {
    let sessions = client
        .list_sessions(&SessionFilter {
            state: args.state,
            task_id: args.task,
            labels: args.label,
        })
        .await?;
    match globals.output {
        Format::Json => output::json(&json!({ "items": sessions }))?,
        Format::Table => {
            let now = OffsetDateTime::now_utc();
            let rows = sessions.iter().map(|session| {
                let left = if session.ended_at.is_some() {
                    "-".to_owned()
                } else {
                    output::span((session.expires_at - now).whole_seconds())
                };
                [
                    session.session_id.to_string(),
                    session.state.to_string(),
                    session.image_ref.clone(),
                    output::span((now - session.created_at).whole_seconds()),
                    left,
                    session.running_execs.to_string(),
                    labels(session),
                ]
            });
            output::table(
                [
                    "SESSION", "STATE", "IMAGE", "AGE", "LEFT", "EXECS", "LABELS",
                ],
                rows,
            )?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn show(
    client: &SessionClient,
    globals: &Globals,
    id: SessionId,
) -> Result<ExitCode, Failure> {
    let session = client.get_session(id).await?;
    if globals.output == Format::Json {
        output::json(&session)?;
        return Ok(ExitCode::SUCCESS);
    }
    let limits = &session.limits;
    let fields = [
        ("session", session.session_id.to_string()),
        ("state", session.state.to_string()),
        ("end reason", session.end_reason.clone().unwrap_or_default()),
        ("task", session.task_id.to_string()),
        ("image", session.image_ref.clone()),
        ("digest", session.image_digest.clone().unwrap_or_default()),
        ("workspace", session.workspace_id.to_string()),
        ("node", session.node_id.to_string()),
        (
            "limits",
            format!(
                "memory {}, cpus {}, pids {}, disk {}, nofile {}",
                output::size(limits.memory_bytes),
                limits.cpus,
                limits.pids,
                output::size(limits.disk_bytes),
                limits.nofile
            ),
        ),
        ("unenforced", unenforced(&session)),
        (
            "network",
            json!(session.network_policy)
                .as_str()
                .unwrap_or_default()
                .to_owned(),
        ),
        (
            "terminal",
            if session.pty_allowed {
                "allowed"
            } else {
                "not allowed"
            }
            .to_owned(),
        ),
        ("labels", labels(&session)),
        ("created", format_time(session.created_at)),
        ("expires", format_time(session.expires_at)),
        ("idle until", format_time(session.idle_expires_at)),
        (
            "ended",
            session.ended_at.map(format_time).unwrap_or_default(),
        ),
        ("execs", session.running_execs.to_string()),
    ];
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_empty()) {
        output::line(&format!("{name:<12}{}", sanitize::line(value)))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn end(
    client: &SessionClient,
    globals: &Globals,
    args: End,
) -> Result<ExitCode, Failure> {
    let ids = if args.all {
        live_sessions(client).await?
    } else {
        args.ids
    };
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
            Ok(session) => ended.push(session),
            // Continue with the other sessions.
            Err(error) => {
                let failure = Failure::from(error);
                if ids.len() > 1 && globals.output == Format::Table {
                    output::message(&format!("session {id}:"));
                }
                failure.report(globals.output);
                first_failure.get_or_insert(Failure::reported(failure.exit));
            }
        }
    }
    drop(progress);
    match (globals.output, &ended[..]) {
        (Format::Json, [session]) if !args.all && ids.len() == 1 => output::json(session)?,
        // The failure was reported.
        (Format::Json, []) if !args.all && ids.len() == 1 => {}
        (Format::Json, sessions) => output::json(&json!({ "items": sessions }))?,
        (Format::Table, sessions) => {
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

pub fn unenforced(session: &Session) -> String {
    session
        .unenforced
        .iter()
        .filter_map(|name| json!(name).as_str().map(ToOwned::to_owned))
        .collect::<Vec<_>>()
        .join(", ")
}

fn labels(session: &Session) -> String {
    session
        .labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect::<Vec<_>>()
        .join(",")
}
