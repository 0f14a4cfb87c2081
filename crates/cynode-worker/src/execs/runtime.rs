//! Running a command by the container runtime's own exec, for hosts that run without the agent.
//!
//! The runtime has no call that ends an exec. So each exec carries a mark in its environment, and at a deadline the worker
//! kills, from the host, what descends from the exec's process, what carries its mark, and orphans that carry no other
//! live exec's mark. Output is numbered here. After a restart of the worker the streams are gone, and what still runs of
//! the old execs is killed.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cynode_api::{
    Bytes, ErrorCode, ExecExit, ExecId, ExecVia, Problem, SignalName, Stream,
    exec_limits::{DRAIN_MS, GRACE_MS},
};
use cynode_sba_proto::MAX_DATA;
use cynode_service::ApiError;
use futures_util::StreamExt as _;
use time::OffsetDateTime;
use tokio::{io::AsyncWriteExt as _, sync::mpsc, time::Instant};

use super::{Exec, Piece, SessionExecs, agent::Command, agent::abandoned};
use crate::{
    process::{self, Inside},
    runtime::{ExecOutput, ExecSpec, RuntimeExec},
    sessions::{Live, runtime_problem},
};

const MARK: &str = "CYNODE_EXEC_ID";
/// How long a failed start may take to show itself.
const FIRST_WORDS: Duration = Duration::from_millis(200);
/// How often an exec's state is asked for once its streams have ended.
const POLL: Duration = Duration::from_millis(20);

pub(crate) async fn start(
    live: Arc<Live>,
    execs: Arc<SessionExecs>,
    exec: Arc<Exec>,
    mut command: Command,
) -> Result<(), ApiError> {
    command.env.push((MARK.to_owned(), exec.id().to_string()));
    let spec = ExecSpec {
        argv: std::mem::take(&mut command.argv),
        env: std::mem::take(&mut command.env),
        cwd: exec.record.cwd.clone(),
        stdin: command.stdin_open || !command.input.is_empty(),
        tty: None,
    };
    let begun = Instant::now();
    let started = match live.runtime.exec(&live.container, &spec).await {
        Ok(started) => see_start(&live, started).await,
        Err(error) => {
            Err(start_problem(&error.to_string()).unwrap_or_else(|| runtime_problem(&error)))
        }
    };
    match started {
        Ok(started) => {
            exec.set_started();
            tokio::spawn(follow(live, execs, exec, started, command, begun));
            Ok(())
        }
        Err(problem) => {
            execs.void(&exec, problem.clone().into());
            Err(problem.into())
        }
    }
}

