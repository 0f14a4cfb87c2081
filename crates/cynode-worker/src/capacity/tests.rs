use super::*;

const GIB: u64 = 1 << 30;

fn node(memory: u64, change: impl FnOnce(&mut Config)) -> Capacity {
    let mut config = Config::default();
    change(&mut config);
    Capacity::divide(&config, memory, 2, 4_096)
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
fn the_limit_of_all_sandboxes_is_written_once_and_verified() {
    let root = tempfile::tempdir().expect("a directory");
    let file = root.path().join("cynode/memory.limit_in_bytes");
    let parent = |bytes| ParentCgroup {
        name: "/cynode".to_owned(),
        bytes,
        file: Some(file.clone()),
    };
    fs_err::create_dir(root.path().join("cynode")).expect("a directory");
    fs_err::write(&file, "9223372036854771712\n").expect("a file");
    parent(1_000).limit().expect("written");
    assert_eq!(fs_err::read_to_string(&file).expect("there"), "1000");
    let written = fs_err::metadata(&file)
        .expect("there")
        .modified()
        .expect("a time");
    parent(1_000).limit().expect("there already");
    assert_eq!(
        fs_err::metadata(&file)
            .expect("there")
            .modified()
            .expect("a time"),
        written,
        "the limit was written twice"
    );
}
