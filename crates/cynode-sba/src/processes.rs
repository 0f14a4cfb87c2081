//! Process ownership: the children of process 1 and their descendants.
//!
//! Every direct child of process 1 is either owned (a subreaper, a file operation) or an orphan
//! whose subreaper was killed. Orphans belong to no exec and are killed.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    time::Duration,
};

use tokio::sync::{Notify, oneshot};

use crate::sys::{self, WaitOutcome};

#[derive(Debug, Default)]
pub(crate) struct Processes {
    owned: RefCell<HashMap<i32, Option<oneshot::Sender<i32>>>>,
    reaped: Notify,
    /// Counts kills of the whole sandbox, so that an exec can tell why it ended.
    kill_all_count: Cell<u64>,
}

/// Time from killing a tree to killing the whole sandbox.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(1);

impl Processes {
    /// Registers a child as owned; the receiver gets its wait status.
    pub(crate) fn adopt(&self, pid: i32) -> oneshot::Receiver<i32> {
        let (sender, receiver) = oneshot::channel();
        self.owned.borrow_mut().insert(pid, Some(sender));
        receiver
    }

    pub(crate) fn is_owned(&self, pid: i32) -> bool {
        self.owned.borrow().contains_key(&pid)
    }

    /// Reaps all exited children.
    pub(crate) fn reap(&self) {
        while let WaitOutcome::Child(pid, status) = sys::wait_any(false) {
            if let Some(Some(sender)) = self.owned.borrow_mut().remove(&pid) {
                let _sent = sender.send(status);
            }
        }
        self.reaped.notify_waiters();
    }

    pub(crate) fn kill_all_count(&self) -> u64 {
        self.kill_all_count.get()
    }

    /// Sends a signal to every process in the sandbox except this one, without forking.
    pub(crate) fn signal_all(&self, signal: i32) {
        if signal == libc::SIGKILL {
            self.kill_all_count.set(self.kill_all_count.get() + 1);
        }
        if std::process::id() == 1 {
            // ESRCH means that there is no other process.
            drop(sys::kill(-1, signal));
        } else {
            // Without its own pid namespace (in tests): signals only descendants.
            for pid in descendants(&process_table(), own_pid()) {
                drop(sys::kill(pid, signal));
            }
        }
    }

    /// Kills the subreaper and then every orphan, until none is left. Hostile code can fork faster
    /// than this loop kills, so after a timeout the whole sandbox is killed.
    pub(crate) async fn end_tree(&self, subreaper: i32) {
        if self.is_owned(subreaper) {
            drop(sys::kill(subreaper, libc::SIGKILL));
        }
        let deadline = tokio::time::Instant::now() + SWEEP_TIMEOUT;
        let mut is_killing_all = false;
        loop {
            let reaped = self.reaped.notified();
            self.reap();
            let gone = !self.is_owned(subreaper);
            if gone && self.kill_orphans() == 0 {
                return;
            }
            if !is_killing_all && tokio::time::Instant::now() >= deadline {
                is_killing_all = true;
                self.signal_all(libc::SIGKILL);
            }
            if is_killing_all && tokio::time::Instant::now() >= deadline + 3 * SWEEP_TIMEOUT {
                // Uninterruptible sleep: the worker's own timeout ends the container.
                return;
            }
            drop(tokio::time::timeout(Duration::from_millis(5), reaped).await);
        }
    }

    /// Kills every child that is not owned, and returns their number.
    fn kill_orphans(&self) -> usize {
        let me = own_pid();
        let owned = self.owned.borrow();
        let orphans: Vec<i32> = process_table()
            .into_iter()
            .filter(|process| {
                process.parent == me && !process.zombie && !owned.contains_key(&process.pid)
            })
            .map(|process| process.pid)
            .collect();
        for pid in &orphans {
            drop(sys::kill(*pid, libc::SIGKILL));
        }
        orphans.len()
    }

    /// Signals all descendants of a subreaper, but not the subreaper itself.
    pub(crate) fn signal_tree(subreaper: i32, signal: i32) {
        for pid in descendants(&process_table(), subreaper) {
            drop(sys::kill(pid, signal));
        }
    }
}

/// The processes above this one: those that may tell it to end. 0 stands for processes outside of
/// the pid namespace.
pub(crate) fn ancestors() -> HashSet<u32> {
    let table = process_table();
    let mut ancestors = HashSet::from([0, 1]);
    let mut at = own_pid();
    while let Some(process) = table.iter().find(|process| process.pid == at) {
        at = process.parent;
        if !ancestors.insert(at.unsigned_abs()) {
            break;
        }
    }
    ancestors
}

fn own_pid() -> i32 {
    std::process::id().cast_signed()
}

struct Process {
    pid: i32,
    parent: i32,
    zombie: bool,
}

/// All visible processes.
fn process_table() -> Vec<Process> {
    let Ok(directory) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    directory
        .filter_map(|entry| {
            let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
            // "pid (name) state ppid …": the name may contain parentheses, so search from the end.
            let end = stat.iter().rposition(|byte| *byte == b')')?;
            let mut fields = std::str::from_utf8(&stat[end + 1..])
                .ok()?
                .split_ascii_whitespace();
            let state = fields.next()?;
            Some(Process {
                pid,
                parent: fields.next()?.parse().ok()?,
                zombie: state == "Z" || state == "X",
            })
        })
        .collect()
}

fn descendants(process_table: &[Process], root: i32) -> Vec<i32> {
    let mut members = HashSet::from([root]);
    loop {
        let before = members.len();
        for process in process_table {
            if members.contains(&process.parent) {
                members.insert(process.pid);
            }
        }
        if members.len() == before {
            break;
        }
    }
    members.remove(&root);
    members.into_iter().collect()
}