/// The runtime answers before the command runs, and says a failed start as output and exit code. So the first words are
/// looked at, if they come at once.
async fn see_start(live: &Live, started: RuntimeExec) -> Result<RuntimeExec, Problem> {
    let RuntimeExec {
        id,
        input,
        mut output,
    } = started;
    let first = tokio::time::timeout(FIRST_WORDS, output.next()).await;
    if let Ok(Some(Ok((stream, words)))) = &first {
        let words = String::from_utf8_lossy(words);
        let podmans = *stream == Stream::Stderr
            && words.starts_with("Error: ")
            && words.contains("OCI runtime");
        // Docker says it on the other stream.
        let dockers = *stream == Stream::Stdout && words.starts_with("OCI runtime exec failed: ");
        if (podmans || dockers)
            && let Some(problem) = start_problem(&words.to_lowercase())
            && matches!(
                tokio::time::timeout(Duration::from_secs(5), exited(live, &id)).await,
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

/// What the runtime says when the command itself can't be started.
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
            "no process slot is free",
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

async fn follow(
    live: Arc<Live>,
    execs: Arc<SessionExecs>,
    exec: Arc<Exec>,
    started: RuntimeExec,
    command: Command,
    begun: Instant,
) {
    let _activity = live.activity();
    let RuntimeExec { id, input, output } = started;
    feed(&exec, input, command);
    let counts = Counts::default();
    let mut timed_out = false;
    let deadline =
        (exec.record.timeout_ms > 0).then(|| begun + Duration::from_millis(exec.record.timeout_ms));
    let reading = read(&live, &exec, output, &counts);
    let ended = async {
        // The stream ends with the last writer; the process may end before that.
        let mut reading = std::pin::pin!(reading);
        let mut polling = std::pin::pin!(exited(&live, &id));
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
        () = async { match deadline { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => {
            timed_out = true;
            end(&live, &execs, &id, exec.id(), GRACE_MS).await;
            tokio::time::timeout(Duration::from_secs(5), ended).await.unwrap_or(None)
        }
        () = abandoned(&exec) => {
            end(&live, &execs, &id, exec.id(), 0).await;
            tokio::time::timeout(Duration::from_secs(5), ended).await.unwrap_or(None)
        }
    };
    // The runtime reports a signal as 128 and its number; a plain exit with such a code looks the same.
    let signal = code
        .filter(|code| timed_out && *code > 128)
        .map(|code| SignalName::name_of(code - 128))
        .or_else(|| (timed_out && code.is_none()).then(|| "KILL".to_owned()));
    let bytes = Bytes {
        stdout: counts.stdout.load(Ordering::Relaxed),
        stderr: counts.stderr.load(Ordering::Relaxed),
    };
    let exit = ExecExit {
        exit_code: code.filter(|_| signal.is_none()),
        oom_killed: code == Some(137) && !timed_out && live.saw_oom_kill(),
        signal,
        timed_out,
        bytes,
        // Without a code the streams were left before their end.
        sha256: code.and_then(|_| exec.sha256(bytes)),
        duration_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        via: ExecVia::Runtime,
        lost: code.is_none() && !timed_out,
        no_space: code == Some(137) && !timed_out && live.was_stopped_after(exec.record.started_at),
    };
    execs.finish(&exec, exit);
}

/// Standard input: what came with the request, then what is written later.
fn feed(
    exec: &Arc<Exec>,
    mut input: std::pin::Pin<Box<dyn tokio::io::AsyncWrite + Send>>,
    mut command: Command,
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
            live.room_for_output().await;
            let at_ms = u64::try_from(OffsetDateTime::now_utc().unix_timestamp_nanos() / 1_000_000)
                .unwrap_or(0);
            if let Err(error) = exec.keep(&Piece {
                seq: exec.last_seq() + 1,
                at_ms,
                stream,
                data: part.to_vec(),
            }) {
                tracing::error!(%error, exec_id = %exec.id(), "Keeping output failed.");
            }
        }
    }
}

/// Asks until the runtime knows how the exec ended; `None` when it does not know the exec any more.
async fn exited(live: &Live, id: &str) -> Option<i32> {
    let mut pause = POLL;
    loop {
        match live.runtime.exec_state(id).await {
            Ok(state) if !state.running => {
                return state.exit_code.and_then(|code| i32::try_from(code).ok());
            }
            Err(crate::runtime::Error::NotFound(_)) => return None,
            Err(_) if live.is_gone() => return None,
            Ok(_) | Err(_) => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// TERM, a grace, then KILL of all that belongs to the exec, until nothing does.
async fn end(live: &Live, execs: &SessionExecs, id: &str, exec_id: ExecId, grace_ms: u64) {
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
    let find = || belonging(live.init.pid, main, exec_id, &others);
    if grace_ms > 0 {
        for pid in find() {
            process::kill(pid, 15);
        }
        let until = Instant::now() + Duration::from_millis(grace_ms);
        while Instant::now() < until && !find().is_empty() {
            tokio::time::sleep(POLL).await;
        }
    }
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let left = find();
        if left.is_empty() || Instant::now() > until {
            return;
        }
        for pid in left {
            process::kill(pid, 9);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What belongs to an exec: its process and what descends from it, what carries its mark, and orphans without another
/// live exec's mark.
fn belonging(init: i32, main: i32, exec_id: ExecId, others: &[ExecId]) -> Vec<i32> {
    let inside = process::in_namespace_of(init);
    let mark = |id: &ExecId| format!("{MARK}={id}");
    let own = mark(&exec_id);
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
    let is_ours = |process: &Inside| {
        found.contains(&process.pid)
            || process::has_env(process.pid, &own)
            || (process.parent == init
                && process::has_mark(process.pid, MARK)
                && !others
                    .iter()
                    .any(|other| process::has_env(process.pid, &mark(other))))
    };
    inside
        .iter()
        .filter(|process| is_ours(process))
        .map(|process| process.pid)
        .collect()
}

/// Signals what carries an exec's mark.
pub(crate) fn signal(live: &Live, exec_id: ExecId, signal: i32) {
    let mark = format!("{MARK}={exec_id}");
    for process in process::in_namespace_of(live.init.pid) {
        if process::has_env(process.pid, &mark) {
            process::kill(process.pid, signal);
        }
    }
}

/// What a worker finds of the execs of an earlier one.
pub(crate) struct Leftovers;

impl Leftovers {
    /// Their streams are gone: they are ended and counted as lost.
    pub(crate) fn end(live: &Live, execs: &Arc<SessionExecs>) {
        for process in process::in_namespace_of(live.init.pid) {
            if process::has_mark(process.pid, MARK) {
                process::kill(process.pid, 9);
            }
        }
        execs.lose_all();
    }
}

/// Signals everything in the sandbox but its process 1, from the host.
pub(crate) fn kill_everything(live: &Live, signal: i32) {
    let inside = process::in_namespace_of(live.init.pid);
    // Else the number was another sandbox's by the time it was looked up.
    if live.init.is_alive() {
        for process in inside {
            process::kill(process.pid, signal);
        }
    }
}
