//! Commands, end to end.

use std::time::Duration;

use anyhow::{Context as _, Result};
use cynode_api::{
    Base64Bytes, ErrorCode, ExecId, ExecRequest, ExecState, SessionEnd, SessionId, SignalName,
    SignalScope, Stream,
};
use cynode_client::{Error, ExecEvent, OutputQuery, SessionClient};
use cynode_tests::{Options, World, eventually, exec, session, sh};
use sha2::{Digest as _, Sha256};

async fn one_session(
    world: &World,
) -> Result<(cynode_tests::RunningWorker, SessionClient, SessionId)> {
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    Ok((worker, client, id))
}

fn background(script: &str) -> ExecRequest {
    ExecRequest {
        background: true,
        timeout_ms: 0,
        ..sh(script)
    }
}

/// Lists the command lines of all processes in the sandbox except this one.
async fn processes_inside(client: &SessionClient, id: SessionId) -> Result<String> {
    Ok(client
        .exec(
            id,
            &sh(
                "for d in /proc/[0-9]*; do tr '\\0' ' ' < $d/cmdline 2>/dev/null; \
                 echo; done | grep -v 'for d in'",
            ),
        )
        .await?
        .stdout)
}

// part of: CYNAI.SANDBX.RuntimeContractBaseline, ISC-02
#[tokio::test]
// invariant: bounded
async fn streams_are_separate_and_the_middle_of_long_output_is_cut() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let mut request =
        sh("i=0; while [ $i -lt 1000 ]; do echo line-$i; i=$((i+1)); done; echo problem >&2");
    request.max_output_bytes = Some(100);
    let result = client.exec(id, &request).await?;
    assert!(result.truncated.stdout && !result.truncated.stderr);
    assert_eq!(result.stdout.len(), 100);
    assert!(
        result.stdout.starts_with("line-0\nline-1\n")
            && result.stdout.ends_with("line-998\nline-999\n"),
        "{}",
        result.stdout
    );
    assert_eq!(
        (
            result.stderr.as_str(),
            result.exit.bytes.stdout,
            result.exit.bytes.stderr
        ),
        ("problem\n", 8_890, 8)
    );

    let binary = client
        .exec(id, &sh("printf '\\377\\000ok'; echo text >&2"))
        .await?;
    assert_eq!(binary.encoding, "base64");
    assert_eq!(
        serde_json::from_value::<Base64Bytes>(binary.stdout.into())?.0,
        b"\xff\x00ok"
    );
    assert_eq!(
        serde_json::from_value::<Base64Bytes>(binary.stderr.into())?.0,
        b"text\n"
    );
    Ok(())
}

#[tokio::test]
async fn a_command_that_can_not_start_reports_its_errno() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    client
        .exec(
            id,
            &sh("echo '#!/nonexistent/interpreter' > script; chmod +x script; echo x > plain"),
        )
        .await?;
    let cases = [
        (exec(["no-such-command"]), "ENOENT"),
        (exec(["/workspace"]), "EACCES"),
        (exec(["/workspace/plain"]), "EACCES"),
        (exec(["/workspace/script"]), "ENOENT"),
        (
            ExecRequest {
                cwd: Some("/nowhere".into()),
                ..exec(["true"])
            },
            "ENOENT",
        ),
        (
            ExecRequest {
                cwd: Some("/workspace/plain".into()),
                ..exec(["true"])
            },
            "ENOTDIR",
        ),
    ];
    for (request, errno) in cases {
        match client.exec(id, &request).await {
            Err(Error::Problem(problem)) => {
                assert!(
                    problem.is(ErrorCode::ExecFailed) && problem.status == 422,
                    "{problem:?}"
                );
                assert_eq!(problem.extensions["errno"], errno, "{:?}", request.argv);
            }
            other => panic!("{:?}: {other:?}", request.argv),
        }
    }
    assert!(
        client
            .list_execs(id)
            .await?
            .items
            .iter()
            .all(|exec| exec.argv[0] == "/bin/sh"),
        "a command that never ran is listed"
    );
    Ok(())
}

