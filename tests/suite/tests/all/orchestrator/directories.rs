//! Directories that come into a sandbox, and what comes back.

use std::{
    io::BufRead as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::SessionState;
use cynode_client::SessionFilter;
use cynode_tests::{BASE, eventually};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::cluster::Cluster;
use crate::cli::{CommandResult, cynode, run};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A project on this machine, and a cluster for it.
struct Project {
    cluster: Cluster,
    directory: PathBuf,
}

impl Project {
    async fn new() -> Result<Self> {
        let cluster = Cluster::with_image(BASE).await?;
        let directory = cluster.control_plane.world.directory().join("project");
        fs_err::create_dir(&directory)?;
        let project = Self { cluster, directory };
        project
            .cli(&["setting", "set", "sandbox.default_image", BASE])?
            .success()?;
        Ok(project)
    }

    fn put(&self, name: &str, content: &str) -> Result<()> {
        let path = self.directory.join(name);
        fs_err::create_dir_all(path.parent().context("a parent")?)?;
        Ok(fs_err::write(path, content)?)
    }

    fn get(&self, name: &str) -> Result<String> {
        Ok(fs_err::read_to_string(self.directory.join(name))?)
    }

    fn has(&self, name: &str) -> bool {
        self.directory.join(name).exists()
    }

    fn command(&self, directory: &Path) -> Result<Command> {
        let mut command = cynode(&self.cluster.control_plane.world)?;
        command
            .env("CYNODE_URL", self.cluster.orchestrator.url()?)
            .env("CYNODE_TOKEN", self.cluster.orchestrator.token()?)
            .current_dir(directory);
        Ok(command)
    }

    /// Runs a command in the project.
    fn cli(&self, arguments: &[&str]) -> Result<CommandResult> {
        run(self.command(&self.directory)?.args(arguments), b"")
    }

    fn json(&self, arguments: &[&str]) -> Result<Value> {
        self.cli(&[&["--output", "json"], arguments].concat())?
            .json()
    }

    /// Runs a script in the session of the project.
    fn sh(&self, script: &str) -> Result<String> {
        self.cli(&["session", "exec", "--", "sh", "-ec", script])?
            .success()
    }

    fn git(&self, arguments: &[&str]) -> Result<()> {
        let output = Command::new("git")
            .args(["-c", "user.name=t", "-c", "user.email=t@example.org"])
            .args(arguments)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .current_dir(&self.directory)
            .output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    }

    /// Every file of the project but git's own, with its content.
    fn files(&self) -> Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        let mut directories = vec![self.directory.clone()];
        while let Some(directory) = directories.pop() {
            for entry in fs_err::read_dir(&directory)? {
                let path = entry?.path();
                let name = path.strip_prefix(&self.directory)?.display().to_string();
                if name == ".git" {
                    continue;
                }
                if path.is_dir() {
                    directories.push(path);
                } else {
                    found.push((name, fs_err::read_to_string(&path)?));
                }
            }
        }
        found.sort();
        Ok(found)
    }

    /// The sessions that still exist.
    async fn live_sessions(&self) -> Result<usize> {
        let sessions = self
            .cluster
            .orchestrator
            .client()?
            .sessions()
            .list_sessions(&SessionFilter::default())
            .await?;
        let is_live = |state| !matches!(state, SessionState::Ended | SessionState::Failed);
        Ok(sessions.iter().filter(|one| is_live(one.state)).count())
    }
}

const LINES: &str = "one\ntwo\nthree\nfour\nfive\nsix\nseven\n";

