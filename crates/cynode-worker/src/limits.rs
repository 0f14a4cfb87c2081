//! What the kernel really enforces on a sandbox, read back: a runtime may take a limit and not keep it.

use std::{io, path::PathBuf};

use cynode_api::{Limits, Unenforced};

use crate::{idrange::AGENT_ID, runtime::IdMap};

/// The limits and separations that were asked for and do not hold for this process. What can't be read does not hold.
pub(crate) fn missing(pid: i32, limits: &Limits, ids: IdMap) -> Vec<Unenforced> {
    let cgroups = Cgroups::of(pid).unwrap_or_default();
    let mut missing = Vec::new();
    let mut check = |holds: Option<bool>, name: Unenforced| {
        if holds != Some(true) {
            missing.push(name);
        }
    };
    check(memory_holds(&cgroups, limits.memory_bytes), Unenforced::Memory);
    check(cgroups.cpus().map(|cpus| cpus <= limits.cpus.max(0.01) * 1.001), Unenforced::Cpus);
    check(cgroups.number("pids", "pids.max", "pids.max").map(|most| most <= u64::from(limits.pids)), Unenforced::Pids);
    check(open_files(pid).map(|most| most <= limits.nofile), Unenforced::Nofile);
    let owner = outside_of(pid, AGENT_ID);
    check(owner.map(|owner| owner != AGENT_ID), Unenforced::Userns);
    check(owner.map(|owner| owner == ids.first + AGENT_ID), Unenforced::IdRange);
    missing
}

/// Memory and swap together: a sandbox that may swap has more than it was given.
fn memory_holds(cgroups: &Cgroups, bytes: u64) -> Option<bool> {
    let memory = cgroups.number("memory", "memory.limit_in_bytes", "memory.max")?;
    let swap = match cgroups.version("memory")? {
        Version::One => cgroups.number("memory", "memory.memsw.limit_in_bytes", "").map(|both| both <= bytes),
        Version::Two => cgroups.number("memory", "", "memory.swap.max").map(|swap| swap == 0),
    };
    Some(memory <= bytes && swap.unwrap_or_else(|| !host_swaps()))
}

fn host_swaps() -> bool {
    fs_err::read_to_string("/proc/swaps").map_or(true, |text| text.lines().count() > 1)
}

fn open_files(pid: i32) -> Option<u64> {
    let limits = fs_err::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().nth(1)?.parse().ok())
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
#[derive(Debug, Default)]
pub(crate) struct Cgroups {
    /// Controllers (none for version 2) and the directory.
    found: Vec<(Vec<String>, PathBuf)>,
}

impl Cgroups {
    pub(crate) fn of(pid: i32) -> io::Result<Self> {
        Ok(Self::parse(&fs_err::read_to_string(format!("/proc/{pid}/cgroup"))?, &fs_err::read_to_string("/proc/self/mountinfo")?))
    }

    fn parse(cgroup: &str, mountinfo: &str) -> Self {
        let mut found = Vec::new();
        for line in cgroup.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(names), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
            let controllers: Vec<String> = names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
            let mounted = mountinfo.lines().find_map(|line| {
                let (before, after) = line.split_once(" - ")?;
                let mut before = before.split(' ').skip(3);
                let (root, target) = (before.next()?, before.next()?);
                let mut after = after.split(' ');
                let (kind, options) = (after.next()?, after.nth(1)?);
                let fits = match controllers.first() {
                    None => kind == "cgroup2",
                    Some(first) => kind == "cgroup" && options.split(',').any(|option| option == first),
                };
                fits.then(|| (root.to_owned(), target.to_owned()))
            });
            if let Some((root, target)) = mounted {
                // A mount may show only a part of the tree, from its root on.
                let below = path.strip_prefix(root.trim_end_matches('/')).unwrap_or(path);
                found.push((controllers, PathBuf::from(format!("{target}{below}"))));
            }
        }
        Self { found }
    }

    fn version(&self, controller: &str) -> Option<Version> {
        if self.found.iter().any(|(names, _)| names.iter().any(|name| name == controller)) {
            return Some(Version::One);
        }
        self.found.iter().any(|(names, _)| names.is_empty()).then_some(Version::Two)
    }

    /// The text of a controller's file, by its name in either version.
    pub(crate) fn text(&self, controller: &str, one: &str, two: &str) -> Option<String> {
        let named = self.found.iter().find(|(names, _)| names.iter().any(|name| name == controller)).map(|(_, directory)| directory.join(one));
        let path = match named {
            Some(path) => path,
            None => self.found.iter().find(|(names, _)| names.is_empty())?.1.join(two),
        };
        path.is_file().then(|| fs_err::read_to_string(path).ok()).flatten()
    }

    /// A limit; `max` is none, and so is what version 1 says for it.
    fn number(&self, controller: &str, one: &str, two: &str) -> Option<u64> {
        self.text(controller, one, two)?.trim().parse().ok()
    }

    fn cpus(&self) -> Option<f64> {
        let (quota, period) = match self.version("cpu")? {
            Version::One => (self.number("cpu", "cpu.cfs_quota_us", "")?, self.number("cpu", "cpu.cfs_period_us", "")?),
            Version::Two => {
                let text = self.text("cpu", "", "cpu.max")?;
                let mut numbers = text.split_whitespace().map(|text| text.parse::<u64>().ok());
                (numbers.next()??, numbers.next()??)
            }
        };
        #[expect(clippy::cast_precision_loss, reason = "microseconds of a period")]
        Some(quota as f64 / period.max(1) as f64)
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
        cgroups.found.iter().find(|(names, _)| names.iter().any(|name| name == controller)).map(|(_, path)| path.clone())
    }

    #[test]
    fn controllers_are_found_in_every_kind_of_tree() {
        let hybrid = Cgroups::parse(HYBRID, HYBRID_MOUNTS);
        assert_eq!(directory(&hybrid, "memory"), Some("/sys/fs/cgroup/memory/libpod_parent/libpod-ab".into()));
        assert_eq!(directory(&hybrid, "cpu"), Some("/sys/fs/cgroup/cpu,cpuacct/libpod_parent/libpod-ab".into()));
        assert_eq!((hybrid.version("pids"), hybrid.version("io")), (Some(Version::One), Some(Version::Two)));

        let unified = Cgroups::parse("0::/user.slice/libpod-ab\n", "31 25 0:27 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n");
        assert_eq!(unified.version("memory"), Some(Version::Two));
        assert_eq!(unified.found, [(Vec::new(), PathBuf::from("/sys/fs/cgroup/user.slice/libpod-ab"))]);

        // Seen from within a container that was given a part of the tree.
        let part = Cgroups::parse("4:pids:/outer/inner\n", "35 30 0:31 /outer /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n");
        assert_eq!(directory(&part, "pids"), Some("/sys/fs/cgroup/pids/inner".into()));
        assert_eq!(Cgroups::parse("garbage", "").version("memory"), None);
    }

    #[test]
    fn nothing_holds_for_a_process_that_is_not_limited() {
        let me = std::process::id().cast_signed();
        let missing = missing(me, &Limits::default(), IdMap { first: 1 << 30, count: 65_536 });
        for name in [Unenforced::Pids, Unenforced::Userns, Unenforced::IdRange] {
            assert!(missing.contains(&name), "{missing:?}");
        }
        assert_eq!(super::missing(i32::MAX, &Limits::default(), IdMap { first: 0, count: 1 }).len(), 6, "what is gone is held by nothing");
    }
}
