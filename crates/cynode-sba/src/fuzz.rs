//! The fuzz targets: all code here that parses hostile input.
//!
//! Each target takes arbitrary bytes and panics if an invariant is violated. `fuzz/fuzz_targets`
//! calls it from libFuzzer, and the tests below call it with every input of `fuzz/corpus`. Targets
//! are named after the input that they parse.
//!
//! Invariants: a target touches nothing outside its own temporary directory, and the same bytes
//! always take the same path through it.
#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a panic is how a fuzz target reports a failure"
)]

mod answers;
mod codec;
mod jobs;

pub use self::answers::answers;
pub use self::codec::{replies, requests};
pub use self::jobs::{jobs, results};
pub use crate::files::fuzz::{archives, diffs, forms, patches, paths, searches};

/// A fuzz target.
pub type Target = fn(&[u8]);

/// All targets by name, which is also the name of the corpus.
pub const TARGETS: &[(&str, Target)] = &[
    ("answers", answers),
    ("archives", archives),
    ("diffs", diffs),
    ("forms", forms),
    ("jobs", jobs),
    ("patches", patches),
    ("paths", paths),
    ("replies", replies),
    ("requests", requests),
    ("results", results),
    ("searches", searches),
];

/// Separates the fields of an input. Valid UTF-8 never contains it, so text can't contain it by
/// chance.
const SEPARATOR: u8 = 0xff;

/// Splits off the first byte of an input, which selects the target's options; fields follow.
pub(crate) fn split(input: &[u8]) -> (u8, &[u8]) {
    input
        .split_first()
        .map_or((0, input), |(options, rest)| (*options, rest))
}