// part of: ISC-24
#[tokio::test]
// invariant: deadlines
async fn a_deadline_ends_everything_that_the_command_started() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    // Ignores TERM, daemonizes twice, keeps the pipes open; the process of another exec must
    // survive.
    client
        .exec_background(id, &background("exec sleep 4321"))
        .await?;
    let mut stubborn = sh(
        "trap '' TERM HUP INT; echo begun; (trap '' TERM; setsid sh -c '(trap \"\" TERM; exec \
         sleep 1234) & exec sleep 1234' &) ; while :; do sleep 1234; done",
    );
    stubborn.timeout_ms = 700;
    let result = client.exec(id, &stubborn).await?;
    assert!(
        result.exit.timed_out && !result.exit.oom_killed,
        "{result:?}"
    );
    assert_eq!(
        (
            result.stdout.as_str(),
            result.exit.signal.as_deref(),
            result.exit.exit_code
        ),
        ("begun\n", Some("KILL"), None)
    );
    let left = processes_inside(&client, id).await?;
    assert!(!left.contains("1234") && left.contains("4321"), "{left}");

    let mut polite = sh("trap 'echo bye; exit 5' TERM; while :; do sleep 0.05; done");
    polite.timeout_ms = 300;
    let result = client.exec(id, &polite).await?;
    assert_eq!(
        (
            result.exit.timed_out,
            result.exit.exit_code,
            result.stdout.as_str()
        ),
        (true, Some(5), "bye\n")
    );
    Ok(())
}

#[tokio::test]
async fn a_prompt_that_waits_for_input_reads_its_end_at_once() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let result = client
        .exec(id, &sh("read answer; echo \"got:$answer:$?\""))
        .await?;
    assert_eq!(result.stdout, "got::1\n");
    let mut request = sh("cat; echo; wc -c < /dev/null");
    request.stdin = Some("from the request".into());
    assert_eq!(
        client.exec(id, &request).await?.stdout,
        "from the request\n0\n"
    );
    Ok(())
}

#[tokio::test]
async fn standard_input_can_be_fed_while_the_command_runs() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let request = ExecRequest {
        stdin_open: true,
        background: true,
        ..exec(["sha256sum"])
    };
    let exec_id = client.exec_background(id, &request).await?.exec_id;
    let mut hash = Sha256::new();
    for piece in 0..5_u8 {
        let data = vec![piece; 700_000];
        hash.update(&data);
        client.write_stdin(id, exec_id, data, false).await?;
    }
    client.write_stdin(id, exec_id, Vec::new(), true).await?;
    let page = client
        .exec_output(
            id,
            exec_id,
            &OutputQuery {
                wait_ms: Some(20_000),
                ..Default::default()
            },
        )
        .await?;
    let expected = hex::encode(hash.finalize());
    assert!(
        page.chunks[0]
            .data
            .as_deref()
            .unwrap_or_default()
            .starts_with(&expected),
        "{page:?}"
    );
    eventually("the command exits", Duration::from_secs(10), async || {
        Ok(client.get_exec(id, exec_id).await?.state == ExecState::Exited)
    })
    .await?;
    let error = client
        .write_stdin(id, exec_id, b"late".to_vec(), false)
        .await
        .expect_err("ended");
    assert!(error.is(ErrorCode::StdinClosed), "{error}");
    Ok(())
}

