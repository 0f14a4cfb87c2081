//! Files in a sandbox, end to end: contents, trees, patches, archives.

mod archives;
mod edits;
mod export_patch;
mod limits;
mod patches;
mod search;
mod trees;
mod watches;

use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use cynode_api::{SessionCreate, SessionId};
use cynode_client::SessionClient;
use cynode_tests::{Answer, Http, Options, RunningWorker, World, eventually, session, sh};
use http::Method;
use reqwest::RequestBuilder;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// A running session and helpers to inspect its files.
struct Sandbox {
    client: SessionClient,
    http: Http,
    id: SessionId,
    worker: RunningWorker,
    world: World,
}

impl Sandbox {
    async fn new() -> Result<Self> {
        Self::with(&session()).await
    }

    async fn with(request: &SessionCreate) -> Result<Self> {
        let world = World::new()?;
        let worker = world.worker(&Options::default()).await?;
        let client = worker.client()?;
        client.create_session(request).await?;
        Ok(Self {
            client,
            http: Http::new(&worker)?,
            id: request.session_id,
            worker,
            world,
        })
    }

    fn file(&self, method: Method, path: &str) -> RequestBuilder {
        self.http
            .request(method, &format!("/v1/worker/sessions/{}/files", self.id))
            .query(&[("path", path)])
    }

    async fn get(&self, path: &str) -> Result<Answer> {
        Answer::of(self.file(Method::GET, path)).await
    }

    async fn put(&self, path: &str, content: impl Into<reqwest::Body>) -> Result<Answer> {
        Answer::of(self.file(Method::PUT, path).body(content)).await
    }

    /// Writes a file, which must succeed.
    async fn write(&self, path: &str, content: impl Into<reqwest::Body>) -> Result<()> {
        let answer = self.put(path, content).await?;
        ensure!(answer.status < 300, "writing {path}: {answer:?}");
        Ok(())
    }

    /// Calls `files:list`, `export` and similar routes with a JSON body.
    async fn call(&self, operation: &str, body: &Value) -> Result<Answer> {
        Answer::of(
            self.http
                .request(
                    Method::POST,
                    &format!("/v1/worker/sessions/{}/{operation}", self.id),
                )
                .json(body),
        )
        .await
    }

    /// Runs a script, which must succeed, and returns its output.
    async fn sh(&self, script: &str) -> Result<String> {
        let result = self.client.exec(self.id, &sh(script)).await?;
        ensure!(result.exit.exit_code == Some(0), "{script}: {result:?}");
        Ok(result.stdout)
    }

    /// All names with their modes, and all contents by hash.
    async fn snapshot(&self, directory: &str) -> Result<String> {
        self.sh(&format!(
            "cd {directory} && find . -exec stat -c '%A %N' {{}} + | sort && find . \
             -type f -exec sha256sum {{}} + | sort"
        ))
        .await
    }
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

// part of: ISC-05, CYNAI.SANDBX.FilesystemWorkingDirs
#[tokio::test]
async fn a_file_comes_back_byte_for_byte_with_its_hash_and_its_mode() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    let content: Vec<u8> = (0..=255).cycle().take(3_000).collect();
    let hash = sha256(&content);
    let put = |path: &str, mode: &str| {
        sandbox
            .file(Method::PUT, path)
            .header("X-Mode", mode)
            .header("X-Content-SHA256", &hash)
            .body(content.clone())
    };

    let made = Answer::of(put("deep/er/file", "0750")).await?;
    assert_eq!(
        (made.status, made.header("etag")),
        (201, format!("\"sha256:{hash}\"").as_str())
    );
    let body: Value = serde_json::from_slice(&made.body)?;
    assert_eq!(
        (
            &body["sha256"],
            &body["size"],
            &body["mode"],
            &body["created"]
        ),
        (
            &hash.clone().into(),
            &3_000.into(),
            &"0750".into(),
            &true.into()
        )
    );
    for (method, body) in [
        (Method::GET, Bytes::from(content.clone())),
        (Method::HEAD, Bytes::new()),
    ] {
        let answer = Answer::of(sandbox.file(method, "/workspace/deep/er/file")).await?;
        assert_eq!((answer.status, &answer.body), (200, &body));
        let headers = [
            "etag",
            "x-content-sha256",
            "x-mode",
            "x-type",
            "content-length",
        ]
        .map(|name| answer.header(name).to_owned());
        assert_eq!(
            headers,
            [
                format!("\"sha256:{hash}\""),
                hash.clone(),
                "0750".to_owned(),
                "file".to_owned(),
                "3000".to_owned()
            ]
        );
    }
    assert_eq!(
        sandbox.sh("stat -c '%a %u %g %s' deep/er/file").await?,
        "750 1000 1000 3000\n"
    );

