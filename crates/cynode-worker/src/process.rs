//! Processes of the host: one way to start them, and facts about them from `/proc`.

use std::io;

use tokio::process::Command;

/// The one place that starts host programs.
#[expect(clippy::disallowed_methods, reason = "the one place")]
pub(crate) fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    // A remote engine's address in the operator's environment must not turn our calls elsewhere.
    for name in ["CONTAINER_HOST", "DOCKER_HOST", "CONTAINER_CONNECTION"] {
        command.env_remove(name);
    }
    command
}

/// When a process started, in clock ticks since boot: with its id this names it for as long as the machine runs. `None`
/// when it is gone; an error says nothing about it (no descriptor may be free to look).
pub(crate) fn start_time(pid: i32) -> io::Result<Option<u64>> {
    match fs_err::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => Ok(field_of(&stat, 19)),
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// A field of `/proc/<pid>/stat`, counted from the state (0) on.
fn stat_field(pid: i32, index: usize) -> Option<u64> {
    field_of(&fs_err::read(format!("/proc/{pid}/stat")).ok()?, index)
}

fn field_of(stat: &[u8], index: usize) -> Option<u64> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[end + 1..])
        .ok()?
        .split_ascii_whitespace();
    let state = fields.next()?;
    if index == 0 || state == "Z" || state == "X" {
        return None;
    }
    fields.nth(index - 1)?.parse().ok()
}

/// Sends a signal; a process that is gone is fine.
pub(crate) fn kill(pid: i32, signal: i32) {
    if let (Some(pid), Some(signal)) = (
        rustix::process::Pid::from_raw(pid),
        rustix::process::Signal::from_named_raw(signal),
    ) {
        let _gone = rustix::process::kill_process(pid, signal);
    }
}

/// Signals every process of the session that `leader` leads: a terminal's shell and its jobs.
pub(crate) fn signal_session(leader: i32, signal: i32) {
    let Ok(directory) = fs_err::read_dir("/proc") else {
        return;
    };
    for pid in directory.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok()) {
        if pid == leader || stat_field(pid, 3) == u64::try_from(leader).ok() {
            kill(pid, signal);
        }
    }
}

/// Ends the monitors of a container that is gone. Podman lets the monitor of each exec that came over its API wait for five
/// minutes, in case somebody asks how the exec ended.
pub(crate) fn kill_monitors(container: &str) {
    let Ok(directory) = fs_err::read_dir("/proc") else {
        return;
    };
    for pid in directory.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok()) {
        let Ok(command) = fs_err::read(format!("/proc/{pid}/cmdline")) else {
            continue;
        };
        let mut arguments = command.split(|byte| *byte == 0);
        let is_monitor = arguments
            .next()
            .is_some_and(|program| program.ends_with(b"conmon"));
        if is_monitor
            && arguments.skip_while(|argument| *argument != b"-n").nth(1)
                == Some(container.as_bytes())
        {
            kill(pid, 9);
        }
    }
}

/// The process that has been longest in these namespaces, named as `/proc/<pid>/ns` names them.
pub(crate) fn oldest_in(user: &str, mount: &str) -> Option<i32> {
    let is_in = |pid: i32, kind: &str, name: &str| {
        fs_err::read_link(format!("/proc/{pid}/ns/{kind}"))
            .is_ok_and(|found| found.as_os_str() == name)
    };
    let pids = fs_err::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| is_in(*pid, "user", user) && is_in(*pid, "mnt", mount))
        .filter_map(|pid| Some((start_time(pid).ok()??, pid)))
        .min()
        .map(|(_, pid)| pid)
}

/// Kills every process that runs with one of these ids, which nobody but one sandbox has.
pub(crate) fn kill_owned(ids: &std::ops::Range<u32>) {
    let Ok(directory) = fs_err::read_dir("/proc") else {
        return;
    };
    for pid in directory.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok()) {
        // Not by the owner of its directory: that is root's for one that can't be dumped.
        let status = fs_err::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let real = status.lines().find_map(|line| {
            line.strip_prefix("Uid:")?
                .split_whitespace()
                .next()?
                .parse::<u32>()
                .ok()
        });
        if real.is_some_and(|uid| ids.contains(&uid)) && stat_field(pid, 1).is_some() {
            tracing::warn!(
                pid,
                "A process of a sandbox that is gone was left; killing it."
            );
            kill(pid, 9);
        }
    }
}

/// A process in some container, seen from the host.
#[derive(Debug)]
pub(crate) struct Inside {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
}

/// All processes in the pid namespace of `init`, itself left out.
pub(crate) fn in_namespace_of(init: i32) -> Vec<Inside> {
    let Ok(namespace) = fs_err::read_link(format!("/proc/{init}/ns/pid")) else {
        return Vec::new();
    };
    // A number that was given to a process of the host meanwhile must not mean the host.
    if fs_err::read_link("/proc/self/ns/pid").is_ok_and(|own| own == namespace) {
        return Vec::new();
    }
    let Ok(directory) = fs_err::read_dir("/proc") else {
        return Vec::new();
    };
    directory
        .filter_map(|entry| {
            let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            (pid != init && fs_err::read_link(format!("/proc/{pid}/ns/pid")).ok()? == namespace)
                .then_some(())?;
            Some(Inside {
                pid,
                parent: i32::try_from(stat_field(pid, 1)?).ok()?,
            })
        })
        .collect()
}

/// Whether a process's initial environment holds this variable.
pub(crate) fn has_env(pid: i32, name_and_value: &str) -> bool {
    fs_err::read(format!("/proc/{pid}/environ")).is_ok_and(|environ| {
        environ
            .split(|byte| *byte == 0)
            .any(|variable| variable == name_and_value.as_bytes())
    })
}

/// Whether a process's initial environment has a variable of this name.
pub(crate) fn has_mark(pid: i32, name: &str) -> bool {
    let prefix = format!("{name}=");
    fs_err::read(format!("/proc/{pid}/environ")).is_ok_and(|environ| {
        environ
            .split(|byte| *byte == 0)
            .any(|variable| variable.starts_with(prefix.as_bytes()))
    })
}

/// How often the kernel killed something in this process's memory cgroup because of its limit.
pub(crate) fn oom_kills(pid: i32) -> Option<u64> {
    let text = crate::limits::Cgroups::of(pid).ok()?.text(
        "memory",
        "memory.oom_control",
        "memory.events",
    )?;
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_gone_only_when_the_kernel_says_so() {
        let own = start_time(std::process::id().cast_signed()).expect("readable");
        assert!(own.is_some());
        // Beyond any id that Linux gives out.
        assert_eq!(start_time(i32::MAX).expect("no such process"), None);
        // Without a descriptor to look with, nothing is known. Every test is a process of its own.
        let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        limit.current = Some(64);
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).expect("lowers");
        let held: Vec<_> = std::iter::from_fn(|| fs_err::File::open("/dev/null").ok())
            .take(100)
            .collect();
        assert!(start_time(std::process::id().cast_signed()).is_err());
        drop(held);
    }
}
