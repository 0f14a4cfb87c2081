//! Job specifications: what `cynode-sba` runs.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Map, Value};

use super::{
    document::{Bounds, JsonValue},
    job_shape::{JOB, STEP},
    validate::validate,
    version::ProtocolVersion,
    violation::Violations,
};
use crate::{Base64Bytes, JobId, TaskId};

/// A valid job. There is no other way to one than through validation.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct JobSpec {
    pub protocol_version: ProtocolVersion,
    pub job_id: JobId,
    pub task_id: TaskId,
    pub constraints: Constraints,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inference: Option<Inference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<JobContext>,
    /// Empty if an agent works the job; `inference` is there then.
    pub steps: Vec<Step>,
}

impl JobSpec {
    /// Reads the JSON of a job.
    pub fn parse(json: &[u8]) -> Result<Self, Violations> {
        JsonValue::read(json, Bounds::JOB).and_then(Self::from_document)
    }

    /// Reads a job that was parsed as JSON before. Duplicate fields are lost then; whoever parsed
    /// it must have refused them.
    pub fn from_value(value: Value) -> Result<Self, Violations> {
        JsonValue::from_deserializer(value, Bounds::JOB).and_then(Self::from_document)
    }

    /// Reads the JSON of a job that may lack its ids.
    pub fn parse_with_ids(json: &[u8], absent: JobIds) -> Result<Self, Violations> {
        let mut document = JsonValue::read(json, Bounds::JOB)?;
        if let JsonValue::Object(members) = &mut document {
            for (name, id) in [
                ("job_id", absent.job_id.to_string()),
                ("task_id", absent.task_id.to_string()),
            ] {
                if members.iter().all(|(given, _)| given != name) {
                    members.push((name.to_owned(), JsonValue::Text(id)));
                }
            }
        }
        Self::from_document(document)
    }

    /// What is wrong with the job in a member of a JSON object, such as a request. None if there is
    /// no such member, or nothing is wrong with it.
    #[must_use]
    pub fn violations_in(json: &[u8], member: &str) -> Option<Violations> {
        let Ok(JsonValue::Object(members)) = JsonValue::read(json, Bounds::JOB) else {
            return None;
        };
        let (_, job) = members.into_iter().find(|(name, _)| name == member)?;
        match job {
            JsonValue::Null => None,
            job => Self::from_document(job).err(),
        }
    }

    pub(super) fn from_document(document: JsonValue) -> Result<Self, Violations> {
        let version = ProtocolVersion::of(&document)?;
        validate(&document, &JOB, version)?;
        Ok(super::convert::job(document)?)
    }
}

/// The ids of a job whose specification leaves them out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobIds {
    pub job_id: JobId,
    pub task_id: TaskId,
}

/// Reads a job inside another document, such as a request.
impl<'de> Deserialize<'de> for JobSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        JsonValue::from_deserializer(deserializer, Bounds::JOB)
            .and_then(Self::from_document)
            .map_err(D::Error::custom)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Constraints {
    pub max_runtime_seconds: u64,
    /// Standard output, standard error and returned file content of all steps together.
    pub max_output_bytes: u64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ext_net_allowed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Inference {
    /// At least one.
    pub allowed_models: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<InferenceSource>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum InferenceSource {
    Worker,
    ApiEgress,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct JobContext {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline_context: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project_context: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_context: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requirements: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub acceptance_criteria: Vec<Criterion>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub preferences: Map<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub additional_context: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skill_ids: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skills: Vec<InlineSkill>,
}

/// An acceptance criterion, in words or with the command that checks it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Criterion {
    Text(String),
    Checked(CheckedCriterion),
}

impl Criterion {
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Checked(criterion) => &criterion.text,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckedCriterion {
    pub text: String,
    /// The criterion is met if this exits with 0.
    pub check: RunCommand,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InlineSkill {
    pub name: String,
    pub content: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    #[serde(flatten)]
    pub action: Action,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// The step may run again if it was interrupted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub idempotent: bool,
}

impl Step {
    /// Reads the JSON of one step, such as the tool call of an agent, with the checks of a job.
    pub fn parse(json: &[u8]) -> Result<Self, Violations> {
        let document = JsonValue::read(json, Bounds::JOB)?;
        validate(&document, &STEP, ProtocolVersion::CURRENT)?;
        Ok(super::convert::step(document)?)
    }
}

/// What a step does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", content = "args", rename_all = "snake_case")]
pub enum Action {
    RunCommand(RunCommand),
    WriteFile(WriteFile),
    ReadFile(ReadFile),
    ApplyUnifiedDiff(ApplyUnifiedDiff),
    ListTree(ListTree),
}

impl Action {
    /// The type of the step, as in the specification and in results.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::RunCommand(_) => "run_command",
            Self::WriteFile(_) => "write_file",
            Self::ReadFile(_) => "read_file",
            Self::ApplyUnifiedDiff(_) => "apply_unified_diff",
            Self::ListTree(_) => "list_tree",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunCommand {
    pub argv: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// `argv` is one text, for `/bin/sh -c`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shell: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WriteFile {
    pub path: String,
    #[serde(flatten)]
    pub content: WrittenContent,
    /// Permission bits.
    #[serde(serialize_with = "octal", skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum WrittenContent {
    #[serde(rename = "content")]
    Text(String),
    #[serde(rename = "content_b64")]
    Bytes(Base64Bytes),
}

impl WrittenContent {
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => &bytes.0,
        }
    }
}

#[expect(
    clippy::ref_option,
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn octal<S: Serializer>(mode: &Option<u32>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{:04o}", mode.unwrap_or_default()))
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReadFile {
    pub path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_line: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_line: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ApplyUnifiedDiff {
    pub diff: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ListTree {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_depth: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_entries: Option<u32>,
}
