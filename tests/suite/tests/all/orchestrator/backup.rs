//! `backup`: the control plane's whole state in a file, and its restoration.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::stack::Stack;
use crate::cli::{CommandResult, run};

impl Stack {
    fn with(&self, state: &std::path::Path, arguments: &[&str]) -> Result<CommandResult> {
        run(
            self.command()?
                .env("CYNODE_STATE_DIR", state)
                .args(arguments),
            b"",
        )
    }
}

#[tokio::test]
// invariant: backup
async fn a_backup_of_a_running_stack_restores_into_an_empty_directory() -> Result<()> {
    let stack = Stack::new()?;
    stack.up()?;
    let task = stack
        .run(&["task", "create", "kept"])?
        .success()?
        .trim_end()
        .to_owned();
    let token = stack
        .run(&["token", "create", "--expires", "1h"])?
        .success()?
        .trim_end()
        .to_owned();
    run(
        stack
            .command()?
            .args(["artifact", "put", "--task", &task, "-", "note"]),
        b"precious",
    )?
    .success()?;
    stack
        .run(&[
            "setting",
            "set",
            "sandbox.default_image",
            "localhost/mine:1",
        ])?
        .success()?;
    let file = stack.world.directory().join("saved.tar");
    let name = file.to_str().context("a path")?;
    let saved = stack.run(&["backup", name])?;
    assert!(
        saved.code == Some(0)
            && saved
                .stderr
                .contains("a backup does not include sandboxes, workspaces and images of workers"),
        "{saved:?}"
    );
    assert_eq!(fs_err::metadata(&file)?.permissions().mode() & 0o777, 0o600);
    // The next backup doesn't overwrite it, unless told to.
    let before = fs_err::read(&file)?;
    let refused = stack.run(&["backup", name])?;
    assert!(
        refused.failure() == (64, "already_exists".to_owned())
            && refused.stderr.contains("--force"),
        "{refused:?}"
    );
    assert!(fs_err::read(&file)? == before);
    stack.run(&["backup", "--force", name])?.success()?;
    assert!(
        fs_err::read(&file)? != before,
        "the backup was not replaced"
    );
    let beside: Vec<_> = fs_err::read_dir(stack.world.directory())?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<std::io::Result<_>>()?;
    assert!(
        !beside
            .iter()
            .any(|name| name.to_string_lossy().contains("saved.tar.")),
        "{beside:?}"
    );
    // Later changes are not in it.
    stack.run(&["task", "create", "later"])?.success()?;
    let keys: Vec<Vec<u8>> = [
        "admin.token",
        "orchestrator.key",
        "registration.key",
        "worker.token",
    ]
    .iter()
    .map(|name| fs_err::read(stack.world.state_dir().join(name)))
    .collect::<std::io::Result<_>>()?;

    let full = stack.run(&["backup", "--restore", name])?;
    assert_eq!(full.failure(), (64, "not_empty".to_owned()));
    stack.down()?;
    // It also works when nothing runs.
    let again = stack.world.directory().join("again.tar");
    let manifest = stack
        .run(&[
            "backup",
            again.to_str().context("a path")?,
            "--output",
            "json",
        ])?
        .json()?;
    assert_eq!(manifest["version"], 1);

    let other = stack.world.directory().join("other");
    let restored = stack.with(&other, &["backup", "--restore", name])?;
    assert_eq!(restored.code, Some(0), "{restored:?}");
    for (name, content) in [
        "admin.token",
        "orchestrator.key",
        "registration.key",
        "worker.token",
    ]
    .iter()
    .zip(&keys)
    {
        assert!(fs_err::read(other.join(name))? == *content, "{name}");
    }
    stack.with(&other, &["up", "--detach"])?.success()?;
    let endpoints: Value = serde_json::from_slice(&fs_err::read(other.join("endpoints.json"))?)?;
    stack
        .world
        .kill_on_cleanup(u32::try_from(endpoints["pid"].as_u64().context("a pid")?)?)?;
    let tasks = stack
        .with(&other, &["task", "list", "--output", "json"])?
        .json()?;
    let names: Vec<&str> = tasks["items"]
        .as_array()
        .context("items")?
        .iter()
        .filter_map(|task| task["name"].as_str())
        .collect();
    assert_eq!(names, ["kept"]);
    assert_eq!(
        stack
            .with(&other, &["artifact", "get", "--task", &task, "note"])?
            .stdout,
        b"precious"
    );
    assert_eq!(
        stack
            .with(&other, &["setting", "get", "sandbox.default_image"])?
            .success()?,
        "localhost/mine:1\n"
    );
    let with_token = run(
        stack
            .command()?
            .env("CYNODE_STATE_DIR", &other)
            .env("CYNODE_TOKEN", &token)
            .args(["task", "list"]),
        b"",
    )?;
    assert_eq!(
        with_token.code,
        Some(0),
        "a token is no longer valid: {with_token:?}"
    );
    stack.with(&other, &["down"])?.success()?;
    stack.assert_clean().await
}

