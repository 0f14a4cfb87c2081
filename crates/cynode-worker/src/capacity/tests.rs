use super::*;

const GIB: u64 = 1 << 30;
const MACHINE: Machine = Machine {
    memory_bytes: 24 * GIB,
    processors: 2,
    processes: 32_768,
    disk_bytes: Some(53 * GIB),
    max_nofile: 4_096,
};

fn node(memory: u64, change: impl FnOnce(&mut Config)) -> Capacity {
    let mut config = Config::default();
    change(&mut config);
    Capacity::divide(
        &config,
        Machine {
            memory_bytes: memory,
            ..MACHINE
        },
    )
}

fn refusal(node: &Capacity, request: LimitsRequest) -> Option<String> {
    node.limits(request).err().map(|error| {
        assert!(error.is(ErrorCode::LimitUnenforceable), "{error:?}");
        error.into_problem().detail
    })
}

#[test]
fn a_sandbox_gets_at_most_the_node_less_its_reserve() {
    let node = node(24 * GIB, |_| {});
    assert_eq!(
        (node.reserved_memory_bytes, node.largest.memory_bytes),
        (2 * GIB, 22 * GIB)
    );
    let memory = |bytes| LimitsRequest {
        memory_bytes: Some(bytes),
        ..Default::default()
    };
    assert_eq!(
        node.limits(memory(22 * GIB))
            .expect("all of it")
            .memory_bytes,
        22 * GIB
    );
    for bytes in [22 * GIB + 1, 1 << 45] {
        let detail = refusal(&node, memory(bytes)).expect("more than there is");
        assert_eq!(
            detail,
            format!(
                "limits.memory_bytes: this node gives a sandbox at most {} bytes of memory",
                22 * GIB
            )
        );
    }
    let cpus = |cpus| LimitsRequest {
        cpus: Some(cpus),
        ..Default::default()
    };
    assert_eq!(
        node.limits(cpus(2.0)).expect("all of them").cpus.to_bits(),
        2.0_f64.to_bits()
    );
    for more in [2.01, 1_000.0] {
        assert_eq!(
            refusal(&node, cpus(more)).expect("more"),
            "limits.cpus: this node gives a sandbox at most 2 processors"
        );
    }
    let pids = |pids| LimitsRequest {
        pids: Some(pids),
        ..Default::default()
    };
    assert_eq!(node.limits(pids(4_096)).expect("the most").pids, 4_096);
    assert_eq!(
        refusal(&node, pids(4_097)).expect("more"),
        "limits.pids: this node gives a sandbox at most 4096 processes"
    );
    let disk = |bytes| LimitsRequest {
        disk_bytes: Some(bytes),
        ..Default::default()
    };
    assert_eq!(
        node.limits(disk(53 * GIB)).expect("all of it").disk_bytes,
        53 * GIB
    );
    for bytes in [53 * GIB + 1, (1 << 44) - 4_096, 1 << 45] {
        assert_eq!(
            refusal(&node, disk(bytes)).expect("more than there is"),
            format!(
                "limits.disk_bytes: this node gives a sandbox at most {} bytes of disk",
                53 * GIB
            )
        );
    }
    let nofile = |nofile| LimitsRequest {
        nofile: Some(nofile),
        ..Default::default()
    };
    assert_eq!(node.limits(nofile(4_096)).expect("the most").nofile, 4_096);
    assert!(
        refusal(&node, nofile(4_097))
            .expect("more")
            .starts_with("limits.nofile: ")
    );
}

#[test]
fn two_hundred_default_sandboxes_fit_unless_the_operator_configures_less() {
    let default = Limits::default().memory_bytes;
    assert_eq!(node(24 * GIB, |_| {}).promised_memory_bytes, 200 * default);
    assert_eq!(
        node(24 * GIB, |config| config.memory_overcommit = Some(1.0)).promised_memory_bytes,
        22 * GIB
    );
    assert_eq!(
        node(24 * GIB, |config| config.memory_overcommit = Some(1.5)).promised_memory_bytes,
        33 * GIB
    );
    // The largest sandbox fits on a node that admits few.
    assert_eq!(
        node(24 * GIB, |config| config.max_sandboxes = 2).promised_memory_bytes,
        22 * GIB
    );
}

