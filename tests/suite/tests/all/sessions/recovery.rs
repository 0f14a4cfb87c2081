//! Disconnected callers, failing runtimes, lost records: a session's files stay.

use std::{os::unix::fs::PermissionsExt as _, time::Duration};

use anyhow::{Context as _, Result};
use cynode_api::{ErrorCode, Session, SessionEnd, SessionState, WorkspaceDisposal, WorkspaceRef};
use cynode_client::{PutOptions, Readiness, SessionClient};
use cynode_tests::{Options, RunningWorker, World, eventually, session, sh};
use serde_json::Value;

fn end_and_keep() -> SessionEnd {
    SessionEnd {
        workspace: Some(WorkspaceDisposal::Keep),
        ..Default::default()
    }
}

/// A session with a file in its workspace, ended with the workspace kept.
async fn ended_with_a_file(client: &SessionClient) -> Result<Session> {
    let made = client.create_session(&session()).await?;
    client
        .exec(made.session_id, &sh("echo precious > file"))
        .await?;
    Ok(client.end_session(made.session_id, &end_and_keep()).await?)
}

async fn file_of(client: &SessionClient, made: &Session) -> Result<String> {
    Ok(client.exec(made.session_id, &sh("cat file")).await?.stdout)
}

fn record_of(world: &World, made: &Session) -> std::path::PathBuf {
    world
        .state_dir()
        .join("worker/workspaces")
        .join(made.workspace_id.to_string())
        .join("workspace.json")
}

/// A Podman whose service can't start while the file `broken` exists.
fn breakable_podman(world: &World) -> Result<Options> {
    let path = world.directory().join("podman");
    let broken = world.directory().join("broken");
    fs_err::write(
        &path,
        format!(
            "#!/bin/sh\ncase \"$*\" in *'system service'*) [ ! -e '{}' ] || exit 1;; esac\nexec \
             podman \"$@\"\n",
            broken.display()
        ),
    )?;
    fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(Options::default().set("podman", &format!("{:?}", path.display().to_string())))
}

fn signal_service(world: &World, signal: rustix::process::Signal) -> Result<()> {
    let recorded: Value = serde_json::from_slice(&fs_err::read(
        world.state_dir().join("worker/podman/service.json"),
    )?)?;
    let pid = i32::try_from(recorded["pid"].as_i64().context("a process id")?)?;
    Ok(rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).context("a process id")?,
        signal,
    )?)
}

fn kill_service(world: &World) -> Result<()> {
    signal_service(world, rustix::process::Signal::KILL)
}

#[tokio::test]
async fn a_resume_completes_after_its_caller_disconnects() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let made = ended_with_a_file(&client).await?;
    assert!(
        tokio::time::timeout(
            Duration::from_millis(15),
            client.resume_session(made.session_id)
        )
        .await
        .is_err(),
        "the response arrived before the caller disconnected"
    );
    eventually("the session runs", Duration::from_secs(20), async || {
        Ok(client.get_session(made.session_id).await?.state == SessionState::Running)
    })
    .await?;
    assert_eq!(file_of(&client, &made).await?, "precious\n");
    Ok(())
}

