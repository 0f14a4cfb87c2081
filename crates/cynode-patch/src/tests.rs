use proptest::prelude::*;

use crate::{
    File, Kind, Location, Patch, Plan,
    fuzz::Memory,
    parse::{MAX_HUNKS, MAX_SECTIONS},
    plan::{Operation, plan},
};

pub(crate) fn at(path: &str) -> Location {
    Location::parse(path.as_bytes()).expect("a location")
}

pub(crate) fn bytes(content: &[u8]) -> File {
    File {
        kind: Kind::Regular(0o644),
        bytes: content.to_vec(),
    }
}

fn regular(content: &str) -> File {
    bytes(content.as_bytes())
}

fn link(target: &str) -> File {
    File {
        kind: Kind::Symlink,
        bytes: target.as_bytes().to_vec(),
    }
}

fn tree(files: &[(&str, File)]) -> Memory {
    Memory(
        files
            .iter()
            .map(|(path, file)| (at(path), file.clone()))
            .collect(),
    )
}

/// Files and links that generated patches have a chance to hit.
pub(crate) fn sample_tree() -> Memory {
    tree(&[
        ("f", regular("x\n")),
        ("g", regular("t")),
        ("d/x", regular("x\n")),
        ("d/y", link("t")),
        ("l", link("t")),
    ])
}

fn planned(tree: &Memory, diff: &str) -> Plan<()> {
    let patch = Patch::parse(diff.as_bytes(), 1).expect("parsed");
    plan(tree, &patch).unwrap_or_else(|_| panic!("planned"))
}

/// The tree after applying a diff.
pub(crate) fn patched(mut tree: Memory, diff: &str) -> Memory {
    let rejects = planned(&tree, diff).rejects;
    assert!(tree.patch(diff.as_bytes(), 1), "{rejects:?}");
    tree
}

pub(crate) fn reason(tree: &Memory, diff: &str) -> String {
    let rejects = planned(tree, diff).rejects;
    assert_eq!(rejects.len(), 1, "{rejects:?}");
    rejects[0].reason.clone()
}

fn create_link(path: &str, target: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\nnew file mode 120000\nindex 0000000..1de5659\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{target}\n\\ No newline at end of file\n"
    )
}

fn delete_link(path: &str, target: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\ndeleted file mode 120000\nindex 1de5659..0000000\n--- a/{path}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{target}\n\\ No newline at end of file\n"
    )
}

fn create(path: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\nnew file mode 100644\nindex 0000000..1\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    )
}

fn delete(path: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\ndeleted file mode 100644\nindex 1..0000000\n--- a/{path}\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    )
}

fn change_link(path: &str, old: &str, new: &str) -> String {
    format!(
        "diff --git a/{path} b/{path}\nindex 1..2 120000\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}\n\\ No newline at end of file\n+{new}\n\\ No newline at end of file\n"
    )
}

#[test]
fn a_diff_may_have_the_maximum_of_files_and_hunks_and_no_more() {
    let files = |count: usize| "--- a/q\n+++ b/q\n@@ -0,0 +1 @@\n+\n".repeat(count);
    assert!(Patch::parse(files(MAX_SECTIONS).as_bytes(), 1).is_ok());
    let error = Patch::parse(files(MAX_SECTIONS + 1).as_bytes(), 1).expect_err("one too many");
    assert!(error.to_string().contains("10,000 files"), "{error}");
    let hunks = |count: usize| format!("--- a/q\n+++ b/q\n{}", "@@ -0,0 +1 @@\n+\n".repeat(count));
    assert!(Patch::parse(hunks(MAX_HUNKS).as_bytes(), 1).is_ok());
    let several = format!("{}{}", hunks(MAX_HUNKS), hunks(1));
    for diff in [hunks(MAX_HUNKS + 1), several] {
        let error = Patch::parse(diff.as_bytes(), 1).expect_err("one too many");
        assert!(error.to_string().contains("100,000 hunks"), "{error}");
    }
}

