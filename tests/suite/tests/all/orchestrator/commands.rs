//! The commands that use an orchestrator. Commands that need a node are tested elsewhere.

use std::{ffi::OsStr, io::BufRead as _, process::Stdio};

use anyhow::{Context as _, Result};
use cynode_tests::{ControlPlane, RunningOrchestrator};
use serde_json::{Value, json};

use crate::cli::{CommandResult, cynode, run};

/// An orchestrator without nodes, and a command line configured for it.
struct OrchestratorCli {
    orchestrator: RunningOrchestrator,
    control_plane: ControlPlane,
}

impl OrchestratorCli {
    async fn new() -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let orchestrator = control_plane.orchestrator("", &[]).await?;
        Ok(Self {
            orchestrator,
            control_plane,
        })
    }

    fn command(&self) -> Result<std::process::Command> {
        let mut command = cynode(&self.control_plane.world)?;
        command
            .env("CYNODE_URL", self.orchestrator.url()?)
            .env("CYNODE_TOKEN", self.orchestrator.token()?);
        Ok(command)
    }

    fn run(&self, arguments: &[impl AsRef<OsStr>]) -> Result<CommandResult> {
        run(self.command()?.args(arguments), b"")
    }

    fn json(&self, arguments: &[&str]) -> Result<Value> {
        self.run(&[arguments, &["--output", "json"]].concat())?
            .json()
    }

    /// Runs a command and returns its output without the final newline.
    fn success(&self, arguments: &[&str]) -> Result<String> {
        Ok(self.run(arguments)?.success()?.trim_end().to_owned())
    }
}

#[tokio::test]
async fn tasks_are_made_listed_and_shown() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    let made = cli.run(&[
        "task",
        "create",
        "Write the report",
        "--description",
        "all of it",
        "--requirement",
        "short",
        "--criterion",
        "it is read",
    ])?;
    let id = made.text().trim_end().to_owned();
    assert!(
        made.code == Some(0)
            && id.parse::<cynode_api::TaskId>().is_ok()
            && made.stderr.contains("open"),
        "{made:?}"
    );
    let shown = cli.json(&["task", "show", &id])?;
    assert_eq!(
        (
            &shown["name"],
            &shown["requirements"],
            &shown["acceptance_criteria"]
        ),
        (
            &json!("Write the report"),
            &json!(["short"]),
            &json!(["it is read"])
        )
    );
    let table = cli.success(&["task", "show", &id])?;
    assert!(
        table.contains("name        Write the report") && table.contains("all of it"),
        "{table}"
    );
    assert_eq!(
        cli.json(&["task", "list"])?["items"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    let table = cli.success(&["task", "list"])?;
    assert!(
        table.starts_with("TASK") && table.contains(&id) && table.contains("admin"),
        "{table}"
    );
    let missing = cli.run(&["task", "show", "01890000-0000-7000-8000-000000000001"])?;
    assert_eq!(missing.failure(), (64, "not_found".to_owned()));

    // Control and bidirectional characters are escaped on a terminal and never sent raw; JSON has
    // the original text.
    let odd = "gpj.\u{202e}exe \u{200b}\u{2066}\u{feff}\u{e0041}";
    let escaped = "gpj.\\u{202e}exe \\u{200b}\\u{2066}\\u{feff}\\u{e0041}";
    let hidden = |text: &str| {
        text.chars()
            .any(|c| "\u{202e}\u{200b}\u{2066}\u{feff}\u{e0041}".contains(c))
    };
    let made = cli.run(&["task", "create", odd])?;
    let id = made.text().trim_end().to_owned();
    for arguments in [&["task", "list"][..], &["task", "show", &id]] {
        let table = cli.success(arguments)?;
        assert!(table.contains(escaped) && !hidden(&table), "{table:?}");
        let raw = cli.success(&[arguments, &["--output", "json"]].concat())?;
        assert!(raw.contains("gpj.\\u202eexe") && !hidden(&raw), "{raw:?}");
    }
    assert_eq!(cli.json(&["task", "show", &id])?["name"], json!(odd));
    let refused = cli.run(&["setting", "get", odd])?;
    assert!(
        refused.code != Some(0) && !hidden(&refused.stderr) && !hidden(&made.stderr),
        "{refused:?}"
    );
    Ok(())
}

// proves: REQ-SANDBX-0002
#[tokio::test]
async fn images_are_added_allowed_and_denied_by_name_id_or_reference() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    let id = cli.success(&[
        "image",
        "add",
        "registry.example/team/tools:1.2",
        "--description",
        "tools",
    ])?;
    let allowed = |cli: &OrchestratorCli| -> Result<Value> {
        Ok(cli.json(&["image", "show", "tools"])?["versions"][0]["is_allowed"].clone())
    };
    assert_eq!(allowed(&cli)?, false);
    for name in ["tools", id.as_str(), "registry.example/team/tools:1.2"] {
        cli.run(&["image", "allow", name])?.success()?;
        assert_eq!(allowed(&cli)?, true, "{name}");
        cli.run(&["image", "deny", name])?.success()?;
        assert_eq!(allowed(&cli)?, false, "{name}");
    }
    let digest = format!("sha256:{}", "ab".repeat(32));
    cli.run(&[
        "image",
        "add",
        "registry.example/team/tools:1.3",
        "--digest",
        &digest,
        "--allow",
    ])?
    .success()?;
    cli.run(&["image", "allow", "tools", "--version", "1.2"])?
        .success()?;
    cli.run(&["image", "deny", "registry.example/team/tools:1.3"])?
        .success()?;
    let table = cli.success(&["image", "list"])?;
    let row = |version: &str| {
        table
            .lines()
            .find(|line| line.contains(&format!("tools:{version}")))
            .unwrap_or_default()
            .to_owned()
    };
    assert!(
        row("1.2").contains("yes") && row("1.3").contains("no"),
        "{table}"
    );
    assert_eq!(
        cli.run(&["image", "allow", "nothing"])?.failure(),
        (64, "not_found".to_owned())
    );
    assert_eq!(
        cli.run(&["image", "allow", "tools", "--version", "9"])?
            .failure(),
        (64, "not_found".to_owned())
    );
    Ok(())
}

