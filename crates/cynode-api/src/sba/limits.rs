//! Bounds of job specifications and results.

use crate::{document::Bounds, file_limits, job_limits};

/// The JSON of a job. Must fit in the body of a request.
pub const MAX_JOB_BYTES: usize = 10 * 1024 * 1024;
/// Values and names in a job.
pub const MAX_JOB_NODES: usize = 250_000;
/// Nesting of objects and lists in a job or a result.
pub const MAX_DEPTH: usize = 64;

pub const MAX_STEPS: usize = 4_096;
pub const MAX_STEP_ID_BYTES: usize = 128;
pub const MAX_RUNTIME_SECONDS: i64 = 10_800;
pub const MAX_OUTPUT_BYTES: i64 = 16 * 1024 * 1024;

/// Arguments of one command; `exec_limits` bounds their bytes.
pub const MAX_ARGUMENTS: usize = 32_768;
/// The number of a line in a file.
pub const MAX_LINE: i64 = 4_294_967_295;
/// Levels and entries of a listed tree, as in listings of files.
pub const MAX_TREE_DEPTH: i64 = 64;
pub const MAX_TREE_ENTRIES: i64 = 10_000;

pub const MAX_MODELS: usize = 64;
pub const MAX_MODEL_BYTES: usize = 256;

/// All texts and names of the context together. Every prompt repeats them.
pub const MAX_CONTEXT_BYTES: usize = 4 * 1024 * 1024;
pub const MAX_CONTEXT_TEXT_BYTES: usize = 1024 * 1024;
/// Requirements, and acceptance criteria.
pub const MAX_CONTEXT_ITEMS: usize = 1_000;
pub const MAX_SKILLS: usize = 64;
pub const MAX_SKILL_NAME_BYTES: usize = 256;

/// The JSON of a result: the largest output in base64, and what describes it.
pub const MAX_RESULT_BYTES: usize = 32 * 1024 * 1024;
/// Values and names in a result.
pub const MAX_RESULT_NODES: usize = 500_000;
pub const MAX_ARTIFACTS: usize = 1_000;
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;
pub const MAX_FAILURE_CODE_BYTES: usize = 64;

pub use crate::document::{MAX_SHOWN_NAME, MAX_VIOLATIONS};

impl Bounds {
    pub(super) const JOB: Self = Self {
        bytes: MAX_JOB_BYTES,
        nodes: MAX_JOB_NODES,
        depth: MAX_DEPTH,
    };
    pub(super) const RESULT: Self = Self {
        bytes: MAX_RESULT_BYTES,
        nodes: MAX_RESULT_NODES,
        depth: MAX_DEPTH,
    };
}

// The same bounds have other types where files and jobs are served.
const _: () = assert!(MAX_RUNTIME_SECONDS as u64 == job_limits::MAX_TIMEOUT_SECONDS);
const _: () = assert!(MAX_TREE_DEPTH == file_limits::MAX_DEPTH as i64);
const _: () = assert!(MAX_TREE_ENTRIES == file_limits::MAX_ENTRIES as i64);
