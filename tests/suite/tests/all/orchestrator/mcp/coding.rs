//! `/mcp/coding`: few tools with defaults, in the session of the token.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{AuditDecision, AuditKind, AuditRecord};
use cynode_client::AuditFilter;
use cynode_tests::{Answer, BASE, RunningOrchestrator, eventually};
use http::Method;
use serde_json::{Value, json};

use super::{McpAgent, task};
use crate::orchestrator::{
    audit::{assert_trail_intact, records},
    cluster::{Cluster, text},
};

const PATH: &str = "/mcp/coding";

impl<'a> McpAgent<'a> {
    /// An agent on `/mcp/coding` with its own token for one task.
    async fn coding(cluster: &'a Cluster, task: &str) -> Result<Self> {
        let admin = cluster.orchestrator.token()?;
        Ok(Self {
            path: PATH,
            ..Self::with_token_for(cluster, &admin, "project_manager", &[task]).await?
        })
    }

    /// Calls a tool, which must succeed, and returns its text and its structure.
    async fn told(&self, tool: &str, arguments: Value) -> Result<(String, Value)> {
        let answer = self.call(tool, arguments).await?;
        let result = &answer["result"];
        ensure!(result["isError"] == false, "{tool}: {answer}");
        Ok((
            text(&result["content"][0]["text"])?,
            result["structuredContent"].clone(),
        ))
    }

    /// Calls a tool, which must fail, and returns its text and the failure.
    async fn failed(&self, tool: &str, arguments: Value) -> Result<(String, Value)> {
        let answer = self.call(tool, arguments).await?;
        let result = &answer["result"];
        ensure!(result["isError"] == true, "{tool}: {answer}");
        Ok((
            text(&result["content"][0]["text"])?,
            result["structuredContent"].clone(),
        ))
    }
}

/// A session with small limits, created explicitly.
fn small() -> Value {
    json!({"constraints": super::session()})
}

/// The sessions of a task.
async fn sessions(cluster: &Cluster, task: &str) -> Result<Vec<Value>> {
    let answer =
        Answer::of(cluster.request(Method::GET, &format!("/v1/sessions?task_id={task}"))?).await?;
    let page: Value = serde_json::from_slice(&answer.body)?;
    page["items"].as_array().cloned().context("items")
}

async fn intents(cluster: &Cluster, action: &str) -> Result<Vec<AuditRecord>> {
    let filter = AuditFilter {
        action: Some(action.to_owned()),
        ..Default::default()
    };
    let mut all = records(&cluster.orchestrator.client()?, &filter).await?;
    all.retain(|record| record.body.kind == AuditKind::Intent);
    Ok(all)
}

