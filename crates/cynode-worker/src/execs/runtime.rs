//! Runs commands through the container runtime's exec call, for hosts without the agent.
//!
//! The runtime can't kill an exec. Each exec therefore carries its id in an environment variable,
//! and at a deadline the worker kills from the host: the descendants of the exec's process,
//! processes with its id, and orphans without the id of another running exec. The worker numbers
//! the output. Its streams don't survive a worker restart, so the worker then kills what is left of
//! earlier execs.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cynode_api::{
    ByteCounts, ErrorCode, ExecExit, ExecId, ExecVia, Problem, SignalName, Stream,
    exec_limits::{DRAIN_MS, GRACE_MS},
};
use cynode_sba_proto::MAX_DATA;
use cynode_service::ApiError;
use futures_util::StreamExt as _;
use time::OffsetDateTime;
use tokio::{io::AsyncWriteExt as _, sync::mpsc, time::Instant};

use super::{Exec, Piece, SessionExecs, agent::ExecCommand, agent::abandoned};
use crate::{
    process::{self, SandboxProcess},
    runtime::{ExecOutput, ExecSpec, RuntimeExec},
    sessions::{Live, runtime_problem},
};

/// Environment variable that marks the processes of an exec.
const MARK_VARIABLE: &str = "CYNODE_EXEC_ID";
/// Time in which a failed start is expected to report itself.
const START_FAILURE_WINDOW: Duration = Duration::from_millis(200);
/// Initial interval at which an exec's state is polled.
const STATE_POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) async fn start(
    live: Arc<Live>,
    execs: Arc<SessionExecs>,
    exec: Arc<Exec>,
    mut command: ExecCommand,
) -> Result<(), ApiError> {
    command
        .env
        .push((MARK_VARIABLE.to_owned(), exec.id().to_string()));
    let spec = ExecSpec {
        argv: std::mem::take(&mut command.argv),
        env: std::mem::take(&mut command.env),
        cwd: exec.record.cwd.clone(),
        stdin: command.stdin_open || !command.input.is_empty(),
        tty: None,
    };
    let begun_at = Instant::now();
    let started = match live.runtime.exec(&live.container, &spec).await {
        Ok(started) => check_start(&live, started).await,
        Err(error) => {
            Err(start_problem(&error.to_string()).unwrap_or_else(|| runtime_problem(&error)))
        }
    };
    match started {
        Ok(started) => {
            exec.set_started();
            let started = StartedExec {
                exec: started,
                begun_at,
            };
            tokio::spawn(follow(live, execs, exec, started, command));
            Ok(())
        }
        Err(problem) => {
            execs.void(&exec, problem.clone().into());
            Err(problem.into())
        }
    }
}

/// Detects a failed start. The runtime replies before the command runs and reports a failure as
/// output and an exit code, so the first piece of output is inspected if it arrives at once.
async fn check_start(live: &Live, started: RuntimeExec) -> Result<RuntimeExec, Problem> {
    let RuntimeExec {
        id,
        input,
        mut output,
    } = started;
    let first = tokio::time::timeout(START_FAILURE_WINDOW, output.next()).await;
    if let Ok(Some(Ok((stream, text)))) = &first {
        let text = String::from_utf8_lossy(text);
        let from_podman = *stream == Stream::Stderr
            && text.starts_with("Error: ")
            && text.contains("OCI runtime");
        // Docker reports it on stdout.
        let from_docker =
            *stream == Stream::Stdout && text.starts_with("OCI runtime exec failed: ");
        if (from_podman || from_docker)
            && let Some(problem) = start_problem(&text.to_lowercase())
            && matches!(
                tokio::time::timeout(Duration::from_secs(5), wait_for_exit(live, &id)).await,
                Ok(Some(126 | 127))
            )
        {
            return Err(problem);
        }
    }
    let output: ExecOutput = match first {
        Ok(Some(piece)) => Box::pin(futures_util::stream::iter([piece]).chain(output)),
        Ok(None) => Box::pin(futures_util::stream::empty()),
        Err(_) => output,
    };
    Ok(RuntimeExec { id, input, output })
}

/// Maps the runtime's message about a command that can't be started to a problem.
fn start_problem(message: &str) -> Option<Problem> {
    let errno = if message.contains("not found") || message.contains("no such file or directory") {
        "ENOENT"
    } else if message.contains("permission denied") {
        "EACCES"
    } else if message.contains("exec format error") {
        "ENOEXEC"
    } else if message.contains("resource temporarily unavailable") {
        return Some(Problem::new(
            ErrorCode::PidsExhausted,
            "no process slot is available",
        ));
    } else {
        return None;
    };
    Some(
        Problem::new(
            ErrorCode::ExecFailed,
            message.chars().take(1_000).collect::<String>(),
        )
        .with("errno", errno),
    )
}

