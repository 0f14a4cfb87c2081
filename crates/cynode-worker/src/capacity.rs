//! The node's resources for sandboxes: the largest limits of one, and the memory and processes of
//! all together.
//!
//! Invariant: no sandbox gets a limit beyond the node. Where the host allows it, all sandboxes run
//! below one cgroup that leaves the reserve to the rest of the machine, whatever their own limits
//! add up to.

use std::path::{Path, PathBuf};

use cynode_api::{
    ErrorCode, LargestLimits, Limits, LimitsRequest, session_limits::MIN_MEMORY_BYTES,
};
use cynode_service::{ApiError, ConfigError, checks::check_limits};

use crate::{
    config::Config,
    disk, host,
    limits::{Cgroups, Controller},
};

const PAGE_BYTES: u64 = 4_096;
/// Bounds of the default reserve, an eighth of the memory.
const MIN_RESERVE: u64 = 256 << 20;
const MAX_RESERVE: u64 = 2 << 30;
const MAX_OVERCOMMIT: u32 = 1_000;
/// Lower bound of the processes that are not available to sandboxes, an eighth.
const MIN_RESERVED_PROCESSES: u64 = 1_000;
/// The kernel's default, for a machine that hides its own.
const DEFAULT_PID_MAX: u64 = 32_768;

/// What the machine has.
#[derive(Clone, Copy, Debug)]
struct Machine {
    memory_bytes: u64,
    processors: u32,
    /// Processes and threads.
    processes: u64,
    /// The capacity of the file system with the worker's directory.
    disk_bytes: Option<u64>,
    max_nofile: u64,
}

/// The node's resources as the configuration divides them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Capacity {
    pub(crate) memory_bytes: u64,
    /// Memory that is not available to sandboxes.
    pub(crate) reserved_memory_bytes: u64,
    pub(crate) largest: LargestLimits,
    /// Maximum sum of the memory limits of all sandboxes.
    pub(crate) promised_memory_bytes: u64,
    /// Maximum number of processes and threads in all sandboxes together.
    pub(crate) processes: u64,
    max_nofile: u64,
}

