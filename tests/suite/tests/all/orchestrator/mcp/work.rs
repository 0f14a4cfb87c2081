//! An agent's work from a task to an artifact.

use anyhow::{Context as _, Result, ensure};
use http::Method;
use serde_json::{Value, json};

use super::{McpAgent, create, exec, merge, task};
use crate::orchestrator::cluster::{Cluster, text};

// proves: ISC-01 with tool_arguments_are_parsed_strictly, ISC-05
// part of: ISC-02
#[tokio::test]
async fn a_manager_does_its_task_by_tools_from_a_session_to_a_patch() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "by tools").await?;
    let agent = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?;

    let info = agent
        .rpc(
            "initialize",
            &json!({
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "test", "version": "1"}
            }),
        )
        .await?;
    assert_eq!(
        (
            info["result"]["serverInfo"]["name"].as_str(),
            info["result"]["protocolVersion"].as_str()
        ),
        (Some("cynode"), Some("2025-06-18"))
    );

    let made = agent
        .call_ok("sandbox.session.create", create(&task))
        .await?;
    let session = text(&made["session_id"])?;
    assert_eq!(
        (made["state"].as_str(), made["task_id"].as_str()),
        (Some("running"), Some(task.as_str()))
    );
    let here = |more: Value| merge(json!({"task_id": task, "session_id": session}), &more);

    let ran = agent
        .call_ok(
            "sandbox.session.exec",
            exec(&task, &session, "echo out; echo err >&2; exit 3"),
        )
        .await?;
    assert_eq!(
        (
            ran["exit_code"].as_i64(),
            ran["stdout"].as_str(),
            ran["stderr"].as_str()
        ),
        (Some(3), Some("out\n"), Some("err\n"))
    );

    let written = agent
        .call_ok(
            "sandbox.workspace.write_file",
            here(json!({"path": "src/a.txt", "content": "one\ntwo\nthree\n", "mode": "0640"})),
        )
        .await?;
    let read = agent
        .call_ok(
            "sandbox.workspace.read_file",
            here(json!({"path": "/workspace/src/a.txt"})),
        )
        .await?;
    assert_eq!(
        read,
        json!({
            "content": "one\ntwo\nthree\n",
            "sha256": written["sha256"],
            "size": 14,
            "truncated": false
        })
    );
    let lines = agent
        .call_ok(
            "sandbox.workspace.read_file",
            here(json!({"path": "src/a.txt", "start_line": 2, "end_line": 2})),
        )
        .await?;
    assert_eq!(lines["content"], "two\n");
    let cut = agent
        .call_ok(
            "sandbox.workspace.read_file",
            here(json!({"path": "src/a.txt", "max_bytes": 5})),
        )
        .await?;
    assert_eq!(
        (cut["content"].as_str(), cut["truncated"].as_bool()),
        (Some("one\nt"), Some(true))
    );
    let changed = json!({"path": "src/a.txt", "content": "other", "if_match": "0".repeat(64)});
    assert_eq!(
        agent
            .call_refused("sandbox.workspace.write_file", here(changed))
            .await?
            .0,
        "precondition_failed"
    );
    agent
        .call_ok(
            "sandbox.workspace.write_file",
            here(json!({"path": "bytes", "content_b64": "/wD+", "if_match": "none"})),
        )
        .await?;
    let bytes = agent
        .call_ok(
            "sandbox.workspace.read_file",
            here(json!({"path": "bytes"})),
        )
        .await?;
    assert_eq!(
        (bytes["content_b64"].as_str(), bytes.get("content")),
        (Some("/wD+"), None)
    );

    let diff = "--- a/src/a.txt\n+++ b/src/a.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n";
    let patched = agent
        .call_ok(
            "sandbox.workspace.apply_patch",
            here(json!({ "diff": diff })),
        )
        .await?;
    assert_eq!(patched["files"][0]["operation"], "modify");
    let failure = agent
        .call(
            "sandbox.workspace.apply_patch",
            here(json!({ "diff": diff })),
        )
        .await?;
    let failure = &failure["result"]["structuredContent"];
    assert_eq!(
        (
            failure["code"].as_str(),
            failure["rejects"][0]["path"].as_str()
        ),
        (Some("patch_rejected"), Some("src/a.txt")),
        "{failure}"
    );
    let edit = json!({"path": "src/a.txt", "old": "three", "new": "3"});
    let edited = agent
        .call_ok("sandbox.workspace.edit_file", here(edit.clone()))
        .await?;
    assert_eq!(edited["replaced"], 1);
    assert_eq!(
        agent
            .call_refused("sandbox.workspace.edit_file", here(edit))
            .await?,
        ("edit_rejected".to_owned(), "run".to_owned())
    );
    let outside = json!({"path": "../etc/passwd", "old": "a", "new": "b"});
    assert_eq!(
        agent
            .call_refused("sandbox.workspace.edit_file", here(outside))
            .await?
            .1,
        "arguments"
    );
    let listed = agent
        .call_ok("sandbox.workspace.list", here(json!({"depth": 3})))
        .await?;
    ensure!(
        listed["entries"]
            .as_array()
            .is_some_and(|entries| entries.iter().any(|entry| entry["path"] == "src/a.txt")),
        "{listed}"
    );
    let found = agent
        .call_ok(
            "sandbox.workspace.search",
            here(json!({"pattern": "^2$", "glob": "*.txt"})),
        )
        .await?;
    assert_eq!(
        (
            found["matches"][0]["path"].as_str(),
            found["matches"][0]["line"].as_i64()
        ),
        (Some("src/a.txt"), Some(2))
    );

    // In the background, read while it runs.
    let mut arguments = exec(&task, &session, "echo begun; sleep 1000");
    arguments["background"] = json!(true);
    let started = agent.call_ok("sandbox.session.exec", arguments).await?;
    let exec_id = text(&started["exec_id"])?;
    let page = agent
        .call_ok(
            "sandbox.session.output",
            here(json!({"exec_id": exec_id, "wait_ms": 20_000})),
        )
        .await?;
    assert_eq!(page["chunks"][0]["data"], "begun\n");
    agent
        .call_ok(
            "sandbox.session.signal",
            here(json!({"exec_id": exec_id, "signal": "KILL", "scope": "tree"})),
        )
        .await?;
    let page = agent
        .call_ok(
            "sandbox.session.output",
            here(json!({"exec_id": exec_id, "after_seq": page["next_seq"], "wait_ms": 20_000})),
        )
        .await?;
    assert_eq!(page["exit"]["signal"], "KILL");

    let listed = agent
        .call_ok("sandbox.session.list", json!({"task_id": task}))
        .await?;
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1));
    let kept = agent
        .call_ok(
            "artifact.put",
            json!({"task_id": task, "path": "notes/a b.txt", "content": "kept"}),
        )
        .await?;
    assert_eq!(
        (kept["path"].as_str(), kept["version"].as_i64()),
        (Some("notes/a b.txt"), Some(1))
    );
    for which in [json!({"path": "notes/a b.txt"}), json!({"id": kept["id"]})] {
        let mut arguments = which;
        arguments["task_id"] = json!(task);
        let got = agent.call_ok("artifact.get", arguments).await?;
        assert_eq!(
            (got["content"].as_str(), got["sha256"].as_str()),
            (Some("kept"), kept["sha256"].as_str())
        );
    }
    let ended = agent
        .call_ok("sandbox.session.end", here(json!({"reason": "done"})))
        .await?;
    assert_eq!(
        (ended["state"].as_str(), ended["end_reason"].as_str()),
        (Some("ended"), Some("done"))
    );
    let events = agent
        .call_ok("events.list", json!({"task_id": task}))
        .await?;
    ensure!(
        events["items"]
            .as_array()
            .is_some_and(|items| items.iter().any(|event| event["state"] == "ended")),
        "{events}"
    );

    // A user sees the same.
    let shown =
        cynode_tests::Answer::of(cluster.request(Method::GET, &format!("/v1/sessions/{session}"))?)
            .await?;
    let shown: Value = serde_json::from_slice(&shown.body)?;
    let by_tool = agent
        .call_ok("sandbox.session.get", here(json!({})))
        .await?;
    assert_eq!(by_tool, shown);
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn tools_manage_work_like_the_api() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let project = text(
        &cluster
            .make(&admin, "/v1/projects", &json!({"name": "ours"}))
            .await?["id"],
    )?;
    let made = cluster
        .make(
            &admin,
            "/v1/tokens",
            &json!({"kind": "project_manager", "project_id": project}),
        )
        .await?;
    let agent = McpAgent::new(&cluster, &text(&made["token"])?);
    let strange = task(&cluster, &admin, "not in the project").await?;

    let new = agent
        .call_ok(
            "db.task.create",
            json!({"name": "first", "requirements": ["works"]}),
        )
        .await?;
    let id = text(&new["id"])?;
    assert_eq!(
        new["project_id"],
        project.as_str(),
        "the task is not in the token's project"
    );
    let listed = agent.call_ok("db.task.list", json!({})).await?;
    let names: Vec<&str> = listed["items"]
        .as_array()
        .context("items")?
        .iter()
        .filter_map(|task| task["name"].as_str())
        .collect();
    assert_eq!(
        names,
        ["first"],
        "other tasks than the visible ones are listed"
    );
    assert_eq!(
        agent
            .call_ok("db.task.update", json!({"task_id": id, "status": "active"}))
            .await?["status"],
        "active"
    );
    assert_eq!(
        agent.call_ok("db.task.get", json!({"task_id": id})).await?["requirements"],
        json!(["works"])
    );
    assert_eq!(
        agent
            .call_ok("db.project.get", json!({"task_id": id}))
            .await?["name"],
        "ours"
    );
    assert_eq!(
        agent
            .call_ok("db.project.list", json!({"task_id": id}))
            .await?["items"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    assert_eq!(
        agent
            .call_refused("db.task.get", json!({"task_id": strange}))
            .await?,
        ("not_found".to_owned(), "task".to_owned())
    );

    let job = agent
        .call_ok(
            "db.job.create",
            json!({"task_id": id, "command": ["sh", "-c", "echo ran; exit 4"]}),
        )
        .await?;
    let of_job = json!({"task_id": id, "job_id": job["job_id"]});
    cynode_tests::eventually(
        "the job has ended",
        std::time::Duration::from_secs(60),
        async || Ok(agent.call_ok("db.job.get", of_job.clone()).await?["state"] == "failed"),
    )
    .await?;
    let ended = agent.call_ok("db.job.get", of_job.clone()).await?;
    assert_eq!(
        (ended["exit_code"].as_i64(), ended["stdout"].as_str()),
        (Some(4), Some("ran\n"))
    );
    assert_eq!(
        agent.call_ok("db.job.list", json!({"task_id": id})).await?["items"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    agent.call_ok("db.job.stop", of_job).await?;

    let key = "agents.sandbox_agent.additional_context";
    agent
        .call_ok(
            "db.preference.set",
            json!({"task_id": id, "key": key, "value": "be brief"}),
        )
        .await?;
    assert_eq!(
        agent
            .call_ok("db.preference.get", json!({"task_id": id, "key": key}))
            .await?["value"],
        "be brief"
    );
    assert_eq!(
        agent
            .call_ok("db.preference.list", json!({"task_id": id}))
            .await?["items"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    let effective = agent
        .call_ok("db.preference.effective", json!({"task_id": id}))
        .await?;
    ensure!(
        effective["items"]
            .as_array()
            .is_some_and(|items| items.iter().any(|item| item["key"] == key)),
        "{effective}"
    );
    for key in [
        "sandbox_images.registries",
        "inference.allowed_models",
        "egress.hosts",
    ] {
        let widened = json!({"task_id": id, "key": key, "value": []});
        assert_eq!(
            agent.call_refused("db.preference.set", widened).await?,
            ("denied_by_policy".to_owned(), "policy".to_owned()),
            "{key}"
        );
    }

    let nodes = agent.call_ok("node.list", json!({})).await?;
    assert_eq!(
        agent
            .call_ok("node.get", json!({"node_id": nodes["items"][0]["id"]}))
            .await?["name"],
        "node-1"
    );
    let settings = agent.call_ok("db.system_setting.list", json!({})).await?;
    ensure!(
        settings["items"].as_array().is_some_and(|items| items
            .iter()
            .any(|item| item["key"] == "sandbox.default_image")),
        "{settings}"
    );
    agent
        .call_ok(
            "db.system_setting.get",
            json!({"key": "sandbox.default_image"}),
        )
        .await?;
    let topics = agent.call_ok("help.list", json!({})).await?;
    agent
        .call_ok("help.get", json!({"topic": topics["topics"][0]["topic"]}))
        .await?;
    assert_eq!(
        agent
            .call_refused(
                "git.push",
                json!({"task_id": id, "repository": "site", "changeset": id}),
            )
            .await?
            .0,
        "unavailable"
    );
    assert_eq!(
        agent
            .call_refused(
                "web.fetch",
                json!({"task_id": id, "url": "https://example.org/"})
            )
            .await?
            .0,
        "unavailable"
    );
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn sandbox_tools_accept_the_id_of_a_job() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "by job").await?;
    let agent = McpAgent {
        path: "/mcp?names=underscore",
        ..McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?
    };
    ensure!(
        agent.names().await?.iter().all(|name| !name.contains('.')),
        "a tool name has a dot"
    );
    let job = "01a00000-0000-7000-8000-000000000001";
    let of_job = |more: Value| merge(json!({"task_id": task, "job_id": job}), &more);
    let made = agent
        .call_ok(
            "sandbox_create",
            of_job(json!({"constraints": crate::orchestrator::cluster::session()})),
        )
        .await?;
    assert_eq!(made["session_id"], job);
    agent
        .call_ok(
            "sandbox_put_file",
            of_job(json!({"path": "in", "content": "words\n"})),
        )
        .await?;
    assert_eq!(
        agent
            .call_ok("sandbox_exec", of_job(json!({"argv": ["cat", "in"]})))
            .await?["stdout"],
        "words\n"
    );
    assert_eq!(
        agent
            .call_ok("sandbox_get_file", of_job(json!({"path": "in"})))
            .await?["content"],
        "words\n"
    );
    assert_eq!(
        agent
            .call_ok("sandbox_stream_logs", of_job(json!({})))
            .await?["chunks"][0]["data"],
        "words\n"
    );
    assert_eq!(
        agent.call_ok("sandbox_destroy", of_job(json!({}))).await?["state"],
        "ended"
    );
    agent.assert_unknown("sandbox.create", json!({})).await?;
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn a_stopping_orchestrator_answers_the_calls_in_flight() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "to its end").await?;
    let agent = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?;
    let session = text(
        &agent
            .call_ok("sandbox.session.create", create(&task))
            .await?["session_id"],
    )?;
    let running = agent.call_ok(
        "sandbox.session.exec",
        exec(
            &task,
            &session,
            "touch begun; while test ! -e stopped; do sleep 0.1; done; echo to its end",
        ),
    );
    let stopping = async {
        let worker = cluster.worker.client()?;
        let id = session.parse()?;
        cynode_tests::eventually(
            "the command has started",
            std::time::Duration::from_secs(30),
            async || Ok(worker.head_file(id, "begun".as_ref()).await.is_ok()),
        )
        .await?;
        let pid = rustix::process::Pid::from_raw(cluster.orchestrator.pid().cast_signed())
            .context("a process")?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let refuses = async || {
            Ok(reqwest::Client::builder()
                .no_proxy()
                .build()?
                .get(format!("{}/healthz", cluster.orchestrator.url()?))
                .send()
                .await
                .is_err())
        };
        cynode_tests::eventually(
            "the orchestrator takes no new calls",
            std::time::Duration::from_secs(30),
            refuses,
        )
        .await?;
        worker
            .put_file(
                id,
                "stopped".as_ref(),
                "",
                &cynode_client::PutOptions::default(),
            )
            .await?;
        anyhow::Ok(())
    };
    let (ran, stopped) = tokio::join!(running, stopping);
    stopped?;
    assert_eq!(ran?["stdout"], "to its end\n");
    cluster.worker.shut_down().await
}
