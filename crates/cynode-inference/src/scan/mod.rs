//! Reads the token usage from an answer while the answer is forwarded.
//!
//! The scanner buffers nothing: its state takes a few hundred bytes for any answer. The reader of
//! `cynode_api::document` would need the whole answer in memory, and the embeddings of one request
//! can take a hundred megabytes.
//!
//! Invariant: the result does not depend on how the answer is split into pieces.

mod json;
mod stream;

use crate::{
    limits::{MAX_DOCUMENT_BYTES, MAX_LINE_BYTES},
    usage::Usage,
};
use json::{JsonScanner, ScannedFields};
use stream::{EventScanner, LineScanner};

/// How an answer is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// One JSON document.
    Json,
    /// A stream of Ollama: one JSON document per line, the last with `"done": true`.
    Lines,
    /// A stream of OpenAI's API: server-sent events, the last one `[DONE]`.
    Events,
}

impl AnswerFormat {
    /// The format by the response's content type: an error is JSON even if a stream was requested.
    #[must_use]
    pub fn of_content_type(content_type: &str) -> Option<Self> {
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        [
            ("application/json", Self::Json),
            ("application/x-ndjson", Self::Lines),
            ("text/event-stream", Self::Events),
        ]
        .into_iter()
        .find(|(name, _)| essence.eq_ignore_ascii_case(name))
        .map(|(_, format)| format)
    }
}

/// The findings of the scan of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerScan {
    /// The last counts of the server; `None` if there were none or if a part was too long to be
    /// read. A lower bound unless `has_ended` is set.
    pub usage: Option<Usage>,
    /// The answer ended as its format requires, without an error.
    pub has_ended: bool,
    /// The server reported an error inside the answer.
    pub has_error: bool,
    /// A line, event or document was too long to be read.
    pub is_overlong: bool,
    /// A part of the answer is not JSON, or nested too deeply.
    pub is_malformed: bool,
    /// Ollama reported that another host computed the answer.
    pub is_external: bool,
}

impl AnswerScan {
    fn add(&mut self, found: &ScannedFields) {
        self.has_error |= found.has_error;
        self.is_external |= found.is_external();
        if let Some(usage) = found.usage() {
            self.usage = Some(usage);
        }
    }
}

/// Scans one answer.
#[derive(Debug)]
pub struct AnswerScanner(Framing);

#[derive(Debug)]
enum Framing {
    Json(JsonScanner),
    Lines(LineScanner),
    Events(EventScanner),
}

impl AnswerScanner {
    #[must_use]
    pub fn new(format: AnswerFormat) -> Self {
        Self(match format {
            AnswerFormat::Json => Framing::Json(JsonScanner::new(MAX_DOCUMENT_BYTES)),
            AnswerFormat::Lines => Framing::Lines(LineScanner::new(MAX_LINE_BYTES)),
            AnswerFormat::Events => Framing::Events(EventScanner::new(MAX_LINE_BYTES)),
        })
    }

    /// Scans the next bytes of the answer.
    pub fn push(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            Framing::Json(scanner) => scanner.push_all(bytes),
            Framing::Lines(scanner) => bytes.iter().for_each(|byte| scanner.push(*byte)),
            Framing::Events(scanner) => bytes.iter().for_each(|byte| scanner.push(*byte)),
        }
    }

    /// Ends the answer and returns the findings.
    #[must_use]
    pub fn finish(self) -> AnswerScan {
        let mut scan = match self.0 {
            Framing::Json(mut scanner) => {
                let mut scan = AnswerScan::default();
                scan.has_ended = scanner.end(&mut scan).is_some();
                scan
            }
            Framing::Lines(scanner) => scanner.finish(),
            Framing::Events(scanner) => scanner.finish(),
        };
        scan.has_ended &= !scan.has_error;
        if scan.is_overlong {
            scan.usage = None;
        }
        scan
    }
}

#[cfg(test)]
mod tests;
