//! Limits that hold, limits that this host can't keep, and a host whose disk is nearly full.

use std::{os::unix::fs::PermissionsExt as _, process::Command};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, LimitsRequest, Session, SessionCreate, SessionEnd, Unenforced, WorkspaceDisposal, WorkspaceRef};
use cynode_client::{PutOptions, WorkerClient};
use cynode_tests::{Options, World, session, sh};

const MIB: u64 = 1 << 20;

fn with_disk(bytes: u64) -> SessionCreate {
    let mut request = session();
    request.limits = Some(LimitsRequest { memory_bytes: Some(256 * MIB), disk_bytes: Some(bytes), ..Default::default() });
    request
}

async fn out(client: &WorkerClient, made: &Session, script: &str) -> Result<String> {
    let result = client.exec(made.session_id, &sh(script)).await?;
    Ok(format!("{}{}", result.stdout, result.stderr))
}

fn keep() -> SessionEnd {
    SessionEnd { workspace: Some(WorkspaceDisposal::Keep), ..Default::default() }
}

// proves: REQ-SANDBX-0109
#[tokio::test]
async fn a_full_disk_is_the_sandboxs_own_and_what_is_in_it_stays() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let (full, other) = (client.create_session(&with_disk(32 * MIB)).await?, client.create_session(&with_disk(32 * MIB)).await?);
    assert_eq!((&full.unenforced[..], full.limits.disk_bytes), (&[][..], 32 * MIB));
    let said =
        out(&client, &full, "echo precious > note; dd if=/dev/zero of=big bs=1M count=100 2>&1; dd if=/dev/zero of=$HOME/big bs=1M count=100 2>&1").await?;
    assert_eq!(said.matches("No space left on device").count(), 2, "{said}");
    // The files call says it too; other sandboxes have their own.
    let error = client.put_file(full.session_id, "more".as_ref(), vec![0; 1 << 20], &PutOptions::default()).await.expect_err("full");
    assert!(error.is(ErrorCode::NoSpace), "{error}");
    assert_eq!(out(&client, &other, "dd if=/dev/zero of=big bs=1M count=16 2>/dev/null && echo room").await?, "room\n");
    // No more files than the disk has room for, however small they are.
    let said =
        out(&client, &other, "rm big; i=0; while [ $i -lt 100000 ]; do echo > f$i || break; i=$((i+1)); done 2>/dev/null; [ $i -lt 100000 ] && echo bounded")
            .await?;
    assert_eq!(said, "bounded\n");

    client.end_session(full.session_id, &keep()).await?;
    client.end_session(other.session_id, &SessionEnd::default()).await?;
    assert!(!fs_err::read_to_string("/proc/self/mountinfo")?.contains(&*world.state_dir().to_string_lossy()), "nothing stays mounted for kept workspaces");
    client.resume_session(full.session_id).await?;
    assert_eq!(out(&client, &full, "cat note").await?, "precious\n");
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
async fn a_kept_disk_can_grow_but_not_shrink() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let first = client.create_session(&with_disk(32 * MIB)).await?;
    out(&client, &first, "echo precious > note").await?;
    client.end_session(first.session_id, &keep()).await?;
    let again = |bytes: Option<u64>| {
        let mut request = with_disk(0);
        (request.task_id, request.workspace_ref) = (first.task_id, Some(WorkspaceRef::Workspace(first.workspace_id)));
        request.limits = Some(LimitsRequest { memory_bytes: Some(256 * MIB), disk_bytes: bytes, ..Default::default() });
        request
    };
    let error = client.create_session(&again(Some(16 * MIB))).await.expect_err("smaller");
    assert!(error.is(ErrorCode::LimitUnenforceable), "{error}");
    let same = client.create_session(&again(None)).await?;
    assert_eq!(same.limits.disk_bytes, 32 * MIB);
    client.end_session(same.session_id, &keep()).await?;
    let larger = client.create_session(&again(Some(128 * MIB))).await?;
    assert_eq!(out(&client, &larger, "cat note; dd if=/dev/zero of=big bs=1M count=64 2>/dev/null && echo room; rm big").await?, "precious\nroom\n");

    // Cut off in the middle: the file is larger, the file system in it is not, and says so only to who looks for it.
    client.end_session(larger.session_id, &keep()).await?;
    let image = world.state_dir().join("worker/workspaces").join(first.workspace_id.to_string()).join("disk.img");
    fs_err::OpenOptions::new().write(true).open(&image)?.set_len(256 * MIB)?;
    fs_err::write(image.with_extension("growing"), "")?;
    let largest = client.create_session(&again(Some(256 * MIB))).await?;
    assert_eq!(out(&client, &largest, "cat note; dd if=/dev/zero of=big bs=1M count=160 2>/dev/null && echo room").await?, "precious\nroom\n");
    Ok(())
}

