//! Reading unified diffs, plain ones and git's.
//!
//! Strict where leniency would lose a change: a hunk whose line counts are wrong, a hunk without a file, a section that
//! says nothing, and a text without any section are errors that name the line. Text around sections (mail headers, commit
//! messages, signatures) is skipped.

use std::borrow::Cow;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Create,
    Modify,
    Delete,
    Rename,
    Copy,
}

/// What a diff says about one file. Names have lost their leading components.
#[derive(Debug)]
pub(super) struct Section<'a> {
    pub(super) change: Change,
    /// Absent for [`Change::Create`].
    pub(super) old: Option<Vec<u8>>,
    /// Absent for [`Change::Delete`].
    pub(super) new: Option<Vec<u8>>,
    pub(super) old_mode: Option<u32>,
    pub(super) new_mode: Option<u32>,
    pub(super) binary: bool,
    /// The header's own lines end in CRLF, so the diff may have been converted on its way.
    pub(super) crlf: bool,
    pub(super) hunks: Vec<Hunk<'a>>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Hunk<'a> {
    pub(super) old_start: usize,
    pub(super) old_count: usize,
    body: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Both,
    Old,
    New,
}

/// A line of a hunk, without its mark and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Line<'a> {
    pub(super) side: Side,
    pub(super) text: &'a [u8],
    /// Whether the line ends in a newline; only the last one of a file may not.
    pub(super) newline: bool,
}

impl<'a> Hunk<'a> {
    /// With `strip_cr` a carriage return before the newline is the diff's, not the line's.
    pub(super) fn lines(&self, strip_cr: bool) -> impl Iterator<Item = Line<'a>> + use<'a> {
        let mut lines = Lines { rest: self.body, number: 0 };
        std::iter::from_fn(move || {
            let line = lines.next()?;
            let (side, text) = match line.first() {
                Some(b'-') => (Side::Old, &line[1..]),
                Some(b'+') => (Side::New, &line[1..]),
                Some(b' ') => (Side::Both, &line[1..]),
                // An empty context line whose blank was lost.
                _ => (Side::Both, line),
            };
            let newline = !lines.peek().is_some_and(is_no_newline_marker);
            if !newline {
                lines.next();
            }
            let text = text.strip_suffix(b"\n").unwrap_or(text);
            let text = if strip_cr { text.strip_suffix(b"\r").unwrap_or(text) } else { text };
            Some(Line { side, text, newline })
        })
    }
}

#[derive(Clone, Copy)]
struct Lines<'a> {
    rest: &'a [u8],
    /// Of the line that was taken last.
    number: usize,
}

impl<'a> Lines<'a> {
    fn peek(&self) -> Option<&'a [u8]> {
        if self.rest.is_empty() {
            return None;
        }
        let end = self.rest.iter().position(|byte| *byte == b'\n').map_or(self.rest.len(), |newline| newline + 1);
        Some(&self.rest[..end])
    }

    fn next(&mut self) -> Option<&'a [u8]> {
        let line = self.peek()?;
        self.rest = &self.rest[line.len()..];
        self.number += 1;
        Some(line)
    }
}

/// All sections of a diff that ends in a newline. `strip` leading components are dropped from names.
pub(super) fn parse(diff: &[u8], strip: usize) -> Result<Vec<Section<'_>>, String> {
    let mut lines = Lines { rest: diff, number: 0 };
    let mut sections = Vec::new();
    while let Some(line) = lines.peek() {
        if line.starts_with(b"diff --git ") {
            sections.push(git_section(&mut lines, strip)?);
        } else if is_plain_header(lines) {
            sections.push(plain_section(&mut lines, strip)?);
        } else if line.starts_with(b"@@") {
            return Err(format!("line {}: a hunk without a file header ('--- a/name', '+++ b/name') before it", lines.number + 1));
        } else {
            lines.next();
        }
    }
    if sections.is_empty() {
        return Err("it has no file header ('--- a/name', '+++ b/name', or 'diff --git')".to_owned());
    }
    Ok(sections)
}

fn is_plain_header(mut lines: Lines<'_>) -> bool {
    lines.next().is_some_and(|line| line.starts_with(b"--- ")) && lines.peek().is_some_and(|line| line.starts_with(b"+++ "))
}

