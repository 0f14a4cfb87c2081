//! Generates `docs/invariants.md` and the reference documents, and checks that documents name only
//! what exists.
//!
//! A test that fails when an invariant breaks says so in a comment above its `fn` line:
//! `// invariant: nothing-lost, jobs`. The names are those of [`INVARIANTS`].

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::root;

/// The list of tests by invariant.
const INVARIANTS_FILE: &str = "docs/invariants.md";
const MARKER: &str = "// invariant:";

/// Each invariant by name, with what it says. The first [`ARCHITECTURE_INVARIANTS`] are those of
/// ARCHITECTURE.md, the others are promises of one subsystem.
const INVARIANTS: &[(&str, &str)] = &[
    (
        "no-way-out",
        "A sandbox has no way out but Unix sockets that the worker accepted",
    ),
    (
        "no-secrets-inside",
        "No secret of the system is ever in a sandbox",
    ),
    (
        "no-host-paths",
        "The host never opens a path inside a live workspace by name",
    ),
    (
        "one-reader",
        "The gate and the agent parse one format with one parser",
    ),
    ("fail-closed", "Fail closed"),
    ("nothing-lost", "Nothing is lost"),
    (
        "deadlines",
        "A deadline ends every process that the exec started, and no call can hang",
    ),
    (
        "intent-and-outcome",
        "Every effect has an audit intent before it and exactly one outcome before its response",
    ),
    (
        "bounded",
        "Everything is bounded, and a slow reader blocks only its own program",
    ),
    ("no-starvation", "No caller starves another"),
    (
        "truth-in-the-database",
        "The truth lives in PostgreSQL and the object store",
    ),
    (
        "api-boundaries",
        "Boundaries between crates, roles and versions hold",
    ),
    (
        "gate",
        "Refusals and outcomes are recorded as they happened",
    ),
    (
        "tools",
        "A tool call is authorized and recorded as any other call",
    ),
    (
        "policies",
        "Policies decide as their text says, and on every orchestrator",
    ),
    ("quotas", "Quotas hold under concurrency"),
    ("audit-trail", "Tampering with the audit trail is detected"),
    ("calls", "A node can prove what a call did"),
    (
        "control-plane",
        "Orchestrators and nodes agree after any failure",
    ),
    ("exactly-once", "A job runs once"),
    ("images", "Only the intended image runs"),
    ("tls", "Nothing secret leaves a machine without TLS"),
    (
        "jobs",
        "A job ends in the state that its command earned, and keeps its result",
    ),
    ("warm-pool", "A pooled sandbox is as good as a new one"),
    (
        "node-memory",
        "Sandboxes together leave the machine its reserve",
    ),
    ("disk", "A full disk is the sandbox's own"),
    (
        "host-ids",
        "No two sandboxes share host ids unless allowed by name",
    ),
    (
        "agent",
        "An exec id starts once, and the runtime's exec works without the agent",
    ),
    (
        "supervisor",
        "The supervisor leaves nothing behind and its roles recover",
    ),
    ("backup", "A backup is restored whole or not at all"),
    ("upgrade", "An upgrade interrupts no session"),
];
const ARCHITECTURE_INVARIANTS: usize = 11;

/// Directories of the repository in which documents name files.
const TOP_LEVEL: &[&str] = &[
    "benches/",
    "crates/",
    "dist/",
    "docs/",
    "examples/",
    "fuzz/",
    "images/",
    "openapi/",
    "scripts/",
    "tests/",
    "xtask/",
];

/// Writes all generated documents, then checks the written ones.
pub(crate) fn write() -> Result<()> {
    fs_err::write(root().join(INVARIANTS_FILE), invariants()?)?;
    cargo(&["build", "--locked", "-p", "cynode"])?;
    cargo(&[
        "test",
        "--locked",
        "-p",
        "cynode-tests",
        "--test",
        "all",
        "--",
        "reference::",
    ])?;
    let faults = wrong_references()?;
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    println!("docs: written, and every path and function that documents name exists");
    Ok(())
}

/// Runs cargo; tests of generated files write them anew.
fn cargo(arguments: &[&str]) -> Result<()> {
    let status = Command::new(env!("CARGO"))
        .args(arguments)
        .env("CYNODE_REGENERATE", "1")
        .current_dir(root())
        .status()
        .context("starting cargo")?;
    ensure!(status.success(), "cargo {} failed", arguments.join(" "));
    Ok(())
}

