//! A worker without root: it moves into the user namespace that Podman keeps for its user.
//!
//! Files in workspaces belong to subordinate ids, which an ordinary user can neither give files to nor remove files of.
//! In that namespace the user is root over exactly these, so everything else in the worker is as it is with root. It must
//! be Podman's own and not one made here: sandboxes lie below it, and a worker that was restarted in another could not
//! signal what its predecessor started.

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

/// Ids that each sandbox is given of the user's subordinate ones: 32 sandboxes for the usual 65,536.
pub(crate) const BLOCK: u32 = 2_048;

const TOO_FEW: &str = "usermod --add-subuids 1000000-1065535 --add-subgids 1000000-1065535 USER, with a range that /etc/subuid gives nobody yet, then 'podman system migrate'";

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Podman's namespace as a process inside it sees it.
#[derive(Debug)]
pub(crate) struct Namespace {
    /// Ids of the user's own inside, root not counted.
    pub(crate) ids: u32,
    user: String,
    mount: String,
}

/// Looks at Podman's namespace of this user, which Podman makes when there is none yet.
pub(crate) async fn look(config: &Config) -> Result<Namespace, String> {
    let command = config.podman_command();
    let mut arguments: Vec<&str> = command[1..].iter().map(String::as_str).collect();
    arguments.extend(["unshare", "sh", "-c", "readlink /proc/self/ns/user /proc/self/ns/mnt; cat /proc/self/uid_map; echo; cat /proc/self/gid_map"]);
    let said = host::run(&command[0], &arguments)
        .await
        .map_err(|error| format!("Podman has no user namespace for this user: {error}"))?;
    let mut lines = said.lines();
    let (Some(user), Some(mount)) = (lines.next(), lines.next()) else {
        return Err(format!("'podman unshare' answered: {said}"));
    };
    let maps: Vec<&str> = lines.collect();
    let mut maps = maps.split(|line| line.is_empty());
    let ids = mapped(maps.next().unwrap_or_default()).min(mapped(maps.next().unwrap_or_default()));
    Ok(Namespace {
        ids,
        user: user.to_owned(),
        mount: mount.to_owned(),
    })
}

/// How many ids from 1 on are mapped without a gap.
fn mapped(map: &[&str]) -> u32 {
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

/// What is wrong with so many ids, and the remedy.
pub(crate) fn too_few(ids: u32) -> Option<(String, String)> {
    (ids < BLOCK).then(|| {
        (
            format!("this user has {ids} subordinate ids; a sandbox needs {BLOCK}"),
            format!("As root: {TOO_FEW}."),
        )
    })
}

/// Goes on as this program, with the same arguments, in Podman's namespace. Returns only when there is no need to, or on
/// failure.
pub async fn enter(config: &Config) -> Result<(), Error> {
    if is_root() || config.engine == Engine::Docker {
        return Ok(());
    }
    let namespace = look(config).await.map_err(Error::Host)?;
    if let Some((problem, remedy)) = too_few(namespace.ids) {
        return Err(Error::Host(format!("{problem}. Remedy: {remedy}")));
    }
    let inside = process::oldest_in(&namespace.user, &namespace.mount).ok_or_else(|| {
        Error::Host("Podman keeps no process in the user namespace of this user".to_owned())
    })?;
    let failed = |what: &str| crate::state(what.to_owned());
    let program = std::env::current_exe().map_err(failed("finding this program"))?;
    let working = std::env::current_dir().map_err(failed("finding the working directory"))?;
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
    // Entering a mount namespace leaves one at its root.
    command
        .arg(format!("--chdir={}", working.display()))
        .arg(program)
        .args(std::env::args_os().skip(1));
    // This is how Podman tells its own children that they are where they should be, and whose they are.
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
    // Inside we are root, and root's default is another.
    command.env("CYNODE_STATE_DIR", &config.state_dir);
    Err(Error::State {
        what: "starting nsenter (of the package util-linux)".to_owned(),
        source: command.exec(),
    })
}

/// The directory for sockets and the like of this user: as the session has it, else as systemd has it, else our own.
pub(crate) fn runtime_directory() -> std::io::Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    // Where others can write, they can put something in the place of what we make.
    let ours = |path: &Path| {
        fs_err::symlink_metadata(path)
            .is_ok_and(|found| found.is_dir() && found.uid() == uid && found.mode() & 0o022 == 0)
    };
    let given = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    if let Some(usual) = given
        .into_iter()
        .chain([PathBuf::from(format!("/run/user/{uid}"))])
        .find(|path| path.is_absolute() && ours(path))
    {
        return Ok(usual);
    }
    // Short, because Podman limits the length of what lies below.
    let own = PathBuf::from(format!("/tmp/cynode-{uid}"));
    // Anybody may have made it before us.
    private::private_directory(&own).map_err(|error| {
        std::io::Error::new(
            error.kind(),
            format!("{error}; or set XDG_RUNTIME_DIR to a directory of your own"),
        )
    })?;
    Ok(own)
}

/// Where the workers that share a range of ids agree on its parts.
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
    fn ids_are_counted_up_to_the_first_gap() {
        assert_eq!(
            mapped(&["0 1001 1", "1 100000 65536", "65537 165536 1000"]),
            66_536
        );
        assert_eq!(mapped(&["0 1001 1", "5 100000 65536"]), 0);
        assert_eq!(mapped(&["0 1001 1"]), 0);
        assert_eq!(mapped(&[]), 0);
    }
}
