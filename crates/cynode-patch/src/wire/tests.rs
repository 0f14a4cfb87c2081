use proptest::prelude::*;

use super::*;
use crate::{
    fuzz::{Memory, wire_round_trip},
    tests::*,
};

fn encoded(patch: &Patch<'_>) -> String {
    String::from_utf8(patch.to_wire().expect("encoded")).expect("UTF-8")
}

fn of_diff(diff: &str, strip: u32) -> String {
    encoded(&Patch::parse(diff.as_bytes(), strip).expect("parsed"))
}

fn of_begin_patch(body: &str) -> String {
    let text = format!("*** Begin Patch\n{body}*** End Patch\n");
    encoded(&Patch::parse_begin_patch(text.as_bytes()).expect("parsed"))
}

fn decode_error(wire: &str) -> String {
    Patch::from_wire(wire.as_bytes())
        .expect_err("refused")
        .to_string()
}

#[test]
fn everything_has_one_spelling() {
    assert_eq!(
        of_diff("text\n--- a/x\t2024\n+++ b/x\n@@ -1 +1 @@ fn\n-a\n+b", 1),
        "cynode-patch 1\n--- \"x\"\n+++ \"x\"\n@@ -1,1 +1,1 @@\n-a\n+b\n"
    );
    assert_eq!(
        of_diff(
            "diff --git a/x b/y\nsimilarity index 50%\nrename from x\nrename to \"\\303\\251\\001\"\n",
            1
        ),
        "cynode-patch 1\ndiff --git \"x\" \"é\\001\"\nrename from \"x\"\nrename to \"é\\001\"\n"
    );
    assert_eq!(
        of_begin_patch(
            "*** Update File: x\n@@ a \"b\"\n@@ c\n-d\n+e\n*** End of File\n*** Delete File: y\n"
        ),
        "cynode-patch 1\n--- \"x\"\n+++ \"x\"\n@@ unique -1 +1 end \"a \\\"b\\\"\" \"c\" @@\n-d\n+e\n\
         diff --git \"y\" \"y\"\ndeleted file any content\n"
    );
}

#[test]
fn every_kind_of_section_survives() {
    let id = "0123456789abcdef0123456789abcdef01234567";
    for diff in [
        "diff --git a/x b/x\nnew file mode 100755\nindex 0..1 100644\n",
        "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n",
        "diff --git a/x b/x\nnew mode 100755\n",
        "diff --git a/x b/x\ndeleted file mode 100644\n",
        "diff --git a/x b/x\ndeleted file mode 120000\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
        "diff --git a/x b/x\nindex 1..2 120000\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+y\n\\ No newline at end of file",
        "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+x\n",
        "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
        "diff --git a/x b/y\nindex 1..2 100644\n--- a/x\n+++ b/y\n@@ -1 +1 @@\n-x\n+y\n",
        "diff --git a/x b/y\nold mode 100644\nnew mode 100755\ncopy from x\ncopy to y\n",
        "diff --git a/x b/y\nrename from x\nrename to y\nindex 1..2 100644\n--- a/x\n+++ b/y\n@@ -1 +1 @@\n-x\n+y\n",
        "--- a/x.orig\n+++ b/x\n@@ -1,3 +1,2 @@\n a\n\n-b\n",
        "--- /dev/null\n+++ b//x/\n@@ -0,0 +1 @@\n+x\n",
        "diff --git a/x b/x\nBinary files a/x and b/x differ\n",
        "diff --git /dev/null /dev/null\nold mode 100644\nnew mode 100755\n",
        "diff --git a/x b/y\nrename from /dev/null\nrename to y\n",
        "diff --git a/x b/x\nGIT binary patch\nliteral 0\nHcmV?d00001\n\nliteral 0\nHcmV?d00001\n",
        "diff --git a/x b/x\nnew file mode 100644\nindex ID..ID\nGIT binary patch\nliteral 0\nHcmV?d00001",
        "diff --git a/x b/x\nindex ID..ID 100644\nGIT binary patch\ndelta 0\nHcmV?d00001\n\n",
        "--- \"a/\\377\\n\"\n+++ \"b/\\377\\n\"\n@@ -1 +1 @@\n-a\n+b\n",
    ] {
        let diff = diff.replace("ID", id);
        for diff in [diff.clone(), diff.replace('\n', "\r\n")] {
            for strip in [0, 1] {
                // Without a prefix to strip, some names are ambiguous.
                let Ok(patch) = Patch::parse(diff.as_bytes(), strip) else {
                    assert_eq!(strip, 0, "{diff}");
                    continue;
                };
                let wire = patch
                    .to_wire()
                    .unwrap_or_else(|error| panic!("{error}\n{diff}"));
                assert_eq!(Patch::from_wire(&wire).expect("decoded"), patch, "{diff}");
            }
        }
    }
}