/// The text of `docs/invariants.md`.
fn invariants() -> Result<String> {
    let mut tests: BTreeMap<String, BTreeSet<(String, String)>> = BTreeMap::new();
    for file in sources(&root())? {
        let path = file.strip_prefix(root())?.display().to_string();
        if path.starts_with("xtask/") {
            continue;
        }
        for (name, test) in marked_tests(&fs_err::read_to_string(&file)?) {
            ensure!(
                INVARIANTS.iter().any(|(known, _)| *known == name),
                "{path}: unknown invariant '{name}'; xtask/src/docs.rs lists them"
            );
            tests.entry(name).or_default().insert((path.clone(), test));
        }
    }
    let mut text = String::from(
        "# Invariants and their tests\n\n\
         Generated by `cargo xtask docs` from the comments `// invariant: NAME` above tests. A test\n\
         listed here fails when the invariant breaks. The first part are the invariants of\n\
         [ARCHITECTURE.md](../ARCHITECTURE.md#invariants), the second are promises of single\n\
         subsystems ([design](design/README.md)).\n",
    );
    for (index, (name, title)) in INVARIANTS.iter().enumerate() {
        match index {
            0 => text.push_str("\n# Invariants\n"),
            ARCHITECTURE_INVARIANTS => text.push_str("\n# Subsystems\n"),
            _ => {}
        }
        let listed = tests.get(*name);
        let listed = listed.with_context(|| format!("no test has '{MARKER} {name}'"))?;
        text.extend(["\n## ", title, "\n`", name, "`\n\n"]);
        let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (path, test) in listed {
            by_file.entry(path).or_default().push(test);
        }
        for (path, tests) in by_file {
            text.extend(["- ", path, "\n"]);
            for test in tests {
                text.extend(["  - `", test, "`\n"]);
            }
        }
    }
    Ok(text)
}

/// The functions below a marker, each with the names in it.
fn marked_tests(source: &str) -> Vec<(String, String)> {
    let mut pending: Vec<String> = Vec::new();
    let mut marked = Vec::new();
    for line in source.lines().map(str::trim) {
        if let Some(names) = line.strip_prefix(MARKER) {
            pending.extend(names.split(',').map(|name| name.trim().to_owned()));
        } else if let Some(function) = function_name(line) {
            marked.extend(pending.drain(..).map(|name| (name, function.to_owned())));
        }
    }
    marked
}

/// The name of the function that a line begins.
fn function_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let qualifiers = ["pub", "async", "const", "unsafe", "extern"];
    if !before.split_whitespace().all(|word| {
        qualifiers
            .iter()
            .any(|qualifier| word.starts_with(qualifier))
    }) {
        return None;
    }
    let end = after.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    Some(&after[..end])
}

/// The documents whose references are checked.
fn checked_documents() -> Result<Vec<PathBuf>> {
    let mut documents: Vec<PathBuf> = ["ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"]
        .map(|name| root().join(name))
        .to_vec();
    for directory in ["docs/design", "docs/decisions"] {
        for entry in fs_err::read_dir(root().join(directory))? {
            documents.push(entry?.path());
        }
    }
    documents.sort();
    Ok(documents)
}

/// Paths, functions and types in backticks that do not exist.
fn wrong_references() -> Result<Vec<String>> {
    let mut sources_by_path = BTreeMap::new();
    for file in sources(&root())? {
        let text = fs_err::read_to_string(&file)?;
        sources_by_path.insert(file, text);
    }
    let words: BTreeSet<&str> = sources_by_path
        .values()
        .flat_map(|text| text.split(|c: char| !c.is_alphanumeric() && c != '_'))
        .collect();
    let mut faults = Vec::new();
    for document in checked_documents()? {
        let name = document.strip_prefix(root())?.display().to_string();
        let text = fs_err::read_to_string(&document)?;
        let wrong = wrong_references_of(&text, &sources_by_path, &words);
        faults.extend(wrong.into_iter().map(|fault| format!("{name}: {fault}")));
    }
    Ok(faults)
}

