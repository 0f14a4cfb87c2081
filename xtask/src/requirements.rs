//! Prints each requirement with the tests that prove it, counting only tests that passed in the last run.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::root;

/// Written by nextest (see `.config/nextest.toml`).
const JUNIT: &str = "target/nextest/default/junit.xml";

pub(crate) fn report() -> Result<()> {
    let table = fs_err::read_to_string(root().join("docs/requirements.tsv"))?;
    let ids: Vec<&str> = table
        .lines()
        .skip(1)
        .filter_map(|line| line.split('\t').next())
        .filter(|id| !id.is_empty())
        .collect();
    let known: BTreeSet<&str> = ids.iter().copied().collect();
    ensure!(
        known.len() == ids.len(),
        "docs/requirements.tsv names an id twice"
    );

    let junit = root().join(JUNIT);
    let passed = passed_tests(&fs_err::read_to_string(&junit).with_context(|| {
        format!(
            "no test results at {}; run the tests first",
            junit.display()
        )
    })?);
    let mut proofs: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut unknown = Vec::new();
    let mut unproven = Vec::new();
    for file in rust_files(&root())? {
        let source = fs_err::read_to_string(&file)?;
        for (id, test) in claims(&source) {
            if !known.contains(id.as_str()) {
                unknown.push(format!("{}: unknown requirement {id}", file.display()));
            } else if passed.contains(&test) {
                proofs.entry(id).or_default().push(test);
            } else {
                unproven.push(format!(
                    "{id}: claimed by {test}, which did not run or did not pass"
                ));
            }
        }
    }
    let mut shown = 0;
    for id in &ids {
        match proofs.get(*id) {
            Some(tests) => {
                shown += 1;
                println!("{id}\t{}", tests.join(", "));
            }
            None => println!("{id}\t-"),
        }
    }
    println!(
        "requirements: {shown} of {} proven by tests that passed in this run",
        ids.len()
    );
    ensure!(unknown.is_empty(), "{}", unknown.join("\n"));
    ensure!(unproven.is_empty(), "{}", unproven.join("\n"));
    Ok(())
}

/// `// proves: A, B` above a test function: the ids with the function's name.
fn claims(source: &str) -> Vec<(String, String)> {
    let mut pending: Vec<String> = Vec::new();
    let mut claims = Vec::new();
    for line in source.lines() {
        let line = line.trim();
        if let Some(list) = line.strip_prefix("// proves:") {
            pending.extend(
                list.split(',')
                    .map(|id| id.trim().to_owned())
                    .filter(|id| !id.is_empty()),
            );
        } else if let Some(rest) = line
            .strip_prefix("async fn ")
            .or_else(|| line.strip_prefix("fn "))
            .or_else(|| line.strip_prefix("pub async fn "))
            && !pending.is_empty()
        {
            let name: String = rest
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            claims.extend(pending.drain(..).map(|id| (id, name.clone())));
        }
    }
    claims
}

/// The last part of the name of every test case without a failure.
fn passed_tests(junit: &str) -> BTreeSet<String> {
    junit
        .split("<testcase ")
        .skip(1)
        .filter(|case| {
            let end = if case
                .split('>')
                .next()
                .is_some_and(|head| head.ends_with('/'))
            {
                0
            } else {
                case.find("</testcase>").unwrap_or(case.len())
            };
            !case[..end].contains("<failure")
                && !case[..end].contains("<error")
                && !case[..end].contains("<skipped")
        })
        .filter_map(|case| {
            let name = case.split("name=\"").nth(1)?.split('"').next()?;
            name.rsplit("::").next().map(str::to_owned)
        })
        .collect()
}

fn rust_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut pending = vec![directory.to_path_buf()];
    while let Some(directory) = pending.pop() {
        for entry in fs_err::read_dir(&directory)? {
            let path = entry?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if path.is_dir() {
                if name != "target" && name != ".git" && name != "xtask" {
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
    fn a_claim_belongs_to_the_next_test() {
        let source = "// proves: A-1, B-2\n#[tokio::test]\nasync fn it_holds() {}\nfn other() {}\n";
        assert_eq!(
            claims(source),
            [
                ("A-1".to_owned(), "it_holds".to_owned()),
                ("B-2".to_owned(), "it_holds".to_owned())
            ]
        );
    }

    #[test]
    fn only_passed_tests_count() {
        let junit = r#"<testcase name="a::good" classname="c"/><testcase name="bad" classname="c"><failure type="x"/></testcase><testcase name="fine" classname="c"><system-out>x</system-out></testcase>"#;
        assert_eq!(
            passed_tests(junit),
            BTreeSet::from(["good".to_owned(), "fine".to_owned()])
        );
    }
}
