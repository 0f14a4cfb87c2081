//! What steps do in a sandbox, and what is visible of them while they run.

use anyhow::{Context as _, Result};
use cynode_api::{JobState, sba::StepStatus};
use cynode_tests::{
    Options, World, on_every_runtime, run_step, sba_job, specification, step, with,
};
use serde_json::json;

use super::{Ended, run, until_step};

on_every_runtime!(every_type_of_step_runs_in_a_sandbox);

// proves: CYNAI.SBAGNT.Enforcement with
// a_process_that_swaps_links_makes_no_step_leave_the_workspace and
// no_shell_interprets_arguments_unless_the_step_asks_for_one and
// paths_that_lead_out_of_the_workspace_are_refused_by_every_step
// part of: CYNAI.SBAGNT.SandboxBoundary, REQ-SANDBX-0108
// invariant: jobs
async fn every_type_of_step_runs_in_a_sandbox(world: World) -> Result<()> {
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let diff = "--- a/src/a.txt\n+++ b/src/a.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n";
    let ended = run(
        &client,
        &[
            with(
                step(
                    "run_command",
                    &json!({"argv": ["printf", "%s", "$HOME *; id"]}),
                ),
                "id",
                "argv",
            ),
            step(
                "run_command",
                &json!({
                    "argv": ["echo $((6 * 7)) $GREETING; id -u; pwd; echo err >&2"],
                    "shell": true, "cwd": "/tmp", "env": {"GREETING": "hello"},
                }),
            ),
            step(
                "write_file",
                &json!({"path": "src/a.txt", "content": "one\ntwo\nthree\n"}),
            ),
            step(
                "write_file",
                &json!({"path": "bytes", "content_b64": "/wD+", "mode": "0700"}),
            ),
            step("apply_unified_diff", &json!({"diff": diff})),
            step(
                "read_file",
                &json!({"path": "src/a.txt", "start_line": 2, "end_line": 3}),
            ),
            step("read_file", &json!({"path": "/workspace/bytes"})),
            run_step("ln -s /etc/passwd link; stat -c %a bytes; ls -d /job/* | sort"),
            step("list_tree", &json!({})),
        ],
    )
    .await?
    .success()?;
    assert_eq!(ended.stdout(0)?, "$HOME *; id");
    assert_eq!(ended.step(0)?.id.as_deref(), Some("argv"));
    assert_eq!(
        (ended.stdout(1)?, ended.step(1)?.stderr.as_deref()),
        ("42 hello\n1000\n/tmp\n", Some("err\n"))
    );
    let output = |index: usize| -> Result<_> {
        let output = ended.step(index)?.output.clone();
        output.with_context(|| format!("step {index} returned nothing"))
    };
    assert_eq!(output(2)?["size"], 14);
    assert_eq!(output(4)?["files"][0]["operation"], "modify");
    assert_eq!(output(5)?["content"], "2\nthree\n");
    assert_eq!(output(6)?["content_b64"], "/wD+");
    assert_eq!(
        ended.stdout(7)?,
        "700\n/job/artifacts\n/job/job.json\n/job/status.json\n/job/todo.json\n"
    );
    let listed: Vec<(String, String)> = output(8)?["entries"]
        .as_array()
        .context("entries")?
        .iter()
        .map(|entry| {
            let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
            (text("path"), text("type"))
        })
        .collect();
    let expected = [
        ("bytes", "file"),
        ("link", "symlink"),
        ("src", "dir"),
        ("src/a.txt", "file"),
    ];
    assert_eq!(
        listed,
        expected.map(|(path, kind)| (path.to_owned(), kind.to_owned()))
    );
    // The output of all steps is that of the job.
    assert_eq!(ended.job.output.stderr, "err\n");
    assert!(
        ended.job.output.stdout.starts_with("$HOME *; id42 hello\n"),
        "{ended:?}"
    );
    assert_eq!(ended.job.exit_code, Some(0));
    let todo = ended.result.todo.context("a summary of the todo list")?;
    assert_eq!((todo.total, todo.done, todo.open.len()), (9, 9, 0));
    Ok(())
}

