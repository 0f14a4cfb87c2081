//! `session shell`: connects the local terminal to a terminal in the sandbox.

use std::{
    io::{stdin, stdout},
    process::ExitCode,
    time::Duration,
};

use cynode_api::{ErrorCode, SessionId};
use cynode_client::{Pty, PtyMessage, PtyOpen, SessionClient};
use rustix::termios::{Termios, tcgetwinsize};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep_until},
};

use super::exit_code;
use crate::{
    cli::Shell,
    failure::{Failure, INTERNAL, UNREACHABLE},
    output,
    terminal::TerminalMode,
};

pub async fn run(client: &SessionClient, id: SessionId, args: Shell) -> Result<ExitCode, Failure> {
    let (cols, rows) = size();
    let mut pty = client
        .open_pty(
            id,
            &PtyOpen {
                cols,
                rows,
                argv: args.command,
            },
        )
        .await?;
    let raw = TerminalMode::change(Termios::make_raw)?;
    let end = relay(&mut pty).await;
    drop(raw);
    // The server may have closed the connection first.
    drop(pty.close().await);
    match end? {
        TerminalEnd::Exit { code, signal } => exit_code(code, signal.as_deref()).ok_or_else(|| {
            Failure::new(
                INTERNAL,
                "exec_lost",
                "the exit status of the shell is unknown: its sandbox is gone",
            )
        }),
        TerminalEnd::Refused { code, detail } => {
            let exit = if code == ErrorCode::ShuttingDown.as_str() {
                UNREACHABLE
            } else {
                INTERNAL
            };
            Err(Failure::new(exit, &code, detail))
        }
        TerminalEnd::Closed => Err(Failure::new(
            UNREACHABLE,
            "unreachable",
            "the server closed the connection to the terminal",
        )
        .remedy("See 'cynode session show'.")),
        TerminalEnd::Signalled(number) => {
            output::message("cynode: disconnected from the terminal");
            Ok(ExitCode::from(128 + number))
        }
    }
}

enum TerminalEnd {
    Exit {
        code: Option<i32>,
        signal: Option<String>,
    },
    Refused {
        code: String,
        detail: String,
    },
    Closed,
    /// This process received a signal.
    Signalled(u8),
}

async fn relay(pty: &mut Pty) -> Result<TerminalEnd, Failure> {
    let mut input = tokio::io::stdin();
    let mut output = tokio::io::stdout();
    let mut resized = signal(SignalKind::window_change())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut buffer = vec![0; 16 * 1024];
    let mut open = true;
    let mut end_of_input = None;
    loop {
        tokio::select! {
            message = pty.next() => match message? {
                Some(PtyMessage::Data(data)) => {
                    output.write_all(&data).await?;
                    output.flush().await?;
                }
                Some(PtyMessage::Ready) => {}
                Some(PtyMessage::Exit { exit_code: code, signal }) => {
                    return Ok(TerminalEnd::Exit { code, signal });
                }
                Some(PtyMessage::Error { code, detail }) => {
                    return Ok(TerminalEnd::Refused { code, detail });
                }
                None => return Ok(TerminalEnd::Closed),
            },
            count = input.read(&mut buffer), if open => match count.unwrap_or(0) {
                // The end of a pipe becomes Ctrl-D, the end of input of a terminal.
                0 => {
                    open = false;
                    end_of_input = Some(Instant::now() + END_OF_INPUT_DELAY);
                }
                count => pty.write(buffer[..count].to_vec()).await?,
            },
            () = sleep_until(end_of_input.unwrap_or_else(Instant::now)),
                if end_of_input.is_some() =>
            {
                end_of_input = None;
                pty.write(vec![0x04]).await?;
            }
            _ = resized.recv() => {
                let (cols, rows) = size();
                pty.resize(cols, rows).await?;
            }
            _ = terminate.recv() => return Ok(TerminalEnd::Signalled(15)),
            _ = hangup.recv() => return Ok(TerminalEnd::Signalled(1)),
            // In raw mode Ctrl-C is input; this signal came from `kill`, or stdin is not a
            // terminal.
            _ = interrupt.recv() => return Ok(TerminalEnd::Signalled(2)),
        }
    }
}

/// Podman drops the last output of a program that receives input while it exits. The delay lets a
/// program that reads no input exit first.
const END_OF_INPUT_DELAY: Duration = Duration::from_millis(200);

/// The largest terminal that the API accepts.
const MAX_SIZE: u16 = 1_000;

/// Columns and rows of the local terminal.
fn size() -> (u16, u16) {
    match tcgetwinsize(stdout()).or_else(|_| tcgetwinsize(stdin())) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            (size.ws_col.min(MAX_SIZE), size.ws_row.min(MAX_SIZE))
        }
        _ => (80, 24),
    }
}