/// The faults of one document. A path begins at the root, or with a directory that the document
/// names in full. `name()` is a function of a file that the same paragraph or list item names, and
/// `Type::name()` one in an `impl` of the type there; `Name` is a word of the sources.
fn wrong_references_of(
    document: &str,
    sources: &BTreeMap<PathBuf, String>,
    words: &BTreeSet<&str>,
) -> Vec<String> {
    let bases: Vec<PathBuf> = code_spans(document)
        .into_iter()
        .filter(|span| is_rooted(span))
        .map(|span| root().join(span))
        .filter(|path| path.is_dir())
        .collect();
    let mut faults = Vec::new();
    for block in blocks(document) {
        let spans = code_spans(&block);
        let mut files = Vec::new();
        for span in &spans {
            if span.contains(['<', '*', '{', '…', ' ', '$', ':']) {
                continue;
            }
            let rooted = is_rooted(span);
            let is_source = Path::new(span).extension().is_some_and(|kind| kind == "rs");
            if !rooted && !is_source {
                continue;
            }
            let candidates = if rooted {
                vec![root().join(span)]
            } else {
                bases.iter().map(|base| base.join(span)).collect()
            };
            let existing: Vec<PathBuf> = candidates
                .into_iter()
                .filter(|path| path.exists())
                .collect();
            if existing.is_empty() {
                faults.push(format!("`{span}` does not exist"));
            }
            files.extend(existing);
        }
        for span in &spans {
            if let Some((owner, function)) = called_function(span) {
                let defined = |file: &PathBuf| {
                    sources
                        .get(file)
                        .is_some_and(|text| defines(text, owner, function))
                };
                if !files.iter().any(defined) {
                    faults.push(format!(
                        "`{span}` is no function of a file that its paragraph names"
                    ));
                }
            } else if is_type(span)
                && let Some(unknown) = span.split("::").find(|part| !words.contains(part))
            {
                faults.push(format!("`{span}`: no source has '{unknown}'"));
            }
        }
    }
    faults
}

fn is_rooted(span: &str) -> bool {
    TOP_LEVEL
        .iter()
        .any(|directory| span.starts_with(directory))
}

