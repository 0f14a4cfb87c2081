//! The patch format that begins with `*** Begin Patch`, which language models are trained to write.
//!
//! ```text
//! *** Begin Patch
//! *** Update File: src/lib.rs
//! *** Move to: src/main.rs
//! @@ fn run() {
//!  context
//! -old
//! +new
//! *** End of File
//! *** Add File: README.md
//! +text
//! *** Delete File: notes.txt
//! *** End Patch
//! ```
//!
//! Its hunks have no line numbers, so each must fit exactly one place of the file; a line after `@@`
//! narrows the search to what follows it. Nothing may surround the patch, and every line in it has a
//! meaning: unlike in a diff, there is no text to skip.

use crate::{
    hunk::{Hunk, Place},
    lines::{Error, Lines, error, trim},
    parse::{Change, Patch, Section, check_hunks, check_sections, header_line},
};

const BEGIN: &[u8] = b"*** Begin Patch";
const END: &[u8] = b"*** End Patch";
const END_OF_FILE: &[u8] = b"*** End of File";
const ADD: &[u8] = b"*** Add File: ";
const DELETE: &[u8] = b"*** Delete File: ";
const UPDATE: &[u8] = b"*** Update File: ";
const MOVE: &[u8] = b"*** Move to: ";
/// Lines after `@@` that narrow the place of one hunk.
pub(crate) const MAX_ANCHORS: usize = 8;

/// Whether a text is in this format, which its first line tells.
pub(crate) fn is_begin_patch(text: &[u8]) -> bool {
    let text = text.trim_ascii_start();
    Lines::new(text)
        .next()
        .is_some_and(|line| line.trim_ascii_end() == BEGIN)
}

impl<'a> Patch<'a> {
    /// Parses a text in the format that begins with `*** Begin Patch`.
    pub fn parse_begin_patch(text: &'a [u8]) -> Result<Self, Error> {
        let mut lines = Lines::new(text);
        skip_empty(&mut lines);
        let first = lines.next().unwrap_or_default();
        if first.trim_ascii_end() != BEGIN {
            return error(lines.number, "the patch must start with '*** Begin Patch'");
        }
        let crlf = first.ends_with(b"\r\n");
        let mut sections = Vec::new();
        let mut hunks = 0;
        loop {
            skip_empty(&mut lines);
            let number = lines.number + 1;
            let line = trim(header_line(&mut lines)?);
            let section = if line.trim_ascii_end() == END {
                break;
            } else if let Some(name) = line.strip_prefix(ADD) {
                add(&mut lines, name)?
            } else if let Some(name) = line.strip_prefix(DELETE) {
                Section {
                    any_content: true,
                    old: Some(file_name(name, number)?),
                    ..empty(Change::Delete)
                }
            } else if let Some(name) = line.strip_prefix(UPDATE) {
                update(&mut lines, name)?
            } else if line.is_empty() {
                return error(number, "the patch ends without '*** End Patch'");
            } else {
                return error(
                    number,
                    "the line must be '*** Add File: ', '*** Delete File: ' or '*** Update File: ' \
                     with a name, or '*** End Patch'",
                );
            };
            hunks += section.hunks.len();
            sections.push(Section { crlf, ..section });
            check_sections(number, sections.len())?;
            check_hunks(number, hunks)?;
        }
        skip_empty(&mut lines);
        if lines.peek().is_some() {
            return error(lines.number + 1, "text follows '*** End Patch'");
        }
        if sections.is_empty() {
            return error(lines.number, "the patch changes no file");
        }
        Ok(Self { sections })
    }
}

fn skip_empty(lines: &mut Lines<'_>) {
    while lines
        .peek()
        .is_some_and(|line| line.trim_ascii().is_empty())
    {
        lines.next();
    }
}

fn empty<'a>(change: Change) -> Section<'a> {
    Section {
        change,
        old: None,
        new: None,
        old_mode: None,
        new_mode: None,
        any_content: false,
        binary: None,
        crlf: false,
        hunks: Vec::new(),
    }
}

fn file_name(text: &[u8], number: usize) -> Result<Vec<u8>, Error> {
    let name = text.trim_ascii();
    if name.is_empty() {
        return error(number, "the name of the file is missing");
    }
    Ok(name.to_vec())
}

