//! What is refused, and that nothing of it reaches the repository.

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{GitBehaviour, GitServer};
use serde_json::{Value, json};

use super::{FIX, GitFixture, PATH, creates, fixes, refused, replaces};
use crate::orchestrator::postgres::psql;

/// Deterministic characters with which no real secret begins.
fn letters(count: usize) -> String {
    "A7q3Zx9LmK2vRt5YwB8nCd4F"
        .chars()
        .cycle()
        .take(count)
        .collect()
}

impl GitFixture {
    /// Promotes a patch, which a rule must refuse. Returns the problem.
    fn assert_refused(&self, repository: &str, branch: &str, patch: &str) -> Result<Value> {
        let artifact = self.patch(&format!("{branch}.patch"), patch)?;
        let base = self.served.tip("main")?;
        let result = self.promote_artifact(&artifact, repository, &base, branch)?;
        let (exit, code, problem) = refused(&result).context(branch.to_owned())?;
        ensure!(
            exit == 64 || exit == 77,
            "{branch}: {exit} {code} {problem}"
        );
        Ok(problem)
    }
}

// part of: ISC-09, ISC-10, ISC-11
#[tokio::test]
async fn changes_that_a_rule_forbids_are_refused_with_the_rule() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    let rules = json!({
        "allow_paths": ["**"],
        "deny_paths": ["secret/**"],
        "protected_branches": ["cynode/*/release"],
        "max_file_bytes": 2_000,
        "max_files": 3,
    });
    fixture.register("ruled", "own", &rules, &[])?.success()?;
    let token = ["gh", "p_", &letters(36)].concat();
    let many: String = (0..4)
        .map(|n| creates(&format!("many/{n}"), "100644", "x\n"))
        .collect();
    for (branch, rule, path, patch) in [
        (
            "path",
            "paths",
            "secret/key",
            creates("secret/key", "100644", "x\n"),
        ),
        (
            "ci",
            "sensitive",
            ".github/workflows/ci.yml",
            replaces(".github/workflows/ci.yml", "on: push", "on: [push, fork]"),
        ),
        (
            "owners",
            "sensitive",
            "CODEOWNERS",
            creates("CODEOWNERS", "100644", "* @me\n"),
        ),
        (
            "modules",
            "sensitive",
            ".gitmodules",
            creates(".gitmodules", "100644", "[submodule \"x\"]\n"),
        ),
        (
            "attributes",
            "sensitive",
            "src/.gitattributes",
            creates("src/.gitattributes", "100644", "* filter=x\n"),
        ),
        (
            "large",
            "size",
            "large",
            creates("large", "100644", &"x\n".repeat(1_500)),
        ),
        ("many", "size", "", many),
        (
            "secret",
            "secrets",
            "notes",
            creates("notes", "100644", &format!("token {token}\n")),
        ),
        (
            "link",
            "symlinks",
            "out",
            creates("out", "120000", "../../../etc/passwd"),
        ),
        ("mode", "modes", "run", creates("run", "100755", "x\n")),
        ("release", "branch", "", fixes()),
    ] {
        let problem = fixture.assert_refused("ruled", branch, &patch)?;
        let text = problem.to_string();
        ensure!(
            text.contains(rule) && text.contains(path) && !text.contains(&token),
            "{branch}: {problem}"
        );
    }
    // Names that git itself could not hold are not even patches.
    for (branch, path) in [("git", ".git/hooks/pre-commit"), ("up", "../outside")] {
        fixture.assert_refused("ruled", branch, &creates(path, "100755", "x\n"))?;
    }
    fixture.assert_untouched()?;
    fixture.assert_presented()?;
    fixture.down()
}

