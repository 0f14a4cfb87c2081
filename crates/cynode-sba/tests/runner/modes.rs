//! Files, standard input and output, and what is refused before any step.

use cynode_api::sba::{FailureCode, JobResult, ResultStatus, StepStatus};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{
    JOB_ID, Sandbox, as_user, eventually, is_root, job, sh, signal, stdout, step, with,
};

#[test]
fn a_job_on_standard_input_has_its_result_on_standard_output_and_nothing_else() {
    let sandbox = Sandbox::new();
    let job = job(json!([sh("echo out; echo err >&2; touch made")]));
    let (result, output) = sandbox.run_stdio(job.to_string().as_bytes());
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(stdout(&result.steps[0]), "out\n");
    let mut lines: Vec<&str> = std::str::from_utf8(&output.stderr)
        .expect("text")
        .lines()
        .collect();
    lines.sort_unstable();
    assert_eq!(lines, ["err", "out"]);
    assert!(sandbox.workspace("made").exists());
    let left = std::fs::read_dir(sandbox.path("job")).expect("listed");
    assert_eq!(left.count(), 0);
}

#[test]
// part of: CYNAI.SBAGNT.SchemaValidation
fn an_invalid_job_is_refused_before_any_step_with_the_path_to_the_error() {
    let sandbox = Sandbox::new();
    let mut broken = job(json!([
        sh("touch made"),
        step("run_command", json!({"argv": 1}))
    ]));
    let (result, output) = sandbox.run(&broken);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(result.failure_code, Some(FailureCode::SchemaValidation));
    assert_eq!(
        result.job_id.map(|id| id.to_string()).as_deref(),
        Some(JOB_ID)
    );
    assert_eq!(result.steps, []);
    let message = result.failure_message.expect("a message");
    assert!(message.contains("steps[1].args.argv"), "{message}");
    broken["protocol_version"] = json!("2.0");
    let (result, _) = sandbox.run_stdio(broken.to_string().as_bytes());
    assert_eq!(result.failure_code, Some(FailureCode::SchemaValidation));
    for text in ["", "{", "null", &" ".repeat(11 << 20)] {
        let (result, output) = sandbox.run_stdio(text.as_bytes());
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(result.failure_code, Some(FailureCode::SchemaValidation));
        assert_eq!(result.job_id, None);
    }
    assert!(!sandbox.workspace("made").exists());
}

#[test]
fn a_job_that_can_not_be_read_is_a_usage_error_with_a_result() {
    let sandbox = Sandbox::new();
    let child = sandbox.command(&[]).spawn().expect("started");
    let (result, output) = sandbox.finish(child);
    assert_eq!(output.status.code(), Some(64));
    assert_eq!(result.failure_code, Some(FailureCode::SchemaValidation));
    std::fs::remove_dir_all(sandbox.path("job")).expect("removed");
    let output = sandbox.command(&[]).output().expect("ended");
    assert_eq!(output.status.code(), Some(64));
    let output = sandbox.command(&["--bad"]).output().expect("ended");
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&output.stderr).contains("usage: cynode-sba"));
    // Without process 1 there is no descriptor 3, or no socket.
    let output = sandbox.command(&["--supervised"]).output().expect("ended");
    assert_eq!(output.status.code(), Some(64));
}

#[test]
// part of: CYNAI.SBAGNT.SandboxBoundary
fn the_runner_refuses_to_run_as_root() {
    if !is_root() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.put("job/job.json", job(json!([sh("touch made")])).to_string());
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_cynode-sba"))
        .args(["run", "--job-dir"])
        .arg(sandbox.path("job"))
        .output()
        .expect("ended");
    assert_eq!(output.status.code(), Some(77));
    assert!(!sandbox.workspace("made").exists());
}

#[test]
fn steps_can_not_look_into_the_runner() {
    if !is_root() {
        return;
    }
    let sandbox = Sandbox::new();
    // The runner is the parent of the step's supervisor.
    let script = "supervisor=$PPID; runner=$(cut -d' ' -f4 /proc/$supervisor/stat); \
                  cat /proc/$runner/comm; ls /proc/$runner/fd && exit 9; \
                  cat /proc/$runner/environ && exit 9; ls /proc/self/fd";
    let (result, _) = sandbox.run(&job(json!([sh(script)])));
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    let lines: Vec<&str> = stdout(&result.steps[0]).lines().collect();
    // `ls` itself opens the fourth.
    assert_eq!(lines, ["cynode-sba", "0", "1", "2", "3"]);
}

fn progress(sandbox: &Sandbox) -> Value {
    serde_json::from_str(&sandbox.get("job/status.json")).expect("JSON")
}

#[test]
// part of: CYNAI.SBAGNT.JobLifecycle
// part of: CYNAI.SBAGNT.TodoList
fn status_and_todo_list_are_in_files_while_the_job_runs_and_after_it() {
    let sandbox = Sandbox::new();
    let mut job = job(json!([
        sh("true"),
        sh("while [ ! -e go ]; do sleep 0.01; done")
    ]));
    job["context"] = json!({"requirements": ["It works"]});
    let child = sandbox.start(&job);
    eventually("the second step runs", || {
        sandbox.path("job/status.json").exists() && progress(&sandbox)["step"] == 1
    });
    let status = progress(&sandbox);
    assert_eq!(
        (&status["status"], &status["steps"]),
        (&json!("in_progress"), &json!(2))
    );
    assert_eq!(
        (&status["job_id"], &status["activity"]),
        (&json!(JOB_ID), &json!("run_command"))
    );
    assert!(!sandbox.path("job/result.json").exists());
    let done = || -> Vec<Value> {
        let todo: Value = serde_json::from_str(&sandbox.get("job/todo.json")).expect("JSON");
        let items = todo["items"].as_array().expect("items");
        items.iter().map(|item| item["done"].clone()).collect()
    };
    // Also when the steps before this one took no time.
    eventually("the first step is checked off", || {
        done() == [false, true, false]
    });
    sandbox.put("workspace/go", "");
    let (result, _) = sandbox.finish(child);
    assert_eq!(progress(&sandbox)["status"], "success");
    assert_eq!(done(), [false, true, true]);
    assert_eq!(result.todo.expect("a summary").open, ["It works"]);
}

