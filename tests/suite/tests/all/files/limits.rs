//! The limits of a file call: size, space, session state.

use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use cynode_api::{
    ExecRequest, LimitsRequest, SessionEnd, SignalName, SignalScope, file_limits::MAX_PUT_BYTES,
};
use cynode_client::OutputQuery;
use cynode_tests::{Answer, Http, Options, World, session, sh};
use futures_util::stream;
use http::Method;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::Sandbox;

const MEBIBYTE: usize = 1 << 20;

/// A body of unknown length.
fn streamed(pieces: impl Iterator<Item = Bytes> + Send + 'static) -> reqwest::Body {
    reqwest::Body::wrap_stream(stream::iter(pieces.map(Ok::<_, std::io::Error>)))
}

#[tokio::test]
async fn a_hundred_mebibytes_pass_both_ways_whole_and_without_filling_memory() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    // All pieces differ, so that a lost or duplicated one shows.
    let piece = |number: usize| {
        Bytes::from(
            (0..MEBIBYTE / 8)
                .flat_map(|word| (word as u64 * 0x9e37_79b9 + number as u64).to_le_bytes())
                .collect::<Vec<u8>>(),
        )
    };
    let mut expected = Sha256::new();
    (0..100).for_each(|number| expected.update(piece(number)));
    let expected = hex::encode(expected.finalize());

    let put = Answer::of(
        sandbox
            .file(Method::PUT, "large")
            .body(streamed((0..100).map(piece))),
    )
    .await?;
    assert_eq!(
        (put.status, put.header("etag")),
        (201, format!("\"sha256:{expected}\"").as_str())
    );
    assert_eq!(
        sandbox.sh("sha256sum large; stat -c %s large").await?,
        format!("{expected}  large\n{MAX_PUT_BYTES}\n")
    );

    let mut file = sandbox
        .client
        .get_file(sandbox.id, std::path::Path::new("large"))
        .await?;
    assert_eq!(
        (file.info.size, file.info.sha256.clone()),
        (Some(MAX_PUT_BYTES), Some(expected.clone()))
    );
    let mut received = Sha256::new();
    while let Some(piece) = file.chunk().await? {
        received.update(&piece);
    }
    assert_eq!(hex::encode(received.finalize()), expected);
    let (_, peak) = sandbox.worker.memory()?;
    assert!(peak < 100 << 20, "the worker took {} MiB", peak >> 20);
    Ok(())
}

#[tokio::test]
// invariant: bounded
async fn a_body_over_the_limit_changes_nothing() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox.write("file", "old").await?;
    let zeros = Bytes::from(vec![0; MEBIBYTE]);
    let body = move |bytes: usize| {
        streamed(
            std::iter::repeat_n(zeros.clone(), bytes / MEBIBYTE)
                .chain([Bytes::from(vec![0; bytes % MEBIBYTE])]),
        )
    };
    let limit = usize::try_from(MAX_PUT_BYTES)?;
    for path in ["file", "new/file"] {
        assert_eq!(
            Answer::of(sandbox.file(Method::PUT, path).body(body(limit + 1)))
                .await?
                .outcome(),
            (413, "too_large".to_owned()),
            "{path}"
        );
    }
    // Much more than the limit, and one with a content length.
    assert_eq!(
        Answer::of(sandbox.file(Method::PUT, "file").body(body(3 * limit)))
            .await?
            .outcome(),
        (413, "too_large".to_owned())
    );
    let announced = sandbox
        .file(Method::PUT, "file")
        .header("Content-Length", limit + 1)
        .body(body(limit + 1));
    assert_eq!(
        Answer::of(announced).await?.outcome(),
        (413, "too_large".to_owned())
    );
    assert_eq!(
        (
            sandbox.get("file").await?.body.as_ref(),
            sandbox.sh("ls -A").await?.as_str()
        ),
        (b"old".as_ref(), "file\n")
    );
    Ok(())
}

#[tokio::test]
async fn a_full_disk_is_its_own_error_and_nothing_is_left() -> Result<()> {
    let mut request = session();
    // /tmp has half of that.
    request.limits = Some(LimitsRequest {
        memory_bytes: Some(64 << 20),
        ..Default::default()
    });
    let sandbox = Sandbox::with(&request).await?;
    sandbox.write("/tmp/kept", "old").await?;
    let large = Bytes::from(vec![b'x'; 40 * MEBIBYTE]);
    let no_space = (507, "no_space".to_owned());
    for path in ["/tmp/kept", "/tmp/new/place/file"] {
        assert_eq!(
            sandbox.put(path, large.clone()).await?.outcome(),
            no_space,
            "{path}"
        );
    }
    let mut header = tar::Header::new_gnu();
    header.set_size(large.len() as u64);
    header.set_mode(0o644);
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_data(&mut header, "file", &large[..])?;
    let import = sandbox
        .http
        .request(
            Method::POST,
            &format!("/v1/worker/sessions/{}/import", sandbox.id),
        )
        .query(&[("path", "/tmp/unpacked")])
        .body(archive.into_inner()?);
    assert_eq!(Answer::of(import).await?.outcome(), no_space);
    assert_eq!(
        sandbox.sh("cat /tmp/kept; find /tmp -type f").await?,
        "old/tmp/kept\n"
    );
    // The space is free again at once.
    sandbox
        .write("/tmp/kept", large.slice(..20 * MEBIBYTE))
        .await
}

