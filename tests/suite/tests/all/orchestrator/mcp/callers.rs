//! Which caller may use which tool for what, and the audit records of it.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{AuditDecision, AuditKind};
use cynode_client::AuditFilter;
use cynode_tests::Answer;
use http::Method;
use serde_json::{Value, json};

use super::{McpAgent, create, exec, task};
use crate::orchestrator::{
    audit::{assert_trail_intact, records},
    cluster::{Cluster, text},
};

/// The stage of the last refused tool call.
async fn last_stage(cluster: &Cluster) -> Result<(String, String)> {
    let client = cluster.orchestrator.client()?;
    let all = records(
        &client,
        &AuditFilter {
            action: Some("tool.call".to_owned()),
            ..Default::default()
        },
    )
    .await?;
    let last = all
        .into_iter()
        .rfind(|record| record.body.kind == AuditKind::Intent)
        .context("a record")?;
    ensure!(last.body.decision == Some(AuditDecision::Deny), "{last:?}");
    Ok((
        last.body.stage.unwrap_or_default(),
        text(&last.body.detail["tool"])?,
    ))
}

#[tokio::test]
// invariant: tools
async fn a_tool_for_other_callers_looks_unknown_and_the_attempt_is_recorded() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "seen").await?;
    let manager = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?;
    let analyst = McpAgent::with_token_for(&cluster, &admin, "project_analyst", &[&task]).await?;
    let session = text(
        &manager
            .call_ok("sandbox.session.create", create(&task))
            .await?["session_id"],
    )?;
    let made = cluster
        .make(
            &admin,
            "/v1/tokens",
            &json!({"kind": "sandbox", "task_ids": [task], "session_id": session}),
        )
        .await?;
    let sandbox = McpAgent::new(&cluster, &text(&made["token"])?);
    let person = McpAgent::new(&cluster, &admin);

    let (theirs, all) = (manager.names().await?, person.names().await?);
    assert_eq!(theirs, all, "users and managers see different tools");
    let reads = analyst.names().await?;
    ensure!(
        reads.iter().all(|name| theirs.contains(name)) && reads.contains(&"db.task.get".to_owned()),
        "{reads:?}"
    );
    let changes = ["create", "update", "set", "stop", "exec"];
    ensure!(
        !reads.iter().any(|name| name.starts_with("sandbox.")
            || changes.contains(&name.rsplit('.').next().unwrap_or_default())),
        "{reads:?}"
    );
    let inside = sandbox.names().await?;
    ensure!(
        !inside.iter().any(|name| ["db.", "node.", "sandbox."]
            .iter()
            .any(|group| name.starts_with(group))),
        "{inside:?}"
    );
    for name in [
        "artifact.put",
        "artifact.get",
        "artifact.list",
        "help.list",
        "web.fetch",
        "web.search",
        "api.call",
    ] {
        ensure!(inside.contains(&name.to_owned()), "{inside:?}");
    }

    let before = manager.call("no.such.tool", json!({})).await?;
    assert_eq!(
        last_stage(&cluster).await?,
        ("tool".to_owned(), "no.such.tool".to_owned())
    );
    for (agent, tool) in [
        (&analyst, "sandbox.session.exec"),
        (&analyst, "db.task.update"),
        (&sandbox, "db.task.list"),
        (&sandbox, "node.list"),
        (&sandbox, "sandbox.session.list"),
    ] {
        assert_eq!(
            agent.call(tool, json!({})).await?,
            before,
            "{tool} responds differently than an unknown tool"
        );
        assert_eq!(
            last_stage(&cluster).await?,
            ("allowlist".to_owned(), tool.to_owned())
        );
    }
    // The routes of the API still admit no agent.
    let direct = Answer::of(cluster.request_by(
        &manager.token,
        Method::GET,
        &format!("/v1/sessions/{session}"),
    )?)
    .await?;
    assert_eq!(direct.outcome(), (403, "forbidden".to_owned()));
    let nobody = Answer::of(
        cluster
            .request_by("cyn_nothing", Method::POST, "/mcp")?
            .json(&json!({})),
    )
    .await?;
    assert_eq!(nobody.outcome(), (401, "unauthorized".to_owned()));
    assert_trail_intact(&cluster.orchestrator.client()?).await?;
    cluster.worker.shut_down().await
}