/// Kills a runner in its second step, and runs the job again.
fn restarted(idempotent: bool, change: impl FnOnce(&Sandbox, &mut Value)) -> (Sandbox, JobResult) {
    let sandbox = Sandbox::new();
    let second = "echo ran >>second; [ -e go ] || sleep 1000";
    let mut job = job(json!([
        sh("echo ran >>first"),
        with(sh(second), "idempotent", idempotent),
        sh("echo ran >>third"),
    ]));
    let mut child = sandbox.start(&job);
    eventually("the second step runs", || {
        sandbox.workspace("second").exists()
    });
    child.kill().expect("killed");
    child.wait().expect("ended");
    sandbox.put("workspace/go", "");
    change(&sandbox, &mut job);
    let (result, _) = sandbox.run(&job);
    (sandbox, result)
}

#[test]
fn a_runner_that_is_started_again_continues_where_the_last_one_was_killed() {
    let (sandbox, result) = restarted(true, |_, _| {});
    assert_eq!(result.status, ResultStatus::Success, "{result:?}");
    let runs = |name: &str| sandbox.get(&format!("workspace/{name}")).lines().count();
    assert_eq!((runs("first"), runs("second"), runs("third")), (1, 2, 1));
    assert_eq!(result.steps.len(), 3);
    assert_eq!(
        (&result.steps[0].stdout, result.steps[0].truncated),
        (&None, true)
    );
    assert_eq!(result.todo.expect("a summary").done, 3);
    assert_eq!(progress(&sandbox)["attempt"], 2);
}

#[test]
fn a_step_in_flight_is_not_run_again_unless_it_is_idempotent() {
    let (sandbox, result) = restarted(false, |_, _| {});
    assert_eq!(result.failure_code, Some(FailureCode::RunnerInterrupted));
    assert_eq!(result.steps[1].status, StepStatus::Interrupted);
    assert_eq!(sandbox.get("workspace/second").lines().count(), 1);
    // The job has ended: the next run is a new one.
    let (result, _) = sandbox.run(&job(json!([sh("true")])));
    assert_eq!(result.status, ResultStatus::Success);
}

#[test]
fn another_job_and_a_job_with_a_result_begin_from_the_start() {
    let (sandbox, result) = restarted(false, |_, job| {
        job["steps"][1]["args"]["argv"] = json!(["true # another job"]);
    });
    assert_eq!(result.status, ResultStatus::Success);
    assert_eq!(sandbox.get("workspace/first").lines().count(), 2);
    let (sandbox, result) = restarted(false, |sandbox, _| sandbox.put("job/result.json", "{}"));
    assert_eq!(result.status, ResultStatus::Success);
    assert_eq!(sandbox.get("workspace/first").lines().count(), 2);
    let (sandbox, result) = restarted(false, |sandbox, _| sandbox.put("job/status.json", "{"));
    assert_eq!(result.status, ResultStatus::Success);
    assert_eq!(sandbox.get("workspace/first").lines().count(), 2);
}

#[test]
fn a_reader_of_the_result_may_share_its_pipe_with_the_output() {
    let sandbox = Sandbox::new();
    let flood = "head -c 300000 /dev/zero | tr '\\0' x; echo";
    let job = job(json!([sh(flood)])).to_string();
    let output = as_user("sh")
        .args([
            "-c",
            "printf %s \"$1\" | \"$2\" run --stdio --workspace \"$3\" 2>&1 | (sleep 0.3; cat)",
        ])
        .args(["sh", &job, env!("CARGO_BIN_EXE_cynode-sba")])
        .arg(sandbox.path("workspace"))
        .output()
        .expect("ended");
    let text = String::from_utf8(output.stdout).expect("text");
    let json = text
        .lines()
        .find(|line| line.starts_with('{'))
        .expect("a result");
    let result = JobResult::parse(json.as_bytes()).expect("a valid result");
    assert_eq!(result.status, ResultStatus::Success);
}

#[test]
fn a_runner_whose_streams_are_closed_still_works_its_job() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(&job(json!([sh(
        "sleep 0.2; echo out; echo err >&2; echo more"
    )])));
    drop((child.stdout.take(), child.stderr.take()));
    child.wait().expect("ended");
    assert!(sandbox.get("job/result.json").contains("out\\nmore\\n"));
}

#[test]
fn an_interrupt_of_the_terminal_cancels_a_job() {
    let sandbox = Sandbox::new();
    let child = sandbox.start(&job(json!([sh("touch started; sleep 1000")])));
    eventually("the step runs", || sandbox.workspace("started").exists());
    signal(child.id(), Signal::INT);
    let (result, _) = sandbox.finish(child);
    assert_eq!(result.failure_code, Some(FailureCode::Canceled));
}
