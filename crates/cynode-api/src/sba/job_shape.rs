//! The shape of a job specification.

use super::{
    document::{JsonValue, Members},
    limits::{
        MAX_ARGUMENTS, MAX_CONTEXT_BYTES, MAX_CONTEXT_ITEMS, MAX_CONTEXT_TEXT_BYTES, MAX_JOB_BYTES,
        MAX_LINE, MAX_MODEL_BYTES, MAX_MODELS, MAX_OUTPUT_BYTES, MAX_RUNTIME_SECONDS,
        MAX_SKILL_NAME_BYTES, MAX_SKILLS, MAX_STEP_ID_BYTES, MAX_STEPS, MAX_TREE_DEPTH,
        MAX_TREE_ENTRIES,
    },
    shape::{Form, ObjectShape, Rule, Shape, Text, closed, list, optional, required, text},
    validate::{Validator, get},
    violation::{Segment, quote},
};
use crate::{exec_limits, file_limits};

pub(super) static JOB: ObjectShape = closed(
    "a job",
    &[
        required(
            "protocol_version",
            &text(1, 16, Form::Version),
            "The version of this format: 1.x.",
        ),
        required(
            "job_id",
            &UUID,
            "The job's id, as the orchestrator knows it.",
        ),
        required("task_id", &UUID, "The task that the job belongs to."),
        required(
            "constraints",
            &Shape::Object(&CONSTRAINTS),
            "What the job may use.",
        ),
        optional(
            "inference",
            &Shape::Object(&INFERENCE),
            "The models that the job may use. With this and without steps, an agent works the job.",
        ),
        optional(
            "context",
            &Shape::Object(&CONTEXT),
            "What the agent has to know.",
        ),
        required(
            "steps",
            &list(&Shape::Object(&STEP), 0, MAX_STEPS),
            "Run in order; the first failure ends the job.",
        ),
    ],
    Some(JOB_RULE),
);

const JOB_RULE: Rule = Rule {
    check: |members, validator| {
        if let Some(JsonValue::List(steps)) = get(members, "steps") {
            if steps.is_empty() && get(members, "inference").is_none() {
                validator.at(Segment::Field("steps"), |steps| {
                    steps
                        .invalid(|| "is empty and there is no inference: nothing to do".to_owned());
                });
            }
            unique_ids(steps, validator);
        }
    },
    schema: Some(
        r#"{"anyOf": [{"required": ["inference"]}, {"properties": {"steps": {"minItems": 1}}}]}"#,
    ),
};

/// Ids name steps in results, so no two may be equal.
fn unique_ids<'a>(steps: &'a [JsonValue], validator: &mut Validator<'a>) {
    let mut seen = std::collections::BTreeSet::new();
    for (index, step) in steps.iter().enumerate() {
        let JsonValue::Object(members) = step else {
            continue;
        };
        let Some(JsonValue::Text(id)) = get(members, "id") else {
            continue;
        };
        if !seen.insert(id.as_str()) {
            validator.at(Segment::Field("steps"), |steps| {
                steps.at(Segment::Index(index), |step| {
                    step.at(Segment::Field("id"), |field| {
                        field.invalid(|| format!("{} is the id of another step", quote(id)));
                    });
                });
            });
        }
    }
}

const UUID: Shape = text(36, 36, Form::Uuid);
const SECONDS: Shape = Shape::Integer(1, MAX_RUNTIME_SECONDS);

static CONSTRAINTS: ObjectShape = closed(
    "constraints",
    &[
        required(
            "max_runtime_seconds",
            &SECONDS,
            "When it is over, the job ends with `timeout`.",
        ),
        required(
            "max_output_bytes",
            &Shape::Integer(1, MAX_OUTPUT_BYTES),
            "Standard output, standard error and returned file content of all steps together.",
        ),
        optional(
            "ext_net_allowed",
            &Shape::Boolean,
            "Whether the job may reach beyond worker and orchestrator; false by default.",
        ),
    ],
    None,
);

static INFERENCE: ObjectShape = closed(
    "inference",
    &[
        required(
            "allowed_models",
            &list(&text(1, MAX_MODEL_BYTES, Form::Line), 1, MAX_MODELS),
            "The only models that the job may use; the first that can be reached is used.",
        ),
        optional(
            "source",
            &Shape::Choice(&["worker", "api_egress"]),
            "Where the models are served; by default wherever they can be reached.",
        ),
    ],
    None,
);

const CONTEXT_TEXT: Shape = text(0, MAX_CONTEXT_TEXT_BYTES, Form::Free);

