//! Control messages.

use cynode_api::{Base64Bytes, ErrorCode, ExecId, ListRequest, PatchReject, SearchRequest, SignalScope};
use serde::{Deserialize, Serialize};

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Stays open for the agent's life and carries nothing: its end tells the worker that the agent is gone.
    Watch,
    /// Parked until the worker writes a request.
    Request,
}

/// The first message on every connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub protocol: u32,
    /// The agent's own version, for people.
    pub version: String,
    pub role: Role,
}

/// What the worker asks for, once per connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// Run a command. Answered by `Started` or `Error`, then output, then `Exited`; the worker acknowledges each with `Ack`
    /// frames and sends standard input as `Data` and `End`, one piece at a time, each answered by `StdinTaken`.
    Exec(ExecStart),
    /// Go on with a command after the worker was away: output after `after_seq` again, then what follows.
    Attach {
        exec_id: ExecId,
        after_seq: u64,
    },
    /// What runs, and what has ended without the worker's acknowledgement.
    Execs,
    Signal {
        exec_id: ExecId,
        signal: i32,
        scope: SignalScope,
    },
    /// To everything but process 1.
    SignalAll {
        signal: i32,
    },
    /// A file operation, run in a child.
    File {
        op: FileOp,
    },
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecStart {
    pub exec_id: ExecId,
    pub argv: Vec<String>,
    pub cwd: String,
    pub env: Vec<(String, String)>,
    /// 0: none.
    pub timeout_ms: u64,
    /// From TERM to KILL at the deadline.
    pub grace_ms: u64,
    /// How long the pipes are drained after the command's own process has ended.
    pub drain_ms: u64,
    /// Whether standard input will come; without it the command reads an end at once.
    pub stdin: bool,
}

/// Paths are bytes; relative ones start at the workspace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum FileOp {
    /// → `Stat`.
    Stat {
        path: Base64Bytes,
        hash: bool,
    },
    /// → `Stat` with the hash, then `Data`…, `End`. `start` and `end` (exclusive) bound what is sent.
    Read {
        path: Base64Bytes,
        start: u64,
        end: Option<u64>,
    },
    /// Then `Data`…, `End` from the worker → `Written`. Without the `End` nothing is changed.
    Write {
        path: Base64Bytes,
        mode: Option<u32>,
        if_match: Option<Vec<String>>,
        if_none_match: bool,
        max_bytes: u64,
    },
    Delete {
        path: Base64Bytes,
        recursive: bool,
        if_match: Option<Vec<String>>,
    },
    /// → `Body`, then a `ListResult` as JSON in `Data`…, `End`.
    List {
        request: ListRequest,
    },
    /// → `Body` with a `SearchResult`.
    Search {
        request: SearchRequest,
    },
    /// Then the diff as `Data`…, `End` from the worker → `Body` with a `PatchResult`.
    Patch {
        strip: u32,
        dry_run: bool,
    },
    Move {
        from: Base64Bytes,
        to: Base64Bytes,
        overwrite: bool,
    },
    Mkdir {
        path: Base64Bytes,
        parents: bool,
    },
    /// → `Body`, then a tar archive. What is packed is what the sandbox's user can read.
    ExportTar {
        path: Base64Bytes,
    },
    /// → `Body`, then git's diff of the workspace with untracked files.
    ExportPatch {
        base: Option<String>,
    },
    /// Then a tar archive as `Data`…, `End` from the worker → `Ok`.
    Import {
        path: Base64Bytes,
    },
}

/// What the agent answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Hello(Hello),
    Started {
        pid: i32,
    },
    StdinTaken {
        bytes: u64,
    },
    /// Standard input is closed; further data is dropped.
    StdinClosed,
    Exited(ExitReport),
    Execs {
        execs: Vec<ExecStatus>,
    },
    Stat(FileStat),
    Written(Written),
    /// `Data`… and `End` follow.
    Body,
    Ok,
    Error(AgentError),
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReport {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub timed_out: bool,
    /// The end was not seen.
    pub lost: bool,
    pub duration_ms: u64,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    pub last_seq: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecStatus {
    pub exec_id: ExecId,
    pub last_seq: u64,
    /// All of its output is taken or given up, and its exit is known.
    pub exited: bool,
    /// The command's own process has ended, or the tree was killed at its deadline: what is left is its output, which a
    /// slow reader may hold up for as long as it likes.
    #[serde(default)]
    pub ended: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStat {
    #[serde(rename = "type")]
    pub kind: cynode_api::FileType,
    pub size: u64,
    pub mode: u32,
    /// Seconds since 1970.
    pub mtime: i64,
    /// Of the content, in hex; absent when it was not asked for or makes no sense.
    pub sha256: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    pub sha256: String,
    pub size: u64,
    pub mode: u32,
    pub created: bool,
    pub sha256_before: Option<String>,
}

/// A refusal, in the API's own codes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentError {
    pub code: ErrorCode,
    pub message: String,
    /// The name of the system's error, such as `ENOENT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rejects: Vec<PatchReject>,
}

impl AgentError {
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), errno: None, rejects: Vec::new() }
    }
}
