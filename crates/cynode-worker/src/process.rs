//! Host processes: how to start them, and what `/proc` says about them.

use std::{io, path::Path};

use tokio::process::Command;

/// The only place that starts host programs.
#[expect(
    clippy::disallowed_methods,
    reason = "the only place that starts host programs"
)]
pub(crate) fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    // The operator's environment must not redirect calls to a remote engine.
    for name in ["CONTAINER_HOST", "DOCKER_HOST", "CONTAINER_CONNECTION"] {
        command.env_remove(name);
    }
    command
}

/// When a process started, in clock ticks since boot: unique together with its id. `None` if the
/// process is gone. An error says nothing about it; for example, no file descriptor may be free.
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

/// A field of `/proc/<pid>/stat`, counted from the state (0).
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

/// Sends a signal; ignores a process that is gone.
pub(crate) fn kill(pid: i32, signal: i32) {
    if let (Some(pid), Some(signal)) = (
        rustix::process::Pid::from_raw(pid),
        rustix::process::Signal::from_named_raw(signal),
    ) {
        let _gone = rustix::process::kill_process(pid, signal);
    }
}

/// Signals every process in the session of `leader`: a terminal's shell and its jobs.
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

/// Runs work that looks at many processes, or into their memory, off the async threads. Reading a
/// command line or an environment waits for the memory lock of that process, which its own code can
/// hold for seconds.
pub(crate) async fn inspect<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok()
}

/// Kills the monitors of a removed container. Podman keeps the monitor of each exec for five
/// minutes, in case the exit code is queried.
pub(crate) async fn kill_monitors(container: &str) {
    let container = container.to_owned();
    inspect(move || {
        for pid in monitors_of(&container, Path::new("/proc")) {
            kill(pid, 9);
        }
    })
    .await;
}

/// The monitors of a container. Looks only into the memory of processes that can be monitors:
/// processes of sandboxes are in other namespaces.
fn monitors_of(container: &str, proc: &Path) -> Vec<i32> {
    let namespace = fs_err::read_link(proc.join("self/ns/pid")).ok();
    let is_monitor = |pid: i32| {
        let directory = proc.join(pid.to_string());
        let is_named = fs_err::read(directory.join("comm")).is_ok_and(|name| name == b"conmon\n");
        if !is_named || fs_err::read_link(directory.join("ns/pid")).ok() != namespace {
            return false;
        }
        let command = fs_err::read(directory.join("cmdline")).unwrap_or_default();
        let mut arguments = command.split(|byte| *byte == 0);
        arguments
            .next()
            .is_some_and(|program| program.ends_with(b"conmon"))
            && arguments.skip_while(|argument| *argument != b"-n").nth(1)
                == Some(container.as_bytes())
    };
    let Ok(directory) = fs_err::read_dir(proc) else {
        return Vec::new();
    };
    directory
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| is_monitor(*pid))
        .collect()
}

/// The oldest process in these namespaces, identified as in `/proc/<pid>/ns`.
pub(crate) fn oldest_in(user: &str, mount: &str) -> Option<i32> {
    let is_in = |pid: i32, kind: &str, name: &str| {
        fs_err::read_link(format!("/proc/{pid}/ns/{kind}"))
            .is_ok_and(|link| link.as_os_str() == name)
    };
    let pids = fs_err::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| is_in(*pid, "user", user) && is_in(*pid, "mnt", mount))
        .filter_map(|pid| Some((start_time(pid).ok()??, pid)))
        .min()
        .map(|(_, pid)| pid)
}

/// Kills every process with one of these ids, which belong to a single sandbox.
pub(crate) async fn kill_owned(ids: std::ops::Range<u32>) {
    inspect(move || kill_all_owned(&ids)).await;
}

fn kill_all_owned(ids: &std::ops::Range<u32>) {
    let Ok(directory) = fs_err::read_dir("/proc") else {
        return;
    };
    for pid in directory.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok()) {
        // The owner of the /proc directory would not do: it is root for processes that can't be
        // dumped.
        let status = fs_err::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let real = status.lines().find_map(|line| {
            line.strip_prefix("Uid:")?
                .split_whitespace()
                .next()?
                .parse::<u32>()
                .ok()
        });
        if real.is_some_and(|uid| ids.contains(&uid)) && stat_field(pid, 1).is_some() {
            tracing::warn!(pid, "Killing an orphaned process of a removed sandbox.");
            kill(pid, 9);
        }
    }
}

