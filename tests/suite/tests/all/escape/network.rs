//! Sockets as a way out: every family, every address of this host, names, abstract sockets.

use std::{
    net::{Ipv6Addr, TcpListener},
    os::{linux::net::SocketAddrExt as _, unix::net::UnixListener},
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{SessionId, SignalName};
use cynode_client::OutputQuery;
use cynode_tests::{World, exec, on_every_runtime, sh};

use super::arena::Arena;

on_every_runtime!(no_socket_leads_out_of_a_sandbox);

/// The addresses of this host, in both families.
fn host_addresses() -> Result<Vec<String>> {
    let mut addresses = Vec::new();
    let mut candidate = "";
    let trie = fs_err::read_to_string("/proc/net/fib_trie")?;
    for line in trie.lines().map(str::trim) {
        if let Some((_, address)) = line.split_once("|-- ") {
            candidate = address;
        } else if line == "/32 host LOCAL" && !addresses.iter().any(|known| known == candidate) {
            addresses.push(candidate.to_owned());
        }
    }
    for line in fs_err::read_to_string("/proc/net/if_inet6")
        .unwrap_or_default()
        .lines()
    {
        let digits = line.split(' ').next().unwrap_or_default();
        addresses.push(Ipv6Addr::from(u128::from_str_radix(digits, 16)?).to_string());
    }
    ensure!(!addresses.is_empty(), "this host has no address at all");
    Ok(addresses)
}

// part of: CYNAI.SANDBX.SandboxThreatModel
// invariant: no-way-out
async fn no_socket_leads_out_of_a_sandbox(world: World) -> Result<()> {
    let mut arena = Arena::new(world, "network").await?;
    arena.copy_attempts_program(arena.attacker).await?;
    arena.copy_attempts_program(arena.neighbour).await?;
    let listener = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0"))?;
    listener.set_nonblocking(true)?;
    let port = listener.local_addr()?.port();
    let unique = uuid::Uuid::new_v4().simple().to_string();
    let (on_host, in_sandbox) = (
        format!("cynode-host-{unique}"),
        format!("cynode-sandbox-{unique}"),
    );
    let abstract_listener = UnixListener::bind_addr(
        &std::os::unix::net::SocketAddr::from_abstract_name(&on_host)?,
    )?;
    abstract_listener.set_nonblocking(true)?;
    // A listener in another sandbox is unreachable too, though that sandbox's own processes reach
    // it.
    let neighbour = arena.neighbour;
    let waiting = arena
        .start_and_wait_for(
            neighbour,
            &["./attempts", "listen", &in_sandbox],
            "listening",
        )
        .await?;

    let mut argv = vec!["./attempts".to_owned(), "network".to_owned()];
    argv.extend(
        host_addresses()?
            .iter()
            .map(|address| format!("reach {address} {port}")),
    );
    argv.extend(
        [
            "169.254.169.254 80",
            "fd00:ec2::254 80",
            "1.1.1.1 53",
            "8.8.8.8 53",
            "2606:4700:4700::1111 443",
            "255.255.255.255 67",
            "224.0.0.251 5353",
            "ff02::fb 5353",
        ]
        .map(|target| format!("reach {target}")),
    );
    argv.extend([
        format!("abstract {on_host}"),
        format!("abstract {in_sandbox}"),
    ]);
    let sockets = [
        "/run/podman/podman.sock",
        "/var/run/docker.sock",
        "/run/dbus/system_bus_socket",
        "/run/systemd/private",
        "/dev/log",
    ];
    argv.extend(sockets.map(|path| format!("unix {path}")));
    let engine = arena.world.engine_socket().display().to_string();
    argv.push(format!("unix {engine}"));
    arena.name(engine, "the engine's own socket");
    arena.name(on_host, "of the host");
    arena.name(in_sandbox.as_str(), "of the neighbour");
    arena.name(format!(" {port}"), ", a port of the host");
    let (client, attacker) = (arena.client.clone(), arena.attacker);
    let printed = arena
        .attack(async { Ok(client.exec(attacker, &exec(argv)).await?.stdout) })
        .await?;
    let count = arena.expect_lines(&printed, "")?;
    ensure!(count > 120, "{count} attempts only");

    ensure!(
        listener
            .accept()
            .is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock),
        "a sandbox reached the host's port"
    );
    ensure!(
        abstract_listener
            .accept()
            .is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock),
        "a sandbox reached the host's abstract socket"
    );
    let came = |id: SessionId| {
        let client = client.clone();
        async move {
            let page = client
                .exec_output(id, waiting, &OutputQuery::default())
                .await?;
            Ok::<_, anyhow::Error>(
                page.chunks
                    .iter()
                    .filter_map(|chunk| chunk.data.as_deref())
                    .any(|text| text.contains("came")),
            )
        }
    };
    ensure!(
        !came(neighbour).await?,
        "a sandbox reached the neighbour's abstract socket"
    );
    // The listener works: processes inside its sandbox connect.
    let inside = client
        .exec(
            neighbour,
            &exec(["./attempts", "network", &format!("abstract {in_sandbox}")]),
        )
        .await?
        .stdout;
    ensure!(
        inside
            .lines()
            .any(|line| line.contains("abstract") && line.contains("succeeded")),
        "{inside}"
    );
    cynode_tests::eventually(
        "the listener sees its own sandbox",
        std::time::Duration::from_secs(10),
        async || came(neighbour).await,
    )
    .await?;
    client
        .signal_exec(
            neighbour,
            waiting,
            SignalName::KILL,
            cynode_api::SignalScope::Tree,
        )
        .await
        .context("ending the listener")?;

    for (attempt, script) in [
        (
            "a name by DNS",
            "timeout 20 nslookup example.com && echo REACHED",
        ),
        (
            "a name by a public server",
            "timeout 20 nslookup example.com 8.8.8.8 && echo REACHED",
        ),
        (
            "metadata by HTTP",
            "timeout 20 wget -T 5 -qO- http://169.254.169.254/latest/meta-data/ && echo REACHED",
        ),
    ] {
        arena
            .script(attempt, script, |seen| !seen.contains("REACHED"))
            .await?;
    }
    let devices = client
        .exec(
            attacker,
            &sh("ls /sys/class/net; tail -n +2 /proc/net/route | wc -l"),
        )
        .await?
        .stdout;
    ensure!(devices == "lo\n0\n", "{devices}");
    arena.end().await
}
