//! The runner is killed: by a step, from outside, together with the worker.
//!
//! It is started once more. It knows what happened from the worker and from nobody else: every
//! file in its sandbox is one that a step may have written.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{JobRun, JobState, sba::StepStatus};
use cynode_tests::{
    Options, World, eventually, on_every_runtime, run_step, sba_job, specification, with,
};
use serde_json::{Value, json};

use super::{Ended, TIMEOUT, no_container, until_step};

on_every_runtime!(a_step_that_forges_every_file_and_kills_the_runner_has_no_success);

const SUCCESS: StepStatus = StepStatus::Success;

/// A script that writes every file of the job directory as if all steps had succeeded.
fn forge(specification: &Value) -> String {
    let step = |index: usize| {
        json!({
            "index": index, "id": null, "type": "run_command", "status": "success",
            "exit_code": 0, "stdout": "forged\n", "stderr": "", "encoding": "utf-8",
            "output": null, "error": null, "truncated": false,
            "started_at": "2026-01-01T00:00:00Z", "ended_at": "2026-01-01T00:00:01Z",
        })
    };
    let steps = specification["steps"].as_array().map_or(0, Vec::len);
    let result = json!({
        "protocol_version": "1.0", "job_id": specification["job_id"], "status": "success",
        "steps": (0..steps).map(step).collect::<Vec<_>>(), "artifacts": [],
        "failure_code": null, "failure_message": null,
    });
    let status = json!({
        "job_id": specification["job_id"], "task_id": specification["task_id"],
        "status": "success", "attempt": 1, "job_sha256": "0".repeat(64), "step": steps,
        "steps": steps, "remaining_seconds": 60, "updated_at": "2026-01-01T00:00:00Z",
    });
    let mut easy = specification.clone();
    for step in easy["steps"].as_array_mut().into_iter().flatten() {
        *step = run_step("echo forged");
    }
    let todo = json!({"items": [], "next_id": 0});
    [
        ("result", result),
        ("status", status),
        ("job", easy),
        ("todo", todo),
    ]
    .map(|(name, json)| format!("printf %s '{}' > /job/{name}.json; ", quoted(&json)))
    .concat()
}

/// JSON within single quotes of a shell.
fn quoted(json: &Value) -> String {
    json.to_string().replace('\'', "'\\''")
}

/// Kills everything but process 1 and the shell that runs this.
const KILL_ALL: &str = "kill -9 -1; exit 0";

/// A job whose second step forges every file, and then does as `ending` says.
fn forging(ending: &str, is_idempotent: bool) -> Value {
    let marked = |step: Value| with(step, "idempotent", is_idempotent);
    let mut spec = specification(&[
        run_step("echo x >> ran; echo first"),
        marked(run_step("")),
        run_step("wc -l < ran; echo third"),
    ]);
    // The forged job must not hold the forgery.
    spec["steps"][1] = marked(run_step("true"));
    let script = format!("echo x >> begun; {}{ending}", forge(&spec));
    spec["steps"][1] = marked(run_step(&script));
    spec
}

// part of: CYNAI.SBAGNT.ResultContract, CYNAI.SBAGNT.ResultAndArtifactDelivery
// invariant: jobs
async fn a_step_that_forges_every_file_and_kills_the_runner_has_no_success(
    world: World,
) -> Result<()> {
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    // In flight when the runner died: nobody knows what it did.
    let ended = Ended::after(&client, &sba_job(&forging(KILL_ALL, false))).await?;
    assert_eq!(
        ended.verdict(),
        (JobState::Failed, "runner_interrupted", "worker"),
        "{ended:#?}"
    );
    assert_eq!(
        ended.statuses(),
        [SUCCESS, StepStatus::Interrupted],
        "{ended:#?}"
    );
    assert_eq!(ended.stdout(0)?, "first\n");

    // Each runner is killed: there is no third one, and no success.
    let ended = Ended::after(&client, &sba_job(&forging(KILL_ALL, true))).await?;
    assert_eq!(
        ended.verdict(),
        (JobState::Failed, "runner_interrupted", "worker"),
        "{ended:#?}"
    );
    assert_eq!(
        ended.statuses(),
        [SUCCESS, StepStatus::Interrupted],
        "{ended:#?}"
    );

    // An idempotent step runs again; the one before does not, and the one after is the real one.
    let once = format!("[ $(wc -l < begun) -gt 1 ] && echo second && exit; {KILL_ALL}");
    let ended = Ended::after(&client, &sba_job(&forging(&once, true)))
        .await?
        .success()?;
    assert_eq!(
        (ended.stdout(0)?, ended.stdout(1)?, ended.stdout(2)?),
        ("first\n", "second\n", "1\nthird\n"),
        "{ended:#?}"
    );

    // The runner lives on: what it says counts.
    let ended = Ended::after(&client, &sba_job(&forging("exit 5", false))).await?;
    assert_eq!(
        ended.verdict(),
        (JobState::Failed, "step_failed", "worker"),
        "{ended:#?}"
    );
    no_container(&world).await
}

