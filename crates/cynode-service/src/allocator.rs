//! How roles use the C library's allocator.

/// Environment under which a role gives memory back that it does not use any more. By default glibc keeps a heap for each of many
/// threads, and stops returning large buffers once a few have been freed: after one burst of large requests a role would hold
/// hundreds of MiB for good.
pub const ENVIRONMENT: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "2"),
    ("MALLOC_MMAP_THRESHOLD_", "131072"),
    ("MALLOC_TRIM_THRESHOLD_", "131072"),
];
