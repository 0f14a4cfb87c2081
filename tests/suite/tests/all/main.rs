//! All end-to-end tests in one program: linked once, while each test still runs in its own process.
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
mod default_image;
mod docker;
mod escape;
mod every_runtime;
mod execs;
mod files;
mod inference;
mod jobs;
mod orchestrator;
mod outcomes;
mod pool;
mod proxies;
mod reference;
mod rootless;
mod runtime;
mod sba;
mod scripts;
mod sessions;
mod soak;
