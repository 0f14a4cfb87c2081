//! A terminal in a session, opened through the runtime's exec call.
//!
//! Invariants: input and output are independent, so a program that does not read blocks only its
//! input, and a client that does not read blocks only its output. When either side disconnects, the
//! terminal's processes are hung up. Pings detect a client that vanishes silently.

use std::{collections::BTreeMap, pin::Pin, sync::Arc, time::Duration};

use axum::{
    extract::{
        State, WebSocketUpgrade,
        ws::{Message, WebSocket},
    },
    response::Response,
};
use bytes::{Buf as _, Bytes};
use cynode_api::{ErrorCode, Problem, SessionId};
use cynode_sba_proto::WORKSPACE;
use cynode_service::{ApiError, QueryParams};
use futures_util::{
    SinkExt as _, StreamExt as _,
    stream::{self, SplitSink, SplitStream},
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt as _},
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{Api, sessions::Id, wait_until_gone};
use crate::{
    process,
    runtime::{ExecOutput, ExecSpec, RuntimeExec},
    sessions::{Live, exec_environment, runtime_problem},
};

const MAX_MESSAGE: usize = 64 * 1024;
/// Messages queued for the program; further ones wait at the client.
const INPUT_QUEUE_CAPACITY: usize = 16;
/// Ping interval while no input is read from the client.
const BLOCKED_PING_INTERVAL: Duration = Duration::from_secs(1);
/// Pings to a silent client before it times out.
const PINGS_PER_TIMEOUT: u32 = 4;
/// How long sending the exit may take once the sandbox is gone.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
const SHELL: &str = "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l";
/// Sets the terminal's size before running the program. The runtime applies the size only about
/// when the program starts, so the program's own process sets it first if the image has `stty`, and
/// then prints [`SIZE_SET`]. Without that mark it could overwrite a later resize by the client.
const SET_SIZE_SCRIPT: &str =
    r#"stty cols "$1" rows "$2" 2>/dev/null; shift 2; printf '\000'; exec "$@""#;
const SIZE_SET: u8 = 0;
const SET_SIZE_TIMEOUT: Duration = Duration::from_secs(10);