#[tokio::test]
async fn input_that_waits_for_a_command_ends_with_its_session() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let request = ExecRequest {
        stdin_open: true,
        background: true,
        timeout_ms: 0,
        ..exec(["sleep", "1000"])
    };
    let exec_id = client.exec_background(id, &request).await?.exec_id;
    // As much as the pipe holds; the rest blocks.
    client
        .write_stdin(id, exec_id, vec![0; 65_536], false)
        .await?;
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            tokio::spawn({
                let client = client.clone();
                async move {
                    client
                        .write_stdin(id, exec_id, vec![0; 300_000], false)
                        .await
                }
            })
        })
        .collect();
    // A few responses from the same worker show that those calls have arrived.
    for _ in 0..20 {
        client.get_exec(id, exec_id).await?;
    }
    client.end_session(id, &SessionEnd::default()).await?;
    for call in waiting {
        let error = call.await?.expect_err("the input was not read");
        assert!(error.is(ErrorCode::SessionEnded), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn few_open_files_suffice_for_commands_and_too_few_are_reported() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    request.limits = Some(cynode_api::LimitsRequest {
        nofile: Some(64),
        ..request.limits.unwrap_or_default()
    });
    let id = client.create_session(&request).await?.session_id;
    let mut fed = sh("ulimit -n; cat");
    fed.stdin = Some("fed".into());
    assert_eq!(client.exec(id, &fed).await?.stdout, "64\nfed");

    let mut running = Vec::new();
    let refused = loop {
        match client
            .exec_background(id, &background("exec sleep 4321"))
            .await
        {
            Ok(accepted) => running.push(accepted.exec_id),
            Err(Error::Problem(problem)) => break problem,
            Err(error) => return Err(error.into()),
        }
        assert!(
            running.len() < 64,
            "the agent ran more execs than its 64 files allow"
        );
    };
    assert!(
        refused.is(ErrorCode::ExecFailed)
            && refused.extensions["errno"] == "EMFILE"
            && refused.detail.contains("nofile"),
        "{refused:?}"
    );
    assert!(running.len() > 4, "{running:?}");
    client
        .signal_exec(id, running[0], SignalName::KILL, SignalScope::Tree)
        .await?;
    client
        .signal_exec(id, running[1], SignalName::KILL, SignalScope::Tree)
        .await?;
    eventually(
        "there is capacity again",
        Duration::from_secs(20),
        async || Ok(client.exec(id, &exec(["true"])).await.is_ok()),
    )
    .await
}

#[tokio::test]
async fn an_exec_returns_at_its_own_end_and_background_children_live_on() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let result = client
        .exec(id, &sh("echo first; (sleep 3456; echo never) & exit 4"))
        .await?;
    assert_eq!(
        (result.exit.exit_code, result.stdout.as_str()),
        (Some(4), "first\n")
    );
    assert!(processes_inside(&client, id).await?.contains("3456"));
    client
        .signal_exec(id, result.exec_id, SignalName::KILL, SignalScope::Tree)
        .await?;
    eventually("the process is gone", Duration::from_secs(10), async || {
        Ok(!processes_inside(&client, id).await?.contains("3456"))
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn signals_reach_the_group_the_tree_or_everything() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let exec_id = client
        .exec_background(
            id,
            &background("trap 'echo hup; exit 9' HUP; echo ready; while :; do sleep 0.05; done"),
        )
        .await?
        .exec_id;
    let ready = async |exec_id: ExecId| -> Result<()> {
        let page = client
            .exec_output(
                id,
                exec_id,
                &OutputQuery {
                    wait_ms: Some(20_000),
                    ..Default::default()
                },
            )
            .await?;
        assert_eq!(page.chunks[0].data.as_deref(), Some("ready\n"));
        Ok(())
    };
    ready(exec_id).await?;
    client
        .signal_exec(
            id,
            exec_id,
            "HUP".parse().map_err(anyhow::Error::msg)?,
            SignalScope::Group,
        )
        .await?;
    eventually("the command exits", Duration::from_secs(10), async || {
        Ok(client.get_exec(id, exec_id).await?.state == ExecState::Exited)
    })
    .await?;
    assert_eq!(
        client
            .get_exec(id, exec_id)
            .await?
            .exit
            .and_then(|exit| exit.exit_code),
        Some(9)
    );
    assert!(
        client
            .signal_exec(id, exec_id, SignalName::TERM, SignalScope::Group)
            .await
            .expect_err("ended")
            .is(ErrorCode::ExecEnded)
    );

    let one = client
        .exec_background(id, &background("echo ready; exec sleep 5001"))
        .await?
        .exec_id;
    let two = client
        .exec_background(id, &background("setsid sleep 5002 & echo ready; wait"))
        .await?
        .exec_id;
    ready(one).await?;
    ready(two).await?;
    client.signal_session(id, SignalName::KILL).await?;
    for exec_id in [one, two] {
        eventually("both commands end", Duration::from_secs(10), async || {
            Ok(client.get_exec(id, exec_id).await?.state != ExecState::Running)
        })
        .await?;
        let exit = client
            .get_exec(id, exec_id)
            .await?
            .exit
            .context("an exit")?;
        assert_eq!((exit.signal.as_deref(), exit.lost), (Some("KILL"), false));
    }
    let left = processes_inside(&client, id).await?;
    assert!(!left.contains("500"), "{left}");
    Ok(())
}

#[tokio::test]
// invariant: deadlines
async fn hostile_code_that_kills_its_supervisor_leaves_nothing_behind() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let result = client
        .exec(
            id,
            &sh("(setsid sleep 6789 &); sleep 0.3; kill -9 $PPID; sleep 6789"),
        )
        .await?;
    assert!(
        result.exit.lost && result.exit.exit_code.is_none(),
        "{result:?}"
    );
    let left = processes_inside(&client, id).await?;
    assert!(!left.contains("6789"), "{left}");
    let stopped = client
        .exec(
            id,
            &ExecRequest {
                timeout_ms: 900,
                ..sh("sleep 0.3; kill -STOP $PPID; sleep 6789")
            },
        )
        .await?;
    assert!(stopped.exit.timed_out);
    assert!(!processes_inside(&client, id).await?.contains("6789"));
    // A response arrives even in the moment before the start is reported: lost, timed out or
    // failed.
    for script in ["kill -9 $PPID; sleep 6789", "kill -STOP $PPID; sleep 6789"] {
        match client
            .exec(
                id,
                &ExecRequest {
                    timeout_ms: 500,
                    ..sh(script)
                },
            )
            .await
        {
            Ok(result) => assert!(result.exit.lost || result.exit.timed_out, "{result:?}"),
            Err(error) => assert!(error.is(ErrorCode::ExecFailed), "{error}"),
        }
        assert!(!processes_inside(&client, id).await?.contains("6789"));
    }
    Ok(())
}

#[tokio::test]
// invariant: deadlines
async fn a_full_process_table_is_reported_and_cleared_without_a_fork() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    request.limits.get_or_insert_default().pids = Some(24);
    let id = client.create_session(&request).await?.session_id;
    let mut started = 0;
    let error = loop {
        match client
            .exec_background(id, &background("exec sleep 777"))
            .await
        {
            Ok(_) => started += 1,
            Err(error) => break error,
        }
        assert!(started < 24, "more processes started than the limit allows");
    };
    assert!(error.is(ErrorCode::PidsExhausted), "{error}");
    client.signal_session(id, SignalName::KILL).await?;
    eventually(
        "there is capacity again",
        Duration::from_secs(20),
        async || Ok(client.exec(id, &exec(["true"])).await.is_ok()),
    )
    .await
}

