//! Rules about paths: no call and no spelling of a path evades them.

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cynode_tests::Answer;
use http::Method;
use serde_json::{Value, json};

use super::{
    super::cluster::{Cluster, session, text},
    object, refusal,
};

/// A session with files that a rule about paths protects.
struct ProtectedPaths {
    cluster: Cluster,
    session: String,
}

impl ProtectedPaths {
    async fn start() -> Result<Self> {
        let cluster = Cluster::start().await?;
        let admin = cluster.orchestrator.token()?;
        let task = text(
            &cluster
                .make(&admin, "/v1/tasks", &json!({"name": "task"}))
                .await?["id"],
        )?;
        let mut body = session();
        body["task_id"] = json!(task);
        let fixture = Self {
            session: cluster.session(&admin, &body).await?,
            cluster,
        };
        object(
            &fixture
                .post(
                    "exec",
                    &json!({"argv": ["mkdir", "protected", "other"], "timeout_ms": 10_000}),
                )
                .await?,
        )?;
        for path in ["protected/kept", "other/file", "other/second"] {
            object(&fixture.put("path", path).await?)?;
        }
        let actions = [
            "write", "delete", "patch", "move", "mkdir", "import", "list",
        ]
        .map(|name| format!("CyNode::Action::\"file.{name}\""))
        .join(", ");
        let document = format!(
            "@id(\"keep-off\")\nforbid (principal, action in [{actions}], resource in CyNode::Task::\"{task}\")\n\
             when {{ context has path && (context.path == \"/workspace/protected\" || context.path like \"/workspace/protected/*\") }};"
        );
        object(
            &Answer::of(
                fixture
                    .cluster
                    .request(Method::PUT, "/v1/policies/paths")?
                    .json(&json!({"text": document})),
            )
            .await?,
        )?;
        Ok(fixture)
    }

    fn session_path(&self, below: &str) -> String {
        format!("/v1/sessions/{}/{below}", self.session)
    }

    async fn post(&self, below: &str, body: &Value) -> Result<Answer> {
        Answer::of(
            self.cluster
                .request(Method::POST, &self.session_path(below))?
                .json(body),
        )
        .await
    }

    async fn put(&self, parameter: &str, path: &str) -> Result<Answer> {
        Answer::of(
            self.cluster
                .request(Method::PUT, &self.session_path("files"))?
                .query(&[(parameter, path)])
                .body("content"),
        )
        .await
    }

    async fn import(&self, path: &str, tar: Vec<u8>) -> Result<Answer> {
        Answer::of(
            self.cluster
                .request(Method::POST, &self.session_path("import"))?
                .query(&[("path", path)])
                .body(tar),
        )
        .await
    }

    /// Names, permissions and contents of all files.
    async fn files(&self) -> Result<Value> {
        let script = "find . | sort | xargs stat -c '%n %a'; cat protected/* other/*";
        Ok(object(
            &self
                .post(
                    "exec",
                    &json!({"argv": ["sh", "-c", script], "timeout_ms": 10_000}),
                )
                .await?,
        )?["stdout"]
            .clone())
    }
}

/// Expects a refusal by the rule, and no other.
fn assert_forbidden(answer: &Answer) -> Result<()> {
    let refused = refusal(answer, 403, "denied_by_policy")?;
    ensure!(refused["rules"] == json!(["paths/keep-off"]), "{refused}");
    Ok(())
}

/// A tar archive of entries: kind, name, content.
fn archive(entries: &[(tar::EntryType, &str, &[u8])]) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    for (kind, name, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, *content)?;
    }
    Ok(tar.into_inner()?)
}

fn created(name: &str) -> String {
    format!("--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+x\n")
}

