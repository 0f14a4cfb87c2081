use proptest::prelude::*;

use super::*;
use crate::{fuzz::Memory, tests::*};

fn lenient(diff: &str) -> Result<(Patch<'_>, Vec<String>), String> {
    Patch::parse_lenient(diff.as_bytes(), 1)
        .map(|(patch, repairs)| (patch, repairs.iter().map(Repair::to_string).collect()))
        .map_err(|error| error.to_string())
}

/// The file `f` after a repaired diff, and the repairs.
fn repaired(old: &str, diff: &str) -> (String, Vec<String>) {
    let (patch, repairs) = lenient(diff).unwrap_or_else(|error| panic!("{error}\n{diff}"));
    let mut tree = Memory([(at("f"), bytes(old.as_bytes()))].into());
    assert!(tree.apply(&patch), "{diff}");
    let new = String::from_utf8(tree.0[&at("f")].bytes.clone()).expect("text");
    (new, repairs)
}

fn hunks(hunks: &str) -> String {
    format!("--- a/f\n+++ b/f\n{hunks}")
}

const OLD: &str = "1\n2\n3\n4\n5\n6\n7\n8\n";

#[test]
fn wrong_counts_are_corrected() {
    for header in [
        "@@ -2,3 +2,4 @@",
        "@@ -2,1 +2,1 @@",
        "@@ -2,9 +2,9 @@ fn x()",
        "@@ -2 +2 @@",
        "@@ -2,0 +2,0 @@",
    ] {
        let diff = hunks(&format!("{header}\n 2\n-3\n+x\n 4\n@@ -7 +7 @@\n-7\n+y\n"));
        let (new, repairs) = repaired(OLD, &diff);
        assert_eq!(new, "1\n2\nx\n4\n5\n6\ny\n8\n", "{header}");
        assert_eq!(repairs.len(), 1, "{repairs:?}");
        assert!(Patch::parse(diff.as_bytes(), 1).is_err());
    }
    let diff = hunks("@@ -2,9 +2,8 @@\n 2\n-3\n+x\n 4\n");
    assert_eq!(
        repaired(OLD, &diff).1,
        ["f, hunk 1: its header says -9 +8 lines, but it has -3 +3"]
    );
}

#[test]
fn a_diff_without_mistakes_is_not_repaired() {
    for diff in [
        hunks("@@ -2,3 +2,3 @@\n 2\n-3\n+x\n 4\n"),
        hunks("@@ -2,3 +2,3 @@\n 2\n-3\n+x\n 4\n-- \n2.47\n"),
        hunks("@@ -2,2 +2,2 @@\n--- old\n+++ new\n 4\n"),
        hunks("@@ -2,3 +2,3 @@\n 2\n-3\n+x\n\n\ntext\n"),
    ] {
        let (patch, repairs) = lenient(&diff).expect("parsed");
        assert_eq!(repairs, [""; 0], "{diff}");
        let strict = Patch::parse(diff.as_bytes(), 1).expect("parsed");
        assert_eq!(format!("{patch:?}"), format!("{strict:?}"));
    }
}

#[test]
fn hunks_without_numbers_must_fit_exactly_one_place() {
    for header in [
        "@@ @@",
        "@@ ... @@",
        "@@ … @@",
        "@@",
        "@@ ... @@ fn x() {",
        "@@ @@ x",
    ] {
        let (new, repairs) = repaired(OLD, &hunks(&format!("{header}\n 4\n-5\n+x\n")));
        assert_eq!(new, "1\n2\n3\n4\nx\n6\n7\n8\n", "{header}");
        assert_eq!(repairs, ["f, hunk 1: without line numbers"]);
    }
    let text = hunks("@@ @@\n-1\n+2\n");
    let (patch, _) = lenient(&text).expect("parsed");
    let mut tree = Memory([(at("f"), bytes(b"1\n1\n"))].into());
    assert!(!tree.apply(&patch));
    for header in ["@@ x @@", "@@ -x,1 +1 @@", "@@ ...", "@@@ -1 -1 +1 @@@"] {
        let error = lenient(&hunks(&format!("{header}\n-1\n+2\n"))).expect_err(header);
        assert!(error.contains("the hunk header is invalid"), "{error}");
    }
    let create = "--- /dev/null\n+++ b/n\n@@ @@\n+x\n+y\n";
    let mut tree = Memory::default();
    assert!(tree.apply(&lenient(create).expect("parsed").0));
    assert_eq!(tree.0[&at("n")].bytes, b"x\ny\n");
}

