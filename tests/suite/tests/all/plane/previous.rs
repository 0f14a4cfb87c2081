//! A state directory that an earlier build made starts with this one, and nothing in it is lost.
//!
//! `tests/suite/state/previous.tar.gz` holds what the earlier build left: a backup of its control plane and the worker's journal,
//! with a running session, a kept workspace, a finished job, an artifact, a policy and the audit trail. To make it anew, check
//! out the build that is to be the earlier one and run this test with `CYNODE_WRITE_STATE=1`.

use std::{path::PathBuf, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    JobState, LimitsRequest, SessionEnd, SessionId, SessionState, TaskCreate, UserSessionCreate,
    WorkspaceDisposal, WorkspaceRef,
};
use cynode_client::{SessionFilter, UserClient};
use cynode_tests::{IMAGE, eventually, repository, sh};

use super::{
    nodes::{ended, job},
    stack::Stack,
};
use crate::cli::run;

const PATIENCE: Duration = Duration::from_secs(90);
const RULE: &str = "@id(\"no-plain\") forbid (principal, action == CyNode::Action::\"image.use\", resource is CyNode::Image) unless { resource.agent_compatible };";
/// Where the worker's files and the backup lie in the archive.
const BACKUP: &str = "backup.tar";

fn archive() -> PathBuf {
    repository().join("tests/suite/state/previous.tar.gz")
}

fn settings() -> [String; 2] {
    [
        format!("orchestrator.default_image={IMAGE}"),
        format!("orchestrator.seed_images=[{IMAGE:?}]"),
    ]
}

fn up(stack: &Stack) -> Result<UserClient> {
    let settings = settings();
    stack.up_with(&["--set", &settings[0], "--set", &settings[1]])?;
    let endpoints = stack.endpoints()?;
    let token = fs_err::read_to_string(stack.world.state_dir().join("admin.token"))?;
    Ok(UserClient::new(
        endpoints["api"].as_str().context("an address")?,
        token.trim(),
    )?)
}

fn tar(arguments: &[&std::ffi::OsStr]) -> Result<()> {
    let ran = Command::new("tar").args(arguments).output()?;
    ensure!(
        ran.status.success(),
        "tar: {}",
        String::from_utf8_lossy(&ran.stderr)
    );
    Ok(())
}

/// Fills a state directory with one of everything, and packs it.
async fn write() -> Result<()> {
    let stack = Stack::new()?;
    let client = up(&stack)?;
    let limits = LimitsRequest {
        memory_bytes: Some(64 << 20),
        disk_bytes: Some(16 << 20),
        ..Default::default()
    };
    for name in ["kept", "running"] {
        let task = client
            .create_task(&TaskCreate {
                name: name.to_owned(),
                ..Default::default()
            })
            .await?
            .id;
        let request = UserSessionCreate {
            task_id: Some(task),
            session_id: Some(SessionId::generate()),
            limits: Some(limits),
            ..Default::default()
        };
        let id = client
            .sessions()
            .create_user_session(&request)
            .await?
            .session_id;
        client
            .sessions()
            .exec(id, &sh(&format!("echo {name} > note; sync")))
            .await?;
        if name == "kept" {
            client
                .put_artifact(task, "report.txt", Some("text/plain"), "precious")
                .await?;
            client
                .sessions()
                .end_session(
                    id,
                    &SessionEnd {
                        workspace: Some(WorkspaceDisposal::Keep),
                        ..Default::default()
                    },
                )
                .await?;
        }
    }
    ended(&client, &job("echo done; exit 3", &[])).await?;
    let rule = stack.world.directory().join("site.cedar");
    fs_err::write(&rule, RULE)?;
    stack
        .run(&["policy", "put", "site", rule.to_str().context("a path")?])?
        .good()?;
    stack.run(&["token", "create", "--expires", "1h"])?.good()?;
    stack.run(&["down", "--keep-sessions"])?.good()?;
    let backup = stack.world.directory().join(BACKUP);
    stack
        .run(&["backup", backup.to_str().context("a path")?])?
        .good()?;
    fs_err::create_dir_all(archive().parent().context("a directory")?)?;
    tar(&[
        "--create".as_ref(),
        "--gzip".as_ref(),
        "--sparse".as_ref(),
        "--numeric-owner".as_ref(),
        "--exclude=agents".as_ref(),
        "--exclude=cynode-sba".as_ref(),
        "--exclude=podman".as_ref(),
        "--exclude=*.sock".as_ref(),
        "--exclude=data".as_ref(),
        "--file".as_ref(),
        archive().as_os_str(),
        "-C".as_ref(),
        stack.world.directory().as_os_str(),
        BACKUP.as_ref(),
        "-C".as_ref(),
        stack.world.state_dir().as_os_str(),
        "worker".as_ref(),
    ])
}

