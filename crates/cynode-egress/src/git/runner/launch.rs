//! Starts the runner and, within it, git: who they run as and what they may use.
//!
//! Invariant: git starts with its limits set and ends with the runner. The standard library can't
//! set limits for a child, so this program is executed once more, limits itself, and becomes git.

use std::{
    ffi::{OsStr, OsString},
    fs::DirBuilder,
    io,
    os::{
        fd::OwnedFd,
        unix::{fs::DirBuilderExt as _, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::{
    fs::{Gid as FileGid, Mode, Uid as FileUid, chown},
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{
        DumpableBehavior, Gid, Resource, Rlimit, Signal, Uid, geteuid, getppid,
        parent_process_death_signal, set_dumpable_behavior, set_parent_process_death_signal,
        setrlimit,
    },
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

use super::wire::RunnerSettings;
use crate::Config;

/// The only search path of the runner and its children.
pub(super) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The hidden subcommand that the runner is.
const SUBCOMMAND: &str = "egress-runner";
/// Its first argument when it becomes git.
pub(super) const LAUNCH: &str = "launch";
/// Processes of a runner's user that has nothing else.
const MAX_PROCESSES: u64 = 512;

/// Names of the users whose ids are used if they exist.
const ROLE_USER: &str = "cynode-git";
const RUNNER_USER: &str = "cynode-git-runner";
/// Numbers that no distribution assigns.
const ROLE_UID: u32 = 61_286;
const RUNNER_UID: u32 = 61_287;

/// The parts of the role's directory.
pub(crate) struct Directories {
    pub(crate) calls: &'static str,
    pub(crate) mirrors: &'static str,
    pub(crate) audit: &'static str,
}

pub(crate) const DIRECTORIES: Directories = Directories {
    calls: "calls",
    mirrors: "mirrors",
    audit: "audit",
};

/// The only place of this crate that starts programs.
#[expect(
    clippy::disallowed_methods,
    reason = "the only place of this crate that starts programs"
)]
pub(super) fn command(program: impl AsRef<OsStr>) -> Command {
    Command::new(program)
}

/// What is left of the process after the split.
#[derive(Debug)]
pub(crate) struct Split {
    /// The way to the runner.
    pub(crate) control: OwnedFd,
    /// The user that the runner's processes have.
    pub(crate) runner_uid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    uid: u32,
    gid: u32,
}

/// Creates the directories, starts the runner and, under root, becomes the role's user. Must run on
/// the only thread of the process: the kernel changes the user of one thread alone.
pub(crate) fn split(config: &Config) -> io::Result<Split> {
    // A core file would hold credentials.
    limit(Resource::Core, 0)?;
    let directory = config.directory();
    let split = if geteuid().is_root() {
        split_users(config, &directory)
    } else {
        prepare_directories(&directory, None)?;
        start_runner(&directory, None)
    }?;
    // git's processes may have the same user, which could otherwise read this one's memory.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(split)
}

fn split_users(config: &Config, directory: &Path) -> io::Result<Split> {
    if fs_err::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other(
            "the git role must drop root before it starts threads",
        ));
    }
    let users = fs_err::read_to_string("/etc/passwd").unwrap_or_default();
    let role = owner(&users, config.role_uid, ROLE_USER, ROLE_UID);
    let runner = owner(&users, config.runner_uid, RUNNER_USER, RUNNER_UID);
    if role.uid == runner.uid || role.uid == 0 || runner.uid == 0 {
        return Err(io::Error::other(
            "egress.git.role_uid and egress.git.runner_uid must be two users other than root",
        ));
    }
    prepare_directories(directory, Some((role, runner)))?;
    let split = start_runner(directory, Some(runner))?;
    let (signal, parent) = (parent_process_death_signal()?, getppid());
    let (uid, gid) = (Uid::from_raw(role.uid), Gid::from_raw(role.gid));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    // The kernel forgets it when the user changes.
    set_parent_process_death_signal(signal)?;
    if signal.is_some() && getppid() != parent {
        return Err(io::Error::other("the supervisor has ended"));
    }
    Ok(split)
}