#[test]
fn links_are_created_changed_renamed_copied_and_deleted() {
    let made = patched(Memory::default(), &create_link("l", "../a b"));
    assert_eq!(made, tree(&[("l", link("../a b"))]));
    let changed = patched(made, &change_link("l", "../a b", "/abs"));
    assert_eq!(changed, tree(&[("l", link("/abs"))]));
    let renamed = patched(
        changed,
        "diff --git a/l b/d/m\nsimilarity index 100%\nrename from l\nrename to d/m\n",
    );
    assert_eq!(renamed, tree(&[("d/m", link("/abs"))]));
    let edited = "diff --git a/d/m b/n\nsimilarity index 50%\nrename from d/m\nrename to n\nindex 1..2 120000\n--- a/d/m\n+++ b/n\n@@ -1 +1 @@\n-/abs\n\\ No newline at end of file\n+/abt\n\\ No newline at end of file\n";
    let edited = patched(renamed, edited);
    assert_eq!(edited, tree(&[("n", link("/abt"))]));
    let copied = patched(
        edited,
        "diff --git a/n b/o\nsimilarity index 100%\ncopy from n\ncopy to o\n",
    );
    assert_eq!(
        patched(copied, &delete_link("n", "/abt")),
        tree(&[("o", link("/abt"))])
    );
}

#[test]
fn a_file_becomes_a_link_and_the_reverse_as_git_writes_it() {
    let before = tree(&[("f", regular("x\n"))]);
    let linked = patched(before.clone(), &(delete("f") + &create_link("f", "t")));
    assert_eq!(linked, tree(&[("f", link("t"))]));
    assert_eq!(
        patched(linked, &(delete_link("f", "t") + &create("f"))),
        before
    );
    // A file that moved and left a link behind: git writes the link first.
    let moved = create_link("f", "g")
        + "diff --git a/f b/g\nsimilarity index 100%\nrename from f\nrename to g\n";
    assert_eq!(
        patched(before, &moved),
        tree(&[("f", link("g")), ("g", regular("x\n"))])
    );
}

#[test]
fn a_directory_becomes_a_link_and_the_reverse() {
    let before = tree(&[("d/x", regular("x\n")), ("d/y/z", regular("x\n"))]);
    // git writes the link before the deletions below it.
    let linked = patched(
        before.clone(),
        &(create_link("d", "t") + &delete("d/x") + &delete("d/y/z")),
    );
    assert_eq!(linked, tree(&[("d", link("t"))]));
    assert_eq!(
        patched(
            linked,
            &(delete_link("d", "t") + &create("d/x") + &create("d/y/z"))
        ),
        before
    );
    assert!(
        reason(&before, &(create_link("d", "t") + &delete("d/x")))
            .contains("does not delete 'd/y/z' in it")
    );
    assert_eq!(
        reason(&before, &create_link("d", "t")),
        "the path is a directory"
    );
    let filed = patched(
        before.clone(),
        &(create("d") + &delete("d/x") + &delete("d/y/z")),
    );
    assert_eq!(
        patched(filed, &(delete("d") + &create("d/x") + &create("d/y/z"))),
        before
    );
}

#[test]
fn a_file_below_a_link_of_the_same_diff_is_refused() {
    let empty = Memory::default();
    let linked = tree(&[
        ("l", link("old")),
        ("m", link("old")),
        ("f", regular("x\n")),
    ]);
    let rename = |from: &str, to: &str| {
        format!(
            "diff --git a/{from} b/{to}\nsimilarity index 100%\nrename from {from}\nrename to {to}\n"
        )
    };
    for (tree, diff, expected) in [
        (
            &empty,
            create_link("l", "protected") + &create("l/x"),
            "a symbolic link that the diff creates",
        ),
        (
            &empty,
            create("l/x") + &create_link("l", "protected"),
            "a symbolic link that the diff creates",
        ),
        (
            &empty,
            create_link("a/l", "protected") + &create("./a//l/deep/x"),
            "a symbolic link that the diff creates",
        ),
        (
            &empty,
            create_link("l", "protected") + &create_link("l/m", "x"),
            "a symbolic link that the diff creates",
        ),
        (
            &linked,
            create_link("n", "protected") + &rename("f", "n/f"),
            "a symbolic link that the diff creates",
        ),
        (
            &linked,
            change_link("l", "old", "new") + &create("l/x"),
            "a symbolic link that the diff creates or changes",
        ),
        (
            &linked,
            change_link("l", "old", "new") + &delete("l/x"),
            "a symbolic link that the diff creates or changes",
        ),
        (
            &linked,
            rename("l", "n") + &create("n/x"),
            "which is a symbolic link after the diff",
        ),
        (&linked, create("l/x"), "not a directory"),
        (
            &empty,
            create("z") + &create("z/y"),
            "which is a file after the diff",
        ),
    ] {
        assert!(
            reason(tree, &diff).contains(expected),
            "{diff}: {}",
            reason(tree, &diff)
        );
    }
}

