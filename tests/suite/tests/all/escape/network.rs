//! Ways out by socket: every family, every address of this host, names, abstract sockets.

use std::{
    net::{Ipv6Addr, TcpListener},
    os::{linux::net::SocketAddrExt as _, unix::net::UnixListener},
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{SessionId, SignalName};
use cynode_client::OutputQuery;
use cynode_tests::{exec, sh};

use super::arena::{Arena, LIMITED, RUNTIMES};

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
    for line in fs_err::read_to_string("/proc/net/if_inet6").unwrap_or_default().lines() {
        let digits = line.split(' ').next().unwrap_or_default();
        addresses.push(Ipv6Addr::from(u128::from_str_radix(digits, 16)?).to_string());
    }
    ensure!(!addresses.is_empty(), "this host has no address at all");
    Ok(addresses)
}

// proves: CYNAI.SANDBX.SandboxThreatModel
#[tokio::test]
async fn no_socket_leads_out_of_a_sandbox() -> Result<()> {
    for runtime in RUNTIMES {
        let mut arena = Arena::new(runtime, "network").await?;
        arena.equip(arena.attacker).await?;
        arena.equip(arena.neighbour).await?;
        let listener = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0"))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let unique = uuid::Uuid::new_v4().simple().to_string();
        let (on_host, in_sandbox) = (format!("cynode-host-{unique}"), format!("cynode-sandbox-{unique}"));
        let abstract_listener = UnixListener::bind_addr(&std::os::unix::net::SocketAddr::from_abstract_name(&on_host)?)?;
        abstract_listener.set_nonblocking(true)?;
        // In another sandbox too; its own processes do reach it.
        let neighbour = arena.neighbour;
        let waiting = arena.until_said(neighbour, &["./attempts", "listen", &in_sandbox], "listening").await?;

        let mut argv = vec!["./attempts".to_owned(), "network".to_owned()];
        argv.extend(host_addresses()?.iter().map(|address| format!("reach {address} {port}")));
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
        argv.extend([format!("abstract {on_host}"), format!("abstract {in_sandbox}")]);
        let sockets = ["/run/podman/podman.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/private", "/dev/log"];
        argv.extend(sockets.map(|path| format!("unix {path}")));
        argv.push(format!("unix {}", arena.world.state_dir().join("worker/podman/podman.sock").display()));
        let (client, attacker) = (arena.client.clone(), arena.attacker);
        let printed = arena.attack(async { Ok(client.exec(attacker, &exec(argv)).await?.stdout) }).await?;
        let count = arena.expect_lines(&printed, "")?;
        ensure!(count > 120, "{count} attempts only");

        ensure!(listener.accept().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "somebody reached the host's port");
        ensure!(abstract_listener.accept().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "somebody reached the host's abstract socket");
        let came = |id: SessionId| {
            let client = client.clone();
            async move {
                let page = client.exec_output(id, waiting, &OutputQuery::default()).await?;
                Ok::<_, anyhow::Error>(page.chunks.iter().filter_map(|chunk| chunk.data.as_deref()).any(|text| text.contains("came")))
            }
        };
        ensure!(!came(neighbour).await?, "somebody reached the neighbour's abstract socket");
        // The listener is real: whoever is inside gets through.
        let inside = client.exec(neighbour, &exec(["./attempts", "network", &format!("abstract {in_sandbox}")])).await?.stdout;
        ensure!(inside.lines().any(|line| line.contains("abstract") && line.contains("succeeded")), "{inside}");
        cynode_tests::eventually("the listener sees its own sandbox", std::time::Duration::from_secs(10), async || came(neighbour).await).await?;
        client.signal_exec(neighbour, waiting, SignalName::KILL, cynode_api::SignalScope::Tree).await.context("ending the listener")?;

        for (attempt, script) in [
            ("a name by DNS", "timeout 20 nslookup example.com && echo REACHED"),
            ("a name by a public server", "timeout 20 nslookup example.com 8.8.8.8 && echo REACHED"),
            ("metadata by HTTP", "timeout 20 wget -T 5 -qO- http://169.254.169.254/latest/meta-data/ && echo REACHED"),
        ] {
            arena.script(attempt, script, |seen| !seen.contains("REACHED")).await?;
        }
        let devices = client.exec(attacker, &sh("ls /sys/class/net; tail -n +2 /proc/net/route | wc -l")).await?.stdout;
        ensure!(devices == "lo\n0\n", "{devices}");
        arena.end().await?;
    }
    Ok(())
}

/// Remotes that nobody may reach; none of them is ours.
const REMOTES: &[&str] = &[
    "https://192.0.2.1/a.git",
    "http://192.0.2.1/a.git",
    "git://192.0.2.1/a.git",
    "ssh://git@192.0.2.1/a.git",
    "git@192.0.2.1:a.git",
    "https://example.com/a.git",
];

// proves: CYNAI.SANDBX.SandboxThreatModel
#[tokio::test]
async fn git_reaches_no_remote_and_works_within() -> Result<()> {
    for runtime in LIMITED {
        let mut request = cynode_tests::session();
        request.image_ref = cynode_tests::RUNNER.to_owned();
        let mut arena = Arena::with(runtime, "git", request, &[]).await?;
        let prepared = arena
            .client
            .exec(
                arena.attacker,
                &sh("set -e; export GIT_CONFIG_GLOBAL=/workspace/config
                    git config --global user.name a; git config --global user.email a; git config --global protocol.file.allow always
                    git init -q -b main origin; cd origin; echo one > file; git add .; git commit -qm one; cd ..
                    git clone -q file:///workspace/origin copy; cd copy; git fetch -q; git submodule add -q file:///workspace/origin sub; cat sub/file
                    git push -q origin HEAD:refs/heads/other; git -C ../origin rev-parse -q --verify other >/dev/null; echo within"),
            )
            .await?;
        ensure!(prepared.stdout == "one\nwithin\n", "{prepared:?}");
        for remote in REMOTES {
            let git = "export GIT_CONFIG_GLOBAL=/workspace/config GIT_TERMINAL_PROMPT=0; cd /workspace/copy; git -c protocol.allow=always";
            for (what, command) in [
                ("clone", format!("clone -q {remote} /tmp/c")),
                ("fetch", format!("fetch -q {remote}")),
                ("push", format!("push -q {remote} HEAD:refs/heads/x")),
                ("ls-remote", format!("ls-remote {remote}")),
                ("submodule add", format!("submodule add -q {remote} s")),
            ] {
                let script = format!("{git} {command} && echo REACHED");
                arena.script(&format!("git {what} {remote}"), &script, |seen| !seen.contains("REACHED")).await?;
            }
        }
        // Git LFS asks a server of objects by HTTP before anything else; that server can't be reached, with or without its program.
        let lfs = "cd /workspace/copy; git config lfs.url http://192.0.2.1/lfs; git lfs push origin --all && echo REACHED; \
                   python3 -c 'import urllib.request; urllib.request.urlopen(\"http://192.0.2.1/lfs/objects/batch\", b\"{}\", 5)' && echo REACHED";
        arena.script("git LFS", lfs, |seen| !seen.contains("REACHED")).await?;
        arena.end().await?;
    }
    Ok(())
}
