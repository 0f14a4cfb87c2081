//! git runs in a process of its own, the runner, which under root is another user's: it can't read
//! the role's key.
//!
//! The role sends one datagram for each command, with the descriptors of its standard streams and
//! of a reply socket (`wire.rs`, `client.rs`). The runner (`serve.rs`) starts git through a
//! launcher that limits itself first (`launch.rs`). A credential never passes through the runner:
//! git's helper fetches it from the role (`credential.rs`).
//!
//! Invariants: when the role drops a command, or is gone, the command's process group is killed;
//! every command has a timeout; the environment of git is this module's alone.

mod client;
mod credential;
mod environment;
mod launch;
mod serve;
#[cfg(test)]
pub(crate) mod tests;
mod wire;

pub(crate) use client::{RunnerClient, settings};
pub use credential::run_credential_helper;
pub(crate) use launch::{DIRECTORIES, Split, split};
pub use serve::run_runner;
pub(crate) use wire::RunnerSettings;

#[cfg(test)]
pub(crate) use tests::{LocalRunner, git, local_remote, mirror};
