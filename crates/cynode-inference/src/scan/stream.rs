//! Streams of JSON documents: lines, and server-sent events.

use super::{AnswerScan, json::JsonScanner};

/// A document on each line.
#[derive(Debug)]
pub(super) struct LineScanner {
    json: JsonScanner,
    scan: AnswerScan,
}

impl LineScanner {
    pub(super) const fn new(longest: u64) -> Self {
        Self {
            json: JsonScanner::new(longest),
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

/// The part of a line that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinePart {
    /// So many bytes of the line are those of `data:`.
    Field(usize),
    /// After the colon.
    FirstOfValue,
    Value,
    /// A comment, or a field without a document.
    Ignored,
}

const DATA: &[u8] = b"data";
const DONE: &[u8] = b"[DONE]";

/// An event ends at an empty line. The documents are its `data`.
#[derive(Debug)]
pub(super) struct EventScanner {
    part: LinePart,
    /// Whether the last byte was a carriage return, which a line feed may follow.
    is_after_return: bool,
    has_data: bool,
    /// So many bytes of the data are those of `[DONE]`; nothing if another byte came.
    done: Option<usize>,
    json: JsonScanner,
    scan: AnswerScan,
}

impl EventScanner {
    pub(super) const fn new(longest: u64) -> Self {
        Self {
            part: LinePart::Field(0),
            is_after_return: false,
            has_data: false,
            done: Some(0),
            json: JsonScanner::new(longest),
            scan: EMPTY,
        }
    }

    pub(super) fn push(&mut self, byte: u8) {
        let is_after_return = std::mem::replace(&mut self.is_after_return, byte == b'\r');
        match byte {
            b'\n' if is_after_return => {}
            b'\n' | b'\r' => self.end_line(),
            _ => self.part = self.next(byte),
        }
    }

    fn next(&mut self, byte: u8) -> LinePart {
        match self.part {
            LinePart::Field(count) if count == DATA.len() && byte == b':' => {
                self.begin_data();
                LinePart::FirstOfValue
            }
            LinePart::Field(count) if DATA.get(count) == Some(&byte) => LinePart::Field(count + 1),
            LinePart::FirstOfValue if byte == b' ' => LinePart::Value,
            LinePart::FirstOfValue | LinePart::Value => {
                self.data(byte);
                LinePart::Value
            }
            LinePart::Field(_) | LinePart::Ignored => LinePart::Ignored,
        }
    }

    /// Lines with data are joined by line feeds.
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
        match std::mem::replace(&mut self.part, LinePart::Field(0)) {
            LinePart::Field(0) => self.end_event(),
            // A field without a colon has an empty value.
            LinePart::Field(count) if count == DATA.len() => self.begin_data(),
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

    /// The last event may lack its empty line: some servers end with `data: [DONE]`.
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