// part of: ISC-21
#[tokio::test]
// invariant: tools
async fn an_agents_token_reaches_only_its_task_and_what_belongs_to_it() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let (mine, other) = (
        task(&cluster, &admin, "mine").await?,
        task(&cluster, &admin, "other").await?,
    );
    let agent = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&mine]).await?;
    let neighbour =
        McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&other]).await?;
    let theirs = text(
        &neighbour
            .call_ok("sandbox.session.create", create(&other))
            .await?["session_id"],
    )?;
    let kept = neighbour
        .call_ok(
            "artifact.put",
            json!({"task_id": other, "path": "secret", "content": "theirs"}),
        )
        .await?;

    // Somebody else's task, with or without its resources.
    let of_task = ("not_found".to_owned(), "task".to_owned());
    for (tool, arguments) in [
        ("sandbox.session.create", create(&other)),
        ("sandbox.session.list", json!({"task_id": other})),
        ("sandbox.session.exec", exec(&other, &theirs, "true")),
        ("artifact.list", json!({"task_id": other})),
        ("artifact.get", json!({"task_id": other, "path": "secret"})),
        ("events.list", json!({"task_id": other})),
        ("db.task.get", json!({"task_id": other})),
        ("db.job.list", json!({"task_id": other})),
        ("db.preference.effective", json!({"task_id": other})),
        (
            "git.push",
            json!({"task_id": other, "repository": "site", "changeset": other}),
        ),
        (
            "db.task.get",
            json!({"task_id": "01a00000-0000-7000-8000-000000000009"}),
        ),
    ] {
        assert_eq!(
            agent.call_refused(tool, arguments).await?,
            of_task,
            "{tool}"
        );
    }
    // The agent's own task with another task's resource.
    for (tool, arguments, code) in [
        (
            "sandbox.session.exec",
            exec(&mine, &theirs, "true"),
            "session_not_found",
        ),
        (
            "sandbox.session.get",
            json!({"task_id": mine, "session_id": theirs}),
            "session_not_found",
        ),
        (
            "sandbox.session.end",
            json!({"task_id": mine, "session_id": theirs, "reason": "mine now"}),
            "session_not_found",
        ),
        (
            "sandbox.workspace.write_file",
            json!({"task_id": mine, "session_id": theirs, "path": "x", "content": "x"}),
            "session_not_found",
        ),
        (
            "artifact.get",
            json!({"task_id": mine, "id": kept["id"]}),
            "not_found",
        ),
        (
            "db.preference.list",
            json!({"task_id": mine, "scope": "task", "scope_id": other}),
            "not_found",
        ),
        (
            "db.preference.set",
            json!({"task_id": mine, "scope": "task", "scope_id": other, "key": "k", "value": 1}),
            "not_found",
        ),
    ] {
        assert_eq!(
            agent.call_refused(tool, arguments).await?,
            (code.to_owned(), "task".to_owned()),
            "{tool}"
        );
    }
    // The same response as for a missing one.
    let none = json!({"task_id": mine, "session_id": "01a00000-0000-7000-8000-000000000009"});
    assert_eq!(
        agent.call_refused("sandbox.session.get", none).await?,
        ("session_not_found".to_owned(), "task".to_owned())
    );
    // A sandbox can't start with another task's artifact either.
    let begin = format!("artifact:{}", text(&kept["id"])?);
    let mut made = create(&mine);
    made["workspace_ref"] = json!(begin);
    assert_eq!(
        agent.call_refused("sandbox.session.create", made).await?.0,
        "not_found"
    );
    let job = json!({"task_id": mine, "command": ["true"], "workspace_ref": begin});
    assert_eq!(
        agent.call_refused("db.job.create", job).await?.0,
        "not_found"
    );
    // A user who owns both tasks must name the right one, too.
    let person = McpAgent::new(&cluster, &admin);
    assert_eq!(
        person
            .call_refused("sandbox.session.exec", exec(&mine, &theirs, "true"))
            .await?
            .1,
        "task"
    );
    assert_eq!(
        neighbour
            .call_ok(
                "sandbox.session.get",
                json!({"task_id": other, "session_id": theirs})
            )
            .await?["state"],
        "running"
    );

    // The record names the tool and the session.
    neighbour
        .call_ok("sandbox.session.exec", exec(&other, &theirs, "true"))
        .await?;
    let client = cluster.orchestrator.client()?;
    let all = records(
        &client,
        &AuditFilter {
            action: Some("session.exec".to_owned()),
            ..Default::default()
        },
    )
    .await?;
    let last = all
        .iter()
        .rfind(|record| record.body.kind == AuditKind::Intent)
        .context("a record")?;
    assert_eq!(last.body.detail["tool"], "sandbox.session.exec");
    assert_eq!(
        last.body
            .subject
            .as_ref()
            .map(|subject| subject.kind.as_str()),
        Some("project_manager")
    );
    let refused = all.iter().filter(|record| {
        record.body.kind == AuditKind::Intent && record.body.stage.as_deref() == Some("task")
    });
    let refused: Vec<_> = refused
        .map(|record| {
            (
                record.body.decision,
                record.body.session_id.map(|id| id.to_string()),
            )
        })
        .collect();
    let denied = |session: Option<&str>| (Some(AuditDecision::Deny), session.map(str::to_owned));
    assert_eq!(
        refused,
        [denied(None), denied(Some(&theirs)), denied(Some(&theirs))],
        "the records do not name the target"
    );
    assert_trail_intact(&client).await?;
    cluster.worker.shut_down().await
}