fn add<'a>(lines: &mut Lines<'a>, name: &[u8]) -> Result<Section<'a>, Error> {
    let name = file_name(name, lines.number)?;
    let body = lines.rest;
    while lines.peek().is_some_and(|line| line.starts_with(b"+")) {
        lines.next();
    }
    let body = &body[..body.len() - lines.rest.len()];
    skip_empty(lines);
    if lines.peek().is_some_and(|line| !line.starts_with(b"***")) {
        return error(
            lines.number + 1,
            "every line of an added file must start with '+'",
        );
    }
    let hunk = (!body.is_empty()).then(|| Hunk::new(Place::Line(0), body));
    Ok(Section {
        new: Some(name),
        new_mode: Some(0o100_644),
        hunks: hunk.into_iter().collect(),
        ..empty(Change::Create)
    })
}

fn update<'a>(lines: &mut Lines<'a>, name: &[u8]) -> Result<Section<'a>, Error> {
    let number = lines.number;
    let old = file_name(name, number)?;
    let moved = match lines.peek().and_then(|line| trim(line).strip_prefix(MOVE)) {
        Some(name) => {
            header_line(lines)?;
            Some(file_name(name, lines.number)?)
        }
        None => None,
    };
    let mut hunks = Vec::new();
    while lines.peek().is_some_and(|line| !is_marker(line)) {
        if lines
            .peek()
            .is_some_and(|line| hunks.is_empty() || line.starts_with(b"@@"))
        {
            hunks.push(read_hunk(lines)?);
            check_hunks(lines.number, hunks.len())?;
        } else {
            return error(lines.number + 1, "the hunk must start with '@@'");
        }
    }
    if hunks.is_empty() && moved.is_none() {
        return error(number, "the update of the file has no hunk");
    }
    let change = if moved.is_some() {
        Change::Rename
    } else {
        Change::Modify
    };
    Ok(Section {
        new: Some(moved.unwrap_or_else(|| old.clone())),
        old: Some(old),
        hunks,
        ..empty(change)
    })
}

/// Whether the line ends the hunks of a file. A line of a hunk has a prefix.
fn is_marker(line: &[u8]) -> bool {
    line.starts_with(b"*** ")
}

