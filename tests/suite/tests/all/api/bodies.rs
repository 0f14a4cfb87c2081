//! Malformed bodies, queries and ids: refused by name, without any effect.

use std::{
    io::{Read as _, Write as _},
    time::Duration,
};

use anyhow::{Context as _, Result};
use cynode_api::{SessionId, SessionState};
use cynode_client::SessionFilter;
use cynode_tests::{Answer, Http, IMAGE, Options, RunningWorker, World, session, sh};
use http::Method;
use serde_json::{Value, json};

use super::{SOME_ID, code_of};

/// The smallest body of a session, with more members appended.
fn body(more: &str) -> Vec<u8> {
    format!(r#"{{"version":1,"task_id":"{SOME_ID}","session_id":"{SOME_ID}","image_ref":"{IMAGE}"{more}}}"#).into_bytes()
}

#[tokio::test]
// invariant: fail-closed
async fn malformed_bodies_create_no_session() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let (client, http) = (worker.client()?, Http::new(&worker)?);
    let nested = |depth: usize| [vec![b'['; depth], vec![b']'; depth]].concat();
    let mut not_utf8 = body(r#","labels":{"a":"?"}"#);
    let at = not_utf8
        .iter()
        .position(|byte| *byte == b'?')
        .context("the mark")?;
    not_utf8[at] = 0xff;
    let deep = body(&format!(
        r#","env":{}"#,
        String::from_utf8(nested(100_000))?
    ));
    let cases: Vec<(Vec<u8>, u16, &str)> = vec![
        (b"{broken".to_vec(), 400, "line 1"),
        (b"".to_vec(), 400, "task_id"),
        (b"{}".to_vec(), 400, "task_id"),
        (b"null".to_vec(), 400, "a JSON object"),
        (b" []".to_vec(), 400, "a JSON object"),
        (format!(r#"[1,"{SOME_ID}","{SOME_ID}","{IMAGE}",null,{{}},null,null,null,null,null,{{}}]"#).into_bytes(), 400, "a JSON object"),
        (b"\"text\"".to_vec(), 400, "a JSON object"),
        (nested(100_000), 400, "a JSON object"),
        (deep, 400, "127 levels"),
        (not_utf8, 400, "unicode"),
        ([body("").as_slice(), b"x"].concat(), 400, "after the body's object"),
        ([body("").as_slice(), body("").as_slice()].concat(), 400, "after the body's object"),
        (body(r#","colour":"blue""#), 400, "colour"),
        (body(r#","limits":{"memory":1}"#), 400, "limits.memory"),
        (body(r#","image_ref":"other""#), 400, "image_ref"),
        (body(r#","env":{"A":"1","A":"2"}"#), 400, "A"),
        (body(r#","labels":{"a":"1","b":"2","a":"1"}"#), 400, "a"),
        (body(r#","env":"A=1""#), 400, "env"),
        (body(r#","env":{"A":1}"#), 400, "env.A"),
        (body(r#","env":{"A\u0000B":"1"}"#), 400, "env"),
        (body(r#","env":{"A":"1\u0000"}"#), 400, "env.A"),
        (body(r#","env":{"":"1"}"#), 400, "env"),
        (body(r#","labels":{"a\u0000":"1"}"#), 400, "labels"),
        (body(r#","limits":{"memory_bytes":-1}"#), 400, "limits.memory_bytes"),
        (body(r#","limits":{"memory_bytes":1e30}"#), 400, "limits.memory_bytes"),
        (body(r#","limits":{"memory_bytes":99999999999999999999}"#), 400, "limits.memory_bytes"),
        (body(r#","limits":{"cpus":"1"}"#), 400, "limits.cpus"),
        (body(r#","pty_allowed":"yes""#), 400, "pty_allowed"),
        (body(r#","max_lifetime_seconds":1.5"#), 400, "max_lifetime_seconds"),
        (body(r#","workspace_ref":"git:x@main""#), 400, "workspace_ref"),
        (br#"{"task_id":"x","session_id":"y","image_ref":"default"}"#.to_vec(), 400, "task_id"),
        (format!(r#"{{"task_id":"{SOME_ID}","session_id":17,"image_ref":"default"}}"#).into_bytes(), 400, "session_id"),
        (format!(r#"{{"version":"1","task_id":"{SOME_ID}","session_id":"{SOME_ID}","image_ref":"default"}}"#).into_bytes(), 400, "version"),
        (format!(r#"{{"version":2,"task_id":"{SOME_ID}","session_id":"{SOME_ID}","image_ref":"default"}}"#).into_bytes(), 422, "version 2"),
        (format!(r#"{{"task_id":"{SOME_ID}","session_id":"{SOME_ID}","image_ref":"a\u0000b"}}"#).into_bytes(), 400, "image_ref"),
        (format!(r#"{{"task_id":"{SOME_ID}","session_id":"{SOME_ID}","image_ref":"w\u00ca"}}"#).into_bytes(), 400, "image_ref"),
        (format!(r#"{{"task_id":"{SOME_ID}","session_id":"{SOME_ID}","image_ref":"localhost/A//b"}}"#).into_bytes(), 400, "image_ref"),
        (vec![b' '; (10 << 20) + 1], 413, "10485760"),
    ];
    for (body, status, named) in cases {
        let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
        let answer = Answer::of(
            http.request(Method::POST, "/v1/worker/sessions")
                .header("content-type", "application/json")
                .body(body),
        )
        .await?;
        let code = code_of(&answer)?;
        let detail = answer.problem()?.detail;
        assert_eq!(
            (answer.status, detail.contains(named)),
            (status, true),
            "{shown}: {code}: {detail}"
        );
        assert!(
            detail.len() < 1_000,
            "{shown}: the detail is long: {detail}"
        );
    }
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonx",
        "",
    ] {
        let answer = Answer::of(
            http.request(Method::POST, "/v1/worker/sessions")
                .header("content-type", kind)
                .body(body("")),
        )
        .await?;
        assert_eq!(
            (answer.status, code_of(&answer)?.as_str()),
            (415, "unsupported_media_type"),
            "{kind}"
        );
    }
    assert!(
        client
            .list_sessions(&SessionFilter::default())
            .await?
            .is_empty()
    );
    assert!(world.containers()?.is_empty());

    // The valid body creates one session, with parameters in its content type or without a content
    // type.
    for kind in ["application/json; charset=utf-8", "application/vnd.x+json"] {
        let answer = Answer::of(
            http.request(Method::POST, "/v1/worker/sessions")
                .header("content-type", kind)
                .body(body("")),
        )
        .await?;
        assert!(
            answer.status == 201 || answer.status == 200,
            "{kind}: {answer:?}"
        );
    }
    assert_eq!(
        Answer::of(
            http.request(Method::POST, "/v1/worker/sessions")
                .body(body(""))
        )
        .await?
        .status,
        200
    );
    Ok(())
}

#[tokio::test]
async fn malformed_calls_on_a_session_change_nothing() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let (client, http) = (worker.client()?, Http::new(&worker)?);
    let id = client.create_session(&session()).await?.session_id;
    let post = |rest: &str, body: &Value| {
        http.request(Method::POST, &format!("/v1/worker/sessions/{id}{rest}"))
            .json(body)
    };
    let exec = |more: Value| {
        let mut body = json!({"argv": ["touch", "made"], "timeout_ms": 10_000});
        body.as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("an object").clone());
        body
    };
    let some_exec = format!("/execs/{SOME_ID}");
    let (signal, stdin) = (format!("{some_exec}/signal"), format!("{some_exec}/stdin"));
    for (rest, body, status, named) in [
        ("/exec", exec(json!({"argv": []})), 400, "argv"),
        ("/exec", exec(json!({"argv": [""]})), 400, "argv"),
        ("/exec", exec(json!({"argv": "touch made"})), 400, "argv"),
        ("/exec", exec(json!({"argv": ["touch", 1]})), 400, "argv[1]"),
        (
            "/exec",
            exec(json!({"argv": ["touch", "ma\u{0}de"]})),
            400,
            "argv[1]",
        ),
        (
            "/exec",
            exec(json!({"argv": ["to\u{0}uch"]})),
            400,
            "argv[0]",
        ),
        (
            "/exec",
            exec(json!({"argv": vec!["x"; 240_000]})),
            413,
            "argv",
        ),
        (
            "/exec",
            exec(json!({"argv": ["touch", "x".repeat(600_000)]})),
            413,
            "argv",
        ),
        ("/exec", exec(json!({"env": {"A": "a\u{0}"}})), 400, "env.A"),
        ("/exec", exec(json!({"env": {"A=B": "a"}})), 400, "A=B"),
        (
            "/exec",
            exec(json!({"env": {"CYNODE_TASK_ID": "x"}})),
            400,
            "CYNODE_TASK_ID",
        ),
        ("/exec", exec(json!({"cwd": "a\u{0}b"})), 400, "cwd"),
        ("/exec", exec(json!({"cwd": "x".repeat(5_000)})), 400, "cwd"),
        ("/exec", exec(json!({"timeout_ms": 0})), 400, "timeout_ms"),
        ("/exec", exec(json!({"timeout_ms": -1})), 400, "timeout_ms"),
        (
            "/exec",
            exec(json!({"timeout_ms": 10_800_001})),
            400,
            "timeout_ms",
        ),
        (
            "/exec",
            json!({"argv": ["touch", "made"]}),
            400,
            "timeout_ms",
        ),
        (
            "/exec",
            exec(json!({"max_output_bytes": 16_777_217})),
            400,
            "max_output_bytes",
        ),
        (
            "/exec",
            exec(json!({"stdin": "a", "stdin_b64": "YQ=="})),
            400,
            "stdin",
        ),
        (
            "/exec",
            exec(json!({"stdin_b64": "not base64"})),
            400,
            "stdin_b64",
        ),
        (
            "/exec",
            exec(json!({"stdin": "x".repeat(5 << 20)})),
            413,
            "stdin",
        ),
        ("/exec", exec(json!({"exec_id": "x"})), 400, "exec_id"),
        ("/exec", exec(json!({"shell": true})), 400, "shell"),
        ("/exec", exec(json!({"version": 2})), 422, "version 2"),
        ("/signal", json!({"signal": "BOO"}), 400, "BOO"),
        ("/signal", json!({"signal": 9}), 400, "signal"),
        (
            "/signal",
            json!({"signal": "KILL", "version": 9}),
            422,
            "version 9",
        ),
        (
            &signal,
            json!({"signal": "KILL", "scope": "all"}),
            400,
            "scope",
        ),
        (&stdin, json!({"data_b64": "%"}), 400, "data_b64"),
        ("/end", json!({"workspace": "burn"}), 400, "workspace"),
        ("/end", json!({"why": "x"}), 400, "why"),
        ("/end", json!({"version": 2}), 422, "version 2"),
        ("/resume", json!({"why": "x"}), 400, "why"),
        ("/resume", json!({"version": 2}), 422, "version 2"),
        ("/files:list", json!({"path": "a\u{0}"}), 400, "path"),
        (
            "/files:list",
            json!({"path": "a", "path_b64": "YQ=="}),
            400,
            "path",
        ),
        ("/files:search", json!({"path": "."}), 400, "pattern"),
        ("/files:patch", json!({"diff": 1}), 400, "diff"),
        (
            "/files:move",
            json!({"from": "a\u{0}", "to": "b"}),
            400,
            "from",
        ),
        ("/files:move", json!({"from": "a", "to": ""}), 400, "to"),
        (
            "/files:mkdir",
            json!({"path": "x".repeat(4_096)}),
            400,
            "path",
        ),
        (
            "/files:mkdir",
            json!({"path": "x", "version": 2}),
            422,
            "version 2",
        ),
        (
            "/export",
            json!({"format": "tar", "path": "a\u{0}"}),
            400,
            "path",
        ),
    ] {
        let answer = Answer::of(post(rest, &body)).await?;
        let shown = body.to_string().chars().take(100).collect::<String>();
        let code = code_of(&answer)?;
        let detail = answer.problem()?.detail;
        assert_eq!(
            (answer.status, detail.contains(named)),
            (status, true),
            "{rest} {shown}: {code}: {detail}"
        );
    }
    for (method, rest, named) in [
        (Method::GET, "/files?path=a%00b", "path"),
        (Method::PUT, "/files?path=a%00b", "path"),
        (Method::PUT, "/files?path=", "path"),
        (Method::PUT, "/files?path=x&mode=644", "mode"),
        (Method::DELETE, "/files?path=x&recursive=yes", "query"),
        (Method::POST, "/import", "path"),
        (Method::PATCH, "", "colour"),
        (Method::GET, "/pty?cols=0", "cols"),
        (Method::GET, "/pty?rows=1001", "rows"),
        (Method::GET, "/pty?colour=1", "colour"),
    ] {
        let request = http.request(method.clone(), &format!("/v1/worker/sessions/{id}{rest}"));
        let request = if method == Method::PATCH {
            request.json(&json!({"colour": 1}))
        } else {
            request
        };
        let answer = Answer::of(request).await?;
        let detail = answer.problem()?.detail;
        assert_eq!(
            (
                answer.status,
                code_of(&answer)?.as_str(),
                detail.contains(named)
            ),
            (400, "invalid_request", true),
            "{method} {rest}: {detail}"
        );
    }
    assert_eq!(client.get_session(id).await?.state, SessionState::Running);
    assert!(client.list_execs(id).await?.items.is_empty());
    assert_eq!(client.exec(id, &sh("ls -A")).await?.stdout, "");
    Ok(())
}

/// Sends a head and then `bytes` bytes without reading, as simple clients do; returns the response.
fn send_all_then_read(worker: &RunningWorker, head: &str, bytes: usize) -> Result<String> {
    let mut socket = std::net::TcpStream::connect(worker.url()?.trim_start_matches("http://"))?;
    socket.set_read_timeout(Some(Duration::from_secs(20)))?;
    socket.write_all(format!("{head}\r\nhost: worker\r\nconnection: close\r\n\r\n").as_bytes())?;
    let piece = vec![b' '; 1 << 16];
    for _ in 0..bytes / piece.len() {
        socket.write_all(&piece)?;
    }
    socket.write_all(&piece[..bytes % piece.len()])?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer)
}

#[tokio::test]
async fn a_refusal_reaches_a_caller_that_sends_its_whole_body_first() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let id = worker
        .client()?
        .create_session(&session())
        .await?
        .session_id;
    let good = format!("authorization: Bearer {}", worker.token()?);
    let sessions = "/v1/worker/sessions";
    for (target, authorization, bytes, status) in [
        (format!("POST {sessions}"), "x: y", 30 << 20, 401),
        (
            format!("POST {sessions}"),
            good.as_str(),
            (10 << 20) + 1,
            413,
        ),
        (format!("POST {sessions}"), &good, 60 << 20, 413),
        (format!("POST {sessions}/nothing/end"), &good, 5 << 20, 404),
        (format!("DELETE {sessions}"), &good, 5 << 20, 405),
        (
            format!("PUT {sessions}/{id}/files?path=/etc/x"),
            &good,
            50 << 20,
            403,
        ),
        (
            format!("PUT {sessions}/{id}/files?path=large"),
            &good,
            101 << 20,
            413,
        ),
        (
            format!("POST {sessions}/{id}/import?path=into"),
            &good,
            50 << 20,
            400,
        ),
    ] {
        let answer = send_all_then_read(
            &worker,
            &format!("{target} HTTP/1.1\r\n{authorization}\r\ncontent-length: {bytes}"),
            bytes,
        )?;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains("\"remedy\""),
            "{target} with {bytes} bytes: {answer}"
        );
    }
    // A client that sends `Expect: 100-continue` is refused before it sends the body.
    let refused = send_all_then_read(
        &worker,
        &format!("POST {sessions} HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 1000"),
        0,
    )?;
    assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
    Ok(())
}

#[tokio::test]
async fn an_id_is_a_uuid_in_either_case_and_anything_else_is_not_found() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let (client, http) = (worker.client()?, Http::new(&worker)?);
    let id = client.create_session(&session()).await?.session_id;
    let shown = Answer::of(http.request(
        Method::GET,
        &format!("/v1/worker/sessions/{}", id.to_string().to_uppercase()),
    ))
    .await?;
    assert_eq!(
        serde_json::from_slice::<Value>(&shown.body)?["session_id"],
        id.to_string(),
        "the response does not use lower case"
    );
    let mut request = session();
    request.session_id = SessionId::generate();
    let mut body = serde_json::to_value(&request)?;
    for name in ["session_id", "task_id"] {
        body[name] = body[name].as_str().context("an id")?.to_uppercase().into();
    }
    assert_eq!(
        Answer::of(
            http.request(Method::POST, "/v1/worker/sessions")
                .json(&body)
        )
        .await?
        .status,
        201
    );
    assert_eq!(
        Answer::of(
            http.request(Method::POST, "/v1/worker/sessions")
                .json(&request)
        )
        .await?
        .status,
        200,
        "an identical request was refused"
    );

    for odd in [
        "x",
        "1",
        "%00",
        "..%2f..%2fetc",
        "01890000-0000-7000-8000-00000000000",
        "01890000-0000-7000-8000-0000000000012",
        "null",
        "%ff",
        "*",
        "'%20OR%201=1",
    ] {
        for rest in ["", "/execs", "/files?path=x"] {
            let answer =
                Answer::of(http.request(Method::GET, &format!("/v1/worker/sessions/{odd}{rest}")))
                    .await?;
            let code = code_of(&answer)?;
            assert!(
                (answer.status, code.as_str()) == (404, "session_not_found")
                    || (odd == "%ff" && answer.status == 400),
                "{odd}{rest}: {answer:?}"
            );
        }
    }
    assert_eq!(
        client.list_sessions(&SessionFilter::default()).await?.len(),
        2
    );
    Ok(())
}
