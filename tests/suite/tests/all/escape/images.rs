//! Images whose configuration and files want to harm whoever believes them.

use anyhow::{Result, ensure};
use cynode_api::SessionCreate;
use cynode_tests::{HOSTILE, exec, session, sh};

use super::arena::{Arena, LIMITED};

// proves: CYNAI.SANDBX.SandboxThreatModel
#[tokio::test]
async fn nothing_that_a_hostile_image_says_counts() -> Result<()> {
    for runtime in LIMITED {
        let mut arena = Arena::with(runtime, "hostile-image", SessionCreate { image_ref: HOSTILE.to_owned(), ..session() }, &[]).await?;
        arena.equip(arena.attacker).await?;
        let (client, attacker) = (arena.client.clone(), arena.attacker);
        arena.script("ENTRYPOINT and CMD", "tr '\\0' ' ' </proc/1/cmdline", |seen| seen.starts_with("/run/cynode/cynode-sba agent")).await?;
        arena.script("USER root", "id -u; id -g; id -G", |seen| seen == "1000\n1000\n1000\n").await?;
        arena
            .script("LD_PRELOAD, BASH_ENV, proxies and our own names in ENV", "env", |seen| {
                !["LD_", "BASH_ENV", "ENV=/evil", "CYNODE_TASK_ID=forged", "HTTP_PROXY", "HOME=/root"]
                    .iter()
                    .any(|bad| seen.lines().any(|line| line.starts_with(bad)))
            })
            .await?;
        arena.script("giant ENV", "env | wc -c", |seen| seen.trim().parse::<u64>().is_ok_and(|bytes| bytes < 100_000)).await?;
        arena.script("WORKDIR", "pwd; touch here && ls -d /workspace/here", |seen| seen == "/workspace\n/workspace/here\n").await?;
        arena
            .script("setuid and setgid files", "ls -l /evil/busybox | cut -c1-10; /evil/busybox id -u; /evil/busybox id -g", |seen| {
                seen == "-rwsr-sr-x\n1000\n1000\n"
            })
            .await?;
        let printed = arena.attack(async { Ok(client.exec(attacker, &exec(["./attempts", "kernel"])).await?.stdout) }).await?;
        ensure!(arena.expect_lines(&printed, "in a hostile image: ")? > 120, "{printed}");

        let inspect = |format: &str| -> Result<String> {
            let ids = arena.world.podman().args(["ps", "--quiet"]).output()?;
            let ids = String::from_utf8_lossy(&ids.stdout).into_owned();
            let output = arena.world.podman().args(["inspect", "--format", format]).args(ids.lines()).output()?;
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let healthchecks = inspect("{{json .Config.Healthcheck}}")?;
        let volumes = String::from_utf8_lossy(&arena.world.podman().args(["volume", "ls", "--quiet"]).output()?.stdout).into_owned();
        let mounts = inspect("{{range .Mounts}}{{.Type}} {{.Destination}}{{println}}{{end}}")?;
        let signals = inspect("{{.Config.StopSignal}}")?;
        arena.expect("HEALTHCHECK", healthchecks.lines().all(|line| line.contains("NONE") || line == "null"), healthchecks)?;
        arena.expect("VOLUME", volumes.is_empty() && !mounts.contains("volume"), (volumes, &mounts))?;
        arena.expect("STOPSIGNAL", signals.lines().all(|line| line == "9"), signals)?;
        let after = client.exec(attacker, &sh("ls /tmp")).await?.stdout;
        arena.expect("HEALTHCHECK's command", !after.contains("healthcheck-ran"), after)?;
        arena.end().await?;
    }
    Ok(())
}
