//! `cynode mcp`: the bridge between a client on standard input and output and `/mcp/coding`.

use std::{
    collections::BTreeSet,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cynode_api::AuditKind;
use cynode_client::AuditFilter;
use cynode_tests::{Answer, BASE, Relay};
use http::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout},
};

use super::REVISION;
use crate::{
    cli::{self, cynode},
    orchestrator::{
        audit::records,
        cluster::{Cluster, text},
    },
};

const TIMEOUT: Duration = Duration::from_secs(90);

/// A project of the user, and the environment in which its bridges run.
pub(super) struct Project<'a> {
    cluster: &'a Cluster,
    url: String,
    token: String,
    pub(super) directory: PathBuf,
}

impl<'a> Project<'a> {
    pub(super) fn new(cluster: &'a Cluster, name: &str) -> Result<Self> {
        let directory = cluster.control_plane.world.directory().join(name);
        fs_err::create_dir(&directory)?;
        fs_err::write(directory.join("a.txt"), "one\n")?;
        Ok(Self {
            cluster,
            url: cluster.orchestrator.url()?,
            token: cluster.orchestrator.token()?,
            directory,
        })
    }

    /// The environment of a client's programs.
    pub(super) fn environment(&self) -> Vec<(&'static str, String)> {
        let home = self.cluster.control_plane.world.directory().join("home");
        vec![
            ("CYNODE_URL", self.url.clone()),
            ("CYNODE_TOKEN", self.token.clone()),
            ("XDG_STATE_HOME", home.display().to_string()),
        ]
    }

    fn command(&self, arguments: &[&str]) -> Result<std::process::Command> {
        let mut command = cynode(&self.cluster.control_plane.world)?;
        command.envs(self.environment()).args(arguments);
        Ok(command)
    }

    fn run(&self, arguments: &[&str]) -> Result<cli::CommandResult> {
        cli::run(&mut self.command(arguments)?, b"")
    }

    fn path(&self) -> Result<&str> {
        self.directory.to_str().context("a path of text")
    }

    /// Starts a bridge that brings the directory.
    fn bridge(&self) -> Result<Bridge> {
        Bridge::start(self.command(&["mcp", "--workspace", self.path()?])?)
    }

    /// The file with the agent's token.
    fn agent_file(&self) -> Result<PathBuf> {
        let agents = self
            .cluster
            .control_plane
            .world
            .directory()
            .join("home/cynode-client/agents");
        let mut files = Vec::new();
        for entry in fs_err::read_dir(agents)? {
            let path = entry?.path();
            if path.extension().is_some_and(|it| it == "json") {
                files.push(path);
            }
        }
        ensure!(files.len() == 1, "{files:?}");
        files.pop().context("a file")
    }

    fn agent(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&fs_err::read(self.agent_file()?)?)?)
    }

    /// Changes when the token seems to expire.
    fn set_expiry(&self, hours: i64) -> Result<()> {
        let mut agent = self.agent()?;
        let at = time::OffsetDateTime::now_utc() + time::Duration::hours(hours);
        agent["expires_at"] = json!(at.format(&time::format_description::well_known::Rfc3339)?);
        Ok(fs_err::write(self.agent_file()?, agent.to_string())?)
    }

    /// Runs a command of the user in the directory.
    fn here(&self, arguments: &[&str]) -> Result<cli::CommandResult> {
        let mut command = self.command(arguments)?;
        cli::run(command.current_dir(&self.directory), b"")
    }

    /// The session of the directory for the user's commands.
    fn session(&self) -> Result<String> {
        let shown = self
            .here(&["session", "show", "--output", "json"])?
            .json()?;
        text(&shown["session_id"])
    }

    async fn count(&self, path: &str) -> Result<usize> {
        let answer = Answer::of(self.cluster.request(Method::GET, path)?).await?;
        let page: Value = serde_json::from_slice(&answer.body)?;
        Ok(page["items"].as_array().context("items")?.len())
    }
}

/// A running bridge and its client.
struct Bridge {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    next_id: u64,
    /// Messages that were not asked for.
    others: Vec<Value>,
}