#[tokio::test]
// invariant: tools
async fn a_coding_round_needs_no_optional_argument() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "coding").await?;
    let agent = McpAgent::coding(&cluster, &task).await?;

    let (told, ran) = agent
        .told(
            "sandbox_session_exec",
            json!({"command": "echo one > a.txt; pwd; echo err >&2; exit 3"}),
        )
        .await?;
    let session = text(&sessions(&cluster, &task).await?[0]["session_id"])?;
    ensure!(
        told.starts_with(&format!("Session {session} was created"))
            && told.contains("exit code 3\nstdout:\n/workspace\n\nstderr:\nerr\n"),
        "{told}"
    );
    assert_eq!(
        (ran["exit_code"].as_i64(), ran["note"].is_string()),
        (Some(3), true)
    );
    // The next calls find it, and say nothing about it.
    let (told, _) = agent
        .told("sandbox_session_exec", json!({"argv": ["cat", "a.txt"]}))
        .await?;
    assert_eq!(told, "exit code 0\nstdout:\none\n");
    agent
        .told(
            "sandbox_workspace_write_file",
            json!({"path": "src/b.txt", "content": "alpha\nbeta\n"}),
        )
        .await?;
    let (_, edited) = agent
        .told(
            "sandbox_workspace_edit_file",
            json!({"path": "src/b.txt", "old": "beta", "new": "gamma"}),
        )
        .await?;
    assert_eq!(edited["replaced"], 1);
    let diff = "--- a/src/b.txt\n+++ b/src/b.txt\n@@ -1,2 +1,2 @@\n-alpha\n+delta\n gamma\n";
    let (told, _) = agent
        .told("sandbox_workspace_apply_patch", json!({ "diff": diff }))
        .await?;
    assert_eq!(told, "modify src/b.txt\n");
    let (told, failure) = agent
        .failed("sandbox_workspace_apply_patch", json!({ "diff": diff }))
        .await?;
    assert_eq!(failure["code"], "patch_rejected");
    ensure!(
        told.contains("\nsrc/b.txt, hunk 1")
            && told
                .ends_with("\n  expected:\n    alpha\n    gamma\n  found:\n    delta\n    gamma"),
        "{told}"
    );
    let begin = "*** Begin Patch\n*** Update File: src/b.txt\n@@\n-delta\n+alpha\n*** End Patch\n";
    let (told, _) = agent
        .told("sandbox_workspace_apply_patch", json!({ "diff": begin }))
        .await?;
    assert_eq!(told, "modify src/b.txt\n");
    let wrong = diff.replace("-1,2 +1,2", "-1,7 +1,7");
    let (told, patched) = agent
        .told("sandbox_workspace_apply_patch", json!({ "diff": wrong }))
        .await?;
    assert_eq!(
        told,
        "modify src/b.txt\nrepaired src/b.txt, hunk 1: its header says -7 +7 lines, but it has -2 \
         +2\n"
    );
    assert_eq!(patched["repaired"][0]["path"], "src/b.txt");
    let (told, _) = agent
        .told("sandbox_workspace_read_file", json!({"path": "src/b.txt"}))
        .await?;
    assert_eq!(told, "delta\ngamma\n");
    let (told, _) = agent.told("sandbox_workspace_list", json!({})).await?;
    assert_eq!(told, "a.txt 4\nsrc/\n");
    let (told, _) = agent
        .told("sandbox_workspace_search", json!({"pattern": "gam+a"}))
        .await?;
    assert_eq!(told, "src/b.txt:2: gamma\n");
    // This image has no git.
    assert_eq!(
        agent
            .call_refused("sandbox_workspace_export_patch", json!({}))
            .await?,
        ("exec_failed".to_owned(), "run".to_owned())
    );

    let (told, begun) = agent
        .told(
            "sandbox_session_exec",
            json!({"command": "echo begun; sleep 600", "background": true}),
        )
        .await?;
    ensure!(
        told.contains("Read its output: sandbox_session_output {")
            && told.contains(&text(&begun["exec_id"])?),
        "{told}"
    );
    let (told, page) = agent
        .told(
            "sandbox_session_output",
            json!({"exec_id": begun["exec_id"], "wait_ms": 20_000}),
        )
        .await?;
    ensure!(
        told.starts_with("begun\nRead on: sandbox_session_output {")
            && told.contains(&format!("\"after_seq\":{}", page["next_seq"])),
        "{told}"
    );
    let (told, _) = agent.told("help_get", json!({})).await?;
    ensure!(told.contains("\"start\""), "{told}");
    let (told, _) = agent.told("help_get", json!({"topic": "start"})).await?;
    ensure!(
        told.contains("sandbox_session_exec") && !told.contains("sandbox.session"),
        "{told}"
    );
    let (told, ended) = agent.told("sandbox_session_end", json!({})).await?;
    assert_eq!(
        (ended["state"].as_str(), ended["end_reason"].as_str()),
        (Some("ended"), Some("done"))
    );
    ensure!(
        told.starts_with("Its workspace ")
            && told.contains(&format!(" is deleted.\nsession {session}: ended")),
        "{told}"
    );

    // The gate has recorded each step, with its tool and the task.
    for (action, tool) in [
        ("session.create", "sandbox.session.exec"),
        ("session.exec", "sandbox.session.exec"),
        ("file.patch", "sandbox.workspace.apply_patch"),
        ("session.end", "sandbox.session.end"),
    ] {
        let first = intents(&cluster, action).await?;
        let first = first.first().with_context(|| action.to_owned())?;
        assert_eq!(
            (
                first.body.detail["tool"].as_str(),
                first.body.task_id.map(|id| id.to_string()).as_deref()
            ),
            (Some(tool), Some(task.as_str())),
            "{action}"
        );
    }
    let execs = intents(&cluster, "session.exec").await?;
    let shell = execs
        .iter()
        .find(|record| record.body.detail["argv"][0] == "sh")
        .context("this image has no bash")?;
    assert_eq!(
        json!([shell.body.detail["timeout_ms"], shell.body.detail["cwd"]]),
        json!([120_000, "."])
    );
    assert_trail_intact(&cluster.orchestrator.client()?).await?;
    cluster.worker.shut_down().await
}

