//! Every way in which a job may end, and the result that it has then.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, JobState, LimitsRequest, OutputQuery, TaskId, sba::StepStatus};
use cynode_tests::{
    Answer, Http, Options, World, eventually, on_every_runtime, run_step, sba_job, specification,
    step, with,
};
use http::Method;
use serde_json::{Value, json};

use super::{Ended, TIMEOUT, no_container, run, until_step};

on_every_runtime!(the_first_failure_ends_a_job_and_its_deadlines_hold);

/// Changes a request.
type Change<'a> = &'a dyn Fn(&mut Value);

const SUCCESS: StepStatus = StepStatus::Success;

// proves: CYNAI.SBAGNT.ResultContract with a_stopped_job_has_a_whole_result and
// a_full_disk_fails_the_step_that_needs_it_and_not_the_result and
// a_step_or_a_runner_that_takes_all_memory_ends_the_job_with_a_result and
// the_largest_result_arrives_whole and a_panic_of_a_step_ends_in_a_complete_result and
// a_step_that_forges_every_file_and_kills_the_runner_has_no_success
// part of: CYNAI.SBAGNT.FailureCodes
// invariant: jobs
async fn the_first_failure_ends_a_job_and_its_deadlines_hold(world: World) -> Result<()> {
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let failed = run(
        &client,
        &[
            run_step("echo before"),
            with(run_step("echo out; echo err >&2; exit 3"), "id", "broken"),
            run_step("echo never > /job/artifacts/never"),
        ],
    )
    .await?;
    assert_eq!(
        failed.verdict(),
        (JobState::Failed, "step_failed", "worker")
    );
    assert_eq!(failed.statuses(), [SUCCESS, StepStatus::Failure]);
    let last = failed.step(1)?;
    assert_eq!(
        (
            last.exit_code,
            last.stdout.as_deref(),
            last.stderr.as_deref()
        ),
        (Some(3), Some("out\n"), Some("err\n"))
    );
    assert!(
        failed
            .message()
            .contains("step 2 (run_command, \"broken\")"),
        "{failed:?}"
    );
    assert!(
        failed.job.artifacts.is_empty() && failed.job.exit_code == Some(1),
        "{failed:?}"
    );

    let begun = Instant::now();
    let stubborn = "trap '' TERM; (setsid sleep 777 &); echo begun; while :; do sleep 1; done";
    let late = with(run_step(stubborn), "timeout_seconds", 1);
    let late = run(&client, &[late, run_step("true")]).await?;
    assert_eq!(late.verdict(), (JobState::Timeout, "timeout", "worker"));
    assert_eq!(late.statuses(), [StepStatus::Timeout]);
    assert_eq!(late.stdout(0)?, "begun\n");
    assert!(late.message().contains("timeout_seconds of 1"), "{late:?}");

    let mut spec = specification(&[run_step("echo one"), run_step("exec sleep 777")]);
    spec["constraints"]["max_runtime_seconds"] = json!(2);
    let late = Ended::after(&client, &sba_job(&spec)).await?;
    assert_eq!(late.verdict(), (JobState::Timeout, "timeout", "worker"));
    assert_eq!(late.statuses(), [SUCCESS, StepStatus::Timeout]);
    assert!(
        late.message().contains("max_runtime_seconds of 2"),
        "{late:?}"
    );
    ensure!(
        begun.elapsed() < Duration::from_secs(60),
        "deadlines took {:?}",
        begun.elapsed()
    );
    worker.shut_down().await?;
    world.assert_clean().await
}

// proves: CYNAI.SBAGNT.WorkerApiIntegration with every_type_of_step_runs_in_a_sandbox and
// the_context_of_a_job_is_completed_from_its_project_task_and_preferences,
// CYNAI.SBAGNT.SchemaValidation with
// an_invalid_job_is_refused_before_any_step_with_the_path_to_the_error and
// every_file_has_the_expected_verdict_with_the_code_and_the_path_of_each_error,
// CYNAI.SBAGNT.ProtocolVersioning with
// every_file_has_the_expected_verdict_with_the_code_and_the_path_of_each_error
// invariant: jobs
#[tokio::test]
async fn a_specification_that_does_not_fit_its_request_is_refused_before_anything_runs()
-> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let http = Http::new(&worker)?;
    let body = |change: &dyn Fn(&mut Value)| -> Result<Value> {
        let request = sba_job(&specification(&[run_step("true")]));
        let mut body = serde_json::to_value(request)?;
        change(&mut body);
        Ok(body)
    };
    let other = TaskId::generate();
    let cases: [(Change<'_>, &str); 8] = [
        (
            &|body| body["job"]["protocol_version"] = json!("2.0"),
            "protocol_version",
        ),
        (
            &|body| {
                body["job"]["protocol_version"] = json!("1.7");
                body["job"]["colour"] = json!(1);
            },
            "1.7",
        ),
        (&|body| body["job"]["colour"] = json!(1), "job: colour"),
        (
            &|body| body["job"]["steps"][0]["args"]["argv"] = json!([1]),
            "steps[0].args.argv[0]",
        ),
        (
            &|body| body["job"]["steps"][0]["type"] = json!("fly"),
            "steps[0].type",
        ),
        (
            &|body| body["job"]["constraints"] = json!({}),
            "constraints.max_output_bytes",
        ),
        (
            &|body| body["job_id"] = json!(other),
            "job.job_id: must equal the job_id",
        ),
        (
            &|body| body["task_id"] = json!(other),
            "job.task_id: must equal the task_id",
        ),
    ];
    for (change, named) in cases {
        let request = http.request(Method::POST, "/v1/worker/jobs:run");
        let answer = Answer::of(request.json(&body(change)?)).await?;
        let problem = answer.problem()?;
        assert!(
            answer.status == 400 && problem.detail.contains(named),
            "{named}: {problem:?}"
        );
    }
    assert!(world.containers()?.is_empty());
    assert_eq!(
        fs_err::read_dir(world.state_dir().join("worker/jobs"))?.count(),
        0
    );
    // A higher minor version with fields that are known here runs.
    let newer = with(
        specification(&[run_step("echo on")]),
        "protocol_version",
        "1.7",
    );
    let ended = Ended::after(&worker.client()?, &sba_job(&newer)).await?;
    assert_eq!(ended.success()?.stdout(0)?, "on\n");
    Ok(())
}