#[test]
fn missing_and_empty_context_at_the_end_is_accepted() {
    // Three lines of context are missing.
    let (new, repairs) = repaired(OLD, &hunks("@@ -1,6 +1,6 @@\n 1\n-2\n+x\n"));
    assert_eq!(
        (new.as_str(), repairs.len()),
        ("1\nx\n3\n4\n5\n6\n7\n8\n", 1)
    );
    // An empty line that is counted is context.
    let old = "1\n\n3\n";
    let counted = hunks("@@ -1,2 +1,2 @@\n-1\n+x\n\n");
    assert_eq!(repaired(old, &counted), ("x\n\n3\n".to_owned(), vec![]));
    // One that is not counted is a separator, unless lines of the hunk follow.
    let (new, repairs) = repaired(old, &hunks("@@ -1,4 +1,4 @@\n-1\n+x\n\n\n"));
    assert_eq!((new.as_str(), repairs.len()), ("x\n\n3\n", 1));
    for header in ["@@ -1 +1 @@", "@@ -1,9 +1,9 @@", "@@ @@"] {
        let (new, repairs) = repaired(old, &hunks(&format!("{header}\n-1\n+x\n\n-3\n+y\n")));
        assert_eq!((new.as_str(), repairs.len()), ("x\n\ny\n", 1), "{header}");
    }
}

#[test]
fn a_repaired_hunk_ends_where_the_next_part_begins() {
    let wrong = "@@ -1,9 +1,9 @@\n-1\n+x\n";
    for (next, sections) in [
        ("", 1),
        ("@@ -5 +5 @@\n-5\n+y\n", 1),
        ("--- a/g\n+++ b/g\n@@ -1 +1 @@\n-1\n+x\n", 2),
        ("\n--- a/g\n+++ b/g\n@@ @@\n-1\n+x\n", 2),
        ("diff --git a/g b/g\nnew file mode 100644\n", 2),
        ("Index: g\n====\n--- a/g\n+++ b/g\n@@ -1 +1 @@\n-1\n+x\n", 2),
        ("-- \n2.47.3\n\n", 1),
        ("```\nThat is all.\n", 1),
    ] {
        let diff = hunks(&format!("{wrong}{next}"));
        let (patch, repairs) = lenient(&diff).unwrap_or_else(|error| panic!("{error}\n{diff}"));
        assert_eq!(patch.sections().len(), sections, "{diff}");
        assert_eq!(
            repairs[0],
            "f, hunk 1: its header says -9 +9 lines, but it has -1 +1"
        );
    }
    let open = hunks("@@ -8,9 +8,9 @@\n-8\n+x\n\\ No newline at end of file\n");
    assert_eq!(repaired(OLD, &open).0, OLD.replace("8\n", "x"));
}