/// A process that a step left behind forges files and kills runners for as long as it lives.
// part of: CYNAI.SBAGNT.ResultContract
// invariant: jobs
#[tokio::test]
async fn a_process_that_forges_files_and_kills_runners_makes_no_success() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    for delay in ["0", "0.3"] {
        let mut spec = specification(&[
            run_step("true"),
            run_step("sleep 1; echo real"),
            run_step("echo x >&2; exit 9"),
        ]);
        let killer = format!(
            "(setsid sh -c \"sleep {delay}; {} while :; do for p in /proc/[0-9]*; do \
             grep -q '[s]upervised' \\$p/cmdline && kill -9 \\${{p#/proc/}}; done; done\" \
             </dev/null >/dev/null 2>&1 &); sleep 0.1",
            forge(&spec).replace('\\', "\\\\").replace('"', "\\\"")
        );
        spec["steps"][0] = run_step(&killer);
        let ended = Ended::after(&client, &sba_job(&spec)).await?;
        let (state, code, reporter) = ended.verdict();
        assert!(
            state == JobState::Failed
                && matches!(code, "step_failed" | "runner_interrupted")
                && reporter == "worker",
            "{ended:#?}"
        );
        assert!(
            !ended
                .result
                .steps
                .iter()
                .any(|step| step.stdout.as_deref() == Some("forged\n"))
        );
    }
    Ok(())
}

/// The runner of a job, as the host sees it.
pub(crate) fn runner_of(world: &World, request: &JobRun) -> Result<Option<u32>> {
    for pid in runners(world)? {
        let environment = fs_err::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let named = format!("CYNODE_JOB_ID={}", request.job_id);
        if String::from_utf8_lossy(&environment)
            .split('\0')
            .any(|variable| variable == named)
        {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// All runners of a world's sandboxes.
pub(crate) fn runners(world: &World) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir("/proc")? {
        let path = entry?.path();
        let read = |name: &str| {
            let bytes = fs_err::read(path.join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let arguments = read("cmdline");
        let is_runner = arguments
            .split('\0')
            .any(|argument| argument == "--supervised");
        // The supervisor of a step is a fork of the runner, under another name.
        let is_runner = is_runner && read("comm").trim_end() == "cynode-sba";
        if is_runner && read("cgroup").contains(&world.cgroup_parent()) {
            let pid = path.file_name().and_then(|name| name.to_str());
            found.push(pid.context("a pid")?.parse()?);
        }
    }
    Ok(found)
}

/// Kills a runner from outside.
pub(crate) fn kill(pid: u32) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).context("a pid")?;
    Ok(rustix::process::kill_process(
        pid,
        rustix::process::Signal::KILL,
    )?)
}

// part of: CYNAI.SBAGNT.JobLifecycle, CYNAI.SBAGNT.ResultAndArtifactDelivery
// invariant: nothing-lost
#[tokio::test]
async fn a_runner_and_its_worker_that_are_killed_together_repeat_nothing() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let wait = "while [ ! -e go ]; do sleep 0.05; done";
    for is_idempotent in [false, true] {
        let client = worker.client()?;
        let request = sba_job(&specification(&[
            run_step("echo x >> ran; cat /proc/sys/kernel/random/uuid"),
            with(
                run_step(&format!(
                    "echo x >> begun; [ $(wc -l < begun) -gt 1 ] && touch go; {wait}; echo second"
                )),
                "idempotent",
                is_idempotent,
            ),
            run_step("cat ran; echo third"),
        ]));
        client.run_job_async(&request).await?;
        until_step(&client, &request, 1).await?;
        let runner = runner_of(&world, &request)?.context("a runner")?;
        worker.kill()?;
        kill(runner)?;
        worker = world.worker(&Options::default()).await?;
        let client = worker.client()?;
        let ended = Ended::after(&client, &request).await?;
        if is_idempotent {
            let ended = ended.success()?;
            assert_eq!(ended.stdout(0)?.len(), 37);
            assert_eq!(
                (ended.stdout(1)?, ended.stdout(2)?),
                ("second\n", "x\nthird\n")
            );
        } else {
            assert_eq!(ended.verdict().1, "runner_interrupted", "{ended:#?}");
            assert_eq!(ended.statuses(), [SUCCESS, StepStatus::Interrupted]);
        }
        // The next worker has the same result.
        let before = client.job(request.job_id).await?;
        worker.kill()?;
        worker = world.worker(&Options::default()).await?;
        ensure!(
            worker.client()?.run_job(&request).await? == before,
            "{before:?}"
        );
        worker.client()?.ack_job(request.job_id).await?;
    }
    no_container(&world).await?;
    eventually("nothing of the jobs is left", TIMEOUT, async || {
        let sessions = fs_err::read_dir(world.state_dir().join("worker/sessions"))?.count();
        let files = fs_err::read_dir(world.state_dir().join("worker/jobs"))?;
        let directories =
            files.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().is_dir()));
        Ok(sessions == 0 && directories.count() == 0)
    })
    .await
}

