//! The fuzz targets: what parses the output of git, and what removes directives from texts.
//!
//! `fuzz/fuzz_targets` calls them from libFuzzer, the tests below with every input of
//! `fuzz/corpus`.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "a panic is how a fuzz target reports a failure"
)]

use super::{
    bundle, defuse,
    output::{
        MODE_GITLINK, MODE_TREE, ObjectHeader, ObjectId, ObjectKind, object_contents,
        object_headers, object_ids, packed_objects, remote_refs, tree_differences, tree_entries,
    },
};

/// A fuzz target.
pub type Target = fn(&[u8]);

/// All targets by name, which is also the name of the corpus.
pub const TARGETS: &[(&str, Target)] = &[("directives", directives), ("objects", objects)];

/// Any text as a title, body, message and name.
pub fn directives(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    for defuse in [defuse::title, defuse::body, defuse::message, defuse::author] {
        let once = defuse(&text);
        defuse::assert_harmless(&once);
        assert_eq!(defuse(&once), once, "repeating it changes {text:?}");
    }
}

/// Any bytes as the output of a git command, chosen by the first byte, or as a bundle: what is
/// accepted is rendered as the same bytes.
pub fn objects(input: &[u8]) {
    let Some((choice, output)) = input.split_first() else {
        return;
    };
    match choice % 8 {
        0 => {
            if let Ok(entries) = tree_entries(output) {
                let mut rendered = Vec::new();
                for entry in entries {
                    let kind = match entry.mode {
                        MODE_TREE => "tree",
                        MODE_GITLINK => "commit",
                        _ => "blob",
                    };
                    rendered.extend(format!("{:06o} {kind} {}\t", entry.mode, entry.id).bytes());
                    rendered.extend_from_slice(&entry.path);
                    rendered.push(0);
                }
                assert_eq!(rendered, output);
            }
        }
        1 => check_differences(output),
        2 => {
            if let Ok(refs) = remote_refs(output) {
                let rendered: Vec<String> = refs
                    .iter()
                    .map(|found| format!("{}\t{}\n", found.id, found.name))
                    .collect();
                assert_eq!(rendered.concat().as_bytes(), output);
            }
        }
        3 => {
            if let Ok(headers) = object_headers(output)
                && let Some(headers) = headers.into_iter().collect::<Option<Vec<_>>>()
            {
                let rendered: String = headers.iter().map(header).collect();
                assert_eq!(rendered.as_bytes(), output);
            }
        }
        4 => {
            if let Ok(contents) = object_contents(output) {
                let mut rendered = Vec::new();
                for (found, range) in contents {
                    rendered.extend(header(&found).bytes());
                    rendered.extend_from_slice(&output[range]);
                    rendered.push(b'\n');
                }
                assert_eq!(rendered, output);
            }
        }
        5 => {
            if let Ok(objects) = packed_objects(output) {
                let lines = output.split(|byte| *byte == b'\n').count();
                assert!(objects.len() < lines.max(1));
            }
        }
        6 => {
            if let Ok(ids) = object_ids(output) {
                let rendered: Vec<String> = ids.iter().map(|id| format!("{id}\n")).collect();
                assert_eq!(rendered.concat().as_bytes(), output);
            }
        }
        _ => {
            if let Ok(header) = bundle::header(output) {
                assert!(output[..header.length].ends_with(b"\n\n"));
                let head = header.head.to_string();
                assert!(
                    output
                        .windows(head.len())
                        .any(|part| part == head.as_bytes())
                );
            }
        }
    }
}

fn header(header: &ObjectHeader) -> String {
    let kind = match header.kind {
        ObjectKind::Blob => "blob",
        ObjectKind::Tree => "tree",
        ObjectKind::Commit => "commit",
        ObjectKind::Tag => "tag",
    };
    format!("{} {kind} {}\n", header.id, header.size)
}

fn check_differences(output: &[u8]) {
    let Ok(differences) = tree_differences(output) else {
        return;
    };
    let mut rendered = Vec::new();
    for difference in differences {
        let any = difference.old.or(difference.new);
        let null = any.map(|(_, id)| id.to_null());
        let side =
            |side: Option<(u32, ObjectId)>| side.or(null.map(|null| (0, null))).expect("a side");
        let ((old_mode, old), (new_mode, new)) = (side(difference.old), side(difference.new));
        let status = match (difference.old, difference.new) {
            (None, _) => 'A',
            (_, None) => 'D',
            _ => 'M',
        };
        rendered.extend(format!(":{old_mode:06o} {new_mode:06o} {old} {new} {status}\0").bytes());
        rendered.extend_from_slice(&difference.path);
        rendered.push(0);
    }
    assert_eq!(rendered.len(), output.len());
    let differs = |(one, other): (&u8, &u8)| one != other && (*one, *other) != (b'M', b'T');
    assert!(!rendered.iter().zip(output).any(differs));
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn every_input_of_the_corpus_passes() {
        for (name, target) in TARGETS {
            let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
                .join("../../fuzz/corpus")
                .join(name);
            let mut inputs: Vec<PathBuf> = fs_err::read_dir(corpus)
                .expect("a corpus")
                .map(|entry| entry.expect("an entry").path())
                .collect();
            inputs.sort();
            assert!(!inputs.is_empty(), "the corpus of {name} is empty");
            for input in inputs {
                let bytes = fs_err::read(&input).expect("a file");
                let outcome = std::panic::catch_unwind(|| target(&bytes));
                assert!(outcome.is_ok(), "{name} fails with {}", input.display());
            }
        }
    }
}
