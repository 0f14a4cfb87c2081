//! The outcomes that a worker reports for audit records: hashes of output, changes of files, calls
//! whose response was lost.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_api::{
    Base64Bytes, CALL_HEADER, CallId, CallState, ExecExit, ExecId, ExecRequest, ExecState,
    RESULT_HEADER, SessionId, SignalName, StreamHashes, call_limits,
};
use cynode_client::{ExecEvent, OutputQuery, SessionClient};
use cynode_tests::{
    Answer, Http, Options, RunningWorker, World, eventually, on_every_runtime, session, sh,
};
use http::Method;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;

const TIMEOUT: Duration = Duration::from_secs(60);

on_every_runtime!(the_hash_of_output_read_through_the_runtime_covers_everything);

fn sha256(bytes: impl AsRef<[u8]>) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn hashes(stdout: impl AsRef<[u8]>, stderr: impl AsRef<[u8]>) -> StreamHashes {
    StreamHashes {
        stdout: sha256(stdout),
        stderr: sha256(stderr),
    }
}

struct RecordedSandbox {
    client: SessionClient,
    http: Http,
    id: SessionId,
    worker: RunningWorker,
    world: World,
}

impl RecordedSandbox {
    async fn new() -> Result<Self> {
        Self::on(World::new()?, &Options::default()).await
    }

    async fn on(world: World, options: &Options) -> Result<Self> {
        let worker = world.worker(options).await?;
        let client = worker.client()?;
        let id = client.create_session(&session()).await?.session_id;
        Ok(Self {
            client,
            http: Http::new(&worker)?,
            id,
            worker,
            world,
        })
    }

    /// The status of a call on the session and the outcome in its header.
    async fn call_outcome(
        &self,
        request: impl FnOnce(&Http, &str) -> reqwest::RequestBuilder,
    ) -> Result<(u16, Value)> {
        let answer = Answer::of(request(
            &self.http,
            &format!("/v1/worker/sessions/{}", self.id),
        ))
        .await?;
        let text = answer.header(RESULT_HEADER);
        ensure!(
            !text.is_empty() && text.len() <= call_limits::MAX_RESULT_BYTES,
            "{answer:?}"
        );
        Ok((answer.status, serde_json::from_str(text)?))
    }

    async fn post(&self, rest: &str, body: &Value) -> Result<(u16, Value)> {
        self.call_outcome(|http, session| {
            http.request(Method::POST, &format!("{session}/{rest}"))
                .json(body)
        })
        .await
    }

    async fn put(&self, path: &str, content: &'static str) -> Result<()> {
        let (status, _) = self
            .call_outcome(|http, session| {
                http.request(Method::PUT, &format!("{session}/files"))
                    .query(&[("path", path)])
                    .body(content)
            })
            .await?;
        ensure!(status < 300, "writing {path}: {status}");
        Ok(())
    }
}

async fn streamed(
    client: &SessionClient,
    id: SessionId,
    request: &ExecRequest,
) -> Result<ExecExit> {
    let mut events = client.exec_stream(id, request).await?;
    loop {
        if let ExecEvent::Exit(exit) = events.next().await?.context("an exit")? {
            return Ok(exit);
        }
    }
}