type TerminalSize = (u16, u16);

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum ClientMessage {
    Resize { cols: u16, rows: u16 },
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ServerMessage {
    Ready,
    Exit { exit_code: Option<i64> },
    Error { code: String, detail: String },
}

impl ServerMessage {
    fn message(&self) -> Message {
        Message::Text(serde_json::to_string(self).unwrap_or_default().into())
    }
}

/// Open a terminal (WebSocket). Binary frames are bytes; text frames are JSON `resize`, `ready`,
/// `exit`, `error`. A failed start is reported as `error`.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/pty", tag = "sessions",
    params(
        ("id" = SessionId, Path),
        ("cols" = Option<u16>, Query),
        ("rows" = Option<u16>, Query),
        ("argv" = Option<Vec<String>>, Query,
            description = "A command instead of a shell; repeated for each argument")),
    responses(
        (status = 101, description = "The terminal is open"),
        (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn open(
    State(api): State<Api>,
    Id(id): Id<SessionId>,
    QueryParams(query): QueryParams<Vec<(String, String)>>,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let (mut cols, mut rows) = (None, None);
    let mut argv = Vec::new();
    for (name, value) in query {
        let number = || {
            value
                .parse::<u16>()
                .ok()
                .filter(|number| (1..=1_000).contains(number))
                .ok_or_else(|| ApiError::invalid(format!("{name}: must be between 1 and 1000")))
        };
        match name.as_str() {
            "cols" if cols.is_none() => cols = Some(number()?),
            "rows" if rows.is_none() => rows = Some(number()?),
            "cols" | "rows" => return Err(ApiError::invalid(format!("{name}: is repeated"))),
            "argv" if argv.len() < 256 && !value.contains('\0') => argv.push(value),
            _ => {
                return Err(ApiError::invalid(format!(
                    "query: unknown parameter '{}'",
                    name.chars().take(50).collect::<String>()
                )));
            }
        }
    }
    let size = (cols.unwrap_or(80), rows.unwrap_or(24));
    let (entry, live) = api.sessions.live(id)?;
    let record = entry.record();
    if !record.session.pty_allowed {
        return Err(ApiError::new(
            ErrorCode::PtyNotAllowed,
            format!("session {id} was created without pty_allowed"),
        ));
    }
    let upgrade = upgrade.map_err(|error| {
        ApiError::invalid(format!(
            "expected a WebSocket upgrade: {}",
            error.body_text()
        ))
    })?;
    if argv.is_empty() {
        argv = ["/bin/sh", "-c", SHELL].map(str::to_owned).to_vec();
    }
    let argv = ["/bin/sh", "-c", SET_SIZE_SCRIPT, "sh"]
        .map(str::to_owned)
        .into_iter()
        .chain([size.0.to_string(), size.1.to_string()])
        .chain(argv)
        .collect();
    let env = exec_environment(
        &record,
        &BTreeMap::from([("TERM".to_owned(), "xterm-256color".to_owned())]),
    );
    let spec = ExecSpec {
        argv,
        env,
        cwd: WORKSPACE.to_owned(),
        stdin: true,
        tty: Some(size),
    };
    // Start the program only after the upgrade: a client that vanishes earlier leaves nothing
    // running, and a client that leaves later can't cancel a start halfway.
    let client_timeout = Duration::from_secs(api.sessions.config.pty_timeout_seconds);
    Ok(upgrade
        .max_message_size(MAX_MESSAGE)
        .max_frame_size(MAX_MESSAGE)
        .on_upgrade(move |socket| serve(socket, live, spec, client_timeout, api.stop)))
}

/// Why a terminal ended.
enum TerminalEnd {
    /// The output ended.
    Output,
    /// The client disconnected or closed the socket.
    Client,
    /// The worker is shutting down.
    Stop,
}

async fn serve(
    mut socket: WebSocket,
    live: Arc<Live>,
    spec: ExecSpec,
    client_timeout: Duration,
    stop: CancellationToken,
) {
    let _activity = live.activity();
    let exec = match live.runtime.exec(&live.container, &spec).await {
        Ok(exec) => exec,
        Err(error) => {
            let Problem { code, detail, .. } = runtime_problem(&error);
            drop(
                socket
                    .send(ServerMessage::Error { code, detail }.message())
                    .await,
            );
            drop(socket.send(Message::Close(None)).await);
            return;
        }
    };
    let RuntimeExec { id, input, output } = exec;
    let mut output = wait_until_sized(output).await;
    if socket.send(ServerMessage::Ready.message()).await.is_err() {
        return hang_up(&live, &id).await;
    }
    let (mut to_client, from_client) = socket.split();
    let (input_queue, queued_input) = mpsc::channel(INPUT_QUEUE_CAPACITY);
    let (control, mut control_messages) = mpsc::channel(4);
    let (size, sizes) = watch::channel(None);
    let end = tokio::select! {
        end = send_output(&mut to_client, &mut output, &mut control_messages) => end,
        end = receive(from_client, &input_queue, &control, &size, client_timeout) => end,
        end = write_input(input, queued_input) => end,
        end = resize(&live, &id, sizes) => end,
        () = wait_until_gone(&live) => TerminalEnd::Output,
        () = stop.cancelled() => TerminalEnd::Stop,
    };
    match end {
        TerminalEnd::Output => {
            let exit_code = exit_code(&live, &id).await;
            let send_exit = async {
                drop(
                    to_client
                        .send(ServerMessage::Exit { exit_code }.message())
                        .await,
                );
                drop(to_client.send(Message::Close(None)).await);
            };
            let timed_out = async {
                wait_until_gone(&live).await;
                tokio::time::sleep(EXIT_TIMEOUT).await;
            };
            tokio::select! {
                () = send_exit => {}
                () = timed_out => {}
                () = stop.cancelled() => {}
            }
        }
        TerminalEnd::Client => hang_up(&live, &id).await,
        TerminalEnd::Stop => {
            let reason = ServerMessage::Error {
                code: ErrorCode::ShuttingDown.as_str().to_owned(),
                detail: "the worker is shutting down".to_owned(),
            };
            tokio::join!(hang_up(&live, &id), async {
                drop(to_client.send(reason.message()).await);
            });
        }
    }
}

/// Waits until the terminal has its size; returns the program's output.
async fn wait_until_sized(mut output: ExecOutput) -> ExecOutput {
    match tokio::time::timeout(SET_SIZE_TIMEOUT, output.next()).await {
        Ok(Some(Ok((stream, mut data)))) => {
            if data.first() == Some(&SIZE_SET) {
                data.advance(1);
            }
            Box::pin(stream::iter([Ok((stream, data))]).chain(output))
        }
        // A failed start is reported as such; a slow one is not waited for.
        Ok(Some(Err(error))) => Box::pin(stream::iter([Err(error)])),
        Ok(None) => Box::pin(stream::empty()),
        Err(_) => output,
    }
}

/// Sends the program's output and control messages until either side ends.
async fn send_output(
    to_client: &mut SplitSink<WebSocket, Message>,
    output: &mut ExecOutput,
    control_messages: &mut mpsc::Receiver<Message>,
) -> TerminalEnd {
    loop {
        let message = tokio::select! {
            Some(message) = control_messages.recv() => message,
            piece = output.next() => match piece {
                Some(Ok((_, data))) if data.is_empty() => continue,
                Some(Ok((_, data))) => Message::Binary(data),
                Some(Err(_)) | None => return TerminalEnd::Output,
            },
        };
        if to_client.send(message).await.is_err() {
            return TerminalEnd::Client;
        }
    }
}

/// Receives messages until the client disconnects, blocking while the input queue is full. Pings a
/// silent client and gives up on it after `client_timeout`.
async fn receive(
    mut from_client: SplitStream<WebSocket>,
    input_queue: &mpsc::Sender<Bytes>,
    control: &mpsc::Sender<Message>,
    size: &watch::Sender<Option<TerminalSize>>,
    client_timeout: Duration,
) -> TerminalEnd {
    let mut last_message = Instant::now();
    loop {
        let Ok(message) =
            tokio::time::timeout(client_timeout / PINGS_PER_TIMEOUT, from_client.next()).await
        else {
            if last_message.elapsed() >= client_timeout {
                tracing::info!("The client of a terminal timed out; ending the terminal.");
                return TerminalEnd::Client;
            }
            drop(control.try_send(Message::Ping(Bytes::new())));
            continue;
        };
        match message {
            Some(Ok(Message::Binary(data))) => {
                // A vanished client is noticed only by reading or by pings.
                while let Err(_elapsed) =
                    tokio::time::timeout(BLOCKED_PING_INTERVAL, input_queue.reserve())
                        .await
                        .map(|slot| slot.map(|slot| slot.send(data.clone())))
                {
                    drop(control.try_send(Message::Ping(Bytes::new())));
                }
            }
            Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                Ok(ClientMessage::Resize { cols, rows })
                    if (1..=1_000).contains(&cols) && (1..=1_000).contains(&rows) =>
                {
                    size.send_replace(Some((cols, rows)));
                }
                _ => {
                    let detail =
                        "text frames are {\"type\":\"resize\",\"cols\":n,\"rows\":n}".to_owned();
                    drop(
                        control.try_send(
                            ServerMessage::Error {
                                code: ErrorCode::InvalidRequest.as_str().to_owned(),
                                detail,
                            }
                            .message(),
                        ),
                    );
                }
            },
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(Message::Close(_)) | Err(_)) | None => return TerminalEnd::Client,
        }
        last_message = Instant::now();
    }
}

/// Writes queued input as fast as the program reads it. If a write fails, the output is about to
/// end too.
async fn write_input(
    mut input: Pin<Box<dyn AsyncWrite + Send>>,
    mut queued_input: mpsc::Receiver<Bytes>,
) -> TerminalEnd {
    while let Some(data) = queued_input.recv().await {
        if input.write_all(&data).await.is_err() || input.flush().await.is_err() {
            break;
        }
    }
    drop(queued_input);
    std::future::pending().await
}

/// Applies the newest size requested by the client.
async fn resize(
    live: &Live,
    id: &str,
    mut sizes: watch::Receiver<Option<TerminalSize>>,
) -> TerminalEnd {
    while sizes.changed().await.is_ok() {
        let size = *sizes.borrow_and_update();
        if let Some((cols, rows)) = size
            && let Err(error) = live.runtime.exec_resize(id, cols, rows).await
        {
            tracing::warn!(%error, cols, rows, "Failed to resize a terminal.");
        }
    }
    std::future::pending().await
}

/// The exit code, once the runtime reports it.
async fn exit_code(live: &Live, id: &str) -> Option<i64> {
    for _ in 0..100 {
        match live.runtime.exec_state(id).await {
            Ok(state) if !state.running => return state.exit_code,
            Ok(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(_) => return None,
        }
    }
    None
}

/// Sends HUP, then KILL, to the terminal's processes.
async fn hang_up(live: &Live, id: &str) {
    // The runtime reports an exec as running only a moment after its start.
    let mut pid = 0;
    for _ in 0..100 {
        match live.runtime.exec_state(id).await {
            Ok(state) if state.running && state.pid > 0 => {
                pid = state.pid;
                break;
            }
            Ok(_) => tokio::time::sleep(Duration::from_millis(40)).await,
            Err(_) => return,
        }
    }
    if pid == 0 {
        return;
    }
    process::signal_session(pid, 1);
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(40)).await;
        if !live
            .runtime
            .exec_state(id)
            .await
            .is_ok_and(|state| state.running)
        {
            return;
        }
    }
    process::signal_session(pid, 9);
}

#[cfg(test)]
mod tests {
    use cynode_api::Stream;

    use super::*;

    #[tokio::test]
    async fn the_size_mark_is_stripped_and_no_output_is_lost() {
        for (pieces, shown) in [
            (vec!["\0", "a", "b"], "ab"),
            (vec!["\0a\0"], "a\0"),
            (vec!["Error: no such file\r\n"], "Error: no such file\r\n"),
            (vec![], ""),
        ] {
            let pieces: Vec<_> = pieces
                .into_iter()
                .map(|piece| Ok((Stream::Stdout, Bytes::from(piece))))
                .collect();
            let output = wait_until_sized(Box::pin(stream::iter(pieces))).await;
            let seen: Vec<_> = output
                .map(|piece| piece.expect("no error").1)
                .collect()
                .await;
            assert_eq!(seen.concat(), shown.as_bytes());
        }
    }
}
