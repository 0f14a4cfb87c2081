//! `session exec`: runs a command and exits with its exit code.
//!
//! The client chooses the exec's id, so that a request whose response was lost can be repeated: the
//! same id with the same body attaches. If the connection breaks (such as when the worker
//! restarts), the stream resumes after the last printed piece.

use std::{process::ExitCode, time::Duration};

use backon::{ConstantBuilder, Retryable as _};
use bytes::{Bytes, BytesMut};
use cynode_api::{
    API_VERSION, Base64Bytes, ErrorCode, ExecExit, ExecId, ExecRequest, ExecResult, SessionId,
    SignalName, SignalScope, Stream, exec_limits,
};
use cynode_client::{Error, ExecEvent, ExecEvents, SessionClient};
use futures_util::{StreamExt as _, stream};
use tokio::{
    io::AsyncReadExt,
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep},
};

use super::{exit_code, input::InputFile, stdio};
use crate::{
    cli::{Exec, Globals, OutputFormat},
    failure::{Failure, INTERNAL},
    output, retry,
};

const DEFAULT_TIMEOUT: Duration = Duration::from_mins(10);
/// How long to retry after the connection breaks.
const RETRY_TIMEOUT: Duration = Duration::from_mins(1);
/// Before the first attempt to reconnect: a restarting worker needs a moment.
const RECONNECT_DELAY: Duration = Duration::from_millis(200);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
const STDIN_RETRY_DELAY: Duration = Duration::from_millis(300);
/// The exit code of `timeout`.
const TIMED_OUT: u8 = 124;
const STDIN_PIECE_BYTES: usize = 64 * 1024;