    // New content keeps the mode; an explicit mode changes it.
    let again = sandbox.put("deep/er/file", "short").await?;
    let body: Value = serde_json::from_slice(&again.body)?;
    assert_eq!(
        (again.status, &body["mode"], &body["sha256_before"]),
        (200, &"0750".into(), &hash.clone().into())
    );
    assert_eq!(Answer::of(put("deep/er/file", "600")).await?.status, 200);
    assert_eq!(sandbox.sh("stat -c %a deep/er/file").await?, "600\n");

    // Calls read what commands write and vice versa, in the workspace and in /tmp.
    sandbox
        .sh("echo inside > by-command; echo there > /tmp/by-command")
        .await?;
    assert_eq!(
        (
            sandbox.get("by-command").await?.body,
            sandbox.get("/tmp/by-command").await?.body
        ),
        (Bytes::from("inside\n"), Bytes::from("there\n"))
    );
    sandbox.write("/tmp/by-caller", "x\n").await?;
    sandbox.write("empty", "").await?;
    assert_eq!(
        sandbox
            .sh("cat /tmp/by-caller; stat -c '%a %s' empty")
            .await?,
        "x\n644 0\n"
    );
    assert_eq!(
        sandbox.get("empty").await?.header("x-content-sha256"),
        sha256(b"")
    );

    // A body that doesn't match its hash, and invalid modes, change nothing.
    let damaged = Answer::of(
        sandbox
            .file(Method::PUT, "deep/er/file")
            .header("X-Content-SHA256", sha256(b"other"))
            .body("new"),
    )
    .await?;
    assert_eq!(damaged.outcome(), (400, "invalid_request".to_owned()));
    for mode in ["4755", "rwx", "-1", "888", "+644"] {
        assert_eq!(
            Answer::of(put("deep/er/file", mode)).await?.outcome(),
            (400, "invalid_request".to_owned()),
            "{mode}"
        );
    }
    assert_eq!(sandbox.get("deep/er/file").await?.body, content);
    Ok(())
}

#[tokio::test]
async fn preconditions_hold_and_a_failed_one_changes_nothing() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox.write("file", "one").await?;
    let etag = |content: &str| format!("\"sha256:{}\"", sha256(content.as_bytes()));
    let put = async |path: &str, name: &str, value: &str| {
        Answer::of(
            sandbox
                .file(Method::PUT, path)
                .header(name, value)
                .body("two"),
        )
        .await
    };
    let failed = (412, "precondition_failed".to_owned());

    for (path, name, value) in [
        ("file", "If-None-Match", "*"),
        ("file", "If-Match", etag("other").as_str()),
        ("file", "If-Match", "\"foreign\""),
        ("file", "If-Match", &format!("W/{}", etag("one"))),
        ("missing/file", "If-Match", "*"),
        ("missing/file", "If-Match", &etag("one")),
    ] {
        assert_eq!(
            put(path, name, value).await?.outcome(),
            failed,
            "{path} {name}: {value}"
        );
    }
    assert_eq!(
        (
            sandbox.get("file").await?.body.as_ref(),
            sandbox.sh("ls").await?.as_str()
        ),
        (b"one".as_ref(), "file\n")
    );

    assert_eq!(
        put(
            "file",
            "If-Match",
            &format!("{}, {}", etag("other"), etag("one"))
        )
        .await?
        .status,
        200
    );
    assert_eq!(put("file", "If-Match", "*").await?.status, 200);
    assert_eq!(put("fresh", "If-None-Match", "*").await?.status, 201);
    assert_eq!(
        put("file", "If-None-Match", "\"sha256:0\"")
            .await?
            .outcome(),
        (400, "invalid_request".to_owned())
    );

    let delete = async |value: &str| {
        Answer::of(
            sandbox
                .file(Method::DELETE, "file")
                .header("If-Match", value),
        )
        .await
    };
    assert_eq!(delete(&etag("one")).await?.outcome(), failed);
    assert_eq!(sandbox.get("file").await?.body, "two");
    assert_eq!(delete(&etag("two")).await?.status, 204);
    assert_eq!(
        sandbox.get("file").await?.outcome(),
        (404, "not_found".to_owned())
    );
    Ok(())
}