async fn a_round(is_repository: bool) -> Result<()> {
    let project = Project::new().await?;
    for (name, content) in [
        ("src/app.txt", LINES),
        ("src/unused.txt", "unused\n"),
        ("notes.txt", "mine\n"),
        ("build/out.o", "ignored"),
        (".gitignore", "build/\n"),
        (".env", "PASSWORD=hunter2\n"),
        (".npmrc", "//registry.example.org/:_authToken=abc\n"),
    ] {
        project.put(name, content)?;
    }
    let mut arguments = vec!["session", "create", "project", "--memory", "256m"];
    if is_repository {
        project.git(&["init", "-q", "-b", "main"])?;
        project.git(&["add", "src", ".gitignore"])?;
        project.git(&["commit", "-q", "-m", "first"])?;
        project.git(&["remote", "add", "o", "https://me:hunter2@example.org/a.git"])?;
        arguments.push("--gitignore");
    }
    // From elsewhere: the session is the one of both directories.
    let above = project.directory.parent().context("a parent")?;
    let made = run(project.command(above)?.args(arguments), b"")?;
    for left_out in [".env", ".npmrc"] {
        let line = format!("cynode: left out {left_out}: ");
        assert!(made.stderr.contains(&line), "{made:?}");
    }
    assert!(!made.stderr.contains("hunter2"), "{made:?}");
    assert_eq!(
        is_repository,
        made.stderr.contains(".git/config"),
        "{made:?}"
    );
    let id = made.success()?.trim_end().to_owned();
    for directory in [above, &project.directory.join("src")] {
        let shown = run(
            project
                .command(directory)?
                .args(["session", "show", "--output", "json"]),
            b"",
        )?;
        assert_eq!(shown.json()?["session_id"], id);
    }
    let listed = project.sh("find . -path ./.git -prune -o -type f -print | sort")?;
    let expected = if is_repository {
        "./.gitignore\n./notes.txt\n./src/app.txt\n./src/unused.txt\n"
    } else {
        "./.gitignore\n./build/out.o\n./notes.txt\n./src/app.txt\n./src/unused.txt\n"
    };
    assert_eq!(listed, expected);
    if is_repository {
        assert_eq!(project.sh("git log --format=%s")?, "first\n");
    }
    let nothing = project.cli(&["session", "pull", "--apply"])?;
    assert!(
        nothing.code == Some(0) && nothing.stderr.contains("nothing has changed"),
        "{nothing:?}"
    );

    project.sh(
        "sed -i s/two/TWO/ src/app.txt; rm src/unused.txt; mkdir tools; \
         printf '#!/bin/sh\\n' > tools/run; chmod 4755 tools/run; echo 'use flake' > .envrc; \
         printf 'a\\0b' > data.bin",
    )?;
    if is_repository {
        // A commit inside makes no difference.
        project.sh(
            "git -c user.name=a -c user.email=a@example.org -c core.hooksPath=/dev/null \
             commit -q -a -m second",
        )?;
    }
    let diff = project.cli(&["session", "diff"])?.success()?;
    for part in ["-two", "+TWO", "+++ b/tools/run", "GIT binary patch"] {
        assert!(diff.contains(part), "{part} is missing in\n{diff}");
    }
    let stat = project.cli(&["session", "diff", "--stat"])?;
    assert!(
        stat.stderr.contains("5 files, 3 lines added, 2 removed"),
        "{stat:?}"
    );
    let stat = project.json(&["session", "diff", "--stat"])?;
    assert_eq!(stat["files"].as_array().map(Vec::len), Some(5), "{stat}");
    assert_eq!(project.json(&["session", "diff"])?["patch"], json!(diff));

    // First the changes are only shown.
    let before = project.files()?;
    let shown = project.cli(&["session", "pull"])?;
    let text = shown.text();
    for (file, note) in [("tools/run", "executable"), (".envrc", "runs by itself")] {
        let line = text.lines().find(|line| line.contains(file));
        assert!(line.is_some_and(|line| line.contains(note)), "{text}");
    }
    assert!(shown.stderr.contains("add --apply"), "{shown:?}");
    assert_eq!(project.files()?, before);

    // A conflict names its file and hunk, and changes nothing.
    project.put("src/app.txt", &LINES.replace("two", "else"))?;
    let before = project.files()?;
    let conflict = project.cli(&["session", "pull", "--apply"])?;
    assert_eq!(conflict.failure(), (64, "patch_rejected".to_owned()));
    assert!(
        conflict.stderr.contains("src/app.txt, hunk 1") && conflict.stderr.contains("else"),
        "{conflict:?}"
    );
    let conflict = project.cli(&["--output", "json", "session", "pull", "--apply"])?;
    let problem: Value = serde_json::from_str(&conflict.stderr)?;
    assert_eq!(problem["rejects"][0]["path"], "src/app.txt", "{problem}");
    assert_eq!(problem["rejects"][0]["hunk"], 1, "{problem}");
    assert_eq!(project.files()?, before);

    // Other lines may differ, and so may other files.
    project.put("src/app.txt", &LINES.replace("seven", "SEVEN"))?;
    project.put("notes.txt", "changed\n")?;
    let pulled = run(
        project
            .command(above)?
            .args(["--output", "json", "session", "pull", &id, "--apply"]),
        b"",
    )?
    .json()?;
    assert_eq!(pulled["applied"], true, "{pulled}");
    assert_eq!(
        pulled["directory"].as_str().map(Path::new),
        Some(project.directory.as_path())
    );
    let merged = LINES.replace("two", "TWO").replace("seven", "SEVEN");
    assert_eq!(project.get("src/app.txt")?, merged);
    assert_eq!(project.get("notes.txt")?, "changed\n");
    assert_eq!(project.get(".env")?, "PASSWORD=hunter2\n");
    assert!(!project.has("src/unused.txt") && project.has("build/out.o"));
    let mode = fs_err::metadata(project.directory.join("tools/run"))?.permissions();
    assert_eq!(mode.mode() & 0o7111, 0o111);
    assert_eq!(fs_err::read(project.directory.join("data.bin"))?, b"a\0b");

    // The session goes on, and so do the pulls.
    project.sh("sed -i s/TWO/2/ src/app.txt; rm data.bin; echo later > later.txt")?;
    let shown = project.cli(&["session", "pull", "--apply"])?;
    let text = shown.text();
    assert!(
        shown.code == Some(0) && !text.contains("tools/run"),
        "{shown:?}"
    );
    assert_eq!(project.get("src/app.txt")?, merged.replace("TWO", "2"));
    assert!(!project.has("data.bin") && project.has("later.txt") && project.has("tools/run"));
    let nothing = project.cli(&["session", "pull", "--apply"])?;
    assert!(
        nothing.stderr.contains("nothing has changed"),
        "{nothing:?}"
    );

    project.cli(&["session", "end"])?.success()?;
    Ok(())
}

