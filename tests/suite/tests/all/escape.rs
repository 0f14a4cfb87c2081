//! Hostile code inside, on every runtime that we support: whatever it tries, neither the host, nor another sandbox, nor the
//! worker's service to others is touched.
//!
//! Tried elsewhere, and not again here: diffs (`files/patches.rs`) and archives (`files/archives.rs`) that lead out of the
//! workspace, frames that lie to the agent (`agent.rs`), subreapers that are killed and deadlines that are evaded (`execs.rs`).

mod arena;
mod bombs;
mod disks;
mod host_files;
mod images;
mod kernel;
mod neighbours;
mod network;
mod runner;
