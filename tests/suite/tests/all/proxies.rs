//! The way from a sandbox to its proxies: listeners on loopback, the worker's socket, and what each
//! proxy answers.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, Job, JobRun, JobState, SessionId, sba::JobSpec};
use cynode_client::{Error, SessionClient};
use cynode_sba_proto::proxy::Listener;
use cynode_tests::{Options, World, eventually, job, on_every_runtime, session, sh};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Shell functions: `ask ADDRESS PORT REQUEST` prints an answer, `post BODY` calls the callback.
const FUNCTIONS: &str = r#"
ask() { printf "$3" | timeout 20 nc "$1" "$2"; }
connect() { ask "$1" 3128 'CONNECT Example.com:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n'; }
post() {
    printf 'POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %s\r\n\r\n%s' \
        "/${CYNODE_CALLBACK_URL#http://*/}" "${#1}" "$1" | timeout 20 nc 127.0.0.1 11480
}
listener() { for d in /proc/[0-9]*; do [ "$(cat $d/comm)" != cynode-listen ] || basename $d; done; }
"#;

fn script(text: &str) -> String {
    format!("{FUNCTIONS}{text}")
}

/// The status and the JSON of an answer.
fn parse(answer: &str) -> Result<(u16, Value)> {
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("no answer: {answer:?}"))?;
    let status = head.split(' ').nth(1).context("a status")?.parse()?;
    Ok((status, serde_json::from_str(body).unwrap_or_default()))
}

async fn ask(client: &SessionClient, id: SessionId, text: &str) -> Result<(u16, Value)> {
    let printed = client.exec(id, &sh(&script(text))).await?;
    parse(&printed.stdout).with_context(|| format!("{text}: {}", printed.stderr))
}

async fn answers_again(client: &SessionClient, id: SessionId, after: &str) -> Result<()> {
    eventually(after, TIMEOUT, async || {
        Ok(matches!(
            ask(client, id, "connect 127.0.0.1").await,
            Ok((403, _))
        ))
    })
    .await
}

on_every_runtime!(
    processes_of_a_sandbox_reach_its_proxies_whatever_dies,
    a_sandbox_without_agent_has_no_proxies,
);

// proves: CYNAI.SANDBX.EnvironmentVariables with
// commands_see_their_task_and_session_and_nothing_of_the_host and
// a_job_runs_to_its_end_and_reports_its_exit and sandbox_tools_accept_the_id_of_a_job,
// CYNAI.SBAGNT.SandboxBoundary with every_type_of_step_runs_in_a_sandbox and
// commands_see_their_task_and_session_and_nothing_of_the_host and escape::*
// part of: CYNAI.SANDBX.NodeLocalInference
async fn processes_of_a_sandbox_reach_its_proxies_whatever_dies(world: World) -> Result<()> {
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let request = session();
    let id = client.create_session(&request).await?.session_id;

    let seen = client
        .exec(
            id,
            &sh("env | grep -i -e _proxy= -e OLLAMA -e CALLBACK | sort"),
        )
        .await?;
    assert_eq!(
        seen.stdout,
        "HTTPS_PROXY=http://127.0.0.1:3128\nHTTP_PROXY=http://127.0.0.1:3128\n\
         NO_PROXY=localhost,127.0.0.1,::1\nOLLAMA_BASE_URL=http://localhost:11434\n\
         http_proxy=http://127.0.0.1:3128\nhttps_proxy=http://127.0.0.1:3128\n\
         no_proxy=localhost,127.0.0.1,::1\n"
    );
    assert!(client.get_session(id).await?.proxies);

    let (status, body) = ask(&client, id, "connect 127.0.0.1").await?;
    assert_eq!(
        (
            status,
            &body["code"],
            &body["host"],
            &body["port"],
            &body["rule"]
        ),
        (
            403,
            &json!("egress_denied"),
            &json!("example.com"),
            &json!(443),
            &json!("default/deny-all")
        )
    );
    assert!(
        body["remedy"].is_string() && body["request_id"].is_string(),
        "{body}"
    );
    let plain = r"ask 127.0.0.1 3128 'GET http://user:pass@example.com/a HTTP/1.0\r\n\r\n'";
    let (status, body) = ask(&client, id, plain).await?;
    assert_eq!((status, &body["port"]), (403, &json!(80)));
    assert!(!body.to_string().contains("pass"), "{body}");
    let no_proxy = r"ask 127.0.0.1 3128 'GET / HTTP/1.0\r\n\r\n'";
    assert_eq!(ask(&client, id, no_proxy).await?.0, 400);
    // The inference listener ends a request when its client stops sending, as nc does.
    let models = sh("wget -Y off -qO- http://localhost:11434/api/tags 2>&1");
    let models = client.exec(id, &models).await?;
    assert!(models.stdout.contains("503"), "{models:?}");
    let report = r"CYNODE_CALLBACK_URL=http://x/v1/job; post '{}'";
    let (status, body) = ask(&client, id, report).await?;
    assert_eq!(
        (status, &body["code"]),
        (403, &json!("callback_not_allowed"))
    );
    // The programs that people use understand the variables.
    let wget = client
        .exec(
            id,
            &sh("wget -qO- http://example.com/ 2>&1; [ -e /proc/net/if_inet6 ] && echo six"),
        )
        .await?;
    assert!(wget.stdout.contains("403"), "{wget:?}");
    if wget.stdout.contains("six") {
        assert_eq!(ask(&client, id, "connect ::1").await?.0, 403);
    }

    let shut = "cat /proc/$(listener)/maps >/dev/null 2>&1 && echo open; echo shut";
    let shut = client.exec(id, &sh(&script(shut))).await?;
    assert_eq!(shut.stdout, "shut\n");
    for signal in ["KILL", "STOP"] {
        client
            .exec(id, &sh(&script(&format!("kill -{signal} $(listener)"))))
            .await?;
        answers_again(&client, id, "the listeners are back").await?;
    }
    client.exec(id, &sh("kill -KILL -1")).await.ok();
    answers_again(
        &client,
        id,
        "the listeners are back after everything was killed",
    )
    .await?;

    worker.kill()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    answers_again(&client, id, "the new worker serves the sandbox").await?;
    Ok(())
}