/// An exec that the runtime has started.
struct StartedExec {
    exec: RuntimeExec,
    begun_at: Instant,
}

async fn follow(
    live: Arc<Live>,
    execs: Arc<SessionExecs>,
    exec: Arc<Exec>,
    started: StartedExec,
    command: ExecCommand,
) {
    let _activity = live.activity();
    let StartedExec {
        exec: RuntimeExec { id, input, output },
        begun_at,
    } = started;
    feed(&exec, input, command);
    let counts = Counts::default();
    let mut timed_out = false;
    let deadline = (exec.record.timeout_ms > 0)
        .then(|| begun_at + Duration::from_millis(exec.record.timeout_ms));
    let reading = read(&live, &exec, output, &counts);
    let ended = async {
        // The stream ends with the last writer, which may outlive the process.
        let mut reading = std::pin::pin!(reading);
        let mut polling = std::pin::pin!(wait_for_exit(&live, &id));
        tokio::select! {
            () = &mut reading => polling.await,
            code = &mut polling => {
                drop(tokio::time::timeout(Duration::from_millis(DRAIN_MS), reading).await);
                code
            }
        }
    };
    let mut ended = std::pin::pin!(ended);
    let code = tokio::select! {
        code = &mut ended => code,
        () = sleep_until(deadline) => {
            timed_out = true;
            kill_exec(&live, &execs, &id, exec.id(), GRACE_MS).await;
            tokio::time::timeout(Duration::from_secs(5), ended).await.unwrap_or(None)
        }
        () = abandoned(&exec) => {
            kill_exec(&live, &execs, &id, exec.id(), 0).await;
            tokio::time::timeout(Duration::from_secs(5), ended).await.unwrap_or(None)
        }
    };
    // The runtime reports a signal as 128 plus its number, indistinguishable from a plain exit with
    // that code.
    let signal = code
        .filter(|code| timed_out && *code > 128)
        .map(|code| SignalName::name_of(code - 128))
        .or_else(|| (timed_out && code.is_none()).then(|| "KILL".to_owned()));
    let bytes = ByteCounts {
        stdout: counts.stdout.load(Ordering::Relaxed),
        stderr: counts.stderr.load(Ordering::Relaxed),
    };
    let exit = ExecExit {
        exit_code: code.filter(|_| signal.is_none()),
        oom_killed: code == Some(137) && !timed_out && live.saw_oom_kill(),
        signal,
        timed_out,
        bytes,
        // Without an exit code the streams were abandoned before their end.
        sha256: code.and_then(|_| exec.sha256(bytes)),
        duration_ms: u64::try_from(begun_at.elapsed().as_millis()).unwrap_or(u64::MAX),
        via: ExecVia::Runtime,
        lost: code.is_none() && !timed_out,
        no_space: code == Some(137) && !timed_out && live.was_stopped_after(exec.record.started_at),
    };
    execs.finish(&exec, exit);
}

/// Writes standard input: first that of the request, then what is sent later.
fn feed(
    exec: &Arc<Exec>,
    mut input: std::pin::Pin<Box<dyn tokio::io::AsyncWrite + Send>>,
    mut command: ExecCommand,
) {
    let (sender, mut receiver) = mpsc::channel::<super::exec::Stdin>(1);
    if command.stdin_open {
        *exec.stdin.lock() = Some(sender);
    }
    tokio::spawn(async move {
        let fed = loop {
            match command.input.next().await {
                Ok(Some(piece)) if input.write_all(&piece).await.is_ok() => {}
                Ok(None) => break true,
                Ok(Some(_)) | Err(_) => break false,
            }
        };
        if fed && command.stdin_open {
            while let Some((piece, taken)) = receiver.recv().await {
                let Some(data) = piece else {
                    let _told = taken.send(true);
                    break;
                };
                let wrote = input.write_all(&data).await.is_ok() && input.flush().await.is_ok();
                let _told = taken.send(wrote);
            }
        }
        drop(input.shutdown().await);
    });
}

#[derive(Default)]
struct Counts {
    stdout: AtomicU64,
    stderr: AtomicU64,
}

