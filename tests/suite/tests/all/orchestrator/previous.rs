//! A state directory of an earlier build starts with this one, and nothing in it is lost.
//!
//! `tests/suite/state/previous.tar.gz` holds the state of the earlier build: a backup of its
//! control plane, the worker's journal and the image of its sessions, with a running session, a
//! kept workspace, a finished job, an artifact, a policy and the audit trail. To write it anew,
//! check out the build that is to be the earlier one and run this test with `CYNODE_WRITE_STATE=1`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    JobState, LimitsRequest, SessionEnd, SessionId, SessionState, TaskCreate, UserSessionCreate,
    WorkspaceDisposal, WorkspaceRef,
};
use cynode_client::{PutOptions, SessionFilter, UserClient};
use cynode_tests::{IMAGE, eventually, repository};

use super::{
    nodes::{job, run_to_end},
    stack::Stack,
};
use crate::cli::run;

const TIMEOUT: Duration = Duration::from_secs(90);
const RULE: &str = "@id(\"no-plain\") forbid (principal, action == CyNode::Action::\"image.use\", \
                    resource is CyNode::Image) unless { resource.agent_compatible };";
/// The places of the worker's files and of the backup in the archive.
const BACKUP: &str = "backup.tar";
const IMAGE_ARCHIVE: &str = "image.tar";
/// The image of the sessions: directories only. It is part of the archive because a session is
/// bound to its image's id, and the ids of the other test images change with their recipe.
const STATE_IMAGE: &str = "localhost/cynode/test-state:latest";
const NOTE: &str = "/workspace/note";

fn archive() -> PathBuf {
    repository().join("tests/suite/state/previous.tar.gz")
}

fn settings() -> [String; 2] {
    [
        format!("orchestrator.default_image={IMAGE}"),
        format!("orchestrator.seed_images=[{IMAGE:?}, {STATE_IMAGE:?}]"),
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

fn podman(stack: &Stack, arguments: &[&std::ffi::OsStr]) -> Result<()> {
    let ran = stack.world.podman().args(arguments).output()?;
    ensure!(
        ran.status.success(),
        "podman: {}",
        String::from_utf8_lossy(&ran.stderr)
    );
    Ok(())
}

/// Imports the image of the sessions into the stack's store, and saves it as an archive.
fn make_image(stack: &Stack) -> Result<()> {
    let (root, tree) = (stack.world.directory().join("tree"), "tree.tar");
    for directory in [
        "dev",
        "etc",
        "home/agent",
        "job",
        "proc",
        "run/cynode",
        "sys",
        "tmp",
        "workspace",
    ] {
        fs_err::create_dir_all(root.join(directory))?;
    }
    let tree = stack.world.directory().join(tree);
    tar(&[
        "--create".as_ref(),
        "--file".as_ref(),
        tree.as_os_str(),
        "-C".as_ref(),
        root.as_os_str(),
        ".".as_ref(),
    ])?;
    podman(
        stack,
        &[
            "import".as_ref(),
            "--change".as_ref(),
            "LABEL io.cynodeai.sandbox.agent-compatible=true".as_ref(),
            tree.as_os_str(),
            STATE_IMAGE.as_ref(),
        ],
    )?;
    let archive = stack.world.directory().join(IMAGE_ARCHIVE);
    podman(
        stack,
        &[
            "save".as_ref(),
            "--output".as_ref(),
            archive.as_os_str(),
            STATE_IMAGE.as_ref(),
        ],
    )
}

async fn read_note(client: &UserClient, id: SessionId) -> Result<String> {
    let mut body = client.sessions().get_file(id, Path::new(NOTE)).await?;
    let mut text = Vec::new();
    while let Some(chunk) = body.chunk().await? {
        text.extend_from_slice(&chunk);
    }
    Ok(String::from_utf8(text)?)
}

/// Fills a state directory with one of everything, and packs it.
async fn write() -> Result<()> {
    let stack = Stack::new()?;
    make_image(&stack)?;
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
            image_ref: Some(STATE_IMAGE.to_owned()),
            ..Default::default()
        };
        let id = client
            .sessions()
            .create_user_session(&request)
            .await?
            .session_id;
        client
            .sessions()
            .put_file(id, Path::new(NOTE), name, &PutOptions::default())
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
    run_to_end(&client, &job("echo done; exit 3", &[])).await?;
    let rule = stack.world.directory().join("site.cedar");
    fs_err::write(&rule, RULE)?;
    stack
        .run(&["policy", "put", "site", rule.to_str().context("a path")?])?
        .success()?;
    stack
        .run(&["token", "create", "--expires", "1h"])?
        .success()?;
    stack.run(&["down", "--keep-sessions"])?.success()?;
    // The running session's disk stays mounted: its files reach the image only when flushed.
    ensure!(Command::new("sync").status()?.success(), "sync failed");
    let backup = stack.world.directory().join(BACKUP);
    stack
        .run(&["backup", backup.to_str().context("a path")?])?
        .success()?;
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
        IMAGE_ARCHIVE.as_ref(),
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
    let image = stack.world.directory().join(IMAGE_ARCHIVE);
    podman(
        &stack,
        &["load".as_ref(), "--input".as_ref(), image.as_os_str()],
    )?;
    let backup = stack.world.directory().join(BACKUP);
    stack
        .run(&["backup", "--restore", backup.to_str().context("a path")?])?
        .success()?;
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
            .success()?,
        "done\n"
    );

    // The containers did not move with the directory; their files did.
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
    // Sessions had no names then.
    assert!(
        sessions.iter().all(|session| session.name.is_none()),
        "{sessions:?}"
    );
    let lost = of(running)?.session_id;
    let is_lost =
        async || Ok(client.sessions().get_session(lost).await?.state == SessionState::Lost);
    eventually("the session without a container is lost", TIMEOUT, is_lost).await?;
    assert_eq!(
        client.sessions().resume_session(lost).await?.state,
        SessionState::Running
    );
    assert_eq!(read_note(&client, lost).await?, "running");
    let listed = stack.run(&["session", "list"])?.success()?;
    let row = listed.lines().find(|line| line.contains(&lost.to_string()));
    assert!(
        row.is_some_and(|row| row.split_whitespace().nth(1) == Some("-")),
        "{listed}"
    );
    let again = UserSessionCreate {
        task_id: Some(kept),
        workspace_ref: Some(WorkspaceRef::Workspace(of(kept)?.workspace_id)),
        image_ref: Some(STATE_IMAGE.to_owned()),
        ..Default::default()
    };
    let again = client
        .sessions()
        .create_user_session(&again)
        .await?
        .session_id;
    assert_eq!(read_note(&client, again).await?, "kept");

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
    let verified = stack.run(&["audit", "verify"])?.success()?;
    assert!(verified.starts_with("intact:"), "{verified}");
    for id in [lost, again] {
        client
            .sessions()
            .end_session(id, &SessionEnd::default())
            .await?;
    }
    run(stack.command()?.args(["down"]), b"")?.success()?;
    stack.assert_clean().await
}
