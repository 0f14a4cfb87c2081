//! The contract that orchestrators rely on, checked on the real worker and on the simulated one
//! that replaces it in their tests.

mod calls;

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ENCODED_PATCH, EditRequest, ErrorCode, Exec, ExecId, ExecState, Job, JobId, JobRun, JobState,
    OutputPage, PatchRequest, Session, SessionCreate, SessionEnd, SessionId, SessionPatch,
    SessionState, SignalName, SignalScope, Stream, TaskId, WorkspaceDisposal, WorkspaceRef,
};
use cynode_client::{
    ExecEvent, ExecEvents, JobFilter, OutputQuery, PutOptions, SessionClient, SessionFilter,
};
use cynode_tests::{
    IMAGE, Options, SimulatedWorker, UNLABELLED, World, eventually, exec, job, session, sh,
};
use http::Method;
use serde::Serialize;
use serde_json::{Value, json};

use calls::{
    a_call_is_remembered_by_its_id, the_hash_of_output_is_of_all_of_it,
    what_a_call_did_is_in_its_header,
};

const TIMEOUT: Duration = Duration::from_secs(60);
const JOBS: &str = "/v1/worker/jobs";
const SESSIONS: &str = "/v1/worker/sessions";

/// The status and the raw body of a response.
async fn send_raw(
    client: &SessionClient,
    method: Method,
    path: &str,
    body: &impl Serialize,
) -> Result<(u16, Value)> {
    let answer = client.request(method, path).json(body).send().await?;
    Ok((
        answer.status().as_u16(),
        serde_json::from_slice(&answer.bytes().await?).unwrap_or_default(),
    ))
}

/// The status and the code of a refusal.
async fn refusal_of(
    client: &SessionClient,
    method: Method,
    path: &str,
    body: &impl Serialize,
) -> Result<(u16, String)> {
    let (status, body) = send_raw(client, method, path, body).await?;
    Ok((status, body["code"].as_str().unwrap_or_default().to_owned()))
}

fn code<T: std::fmt::Debug>(outcome: cynode_client::Result<T>) -> Option<ErrorCode> {
    let error = outcome.err()?;
    ErrorCode::ALL.iter().copied().find(|code| error.is(*code))
}

fn text(page: &OutputPage) -> String {
    page.chunks
        .iter()
        .filter_map(|chunk| chunk.data.clone())
        .collect()
}

async fn callers_without_the_token_are_refused(client: &SessionClient) -> Result<()> {
    let stranger = SessionClient::new(client.base(), "somebody-elses")?;
    assert_eq!(
        refusal_of(&stranger, Method::GET, SESSIONS, &json!({})).await?,
        (401, "unauthorized".to_owned())
    );
    assert_eq!(
        refusal_of(
            &stranger,
            Method::POST,
            &format!("{JOBS}:run"),
            &job("exit 0")
        )
        .await?
        .0,
        401
    );
    assert_eq!(
        send_raw(&stranger, Method::GET, "/healthz", &json!({}))
            .await?
            .0,
        200
    );
    assert_eq!(
        send_raw(&stranger, Method::GET, "/readyz", &json!({}))
            .await?
            .0,
        200
    );
    assert_eq!(
        send_raw(client, Method::GET, "/v1/worker/weather", &json!({}))
            .await?
            .0,
        404
    );
    assert_eq!(
        send_raw(client, Method::DELETE, SESSIONS, &json!({}))
            .await?
            .0,
        405
    );
    Ok(())
}

async fn a_session_is_made_once(client: &SessionClient) -> Result<()> {
    let request = session();
    let (status, made) = send_raw(client, Method::POST, SESSIONS, &request).await?;
    let made: Session = serde_json::from_value(made)?;
    assert_eq!(
        (status, made.state, made.session_id, made.task_id),
        (
            201,
            SessionState::Running,
            request.session_id,
            request.task_id
        )
    );
    assert_eq!(
        (
            made.limits.memory_bytes,
            made.ended_at,
            made.end_reason.clone()
        ),
        (256 << 20, None, None)
    );
    let (status, again) = send_raw(client, Method::POST, SESSIONS, &request).await?;
    let again: Session = serde_json::from_value(again)?;
    assert_eq!(
        (status, again.workspace_id, again.created_at),
        (200, made.workspace_id, made.created_at)
    );
    let others = [
        SessionCreate {
            task_id: TaskId::generate(),
            ..request.clone()
        },
        SessionCreate {
            idle_timeout_seconds: Some(99),
            ..request.clone()
        },
        SessionCreate {
            image_ref: "default".to_owned(),
            ..request.clone()
        },
    ];
    for other in others {
        assert_eq!(
            refusal_of(client, Method::POST, SESSIONS, &other).await?,
            (409, "session_id_in_use".to_owned())
        );
    }
    client
        .end_session(request.session_id, &SessionEnd::default())
        .await?;
    // The id stays taken.
    let (status, ended) = send_raw(client, Method::POST, SESSIONS, &request).await?;
    assert_eq!((status, ended["state"].as_str()), (200, Some("ended")));
    Ok(())
}

