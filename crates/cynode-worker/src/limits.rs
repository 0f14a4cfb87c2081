//! What the kernel really enforces on a sandbox, read back: a runtime may take a limit and not keep it.

use std::{
    io,
    path::{Path, PathBuf},
};

use cynode_api::{Limits, Unenforced};

use crate::{idrange::AGENT_ID, runtime::IdMap};

/// What the kernel adds to a sandbox's score when it looks for somebody to kill: sandboxes go before the rest of the machine.
pub(crate) const OOM_SCORE_ADJ: i32 = 500;

/// Raises the score of a sandbox's process 1, which all others inherit. Written also when the runtime has set it: written by who
/// may lower scores, nobody inside can lower it again.
pub(crate) fn raise_oom_score(pid: i32) -> io::Result<()> {
    let path = format!("/proc/{pid}/oom_score_adj");
    let score = fs_err::read_to_string(&path)?
        .trim()
        .parse::<i32>()
        .unwrap_or_default();
    fs_err::write(path, score.max(OOM_SCORE_ADJ).to_string())
}

/// Whether the memory of a process is counted below a cgroup.
pub(crate) fn is_below(pid: i32, parent: &str) -> bool {
    Cgroups::of(pid).is_ok_and(|groups| {
        groups
            .group("memory")
            .is_some_and(|group| group.is_below(parent))
    })
}

/// The limits and separations that were asked for and do not hold for this process. What can't be read does not hold. The limits of
/// `parent` and of all above it are nobody's own.
pub(crate) fn missing(
    pid: i32,
    limits: &Limits,
    ids: IdMap,
    parent: Option<&str>,
) -> Vec<Unenforced> {
    let mut cgroups = Cgroups::of(pid).unwrap_or_default();
    for group in &mut cgroups.found {
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
            .map(|most| most <= u64::from(limits.pids)),
        Unenforced::Pids,
    );
    check(
        open_files(pid).map(|most| most <= limits.nofile),
        Unenforced::Nofile,
    );
    let owner = outside_of(pid, AGENT_ID);
    check(owner.map(|owner| owner != AGENT_ID), Unenforced::Userns);
    check(
        owner.map(|owner| owner == ids.first + AGENT_ID),
        Unenforced::IdRange,
    );
    missing
}

