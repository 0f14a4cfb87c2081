//! `session list` and `session show`.

use std::process::ExitCode;

use cynode_api::{Session, SessionId, SessionState};
use cynode_client::{SessionClient, SessionFilter, Surface};
use serde_json::json;
use time::OffsetDateTime;

use crate::{
    cli::{Globals, List, OutputFormat},
    commands::{format_time, note_more},
    connect,
    failure::Failure,
    output::{self, TableStyle},
    resolve, sanitize,
};

/// The states that a list shows first, and those that it shows only with `--all`.
const LIVE: &str = "running,creating,ending,lost";
const OVER: &str = "ended,failed";

pub async fn list(
    client: &SessionClient,
    globals: &Globals,
    args: List,
) -> Result<ExitCode, Failure> {
    let (sessions, has_more) = match client.surface() {
        Surface::User => newest(client, globals, &args).await?,
        Surface::Worker => newest_of_worker(client, &args).await?,
    };
    note_more(args.list, has_more);
    match globals.output {
        OutputFormat::Json => output::json(&json!({ "items": sessions }))?,
        OutputFormat::Table => {
            let style = TableStyle::new(args.list.wide);
            let now = OffsetDateTime::now_utc();
            let rows = sessions.iter().map(|session| {
                let left = if session.ended_at.is_some() {
                    "-".to_owned()
                } else {
                    output::span((session.expires_at - now).whole_seconds())
                };
                [
                    style.id(&session.session_id),
                    session.name.clone().unwrap_or_else(|| "-".to_owned()),
                    session.state.to_string(),
                    output::span((now - session.created_at).whole_seconds()),
                    left,
                    session.running_execs.to_string(),
                    session.image_ref.clone(),
                    labels(session),
                ]
            });
            output::table(
                style,
                [
                    "SESSION", "NAME", "STATE", "AGE", "LEFT", "EXECS", "IMAGE", "LABELS",
                ],
                rows,
            )?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The newest sessions that the arguments select, those that run first; and whether there are more.
async fn newest(
    client: &SessionClient,
    globals: &Globals,
    args: &List,
) -> Result<(Vec<Session>, bool), Failure> {
    let task = resolve::optional(args.task.as_deref(), async |task| {
        resolve::task(&connect::user_client(globals)?, task).await
    })
    .await?;
    let states = match (args.state, args.all) {
        (Some(state), _) => vec![state.to_string()],
        (None, true) => vec![LIVE.to_owned(), OVER.to_owned()],
        (None, false) => vec![LIVE.to_owned()],
    };
    let mut sessions: Vec<Session> = Vec::new();
    for state in states {
        let mut query = vec![("state", state)];
        query.extend(task.map(|id| ("task_id", id.to_string())));
        // The API filters by one label; the client checks the others.
        query.extend(
            args.label
                .first()
                .map(|(key, value)| ("label", format!("{key}={value}"))),
        );
        let listing = client
            .newest(query, args.list.limit - sessions.len(), |session| {
                has_labels(session, args)
            })
            .await?;
        sessions.extend(listing.items);
        if listing.has_more {
            sessions.sort_by_key(|session| rank(session.state));
            return Ok((sessions, true));
        }
    }
    sessions.sort_by_key(|session| rank(session.state));
    Ok((sessions, false))
}

/// The same of a worker, whose list is short and knows neither order nor several states.
async fn newest_of_worker(
    client: &SessionClient,
    args: &List,
) -> Result<(Vec<Session>, bool), Failure> {
    let task_id = args.task.as_deref().map(str::parse).transpose();
    let task_id = task_id.map_err(|_| {
        Failure::usage("--task: not a task's id")
            .remedy("Write the whole id: this server is a worker.")
    })?;
    let filter = SessionFilter {
        state: args.state,
        task_id,
        labels: args.label.clone(),
    };
    let is_listed = |session: &Session| {
        args.all
            || args.state.is_some()
            || !matches!(session.state, SessionState::Ended | SessionState::Failed)
    };
    let mut sessions = client.list_sessions(&filter).await?;
    sessions.retain(is_listed);
    sessions.reverse();
    let has_more = sessions.len() > args.list.limit;
    sessions.truncate(args.list.limit);
    sessions.sort_by_key(|session| rank(session.state));
    Ok((sessions, has_more))
}

fn has_labels(session: &Session, args: &List) -> bool {
    args.label
        .iter()
        .all(|(key, value)| session.labels.get(key) == Some(value))
}

/// What runs comes first.
const fn rank(state: SessionState) -> u8 {
    match state {
        SessionState::Running => 0,
        SessionState::Creating => 1,
        SessionState::Ending => 2,
        SessionState::Lost => 3,
        SessionState::Ended | SessionState::Failed => 4,
    }
}

pub async fn show(
    client: &SessionClient,
    globals: &Globals,
    id: SessionId,
) -> Result<ExitCode, Failure> {
    let session = client.get_session(id).await?;
    if globals.output == OutputFormat::Json {
        output::json(&session)?;
        return Ok(ExitCode::SUCCESS);
    }
    let limits = &session.limits;
    let fields = [
        ("session", session.session_id.to_string()),
        ("name", session.name.clone().unwrap_or_default()),
        ("state", session.state.to_string()),
        ("end reason", session.end_reason.clone().unwrap_or_default()),
        ("task", session.task_id.to_string()),
        ("image", session.image_ref.clone()),
        ("digest", session.image_digest.clone().unwrap_or_default()),
        ("workspace", session.workspace_id.to_string()),
        ("commit", session.base_commit.clone().unwrap_or_default()),
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