#[tokio::test]
// invariant: fail-closed
async fn only_a_managers_token_for_one_task_is_admitted() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let (one, other) = (
        task(&cluster, &admin, "one").await?,
        task(&cluster, &admin, "other").await?,
    );
    let project = cluster
        .make(&admin, "/v1/projects", &json!({"name": "p"}))
        .await?;
    let mut tokens = vec![("a user", admin.clone())];
    for (what, body) in [
        (
            "two tasks",
            json!({"kind": "project_manager", "task_ids": [one, other]}),
        ),
        (
            "a project",
            json!({"kind": "project_manager", "project_id": project["id"]}),
        ),
        (
            "an analyst",
            json!({"kind": "project_analyst", "task_ids": [one]}),
        ),
    ] {
        let made = cluster.make(&admin, "/v1/tokens", &body).await?;
        tokens.push((what, text(&made["token"])?));
    }
    for (count, (what, token)) in tokens.iter().enumerate() {
        for (method, params) in [
            (
                "initialize",
                json!({
                    "protocolVersion": "2025-06-18", "capabilities": {},
                    "clientInfo": {"name": "test", "version": "1"}
                }),
            ),
            ("tools/list", json!({})),
            (
                "tools/call",
                json!({"name": "sandbox_session_exec", "arguments": {"command": "true"}}),
            ),
        ] {
            let request = cluster
                .request_by(token, Method::POST, PATH)?
                .header("accept", "application/json, text/event-stream")
                .json(&json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}));
            let answer = Answer::of(request).await?;
            assert_eq!(
                answer.outcome(),
                (403, "forbidden".to_owned()),
                "{what} {method}"
            );
            let remedy = answer.problem()?.remedy;
            ensure!(remedy.contains("cynode token create"), "{remedy}");
        }
        let refused = intents(&cluster, "tool.call").await?;
        let last = refused.last().context("a record")?;
        assert_eq!(
            (
                refused.len(),
                last.body.decision,
                last.body.stage.as_deref()
            ),
            (
                3 * (count + 1),
                Some(AuditDecision::Deny),
                Some("agent_type")
            ),
            "{what}"
        );
    }
    assert_eq!(sessions(&cluster, &one).await?, [] as [Value; 0]);
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn arguments_are_strict_and_the_task_can_not_be_named() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let (mine, other) = (
        task(&cluster, &admin, "mine").await?,
        task(&cluster, &admin, "other").await?,
    );
    let agent = McpAgent::coding(&cluster, &mine).await?;
    for (tool, arguments, named) in [
        ("sandbox_session_exec", json!({}), "command"),
        (
            "sandbox_session_exec",
            json!({"command": "ls", "argv": ["ls"]}),
            "command",
        ),
        (
            "sandbox_session_exec",
            json!({"command": "ls", "task_id": other}),
            "unknown: task_id",
        ),
        (
            "sandbox_session_exec",
            json!({"command": "ls", "colour": 1}),
            "unknown: colour",
        ),
        (
            "sandbox_session_exec",
            json!({"command": "ls", "max_output_bytes": 2_000_000}),
            "max_output_bytes",
        ),
        (
            "sandbox_workspace_read_file",
            json!({"path": "/etc/passwd"}),
            "/workspace",
        ),
        ("sandbox_workspace_edit_file", json!({}), "missing: path"),
    ] {
        let (told, failure) = agent.failed(tool, arguments.clone()).await?;
        assert_eq!(failure["stage"], "arguments", "{arguments}: {failure}");
        ensure!(told.contains(named), "{arguments}: {told}");
    }
    // Nothing was made for calls that could not be carried out.
    for tool in ["sandbox_session_output", "sandbox_session_end"] {
        let arguments = if tool.ends_with("output") {
            json!({"exec_id": "01a00000-0000-7000-8000-000000000009"})
        } else {
            json!({})
        };
        assert_eq!(
            agent.call_refused(tool, arguments).await?.0,
            "session_not_found"
        );
    }
    assert_eq!(sessions(&cluster, &mine).await?, [] as [Value; 0]);
    // Tools and names of `/mcp` do not exist here.
    for tool in ["sandbox.session.exec", "db_task_list", "artifact_put"] {
        agent.assert_unknown(tool, json!({})).await?;
    }
    // A session of another task is not found, however it is named.
    let neighbour = McpAgent::coding(&cluster, &other).await?;
    let (_, theirs) = neighbour.told("sandbox_session_create", small()).await?;
    let arguments = json!({"command": "ls", "session_id": theirs["session_id"]});
    assert_eq!(
        agent
            .call_refused("sandbox_session_exec", arguments)
            .await?,
        ("session_not_found".to_owned(), "task".to_owned())
    );
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn a_kept_session_is_resumed_and_a_lost_workspace_is_never_replaced_silently() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "resumed").await?;
    let agent = McpAgent::coding(&cluster, &task).await?;
    let (_, first) = agent.told("sandbox_session_create", small()).await?;
    let id = text(&first["session_id"])?;
    assert_eq!(&id[14..15], "8", "{id}");
    agent
        .told(
            "sandbox_session_exec",
            json!({"command": "echo kept > file"}),
        )
        .await?;
    // While it lives, a create answers it.
    let (told, again) = agent.told("sandbox_session_create", json!({})).await?;
    assert_eq!(again["session_id"], first["session_id"]);
    ensure!(told.contains("already exists"), "{told}");

    agent
        .told("sandbox_session_end", json!({"workspace": "keep"}))
        .await?;
    let (told, read) = agent
        .told("sandbox_workspace_read_file", json!({"path": "file"}))
        .await?;
    ensure!(
        told.starts_with(&format!("Session {id} had ended and was resumed"))
            && told.ends_with("kept\n"),
        "{told}"
    );
    assert_eq!(read["content"], "kept\n");
    agent
        .told("sandbox_session_end", json!({"workspace": "keep"}))
        .await?;
    let (told, resumed) = agent.told("sandbox_session_create", json!({})).await?;
    assert_eq!(
        (resumed["session_id"].as_str(), resumed["state"].as_str()),
        (Some(id.as_str()), Some("running"))
    );
    ensure!(told.contains("was resumed"), "{told}");

    // With its workspace gone, only a create starts another. A kept one can be deleted later.
    let (told, _) = agent
        .told("sandbox_session_end", json!({"workspace": "keep"}))
        .await?;
    ensure!(told.contains("is kept"), "{told}");
    for arguments in [json!({}), json!({"workspace": "delete"})] {
        let (told, _) = agent.told("sandbox_session_end", arguments).await?;
        ensure!(told.contains("is deleted"), "{told}");
    }
    for (tool, arguments) in [
        ("sandbox_session_exec", json!({"command": "ls"})),
        ("sandbox_workspace_list", json!({})),
        (
            "sandbox_workspace_write_file",
            json!({"path": "a", "content": "b"}),
        ),
    ] {
        let (told, failure) = agent.failed(tool, arguments).await?;
        assert_eq!(failure["code"], "session_ended", "{tool}: {failure}");
        ensure!(told.contains("Call sandbox_session_create"), "{told}");
    }
    assert_eq!(sessions(&cluster, &task).await?.len(), 1);
    let (told, second) = agent.told("sandbox_session_create", small()).await?;
    ensure!(
        second["session_id"] != first["session_id"] && second["state"] == "running",
        "{second}"
    );
    ensure!(!told.contains("resumed"), "{told}");
    let (told, _) = agent.told("sandbox_workspace_list", json!({})).await?;
    assert_eq!(told, "(no files)");
    assert_eq!(sessions(&cluster, &task).await?.len(), 2);
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn each_token_has_a_session_of_its_own() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "shared").await?;
    let agents = [
        McpAgent::coding(&cluster, &task).await?,
        McpAgent::coding(&cluster, &task).await?,
    ];
    for (number, agent) in agents.iter().enumerate() {
        agent.told("sandbox_session_create", small()).await?;
        let file = json!({"path": "whose", "content": number.to_string()});
        agent.told("sandbox_workspace_write_file", file).await?;
    }
    for (number, agent) in agents.iter().enumerate() {
        let (told, _) = agent
            .told("sandbox_workspace_read_file", json!({"path": "whose"}))
            .await?;
        assert_eq!(told, number.to_string());
    }
    // They may still name each other's: it belongs to the task.
    let (_, theirs) = agents[1].told("sandbox_session_create", json!({})).await?;
    let arguments = json!({"path": "whose", "session_id": theirs["session_id"]});
    let (told, _) = agents[0]
        .told("sandbox_workspace_read_file", arguments)
        .await?;
    assert_eq!(told, "1");
    assert_eq!(sessions(&cluster, &task).await?.len(), 2);
    cluster.worker.shut_down().await
}

