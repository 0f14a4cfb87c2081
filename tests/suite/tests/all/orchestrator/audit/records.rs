//! The content of records: who did what, with which hashes, and with which outcome. Never a value,
//! an input or the content of a file.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{AuditDecision, AuditKind, AuditResult};
use cynode_client::AuditFilter;
use cynode_tests::{ControlPlane, eventually};
use http::{Method, header};
use serde_json::{Value, json};

use super::{
    CallRecord, TIMEOUT, assert_trail_intact, body, call_id, call_ok, records, records_of_action,
    request, sha256,
};
use crate::orchestrator::cluster::{Cluster, session, text};

/// Checks the size and the hash of a command's output.
fn assert_output(detail: &serde_json::Map<String, Value>, stdout: &[u8], stderr: &[u8]) {
    let recorded = json!([detail["bytes"], detail["sha256"]]);
    let expected = json!([{"stdout": stdout.len(), "stderr": stderr.len()}, {"stdout": sha256(stdout), "stderr": sha256(stderr)}]);
    assert_eq!(recorded, expected);
}

// part of: ISC-22, ISC-23
#[tokio::test]
// invariant: gate
async fn a_command_is_recorded_with_its_arguments_its_exit_and_its_output_hashes() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let (client, admin) = (
        cluster.orchestrator.client()?,
        cluster.orchestrator.token()?,
    );
    let id = cluster.session(&admin, &session()).await?;
    let exec = |body: &Value| {
        anyhow::Ok(
            cluster
                .request(Method::POST, &format!("/v1/sessions/{id}/exec"))?
                .json(body),
        )
    };
    let script = "cat; printf wrong >&2; exit 3";
    let request_body = json!({
        "argv": ["sh", "-c", script],
        "cwd": "/tmp",
        "timeout_ms": 20_000,
        "env": {"COLOUR": "ultramarine-7", "SHAPE": "rhombus-7"},
        "stdin": "hidden input 93"
    });

    // As JSON.
    let (answer, CallRecord { intent, outcome }) = call_ok(&client, exec(&request_body)?).await?;
    let detail = &intent.body.detail;
    assert_eq!(Value::Object(detail.clone()), {
        let stdin = json!({"size": 15, "sha256": sha256("hidden input 93")});
        json!({
            "argv": ["sh", "-c", script],
            "cwd": "/tmp",
            "timeout_ms": 20_000,
            "env": ["COLOUR", "SHAPE"],
            "stdin": stdin
        })
    });
    let subject = intent
        .body
        .subject
        .clone()
        .context("the subject is recorded")?;
    assert_eq!(
        (
            subject.kind.as_str(),
            subject.name.as_deref(),
            subject.token_id.is_some()
        ),
        ("user", Some("admin"), true)
    );
    assert_eq!(
        (intent.body.decision, intent.body.rules.is_empty()),
        (Some(AuditDecision::Allow), false)
    );
    assert_eq!(
        intent.body.session_id.map(|id| id.to_string()),
        Some(id.clone())
    );
    assert_eq!(
        intent.body.exec_id.map(|id| id.to_string()),
        body(&answer)?["exec_id"].as_str().map(str::to_owned)
    );
    assert_eq!(outcome.body.detail["exit_code"], 3);
    assert_output(&outcome.body.detail, b"hidden input 93", b"wrong");

    // As a stream.
    let (_, CallRecord { intent, outcome }) = call_ok(
        &client,
        exec(&request_body)?.header(header::ACCEPT, "text/event-stream"),
    )
    .await?;
    assert_eq!(
        (
            &intent.body.detail["argv"],
            &outcome.body.detail["exit_code"]
        ),
        (&json!(["sh", "-c", script]), &json!(3))
    );
    assert_output(&outcome.body.detail, b"hidden input 93", b"wrong");

    // Hashes and sizes cover the whole output, beyond what the response returns.
    let long = json!({
        "argv": ["sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x"],
        "timeout_ms": 20_000,
        "max_output_bytes": 10
    });
    let (answer, CallRecord { outcome, .. }) = call_ok(&client, exec(&long)?).await?;
    ensure!(
        body(&answer)?["truncated"]["stdout"] == true,
        "the output is not truncated"
    );
    assert_output(&outcome.body.detail, &vec![b'x'; 300_000], b"");

    // A command killed by a signal.
    let (_, CallRecord { outcome, .. }) = call_ok(
        &client,
        exec(&json!({"argv": ["sh", "-c", "kill -9 $$"], "timeout_ms": 20_000}))?,
    )
    .await?;
    assert_eq!(
        json!([
            outcome.body.detail["exit_code"],
            outcome.body.detail["signal"]
        ]),
        json!([null, "KILL"])
    );

    // A background command: the call is answered when it starts, and its end is recorded later.
    let background = json!({
        "argv": ["sh", "-c", "cat gate; printf late; exit 5"],
        "timeout_ms": 60_000,
        "background": true
    });
    call_ok(
        &client,
        exec(&json!({"argv": ["mkfifo", "gate"], "timeout_ms": 20_000}))?,
    )
    .await?;
    let (answer, CallRecord { intent, .. }) = call_ok(&client, exec(&background)?).await?;
    assert_eq!(
        (answer.status, &intent.body.detail["background"]),
        (202, &json!(true))
    );
    assert_eq!(
        records_of_action(&client, "exec.ended").await?.len(),
        0,
        "the command has ended"
    );
    call_ok(
        &client,
        exec(&json!({"argv": ["sh", "-c", "echo open > gate"], "timeout_ms": 20_000}))?,
    )
    .await?;
    eventually("the end is recorded", TIMEOUT, async || {
        Ok(!records_of_action(&client, "exec.ended").await?.is_empty())
    })
    .await?;
    let ended = records_of_action(&client, "exec.ended").await?;
    let [ended] = &ended[..] else {
        anyhow::bail!("{ended:?}")
    };
    assert_eq!(
        (ended.body.kind, ended.body.result, ended.body.exec_id),
        (
            AuditKind::Event,
            Some(AuditResult::Done),
            intent.body.exec_id
        )
    );
    assert_eq!(
        (
            ended.body.call_id.map(|id| id.to_string()),
            ended.body.session_id
        ),
        (Some(call_id(&answer)?), intent.body.session_id)
    );
    assert_eq!(
        json!([ended.body.detail["state"], ended.body.detail["exit_code"]]),
        json!(["exited", 5])
    );
    assert_output(&ended.body.detail, b"open\nlate", b"");

    // A command that fails to start.
    let missing = super::call(
        &client,
        exec(&json!({"argv": ["/no/such/program"], "timeout_ms": 20_000}))?,
    )
    .await?;
    assert_ne!(
        missing.1.outcome.body.detail.get("exit_code"),
        Some(&json!(0)),
        "{missing:?}"
    );

    for hidden in ["ultramarine-7", "rhombus-7", "hidden input 93"] {
        assert_eq!(
            cluster.control_plane.postgres.query(&format!(
                "select count(*) from audit_events where body::text like '%{hidden}%'"
            ))?,
            "0",
            "{hidden}"
        );
    }

    // A command whose end nobody has asked for before its session ends.
    let background =
        json!({"argv": ["sh", "-c", "exit 6"], "timeout_ms": 60_000, "background": true});
    let (answer, CallRecord { intent, .. }) = call_ok(&client, exec(&background)?).await?;
    cluster.control_plane.postgres.query(
        "update execs set lease_until = now() + interval '1 hour' where state = 'running'",
    )?;
    let path = format!(
        "/v1/sessions/{id}/execs/{}",
        body(&answer)?["exec_id"].as_str().context("an id")?
    );
    eventually("the command has ended", TIMEOUT, async || {
        let shown = cynode_tests::Answer::of(cluster.request(Method::GET, &path)?).await?;
        Ok(body(&shown)?["state"] == "exited")
    })
    .await?;
    call_ok(
        &client,
        cluster
            .request(Method::POST, &format!("/v1/sessions/{id}/end"))?
            .json(&json!({})),
    )
    .await?;
    let ended = records_of_action(&client, "exec.ended").await?;
    let last = ended.last().context("the end is recorded")?;
    assert_eq!(
        (last.body.exec_id, &last.body.detail["exit_code"]),
        (intent.body.exec_id, &json!(6)),
        "{ended:?}"
    );
    assert_trail_intact(&client).await?;
    cluster.worker.shut_down().await
}

