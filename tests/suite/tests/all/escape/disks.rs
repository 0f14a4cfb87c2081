//! Filling the disk: with bytes, inodes, many small files, deep trees. Only that sandbox runs out
//! of space; deleting files frees it; the host's file behind the disk never exceeds the limit.

use std::{
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{ExecRequest, LimitsRequest, SessionCreate, SessionEnd, Unenforced};
use cynode_tests::{Engine, World, eventually, exec, on_every_runtime, session, sh};

use super::arena::Arena;

on_every_runtime!(a_disk_that_is_filled_is_full_for_its_sandbox_alone);

const DISK: u64 = 64 << 20;

/// Scripts that fill the disk and report it; their files are then deleted.
const FILLS: [(&str, &str); 6] = [
    (
        "a disk full of bytes",
        "dd if=/dev/zero of=fill bs=1M 2>&1 | grep 'No space left on device'",
    ),
    (
        "a disk full by fallocate",
        "fallocate -l 1G fill 2>&1 | grep 'No space left on device'",
    ),
    (
        "a file with holes that are filled",
        "truncate -s 1T fill; dd if=/dev/zero of=fill bs=1M conv=notrunc seek=4096 2>&1 | grep \
         'No space left on device'",
    ),
    (
        "a disk full of bytes at home",
        "dd if=/dev/zero of=$HOME/fill bs=1M 2>&1 | grep 'No space left on device' && rm \
         $HOME/fill",
    ),
    (
        "a disk without an inode left",
        "./attempts fill fill 1000000 0 | grep 'errno 28' && [ $(stat -f -c %d .) = 0 ]",
    ),
    (
        "a disk full of tiny files",
        "./attempts fill fill 1000000 1 | grep 'errno 28'",
    ),
];

fn request(disk_bytes: u64) -> SessionCreate {
    let limits = LimitsRequest {
        memory_bytes: Some(256 << 20),
        disk_bytes: Some(disk_bytes),
        ..Default::default()
    };
    SessionCreate {
        limits: Some(limits),
        ..session()
    }
}

/// The host's file behind the attacker's disk.
async fn image(arena: &Arena) -> Result<PathBuf> {
    let workspace = arena
        .client
        .get_session(arena.attacker)
        .await?
        .workspace_id
        .to_string();
    Ok(arena
        .world
        .state_dir()
        .join("worker/workspaces")
        .join(workspace)
        .join("disk.img"))
}

/// The disk space that a file occupies on the host.
fn disk_usage(path: &Path) -> Result<u64> {
    Ok(fs_err::metadata(path)?.blocks() * 512)
}

/// Ends the attacker's session and waits until its files are gone.
async fn remove_attacker(arena: &Arena) -> Result<()> {
    let trash = arena.world.state_dir().join("worker/trash");
    arena
        .attack(async {
            Ok(arena
                .client
                .end_session(arena.attacker, &SessionEnd::default())
                .await?)
        })
        .await?;
    eventually(
        "the attacker's files are gone",
        Duration::from_secs(120),
        async || Ok(fs_err::read_dir(&trash)?.count() == 0),
    )
    .await
}

// part of: CYNAI.SANDBX.SandboxThreatModel
// invariant: disk
async fn a_disk_that_is_filled_is_full_for_its_sandbox_alone(world: World) -> Result<()> {
    let mut arena = Arena::with(world, "disks", request(DISK), &[]).await?;
    let (client, attacker, neighbour) = (arena.client.clone(), arena.attacker, arena.neighbour);
    arena.copy_attempts_program(attacker).await?;
    let place = |path: &str| {
        exec([
            "sh",
            "-c",
            "echo precious > note && dd if=/dev/zero of=\"$0\" bs=1M count=4 2>/dev/null && rm \
             \"$0\" && cat note",
            path,
        ])
    };
    for (attempt, script) in FILLS {
        if !arena.bounded_by(Unenforced::Disk, attempt) {
            continue;
        }
        let full = arena
            .attack(async { Ok(client.exec(attacker, &sh(script)).await?) })
            .await
            .with_context(|| attempt.to_owned())?;
        ensure!(
            full.exit.exit_code == Some(0),
            "'{attempt}' did not fill the disk: {full:?}"
        );
        // The neighbour has space, and the host has lost no more than the limit.
        let room = client.exec(neighbour, &place("other")).await?;
        let taken = disk_usage(&image(&arena).await?)?;
        arena.expect(
            attempt,
            room.stdout == "precious\n" && taken <= DISK + (1 << 20),
            (room, taken),
        )?;
        let after = arena
            .attack(async {
                Ok(client
                    .exec(attacker, &sh("rm -rf fill; echo again > note && cat note"))
                    .await?)
            })
            .await?;
        ensure!(
            after.stdout == "again\n",
            "after '{attempt}' the sandbox is unusable: {after:?}"
        );
        let room = client.exec(attacker, &place("own")).await?;
        ensure!(
            room.stdout == "precious\n",
            "after '{attempt}' there is no space: {room:?}"
        );
    }
    // These need no limit; they must only be removable.
    arena
        .script(
            "deep directories in the workspace",
            "./attempts deep . 2500",
            |seen| seen == "2500 deep\n",
        )
        .await?;
    arena
        .script(
            "5,000 tiny files in the workspace",
            "./attempts fill many 5000 1",
            |seen| seen.starts_with("made "),
        )
        .await?;
    remove_attacker(&arena).await?;
    let left = fs_err::read_dir(arena.world.state_dir().join("worker/workspaces"))?.count();
    arena.expect("a workspace that can't be removed", left == 1, left)?;
    arena.end().await
}

/// Ten million names and inodes in one workspace. The files are empty: one byte in each would add
/// 40 GB of blocks on the host and nothing to the attack. mkfs creates an inode for every 16 KiB,
/// so the disk has 160 GiB, almost all of it sparse.
#[tokio::test]
// invariant: disk
async fn soak_ten_million_files_in_one_workspace_harm_nobody() -> Result<()> {
    const FILES: u64 = 10_000_000;
    let arena = Arena::with(
        World::on(Engine::Podman).await?,
        "ten-million-files",
        request(160 << 30),
        &[],
    )
    .await?;
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    arena.copy_attempts_program(attacker).await?;
    let start = std::time::Instant::now();
    let making = ExecRequest {
        timeout_ms: 3_600_000,
        ..exec(["./attempts", "fill", "many", &FILES.to_string(), "0"])
    };
    let made = arena
        .attack(async { Ok(client.exec(attacker, &making).await?) })
        .await?;
    ensure!(
        made.stdout == format!("made {FILES}, errno 0\n"),
        "{made:?}"
    );
    let made = start.elapsed();
    ensure!(
        client
            .exec(attacker, &sh("ls many | wc -l; ls many/9999 | wc -l"))
            .await?
            .stdout
            == "10000\n1000\n"
    );
    let image = image(&arena).await?;
    let taken = disk_usage(&image)?;
    let start = std::time::Instant::now();
    remove_attacker(&arena).await?;
    #[expect(clippy::print_stdout, reason = "the measurements of a long run")]
    {
        println!(
            "{FILES} files created in {made:?}, {} MiB on the host, removed in {:?}",
            taken >> 20,
            start.elapsed()
        );
    }
    ensure!(!image.exists(), "the disk is left");
    arena.end().await
}
