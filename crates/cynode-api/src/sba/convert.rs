//! Validated documents as types.
//!
//! Validation has found every required field and no wrong type, so nothing is missing here. A
//! document for which that does not hold is refused all the same.

use std::{collections::BTreeMap, str::FromStr};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Map, Value};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    document::{JsonValue, Members, into_map},
    failure::FailureCode,
    form::file_mode,
    job::{
        Action, ApplyUnifiedDiff, CheckedCriterion, Constraints, Criterion, Inference,
        InferenceSource, InlineSkill, JobContext, JobSpec, ListTree, ReadFile, RunCommand, Step,
        WriteFile, WrittenContent,
    },
    result::{
        CriterionResult, InferenceUsage, JobResult, ResultArtifact, ResultStatus, StepResult,
        StepStatus, StreamEncoding, TodoSummary, Verifier,
    },
    violation::{ViolationCode, Violations},
};
use crate::Base64Bytes;

/// A document that passed validation has another shape than its type.
#[derive(Debug)]
pub(super) struct Inconsistent;

type Conversion<T> = Result<T, Inconsistent>;

impl From<Inconsistent> for Violations {
    fn from(Inconsistent: Inconsistent) -> Self {
        let message = "passed validation but can't be read".to_owned();
        Self::single(ViolationCode::InvalidValue, &[], message)
    }
}

pub(super) fn job(value: JsonValue) -> Conversion<JobSpec> {
    let mut job = object(value)?;
    Ok(JobSpec {
        protocol_version: job.required("protocol_version", parsed)?,
        job_id: job.required("job_id", parsed)?,
        task_id: job.required("task_id", parsed)?,
        constraints: job.required("constraints", constraints)?,
        inference: job.optional("inference", inference)?,
        context: job.optional("context", context)?,
        steps: job.list("steps", step)?,
    })
}

fn constraints(value: JsonValue) -> Conversion<Constraints> {
    let mut constraints = object(value)?;
    Ok(Constraints {
        max_runtime_seconds: constraints.required("max_runtime_seconds", whole)?,
        max_output_bytes: constraints.required("max_output_bytes", whole)?,
        ext_net_allowed: constraints.flag("ext_net_allowed")?,
    })
}

fn inference(value: JsonValue) -> Conversion<Inference> {
    let mut inference = object(value)?;
    Ok(Inference {
        allowed_models: inference.list("allowed_models", text)?,
        source: inference.optional("source", |value| match text(value)?.as_str() {
            "worker" => Ok(InferenceSource::Worker),
            "api_egress" => Ok(InferenceSource::ApiEgress),
            _ => Err(Inconsistent),
        })?,
    })
}

fn context(value: JsonValue) -> Conversion<JobContext> {
    let mut context = object(value)?;
    Ok(JobContext {
        baseline_context: context.optional("baseline_context", text)?,
        project_context: context.optional("project_context", text)?,
        task_context: context.optional("task_context", text)?,
        requirements: context.list("requirements", text)?,
        acceptance_criteria: context.list("acceptance_criteria", criterion)?,
        preferences: context
            .optional("preferences", free_object)?
            .unwrap_or_default(),
        additional_context: context.optional("additional_context", text)?,
        skill_ids: context.list("skill_ids", text)?,
        skills: context.list("skills", |value| {
            let mut skill = object(value)?;
            Ok(InlineSkill {
                name: skill.required("name", text)?,
                content: skill.required("content", text)?,
            })
        })?,
    })
}

fn criterion(value: JsonValue) -> Conversion<Criterion> {
    if let JsonValue::Text(text) = value {
        return Ok(Criterion::Text(text));
    }
    let mut criterion = object(value)?;
    Ok(Criterion::Checked(CheckedCriterion {
        text: criterion.required("text", text)?,
        check: criterion.required("check", run_command)?,
        timeout_seconds: criterion.optional("timeout_seconds", whole)?,
    }))
}

pub(super) fn step(value: JsonValue) -> Conversion<Step> {
    let mut step = object(value)?;
    let kind = step.required("type", text)?;
    Ok(Step {
        action: step.required("args", |args| action(&kind, args))?,
        id: step.optional("id", text)?,
        timeout_seconds: step.optional("timeout_seconds", whole)?,
        idempotent: step.flag("idempotent")?,
    })
}