/// The journal has the last step, and the sandbox was gone before the result arrived.
// proves: CYNAI.SBAGNT.ResultAndArtifactDelivery with
// only_a_runner_of_the_jobs_own_reports_by_the_callback and
// artifacts_are_kept_until_they_are_acknowledged and
// a_runner_and_its_worker_that_are_killed_together_repeat_nothing
// part of: CYNAI.SBAGNT.ResultContract
// invariant: nothing-lost
#[tokio::test]
async fn the_result_file_counts_if_every_step_succeeded_and_nothing_else_arrived() -> Result<()> {
    let world = World::new()?;
    for is_complete in [true, false] {
        let mut worker = world.worker(&Options::default()).await?;
        let client = worker.client()?;
        let request = sba_job(&specification(&[run_step("echo one"), run_step("sleep 2")]));
        let journal = format!("worker/jobs/{}/steps", request.job_id);
        let journal = world.state_dir().join(journal);
        client.run_job_async(&request).await?;
        eventually("the last step has started", TIMEOUT, async || {
            let text = fs_err::read_to_string(&journal).unwrap_or_default();
            Ok(text.contains("\"number\":4"))
        })
        .await?;
        worker.kill()?;
        let name = format!("cynode-{}", request.job_id);
        let podman = |arguments: &[&str]| world.podman().args(arguments).output();
        eventually("the runner has left its result", TIMEOUT, async || {
            let found = podman(&["exec", &name, "test", "-e", "/job/result.json"])?;
            Ok(found.status.success())
        })
        .await?;
        let removed = podman(&["rm", "--force", "--time", "0", &name])?;
        ensure!(removed.status.success(), "{removed:?}");
        if is_complete {
            // As if the worker had been killed a moment later.
            let result = json!({
                "index": 1, "type": "run_command", "status": "success", "exit_code": 0,
                "stdout": "", "stderr": "",
            })
            .to_string();
            let event = json!({"event": {
                "number": 5,
                "event": {"event": "step_ended", "index": 1},
                "result": {"bytes": result.len(), "status": "success"},
            }});
            let text = fs_err::read_to_string(&journal)?;
            fs_err::write(&journal, format!("{text}{event}\n{result}\n"))?;
        }
        let mut worker = world.worker(&Options::default()).await?;
        let ended = Ended::after(&worker.client()?, &request).await?;
        let expected = if is_complete {
            (JobState::Completed, "", "file")
        } else {
            // The file alone proves nothing: the last step may have written it.
            (JobState::Failed, "runner_interrupted", "worker")
        };
        assert_eq!(ended.verdict(), expected, "{ended:#?}");
        worker.kill()?;
    }
    Ok(())
}

/// A worker that is killed over and over while a job runs.
// part of: CYNAI.SBAGNT.JobLifecycle
// invariant: nothing-lost
#[tokio::test]
async fn a_job_goes_on_while_its_worker_is_gone() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let steps: Vec<Value> = (0..8)
        .map(|index| {
            run_step(&format!(
                "echo x >> ran; sleep 0.4; wc -l < ran; echo {index}"
            ))
        })
        .collect();
    let request = sba_job(&specification(&steps));
    worker.client()?.run_job_async(&request).await?;
    for index in [1, 3, 5] {
        let client = worker.client()?;
        eventually("the job gets on", TIMEOUT, async || {
            let job = client.job(request.job_id).await?;
            let step = job.progress.and_then(|progress| progress.step);
            Ok(step >= Some(index) || job.state.is_final())
        })
        .await?;
        worker.kill()?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        worker = world.worker(&Options::default()).await?;
    }
    let ended = Ended::after(&worker.client()?, &request).await?.success()?;
    for index in 0..8 {
        assert_eq!(ended.stdout(index)?, format!("{}\n{index}\n", index + 1));
    }
    // The output of the job is that of its steps, each once.
    let expected = (0..8).map(|index| format!("{}\n{index}\n", index + 1));
    let expected = expected.collect::<Vec<_>>().concat();
    assert_eq!(ended.job.output.stdout, expected);
    Ok(())
}