#[test]
fn a_node_smaller_than_the_defaults_gives_what_it_has() {
    let small = node(GIB, |config| config.max_pids = 100);
    assert_eq!(
        (small.reserved_memory_bytes, small.largest.memory_bytes),
        (256 << 20, 768 << 20)
    );
    let limits = small
        .limits(LimitsRequest::default())
        .expect("defaults always fit");
    assert_eq!((limits.memory_bytes, limits.pids), (768 << 20, 100));
    assert_eq!(small.promised_memory_bytes, 200 * (768 << 20));
    let request = LimitsRequest {
        memory_bytes: Some(2 * GIB),
        ..Default::default()
    };
    assert!(
        refusal(&small, request).is_some(),
        "an explicit request beyond the node was accepted"
    );
}

#[test]
fn a_sandbox_without_a_request_gets_no_larger_disk_than_the_node_has() {
    let disk = |disk_bytes| {
        let machine = Machine {
            disk_bytes,
            ..MACHINE
        };
        let node = Capacity::divide(&Config::default(), machine);
        let limits = node.limits(LimitsRequest::default());
        limits.expect("defaults always fit").disk_bytes
    };
    assert_eq!(disk(Some(GIB)), GIB);
    for plenty in [Some(53 * GIB), None] {
        assert_eq!(disk(plenty), Limits::default().disk_bytes);
    }
}

#[test]
fn all_sandboxes_together_leave_processes_to_the_machine() {
    for (has, gives) in [
        (32_768, 28_672),
        (1 << 22, (1 << 22) / 8 * 7),
        (4_000, 3_000),
        (1_200, 600),
        (301, 151),
    ] {
        let machine = Machine {
            processes: has,
            ..MACHINE
        };
        let node = Capacity::divide(&Config::default(), machine);
        assert_eq!(node.processes, gives, "of {has}");
    }
}

#[test]
fn a_configuration_must_leave_resources_to_sandboxes() {
    let refused = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        check_config(&config).err().map(|error| error.to_string())
    };
    assert_eq!(refused(|_| {}), None);
    assert!(
        refused(|config| config.reserved_memory_bytes = Some(u64::MAX))
            .expect("refused")
            .contains("worker.reserved_memory_bytes")
    );
    assert_eq!(
        refused(|config| config.reserved_memory_bytes = Some(0)),
        None
    );
    for factor in [0.99, 1_001.0, f64::NAN] {
        let config = Config {
            memory_overcommit: Some(factor),
            ..Config::default()
        };
        assert!(
            check_config(&config)
                .expect_err("refused")
                .to_string()
                .contains("worker.memory_overcommit")
        );
    }
    for (pids, fits) in [
        (7, false),
        (8, true),
        (1 << 20, true),
        ((1 << 20) + 1, false),
    ] {
        assert_eq!(
            check_config(&Config {
                max_pids: pids,
                ..Config::default()
            })
            .is_ok(),
            fits,
            "{pids}"
        );
    }
    for (name, fits) in [
        ("cynode", true),
        ("a-b_1", true),
        ("", false),
        ("a/b", false),
        ("..", false),
        ("-a", false),
        ("a b", false),
    ] {
        assert_eq!(
            check_config(&Config {
                cgroup_parent: name.to_owned(),
                ..Config::default()
            })
            .is_ok(),
            fits,
            "{name}"
        );
    }
}

#[test]
fn the_limits_of_all_sandboxes_are_written_once_and_verified() {
    let root = tempfile::tempdir().expect("a directory");
    let limit = |controller: Controller, file: &str, value| SharedLimit {
        controller,
        value,
        file: root
            .path()
            .join(controller.name())
            .join("cynode")
            .join(file),
    };
    let limits = vec![
        limit(Controller::Memory, "memory.limit_in_bytes", 1_000),
        limit(Controller::Pids, "pids.max", 28_672),
    ];
    for (limit, unlimited) in limits.iter().zip(["9223372036854771712\n", "max\n"]) {
        let directory = limit.file.parent().expect("a parent");
        fs_err::create_dir_all(directory).expect("a directory");
        fs_err::write(&limit.file, unlimited).expect("a file");
    }
    let files: Vec<PathBuf> = limits.iter().map(|limit| limit.file.clone()).collect();
    let written = || -> Vec<_> {
        let modified = |file| fs_err::metadata(file)?.modified();
        let times: std::io::Result<_> = files.iter().map(modified).collect();
        times.expect("files with times")
    };
    let parent = ParentCgroup {
        name: "/cynode".to_owned(),
        limits,
    };
    parent.limit().expect("written");
    let texts: Vec<String> = files
        .iter()
        .map(|file| fs_err::read_to_string(file).expect("there"))
        .collect();
    assert_eq!(texts, ["1000", "28672"]);
    let before = written();
    parent.limit().expect("there already");
    assert_eq!(written(), before, "a limit was written twice");
}