async fn bad_requests_make_nothing(client: &SessionClient) -> Result<()> {
    let request = session();
    let with = |name: &str, value: Value| {
        let mut body = serde_json::to_value(&request).expect("requests serialise");
        body[name] = value;
        body
    };
    for (body, expected) in [
        (with("version", json!(2)), (422, "unsupported_version")),
        (with("colour", json!("red")), (400, "invalid_request")),
        (
            with("image_ref", json!("localhost/no/such:image")),
            (422, "image_not_found"),
        ),
        (
            with("image_ref", json!(UNLABELLED)),
            (422, "image_not_compatible"),
        ),
        (
            with(
                "workspace_ref",
                json!(format!("workspace:{}", SessionId::generate())),
            ),
            (404, "workspace_not_found"),
        ),
    ] {
        assert_eq!(
            refusal_of(client, Method::POST, SESSIONS, &body).await?,
            (expected.0, expected.1.to_owned()),
            "{body}"
        );
    }
    assert_eq!(
        code(client.get_session(request.session_id).await),
        Some(ErrorCode::SessionNotFound)
    );
    for id in [SessionId::generate().to_string(), "nonsense".to_owned()] {
        for (method, rest) in [
            (Method::GET, ""),
            (Method::PATCH, ""),
            (Method::POST, "/end"),
            (Method::POST, "/resume"),
            (Method::GET, "/execs"),
        ] {
            let outcome = refusal_of(
                client,
                method,
                &format!("{SESSIONS}/{id}{rest}"),
                &json!({}),
            )
            .await?;
            assert_eq!(outcome, (404, "session_not_found".to_owned()), "{id}{rest}");
        }
    }
    Ok(())
}

/// More than any test machine has.
async fn limits_beyond_the_node_are_refused_by_name(client: &SessionClient) -> Result<()> {
    for (limit, value) in [
        ("memory_bytes", json!(1_u64 << 45)),
        ("cpus", json!(1_000)),
        ("pids", json!(1 << 20)),
        ("disk_bytes", json!((1_u64 << 44) - 4_096)),
        ("disk_bytes", json!(1_u64 << 45)),
    ] {
        let limits = json!({limit: value});
        let (request, mut command) = (session(), serde_json::to_value(job("exit 0"))?);
        let mut body = serde_json::to_value(&request)?;
        body["limits"] = limits.clone();
        command["sandbox"]["limits"] = limits;
        for (path, body) in [
            (SESSIONS.to_owned(), body),
            (format!("{JOBS}:run"), command),
        ] {
            let (status, refused) = send_raw(client, Method::POST, &path, &body).await?;
            let detail = refused["detail"].as_str().unwrap_or_default();
            assert_eq!(
                (status, refused["code"].as_str()),
                (422, Some("limit_unenforceable")),
                "{path} {limit}: {refused}"
            );
            assert!(
                detail.contains(&format!(
                    "limits.{limit}: this node gives a sandbox at most "
                )),
                "{path}: {detail}"
            );
        }
        assert_eq!(
            code(client.get_session(request.session_id).await),
            Some(ErrorCode::SessionNotFound)
        );
    }
    Ok(())
}

async fn sessions_are_listed_by_state_task_and_label(client: &SessionClient) -> Result<()> {
    let task = TaskId::generate();
    let request = |colour: &str| {
        let mut request = SessionCreate {
            task_id: task,
            ..session()
        };
        request
            .labels
            .insert("colour".to_owned(), colour.to_owned());
        request
    };
    let (red, blue) = (request("red"), request("blue"));
    for request in [&red, &blue] {
        client.create_session(request).await?;
    }
    client
        .end_session(blue.session_id, &SessionEnd::default())
        .await?;
    let ids = async |filter: SessionFilter| -> Result<Vec<SessionId>> {
        Ok(client
            .list_sessions(&SessionFilter {
                task_id: Some(task),
                ..filter
            })
            .await?
            .iter()
            .map(|session| session.session_id)
            .collect())
    };
    let label = |value: &str| SessionFilter {
        labels: vec![("colour".to_owned(), value.to_owned())],
        ..Default::default()
    };
    let state = |state| SessionFilter {
        state: Some(state),
        ..Default::default()
    };
    assert_eq!(
        ids(SessionFilter::default()).await?,
        [red.session_id, blue.session_id],
        "the list is not sorted from the oldest"
    );
    assert_eq!(
        (ids(label("red")).await?, ids(label("green")).await?),
        (vec![red.session_id], vec![])
    );
    assert_eq!(
        (
            ids(state(SessionState::Running)).await?,
            ids(state(SessionState::Ended)).await?
        ),
        (vec![red.session_id], vec![blue.session_id])
    );
    let (_, first) = send_raw(
        client,
        Method::GET,
        &format!("{SESSIONS}?task_id={task}&limit=1"),
        &json!({}),
    )
    .await?;
    let cursor = first["next_cursor"]
        .as_str()
        .context("there is another page")?;
    assert_eq!(first["items"][0]["session_id"], json!(red.session_id));
    let (_, second) = send_raw(
        client,
        Method::GET,
        &format!("{SESSIONS}?task_id={task}&limit=1&cursor={cursor}"),
        &json!({}),
    )
    .await?;
    assert_eq!(
        (&second["items"][0]["session_id"], &second["next_cursor"]),
        (&json!(blue.session_id), &Value::Null)
    );
    assert_eq!(
        refusal_of(
            client,
            Method::GET,
            &format!("{SESSIONS}?limit=0"),
            &json!({})
        )
        .await?
        .0,
        400
    );

    let before = client.get_session(red.session_id).await?;
    let labels = [("shape".to_owned(), "round".to_owned())].into();
    let patched = client
        .patch_session(
            red.session_id,
            &SessionPatch {
                max_lifetime_seconds: Some(60),
                labels: Some(labels),
                ..Default::default()
            },
        )
        .await?;
    ensure!(
        patched.expires_at < before.expires_at
            && patched.labels.contains_key("shape")
            && !patched.labels.contains_key("colour"),
        "{patched:?}"
    );
    assert_eq!(
        client.get_session(red.session_id).await?.labels,
        patched.labels
    );
    assert_eq!(
        code(
            client
                .patch_session(blue.session_id, &SessionPatch::default())
                .await
        ),
        Some(ErrorCode::SessionEnded)
    );
    client
        .end_session(red.session_id, &SessionEnd::default())
        .await?;
    Ok(())
}

