//! The role as a process: how `up` runs it, what it refuses to callers, and what a backup saves.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::Answer;
use serde_json::{Value, json};

use super::GitFixture;
use crate::{cli::run, orchestrator::stack::Stack};

#[tokio::test]
// invariant: supervisor
async fn up_runs_the_role_and_says_where() -> Result<()> {
    let stack = Stack::new()?;
    stack.up()?;
    let endpoints = stack.endpoints()?;
    let url = endpoints["git"].as_str().context("an address")?;
    ensure!(url.starts_with("http://127.0.0.1:"), "{url}");
    let status = stack.run(&["status", "--output", "json"])?.json()?;
    let roles = status["roles"].as_array().context("roles")?;
    let role = roles.iter().find(|role| role["role"] == "git");
    assert_eq!(role.context("git")?["ready"], true);

    // Without the token it answers nobody.
    let client = reqwest::Client::builder().no_proxy().build()?;
    for (method, path) in [
        (http::Method::GET, "/v1/egress"),
        (http::Method::PUT, "/v1/egress/state"),
        (http::Method::POST, "/v1/egress/git/pushes"),
    ] {
        for token in ["", "wrong"] {
            let request = client.request(method.clone(), format!("{url}{path}"));
            let answer = Answer::of(request.bearer_auth(token).json(&json!({}))).await?;
            assert_eq!(answer.status, 401, "{path}");
        }
    }
    let directory = stack.world.state_dir().join("egress/git");
    for entry in fs_err::read_dir(&directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        // Sockets in a directory are for the group of the process that runs git.
        let others = if metadata.is_dir() { 0o007 } else { 0o077 };
        let mode = metadata.permissions().mode();
        assert_eq!(mode & others, 0, "{}", entry.path().display());
    }
    stack.down()?;
    stack.assert_clean().await
}

#[tokio::test]
// invariant: supervisor
async fn up_starts_without_git_and_says_so() -> Result<()> {
    let stack = Stack::new()?;
    let started = run(
        stack
            .command()?
            .args(["up", "--detach", "--set", "egress.git.git=/nowhere/git"]),
        b"",
    )?;
    ensure!(started.code == Some(0), "{started:?}");
    stack.world.kill_on_cleanup(stack.up_pid()?)?;
    ensure!(
        started.stderr.contains("without the git role") && started.stderr.contains("/nowhere/git"),
        "{started:?}"
    );
    let endpoints = stack.endpoints()?;
    ensure!(endpoints.get("git").is_none(), "{endpoints}");
    stack.run(&["task", "create", "works"])?.success()?;
    stack.down()?;
    stack.assert_clean().await
}

/// The role decides for itself, whatever an orchestrator says.
#[tokio::test]
async fn an_orchestrator_that_lies_is_refused() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    let main = fixture.served.tip("main")?;
    let artifact = fixture.patch("fix.patch", &super::fixes())?;
    let promoted = fixture
        .promote_artifact(&artifact, "shop", &main, "honest")?
        .json()?;
    let commit = promoted["commit"].as_str().context("a commit")?;
    let endpoints = fixture.stack.endpoints()?;
    let url = endpoints["git"].as_str().context("an address")?;
    let directory = fixture.stack.world.state_dir().join("egress/git");
    let token = fs_err::read_to_string(directory.join("token"))?;
    let repository = fixture.json(&["repository", "show", "shop"])?;
    let call = json!({
        "principal": {
            "kind": "user",
            "id": uuid::Uuid::nil(),
            "name": "admin",
            "admin": true,
            "groups": [],
        },
        "task_id": fixture.task,
        "project_id": repository["project_id"],
        "repository_id": repository["id"],
    });
    let request = |branch: &str, commit: &str| {
        json!({
            "version": 1,
            "call": call,
            "base": main,
            "target": "main",
            "branch": branch,
            "commit": commit,
            "revision": repository["revision"],
        })
    };
    let client = reqwest::Client::builder().no_proxy().build()?;
    let other_task = fixture.task_of("own", "another")?;
    let own = promoted["branch"].as_str().context("a branch")?;
    let other_branch = own.replace(&fixture.task, &other_task);
    for body in [
        request("main", commit),
        request("refs/heads/main", commit),
        request("feature", commit),
        request(&format!("{own}/../../main"), commit),
        request(&other_branch, commit),
        // A commit that the role did not build.
        request(&format!("{own}-2"), &main),
    ] {
        if body["branch"] == own {
            continue;
        }
        let post = client
            .post(format!("{url}/v1/egress/git/pushes"))
            .bearer_auth(token.trim())
            .json(&body);
        let answer = Answer::of(post).await?;
        ensure!(
            (400..500).contains(&answer.status),
            "{body}: {:?}",
            answer.outcome()
        );
    }
    let expected: Vec<String> = [own.to_owned(), "main".to_owned()].into();
    assert_eq!(fixture.served.branches()?, expected);
    assert_eq!(fixture.served.tip("main")?, main);
    fixture.cli(&["audit", "verify"])?.success()?;
    fixture.down()
}

#[tokio::test]
// invariant: backup
async fn a_backup_keeps_the_key_that_opens_the_credentials() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    let file = fixture.stack.world.directory().join("saved.tar");
    let name = file.to_str().context("a path")?;
    fixture.cli(&["backup", name])?.success()?;
    let key = |state: &std::path::Path| state.join("egress/git").join(KEY);
    let before = fs_err::read(key(&fixture.stack.world.state_dir()))?;
    let owner = fs_err::metadata(key(&fixture.stack.world.state_dir()))?.uid();
    fixture.down()?;

    let other = fixture.stack.world.directory().join("other");
    let command = |arguments: &[&str]| {
        run(
            fixture
                .stack
                .command()?
                .env("CYNODE_STATE_DIR", &other)
                .args(arguments),
            b"",
        )
    };
    command(&["backup", "--restore", name])?.success()?;
    ensure!(fs_err::read(key(&other))? == before, "another key");
    assert_eq!(
        fs_err::metadata(key(&other))?.permissions().mode() & 0o777,
        0o600
    );
    command(&["up", "--detach"])?.success()?;
    let endpoints: Value = serde_json::from_slice(&fs_err::read(other.join("endpoints.json"))?)?;
    fixture
        .stack
        .world
        .kill_on_cleanup(u32::try_from(endpoints["pid"].as_u64().context("a pid")?)?)?;
    assert_eq!(fs_err::metadata(key(&other))?.uid(), owner);
    // The restored role opens the restored credential.
    command(&[
        "session",
        "create",
        "--repo",
        "shop",
        "--task",
        &fixture.task,
    ])?
    .success()?;
    fixture.assert_presented()?;
    command(&["down"])?.success().map(drop)
}

/// The file of the role's key.
const KEY: &str = "key";