fn is_no_newline_marker(line: &[u8]) -> bool {
    line.starts_with(b"\\ ")
}

fn trim(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// A name from a `---` or `+++` line; `None` when there is no file on that side.
fn header_name(line: &[u8], number: usize, epoch_is_absent: bool) -> Result<Option<Vec<u8>>, String> {
    let text = trim(&line[4..]);
    let (name, time) = match text.strip_prefix(b"\"") {
        Some(_) => {
            let (name, rest) = unquote(text).ok_or_else(|| format!("line {number}: the quoted name is not valid"))?;
            (Cow::Owned(name), rest)
        }
        None => match text.iter().position(|byte| *byte == b'\t') {
            Some(tab) => (Cow::Borrowed(&text[..tab]), &text[tab..]),
            None => (Cow::Borrowed(text), &b""[..]),
        },
    };
    let time = time.trim_ascii_start();
    // How diff -N marks a file that is absent.
    let is_epoch = time.starts_with(b"1970-01-01 00:00:00") || time.starts_with(b"1969-12-31 ");
    if *name == *b"/dev/null" || (epoch_is_absent && is_epoch) {
        return Ok(None);
    }
    Ok(Some(name.into_owned()))
}

/// Drops leading components, but never the last one.
fn strip_components(name: &[u8], count: usize) -> Vec<u8> {
    let mut rest = name;
    for _ in 0..count {
        let Some(slash) = rest.iter().position(|byte| *byte == b'/') else { break };
        let after = &rest[slash..];
        let next = &after[after.iter().take_while(|byte| **byte == b'/').count()..];
        if next.is_empty() {
            break;
        }
        rest = next;
    }
    rest.to_vec()
}

/// A name in double quotes with C's escapes, and what follows it.
fn unquote(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut rest = text.strip_prefix(b"\"")?;
    let mut name = Vec::new();
    loop {
        let (byte, after) = rest.split_first()?;
        rest = after;
        match byte {
            b'"' => return Some((name, rest)),
            b'\\' => {
                let (escape, after) = rest.split_first()?;
                rest = after;
                name.push(match escape {
                    b'a' => 7,
                    b'b' => 8,
                    b't' => b'\t',
                    b'n' => b'\n',
                    b'v' => 11,
                    b'f' => 12,
                    b'r' => b'\r',
                    b'\\' | b'"' => *escape,
                    b'0'..=b'3' => {
                        let (digits, after) = rest.split_at_checked(2)?;
                        rest = after;
                        digits.iter().try_fold(escape - b'0', |value, digit| matches!(digit, b'0'..=b'7').then(|| value * 8 + (digit - b'0')))?
                    }
                    _ => return None,
                });
            }
            byte => name.push(*byte),
        }
    }
}

fn plain_section<'a>(lines: &mut Lines<'a>, strip: usize) -> Result<Section<'a>, String> {
    let number = lines.number + 1;
    let (Some(old_line), Some(new_line)) = (lines.next(), lines.next()) else { return Err(format!("line {number}: the header is cut off")) };
    let crlf = old_line.ends_with(b"\r\n") && new_line.ends_with(b"\r\n");
    let hunks = hunks(lines)?;
    // A time of 1970 means an absent file only when the hunks agree.
    let empty_old = hunks.iter().all(|hunk| hunk.old_count == 0);
    let empty_new = hunks.iter().all(|hunk| hunk.lines(false).all(|line| line.side == Side::Old));
    let old = header_name(old_line, number, empty_old)?;
    let new = header_name(new_line, number + 1, empty_new)?;
    let change = match (&old, &new) {
        (None, None) => return Err(format!("line {number}: both names are /dev/null")),
        (None, Some(_)) => Change::Create,
        (Some(_), None) => Change::Delete,
        (Some(_), Some(_)) => Change::Modify,
    };
    if hunks.is_empty() {
        return Err(format!("line {number}: the file header has no hunk ('@@ -1,2 +1,3 @@') after it"));
    }
    let name = |name: Option<Vec<u8>>| name.map(|name| strip_components(&name, strip));
    Ok(Section { change, old: name(old), new: name(new), old_mode: None, new_mode: None, binary: false, crlf, hunks })
}

