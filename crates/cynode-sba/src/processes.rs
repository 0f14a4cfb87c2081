//! Who is whose: the children of process 1, and what hangs below them.
//!
//! Every direct child of process 1 is either owned (a subreaper, a file operation) or an orphan whose subreaper was
//! killed; orphans belong to no exec and are killed on sight.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    time::Duration,
};

use tokio::sync::{Notify, oneshot};

use crate::sys::{self, Waited};

#[derive(Debug, Default)]
pub(crate) struct Processes {
    owned: RefCell<HashMap<i32, Option<oneshot::Sender<i32>>>>,
    reaped: Notify,
    /// Counts the times that everything was killed, so that an exec can tell what ended it.
    killed_all: Cell<u64>,
}

/// From the first KILL of a tree to the KILL of everything.
const SWEEP_LIMIT: Duration = Duration::from_secs(1);

impl Processes {
    /// Takes a child into ownership; the receiver gets its wait status.
    pub(crate) fn own(&self, pid: i32) -> oneshot::Receiver<i32> {
        let (sender, receiver) = oneshot::channel();
        self.owned.borrow_mut().insert(pid, Some(sender));
        receiver
    }

    pub(crate) fn is_owned(&self, pid: i32) -> bool {
        self.owned.borrow().contains_key(&pid)
    }

    /// Reaps all that has ended.
    pub(crate) fn reap(&self) {
        while let Waited::Child(pid, status) = sys::wait_any(false) {
            if let Some(Some(sender)) = self.owned.borrow_mut().remove(&pid) {
                let _told = sender.send(status);
            }
        }
        self.reaped.notify_waiters();
    }

    pub(crate) fn killed_all(&self) -> u64 {
        self.killed_all.get()
    }

    /// Sends a signal to everything in the sandbox but this process, without needing a fork.
    pub(crate) fn signal_all(&self, signal: i32) {
        if signal == libc::SIGKILL {
            self.killed_all.set(self.killed_all.get() + 1);
        }
        if std::process::id() == 1 {
            // ESRCH: there was nobody.
            drop(sys::kill(-1, signal));
        } else {
            // Not in a pid namespace of its own (a test): only what is below this process.
            for pid in descendants(&table(), own_pid()) {
                drop(sys::kill(pid, signal));
            }
        }
    }

    /// Kills the subreaper and then every orphan, until none is left. Hostile code can fork faster than this loop kills;
    /// past a limit everything in the sandbox is killed.
    pub(crate) async fn end_tree(&self, subreaper: i32) {
        if self.is_owned(subreaper) {
            drop(sys::kill(subreaper, libc::SIGKILL));
        }
        let deadline = tokio::time::Instant::now() + SWEEP_LIMIT;
        let mut everything = false;
        loop {
            let reaped = self.reaped.notified();
            self.reap();
            let gone = !self.is_owned(subreaper);
            if gone && self.kill_orphans() == 0 {
                return;
            }
            if !everything && tokio::time::Instant::now() >= deadline {
                everything = true;
                self.signal_all(libc::SIGKILL);
            }
            if everything && tokio::time::Instant::now() >= deadline + 3 * SWEEP_LIMIT {
                // Uninterruptible sleep; the worker's own deadline ends the container.
                return;
            }
            drop(tokio::time::timeout(Duration::from_millis(5), reaped).await);
        }
    }

    /// Kills every child that nobody owns; says how many there were.
    fn kill_orphans(&self) -> usize {
        let me = own_pid();
        let owned = self.owned.borrow();
        let orphans: Vec<i32> = table()
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

    /// Signals all that hangs below a subreaper, not the subreaper itself.
    pub(crate) fn signal_tree(subreaper: i32, signal: i32) {
        for pid in descendants(&table(), subreaper) {
            drop(sys::kill(pid, signal));
        }
    }
}

fn own_pid() -> i32 {
    std::process::id().cast_signed()
}

struct Process {
    pid: i32,
    parent: i32,
    zombie: bool,
}

/// All processes that can be seen.
fn table() -> Vec<Process> {
    let Ok(directory) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    directory
        .filter_map(|entry| {
            let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
            // "pid (name) state ppid …": the name may hold anything, parentheses too, so look from its end.
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

fn descendants(table: &[Process], root: i32) -> Vec<i32> {
    let mut found = HashSet::from([root]);
    loop {
        let before = found.len();
        for process in table {
            if found.contains(&process.parent) {
                found.insert(process.pid);
            }
        }
        if found.len() == before {
            break;
        }
    }
    found.remove(&root);
    found.into_iter().collect()
}
