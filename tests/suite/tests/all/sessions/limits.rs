//! Enforced limits, limits that this host can't enforce, and a host whose disk is nearly full.

use std::{os::unix::fs::PermissionsExt as _, path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, ExecRequest, ExecState, LimitsRequest, Session, SessionCreate, SessionEnd,
    Unenforced, WorkspaceDisposal, WorkspaceRef,
};
use cynode_client::{PutOptions, SessionClient};
use cynode_tests::{Options, World, eventually, session, sh};

const MIB: u64 = 1 << 20;

fn with_disk(bytes: u64) -> SessionCreate {
    let mut request = session();
    request.limits = Some(LimitsRequest {
        memory_bytes: Some(256 * MIB),
        disk_bytes: Some(bytes),
        ..Default::default()
    });
    request
}

async fn output_of(client: &SessionClient, made: &Session, script: &str) -> Result<String> {
    let result = client.exec(made.session_id, &sh(script)).await?;
    Ok(format!("{}{}", result.stdout, result.stderr))
}

fn end_and_keep() -> SessionEnd {
    SessionEnd {
        workspace: Some(WorkspaceDisposal::Keep),
        ..Default::default()
    }
}

// part of: REQ-SANDBX-0109
#[tokio::test]
// invariant: disk
async fn a_full_disk_affects_only_its_sandbox_and_keeps_its_files() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let (full, other) = (
        client.create_session(&with_disk(32 * MIB)).await?,
        client.create_session(&with_disk(32 * MIB)).await?,
    );
    assert_eq!(
        (&full.unenforced[..], full.limits.disk_bytes),
        (&[][..], 32 * MIB)
    );
    let message = output_of(
        &client,
        &full,
        "echo precious > note; dd if=/dev/zero of=big bs=1M count=100 \
         2>&1; dd if=/dev/zero of=$HOME/big bs=1M count=100 2>&1",
    )
    .await?;
    assert_eq!(
        message.matches("No space left on device").count(),
        2,
        "{message}"
    );
    // The file call reports it too; other sandboxes have their own disk.
    let error = client
        .put_file(
            full.session_id,
            "more".as_ref(),
            vec![0; 1 << 20],
            &PutOptions::default(),
        )
        .await
        .expect_err("full");
    assert!(error.is(ErrorCode::NoSpace), "{error}");
    assert_eq!(
        output_of(
            &client,
            &other,
            "dd if=/dev/zero of=big bs=1M count=16 2>/dev/null && echo room"
        )
        .await?,
        "room\n"
    );
    // No more files than the disk has room for, however small.
    let message = output_of(
        &client,
        &other,
        "rm big; i=0; while [ $i -lt 100000 ]; do echo > f$i || break; \
         i=$((i+1)); done 2>/dev/null; [ $i -lt 100000 ] && echo \
         bounded",
    )
    .await?;
    assert_eq!(message, "bounded\n");

    client.end_session(full.session_id, &end_and_keep()).await?;
    client
        .end_session(other.session_id, &SessionEnd::default())
        .await?;
    assert!(
        !fs_err::read_to_string("/proc/self/mountinfo")?
            .contains(&*world.state_dir().to_string_lossy()),
        "a kept workspace is still mounted"
    );
    client.resume_session(full.session_id).await?;
    assert_eq!(output_of(&client, &full, "cat note").await?, "precious\n");
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: disk
async fn a_kept_disk_can_grow_but_not_shrink() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let first = client.create_session(&with_disk(32 * MIB)).await?;
    output_of(&client, &first, "echo precious > note").await?;
    client
        .end_session(first.session_id, &end_and_keep())
        .await?;
    let again = |bytes: Option<u64>| {
        let mut request = with_disk(0);
        (request.task_id, request.workspace_ref) = (
            first.task_id,
            Some(WorkspaceRef::Workspace(first.workspace_id)),
        );
        request.limits = Some(LimitsRequest {
            memory_bytes: Some(256 * MIB),
            disk_bytes: bytes,
            ..Default::default()
        });
        request
    };
    let error = client
        .create_session(&again(Some(16 * MIB)))
        .await
        .expect_err("smaller");
    assert!(error.is(ErrorCode::LimitUnenforceable), "{error}");
    let same = client.create_session(&again(None)).await?;
    assert_eq!(same.limits.disk_bytes, 32 * MIB);
    client.end_session(same.session_id, &end_and_keep()).await?;
    let larger = client.create_session(&again(Some(128 * MIB))).await?;
    assert_eq!(
        output_of(
            &client,
            &larger,
            "cat note; dd if=/dev/zero of=big bs=1M count=64 2>/dev/null && echo room; rm big"
        )
        .await?,
        "precious\nroom\n"
    );

    // Interrupted in the middle: the file is larger, the file system in it is not, and only a check
    // reveals it.
    client
        .end_session(larger.session_id, &end_and_keep())
        .await?;
    let image = world
        .state_dir()
        .join("worker/workspaces")
        .join(first.workspace_id.to_string())
        .join("disk.img");
    fs_err::OpenOptions::new()
        .write(true)
        .open(&image)?
        .set_len(256 * MIB)?;
    fs_err::write(image.with_extension("growing"), "")?;
    let largest = client.create_session(&again(Some(256 * MIB))).await?;
    assert_eq!(
        output_of(
            &client,
            &largest,
            "cat note; dd if=/dev/zero of=big bs=1M count=160 2>/dev/null && echo room"
        )
        .await?,
        "precious\nroom\n"
    );
    Ok(())
}

