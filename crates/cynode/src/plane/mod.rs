//! The commands that speak with the orchestrator, one file for each thing that it has.

pub mod artifact;
pub mod event;
pub mod image;
pub mod job;
pub mod node;
pub mod run;
pub mod setting;
pub mod task;
pub mod token;

mod follow;

use std::process::ExitCode;

use serde::Serialize;
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    cli::{Format, Globals},
    failure::{Failure, USAGE},
    output, sanitize,
};

pub type Outcome = Result<ExitCode, Failure>;

/// A list: as one JSON object, or as a table.
pub fn list<T: Serialize, const N: usize>(
    globals: &Globals,
    items: &[T],
    header: [&str; N],
    row: impl Fn(&T) -> [String; N],
) -> Outcome {
    match globals.output {
        Format::Json => output::json(&json!({ "items": items }))?,
        Format::Table => output::table(header, items.iter().map(row))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// One object: as JSON, or as lines of those fields that are not empty.
pub fn show(globals: &Globals, object: &impl Serialize, fields: &[(&str, String)]) -> Outcome {
    match globals.output {
        Format::Json => output::json(object)?,
        Format::Table => {
            for (name, value) in fields.iter().filter(|(_, value)| !value.is_empty()) {
                output::line(&format!("{name:<12}{}", sanitize::line(value)))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Something new: as JSON, or its id (or what else is worth keeping) on stdout and a word about it on stderr.
fn made(globals: &Globals, object: &impl Serialize, kept: &str, word: &str) -> Outcome {
    match globals.output {
        Format::Json => output::json(object)?,
        Format::Table => {
            output::line(kept)?;
            output::note(&sanitize::line(word));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Something that was done: as JSON, or a word on stderr.
pub fn done(globals: &Globals, object: &impl Serialize, word: &str) -> Outcome {
    match globals.output {
        Format::Json => output::json(object)?,
        Format::Table => output::note(&sanitize::line(word)),
    }
    Ok(ExitCode::SUCCESS)
}

pub fn moment(at: OffsetDateTime) -> String {
    at.format(&Rfc3339).unwrap_or_default()
}

fn age(at: OffsetDateTime) -> String {
    output::span((OffsetDateTime::now_utc() - at).whole_seconds())
}

/// A name as the API has it.
fn word(value: &impl Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

/// The seconds of a span that people gave.
fn seconds(span: Option<std::time::Duration>) -> Option<u64> {
    span.map(|span| span.as_secs().max(1))
}

/// What people write as a value: JSON, or else a text.
fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// A value for people: texts without quotes.
fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), ToOwned::to_owned)
}

pub fn none_such(what: &str, name: &str) -> Failure {
    Failure::new(USAGE, "not_found", format!("there is no {what} '{name}'"))
        .remedy(format!("See 'cynode {what} list'."))
}
