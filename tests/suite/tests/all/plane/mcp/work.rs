//! What an agent does from a task to an artifact.

use anyhow::{Context as _, Result, ensure};
use http::Method;
use serde_json::{Value, json};

use super::{Agent, create, exec, task, with};
use crate::plane::small::{Small, text};

#[tokio::test]
async fn a_manager_does_its_task_by_tools_from_a_session_to_a_patch() -> Result<()> {
    let mut small = Small::start().await?;
    let admin = small.orchestrator.token()?;
    let task = task(&small, &admin, "by tools").await?;
    let agent = Agent::of(&small, &admin, "project_manager", &[&task]).await?;

    let info = agent.ask("initialize", &json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}})).await?;
    assert_eq!(
        (
            info["result"]["serverInfo"]["name"].as_str(),
            info["result"]["protocolVersion"].as_str()
        ),
        (Some("cynode"), Some("2025-06-18"))
    );

    let made = agent.done("sandbox.session.create", create(&task)).await?;
    let session = text(&made["session_id"])?;
    assert_eq!(
        (made["state"].as_str(), made["task_id"].as_str()),
        (Some("running"), Some(task.as_str()))
    );
    let here = |more: Value| with(json!({"task_id": task, "session_id": session}), &more);

    let ran = agent
        .done(
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
        .done(
            "sandbox.workspace.write_file",
            here(json!({"path": "src/a.txt", "content": "one\ntwo\nthree\n", "mode": "0640"})),
        )
        .await?;
    let read = agent
        .done(
            "sandbox.workspace.read_file",
            here(json!({"path": "/workspace/src/a.txt"})),
        )
        .await?;
    assert_eq!(
        read,
        json!({"content": "one\ntwo\nthree\n", "sha256": written["sha256"], "size": 14, "truncated": false})
    );
    let lines = agent
        .done(
            "sandbox.workspace.read_file",
            here(json!({"path": "src/a.txt", "start_line": 2, "end_line": 2})),
        )
        .await?;
    assert_eq!(lines["content"], "two\n");
    let cut = agent
        .done(
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
            .refused("sandbox.workspace.write_file", here(changed))
            .await?
            .0,
        "precondition_failed"
    );
    agent
        .done(
            "sandbox.workspace.write_file",
            here(json!({"path": "bytes", "content_b64": "/wD+", "if_match": "none"})),
        )
        .await?;
    let bytes = agent
        .done(
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
        .done(
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
    let listed = agent
        .done("sandbox.workspace.list", here(json!({"depth": 3})))
        .await?;
    ensure!(
        listed["entries"]
            .as_array()
            .is_some_and(|entries| entries.iter().any(|entry| entry["path"] == "src/a.txt")),
        "{listed}"
    );
    let found = agent
        .done(
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

    // In the background, and read as it comes.
    let mut arguments = exec(&task, &session, "echo begun; sleep 1000");
    arguments["background"] = json!(true);
    let begun = agent.done("sandbox.session.exec", arguments).await?;
    let exec_id = text(&begun["exec_id"])?;
    let page = agent
        .done(
            "sandbox.session.output",
            here(json!({"exec_id": exec_id, "wait_ms": 20_000})),
        )
        .await?;
    assert_eq!(page["chunks"][0]["data"], "begun\n");
    agent
        .done(
            "sandbox.session.signal",
            here(json!({"exec_id": exec_id, "signal": "KILL", "scope": "tree"})),
        )
        .await?;
    let page = agent
        .done(
            "sandbox.session.output",
            here(json!({"exec_id": exec_id, "after_seq": page["next_seq"], "wait_ms": 20_000})),
        )
        .await?;
    assert_eq!(page["exit"]["signal"], "KILL");

    let listed = agent
        .done("sandbox.session.list", json!({"task_id": task}))
        .await?;
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1));
    let kept = agent
        .done(
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
        let got = agent.done("artifact.get", arguments).await?;
        assert_eq!(
            (got["content"].as_str(), got["sha256"].as_str()),
            (Some("kept"), kept["sha256"].as_str())
        );
    }
    let ended = agent
        .done("sandbox.session.end", here(json!({"reason": "done"})))
        .await?;
    assert_eq!(
        (ended["state"].as_str(), ended["end_reason"].as_str()),
        (Some("ended"), Some("done"))
    );
    let events = agent.done("events.list", json!({"task_id": task})).await?;
    ensure!(
        events["items"]
            .as_array()
            .is_some_and(|items| items.iter().any(|event| event["state"] == "ended")),
        "{events}"
    );

    // The same as a person sees it.
    let shown =
        cynode_tests::Answer::of(small.request(Method::GET, &format!("/v1/sessions/{session}"))?)
            .await?;
    let shown: Value = serde_json::from_slice(&shown.body)?;
    let by_tool = agent.done("sandbox.session.get", here(json!({}))).await?;
    assert_eq!(by_tool, shown);
    small.worker.shut_down().await
}

#[tokio::test]
async fn work_is_managed_by_tools_as_by_the_api() -> Result<()> {
    let mut small = Small::start().await?;
    let admin = small.orchestrator.token()?;
    let project = text(
        &small
            .make(&admin, "/v1/projects", &json!({"name": "ours"}))
            .await?["id"],
    )?;
    let made = small
        .make(
            &admin,
            "/v1/tokens",
            &json!({"kind": "project_manager", "project_id": project}),
        )
        .await?;
    let agent = Agent::new(&small, &text(&made["token"])?);
    let strange = task(&small, &admin, "not in the project").await?;

    let new = agent
        .done(
            "db.task.create",
            json!({"name": "first", "requirements": ["works"]}),
        )
        .await?;
    let id = text(&new["id"])?;
    assert_eq!(
        new["project_id"],
        project.as_str(),
        "in the project that its token names"
    );
    let listed = agent.done("db.task.list", json!({})).await?;
    let names: Vec<&str> = listed["items"]
        .as_array()
        .context("items")?
        .iter()
        .filter_map(|task| task["name"].as_str())
        .collect();
    assert_eq!(names, ["first"], "nothing of what it may not know of");
    assert_eq!(
        agent
            .done("db.task.update", json!({"task_id": id, "status": "active"}))
            .await?["status"],
        "active"
    );
    assert_eq!(
        agent.done("db.task.get", json!({"task_id": id})).await?["requirements"],
        json!(["works"])
    );
    assert_eq!(
        agent.done("db.project.get", json!({"task_id": id})).await?["name"],
        "ours"
    );
    assert_eq!(
        agent
            .done("db.project.list", json!({"task_id": id}))
            .await?["items"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    assert_eq!(
        agent
            .refused("db.task.get", json!({"task_id": strange}))
            .await?,
        ("not_found".to_owned(), "task".to_owned())
    );

    let job = agent
        .done(
            "db.job.create",
            json!({"task_id": id, "command": ["sh", "-c", "echo ran; exit 4"]}),
        )
        .await?;
    let of_job = json!({"task_id": id, "job_id": job["job_id"]});
    cynode_tests::eventually(
        "the job has ended",
        std::time::Duration::from_secs(60),
        async || Ok(agent.done("db.job.get", of_job.clone()).await?["state"] == "failed"),
    )
    .await?;
    let ended = agent.done("db.job.get", of_job.clone()).await?;
    assert_eq!(
        (ended["exit_code"].as_i64(), ended["stdout"].as_str()),
        (Some(4), Some("ran\n"))
    );
    assert_eq!(
        agent.done("db.job.list", json!({"task_id": id})).await?["items"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    agent.done("db.job.stop", of_job).await?;

    let key = "agents.sandbox_agent.additional_context";
    agent
        .done(
            "db.preference.set",
            json!({"task_id": id, "key": key, "value": "be brief"}),
        )
        .await?;
    assert_eq!(
        agent
            .done("db.preference.get", json!({"task_id": id, "key": key}))
            .await?["value"],
        "be brief"
    );
    assert_eq!(
        agent
            .done("db.preference.list", json!({"task_id": id}))
            .await?["items"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    let effective = agent
        .done("db.preference.effective", json!({"task_id": id}))
        .await?;
    ensure!(
        effective["items"]
            .as_array()
            .is_some_and(|items| items.iter().any(|item| item["key"] == key)),
        "{effective}"
    );
    let images = json!({"task_id": id, "key": "sandbox_images.registries", "value": []});
    assert_eq!(
        agent.refused("db.preference.set", images).await?,
        ("denied_by_policy".to_owned(), "policy".to_owned())
    );

    let nodes = agent.done("node.list", json!({})).await?;
    assert_eq!(
        agent
            .done("node.get", json!({"node_id": nodes["items"][0]["id"]}))
            .await?["name"],
        "node-1"
    );
    let settings = agent.done("db.system_setting.list", json!({})).await?;
    ensure!(
        settings["items"].as_array().is_some_and(|items| items
            .iter()
            .any(|item| item["key"] == "sandbox.default_image")),
        "{settings}"
    );
    agent
        .done(
            "db.system_setting.get",
            json!({"key": "sandbox.default_image"}),
        )
        .await?;
    let topics = agent.done("help.list", json!({})).await?;
    agent
        .done("help.get", json!({"topic": topics["topics"][0]["topic"]}))
        .await?;
    assert_eq!(
        agent.refused("git.push", json!({"task_id": id})).await?.0,
        "unavailable"
    );
    assert_eq!(
        agent
            .refused(
                "web.fetch",
                json!({"task_id": id, "url": "https://example.org/"})
            )
            .await?
            .0,
        "unavailable"
    );
    small.worker.shut_down().await
}

#[tokio::test]
async fn a_sandbox_goes_by_the_id_of_its_job() -> Result<()> {
    let mut small = Small::start().await?;
    let admin = small.orchestrator.token()?;
    let task = task(&small, &admin, "by job").await?;
    let agent = Agent {
        path: "/mcp?names=underscore",
        ..Agent::of(&small, &admin, "project_manager", &[&task]).await?
    };
    ensure!(
        agent.names().await?.iter().all(|name| !name.contains('.')),
        "names without dots"
    );
    let job = "01a00000-0000-7000-8000-000000000001";
    let of_job = |more: Value| with(json!({"task_id": task, "job_id": job}), &more);
    let made = agent
        .done(
            "sandbox_create",
            of_job(json!({"constraints": crate::plane::small::session()})),
        )
        .await?;
    assert_eq!(made["session_id"], job);
    agent
        .done(
            "sandbox_put_file",
            of_job(json!({"path": "in", "content": "words\n"})),
        )
        .await?;
    assert_eq!(
        agent
            .done("sandbox_exec", of_job(json!({"argv": ["cat", "in"]})))
            .await?["stdout"],
        "words\n"
    );
    assert_eq!(
        agent
            .done("sandbox_get_file", of_job(json!({"path": "in"})))
            .await?["content"],
        "words\n"
    );
    assert_eq!(
        agent.done("sandbox_stream_logs", of_job(json!({}))).await?["chunks"][0]["data"],
        "words\n"
    );
    assert_eq!(
        agent.done("sandbox_destroy", of_job(json!({}))).await?["state"],
        "ended"
    );
    agent.unknown("sandbox.create", json!({})).await?;
    small.worker.shut_down().await
}

#[tokio::test]
async fn an_orchestrator_that_is_told_to_stop_answers_what_was_begun() -> Result<()> {
    let mut small = Small::start().await?;
    let admin = small.orchestrator.token()?;
    let task = task(&small, &admin, "to its end").await?;
    let agent = Agent::of(&small, &admin, "project_manager", &[&task]).await?;
    let session = text(&agent.done("sandbox.session.create", create(&task)).await?["session_id"])?;
    let running = agent.done(
        "sandbox.session.exec",
        exec(
            &task,
            &session,
            "touch begun; while test ! -e stopped; do sleep 0.1; done; echo to its end",
        ),
    );
    let stopping = async {
        let worker = small.worker.client()?;
        let id = session.parse()?;
        cynode_tests::eventually(
            "it has begun",
            std::time::Duration::from_secs(30),
            async || Ok(worker.head_file(id, "begun".as_ref()).await.is_ok()),
        )
        .await?;
        let pid = rustix::process::Pid::from_raw(small.orchestrator.pid().cast_signed())
            .context("a process")?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let refuses = async || {
            Ok(reqwest::Client::builder()
                .no_proxy()
                .build()?
                .get(format!("{}/healthz", small.orchestrator.url()?))
                .send()
                .await
                .is_err())
        };
        cynode_tests::eventually(
            "it takes no more",
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
    small.worker.shut_down().await
}
