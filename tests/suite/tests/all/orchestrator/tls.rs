//! Machines that authenticate one another by certificates: everything works as without TLS, and
//! wrong certificates are refused.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use cynode_api::{JobState, NodeState, UserSessionCreate};
use cynode_client::{PtyMessage, PtyOpen, Trust, UserClient};
use cynode_tests::{ControlPlane, Options, World, eventually, sh};

use super::{
    nodes::{Fleet, TIMEOUT, free_address, job, run_to_end, session_with_labels, wait_for_node},
    stack::Stack,
};
use crate::{
    api::listener::certificates,
    cli::{cynode, run},
};

/// This machine's address for others, if it has one besides loopback. Sends nothing.
fn own_address() -> Option<std::net::IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    socket
        .local_addr()
        .ok()
        .map(|address| address.ip())
        .filter(|address| !address.is_loopback() && !address.is_unspecified())
}

#[tokio::test]
async fn metrics_need_a_token_from_beyond_this_machine_on_both_ports() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let file = control_plane.world.directory().join("metrics.token");
    let listen = [
        ("listen", "0.0.0.0:0"),
        ("control_listen", "0.0.0.0:0"),
        ("insecure_listen", "true"),
    ];
    let orchestrator = control_plane
        .orchestrator(
            "",
            &[
                &listen[..],
                &[("metrics_token_file", file.to_str().context("a path")?)],
            ]
            .concat(),
        )
        .await?;
    let http = reqwest::Client::builder().no_proxy().build()?;
    let admin = orchestrator.token()?;
    let user = |kind: &str| serde_json::json!({"kind": kind, "user": "ann"});
    http.post(format!("{}/v1/users", orchestrator.url()?))
        .bearer_auth(&admin)
        .json(&serde_json::json!({"name": "ann"}))
        .send()
        .await?
        .error_for_status()?;
    let made = http
        .post(format!("{}/v1/tokens", orchestrator.url()?))
        .bearer_auth(&admin)
        .json(&user("user"))
        .send()
        .await?
        .error_for_status()?;
    let ann = made.json::<serde_json::Value>().await?["token"]
        .as_str()
        .context("a token")?
        .to_owned();
    let scraper = fs_err::read_to_string(&file)?.trim().to_owned();
    for url in [orchestrator.url()?, orchestrator.control_url()?] {
        let port = url.rsplit(':').next().context("a port")?.to_owned();
        let query = async |host: &str, proxied: bool, token: Option<&str>| -> Result<u16> {
            let mut request = http.get(format!("http://{host}:{port}/metrics"));
            if proxied {
                request = request.header("x-forwarded-for", "192.0.2.1");
            }
            if let Some(token) = token {
                request = request.bearer_auth(token);
            }
            Ok(request.send().await?.status().as_u16())
        };
        assert_eq!(query("127.0.0.1", false, None).await?, 200, "{url}");
        let beyond = own_address().map(|address| (address.to_string(), false));
        for (host, proxied) in [("127.0.0.1".to_owned(), true)].into_iter().chain(beyond) {
            for (token, status) in [
                (None, 401),
                (Some("cyn_wrong"), 401),
                (Some(ann.as_str()), 401),
                (Some(admin.as_str()), 200),
                (Some(scraper.as_str()), 200),
            ] {
                assert_eq!(
                    query(&host, proxied, token).await?,
                    status,
                    "{host} {url} {token:?}"
                );
            }
        }
    }
    // The token reads metrics and nothing else.
    let tasks = http
        .get(format!("{}/v1/tasks", orchestrator.url()?))
        .bearer_auth(&scraper)
        .send()
        .await?;
    assert_eq!(tasks.status().as_u16(), 401);
    Ok(())
}