/// Calls a tool on an orchestrator and returns the structure of its result.
async fn call_on(
    orchestrator: &RunningOrchestrator,
    token: &str,
    tool: &str,
    arguments: &Value,
) -> Result<Value> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let params = json!({"name": tool, "arguments": arguments});
    let request = http
        .post(format!("{}{PATH}", orchestrator.url()?))
        .bearer_auth(token)
        .header("accept", "application/json, text/event-stream")
        .header("mcp-protocol-version", super::REVISION)
        .json(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}));
    let answer: Value = serde_json::from_slice(&Answer::of(request).await?.body)?;
    ensure!(answer["result"]["isError"] == false, "{tool}: {answer}");
    Ok(answer["result"]["structuredContent"].clone())
}

#[tokio::test]
// invariant: truth-in-the-database
async fn two_orchestrators_make_one_session_per_generation() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "both").await?;
    let agent = McpAgent::coding(&cluster, &task).await?;
    let other = cluster.second().await?;
    let both = [&cluster.orchestrator, &other];
    let at_once = async |tool: &str, arguments: &[Value]| -> Result<Vec<Value>> {
        let calls = (0..6).map(|number| {
            call_on(
                both[number % 2],
                &agent.token,
                tool,
                &arguments[number % arguments.len()],
            )
        });
        futures_util::future::join_all(calls)
            .await
            .into_iter()
            .collect()
    };
    // The first use, on both at once.
    at_once(
        "sandbox_session_exec",
        &[json!({"command": "echo x >> uses"})],
    )
    .await?;
    assert_eq!(sessions(&cluster, &task).await?.len(), 1);
    let uses = call_on(
        &other,
        &agent.token,
        "sandbox_workspace_read_file",
        &json!({"path": "uses"}),
    )
    .await?;
    assert_eq!(uses["content"], "x\n".repeat(6));
    for generation in 2..=3 {
        agent.told("sandbox_session_end", json!({})).await?;
        // Also with different wishes.
        let made = at_once("sandbox_session_create", &[json!({}), small()]).await?;
        let ids: std::collections::BTreeSet<String> = made
            .iter()
            .map(|session| text(&session["session_id"]))
            .collect::<Result<_>>()?;
        assert_eq!(ids.len(), 1, "{made:?}");
        assert_eq!(sessions(&cluster, &task).await?.len(), generation);
    }
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn results_fit_the_text_unless_more_is_asked_for() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "long").await?;
    let agent = McpAgent::coding(&cluster, &task).await?;
    agent.told("sandbox_session_create", small()).await?;
    let script = "seq 1 20000; seq 1 20000 >&2; seq 1 20000 > numbers; mkdir d; \
                  for i in $(seq 1 300); do : > d/a-rather-long-name-of-a-file-$i; done; \
                  printf '\\033[31mred\\033[0m\\n' > red";
    let (told, ran) = agent
        .told("sandbox_session_exec", json!({"command": script}))
        .await?;
    ensure!(
        told.len() <= 8_192 && ran.to_string().len() <= 8_192,
        "{} {}",
        told.len(),
        ran.to_string().len()
    );
    ensure!(
        told.contains("bytes left out") && told.contains("stderr:\n1\n2\n"),
        "{told}"
    );
    // The call that the text names returns what was left out.
    let next = |told: &str, words: &str| -> Result<Value> {
        let (_, call) = told.split_once(words).context("a call")?;
        let arguments = call.split_once(' ').context("arguments")?.1;
        Ok(serde_json::from_str(
            arguments.lines().next().unwrap_or_default(),
        )?)
    };
    let (told, _) = agent
        .told("sandbox_session_output", next(&told, "Read all: ")?)
        .await?;
    ensure!(told.contains("\n10000\n"), "the middle is missing");

    // A file is read to its end by the calls that its parts name.
    let (mut arguments, mut all, mut parts) = (json!({"path": "numbers"}), String::new(), 0);
    loop {
        let (told, part) = agent
            .told("sandbox_workspace_read_file", arguments.clone())
            .await?;
        ensure!(told.len() <= 8_192 && part.to_string().len() <= 8_192);
        parts += 1;
        if let Some((lines, _)) = told.split_once("… ") {
            all.push_str(lines);
            arguments = next(&told, "Read on: ")?;
        } else {
            all.push_str(&told);
            break;
        }
    }
    let lines: Vec<String> = (1..=20_000).map(|number| format!("{number}\n")).collect();
    let expected = lines.concat();
    ensure!(all == expected && parts > 3, "{parts} parts differ");
    let (told, whole) = agent
        .told(
            "sandbox_workspace_read_file",
            json!({"path": "numbers", "max_bytes": 200_000}),
        )
        .await?;
    assert_eq!(
        (told.len(), whole["truncated"].as_bool()),
        (expected.len(), Some(false))
    );

    let (told, listed) = agent
        .told("sandbox_workspace_list", json!({"path": "d"}))
        .await?;
    ensure!(
        told.contains("There are more.") && listed["truncated"] == true,
        "{told}"
    );
    ensure!(listed.to_string().len() <= 8_192);
    let (told, listed) = agent
        .told("sandbox_workspace_list", next(&told, "Or list more: ")?)
        .await?;
    assert_eq!(listed["entries"].as_array().map(Vec::len), Some(300));
    ensure!(told.lines().count() == 300, "{told}");
    // The structure is bounded by its size as JSON, also where each byte takes more.
    let (told, binary) = agent
        .told("sandbox_session_exec", json!({"command": BINARY}))
        .await?;
    ensure!(
        told.contains("(binary, 9000 bytes)") && binary["encoding"] == "base64",
        "{told}"
    );
    ensure!(binary.to_string().len() <= 8_192 && binary["truncated"]["stderr"] == true);
    let (_, lines) = agent
        .told("sandbox_workspace_read_file", json!({"path": "lines"}))
        .await?;
    ensure!(
        lines.to_string().len() <= 8_192 && lines["truncated"] == true,
        "{}",
        lines.to_string().len()
    );
    // The structure keeps what the text drops.
    let (told, red) = agent
        .told("sandbox_workspace_read_file", json!({"path": "red"}))
        .await?;
    assert_eq!(
        (told.as_str(), red["content"].as_str()),
        ("red\n", Some("\u{1b}[31mred\u{1b}[0m\n"))
    );
    cluster.worker.shut_down().await
}

