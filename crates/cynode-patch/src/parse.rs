//! Parses unified diffs, plain ones and git's.
//!
//! Strict where leniency would lose a change or let two readers disagree: a hunk whose line counts
//! are wrong, a hunk without a file, a section that changes nothing, headers that contradict each
//! other, and a text without any section are errors that name the line. Text around sections (mail
//! headers, commit messages, signatures) is skipped.

use std::{borrow::Cow, collections::BTreeSet};

use crate::{
    binary::{Binary, BlobIds, read_binary},
    hunk::{Hunk, Side, read_hunk},
    lines::{Error, Lines, error, is_plain_header, trim},
    name::{strip_components, unquote},
    plan::MAX_TOTAL_BYTES,
    repair::Repairs,
    wire::{ANY_CONTENT, read_wire_hunk},
};

/// Longest line of a file header. Two fully escaped names of 4,095 bytes fit.
pub const MAX_HEADER_BYTES: usize = 64 * 1024;
/// Files of one diff. Each takes many times the memory of its lines.
pub(crate) const MAX_SECTIONS: usize = 10_000;
/// Hunks of one diff, of all its files together.
pub(crate) const MAX_HUNKS: usize = 100_000;

/// A parsed diff.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Patch<'a> {
    pub(crate) sections: Vec<Section<'a>>,
}

impl<'a> Patch<'a> {
    /// Parses a diff and drops `strip` leading components from its names.
    pub fn parse(diff: &'a [u8], strip: u32) -> Result<Self, Error> {
        Self::read(Lines::new(diff), strip, &mut Reader::Strict)
    }

    /// Drops the sections with a path that `keep` does not accept.
    pub fn retain(&mut self, keep: impl Fn(&[u8]) -> bool) {
        self.sections.retain(|section| {
            section
                .old
                .iter()
                .chain(&section.new)
                .all(|path| keep(path))
        });
    }

    pub(crate) fn read(
        mut lines: Lines<'a>,
        strip: u32,
        reader: &mut Reader,
    ) -> Result<Self, Error> {
        let strip = usize::try_from(strip).unwrap_or(usize::MAX);
        let mut sections: Vec<Section<'a>> = Vec::new();
        let (mut hunks, mut inflated) = (0, 0);
        while let Some(line) = lines.peek() {
            let number = lines.number + 1;
            if line.starts_with(b"diff --git ") {
                sections.push(git_section(&mut lines, strip, reader)?);
            } else if is_plain_header(lines) {
                sections.push(plain_section(&mut lines, strip, reader)?);
            } else if line.starts_with(b"@@") {
                return error(
                    lines.number + 1,
                    "a hunk without a file header ('--- a/name', '+++ b/name') before it",
                );
            } else if matches!(reader, Reader::Wire) {
                return error(number, "the line is no part of a section");
            } else {
                lines.next();
                continue;
            }
            check_sections(number, sections.len())?;
            let Some(section) = sections.last() else {
                continue;
            };
            reader.end_section(section);
            hunks += section.hunks.len();
            check_hunks(number, hunks)?;
            inflated += section.inflated_bytes();
            if inflated > MAX_TOTAL_BYTES {
                return error(
                    number,
                    &format!(
                        "the binary contents of the diff have more than {MAX_TOTAL_BYTES} bytes; \
                         split it"
                    ),
                );
            }
        }
        if sections.is_empty() {
            return Err(Error(
                "there is no file header ('--- a/name', '+++ b/name', or 'diff --git')".to_owned(),
            ));
        }
        Ok(Self { sections })
    }

    pub fn sections(&self) -> &[Section<'a>] {
        &self.sections
    }

    /// Every path that the diff can create, change, delete or read.
    pub fn paths(&self) -> BTreeSet<&[u8]> {
        self.sections
            .iter()
            .flat_map(|section| [&section.old, &section.new])
            .flatten()
            .map(Vec::as_slice)
            .collect()
    }

    /// The size of all binary contents, as the diff declares it.
    pub fn inflated_bytes(&self) -> usize {
        self.sections.iter().map(Section::inflated_bytes).sum()
    }
}