fn action(kind: &str, args: JsonValue) -> Conversion<Action> {
    Ok(match kind {
        "run_command" => Action::RunCommand(run_command(args)?),
        "write_file" => Action::WriteFile(write_file(args)?),
        "read_file" => {
            let mut args = object(args)?;
            Action::ReadFile(ReadFile {
                path: args.required("path", text)?,
                max_bytes: args.optional("max_bytes", whole)?,
                start_line: args.optional("start_line", whole)?,
                end_line: args.optional("end_line", whole)?,
            })
        }
        "apply_unified_diff" => Action::ApplyUnifiedDiff(ApplyUnifiedDiff {
            diff: object(args)?.required("diff", text)?,
        }),
        "list_tree" => {
            let mut args = object(args)?;
            Action::ListTree(ListTree {
                path: args.optional("path", text)?,
                max_depth: args.optional("max_depth", whole)?,
                max_entries: args.optional("max_entries", whole)?,
            })
        }
        _ => return Err(Inconsistent),
    })
}

fn run_command(value: JsonValue) -> Conversion<RunCommand> {
    let mut args = object(value)?;
    Ok(RunCommand {
        argv: args.list("argv", text)?,
        cwd: args.optional("cwd", text)?,
        env: args.optional("env", variables)?.unwrap_or_default(),
        shell: args.flag("shell")?,
    })
}

fn variables(value: JsonValue) -> Conversion<BTreeMap<String, String>> {
    let members = object(value)?.0.into_iter();
    members
        .map(|(name, value)| Ok((name, text(value)?)))
        .collect()
}

fn write_file(value: JsonValue) -> Conversion<WriteFile> {
    let mut args = object(value)?;
    let contents = (
        args.optional("content", text)?,
        args.optional("content_b64", text)?,
    );
    Ok(WriteFile {
        path: args.required("path", text)?,
        content: match contents {
            (Some(text), None) => WrittenContent::Text(text),
            (None, Some(base64)) => {
                let bytes = STANDARD.decode(base64).map_err(|_| Inconsistent)?;
                WrittenContent::Bytes(Base64Bytes(bytes))
            }
            _ => return Err(Inconsistent),
        },
        mode: args.optional("mode", |mode| file_mode(&text(mode)?).ok_or(Inconsistent))?,
    })
}

pub(super) fn result(value: JsonValue) -> Conversion<JobResult> {
    let mut result = object(value)?;
    Ok(JobResult {
        protocol_version: result.required("protocol_version", parsed)?,
        job_id: result.optional("job_id", parsed)?,
        status: result.required("status", |status| match text(status)?.as_str() {
            "success" => Ok(ResultStatus::Success),
            "failure" => Ok(ResultStatus::Failure),
            "timeout" => Ok(ResultStatus::Timeout),
            _ => Err(Inconsistent),
        })?,
        steps: result.list("steps", step_result)?,
        artifacts: result.list("artifacts", |value| {
            let mut artifact = object(value)?;
            Ok(ResultArtifact {
                path: artifact.required("path", text)?,
                size: artifact.optional("size", whole)?,
                sha256: artifact.optional("sha256", text)?,
            })
        })?,
        failure_code: result
            .optional("failure_code", text)?
            .map(FailureCode::named),
        failure_message: result.optional("failure_message", text)?,
        criteria: result.list("criteria", criterion_result)?,
        todo: result.optional("todo", |value| {
            let mut todo = object(value)?;
            Ok(TodoSummary {
                total: todo.required("total", whole)?,
                done: todo.required("done", whole)?,
                open: todo.list("open", text)?,
            })
        })?,
        usage: result.optional("usage", usage)?,
    })
}

