//! Jobs: one command each, run once, with a result that is kept until it is acknowledged.

mod kills;
mod requests;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, Job, JobId, JobRun, JobState, SessionEnd, SessionPatch, Stream, TaskId,
};
use cynode_client::{ExecEvent, JobFilter, OutputQuery, SessionClient, SessionFilter};
use cynode_tests::{Answer, Http, Options, UNLABELLED, World, eventually, job, session};
use http::Method;

const TIMEOUT: Duration = Duration::from_secs(60);

fn code(job: &Job) -> Option<&str> {
    job.error.as_ref().map(|error| error.code.as_str())
}

/// Submits a job and waits until its command has started.
async fn started(client: &SessionClient, request: &JobRun) -> Result<()> {
    client.run_job_async(request).await?;
    eventually("the job runs", TIMEOUT, async || {
        Ok(client.job(request.job_id).await?.state != JobState::Accepted)
    })
    .await
}

async fn no_container(world: &World) -> Result<()> {
    eventually("the job's sandbox is gone", TIMEOUT, async || {
        Ok(world.containers()?.is_empty())
    })
    .await
}

// proves: CYNAI.SANDBX.RuntimeContractBaseline
// part of: REQ-SANDBX-0110, CYNAI.SANDBX.EnvironmentVariables, ISC-02
#[tokio::test]
// invariant: jobs
async fn a_job_runs_to_its_end_and_reports_its_exit() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request =
        job("env | grep ^CYNODE_ | sort; echo $OWN; pwd; echo err >&2; echo x > file");
    request.sandbox.env.insert("OWN".into(), "value".into());
    let done = client.run_job(&request).await?;
    let seen = format!(
        "CYNODE_ARTIFACTS_DIR=/job/artifacts\n\
         CYNODE_CALLBACK_URL=http://127.0.0.1:11480/v1/job\nCYNODE_JOB_ID={}\nCYNODE_TASK_ID={}\n\
         CYNODE_WORKSPACE_DIR=/workspace\nvalue\n/workspace\n",
        request.job_id, request.task_id
    );
    assert_eq!(
        (
            done.output.stdout.as_str(),
            done.output.stderr.as_str(),
            done.output.encoding.as_str()
        ),
        (seen.as_str(), "err\n", "utf-8")
    );
    assert_eq!(
        (
            done.state,
            done.exit_code,
            code(&done),
            done.reported_by.as_str()
        ),
        (JobState::Completed, Some(0), None, "worker")
    );
    assert!(
        done.started_at.is_some()
            && done.ended_at >= done.started_at
            && done.node_id.is_some()
            && done.image_digest.is_some(),
        "{done:?}"
    );

    for (script, exit_code, signal) in [
        ("exit 3", Some(3), None),
        ("kill -9 $$", None, Some("KILL")),
        ("printf '\\377'; exit 255", Some(255), None),
    ] {
        let done = client.run_job(&job(script)).await?;
        assert_eq!(
            (
                done.state,
                done.exit_code,
                done.signal.as_deref(),
                code(&done)
            ),
            (JobState::Failed, exit_code, signal, None),
            "{script}"
        );
        assert_eq!(done.output.encoding == "base64", script.contains("377"));
    }
    let long = client
        .run_job(&job(
            "head -c 300000 /dev/zero | tr '\\0' a; head -c 300000 \
             /dev/zero | tr '\\0' b; echo small >&2",
        ))
        .await?;
    let half = 131_072;
    assert_eq!(long.output.stdout, "a".repeat(half) + &"b".repeat(half));
    assert!(
        long.output.truncated.stdout
            && !long.output.truncated.stderr
            && long.output.stderr == "small\n"
    );

    no_container(&world).await?;
    eventually("no workspace is left", TIMEOUT, async || {
        Ok(fs_err::read_dir(world.state_dir().join("worker/workspaces"))?.count() == 0)
    })
    .await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

