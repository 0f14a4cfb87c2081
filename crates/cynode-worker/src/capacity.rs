//! What this node has for sandboxes: the largest limits of one, and the memory of all together.
//!
//! Invariant: no sandbox is given a limit beyond the node, and where the host allows it all sandboxes run below one cgroup that
//! leaves the reserve to the rest of the machine, whatever their own limits add up to.

use std::path::{Path, PathBuf};

use cynode_api::{
    ErrorCode, LargestLimits, Limits, LimitsRequest, session_limits::MIN_MEMORY_BYTES,
};
use cynode_service::{ApiError, ConfigError, checks::check_limits};

use crate::{config::Config, host, limits::Cgroups};

const PAGE: u64 = 4_096;
/// Bounds of the reserve when none is configured: an eighth of the memory, within these.
const MIN_RESERVE: u64 = 256 << 20;
const MAX_RESERVE: u64 = 2 << 30;
const MAX_OVERCOMMIT: u32 = 1_000;

/// The node's resources as the configuration divides them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Capacity {
    pub(crate) memory_bytes: u64,
    /// Memory that no sandbox gets.
    pub(crate) reserved_memory_bytes: u64,
    pub(crate) largest: LargestLimits,
    /// What the memory limits of all sandboxes may add up to.
    pub(crate) promised_memory_bytes: u64,
    max_nofile: u64,
}

impl Capacity {
    pub(crate) fn of(config: &Config, max_nofile: u64) -> Self {
        let processors = std::thread::available_parallelism()
            .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX));
        Self::divide(config, memory(), processors, max_nofile)
    }

    fn divide(config: &Config, memory_bytes: u64, processors: u32, max_nofile: u64) -> Self {
        let reserved_memory_bytes = config
            .reserved_memory_bytes
            .unwrap_or_else(|| (memory_bytes / 8).clamp(MIN_RESERVE, MAX_RESERVE));
        let left = memory_bytes.saturating_sub(reserved_memory_bytes) / PAGE * PAGE;
        let largest = LargestLimits {
            memory_bytes: left,
            cpus: f64::from(processors),
            pids: config.max_pids,
        };
        let promised_memory_bytes = match config.memory_overcommit {
            Some(factor) => times(left, factor),
            // As many default sandboxes as are admitted at all.
            None => left.max(
                (config.max_sandboxes as u64)
                    .saturating_mul(Limits::default().memory_bytes.min(left)),
            ),
        };
        Self {
            memory_bytes,
            reserved_memory_bytes,
            largest,
            promised_memory_bytes,
            max_nofile,
        }
    }

    /// The limits of a sandbox that asks for none. A node that is smaller than the defaults gives what it has.
    pub(crate) fn default_limits(&self) -> Limits {
        let default = Limits::default();
        Limits {
            memory_bytes: default.memory_bytes.min(self.largest.memory_bytes),
            pids: default.pids.min(self.largest.pids),
            ..default
        }
    }

    /// The limits of a sandbox by its request; refused by name when one is beyond the node.
    pub(crate) fn limits(&self, request: LimitsRequest) -> Result<Limits, ApiError> {
        check_limits(&request)?;
        let default = self.default_limits();
        let limits = Limits {
            memory_bytes: request.memory_bytes.unwrap_or(default.memory_bytes),
            cpus: request.cpus.unwrap_or(default.cpus),
            pids: request.pids.unwrap_or(default.pids),
            disk_bytes: request.disk_bytes.unwrap_or(default.disk_bytes),
            nofile: request.nofile.unwrap_or(default.nofile),
        };
        self.check(&limits)?;
        Ok(limits)
    }

    /// Refuses limits beyond the node.
    pub(crate) fn check(&self, limits: &Limits) -> Result<(), ApiError> {
        let refuse = |detail: String| Err(ApiError::new(ErrorCode::LimitUnenforceable, detail));
        if let Some(excess) = self.largest.excess(limits) {
            return refuse(format!(
                "limits.{}: this node gives a sandbox at most {}",
                excess.limit, excess.most
            ));
        }
        if limits.nofile > self.max_nofile {
            return refuse(format!(
                "limits.nofile: this host lets a sandbox have at most {} open files",
                self.max_nofile
            ));
        }
        Ok(())
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a factor of a size; the result saturates"
)]
fn times(bytes: u64, factor: f64) -> u64 {
    (bytes as f64 * factor) as u64
}

/// Refuses a division of the node that leaves nothing to sandboxes.
pub(crate) fn check_config(config: &Config) -> Result<(), ConfigError> {
    let bad = |key: &str, message: String| {
        Err(ConfigError::Value {
            key: format!("worker.{key}"),
            message,
        })
    };
    let memory = memory();
    if config
        .reserved_memory_bytes
        .is_some_and(|reserve| reserve.saturating_add(MIN_MEMORY_BYTES) > memory)
    {
        return bad(
            "reserved_memory_bytes",
            format!("leaves no sandbox its {MIN_MEMORY_BYTES} bytes: this machine has {memory}"),
        );
    }
    if config
        .memory_overcommit
        .is_some_and(|factor| !(1.0..=f64::from(MAX_OVERCOMMIT)).contains(&factor))
    {
        return bad(
            "memory_overcommit",
            format!("must lie between 1 and {MAX_OVERCOMMIT}"),
        );
    }
    let pids = cynode_api::session_limits::MIN_PIDS..=1 << 20;
    if !pids.contains(&config.max_pids) {
        return bad(
            "max_pids",
            format!("must lie between {} and {}", pids.start(), pids.end()),
        );
    }
    let name = &config.cgroup_parent;
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if name.is_empty()
        || name.len() > 64
        || !name.bytes().all(is_name)
        || name.starts_with('-')
        || name.ends_with('-')
    {
        return bad(
            "cgroup_parent",
            "must be a name of 1 to 64 letters, digits, '-' and '_'".to_owned(),
        );
    }
    Ok(())
}