static CONTEXT: ObjectShape = closed(
    "context",
    &[
        optional(
            "baseline_context",
            &CONTEXT_TEXT,
            "Identity, role, responsibilities and non-goals of the agent.",
        ),
        optional(
            "project_context",
            &CONTEXT_TEXT,
            "Identity, scope and metadata of the project.",
        ),
        optional(
            "task_context",
            &CONTEXT_TEXT,
            "Identity, status, summary of the criteria and metadata of the task.",
        ),
        optional(
            "requirements",
            &list(&CONTEXT_TEXT, 0, MAX_CONTEXT_ITEMS),
            "What the work must satisfy.",
        ),
        optional(
            "acceptance_criteria",
            &list(&CRITERION, 0, MAX_CONTEXT_ITEMS),
            "What is verified at the end.",
        ),
        optional(
            "preferences",
            &Shape::FreeObject,
            "Resolved preferences by key.",
        ),
        optional(
            "additional_context",
            &CONTEXT_TEXT,
            "The resolved preference agents.sandbox_agent.additional_context.",
        ),
        optional(
            "skill_ids",
            &list(&text(1, MAX_SKILL_NAME_BYTES, Form::Line), 0, MAX_SKILLS),
            "Stored skills.",
        ),
        optional(
            "skills",
            &Shape::Nullable(&list(&Shape::Object(&SKILL), 0, MAX_SKILLS)),
            "Skills with their content.",
        ),
    ],
    Some(Rule {
        check: |members, validator| {
            let bytes = text_bytes(members);
            if bytes > MAX_CONTEXT_BYTES {
                validator.invalid(|| {
                    format!("holds {bytes} bytes of text and names; at most {MAX_CONTEXT_BYTES}")
                });
            }
        },
        schema: None,
    }),
);

fn text_bytes(members: &Members) -> usize {
    fn of(value: &JsonValue) -> usize {
        match value {
            JsonValue::Text(text) => text.len(),
            JsonValue::List(items) => items.iter().map(of).sum(),
            JsonValue::Object(members) => text_bytes(members),
            JsonValue::Null | JsonValue::Boolean(_) | JsonValue::Number(_) => 0,
        }
    }
    members
        .iter()
        .map(|(name, value)| name.len() + of(value))
        .sum()
}

const CRITERION: Shape = Shape::TextOr(
    Text {
        least: 0,
        most: MAX_CONTEXT_TEXT_BYTES,
        form: Form::Free,
    },
    &CHECKED_CRITERION,
);

static CHECKED_CRITERION: ObjectShape = closed(
    "an acceptance criterion",
    &[
        required("text", &CONTEXT_TEXT, "The criterion in words."),
        required(
            "check",
            &Shape::Object(&RUN_COMMAND),
            "The command that checks it: met if it exits with 0.",
        ),
        optional("timeout_seconds", &SECONDS, "The deadline of the command."),
    ],
    None,
);

static SKILL: ObjectShape = closed(
    "a skill",
    &[
        required(
            "name",
            &text(1, MAX_SKILL_NAME_BYTES, Form::Line),
            "The skill's name.",
        ),
        required("content", &CONTEXT_TEXT, "What the skill says."),
    ],
    None,
);

pub(super) static STEP: ObjectShape = closed(
    "a step",
    &[
        required(
            "type",
            &Shape::Choice(&[
                "run_command",
                "write_file",
                "read_file",
                "apply_unified_diff",
                "list_tree",
            ]),
            "What the step does.",
        ),
        required(
            "args",
            &Shape::DependsOn {
                field: "type",
                variants: &[
                    ("run_command", &Shape::Object(&RUN_COMMAND)),
                    ("write_file", &Shape::Object(&WRITE_FILE)),
                    ("read_file", &Shape::Object(&READ_FILE)),
                    ("apply_unified_diff", &Shape::Object(&APPLY_UNIFIED_DIFF)),
                    ("list_tree", &Shape::Object(&LIST_TREE)),
                ],
            },
            "The arguments of this type of step.",
        ),
        optional(
            "id",
            &text(1, MAX_STEP_ID_BYTES, Form::Line),
            "The step's name in the result, unique in the job.",
        ),
        optional(
            "timeout_seconds",
            &SECONDS,
            "The deadline of the step; by default that of the job.",
        ),
        optional(
            "idempotent",
            &Shape::Boolean,
            "Whether the step may run again if it was interrupted; false by default.",
        ),
    ],
    None,
);

const PATH: Shape = text(1, file_limits::MAX_PATH_BYTES, Form::NoNul);
const CONTENT: Shape = text(0, MAX_JOB_BYTES, Form::Free);

static RUN_COMMAND: ObjectShape = closed(
    "run_command",
    &[
        required(
            "argv",
            &list(
                &text(0, exec_limits::MAX_ARGUMENT_LENGTH - 1, Form::NoNul),
                1,
                MAX_ARGUMENTS,
            ),
            "The program and its arguments; no shell interprets them.",
        ),
        optional(
            "cwd",
            &PATH,
            "The working directory, relative to the workspace, the default.",
        ),
        optional(
            "env",
            &Shape::Map {
                names: Text {
                    least: 1,
                    most: exec_limits::MAX_ARGUMENT_LENGTH - 2,
                    form: Form::VariableName,
                },
                values: &text(0, exec_limits::MAX_ARGUMENT_LENGTH - 2, Form::NoNul),
                most: exec_limits::MAX_ENV,
            },
            "Additional variables. Those that the node sets can't be overridden.",
        ),
        optional(
            "shell",
            &Shape::Boolean,
            "Run `/bin/sh -c` with the only text of argv.",
        ),
    ],
    Some(Rule {
        check: check_command,
        schema: Some(
            r#"{"if": {"properties": {"shell": {"const": true}}, "required": ["shell"]},
                "then": {"properties": {"argv": {"maxItems": 1}}}}"#,
        ),
    }),
);