// part of: REQ-SANDBX-0105
#[tokio::test]
// invariant: jobs
async fn an_asynchronous_job_runs_on_and_its_output_is_readable_during_and_after_the_run()
-> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let (client, http) = (worker.client()?, Http::new(&worker)?);
    let request = job(
        "echo first; read line < /dev/null; i=0; while [ $i -lt 20 ]; do i=$((i+1)); echo $i; \
         sleep 0.1; done; echo last >&2; exit 7",
    );
    let answer = Answer::of(
        http.request(Method::POST, "/v1/worker/jobs:run")
            .header("Prefer", "respond-async")
            .json(&request),
    )
    .await?;
    assert_eq!(
        (answer.status, answer.header("preference-applied")),
        (202, "respond-async")
    );
    let accepted: Job = serde_json::from_slice(&answer.body)?;
    assert!(
        !accepted.state.is_final() && accepted.job_id == request.job_id,
        "{accepted:?}"
    );

    // A stream that is opened before the command starts.
    let mut events = client.job_output_stream(request.job_id, 0).await?;
    let (mut out, mut err, mut exit) = (String::new(), String::new(), None);
    let mut seen_running = false;
    while let Some(event) = events.next().await? {
        match event {
            ExecEvent::Output { stream, data, .. } => match stream {
                Stream::Stdout => out.push_str(std::str::from_utf8(&data)?),
                Stream::Stderr => err.push_str(std::str::from_utf8(&data)?),
            },
            ExecEvent::Exit(report) => exit = Some(report),
            ExecEvent::Start { .. } => {}
        }
        seen_running |= !out.is_empty()
            && exit.is_none()
            && client.job(request.job_id).await?.state == JobState::InProgress;
    }
    let lines: String = (1..=20).map(|number| number.to_string() + "\n").collect();
    assert_eq!((out, err.as_str()), (format!("first\n{lines}"), "last\n"));
    assert_eq!(exit.context("an exit")?.exit_code, Some(7));
    assert!(seen_running, "the job had ended before its output arrived");

    // A caller that disconnects changes nothing.
    let other = job("sleep 1; echo done");
    let calling = tokio::spawn({
        let (client, other) = (client.clone(), other.clone());
        async move { client.run_job(&other).await }
    });
    eventually("the job is known", TIMEOUT, async || {
        Ok(client.job(other.job_id).await.is_ok())
    })
    .await?;
    calling.abort();
    eventually("the job ends", TIMEOUT, async || {
        Ok(client.job(other.job_id).await?.state.is_final())
    })
    .await?;

    // After the sandbox is gone.
    no_container(&world).await?;
    assert_eq!(client.job(other.job_id).await?.output.stdout, "done\n");
    let page = client
        .job_output(
            request.job_id,
            &OutputQuery {
                tail_bytes: Some(1),
                wait_ms: Some(1_000),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(
        (
            page.chunks.len(),
            page.chunks[0].data.as_deref(),
            page.exit.and_then(|exit| exit.exit_code)
        ),
        (1, Some("last\n"), Some(7))
    );
    let rest = client
        .job_output(
            request.job_id,
            &OutputQuery {
                after_seq: Some(page.next_seq),
                ..Default::default()
            },
        )
        .await?;
    assert!(rest.chunks.is_empty() && rest.exit.is_some());
    Ok(())
}

#[tokio::test]
// invariant: jobs
async fn the_same_request_is_the_same_job_and_an_acknowledged_one_is_remembered() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let mut client = worker.client()?;
    let request = job("cat /proc/sys/kernel/random/uuid; sleep 1");
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let (client, request) = (client.clone(), request.clone());
            tokio::spawn(async move { client.run_job(&request).await })
        })
        .collect();
    let mut first: Option<Job> = None;
    for call in calls {
        let done = call.await??;
        assert_eq!(first.get_or_insert_with(|| done.clone()), &done);
    }
    let first = first.context("a job")?;
    let mut others = vec![
        request.clone(),
        JobRun {
            task_id: TaskId::generate(),
            ..request.clone()
        },
    ];
    others[0].sandbox.command.push("more".into());
    let early = job("sleep 999");
    started(&client, &early).await?;
    assert!(
        client
            .ack_job(early.job_id)
            .await
            .is_err_and(|error| error.is(ErrorCode::JobNotEnded))
    );
    for round in ["after its end", "acknowledged", "in another worker"] {
        let again = client.run_job(&request).await?;
        assert_eq!(
            (again.state, again.exit_code, again.started_at),
            (first.state, first.exit_code, first.started_at),
            "{round}"
        );
        assert_eq!(client.job(request.job_id).await?, again, "{round}");
        for other in &others {
            assert!(
                client
                    .run_job(other)
                    .await
                    .is_err_and(|error| error.is(ErrorCode::JobIdInUse)),
                "{round}"
            );
        }
        let listed = client
            .list_jobs(&JobFilter {
                task_id: Some(request.task_id),
                ..Default::default()
            })
            .await?;
        let read = client
            .job_output(request.job_id, &OutputQuery::default())
            .await;
        if round == "after its end" {
            assert_eq!(
                (again.output.stdout, again.acknowledged),
                (first.output.stdout.clone(), false)
            );
            assert!(read?.exit.is_some());
            assert_eq!((listed.len(), listed[0].output.stdout.as_str()), (1, ""));
            client.ack_job(request.job_id).await?;
        } else {
            assert_eq!(
                (
                    again.output.stdout.as_str(),
                    again.acknowledged,
                    listed.len()
                ),
                ("", true, 0)
            );
            assert!(
                read.is_err_and(|error| error.is(ErrorCode::OutputExpired)),
                "{round}"
            );
            client.ack_job(request.job_id).await?;
            worker.kill()?;
            worker = world.worker(&Options::default()).await?;
            client = worker.client()?;
        }
    }
    eventually("the job's output is gone", TIMEOUT, async || {
        Ok(fs_err::read_dir(world.state_dir().join("worker/sessions"))?.count() == 1)
    })
    .await
}

