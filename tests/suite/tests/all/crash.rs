//! Processes are killed at inconvenient moments; nothing is lost and nothing is left behind.

mod kills;

use std::{collections::HashSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, ExecId, ExecRequest, ExecState, SessionEnd, SessionId, SessionState};
use cynode_client::{OutputQuery, SessionClient, SessionFilter};
use cynode_tests::{Options, World, eventually, exec, session, sh};

fn background(script: &str) -> ExecRequest {
    ExecRequest {
        background: true,
        timeout_ms: 0,
        ..sh(script)
    }
}

/// A command that counts, and its output so far.
struct Counter {
    session: SessionId,
    exec: ExecId,
    seq: u64,
    text: String,
}

impl Counter {
    /// Reads output until the counter has passed `until`; checks that no chunk is missing or
    /// duplicated.
    async fn read_past(&mut self, client: &SessionClient, until: u64) -> Result<()> {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        while self.last() <= until {
            let page = client
                .exec_output(
                    self.session,
                    self.exec,
                    &OutputQuery {
                        after_seq: Some(self.seq),
                        wait_ms: Some(5_000),
                        ..Default::default()
                    },
                )
                .await?;
            ensure!(
                page.lost_before_seq.is_none() && page.exit.is_none(),
                "{page:?}"
            );
            for chunk in page.chunks {
                ensure!(
                    chunk.seq == self.seq + 1,
                    "chunk {} after {}",
                    chunk.seq,
                    self.seq
                );
                self.seq = chunk.seq;
                self.text.push_str(chunk.data.as_deref().context("text")?);
            }
            ensure!(
                tokio::time::Instant::now() < deadline,
                "the counter of {} stopped at {}",
                self.session,
                self.last()
            );
        }
        Ok(())
    }

    fn lines(&self) -> impl Iterator<Item = u64> {
        // The last line may be incomplete.
        let whole = self.text.rfind('\n').map_or("", |end| &self.text[..end]);
        whole.lines().map(|line| line.parse().expect("a number"))
    }

    fn last(&self) -> u64 {
        self.lines().last().unwrap_or(0)
    }
}

// The script counts fast enough that tests need not wait for it, and slowly enough to follow.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done";

// proves: REQ-SANDBX-0121
#[tokio::test]
// invariant: nothing-lost
async fn twenty_sessions_survive_the_death_of_the_worker_without_a_gap_in_their_output()
-> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut counters = Vec::new();
    for _ in 0..20 {
        let session = client.create_session(&session()).await?.session_id;
        let exec = client
            .exec_background(session, &background(COUNT))
            .await?
            .exec_id;
        counters.push(Counter {
            session,
            exec,
            seq: 0,
            text: String::new(),
        });
    }
    for counter in &mut counters {
        counter.read_past(&client, 3).await?;
    }
    for round in 1..=2 {
        worker.kill()?;
        worker = world.worker(&Options::default()).await?;
        let client = worker.client()?;
        for counter in &mut counters {
            assert_eq!(
                client.get_exec(counter.session, counter.exec).await?.state,
                ExecState::Running
            );
            let reached = counter.last();
            counter.read_past(&client, reached + 5).await?;
            let lines: Vec<u64> = counter.lines().collect();
            assert_eq!(
                lines,
                (1..=lines.len() as u64).collect::<Vec<_>>(),
                "round {round}"
            );
            assert_eq!(
                client.exec(counter.session, &sh("echo here")).await?.stdout,
                "here\n"
            );
        }
        assert_eq!(
            client
                .list_sessions(&SessionFilter {
                    state: Some(SessionState::Running),
                    ..Default::default()
                })
                .await?
                .len(),
            20
        );
    }
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: nothing-lost
async fn output_and_exit_of_a_command_survive_the_absence_of_the_worker() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let session = client.create_session(&session()).await?.session_id;
    let request = ExecRequest {
        background: true,
        timeout_ms: 60_000,
        ..sh(
            "read go < fifo; head -c 300000 /dev/zero | tr '\\0' x; echo end; echo done > done; \
             exit 9",
        )
    };
    client.exec(session, &exec(["mkfifo", "fifo"])).await?;
    let exec_id = client.exec_background(session, &request).await?.exec_id;
    // A second command unblocks the first while the worker is dead.
    client
        .exec_background(
            session,
            &background(
                "while [ ! -e /workspace/.go ]; do sleep 0.02; done; sleep 0.3; echo go > fifo",
            ),
        )
        .await?;
    client
        .exec(session, &exec(["touch", "/workspace/.go"]))
        .await?;
    worker.kill()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    eventually("the command exits", Duration::from_secs(30), async || {
        Ok(client.get_exec(session, exec_id).await?.state == ExecState::Exited)
    })
    .await?;
    let page = client
        .exec_output(
            session,
            exec_id,
            &OutputQuery {
                max_bytes: Some(1 << 20),
                ..Default::default()
            },
        )
        .await?;
    let text: String = page
        .chunks
        .iter()
        .filter_map(|chunk| chunk.data.as_deref())
        .collect();
    assert_eq!((text.len(), text.ends_with("xend\n")), (300_004, true));
    assert_eq!(page.exit.and_then(|exit| exit.exit_code), Some(9));
    Ok(())
}