/// Memory and swap together: a sandbox that may swap has more than it was given.
fn memory_holds(cgroups: &Cgroups, bytes: u64) -> Option<bool> {
    let memory = cgroups.limit("memory", "memory.limit_in_bytes", "memory.max")?;
    let swap = match cgroups.group("memory")?.version() {
        Version::One => cgroups
            .limit("memory", "memory.memsw.limit_in_bytes", "")
            .map(|both| both <= bytes),
        Version::Two => cgroups
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

/// The id on the host that stands for an id inside.
fn outside_of(pid: i32, inside: u32) -> Option<u32> {
    let map = fs_err::read_to_string(format!("/proc/{pid}/uid_map")).ok()?;
    map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(|text| text.parse::<u32>().ok());
        let (first, host, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        (inside >= first && inside - first < count).then(|| host.saturating_add(inside - first))
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Where a process's cgroups lie: with version 1 one for each controller, with version 2 one for all, on hybrid hosts both.
///
/// What binds a process is the least of its own group's limits and those of all groups above it. Runtimes differ in where
/// they put theirs: crun with systemd runs a container in a group below the one that has the limits.
#[derive(Debug, Default)]
pub(crate) struct Cgroups {
    found: Vec<Group>,
}

#[derive(Debug, PartialEq, Eq)]
struct Group {
    /// None for version 2.
    controllers: Vec<String>,
    /// Where the tree is mounted; what is above that can't be seen.
    top: PathBuf,
    own: PathBuf,
    /// The worker's own group: what binds it and all others with it is no limit of one sandbox.
    shared: Option<PathBuf>,
    /// The name of the group that all sandboxes are in, whose limits are no limits of one either.
    parent: Option<String>,
}

/// The name of the directory that a runtime makes of a cgroup's.
fn directory_name(cgroup: &str) -> String {
    cgroup.trim_start_matches('/').to_owned()
}

impl Group {
    fn version(&self) -> Version {
        if self.controllers.is_empty() {
            Version::Two
        } else {
            Version::One
        }
    }

    /// The process's own directory, then those above it.
    fn upwards(&self) -> impl Iterator<Item = &Path> {
        let is_shared = |directory: &Path| {
            self.shared
                .as_ref()
                .is_some_and(|shared| shared.starts_with(directory) && directory != self.own)
        };
        let is_parent = |directory: &Path| {
            directory != self.own
                && self
                    .parent
                    .as_ref()
                    .is_some_and(|name| directory.ends_with(name))
        };
        self.own.ancestors().take_while(move |directory| {
            directory.starts_with(&self.top) && !is_shared(directory) && !is_parent(directory)
        })
    }

    fn is_below(&self, parent: &str) -> bool {
        let name = directory_name(parent);
        self.own
            .ancestors()
            .skip(1)
            .take_while(|directory| directory.starts_with(&self.top))
            .any(|directory| directory.ends_with(&name))
    }

    /// A file's texts where they bind the process: its own first, then upwards.
    fn texts(&self, name: &str) -> impl Iterator<Item = String> {
        // The memory of version 1 could be told that a group does not bind those below it.
        let binds = |directory: &&Path| {
            *directory == self.own
                || read(&directory.join("memory.use_hierarchy"))
                    .is_none_or(|text| text.trim() != "0")
        };
        self.upwards()
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
        let mut found = Self::parse(
            &fs_err::read_to_string(format!("/proc/{pid}/cgroup"))?,
            &mounts,
        );
        let ours = Self::parse(&fs_err::read_to_string("/proc/self/cgroup")?, &mounts);
        for group in &mut found.found {
            group.shared = ours
                .found
                .iter()
                .find(|own| own.controllers == group.controllers)
                .map(|own| own.own.clone());
        }
        Ok(found)
    }

    fn parse(cgroup: &str, mountinfo: &str) -> Self {
        let mut found = Vec::new();
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
                // A mount may show only a part of the tree, from its root on.
                let below = path
                    .strip_prefix(root.trim_end_matches('/'))
                    .unwrap_or(path);
                let own = PathBuf::from(format!("{target}{below}").trim_end_matches('/'));
                found.push(Group {
                    controllers,
                    top: PathBuf::from(target),
                    own,
                    shared: None,
                    parent: None,
                });
            }
        }
        Self { found }
    }

    /// The group that a controller keeps the process in.
    fn group(&self, controller: &str) -> Option<&Group> {
        let named = self
            .found
            .iter()
            .find(|group| group.controllers.iter().any(|name| name == controller));
        named.or_else(|| self.found.iter().find(|group| group.controllers.is_empty()))
    }

    /// The text of a controller's file, by its name in either version, in the nearest group that has it.
    pub(crate) fn text(&self, controller: &str, one: &str, two: &str) -> Option<String> {
        let group = self.group(controller)?;
        group
            .texts(if group.version() == Version::One {
                one
            } else {
                two
            })
            .next()
    }

    /// The limit that binds. `max` is none, and so is what version 1 says for it.
    fn limit(&self, controller: &str, one: &str, two: &str) -> Option<u64> {
        let group = self.group(controller)?;
        group
            .texts(if group.version() == Version::One {
                one
            } else {
                two
            })
            .filter_map(|text| text.trim().parse().ok())
            .min()
    }

    /// What bounds everything in the tree that is seen here: there is such a bound in a container, and none on a machine.
    pub(crate) fn memory_of_machine(&self) -> Option<u64> {
        let (top, file) = self.memory_tree()?;
        read(&top.join(file))?.trim().parse().ok()
    }

    /// The top of the tree that limits memory, and the name of the file with the limit.
    pub(crate) fn memory_tree(&self) -> Option<(&Path, &'static str)> {
        let group = self.group("memory")?;
        match group.version() {
            Version::One => Some((&group.top, "memory.limit_in_bytes")),
            Version::Two => {
                let controllers = read(&group.top.join("cgroup.controllers"))?;
                controllers
                    .split_whitespace()
                    .any(|name| name == "memory")
                    .then_some((&*group.top, "memory.max"))
            }
        }
    }

    fn cpus(&self) -> Option<f64> {
        let group = self.group("cpu")?;
        let share = |directory: &Path| {
            let text = match group.version() {
                Version::One => format!(
                    "{} {}",
                    read(&directory.join("cpu.cfs_quota_us"))?.trim(),
                    read(&directory.join("cpu.cfs_period_us"))?
                ),
                Version::Two => read(&directory.join("cpu.max"))?,
            };
            let mut numbers = text.split_whitespace().map(|text| text.parse::<u32>().ok());
            let (quota, period) = (numbers.next()??, numbers.next()??);
            Some(f64::from(quota) / f64::from(period.max(1)))
        };
        group.upwards().filter_map(share).min_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "12:pids:/libpod_parent/libpod-ab\n5:cpu,cpuacct:/libpod_parent/libpod-ab\n3:memory:/libpod_parent/libpod-ab\n0::/\n";
    const HYBRID_MOUNTS: &str = "\
30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:11 - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 / /sys/fs/cgroup/memory rw shared:12 - cgroup cgroup rw,memory
35 30 0:31 / /sys/fs/cgroup/pids rw shared:13 - cgroup cgroup rw,pids
";

    fn directory(cgroups: &Cgroups, controller: &str) -> Option<PathBuf> {
        cgroups.group(controller).map(|group| group.own.clone())
    }

    fn version(cgroups: &Cgroups, controller: &str) -> Option<Version> {
        cgroups.group(controller).map(Group::version)
    }

    #[test]
    fn controllers_are_found_in_every_kind_of_tree() {
        let hybrid = Cgroups::parse(HYBRID, HYBRID_MOUNTS);
        assert_eq!(
            directory(&hybrid, "memory"),
            Some("/sys/fs/cgroup/memory/libpod_parent/libpod-ab".into())
        );
        assert_eq!(
            directory(&hybrid, "cpu"),
            Some("/sys/fs/cgroup/cpu,cpuacct/libpod_parent/libpod-ab".into())
        );
        assert_eq!(
            (version(&hybrid, "pids"), version(&hybrid, "io")),
            (Some(Version::One), Some(Version::Two))
        );

        let unified = Cgroups::parse(
            "0::/user.slice/libpod-ab\n",
            "31 25 0:27 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
        );
        assert_eq!(version(&unified, "memory"), Some(Version::Two));
        assert_eq!(
            directory(&unified, "memory"),
            Some("/sys/fs/cgroup/user.slice/libpod-ab".into())
        );

        // Seen from within a container that was given a part of the tree.
        let part = Cgroups::parse(
            "4:pids:/outer/inner\n",
            "35 30 0:31 /outer /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n",
        );
        assert_eq!(
            directory(&part, "pids"),
            Some("/sys/fs/cgroup/pids/inner".into())
        );
        assert_eq!(version(&Cgroups::parse("garbage", ""), "memory"), None);
    }

    /// A made-up tree: files by their path, with their text.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for (path, text) in files {
            let path = root.path().join(path);
            fs_err::create_dir_all(path.parent().expect("a parent")).expect("directories");
            fs_err::write(path, format!("{text}\n")).expect("a file");
        }
        root
    }

    fn unified(root: &Path, group: &str) -> Cgroups {
        Cgroups::parse(
            &format!("0::{group}\n"),
            &format!("31 25 0:27 / {} rw - cgroup2 cgroup2 rw\n", root.display()),
        )
    }

    fn limits(cgroups: &Cgroups) -> (Option<u64>, Option<f64>, Option<u64>) {
        (
            cgroups.limit("memory", "memory.limit_in_bytes", "memory.max"),
            cgroups.cpus(),
            cgroups.limit("pids", "pids.max", "pids.max"),
        )
    }

    #[test]
    fn the_least_limit_of_all_groups_above_binds() {
        // As crun with systemd makes them: the limits are the scope's, the process is in a group below it.
        let root = tree(&[
            ("machine.slice/memory.max", "max"),
            ("machine.slice/pids.max", "5000"),
            ("machine.slice/ab.scope/memory.max", "1000"),
            ("machine.slice/ab.scope/memory.swap.max", "0"),
            ("machine.slice/ab.scope/cpu.max", "50000 100000"),
            ("machine.slice/ab.scope/pids.max", "100"),
            ("machine.slice/ab.scope/memory.events", "oom 0\noom_kill 3"),
            ("machine.slice/ab.scope/container/memory.max", "max"),
            ("machine.slice/ab.scope/container/cpu.max", "max 100000"),
            ("machine.slice/ab.scope/container/pids.max", "max"),
        ]);
        let scope = unified(root.path(), "/machine.slice/ab.scope/container");
        assert_eq!(limits(&scope), (Some(1_000), Some(0.5), Some(100)));
        assert_eq!(
            (memory_holds(&scope, 1_000), memory_holds(&scope, 999)),
            (Some(true), Some(false))
        );
        assert!(
            scope
                .text("memory", "memory.oom_control", "memory.events")
                .is_some_and(|text| text.contains("oom_kill 3"))
        );
        // Nothing of it binds a neighbour.
        let other = unified(root.path(), "/machine.slice/cd.scope");
        assert_eq!(limits(&other), (None, None, Some(5_000)));

        // Its own may be the least, and what is above the mount is nobody's limit.
        let root = tree(&[
            ("pids.max", "7"),
            ("part/pids.max", "50"),
            ("part/a/pids.max", "20"),
            ("part/a/memory.max", "10"),
            ("part/a/b/memory.max", "5"),
        ]);
        let part = Cgroups::parse(
            "0::/a/b\n",
            &format!(
                "31 25 0:27 / {} rw - cgroup2 cgroup2 rw\n",
                root.path().join("part").display()
            ),
        );
        assert_eq!(limits(&part), (Some(5), None, Some(20)));
    }

    #[test]
    fn so_it_is_with_version_1() {
        let unlimited = "9223372036854771712";
        let root = tree(&[
            ("memory/parent/memory.limit_in_bytes", "1000"),
            ("memory/parent/memory.memsw.limit_in_bytes", "1000"),
            ("memory/parent/memory.use_hierarchy", "1"),
            ("memory/parent/ab/memory.limit_in_bytes", unlimited),
            ("memory/parent/ab/memory.memsw.limit_in_bytes", unlimited),
            ("cpu/parent/cpu.cfs_quota_us", "50000"),
            ("cpu/parent/cpu.cfs_period_us", "100000"),
            ("cpu/parent/ab/cpu.cfs_quota_us", "-1"),
            ("cpu/parent/ab/cpu.cfs_period_us", "100000"),
            ("pids/parent/pids.max", "100"),
            ("pids/parent/ab/pids.max", "max"),
        ]);
        let mounts: String = ["memory", "cpu", "pids"]
            .map(|name| {
                format!(
                    "34 30 0:30 / {} rw - cgroup cgroup rw,{name}\n",
                    root.path().join(name).display()
                )
            })
            .concat();
        let found = Cgroups::parse(
            "3:memory:/parent/ab\n4:cpu:/parent/ab\n5:pids:/parent/ab\n",
            &mounts,
        );
        assert_eq!(limits(&found), (Some(1_000), Some(0.5), Some(100)));
        assert_eq!(memory_holds(&found, 1_000), Some(true));
        // Groups that do not bind what is below them, as old kernels have them.
        fs_err::write(
            root.path().join("memory/parent/memory.use_hierarchy"),
            "0\n",
        )
        .expect("a file");
        assert_eq!(memory_holds(&found, 1_000), Some(false));
    }

    #[test]
    fn the_limit_of_all_sandboxes_is_the_limit_of_none() {
        let root = tree(&[
            ("cynode/memory.max", "1000"),
            ("cynode/pids.max", "100"),
            ("cynode/ab/memory.max", "max"),
            ("cynode/ab/pids.max", "max"),
            ("other/ab/memory.max", "10"),
        ]);
        let mut sandbox = unified(root.path(), "/cynode/ab");
        assert!(
            sandbox.found[0].is_below("/cynode")
                && !sandbox.found[0].is_below("/other")
                && !unified(root.path(), "/cynode").found[0].is_below("/cynode")
        );
        assert!(
            unified(root.path(), "/machine/cynode.slice/ab.scope").found[0]
                .is_below("cynode.slice")
        );
        assert_eq!(limits(&sandbox), (Some(1_000), None, Some(100)));
        sandbox.found[0].parent = Some("cynode".to_owned());
        assert_eq!(
            (limits(&sandbox), memory_holds(&sandbox, 1_000)),
            ((None, None, None), None)
        );
    }

    #[test]
    fn a_container_is_a_machine_with_the_memory_of_its_cgroup() {
        let root = tree(&[
            ("memory.max", "max"),
            ("cgroup.controllers", "cpu memory pids"),
        ]);
        let inside = unified(root.path(), "/worker");
        assert_eq!(inside.memory_of_machine(), None);
        assert_eq!(inside.memory_tree(), Some((root.path(), "memory.max")));
        fs_err::write(root.path().join("memory.max"), "4096\n").expect("a file");
        assert_eq!(inside.memory_of_machine(), Some(4_096));
        fs_err::write(root.path().join("cgroup.controllers"), "cpu pids\n").expect("a file");
        assert_eq!(inside.memory_tree(), None, "nobody limits memory there");
    }

    #[test]
    fn nothing_holds_for_a_process_that_is_not_limited() {
        let me = std::process::id().cast_signed();
        let missing = missing(
            me,
            &Limits::default(),
            IdMap {
                first: 1 << 30,
                count: 65_536,
            },
            None,
        );
        for name in [Unenforced::Pids, Unenforced::Userns, Unenforced::IdRange] {
            assert!(missing.contains(&name), "{missing:?}");
        }
        assert_eq!(
            super::missing(
                i32::MAX,
                &Limits::default(),
                IdMap { first: 0, count: 1 },
                None
            )
            .len(),
            6,
            "what is gone is held by nothing"
        );
    }
}
