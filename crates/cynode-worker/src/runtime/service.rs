//! A private `podman system service`: started if there is no socket to use, and restarted when it
//! hangs.
//!
//! Containers don't depend on it (each has its own conmon), so killing it is always safe. Its
//! process is recorded, and a crashed worker leaves its service to the next one.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use cynode_service::files;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use super::RuntimeError;
use crate::process;

const START_TIMEOUT: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct ServiceOptions {
    /// The program and its global arguments: store, OCI runtime, cgroup manager.
    pub command: Vec<String>,
    /// Holds the socket, the process id and the log.
    pub directory: PathBuf,
}

#[derive(Debug)]
pub(super) struct Service {
    options: ServiceOptions,
    /// Held while the service is started or stopped; true once it is stopped for good.
    starting: Mutex<bool>,
}

#[derive(Serialize, Deserialize)]
struct ServiceRecord {
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

    /// Starts the service unless it answers.
    pub(super) async fn ensure(&self) -> Result<(), RuntimeError> {
        let closed = self.starting.lock().await;
        check_not_closed(*closed)?;
        if answers(&self.socket()).await {
            return Ok(());
        }
        self.kill()?;
        self.spawn().await
    }

    /// Kills the service and starts another.
    pub(super) async fn restart(&self, reason: &str) -> Result<(), RuntimeError> {
        let closed = self.starting.lock().await;
        check_not_closed(*closed)?;
        // A concurrent caller may have restarted it already.
        if answers(&self.socket()).await && reason != HUNG {
            return Ok(());
        }
        tracing::warn!(reason, "Restarting the private Podman service.");
        metrics::counter!("cynode_runtime_service_restarts_total").increment(1);
        self.kill()?;
        self.spawn().await
    }

    /// Stops the service for good: later calls don't restart it.
    pub(super) async fn close(&self) -> Result<(), RuntimeError> {
        let mut closed = self.starting.lock().await;
        *closed = true;
        self.kill()
    }

    async fn spawn(&self) -> Result<(), RuntimeError> {
        let unavailable = |operation: &str, error: &dyn std::fmt::Display| {
            RuntimeError::Unavailable(format!("{operation}: {error}"))
        };
        fs_err::create_dir_all(&self.options.directory)
            .map_err(|error| unavailable("creating the service's directory", &error))?;
        let log = self.options.directory.join("service.log");
        let log = fs_err::File::create(&log)
            .map_err(|error| unavailable("opening the service's log", &error))?
            .into_parts()
            .0;
        let errors = log
            .try_clone()
            .map_err(|error| unavailable("opening the service's log", &error))?;
        let (program, arguments) = self.options.command.split_first().ok_or_else(|| {
            RuntimeError::Unavailable("no podman program is configured".to_owned())
        })?;
        drop(fs_err::remove_file(self.socket()));
        let mut command = process::command(program);
        command
            .args(arguments)
            .args(["system", "service", "--time", "0"])
            .arg(format!("unix://{}", self.socket().display()));
        // Container monitors inherit this directory and write a file here when a sandbox runs out
        // of memory.
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
                let recorded = ServiceRecord {
                    pid,
                    start_time: start_time.unwrap_or(0),
                };
                files::replace(&self.record(), &serde_json::to_vec(&recorded)?)
            });
            // An unrecorded service would never be found again.
            if let Err(error) = recorded {
                drop(child.kill().await);
                return Err(unavailable("recording the service's process", &error));
            }
        }
        let deadline = tokio::time::Instant::now() + START_TIMEOUT;
        loop {
            if answers(&self.socket()).await {
                // Reap it when it exits.
                tokio::spawn(async move { child.wait().await });
                return Ok(());
            }
            if let Ok(Some(status)) = child.try_wait() {
                let log = fs_err::read_to_string(self.options.directory.join("service.log"))
                    .unwrap_or_default();
                return Err(RuntimeError::Unavailable(format!(
                    "podman's service exited at once ({status}): {}",
                    log.trim()
                )));
            }
            if tokio::time::Instant::now() >= deadline {
                drop(child.start_kill());
                return Err(RuntimeError::Timeout {
                    call: "start of podman's service",
                    limit: START_TIMEOUT,
                });
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Kills the recorded process, if it is still the same. The record is retained while that is
    /// unknown.
    fn kill(&self) -> Result<(), RuntimeError> {
        let unknown = |error: &std::io::Error| {
            RuntimeError::Unavailable(format!("finding the service's earlier process: {error}"))
        };
        let recorded = match fs_err::read(self.record()) {
            Ok(bytes) => serde_json::from_slice::<ServiceRecord>(&bytes).ok(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(unknown(&error)),
        };
        if let Some(ServiceRecord { pid, start_time }) = recorded
            && process::start_time(pid).map_err(|error| unknown(&error))? == Some(start_time)
        {
            process::kill(pid, 9);
        }
        drop(fs_err::remove_file(self.record()));
        drop(fs_err::remove_file(self.socket()));
        Ok(())
    }
}

fn check_not_closed(closed: bool) -> Result<(), RuntimeError> {
    if closed {
        Err(RuntimeError::Unavailable(
            "the worker is shutting down".to_owned(),
        ))
    } else {
        Ok(())
    }
}

/// A restart for this reason is never skipped.
pub(super) const HUNG: &str = "it hangs";

/// Returns whether a service answers `_ping` on the socket.
pub(super) async fn answers(socket: &Path) -> bool {
    if !socket.exists() {
        return false;
    }
    let Ok(client) = reqwest::Client::builder()
        .unix_socket(socket)
        .timeout(PING_TIMEOUT)
        .build()
    else {
        return false;
    };
    client
        .get("http://podman/_ping")
        .send()
        .await
        .is_ok_and(|response| response.status().is_success())
}
