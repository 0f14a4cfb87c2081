//! Each bound of a job and a result, at the bound and beyond it.
#![expect(
    clippy::needless_pass_by_value,
    reason = "callers build the values in place"
)]

use std::time::{Duration, Instant};

use cynode_api::{
    exec_limits::{MAX_ARGUMENT_BYTES, MAX_ARGUMENT_LENGTH, MAX_ENV, POINTER_BYTES},
    file_limits::MAX_PATH_BYTES,
    sba::{
        JobResult, JobSpec, Violations,
        limits::{
            MAX_ARGUMENTS, MAX_ARTIFACTS, MAX_CONTEXT_BYTES, MAX_CONTEXT_ITEMS,
            MAX_CONTEXT_TEXT_BYTES, MAX_FAILURE_CODE_BYTES, MAX_JOB_BYTES, MAX_JOB_NODES,
            MAX_MESSAGE_BYTES, MAX_MODEL_BYTES, MAX_MODELS, MAX_RESULT_BYTES, MAX_RESULT_NODES,
            MAX_SKILL_NAME_BYTES, MAX_SKILLS, MAX_STEP_ID_BYTES, MAX_STEPS, MAX_VIOLATIONS,
        },
    },
};
use serde_json::{Value, json};

const JOB_ID: &str = "01936f3e-7c4a-7b1e-9a55-0242ac120002";

fn job(field: &str, value: Value) -> Value {
    let mut job = json!({
        "protocol_version": "1.0",
        "job_id": JOB_ID,
        "task_id": "01936f3e-7c4a-7b1e-9a55-0242ac120003",
        "constraints": {"max_runtime_seconds": 300, "max_output_bytes": 1024},
        "steps": [{"type": "run_command", "args": {"argv": ["true"]}}],
    });
    job[field] = value;
    job
}

fn context(field: &str, value: Value) -> Value {
    job("context", json!({field: value}))
}

fn command(args: Value) -> Value {
    job("steps", json!([{"type": "run_command", "args": args}]))
}

fn codes_and_paths(violations: &Violations) -> Vec<String> {
    violations
        .errors
        .iter()
        .map(|error| format!("{} {}", error.code.as_str(), error.path))
        .collect()
}

/// The errors of a job in both ways of reading one.
fn errors(job: &Value) -> Vec<String> {
    let errors = |job: Result<JobSpec, Violations>| {
        job.map_or_else(|violations| codes_and_paths(&violations), |_| Vec::new())
    };
    let parsed = errors(JobSpec::parse(job.to_string().as_bytes()));
    assert_eq!(errors(JobSpec::from_value(job.clone())), parsed);
    parsed
}

/// Asserts that a job with the largest value is valid and one with one more is not.
fn assert_bound(most: usize, error: &str, job: impl Fn(usize) -> Value) {
    assert_eq!(errors(&job(most)), [""; 0], "{error} at {most}");
    assert_eq!(errors(&job(most + 1)), [error], "beyond {most}");
}

fn repeated(item: Value, count: usize) -> Value {
    Value::Array(vec![item; count])
}

#[test]
fn steps_are_bounded() {
    let list_tree = json!({"type": "list_tree", "args": {}});
    assert_bound(MAX_STEPS, "invalid_value steps", |count| {
        job("steps", repeated(list_tree.clone(), count))
    });
    assert_bound(MAX_STEP_ID_BYTES, "invalid_value steps[0].id", |length| {
        let mut step = list_tree.clone();
        step["id"] = json!("x".repeat(length));
        job("steps", json!([step]))
    });
    assert_bound(
        MAX_PATH_BYTES,
        "invalid_value steps[0].args.path",
        |length| {
            let args = json!({"path": "x".repeat(length)});
            job("steps", json!([{"type": "list_tree", "args": args}]))
        },
    );
}

#[test]
fn commands_are_bounded_as_by_the_kernel() {
    assert_bound(MAX_ARGUMENTS, "invalid_value steps[0].args.argv", |count| {
        command(json!({"argv": repeated(json!("x"), count)}))
    });
    assert_bound(
        MAX_ARGUMENT_LENGTH - 1,
        "invalid_value steps[0].args.argv[0]",
        |length| command(json!({"argv": ["x".repeat(length)]})),
    );
    assert_bound(MAX_ENV, "invalid_value steps[0].args.env", |count| {
        let env: serde_json::Map<String, Value> = (0..count)
            .map(|name| (format!("N{name}"), json!("")))
            .collect();
        command(json!({"argv": ["env"], "env": env}))
    });
    assert_bound(
        MAX_ARGUMENT_LENGTH - 1 - "NAME=".len(),
        "invalid_value steps[0].args.env.NAME",
        |length| command(json!({"argv": ["env"], "env": {"NAME": "x".repeat(length)}})),
    );
    let full = MAX_ARGUMENT_BYTES / 16 - 1 - POINTER_BYTES;
    assert_bound(full, "invalid_value steps[0].args", |last| {
        let mut argv = vec![json!("x".repeat(full)); 15];
        argv.push(json!("x".repeat(last)));
        command(json!({"argv": argv}))
    });
}

