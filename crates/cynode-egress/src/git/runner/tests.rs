//! A runner in the tests' own process, and tests of it with real git.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::AsyncReadExt as _;

use super::{RunnerClient, RunnerSettings, launch::command, serve::serve};
use crate::git::command::{
    GitCommand, GitError, GitOutput, GitRunner, GitStream, Mirror, RemoteAccess,
};

/// Runs git as this process's user, without the launcher.
#[derive(Clone, Debug)]
pub(crate) struct LocalRunner {
    client: RunnerClient,
}

impl LocalRunner {
    pub(crate) async fn new(directory: &Path) -> Self {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a pair of sockets");
        tokio::spawn(async move { serve(theirs).await.expect("served") });
        let settings = RunnerSettings {
            directory: directory.join("mirrors"),
            git: PathBuf::from("git"),
            memory_bytes: 1 << 30,
            file_bytes: 1 << 30,
            is_separate: false,
            launches: false,
        };
        for name in ["mirrors", "calls"] {
            fs_err::create_dir_all(directory.join(name)).expect("a directory");
        }
        let uid = rustix::process::geteuid().as_raw();
        let client = RunnerClient::connect(ours, settings, directory.join("calls"), uid, 4)
            .await
            .expect("configured");
        Self { client }
    }

    pub(crate) fn client(&self) -> &RunnerClient {
        &self.client
    }
}

#[async_trait]
impl GitRunner for LocalRunner {
    async fn prepare(&self, mirror: &Mirror) -> Result<(), GitError> {
        self.client.prepare(mirror).await
    }

    async fn run(&self, mirror: &Mirror, command: GitCommand) -> Result<GitOutput, GitError> {
        self.client.run(mirror, command).await
    }

    async fn stream(&self, mirror: &Mirror, command: GitCommand) -> Result<GitStream, GitError> {
        self.client.stream(mirror, command).await
    }

    async fn accept(&self, mirror: &Mirror, quarantine: &str) -> Result<(), GitError> {
        self.client.accept(mirror, quarantine).await
    }

    async fn forget(&self, mirror: &Mirror, name: &str) {
        self.client.forget(mirror, name).await;
    }
}

/// A program that a test needs.
pub(crate) fn program(name: &str) -> std::process::Command {
    command(name)
}