// part of: CYNAI.SBAGNT.WorkerApiIntegration
#[tokio::test]
async fn without_the_agent_a_specification_is_refused() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&Options::default().set("exec_via", "\"runtime\""))
        .await?;
    let request = sba_job(&specification(&[run_step("true")]));
    let refused = worker
        .client()?
        .run_job(&request)
        .await
        .expect_err("no agent");
    assert!(refused.is(ErrorCode::AgentRequired), "{refused}");
    Ok(())
}

// part of: CYNAI.SBAGNT.FailureCodes
// invariant: jobs
#[tokio::test]
async fn output_up_to_the_limit_is_kept_and_a_byte_more_is_a_violation() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let limited = |last: Value| {
        let mut spec = specification(&[
            run_step("head -c 600 /dev/zero | tr '\\0' a; head -c 300 /dev/zero | tr '\\0' b >&2"),
            step(
                "write_file",
                &json!({"path": "file", "content": "c".repeat(101)}),
            ),
            last,
        ]);
        spec["constraints"]["max_output_bytes"] = json!(1_000);
        sba_job(&spec)
    };
    let print = |count: u64| run_step(&format!("head -c {count} file; exec sleep 0"));
    let read = |count: u64| step("read_file", &json!({"path": "file", "max_bytes": count}));
    for (at_limit, above) in [(print(100), print(101)), (read(100), read(101))] {
        let kept = Ended::after(&client, &limited(at_limit)).await?.success()?;
        let last = kept.step(2)?;
        let content = match &last.output {
            Some(output) => output["content"].as_str(),
            None => last.stdout.as_deref(),
        };
        assert_eq!(content.map(str::len), Some(100));
        let ended = Ended::after(&client, &limited(above)).await?;
        assert_eq!(
            ended.verdict(),
            (JobState::Failed, "constraint_violation", "worker"),
            "{ended:#?}"
        );
        assert!(
            ended.message().contains("max_output_bytes of 1000"),
            "{ended:?}"
        );
        let last = ended.step(2)?;
        let content = match &last.output {
            Some(output) => output["content"].as_str(),
            None => last.stdout.as_deref(),
        };
        assert_eq!((content.map(str::len), last.truncated), (Some(100), true));
    }
    // A command that never stops is killed.
    let flood = Ended::after(&client, &limited(run_step("yes & yes"))).await?;
    assert_eq!(flood.verdict().1, "constraint_violation");
    Ok(())
}

// part of: CYNAI.SBAGNT.ResultContract
// invariant: jobs
#[tokio::test]
async fn a_stopped_job_has_a_whole_result() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    for script in [
        "echo begun; exec sleep 777",
        "trap '' TERM; echo begun; (setsid sleep 777 &); while :; do sleep 1; done",
    ] {
        let request = sba_job(&specification(&[
            run_step("echo kept; echo kept > /job/artifacts/kept"),
            run_step(script),
        ]));
        client.run_job_async(&request).await?;
        until_step(&client, &request, 1).await?;
        eventually("the step has begun", TIMEOUT, async || {
            let page = client
                .job_output(request.job_id, &OutputQuery::default())
                .await?;
            let chunks = page.chunks.into_iter().filter_map(|chunk| chunk.data);
            Ok(chunks.collect::<String>().contains("begun"))
        })
        .await?;
        let stopped = Ended::of(client.stop_job(request.task_id, request.job_id).await?)?;
        assert_eq!(
            stopped.verdict(),
            (JobState::Canceled, "canceled", "worker"),
            "{script}"
        );
        assert_eq!(
            stopped.statuses(),
            [SUCCESS, StepStatus::Interrupted],
            "{script}"
        );
        assert_eq!(stopped.stdout(0)?, "kept\n");
        assert_eq!(stopped.job.artifacts.len(), 1, "{stopped:#?}");
        assert!(stopped.job.error.is_none());
    }
    // Before it could begin.
    let request = sba_job(&specification(&[run_step("true")]));
    client.run_job_async(&request).await?;
    let stopped = client.stop_job(request.task_id, request.job_id).await?;
    ensure!(
        matches!(stopped.state, JobState::Canceled | JobState::Completed),
        "{stopped:?}"
    );
    Ended::of(stopped)?;
    no_container(&world).await
}