// part of: ISC-22
#[tokio::test]
async fn a_file_change_is_recorded_with_its_path_and_the_hashes_before_and_after() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let (client, admin) = (
        cluster.orchestrator.client()?,
        cluster.orchestrator.token()?,
    );
    let id = cluster.session(&admin, &session()).await?;
    let files = format!("/v1/sessions/{id}/files");
    let [one, two, three] = ["one of them\n", "two of them\n", "three of them\n"];
    let put = |text: &str| {
        anyhow::Ok(
            cluster
                .request(Method::PUT, &format!("{files}?path=a.txt"))?
                .body(text.to_owned()),
        )
    };
    let post = |what: &str, body: &Value| {
        anyhow::Ok(
            cluster
                .request(Method::POST, &format!("{files}:{what}"))?
                .json(body),
        )
    };

    let (_, CallRecord { intent, outcome }) = call_ok(&client, put(one)?).await?;
    assert_eq!(
        json!([
            intent.body.action,
            intent.body.detail["path"],
            intent.body.detail["body"]
        ]),
        { json!(["file.write", "a.txt", {"size": one.len(), "sha256": sha256(one)}]) }
    );
    assert_eq!(
        outcome.body.detail["changes"],
        json!([{"path": "a.txt", "sha256_after": sha256(one)}])
    );
    let (_, CallRecord { outcome, .. }) = call_ok(&client, put(two)?).await?;
    assert_eq!(
        outcome.body.detail["changes"],
        json!([{"path": "a.txt", "sha256_before": sha256(one), "sha256_after": sha256(two)}])
    );

    let diff = format!("--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-{two}+{three}");
    let (_, CallRecord { intent, outcome }) =
        call_ok(&client, post("patch", &json!({"diff": diff}))?).await?;
    assert_eq!(
        json!([intent.body.action, intent.body.detail["diff"]]),
        json!(["file.patch", {"size": diff.len(), "sha256": sha256(&diff)}])
    );
    assert_eq!(
        outcome.body.detail["changes"],
        json!([{"path": "a.txt", "sha256_before": sha256(two), "sha256_after": sha256(three)}])
    );

    // A stray parameter does not hide what is edited.
    let edit = json!({"path": "a.txt", "old": "three", "new": "two"});
    let (_, CallRecord { intent, outcome }) =
        call_ok(&client, post("edit?path=other", &edit)?).await?;
    assert_eq!(
        json!([
            intent.body.action,
            intent.body.detail["path"],
            intent.body.detail["new"]
        ]),
        json!(["file.write", "a.txt", {"size": 3, "sha256": sha256("two")}])
    );
    assert_eq!(
        outcome.body.detail["changes"],
        json!([{"path": "a.txt", "sha256_before": sha256(three), "sha256_after": sha256(two)}])
    );
    let edit = json!({"path": "a.txt", "old": "two", "new": "three", "all": true});
    call_ok(&client, post("edit", &edit)?).await?;

    let (_, CallRecord { intent, outcome }) = call_ok(
        &client,
        post("move", &json!({"from": "a.txt", "to": "b.txt"}))?,
    )
    .await?;
    assert_eq!(
        json!([intent.body.action, intent.body.detail]),
        json!(["file.move", {"from": "a.txt", "to": "b.txt"}])
    );
    assert_eq!(
        outcome.body.detail["changes"],
        json!([{"path": "a.txt", "sha256_before": sha256(three)}, {"path": "b.txt", "sha256_after": sha256(three)}])
    );

    let (_, CallRecord { intent, outcome }) = call_ok(
        &client,
        cluster.request(Method::DELETE, &format!("{files}?path=b.txt"))?,
    )
    .await?;
    assert_eq!(
        json!([intent.body.action, intent.body.detail["path"]]),
        json!(["file.delete", "b.txt"])
    );
    assert_eq!(
        outcome.body.detail["changes"],
        json!([{"path": "b.txt", "sha256_before": sha256(three)}])
    );

    // A call that changed nothing reports no changes.
    let (answer, CallRecord { outcome, .. }) = super::call(
        &client,
        cluster.request(Method::DELETE, &format!("{files}?path=b.txt"))?,
    )
    .await?;
    assert_eq!(
        (
            answer.status,
            outcome.body.result,
            outcome.body.detail.get("changes")
        ),
        (404, Some(AuditResult::Refused), None)
    );

    let (_, CallRecord { intent, .. }) = call_ok(
        &client,
        post("mkdir", &json!({"path": "new/deep", "parents": true}))?,
    )
    .await?;
    assert_eq!(
        json!([intent.body.action, intent.body.detail["path"]]),
        json!(["file.mkdir", "new/deep"])
    );
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(one.len() as u64);
    header.set_mode(0o644);
    archive.append_data(&mut header, "c.txt", one.as_bytes())?;
    let import = cluster
        .request(Method::POST, &format!("/v1/sessions/{id}/import?path=new"))?
        .body(archive.into_inner()?);
    let (_, CallRecord { intent, .. }) = call_ok(&client, import).await?;
    assert_eq!(
        json!([intent.body.action, intent.body.detail["path"]]),
        json!(["file.import", "new"])
    );
    assert_eq!(
        intent.body.detail["entries"],
        json!([{"path": "c.txt", "sha256_after": sha256(one)}])
    );
    // Reads are recorded too.
    let (_, CallRecord { intent, .. }) = call_ok(
        &client,
        cluster.request(Method::GET, &format!("{files}?path=new/c.txt"))?,
    )
    .await?;
    assert_eq!(
        json!([intent.body.action, intent.body.detail["path"]]),
        json!(["file.read", "new/c.txt"])
    );

    for hidden in ["one of them", "two of them", "three of them"] {
        assert_eq!(
            cluster.control_plane.postgres.query(&format!(
                "select count(*) from audit_events where body::text like '%{hidden}%'"
            ))?,
            "0",
            "{hidden}"
        );
    }
    assert_trail_intact(&client).await?;
    cluster.worker.shut_down().await
}

