//! Hunks: their lines, and how a diff spells them.

use crate::lines::{Error, Lines, error, is_no_newline_marker, is_plain_header, trim};

/// Changed lines of a file, with context.
#[derive(Clone, Debug, Eq)]
pub struct Hunk<'a> {
    pub place: Place,
    /// The number of lines that the hunk expects in the old file.
    pub old_count: usize,
    /// Each line has a prefix for its side, except for empty context lines.
    pub(crate) body: &'a [u8],
}

impl PartialEq for Hunk<'_> {
    fn eq(&self, other: &Self) -> bool {
        // The last line of a text may lack its newline.
        (&self.place, self.old_count) == (&other.place, other.old_count)
            && self.lines(false).eq(other.lines(false))
    }
}

/// Where a hunk applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// At this line of the old file, from 1, or as near to it as the hunk's lines are. A hunk
    /// without old lines applies after the line.
    Line(usize),
    /// At the only place that has the hunk's lines.
    Unique {
        /// The place follows these lines, which follow each other. Each of them is unique after the
        /// one before.
        after: Vec<Vec<u8>>,
        /// The hunk's lines are the last of the file.
        at_end: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Both,
    Old,
    New,
}

/// A line of a hunk, without its prefix and its newline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    pub side: Side,
    pub text: &'a [u8],
    /// Whether the line ends in a newline; only the last line of a file may not.
    pub newline: bool,
}

impl<'a> Hunk<'a> {
    /// A hunk with these lines, which must all have a prefix or be empty.
    pub(crate) fn new(place: Place, body: &'a [u8]) -> Self {
        let mut hunk = Self {
            place,
            old_count: 0,
            body,
        };
        hunk.old_count = hunk
            .lines(false)
            .filter(|line| line.side != Side::New)
            .count();
        hunk
    }

    /// With `strip_cr`, a carriage return before the newline belongs to the diff, not to the line.
    pub fn lines(&self, strip_cr: bool) -> impl Iterator<Item = Line<'a>> + use<'a> {
        let mut lines = Lines::new(self.body);
        std::iter::from_fn(move || {
            let line = lines.next()?;
            let (side, text) = match line.first() {
                Some(b'-') => (Side::Old, &line[1..]),
                Some(b'+') => (Side::New, &line[1..]),
                Some(b' ') => (Side::Both, &line[1..]),
                // An empty context line that lost its leading space.
                _ => (Side::Both, line),
            };
            let newline = !lines.peek().is_some_and(is_no_newline_marker);
            if !newline {
                lines.next();
            }
            let text = text.strip_suffix(b"\n").unwrap_or(text);
            let text = if strip_cr {
                text.strip_suffix(b"\r").unwrap_or(text)
            } else {
                text
            };
            Some(Line {
                side,
                text,
                newline,
            })
        })
    }
}

pub(crate) fn read_hunk<'a>(lines: &mut Lines<'a>) -> Result<Hunk<'a>, Error> {
    let number = lines.number + 1;
    let header = lines.next().unwrap_or_default();
    let Some(((old_start, old_count), (_, new_count))) = ranges(header) else {
        return error(
            number,
            "the hunk header is invalid; it looks like '@@ -1,2 +1,3 @@'",
        );
    };
    read_counted(lines, Place::Line(old_start), old_count, new_count)
}

/// Reads the lines after a hunk header.
pub(crate) fn read_counted<'a>(
    lines: &mut Lines<'a>,
    place: Place,
    old_count: usize,
    new_count: usize,
) -> Result<Hunk<'a>, Error> {
    let number = lines.number;
    let (mut old_left, mut new_left) = (old_count, new_count);
    if old_left == 0 && new_left == 0 {
        return error(number, "the hunk is empty");
    }
    let body = lines.rest;
    let wrong_count = |at: usize, problem: &str| {
        error(
            at,
            &format!(
                "{problem} than the hunk header in line {number} says (-{old_count} +{new_count} \
                 lines)"
            ),
        )
    };
    while old_left > 0 || new_left > 0 {
        let at = lines.number + 1;
        let Some(line) = lines.next() else {
            return wrong_count(at, "the diff ends with fewer lines");
        };
        let (old, new) = match line {
            [b'-', ..] => (1, 0),
            [b'+', ..] => (0, 1),
            [b' ', ..] | b"\n" | b"\r\n" => (1, 1),
            _ => return wrong_count(at, "the hunk has fewer lines"),
        };
        if old > old_left || new > new_left {
            return wrong_count(at, "the hunk has other lines");
        }
        old_left -= old;
        new_left -= new;
        if lines.peek().is_some_and(is_no_newline_marker) {
            lines.next();
        }
    }
    let body = &body[..body.len() - lines.rest.len()];
    if let Some(next) = lines.peek() {
        let stray = match next {
            [b'+' | b' ', ..] => true,
            [b'-', ..] => {
                !is_plain_header(*lines) && !matches!(trim(next), b"-- " | b"--" | b"---")
            }
            _ => false,
        };
        if stray {
            return wrong_count(lines.number + 1, "the hunk has more lines");
        }
    }
    Ok(Hunk {
        place,
        old_count,
        body,
    })
}

type Range = (usize, usize);

pub(crate) fn ranges(header: &[u8]) -> Option<(Range, Range)> {
    let text = header.strip_prefix(b"@@ -")?;
    let end = text.windows(3).position(|window| window == b" @@")?;
    let text = std::str::from_utf8(&text[..end]).ok()?;
    let (old, new) = text.split_once(" +")?;
    let range = |text: &str| match text.split_once(',') {
        Some((start, count)) => Some((number(start)?, number(count)?)),
        None => Some((number(text)?, 1)),
    };
    Some((range(old)?, range(new)?))
}

/// A line number or a count.
pub(crate) fn number(text: &str) -> Option<usize> {
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse::<u32>().ok())
        .flatten()
        .and_then(|number| usize::try_from(number).ok())
}
