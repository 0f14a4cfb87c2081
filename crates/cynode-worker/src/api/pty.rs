//! A terminal in a session, opened by the runtime's own exec.
//!
//! What must stay true: the ways in and out are apart, so that a program that does not read its terminal holds up what is typed
//! and nothing else, and a client that does not read holds up what is shown and nothing else. Whoever goes away, the terminal's
//! processes are hung up; a client that vanishes without a word is found out by asking.

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

use super::{Api, gone, sessions::Id};
use crate::{
    process,
    runtime::{ExecOutput, ExecSpec, RuntimeExec},
    sessions::{Live, exec_environment, runtime_problem},
};

const MAX_MESSAGE: usize = 64 * 1024;
/// Messages that wait for the program to read them; what comes after them waits at the client.
const TYPED_AHEAD: usize = 16;
/// While nothing is taken from the client, how often it is asked whether it is still there.
const ASK: Duration = Duration::from_secs(1);
/// How often a client that says nothing is asked before patience with it ends.
const ASKED: u32 = 4;
/// How long a client may take to hear the end of a terminal whose sandbox is gone.
const FAREWELL: Duration = Duration::from_secs(10);
const SHELL: &str = "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l";
/// The runtime gives a terminal its size about when the program starts, not before. So the program's own process sets it first,
/// where the image has what it takes, and then says [`MARK`]: sizes that the client says later must not be overtaken by it.
const SIZED: &str = r#"stty cols "$1" rows "$2" 2>/dev/null; shift 2; printf '\000'; exec "$@""#;
const MARK: u8 = 0;
/// How long that may take.
const SIZING: Duration = Duration::from_secs(10);

type Size = (u16, u16);

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

impl ToClient {
    fn message(&self) -> Message {
        Message::Text(serde_json::to_string(self).unwrap_or_default().into())
    }
}