#[tokio::test]
async fn tokens_are_shown_once_and_good_until_they_are_revoked() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    let task = cli.success(&["task", "create", "t"])?;
    let made = cli.run(&["token", "create", "--expires", "1h"])?;
    let token = made.text().trim_end().to_owned();
    assert!(
        made.code == Some(0)
            && token.starts_with("cyn_")
            && made.stderr.contains("not shown again"),
        "{made:?}"
    );
    let as_other = |token: &str| {
        run(
            cli.command()?
                .env("CYNODE_TOKEN", token)
                .args(["task", "list"]),
            b"",
        )
    };
    assert_eq!(as_other(&token)?.code, Some(0));
    let list = cli.success(&["token", "list"])?;
    assert!(!list.contains(&token) && list.contains("valid"), "{list}");
    let tokens = cli.json(&["token", "list"])?;
    let newest = tokens["items"]
        .as_array()
        .context("items")?
        .iter()
        .max_by_key(|token| token["created_at"].to_string())
        .context("one")?["id"]
        .clone();
    let newest = newest.as_str().context("an id")?;
    let renewed = cli.run(&["token", "renew", &newest[24..], "--expires", "2h"])?;
    let token = {
        let old = token;
        assert_eq!(as_other(&old)?.failure(), (77, "unauthorized".to_owned()));
        renewed.text().trim_end().to_owned()
    };
    assert_eq!((renewed.code, as_other(&token)?.code), (Some(0), Some(0)));
    cli.run(&["token", "revoke", newest])?.success()?;
    assert_eq!(as_other(&token)?.failure(), (77, "unauthorized".to_owned()));
    assert_eq!(
        cli.run(&["token", "renew", newest])?.failure(),
        (64, "token_revoked".to_owned())
    );
    assert!(!cli.success(&["token", "list"])?.contains(newest));
    assert!(
        cli.success(&["token", "list", "--all"])?
            .contains("revoked")
    );

    // An agent's token names its purpose, and is not a user's token.
    assert_eq!(
        cli.run(&["token", "create", "--kind", "project_manager"])?
            .failure(),
        (64, "invalid_request".to_owned())
    );
    let agent = cli.success(&[
        "token",
        "create",
        "--kind",
        "project_manager",
        "--task",
        &task,
    ])?;
    assert_eq!(as_other(&agent)?.failure(), (77, "forbidden".to_owned()));
    assert_eq!(
        run(
            cli.command()?
                .env("CYNODE_TOKEN", &agent)
                .args(["event", "list"]),
            b""
        )?
        .code,
        Some(0)
    );
    Ok(())
}

