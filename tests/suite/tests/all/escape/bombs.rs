//! Resource exhaustion. The attacker's sandbox may fail; its neighbour must stay unaffected, and
//! afterwards the sandbox must be usable again without starting anything in it.
//!
//! Where the process limit is not enforced (rootless with cgroups v1) the rlimit applies, at four
//! times the number; memory has no second line of defence, so there the test only records that the
//! limit must be allowed by name.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ErrorCode, ExecRequest, LimitsRequest, SessionCreate, Unenforced};
use cynode_tests::{Engine, World, eventually, exec, on_every_runtime, session, sh};
use serde_json::Value;

use super::{arena::Arena, kernel::at_terminal};

on_every_runtime!(
    a_resource_that_one_sandbox_exhausts_is_available_to_another,
    bombs_stay_in_their_sandbox_and_it_recovers_without_a_fork,
    a_flood_of_output_reaches_nobody_else,
);

/// Without a CPU limit a bomb's load grows with its size, so rootless bombs are small.
fn small_session(world: &World) -> SessionCreate {
    let pids = if world.engine() == Engine::Rootless {
        24
    } else {
        128
    };
    SessionCreate {
        limits: Some(LimitsRequest {
            memory_bytes: Some(128 << 20),
            pids: Some(pids),
            cpus: Some(0.5),
            ..Default::default()
        }),
        ..session()
    }
}

/// The exhausted resource, and the limit without which only the host's size would stop the attack.
const KINDS: [(&str, Option<Unenforced>); 9] = [
    ("threads", None),
    ("descriptors", None),
    // Counted per user: sandboxes that share ids share this limit too.
    ("descriptors in flight", Some(Unenforced::IdRange)),
    ("pipes", None),
    ("memory", Some(Unenforced::Memory)),
    ("timers", None),
    ("queued signals", None),
    ("terminals", None),
    ("inotify", None),
];

// part of: CYNAI.SANDBX.SandboxThreatModel
// invariant: bounded
async fn a_resource_that_one_sandbox_exhausts_is_available_to_another(world: World) -> Result<()> {
    let attacker = small_session(&world);
    let mut arena = Arena::with(world, "exhaustion", attacker, &[]).await?;
    arena.copy_attempts_program(arena.attacker).await?;
    arena.copy_attempts_program(arena.neighbour).await?;
    let (client, attacker, neighbour) = (arena.client.clone(), arena.attacker, arena.neighbour);
    for (kind, limit) in KINDS {
        let attempt = format!("all {kind}");
        if limit.is_some_and(|limit| !arena.bounded_by(limit, &attempt)) {
            continue;
        }
        let probe = async || {
            client
                .exec(neighbour, &exec(["./attempts", "probe", kind]))
                .await
        };
        ensure!(
            probe().await?.exit.exit_code == Some(0),
            "{kind}: the neighbour had none beforehand"
        );
        arena
            .attack(async {
                arena
                    .start_and_wait_for(attacker, &["./attempts", "exhaust", kind], "full")
                    .await
            })
            .await?;
        let after = probe().await?;
        arena.expect(attempt, after.exit.exit_code == Some(0), after)?;
        if kind == "terminals" {
            // The attacker itself has none left and is told so.
            let own = tokio::time::timeout(
                Duration::from_secs(60),
                at_terminal(&client, attacker, &["echo", "another"]),
            )
            .await;
            let own = own.context("opening a terminal hangs")?;
            ensure!(
                !own.is_ok_and(|said| said.contains("another")),
                "more terminals than allowed"
            );
            ensure!(
                at_terminal(&client, neighbour, &["echo", "a terminal"])
                    .await?
                    .contains("a terminal")
            );
        }
        arena.recover().await?;
    }
    arena.end().await
}

