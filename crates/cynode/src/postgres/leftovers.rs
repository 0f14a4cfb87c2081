//! Processes of a server that nobody watches any more: its supervisor was killed, or it was, and left its children.
//!
//! They are known by where they are: every process of a server works in its data directory and nobody else does. A process id
//! in a file would not do: it may be another process's by now.

use std::{
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::failure::{Failure, INTERNAL};

const POLL: Duration = Duration::from_millis(20);

fn all_in(data: &Path) -> Vec<u32> {
    let Ok(data) = fs_err::canonicalize(data) else {
        return Vec::new();
    };
    let processes = fs_err::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| *id != std::process::id() && is_in(&data, *id))
        .collect()
}

fn is_in(data: &Path, pid: u32) -> bool {
    // Gone meanwhile, or somebody else's: not one of these.
    fs_err::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|directory| directory == data)
}

/// Whether this process belongs to the server of this data directory.
pub fn runs_in(data: &Path, pid: u32) -> bool {
    fs_err::canonicalize(data).is_ok_and(|data| is_in(&data, pid))
}

/// Ends all of them, in order while there is time. Says whether there were any. The file in which a dead server named its process
/// is removed: the number may be somebody else's now, and then the next server would refuse to start.
pub fn end(data: &Path) -> Result<bool, Failure> {
    let found = !all_in(data).is_empty();
    // A fast shutdown, then an immediate one; the log is replayed after that.
    for (signal, patience) in [(Signal::INT, 20), (Signal::QUIT, 5), (Signal::KILL, 5)] {
        let deadline = Instant::now() + Duration::from_secs(patience);
        let mut told = Vec::new();
        loop {
            let left = all_in(data);
            if left.is_empty() {
                drop(fs_err::remove_file(data.join("postmaster.pid")));
                return Ok(found);
            }
            for id in left {
                if !told.contains(&id)
                    && let Some(pid) = i32::try_from(id).ok().and_then(Pid::from_raw)
                {
                    // It may have ended in this moment.
                    kill_process(pid, signal).ok();
                    told.push(id);
                }
            }
            if Instant::now() > deadline {
                break;
            }
            sleep(POLL);
        }
    }
    Err(Failure::new(
        INTERNAL,
        "still_running",
        format!(
            "processes of PostgreSQL in {} do not end: {:?}",
            data.display(),
            all_in(data)
        ),
    )
    .remedy("See the process list; they may be stuck in the kernel."))
}
