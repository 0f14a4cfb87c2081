//! Git egress: repositories come in as seeds, changesets go out as commits on a task's branch.

pub(crate) mod change;
pub(crate) mod command;
pub(crate) mod forge;
pub(crate) mod mirror;
pub(crate) mod push;
pub(crate) mod resolve;
pub(crate) mod runner;
pub(crate) mod seed;
mod tar;

#[cfg(any(test, feature = "fuzzing"))]
pub use change::fuzz;