/// A process in a container, as seen from the host.
#[derive(Debug)]
pub(crate) struct SandboxProcess {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
}

/// The pid namespace of a process, by the name that the kernel gives it.
pub(crate) fn pid_namespace(pid: i32) -> Option<std::path::PathBuf> {
    fs_err::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

/// The pid namespace of this worker.
pub(crate) fn own_pid_namespace() -> Option<std::path::PathBuf> {
    fs_err::read_link("/proc/self/ns/pid").ok()
}

/// The name of a process, as it chose it.
pub(crate) fn name(pid: i32) -> Option<String> {
    let name = fs_err::read(format!("/proc/{pid}/comm")).ok()?;
    Some(String::from_utf8_lossy(&name).trim_end().to_owned())
}

/// All processes in the pid namespace of `init`, except `init` itself.
pub(crate) fn in_namespace_of(init: i32) -> Vec<SandboxProcess> {
    let Ok(namespace) = fs_err::read_link(format!("/proc/{init}/ns/pid")) else {
        return Vec::new();
    };
    // If the pid has been reused by a host process, this would match all of the host.
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
            Some(SandboxProcess {
                pid,
                parent: i32::try_from(stat_field(pid, 1)?).ok()?,
            })
        })
        .collect()
}

/// Returns whether a process was started with this variable and value. Call it within [`inspect`].
pub(crate) fn has_env(pid: i32, name_and_value: &str) -> bool {
    fs_err::read(format!("/proc/{pid}/environ")).is_ok_and(|environ| {
        environ
            .split(|byte| *byte == 0)
            .any(|variable| variable == name_and_value.as_bytes())
    })
}

/// Returns whether a process was started with a variable of this name. Call it within [`inspect`].
pub(crate) fn has_mark(pid: i32, name: &str) -> bool {
    let prefix = format!("{name}=");
    fs_err::read(format!("/proc/{pid}/environ")).is_ok_and(|environ| {
        environ
            .split(|byte| *byte == 0)
            .any(|variable| variable.starts_with(prefix.as_bytes()))
    })
}

/// How many processes the OOM killer has killed in this process's memory cgroup.
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

    /// A directory like `/proc/<pid>`. Without a command line, reading it would block, as it does
    /// while the process holds its memory lock.
    fn process(proc: &Path, pid: &str, name: &str, namespace: &str, command: Option<&[u8]>) {
        let directory = proc.join(pid);
        fs_err::create_dir_all(directory.join("ns")).expect("made");
        fs_err::write(directory.join("comm"), format!("{name}\n")).expect("written");
        std::os::unix::fs::symlink(namespace, directory.join("ns/pid")).expect("linked");
        let path = directory.join("cmdline");
        match command {
            Some(command) => fs_err::write(path, command).expect("written"),
            None => rustix::fs::mknodat(
                rustix::fs::CWD,
                &path,
                rustix::fs::FileType::Fifo,
                rustix::fs::Mode::RUSR,
                0,
            )
            .expect("made"),
        }
    }

    #[test]
    fn only_the_memory_of_possible_monitors_is_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let proc = directory.path();
        let (host, sandbox) = ("pid:[1]", "pid:[2]");
        let command = |container: &str| format!("/usr/bin/conmon\0-c\0x\0-n\0{container}\0");
        process(proc, "self", "cynode", host, None);
        process(proc, "10", "conmon", host, Some(command("mine").as_bytes()));
        process(
            proc,
            "11",
            "conmon",
            host,
            Some(command("other").as_bytes()),
        );
        process(proc, "12", "conmon", host, Some(b"/bin/sh\0-n\0mine\0"));
        process(proc, "13", "mkfs.ext4", host, None);
        process(proc, "14", "conmon", sandbox, None);
        assert_eq!(monitors_of("mine", proc), [10]);
    }

    #[test]
    fn a_process_has_exited_only_when_the_kernel_says_so() {
        let own = start_time(std::process::id().cast_signed()).expect("readable");
        assert!(own.is_some());
        // Beyond the largest pid on Linux.
        assert_eq!(start_time(i32::MAX).expect("no such process"), None);
        // Without a free file descriptor the answer is unknown. Each test runs in its own process.
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
