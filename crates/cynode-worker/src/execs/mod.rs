//! The commands of a session: what runs, what ran, and the output that is kept of each.
//!
//! What must stay true: an exec is in the session's log before it is started, and its exit is in the log before the agent
//! is told that we have it. So after a crash every exec is found again, running or ended, and none is counted twice.

mod agent;
mod answer;
mod collect;
mod exec;
mod hashes;
mod input;
mod record;
mod runtime;
mod spool;
mod stdin;

pub(crate) use agent::{Command, adopt as adopt_by_agent, start as start_by_agent};
pub(crate) use exec::{Exec, Next, Reader, Watching};
pub(crate) use input::{Input, Spooling};
pub(crate) use record::{Begun, SessionExecs};
pub(crate) use runtime::{
    Leftovers, kill_everything as kill_everything_by_runtime, signal as signal_by_runtime,
    start as start_by_runtime,
};
pub(crate) use spool::Piece;
pub(crate) use stdin::Offered;

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _infallible = write!(text, "{byte:02x}");
            text
        })
}