/// The configured id, that of the user if it exists, or the default.
fn owner(users: &str, configured: Option<u32>, name: &str, default: u32) -> Owner {
    let found = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_named = fields.next()? == name;
        let uid: u32 = fields.nth(1)?.parse().ok()?;
        let gid: u32 = fields.next()?.parse().ok()?;
        let is_wanted = configured.map_or(is_named, |wanted| wanted == uid);
        is_wanted.then_some(Owner { uid, gid })
    });
    let uid = configured.unwrap_or(default);
    found.unwrap_or(Owner { uid, gid: uid })
}

fn prepare_directories(directory: &Path, owners: Option<(Owner, Owner)>) -> io::Result<()> {
    // Under root the runner's user must be able to reach its own directory.
    let open = if owners.is_some() { 0o711 } else { 0o700 };
    if let Some(parent) = directory.parent().filter(|parent| !parent.exists()) {
        create(parent, open)?;
        set_mode(parent, open)?;
    }
    create(directory, open)?;
    set_mode(directory, open)?;
    let calls = if owners.is_some() { 0o710 } else { 0o700 };
    let parts = [
        (DIRECTORIES.calls, calls),
        (DIRECTORIES.mirrors, 0o700),
        (DIRECTORIES.audit, 0o700),
    ];
    for (name, mode) in parts {
        let path = directory.join(name);
        create(&path, 0o700)?;
        if fs_err::symlink_metadata(&path)?.is_symlink() {
            return Err(io::Error::other(format!(
                "{} is a symbolic link: remove it",
                path.display()
            )));
        }
        if let Some((role, runner)) = owners {
            let owner = if name == DIRECTORIES.mirrors {
                runner
            } else {
                role
            };
            // Sockets in it are for the runner's group.
            let gid = if name == DIRECTORIES.calls {
                runner.gid
            } else {
                owner.gid
            };
            own(&path, owner.uid, gid)?;
        }
        set_mode(&path, mode)?;
    }
    if let Some((role, _)) = owners {
        own(directory, role.uid, role.gid)?;
        // Written by an earlier version, or by an operator.
        for name in ["key", "token", "instance"] {
            let path = directory.join(name);
            if fs_err::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
                own(&path, role.uid, role.gid)?;
            }
        }
    }
    Ok(())
}

/// Creates a directory and its parents, unless it exists.
fn create(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs_err::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
}

fn own(path: &Path, uid: u32, gid: u32) -> io::Result<()> {
    chown(
        path,
        Some(FileUid::from_raw(uid)),
        Some(FileGid::from_raw(gid)),
    )
    .map_err(|error| {
        io::Error::new(
            io::Error::from(error).kind(),
            format!(
                "changing the owner of {}: {}",
                path.display(),
                io::Error::from(error)
            ),
        )
    })
}

/// Starts the runner. It ends when the way to it closes, so nobody waits for it; a role that has
/// lost it ends too.
fn start_runner(directory: &Path, user: Option<Owner>) -> io::Result<Split> {
    let (control, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Not by its path, which the runner's user may be unable to reach.
    let mut runner = command("/proc/self/exe");
    runner
        .arg0("cynode")
        .arg(SUBCOMMAND)
        .env_clear()
        .env("PATH", PATH)
        .current_dir(directory.join(DIRECTORIES.mirrors))
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .process_group(0);
    for name in ["RUST_LOG", "CYNODE_LOG", "LLVM_PROFILE_FILE"] {
        if let Some(value) = std::env::var_os(name) {
            runner.env(name, value);
        }
    }
    if let Some(user) = user {
        // Groups are dropped with it.
        runner.uid(user.uid).gid(user.gid);
    }
    drop(runner.spawn()?);
    Ok(Split {
        control,
        runner_uid: user.map_or_else(|| geteuid().as_raw(), |user| user.uid),
    })
}

/// The arguments with which this program limits itself and becomes git.
pub(super) fn launcher_args(settings: &RunnerSettings, seconds: u64) -> Vec<OsString> {
    let processes = if settings.is_separate {
        MAX_PROCESSES
    } else {
        0
    };
    let numbers = [
        settings.memory_bytes,
        settings.file_bytes,
        // Threads of git count together.
        4 * seconds + 10,
        processes,
        u64::from(std::process::id()),
    ];
    [SUBCOMMAND, LAUNCH]
        .into_iter()
        .map(OsString::from)
        .chain(numbers.iter().map(|number| number.to_string().into()))
        .collect()
}

/// Limits this process and becomes the program. Returns only if that fails.
pub(super) fn launch(args: &[OsString]) -> io::Error {
    let Err(error) = become_program(args);
    error
}

fn become_program(args: &[OsString]) -> Result<std::convert::Infallible, io::Error> {
    let numbers: Vec<u64> = args
        .iter()
        .take(5)
        .filter_map(|number| number.to_str()?.parse().ok())
        .collect();
    let ([memory, file, cpu, processes, parent], [program, rest @ ..]) =
        (numbers.as_slice(), args.get(5..).unwrap_or_default())
    else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The runner may have ended before the line above.
    let actual = getppid().and_then(|pid| u64::try_from(pid.as_raw_pid()).ok());
    if actual != Some(*parent) {
        return Err(io::Error::other("the runner has ended"));
    }
    limit(Resource::As, *memory)?;
    limit(Resource::Fsize, *file)?;
    limit(Resource::Cpu, *cpu)?;
    limit(Resource::Core, 0)?;
    if *processes > 0 {
        limit(Resource::Nproc, *processes)?;
    }
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    Err(command(program).args(rest).exec())
}

fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let current = rustix::process::getrlimit(resource);
    // An ordinary user can't raise what is already lower.
    let most = current.maximum.map_or(most, |maximum| maximum.min(most));
    setrlimit(
        resource,
        Rlimit {
            current: Some(most),
            maximum: Some(most),
        },
    )?;
    Ok(())
}

