//! Directories: list, create, move, delete.

use anyhow::Result;
use cynode_api::{FileType, ListRequest, ListResult};
use cynode_tests::Answer;
use http::Method;
use serde_json::{Value, json};

use super::Sandbox;

impl Sandbox {
    async fn list(&self, body: Value) -> Result<ListResult> {
        let answer = self.call("files:list", &body).await?;
        assert_eq!(answer.status, 200, "{body}: {answer:?}");
        Ok(serde_json::from_slice(&answer.body)?)
    }

    async fn list_paths(&self, body: Value) -> Result<(Vec<String>, bool)> {
        let list = self.list(body).await?;
        Ok((
            list.entries.into_iter().map(|entry| entry.path).collect(),
            list.truncated,
        ))
    }

    async fn refusal_of(&self, operation: &str, body: Value) -> Result<(u16, String)> {
        Ok(self.call(operation, &body).await?.outcome())
    }
}

// part of: ISC-05
#[tokio::test]
async fn a_list_is_sorted_and_has_the_type_of_each_entry() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh(
            "mkdir -p a/b/c; echo 12345 > a/b/c/deep; echo x > a-b; echo x > a.txt; echo x > \
             .hidden; mkdir .dir; echo x > .dir/x; ln -s /nowhere link; mkfifo pipe; chmod \
             0700 a; chmod 0640 a.txt; touch -d @1000000000 a.txt",
        )
        .await?;
    let list = sandbox.list(json!({})).await?;
    let entries: Vec<_> = list
        .entries
        .iter()
        .map(|entry| {
            (
                entry.path.as_str(),
                entry.kind,
                entry.mode.as_str(),
                entry.target.as_deref(),
            )
        })
        .collect();
    assert_eq!(
        entries,
        [
            ("a", FileType::Dir, "0700", None),
            ("a-b", FileType::File, "0644", None),
            ("a.txt", FileType::File, "0640", None),
            ("link", FileType::Symlink, "0777", Some("/nowhere")),
            ("pipe", FileType::Other, "0644", None)
        ]
    );
    assert_eq!(
        (
            list.entries[2].size,
            list.entries[2].mtime.unix_timestamp(),
            list.truncated
        ),
        (2, 1_000_000_000, false)
    );

    let names = |names: &[&str]| {
        names
            .iter()
            .map(|name| (*name).to_owned())
            .collect::<Vec<_>>()
    };
    let all = names(&[
        ".dir",
        ".dir/x",
        ".hidden",
        "a",
        "a-b",
        "a.txt",
        "a/b",
        "a/b/c",
        "a/b/c/deep",
        "link",
        "pipe",
    ]);
    assert_eq!(
        sandbox
            .list_paths(json!({"depth": 64, "hidden": true}))
            .await?,
        (all.clone(), false)
    );
    assert_eq!(
        sandbox.list_paths(json!({"depth": 2})).await?,
        (names(&["a", "a-b", "a.txt", "a/b", "link", "pipe"]), false)
    );
    for count in [1, 4, 8] {
        assert_eq!(
            sandbox
                .list_paths(json!({"depth": 64, "hidden": true, "max_entries": count}))
                .await?,
            (all[..count].to_vec(), true),
            "{count}"
        );
    }
    assert_eq!(
        sandbox
            .list_paths(json!({"depth": 64, "hidden": true, "max_entries": 11}))
            .await?,
        (all, false)
    );
    // Entries are named relative to the given directory, and a file lists as itself.
    assert_eq!(
        sandbox.list_paths(json!({"path": "a/b/"})).await?,
        (names(&["a/b/c"]), false)
    );
    assert_eq!(
        sandbox.list_paths(json!({"path": "/workspace/a"})).await?,
        (names(&["/workspace/a/b"]), false)
    );
    assert_eq!(
        sandbox.list_paths(json!({"path": "a.txt"})).await?,
        (names(&["a.txt"]), false)
    );

    assert_eq!(
        sandbox
            .refusal_of("files:list", json!({"path": "none"}))
            .await?,
        (404, "not_found".to_owned())
    );
    for body in [
        json!({"depth": 0}),
        json!({"depth": 65}),
        json!({"max_entries": 0}),
        json!({"max_entries": 10_001}),
        json!({"path": ""}),
        json!({"path": "a\u{0}b"}),
    ] {
        assert_eq!(
            sandbox.refusal_of("files:list", body.clone()).await?,
            (400, "invalid_request".to_owned()),
            "{body}"
        );
    }

    sandbox
        .sh("mkdir many; cd many; seq 10000 11200 | xargs touch")
        .await?;
    let (many, truncated) = sandbox.list_paths(json!({"path": "many"})).await?;
    assert_eq!(
        (
            many.len(),
            many.first().map(String::as_str),
            many.last().map(String::as_str),
            truncated
        ),
        (1_000, Some("many/10000"), Some("many/10999"), true)
    );
    let whole = sandbox
        .client
        .list_files(
            sandbox.id,
            &ListRequest {
                path: Some("many".to_owned()),
                max_entries: Some(10_000),
                ..Default::default()
            },
        )
        .await?;
    assert_eq!((whole.entries.len(), whole.truncated), (1_201, false));
    Ok(())
}

