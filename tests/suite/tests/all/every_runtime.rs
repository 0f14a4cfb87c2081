//! What a sandbox is, on every runtime: the same session, the same commands and files, the same walls.

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
    an_images_config_decides_nothing,
    a_terminal_opens_and_takes_input,
    what_is_unenforced_is_said,
    a_job_runs_and_its_result_waits,
);

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

    // Kept at its end and mounted again, it is the same and still the sandbox's own.
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
        .expect_err("it has ended");
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
    eventually("the second runs", Duration::from_secs(60), async || {
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
    let look =
        async |script: &str| -> Result<String> { Ok(client.exec(id, &sh(script)).await?.stdout) };

    assert_eq!(look("ls /sys/class/net").await?, "lo\n");
    assert_eq!(
        look("grep '^nameserver' /etc/resolv.conf").await?,
        "",
        "no resolver of the host"
    );
    assert_eq!(look("hostname").await?, "sandbox\n");
    let host = fs_err::read_to_string("/proc/sys/kernel/hostname")?;
    let told = look("cat /etc/hosts /etc/hostname; env").await?;
    assert!(
        host.trim().len() < 4 || !told.contains(host.trim()),
        "the host's name is inside: {told}"
    );

    let status =
        look("grep -E '^(Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp):' /proc/self/status").await?;
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
        look("touch /x /etc/x /usr/x 2>/dev/null; ls /x /etc/x /usr/x 2>/dev/null").await?,
        "",
        "the root is read-only"
    );
    assert_eq!(look("ulimit -n; ulimit -c").await?, "1024\n0\n");
    let sizes = look("for place in /tmp /run /dev/shm; do stat -f -c '%b %S' $place; done").await?;
    for (line, most) in sizes.lines().zip([128_u64 << 20, 16 << 20, 64 << 20]) {
        let (blocks, size) = line.split_once(' ').context("two numbers")?;
        let bytes: u64 = blocks.parse::<u64>()? * size.parse::<u64>()?;
        assert_eq!(bytes, most, "{sizes}");
    }
    assert_eq!(
        look("cp /bin/busybox /tmp/true && /tmp/true && echo runs").await?,
        "runs\n",
        "programs may be built and run in /tmp"
    );

    // Its files belong to nobody else on the host.
    let outside = fs_err::read_dir(world.state_dir().join("worker/workspaces"))?
        .next()
        .context("a workspace")??
        .path()
        .join("data/workspace");
    let owner = std::os::unix::fs::MetadataExt::uid(&fs_err::metadata(outside)?);
    assert!(owner >= 100_000, "owned by {owner}");
    Ok(())
}

async fn an_images_config_decides_nothing(world: World) -> Result<()> {
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    HOSTILE.clone_into(&mut request.image_ref);
    let id = client.create_session(&request).await?.session_id;
    let seen = client
        .exec(id, &exec(["/bin/sh", "-c", "id -u; pwd; echo $LD_PRELOAD$LD_LIBRARY_PATH$BASH_ENV$ENV; tr '\\0' '\\n' < /proc/1/environ; ls /tmp"]))
        .await?;
    // Process 1 is not to be looked into, so its environment adds nothing.
    assert_eq!(seen.stdout, "1000\n/workspace\n\n", "{seen:?}");
    // Its volumes would be writable places without a limit.
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
    let (mut said, mut code) = (String::new(), None);
    // All that is said until a word comes, or to the end.
    let mut until = async |terminal: &mut Pty, word: Option<&str>| -> Result<String> {
        said.clear();
        while word.is_none_or(|word| !said.contains(word)) {
            match tokio::time::timeout(Duration::from_secs(60), terminal.next())
                .await
                .with_context(|| said.clone())??
            {
                Some(PtyMessage::Data(data)) => said.push_str(&String::from_utf8_lossy(&data)),
                Some(PtyMessage::Exit { exit_code, .. }) => code = exit_code,
                Some(other) => ensure!(matches!(other, PtyMessage::Ready), "{other:?}"),
                None => break,
            }
        }
        Ok(said.clone())
    };
    // A runtime may give it its size a moment after it has begun. Words are quoted so that the echo of what is typed is not them.
    let sized = |size: &str| {
        format!(
            "i=0; while [ \"$(stty size)\" != '{size}' ] && [ $i -lt 2000 ]; do i=$((i+1)); done; echo size''d: $(stty size).\n"
        )
    };
    terminal.write(sized("37 101")).await?;
    until(&mut terminal, Some("sized: 37 101.")).await?;
    terminal.resize(90, 20).await?;
    terminal.write(sized("20 90")).await?;
    until(&mut terminal, Some("sized: 20 90.")).await?;
    // Job control: what is in front is stopped and interrupted from the keyboard.
    for (key, answer) in [("\u{1a}", "Stopped"), ("\u{3}", "^C")] {
        terminal
            .write("sh -c 'echo be''gun; exec sleep 600'\n")
            .await?;
        until(&mut terminal, Some("begun")).await?;
        terminal.write(key).await?;
        until(&mut terminal, Some(answer)).await?;
    }
    // A shell that still thinks that a job of its is stopped only warns the first time. (To wait for a job that was stopped can take for ever.)
    terminal
        .write("echo in''terrupted: $?; jobs; kill -KILL %1; id -u; exit 6; exit 6\n")
        .await?;
    let said = until(&mut terminal, None).await?;
    assert!(
        said.contains("interrupted: 130") && said.contains("Stopped") && said.contains("1000"),
        "{said}"
    );
    assert_eq!(code, Some(6), "{said}");
    Ok(())
}

async fn what_is_unenforced_is_said(world: World) -> Result<()> {
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