#[tokio::test]
async fn one_of_several_writers_with_the_same_precondition_wins() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    for round in 0..5 {
        let path = format!("new-{round}");
        let attempts = (0..6).map(|number| {
            Answer::of(
                sandbox
                    .file(Method::PUT, &path)
                    .header("If-None-Match", "*")
                    .body(number.to_string()),
            )
        });
        let answers = futures_util::future::try_join_all(attempts).await?;
        let winners: Vec<usize> = (0..6)
            .filter(|number| answers[*number].status == 201)
            .collect();
        assert_eq!(winners.len(), 1, "{answers:?}");
        assert!(
            answers
                .iter()
                .all(|answer| answer.status == 201 || answer.status == 412),
            "{answers:?}"
        );
        assert_eq!(sandbox.get(&path).await?.body, winners[0].to_string());
    }
    Ok(())
}

#[tokio::test]
async fn ranges_are_served_and_those_outside_the_file_refused() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    let large: Vec<u8> = (0_u8..=250).cycle().take(3 << 20).collect();
    sandbox.write("small", "0123456789").await?;
    sandbox.write("large", large.clone()).await?;
    let range = async |path: &str, range: &str| {
        Answer::of(sandbox.file(Method::GET, path).header("Range", range)).await
    };
    for (requested, body, content_range) in [
        ("bytes=0-3", "0123", "bytes 0-3/10"),
        ("bytes=8-", "89", "bytes 8-9/10"),
        ("bytes=-4", "6789", "bytes 6-9/10"),
        ("bytes=5-500", "56789", "bytes 5-9/10"),
    ] {
        let answer = range("small", requested).await?;
        assert_eq!(
            (answer.status, answer.header("content-range")),
            (206, content_range),
            "{requested}"
        );
        assert_eq!(
            (answer.body.as_ref(), answer.header("x-content-sha256")),
            (body.as_bytes(), sha256(b"0123456789").as_str()),
            "{requested}"
        );
    }
    let answer = range("large", "bytes=2000000-2999999").await?;
    assert_eq!(
        (answer.status, answer.header("content-length")),
        (206, "1000000")
    );
    assert!(
        answer.body == large[2_000_000..3_000_000],
        "another range was returned"
    );
    for requested in ["bytes=10-", "bytes=99-100", "bytes=-0"] {
        assert_eq!(
            range("small", requested).await?.outcome(),
            (416, "range_not_satisfiable".to_owned()),
            "{requested}"
        );
    }
    sandbox.write("empty", "").await?;
    for requested in ["bytes=0-", "bytes=0-0", "bytes=-1"] {
        assert_eq!(
            range("empty", requested).await?.outcome(),
            (416, "range_not_satisfiable".to_owned()),
            "{requested}"
        );
    }
    // A range of a file that is too large to read whole.
    sandbox
        .sh("printf start > huge; truncate -s 1099511627776 huge")
        .await?;
    for (requested, body, content_range) in [
        ("bytes=0-4", b"start".as_ref(), "bytes 0-4/1099511627776"),
        (
            "bytes=-2",
            b"\0\0",
            "bytes 1099511627774-1099511627775/1099511627776",
        ),
        (
            "bytes=1099511627775-",
            b"\0",
            "bytes 1099511627775-1099511627775/1099511627776",
        ),
    ] {
        let answer = range("huge", requested).await?;
        assert_eq!(
            (
                answer.status,
                answer.header("content-range"),
                answer.body.as_ref()
            ),
            (206, content_range, body),
            "{requested}"
        );
        assert_eq!(
            (answer.header("etag"), answer.header("x-content-sha256")),
            ("", ""),
            "{requested}"
        );
    }
    for requested in [
        "bytes=0-1,4-5",
        "lines=1-2",
        "bytes=5-1",
        "nonsense",
        "bytes=+1-+2",
        "bytes=-+3",
    ] {
        let answer = range("small", requested).await?;
        assert_eq!(
            (answer.status, answer.body.as_ref()),
            (200, b"0123456789".as_ref()),
            "{requested}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_reader_during_a_replacement_sees_one_whole_version() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    let versions = [b'a', b'b'].map(|byte| Bytes::from(vec![byte; 700_000]));
    sandbox.write("data", versions[0].clone()).await?;
    // One reader inside and one outside while the file changes repeatedly.
    let inside = sandbox
        .sh("while [ ! -e stop ]; do sha256sum data; : > started; done | cut -c1-64 | sort -u");
    let outside = async {
        let mut seen = 0;
        while sandbox.get("stop").await?.status == 404 {
            let answer = sandbox.get("data").await?;
            ensure!(
                answer.status == 200 && versions.contains(&answer.body),
                "{} bytes of unknown content",
                answer.body.len()
            );
            ensure!(
                answer.header("x-content-sha256") == sha256(&answer.body[..]),
                "the hash belongs to another version"
            );
            seen += 1;
        }
        Ok(seen)
    };
    let writing = async {
        eventually(
            "the reader has started",
            Duration::from_secs(20),
            async || Ok(sandbox.get("started").await?.status == 200),
        )
        .await?;
        for round in 0..60 {
            sandbox
                .write("data", versions[(round + 1) % 2].clone())
                .await?;
        }
        sandbox.write("stop", "").await
    };
    let (inside, seen, ()) = tokio::try_join!(inside, outside, writing)?;
    let mut hashes = versions.map(|version| sha256(&version));
    hashes.sort();
    assert_eq!(inside.lines().collect::<Vec<_>>(), hashes);
    assert!(seen > 1, "nothing was read outside");
    assert_eq!(sandbox.sh("ls -A").await?, "data\nstarted\nstop\n");
    Ok(())
}

#[tokio::test]
async fn paths_that_are_not_files_are_refused_at_once() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh("mkdir dir; mkfifo fifo; ln -s fifo to-fifo; ln -s dir to-dir")
        .await?;
    let calls = async {
        for path in [
            "dir",
            "dir/",
            "to-dir",
            "/",
            "fifo",
            "to-fifo",
            "/dev/null",
            "/dev/zero",
            "/dev/full",
            "/dev/tty",
            "/run/cynode/control.sock",
        ] {
            let refused = (409, "not_a_file".to_owned());
            let expected = if path == "/dev/tty" {
                vec![refused.clone(), (403, "permission_denied".to_owned())]
            } else {
                vec![refused.clone()]
            };
            let read = sandbox.get(path).await?.outcome();
            assert!(expected.contains(&read), "reading {path}: {read:?}");
            let written = sandbox.put(path, "x").await?.outcome();
            assert!(expected.contains(&written), "writing {path}: {written:?}");
        }
        let kind = async |path: &str| {
            Ok::<_, anyhow::Error>(
                Answer::of(sandbox.file(Method::HEAD, path))
                    .await?
                    .header("x-type")
                    .to_owned(),
            )
        };
        assert_eq!(
            (
                kind("dir").await?,
                kind("fifo").await?,
                kind("/dev/zero").await?
            ),
            ("dir".to_owned(), "other".to_owned(), "other".to_owned())
        );
        assert_eq!(
            sandbox.put("dir", "x").await?.problem()?.detail,
            "'/workspace/dir' is a directory"
        );
        assert_eq!(
            sandbox.put("new/", "x").await?.outcome(),
            (409, "not_a_file".to_owned())
        );
        assert_eq!(
            sandbox.put("fifo/x", "x").await?.outcome(),
            (409, "not_a_directory".to_owned())
        );
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(20), calls).await??;
    assert_eq!(
        sandbox.sh("find . | sort").await?,
        ".\n./dir\n./fifo\n./to-dir\n./to-fifo\n"
    );
    Ok(())
}

