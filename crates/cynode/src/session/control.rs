//! `session kill` and `session extend`.

use std::process::ExitCode;

use cynode_api::{API_VERSION, SessionPatch, SignalName, SignalScope};
use cynode_client::SessionClient;
use serde_json::json;
use time::OffsetDateTime;

use super::follow;
use crate::{
    cli::{Extend, Globals, Kill},
    commands::print_done,
    failure::Failure,
    output,
};

pub async fn kill(
    client: &SessionClient,
    globals: &Globals,
    args: Kill,
) -> Result<ExitCode, Failure> {
    let (session, exec) = if args.all {
        (super::target(client, args.session.as_deref()).await?, None)
    } else {
        follow::target(client, args.session, args.exec).await?
    };
    let signal = SignalName::name_of(args.signal.number());
    if args.all {
        client.signal_session(session, args.signal).await?;
        return print_done(
            globals,
            &json!({ "session_id": session, "signal": signal }),
            &format!("sent {signal} to everything in session {session}"),
        );
    }
    let exec = match exec.as_deref() {
        Some(text) => follow::find(client, session, text).await?,
        None => follow::newest_running(client, session).await?,
    };
    client
        .signal_exec(session, exec, args.signal, SignalScope::Tree)
        .await?;
    print_done(
        globals,
        &json!({ "session_id": session, "exec_id": exec, "signal": signal }),
        &format!("sent {signal} to exec {exec}"),
    )
}

pub async fn extend(
    client: &SessionClient,
    globals: &Globals,
    args: Extend,
) -> Result<ExitCode, Failure> {
    let id = super::target(client, args.session.as_deref()).await?;
    let patch = SessionPatch {
        version: Some(API_VERSION),
        max_lifetime_seconds: args
            .time
            .or(args.lifetime)
            .map(|time| time.as_secs().max(1)),
        idle_timeout_seconds: args.idle.map(|time| time.as_secs().max(1)),
        labels: None,
    };
    let session = client.patch_session(id, &patch).await?;
    let now = OffsetDateTime::now_utc();
    let left = |until: OffsetDateTime| output::span((until - now).whole_seconds());
    print_done(
        globals,
        &session,
        &format!(
            "session {id} ends in {}, or after {} without activity",
            left(session.expires_at),
            left(session.idle_expires_at)
        ),
    )
}
