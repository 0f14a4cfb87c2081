//! A worker without root enters the user namespace that Podman keeps for its user.
//!
//! Files in workspaces belong to subordinate ids, which an ordinary user can neither assign nor
//! remove. In that namespace the user is root over exactly these ids, so the rest of the worker
//! runs as it does with root. It must be Podman's namespace, not a new one: sandboxes are nested in
//! it, and a worker restarted in another could not signal the processes of its predecessor.

use std::{
    os::unix::{fs::MetadataExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
};

use cynode_service::private;

use crate::{
    Error,
    config::{Config, Engine},
    host, process,
};

/// Subordinate ids per sandbox: 32 sandboxes for the usual 65,536.
pub(crate) const ROOTLESS_BLOCK_SIZE: u32 = 2_048;

const ADD_IDS_REMEDY: &str = "usermod --add-subuids 1000000-1065535 \
    --add-subgids 1000000-1065535 USER, with a range that is unused in /etc/subuid, \
    then 'podman system migrate'";

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Podman's user namespace, as seen by a process inside it.
#[derive(Debug)]
pub(crate) struct PodmanNamespace {
    /// Subordinate ids mapped inside, without root.
    pub(crate) ids: u32,
    user: String,
    mount: String,
}

/// Inspects Podman's namespace of this user; Podman creates it if necessary.
pub(crate) async fn inspect_namespace(config: &Config) -> Result<PodmanNamespace, String> {
    let command = config.podman_command();
    let mut arguments: Vec<&str> = command[1..].iter().map(String::as_str).collect();
    let script = "readlink /proc/self/ns/user /proc/self/ns/mnt; cat /proc/self/uid_map; echo; \
                  cat /proc/self/gid_map";
    arguments.extend(["unshare", "sh", "-c", script]);
    let output = host::run(&command[0], &arguments)
        .await
        .map_err(|error| format!("Podman has no user namespace for this user: {error}"))?;
    let mut lines = output.lines();
    let (Some(user), Some(mount)) = (lines.next(), lines.next()) else {
        return Err(format!("unexpected output of 'podman unshare': {output}"));
    };
    let maps: Vec<&str> = lines.collect();
    let mut maps = maps.split(|line| line.is_empty());
    let ids = count_mapped(maps.next().unwrap_or_default())
        .min(count_mapped(maps.next().unwrap_or_default()));
    Ok(PodmanNamespace {
        ids,
        user: user.to_owned(),
        mount: mount.to_owned(),
    })
}

/// The number of ids mapped from 1 on without a gap.
fn count_mapped(map: &[&str]) -> u32 {
    let mut ranges: Vec<(u32, u32)> = map
        .iter()
        .filter_map(|line| {
            let mut fields = line
                .split_ascii_whitespace()
                .map(|field| field.parse::<u32>().ok());
            Some((fields.next()??, fields.nth(1)??))
        })
        .collect();
    ranges.sort_unstable();
    let end = ranges.into_iter().fold(0, |end, (first, count)| {
        if first <= end {
            end.max(first.saturating_add(count))
        } else {
            end
        }
    });
    end.saturating_sub(1)
}

/// The problem with too few subordinate ids and its remedy, if there is one.
pub(crate) fn too_few(ids: u32) -> Option<(String, String)> {
    (ids < ROOTLESS_BLOCK_SIZE).then(|| {
        (
            format!("this user has {ids} subordinate ids; a sandbox needs {ROOTLESS_BLOCK_SIZE}"),
            format!("As root: {ADD_IDS_REMEDY}."),
        )
    })
}

/// Re-executes this program with the same arguments in Podman's namespace. Returns only if that is
/// not necessary, or on failure.
pub async fn enter_user_namespace(config: &Config) -> Result<(), Error> {
    if is_root() || config.engine == Engine::Docker {
        return Ok(());
    }
    let namespace = inspect_namespace(config).await.map_err(Error::Host)?;
    if let Some((problem, remedy)) = too_few(namespace.ids) {
        return Err(Error::Host(format!("{problem}. Remedy: {remedy}")));
    }
    let inside = process::oldest_in(&namespace.user, &namespace.mount)
        .ok_or_else(|| Error::Host("Podman has no process in this user's namespace".to_owned()))?;
    let failed = |operation: &str| crate::state(operation.to_owned());
    let program = std::env::current_exe().map_err(failed("locating this program"))?;
    let working = std::env::current_dir().map_err(failed("reading the working directory"))?;
    let mut command = process::command("nsenter").into_std();
    command.args([
        "--user",
        "--mount",
        "--preserve-credentials",
        "--target",
        &inside.to_string(),
        "--",
        "env",
    ]);
    // Entering a mount namespace changes the working directory to its root.
    command
        .arg(format!("--chdir={}", working.display()))
        .arg(program)
        .args(std::env::args_os().skip(1));
    // Podman's own children find these variables: they are in the right namespace, and of this
    // user.
    let (uid, gid) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    command.env("_CONTAINERS_USERNS_CONFIGURED", "done");
    command
        .env("_CONTAINERS_ROOTLESS_UID", uid.to_string())
        .env("_CONTAINERS_ROOTLESS_GID", gid.to_string());
    command.env(
        "XDG_RUNTIME_DIR",
        runtime_directory().map_err(failed("finding a runtime directory"))?,
    );
    // Inside, the process is root, which has a different default.
    command.env("CYNODE_STATE_DIR", &config.state_dir);
    Err(Error::State {
        operation: "starting nsenter (of the package util-linux)".to_owned(),
        source: command.exec(),
    })
}

/// The user's runtime directory: from the environment, systemd's, or our own.
pub(crate) fn runtime_directory() -> std::io::Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    // In a directory that others can write to, they could replace our files.
    let is_private = |path: &Path| {
        fs_err::symlink_metadata(path)
            .is_ok_and(|found| found.is_dir() && found.uid() == uid && found.mode() & 0o022 == 0)
    };
    let given = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    if let Some(usual) = given
        .into_iter()
        .chain([PathBuf::from(format!("/run/user/{uid}"))])
        .find(|path| path.is_absolute() && is_private(path))
    {
        return Ok(usual);
    }
    // A short path: Podman limits the length of the paths below it.
    let own = PathBuf::from(format!("/tmp/cynode-{uid}"));
    // Another user may have created it first.
    private::private_directory(&own).map_err(|error| {
        std::io::Error::new(
            error.kind(),
            format!("{error}; or set XDG_RUNTIME_DIR to a directory of your own"),
        )
    })?;
    Ok(own)
}

/// The registry in which workers that share ids claim their ranges.
pub(crate) fn id_registry(rootless: bool) -> std::io::Result<PathBuf> {
    let directory = if rootless {
        runtime_directory()?.join("cynode")
    } else {
        PathBuf::from("/run/cynode")
    };
    private::closed_directory(&directory)?;
    Ok(directory.join("ids"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_ids_are_counted_up_to_the_first_gap() {
        assert_eq!(
            count_mapped(&["0 1001 1", "1 100000 65536", "65537 165536 1000"]),
            66_536
        );
        assert_eq!(count_mapped(&["0 1001 1", "5 100000 65536"]), 0);
        assert_eq!(count_mapped(&["0 1001 1"]), 0);
        assert_eq!(count_mapped(&[]), 0);
    }
}
