//! The private server for as long as one command needs it, when no `up` runs it.

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

const STARTUP: Duration = Duration::from_mins(1);

/// Ends when dropped.
#[derive(Debug)]
pub struct Temporary {
    child: Child,
}

impl Temporary {
    /// Starts it and waits until it takes connections. The caller holds the lock of `up`.
    #[expect(clippy::disallowed_methods, reason = "starts this program's own role")]
    pub fn start(state: &StateDir) -> Result<Self, Failure> {
        let server = Server::of(state);
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
        let deadline = Instant::now() + STARTUP;
        while !server.is_ready(started.child.id()) {
            let ended = started.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let how = ended.map_or_else(
                    || "is not ready in time".to_owned(),
                    |status| format!("ended ({status})"),
                );
                return Err(
                    Failure::new(INTERNAL, "postgres_failed", format!("PostgreSQL {how}"))
                        .remedy(format!("See {}.", state.log("postgres.log").display())),
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(started)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::INT).ok();
        }
        drop(self.child.wait());
    }
}