#[tokio::test]
// invariant: fail-closed
async fn the_kernel_enforces_the_requested_limits() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    request.limits = Some(LimitsRequest {
        memory_bytes: Some(100 * MIB),
        cpus: Some(0.5),
        pids: Some(50),
        disk_bytes: Some(64 * MIB),
        nofile: Some(200),
    });
    let made = client.create_session(&request).await?;
    assert_eq!(made.unenforced, []);
    assert_eq!(output_of(&client, &made, "ulimit -n").await?, "200\n");
    Ok(())
}

/// The machine's memory, as the worker counts it.
fn machine_memory() -> Result<u64> {
    let text = fs_err::read_to_string("/proc/meminfo")?;
    let kilobytes = text.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    Ok(kilobytes.context("MemTotal")? * 1024)
}

/// A worker with this much memory for its sandboxes.
fn with_memory(bytes: u64) -> Result<Options> {
    Ok(Options::default().set(
        "reserved_memory_bytes",
        &(machine_memory()? - bytes).to_string(),
    ))
}

fn of_memory(bytes: u64) -> SessionCreate {
    SessionCreate {
        limits: Some(LimitsRequest {
            memory_bytes: Some(bytes),
            ..Default::default()
        }),
        ..session()
    }
}

#[tokio::test]
// invariant: node-memory
async fn a_sandbox_gets_at_most_the_memory_less_the_reserve_and_the_configured_processes()
-> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&with_memory(512 * MIB)?.set("max_pids", "100"))
        .await?;
    let client = worker.client()?;
    let most = client.create_session(&of_memory(512 * MIB)).await?;
    assert_eq!(
        (most.limits.memory_bytes, &most.unenforced[..]),
        (512 * MIB, &[][..])
    );
    let error = client
        .create_session(&of_memory(512 * MIB + 1))
        .await
        .expect_err("more than available");
    assert!(
        error.is(ErrorCode::LimitUnenforceable)
            && error
                .to_string()
                .contains(&format!("at most {} bytes of memory", 512 * MIB)),
        "{error}"
    );
    // Without a request, the session gets what is available.
    let modest = client
        .create_session(&SessionCreate {
            limits: None,
            ..session()
        })
        .await?;
    assert_eq!(
        (modest.limits.memory_bytes, modest.limits.pids),
        (512 * MIB, 100)
    );
    let pids = |pids| SessionCreate {
        limits: Some(LimitsRequest {
            memory_bytes: Some(64 * MIB),
            pids: Some(pids),
            ..Default::default()
        }),
        ..session()
    };
    client.create_session(&pids(100)).await?;
    let error = client
        .create_session(&pids(101))
        .await
        .expect_err("more than is configured");
    assert!(
        error.is(ErrorCode::LimitUnenforceable)
            && error
                .to_string()
                .contains("limits.pids: this node gives a sandbox at most 100 processes"),
        "{error}"
    );
    Ok(())
}

