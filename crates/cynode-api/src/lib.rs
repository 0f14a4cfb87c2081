//! The wire types of CyNode: typed ids, requests, answers and problem errors.
//!
//! Nothing here does I/O. Requests refuse unknown fields, so that a misspelt option is an error and not a surprise;
//! answers tolerate them, so that a newer worker can add fields.
#![forbid(unsafe_code)]

mod encoding;
mod exec;
mod files;
mod ids;
mod job;
mod problem;
mod session;

pub use encoding::{Base64Bytes, encode_streams};
pub use exec::{
    Bytes, Chunk, Exec, ExecAccepted, ExecExit, ExecRequest, ExecResult, ExecState, ExecVia, OutputPage, SignalExec, SignalName, SignalScope, SignalSession,
    StdinWrite, Stream, StreamEvent, Truncated, exec_limits,
};
pub use files::{
    ExportFormat, ExportRequest, FileEntry, FileType, ListRequest, ListResult, MkdirRequest, MoveRequest, PatchOperation, PatchReject, PatchRequest,
    PatchResult, PatchedFile, SearchMatch, SearchRequest, SearchResult, file_limits,
};
pub use ids::{ExecId, JobId, NodeId, SandboxId, SessionId, TaskId, WorkspaceId};
pub use job::{Job, JobError, JobOutput, JobRun, JobSandbox, JobState, JobStop};
pub use problem::{ErrorCode, Problem};
pub use session::{
    Limits, LimitsRequest, NetworkPolicy, Page, Session, SessionCreate, SessionEnd, SessionPatch, SessionState, Unenforced, WorkspaceDisposal, WorkspaceRef,
    session_limits,
};

/// The version that Worker API bodies carry.
pub const API_VERSION: u32 = 1;

/// Image label that marks an image as fit for sessions.
pub const LABEL_AGENT_COMPATIBLE: &str = "io.cynodeai.sandbox.agent-compatible";
/// Image label that names what an image is for.
pub const LABEL_PURPOSE: &str = "io.cynodeai.sandbox.purpose";
/// Container label that every sandbox carries.
pub const LABEL_SANDBOX_ID: &str = "io.cynodeai.sandbox.id";
/// Container label naming the node (worker state) that owns the sandbox.
pub const LABEL_NODE_ID: &str = "io.cynodeai.node.id";