#[tokio::test]
async fn settings_and_preferences_are_read_and_changed() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    assert_eq!(
        cli.success(&["setting", "get", "sandbox.default_image"])?,
        cynode_tests::IMAGE
    );
    cli.run(&[
        "setting",
        "set",
        "sandbox.default_image",
        "localhost/other:1",
    ])?
    .success()?;
    let setting = cli.json(&["setting", "get", "sandbox.default_image"])?;
    assert_eq!(
        (
            &setting["value"],
            &setting["revision"],
            &setting["updated_by"]
        ),
        (&json!("localhost/other:1"), &json!(2), &json!("admin"))
    );
    assert!(
        cli.success(&["setting", "list"])?
            .contains("localhost/other:1")
    );
    assert_eq!(
        cli.run(&["setting", "set", "sandbox.default_image", "7"])?
            .failure(),
        (64, "invalid_request".to_owned())
    );
    assert_eq!(
        cli.run(&["setting", "get", "nothing"])?.failure(),
        (64, "not_found".to_owned())
    );

    let task = cli.success(&["task", "create", "t"])?;
    let key = "agents.sandbox_agent.additional_context";
    cli.run(&["preference", "set", "--scope", "system", key, "for all"])?
        .success()?;
    cli.run(&[
        "preference",
        "set",
        "--scope",
        &format!("task:{task}"),
        key,
        "for this",
    ])?
    .success()?;
    assert_eq!(
        (
            cli.success(&["preference", "get", key])?,
            cli.success(&["preference", "get", key, "--task", &task])?
        ),
        ("for all".into(), "for this".into())
    );
    assert_eq!(
        cli.json(&["preference", "list", "--task", &task])?["items"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    let own = cli.success(&["preference", "list", "--scope", &format!("task:{task}")])?;
    assert!(
        own.contains("for this") && own.contains(&format!("task:{task}")),
        "{own}"
    );
    assert_eq!(
        cli.run(&["preference", "set", "--scope", "world", key, "x"])?
            .failure(),
        (64, "usage".to_owned())
    );
    Ok(())
}

#[tokio::test]
async fn artifacts_round_trip() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    let task = cli.success(&["task", "create", "t"])?;
    let bytes: Vec<u8> = (0..3_000_000_u32)
        .map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[2])
        .collect();
    let (file, copy) = (
        cli.control_plane.world.directory().join("in.bin"),
        cli.control_plane.world.directory().join("out.bin"),
    );
    fs_err::write(&file, &bytes)?;
    let (file, copy) = (
        file.to_str().context("a path")?,
        copy.to_str().context("a path")?,
    );
    let id = cli.success(&["artifact", "put", "--task", &task, file, "dir/my file"])?;
    cli.run(&[
        "artifact",
        "get",
        "--task",
        &task,
        "dir/my file",
        "--to",
        copy,
    ])?
    .success()?;
    assert!(fs_err::read(copy)? == bytes);
    let second = run(
        cli.command()?.args([
            "artifact",
            "put",
            "--task",
            &task,
            "-",
            "dir/my file",
            "--type",
            "text/plain",
        ]),
        b"second",
    )?
    .success()?;
    assert_ne!(second.trim_end(), id);
    assert_eq!(
        cli.run(&["artifact", "get", "--task", &task, "dir/my file"])?
            .stdout,
        b"second"
    );
    assert!(
        cli.run(&[
            "artifact",
            "get",
            "--task",
            &task,
            "dir/my file",
            "--version",
            "1"
        ])?
        .stdout
            == bytes
    );
    assert!(cli.run(&["artifact", "get", &id])?.stdout == bytes);
    let list = cli.json(&["artifact", "list", "--task", &task])?;
    let versions: Vec<&Value> = list["items"]
        .as_array()
        .context("items")?
        .iter()
        .map(|item| &item["version"])
        .collect();
    assert_eq!(versions, [2, 1], "newest first");
    assert_eq!(list["items"][0]["media_type"], "text/plain");
    assert_eq!(
        cli.run(&["artifact", "get", "--task", &task, "nothing"])?
            .failure(),
        (64, "not_found".to_owned())
    );
    assert_eq!(
        cli.run(&["artifact", "put", "--task", &task, file, "../up"])?
            .failure(),
        (64, "usage".to_owned())
    );
    Ok(())
}

