//! One role as a child process: started, waited for, started again when it dies, drained at the end.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::{ExitCode, ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use cynode_client::{Error, Readiness, SessionFilter, WorkerClient};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use super::logs::{Lines, pump};
use crate::{
    failure::{Failure, INTERNAL, USAGE},
    output,
    state::{Endpoints, StateDir},
};

/// How long a role may take until it is ready for the first time.
pub const STARTUP: Duration = Duration::from_secs(110);
const DRAIN: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(100);
/// A role that dies so often before it was ever ready won't be.
const ATTEMPTS: u32 = 3;

#[derive(Debug)]
pub struct Role {
    pub name: &'static str,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    pub url: String,
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

/// Ends when a signal asks for it, when the role ends cleanly (it was told to), or when it never becomes ready.
pub async fn run(role: Role, state: &StateDir, to_stderr: bool) -> Result<ExitCode, Failure> {
    let lines = Arc::new(Mutex::new(Lines::open(role.name, &state.log(&format!("{}.log", role.name)), to_stderr)?));
    let mut stop = Stop::new()?;
    let mut backoff = Backoff::new();
    let mut ready = false;
    let mut deaths = 0;
    let deadline = Instant::now() + STARTUP;
    let mut reason = String::from("it does not answer");
    loop {
        let started = Instant::now();
        let mut running = spawn(&role, &lines)?;
        let status = loop {
            tokio::select! {
                biased;
                () = stop.asked() => {
                    drain(&mut running, &mut stop).await;
                    return Ok(ExitCode::SUCCESS);
                }
                status = running.child.wait() => break status?,
                probed = async { sleep(POLL).await; probe(&role.url, state).await }, if !ready => match probed {
                    Ok(()) => {
                        ready = true;
                        state.write_endpoints(&Endpoints { version: 1, api: None, worker: Some(role.url.clone()), pid: std::process::id() })?;
                        output::note(&format!("cynode: {} is ready at {}", role.name, role.url));
                    }
                    Err(why) => {
                        if why != reason && to_stderr {
                            output::note(&format!("cynode: {} is not ready: {why}", role.name));
                        }
                        reason = why;
                        if Instant::now() > deadline {
                            drain(&mut running, &mut stop).await;
                            lines.lock().print_tail();
                            return Err(Failure::new(INTERNAL, "not_ready", format!("the {} is not ready after {} s: {reason}", role.name, STARTUP.as_secs()))
                                .remedy("Run 'cynode doctor' to see what this machine lacks."));
                        }
                    }
                },
            }
        };
        // What was already written is still on its way.
        for pump in running.pumps {
            drop(timeout(Duration::from_secs(1), pump).await);
        }
        if status.success() {
            output::note(&format!("cynode: {} has stopped", role.name));
            return Ok(ExitCode::SUCCESS);
        }
        deaths += 1;
        if !ready && (deaths == ATTEMPTS || status.code() == Some(i32::from(USAGE))) {
            lines.lock().print_tail();
            return Err(never_ready(&role, status, &state.log(&format!("{}.log", role.name)).display().to_string()));
        }
        let pause = backoff.after(started.elapsed());
        output::note(&format!("cynode: {} ended ({status}); starting it again in {} ms", role.name, pause.as_millis()));
        tokio::select! {
            () = stop.asked() => return Ok(ExitCode::SUCCESS),
            () = sleep(pause) => {}
        }
    }
}

fn never_ready(role: &Role, status: ExitStatus, log: &str) -> Failure {
    let exit = if status.code() == Some(i32::from(USAGE)) { USAGE } else { INTERNAL };
    Failure::new(exit, "not_ready", format!("the {} ended before it was ready ({status})", role.name))
        .remedy(format!("See the lines above and {log}; 'cynode doctor' checks this machine."))
}

#[expect(clippy::disallowed_methods, reason = "the one place that starts roles")]
fn spawn(role: &Role, lines: &Arc<Mutex<Lines>>) -> Result<Running, Failure> {
    let mut child = Command::new(&role.program)
        .args(&role.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Ctrl-C in the terminal is for us; we drain the child in order.
        .process_group(0)
        .spawn()
        .map_err(|error| Failure::internal(format!("can't start {}: {error}", role.program.display())))?;
    let mut pumps = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let lines = lines.clone();
        pumps.push(tokio::spawn(async move { pump(stdout, &lines).await }));
    }
    if let Some(stderr) = child.stderr.take() {
        let lines = lines.clone();
        pumps.push(tokio::spawn(async move { pump(stderr, &lines).await }));
    }
    Ok(Running { child, pumps })
}

/// Ready, and ours: another program at the same address does not take our token.
async fn probe(url: &str, state: &StateDir) -> Result<(), String> {
    let token = match state.token("worker.token") {
        Ok(Some(token)) => token,
        Ok(None) => return Err("it is starting".to_owned()),
        Err(error) => return Err(error.to_string()),
    };
    let client = WorkerClient::new(url, &token).map_err(|error| error.chain())?;
    match client.readyz().await {
        Ok(Readiness::Ready) => {}
        Ok(Readiness::NotReady(reason)) => return Err(reason),
        Err(Error::Unreachable { .. }) => return Err("it does not answer yet".to_owned()),
        Err(error) => return Err(error.chain()),
    }
    match client.list_sessions_page(&SessionFilter::default(), None).await {
        Ok(_) => Ok(()),
        Err(error) if error.status() == Some(401) => Err(format!("another program answers at {url}; give another address with --worker-listen")),
        Err(error) => Err(error.chain()),
    }
}

/// TERM, patience, KILL. The sandboxes go on.
async fn drain(running: &mut Running, stop: &mut Stop) {
    let Some(pid) = running.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) else { return };
    output::note("cynode: stopping; sandboxes keep running for the next 'cynode up' ('cynode down' ends them)");
    // It may have ended by itself meanwhile.
    kill_process(pid, Signal::TERM).ok();
    tokio::select! {
        _ = running.child.wait() => {}
        () = async { tokio::select! { () = sleep(DRAIN) => {}, () = stop.asked() => {} } } => {
            output::note("cynode: it did not stop in time; killing it");
            drop(running.child.kill().await);
        }
    }
    for pump in running.pumps.drain(..) {
        drop(timeout(Duration::from_secs(1), pump).await);
    }
}

/// The signals that ask us to stop.
struct Stop {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl Stop {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())?, hangup: signal(SignalKind::hangup())? })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_start_again_after_a_healthy_while() {
        let mut backoff = Backoff::new();
        let pauses: Vec<u128> = (0..8).map(|_| backoff.after(Duration::ZERO).as_millis()).collect();
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(backoff.after(Duration::from_secs(31)).as_millis(), 200);
    }
}