// proves: ISC-21 with an_agents_token_reaches_only_its_task_and_what_belongs_to_it
// part of: ISC-01
#[tokio::test]
async fn tool_arguments_are_parsed_strictly() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "strict").await?;
    let agent = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?;
    let session = "01a00000-0000-7000-8000-000000000009";
    let words = async |tool: &str, arguments: Value| {
        let answer = agent.call(tool, arguments).await?;
        let failure = &answer["result"]["structuredContent"];
        ensure!(
            failure["code"] == "invalid_request" && failure["stage"] == "arguments",
            "{tool}: {answer}"
        );
        text(&failure["message"])
    };
    let mut unknown = exec(&task, session, "true");
    unknown["shell"] = json!(true);
    let mut wrong = exec(&task, session, "true");
    wrong["argv"] = json!("true");
    for (tool, arguments, named) in [
        ("sandbox.session.exec", unknown, "shell"),
        ("sandbox.session.exec", wrong, "argv"),
        (
            "sandbox.session.exec",
            json!({
                "task_id": task,
                "session_id": session,
                "argv": ["true"],
                "timeout_ms": 1,
                "cwd": "."
            }),
            "env",
        ),
        (
            "sandbox.session.create",
            json!({
                "task_id": task,
                "session_id": "new",
                "image_ref": "default",
                "workspace_ref": "new"
            }),
            "constraints",
        ),
        (
            "sandbox.session.create",
            json!({
                "task_id": task,
                "session_id": "mine",
                "image_ref": "default",
                "workspace_ref": "new",
                "constraints": {}
            }),
            "session_id",
        ),
        ("sandbox.session.list", json!({}), "task_id"),
        (
            "sandbox.session.list",
            json!({"task_id": "mine"}),
            "task_id",
        ),
        (
            "sandbox.workspace.read_file",
            json!({"task_id": task, "session_id": session, "path": "../etc/passwd"}),
            "path",
        ),
        (
            "sandbox.workspace.read_file",
            json!({"task_id": task, "session_id": session, "path": "a", "start_line": 0}),
            "start_line",
        ),
        (
            "sandbox.workspace.write_file",
            json!({"task_id": task, "session_id": session, "path": "a"}),
            "content",
        ),
        (
            "sandbox.workspace.write_file",
            json!({
                "task_id": task,
                "session_id": session,
                "path": "a",
                "content": "",
                "content_b64": ""
            }),
            "content",
        ),
        ("help.get", json!({"topic": "start", "more": 1}), "more"),
        ("db.system_setting.get", json!({"key": ""}), "key"),
        (
            "artifact.put",
            json!({"task_id": task, "path": "a//b", "content": ""}),
            "path",
        ),
        (
            "sandbox.workspace.read_file",
            json!({"task_id": task, "session_id": session, "path": "a".repeat(70_000)}),
            "long",
        ),
        (
            "sandbox.workspace.read_file",
            json!({"task_id": task, "session_id": session, "path": "a", "max_bytes": 1_048_577}),
            "max_bytes",
        ),
    ] {
        let words = words(tool, arguments).await?;
        ensure!(
            words.contains(named),
            "{tool} responds {words:?} without {named}"
        );
        assert_eq!(
            last_stage(&cluster).await?,
            ("arguments".to_owned(), tool.to_owned())
        );
    }
    // Each tool's schema lists its arguments and forbids others, like the tool does.
    for tool in agent.tools().await? {
        let (input, output) = (&tool["inputSchema"], &tool["outputSchema"]);
        ensure!(
            input["type"] == "object" && output["type"] == "object",
            "{tool}"
        );
        let name = text(&tool["name"])?;
        ensure!(
            input["additionalProperties"] == false
                || name.starts_with("git.")
                || name.starts_with("skills."),
            "{tool}"
        );
        let taskless = ["help.", "node.", "db.system_setting."]
            .iter()
            .any(|group| name.starts_with(group))
            || [
                "sandbox.allowed_images.list",
                "db.task.create",
                "db.task.list",
            ]
            .contains(&name.as_str());
        let required = input["required"]
            .as_array()
            .is_some_and(|names| names.contains(&json!("task_id")));
        assert_eq!(required, !taskless, "{name}");
    }
    cluster.worker.shut_down().await
}