#[tokio::test]
// invariant: jobs
async fn each_way_to_fail_has_its_state_and_its_code() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut slow = job("trap '' TERM; echo begun; (setsid sleep 777 &); while :; do sleep 1; done");
    slow.sandbox.timeout_seconds = Some(1);
    let slow = client.run_job(&slow).await?;
    assert_eq!(
        (slow.state, slow.output.stdout.as_str(), slow.exit_code),
        (JobState::Timeout, "begun\n", None)
    );

    let mut big = job("");
    big.sandbox.command = ["tail", "-c", "200000000", "/dev/zero"]
        .map(str::to_owned)
        .to_vec();
    let big = client.run_job(&big).await?;
    assert_eq!(
        (big.state, code(&big)),
        (JobState::Failed, Some("oom_killed"))
    );

    let mut missing = job("");
    missing.sandbox.command = vec!["/no/such/command".into()];
    let missing = client.run_job(&missing).await?;
    assert_eq!(
        (missing.state, code(&missing), missing.started_at),
        (JobState::Failed, Some("exec_failed"), None)
    );
    assert!(
        missing
            .error
            .as_ref()
            .is_some_and(|error| error.detail.contains("ENOENT")),
        "{missing:?}"
    );
    // Output is bounded too.
    assert!(
        client
            .job_output(missing.job_id, &OutputQuery::default())
            .await?
            .exit
            .is_some_and(|exit| exit.exit_code.is_none())
    );
    let mut events = client.job_output_stream(missing.job_id, 0).await?;
    ensure!(matches!(events.next().await?, Some(ExecEvent::Exit(_))));

    let mut nowhere = job("true");
    nowhere.sandbox.image_ref = "localhost/cynode/none:latest".into();
    let nowhere = client.run_job(&nowhere).await?;
    assert_eq!(
        (nowhere.state, code(&nowhere)),
        (JobState::Failed, Some("image_not_found"))
    );
    client.ack_job(nowhere.job_id).await?;
    no_container(&world).await?;
    Ok(())
}

