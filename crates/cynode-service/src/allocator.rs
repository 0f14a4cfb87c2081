//! Settings of the C library's allocator.

/// Environment that makes a role return unused memory to the system. By default glibc keeps many
/// per-thread heaps, and stops returning large buffers once a few have been freed: a burst of large
/// requests would leave a role with hundreds of MiB for good.
///
/// The thresholds lie above the buffers of a stream (a batch of events is 256 KiB): below them,
/// each buffer would be mapped, faulted in and unmapped again, which costs a stream of output a
/// third of its throughput.
pub const ENVIRONMENT: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "2"),
    ("MALLOC_MMAP_THRESHOLD_", "1048576"),
    ("MALLOC_TRIM_THRESHOLD_", "8388608"),
];
