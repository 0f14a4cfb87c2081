//! A job's directories, and the program as an ordinary user: it refuses to run as root.

use std::{
    io::Write as _,
    os::unix::{
        fs::{PermissionsExt as _, chown},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use cynode_api::sba::{JobResult, StepResult};
use serde_json::{Value, json};

pub(crate) const JOB_ID: &str = "01936f3e-7c4a-7b1e-9a55-0242ac120002";
pub(crate) const TASK_ID: &str = "01936f3e-7c4a-7b1e-9a55-0242ac120003";
/// The user of a sandbox.
pub(crate) const UID: u32 = 1000;
/// Far longer than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

pub(crate) struct Sandbox {
    temp: tempfile::TempDir,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        let sandbox = Self {
            temp: tempfile::tempdir().expect("temp dir"),
        };
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(sandbox.temp.path(), open).expect("mode");
        give(sandbox.temp.path());
        for name in ["job", "workspace"] {
            let path = sandbox.path(name);
            std::fs::create_dir(&path).expect("made");
            give(&path);
        }
        sandbox
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    pub(crate) fn workspace(&self, name: &str) -> PathBuf {
        self.path("workspace").join(name)
    }

    /// Writes a file of the sandbox's user.
    pub(crate) fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        let mut made = Vec::new();
        for parent in path.ancestors().skip(1) {
            if parent.exists() {
                break;
            }
            made.push(parent.to_owned());
        }
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        std::fs::write(&path, content).expect("written");
        for path in made.iter().chain([&path]) {
            give(path);
        }
    }

    pub(crate) fn get(&self, name: &str) -> String {
        let content = std::fs::read(self.path(name));
        String::from_utf8(content.unwrap_or_else(|error| panic!("{name}: {error}"))).expect("text")
    }

    /// The program with the directories of this sandbox.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = as_user(env!("CARGO_BIN_EXE_cynode-sba"));
        command
            .arg("run")
            .args(arguments)
            .arg("--job-dir")
            .arg(self.path("job"))
            .arg("--workspace")
            .arg(self.path("workspace"))
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn start(&self, job: &Value) -> Child {
        self.put("job/job.json", job.to_string());
        self.command(&[]).spawn().expect("started")
    }

    /// Runs a job from files.
    pub(crate) fn run(&self, job: &Value) -> (JobResult, Output) {
        let child = self.start(job);
        self.finish(child)
    }

    pub(crate) fn finish(&self, child: Child) -> (JobResult, Output) {
        let output = child.wait_with_output().expect("ended");
        (self.result(&output), output)
    }

    fn result(&self, output: &Output) -> JobResult {
        let json = std::fs::read(self.path("job/result.json"));
        let json = json.unwrap_or_else(|error| panic!("{error}: {output:?}"));
        JobResult::parse(&json).expect("a valid result")
    }

    /// Runs a job from standard input.
    pub(crate) fn run_stdio(&self, job: &[u8]) -> (JobResult, Output) {
        let mut child = self
            .command(&["--stdio"])
            .stdin(Stdio::piped())
            .spawn()
            .expect("started");
        let mut stdin = child.stdin.take().expect("a pipe");
        let job = job.to_vec();
        let writer = std::thread::spawn(move || drop(stdin.write_all(&job)));
        let output = child.wait_with_output().expect("ended");
        writer.join().expect("written");
        let result = JobResult::parse(&output.stdout);
        (
            result.unwrap_or_else(|error| panic!("{error}: {output:?}")),
            output,
        )
    }
}

/// A program that runs with the rights of a sandbox.
pub(crate) fn as_user(program: &str) -> Command {
    let mut command = Command::new(program);
    if is_root() {
        command.uid(UID).gid(UID);
    }
    command
}

fn give(path: &Path) {
    if is_root() {
        chown(path, Some(UID), Some(UID)).expect("owner");
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "callers make the value in place"
)]
pub(crate) fn job(steps: Value) -> Value {
    json!({
        "protocol_version": "1.0",
        "job_id": JOB_ID,
        "task_id": TASK_ID,
        "constraints": {"max_runtime_seconds": 60, "max_output_bytes": 1_000_000},
        "steps": steps,
    })
}

/// A step that runs a script.
pub(crate) fn sh(script: &str) -> Value {
    json!({"type": "run_command", "args": {"argv": [script], "shell": true}})
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "callers make the value in place"
)]
pub(crate) fn step(kind: &str, args: Value) -> Value {
    json!({"type": kind, "args": args})
}

/// A step with another member.
pub(crate) fn with(mut step: Value, name: &str, value: impl Into<Value>) -> Value {
    step[name] = value.into();
    step
}

pub(crate) fn stdout(step: &StepResult) -> &str {
    step.stdout.as_deref().expect("a stream")
}

/// Polls until a condition holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn is_running(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a process");
    rustix::process::kill_process(pid, signal).expect("signalled");
}