/// The rules of output hashes, however commands are run.
async fn hashes_are_of_all(client: &SessionClient, id: SessionId) -> Result<()> {
    let result = client
        .exec(
            id,
            &sh("printf '\\377\\000out'; printf '\\200' >&2; exit 7"),
        )
        .await?;
    assert_eq!(
        (result.encoding.as_str(), result.exit.sha256),
        ("base64", Some(hashes(b"\xff\x00out", b"\x80")))
    );
    assert_eq!(
        client.exec(id, &sh("true")).await?.exit.sha256,
        Some(hashes("", ""))
    );
    let cut = client
        .exec(
            id,
            &ExecRequest {
                max_output_bytes: Some(0),
                ..sh("yes | head -c 200001; yes n | head -c 100001 >&2")
            },
        )
        .await?;
    ensure!(
        cut.truncated.stdout && cut.truncated.stderr && cut.stdout.is_empty(),
        "{cut:?}"
    );
    assert_eq!(
        cut.exit.sha256,
        Some(hashes(
            &b"y\n".repeat(100_001)[..200_001],
            &b"n\n".repeat(50_001)[..100_001]
        ))
    );
    let late = client
        .exec(
            id,
            &ExecRequest {
                timeout_ms: 1_500,
                ..sh("trap '' TERM; echo begun; while :; do sleep 1; done")
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
                ..sh("echo behind; echo the scenes >&2")
            },
        )
        .await?
        .exec_id;
    eventually("the command ends", TIMEOUT, async || {
        Ok(client.get_exec(id, behind).await?.exit.is_some())
    })
    .await?;
    let exit = client
        .get_exec(id, behind)
        .await?
        .exit
        .context("the command has ended")?;
    assert_eq!(exit.sha256, Some(hashes("behind\n", "the scenes\n")));
    let page = client
        .exec_output(id, behind, &OutputQuery::default())
        .await?;
    assert_eq!(page.exit, Some(exit));
    assert_eq!(
        streamed(client, id, &sh("echo as it comes")).await?.sha256,
        Some(hashes("as it comes\n", ""))
    );
    Ok(())
}

#[tokio::test]
// invariant: calls
async fn the_hash_of_output_covers_everything_written_even_if_little_is_kept() -> Result<()> {
    let sandbox = RecordedSandbox::new().await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    hashes_are_of_all(client, id).await?;
    // More output than is kept; the hash is computed inside.
    let much = client
        .exec(
            id,
            &ExecRequest {
                max_output_bytes: Some(64),
                ..sh("yes | head -c 40000000")
            },
        )
        .await?;
    let inside = client
        .exec(id, &sh("yes | head -c 40000000 | sha256sum"))
        .await?
        .stdout;
    let hashes_of_exit = much.exit.sha256.context("known")?;
    ensure!(
        inside.starts_with(&hashes_of_exit.stdout) && much.exit.bytes.stdout == 40_000_000,
        "{inside} {hashes_of_exit:?}"
    );
    // Hostile code kills the process that would have seen the end: the rest of the output is
    // unknown.
    client.exec(id, &sh("mkfifo go")).await?;
    let doomed = ExecRequest {
        background: true,
        timeout_ms: 0,
        ..sh("read now < go; kill -9 $PPID; sleep 600")
    };
    let doomed = client.exec_background(id, &doomed).await?.exec_id;
    client.exec(id, &sh("echo now > go")).await?;
    eventually("the exec is lost", TIMEOUT, async || {
        let page = client
            .exec_output(
                id,
                doomed,
                &OutputQuery {
                    wait_ms: Some(10_000),
                    ..Default::default()
                },
            )
            .await?;
        Ok(page
            .exit
            .is_some_and(|exit| exit.lost && exit.sha256.is_none()))
    })
    .await
}

// invariant: calls
async fn the_hash_of_output_read_through_the_runtime_covers_everything(world: World) -> Result<()> {
    let sandbox =
        RecordedSandbox::on(world, &Options::default().set("exec_via", "\"runtime\"")).await?;
    hashes_are_of_all(&sandbox.client, sandbox.id).await
}

