//! A bound for the terminals of one sandbox.
//!
//! The kernel counts terminals in one sum for the whole host, so a sandbox without a bound can take those of everybody. The bound
//! belongs to the file system at `/dev/pts`, of which each sandbox has an instance of its own. Podman is told it at creation;
//! Docker makes that mount itself and has no words for it. So it is set here, from outside, on what is mounted, and read back. No
//! mount is made and none has to be removed: it goes with the sandbox.

use std::{io, path::PathBuf};

use rustix::{
    fs::{CWD, Dir, Mode, OFlags, ResolveFlags, fstat, major, minor, openat, openat2},
    mount::{FsPickFlags, fsconfig_reconfigure, fsconfig_set_string, fspick},
};

use crate::{disk, runtime::TERMINALS};

/// An instance of the file system of terminals, as `/proc/<pid>/mountinfo` shows it.
#[derive(Debug, PartialEq, Eq)]
struct Instance {
    device: String,
    mounted: PathBuf,
    options: Vec<(String, String)>,
}

impl Instance {
    fn is_bounded(&self) -> bool {
        self.options.iter().any(|(name, value)| {
            name == "max" && value.parse::<u32>().is_ok_and(|max| max <= TERMINALS)
        })
    }
}

/// Bounds what a sandbox's process 1 has for terminals. The host's own are left alone: what has those is a process of the host
/// that stands for a virtual machine, with terminals of its own inside. To be called before any command runs in the sandbox.
pub(crate) fn bound(pid: i32) -> io::Result<()> {
    for instance in unbounded(pid)? {
        set(pid, &instance)?;
    }
    match unbounded(pid)?.first() {
        None => Ok(()),
        Some(instance) => Err(io::Error::other(format!(
            "{} has no bound although it was set",
            instance.mounted.display()
        ))),
    }
}

fn unbounded(pid: i32) -> io::Result<Vec<Instance>> {
    let hosts = instances(&fs_err::read_to_string("/proc/self/mountinfo")?);
    let mut found = instances(&fs_err::read_to_string(format!("/proc/{pid}/mountinfo"))?);
    found.retain(|instance| {
        !instance.is_bounded() && hosts.iter().all(|own| own.device != instance.device)
    });
    Ok(found)
}

fn instances(mountinfo: &str) -> Vec<Instance> {
    let instance = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(2);
        let (device, mounted) = (before.next()?.to_owned(), disk::unescape(before.nth(1)?));
        let mut after = after.split(' ');
        (after.next()? == "devpts").then_some(())?;
        let options = after
            .nth(1)?
            .split(',')
            .filter_map(|option| option.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
        Some(Instance {
            device,
            mounted,
            options: options.collect(),
        })
    };
    mountinfo.lines().filter_map(instance).collect()
}

fn set(pid: i32, instance: &Instance) -> io::Result<()> {
    let root = openat(
        CWD,
        format!("/proc/{pid}/root"),
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // No name that the image brings may lead to something of the host's.
    let place = openat2(
        &root,
        &instance.mounted,
        flags,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS,
    )?;
    let device = fstat(&place)?.st_dev;
    if format!("{}:{}", major(device), minor(device)) != instance.device {
        return Err(io::Error::other(format!(
            "{} is hidden by another mount",
            instance.mounted.display()
        )));
    }
    let context = fspick(
        &place,
        "",
        FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH,
    )?;
    // What is not said again goes back to the kernel's defaults.
    for (name, value) in instance.options.iter().filter(|(name, _)| name != "max") {
        fsconfig_set_string(&context, name.as_str(), value.as_str())?;
    }
    fsconfig_set_string(&context, "max", TERMINALS.to_string())?;
    fsconfig_reconfigure(&context)?;
    // An image's own program as process 1 may have been quicker than we were.
    let taken = Dir::read_from(&place)?
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_bytes()[0].is_ascii_digit())
        .count();
    if taken > TERMINALS as usize {
        Err(io::Error::other(format!(
            "{taken} were taken before they could be bounded"
        )))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_found_by_their_kind_and_bounds_by_their_name() {
        let text = "\
63 43 0:39 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=100005,mode=620,ptmxmode=666
64 43 0:40 / /dev/a\\040b rw shared:3 - devpts devpts rw,mode=620,max=64
65 43 0:41 / /dev rw - tmpfs devpts rw,size=65536k
66 43 0:42 / /dev/more rw - devpts devpts rw,max=65
";
        let found = instances(text);
        assert_eq!(
            found
                .iter()
                .map(|instance| (instance.device.as_str(), instance.is_bounded()))
                .collect::<Vec<_>>(),
            [("0:39", false), ("0:40", true), ("0:42", false)]
        );
        assert_eq!(
            (found[0].mounted.as_path(), found[1].mounted.as_path()),
            ("/dev/pts".as_ref(), "/dev/a b".as_ref())
        );
        let options: Vec<(&str, &str)> = found[0]
            .options
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(
            options,
            [("gid", "100005"), ("mode", "620"), ("ptmxmode", "666")]
        );
    }

    #[test]
    fn the_hosts_own_terminals_are_left_alone() {
        assert_eq!(
            unbounded(std::process::id().cast_signed()).expect("readable"),
            []
        );
    }
}