// part of: CYNAI.SBAGNT.Enforcement
#[tokio::test]
async fn a_process_that_swaps_links_makes_no_step_leave_the_workspace() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    // A link leads inside most of the time, and outside now and then. What is outside must stay.
    let swap = "mkdir good /tmp/out; echo secret > /tmp/out/file; ln -s good dir; \
                (while :; do sleep 0.02; ln -s /tmp/out l; mv -T l dir; ln -s good l; mv -T l dir; \
                [ \"$(cat /tmp/out/*)\" = secret ] || echo x > /job/artifacts/leak; done) \
                </dev/null >/dev/null 2>&1 &";
    let mut steps = vec![run_step(swap)];
    for _ in 0..60 {
        steps.push(step(
            "write_file",
            &json!({"path": "dir/file", "content": "x"}),
        ));
        steps.push(step(
            "write_file",
            &json!({"path": "dir/new/file", "content": "x"}),
        ));
        steps.push(step("read_file", &json!({"path": "dir/file"})));
    }
    let (mut succeeded, mut refused) = (0, 0);
    for _ in 0..20 {
        let ended = run(&client, &steps).await?;
        assert!(
            ended.job.artifacts.is_empty(),
            "a step wrote outside: {ended:#?}"
        );
        for result in &ended.result.steps[1..] {
            if result.status == StepStatus::Success {
                succeeded += 1;
                let output = result.output.as_ref().context("an output")?;
                assert_ne!(output["content"], "secret\n");
            } else {
                assert_eq!(ended.verdict().1, "step_failed", "{ended:#?}");
                refused += 1;
            }
        }
        if succeeded >= 10 && refused >= 2 {
            return Ok(());
        }
    }
    panic!("{succeeded} succeeded, {refused} refused")
}

// part of: CYNAI.SBAGNT.JobLifecycle, CYNAI.SBAGNT.TodoList
// invariant: jobs
#[tokio::test]
async fn progress_is_visible_while_a_job_runs_and_gone_after_it() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let wait = "while [ ! -e /tmp/go ]; do sleep 0.05; done";
    let mut spec = specification(&[
        run_step("echo one"),
        run_step(&format!("cat /job/status.json /job/todo.json; {wait}")),
    ]);
    spec["context"] = json!({"requirements": ["stay small"]});
    spec["steps"][1]["timeout_seconds"] = json!(2);
    let request = sba_job(&spec);
    let accepted = client.run_job_async(&request).await?;
    assert!(!accepted.state.is_final());
    until_step(&client, &request, 1).await?;
    let job = client.job(request.job_id).await?;
    let progress = job.progress.context("progress")?;
    assert_eq!(job.state, JobState::InProgress);
    assert_eq!(
        (progress.step, progress.steps, progress.activity.as_deref()),
        (Some(1), Some(2), Some("run_command"))
    );
    assert!(
        (60..=120).contains(&progress.remaining_seconds),
        "{progress:?}"
    );
    assert!(job.started_at.is_some() && job.sba_result.is_none());
    let ended = Ended::after(&client, &request).await?;
    assert!(ended.job.progress.is_none());
    assert_eq!(ended.verdict(), (JobState::Timeout, "timeout", "worker"));
    let files = ended.stdout(1)?;
    for shown in ["\"status\":\"in_progress\"", "\"step\":1", "stay small"] {
        assert!(files.contains(shown), "{shown} is not in {files}");
    }
    let todo = ended.result.todo.context("a summary")?;
    assert_eq!((todo.total, todo.done), (3, 1), "{todo:?}");
    assert!(todo.open.contains(&"stay small".to_owned()), "{todo:?}");
    Ok(())
}
