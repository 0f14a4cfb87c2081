//! Runs the command of a step with the same code that runs a session's commands.

use std::rc::Rc;

use cynode_api::{ExecId, SignalScope, Stream, exec_limits, sba::RunCommand};
use cynode_sba_proto::{ExecStart, ExitReport};
use tokio::time::Instant;

use super::{
    after,
    steps::{StepEnd, StepOutcome, StopReason, Work},
};
use crate::exec::Exec;

/// Time between SIGTERM and SIGKILL when the job is stopped. The node waits one second for the
/// whole job.
const STOP_GRACE: std::time::Duration = std::time::Duration::from_millis(400);

impl Work {
    pub(super) async fn run_command(&self, command: &RunCommand, deadline: Instant) -> StepOutcome {
        match self.execs.start(self.exec_start(command, deadline)).await {
            Ok(exec) => {
                let outcome = Running::new(self, &exec).follow().await;
                exec.acknowledge_exit();
                self.execs.forget_if_done(&exec);
                outcome
            }
            Err(refusal) => StepOutcome::new(StepEnd::Failure(refusal.message)),
        }
    }

    fn exec_start(&self, command: &RunCommand, deadline: Instant) -> ExecStart {
        let argv = if command.shell {
            ["/bin/sh", "-c"]
                .into_iter()
                .map(str::to_owned)
                .chain(command.argv.first().cloned())
                .collect()
        } else {
            command.argv.clone()
        };
        let cwd = command.cwd.as_deref().unwrap_or(".");
        let inherited = self.environment.iter();
        let env = inherited
            .filter(|(name, _)| !command.env.contains_key(name))
            .chain(&command.env.iter().map(owned).collect::<Vec<_>>())
            .cloned()
            .collect();
        let left = deadline.saturating_duration_since(Instant::now());
        ExecStart {
            exec_id: ExecId::generate(),
            argv,
            cwd: self
                .workspace
                .path()
                .join(cwd)
                .to_string_lossy()
                .into_owned(),
            env,
            // 0 means no timeout.
            timeout_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
            grace_ms: exec_limits::GRACE_MS,
            drain_ms: exec_limits::DRAIN_MS,
            stdin: false,
            runner: false,
        }
    }
}

fn owned((name, value): (&String, &String)) -> (String, String) {
    (name.clone(), value.clone())
}

/// A command whose output is collected.
struct Running<'a> {
    work: &'a Work,
    exec: &'a Rc<Exec>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// The command exceeded the job's output limit and was killed.
    has_exceeded: bool,
    stopped: Option<StopReason>,
}

impl<'a> Running<'a> {
    fn new(work: &'a Work, exec: &'a Rc<Exec>) -> Self {
        Self {
            work,
            exec,
            stdout: Vec::new(),
            stderr: Vec::new(),
            has_exceeded: false,
            stopped: None,
        }
    }

    async fn follow(mut self) -> StepOutcome {
        let mut kill_at = None;
        loop {
            let activity = self.exec.activity.notified();
            while let Some(chunk) = self.exec.take() {
                self.keep(chunk.stream, &chunk.data);
            }
            if let Some(report) = self.exec.exit() {
                return self.outcome(&report);
            }
            tokio::select! {
                () = activity => {}
                reason = self.work.stopped(), if self.stopped.is_none() => {
                    self.stopped = Some(reason);
                    self.signal(libc::SIGTERM, SignalScope::Group);
                    kill_at = Some(after(STOP_GRACE));
                }
                () = passed(kill_at) => {
                    kill_at = None;
                    self.kill();
                }
            }
        }
    }

    fn keep(&mut self, stream: Stream, data: &[u8]) {
        if self.has_exceeded {
            return;
        }
        let kept = &data[..self.work.budget.take(data.len())];
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
        .extend_from_slice(kept);
        self.work.live.write(stream, kept);
        if kept.len() < data.len() {
            self.has_exceeded = true;
            self.kill();
        }
    }

    fn kill(&self) {
        self.signal(libc::SIGKILL, SignalScope::Tree);
    }

    fn signal(&self, signal: i32, scope: SignalScope) {
        // Fails if the command has already ended.
        drop(self.work.execs.signal(self.exec.id, signal, scope));
    }

    fn outcome(self, report: &ExitReport) -> StepOutcome {
        let end = if self.has_exceeded {
            StepEnd::TooMuchOutput
        } else if let Some(reason) = self.stopped {
            StepEnd::Stopped(reason)
        } else if report.timed_out {
            StepEnd::TimedOut
        } else {
            end_of(report)
        };
        StepOutcome {
            end,
            exit_code: report.code,
            streams: Some(self.work.budget.encode([self.stdout, self.stderr])),
            output: None,
            truncated: self.has_exceeded,
        }
    }
}

fn end_of(report: &ExitReport) -> StepEnd {
    match (report.code, report.signal) {
        (Some(0), _) => StepEnd::Success,
        (Some(code), _) => StepEnd::Failure(format!("the command exited with {code}")),
        _ if report.lost => StepEnd::Failure(
            "the command's supervisor was killed by another process of the sandbox".to_owned(),
        ),
        (None, Some(signal)) => {
            StepEnd::Failure(format!("the command was killed by signal {signal}"))
        }
        (None, None) => StepEnd::Failure("the end of the command is not known".to_owned()),
    }
}

async fn passed(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}
