//! Container creation through libpod: the Docker-compatible API can't set explicit id maps.

use std::path::Path;

use cynode_api::Limits;
use serde_json::{Value, json};

use super::{IdMap, MAX_TERMINALS, Mount, Spec};
use crate::limits::OOM_SCORE_ADJ;

/// Largest `nproc` limit, unless a sandbox may have more processes. The cgroup's pids limit is the
/// effective one; this one must be set because Podman's API swaps unequal soft and hard values from
/// `containers.conf`.
const MAX_NPROC: u64 = 4_096;

/// The tmpfs mounts: target, size, and whether programs may be executed from it.
pub(super) fn tmpfs_mounts(memory_bytes: u64) -> [(&'static str, u64, bool); 3] {
    [
        ("/tmp", memory_bytes / 2, true),
        ("/run", 16 << 20, false),
        ("/dev/shm", (memory_bytes / 4).min(64 << 20), false),
    ]
}

/// Pending signals and timers of a sandbox. The kernel also counts them for all user namespaces of
/// the worker's user, so one sandbox could otherwise exhaust them.
const MAX_SIGPENDING: u64 = 2_048;

/// The rlimits of each process, by their names in both APIs.
pub(super) fn rlimits(limits: &Limits) -> [(&'static str, u64); 5] {
    let pids = u64::from(limits.pids);
    let nproc = MAX_NPROC.min(pids * 4).max(pids);
    [
        ("nofile", limits.nofile),
        ("nproc", nproc),
        ("core", 0),
        ("sigpending", MAX_SIGPENDING),
        ("msgqueue", 0),
    ]
}

/// The OOM score of sandboxes, or the worker's own if higher: an unprivileged runtime can't lower
/// it.
pub(super) fn oom_score_adj() -> i32 {
    let own = fs_err::read_to_string("/proc/self/oom_score_adj")
        .ok()
        .and_then(|text| text.trim().parse().ok());
    OOM_SCORE_ADJ.max(own.unwrap_or_default())
}

/// The container as libpod's `SpecGenerator`. Overrides everything that an image could set.
pub(super) fn create_body(spec: &Spec, oci_runtime: Option<&str>, seccomp_profile: &Path) -> Value {
    let Limits {
        memory_bytes,
        cpus,
        pids,
        ..
    } = spec.limits;
    let map = id_map(spec.ids);
    let rlimits = rlimits(&spec.limits)
        .map(|(name, value)| json!({ "type": name, "soft": value, "hard": value }));
    let tmpfs = |target: &str, bytes: u64, exec: bool| {
        let mut options = vec![
            format!("size={bytes}"),
            "mode=1777".to_owned(),
            "nosuid".to_owned(),
            "nodev".to_owned(),
        ];
        if !exec {
            options.push("noexec".to_owned());
        }
        json!({ "type": "tmpfs", "source": "tmpfs", "destination": target, "options": options })
    };
    let mut mounts: Vec<Value> = tmpfs_mounts(memory_bytes)
        .into_iter()
        .map(|(target, bytes, exec)| tmpfs(target, bytes, exec))
        .collect();
    let terminals = format!("max={MAX_TERMINALS}");
    let options = [
        "nosuid",
        "noexec",
        "newinstance",
        "ptmxmode=0666",
        "mode=0620",
        "gid=5",
        &terminals,
    ];
    mounts.push(json!({
        "type": "devpts", "source": "devpts", "destination": "/dev/pts", "options": options,
    }));
    mounts.extend(spec.mounts.iter().map(bind));
    let mut body = json!({
        "name": spec.name,
        "image": spec.image_id,
        "labels": spec.labels,
        "entrypoint": [],
        "command": spec.argv,
        "user": "1000:1000",
        "groups": [],
        "env": spec.env.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        "unsetenvall": true,
        "env_host": false,
        "httpproxy": false,
        "work_dir": "/",
        "hostname": "sandbox",
        "userns": { "nsmode": "private" },
        "idmappings": {
            "HostUIDMapping": false, "HostGIDMapping": false, "UIDMap": map, "GIDMap": map,
        },
        "netns": { "nsmode": "none" },
        "ipcns": { "nsmode": "none" },
        "pidns": { "nsmode": "private" },
        "utsns": { "nsmode": "private" },
        "cgroupns": { "nsmode": "private" },
        "privileged": false,
        "cap_drop": ["ALL"],
        "cap_add": [],
        "no_new_privileges": true,
        // Never a profile from the image's labels.
        "seccomp_policy": "default",
        "seccomp_profile_path": seccomp_profile,
        "read_only_filesystem": true,
        "read_write_tmpfs": false,
        "image_volume_mode": "ignore",
        "mounts": mounts,
        "healthconfig": { "Test": ["NONE"] },
        "stop_signal": 9,
        "stop_timeout": 0,
        "restart_policy": "no",
        "log_configuration": { "driver": "none" },
        "use_image_hosts": true,
        "use_image_resolve_conf": true,
        "terminal": false,
        "stdin": false,
        "init": false,
        "systemd": "false",
        "sdnotifyMode": "ignore",
        "umask": "0022",
        "resource_limits": {
            "memory": { "limit": memory_bytes, "swap": memory_bytes },
            "pids": { "limit": pids },
            "cpu": { "period": CPU_PERIOD_MICROS, "quota": cpu_quota(cpus) },
        },
        "r_limits": rlimits,
        "oom_score_adj": oom_score_adj(),
    });
    if let Some(parent) = &spec.cgroup_parent {
        body["cgroup_parent"] = json!(parent);
    }
    if let Some(name) = oci_runtime {
        body["oci_runtime"] = json!(name);
    }
    body
}

/// Mounts a file as `/etc/hosts`: images without one don't resolve `localhost`, where the proxies are.
pub(super) fn mount_hosts(body: &mut Value, hosts: &Path) {
    let mount = bind(&Mount {
        source: hosts.to_owned(),
        target: "/etc/hosts".to_owned(),
        read_only: true,
    });
    if let Some(mounts) = body["mounts"].as_array_mut() {
        mounts.push(mount);
    }
}

/// Maps the block from id 0. In a small block the last id maps to `nobody`, which owns files in
/// images.
fn id_map(ids: IdMap) -> Value {
    let extent = |inside: u32, outside: u32, size: u32| {
        json!({
            "container_id": inside,
            "host_id": outside,
            "size": size,
        })
    };
    if ids.count > NOBODY_ID {
        json!([extent(0, ids.first, ids.count)])
    } else {
        json!([
            extent(0, ids.first, ids.count - 1),
            extent(NOBODY_ID, ids.first + ids.count - 1, 1)
        ])
    }
}

/// What sandboxes see as `/etc/hosts`.
pub(super) const HOSTS: &str = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost\n";

const NOBODY_ID: u32 = 65_534;

fn bind(mount: &Mount) -> Value {
    let mut options = vec!["bind", "nosuid", "nodev", "private"];
    options.push(if mount.read_only { "ro" } else { "rw" });
    json!({
        "type": "bind", "source": mount.source, "destination": mount.target, "options": options,
    })
}

pub(super) const CPU_PERIOD_MICROS: u64 = 100_000;

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "validated to lie between 0.01 and 1024"
)]
pub(super) fn cpu_quota(cpus: f64) -> u64 {
    (cpus * CPU_PERIOD_MICROS as f64).round().max(1_000.0) as u64
}
