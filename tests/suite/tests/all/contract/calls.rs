//! The call records from which an orchestrator reconstructs lost responses.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    CALL_HEADER, Call, CallId, CallState, ExecId, ExecRequest, RESULT_HEADER, SessionEnd,
    SessionId, SignalName, StreamHashes,
};
use cynode_client::{ExecEvent, SessionClient};
use cynode_tests::{eventually, exec, session, sh};
use http::{Method, StatusCode};
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;

use super::{SESSIONS, TIMEOUT, refusal_of};

const CALLS: &str = "/v1/worker/calls";

fn sha256(bytes: impl AsRef<[u8]>) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn hashes(stdout: impl AsRef<[u8]>, stderr: impl AsRef<[u8]>) -> StreamHashes {
    StreamHashes {
        stdout: sha256(stdout),
        stderr: sha256(stderr),
    }
}

/// The status of a response and the outcome in its header.
async fn call_outcome(request: RequestBuilder) -> Result<(StatusCode, Value)> {
    let answer = request.send().await?;
    let result = answer
        .headers()
        .get(RESULT_HEADER)
        .context("no result")?
        .to_str()?
        .to_owned();
    Ok((answer.status(), serde_json::from_str(&result)?))
}

pub(super) async fn the_hash_of_output_is_of_all_of_it(client: &SessionClient) -> Result<()> {
    let id = client.create_session(&session()).await?.session_id;
    assert_eq!(
        client
            .exec(id, &sh("echo out; echo err >&2"))
            .await?
            .exit
            .sha256,
        Some(hashes("out\n", "err\n"))
    );
    assert_eq!(
        client.exec(id, &exec(["true"])).await?.exit.sha256,
        Some(hashes("", ""))
    );
    let cut = client
        .exec(
            id,
            &ExecRequest {
                max_output_bytes: Some(10),
                ..sh("yes | head -c 30000000")
            },
        )
        .await?;
    ensure!(cut.truncated.stdout, "{cut:?}");
    assert_eq!(cut.exit.sha256, Some(hashes(b"y\n".repeat(15_000_000), "")));
    assert_eq!(client.get_exec(id, cut.exec_id).await?.exit, Some(cut.exit));
    let late = client
        .exec(
            id,
            &ExecRequest {
                timeout_ms: 500,
                ..sh("echo begun; sleep 600")
            },
        )
        .await?;
    ensure!(late.exit.timed_out, "{late:?}");
    assert_eq!(late.exit.sha256, Some(hashes("begun\n", "")));

    let behind = client
        .exec_background(
            id,
            &ExecRequest {
                background: true,
                ..sh("echo behind")
            },
        )
        .await?
        .exec_id;
    eventually("the command ends", TIMEOUT, async || {
        Ok(client.get_exec(id, behind).await?.exit.is_some())
    })
    .await?;
    assert_eq!(
        client
            .get_exec(id, behind)
            .await?
            .exit
            .and_then(|exit| exit.sha256),
        Some(hashes("behind\n", ""))
    );
    let mut events = client.exec_stream(id, &sh("echo streamed")).await?;
    let exit = loop {
        match events.next().await?.context("an exit")? {
            ExecEvent::Exit(exit) => break exit,
            ExecEvent::Start { .. } | ExecEvent::Output { .. } => {}
        }
    };
    assert_eq!(exit.sha256, Some(hashes("streamed\n", "")));
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}

