//! Checks that need no container.

use std::path::{Path, PathBuf};

use cynode_api::{LargestLimits, Limits, Unenforced};
use rustix::process::{Resource, getrlimit};

use super::{Check, TrialSetup, run};
use crate::{
    capacity::{Capacity, ParentCgroup},
    config::{Config, Engine},
    disk::Disks,
    limits::Controller,
    runtime::IdSpace,
};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

pub(super) fn root() -> Check {
    Check::ok("privileges", "root: each sandbox gets its own 65,536 ids")
}

/// Docker's daemon runs as root, and the worker creates the files that sandboxes mount.
pub(super) fn root_for_docker() -> Check {
    if is_root() {
        Check::ok("privileges", "root")
    } else {
        Check::problem(
            "privileges",
            "an ordinary user can't change the owner of workspaces for Docker's sandboxes",
            "Run the worker as root, or use Podman.",
        )
    }
}

pub(super) fn cgroups() -> Check {
    let v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let v1 = ["memory", "pids", "cpu"]
        .iter()
        .all(|name| Path::new("/sys/fs/cgroup").join(name).is_dir());
    match (v2, v1) {
        (true, _) => Check::ok("cgroups", "version 2"),
        (false, true) if Path::new("/sys/fs/cgroup/unified").is_dir() => Check::adapted(
            "cgroups",
            "hybrid (versions 1 and 2): limits are set in version 1",
        ),
        (false, true) => Check::adapted("cgroups", "version 1"),
        (false, false) => Check::problem(
            "cgroups",
            "the memory, pids and cpu controllers are not all available",
            "Boot with cgroup v2, or enable these controllers (kernel parameter \
             cgroup_enable=memory).",
        ),
    }
}

/// Systemd manages cgroups where it runs; for an ordinary user it must have a user instance.
pub(super) fn choose_cgroup_manager() -> &'static str {
    let for_root = || is_root() && !in_user_namespace();
    let for_user = || {
        std::env::var_os("XDG_RUNTIME_DIR")
            .is_some_and(|directory| Path::new(&directory).join("systemd/private").exists())
    };
    if Path::new("/run/systemd/system").is_dir() && (for_root() || for_user()) {
        "systemd"
    } else {
        "cgroupfs"
    }
}

/// Returns whether this process is in a user namespace, where root is not the host's root.
fn in_user_namespace() -> bool {
    let map = fs_err::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_ascii_whitespace().ne(["0", "0", "4294967295"])
}

pub(super) fn cgroup_manager() -> Check {
    match choose_cgroup_manager() {
        "systemd" => Check::ok("cgroup manager", "systemd"),
        _ => Check::adapted(
            "cgroup manager",
            "cgroupfs, because systemd does not run here or has no instance for this user",
        ),
    }
}

/// The ids of sandboxes must not overlap with the subordinate ids of users.
pub(super) fn id_ranges() -> Check {
    let (first, last) = (u64::from(crate::idrange::FIRST_ID), (1_u64 << 31) - 1);
    for file in ["/etc/subuid", "/etc/subgid"] {
        for line in fs_err::read_to_string(file).unwrap_or_default().lines() {
            let mut parts = line.split(':');
            let (Some(name), Some(start), Some(count)) = (
                parts.next(),
                parts
                    .next()
                    .and_then(|text| text.trim().parse::<u64>().ok()),
                parts
                    .next()
                    .and_then(|text| text.trim().parse::<u64>().ok()),
            ) else {
                continue;
            };
            if start <= last && start + count > first {
                return Check::problem(
                    "id ranges",
                    format!(
                        "{file} assigns '{name}' ids from {start} to {}, which sandboxes use",
                        start + count - 1
                    ),
                    format!("Assign '{name}' a range below {first} in {file}."),
                );
            }
        }
    }
    Check::ok(
        "id ranges",
        format!("{first} to {last}, not assigned to any user"),
    )
}

/// The highest rlimits of a sandbox, which can't exceed the worker's own.
pub(super) fn rlimits() -> (Check, u64) {
    let hard = |resource| getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let (nofile, nproc) = (hard(Resource::Nofile), hard(Resource::Nproc));
    let may_raise = fs_err::read_to_string("/proc/self/status")
        .unwrap_or_default()
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|value| u64::from_str_radix(value.trim(), 16).ok())
        .is_some_and(|capabilities| capabilities & 1 << 24 != 0);
    let max_nofile = if may_raise {
        nofile.max(1 << 20)
    } else {
        nofile
    };
    let text = |value: u64| {
        if value == u64::MAX {
            "unlimited".to_owned()
        } else {
            value.to_string()
        }
    };
    let check = if nofile < 1_024 {
        Check::problem(
            "rlimits",
            format!("the hard limit on open files is {nofile}"),
            "Raise it with 'ulimit -Hn 4096' before starting, or LimitNOFILE= in the unit.",
        )
    } else if may_raise {
        Check::ok(
            "rlimits",
            format!("nofile {}, nproc {}", text(nofile), text(nproc)),
        )
    } else {
        Check::adapted(
            "rlimits",
            format!(
                "can't be raised here (no CAP_SYS_RESOURCE): sandboxes get at most nofile {} and \
                 nproc {}",
                text(nofile),
                text(nproc)
            ),
        )
    };
    (check, max_nofile)
}

