//! Every end-to-end test in one program: linked once, and each test still runs in a process of its own.
#![allow(
    clippy::disallowed_methods,
    reason = "tests start programs and look at files as people do"
)]

mod agent;
mod api;
mod arguments;
mod by_runtime;
mod cli;
mod contract;
mod crash;
mod docker;
mod escape;
mod every_runtime;
mod execs;
mod files;
mod jobs;
mod outcomes;
mod plane;
mod pool;
mod rootless;
mod runtime;
mod sessions;
mod soak;
