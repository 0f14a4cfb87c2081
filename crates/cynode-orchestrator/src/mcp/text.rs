//! The text content of a result: the part that a model needs to read, bounded in size and free of
//! terminal control. Where something is left out, the text names the call that reads it.

mod bound;
mod job;
mod output;

use cynode_api::file_limits::{DEFAULT_ENTRIES, MAX_ENTRIES};
use serde_json::{Map, Value, json};

use super::{plain, run::ToolOutput, tools::MAX_READ, view::View};
use crate::shorten;

/// Room for the calls that read on.
const CONTINUATION: usize = 640;
/// Repaired hunks that a text names.
const SHOWN_REPAIRS: usize = 20;

/// Renders a result.
pub(crate) fn render(output: &ToolOutput, view: &View) -> String {
    let text = summarize(&output.value, view);
    let text = match &output.note {
        Some(note) => format!("{note}\n{text}"),
        None => text,
    };
    cut_middle(&text, view.limit, place_of_rest(view))
}

/// Where the rest of a text is that was cut.
const fn place_of_rest(view: &View) -> &'static str {
    if view.is_coding() {
        "ask for less at once"
    } else {
        "structuredContent has them"
    }
}

/// Renders a failure, with what each rejected hunk expected and found.
pub(crate) fn failure(failure: &Value, view: &View) -> String {
    let text = |name: &str| failure[name].as_str().unwrap_or_default();
    let mut shown = format!(
        "{} ({}): {}\n{}",
        text("code"),
        text("stage"),
        plain::name(text("message")),
        plain::name(text("remedy"))
    );
    shown.push_str(&repairs(failure));
    let rejects = failure["rejects"].as_array();
    for (number, reject) in rejects.into_iter().flatten().enumerate() {
        let reject = plain::text(&rejected(reject));
        if shown.len() + reject.len() + CONTINUATION > view.limit && number > 0 {
            let left = rejects.map_or(0, Vec::len) - number;
            add(&mut shown, format!("\n… and {left} more rejects"));
            break;
        }
        shown.push_str(&reject);
    }
    cut_middle(&plain::text(&shown), view.limit, place_of_rest(view))
}

/// The hunks of a patch that were read in another way than they are written, one in a line.
fn repairs(result: &Value) -> String {
    let mut shown = String::new();
    let repaired = result["repaired"].as_array();
    for repair in repaired.into_iter().flatten().take(SHOWN_REPAIRS) {
        let text = |name: &str| repair[name].as_str().unwrap_or_default();
        add(
            &mut shown,
            format!(
                "\nrepaired {}, hunk {}: {}",
                plain::name(text("path")),
                repair["hunk"],
                plain::name(text("what"))
            ),
        );
    }
    let count = repaired.map_or(0, Vec::len);
    if count > SHOWN_REPAIRS {
        add(
            &mut shown,
            format!("\nrepaired {} more", count - SHOWN_REPAIRS),
        );
    }
    shown
}

fn rejected(reject: &Value) -> String {
    let text = |name: &str| plain::name(reject[name].as_str().unwrap_or_default());
    let mut shown = format!("\n{}", text("path"));
    if let Some(hunk) = reject["hunk"].as_u64() {
        add(&mut shown, format!(", hunk {hunk}"));
    }
    if let Some(line) = reject["line"].as_u64() {
        add(&mut shown, format!(", line {line}"));
    }
    add(&mut shown, format!(": {}", text("reason")));
    for name in ["expected", "found"] {
        if let Some(lines) = reject[name].as_array().filter(|lines| !lines.is_empty()) {
            add(&mut shown, format!("\n  {name}:"));
            for line in lines.iter().filter_map(Value::as_str) {
                add(&mut shown, format!("\n    {}", plain::line(line)));
            }
        }
    }
    shown
}

fn summarize(result: &Value, view: &View) -> String {
    let is = |name: &str| result.get(name).is_some();
    let list = |name: &str| result.get(name).is_some_and(Value::is_array);
    if is("stdout") && is("stderr") && is("exit_code") {
        output::command(result, view)
    } else if list("chunks") && is("next_seq") {
        output::page(result, view)
    } else if let Some(content) = result.get("content").and_then(Value::as_str) {
        file(content, result, view)
    } else if is("content_b64") {
        binary_file(result)
    } else if let Some(text) = result.get("text").and_then(Value::as_str) {
        plain::text(text)
    } else if list("entries") && is("truncated") {
        listing(result, view)
    } else if list("matches") && is("files_searched") {
        found(result, view)
    } else if list("files") && view.tool == "sandbox.workspace.apply_patch" {
        patched(result)
    } else if is("exec_id") && view.tool == "sandbox.session.exec" {
        output::accepted(result, view)
    } else if is("session_id") && is("workspace_id") && view.is_coding() {
        session(result)
    } else {
        json_text(result, view)
    }
}