// part of: CYNAI.SANDBX.SandboxThreatModel
async fn bombs_stay_in_their_sandbox_and_it_recovers_without_a_fork(world: World) -> Result<()> {
    let attacker = small_session(&world);
    let mut arena = Arena::with(world, "bombs", attacker, &[]).await?;
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    arena.copy_attempts_program(attacker).await?;
    // Idle processes first: a limit that fails now would not stop a bomb either. Not even the shell
    // of a remedy could start.
    let mut held = 0;
    while client
        .exec_background(
            attacker,
            &ExecRequest {
                background: true,
                timeout_ms: 0,
                ..exec(["sleep", "1000"])
            },
        )
        .await
        .is_ok()
    {
        held += 1;
        ensure!(held < 200, "the process limit does not hold");
    }
    ensure!(
        client.exec(attacker, &sh("true")).await.is_err(),
        "a process started although the table is full"
    );
    arena.recover().await?;
    arena.expect("a process table full of sleepers", true, ())?;
    // Keeps the process table full: a shell that can't fork exits.
    let bombs = [
        ("fork bomb", true, "exec ./attempts forks"),
        (
            "fork bomb of a shell",
            false,
            "echo lit; b() { b & b; }; while :; do b & done 2>/dev/null",
        ),
        (
            "daemons",
            false,
            "echo lit; while :; do setsid sleep 1000 & done 2>/dev/null",
        ),
        (
            "memory in tmpfs",
            false,
            "echo lit; for d in /tmp /dev/shm /run; do dd if=/dev/zero of=$d/big bs=1M; done; rm \
             -f /tmp/big /dev/shm/big /run/big",
        ),
        (
            "small files in tmpfs",
            false,
            "echo lit; i=0; while [ $i -lt 20000 ]; do : > /tmp/f$i; i=$((i+1)); done; rm -rf \
             /tmp/f*",
        ),
        (
            "deep directories",
            false,
            "echo lit; ./attempts deep /tmp 10000",
        ),
    ];
    for (bomb, fills, script) in bombs {
        let burning = async {
            arena
                .start_and_wait_for(attacker, &["sh", "-c", script], "lit")
                .await?;
            if fills {
                let full = async || {
                    Ok(client
                        .exec(attacker, &exec(["true"]))
                        .await
                        .is_err_and(|error| error.is(ErrorCode::PidsExhausted)))
                };
                eventually("no process can start", Duration::from_secs(60), full).await?;
            }
            Ok(())
        };
        arena
            .attack(burning)
            .await
            .with_context(|| bomb.to_owned())?;
        // The bomb runs while the neighbour is probed a few times, and is then killed.
        for _ in 0..10 {
            arena
                .check_others_respond()
                .await
                .with_context(|| bomb.to_owned())?;
        }
        arena.recover().await.with_context(|| bomb.to_owned())?;
        arena.expect(bomb, true, ())?;
    }
    // The bomb also stops its own supervisor, so its start may not be reported.
    let stopping = ExecRequest {
        background: true,
        timeout_ms: 0,
        ..sh("while :; do kill -STOP -1; done")
    };
    let started = arena
        .attack(async { Ok(client.exec_background(attacker, &stopping).await) })
        .await?;
    arena.recover().await.context("stopping every process")?;
    arena.expect("stopping every process", true, started)?;
    arena.end().await
}

// part of: CYNAI.SANDBX.SandboxThreatModel
async fn a_flood_of_output_reaches_nobody_else(world: World) -> Result<()> {
    let attacker = small_session(&world);
    let mut arena = Arena::with(world, "log-flood", attacker, &[]).await?;
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    for _ in 0..8 {
        let request = ExecRequest {
            background: true,
            timeout_ms: 0,
            ..sh("yes flood & yes flood >&2")
        };
        client.exec_background(attacker, &request).await?;
    }
    // The host's output segments: their names change as output flows.
    let kept = || -> Result<Vec<(std::ffi::OsString, u64)>> {
        let directory = arena
            .world
            .state_dir()
            .join("worker/sessions")
            .join(attacker.to_string())
            .join("execs");
        let entries = fs_err::read_dir(directory)?.filter_map(|entry| {
            Some((
                entry.as_ref().ok()?.file_name(),
                entry.ok()?.metadata().ok()?.len(),
            ))
        });
        Ok(entries.collect())
    };
    let before = kept()?;
    for _ in 0..20 {
        arena.check_others_respond().await?;
    }
    let flows = async || Ok(kept()?.iter().any(|entry| !before.contains(entry)));
    eventually("the flood flows", Duration::from_secs(60), flows).await?;
    let after = kept()?;
    let kept: u64 = after.iter().map(|(_, bytes)| bytes).sum();
    let bound = cynode_api::exec_limits::KEPT_PER_SESSION + (64 << 20);
    let memory = arena.worker.memory()?.1;
    arena.expect("a flood of output on the host's disk", kept <= bound, kept)?;
    arena.expect(
        "a flood of output in the worker's memory",
        memory < 512 << 20,
        memory,
    )?;
    arena.recover().await?;
    let drivers: Vec<Value> = arena
        .world
        .inspect()?
        .iter()
        .map(|container| container["HostConfig"]["LogConfig"]["Type"].clone())
        .collect();
    arena.expect(
        "a flood of output in the engine's logs",
        drivers == ["none", "none"],
        drivers,
    )?;
    arena.end().await
}
