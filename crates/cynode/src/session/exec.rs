//! `session exec`: runs a command and ends as it ends.
//!
//! The exec's id is chosen here, so that a request whose answer was lost can be repeated: the same id with the same body
//! attaches. When the connection breaks (the worker restarts), the stream goes on from the last piece that was printed.

use std::{process::ExitCode, time::Duration};

use bytes::{Bytes, BytesMut};
use cynode_api::{
    API_VERSION, Base64Bytes, ErrorCode, ExecExit, ExecId, ExecRequest, SessionId, SignalName,
    SignalScope, Stream, exec_limits,
};
use cynode_client::{Error, ExecEvent, ExecEvents, WorkerClient};
use futures_util::{StreamExt as _, stream};
use tokio::{
    io::AsyncReadExt,
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep},
};

use super::{exit_code, input::InputFile, stdio};
use crate::{
    cli::{Exec, Format, Globals},
    failure::{Failure, INTERNAL},
    output,
};

const DEFAULT_TIMEOUT: Duration = Duration::from_mins(10);
/// How long a broken connection is tried again.
const PATIENCE: Duration = Duration::from_mins(1);
const TIMED_OUT: u8 = 124;
const STDIN_PIECE: usize = 64 * 1024;

pub async fn run(
    client: &WorkerClient,
    globals: &Globals,
    args: Exec,
) -> Result<ExitCode, Failure> {
    let request = request(&args)?;
    if args.detach {
        let accepted = client.exec_background(args.id, &request).await?;
        match globals.output {
            Format::Json => output::json(&accepted)?,
            Format::Table => output::line(&accepted.exec_id.to_string())?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let running = Running {
        client: client.clone(),
        session: args.id,
        exec: request.exec_id.unwrap_or_else(ExecId::generate),
    };
    let signals = tokio::spawn(forward_signals(running.clone()));
    // A file goes with the request, in one call; what comes slowly is passed on as it comes.
    let input = if args.stdin {
        InputFile::of_stdin()?
    } else {
        None
    };
    let request = ExecRequest {
        stdin_open: request.stdin_open && input.is_none(),
        ..request
    };
    let result = match globals.output {
        Format::Json => whole(&running, request, input.as_ref(), args.stdin).await,
        Format::Table => streamed(&running, &request, input.as_ref(), args.raw).await,
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

/// A command that we wait for.
#[derive(Clone, Debug)]
struct Running {
    client: WorkerClient,
    session: SessionId,
    exec: ExecId,
}

impl Running {
    async fn signal(&self, signal: SignalName, scope: SignalScope) {
        match self
            .client
            .signal_exec(self.session, self.exec, signal, scope)
            .await
        {
            Ok(()) => {}
            // Ended meanwhile, or not begun.
            Err(error) if error.is(ErrorCode::ExecEnded) || error.is(ErrorCode::ExecNotFound) => {}
            Err(error) => output::note(&format!(
                "cynode: the signal was not delivered: {}",
                error.chain()
            )),
        }
    }
}

/// The whole result as one JSON object.
async fn whole(
    running: &Running,
    mut request: ExecRequest,
    input: Option<&InputFile>,
    stdin: bool,
) -> Result<ExitCode, Failure> {
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
                .exec_with_input(running.session, &request, rest_of_stdin(data))
                .await
        }
    } else {
        running.client.exec(running.session, &request).await
    };
    let result = result?;
    output::json(&result)?;
    ended(&result.exit)
}

/// Standard input of which the beginning was read.
fn rest_of_stdin(
    begin: Vec<u8>,
) -> impl futures_util::Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    let rest = stream::try_unfold(tokio::io::stdin(), async |mut stdin| {
        let mut piece = BytesMut::with_capacity(STDIN_PIECE);
        Ok((stdin.read_buf(&mut piece).await? > 0).then(|| (piece.freeze(), stdin)))
    });
    stream::iter([Ok(Bytes::from(begin))]).chain(rest)
}

/// Starts the command, or attaches to it when it has started.
async fn start(
    running: &Running,
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

/// The output as it comes.
async fn streamed(
    running: &Running,
    request: &ExecRequest,
    input_file: Option<&InputFile>,
    raw: bool,
) -> Result<ExitCode, Failure> {
    let mut stdout = stdio::stdout(raw);
    let mut stderr = stdio::stderr(raw);
    let mut events = match start(running, request, input_file).await {
        Ok(events) => events,
        // It may have arrived.
        Err(
            error @ Error::Unreachable {
                never_sent: false, ..
            },
        ) => reconnect(running, (request, input_file), None, error).await?,
        Err(error) => return Err(error.into()),
    };
    let mut started = false;
    let mut input = None;
    let exit = loop {
        let event = match events.next().await {
            Ok(Some(event)) => event,
            Ok(None) => return Err(Failure::internal("the stream ended without an exit")),
            Err(error) if error.is_passing() => {
                events = reconnect(
                    running,
                    (request, input_file),
                    started.then_some(events.last_seq()),
                    error,
                )
                .await?;
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
                note_gap(lost_before_seq);
                Ok(())
            }
            ExecEvent::Output {
                stream,
                data,
                lost_before_seq,
                ..
            } => {
                note_gap(lost_before_seq);
                match stream {
                    Stream::Stdout => stdout.write(&data).await,
                    Stream::Stderr => stderr.write(&data).await,
                }
            }
            ExecEvent::Exit(exit) => break exit,
        };
        if let Err(error) = written {
            // Nobody reads any more: the command learns it as it would from a pipe.
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
    ended(&exit)
}

fn note_gap(lost_before_seq: Option<u64>) {
    if lost_before_seq.is_some() {
        output::note("cynode: some output is no longer kept and is missing here");
    }
}

/// The stream again: from after `last_seq` when the command is known to run, else by the same request with the same id,
/// which attaches when it has arrived and starts it when it has not.
async fn reconnect(
    running: &Running,
    (request, input): (&ExecRequest, Option<&InputFile>),
    last_seq: Option<u64>,
    mut error: Error,
) -> Result<ExecEvents, Failure> {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = Duration::from_millis(200);
    while error.is_passing() && Instant::now() + pause < deadline {
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
        let stream = match last_seq {
            Some(last_seq) => {
                running
                    .client
                    .exec_output_stream(running.session, running.exec, last_seq)
                    .await
            }
            None => start(running, request, input).await,
        };
        error = match stream {
            Ok(events) => return Ok(events),
            Err(error) => error,
        };
    }
    Err(error.into())
}

fn ended(exit: &ExecExit) -> Result<ExitCode, Failure> {
    if exit.oom_killed {
        output::note(
            "cynode: the sandbox ran out of memory and the command was killed; give the session more with --memory",
        );
    }
    if exit.no_space {
        output::note(
            "cynode: the node's disk is nearly full and the sandbox was filling it, so its commands were killed; its files are there",
        );
    }
    if exit.timed_out {
        output::note(&format!(
            "cynode: the command was ended at its deadline, after {} ms",
            exit.duration_ms
        ));
        return Ok(ExitCode::from(TIMED_OUT));
    }
    exit_code(exit.exit_code, exit.signal.as_deref())
        .filter(|_| !exit.lost)
        .ok_or_else(|| Failure::new(INTERNAL, "exec_lost", "the command's end was not seen: its sandbox or the process that watched it went away"))
}

async fn forward_stdin(running: Running) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; STDIN_PIECE];
    loop {
        // A stdin that can't be read is at its end.
        let count = stdin.read(&mut buffer).await.unwrap_or(0);
        if let Err(error) = write_stdin(&running, &buffer[..count]).await {
            if !error.is(ErrorCode::StdinClosed) && !error.is(ErrorCode::ExecEnded) {
                output::note(&format!(
                    "cynode: standard input is no longer forwarded: {}",
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

/// Tries again only what surely did not arrive: a repeated piece would be read twice.
async fn write_stdin(running: &Running, data: &[u8]) -> Result<(), Error> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match running
            .client
            .write_stdin(
                running.session,
                running.exec,
                data.to_vec(),
                data.is_empty(),
            )
            .await
        {
            Err(Error::Unreachable {
                never_sent: true, ..
            }) if Instant::now() < deadline => sleep(Duration::from_millis(300)).await,
            result => return result,
        }
    }
}

/// The first Ctrl-C interrupts, the second ends all that the command started, the third kills it.
async fn forward_signals(running: Running) {
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
                    .await
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
            timed_out: false,
            oom_killed: false,
            bytes: cynode_api::Bytes::default(),
            sha256: None,
            duration_ms: 1,
            via: ExecVia::Agent,
            lost: false,
            no_space: false,
        }
    }

    fn ends_with(exit: &ExecExit, number: u8) -> bool {
        ended(exit).is_ok_and(|code| code == ExitCode::from(number))
    }

    #[test]
    fn we_end_as_the_command_ended() {
        assert!(ends_with(&exit(Some(0), None), 0));
        assert!(ends_with(&exit(Some(42), None), 42));
        assert!(ends_with(&exit(None, Some("KILL")), 137));
        assert!(ends_with(&exit(None, Some("TERM")), 143));
        assert!(ends_with(
            &ExecExit {
                timed_out: true,
                ..exit(None, Some("KILL"))
            },
            124
        ));
        assert!(ended(&exit(None, None)).is_err());
        assert!(
            ended(&ExecExit {
                lost: true,
                ..exit(Some(0), None)
            })
            .is_err()
        );
    }
}