async fn read(live: &Live, exec: &Exec, mut output: ExecOutput, counts: &Counts) {
    while let Some(Ok((stream, data))) = output.next().await {
        match stream {
            Stream::Stdout => counts
                .stdout
                .fetch_add(data.len() as u64, Ordering::Relaxed),
            Stream::Stderr => counts
                .stderr
                .fetch_add(data.len() as u64, Ordering::Relaxed),
        };
        for part in data.chunks(MAX_DATA) {
            exec.make_room().await;
            live.wait_for_output_space().await;
            let at_ms = u64::try_from(OffsetDateTime::now_utc().unix_timestamp_nanos() / 1_000_000)
                .unwrap_or(0);
            if let Err(error) = exec.append_output(&Piece {
                seq: exec.last_seq() + 1,
                at_ms,
                stream,
                data: part.to_vec(),
            }) {
                tracing::error!(%error, exec_id = %exec.id(), "Failed to store output.");
            }
        }
    }
}

/// Polls until the exec has exited; `None` if the runtime no longer knows it.
async fn wait_for_exit(live: &Live, id: &str) -> Option<i32> {
    let mut pause = STATE_POLL_INTERVAL;
    loop {
        match live.runtime.exec_state(id).await {
            Ok(state) if !state.running => {
                return state.exit_code.and_then(|code| i32::try_from(code).ok());
            }
            Err(crate::runtime::RuntimeError::NotFound(_)) => return None,
            Err(_) if live.is_gone() => return None,
            Ok(_) | Err(_) => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Kills the exec's processes: TERM, a grace period, then KILL until none is left.
async fn kill_exec(live: &Live, execs: &SessionExecs, id: &str, exec_id: ExecId, grace_ms: u64) {
    let main = live
        .runtime
        .exec_state(id)
        .await
        .map_or(0, |state| state.pid);
    let others: Vec<ExecId> = execs
        .running()
        .iter()
        .map(|exec| exec.id())
        .filter(|other| *other != exec_id)
        .collect();
    let init = live.init.pid;
    let find = async || {
        let others = others.clone();
        process::inspect(move || processes_of(init, main, exec_id, &others))
            .await
            .unwrap_or_default()
    };
    if grace_ms > 0 {
        for pid in find().await {
            process::kill(pid, 15);
        }
        let deadline = Instant::now() + Duration::from_millis(grace_ms);
        while Instant::now() < deadline && !find().await.is_empty() {
            tokio::time::sleep(STATE_POLL_INTERVAL).await;
        }
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let left = find().await;
        if left.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in left {
            process::kill(pid, 9);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The processes of an exec: its main process and descendants, those with its mark, and marked
/// orphans without the mark of another running exec.
fn processes_of(init: i32, main: i32, exec_id: ExecId, others: &[ExecId]) -> Vec<i32> {
    let inside = process::in_namespace_of(init);
    let mark = |id: &ExecId| format!("{MARK_VARIABLE}={id}");
    let own_mark = mark(&exec_id);
    let mut found: HashSet<i32> = HashSet::from([main]);
    loop {
        let before = found.len();
        found.extend(
            inside
                .iter()
                .filter(|process| found.contains(&process.parent))
                .map(|process| process.pid)
                .collect::<Vec<_>>(),
        );
        if found.len() == before {
            break;
        }
    }
    let belongs = |process: &SandboxProcess| {
        found.contains(&process.pid)
            || process::has_env(process.pid, &own_mark)
            || (process.parent == init
                && process::has_mark(process.pid, MARK_VARIABLE)
                && !others
                    .iter()
                    .any(|other| process::has_env(process.pid, &mark(other))))
    };
    inside
        .iter()
        .filter(|process| belongs(process))
        .map(|process| process.pid)
        .collect()
}

/// Signals the processes with an exec's mark.
pub(crate) async fn signal(live: &Live, exec_id: ExecId, signal: i32) {
    let (init, mark) = (live.init.pid, format!("{MARK_VARIABLE}={exec_id}"));
    process::inspect(move || {
        for process in process::in_namespace_of(init) {
            if process::has_env(process.pid, &mark) {
                process::kill(process.pid, signal);
            }
        }
    })
    .await;
}

/// Kills the execs of an earlier worker process and marks them lost: their streams are gone.
pub(crate) async fn end_orphans(live: &Live, execs: &Arc<SessionExecs>) {
    let init = live.init.pid;
    process::inspect(move || {
        for process in process::in_namespace_of(init) {
            if process::has_mark(process.pid, MARK_VARIABLE) {
                process::kill(process.pid, 9);
            }
        }
    })
    .await;
    execs.mark_all_lost();
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Signals everything in the sandbox but its process 1, from the host.
pub(crate) fn kill_everything(live: &Live, signal: i32) {
    let inside = process::in_namespace_of(live.init.pid);
    // Otherwise the pid may have been reused by another sandbox before the lookup.
    if live.init.is_alive() {
        for process in inside {
            process::kill(process.pid, signal);
        }
    }
}
