//! Where a worker listens, what keeps it from starting, and the lock on its state directory.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

use anyhow::Result;
use cynode_client::SessionFilter;
use cynode_tests::{Answer, Certificates, Http, Options, World, eventually};
use http::Method;

/// Runs `cynode worker` until it exits.
fn worker(world: &World, config: &Path, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new("timeout");
    command
        .args(["--signal", "KILL", "60"])
        .arg(World::cynode()?)
        .arg("worker")
        .arg("--state-dir")
        .arg(world.state_dir())
        .arg("--config")
        .arg(config)
        .args(arguments);
    Ok(command
        .env_remove("CYNODE_URL")
        .env_remove("CYNODE_TOKEN")
        .output()?)
}

fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

/// A certificate for 127.0.0.1 and the authority that signed it: (authority, certificate, key).
pub(crate) fn certificates(directory: &Path) -> Result<(PathBuf, PathBuf, PathBuf)> {
    let created = Certificates::create(directory, "IP:127.0.0.1")?;
    Ok((created.authority, created.certificate, created.key))
}

#[tokio::test]
// invariant: fail-closed
async fn an_invalid_configuration_exits_with_64_and_the_reason() -> Result<()> {
    let world = World::new()?;
    let (_, certificate, key) = certificates(world.directory())?;
    let (certificate, key, missing) = (
        quoted(&certificate),
        quoted(&key),
        quoted(Path::new("/nowhere.pem")),
    );
    let any = "\"0.0.0.0:0\"";
    for (settings, said) in [
        (
            vec![("listen", any)],
            vec!["0.0.0.0", "tls.cert", "--insecure-listen"],
        ),
        (
            vec![("listen", "\"[::]:0\"")],
            vec!["tls.cert", "--insecure-listen"],
        ),
        (
            vec![("listen", any), ("tls.cert", certificate.as_str())],
            vec!["tls.cert and tls.key"],
        ),
        (
            vec![("tls.key", key.as_str())],
            vec!["tls.cert and tls.key"],
        ),
        (
            vec![("tls.cert", missing.as_str()), ("tls.key", key.as_str())],
            vec!["/nowhere.pem"],
        ),
        (
            vec![("tls.cert", key.as_str()), ("tls.key", key.as_str())],
            vec!["cert"],
        ),
        (vec![("listen", "\"somewhere\"")], vec!["worker.listen"]),
        (vec![("colour", "1")], vec!["colour"]),
        (
            vec![("max_sandboxes", "\"many\"")],
            vec!["worker.max_sandboxes"],
        ),
        (vec![("max_sandboxes", "0")], vec!["worker.max_sandboxes"]),
        (
            vec![("exec_via", "\"magic\"")],
            vec!["worker.exec_via", "magic"],
        ),
        (vec![("listen", "= =")], vec!["TOML"]),
    ] {
        let options = settings
            .iter()
            .fold(Options::default(), |options, (key, value)| {
                options.set(key, value)
            });
        let output = worker(&world, &world.config(&options)?, &[])?;
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{settings:?}: {text}");
        assert!(
            text.contains("cynode: error[config]:") && said.iter().all(|part| text.contains(part)),
            "{settings:?}: {text}"
        );
    }
    let config = world.config(&Options::default())?;
    for (arguments, said) in [
        (vec!["--set", "colour=1"], "colour"),
        (vec!["--worker-listen", "0.0.0.0:0"], "0.0.0.0"),
        (vec!["--set", "novalue"], "KEY=VALUE"),
        (vec!["--colour"], "--colour"),
    ] {
        let output = worker(&world, &config, &arguments)?;
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(64) && text.contains(said),
            "{arguments:?}: {text}"
        );
    }
    fs_err::write(&config, "[wörker]\nx = 1\n")?;
    assert_eq!(worker(&world, &config, &[])?.status.code(), Some(64));
    let output = worker(&world, Path::new("/nowhere.toml"), &[])?;
    assert!(
        output.status.code() == Some(64)
            && String::from_utf8_lossy(&output.stderr).contains("/nowhere.toml"),
        "{output:?}"
    );
    assert!(
        !world.state_dir().join("worker/url").exists(),
        "one of them listened"
    );
    Ok(())
}

