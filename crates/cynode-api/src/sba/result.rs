//! Results of jobs, as the built-in runner and custom runners report them.
//!
//! A result comes from inside a sandbox, where a step may have written it: it is read with the
//! same bounds and checks as a job. Unknown fields are ignored, because results may grow.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use time::OffsetDateTime;
use utoipa::ToSchema;

use super::{
    convert,
    document::{Bounds, JsonValue},
    failure::FailureCode,
    result_shape::{RESULT, STEP},
    shape::Form,
    validate::validate,
    version::ProtocolVersion,
    violation::Violations,
};
use crate::JobId;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobResult {
    pub protocol_version: ProtocolVersion,
    /// Null if the job was so broken that it has no id.
    pub job_id: Option<JobId>,
    pub status: ResultStatus,
    pub steps: Vec<StepResult>,
    pub artifacts: Vec<ResultArtifact>,
    /// Null if and only if the job succeeded.
    pub failure_code: Option<FailureCode>,
    pub failure_message: Option<String>,
    /// Of a job that an agent worked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub criteria: Vec<CriterionResult>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub todo: Option<TodoSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<InferenceUsage>,
}

impl JobResult {
    /// Reads the JSON of a result.
    pub fn parse(json: &[u8]) -> Result<Self, Violations> {
        let document = JsonValue::read(json, Bounds::RESULT)?;
        let version = ProtocolVersion::of(&document)?;
        validate(&document, &RESULT, version)?;
        Ok(convert::result(document)?)
    }

    /// A job that failed before anything was recorded. A timeout has the status `timeout`.
    #[must_use]
    pub fn failed(job_id: Option<JobId>, code: FailureCode, message: impl Into<String>) -> Self {
        let status = match code {
            FailureCode::Timeout => ResultStatus::Timeout,
            _ => ResultStatus::Failure,
        };
        Self {
            protocol_version: ProtocolVersion::CURRENT,
            job_id,
            status,
            steps: Vec::new(),
            artifacts: Vec::new(),
            failure_code: Some(code),
            failure_message: Some(message.into()),
            criteria: Vec::new(),
            todo: None,
            usage: None,
        }
    }
}

/// The id of a job that may be invalid otherwise, so that its result can name it.
#[must_use]
pub fn job_id_of(json: &[u8]) -> Option<JobId> {
    let Ok(JsonValue::Object(members)) = JsonValue::read(json, Bounds::JOB) else {
        return None;
    };
    let mut ids = members.iter().filter(|(name, _)| name == "job_id");
    match (ids.next(), ids.next()) {
        (Some((_, JsonValue::Text(id))), None) if Form::Uuid.fault(id).is_none() => id.parse().ok(),
        _ => None,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResultStatus {
    Success,
    Failure,
    Timeout,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepStatus {
    Success,
    Failure,
    Timeout,
    /// The runner was killed or stopped while the step ran.
    Interrupted,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepResult {
    /// The position in the job's steps, or among the agent's tool calls, from 0.
    pub index: u64,
    /// The step's own id, if it has one.
    pub id: Option<String>,
    /// The type of the step, or the agent's tool.
    #[serde(rename = "type")]
    pub kind: String,
    pub status: StepStatus,
    /// Of a command; null if it did not exit by itself.
    pub exit_code: Option<i32>,
    pub stdout: Option<String>,
    pub stderr: Option<String>,
    pub encoding: StreamEncoding,
    /// What a step other than a command returns.
    pub output: Option<Value>,
    pub error: Option<String>,
    /// Output is missing because of a limit.
    pub truncated: bool,
    #[serde(with = "time::serde::rfc3339::option")]
    pub started_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub ended_at: Option<OffsetDateTime>,
}

impl StepResult {
    /// Reads the JSON of one step's result, with the bounds and checks of a whole result.
    pub fn parse(json: &[u8]) -> Result<Self, Violations> {
        let document = JsonValue::read(json, Bounds::RESULT)?;
        validate(&document, &STEP, ProtocolVersion::CURRENT)?;
        Ok(convert::step_result(document)?)
    }
}

/// The encoding of both streams of a step: base64 if either is not UTF-8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum StreamEncoding {
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    #[serde(rename = "base64")]
    Base64,
}

/// A file that the job left below its directory of artifacts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ResultArtifact {
    /// Relative to the directory of artifacts.
    pub path: String,
    pub size: Option<u64>,
    pub sha256: Option<String>,
}

/// Whether an acceptance criterion is met, and who says so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CriterionResult {
    /// The position in the job's list, from 0.
    pub index: u64,
    pub is_met: bool,
    pub verified_by: Verifier,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verifier {
    /// A command that the job names.
    Job,
    /// The model says so, which proves nothing.
    Model,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TodoSummary {
    pub total: u64,
    pub done: u64,
    /// Titles of items that are not done.
    pub open: Vec<String>,
}

/// What the models of a job did; never content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InferenceUsage {
    pub model: String,
    pub requests: u64,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub duration_ms: u64,
}
