//! The roles together: started in order, ready when all are, stopped in the reverse order.
//!
//! Who depends on another waits for that one's first readiness and no longer: later each is restarted for itself, and those that
//! need it get over its absence.

use std::{process::ExitCode, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::Instant,
};

use super::{
    child::{Ended, Keeper, Stopping},
    logs::Lines,
    role::Role,
};
use crate::{
    failure::Failure,
    output,
    state::{Endpoints, StateDir},
};

/// How long it may take until everything is ready for the first time.
pub const STARTUP: Duration = Duration::from_secs(110);

type Kept = (usize, Result<Ended, Failure>);

struct Team {
    roles: Vec<Arc<Role>>,
    stops: Vec<watch::Sender<Stopping>>,
    ready: Vec<watch::Receiver<bool>>,
    tasks: JoinSet<Kept>,
}

/// Ends when a signal asks for it, when a role whose end is the end of all ends cleanly, or when one never becomes ready.
pub async fn run(
    roles: Vec<Role>,
    endpoints: &Endpoints,
    state: &StateDir,
    to_stderr: bool,
) -> Result<ExitCode, Failure> {
    let mut stop = Stop::new()?;
    let mut team = Team {
        roles: Vec::new(),
        stops: Vec::new(),
        ready: Vec::new(),
        tasks: JoinSet::new(),
    };
    let deadline = Instant::now() + STARTUP;
    for role in roles {
        let role = Arc::new(role);
        let log = state.log(&format!("{}.log", role.name));
        let (stop_sender, stop) = watch::channel(Stopping::No);
        let (ready_sender, ready) = watch::channel(false);
        let needs = role
            .needs
            .and_then(|name| team.position(name))
            .map(|index| team.ready[index].clone());
        let keeper = Keeper {
            role: Arc::clone(&role),
            state: state.clone(),
            lines: Arc::new(Mutex::new(Lines::open(role.name, &log, to_stderr)?)),
            log: log.display().to_string(),
            needs,
            ready: ready_sender,
            stop,
            deadline,
            to_stderr,
        };
        let index = team.roles.len();
        team.tasks
            .spawn(async move { (index, keeper.keep().await) });
        team.roles.push(role);
        team.stops.push(stop_sender);
        team.ready.push(ready);
    }
    let result = team.watch(&mut stop, endpoints, state).await;
    // Who finds the file may trust it.
    state.remove_endpoints();
    team.drain(&mut stop).await;
    result
}

impl Team {
    fn position(&self, name: &str) -> Option<usize> {
        self.roles.iter().position(|role| role.name == name)
    }

    async fn watch(
        &mut self,
        stop: &mut Stop,
        endpoints: &Endpoints,
        state: &StateDir,
    ) -> Result<ExitCode, Failure> {
        let mut all_ready = false;
        let everybody = self.ready.clone();
        let mut becoming = std::pin::pin!(everyone(everybody));
        loop {
            tokio::select! {
                biased;
                () = stop.asked() => {
                    let sandboxes = if self.position("worker").is_some() { "; sandboxes keep running for the next 'cynode up' ('cynode down' ends them)" } else { "" };
                    output::note(&format!("cynode: stopping{sandboxes}"));
                    return Ok(ExitCode::SUCCESS);
                }
                ended = self.tasks.join_next() => match ended {
                    Some(Ok((index, Ok(Ended::ByItself)))) => {
                        output::note(&format!("cynode: {} has stopped", self.roles[index].name));
                        return Ok(ExitCode::SUCCESS);
                    }
                    Some(Ok((_, Ok(Ended::Asked)))) => {}
                    Some(Ok((_, Err(failure)))) => return Err(failure),
                    Some(Err(error)) => return Err(Failure::internal(format!("a role is no longer watched: {error}"))),
                    None => return Ok(ExitCode::SUCCESS),
                },
                () = &mut becoming, if !all_ready => {
                    all_ready = true;
                    state.write_endpoints(endpoints)?;
                    for role in &self.roles {
                        output::note(&format!("cynode: {} is ready at {}", role.name, role.place));
                    }
                }
            }
        }
    }

    /// Those that others need come last.
    async fn drain(&mut self, stop: &mut Stop) {
        for is_needed in [false, true] {
            let these: Vec<usize> = (0..self.roles.len())
                .filter(|index| self.is_needed(*index) == is_needed)
                .collect();
            for index in &these {
                self.stops[*index].send_replace(Stopping::InOrder);
            }
            // A task's end closes its side of the channel.
            while these
                .iter()
                .any(|index| self.stops[*index].receiver_count() > 0)
            {
                tokio::select! {
                    ended = self.tasks.join_next() => if ended.is_none() { break },
                    () = stop.asked() => {
                        for index in &these {
                            self.stops[*index].send_replace(Stopping::AtOnce);
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

async fn everyone(ready: Vec<watch::Receiver<bool>>) {
    for mut one in ready {
        if one.wait_for(|ready| *ready).await.is_err() {
            // It ended before it was ready, and says so itself.
            std::future::pending::<()>().await;
        }
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
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
