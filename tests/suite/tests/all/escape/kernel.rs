//! Kernel interfaces: namespaces, mounts, keys, debugging, devices, ids. Attempted through the
//! agent and on a terminal.

use anyhow::{Result, ensure};
use cynode_api::SessionId;
use cynode_client::{PtyMessage, PtyOpen, SessionClient};
use cynode_tests::{World, exec, on_every_runtime};

use super::arena::Arena;

on_every_runtime!(the_kernel_refuses_what_leads_out_of_a_sandbox);

/// Runs a command on a terminal, opened by the runtime's own exec, and returns its output.
pub(crate) async fn at_terminal(
    client: &SessionClient,
    id: SessionId,
    argv: &[&str],
) -> Result<String> {
    let open = PtyOpen {
        cols: 200,
        rows: 50,
        argv: argv.iter().map(|part| (*part).to_owned()).collect(),
    };
    let mut pty = client.open_pty(id, &open).await?;
    let mut printed = Vec::new();
    while let Some(message) = pty.next().await? {
        match message {
            PtyMessage::Data(data) => printed.extend_from_slice(&data),
            PtyMessage::Exit { .. } => break,
            PtyMessage::Error { code, detail } => anyhow::bail!("{code}: {detail}"),
            PtyMessage::Ready => {}
        }
    }
    Ok(String::from_utf8_lossy(&printed).replace('\r', ""))
}

// proves: CYNAI.SANDBX.SandboxThreatModel with escape::*
async fn the_kernel_refuses_what_leads_out_of_a_sandbox(world: World) -> Result<()> {
    let mut arena = Arena::new(world, "kernel").await?;
    arena.copy_attempts_program(arena.attacker).await?;
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    let printed = arena
        .attack(async {
            Ok(client
                .exec(attacker, &exec(["./attempts", "kernel"]))
                .await?
                .stdout)
        })
        .await?;
    let count = arena.expect_lines(&printed, "")?;
    ensure!(count > 120, "{count} attempts only");

    // The runtime opens terminals, not the agent: the same rules must hold there.
    let printed = arena
        .attack(at_terminal(
            &client,
            attacker,
            &["/workspace/attempts", "kernel"],
        ))
        .await?;
    ensure!(
        arena.expect_lines(&printed, "at a terminal: ")? == count,
        "{printed}"
    );
    for (how, status) in [
        (
            "by the agent",
            client
                .exec(attacker, &exec(["cat", "/proc/self/status"]))
                .await?
                .stdout,
        ),
        (
            "at a terminal",
            at_terminal(&client, attacker, &["cat", "/proc/self/status"]).await?,
        ),
    ] {
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(|value| value.trim().to_owned())
                .unwrap_or_default()
        };
        ensure!(
            (field("Seccomp:").as_str(), field("NoNewPrivs:").as_str()) == ("2", "1"),
            "{how}: {status}"
        );
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            ensure!(field(set) == "0000000000000000", "{how}: {status}");
        }
        ensure!(
            field("Groups:").is_empty() || field("Groups:") == "1000",
            "{how}: {status}"
        );
    }
    arena.end().await
}
