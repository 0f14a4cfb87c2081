//! The protocol between a worker and the agent in a sandbox: frames, messages, limits.
//!
//! The agent connects to the worker's socket. Each connection starts with the agent's
//! [`Reply::Hello`] and stays parked until the worker sends one [`Request`]; it then serves that
//! request only and closes with it. Without multiplexing, a slow stream blocks only itself.
//!
//! Invariants: both ends treat the other as hostile. A frame's size limit is checked before its
//! buffer is allocated; undecodable input is an error, never a panic. Control messages are JSON
//! with unknown fields ignored, so that a long-lived agent and a newer worker stay compatible.
#![forbid(unsafe_code)]

mod frame;
mod message;
pub mod proxy;
pub mod runner;

pub use frame::{Decoder, Frame, FrameError, encode, encode_data, encode_message, encode_output};
pub use message::{
    AgentError, ExecStart, ExecStatus, ExitReport, FileOp, FileStat, Hello, Reply, Request, Role,
    WriteReport,
};

/// The protocol version of this build.
pub const PROTOCOL: u32 = 1;
/// The oldest protocol version that a worker of this build still supports.
pub const OLDEST_PROTOCOL: u32 = 1;

/// Largest frame that an agent may send.
pub const MAX_AGENT_FRAME: usize = 1024 * 1024;
/// Largest frame that a worker may send: argv and environment at their limits, with worst-case JSON
/// escaping.
pub const MAX_WORKER_FRAME: usize = 16 * 1024 * 1024;
/// Largest frame for an agent that doesn't announce its limit.
pub const OLDEST_WORKER_FRAME: usize = 8 * 1024 * 1024;
/// Largest chunk of output or file content in one frame.
pub const MAX_DATA: usize = 64 * 1024;
/// Unacknowledged output at which an agent stops reading the command's pipes.
pub const OUTPUT_WINDOW_BYTES: usize = 1024 * 1024;
/// Connections that an agent keeps parked.
pub const PARKED_CONNECTIONS: usize = 4;

/// Paths inside a sandbox.
pub const CONTROL_SOCKET: &str = "/run/cynode/control.sock";
pub const AGENT_BINARY: &str = "/run/cynode/cynode-sba";
pub const WORKSPACE: &str = "/workspace";
pub const HOME: &str = "/home/agent";
/// The directory of a job: its specification, its result, its artifacts.
pub const JOB: &str = "/job";
/// Files that a job leaves below this directory become artifacts.
pub const ARTIFACTS: &str = "/job/artifacts";
/// The base of an export that stands for what the session began with.
pub const BROUGHT: &str = "brought";
/// The same for a session that began with an empty workspace: without a snapshot, everything is
/// new. Not the name of any commit. Older agents reject it.
pub const BROUGHT_NOTHING: &str = "brought:nothing";
