//! `session logs` and `session attach`: read the output of a command that another call started.

use std::process::ExitCode;

use cynode_api::{Chunk, Exec, ExecExit, ExecId, ExecRequest, ExecState, SessionId, Stream};
use cynode_client::{ExecEvent, OutputQuery, SessionClient};

use super::{
    exec::{RunningExec, exit_result, forward_signals, forward_stdin, print_gap, reconnect},
    stdio,
};
use crate::{
    cli::{Attach, Globals, Logs, OutputFormat},
    commands::short_id,
    failure::{Failure, USAGE},
    output, resolve,
};

/// The output before the attachment that is printed: enough to see where the command stands.
const TAIL_BYTES: u64 = 16 * 1024;

pub async fn logs(
    client: &SessionClient,
    globals: &Globals,
    args: Logs,
) -> Result<ExitCode, Failure> {
    let (session, exec) = target(client, args.session, args.exec).await?;
    let exec = match exec.as_deref() {
        Some(text) => find(client, session, text).await?,
        None => client
            .newest_exec(session)
            .await?
            .map(|exec| exec.exec_id)
            .ok_or_else(|| no_exec("no command has run in this session"))?,
    };
    if globals.output == OutputFormat::Json {
        let query = OutputQuery::default();
        output::json(&client.exec_output(session, exec, &query).await?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let running = RunningExec {
        client: client.clone(),
        session,
        exec,
    };
    let mut printer = Printer::new(args.raw);
    if args.follow {
        printer.follow(&running).await?;
    } else {
        printer
            .print_stored(&running, OutputQuery::default())
            .await?;
    }
    printer.finish().await?;
    Ok(ExitCode::SUCCESS)
}

pub async fn attach(
    client: &SessionClient,
    globals: &Globals,
    args: Attach,
) -> Result<ExitCode, Failure> {
    let (session, exec) = target(client, args.session, args.exec).await?;
    let exec = match exec.as_deref() {
        Some(text) => find(client, session, text).await?,
        None => newest_running(client, session).await?,
    };
    let running = RunningExec {
        client: client.clone(),
        session,
        exec,
    };
    let mut printer = Printer::new(args.raw);
    let tail = OutputQuery {
        tail_bytes: Some(TAIL_BYTES),
        ..OutputQuery::default()
    };
    let exit = if let Some(exit) = printer.print_stored(&running, tail).await? {
        exit
    } else {
        let signals = tokio::spawn(forward_signals(running.clone()));
        let input = (!args.no_stdin).then(|| tokio::spawn(forward_stdin(running.clone())));
        let exit = printer.follow(&running).await;
        signals.abort();
        if let Some(input) = input {
            input.abort();
        }
        exit?
    };
    printer.finish().await?;
    if globals.output == OutputFormat::Json {
        // The output went to stdout already.
        output::message(&serde_json::to_string(&exit).unwrap_or_default());
    }
    exit_result(&exit)
}

/// The session and the exec that a command names. A single name that is no session may be an exec of
/// the session of this directory: `exec --detach` prints its id alone.
pub(super) async fn target(
    client: &SessionClient,
    session: Option<String>,
    exec: Option<String>,
) -> Result<(SessionId, Option<String>), Failure> {
    let name = match (session, exec) {
        (Some(name), None) => name,
        (session, exec) => {
            let session = super::target(client, session.as_deref()).await?;
            return Ok((session, exec));
        }
    };
    // A complete id names a session or an exec without a look at either.
    let is_complete = name.parse::<SessionId>().is_ok();
    let named = super::target(client, Some(&name)).await;
    if named.is_ok() && !is_complete {
        return named.map(|id| (id, None));
    }
    if let Some(part) = resolve::id_part(&name)
        && let Ok(here) = super::target(client, None).await
        && let Ok(execs) = client.all_execs(here).await
        && execs
            .iter()
            .any(|exec| exec.exec_id.to_string().contains(&part))
    {
        return Ok((here, Some(name)));
    }
    named.map(|id| (id, None))
}

/// An exec of the session, by its id or a part of it.
pub(super) async fn find(
    client: &SessionClient,
    session: SessionId,
    text: &str,
) -> Result<ExecId, Failure> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let part = resolve::id_part(text);
    let found: Vec<Exec> = client
        .all_execs(session)
        .await?
        .into_iter()
        .filter(|exec| {
            part.as_ref()
                .is_some_and(|part| exec.exec_id.to_string().contains(part))
        })
        .collect();
    match &found[..] {
        [exec] => Ok(exec.exec_id),
        [] => Err(no_exec(&format!("the session has no exec '{text}'"))),
        execs => {
            let candidates: Vec<String> = execs
                .iter()
                .rev()
                .take(10)
                .map(|exec| {
                    let program = exec.argv.first().map_or("", String::as_str);
                    format!("{program} ({})", short_id(&exec.exec_id.to_string()))
                })
                .collect();
            Err(Failure::new(
                USAGE,
                "ambiguous",
                format!(
                    "'{text}' fits {} execs: {}",
                    execs.len(),
                    candidates.join(", ")
                ),
            )
            .remedy("Write more digits of the id."))
        }
    }
}

/// The newest command that runs.
pub(super) async fn newest_running(
    client: &SessionClient,
    session: SessionId,
) -> Result<ExecId, Failure> {
    let execs = client.all_execs(session).await?;
    execs
        .iter()
        .rev()
        .find(|exec| exec.state == ExecState::Running)
        .map(|exec| exec.exec_id)
        .ok_or_else(|| no_exec("no command runs in this session"))
}

fn no_exec(message: &str) -> Failure {
    Failure::new(USAGE, "exec_not_found", message)
        .remedy("Start one with 'cynode session exec --detach'; 'session logs' shows ended ones.")
}

/// Prints the output of one exec.
struct Printer {
    stdout: stdio::Sink<tokio::io::Stdout>,
    stderr: stdio::Sink<tokio::io::Stderr>,
    last_seq: u64,
}

impl Printer {
    fn new(raw: bool) -> Self {
        Self {
            stdout: stdio::stdout(raw),
            stderr: stdio::stderr(raw),
            last_seq: 0,
        }
    }

    async fn write(&mut self, stream: Stream, data: &[u8]) -> Result<(), Failure> {
        match stream {
            Stream::Stdout => self.stdout.write(data).await?,
            Stream::Stderr => self.stderr.write(data).await?,
        }
        Ok(())
    }

    /// Prints what is stored now. Returns the exit if the command has ended.
    async fn print_stored(
        &mut self,
        running: &RunningExec,
        mut query: OutputQuery,
    ) -> Result<Option<ExecExit>, Failure> {
        loop {
            let page = running
                .client
                .exec_output(running.session, running.exec, &query)
                .await?;
            if query.tail_bytes.is_none() {
                print_gap(page.lost_before_seq);
            }
            for chunk in &page.chunks {
                self.write(chunk.stream, bytes(chunk)).await?;
            }
            self.last_seq = self.last_seq.max(page.next_seq);
            if page.exit.is_some() || page.chunks.is_empty() {
                return Ok(page.exit);
            }
            query = OutputQuery {
                after_seq: Some(page.next_seq),
                ..OutputQuery::default()
            };
        }
    }

    /// Prints what comes after the last printed piece, until the command ends.
    async fn follow(&mut self, running: &RunningExec) -> Result<ExecExit, Failure> {
        let mut events = running
            .client
            .exec_output_stream(running.session, running.exec, self.last_seq)
            .await?;
        loop {
            let event = match events.next().await {
                Ok(Some(event)) => event,
                Ok(None) => {
                    return Err(Failure::internal("the stream ended without an exit status"));
                }
                Err(error) if error.is_transient() => {
                    self.last_seq = events.last_seq();
                    // An exec that is known to run is never started again.
                    let request = ExecRequest::default();
                    events = reconnect(running, &request, None, Some(self.last_seq)).await?;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            match event {
                ExecEvent::Start {
                    lost_before_seq, ..
                } => print_gap(lost_before_seq.filter(|_| self.last_seq == 0)),
                ExecEvent::Output {
                    stream,
                    data,
                    lost_before_seq,
                    ..
                } => {
                    print_gap(lost_before_seq);
                    self.write(stream, &data).await?;
                }
                ExecEvent::Exit(exit) => return Ok(exit),
            }
        }
    }

    async fn finish(&mut self) -> Result<(), Failure> {
        self.stdout.finish().await?;
        Ok(self.stderr.finish().await?)
    }
}

fn bytes(chunk: &Chunk) -> &[u8] {
    chunk.data.as_ref().map_or_else(
        || chunk.data_b64.as_ref().map_or(&[][..], |data| &data.0),
        |text| text.as_bytes(),
    )
}