#[tokio::test]
async fn memory_beyond_the_limit_kills_the_command_and_not_the_sandbox() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut request = session();
    request.limits.get_or_insert_default().memory_bytes = Some(48 << 20);
    let id = client.create_session(&request).await?.session_id;
    let result = client
        .exec(id, &exec(["tail", "-c", "200000000", "/dev/zero"]))
        .await?;
    assert!(result.exit.oom_killed, "{result:?}");
    assert_eq!(result.exit.signal.as_deref(), Some("KILL"));
    assert_eq!(client.exec(id, &sh("echo alive")).await?.stdout, "alive\n");
    Ok(())
}

// part of: REQ-SANDBX-0105, ISC-25
#[tokio::test]
async fn output_is_read_in_pages_by_tail_and_as_a_stream_during_and_after_the_run() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let request = ExecRequest {
        background: true,
        stdin_open: true,
        ..sh("echo one; read x; echo two >&2; read x; echo three")
    };
    let exec_id = client.exec_background(id, &request).await?.exec_id;
    let page = client
        .exec_output(
            id,
            exec_id,
            &OutputQuery {
                wait_ms: Some(20_000),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(
        (
            page.chunks.len(),
            page.chunks[0].seq,
            page.next_seq,
            page.exit.is_none()
        ),
        (1, 1, 1, true)
    );
    let nothing = client
        .exec_output(
            id,
            exec_id,
            &OutputQuery {
                after_seq: Some(1),
                wait_ms: Some(50),
                ..Default::default()
            },
        )
        .await?;
    assert!(nothing.chunks.is_empty() && nothing.next_seq == 1);
    client
        .write_stdin(id, exec_id, b"\n\n".to_vec(), true)
        .await?;
    let mut events = client.exec_output_stream(id, exec_id, 0).await?;
    let (mut text, mut exit) = (Vec::new(), None);
    while let Some(event) = events.next().await? {
        match event {
            ExecEvent::Output { data, .. } => text.extend_from_slice(&data),
            ExecEvent::Exit(ended) => exit = Some(ended),
            ExecEvent::Start { .. } => {}
        }
    }
    assert_eq!(
        (
            String::from_utf8_lossy(&text).as_ref(),
            exit.and_then(|exit| exit.exit_code)
        ),
        ("one\ntwo\nthree\n", Some(0))
    );
    let beyond = client
        .exec_output(
            id,
            exec_id,
            &OutputQuery {
                after_seq: Some(u64::MAX),
                ..Default::default()
            },
        )
        .await?;
    assert!(beyond.chunks.is_empty() && beyond.exit.is_some());
    let tail = client
        .exec_output(
            id,
            exec_id,
            &OutputQuery {
                tail_bytes: Some(3),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(
        tail.chunks
            .iter()
            .filter_map(|chunk| chunk.data.as_deref())
            .collect::<String>(),
        "three\n"
    );
    assert!(tail.exit.is_some());
    Ok(())
}

#[tokio::test]
async fn the_same_exec_id_attaches_and_another_request_is_refused() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let request = ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..sh("echo once >> runs; cat runs; sleep 0.3")
    };
    let (one, two) = tokio::join!(client.exec(id, &request), client.exec(id, &request));
    assert_eq!(one?.stdout, "once\n");
    assert_eq!(two?.stdout, "once\n");
    assert_eq!(client.exec(id, &request).await?.stdout, "once\n");
    let other = ExecRequest {
        argv: vec!["true".into()],
        ..request
    };
    assert!(
        client
            .exec(id, &other)
            .await
            .expect_err("another request")
            .is(ErrorCode::ExecIdInUse)
    );
    assert!(
        client
            .get_exec(id, ExecId::generate())
            .await
            .expect_err("unknown")
            .is(ErrorCode::ExecNotFound)
    );
    Ok(())
}

// part of: REQ-SANDBX-0105
#[tokio::test]
// invariant: bounded
async fn a_gibibyte_of_output_arrives_complete_through_a_small_worker() -> Result<()> {
    let world = World::new()?;
    let (worker, client, id) = one_session(&world).await?;
    let size: u64 = 1 << 30;
    // The pattern makes lost, duplicated or swapped chunks change the hash.
    let request = ExecRequest {
        timeout_ms: 600_000,
        ..sh("yes 0123456789abcdefghijklmnopqrstuvwxyz | head -c 1073741824")
    };
    let mut events = client.exec_stream(id, &request).await?;
    let (mut hash, mut bytes, mut seq) = (Sha256::new(), 0_u64, 0);
    loop {
        match events
            .next()
            .await?
            .context("the stream ended without an exit")?
        {
            ExecEvent::Output {
                data,
                seq: now,
                stream: Stream::Stdout,
                ..
            } => {
                assert_eq!(now, seq + 1);
                seq = now;
                bytes += data.len() as u64;
                hash.update(&data);
            }
            ExecEvent::Exit(exit) => {
                assert_eq!((exit.exit_code, exit.bytes.stdout), (Some(0), size));
                break;
            }
            _ => {}
        }
    }
    let line = b"0123456789abcdefghijklmnopqrstuvwxyz\n";
    let mut expected = Sha256::new();
    let block: Vec<u8> = line
        .iter()
        .copied()
        .cycle()
        .take(line.len() * 4_096)
        .collect();
    let mut left = size;
    while left > 0 {
        let part = &block[..block.len().min(usize::try_from(left)?)];
        expected.update(part);
        left -= part.len() as u64;
    }
    assert_eq!((bytes, hash.finalize()), (size, expected.finalize()));
    let (_, peak) = worker.memory()?;
    assert!(peak < 100 << 20, "the worker took {peak} bytes");
    Ok(())
}

#[tokio::test]
// invariant: bounded
async fn a_slow_reader_holds_up_its_own_program_and_nobody_else() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let request = ExecRequest {
        timeout_ms: 600_000,
        background: true,
        ..sh("head -c 60000000 /dev/zero; echo done > finished")
    };
    let exec_id = client
        .exec_background(
            id,
            &ExecRequest {
                argv: [
                    "sh".into(),
                    "-c".into(),
                    format!("read go; {}", request.argv[2]),
                ]
                .into(),
                stdin_open: true,
                ..request
            },
        )
        .await?
        .exec_id;
    let mut events = client.exec_output_stream(id, exec_id, 0).await?;
    client
        .write_stdin(id, exec_id, b"go\n".to_vec(), true)
        .await?;
    let mut bytes = 0;
    // Not reading: the program must block well before its end, while others continue.
    eventually("output arrives", Duration::from_secs(20), async || {
        let page = client
            .exec_output(
                id,
                exec_id,
                &OutputQuery {
                    after_seq: Some(100),
                    ..Default::default()
                },
            )
            .await?;
        Ok(!page.chunks.is_empty())
    })
    .await?;
    for _ in 0..20 {
        assert_eq!(
            client
                .exec(id, &sh("test ! -e finished && echo waiting"))
                .await?
                .stdout,
            "waiting\n"
        );
    }
    while let Some(event) = events.next().await? {
        match event {
            ExecEvent::Output { data, .. } => bytes += data.len(),
            ExecEvent::Exit(exit) => assert_eq!(exit.exit_code, Some(0)),
            ExecEvent::Start { .. } => {}
        }
    }
    assert_eq!(bytes, 60_000_000);
    Ok(())
}

