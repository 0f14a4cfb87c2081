//! The life cycle of sessions, end to end.

mod limits;
mod recovery;

use std::time::Duration;

use anyhow::Result;
use cynode_api::{
    ErrorCode, SessionEnd, SessionId, SessionPatch, SessionState, TaskId, WorkspaceDisposal,
    WorkspaceRef,
};
use cynode_client::SessionFilter;
use cynode_tests::{HOSTILE, IMAGE, Options, UNLABELLED, World, eventually, session, sh};

// proves: REQ-SANDBX-0122, REQ-SANDBX-0108, CYNAI.SANDBX.FilesystemWorkingDirs,
// CYNAI.SANDBX.RuntimeContractBaseline
// part of: REQ-SANDBX-0121, REQ-SANDBX-0105
#[tokio::test]
async fn one_container_stays_and_its_workspace_persists_across_commands() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let session = client.create_session(&session()).await?;
    assert_eq!(session.state, SessionState::Running);
    assert_eq!(session.unenforced, []);

    let first = client
        .exec(
            session.session_id,
            &sh(
                "echo kept > note; readlink /proc/1/ns/mnt || true; echo out; echo err >&2; exit 7",
            ),
        )
        .await?;
    assert_eq!(
        (
            first.exit.exit_code,
            first.stdout.as_str(),
            first.stderr.as_str()
        ),
        (Some(7), "out\n", "err\n")
    );
    let second = client
        .exec(
            session.session_id,
            &sh("cat note; id -u; id -g; pwd; echo $HOME; test -w $HOME && \
                 test -w /tmp && test ! -w /etc && echo writable"),
        )
        .await?;
    assert_eq!(
        second.stdout,
        "kept\n1000\n1000\n/workspace\n/home/agent\nwritable\n"
    );

    worker.shut_down().await?;
    world.assert_clean().await
}

// part of: CYNAI.SANDBX.EnvironmentVariables, REQ-SANDBX-0100
#[tokio::test]
// invariant: no-secrets-inside
async fn commands_see_their_task_and_session_and_nothing_of_the_host() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    request.env.insert("COLOUR".into(), "blue".into());
    client.create_session(&request).await?;
    let mut command = sh("env");
    command.env.insert("SHAPE".into(), "round".into());
    let result = client.exec(request.session_id, &command).await?;
    let lines: Vec<&str> = result.stdout.lines().collect();
    for expected in [
        format!("CYNODE_TASK_ID={}", request.task_id),
        format!("CYNODE_SESSION_ID={}", request.session_id),
        "CYNODE_WORKSPACE_DIR=/workspace".to_owned(),
        "COLOUR=blue".to_owned(),
        "SHAPE=round".to_owned(),
    ] {
        assert!(
            lines.contains(&expected.as_str()),
            "{expected} is missing in {lines:?}"
        );
    }
    let token = worker.token()?;
    let everything = client
        .exec(
            request.session_id,
            &sh("cat /proc/*/environ /proc/*/cmdline 2>/dev/null; env; cat /proc/self/mountinfo"),
        )
        .await?;
    assert!(!everything.stdout.contains(&token));

    let mut forged = session();
    forged.env.insert("CYNODE_TASK_ID".into(), "other".into());
    let error = client.create_session(&forged).await.expect_err("reserved");
    assert!(error.is(ErrorCode::InvalidRequest), "{error}");
    Ok(())
}

// proves: CYNAI.SANDBX.ImageCompatibilityMarking
// part of: CYNAI.SANDBX.ImageCompatibilityTaskType, REQ-SANDBX-0124
#[tokio::test]
// invariant: fail-closed
async fn only_marked_images_are_accepted_and_their_config_is_ignored() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let with_image = |image: &str| {
        let mut request = session();
        request.image_ref = image.to_owned();
        request
    };
    let error = client
        .create_session(&with_image(UNLABELLED))
        .await
        .expect_err("not marked");
    assert!(error.is(ErrorCode::ImageNotCompatible), "{error}");
    let error = client
        .create_session(&with_image("localhost/cynode/none:latest"))
        .await
        .expect_err("not there");
    assert!(error.is(ErrorCode::ImageNotFound), "{error}");

    let hostile = client.create_session(&with_image(HOSTILE)).await?;
    let result = client
        .exec(
            hostile.session_id,
            &sh("id -u; echo ${LD_PRELOAD:-none}; echo $CYNODE_TASK_ID; \
                 touch /workspace/x && ls /workspace; cat /proc/1/comm"),
        )
        .await?;
    assert_eq!(
        result.stdout,
        format!("1000\nnone\n{}\nx\ncynode-sba\n", hostile.task_id)
    );
    Ok(())
}