/// git's own header lines, as far as they matter.
#[derive(Default)]
struct GitHeader {
    old_mode: Option<u32>,
    new_mode: Option<u32>,
    created: bool,
    deleted: bool,
    renamed: (Option<Vec<u8>>, Option<Vec<u8>>),
    copied: (Option<Vec<u8>>, Option<Vec<u8>>),
    binary: bool,
}

impl GitHeader {
    /// Takes one line; false when it is no header line.
    fn take(&mut self, line: &[u8], number: usize) -> Result<bool, String> {
        let mode = |text: &[u8]| {
            let digits = std::str::from_utf8(text).ok().and_then(|text| u32::from_str_radix(text.trim(), 8).ok());
            digits.map(Some).ok_or_else(|| format!("line {number}: the mode is not valid"))
        };
        let name = |text: &[u8]| {
            if !text.starts_with(b"\"") {
                return Ok(Some(text.to_vec()));
            }
            unquote(text).map(|(name, _)| Some(name)).ok_or_else(|| format!("line {number}: the quoted name is not valid"))
        };
        if let Some(rest) = line.strip_prefix(b"old mode ") {
            self.old_mode = mode(rest)?;
        } else if let Some(rest) = line.strip_prefix(b"new mode ") {
            self.new_mode = mode(rest)?;
        } else if let Some(rest) = line.strip_prefix(b"new file mode ") {
            (self.new_mode, self.created) = (mode(rest)?, true);
        } else if let Some(rest) = line.strip_prefix(b"deleted file mode ") {
            (self.old_mode, self.deleted) = (mode(rest)?, true);
        } else if let Some(rest) = line.strip_prefix(b"rename from ") {
            self.renamed.0 = name(rest)?;
        } else if let Some(rest) = line.strip_prefix(b"rename to ") {
            self.renamed.1 = name(rest)?;
        } else if let Some(rest) = line.strip_prefix(b"copy from ") {
            self.copied.0 = name(rest)?;
        } else if let Some(rest) = line.strip_prefix(b"copy to ") {
            self.copied.1 = name(rest)?;
        } else if let Some(rest) = line.strip_prefix(b"index ") {
            // The mode stands here when it does not change: links and submodules are known by it.
            if let Some(space) = rest.iter().position(|byte| *byte == b' ')
                && self.old_mode.is_none()
            {
                self.old_mode = mode(&rest[space + 1..])?;
            }
        } else if line.starts_with(b"Binary files ") || line.starts_with(b"GIT binary patch") {
            self.binary = true;
        } else if !line.starts_with(b"similarity index ") && !line.starts_with(b"dissimilarity index ") {
            return Ok(false);
        }
        Ok(true)
    }
}

fn git_section<'a>(lines: &mut Lines<'a>, strip: usize) -> Result<Section<'a>, String> {
    let number = lines.number + 1;
    let first = lines.next().unwrap_or_default();
    let crlf = first.ends_with(b"\r\n");
    let mut header = GitHeader::default();
    while let Some(line) = lines.peek() {
        if !header.take(trim(line), lines.number + 1)? {
            break;
        }
        lines.next();
    }
    let mut names = None;
    let mut section_hunks = Vec::new();
    if !header.binary && is_plain_header(*lines) {
        let at = lines.number + 1;
        let (old, new) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        names = Some((header_name(old, at, false)?, header_name(new, at + 1, false)?));
        section_hunks = hunks(lines)?;
        if section_hunks.is_empty() {
            return Err(format!("line {at}: the file header has no hunk ('@@ -1,2 +1,3 @@') after it"));
        }
    }
    let stripped = |name: Option<Vec<u8>>, count: usize| name.map(|name| strip_components(&name, count));
    let is_empty = section_hunks.is_empty() && !header.binary && header.new_mode.is_none();
    let build = |change, old, new| Section {
        change,
        old,
        new,
        old_mode: header.old_mode,
        new_mode: header.new_mode,
        binary: header.binary,
        crlf,
        hunks: section_hunks,
    };
    for (change, (from, to)) in [(Change::Rename, header.renamed), (Change::Copy, header.copied)] {
        match (from, to) {
            (None, None) => {}
            // These names have no 'a/' and 'b/' in front.
            (Some(from), Some(to)) => return Ok(build(change, stripped(Some(from), strip.saturating_sub(1)), stripped(Some(to), strip.saturating_sub(1)))),
            _ => return Err(format!("line {number}: the header names only one side of a rename or copy")),
        }
    }
    let (old, new) = match names {
        Some((None, None)) => return Err(format!("line {number}: both names are /dev/null")),
        Some(names) => names,
        None => {
            let (old, new) = git_line_names(trim(&first[b"diff --git ".len()..]), strip)
                .ok_or_else(|| format!("line {number}: the names in the 'diff --git' line can't be told apart"))?;
            (Some(old), Some(new))
        }
    };
    let (old, new) = (stripped(old, strip), stripped(new, strip));
    if header.created || old.is_none() {
        return Ok(build(Change::Create, None, new.or(old)));
    }
    if header.deleted || new.is_none() {
        return Ok(build(Change::Delete, old, None));
    }
    if is_empty {
        return Err(format!("line {number}: the section changes nothing; a part of it may be missing"));
    }
    Ok(build(Change::Modify, old, new))
}

