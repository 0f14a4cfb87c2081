//! Secrets must not enter a sandbox: refused on every path, and nowhere to be found afterwards.

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use bytes::Bytes;
use cynode_api::{CALL_HEADER, JobId, SessionId};
use cynode_tests::{Answer, ControlPlane, eventually, postgres_programs};
use http::Method;
use reqwest::{Body, RequestBuilder};
use serde_json::{Value, json};

use super::{
    cluster::{Cluster, session, text},
    policy::{object, refusal},
};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Deterministic letters with which no real secret begins or ends.
fn letters(count: usize) -> String {
    (0..)
        .map(|number: usize| {
            char::from(b"A7q3Zx9LmK2vRt5YwB8nCd4F"[(number * 7 + number / 24) % 24])
        })
        .take(count)
        .collect()
}

/// Has the shape of a GitHub token. Assembled here, so that this source contains none.
fn foreign_token() -> String {
    ["gh", "p_", &letters(36)].concat()
}

/// Has the shape of an Anthropic API key.
fn provider_key() -> String {
    ["sk-a", "nt-", &letters(64)].concat()
}

fn private_key() -> String {
    let mark = |word: &str| format!("-----{word} {} KEY-----", "PRIVATE");
    format!("{}\n{}\n{}\n", mark("BEGIN"), letters(64), mark("END"))
}

/// A tar archive of one file.
fn archive(name: &str, content: &str) -> Result<Vec<u8>> {
    archive_of(&[(name, content)])
}

fn archive_of(files: &[(&str, &str)]) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, content.as_bytes())?;
    }
    Ok(tar.into_inner()?)
}

/// Too long for the memory buffer, with the secret near its end and across the border of two
/// pieces.
fn in_pieces(secret: &str) -> Body {
    let (begin, end) = secret.split_at(secret.len() / 2);
    let mut pieces = vec![Bytes::from(vec![b'x'; 64 * 1024]); 48];
    pieces.push(Bytes::from(format!("{} {begin}", "y".repeat(5_000))));
    pieces.push(Bytes::from(format!("{end} {}", "z".repeat(200))));
    Body::wrap_stream(futures_util::stream::iter(
        pieces.into_iter().map(Ok::<_, std::io::Error>),
    ))
}

fn begin_patch(name: &str, content: &str) -> String {
    let lines: Vec<String> = content.lines().map(|line| format!("+{line}\n")).collect();
    let lines = lines.concat();
    format!("*** Begin Patch\n*** Add File: {name}\n{lines}*** End Patch\n")
}

fn created(name: &str, content: &str) -> String {
    let lines: Vec<String> = content.lines().map(|line| format!("+{line}\n")).collect();
    format!(
        "--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{} @@\n{}",
        lines.len(),
        lines.concat()
    )
}

/// A running session, and every way to send something into it.
struct SecretsFixture {
    cluster: Cluster,
    task: String,
    session: String,
    /// A command that writes its input into a file.
    exec: String,
}

impl SecretsFixture {
    async fn start() -> Result<Self> {
        let cluster = Cluster::start().await?;
        let admin = cluster.orchestrator.token()?;
        let task = text(
            &cluster
                .make(&admin, "/v1/tasks", &json!({"name": "task"}))
                .await?["id"],
        )?;
        let mut body = session();
        (body["task_id"], body["pty_allowed"]) = (json!(task), json!(true));
        let session = cluster.session(&admin, &body).await?;
        let hearing = json!({
            "argv": ["sh", "-c", "cat > heard"],
            "timeout_ms": 0,
            "background": true,
            "stdin_open": true
        });
        let exec = text(
            &cluster
                .make(&admin, &format!("/v1/sessions/{session}/exec"), &hearing)
                .await?["exec_id"],
        )?;
        let fixture = Self {
            cluster,
            task,
            session,
            exec,
        };
        eventually("the command reads its input", TIMEOUT, async || {
            Ok(fixture.inside("ls heard").await?["exit_code"] == 0)
        })
        .await?;
        Ok(fixture)
    }

    fn session_path(&self, below: &str) -> String {
        format!("/v1/sessions/{}/{below}", self.session)
    }

    fn post(&self, path: &str, body: &Value) -> Result<RequestBuilder> {
        Ok(self.cluster.request(Method::POST, path)?.json(body))
    }

    fn exec(&self, more: &Value) -> Result<RequestBuilder> {
        let mut body = json!({"argv": ["touch", "leaked"], "timeout_ms": 10_000});
        for (name, value) in more.as_object().context("members")? {
            body[name] = value.clone();
        }
        self.post(&self.session_path("exec"), &body)
    }

