//! Streams of JSON documents: lines, and server-sent events.

use super::{AnswerScan, json::JsonScanner};

/// Scans a stream with one JSON document on each line.
#[derive(Debug)]
pub(super) struct LineScanner {
    json: JsonScanner,
    scan: AnswerScan,
}

impl LineScanner {
    pub(super) const fn new(max_document_bytes: u64) -> Self {
        Self {
            json: JsonScanner::new(max_document_bytes),
            scan: EMPTY,
        }
    }

    pub(super) fn push(&mut self, byte: u8) {
        if byte == b'\n' {
            self.end_line();
        } else {
            self.json.push(byte);
        }
    }

    fn end_line(&mut self) {
        if self.json.is_blank() {
            self.json.reset();
            return;
        }
        let found = self.json.end(&mut self.scan);
        self.scan.has_ended = found.is_some_and(|found| found.is_done);
    }

    pub(super) fn finish(mut self) -> AnswerScan {
        self.end_line();
        self.scan
    }
}

/// The position within a line of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinePart {
    /// In the name of the field. All bytes so far match `data`; the value counts them.
    FieldName(usize),
    /// Directly after the colon of `data:`, where one space is skipped.
    ValueStart,
    Value,
    /// In a comment, or in another field.
    Ignored,
}

const DATA: &[u8] = b"data";
const DONE: &[u8] = b"[DONE]";

/// Scans server-sent events. An empty line ends an event; its `data` is the JSON document.
#[derive(Debug)]
pub(super) struct EventScanner {
    part: LinePart,
    /// The last byte was a carriage return, so a line feed now belongs to the same line end.
    is_after_return: bool,
    has_data: bool,
    /// The number of bytes of the data so far if they match `[DONE]`; `None` if they don't.
    done: Option<usize>,
    json: JsonScanner,
    scan: AnswerScan,
}

impl EventScanner {
    pub(super) const fn new(max_document_bytes: u64) -> Self {
        Self {
            part: LinePart::FieldName(0),
            is_after_return: false,
            has_data: false,
            done: Some(0),
            json: JsonScanner::new(max_document_bytes),
            scan: EMPTY,
        }
    }

    pub(super) fn push(&mut self, byte: u8) {
        let is_after_return = std::mem::replace(&mut self.is_after_return, byte == b'\r');
        match byte {
            b'\n' if is_after_return => {}
            b'\n' | b'\r' => self.end_line(),
            _ => self.part = self.advance(byte),
        }
    }

    fn advance(&mut self, byte: u8) -> LinePart {
        match self.part {
            LinePart::FieldName(count) if count == DATA.len() && byte == b':' => {
                self.begin_data();
                LinePart::ValueStart
            }
            LinePart::FieldName(count) if DATA.get(count) == Some(&byte) => {
                LinePart::FieldName(count + 1)
            }
            LinePart::ValueStart if byte == b' ' => LinePart::Value,
            LinePart::ValueStart | LinePart::Value => {
                self.data(byte);
                LinePart::Value
            }
            LinePart::FieldName(_) | LinePart::Ignored => LinePart::Ignored,
        }
    }

    /// Starts a `data` line. Several lines of one event are joined by line feeds.
    fn begin_data(&mut self) {
        if self.has_data {
            self.data(b'\n');
        }
        self.has_data = true;
    }

    fn data(&mut self, byte: u8) {
        self.done = match self.done {
            Some(count) if DONE.get(count) == Some(&byte) => Some(count + 1),
            _ => None,
        };
        self.json.push(byte);
    }

    fn end_line(&mut self) {
        match std::mem::replace(&mut self.part, LinePart::FieldName(0)) {
            LinePart::FieldName(0) => self.end_event(),
            // By the standard, a field without a colon has an empty value.
            LinePart::FieldName(count) if count == DATA.len() => self.begin_data(),
            _ => {}
        }
    }

    fn end_event(&mut self) {
        let is_done = self.done.replace(0) == Some(DONE.len());
        if !std::mem::take(&mut self.has_data) {
            return;
        }
        if is_done {
            self.json.reset();
            self.scan.has_ended = true;
        } else if self.json.is_blank() {
            self.json.reset();
        } else {
            self.json.end(&mut self.scan);
            self.scan.has_ended = false;
        }
    }

    /// Ends the stream. The last event may lack its empty line: some servers end with `data: [DONE]`.
    pub(super) fn finish(mut self) -> AnswerScan {
        self.end_line();
        self.end_event();
        self.scan
    }
}

const EMPTY: AnswerScan = AnswerScan {
    usage: None,
    has_ended: false,
    has_error: false,
    is_overlong: false,
    is_malformed: false,
    is_external: false,
};
