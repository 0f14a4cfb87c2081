//! Requests and answers in the shape of each forge's API.

use std::time::Duration;

use super::{
    super::{OpenedPull, PullDraft, open_pull},
    *,
};

const BRANCH: &str = "cynode/0192f0c1-0000-7000-8000-000000000000/fix";

const DRAFT: PullDraft<'static> = PullDraft {
    branch: BRANCH,
    target: "main",
    title: "Fix it",
    body: "Because.",
    draft: false,
};

/// A pull request of GitHub and of Gitea, as far as both have the same members.
fn pull(number: u64, project: &str, branch: &str, base: &str) -> Value {
    let side = |name: &str, project: &str| {
        serde_json::json!({
            "label": format!("org:{name}"),
            "ref": name,
            "sha": "1".repeat(40),
            "repo": {"id": 1, "name": "app", "full_name": project, "private": true},
        })
    };
    serde_json::json!({
        "id": 1, "number": number, "state": "open", "locked": false, "title": "Fix it",
        "user": {"login": "bot", "id": 2}, "body": null, "draft": false, "merged": false,
        "url": "https://forge.example/api/v3/repos/org/app/pulls/7",
        "html_url": format!("https://forge.example/org/app/pull/{number}"),
        "head": side(branch, project), "base": side(base, "org/app"),
    })
}

fn merge_request(iid: u64, source_project: u64) -> Value {
    serde_json::json!({
        "id": 155, "iid": iid, "project_id": 15, "title": "Fix it", "description": "Because.",
        "state": "opened", "merged_by": null, "target_branch": "main", "source_branch": BRANCH,
        "author": {"id": 1, "username": "bot"}, "source_project_id": source_project,
        "target_project_id": 15, "draft": false, "labels": [], "sha": "1".repeat(40),
        "web_url": format!("https://forge.example/group/sub/app/-/merge_requests/{iid}"),
    })
}

fn opened(forge: &RecordedForge, number: u64, path: &str, created: bool) -> OpenedPull {
    OpenedPull {
        pull: super::super::PullRequest {
            number,
            url: format!("http://forge.example:{}{path}", forge.port),
        },
        created,
    }
}

fn query(seen: &SeenRequest) -> Vec<(String, String)> {
    let url = Url::parse(&format!("http://x{}", seen.uri)).expect("a URL");
    url.query_pairs().into_owned().collect()
}

fn pair(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

#[tokio::test]
async fn a_pull_request_is_opened_at_github() {
    let forge = RecordedForge::start().await;
    let client = forge.connect(ForgeKind::Github);
    forge
        .says(200, "[]")
        .says(201, &pull(7, "org/app", BRANCH, "main").to_string());
    let done = open_pull(client.as_ref(), &DRAFT).await.expect("opened");
    assert_eq!(done, opened(&forge, 7, "/org/app/pull/7", true));
    let seen = forge.seen();
    let [listed, created] = seen.as_slice() else {
        panic!("{} requests", seen.len())
    };
    assert_eq!(listed.uri.path(), "/api/v3/repos/org/app/pulls");
    for expected in [
        pair("head", &format!("org:{BRANCH}")),
        pair("base", "main"),
        pair("state", "open"),
    ] {
        assert!(query(listed).contains(&expected), "{expected:?}");
    }
    assert_eq!(listed.headers["authorization"], format!("Bearer {SECRET}"));
    assert_eq!(listed.headers["accept"], "application/vnd.github+json");
    assert_eq!(listed.headers["x-github-api-version"], "2022-11-28");
    assert_eq!(created.method, Method::POST);
    assert_eq!(created.uri.path(), "/api/v3/repos/org/app/pulls");
    assert_eq!(created.body["head"], BRANCH);
    assert_eq!(created.body["base"], "main");
    assert_eq!(created.body["title"], "Fix it");
    assert_eq!(created.body["body"], "Because.");
    assert_eq!(created.body["draft"], false);
    assert_eq!(created.body["maintainer_can_modify"], false);

    // Those of forks, of other branches, and closed ones don't count.
    let mut closed = pull(5, "org/app", BRANCH, "main");
    closed["state"] = "closed".into();
    let list = serde_json::json!([
        pull(3, "evil/app", BRANCH, "main"),
        pull(4, "org/app", "other", "main"),
        closed,
        pull(6, "org/app", BRANCH, "next"),
        pull(7, "Org/App", BRANCH, "main"),
    ]);
    forge.says(200, &list.to_string());
    let done = open_pull(client.as_ref(), &DRAFT).await.expect("found");
    assert_eq!(done, opened(&forge, 7, "/org/app/pull/7", false));
}

#[tokio::test]
async fn a_draft_is_opened_where_there_are_drafts() {
    let forge = RecordedForge::start().await;
    let client = forge.connect(ForgeKind::Github);
    let draft = PullDraft {
        draft: true,
        ..DRAFT
    };
    forge.says(
        422,
        r#"{"message":"Validation Failed","errors":[{"resource":"PullRequest","code":"custom",
        "message":"Draft pull requests are not supported in this repository."}],"status":"422"}"#,
    );
    forge.says(201, &pull(7, "org/app", BRANCH, "main").to_string());
    client.create(&draft).await.expect("opened");
    let seen = forge.seen();
    assert_eq!(seen[0].body["draft"], true);
    assert_eq!(seen[1].body["draft"], false);

    let client = forge.connect(ForgeKind::Gitlab);
    forge.says(201, &merge_request(8, 15).to_string());
    client.create(&draft).await.expect("opened");
    assert_eq!(forge.seen()[0].body["title"], "Draft: Fix it");

    let client = forge.connect(ForgeKind::Gitea);
    forge.says(201, &pull(9, "org/app", BRANCH, "main").to_string());
    client.create(&draft).await.expect("opened");
    assert_eq!(forge.seen()[0].body["title"], "WIP: Fix it");
}