    fn file(&self, name: &str, path: &str, body: impl Into<Body>) -> Result<RequestBuilder> {
        Ok(self
            .cluster
            .request(Method::PUT, &self.session_path("files"))?
            .query(&[(name, path)])
            .body(body))
    }

    /// An exec with its input in a separate part of a form.
    fn form(&self, request: &Value, stdin: &str) -> Result<RequestBuilder> {
        let (head, tail) = cynode_api::exec_form("B", request.to_string().as_bytes());
        let body = [head, stdin.as_bytes().to_vec(), tail].concat();
        Ok(self
            .cluster
            .request(Method::POST, &self.session_path("exec"))?
            .header("content-type", "multipart/form-data; boundary=B")
            .body(body))
    }

    async fn inside(&self, script: &str) -> Result<Value> {
        object(&Answer::of(self.exec(&json!({"argv": ["sh", "-c", script]}))?).await?)
    }

    /// Every way in, with the field that the refusal names. `leaked` is the name for files.
    fn channels(&self, secret: &str, leaked: &str) -> Result<Vec<(&'static str, RequestBuilder)>> {
        let cluster = session();
        let with = |more: Value| -> Value {
            let mut body = cluster.clone();
            body.as_object_mut()
                .into_iter()
                .for_each(|body| body.extend(more.as_object().cloned().unwrap_or_default()));
            body
        };
        let put = |path: &str| -> Result<RequestBuilder> {
            let mut url = reqwest::Url::parse(&format!(
                "{}/v1/tasks/{}/artifacts/",
                self.cluster.orchestrator.url()?,
                self.task
            ))?;
            url.path_segments_mut()
                .map_err(|()| anyhow::anyhow!("the URL has a path"))?
                .pop_if_empty()
                .push(path);
            self.cluster.request(Method::PUT, url.path())
        };
        let inside = format!("echo {secret} > leaked");
        Ok(vec![
            (
                "env.KEY",
                self.post(
                    "/v1/sessions",
                    &with(json!({
                        "session_id": SessionId::generate(),
                        "env": {"KEY": secret}
                    })),
                )?,
            ),
            (
                "env.(name)",
                self.post("/v1/sessions", &with(json!({"env": {secret: "x"}})))?,
            ),
            (
                "labels.note",
                self.post("/v1/sessions", &with(json!({"labels": {"note": secret}})))?,
            ),
            (
                "env.KEY",
                self.post(
                    "/v1/jobs",
                    &json!({
                        "job_id": JobId::generate(),
                        "command": ["true"],
                        "env": {"KEY": secret}
                    }),
                )?,
            ),
            (
                "command[2]",
                self.post("/v1/jobs", &json!({"command": ["sh", "-c", inside]}))?,
            ),
            (
                "argv[2]",
                self.exec(&json!({"argv": ["sh", "-c", inside]}))?,
            ),
            (
                "env.KEY",
                self.exec(&json!({"env": {"A": "plain", "KEY": format!("a={secret}")}}))?,
            ),
            (
                "stdin",
                self.exec(&json!({"stdin": format!("login {secret}\n")}))?,
            ),
            (
                "stdin_b64",
                self.exec(&json!({"stdin_b64": STANDARD.encode(format!("\0 {secret}\n"))}))?,
            ),
            ("cwd", self.exec(&json!({"cwd": format!("/tmp/{secret}")}))?),
            (
                "data_b64",
                self.post(
                    &self.session_path(&format!("execs/{}/stdin", self.exec)),
                    &json!({"data_b64": STANDARD.encode(secret)}),
                )?,
            ),
            ("body", self.file("path", leaked, secret.to_owned())?),
            ("body", self.file("path", leaked, in_pieces(secret))?),
            ("path", self.file("path", secret, "plain")?),
            (
                "path",
                self.post(
                    &self.session_path("files:mkdir"),
                    &json!({
                        "path": format!("leaked/{secret}"),
                        "parents": true
                    }),
                )?,
            ),
            (
                "new",
                self.post(
                    &self.session_path("files:edit"),
                    &json!({"path": leaked, "old": "x", "new": format!("key = {secret}")}),
                )?,
            ),
            (
                "path",
                self.post(
                    &self.session_path("files:edit"),
                    &json!({"path": secret, "old": "x", "new": "y"}),
                )?,
            ),
            (
                "to",
                self.post(
                    &self.session_path("files:move"),
                    &json!({
                        "from": "heard",
                        "to": secret
                    }),
                )?,
            ),
            (
                "diff",
                self.post(
                    &self.session_path("files:patch"),
                    &json!({"diff": created(leaked, secret)}),
                )?,
            ),
            (
                "diff",
                self.post(
                    &self.session_path("files:patch"),
                    &json!({"diff": begin_patch(leaked, secret)}),
                )?,
            ),
            (
                "diff",
                self.post(
                    &self.session_path("files:patch"),
                    &json!({"diff": created(leaked, secret).replace(" @@\n", "0 @@\n")}),
                )?,
            ),
            (
                "body",
                self.cluster
                    .request(Method::POST, &self.session_path("import"))?
                    .query(&[("path", ".")])
                    .body(archive(leaked, secret)?),
            ),
            ("body", put(leaked)?.body(format!("some\n{secret}\n"))),
            ("body", put(leaked)?.body(in_pieces(secret))),
            ("body", put("seed.tar")?.body(archive(leaked, secret)?)),
            (
                "stdin",
                self.form(
                    &json!({
                        "argv": ["touch", "leaked"],
                        "timeout_ms": 10_000
                    }),
                    &format!("in {secret}\n"),
                )?,
            ),
            (
                "argv[1]",
                self.form(
                    &json!({
                        "argv": ["touch", secret],
                        "timeout_ms": 10_000
                    }),
                    "plain",
                )?,
            ),
            ("path", put(secret)?.body("plain")),
            (
                "argv",
                self.cluster
                    .request(Method::GET, &self.session_path("pty"))?
                    .query(&[
                        ("cols", "80"),
                        ("rows", "24"),
                        ("argv", "sh"),
                        ("argv", secret),
                    ]),
            ),
        ])
    }

