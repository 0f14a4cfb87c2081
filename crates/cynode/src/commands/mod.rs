//! The commands that call the orchestrator, one file for each kind of object.

pub mod artifact;
pub mod credential;
pub mod event;
pub mod group;
pub mod image;
pub mod job;
pub mod node;
pub mod project;
pub mod promote;
pub mod promotion;
pub mod repository;
pub mod run;
pub mod setting;
pub mod task;
pub mod token;
pub mod user;

mod follow;
mod image_check;
mod job_file;
mod progress;
mod promotion_view;
mod run_and_get;
mod timeline;

use std::process::ExitCode;

use cynode_client::{ListItem, UserClient};
use serde::Serialize;
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

pub use crate::output::short_id;
use crate::{
    cli::{Globals, ListArgs, OutputFormat},
    failure::{Failure, USAGE},
    output::{self, TableStyle},
    sanitize,
};

/// The result of a command: its exit code, or a failure to report.
pub type CommandResult = Result<ExitCode, Failure>;

/// Prints a list: as one JSON object, or as a table.
pub fn print_list<T: Serialize, const N: usize>(
    globals: &Globals,
    style: TableStyle,
    items: &[T],
    header: [&str; N],
    row: impl Fn(&T) -> [String; N],
) -> CommandResult {
    match globals.output {
        OutputFormat::Json => output::json(&json!({ "items": items }))?,
        OutputFormat::Table => output::table(style, header, items.iter().map(row))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The newest items of a list that the query selects and `keep` accepts.
pub async fn newest<T: ListItem>(
    client: &UserClient,
    args: ListArgs,
    query: Vec<(&'static str, String)>,
    keep: impl Fn(&T) -> bool,
) -> Result<Vec<T>, Failure> {
    let listing = client.newest(query, args.limit, keep).await?;
    note_more(args, listing.has_more);
    Ok(listing.items)
}

/// Says that a list is longer than what is printed.
pub fn note_more(args: ListArgs, has_more: bool) {
    if has_more {
        output::message(&format!(
            "cynode: printed the newest {}; see --limit",
            args.limit
        ));
    }
}

/// Prints an object: as JSON, or as lines of its non-empty fields.
pub fn print_object(
    globals: &Globals,
    object: &impl Serialize,
    fields: &[(&str, String)],
) -> CommandResult {
    match globals.output {
        OutputFormat::Json => output::json(object)?,
        OutputFormat::Table => {
            for (name, value) in fields.iter().filter(|(_, value)| !value.is_empty()) {
                output::line(&format!("{name:<12}{}", sanitize::line(value)))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a new object: as JSON, or its id (or secret) to stdout and a note to stderr.
fn print_created(
    globals: &Globals,
    object: &impl Serialize,
    id: &str,
    note: &str,
) -> CommandResult {
    match globals.output {
        OutputFormat::Json => output::json(object)?,
        OutputFormat::Table => {
            output::line(id)?;
            output::message(&sanitize::line(note));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the result of a change: as JSON, or a note to stderr.
pub fn print_done(globals: &Globals, object: &impl Serialize, note: &str) -> CommandResult {
    match globals.output {
        OutputFormat::Json => output::json(object)?,
        OutputFormat::Table => output::message(&sanitize::line(note)),
    }
    Ok(ExitCode::SUCCESS)
}

pub fn format_time(at: OffsetDateTime) -> String {
    at.format(&Rfc3339).unwrap_or_default()
}

fn age(at: OffsetDateTime) -> String {
    output::span((OffsetDateTime::now_utc() - at).whole_seconds())
}

/// The API's name of an enum value.
fn api_name(value: &impl Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

/// Whole seconds of a duration, at least one.
fn seconds(span: Option<std::time::Duration>) -> Option<u64> {
    span.map(|span| span.as_secs().max(1))
}

/// Parses a value: as JSON, or else as plain text.
fn parse_value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// Formats a value, strings without quotes.
fn format_value(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), ToOwned::to_owned)
}

pub fn not_found(kind: &str, name: &str) -> Failure {
    Failure::new(USAGE, "not_found", format!("there is no {kind} '{name}'"))
        .remedy(format!("See 'cynode {kind} list'."))
}
