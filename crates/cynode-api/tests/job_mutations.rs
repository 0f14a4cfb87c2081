//! Generated jobs round-trip, and no single mutation of one passes unnoticed.

use std::sync::LazyLock;

use cynode_api::sba::{JOB_SCHEMA, JobSpec, ViolationCode};
use proptest::{
    collection::{btree_map, vec},
    option,
    prelude::*,
    sample::select,
};
use serde_json::{Map, Value, json};

static SCHEMA: LazyLock<jsonschema::Validator> = LazyLock::new(|| {
    let schema = serde_json::from_str(JOB_SCHEMA).expect("a schema");
    jsonschema::validator_for(&schema).expect("a valid schema")
});

// Generated jobs name optional fields only to deviate from the default, so that a job serialises
// to what it was generated as.

/// A field of a generated object: always there, or sometimes.
type Member = (&'static str, BoxedStrategy<Option<Value>>);

fn always(name: &'static str, value: impl Strategy<Value = Value> + 'static) -> Member {
    (name, value.prop_map(Some).boxed())
}

fn sometimes(name: &'static str, value: impl Strategy<Value = Value> + 'static) -> Member {
    (name, option::of(value).boxed())
}

fn object(members: Vec<Member>) -> BoxedStrategy<Value> {
    let (names, values): (Vec<_>, Vec<_>) = members.into_iter().unzip();
    values
        .prop_map(move |values| {
            let members = names.iter().zip(values);
            let members = members.filter_map(|(name, value)| Some(((*name).to_owned(), value?)));
            Value::Object(members.collect())
        })
        .boxed()
}

fn list(item: impl Strategy<Value = Value> + 'static, most: usize) -> BoxedStrategy<Value> {
    vec(item, 1..=most).prop_map(Value::Array).boxed()
}

fn text() -> impl Strategy<Value = Value> {
    "\\PC{0,12}".prop_map(Value::String)
}

/// A text without NUL that is not empty.
fn word() -> impl Strategy<Value = Value> {
    "[a-zß./ \"\\\\\n]{1,8}".prop_map(Value::String)
}

fn line() -> impl Strategy<Value = Value> {
    "[a-z:.ß -]{1,12}".prop_map(Value::String)
}

fn whole(most: i64) -> impl Strategy<Value = Value> {
    prop_oneof![Just(1), Just(most), 1..=most].prop_map(Value::from)
}

fn uuid() -> impl Strategy<Value = Value> {
    "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}".prop_map(Value::String)
}

fn free() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        text(),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..3).prop_map(Value::Array),
            free_object(inner),
        ]
    })
}