#[tokio::test]
async fn a_state_directory_of_the_previous_build_starts_and_nothing_in_it_is_lost() -> Result<()> {
    if std::env::var_os("CYNODE_WRITE_STATE").is_some() {
        return write().await;
    }
    let stack = Stack::new()?;
    let state = stack.world.state_dir();
    tar(&[
        "--extract".as_ref(),
        "--numeric-owner".as_ref(),
        "--file".as_ref(),
        archive().as_os_str(),
        "-C".as_ref(),
        stack.world.directory().as_os_str(),
    ])?;
    let backup = stack.world.directory().join(BACKUP);
    stack
        .run(&["backup", "--restore", backup.to_str().context("a path")?])?
        .good()?;
    fs_err::rename(stack.world.directory().join("worker"), state.join("worker"))?;
    let client = up(&stack)?;

    let tasks = client.tasks(None).await?;
    let task = |name: &str| {
        tasks
            .iter()
            .find(|task| task.name == name)
            .map(|task| task.id)
            .with_context(|| format!("task {name} is gone"))
    };
    let (kept, running) = (task("kept")?, task("running")?);
    let mut artifact = client.get_artifact(kept, "report.txt", None).await?;
    assert_eq!(
        artifact.chunk().await?.as_deref(),
        Some(b"precious".as_slice())
    );
    let jobs = client.jobs(None, None).await?;
    assert!(
        matches!(jobs.as_slice(), [job] if job.state == JobState::Failed && job.exit_code == Some(3)),
        "{jobs:?}"
    );
    assert_eq!(
        stack
            .run(&["job", "logs", &jobs[0].job_id.to_string()])?
            .good()?,
        "done\n"
    );

    // The containers did not move with the directory; what they wrote did.
    let sessions = client
        .sessions()
        .list_sessions(&SessionFilter::default())
        .await?;
    let of = |task| {
        sessions
            .iter()
            .find(|session| session.task_id == task)
            .with_context(|| format!("no session of {task}"))
    };
    let lost = of(running)?.session_id;
    let is_lost =
        async || Ok(client.sessions().get_session(lost).await?.state == SessionState::Lost);
    eventually("the session without a container is lost", PATIENCE, is_lost).await?;
    assert_eq!(
        client.sessions().resume_session(lost).await?.state,
        SessionState::Running
    );
    assert_eq!(
        client.sessions().exec(lost, &sh("cat note")).await?.stdout,
        "running\n"
    );
    let again = UserSessionCreate {
        task_id: Some(kept),
        workspace_ref: Some(WorkspaceRef::Workspace(of(kept)?.workspace_id)),
        ..Default::default()
    };
    let again = client
        .sessions()
        .create_user_session(&again)
        .await?
        .session_id;
    assert_eq!(
        client.sessions().exec(again, &sh("cat note")).await?.stdout,
        "kept\n"
    );

    let denied = stack.run(&[
        "policy",
        "test",
        "--action",
        "image.use",
        "--image",
        "registry.example/plain",
    ])?;
    assert!(
        denied.text().contains("denied by site/no-plain"),
        "{denied:?}"
    );
    let verified = stack.run(&["audit", "verify"])?.good()?;
    assert!(verified.starts_with("intact:"), "{verified}");
    for id in [lost, again] {
        client
            .sessions()
            .end_session(id, &SessionEnd::default())
            .await?;
    }
    run(stack.command()?.args(["down"]), b"")?.good()?;
    stack.assert_clean().await
}
