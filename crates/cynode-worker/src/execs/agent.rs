//! Runs commands through the agent in the sandbox.

use std::{sync::Arc, time::Duration};

use cynode_api::{
    ByteCounts, ErrorCode, ExecExit, ExecVia, SignalName, SignalScope,
    exec_limits::{ABANDONED_MS, DRAIN_MS, GRACE_MS},
};
use cynode_sba_proto::{ExecStart, ExecStatus, ExitReport, Frame, MAX_DATA, Reply, Request};
use cynode_service::ApiError;
use tokio::{sync::mpsc, time::Instant};

use super::{
    Exec, ExecInput, Piece, SessionExecs,
    exec::{Stdin, lost_exit},
};
use crate::{
    sandbox::{Channel, LinkError, REPLY_TIMEOUT, agent_problem, unavailable, unexpected},
    sessions::Live,
};

/// Added to an exec's own deadline before the worker stops relying on the agent.
const AGENT_DEADLINE_SLACK: Duration = Duration::from_secs(15);

/// The parts of a command that its record does not hold.
pub(crate) struct ExecCommand {
    pub(crate) argv: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) input: ExecInput,
    pub(crate) stdin_open: bool,
    /// The command is the runner of a job.
    pub(crate) is_runner: bool,
    /// An earlier worker process may have started this command before it crashed; a duplicate id
    /// from the agent then means success.
    pub(crate) may_be_running: bool,
}

/// Starts a command and returns once it runs. A task then follows it to its end, with or without
/// waiters.
pub(crate) async fn start(
    live: Arc<Live>,
    execs: Arc<SessionExecs>,
    exec: Arc<Exec>,
    command: ExecCommand,
) -> Result<(), ApiError> {
    let channel = match request_start(&live, &exec, &command).await {
        Ok(channel) => Some(channel),
        Err(error) if command.may_be_running && error.is(ErrorCode::ExecIdInUse) => None,
        Err(error) => {
            execs.void(&exec, error.clone());
            return Err(error);
        }
    };
    let stdin = open_stdin(&exec, &command);
    exec.set_started();
    if !command.input.is_empty() || (!command.stdin_open && stdin.is_some()) {
        tokio::spawn(feed(
            Arc::clone(&live),
            Arc::clone(&exec),
            command.input,
            command.stdin_open,
        ));
    }
    tokio::spawn(follow(live, execs, exec, channel, stdin));
    Ok(())
}

/// Forwards the standard input of the request.
async fn feed(live: Arc<Live>, exec: Arc<Exec>, mut input: ExecInput, stdin_open: bool) {
    loop {
        match input.next().await {
            Ok(Some(piece)) => {
                if !exec.write_stdin(Some(piece)).await {
                    return;
                }
            }
            Ok(None) => break,
            // The command would take an early end of file for the end of its input.
            Err(error) => {
                tracing::error!(
                    %error,
                    exec_id = %exec.id(),
                    "Failed to read a command's standard input; killing the command."
                );
                drop(kill_tree(&live, &exec).await);
                return;
            }
        }
    }
    if !stdin_open {
        exec.write_stdin(None).await;
    }
}

/// Asks the agent to start the command and waits for its confirmation.
async fn request_start(
    live: &Live,
    exec: &Exec,
    command: &ExecCommand,
) -> Result<Channel, ApiError> {
    let link = live.link()?;
    let request = Request::Exec(ExecStart {
        exec_id: exec.id(),
        argv: command.argv.clone(),
        cwd: exec.record.cwd.clone(),
        env: command.env.clone(),
        timeout_ms: exec.record.timeout_ms,
        grace_ms: GRACE_MS,
        drain_ms: DRAIN_MS,
        stdin: wants_stdin(command),
        runner: command.is_runner,
    });
    let mut channel = link.open(&request).await.map_err(unavailable)?;
    match channel.reply(REPLY_TIMEOUT).await? {
        Reply::Started { .. } => Ok(channel),
        other => Err(unexpected(&format!("{other:?}"))),
    }
}

fn wants_stdin(command: &ExecCommand) -> bool {
    command.stdin_open || !command.input.is_empty()
}

fn open_stdin(exec: &Exec, command: &ExecCommand) -> Option<mpsc::Receiver<Stdin>> {
    wants_stdin(command).then(|| {
        let (sender, receiver) = mpsc::channel(1);
        *exec.stdin.lock() = Some(sender);
        receiver
    })
}