fn free_object(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Value> {
    btree_map("[a-z]{1,4}", value, 1..4)
        .prop_map(|members| Value::Object(members.into_iter().collect()))
}

fn command() -> BoxedStrategy<Value> {
    let variables = btree_map("[A-Z]{1,6}", "[a-z=]{0,6}".prop_map(Value::String), 1..3)
        .prop_map(|members| Value::Object(members.into_iter().collect()));
    let args = |argv| {
        vec![
            always("argv", argv),
            sometimes("cwd", word()),
            sometimes("env", variables.clone()),
        ]
    };
    let mut script = args(list(word(), 1));
    script.push(always("shell", Just(Value::Bool(true))));
    prop_oneof![object(args(list(word(), 3))), object(script)].boxed()
}

fn write_file() -> BoxedStrategy<Value> {
    let args = |name, content: BoxedStrategy<Value>| {
        object(vec![
            always("path", word()),
            always(name, content),
            sometimes(
                "mode",
                select(&["0644", "0000", "0777"][..]).prop_map(Value::from),
            ),
        ])
    };
    let base64 = select(&["", "eA==", "eHg=", "eHh4"][..]).prop_map(Value::from);
    prop_oneof![
        args("content", text().boxed()),
        args("content_b64", base64.boxed()),
    ]
    .boxed()
}

fn step() -> BoxedStrategy<Value> {
    let step = |kind: &'static str, args: BoxedStrategy<Value>| {
        object(vec![
            always("type", Just(Value::from(kind))),
            always("args", args),
            sometimes("timeout_seconds", whole(10_800)),
            sometimes("idempotent", Just(Value::Bool(true))),
        ])
    };
    let lines = prop_oneof![
        Just(vec![]),
        (1..9_i64, 0..9_i64)
            .prop_map(|(start, more)| vec![("start_line", start), ("end_line", start + more),])
    ];
    let read_file = (word(), option::of(whole(16 << 20)), lines).prop_map(|(path, most, lines)| {
        let mut args = Map::from_iter([("path".to_owned(), path)]);
        args.extend(most.map(|most| ("max_bytes".to_owned(), most)));
        args.extend(
            lines
                .into_iter()
                .map(|(name, line)| (name.to_owned(), line.into())),
        );
        Value::Object(args)
    });
    prop_oneof![
        step("run_command", command()),
        step("write_file", write_file()),
        step("read_file", read_file.boxed()),
        step("apply_unified_diff", object(vec![always("diff", word())])),
        step(
            "list_tree",
            object(vec![
                sometimes("path", word()),
                sometimes("max_depth", whole(64)),
                sometimes("max_entries", whole(10_000)),
            ])
        ),
    ]
    .boxed()
}

fn context() -> BoxedStrategy<Value> {
    let criterion = object(vec![
        always("text", text()),
        always("check", command()),
        sometimes("timeout_seconds", whole(10_800)),
    ]);
    let skill = object(vec![always("name", line()), always("content", text())]);
    object(vec![
        sometimes("baseline_context", text()),
        sometimes("project_context", text()),
        sometimes("task_context", text()),
        sometimes("requirements", list(text(), 3)),
        sometimes(
            "acceptance_criteria",
            list(prop_oneof![text().boxed(), criterion], 3),
        ),
        sometimes("preferences", free_object(free())),
        sometimes("additional_context", text()),
        sometimes("skill_ids", list(line(), 2)),
        sometimes("skills", list(skill, 2)),
    ])
}

fn job() -> impl Strategy<Value = Value> {
    let constraints = object(vec![
        always("max_runtime_seconds", whole(10_800)),
        always("max_output_bytes", whole(16 << 20)),
        sometimes("ext_net_allowed", Just(Value::Bool(true))),
    ]);
    let inference = || {
        object(vec![
            always("allowed_models", list(line(), 2)),
            sometimes(
                "source",
                select(&["worker", "api_egress"][..]).prop_map(Value::from),
            ),
        ])
    };
    let steps = vec(step(), 1..4).prop_map(|mut steps| {
        for (index, step) in steps
            .iter_mut()
            .enumerate()
            .filter(|(index, _)| index % 2 == 0)
        {
            step["id"] = json!(format!("step {index}"));
        }
        Value::Array(steps)
    });
    let with = |steps: BoxedStrategy<Value>, inference: Member| {
        object(vec![
            always(
                "protocol_version",
                select(&["1.0", "1.7"][..]).prop_map(Value::from),
            ),
            always("job_id", uuid()),
            always("task_id", uuid()),
            always("constraints", constraints.clone()),
            inference,
            sometimes("context", context()),
            always("steps", steps),
        ])
    };
    prop_oneof![
        4 => with(steps.boxed(), sometimes("inference", inference())),
        1 => with(Just(json!([])).boxed(), always("inference", inference())),
    ]
}

#[derive(Clone, Debug, PartialEq)]
enum Segment {
    Name(String),
    Index(usize),
}

type Path = Vec<Segment>;

fn shown(path: &[Segment]) -> String {
    if path.is_empty() {
        return "$".to_owned();
    }
    let text: String = path
        .iter()
        .map(|segment| match segment {
            Segment::Index(index) => format!("[{index}]"),
            Segment::Name(name) => format!(".{name}"),
        })
        .collect();
    text.trim_start_matches('.').to_owned()
}