#[tokio::test]
// invariant: node-memory
async fn all_sandboxes_together_leave_the_machine_its_reserve() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&with_memory(256 * MIB)?).await?;
    let client = worker.client()?;
    let (one, two) = (
        client.create_session(&of_memory(250 * MIB)).await?,
        client.create_session(&of_memory(250 * MIB)).await?,
    );
    assert_eq!(
        (&one.unenforced[..], &two.unenforced[..]),
        (&[][..], &[][..])
    );
    let group = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"]
        .map(|tree| Path::new(tree).join(world.cgroup_parent()))
        .into_iter()
        .find(|path| path.is_dir());
    let group = group.context("no cgroup of all sandboxes")?;
    let limit = ["memory.limit_in_bytes", "memory.max"]
        .map(|name| group.join(name))
        .into_iter()
        .find(|path| path.is_file())
        .context("a limit")?;
    assert_eq!(
        fs_err::read_to_string(limit)?.trim(),
        (256 * MIB).to_string()
    );
    // Files in memory count. Each sandbox could hold these alone; together they exceed the total.
    let fill = "dd if=/dev/zero of=/tmp/big bs=1M count=120 2>/dev/null; head -c 100000000 \
                /dev/zero | tail -c 100000000 | wc -c";
    assert_eq!(output_of(&client, &one, fill).await?, "100000000\n");
    let squeezed = client.exec(two.session_id, &sh(fill)).await?;
    assert_ne!(squeezed.stdout, "100000000\n", "{squeezed:?}");
    // The first victim when the machine runs out of memory.
    assert_eq!(
        output_of(&client, &one, "cat /proc/self/oom_score_adj").await?,
        "500\n"
    );
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
async fn all_sandboxes_together_leave_the_machine_processes() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let made = client.create_session(&of_memory(64 * MIB)).await?;
    assert_eq!(made.unenforced, []);
    let group = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"]
        .map(|tree| Path::new(tree).join(world.cgroup_parent()))
        .into_iter()
        .find(|path| path.join("pids.max").is_file())
        .context("no cgroup of all sandboxes")?;
    let number = |path: &Path| -> Result<u64> {
        let text = fs_err::read_to_string(path)?;
        text.trim()
            .parse()
            .with_context(|| format!("{} contains {text:?}", path.display()))
    };
    let (limit, kernel) = (
        number(&group.join("pids.max"))?,
        number(Path::new("/proc/sys/kernel/pid_max"))?,
    );
    assert!(
        limit > 0 && limit <= kernel - kernel / 8,
        "{limit} of {kernel}"
    );
    assert!(
        number(&group.join("pids.current"))? > 0,
        "the sandbox does not count"
    );
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: disk
async fn a_disk_is_at_most_as_large_as_the_file_system_of_the_node() -> Result<()> {
    let world = World::new()?;
    small_disk(&world, 1_024 * MIB)?;
    let worker = world
        .worker(&Options::default().set("min_free_bytes", &(200 * MIB).to_string()))
        .await?;
    let client = worker.client()?;
    for beyond in [1_024 * MIB + 1, (1 << 44) - 4_096, 1 << 45] {
        let error = client
            .create_session(&with_disk(beyond))
            .await
            .expect_err("more than the file system has");
        assert!(
            error.is(ErrorCode::LimitUnenforceable)
                && error.to_string().contains(&format!(
                    "limits.disk_bytes: this node gives a sandbox at most {} bytes of disk",
                    1_024 * MIB
                )),
            "{error}"
        );
    }
    // Disks are sparse: together they may exceed the file system.
    for _ in 0..2 {
        client.create_session(&with_disk(1_024 * MIB)).await?;
    }
    let mut request = with_disk(0);
    request.limits = Some(LimitsRequest {
        memory_bytes: Some(256 * MIB),
        ..Default::default()
    });
    let modest = client.create_session(&request).await?;
    assert_eq!(modest.limits.disk_bytes, 1_024 * MIB);
    Ok(())
}