#[tokio::test]
async fn one_of_two_concurrent_sessions_gets_the_workspace() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let made = ended_with_a_file(&client).await?;
    for _ in 0..5 {
        let mut other = session();
        (other.task_id, other.workspace_ref) = (
            made.task_id,
            Some(WorkspaceRef::Workspace(made.workspace_id)),
        );
        let (resumed, created) = tokio::join!(
            client.resume_session(made.session_id),
            client.create_session(&other)
        );
        let (winner, refusal) = match (resumed, created) {
            (Ok(winner), Err(refusal)) | (Err(refusal), Ok(winner)) => (winner, refusal),
            other => panic!("{other:?}"),
        };
        assert!(refusal.is(ErrorCode::WorkspaceInUse), "{refusal}");
        assert_eq!(world.containers()?.len(), 1);
        client
            .end_session(winner.session_id, &end_and_keep())
            .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_resume_that_fails_costs_no_file_and_can_be_tried_again() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&breakable_podman(&world)?.set("runtime_timeout_seconds", "3"))
        .await?;
    let client = worker.client()?;
    let made = client.create_session(&session()).await?;
    // Through the file call alone: no command ever ran in it.
    client
        .put_file(
            made.session_id,
            "file".as_ref(),
            "precious\n",
            &PutOptions::default(),
        )
        .await?;
    client.end_session(made.session_id, &end_and_keep()).await?;
    fs_err::write(world.directory().join("broken"), "")?;
    kill_service(&world)?;
    let error = client
        .resume_session(made.session_id)
        .await
        .expect_err("no runtime");
    assert!(error.is(ErrorCode::RuntimeUnavailable), "{error}");
    assert_eq!(
        client.get_session(made.session_id).await?.state,
        SessionState::Ended,
        "a failed resume changed the state"
    );
    // Another session that fails on the same files doesn't keep them mounted either.
    let mut other = session();
    (other.task_id, other.workspace_ref) = (
        made.task_id,
        Some(WorkspaceRef::Workspace(made.workspace_id)),
    );
    client.create_session(&other).await.expect_err("no runtime");
    assert!(
        !fs_err::read_to_string("/proc/self/mountinfo")?.contains(&made.workspace_id.to_string()),
        "the disk is still mounted"
    );
    fs_err::remove_file(world.directory().join("broken"))?;
    client.resume_session(made.session_id).await?;
    assert_eq!(file_of(&client, &made).await?, "precious\n");
    Ok(())
}

#[tokio::test]
async fn a_worker_without_its_runtime_gives_the_reason_and_accepts_no_work() -> Result<()> {
    let world = World::new()?;
    let options = breakable_podman(&world)?.set("runtime_timeout_seconds", "3");
    let mut worker = world.worker(&options).await?;
    let made = worker.client()?.create_session(&session()).await?;
    worker.kill()?;
    kill_service(&world)?;
    fs_err::write(world.directory().join("broken"), "")?;
    let mut worker = world.start_worker(&options)?;
    eventually(
        "the worker logs what it waits for",
        Duration::from_secs(20),
        async || {
            let Ok(client) = worker.client() else {
                return Ok(false);
            };
            Ok(client
                .readyz()
                .await
                .is_ok_and(|readiness| format!("{readiness:?}").contains("podman's service")))
        },
    )
    .await?;
    let client = worker.client()?;
    // Running sessions need no runtime; new ones fail.
    assert_eq!(
        client.exec(made.session_id, &sh("echo here")).await?.stdout,
        "here\n"
    );
    let error = client
        .create_session(&session())
        .await
        .expect_err("no runtime");
    assert!(error.is(ErrorCode::RuntimeUnavailable), "{error}");
    // A stop request meanwhile doesn't wait for the runtime; the next worker finds everything.
    worker.signal(rustix::process::Signal::TERM)?;
    assert!(worker.wait(Duration::from_secs(30)).await?.success());
    fs_err::remove_file(world.directory().join("broken"))?;
    let mut worker = world.worker(&options).await?;
    let client = worker.client()?;
    assert_eq!(
        client.exec(made.session_id, &sh("echo here")).await?.stdout,
        "here\n"
    );
    client.create_session(&session()).await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
async fn a_worker_is_ready_while_its_runtime_is_slow_and_not_when_it_is_gone() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&breakable_podman(&world)?.set("runtime_timeout_seconds", "25"))
        .await?;
    let client = worker.client()?;
    signal_service(&world, rustix::process::Signal::STOP)?;
    for _ in 0..3 {
        let readiness = client.readyz().await?;
        assert!(matches!(readiness, Readiness::Ready), "{readiness:?}");
    }
    signal_service(&world, rustix::process::Signal::CONT)?;
    client.create_session(&session()).await?;
    // A session that is gone and can't be resumed is reported at once.
    fs_err::write(world.directory().join("broken"), "")?;
    kill_service(&world)?;
    eventually("the worker logs it", Duration::from_secs(60), async || {
        Ok(!matches!(client.readyz().await?, Readiness::Ready))
    })
    .await?;
    fs_err::remove_file(world.directory().join("broken"))?;
    worker.wait_until_ready().await
}

