//! `cynode-sba schema` and `cynode-sba validate`, as scripts call them.
#![expect(
    clippy::disallowed_methods,
    reason = "starts the program under test and reads files of this repository"
)]

use std::{
    io::Write as _,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use cynode_api::sba::JOB_SCHEMA;
use serde_json::Value;

fn sba(arguments: &[&str], stdin: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_cynode-sba"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = child.stdin.take().expect("a pipe");
    // The program need not read all of it.
    drop(input.write_all(stdin));
    drop(input);
    child.wait_with_output().expect("the program ends")
}

fn file(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join(format!("../cynode-api/tests/jobs/{name}.json"))
        .to_string_lossy()
        .into_owned()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

#[test]
fn the_schema_is_printed_as_it_is_checked_in() {
    let output = sba(&["schema"], b"");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), JOB_SCHEMA);
}

#[test]
// part of: CYNAI.SBAGNT.SchemaValidation
fn a_valid_file_exits_with_0_and_an_invalid_one_with_1_and_its_errors_on_stderr() {
    let output = sba(
        &["validate", &file("valid/example-of-the-specification")],
        b"",
    );
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), "valid: protocol 1.0, agent loop\n");
    assert_eq!(text(&output.stderr), "");

    let output = sba(
        &["validate", &file("invalid/inference-without-models")],
        b"",
    );
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stdout), "invalid: schema_validation\n");
    assert_eq!(
        text(&output.stderr),
        "inference.allowed_models: is missing\n"
    );
}

#[test]
fn a_job_on_standard_input_gets_a_verdict_in_json() {
    for arguments in [
        ["validate", "-", "--output", "json"],
        ["validate", "--output", "json", "-"],
    ] {
        let output = sba(&arguments, br#"{"protocol_version":"1.0","steps":[]}"#);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(text(&output.stderr), "");
        let verdict: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(verdict["valid"], false);
        assert_eq!(verdict["failure_code"], "schema_validation");
        let paths: Vec<&Value> = verdict["errors"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|error| &error["path"])
            .collect();
        assert_eq!(paths, ["job_id", "task_id", "constraints", "steps"]);
    }
}

#[test]
fn an_endless_input_is_refused_at_the_limit() {
    let output = sba(&["validate", "/dev/zero"], b"");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), "$: has more than 10485760 bytes\n");
}

#[test]
fn a_file_that_is_not_there_and_wrong_arguments_exit_with_64() {
    for arguments in [
        &["validate", "/nonexistent/job.json"][..],
        &["validate"],
        &["validate", "--json"],
        &["validate", "a", "b"],
        &["validate", "-", "--output", "xml"],
        &["schema", "x"],
        &[],
    ] {
        let output = sba(arguments, b"");
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(text(&output.stderr).starts_with("cynode-sba: "));
    }
}
