//! Warm sandboxes.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, LimitsRequest, Session, SessionCreate, SessionEnd, SessionId, TaskId,
    WorkspaceDisposal, WorkspaceRef,
};
use cynode_client::SessionClient;
use cynode_tests::{IMAGE, Options, RunningWorker, World, eventually, sh};
use serde_json::Value;

/// A session that matches the pool: the default image with default limits.
fn pooled_session() -> SessionCreate {
    SessionCreate::new(TaskId::generate(), SessionId::generate(), "default")
}

/// A session that matches no pool.
fn unpooled_session() -> SessionCreate {
    SessionCreate {
        limits: Some(LimitsRequest {
            pids: Some(100),
            ..Default::default()
        }),
        ..pooled_session()
    }
}

async fn metric(worker: &RunningWorker, line: &str) -> Result<u64> {
    let text = reqwest::get(format!("{}/metrics", worker.url()?))
        .await?
        .text()
        .await?;
    Ok(text
        .lines()
        .find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
        .unwrap_or(0))
}

async fn wait_for_spares(worker: &RunningWorker, count: u64) -> Result<()> {
    eventually("the pool is full", Duration::from_secs(60), async || {
        Ok(metric(worker, "cynode_pool_ready").await? == count)
    })
    .await
}

async fn output_of(client: &SessionClient, made: &Session, script: &str) -> Result<String> {
    Ok(client.exec(made.session_id, &sh(script)).await?.stdout)
}

#[tokio::test]
// invariant: warm-pool
async fn a_claimed_sandbox_is_new_to_its_task_and_used_once() -> Result<()> {
    let world = World::new()?;
    let mut worker = world
        .worker(&Options::default().set("pool_size", "2"))
        .await?;
    let client = worker.client()?;
    wait_for_spares(&worker, 2).await?;
    let (one, two) = (
        client.create_session(&pooled_session()).await?,
        client.create_session(&pooled_session()).await?,
    );
    assert!(one.warm && two.warm && one.unenforced.is_empty(), "{one:?}");
    assert_eq!(
        output_of(
            &client,
            &one,
            "ls -A /workspace $HOME /tmp | grep -v : | grep .; echo $CYNODE_TASK_ID \
             $CYNODE_SESSION_ID; echo secret > mine; echo secret > /tmp/mine"
        )
        .await?,
        format!("{} {}\n", one.task_id, one.session_id)
    );
    assert_eq!(
        output_of(
            &client,
            &two,
            "cat mine /tmp/mine 2>/dev/null; id -u; dd if=/dev/zero of=big \
             bs=1M count=1 2>/dev/null && echo works"
        )
        .await?,
        "1000\nworks\n"
    );
    // Spares have the directory of a job too.
    let left = "echo made > $CYNODE_ARTIFACTS_DIR/file && cat /job/artifacts/file";
    assert_eq!(output_of(&client, &one, left).await?, "made\n");
    // The next session gets a fresh sandbox, and the pool is refilled.
    client
        .end_session(one.session_id, &SessionEnd::default())
        .await?;
    wait_for_spares(&worker, 2).await?;
    let three = client.create_session(&pooled_session()).await?;
    assert!(three.warm && three.workspace_id != one.workspace_id);
    assert_eq!(output_of(&client, &three, "ls -A; ls -A /tmp").await?, "");
    let proxied = r"env | grep -c -i _proxy=; printf 'CONNECT a:1 HTTP/1.0\r\n\r\n' \
        | timeout 20 nc 127.0.0.1 3128 | head -n 1 | cut -d ' ' -f 2";
    assert_eq!(output_of(&client, &three, proxied).await?, "6\n403\n");
    assert_eq!(
        metric(&worker, "cynode_pool_claims_total{result=\"hit\"}").await?,
        3
    );

    // Other limits and kept workspaces bypass the pool.
    let cold = client.create_session(&unpooled_session()).await?;
    assert!(!cold.warm);
    client
        .end_session(
            two.session_id,
            &SessionEnd {
                workspace: Some(WorkspaceDisposal::Keep),
                ..Default::default()
            },
        )
        .await?;
    let mut again = pooled_session();
    (again.task_id, again.workspace_ref) =
        (two.task_id, Some(WorkspaceRef::Workspace(two.workspace_id)));
    let again = client.create_session(&again).await?;
    assert!(!again.warm);
    assert_eq!(output_of(&client, &again, "ls").await?, "big\n");
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: warm-pool
async fn a_claimed_sandbox_survives_the_worker_and_spares_do_not_leak() -> Result<()> {
    let world = World::new()?;
    let options = Options::default().set("pool_size", "2");
    let mut worker = world.worker(&options).await?;
    wait_for_spares(&worker, 2).await?;
    let made = worker.client()?.create_session(&pooled_session()).await?;
    output_of(&worker.client()?, &made, "echo kept > file").await?;
    worker.kill()?;
    let mut worker = world.worker(&options).await?;
    let client = worker.client()?;
    assert_eq!(output_of(&client, &made, "cat file").await?, "kept\n");
    wait_for_spares(&worker, 2).await?;
    assert_eq!(world.containers()?.len(), 3, "old spares were left");
    worker.signal(rustix::process::Signal::TERM)?;
    ensure!(
        worker.wait(Duration::from_secs(30)).await?.success(),
        "the worker failed"
    );
    assert_eq!(
        world.containers()?.len(),
        1,
        "a stopped worker kept spares or lost a session"
    );
    let mut worker = world.worker(&Options::default()).await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: warm-pool
async fn a_resume_during_a_claim_of_the_same_session_disturbs_neither() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&Options::default().set("pool_size", "2"))
        .await?;
    let client = worker.client()?;
    for _ in 0..8 {
        wait_for_spares(&worker, 2).await?;
        let request = pooled_session();
        let mut resuming = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let (client, id) = (client.clone(), request.session_id);
            resuming.spawn(async move {
                loop {
                    drop(client.resume_session(id).await);
                }
            });
        }
        let made = tokio::time::timeout(Duration::from_secs(20), client.create_session(&request))
            .await??;
        resuming.shutdown().await;
        client
            .end_session(made.session_id, &SessionEnd::default())
            .await?;
    }
    Ok(())
}