#[tokio::test]
async fn a_merge_request_is_opened_at_gitlab() {
    let forge = RecordedForge::start().await;
    let client = forge.connect(ForgeKind::Gitlab);
    forge.says(200, &serde_json::json!([merge_request(2, 99)]).to_string());
    forge.says(201, &merge_request(8, 15).to_string());
    let done = open_pull(client.as_ref(), &DRAFT).await.expect("opened");
    let path = "/group/sub/app/-/merge_requests/8";
    assert_eq!(done, opened(&forge, 8, path, true));
    let seen = forge.seen();
    let expected = "/api/v4/projects/group%2Fsub%2Fapp/merge_requests";
    assert_eq!(seen[0].uri.path(), expected);
    assert!(query(&seen[0]).contains(&pair("source_branch", BRANCH)));
    assert!(query(&seen[0]).contains(&pair("state", "opened")));
    assert_eq!(seen[0].headers["authorization"], format!("Bearer {SECRET}"));
    assert_eq!(seen[1].uri.path(), expected);
    assert_eq!(seen[1].body["source_branch"], BRANCH);
    assert_eq!(seen[1].body["target_branch"], "main");
    assert_eq!(seen[1].body["description"], "Because.");

    forge.says(200, &serde_json::json!([merge_request(8, 15)]).to_string());
    let done = open_pull(client.as_ref(), &DRAFT).await.expect("found");
    assert_eq!(done, opened(&forge, 8, path, false));
}

#[tokio::test]
async fn a_pull_request_is_opened_at_gitea() {
    let forge = RecordedForge::start().await;
    let client = forge.connect(ForgeKind::Gitea);
    let others = serde_json::json!([pull(1, "org/app", "other", "main")]);
    forge.says(200, &others.to_string()).says(200, "[]");
    forge.says(201, &pull(9, "org/app", BRANCH, "main").to_string());
    let done = open_pull(client.as_ref(), &DRAFT).await.expect("opened");
    assert_eq!(done, opened(&forge, 9, "/org/app/pull/9", true));
    let seen = forge.seen();
    assert_eq!(seen[0].uri.path(), "/api/v1/repos/org/app/pulls");
    assert_eq!(seen[0].headers["authorization"], format!("token {SECRET}"));
    assert!(query(&seen[1]).contains(&pair("page", "2")));
    assert_eq!(seen[2].body["head"], BRANCH);

    forge.says(200, &others.to_string());
    forge.says(
        200,
        &serde_json::json!([pull(9, "org/app", BRANCH, "main")]).to_string(),
    );
    let done = open_pull(client.as_ref(), &DRAFT).await.expect("found");
    assert_eq!(done, opened(&forge, 9, "/org/app/pull/9", false));
}

#[tokio::test]
async fn a_pull_request_that_appears_meanwhile_is_found() {
    let forge = RecordedForge::start().await;
    let client = forge.connect(ForgeKind::Gitlab);
    let exists =
        r#"{"message":["Another open merge request already exists for this source branch: !8"]}"#;
    forge.says(200, "[]").says(409, exists);
    forge.says(200, &serde_json::json!([merge_request(8, 15)]).to_string());
    let done = open_pull(client.as_ref(), &DRAFT).await.expect("found");
    assert!(!done.created && done.pull.number == 8);

    forge.says(200, "[]").says(409, exists).says(200, "[]");
    let refused = open_pull(client.as_ref(), &DRAFT)
        .await
        .expect_err("refused");
    assert!(
        refused.to_string().contains("Another open merge request"),
        "{refused}"
    );
}