#[test]
fn a_section_must_match_the_type_of_its_file() {
    let both = tree(&[("l", link("t")), ("f", regular("t"))]);
    let plain = |path: &str| {
        format!(
            "--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-t\n\\ No newline at end of file\n+u\n\\ No newline at end of file\n"
        )
    };
    assert!(reason(&both, &plain("l")).contains("mode 120000"));
    assert!(
        reason(
            &both,
            "--- a/l\n+++ /dev/null\n@@ -1 +0,0 @@\n-t\n\\ No newline at end of file\n"
        )
        .contains("mode 120000")
    );
    assert!(reason(&both, &change_link("f", "t", "u")).contains("regular file"));
    assert!(reason(&both, &delete_link("f", "t")).contains("regular file"));
    assert!(
        reason(
            &both,
            "diff --git a/f b/f\nold mode 100644\nnew mode 120000\n"
        )
        .contains("a deletion and a creation")
    );
    assert!(reason(&both, &change_link("l", "s", "u")).contains("expects 's'"));
    for (target, expected) in [
        ("", "empty"),
        (&"t".repeat(crate::MAX_PATH_BYTES + 1), "too long"),
        ("a\0b", "NUL"),
    ] {
        assert!(
            reason(&both, &create_link("n", target)).contains(expected),
            "{expected}"
        );
    }
    assert_eq!(
        patched(
            Memory::default(),
            &create_link("n", &"t".repeat(crate::MAX_PATH_BYTES))
        )
        .0
        .len(),
        1
    );
    let open = create_link("n", "t").replace("\\ No newline at end of file\n", "");
    assert!(reason(&both, &open).contains("newline"));
    assert!(
        reason(
            &both,
            "diff --git a/n b/n\nnew file mode 120000\nindex 0000000..e69de29\n"
        )
        .contains("empty")
    );
}

#[test]
fn only_the_first_rejects_quote_lines() {
    let content = "y".repeat(100);
    let before = tree(&[("f", regular(&format!("{content}\n").repeat(20)))]);
    let hunk = format!(
        "@@ -1,20 +1,19 @@\n{}-x\n",
        format!(" {content}\n").repeat(19)
    );
    // 20 lines of the hunk and 20 of the file, at most 104 bytes each.
    let fit = 128 * 1024 / (20 * 104 + 19 * 104 + 5);
    let diff = format!("--- a/f\n+++ b/f\n{}", hunk.repeat(fit + 1));
    let rejects = planned(&before, &diff).rejects;
    assert_eq!(rejects.len(), fit + 1);
    for (number, reject) in rejects.iter().enumerate() {
        let quotes = (reject.expected.len(), reject.found.len());
        assert_eq!(quotes, if number < fit { (20, 20) } else { (0, 0) });
        assert!(reject.reason.contains("where the diff expects"));
    }
}

#[test]
fn effects_are_reported_in_order() {
    let before = tree(&[("f", regular("x\n"))]);
    let effects = planned(&before, &(delete("f") + &create_link("f", "t"))).effects;
    let reported: Vec<_> = effects
        .iter()
        .map(|effect| {
            (
                effect.operation,
                effect.digest_before.is_some(),
                effect.digest_after.is_some(),
            )
        })
        .collect();
    assert_eq!(
        reported,
        [
            (Operation::Delete, true, false),
            (Operation::Create, false, true)
        ]
    );
}

const NAMES: &[&str] = &[
    "f", "g", "d", "d/x", "d/y", "l", "l/x", "new", "new/x", "./f", "d//x", "zz", "/f", "../f",
    ".git/x", "a b", "",
];