async fn ending_a_session_is_idempotent(client: &SessionClient) -> Result<()> {
    let request = session();
    let id = client.create_session(&request).await?.session_id;
    let running = client
        .exec_background(
            id,
            &cynode_api::ExecRequest {
                background: true,
                ..sh("sleep 600")
            },
        )
        .await?;
    assert_eq!(client.get_session(id).await?.running_execs, 1);
    let ended = client
        .end_session(
            id,
            &SessionEnd {
                reason: Some("enough".to_owned()),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(
        (
            ended.state,
            ended.end_reason.as_deref(),
            ended.running_execs
        ),
        (SessionState::Ended, Some("enough"), 0)
    );
    ensure!(ended.ended_at.is_some(), "{ended:?}");
    let again = client
        .end_session(
            id,
            &SessionEnd {
                reason: Some("more".to_owned()),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(
        (again.state, again.end_reason, again.ended_at),
        (SessionState::Ended, ended.end_reason, ended.ended_at)
    );
    for (method, rest) in [
        (Method::POST, "/exec"),
        (Method::GET, "/execs"),
        (Method::GET, "/files?path=x"),
        (Method::POST, "/signal"),
    ] {
        let body = if rest == "/exec" {
            json!({ "argv": ["true"], "timeout_ms": 1000 })
        } else {
            json!({ "signal": "TERM" })
        };
        assert_eq!(
            refusal_of(client, method, &format!("{SESSIONS}/{id}{rest}"), &body).await?,
            (410, "session_ended".to_owned()),
            "{rest}"
        );
    }
    assert_eq!(
        code(client.get_exec(id, running.exec_id).await),
        Some(ErrorCode::SessionEnded)
    );
    assert_eq!(
        refusal_of(
            client,
            Method::POST,
            &format!("{SESSIONS}/{id}/resume"),
            &json!({})
        )
        .await?,
        (409, "not_resumable".to_owned()),
        "the session's files still exist"
    );
    Ok(())
}

async fn a_kept_workspace_is_used_again_by_its_own_task(client: &SessionClient) -> Result<()> {
    let keep = SessionEnd {
        workspace: Some(WorkspaceDisposal::Keep),
        ..Default::default()
    };
    let first = client.create_session(&session()).await?;
    client
        .exec(first.session_id, &sh("echo kept >> note"))
        .await?;
    client.end_session(first.session_id, &keep).await?;
    let again = SessionCreate {
        task_id: first.task_id,
        workspace_ref: Some(WorkspaceRef::Workspace(first.workspace_id)),
        ..session()
    };
    let strange = SessionCreate {
        task_id: TaskId::generate(),
        session_id: SessionId::generate(),
        ..again.clone()
    };
    assert_eq!(
        code(client.create_session(&strange).await),
        Some(ErrorCode::WorkspaceNotFound)
    );
    let second = client.create_session(&again).await?;
    assert_eq!(second.workspace_id, first.workspace_id);
    assert_eq!(
        client
            .exec(second.session_id, &sh("cat note"))
            .await?
            .stdout,
        "kept\n"
    );
    let third = SessionCreate {
        session_id: SessionId::generate(),
        ..again
    };
    assert_eq!(
        code(client.create_session(&third).await),
        Some(ErrorCode::WorkspaceInUse)
    );
    client.end_session(second.session_id, &keep).await?;
    let (status, resumed) = send_raw(
        client,
        Method::POST,
        &format!("{SESSIONS}/{}/resume", second.session_id),
        &json!({}),
    )
    .await?;
    assert_eq!(
        (status, resumed["state"].as_str(), &resumed["ended_at"]),
        (201, Some("running"), &Value::Null)
    );
    assert_eq!(
        client
            .exec(second.session_id, &sh("cat note"))
            .await?
            .stdout,
        "kept\n"
    );
    assert_eq!(
        send_raw(
            client,
            Method::POST,
            &format!("{SESSIONS}/{}/resume", second.session_id),
            &json!({})
        )
        .await?
        .0,
        200
    );
    client
        .end_session(second.session_id, &SessionEnd::default())
        .await?;
    Ok(())
}

async fn a_command_runs_once_by_its_id(client: &SessionClient) -> Result<()> {
    let id = client.create_session(&session()).await?.session_id;
    let request = cynode_api::ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..sh("echo mark >> marks; echo out; echo err >&2; exit 7")
    };
    let first = client.exec(id, &request).await?;
    assert_eq!(
        (
            first.exit.exit_code,
            first.stdout.as_str(),
            first.stderr.as_str(),
            first.encoding.as_str()
        ),
        (Some(7), "out\n", "err\n", "utf-8")
    );
    assert_eq!(
        (
            first.exit.bytes.stdout,
            first.exit.bytes.stderr,
            first.exit.timed_out,
            Some(first.exec_id)
        ),
        (4, 4, false, request.exec_id)
    );
    assert_eq!(client.exec(id, &request).await?, first);
    assert_eq!(
        code(
            client
                .exec(
                    id,
                    &cynode_api::ExecRequest {
                        timeout_ms: 9,
                        ..request.clone()
                    }
                )
                .await
        ),
        Some(ErrorCode::ExecIdInUse)
    );
    assert_eq!(client.exec(id, &sh("cat marks")).await?.stdout, "mark\n");
    let listed: Vec<Exec> = client.list_execs(id).await?.items;
    assert_eq!(
        (listed.len(), listed[0].exec_id, listed[0].state),
        (2, first.exec_id, ExecState::Exited)
    );
    let shown = client.get_exec(id, first.exec_id).await?;
    assert_eq!(
        (shown.exit, shown.argv, shown.cwd.as_str(), shown.background),
        (Some(first.exit), request.argv, "/workspace", false)
    );
    assert_eq!(
        code(client.get_exec(id, ExecId::generate()).await),
        Some(ErrorCode::ExecNotFound)
    );
    let (status, problem) = send_raw(
        client,
        Method::POST,
        &format!("{SESSIONS}/{id}/exec"),
        &exec(["no-such-program"]),
    )
    .await?;
    assert_eq!(
        (status, problem["code"].as_str(), problem["errno"].as_str()),
        (422, Some("exec_failed"), Some("ENOENT"))
    );
    let bad = cynode_api::ExecRequest {
        timeout_ms: 0,
        ..exec(["true"])
    };
    assert_eq!(
        code(client.exec(id, &bad).await),
        Some(ErrorCode::InvalidRequest)
    );
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}

async fn a_command_in_the_background_is_followed_and_ended(client: &SessionClient) -> Result<()> {
    let id = client.create_session(&session()).await?.session_id;
    let request = cynode_api::ExecRequest {
        background: true,
        timeout_ms: 0,
        ..sh("echo begun; sleep 600")
    };
    let (status, accepted) = send_raw(
        client,
        Method::POST,
        &format!("{SESSIONS}/{id}/exec"),
        &request,
    )
    .await?;
    let exec_id: ExecId = serde_json::from_value(accepted["exec_id"].clone())?;
    assert_eq!(
        (status, client.get_exec(id, exec_id).await?.state),
        (202, ExecState::Running)
    );
    let page = client
        .exec_output(
            id,
            exec_id,
            &OutputQuery {
                wait_ms: Some(30_000),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(
        (text(&page).as_str(), page.next_seq, page.exit.is_none()),
        ("begun\n", 1, true)
    );
    client
        .signal_exec(id, exec_id, SignalName::TERM, SignalScope::Tree)
        .await?;
    let last = client
        .exec_output(
            id,
            exec_id,
            &OutputQuery {
                after_seq: Some(1),
                wait_ms: Some(30_000),
                ..Default::default()
            },
        )
        .await?;
    let exit = last.exit.context("the session has ended")?;
    assert_eq!(
        (exit.exit_code, exit.signal.as_deref()),
        (None, Some("TERM"))
    );
    // Child processes may outlive the command by a moment.
    let gone = async || {
        Ok(code(
            client
                .signal_exec(id, exec_id, SignalName::KILL, SignalScope::Tree)
                .await,
        ) == Some(ErrorCode::ExecEnded))
    };
    eventually("no process is left to signal", TIMEOUT, gone).await?;
    let late = client
        .exec(
            id,
            &cynode_api::ExecRequest {
                timeout_ms: 300,
                ..sh("sleep 600")
            },
        )
        .await?;
    ensure!(
        late.exit.timed_out && late.exit.exit_code.is_none(),
        "{late:?}"
    );
    client
        .exec_background(
            id,
            &cynode_api::ExecRequest {
                background: true,
                ..sh("sleep 600")
            },
        )
        .await?;
    client.signal_session(id, SignalName::KILL).await?;
    eventually("no command runs", TIMEOUT, async || {
        Ok(client.get_session(id).await?.running_execs == 0)
    })
    .await?;
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}

/// The text of each stream, and whether the command ended.
async fn follow(mut events: ExecEvents) -> Result<(Option<ExecId>, String, String, Option<i32>)> {
    let (mut start, mut stdout, mut stderr, mut last_seq) = (None, String::new(), String::new(), 0);
    while let Some(event) = events.next().await? {
        match event {
            ExecEvent::Start { exec_id, .. } => start = Some(exec_id),
            ExecEvent::Output {
                seq, stream, data, ..
            } => {
                ensure!(seq > last_seq, "{seq} after {last_seq}");
                last_seq = seq;
                if stream == Stream::Stdout {
                    &mut stdout
                } else {
                    &mut stderr
                }
                .push_str(std::str::from_utf8(&data)?);
            }
            ExecEvent::Exit(exit) => return Ok((start, stdout, stderr, exit.exit_code)),
        }
    }
    anyhow::bail!("the stream ended without an exit")
}

async fn output_streams_and_is_read_again_from_any_place(client: &SessionClient) -> Result<()> {
    let id = client.create_session(&session()).await?.session_id;
    let request = cynode_api::ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..sh("echo one; echo two >&2; echo three; exit 4")
    };
    let exec_id = request.exec_id.expect("the request has an id");
    let (start, stdout, stderr, exit) = follow(client.exec_stream(id, &request).await?).await?;
    assert_eq!(
        (start, stdout.as_str(), stderr.as_str(), exit),
        (request.exec_id, "one\nthree\n", "two\n", Some(4))
    );
    let all = client
        .exec_output(id, exec_id, &OutputQuery::default())
        .await?;
    assert!(
        all.chunks
            .iter()
            .map(|chunk| chunk.seq)
            .eq(1..=all.next_seq)
            && all.exit.is_some()
            && all.lost_before_seq.is_none(),
        "{all:?}"
    );
    // One chunk at a time.
    let mut read = OutputPage {
        chunks: Vec::new(),
        next_seq: 0,
        lost_before_seq: None,
        exit: None,
    };
    while read.exit.is_none() {
        let next = client
            .exec_output(
                id,
                exec_id,
                &OutputQuery {
                    after_seq: Some(read.next_seq),
                    max_bytes: Some(1),
                    ..Default::default()
                },
            )
            .await?;
        ensure!(
            next.chunks.len() <= 1 && (next.exit.is_some() || next.next_seq == read.next_seq + 1),
            "{next:?}"
        );
        read = OutputPage {
            chunks: [read.chunks, next.chunks].concat(),
            ..next
        };
    }
    assert_eq!(read.chunks, all.chunks);
    // A resumed stream has no start event.
    let (start, rest, _, exit) =
        follow(client.exec_output_stream(id, exec_id, all.next_seq).await?).await?;
    assert_eq!((start, rest.as_str(), exit), (None, "", Some(4)));

    let much = client
        .exec(
            id,
            &cynode_api::ExecRequest {
                max_output_bytes: Some(10),
                ..sh("yes | head -c 30000000")
            },
        )
        .await?;
    assert_eq!(
        (
            much.exit.bytes.stdout,
            much.stdout.as_str(),
            much.truncated.stdout
        ),
        (30_000_000, "y\ny\ny\ny\ny\n", true)
    );
    let page = client
        .exec_output(
            id,
            much.exec_id,
            &OutputQuery {
                max_bytes: Some(1),
                ..Default::default()
            },
        )
        .await?;
    let first = page.lost_before_seq.context("more than the worker keeps")?;
    ensure!(
        first > 1 && page.chunks[0].seq == first && page.next_seq == first && page.exit.is_none(),
        "{page:?}"
    );
    let after = client
        .exec_output(
            id,
            much.exec_id,
            &OutputQuery {
                after_seq: Some(first),
                max_bytes: Some(1),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(
        (after.lost_before_seq, after.chunks[0].seq),
        (None, first + 1)
    );
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}

async fn files_are_written_whole_and_by_condition(client: &SessionClient) -> Result<()> {
    let id = client.create_session(&session()).await?.session_id;
    let path = Path::new("some/where/file");
    let new = PutOptions {
        mode: Some(0o600),
        create_new: true,
        ..Default::default()
    };
    let written = client.put_file(id, path, "first", &new).await?;
    assert_eq!(
        code(client.put_file(id, path, "second", &new).await),
        Some(ErrorCode::PreconditionFailed)
    );
    let mut body = client.get_file(id, path).await?;
    let mut read = Vec::new();
    while let Some(piece) = body.chunk().await? {
        read.extend_from_slice(&piece);
    }
    assert_eq!(
        (
            read.as_slice(),
            body.info.mode,
            body.info.size,
            &body.info.etag
        ),
        (&b"first"[..], Some(0o600), Some(5), &written.etag)
    );
    let stat = client
        .head_file(id, Path::new("/workspace/some/where/file"))
        .await?;
    assert_eq!(
        (stat.size, stat.etag.is_some(), &stat.sha256),
        (Some(5), true, &body.info.sha256)
    );
    let changed = PutOptions {
        if_match: stat.etag,
        ..Default::default()
    };
    client.put_file(id, path, "second", &changed).await?;
    assert_eq!(
        code(client.put_file(id, path, "third", &changed).await),
        Some(ErrorCode::PreconditionFailed)
    );
    assert_eq!(
        client.exec(id, &sh("cat some/where/file")).await?.stdout,
        "second"
    );
    assert_eq!(
        code(client.get_file(id, Path::new("some")).await),
        Some(ErrorCode::NotAFile)
    );
    assert_eq!(
        code(client.delete_file(id, Path::new("some"), false).await),
        Some(ErrorCode::NotEmpty)
    );
    client.delete_file(id, Path::new("some"), true).await?;
    assert_eq!(
        code(client.get_file(id, path).await),
        Some(ErrorCode::NotFound)
    );
    assert_eq!(
        client
            .head_file(id, path)
            .await
            .err()
            .and_then(|error| error.status()),
        Some(404)
    );
    assert_eq!(
        code(client.delete_file(id, path, false).await),
        Some(ErrorCode::NotFound)
    );
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}

async fn a_text_is_replaced_in_a_file_exactly(client: &SessionClient) -> Result<()> {
    let id = client.create_session(&session()).await?.session_id;
    let path = Path::new("edited");
    client
        .put_file(id, path, "one two two\n", &PutOptions::default())
        .await?;
    let edit = |old: &str, new: &str| EditRequest {
        path: "edited".to_owned(),
        old: old.to_owned(),
        new: new.to_owned(),
        ..EditRequest::default()
    };
    let first = client.edit_file(id, &edit("one", "1")).await?;
    assert_eq!((first.replaced, first.size), (1, 10));
    assert_eq!(
        client.head_file(id, path).await?.sha256,
        Some(first.sha256.clone())
    );
    for (request, expected) in [
        (edit("two", "2"), ErrorCode::EditRejected),
        (edit("one", "1"), ErrorCode::EditRejected),
        (edit("", "1"), ErrorCode::InvalidRequest),
        (
            EditRequest {
                if_match: first.sha256_before.clone(),
                ..edit("1", "one")
            },
            ErrorCode::PreconditionFailed,
        ),
        (
            EditRequest {
                path: "none".to_owned(),
                ..edit("1", "one")
            },
            ErrorCode::NotFound,
        ),
    ] {
        assert_eq!(
            code(client.edit_file(id, &request).await),
            Some(expected),
            "{request:?}"
        );
    }
    let all = EditRequest {
        all: true,
        if_match: Some(first.sha256),
        ..edit("two", "2")
    };
    assert_eq!(client.edit_file(id, &all).await?.replaced, 2);
    assert_eq!(client.exec(id, &sh("cat edited")).await?.stdout, "1 2 2\n");
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}

async fn a_patch_applies_in_every_form_that_a_node_is_sent(client: &SessionClient) -> Result<()> {
    let id = client.create_session(&session()).await?.session_id;
    let path = Path::new("patched");
    client
        .put_file(id, path, "one\ntwo\n", &PutOptions::default())
        .await?;
    let text = |diff: &str, dry_run| PatchRequest {
        diff: diff.to_owned(),
        dry_run,
        ..PatchRequest::default()
    };
    let diff = "--- a/patched\n+++ b/patched\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n";
    let dry = client.patch_files(id, &text(diff, true)).await?;
    let done = client.patch_files(id, &text(diff, false)).await?;
    assert_eq!((dry.files.len(), &dry), (1, &done));
    assert_eq!(
        client.head_file(id, path).await?.sha256,
        done.files[0].sha256_after
    );
    assert_eq!(
        code(client.patch_files(id, &text(diff, false)).await),
        Some(ErrorCode::PatchRejected)
    );
    let wrong = diff
        .replace("-1,2", "-7,9")
        .replace("two\n+three", "three\n+four");
    let repaired = client.patch_files(id, &text(&wrong, false)).await?.repaired;
    assert_eq!(
        (repaired.len(), repaired[0].path.as_str(), repaired[0].hunk),
        (1, "patched", 1)
    );
    let begin = "*** Begin Patch\n*** Update File: patched\n@@\n-four\n+five\n*** End Patch\n";
    client.patch_files(id, &text(begin, false)).await?;
    let encoded =
        "cynode-patch 1\n--- \"patched\"\n+++ \"patched\"\n@@ unique -1 +1 @@\n-five\n+six\n";
    let send = async |query: &str, body: &str| -> Result<(u16, Value)> {
        let path = format!("{SESSIONS}/{id}/files:patch{query}");
        let request = client
            .request(Method::POST, &path)
            .header("content-type", ENCODED_PATCH)
            .body(body.to_owned());
        let answer = request.send().await?;
        let status = answer.status().as_u16();
        Ok((status, serde_json::from_slice(&answer.bytes().await?)?))
    };
    let dry = send("?dry_run=true", encoded).await?;
    assert_eq!(dry.0, 200, "{dry:?}");
    assert_eq!(send("", encoded).await?, dry);
    assert_eq!(send("", encoded).await?.1["code"], "patch_rejected");
    assert_eq!(send("", diff).await?.1["code"], "invalid_request");
    assert_eq!(
        client.exec(id, &sh("cat patched")).await?.stdout,
        "one\nsix\n"
    );
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}

async fn a_job_runs_once_and_its_result_waits_to_be_acknowledged(
    client: &SessionClient,
) -> Result<()> {
    let request = job("echo out; echo err >&2; exit 3");
    let id = request.job_id;
    let (status, body) = send_raw(client, Method::POST, &format!("{JOBS}:run"), &request).await?;
    let first: Job = serde_json::from_value(body)?;
    assert_eq!(
        (
            status,
            first.state,
            first.exit_code,
            first.reported_by.as_str()
        ),
        (200, JobState::Failed, Some(3), "worker")
    );
    assert_eq!(
        (
            first.output.stdout.as_str(),
            first.output.stderr.as_str(),
            &first.error
        ),
        ("out\n", "err\n", &None)
    );
    ensure!(
        first.started_at.is_some()
            && first.ended_at.is_some()
            && first.node_id.is_some()
            && first.image_digest.is_some(),
        "{first:?}"
    );
    assert_eq!(client.run_job(&request).await?, first);
    assert_eq!(
        client
            .run_job(&JobRun {
                version: None,
                ..request.clone()
            })
            .await?,
        first
    );
    assert_eq!(client.job(id).await?, first);
    for other in [
        JobRun {
            task_id: TaskId::generate(),
            ..request.clone()
        },
        JobRun {
            sandbox: job("exit 4").sandbox,
            ..request.clone()
        },
    ] {
        assert_eq!(
            refusal_of(client, Method::POST, &format!("{JOBS}:run"), &other).await?,
            (409, "job_id_in_use".to_owned())
        );
    }
    let page = client.job_output(id, &OutputQuery::default()).await?;
    assert!(
        page.chunks
            .iter()
            .map(|chunk| chunk.seq)
            .eq(1..=page.next_seq)
            && page.exit.is_some_and(|exit| exit.exit_code == Some(3))
    );
    let (_, stdout, stderr, exit) = follow(client.job_output_stream(id, 0).await?).await?;
    assert_eq!(
        (stdout.as_str(), stderr.as_str(), exit),
        ("out\n", "err\n", Some(3))
    );
    assert_eq!(
        client.stop_job(request.task_id, id).await?.state,
        JobState::Failed,
        "a final state changed"
    );
    let filter = JobFilter {
        task_id: Some(request.task_id),
        ..Default::default()
    };
    let listed = client.list_jobs(&filter).await?;
    assert_eq!(
        (
            listed.len(),
            listed[0].job_id,
            listed[0].output.stdout.as_str()
        ),
        (1, id, "")
    );
    assert_eq!(
        client
            .list_jobs(&JobFilter {
                state: Some(JobState::Completed),
                ..filter
            })
            .await?,
        []
    );

    for _ in 0..2 {
        assert_eq!(
            send_raw(
                client,
                Method::POST,
                &format!("{JOBS}/{id}/ack"),
                &json!({})
            )
            .await?
            .0,
            204
        );
    }
    let known = client.job(id).await?;
    assert_eq!(
        (
            known.acknowledged,
            known.state,
            known.exit_code,
            known.output.stdout.as_str()
        ),
        (true, JobState::Failed, Some(3), "")
    );
    assert_eq!(
        code(client.job_output(id, &OutputQuery::default()).await),
        Some(ErrorCode::OutputExpired)
    );
    assert_eq!(client.list_jobs(&filter).await?, []);
    // A request that arrives after the stop runs nothing.
    assert_eq!(client.run_job_async(&request).await?, known);
    let other = JobRun {
        sandbox: job("exit 4").sandbox,
        ..request
    };
    assert_eq!(
        code(client.run_job(&other).await),
        Some(ErrorCode::JobIdInUse)
    );
    Ok(())
}

async fn a_job_is_handed_over_and_stopped(client: &SessionClient) -> Result<()> {
    let request = job("echo begun; sleep 600; echo never");
    let id = request.job_id;
    let answer = client
        .request(Method::POST, &format!("{JOBS}:run"))
        .header("Prefer", "respond-async")
        .json(&request)
        .send()
        .await?;
    assert_eq!(
        (
            answer.status().as_u16(),
            answer.headers().contains_key("preference-applied")
        ),
        (202, true)
    );
    let accepted: Job = serde_json::from_slice(&answer.bytes().await?)?;
    ensure!(
        !accepted.state.is_final() && accepted.ended_at.is_none(),
        "{accepted:?}"
    );
    let page = client
        .job_output(
            id,
            &OutputQuery {
                wait_ms: Some(60_000),
                ..Default::default()
            },
        )
        .await?;
    // The read may time out once: the wait includes the start.
    let page = if page.chunks.is_empty() {
        client
            .job_output(
                id,
                &OutputQuery {
                    wait_ms: Some(60_000),
                    ..Default::default()
                },
            )
            .await?
    } else {
        page
    };
    assert_eq!(
        (text(&page).as_str(), page.exit.is_none()),
        ("begun\n", true)
    );
    let running = client.job(id).await?;
    assert_eq!(
        (
            running.state,
            running.output.stdout.as_str(),
            running.started_at.is_some()
        ),
        (JobState::InProgress, "", true)
    );
    assert_eq!(
        refusal_of(
            client,
            Method::POST,
            &format!("{JOBS}/{id}/ack"),
            &json!({})
        )
        .await?,
        (409, "job_not_ended".to_owned())
    );
    assert_eq!(
        code(client.stop_job(TaskId::generate(), id).await),
        Some(ErrorCode::JobNotFound)
    );
    let stopped = client.stop_job(request.task_id, id).await?;
    assert_eq!(
        (
            stopped.state,
            stopped.output.stdout.as_str(),
            stopped.error.is_none()
        ),
        (JobState::Canceled, "begun\n", true)
    );
    assert_eq!(client.stop_job(request.task_id, id).await?, stopped);
    assert_eq!(client.run_job(&request).await?, stopped);
    client.ack_job(id).await?;

    let unknown = JobId::generate();
    for outcome in [
        code(client.job(unknown).await),
        code(client.ack_job(unknown).await),
    ] {
        assert_eq!(outcome, Some(ErrorCode::JobNotFound));
    }
    assert_eq!(
        code(client.job_output(unknown, &OutputQuery::default()).await),
        Some(ErrorCode::JobNotFound)
    );
    assert_eq!(
        refusal_of(client, Method::GET, &format!("{JOBS}/nonsense"), &json!({})).await?,
        (404, "job_not_found".to_owned())
    );
    Ok(())
}

async fn a_job_that_is_stopped_before_its_request_comes_never_runs(
    client: &SessionClient,
) -> Result<()> {
    let request = job("echo ran");
    let stopped = client.stop_job(request.task_id, request.job_id).await?;
    assert_eq!(
        (
            stopped.job_id,
            stopped.task_id,
            stopped.state,
            stopped.acknowledged
        ),
        (request.job_id, request.task_id, JobState::Canceled, true)
    );
    ensure!(
        stopped.started_at.is_none() && stopped.ended_at.is_some() && stopped.error.is_none(),
        "{stopped:?}"
    );
    assert_eq!(client.run_job(&request).await?, stopped);
    assert_eq!(client.run_job_async(&request).await?, stopped);
    assert_eq!(
        (
            client.job(request.job_id).await?,
            client.stop_job(request.task_id, request.job_id).await?
        ),
        (stopped.clone(), stopped)
    );
    client.ack_job(request.job_id).await?;
    assert_eq!(
        code(
            client
                .job_output(request.job_id, &OutputQuery::default())
                .await
        ),
        Some(ErrorCode::OutputExpired)
    );
    assert_eq!(
        code(client.stop_job(TaskId::generate(), request.job_id).await),
        Some(ErrorCode::JobNotFound)
    );
    let other = JobRun {
        task_id: TaskId::generate(),
        ..request
    };
    assert_eq!(
        code(client.run_job(&other).await),
        Some(ErrorCode::JobIdInUse)
    );
    assert_eq!(
        client
            .list_jobs(&JobFilter {
                task_id: Some(other.task_id),
                ..Default::default()
            })
            .await?,
        []
    );
    Ok(())
}

async fn a_job_with_a_bad_image_or_program_fails_with_its_code(
    client: &SessionClient,
) -> Result<()> {
    let mut no_image = job("exit 0");
    "localhost/no/such:image".clone_into(&mut no_image.sandbox.image_ref);
    let mut no_program = job("");
    no_program.sandbox.command = vec!["no-such-program".to_owned()];
    for (request, expected) in [(no_image, "image_not_found"), (no_program, "exec_failed")] {
        let (status, body) =
            send_raw(client, Method::POST, &format!("{JOBS}:run"), &request).await?;
        let ended: Job = serde_json::from_value(body)?;
        let error = ended.error.context("the error has a reason")?;
        assert_eq!(
            (status, ended.state, ended.exit_code, error.code.as_str()),
            (200, JobState::Failed, None, expected)
        );
        let page = client
            .job_output(request.job_id, &OutputQuery::default())
            .await?;
        ensure!(page.chunks.is_empty() && page.exit.is_some(), "{page:?}");
        client.ack_job(request.job_id).await?;
    }
    let mut late = job("echo begun; sleep 600");
    late.sandbox.timeout_seconds = Some(1);
    let ended = client.run_job(&late).await?;
    assert_eq!(
        (ended.state, ended.output.stdout.as_str(), ended.exit_code),
        (JobState::Timeout, "begun\n", None)
    );
    client.ack_job(late.job_id).await?;
    // A plain command runs on any image.
    let mut plain = job("exit 0");
    UNLABELLED.clone_into(&mut plain.sandbox.image_ref);
    assert_eq!(client.run_job(&plain).await?.state, JobState::Completed);
    client.ack_job(plain.job_id).await?;
    let mut empty = job("");
    empty.sandbox.command = Vec::new();
    assert_eq!(
        refusal_of(client, Method::POST, &format!("{JOBS}:run"), &empty).await?,
        (400, "invalid_request".to_owned())
    );
    let old = JobRun {
        version: Some(2),
        ..job("exit 0")
    };
    assert_eq!(
        refusal_of(client, Method::POST, &format!("{JOBS}:run"), &old).await?,
        (422, "unsupported_version".to_owned())
    );
    Ok(())
}

/// The whole contract; each part uses its own sessions and jobs.
async fn check_contract(client: &SessionClient) -> Result<()> {
    macro_rules! check {
        ($($part:ident),+ $(,)?) => { $($part(client).await.context(stringify!($part))?;)+ };
    }
    check!(
        callers_without_the_token_are_refused,
        a_session_is_made_once,
        bad_requests_make_nothing,
        limits_beyond_the_node_are_refused_by_name,
        sessions_are_listed_by_state_task_and_label,
        ending_a_session_is_idempotent,
        a_kept_workspace_is_used_again_by_its_own_task,
        a_command_runs_once_by_its_id,
        a_command_in_the_background_is_followed_and_ended,
        output_streams_and_is_read_again_from_any_place,
        files_are_written_whole_and_by_condition,
        a_text_is_replaced_in_a_file_exactly,
        a_patch_applies_in_every_form_that_a_node_is_sent,
        a_job_runs_once_and_its_result_waits_to_be_acknowledged,
        a_job_is_handed_over_and_stopped,
        a_job_that_is_stopped_before_its_request_comes_never_runs,
        a_job_with_a_bad_image_or_program_fails_with_its_code,
        the_hash_of_output_is_of_all_of_it,
        what_a_call_did_is_in_its_header,
        a_call_is_remembered_by_its_id,
    );
    Ok(())
}

#[tokio::test]
// invariant: api-boundaries
async fn the_real_worker_fulfils_the_contract() -> Result<()> {
    let world = World::new()?;
    let mut worker = world.worker(&Options::default()).await?;
    check_contract(&worker.client()?).await?;
    worker.shut_down().await?;
    world.assert_clean().await
}

#[tokio::test]
// invariant: api-boundaries
async fn the_simulated_worker_fulfils_the_contract() -> Result<()> {
    let worker = SimulatedWorker::start("simulated", &[IMAGE, UNLABELLED]).await?;
    check_contract(&worker.client()?).await
}