/// Checks the largest limits of one sandbox, and whether the total memory and processes of all are
/// limited.
pub(super) fn memory(config: &Config, setup: Option<&TrialSetup>, max_nofile: u64) -> Check {
    const NAME: &str = "sandbox limits";
    let capacity = Capacity::of(config, max_nofile);
    let LargestLimits {
        memory_bytes,
        cpus,
        pids,
        disk_bytes,
    } = capacity.largest;
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64);
    let disk = disk_bytes.map_or_else(String::new, |bytes| format!(", a disk of {}", gib(bytes)));
    let each = format!(
        "a sandbox gets at most {} of memory, {cpus} processors, {pids} processes{disk}; {} of \
         memory are reserved, and the limits of all may add up to {}",
        gib(memory_bytes),
        gib(capacity.reserved_memory_bytes),
        gib(capacity.promised_memory_bytes)
    );
    let Some(setup) = setup else {
        return Check::adapted(NAME, each);
    };
    let mut processes = Ok(());
    let cgroup = match (&config.podman_socket, setup.cgroup_manager.as_str()) {
        (Some(_), _) if config.engine == Engine::Podman => {
            Err("an external Podman service chooses the cgroups of its containers".to_owned())
        }
        (_, "systemd") => Ok(format!("{}.slice", config.cgroup_parent)),
        _ if matches!(setup.ids, IdSpace::Within(_)) => {
            Err("an ordinary user has no delegated cgroup here".to_owned())
        }
        _ => {
            processes = ParentCgroup::probe(Controller::Pids);
            ParentCgroup::probe(Controller::Memory).map(|()| format!("/{}", config.cgroup_parent))
        }
    };
    let memory = gib(memory_bytes);
    match cgroup.map(|cgroup| (cgroup, processes)) {
        Ok((cgroup, Ok(()))) => Check::ok(
            NAME,
            format!(
                "{each}; all of them {memory} and {} processes in the cgroup {cgroup}",
                capacity.processes
            ),
        ),
        Ok((cgroup, Err(reason))) => Check::adapted(
            NAME,
            format!(
                "{each}; all of them {memory} in the cgroup {cgroup}; their processes together \
                 are not limited ({reason})"
            ),
        ),
        Err(reason) => Check::adapted(NAME, format!("{each}; the total is not limited ({reason})")),
    }
}

/// Checks that the inotify instances suffice for all sandboxes and the worker's user.
pub(super) fn inotify(max_sandboxes: usize) -> Check {
    let read = |name: &str| {
        fs_err::read_to_string(format!("/proc/sys/fs/inotify/{name}"))
            .ok()
            .and_then(|text| text.trim().parse::<usize>().ok())
    };
    let instances = read("max_user_instances").unwrap_or(0);
    let each = crate::sandbox::namespace::MAX_INOTIFY_INSTANCES as usize;
    if instances >= max_sandboxes * each {
        Check::ok(
            "inotify",
            format!("{instances} instances, enough for {max_sandboxes} sandboxes with {each} each"),
        )
    } else {
        Check::adapted(
            "inotify",
            format!(
                "{instances} instances for all sandboxes and this user together; {} sandboxes \
                 with {each} each exhaust them. 'sysctl fs.inotify.max_user_instances={}' allows \
                 {max_sandboxes}",
                instances / each,
                (max_sandboxes + 8) * each
            ),
        )
    }
}

/// Checks that workspaces can have their own disks, by creating and mounting one.
pub(super) async fn loop_devices(config: &Config) -> Check {
    const NAME: &str = "loop devices";
    // On the file system of the state directory; removed afterwards.
    let directory = config
        .state_dir
        .ancestors()
        .find(|path| path.is_dir())
        .unwrap_or(Path::new("/"))
        .join(format!(".cynode-{}", uuid::Uuid::new_v4().simple()));
    let default_bytes = Limits::default().disk_bytes;
    let result = Disks::new(directory.clone(), default_bytes).probe().await;
    drop(fs_err::remove_dir_all(&directory));
    match result {
        Ok(()) => Check::ok(
            NAME,
            "created and mounted a disk: the disk limit of sandboxes is enforced",
        ),
        Err(reason) if config.allow_unenforced.contains(&Unenforced::Disk) => Check::adapted(
            NAME,
            format!(
                "no disk can be mounted ({reason}): sandboxes have no disk limit, as \
                 worker.allow_unenforced permits"
            ),
        ),
        Err(reason) => Check::problem(
            NAME,
            format!("no disk can be mounted ({reason}): the disk limit can't be enforced"),
            format!(
                "Run the worker as root on a host with loop devices, or waive the limit: {} in \
                 the configuration.",
                config.allowance(&[Unenforced::Disk])
            ),
        ),
    }
}

/// Less free space is reported as a problem, or as a warning.
const MIN_FREE_BYTES: u64 = 1 << 30;
const RECOMMENDED_FREE_BYTES: u64 = 5 << 30;

pub(super) fn disk(state_dir: &Path) -> Check {
    let existing: PathBuf = state_dir
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"))
        .to_owned();
    let Ok(stat) = rustix::fs::statvfs(&existing) else {
        return Check::problem(
            "free disk",
            format!("{} can't be inspected", existing.display()),
            "Choose another --state-dir.",
        );
    };
    let free = stat.f_bavail * stat.f_frsize;
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let text = format!(
        "{:.1} GiB under {}",
        free as f64 / (1_u64 << 30) as f64,
        existing.display()
    );
    if free < MIN_FREE_BYTES {
        Check::problem(
            "free disk",
            text,
            "Free at least 5 GiB, or choose another --state-dir.",
        )
    } else if free < RECOMMENDED_FREE_BYTES {
        Check::adapted("free disk", format!("only {text}"))
    } else {
        Check::ok("free disk", text)
    }
}

pub(super) async fn git() -> Check {
    match run("git", &["--version"]).await {
        Ok(version) => Check::ok(
            "git",
            version.trim().trim_start_matches("git version ").to_owned(),
        ),
        Err(error) => Check::problem(
            "git",
            format!("does not run: {error}"),
            "Install it: apt-get install git.",
        ),
    }
}
