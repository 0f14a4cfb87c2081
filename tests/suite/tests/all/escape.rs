//! Hostile code on every supported runtime: it must not affect the host, another sandbox, or the
//! worker's service to others.
//!
//! Covered elsewhere: diffs (`files/patches.rs`) and archives (`files/archives.rs`) that lead out
//! of the workspace, forged frames to the agent (`agent.rs`), killed subreapers and evaded
//! deadlines (`execs.rs`).

mod arena;
mod bombs;
mod disks;
mod host_files;
mod images;
mod kernel;
mod neighbours;
mod network;
mod runner;
