//! `up --detach`: runs `up` in the background and waits until it is ready or has failed.

use std::{process::Stdio, time::Duration};

use fs_err::os::unix::fs::OpenOptionsExt;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep, timeout},
};

use super::stack::arguments;
use crate::{
    cli::{Globals, Section, Settings},
    failure::{Failure, INTERNAL, USAGE},
    output::{self, Progress},
    state::{Endpoints, StateDir},
};

/// Longer than the start timeout of the background process.
const DETACH_TIMEOUT: Duration = Duration::from_mins(2);
const MAX_TAIL_LINES: usize = 30;
/// Longer than the drain timeout of a role.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);

#[expect(
    clippy::disallowed_methods,
    reason = "the one place that starts this program in the background"
)]
pub async fn run(
    globals: &Globals,
    settings: &Settings,
    worker_only: bool,
    state: &StateDir,
) -> Result<Endpoints, Failure> {
    let log = state.log("up.log");
    let file = fs_err::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&log)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["up", "--background"])
        .args(worker_only.then_some("--worker-only"))
        .args(arguments(globals, state, settings, Section::Worker)?)
        .args(
            settings
                .overrides(Section::Orchestrator)
                .into_iter()
                .flat_map(|(key, value)| {
                    ["--set".to_owned(), format!("orchestrator.{key}={value}")]
                }),
        )
        .stdin(Stdio::null())
        .stdout(file.try_clone()?.into_parts().0)
        .stderr(file.into_parts().0)
        .spawn()?;
    let progress = Progress::start("starting CyNode");
    let deadline = Instant::now() + DETACH_TIMEOUT;
    loop {
        if let Some(status) = child.try_wait()? {
            drop(progress);
            print_tail(&log);
            let exit = if status.code() == Some(i32::from(USAGE)) {
                USAGE
            } else {
                INTERNAL
            };
            return Err(Failure::new(
                exit,
                "not_ready",
                format!("CyNode did not start ({status})"),
            )
            .remedy(format!("See the log lines above and {}.", log.display())));
        }
        if let Some(endpoints) = state
            .endpoints()?
            .filter(|endpoints| Some(endpoints.pid) == child.id())
        {
            return Ok(endpoints);
        }
        if Instant::now() > deadline {
            drop(progress);
            stop(&mut child).await;
            print_tail(&log);
            return Err(Failure::new(
                INTERNAL,
                "not_ready",
                format!("CyNode is not ready after {} s", DETACH_TIMEOUT.as_secs()),
            )
            .remedy("Run 'cynode doctor' to check this machine."));
        }
        tokio::select! {
            () = sleep(Duration::from_millis(50)) => {}
            _ = tokio::signal::ctrl_c() => {
                drop(progress);
                output::message("cynode: interrupted; stopping CyNode");
                stop(&mut child).await;
                return Err(Failure::reported(130));
            }
        }
    }
}

async fn stop(child: &mut Child) {
    if let Some(pid) = child
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .and_then(Pid::from_raw)
    {
        kill_process(pid, Signal::TERM).ok();
    }
    if timeout(STOP_TIMEOUT, child.wait()).await.is_err() {
        drop(child.kill().await);
    }
}

fn print_tail(log: &std::path::Path) {
    let text = fs_err::read(log)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(MAX_TAIL_LINES)..] {
        output::message(line);
    }
}
