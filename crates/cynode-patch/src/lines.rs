//! The lines of a text, and errors that name them.

use std::fmt;

/// The reason why a text is not a valid diff.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(pub(crate) String);

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

pub(crate) fn error<T>(line: usize, problem: &str) -> Result<T, Error> {
    Err(Error(format!("line {line}: {problem}")))
}

#[derive(Clone, Copy)]
pub(crate) struct Lines<'a> {
    pub(crate) rest: &'a [u8],
    /// The number of the last line returned.
    pub(crate) number: usize,
}

impl<'a> Lines<'a> {
    pub(crate) fn new(text: &'a [u8]) -> Self {
        Self {
            rest: text,
            number: 0,
        }
    }

    pub(crate) fn peek(&self) -> Option<&'a [u8]> {
        if self.rest.is_empty() {
            return None;
        }
        let end = self
            .rest
            .iter()
            .position(|byte| *byte == b'\n')
            .map_or(self.rest.len(), |newline| newline + 1);
        Some(&self.rest[..end])
    }

    pub(crate) fn next(&mut self) -> Option<&'a [u8]> {
        let line = self.peek()?;
        self.rest = &self.rest[line.len()..];
        self.number += 1;
        Some(line)
    }
}

pub(crate) fn is_plain_header(mut lines: Lines<'_>) -> bool {
    lines.next().is_some_and(|line| line.starts_with(b"--- "))
        && lines.peek().is_some_and(|line| line.starts_with(b"+++ "))
}

pub(crate) fn is_no_newline_marker(line: &[u8]) -> bool {
    line.starts_with(b"\\ ")
}

pub(crate) fn trim(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}