#[tokio::test]
// invariant: calls
async fn output_hashes_and_call_records_are_correct_after_a_worker_crash() -> Result<()> {
    let RecordedSandbox {
        client,
        http,
        id,
        mut worker,
        world,
    } = RecordedSandbox::new().await?;
    client.exec(id, &sh("mkfifo small large")).await?;
    let begin = |script: &str| ExecRequest {
        background: true,
        timeout_ms: 0,
        exec_id: Some(ExecId::generate()),
        ..sh(script)
    };
    let small = begin("echo before; read go < small; echo after; exit 4");
    let large = begin("yes | head -c 40000000; echo all; read go < large; echo after");
    let call = CallId::generate();
    let sent = http
        .request(Method::POST, &format!("/v1/worker/sessions/{id}/exec"))
        .header(CALL_HEADER, call.to_string())
        .json(&small);
    assert_eq!(Answer::of(sent).await?.status, 202);
    assert_eq!(client.call_state(call).await?.state, CallState::Answered);
    let large = client.exec_background(id, &large).await?.exec_id;
    let small = small.exec_id.context("it has one")?;
    eventually("most output is dropped", TIMEOUT, async || {
        let page = client
            .exec_output(
                id,
                large,
                &OutputQuery {
                    tail_bytes: Some(1),
                    ..Default::default()
                },
            )
            .await?;
        Ok(page
            .chunks
            .last()
            .and_then(|chunk| chunk.data.as_deref())
            .is_some_and(|text| text.ends_with("all\n")))
    })
    .await?;
    client
        .exec_output(
            id,
            small,
            &OutputQuery {
                wait_ms: Some(30_000),
                ..Default::default()
            },
        )
        .await?;
    let before = OffsetDateTime::now_utc();
    worker.kill()?;

    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let forgotten = client.call_state(call).await?;
    assert_eq!(
        (forgotten.state, forgotten.status, forgotten.result),
        (CallState::NotFound, None, None)
    );
    ensure!(
        forgotten.remembered_since.context("since when")? > before,
        "the memory reaches back to before the restart"
    );
    client
        .exec(id, &sh("echo go > small; echo go > large"))
        .await?;
    for exec in [small, large] {
        eventually("the command exits", TIMEOUT, async || {
            Ok(client.get_exec(id, exec).await?.state == ExecState::Exited)
        })
        .await?;
    }
    let exit = async |exec| {
        client
            .get_exec(id, exec)
            .await?
            .exit
            .context("the command has ended")
    };
    let small = exit(small).await?;
    assert_eq!(
        (small.exit_code, small.sha256),
        (Some(4), Some(hashes("before\nafter\n", ""))),
        "the hash does not cover the whole output"
    );
    let large = exit(large).await?;
    assert_eq!(
        (large.exit_code, large.sha256, large.bytes.stdout),
        (Some(0), None, 40_000_010),
        "output that was dropped has a hash"
    );
    Ok(())
}

