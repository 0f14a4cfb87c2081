//! A terminal in a session, opened by the runtime's own exec.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    extract::{
        State, WebSocketUpgrade,
        ws::{Message, WebSocket},
    },
    response::Response,
};
use bytes::Bytes;
use cynode_api::{ErrorCode, Problem, SessionId};
use cynode_sba_proto::WORKSPACE;
use cynode_service::{ApiError, QueryParams};
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt as _;
use tokio_util::sync::CancellationToken;

use super::{Api, sessions::Id};
use crate::{
    process,
    runtime::{ExecSpec, RuntimeExec},
    sessions::{Live, exec_environment, runtime_problem},
};

const MAX_MESSAGE: usize = 64 * 1024;
const SHELL: &str = "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l";

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum FromClient {
    Resize { cols: u16, rows: u16 },
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ToClient {
    Ready,
    Exit { exit_code: Option<i64> },
    Error { code: String, detail: String },
}

/// Open a terminal (WebSocket). Binary frames are bytes; text frames are JSON `resize`, `ready`, `exit`, `error`.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/pty", tag = "sessions",
    params(("id" = SessionId, Path), ("cols" = Option<u16>, Query), ("rows" = Option<u16>, Query), ("argv" = Option<Vec<String>>, Query, description = "A command instead of a shell; repeated for each argument")),
    responses((status = 101, description = "The terminal is open"), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn open(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    QueryParams(query): QueryParams<Vec<(String, String)>>,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let mut size = (80, 24);
    let mut argv = Vec::new();
    for (name, value) in query {
        let number = || {
            value
                .parse::<u16>()
                .ok()
                .filter(|number| (1..=1_000).contains(number))
                .ok_or_else(|| ApiError::invalid(format!("{name}: must lie between 1 and 1000")))
        };
        match name.as_str() {
            "cols" => size.0 = number()?,
            "rows" => size.1 = number()?,
            "argv" if argv.len() < 256 && !value.contains('\0') => argv.push(value),
            _ => return Err(ApiError::invalid(format!("query: '{}' is not understood", name.chars().take(50).collect::<String>()))),
        }
    }
    let (entry, live) = api.sessions.live(id)?;
    let record = entry.record();
    if !record.session.pty_allowed {
        return Err(ApiError::new(ErrorCode::PtyNotAllowed, format!("session {id} was created without a terminal")));
    }
    let upgrade = upgrade.map_err(|error| ApiError::invalid(format!("a WebSocket is expected here: {}", error.body_text())))?;
    if argv.is_empty() {
        argv = ["/bin/sh", "-c", SHELL].map(str::to_owned).to_vec();
    }
    let env = exec_environment(&record, &BTreeMap::from([("TERM".to_owned(), "xterm-256color".to_owned())]));
    let spec = ExecSpec { argv, env, cwd: WORKSPACE.to_owned(), stdin: true, tty: Some(size) };
    let exec = live.runtime.exec(&live.container, &spec).await.map_err(|error| runtime_problem(&error))?;
    Ok(upgrade.max_message_size(MAX_MESSAGE).max_frame_size(MAX_MESSAGE).on_upgrade(move |socket| serve(socket, live, exec, api.stop)))
}

async fn serve(mut socket: WebSocket, live: Arc<Live>, exec: RuntimeExec, stop: CancellationToken) {
    let _activity = live.activity();
    let RuntimeExec { id, mut input, mut output } = exec;
    let said = |message: &ToClient| Message::Text(serde_json::to_string(message).unwrap_or_default().into());
    if socket.send(said(&ToClient::Ready)).await.is_err() {
        return hang_up(&live, &id).await;
    }
    loop {
        tokio::select! {
            piece = output.next() => match piece {
                Some(Ok((_, data))) => {
                    let data = without_last_word(data);
                    if !data.is_empty() && socket.send(Message::Binary(data)).await.is_err() {
                        return hang_up(&live, &id).await;
                    }
                }
                Some(Err(_)) | None => break,
            },
            message = socket.recv() => match message {
                Some(Ok(Message::Binary(data))) => {
                    if input.write_all(&data).await.is_err() || input.flush().await.is_err() {
                        break;
                    }
                }
                Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                    Ok(FromClient::Resize { cols, rows }) if (1..=1_000).contains(&cols) && (1..=1_000).contains(&rows) => drop(live.runtime.exec_resize(&id, cols, rows).await),
                    _ => drop(socket.send(said(&ToClient::Error { code: "invalid_request".to_owned(), detail: "text frames are {\"type\":\"resize\",\"cols\":n,\"rows\":n}".to_owned() })).await),
                },
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                Some(Ok(Message::Close(_)) | Err(_)) | None => return hang_up(&live, &id).await,
            },
            () = stop.cancelled() => {
                drop(socket.send(said(&ToClient::Error { code: "shutting_down".to_owned(), detail: "the worker is stopping".to_owned() })).await);
                return hang_up(&live, &id).await;
            }
        }
    }
    let exit_code = ended(&live, &id).await;
    drop(socket.send(said(&ToClient::Exit { exit_code })).await);
    drop(socket.send(Message::Close(None)).await);
}

/// When a program ends without reading all that was typed, Podman writes of its broken socket into the terminal, as the
/// last thing in it. That is between Podman and conmon.
fn without_last_word(mut data: Bytes) -> Bytes {
    let found = [&b"Error: read unixpacket @->"[..], b"Error: write unixpacket @->"]
        .iter()
        .find_map(|word| data.windows(word.len()).rposition(|window| window == *word));
    if let Some(start) = found
        && data.ends_with(b"\n")
        // A terminal's own lines end in both.
        && !data[start..].contains(&b'\r')
    {
        data.truncate(start);
    }
    data
}

/// The exit code, once the runtime has it.
async fn ended(live: &Live, id: &str) -> Option<i64> {
    for _ in 0..100 {
        match live.runtime.exec_state(id).await {
            Ok(state) if !state.running => return state.exit_code,
            Ok(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(_) => return None,
        }
    }
    None
}

/// The client is gone: the terminal's processes get HUP, then KILL.
async fn hang_up(live: &Live, id: &str) {
    let Ok(state) = live.runtime.exec_state(id).await else { return };
    if !state.running || state.pid <= 0 {
        return;
    }
    process::signal_session(state.pid, 1);
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(40)).await;
        if !live.runtime.exec_state(id).await.is_ok_and(|state| state.running) {
            return;
        }
    }
    process::signal_session(state.pid, 9);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn podmans_complaint_is_not_the_programs_output() {
        let complaint = "Error: read unixpacket @->/proc/self/fd/13/attach: read: connection reset by peer\n";
        for (data, shown) in [
            (complaint.to_owned(), ""),
            (format!("$ {complaint}"), "$ "),
            (format!("a\r\n{}", complaint.replace("read", "write")), "a\r\n"),
            ("Error: read unixpacket @-> was printed\r\n".to_owned(), "Error: read unixpacket @-> was printed\r\n"),
            ("plain\n".to_owned(), "plain\n"),
            (String::new(), ""),
        ] {
            assert_eq!(without_last_word(data.clone().into()), shown, "{data:?}");
        }
    }
}