pub(crate) fn section() -> impl Strategy<Value = String> {
    let name = || proptest::sample::select(NAMES);
    let prefix = || proptest::sample::select(&["a/", "b/", "", "/", "x/y/"][..]);
    let hunk = || {
        proptest::sample::select(
            &[
                "@@ -1 +1 @@\n-x\n+y\n",
                "@@ -0,0 +1 @@\n+x\n",
                "@@ -1 +0,0 @@\n-x\n",
                "@@ -1 +1 @@\n-t\n\\ No newline at end of file\n+u\n\\ No newline at end of file\n",
                "@@ -0,0 +1 @@\n+t\n\\ No newline at end of file\n",
                "@@ -1 +0,0 @@\n-t\n\\ No newline at end of file\n",
            ][..],
        )
    };
    let mode = || proptest::sample::select(&["100644", "100755", "120000", "160000"][..]);
    let headers = || {
        prop_oneof![
            Just(String::new()),
            mode().prop_map(|mode| format!("new file mode {mode}\n")),
            mode().prop_map(|mode| format!("deleted file mode {mode}\n")),
            mode().prop_map(|mode| format!("index 1..2 {mode}\n")),
            (mode(), mode()).prop_map(|(old, new)| format!("old mode {old}\nnew mode {new}\n")),
            (name(), name()).prop_map(|(from, to)| format!("rename from {from}\nrename to {to}\n")),
            (name(), name()).prop_map(|(from, to)| format!("copy from {from}\ncopy to {to}\n")),
        ]
    };
    let sides = || {
        prop_oneof![
            2 => (prefix(), name(), prefix(), name(), hunk()).prop_map(|(p, old, q, new, hunk)| format!("--- {p}{old}\n+++ {q}{new}\n{hunk}")),
            3 => (name(), hunk()).prop_map(|(name, hunk)| format!("--- a/{name}\n+++ b/{name}\n{hunk}")),
            2 => (name(), hunk()).prop_map(|(name, hunk)| format!("--- /dev/null\n+++ b/{name}\n{hunk}")),
            2 => (name(), hunk()).prop_map(|(name, hunk)| format!("--- a/{name}\n+++ /dev/null\n{hunk}")),
            2 => Just(String::new()),
        ]
    };
    prop_oneof![
        sides(),
        (name(), name(), headers(), sides()).prop_map(|(old, new, headers, sides)| format!(
            "diff --git a/{old} b/{new}\n{headers}{sides}"
        )),
        (name(), headers(), sides()).prop_map(|(name, headers, sides)| format!(
            "diff --git a/{name} b/{name}\n{headers}{sides}"
        )),
        (name(), proptest::sample::select(&["t", "d", ".."][..]))
            .prop_map(|(path, target)| create_link(path, target)),
        name().prop_map(|path| delete_link(path, "t")),
        name().prop_map(create),
        name().prop_map(delete),
        name().prop_map(|path| change_link(path, "t", "u")),
        (name(), name()).prop_map(|(from, to)| format!(
            "diff --git a/{from} b/{to}\nrename from {from}\nrename to {to}\n"
        )),
    ]
}

/// Hunk headers that are wrong, or right by chance.
fn wrong_header() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(
        &[
            "@@ @@",
            "@@ ... @@ fn",
            "@@ -1,7 +1,9 @@",
            "@@ -3 +3,2 @@",
            "@@ -0,0 +1,2 @@",
            "@@",
        ][..],
    )
}

/// Valid patches in all forms.
const SEEDS: &[&str] = &[
    "--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n x\n+y\n--- a/g\n+++ /dev/null\n@@ -1 +0,0 @@\n-t\n\\ No newline at end of file\n",
    "--- a/f\n+++ b/f\n@@ -1,4 +1,7 @@ fn\n-x\n+y\n\n@@ @@\n+z\n-- \n2.47\n",
    "diff --git a/d/x b/n\nsimilarity index 90%\nrename from d/x\nrename to n\nindex 1..2 100644\n--- a/d/x\n+++ b/n\n@@ -1 +1 @@\n-x\n+y\n",
    "diff --git a/b b/b\nnew file mode 100644\nindex 0000000000000000000000000000000000000000..5facd2ed9352dbb880d8da77888134021ec8f94f\nGIT binary patch\nliteral 10\nRc${M}G%_|ZH8Z!c1ON#i0p0)r\n\nliteral 0\nHcmV?d00001\n\n",
    "*** Begin Patch\n*** Update File: f\n*** Move to: n\n@@ x\n+y\n*** End of File\n*** Add File: m\n+a\n*** Delete File: g\n*** End Patch\n",
    "cynode-patch 1\n--- \"f\"\n+++ \"f\"\n@@ unique -1 +2 end \"w\" @@\n x\n+y\ndiff --git \"g\" \"g\"\ndeleted file any content\n",
    "cynode-patch 1\ndiff --git \"f\" \"f\"\nindex 587be6b4c3f93f93c489c0111bba5596147a26cb..6e94b48a25b2d007f60512ad1ec38050aefc9fef 100644\nGIT binary patch\ndelta 6\nNc${Nmp1{Od1por$0TTcK\n\n",
];

