//! Edits: an exact text is replaced once, or everywhere, or nothing changes.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use cynode_api::file_limits::{MAX_EDIT_LINES, MAX_EDITED_FILE_BYTES};
use cynode_tests::Answer;
use serde_json::{Value, json};

use super::{Sandbox, sha256};

impl Sandbox {
    async fn edit(&self, body: &Value) -> Result<Answer> {
        self.call("files:edit", body).await
    }
}

fn problem(answer: &Answer) -> Result<Value> {
    Ok(serde_json::from_slice(&answer.body)?)
}

#[tokio::test]
async fn an_edit_replaces_a_text_once_and_keeps_the_mode_and_the_link() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh("printf 'one\\ntwo\\n' > file; chmod 0750 file; ln -s file link; printf 'a\\377b' > bytes")
        .await?;
    let answer = sandbox
        .edit(&json!({"path": "link", "old": "two", "new": "2"}))
        .await?;
    let (before, after) = (sha256(b"one\ntwo\n"), sha256(b"one\n2\n"));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(
        problem(&answer)?,
        json!({"sha256": after, "size": 6, "replaced": 1, "sha256_before": before})
    );
    assert_eq!(
        sandbox
            .sh("cat file; stat -c %a file; readlink link")
            .await?,
        "one\n2\n750\nfile\n"
    );
    // The content need not be UTF-8.
    let answer = sandbox
        .edit(&json!({"path": "/workspace/bytes", "old": "b", "new": "ü"}))
        .await?;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(sandbox.get("bytes").await?.body.to_vec(), b"a\xff\xc3\xbc");
    let answer = sandbox
        .edit(&json!({"path": "file", "old": "\n", "new": ";", "all": true}))
        .await?;
    assert_eq!(
        (answer.status, problem(&answer)?["replaced"].as_u64()),
        (200, Some(2))
    );
    assert_eq!(sandbox.sh("cat file").await?, "one;2;");
    Ok(())
}

#[tokio::test]
async fn a_text_that_is_missing_or_ambiguous_changes_nothing() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    let content = "same\n".repeat(MAX_EDIT_LINES + 1);
    sandbox.write("file", content.clone()).await?;
    let snapshot = sandbox.snapshot("/workspace").await?;
    let stale = sha256(b"stale");
    for (body, status, code, detail) in [
        (
            json!({"old": "other", "new": "x"}),
            409,
            "edit_rejected",
            "does not occur",
        ),
        (
            json!({"old": "same", "new": "x"}),
            409,
            "edit_rejected",
            "occurs 11 times, at lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …",
        ),
        (
            json!({"old": "", "new": "x"}),
            400,
            "invalid_request",
            "old",
        ),
        (
            json!({"old": "same", "new": "same"}),
            400,
            "invalid_request",
            "new",
        ),
        (
            json!({"old": "same", "new": "x", "all": true, "if_match": stale}),
            412,
            "precondition_failed",
            &sha256(content.as_bytes()),
        ),
        (
            json!({"old": "same", "new": "x", "if_match": "abc"}),
            400,
            "invalid_request",
            "if_match",
        ),
        (
            json!({"path": "none", "old": "same", "new": "x"}),
            404,
            "not_found",
            "none",
        ),
        (
            json!({"path": ".", "old": "same", "new": "x"}),
            409,
            "not_a_file",
            "workspace",
        ),
        (
            json!({"path": "/etc/passwd", "old": "root:x", "new": "toor:x"}),
            403,
            "permission_denied",
            "passwd",
        ),
    ] {
        let mut whole = json!({"path": "file"});
        whole
            .as_object_mut()
            .into_iter()
            .for_each(|whole| whole.extend(body.as_object().cloned().unwrap_or_default()));
        let answer = sandbox.edit(&whole).await?;
        let found = problem(&answer)?;
        assert_eq!(
            (answer.status, found["code"].as_str()),
            (status, Some(code)),
            "{whole}: {found}"
        );
        ensure!(
            found["detail"]
                .as_str()
                .is_some_and(|text| text.contains(detail)),
            "{whole}: {found}"
        );
    }
    let answer = sandbox
        .edit(&json!({"path": "file", "old": "same", "new": "x"}))
        .await?;
    let found = problem(&answer)?;
    assert_eq!(
        (
            &found["occurrences"],
            found["lines"].as_array().map(Vec::len)
        ),
        (&json!(MAX_EDIT_LINES + 1), Some(MAX_EDIT_LINES))
    );
    assert_eq!(sandbox.snapshot("/workspace").await?, snapshot);
    // The hash that was read lets it pass, with or without the name of the algorithm.
    let current = sha256(content.as_bytes());
    let answer = sandbox
        .edit(&json!({
            "path": "file", "old": "same", "new": "x", "all": true,
            "if_match": format!("sha256:{current}")
        }))
        .await?;
    assert_eq!(answer.status, 200, "{answer:?}");
    Ok(())
}

#[tokio::test]
// invariant: bounded
async fn a_file_of_32_mebibytes_is_edited_and_no_larger_one() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh(&format!(
            "printf mark > full; head -c {} /dev/zero >> full; cp full over; printf 0 >> over",
            MAX_EDITED_FILE_BYTES - 4
        ))
        .await?;
    let answer = sandbox
        .edit(&json!({"path": "full", "old": "mark", "new": "MARK"}))
        .await?;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(
        sandbox.sh("head -c 4 full; stat -c ' %s' full").await?,
        format!("MARK {MAX_EDITED_FILE_BYTES}\n")
    );
    for (path, new) in [("over", "MARK"), ("full", "MARKS")] {
        let answer = sandbox
            .edit(&json!({"path": path, "old": "mark", "new": new}))
            .await?;
        let expected = if path == "over" {
            (413, "too_large".to_owned())
        } else {
            (409, "edit_rejected".to_owned())
        };
        assert_eq!(answer.outcome(), expected, "{path}");
    }
    let answer = sandbox
        .edit(&json!({"path": "full", "old": "MARK", "new": "MARKS"}))
        .await?;
    assert_eq!(answer.outcome(), (413, "too_large".to_owned()));
    // Every byte is a place of its own.
    let answer = sandbox
        .edit(&json!({"path": "full", "old": "\u{0}", "new": "x", "all": true}))
        .await?;
    assert_eq!(
        problem(&answer)?["replaced"].as_u64(),
        Some(MAX_EDITED_FILE_BYTES - 4)
    );
    let (_, peak) = sandbox.worker.memory()?;
    ensure!(peak < 160 << 20, "the worker took {} MiB", peak >> 20);
    Ok(())
}

#[tokio::test]
// invariant: nothing-lost
async fn concurrent_edits_of_one_file_lose_nothing() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    let lines: Vec<String> = (0..16).map(|number| format!("line-{number:02}")).collect();
    sandbox.write("file", lines.join("\n")).await?;
    let edits = lines.iter().map(|line| {
        let body = json!({"path": "file", "old": line, "new": format!("{line}-edited")});
        let sandbox = &sandbox;
        async move { sandbox.edit(&body).await }
    });
    for answer in futures_util::future::join_all(edits).await {
        assert_eq!(answer?.status, 200);
    }
    let content = sandbox.sh("cat file").await?;
    let edited: BTreeSet<&str> = content.lines().collect();
    for line in &lines {
        ensure!(
            edited.contains(format!("{line}-edited").as_str()),
            "{line} is lost: {content}"
        );
    }
    Ok(())
}