    /// A fingerprint of everything that callers have created.
    async fn created_state(&self) -> Result<String> {
        let files = self
            .inside(
                "find / -xdev 2> /dev/null | grep -v '^/proc\\|^/sys\\|^/dev' | \
                 sort | sha256sum; find . | sort | xargs ls -ld",
            )
            .await?;
        let made = "select (select count(*) from sessions), (select count(*) from jobs), (select \
                    count(*) from artifacts), (select count(*) from tasks)";
        Ok(format!(
            "{} {}",
            files["stdout"],
            self.cluster.control_plane.postgres.query(made)?
        ))
    }

    /// Everything that is readable outside of a sandbox, by name.
    async fn readable(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let world = &self.cluster.control_plane.world;
        let mut readable = Vec::new();
        for log in [
            self.cluster.orchestrator.log(),
            self.cluster.worker.log(),
            world.directory().join("pg.log"),
        ] {
            readable.push((log.display().to_string(), fs_err::read(&log)?));
        }
        let http = reqwest::Client::builder().no_proxy().build()?;
        for url in [
            self.cluster.orchestrator.url()?,
            self.cluster.orchestrator.control_url()?,
            self.cluster.worker.url()?,
        ] {
            readable.push((
                format!("{url}/metrics"),
                http.get(format!("{url}/metrics"))
                    .send()
                    .await?
                    .bytes()
                    .await?
                    .to_vec(),
            ));
        }
        // Reading the trail extends it: a page that is not full is the last.
        let (mut after, mut count) = (0, 200);
        while count == 200 {
            let answer = Answer::of(
                self.cluster
                    .request(Method::GET, &format!("/v1/audit?after={after}&limit=200"))?,
            )
            .await?;
            readable.push((format!("records after {after}"), answer.body.to_vec()));
            let page = object(&answer)?;
            (after, count) = (
                page["next_cursor"].as_i64().context("a cursor")?,
                page["items"].as_array().context("records")?.len(),
            );
        }
        let dump = Command::new(postgres_programs()?.join("pg_dump"))
            .arg("--host")
            .arg(world.directory().join("pg"))
            .args(["--username=cynode", "postgres"])
            .output()?;
        ensure!(
            dump.status.success(),
            "{}",
            String::from_utf8_lossy(&dump.stderr)
        );
        ensure!(
            dump.stdout.windows(12).any(|part| part == b"audit_events"),
            "the dump lacks the trail"
        );
        readable.push(("the database".to_owned(), dump.stdout));
        files(
            &self.cluster.orchestrator.state_dir().join("orchestrator"),
            &mut readable,
        )?;
        files(
            &self.cluster.orchestrator.state_dir().join("artifacts"),
            &mut readable,
        )?;
        Ok(readable)
    }
}

