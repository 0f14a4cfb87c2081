//! The format of jobs that `cynode-sba` runs, and of their results.
//!
//! One parser serves the orchestrator, the worker and the agent: a job is refused by all of them or
//! by none, before any step runs. It reads a bounded document (`crate::document`), compares it with
//! the tables of its shape (`job_shape`, `result_shape`), reports every difference with its path, and
//! only then makes the types of it. The JSON Schema is generated from the same tables by a test and
//! checked in, so that the agent only carries its text.
//!
//! Whether a path leads out of the workspace is not decided here but by the kernel, when the step
//! runs.

mod convert;
mod failure;
mod form;
mod job;
mod job_shape;
pub mod limits;
mod result;
mod result_shape;
#[cfg(test)]
mod schema;
mod shape;
mod validate;
mod version;

use crate::document::{self, violation};

pub use failure::FailureCode;
pub use form::is_node_variable;
pub use job::{
    Action, ApplyUnifiedDiff, CheckedCriterion, Constraints, Criterion, Inference, InferenceSource,
    InlineSkill, JobContext, JobIds, JobSpec, ListTree, ReadFile, RunCommand, Step, WriteFile,
    WrittenContent,
};
pub use result::{
    CriterionResult, InferenceUsage, JobResult, ResultArtifact, ResultStatus, StepResult,
    StepStatus, StreamEncoding, TodoSummary, Verifier, job_id_of,
};
pub use version::{InvalidVersion, ProtocolVersion};
pub use violation::{Violation, ViolationCode, Violations};

/// The JSON Schema of jobs.
pub const JOB_SCHEMA: &str = include_str!("job.schema.json");