#[tokio::test]
// invariant: warm-pool
async fn a_new_image_under_the_same_name_drains_the_pool() -> Result<()> {
    let world = World::new()?;
    // Two images of this world, one after the other under the same name.
    let tree = world.directory().join("tree.tar");
    let podman = |arguments: &[&str]| -> Result<()> {
        let output = world.podman().args(arguments).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    };
    podman(&["create", "--name", "tree", IMAGE, "true"])?;
    podman(&["export", "--output", &tree.to_string_lossy(), "tree"])?;
    podman(&["rm", "tree"])?;
    let import = |version: &str| {
        let label = format!("LABEL {}=true", cynode_api::LABEL_AGENT_COMPATIBLE);
        podman(&[
            "import",
            "--change",
            &label,
            "--change",
            &format!("ENV VERSION={version}"),
            &tree.to_string_lossy(),
            "localhost/current:latest",
        ])
    };
    import("one")?;
    let worker = world
        .worker(
            &Options::default()
                .set("pool_size", "1")
                .set("default_image", "\"localhost/current:latest\""),
        )
        .await?;
    let client = worker.client()?;
    wait_for_spares(&worker, 1).await?;
    let before = client.create_session(&pooled_session()).await?;
    wait_for_spares(&worker, 1).await?;
    import("two")?;
    let after = client.create_session(&pooled_session()).await?;
    assert_eq!(
        (
            output_of(&client, &before, "echo $VERSION").await?,
            output_of(&client, &after, "echo $VERSION").await?
        ),
        ("one\n".to_owned(), "two\n".to_owned())
    );
    assert!(
        !after.warm && after.image_digest != before.image_digest,
        "{after:?}"
    );
    eventually(
        "spares of the new image",
        Duration::from_secs(60),
        async || {
            let made = client.create_session(&pooled_session()).await?;
            client
                .end_session(made.session_id, &SessionEnd::default())
                .await?;
            Ok(made.warm && made.image_digest == after.image_digest)
        },
    )
    .await
}

#[tokio::test]
// invariant: warm-pool
async fn spares_are_evicted_when_a_node_is_full() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(
            &Options::default()
                .set("pool_size", "1")
                .set("max_sandboxes", "1"),
        )
        .await?;
    let client = worker.client()?;
    wait_for_spares(&worker, 1).await?;
    let made = client.create_session(&unpooled_session()).await?;
    eventually(
        "only the session is left",
        Duration::from_secs(20),
        async || Ok(world.containers()?.len() == 1),
    )
    .await?;
    assert_eq!(output_of(&client, &made, "echo here").await?, "here\n");
    Ok(())
}