/// Every file below a directory.
fn files(directory: &Path, found: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    for entry in fs_err::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            files(&entry.path(), found)?;
        } else if entry.file_type()?.is_file() {
            found.push((
                entry.path().display().to_string(),
                fs_err::read(entry.path())?,
            ));
        }
    }
    Ok(())
}

/// The places that contain an unmistakable part of a secret, verbatim or in base64.
fn traces(secret: &str, readable: &[(String, Vec<u8>)]) -> Vec<String> {
    let (begin, line) = (secret.find('\n').map_or(6, |at| at + 1), 24);
    let part = &secret[begin..begin + line];
    let encoded = [0, 1, 2].map(|before| {
        let letters = URL_SAFE_NO_PAD.encode(format!("{}{part}", "x".repeat(before)));
        letters[4..letters.len() - 4].to_owned()
    });
    let forms: Vec<Vec<u8>> = [part.to_owned()]
        .into_iter()
        .chain(encoded)
        .map(String::into_bytes)
        .collect();
    let holds = |bytes: &[u8]| {
        forms
            .iter()
            .any(|form| bytes.windows(form.len()).any(|found| found == form))
    };
    readable
        .iter()
        .filter(|(_, bytes)| holds(bytes))
        .map(|(name, _)| name.clone())
        .collect()
}

