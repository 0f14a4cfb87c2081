//! `session shell`: a terminal in the sandbox on our own terminal.

use std::{
    io::{self, IsTerminal, stdin, stdout},
    process::ExitCode,
    time::Duration,
};

use cynode_api::ErrorCode;
use cynode_client::{Pty, PtyMessage, PtyOpen, WorkerClient};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    signal::unix::{SignalKind, signal},
};

use super::exit_code;
use crate::{
    cli::Shell,
    failure::{Failure, INTERNAL, UNREACHABLE},
    output,
};

/// Raw mode for as long as this lives; restored on every way out, a panic included.
#[derive(Debug)]
struct RawMode(Termios);

impl RawMode {
    /// `None` when stdin is no terminal: then bytes are passed as they come.
    fn enter() -> io::Result<Option<Self>> {
        if !stdin().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Drain, &raw)?;
        Ok(Some(Self(before)))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // There is nothing to be done about a terminal that is gone.
        tcsetattr(stdin(), OptionalActions::Flush, &self.0).ok();
    }
}

pub async fn run(client: &WorkerClient, args: Shell) -> Result<ExitCode, Failure> {
    let (cols, rows) = size();
    let mut pty = client
        .open_pty(
            args.id,
            &PtyOpen {
                cols,
                rows,
                argv: args.command,
            },
        )
        .await?;
    let raw = RawMode::enter()?;
    let outcome = connect(&mut pty).await;
    drop(raw);
    // The sandbox's side may have closed first.
    drop(pty.close().await);
    match outcome? {
        Outcome::Exit { code, signal } => exit_code(code, signal.as_deref()).ok_or_else(|| {
            Failure::new(
                INTERNAL,
                "exec_lost",
                "the shell's end was not seen: its sandbox went away",
            )
        }),
        Outcome::Refused { code, detail } => {
            let exit = if code == ErrorCode::ShuttingDown.as_str() {
                UNREACHABLE
            } else {
                INTERNAL
            };
            Err(Failure::new(exit, &code, detail))
        }
        Outcome::Closed => Err(Failure::new(
            UNREACHABLE,
            "unreachable",
            "the connection to the terminal was closed",
        )
        .remedy("See 'cynode session show'.")),
        Outcome::Signalled(number) => {
            output::note("cynode: left the terminal");
            Ok(ExitCode::from(128 + number))
        }
    }
}

enum Outcome {
    Exit {
        code: Option<i32>,
        signal: Option<String>,
    },
    Refused {
        code: String,
        detail: String,
    },
    Closed,
    /// We were told to end.
    Signalled(u8),
}

async fn connect(pty: &mut Pty) -> Result<Outcome, Failure> {
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
                Some(PtyMessage::Exit { exit_code: code, signal }) => return Ok(Outcome::Exit { code, signal }),
                Some(PtyMessage::Error { code, detail }) => return Ok(Outcome::Refused { code, detail }),
                None => return Ok(Outcome::Closed),
            },
            count = input.read(&mut buffer), if open => match count.unwrap_or(0) {
                // The end of a pipe is the end of input, which a terminal says with Ctrl-D.
                0 => {
                    open = false;
                    end_of_input = Some(tokio::time::Instant::now() + END_OF_INPUT);
                }
                count => pty.write(buffer[..count].to_vec()).await?,
            },
            () = tokio::time::sleep_until(end_of_input.unwrap_or_else(tokio::time::Instant::now)), if end_of_input.is_some() => {
                end_of_input = None;
                pty.write(vec![0x04]).await?;
            }
            _ = resized.recv() => {
                let (cols, rows) = size();
                pty.resize(cols, rows).await?;
            }
            _ = terminate.recv() => return Ok(Outcome::Signalled(15)),
            _ = hangup.recv() => return Ok(Outcome::Signalled(1)),
            // In raw mode Ctrl-C is a byte like any other; this one came by kill, or stdin is no terminal.
            _ = interrupt.recv() => return Ok(Outcome::Signalled(2)),
        }
    }
}

/// Podman drops what a program said last when input comes for it in the moment of its end. One that takes no input is given time
/// to end without any.
const END_OF_INPUT: Duration = Duration::from_millis(200);

/// What the API takes.
const MAX_SIZE: u16 = 1_000;

/// Columns and rows of our terminal.
fn size() -> (u16, u16) {
    match tcgetwinsize(stdout()).or_else(|_| tcgetwinsize(stdin())) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            (size.ws_col.min(MAX_SIZE), size.ws_row.min(MAX_SIZE))
        }
        _ => (80, 24),
    }
}