pub(super) async fn what_a_call_did_is_in_its_header(client: &SessionClient) -> Result<()> {
    let request = session();
    let id = request.session_id;
    let of = |method: Method, rest: &str| client.request(method, &format!("{SESSIONS}/{id}{rest}"));
    let (status, made) =
        call_outcome(client.request(Method::POST, SESSIONS).json(&request)).await?;
    assert_eq!(
        (status.as_u16(), &made["session_id"], &made["state"]),
        (201, &json!(id), &json!("running"))
    );
    ensure!(made["workspace_id"].is_string(), "{made}");

    let run = ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..sh("echo out; exit 3")
    };
    let (status, ended) = call_outcome(of(Method::POST, "/exec").json(&run)).await?;
    assert_eq!(
        (
            status.as_u16(),
            &ended["exec_id"],
            &ended["exit_code"],
            &ended["signal"]
        ),
        (200, &json!(run.exec_id), &json!(3), &Value::Null)
    );
    assert_eq!(
        (&ended["timed_out"], &ended["oom_killed"], &ended["bytes"]),
        (
            &json!(false),
            &json!(false),
            &json!({ "stdout": 4, "stderr": 0 })
        )
    );
    assert_eq!(
        ended["sha256"],
        json!({ "stdout": sha256("out\n"), "stderr": sha256("") })
    );
    ensure!(
        ended["duration_ms"].is_u64() && ended.get("stdout").is_none(),
        "{ended}"
    );
    let behind = ExecRequest {
        background: true,
        exec_id: Some(ExecId::generate()),
        ..sh("sleep 600")
    };
    let (status, accepted) = call_outcome(of(Method::POST, "/exec").json(&behind)).await?;
    assert_eq!(
        (status.as_u16(), accepted),
        (202, json!({ "exec_id": behind.exec_id }))
    );
    let streamed = ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..exec(["true"])
    };
    let (status, begun) = call_outcome(
        of(Method::POST, "/exec")
            .header("accept", "text/event-stream")
            .json(&streamed),
    )
    .await?;
    assert_eq!(
        (status.as_u16(), begun),
        (200, json!({ "exec_id": streamed.exec_id })),
        "the header of a stream has more than the exec id"
    );
    let (status, refusal) =
        call_outcome(of(Method::POST, "/exec").json(&exec(["no-such-program"]))).await?;
    assert_eq!(
        (status.as_u16(), refusal),
        (422, json!({ "code": "exec_failed", "errno": "ENOENT" }))
    );

    let exec_id = behind.exec_id.expect("the request has an id");
    let (status, signalled) = call_outcome(
        of(Method::POST, &format!("/execs/{exec_id}/signal"))
            .json(&json!({ "signal": "TERM", "scope": "tree" })),
    )
    .await?;
    assert_eq!(
        (status.as_u16(), signalled),
        (
            204,
            json!({ "exec_id": exec_id, "signal": "TERM", "scope": "tree" })
        )
    );
    assert_eq!(
        call_outcome(of(Method::POST, "/signal").json(&json!({ "signal": "KILL" })))
            .await?
            .1,
        json!({ "signal": "KILL" })
    );

    let file = |method: Method| of(method, "/files").query(&[("path", "dir/f\u{fc}r")]);
    let change = |before: Option<&str>, after: Option<&str>| {
        let mut change = json!({ "path": "dir/f\u{fc}r" });
        for (name, content) in [("sha256_before", before), ("sha256_after", after)] {
            if let Some(content) = content {
                change[name] = sha256(content).into();
            }
        }
        json!({ "changes": [change], "more": 0 })
    };
    assert_eq!(
        call_outcome(file(Method::PUT).body("one")).await?,
        (StatusCode::CREATED, change(None, Some("one")))
    );
    assert_eq!(
        call_outcome(file(Method::PUT).body("two")).await?,
        (StatusCode::OK, change(Some("one"), Some("two")))
    );
    let (status, refusal) =
        call_outcome(file(Method::PUT).header("if-none-match", "*").body("three")).await?;
    assert_eq!(
        (status.as_u16(), refusal),
        (412, json!({ "code": "precondition_failed" }))
    );
    assert_eq!(
        call_outcome(file(Method::DELETE)).await?,
        (StatusCode::NO_CONTENT, change(Some("two"), None))
    );
    call_outcome(file(Method::PUT).body("again")).await?;
    let (status, tree) =
        call_outcome(of(Method::DELETE, "/files").query(&[("path", "dir"), ("recursive", "true")]))
            .await?;
    assert_eq!(
        (status.as_u16(), tree),
        (
            204,
            json!({ "changes": [{ "path": "dir", "type": "dir" }], "more": 0 })
        )
    );
    let read = of(Method::GET, "/files")
        .query(&[("path", "dir")])
        .send()
        .await?;
    assert!(
        !read.headers().contains_key(RESULT_HEADER),
        "a read reports changes"
    );

    let (status, ended) =
        call_outcome(of(Method::POST, "/end").json(&json!({ "workspace": "keep" }))).await?;
    assert_eq!((status.as_u16(), &ended["state"]), (200, &json!("ended")));
    let (status, resumed) = call_outcome(of(Method::POST, "/resume").json(&json!({}))).await?;
    assert_eq!(
        (status.as_u16(), &resumed["state"], &resumed["workspace_id"]),
        (201, &json!("running"), &made["workspace_id"])
    );
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}

fn exec_of(call: &Call) -> Option<ExecId> {
    call.result
        .as_ref()
        .and_then(|result| serde_json::from_value(result["exec_id"].clone()).ok())
}

