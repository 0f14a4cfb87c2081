//! The private server for the duration of one command, when `cynode up` is not running.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use rustix::process::{Pid, Signal, kill_process};

use super::Server;
use crate::{
    failure::{Failure, INTERNAL},
    state::StateDir,
};

const START_TIMEOUT: Duration = Duration::from_mins(1);

/// A private server that shuts down when dropped.
#[derive(Debug)]
pub struct TemporaryServer {
    child: Child,
}

impl TemporaryServer {
    /// Starts the server and waits until it accepts connections. The caller must hold the
    /// lock of `up`.
    #[expect(clippy::disallowed_methods, reason = "starts a role of this program")]
    pub fn start(state: &StateDir) -> Result<Self, Failure> {
        let server = Server::new(state);
        let log = fs_err::OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(state.log("postgres.log"))?
            .into_parts()
            .0;
        let child = Command::new(std::env::current_exe()?)
            .arg("postgres")
            .arg("--state-dir")
            .arg(state.path())
            .arg("--parent")
            .arg(std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let mut started = Self { child };
        let deadline = Instant::now() + START_TIMEOUT;
        while !server.is_ready(started.child.id()) {
            let ended = started.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let problem = ended.map_or_else(
                    || format!("is not ready after {} s", START_TIMEOUT.as_secs()),
                    |status| format!("exited ({status})"),
                );
                return Err(Failure::new(
                    INTERNAL,
                    "postgres_failed",
                    format!("PostgreSQL {problem}"),
                )
                .remedy(format!("See {}.", state.log("postgres.log").display())));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(started)
    }
}

impl Drop for TemporaryServer {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::INT).ok();
        }
        drop(self.child.wait());
    }
}