async fn a_sandbox_without_agent_has_no_proxies(world: World) -> Result<()> {
    let worker = world
        .worker(&Options::default().set("exec_via", "\"runtime\""))
        .await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    let seen = client
        .exec(
            id,
            &sh("env | grep -i -e _proxy= -e OLLAMA; nc 127.0.0.1 3128 </dev/null 2>&1"),
        )
        .await?;
    assert!(
        seen.stdout.contains("refused") && !seen.stdout.contains('='),
        "{seen:?}"
    );
    assert!(!client.get_session(id).await?.proxies);
    Ok(())
}

// invariant: no-way-out
#[tokio::test]
async fn no_process_outside_of_a_sandbox_is_served_by_its_socket() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    answers_again(&client, id, "a process inside is served").await?;
    let mut sockets = 0;
    for entry in fs_err::read_dir(world.state_dir().join("worker/sandboxes"))? {
        // The path of a socket is limited; that of a test is not.
        let directory = fs_err::File::open(entry?.path())?;
        let number = std::os::fd::AsRawFd::as_raw_fd(&directory);
        let path = format!("/proc/self/fd/{number}/proxy.sock");
        let Ok(mut stream) = UnixStream::connect(path).await else {
            continue;
        };
        sockets += 1;
        let mut request = Listener::Proxy.preamble().to_vec();
        request.extend(b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n");
        // The worker may close it first.
        stream.write_all(&request).await.ok();
        let mut answer = Vec::new();
        let read = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer)).await?;
        ensure!(
            answer.is_empty(),
            "{read:?} {}",
            String::from_utf8_lossy(&answer)
        );
    }
    ensure!(sockets > 0, "no socket was found");
    // Inside, a process needs no listener.
    let direct = r"printf 'cynode\001\002CONNECT a:1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n' \
        | timeout 20 nc local:/run/cynode/proxy.sock || echo unsupported";
    let direct = client.exec(id, &sh(direct)).await?.stdout;
    ensure!(
        direct.contains("egress_denied") || direct.contains("unsupported"),
        "{direct}"
    );
    Ok(())
}