impl Bridge {
    fn start(command: std::process::Command) -> Result<Self> {
        let mut command = tokio::process::Command::from(command);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .kill_on_drop(true);
        let mut child = command.spawn()?;
        let input = child.stdin.take().context("its input")?;
        let output = child.stdout.take().context("its output")?;
        Ok(Self {
            child,
            input,
            lines: BufReader::new(output).lines(),
            next_id: 1,
            others: Vec::new(),
        })
    }

    async fn send_line(&mut self, line: &str) -> Result<()> {
        self.input.write_all(line.as_bytes()).await?;
        self.input.write_all(b"\n").await?;
        Ok(self.input.flush().await?)
    }

    async fn receive(&mut self) -> Result<Value> {
        let line = tokio::time::timeout(TIMEOUT, self.lines.next_line())
            .await
            .context("no answer")??
            .context("the bridge has ended")?;
        serde_json::from_str(&line).with_context(|| line.clone())
    }

    /// Sends a request without waiting for its answer.
    async fn begin(&mut self, method: &str, params: Value) -> Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let request = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        self.send_line(&request.to_string()).await?;
        Ok(id)
    }

    async fn answer_to(&mut self, id: u64) -> Result<Value> {
        loop {
            let message = self.receive().await?;
            if message["id"] == id {
                return Ok(message);
            }
            self.others.push(message);
        }
    }

    async fn request(&mut self, method: &str, params: Value) -> Result<Value> {
        let id = self.begin(method, params).await?;
        self.answer_to(id).await
    }

    async fn initialize(&mut self) -> Result<Value> {
        let params = json!({
            "protocolVersion": REVISION, "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"}
        });
        let answer = self.request("initialize", params).await?;
        ensure!(answer["result"]["protocolVersion"] == REVISION, "{answer}");
        self.send_line(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#)
            .await?;
        Ok(answer)
    }

    async fn call(&mut self, tool: &str, arguments: Value) -> Result<Value> {
        let params = json!({"name": tool, "arguments": arguments});
        let answer = self.request("tools/call", params).await?;
        ensure!(answer["result"].is_object(), "{tool}: {answer}");
        Ok(answer["result"].clone())
    }

    /// Runs a command and returns what it printed.
    async fn exec(&mut self, command: &str) -> Result<String> {
        let result = self
            .call("sandbox_session_exec", json!({ "command": command }))
            .await?;
        ensure!(result["isError"] == false, "{command}: {result}");
        text(&result["structuredContent"]["stdout"])
    }

    /// Closes the input and waits for the end.
    async fn finish(mut self) -> Result<std::process::ExitStatus> {
        drop(self.input);
        Ok(tokio::time::timeout(TIMEOUT, self.child.wait()).await??)
    }
}

#[tokio::test]
// invariant: nothing-lost
async fn a_restarted_bridge_attaches_to_its_session_and_overwrites_nothing() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let project = Project::new(&cluster, "project")?;
    let mut bridge = project.bridge()?;
    let info = bridge.initialize().await?;
    assert_eq!(info["result"]["serverInfo"]["name"], "cynode");
    let tools = bridge.request("tools/list", json!({})).await?;
    ensure!(tools["result"]["tools"].as_array().map(Vec::len) == Some(12));
    // Nothing is made before a tool needs it.
    assert_eq!(project.count("/v1/sessions").await?, 0);
    assert_eq!(bridge.exec("cat a.txt").await?, "one\n");
    assert_eq!(bridge.exec("echo two > a.txt; echo new > b.txt").await?, "");
    // However it ends.
    bridge.child.kill().await?;
    drop(bridge);

    fs_err::write(project.directory.join("a.txt"), "three\n")?;
    let mode = fs_err::metadata(project.agent_file()?)?
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let agent = project.agent()?;
    let mut bridge = project.bridge()?;
    // Also without a handshake.
    assert_eq!(bridge.exec("cat a.txt b.txt").await?, "two\nnew\n");
    assert_eq!(project.agent()?, agent);
    ensure!(bridge.finish().await?.success());
    assert_eq!(project.count("/v1/sessions").await?, 1);
    let task = text(&agent["task_id"])?;
    let artifacts = format!("/v1/artifacts?task_id={task}");
    assert_eq!(project.count(&artifacts).await?, 1);

    // The user's token made the agent's and brought the files in; all else is the agent's doing.
    let client = cluster.orchestrator.client()?;
    let mut by_user = BTreeSet::new();
    let mut by_agent = BTreeSet::new();
    for record in records(&client, &AuditFilter::default()).await? {
        if record.body.kind != AuditKind::Intent {
            continue;
        }
        let token = record.body.subject.as_ref().and_then(|it| it.token_id);
        let is_agents = token.map(|id| json!(id)) == Some(agent["token_id"].clone());
        if is_agents {
            by_agent.insert(record.body.action);
        } else if record.body.task_id.map(|id| id.to_string()) == Some(task.clone())
            || record.body.action.starts_with("session.")
        {
            by_user.insert(record.body.action);
        }
    }
    by_user.remove("session.list");
    by_user.remove("artifact.list");
    assert_eq!(
        by_user.into_iter().collect::<Vec<_>>(),
        ["artifact.put", "token.create"]
    );
    ensure!(by_agent.contains("session.exec") && by_agent.contains("session.create"));
    // The user's commands find the agent's session by the directory.
    let found = project.here(&["session", "exec", "--", "cat", "a.txt"])?;
    assert_eq!(found.success()?, "two\n");
    cluster.worker.shut_down().await
}

