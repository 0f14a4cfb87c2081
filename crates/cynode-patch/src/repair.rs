//! Reads diffs whose hunk headers are wrong, as language models write them.
//!
//! A hunk whose counts do not match its lines ends where the next hunk or file begins, or with the
//! text, and a hunk without line numbers must fit exactly one place of its file. Nothing else is
//! repaired, and every repair is reported.
//!
//! Invariant: a repair never drops a changed line. Where a hunk's end is a guess, the diff is
//! refused.

use std::fmt;

use crate::{
    escaped,
    hunk::{Hunk, Place, Side, ranges, read_hunk},
    lines::{Error, Lines, error, is_no_newline_marker, is_plain_header, trim},
    parse::{Patch, Reader, Section},
};

/// Repairs of one diff.
const MAX_REPAIRS: usize = 1_000;
/// The part of a path that a repair repeats.
const PATH_BYTES: usize = 200;

/// A hunk that was read in another way than it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// Escaped, and truncated if it is long.
    pub path: String,
    /// From 1.
    pub hunk: u32,
    /// A sentence without its full stop.
    pub what: String,
}

impl fmt::Display for Repair {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, hunk, what } = self;
        write!(formatter, "{path}, hunk {hunk}: {what}")
    }
}

impl<'a> Patch<'a> {
    /// Parses a diff and repairs its hunk headers. A diff without mistakes is read as by
    /// [`Patch::parse`].
    pub fn parse_lenient(diff: &'a [u8], strip: u32) -> Result<(Self, Vec<Repair>), Error> {
        let mut reader = Reader::Repairing(Repairs::default());
        let patch = Self::read(Lines::new(diff), strip, &mut reader)?;
        match reader {
            Reader::Repairing(repairs) => Ok((patch, repairs.finish()?)),
            Reader::Strict | Reader::Wire => Ok((patch, Vec::new())),
        }
    }

    /// Parses a text in any format that callers may write: the one that begins with
    /// `*** Begin Patch`, or else a diff, which is repaired.
    pub fn parse_any(text: &'a [u8], strip: u32) -> Result<(Self, Vec<Repair>), Error> {
        if crate::begin_patch::is_begin_patch(text) {
            return Ok((Self::parse_begin_patch(text)?, Vec::new()));
        }
        Self::parse_lenient(text, strip)
    }
}

/// Repairs of a diff that is being read.
#[derive(Default)]
pub(crate) struct Repairs {
    list: Vec<Repair>,
    /// The number of repairs that have their path.
    named: usize,
    /// A line in a counted hunk that could also begin a file.
    header_in_hunk: Option<usize>,
}

const AMBIGUOUS: &str = "the lines '---' and '+++' are either a file header or lines of the hunk; \
                         correct the counts in the hunk headers";

impl Repairs {
    pub(crate) fn read_hunk<'a>(
        &mut self,
        lines: &mut Lines<'a>,
        number: u32,
    ) -> Result<Hunk<'a>, Error> {
        let header = lines.peek().unwrap_or_default();
        let Some(((line, old), (_, new))) = ranges(header) else {
            if !is_unnumbered(header) {
                return read_hunk(lines);
            }
            lines.next();
            let place = Place::Unique {
                after: Vec::new(),
                at_end: false,
            };
            let hunk = Hunk::new(place, uncounted_body(lines)?);
            self.add(lines.number, number, "without line numbers".to_owned())?;
            return Ok(hunk);
        };
        let mut counted = *lines;
        if let Ok(hunk) = read_hunk(&mut counted)
            && !more_follows(counted)
        {
            self.look_for_header(*lines, hunk.body);
            *lines = counted;
            return Ok(hunk);
        }
        lines.next();
        let hunk = Hunk::new(Place::Line(line), uncounted_body(lines)?);
        let new_count = hunk
            .lines(false)
            .filter(|line| line.side != Side::Old)
            .count();
        let what = format!(
            "its header says -{old} +{new} lines, but it has -{} +{new_count}",
            hunk.old_count
        );
        self.add(lines.number, number, what)?;
        Ok(hunk)
    }

    fn add(&mut self, line: usize, hunk: u32, what: String) -> Result<(), Error> {
        self.list.push(Repair {
            path: String::new(),
            hunk,
            what,
        });
        if self.list.len() > MAX_REPAIRS {
            return error(
                line,
                "more than 1,000 hunk headers are wrong; write the diff anew",
            );
        }
        Ok(())
    }

    /// Notes a line in a hunk that could also be a file header.
    fn look_for_header(&mut self, header: Lines<'_>, body: &[u8]) {
        let mut lines = Lines {
            rest: body,
            number: header.number + 1,
        };
        while lines.peek().is_some() && self.header_in_hunk.is_none() {
            if is_plain_header(lines) {
                self.header_in_hunk = Some(lines.number + 1);
            }
            lines.next();
        }
    }

    /// Gives the new repairs the path of their section.
    pub(crate) fn end_section(&mut self, section: &Section<'_>) {
        let new = &mut self.list[self.named..];
        if new.is_empty() {
            return;
        }
        let path = section.new.as_ref().or(section.old.as_ref());
        let path = path.map_or(&[][..], Vec::as_slice);
        let mut text = escaped(&path[..path.len().min(PATH_BYTES)]);
        if path.len() > PATH_BYTES {
            text.push('…');
        }
        for repair in new {
            repair.path.clone_from(&text);
        }
        self.named = self.list.len();
    }

    fn finish(self) -> Result<Vec<Repair>, Error> {
        match self.header_in_hunk {
            Some(line) if !self.list.is_empty() => error(line, AMBIGUOUS),
            _ => Ok(self.list),
        }
    }
}

