//! The transcript of an agent's work: JSON lines.
//!
//! Invariant: it is kept in memory until nothing runs in the sandbox any more, because every
//! command can write where it is left.

use serde_json::Value;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

const MAX_TRANSCRIPT_BYTES: usize = 8 * 1024 * 1024;
/// Kept free for how the job ended.
const END_BYTES: usize = 16 * 1024;

#[derive(Debug, Default)]
pub(crate) struct Transcript {
    lines: Vec<u8>,
    is_full: bool,
}

impl Transcript {
    /// Adds a line, an object, with its time.
    pub(super) fn add(&mut self, entry: Value) {
        self.push(entry, MAX_TRANSCRIPT_BYTES - END_BYTES);
    }

    /// Adds the last line.
    pub(super) fn end(&mut self, mut entry: Value) {
        if self.is_full {
            entry["truncated"] = true.into();
        }
        self.is_full = false;
        self.push(entry, MAX_TRANSCRIPT_BYTES);
    }

    fn push(&mut self, mut entry: Value, limit: usize) {
        if let Ok(at) = OffsetDateTime::now_utc().format(&Rfc3339) {
            entry["at"] = at.into();
        }
        let line = entry.to_string();
        if self.is_full || self.lines.len() + line.len() + 1 > limit {
            self.is_full = true;
        } else {
            self.lines.extend_from_slice(line.as_bytes());
            self.lines.push(b'\n');
        }
    }

    pub(crate) fn lines(&self) -> &[u8] {
        &self.lines
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_full_transcript_still_says_how_the_job_ended() {
        let mut transcript = Transcript::default();
        for _ in 0..9 {
            transcript.add(json!({"type": "answer", "text": "x".repeat(1024 * 1024)}));
        }
        transcript.add(json!({"type": "answer"}));
        transcript.end(json!({"type": "end"}));
        let text = std::str::from_utf8(transcript.lines()).expect("text");
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(lines.len(), 8);
        assert_eq!(
            (&lines[7]["type"], &lines[7]["truncated"]),
            (&json!("end"), &json!(true))
        );
        assert!(lines[0]["at"].is_string() && text.len() <= MAX_TRANSCRIPT_BYTES);
    }
}