fn check_command<'a>(members: &'a Members, validator: &mut Validator<'a>) {
    let argv: &[JsonValue] = match get(members, "argv") {
        Some(JsonValue::List(argv)) => argv,
        _ => &[],
    };
    let env: &[(String, JsonValue)] = match get(members, "env") {
        Some(JsonValue::Object(env)) => env,
        _ => &[],
    };
    if get(members, "shell") == Some(&JsonValue::Boolean(true)) && argv.len() > 1 {
        validator.at(Segment::Field("argv"), |argv| {
            argv.invalid(|| "with a shell, argv is one text: the script".to_owned());
        });
    }
    let length = |value: &JsonValue| match value {
        JsonValue::Text(text) => text.len(),
        _ => 0,
    };
    // Of `NAME=value`.
    let longest = exec_limits::MAX_ARGUMENT_LENGTH - 1;
    for (name, value) in env {
        if name.len() + 1 + length(value) > longest {
            validator.at(Segment::Field("env"), |env| {
                env.at(Segment::Field(name), |variable| {
                    variable.invalid(|| format!("NAME=value has more than {longest} bytes"));
                });
            });
        }
    }
    // As `execve` counts them: each text with its terminator and a pointer.
    let arguments = argv.iter().map(length);
    let variables = env
        .iter()
        .map(|(name, value)| name.len() + 1 + length(value));
    let bytes: usize = arguments
        .chain(variables)
        .map(|length| length + 1 + exec_limits::POINTER_BYTES)
        .sum();
    if bytes > exec_limits::MAX_ARGUMENT_BYTES {
        validator.invalid(|| {
            let most = exec_limits::MAX_ARGUMENT_BYTES;
            format!("argv and env take {bytes} bytes; at most {most}")
        });
    }
}

static WRITE_FILE: ObjectShape = closed(
    "write_file",
    &[
        required("path", &PATH, "Relative to the workspace."),
        optional("content", &CONTENT, "The content as text."),
        optional(
            "content_b64",
            &text(0, MAX_JOB_BYTES, Form::Base64),
            "The content in base64.",
        ),
        optional(
            "mode",
            &text(1, 4, Form::Mode),
            "Permission bits in octal, such as 0755; by default those of the file, or 0644.",
        ),
    ],
    Some(Rule {
        check: |members, validator| {
            let given = ["content", "content_b64"]
                .into_iter()
                .filter(|name| get(members, name).is_some());
            if given.count() != 1 {
                validator.invalid(|| "needs one of content and content_b64".to_owned());
            }
        },
        schema: Some(r#"{"oneOf": [{"required": ["content"]}, {"required": ["content_b64"]}]}"#),
    }),
);

static READ_FILE: ObjectShape = closed(
    "read_file",
    &[
        required("path", &PATH, "Relative to the workspace."),
        optional(
            "max_bytes",
            &Shape::Integer(1, MAX_OUTPUT_BYTES),
            "How much is returned; by default what is left of max_output_bytes.",
        ),
        optional(
            "start_line",
            &Shape::Integer(1, MAX_LINE),
            "The first line to return.",
        ),
        optional(
            "end_line",
            &Shape::Integer(1, MAX_LINE),
            "The last line to return.",
        ),
    ],
    Some(Rule {
        check: |members, validator| {
            let line = |name| match get(members, name) {
                Some(JsonValue::Number(number)) => number.as_i64(),
                _ => None,
            };
            if let (Some(start), Some(end)) = (line("start_line"), line("end_line"))
                && end < start
            {
                validator.at(Segment::Field("end_line"), |end_line| {
                    end_line.invalid(|| format!("{end} is before start_line {start}"));
                });
            }
        },
        schema: None,
    }),
);

static APPLY_UNIFIED_DIFF: ObjectShape = closed(
    "apply_unified_diff",
    &[required(
        "diff",
        &text(1, MAX_JOB_BYTES, Form::Free),
        "A unified diff relative to the workspace; applied whole or not at all.",
    )],
    None,
);

static LIST_TREE: ObjectShape = closed(
    "list_tree",
    &[
        optional("path", &PATH, "Relative to the workspace, the default."),
        optional(
            "max_depth",
            &Shape::Integer(1, MAX_TREE_DEPTH),
            "Levels below the path.",
        ),
        optional(
            "max_entries",
            &Shape::Integer(1, MAX_TREE_ENTRIES),
            "Entries to return.",
        ),
    ],
    None,
);