// part of: REQ-SANDBX-0124, CYNAI.SANDBX.ImageCompatibilityTaskType
#[tokio::test]
// invariant: jobs
async fn a_plain_command_runs_on_an_image_that_is_not_marked_for_sessions() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let mut request = job("echo hi");
    request.sandbox.image_ref = UNLABELLED.into();
    assert_eq!(
        worker.client()?.run_job(&request).await?.output.stdout,
        "hi\n"
    );
    let mut refused = session();
    refused.image_ref = UNLABELLED.into();
    assert!(
        worker
            .client()?
            .create_session(&refused)
            .await
            .is_err_and(|error| error.is(ErrorCode::ImageNotCompatible))
    );
    Ok(())
}

#[tokio::test]
// invariant: jobs
async fn the_sandbox_of_a_job_is_no_session_and_counts_as_one() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&Options::default().set("max_sandboxes", "1"))
        .await?;
    let client = worker.client()?;
    let request = job("echo begun; exec sleep 999");
    started(&client, &request).await?;
    assert!(
        client
            .list_sessions(&SessionFilter::default())
            .await?
            .is_empty()
    );
    let hidden = fs_err::read_dir(world.state_dir().join("worker/sessions"))?
        .next()
        .context("a record")??
        .file_name();
    let hidden = hidden.to_str().context("a name")?.parse()?;
    for refused in [
        client.get_session(hidden).await.err(),
        client.exec(hidden, &cynode_tests::sh("true")).await.err(),
        client
            .end_session(hidden, &SessionEnd::default())
            .await
            .err(),
        client.resume_session(hidden).await.err(),
        client.list_execs(hidden).await.err(),
        client
            .patch_session(hidden, &SessionPatch::default())
            .await
            .err(),
    ] {
        assert!(refused.is_some_and(|error| error.is(ErrorCode::SessionNotFound)));
    }
    let names = world
        .podman()
        .args(["ps", "--format", "{{.Names}}"])
        .output()?
        .stdout;
    assert_eq!(
        String::from_utf8(names)?,
        format!("cynode-{}\n", request.job_id)
    );
    assert!(
        client
            .create_session(&session())
            .await
            .is_err_and(|error| error.is(ErrorCode::NoCapacity))
    );
    let second = job("true");
    assert!(
        client
            .run_job(&second)
            .await
            .is_err_and(|error| error.is(ErrorCode::NoCapacity))
    );
    assert!(
        client
            .job(second.job_id)
            .await
            .is_err_and(|error| error.is(ErrorCode::JobNotFound)),
        "something is left of the refused jobs"
    );
    client.stop_job(request.task_id, request.job_id).await?;
    no_container(&world).await?;
    eventually("there is capacity", TIMEOUT, async || {
        Ok(client.run_job(&second).await.is_ok())
    })
    .await
}