#[tokio::test]
// invariant: calls
async fn file_changes_of_a_call_are_reported_with_hashes_before_and_after() -> Result<()> {
    let sandbox = RecordedSandbox::new().await?;
    for (path, content) in [
        ("one", "1\n"),
        ("two", "2\n"),
        ("old", "a\nb\nc\n"),
        ("gone", "x\n"),
    ] {
        sandbox.put(path, content).await?;
    }
    let (status, moved) = sandbox
        .post(
            "files:move",
            &json!({ "from": "one", "to": "two", "overwrite": true }),
        )
        .await?;
    let expected = json!([{ "path": "one", "sha256_before": sha256("1\n") }, { "path": "two", "sha256_before": sha256("2\n"), "sha256_after": sha256("1\n") }]);
    assert_eq!((status, &moved["changes"]), (204, &expected));
    let directory = json!({ "changes": [{ "path": "/tmp/a/b", "type": "dir" }], "more": 0 });
    assert_eq!(
        sandbox
            .post(
                "files:mkdir",
                &json!({ "path": "/tmp/a/b", "parents": true })
            )
            .await?,
        (204, directory)
    );
    let nothing = json!({ "changes": [], "more": 0 });
    assert_eq!(
        sandbox
            .post(
                "files:mkdir",
                &json!({ "path": "/tmp/a/b", "parents": true })
            )
            .await?,
        (204, nothing.clone())
    );
    assert_eq!(
        sandbox
            .post("files:mkdir", &json!({ "path": "/tmp/a/b" }))
            .await?,
        (409, json!({ "code": "already_exists", "errno": "EEXIST" }))
    );

    let diff = "--- a/two\n+++ b/two\n@@ -1 +1 @@\n-1\n+one\n--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+n\n--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\
                diff --git a/old b/moved\nsimilarity index 100%\nrename from old\nrename to moved\n";
    let (status, dry) = sandbox
        .post("files:patch", &json!({ "diff": diff, "dry_run": true }))
        .await?;
    assert_eq!((status, dry), (200, nothing));
    let (status, patched) = sandbox
        .post("files:patch", &json!({ "diff": diff }))
        .await?;
    let expected = json!([
        { "path": "two", "sha256_before": sha256("1\n"), "sha256_after": sha256("one\n") },
        { "path": "new", "sha256_after": sha256("n\n") },
        { "path": "gone", "sha256_before": sha256("x\n") },
        { "path": "old", "sha256_before": sha256("a\nb\nc\n") },
        { "path": "moved", "sha256_after": sha256("a\nb\nc\n") },
    ]);
    assert_eq!(
        (status, &patched["changes"], &patched["more"]),
        (200, &expected, &json!(0))
    );
    let (status, rejected) = sandbox
        .post(
            "files:patch",
            &json!({ "diff": "--- a/two\n+++ b/two\n@@ -1 +1 @@\n-no\n+yes\n" }),
        )
        .await?;
    assert_eq!(
        (status, rejected),
        (409, json!({ "code": "patch_rejected" }))
    );

    // A name that is not UTF-8, and one that is too long once escaped.
    let odd = Base64Bytes(b"odd-\xff".to_vec());
    let at = |method: Method| {
        let odd = odd.clone();
        move |http: &Http, session: &str| {
            http.request(method, &format!("{session}/files"))
                .query(&[("path_b64", STANDARD.encode(odd.0))])
                .body("odd")
        }
    };
    let change =
        |name: &str| json!({ "changes": [{ "path_b64": odd, name: sha256("odd") }], "more": 0 });
    assert_eq!(
        sandbox.call_outcome(at(Method::PUT)).await?,
        (201, change("sha256_after"))
    );
    assert_eq!(
        sandbox.call_outcome(at(Method::DELETE)).await?,
        (204, change("sha256_before"))
    );
    let deep: String = "\u{1}".repeat(200) + "/";
    let long = deep.repeat(20) + "file";
    sandbox.put(&long, "deep").await?;
    let (_, gone) = sandbox
        .call_outcome(|http, session| {
            http.request(Method::DELETE, &format!("{session}/files"))
                .query(&[("path", &long)])
        })
        .await?;
    assert_eq!(
        gone["changes"][0]["path_b64"],
        json!(Base64Bytes(long.into_bytes()))
    );
    assert_eq!(gone["changes"][0]["sha256_before"], json!(sha256("deep")));

    // Large files are not hashed, and unreadable files are still deleted.
    sandbox
        .client
        .exec(
            sandbox.id,
            &sh("dd if=/dev/zero of=large bs=1 count=1 seek=104857600 \
                 2>/dev/null; echo x > closed; chmod 0 closed"),
        )
        .await?;
    for path in ["large", "closed"] {
        let (status, gone) = sandbox
            .call_outcome(|http, session| {
                http.request(Method::DELETE, &format!("{session}/files"))
                    .query(&[("path", path)])
            })
            .await?;
        assert_eq!(
            (status, &gone["changes"]),
            (204, &json!([{ "path": path }]))
        );
    }
    Ok(())
}

fn archive(files: &[(String, &str)]) -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        let name = &mut header.as_old_mut().name;
        name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_cksum();
        archive.append(&header, content.as_bytes())?;
    }
    Ok(archive.into_inner()?)
}

#[tokio::test]
// invariant: calls
async fn a_truncated_archive_reports_its_changes_and_a_large_one_their_number() -> Result<()> {
    let sandbox = RecordedSandbox::new().await?;
    let import = |files: &[(String, &str)]| {
        let bytes = archive(files);
        async {
            let bytes = bytes?;
            sandbox
                .call_outcome(|http, session| {
                    http.request(Method::POST, &format!("{session}/import"))
                        .query(&[("path", "into")])
                        .body(bytes)
                })
                .await
        }
    };
    let (status, first) = import(&[("a".to_owned(), "1"), ("b/c".to_owned(), "2")]).await?;
    let expected = json!([{ "path": "into/a", "sha256_after": sha256("1") }, { "path": "into/b/c", "sha256_after": sha256("2") }]);
    assert_eq!(
        (status, &first["changes"], &first["more"]),
        (204, &expected, &json!(0))
    );
    let (status, broken) = import(&[("a".to_owned(), "new"), ("../evil".to_owned(), "x")]).await?;
    let expected =
        json!([{ "path": "into/a", "sha256_before": sha256("1"), "sha256_after": sha256("new") }]);
    assert_eq!(
        (status, &broken["code"], &broken["changes"], &broken["more"]),
        (400, &json!("invalid_request"), &expected, &json!(0))
    );
    let many: Vec<(String, &str)> = (0..1_000)
        .map(|number| (format!("many-{number}"), "x"))
        .collect();
    let (status, result) = import(&many).await?;
    let count = result["changes"].as_array().context("changes")?.len() as u64;
    assert_eq!(
        (status, result["more"].as_u64().context("more")? + count),
        (204, 1_000)
    );
    ensure!(count > 40, "{count}");
    Ok(())
}