// part of: CYNAI.SANDBX.SandboxThreatModel
#[tokio::test]
// invariant: no-host-paths
async fn a_caller_has_the_rights_of_the_sandboxs_own_user() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh(
            "echo x > closed; chmod 000 closed; echo x > fixed; chmod 444 fixed; mkdir shut; \
             echo x > shut/file; chmod 000 shut",
        )
        .await?;
    let denied = (403, "permission_denied".to_owned());
    for path in ["closed", "shut/file", "/proc/1/environ"] {
        assert_eq!(sandbox.get(path).await?.outcome(), denied, "reading {path}");
    }
    for path in [
        "/etc/x",
        "/etc/passwd",
        "/x",
        "fixed",
        "shut/new",
        "/run/cynode/cynode-sba",
        "/sys/x",
    ] {
        assert_eq!(
            sandbox.put(path, "evil").await?.outcome(),
            denied,
            "writing {path}"
        );
    }
    for path in ["/etc/passwd", "/bin/busybox", "/workspace", "/", "."] {
        assert_eq!(
            Answer::of(
                sandbox
                    .file(Method::DELETE, path)
                    .query(&[("recursive", "true")])
            )
            .await?
            .outcome(),
            denied,
            "deleting {path}"
        );
    }
    assert_eq!(sandbox.get("/etc/passwd").await?.status, 200);
    // A file that can be seen but not read has no hash.
    let closed = Answer::of(sandbox.file(Method::HEAD, "closed")).await?;
    assert_eq!(
        (
            closed.status,
            closed.header("etag"),
            closed.header("x-mode")
        ),
        (200, "", "0000")
    );
    for path in [
        "missing",
        "missing/below",
        "/etc/missing",
        "/nowhere/at/all",
    ] {
        assert_eq!(
            sandbox.get(path).await?.outcome(),
            (404, "not_found".to_owned()),
            "{path}"
        );
        assert_eq!(
            Answer::of(sandbox.file(Method::HEAD, path)).await?.status,
            404,
            "{path}"
        );
        assert_eq!(
            Answer::of(sandbox.file(Method::DELETE, path))
                .await?
                .outcome(),
            (404, "not_found".to_owned()),
            "{path}"
        );
    }
    // The host's own files are not visible.
    let marker = sandbox.worker.token()?;
    let token = sandbox.world.state_dir().join("worker.token");
    assert_eq!(
        sandbox.get(&token.display().to_string()).await?.outcome(),
        (404, "not_found".to_owned())
    );
    sandbox
        .sh(&format!("ln -s {} host", token.display()))
        .await?;
    let through = sandbox.get("host").await?;
    assert_eq!(through.outcome(), (404, "not_found".to_owned()));
    assert!(!String::from_utf8_lossy(&through.body).contains(&marker));
    Ok(())
}

