//! Checks that no crate defines two types with the same name.
//!
//! A name then means one thing throughout a crate, and a search finds its definition. Errors are
//! exempt: each module may have an `Error`. So are tests and types within functions.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Result, ensure};

use crate::{docs::sources, root};

/// Names that every module may define.
const EXEMPT: &[&str] = &["Error", "Result"];

/// Fails if a crate defines two types with the same name.
pub(crate) fn check() -> Result<()> {
    let mut faults = Vec::new();
    let mut crates: Vec<PathBuf> = Vec::new();
    for entry in fs_err::read_dir(root().join("crates"))? {
        crates.push(entry?.path());
    }
    crates.sort();
    for directory in crates {
        let mut files = Vec::new();
        for path in sources(&directory.join("src"))? {
            let text = fs_err::read_to_string(&path)?;
            files.push((path, text));
        }
        faults.extend(duplicates(&files));
    }
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}

/// The type names that several definitions share, with the files that have them.
fn duplicates(files: &[(PathBuf, String)]) -> Vec<String> {
    let mut definitions: BTreeMap<&str, Vec<&Path>> = BTreeMap::new();
    for (path, text) in files {
        if path.components().any(|part| part.as_os_str() == "tests") || path.ends_with("tests.rs") {
            continue;
        }
        for name in defined_types(text) {
            definitions.entry(name).or_default().push(path);
        }
    }
    let shared = definitions.into_iter().filter(|(_, paths)| paths.len() > 1);
    shared
        .map(|(name, paths)| {
            let paths: Vec<String> = paths
                .iter()
                .map(|path| {
                    path.strip_prefix(root())
                        .unwrap_or(path)
                        .display()
                        .to_string()
                })
                .collect();
            format!("the type {name} is defined in {}", paths.join(" and "))
        })
        .collect()
}

/// The types that a file defines at the top level, without items for tests.
fn defined_types(text: &str) -> Vec<&str> {
    let mut types = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line == "#[cfg(test)]" {
            // The item ends at its semicolon or at an unindented brace.
            lines.find(|line| line.ends_with(';') && !line.starts_with(' ') || *line == "}");
        } else if let Some(name) = defined_type(line).filter(|name| !EXEMPT.contains(name)) {
            types.push(name);
        }
    }
    types
}

/// The name of the type whose definition an unindented line begins.
fn defined_type(line: &str) -> Option<&str> {
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.strip_prefix(' ')?,
        None => line,
    };
    let name = ["struct ", "enum ", "union ", "trait ", "type "]
        .iter()
        .find_map(|keyword| line.strip_prefix(keyword))?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
    Some(&name[..end.unwrap_or(name.len())])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_crate_has_two_types_of_one_name() -> Result<()> {
        check()
    }

    #[test]
    fn a_second_definition_is_found_in_any_file_except_tests() {
        let file = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
        let files = [
            file(
                "src/one.rs",
                "#[cfg(test)]\nmod tests;\nstruct Line;\npub enum Kind<T> {}\n\
                 pub(crate) type Error = u8;\nfn f() {\n    struct Inner;\n}\n\
                 #[cfg(test)]\nmod checks {\n    use super::*;\n}\n",
            ),
            file("src/two.rs", "pub(super) trait Line {}\nenum Error {}\n"),
            file("src/one/tests.rs", "struct Kind;\n"),
            file("src/three/tests/all.rs", "struct Kind;\n"),
            file("src/three.rs", "fn g() {\n    struct Inner;\n}\n"),
        ];
        assert_eq!(
            duplicates(&files),
            ["the type Line is defined in src/one.rs and src/two.rs"]
        );
        let twice = [file("src/one.rs", "struct Line;\nunion Line {}\n")];
        assert_eq!(duplicates(&twice).len(), 1);
    }
}