#[tokio::test]
async fn a_repository_goes_in_and_its_changes_come_back() -> Result<()> {
    a_round(true).await
}

#[tokio::test]
async fn a_plain_directory_goes_in_and_its_changes_come_back() -> Result<()> {
    a_round(false).await
}

#[tokio::test]
async fn hostile_changes_are_refused_as_a_whole() -> Result<()> {
    let project = Project::new().await?;
    project.put("a", "one\n")?;
    project.put(".git-like", "x\n")?;
    project.put("way/kept", "x\n")?;
    project
        .cli(&["session", "create", ".", "--memory", "256m"])?
        .success()?;
    let pull = || project.cli(&["session", "pull", "--apply"]);
    for (script, undo, expected) in [
        ("ln -s /etc/passwd link", "rm link", (64, "patch_rejected")),
        ("ln -s ../../x link", "rm link", (64, "patch_rejected")),
        (
            "mkdir d; ln -s . d/up; ln -s d/up/../../x link",
            "rm -r d link",
            (64, "patch_rejected"),
        ),
        (
            "echo x > .cynode-apply-x",
            "rm .cynode-apply-x",
            (64, "patch_rejected"),
        ),
    ] {
        project.sh(&format!("echo two >> a; {script}"))?;
        let before = project.files()?;
        let refused = pull()?;
        let (exit, code) = expected;
        assert_eq!(refused.failure(), (exit, code.to_owned()), "{script}");
        assert_eq!(project.files()?, before, "{script}");
        project.sh(&format!("printf 'one\\n' > a; {undo}"))?;
    }
    let nothing = pull()?;
    assert_eq!(nothing.code, Some(0), "{nothing:?}");
    // A directory that has become a link meanwhile.
    let outside = project.directory.with_file_name("outside");
    fs_err::create_dir(&outside)?;
    fs_err::remove_dir_all(project.directory.join("way"))?;
    std::os::unix::fs::symlink(&outside, project.directory.join("way"))?;
    project.sh("echo x > way/new")?;
    let refused = pull()?;
    assert_eq!(refused.failure(), (64, "patch_rejected".to_owned()));
    assert!(refused.stderr.contains("symbolic link"), "{refused:?}");
    assert_eq!(fs_err::read_dir(&outside)?.count(), 0);
    Ok(())
}

