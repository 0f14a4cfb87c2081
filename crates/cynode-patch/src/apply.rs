//! Applies hunks to file content.
//!
//! Invariants: context and deleted lines must match byte for byte. A hunk with a line number may
//! only have moved, and the match nearest to its expected position, after the previous hunk, wins; a
//! hunk without one must match exactly one place of the file. Every failing hunk is reported. The
//! search is bounded: once a diff has used up its [`SearchBudget`], hunks are only tried at their
//! expected position, and those without one fail.

use crate::{
    escaped_but, excerpt,
    hunk::{Hunk, Line, Place, Side},
    lines::trim,
};

/// Lines of a hunk and of the file that a failure quotes.
const MAX_QUOTED_LINES: usize = 20;
/// The part of a line that a failure quotes.
const MAX_QUOTED_BYTES: usize = 200;
/// The number of places that a failure lists of those that an ambiguous hunk fits.
const LISTED_PLACES: usize = 5;

/// A hunk that does not apply.
#[derive(Debug, PartialEq, Eq)]
pub struct HunkFailure {
    /// From 1.
    pub hunk: u32,
    /// Line of the old file, from 1.
    pub line: Option<u64>,
    pub reason: String,
    /// The first lines that the hunk expects in the old file.
    pub expected: Vec<String>,
    /// The lines of the old file at the place where the hunk should be.
    pub found: Vec<String>,
}

/// The remaining cost of searching for moved hunks, over a whole diff.
///
/// Comparing two lines costs one, plus one for each 64 bytes of the line.
#[derive(Debug)]
pub struct SearchBudget(u64);

impl Default for SearchBudget {
    fn default() -> Self {
        Self(50_000_000)
    }
}

impl SearchBudget {
    fn is_left(&self) -> bool {
        self.0 > 0
    }

    fn spend(&mut self, line_bytes: usize) {
        self.0 = self.0.saturating_sub(1 + line_bytes as u64 / 64);
    }
}

/// Indexes the lines of a content without copying it.
struct Content<'a> {
    bytes: &'a [u8],
    /// Offsets of the lines. Contents are far below 4 GiB.
    starts: Vec<u32>,
}

impl<'a> Content<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let mut starts = Vec::new();
        let mut at = 0;
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            starts.push(u32::try_from(at).unwrap_or(u32::MAX));
            at += line.len();
        }
        Self { bytes, starts }
    }

    fn len(&self) -> usize {
        self.starts.len()
    }

    /// Lines `from` (inclusive) to `to` (exclusive).
    fn range(&self, from: usize, to: usize) -> &'a [u8] {
        let offset = |line: usize| {
            self.starts
                .get(line)
                .map_or(self.bytes.len(), |start| *start as usize)
        };
        &self.bytes[offset(from)..offset(to)]
    }

    /// Up to `count` lines from `from`, for messages.
    fn quoted(&self, from: usize, count: usize) -> Vec<String> {
        (from..self.len())
            .take(count)
            .map(|line| self.range(line, line + 1))
            .map(|line| quoted(line.strip_suffix(b"\n").unwrap_or(line)))
            .collect()
    }

    /// Whether the line equals the one that the hunk expects.
    fn matches(&self, index: usize, line: &Line<'_>) -> bool {
        let found = self.range(index, index + 1);
        match found.strip_suffix(b"\n") {
            Some(text) => line.newline && text == line.text,
            None => !line.newline && found == line.text,
        }
    }

    /// Like `matches`, but the last line of the file may lack the newline that the hunk has.
    fn matches_open(&self, index: usize, line: &Line<'_>) -> bool {
        self.matches(index, line)
            || (index + 1 == self.len()
                && self.ends_open()
                && self.range(index, index + 1) == line.text)
    }

    fn ends_open(&self) -> bool {
        ends_open(self.bytes)
    }
}