#[tokio::test]
// invariant: truth-in-the-database
async fn two_bridges_of_a_directory_share_a_session_and_survive_each_others_renewals() -> Result<()>
{
    let mut cluster = Cluster::start().await?;
    let project = Project::new(&cluster, "project")?;
    let (mut one, mut two) = (project.bridge()?, project.bridge()?);
    let (first, second) = tokio::join!(
        one.exec("cat a.txt; echo x >> uses"),
        two.exec("cat a.txt; echo x >> uses")
    );
    assert_eq!((first?.as_str(), second?.as_str()), ("one\n", "one\n"));
    assert_eq!(one.exec("cat uses").await?, "x\nx\n");
    assert_eq!(project.count("/v1/sessions").await?, 1);
    let agent = project.agent()?;
    let task = text(&agent["task_id"])?;
    let artifacts = format!("/v1/artifacts?task_id={task}");
    assert_eq!(project.count(&artifacts).await?, 1);

    // Somebody else renews the token: whoever notices first replaces it for both.
    let id = text(&agent["token_id"])?;
    for _ in 0..3 {
        project.run(&["token", "renew", &id])?.success()?;
        let (first, second) = tokio::join!(one.exec("echo 1"), two.exec("echo 2"));
        assert_eq!((first?.as_str(), second?.as_str()), ("1\n", "2\n"));
    }
    let renewed = project.agent()?;
    assert_eq!(renewed["token_id"], agent["token_id"]);
    assert_ne!(renewed["token"], agent["token"]);

    // A token that expires in a while is renewed, but not under a call of the other bridge.
    let slow = two
        .begin(
            "tools/call",
            json!({
                "name": "sandbox_session_exec",
                "arguments": {"command": "touch begun; until [ -e go ]; do sleep 0.1; done; echo went"}
            }),
        )
        .await?;
    one.exec("until [ -e begun ]; do sleep 0.1; done").await?;
    project.set_expiry(20)?;
    let before = project.agent()?;
    one.exec("true").await?;
    assert_eq!(
        project.agent()?["token"],
        before["token"],
        "renewed under a call"
    );
    one.exec("touch go").await?;
    let went = two.answer_to(slow).await?;
    assert_eq!(went["result"]["structuredContent"]["stdout"], "went\n");
    one.exec("true").await?;
    let after = project.agent()?;
    assert_ne!(after["token"], before["token"], "not renewed");
    assert_eq!(two.exec("echo still").await?, "still\n");
    // One that is about to expire is renewed in any case.
    project.set_expiry(1)?;
    one.exec("true").await?;
    assert_ne!(project.agent()?["token"], after["token"], "not renewed");
    ensure!(one.finish().await?.success() && two.finish().await?.success());
    cluster.worker.shut_down().await
}