#[tokio::test]
async fn refusals_of_a_forge_are_told_apart() {
    let forge = RecordedForge::start().await;
    let client = forge.connect(ForgeKind::Github);
    let find = || client.find_open(BRANCH, "main");
    let said = format!(r#"{{"message":"Bad credentials {SECRET}\u001b[31m"}}"#);
    forge.says(401, &said);
    let error = find().await.expect_err("401");
    assert!(matches!(error, ForgeError::Unauthorized(_)));
    let text = format!("{error} {error:?}");
    assert!(
        text.contains("Bad credentials") && !text.contains(SECRET),
        "{text}"
    );
    assert!(!text.contains('\u{1b}'));

    forge.says(
        403,
        r#"{"message":"Resource not accessible by personal access token"}"#,
    );
    assert!(matches!(find().await, Err(ForgeError::Unauthorized(_))));
    forge.says(404, r#"{"message":"Not Found"}"#);
    assert!(matches!(find().await, Err(ForgeError::NotFound)));
    forge.says(
        422,
        r#"{"message":"Validation Failed","errors":[{"message":"No commits"}]}"#,
    );
    let error = find().await.expect_err("422");
    assert!(error.to_string().contains("No commits"), "{error}");

    forge.says_with(429, &[("retry-after", "17")], "");
    let error = find().await.expect_err("429");
    let wait = Some(Duration::from_secs(17));
    assert!(matches!(error, ForgeError::RateLimited { retry_after } if retry_after == wait));
    let limited = [
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "99999999999"),
    ];
    forge.says_with(403, &limited, r#"{"message":"API rate limit exceeded"}"#);
    let error = find().await.expect_err("403");
    let wait = Some(Duration::from_secs(3_600));
    assert!(matches!(error, ForgeError::RateLimited { retry_after } if retry_after == wait));

    forge.says(502, "<html>bad gateway</html>");
    assert!(matches!(find().await, Err(ForgeError::Unreachable(_))));
    for body in ["", "{}", "<html>", r#"[{"number":-1}]"#, "[[]]"] {
        forge.says(200, body);
        assert!(matches!(find().await, Err(ForgeError::Answer(_))), "{body}");
    }
    let long = format!("[{}]", " ".repeat(5 * 1024 * 1024));
    forge.says(200, &long);
    assert!(matches!(find().await, Err(ForgeError::Answer(_))));
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let forge = RecordedForge::start().await;
    let other = RecordedForge::start().await;
    let client = forge.connect(ForgeKind::Github);
    let location = format!("http://127.0.0.1:{}/repos/org/app/pulls", other.port);
    forge.says_with(301, &[("location", &location)], "");
    let error = client
        .find_open(BRANCH, "main")
        .await
        .expect_err("redirected");
    assert!(matches!(error, ForgeError::Redirected));
    assert!(other.seen().is_empty(), "the other host was asked");
}

#[tokio::test]
async fn only_a_checked_address_is_dialled() {
    let forge = RecordedForge::start().await;
    let url = format!("http://127.0.0.1:{}/org/app", forge.port);
    let api = || {
        let base = Url::parse(&url)
            .expect("a URL")
            .join("/api/v1")
            .expect("a URL");
        ForgeApi::new(ForgeKind::Gitea, Url::parse(&url).expect("a URL"), &base).expect("an API")
    };
    let credential = CredentialPlaintext {
        host: "127.0.0.1".to_owned(),
        ..forge.credential()
    };
    for addresses in [&[][..], &["192.0.2.1".parse().expect("an address")]] {
        let refused = connect(api(), addresses, None, &credential);
        assert!(matches!(refused.err(), Some(ForgeError::Unreachable(_))));
    }
    let client = connect(api(), &[LOCAL], None, &credential).expect("a client");
    forge.says(200, "[]");
    assert_eq!(client.find_open(BRANCH, "main").await.expect("asked"), None);

    let free = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let mut gone = forge.clone();
    gone.port = free.local_addr().expect("an address").port();
    drop(free);
    let error = gone
        .connect(ForgeKind::Gitea)
        .find_open(BRANCH, "main")
        .await;
    assert!(
        matches!(error, Err(ForgeError::Unreachable(_))),
        "{error:?}"
    );
}