#[tokio::test]
async fn without_a_node_jobs_wait_and_can_be_stopped() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    assert_eq!(
        cli.run(&["run", "--", "true"])?.failure(),
        (77, "image_not_allowed".to_owned())
    );
    cli.run(&["image", "add", cynode_tests::IMAGE, "--allow"])?
        .success()?;
    let id = cli.success(&[
        "run",
        "--detach",
        "--env",
        "A=b",
        "--timeout",
        "1m",
        "--",
        "sh",
        "-c",
        "exit 3",
    ])?;
    assert_eq!(cli.json(&["job", "show", &id])?["state"], "accepted");
    assert!(
        cli.success(&["job", "list", "--state", "accepted"])?
            .contains(&id)
    );
    assert_eq!(cli.success(&["job", "logs", &id])?, "");

    // `run` waits for its job, and Ctrl-C stops the job.
    let mut waiting = cli
        .command()?
        .args(["run", "--", "true"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let other = || -> Result<Option<String>> {
        let jobs = cli.json(&["job", "list", "--state", "accepted"])?;
        Ok(jobs["items"]
            .as_array()
            .context("items")?
            .iter()
            .filter_map(|job| job["job_id"].as_str())
            .find(|job| *job != id)
            .map(ToOwned::to_owned))
    };
    cynode_tests::eventually(
        "the job exists",
        std::time::Duration::from_secs(20),
        async || Ok(other()?.is_some()),
    )
    .await?;
    let other = other()?.context("the other job")?;
    super::stack::kill(waiting.id(), rustix::process::Signal::INT)?;
    assert_eq!(waiting.wait()?.code(), Some(130));
    for job in [&other, &id] {
        let stopped = cli.json(&["job", "stop", job])?;
        assert_eq!(stopped["state"], "canceled");
    }
    let events = cli.json(&["event", "list"])?;
    let states: Vec<&str> = events["items"]
        .as_array()
        .context("items")?
        .iter()
        .filter_map(|event| event["state"].as_str())
        .collect();
    assert_eq!(
        states.iter().filter(|state| **state == "canceled").count(),
        2,
        "{states:?}"
    );
    let after = events["items"][1]["cursor"].to_string();
    assert_eq!(
        cli.json(&["event", "list", "--after", &after])?["items"]
            .as_array()
            .map(Vec::len),
        Some(states.len() - 2)
    );

    let mut follower = cli
        .command()?
        .args(["event", "follow", "--output", "json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = std::io::BufReader::new(follower.stdout.take().context("stdout")?).lines();
    for state in states {
        let event: Value = serde_json::from_str(&lines.next().context("a line")??)?;
        assert_eq!(event["state"], state);
    }
    follower.kill()?;
    follower.wait()?;
    Ok(())
}

#[tokio::test]
async fn nodes_are_registered_by_keys_that_are_shown_once() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    assert_eq!(cli.json(&["node", "list"])?["items"], json!([]));
    let key = cli.run(&["node", "key", "create"])?;
    assert!(
        key.text().starts_with("cyn_") && key.stderr.contains("one node"),
        "{key:?}"
    );
    assert!(cli.json(&["node", "key", "create", "--reusable"])?["psk"].is_string());
    for arguments in [["node", "show", "nobody"], ["node", "drain", "nobody"]] {
        assert_eq!(cli.run(&arguments)?.failure(), (64, "not_found".to_owned()));
    }

    let register = json!({
        "psk": key.text().trim_end(), "node_name": "one", "api_url": "http://127.0.0.1:9",
        "capability": {"version": "0", "engine": "podman", "rootless": false, "cpus": 2, "memory_bytes": 1024, "max_sandboxes": 3},
    });
    let client = reqwest::Client::builder().no_proxy().build()?;
    let url = format!("{}/v1/nodes/register", cli.orchestrator.control_url()?);
    assert_eq!(
        client
            .post(&url)
            .json(&register)
            .send()
            .await?
            .status()
            .as_u16(),
        201
    );
    assert_eq!(
        client
            .post(&url)
            .json(&register)
            .send()
            .await?
            .status()
            .as_u16(),
        401,
        "a single-use key was accepted twice"
    );
    let list = cli.success(&["node", "list"])?;
    assert!(list.contains("one") && list.contains("0/3"), "{list}");
    // The node sends heartbeats, but nothing listens at its address.
    let seen = async || Ok(cli.json(&["node", "show", "one"])?["state"] == "unreachable");
    cynode_tests::eventually(
        "the node is shown as unreachable",
        std::time::Duration::from_secs(20),
        seen,
    )
    .await?;
    let reason = cli.json(&["node", "show", "one"])?["reason"].to_string();
    assert!(
        reason.contains("can't reach the node") && reason.contains("refused"),
        "{reason}"
    );
    cli.run(&["node", "drain", "one"])?.success()?;
    assert_eq!(cli.json(&["node", "show", "one"])?["state"], "draining");
    cli.run(&["node", "drain", "one", "--undo"])?.success()?;
    assert_eq!(cli.json(&["node", "show", "one"])?["draining"], false);
    Ok(())
}

#[tokio::test]
async fn the_cli_uses_an_orchestrator_named_by_the_environment_alone() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    // Without the files of a running CyNode, with the environment alone.
    assert_eq!(cli.json(&["session", "list"])?["items"], json!([]));
    let status = cli.json(&["status"])?;
    assert_eq!(
        (&status["ready"], &status["roles"][0]["role"]),
        (&json!(true), &json!("orchestrator"))
    );
    // The server creates a session's task: an unknown task is refused.
    let unknown = cli.run(&[
        "session",
        "create",
        "--task",
        "01890000-0000-7000-8000-000000000001",
    ])?;
    assert_eq!(unknown.failure(), (64, "not_found".to_owned()));
    Ok(())
}

#[tokio::test]
// invariant: images
async fn an_image_that_no_node_has_reported_is_pending() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    let unknown = cli.run(&["session", "create"])?;
    assert_eq!(unknown.failure(), (77, "image_not_allowed".to_owned()));
    assert!(
        unknown
            .stderr
            .contains(&format!("cynode image add --allow {}", cynode_tests::IMAGE)),
        "{unknown:?}"
    );
    let added = cli.run(&["image", "add", cynode_tests::IMAGE, "--allow"])?;
    assert!(
        added.code == Some(0)
            && added
                .stderr
                .contains("is allowed; awaiting a node that has it"),
        "{added:?}"
    );
    let version = |shown: &Value| shown["versions"][0].clone();
    let shown = version(&cli.json(&["image", "show", cynode_tests::IMAGE])?);
    assert_eq!(
        (&shown["state"], &shown["capabilities"]),
        (&json!("awaiting_node"), &json!({}))
    );
    assert!(cli.success(&["image", "list"])?.contains("awaiting_node"));
    let nowhere = cli.run(&["session", "create"])?;
    assert_eq!(
        nowhere.failure(),
        (69, "image_pending".to_owned()),
        "an image that no node has was not pending"
    );
    assert!(nowhere.stderr.contains("cynode image show"), "{nowhere:?}");
    // A rule about agent compatibility can't be decided yet either; an unconditional one can.
    let narrow = "@id(\"agents\")\nforbid (principal, action == CyNode::Action::\"image.use\", \
                  resource is CyNode::Image) unless { resource.agent_compatible };";
    run(
        cli.command()?.args(["policy", "put", "narrow", "-"]),
        narrow.as_bytes(),
    )?
    .success()?;
    let undecided = async || {
        Ok(cli.run(&["run", "--detach", "--", "true"])?.failure()
            == (69, "image_pending".to_owned()))
    };
    cynode_tests::eventually(
        "the rule counts",
        std::time::Duration::from_secs(20),
        undecided,
    )
    .await?;
    let none = "@id(\"none\")\nforbid (principal, action == CyNode::Action::\"image.use\", \
                resource is CyNode::Image);";
    run(
        cli.command()?.args(["policy", "put", "narrow", "-"]),
        none.as_bytes(),
    )?
    .success()?;
    let denied = async || {
        Ok(cli.run(&["session", "create"])?.failure() == (77, "denied_by_policy".to_owned()))
    };
    cynode_tests::eventually(
        "the rule counts",
        std::time::Duration::from_secs(20),
        denied,
    )
    .await?;

    // Adding it again pins the new digest and leaves it allowed.
    let digest = format!("sha256:{}", "ab".repeat(32));
    cli.run(&["image", "add", cynode_tests::IMAGE, "--digest", &digest])?
        .success()?;
    let again = version(&cli.json(&["image", "show", cynode_tests::IMAGE])?);
    assert_eq!(
        (&again["image_digest"], &again["is_allowed"], &again["id"]),
        (&json!(digest), &json!(true), &shown["id"])
    );
    // The same version under another reference is another image.
    let other = cli.run(&[
        "image",
        "add",
        "registry.example/cynode/test-busybox:latest",
    ])?;
    assert_eq!(other.failure(), (64, "already_exists".to_owned()));
    Ok(())
}