#[tokio::test]
async fn repositories_in_the_workspace_come_out_as_files() -> Result<()> {
    let project = Project::new().await?;
    project.put("a", "one\n")?;
    project.put("vendor/lib/file", "one\n")?;
    project.git(&["init", "-q", "vendor/lib"])?;
    let created = project.cli(&["session", "create", ".", "--memory", "256m"])?;
    assert!(
        created.code == Some(0) && !created.stderr.contains("--base"),
        "{created:?}"
    );
    project.sh(
        "echo two >> a; echo two >> vendor/lib/file; mkdir -p app sub/.GIT; \
         echo x > sub/.GIT/config; cd app; git init -q; echo x > main",
    )?;
    let pulled = project.cli(&["session", "pull", "--apply"])?;
    assert_eq!(pulled.code, Some(0), "{pulled:?}");
    assert_eq!(project.get("a")?, "one\ntwo\n");
    assert_eq!(project.get("vendor/lib/file")?, "one\ntwo\n");
    assert_eq!(project.get("app/main")?, "x\n");
    assert!(
        !project.has("app/.git") && !project.has("sub"),
        "{pulled:?}"
    );

    // A copy leaves their configuration out.
    fs_err::create_dir_all(project.directory.join("app/.git"))?;
    project.put("app/.git/config", "mine\n")?;
    let copied = project.cli(&["session", "cp", "-r", ":app/.", "app"])?;
    assert!(
        copied.code == Some(0) && copied.stderr.contains("not copied: .git"),
        "{copied:?}"
    );
    assert_eq!(project.get("app/.git/config")?, "mine\n");
    let refused = project.cli(&["session", "cp", "-r", ":app/.git", "app"])?;
    assert_eq!(refused.code, Some(64), "{refused:?}");
    assert_eq!(project.get("app/.git/config")?, "mine\n");
    Ok(())
}

#[tokio::test]
async fn a_pull_does_what_it_shows_and_leaves_out_what_it_is_told() -> Result<()> {
    let project = Project::new().await?;
    project.put("a", LINES)?;
    project.put("z", "one\n")?;
    project
        .cli(&["session", "create", ".", "--memory", "256m"])?
        .success()?;
    project.sh("cp a b")?;
    project.cli(&["session", "pull", "--apply"])?.success()?;
    // git now reports a rename to a file that is here already.
    project.sh("rm a")?;
    let shown = project.cli(&["session", "pull", "--apply"])?;
    assert!(shown.text().contains("delete"), "{shown:?}");
    assert!(!project.has("a") && project.has("b"), "{shown:?}");

    project.sh("echo two > z; echo c > c")?;
    project.put("z", "mine\n")?;
    let refused = project.cli(&["session", "pull", "--apply"])?;
    assert_eq!(refused.failure(), (64, "patch_rejected".to_owned()));
    project
        .cli(&["session", "pull", "--apply", "--exclude", "z"])?
        .success()?;
    assert_eq!(project.get("z")?, "mine\n");
    assert_eq!(project.get("c")?, "c\n");
    Ok(())
}

