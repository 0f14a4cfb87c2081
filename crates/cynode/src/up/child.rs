//! Runs one role as a child process: starts it, restarts it when it dies, and drains it at the end.

use std::{
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use backon::{BackoffBuilder as _, ExponentialBackoff};
use cynode_service::allocator;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use super::{
    logs::{LogSink, pump},
    role::Role,
    supervisor::START_TIMEOUT,
};
use crate::{
    failure::{Failure, INTERNAL, USAGE},
    output, retry,
    state::StateDir,
};

const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Gives up on a role that dies this often before it is ready.
const MAX_START_ATTEMPTS: u32 = 3;

/// Whether, and how, a role should stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopRequest {
    None,
    Graceful,
    Immediate,
}

/// Why a role ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoleEnd {
    /// The supervisor stopped it.
    Stopped,
    /// It exited cleanly without a signal of the supervisor, such as after a shutdown over its API.
    Exited,
}

/// Delays between restarts. They double, and start over after a healthy run.
#[derive(Debug)]
struct RestartBackoff(ExponentialBackoff);

impl RestartBackoff {
    const MAX_DELAY: Duration = Duration::from_secs(10);
    /// A role that ran this long was healthy.
    const HEALTHY_RUN: Duration = Duration::from_secs(30);

    fn new() -> Self {
        Self(retry::backoff(Self::MAX_DELAY).build())
    }

    fn delay_after(&mut self, run: Duration) -> Duration {
        if run >= Self::HEALTHY_RUN {
            *self = Self::new();
        }
        self.0.next().unwrap_or(Self::MAX_DELAY)
    }
}

struct RoleProcess {
    child: Child,
    pumps: Vec<JoinHandle<()>>,
}

/// Keeps one role running.
pub struct RoleKeeper {
    pub role: Arc<Role>,
    pub state: StateDir,
    pub lines: Arc<Mutex<LogSink>>,
    /// The path of the log file, for messages.
    pub log: String,
    /// The readiness of the role that this one waits for.
    pub needs: Option<watch::Receiver<bool>>,
    pub ready: watch::Sender<bool>,
    pub stop: watch::Receiver<StopRequest>,
    pub deadline: Instant,
    pub to_stderr: bool,
}

