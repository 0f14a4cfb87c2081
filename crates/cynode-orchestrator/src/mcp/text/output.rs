//! The output of commands and jobs, as text.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use super::{CONTINUATION, add, cut_middle};
use crate::mcp::{
    plain,
    tools::{CODING_OUTPUT, MAX_READ},
    view::View,
};

/// The output of a command that its answer contains, unless the call says otherwise.
const DEFAULT_OUTPUT: u64 = 262_144;

/// A command or a job: its end, then its output.
pub(super) fn command(result: &Value, view: &View) -> String {
    let text = |name: &str| result.get(name).and_then(Value::as_str);
    let job = text("job_id")
        .map(|id| format!("job {id}: "))
        .unwrap_or_default();
    let error = result
        .get("error")
        .filter(|error| error.is_object())
        .map(|error| format!("\nerror: {error}"))
        .unwrap_or_default();
    let more = if job.is_empty() {
        String::new()
    } else {
        super::job::describe(result)
    };
    let header = job + &end_state(result) + &error + &more;
    let limit = if view.is_coding() {
        CODING_OUTPUT
    } else {
        DEFAULT_OUTPUT
    };
    let limit = view.number("max_output_bytes").unwrap_or(limit);
    // A job has other limits than a command, so its output shows no gap.
    let gap = text("exec_id")
        .and_then(|_| usize::try_from(limit.div_ceil(2)).ok())
        .unwrap_or(usize::MAX);
    let streams = ["stdout", "stderr"].map(|name| Stream::new(result, name, gap));
    let room = view.limit.saturating_sub(header.len() + CONTINUATION);
    let [stdout, stderr] = &streams;
    let each = [
        (room / 2).max(room.saturating_sub(stderr.text.len())),
        (room / 2).max(room.saturating_sub(stdout.text.len())),
    ];
    let mut shown = header;
    let mut is_cut = false;
    for (stream, room) in streams.iter().zip(each) {
        if stream.text.is_empty() {
            continue;
        }
        is_cut |= stream.is_cut || stream.text.len() > room;
        let text = cut_middle(&stream.text, room, "see below");
        add(&mut shown, format!("\n{}:\n{text}", stream.name));
    }
    if let (true, Some(id)) = (is_cut, text("exec_id")) {
        let bytes = streams.iter().map(|stream| stream.total).sum::<u64>();
        let call = view.call(
            view.output_tool(),
            &[],
            &[
                ("exec_id", json!(id)),
                ("after_seq", json!(0)),
                ("max_bytes", json!(bytes.clamp(1, MAX_READ))),
            ],
        );
        let end = if shown.ends_with('\n') { "" } else { "\n" };
        add(
            &mut shown,
            format!("{end}Output was left out. Read all: {call}"),
        );
    }
    shown
}

/// A command that goes on in the background.
pub(super) fn accepted(result: &Value, view: &View) -> String {
    let id = &result["exec_id"];
    let call = view.call(
        view.output_tool(),
        &[],
        &[
            ("exec_id", id.clone()),
            ("after_seq", json!(0)),
            ("wait_ms", json!(10_000)),
        ],
    );
    format!(
        "running in the background, exec_id {}. Read its output: {call}",
        id.as_str().unwrap_or_default()
    )
}

/// One stream of a command, as text.
struct Stream {
    name: &'static str,
    text: String,
    /// Something in the middle is missing.
    is_cut: bool,
    /// The bytes that the command wrote.
    total: u64,
}

impl Stream {
    /// `gap` is the length of the head of a stream whose middle is missing.
    fn new(result: &Value, name: &'static str, gap: usize) -> Self {
        let raw = result[name].as_str().unwrap_or_default();
        let bytes = if result["encoding"] == "base64" {
            STANDARD.decode(raw).unwrap_or_default()
        } else {
            raw.as_bytes().to_vec()
        };
        let total = result["bytes"][name].as_u64().unwrap_or(bytes.len() as u64);
        let is_cut = result["truncated"][name] == true;
        let (head, tail) = bytes.split_at(if is_cut {
            gap.min(bytes.len())
        } else {
            bytes.len()
        });
        let text = match (characters(head), characters(tail)) {
            (Some(head), Some(tail)) if is_cut && !tail.is_empty() => {
                let left = total.saturating_sub(bytes.len() as u64);
                format!(
                    "{}\n… {left} bytes left out …\n{}",
                    plain::text(head),
                    plain::text(tail)
                )
            }
            (Some(head), _) => plain::text(head),
            (None, _) => format!("(binary, {total} bytes)\n"),
        };
        Self {
            name,
            text,
            is_cut,
            total,
        }
    }
}