#[tokio::test]
async fn a_rule_about_paths_applies_to_every_call_and_spelling() -> Result<()> {
    use tar::EntryType::Regular;
    let fixture = ProtectedPaths::start().await?;
    let before = fixture.files().await?;
    for path in [
        "protected/new",
        "/workspace/protected/new",
        "./protected/./new",
        "protected//new",
        "//workspace///protected/new/",
        "other/../protected/new",
        "../workspace/protected/new",
        "/tmp/../workspace/other/../protected/deep/er",
        "protected/kept",
    ] {
        let context = || path.to_owned();
        assert_forbidden(&fixture.put("path", path).await?).with_context(context)?;
        assert_forbidden(&fixture.put("path_b64", &STANDARD.encode(path)).await?)
            .with_context(context)?;
        let deleted = fixture
            .cluster
            .request(Method::DELETE, &fixture.session_path("files"))?
            .query(&[("path", path)]);
        assert_forbidden(&Answer::of(deleted).await?).with_context(context)?;
        assert_forbidden(
            &fixture
                .post("files:mkdir", &json!({"path": path, "parents": true}))
                .await?,
        )
        .with_context(context)?;
        let edit = json!({"path": path, "old": "content", "new": "changed"});
        for route in ["files:edit", "files:edit?path=other/file"] {
            assert_forbidden(&fixture.post(route, &edit).await?).with_context(context)?;
        }
        assert_forbidden(
            &fixture
                .post("files:move", &json!({"from": "other/file", "to": path}))
                .await?,
        )
        .with_context(context)?;
        assert_forbidden(
            &fixture
                .post("files:move", &json!({"from": path, "to": "other/taken"}))
                .await?,
        )
        .with_context(context)?;
        assert_forbidden(
            &fixture
                .import(path, archive(&[(Regular, "new", b"x")])?)
                .await?,
        )
        .with_context(context)?;
    }
    for diff in [
        created("b/protected/new"),
        created("b/other/../protected/new"),
        format!(
            "{}{}",
            created("b/other/fine"),
            created("b/./protected//new")
        ),
        "--- a/protected/kept\n+++ b/protected/kept\n@@ -1 +1 @@\n-content\n+changed\n".to_owned(),
        "diff --git a/other/file b/protected/file\nsimilarity index 100%\nrename from \
         other/file\nrename to protected/file\n"
            .to_owned(),
        "diff --git a/protected/kept b/other/kept\nsimilarity index 100%\ncopy from \
         protected/kept\ncopy to other/kept\n"
            .to_owned(),
    ] {
        assert_forbidden(&fixture.post("files:patch", &json!({"diff": diff})).await?)
            .with_context(|| diff.clone())?;
    }
    for (path, name) in [
        (".", "protected/new"),
        ("/workspace/other/..", "./protected/new"),
        ("/", "workspace/protected/new"),
    ] {
        assert_forbidden(
            &fixture
                .import(
                    path,
                    archive(&[(Regular, "fine", b"x"), (Regular, name, b"x")])?,
                )
                .await?,
        )
        .with_context(|| format!("{name} into {path}"))?;
    }
    assert_eq!(
        fixture.files().await?,
        before,
        "a refused call changed files"
    );

    // Paths that the rule doesn't name stay accessible.
    for path in [
        "other/new",
        "protectedly",
        "/workspace/other/protected",
        "protected/../free",
        "/tmp/protected",
    ] {
        object(&fixture.put("path", path).await?).with_context(|| path.to_owned())?;
    }
    object(
        &fixture
            .post(
                "files:mkdir",
                &json!({"path": "also/protected", "parents": true}),
            )
            .await?,
    )?;
    object(
        &fixture
            .post("files:move", &json!({"from": "free", "to": "moved"}))
            .await?,
    )?;
    object(
        &fixture
            .post("files:patch", &json!({"diff": created("b/other/patched")}))
            .await?,
    )?;
    object(
        &fixture
            .import("other", archive(&[(Regular, "protected-too", b"x")])?)
            .await?,
    )?;
    let read = Answer::of(
        fixture
            .cluster
            .request(Method::GET, &fixture.session_path("files"))?
            .query(&[("path", "protected/kept")]),
    )
    .await?;
    assert_eq!((read.status, &read.body[..]), (200, &b"content"[..]));
    let verdict = json!({
        "action": "file.write",
        "session_id": fixture.session,
        "path": "other/../protected/x"
    });
    let verdict = object(
        &Answer::of(
            fixture
                .cluster
                .request(Method::POST, "/v1/policies:test")?
                .json(&verdict),
        )
        .await?,
    )?;
    assert_eq!(
        (&verdict["allowed"], &verdict["rules"]),
        (&json!(false), &json!(["paths/keep-off"]))
    );
    Ok(())
}