/// The path without indices, such as `steps[].args`.
fn pattern(path: &[Segment]) -> String {
    let names = path.iter().map(|segment| match segment {
        Segment::Name(name) => format!(".{name}"),
        Segment::Index(_) => "[]".to_owned(),
    });
    names.collect::<String>().trim_start_matches('.').to_owned()
}

fn inner(path: &[Segment], segment: Segment) -> Path {
    let mut path = path.to_vec();
    path.push(segment);
    path
}

/// Every value of a document with its path, the document first.
fn values<'a>(value: &'a Value, path: &[Segment], found: &mut Vec<(Path, &'a Value)>) {
    found.push((path.to_vec(), value));
    match value {
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                values(item, &inner(path, Segment::Index(index)), found);
            }
        }
        Value::Object(members) => {
            for (name, member) in members {
                values(member, &inner(path, Segment::Name(name.clone())), found);
            }
        }
        _ => {}
    }
}

#[derive(Debug)]
enum Mutation {
    /// A field that no object has.
    Add(Path),
    Remove(Path),
    Duplicate(Path),
    Replace(Path, Value),
}

/// The JSON of a document with one mutation.
fn rendered(value: &Value, path: &[Segment], mutation: &Mutation) -> String {
    match (mutation, value) {
        (Mutation::Replace(at, other), _) if at == path => other.to_string(),
        (_, Value::Array(items)) => {
            let items = items.iter().enumerate();
            let items = items
                .map(|(index, item)| rendered(item, &inner(path, Segment::Index(index)), mutation));
            format!("[{}]", items.collect::<Vec<_>>().join(","))
        }
        (_, Value::Object(members)) => {
            let mut texts = Vec::new();
            for (name, member) in members {
                let here = inner(path, Segment::Name(name.clone()));
                let text = format!(
                    "{}:{}",
                    Value::from(name.as_str()),
                    rendered(member, &here, mutation)
                );
                match mutation {
                    Mutation::Remove(at) if *at == here => {}
                    Mutation::Duplicate(at) if *at == here => {
                        texts.extend([text.clone(), text]);
                    }
                    _ => texts.push(text),
                }
            }
            if matches!(mutation, Mutation::Add(at) if at == path) {
                texts.push(r#""unexpected":{"a":[]}"#.to_owned());
            }
            format!("{{{}}}", texts.join(","))
        }
        _ => value.to_string(),
    }
}

/// Whether callers choose the names of the fields of an object at this path.
fn has_free_names(path: &[Segment]) -> bool {
    let is_env = path.last() == Some(&Segment::Name("env".to_owned()));
    is_env || pattern(path).starts_with("context.preferences")
}

fn is_free(path: &[Segment]) -> bool {
    pattern(path).starts_with("context.preferences") && pattern(path) != "context.preferences"
}

/// The error when a field is removed; none if the field is optional.
fn error_without(job: &Value, path: &[Segment]) -> Option<(ViolationCode, String)> {
    const REQUIRED: &[&str] = &[
        "protocol_version",
        "job_id",
        "task_id",
        "constraints",
        "constraints.max_runtime_seconds",
        "constraints.max_output_bytes",
        "inference.allowed_models",
        "context.acceptance_criteria[].text",
        "context.acceptance_criteria[].check",
        "context.acceptance_criteria[].check.argv",
        "context.skills[].name",
        "context.skills[].content",
        "steps",
        "steps[].type",
        "steps[].args",
        "steps[].args.argv",
        "steps[].args.diff",
    ];
    let missing = Some((ViolationCode::MissingField, shown(path)));
    match pattern(path).as_str() {
        pattern if REQUIRED.contains(&pattern) => missing,
        "steps[].args.path" => {
            let Segment::Index(index) = path[1] else {
                panic!("{path:?}")
            };
            (job["steps"][index]["type"] != "list_tree").then_some(missing?)
        }
        "steps[].args.content" | "steps[].args.content_b64" => {
            Some((ViolationCode::InvalidValue, shown(&path[..3])))
        }
        "inference" if job["steps"] == json!([]) => {
            Some((ViolationCode::InvalidValue, "steps".to_owned()))
        }
        _ => None,
    }
}

/// Values of other types than the one at a path may have.
fn other_types(path: &[Segment], value: &Value) -> Vec<Value> {
    let pattern = pattern(path);
    let is_allowed = |other: &Value| match pattern.as_str() {
        "context.skills" => other.is_null(),
        "context.acceptance_criteria[]" => other.is_string() || other.is_object(),
        _ => false,
    };
    [
        json!(null),
        json!(true),
        json!(7),
        json!("x"),
        json!([]),
        json!({}),
        json!(1.5),
    ]
    .into_iter()
    .filter(|other| {
        // A fraction is a type of its own.
        let is_same = std::mem::discriminant(other) == std::mem::discriminant(value);
        (!is_same || other.is_f64()) && !is_allowed(other)
    })
    .collect()
}

/// Each mutation with the error that it must cause, if any.
fn mutations(job: &Value) -> Vec<(Mutation, Option<(ViolationCode, String)>)> {
    let (mut found, mut mutations) = (Vec::new(), Vec::new());
    values(job, &[], &mut found);
    for (path, value) in found {
        if value.is_object() && !has_free_names(&path) {
            let field = shown(&inner(&path, Segment::Name("unexpected".to_owned())));
            let error = (ViolationCode::UnknownField, field);
            mutations.push((Mutation::Add(path.clone()), Some(error)));
        }
        if matches!(path.last(), Some(Segment::Name(_))) {
            let error = (ViolationCode::DuplicateField, shown(&path));
            mutations.push((Mutation::Duplicate(path.clone()), Some(error)));
            if !is_free(&path) {
                mutations.push((Mutation::Remove(path.clone()), error_without(job, &path)));
            }
        }
        if !is_free(&path) {
            for other in other_types(&path, value) {
                let error = (ViolationCode::WrongType, shown(&path));
                mutations.push((Mutation::Replace(path.clone(), other), Some(error)));
            }
        }
    }
    mutations
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_valid_job_survives_a_round_trip_and_loses_nothing(value in job()) {
        let text = serde_json::to_vec(&value).expect("JSON");
        let job = JobSpec::parse(&text);
        prop_assert!(job.is_ok(), "{value}: {job:?}");
        let job = job.expect("a valid job");
        prop_assert_eq!(serde_json::to_value(&job).expect("a job serialises"), value.clone());
        let again = serde_json::to_vec(&job).expect("a job serialises");
        prop_assert_eq!(JobSpec::parse(&again), Ok(job.clone()));
        prop_assert_eq!(JobSpec::from_value(value.clone()), Ok(job));
        prop_assert!(SCHEMA.is_valid(&value), "{value}");
    }

    #[test]
    // part of: CYNAI.SBAGNT.SchemaValidation
    fn every_single_mutation_is_refused_with_its_path(job in job()) {
        for (mutation, expected) in mutations(&job) {
            let text = rendered(&job, &[], &mutation);
            let result = JobSpec::parse(text.as_bytes());
            match (&result, &expected) {
                (Ok(_), None) => {}
                (Err(violations), Some((code, path))) => {
                    let is_found = violations
                        .errors
                        .iter()
                        .any(|error| error.code == *code && error.path == *path);
                    prop_assert!(is_found, "{mutation:?}: {violations}");
                }
                _ => prop_assert!(false, "{mutation:?}: {result:?}, expected {expected:?}"),
            }
            if !matches!(mutation, Mutation::Duplicate(_)) {
                let value: Value = serde_json::from_str(&text).expect("JSON");
                prop_assert_eq!(SCHEMA.is_valid(&value), expected.is_none(), "{:?}", mutation);
            }
        }
    }
}