#[test]
fn an_agent_that_does_not_know_the_form_reads_the_same_or_refuses() {
    let diff = "--- a/d/x\n+++ b/d/x\n@@ -1 +1 @@\n-a\n+b\n";
    let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
    let wire = encoded(&patch);
    assert_eq!(Patch::parse(wire.as_bytes(), 0).expect("parsed"), patch);
    assert!(!patch.needs_extensions());
    for body in ["*** Update File: x\n@@\n-d\n+e\n", "*** Delete File: x\n"] {
        let wire = of_begin_patch(body);
        assert!(Patch::parse(wire.as_bytes(), 0).is_err(), "{wire}");
        assert!(Patch::from_wire(wire.as_bytes()).is_ok_and(|patch| patch.needs_extensions()));
    }
    assert_eq!(VERSION, format!("cynode-patch {WIRE_VERSION}\n").as_bytes());
}

#[test]
fn what_a_diff_can_not_say_is_refused() {
    let hunk = "--- \"x\"\n+++ \"x\"\n@@ -1,1 +1,1 @@\n-a\n+b\n";
    let unique = |header: &str| format!("cynode-patch 1\n--- \"x\"\n+++ \"x\"\n{header}\n-a\n+b\n");
    for (wire, expected) in [
        (String::new(), "version"),
        (hunk.to_owned(), "version"),
        (format!("cynode-patch 2\n{hunk}"), "version"),
        ("cynode-patch 1\n".to_owned(), "no file header"),
        (format!("cynode-patch 1\ntext\n{hunk}"), "line 2: the line is no part"),
        (format!("cynode-patch 1\n{hunk}\n"), "line 7: the line is no part"),
        (format!("cynode-patch 1\n{hunk}+c\n"), "line 7: the hunk has more lines"),
        (unique("@@ -1,2 +1,2 @@"), "the diff ends with fewer lines"),
        (unique("@@ @@"), "the hunk header is invalid"),
        (unique("@@ unique -1 +2 @@"), "fewer lines"),
        (unique("@@ unique -0 +0 @@"), "the hunk is empty"),
        (unique("@@ unique -x +1 @@"), "unique hunk is invalid"),
        (unique("@@ unique -1 +1"), "unique hunk is invalid"),
        (unique("@@ unique -1 +1 last @@"), "unique hunk is invalid"),
        (unique("@@ unique -1 +1 \"x @@"), "unique hunk is invalid"),
        (unique("@@ unique -1 +1 @@ x"), "unique hunk is invalid"),
        (unique("@@ unique -99999999999 +1 @@"), "unique hunk is invalid"),
        (unique(&format!("@@ unique -1 +1{} @@", " \"x\"".repeat(9))), "unique hunk is invalid"),
        (
            "cynode-patch 1\ndiff --git \"x\" \"x\"\nnew file mode 100644\ndeleted file any content\n"
                .to_owned(),
            "more than one of",
        ),
        (
            "cynode-patch 1\ndiff --git \"x\" \"x\"\nnew mode 100644\ndeleted file any content\n"
                .to_owned(),
            "changes its mode",
        ),
    ] {
        let error = decode_error(&wire);
        assert!(error.contains(expected), "{wire:?}: {error}");
    }
    let most = unique(&format!("@@ unique -1 +1{} @@", " \"x\"".repeat(8)));
    assert!(Patch::from_wire(most.as_bytes()).is_ok());
    // A real diff with these lines has the meaning that it always had.
    let diff = "--- a/x\n+++ b/x\n@@ unique -1 +1 @@\n-a\n+b\n";
    assert!(Patch::parse(diff.as_bytes(), 1).is_err());
    assert!(Patch::parse_lenient(diff.as_bytes(), 1).is_err());
}