#[tokio::test]
async fn the_same_request_is_the_same_session_and_another_is_refused() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let request = session();
    let (one, two) = tokio::join!(
        client.create_session(&request),
        client.create_session(&request)
    );
    let (one, two) = (one?, two?);
    assert_eq!(one.workspace_id, two.workspace_id);
    assert_eq!(
        client.list_sessions(&SessionFilter::default()).await?.len(),
        1
    );

    let mut other = request.clone();
    other.task_id = TaskId::generate();
    assert!(
        client
            .create_session(&other)
            .await
            .expect_err("another task")
            .is(ErrorCode::SessionIdInUse)
    );
    let mut other = request.clone();
    other.labels.insert("a".into(), "b".into());
    assert!(
        client
            .create_session(&other)
            .await
            .expect_err("another body")
            .is(ErrorCode::SessionIdInUse)
    );
    assert!(
        client
            .get_session(SessionId::generate())
            .await
            .expect_err("unknown")
            .is(ErrorCode::SessionNotFound)
    );
    Ok(())
}

// proves: REQ-SANDBX-0109
// part of: REQ-SANDBX-0110, ISC-07, CYNAI.SANDBX.LongRunningSession
#[tokio::test]
async fn a_workspace_is_deleted_at_the_end_or_kept_for_the_same_task() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let first = client.create_session(&session()).await?;
    client
        .exec(first.session_id, &sh("echo precious > file"))
        .await?;

    let mut second = session();
    second.task_id = first.task_id;
    second.workspace_ref = Some(WorkspaceRef::Workspace(first.workspace_id));
    let error = client.create_session(&second).await.expect_err("in use");
    assert!(error.is(ErrorCode::WorkspaceInUse), "{error}");

    let ended = client
        .end_session(
            first.session_id,
            &SessionEnd {
                workspace: Some(WorkspaceDisposal::Keep),
                reason: Some("done".into()),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(
        (ended.state, ended.end_reason.as_deref()),
        (SessionState::Ended, Some("done"))
    );
    let again = client
        .end_session(first.session_id, &SessionEnd::default())
        .await?;
    assert_eq!(again.end_reason.as_deref(), Some("done"));
    assert!(
        client
            .exec(first.session_id, &sh("true"))
            .await
            .expect_err("ended")
            .is(ErrorCode::SessionEnded)
    );

    let mut stranger = second.clone();
    (stranger.task_id, stranger.session_id) = (TaskId::generate(), SessionId::generate());
    assert!(
        client
            .create_session(&stranger)
            .await
            .expect_err("another task")
            .is(ErrorCode::WorkspaceNotFound)
    );
    let taken = client.create_session(&second).await?;
    assert_eq!(taken.workspace_id, first.workspace_id);
    assert_eq!(
        client
            .exec(taken.session_id, &sh("cat file; echo more >> file"))
            .await?
            .stdout,
        "precious\n"
    );

    client
        .end_session(taken.session_id, &SessionEnd::default())
        .await?;
    let gone = world
        .state_dir()
        .join("worker/workspaces")
        .join(first.workspace_id.to_string());
    assert!(!gone.exists());
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
async fn the_kept_workspace_of_an_ended_session_is_deleted_on_request() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let end = |workspace| SessionEnd {
        workspace: Some(workspace),
        ..Default::default()
    };
    let (keep, delete) = (end(WorkspaceDisposal::Keep), end(WorkspaceDisposal::Delete));
    let first = client.create_session(&session()).await?;
    let id = first.session_id;
    let workspace = world
        .state_dir()
        .join("worker/workspaces")
        .join(first.workspace_id.to_string());
    client.end_session(id, &keep).await?;
    // A repetition without a wish of its own changes nothing.
    client.end_session(id, &SessionEnd::default()).await?;
    client.end_session(id, &keep).await?;
    assert!(workspace.exists());

    // Not while another session uses it.
    let mut second = session();
    second.task_id = first.task_id;
    second.workspace_ref = Some(WorkspaceRef::Workspace(first.workspace_id));
    let taken = client.create_session(&second).await?;
    let error = client.end_session(id, &delete).await.expect_err("in use");
    assert!(error.is(ErrorCode::WorkspaceInUse), "{error}");
    client.end_session(taken.session_id, &keep).await?;

    for _ in 0..2 {
        let ended = client.end_session(id, &delete).await?;
        assert_eq!(ended.state, SessionState::Ended);
        assert!(!workspace.exists());
    }
    for ended in [id, taken.session_id] {
        let error = client.end_session(ended, &keep).await.expect_err("gone");
        assert!(error.is(ErrorCode::WorkspaceNotFound), "{error}");
        let error = client.resume_session(ended).await.expect_err("gone");
        assert!(error.is(ErrorCode::NotResumable), "{error}");
    }
    worker.shut_down().await?;
    world.assert_clean().await
}

// proves: CYNAI.SANDBX.LongRunningSession with
// a_workspace_is_deleted_at_the_end_or_kept_for_the_same_task and
// a_shell_is_a_terminal_that_can_be_resized_and_ends_with_its_own_code and
// every_runtime_gives_a_resizable_terminal
#[tokio::test]
async fn sessions_end_by_lifetime_and_by_idleness_but_not_while_something_runs() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let timed = |lifetime: u64, idle: u64| {
        let mut request = session();
        (request.max_lifetime_seconds, request.idle_timeout_seconds) = (Some(lifetime), Some(idle));
        request
    };
    let short = client.create_session(&timed(3, 600)).await?;
    let idle = client.create_session(&timed(600, 2)).await?;
    let busy = client.create_session(&timed(600, 2)).await?;
    let left_running = client.create_session(&timed(600, 2)).await?;
    let extended = client.create_session(&timed(3, 600)).await?;
    client
        .patch_session(
            extended.session_id,
            &SessionPatch {
                max_lifetime_seconds: Some(600),
                ..Default::default()
            },
        )
        .await?;
    let mut background = sh("sleep 600");
    (background.background, background.timeout_ms) = (true, 0);
    client.exec_background(busy.session_id, &background).await?;
    client
        .exec(left_running.session_id, &sh("sleep 600 & exit 0"))
        .await?;

    let ended =
        async |id: SessionId| Ok(client.get_session(id).await?.state == SessionState::Ended);
    eventually(
        "the short-lived session ends",
        Duration::from_secs(20),
        async || ended(short.session_id).await,
    )
    .await?;
    eventually(
        "the idle session ends",
        Duration::from_secs(20),
        async || ended(idle.session_id).await,
    )
    .await?;
    assert_eq!(
        client
            .get_session(short.session_id)
            .await?
            .end_reason
            .as_deref(),
        Some("expired")
    );
    assert_eq!(
        client
            .get_session(idle.session_id)
            .await?
            .end_reason
            .as_deref(),
        Some("idle")
    );
    for id in [
        busy.session_id,
        left_running.session_id,
        extended.session_id,
    ] {
        assert_eq!(client.get_session(id).await?.state, SessionState::Running);
    }
    let resumed = client.resume_session(idle.session_id).await?;
    assert_eq!(
        (resumed.state, resumed.workspace_id),
        (SessionState::Running, idle.workspace_id)
    );
    Ok(())
}