/// Both names of a `diff --git` line. They are the same but for the components to drop, or there would be other headers.
fn git_line_names(text: &[u8], strip: usize) -> Option<(Vec<u8>, Vec<u8>)> {
    let (old, new) = if text.starts_with(b"\"") {
        let (old, rest) = unquote(text)?;
        let rest = rest.strip_prefix(b" ")?;
        (old, if rest.starts_with(b"\"") { unquote(rest)?.0 } else { rest.to_vec() })
    } else if text.ends_with(b"\"") {
        let at = text.windows(2).position(|pair| pair == b" \"")?;
        (text[..at].to_vec(), unquote(&text[at + 1..])?.0)
    } else {
        let middle = text.len() / 2;
        if text.get(middle) != Some(&b' ') {
            return None;
        }
        (text[..middle].to_vec(), text[middle + 1..].to_vec())
    };
    (strip_components(&old, strip) == strip_components(&new, strip)).then_some((old, new))
}

fn hunks<'a>(lines: &mut Lines<'a>) -> Result<Vec<Hunk<'a>>, String> {
    let mut hunks = Vec::new();
    while lines.peek().is_some_and(|line| line.starts_with(b"@@")) {
        hunks.push(hunk(lines)?);
    }
    Ok(hunks)
}

fn hunk<'a>(lines: &mut Lines<'a>) -> Result<Hunk<'a>, String> {
    let number = lines.number + 1;
    let header = lines.next().unwrap_or_default();
    let ((old_start, old_count), (_, new_count)) =
        ranges(header).ok_or_else(|| format!("line {number}: the hunk header is not valid; it looks like '@@ -1,2 +1,3 @@'"))?;
    let (mut old_left, mut new_left) = (old_count, new_count);
    if old_left == 0 && new_left == 0 {
        return Err(format!("line {number}: the hunk is empty"));
    }
    let body = lines.rest;
    let wrong = |at: usize, what: &str| Err(format!("line {at}: {what} than the hunk header in line {number} says (-{old_count} +{new_count} lines)"));
    while old_left > 0 || new_left > 0 {
        let at = lines.number + 1;
        let Some(line) = lines.next() else { return wrong(at, "the diff ends with fewer lines") };
        let (old, new) = match line {
            [b'-', ..] => (1, 0),
            [b'+', ..] => (0, 1),
            [b' ', ..] | b"\n" | b"\r\n" => (1, 1),
            _ => return wrong(at, "the hunk has fewer lines"),
        };
        if old > old_left || new > new_left {
            return wrong(at, "the hunk has other lines");
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
            [b'-', ..] => !is_plain_header(*lines) && !matches!(trim(next), b"-- " | b"--" | b"---"),
            _ => false,
        };
        if stray {
            return wrong(lines.number + 1, "the hunk has more lines");
        }
    }
    Ok(Hunk { old_start, old_count, body })
}

type Range = (usize, usize);

