//! Reads the usage from an answer while it passes through.
//!
//! The scanner sees every byte and keeps none: its state takes a few hundred bytes, whatever the
//! answer contains. The reader of `cynode_api::document` would need the whole answer in memory,
//! and the embeddings of one request can take a hundred megabytes.
//!
//! Invariant: the result does not depend on how the bytes are split.

mod json;
mod stream;

use crate::{
    limits::{MAX_DOCUMENT_BYTES, MAX_LINE_BYTES},
    usage::Usage,
};
use json::{Found, JsonScanner};
use stream::{EventScanner, LineScanner};

/// How an answer is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// One JSON document.
    Json,
    /// A JSON document on each line, the last one with `"done": true`: a stream of Ollama.
    Lines,
    /// Server-sent events, the last one `[DONE]`: a stream of OpenAI's API.
    Events,
}

impl AnswerFormat {
    /// The format that a server names. Errors are JSON even where a stream was asked for.
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

/// What an answer said about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerScan {
    /// As the server counted last; unknown if it did not, or in a part that was not read. Of an
    /// answer that has not ended it is a lower bound.
    pub usage: Option<Usage>,
    /// The answer has its proper end, with nothing after it and no error before it.
    pub has_ended: bool,
    /// The server reported an error inside the answer.
    pub has_error: bool,
    /// A line, event or document was too long to be read.
    pub is_overlong: bool,
    /// A part of the answer is not JSON, or nested too deeply.
    pub is_malformed: bool,
    /// Ollama said that another host computed the answer.
    pub is_external: bool,
}

impl AnswerScan {
    fn add(&mut self, found: &Found) {
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

    /// The next bytes of the answer.
    pub fn push(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            Framing::Json(scanner) => scanner.push_all(bytes),
            Framing::Lines(scanner) => bytes.iter().for_each(|byte| scanner.push(*byte)),
            Framing::Events(scanner) => bytes.iter().for_each(|byte| scanner.push(*byte)),
        }
    }

    /// What is known after the last byte.
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
