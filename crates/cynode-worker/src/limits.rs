//! Verifies what the kernel enforces on a sandbox: a runtime may accept a limit without applying
//! it.

use std::{
    io,
    path::{Path, PathBuf},
};

use cynode_api::{Limits, Unenforced};

use crate::{idrange::AGENT_ID, runtime::IdMap};

/// Added to a sandbox's OOM score, so that the kernel kills sandboxes before the rest of the
/// machine.
pub(crate) const OOM_SCORE_ADJ: i32 = 500;

/// Raises the OOM score of a sandbox's process 1, which its children inherit. Written even if the
/// runtime has set it: a process can't lower its score below the value that a process with
/// CAP_SYS_RESOURCE wrote last. Where neither the runtime nor the worker has that capability, a
/// sandbox can lower its score to the worker's own.
pub(crate) fn raise_oom_score(pid: i32) -> io::Result<()> {
    let path = format!("/proc/{pid}/oom_score_adj");
    let score = fs_err::read_to_string(&path)?
        .trim()
        .parse::<i32>()
        .unwrap_or_default();
    fs_err::write(path, score.max(OOM_SCORE_ADJ).to_string())
}

/// Returns whether a process's memory is accounted below a cgroup.
pub(crate) fn is_below(pid: i32, parent: &str) -> bool {
    Cgroups::of(pid).is_ok_and(|groups| {
        groups
            .group("memory")
            .is_some_and(|group| group.is_below(parent))
    })
}

/// The requested limits and separations that are not in effect for this process. An unreadable one
/// counts as missing. Limits of `parent` and above don't count: they are not the sandbox's own.
pub(crate) fn unenforced(
    pid: i32,
    limits: &Limits,
    ids: IdMap,
    parent: Option<&str>,
) -> Vec<Unenforced> {
    let mut cgroups = Cgroups::of(pid).unwrap_or_default();
    for group in &mut cgroups.groups {
        group.parent = parent.map(directory_name);
    }
    let mut missing = Vec::new();
    let mut check = |holds: Option<bool>, name: Unenforced| {
        if holds != Some(true) {
            missing.push(name);
        }
    };
    check(
        memory_holds(&cgroups, limits.memory_bytes),
        Unenforced::Memory,
    );
    check(
        cgroups
            .cpus()
            .map(|cpus| cpus <= limits.cpus.max(0.01) * 1.001),
        Unenforced::Cpus,
    );
    check(
        cgroups
            .limit("pids", "pids.max", "pids.max")
            .map(|max| max <= u64::from(limits.pids)),
        Unenforced::Pids,
    );
    check(
        open_files(pid).map(|max| max <= limits.nofile),
        Unenforced::Nofile,
    );
    let owner = host_id(pid, AGENT_ID);
    check(owner.map(|owner| owner != AGENT_ID), Unenforced::Userns);
    check(
        owner.map(|owner| owner == ids.first + AGENT_ID),
        Unenforced::IdRange,
    );
    missing
}

/// Checks memory and swap together: with swap, a sandbox would exceed its limit.
fn memory_holds(cgroups: &Cgroups, bytes: u64) -> Option<bool> {
    let memory = cgroups.limit("memory", "memory.limit_in_bytes", "memory.max")?;
    let swap = match cgroups.group("memory")?.version() {
        CgroupVersion::One => cgroups
            .limit("memory", "memory.memsw.limit_in_bytes", "")
            .map(|both| both <= bytes),
        CgroupVersion::Two => cgroups
            .limit("memory", "", "memory.swap.max")
            .map(|swap| swap == 0),
    };
    Some(memory <= bytes && swap.unwrap_or_else(|| !host_swaps()))
}

fn host_swaps() -> bool {
    fs_err::read_to_string("/proc/swaps").map_or(true, |text| text.lines().count() > 1)
}

fn open_files(pid: i32) -> Option<u64> {
    let limits = fs_err::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    limits.lines().find_map(|line| {
        line.strip_prefix("Max open files")?
            .split_whitespace()
            .nth(1)?
            .parse()
            .ok()
    })
}