// proves: ISC-23,
// REQ-SANDBX-0100 with the_systems_own_keys_and_tokens_are_kept_out and
// commands_see_their_task_and_session_and_nothing_of_the_host
#[tokio::test]
// invariant: no-secrets-inside
async fn no_secret_enters_through_any_channel_or_is_stored_anywhere() -> Result<()> {
    let fixture = SecretsFixture::start().await?;
    let admin = fixture.cluster.orchestrator.token()?;
    let token = text(
        &fixture
            .cluster
            .make(&admin, "/v1/tokens", &json!({"kind": "user"}))
            .await?["token"],
    )?;
    // Foreign tokens are refused only where real ones are kept; ours everywhere.
    let secrets = [
        ("a CyNode token", token, "leaked"),
        ("a GitHub token", foreign_token(), ".env"),
        ("an Anthropic API key", provider_key(), ".env"),
        ("a private key", private_key(), ".ssh/key"),
    ];
    let before = fixture.created_state().await?;
    let (mut wrong, mut refusals) = (Vec::new(), Vec::new());
    for (what, secret, leaked) in &secrets {
        for (number, (field, request)) in fixture.channels(secret, leaked)?.into_iter().enumerate()
        {
            let answer = Answer::of(request)
                .await
                .with_context(|| format!("{what} in {field}, channel {number}"))?;
            let text_of_response = String::from_utf8_lossy(&answer.body).into_owned();
            if text_of_response.contains(secret.trim()) {
                wrong.push(format!(
                    "{what} in {field}, way {number}: the answer repeats it"
                ));
            }
            match refusal(&answer, 422, "secret_in_input") {
                Ok(refused)
                    if refused["field"] == field
                        && refused["detail"].as_str().is_some_and(|detail| {
                            detail.contains(field) && detail.contains(what)
                        }) =>
                {
                    refusals.push((answer.header(CALL_HEADER).to_owned(), field, *what));
                }
                _ => wrong.push(format!(
                    "{what} in {field}, way {number}: {} {text_of_response}",
                    answer.status
                )),
            }
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(
        fixture.created_state().await?,
        before,
        "a refused secret was stored"
    );
    // The refused input did not arrive; what follows it does.
    let data = json!({"data_b64": STANDARD.encode("plain\n"), "eof": true});
    object(
        &Answer::of(fixture.post(
            &fixture.session_path(&format!("execs/{}/stdin", fixture.exec)),
            &data,
        )?)
        .await?,
    )?;
    eventually("the command has read everything", TIMEOUT, async || {
        Ok(fixture.inside("cat heard").await?["stdout"] == "plain\n")
    })
    .await?;

    // Each refusal is recorded with the field and the kind of secret, and no more.
    for (call, field, what) in &refusals {
        let records = object(
            &Answer::of(
                fixture
                    .cluster
                    .request(Method::GET, &format!("/v1/audit?call_id={call}"))?,
            )
            .await?,
        )?["items"]
            .clone();
        let (intent, outcome) = (&records[0], &records[1]);
        assert_eq!(
            records.as_array().map(Vec::len),
            Some(2),
            "{field}: {records}"
        );
        assert_eq!(
            (&outcome["code"], &outcome["status"]),
            (&json!("secret_in_input"), &json!(422)),
            "{field}: {records}"
        );
        // A streamed body is recorded before its content is known.
        if intent["stage"] == "secrets" {
            let mut detail = intent["detail"].clone();
            let path = detail
                .as_object_mut()
                .and_then(|detail| detail.remove("path"));
            assert_eq!(
                (&intent["decision"], detail),
                (&json!("deny"), json!({"field": field, "what": what})),
                "{records}"
            );
            ensure!(
                path.is_none_or(|path| path == ".env" || path == ".ssh/key"),
                "{records}"
            );
        } else {
            assert_eq!(&intent["action"], "artifact.put", "{records}");
        }
    }
    let readable = fixture.readable().await?;
    let counted = format!("cynode_secrets_refused_total {}", refusals.len());
    ensure!(
        readable
            .iter()
            .any(|(name, bytes)| name.ends_with("/metrics")
                && String::from_utf8_lossy(bytes).contains(&counted)),
        "the metrics lack '{counted}'"
    );
    for (what, secret, _) in &secrets {
        let found = traces(secret, &readable);
        ensure!(found.is_empty(), "{what} is in {found:#?}");
    }
    // The search does find a planted secret.
    let planted = vec![(
        "planted".to_owned(),
        format!("before {} after", foreign_token()).into_bytes(),
    )];
    assert_eq!(traces(&foreign_token(), &planted), ["planted"]);
    Ok(())
}

// part of: REQ-SANDBX-0100
#[tokio::test]
// invariant: no-secrets-inside
async fn a_sample_token_in_source_code_is_admitted_and_flagged() -> Result<()> {
    let fixture = SecretsFixture::start().await?;
    let (token, key) = (foreign_token(), private_key());
    let flagged = |files: &[(&str, &str)]| {
        files
            .iter()
            .map(|(path, shape)| json!({"path": path, "shape": shape}))
            .collect::<Value>()
    };
    let tree = archive_of(&[
        ("src/lib.rs", "fn main() {}\n"),
        ("tests/auth.rs", &format!("{token}\n{token}\n{key}")),
        ("tests/id_rsa", &key),
    ])?;
    let found = flagged(&[
        ("tests/auth.rs", "a GitHub token"),
        ("tests/auth.rs", "a private key"),
        ("tests/id_rsa", "a private key"),
    ]);
    let import = |tar: Vec<u8>| {
        Ok::<_, anyhow::Error>(
            fixture
                .cluster
                .request(Method::POST, &fixture.session_path("import"))?
                .query(&[("path", "repo")])
                .body(tar),
        )
    };
    let artifact = |name: &str, bytes: Vec<u8>| {
        Ok::<_, anyhow::Error>(
            fixture
                .cluster
                .request(
                    Method::PUT,
                    &format!("/v1/tasks/{}/artifacts/{name}", fixture.task),
                )?
                .body(bytes),
        )
    };
    let ways = [
        (import(tree.clone())?, 3, found.clone()),
        (
            fixture.file("path", "a.rs", token.clone())?,
            1,
            flagged(&[("a.rs", "a GitHub token")]),
        ),
        (
            fixture.post(
                &fixture.session_path("files:patch"),
                &json!({"diff": created("b.rs", &token)}),
            )?,
            1,
            flagged(&[("b.rs", "a GitHub token")]),
        ),
        (
            fixture.post(
                &fixture.session_path("files:patch"),
                &json!({"diff": begin_patch("c.rs", &token)}),
            )?,
            1,
            flagged(&[("c.rs", "a GitHub token")]),
        ),
        (artifact("seed.tar", tree)?, 3, found),
        (
            artifact("notes.txt", token.clone().into_bytes())?,
            1,
            flagged(&[("notes.txt", "a GitHub token")]),
        ),
    ];
    for (request, total, files) in ways {
        let answer = Answer::of(request).await?;
        let text_of_response = object(&answer)?;
        assert_eq!(
            (
                &text_of_response["flagged"],
                &text_of_response["flagged_total"]
            ),
            (&files, &json!(total)),
            "{text_of_response}"
        );
        ensure!(
            !text_of_response.to_string().contains(&token),
            "{text_of_response}"
        );
        let call = answer.header(CALL_HEADER);
        let records = object(
            &Answer::of(
                fixture
                    .cluster
                    .request(Method::GET, &format!("/v1/audit?call_id={call}"))?,
            )
            .await?,
        )?["items"]
            .clone();
        let readable = records.as_array().context("records")?.iter().any(|record| {
            record["detail"]["flagged"] == files && record["detail"]["flagged_total"] == total
        });
        ensure!(
            readable && !records.to_string().contains(&token),
            "{records}"
        );
    }
    let read = fixture.inside("cat repo/tests/auth.rs a.rs b.rs").await?;
    assert_eq!(
        read["stdout"],
        json!(format!("{token}\n{token}\n{key}{token}{token}\n"))
    );
    // The stored artifact is flagged.
    let listed = object(
        &Answer::of(fixture.cluster.request(
            Method::GET,
            &format!("/v1/artifacts?task_id={}", fixture.task),
        )?)
        .await?,
    )?;
    assert_eq!(
        listed["items"].as_array().map(|items| items
            .iter()
            .filter(|item| item["flagged_total"].is_u64())
            .count()),
        Some(2),
        "{listed}"
    );

    // Where real tokens are kept, the refusal names the file and doesn't call the token ours.
    let config = "[remote \"origin\"]\n\turl = https://me:hunter2@example.org/a.git\n";
    for (name, content, what) in [
        ("sub/.env.local", token.as_str(), "a GitHub token"),
        (".git/config", config, "a password in a URL"),
        ("x/.ssh/work", &key, "a private key"),
    ] {
        for request in [
            import(archive_of(&[("a", "b"), (name, content)])?)?,
            artifact("seed.tar", archive_of(&[("a", "b"), (name, content)])?)?,
        ] {
            let refused = refusal(&Answer::of(request).await?, 422, "secret_in_input")?;
            let detail = text(&refused["detail"])?;
            ensure!(
                detail.contains(name)
                    && detail.contains(&format!("looks like {what}"))
                    && !refused.to_string().contains("of the system"),
                "{refused}"
            );
            assert_eq!(
                (&refused["path"], &refused["what"]),
                (&json!(name), &json!(what))
            );
            ensure!(!refused.to_string().contains("hunter2"), "{refused}");
        }
    }
    assert_eq!(
        fixture.inside("ls -A repo").await?["stdout"],
        "src\ntests\n",
        "part of a refused archive was unpacked"
    );
    Ok(())
}

#[tokio::test]
// invariant: no-secrets-inside
async fn shapes_are_refused_flagged_or_admitted_as_system_and_project_configure() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let http = reqwest::Client::builder().no_proxy().build()?;
    let token = foreign_token();
    for (name, setting, plain, live) in [
        ("t", "true", "flag", "refuse"),
        ("f", "false", "off", "off"),
        ("r", "{seeds = \"refuse\"}", "refuse", "refuse"),
        ("o", "{seeds = \"off\"}", "off", "off"),
    ] {
        let orchestrator = control_plane
            .orchestrator(name, &[("secret_shapes", setting)])
            .await?;
        let (url, admin) = (orchestrator.url()?, orchestrator.token()?);
        let make = async |path: &str, body: &Value| {
            object(
                &Answer::of(
                    http.post(format!("{url}{path}"))
                        .bearer_auth(&admin)
                        .json(body),
                )
                .await?,
            )
        };
        let seen = async |task: &str, path: &str| -> Result<&'static str> {
            let answer = Answer::of(
                http.put(format!("{url}/v1/tasks/{task}/artifacts/{path}"))
                    .bearer_auth(&admin)
                    .body(token.clone()),
            )
            .await?;
            if refusal(&answer, 422, "secret_in_input").is_ok() {
                return Ok("refuse");
            }
            Ok(if object(&answer)?["flagged_total"] == 1 {
                "flag"
            } else {
                "off"
            })
        };
        let task = text(&make("/v1/tasks", &json!({"name": "t"})).await?["id"])?;
        assert_eq!(
            (seen(&task, "a.rs").await?, seen(&task, ".env").await?),
            (plain, live),
            "{setting}"
        );
        // Our tokens are refused whatever the settings.
        let ours = Answer::of(
            http.put(format!("{url}/v1/tasks/{task}/artifacts/a"))
                .bearer_auth(&admin)
                .body(admin.clone()),
        )
        .await?;
        refusal(&ours, 422, "secret_in_input").with_context(|| setting.to_owned())?;

        // A project tightens and never loosens.
        let project = text(
            &make(
                "/v1/projects",
                &json!({"name": format!("p-{name}"), "slug": format!("p-{name}")}),
            )
            .await?["id"],
        )?;
        let task =
            text(&make("/v1/tasks", &json!({"name": "t", "project_id": project})).await?["id"])?;
        let prefer = async |scope: &str, id: &str, value: Value| {
            Answer::of(
                http.put(format!("{url}/v1/preferences/{scope}/{id}/secrets.shapes"))
                    .bearer_auth(&admin)
                    .json(&json!({"value": value})),
            )
            .await
        };
        for (value, plain) in [
            (json!({"seeds": "off"}), plain),
            (json!(false), plain),
            (
                json!({"seeds": "flag"}),
                if plain == "refuse" { "refuse" } else { "flag" },
            ),
            (json!({"seeds": "refuse"}), "refuse"),
        ] {
            object(&prefer("project", &project, value.clone()).await?)?;
            assert_eq!(seen(&task, "a.rs").await?, plain, "{setting} {value}");
        }
        for (scope, id, value, text_of_response) in [
            ("project", &project, json!({"seed": "flag"}), "`seed`"),
            ("project", &project, json!("refuse"), "true, false"),
            ("task", &task, json!(true), "orchestrator.secret_shapes"),
        ] {
            let refused = refusal(&prefer(scope, id, value).await?, 400, "invalid_request")?;
            ensure!(
                text(&refused["detail"])?.contains(text_of_response),
                "{refused}"
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn no_secret_enters_as_a_changed_label_or_as_the_bytes_of_a_name() -> Result<()> {
    let fixture = SecretsFixture::start().await?;
    let secret = foreign_token();
    let mut passed = Vec::new();
    let ways = [
        (
            "labels.note",
            fixture
                .cluster
                .request(
                    Method::PATCH,
                    fixture.session_path("").trim_end_matches('/'),
                )?
                .json(&json!({"labels": {"note": secret}})),
        ),
        (
            "path_b64",
            fixture.file("path_b64", &STANDARD.encode(&secret), "plain")?,
        ),
        (
            "path_b64",
            fixture
                .cluster
                .request(Method::POST, &fixture.session_path("import"))?
                .query(&[("path_b64", STANDARD.encode(format!("in/{secret}")))])
                .body(archive("plain", "plain")?),
        ),
    ];
    for (field, request) in ways {
        let answer = Answer::of(request).await?;
        if refusal(&answer, 422, "secret_in_input").is_err() {
            passed.push(format!(
                "{field}: {} {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            ));
        }
    }
    ensure!(passed.is_empty(), "{passed:#?}");
    assert_eq!(
        traces(&secret, &fixture.readable().await?),
        Vec::<String>::new()
    );
    Ok(())
}

// part of: REQ-SANDBX-0100, ISC-23
#[tokio::test]
// invariant: no-secrets-inside
async fn the_systems_own_keys_and_tokens_are_kept_out() -> Result<()> {
    let fixture = SecretsFixture::start().await?;
    let world = &fixture.cluster.control_plane.world;
    let mut held = Vec::new();
    for path in [
        "state/admin.token",
        "state/worker.token",
        "orchestrator.key",
        "registration.key",
    ] {
        held.push((
            path.to_owned(),
            fs_err::read_to_string(world.directory().join(path))?
                .trim()
                .to_owned(),
        ));
    }
    let registration: Value = serde_json::from_slice(&fs_err::read(
        world.state_dir().join("worker/registration.json"),
    )?)?;
    for name in ["worker_token", "node_token"] {
        held.push((name.to_owned(), text(&registration[name])?));
    }
    let key = text(
        &fixture
            .cluster
            .make(
                &fixture.cluster.orchestrator.token()?,
                "/v1/nodes/keys",
                &json!({}),
            )
            .await?["psk"],
    )?;
    held.push(("a key for nodes".to_owned(), key));
    for (name, secret) in &held {
        refusal(
            &Answer::of(fixture.exec(&json!({"stdin": secret}))?).await?,
            422,
            "secret_in_input",
        )
        .with_context(|| name.clone())?;
        // In base64 too, at any offset.
        for before in ["", "x", "xy"] {
            let encoded = STANDARD.encode(format!("{before}{secret}"));
            refusal(
                &Answer::of(fixture.file("path", "leaked", encoded)?).await?,
                422,
                "secret_in_input",
            )
            .with_context(|| format!("{name} in base64"))?;
        }
    }
    assert_eq!(fixture.inside("ls").await?["stdout"], "heard\n");
    let readable = fixture.readable().await?;
    for (name, secret) in &held {
        let found = traces(secret, &readable);
        ensure!(found.is_empty(), "{name} is in {found:#?}");
    }
    Ok(())
}

#[tokio::test]
// invariant: no-secrets-inside
async fn the_database_password_is_recognized_though_it_has_no_shape() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    let password = "correct horse battery staple".replace(' ', "-");
    let url = control_plane
        .postgres
        .url()
        .replace("cynode@", &format!("cynode:{password}@"));
    let orchestrator = control_plane
        .orchestrator("", &[("database_url", url.as_str())])
        .await?;
    let http = reqwest::Client::builder().no_proxy().build()?;
    let (url, token) = (orchestrator.url()?, orchestrator.token()?);
    let task = http
        .post(format!("{url}/v1/tasks"))
        .bearer_auth(&token)
        .json(&json!({"name": "t"}));
    let task = text(&object(&Answer::of(task).await?)?["id"])?;
    let put = |bytes: String| {
        Answer::of(
            http.put(format!("{url}/v1/tasks/{task}/artifacts/a"))
                .bearer_auth(&token)
                .body(bytes),
        )
    };
    for bytes in [
        password.clone(),
        format!("PGPASSWORD={password}\n"),
        format!("glued{password}glued"),
        STANDARD.encode(format!("x:{password}")),
    ] {
        let refused = refusal(&put(bytes).await?, 422, "secret_in_input")?;
        ensure!(
            text(&refused["detail"])?.contains("the database's password")
                && !refused.to_string().contains(&password),
            "{refused}"
        );
    }
    object(&put(password[1..].to_owned()).await?)?;
    let log = fs_err::read_to_string(orchestrator.log())?;
    ensure!(!log.contains(&password), "the log contains the password");
    assert_eq!(
        control_plane
            .postgres
            .query("select count(*) from artifacts")?,
        "1"
    );
    Ok(())
}

#[tokio::test]
// invariant: no-secrets-inside
async fn text_that_only_resembles_a_secret_passes_unchanged() -> Result<()> {
    let fixture = SecretsFixture::start().await?;
    let foreign = foreign_token();
    let key = private_key();
    let header = key.lines().next().context("a first line")?;
    let near = [
        foreign[..foreign.len() - 1].to_owned(),
        format!("{foreign}A"),
        format!("x{foreign}"),
        format!("cyn_{}", letters(42)),
        "cyn_example and ghp_ and AKIA and sk-".to_owned(),
        format!("{}\n{}\n", header.replace("PRIVATE", "PUBLIC"), letters(64)),
        "d2fcf5a3b8c94e3b9e0f7a61c5d4e3f2a1b0c9d8e7f6a5b4c3d2e1f0a9b8c7d6".to_owned(),
        "550e8400-e29b-41d4-a716-446655440000".to_owned(),
        // Last, because text after it could look like key material.
        format!("if text.starts_with(\"{header}\") {{ return Err(Private); }}"),
    ];
    for text in &near {
        object(&Answer::of(fixture.file("path", "near", format!("{text}\n"))?).await?)
            .with_context(|| text.clone())?;
        assert_eq!(
            fixture.inside("cat near").await?["stdout"],
            json!(format!("{text}\n"))
        );
        let ran = fixture.exec(&json!({
            "argv": ["sh", "-c", "printf %s \"$1$KEY\"; cat", "sh", text],
            "env": {"KEY": text},
            "stdin": text
        }))?;
        assert_eq!(
            object(&Answer::of(ran).await?).with_context(|| text.clone())?["stdout"],
            json!(text.repeat(3))
        );
    }
    // Except for the second: cut at a token's length, as may happen in pieces, it would look like
    // one.
    let large = format!(
        "{}{}\n{}",
        "plain text\n".repeat(300_000),
        near[0],
        near[2..].join("\n")
    );
    object(&Answer::of(fixture.file("path", "large", large.clone())?).await?)?;
    let read = Answer::of(
        fixture
            .cluster
            .request(Method::GET, &fixture.session_path("files"))?
            .query(&[("path", "large")]),
    )
    .await?;
    ensure!(
        read.body == large.as_bytes(),
        "stored differently: {} of {} bytes",
        read.body.len(),
        large.len()
    );
    object(
        &Answer::of(
            fixture
                .cluster
                .request(Method::POST, &fixture.session_path("import"))?
                .query(&[("path", ".")])
                .body(archive("near", &near.join("\n"))?),
        )
        .await?,
    )?;
    Ok(())
}