#[tokio::test]
// invariant: jobs
async fn a_job_is_stopped_before_and_while_it_runs_and_not_after() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let polite = job("trap 'echo bye; exit 5' TERM; echo begun; while :; do sleep 0.1; done");
    started(&client, &polite).await?;
    eventually("the command has set its trap", TIMEOUT, async || {
        Ok(!client
            .job_output(polite.job_id, &OutputQuery::default())
            .await?
            .chunks
            .is_empty())
    })
    .await?;
    assert!(
        client
            .stop_job(TaskId::generate(), polite.job_id)
            .await
            .is_err_and(|error| error.is(ErrorCode::JobNotFound))
    );
    let stopped = client.stop_job(polite.task_id, polite.job_id).await?;
    assert_eq!(
        (
            stopped.state,
            stopped.output.stdout.as_str(),
            stopped.exit_code,
            code(&stopped)
        ),
        (JobState::Canceled, "begun\nbye\n", Some(5), None)
    );

    let stubborn = job("trap '' TERM; echo begun; (setsid sleep 888 &); while :; do sleep 1; done");
    started(&client, &stubborn).await?;
    eventually("the command has set its trap", TIMEOUT, async || {
        Ok(!client
            .job_output(stubborn.job_id, &OutputQuery::default())
            .await?
            .chunks
            .is_empty())
    })
    .await?;
    let killed = client.stop_job(stubborn.task_id, stubborn.job_id).await?;
    assert_eq!(
        (killed.state, killed.signal.as_deref()),
        (JobState::Canceled, Some("KILL"))
    );

    for _ in 0..3 {
        let early = job("echo ran; sleep 999");
        client.run_job_async(&early).await?;
        let stopped = client.stop_job(early.task_id, early.job_id).await?;
        assert_eq!(stopped.state, JobState::Canceled);
        assert_eq!(client.run_job(&early).await?, stopped);
    }
    let done = client.run_job(&job("exit 2")).await?;
    assert_eq!(client.stop_job(done.task_id, done.job_id).await?, done);
    no_container(&world).await
}

#[tokio::test]
async fn jobs_are_listed_by_state_in_pages() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let (client, http) = (worker.client()?, Http::new(&worker)?);
    let running = job("exec sleep 999");
    started(&client, &running).await?;
    let mut done = Vec::new();
    for _ in 0..2 {
        done.push(client.run_job(&job("true")).await?.job_id);
    }
    let ids = async |state: Option<JobState>| -> Result<Vec<JobId>> {
        Ok(client
            .list_jobs(&JobFilter {
                state,
                ..Default::default()
            })
            .await?
            .iter()
            .map(|job| job.job_id)
            .collect())
    };
    assert_eq!(
        ids(None).await?,
        [vec![running.job_id], done.clone()].concat()
    );
    assert_eq!(
        (
            ids(Some(JobState::InProgress)).await?,
            ids(Some(JobState::Completed)).await?
        ),
        (vec![running.job_id], done.clone())
    );
    let mut cursor = None;
    let mut found = Vec::new();
    for page in 0..3 {
        let query = cursor
            .take()
            .map_or_else(String::new, |cursor: String| format!("&cursor={cursor}"));
        let answer =
            Answer::of(http.request(Method::GET, &format!("/v1/worker/jobs?limit=1{query}")))
                .await?;
        let answer: serde_json::Value = serde_json::from_slice(&answer.body)?;
        found.push(
            answer["items"][0]["job_id"]
                .as_str()
                .context("an id")?
                .parse()?,
        );
        cursor = answer["next_cursor"].as_str().map(str::to_owned);
        if page == 1 {
            // The cursor's job is deleted before the next page is requested.
            client.ack_job(found[1]).await?;
        }
    }
    assert_eq!(
        (found, cursor),
        ([vec![running.job_id], done].concat(), None)
    );
    Ok(())
}

/// The request to stop may overtake the request to run.
#[tokio::test]
// invariant: jobs
async fn a_job_stopped_before_its_request_does_not_run_after_a_kill_either() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let late = job("echo ran");
    let stopped = worker.client()?.stop_job(late.task_id, late.job_id).await?;
    assert_eq!(
        (stopped.state, stopped.acknowledged),
        (JobState::Canceled, true)
    );
    worker.kill()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    assert_eq!(client.run_job(&late).await?, stopped);
    // Many of both at once: whatever the order, no stopped job keeps running.
    for _ in 0..8 {
        let late = job("sleep 999");
        let (run, stopped) = tokio::join!(
            client.run_job(&late),
            client.stop_job(late.task_id, late.job_id)
        );
        assert_eq!(
            (run?.state, stopped?.state),
            (JobState::Canceled, JobState::Canceled)
        );
    }
    no_container(&world).await
}