/// An OCI runtime that blocks every start while the file `hold` exists.
fn blocking_runtime(world: &World) -> Result<Options> {
    let (path, hold) = (
        world.directory().join("holding-runc"),
        world.directory().join("hold"),
    );
    fs_err::write(
        &path,
        format!(
            "#!/bin/sh\ncase \" $* \" in *' create '*) while [ -e '{}' ]; do sleep 0.02; done;; \
             esac\nexec runc \"$@\"\n",
            hold.display()
        ),
    )?;
    fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Ok(Options::default().set("oci_runtime", &format!("{:?}", path.display().to_string())))
}

#[tokio::test]
// invariant: warm-pool
async fn a_starting_spare_is_evicted_too() -> Result<()> {
    let world = World::new()?;
    let options = blocking_runtime(&world)?;
    // The probe of the host's capabilities must not be blocked.
    world.worker(&options).await?.shut_down().await?;
    fs_err::write(world.directory().join("hold"), "")?;
    let mut worker =
        world.start_worker(&options.set("pool_size", "1").set("max_sandboxes", "1"))?;
    let log = worker.log();
    let says = |text: &str| -> Result<bool> { Ok(fs_err::read_to_string(&log)?.contains(text)) };
    eventually(
        "a spare is being created",
        Duration::from_secs(30),
        async || says("Starting a spare sandbox."),
    )
    .await?;
    let client = worker.client()?;
    let request = unpooled_session();
    let admitted = async {
        eventually(
            "the session is admitted",
            Duration::from_secs(30),
            async || Ok(client.get_session(request.session_id).await.is_ok()),
        )
        .await?;
        Ok(fs_err::remove_file(world.directory().join("hold"))?)
    };
    let (made, admitted): (_, Result<()>) = tokio::join!(client.create_session(&request), admitted);
    admitted?;
    let made = made?;
    eventually(
        "the spare is finished",
        Duration::from_secs(30),
        async || {
            Ok(says("A spare sandbox is ready.")?
                || says("A spare sandbox was evicted while it started.")?)
        },
    )
    .await?;
    eventually(
        "only the session is left",
        Duration::from_secs(20),
        async || Ok(world.containers()?.len() == 1),
    )
    .await?;
    assert_eq!(output_of(&client, &made, "echo here").await?, "here\n");
    // As soon as there is room, the pool has a spare again.
    client
        .end_session(made.session_id, &SessionEnd::default())
        .await?;
    wait_for_spares(&worker, 1).await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: warm-pool
async fn spares_give_up_their_ids_to_sessions() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let kept = client.create_session(&pooled_session()).await?;
    client
        .end_session(
            kept.session_id,
            &SessionEnd {
                workspace: Some(WorkspaceDisposal::Keep),
                ..Default::default()
            },
        )
        .await?;
    worker.shut_down().await?;
    // As if kept workspaces occupied all id blocks but the last.
    let workspaces = world.state_dir().join("worker/workspaces");
    let mut record: Value = serde_json::from_slice(&fs_err::read(
        workspaces
            .join(kept.workspace_id.to_string())
            .join("workspace.json"),
    )?)?;
    let first = record["id_block"].as_u64().context("a block")?;
    for number in 1..511 {
        let id = cynode_api::WorkspaceId::generate().to_string();
        fs_err::create_dir_all(workspaces.join(&id).join("data"))?;
        (record["id_block"], record["workspace_id"]) =
            ((first + number * 65_536).into(), id.clone().into());
        fs_err::write(
            workspaces.join(id).join("workspace.json"),
            record.to_string(),
        )?;
    }
    let mut worker = world
        .worker(&Options::default().set("pool_size", "1"))
        .await?;
    let client = worker.client()?;
    wait_for_spares(&worker, 1).await?;
    let last = client.create_session(&unpooled_session()).await?;
    assert_eq!(output_of(&client, &last, "echo here").await?, "here\n");
    // A session with ids needs no others; another one gets none, and no spare is left to evict.
    client.resume_session(kept.session_id).await?;
    let error = client
        .create_session(&unpooled_session())
        .await
        .expect_err("no ids");
    assert!(error.is(ErrorCode::NoCapacity), "{error}");
    // Sessions take precedence over the pool.
    client
        .end_session(last.session_id, &SessionEnd::default())
        .await?;
    client.create_session(&unpooled_session()).await?;
    worker.shut_down().await?;
    world.assert_clean().await
}