// proves: ISC-11
#[tokio::test]
async fn a_conflict_names_file_hunk_and_newer_base_and_changes_nothing() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    let base = fixture.served.tip("main")?;
    let artifact = fixture.patch("fix.patch", &fixes())?;
    // Somebody else changes the same line meanwhile.
    let newer = fixture.served.commit(
        "main",
        &[("sum.sh", "#!/bin/sh\necho $(($1 * $2))\n")],
        "Multiply",
    )?;
    let stale = fixture.promote_artifact(&artifact, "shop", &newer, "stale")?;
    let (exit, _, problem) = refused(&stale)?;
    assert_eq!(exit, 64, "{problem}");
    let conflict = problem["conflict"].to_string();
    ensure!(conflict.contains("sum.sh"), "{problem}");
    ensure!(
        problem["violations"][0]["path"]
            .as_str()
            .is_some_and(|place| place.starts_with("sum.sh")),
        "{problem}"
    );
    fixture.assert_untouched()?;

    // The base of the changes is behind: the answer offers the newer one.
    let behind = fixture.promote_artifact(&artifact, "shop", &base, "behind")?;
    if behind.code != Some(0) {
        let (_, _, problem) = refused(&behind)?;
        ensure!(problem.to_string().contains(&newer), "{problem}");
        fixture.assert_untouched()?;
    }
    fixture.down()
}

#[tokio::test]
async fn an_artifact_that_was_changed_in_the_store_is_refused() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    let artifact = fixture.patch("fix.patch", &fixes())?;
    let sha256 =
        fixture.json(&["artifact", "list", "--task", &fixture.task])?["items"][0]["sha256"]
            .as_str()
            .context("a hash")?
            .to_owned();
    let blob = fixture
        .stack
        .world
        .state_dir()
        .join("artifacts/sha256")
        .join(&sha256[..2])
        .join(&sha256);
    fs_err::write(&blob, fixes().replace("$1 + $2", "$1 * $2"))?;
    let base = fixture.served.tip("main")?;
    let result = fixture.promote_artifact(&artifact, "shop", &base, "changed")?;
    ensure!(result.code != Some(0), "{result:?}");
    fixture.assert_untouched()?;
    fixture.down()
}

// proves: ISC-10 with orchestrator::git::approval::*
#[tokio::test]
async fn a_check_gates_the_push_by_the_exit_code_that_the_worker_saw() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    fixture
        .register(
            "checked",
            "own",
            &json!({}),
            &["--check", "test=sh test.sh"],
        )?
        .success()?;
    let base = fixture.served.tip("main")?;
    // Claims of success inside the change count for nothing.
    let wrong = creates("result.json", "100644", "{\"exit_code\": 0}\n");
    let artifact = fixture.patch("wrong.patch", &wrong)?;
    let result = fixture.promote_artifact(&artifact, "checked", &base, "wrong")?;
    let (_, code, problem) = refused(&result)?;
    ensure!(problem.to_string().contains("test"), "{code}: {problem}");
    fixture.assert_untouched()?;

    let artifact = fixture.patch("fix.patch", &fixes())?;
    let done = fixture
        .promote_artifact(&artifact, "checked", &base, "right")?
        .json()?;
    assert_eq!(done["state"], "done", "{done}");
    assert_eq!(done["checks"][0]["exit_code"], 0, "{done}");
    assert_eq!(done["checks"][0]["commit"], done["commit"], "{done}");
    assert_eq!(fixture.server.pulls().len(), 1);
    fixture.down()
}

#[tokio::test]
async fn a_repository_of_another_project_does_not_exist() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    fixture.cli(&["project", "create", "foreign"])?.success()?;
    let url = fixture.server.url("");
    fixture.add_credential("robot", "foreign", url.trim_end_matches('/'))?;
    fixture
        .register("theirs", "foreign", &json!({}), &[])?
        .success()?;
    let artifact = fixture.patch("fix.patch", &fixes())?;
    let base = fixture.served.tip("main")?;
    let result = fixture.promote_artifact(&artifact, "theirs", &base, "x")?;
    let (exit, code, _) = refused(&result)?;
    assert!(exit == 64 && code.ends_with("not_found"), "{exit} {code}");
    let session = fixture.cli(&[
        "session",
        "create",
        "--task",
        &fixture.task,
        "--workspace",
        "git:theirs@main",
    ])?;
    assert_eq!(session.failure().0, 64, "{session:?}");
    fixture.assert_untouched()?;
    fixture.down()
}