/// The host id that an id inside maps to.
fn host_id(pid: i32, inside: u32) -> Option<u32> {
    let map = fs_err::read_to_string(format!("/proc/{pid}/uid_map")).ok()?;
    map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(|text| text.parse::<u32>().ok());
        let (first, host, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        (inside >= first && inside - first < count).then(|| host.saturating_add(inside - first))
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    One,
    Two,
}

/// A cgroup controller whose limit holds for all sandboxes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Controller {
    Memory,
    Pids,
}

impl Controller {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
        }
    }

    const fn limit_file(self, version: CgroupVersion) -> &'static str {
        match (self, version) {
            (Self::Memory, CgroupVersion::One) => "memory.limit_in_bytes",
            (Self::Memory, CgroupVersion::Two) => "memory.max",
            (Self::Pids, _) => "pids.max",
        }
    }
}

/// The cgroups of a process: one per controller in version 1, one in version 2, both on hybrid
/// hosts.
///
/// The effective limit is the lowest of a group and all its ancestors. Runtimes differ in where
/// they set it: crun with systemd runs a container in a group below the one with the limits.
#[derive(Debug, Default)]
pub(crate) struct Cgroups {
    groups: Vec<Cgroup>,
}

#[derive(Debug, PartialEq, Eq)]
struct Cgroup {
    /// Empty for version 2.
    controllers: Vec<String>,
    /// The mount point of the hierarchy; groups above it are not visible.
    top: PathBuf,
    path: PathBuf,
    /// The worker's own group: limits that also bind the worker are not limits of one sandbox.
    shared: Option<PathBuf>,
    /// The name of the parent group of all sandboxes, whose limits are not limits of one either.
    parent: Option<String>,
}

/// The directory that a runtime creates for a cgroup name.
fn directory_name(cgroup: &str) -> String {
    cgroup.trim_start_matches('/').to_owned()
}

impl Cgroup {
    fn version(&self) -> CgroupVersion {
        if self.controllers.is_empty() {
            CgroupVersion::Two
        } else {
            CgroupVersion::One
        }
    }

    /// The process's own directory, followed by its ancestors.
    fn ancestors(&self) -> impl Iterator<Item = &Path> {
        let is_shared = |directory: &Path| {
            self.shared
                .as_ref()
                .is_some_and(|shared| shared.starts_with(directory) && directory != self.path)
        };
        let is_parent = |directory: &Path| {
            directory != self.path
                && self
                    .parent
                    .as_ref()
                    .is_some_and(|name| directory.ends_with(name))
        };
        self.path.ancestors().take_while(move |directory| {
            directory.starts_with(&self.top) && !is_shared(directory) && !is_parent(directory)
        })
    }

    fn is_below(&self, parent: &str) -> bool {
        let name = directory_name(parent);
        self.path
            .ancestors()
            .skip(1)
            .take_while(|directory| directory.starts_with(&self.top))
            .any(|directory| directory.ends_with(&name))
    }

    /// The contents of a file in all groups that bind the process, innermost first.
    fn texts(&self, name: &str) -> impl Iterator<Item = String> {
        // In version 1, a memory group may not bind its descendants.
        let binds = |directory: &&Path| {
            *directory == self.path
                || read(&directory.join("memory.use_hierarchy"))
                    .is_none_or(|text| text.trim() != "0")
        };
        self.ancestors()
            .filter(binds)
            .filter_map(move |directory| read(&directory.join(name)))
    }
}

fn read(path: &Path) -> Option<String> {
    path.is_file()
        .then(|| fs_err::read_to_string(path).ok())
        .flatten()
}

impl Cgroups {
    pub(crate) fn of(pid: i32) -> io::Result<Self> {
        let mounts = fs_err::read_to_string("/proc/self/mountinfo")?;
        let mut cgroups = Self::parse(
            &fs_err::read_to_string(format!("/proc/{pid}/cgroup"))?,
            &mounts,
        );
        let worker_cgroups = Self::parse(&fs_err::read_to_string("/proc/self/cgroup")?, &mounts);
        for group in &mut cgroups.groups {
            group.shared = worker_cgroups
                .groups
                .iter()
                .find(|own| own.controllers == group.controllers)
                .map(|own| own.path.clone());
        }
        Ok(cgroups)
    }