impl Capacity {
    pub(crate) fn of(config: &Config, max_nofile: u64) -> Self {
        let processors = std::thread::available_parallelism()
            .map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX));
        let machine = Machine {
            memory_bytes: memory(),
            processors,
            processes: processes(),
            // A file system that can't be inspected is refused with every new session.
            disk_bytes: disk::capacity_bytes(&config.directory()).ok(),
            max_nofile,
        };
        Self::divide(config, machine)
    }

    fn divide(config: &Config, machine: Machine) -> Self {
        let memory_bytes = machine.memory_bytes;
        let reserved_memory_bytes = config
            .reserved_memory_bytes
            .unwrap_or_else(|| (memory_bytes / 8).clamp(MIN_RESERVE, MAX_RESERVE));
        let left = memory_bytes.saturating_sub(reserved_memory_bytes) / PAGE_BYTES * PAGE_BYTES;
        let largest = LargestLimits {
            memory_bytes: left,
            cpus: f64::from(machine.processors),
            pids: config.max_pids,
            disk_bytes: machine.disk_bytes,
        };
        // Half of a machine that has hardly more than the reserve.
        let reserved_processes = (machine.processes / 8)
            .max(MIN_RESERVED_PROCESSES)
            .min(machine.processes / 2);
        let promised_memory_bytes = match config.memory_overcommit {
            Some(factor) => times(left, factor),
            // Enough for the maximum number of default sandboxes.
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
            processes: machine.processes - reserved_processes,
            max_nofile: machine.max_nofile,
        }
    }

    /// The limits of a sandbox whose request sets none; lower than the defaults on a small node.
    pub(crate) fn default_limits(&self) -> Limits {
        let default = Limits::default();
        Limits {
            memory_bytes: default.memory_bytes.min(self.largest.memory_bytes),
            pids: default.pids.min(self.largest.pids),
            disk_bytes: default
                .disk_bytes
                .min(self.largest.disk_bytes.unwrap_or(u64::MAX)),
            ..default
        }
    }

    /// The limits of a request with defaults applied. The error names a limit beyond the node.
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

    /// Rejects limits beyond the node.
    pub(crate) fn check(&self, limits: &Limits) -> Result<(), ApiError> {
        let refuse = |detail: String| Err(ApiError::new(ErrorCode::LimitUnenforceable, detail));
        if let Some(excess) = self.largest.excess(limits) {
            return refuse(format!(
                "limits.{}: this node gives a sandbox at most {}",
                excess.limit, excess.max
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

/// Rejects a configuration that leaves nothing to sandboxes.
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
            format!("leaves less than {MIN_MEMORY_BYTES} of {memory} bytes to sandboxes"),
        );
    }
    if config
        .memory_overcommit
        .is_some_and(|factor| !(1.0..=f64::from(MAX_OVERCOMMIT)).contains(&factor))
    {
        return bad(
            "memory_overcommit",
            format!("must be between 1 and {MAX_OVERCOMMIT}"),
        );
    }
    let pids = cynode_api::session_limits::MIN_PIDS..=1 << 20;
    if !pids.contains(&config.max_pids) {
        return bad(
            "max_pids",
            format!("must be between {} and {}", pids.start(), pids.end()),
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

/// The memory of this machine, or of the container that the worker and its sandboxes run in.
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
    // The root of the hierarchy also limits sandboxes; the worker's own group may be a unit with a
    // separate limit.
    machine.min(limit_of_machine(Controller::Memory).unwrap_or(u64::MAX))
}

/// The processes and threads of this machine, or of the container that the worker and its sandboxes
/// run in.
fn processes() -> u64 {
    let read = |name: &str| {
        let text = fs_err::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    [
        read("pid_max"),
        read("threads-max"),
        limit_of_machine(Controller::Pids),
    ]
    .into_iter()
    .flatten()
    .min()
    .unwrap_or(DEFAULT_PID_MAX)
}

fn limit_of_machine(controller: Controller) -> Option<u64> {
    Cgroups::of(std::process::id().cast_signed())
        .ok()
        .and_then(|groups| groups.limit_of_machine(controller))
}

/// The parent cgroup of all sandboxes on this node.
#[derive(Clone, Debug)]
pub(crate) struct ParentCgroup {
    /// The name as passed to the runtime.
    pub(crate) name: String,
    /// The limits that this worker writes; none if systemd does.
    limits: Vec<SharedLimit>,
}

impl ParentCgroup {
    /// Creates the cgroup and sets its limits; fails with a reason if the host does not permit to
    /// limit the memory.
    pub(crate) async fn prepare(
        config: &Config,
        manager: &str,
        rootless: bool,
        capacity: &Capacity,
    ) -> Result<Self, String> {
        let name = &config.cgroup_parent;
        let (bytes, processes) = (capacity.largest.memory_bytes, capacity.processes);
        if config.podman_socket.is_some() && config.engine == crate::Engine::Podman {
            return Err(
                "an external Podman service chooses the cgroups of its containers".to_owned(),
            );
        }
        if manager == "systemd" {
            let slice = format!("{name}.slice");
            let (memory, tasks, scope) = (
                format!("MemoryMax={bytes}"),
                format!("TasksMax={processes}"),
                if rootless { "--user" } else { "--system" },
            );
            host::run(
                "systemctl",
                &[scope, "set-property", "--runtime", &slice, &memory, &tasks],
            )
            .await
            .map_err(|error| format!("systemctl set-property: {error}"))?;
            return Ok(Self {
                name: slice,
                limits: Vec::new(),
            });
        }
        if rootless {
            return Err("an ordinary user has no delegated cgroup here".to_owned());
        }
        let mut limits = vec![SharedLimit::set(name, Controller::Memory, bytes)?];
        match SharedLimit::set(name, Controller::Pids, processes) {
            Ok(limit) => limits.push(limit),
            Err(reason) => tracing::warn!(
                reason,
                "The total number of processes of all sandboxes is not limited on this host."
            ),
        }
        Ok(Self {
            name: format!("/{name}"),
            limits,
        })
    }

    /// Checks that a cgroup with such a limit can be created, by creating a temporary one.
    pub(crate) fn probe(controller: Controller) -> Result<(), String> {
        let name = format!("cynode-probe-{}", uuid::Uuid::new_v4().simple());
        let limit = SharedLimit::of(&name, controller, 1 << 20)?;
        let ensured = limit.ensure().map_err(|error| error.to_string());
        if let Some(directory) = limit.file.parent() {
            drop(fs_err::remove_dir(directory));
        }
        ensured
    }

    /// Ensures that the cgroup exists with its limits; cheap if it does.
    pub(crate) fn limit(&self) -> std::io::Result<()> {
        self.limits.iter().try_for_each(SharedLimit::ensure)
    }
}

/// A limit of all sandboxes together, in their parent cgroup.
#[derive(Clone, Debug)]
struct SharedLimit {
    controller: Controller,
    value: u64,
    file: PathBuf,
}

impl SharedLimit {
    fn of(group: &str, controller: Controller, value: u64) -> Result<Self, String> {
        let groups =
            Cgroups::of(std::process::id().cast_signed()).map_err(|error| error.to_string())?;
        let (top, file) = groups
            .tree(controller)
            .ok_or_else(|| format!("no cgroup tree has the {} controller", controller.name()))?;
        Ok(Self {
            controller,
            value,
            file: top.join(group).join(file),
        })
    }

    fn set(group: &str, controller: Controller, value: u64) -> Result<Self, String> {
        let limit = Self::of(group, controller, value)?;
        limit.ensure().map_err(|error| error.to_string())?;
        Ok(limit)
    }

    fn ensure(&self) -> std::io::Result<()> {
        let Self {
            controller,
            value,
            file,
        } = self;
        let limit = |file: &Path| {
            fs_err::read_to_string(file)
                .ok()
                .and_then(|text| text.trim().parse::<u64>().ok())
        };
        if limit(file) == Some(*value) {
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
            // In version 2, the parent group must delegate the controller.
            fs_err::write(
                top.join("cgroup.subtree_control"),
                format!("+{}", controller.name()),
            )?;
        }
        fs_err::write(file, value.to_string())?;
        match limit(file) {
            Some(actual) if actual <= *value => Ok(()),
            actual => Err(std::io::Error::other(format!(
                "{} contains {actual:?} after writing {value}",
                file.display(),
            ))),
        }
    }
}

#[cfg(test)]
mod tests;