pub async fn run(
    client: &SessionClient,
    globals: &Globals,
    session: SessionId,
    args: Exec,
) -> Result<ExitCode, Failure> {
    let request = request(&args)?;
    if args.detach {
        let accepted = client.exec_background(session, &request).await?;
        match globals.output {
            OutputFormat::Json => output::json(&accepted)?,
            OutputFormat::Table => output::line(&accepted.exec_id.to_string())?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let ended = run_request(client, globals, session, &args, request).await?;
    if let EndedExec::Buffered(result) = &ended {
        output::json(result)?;
    }
    exit_result(ended.exit())
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) enum EndedExec {
    /// The output was printed as it arrived.
    Printed(ExecExit),
    /// The output was collected.
    Buffered(Box<ExecResult>),
}

impl EndedExec {
    pub(crate) fn exit(&self) -> &ExecExit {
        match self {
            Self::Printed(exit) => exit,
            Self::Buffered(result) => &result.exit,
        }
    }
}

/// Runs a command in the foreground. Forwards signals to it, and prints its output unless the
/// format is JSON.
pub(crate) async fn run_to_end(
    client: &SessionClient,
    globals: &Globals,
    session: SessionId,
    args: &Exec,
) -> Result<EndedExec, Failure> {
    run_request(client, globals, session, args, request(args)?).await
}

async fn run_request(
    client: &SessionClient,
    globals: &Globals,
    session: SessionId,
    args: &Exec,
    request: ExecRequest,
) -> Result<EndedExec, Failure> {
    let running = RunningExec {
        client: client.clone(),
        session,
        exec: request.exec_id.unwrap_or_else(ExecId::generate),
    };
    let signals = tokio::spawn(forward_signals(running.clone()));
    // A file is sent with the request; other input is forwarded as it arrives.
    let input = if args.stdin {
        InputFile::from_stdin()?
    } else {
        None
    };
    let request = ExecRequest {
        stdin_open: request.stdin_open && input.is_none(),
        ..request
    };
    let result = match globals.output {
        OutputFormat::Json => run_buffered(&running, request, input.as_ref(), args.stdin)
            .await
            .map(|result| EndedExec::Buffered(Box::new(result))),
        OutputFormat::Table => run_streamed(&running, &request, input.as_ref(), args.raw)
            .await
            .map(EndedExec::Printed),
    };
    signals.abort();
    result
}

fn request(args: &Exec) -> Result<ExecRequest, Failure> {
    let timeout = match (args.timeout, args.detach) {
        (Some(timeout), _) => timeout,
        (None, true) => Duration::ZERO,
        (None, false) => DEFAULT_TIMEOUT,
    };
    let timeout_ms = u64::try_from(timeout.as_millis())
        .ok()
        .filter(|ms| *ms <= exec_limits::MAX_TIMEOUT_MS);
    Ok(ExecRequest {
        version: Some(API_VERSION),
        argv: args.command.clone(),
        cwd: args.cwd.clone(),
        env: args.env.iter().cloned().collect(),
        timeout_ms: timeout_ms.ok_or_else(|| {
            Failure::usage(format!(
                "--timeout can be at most {} h",
                exec_limits::MAX_TIMEOUT_MS / 3_600_000
            ))
        })?,
        stdin_open: args.stdin,
        background: args.detach,
        exec_id: Some(ExecId::generate()),
        ..ExecRequest::default()
    })
}

/// A command in progress.
#[derive(Clone, Debug)]
pub(super) struct RunningExec {
    pub(super) client: SessionClient,
    pub(super) session: SessionId,
    pub(super) exec: ExecId,
}

impl RunningExec {
    async fn signal(&self, signal: SignalName, scope: SignalScope) {
        match self
            .client
            .signal_exec(self.session, self.exec, signal, scope)
            .await
        {
            Ok(()) => {}
            // The command has ended, or has not started.
            Err(error) if error.is(ErrorCode::ExecEnded) || error.is(ErrorCode::ExecNotFound) => {}
            Err(error) => output::message(&format!(
                "cynode: the signal was not delivered: {}",
                error.chain()
            )),
        }
    }
}

/// Waits for the end of the command and for all of its output.
async fn run_buffered(
    running: &RunningExec,
    mut request: ExecRequest,
    input: Option<&InputFile>,
    stdin: bool,
) -> Result<ExecResult, Failure> {
    let result = if let Some(input) = input {
        running
            .client
            .exec_with_input(running.session, &request, input.stream()?)
            .await
    } else if stdin {
        request.stdin_open = false;
        let mut data = Vec::new();
        tokio::io::stdin()
            .take(exec_limits::MAX_STDIN_BYTES as u64 + 1)
            .read_to_end(&mut data)
            .await?;
        if data.len() <= exec_limits::MAX_STDIN_BYTES {
            request.stdin_b64 = Some(Base64Bytes(data));
            running.client.exec(running.session, &request).await
        } else {
            running
                .client
                .exec_with_input(running.session, &request, stdin_after(data))
                .await
        }
    } else {
        running.client.exec(running.session, &request).await
    };
    Ok(result?)
}

/// The remaining standard input, preceded by the part that was already read.
fn stdin_after(
    start: Vec<u8>,
) -> impl futures_util::Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    let rest = stream::try_unfold(tokio::io::stdin(), async |mut stdin| {
        let mut piece = BytesMut::with_capacity(STDIN_PIECE_BYTES);
        Ok((stdin.read_buf(&mut piece).await? > 0).then(|| (piece.freeze(), stdin)))
    });
    stream::iter([Ok(Bytes::from(start))]).chain(rest)
}

/// Starts the command, or attaches if it has started.
async fn start(
    running: &RunningExec,
    request: &ExecRequest,
    input: Option<&InputFile>,
) -> Result<ExecEvents, Error> {
    match input.map(InputFile::stream) {
        None => running.client.exec_stream(running.session, request).await,
        Some(Ok(input)) => {
            running
                .client
                .exec_stream_with_input(running.session, request, input)
                .await
        }
        Some(Err(error)) => Err(Error::Setup(format!("can't read standard input: {error}"))),
    }
}

/// Prints the output as it arrives.
async fn run_streamed(
    running: &RunningExec,
    request: &ExecRequest,
    input_file: Option<&InputFile>,
    raw: bool,
) -> Result<ExecExit, Failure> {
    let mut stdout = stdio::stdout(raw);
    let mut stderr = stdio::stderr(raw);
    let mut events = match start(running, request, input_file).await {
        Ok(events) => events,
        // The request may have arrived.
        Err(Error::Unreachable {
            never_sent: false, ..
        }) => reconnect(running, request, input_file, None).await?,
        Err(error) => return Err(error.into()),
    };
    let mut started = false;
    let mut input = None;
    let exit = loop {
        let event = match events.next().await {
            Ok(Some(event)) => event,
            Ok(None) => return Err(Failure::internal("the stream ended without an exit status")),
            Err(error) if error.is_transient() => {
                let last_seq = started.then_some(events.last_seq());
                events = reconnect(running, request, input_file, last_seq).await?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        started = true;
        if request.stdin_open && input.is_none() {
            input = Some(tokio::spawn(forward_stdin(running.clone())));
        }
        let written = match event {
            ExecEvent::Start {
                lost_before_seq, ..
            } => {
                print_gap(lost_before_seq);
                Ok(())
            }
            ExecEvent::Output {
                stream,
                data,
                lost_before_seq,
                ..
            } => {
                print_gap(lost_before_seq);
                match stream {
                    Stream::Stdout => stdout.write(&data).await,
                    Stream::Stderr => stderr.write(&data).await,
                }
            }
            ExecEvent::Exit(exit) => break exit,
        };
        if let Err(error) = written {
            // Our reader is gone: signal the command as a closed pipe would.
            running
                .signal(
                    "PIPE".parse().unwrap_or(SignalName::TERM),
                    SignalScope::Group,
                )
                .await;
            return Err(error.into());
        }
    };
    if let Some(input) = input {
        input.abort();
    }
    stdout.finish().await?;
    stderr.finish().await?;
    Ok(exit)
}

pub(super) fn print_gap(lost_before_seq: Option<u64>) {
    if lost_before_seq.is_some() {
        output::message("cynode: some output is missing: it is no longer stored");
    }
}

/// Reopens the stream: after `last_seq` if the command is known to run, else by repeating the
/// request. A request with the same id attaches if it arrived before, and starts the command if
/// not.
pub(super) async fn reconnect(
    running: &RunningExec,
    request: &ExecRequest,
    input: Option<&InputFile>,
    last_seq: Option<u64>,
) -> Result<ExecEvents, Failure> {
    let deadline = Instant::now() + RETRY_TIMEOUT;
    let open = async || match last_seq {
        Some(last_seq) => {
            running
                .client
                .exec_output_stream(running.session, running.exec, last_seq)
                .await
        }
        None => start(running, request, input).await,
    };
    sleep(RECONNECT_DELAY).await;
    Ok(open
        .retry(retry::backoff(MAX_RETRY_DELAY))
        .when(|error| error.is_transient() && Instant::now() < deadline)
        .await?)
}

pub(crate) fn exit_result(exit: &ExecExit) -> Result<ExitCode, Failure> {
    if exit.oom_killed {
        output::message(
            "cynode: the sandbox ran out of memory and the command was killed; create the session \
             with more --memory",
        );
    }
    if exit.no_space {
        output::message(
            "cynode: the node's disk is nearly full, so the commands of the sandbox were killed; \
             its files are intact",
        );
    }
    if exit.timed_out {
        output::message(&format!(
            "cynode: the command timed out after {} ms",
            exit.duration_ms
        ));
        return Ok(ExitCode::from(TIMED_OUT));
    }
    exit_code(exit.exit_code, exit.signal.as_deref())
        .filter(|_| !exit.lost)
        .ok_or_else(|| {
            Failure::new(
                INTERNAL,
                "exec_lost",
                "the exit status of the command is unknown: its sandbox or its monitor is gone",
            )
        })
}

pub(super) async fn forward_stdin(running: RunningExec) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; STDIN_PIECE_BYTES];
    loop {
        // Treat a read error as the end of input.
        let count = stdin.read(&mut buffer).await.unwrap_or(0);
        if let Err(error) = write_stdin(&running, &buffer[..count]).await {
            if !error.is(ErrorCode::StdinClosed) && !error.is(ErrorCode::ExecEnded) {
                output::message(&format!(
                    "cynode: stopped forwarding standard input: {}",
                    error.chain()
                ));
            }
            return;
        }
        if count == 0 {
            return;
        }
    }
}

/// Retries only writes that did not arrive: the command would read a repeated piece twice.
async fn write_stdin(running: &RunningExec, data: &[u8]) -> Result<(), Error> {
    let deadline = Instant::now() + RETRY_TIMEOUT;
    let write = async || {
        running
            .client
            .write_stdin(
                running.session,
                running.exec,
                data.to_vec(),
                data.is_empty(),
            )
            .await
    };
    write
        .retry(
            ConstantBuilder::new()
                .with_delay(STDIN_RETRY_DELAY)
                .without_max_times(),
        )
        .when(|error| {
            let never_sent = matches!(
                error,
                Error::Unreachable {
                    never_sent: true,
                    ..
                }
            );
            never_sent && Instant::now() < deadline
        })
        .await
}

/// The first Ctrl-C interrupts the command, the second terminates its process tree, the third kills
/// it.
pub(super) async fn forward_signals(running: RunningExec) {
    let (Ok(mut interrupt), Ok(mut terminate)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
    ) else {
        return;
    };
    let mut interrupts = 0;
    loop {
        tokio::select! {
            _ = interrupt.recv() => interrupts += 1,
            _ = terminate.recv() => interrupts = interrupts.max(1) + 1,
        }
        match interrupts {
            1 => {
                running
                    .signal(
                        "INT".parse().unwrap_or(SignalName::TERM),
                        SignalScope::Group,
                    )
                    .await;
            }
            2 => running.signal(SignalName::TERM, SignalScope::Tree).await,
            _ => running.signal(SignalName::KILL, SignalScope::Tree).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::ExecVia;

    use super::*;

    fn exit(exit_code: Option<i32>, signal: Option<&str>) -> ExecExit {
        ExecExit {
            exit_code,
            signal: signal.map(Into::into),
            duration_ms: 1,
            ..ExecExit::never_ran(ExecVia::Agent)
        }
    }

    fn exits_with(exit: &ExecExit, number: u8) -> bool {
        exit_result(exit).is_ok_and(|code| code == ExitCode::from(number))
    }

    #[test]
    fn the_exit_code_is_that_of_the_command() {
        assert!(exits_with(&exit(Some(0), None), 0));
        assert!(exits_with(&exit(Some(42), None), 42));
        assert!(exits_with(&exit(None, Some("KILL")), 137));
        assert!(exits_with(&exit(None, Some("TERM")), 143));
        assert!(exits_with(
            &ExecExit {
                timed_out: true,
                ..exit(None, Some("KILL"))
            },
            124
        ));
        assert!(exit_result(&exit(None, None)).is_err());
        assert!(
            exit_result(&ExecExit {
                lost: true,
                ..exit(Some(0), None)
            })
            .is_err()
        );
    }
}