pub(crate) fn fields(input: &[u8]) -> impl Iterator<Item = &[u8]> {
    input.split(|byte| *byte == SEPARATOR)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::PathBuf};

    use proptest::prelude::*;

    use super::*;

    fn fuzz() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
    }

    fn names(directory: PathBuf) -> BTreeSet<String> {
        let stem = |path: PathBuf| {
            path.file_stem()
                .expect("a name")
                .to_string_lossy()
                .into_owned()
        };
        std::fs::read_dir(directory)
            .expect("listed")
            .map(|entry| stem(entry.expect("entry").path()))
            .collect()
    }

    /// Runs a target with every input of its corpus.
    fn replay(name: &str) {
        let (_, target) = TARGETS
            .iter()
            .find(|(target, _)| *target == name)
            .expect("a target");
        let mut inputs: Vec<PathBuf> = std::fs::read_dir(fuzz().join("corpus").join(name))
            .expect("a corpus")
            .map(|entry| entry.expect("entry").path())
            .collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "the corpus of {name} is empty");
        for input in inputs {
            let bytes = std::fs::read(&input).expect("read");
            let outcome = std::panic::catch_unwind(|| target(&bytes));
            assert!(outcome.is_ok(), "{name} fails with {}", input.display());
        }
    }

    #[test]
    fn every_target_has_a_program_and_a_corpus() {
        let targets: BTreeSet<String> =
            TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
        // Those of another crate have a test there.
        let others = ["directives", "inference", "objects"].map(str::to_owned);
        let others = BTreeSet::from(others);
        for directory in ["fuzz_targets", "corpus"] {
            assert_eq!(&names(fuzz().join(directory)) - &others, targets);
        }
    }

    #[test]
    fn answers_of_models_that_fuzzing_found_stay_within_bounds() {
        replay("answers");
    }

    #[test]
    fn archives_that_fuzzing_found_are_handled() {
        replay("archives");
    }

    #[test]
    fn contents_that_fuzzing_found_round_trip_through_their_diff() {
        replay("diffs");
    }

    #[test]
    fn diffs_that_fuzzing_found_apply_completely_or_not_at_all() {
        replay("patches");
    }

    #[test]
    fn patches_of_other_forms_that_fuzzing_found_apply_completely_or_not_at_all() {
        replay("forms");
    }

    #[test]
    fn jobs_that_fuzzing_found_survive_a_round_trip() {
        replay("jobs");
    }

    #[test]
    fn results_that_fuzzing_found_survive_a_round_trip() {
        replay("results");
    }

    #[test]
    fn paths_that_fuzzing_found_stay_inside() {
        replay("paths");
    }

    #[test]
    fn replies_that_fuzzing_found_are_read_in_any_pieces() {
        replay("replies");
    }

    #[test]
    fn requests_that_fuzzing_found_are_read_in_any_pieces() {
        replay("requests");
    }

    #[test]
    fn searches_that_fuzzing_found_match_the_oracle() {
        replay("searches");
    }

    /// Paths that exist in the workspace of `patches`, that don't, and that must not be reached.
    const NAMES: &[&str] = &[
        "file",
        "a",
        "b",
        "dos",
        "empty",
        "dir/inner",
        "alias/inner",
        "new/x",
        "new",
        "final",
        "up/x",
        "out/secret",
        "abs/x",
        ".git/config",
        "../x",
    ];

    /// A nearly valid section of a diff for the workspace of `patches`.
    fn section() -> impl Strategy<Value = String> {
        let name = || {
            prop_oneof![
                proptest::sample::select(NAMES).prop_map(str::to_owned),
                "[ab./]{1,5}"
            ]
        };
        let line = || {
            proptest::sample::select(
                &[
                    " 1\n",
                    " 2\n",
                    "-1\n",
                    "-A\n",
                    "-3\n",
                    "+x\n",
                    "+\n",
                    "-x\n\\ No newline at end of file\n",
                    " 1\r\n",
                ][..],
            )
        };
        let hunk =
            (0_usize..9, proptest::collection::vec(line(), 1..5)).prop_map(|(start, lines)| {
                let count =
                    |other: char| lines.iter().filter(|line| !line.starts_with(other)).count();
                format!(
                    "@@ -{start},{} +{start},{} @@\n{}",
                    count('+'),
                    count('-'),
                    lines.concat()
                )
            });
        let hunks = proptest::collection::vec(hunk, 1..3).prop_map(|hunks| hunks.concat());
        prop_oneof![
            (name(), hunks)
                .prop_map(|(name, hunks)| format!("--- a/{name}\n+++ b/{name}\n{hunks}")),
            name().prop_map(|name| format!("--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n")),
            Just("--- a/a\n+++ /dev/null\n@@ -1 +0,0 @@\n-A\n".to_owned()),
            (name(), name()).prop_map(|(from, to)| format!(
                "diff --git a/{from} b/{to}\nrename from {from}\nrename to {to}\n"
            )),
            (name(), name()).prop_map(|(from, to)| format!(
                "diff --git a/{from} b/{to}\ncopy from {from}\ncopy to {to}\n"
            )),
            name().prop_map(|name| format!(
                "diff --git a/{name} b/{name}\nold mode 100644\nnew mode 100755\n"
            )),
        ]
    }

    /// A path, or a link to create in the tree of `paths`.
    fn place() -> impl Strategy<Value = String> {
        let part =
            || proptest::sample::select(&["a", "b", "x", "y", "file", ".", "..", "", "new"][..]);
        let path = || proptest::collection::vec(part(), 1..5).prop_map(|parts| parts.join("/"));
        let link = ("[xyz]", path()).prop_map(|(name, target)| format!("\n{name} {target}"));
        prop_oneof![2 => path(), 1 => link]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_diff_applies_completely_or_not_at_all_and_reports_its_changes(
            sections in proptest::collection::vec(section(), 1..5),
        ) {
            patches(format!("\x01{}", sections.concat()).as_bytes());
        }

        #[test]
        fn no_path_leaves_its_root_through_links(
            options in any::<u8>(),
            places in proptest::collection::vec(place(), 1..16),
        ) {
            let mut input = vec![options];
            input.extend(
                places
                    .iter()
                    .map(String::as_bytes)
                    .collect::<Vec<_>>()
                    .join(&SEPARATOR),
            );
            paths(&input);
        }

        #[test]
        fn no_target_panics_on_arbitrary_bytes(
            input in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            for (_, target) in TARGETS {
                target(&input);
            }
        }
    }
}
