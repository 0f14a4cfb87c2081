//! Searching.

use anyhow::Result;
use cynode_api::SearchResult;
use serde_json::{Value, json};

use super::Sandbox;

impl Sandbox {
    async fn search(&self, body: Value) -> Result<SearchResult> {
        let answer = self.call("files:search", &body).await?;
        assert_eq!(answer.status, 200, "{body}: {answer:?}");
        Ok(serde_json::from_slice(&answer.body)?)
    }

    async fn search_places(&self, body: Value) -> Result<Vec<String>> {
        Ok(self
            .search(body)
            .await?
            .matches
            .iter()
            .map(|found| format!("{}:{}:{}", found.path, found.line, found.column))
            .collect())
    }
}

// part of: ISC-05
#[tokio::test]
async fn a_search_finds_lines_by_expression_path_and_glob() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .write(
            "src/one.rs",
            "fn first() {}\nfn second() {\n    let needle = 1;\n    other();\n}\nfn Needle() {}\n",
        )
        .await?;
    sandbox.write("src/deep/two.rs", "// needle\r\n").await?;
    sandbox
        .write("notes.txt", "a needle, another needle\n")
        .await?;
    sandbox
        .write("binary", b"needle\n\0needle\n".to_vec())
        .await?;
    sandbox.write(".git/config", "needle\n").await?;
    sandbox
        .sh("mkfifo pipe; ln -s notes.txt link; ln -s /proc loop")
        .await?;

    let all = ["notes.txt:1:3", "src/deep/two.rs:1:4", "src/one.rs:3:9"];
    assert_eq!(
        sandbox.search_places(json!({"pattern": "needle"})).await?,
        all
    );
    assert_eq!(
        sandbox
            .search_places(json!({"pattern": "NEEDLE", "case": false}))
            .await?,
        [
            "notes.txt:1:3",
            "src/deep/two.rs:1:4",
            "src/one.rs:3:9",
            "src/one.rs:6:4"
        ]
    );
    assert_eq!(
        sandbox
            .search_places(json!({"pattern": "needle", "glob": "*.rs"}))
            .await?,
        all[1..]
    );
    assert_eq!(
        sandbox
            .search_places(json!({"pattern": "needle", "glob": "src/*.rs"}))
            .await?,
        all[2..]
    );
    assert_eq!(
        sandbox
            .search_places(json!({"pattern": "needle", "glob": "**/*.{rs,txt}", "path": "src"}))
            .await?,
        all[1..]
    );
    assert_eq!(
        sandbox
            .search_places(json!({"pattern": "needle", "path": "notes.txt"}))
            .await?,
        all[..1]
    );
    assert_eq!(
        sandbox
            .search_places(json!({"pattern": r"^fn \w+\(\) \{\}$"}))
            .await?,
        ["src/one.rs:1:1", "src/one.rs:6:1"]
    );

    let around = sandbox
        .search(json!({"pattern": "let needle", "context_lines": 2}))
        .await?;
    let found = &around.matches[0];
    assert_eq!(
        (
            found.text.as_str(),
            found.before.join("|"),
            found.after.join("|")
        ),
        (
            "    let needle = 1;",
            "fn first() {}|fn second() {".to_owned(),
            "    other();|}".to_owned()
        )
    );
    assert_eq!((around.files_searched, around.truncated), (4, false));

    let none = sandbox
        .search(json!({"pattern": "nowhere to be found"}))
        .await?;
    assert_eq!((none.matches.len(), none.truncated), (0, false));
    Ok(())
}

#[tokio::test]
// invariant: bounded
async fn a_search_is_bounded_and_reports_truncation() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh(
            "seq 1 3000 > numbers; head -c 300000 /dev/zero | tr '\\0' x > long; for i in \
             $(seq 50); do echo 1 > f$i; done",
        )
        .await?;
    let cut = sandbox
        .search(json!({"pattern": "1", "max_results": 3, "path": "numbers"}))
        .await?;
    assert_eq!(
        (
            cut.matches
                .iter()
                .map(|found| found.line)
                .collect::<Vec<_>>(),
            cut.truncated
        ),
        (vec![1, 10, 11], true)
    );
    let default = sandbox.search(json!({"pattern": "."})).await?;
    assert_eq!((default.matches.len(), default.truncated), (1_000, true));
    let exact = sandbox
        .search(json!({"pattern": "^1$", "max_results": 51}))
        .await?;
    assert_eq!((exact.matches.len(), exact.truncated), (51, false));
    let long = sandbox
        .search(json!({"pattern": "x+", "path": "long"}))
        .await?;
    assert_eq!(long.matches[0].text.len(), 2_048);

    for (body, named) in [
        (json!({"pattern": "("}), "pattern"),
        (json!({"pattern": ""}), "pattern"),
        (json!({"pattern": "(a{1000}){1000}"}), "pattern"),
        (json!({"pattern": "x".repeat(5_000)}), "pattern"),
        (json!({"pattern": "x", "glob": "["}), "glob"),
        (
            json!({"pattern": "x", "context_lines": 21}),
            "context_lines",
        ),
        (json!({"pattern": "x", "max_results": 0}), "max_results"),
        (json!({"pattern": "x", "path": "a\u{0}"}), "path"),
    ] {
        let answer = sandbox.call("files:search", &body).await?;
        let problem = answer.problem()?;
        assert!(
            answer.status == 400 && problem.detail.contains(named),
            "{named}: {problem:?}"
        );
    }
    assert_eq!(
        sandbox
            .call("files:search", &json!({"pattern": "x", "path": "none"}))
            .await?
            .outcome(),
        (404, "not_found".to_owned())
    );
    sandbox.sh("mkfifo pipe").await?;
    assert_eq!(
        sandbox
            .call("files:search", &json!({"pattern": "x", "path": "pipe"}))
            .await?
            .outcome(),
        (409, "not_a_file".to_owned())
    );
    Ok(())
}
