//! Watches: changes of files as events.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    SessionEnd,
    file_limits::{MAX_PENDING_CHANGES, MAX_WATCHED_DIRECTORIES, MAX_WATCHES},
};
use cynode_tests::{Answer, eventually};
use http::Method;
use reqwest::{RequestBuilder, Response};
use serde_json::Value;

use super::Sandbox;

const TIMEOUT: Duration = Duration::from_secs(30);

impl Sandbox {
    fn watch_request(&self, path: &str) -> RequestBuilder {
        self.http
            .request(
                Method::GET,
                &format!("/v1/worker/sessions/{}/files:watch", self.id),
            )
            .query(&[("path", path)])
    }

    /// Opens a watch, and waits until it has begun.
    async fn watch(&self, path: &str) -> Result<Watch> {
        let response = self.watch_request(path).send().await?;
        ensure!(response.status() == 200, "{}", response.text().await?);
        let mut watch = Watch {
            response,
            text: String::new(),
        };
        let first = watch.next().await?.context("an event")?;
        ensure!(first.0 == "start", "{first:?}");
        Ok(watch)
    }
}

struct Watch {
    response: Response,
    text: String,
}

impl Watch {
    /// The next event: its name and its data; `None` at the end.
    async fn next(&mut self) -> Result<Option<(String, Value)>> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| {
                    let mut lines = event.lines();
                    lines.find_map(|line| line.strip_prefix(name).map(str::to_owned))
                };
                let (name, data) = (field("event: "), field("data: "));
                let rest = rest.to_owned();
                self.text = rest;
                if let (Some(name), Some(data)) = (name, data) {
                    return Ok(Some((name, serde_json::from_str(&data)?)));
                }
                continue;
            }
            let piece = tokio::time::timeout(TIMEOUT, self.response.chunk())
                .await
                .context("no event in time")?;
            match piece {
                Ok(Some(piece)) => self.text.push_str(std::str::from_utf8(&piece)?),
                _ => return Ok(None),
            }
        }
    }

    /// The events until a file with this name is created, as `kind path`.
    async fn until(&mut self, last: &str) -> Result<Vec<String>> {
        let mut events = Vec::new();
        loop {
            let (kind, data) = self.next().await?.context("the watch has ended")?;
            let path = data["path"].as_str().context("a path")?;
            if path.ends_with(last) {
                return Ok(events);
            }
            ensure!(data["kind"] == kind.as_str(), "{kind}: {data}");
            let from = data["from"].as_str().map(|from| format!(" from {from}"));
            events.push(format!("{kind} {path}{}", from.unwrap_or_default()));
        }
    }
}

#[tokio::test]
async fn changes_below_a_directory_are_reported_once_each() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh("mkdir -p src/deep outside; echo 1 > src/kept; echo 1 > src/deep/gone; echo 1 > src/old")
        .await?;
    let mut watch = sandbox.watch("src").await?;
    sandbox
        .sh(
            "cd src; for i in 1 2 3 4 5 6 7 8 9; do echo $i >> new; done; echo 2 >> kept; \
             rm deep/gone; mv old renamed; mv kept ../outside/; echo 3 > ../outside/ignored",
        )
        .await?;
    sandbox.sh("echo > src/last").await?;
    let events: BTreeSet<String> = watch.until("last").await?.into_iter().collect();
    let expected = [
        "created src/new",
        "deleted src/deep/gone",
        "deleted src/kept",
        "moved src/renamed from src/old",
    ];
    assert_eq!(events, expected.map(str::to_owned).into());

    // What arrives in a new directory counts too, however fast.
    sandbox
        .sh("mkdir -p src/a/b/c; echo 1 > src/a/b/c/file; echo > src/last2")
        .await?;
    let events = watch.until("last2").await?;
    for path in ["src/a", "src/a/b", "src/a/b/c", "src/a/b/c/file"] {
        let expected = format!("created {path}");
        assert_eq!(
            events.iter().filter(|event| **event == expected).count(),
            1,
            "{events:?}"
        );
    }
    sandbox.sh("echo 2 >> src/a/b/c/file").await?;
    let (kind, data) = watch.next().await?.context("an event")?;
    assert_eq!(
        (kind.as_str(), data["path"].as_str()),
        ("modified", Some("src/a/b/c/file"))
    );
    // A file alone, also when another takes its place.
    let mut file = sandbox.watch("/workspace/src/new").await?;
    sandbox
        .sh("echo > src/another; echo 1 > tmp; mv tmp src/new; sleep 0.2; rm src/new")
        .await?;
    let mut kinds = Vec::new();
    for _ in 0..2 {
        let (kind, data) = file.next().await?.context("an event")?;
        assert_eq!(data["path"], "/workspace/src/new");
        kinds.push(kind);
    }
    assert_eq!(kinds, ["created", "deleted"]);
    let missing = Answer::of(sandbox.watch_request("none")).await?;
    assert_eq!(missing.outcome(), (404, "not_found".to_owned()));
    Ok(())
}

#[tokio::test]
// invariant: bounded
async fn watches_are_bounded_and_say_what_they_leave_out() -> Result<()> {
    let sandbox = Sandbox::new().await?;
    sandbox
        .sh(&format!(
            "mkdir few many; cd many; seq 1 {} | xargs mkdir; cd ../few; seq 1 {} | xargs mkdir",
            MAX_WATCHED_DIRECTORIES,
            MAX_WATCHED_DIRECTORIES - 1
        ))
        .await?;
    let mut few = sandbox.watch("few").await?;
    sandbox
        .sh(&format!(
            "echo > few/{}/a; echo > few/last",
            MAX_WATCHED_DIRECTORIES - 1
        ))
        .await?;
    assert_eq!(
        few.until("last").await?,
        [format!("created few/{}/a", MAX_WATCHED_DIRECTORIES - 1)]
    );
    let mut many = sandbox.watch("many").await?;
    let (kind, _) = many.next().await?.context("an event")?;
    assert_eq!(kind, "overflow");

    // A burst of more changes than wait to be sent is one overflow.
    sandbox
        .sh(&format!(
            "mkdir elsewhere; cd elsewhere; seq 1 {} | xargs touch",
            MAX_PENDING_CHANGES + 1
        ))
        .await?;
    let mut burst = sandbox.watch("few").await?;
    sandbox.sh("mv elsewhere few/elsewhere").await?;
    let mut kinds = Vec::new();
    while kinds.last().is_none_or(|kind| kind != "overflow") {
        kinds.push(burst.next().await?.context("an event")?.0);
    }
    ensure!(
        kinds.len() <= MAX_PENDING_CHANGES + 1,
        "{} events",
        kinds.len()
    );
    drop((few, many, burst));

    let mut open = Vec::new();
    eventually("closed watches are free again", TIMEOUT, async || {
        open.clear();
        for _ in 0..MAX_WATCHES {
            match sandbox.watch("few").await {
                Ok(watch) => open.push(watch),
                Err(_) => return Ok(false),
            }
        }
        Ok(true)
    })
    .await?;
    let refused = Answer::of(sandbox.watch_request("few")).await?;
    assert_eq!(refused.outcome(), (429, "too_many_requests".to_owned()));
    open.pop();
    eventually("another watch is admitted", TIMEOUT, async || {
        Ok(sandbox.watch("few").await.is_ok())
    })
    .await?;
    // All end with their session.
    sandbox
        .client
        .end_session(sandbox.id, &SessionEnd::default())
        .await?;
    for watch in &mut open {
        while watch.next().await?.is_some() {}
    }
    Ok(())
}