#[test]
fn deletions_of_any_content_have_no_hunks() {
    let wire = "cynode-patch 1\ndiff --git \"x\" \"x\"\ndeleted file any content\n--- \"x\"\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-a\n";
    assert!(decode_error(wire).contains("any content"));
    let wire = "cynode-patch 1\ndiff --git \"x\" \"x\"\ndeleted file any content\nGIT binary patch\nliteral 0\nHcmV?d00001\n\n";
    assert!(decode_error(wire).contains("any content"));
}

#[test]
fn files_hunks_and_bytes_are_bounded() {
    use crate::parse::{MAX_HUNKS, MAX_SECTIONS};
    let files = |count: usize| {
        let section = "diff --git \"x\" \"x\"\ndeleted file any content\n";
        format!("cynode-patch 1\n{}", section.repeat(count))
    };
    assert!(Patch::from_wire(files(MAX_SECTIONS).as_bytes()).is_ok());
    assert!(decode_error(&files(MAX_SECTIONS + 1)).contains("10,000"));
    let hunks = |count: usize| {
        let hunk = "@@ unique -0 +1 @@\n+x\n";
        format!(
            "cynode-patch 1\n--- \"x\"\n+++ \"x\"\n{}",
            hunk.repeat(count)
        )
    };
    assert!(Patch::from_wire(hunks(MAX_HUNKS).as_bytes()).is_ok());
    assert!(decode_error(&hunks(MAX_HUNKS + 1)).contains("100,000"));
    let bytes = |count: usize| {
        let empty = "cynode-patch 1\n--- \"x\"\n+++ \"x\"\n@@ -0,0 +0,1 @@\n+\n";
        empty.replace("+\n", &format!("+{}\n", "x".repeat(count - empty.len())))
    };
    let most = bytes(MAX_WIRE_BYTES);
    let patch = Patch::from_wire(most.as_bytes()).expect("decoded");
    assert_eq!(patch.to_wire().expect("encoded").len(), MAX_WIRE_BYTES);
    assert!(decode_error(&bytes(MAX_WIRE_BYTES + 1)).contains("more than 20971520 bytes"));
}

#[test]
fn a_name_that_is_too_long_when_quoted_is_an_error() {
    let name = "\\001".repeat(15_000);
    let diff = format!("diff --git \"a/{name}\" b/y\nrename from \"{name}\"\nrename to y\n");
    let patch = Patch::parse(diff.as_bytes(), 1);
    assert!(patch.is_ok_and(|patch| patch.to_wire().is_ok()));
    let name = "\u{1}".repeat(60_000);
    let diff = format!("diff --git a/x b/y\nrename from {name}\nrename to y\n");
    let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
    assert!(
        patch
            .to_wire()
            .is_err_and(|error| error.to_string().contains("65536"))
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_048))]
    /// A patch and what the agent decodes have the same effect.
    #[test]
    // invariant: one-reader
    fn a_decoded_patch_is_the_patch_that_was_encoded(
        sections in proptest::collection::vec(section(), 1..5),
        begin in proptest::collection::vec(crate::begin_patch::tests::section(), 1..5),
        strip in 0_u32..3,
    ) {
        let diff = sections.concat();
        if let Ok(patch) = Patch::parse(diff.as_bytes(), strip) {
            wire_round_trip(&patch, &sample_tree());
        }
        let text = format!("*** Begin Patch\n{}*** End Patch\n", begin.concat());
        let patch = Patch::parse_begin_patch(text.as_bytes()).expect("parsed");
        wire_round_trip(&patch, &sample_tree());
        wire_round_trip(&patch, &Memory::default());
    }
}