/// How a text spells hunks.
pub(crate) enum Reader {
    Strict,
    Repairing(Repairs),
    /// The gate's form, in which nothing surrounds sections.
    Wire,
}

impl Reader {
    fn hunk<'a>(&mut self, lines: &mut Lines<'a>, number: u32) -> Result<Hunk<'a>, Error> {
        match self {
            Self::Strict => read_hunk(lines),
            Self::Repairing(repairs) => repairs.read_hunk(lines, number),
            Self::Wire => read_wire_hunk(lines),
        }
    }

    fn end_section(&mut self, section: &Section<'_>) {
        if let Self::Repairing(repairs) = self {
            repairs.end_section(section);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Create,
    Modify,
    Delete,
    Rename,
    Copy,
}

/// The part of a diff about one file. Leading components are stripped from its names.
#[derive(Debug, PartialEq, Eq)]
pub struct Section<'a> {
    pub change: Change,
    /// Absent for [`Change::Create`].
    pub old: Option<Vec<u8>>,
    /// Absent for [`Change::Delete`].
    pub new: Option<Vec<u8>>,
    pub old_mode: Option<u32>,
    pub new_mode: Option<u32>,
    /// Deletes the file whatever its content and type are.
    pub any_content: bool,
    /// A section with a binary change has no hunks.
    pub binary: Option<Binary<'a>>,
    /// The header's lines end in CRLF, so the diff may have been converted in transit.
    pub crlf: bool,
    pub hunks: Vec<Hunk<'a>>,
}

impl Section<'_> {
    fn inflated_bytes(&self) -> usize {
        match self.binary {
            Some(Binary::Hunk(hunk)) => hunk.size(),
            Some(Binary::Omitted) | None => 0,
        }
    }

    /// Calls `feed` with all content that the section adds, in pieces: added lines, inflated
    /// binary contents, and the insertions of binary deltas.
    pub fn each_added(&self, mut feed: impl FnMut(&[u8])) {
        for line in self.hunks.iter().flat_map(|hunk| hunk.lines(self.crlf)) {
            if line.side == Side::New {
                feed(line.text);
                feed(b"\n");
            }
        }
        if let Some(Binary::Hunk(hunk)) = self.binary {
            hunk.each_added(false, feed);
        }
    }

    /// Calls `feed` with the insertions of a binary delta, as if it copied nothing between them.
    /// Other sections add nothing that [`Section::each_added`] takes apart.
    pub fn each_added_joined(&self, feed: impl FnMut(&[u8])) {
        if let Some(Binary::Hunk(hunk)) = self.binary
            && hunk.is_partial()
        {
            hunk.each_added(true, feed);
        }
    }

    /// Whether the section is a binary delta that completes what it adds with bytes of the old
    /// content, so that the patch alone does not tell the new one.
    pub fn is_partial(&self) -> bool {
        matches!(self.binary, Some(Binary::Hunk(hunk)) if hunk.is_partial())
    }
}

/// A line of a file header, within bounds.
pub(crate) fn header_line<'a>(lines: &mut Lines<'a>) -> Result<&'a [u8], Error> {
    let line = lines.next().unwrap_or_default();
    if line.len() > MAX_HEADER_BYTES {
        return error(
            lines.number,
            &format!("the file header has more than {MAX_HEADER_BYTES} bytes in one line"),
        );
    }
    Ok(line)
}

/// A name from a `---` or `+++` line; `None` if the file is absent on that side.
fn header_name(
    line: &[u8],
    number: usize,
    epoch_is_absent: bool,
) -> Result<Option<Vec<u8>>, Error> {
    let text = trim(&line[4..]);
    let (name, time) = match text.strip_prefix(b"\"") {
        Some(_) => match unquote(text) {
            Some((name, rest))
                if rest.is_empty() || rest.starts_with(b"\t") || rest.starts_with(b" ") =>
            {
                (Cow::Owned(name), rest)
            }
            _ => return error(number, "the quoted name is invalid"),
        },
        None => match text.iter().position(|byte| *byte == b'\t') {
            Some(tab) => (Cow::Borrowed(&text[..tab]), &text[tab..]),
            None => (Cow::Borrowed(text), &b""[..]),
        },
    };
    let time = time.trim_ascii_start();
    // `diff -N` marks an absent file this way.
    let is_epoch = time.starts_with(b"1970-01-01 00:00:00") || time.starts_with(b"1969-12-31 ");
    if *name == *b"/dev/null" || (epoch_is_absent && is_epoch) {
        return Ok(None);
    }
    Ok(Some(name.into_owned()))
}

