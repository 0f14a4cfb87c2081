//! Sandboxes without the agent: the container runtime alone controls them.

use std::time::Duration;

use anyhow::Result;
use cynode_api::{
    ErrorCode, ExecRequest, ExecState, ExecVia, JobState, ListRequest, SessionEnd, SignalName,
};
use cynode_client::{Error, OutputQuery, SessionClient};
use cynode_tests::{
    Options, RunningWorker, World, eventually, exec, job, on_every_runtime, session, sh,
};

on_every_runtime!(
    create_exec_stop_and_kill_work_with_the_agent_off,
    a_deadline_ends_all_of_an_exec_by_the_runtime,
    a_session_without_agent_survives_the_worker_and_its_execs_are_reported_lost,
);

async fn without_agent(
    world: &World,
) -> Result<(RunningWorker, SessionClient, cynode_api::SessionId)> {
    let worker = world
        .worker(&Options::default().set("exec_via", "\"runtime\""))
        .await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    Ok((worker, client, id))
}

// proves: REQ-SANDBX-0104,
// CYNAI.SANDBX.SandboxConnectivity with a_deadline_ends_all_of_an_exec_by_the_runtime and
// only_process_one_may_speak_for_the_sandbox and a_sandbox_has_loopback_and_no_other_way_out
// part of: REQ-SANDBX-0102
// invariant: agent
async fn create_exec_stop_and_kill_work_with_the_agent_off(world: World) -> Result<()> {
    let (mut worker, client, id) = without_agent(&world).await?;
    let result = client
        .exec(
            id,
            &sh(
                "cat /proc/1/comm; ls /run/cynode/control.sock 2>/dev/null; \
                 echo out; echo err >&2; id -u; pwd; exit 5",
            ),
        )
        .await?;
    assert_eq!(
        (result.stdout.as_str(), result.stderr.as_str()),
        ("sh\nout\n1000\n/workspace\n", "err\n")
    );
    assert_eq!(
        (result.exit.exit_code, result.exit.via),
        (Some(5), ExecVia::Runtime)
    );
    let mut fed = sh("cat; echo .");
    fed.stdin = Some("given".into());
    assert_eq!(client.exec(id, &fed).await?.stdout, "given.\n");

    match client.exec(id, &exec(["no-such-command"])).await {
        Err(Error::Problem(problem)) => assert!(
            problem.is(ErrorCode::ExecFailed) && problem.extensions["errno"] == "ENOENT",
            "{problem:?}"
        ),
        other => panic!("{other:?}"),
    }
    let files = client
        .list_files(id, &ListRequest::default())
        .await
        .expect_err("no agent");
    assert!(files.is(ErrorCode::AgentRequired), "{files}");

    client.end_session(id, &SessionEnd::default()).await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

// part of: CYNAI.SANDBX.SandboxConnectivity, ISC-24
// invariant: deadlines
async fn a_deadline_ends_all_of_an_exec_by_the_runtime(world: World) -> Result<()> {
    let (_worker, client, id) = without_agent(&world).await?;
    let witness = ExecRequest {
        background: true,
        timeout_ms: 0,
        ..sh("echo ready; exec sleep 4321")
    };
    let witness = client.exec_background(id, &witness).await?.exec_id;
    client
        .exec_output(
            id,
            witness,
            &OutputQuery {
                wait_ms: Some(20_000),
                ..Default::default()
            },
        )
        .await?;
    let stubborn = ExecRequest {
        timeout_ms: 1_500,
        ..sh(
            "trap '' TERM HUP; echo begun; (setsid sh -c \"trap '' TERM; sleep 1234 & sleep \
             1234\" &); while :; do sleep 1234; done",
        )
    };
    let result = client.exec(id, &stubborn).await?;
    assert!(
        result.exit.timed_out && result.stdout == "begun\n",
        "{result:?}"
    );
    let left = client
        .exec(
            id,
            &sh("for d in /proc/[0-9]*; do tr '\\0' ' ' < $d/cmdline \
                 2>/dev/null; echo; done | grep -v 'for d in'"),
        )
        .await?
        .stdout;
    assert!(!left.contains("1234") && left.contains("4321"), "{left}");
    client.signal_session(id, SignalName::KILL).await?;
    eventually("the witness ends", Duration::from_secs(20), async || {
        Ok(client.get_exec(id, witness).await?.state != ExecState::Running)
    })
    .await
}

async fn a_session_without_agent_survives_the_worker_and_its_execs_are_reported_lost(
    world: World,
) -> Result<()> {
    let (mut worker, client, id) = without_agent(&world).await?;
    client.exec(id, &sh("echo kept > file")).await?;
    let running = client
        .exec_background(
            id,
            &ExecRequest {
                background: true,
                timeout_ms: 0,
                ..sh("exec sleep 999")
            },
        )
        .await?
        .exec_id;
    worker.kill()?;
    let worker = world
        .worker(&Options::default().set("exec_via", "\"runtime\""))
        .await?;
    let client = worker.client()?;
    assert_eq!(
        client.exec(id, &exec(["cat", "file"])).await?.stdout,
        "kept\n"
    );
    assert_eq!(client.get_exec(id, running).await?.state, ExecState::Lost);
    let left = client
        .exec(id, &sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))
        .await?
        .stdout;
    assert!(!left.contains("sleep 999"), "{left}");
    Ok(())
}

#[tokio::test]
// invariant: jobs
async fn a_job_without_agent_ends_and_an_interrupted_one_is_not_run_again() -> Result<()> {
    let world = World::new()?;
    let options = Options::default().set("exec_via", "\"runtime\"");
    let mut worker = world.worker(&options).await?;
    let client = worker.client()?;
    let done = client.run_job(&job("echo out; exit 3")).await?;
    assert_eq!(
        (done.state, done.exit_code, done.output.stdout.as_str()),
        (JobState::Failed, Some(3), "out\n")
    );
    let stubborn = job("trap '' TERM; echo begun; while :; do sleep 1; done");
    client.run_job_async(&stubborn).await?;
    eventually("the job runs", Duration::from_secs(60), async || {
        Ok(client.job(stubborn.job_id).await?.state == JobState::InProgress)
    })
    .await?;
    assert_eq!(
        client
            .stop_job(stubborn.task_id, stubborn.job_id)
            .await?
            .state,
        JobState::Canceled
    );
    let cut = job("echo begun; exec sleep 999");
    client.run_job_async(&cut).await?;
    eventually("the job runs", Duration::from_secs(60), async || {
        Ok(client.job(cut.job_id).await?.state == JobState::InProgress)
    })
    .await?;
    worker.kill()?;
    let mut worker = world.worker(&options).await?;
    let cut = worker.client()?.run_job(&cut).await?;
    assert_eq!(
        (cut.state, cut.error.map(|error| error.code).as_deref()),
        (JobState::Failed, Some("runner_interrupted"))
    );
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
async fn unread_input_adds_no_message_of_the_runtime_to_the_output() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = without_agent(&world).await?;
    for _ in 0..10 {
        let fed = ExecRequest {
            stdin: Some("x".repeat(1 << 20)),
            ..sh("echo out; echo err >&2")
        };
        let result = client.exec(id, &fed).await?;
        // The runtime may lose output of the command, but must not add its own.
        assert!(
            "out\n".starts_with(&result.stdout)
                && "err\n".starts_with(&result.stderr)
                && result.exit.exit_code == Some(0),
            "{result:?}"
        );
    }
    Ok(())
}
