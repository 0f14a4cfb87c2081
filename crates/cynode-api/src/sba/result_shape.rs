//! The shape of a result.

use super::{
    document::JsonValue,
    limits::{
        MAX_ARTIFACTS, MAX_CONTEXT_ITEMS, MAX_FAILURE_CODE_BYTES, MAX_MESSAGE_BYTES,
        MAX_MODEL_BYTES, MAX_RESULT_BYTES, MAX_STEP_ID_BYTES, MAX_STEPS,
    },
    shape::{Form, ObjectShape, Rule, Shape, list, open, optional, required, text},
    validate::get,
    violation::Segment,
};
use crate::file_limits;

const COUNT: Shape = Shape::Integer(0, i64::MAX);
const MESSAGE: Shape = text(0, MAX_MESSAGE_BYTES, Form::Free);
const STREAM: Shape = Shape::Nullable(&text(0, MAX_RESULT_BYTES, Form::Free));
const TIME: Shape = Shape::Nullable(&text(1, 64, Form::Time));

pub(super) static RESULT: ObjectShape = open(
    "a result",
    &[
        required("protocol_version", &text(1, 16, Form::Version), ""),
        required("job_id", &Shape::Nullable(&text(36, 36, Form::Uuid)), ""),
        required(
            "status",
            &Shape::Choice(&["success", "failure", "timeout"]),
            "",
        ),
        required("steps", &list(&Shape::Object(&STEP), 0, MAX_STEPS), ""),
        required(
            "artifacts",
            &list(&Shape::Object(&ARTIFACT), 0, MAX_ARTIFACTS),
            "",
        ),
        required(
            "failure_code",
            &Shape::Nullable(&text(1, MAX_FAILURE_CODE_BYTES, Form::FailureCode)),
            "",
        ),
        required("failure_message", &Shape::Nullable(&MESSAGE), ""),
        optional(
            "criteria",
            &list(&Shape::Object(&CRITERION), 0, MAX_CONTEXT_ITEMS),
            "",
        ),
        optional("todo", &Shape::Nullable(&Shape::Object(&TODO)), ""),
        optional("usage", &Shape::Nullable(&Shape::Object(&USAGE)), ""),
    ],
    Some(RESULT_RULE),
);

/// A failure says why, and a success has nothing to say.
const RESULT_RULE: Rule = Rule {
    check: |members, validator| {
        let Some(JsonValue::Text(status)) = get(members, "status") else {
            return;
        };
        for name in ["failure_code", "failure_message"] {
            let is_null = matches!(get(members, name), Some(JsonValue::Null));
            let fault = match (status.as_str(), is_null) {
                ("success", false) if name == "failure_code" => "must be null: the job succeeded",
                ("failure" | "timeout", true) => "must say why the job failed",
                _ => continue,
            };
            validator.at(Segment::Field(name), |field| {
                field.invalid(|| fault.to_owned());
            });
        }
    },
    schema: None,
};

pub(super) static STEP: ObjectShape = open(
    "the result of a step",
    &[
        required("index", &COUNT, ""),
        optional(
            "id",
            &Shape::Nullable(&text(1, MAX_STEP_ID_BYTES, Form::Line)),
            "",
        ),
        required("type", &text(1, 64, Form::Line), ""),
        required(
            "status",
            &Shape::Choice(&["success", "failure", "timeout", "interrupted"]),
            "",
        ),
        optional(
            "exit_code",
            &Shape::Nullable(&Shape::Integer(i32::MIN as i64, i32::MAX as i64)),
            "",
        ),
        optional("stdout", &STREAM, ""),
        optional("stderr", &STREAM, ""),
        optional("encoding", &Shape::Choice(&["utf-8", "base64"]), ""),
        optional("output", &Shape::Any, ""),
        optional("error", &Shape::Nullable(&MESSAGE), ""),
        optional("truncated", &Shape::Boolean, ""),
        optional("started_at", &TIME, ""),
        optional("ended_at", &TIME, ""),
    ],
    None,
);

static ARTIFACT: ObjectShape = open(
    "an artifact",
    &[
        required(
            "path",
            &text(1, file_limits::MAX_PATH_BYTES, Form::NoNul),
            "",
        ),
        optional("size", &Shape::Nullable(&COUNT), ""),
        optional(
            "sha256",
            &Shape::Nullable(&text(64, 64, Form::Hexadecimal)),
            "",
        ),
    ],
    None,
);

static CRITERION: ObjectShape = open(
    "a checked criterion",
    &[
        required("index", &COUNT, ""),
        required("is_met", &Shape::Boolean, ""),
        required("verified_by", &Shape::Choice(&["job", "model"]), ""),
        optional("detail", &Shape::Nullable(&MESSAGE), ""),
    ],
    None,
);

static TODO: ObjectShape = open(
    "a summary of the todo list",
    &[
        required("total", &COUNT, ""),
        required("done", &COUNT, ""),
        required("open", &list(&MESSAGE, 0, MAX_CONTEXT_ITEMS), ""),
    ],
    None,
);

static USAGE: ObjectShape = open(
    "the use of models",
    &[
        required("model", &text(1, MAX_MODEL_BYTES, Form::Line), ""),
        required("requests", &COUNT, ""),
        required("prompt_tokens", &COUNT, ""),
        required("completion_tokens", &COUNT, ""),
        required("duration_ms", &COUNT, ""),
    ],
    None,
);