#[tokio::test]
async fn a_wrong_token_and_a_wrong_address_are_reported_by_their_cause() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    let at = |url: &str, token: &str, arguments: &[&str]| {
        run(
            cli.command()?
                .env("CYNODE_URL", url)
                .env("CYNODE_TOKEN", token)
                .args(arguments),
            b"",
        )
    };
    let (url, control, token) = (
        cli.orchestrator.url()?,
        cli.orchestrator.control_url()?,
        cli.orchestrator.token()?,
    );
    let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    // Like PostgreSQL's response to a foreign protocol.
    let foreign = std::net::TcpListener::bind("127.0.0.1:0")?;
    let foreign_url = format!("http://{}", foreign.local_addr()?);
    std::thread::spawn(move || foreign.incoming().for_each(drop));
    let commands: [&[&str]; 3] = [&["task", "list"], &["session", "list"], &["image", "list"]];
    for arguments in commands {
        for (address, token, failure, words) in [
            (
                url.as_str(),
                "cyn_wrong",
                (77, "unauthorized"),
                [
                    "CYNODE_TOKEN is mistyped, expired, revoked",
                    "cynode token create",
                ],
            ),
            (
                control.trim(),
                &token,
                (64, "not_found"),
                ["is an orchestrator's port for nodes", "Check CYNODE_URL"],
            ),
            (
                &format!("http://{free}"),
                &token,
                (69, "unreachable"),
                ["Nothing listens there", "Check CYNODE_URL"],
            ),
            (
                &foreign_url,
                &token,
                (69, "unreachable"),
                ["does not speak plain HTTP", "Check CYNODE_URL"],
            ),
            (
                &url.replace("http:", "https:"),
                &token,
                (69, "unreachable"),
                ["does not speak TLS", "http://"],
            ),
        ] {
            let ran = at(address, token, arguments)?;
            assert_eq!(
                ran.failure(),
                (failure.0, failure.1.to_owned()),
                "{arguments:?} at {address}: {ran:?}"
            );
            for words in words {
                assert!(
                    ran.stderr.contains(words),
                    "{words:?} is missing: {arguments:?} at {address}: {}",
                    ran.stderr
                );
            }
        }
    }
    let as_json = at(&url, "cyn_wrong", &["task", "list", "--output", "json"])?;
    let problem: Value = serde_json::from_str(&as_json.stderr)?;
    assert_eq!(
        (
            as_json.text().as_str(),
            &problem["code"],
            &problem["status"],
            &problem["exit"]
        ),
        ("", &json!("unauthorized"), &json!(401), &json!(77))
    );
    assert!(
        problem["remedy"]
            .as_str()
            .is_some_and(|remedy| remedy.contains("CYNODE_TOKEN"))
            && problem["request_id"].is_string(),
        "{problem}"
    );
    Ok(())
}

