//! The channel between a worker and the agent in a sandbox: frames, messages, limits.
//!
//! The agent connects out to the worker's socket. Each connection starts with the agent's [`Reply::Hello`] and then
//! waits, parked, until the worker writes one [`Request`] on it; from then on it belongs to that request and closes with it.
//! So there is no multiplexing: a slow stream holds up nothing but itself.
//!
//! What must stay true: both ends treat the other as hostile. A frame has a hard size limit that is checked before
//! anything is allocated for it; what can't be decoded is an error, never a panic. Control messages are JSON, so that an
//! agent that lives for days and a newer worker still understand one another; unknown fields are ignored.
#![forbid(unsafe_code)]

mod frame;
mod message;

pub use frame::{Decoder, Frame, FrameError, encode, encode_data, encode_message, encode_output};
pub use message::{
    AgentError, ExecStart, ExecStatus, ExitReport, FileOp, FileStat, Hello, Reply, Request, Role,
    Written,
};

/// The protocol that this build speaks.
pub const PROTOCOL: u32 = 1;
/// The oldest protocol that a worker of this build still serves.
pub const OLDEST_PROTOCOL: u32 = 1;

/// Largest frame that an agent may send.
pub const MAX_AGENT_FRAME: usize = 1024 * 1024;
/// Largest frame that a worker may send: argv and environment at their limits, escaped as JSON at its worst.
pub const MAX_WORKER_FRAME: usize = 16 * 1024 * 1024;
/// Largest frame that an agent takes which does not say how much it takes.
pub const OLDEST_WORKER_FRAME: usize = 8 * 1024 * 1024;
/// Largest piece of output or file content in one frame.
pub const MAX_DATA: usize = 64 * 1024;
/// Output that an agent holds, sent but not acknowledged, before it stops reading the command's pipes.
pub const WINDOW: usize = 1024 * 1024;
/// Connections that an agent keeps parked.
pub const PARKED: usize = 4;

/// Where everything is inside a sandbox.
pub const CONTROL_SOCKET: &str = "/run/cynode/control.sock";
pub const AGENT_BINARY: &str = "/run/cynode/cynode-sba";
pub const WORKSPACE: &str = "/workspace";
pub const HOME: &str = "/home/agent";