pub fn apply(
    old: &[u8],
    hunks: &[Hunk<'_>],
    strip_cr: bool,
    budget: &mut SearchBudget,
) -> Result<Vec<u8>, Vec<HunkFailure>> {
    let content = Content::new(old);
    let mut out = Vec::with_capacity(old.len());
    let mut failures = Vec::new();
    let mut consumed = 0;
    let mut offset = 0_isize;
    for (number, hunk) in (1..).zip(hunks) {
        let lines: Vec<Line<'_>> = hunk.lines(strip_cr).collect();
        let expected: Vec<&Line<'_>> = lines.iter().filter(|line| line.side != Side::New).collect();
        let found = match &hunk.place {
            Place::Line(line) => {
                // A hunk without old lines inserts after the line that it names.
                let wanted = if expected.is_empty() {
                    *line
                } else {
                    line.saturating_sub(1)
                };
                let estimate = wanted.saturating_add_signed(offset);
                find_nearest(&content, &expected, estimate, consumed, budget)
                    .map(|position| (position, position.cast_signed() - wanted.cast_signed()))
                    .ok_or_else(|| Mismatch {
                        reason: mismatch(&content, &expected, estimate, consumed),
                        position: Some(estimate),
                    })
            }
            Place::Unique { after, at_end } => {
                find_unique(&content, &expected, after, *at_end, consumed, budget)
                    .map(|position| (position, offset))
            }
        };
        let result = found.and_then(|(position, new_offset)| {
            let (length, end) = (out.len(), position + expected.len());
            let mut whole = push(&mut out, content.range(consumed, position));
            let before_hunk = out.len();
            for line in lines.iter().filter(|line| line.side != Side::Old) {
                whole &= push(&mut out, line.text);
                if line.newline {
                    out.push(b'\n');
                }
            }
            // Most hunks without line numbers can't say that the file's last line has no newline.
            if matches!(hunk.place, Place::Unique { .. })
                && end == content.len()
                && content.ends_open()
                && expected.last().is_some_and(|line| line.newline)
                && out.len() > before_hunk
                && out.ends_with(b"\n")
            {
                out.pop();
            }
            if !whole || (end < content.len() && ends_open(&out)) {
                out.truncate(length);
                return Err(Mismatch {
                    reason: "a line without a newline would precede another line".to_owned(),
                    position: None,
                });
            }
            (consumed, offset) = (end, new_offset);
            Ok(())
        });
        if let Err(Mismatch { reason, position }) = result {
            let count = expected.len().min(MAX_QUOTED_LINES);
            failures.push(HunkFailure {
                hunk: number,
                line: match &hunk.place {
                    Place::Line(line) => Some(*line as u64),
                    Place::Unique { .. } => position.map(|position| position as u64 + 1),
                },
                reason,
                expected: expected[..count]
                    .iter()
                    .map(|line| quoted(line.text))
                    .collect(),
                found: position.map_or_else(Vec::new, |position| content.quoted(position, count)),
            });
        }
    }
    if !failures.is_empty() {
        return Err(failures);
    }
    out.extend_from_slice(content.range(consumed, content.len()));
    Ok(out)
}

/// The reason why a hunk has no place.
struct Mismatch {
    reason: String,
    /// The place that the hunk resembles most, or where it should be.
    position: Option<usize>,
}

/// A line for messages: escaped except for tabs, and truncated.
fn quoted(line: &[u8]) -> String {
    let cut = &line[..line.len().min(MAX_QUOTED_BYTES)];
    let mut text = escaped_but(cut, Some('\t'));
    if text.len() > MAX_QUOTED_BYTES || cut.len() < line.len() {
        text.truncate(text.floor_char_boundary(MAX_QUOTED_BYTES - '…'.len_utf8()));
        text.push('…');
    }
    text
}

/// Appends bytes. Returns false if the last line had no newline; an empty slice is always fine.
fn push(out: &mut Vec<u8>, bytes: &[u8]) -> bool {
    let fits = bytes.is_empty() || !ends_open(out);
    out.extend_from_slice(bytes);
    fits
}

fn ends_open(out: &[u8]) -> bool {
    out.last().is_some_and(|byte| *byte != b'\n')
}

/// The only position of the expected lines in the file, or the reason why there is none.
fn find_unique(
    content: &Content<'_>,
    expected: &[&Line<'_>],
    after: &[Vec<u8>],
    at_end: bool,
    consumed: usize,
    budget: &mut SearchBudget,
) -> Result<usize, Mismatch> {
    let fail = |reason: String, position: Option<usize>| Err(Mismatch { reason, position });
    let too_long = || {
        fail(
            "the search for the hunk's place takes too long; give its line numbers".to_owned(),
            None,
        )
    };
    let mut start = 0;
    for anchor in after {
        let (mut first, mut count) = (None, 0);
        for line in start..content.len() {
            if !budget.is_left() {
                return too_long();
            }
            budget.spend(anchor.len());
            if trim(content.range(line, line + 1)) == anchor {
                first = first.or(Some(line));
                count += 1;
            }
        }
        let Some(first) = first else {
            let place = if start > 0 {
                " after the one before it"
            } else {
                ""
            };
            return fail(
                format!("no line of the file equals {}{place}", excerpt(anchor)),
                None,
            );
        };
        if count > 1 {
            return fail(
                format!(
                    "{count} lines of the file equal {}, so the place is ambiguous; choose a \
                     unique line",
                    excerpt(anchor)
                ),
                None,
            );
        }
        start = first + 1;
    }
    let fits = |position: usize, budget: &mut SearchBudget| {
        expected.iter().enumerate().all(|(index, line)| {
            budget.spend(line.text.len());
            content.matches_open(position + index, line)
        })
    };
    let last = content
        .len()
        .checked_sub(expected.len())
        .filter(|last| *last >= start);
    let mut positions = Vec::new();
    let mut count = 0;
    if at_end {
        positions.extend(last.filter(|last| fits(*last, budget)));
        count = positions.len();
    } else if expected.is_empty() && content.len() > 0 {
        return fail(
            "the hunk has no line of the file that tells its place; add context lines".to_owned(),
            None,
        );
    } else if let Some(last) = last {
        for position in start..=last {
            if !budget.is_left() {
                return too_long();
            }
            if fits(position, budget) {
                count += 1;
                if positions.len() < LISTED_PLACES {
                    positions.push(position);
                }
            }
        }
    }
    match positions.as_slice() {
        [] => {
            let nearest = if at_end {
                Some(content.len().saturating_sub(expected.len()))
            } else {
                most_similar(content, expected, start, budget)
            };
            let place = if at_end {
                "the end of the file does not have the hunk's lines"
            } else {
                "no place of the file has the hunk's lines"
            };
            let detail = nearest.map_or_else(String::new, |position| {
                format!("; {}", mismatch(content, expected, position, 0))
            });
            fail(format!("{place}{detail}"), nearest)
        }
        [position] if *position >= consumed => Ok(*position),
        [position] => fail(
            "the hunk does not follow the previous one; write hunks in the order of the file, \
             without overlaps"
                .to_owned(),
            Some(*position),
        ),
        _ => {
            let lines: Vec<String> = positions
                .iter()
                .map(|position| (position + 1).to_string())
                .collect();
            let more = if count > lines.len() { ", …" } else { "" };
            fail(
                format!(
                    "the hunk fits {count} places (lines {}{more}); add context lines",
                    lines.join(", ")
                ),
                None,
            )
        }
    }
}

/// The position whose lines resemble the expected ones most; `None` if none does.
fn most_similar(
    content: &Content<'_>,
    expected: &[&Line<'_>],
    start: usize,
    budget: &mut SearchBudget,
) -> Option<usize> {
    let compared = &expected[..expected.len().min(MAX_QUOTED_LINES)];
    let mut best = (0, None);
    for position in start..content.len() {
        if !budget.is_left() {
            break;
        }
        let mut score = 0;
        for (index, line) in compared.iter().enumerate() {
            budget.spend(line.text.len());
            let found = content.range(position + index, position + index + 1);
            // Equal but for white space, and equal.
            let text = line.text.trim_ascii();
            if !text.is_empty() && found.trim_ascii() == text {
                score += 2 + usize::from(trim(found) == line.text);
            }
        }
        if score > best.0 {
            best = (score, Some(position));
        }
    }
    best.1
}

/// The position of the expected lines nearest to `estimate`, not before `consumed`.
fn find_nearest(
    content: &Content<'_>,
    expected: &[&Line<'_>],
    estimate: usize,
    consumed: usize,
    budget: &mut SearchBudget,
) -> Option<usize> {
    let last = content.len().checked_sub(expected.len())?;
    if expected.is_empty() {
        return (consumed..=last).contains(&estimate).then_some(estimate);
    }
    if last < consumed {
        return None;
    }
    let fits = |position: usize, budget: &mut SearchBudget| {
        expected.iter().enumerate().all(|(index, line)| {
            budget.spend(line.text.len());
            content.matches(position + index, line)
        })
    };
    let estimate = estimate.clamp(consumed, last);
    if fits(estimate, budget) {
        return Some(estimate);
    }
    let farthest = (estimate - consumed).max(last - estimate);
    for distance in 1..=farthest {
        if !budget.is_left() {
            return None;
        }
        let after = estimate + distance;
        if after <= last && fits(after, budget) {
            return Some(after);
        }
        let before = estimate
            .checked_sub(distance)
            .filter(|before| *before >= consumed);
        if before.is_some_and(|before| fits(before, budget)) {
            return before;
        }
    }
    None
}

/// Describes the mismatch at the position where the hunk should be.
fn mismatch(
    content: &Content<'_>,
    expected: &[&Line<'_>],
    estimate: usize,
    consumed: usize,
) -> String {
    for (index, line) in expected.iter().enumerate() {
        let at = estimate.saturating_add(index);
        if at >= content.len() {
            return format!("the file has only {} lines", content.len());
        }
        if !content.matches(at, line) {
            let found = content.range(at, at + 1);
            let newline = |has: bool| if has { "" } else { " without a newline" };
            return format!(
                "line {} is {}{} where the diff expects {}{}",
                at + 1,
                excerpt(found.strip_suffix(b"\n").unwrap_or(found)),
                newline(found.ends_with(b"\n")),
                excerpt(line.text),
                newline(line.newline),
            );
        }
    }
    if estimate < consumed {
        "it overlaps the previous hunk".to_owned()
    } else {
        format!("the file has only {} lines", content.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Patch;

    fn applied(old: &[u8], hunks: &str) -> Result<Vec<u8>, Vec<HunkFailure>> {
        let diff = format!("--- a/x\n+++ b/x\n{hunks}");
        let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
        apply(
            old,
            &patch.sections()[0].hunks,
            false,
            &mut SearchBudget::default(),
        )
    }

    #[test]
    fn a_moved_hunk_is_found_nearest_to_its_position() {
        let hunk = "@@ -2,3 +2,3 @@\n a\n-b\n+B\n c\n";
        assert_eq!(applied(b"a\nb\nc\n", hunk).expect("moved up"), b"a\nB\nc\n");
        assert_eq!(
            applied(b"1\n2\n3\n4\na\nb\nc\n", hunk).expect("moved down"),
            b"1\n2\n3\n4\na\nB\nc\n"
        );
        let twice = b"a\nb\nc\n1\n2\n3\n4\na\nb\nc\n";
        assert_eq!(
            applied(twice, hunk).expect("nearest"),
            b"a\nB\nc\n1\n2\n3\n4\na\nb\nc\n"
        );
    }

    #[test]
    fn a_later_hunk_follows_the_offset_of_the_one_before() {
        let hunks = "@@ -1 +1 @@\n-a\n+A\n@@ -3 +3 @@\n-x\n+X\n";
        assert_eq!(
            applied(b"0\n0\na\nb\nx\nx\n", hunks).expect("applied"),
            b"0\n0\nA\nb\nX\nx\n"
        );
    }

    #[test]
    fn every_failing_hunk_is_reported_with_the_mismatch() {
        let failures =
            applied(b"a\nb\nc\n", "@@ -1 +1 @@\n-x\n+y\n@@ -2 +2 @@\n-b\n+B\n@@ -3 +3,2 @@\n-z\u{7}\n+y\n+w\n@@ -9 +10 @@\n-q\n+r\n").expect_err("rejected");
        let summary: Vec<_> = failures
            .iter()
            .map(|failure| {
                (
                    failure.hunk,
                    failure.line.unwrap_or_default(),
                    failure.reason.as_str(),
                )
            })
            .collect();
        assert_eq!(
            summary,
            [
                (1, 1, "line 1 is 'a' where the diff expects 'x'"),
                (3, 3, "line 3 is 'c' where the diff expects 'z\\u{7}'"),
                (4, 9, "the file has only 3 lines")
            ]
        );
        let quoted: Vec<_> = failures
            .iter()
            .map(|failure| (failure.expected.join("|"), failure.found.join("|")))
            .collect();
        let pair = |expected: &str, found: &str| (expected.to_owned(), found.to_owned());
        assert_eq!(
            quoted,
            [pair("x", "a"), pair("z\\u{7}", "c"), pair("q", "")]
        );
    }

    #[test]
    fn a_failure_quotes_a_bounded_part_of_the_hunk_and_the_file() {
        let failure = |lines: usize, text: &str| {
            let hunk = format!(
                "@@ -1,{lines} +1,{lines} @@\n-x\n+y\n{}",
                format!(" {text}\n").repeat(lines - 1)
            );
            let old = format!("{text}\n").repeat(lines);
            let mut failures = applied(old.as_bytes(), &hunk).expect_err("rejected");
            failures.remove(0)
        };
        for (lines, quoted) in [
            (MAX_QUOTED_LINES, MAX_QUOTED_LINES),
            (MAX_QUOTED_LINES + 1, MAX_QUOTED_LINES),
        ] {
            let failure = failure(lines, "\ttext");
            assert_eq!(
                (failure.expected.len(), failure.found.len()),
                (quoted, quoted)
            );
            assert_eq!(
                (failure.expected[0].as_str(), failure.found[0].as_str()),
                ("x", "\ttext")
            );
        }
        assert_eq!(failure(2, "dos\r").found[0], "dos\\r");
        let fits = "é".repeat(MAX_QUOTED_BYTES / 2);
        assert_eq!(failure(2, &fits).found[0], fits);
        let cut = failure(2, &(fits + "x")).found.remove(0);
        assert!(
            cut.ends_with("é…") && cut.len() <= MAX_QUOTED_BYTES,
            "{cut}"
        );
        let escaped = failure(2, &"\u{7}".repeat(MAX_QUOTED_BYTES))
            .found
            .remove(0);
        assert!(escaped.starts_with("\\u{7}") && escaped.len() <= MAX_QUOTED_BYTES);
    }

    #[test]
    fn missing_newlines_are_kept_added_and_removed() {
        assert_eq!(
            applied(b"a", "@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n").expect("added"),
            b"a\n"
        );
        assert_eq!(
            applied(
                b"a\n",
                "@@ -1 +1 @@\n-a\n+a\n\\ No newline at end of file\n"
            )
            .expect("removed"),
            b"a"
        );
        assert_eq!(
            applied(
                b"a\nb",
                "@@ -1,2 +1,2 @@\n-a\n+A\n b\n\\ No newline at end of file\n"
            )
            .expect("kept"),
            b"A\nb"
        );
        assert!(applied(b"a", "@@ -1 +1 @@\n-a\n+b\n").is_err());
        assert!(
            applied(
                b"a\nb\n",
                "@@ -1 +1 @@\n-a\n+A\n\\ No newline at end of file\n"
            )
            .is_err()
        );
        assert!(applied(b"a", "@@ -1,0 +2 @@\n+b\n").is_err());
    }

    #[test]
    fn insertions_without_context_go_after_their_line() {
        assert_eq!(
            applied(b"a\nb\n", "@@ -1,0 +2 @@\n+x\n").expect("applied"),
            b"a\nx\nb\n"
        );
        assert_eq!(
            applied(b"a\n", "@@ -0,0 +1 @@\n+x\n").expect("applied"),
            b"x\na\n"
        );
        assert_eq!(
            applied(b"", "@@ -0,0 +1,2 @@\n+x\n+y\n").expect("applied"),
            b"x\ny\n"
        );
        assert!(applied(b"a\n", "@@ -7,0 +8 @@\n+x\n").is_err());
    }

    #[test]
    fn hunks_apply_at_their_position_without_search_budget() {
        let patch = Patch::parse(b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", 1).expect("parsed");
        let sections = patch.sections();
        assert_eq!(
            apply(b"a\n", &sections[0].hunks, false, &mut SearchBudget(0)).expect("at its place"),
            b"b\n"
        );
        assert!(apply(b"x\na\n", &sections[0].hunks, false, &mut SearchBudget(0)).is_err());
        let mut budget = SearchBudget(5);
        assert!(apply(&b"x\n".repeat(100), &sections[0].hunks, false, &mut budget).is_err());
        assert_eq!(budget.0, 0);
        // A long hunk that nearly matches everywhere costs no more than the budget.
        let hunk = format!("@@ -1,1001 +1,1000 @@\n{}-b\n", " x\n".repeat(1_000));
        let diff = format!("--- a/x\n+++ b/x\n{hunk}");
        let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
        let mut budget = SearchBudget(100_000);
        assert!(
            apply(
                &b"x\n".repeat(20_000),
                &patch.sections()[0].hunks,
                false,
                &mut budget
            )
            .is_err()
        );
        assert_eq!(budget.0, 0);
    }

    #[test]
    fn carriage_returns_are_part_of_a_line_unless_the_diff_was_converted() {
        let diff = b"--- a/x\r\n+++ b/x\r\n@@ -1 +1 @@\r\n-a\r\n+b\r\n";
        let patch = Patch::parse(diff, 1).expect("parsed");
        let sections = patch.sections();
        assert_eq!(
            apply(
                b"a\r\n",
                &sections[0].hunks,
                false,
                &mut SearchBudget::default()
            )
            .expect("applied"),
            b"b\r\n"
        );
        assert!(
            apply(
                b"a\n",
                &sections[0].hunks,
                false,
                &mut SearchBudget::default()
            )
            .is_err()
        );
        assert_eq!(
            apply(
                b"a\n",
                &sections[0].hunks,
                true,
                &mut SearchBudget::default()
            )
            .expect("applied"),
            b"b\n"
        );
    }

    fn content() -> impl Strategy<Value = Vec<u8>> {
        let lines: [&[u8]; 8] = [
            b"a\n",
            b"b\n",
            b"\n",
            b"--- x\n",
            b"+++ y\n",
            b"@@ -1 +1 @@\n",
            b"\xff\r\n",
            b"\\ No\n",
        ];
        let line = (0..lines.len()).prop_map(move |index| lines[index]);
        (proptest::collection::vec(line, 0..30), any::<bool>()).prop_map(|(lines, open)| {
            let mut content = lines.concat();
            if open && content.last() == Some(&b'\n') && content.len() > 1 {
                content.pop();
            }
            content
        })
    }

    proptest! {
        #[test]
        fn a_diff_applies_forwards_and_reversed(
            old in content(),
            new in content(),
            context in 0_usize..4,
        ) {
            crate::fuzz::there_and_back(&old, &new, context);
        }

        #[test]
        fn applying_to_arbitrary_files_never_panics(
            old in content(),
            one in content(),
            two in content(),
            strip_cr in any::<bool>(),
        ) {
            let diff = format!("--- a/x\n+++ b/x\n{}", {
                let patch = diffy::create_patch_bytes(&one, &two);
                let mut text = Vec::new();
                patch
                    .to_bytes()
                    .split_inclusive(|byte| *byte == b'\n')
                    .skip(2)
                    .for_each(|line| text.extend_from_slice(line));
                String::from_utf8_lossy(&text).into_owned()
            });
            if let Ok(patch) = Patch::parse(diff.as_bytes(), 1) {
                let _result = apply(
                    &old,
                    &patch.sections()[0].hunks,
                    strip_cr,
                    &mut SearchBudget::default(),
                );
            }
        }
    }
}
