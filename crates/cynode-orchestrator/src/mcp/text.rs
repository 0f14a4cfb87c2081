//! The text content of a result: the part that a model needs to read, bounded in size and free of
//! terminal control. Where something is left out, the text names the call that reads it.

mod output;

use serde_json::{Map, Value, json};

use super::{plain, run::ToolOutput, tools::MAX_READ, view::View};

/// Room for the calls that read on.
const CONTINUATION: usize = 640;
/// Lists in a result that are shortened to fit.
const LISTS: [&str; 6] = ["entries", "matches", "files", "rejects", "flagged", "items"];

/// Renders a result.
pub(crate) fn render(output: &ToolOutput, view: &View) -> String {
    let text = summarize(&output.value, view);
    let text = match &output.note {
        Some(note) => format!("{note}\n{text}"),
        None => text,
    };
    cut_middle(&text, view.limit, "structuredContent has them")
}

/// Renders a failure, with what each rejected hunk expected and found.
pub(crate) fn failure(failure: &Value, view: &View) -> String {
    let text = |name: &str| failure[name].as_str().unwrap_or_default();
    let mut shown = format!(
        "{} ({}): {}\n{}",
        text("code"),
        text("stage"),
        text("message"),
        text("remedy")
    );
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
    cut_middle(
        &plain::text(&shown),
        view.limit,
        "structuredContent has them",
    )
}

fn rejected(reject: &Value) -> String {
    let mut shown = format!("\n{}", reject["path"].as_str().unwrap_or_default());
    if let Some(hunk) = reject["hunk"].as_u64() {
        add(&mut shown, format!(", hunk {hunk}"));
    }
    if let Some(line) = reject["line"].as_u64() {
        add(&mut shown, format!(", line {line}"));
    }
    add(
        &mut shown,
        format!(": {}", reject["reason"].as_str().unwrap_or_default()),
    );
    for name in ["expected", "found"] {
        if let Some(lines) = reject[name].as_array().filter(|lines| !lines.is_empty()) {
            add(&mut shown, format!("\n  {name}:"));
            for line in lines.iter().filter_map(Value::as_str) {
                add(&mut shown, format!("\n    {}", line.trim_end_matches('\n')));
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
    } else if is("session_id") && is("workspace_id") && view.is_coding() {
        session(result)
    } else {
        json_text(result, view)
    }
}

fn binary_file(result: &Value) -> String {
    let sha256 = result["sha256"].as_str().unwrap_or("unknown");
    let size = result["size"].as_u64().unwrap_or_default();
    format!("(binary, {size} bytes, sha256 {sha256}; the bytes are in content_b64)")
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
        let path = entry["path"].as_str().unwrap_or_default();
        match entry["type"].as_str() {
            Some("dir") => format!("{path}/\n"),
            Some("symlink") => format!(
                "{path} -> {}\n",
                entry["target"].as_str().unwrap_or_default()
            ),
            _ => format!("{path} {}\n", entry["size"]),
        }
    };
    lines_of(entries, line, result, view, "(no files)", || {
        "There are more. List a directory below, or pass max_entries.".to_owned()
    })
}

fn found(result: &Value, view: &View) -> String {
    let line = |entry: &Value| {
        let path = entry["path"].as_str().unwrap_or_default();
        let number = entry["line"].as_u64().unwrap_or_default();
        let context = |name: &str, first: u64| {
            let lines = entry[name].as_array().into_iter().flatten();
            let lines: Vec<String> = lines
                .filter_map(Value::as_str)
                .zip(first..)
                .map(|(text, number)| format!("{path}-{number}- {text}\n"))
                .collect();
            lines.concat()
        };
        let before = entry["before"].as_array().map_or(0, Vec::len) as u64;
        format!(
            "{}{path}:{number}: {}\n{}",
            context("before", number.saturating_sub(before)),
            entry["text"].as_str().unwrap_or_default(),
            context("after", number + 1)
        )
    };
    let none = format!("no matches in {} files", result["files_searched"]);
    lines_of(
        result["matches"].as_array(),
        line,
        result,
        view,
        &none,
        || "There are more. Narrow the pattern or the glob, or pass max_results.".to_owned(),
    )
}

/// One line for each item, as many as fit.
fn lines_of(
    items: Option<&Vec<Value>>,
    line: impl Fn(&Value) -> String,
    result: &Value,
    view: &View,
    none: &str,
    more: impl Fn() -> String,
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
        (_, true) => shown + &more(),
        (false, false) => shown,
    }
}

fn patched(result: &Value) -> String {
    let mut shown = String::new();
    for file in result["files"].as_array().into_iter().flatten() {
        let text = |name: &str| file[name].as_str().unwrap_or_default();
        add(
            &mut shown,
            format!("{} {}\n", text("operation"), text("path")),
        );
    }
    let rest: Map<String, Value> = result
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(name, _)| *name != "files")
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
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
    text
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

/// Shortens the lists of a structured result to the size of the text, unless the call asks for
/// more.
pub(crate) fn bound(result: &mut Value, view: &View) {
    if view.asks_for_more {
        return;
    }
    let size = |value: &Value| serde_json::to_string(value).map_or(0, |text| text.len());
    let mut total = size(result);
    if total <= view.limit {
        return;
    }
    bound_output(result, view);
    for name in LISTS {
        let Some(items) = result.get_mut(name).and_then(Value::as_array_mut) else {
            continue;
        };
        let before = items.len();
        while total > view.limit
            && let Some(item) = items.pop()
        {
            total = total.saturating_sub(size(&item) + 1);
        }
        if items.len() < before {
            result["truncated"] = json!(true);
        }
    }
}

/// Shortens a page of output to whole chunks; only the first may be cut. The page then ends at the
/// last one.
fn bound_output(result: &mut Value, view: &View) {
    let Some(chunks) = result.get_mut("chunks").and_then(Value::as_array_mut) else {
        return;
    };
    let room = view.limit.saturating_sub(CONTINUATION);
    let (mut bytes, before) = (0, chunks.len());
    let fits = chunks
        .iter()
        .take_while(|chunk| {
            bytes += ["data", "data_b64"]
                .iter()
                .filter_map(|name| chunk[*name].as_str())
                .map(str::len)
                .sum::<usize>();
            bytes <= room
        })
        .count();
    chunks.truncate(fits.max(1));
    if fits == 0
        && let Some(chunk) = chunks.first_mut().and_then(Value::as_object_mut)
    {
        for name in ["data", "data_b64"] {
            if let Some(Value::String(data)) = chunk.get_mut(name) {
                // Base64 comes in groups of four.
                data.truncate(data.floor_char_boundary(room / 4 * 4));
            }
        }
        chunk.insert("truncated".to_owned(), json!(true));
    }
    let last = chunks.last().map(|chunk| chunk["seq"].clone());
    if chunks.len() < before
        && let (Some(last), Some(page)) = (last, result.as_object_mut())
    {
        page.insert("next_seq".to_owned(), last);
        page.remove("exit");
    }
}

#[cfg(test)]
mod tests;