pub(super) fn step_result(value: JsonValue) -> Conversion<StepResult> {
    let mut step = object(value)?;
    Ok(StepResult {
        index: step.required("index", whole)?,
        id: step.optional("id", text)?,
        kind: step.required("type", text)?,
        status: step.required("status", |status| match text(status)?.as_str() {
            "success" => Ok(StepStatus::Success),
            "failure" => Ok(StepStatus::Failure),
            "timeout" => Ok(StepStatus::Timeout),
            "interrupted" => Ok(StepStatus::Interrupted),
            _ => Err(Inconsistent),
        })?,
        exit_code: step.optional("exit_code", whole)?,
        stdout: step.optional("stdout", text)?,
        stderr: step.optional("stderr", text)?,
        encoding: match step.optional("encoding", text)?.as_deref() {
            Some("base64") => StreamEncoding::Base64,
            _ => StreamEncoding::Utf8,
        },
        output: step.optional("output", |output| Ok(output.into_value()))?,
        error: step.optional("error", text)?,
        truncated: step.flag("truncated")?,
        started_at: step.optional("started_at", time)?,
        ended_at: step.optional("ended_at", time)?,
    })
}

fn criterion_result(value: JsonValue) -> Conversion<CriterionResult> {
    let mut criterion = object(value)?;
    Ok(CriterionResult {
        index: criterion.required("index", whole)?,
        is_met: criterion.flag("is_met")?,
        verified_by: criterion.required("verified_by", |by| match text(by)?.as_str() {
            "job" => Ok(Verifier::Job),
            "model" => Ok(Verifier::Model),
            _ => Err(Inconsistent),
        })?,
        detail: criterion.optional("detail", text)?,
    })
}

fn usage(value: JsonValue) -> Conversion<InferenceUsage> {
    let mut usage = object(value)?;
    Ok(InferenceUsage {
        model: usage.required("model", text)?,
        requests: usage.required("requests", whole)?,
        prompt_tokens: usage.required("prompt_tokens", whole)?,
        completion_tokens: usage.required("completion_tokens", whole)?,
        duration_ms: usage.required("duration_ms", whole)?,
    })
}

fn object(value: JsonValue) -> Conversion<Fields> {
    match value {
        JsonValue::Object(members) => Ok(Fields(members)),
        _ => Err(Inconsistent),
    }
}

fn free_object(value: JsonValue) -> Conversion<Map<String, Value>> {
    object(value).map(|fields| into_map(fields.0))
}

fn text(value: JsonValue) -> Conversion<String> {
    match value {
        JsonValue::Text(text) => Ok(text),
        _ => Err(Inconsistent),
    }
}

fn parsed<T: FromStr>(value: JsonValue) -> Conversion<T> {
    text(value)?.parse().map_err(|_| Inconsistent)
}

fn time(value: JsonValue) -> Conversion<OffsetDateTime> {
    OffsetDateTime::parse(&text(value)?, &Rfc3339).map_err(|_| Inconsistent)
}

fn whole<T: TryFrom<i64>>(value: JsonValue) -> Conversion<T> {
    match value {
        JsonValue::Number(number) => number
            .as_i64()
            .and_then(|number| T::try_from(number).ok())
            .ok_or(Inconsistent),
        _ => Err(Inconsistent),
    }
}

/// The fields of an object, taken one by one.
struct Fields(Members);

impl Fields {
    /// A field's value; none if it is absent or null.
    fn take(&mut self, name: &str) -> Option<JsonValue> {
        let at = self.0.iter().position(|(member, _)| member == name)?;
        Some(self.0.swap_remove(at).1).filter(|value| *value != JsonValue::Null)
    }

    fn optional<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(JsonValue) -> Conversion<T>,
    ) -> Conversion<Option<T>> {
        self.take(name).map(read).transpose()
    }

    fn required<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(JsonValue) -> Conversion<T>,
    ) -> Conversion<T> {
        read(self.take(name).ok_or(Inconsistent)?)
    }

    /// An absent list is empty.
    fn list<T>(
        &mut self,
        name: &str,
        read: impl Fn(JsonValue) -> Conversion<T>,
    ) -> Conversion<Vec<T>> {
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(JsonValue::List(items)) => items.into_iter().map(read).collect(),
            Some(_) => Err(Inconsistent),
        }
    }

    /// An absent flag is false.
    fn flag(&mut self, name: &str) -> Conversion<bool> {
        match self.take(name) {
            None => Ok(false),
            Some(JsonValue::Boolean(flag)) => Ok(flag),
            Some(_) => Err(Inconsistent),
        }
    }
}
