//! What each type of step does and refuses.

use cynode_api::sba::{FailureCode, ResultStatus, StepStatus, StreamEncoding};
use serde_json::json;

use crate::support::{Sandbox, is_running, job, sh, stdout, step, with};

const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

#[test]
// part of: CYNAI.SBAGNT.Enforcement
fn every_type_of_step_runs_and_returns_what_it_did() {
    let sandbox = Sandbox::new();
    let diff = "--- a/new/file\n+++ b/new/file\n@@ -1 +1,2 @@\n-hello\n\\ No newline at end of file\n+one\n+two\n";
    let job = job(json!([
        step(
            "write_file",
            json!({"path": "new/file", "content": "hello", "mode": "0600"})
        ),
        step("read_file", json!({"path": "/workspace/new/file"})),
        step("apply_unified_diff", json!({"diff": diff})),
        step(
            "read_file",
            json!({"path": "new/file", "start_line": 2, "end_line": 2})
        ),
        step(
            "write_file",
            json!({"path": "bytes", "content_b64": "/wA="})
        ),
        step("read_file", json!({"path": "bytes", "max_bytes": 1})),
        step("list_tree", json!({})),
        with(
            step(
                "run_command",
                json!({"argv": ["cat", "file"], "cwd": "new", "env": {"A": "b"}})
            ),
            "id",
            "last",
        ),
    ]));
    let (result, output) = sandbox.run(&job);
    assert_eq!(output.status.code(), Some(0), "{result:?}");
    assert_eq!(result.status, ResultStatus::Success);
    assert_eq!((result.failure_code, result.failure_message), (None, None));
    let output = |index: usize| result.steps[index].output.clone().expect("an output");
    assert_eq!(output(0), json!({"sha256": HELLO, "size": 5}));
    let read = json!({
        "path": "new/file", "content": "hello", "size": 5, "sha256": HELLO, "truncated": false,
    });
    assert_eq!(output(1), read);
    assert_eq!(output(2)["files"][0]["operation"], "modify");
    assert_eq!(output(3)["content"], "two\n");
    assert_eq!(
        (&output(5)["content_b64"], &output(5)["truncated"]),
        (&json!("/w=="), &json!(true))
    );
    assert!(result.steps[5].truncated && !result.steps[3].truncated);
    let entries = output(6)["entries"].as_array().expect("entries").clone();
    let paths: Vec<_> = entries.iter().map(|entry| entry["path"].as_str()).collect();
    assert_eq!(paths, [Some("bytes"), Some("new"), Some("new/file")]);
    assert_eq!(entries[2]["mode"], "0600");
    let last = &result.steps[7];
    assert_eq!(
        (last.index, last.id.as_deref(), last.exit_code),
        (7, Some("last"), Some(0))
    );
    assert_eq!(
        (stdout(last), last.stderr.as_deref()),
        ("one\ntwo\n", Some(""))
    );
    for (step, index) in result.steps.iter().zip(0..) {
        assert_eq!((step.index, step.status), (index, StepStatus::Success));
        assert!(step.started_at <= step.ended_at && step.started_at.is_some());
    }
}

#[test]
fn no_shell_interprets_arguments_unless_the_step_asks_for_one() {
    let sandbox = Sandbox::new();
    let job = job(json!([
        step(
            "run_command",
            json!({"argv": ["echo", "$HOME; $(id)", "*"]})
        ),
        sh("echo $((6 * 7)); echo to stderr >&2; printf '\\377'"),
    ]));
    let (result, output) = sandbox.run(&job);
    assert_eq!(stdout(&result.steps[0]), "$HOME; $(id) *\n");
    let shell = &result.steps[1];
    assert_eq!(shell.encoding, StreamEncoding::Base64);
    assert_eq!(stdout(shell), "NDIK/w==");
    assert_eq!(shell.stderr.as_deref(), Some("dG8gc3RkZXJyCg=="));
    // The runner's own streams have the same, as it came.
    assert_eq!(output.stdout, b"$HOME; $(id) *\n42\n\xff");
    assert_eq!(output.stderr, b"to stderr\n");
}

#[test]
fn a_command_inherits_the_environment_of_the_runner_and_adds_its_own() {
    let sandbox = Sandbox::new();
    let env = step(
        "run_command",
        json!({"argv": ["env"], "env": {"OWN": "1", "BOTH": "step"}}),
    );
    sandbox.put("job/job.json", job(json!([env])).to_string());
    let child = sandbox
        .command(&[])
        .env("BOTH", "runner")
        .env("CYNODE_JOB_ID", "some")
        .spawn()
        .expect("started");
    let (result, _) = sandbox.finish(child);
    let lines: Vec<&str> = stdout(&result.steps[0]).lines().collect();
    for expected in ["OWN=1", "BOTH=step", "CYNODE_JOB_ID=some"] {
        assert!(lines.contains(&expected), "{lines:?}");
    }
    assert!(!lines.contains(&"BOTH=runner"));
}