#[test]
fn where_the_end_of_a_hunk_is_a_guess_the_diff_is_refused() {
    for (text, expected) in [
        // The pair deletes '-- x' and adds '++ y', or begins a file.
        (
            "@@ -1,9 +1,9 @@\n-1\n--- x\n+++ y\n 4\n",
            "line 5: the lines '---' and '+++'",
        ),
        (
            "@@ -1,9 +1,9 @@\n-1\n--- x\n+++ y\n",
            "line 5: the lines '---' and '+++'",
        ),
        (
            "@@ @@\n-1\n--- x\n+++ y\n 4\n",
            "line 5: the lines '---' and '+++'",
        ),
        // Counted in one hunk, while another needs a repair.
        (
            "@@ -1,2 +1,2 @@\n--- x\n+++ y\n 4\n@@ -7,9 +7,9 @@\n-7\n+8\n",
            "line 4: the lines '---' and '+++'",
        ),
        // Context that lost its space.
        (
            "@@ -1,9 +1,9 @@\n 1\nlost\n-2\n+x\n",
            "line 5: the line is no part of a hunk",
        ),
        (
            "@@ -1,9 +1,9 @@\n-1\ntext\n\n+x\n",
            "line 5: the line is no part of a hunk",
        ),
        (
            "@@ -1,9 +1,9 @@\n-1\ntext\n@@ -5 +5 @@\n-5\n+y\n",
            "line 5: the line is no part",
        ),
        ("@@ -1,9 +1,9 @@\n", "line 3: the hunk is empty"),
        ("@@ @@\n\n\n", "line 3: the hunk is empty"),
        (
            "@@ @@\n\\ No newline at end of file\n+x\n",
            "line 4: the line is no part of a hunk",
        ),
        (
            "@@ @@\n+x\n\\ No newline at end of file\n\\ No newline at end of file\n+y\n",
            "line 6: the line is no part of a hunk",
        ),
    ] {
        let error = lenient(&hunks(text)).expect_err(text);
        assert!(error.contains(expected), "{text:?}: {error}");
    }
}

#[test]
fn repairs_are_bounded() {
    let diff = |count: usize| hunks(&"@@ @@\n+x\n".repeat(count));
    assert_eq!(
        lenient(&diff(MAX_REPAIRS)).expect("parsed").1.len(),
        MAX_REPAIRS
    );
    let error = lenient(&diff(MAX_REPAIRS + 1)).expect_err("refused");
    assert!(error.contains("more than 1,000"), "{error}");
    let long = format!("--- a/{0}\n+++ b/{0}\n@@ @@\n+x\n", "é".repeat(1_000));
    assert!(lenient(&long).expect("parsed").1[0].len() < PATH_BYTES + 100);
}

#[test]
fn the_first_line_tells_the_format() {
    let begin = b"\n*** Begin Patch\n*** Delete File: a/x\n*** End Patch\n";
    let (patch, repairs) = Patch::parse_any(begin, 1).expect("parsed");
    assert_eq!(patch.paths().into_iter().collect::<Vec<_>>(), [b"a/x"]);
    assert!(repairs.is_empty());
    let diff = hunks("@@ -1 +1 @@\n-*** Begin Patch\n+x\n");
    let (patch, _) = Patch::parse_any(diff.as_bytes(), 1).expect("parsed");
    assert_eq!(patch.paths().into_iter().collect::<Vec<_>>(), [b"f"]);
}

fn line() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(
        &[
            " 1\n",
            "-1\n",
            "+x\n",
            "\n",
            "--- x\n",
            "+++ y\n",
            "-- \n",
            "@@ @@\n",
            "@@ -1,2 +1 @@\n",
            "@@ -1 +1 @@\n",
            "\\ No newline\n",
            "text\n",
            "+\r\n",
            "diff --git a/f b/f\n",
            "new file mode 100644\n",
            "--- a/f\n+++ b/f\n@@ -1 +1 @@\n",
        ][..],
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_048))]
    /// Nothing is repaired in a diff that strict parsing reads in the same way, and no changed line
    /// of a hunk is lost.
    #[test]
    fn repairs_lose_no_line(lines in proptest::collection::vec(line(), 0..20)) {
        let diff = hunks(&lines.concat());
        let Ok((patch, repairs)) = Patch::parse_lenient(diff.as_bytes(), 1) else {
            return Ok(());
        };
        if repairs.is_empty() {
            let strict = Patch::parse(diff.as_bytes(), 1).expect("nothing to repair");
            prop_assert_eq!(format!("{:?}", patch), format!("{:?}", strict));
        }
        let _applied = sample_tree().apply(&patch);
        let added = |text: &str| text.lines().filter(|line| *line == "+x").count();
        let kept: usize = patch
            .sections()
            .iter()
            .flat_map(|section| &section.hunks)
            .flat_map(|hunk| hunk.lines(false))
            .filter(|line| line.side == Side::New && line.text == b"x")
            .count();
        if !repairs.is_empty() && patch.sections().len() == 1 && patch.sections()[0].hunks.len() == repairs.len() {
            prop_assert_eq!(kept, added(&diff), "{}", diff);
        }
    }
}