/// The text, without characters that are split at either end; none if it is binary.
fn characters(bytes: &[u8]) -> Option<&str> {
    let is_inside = |byte: &u8| byte & 0xc0 == 0x80;
    let begin = bytes
        .iter()
        .take(3)
        .take_while(|byte| is_inside(byte))
        .count();
    let text = match std::str::from_utf8(&bytes[begin..]) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&bytes[begin..begin + error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    (!text.contains('\0')).then_some(text)
}

/// A page of output: what it contains, and how to read on.
pub(super) fn page(result: &Value, view: &View) -> String {
    let empty = Vec::new();
    let chunks = result["chunks"].as_array().unwrap_or(&empty);
    let bytes_of = |chunk: &Value| match (&chunk["data"], &chunk["data_b64"]) {
        (Value::String(text), _) => text.clone().into_bytes(),
        (_, Value::String(text)) => STANDARD.decode(text).unwrap_or_default(),
        _ => Vec::new(),
    };
    let mut next = result["next_seq"].as_u64().unwrap_or_default();
    let room = view.limit.saturating_sub(CONTINUATION);
    let mut bytes = Vec::new();
    let mut is_whole = true;
    let mut shown = String::new();
    if let Some(lost) = result["lost_before_seq"].as_u64() {
        add(
            &mut shown,
            format!("(output before seq {lost} is no longer kept)\n"),
        );
    }
    let is_tail = view.number("tail_bytes").is_some();
    for chunk in chunks {
        let more = bytes_of(chunk);
        if !is_tail && !bytes.is_empty() && bytes.len() + more.len() > room {
            is_whole = false;
            break;
        }
        next = chunk["seq"].as_u64().unwrap_or(next);
        bytes.extend(more);
    }
    let is_cut = bytes.len() > room;
    match characters(&bytes) {
        Some(text) if is_tail => {
            let text = plain::text(text);
            let begin = text.ceil_char_boundary(text.len().saturating_sub(room));
            shown.push_str(&text[begin..]);
        }
        Some(text) => shown.push_str(&cut_middle(&plain::text(text), room, "see below")),
        None => add(&mut shown, format!("(binary, {} bytes)", bytes.len())),
    }
    if !shown.is_empty() && !shown.ends_with('\n') {
        shown.push('\n');
    }
    if is_cut && !is_tail {
        let call = view.call(
            view.output_tool(),
            &["exec_id", "after_seq"],
            &[("max_bytes", json!((bytes.len() as u64).min(MAX_READ)))],
        );
        add(
            &mut shown,
            format!("Output was left out. Read all: {call}\n"),
        );
    }
    match result.get("exit").filter(|exit| exit.is_object()) {
        Some(exit) if is_whole => shown.push_str(&end_state(exit)),
        exit => {
            let mut more = vec![("after_seq", json!(next))];
            // What has not ended may still write.
            if exit.is_none() && is_whole {
                more.push(("wait_ms", json!(10_000)));
            }
            let call = view.call(view.output_tool(), &["exec_id"], &more);
            let state = if chunks.is_empty() {
                "No new output. "
            } else {
                ""
            };
            add(&mut shown, format!("{state}Read on: {call}"));
        }
    }
    shown
}

fn end_state(result: &Value) -> String {
    let state = if let Some(code) = result["exit_code"].as_i64() {
        format!("exit code {code}")
    } else if let Some(signal) = result["signal"].as_str() {
        format!("ended by signal {signal}")
    } else {
        match result["state"].as_str() {
            Some(state) => state.to_owned(),
            None => "ended".to_owned(),
        }
    };
    let mut notes = Vec::new();
    for (name, note) in [
        ("timed_out", "timed out"),
        ("oom_killed", "out of memory"),
        ("lost", "its exit was not observed"),
    ] {
        if result[name] == Value::Bool(true) {
            notes.push(note);
        }
    }
    if result["truncated"]["stdout"] == Value::Bool(true)
        || result["truncated"]["stderr"] == Value::Bool(true)
    {
        notes.push("output truncated");
    }
    if notes.is_empty() {
        state
    } else {
        format!("{state} ({})", notes.join(", "))
    }
}