// invariant: fail-closed
#[tokio::test]
async fn callers_can_not_set_the_variables_of_the_proxies() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    for name in [
        "HTTP_PROXY",
        "https_proxy",
        "No_Proxy",
        "OLLAMA_BASE_URL",
        "CYNODE_CALLBACK_URL",
    ] {
        let mut made = session();
        made.env.insert(name.to_owned(), "http://evil".to_owned());
        let error = client.create_session(&made).await.expect_err(name);
        assert!(error.is(ErrorCode::InvalidRequest), "{name}: {error}");
        let mut command = sh("true");
        command
            .env
            .insert(name.to_owned(), "http://evil".to_owned());
        let error = client.exec(id, &command).await.expect_err(name);
        assert!(error.is(ErrorCode::InvalidRequest), "{name}: {error}");
        let mut request = job("true");
        request
            .sandbox
            .env
            .insert(name.to_owned(), "http://evil".to_owned());
        let error = client.run_job(&request).await.expect_err(name);
        assert!(error.is(ErrorCode::InvalidRequest), "{name}: {error}");
    }
    Ok(())
}

// invariant: no-starvation
#[tokio::test]
async fn a_sandbox_that_takes_every_connection_blocks_only_itself() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let greedy = client.create_session(&session()).await?.session_id;
    let other = client.create_session(&session()).await?.session_id;
    let mut silent =
        sh("i=0; while [ $i -lt 100 ]; do sleep 600 | nc 127.0.0.1 3128 & i=$((i+1)); done; wait");
    (silent.background, silent.timeout_ms) = (true, 0);
    client.exec_background(greedy, &silent).await?;
    eventually("all connections of one sandbox are taken", TIMEOUT, async || {
        let taken = r#"timeout 2 sh -c 'printf "CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n" | nc 127.0.0.1 3128'"#;
        let printed = client.exec(greedy, &sh(taken)).await?.stdout;
        Ok(!printed.contains("403"))
    })
    .await?;
    assert_eq!(ask(&client, other, "connect 127.0.0.1").await?.0, 403);
    Ok(())
}

/// A job with steps that run shell scripts.
fn steps(scripts: &[&str]) -> Result<JobRun> {
    let mut request = job("");
    request.sandbox.command.clear();
    let steps: Vec<Value> = scripts
        .iter()
        .map(|text| {
            let argv = json!(["/bin/sh", "-c", script(text)]);
            json!({"type": "run_command", "args": {"argv": argv}})
        })
        .collect();
    specify(&mut request, &steps)?;
    Ok(request)
}

fn specify(request: &mut JobRun, steps: &[Value]) -> Result<()> {
    let specification = json!({
        "protocol_version": "1.0",
        "job_id": request.job_id,
        "task_id": request.task_id,
        "constraints": {"max_runtime_seconds": 100, "max_output_bytes": 1_048_576},
        "steps": steps,
    });
    request.job = Some(Box::new(JobSpec::parse(
        specification.to_string().as_bytes(),
    )?));
    Ok(())
}

/// A job with a script as its own runner.
fn own_runner(text: &str) -> Result<JobRun> {
    let mut request = job(&script(text));
    let step = json!({"type": "run_command", "args": {"argv": ["true"]}});
    specify(&mut request, &[step])?;
    Ok(request)
}

fn verdict(done: &Job) -> (JobState, &str, &str) {
    let code = done.error.as_ref().map_or("", |error| error.code.as_str());
    (done.state, code, done.reported_by.as_str())
}

// proves: CYNAI.SBAGNT.FailureCodes with the_first_failure_ends_a_job_and_its_deadlines_hold and
// output_up_to_the_limit_is_kept_and_a_byte_more_is_a_violation and
// an_invalid_job_is_refused_before_any_step_with_the_path_to_the_error
// invariant: fail-closed
#[tokio::test]
async fn a_step_that_fails_after_a_denial_needed_the_network_and_no_other_did() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let run = async |scripts: &[&str]| {
        client
            .run_job(&steps(scripts)?)
            .await
            .map_err(anyhow::Error::from)
    };

    let denied = run(&["true", "connect 127.0.0.1; exit 7"]).await?;
    assert_eq!(
        verdict(&denied),
        (JobState::Failed, "ext_net_required", "worker")
    );
    let result = denied.sba_result.as_ref().context("a result")?;
    assert_eq!(result["failure_code"], "ext_net_required");
    let message = result["failure_message"].as_str().unwrap_or_default();
    assert!(
        message.contains("example.com:443") && message.contains("step 2"),
        "{message}"
    );

    // The text alone proves nothing, nor does a denial that the step did not fail from.
    for scripts in [
        &["echo egress_denied Could not resolve host; exit 7"][..],
        &["connect 127.0.0.1; true", "exit 7"],
        // The way back into the sandbox is no network.
        &[r"ask 127.0.0.1 3128 'CONNECT localhost:80 HTTP/1.0\r\n\r\n'; exit 7"],
    ] {
        let done = run(scripts).await?;
        assert_eq!(
            verdict(&done),
            (JobState::Failed, "step_failed", "worker"),
            "{scripts:?}"
        );
    }
    let passed = run(&["connect 127.0.0.1; true"]).await?;
    assert_eq!(verdict(&passed), (JobState::Completed, "", "worker"));
    Ok(())
}