#[tokio::test]
// invariant: node-memory
async fn memory_is_promised_as_often_as_configured() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&with_memory(256 * MIB)?.set("memory_overcommit", "1.5"))
        .await?;
    let client = worker.client()?;
    let first = client.create_session(&of_memory(256 * MIB)).await?;
    client.create_session(&of_memory(128 * MIB)).await?;
    let error = client
        .create_session(&of_memory(16 * MIB))
        .await
        .expect_err("all memory is committed");
    assert!(
        error.is(ErrorCode::NoCapacity)
            && error
                .to_string()
                .contains(&format!("{} bytes, more than {}", 400 * MIB, 384 * MIB)),
        "{error}"
    );
    client
        .end_session(first.session_id, &end_and_keep())
        .await?;
    let second = client.create_session(&of_memory(256 * MIB)).await?;
    let error = client
        .resume_session(first.session_id)
        .await
        .expect_err("its memory is committed to others");
    assert!(error.is(ErrorCode::NoCapacity), "{error}");
    client
        .end_session(second.session_id, &SessionEnd::default())
        .await?;
    client.resume_session(first.session_id).await?;
    Ok(())
}

#[tokio::test]
// invariant: fail-closed
async fn an_unenforceable_limit_is_refused_unless_it_is_allowed_by_name() -> Result<()> {
    let world = World::new()?;
    // A host on which nothing can be mounted.
    let tools = world.directory().join("tools");
    fs_err::create_dir_all(&tools)?;
    fs_err::write(
        tools.join("mount"),
        "#!/bin/sh\necho 'mount: not on this host' >&2\nexit 32\n",
    )?;
    fs_err::set_permissions(tools.join("mount"), std::fs::Permissions::from_mode(0o755))?;
    let path = format!("{}:{}", tools.display(), std::env::var("PATH")?);
    let mut worker = world.worker(&Options::default().env("PATH", &path)).await?;
    let error = worker
        .client()?
        .create_session(&session())
        .await
        .expect_err("no disk");
    assert!(error.is(ErrorCode::LimitUnenforceable), "{error}");
    let message = error.to_string();
    assert!(
        message.contains("disk")
            && message.contains("worker.allow_unenforced = [\"disk\"]")
            && message.contains("not on this host"),
        "{message}"
    );
    assert_eq!(world.containers()?.len(), 0, "a sandbox was started");
    worker.shut_down().await?;

    let worker = world
        .worker(
            &Options::default()
                .env("PATH", &path)
                .set("allow_unenforced", "[\"disk\"]"),
        )
        .await?;
    let client = worker.client()?;
    let made = client.create_session(&session()).await?;
    assert_eq!(made.unenforced, [Unenforced::Disk]);
    assert_eq!(
        client.get_session(made.session_id).await?.unenforced,
        [Unenforced::Disk]
    );
    assert_eq!(output_of(&client, &made, "echo runs").await?, "runs\n");
    Ok(())
}

/// A separate disk of this size for the state directory, in memory.
fn small_disk(world: &World, bytes: u64) -> Result<std::path::PathBuf> {
    let state = world.state_dir();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
        .arg(&state)
        .status()?;
    ensure!(mounted.success(), "mounting a small disk failed");
    Ok(state)
}