fn plain_section<'a>(
    lines: &mut Lines<'a>,
    strip: usize,
    reader: &mut Reader,
) -> Result<Section<'a>, Error> {
    let number = lines.number + 1;
    let (old_line, new_line) = (header_line(lines)?, header_line(lines)?);
    let crlf = old_line.ends_with(b"\r\n") && new_line.ends_with(b"\r\n");
    let hunks = hunks(lines, reader)?;
    // A time in 1970 means an absent file only if the hunks agree.
    let empty_old = hunks.iter().all(|hunk| hunk.old_count == 0);
    let empty_new = hunks
        .iter()
        .all(|hunk| hunk.lines(false).all(|line| line.side == Side::Old));
    let old = header_name(old_line, number, empty_old)?;
    let new = header_name(new_line, number + 1, empty_new)?;
    let change = match (&old, &new) {
        (None, None) => return error(number, "both names are /dev/null"),
        (None, Some(_)) => Change::Create,
        (Some(_), None) => Change::Delete,
        (Some(_), Some(_)) => Change::Modify,
    };
    if hunks.is_empty() {
        return error(number, NO_HUNK);
    }
    let name = |name: Option<Vec<u8>>| name.map(|name| strip_components(&name, strip));
    Ok(Section {
        change,
        old: name(old),
        new: name(new),
        old_mode: None,
        new_mode: None,
        any_content: false,
        binary: None,
        crlf,
        hunks,
    })
}

const NO_HUNK: &str = "the file header has no hunk ('@@ -1,2 +1,3 @@') after it";

/// The relevant header lines of git.
#[derive(Default)]
struct GitHeader {
    old_mode: Option<u32>,
    new_mode: Option<u32>,
    index_mode: Option<u32>,
    created: Option<u32>,
    deleted: Option<u32>,
    renamed: (Option<Vec<u8>>, Option<Vec<u8>>),
    copied: (Option<Vec<u8>>, Option<Vec<u8>>),
    ids: Option<BlobIds>,
    binary: bool,
    any_content: bool,
}

impl GitHeader {
    fn take(&mut self, line: &[u8], number: usize) -> Result<(), Error> {
        let mode = |field: &mut Option<u32>, text: &[u8]| {
            let text = text.trim_ascii_end();
            let is_octal = text.len() == 6 && text.iter().all(|digit| matches!(digit, b'0'..=b'7'));
            if !is_octal {
                return error(
                    number,
                    "the mode is invalid; it has six octal digits, such as 100644",
                );
            }
            once(
                field,
                text.iter()
                    .fold(0, |value, digit| value * 8 + u32::from(digit - b'0')),
                number,
            )
        };
        let name = |field: &mut Option<Vec<u8>>, text: &[u8]| {
            if !text.starts_with(b"\"") {
                return once(field, text.to_vec(), number);
            }
            match unquote(text) {
                Some((name, b"")) => once(field, name, number),
                _ => error(number, "the quoted name is invalid"),
            }
        };
        if let Some(rest) = line.strip_prefix(b"old mode ") {
            mode(&mut self.old_mode, rest)?;
        } else if let Some(rest) = line.strip_prefix(b"new mode ") {
            mode(&mut self.new_mode, rest)?;
        } else if let Some(rest) = line.strip_prefix(b"new file mode ") {
            mode(&mut self.created, rest)?;
        } else if let Some(rest) = line.strip_prefix(b"deleted file mode ") {
            mode(&mut self.deleted, rest)?;
        } else if let Some(rest) = line.strip_prefix(b"rename from ") {
            name(&mut self.renamed.0, rest)?;
        } else if let Some(rest) = line.strip_prefix(b"rename to ") {
            name(&mut self.renamed.1, rest)?;
        } else if let Some(rest) = line.strip_prefix(b"copy from ") {
            name(&mut self.copied.0, rest)?;
        } else if let Some(rest) = line.strip_prefix(b"copy to ") {
            name(&mut self.copied.1, rest)?;
        } else if let Some(rest) = line.strip_prefix(b"index ") {
            // An unchanged mode appears here. It identifies links and submodules.
            let end = rest.iter().position(|byte| *byte == b' ');
            if let Some(space) = end {
                mode(&mut self.index_mode, &rest[space + 1..])?;
            }
            if let Some(ids) = BlobIds::parse(&rest[..end.unwrap_or(rest.len())]) {
                once(&mut self.ids, ids, number)?;
            }
        } else if line.starts_with(b"Binary files ") {
            self.binary = true;
        }
        Ok(())
    }