/// A result as JSON, for a shell script that knows the id of its job.
const SUCCESS: &str = r#"success() { printf '{"protocol_version":"1.0","job_id":"%s","status":"success","steps":[],"artifacts":[],"failure_code":null,"failure_message":null}' "$CYNODE_JOB_ID"; }
"#;

// part of: CYNAI.SBAGNT.ResultAndArtifactDelivery, CYNAI.SBAGNT.JobLifecycle
// invariant: fail-closed
#[tokio::test]
async fn only_a_runner_of_the_jobs_own_reports_by_the_callback() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let with = |text: &str| format!("{SUCCESS}{text}");

    // Progress while it runs, then a result; the exit must agree.
    let waiting = own_runner(&with(
        r#"post '{"status":"in_progress","step":0,"activity":"thinking"}' >status
        while [ ! -e /tmp/go ]; do sleep 0.1; done
        post "$(success)" | head -1; post "$(success)" | head -1"#,
    ))?;
    client.run_job_async(&waiting).await?;
    eventually("its progress is shown", TIMEOUT, async || {
        let progress = client.job(waiting.job_id).await?.progress;
        Ok(progress.is_some_and(|progress| progress.activity.as_deref() == Some("thinking")))
    })
    .await?;
    client.stop_job(waiting.task_id, waiting.job_id).await?;

    let done = client
        .run_job(&own_runner(&with(
            r#"post "$(success)" | head -1; post "$(success)" | head -1"#,
        ))?)
        .await?;
    assert_eq!(
        verdict(&done),
        (JobState::Completed, "", "sandbox"),
        "{done:?}"
    );
    assert_eq!(done.output.stdout.matches(" 204 ").count(), 2, "{done:?}");

    let lied = client
        .run_job(&own_runner(&with(
            r#"post "$(success)" | head -1; exit 3"#,
        ))?)
        .await?;
    assert_eq!(
        verdict(&lied),
        (JobState::Failed, "internal", "worker"),
        "{lied:?}"
    );

    for (text, code) in [
        (r#"post '{"status":"success"}'"#, "invalid_request"),
        (
            r#"post '{"status":"in_progress","nope":1}'"#,
            "invalid_request",
        ),
        (
            r#"post "$(success)" >/dev/null; post "$(success | sed 's/"success"/"timeout"/; s/"failure_code":null/"failure_code":"timeout"/; s/"failure_message":null/"failure_message":"m"/')""#,
            "result_exists",
        ),
    ] {
        let done = client.run_job(&own_runner(&with(text))?).await?;
        assert!(done.output.stdout.contains(code), "{text}: {done:?}");
    }

    // A step of our runner's job, and a plain command, can't claim a success.
    let forged = format!("{SUCCESS}post \"$(success)\"; exit 9");
    let done = client.run_job(&steps(&[forged.as_str()])?).await?;
    assert_eq!(
        verdict(&done),
        (JobState::Failed, "step_failed", "worker"),
        "{done:?}"
    );
    let result = done.sba_result.context("a result")?;
    assert!(
        result.to_string().contains("callback_not_allowed"),
        "{result}"
    );
    let plain = client.run_job(&job(&script(&forged))).await?;
    assert_eq!(
        verdict(&plain),
        (JobState::Failed, "", "worker"),
        "{plain:?}"
    );
    assert!(
        plain.output.stdout.contains("callback_not_allowed"),
        "{plain:?}"
    );
    match client.job(plain.job_id).await {
        Ok(_) => Ok(()),
        Err(Error::Problem(problem)) => anyhow::bail!("{problem:?}"),
        Err(error) => Err(error.into()),
    }
}
