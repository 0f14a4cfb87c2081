//! The body of a new job, and everything that is wrong with its specification.
//!
//! A specification is refused by the parser that workers and runners use, and by the checks here:
//! its ids and its deadline are those of the request, its diffs can be read, and it needs nothing
//! that is missing in this version.

use axum::extract::{FromRequest, Request};
use bytes::Bytes;
use cynode_api::{
    ErrorCode, JobCreate,
    sba::{Action, InferenceSource, JobSpec, Violation, ViolationCode, Violations},
};
use cynode_service::{ApiError, compute, edge};
use serde_json::json;

use super::check_no_nul;
use crate::gate;

/// The member of the request that holds the specification.
const JOB: &str = "job";

/// The body of a new job. All that is wrong with its specification is listed with its place.
#[derive(Debug)]
pub(super) struct JobBody(pub(super) JobCreate);

impl<S: Send + Sync> FromRequest<S> for JobBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let edge::JsonBytes { bytes, .. } = &edge::JsonBytes::from_request(request, state).await?;
        compute::run(bytes.len(), || read(bytes)).await.map(Self)
    }
}

fn read(bytes: &Bytes) -> Result<JobCreate, ApiError> {
    let mut body: JobCreate = edge::parse(bytes).map_err(|error| {
        JobSpec::violations_in(bytes, JOB).map_or(error, |violations| problem(&violations))
    })?;
    check_no_nul(bytes, Some(JOB))?;
    if let Some(spec) = body.job.as_deref() {
        check(&body, spec)?;
        body.task_id = Some(spec.task_id);
        body.job_id = Some(spec.job_id);
    }
    Ok(body)
}

/// The problem of an invalid specification, whose violations have paths from its root.
pub(super) fn problem(violations: &Violations) -> ApiError {
    let errors = violations.errors.iter().map(|violation| Violation {
        path: in_request(&violation.path),
        ..violation.clone()
    });
    listed(errors.collect(), violations.omitted)
}

/// A path in the specification as a path in the request.
fn in_request(path: &str) -> String {
    match path {
        "$" => JOB.to_owned(),
        path if path.starts_with('[') => format!("{JOB}{path}"),
        path => format!("{JOB}.{path}"),
    }
}

fn listed(errors: Vec<Violation>, omitted: usize) -> ApiError {
    let shown = Violations { errors, omitted };
    let mut error = ApiError::invalid(shown.to_string()).with("violations", json!(shown.errors));
    if omitted > 0 {
        error = error.with("violations_omitted", omitted);
    }
    error
}

