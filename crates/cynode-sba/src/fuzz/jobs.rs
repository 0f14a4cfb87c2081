//! Jobs and their results, as orchestrator, worker and runner read them.

use cynode_api::sba::{
    JobResult, JobSpec, ViolationCode, Violations, job_id_of,
    limits::{MAX_SHOWN_NAME, MAX_VIOLATIONS},
};
use serde_json::Value;

/// A job survives a round trip, reads the same from a parsed value, and has the id that is found in
/// it. What is refused is refused with printable, bounded errors.
pub fn jobs(input: &[u8]) {
    let value = serde_json::from_slice::<Value>(input);
    match JobSpec::parse(input) {
        Ok(job) => {
            assert_eq!(job_id_of(input), Some(job.job_id), "the id is another one");
            let json = serde_json::to_vec(&job).expect("a job serialises");
            let again = JobSpec::parse(&json).expect("a serialised job is valid");
            assert_eq!(again, job, "a round trip changes the job");
            let json_again = serde_json::to_vec(&again).expect("a job serialises");
            assert_eq!(json_again, json, "serialising is not stable");
            let value = value.expect("a job is JSON");
            assert_eq!(JobSpec::from_value(value).as_ref(), Ok(&job));
        }
        Err(violations) => {
            check(&violations);
            // A parsed value has lost duplicate fields, and reading ends before all are known.
            let may_have_duplicates = violations.errors.iter().any(|error| {
                matches!(
                    error.code,
                    ViolationCode::DuplicateField
                        | ViolationCode::TooDeep
                        | ViolationCode::TooLarge
                )
            });
            if let Ok(value) = value
                && !may_have_duplicates
                && violations.omitted == 0
            {
                let of_value = JobSpec::from_value(value).expect_err("the value is refused too");
                assert_eq!(
                    sorted(of_value),
                    sorted(violations),
                    "the value has other errors"
                );
            }
        }
    }
}

/// Objects of a parsed value have another order.
fn sorted(mut violations: Violations) -> Violations {
    violations.errors.sort();
    violations
}

/// The same for a result; its unknown fields are dropped.
pub fn results(input: &[u8]) {
    match JobResult::parse(input) {
        Ok(result) => {
            let json = serde_json::to_vec(&result).expect("a result serialises");
            let again = JobResult::parse(&json).expect("a serialised result is valid");
            assert_eq!(again, result, "a round trip changes the result");
        }
        Err(violations) => check(&violations),
    }
}

fn check(violations: &Violations) {
    assert!(!violations.errors.is_empty(), "a refusal has no reason");
    assert!(violations.errors.len() <= MAX_VIOLATIONS);
    for error in &violations.errors {
        let text = error.to_string();
        assert!(
            text.bytes().all(|byte| matches!(byte, b' '..=b'~')),
            "an error is not printable: {text:?}"
        );
        // A name is shown in at most ten characters each, and at most 64 levels deep.
        assert!(text.len() <= 1_000 + 64 * (10 * MAX_SHOWN_NAME + 8));
        assert!(error.message.len() <= 1_000 + 10 * MAX_SHOWN_NAME);
    }
}