#[test]
// part of: CYNAI.SBAGNT.FailureCodes
fn the_first_failure_ends_the_job_and_says_which_step_it_was() {
    let sandbox = Sandbox::new();
    let job = job(json!([
        sh("echo one"),
        with(sh("echo two; exit 3"), "id", "check"),
        sh("touch never"),
    ]));
    let (result, output) = sandbox.run(&job);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(result.status, ResultStatus::Failure);
    assert_eq!(result.failure_code, Some(FailureCode::StepFailed));
    assert_eq!(
        result.failure_message.as_deref(),
        Some("step 2 (run_command, \"check\"): the command exited with 3")
    );
    assert_eq!(result.steps.len(), 2);
    let failed = &result.steps[1];
    assert_eq!(
        (failed.status, failed.exit_code),
        (StepStatus::Failure, Some(3))
    );
    assert_eq!(failed.error.as_deref(), Some("the command exited with 3"));
    assert_eq!(stdout(failed), "two\n");
    assert!(!sandbox.workspace("never").exists());
    let todo = result.todo.expect("a summary");
    assert_eq!((todo.total, todo.done), (3, 1));
}

#[test]
fn steps_that_can_not_be_done_fail_with_their_reason() {
    let sandbox = Sandbox::new();
    sandbox.put("secret", "secret");
    std::os::unix::fs::symlink(sandbox.path("secret"), sandbox.workspace("link")).expect("link");
    let diff = "--- a/none\n+++ b/none\n@@ -1 +1 @@\n-a\n+b\n";
    for (step, reason) in [
        (
            step("run_command", json!({"argv": ["/none/such"]})),
            "No such file",
        ),
        (
            step("run_command", json!({"argv": ["no-such-program"]})),
            "No such file",
        ),
        (
            step("run_command", json!({"argv": ["true"], "cwd": "none"})),
            "can't change to",
        ),
        (sh("kill -KILL $$"), "killed by signal 9"),
        (step("read_file", json!({"path": "none"})), "no such file"),
        (
            step("read_file", json!({"path": "../secret"})),
            "not in the workspace",
        ),
        (
            step("read_file", json!({"path": "link"})),
            "leads out of the workspace",
        ),
        (
            step("write_file", json!({"path": "link", "content": ""})),
            "leads out of the workspace",
        ),
        (
            step("write_file", json!({"path": "/etc/x", "content": ""})),
            "not in the workspace",
        ),
        (
            step("list_tree", json!({"path": "/"})),
            "not in the workspace",
        ),
        (
            step("apply_unified_diff", json!({"diff": "nonsense"})),
            "the diff is invalid",
        ),
        (
            step("apply_unified_diff", json!({"diff": diff})),
            "does not apply",
        ),
    ] {
        let (result, output) = sandbox.run(&job(json!([step])));
        assert_eq!(output.status.code(), Some(1), "{step}");
        assert_eq!(result.failure_code, Some(FailureCode::StepFailed), "{step}");
        let failed = &result.steps[0];
        let error = failed.error.as_deref().expect("an error");
        assert!(error.contains(reason), "{step}: {error}");
        assert_eq!(failed.status, StepStatus::Failure);
        if reason == "does not apply" {
            let output = failed.output.as_ref().expect("an output");
            assert_eq!(output["rejects"][0]["path"], "none");
        }
    }
    assert_eq!(sandbox.get("secret"), "secret");
}

#[test]
fn a_job_ends_everything_that_its_steps_left_running() {
    let sandbox = Sandbox::new();
    let job = job(json!([
        sh("sleep 1000 & echo $!"),
        sh("setsid sleep 1000 >/dev/null 2>&1 & echo $!"),
    ]));
    let (result, _) = sandbox.run(&job);
    assert_eq!(result.status, ResultStatus::Success);
    for step in &result.steps {
        let pid = stdout(step).trim().parse().expect("a process");
        assert!(!is_running(pid), "{pid}");
    }
}

#[test]
fn a_step_can_not_write_to_the_runners_result_and_artifacts_are_listed_without_links() {
    let sandbox = Sandbox::new();
    let forged = format!("{}/job", sandbox.path("").display());
    let job = job(json!([sh(&format!(
        "cd {forged}; mkdir result.json status.json; ln -sf /etc/passwd todo.json; \
             mkdir -p artifacts/sub; printf hello >artifacts/sub/a; ln -s /etc/passwd artifacts/b"
    )),]));
    let (result, output) = sandbox.run(&job);
    assert_eq!(output.status.code(), Some(0), "{result:?}");
    let artifacts: Vec<_> = result
        .artifacts
        .iter()
        .map(|artifact| {
            (
                artifact.path.as_str(),
                artifact.size,
                artifact.sha256.as_deref(),
            )
        })
        .collect();
    assert_eq!(artifacts, [("sub/a", Some(5), Some(HELLO))]);
    assert!(
        sandbox
            .get("job/status.json")
            .contains("\"status\":\"success\"")
    );
    assert!(sandbox.get("job/todo.json").contains("run_command"));
}
