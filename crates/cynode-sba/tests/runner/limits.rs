//! Deadlines, limits, cancellation and full disks.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use cynode_api::sba::{FailureCode, JobResult, ResultStatus, StepStatus};
use rustix::process::Signal;
use serde_json::json;

use crate::support::{
    Sandbox, UID, eventually, is_root, is_running, job, sh, signal, stdout, step, with,
};

#[test]
fn a_deadline_of_a_step_ends_its_whole_tree_and_the_job() {
    let sandbox = Sandbox::new();
    let slow = sh("echo $$; setsid sh -c 'trap \"\" TERM; echo $$; sleep 1000' & sleep 1000");
    let job = job(json!([with(slow, "timeout_seconds", 1), sh("touch never")]));
    let begun = Instant::now();
    let (result, output) = sandbox.run(&job);
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(output.status.code(), Some(124));
    assert_eq!(result.status, ResultStatus::Timeout);
    assert_eq!(result.failure_code, Some(FailureCode::Timeout));
    let message = result.failure_message.expect("a message");
    assert!(message.contains("timeout_seconds of 1"), "{message}");
    assert_eq!(result.steps.len(), 1);
    assert_eq!(result.steps[0].status, StepStatus::Timeout);
    let pids: Vec<i32> = stdout(&result.steps[0])
        .lines()
        .map(|pid| pid.parse().expect("a process"))
        .collect();
    assert_eq!(pids.len(), 2);
    assert!(!pids.into_iter().any(is_running));
    assert!(!sandbox.workspace("never").exists());
}

#[test]
fn the_deadline_of_the_job_counts_over_all_steps() {
    let sandbox = Sandbox::new();
    let mut job = job(json!([
        with(sh("sleep 0.7"), "timeout_seconds", 60),
        with(sh("sleep 0.7"), "timeout_seconds", 60),
        sh("touch never"),
    ]));
    job["constraints"]["max_runtime_seconds"] = json!(1);
    let (result, output) = sandbox.run(&job);
    assert_eq!(output.status.code(), Some(124));
    assert_eq!(result.failure_code, Some(FailureCode::Timeout));
    let message = result.failure_message.expect("a message");
    assert!(message.contains("max_runtime_seconds of 1"), "{message}");
    assert_eq!(result.steps.len(), 2);
    assert!(!sandbox.workspace("never").exists());
}

#[test]
fn a_deadline_holds_for_file_steps_and_their_process_is_gone() {
    let sandbox = Sandbox::new();
    sandbox.put("workspace/huge", "");
    std::fs::OpenOptions::new()
        .write(true)
        .open(sandbox.workspace("huge"))
        .and_then(|file| file.set_len(1 << 42))
        .expect("sparse");
    let read = step("read_file", json!({"path": "huge", "start_line": 2}));
    let begun = Instant::now();
    let (result, _) = sandbox.run(&job(json!([with(read, "timeout_seconds", 1)])));
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(result.status, ResultStatus::Timeout);
    assert_eq!(result.steps[0].status, StepStatus::Timeout);
}

#[test]
fn nobody_who_reads_delays_a_deadline_when_nobody_reads() {
    let sandbox = Sandbox::new();
    let mut job = job(json!([with(sh("yes"), "timeout_seconds", 1)]));
    job["constraints"]["max_output_bytes"] = json!(16 * 1024 * 1024);
    sandbox.put("job/job.json", job.to_string());
    let begun = Instant::now();
    // The pipe of standard output is never read.
    let mut child = sandbox.command(&[]).spawn().expect("started");
    let status = child.wait().expect("ended");
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert!(
        status.code() == Some(124) || status.code() == Some(1),
        "{status}"
    );
    assert!(sandbox.get("job/result.json").contains("max_output_bytes"));
}

#[test]
fn output_up_to_the_limit_is_kept_and_one_byte_more_ends_the_job() {
    let sandbox = Sandbox::new();
    sandbox.put("workspace/file", "12345");
    let read = || step("read_file", json!({"path": "file"}));
    let limited = |steps, limit: u64| {
        let mut job = job(steps);
        job["constraints"]["max_output_bytes"] = json!(limit);
        sandbox.run(&job)
    };
    let steps = || json!([sh("printf 123; printf 45 >&2"), read(), sh("printf 6")]);
    let (result, _) = limited(steps(), 11);
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");

    let (result, output) = limited(steps(), 10);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(result.failure_code, Some(FailureCode::ConstraintViolation));
    let last = &result.steps[2];
    assert_eq!(
        (last.status, last.truncated, stdout(last)),
        (StepStatus::Failure, true, "")
    );

    let (result, _) = limited(steps(), 9);
    assert_eq!(result.failure_code, Some(FailureCode::ConstraintViolation));
    let output = result.steps[1].output.as_ref().expect("an output");
    assert_eq!(
        (&output["content"], &output["truncated"]),
        (&json!("1234"), &json!(true))
    );

    let (result, _) = limited(json!([sh("yes; touch never")]), 1_001);
    assert_eq!(result.failure_code, Some(FailureCode::ConstraintViolation));
    assert_eq!(stdout(&result.steps[0]), format!("{}y", "y\n".repeat(500)));
    assert!(!sandbox.workspace("never").exists());

    // A limit of the step itself is no violation.
    let bounded = step("read_file", json!({"path": "file", "max_bytes": 2}));
    let (result, _) = limited(json!([bounded]), 2);
    assert_eq!(result.status, ResultStatus::Success);
}