#[tokio::test]
async fn input_is_reported_by_size_and_hash_and_never_verbatim() -> Result<()> {
    let sandbox = RecordedSandbox::new().await?;
    let reading = ExecRequest {
        stdin_open: true,
        background: true,
        timeout_ms: 0,
        ..sh("cat > /dev/null; sleep 600")
    };
    let exec_id = sandbox
        .client
        .exec_background(sandbox.id, &reading)
        .await?
        .exec_id;
    let write = json!({ "data_b64": Base64Bytes(b"secret".to_vec()), "eof": true });
    let (status, result) = sandbox
        .post(&format!("execs/{exec_id}/stdin"), &write)
        .await?;
    let expected = json!({
        "exec_id": exec_id,
        "bytes": { "stdin": 6 },
        "sha256": { "stdin": sha256("secret") },
        "eof": true
    });
    assert_eq!((status, result), (204, expected));
    let (status, result) = sandbox
        .post(&format!("execs/{exec_id}/stdin"), &write)
        .await?;
    assert_eq!((status, result), (409, json!({ "code": "stdin_closed" })));
    Ok(())
}

#[tokio::test]
// invariant: calls
async fn a_caller_that_disconnects_at_any_moment_leaves_no_call_running_forever() -> Result<()> {
    let sandbox = RecordedSandbox::new().await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    let state = async |call| Ok::<_, anyhow::Error>(client.call_state(call).await?.state);
    // A body that never ends.
    let (sender, body) = tokio::sync::mpsc::channel::<Result<bytes::Bytes, std::io::Error>>(1);
    let call = CallId::generate();
    let body = futures_util::stream::unfold(body, |mut body| async {
        body.recv().await.map(|piece| (piece, body))
    });
    let request = sandbox
        .http
        .request(Method::PUT, &format!("/v1/worker/sessions/{id}/files"))
        .query(&[("path", "half")]);
    let sending = tokio::spawn(
        request
            .header(CALL_HEADER, call.to_string())
            .body(reqwest::Body::wrap_stream(body))
            .send(),
    );
    sender.send(Ok("half".into())).await?;
    eventually("the call is running", TIMEOUT, async || {
        Ok(state(call).await? == CallState::Running)
    })
    .await?;
    sending.abort();
    // Either the end of the body or the caller's disconnect may be seen first.
    eventually("the call is over", TIMEOUT, async || {
        Ok(matches!(
            state(call).await?,
            CallState::Abandoned | CallState::Answered
        ))
    })
    .await?;
    assert_ne!(client.call_state(call).await?.status, Some(201));
    assert_eq!(client.exec(id, &sh("ls")).await?.stdout, "");

    // A stream is answered when it begins; its content is not part of the outcome.
    let call = CallId::generate();
    let path = format!("/v1/worker/sessions/{id}/exec");
    let request = sandbox
        .http
        .request(Method::POST, &path)
        .header("accept", "text/event-stream")
        .header(CALL_HEADER, call.to_string());
    let following = request
        .json(&sh("echo begun; exec sleep 600"))
        .send()
        .await?;
    let answered = client.call_state(call).await?;
    assert_eq!(
        (answered.state, answered.status),
        (CallState::Answered, Some(200))
    );
    drop(following);
    let exec_id: ExecId =
        serde_json::from_value(answered.result.context("its command")?["exec_id"].clone())?;
    client
        .signal_exec(id, exec_id, SignalName::KILL, cynode_api::SignalScope::Tree)
        .await?;
    eventually("the command ends", TIMEOUT, async || {
        Ok(client.get_exec(id, exec_id).await?.exit.is_some())
    })
    .await?;
    Ok(())
}
