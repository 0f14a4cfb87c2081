//! Settings of the C library's allocator.
//!
//! By default glibc keeps many per-thread heaps, and stops returning large buffers once a few have
//! been freed: a burst of large requests would leave a role with hundreds of MiB for good.

/// The environment of an orchestrator, which buffers the requests and responses of all callers:
/// unused memory goes back to the system at once.
pub const ORCHESTRATOR: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "2"),
    ("MALLOC_MMAP_THRESHOLD_", "131072"),
    ("MALLOC_TRIM_THRESHOLD_", "131072"),
];

/// The environment of a worker, whose thresholds lie above the buffers of a stream: otherwise each
/// batch of events would be mapped, faulted in and unmapped again, which costs streamed output a
/// third of its throughput.
pub const WORKER: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "2"),
    ("MALLOC_MMAP_THRESHOLD_", "1048576"),
    ("MALLOC_TRIM_THRESHOLD_", "8388608"),
];

/// The environment of a role; empty for programs that are not ours.
#[must_use]
pub fn environment(role: &str) -> &'static [(&'static str, &'static str)] {
    match role {
        "orchestrator" => &ORCHESTRATOR,
        "worker" => &WORKER,
        _ => &[],
    }
}
