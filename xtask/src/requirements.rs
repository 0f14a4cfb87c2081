//! Prints each requirement of `docs/requirements.tsv` with the tests that prove it.
//!
//! A test claims requirements in comments above its function:
//!
//! - `// proves: A, B`: the test shows the whole of A and the whole of B.
//! - `// proves: A with other_test and module::*`: the tests show A only together. The companions
//!   are test functions, or all tests of a module.
//! - `// part of: A`: the test shows a part of A. A part never counts as a proof.
//!
//! A claim counts only if its test, and every companion, passed in the last run: in all variants
//! if the test runs once per container runtime. A claim that the run does not confirm is an error.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::root;

/// Written by nextest (see `.config/nextest.toml`).
const JUNIT: &str = "target/nextest/default/junit.xml";

/// The modules that `on_every_runtime!` makes around its tests, one for each runtime.
const RUNTIMES: [&str; 3] = ["podman", "rootless", "docker"];

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
    let run = TestRun::parse(&fs_err::read_to_string(&junit).with_context(|| {
        format!(
            "no test results at {}; run the tests first",
            junit.display()
        )
    })?);
    let (mut proofs, mut parts) = (Tests::new(), Tests::new());
    let mut errors = Vec::new();
    for file in rust_files(&root())? {
        let source = fs_err::read_to_string(&file)?;
        let module = module_path(&file);
        let file_claims = claims(&source).with_context(|| file.display().to_string())?;
        for claim in file_claims {
            if !known.contains(claim.id.as_str()) {
                errors.push(format!(
                    "{}: unknown requirement {}",
                    file.display(),
                    claim.id
                ));
                continue;
            }
            match run.confirm(&module, &claim) {
                Ok(()) if claim.strength == Strength::Whole => {
                    let mut tests = claim.test;
                    for companion in &claim.companions {
                        tests = format!("{tests} with {companion}");
                    }
                    proofs.entry(claim.id).or_default().push(tests);
                }
                Ok(()) => parts.entry(claim.id).or_default().push(claim.test),
                Err(reason) => errors.push(format!(
                    "{}: claimed by {} in {}, but {reason}",
                    claim.id,
                    claim.test,
                    file.display()
                )),
            }
        }
    }
    for id in &ids {
        match (proofs.get(*id), parts.get(*id)) {
            (Some(tests), _) => println!("{id}\t{}", tests.join(", ")),
            (None, Some(tests)) => println!("{id}\t- (in part: {})", tests.join(", ")),
            (None, None) => println!("{id}\t-"),
        }
    }
    let in_part = parts.keys().filter(|id| !proofs.contains_key(*id)).count();
    println!(
        "requirements: {} of {} proven by tests that passed in this run, {in_part} more in part",
        proofs.len(),
        ids.len()
    );
    ensure!(errors.is_empty(), "{}", errors.join("\n"));
    Ok(())
}

/// The tests of each requirement.
type Tests = BTreeMap<String, Vec<String>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strength {
    Whole,
    Part,
}

/// A requirement that the comment above a test names.
#[derive(Debug, PartialEq, Eq)]
struct Claim {
    strength: Strength,
    id: String,
    test: String,
    /// Tests, or modules as `module::*`, without which the test shows only a part.
    companions: Vec<String>,
    /// The test is in the list of `on_every_runtime!`.
    on_every_runtime: bool,
}

/// Reads the claims above the test functions of a file.
fn claims(source: &str) -> Result<Vec<Claim>> {
    let variants = tests_on_every_runtime(source);
    let mut lists: Vec<(Strength, String)> = Vec::new();
    let mut claims = Vec::new();
    // The last line was a list that goes on in the next comment line.
    let mut unfinished = false;
    for line in source.lines() {
        let line = line.trim();
        let marked = [
            (Strength::Whole, "// proves:"),
            (Strength::Part, "// part of:"),
        ]
        .into_iter()
        .find_map(|(strength, marker)| Some((strength, line.strip_prefix(marker)?)));
        let continued = line.strip_prefix("//").filter(|_| unfinished);
        if let Some((strength, list)) = marked {
            lists.push((strength, list.to_owned()));
        } else if let (Some(rest), Some((_, list))) = (continued, lists.last_mut()) {
            list.push_str(rest);
        } else if !lists.is_empty()
            && let Some(test) = function_name(line)
        {
            for (strength, list) in lists.drain(..) {
                let items = list.split(',').map(str::trim);
                for item in items.filter(|item| !item.is_empty()) {
                    let (id, companions) = item.split_once(" with ").unwrap_or((item, ""));
                    ensure!(
                        !id.contains(' '),
                        "'{item}' is not a requirement, nor one 'with' other tests"
                    );
                    claims.push(Claim {
                        strength,
                        id: id.to_owned(),
                        test: test.to_owned(),
                        companions: companions
                            .split(" and ")
                            .map(str::trim)
                            .filter(|name| !name.is_empty())
                            .map(str::to_owned)
                            .collect(),
                        on_every_runtime: variants.contains(test),
                    });
                }
            }
        }
        unfinished = (marked.is_some() || continued.is_some())
            && [",", " with", " and"].iter().any(|end| line.ends_with(end));
    }
    if let Some((_, list)) = lists.first() {
        bail!("no test follows the claim of {list}");
    }
    Ok(claims)
}

