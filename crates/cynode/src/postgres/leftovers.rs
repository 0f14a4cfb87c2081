//! Orphaned processes of a server: its supervisor or its postmaster was killed.
//!
//! They are recognized by their working directory: all processes of a server, and no others, work
//! in its data directory. A process id from a file may belong to another process by now.

use std::{
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::failure::{Failure, INTERNAL};

const POLL_INTERVAL: Duration = Duration::from_millis(20);

fn processes_in(data: &Path) -> Vec<u32> {
    let Ok(data) = fs_err::canonicalize(data) else {
        return Vec::new();
    };
    let processes = fs_err::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| *id != std::process::id() && works_in(&data, *id))
        .collect()
}

fn works_in(data: &Path, pid: u32) -> bool {
    // An error means that the process exited or belongs to another user.
    fs_err::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|directory| directory == data)
}

/// Whether a process belongs to the server of this data directory.
pub fn runs_in(data: &Path, pid: u32) -> bool {
    fs_err::canonicalize(data).is_ok_and(|data| works_in(&data, pid))
}

/// Ends the processes, gracefully if possible. Returns whether there were any. Also removes the pid
/// file: its number may belong to another process, and the next server would refuse to start.
pub fn end(data: &Path) -> Result<bool, Failure> {
    let found_any = !processes_in(data).is_empty();
    // A fast shutdown, then an immediate one, after which the server recovers from its log.
    for (signal, seconds) in [(Signal::INT, 20), (Signal::QUIT, 5), (Signal::KILL, 5)] {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let mut signalled = Vec::new();
        loop {
            let remaining = processes_in(data);
            if remaining.is_empty() {
                drop(fs_err::remove_file(data.join("postmaster.pid")));
                return Ok(found_any);
            }
            for id in remaining {
                if !signalled.contains(&id)
                    && let Some(pid) = i32::try_from(id).ok().and_then(Pid::from_raw)
                {
                    // The process may have exited.
                    kill_process(pid, signal).ok();
                    signalled.push(id);
                }
            }
            if Instant::now() > deadline {
                break;
            }
            sleep(POLL_INTERVAL);
        }
    }
    Err(Failure::new(
        INTERNAL,
        "still_running",
        format!(
            "PostgreSQL processes in {} do not exit: {:?}",
            data.display(),
            processes_in(data)
        ),
    )
    .remedy("Check the process list; the processes may be stuck in the kernel."))
}