#[tokio::test]
async fn lists_filter_by_state_task_and_label() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut labelled = session();
    labelled.labels.insert("team".into(), "red".into());
    client.create_session(&labelled).await?;
    let plain = client.create_session(&session()).await?;
    client
        .end_session(plain.session_id, &SessionEnd::default())
        .await?;
    let ids = async |filter: SessionFilter| {
        Ok::<_, anyhow::Error>(
            client
                .list_sessions(&filter)
                .await?
                .iter()
                .map(|session| session.session_id)
                .collect::<Vec<_>>(),
        )
    };
    assert_eq!(
        ids(SessionFilter {
            state: Some(SessionState::Running),
            ..Default::default()
        })
        .await?,
        [labelled.session_id]
    );
    assert_eq!(
        ids(SessionFilter {
            task_id: Some(plain.task_id),
            ..Default::default()
        })
        .await?,
        [plain.session_id]
    );
    assert_eq!(
        ids(SessionFilter {
            labels: vec![("team".into(), "red".into())],
            ..Default::default()
        })
        .await?,
        [labelled.session_id]
    );
    assert!(
        ids(SessionFilter {
            labels: vec![("team".into(), "blue".into())],
            ..Default::default()
        })
        .await?
        .is_empty()
    );
    Ok(())
}