    /// Refuses headers that contradict each other.
    fn check(&self, number: usize) -> Result<(), Error> {
        let kinds = [
            self.created.is_some(),
            self.deleted.is_some() || self.any_content,
            self.renamed != (None, None),
            self.copied != (None, None),
        ];
        if kinds.iter().filter(|kind| **kind).count() > 1 {
            return error(
                number,
                "the section is more than one of creation, deletion, rename and copy",
            );
        }
        if (self.created.is_some() || self.deleted.is_some() || self.any_content)
            && (self.old_mode.is_some() || self.new_mode.is_some())
        {
            return error(
                number,
                "the section of a created or deleted file changes its mode",
            );
        }
        Ok(())
    }
}

fn is_git_header(line: &[u8]) -> bool {
    const PREFIXES: [&[u8]; 12] = [
        b"old mode ",
        b"new mode ",
        b"new file mode ",
        b"deleted file mode ",
        b"rename from ",
        b"rename to ",
        b"copy from ",
        b"copy to ",
        b"index ",
        b"similarity index ",
        b"dissimilarity index ",
        b"Binary files ",
    ];
    PREFIXES.iter().any(|prefix| line.starts_with(prefix))
}

/// Sets a field that a header may have only once.
fn once<T>(field: &mut Option<T>, value: T, number: usize) -> Result<(), Error> {
    if field.replace(value).is_some() {
        error(number, "the file header repeats a field")
    } else {
        Ok(())
    }
}