#[tokio::test]
// invariant: fail-closed
async fn beyond_loopback_a_worker_requires_tls_unless_plain_text_is_allowed() -> Result<()> {
    let world = World::new()?;
    let (authority, certificate, key) = certificates(world.directory())?;
    let options = Options::default()
        .set("listen", "\"0.0.0.0:0\"")
        .set("tls.cert", &quoted(&certificate))
        .set("tls.key", &quoted(&key));
    let mut running = world.start_worker(&options)?;
    // Installed once per process; a second call has no effect.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let trusting = reqwest::Client::builder()
        .no_proxy()
        .tls_certs_only(reqwest::Certificate::from_pem_bundle(&fs_err::read(
            &authority,
        )?)?)
        .build()?;
    let base = async || {
        let url = running.url().unwrap_or_default();
        Ok::<_, anyhow::Error>(url.replace("0.0.0.0", "127.0.0.1"))
    };
    eventually("the worker is ready", Duration::from_secs(60), async || {
        Ok(trusting
            .get(format!("{}/readyz", base().await?))
            .send()
            .await
            .is_ok_and(|answer| answer.status().is_success()))
    })
    .await?;
    let base = base().await?;
    assert!(base.starts_with("https://"), "{base}");
    let list = format!("{base}/v1/worker/sessions");
    assert_eq!(Answer::of(trusting.get(&list)).await?.status, 401);
    assert_eq!(
        Answer::of(trusting.get(&list).bearer_auth(running.token()?))
            .await?
            .status,
        200
    );
    // A client that doesn't trust the authority fails, and so does plain text.
    assert!(
        reqwest::Client::builder()
            .no_proxy()
            .build()?
            .get(&list)
            .bearer_auth("x")
            .send()
            .await
            .is_err()
    );
    assert!(
        reqwest::Client::builder()
            .no_proxy()
            .build()?
            .get(list.replace("https", "http"))
            .send()
            .await
            .is_err()
    );
    // A connection that never completes its handshake blocks nobody.
    let address = base.trim_start_matches("https://").to_owned();
    let silent: Vec<_> = (0..20)
        .map(|_| std::net::TcpStream::connect(&address))
        .collect::<std::io::Result<_>>()?;
    let begun = Instant::now();
    assert_eq!(
        Answer::of(trusting.get(&list).bearer_auth(running.token()?))
            .await?
            .status,
        200
    );
    assert!(
        begun.elapsed() < Duration::from_secs(3),
        "{:?}",
        begun.elapsed()
    );
    drop(silent);

    // The command line trusts the authority in its settings.
    let cynode = |authority: Option<&Path>| {
        let mut command = Command::new(World::cynode()?);
        command
            .args(["session", "list", "--output", "json"])
            .env("CYNODE_URL", &base)
            .env("CYNODE_TOKEN", running.token()?)
            .env("CYNODE_STATE_DIR", world.directory());
        if let Some(authority) = authority {
            command.env("CYNODE_CA_FILE", authority);
        }
        Ok::<_, anyhow::Error>(command.output()?)
    };
    let listed = cynode(Some(&authority))?;
    assert!(
        listed.status.success(),
        "{}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let refused = cynode(None)?;
    assert_eq!(
        refused.status.code(),
        Some(69),
        "{}",
        String::from_utf8_lossy(&refused.stderr)
    );
    running.kill()?;

    let plain = world
        .worker(
            &Options::default()
                .set("listen", "\"0.0.0.0:0\"")
                .set("insecure_listen", "true"),
        )
        .await?;
    assert!(plain.url()?.starts_with("http://0.0.0.0:"));
    Ok(())
}

#[tokio::test]
// invariant: truth-in-the-database
async fn only_one_worker_uses_a_state_directory() -> Result<()> {
    let world = World::new()?;
    let first = world.worker(&Options::default()).await?;
    let second = worker(&world, &world.config(&Options::default())?, &[])?;
    let text = String::from_utf8_lossy(&second.stderr);
    assert!(
        second.status.code() == Some(70)
            && text.contains(&world.state_dir().display().to_string())
            && text.contains("another worker"),
        "{:?}: {text}",
        second.status
    );
    assert!(
        first
            .client()?
            .list_sessions(&SessionFilter::default())
            .await?
            .is_empty(),
        "the first worker stopped"
    );

    // Two workers can't share an address: the second names the address that is taken.
    let other = World::new()?;
    let address = first.url()?.trim_start_matches("http://").to_owned();
    let second = worker(
        &other,
        &other.config(&Options::default().set("listen", &format!("{address:?}")))?,
        &[],
    )?;
    let text = String::from_utf8_lossy(&second.stderr);
    assert!(
        second
            .status
            .code()
            .is_some_and(|code| code != 0 && code != 64)
            && text.contains(&address),
        "{:?}: {text}",
        second.status
    );
    assert_eq!(
        Answer::of(Http::new(&first)?.request(Method::GET, "/readyz"))
            .await?
            .status,
        200
    );
    Ok(())
}