#[tokio::test]
// invariant: nothing-lost
async fn an_answered_exec_is_still_there_after_the_worker_died() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let session = client.create_session(&session()).await?.session_id;
    let request = ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..sh("echo run >> runs; echo out; echo err >&2; exit 3")
    };
    let before = client.exec(session, &request).await?;
    worker.kill()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let after = client.exec(session, &request).await?;
    assert_eq!(before, after);
    assert_eq!(
        client.exec(session, &exec(["cat", "runs"])).await?.stdout,
        "run\n"
    );
    Ok(())
}

#[tokio::test]
async fn a_hundred_sessions_at_once_answer_and_leave_nothing() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let client = client.clone();
        tasks.spawn(async move {
            let request = session();
            let mut made = client.create_session(&request).await?;
            while made.state == SessionState::Creating {
                // An identical request waits again.
                made = client.create_session(&request).await?;
            }
            let id = made.session_id;
            for round in 0..20 {
                let result = client
                    .exec(
                        id,
                        &sh(&format!(
                            "echo $CYNODE_SESSION_ID {round}; echo \
                             {round} >> rounds; wc -l < rounds"
                        )),
                    )
                    .await?;
                ensure!(
                    result.stdout == format!("{id} {round}\n{}\n", round + 1),
                    "{result:?}"
                );
            }
            client.end_session(id, &SessionEnd::default()).await?;
            Ok(made.workspace_id)
        });
    }
    let workspaces: HashSet<_> = tasks.join_all().await.into_iter().collect::<Result<_>>()?;
    assert_eq!(workspaces.len(), 100);
    eventually(
        "every workspace is gone",
        Duration::from_secs(30),
        async || Ok(fs_err::read_dir(world.state_dir().join("worker/workspaces"))?.count() == 0),
    )
    .await?;
    assert!(world.containers()?.is_empty());
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: nothing-lost
async fn a_worker_killed_while_it_creates_and_ends_sessions_loses_and_leaks_none() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let kept = worker.client()?.create_session(&session()).await?;
    let mut sent = Vec::new();
    for round in 0..3 {
        let client = worker.client()?;
        let before = client.list_sessions(&SessionFilter::default()).await?.len();
        let requests: Vec<_> = (0..4).map(|_| session()).collect();
        sent.extend(requests.iter().cloned());
        let mut calls = tokio::task::JoinSet::new();
        for request in requests {
            let client = client.clone();
            calls.spawn(async move {
                if let Ok(session) = client.create_session(&request).await {
                    drop(
                        client
                            .end_session(session.session_id, &SessionEnd::default())
                            .await,
                    );
                }
            });
        }
        // Kill the worker later in each round.
        eventually(
            "some sessions are being created",
            Duration::from_secs(30),
            async || {
                Ok(client.list_sessions(&SessionFilter::default()).await?.len() > before + round)
            },
        )
        .await?;
        worker.kill()?;
        calls.join_all().await;
        worker = world.worker(&Options::default()).await?;
    }
    let client = worker.client()?;
    assert_eq!(
        client
            .exec(kept.session_id, &sh("echo alive"))
            .await?
            .stdout,
        "alive\n"
    );
    // Every repeated request returns its session, no session exists twice, and only live sessions
    // have containers.
    for request in &sent {
        match client.create_session(request).await {
            Ok(session) => ensure!(
                matches!(session.state, SessionState::Running | SessionState::Ended),
                "{session:?}"
            ),
            Err(error) => ensure!(error.is(ErrorCode::SessionEnded), "{error}"),
        }
    }
    let running = client
        .list_sessions(&SessionFilter {
            state: Some(SessionState::Running),
            ..Default::default()
        })
        .await?;
    assert_eq!(world.containers()?.len(), running.len());
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
async fn a_worker_killed_in_every_phase_loses_and_confuses_no_session() -> Result<()> {
    kills::kill_again_and_again(5).await
}