#[tokio::test]
// invariant: bounded
async fn a_reader_may_stall_past_the_commands_deadline_and_costs_nothing_but_time() -> Result<()> {
    let world = World::new()?;
    let (worker, client, id) = one_session(&world).await?;
    // More output than the node keeps, then silence until the deadline: the exit queues behind the
    // output.
    let request = ExecRequest {
        timeout_ms: 3_000,
        ..sh("head -c 60000000 /dev/zero; exec sleep 1000")
    };
    let mut events = client.exec_stream(id, &request).await?;
    client
        .exec_background(id, &background("exec sleep 4321"))
        .await?;
    let log = worker.log();
    eventually(
        "the worker has processed the late exit",
        Duration::from_secs(60),
        async || {
            let log = fs_err::read_to_string(&log)?;
            Ok(log.contains("a slow reader delays its exit")
                || log.contains("missed an exec's deadline"))
        },
    )
    .await?;
    let mut exit = None;
    while let Some(event) = events.next().await? {
        if let ExecEvent::Exit(seen) = event {
            exit = Some(seen);
        }
    }
    assert!(exit.is_some_and(|exit| exit.timed_out && !exit.lost));
    assert!(
        processes_inside(&client, id).await?.contains("4321"),
        "something else in the sandbox was killed"
    );
    Ok(())
}

