//! Taking all there is of something. The sandbox may choke on it; its neighbour must not notice, and afterwards the sandbox can
//! be used again without anything having to be started in it.
//!
//! Disk and inodes are not here: their limits have tests of their own.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, ExecRequest, LimitsRequest, SessionCreate};
use cynode_tests::{eventually, exec, session, sh};

use super::{
    arena::{Arena, LIMITED},
    kernel::at_terminal,
};

fn small() -> SessionCreate {
    SessionCreate { limits: Some(LimitsRequest { memory_bytes: Some(128 << 20), pids: Some(128), cpus: Some(0.5), ..Default::default() }), ..session() }
}

// proves: CYNAI.SANDBX.SandboxThreatModel
#[tokio::test]
async fn what_one_sandbox_uses_up_another_still_has() -> Result<()> {
    for runtime in LIMITED {
        let mut arena = Arena::with(runtime, "exhaustion", small(), &[]).await?;
        arena.equip(arena.attacker).await?;
        arena.equip(arena.neighbour).await?;
        let (client, attacker, neighbour) = (arena.client.clone(), arena.attacker, arena.neighbour);
        for kind in ["threads", "descriptors", "pipes", "memory", "timers", "queued signals", "terminals", "inotify"] {
            let probe = async || client.exec(neighbour, &exec(["./attempts", "probe", kind])).await;
            ensure!(probe().await?.exit.exit_code == Some(0), "{kind}: the neighbour has none before");
            arena.attack(async { arena.until_said(attacker, &["./attempts", "exhaust", kind], "full").await }).await?;
            let after = probe().await?;
            arena.expect(format!("all {kind}"), after.exit.exit_code == Some(0), after)?;
            if kind == "terminals" {
                ensure!(at_terminal(&client, neighbour, &["echo", "a terminal"]).await?.contains("a terminal"));
            }
            arena.recover().await?;
        }
        arena.end().await?;
    }
    Ok(())
}

// proves: CYNAI.SANDBX.SandboxThreatModel
#[tokio::test]
async fn bombs_stay_in_their_sandbox_and_it_recovers_without_a_fork() -> Result<()> {
    for runtime in LIMITED {
        let mut arena = Arena::with(runtime, "bombs", small(), &[]).await?;
        let (client, attacker) = (arena.client.clone(), arena.attacker);
        arena.equip(attacker).await?;
        // Whether it keeps the table of processes full; a shell that can not fork ends.
        let bombs = [
            ("fork bomb", true, "exec ./attempts forks"),
            ("fork bomb of a shell", false, "echo lit; b() { b & b; }; while :; do b & done 2>/dev/null"),
            ("daemons", false, "echo lit; while :; do setsid sleep 1000 & done 2>/dev/null"),
            ("memory in tmpfs", false, "echo lit; for d in /tmp /dev/shm /run; do dd if=/dev/zero of=$d/big bs=1M; done; rm -f /tmp/big /dev/shm/big /run/big"),
            ("small files in tmpfs", false, "echo lit; i=0; while [ $i -lt 20000 ]; do : > /tmp/f$i; i=$((i+1)); done; rm -rf /tmp/f*"),
            ("deep directories", false, "echo lit; cd /tmp; i=0; while [ $i -lt 3000 ]; do mkdir d && cd d; i=$((i+1)); done"),
        ];
        for (bomb, fills, script) in bombs {
            let burning = async {
                arena.until_said(attacker, &["sh", "-c", script], "lit").await?;
                if fills {
                    let full = async || Ok(client.exec(attacker, &exec(["true"])).await.is_err_and(|error| error.is(ErrorCode::PidsExhausted)));
                    eventually("there is no room for a process", Duration::from_secs(60), full).await?;
                }
                Ok(())
            };
            arena.attack(burning).await.with_context(|| bomb.to_owned())?;
            // It burns while the neighbour is asked a few times, and is then put out.
            for _ in 0..10 {
                arena.others_answer().await.with_context(|| bomb.to_owned())?;
            }
            arena.recover().await.with_context(|| bomb.to_owned())?;
            arena.expect(bomb, true, ())?;
        }
        // Its own supervisor is stopped with all the others, so its start may not be reported.
        let stopping = ExecRequest { background: true, timeout_ms: 0, ..sh("while :; do kill -STOP -1; done") };
        let started = arena.attack(async { Ok(client.exec_background(attacker, &stopping).await) }).await?;
        arena.recover().await.context("stopping everybody")?;
        arena.expect("stopping everybody", true, started)?;
        // Full by processes that do nothing else: not even the shell of a remedy could be started.
        let mut held = 0;
        while client.exec_background(attacker, &ExecRequest { background: true, timeout_ms: 0, ..exec(["sleep", "1000"]) }).await.is_ok() {
            held += 1;
            ensure!(held < 200, "the limit of processes does not hold");
        }
        ensure!(client.exec(attacker, &sh("true")).await.is_err(), "there is room");
        arena.recover().await?;
        arena.expect("a process table full of sleepers", true, ())?;
        arena.end().await?;
    }
    Ok(())
}

// proves: CYNAI.SANDBX.SandboxThreatModel
#[tokio::test]
async fn a_flood_of_output_reaches_nobody_else() -> Result<()> {
    for runtime in LIMITED {
        let mut arena = Arena::with(runtime, "log-flood", small(), &[]).await?;
        let (client, attacker) = (arena.client.clone(), arena.attacker);
        for _ in 0..8 {
            let request = ExecRequest { background: true, timeout_ms: 0, ..sh("yes flood & yes flood >&2") };
            client.exec_background(attacker, &request).await?;
        }
        // The segments of output that the host keeps: their names change as it flows.
        let kept = || -> Result<Vec<(std::ffi::OsString, u64)>> {
            let directory = arena.world.state_dir().join("worker/sessions").join(attacker.to_string()).join("execs");
            let entries = fs_err::read_dir(directory)?.filter_map(|entry| Some((entry.as_ref().ok()?.file_name(), entry.ok()?.metadata().ok()?.len())));
            Ok(entries.collect())
        };
        let before = kept()?;
        for _ in 0..20 {
            arena.others_answer().await?;
        }
        let after = kept()?;
        let flowed = after.iter().any(|entry| !before.contains(entry));
        let kept: u64 = after.iter().map(|(_, bytes)| bytes).sum();
        let bound = cynode_api::exec_limits::KEPT_PER_SESSION + (64 << 20);
        let memory = arena.worker.memory()?.1;
        ensure!(flowed, "the flood does not flow");
        arena.expect("a flood of output on the host's disk", kept <= bound, kept)?;
        arena.expect("a flood of output in the worker's memory", memory < 512 << 20, memory)?;
        arena.recover().await?;
        let logs = arena.world.podman().args(["ps", "--all", "--format", "{{.ID}}"]).output()?;
        for id in String::from_utf8_lossy(&logs.stdout).lines() {
            let driver = arena.world.podman().args(["inspect", "--format", "{{.HostConfig.LogConfig.Type}}", id]).output()?;
            ensure!(String::from_utf8_lossy(&driver.stdout).trim() == "none", "{driver:?}");
        }
        arena.end().await?;
    }
    Ok(())
}
