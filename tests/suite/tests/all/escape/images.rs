//! Images with hostile configuration and files.

use anyhow::{Result, ensure};
use cynode_api::SessionCreate;
use cynode_tests::{HOSTILE, World, exec, on_every_runtime, session, sh};
use serde_json::{Value, json};

use super::arena::Arena;

on_every_runtime!(the_configuration_of_a_hostile_image_has_no_effect);

// part of: CYNAI.SANDBX.SandboxThreatModel
async fn the_configuration_of_a_hostile_image_has_no_effect(world: World) -> Result<()> {
    let mut arena = Arena::with(
        world,
        "hostile-image",
        SessionCreate {
            image_ref: HOSTILE.to_owned(),
            ..session()
        },
        &[],
    )
    .await?;
    arena.copy_attempts_program(arena.attacker).await?;
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    arena
        .script(
            "ENTRYPOINT and CMD",
            "tr '\\0' ' ' </proc/1/cmdline",
            |seen| seen.starts_with("/run/cynode/cynode-sba agent"),
        )
        .await?;
    arena
        .script("USER root", "id -u; id -g; id -G", |seen| {
            seen == "1000\n1000\n1000\n"
        })
        .await?;
    arena
        .script(
            "LD_PRELOAD, BASH_ENV, proxies and our own names in ENV",
            "env",
            |seen| {
                ![
                    "LD_",
                    "BASH_ENV",
                    "ENV=/evil",
                    "CYNODE_TASK_ID=forged",
                    "HTTP_PROXY=http://evil",
                    "HOME=/root",
                ]
                .iter()
                .any(|bad| seen.lines().any(|line| line.starts_with(bad)))
            },
        )
        .await?;
    arena
        .script("giant ENV", "env | wc -c", |seen| {
            seen.trim()
                .parse::<u64>()
                .is_ok_and(|bytes| bytes < 100_000)
        })
        .await?;
    arena
        .script(
            "WORKDIR",
            "pwd; touch here && ls -d /workspace/here",
            |seen| seen == "/workspace\n/workspace/here\n",
        )
        .await?;
    arena
        .script(
            "setuid and setgid files",
            "ls -l /evil/busybox | cut -c1-10; /evil/busybox id -u; /evil/busybox id -g",
            |seen| seen == "-rwsr-sr-x\n1000\n1000\n",
        )
        .await?;
    let printed = arena
        .attack(async {
            Ok(client
                .exec(attacker, &exec(["./attempts", "kernel"]))
                .await?
                .stdout)
        })
        .await?;
    ensure!(
        arena.expect_lines(&printed, "in a hostile image: ")? > 120,
        "{printed}"
    );

    let containers = arena.world.inspect()?;
    ensure!(containers.len() == 2, "{containers:#?}");
    let each = |path: &str| -> Vec<&Value> {
        containers
            .iter()
            .map(|container| container.pointer(path).unwrap_or(&Value::Null))
            .collect()
    };
    let health = each("/Config/Healthcheck/Test");
    arena.expect(
        "HEALTHCHECK",
        health
            .iter()
            .all(|test| test.is_null() || **test == json!(["NONE"])),
        health,
    )?;
    let (volumes, mounts) = (arena.world.volumes()?, each("/Mounts"));
    let mounted = mounts
        .iter()
        .filter_map(|mounts| mounts.as_array())
        .flatten()
        .any(|mount| mount["Type"] == "volume");
    arena.expect("VOLUME", volumes.is_empty() && !mounted, (volumes, mounts))?;
    let signals = each("/Config/StopSignal");
    arena.expect(
        "STOPSIGNAL",
        signals
            .iter()
            .all(|signal| **signal == json!(9) || **signal == json!("SIGKILL")),
        signals,
    )?;
    let after = client.exec(attacker, &sh("ls /tmp")).await?.stdout;
    arena.expect(
        "HEALTHCHECK's command",
        !after.contains("healthcheck-ran"),
        after,
    )?;
    arena.end().await
}
