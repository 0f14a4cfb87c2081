//! Results of jobs, from the built-in runner and from custom runners.
#![expect(
    clippy::needless_pass_by_value,
    reason = "callers build the values in place"
)]

use cynode_api::{
    JobId,
    sba::{
        CriterionResult, FailureCode, InferenceUsage, JobResult, ProtocolVersion, ResultArtifact,
        ResultStatus, StepResult, StepStatus, StreamEncoding, TodoSummary, Verifier, job_id_of,
    },
};
use serde_json::{Value, json};
use time::macros::datetime;

const JOB_ID: &str = "01936f3e-7c4a-7b1e-9a55-0242ac120002";

fn job_id() -> Option<JobId> {
    JOB_ID.parse().ok()
}

fn errors(result: &Value) -> Vec<String> {
    match JobResult::parse(result.to_string().as_bytes()) {
        Ok(_) => Vec::new(),
        Err(violations) => violations
            .errors
            .iter()
            .map(|error| format!("{} {}", error.code.as_str(), error.path))
            .collect(),
    }
}

fn minimal(status: &str, code: Value, message: Value) -> Value {
    json!({
        "protocol_version": "1.0", "job_id": JOB_ID, "status": status, "steps": [], "artifacts": [],
        "failure_code": code, "failure_message": message,
    })
}

#[test]
// part of: CYNAI.SBAGNT.ResultContract
fn a_result_has_the_members_of_the_specification_even_on_failure() {
    let result = JobResult::failed(job_id(), FailureCode::SchemaValidation, "steps: is missing");
    let value = serde_json::to_value(&result).expect("a result serialises");
    assert_eq!(
        value,
        minimal(
            "failure",
            json!("schema_validation"),
            json!("steps: is missing")
        )
    );
    assert_eq!(JobResult::parse(value.to_string().as_bytes()), Ok(result));
    let timeout = JobResult::failed(None, FailureCode::Timeout, "");
    assert_eq!(timeout.status, ResultStatus::Timeout);
    let value = serde_json::to_value(&timeout).expect("a result serialises");
    assert_eq!(value["job_id"], Value::Null);
    assert_eq!(JobResult::parse(value.to_string().as_bytes()), Ok(timeout));
}

#[test]
fn a_full_result_survives_a_round_trip() {
    let result = JobResult {
        protocol_version: ProtocolVersion::CURRENT,
        job_id: job_id(),
        status: ResultStatus::Failure,
        steps: vec![
            StepResult {
                index: 0,
                id: Some("build".to_owned()),
                kind: "run_command".to_owned(),
                status: StepStatus::Interrupted,
                exit_code: Some(-1),
                stdout: Some("AA==".to_owned()),
                stderr: Some(String::new()),
                encoding: StreamEncoding::Base64,
                output: None,
                error: Some("killed".to_owned()),
                truncated: true,
                started_at: Some(datetime!(2026-11-15 10:00:00.5 UTC)),
                ended_at: Some(datetime!(2026-11-15 10:00:01 UTC)),
            },
            StepResult {
                index: 1,
                id: None,
                kind: "list_tree".to_owned(),
                status: StepStatus::Success,
                exit_code: None,
                stdout: None,
                stderr: None,
                encoding: StreamEncoding::Utf8,
                output: Some(json!({"entries": [{"path": "a"}]})),
                error: None,
                truncated: false,
                started_at: None,
                ended_at: None,
            },
        ],
        artifacts: vec![ResultArtifact {
            path: "report.html".to_owned(),
            size: Some(10),
            sha256: Some("a".repeat(64)),
        }],
        failure_code: Some(FailureCode::Other("out_of_tea".to_owned())),
        failure_message: Some("No tea.".to_owned()),
        criteria: vec![CriterionResult {
            index: 0,
            is_met: true,
            verified_by: Verifier::Model,
            detail: Some("It says so.".to_owned()),
        }],
        todo: Some(TodoSummary {
            total: 2,
            done: 1,
            open: vec!["tea".to_owned()],
        }),
        usage: Some(InferenceUsage {
            model: "llama3.2".to_owned(),
            requests: 1,
            prompt_tokens: 2,
            completion_tokens: 3,
            duration_ms: 4,
        }),
    };
    let json = serde_json::to_vec(&result).expect("a result serialises");
    assert_eq!(JobResult::parse(&json), Ok(result));
}

