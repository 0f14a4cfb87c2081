//! Limits the terminals of one sandbox.
//!
//! The kernel counts terminals for the whole host, so one sandbox could exhaust them. The limit
//! belongs to the `devpts` file system at `/dev/pts`, and each sandbox has its own instance. Podman
//! accepts the limit at creation; Docker makes that mount itself and has no option for it. The
//! worker therefore sets it from the host on the existing mount, and reads it back. No mount is
//! created, so none needs to be removed.

use std::{io, path::PathBuf};

use rustix::{
    fs::{CWD, Dir, Mode, OFlags, ResolveFlags, fstat, major, minor, openat, openat2},
    mount::{FsPickFlags, fsconfig_reconfigure, fsconfig_set_string, fspick},
};

use crate::{disk, runtime::MAX_TERMINALS};

/// A `devpts` instance, as listed in `/proc/<pid>/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Instance {
    device: String,
    mounted: PathBuf,
    options: Vec<(String, String)>,
}

impl Instance {
    fn is_bounded(&self) -> bool {
        self.options.iter().any(|(name, value)| {
            name == "max" && value.parse::<u32>().is_ok_and(|max| max <= MAX_TERMINALS)
        })
    }
}

/// Limits the terminals of a sandbox's process 1; must be called before any command runs in the
/// sandbox. The host's own instances are skipped: a process that uses them stands for a virtual
/// machine, which has its own terminals inside.
pub(crate) fn limit(pid: i32) -> io::Result<()> {
    for instance in unbounded(pid)? {
        set(pid, &instance)?;
    }
    match unbounded(pid)?.first() {
        None => Ok(()),
        Some(instance) => Err(io::Error::other(format!(
            "{} has no limit although it was set",
            instance.mounted.display()
        ))),
    }
}

fn unbounded(pid: i32) -> io::Result<Vec<Instance>> {
    let host_instances = instances(&fs_err::read_to_string("/proc/self/mountinfo")?);
    let mut found = instances(&fs_err::read_to_string(format!("/proc/{pid}/mountinfo"))?);
    found.retain(|instance| {
        !instance.is_bounded()
            && host_instances
                .iter()
                .all(|host| host.device != instance.device)
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
    // No symlink in the image may lead to the host's files.
    let directory = openat2(
        &root,
        &instance.mounted,
        flags,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS,
    )?;
    let device = fstat(&directory)?.st_dev;
    if format!("{}:{}", major(device), minor(device)) != instance.device {
        return Err(io::Error::other(format!(
            "{} is hidden by another mount",
            instance.mounted.display()
        )));
    }
    let context = fspick(
        &directory,
        "",
        FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH,
    )?;
    // Options that are not repeated revert to the kernel's defaults.
    for (name, value) in instance.options.iter().filter(|(name, _)| name != "max") {
        fsconfig_set_string(&context, name.as_str(), value.as_str())?;
    }
    fsconfig_set_string(&context, "max", MAX_TERMINALS.to_string())?;
    fsconfig_reconfigure(&context)?;
    // The image's program may have opened terminals before the limit was set.
    let taken = Dir::read_from(&directory)?
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_bytes()[0].is_ascii_digit())
        .count();
    if taken > MAX_TERMINALS as usize {
        Err(io::Error::other(format!(
            "{taken} were opened before the limit was set"
        )))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devpts_instances_and_their_limits_are_parsed() {
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
    fn the_terminals_of_the_host_are_not_limited() {
        assert_eq!(
            unbounded(std::process::id().cast_signed()).expect("readable"),
            []
        );
    }
}