/// Open a terminal (WebSocket). Binary frames are bytes; text frames are JSON `resize`, `ready`, `exit`, `error`. What can't be
/// started is said by `error`.
#[utoipa::path(get, path = "/v1/worker/sessions/{id}/pty", tag = "sessions",
    params(("id" = SessionId, Path), ("cols" = Option<u16>, Query), ("rows" = Option<u16>, Query), ("argv" = Option<Vec<String>>, Query, description = "A command instead of a shell; repeated for each argument")),
    responses((status = 101, description = "The terminal is open"), (status = "default", body = Problem, content_type = "application/problem+json")))]
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
                .ok_or_else(|| ApiError::invalid(format!("{name}: must lie between 1 and 1000")))
        };
        match name.as_str() {
            "cols" if cols.is_none() => cols = Some(number()?),
            "rows" if rows.is_none() => rows = Some(number()?),
            "cols" | "rows" => return Err(ApiError::invalid(format!("{name}: is named twice"))),
            "argv" if argv.len() < 256 && !value.contains('\0') => argv.push(value),
            _ => {
                return Err(ApiError::invalid(format!(
                    "query: '{}' is not understood",
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
            format!("session {id} was created without a terminal"),
        ));
    }
    let upgrade = upgrade.map_err(|error| {
        ApiError::invalid(format!(
            "a WebSocket is expected here: {}",
            error.body_text()
        ))
    })?;
    if argv.is_empty() {
        argv = ["/bin/sh", "-c", SHELL].map(str::to_owned).to_vec();
    }
    let argv = ["/bin/sh", "-c", SIZED, "sh"]
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
    // Started only when the socket is there: a client that vanishes before leaves nothing running, and what runs here is not
    // dropped in the middle of a start when the client goes.
    let patience = Duration::from_secs(api.sessions.config.pty_timeout_seconds);
    Ok(upgrade
        .max_message_size(MAX_MESSAGE)
        .max_frame_size(MAX_MESSAGE)
        .on_upgrade(move |socket| serve(socket, live, spec, patience, api.stop)))
}

/// Why a terminal ended.
enum End {
    /// Its output did.
    Output,
    /// The client is gone, or said goodbye.
    Client,
    /// The worker stops.
    Stop,
}

async fn serve(
    mut socket: WebSocket,
    live: Arc<Live>,
    spec: ExecSpec,
    patience: Duration,
    stop: CancellationToken,
) {
    let _activity = live.activity();
    let exec = match live.runtime.exec(&live.container, &spec).await {
        Ok(exec) => exec,
        Err(error) => {
            let Problem { code, detail, .. } = runtime_problem(&error);
            drop(
                socket
                    .send(ToClient::Error { code, detail }.message())
                    .await,
            );
            drop(socket.send(Message::Close(None)).await);
            return;
        }
    };
    let RuntimeExec { id, input, output } = exec;
    let mut output = sized(output).await;
    if socket.send(ToClient::Ready.message()).await.is_err() {
        return hang_up(&live, &id).await;
    }
    let (mut to_client, from_client) = socket.split();
    let (typed, to_write) = mpsc::channel(TYPED_AHEAD);
    let (say, mut to_say) = mpsc::channel(4);
    let (size, sizes) = watch::channel(None);
    let end = tokio::select! {
        end = show(&mut to_client, &mut output, &mut to_say) => end,
        end = listen(from_client, &typed, &say, &size, patience) => end,
        end = write(input, to_write) => end,
        end = resize(&live, &id, sizes) => end,
        () = gone(&live) => End::Output,
        () = stop.cancelled() => End::Stop,
    };
    match end {
        End::Output => {
            let exit_code = ended(&live, &id).await;
            let goodbye = async {
                drop(to_client.send(ToClient::Exit { exit_code }.message()).await);
                drop(to_client.send(Message::Close(None)).await);
            };
            tokio::select! {
                () = goodbye => {}
                () = async { gone(&live).await; tokio::time::sleep(FAREWELL).await } => {}
                () = stop.cancelled() => {}
            }
        }
        End::Client => hang_up(&live, &id).await,
        End::Stop => {
            let reason = ToClient::Error {
                code: ErrorCode::ShuttingDown.as_str().to_owned(),
                detail: "the worker is stopping".to_owned(),
            };
            tokio::join!(hang_up(&live, &id), async {
                drop(to_client.send(reason.message()).await)
            });
        }
    }
}

/// Waits until the terminal has its size; gives the program's output.
async fn sized(mut output: ExecOutput) -> ExecOutput {
    match tokio::time::timeout(SIZING, output.next()).await {
        Ok(Some(Ok((stream, mut data)))) => {
            if data.first() == Some(&MARK) {
                data.advance(1);
            }
            Box::pin(stream::iter([Ok((stream, data))]).chain(output))
        }
        // What could not be started at all says so, and one that takes so long is not waited for.
        Ok(Some(Err(error))) => Box::pin(stream::iter([Err(error)])),
        Ok(None) => Box::pin(stream::empty()),
        Err(_) => output,
    }
}

/// Passes on what the program shows, until it ends or nobody is there to see it.
async fn show(
    to_client: &mut SplitSink<WebSocket, Message>,
    output: &mut ExecOutput,
    to_say: &mut mpsc::Receiver<Message>,
) -> End {
    loop {
        let message = tokio::select! {
            Some(message) = to_say.recv() => message,
            piece = output.next() => match piece {
                Some(Ok((_, data))) if data.is_empty() => continue,
                Some(Ok((_, data))) => Message::Binary(data),
                Some(Err(_)) | None => return End::Output,
            },
        };
        if to_client.send(message).await.is_err() {
            return End::Client;
        }
    }
}

/// Takes what the client sends, as far as there is room for it, until it is gone. One that says nothing is asked, and is gone
/// when it has not answered for as long as our patience lasts.
async fn listen(
    mut from_client: SplitStream<WebSocket>,
    typed: &mpsc::Sender<Bytes>,
    say: &mpsc::Sender<Message>,
    size: &watch::Sender<Option<Size>>,
    patience: Duration,
) -> End {
    let mut heard = Instant::now();
    loop {
        let Ok(message) = tokio::time::timeout(patience / ASKED, from_client.next()).await else {
            if heard.elapsed() >= patience {
                tracing::info!(
                    "A terminal's client does not answer any more; ending the terminal."
                );
                return End::Client;
            }
            drop(say.try_send(Message::Ping(Bytes::new())));
            continue;
        };
        match message {
            Some(Ok(Message::Binary(data))) => {
                // A client that vanished is only noticed by reading or by asking.
                while let Err(_elapsed) = tokio::time::timeout(ASK, typed.reserve())
                    .await
                    .map(|room| room.map(|room| room.send(data.clone())))
                {
                    drop(say.try_send(Message::Ping(Bytes::new())));
                }
            }
            Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                Ok(FromClient::Resize { cols, rows })
                    if (1..=1_000).contains(&cols) && (1..=1_000).contains(&rows) =>
                {
                    size.send_replace(Some((cols, rows)));
                }
                _ => {
                    let detail =
                        "text frames are {\"type\":\"resize\",\"cols\":n,\"rows\":n}".to_owned();
                    drop(
                        say.try_send(
                            ToClient::Error {
                                code: ErrorCode::InvalidRequest.as_str().to_owned(),
                                detail,
                            }
                            .message(),
                        ),
                    );
                }
            },
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(Message::Close(_)) | Err(_)) | None => return End::Client,
        }
        heard = Instant::now();
    }
}

/// Writes what was typed, as fast as the program reads it. A terminal that takes no more is about to end, which its output says.
async fn write(
    mut input: Pin<Box<dyn AsyncWrite + Send>>,
    mut typed: mpsc::Receiver<Bytes>,
) -> End {
    while let Some(data) = typed.recv().await {
        if input.write_all(&data).await.is_err() || input.flush().await.is_err() {
            break;
        }
    }
    drop(typed);
    std::future::pending().await
}

/// Gives the terminal the newest size that the client has said.
async fn resize(live: &Live, id: &str, mut sizes: watch::Receiver<Option<Size>>) -> End {
    while sizes.changed().await.is_ok() {
        let size = *sizes.borrow_and_update();
        if let Some((cols, rows)) = size
            && let Err(error) = live.runtime.exec_resize(id, cols, rows).await
        {
            tracing::warn!(%error, cols, rows, "Resizing a terminal failed.");
        }
    }
    std::future::pending().await
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
    // Just after its start an exec does not run yet, as far as the runtime says.
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
    async fn the_mark_of_a_sized_terminal_is_not_shown_and_nothing_else_is_lost() {
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
            let output = sized(Box::pin(stream::iter(pieces))).await;
            let seen: Vec<_> = output
                .map(|piece| piece.expect("no error").1)
                .collect()
                .await;
            assert_eq!(seen.concat(), shown.as_bytes());
        }
    }
}