// proves: REQ-SANDBX-0125, CYNAI.SANDBX.PMAgentAddToAllowedImages
// part of: CYNAI.SANDBX.AccessControlAuditing
#[tokio::test]
async fn a_manager_adds_images_only_while_a_setting_allows_it() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "images").await?;
    let agent = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?;
    let add = json!({"task_id": task, "image_ref": "localhost/cynode/other:1"});
    let images = async || {
        let listed = agent
            .call_ok("sandbox.allowed_images.list", json!({}))
            .await?;
        let versions = listed["items"]
            .as_array()
            .context("items")?
            .iter()
            .flat_map(|image| image["versions"].as_array().cloned().unwrap_or_default());
        anyhow::Ok(
            versions
                .filter_map(|version| version["image_ref"].as_str().map(str::to_owned))
                .collect::<Vec<_>>(),
        )
    };
    let before = images().await?;
    cluster
        .make(
            &admin,
            "/v1/images",
            &json!({"image_ref": "localhost/cynode/denied:1"}),
        )
        .await?;
    assert_eq!(
        images().await?,
        before,
        "other images than the allowed ones are listed"
    );
    assert_eq!(
        agent
            .call_refused("sandbox.allowed_images.add", add.clone())
            .await?,
        ("tool_disabled".to_owned(), "enabled".to_owned())
    );
    assert_eq!(last_stage(&cluster).await?.0, "enabled");
    let setting = "/v1/settings/agents.project_manager.sandbox.allow_add_to_allowed_images";
    let put = Answer::of(
        cluster
            .request(Method::PUT, setting)?
            .json(&json!({"value": true})),
    )
    .await?;
    assert_eq!(put.status, 200);
    agent
        .call_ok("sandbox.allowed_images.add", add.clone())
        .await?;
    assert_eq!(images().await?.len(), before.len() + 1);
    // An agent can't override users' decisions, nor give its image another image's name.
    for reference in [
        "localhost/cynode/other:1",
        "localhost/cynode/denied:1",
        &before[0],
    ] {
        let again = json!({
            "task_id": task,
            "image_ref": reference,
            "image_digest": format!("sha256:{}", "0".repeat(64))
        });
        assert_eq!(
            agent
                .call_refused("sandbox.allowed_images.add", again)
                .await?
                .0,
            "already_exists",
            "{reference}"
        );
    }
    // Nor may its reference be another image's name, or become one.
    cluster
        .make(
            &admin,
            "/v1/images",
            &json!({"image_ref": "registry.example/library/python:3", "name": "tools/python"}),
        )
        .await?;
    for reference in ["tools/python", "tools/python:3"] {
        let taken = agent
            .call(
                "sandbox.allowed_images.add",
                json!({"task_id": task, "image_ref": reference}),
            )
            .await?["result"]["structuredContent"]
            .clone();
        assert_eq!(taken["code"], "already_exists", "{taken}");
        let message = text(&taken["message"])?;
        ensure!(
            message.contains("'tools/python' (registry.example/library/python:3)")
                && text(&taken["remedy"])?.contains("whole reference"),
            "{taken}"
        );
    }
    for reference in ["sba-runner", "sba-runner:latest", "python", "default"] {
        let short = json!({"task_id": task, "image_ref": reference});
        assert_eq!(
            agent
                .call_refused("sandbox.allowed_images.add", short)
                .await?
                .0,
            "invalid_request",
            "{reference}"
        );
    }
    let named = json!({"task_id": task, "image_ref": "localhost/evil/x:1", "name": "other"});
    assert_eq!(
        agent
            .call_refused("sandbox.allowed_images.add", named)
            .await?,
        ("invalid_request".to_owned(), "arguments".to_owned())
    );
    assert_eq!(images().await?.len(), before.len() + 1);
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn an_agent_works_on_another_users_task_and_the_trail_records_it() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let (_, bob) = cluster.user("bob").await?;
    let theirs = task(&cluster, &bob, "of bob").await?;
    let mut body = crate::orchestrator::cluster::session();
    body["task_id"] = json!(theirs);
    let session = cluster.session(&bob, &body).await?;
    // A token made by an administrator works on bob's task, but not in bob's name.
    let agent = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&theirs]).await?;
    assert_eq!(
        agent
            .call_ok(
                "sandbox.session.exec",
                exec(&theirs, &session, "echo there")
            )
            .await?["stdout"],
        "there\n"
    );
    let here = json!({"task_id": theirs, "session_id": session});
    agent.call_ok("sandbox.session.get", here.clone()).await?;
    agent.call_ok("sandbox.workspace.list", here).await?;
    let mut secret = exec(&theirs, &session, "true");
    secret["env"] = json!({"TOKEN": admin});
    assert_eq!(
        agent.call_refused("sandbox.session.exec", secret).await?,
        ("secret_in_input".to_owned(), "secrets".to_owned())
    );

    // The content of an artifact can't affect a record.
    let liar = json!({
        "task_id": theirs,
        "path": "x",
        "media_type": "application/problem+json",
        "content": "{\"code\": \"denied_by_policy\", \"exit_code\": 7}"
    });
    agent.call_ok("artifact.put", liar).await?;
    let got = agent
        .call_ok("artifact.get", json!({"task_id": theirs, "path": "x"}))
        .await?;
    ensure!(got["size"].as_u64().is_some_and(|size| size > 0), "{got}");
    let client = cluster.orchestrator.client()?;
    let records_of = async |action: &str| {
        records(
            &client,
            &AuditFilter {
                action: Some(action.to_owned()),
                ..Default::default()
            },
        )
        .await
    };
    let outcome = records_of("artifact.get")
        .await?
        .into_iter()
        .rfind(|record| record.body.kind == AuditKind::Outcome)
        .context("an outcome")?
        .body;
    assert_eq!(
        (
            outcome.status,
            outcome.code,
            outcome.detail.get("exit_code")
        ),
        (Some(200), None, None)
    );

    // A missing service is recorded as such.
    assert_eq!(
        agent
            .call_refused(
                "web.fetch",
                json!({"task_id": theirs, "url": "https://example.org/"})
            )
            .await?,
        ("unavailable".to_owned(), "run".to_owned())
    );
    let outcome = records_of("tool.call")
        .await?
        .into_iter()
        .rfind(|record| record.body.kind == AuditKind::Outcome)
        .context("an outcome")?
        .body;
    assert_eq!(
        (
            outcome.code.as_deref(),
            outcome.detail.get("tool").and_then(Value::as_str)
        ),
        (Some("unavailable"), Some("web.fetch"))
    );
    assert_trail_intact(&client).await?;
    cluster.worker.shut_down().await
}
