//! The egress roles: the only processes that dial beyond the machine on behalf of sandboxes, each
//! with its own credentials.
//!
//! `role.rs` starts the git role, `api/` answers orchestrators, `operation.rs` decides and records,
//! and `git/` does the work.
//!
//! Invariant: a role decides by its own copy of the rules, on facts that it derives itself, and
//! records the decision before it takes effect.
#![forbid(unsafe_code)]

mod addresses;
mod api;
mod audit;
mod config;
mod dial;
mod git;
mod location;
mod operation;
mod role;
mod state;
mod trail;
mod trail_api;
mod vault;

pub use config::Config;
pub use git::runner::{run_credential_helper, run_runner};
pub use role::{Error, run_git};

#[cfg(any(test, feature = "fuzzing"))]
pub use git::fuzz;
