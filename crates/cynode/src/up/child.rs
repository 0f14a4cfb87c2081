//! One role as a child process: started, waited for, started again when it dies, drained at the end.

use std::{
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

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
    logs::{Lines, pump},
    role::Role,
    supervisor::STARTUP,
};
use crate::{
    failure::{Failure, INTERNAL, USAGE},
    output,
    state::StateDir,
};

const DRAIN: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(100);
/// A role that dies so often before it was ever ready won't be.
const ATTEMPTS: u32 = 3;

/// Whether a role shall end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopping {
    No,
    InOrder,
    AtOnce,
}

/// How a role came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Asked,
    /// Somebody told the role itself.
    ByItself,
}

/// Pauses between restarts: twice as long each time, from the start again after a healthy while.
#[derive(Debug)]
struct Backoff {
    next: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(200);
    const LONGEST: Duration = Duration::from_secs(10);
    const HEALTHY: Duration = Duration::from_secs(30);

    fn new() -> Self {
        Self { next: Self::FIRST }
    }

    fn after(&mut self, lived: Duration) -> Duration {
        if lived >= Self::HEALTHY {
            self.next = Self::FIRST;
        }
        let pause = self.next;
        self.next = (pause * 2).min(Self::LONGEST);
        pause
    }
}

struct Running {
    child: Child,
    pumps: Vec<JoinHandle<()>>,
}

/// Keeps one role running.
pub struct Keeper {
    pub role: Arc<Role>,
    pub state: StateDir,
    pub lines: Arc<Mutex<Lines>>,
    /// Where the lines go, for messages.
    pub log: String,
    /// It is not started before this is true.
    pub needs: Option<watch::Receiver<bool>>,
    pub ready: watch::Sender<bool>,
    pub stop: watch::Receiver<Stopping>,
    pub deadline: Instant,
    pub to_stderr: bool,
}

impl Keeper {
    pub async fn keep(mut self) -> Result<Ended, Failure> {
        if let Some(mut needs) = self.needs.take() {
            let met = async {
                if needs.wait_for(|ready| *ready).await.is_err() {
                    // It never will be, and that is reported for itself.
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = met => {}
                () = self.asked() => return Ok(Ended::Asked),
            }
        }
        let mut backoff = Backoff::new();
        let mut deaths = 0;
        loop {
            let started = Instant::now();
            let mut running = self.spawn()?;
            let Some(status) = self.until_it_ends(&mut running).await? else {
                return Ok(Ended::Asked);
            };
            // What was already written is still on its way.
            for pump in running.pumps {
                drop(timeout(Duration::from_secs(1), pump).await);
            }
            if status.success() && self.role.ends_all {
                return Ok(Ended::ByItself);
            }
            deaths += 1;
            if !*self.ready.borrow()
                && (deaths == ATTEMPTS || status.code() == Some(i32::from(USAGE)))
            {
                self.lines.lock().print_tail();
                return Err(self.never_ready(status));
            }
            let pause = backoff.after(started.elapsed());
            output::note(&format!(
                "cynode: {} ended ({status}); starting it again in {} ms",
                self.role.name,
                pause.as_millis()
            ));
            tokio::select! {
                () = self.asked() => return Ok(Ended::Asked),
                () = sleep(pause) => {}
            }
        }
    }

    /// `None` when it was ended because it was asked for.
    async fn until_it_ends(
        &mut self,
        running: &mut Running,
    ) -> Result<Option<ExitStatus>, Failure> {
        let mut reason = String::from("it does not answer");
        let pid = running.child.id().unwrap_or_default();
        let (role, state) = (Arc::clone(&self.role), self.state.clone());
        loop {
            let is_ready = *self.ready.borrow();
            tokio::select! {
                biased;
                () = asked(&mut self.stop) => {
                    self.drain(running).await;
                    return Ok(None);
                }
                status = running.child.wait() => return Ok(Some(status?)),
                probed = async { sleep(POLL).await; role.probe.look(&state, pid).await }, if !is_ready => match probed {
                    Ok(()) => drop(self.ready.send_replace(true)),
                    Err(why) => {
                        if why != reason && self.to_stderr {
                            output::note(&format!("cynode: {} is not ready: {why}", role.name));
                        }
                        reason = why;
                        if Instant::now() > self.deadline {
                            self.drain(running).await;
                            self.lines.lock().print_tail();
                            return Err(Failure::new(INTERNAL, "not_ready", format!("the {} is not ready after {} s: {reason}", role.name, STARTUP.as_secs()))
                                .remedy("Run 'cynode doctor' to see what this machine lacks."));
                        }
                    }
                },
            }
        }
    }

    async fn asked(&mut self) {
        asked(&mut self.stop).await;
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
                "the {} ended before it was ready ({status})",
                self.role.name
            ),
        )
        .remedy(format!(
            "See the lines above and {}; 'cynode doctor' checks this machine.",
            self.log
        ))
    }

    #[expect(clippy::disallowed_methods, reason = "the one place that starts roles")]
    fn spawn(&self) -> Result<Running, Failure> {
        let mut command = Command::new(&self.role.program);
        command
            .args(&self.role.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for (name, value) in allocator::ENVIRONMENT {
            // An operator's own choice counts, and PostgreSQL has an allocator of its own.
            if self.role.name != "postgres" && std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        if !self.role.takes_database {
            // It may hold a password.
            command.env_remove("DATABASE_URL");
        }
        // Ctrl-C in the terminal is for us; we drain the child in order.
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
        Ok(Running { child, pumps })
    }

    /// The role's signal, patience, KILL.
    async fn drain(&mut self, running: &mut Running) {
        // It may have ended by itself meanwhile.
        signal(&running.child, self.role.stop);
        let at_once = async {
            // An error means that nobody is left to ask.
            drop(self.stop.wait_for(|stop| *stop == Stopping::AtOnce).await);
        };
        tokio::select! {
            _ = running.child.wait() => {}
            () = async { tokio::select! { () = sleep(DRAIN) => {}, () = at_once => {} } } => {
                output::note(&format!("cynode: {} did not stop in time; killing it", self.role.name));
                // PostgreSQL ends its own children by this one.
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

fn signal(child: &Child, signal: Signal) {
    if let Some(pid) = child
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .and_then(Pid::from_raw)
    {
        kill_process(pid, signal).ok();
    }
}

async fn asked(stop: &mut watch::Receiver<Stopping>) {
    // An error means that nobody is left to ask: the supervisor is gone.
    drop(stop.wait_for(|stop| *stop != Stopping::No).await);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_start_again_after_a_healthy_while() {
        let mut backoff = Backoff::new();
        let pauses: Vec<u128> = (0..8)
            .map(|_| backoff.after(Duration::ZERO).as_millis())
            .collect();
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(backoff.after(Duration::from_secs(31)).as_millis(), 200);
    }
}
