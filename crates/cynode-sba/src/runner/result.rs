//! Builds and writes the result of a job.
//!
//! Invariants: a written result is always complete JSON within the bounds of
//! [`cynode_api::sba::limits`]. If the disk has no room for it, a shorter one is written.

use std::io;

use cynode_api::sba::{
    CriterionResult, FailureCode, InferenceUsage, JobResult, ResultArtifact, StepResult,
    TodoSummary, limits::MAX_MESSAGE_BYTES,
};
use cynode_api::{JobId, json_text_bytes};

use super::{
    directory::{JobDirectory, RESULT_FILE},
    steps::Ending,
};
use crate::files::Artifact;

/// Exit codes of the runner.
pub(super) const EXIT_FAILURE: u8 = 1;
pub(super) const EXIT_TIMEOUT: u8 = 124;
pub(super) const EXIT_INTERNAL: u8 = 70;

/// The parts of a result.
#[derive(Debug)]
pub(super) struct JobReport {
    pub(super) job_id: Option<JobId>,
    pub(super) ending: Ending,
    pub(super) steps: Vec<StepResult>,
    pub(super) artifacts: Vec<Artifact>,
    pub(super) todo: Option<TodoSummary>,
    pub(super) criteria: Vec<CriterionResult>,
    pub(super) usage: Option<InferenceUsage>,
}

impl JobReport {
    pub(super) fn into_result(self) -> JobResult {
        let mut result = match self.ending {
            Ending::Success => JobResult {
                status: cynode_api::sba::ResultStatus::Success,
                failure_code: None,
                failure_message: None,
                ..JobResult::failed(self.job_id, FailureCode::Internal, "")
            },
            Ending::Failure { code, message } => {
                JobResult::failed(self.job_id, code, bounded(&message))
            }
        };
        result.steps = self.steps;
        result.todo = self.todo;
        result.criteria = self.criteria;
        result.usage = self.usage;
        result.artifacts = self
            .artifacts
            .into_iter()
            .map(|artifact| ResultArtifact {
                path: artifact.path,
                size: Some(artifact.size),
                sha256: artifact.sha256,
            })
            .collect();
        result
    }
}

/// Cuts a message to its bound. The bound applies to the escaped JSON, so a message with many
/// control characters is cut more.
pub(super) fn bounded(message: &str) -> String {
    bounded_to(message, MAX_MESSAGE_BYTES)
}

/// The same with another bound.
pub(super) fn bounded_to(message: &str, bytes: usize) -> String {
    let mut end = message.floor_char_boundary(bytes);
    while json_text_bytes(&message[..end]) > bytes {
        end = message.floor_char_boundary(end / 2);
    }
    message[..end].to_owned()
}

pub(super) fn to_json(result: &JobResult) -> Vec<u8> {
    serde_json::to_vec(result).expect("a result has string keys only, so it always serializes")
}

pub(super) fn exit_code(result: &JobResult) -> u8 {
    match &result.failure_code {
        None => 0,
        Some(FailureCode::Timeout) => EXIT_TIMEOUT,
        Some(FailureCode::Internal) => EXIT_INTERNAL,
        Some(_) => EXIT_FAILURE,
    }
}

/// Writes a result. If the disk is full, leaves out the output of the steps, then the steps.
pub(super) fn write(directory: &JobDirectory, result: &JobResult) -> io::Result<()> {
    let write = |result: &JobResult| directory.replace_durably(RESULT_FILE, &to_json(result));
    let mut failure = match write(result) {
        Ok(()) => return Ok(()),
        Err(failure) => failure,
    };
    let mut shorter = result.clone();
    for shorten in [without_output, without_steps] {
        if !is_full(&failure) {
            break;
        }
        shorten(&mut shorter);
        failure = match write(&shorter) {
            Ok(()) => return Ok(()),
            Err(failure) => failure,
        };
    }
    Err(failure)
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG)
    )
}

fn without_output(result: &mut JobResult) {
    for step in &mut result.steps {
        let had_output = step.stdout.is_some() || step.stderr.is_some() || step.output.is_some();
        (step.stdout, step.stderr, step.output) = (None, None, None);
        step.encoding = cynode_api::sba::StreamEncoding::Utf8;
        step.truncated |= had_output;
    }
}

fn without_steps(result: &mut JobResult) {
    (result.steps, result.artifacts, result.todo) = (Vec::new(), Vec::new(), None);
}