fn git_section<'a>(
    lines: &mut Lines<'a>,
    strip: usize,
    reader: &mut Reader,
) -> Result<Section<'a>, Error> {
    let first = header_line(lines)?;
    let number = lines.number;
    let crlf = first.ends_with(b"\r\n");
    let mut header = GitHeader::default();
    loop {
        let next = lines.peek().unwrap_or_default();
        if is_git_header(next) {
            let line = header_line(lines)?;
            header.take(trim(line), lines.number)?;
        } else if matches!(reader, Reader::Wire) && trim(next) == ANY_CONTENT {
            lines.next();
            header.any_content = true;
        } else {
            break;
        }
    }
    header.check(number)?;
    let mut binary = header.binary.then_some(Binary::Omitted);
    if lines.peek().map(trim) == Some(b"GIT binary patch") {
        lines.next();
        if binary.is_some() {
            return error(lines.number, "the section has two binary changes");
        }
        binary = Some(Binary::Hunk(read_binary(lines, header.ids)?));
    }
    let mut names = None;
    let mut section_hunks = Vec::new();
    if binary.is_none() && is_plain_header(*lines) {
        let at = lines.number + 1;
        let (old, new) = (header_line(lines)?, header_line(lines)?);
        names = Some((
            header_name(old, at, false)?,
            header_name(new, at + 1, false)?,
        ));
        section_hunks = hunks(lines, reader)?;
        if section_hunks.is_empty() {
            return error(at, NO_HUNK);
        }
    }
    if header.any_content && !(section_hunks.is_empty() && binary.is_none()) {
        return error(number, "the deletion of any content has hunks");
    }
    let stripped =
        |name: Option<Vec<u8>>, count: usize| name.map(|name| strip_components(&name, count));
    let names = names.map(|(old, new)| (stripped(old, strip), stripped(new, strip)));
    let line_names = git_line_names(trim(&first[b"diff --git ".len()..]), strip);
    let old_mode = header.old_mode.or(header.deleted).or(header.index_mode);
    let new_mode = header.new_mode.or(header.created);
    let is_empty = section_hunks.is_empty() && binary.is_none() && new_mode.is_none();
    let build = |change, old, new| Section {
        change,
        old,
        new,
        old_mode,
        new_mode,
        any_content: header.any_content,
        binary,
        crlf,
        hunks: section_hunks,
    };
    for (change, (from, to)) in [
        (Change::Rename, header.renamed),
        (Change::Copy, header.copied),
    ] {
        let (from, to) = match (from, to) {
            (None, None) => continue,
            (Some(from), Some(to)) => (from, to),
            _ => return error(number, "the header names only one side of a rename or copy"),
        };
        // These names have no 'a/' and 'b/' prefixes.
        let (from, to) = (
            stripped(Some(from), strip.saturating_sub(1)),
            stripped(Some(to), strip.saturating_sub(1)),
        );
        if names.is_some_and(|(old, new)| old != from || new != to) {
            return error(
                number,
                "the names of the rename or copy differ from those in the '---' and '+++' lines",
            );
        }
        return Ok(build(change, from, to));
    }
    let (old, new) = match names {
        Some((None, None)) => return error(number, "both names are /dev/null"),
        Some((old, new)) => {
            let differs = |name: &Option<Vec<u8>>, line: &Vec<u8>| {
                name.as_ref().is_some_and(|name| name != line)
            };
            if line_names.is_some_and(|line| differs(&old, &line) || differs(&new, &line)) {
                return error(
                    number,
                    "the names in the 'diff --git' line differ from those in the '---' and '+++' \
                     lines",
                );
            }
            (old, new)
        }
        None => match line_names {
            Some(name) => (Some(name.clone()), Some(name)),
            None => {
                return error(number, "the names in the 'diff --git' line are ambiguous");
            }
        },
    };
    let is_deletion = header.deleted.is_some() || header.any_content;
    if header.created.is_some() && new.is_none() || is_deletion && old.is_none() {
        return error(number, "the header both creates and deletes the file");
    }
    if header.created.is_some() || is_deletion {
        if old.is_some() && new.is_some() && old != new {
            return error(number, "the created or deleted file has two names");
        }
        return Ok(if header.created.is_some() {
            build(Change::Create, None, new)
        } else {
            build(Change::Delete, old, None)
        });
    }
    if old.is_none() {
        return Ok(build(Change::Create, None, new));
    }
    if new.is_none() {
        return Ok(build(Change::Delete, old, None));
    }
    if is_empty {
        return error(
            number,
            "the section changes nothing; a part of it may be missing",
        );
    }
    Ok(build(Change::Modify, old, new))
}

/// The name in a `diff --git` line without its leading components, if it is unambiguous: both names
/// are equal except for those components, so the length of the line determines where unquoted names
/// end.
fn git_line_names(text: &[u8], strip: usize) -> Option<Vec<u8>> {
    let (old, new) = if text.starts_with(b"\"") {
        let (old, rest) = unquote(text)?;
        let rest = rest.strip_prefix(b" ")?;
        let new = match unquote(rest) {
            Some((new, b"")) => new,
            None if !rest.starts_with(b"\"") => rest.to_vec(),
            _ => return None,
        };
        (old, new)
    } else if text.ends_with(b"\"") {
        let at = text.windows(2).position(|pair| pair == b" \"")?;
        let (new, rest) = unquote(&text[at + 1..])?;
        if !rest.is_empty() {
            return None;
        }
        (text[..at].to_vec(), new)
    } else {
        let middle = text.len() / 2;
        if text.get(middle) != Some(&b' ') {
            return None;
        }
        (text[..middle].to_vec(), text[middle + 1..].to_vec())
    };
    let name = strip_components(&old, strip);
    (name == strip_components(&new, strip)).then_some(name)
}

fn hunks<'a>(lines: &mut Lines<'a>, reader: &mut Reader) -> Result<Vec<Hunk<'a>>, Error> {
    let mut hunks = Vec::new();
    let mut number = 0;
    while lines.peek().is_some_and(|line| line.starts_with(b"@@")) {
        number += 1;
        hunks.push(reader.hunk(lines, number)?);
        check_hunks(lines.number, hunks.len())?;
    }
    Ok(hunks)
}