// part of: CYNAI.SBAGNT.ResultContract
// invariant: jobs
#[tokio::test]
async fn a_full_disk_fails_the_step_that_needs_it_and_not_the_result() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let fill = "dd if=/dev/zero of=/workspace/big bs=1M 2>/dev/null; \
                dd if=/dev/zero of=/workspace/rest bs=1k 2>/dev/null; \
                dd if=/dev/zero of=/job/more bs=1k 2>/dev/null; echo full";
    let write = step(
        "write_file",
        &json!({"path": "file", "content": "x".repeat(100_000)}),
    );
    let small = LimitsRequest {
        memory_bytes: Some(64 << 20),
        disk_bytes: Some(32 << 20),
        ..Default::default()
    };
    for (steps, verdict) in [
        (
            vec![run_step(fill), run_step("echo on")],
            (JobState::Completed, "", "worker"),
        ),
        (
            vec![run_step(fill), write],
            (JobState::Failed, "step_failed", "worker"),
        ),
    ] {
        let mut request = sba_job(&specification(&steps));
        request.sandbox.limits = Some(small);
        let ended = Ended::after(&client, &request).await?;
        assert_eq!(ended.verdict(), verdict, "{ended:#?}");
        assert_eq!((ended.stdout(0)?, ended.statuses().len()), ("full\n", 2));
    }
    Ok(())
}

// part of: CYNAI.SBAGNT.ResultContract
// invariant: jobs
#[tokio::test]
async fn a_step_or_a_runner_that_takes_all_memory_ends_the_job_with_a_result() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let hungry = run(
        &client,
        &[run_step("echo on"), run_step("exec tail /dev/zero")],
    )
    .await?;
    assert_eq!(
        hungry.verdict(),
        (JobState::Failed, "step_failed", "worker"),
        "{hungry:#?}"
    );
    assert_eq!(hungry.statuses(), [SUCCESS, StepStatus::Failure]);
    assert!(
        hungry.message().contains("killed by signal 9"),
        "{hungry:#?}"
    );

    // The runner keeps what steps print; in base64 that is more than this sandbox has.
    let print = "head -c 16000000 /dev/zero | tr '\\0' '\\377'";
    for is_idempotent in [false, true] {
        let print = with(run_step(print), "idempotent", is_idempotent);
        let mut spec = specification(&[run_step("echo on"), print, run_step("echo never")]);
        spec["constraints"]["max_output_bytes"] = json!(16 << 20);
        let mut request = sba_job(&spec);
        request.sandbox.limits = Some(LimitsRequest {
            memory_bytes: Some(24 << 20),
            ..Default::default()
        });
        let ended = Ended::after(&client, &request).await?;
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
        assert_eq!(ended.stdout(0)?, "on\n");
    }
    Ok(())
}

// part of: CYNAI.SBAGNT.ResultContract
#[tokio::test]
async fn the_largest_result_arrives_whole() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut spec = specification(&[
        run_step("head -c 8388608 /dev/urandom"),
        run_step("yes üüüüüüüüüüüüüüüüüüüü | head -c 8388608"),
    ]);
    spec["constraints"]["max_output_bytes"] = json!(16 << 20);
    let mut request = sba_job(&spec);
    request.sandbox.limits = Some(LimitsRequest {
        memory_bytes: Some(512 << 20),
        ..Default::default()
    });
    let ended = Ended::after(&client, &request).await?.success()?;
    let text = ended.stdout(1)?;
    assert_eq!(
        text.chars().filter(|shown| *shown == 'ü').count(),
        4_092_004
    );
    assert!(ended.step(0)?.stdout.as_ref().context("output")?.len() > 8 << 20);
    assert_eq!(
        client.job(request.job_id).await?.sba_result,
        ended.job.sba_result
    );
    Ok(())
}

// part of: CYNAI.SBAGNT.ResultContract
// invariant: jobs
#[tokio::test]
async fn every_one_of_many_steps_has_its_result() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut steps: Vec<Value> = (0..499)
        .map(|index| step("run_command", &json!({"argv": ["echo", index.to_string()]})))
        .collect();
    steps.push(run_step("exit 7"));
    let ended = run(&client, &steps).await?;
    assert_eq!(ended.verdict().1, "step_failed");
    assert_eq!(ended.result.steps.len(), 500);
    for index in 0..499 {
        assert_eq!(ended.stdout(index)?, format!("{index}\n"));
    }
    Ok(())
}
