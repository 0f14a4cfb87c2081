//! The text content of a result: the part that a model needs to read, bounded in size.

use serde_json::Value;

pub(crate) const MAX_TEXT: usize = 8 * 1024;

/// Renders a result. A text that is too long is cut in the middle, with a note.
pub(crate) fn render(result: &Value) -> String {
    truncate(&summarize(result))
}

fn summarize(result: &Value) -> String {
    let text = |name: &str| result.get(name).and_then(Value::as_str);
    // A command or a job: its end, then its output.
    if let (Some(stdout), Some(stderr)) = (text("stdout"), text("stderr"))
        && result.get("exit_code").is_some()
    {
        let job = text("job_id")
            .map(|id| format!("job {id}: "))
            .unwrap_or_default();
        let error = result
            .get("error")
            .filter(|error| error.is_object())
            .map(|error| format!("\nerror: {error}"))
            .unwrap_or_default();
        let note = if text("encoding") == Some("base64") {
            " (base64)"
        } else {
            ""
        };
        let streams = [("stdout", stdout), ("stderr", stderr)]
            .into_iter()
            .filter(|(_, stream)| !stream.is_empty());
        let streams =
            streams.map(|(name, stream)| format!("\n{name}{note}:\n{}", truncate(stream)));
        return std::iter::once(job + &end_state(result) + &error)
            .chain(streams)
            .collect();
    }
    if let Some(content) = text("content")
        .or_else(|| text("content_b64"))
        .or_else(|| text("text"))
    {
        return truncate(content);
    }
    let mut writer = BoundedWriter(Vec::new());
    // The writer fails when it is full.
    let is_complete = serde_json::to_writer(&mut writer, result).is_ok();
    let mut text = String::from_utf8_lossy(&writer.0).into_owned();
    if !is_complete {
        text.truncate(text.floor_char_boundary(MAX_TEXT - TRUNCATED.len()));
        text.push_str(TRUNCATED);
    }
    text
}

const TRUNCATED: &str = "\n… truncated; structuredContent has the rest";

/// Keeps the first [`MAX_TEXT`] bytes.
struct BoundedWriter(Vec<u8>);

impl std::io::Write for BoundedWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_TEXT {
            self.0.extend_from_slice(&bytes[..MAX_TEXT - self.0.len()]);
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
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

fn truncate(text: &str) -> String {
    if text.len() <= MAX_TEXT {
        return text.to_owned();
    }
    let note =
        |left: usize| format!("\n… {left} bytes omitted here; structuredContent has them …\n");
    let half = (MAX_TEXT - note(usize::MAX).len()) / 2;
    let begin = &text[..text.floor_char_boundary(half)];
    let end = &text[text.ceil_char_boundary(text.len() - half)..];
    format!("{begin}{}{end}", note(text.len() - begin.len() - end.len()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_command_is_rendered_as_its_end_and_its_output() {
        let result = json!({
            "exit_code": 3, "signal": null, "stdout": "out\n", "stderr": "", "encoding": "utf-8",
            "truncated": {"stdout": true}, "timed_out": true,
        });
        assert_eq!(
            render(&result),
            "exit code 3 (timed out, output truncated)\nstdout:\nout\n"
        );
        assert_eq!(
            render(&json!({"exit_code": null, "signal": "KILL", "stdout": "", "stderr": ""})),
            "ended by signal KILL"
        );
        assert_eq!(render(&json!({"content": "fn main() {}"})), "fn main() {}");
        assert_eq!(render(&json!({"items": []})), "{\"items\":[]}");
        let job = json!({
            "job_id": "1", "state": "failed", "exit_code": null, "signal": null,
            "stdout": "", "stderr": "", "error": {"code": "node_lost"},
        });
        assert_eq!(
            render(&job),
            "job 1: failed\nerror: {\"code\":\"node_lost\"}"
        );
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        for letter in ["a", "ü", "€", "🦀"] {
            for extra in 0..4 {
                let long =
                    render(&json!({"content": "x".repeat(extra) + &letter.repeat(MAX_TEXT + 1)}));
                assert!(
                    long.len() <= MAX_TEXT && long.contains("omitted here"),
                    "{letter} {}",
                    long.len()
                );
            }
        }
        assert_eq!(
            render(&json!({"content": "a".repeat(MAX_TEXT)})).len(),
            MAX_TEXT
        );
        for letter in ["a", "ü"] {
            let long = render(&json!({"items": [letter.repeat(MAX_TEXT)]}));
            assert!(
                long.len() <= MAX_TEXT && long.ends_with(TRUNCATED),
                "{}",
                long.len()
            );
        }
    }
}