#[tokio::test]
// invariant: bounded
async fn lines_that_are_no_messages_are_refused_and_the_bridge_goes_on() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let project = Project::new(&cluster, "project")?;
    let mut bridge = project.bridge()?;
    bridge.initialize().await?;
    for (line, id, code) in [
        ("nonsense", json!(null), -32_700),
        ("\u{1f600}\u{0}", json!(null), -32_700),
        ("[]", json!(null), -32_600),
        (r#"{"jsonrpc":"2.0","id":"x"}"#, json!("x"), -32_600),
        (
            r#"{"jsonrpc":"3.0","id":8,"method":"ping"}"#,
            json!(8),
            -32_600,
        ),
    ] {
        bridge.send_line("").await?;
        bridge.send_line(line).await?;
        let answer = bridge.receive().await?;
        assert_eq!(
            json!([answer["id"], answer["error"]["code"]]),
            json!([id, code]),
            "{line}"
        );
    }
    // An answer to nothing, and a notification that nobody knows, are not answered.
    bridge
        .send_line(r#"{"jsonrpc":"2.0","id":99,"result":{}}"#)
        .await?;
    bridge
        .send_line(r#"{"jsonrpc":"2.0","method":"notifications/nobody"}"#)
        .await?;
    let long = json!({
        "jsonrpc": "2.0", "id": "long", "method": "tools/call",
        "params": {"name": "sandbox_workspace_write_file",
                   "arguments": {"path": "a", "content": "x".repeat(11 << 20)}}
    });
    bridge.send_line(&long.to_string()).await?;
    let answer = bridge.receive().await?;
    assert_eq!(
        json!([answer["id"], answer["error"]["data"]["code"]]),
        json!(["long", "too_large"])
    );
    // What the server does not know is its error, with the id of the client.
    let answer = bridge.request("no/such/method", json!({})).await?;
    assert_eq!(answer["error"]["code"], -32_601);
    let answer = bridge
        .request("tools/call", json!({"name": "nothing"}))
        .await?;
    assert_eq!(answer["error"]["message"], "unknown_tool");
    // An id in use is refused, and does not disturb the call that has it.
    let slow =
        json!({"name": "sandbox_session_exec", "arguments": {"command": "sleep 1; echo done"}});
    let id = bridge.begin("tools/call", slow.clone()).await?;
    let again = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": slow});
    bridge.send_line(&again.to_string()).await?;
    let refused = bridge.answer_to(id).await?;
    assert_eq!(refused["error"]["code"], -32_600, "{refused}");
    let answer = bridge.answer_to(id).await?;
    assert_eq!(answer["result"]["structuredContent"]["stdout"], "done\n");
    // Many at once: beyond a bound they are told so, and each gets one answer.
    let mut ids = BTreeSet::new();
    for _ in 0..80 {
        let call = json!({"name": "sandbox_session_exec", "arguments": {"command": "until [ -e go ]; do sleep 0.1; done"}});
        ids.insert(bridge.begin("tools/call", call).await?);
    }
    let mut refused = 0;
    while refused < 16 {
        let answer = bridge.receive().await?;
        assert_eq!(
            answer["error"]["data"]["code"], "too_many_requests",
            "{answer}"
        );
        ids.remove(&answer["id"].as_u64().context("an id")?);
        refused += 1;
    }
    for id in ids {
        let cancel = json!({
            "jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}
        });
        bridge.send_line(&cancel.to_string()).await?;
    }
    // None of them is answered, and there is room again.
    assert_eq!(bridge.exec("echo after").await?, "after\n");
    assert_eq!(bridge.others, Vec::<Value>::new());
    ensure!(bridge.finish().await?.success());
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn a_server_that_is_away_is_an_error_with_a_remedy_until_it_is_back() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let way = Relay::new().await?;
    way.route_to(&cluster.orchestrator.url()?)?;
    let project = Project {
        url: way.url(),
        ..Project::new(&cluster, "project")?
    };
    way.cut();
    let mut bridge = project.bridge()?;
    let params = json!({
        "protocolVersion": REVISION, "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"}
    });
    let away = bridge.request("initialize", params).await?;
    assert_eq!(
        json!([away["error"]["code"], away["error"]["data"]["code"]]),
        json!([-32_000, "unreachable"]),
        "{away}"
    );
    ensure!(
        text(&away["error"]["data"]["remedy"])?.contains("CYNODE_URL")
            || text(&away["error"]["data"]["remedy"])?.contains("cynode status"),
        "{away}"
    );
    way.route_to(&cluster.orchestrator.url()?)?;
    bridge.initialize().await?;
    assert_eq!(bridge.exec("cat a.txt").await?, "one\n");
    // A call whose way breaks is an error, too, and the next one works.
    let call =
        json!({"name": "sandbox_session_exec", "arguments": {"command": "touch begun; sleep 600"}});
    let id = bridge.begin("tools/call", call).await?;
    let mut other = project.bridge()?;
    other.exec("until [ -e begun ]; do sleep 0.1; done").await?;
    way.cut();
    let broken = bridge.answer_to(id).await?;
    ensure!(broken["error"]["code"] == -32_000, "{broken}");
    let away = bridge.request("ping", json!({})).await?;
    assert_eq!(away["error"]["data"]["code"], "unreachable", "{away}");
    way.route_to(&cluster.orchestrator.url()?)?;
    assert_eq!(bridge.exec("cat a.txt").await?, "one\n");
    ensure!(bridge.finish().await?.success());
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn a_directory_that_can_not_be_brought_is_told_in_the_tools_result() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let project = Project::new(&cluster, "project")?;
    let mut bridge = project.bridge()?;
    bridge.initialize().await?;
    let away = project.directory.with_file_name("away");
    fs_err::rename(&project.directory, &away)?;
    // Help needs no sandbox.
    let help = bridge.call("help_get", json!({})).await?;
    assert_eq!(help["isError"], false);
    for tool in ["sandbox_session_exec", "sandbox_session_create"] {
        let failed = bridge.call(tool, json!({"command": "true"})).await?;
        assert_eq!(failed["isError"], true, "{failed}");
        assert_eq!(
            failed["structuredContent"]["stage"], "workspace",
            "{failed}"
        );
        ensure!(
            text(&failed["content"][0]["text"])?.contains("project"),
            "{failed}"
        );
    }
    assert_eq!(project.count("/v1/sessions").await?, 0);
    fs_err::rename(&away, &project.directory)?;
    assert_eq!(bridge.exec("cat a.txt").await?, "one\n");
    ensure!(bridge.finish().await?.success());
    // A directory that was never there is refused at the start.
    let wrong = project.run(&["mcp", "--workspace", "nowhere"])?;
    ensure!(
        wrong.code != Some(0) && wrong.stdout.is_empty(),
        "{wrong:?}"
    );
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn the_next_session_begins_with_the_directory_as_it_is_then() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let project = Project::new(&cluster, "project")?;
    let mut bridge = project.bridge()?;
    bridge.initialize().await?;
    // An explicit create brings the directory, too, and takes what the client wants besides.
    let arguments = json!({"constraints": super::session()});
    let made = bridge
        .call("sandbox_session_create", arguments.clone())
        .await?;
    assert_eq!(made["isError"], false, "{made}");
    ensure!(
        made["content"]
            .to_string()
            .contains("files of the user's directory")
    );
    assert_eq!(bridge.exec("cat a.txt; rm a.txt").await?, "one\n");
    let again = bridge.call("sandbox_session_create", json!({})).await?;
    ensure!(
        text(&again["content"][0]["text"])?.contains("already exists"),
        "{again}"
    );
    fs_err::write(project.directory.join("a.txt"), "later\n")?;
    bridge.call("sandbox_session_end", json!({})).await?;
    let ended = bridge
        .call("sandbox_session_exec", json!({"command": "true"}))
        .await?;
    assert_eq!(ended["structuredContent"]["code"], "session_ended");
    let made = bridge.call("sandbox_session_create", json!({})).await?;
    assert_eq!(made["isError"], false, "{made}");
    assert_eq!(bridge.exec("cat a.txt").await?, "later\n");
    // Also without a call between the end and the next session.
    fs_err::write(project.directory.join("a.txt"), "even later\n")?;
    bridge.call("sandbox_session_end", json!({})).await?;
    let made = bridge.call("sandbox_session_create", json!({})).await?;
    assert_eq!(made["isError"], false, "{made}");
    assert_eq!(bridge.exec("cat a.txt").await?, "even later\n");
    let second = text(&made["structuredContent"]["session_id"])?;
    assert_eq!(project.session()?, second);
    // A session that lives is answered unchanged, and stays the one of the directory.
    bridge.exec("echo mine > a.txt").await?;
    let same = bridge.call("sandbox_session_create", json!({})).await?;
    assert_eq!(same["structuredContent"]["session_id"], second, "{same}");
    assert_eq!(bridge.exec("cat a.txt").await?, "mine\n");
    assert_eq!(project.session()?, second);
    // And as the first call of a bridge that was started again.
    bridge.call("sandbox_session_end", json!({})).await?;
    ensure!(bridge.finish().await?.success());
    fs_err::write(project.directory.join("a.txt"), "restarted\n")?;
    let mut bridge = project.bridge()?;
    bridge.initialize().await?;
    let made = bridge.call("sandbox_session_create", json!({})).await?;
    ensure!(
        made["content"]
            .to_string()
            .contains("files of the user's directory"),
        "{made}"
    );
    assert_eq!(bridge.exec("cat a.txt").await?, "restarted\n");
    assert_eq!(
        project.session()?,
        text(&made["structuredContent"]["session_id"])?
    );
    // A workspace of the client's own choice stays empty.
    bridge.call("sandbox_session_end", json!({})).await?;
    bridge
        .call("sandbox_session_exec", json!({"command": "true"}))
        .await?;
    let own = bridge
        .call("sandbox_session_create", json!({"workspace_ref": "new"}))
        .await?;
    assert_eq!(own["isError"], false, "{own}");
    assert_eq!(bridge.exec("ls").await?, "");
    ensure!(bridge.finish().await?.success());
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn a_user_connects_an_agent_and_applies_what_it_did() -> Result<()> {
    let mut cluster = Cluster::with_image(BASE).await?;
    let project = Project::new(&cluster, "project")?;
    fs_err::write(project.directory.join("b.txt"), "unchanged\n")?;
    project
        .run(&["setting", "set", "sandbox.default_image", BASE])?
        .success()?;
    fs_err::create_dir_all(cluster.control_plane.world.directory().join("user/.cursor"))?;
    state_directory(&cluster, Some(&cluster.orchestrator.url()?))?;
    connect(&cluster, &project.directory, &["cursor", "--write"])?.success()?;
    let mut bridge = Bridge::start(connected(&cluster, &project.directory)?)?;
    bridge.initialize().await?;
    let edit = json!({"path": "a.txt", "old": "one", "new": "two"});
    let edited = bridge.call("sandbox_workspace_edit_file", edit).await?;
    assert_eq!(edited["isError"], false, "{edited}");
    let write = json!({"path": "src/c.txt", "content": "new\n"});
    let written = bridge.call("sandbox_workspace_write_file", write).await?;
    assert_eq!(written["isError"], false, "{written}");
    // The user's commands in the directory, without naming anything. The bridge still runs.
    let here = |arguments: &[&str]| -> Result<cli::CommandResult> {
        let mut command = cynode(&cluster.control_plane.world)?;
        let state = cluster.control_plane.world.directory().join("up-state");
        command
            .env("CYNODE_STATE_DIR", state)
            .current_dir(&project.directory)
            .args(arguments);
        cli::run(&mut command, b"")
    };
    let diff = here(&["session", "diff"])?.success()?;
    for part in ["-one\n+two", "+++ b/src/c.txt"] {
        ensure!(diff.contains(part), "{part} is missing in\n{diff}");
    }
    ensure!(!diff.contains("b.txt"), "{diff}");
    let read = |name: &str| fs_err::read_to_string(project.directory.join(name));
    assert_eq!(read("a.txt")?, "one\n");
    here(&["session", "pull", "--apply"])?.success()?;
    assert_eq!(
        (read("a.txt")?, read("b.txt")?, read("src/c.txt")?),
        ("two\n".into(), "unchanged\n".into(), "new\n".into())
    );
    ensure!(bridge.finish().await?.success());
    cluster.worker.shut_down().await
}

#[tokio::test]
// invariant: fail-closed
async fn a_revoked_agent_stays_out_until_it_is_forgotten() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let project = Project::new(&cluster, "project")?;
    let mut bridge = project.bridge()?;
    bridge.initialize().await?;
    let agent = project.agent()?;
    let id = text(&agent["token_id"])?;
    project.run(&["token", "revoke", &id])?.success()?;
    for _ in 0..2 {
        let refused = bridge.request("tools/list", json!({})).await?;
        let data = &refused["error"]["data"];
        assert_eq!(data["code"], "token_revoked", "{refused}");
        ensure!(
            text(&data["remedy"])?.contains("cynode mcp --forget"),
            "{refused}"
        );
    }
    ensure!(bridge.finish().await?.success());
    let forget = ["mcp", "--forget", "--workspace", project.path()?];
    ensure!(project.run(&forget)?.stderr.contains("forgot"));
    ensure!(project.run(&forget)?.stderr.contains("no agent"));
    let mut bridge = project.bridge()?;
    assert_eq!(bridge.exec("cat a.txt").await?, "one\n");
    assert_ne!(project.agent()?["token_id"], agent["token_id"]);
    // A named task is the agent's, and another agent.
    let task = project.run(&["task", "create", "chosen"])?.success()?;
    let arguments = ["mcp", "--workspace", project.path()?, "--task", "chosen"];
    let mut chosen = Bridge::start(project.command(&arguments)?)?;
    assert_eq!(chosen.exec("cat a.txt").await?, "one\n");
    let sessions = format!("/v1/sessions?task_id={}", task.trim());
    assert_eq!(project.count(&sessions).await?, 1);
    cluster.worker.shut_down().await
}

/// A state directory from which commands find the server without variables.
fn state_directory(cluster: &Cluster, url: Option<&str>) -> Result<PathBuf> {
    let directory = cluster.control_plane.world.directory().join("up-state");
    fs_err::create_dir_all(&directory)?;
    fs_err::write(directory.join("admin.token"), cluster.orchestrator.token()?)?;
    let endpoints = directory.join("endpoints.json");
    match url {
        Some(url) => fs_err::write(
            endpoints,
            json!({"version": 1, "api": url, "pid": 1}).to_string(),
        )?,
        None => fs_err::remove_file(endpoints)?,
    }
    Ok(directory)
}

/// The bridge as Cursor starts it by the file of a project: with few variables.
fn connected(cluster: &Cluster, project: &Path) -> Result<std::process::Command> {
    let file = fs_err::read(project.join(".cursor/mcp.json"))?;
    let config: Value = serde_json::from_slice(&file)?;
    let entry = &config["mcpServers"]["cynode"];
    let mut command = std::process::Command::new(text(&entry["command"])?);
    for argument in entry["args"].as_array().context("arguments")? {
        command.arg(text(argument)?);
    }
    let user = cluster.control_plane.world.directory().join("user");
    command.env_clear().env("HOME", user).current_dir("/");
    for (name, value) in entry["env"].as_object().into_iter().flatten() {
        command.env(name, text(value)?);
    }
    Ok(command)
}

/// Runs `cynode connect` in a project.
fn connect(cluster: &Cluster, project: &Path, arguments: &[&str]) -> Result<cli::CommandResult> {
    let directory = cluster.control_plane.world.directory();
    let mut command = cynode(&cluster.control_plane.world)?;
    command
        .env("CYNODE_STATE_DIR", directory.join("up-state"))
        .env("HOME", directory.join("user"))
        .env("PATH", "/nonexistent")
        .env_remove("XDG_CONFIG_HOME")
        .current_dir(project)
        .arg("connect")
        .args(arguments);
    cli::run(&mut command, b"")
}

#[tokio::test]
async fn what_connect_writes_starts_a_bridge_and_is_removed_again() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let project = Project::new(&cluster, "project")?;
    let user = cluster.control_plane.world.directory().join("user");
    fs_err::create_dir_all(user.join(".cursor"))?;
    let url = cluster.orchestrator.url()?;
    state_directory(&cluster, Some(&url))?;
    let run = |arguments: &[&str]| connect(&cluster, &project.directory, arguments);

    // The client that is there, without its file.
    let shown = run(&["--output", "json"])?.json()?;
    let clients = shown["clients"].as_array().context("clients")?;
    assert_eq!(clients.len(), 1);
    let file = project.directory.join(".cursor/mcp.json");
    assert_eq!(
        json!([
            clients[0]["client"],
            clients[0]["state"],
            clients[0]["file"]
        ]),
        json!(["cursor", "shown", file])
    );
    ensure!(!file.exists());
    let written = run(&["--write"])?;
    ensure!(
        written.code == Some(0) && written.text().contains('+'),
        "{written:?}"
    );
    ensure!(run(&["--write"])?.stderr.contains("already"));
    // What it wrote, as the client starts it: with few variables.
    let command = connected(&cluster, &project.directory)?;
    let mut bridge = Bridge::start(command)?;
    bridge.initialize().await?;
    assert_eq!(bridge.exec("cat a.txt").await?, "one\n");
    ensure!(bridge.finish().await?.success());
    // It remembers where the user's commands look, although the state is in a place of its own.
    ensure!(project.agent_file().is_ok());
    // The configuration of the client came along, so the sandbox knows no secret of it.
    ensure!(!fs_err::read_to_string(&file)?.contains(&cluster.orchestrator.token()?));
    ensure!(run(&["--remove"])?.text().contains('-'));
    ensure!(!file.exists() && !project.directory.join(".cursor").exists());

    // A token only when it is asked for; the file is then private, and the token dies with it.
    let told = run(&["cursor", "--with-token", "--write", "--output", "json"])?.json()?;
    assert_eq!(told["clients"][0]["state"], "written", "{told}");
    let config: Value = serde_json::from_slice(&fs_err::read(&file)?)?;
    let entry = &config["mcpServers"]["cynode"];
    let bearer = text(&entry["headers"]["Authorization"])?;
    let token = bearer.strip_prefix("Bearer ").context("a token")?;
    ensure!(!told.to_string().contains(token));
    assert_eq!(fs_err::metadata(&file)?.permissions().mode() & 0o777, 0o600);
    let list = || -> Result<_> {
        Ok(cluster
            .request_by(token, Method::POST, "/mcp/coding")?
            .header("accept", "application/json, text/event-stream")
            .json(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})))
    };
    assert_eq!(entry["url"], format!("{url}/mcp/coding"));
    assert_eq!(Answer::of(list()?).await?.status, 200);
    let same = run(&["cursor", "--with-token", "--write", "--output", "json"])?.json()?;
    assert_eq!(same["clients"][0]["state"], "unchanged", "{same}");
    run(&["cursor", "--remove"])?.success()?;
    assert_eq!(Answer::of(list()?).await?.status, 401);

    // Refusals: a broken file, an unknown client, a home directory, no server.
    fs_err::create_dir_all(project.directory.join(".vscode"))?;
    fs_err::write(project.directory.join(".vscode/mcp.json"), "{broken")?;
    let broken = run(&["vscode", "--write"])?;
    ensure!(
        broken.code == Some(64) && broken.text().contains("\"servers\""),
        "{broken:?}"
    );
    assert_eq!(
        fs_err::read_to_string(project.directory.join(".vscode/mcp.json"))?,
        "{broken"
    );
    assert_eq!(
        run(&["emacs"])?.failure(),
        (64, "unknown_client".to_owned())
    );
    assert_eq!(
        connect(&cluster, &user, &["cursor"])?.failure(),
        (64, "usage".to_owned())
    );
    fs_err::remove_dir(user.join(".cursor"))?;
    assert_eq!(run(&[])?.failure(), (64, "no_client".to_owned()));
    state_directory(&cluster, None)?;
    let away = run(&["cursor"])?;
    assert_eq!(away.failure(), (69, "unreachable".to_owned()));
    ensure!(run(&["cursor"])?.stderr.contains("cynode up"));
    // An entry is removed without a server.
    ensure!(run(&["cursor", "--remove"])?.code == Some(0));
    cluster.worker.shut_down().await
}