/// Writes bytes that are no text to both streams, and a file of empty lines.
const BINARY: &str = "head -c 9000 /dev/zero | tr '\\0' '\\377' | tee /dev/stderr; head -c 7000 /dev/zero | tr '\\0' '\\n' > lines";

#[tokio::test]
async fn an_export_has_the_changes_since_the_session_began_or_else_since_the_last_commit()
-> Result<()> {
    let mut cluster = Cluster::with_image(BASE).await?;
    let admin = cluster.orchestrator.token()?;
    let client = cluster.orchestrator.client()?;
    let task = task(&cluster, &admin, "exports").await?;
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(6);
    header.set_mode(0o644);
    tar.append_data(&mut header, "brought", &b"before"[..])?;
    let seed = client
        .put_artifact(task.parse()?, "seed.tar", None, tar.into_inner()?)
        .await?;
    let exported = async |agent: &McpAgent<'_>, arguments: Value| -> Result<(String, String)> {
        let (told, stored) = agent
            .told("sandbox_workspace_export_patch", arguments)
            .await?;
        let path = text(&stored["path"])?;
        let mut body = client.get_artifact(task.parse()?, &path, None).await?;
        let mut patch = Vec::new();
        while let Some(piece) = body.chunk().await? {
            patch.extend_from_slice(&piece);
        }
        let note = told.lines().next().unwrap_or_default();
        Ok((note.to_owned(), String::from_utf8(patch)?))
    };

    let agent = McpAgent::coding(&cluster, &task).await?;
    // The default image of these tests has no git.
    let mut wishes = small();
    wishes["image_ref"] = json!(BASE);
    let empty = wishes.clone();
    wishes["workspace_ref"] = json!(format!("artifact:{}", seed.id));
    agent.told("sandbox_session_create", wishes).await?;
    let commit = "git init -q . && git add . && git -c user.name=x -c user.email=x@example.org \
                  commit -q -m first";
    let script = format!("echo after > brought; {commit}; echo later > new");
    agent
        .told("sandbox_session_exec", json!({"command": script}))
        .await?;
    let (note, patch) = exported(&agent, json!({})).await?;
    assert_eq!(note, "The patch has the changes since the session began.");
    ensure!(
        patch.contains("-before") && patch.contains("+after") && patch.contains("+later"),
        "{patch}"
    );
    // Whoever names a base gets that.
    let (_, patch) = exported(&agent, json!({"base": "HEAD"})).await?;
    ensure!(
        !patch.contains("+after") && patch.contains("+later"),
        "{patch}"
    );

    // Nothing was brought here, so everything is new, with and without a repository.
    let agent = McpAgent::coding(&cluster, &task).await?;
    agent.told("sandbox_session_create", empty).await?;
    for (script, expected) in [
        ("echo one > a".to_owned(), "+one"),
        (format!("{commit}; echo two > a"), "+two"),
    ] {
        agent
            .told("sandbox_session_exec", json!({"command": script}))
            .await?;
        let (note, patch) = exported(&agent, json!({})).await?;
        assert_eq!(note, "The patch has the changes since the session began.");
        ensure!(
            patch.contains("new file") && patch.contains(expected) && !patch.contains("-one"),
            "{patch}"
        );
    }
    assert_eq!(
        agent
            .call_refused(
                "sandbox_workspace_export_patch",
                json!({"base": "no-such-commit"})
            )
            .await?,
        ("invalid_request".to_owned(), "arguments".to_owned())
    );
    let (_, patch) = exported(&agent, json!({"base": "HEAD"})).await?;
    ensure!(patch.contains("-one\n+two"), "{patch}");
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn help_and_instructions_use_the_names_of_the_client() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "names").await?;
    let agent = McpAgent::coding(&cluster, &task).await?;
    for (path, get, expected, other) in [
        (
            "/mcp",
            "help.get",
            "sandbox.session.exec",
            "sandbox_session",
        ),
        (
            "/mcp?names=underscore",
            "help_get",
            "sandbox_session_exec",
            "sandbox.session",
        ),
        (PATH, "help_get", "sandbox_session_exec", "sandbox.session"),
    ] {
        let agent = McpAgent {
            path,
            ..McpAgent::new(&cluster, &agent.token)
        };
        let (told, _) = agent.told(get, json!({"topic": "start"})).await?;
        ensure!(
            told.contains(expected) && !told.contains(other),
            "{path}: {told}"
        );
        let info = agent
            .rpc(
                "initialize",
                &json!({
                    "protocolVersion": "2025-06-18", "capabilities": {},
                    "clientInfo": {"name": "test", "version": "1"}
                }),
            )
            .await?;
        let told = text(&info["result"]["instructions"])?;
        let (expected, other) = if path == "/mcp" {
            ("help.list", "help_")
        } else {
            ("help_", "help.")
        };
        ensure!(
            told.contains(expected) && !told.contains(other),
            "{path}: {told}"
        );
    }
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn a_command_is_ended_thirty_seconds_after_its_call_was_cancelled() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "cancelled").await?;
    let agent = McpAgent::coding(&cluster, &task).await?;
    let (_, session) = agent.told("sandbox_session_create", small()).await?;
    let path = format!("/v1/sessions/{}/execs", text(&session["session_id"])?);
    let state = async || -> Result<Option<String>> {
        let answer = Answer::of(cluster.request(Method::GET, &path)?).await?;
        let page: Value = serde_json::from_slice(&answer.body)?;
        Ok(page["items"][0]["state"].as_str().map(str::to_owned))
    };
    let timeout = std::time::Duration::from_secs(60);
    {
        let call = agent.told(
            "sandbox_session_exec",
            json!({"command": "sleep 7003", "timeout_ms": 600_000}),
        );
        tokio::select! {
            answer = call => anyhow::bail!("it answered: {answer:?}"),
            started = eventually("the command runs", timeout, async || {
                Ok(state().await?.as_deref() == Some("running"))
            }) => started?,
        }
        // The connection closes here.
    }
    eventually("the command is ended", timeout, async || {
        Ok(state().await?.as_deref() == Some("exited"))
    })
    .await?;
    cluster.worker.shut_down().await
}