fn is_word(text: &str) -> bool {
    text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

/// The type, if any, and the name in `name()` or `Type::name()`.
fn called_function(span: &str) -> Option<(Option<&str>, &str)> {
    let path = span.strip_suffix("()")?;
    let (owner, name) = match path.rsplit_once("::") {
        Some((owner, name)) => (Some(owner), name),
        None => (None, path),
    };
    (is_word(name) && owner.is_none_or(is_word)).then_some((owner, name))
}

/// Returns whether a source defines a function, in an `impl` of its type or in its module if it has
/// one. An `impl` block begins unindented, as rustfmt writes it.
fn defines(source: &str, owner: Option<&str>, function: &str) -> bool {
    let mut current: Option<&str> = None;
    source.lines().any(|line| {
        if let Some(header) = line.strip_prefix("impl") {
            current = Some(header);
        } else if line == "}" {
            current = None;
        }
        function_name(line.trim()) == Some(function)
            && owner.is_none_or(|owner| {
                current.is_some_and(|header| {
                    header
                        .split(|c: char| !c.is_alphanumeric() && c != '_')
                        .any(|word| word == owner)
                })
            })
    })
}

/// `Name` or `Name::part`.
fn is_type(span: &str) -> bool {
    span.starts_with(|c: char| c.is_ascii_uppercase())
        && span.contains(|c: char| c.is_ascii_lowercase())
        && span
            .chars()
            .all(|c| c.is_alphanumeric() || c == '_' || c == ':')
}

/// Paragraphs and list items, without fenced code.
fn blocks(document: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    let mut is_fenced = false;
    for line in document.lines() {
        if line.starts_with("```") {
            is_fenced = !is_fenced;
            continue;
        }
        if is_fenced {
            continue;
        }
        let start = line.trim_start();
        let is_item = start.starts_with("- ")
            || start.starts_with('|')
            || start
                .split_once(". ")
                .is_some_and(|(number, _)| number.parse::<u32>().is_ok());
        if is_item || start.is_empty() {
            blocks.push(String::new());
        }
        if let Some(block) = blocks.last_mut() {
            block.push_str(line);
            block.push('\n');
        }
    }
    blocks
}

/// The text between single backticks.
fn code_spans(text: &str) -> Vec<&str> {
    text.split('`')
        .enumerate()
        .filter_map(|(index, part)| (index % 2 == 1).then_some(part))
        .filter(|span| !span.is_empty() && !span.contains('\n'))
        .collect()
}

/// The Rust files below a directory.
pub(crate) fn sources(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut pending = vec![directory.to_path_buf()];
    while let Some(directory) = pending.pop() {
        for entry in fs_err::read_dir(&directory)? {
            let path = entry?.path();
            if path.is_dir() {
                let name = path.file_name().unwrap_or_default();
                if name != "target" && name != ".git" {
                    pending.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_tests_by_invariant_is_current() -> Result<()> {
        let current = fs_err::read_to_string(root().join(INVARIANTS_FILE))?;
        ensure!(
            current == invariants()?,
            "{INVARIANTS_FILE} is out of date; run: cargo xtask docs"
        );
        Ok(())
    }

    #[test]
    fn documents_name_only_what_exists() -> Result<()> {
        let faults = wrong_references()?;
        ensure!(
            faults.is_empty(),
            "{}\ncorrect the documents; 'cargo xtask docs' checks them again",
            faults.join("\n")
        );
        Ok(())
    }

    #[test]
    fn readme_and_architecture_stay_short() -> Result<()> {
        for (name, limit) in [("README.md", 1_000), ("ARCHITECTURE.md", 3_500)] {
            let text = fs_err::read_to_string(root().join(name))?;
            let words = text.split_whitespace().count();
            ensure!(
                words <= limit,
                "{name} has {words} words, at most {limit} fit"
            );
        }
        Ok(())
    }

    #[test]
    fn an_invariant_belongs_to_the_next_function() {
        let source = "// invariant: a, b\nasync fn first() {}\nfn second() {}\n\
                      // a fn of no concern\n// invariant: c\n    pub(crate) fn third<T>() {}\n";
        let pair = |name: &str, test: &str| (name.to_owned(), test.to_owned());
        assert_eq!(
            marked_tests(source),
            [pair("a", "first"), pair("b", "first"), pair("c", "third")]
        );
    }

    #[test]
    fn wrong_names_in_documents_are_found() -> Result<()> {
        let file = root().join("xtask/src/docs.rs");
        let sources = BTreeMap::from([(file.clone(), fs_err::read_to_string(&file)?)]);
        let words = BTreeSet::from(["Known"]);
        let wrong = |text: &str| wrong_references_of(text, &sources, &words);
        assert!(wrong("`xtask/src/docs.rs`: `write()` and `Known`, `a b`, `word`").is_empty());
        assert!(wrong("In `xtask/src/`:\n\n- `docs.rs`: `cargo()`").is_empty());
        assert_eq!(wrong("`xtask/src/gone.rs`").len(), 1);
        assert_eq!(wrong("`docs.rs` relative to nothing").len(), 1);
        assert_eq!(wrong("`xtask/src/docs.rs`: `no_such()`").len(), 1);
        assert_eq!(wrong("`xtask/src/docs.rs`\n\nanother: `write()`").len(), 1);
        assert_eq!(wrong("`Known` and `UnknownType`").len(), 1);
        assert_eq!(wrong("`xtask/src/docs.rs`: `Known::write()`").len(), 1);
        Ok(())
    }

    #[test]
    fn a_function_of_a_type_is_found_in_its_impl_only() {
        let source = "impl<T> One<T> {\n    pub fn first() {}\n}\n\nimpl Read for Two {\n    \
                      fn second() {}\n}\nfn third() {}\n";
        assert!(defines(source, Some("One"), "first"));
        assert!(defines(source, Some("Two"), "second"));
        assert!(defines(source, None, "first") && defines(source, None, "third"));
        for (owner, function) in [("Two", "first"), ("One", "second"), ("One", "third")] {
            assert!(
                !defines(source, Some(owner), function),
                "{owner}::{function}"
            );
        }
        assert_eq!(
            called_function("One::first()"),
            Some((Some("One"), "first"))
        );
        assert_eq!(called_function("first()"), Some((None, "first")));
        assert_eq!(called_function("One::first"), None);
    }
}