/// A seed with parts of others, and with bytes deleted, repeated and replaced.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let mutation = (0..5_u8, any::<[proptest::sample::Index; 4]>(), any::<u8>());
    let mutations = proptest::collection::vec(mutation, 0..5);
    (0..SEEDS.len(), mutations).prop_map(|(seed, mutations)| {
        let mut text = SEEDS[seed].as_bytes().to_vec();
        for (kind, [one, other, from, to], byte) in mutations {
            let (one, other) = (one.index(text.len() + 1), other.index(text.len() + 1));
            let (start, end) = (one.min(other), one.max(other));
            match kind {
                0 if start < text.len() => text[start] = byte,
                1 => drop(text.drain(start..end)),
                2 => text.extend_from_within(start..end),
                3 => {
                    let donor = from.get(SEEDS).as_bytes();
                    let cut = to.index(donor.len());
                    drop(text.splice(start..start, donor[cut..].iter().copied()));
                }
                _ => text.insert(start, b'\n'),
            }
        }
        text
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8_192))]
    #[test]
    // invariant: one-reader
    fn mutated_patches_keep_their_promises(text in mutated(), strip in 0_u32..3) {
        crate::fuzz::parsed(&text, strip);
        crate::fuzz::forms(&text, strip, &sample_tree());
    }
}

#[test]
fn the_seeds_of_mutations_are_valid() {
    for seed in SEEDS {
        let text = seed.as_bytes();
        let patch = Patch::from_wire(text)
            .or_else(|_| Patch::parse_any(text, 1).map(|(patch, _)| patch))
            .expect(seed);
        let is_binary = patch.sections()[0].binary.is_some();
        assert!(!is_binary || sample_tree().apply(&patch), "{seed}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_096))]
    /// `Memory::patch` asserts that every loaded, changed or reported path is in `Patch::paths`.
    #[test]
    // invariant: one-reader
    fn every_path_that_an_applied_diff_touches_is_named(
        sections in proptest::collection::vec(section(), 1..5),
        strip in 0_u32..3,
    ) {
        let _applied = sample_tree().patch(sections.concat().as_bytes(), strip);
    }

    /// Callers write diffs, diffs with wrong hunk headers and patches that begin with
    /// `*** Begin Patch`; agents get what the gate encodes.
    #[test]
    // invariant: one-reader
    fn the_gate_sees_every_path_and_line_that_an_agent_applies_in_any_form(
        sections in proptest::collection::vec(section(), 1..4),
        headers in proptest::collection::vec(wrong_header(), 1..4),
        begin in proptest::collection::vec(crate::begin_patch::tests::section(), 1..4),
        strip in 0_u32..3,
    ) {
        let tree = sample_tree();
        let diff = sections.concat();
        crate::fuzz::gate_and_agent(diff.as_bytes(), strip, &tree);
        for header in ["@@ -1 +1 @@", "@@ -0,0 +1 @@", "@@ -1 +0,0 @@"] {
            for wrong in &headers {
                let repaired = diff.replace(header, wrong);
                crate::fuzz::gate_and_agent(repaired.as_bytes(), strip, &tree);
            }
        }
        let text = format!("*** Begin Patch\n{}*** End Patch\n", begin.concat());
        crate::fuzz::gate_and_agent(text.as_bytes(), strip, &tree);
    }

    #[test]
    fn the_memory_of_parsing_is_bounded_by_the_length(text in proptest::collection::vec(prop_oneof![
        Just("diff --git ".to_owned()), Just("a/b ".to_owned()), Just("\"a\\040".to_owned()), Just("\n".to_owned()), Just("--- ".to_owned()), Just("+++ ".to_owned()),
        Just("rename from ".to_owned()), Just("@@ -1 +1 @@\n-a\n+b\n".to_owned()),
    ], 0..400)) {
        let diff = text.concat();
        if let Ok(patch) = Patch::parse(diff.as_bytes(), 1) {
            let names: usize = patch.paths().iter().map(|path| path.len()).sum();
            prop_assert!(names <= 2 * diff.len() && patch.sections().len() <= diff.len() / 8);
        }
    }
}
