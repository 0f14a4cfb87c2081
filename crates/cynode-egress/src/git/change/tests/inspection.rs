//! Rules on changes as their objects show them.

use cynode_api::{PromotionVerdict, RepositoryRules};
use cynode_policy::{HeldSecrets, Scanner};

use super::{
    super::{BranchNames, Inspection, Inspector, RuleSet},
    *,
};

const HELD: &str = "correct-horse-battery-staple";

fn token() -> String {
    ["gh", "p_", &"A7q3Zx9LmK2vRt5YwB8n".repeat(2)[..36]].concat()
}

async fn inspect(
    repository: &MirroredRepository,
    built: &BuiltChange,
    rules: &RepositoryRules,
) -> Inspection {
    let mut held = HeldSecrets::new([7; 32]);
    assert!(held.add("a secret of this system", HELD.as_bytes()));
    let scanner = Scanner::new(held, true);
    let branch = format!("cynode/{}/x", repository.task);
    Inspector {
        rules: &RuleSet::new(rules).expect("rules"),
        scanner: &scanner,
        branches: BranchNames {
            task: repository.task,
            branch: &branch,
            target: "main",
            default: Some("main"),
        },
    }
    .inspect(&built.change)
    .await
}

fn refusals(inspection: &Inspection) -> Vec<(&str, Option<&str>)> {
    let refused = |verdict: &&PromotionVerdict| !verdict.allowed;
    inspection
        .verdicts
        .iter()
        .filter(refused)
        .map(|verdict| (verdict.rule.as_str(), verdict.path.as_deref()))
        .collect()
}

