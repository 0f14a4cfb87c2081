use super::*;

const HYBRID: &str = "12:pids:/libpod_parent/libpod-ab\n\
    5:cpu,cpuacct:/libpod_parent/libpod-ab\n\
    3:memory:/libpod_parent/libpod-ab\n\
    0::/\n";
const HYBRID_MOUNTS: &str = "\
30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:11 - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 / /sys/fs/cgroup/memory rw shared:12 - cgroup cgroup rw,memory
35 30 0:31 / /sys/fs/cgroup/pids rw shared:13 - cgroup cgroup rw,pids
";

fn directory(cgroups: &Cgroups, controller: &str) -> Option<PathBuf> {
    cgroups.group(controller).map(|group| group.path.clone())
}

fn version(cgroups: &Cgroups, controller: &str) -> Option<CgroupVersion> {
    cgroups.group(controller).map(Cgroup::version)
}

#[test]
// invariant: fail-closed
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
        (Some(CgroupVersion::One), Some(CgroupVersion::Two))
    );

    let unified = Cgroups::parse(
        "0::/user.slice/libpod-ab\n",
        "31 25 0:27 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    );
    assert_eq!(version(&unified, "memory"), Some(CgroupVersion::Two));
    assert_eq!(
        directory(&unified, "memory"),
        Some("/sys/fs/cgroup/user.slice/libpod-ab".into())
    );

    // As seen in a container with a subtree mounted.
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

/// Creates a fake hierarchy from paths and contents.
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
fn the_lowest_limit_of_all_ancestors_is_effective() {
    // The layout of crun with systemd: the scope has the limits, the process is in a group
    // below it.
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
    // A sibling is not affected.
    let other = unified(root.path(), "/machine.slice/cd.scope");
    assert_eq!(limits(&other), (None, None, Some(5_000)));

    // The innermost limit may be the lowest, and groups above the mount don't count.
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
fn the_lowest_limit_is_effective_in_version_1_too() {
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
    // Groups that don't bind their descendants, as on old kernels.
    fs_err::write(
        root.path().join("memory/parent/memory.use_hierarchy"),
        "0\n",
    )
    .expect("a file");
    assert_eq!(memory_holds(&found, 1_000), Some(false));
}

#[test]
fn the_limit_of_all_sandboxes_does_not_count_for_one() {
    let root = tree(&[
        ("cynode/memory.max", "1000"),
        ("cynode/pids.max", "100"),
        ("cynode/ab/memory.max", "max"),
        ("cynode/ab/pids.max", "max"),
        ("other/ab/memory.max", "10"),
    ]);
    let mut sandbox = unified(root.path(), "/cynode/ab");
    assert!(
        sandbox.groups[0].is_below("/cynode")
            && !sandbox.groups[0].is_below("/other")
            && !unified(root.path(), "/cynode").groups[0].is_below("/cynode")
    );
    assert!(
        unified(root.path(), "/machine/cynode.slice/ab.scope").groups[0].is_below("cynode.slice")
    );
    assert_eq!(limits(&sandbox), (Some(1_000), None, Some(100)));
    sandbox.groups[0].parent = Some("cynode".to_owned());
    assert_eq!(
        (limits(&sandbox), memory_holds(&sandbox, 1_000)),
        ((None, None, None), None)
    );
}

#[test]
fn in_a_container_the_machine_has_the_memory_and_processes_of_its_cgroup() {
    let root = tree(&[
        ("memory.max", "max"),
        ("pids.max", "2000"),
        ("cgroup.controllers", "cpu memory pids"),
    ]);
    let inside = unified(root.path(), "/worker");
    assert_eq!(inside.limit_of_machine(Controller::Pids), Some(2_000));
    assert_eq!(inside.limit_of_machine(Controller::Memory), None);
    assert_eq!(
        inside.tree(Controller::Memory),
        Some((root.path(), "memory.max"))
    );
    fs_err::write(root.path().join("memory.max"), "4096\n").expect("a file");
    assert_eq!(inside.limit_of_machine(Controller::Memory), Some(4_096));
    fs_err::write(root.path().join("cgroup.controllers"), "cpu pids\n").expect("a file");
    assert_eq!(
        inside.tree(Controller::Memory),
        None,
        "a tree without a memory controller was used"
    );
}

#[test]
fn no_limit_is_enforced_on_an_unlimited_process() {
    let me = std::process::id().cast_signed();
    let missing = unenforced(
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
        super::unenforced(
            i32::MAX,
            &Limits::default(),
            IdMap { first: 0, count: 1 },
            None
        )
        .len(),
        6,
        "limits of a process that is gone count as enforced"
    );
}
