//! Files of the host: through links, `/proc` and `/sys`, inherited descriptors, working
//! directories.

use std::path::Path;

use anyhow::{Result, ensure};
use cynode_api::{ExecRequest, ListRequest, SearchRequest, SessionEnd};
use cynode_client::{PutOptions, SessionClient};
use cynode_tests::{World, exec, on_every_runtime, sh};

use super::{arena::Arena, kernel::at_terminal};

on_every_runtime!(
    proc_sys_and_devices_reveal_nothing_of_the_host,
    links_lead_to_the_sandboxs_own_files_only,
    the_runtimes_own_descriptors_are_no_working_directory,
);

const SECRET: &str = "the host's own secret";

// part of: CYNAI.SANDBX.SandboxThreatModel
async fn proc_sys_and_devices_reveal_nothing_of_the_host(world: World) -> Result<()> {
    let mut arena = Arena::new(world, "proc-sys-dev").await?;
    arena.copy_attempts_program(arena.attacker).await?;
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    let printed = arena
        .attack(async {
            Ok(client
                .exec(attacker, &exec(["./attempts", "files"]))
                .await?)
        })
        .await?;
    let count = arena.expect_lines(&format!("{}\n{}", printed.stdout, printed.stderr), "")?;
    ensure!(count > 80, "{count} attempts only");
    let printed = arena
        .attack(at_terminal(
            &client,
            attacker,
            &["/workspace/attempts", "files"],
        ))
        .await?;
    arena.expect_lines(&printed, "at a terminal: ")?;

    // A setuid file of the sandbox's own user, and one that only root could have created.
    let script = "for d in /workspace /tmp; do cp /bin/busybox $d && chmod 6755 $d/busybox && \
                  $d/busybox id -u; done";
    arena
        .script("setuid files of one's own", script, |seen| {
            seen == "1000\n1000\n"
        })
        .await?;
    arena
        .script(
            "root by su",
            "su -c id </dev/null; su root -c id </dev/null",
            |seen| !seen.contains("uid=0"),
        )
        .await?;
    arena.end().await
}

async fn read(client: &SessionClient, id: cynode_api::SessionId, path: &str) -> Result<String> {
    let mut body = match client.get_file(id, Path::new(path)).await {
        Ok(body) => body,
        Err(error) => return Ok(error.to_string()),
    };
    let mut text = Vec::new();
    while let Some(chunk) = body.chunk().await? {
        text.extend_from_slice(&chunk);
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

// part of: CYNAI.SANDBX.SandboxThreatModel
async fn links_lead_to_the_sandboxs_own_files_only(world: World) -> Result<()> {
    let mut arena = Arena::new(world, "links").await?;
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    let precious = arena.world.directory().join("precious");
    fs_err::create_dir(&precious)?;
    let file = precious.join("secret");
    fs_err::write(&file, SECRET)?;
    let places = [
        ("an absolute link", file.display().to_string()),
        (
            "a link by process 1's root",
            format!("/proc/1/root{}", file.display()),
        ),
        (
            "a link by one's own root",
            format!("/proc/self/root{}", file.display()),
        ),
        (
            "a link upwards",
            format!("{}{}", "../".repeat(40), file.display()),
        ),
        ("a link to shadow", "/etc/shadow".to_owned()),
    ];
    for (number, (what, target)) in places.iter().enumerate() {
        let link = format!("link{number}");
        let made = client
            .exec(attacker, &exec(["ln", "-s", target, &link]))
            .await?;
        ensure!(made.exit.exit_code == Some(0), "{made:?}");
        let seen = arena.attack(read(&client, attacker, &link)).await?;
        arena.expect(
            format!("read {what}"),
            !seen.contains(SECRET) && !seen.contains("root:"),
            seen,
        )?;
        let written = arena
            .attack(async {
                Ok(client
                    .put_file(
                        attacker,
                        Path::new(&link),
                        "overwritten",
                        &PutOptions::default(),
                    )
                    .await
                    .is_ok())
            })
            .await?;
        arena.expect(
            format!("write {what}"),
            fs_err::read_to_string(&file)? == SECRET,
            written,
        )?;
    }
    let made = client
        .exec(
            attacker,
            &sh(&format!(
                "mkdir -p d && ln -s {} d/into && ln -s / d/root",
                precious.display()
            )),
        )
        .await?;
    ensure!(made.exit.exit_code == Some(0), "{made:?}");
    let listed = arena
        .attack(async {
            Ok(format!(
                "{:?}",
                client
                    .list_files(
                        attacker,
                        &ListRequest {
                            depth: Some(8),
                            ..Default::default()
                        }
                    )
                    .await
            ))
        })
        .await?;
    arena.expect(
        "list through a link",
        !listed.contains("d/into/") && !listed.contains("d/root/"),
        listed,
    )?;
    let request = SearchRequest {
        pattern: "own secret".to_owned(),
        ..Default::default()
    };
    let searched = arena
        .attack(async {
            Ok(format!(
                "{:?}",
                client.search_files(attacker, &request).await
            ))
        })
        .await?;
    arena.expect(
        "search through a link",
        !searched.contains("host's own"),
        searched,
    )?;
    let below = client
        .put_file(
            attacker,
            Path::new("d/into/new"),
            "x",
            &PutOptions::default(),
        )
        .await
        .is_ok();
    arena.expect(
        "write below a link",
        fs_err::read_dir(&precious)?.count() == 1,
        below,
    )?;

    // The host removes the workspace at the end; the targets of its links must survive.
    client.end_session(attacker, &SessionEnd::default()).await?;
    arena.expect(
        "removal through a link",
        fs_err::read_to_string(&file)? == SECRET,
        "gone",
    )?;
    arena.end().await
}

/// A working directory that is one of the runtime's own descriptors, the escape in older versions
/// of runc.
// part of: CYNAI.SANDBX.SandboxThreatModel
async fn the_runtimes_own_descriptors_are_no_working_directory(world: World) -> Result<()> {
    let mut arena = Arena::with(
        world,
        "runtime-exec",
        cynode_tests::session(),
        &[("exec_via", "\"runtime\"")],
    )
    .await?;
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    let file = arena.world.directory().join("secret");
    fs_err::write(&file, SECRET)?;
    let prepared = client
        .exec(
            attacker,
            &sh("for n in $(seq 3 12); do ln -s /proc/self/fd/$n fd$n; done; ls | wc -l"),
        )
        .await?;
    ensure!(prepared.stdout == "10\n", "{prepared:?}");
    for number in 3..=12 {
        let request = ExecRequest {
            cwd: Some(format!("/workspace/fd{number}")),
            ..sh(&format!(
                "cat {}{}; ls ../../../../../../proc/1/root/",
                "../".repeat(12),
                &file.display().to_string()[1..]
            ))
        };
        let seen = arena
            .attack(async { Ok(format!("{:?}", client.exec(attacker, &request).await)) })
            .await?;
        arena.expect(
            format!("working directory by the runtime's descriptor {number}"),
            !seen.contains(SECRET),
            seen,
        )?;
    }
    arena.end().await
}
