//! `session kill` and `session extend`.

use std::{process::ExitCode, time::Duration};

use cynode_api::{API_VERSION, SessionPatch, SignalName, SignalScope};
use cynode_client::SessionClient;
use serde_json::json;
use time::OffsetDateTime;

use super::follow;
use crate::{
    cli::{Extend, Globals, Kill},
    commands::print_done,
    failure::Failure,
    output, parse, resolve,
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
    let (session, lifetime) = meant(&args)?;
    let id = super::target(client, session).await?;
    let patch = SessionPatch {
        version: Some(API_VERSION),
        max_lifetime_seconds: lifetime.map(|time| time.as_secs().max(1)),
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

/// The session and the lifetime that the arguments of `extend` mean: a lone time is that of this
/// directory's session.
fn meant(args: &Extend) -> Result<(Option<&str>, Option<Duration>), Failure> {
    let lifetime = args.time.or(args.lifetime);
    let session = args.session.as_deref();
    if lifetime.is_some() || (args.idle.is_some() && session.is_none()) {
        return Ok((session, lifetime));
    }
    // A bare number is more likely a part of an id. With --idle, so is what can be one, like 2d.
    let is_time = |text: &&str| {
        !text.bytes().all(|byte| byte.is_ascii_digit())
            && (args.idle.is_none() || resolve::id_part(text).is_none())
    };
    let time = session
        .filter(is_time)
        .and_then(|text| parse::duration(text).ok());
    match time {
        Some(_) => Ok((None, time)),
        None if args.idle.is_some() => Ok((session, None)),
        None => Err(Failure::usage("a time is missing")
            .remedy("Write 'cynode session extend [SESSION] 2h', or use --lifetime or --idle.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lone_time_is_that_of_this_directorys_session() {
        let hours = |hours| Some(Duration::from_hours(hours));
        let of = |session: Option<&str>, time, idle| {
            let args = Extend {
                session: session.map(str::to_owned),
                time,
                lifetime: None,
                idle,
            };
            meant(&args)
                .map(|(session, time)| (session.map(str::to_owned), time))
                .map_err(|failure| failure.code().to_owned())
        };
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(of(Some("2h"), None, None), Ok((None, hours(2))));
        assert_eq!(of(Some("2d"), None, None), Ok((None, hours(48))));
        assert_eq!(of(Some("."), hours(2), None), Ok((named("."), hours(2))));
        assert_eq!(of(Some("2h"), hours(1), None), Ok((named("2h"), hours(1))));
        assert_eq!(of(Some("2h"), None, hours(1)), Ok((None, hours(2))));
        assert_eq!(of(Some("2d"), None, hours(1)), Ok((named("2d"), None)));
        assert_eq!(of(None, None, hours(1)), Ok((None, None)));
        for missing in [None, Some("7f3a"), Some("12"), Some(".")] {
            assert_eq!(of(missing, None, None), Err("usage".to_owned()));
        }
    }
}