fn free_space(directory: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(directory)?;
    Ok(stat.f_bavail * stat.f_frsize)
}

#[tokio::test]
// invariant: disk
async fn a_node_whose_disk_is_nearly_full_refuses_new_work_and_loses_nothing() -> Result<()> {
    let world = World::new()?;
    let state = small_disk(&world, 400 * MIB)?;
    let worker = world
        .worker(&Options::default().set("min_free_bytes", &(200 * MIB).to_string()))
        .await?;
    let client = worker.client()?;
    let made = client.create_session(&with_disk(64 * MIB)).await?;
    output_of(&client, &made, "echo precious > note").await?;

    let filler = state.join("filler");
    let fill_to = |left: u64| -> Result<()> {
        let file = fs_err::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&filler)?;
        let have = file.metadata()?.len();
        let more = free_space(&state)?
            .checked_sub(left)
            .context("less is free already")?;
        Ok(rustix::fs::fallocate(
            &file,
            rustix::fs::FallocateFlags::empty(),
            have,
            more,
        )?)
    };
    fill_to(100 * MIB)?;
    let error = client
        .create_session(&session())
        .await
        .expect_err("no room");
    assert!(
        error.is(ErrorCode::NoSpace) && error.to_string().contains("min_free_bytes"),
        "{error}"
    );
    assert!(format!("{:?}", client.readyz().await?).contains("min_free_bytes"));
    assert_eq!(
        output_of(&client, &made, "cat note; echo more > second; echo still").await?,
        "precious\nstill\n"
    );
    fill_to(20 * MIB)?;
    let error = client
        .exec(made.session_id, &sh("true"))
        .await
        .expect_err("no room for commands");
    assert!(error.is(ErrorCode::NoSpace), "{error}");
    let error = client
        .put_file(
            made.session_id,
            "more".as_ref(),
            "more",
            &PutOptions::default(),
        )
        .await
        .expect_err("nor for files");
    assert!(
        error.is(ErrorCode::NoSpace) && error.to_string().contains("min_free_bytes"),
        "{error}"
    );
    // Ending needs no space and frees some.
    fs_err::remove_file(&filler)?;
    assert_eq!(
        output_of(&client, &made, "cat note second").await?,
        "precious\nmore\n"
    );
    client.create_session(&with_disk(64 * MIB)).await?;
    Ok(())
}

