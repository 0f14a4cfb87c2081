//! Every file of `tests/jobs` gets the verdict that `tests/jobs/expected.tsv` states, from the
//! parser and from the JSON Schema.
#![expect(
    clippy::disallowed_methods,
    reason = "reads files of this crate, and it has no fs_err"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use cynode_api::sba::{JOB_SCHEMA, JobSpec, ViolationCode, Violations};
use serde_json::Value;

/// Files that only the parser refuses. JSON Schema takes 1.0 and 1e2 for integers and can't compare
/// the ids of steps or the ends of a range of lines.
const REFUSED_BY_PARSER_ONLY: &[&str] = &[
    "invalid/whole-numbers-in-another-notation",
    "invalid/step-ids",
    "invalid/lines-in-reverse",
];

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/jobs")
}

/// The files with their contents and expected errors.
fn corpus() -> Vec<(String, Vec<u8>, BTreeSet<String>)> {
    let table = fs::read_to_string(directory().join("expected.tsv")).expect("the table");
    let expected: BTreeMap<&str, &str> = table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_once('\t').expect("a file and its verdict"))
        .collect();
    let mut names = Vec::new();
    for kind in ["valid", "invalid"] {
        for entry in fs::read_dir(directory().join(kind)).expect("a directory") {
            let path = entry.expect("an entry").path();
            let stem = path.file_stem().expect("a name").to_string_lossy();
            names.push(format!("{kind}/{stem}"));
        }
    }
    assert_eq!(
        names.iter().map(String::as_str).collect::<BTreeSet<_>>(),
        expected.keys().copied().collect(),
        "the table names exactly the files"
    );
    names
        .into_iter()
        .map(|name| {
            let text = fs::read(directory().join(format!("{name}.json"))).expect("a file");
            let errors = match expected[name.as_str()] {
                "valid" => BTreeSet::new(),
                errors => errors.split("; ").map(str::to_owned).collect(),
            };
            (name, text, errors)
        })
        .collect()
}

fn errors(violations: &Violations) -> BTreeSet<String> {
    violations
        .errors
        .iter()
        .map(|error| format!("{} {}", error.code.as_str(), error.path))
        .collect()
}

#[test]
// part of: CYNAI.SBAGNT.SchemaValidation, CYNAI.SBAGNT.ProtocolVersioning
fn every_file_has_the_expected_verdict_with_the_code_and_the_path_of_each_error() {
    let corpus = corpus();
    assert!(corpus.len() >= 60, "only {} files", corpus.len());
    for (name, text, expected) in corpus {
        assert_eq!(expected.is_empty(), name.starts_with("valid/"), "{name}");
        match JobSpec::parse(&text) {
            Ok(_) => assert!(expected.is_empty(), "{name} is accepted"),
            Err(violations) => {
                assert_eq!(errors(&violations), expected, "{name}: {violations}");
                assert_eq!(violations.omitted, 0, "{name}");
            }
        }
    }
}

#[test]
fn every_message_is_printable_and_bounded() {
    for (name, text, _) in corpus() {
        let Err(violations) = JobSpec::parse(&text) else {
            continue;
        };
        let shown = violations.to_string();
        assert!(
            shown.bytes().all(|byte| matches!(byte, b' '..=b'~')) && shown.len() < 2_000,
            "{name}: {shown}"
        );
    }
}

#[test]
fn every_valid_file_survives_a_round_trip() {
    for (name, text, expected) in corpus() {
        if !expected.is_empty() {
            continue;
        }
        let job = JobSpec::parse(&text).expect("a valid file");
        let json = serde_json::to_vec(&job).expect("a job serialises");
        assert_eq!(JobSpec::parse(&json).as_ref(), Ok(&job), "{name}");
        let value: Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(JobSpec::from_value(value).as_ref(), Ok(&job), "{name}");
        assert_eq!(
            serde_json::from_slice::<JobSpec>(&text).ok(),
            Some(job),
            "{name}"
        );
    }
}

#[test]
fn the_schema_and_the_parser_agree() {
    let schema: Value = serde_json::from_str(JOB_SCHEMA).expect("a schema");
    jsonschema::meta::validate(&schema).expect("a valid schema");
    let validator = jsonschema::validator_for(&schema).expect("a valid schema");
    for (name, text, expected) in corpus() {
        // The schema covers neither the text as a whole nor duplicate fields.
        let not_in_schema = [
            ViolationCode::Syntax,
            ViolationCode::TooLarge,
            ViolationCode::TooDeep,
            ViolationCode::DuplicateField,
        ];
        let is_not_in_schema = |error: &String| {
            let code = error.split(' ').next().unwrap_or_default();
            not_in_schema.iter().any(|known| known.as_str() == code)
        };
        if !expected.is_empty() && expected.iter().all(is_not_in_schema) {
            continue;
        }
        let value: Value = serde_json::from_slice(&text).expect("JSON");
        let schema_accepts = expected.is_empty() || REFUSED_BY_PARSER_ONLY.contains(&name.as_str());
        let refusals: Vec<String> = validator
            .iter_errors(&value)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect();
        assert_eq!(refusals.is_empty(), schema_accepts, "{name}: {refusals:?}");
    }
}

#[test]
fn an_unknown_field_of_a_newer_minor_version_is_refused_naming_both_versions() {
    let text = fs::read(directory().join("invalid/unknown-field-of-a-newer-version.json"));
    let violations = JobSpec::parse(&text.expect("a file")).expect_err("an unknown field");
    let error = &violations.errors[0];
    assert_eq!(error.path, "retries");
    assert!(
        error
            .message
            .ends_with("protocol_version is 1.3, known here is 1.0"),
        "{error}"
    );
}