/// A descriptor of this program that stays open in children, and the path by which they execute it.
pub(super) fn own_program() -> io::Result<(OwnedFd, PathBuf)> {
    use std::os::fd::AsRawFd as _;
    let program = rustix::fs::open("/proc/self/exe", rustix::fs::OFlags::PATH, Mode::empty())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", program.as_raw_fd()));
    Ok((program, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_name_or_by_its_configured_id() {
        let users = "root:x:0:0::/root:/bin/sh\ncynode-git:x:900:901::/:/bin/false\n\
                     other:x:77:78::/:/bin/false\n";
        assert_eq!(
            owner(users, None, ROLE_USER, ROLE_UID),
            Owner { uid: 900, gid: 901 }
        );
        assert_eq!(
            owner(users, Some(77), ROLE_USER, ROLE_UID),
            Owner { uid: 77, gid: 78 }
        );
        assert_eq!(
            owner(users, Some(5), ROLE_USER, ROLE_UID),
            Owner { uid: 5, gid: 5 }
        );
        assert_eq!(
            owner(users, None, RUNNER_USER, RUNNER_UID),
            Owner {
                uid: RUNNER_UID,
                gid: RUNNER_UID
            }
        );
    }

    #[test]
    fn directories_are_private_to_their_owners() {
        use std::os::unix::fs::MetadataExt as _;
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join("git");
        let mode = |path: &Path| fs_err::metadata(path).expect("there").mode() & 0o777;
        prepare_directories(&directory, None).expect("made");
        assert_eq!(mode(&directory), 0o700);
        assert_eq!(mode(&directory.join("mirrors")), 0o700);
        if geteuid().is_root() {
            let (role, runner) = (
                Owner {
                    uid: 61_286,
                    gid: 61_286,
                },
                Owner {
                    uid: 61_287,
                    gid: 61_287,
                },
            );
            fs_err::write(directory.join("key"), "").expect("written");
            prepare_directories(&directory, Some((role, runner))).expect("made");
            let owner = |name: &str| {
                let metadata = fs_err::metadata(directory.join(name)).expect("there");
                (metadata.uid(), metadata.gid())
            };
            assert_eq!(mode(&directory), 0o711);
            assert_eq!(owner("mirrors"), (61_287, 61_287));
            assert_eq!(owner("calls"), (61_286, 61_287));
            assert_eq!(owner("audit"), (61_286, 61_286));
            assert_eq!(owner("key"), (61_286, 61_286));
            fs_err::remove_dir(directory.join("audit")).expect("removed");
            std::os::unix::fs::symlink("/etc", directory.join("audit")).expect("linked");
            assert!(prepare_directories(&directory, Some((role, runner))).is_err());
        }
    }
}