fn binary_file(result: &Value) -> String {
    let sha256 = result["sha256"].as_str().unwrap_or("unknown");
    let size = result["size"].as_u64().unwrap_or_default();
    let member = if result.get("content_b64").is_some() {
        "content_b64"
    } else {
        "content"
    };
    format!("(binary, {size} bytes, sha256 {sha256}; the bytes are in {member})")
}

/// Whole lines of a file, and the call that reads the next ones.
fn file(content: &str, result: &Value, view: &View) -> String {
    if content.is_empty() {
        return "(empty)".to_owned();
    }
    if content.contains('\0') {
        return binary_file(result);
    }
    let room = view.limit.saturating_sub(CONTINUATION);
    let is_short = result["truncated"] == true;
    if !is_short && content.len() <= view.limit {
        return plain::text(content);
    }
    let part = &content[..content.floor_char_boundary(room.min(content.len()))];
    let size = result["size"].as_u64().unwrap_or(content.len() as u64);
    let start = view.number("start_line").unwrap_or(1);
    let whole = part.rfind('\n').map(|end| &part[..=end]);
    let reads_lines = view.tool == "sandbox.workspace.read_file";
    let (shown, call) = match whole {
        Some(lines) if reads_lines => {
            let next = start + lines.matches('\n').count() as u64;
            let call = view.call(
                view.tool,
                &["path", "end_line", "max_bytes"],
                &[("start_line", json!(next))],
            );
            (lines, call)
        }
        // One long line, or a tool that reads from the beginning.
        _ => {
            let call = view.call(
                view.tool,
                &["path", "id", "start_line", "end_line"],
                &[("max_bytes", json!(size.clamp(1, MAX_READ)))],
            );
            (part, call)
        }
    };
    let end = if shown.ends_with('\n') { "" } else { "\n" };
    format!(
        "{}{end}… {size} bytes in all. Read on: {call}",
        plain::text(shown)
    )
}

fn listing(result: &Value, view: &View) -> String {
    let entries = result["entries"].as_array();
    let line = |entry: &Value| {
        let name = |member: &str| plain::name(entry[member].as_str().unwrap_or_default());
        let path = name("path");
        match entry["type"].as_str() {
            Some("dir") => format!("{path}/\n"),
            Some("symlink") => format!("{path} -> {}\n", name("target")),
            _ => format!("{path} {}\n", entry["size"]),
        }
    };
    let (more, narrower) = (
        More {
            wish: "max_entries",
            repeated: &["path", "depth"],
        },
        "List a directory below.",
    );
    lines_of(entries, line, result, view, "(no files)", |total| {
        more.told(result, view, total, narrower)
    })
}

/// How a list that was cut is continued. Both lists have the same limits.
struct More {
    /// The argument that asks for more.
    wish: &'static str,
    repeated: &'static [&'static str],
}

impl More {
    /// Names the call that lists more, or advises to ask for less. `total` is the number of items in
    /// the result.
    fn told(&self, result: &Value, view: &View, total: usize, narrower: &str) -> String {
        let is_cut = result["truncated"] == true;
        if !is_cut && !view.is_coding() {
            return format!("There are more; structuredContent has all {total}.");
        }
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        let asked = view
            .number(self.wish)
            .map(|asked| u32::try_from(asked).unwrap_or(u32::MAX));
        let next = if is_cut {
            asked.unwrap_or(DEFAULT_ENTRIES).saturating_mul(4)
        } else {
            total
        };
        let next = next.min(MAX_ENTRIES);
        if asked.is_some_and(|asked| next <= asked) {
            return format!("There are more. {narrower}");
        }
        let call = view.call(view.tool, self.repeated, &[(self.wish, json!(next))]);
        format!("There are more. {narrower} Or list more: {call}")
    }
}