#[tokio::test]
// invariant: backup
async fn an_incomplete_backup_changes_nothing() -> Result<()> {
    let stack = Stack::new()?;
    stack.up()?;
    let task = stack
        .run(&["task", "create", "kept"])?
        .success()?
        .trim_end()
        .to_owned();
    run(
        stack
            .command()?
            .args(["artifact", "put", "--task", &task, "-", "note"]),
        b"precious",
    )?
    .success()?;
    let file = stack.world.directory().join("saved.tar");
    stack
        .run(&["backup", file.to_str().context("a path")?])?
        .success()?;
    stack.down()?;
    let good = fs_err::read(&file)?;
    let at = good
        .windows(8)
        .position(|window| window == b"precious")
        .context("the artifact")?;
    let mut changed = good.clone();
    changed[at] ^= 1;
    let other = stack.world.directory().join("other");
    for (what, bytes) in [
        ("changed", changed),
        ("cut off", good[..at + 600].to_vec()),
        ("no tar", b"hello".repeat(400)),
        ("empty", Vec::new()),
    ] {
        let bad = stack.world.directory().join("bad.tar");
        fs_err::write(&bad, bytes)?;
        let refused = stack.with(
            &other,
            &["backup", "--restore", bad.to_str().context("a path")?],
        )?;
        assert_eq!(
            refused.failure(),
            (64, "damaged".to_owned()),
            "{what}: {refused:?}"
        );
        let left: Vec<_> = fs_err::read_dir(&other)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<std::io::Result<_>>()?;
        assert!(left.is_empty(), "{what}: {left:?}");
    }
    // A truncated backup is not taken for a whole one.
    fs_err::write(other.join("restore.unfinished"), "")?;
    assert_eq!(
        stack.with(&other, &["up", "--detach"])?.failure(),
        (64, "restore_unfinished".to_owned())
    );
    let missing = stack.with(&other, &["backup", "--restore", "/nowhere.tar"])?;
    assert_eq!(missing.failure(), (64, "usage".to_owned()));
    let none = stack.with(&stack.world.directory().join("third"), &["backup", "x.tar"])?;
    assert_eq!(none.failure(), (64, "nothing_to_save".to_owned()));
    stack.assert_clean().await
}

#[tokio::test]
// invariant: backup
async fn a_restore_replaces_no_key_outside_the_state_directory() -> Result<()> {
    let stack = Stack::new()?;
    stack.up()?;
    let file = stack.world.directory().join("saved.tar");
    let name = file.to_str().context("a path")?;
    stack.run(&["backup", name])?.success()?;
    stack.down()?;
    let outside = stack.world.directory().join("outside");
    fs_err::create_dir(&outside)?;
    let list = |directory: &std::path::Path| -> Result<Vec<_>> {
        Ok(fs_err::read_dir(directory)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<std::io::Result<_>>()?)
    };
    for (setting, key) in [
        ("key_file", "orchestrator.key"),
        ("registration_key_file", "registration.key"),
    ] {
        let place = outside.join(setting);
        let set = format!("orchestrator.{setting}={}", place.display());
        let restore = |state: &std::path::Path, more: &[&str]| {
            stack.with(
                state,
                &[&["backup", "--restore", name, "--set", &set], more].concat(),
            )
        };
        // Another key is in the place.
        fs_err::write(&place, "another key")?;
        let state = stack.world.directory().join(format!("{setting}-state"));
        let refused = restore(&state, &[])?;
        assert_eq!(
            refused.failure(),
            (64, "already_exists".to_owned()),
            "{refused:?}"
        );
        assert!(
            refused.stderr.contains(place.to_str().context("a path")?),
            "{refused:?}"
        );
        assert_eq!(fs_err::read_to_string(&place)?, "another key");
        assert!(list(&state)?.is_empty(), "{:?}", list(&state)?);
        // The place is vacant, but the database can't be restored.
        fs_err::remove_file(&place)?;
        let unreachable = "orchestrator.database_url=postgres://cynode@127.0.0.1:1/cynode";
        let failed_state = stack.world.directory().join(format!("{setting}-failed"));
        let failed = restore(&failed_state, &["--set", unreachable])?;
        assert_eq!(failed.failure(), (70, "database".to_owned()), "{failed:?}");
        assert!(list(&outside)?.is_empty(), "{:?}", list(&outside)?);
        // The same key is in the place.
        let saved = fs_err::read(stack.world.state_dir().join(key))?;
        fs_err::write(&place, &saved)?;
        restore(&state, &[])?.success()?;
        assert!(fs_err::read(&place)? == saved && !state.join(key).exists());
        fs_err::remove_file(&place)?;
    }
    stack.assert_clean().await
}
