//! Supervises the roles: starts them in order of their dependencies and stops them in reverse
//! order.
//!
//! A role waits only for the first readiness of its dependency. Later each role is restarted
//! independently, and its dependents must tolerate its absence.

use std::{process::ExitCode, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::Instant,
};

use super::{
    child::{RoleEnd, RoleKeeper, StopRequest},
    logs::LogSink,
    role::Role,
};
use crate::{
    failure::Failure,
    output,
    state::{Endpoints, StateDir},
};

/// How long the roles may take to become ready for the first time.
pub const START_TIMEOUT: Duration = Duration::from_secs(110);

/// The index of a role, and how it ended.
type KeeperResult = (usize, Result<RoleEnd, Failure>);

struct Supervisor {
    roles: Vec<Arc<Role>>,
    stops: Vec<watch::Sender<StopRequest>>,
    ready: Vec<watch::Receiver<bool>>,
    tasks: JoinSet<KeeperResult>,
}

/// Runs until a signal requests a stop, a role that ends the stack exits cleanly, or a role fails
/// to become ready.
pub async fn run(
    roles: Vec<Role>,
    endpoints: &Endpoints,
    state: &StateDir,
    to_stderr: bool,
) -> Result<ExitCode, Failure> {
    let mut signals = StopSignals::new()?;
    let mut supervisor = Supervisor {
        roles: Vec::new(),
        stops: Vec::new(),
        ready: Vec::new(),
        tasks: JoinSet::new(),
    };
    let deadline = Instant::now() + START_TIMEOUT;
    for role in roles {
        let role = Arc::new(role);
        let log = state.log(&format!("{}.log", role.name));
        let (stop_sender, stop) = watch::channel(StopRequest::None);
        let (ready_sender, ready) = watch::channel(false);
        let needs = role
            .needs
            .and_then(|name| supervisor.position(name))
            .map(|index| supervisor.ready[index].clone());
        let keeper = RoleKeeper {
            role: Arc::clone(&role),
            state: state.clone(),
            lines: Arc::new(Mutex::new(LogSink::open(role.name, &log, to_stderr)?)),
            log: log.display().to_string(),
            needs,
            ready: ready_sender,
            stop,
            deadline,
            to_stderr,
        };
        let index = supervisor.roles.len();
        supervisor
            .tasks
            .spawn(async move { (index, keeper.keep().await) });
        supervisor.roles.push(role);
        supervisor.stops.push(stop_sender);
        supervisor.ready.push(ready);
    }
    let result = supervisor.watch(&mut signals, endpoints, state).await;
    // The file must only exist while the roles are ready.
    state.remove_endpoints();
    supervisor.drain(&mut signals).await;
    result
}

impl Supervisor {
    fn position(&self, name: &str) -> Option<usize> {
        self.roles.iter().position(|role| role.name == name)
    }

    async fn watch(
        &mut self,
        signals: &mut StopSignals,
        endpoints: &Endpoints,
        state: &StateDir,
    ) -> Result<ExitCode, Failure> {
        let mut all_ready = false;
        let mut readiness = std::pin::pin!(wait_for_all(self.ready.clone()));
        loop {
            tokio::select! {
                biased;
                () = signals.recv() => {
                    let sandboxes = if self.position("worker").is_some() {
                        "; sandboxes keep running for the next 'cynode up' \
                         ('cynode down' ends them)"
                    } else {
                        ""
                    };
                    output::message(&format!("cynode: stopping{sandboxes}"));
                    return Ok(ExitCode::SUCCESS);
                }
                ended = self.tasks.join_next() => match ended {
                    Some(Ok((index, Ok(RoleEnd::Exited)))) => {
                        output::message(&format!("cynode: {} has stopped", self.roles[index].name));
                        return Ok(ExitCode::SUCCESS);
                    }
                    Some(Ok((_, Ok(RoleEnd::Stopped)))) => {}
                    Some(Ok((_, Err(failure)))) => return Err(failure),
                    Some(Err(error)) => {
                        return Err(Failure::internal(format!("supervision failed: {error}")));
                    }
                    None => return Ok(ExitCode::SUCCESS),
                },
                () = &mut readiness, if !all_ready => {
                    all_ready = true;
                    state.write_endpoints(endpoints)?;
                    for role in &self.roles {
                        let Role { name, address, .. } = role.as_ref();
                        output::message(&format!("cynode: {name} is ready at {address}"));
                    }
                }
            }
        }
    }

    /// Stops the roles; dependencies of others come last.
    async fn drain(&mut self, signals: &mut StopSignals) {
        for is_needed in [false, true] {
            let indices: Vec<usize> = (0..self.roles.len())
                .filter(|index| self.is_needed(*index) == is_needed)
                .collect();
            for index in &indices {
                self.stops[*index].send_replace(StopRequest::Graceful);
            }
            // A keeper that ends drops its receiver.
            while indices
                .iter()
                .any(|index| self.stops[*index].receiver_count() > 0)
            {
                tokio::select! {
                    ended = self.tasks.join_next() => if ended.is_none() { break },
                    () = signals.recv() => {
                        for index in &indices {
                            self.stops[*index].send_replace(StopRequest::Immediate);
                        }
                    }
                }
            }
        }
    }

    fn is_needed(&self, index: usize) -> bool {
        self.roles
            .iter()
            .any(|role| role.needs == Some(self.roles[index].name))
    }
}

async fn wait_for_all(ready: Vec<watch::Receiver<bool>>) {
    for mut role in ready {
        if role.wait_for(|ready| *ready).await.is_err() {
            // The role failed, and its keeper reports that.
            std::future::pending::<()>().await;
        }
    }
}

/// The signals that stop `up`.
struct StopSignals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl StopSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