fn found(result: &Value, view: &View) -> String {
    let line = |entry: &Value| {
        let path = plain::name(entry["path"].as_str().unwrap_or_default());
        let number = entry["line"].as_u64().unwrap_or_default();
        let context = |name: &str, first: u64| {
            let lines = entry[name].as_array().into_iter().flatten();
            let lines: Vec<String> = lines
                .filter_map(Value::as_str)
                .zip(first..)
                .map(|(text, number)| format!("{path}-{number}- {}\n", plain::line(text)))
                .collect();
            lines.concat()
        };
        let before = entry["before"].as_array().map_or(0, Vec::len) as u64;
        format!(
            "{}{path}:{number}: {}\n{}",
            context("before", number.saturating_sub(before)),
            plain::line(entry["text"].as_str().unwrap_or_default()),
            context("after", number + 1)
        )
    };
    let none = format!("no matches in {} files", result["files_searched"]);
    let matches = result["matches"].as_array();
    let more = More {
        wish: "max_results",
        repeated: &["pattern", "glob", "context_lines"],
    };
    lines_of(matches, line, result, view, &none, |total| {
        more.told(result, view, total, "Narrow the pattern or the glob.")
    })
}

/// One line for each item, as many as fit.
fn lines_of(
    items: Option<&Vec<Value>>,
    line: impl Fn(&Value) -> String,
    result: &Value,
    view: &View,
    none: &str,
    more: impl Fn(usize) -> String,
) -> String {
    let mut shown = String::new();
    let mut is_cut = result["truncated"] == true;
    for item in items.into_iter().flatten() {
        let line = plain::text(&line(item));
        if shown.len() + line.len() + CONTINUATION > view.limit {
            is_cut = true;
            break;
        }
        shown.push_str(&line);
    }
    match (shown.is_empty(), is_cut) {
        (true, false) => none.to_owned(),
        (_, true) => shown + &more(items.map_or(0, Vec::len)),
        (false, false) => shown,
    }
}

fn patched(result: &Value) -> String {
    let mut shown = String::new();
    for file in result["files"].as_array().into_iter().flatten() {
        let text = |name: &str| file[name].as_str().unwrap_or_default();
        add(
            &mut shown,
            format!("{} {}\n", text("operation"), plain::name(text("path"))),
        );
    }
    let rest: Map<String, Value> = result
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(name, _)| !matches!(name.as_str(), "files" | "repaired"))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    for repair in repairs(result).lines().filter(|line| !line.is_empty()) {
        add(&mut shown, format!("{repair}\n"));
    }
    if !rest.is_empty() {
        shown.push_str(&Value::Object(rest).to_string());
    }
    plain::text(&shown)
}

fn session(result: &Value) -> String {
    let text = |name: &str| result[name].as_str().unwrap_or("unknown");
    format!(
        "session {}: {}; image {}, workspace {}",
        text("session_id"),
        text("state"),
        text("image_ref"),
        text("workspace_id")
    )
}

fn json_text(result: &Value, view: &View) -> String {
    let mut writer = BoundedWriter(Vec::new(), view.limit);
    // The writer fails when it is full.
    let is_complete = serde_json::to_writer(&mut writer, result).is_ok();
    let mut text = String::from_utf8_lossy(&writer.0).into_owned();
    if !is_complete {
        text.truncate(text.floor_char_boundary(view.limit - TRUNCATED.len()));
        text.push_str(TRUNCATED);
    }
    plain::json(text)
}

const TRUNCATED: &str = "\n… truncated; structuredContent has the rest";

/// Keeps the first bytes, up to a limit.
struct BoundedWriter(Vec<u8>, usize);

impl std::io::Write for BoundedWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let Self(written, limit) = self;
        if written.len() + bytes.len() > *limit {
            let room = *limit - written.len();
            written.extend_from_slice(&bytes[..room]);
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        written.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn add(shown: &mut String, part: impl AsRef<str>) {
    shown.push_str(part.as_ref());
}

/// Cuts the middle of a text that is too long, and says where the rest is.
fn cut_middle(text: &str, limit: usize, place: &str) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let note = |left: usize| format!("\n… {left} bytes omitted here; {place} …\n");
    let half = limit.saturating_sub(note(usize::MAX).len()) / 2;
    let begin = &text[..text.floor_char_boundary(half)];
    let end = &text[text.ceil_char_boundary(text.len() - half)..];
    format!("{begin}{}{end}", note(text.len() - begin.len() - end.len()))
}

/// Shortens the lists and texts of a structured result to the size of the text, unless the call asks
/// for more.
pub(crate) fn bound(result: &mut Value, view: &View) {
    if view.has_own_limit {
        return;
    }
    if shorten::json_size(result) > view.limit {
        bound::shorten(result, view.limit);
    }
}

#[cfg(test)]
mod tests;