/// The name of the function that a line begins.
fn function_name(line: &str) -> Option<&str> {
    let rest = ["async fn ", "fn ", "pub async fn "]
        .into_iter()
        .find_map(|prefix| line.strip_prefix(prefix))?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_')
        .next()
}

/// The functions that `on_every_runtime!` lists.
fn tests_on_every_runtime(source: &str) -> BTreeSet<&str> {
    source
        .split("on_every_runtime!(")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .flat_map(|list| list.split(','))
        .map(str::trim)
        .filter(|name| !name.is_empty())
        .collect()
}

/// The module of a test file, as the names of its tests begin.
fn module_path(file: &Path) -> String {
    let mut parts: Vec<String> = file
        .with_extension("")
        .components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    // `tests/all` is one binary, whose root is no part of the names.
    let root = parts
        .iter()
        .rposition(|part| part == "src")
        .or_else(|| Some(parts.iter().rposition(|part| part == "tests")? + 1));
    parts.drain(..=root.unwrap_or(0).min(parts.len() - 1));
    if parts
        .last()
        .is_some_and(|name| ["mod", "lib", "main"].contains(&name.as_str()))
    {
        parts.pop();
    }
    parts.join("::")
}

/// The test cases of a JUnit report by their full names, with whether they passed.
struct TestRun {
    cases: Vec<(String, bool)>,
}

impl TestRun {
    fn parse(junit: &str) -> Self {
        let cases = junit.split("<testcase ").skip(1).filter_map(|case| {
            let name = case.split("name=\"").nth(1)?.split('"').next()?;
            let (head, rest) = case.split_once('>')?;
            let body = if head.ends_with('/') {
                ""
            } else {
                rest.split("</testcase>").next()?
            };
            let passed = !["<failure", "<error", "<skipped"]
                .iter()
                .any(|element| body.contains(element));
            Some((name.to_owned(), passed))
        });
        Self {
            cases: cases.collect(),
        }
    }

    /// Fails with the reason why this run does not confirm a claim made in `module`.
    fn confirm(&self, module: &str, claim: &Claim) -> Result<(), String> {
        let test = &claim.test;
        if claim.on_every_runtime {
            for runtime in RUNTIMES {
                self.all_passed(&format!("{test} on {runtime}"), |name| {
                    in_module(name, module) && name.ends_with(&format!("::{runtime}::{test}"))
                })?;
            }
        }
        self.all_passed(test, |name| {
            in_module(name, module) && last_part(name) == test
        })?;
        for companion in &claim.companions {
            match companion.strip_suffix("::*") {
                Some(module) => self.all_passed(companion, |name| in_module(name, module))?,
                None => self.all_passed(companion, |name| last_part(name) == companion)?,
            }
        }
        Ok(())
    }

    /// At least one case is selected, and every selected case passed.
    fn all_passed(&self, what: &str, select: impl Fn(&str) -> bool) -> Result<(), String> {
        let mut selected = self
            .cases
            .iter()
            .filter(|(name, _)| select(name))
            .peekable();
        if selected.peek().is_none() {
            return Err(format!("{what} did not run"));
        }
        match selected.find(|(_, passed)| !passed) {
            Some((name, _)) => Err(format!("{name} did not pass")),
            None => Ok(()),
        }
    }
}

fn last_part(name: &str) -> &str {
    name.rsplit("::").next().unwrap_or(name)
}