#[tokio::test]
async fn links_are_followed_by_reads_and_writes_and_kept_by_the_rest() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh(
            "echo real > target; ln -s target link; ln -s /tmp/made/later dangling; ln -s loop \
             loop; mkdir dir; ln -s ../target dir/up",
        )
        .await?;
    assert_eq!(sandbox.get("link").await?.body, "real\n");
    assert_eq!(sandbox.get("dir/up").await?.body, "real\n");
    sandbox.write("link", "new\n").await?;
    sandbox.write("dangling", "made\n").await?;
    assert_eq!(
        sandbox
            .sh("readlink link; cat target; readlink dangling; cat /tmp/made/later")
            .await?,
        "target\nnew\n/tmp/made/later\nmade\n"
    );
    for method in [Method::GET, Method::PUT] {
        let answer = Answer::of(sandbox.file(method.clone(), "loop").body("")).await?;
        assert_eq!(
            answer.outcome(),
            (400, "invalid_request".to_owned()),
            "{method}"
        );
    }
    assert_eq!(
        Answer::of(sandbox.file(Method::DELETE, "link"))
            .await?
            .status,
        204
    );
    assert_eq!(
        Answer::of(sandbox.file(Method::DELETE, "loop"))
            .await?
            .status,
        204
    );
    assert_eq!(
        sandbox
            .call(
                "files:move",
                &serde_json::json!({"from": "dir/up", "to": "moved"})
            )
            .await?
            .status,
        204
    );
    assert_eq!(
        sandbox.sh("cat target; readlink moved; ls").await?,
        "new\n../target\ndangling\ndir\nmoved\ntarget\n"
    );
    Ok(())
}