/// Runs git as a person would, in a directory.
pub(crate) fn git(directory: &Path, args: &[&str]) -> String {
    let output = command("git")
        .args(["-c", "user.name=Ada", "-c", "user.email=ada@example.com"])
        .args([
            "-c",
            "init.defaultBranch=main",
            "-c",
            "commit.gpgSign=false",
        ])
        .args(args)
        .current_dir(directory)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env_remove("GIT_DIR")
        .output()
        .expect("git runs");
    assert!(
        output.status.success(),
        "git {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_owned()
}

/// The way to a repository of this machine, for tests.
pub(crate) fn local_remote() -> RemoteAccess {
    RemoteAccess {
        scheme: "file".to_owned(),
        host: "localhost".to_owned(),
        port: 443,
        addresses: Vec::new(),
        ca: None,
        credential: None,
    }
}

pub(crate) fn mirror() -> Mirror {
    Mirror("01a1de8e-none".to_owned())
}

fn git_command(args: &[&str]) -> GitCommand {
    GitCommand {
        args: args.iter().map(Into::into).collect(),
        input: Bytes::new(),
        index: None,
        quarantine: None,
        max_output_bytes: 1 << 20,
        timeout: Duration::from_secs(30),
        remote: None,
    }
}

async fn prepared() -> (tempfile::TempDir, LocalRunner) {
    let root = tempfile::tempdir().expect("a directory");
    let runner = LocalRunner::new(root.path()).await;
    runner.prepare(&mirror()).await.expect("prepared");
    runner.prepare(&mirror()).await.expect("again");
    (root, runner)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_run_with_input_output_and_errors() {
    let (_root, runner) = prepared().await;
    let large = Bytes::from(vec![b'a'; 300_000]);
    let stored = runner
        .run(
            &mirror(),
            GitCommand {
                input: large.clone(),
                ..git_command(&["hash-object", "-w", "--stdin"])
            },
        )
        .await
        .expect("stored");
    let id = String::from_utf8(stored.stdout).expect("an id");
    let id = id.trim();
    let read = runner
        .run(&mirror(), git_command(&["cat-file", "blob", id]))
        .await
        .expect("read");
    assert_eq!(read.stdout, large);
    let small = GitCommand {
        max_output_bytes: 1_000,
        ..git_command(&["cat-file", "blob", id])
    };
    assert!(matches!(
        runner.run(&mirror(), small.clone()).await,
        Err(GitError::TooMuchOutput { limit: 1_000, .. })
    ));
    let mut stream = runner.stream(&mirror(), small).await.expect("started");
    let mut output = Vec::new();
    assert!(stream.stdout.read_to_end(&mut output).await.is_err());
    assert!(matches!(
        stream.ended.await.expect("told"),
        Err(GitError::TooMuchOutput { .. })
    ));
    let mut stream = runner
        .stream(&mirror(), git_command(&["cat-file", "blob", id]))
        .await
        .expect("started");
    let mut output = Vec::new();
    stream.stdout.read_to_end(&mut output).await.expect("read");
    assert_eq!(output, large);
    assert!(stream.ended.await.expect("told").is_ok());
    match runner
        .run(&mirror(), git_command(&["cat-file", "blob", "HEAD"]))
        .await
    {
        Err(GitError::Exit {
            command,
            code: 128,
            stderr,
        }) => assert!(command == "cat-file" && stderr.contains("HEAD"), "{stderr}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_environment_and_the_configuration_of_git_are_the_runners_alone() {
    let (_root, runner) = prepared().await;
    let listed = runner
        .run(
            &mirror(),
            git_command(&["config", "--list", "--show-scope"]),
        )
        .await
        .expect("listed");
    let listed = String::from_utf8(listed.stdout).expect("text");
    for line in listed.lines() {
        assert!(
            line.starts_with("local\t") || line.starts_with("command\t"),
            "{line}"
        );
    }
    assert!(listed.contains("protocol.allow=never"), "{listed}");
    // No transport, although the repository is here.
    for remote in [
        None,
        Some(RemoteAccess {
            scheme: "https".to_owned(),
            ..local_remote()
        }),
    ] {
        let fetch = GitCommand {
            remote,
            ..git_command(&["ls-remote", "file:///"])
        };
        match runner.run(&mirror(), fetch).await {
            Err(GitError::Exit { stderr, .. }) => {
                assert!(stderr.contains("transport 'file' not allowed"), "{stderr}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_ends_at_its_deadline_and_when_nobody_waits_for_it() {
    let (root, runner) = prepared().await;
    // git runs an alias in a shell: a stand-in for a git that does not end.
    let marker = root.path().join("marker");
    let script = format!(
        "alias.wait=!sleep 60 & echo $$ $! > {}; wait",
        marker.display()
    );
    let sleep = |timeout| GitCommand {
        timeout,
        ..git_command(&["-c", &script, "wait"])
    };
    let started = Instant::now();
    assert!(matches!(
        runner.run(&mirror(), sleep(Duration::from_secs(2))).await,
        Err(GitError::Timeout { .. })
    ));
    assert!(started.elapsed() < Duration::from_secs(20));
    assert_ended(&marker).await;
    fs_err::remove_file(&marker).expect("removed");
    let stream = runner
        .stream(&mirror(), sleep(Duration::from_secs(60)))
        .await
        .expect("started");
    eventually(|| marker.exists()).await;
    drop(stream);
    assert_ended(&marker).await;
}

async fn assert_ended(marker: &Path) {
    let pids = fs_err::read_to_string(marker).expect("it started");
    for pid in pids.split_whitespace() {
        let stat = format!("/proc/{pid}/stat");
        eventually(|| fs_err::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z ")))
            .await;
    }
}

async fn eventually(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "it did not happen");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_a_quarantine_are_the_mirrors_only_once_accepted() {
    let (_root, runner) = prepared().await;
    let base = runner
        .run(
            &mirror(),
            GitCommand {
                input: Bytes::from_static(b"base"),
                ..git_command(&["hash-object", "-w", "--stdin"])
            },
        )
        .await
        .expect("stored");
    let base = String::from_utf8(base.stdout)
        .expect("an id")
        .trim()
        .to_owned();
    let within = |args: &[&str], input: &'static [u8]| GitCommand {
        input: Bytes::from_static(input),
        quarantine: Some("op-1".to_owned()),
        ..git_command(args)
    };
    let new = runner
        .run(&mirror(), within(&["hash-object", "-w", "--stdin"], b"new"))
        .await
        .expect("stored");
    let new = String::from_utf8(new.stdout)
        .expect("an id")
        .trim()
        .to_owned();
    for id in [&base, &new] {
        runner
            .run(&mirror(), within(&["cat-file", "-e", id], b""))
            .await
            .expect("visible in the quarantine");
    }
    let outside = async |id: &str| {
        runner
            .run(&mirror(), git_command(&["cat-file", "-e", id]))
            .await
            .is_ok()
    };
    assert!(outside(&base).await && !outside(&new).await);
    runner.accept(&mirror(), "op-1").await.expect("accepted");
    runner.accept(&mirror(), "op-1").await.expect("again");
    assert!(outside(&new).await);
    runner
        .run(
            &mirror(),
            GitCommand {
                quarantine: Some("op-2".to_owned()),
                input: Bytes::from_static(b"dropped"),
                ..git_command(&["hash-object", "-w", "--stdin"])
            },
        )
        .await
        .expect("stored");
    runner.forget(&mirror(), "op-2").await;
    assert!(
        !runner
            .client()
            .scratch_path(&mirror(), "op-2", "objects")
            .exists()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_would_leave_the_directory_are_refused() {
    let (_root, runner) = prepared().await;
    for name in ["../x", "", ".", "..", "a/b", "-x", "a\0b"] {
        assert!(
            runner.prepare(&Mirror(name.to_owned())).await.is_err(),
            "{name:?}"
        );
        assert!(runner.accept(&mirror(), name).await.is_err(), "{name:?}");
        assert!(
            runner
                .client()
                .read_scratch(&mirror(), "op", name)
                .await
                .is_err(),
            "{name:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_runner_removes_what_the_last_one_left() {
    let (root, runner) = prepared().await;
    runner
        .client()
        .scratch(&mirror(), "op-1")
        .await
        .expect("made");
    let scratch = runner.client().scratch_path(&mirror(), "op-1", "");
    let lock = root
        .path()
        .join("mirrors")
        .join(format!("{}.git", mirror().0))
        .join("refs/heads/main.lock");
    fs_err::write(&lock, "").expect("written");
    assert!(scratch.exists());
    drop(runner);
    let _next = LocalRunner::new(root.path()).await;
    assert!(!scratch.exists() && !lock.exists());
}