#[test]
fn the_example_of_the_specification_is_a_result() {
    assert_eq!(
        errors(&minimal("success", json!(null), json!(null))),
        [""; 0]
    );
}

#[test]
fn results_of_other_runners_may_have_more_fields() {
    let mut result = minimal("success", json!(null), json!("all good"));
    result["runner"] = json!({"name": "other"});
    result["steps"] = json!([{"index": 0, "type": "bake", "status": "success", "oven": 3}]);
    result["artifacts"] = json!([{"path": "cake", "flavour": "tea"}]);
    assert_eq!(errors(&result), [""; 0]);
}

#[test]
fn a_failure_says_why_and_a_success_does_not() {
    for (status, code, message, expected) in [
        (
            "failure",
            json!(null),
            json!("x"),
            &["invalid_value failure_code"][..],
        ),
        (
            "timeout",
            json!("timeout"),
            json!(null),
            &["invalid_value failure_message"],
        ),
        (
            "success",
            json!("step_failed"),
            json!("x"),
            &["invalid_value failure_code"],
        ),
        (
            "failure",
            json!("Step Failed"),
            json!("x"),
            &["invalid_value failure_code"],
        ),
        (
            "canceled",
            json!("canceled"),
            json!("x"),
            &["invalid_value status"],
        ),
    ] {
        assert_eq!(
            errors(&minimal(status, code, message)),
            expected,
            "{status}"
        );
    }
}

#[test]
fn a_broken_result_is_refused_with_the_paths() {
    let mut result = minimal("success", json!(null), json!(null));
    result["job_id"] = json!("me");
    result["steps"] = json!([
        {"index": -1, "type": "run_command", "status": "won", "exit_code": 1e3, "stdout": 5},
        {"started_at": "yesterday", "encoding": "utf-16", "truncated": "no"},
    ]);
    result["artifacts"] = json!(["cake"]);
    result["usage"] = json!({});
    let mut expected = vec![
        "wrong_type artifacts[0]",
        "invalid_value job_id",
        "wrong_type steps[0].exit_code",
        "invalid_value steps[0].index",
        "invalid_value steps[0].status",
        "wrong_type steps[0].stdout",
        "invalid_value steps[1].encoding",
        "invalid_value steps[1].started_at",
        "wrong_type steps[1].truncated",
        "missing_field steps[1].index",
        "missing_field steps[1].status",
        "missing_field steps[1].type",
        "missing_field usage.completion_tokens",
        "missing_field usage.duration_ms",
        "missing_field usage.model",
        "missing_field usage.prompt_tokens",
        "missing_field usage.requests",
    ];
    let mut actual = errors(&result);
    actual.sort_unstable();
    expected.sort_unstable();
    assert_eq!(actual, expected);

    let text = minimal("success", json!(null), json!(null)).to_string();
    for (broken, code) in [
        ("", "syntax $"),
        (&text[..text.len() - 1], "syntax $"),
        (
            &text.replace("1.0", "2.0"),
            "unsupported_version protocol_version",
        ),
        (
            &text.replace("\"steps\"", "\"status\":\"failure\",\"steps\""),
            "duplicate_field status",
        ),
    ] {
        let violations = JobResult::parse(broken.as_bytes()).expect_err("broken");
        let error = &violations.errors[0];
        assert_eq!(format!("{} {}", error.code.as_str(), error.path), code);
    }
}

#[test]
fn the_id_of_an_invalid_job_is_found_if_it_is_unambiguous() {
    let with = |id: &str| format!(r#"{{"unknown":1,"job_id":{id}}}"#);
    assert_eq!(
        job_id_of(with(&format!("\"{JOB_ID}\"")).as_bytes()),
        job_id()
    );
    let twice = format!(r#"{{"job_id":"{JOB_ID}","job_id":"{JOB_ID}"}}"#);
    for text in [
        with("1"),
        with("\"me\""),
        twice,
        "{}".to_owned(),
        "{".to_owned(),
    ] {
        assert_eq!(job_id_of(text.as_bytes()), None, "{text}");
    }
}