impl RoleKeeper {
    pub async fn keep(mut self) -> Result<RoleEnd, Failure> {
        if let Some(mut needs) = self.needs.take() {
            let met = async {
                if needs.wait_for(|ready| *ready).await.is_err() {
                    // The other role failed, and its keeper reports that.
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = met => {}
                () = self.stop_requested() => return Ok(RoleEnd::Stopped),
            }
        }
        let mut backoff = RestartBackoff::new();
        let mut deaths = 0;
        loop {
            let started = Instant::now();
            let mut running = self.spawn()?;
            let Some(status) = self.wait_for_exit(&mut running).await? else {
                return Ok(RoleEnd::Stopped);
            };
            // Drain the output that the role wrote before it exited.
            for pump in running.pumps {
                drop(timeout(Duration::from_secs(1), pump).await);
            }
            if status.success() && self.role.ends_stack {
                return Ok(RoleEnd::Exited);
            }
            deaths += 1;
            if !*self.ready.borrow()
                && (deaths == MAX_START_ATTEMPTS || status.code() == Some(i32::from(USAGE)))
            {
                self.lines.lock().print_tail();
                return Err(self.never_ready(status));
            }
            let pause = backoff.delay_after(started.elapsed());
            output::message(&format!(
                "cynode: {} exited ({status}); restarting it in {} ms",
                self.role.name,
                pause.as_millis()
            ));
            tokio::select! {
                () = self.stop_requested() => return Ok(RoleEnd::Stopped),
                () = sleep(pause) => {}
            }
        }
    }

    /// Waits for the process to exit; `None` if it was stopped on request.
    async fn wait_for_exit(
        &mut self,
        running: &mut RoleProcess,
    ) -> Result<Option<ExitStatus>, Failure> {
        let mut reason = String::from("no response");
        let pid = running.child.id().unwrap_or_default();
        let (role, state) = (Arc::clone(&self.role), self.state.clone());
        loop {
            let is_ready = *self.ready.borrow();
            tokio::select! {
                biased;
                () = stop_requested(&mut self.stop) => {
                    self.drain(running).await;
                    return Ok(None);
                }
                status = running.child.wait() => return Ok(Some(status?)),
                readiness = probe(&role, &state, pid), if !is_ready => match readiness {
                    Ok(()) => drop(self.ready.send_replace(true)),
                    Err(current) => {
                        if current != reason && self.to_stderr {
                            output::message(&format!(
                                "cynode: {} is not ready: {current}",
                                role.name
                            ));
                        }
                        reason = current;
                        if Instant::now() > self.deadline {
                            self.drain(running).await;
                            self.lines.lock().print_tail();
                            let message = format!(
                                "the {} is not ready after {} s: {reason}",
                                role.name,
                                START_TIMEOUT.as_secs()
                            );
                            return Err(Failure::new(INTERNAL, "not_ready", message)
                                .remedy("Run 'cynode doctor' to check this machine."));
                        }
                    }
                },
            }
        }
    }

    async fn stop_requested(&mut self) {
        stop_requested(&mut self.stop).await;
    }

    fn never_ready(&self, status: ExitStatus) -> Failure {
        let exit = if status.code() == Some(i32::from(USAGE)) {
            USAGE
        } else {
            INTERNAL
        };
        Failure::new(
            exit,
            "not_ready",
            format!(
                "the {} exited before it was ready ({status})",
                self.role.name
            ),
        )
        .remedy(format!(
            "See the log lines above and {}; check this machine with 'cynode doctor'.",
            self.log
        ))
    }

    #[expect(clippy::disallowed_methods, reason = "the one place that starts roles")]
    fn spawn(&self) -> Result<RoleProcess, Failure> {
        let mut command = Command::new(&self.role.program);
        command
            .args(&self.role.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for (name, value) in allocator::environment(self.role.name) {
            // The operator's value wins.
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        if !self.role.needs_database_url {
            // The URL may contain a password.
            command.env_remove("DATABASE_URL");
        }
        // A separate process group: Ctrl-C signals only the supervisor, which drains the roles.
        let mut child = command.process_group(0).spawn().map_err(|error| {
            Failure::internal(format!(
                "can't start {}: {error}",
                self.role.program.display()
            ))
        })?;
        let mut pumps = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            let lines = self.lines.clone();
            pumps.push(tokio::spawn(async move { pump(stdout, &lines).await }));
        }
        if let Some(stderr) = child.stderr.take() {
            let lines = self.lines.clone();
            pumps.push(tokio::spawn(async move { pump(stderr, &lines).await }));
        }
        Ok(RoleProcess { child, pumps })
    }

    /// Sends the role's stop signal and waits; then QUIT and KILL.
    async fn drain(&mut self, running: &mut RoleProcess) {
        // The process may have exited.
        signal(&running.child, self.role.stop_signal);
        let give_up = async {
            let immediate = self.stop.wait_for(|stop| *stop == StopRequest::Immediate);
            // Ends at the timeout, on a request, or when the supervisor is gone.
            drop(timeout(DRAIN_TIMEOUT, immediate).await);
        };
        tokio::select! {
            _ = running.child.wait() => {}
            () = give_up => {
                let name = self.role.name;
                output::message(&format!("cynode: {name} did not stop in time; killing it"));
                // PostgreSQL ends its children on this signal.
                signal(&running.child, Signal::QUIT);
                if timeout(Duration::from_secs(3), running.child.wait()).await.is_err() {
                    drop(running.child.kill().await);
                }
            }
        }
        for pump in running.pumps.drain(..) {
            drop(timeout(Duration::from_secs(1), pump).await);
        }
    }
}

async fn probe(role: &Role, state: &StateDir, pid: u32) -> Result<(), String> {
    sleep(PROBE_INTERVAL).await;
    role.probe.check(state, pid).await
}

fn signal(child: &Child, signal: Signal) {
    if let Some(pid) = child
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .and_then(Pid::from_raw)
    {
        kill_process(pid, signal).ok();
    }
}

async fn stop_requested(stop: &mut watch::Receiver<StopRequest>) {
    // An error means that the supervisor is gone, which is a request to stop as well.
    drop(stop.wait_for(|stop| *stop != StopRequest::None).await);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_limit_and_start_over_after_a_healthy_run() {
        let mut backoff = RestartBackoff::new();
        let delays: Vec<u128> = (0..8)
            .map(|_| backoff.delay_after(Duration::ZERO).as_millis())
            .collect();
        assert_eq!(delays, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(
            backoff.delay_after(Duration::from_secs(31)).as_millis(),
            200
        );
    }
}