// invariant: calls
pub(super) async fn a_call_is_remembered_by_its_id(client: &SessionClient) -> Result<()> {
    let id = client.create_session(&session()).await?.session_id;
    let run = |call: CallId, request: &ExecRequest| {
        client
            .request(Method::POST, &format!("{SESSIONS}/{id}/exec"))
            .header(CALL_HEADER, call.to_string())
            .json(request)
    };
    let call = CallId::generate();
    let before = client.call_state(call).await?;
    assert_eq!(
        (before.call_id, before.state, before.status, &before.result),
        (call, CallState::NotFound, None, &None)
    );
    let (since, now) = (
        before.remembered_since.context("since when")?,
        before.now.context("the clock")?,
    );
    ensure!(
        since <= now && now <= OffsetDateTime::now_utc(),
        "{before:?}"
    );

    let (_, result) = call_outcome(run(call, &sh("echo once >> count; exit 3"))).await?;
    let after = client.call_state(call).await?;
    assert_eq!(
        (after.state, after.status, &after.result),
        (CallState::Answered, Some(200), &Some(result))
    );
    assert_eq!((after.remembered_since, after.now), (None, None));
    // Another call with the same id is executed, but the record of the first stays.
    let (_, other) = call_outcome(run(call, &sh("echo twice >> count"))).await?;
    assert_eq!(
        (&other["exit_code"], client.call_state(call).await?),
        (&json!(0), after)
    );
    assert_eq!(
        client.exec(id, &sh("cat count")).await?.stdout,
        "once\ntwice\n"
    );

    let call = CallId::generate();
    call_outcome(run(call, &exec(["no-such-program"]))).await?;
    let refusal = client.call_state(call).await?;
    assert_eq!(
        (
            refusal.state,
            refusal.status,
            &refusal.result.context("why")?["code"]
        ),
        (CallState::Answered, Some(422), &json!("exec_failed"))
    );
    let call = CallId::generate();
    let gone = format!("{SESSIONS}/{}/end", SessionId::generate());
    client
        .request(Method::POST, &gone)
        .header(CALL_HEADER, call.to_string())
        .json(&json!({}))
        .send()
        .await?;
    assert_eq!(client.call_state(call).await?.status, Some(404));
    for bad in ["nonsense", ""] {
        let answer = client
            .request(Method::POST, SESSIONS)
            .header(CALL_HEADER, bad)
            .json(&session())
            .send()
            .await?;
        assert_eq!(answer.status().as_u16(), 400, "{bad:?}");
    }
    let stranger = SessionClient::new(client.base(), "somebody-elses")?;
    let unheard = CallId::generate();
    assert_eq!(
        stranger
            .request(Method::POST, SESSIONS)
            .header(CALL_HEADER, unheard.to_string())
            .send()
            .await?
            .status()
            .as_u16(),
        401
    );
    assert_eq!(
        client.call_state(unheard).await?.state,
        CallState::NotFound,
        "a stranger's call was remembered"
    );
    assert_eq!(
        refusal_of(
            &stranger,
            Method::GET,
            &format!("{CALLS}/{unheard}"),
            &json!({})
        )
        .await?
        .0,
        401
    );
    assert_eq!(
        refusal_of(
            client,
            Method::GET,
            &format!("{CALLS}/nonsense"),
            &json!({})
        )
        .await?,
        (404, "not_found".to_owned())
    );

    // A caller that was told that its call did not arrive can rely on it.
    let late = CallId::generate();
    assert_eq!(client.bar_call(late).await?.state, CallState::NotFound);
    let answer = run(late, &sh("echo thrice >> count")).send().await?;
    let (status, problem): (_, Value) = (answer.status().as_u16(), answer.json().await?);
    assert_eq!((status, &problem["code"]), (409, &json!("call_too_late")));
    assert_eq!(
        (
            client.call_state(late).await?.state,
            client.bar_call(late).await?.state
        ),
        (CallState::NotFound, CallState::NotFound)
    );
    assert_eq!(
        client.exec(id, &sh("cat count")).await?.stdout,
        "once\ntwice\n"
    );

    // The caller disconnects; the command continues.
    let call = CallId::generate();
    let waiting = tokio::spawn(run(call, &sh("sleep 600")).send());
    eventually("the call is running", TIMEOUT, async || {
        Ok(exec_of(&client.call_state(call).await?).is_some())
    })
    .await?;
    let running = client.call_state(call).await?;
    let exec_id = exec_of(&running).context("its command")?;
    assert_eq!((running.state, running.status), (CallState::Running, None));
    waiting.abort();
    eventually("the call is abandoned", TIMEOUT, async || {
        Ok(client.call_state(call).await?.state == CallState::Abandoned)
    })
    .await?;
    let abandoned = client.call_state(call).await?;
    assert_eq!(
        (exec_of(&abandoned), abandoned.status),
        (Some(exec_id), None)
    );
    assert_eq!(
        client.get_exec(id, exec_id).await?.state,
        cynode_api::ExecState::Running
    );
    client.signal_session(id, SignalName::KILL).await?;
    client.end_session(id, &SessionEnd::default()).await?;
    Ok(())
}
