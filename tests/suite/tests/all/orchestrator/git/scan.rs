//! A planted credential is nowhere but with the role.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{Hold, eventually};
use http::Method;

use super::{FIX, GitFixture, TIMEOUT};
use crate::orchestrator::postgres::psql;

/// The processes that descend from one.
fn descendants(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(pid) = found.get(next).copied() {
        next += 1;
        for entry in fs_err::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let children = fs_err::read_to_string(entry.path().join("children"));
            found.extend(
                children
                    .unwrap_or_default()
                    .split_whitespace()
                    .filter_map(|pid| pid.parse::<u32>().ok()),
            );
        }
    }
    found
}

fn contains(bytes: &[u8], forms: &[String]) -> bool {
    forms.iter().any(|form| {
        bytes
            .windows(form.len())
            .any(|window| window == form.as_bytes())
    })
}

/// Command lines and environments in which the credential is.
fn in_processes(pids: &[u32], forms: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for pid in pids {
        for name in ["cmdline", "environ", "comm"] {
            let path = format!("/proc/{pid}/{name}");
            if contains(&fs_err::read(&path).unwrap_or_default(), forms) {
                found.push(path);
            }
        }
    }
    found
}

/// Files below a directory in which the credential is.
fn in_files(directory: &Path, forms: &[String]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs_err::read_dir(&directory).into_iter().flatten().flatten() {
            let Ok(kind) = entry.file_type() else {
                continue;
            };
            if kind.is_dir() {
                directories.push(entry.path());
            } else if kind.is_file() {
                // A file may vanish meanwhile.
                let bytes = fs_err::read(entry.path()).unwrap_or_default();
                if contains(&bytes, forms) {
                    found.push(entry.path());
                }
            }
        }
    }
    found
}

#[tokio::test]
// invariant: no-secrets-inside
async fn a_planted_credential_is_found_nowhere() -> Result<()> {
    let fixture = GitFixture::start("github").await?;
    let forms = fixture.forms();
    let up = fixture.stack.up_pid()?;

    // While a fetch and a push with the credential are under way.
    let seed = Hold {
        method: Method::POST,
        path: "git-upload-pack",
        after_effect: false,
    };
    let push = Hold {
        method: Method::POST,
        path: "git-receive-pack",
        after_effect: false,
    };
    let mut git_was_seen = false;
    fixture.server.hold(seed);
    let mut creating = fixture
        .stack
        .command()?
        .args([
            "session",
            "create",
            "--repo",
            "shop",
            "--task",
            &fixture.task,
        ])
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    eventually("a fetch waits", TIMEOUT, async || {
        Ok(fixture.server.held() > 0)
    })
    .await?;
    let mut scan = |what: &str| -> Result<()> {
        let pids = descendants(up);
        let runs_git = |pid: &u32| {
            fs_err::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|name| name.starts_with("git"))
        };
        git_was_seen |= pids.iter().any(runs_git);
        let found = in_processes(&pids, &forms);
        ensure!(found.is_empty(), "{what}: {found:?}");
        Ok(())
    };
    scan("while fetching")?;
    fixture.server.release();
    let mut session = String::new();
    std::io::Read::read_to_string(
        &mut creating.stdout.take().context("its output")?,
        &mut session,
    )?;
    ensure!(creating.wait()?.success(), "no session");
    let session = session.trim_end();
    fixture.sh(session, FIX)?.success()?;
    fixture.server.hold(push);
    let id = fixture
        .cli(&[
            "promote", session, "--repo", "shop", "--title", "Fix", "--detach",
        ])?
        .success()?
        .trim_end()
        .to_owned();
    eventually("a push waits", TIMEOUT, async || {
        Ok(fixture.server.held() > 0)
    })
    .await?;
    scan("while pushing")?;
    ensure!(git_was_seen, "no git process was scanned");

    // Inside the sandbox meanwhile: environments, files, everything in /proc.
    let script = format!(
        "set +e; env | grep -F {secret}; \
         cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -aF {secret}; \
         grep -raF {secret} /workspace /tmp /home /etc /run /var 2>/dev/null; true",
        secret = &fixture.secret[..12],
    );
    let inside = fixture.sh(session, &script)?;
    let own_command = |line: &&str| !line.contains("grep");
    ensure!(
        inside.text().lines().filter(own_command).count() == 0,
        "{inside:?}"
    );
    fixture.server.release();
    eventually("the promotion is done", TIMEOUT, async || {
        Ok(fixture.promotion(&id)?["state"] == "done")
    })
    .await?;

    // At rest: keys, mirrors, logs, journals, the database's own files and its dump.
    let state = fixture.stack.world.state_dir();
    let found = in_files(&state, &forms);
    ensure!(found.is_empty(), "{found:?}");
    let socket = state.join("postgres/socket");
    for table in ["credentials", "repositories", "promotions", "audit_events"] {
        let rows = psql(
            None,
            &socket,
            &format!("select to_jsonb(t)::text from {table} t"),
        )?;
        ensure!(
            !contains(&rows.stdout, &forms),
            "the credential is in {table}"
        );
    }
    for command in [
        vec!["audit", "export"],
        vec!["event", "list"],
        vec!["credential", "list", "--output", "json"],
        vec!["repository", "show", "shop", "--output", "json"],
    ] {
        let printed = fixture.cli(&command)?;
        ensure!(
            printed.code == Some(0) && !contains(&printed.stdout, &forms),
            "{command:?} prints the credential"
        );
    }
    fixture.assert_presented()?;
    fixture.down()
}