#[tokio::test]
async fn a_full_node_refuses_sessions_and_has_capacity_after_an_end() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&Options::default().set("max_sandboxes", "1"))
        .await?;
    let client = worker.client()?;
    let one = client.create_session(&session()).await?;
    assert!(
        client
            .create_session(&session())
            .await
            .expect_err("full")
            .is(ErrorCode::NoCapacity)
    );
    client
        .end_session(one.session_id, &SessionEnd::default())
        .await?;
    client.create_session(&session()).await?;
    Ok(())
}

#[tokio::test]
async fn a_sandbox_whose_process_one_dies_is_lost_and_can_be_resumed() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let made = client.create_session(&session()).await?;
    client
        .exec(made.session_id, &sh("echo kept > file"))
        .await?;
    let killed = world
        .podman()
        .args(["kill", "--signal", "KILL", "--all"])
        .output()?;
    assert!(killed.status.success(), "{killed:?}");
    eventually("the session is lost", Duration::from_secs(20), async || {
        Ok(client.get_session(made.session_id).await?.state == SessionState::Lost)
    })
    .await?;
    assert!(
        client
            .exec(made.session_id, &sh("true"))
            .await
            .expect_err("lost")
            .is(ErrorCode::NotRunning)
    );
    client.resume_session(made.session_id).await?;
    assert_eq!(
        client.exec(made.session_id, &sh("cat file")).await?.stdout,
        "kept\n"
    );
    assert_eq!(world.containers()?.len(), 1);
    Ok(())
}

#[tokio::test]
// invariant: fail-closed
async fn limits_outside_their_bounds_are_refused_by_name() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let cases = [
        (r#"{"limits":{"memory_bytes":1}}"#, "memory_bytes"),
        (
            r#"{"limits":{"memory_bytes":35184372088832}}"#,
            "memory_bytes",
        ),
        (r#"{"limits":{"cpus":0}}"#, "cpus"),
        (r#"{"limits":{"cpus":1000}}"#, "cpus"),
        (r#"{"limits":{"pids":1048576}}"#, "pids"),
        (r#"{"limits":{"pids":1}}"#, "pids"),
        (r#"{"limits":{"nofile":99999999}}"#, "nofile"),
        (r#"{"limits":{"disk_bytes":0}}"#, "disk_bytes"),
        (r#"{"max_lifetime_seconds":0}"#, "max_lifetime_seconds"),
        (
            r#"{"idle_timeout_seconds":99999999999}"#,
            "idle_timeout_seconds",
        ),
        (r#"{"env":{"A=B":"x"}}"#, "A=B"),
        (r#"{"image_ref":"a b"}"#, "image_ref"),
        (r#"{"workspace_ref":"/etc"}"#, "workspace_ref"),
        (r#"{"version":2}"#, "version"),
        (r#"{"colour":"blue"}"#, "colour"),
        (r#"{"network_policy":"open"}"#, "network_policy"),
    ];
    let http = reqwest::Client::new();
    for (body, named) in cases {
        let mut full = serde_json::to_value(session())?;
        let part: serde_json::Value = serde_json::from_str(body)?;
        full.as_object_mut()
            .expect("an object")
            .extend(part.as_object().expect("an object").clone());
        let response = http
            .post(format!("{}/v1/worker/sessions", worker.url()?))
            .bearer_auth(worker.token()?)
            .json(&full)
            .send()
            .await?;
        let status = response.status().as_u16();
        let problem: cynode_api::Problem = response.json().await?;
        assert!(status == 400 || status == 422, "{body}: {status}");
        assert!(
            problem.detail.contains(named) && problem.request_id.is_some(),
            "{body}: {}",
            problem.detail
        );
    }
    assert!(
        client
            .list_sessions(&SessionFilter::default())
            .await?
            .is_empty()
    );
    assert_eq!(IMAGE, "localhost/cynode/test-busybox:latest");
    Ok(())
}
