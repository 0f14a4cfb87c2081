//! A private `podman system service`: started when there is no socket to use, killed and started again when it hangs.
//!
//! Containers do not depend on it (each lives under its own conmon), so killing it is always safe. Its process id is
//! written down with its start time, so that a worker that died leaves its service to the next one.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use cynode_service::files;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use super::Error;
use crate::process;

const START: Duration = Duration::from_secs(30);
const PING: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct ServiceOptions {
    /// The program and its global arguments: store, OCI runtime, cgroup manager.
    pub command: Vec<String>,
    /// Socket, process id and log live here.
    pub directory: PathBuf,
}

#[derive(Debug)]
pub(super) struct Service {
    options: ServiceOptions,
    /// Held while it is started or stopped; says whether it was ended for good.
    starting: Mutex<bool>,
}

#[derive(Serialize, Deserialize)]
struct Recorded {
    pid: i32,
    start_time: u64,
}

impl Service {
    pub(super) fn new(options: ServiceOptions) -> Self {
        Self {
            options,
            starting: Mutex::new(false),
        }
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.options.directory.join("podman.sock")
    }

    fn record(&self) -> PathBuf {
        self.options.directory.join("service.json")
    }

    /// Starts it unless it answers.
    pub(super) async fn ensure(&self) -> Result<(), Error> {
        let closed = self.starting.lock().await;
        refuse_when(*closed)?;
        if answers(&self.socket()).await {
            return Ok(());
        }
        self.kill()?;
        self.spawn().await
    }

    /// Kills it, whatever it does, and starts another.
    pub(super) async fn restart(&self, why: &str) -> Result<(), Error> {
        let closed = self.starting.lock().await;
        refuse_when(*closed)?;
        // Another caller may have done it while this one waited.
        if answers(&self.socket()).await && why != HUNG {
            return Ok(());
        }
        tracing::warn!(why, "Restarting the private Podman service.");
        metrics::counter!("cynode_runtime_service_restarts_total").increment(1);
        self.kill()?;
        self.spawn().await
    }

    /// Ends it for good: whoever still asks does not start it again.
    pub(super) async fn close(&self) -> Result<(), Error> {
        let mut closed = self.starting.lock().await;
        *closed = true;
        self.kill()
    }

    async fn spawn(&self) -> Result<(), Error> {
        let unavailable = |what: &str, error: &dyn std::fmt::Display| {
            Error::Unavailable(format!("{what}: {error}"))
        };
        fs_err::create_dir_all(&self.options.directory)
            .map_err(|error| unavailable("preparing its directory", &error))?;
        let log = self.options.directory.join("service.log");
        let log = fs_err::File::create(&log)
            .map_err(|error| unavailable("opening its log", &error))?
            .into_parts()
            .0;
        let errors = log
            .try_clone()
            .map_err(|error| unavailable("opening its log", &error))?;
        let (program, arguments) = self
            .options
            .command
            .split_first()
            .ok_or_else(|| Error::Unavailable("no podman program is configured".to_owned()))?;
        drop(fs_err::remove_file(self.socket()));
        let mut command = process::command(program);
        command
            .args(arguments)
            .args(["system", "service", "--time", "0"])
            .arg(format!("unix://{}", self.socket().display()));
        // Monitors of containers run where the service does, and note there that a sandbox ran out of memory.
        command.current_dir(&self.options.directory);
        command
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .process_group(0)
            .kill_on_drop(false);
        let mut child = command
            .spawn()
            .map_err(|error| unavailable("starting podman", &error))?;
        if let Some(pid) = child.id().map(u32::cast_signed) {
            let recorded = process::start_time(pid).and_then(|start_time| {
                let recorded = Recorded {
                    pid,
                    start_time: start_time.unwrap_or(0),
                };
                files::replace(&self.record(), &serde_json::to_vec(&recorded)?)
            });
            // One that is not written down would never be found again.
            if let Err(error) = recorded {
                drop(child.kill().await);
                return Err(unavailable("recording its process", &error));
            }
        }
        let deadline = tokio::time::Instant::now() + START;
        loop {
            if answers(&self.socket()).await {
                // Reap it when it ends.
                tokio::spawn(async move { child.wait().await });
                return Ok(());
            }
            if let Ok(Some(status)) = child.try_wait() {
                let said = fs_err::read_to_string(self.options.directory.join("service.log"))
                    .unwrap_or_default();
                return Err(Error::Unavailable(format!(
                    "podman's service ended at once ({status}): {}",
                    said.trim()
                )));
            }
            if tokio::time::Instant::now() >= deadline {
                drop(child.start_kill());
                return Err(Error::Timeout {
                    call: "start of podman's service",
                    limit: START,
                });
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Kills the recorded process, if it is still that process. The record stays as long as that is not known.
    fn kill(&self) -> Result<(), Error> {
        let unknown = |error: &std::io::Error| {
            Error::Unavailable(format!("finding its old process: {error}"))
        };
        let recorded = match fs_err::read(self.record()) {
            Ok(bytes) => serde_json::from_slice::<Recorded>(&bytes).ok(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(unknown(&error)),
        };
        if let Some(Recorded { pid, start_time }) = recorded
            && process::start_time(pid).map_err(|error| unknown(&error))? == Some(start_time)
        {
            process::kill(pid, 9);
        }
        drop(fs_err::remove_file(self.record()));
        drop(fs_err::remove_file(self.socket()));
        Ok(())
    }
}

fn refuse_when(closed: bool) -> Result<(), Error> {
    if closed {
        Err(Error::Unavailable("the worker is stopping".to_owned()))
    } else {
        Ok(())
    }
}

/// The reason for a restart that is never skipped.
pub(super) const HUNG: &str = "it hangs";

/// Whether something answers `_ping` on the socket.
pub(super) async fn answers(socket: &Path) -> bool {
    if !socket.exists() {
        return false;
    }
    let Ok(client) = reqwest::Client::builder()
        .unix_socket(socket)
        .timeout(PING)
        .build()
    else {
        return false;
    };
    matches!(client.get("http://podman/_ping").send().await, Ok(response) if response.status().is_success())
}
