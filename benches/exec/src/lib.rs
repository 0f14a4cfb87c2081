//! Shared parts of the benchmarks: a separate stack, Podman's ways into the same container, times
//! and tables.
#![forbid(unsafe_code)]
#![allow(
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "command-line tools that start programs as people do"
)]
#![allow(
    clippy::cast_precision_loss,
    reason = "sizes and times as people read them"
)]

pub mod machine;
pub mod ours;
pub mod rivals;
pub mod samples;
pub mod table;
pub mod through;

use clap::ValueEnum;
use cynode_tests::World;

/// The format of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Table,
    Json,
}

/// Waits for Podman's cleanup of the last containers, which would write into the directories being
/// removed.
pub async fn clean_up(world: World) {
    if let Err(error) = world.assert_clean().await {
        eprintln!("bench: {error:#}");
    }
}

pub fn print_progress(what: &str) {
    eprintln!("bench: {what}");
}