/// Run by `make soak`.
#[tokio::test]
async fn soak_the_worker_is_killed_fifty_times() -> Result<()> {
    kills::kill_again_and_again(50).await
}

#[tokio::test]
// invariant: nothing-lost
async fn containers_that_vanished_with_a_reboot_leave_sessions_that_can_be_resumed() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let made = client.create_session(&session()).await?;
    client
        .exec(made.session_id, &sh("echo kept > file"))
        .await?;
    let running = client
        .exec_background(made.session_id, &background("exec sleep 999"))
        .await?
        .exec_id;
    worker.kill()?;
    // The state after a reboot: the containers exist, but none runs.
    let stopped = world.podman().args(["kill", "--all"]).output()?;
    ensure!(stopped.status.success(), "{stopped:?}");
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    assert_eq!(
        client.get_session(made.session_id).await?.state,
        SessionState::Lost
    );
    let lost = client.get_exec(made.session_id, running).await?;
    assert_eq!(
        (lost.state, lost.exit.map(|exit| exit.lost)),
        (ExecState::Lost, Some(true))
    );
    let resumed = client.resume_session(made.session_id).await?;
    assert_eq!(
        (resumed.state, resumed.workspace_id),
        (SessionState::Running, made.workspace_id)
    );
    assert_eq!(
        client
            .exec(made.session_id, &exec(["cat", "file"]))
            .await?
            .stdout,
        "kept\n"
    );
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
async fn sandboxes_survive_a_stopped_worker_and_the_next_one_adopts_them() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let made = client.create_session(&session()).await?;
    let exec_id = client
        .exec_background(made.session_id, &background(COUNT))
        .await?
        .exec_id;
    worker.signal(rustix::process::Signal::TERM)?;
    assert!(worker.wait(Duration::from_secs(30)).await?.success());
    let worker = world.worker(&Options::default()).await?;
    let mut counter = Counter {
        session: made.session_id,
        exec: exec_id,
        seq: 0,
        text: String::new(),
    };
    counter.read_past(&worker.client()?, 10).await
}

#[tokio::test]
// invariant: deadlines
async fn a_podman_service_that_hangs_or_dies_is_replaced() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&Options::default().set("runtime_timeout_seconds", "5"))
        .await?;
    let client = worker.client()?;
    let service = || -> Result<i32> {
        let recorded: serde_json::Value = serde_json::from_slice(&fs_err::read(
            world.state_dir().join("worker/podman/service.json"),
        )?)?;
        i32::try_from(recorded["pid"].as_i64().context("a process id")?).context("a process id")
    };
    let first = client.create_session(&session()).await?;
    let pid = rustix::process::Pid::from_raw(service()?).context("a process id")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    let second = client.create_session(&session()).await?;
    assert_ne!(service()?, pid.as_raw_nonzero().get());
    let pid = rustix::process::Pid::from_raw(service()?).context("a process id")?;
    rustix::process::kill_process(pid, rustix::process::Signal::STOP)?;
    let third = client.create_session(&session()).await?;
    assert_ne!(service()?, pid.as_raw_nonzero().get());
    for id in [first.session_id, second.session_id, third.session_id] {
        assert_eq!(client.exec(id, &sh("echo fine")).await?.stdout, "fine\n");
    }
    Ok(())
}
