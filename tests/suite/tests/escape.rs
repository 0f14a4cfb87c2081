//! Hostile code inside, on every runtime that we support: whatever it tries, neither the host, nor another sandbox, nor the
//! worker's service to others is touched.
//!
//! Tried elsewhere, and not again here: diffs (`files/patches.rs`) and archives (`files/archives.rs`) that lead out of the
//! workspace, frames that lie to the agent (`agent.rs`), subreapers that are killed and deadlines that are evaded (`execs.rs`).
#![allow(clippy::disallowed_methods, reason = "tests start programs and look at files as people do")]

#[path = "escape/arena.rs"]
mod arena;
#[path = "escape/bombs.rs"]
mod bombs;
#[path = "escape/host_files.rs"]
mod host_files;
#[path = "escape/images.rs"]
mod images;
#[path = "escape/kernel.rs"]
mod kernel;
#[path = "escape/neighbours.rs"]
mod neighbours;
#[path = "escape/network.rs"]
mod network;
#[path = "escape/toolchains.rs"]
mod toolchains;