/// Whether the header is `@@`, `@@ @@` or `@@ ... @@`, with any text after it.
fn is_unnumbered(header: &[u8]) -> bool {
    let Some(text) = trim(header).strip_prefix(b"@@") else {
        return false;
    };
    let end = text.windows(2).position(|pair| pair == b"@@");
    let middle = &text[..end.unwrap_or(text.len())];
    let middle = middle.trim_ascii();
    middle.is_empty() || (end.is_some() && [b"...", "…".as_bytes()].contains(&middle))
}

/// Whether changed lines or context follow a counted hunk after empty lines.
fn more_follows(mut lines: Lines<'_>) -> bool {
    while lines.peek().is_some_and(|line| trim(line).is_empty()) {
        lines.next();
    }
    is_hunk_line(lines)
}

/// Whether the next line can only belong to a hunk.
fn is_hunk_line(lines: Lines<'_>) -> bool {
    match lines.peek() {
        Some([b'+' | b' ', ..]) => true,
        Some(line @ [b'-', ..]) => {
            !is_plain_header(lines) && !matches!(trim(line), b"-- " | b"--" | b"---")
        }
        _ => false,
    }
}

/// The lines up to the next hunk, the next file, or text that is none of a diff. Empty lines at the
/// end separate the hunk from what follows: context that is missing never moves a change.
fn uncounted_body<'a>(lines: &mut Lines<'a>) -> Result<&'a [u8], Error> {
    let (number, body) = (lines.number, lines.rest);
    let (mut length, mut before_last) = (0, 0);
    let mut after_marker = true;
    while let Some(line) = lines.peek() {
        if line.starts_with(b"@@") || line.starts_with(b"diff --git ") {
            break;
        }
        if is_plain_header(*lines) {
            let mut ahead = *lines;
            ahead.next();
            ahead.next();
            if ahead.peek().is_some_and(|line| line.starts_with(b"@@")) {
                break;
            }
            return error(lines.number + 1, AMBIGUOUS);
        }
        let is_marker = is_no_newline_marker(line) && !after_marker;
        if !is_marker && !matches!(line, [b'+' | b'-' | b' ', ..] | b"\n" | b"\r\n") {
            check_text(*lines)?;
            // A mail's signature.
            if trim(&body[before_last..length]) == b"-- " {
                length = before_last;
            }
            break;
        }
        lines.next();
        after_marker = is_marker;
        if !trim(line).is_empty() {
            before_last = body.len() - lines.rest.len() - line.len();
            length = before_last + line.len();
        }
    }
    if length == 0 {
        return error(number, "the hunk is empty");
    }
    Ok(&body[..length])
}

/// Refuses text that is followed by lines of a hunk, which would be lost.
fn check_text(mut lines: Lines<'_>) -> Result<(), Error> {
    let number = lines.number + 1;
    while let Some(line) = lines.peek() {
        if line.starts_with(b"diff --git ") || is_plain_header(lines) {
            break;
        }
        if line.starts_with(b"@@") || is_hunk_line(lines) {
            return error(
                number,
                "the line is no part of a hunk, but one continues after it; a context line starts \
                 with a space",
            );
        }
        lines.next();
    }
    Ok(())
}

#[cfg(test)]
mod tests;