#[tokio::test]
async fn only_what_the_remote_advertises_comes_in() -> Result<()> {
    let fixture = GitFixture::start("git").await?;
    let advertised = fixture.served.tip("main")?;
    let hidden = fixture
        .served
        .commit("gone", &[("hidden", "x\n")], "Hidden")?;
    fixture.served.git(&["branch", "-D", "gone"], b"")?;
    fixture
        .served
        .git(&["update-ref", "refs/pull/1/head", &hidden], b"")?;
    fixture.served.git(&["tag", "v1", &advertised], b"")?;
    for reference in ["main", "v1", &advertised] {
        let session = fixture.session(&format!("shop@{reference}"))?;
        let head = fixture.sh(&session, "git rev-parse HEAD")?.success()?;
        assert_eq!(head.trim_end(), advertised, "{reference}");
        fixture.cli(&["session", "end", &session])?.success()?;
    }
    for reference in [
        hidden.as_str(),
        "refs/pull/1/head",
        "nothing",
        "--upload-pack=x",
        "main..gone",
    ] {
        let result = fixture.cli(&[
            "session",
            "create",
            "--repo",
            &format!("shop@{reference}"),
            "--task",
            &fixture.task,
        ])?;
        let (exit, _) = result.failure();
        ensure!(matches!(exit, 64 | 77), "{reference}: {result:?}");
    }
    fixture.down()
}

#[tokio::test]
async fn a_credential_goes_to_its_own_host_only() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    let directory = fixture.stack.world.directory().join("other-server");
    let other: GitServer = fixture.server.beside(&directory).await?;
    other.create(&format!("{PATH}.git"), &super::FILES)?;
    let fails = |what: &str| -> Result<()> {
        let result = fixture.cli(&[
            "session",
            "create",
            "--repo",
            "shop",
            "--task",
            &fixture.task,
        ])?;
        ensure!(result.code != Some(0), "{what}: {result:?}");
        ensure!(
            !result.stderr.contains(&fixture.secret),
            "{what}: {result:?}"
        );
        Ok(())
    };

    // A redirect is not followed, not even without a credential.
    fixture.server.behave(GitBehaviour::Redirect(other.url("")));
    fails("redirected")?;
    assert!(other.requests().is_empty(), "{:?}", other.requests());
    // A server that demands more gets the credential, and no other.
    fixture.server.behave(GitBehaviour::Demand);
    fails("demanding")?;
    fixture.assert_presented()?;
    fixture.server.behave(GitBehaviour::Serve);

    // Another host asks for it: not at registration,
    let url = other.url(&format!("{PATH}.git"));
    let registered = fixture.register_at("elsewhere", "own", &url, &json!({}), &[])?;
    ensure!(registered.code != Some(0), "{registered:?}");
    // nor for whoever writes the database.
    let socket = fixture.stack.world.state_dir().join("postgres/socket");
    let (from, to) = (fixture.server.port(), other.port());
    let statement = format!(
        "update repositories set object = replace(object::text, ':{from}', ':{to}')::jsonb, \
         revision = revision + 1; update egress_head set revision = revision + 1"
    );
    let replaced = psql(None, &socket, &statement)?;
    replaced.success()?;
    other.require(super::USERNAME, &fixture.secret);
    cynode_tests::eventually("the role has the new rules", super::TIMEOUT, async || {
        fails("repointed")?;
        let seen = fixture.server.requests().len();
        fails("repointed")?;
        Ok(fixture.server.requests().len() == seen)
    })
    .await?;
    assert!(other.presented().is_empty(), "{:?}", other.presented());
    fixture.down()
}

#[tokio::test]
async fn a_server_that_never_ends_ends_nothing_else() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    let session = fixture.session("shop")?;
    fixture.sh(&session, FIX)?.success()?;
    fixture.server.behave(GitBehaviour::Endless);
    let result = fixture.cli(&[
        "session",
        "create",
        "--repo",
        "shop",
        "--task",
        &fixture.task,
    ])?;
    ensure!(result.code != Some(0), "{result:?}");
    fixture.server.behave(GitBehaviour::Serve);
    let done = fixture.promote(&session, "shop", &[])?.json()?;
    assert_eq!(done["state"], "done", "{done}");
    fixture.down()
}
