//! `cynode-sba schema` and `cynode-sba validate`: the job format for people and scripts.
//!
//! The verdict is that of the parser which orchestrator, worker and runner use.

use std::{
    fs::File,
    io::{self, Read, Write},
    process::ExitCode,
};

use cynode_api::sba::{FailureCode, JOB_SCHEMA, JobSpec, Violations, limits::MAX_JOB_BYTES};
use serde_json::json;

use crate::{EXIT_USAGE, fail};

const EXIT_INVALID: u8 = 1;
/// Standard output can't be written.
const EXIT_OUTPUT: u8 = 74;

/// How a verdict is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// The verdict on standard output, errors on standard error.
    Text,
    /// One object on standard output.
    Json,
}

pub(crate) fn print_schema() -> ExitCode {
    print(JOB_SCHEMA.as_bytes())
}

/// Validates the job in a file, or on standard input for `-`.
pub(crate) fn run(file: &str, format: Format) -> ExitCode {
    let json = match read(file) {
        Ok(json) => json,
        Err(error) => return fail(EXIT_USAGE, &format!("can't read {file:?}: {error}")),
    };
    let job = JobSpec::parse(&json);
    let (verdict, errors) = match format {
        Format::Text => (text_verdict(&job), job.as_ref().err().map(error_lines)),
        Format::Json => (json_verdict(&job), None),
    };
    if let Some(errors) = errors {
        // Standard error may be closed; the exit code still tells.
        drop(io::stderr().lock().write_all(errors.as_bytes()));
    }
    let printed = print(verdict.as_bytes());
    if job.is_ok() {
        printed
    } else {
        ExitCode::from(EXIT_INVALID)
    }
}

/// One byte more than a job may have is enough for the verdict.
fn read(file: &str) -> io::Result<Vec<u8>> {
    let most = MAX_JOB_BYTES as u64 + 1;
    let mut json = Vec::new();
    if file == "-" {
        io::stdin().lock().take(most).read_to_end(&mut json)?;
    } else {
        File::open(file)?.take(most).read_to_end(&mut json)?;
    }
    Ok(json)
}

fn text_verdict(job: &Result<JobSpec, Violations>) -> String {
    match job {
        Ok(job) if job.steps.is_empty() => {
            format!("valid: protocol {}, agent loop\n", job.protocol_version)
        }
        Ok(job) => {
            let (version, steps) = (job.protocol_version, job.steps.len());
            format!("valid: protocol {version}, {steps} steps\n")
        }
        Err(_) => format!("invalid: {}\n", FailureCode::SchemaValidation),
    }
}

fn error_lines(violations: &Violations) -> String {
    let mut lines: Vec<String> = violations.errors.iter().map(ToString::to_string).collect();
    if violations.omitted > 0 {
        lines.push(format!("and {} more", violations.omitted));
    }
    lines.join("\n") + "\n"
}

fn json_verdict(job: &Result<JobSpec, Violations>) -> String {
    let verdict = match job {
        Ok(job) => json!({
            "valid": true,
            "protocol_version": job.protocol_version,
            "steps": job.steps.len(),
        }),
        Err(violations) => json!({
            "valid": false,
            "failure_code": FailureCode::SchemaValidation,
            "errors": violations.errors,
            "omitted": violations.omitted,
        }),
    };
    format!("{verdict}\n")
}

fn print(text: &[u8]) -> ExitCode {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(EXIT_OUTPUT, &format!("can't write: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = r#"{
        "protocol_version": "1.0",
        "job_id": "01936f3e-7c4a-7b1e-9a55-0242ac120002",
        "task_id": "01936f3e-7c4a-7b1e-9a55-0242ac120003",
        "constraints": {"max_runtime_seconds": 1, "max_output_bytes": 1},
        "steps": [{"type": "list_tree", "args": {}}]
    }"#;

    #[test]
    fn verdicts_are_short_for_people_and_whole_for_programs() {
        let valid = JobSpec::parse(VALID.as_bytes());
        assert_eq!(text_verdict(&valid), "valid: protocol 1.0, 1 steps\n");
        let verdict: serde_json::Value = serde_json::from_str(&json_verdict(&valid)).expect("JSON");
        assert_eq!(verdict["valid"], true);

        let invalid = JobSpec::parse(VALID.replace("list_tree", "list_trees").as_bytes());
        assert_eq!(text_verdict(&invalid), "invalid: schema_validation\n");
        let violations = invalid.as_ref().expect_err("an unknown type");
        assert!(error_lines(violations).starts_with("steps[0].type: \"list_trees\" is not one of"));
        let verdict: serde_json::Value =
            serde_json::from_str(&json_verdict(&invalid)).expect("JSON");
        assert_eq!(verdict["errors"][0]["path"], "steps[0].type");
        assert_eq!(verdict["errors"][0]["code"], "invalid_value");
    }
}