fn in_module(name: &str, module: &str) -> bool {
    module.is_empty()
        || name
            .strip_prefix(module)
            .is_some_and(|rest| rest.starts_with("::"))
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

    fn claim(strength: Strength, id: &str, test: &str) -> Claim {
        Claim {
            strength,
            id: id.to_owned(),
            test: test.to_owned(),
            companions: Vec::new(),
            on_every_runtime: false,
        }
    }

    fn run(cases: &[(&str, bool)]) -> TestRun {
        let case = |(name, passed): &(&str, bool)| ((*name).to_owned(), *passed);
        TestRun {
            cases: cases.iter().map(case).collect(),
        }
    }

    #[test]
    fn a_claim_belongs_to_the_next_test() {
        let source = "// proves: A-1, B-2\n#[tokio::test]\nasync fn it_holds() {}\nfn other() {}\n";
        assert_eq!(
            claims(source).expect("claims"),
            [
                claim(Strength::Whole, "A-1", "it_holds"),
                claim(Strength::Whole, "B-2", "it_holds")
            ]
        );
    }

    #[test]
    fn a_partial_claim_is_distinguished_from_a_whole_one() {
        let source = "// proves: A\n// part of: B, C\n#[test]\nfn one() {}\n\
                      // part of: A\n#[test]\nfn two() {}\n";
        assert_eq!(
            claims(source).expect("claims"),
            [
                claim(Strength::Whole, "A", "one"),
                claim(Strength::Part, "B", "one"),
                claim(Strength::Part, "C", "one"),
                claim(Strength::Part, "A", "two")
            ]
        );
    }

    #[test]
    fn an_unfinished_list_goes_on_in_the_next_line() {
        let source = "// part of: A,\n// B\n// Not a list.\n\
                      // proves: C with one and\n// two\n#[test]\nfn test() {}\n";
        assert_eq!(
            claims(source).expect("claims"),
            [
                claim(Strength::Part, "A", "test"),
                claim(Strength::Part, "B", "test"),
                Claim {
                    companions: vec!["one".to_owned(), "two".to_owned()],
                    ..claim(Strength::Whole, "C", "test")
                }
            ]
        );
    }

    #[test]
    fn a_claim_names_the_tests_that_it_needs() {
        let source = "// proves: A with one and escape::*, B\n#[test]\nfn test() {}\n";
        let companions = vec!["one".to_owned(), "escape::*".to_owned()];
        assert_eq!(
            claims(source).expect("claims"),
            [
                Claim {
                    companions,
                    ..claim(Strength::Whole, "A", "test")
                },
                claim(Strength::Whole, "B", "test")
            ]
        );
    }

    #[test]
    fn prose_in_a_claim_and_a_claim_without_a_test_are_errors() {
        assert!(claims("// proves: half of A\nfn test() {}\n").is_err());
        assert!(claims("fn test() {}\n// proves: A\n").is_err());
    }

    #[test]
    fn a_test_in_the_list_of_runtimes_has_variants() {
        let source = "on_every_runtime!(\n    one,\n    two\n);\n\
                      // proves: A\nasync fn two(world: World) {}\n\
                      // proves: A\nfn three() {}\n";
        let claims = claims(source).expect("claims");
        assert_eq!(
            claims
                .iter()
                .map(|claim| claim.on_every_runtime)
                .collect::<Vec<_>>(),
            [true, false]
        );
    }

    #[test]
    fn only_passed_tests_count() {
        let junit = r#"<testcase name="a::good" classname="c"/>
            <testcase name="bad" classname="c"><failure type="x"/></testcase>
            <testcase name="fine" classname="c"><system-out>x</system-out></testcase>
            <testcase name="second" classname="c"><flakyFailure type="x"/></testcase>"#;
        assert_eq!(
            TestRun::parse(junit).cases,
            run(&[
                ("a::good", true),
                ("bad", false),
                ("fine", true),
                ("second", true)
            ])
            .cases
        );
    }

    #[test]
    fn every_variant_must_have_passed() {
        let claim = Claim {
            on_every_runtime: true,
            ..claim(Strength::Whole, "A", "test")
        };
        let all = |docker: bool| {
            run(&[
                ("m::podman::test", true),
                ("m::rootless::test", true),
                ("m::docker::test", docker),
            ])
        };
        assert_eq!(all(true).confirm("m", &claim), Ok(()));
        assert_eq!(
            all(false).confirm("m", &claim),
            Err("m::docker::test did not pass".to_owned())
        );
        let two = run(&[("m::podman::test", true), ("m::rootless::test", true)]);
        assert_eq!(
            two.confirm("m", &claim),
            Err("test on docker did not run".to_owned())
        );
    }

    #[test]
    fn a_test_of_the_same_name_elsewhere_does_not_count() {
        let claim = claim(Strength::Whole, "A", "test");
        let elsewhere = run(&[("other::test", true), ("module2::test", true)]);
        assert_eq!(
            elsewhere.confirm("module", &claim),
            Err("test did not run".to_owned())
        );
        assert_eq!(
            run(&[("module::tests::test", true)]).confirm("module", &claim),
            Ok(())
        );
    }

    #[test]
    fn companions_must_have_passed_too() {
        let claim = Claim {
            companions: vec!["friend".to_owned(), "escape::*".to_owned()],
            ..claim(Strength::Whole, "A", "test")
        };
        let cases = |friend: bool, escape: bool| {
            run(&[
                ("m::test", true),
                ("n::friend", friend),
                ("escape::one::docker::x", true),
                ("escape::two::docker::y", escape),
            ])
        };
        assert_eq!(cases(true, true).confirm("m", &claim), Ok(()));
        assert!(cases(false, true).confirm("m", &claim).is_err());
        assert!(cases(true, false).confirm("m", &claim).is_err());
        assert_eq!(
            run(&[("m::test", true), ("n::friend", true)]).confirm("m", &claim),
            Err("escape::* did not run".to_owned())
        );
    }

    #[test]
    fn a_file_has_the_module_of_its_tests() {
        for (file, module) in [
            ("/x/tests/suite/tests/all/escape/bombs.rs", "escape::bombs"),
            ("/x/tests/suite/tests/all/escape.rs", "escape"),
            ("/x/tests/suite/tests/all/main.rs", ""),
            ("/x/crates/c/src/gate/mod.rs", "gate"),
            ("/x/crates/c/src/lib.rs", ""),
        ] {
            assert_eq!(module_path(Path::new(file)), module, "{file}");
        }
    }
}
