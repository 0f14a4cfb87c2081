//! What a model reads of a result: the words that matter, and never more than a page.

use serde_json::Value;

/// The longest text.
pub(crate) const MAX_TEXT: usize = 8 * 1024;

/// Made from a result; what is too long is cut in its middle, which is said.
pub(crate) fn of(result: &Value) -> String {
    cut(&told(result))
}

fn told(result: &Value) -> String {
    let text = |name: &str| result.get(name).and_then(Value::as_str);
    // A command or a job: how it ended, then what it wrote.
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
        let streams = streams.map(|(name, stream)| format!("\n{name}{note}:\n{}", cut(stream)));
        return std::iter::once(job + &ended(result) + &error)
            .chain(streams)
            .collect();
    }
    if let Some(content) = text("content")
        .or_else(|| text("content_b64"))
        .or_else(|| text("text"))
    {
        return cut(content);
    }
    let mut written = Beginning(Vec::new());
    // An error says that there was more than a beginning.
    let is_whole = serde_json::to_writer(&mut written, result).is_ok();
    let mut told = String::from_utf8_lossy(&written.0).into_owned();
    if !is_whole {
        told.truncate(told.floor_char_boundary(MAX_TEXT - MORE.len()));
        told.push_str(MORE);
    }
    told
}

const MORE: &str = "\n… there is more; structuredContent has it";

/// Takes what fits into a text, and no more.
struct Beginning(Vec<u8>);

impl std::io::Write for Beginning {
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

fn ended(result: &Value) -> String {
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
        ("lost", "its end was not seen"),
    ] {
        if result[name] == Value::Bool(true) {
            notes.push(note);
        }
    }
    if result["truncated"]["stdout"] == Value::Bool(true)
        || result["truncated"]["stderr"] == Value::Bool(true)
    {
        notes.push("output cut");
    }
    if notes.is_empty() {
        state
    } else {
        format!("{state} ({})", notes.join(", "))
    }
}

fn cut(text: &str) -> String {
    if text.len() <= MAX_TEXT {
        return text.to_owned();
    }
    let note =
        |left: usize| format!("\n… {left} bytes are left out here; structuredContent has them …\n");
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
    fn a_command_is_told_by_its_end_and_its_output() {
        let result = json!({"exit_code": 3, "signal": null, "stdout": "out\n", "stderr": "", "encoding": "utf-8", "truncated": {"stdout": true}, "timed_out": true});
        assert_eq!(
            of(&result),
            "exit code 3 (timed out, output cut)\nstdout:\nout\n"
        );
        assert_eq!(
            of(&json!({"exit_code": null, "signal": "KILL", "stdout": "", "stderr": ""})),
            "ended by signal KILL"
        );
        assert_eq!(of(&json!({"content": "fn main() {}"})), "fn main() {}");
        assert_eq!(of(&json!({"items": []})), "{\"items\":[]}");
        let job = json!({"job_id": "1", "state": "failed", "exit_code": null, "signal": null, "stdout": "", "stderr": "", "error": {"code": "node_lost"}});
        assert_eq!(of(&job), "job 1: failed\nerror: {\"code\":\"node_lost\"}");
    }

    #[test]
    fn no_text_is_longer_than_a_page_and_letters_stay_whole() {
        for letter in ["a", "ü", "€", "🦀"] {
            for extra in 0..4 {
                let long =
                    of(&json!({"content": "x".repeat(extra) + &letter.repeat(MAX_TEXT + 1)}));
                assert!(
                    long.len() <= MAX_TEXT && long.contains("left out here"),
                    "{letter} {}",
                    long.len()
                );
            }
        }
        assert_eq!(
            of(&json!({"content": "a".repeat(MAX_TEXT)})).len(),
            MAX_TEXT
        );
        for letter in ["a", "ü"] {
            let long = of(&json!({"items": [letter.repeat(MAX_TEXT)]}));
            assert!(
                long.len() <= MAX_TEXT && long.ends_with(MORE),
                "{}",
                long.len()
            );
        }
    }
}