#[tokio::test]
async fn directories_are_deleted_only_when_empty_or_asked_for_with_all_below() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh(
            "mkdir -p tree/a/b /tmp/outside; echo kept > /tmp/outside/file; echo x > \
             tree/a/file; ln -s /tmp/outside tree/link; mkfifo tree/pipe; mkdir empty; mkdir \
             tree/closed; touch tree/closed/x; chmod 500 tree/closed",
        )
        .await?;
    let delete = async |path: &str, recursive: bool| {
        Ok::<_, anyhow::Error>(
            Answer::of(
                sandbox
                    .file(Method::DELETE, path)
                    .query(&[("recursive", recursive)]),
            )
            .await?
            .outcome(),
        )
    };
    assert_eq!(delete("tree", false).await?, (409, "not_empty".to_owned()));
    assert_eq!(delete("empty", false).await?.0, 204);
    assert_eq!(
        delete("tree/a/file/", true).await?,
        (409, "not_a_directory".to_owned())
    );
    // Deleting a link keeps its target.
    assert_eq!(
        delete("tree", true).await?.0,
        204,
        "{}",
        sandbox.sh("find tree").await?
    );
    assert_eq!(sandbox.sh("ls -A; cat /tmp/outside/file").await?, "kept\n");

    // Deeper than the maximum path length and the limit of open files.
    sandbox
        .sh("cd /tmp && for i in $(seq 1500); do mkdir d && cd d || exit 1; done")
        .await?;
    assert_eq!(delete("/tmp/d", true).await?.0, 204);
    assert_eq!(sandbox.sh("ls /tmp").await?, "outside\n");
    Ok(())
}

#[tokio::test]
async fn impossible_mkdir_and_move_calls_are_refused_by_name() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    let made = async |operation: &str, body: Value| {
        Ok::<_, anyhow::Error>(sandbox.call(operation, &body).await?.outcome())
    };
    assert_eq!(made("files:mkdir", json!({"path": "one"})).await?.0, 204);
    assert_eq!(
        made("files:mkdir", json!({"path": "one"})).await?,
        (409, "already_exists".to_owned())
    );
    assert_eq!(
        made("files:mkdir", json!({"path": "two/three"})).await?,
        (404, "not_found".to_owned())
    );
    for _ in 0..2 {
        assert_eq!(
            made("files:mkdir", json!({"path": "two/three", "parents": true}))
                .await?
                .0,
            204
        );
    }
    sandbox.write("file", "content").await?;
    assert_eq!(
        made("files:mkdir", json!({"path": "file", "parents": true})).await?,
        (409, "already_exists".to_owned())
    );
    assert_eq!(
        made(
            "files:mkdir",
            json!({"path": "file/below", "parents": true})
        )
        .await?,
        (409, "not_a_directory".to_owned())
    );
    assert_eq!(
        made("files:mkdir", json!({"path": "/etc/x"})).await?,
        (403, "permission_denied".to_owned())
    );
    assert_eq!(
        made("files:mkdir", json!({"path": "n".repeat(300)})).await?,
        (400, "invalid_request".to_owned())
    );

    let moved = async |from: &str, to: &str, overwrite: bool| {
        made(
            "files:move",
            json!({"from": from, "to": to, "overwrite": overwrite}),
        )
        .await
    };
    sandbox.write("other", "other").await?;
    assert_eq!(
        moved("file", "other", false).await?,
        (409, "already_exists".to_owned())
    );
    assert_eq!(
        moved("missing", "x", false).await?,
        (404, "not_found".to_owned())
    );
    assert_eq!(
        moved("file", "nowhere/x", false).await?,
        (404, "not_found".to_owned())
    );
    assert_eq!(
        moved("file", "one", true).await?,
        (409, "not_a_file".to_owned())
    );
    assert_eq!(
        moved("two", "two/three/two", false).await?,
        (400, "invalid_request".to_owned())
    );
    assert_eq!(
        moved("file", "/etc/x", false).await?,
        (403, "permission_denied".to_owned())
    );
    assert_eq!(
        moved("/workspace", "/tmp/x", false).await?,
        (403, "permission_denied".to_owned())
    );
    assert_eq!(
        moved("one", "/tmp/one", false).await?,
        (400, "invalid_request".to_owned()),
        "a directory moved to another file system"
    );
    assert_eq!(
        sandbox.sh("find . | sort; cat file other").await?,
        ".\n./file\n./one\n./other\n./two\n./two/three\ncontentother"
    );

    assert_eq!(moved("file", "other", true).await?.0, 204);
    assert_eq!(moved("two", "renamed", false).await?.0, 204);
    assert_eq!(moved("other", "/tmp/far", false).await?.0, 204);
    assert_eq!(
        sandbox.sh("find . | sort; cat /tmp/far").await?,
        ".\n./one\n./renamed\n./renamed/three\ncontent"
    );
    Ok(())
}