#[test]
fn a_command_that_exceeds_the_limit_is_killed_with_its_tree() {
    let sandbox = Sandbox::new();
    let mut job = job(json!([sh(
        "sleep 1000 & echo $! >pid; trap '' TERM PIPE; yes; sleep 1000"
    )]));
    job["constraints"]["max_output_bytes"] = json!(10);
    let begun = Instant::now();
    let (result, _) = sandbox.run(&job);
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(result.failure_code, Some(FailureCode::ConstraintViolation));
    let pid = sandbox
        .get("workspace/pid")
        .trim()
        .parse()
        .expect("a process");
    assert!(!is_running(pid));
}

#[test]
fn sigterm_cancels_the_job_with_a_complete_result() {
    for stubborn in [false, true] {
        let sandbox = Sandbox::new();
        let trap = if stubborn { "trap '' TERM; " } else { "" };
        let script = format!("{trap}echo started; touch started; sleep 1000; sleep 1000");
        let child = sandbox.start(&job(json!([
            sh("echo one"),
            sh(&script),
            sh("touch never")
        ])));
        eventually("the step runs", || sandbox.workspace("started").exists());
        let begun = Instant::now();
        signal(child.id(), Signal::TERM);
        let (result, output) = sandbox.finish(child);
        // The node gives a second.
        assert!(
            begun.elapsed() < Duration::from_millis(900),
            "{:?}",
            begun.elapsed()
        );
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(result.status, ResultStatus::Failure);
        assert_eq!(result.failure_code, Some(FailureCode::Canceled));
        assert_eq!(result.steps.len(), 2);
        assert_eq!(result.steps[1].status, StepStatus::Interrupted);
        assert_eq!(stdout(&result.steps[1]), "started\n");
    }
}

#[test]
fn sigterm_ends_a_file_step_too() {
    let sandbox = Sandbox::new();
    sandbox.put("workspace/huge", "");
    std::fs::OpenOptions::new()
        .write(true)
        .open(sandbox.workspace("huge"))
        .and_then(|file| file.set_len(1 << 42))
        .expect("sparse");
    let read = step("read_file", json!({"path": "huge", "start_line": 2}));
    let child = sandbox.start(&job(json!([read])));
    eventually("the step runs", || sandbox.path("job/status.json").exists());
    signal(child.id(), Signal::TERM);
    let (result, _) = sandbox.finish(child);
    assert_eq!(result.failure_code, Some(FailureCode::Canceled));
}

/// Runs a job whose directories are on a small disk of its own; needs root.
fn run_on_small_disk(size: &str, job: &serde_json::Value) -> Option<(JobResult, Option<i32>)> {
    if !is_root() {
        return None;
    }
    let sandbox = Sandbox::new();
    let root = sandbox.path("disk");
    std::fs::create_dir(&root).expect("made");
    let script = format!(
        "set -e; mount -t tmpfs -o size={size},mode=0777 none {root}; mkdir -m 0777 {root}/job \
         {root}/workspace; cat >{root}/job/job.json; code=0; setpriv --reuid {UID} --regid {UID} \
         --clear-groups {sba} run --job-dir {root}/job --workspace {root}/workspace >&2 || code=$?; \
         cat {root}/job/result.json; exit $code",
        root = root.display(),
        sba = env!("CARGO_BIN_EXE_cynode-sba"),
    );
    let mut child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    let mut stdin = child.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut stdin, job.to_string().as_bytes()).expect("written");
    drop(stdin);
    let output = child.wait_with_output().expect("ended");
    let result = JobResult::parse(&output.stdout);
    let result = result.unwrap_or_else(|error| panic!("{error}: {:?}", output.status));
    Some((result, output.status.code()))
}

#[test]
fn a_job_that_fills_the_disk_has_a_complete_result() {
    let fill = "cat /dev/zero >fill; cat /dev/zero >../job/fill";
    let steps = json!([sh("echo before"), sh(&format!("{fill}; echo after"))]);
    let Some((result, code)) = run_on_small_disk("4m", &job(steps)) else {
        return;
    };
    assert_eq!((result.status, code), (ResultStatus::Success, Some(0)));
    assert_eq!(stdout(&result.steps[1]), "after\n");
}

#[test]
fn a_result_that_does_not_fit_on_the_disk_comes_without_output() {
    let fill = "cat /dev/zero 2>/dev/null >fill";
    let flood = "head -c 3000000 /dev/zero | tr '\\0' x";
    let mut job = job(json!([sh(&format!("{fill}; {flood}")), sh("exit 4")]));
    job["constraints"]["max_output_bytes"] = json!(4_000_000);
    let Some((result, code)) = run_on_small_disk("4m", &job) else {
        return;
    };
    assert_eq!(code, Some(1));
    assert_eq!(result.failure_code, Some(FailureCode::StepFailed));
    assert_eq!(result.steps.len(), 2);
    assert_eq!(
        (&result.steps[0].stdout, result.steps[0].truncated),
        (&None, true)
    );
    assert_eq!(result.steps[1].exit_code, Some(4));
}