#[tokio::test]
// invariant: bounded
async fn only_the_newest_output_is_kept_when_nobody_reads() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let request = ExecRequest {
        background: true,
        timeout_ms: 120_000,
        ..sh("head -c 40000000 /dev/zero; echo end")
    };
    let exec_id = client.exec_background(id, &request).await?.exec_id;
    eventually("the command exits", Duration::from_secs(60), async || {
        Ok(client.get_exec(id, exec_id).await?.state == ExecState::Exited)
    })
    .await?;
    let page = client
        .exec_output(
            id,
            exec_id,
            &OutputQuery {
                max_bytes: Some(16 << 20),
                ..Default::default()
            },
        )
        .await?;
    let lost = page.lost_before_seq.context("the start is lost")?;
    assert_eq!(page.chunks[0].seq, lost);
    let tail = client
        .exec_output(
            id,
            exec_id,
            &OutputQuery {
                tail_bytes: Some(4),
                ..Default::default()
            },
        )
        .await?;
    assert!(
        tail.chunks
            .last()
            .and_then(|chunk| chunk.data.as_deref())
            .is_some_and(|data| data.ends_with("end\n"))
    );
    Ok(())
}

// proves: REQ-SANDBX-0101, REQ-SANDBX-0111
// part of: REQ-SANDBX-0103, CYNAI.SANDBX.SandboxConnectivity
#[tokio::test]
// invariant: no-way-out
async fn a_sandbox_has_loopback_and_no_other_way_out() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let result = client
        .exec(
            id,
            &sh(
                "tail -n +3 /proc/net/dev | cut -d: -f1; cat /proc/net/route | tail -n +2; \
                 wget -T 2 -q -O - http://192.0.2.1/ 2>&1 || echo refused",
            ),
        )
        .await?;
    let interfaces: Vec<&str> = result
        .stdout
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    assert_eq!(interfaces.first(), Some(&"lo"), "{}", result.stdout);
    assert_eq!(interfaces.last(), Some(&"refused"), "{}", result.stdout);
    assert_eq!(interfaces.iter().filter(|line| **line == "lo").count(), 1);
    Ok(())
}