#[tokio::test]
async fn what_the_kernel_enforces_is_what_was_asked_for() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    request.limits = Some(LimitsRequest { memory_bytes: Some(100 * MIB), cpus: Some(0.5), pids: Some(50), disk_bytes: Some(64 * MIB), nofile: Some(200) });
    let made = client.create_session(&request).await?;
    assert_eq!(made.unenforced, []);
    assert_eq!(out(&client, &made, "ulimit -n").await?, "200\n");
    Ok(())
}

// proves: CYNAI.SANDBX.RuntimeContractBaseline
#[tokio::test]
async fn a_limit_that_can_not_be_kept_is_refused_unless_it_is_allowed_by_name() -> Result<()> {
    let world = World::new()?;
    // A host on which nothing can be mounted.
    let tools = world.directory().join("tools");
    fs_err::create_dir_all(&tools)?;
    fs_err::write(tools.join("mount"), "#!/bin/sh\necho 'mount: not on this host' >&2\nexit 32\n")?;
    fs_err::set_permissions(tools.join("mount"), std::fs::Permissions::from_mode(0o755))?;
    let path = format!("{}:{}", tools.display(), std::env::var("PATH")?);
    let mut worker = world.worker(&Options::default().env("PATH", &path)).await?;
    let error = worker.client()?.create_session(&session()).await.expect_err("no disk");
    assert!(error.is(ErrorCode::LimitUnenforceable), "{error}");
    let said = error.to_string();
    assert!(said.contains("disk") && said.contains("worker.allow_unenforced = [\"disk\"]") && said.contains("not on this host"), "{said}");
    assert_eq!(world.containers()?.len(), 0, "nothing was started");
    worker.shut_down().await?;

    let worker = world.worker(&Options::default().env("PATH", &path).set("allow_unenforced", "[\"disk\"]")).await?;
    let client = worker.client()?;
    let made = client.create_session(&session()).await?;
    assert_eq!(made.unenforced, [Unenforced::Disk]);
    assert_eq!(client.get_session(made.session_id).await?.unenforced, [Unenforced::Disk]);
    assert_eq!(out(&client, &made, "echo runs").await?, "runs\n");
    Ok(())
}

#[tokio::test]
async fn a_node_whose_disk_is_nearly_full_refuses_new_work_and_loses_nothing() -> Result<()> {
    let world = World::new()?;
    let state = world.state_dir();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=400m", "tmpfs"]).arg(&state).status()?;
    ensure!(mounted.success(), "mounting a small disk failed");
    let worker = world.worker(&Options::default().set("min_free_bytes", &(200 * MIB).to_string())).await?;
    let client = worker.client()?;
    let made = client.create_session(&with_disk(64 * MIB)).await?;
    out(&client, &made, "echo precious > note").await?;

    let filler = state.join("filler");
    let free = || -> Result<u64> {
        let stat = rustix::fs::statvfs(&state)?;
        Ok(stat.f_bavail * stat.f_frsize)
    };
    let fill_to = |left: u64| -> Result<()> {
        let file = fs_err::OpenOptions::new().create(true).append(true).open(&filler)?;
        let have = file.metadata()?.len();
        let more = free()?.checked_sub(left).context("less is free already")?;
        Ok(rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), have, more)?)
    };
    fill_to(100 * MIB)?;
    let error = client.create_session(&session()).await.expect_err("no room");
    assert!(error.is(ErrorCode::NoSpace) && error.to_string().contains("min_free_bytes"), "{error}");
    assert!(format!("{:?}", client.readyz().await?).contains("min_free_bytes"));
    assert_eq!(out(&client, &made, "cat note; echo more > second; echo still").await?, "precious\nstill\n");
    fill_to(20 * MIB)?;
    let error = client.exec(made.session_id, &sh("true")).await.expect_err("no room for commands");
    assert!(error.is(ErrorCode::NoSpace), "{error}");
    // Ending needs no room, and gives some back.
    fs_err::remove_file(&filler)?;
    assert_eq!(out(&client, &made, "cat note second").await?, "precious\nmore\n");
    client.create_session(&with_disk(64 * MIB)).await?;
    Ok(())
}