pub(crate) fn check_sections(line: usize, sections: usize) -> Result<(), Error> {
    if sections > MAX_SECTIONS {
        return error(line, "the diff has more than 10,000 files; split it");
    }
    Ok(())
}

pub(crate) fn check_hunks(line: usize, hunks: usize) -> Result<(), Error> {
    if hunks > MAX_HUNKS {
        return error(line, "the diff has more than 100,000 hunks; split it");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn one(diff: &str) -> Section<'_> {
        let mut patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
        assert_eq!(patch.sections.len(), 1);
        patch.sections.remove(0)
    }

    fn names(section: &Section<'_>) -> (Option<String>, Option<String>) {
        let text = |name: &Option<Vec<u8>>| {
            name.as_ref()
                .map(|name| String::from_utf8_lossy(name).into_owned())
        };
        (text(&section.old), text(&section.new))
    }

    fn pair(old: &str, new: &str) -> (Option<String>, Option<String>) {
        (Some(old.to_owned()), Some(new.to_owned()))
    }

    const HUNK: &str = "@@ -1 +1 @@\n-a\n+b\n";

    #[test]
    fn plain_headers_lose_times_quotes_and_leading_components() {
        assert_eq!(
            names(&one(&format!(
                "--- a/x y\t2024-01-01 00:00:00\n+++ b/x y\t2024\n{HUNK}"
            ))),
            pair("x y", "x y")
        );
        assert_eq!(
            names(&one(&format!(
                "--- \"a/t\\tab\\303\\251\"\n+++ \"b/q\\\"\"\t2024\n{HUNK}"
            ))),
            pair("t\tabé", "q\"")
        );
        assert_eq!(
            names(&one(&format!("--- file\n+++ file\n{HUNK}"))),
            pair("file", "file")
        );
        let crlf = one("--- a/x\r\n+++ b/x\r\n@@ -1 +1 @@\r\n-a\r\n+b\r\n").crlf;
        assert!(crlf);
    }

    #[test]
    fn absent_sides_make_creations_and_deletions() {
        assert_eq!(
            one("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n").change,
            Change::Create
        );
        assert_eq!(
            one("--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n").change,
            Change::Delete
        );
        assert_eq!(
            one("--- a/x\t1970-01-01 00:00:00.000000000 +0000\n+++ b/x\t2024\n@@ -0,0 +1 @@\n+a\n")
                .change,
            Change::Create
        );
        assert_eq!(
            one("--- a/x\t2024\n+++ b/x\t1970-01-01 00:00:00.000000000 +0000\n@@ -1 +0,0 @@\n-a\n")
                .change,
            Change::Delete
        );
        assert_eq!(
            one(&format!("--- a/x\t1970-01-01 00:00:00\n+++ b/x\n{HUNK}")).change,
            Change::Modify
        );
    }

    #[test]
    fn git_headers_carry_modes_renames_and_empty_files() {
        let section = one("diff --git a/x b/x\nold mode 100644\nnew mode 100755\n");
        assert_eq!(
            (section.change, section.old_mode, section.new_mode),
            (Change::Modify, Some(0o100_644), Some(0o100_755))
        );
        let section = one(
            "diff --git a/d/one b/d/two\nsimilarity index 100%\nrename from d/one\nrename to \"d/t\\\\wo\"\n",
        );
        assert_eq!(
            (section.change, names(&section)),
            (Change::Rename, pair("d/one", "d/t\\wo"))
        );
        let section = one("diff --git a/one b/two\ncopy from one\ncopy to two\n");
        assert_eq!(section.change, Change::Copy);
        let section = one("diff --git a/e m b/e m\nnew file mode 100644\nindex 0000000..e69de29\n");
        assert_eq!(
            (section.change, names(&section)),
            (Change::Create, (None, Some("e m".to_owned())))
        );
        let section = one("diff --git a/e b/e\ndeleted file mode 100644\nindex e69de29..0000000\n");
        assert_eq!(
            (section.change, names(&section)),
            (Change::Delete, (Some("e".to_owned()), None))
        );
        let section = one("diff --git \"a/\\303\\251\" \"b/\\303\\251\"\nnew file mode 100644\n");
        assert_eq!(names(&section).1.as_deref(), Some("é"));
        let link = format!("diff --git a/l b/l\nindex 1..2 120000\n--- a/l\n+++ b/l\n{HUNK}");
        assert_eq!(one(&link).old_mode, Some(0o120_000));
        assert_eq!(
            one("diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n").binary,
            Some(Binary::Omitted)
        );
    }

    #[test]
    fn text_around_sections_is_skipped() {
        let diff = format!(
            "From 1234\nSubject: x\n\n---\n x | 2 +-\n\ndiff --git a/x b/x\nindex 1..2 100644\n--- a/x\n+++ b/x\n{HUNK}-- \n2.47\n\nIndex: y\n=====\n--- a/y\n+++ b/y\n{HUNK}"
        );
        let sections = Patch::parse(diff.as_bytes(), 1).expect("parsed").sections;
        assert_eq!(
            sections
                .iter()
                .map(|section| section.new.clone().expect("named"))
                .collect::<Vec<_>>(),
            [b"x".to_vec(), b"y".to_vec()]
        );
    }

    #[test]
    fn lines_that_look_like_headers_stay_in_their_hunk() {
        let diff = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n--- old\n-+++\n+++ new\n+--\n";
        let sections = Patch::parse(diff.as_bytes(), 1).expect("parsed").sections;
        let lines: Vec<_> = sections[0].hunks[0]
            .lines(false)
            .map(|line| (line.side, line.text))
            .collect();
        assert_eq!(
            lines,
            [
                (Side::Old, &b"-- old"[..]),
                (Side::Old, b"+++"),
                (Side::New, b"++ new"),
                (Side::New, b"--")
            ]
        );
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
            (
                "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n context\n",
                "line 6",
            ),
            ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n-b\n", "line 5"),
            ("--- a/x\n+++ b/x\n@@ ... @@\n-a\n", "line 3"),
            (
                "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\njunk\n@@ -9 +9 @@\n-c\n+d\n",
                "line 7",
            ),
            ("--- a/x\n@@ -1 +1 @@\n-a\n+b\n", "line 2"),
            ("diff --git a/x b/x\nindex 1..2 100644\n", "line 1"),
            (
                "diff --git a/x b/y\nold mode 100644\nnew mode 100755\n",
                "line 1",
            ),
            ("diff --git a/x b/x\nnew mode abc\n", "line 2"),
            (
                "--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n",
                "line 1",
            ),
            ("diff --cc x\n@@@ -1 -1 +1 @@@\n- a\n", "line 2"),
        ];
        for (diff, expected) in broken {
            let error = Patch::parse(diff.as_bytes(), 1)
                .expect_err(diff)
                .to_string();
            assert!(error.contains(expected), "{diff:?}: {error}");
        }
    }

    #[test]
    fn headers_that_contradict_each_other_are_refused() {
        for (diff, expected) in [
            (format!("diff --git a/x b/y\nrename from x\nrename to y\n--- a/x\n+++ b/z\n{HUNK}"), "'---' and '+++'"),
            (format!("diff --git a/ok b/ok\n--- a/protected/x\n+++ b/protected/x\n{HUNK}"), "'diff --git' line differ"),
            ("diff --git a/x b/y\nrename from x\nrename to y\nrename to z\n".to_owned(), "line 4: the file header repeats a field"),
            ("diff --git a/x b/y\nrename from x\nrename to y\ncopy from x\ncopy to z\n".to_owned(), "more than one of"),
            ("diff --git a/x b/x\nnew file mode 100644\ndeleted file mode 100644\n".to_owned(), "more than one of"),
            ("diff --git a/x b/x\nnew file mode 100644\nnew mode 100755\n".to_owned(), "changes its mode"),
            ("diff --git a/x b/x\nnew file mode +10644\n".to_owned(), "the mode is invalid"),
            ("diff --git a/x b/x\nnew file mode 100644\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n".to_owned(), "both creates and deletes"),
            ("diff --git a/x b/y\nnew file mode 100644\n--- a/x\n+++ b/y\n@@ -0,0 +1 @@\n+a\n".to_owned(), "two names"),
            ("diff --git a/x b/y\nrename from x\n".to_owned(), "only one side"),
            ("diff --git a/x b/y\nrename from \"x\" z\nrename to y\n".to_owned(), "quoted name"),
            (format!("--- \"a/x\"y\n+++ b/x\n{HUNK}"), "quoted name"),
        ] {
            let error = Patch::parse(diff.as_bytes(), 1).expect_err(&diff).to_string();
            assert!(error.contains(expected), "{diff:?}: {error}");
        }
    }

    #[test]
    fn a_header_line_is_bounded_and_a_line_of_a_file_is_not() {
        let line = |length: usize| {
            // 'diff --git ' and the newline take 12 bytes, the space between the names one.
            let name = "n".repeat((length - 13) / 2);
            format!("diff --git {name} {name}\nnew file mode 100644\n")
        };
        let (longest, longer) = (MAX_HEADER_BYTES - 1, MAX_HEADER_BYTES + 1);
        assert_eq!(line(longest).find('\n'), Some(longest - 1));
        assert!(Patch::parse(line(longest).as_bytes(), 1).is_ok());
        assert!(
            Patch::parse(line(longer).as_bytes(), 1)
                .expect_err("refused")
                .to_string()
                .starts_with("line 1: the file header has more than 65536 bytes")
        );
        for header in [
            format!("--- a/{0}\n+++ b/x\n{HUNK}", "n".repeat(MAX_HEADER_BYTES)),
            format!(
                "diff --git a/x b/y\nrename from {}\n",
                "n".repeat(MAX_HEADER_BYTES)
            ),
        ] {
            assert!(
                Patch::parse(header.as_bytes(), 1)
                    .expect_err("refused")
                    .to_string()
                    .contains("65536")
            );
        }
        let wide = "x".repeat(MAX_HEADER_BYTES * 2);
        let file = format!("--- a/x\n+++ b/x\n@@ -1 +1 @@ {wide}\n-{wide}\n+b\n");
        assert!(Patch::parse(file.as_bytes(), 1).is_ok());
    }

    #[test]
    fn names_with_spaces_are_split_by_the_length_of_the_line() {
        let spaces = "a/b ".repeat(200) + "x";
        let diff = format!("diff --git a/{spaces} b/{spaces}\nnew file mode 100644\n");
        assert_eq!(names(&one(&diff)).1, Some(spaces));
        let error = Patch::parse(
            format!(
                "diff --git {}\nnew file mode 100644\n",
                "a/b ".repeat(1_001)
            )
            .as_bytes(),
            1,
        )
        .expect_err("refused");
        assert!(error.to_string().contains("ambiguous"));
    }

    #[test]
    fn the_paths_are_those_of_both_sides() {
        let diff = format!(
            "--- a/x.orig\n+++ b/x\n{HUNK}diff --git a/from b/to\ncopy from from\ncopy to to\nIndex: y\n--- /dev/null\n+++ /abs/y\n@@ -0,0 +1 @@\n+a\n"
        );
        let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
        let expected: [&[u8]; 5] = [b"/abs/y", b"from", b"to", b"x", b"x.orig"];
        assert_eq!(patch.paths().into_iter().collect::<Vec<_>>(), expected);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in proptest::collection::vec(prop_oneof![
            Just("--- a/x\n".to_owned()), Just("+++ b/x\n".to_owned()), Just("diff --git a/x b/x\n".to_owned()), Just("@@ -1,2 +1 @@\n".to_owned()),
            Just("new file mode 100644\n".to_owned()), Just("rename from \"a\\1\n".to_owned()), Just("\\ No newline\n".to_owned()),
            "[-+ @\\\\]?[a-z\"\\\\0-7\t\r]{0,6}\n?".prop_map(|line| line), any::<String>(),
        ], 0..20), strip in 0_u32..4) {
            let mut diff = text.concat().into_bytes();
            diff.push(b'\n');
            if let Ok(patch) = Patch::parse(&diff, strip) {
                for hunk in patch.sections.iter().flat_map(|section| &section.hunks) {
                    let lines = hunk.lines(true).count();
                    prop_assert!(lines > 0);
                }
            }
        }
    }
}