#[tokio::test]
async fn policy_test_exits_like_the_call() -> Result<()> {
    let cli = OrchestratorCli::new().await?;
    let test = |arguments: &[&str]| cli.run(&[&["policy", "test"], arguments].concat());
    let allowed = test(&["--action", "task.create"])?;
    assert_eq!(
        (allowed.code, allowed.text().starts_with("allowed")),
        (Some(0), true),
        "{allowed:?}"
    );
    let rule =
        "@id(\"none\")\nforbid (principal, action == CyNode::Action::\"task.create\", resource);";
    run(
        cli.command()?.args(["policy", "put", "site", "-"]),
        rule.as_bytes(),
    )?
    .success()?;
    let counts = async || Ok(test(&["--action", "task.create"])?.code == Some(77));
    cynode_tests::eventually(
        "the rule counts",
        std::time::Duration::from_secs(20),
        counts,
    )
    .await?;
    let denied = test(&["--action", "task.create", "--output", "json"])?;
    let verdict: Value = serde_json::from_str(&denied.text())?;
    assert_eq!(
        (denied.code, &verdict["allowed"], denied.stderr.as_str()),
        (Some(77), &json!(false), ""),
        "a verdict was printed as a failure"
    );
    assert_eq!(test(&["--action", "no.such"])?.code, Some(64));
    Ok(())
}