#[tokio::test]
async fn run_fetches_files_whatever_the_exit_code() -> Result<()> {
    let project = Project::new().await?;
    project.put("input.txt", "from here\n")?;
    project.put(".env", "PASSWORD=hunter2\n")?;
    project.put("dist/old.txt", "old\n")?;
    let get = |script: &str, options: &[&str]| {
        let fixed = ["run", "--memory", "256m", "--workspace", "."];
        let command = ["--", "sh", "-c", script];
        project.cli(&[&fixed, options, &command].concat())
    };
    let ran = get(
        "test ! -e .env && cat input.txt && mkdir -p dist/sub && echo new > dist/sub/new.txt && \
         echo '#!/bin/sh' > dist/tool && chmod 6755 dist/tool && ln -s /etc/passwd dist/out && \
         mkdir dist/.git && echo x > dist/.git/config && echo report > report.txt; exit 3",
        &["--get", "dist", "--get", "report.txt"],
    )?;
    assert_eq!(
        (ran.code, ran.text().as_str()),
        (Some(3), "from here\n"),
        "{ran:?}"
    );
    for part in [
        "left out .env",
        "fetching dist:",
        "create dist/tool (executable)",
        "not fetched: dist/.git/config",
        "not fetched: dist/out: the link leads out of the directory",
        "fetching report.txt: 1 files",
    ] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    assert_eq!(project.get("dist/sub/new.txt")?, "new\n");
    assert_eq!(project.get("dist/old.txt")?, "old\n");
    assert_eq!(project.get("report.txt")?, "report\n");
    assert!(!project.has("dist/out") && !project.has("dist/.git"));
    let mode = fs_err::metadata(project.directory.join("dist/tool"))?.permissions();
    assert_eq!(mode.mode() & 0o7000, 0);

    // What is missing is an error of its own if the command has none.
    let missing = get("true", &["--get", "nothing", "--get", "input.txt"])?;
    assert_eq!(missing.failure(), (64, "not_found".to_owned()));
    let missing = get("exit 5", &["--get", "nothing"])?;
    assert_eq!(missing.failure(), (5, "not_found".to_owned()));
    // Nothing is replaced if something is in the way.
    fs_err::create_dir(project.directory.join("taken"))?;
    let taken = get("rmdir taken; echo x > taken", &["--get", "taken"]);
    assert_eq!(taken?.failure(), (64, "in_the_way".to_owned()));

    let late = get(
        "echo early > early; sleep 60",
        &["-t", "2s", "--get", "early"],
    )?;
    assert_eq!(late.code, Some(124), "{late:?}");
    assert_eq!(project.get("early")?, "early\n");
    let killed = get("kill -9 $$", &["--get", "input.txt"])?;
    assert_eq!(killed.code, Some(137), "{killed:?}");
    let unstarted = project.cli(&["run", "--memory", "256m", "--get", "x", "--", "/no/such"])?;
    assert_eq!(unstarted.code, Some(127), "{unstarted:?}");
    let refused = project.cli(&["run", "--get", "../x", "--", "true"])?;
    assert_eq!(refused.failure(), (64, "usage".to_owned()));

    let document = get(
        "echo hi; echo 2 > two",
        &["--get", "two", "--output", "json"],
    )?
    .json()?;
    assert_eq!(document["result"]["stdout"], "hi\n", "{document}");
    assert_eq!(
        document["fetched"][0]["files"][0]["path"], "two",
        "{document}"
    );
    assert_eq!(project.live_sessions().await?, 0);
    Ok(())
}

#[tokio::test]
async fn an_interrupted_run_leaves_no_session() -> Result<()> {
    let project = Project::new().await?;
    let mut child = project
        .command(&project.directory)?
        .args(["run", "--memory", "256m", "--get", "out", "--", "sh", "-c"])
        .arg("trap 'echo stopped > out; exit 9' INT; echo begun; while :; do sleep 0.1; done")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdout = std::io::BufReader::new(child.stdout.take().context("stdout")?);
    let mut line = String::new();
    stdout.read_line(&mut line)?;
    ensure!(line == "begun\n", "{line:?}");
    let pid = Pid::from_raw(child.id().cast_signed()).context("a pid")?;
    kill_process(pid, Signal::INT)?;
    let output = child.wait_with_output()?;
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    assert_eq!(project.get("out")?, "stopped\n");
    assert_eq!(project.live_sessions().await?, 0);
    assert_eq!(project.files()?.len(), 1, "something was left behind");
    Ok(())
}