/// Checks what the format leaves open.
fn check(body: &JobCreate, spec: &JobSpec) -> Result<(), ApiError> {
    if spec
        .context
        .as_ref()
        .is_some_and(|context| !context.skill_ids.is_empty())
    {
        let detail = "job.context.skill_ids: there are no stored skills yet";
        return Err(ApiError::new(ErrorCode::Unavailable, detail)
            .with_remedy("Give the job its skills inline, in context.skills."));
    }
    let mut errors = Vec::new();
    let mut refuse = |path: String, message: String| {
        errors.push(Violation {
            path,
            code: ViolationCode::InvalidValue,
            message,
        });
    };
    for (name, is_same) in [
        ("job_id", body.job_id.is_none_or(|id| id == spec.job_id)),
        ("task_id", body.task_id.is_none_or(|id| id == spec.task_id)),
    ] {
        if !is_same {
            let message = format!("must equal {name} of the request, which can be left out");
            refuse(format!("{JOB}.{name}"), message);
        }
    }
    let deadline = spec.constraints.max_runtime_seconds;
    if body.timeout_seconds.is_some_and(|given| given != deadline) {
        let message = "must equal job.constraints.max_runtime_seconds; leave it out";
        refuse("timeout_seconds".to_owned(), message.to_owned());
    }
    for (index, step) in spec.steps.iter().enumerate() {
        if let Action::ApplyUnifiedDiff(step) = &step.action
            && let Err(error) = gate::check_step_diff(&step.diff)
        {
            let message = format!("can't be parsed: {error}");
            refuse(format!("{JOB}.steps[{index}].args.diff"), message);
        }
    }
    let source = spec
        .inference
        .as_ref()
        .and_then(|inference| inference.source);
    if source == Some(InferenceSource::ApiEgress) {
        let message = "models of providers can't be reached yet; leave it out, or use \"worker\"";
        refuse(format!("{JOB}.inference.source"), message.to_owned());
    }
    if errors.is_empty() {
        return Ok(());
    }
    let omitted = errors
        .len()
        .saturating_sub(cynode_api::document::MAX_VIOLATIONS);
    errors.truncate(cynode_api::document::MAX_VIOLATIONS);
    Err(listed(errors, omitted))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const JOB_ID: &str = "01890000-0000-7000-8000-000000000001";
    const TASK_ID: &str = "01890000-0000-7000-8000-000000000002";

    fn spec() -> Value {
        json!({
            "protocol_version": "1.0", "job_id": JOB_ID, "task_id": TASK_ID,
            "constraints": {"max_runtime_seconds": 60, "max_output_bytes": 1_000},
            "steps": [{"type": "run_command", "args": {"argv": ["true"]}}],
        })
    }

    fn refusal(body: &Value) -> Box<cynode_api::Problem> {
        read(&Bytes::from(body.to_string()))
            .expect_err("refused")
            .into_problem()
    }

    fn places(body: &Value) -> Vec<String> {
        let problem = refusal(body);
        let violations = problem.extensions["violations"].as_array();
        let mut places: Vec<String> = violations
            .into_iter()
            .flatten()
            .map(|violation| {
                let text = |name: &str| violation[name].as_str().unwrap_or_default().to_owned();
                assert!(problem.detail.contains(&text("path")), "{problem:?}");
                format!("{} {}", text("code"), text("path"))
            })
            .collect();
        // An object keeps the order of its fields only in some builds.
        places.sort();
        places
    }

    #[test]
    fn the_ids_of_a_specification_are_those_of_its_job() {
        for outer in [json!({}), json!({"job_id": JOB_ID, "task_id": TASK_ID})] {
            let mut body = outer;
            body["job"] = spec();
            let read = read(&Bytes::from(body.to_string())).expect("valid");
            assert_eq!(
                read.job_id.map(|id| id.to_string()).as_deref(),
                Some(JOB_ID)
            );
            assert_eq!(
                read.task_id.map(|id| id.to_string()).as_deref(),
                Some(TASK_ID)
            );
        }
        assert_eq!(
            places(&json!({"job": spec(), "job_id": TASK_ID, "task_id": JOB_ID})),
            ["invalid_value job.job_id", "invalid_value job.task_id"]
        );
    }

    #[test]
    fn every_violation_is_listed_with_its_path_in_the_request() {
        let mut broken = spec();
        broken["colour"] = json!(1);
        broken["constraints"]["max_runtime_seconds"] = json!(0);
        broken["steps"][0]["args"] = json!({"argv": [1], "cwd\n": ""});
        assert_eq!(
            places(&json!({"job": broken})),
            [
                "invalid_value job.constraints.max_runtime_seconds",
                "unknown_field job.colour",
                "unknown_field job.steps[0].args[\"cwd\\u{a}\"]",
                "wrong_type job.steps[0].args.argv[0]",
            ]
        );
        assert_eq!(places(&json!({"job": []})), ["wrong_type job"]);
        // What was written twice is lost in a parsed value.
        let twice = json!({"job": spec()}).to_string().replacen(
            "\"steps\":",
            "\"task_id\":\"x\",\"steps\":",
            1,
        );
        let problem = read(&Bytes::from(twice))
            .expect_err("refused")
            .into_problem();
        assert!(problem.detail.contains("job.task_id"), "{problem:?}");
    }

    #[test]
    fn a_job_for_an_agent_is_taken_and_what_this_version_lacks_is_refused() {
        let mut agent = spec();
        agent["steps"] = json!([]);
        agent["inference"] = json!({"allowed_models": ["m"]});
        assert!(read(&Bytes::from(json!({"job": agent}).to_string())).is_ok());
        let mut skilled = spec();
        skilled["context"] = json!({"skill_ids": ["a"]});
        let problem = refusal(&json!({"job": skilled}));
        assert!(problem.is(ErrorCode::Unavailable) && problem.detail.contains("skill_ids"));
    }

    #[test]
    fn a_deadline_of_the_request_and_a_diff_must_fit() {
        let mut body = json!({"job": spec(), "timeout_seconds": 60});
        assert!(read(&Bytes::from(body.to_string())).is_ok());
        body["timeout_seconds"] = json!(61);
        body["job"]["steps"] = json!([
            {"type": "apply_unified_diff", "args": {"diff": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}},
            {"type": "apply_unified_diff", "args": {"diff": "no diff"}},
        ]);
        assert_eq!(
            places(&body),
            [
                "invalid_value job.steps[1].args.diff",
                "invalid_value timeout_seconds"
            ]
        );
    }

    #[test]
    fn text_with_nul_is_valid_in_a_specification_and_nowhere_else() {
        let mut body = json!({"job": spec()});
        body["job"]["steps"] =
            json!([{"type": "write_file", "args": {"path": "a", "content": "\u{0}"}}]);
        assert!(read(&Bytes::from(body.to_string())).is_ok());
        body["image_ref"] = json!("\u{0}");
        assert!(refusal(&body).detail.starts_with("image_ref"));
    }
}