// part of: ISC-22, REQ-SANDBX-0120, CYNAI.SANDBX.AccessControlAuditing
#[tokio::test]
async fn changes_of_artifacts_tokens_settings_images_and_policies_are_recorded() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let orchestrator = control_plane.orchestrator("", &[]).await?;
    let (client, admin) = (orchestrator.client()?, orchestrator.token()?);
    let send = |method: Method, path: &str| request(&orchestrator, &admin, method, path);

    let (answer, CallRecord { intent, outcome }) = call_ok(
        &client,
        send(Method::POST, "/v1/tasks")?.json(&json!({"name": "kept"})),
    )
    .await?;
    let task = text(&body(&answer)?["id"])?;
    assert_eq!(
        json!([
            intent.body.action,
            intent.body.detail["name"],
            outcome.body.detail["id"]
        ]),
        json!(["task.create", "kept", task])
    );

    let path = format!("/v1/tasks/{task}/artifacts/out/result");
    let (answer, CallRecord { intent, outcome }) =
        call_ok(&client, send(Method::PUT, &path)?.body("bytes of it")).await?;
    assert_eq!(
        json!([intent.body.action, intent.body.task_id]),
        json!(["artifact.put", task])
    );
    let made = json!([
        outcome.body.detail["sha256"],
        outcome.body.detail["size"],
        outcome.body.detail["path"],
        outcome.body.detail["id"]
    ]);
    assert_eq!(
        made,
        json!([
            sha256("bytes of it"),
            11,
            "out/result",
            body(&answer)?["id"]
        ])
    );
    for path in [
        path,
        format!("/v1/artifacts/{}/content", text(&body(&answer)?["id"])?),
    ] {
        let (got, CallRecord { intent, outcome }) =
            call_ok(&client, send(Method::GET, &path)?).await?;
        assert_eq!(
            (&got.body[..], intent.body.action.as_str()),
            (&b"bytes of it"[..], "artifact.get")
        );
        assert_eq!(
            json!([intent.body.task_id, outcome.body.detail["sha256"]]),
            json!([task, sha256("bytes of it")])
        );
    }

    call_ok(
        &client,
        send(Method::POST, "/v1/users")?.json(&json!({"name": "ada"})),
    )
    .await?;
    let (answer, CallRecord { intent, outcome }) = call_ok(
        &client,
        send(Method::POST, "/v1/tokens")?.json(&json!({"kind": "user", "user": "ada"})),
    )
    .await?;
    let (token_id, token) = (
        text(&body(&answer)?["id"])?,
        text(&body(&answer)?["token"])?,
    );
    assert_eq!(
        json!([intent.body.action, intent.body.detail]),
        json!(["token.create", {"kind": "user", "user": "ada"}])
    );
    assert_eq!(outcome.body.detail["id"], json!(token_id));
    let (_, CallRecord { intent, .. }) = call_ok(
        &client,
        send(Method::DELETE, &format!("/v1/tokens/{token_id}"))?,
    )
    .await?;
    assert_eq!(
        json!([intent.body.action, intent.body.resource]),
        json!(["token.revoke", format!("token:{token_id}")])
    );

    let (_, CallRecord { intent, .. }) = call_ok(
        &client,
        send(Method::PUT, "/v1/settings/greeting")?.json(&json!({"value": "unspoken"})),
    )
    .await?;
    let recorded = json!([
        intent.body.action,
        intent.body.resource,
        intent.body.detail["value"]
    ]);
    assert_eq!(
        recorded,
        json!(["setting.put", "setting:greeting", {"size": 8, "sha256": sha256("unspoken")}])
    );

    let add = json!({"image_ref": "localhost/added:1", "is_allowed": false});
    let (answer, CallRecord { intent, .. }) =
        call_ok(&client, send(Method::POST, "/v1/images")?.json(&add)).await?;
    assert_eq!(
        json!([intent.body.action, intent.body.detail]),
        json!(["image.add", add])
    );
    let image = format!("/v1/images/{}", text(&body(&answer)?["id"])?);
    let (_, CallRecord { intent, .. }) = call_ok(
        &client,
        send(Method::PATCH, &image)?.json(&json!({"is_allowed": true})),
    )
    .await?;
    assert_eq!(
        json!([intent.body.action, intent.body.resource, intent.body.detail]),
        json!(["image.update", "image:added", {"is_allowed": true}])
    );
    let removal = format!("{image}?image_version=1");
    let (_, CallRecord { intent, .. }) = call_ok(&client, send(Method::DELETE, &removal)?).await?;
    assert_eq!(
        json!([intent.body.action, intent.body.resource, intent.body.detail]),
        json!(["image.remove", "image:added", {"image_version": "1"}])
    );

    let rules =
        "@id(\"none\")\nforbid (principal, action == CyNode::Action::\"node.key\", resource);";
    let (answer, CallRecord { intent, outcome }) = call_ok(
        &client,
        send(Method::PUT, "/v1/policies/closed")?.json(&json!({"text": rules})),
    )
    .await?;
    let recorded = json!([
        intent.body.action,
        intent.body.resource,
        intent.body.detail["text"]
    ]);
    assert_eq!(
        recorded,
        json!(["policy.put", "policy:closed", {"size": rules.len(), "sha256": sha256(rules)}])
    );
    assert_eq!(outcome.body.detail["revision"], body(&answer)?["revision"]);
    let (_, CallRecord { intent, .. }) =
        call_ok(&client, send(Method::DELETE, "/v1/policies/closed")?).await?;
    assert_eq!(
        json!([intent.body.action, intent.body.resource]),
        json!(["policy.delete", "policy:closed"])
    );

    for hidden in ["bytes of it", "unspoken", &token] {
        assert_eq!(
            control_plane.postgres.query(&format!(
                "select count(*) from audit_events where body::text like '%{hidden}%'"
            ))?,
            "0",
            "{hidden}"
        );
    }
    assert_trail_intact(&client).await.map(drop)
}