/// An authority, and a certificate for this machine that it signed.
struct SignedCertificate {
    authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl SignedCertificate {
    fn new(world: &World, name: &str) -> Result<Self> {
        let directory = world.directory().join(name);
        fs_err::create_dir_all(&directory)?;
        let (authority, certificate, key) = certificates(&directory)?;
        Ok(Self {
            authority,
            certificate,
            key,
        })
    }
}

fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

/// All addresses of the machine, with the port of a given one.
fn open_to_all(address: &str) -> String {
    address.replace("127.0.0.1", "0.0.0.0")
}

/// Settings of a worker that listens on all addresses with this certificate and trusts this
/// authority.
fn secured(
    options: Options,
    address: &str,
    signed: &SignedCertificate,
    authority: &Path,
) -> Options {
    options
        .set("listen", &format!("{:?}", open_to_all(address)))
        .set("api_url", &format!("{:?}", format!("https://{address}")))
        .set("tls.cert", &quoted(&signed.certificate))
        .set("tls.key", &quoted(&signed.key))
        .set("tls.ca", &quoted(authority))
}

#[tokio::test]
// invariant: tls
async fn everything_goes_over_tls_and_a_wrong_certificate_is_refused() -> Result<()> {
    let files = World::new()?;
    let (ours, theirs) = (
        SignedCertificate::new(&files, "ours")?,
        SignedCertificate::new(&files, "theirs")?,
    );
    let (api, control) = (free_address()?, free_address()?);
    let [certificate, key, authority] =
        [&ours.certificate, &ours.key, &ours.authority].map(|path| path.display().to_string());
    let (listen, control_listen) = (open_to_all(&api), open_to_all(&control));
    let fleet = Fleet::with(&[
        ("listen", &listen),
        ("control_listen", &control_listen),
        ("tls.cert", &certificate),
        ("tls.key", &key),
        ("tls.ca", &authority),
    ])
    .await?;
    let (url, control) = (format!("https://{api}"), format!("https://{control}"));
    let token = fleet.orchestrator.token()?;
    let client = UserClient::trusting(&url, &token, Trust::Only(&ours.authority))?;
    let near = free_address()?;
    let _near = fleet
        .control_plane
        .world
        .worker(&secured(
            fleet.options("near", &control),
            &near,
            &ours,
            &ours.authority,
        ))
        .await?;
    let node = wait_for_node(&client, "near", |node| node.state == NodeState::Ready).await?;
    assert_eq!(node.api_url, format!("https://{near}"));

    // Commands, terminals and jobs.
    let sessions = client.sessions();
    let id = sessions
        .create_user_session(&UserSessionCreate {
            pty_allowed: Some(true),
            ..session_with_labels(&[])
        })
        .await?
        .session_id;
    assert_eq!(
        sessions.exec(id, &sh("echo through; exit 4")).await?.stdout,
        "through\n"
    );
    let mut pty = sessions
        .open_pty(
            id,
            &PtyOpen {
                cols: 90,
                rows: 20,
                argv: vec!["/bin/sh".to_owned()],
            },
        )
        .await?;
    pty.write("echo $((6 * 7))-seen; exit 5\n").await?;
    let mut seen = String::new();
    let reading = async {
        loop {
            match pty.next().await?.context("an end")? {
                PtyMessage::Data(data) => seen.push_str(&String::from_utf8_lossy(&data)),
                PtyMessage::Exit { exit_code, .. } => return Ok::<_, anyhow::Error>(exit_code),
                PtyMessage::Ready => {}
                PtyMessage::Error { code, detail } => anyhow::bail!("{code}: {detail}"),
            }
        }
    };
    assert_eq!(tokio::time::timeout(TIMEOUT, reading).await??, Some(5));
    assert!(seen.contains("42-seen"), "{seen}");
    let done = run_to_end(&client, &job("echo done; exit 6", &[])).await?;
    assert_eq!(
        (done.state, done.exit_code, done.output.stdout.as_str()),
        (JobState::Failed, Some(6), "done\n")
    );

    // The command line trusts the authority in its settings.
    let by_hand = |arguments: &[&str]| {
        let mut command = cynode(&fleet.control_plane.world)?;
        run(
            command
                .env("CYNODE_URL", &url)
                .env("CYNODE_TOKEN", &token)
                .args(arguments),
            b"",
        )
    };
    let ran = by_hand(&[
        "run",
        "--memory",
        "64m",
        "--ca",
        &authority,
        "--",
        "sh",
        "-c",
        "echo hi; exit 3",
    ])?;
    assert_eq!(
        (ran.code, ran.text().as_str()),
        (Some(3), "hi\n"),
        "{ran:?}"
    );
    for arguments in [
        vec!["node", "list"],
        vec![
            "node",
            "list",
            "--ca",
            theirs.authority.to_str().context("a path")?,
        ],
    ] {
        let refused = by_hand(&arguments)?;
        assert!(
            refused.failure() == (69, "unreachable".to_owned())
                && refused.stderr.contains("certificate"),
            "{refused:?}"
        );
    }

    // A worker with a foreign certificate joins, because it knows the key; but the orchestrator
    // refuses to call it, and work goes elsewhere.
    let other = World::new()?;
    let far = free_address()?;
    let mut worker = other.start_worker(&secured(
        fleet.options("far", &control),
        &far,
        &theirs,
        &ours.authority,
    ))?;
    let node = wait_for_node(&client, "far", |node| node.state == NodeState::Unreachable).await?;
    assert!(
        node.reason
            .as_ref()
            .is_some_and(|reason| reason.contains("certificate")),
        "{node:?}"
    );
    let log = fs_err::read_to_string(fleet.orchestrator.log())?;
    assert!(
        log.lines().any(
            |line| line.contains("A node is unreachable from this orchestrator")
                && line.contains("certificate")
        ),
        "{log}"
    );
    for _ in 0..3 {
        let session = sessions
            .create_user_session(&session_with_labels(&[]))
            .await?;
        assert_ne!(session.node_id, node.id);
        assert_eq!(
            run_to_end(&client, &job("echo done", &[])).await?.state,
            JobState::Completed
        );
    }
    worker.kill()?;

    // A worker that doesn't trust the orchestrator's certificate never joins, and reports why.
    fs_err::remove_dir_all(other.state_dir())?;
    let mut worker = other.start_worker(&secured(
        fleet.options("doubting", &control),
        &free_address()?,
        &ours,
        &theirs.authority,
    ))?;
    let is_logged = async || {
        Ok(fs_err::read_to_string(worker.log())?.lines().any(|line| {
            line.contains("Failed to register or send a heartbeat") && line.contains("certificate")
        }))
    };
    eventually("the worker logs the reason", TIMEOUT, is_logged).await?;
    assert!(
        client
            .nodes()
            .await?
            .iter()
            .all(|node| node.name != "doubting")
    );
    worker.kill()
}

#[tokio::test]
// invariant: tls
async fn no_secret_leaves_the_machine_without_tls_unless_allowed() -> Result<()> {
    let world = World::new()?;
    let ours = SignedCertificate::new(&world, "ours")?;
    let authority = ours.authority.display().to_string();
    let refused = |role: &str, config: &[&str], settings: &[(&str, &str)], is_logged: &str| {
        let mut command = cynode(&world)?;
        command.arg(role).args(config);
        for (key, value) in settings {
            command.arg("--set").arg(format!("{role}.{key}={value}"));
        }
        let ran = run(&mut command, b"")?;
        anyhow::ensure!(
            ran.failure() == (64, "config".to_owned()) && ran.stderr.contains(is_logged),
            "{settings:?}: {ran:?}"
        );
        Ok(())
    };
    for (settings, is_logged) in [
        (vec![("listen", "0.0.0.0:0")], "tls.cert"),
        (vec![("control_listen", "0.0.0.0:0")], "tls.cert"),
        (
            vec![("tls.cert", authority.as_str())],
            "tls.cert and tls.key",
        ),
        (vec![("tls.ca", "/nowhere.pem")], "/nowhere.pem"),
        (vec![("tls.ca", "/etc/hostname")], "/etc/hostname"),
    ] {
        refused("orchestrator", &[], &settings, is_logged)?;
    }
    let config = world.config(&Options::default())?;
    // A worker sends its keys to nobody in plain text, and announces its address.
    for (settings, is_logged) in [
        (
            vec![("orchestrator_url", "http://192.0.2.1:12082")],
            "worker.orchestrator_url",
        ),
        (
            vec![("orchestrator_url", "http://127.0.0.1.example:12082")],
            "worker.orchestrator_url",
        ),
        (
            vec![
                ("orchestrator_url", "https://192.0.2.1:12082"),
                ("listen", "0.0.0.0:0"),
            ],
            "worker.api_url",
        ),
        (vec![("tls.ca", "/nowhere.pem")], "/nowhere.pem"),
    ] {
        refused(
            "worker",
            &["--config", config.to_str().context("a path")?],
            &settings,
            is_logged,
        )?;
    }
    Ok(())
}

#[tokio::test]
// invariant: tls
async fn a_stack_with_certificates_is_usable_locally_without_further_settings() -> Result<()> {
    let stack = Stack::new()?;
    let ours = SignedCertificate::new(&stack.world, "ours")?;
    let mut arguments = Vec::new();
    for role in ["orchestrator", "worker"] {
        let [certificate, key, authority] =
            [&ours.certificate, &ours.key, &ours.authority].map(|path| path.display().to_string());
        for (name, value) in [
            ("cert", certificate),
            ("key", key),
            ("ca", authority),
            ("name", "127.0.0.1".to_owned()),
        ] {
            arguments.extend(["--set".to_owned(), format!("{role}.tls.{name}={value}")]);
        }
    }
    arguments
        .extend(["--api-listen", "0.0.0.0:0", "--worker-listen", "0.0.0.0:0"].map(str::to_owned));
    let url = stack.up_with(&arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    assert_eq!(
        stack.endpoints()?["ca"],
        ours.authority.display().to_string()
    );
    stack.run(&["task", "create", "safe"])?.success()?;
    let status = stack.run(&["status", "--output", "json"])?.json()?;
    assert_eq!(status["ready"], true, "{status}");
    let nodes = stack.run(&["node", "list", "--output", "json"])?.json()?;
    assert_eq!(
        (&nodes["items"][0]["state"], &nodes["items"][0]["api_url"]),
        (&"ready".into(), &stack.endpoints()?["worker"])
    );
    let doubted = run(
        stack
            .command()?
            .args(["task", "list", "--ca", "/nowhere.pem"]),
        b"",
    )?;
    assert!(
        doubted.code != Some(0) && doubted.stderr.contains("/nowhere.pem"),
        "{doubted:?}"
    );
    stack.down()?;
    stack.assert_clean().await
}
