//! The execs of a session: running, finished, and the output retained of each.
//!
//! Invariant: an exec is in the session's log before it starts, and its exit is in the log before
//! the agent is acknowledged. After a crash every exec is therefore recovered exactly once, running
//! or ended.

mod agent;
mod answer;
mod collect;
mod exec;
mod hashes;
mod input;
mod registry;
mod runtime;
mod spool;
mod stdin;

pub(crate) use agent::{ExecCommand, adopt as adopt_by_agent, start as start_by_agent};
pub(crate) use exec::{Exec, Reader, ReaderEvent, WatchGuard};
pub(crate) use input::{ExecInput, InputSpool};
pub(crate) use registry::{OpenExec, SessionExecs};
pub(crate) use runtime::{
    end_orphans, kill_everything as kill_everything_by_runtime, signal as signal_by_runtime,
    start as start_by_runtime,
};
pub(crate) use spool::Piece;
pub(crate) use stdin::StdinDelivery;
