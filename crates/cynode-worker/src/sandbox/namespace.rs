//! Limits the kernel resources that user namespaces of one owner share.
//!
//! Without these limits one sandbox could exhaust the inotify instances of the worker's user, and
//! with them those of all other sandboxes and of that user's daemons. No container runtime sets
//! them: they belong to the user namespace and can only be set from inside it.

use std::{io, process::Stdio, time::Duration};

use crate::process;

/// Inotify instances and watches of one sandbox. The host's limits (`fs.inotify`) apply to their
/// sum.
pub(crate) const MAX_INOTIFY_INSTANCES: u32 = 32;
const MAX_INOTIFY_WATCHES: u32 = 32_768;

const NSENTER_TIMEOUT: Duration = Duration::from_secs(5);

/// Sets the limits in the user namespace of a sandbox's process 1, and forbids nested namespaces as
/// a second barrier behind the seccomp profile. A process in the worker's own namespace is skipped:
/// there the limits are the host's.
pub(crate) async fn limit(pid: i32) -> io::Result<()> {
    let namespace = |pid: &str| fs_err::read_link(format!("/proc/{pid}/ns/user"));
    if namespace(&pid.to_string())? == namespace("self")? {
        return Ok(());
    }
    let script = format!(
        "cd /proc/sys/user && echo {MAX_INOTIFY_INSTANCES} >max_inotify_instances && \
         echo {MAX_INOTIFY_WATCHES} >max_inotify_watches && \
         for kind in user pid uts ipc net mnt cgroup; do \
         echo 0 >max_${{kind}}_namespaces || exit 1; done"
    );
    let mut command = process::command("nsenter");
    command
        .arg("--target")
        .arg(pid.to_string())
        .args(["--user", "--", "/bin/sh", "-c", &script]);
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(NSENTER_TIMEOUT, command.output())
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