// part of: ISC-22
#[tokio::test]
// invariant: audit-trail
async fn each_state_of_sessions_and_jobs_is_recorded_once_like_its_event() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let (client, admin) = (
        cluster.orchestrator.client()?,
        cluster.orchestrator.token()?,
    );
    let id = cluster.session(&admin, &session()).await?;
    let (answer, CallRecord { intent, outcome }) = call_ok(
        &client,
        cluster
            .request(Method::POST, "/v1/jobs")?
            .json(&json!({"command": ["true"]})),
    )
    .await?;
    let job = text(&body(&answer)?["job_id"])?;
    assert_eq!(
        json!([
            intent.body.action,
            intent.body.job_id,
            intent.body.detail["command"]
        ]),
        json!(["job.create", job, ["true"]])
    );
    assert_eq!(outcome.body.detail["job_id"], json!(job));
    call_ok(
        &client,
        cluster
            .request(Method::POST, &format!("/v1/sessions/{id}/end"))?
            .json(&json!({})),
    )
    .await?;
    let is_over = async || {
        let states = cluster
            .control_plane
            .postgres
            .query("select string_agg(state, ' ' order by cursor desc) from events")?;
        Ok(states.contains("ended") && states.contains("completed"))
    };
    eventually("both have ended", TIMEOUT, is_over).await?;

    let events = client
        .events(0, None, std::time::Duration::ZERO)
        .await?
        .items;
    let recorded = async || {
        let mut found = records_of_action(&client, "session.state").await?;
        found.extend(records_of_action(&client, "job.state").await?);
        found.sort_by_key(|record| record.cursor);
        anyhow::Ok(found)
    };
    eventually("all are recorded", TIMEOUT, async || {
        Ok(recorded().await?.len() >= events.len())
    })
    .await?;
    let recorded: Vec<Value> = recorded()
        .await?
        .into_iter()
        .map(|record| {
            let AuditKind::Event = record.body.kind else {
                return Value::Null;
            };
            json!([
                record.body.detail["event_cursor"],
                record.body.action,
                record.body.session_id,
                record.body.job_id,
                record.body.task_id,
                record.body.detail["state"]
            ])
        })
        .collect();
    let happened: Vec<Value> = events
        .iter()
        .map(|event| {
            json!([
                event.cursor,
                event.kind,
                event.session_id,
                event.job_id,
                event.task_id,
                event.state
            ])
        })
        .collect();
    assert_eq!(recorded, happened);

    // The story of a session, and of a job, begins with the call that created it.
    let of_session = records(
        &client,
        &AuditFilter {
            session: Some(id.parse()?),
            ..Default::default()
        },
    )
    .await?;
    let of_job = records(
        &client,
        &AuditFilter {
            job: Some(job.parse()?),
            ..Default::default()
        },
    )
    .await?;
    for (story, first, last) in [
        (of_session, "session.create", "ended"),
        (of_job, "job.create", "completed"),
    ] {
        let states: Vec<_> = story
            .iter()
            .filter(|record| record.body.kind == AuditKind::Event)
            .map(|record| record.body.detail["state"].clone())
            .collect();
        assert_eq!(states.last(), Some(&json!(last)), "{story:#?}");
        assert_eq!(
            (story[0].body.kind, story[0].body.action.as_str()),
            (AuditKind::Intent, first)
        );
    }
    assert_trail_intact(&client).await?;
    cluster.worker.shut_down().await
}