#[test]
fn the_context_is_bounded_in_every_part_and_as_a_whole() {
    for field in [
        "baseline_context",
        "project_context",
        "task_context",
        "additional_context",
    ] {
        let error = format!("invalid_value context.{field}");
        assert_bound(MAX_CONTEXT_TEXT_BYTES, &error, |length| {
            context(field, json!("x".repeat(length)))
        });
    }
    for field in ["requirements", "acceptance_criteria"] {
        let error = format!("invalid_value context.{field}");
        assert_bound(MAX_CONTEXT_ITEMS, &error, |count| {
            context(field, repeated(json!("x"), count))
        });
    }
    assert_bound(MAX_SKILLS, "invalid_value context.skill_ids", |count| {
        context("skill_ids", repeated(json!("x"), count))
    });
    assert_bound(MAX_SKILLS, "invalid_value context.skills", |count| {
        context(
            "skills",
            repeated(json!({"name": "x", "content": ""}), count),
        )
    });
    assert_bound(
        MAX_SKILL_NAME_BYTES,
        "invalid_value context.skills[0].name",
        |length| {
            context(
                "skills",
                json!([{"name": "x".repeat(length), "content": ""}]),
            )
        },
    );
    let names = "preferences".len() + "a".len();
    assert_bound(
        MAX_CONTEXT_BYTES - names,
        "invalid_value context",
        |length| context("preferences", json!({"a": "x".repeat(length)})),
    );
}

#[test]
fn models_are_bounded() {
    assert_bound(
        MAX_MODELS,
        "invalid_value inference.allowed_models",
        |count| {
            job(
                "inference",
                json!({"allowed_models": repeated(json!("m"), count)}),
            )
        },
    );
    assert_bound(
        MAX_MODEL_BYTES,
        "invalid_value inference.allowed_models[0]",
        |length| job("inference", json!({"allowed_models": ["m".repeat(length)]})),
    );
}

#[test]
fn lengths_are_counted_in_bytes() {
    let model = |length| job("inference", json!({"allowed_models": ["ä".repeat(length)]}));
    assert_eq!(errors(&model(MAX_MODEL_BYTES / 2)), [""; 0]);
    assert_eq!(
        errors(&model(MAX_MODEL_BYTES / 2 + 1)),
        ["invalid_value inference.allowed_models[0]"]
    );
}

#[test]
fn a_job_is_bounded_in_bytes_values_and_reported_errors() {
    let padded = |bytes: usize| {
        let mut text = job("steps", json!([{"type": "list_tree", "args": {}}])).to_string();
        text.push_str(&" ".repeat(bytes - text.len()));
        JobSpec::parse(text.as_bytes()).map_err(|violations| codes_and_paths(&violations))
    };
    assert!(padded(MAX_JOB_BYTES).is_ok());
    assert_eq!(
        padded(MAX_JOB_BYTES + 1),
        Err(vec!["too_large $".to_owned()])
    );

    let others = 29;
    assert_bound(MAX_JOB_NODES - others, "too_large $", |count| {
        context("preferences", json!({"a": repeated(json!(0), count)}))
    });

    let mut hostile = json!({"protocol_version": "1.0"});
    for index in 0..MAX_JOB_NODES / 2 - 10 {
        hostile[format!("f{index}")] = json!(0);
    }
    let violations = JobSpec::from_value(hostile).expect_err("unknown fields");
    assert_eq!(violations.errors.len(), MAX_VIOLATIONS);
    assert_eq!(
        violations.omitted,
        MAX_JOB_NODES / 2 - 10 + 4 - MAX_VIOLATIONS
    );
}

#[test]
fn the_time_for_a_field_that_is_repeated_is_linear() {
    let members = r#""args":0,"#.repeat(MAX_JOB_NODES / 2 - 10);
    let text =
        format!(r#"{{"protocol_version":"1.0","steps":[{{{members}"type":"run_command"}}]}}"#);
    let start = Instant::now();
    let violations = JobSpec::parse(text.as_bytes()).expect_err("duplicates");
    assert_eq!(violations.errors.len(), MAX_VIOLATIONS);
    // Tens of milliseconds; with quadratic work it is a minute.
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
}

fn result(field: &str, value: Value) -> Value {
    let mut result = json!({
        "protocol_version": "1.0",
        "job_id": JOB_ID,
        "status": "failure",
        "steps": [],
        "artifacts": [],
        "failure_code": "step_failed",
        "failure_message": "",
    });
    result[field] = value;
    result
}

fn assert_result_bound(most: usize, error: &str, result: impl Fn(usize) -> Value) {
    let errors = |size| {
        JobResult::parse(result(size).to_string().as_bytes())
            .map_or_else(|violations| codes_and_paths(&violations), |_| Vec::new())
    };
    assert_eq!(errors(most), [""; 0], "{error} at {most}");
    assert_eq!(errors(most + 1), [error], "beyond {most}");
}

#[test]
fn a_result_is_bounded() {
    let step = json!({"index": 0, "type": "run_command", "status": "success"});
    assert_result_bound(MAX_STEPS, "invalid_value steps", |count| {
        result("steps", repeated(step.clone(), count))
    });
    assert_result_bound(MAX_ARTIFACTS, "invalid_value artifacts", |count| {
        result("artifacts", repeated(json!({"path": "a"}), count))
    });
    assert_result_bound(
        MAX_MESSAGE_BYTES,
        "invalid_value failure_message",
        |length| result("failure_message", json!("x".repeat(length))),
    );
    assert_result_bound(
        MAX_FAILURE_CODE_BYTES,
        "invalid_value failure_code",
        |length| result("failure_code", json!("x".repeat(length))),
    );
    let others = 17;
    assert_result_bound(MAX_RESULT_NODES - others, "too_large $", |count| {
        result("extra", repeated(json!(0), count))
    });
    let padding = MAX_RESULT_BYTES - result("extra", json!("")).to_string().len();
    assert_result_bound(padding, "too_large $", |length| {
        result("extra", json!("x".repeat(length)))
    });
}