async fn files(repository: &MirroredRepository, files: &[(&str, u32, &str)]) -> BuiltChange {
    let base = repository.id("HEAD");
    repository
        .build(ChangesetFormat::Files, tar(files), base)
        .await
        .expect("built")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_rule_refuses_what_it_says_and_a_named_exception_passes() {
    let repository = MirroredRepository::new().await;
    let secret = format!("key = {}\n", token());
    let built = files(
        &repository,
        &[
            ("docs/a.md", 0o644, "a\n"),
            ("deploy/a", 0o644, "a\n"),
            (".github/workflows/ci.yml", 0o644, "on: push\n"),
            ("CODEOWNERS", 0o644, "* @me\n"),
            ("run", 0o755, "#!/bin/sh\n"),
            ("inside@", 0o777, "docs/a.md"),
            ("outside@", 0o777, "../../etc/passwd"),
            ("Numbers", 0o644, "1\n"),
            ("config", 0o644, &secret),
            ("held", 0o644, HELD),
        ],
    )
    .await;
    let list = |globs: &[&str]| globs.iter().map(|glob| (*glob).to_owned()).collect();
    let strict = RepositoryRules {
        deny_paths: list(&["deploy/**"]),
        ..RepositoryRules::default()
    };
    let inspection = inspect(&repository, &built, &strict).await;
    assert!(!inspection.allowed);
    assert_eq!(
        refusals(&inspection),
        [
            ("paths", Some("Numbers")),
            ("paths", Some("deploy/a")),
            ("sensitive", Some(".github/workflows/ci.yml")),
            ("sensitive", Some("CODEOWNERS")),
            ("symlinks", Some("inside")),
            ("symlinks", Some("outside")),
            ("modes", Some("run")),
            ("secrets", Some("config")),
            ("secrets", Some("held")),
        ]
    );
    let lenient = RepositoryRules {
        allow_sensitive: list(&[".github/**", "CODEOWNERS"]),
        allow_flagged: list(&["**"]),
        allow_symlinks: true,
        allow_executables: true,
        ..RepositoryRules::default()
    };
    let inspection = inspect(&repository, &built, &lenient).await;
    assert_eq!(
        refusals(&inspection),
        [
            ("paths", Some("Numbers")),
            ("symlinks", Some("outside")),
            ("secrets", Some("held")),
        ]
    );
    let again = inspect(&repository, &built, &lenient).await;
    assert_eq!(again, inspection);
    let text = format!("{:?}", inspection.verdicts);
    assert!(!text.contains(HELD) && !text.contains(&token()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sizes_and_numbers_are_bounded() {
    let repository = MirroredRepository::new().await;
    let built = files(
        &repository,
        &[
            ("a", 0o644, &"x".repeat(2_000)),
            ("b", 0o644, "x"),
            ("c", 0o644, "x"),
        ],
    )
    .await;
    let rules = RepositoryRules {
        max_files: Some(2),
        max_file_bytes: Some(1_000),
        max_change_bytes: Some(1_500),
        ..RepositoryRules::default()
    };
    let inspection = inspect(&repository, &built, &rules).await;
    assert_eq!(
        refusals(&inspection),
        [("size", None), ("size", None), ("size", Some("a"))]
    );
    let inspection = inspect(&repository, &built, &RepositoryRules::default()).await;
    assert!(inspection.allowed, "{inspection:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_a_change_adds_is_scanned_and_all_that_it_completes() {
    let repository = MirroredRepository::new().await;
    let material = "A7q3Zx9LmK2vRt5YwB8n".repeat(4);
    let begin = ["-----BEGIN ", "RSA PRIVATE", " KEY-----"].concat();
    repository.write("old.txt", format!("{}\nx\n", token()));
    repository.write("key.rs", format!("{begin}\n"));
    repository.commit("a sample that is there already");
    repository.fetch().await;
    let rules = RepositoryRules::default();

    let moved = format!("x\n{}\ny\n", token());
    let built = files(&repository, &[("old.txt", 0o644, &moved)]).await;
    let inspection = inspect(&repository, &built, &rules).await;
    assert!(inspection.allowed, "{inspection:?}");

    let another = format!("{}\nx\n{}\n", token(), token().replace('A', "B"));
    let built = files(&repository, &[("old.txt", 0o644, &another)]).await;
    let inspection = inspect(&repository, &built, &rules).await;
    assert_eq!(refusals(&inspection), [("secrets", Some("old.txt"))]);

    let completed = format!("{begin}\n{material}\n");
    let built = files(&repository, &[("key.rs", 0o644, &completed)]).await;
    let inspection = inspect(&repository, &built, &rules).await;
    assert_eq!(refusals(&inspection), [("secrets", Some("key.rs"))]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_submodule_is_refused_also_when_it_is_only_removed() {
    let repository = MirroredRepository::new().await;
    let id = repository.id("HEAD").to_string();
    repository.git(&[
        "update-index",
        "--add",
        "--cacheinfo",
        &format!("160000,{id},sub"),
    ]);
    let diff = format!("{}\n", repository.git(&["diff", "--cached"]));
    let base = repository.id("HEAD");
    let added = repository.patch(&diff, base).await;
    assert!(matches!(added, Err(ChangeError::Conflict(_))), "{added:?}");
    repository.git(&["commit", "-q", "-m", "a submodule"]);
    repository.fetch().await;
    let built = files(&repository, &[(".cynode/deleted", 0o644, "sub\n")]).await;
    let inspection = inspect(&repository, &built, &RepositoryRules::default()).await;
    assert_eq!(refusals(&inspection), [("modes", Some("sub"))]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_are_never_left_out_of_the_list() {
    let repository = MirroredRepository::new().await;
    let names: Vec<String> = (0..1_500).map(|index| format!("many/{index:04}")).collect();
    let all: Vec<(&str, u32, &str)> = names
        .iter()
        .map(|name| (name.as_str(), 0o755, "x"))
        .collect();
    let built = files(&repository, &all).await;
    let mut rules = RepositoryRules {
        max_files: Some(5_000),
        ..RepositoryRules::default()
    };
    let inspection = inspect(&repository, &built, &rules).await;
    assert_eq!(refusals(&inspection).len(), 1_500);
    rules.allow_executables = true;
    let inspection = inspect(&repository, &built, &rules).await;
    assert!(inspection.allowed);
    assert_eq!(inspection.verdicts.len(), 1_000);
    assert_eq!(inspection.verdicts_total, 1_506);
}