#[tokio::test]
// invariant: one-reader
async fn no_diff_hides_a_changed_path_from_a_rule() -> Result<()> {
    let fixture = ProtectedPaths::start().await?;
    let before = fixture.files().await?;
    let mut passed = Vec::new();
    for (what, diff, strip) in [
        (
            "an empty file",
            "diff --git a/protected/new b/protected/new\nnew file mode 100644\n".to_owned(),
            1,
        ),
        (
            "permissions",
            "diff --git a/protected/kept b/protected/kept\nold mode 100644\nnew mode \
             100755\n"
                .to_owned(),
            1,
        ),
        ("a quoted name", created("\"b/protected/1\""), 1),
        ("an escaped letter", created("\"b/protect\\145d/2\""), 1),
        ("an escaped slash", created("\"b/protected\\0573\""), 1),
        (
            "two slashes after what is dropped",
            created("b//protected/4"),
            1,
        ),
        ("nothing dropped", created("protected/5"), 0),
        ("more dropped", created("a/b/protected/6"), 2),
        (
            "more dropped of a rename",
            "diff --git a/z/other/file b/z/protected/file\nrename from \
             z/other/file\nrename to z/protected/file\n"
                .to_owned(),
            2,
        ),
        (
            "a name without a slash, from which nothing is dropped",
            "--- protected\n+++ \
             protected\n@@ -0,0 +1 @@\n+x\n"
                .to_owned(),
            1,
        ),
        (
            "a link",
            "diff --git a/protected/l b/protected/l\nnew file mode 120000\n--- /dev/null\n+++ \
             b/protected/l\n@@ -0,0 +1 @@\n+x\n\\ No newline at end of file\n"
                .to_owned(),
            1,
        ),
        (
            "a name that is escaped in a rename",
            "diff --git a/other/second b/protected/file\nrename from other/second\nrename to \
             \"protect\\145d/file\"\n"
                .to_owned(),
            1,
        ),
    ] {
        let answer = fixture
            .post("files:patch", &json!({"diff": diff, "strip": strip}))
            .await?;
        if assert_forbidden(&answer).is_err() {
            passed.push(format!(
                "{what}: {} {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            ));
        }
    }
    ensure!(passed.is_empty(), "{passed:#?}");
    // The leading slash is never stripped.
    refusal(
        &fixture
            .post("files:patch", &json!({"diff": created("/protected/x")}))
            .await?,
        409,
        "patch_rejected",
    )?;
    // Ambiguous archives, or ones that are costly to parse, are refused before the policy is
    // consulted.
    let spaces = format!(
        "diff --git {}\nnew file mode 100644\n",
        "a/b ".repeat(22_000)
    );
    let two_names = format!(
        "diff --git a/other/x b/other/x\nnew file mode 100644\n{}",
        created("b/protected/x")
    );
    for diff in [spaces, two_names, "no diff\n".to_owned()] {
        refusal(
            &fixture.post("files:patch", &json!({"diff": diff})).await?,
            400,
            "invalid_request",
        )?;
    }
    assert_eq!(
        fixture.files().await?,
        before,
        "a refused call changed files"
    );
    Ok(())
}

#[tokio::test]
// invariant: one-reader
async fn no_form_of_a_patch_hides_a_changed_path_from_a_rule() -> Result<()> {
    let fixture = ProtectedPaths::start().await?;
    let before = fixture.files().await?;
    let begin = |body: &str| format!("*** Begin Patch\n{body}*** End Patch\n");
    let modify = |header: &str, path: &str| {
        format!("--- a/{path}\n+++ b/{path}\n{header}\n-content\n+changed\n")
    };
    let rename = |from: &str, to: &str, header: &str| {
        format!(
            "diff --git a/{from} b/{to}\nrename from {from}\nrename to {to}\n--- a/{from}\n\
             +++ b/{to}\n{header}\n-content\n+changed\n"
        )
    };
    let mut passed = Vec::new();
    let forms = [
        ("an added file", begin("*** Add File: protected/1\n+x\n")),
        (
            "a file after a harmless one",
            begin("*** Add File: other/fine\n+x\n*** Add File: ./protected//2\n+x\n"),
        ),
        ("a deleted file", begin("*** Delete File: protected/kept\n")),
        (
            "an updated file",
            begin("*** Update File: protected/kept\n@@\n-content\n+x\n"),
        ),
        (
            "a file moved in",
            begin("*** Update File: other/file\n*** Move to: protected/file\n@@\n-content\n+x\n"),
        ),
        (
            "a file moved in as it is",
            begin("*** Update File: other/file\n*** Move to: protected/file\n"),
        ),
        (
            "a file moved out",
            begin("*** Update File: protected/kept\n*** Move to: other/kept\n@@\n-content\n+x\n"),
        ),
        ("dots", begin("*** Add File: other/../protected/3\n+x\n")),
        (
            "an absolute name",
            begin("*** Add File: /workspace/protected/4\n+x\n"),
        ),
        ("spaces", begin("*** Add File:   protected/5  \n+x\n")),
        (
            "line ends of another system",
            begin("*** Add File: protected/6\n+x\n").replace('\n', "\r\n"),
        ),
        ("wrong counts", modify("@@ -1,7 +1,9 @@", "protected/kept")),
        ("no line numbers", modify("@@ @@", "protected/kept")),
        (
            "dots for line numbers",
            modify("@@ ... @@", "protected/kept"),
        ),
        (
            "a file after a wrong hunk",
            modify("@@ -1,9 +1,9 @@", "other/file") + &modify("@@ -1,9 +1,9 @@", "protected/kept"),
        ),
        (
            "a rename in with wrong counts",
            rename("other/file", "protected/file", "@@ -1,4 +1,4 @@"),
        ),
        (
            "a rename out without line numbers",
            rename("protected/kept", "other/kept", "@@ @@"),
        ),
    ];
    for (what, diff) in &forms {
        let answer = fixture.post("files:patch", &json!({"diff": diff})).await?;
        if assert_forbidden(&answer).is_err() {
            passed.push(format!(
                "{what}: {} {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            ));
        }
    }
    ensure!(passed.is_empty(), "{passed:#?}");
    assert_eq!(
        fixture.files().await?,
        before,
        "a refused call changed files"
    );
    // The same forms change what the rule does not name.
    for diff in [
        begin("*** Update File: other/file\n*** Move to: other/moved\n@@\n-content\n+one\n"),
        begin("*** Add File: other/added\n+content\n"),
        rename("other/added", "other/again", "@@ -1,4 +1,4 @@"),
        modify("@@ @@", "other/second"),
    ] {
        object(&fixture.post("files:patch", &json!({"diff": diff})).await?)
            .with_context(|| diff.clone())?;
    }
    let files = fixture.files().await?;
    let files = files.as_str().context("a text")?;
    // The last three are what the rule protects and the files without a newline at their ends.
    ensure!(
        files.contains("other/again") && files.ends_with("contentchanged\nonechanged"),
        "{files}"
    );
    Ok(())
}

/// A record of an extension header, prefixed with its own length.
fn attribute(name: &str, value: &str) -> Vec<u8> {
    let rest = format!(" {name}={value}\n");
    let length = (1..1_000)
        .find(|length: &usize| length.to_string().len() + rest.len() == *length)
        .unwrap_or_default();
    format!("{length}{rest}").into_bytes()
}

#[tokio::test]
// invariant: one-reader
async fn no_archive_or_spelling_hides_a_path_from_a_rule() -> Result<()> {
    use tar::EntryType::{GNULongName, Link, Regular, Symlink, XGlobalHeader, XHeader};
    let fixture = ProtectedPaths::start().await?;
    let before = fixture.files().await?;
    let (path, time) = (attribute("path", "protected/new"), attribute("mtime", "1"));
    // Split by lines, these two read 'fine' and contain no size.
    let hidden_path = [attribute("comment", "x\n14 path=fine"), path.clone()].concat();
    let hidden_size = [
        attribute("comment", "x\n13 size=1024"),
        attribute("size", "0"),
    ]
    .concat();
    let smuggled = archive(&[(Regular, "protected/new", b"x")])?;
    let link = |kind, name: &str, target: &str| -> Result<Vec<u8>> {
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(0);
        tar.append_link(&mut header, name, target)?;
        header.set_entry_type(Regular);
        tar.append_data(&mut header, "link/new", &b""[..])?;
        Ok(tar.into_inner()?)
    };
    let mut passed = Vec::new();
    for (what, tar) in [
        (
            "a name behind a newline in a comment",
            archive(&[(XHeader, "x", &hidden_path), (Regular, "fine", b"x")])?,
        ),
        (
            "a size behind a newline in a comment",
            archive(&[(XHeader, "x", &hidden_size), (Regular, "fine", &smuggled)])?,
        ),
        (
            "a name for all entries",
            archive(&[(XGlobalHeader, "x", &path), (Regular, "fine", b"x")])?,
        ),
        (
            "a link of the archive's own",
            link(Symlink, "link", "protected")?,
        ),
        ("a hard link", link(Link, "hard", "protected/kept")?),
        (
            "a name in an extension header",
            archive(&[(XHeader, "x", &path), (Regular, "fine", b"x")])?,
        ),
        (
            "a long name",
            archive(&[
                (GNULongName, "x", b"protected/new\0"),
                (Regular, "fine", b"x"),
            ])?,
        ),
        (
            "two extension headers",
            archive(&[
                (XHeader, "x", &time),
                (XHeader, "x", &path),
                (Regular, "fine", b"x"),
            ])?,
        ),
        (
            "a long name and then another",
            archive(&[
                (GNULongName, "x", b"fine\0"),
                (XHeader, "x", &path),
                (Regular, "fine", b"x"),
            ])?,
        ),
        (
            "a directory",
            archive(&[
                (Regular, "fine", b"x"),
                (tar::EntryType::Directory, "protected/new/", b""),
            ])?,
        ),
    ] {
        let answer = fixture.import(".", tar).await?;
        // An archive with ambiguous names may be refused as such.
        if assert_forbidden(&answer).is_err()
            && answer.outcome() != (400, "invalid_request".to_owned())
        {
            passed.push(format!(
                "{what}: {} {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            ));
        }
    }
    // Reads are subject to the same rules.
    for body in [
        json!({"path": "protected"}),
        json!({"path_b64": STANDARD.encode("protected")}),
        json!({"path_b64": STANDARD.encode("/workspace/./protected")}),
    ] {
        let answer = fixture.post("files:list", &body).await?;
        if assert_forbidden(&answer).is_err() {
            passed.push(format!(
                "a list of {body}: {} {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            ));
        }
    }
    ensure!(passed.is_empty(), "{passed:#?}");
    assert_eq!(
        fixture.files().await?,
        before,
        "a refused call changed files"
    );
    Ok(())
}
