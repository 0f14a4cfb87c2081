//! What the kernel counts in one sum for all user namespaces of an owner, bounded for one sandbox.
//!
//! Without this a sandbox can take every inotify instance that the worker's user has, and with them those of all other sandboxes
//! and of that user's own daemons. No container runtime sets these: they belong to the user namespace, and only somebody
//! within it, with rights there, can.

use std::{io, process::Stdio, time::Duration};

use crate::process;

/// Inotify instances and watches of a sandbox. The host's own limit (`fs.inotify`) holds for their sum.
pub(crate) const INOTIFY_INSTANCES: u32 = 32;
const INOTIFY_WATCHES: u32 = 32_768;

const LIMIT: Duration = Duration::from_secs(5);

/// Writes the bounds into the user namespace of a sandbox's process 1, and closes it for further namespaces: a second lock
/// behind the seccomp profile. A process in our own namespace is left alone, for there these are the host's.
pub(crate) async fn bound(pid: i32) -> io::Result<()> {
    let namespace = |pid: &str| fs_err::read_link(format!("/proc/{pid}/ns/user"));
    if namespace(&pid.to_string())? == namespace("self")? {
        return Ok(());
    }
    let script = format!(
        "cd /proc/sys/user && echo {INOTIFY_INSTANCES} >max_inotify_instances && echo {INOTIFY_WATCHES} >max_inotify_watches && \
         for kind in user pid uts ipc net mnt cgroup; do echo 0 >max_${{kind}}_namespaces || exit 1; done"
    );
    let mut command = process::command("nsenter");
    command
        .arg("--target")
        .arg(pid.to_string())
        .args(["--user", "--", "/bin/sh", "-c", &script]);
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(LIMIT, command.output())
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    if output.status.success() {
        Ok(())
    } else {
        Err(io::Error::other(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ))
    }
}