#[tokio::test]
async fn a_body_that_breaks_off_changes_nothing() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox.write("file", "old").await?;
    let pieces = stream::iter([
        Ok(Bytes::from_static(b"half")),
        Err(std::io::Error::other("gone")),
    ]);
    assert!(
        Answer::of(
            sandbox
                .file(Method::PUT, "file")
                .body(reqwest::Body::wrap_stream(pieces))
        )
        .await
        .is_err()
    );
    assert_eq!(
        (
            sandbox.get("file").await?.body.as_ref(),
            sandbox.sh("ls -A").await?.as_str()
        ),
        (b"old".as_ref(), "file\n")
    );
    Ok(())
}

#[tokio::test]
async fn files_need_a_session_that_runs_and_its_agent() -> Result<()> {
    let world = World::new()?;
    let worker = world
        .worker(&Options::default().set("exec_via", "\"runtime\""))
        .await?;
    let (client, http) = (worker.client()?, Http::new(&worker)?);
    let made = client.create_session(&session()).await?;
    let calls = |id: &str| {
        [
            ("GET", "files?path=x"),
            ("PUT", "files?path=x"),
            ("DELETE", "files?path=x"),
            ("POST", "import?path=x"),
            ("POST", "files:list"),
            ("POST", "export"),
        ]
        .map(|(method, call)| {
            let request = http.request(
                method.parse().expect("a method"),
                &format!("/v1/worker/sessions/{id}/{call}"),
            );
            if call == "export" {
                request.json(&json!({"format": "tar"}))
            } else {
                request
            }
        })
    };
    for request in calls(&made.session_id.to_string()) {
        assert_eq!(
            Answer::of(request).await?.outcome(),
            (409, "agent_required".to_owned())
        );
    }
    client
        .end_session(made.session_id, &SessionEnd::default())
        .await?;
    for request in calls(&made.session_id.to_string()) {
        assert_eq!(
            Answer::of(request).await?.outcome(),
            (410, "session_ended".to_owned())
        );
    }
    for request in calls("01890000-0000-7000-8000-000000000001") {
        assert_eq!(
            Answer::of(request).await?.outcome(),
            (404, "session_not_found".to_owned())
        );
    }
    Ok(())
}

/// Stops every process that serves a file operation as soon as it appears, and reports it.
const STOPPER: &str = r#"while :; do
    for directory in /proc/[0-9]*; do
        read -r name <$directory/comm && [ "$name" = cynode-file ] && kill -STOP ${directory#/proc/} && echo stopped
    done
done 2>/dev/null"#;

#[tokio::test]
// invariant: deadlines
async fn hostile_code_that_stops_a_file_operation_makes_no_caller_wait_for_ever() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    let stopper = ExecRequest {
        background: true,
        timeout_ms: 0,
        ..sh(STOPPER)
    };
    let stopper = sandbox
        .client
        .exec_background(sandbox.id, &stopper)
        .await?
        .exec_id;
    let (client, id) = (sandbox.client.clone(), sandbox.id);
    // The first piece starts the operation; the rest follows once it is stopped, and exceeds the
    // buffers.
    let body = stream::unfold(0, move |sent| {
        let client = client.clone();
        async move {
            if sent == 1 {
                let stopped = client
                    .exec_output(
                        id,
                        stopper,
                        &OutputQuery {
                            wait_ms: Some(60_000),
                            ..Default::default()
                        },
                    )
                    .await;
                assert!(
                    stopped.is_ok_and(|page| !page.chunks.is_empty()),
                    "the operation was not stopped"
                );
            }
            (sent < 8).then(|| {
                (
                    Ok::<_, std::io::Error>(Bytes::from(vec![7; MEBIBYTE])),
                    sent + 1,
                )
            })
        }
    });
    let put = sandbox
        .file(Method::PUT, "file")
        .body(reqwest::Body::wrap_stream(body))
        .timeout(Duration::from_secs(90));
    assert_eq!(
        Answer::of(put).await?.outcome(),
        (503, "agent_unavailable".to_owned())
    );

    sandbox
        .client
        .signal_exec(id, stopper, SignalName::KILL, SignalScope::Tree)
        .await?;
    assert_eq!(
        sandbox.put("file", "content").await?.status,
        201,
        "the file existed before, or the next call failed"
    );
    assert_eq!(
        sandbox
            .sh("cat file; ps -o comm | grep -c cynode-file || true")
            .await?,
        "content0\n"
    );
    Ok(())
}