#[tokio::test]
// invariant: disk
async fn sandboxes_that_fill_the_nodes_disk_are_stopped_before_it_is_full() -> Result<()> {
    let world = World::new()?;
    let state = small_disk(&world, 2_048 * MIB)?;
    let worker = world
        .worker(&Options::default().set("min_free_bytes", &(1_200 * MIB).to_string()))
        .await?;
    let client = worker.client()?;
    // Each as much as the node has.
    let (one, two) = (
        client.create_session(&with_disk(2_048 * MIB)).await?,
        client.create_session(&with_disk(2_048 * MIB)).await?,
    );
    let quiet = client.create_session(&with_disk(64 * MIB)).await?;
    let until_told = ExecRequest {
        background: true,
        timeout_ms: 0,
        ..sh("while :; do date >> log; sleep 0.1; done")
    };
    let until_told = client
        .exec_background(quiet.session_id, &until_told)
        .await?
        .exec_id;
    let full = eventually(
        "the node's disk is full",
        Duration::from_secs(240),
        async || Ok(free_space(&state)? == 0),
    );
    let fill = sh("echo precious > note; sync; dd if=/dev/zero of=big bs=1M");
    let filled = async {
        tokio::try_join!(
            client.exec(one.session_id, &fill),
            client.exec(two.session_id, &fill)
        )
    };
    let filled = tokio::select! {
        full = full => anyhow::bail!("the writers were not stopped: {full:?}"),
        filled = filled => filled?,
    };
    for exit in [filled.0.exit, filled.1.exit] {
        assert!(
            exit.no_space && exit.signal.as_deref() == Some("KILL") && !exit.lost,
            "{exit:?}"
        );
    }
    // Acknowledged writes are on the disk; files and sessions are unchanged.
    rustix::fs::sync();
    assert!(
        free_space(&state)? > 100 * MIB,
        "{} bytes are left",
        free_space(&state)?
    );
    assert_eq!(
        client.get_exec(quiet.session_id, until_told).await?.state,
        ExecState::Running
    );
    let metrics = reqwest::get(format!("{}/metrics", worker.url()?))
        .await?
        .text()
        .await?;
    assert!(metrics.contains("cynode_disk_stops_total"), "{metrics}");
    for made in [&one, &two] {
        // Deleting frees space, and work continues.
        client
            .delete_file(made.session_id, "big".as_ref(), false)
            .await?;
    }
    eventually(
        "there is space again",
        Duration::from_secs(60),
        async || Ok(free_space(&state)? > 1_300 * MIB),
    )
    .await?;
    for made in [&one, &two] {
        assert_eq!(
            output_of(
                &client,
                made,
                "cat note; dd if=/dev/zero of=some bs=1M count=50 2>/dev/null && sync && echo room"
            )
            .await?,
            "precious\nroom\n"
        );
    }
    assert_eq!(
        client.get_exec(quiet.session_id, until_told).await?.state,
        ExecState::Running
    );
    Ok(())
}

#[tokio::test]
async fn preallocated_space_counts_before_it_is_written() -> Result<()> {
    let world = World::new()?;
    let state = small_disk(&world, 2_048 * MIB)?;
    let worker = world
        .worker(&Options::default().set("min_free_bytes", &(1_200 * MIB).to_string()))
        .await?;
    let client = worker.client()?;
    let made = client.create_session(&with_disk(2_048 * MIB)).await?;
    // More than is left above the threshold, written in one go.
    let fill = sh("fallocate -l 1600M big && dd if=/dev/zero of=big bs=1M count=1600 conv=notrunc");
    let filled = client.exec(made.session_id, &fill).await?;
    assert!(
        filled.exit.no_space && filled.exit.signal.as_deref() == Some("KILL"),
        "{filled:?}"
    );
    rustix::fs::sync();
    assert!(
        free_space(&state)? > 100 * MIB,
        "{} bytes are left",
        free_space(&state)?
    );
    client
        .delete_file(made.session_id, "big".as_ref(), false)
        .await?;
    assert_eq!(
        output_of(&client, &made, "echo still > here; cat here").await?,
        "still\n"
    );
    Ok(())
}

#[tokio::test]
// invariant: disk
async fn concurrent_requests_for_disks_of_many_sizes_succeed() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut creating = tokio::task::JoinSet::new();
    // More sizes than are kept ready.
    for number in 0..20_u64 {
        let client = client.clone();
        creating.spawn(async move {
            let bytes = (32 + number) * MIB;
            let made = client.create_session(&with_disk(bytes)).await?;
            ensure!(made.limits.disk_bytes == bytes, "{made:?}");
            let blocks = output_of(
                &client,
                &made,
                "df -k /workspace | tail -n 1 | tr -s ' ' | cut -d ' ' -f 2",
            )
            .await?;
            let size = blocks.trim().parse::<u64>()? << 10;
            // Excludes the file system's own overhead.
            ensure!(size <= bytes && size > bytes * 3 / 4, "{size} of {bytes}");
            Ok(())
        });
    }
    for made in creating.join_all().await {
        made?;
    }
    let kept = fs_err::read_dir(world.state_dir().join("worker/disks"))?.count();
    assert!(kept <= 8, "{kept} templates are kept");
    worker.shut_down().await?;
    world.assert_clean().await
}