    fn parse(cgroup: &str, mountinfo: &str) -> Self {
        let mut groups = Vec::new();
        for line in cgroup.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(names), Some(path)) = (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let controllers: Vec<String> = names
                .split(',')
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect();
            let mounted = mountinfo.lines().find_map(|line| {
                let (before, after) = line.split_once(" - ")?;
                let mut before = before.split(' ').skip(3);
                let (root, target) = (before.next()?, before.next()?);
                let mut after = after.split(' ');
                let (kind, options) = (after.next()?, after.nth(1)?);
                let fits = match controllers.first() {
                    None => kind == "cgroup2",
                    Some(first) => {
                        kind == "cgroup" && options.split(',').any(|option| option == first)
                    }
                };
                fits.then(|| (root.to_owned(), target.to_owned()))
            });
            if let Some((root, target)) = mounted {
                // A mount may show only a subtree, from its root on.
                let below = path
                    .strip_prefix(root.trim_end_matches('/'))
                    .unwrap_or(path);
                let path = PathBuf::from(format!("{target}{below}").trim_end_matches('/'));
                groups.push(Cgroup {
                    controllers,
                    top: PathBuf::from(target),
                    path,
                    shared: None,
                    parent: None,
                });
            }
        }
        Self { groups }
    }

    /// The group of the process for a controller.
    fn group(&self, controller: &str) -> Option<&Cgroup> {
        let dedicated = self
            .groups
            .iter()
            .find(|group| group.controllers.iter().any(|name| name == controller));
        dedicated.or_else(|| {
            self.groups
                .iter()
                .find(|group| group.controllers.is_empty())
        })
    }

    /// The contents of a controller's file, by its name in either version, in the innermost group
    /// that has it.
    pub(crate) fn text(&self, controller: &str, one: &str, two: &str) -> Option<String> {
        let group = self.group(controller)?;
        group
            .texts(if group.version() == CgroupVersion::One {
                one
            } else {
                two
            })
            .next()
    }

    /// The effective limit; `None` if unlimited in either version.
    fn limit(&self, controller: &str, one: &str, two: &str) -> Option<u64> {
        let group = self.group(controller)?;
        group
            .texts(if group.version() == CgroupVersion::One {
                one
            } else {
                two
            })
            .filter_map(|text| text.trim().parse().ok())
            .min()
    }

    /// The limit at the root of the visible hierarchy: set in a container, absent on a machine.
    pub(crate) fn limit_of_machine(&self, controller: Controller) -> Option<u64> {
        let (top, file) = self.tree(controller)?;
        read(&top.join(file))?.trim().parse().ok()
    }

    /// The root of the hierarchy with a controller, and the name of its limit file.
    pub(crate) fn tree(&self, controller: Controller) -> Option<(&Path, &'static str)> {
        let group = self.group(controller.name())?;
        let file = controller.limit_file(group.version());
        match group.version() {
            CgroupVersion::One => Some((&group.top, file)),
            CgroupVersion::Two => {
                let controllers = read(&group.top.join("cgroup.controllers"))?;
                controllers
                    .split_whitespace()
                    .any(|name| name == controller.name())
                    .then_some((&*group.top, file))
            }
        }
    }

    fn cpus(&self) -> Option<f64> {
        let group = self.group("cpu")?;
        let share = |directory: &Path| {
            let text = match group.version() {
                CgroupVersion::One => format!(
                    "{} {}",
                    read(&directory.join("cpu.cfs_quota_us"))?.trim(),
                    read(&directory.join("cpu.cfs_period_us"))?
                ),
                CgroupVersion::Two => read(&directory.join("cpu.max"))?,
            };
            let mut numbers = text.split_whitespace().map(|text| text.parse::<u32>().ok());
            let (quota, period) = (numbers.next()??, numbers.next()??);
            Some(f64::from(quota) / f64::from(period.max(1)))
        };
        group.ancestors().filter_map(share).min_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests;