#[tokio::test]
async fn a_watch_prints_changes_until_its_session_ends() -> Result<()> {
    let project = Project::new().await?;
    project.put("src/a", "one\n")?;
    project
        .cli(&["session", "create", ".", "--memory", "256m"])?
        .success()?;
    for format in ["table", "json"] {
        let mut child = project
            .command(&project.directory)?
            .args(["--output", format, "session", "watch", ".", "src"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut stderr = std::io::BufReader::new(child.stderr.take().context("stderr")?);
        let mut line = String::new();
        stderr.read_line(&mut line)?;
        ensure!(line.contains("watching src"), "{line:?}");
        project.sh("echo two >> src/a")?;
        let mut stdout = std::io::BufReader::new(child.stdout.take().context("stdout")?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        if format == "table" {
            assert_eq!(line, "modified src/a\n");
            child.kill()?;
            child.wait()?;
            continue;
        }
        let change: Value = serde_json::from_str(&line)?;
        assert_eq!(
            (&change["kind"], &change["path"]),
            (&json!("modified"), &json!("src/a"))
        );
        project.cli(&["session", "end"])?.success()?;
        eventually("the watch ends", TIMEOUT, async || {
            Ok(child.try_wait()?.is_some())
        })
        .await?;
        assert_eq!(child.wait()?.code(), Some(0));
    }
    Ok(())
}

#[tokio::test]
async fn a_large_directory_comes_in() -> Result<()> {
    const FILES: usize = 60_000;
    let project = Project::new().await?;
    for number in 0..FILES {
        let path = project.directory.join(format!("{}", number / 500));
        if number % 500 == 0 {
            fs_err::create_dir(&path)?;
        }
        fs_err::write(path.join(number.to_string()), format!("{number}\n"))?;
    }
    // Larger than an import may be.
    let large: Vec<u8> = (0..200_u64 << 20)
        .step_by(8)
        .flat_map(u64::to_le_bytes)
        .collect();
    fs_err::write(project.directory.join("large"), &large)?;
    let mut command = project.command(&project.directory)?;
    command.args([
        "session", "create", ".", "--memory", "512m", "--output", "json",
    ]);
    let output = tokio::task::spawn_blocking(move || command.output()).await??;
    ensure!(output.status.success(), "{output:?}");
    let made: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(made["brought"]["files"], FILES + 1, "{made}");
    assert_eq!(
        project.sh("find . -type f | wc -l")?.trim(),
        (FILES + 1).to_string()
    );
    project.sh("echo more >> 7/3500")?;
    let stat = project.json(&["session", "diff", "--stat"])?;
    assert_eq!(stat["files"][0]["path"], "7/3500", "{stat}");
    Ok(())
}

/// Runs a program on a terminal of 80 columns.
const TERMINAL: &str =
    "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))";

#[tokio::test]
async fn a_long_directory_hides_no_file_at_a_terminal() -> Result<()> {
    let project = Project::new().await?;
    project.put("a.txt", "one\n")?;
    project
        .cli(&["session", "create", ".", "--memory", "256m"])?
        .success()?;
    let path = format!("{}/.envrc", "long".repeat(50));
    project.sh(&format!(
        "mkdir -p $(dirname {path}); echo 'use flake' > {path}"
    ))?;
    let cynode = project.command(&project.directory)?;
    for arguments in [["diff", "--stat"], ["pull", "--exclude=nothing"]] {
        let mut command = Command::new("python3");
        for (name, value) in cynode.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
            .current_dir(&project.directory)
            .args(["-c", TERMINAL])
            .arg(cynode.get_program())
            .arg("session")
            .args(arguments);
        let seen = run(&mut command, b"")?.success()?;
        let line = seen.lines().find(|line| line.contains("long"));
        ensure!(
            line.is_some_and(|line| line.contains(&path) && line.contains("runs by itself")),
            "{seen}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_resumed_session_still_knows_what_it_began_with() -> Result<()> {
    let project = Project::new().await?;
    project.put("a.txt", "one\n")?;
    let made = project.json(&["session", "create", ".", "--memory", "256m"])?;
    let id = made["session_id"].as_str().context("an id")?;
    project.sh("echo two > a.txt")?;
    project
        .cli(&["session", "end", "--keep-workspace"])?
        .success()?;
    project.cli(&["session", "resume", id])?.success()?;
    let diff = project.cli(&["session", "diff"])?.success()?;
    ensure!(diff.contains("-one\n+two"), "{diff}");
    Ok(())
}

#[tokio::test]
async fn a_worker_alone_takes_no_directories() -> Result<()> {
    let world = cynode_tests::World::new()?;
    let worker = world.worker(&cynode_tests::Options::default()).await?;
    let mut command = cynode(&world)?;
    command
        .env("CYNODE_URL", worker.url()?)
        .env("CYNODE_TOKEN", worker.token()?)
        .args(["session", "create", "."]);
    let refused = run(&mut command, b"")?;
    assert_eq!(refused.failure(), (64, "usage".to_owned()));
    assert!(
        refused.stderr.contains("needs an orchestrator") && refused.stderr.contains("session cp"),
        "{refused:?}"
    );
    Ok(())
}
