//! The properties of a sandbox on every runtime: sessions, commands, files and isolation are the
//! same.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, ExecRequest, ExecState, JobState, SessionEnd, SessionState, Unenforced,
    WorkspaceDisposal,
};
use cynode_client::{Pty, PtyMessage, PtyOpen, PutOptions};
use cynode_tests::{
    Engine, HOSTILE, Options, World, eventually, exec, job, on_every_runtime, session, sh,
};

on_every_runtime!(
    a_session_runs_commands_keeps_files_and_ends,
    a_session_survives_the_death_of_the_worker,
    a_sandbox_sees_nothing_of_the_host,
    the_config_of_an_image_is_ignored,
    a_terminal_opens_and_takes_input,
    unenforced_limits_are_reported,
    a_job_runs_and_its_result_waits,
);

// proves: ISC-07
// part of: CYNAI.SANDBX.RuntimeContractBaseline
async fn a_session_runs_commands_keeps_files_and_ends(world: World) -> Result<()> {
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let request = session();
    let made = client.create_session(&request).await?;
    let id = made.session_id;
    let result = client
        .exec(
            id,
            &sh("id -u; id -g; pwd; echo err >&2; echo kept > file; exit 4"),
        )
        .await?;
    assert_eq!(
        (
            result.stdout.as_str(),
            result.stderr.as_str(),
            result.exit.exit_code
        ),
        ("1000\n1000\n/workspace\n", "err\n", Some(4))
    );
    client
        .put_file(
            id,
            Path::new("sub/dir/data"),
            "written from outside",
            &PutOptions::default(),
        )
        .await?;
    assert_eq!(
        client
            .exec(id, &exec(["cat", "sub/dir/data"]))
            .await?
            .stdout,
        "written from outside"
    );
    assert_eq!(
        client
            .get_file(id, Path::new("file"))
            .await?
            .chunk()
            .await?
            .as_deref(),
        Some(b"kept\n".as_slice())
    );

    // A workspace that is kept and mounted again has the same files and the same owner.
    client
        .end_session(
            id,
            &SessionEnd {
                workspace: Some(WorkspaceDisposal::Keep),
                ..Default::default()
            },
        )
        .await?;
    ensure!(world.containers()?.is_empty(), "a container is left");
    let mut again = session();
    again.task_id = request.task_id;
    again.workspace_ref = Some(cynode_api::WorkspaceRef::Workspace(made.workspace_id));
    let id = client.create_session(&again).await?.session_id;
    assert_eq!(
        client
            .exec(id, &sh("cat file; echo more >> file; cat file"))
            .await?
            .stdout,
        "kept\nkept\nmore\n"
    );
    client.end_session(id, &SessionEnd::default()).await?;
    let gone = client
        .exec(id, &sh("true"))
        .await
        .expect_err("the session has ended");
    assert!(gone.is(ErrorCode::SessionEnded), "{gone}");
    eventually(
        "the workspace is gone",
        Duration::from_secs(30),
        async || Ok(fs_err::read_dir(world.state_dir().join("worker/workspaces"))?.count() == 0),
    )
    .await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

async fn a_session_survives_the_death_of_the_worker(world: World) -> Result<()> {
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let (first, second) = (
        client.create_session(&session()).await?.session_id,
        client.create_session(&session()).await?.session_id,
    );
    let running = client
        .exec_background(
            first,
            &ExecRequest {
                background: true,
                timeout_ms: 0,
                ..sh("echo begun; exec sleep 999")
            },
        )
        .await?
        .exec_id;
    client.exec(second, &sh("echo kept > file")).await?;
    worker.kill()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    assert_eq!(
        client.get_exec(first, running).await?.state,
        ExecState::Running
    );
    assert_eq!(
        client.exec(first, &sh("echo alive")).await?.stdout,
        "alive\n"
    );
    assert_eq!(
        client.exec(second, &exec(["cat", "file"])).await?.stdout,
        "kept\n"
    );
    assert_eq!(world.containers()?.len(), 2);
    client.end_session(first, &SessionEnd::default()).await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

// invariant: jobs
async fn a_job_runs_and_its_result_waits(world: World) -> Result<()> {
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let request = job("echo $CYNODE_JOB_ID; id -u; exec sleep 2; exit 9");
    let waiting = job("echo begun; until [ -e go ]; do sleep 0.1; done");
    let done = client.run_job(&request).await?;
    assert_eq!(
        (done.state, done.exit_code, done.output.stdout),
        (
            JobState::Completed,
            Some(0),
            format!("{}\n1000\n", request.job_id)
        )
    );
    client.run_job_async(&waiting).await?;
    eventually("the second job runs", Duration::from_secs(60), async || {
        Ok(client.job(waiting.job_id).await?.state == JobState::InProgress)
    })
    .await?;
    worker.kill()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    assert_eq!(client.run_job(&request).await?.state, JobState::Completed);
    let stopped = client.stop_job(waiting.task_id, waiting.job_id).await?;
    assert_eq!(
        (stopped.state, stopped.output.stdout.as_str()),
        (JobState::Canceled, "begun\n")
    );
    client.ack_job(request.job_id).await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

async fn a_sandbox_sees_nothing_of_the_host(world: World) -> Result<()> {
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    let run =
        async |script: &str| -> Result<String> { Ok(client.exec(id, &sh(script)).await?.stdout) };

    assert_eq!(run("ls /sys/class/net").await?, "lo\n");
    assert_eq!(
        run("grep '^nameserver' /etc/resolv.conf").await?,
        "",
        "a resolver of the host is visible inside"
    );
    assert_eq!(run("hostname").await?, "sandbox\n");
    let host = fs_err::read_to_string("/proc/sys/kernel/hostname")?;
    let identity = run("cat /etc/hosts /etc/hostname; env").await?;
    assert!(
        host.trim().len() < 4 || !identity.contains(host.trim()),
        "the host's name is visible inside: {identity}"
    );

    let status =
        run("grep -E '^(Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp):' /proc/self/status").await?;
    for line in status.lines() {
        let (name, value) = line.split_once(":\t").with_context(|| line.to_owned())?;
        let expected = match name {
            "NoNewPrivs" => "1",
            "Seccomp" => "2",
            _ => "0000000000000000",
        };
        assert_eq!(value.trim(), expected, "{name}");
    }
    assert_eq!(status.lines().count(), 7, "{status}");
    assert_eq!(
        run("touch /x /etc/x /usr/x 2>/dev/null; ls /x /etc/x /usr/x 2>/dev/null").await?,
        "",
        "the root is writable"
    );
    assert_eq!(run("ulimit -n; ulimit -c").await?, "1024\n0\n");
    let sizes = run("for place in /tmp /run /dev/shm; do stat -f -c '%b %S' $place; done").await?;
    for (line, most) in sizes.lines().zip([128_u64 << 20, 16 << 20, 64 << 20]) {
        let (blocks, size) = line.split_once(' ').context("two numbers")?;
        let bytes: u64 = blocks.parse::<u64>()? * size.parse::<u64>()?;
        assert_eq!(bytes, most, "{sizes}");
    }
    assert_eq!(
        run("cp /bin/busybox /tmp/true && /tmp/true && echo runs").await?,
        "runs\n",
        "a program could not be built and run in /tmp"
    );

    // The workspace's files belong to no other user of the host.
    let outside = fs_err::read_dir(world.state_dir().join("worker/workspaces"))?
        .next()
        .context("a workspace")??
        .path()
        .join("data/workspace");
    let owner = std::os::unix::fs::MetadataExt::uid(&fs_err::metadata(outside)?);
    assert!(owner >= 100_000, "owned by {owner}");
    Ok(())
}

async fn the_config_of_an_image_is_ignored(world: World) -> Result<()> {
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    HOSTILE.clone_into(&mut request.image_ref);
    let id = client.create_session(&request).await?.session_id;
    let seen = client
        .exec(
            id,
            &exec([
                "/bin/sh",
                "-c",
                "id -u; pwd; echo \
             $LD_PRELOAD$LD_LIBRARY_PATH$BASH_ENV$ENV; tr '\\0' '\\n' < /proc/1/environ; ls /tmp",
            ]),
        )
        .await?;
    // Process 1 can't be inspected, so its environment adds nothing.
    assert_eq!(seen.stdout, "1000\n/workspace\n\n", "{seen:?}");
    // The image's volumes would be writable without a limit.
    let mounts = client
        .exec(
            id,
            &sh("cut -d' ' -f2 /proc/mounts | grep -E '^/(workspace|run/cynode)$'"),
        )
        .await?
        .stdout;
    assert_eq!(mounts.lines().count(), 2, "{mounts}");
    assert_eq!(
        client
            .exec(id, &sh("touch /run/cynode/x 2>/dev/null || echo closed"))
            .await?
            .stdout,
        "closed\n"
    );
    Ok(())
}

async fn a_terminal_opens_and_takes_input(world: World) -> Result<()> {
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    request.pty_allowed = Some(true);
    let id = client.create_session(&request).await?.session_id;
    let mut terminal = client
        .open_pty(
            id,
            &PtyOpen {
                cols: 101,
                rows: 37,
                argv: Vec::new(),
            },
        )
        .await?;
    let (mut seen, mut code) = (String::new(), None);
    // Reads until a word appears, or to the end if none is given.
    let mut until = async |terminal: &mut Pty, word: Option<&str>| -> Result<String> {
        seen.clear();
        while word.is_none_or(|word| !seen.contains(word)) {
            match tokio::time::timeout(Duration::from_secs(60), terminal.next())
                .await
                .with_context(|| seen.clone())??
            {
                Some(PtyMessage::Data(data)) => seen.push_str(&String::from_utf8_lossy(&data)),
                Some(PtyMessage::Exit { exit_code, .. }) => code = exit_code,
                Some(other) => ensure!(matches!(other, PtyMessage::Ready), "{other:?}"),
                None => break,
            }
        }
        Ok(seen.clone())
    };
    // A runtime may set the size a moment after the start. The quotes keep the echo of the input
    // from matching.
    let sized = |size: &str| {
        format!(
            "i=0; while [ \"$(stty size)\" != '{size}' ] && [ $i -lt 2000 ]; do i=$((i+1)); done; \
             echo size''d: $(stty size).\n"
        )
    };
    terminal.write(sized("37 101")).await?;
    until(&mut terminal, Some("sized: 37 101.")).await?;
    terminal.resize(90, 20).await?;
    terminal.write(sized("20 90")).await?;
    until(&mut terminal, Some("sized: 20 90.")).await?;
    // Job control: the keyboard stops and interrupts the foreground job.
    for (key, answer) in [("\u{1a}", "Stopped"), ("\u{3}", "^C")] {
        terminal
            .write("sh -c 'echo be''gun; exec sleep 600'\n")
            .await?;
        until(&mut terminal, Some("begun")).await?;
        terminal.write(key).await?;
        until(&mut terminal, Some(answer)).await?;
    }
    // A shell with stopped jobs refuses the first exit with a warning. (Waiting for a stopped job
    // could block for ever.)
    terminal
        .write("echo in''terrupted: $?; jobs; kill -KILL %1; id -u; exit 6; exit 6\n")
        .await?;
    let seen = until(&mut terminal, None).await?;
    assert!(
        seen.contains("interrupted: 130") && seen.contains("Stopped") && seen.contains("1000"),
        "{seen}"
    );
    assert_eq!(code, Some(6), "{seen}");
    Ok(())
}

async fn unenforced_limits_are_reported(world: World) -> Result<()> {
    let worker = world.worker(&Options::default()).await?;
    let made = worker.client()?.create_session(&session()).await?;
    let shares = made.unenforced.contains(&Unenforced::IdRange);
    assert_eq!(
        (shares, made.unenforced.contains(&Unenforced::Userns)),
        (world.engine() == Engine::Docker, false),
        "{:?}",
        made.unenforced
    );
    assert_eq!(made.state, SessionState::Running);
    Ok(())
}
