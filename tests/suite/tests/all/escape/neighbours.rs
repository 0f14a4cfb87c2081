//! Resources of others: processes, sockets and files of another sandbox, and the channel between
//! agent and worker.

use anyhow::{Result, ensure};
use cynode_tests::{World, exec, on_every_runtime, sh};

use super::arena::Arena;

on_every_runtime!(
    another_sandbox_can_be_neither_seen_nor_signalled,
    no_process_poses_as_the_agent_and_a_flood_of_connections_harms_nobody
);

// part of: CYNAI.SANDBX.SandboxThreatModel
async fn another_sandbox_can_be_neither_seen_nor_signalled(world: World) -> Result<()> {
    let mut arena = Arena::new(world, "neighbours").await?;
    arena.copy_attempts_program(arena.attacker).await?;
    let (client, neighbour) = (arena.client.clone(), arena.neighbour);
    let prepared = "echo mine > /tmp/neighbour; echo mine > /dev/shm/neighbour; echo mine > \
                    /workspace/neighbour; echo mine > ~/neighbour; echo ready; exec sleep 86399";
    let sleeper = arena
        .start_and_wait_for(neighbour, &["sh", "-c", prepared], "ready")
        .await?;
    arena
        .script(
            "the neighbour's processes",
            "cat /proc/[0-9]*/cmdline | tr '\\0' ' '",
            |seen| !seen.contains("86399"),
        )
        .await?;
    arena
        .script(
            "the neighbour's files",
            "find / -xdev -name neighbour 2>/dev/null; ls /tmp /dev/shm /workspace ~",
            |seen| !seen.contains("neighbour"),
        )
        .await?;
    arena
        .script("other sockets of the worker", "ls -A /run/cynode", |seen| {
            seen == "control.sock\ncynode-sba\nproxy.sock\n"
        })
        .await?;
    arena
        .script(
            "mounts that name the host",
            "cat /proc/self/mountinfo",
            |seen| !seen.contains("worker.token") && !seen.contains("/journal"),
        )
        .await?;
    arena
        .script(
            "ids below the sandbox's own",
            "for p in 2 3 4 5 6 7 8 9 10 100 1000 10000; do kill -0 $p 2>/dev/null && cat \
             /proc/$p/comm; done; true",
            |seen| {
                let own = ["sh", "cynode-exec", "cynode-listen", "cynode-sba"];
                seen.lines().all(|name| own.contains(&name))
            },
        )
        .await?;
    // Signals reach only the sandbox's own processes.
    let attack = exec(["sh", "-c", "kill -9 -1; kill -9 1; echo still"]);
    let killed = arena
        .attack(async {
            Ok(client
                .exec(arena.attacker, &attack)
                .await
                .map(|result| result.exit))
        })
        .await;
    arena.recover().await?;
    let alive = client.get_exec(neighbour, sleeper).await?.exit.is_none();
    arena.expect("KILL to every visible process", alive, killed)?;
    arena
        .script("every signal to process 1", "./attempts signals", |seen| {
            seen.ends_with(" signals\n")
        })
        .await?;
    let after = client
        .exec(arena.attacker, &sh("echo here; cat /proc/1/comm"))
        .await?
        .stdout;
    ensure!(after == "here\ncynode-sba\n", "{after}");
    arena.end().await
}

// part of: CYNAI.SANDBX.SandboxThreatModel
async fn no_process_poses_as_the_agent_and_a_flood_of_connections_harms_nobody(
    world: World,
) -> Result<()> {
    let mut arena = Arena::new(world, "control-socket").await?;
    arena.copy_attempts_program(arena.attacker).await?;
    arena
        .script(
            "500 connections that lie",
            "./attempts control 500",
            |seen| seen == "500 of 500 turned away\n",
        )
        .await?;
    // From many processes at once, while the attacker's own commands still run.
    let flood = "for i in $(seq 16); do ./attempts control 400 & done; wait";
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    let own = async {
        for _ in 0..10 {
            let answer = client.exec(attacker, &sh("echo own")).await?;
            ensure!(answer.stdout == "own\n", "{answer:?}");
        }
        Ok(())
    };
    let (seen, ()) = arena
        .attack(async {
            tokio::try_join!(
                async { Ok(client.exec(attacker, &sh(flood)).await?.stdout) },
                own
            )
        })
        .await?;
    arena.expect(
        "6,400 connections from 16 processes",
        seen == "400 of 400 turned away\n".repeat(16),
        seen,
    )?;
    arena
        .script(
            "replacing the socket",
            "rm -f /run/cynode/control.sock; mv /tmp /run/cynode/x; \
             ln -s x /run/cynode/y; ls -A /run/cynode",
            |seen| seen.starts_with("control.sock\ncynode-sba\n"),
        )
        .await?;
    arena.end().await
}
