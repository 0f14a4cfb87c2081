//! A user's own image, from its build to a session.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{BASE, World, repository};
use serde_json::Value;

use super::stack::Stack;
use crate::cli::{CommandResult, run};

/// A directory in which the README's commands run unchanged: `podman` uses the test's store,
/// `cynode` the test's state.
struct Shell {
    stack: Stack,
}

impl Shell {
    fn new() -> Result<Self> {
        let stack = Stack::new()?;
        let directory = stack.world.directory().join("mine");
        fs_err::create_dir_all(directory.join("bin"))?;
        std::os::unix::fs::symlink(repository().join("images"), directory.join("images"))?;
        let words = |command: &Command| {
            let quoted = command
                .get_args()
                .map(|word| format!("'{}'", word.to_string_lossy()));
            quoted.collect::<Vec<_>>().join(" ")
        };
        // `env` would resolve to this script again.
        let podman = words(&stack.world.podman()).replacen("'podman'", "\"$podman\"", 1);
        let found = run(
            Command::new("/bin/sh").args(["-c", "command -v podman"]),
            b"",
        )?
        .success()?;
        for (name, script) in [
            (
                "podman",
                format!("podman={}\nexec env {podman} \"$@\"\n", found.trim_end()),
            ),
            (
                "cynode",
                format!("exec {} \"$@\"\n", World::cynode()?.display()),
            ),
        ] {
            let path = directory.join("bin").join(name);
            fs_err::write(&path, format!("#!/bin/sh\n{script}"))?;
            fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        }
        Ok(Self { stack })
    }

    fn run(&self, line: &str) -> Result<CommandResult> {
        let directory = self.stack.world.directory().join("mine");
        let path = format!(
            "{}:{}",
            directory.join("bin").display(),
            std::env::var("PATH")?
        );
        let mut command = Command::new("/bin/sh");
        for (name, value) in self.stack.command()?.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        run(
            command
                .args(["-c", line])
                .env("PATH", path)
                .current_dir(directory),
            b"",
        )
    }

    /// The Containerfile of the next build, with a value for the agent label.
    fn recipe(&self, label: &str) -> Result<()> {
        let text = format!("FROM {BASE}\nLABEL io.cynodeai.sandbox.agent-compatible={label}\n");
        Ok(fs_err::write(
            self.stack.world.directory().join("mine/Containerfile"),
            text,
        )?)
    }
}

/// The commands below the heading.
fn commands() -> Result<Vec<String>> {
    let text = fs_err::read_to_string(repository().join("images/README.md"))?;
    let (_, section) = text
        .split_once("## Bring your own\n")
        .context("the section")?;
    let lines = section
        .lines()
        .skip_while(|line| !line.starts_with("    "))
        .take_while(|line| line.starts_with("    "));
    Ok(lines.map(|line| line.trim().to_owned()).collect())
}

#[tokio::test]
// invariant: images
async fn a_users_own_image_works_as_documented() -> Result<()> {
    let shell = Shell::new()?;
    shell.stack.up()?;
    shell.recipe("true")?;
    let commands = commands()?;
    ensure!(
        commands.len() == 4 && commands[3].starts_with("cynode session create"),
        "{commands:?}"
    );
    let mut last = String::new();
    for line in &commands {
        let ran = shell.run(line)?;
        ensure!(ran.code == Some(0), "{line}: {ran:?}");
        last = ran.text();
        if line.contains("image add") {
            assert!(
                ran.stderr.contains("is allowed; available on ")
                    && ran.stderr.contains("for sessions and jobs"),
                "{ran:?}"
            );
        }
    }
    assert_eq!(
        shell
            .run(&format!(
                "cynode session exec {} -- echo mine",
                last.trim_end()
            ))?
            .success()?,
        "mine\n"
    );

    // Rebuilt without the label and added again: the registry follows.
    let (build, add, create) = (&commands[0], &commands[2], &commands[3]);
    shell.recipe("false")?;
    shell.run(build)?.success()?;
    let added = shell.run(add)?;
    assert!(
        added.code == Some(0) && added.stderr.contains("plain commands only"),
        "{added:?}"
    );
    let refused = shell.run(create)?;
    assert!(
        refused.failure() == (64, "image_not_compatible".to_owned())
            && refused.stderr.contains(add.as_str()),
        "{refused:?}"
    );
    shell.recipe("true")?;
    shell.run(build)?.success()?;
    shell.run(add)?.success()?;
    shell.run(create)?.success()?;
    let shown: Value = shell
        .run("cynode image show localhost/mine:1 --output json")?
        .json()?;
    assert_eq!(shown["versions"][0]["state"], "available");
    shell.stack.down()?;
    shell.stack.assert_clean().await
}
