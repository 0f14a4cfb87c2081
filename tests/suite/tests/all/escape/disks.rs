//! Filling the disk: by bytes, by inodes, by many small files, by depth. Full is full for that sandbox alone; what it deletes it has
//! again; and the host's file behind it is never larger than the limit.

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

/// Each fills the disk and says so; what it made is then deleted.
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
        "truncate -s 1T fill; dd if=/dev/zero of=fill bs=1M conv=notrunc seek=4096 2>&1 | grep 'No space left on device'",
    ),
    (
        "a disk full of bytes at home",
        "dd if=/dev/zero of=$HOME/fill bs=1M 2>&1 | grep 'No space left on device' && rm $HOME/fill",
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

/// The file on the host that the attacker's disk lies in.
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

/// What a file takes of the host's disk.
fn taken(path: &Path) -> Result<u64> {
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

// proves: CYNAI.SANDBX.SandboxThreatModel
async fn a_disk_that_is_filled_is_full_for_its_sandbox_alone(world: World) -> Result<()> {
    let mut arena = Arena::with(world, "disks", request(DISK), &[]).await?;
    let (client, attacker, neighbour) = (arena.client.clone(), arena.attacker, arena.neighbour);
    arena.equip(attacker).await?;
    let place = |path: &str| {
        exec([
            "sh",
            "-c",
            "echo precious > note && dd if=/dev/zero of=\"$0\" bs=1M count=4 2>/dev/null && rm \"$0\" && cat note",
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
        // The neighbour has room, and the host has lost no more than what was granted.
        let room = client.exec(neighbour, &place("other")).await?;
        let taken = taken(&image(&arena).await?)?;
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
            "after '{attempt}' the sandbox can't be used: {after:?}"
        );
        let room = client.exec(attacker, &place("own")).await?;
        ensure!(
            room.stdout == "precious\n",
            "after '{attempt}' there is no room: {room:?}"
        );
    }
    // No limit is needed for these: they must only be removable.
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

/// Ten million names and inodes in one workspace. The files are empty: a byte in each would add 40 GB of blocks to the host's
/// disk and nothing to the attack. mkfs makes an inode for every 16 KiB, so the disk has 160 GiB, nearly all of it holes.
#[tokio::test]
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
    arena.equip(attacker).await?;
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
    let taken = taken(&image)?;
    let start = std::time::Instant::now();
    remove_attacker(&arena).await?;
    #[expect(clippy::print_stdout, reason = "what a long run measured")]
    {
        println!(
            "{FILES} files made in {made:?}, {} MiB on the host, gone in {:?}",
            taken >> 20,
            start.elapsed()
        );
    }
    ensure!(!image.exists(), "the disk is left");
    arena.end().await
}