fn ranges(header: &[u8]) -> Option<(Range, Range)> {
    let text = header.strip_prefix(b"@@ -")?;
    let end = text.windows(3).position(|window| window == b" @@")?;
    let text = std::str::from_utf8(&text[..end]).ok()?;
    let (old, new) = text.split_once(" +")?;
    let number =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u32>().ok()).flatten().and_then(|number| usize::try_from(number).ok());
    let range = |text: &str| match text.split_once(',') {
        Some((start, count)) => Some((number(start)?, number(count)?)),
        None => Some((number(text)?, 1)),
    };
    Some((range(old)?, range(new)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn one(diff: &str) -> Section<'_> {
        let mut sections = parse(diff.as_bytes(), 1).expect("parsed");
        assert_eq!(sections.len(), 1);
        sections.remove(0)
    }

    fn names(section: &Section<'_>) -> (Option<String>, Option<String>) {
        let text = |name: &Option<Vec<u8>>| name.as_ref().map(|name| String::from_utf8_lossy(name).into_owned());
        (text(&section.old), text(&section.new))
    }

    fn pair(old: &str, new: &str) -> (Option<String>, Option<String>) {
        (Some(old.to_owned()), Some(new.to_owned()))
    }

    const HUNK: &str = "@@ -1 +1 @@\n-a\n+b\n";

    #[test]
    fn plain_headers_lose_times_quotes_and_leading_components() {
        assert_eq!(names(&one(&format!("--- a/x y\t2024-01-01 00:00:00\n+++ b/x y\t2024\n{HUNK}"))), pair("x y", "x y"));
        assert_eq!(names(&one(&format!("--- \"a/t\\tab\\303\\251\"\n+++ \"b/q\\\"\"\t2024\n{HUNK}"))), pair("t\tabé", "q\""));
        assert_eq!(names(&one(&format!("--- file\n+++ file\n{HUNK}"))), pair("file", "file"));
        let crlf = one("--- a/x\r\n+++ b/x\r\n@@ -1 +1 @@\r\n-a\r\n+b\r\n").crlf;
        assert!(crlf);
    }

    #[test]
    fn absent_sides_make_creations_and_deletions() {
        assert_eq!(one("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n").change, Change::Create);
        assert_eq!(one("--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n").change, Change::Delete);
        assert_eq!(one("--- a/x\t1970-01-01 00:00:00.000000000 +0000\n+++ b/x\t2024\n@@ -0,0 +1 @@\n+a\n").change, Change::Create);
        assert_eq!(one("--- a/x\t2024\n+++ b/x\t1970-01-01 00:00:00.000000000 +0000\n@@ -1 +0,0 @@\n-a\n").change, Change::Delete);
        assert_eq!(one(&format!("--- a/x\t1970-01-01 00:00:00\n+++ b/x\n{HUNK}")).change, Change::Modify);
    }

    #[test]
    fn git_headers_tell_modes_renames_and_empty_files() {
        let section = one("diff --git a/x b/x\nold mode 100644\nnew mode 100755\n");
        assert_eq!((section.change, section.old_mode, section.new_mode), (Change::Modify, Some(0o100_644), Some(0o100_755)));
        let section = one("diff --git a/d/one b/d/two\nsimilarity index 100%\nrename from d/one\nrename to \"d/t\\\\wo\"\n");
        assert_eq!((section.change, names(&section)), (Change::Rename, pair("d/one", "d/t\\wo")));
        let section = one("diff --git a/one b/two\ncopy from one\ncopy to two\n");
        assert_eq!(section.change, Change::Copy);
        let section = one("diff --git a/e m b/e m\nnew file mode 100644\nindex 0000000..e69de29\n");
        assert_eq!((section.change, names(&section)), (Change::Create, (None, Some("e m".to_owned()))));
        let section = one("diff --git a/e b/e\ndeleted file mode 100644\nindex e69de29..0000000\n");
        assert_eq!((section.change, names(&section)), (Change::Delete, (Some("e".to_owned()), None)));
        let section = one("diff --git \"a/\\303\\251\" \"b/\\303\\251\"\nnew file mode 100644\n");
        assert_eq!(names(&section).1.as_deref(), Some("é"));
        let link = format!("diff --git a/l b/l\nindex 1..2 120000\n--- a/l\n+++ b/l\n{HUNK}");
        assert_eq!(one(&link).old_mode, Some(0o120_000));
        assert!(one("diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\nliteral 2\nJc$@@\n\nliteral 0\nHcm\n").binary);
        assert!(one("diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n").binary);
    }

    #[test]
    fn text_around_sections_is_skipped() {
        let diff = format!(
            "From 1234\nSubject: x\n\n---\n x | 2 +-\n\ndiff --git a/x b/x\nindex 1..2 100644\n--- a/x\n+++ b/x\n{HUNK}-- \n2.47\n\nIndex: y\n=====\n--- a/y\n+++ b/y\n{HUNK}"
        );
        let sections = parse(diff.as_bytes(), 1).expect("parsed");
        assert_eq!(sections.iter().map(|section| section.new.clone().expect("named")).collect::<Vec<_>>(), [b"x".to_vec(), b"y".to_vec()]);
    }

    #[test]
    fn lines_that_look_like_headers_stay_in_their_hunk() {
        let diff = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n--- old\n-+++\n+++ new\n+--\n";
        let sections = parse(diff.as_bytes(), 1).expect("parsed");
        let lines: Vec<_> = sections[0].hunks[0].lines(false).map(|line| (line.side, line.text)).collect();
        assert_eq!(lines, [(Side::Old, &b"-- old"[..]), (Side::Old, b"+++"), (Side::New, b"++ new"), (Side::New, b"--")]);
    }

    #[test]
    fn a_broken_diff_is_an_error_that_names_the_line() {
        let broken = [
            ("", "no file header"),
            ("just text\n", "no file header"),
            ("*** Begin Patch\n*** Update File: x\n", "no file header"),
            ("@@ -1 +1 @@\n-a\n+b\n", "line 1"),
            ("--- a/x\n+++ b/x\n", "line 1"),
            ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\n+b\n", "line 6"),
            ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n+c\n", "line 6"),
            ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n context\n", "line 6"),
            ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n-b\n", "line 5"),
            ("--- a/x\n+++ b/x\n@@ ... @@\n-a\n", "line 3"),
            ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\njunk\n@@ -9 +9 @@\n-c\n+d\n", "line 7"),
            ("--- a/x\n@@ -1 +1 @@\n-a\n+b\n", "line 2"),
            ("diff --git a/x b/x\nindex 1..2 100644\n", "line 1"),
            ("diff --git a/x b/y\nold mode 100644\nnew mode 100755\n", "line 1"),
            ("diff --git a/x b/x\nnew mode abc\n", "line 2"),
            ("--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n", "line 1"),
            ("diff --cc x\n@@@ -1 -1 +1 @@@\n- a\n", "line 2"),
        ];
        for (diff, expected) in broken {
            let error = parse(diff.as_bytes(), 1).expect_err(diff);
            assert!(error.contains(expected), "{diff:?}: {error}");
        }
    }

    #[test]
    fn components_are_dropped_but_never_the_name() {
        assert_eq!(strip_components(b"a/b/c", 0), b"a/b/c");
        assert_eq!(strip_components(b"a/b/c", 2), b"c");
        assert_eq!(strip_components(b"a/b/c", 9), b"c");
        assert_eq!(strip_components(b"a//b", 1), b"b");
        assert_eq!(strip_components(b"a/", 1), b"a/");
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in proptest::collection::vec(prop_oneof![
            Just("--- a/x\n".to_owned()), Just("+++ b/x\n".to_owned()), Just("diff --git a/x b/x\n".to_owned()), Just("@@ -1,2 +1 @@\n".to_owned()),
            Just("new file mode 100644\n".to_owned()), Just("rename from \"a\\1\n".to_owned()), Just("\\ No newline\n".to_owned()),
            "[-+ @\\\\]?[a-z\"\\\\0-7\t\r]{0,6}\n?".prop_map(|line| line), any::<String>(),
        ], 0..20), strip in 0_usize..4) {
            let mut diff = text.concat().into_bytes();
            diff.push(b'\n');
            if let Ok(sections) = parse(&diff, strip) {
                for hunk in sections.iter().flat_map(|section| &section.hunks) {
                    let lines = hunk.lines(true).count();
                    prop_assert!(lines > 0);
                }
            }
        }
    }
}