#[tokio::test]
async fn every_valid_file_name_works() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    let names: [&[u8]; 8] = [
        b"a b",
        b"new\nline",
        b"tab\t\x1b[31mred",
        "gr\u{fc}n \u{1f331}".as_bytes(),
        b"bad\xff\xfename",
        b"-rf",
        b"q\"uo'te\\",
        b"%2e%2e&path=x+y",
    ];
    for (number, name) in names.into_iter().enumerate() {
        let path = std::path::Path::new(
            <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name),
        );
        let content = format!("content {number}");
        sandbox
            .client
            .put_file(
                sandbox.id,
                path,
                content.clone(),
                &cynode_client::PutOptions::default(),
            )
            .await?;
        let mut body = sandbox.client.get_file(sandbox.id, path).await?;
        assert_eq!(
            body.chunk().await?,
            Some(content.clone().into()),
            "{path:?}"
        );
        assert_eq!(
            sandbox.client.head_file(sandbox.id, path).await?.sha256,
            Some(sha256(content.as_bytes()))
        );
    }
    let list = sandbox
        .client
        .list_files(sandbox.id, &cynode_api::ListRequest::default())
        .await?;
    // Only names that are not valid text come as bytes, next to a readable text.
    let in_bytes: Vec<_> = list
        .entries
        .iter()
        .filter_map(|entry| Some((entry.path.as_str(), entry.path_b64.as_ref()?.0.as_slice())))
        .collect();
    assert_eq!(in_bytes, [("bad\u{fffd}\u{fffd}name", names[4])]);
    let listed: Vec<Vec<u8>> = list
        .entries
        .into_iter()
        .map(|entry| {
            entry
                .path_b64
                .map_or_else(|| entry.path.into_bytes(), |bytes| bytes.0)
        })
        .collect();
    let mut expected: Vec<Vec<u8>> = names.iter().map(|name| name.to_vec()).collect();
    expected.sort();
    assert_eq!(listed, expected);
    // The bytes from a list address such a file again; a base64 path is a path like any other.
    let found = sandbox
        .client
        .search_files(
            sandbox.id,
            &cynode_api::SearchRequest {
                pattern: "content 4".to_owned(),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!(
        found.matches[0]
            .path_b64
            .as_ref()
            .map(|bytes| bytes.0.as_slice()),
        Some(names[4])
    );
    let by_bytes = |path_b64: &str| {
        sandbox
            .http
            .request(
                Method::GET,
                &format!("/v1/worker/sessions/{}/files", sandbox.id),
            )
            .query(&[("path_b64", path_b64)])
    };
    assert_eq!(Answer::of(by_bytes("YSBi")).await?.body, "content 0");
    assert_eq!(
        Answer::of(by_bytes("not base64!")).await?.outcome(),
        (400, "invalid_request".to_owned())
    );
    let escaped = sandbox.http.request(
        Method::GET,
        &format!(
            "/v1/worker/sessions/{}/files?path=bad%FF%FEname",
            sandbox.id
        ),
    );
    let refused = Answer::of(escaped).await?.problem()?;
    assert!(
        refused.status == 400
            && refused.detail.starts_with("path: ")
            && refused.detail.contains("path_b64"),
        "{refused:?}"
    );
    assert_eq!(
        Answer::of(by_bytes("YSBi").query(&[("path", "a b")]))
            .await?
            .outcome(),
        (400, "invalid_request".to_owned())
    );
    for name in names {
        let path = std::path::Path::new(
            <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name),
        );
        sandbox.client.delete_file(sandbox.id, path, false).await?;
    }
    assert_eq!(sandbox.sh("ls -A").await?, "");
    Ok(())
}