/// Reads a hunk: lines with `@@`, which the first hunk of a file may leave out, and its body.
fn read_hunk<'a>(lines: &mut Lines<'a>) -> Result<Hunk<'a>, Error> {
    let number = lines.number + 1;
    let mut after = Vec::new();
    while let Some(line) = lines.peek().filter(|line| line.starts_with(b"@@")) {
        lines.next();
        let text = trim(&line[2..]);
        if text.is_empty() {
            continue;
        }
        let Some(text) = text.strip_prefix(b" ") else {
            return error(
                lines.number,
                "'@@' must be followed by a space and a line of the file",
            );
        };
        // An empty line is nowhere unique.
        if !text.trim_ascii().is_empty() {
            after.push(text.to_vec());
        }
        if after.len() > MAX_ANCHORS {
            return error(lines.number, "the hunk has more than 8 lines with '@@'");
        }
    }
    let body = lines.rest;
    let (mut length, mut is_changed) = (0, false);
    while let Some(line) = lines.peek() {
        match line {
            [b'+' | b'-', ..] => is_changed = true,
            [b' ', ..] | b"\n" | b"\r\n" => {}
            _ => break,
        }
        lines.next();
        // Empty lines at the end separate the hunk from what follows.
        if !trim(line).is_empty() {
            length = body.len() - lines.rest.len();
        }
    }
    if !is_changed {
        return error(number, "the hunk changes nothing");
    }
    let at_end = lines.peek().is_some_and(|line| trim(line) == END_OF_FILE);
    if at_end {
        length = body.len() - lines.rest.len();
        lines.next();
        skip_empty(lines);
    }
    match lines.peek() {
        Some(line) if !is_marker(line) && !line.starts_with(b"@@") => error(
            lines.number + 1,
            "the line must start with ' ', '+', '-', '@@' or '***'",
        ),
        _ => Ok(Hunk::new(Place::Unique { after, at_end }, &body[..length])),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Plan, Reject, fuzz::Memory, plan, tests::*};

    fn wrapped(body: &str) -> String {
        format!("*** Begin Patch\n{body}*** End Patch\n")
    }

    fn planned(tree: &Memory, body: &str) -> Plan<()> {
        let text = wrapped(body);
        let patch = Patch::parse_begin_patch(text.as_bytes()).expect("parsed");
        plan(tree, &patch).unwrap_or_else(|_| panic!("planned"))
    }

    fn patched(mut tree: Memory, body: &str) -> Memory {
        let text = wrapped(body);
        let patch = Patch::parse_begin_patch(text.as_bytes()).expect("parsed");
        let rejects = planned(&tree, body).rejects;
        assert!(tree.apply(&patch), "{rejects:?}");
        tree
    }

    fn file(content: &str) -> Memory {
        Memory([(at("f"), bytes(content.as_bytes()))].into())
    }

    fn updated(content: &str, hunks: &str) -> String {
        let tree = patched(file(content), &format!("*** Update File: f\n{hunks}"));
        String::from_utf8(tree.0[&at("f")].bytes.clone()).expect("text")
    }

    fn reject(content: &str, hunks: &str) -> Reject {
        let mut rejects = planned(&file(content), &format!("*** Update File: f\n{hunks}")).rejects;
        assert_eq!(rejects.len(), 1, "{rejects:?}");
        rejects.remove(0)
    }

    fn reason(content: &str, hunks: &str) -> String {
        reject(content, hunks).reason
    }

    #[test]
    fn files_are_added_updated_moved_and_deleted() {
        let before = Memory(
            [("f", "a\nb\nc\n"), ("gone", "x\n"), ("m", "1\n2\n")]
                .map(|(path, content)| (at(path), bytes(content.as_bytes())))
                .into(),
        );
        let after = patched(
            before,
            "*** Add File: d/new\n+one\n+\n+two\n\n*** Add File: empty\n\
             *** Update File: f\n@@\n a\n-b\n+B\n\
             *** Delete File: gone\n\
             *** Update File: m\n*** Move to: d/m\n@@ 1\n-2\n+3\n",
        );
        let files: Vec<_> = after
            .0
            .iter()
            .map(|(path, file)| {
                (
                    String::from_utf8_lossy(path.as_bytes()),
                    String::from_utf8_lossy(&file.bytes),
                )
            })
            .collect();
        assert_eq!(
            files,
            [
                ("d/m".into(), "1\n3\n".into()),
                ("d/new".into(), "one\n\ntwo\n".into()),
                ("empty".into(), "".into()),
                ("f".into(), "a\nB\nc\n".into()),
            ]
        );
        let moved = patched(file("x"), "*** Update File: f\n*** Move to: g\n");
        assert_eq!(moved.0.keys().collect::<Vec<_>>(), [&at("g")]);
        let taken = planned(&file("x"), "*** Add File: f\n+x\n").rejects;
        assert_eq!(taken[0].reason, "the file already exists");
        let missing = planned(&file("x"), "*** Delete File: g\n").rejects;
        assert_eq!(missing[0].reason, "no such file");
    }

    #[test]
    fn a_hunk_must_fit_exactly_one_place() {
        assert_eq!(updated("a\nb\na\nc\n", " a\n-c\n+d\n"), "a\nb\na\nd\n");
        let none = reject("a\n\tb\nc\n", "@@\n a\n-b\n+x\n c\n");
        assert_eq!(
            none.reason,
            "no place of the file has the hunk's lines; line 2 is '\\tb' where the diff expects 'b'"
        );
        assert_eq!(
            (none.line, none.expected, none.found),
            (
                Some(1),
                vec!["a".to_owned(), "b".to_owned(), "c".to_owned()],
                vec!["a".to_owned(), "\tb".to_owned(), "c".to_owned()]
            )
        );
        let nothing = reject("a\n", "-z\n+y\n");
        assert_eq!(nothing.reason, "no place of the file has the hunk's lines");
        assert_eq!((nothing.line, nothing.found.len()), (None, 0));
        assert_eq!(
            reason("a\nb\na\nb\n", " a\n-b\n+c\n"),
            "the hunk fits 2 places (lines 1, 3); add context lines"
        );
        assert_eq!(
            reason(&"a\n".repeat(100), "-a\n"),
            "the hunk fits 100 places (lines 1, 2, 3, 4, 5, …); add context lines"
        );
        // The first place is after the previous hunk, but not the only one.
        assert!(reason("a\nx\na\n", "-x\n+y\n@@\n-a\n+b\n").contains("fits 2 places"));
    }

    #[test]
    fn a_line_after_the_at_signs_narrows_the_search() {
        let content = "class A\n  x\n  y\nclass B\n  x\n  y\n";
        assert_eq!(
            updated(content, "@@ class B\n-  x\n+  z\n"),
            content.replace("class B\n  x", "class B\n  z")
        );
        assert_eq!(
            updated(content, "@@ class B\n@@   x\n-  y\n"),
            "class A\n  x\n  y\nclass B\n  x\n"
        );
        // In A the lines fit twice: also in B.
        assert!(reason(content, "@@ class A\n-  x\n").contains("fits 2 places"));
        assert_eq!(
            reason(content, "@@ class C\n-  x\n"),
            "no line of the file equals 'class C'"
        );
        assert_eq!(
            reason(content, "@@   x\n-  y\n"),
            "2 lines of the file equal '  x', so the place is ambiguous; choose a unique line"
        );
        assert_eq!(
            reason(content, "@@ class B\n@@ class A\n-  x\n"),
            "no line of the file equals 'class A' after the one before it"
        );
        let dos = content.replace('\n', "\r\n");
        assert_eq!(
            updated(&dos, "@@ class B\n-  x\r\n+  z\r\n"),
            dos.replace("class B\r\n  x", "class B\r\n  z")
        );
    }

    #[test]
    fn hunks_follow_the_order_of_the_file() {
        assert_eq!(updated("a\nb\nc\n", "-a\n+A\n@@\n-c\n+C\n"), "A\nb\nC\n");
        assert!(reason("a\nb\nc\n", "-c\n+C\n@@\n-a\n+A\n").contains("order of the file"));
        assert!(reason("a\nb\nc\n", "-a\n b\n@@\n-b\n").contains("without overlaps"));
    }

    #[test]
    fn the_end_of_the_file_is_a_place() {
        assert_eq!(
            updated("a\nb\na\n", "-a\n+x\n*** End of File\n"),
            "a\nb\nx\n"
        );
        assert_eq!(updated("a\nb\n", "@@\n+x\n*** End of File\n"), "a\nb\nx\n");
        assert_eq!(
            reason("a\nb\n", "-a\n*** End of File\n"),
            "the end of the file does not have the hunk's lines; line 2 is 'b' where the diff \
             expects 'a'"
        );
        assert!(reason("a\nb\n", "@@\n+x\n").contains("add context lines"));
        assert_eq!(updated("", "@@\n+x\n"), "x\n");
    }

    #[test]
    fn a_file_without_a_last_newline_keeps_lacking_it() {
        assert_eq!(updated("a\nb", "-b\n+c\n"), "a\nc");
        assert_eq!(updated("a\nb", " b\n+c\n"), "a\nb\nc");
        assert_eq!(updated("a\nb", "-a\n+x\n b\n"), "x\nb");
        assert_eq!(updated("a\nb", "-b\n"), "a\n");
        assert_eq!(updated("a\nb", "-a\n+x\n"), "x\nb");
    }

    #[test]
    fn a_converted_patch_applies_to_files_of_both_kinds() {
        let text = wrapped("*** Update File: f\n@@ a\n-b\n+c\n*** Add File: n\n+x\n");
        let text = text.replace('\n', "\r\n");
        let patch = Patch::parse_begin_patch(text.as_bytes()).expect("parsed");
        for (content, expected) in [("a\nb\n", "a\nc\n"), ("a\r\nb\r\n", "a\r\nc\r\n")] {
            let mut tree = file(content);
            assert!(tree.apply(&patch));
            assert_eq!(tree.0[&at("f")].bytes, expected.as_bytes());
            assert_eq!(tree.0[&at("n")].bytes, b"x\n");
        }
    }

    #[test]
    fn a_malformed_patch_is_an_error_that_names_the_line() {
        for (text, expected) in [
            ("", "line 0: the patch must start"),
            ("--- a/x\n+++ b/x\n", "line 1: the patch must start"),
            ("*** Begin Patch\n", "line 2: the patch ends without"),
            ("*** Begin Patch\n*** End Patch\n", "changes no file"),
            (
                "*** Begin Patch\n*** Delete File: x\n",
                "line 3: the patch ends without",
            ),
            (
                "*** Begin Patch\n*** Delete File: \n*** End Patch\n",
                "line 2: the name",
            ),
            (
                "*** Begin Patch\n*** Remove File: x\n*** End Patch\n",
                "line 2: the line must be",
            ),
            (
                "*** Begin Patch\n*** Delete File: x\n-x\n*** End Patch\n",
                "line 3: the line must be",
            ),
            (
                "*** Begin Patch\n*** Add File: x\n+a\nb\n*** End Patch\n",
                "line 4: every line",
            ),
            (
                "*** Begin Patch\n*** Add File: x\n+a\n\n+b\n*** End Patch\n",
                "line 5: every line",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n*** End Patch\n",
                "line 2: the update",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n a\n*** End Patch\n",
                "line 3: the hunk changes",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n@@\n*** End Patch\n",
                "line 3: the hunk changes",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n@@x\n+a\n*** End Patch\n",
                "line 3: '@@' must",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n+a\nb\n*** End Patch\n",
                "line 4: the line must",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n+a\n*** End of File\n+b\n*** End Patch\n",
                "line 5: the line must",
            ),
            (
                "*** Begin Patch\n*** Update File: x\n+a\n*** End of File\n*** Move to: y\n*** End Patch\n",
                "line 5: the line must be",
            ),
            (
                "*** Begin Patch\n*** Delete File: x\n*** End Patch\nmore\n",
                "line 4: text follows",
            ),
        ] {
            let error = Patch::parse_begin_patch(text.as_bytes())
                .expect_err(text)
                .to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn files_hunks_and_anchors_are_bounded() {
        use crate::parse::{MAX_HUNKS, MAX_SECTIONS};
        let parse = |body: &str| {
            Patch::parse_begin_patch(wrapped(body).as_bytes())
                .map(|_| ())
                .map_err(|error| error.to_string())
        };
        let files = |count: usize| "*** Delete File: x\n".repeat(count);
        assert_eq!(parse(&files(MAX_SECTIONS)), Ok(()));
        assert!(parse(&files(MAX_SECTIONS + 1)).is_err_and(|error| error.contains("10,000")));
        let hunks = |count: usize| format!("*** Update File: x\n{}", "@@\n+x\n".repeat(count));
        assert_eq!(parse(&hunks(MAX_HUNKS)), Ok(()));
        assert!(parse(&hunks(MAX_HUNKS + 1)).is_err_and(|error| error.contains("100,000")));
        assert!(
            parse(&(hunks(MAX_HUNKS) + &hunks(1))).is_err_and(|error| error.contains("100,000"))
        );
        let anchors = |count: usize| format!("*** Update File: x\n{}+x\n", "@@ a\n".repeat(count));
        assert_eq!(parse(&anchors(MAX_ANCHORS)), Ok(()));
        assert!(parse(&anchors(MAX_ANCHORS + 1)).is_err_and(|error| error.contains("more than 8")));
    }

    pub(crate) fn section() -> impl Strategy<Value = String> {
        let name = || {
            proptest::sample::select(
                &[
                    "f", "g", "d/x", "l", "l/x", "new", "./f", "/f", "../f", ".git/x", "a b",
                ][..],
            )
        };
        let hunk = || {
            proptest::sample::select(
                &[
                    "@@\n-x\n+y\n",
                    "@@ x\n+y\n",
                    "@@\n x\n+y\n",
                    "@@\n-t\n+u\n",
                    "@@\n+z\n*** End of File\n",
                    "-x\n",
                ][..],
            )
        };
        prop_oneof![
            name().prop_map(|name| format!("*** Add File: {name}\n+x\n")),
            name().prop_map(|name| format!("*** Delete File: {name}\n")),
            (name(), hunk()).prop_map(|(name, hunk)| format!("*** Update File: {name}\n{hunk}")),
            (name(), name(), hunk()).prop_map(|(name, to, hunk)| format!(
                "*** Update File: {name}\n*** Move to: {to}\n{hunk}"
            )),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_048))]
        /// `Memory::apply` asserts that every loaded, changed or reported path is in
        /// `Patch::paths`.
        #[test]
        // invariant: one-reader
        fn every_path_that_a_begin_patch_touches_is_named(
            sections in proptest::collection::vec(section(), 1..5),
        ) {
            let text = wrapped(&sections.concat());
            let patch = Patch::parse_begin_patch(text.as_bytes()).expect("parsed");
            let _applied = sample_tree().apply(&patch);
        }

        #[test]
        fn arbitrary_text_never_panics(text in proptest::collection::vec(prop_oneof![
            section(), Just("*** End of File\n".to_owned()), Just("@@ a\n".to_owned()),
            Just("\n".to_owned()), "[-+ @*]{0,3}[a-z\r]{0,3}\n?".prop_map(|line| line),
        ], 0..20)) {
            let text = wrapped(&text.concat());
            if let Ok(patch) = Patch::parse_begin_patch(text.as_bytes()) {
                let _applied = sample_tree().apply(&patch);
            }
        }
    }
}