/// The memory of this machine, or of the container that all of it runs in.
pub(crate) fn memory() -> u64 {
    let text = fs_err::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = text.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    let machine = kilobytes.unwrap_or(0) * 1024;
    // The top of the tree is what bounds a sandbox too; the worker's own group may be a unit with a limit of its own.
    let bounded = Cgroups::of(std::process::id().cast_signed())
        .ok()
        .and_then(|groups| groups.memory_of_machine());
    machine.min(bounded.unwrap_or(u64::MAX))
}

/// The cgroup that all sandboxes of this node run below.
#[derive(Clone, Debug)]
pub(crate) struct Parent {
    /// As the runtime is told it.
    pub(crate) name: String,
    bytes: u64,
    /// Where the limit is, when it is ours to write.
    file: Option<PathBuf>,
}

impl Parent {
    /// Makes the cgroup and limits it. Fails with the reason when the host does not let us.
    pub(crate) async fn prepare(
        config: &Config,
        manager: &str,
        rootless: bool,
        bytes: u64,
    ) -> Result<Self, String> {
        let name = &config.cgroup_parent;
        if config.podman_socket.is_some() && config.engine == crate::Engine::Podman {
            return Err(
                "somebody else's Podman service decides where its containers run".to_owned(),
            );
        }
        if manager == "systemd" {
            let slice = format!("{name}.slice");
            let (property, whose) = (
                format!("MemoryMax={bytes}"),
                if rootless { "--user" } else { "--system" },
            );
            host::run(
                "systemctl",
                &[whose, "set-property", "--runtime", &slice, &property],
            )
            .await
            .map_err(|error| format!("systemctl set-property: {error}"))?;
            return Ok(Self {
                name: slice,
                bytes,
                file: None,
            });
        }
        if rootless {
            return Err("an ordinary user has no cgroup of its own here".to_owned());
        }
        let parent = Self {
            name: format!("/{name}"),
            bytes,
            file: Some(Self::file(name)?),
        };
        parent.limit().map_err(|error| error.to_string())?;
        Ok(parent)
    }

    /// Whether such a cgroup can be made here: one of another name is, and goes again.
    pub(crate) fn probe() -> Result<(), String> {
        let file = Self::file(&format!("cynode-probe-{}", uuid::Uuid::new_v4().simple()))?;
        let parent = Self {
            name: String::new(),
            bytes: 1 << 30,
            file: Some(file.clone()),
        };
        let limited = parent.limit().map_err(|error| error.to_string());
        if let Some(directory) = file.parent() {
            drop(fs_err::remove_dir(directory));
        }
        limited
    }

    fn file(name: &str) -> Result<PathBuf, String> {
        let groups =
            Cgroups::of(std::process::id().cast_signed()).map_err(|error| error.to_string())?;
        let (top, file) = groups
            .memory_tree()
            .ok_or("no cgroup tree has the memory controller")?;
        Ok(top.join(name).join(file))
    }

    /// Makes sure that the cgroup is there with its limit. Cheap when it is.
    pub(crate) fn limit(&self) -> std::io::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let limit = |file: &Path| {
            fs_err::read_to_string(file)
                .ok()
                .and_then(|text| text.trim().parse::<u64>().ok())
        };
        if limit(file) == Some(self.bytes) {
            return Ok(());
        }
        let directory = file.parent().unwrap_or(file);
        match fs_err::create_dir(directory) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if !file.exists()
            && let Some(top) = directory.parent()
        {
            // Version 2: a controller is there for whom the group above hands it on to.
            fs_err::write(top.join("cgroup.subtree_control"), "+memory")?;
        }
        fs_err::write(file, self.bytes.to_string())?;
        match limit(file) {
            Some(kept) if kept <= self.bytes => Ok(()),
            kept => Err(std::io::Error::other(format!(
                "{} says {kept:?} after {} was written",
                file.display(),
                self.bytes
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn node(memory: u64, change: impl FnOnce(&mut Config)) -> Capacity {
        let mut config = Config::default();
        change(&mut config);
        Capacity::divide(&config, memory, 2, 4_096)
    }

    fn refusal(node: &Capacity, request: LimitsRequest) -> Option<String> {
        node.limits(request).err().map(|error| {
            assert!(error.0.is(ErrorCode::LimitUnenforceable), "{error:?}");
            error.0.detail
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
            let said = refusal(&node, memory(bytes)).expect("more than there is");
            assert_eq!(
                said,
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
    fn two_hundred_default_sandboxes_fit_unless_the_operator_promises_less() {
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
        let asked = LimitsRequest {
            memory_bytes: Some(2 * GIB),
            ..Default::default()
        };
        assert!(
            refusal(&small, asked).is_some(),
            "who asks for it by name is told"
        );
    }

    #[test]
    fn the_division_of_a_node_leaves_something_to_sandboxes() {
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
    fn the_limit_of_all_sandboxes_is_written_once_and_read_back() {
        let root = tempfile::tempdir().expect("a directory");
        let file = root.path().join("cynode/memory.limit_in_bytes");
        let parent = |bytes| Parent {
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
            "nothing is written twice"
        );
    }
}