#[tokio::test]
async fn a_workspace_kept_on_request_has_no_deletion_date_and_use_removes_one() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let date = |made: &Session| -> Result<Value> {
        Ok(
            serde_json::from_slice::<Value>(&fs_err::read(record_of(&world, made))?)?["delete_at"]
                .clone(),
        )
    };
    let made = client.create_session(&session()).await?;
    assert!(
        world
            .podman()
            .args(["kill", "--all"])
            .output()?
            .status
            .success()
    );
    eventually("the session is lost", Duration::from_secs(20), async || {
        Ok(client.get_session(made.session_id).await?.state == SessionState::Lost)
    })
    .await?;
    assert!(
        date(&made)?.is_string(),
        "a lost session's workspace has no deletion date"
    );
    client.end_session(made.session_id, &end_and_keep()).await?;
    assert!(
        date(&made)?.is_null(),
        "a workspace kept on request has a deletion date"
    );
    Ok(())
}

#[tokio::test]
async fn records_that_are_gone_or_broken_lose_no_workspace() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let (gone, broken, running) = (
        ended_with_a_file(&client).await?,
        ended_with_a_file(&client).await?,
        client.create_session(&session()).await?,
    );
    client
        .exec(running.session_id, &sh("echo precious > file"))
        .await?;
    worker.kill()?;
    fs_err::remove_file(record_of(&world, &gone))?;
    fs_err::write(record_of(&world, &broken), "{\"workspace_id\":")?;
    fs_err::remove_file(record_of(&world, &running))?;
    fs_err::write(world.state_dir().join("worker/node.json"), "")?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    for made in [&gone, &broken] {
        client.resume_session(made.session_id).await?;
    }
    for made in [&gone, &broken, &running] {
        assert_eq!(file_of(&client, made).await?, "precious\n");
    }
    // A new session shares its ids with none of them.
    let fresh = client.create_session(&session()).await?;
    let owner = |made: &Session| -> Result<u32> {
        use std::os::unix::fs::MetadataExt as _;
        Ok(fs_err::metadata(
            world
                .state_dir()
                .join("worker/workspaces")
                .join(made.workspace_id.to_string())
                .join("data/workspace"),
        )?
        .uid())
    };
    let owners = [&gone, &broken, &running, &fresh]
        .map(owner)
        .into_iter()
        .collect::<Result<std::collections::BTreeSet<_>>>()?;
    assert_eq!(owners.len(), 4);
    assert_eq!(fresh.node_id, running.node_id);
    worker.shut_down().await?;
    world.assert_clean().await
}

fn open_files(worker: &RunningWorker) -> Result<usize> {
    Ok(fs_err::read_dir(format!("/proc/{}/fd", worker.pid()))?.count())
}

#[tokio::test]
async fn sessions_and_execs_that_have_ended_hold_no_descriptor() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let round = async || -> Result<()> {
        let made = client.create_session(&session()).await?;
        for _ in 0..20 {
            client
                .exec(made.session_id, &sh("echo some output"))
                .await?;
        }
        client
            .end_session(made.session_id, &SessionEnd::default())
            .await?;
        Ok(())
    };
    round().await?;
    let before = open_files(&worker)?;
    for _ in 0..5 {
        round().await?;
    }
    // Connections of the client and of Podman's service come and go; a leak per round would show
    // five times.
    eventually(
        "no descriptor is kept",
        Duration::from_secs(20),
        async || Ok(open_files(&worker)? < before + 5),
    )
    .await
}