/// Resumes following a session's execs after a worker restart. An exec unknown to the agent was
/// recorded but not started before the crash: it is lost, unless its owner starts it again.
pub(crate) async fn adopt(
    live: Arc<Live>,
    execs: Arc<SessionExecs>,
    will_be_restarted: bool,
) -> Result<(), ApiError> {
    let statuses: Vec<ExecStatus> = match live.link()?.call(&Request::Execs).await? {
        Reply::Execs { execs } => execs,
        other => return Err(unexpected(&format!("{other:?}"))),
    };
    for exec in execs.running() {
        if statuses.iter().any(|status| status.exec_id == exec.id()) {
            exec.set_started();
            let (sender, receiver) = mpsc::channel(1);
            *exec.stdin.lock() = Some(sender);
            tokio::spawn(follow(
                Arc::clone(&live),
                Arc::clone(&execs),
                exec,
                None,
                Some(receiver),
            ));
        } else if !will_be_restarted {
            execs.finish(&exec, lost_exit(&exec));
        }
    }
    Ok(())
}

/// Receives output and the exit, reconnecting as needed, until the exec or its sandbox is gone.
async fn follow(
    live: Arc<Live>,
    execs: Arc<SessionExecs>,
    exec: Arc<Exec>,
    mut channel: Option<Channel>,
    mut stdin: Option<mpsc::Receiver<Stdin>>,
) {
    let _activity = live.activity();
    let guard = tokio::spawn(guard(Arc::clone(&live), Arc::clone(&exec))).abort_handle();
    let exit = loop {
        let mut current = match channel.take() {
            Some(channel) => channel,
            None => match attach(&live, &exec).await {
                Ok(channel) => channel,
                Err(_) if live.is_gone() => break lost_exit(&exec),
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        match pump(&live, &exec, &mut current, &mut stdin).await {
            Ok(report) => {
                let exit = translate(&live, &exec, &report);
                // Without the acknowledgement the agent keeps the exit until it is recorded.
                while let Err(error) = execs.try_finish(&exec, exit.clone()) {
                    if live.is_gone() {
                        execs.finish(&exec, exit);
                        break;
                    }
                    tracing::error!(
                        %error,
                        exec_id = %exec.id(),
                        "Failed to record an exec's end; retrying."
                    );
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                drop(current.send(&Frame::ACK_EXIT).await);
                guard.abort();
                return;
            }
            Err(LinkError::NoSuchExec) => break lost_exit(&exec),
            Err(error) => {
                tracing::debug!(
                    exec_id = %exec.id(),
                    %error,
                    "Lost the connection of an exec; attaching again."
                );
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    guard.abort();
    execs.finish(&exec, exit);
}

async fn attach(live: &Live, exec: &Exec) -> Result<Channel, ApiError> {
    let request = Request::Attach {
        exec_id: exec.id(),
        after_seq: exec.last_seq(),
    };
    live.link()?.open(&request).await.map_err(unavailable)
}

/// Receives output and sends standard input until the exit arrives.
async fn pump(
    live: &Live,
    exec: &Exec,
    channel: &mut Channel,
    stdin: &mut Option<mpsc::Receiver<Stdin>>,
) -> Result<ExitReport, LinkError> {
    let mut writing: Option<tokio::sync::oneshot::Sender<bool>> = None;
    loop {
        let frame = tokio::select! {
            frame = channel.next() => frame?,
            piece = next_stdin(stdin), if writing.is_none() => {
                match piece {
                    Some((Some(data), taken)) => {
                        channel.send(&Frame::Data(data)).await?;
                        writing = Some(taken);
                    }
                    Some((None, taken)) => {
                        channel.send(&Frame::End).await?;
                        let _told = taken.send(true);
                        *stdin = None;
                    }
                    None => *stdin = None,
                }
                continue;
            }
        };
        match frame {
            Frame::Output {
                stream,
                seq,
                at_ms,
                data,
            } => {
                let expected = exec.last_seq() + 1;
                if seq > expected || data.len() > MAX_DATA {
                    return Err(LinkError::Protocol(format!(
                        "received output {seq}, expected {expected}"
                    )));
                }
                exec.make_room().await;
                live.wait_for_output_space().await;
                let piece = Piece {
                    seq,
                    at_ms,
                    stream,
                    data,
                };
                // If the node's disk is full, the agent keeps the output unacknowledged and the
                // command blocks.
                while let Err(error) = exec.append_output(&piece) {
                    if live.is_gone() {
                        return Err(LinkError::Gone);
                    }
                    tracing::error!(
                        %error,
                        exec_id = %exec.id(),
                        "Failed to store output; the command blocks until it is stored."
                    );
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                channel.send(&Frame::Ack(seq)).await?;
            }
            Frame::Json(json) => match serde_json::from_slice(&json) {
                Ok(Reply::Exited(report)) => return Ok(report),
                Ok(Reply::StdinTaken { .. }) => {
                    if let Some(taken) = writing.take() {
                        let _told = taken.send(true);
                    }
                }
                Ok(Reply::StdinClosed) => {
                    *stdin = None;
                    exec.stdin.lock().take();
                    if let Some(taken) = writing.take() {
                        let _told = taken.send(false);
                    }
                }
                Ok(Reply::Error(error)) if error.code == ErrorCode::ExecNotFound => {
                    return Err(LinkError::NoSuchExec);
                }
                Ok(Reply::Error(error)) => {
                    return Err(LinkError::Protocol(agent_problem(error).detail));
                }
                Ok(_) | Err(_) => {
                    return Err(LinkError::Protocol("an unexpected reply".to_owned()));
                }
            },
            _ => return Err(LinkError::Protocol("an unexpected frame".to_owned())),
        }
    }
}

async fn next_stdin(stdin: &mut Option<mpsc::Receiver<Stdin>>) -> Option<Stdin> {
    match stdin {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}

fn translate(live: &Live, exec: &Exec, report: &ExitReport) -> ExecExit {
    let killed = report.signal == Some(9) || report.code == Some(137);
    let bytes = ByteCounts {
        stdout: report.stdout_bytes,
        stderr: report.stderr_bytes,
    };
    ExecExit {
        exit_code: report.code,
        signal: report.signal.map(SignalName::name_of),
        timed_out: report.timed_out,
        oom_killed: killed && !report.timed_out && live.saw_oom_kill(),
        bytes,
        // The agent did not observe all output of a lost exec.
        sha256: if report.lost {
            None
        } else {
            exec.sha256(bytes)
        },
        duration_ms: report.duration_ms,
        via: ExecVia::Agent,
        lost: report.lost,
        no_space: killed && !report.timed_out && live.was_stopped_after(exec.record.started_at),
    }
}

/// Kills a foreground exec that nobody waits for, and an exec that the agent let pass its deadline.
async fn guard(live: Arc<Live>, exec: Arc<Exec>) {
    let deadline = (exec.record.timeout_ms > 0).then(|| {
        Instant::now()
            + Duration::from_millis(exec.record.timeout_ms + GRACE_MS)
            + AGENT_DEADLINE_SLACK
    });
    tokio::select! {
        () = sleep_until(deadline) => enforce_deadline(&live, &exec).await,
        () = abandoned(&exec) => {
            tracing::info!(exec_id = %exec.id(), "Killing an abandoned foreground exec.");
            drop(kill_tree(&live, &exec).await);
        }
    }
}

/// Handles an overdue exit. A command that has ended and only waits for a slow reader is left
/// alone. Otherwise the agent missed the deadline, and the worker kills ever more of the sandbox.
async fn enforce_deadline(live: &Live, exec: &Exec) {
    if has_ended(live, exec).await {
        tracing::info!(exec_id = %exec.id(), "An exec has ended; a slow reader delays its exit.");
        return;
    }
    tracing::warn!(
        exec_id = %exec.id(),
        "The agent missed an exec's deadline; killing everything in the sandbox."
    );
    drop(kill_tree(live, exec).await);
    tokio::time::sleep(Duration::from_secs(2)).await;
    if has_ended(live, exec).await {
        return;
    }
    if let Ok(link) = live.link() {
        drop(link.call(&Request::SignalAll { signal: 9 }).await);
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    // Last resort: kill the container. The sandbox's monitor notices.
    if !has_ended(live, exec).await {
        live.kill_container().await;
    }
}

/// Asks the agent whether the exec has ended or is unknown.
async fn has_ended(live: &Live, exec: &Exec) -> bool {
    let Ok(link) = live.link() else { return false };
    match link.call(&Request::Execs).await {
        Ok(Reply::Execs { execs }) => execs
            .iter()
            .find(|status| status.exec_id == exec.id())
            .is_none_or(|status| status.ended),
        _ => false,
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Waits until a foreground exec has had no caller for `ABANDONED_MS`.
pub(super) async fn abandoned(exec: &Exec) {
    if exec.record.background {
        return std::future::pending().await;
    }
    let mut changes = exec.changes();
    loop {
        if exec.is_watched() {
            if changes.changed().await.is_err() {
                return;
            }
            continue;
        }
        let returned = async {
            while !exec.is_watched() {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        if tokio::time::timeout(Duration::from_millis(ABANDONED_MS), returned)
            .await
            .is_err()
        {
            return;
        }
    }
}

async fn kill_tree(live: &Live, exec: &Exec) -> Result<Reply, ApiError> {
    live.link()?
        .call(&Request::Signal {
            exec_id: exec.id(),
            signal: SignalName::KILL.number(),
            scope: SignalScope::Tree,
        })
        .await
}