#[tokio::test]
async fn a_foreground_exec_whose_caller_is_gone_is_ended_unless_somebody_attached() -> Result<()> {
    let world = World::new()?;
    let (_worker, client, id) = one_session(&world).await?;
    let command = |seconds: &str| ExecRequest {
        exec_id: Some(ExecId::generate()),
        timeout_ms: 600_000,
        ..exec(["sleep", seconds])
    };
    let (left, attended) = (command("7001"), command("7002"));
    for request in [&left, &attended] {
        // The caller disconnects right after the start.
        let mut events = client.exec_stream(id, request).await?;
        assert!(matches!(
            events.next().await?,
            Some(ExecEvent::Start { .. })
        ));
    }
    let (left, attended) = (
        left.exec_id.context("an id")?,
        attended.exec_id.context("an id")?,
    );
    let _reader = client.exec_output_stream(id, attended, 0).await?;
    eventually(
        "the exec without a caller ends",
        Duration::from_secs(60),
        async || Ok(client.get_exec(id, left).await?.state == ExecState::Exited),
    )
    .await?;
    assert_eq!(
        client
            .get_exec(id, left)
            .await?
            .exit
            .and_then(|exit| exit.signal)
            .as_deref(),
        Some("KILL")
    );
    assert_eq!(
        client.get_exec(id, attended).await?.state,
        ExecState::Running
    );
    Ok(())
}

#[tokio::test]
async fn a_program_that_writes_byte_by_byte_costs_no_more_than_its_output() -> Result<()> {
    let world = World::new()?;
    let (worker, client, id) = one_session(&world).await?;
    let request = ExecRequest {
        background: true,
        timeout_ms: 120_000,
        ..exec(["dd", "if=/dev/zero", "bs=1", "count=200000"])
    };
    let exec_id = client.exec_background(id, &request).await?.exec_id;
    eventually("the command exits", Duration::from_secs(100), async || {
        Ok(client.get_exec(id, exec_id).await?.state == ExecState::Exited)
    })
    .await?;
    let (mut bytes, mut after) = (0, 0);
    loop {
        let page = client
            .exec_output(
                id,
                exec_id,
                &OutputQuery {
                    after_seq: Some(after),
                    ..Default::default()
                },
            )
            .await?;
        bytes += page
            .chunks
            .iter()
            .filter(|chunk| chunk.stream == Stream::Stdout)
            .map(|chunk| chunk.data.as_ref().map_or(0, String::len))
            .sum::<usize>();
        after = page.next_seq;
        if page.exit.is_some() {
            break;
        }
        assert!(!page.chunks.is_empty());
    }
    assert_eq!(bytes, 200_000);
    let (_, peak) = worker.memory()?;
    assert!(peak < 100 << 20, "the worker took {peak} bytes");
    Ok(())
}

#[tokio::test]
async fn input_that_no_command_reads_stays_out_of_memory() -> Result<()> {
    const COMMANDS: usize = 50;
    let world = World::new()?;
    let (worker, client, id) = one_session(&world).await?;
    let (before, _) = worker.memory()?;
    for _ in 0..COMMANDS {
        let request = ExecRequest {
            stdin: Some("x".repeat(cynode_api::exec_limits::MAX_STDIN_BYTES)),
            ..background("read line; exec sleep 1000")
        };
        client.exec_background(id, &request).await?;
    }
    let (after, _) = worker.memory()?;
    let growth = after.saturating_sub(before);
    assert!(
        growth < 64 << 20,
        "{growth} bytes more for {COMMANDS} inputs of 4 MiB"
    );
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}
