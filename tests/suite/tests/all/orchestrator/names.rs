//! Names of sessions, parts of ids, and the session of a directory.

use std::{collections::BTreeSet, ffi::OsStr, path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    ErrorCode, Retry, Session, SessionEnd, SessionId, SessionPatch, SessionState, TokenCreate,
    TokenKind, UserSessionCreate, WorkspaceDisposal, is_session_name,
};
use cynode_client::{Error, UserClient};
use serde_json::{Value, json};

use super::simulated::{ONE, SimulatedFleet};
use crate::cli::{CommandResult, cynode, run};

const TIMEOUT: Duration = Duration::from_secs(30);

/// A request for a session with a name.
fn named(name: &str) -> UserSessionCreate {
    UserSessionCreate {
        name: Some(name.to_owned()),
        ..Default::default()
    }
}

fn is_in_use(result: &Result<Session, Error>) -> bool {
    result
        .as_ref()
        .is_err_and(|error| error.is(ErrorCode::NameInUse) && error.status() == Some(409))
}

fn keep() -> SessionEnd {
    SessionEnd {
        workspace: Some(WorkspaceDisposal::Keep),
        ..Default::default()
    }
}

/// The client of a new user.
async fn other_user(fleet: &SimulatedFleet, name: &str) -> Result<UserClient> {
    let user = cynode_api::UserCreate {
        name: name.to_owned(),
        ..Default::default()
    };
    fleet.client.create_user(&user).await?;
    let token = fleet
        .client
        .create_token(&TokenCreate {
            version: None,
            kind: TokenKind::User,
            user: Some(name.to_owned()),
            project_id: None,
            task_ids: Vec::new(),
            job_id: None,
            session_id: None,
            expires_in_seconds: None,
        })
        .await?;
    Ok(UserClient::new(&fleet.orchestrator.url()?, &token.token)?)
}

/// A response of the user API: its status and its body.
async fn get(fleet: &SimulatedFleet, path: &str) -> Result<(u16, Value)> {
    let answer = reqwest::Client::builder()
        .no_proxy()
        .timeout(TIMEOUT)
        .build()?
        .get(format!("{}{path}", fleet.orchestrator.url()?))
        .bearer_auth(fleet.orchestrator.token()?)
        .send()
        .await?;
    Ok((answer.status().as_u16(), answer.json().await?))
}

impl SimulatedFleet {
    fn cli(&self, directory: &Path, arguments: &[impl AsRef<OsStr>]) -> Result<CommandResult> {
        run(self.cli_command(directory)?.args(arguments), b"")
    }

    fn cli_command(&self, directory: &Path) -> Result<Command> {
        let mut command = cynode(&self.control_plane.world)?;
        command
            .env("CYNODE_URL", self.orchestrator.url()?)
            .env("CYNODE_TOKEN", self.orchestrator.token()?)
            .current_dir(directory);
        Ok(command)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_about_a_session_has_its_name() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let _node = fleet.node("node", &[ONE]).await?;
    let client = fleet.client.sessions();
    let made = fleet.session(ONE).await?;
    let name = made.name.clone().context("a generated name")?;
    assert!(is_session_name(&name), "{name}");
    let id = made.session_id;
    let patch = SessionPatch {
        max_lifetime_seconds: Some(600),
        ..Default::default()
    };
    let answers = [
        client.get_session(id).await?,
        client.patch_session(id, &patch).await?,
        client.end_session(id, &keep()).await?,
        client.get_session(id).await?,
        client.resume_session(id).await?,
        client.get_session(id).await?,
        client
            .list_sessions(&cynode_client::SessionFilter::default())
            .await?[0]
            .clone(),
    ];
    for answer in &answers {
        assert_eq!(answer.name.as_ref(), Some(&name), "{answer:?}");
    }
    // The node's reports come every second and don't remove the name, nor look like changes.
    let updated = || {
        fleet.control_plane.postgres.query(&format!(
            "select updated_at from sessions where session_id = '{id}'"
        ))
    };
    let before = updated()?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(client.get_session(id).await?.name, Some(name));
    assert_eq!(updated()?, before);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_is_unique_among_the_live_sessions_of_its_owner() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let _node = fleet.node("node", &[ONE]).await?;
    let client = fleet.client.sessions();
    let first = client.create_user_session(&named("my-app")).await?;
    assert_eq!(first.name.as_deref(), Some("my-app"));
    let taken = client.create_user_session(&named("my-app")).await;
    assert!(is_in_use(&taken), "{taken:?}");
    let ann = other_user(&fleet, "ann").await?;
    let theirs = ann.sessions().create_user_session(&named("my-app")).await?;
    assert_eq!(theirs.name.as_deref(), Some("my-app"));

    // An end frees the name; then the first session can't take it back.
    client.end_session(first.session_id, &keep()).await?;
    let second = client.create_user_session(&named("my-app")).await?;
    let resumed = client.resume_session(first.session_id).await;
    assert!(is_in_use(&resumed), "{resumed:?}");
    assert_eq!(
        client.get_session(first.session_id).await?.state,
        SessionState::Ended,
        "a refused resume has no effect"
    );
    client
        .end_session(second.session_id, &SessionEnd::default())
        .await?;
    let resumed = client.resume_session(first.session_id).await?;
    assert_eq!(
        (resumed.state, resumed.name.as_deref()),
        (SessionState::Running, Some("my-app"))
    );

    for good in ["g-1", &format!("x-{}", "y".repeat(61))] {
        client.create_user_session(&named(good)).await?;
    }
    for bad in [
        "",
        "a-",
        "g1",
        "otter",
        "dead-beef",
        "Brave-otter",
        "brave otter",
        "-x-y",
        "x-y-",
        &format!("x-{}", "y".repeat(62)),
    ] {
        let refused = client.create_user_session(&named(bad)).await;
        assert!(
            refused
                .as_ref()
                .is_err_and(|error| error.is(ErrorCode::InvalidRequest)),
            "{bad}: {refused:?}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_create_is_the_same_session_with_or_without_a_name() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let _node = fleet.node("node", &[ONE]).await?;
    let client = fleet.client.sessions();
    for name in [None, Some("my-app".to_owned())] {
        let request = UserSessionCreate {
            session_id: Some(SessionId::generate()),
            name,
            ..Default::default()
        };
        let (one, other) = tokio::join!(
            client.create_user_session(&request),
            client.create_user_session(&request)
        );
        let (one, other) = (one?, other?);
        assert_eq!(
            (one.session_id, &one.name),
            (other.session_id, &other.name),
            "{request:?}"
        );
        let again = client.create_user_session(&request).await?;
        assert_eq!((again.session_id, again.name), (one.session_id, one.name));
        let renamed = UserSessionCreate {
            name: Some("another-name".to_owned()),
            ..request
        };
        let refused = client.create_user_session(&renamed).await;
        assert!(
            refused
                .as_ref()
                .is_err_and(|error| error.is(ErrorCode::SessionIdInUse)),
            "{refused:?}"
        );
    }
    // Of so many pairs of words some collide; no create fails for it.
    let mut names = BTreeSet::new();
    for _ in 0..150 {
        let session = fleet.session(ONE).await?;
        ensure!(
            names.insert(session.name.clone().context("a name")?),
            "two sessions are named {:?}",
            session.name
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_session_comes_back_without_a_name_that_was_taken_meanwhile() -> Result<()> {
    let fleet = SimulatedFleet::start(&[("node_lost_after", "3")]).await?;
    let first = fleet.node("first", &[ONE]).await?;
    let client = fleet.client.sessions();
    let lost = client
        .create_user_session(&named("my-app"))
        .await?
        .session_id;
    let unnamed = fleet.session(ONE).await?;
    first.cut_off(true);
    fleet.wait_for_session(lost, SessionState::Lost).await?;
    let _second = fleet.node("second", &[ONE]).await?;
    let taken = client.create_user_session(&named("my-app")).await?;
    first.cut_off(false);
    fleet.wait_for_session(lost, SessionState::Running).await?;
    assert_eq!(client.get_session(lost).await?.name, None);
    assert_eq!(
        client.get_session(taken.session_id).await?.name.as_deref(),
        Some("my-app")
    );
    let other = client.get_session(unnamed.session_id).await?;
    assert_eq!(other.name, unnamed.name, "its name was free");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_are_filtered_by_name_and_part_of_the_id_in_both_orders() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let _node = fleet.node("node", &[ONE]).await?;
    let client = fleet.client.sessions();
    let id = |number: u8| format!("01890000-0000-7000-8000-0000000abc{number:02x}");
    for number in 1..=40 {
        let request = UserSessionCreate {
            session_id: Some(id(number).parse()?),
            name: (number == 7).then(|| "my-app".to_owned()),
            ..Default::default()
        };
        client.create_user_session(&request).await?;
    }
    let ids = |page: &Value, field: &str| -> Vec<String> {
        page["items"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|item| item[field].as_str().unwrap_or_default().to_owned())
            .collect()
    };
    let sessions = async |query: &str| -> Result<Vec<String>> {
        let (status, page) = get(&fleet, &format!("/v1/sessions?{query}")).await?;
        ensure!(status == 200, "{query}: {page}");
        Ok(ids(&page, "session_id"))
    };
    assert_eq!(sessions("name=my-app").await?, [id(7)]);
    assert_eq!(sessions("name=no-such").await?, Vec::<String>::new());
    assert_eq!(sessions("id_part=abc07").await?, [id(7)]);
    assert_eq!(sessions(&format!("id_part={}", id(9))).await?, [id(9)]);
    assert_eq!(
        sessions("id_part=0abc0&limit=3").await?,
        [id(1), id(2), id(3)]
    );
    assert_eq!(
        sessions("id_part=0abc0&limit=2&order=newest").await?,
        [id(15), id(14)]
    );
    assert_eq!(sessions("state=ended,failed").await?, Vec::<String>::new());
    assert_eq!(sessions("state=running,ended&limit=1").await?, [id(1)]);

    // Pages in reverse order are complete.
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let path = format!("/v1/sessions?order=newest&limit=7{cursor}");
        let (_, page) = get(&fleet, &path).await?;
        seen.extend(ids(&page, "session_id"));
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen, (1..=40).rev().map(id).collect::<Vec<_>>());

    for list in [
        "sessions?",
        "jobs?",
        "tasks?",
        "tokens?",
        "projects?",
        "users?",
        "groups?",
        "nodes?",
        "images?",
        &format!(
            "artifacts?task_id={}&",
            client.get_session(id(1).parse()?).await?.task_id
        ),
    ] {
        for bad in ["", "g", "%25", "_", "ABC", "a%00", &"0".repeat(37)] {
            let (status, body) = get(&fleet, &format!("/v1/{list}id_part={bad}")).await?;
            assert!(
                status == 400 && body["detail"].to_string().contains("id_part"),
                "{list} {bad}: {status} {body}"
            );
        }
        let whole = "f".repeat(36);
        let (status, body) = get(&fleet, &format!("/v1/{list}id_part={whole}")).await?;
        assert!(
            status == 200 && body["items"] == json!([]),
            "{list}: {body}"
        );
        let (status, _) = get(&fleet, &format!("/v1/{list}order=sideways")).await?;
        assert_eq!(status, 400, "{list}");
    }
    for bad in ["x", "a%00-b", "dead-beef"] {
        let (status, body) = get(&fleet, &format!("/v1/sessions?name={bad}")).await?;
        assert_eq!(status, 400, "{bad}: {body}");
    }
    // Every kind of object is found by the end of its id.
    fleet.job(ONE, "true", Retry::Never).await?;
    for (list, field) in [
        ("jobs", "job_id"),
        ("tasks", "id"),
        ("tokens", "id"),
        ("users", "id"),
        ("nodes", "id"),
        ("images", "id"),
    ] {
        let (_, page) = get(&fleet, &format!("/v1/{list}")).await?;
        let one = ids(&page, field).pop().with_context(|| list.to_owned())?;
        let (_, page) = get(&fleet, &format!("/v1/{list}?id_part={}", &one[24..])).await?;
        assert_eq!(ids(&page, field), [one], "{list}");
    }

    // A filter shows nobody more than the list does.
    let ann = other_user(&fleet, "ann").await?;
    for query in [("name", "my-app".to_owned()), ("id_part", id(7))] {
        let seen = ann.newest::<Session>(vec![query], 10, |_| true).await?;
        assert!(seen.items.is_empty(), "{seen:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_take_a_name_or_any_unique_part_of_an_id() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let _node = fleet.node("node", &[ONE]).await?;
    let here = fleet.control_plane.world.directory().to_owned();
    let cli = |arguments: &[&str]| fleet.cli(&here, arguments);
    let made = cli(&["session", "create", "--name", "my-app"])?;
    assert!(made.stderr.contains("name my-app"), "{made:?}");
    let id = made.success()?.trim_end().to_owned();
    let taken = cli(&["session", "create", "--name", "my-app"])?;
    assert_eq!(taken.failure(), (64, "name_in_use".to_owned()));
    let id_of = |text: &str| -> Result<Value> {
        Ok(cli(&["session", "show", text, "--output", "json"])?.json()?["session_id"].clone())
    };
    for text in [
        "my-app",
        &id[28..],
        &id[20..30],
        &id.to_uppercase()[24..],
        &id,
    ] {
        assert_eq!(id_of(text)?, id, "{text}");
    }
    let shown = cli(&["session", "show", "my-app"])?.success()?;
    assert!(shown.contains("name        my-app"), "{shown}");

    for (text, code) in [
        ("no-such", "session_not_found"),
        ("0123456789abcdef", "session_not_found"),
    ] {
        let missing = cli(&["session", "show", text])?;
        assert_eq!(missing.failure(), (64, code.to_owned()), "{text}");
        assert!(missing.stderr.contains("remedy:"), "{missing:?}");
    }
    // Twelve sessions fit: the error lists ten of them.
    let mut others = Vec::new();
    for _ in 0..11 {
        others.push(fleet.session(ONE).await?);
    }
    let ambiguous = cli(&["session", "show", "7"])?;
    assert_eq!(ambiguous.failure(), (64, "ambiguous".to_owned()));
    let newest = others.last().context("a session")?;
    let candidate = format!(
        "{} ({})",
        newest.name.as_deref().unwrap_or_default(),
        &newest.session_id.to_string()[28..]
    );
    assert!(
        ambiguous.stderr.contains("more than 10")
            && ambiguous.stderr.contains(&candidate)
            && ambiguous
                .stderr
                .lines()
                .next()
                .unwrap_or_default()
                .matches(" (")
                .count()
                == 10,
        "{ambiguous:?}"
    );

    // The name of an ended session means the newest that had it.
    cli(&["session", "end", "my-app"])?.success()?;
    let again = cli(&["session", "create", "--name", "my-app"])?.success()?;
    assert_eq!(id_of("my-app")?, again.trim_end());
    cli(&["session", "end", "my-app"])?.success()?;
    assert_eq!(id_of("my-app")?, again.trim_end());

    // The workspace that a session kept, which also brings its task.
    let keeper = cli(&[
        "session",
        "create",
        "--name",
        "my-keeper",
        "--output",
        "json",
    ])?
    .json()?;
    cli(&["session", "end", "--keep-workspace", "my-keeper"])?.success()?;
    let keeper_id = keeper["session_id"].as_str().context("an id")?;
    for text in ["my-keeper", &keeper_id[20..]] {
        let workspace = format!("workspace:{text}");
        let next = cli(&[
            "session",
            "create",
            "--workspace",
            &workspace,
            "--output",
            "json",
        ])?
        .json()?;
        for field in ["workspace_id", "task_id"] {
            assert_eq!(next[field], keeper[field], "{text}");
        }
        let next = next["session_id"].as_str().context("an id")?;
        cli(&["session", "end", "--keep-workspace", next])?.success()?;
    }
    for bad in ["kept", "workspace:"] {
        let refused = cli(&["session", "create", "--workspace", bad])?;
        assert_eq!(refused.failure(), (64, "usage".to_owned()), "{bad}");
    }

    // A user of a policy test, and a subject of the audit trail.
    let user = cli(&["user", "create", "ada"])?;
    ensure!(user.code == Some(0), "{user:?}");
    let users = cli(&["user", "list", "--output", "json"])?.json()?;
    let id_of_user = |name: &str| {
        let items = users["items"].as_array()?;
        let user = items.iter().find(|user| user["name"] == name)?;
        user["id"].as_str().map(str::to_owned)
    };
    let ada = id_of_user("ada").context("a user")?;
    for text in ["ada", &ada, &ada[26..]] {
        let verdict = cli(&[
            "policy",
            "test",
            "--user",
            text,
            "--action",
            "node.drain",
            "--output",
            "json",
        ])?;
        let verdict: Value = serde_json::from_slice(&verdict.stdout)?;
        assert_eq!(verdict["allowed"], false, "{text}: {verdict}");
    }
    let admin = id_of_user("admin").context("a user")?;
    for text in ["admin", &admin, &admin[26..]] {
        let records = cli(&[
            "audit",
            "tail",
            "--subject",
            text,
            "--action",
            "user.create",
        ])?;
        ensure!(records.success()?.contains("user.create"), "{text}");
    }

    // Other kinds.
    let job = fleet
        .job(ONE, "echo from the job", Retry::Never)
        .await?
        .to_string();
    fleet
        .wait_for_job(job.parse()?, cynode_api::JobState::Completed)
        .await?;
    assert_eq!(
        cli(&["job", "logs", &job[26..]])?.success()?,
        "from the job\n"
    );
    let project = cli(&["project", "create", "Big things"])?.success()?;
    let task = cli(&["task", "create", "write", "--project", "Big things"])?.success()?;
    let task = task.trim_end();
    for text in ["write", &task[26..]] {
        let shown = cli(&["task", "show", text, "--output", "json"])?.json()?;
        assert_eq!(
            (&shown["id"], &shown["project_id"]),
            (&json!(task), &json!(project.trim_end()))
        );
    }
    fs_err::write(here.join("file"), "content")?;
    let artifact = cli(&["artifact", "put", "--task", "write", "file"])?.success()?;
    let part = &artifact.trim_end()[26..];
    for name in [part, "file"] {
        let got = cli(&["artifact", "get", "--task", "write", name])?.success()?;
        assert_eq!(got, "content", "{name}");
    }
    let node = cli(&["node", "show", "node", "--output", "json"])?.json()?["id"].clone();
    let node = node.as_str().context("an id")?;
    assert_eq!(
        cli(&["node", "show", &node[26..], "--output", "json"])?.json()?["name"],
        "node"
    );
    let token = cli(&["token", "list", "--output", "json"])?.json()?["items"][0]["id"].clone();
    let token = token.as_str().context("an id")?;
    assert_eq!(
        cli(&["token", "revoke", "--", &token[26..37.min(token.len())]])?.code,
        Some(0)
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_has_a_session() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let _node = fleet.node("node", &[ONE]).await?;
    let top = fleet.control_plane.world.directory().join("work");
    let (inner, elsewhere) = (top.join("a/b"), top.with_file_name("elsewhere"));
    for directory in [&inner, &elsewhere] {
        fs_err::create_dir_all(directory)?;
    }
    let none = fleet.cli(&top, &["session", "exec", "--", "echo", "x"])?;
    assert_eq!(none.failure(), (64, "usage".to_owned()));
    assert!(
        none.stderr.contains("no session belongs to this directory")
            && none.stderr.contains("cynode session create"),
        "{none:?}"
    );
    let id = fleet.cli(&top, &["session", "create"])?.success()?;
    let id = id.trim_end();
    for directory in [&top, &inner] {
        for arguments in [
            &["session", "exec", "--", "echo", "here"][..],
            &["session", "exec", ".", "echo", "here"],
            &["session", "exec", id, "--", "echo", "here"],
            &["session", "exec", id, "echo", "here"],
        ] {
            assert_eq!(
                fleet.cli(directory, arguments)?.success()?,
                "here\n",
                "{arguments:?}"
            );
        }
        let shown = fleet
            .cli(directory, &["session", "show", "--output", "json"])?
            .json()?;
        assert_eq!(shown["session_id"], id);
    }
    // A word before the dashes is a session, not a command.
    let mistaken = fleet.cli(&top, &["session", "exec", "echo", "here"])?;
    assert_eq!(mistaken.failure(), (64, "session_not_found".to_owned()));
    assert_eq!(fleet.cli(&elsewhere, &["session", "show"])?.code, Some(64));
    fs_err::write(top.join("file"), "content")?;
    fleet
        .cli(&top, &["session", "cp", "file", ":copy"])?
        .success()?;
    assert_eq!(
        fleet
            .cli(&inner, &["session", "cp", ":copy", "-"])?
            .success()?,
        "content"
    );

    // A directory below can have its own; an end forgets it.
    let other = fleet.cli(&inner, &["session", "create"])?.success()?;
    let shown = |directory: &Path| -> Result<Value> {
        Ok(fleet
            .cli(directory, &["session", "show", "--output", "json"])?
            .json()?["session_id"]
            .clone())
    };
    assert_eq!(
        (shown(&inner)?, shown(&top)?),
        (json!(other.trim_end()), json!(id))
    );
    fleet.cli(&inner, &["session", "end"])?.success()?;
    assert_eq!(shown(&inner)?, id);
    fleet.cli(&inner, &["session", "end"])?.success()?;
    assert_eq!(
        fleet.cli(&top, &["session", "end"])?.failure(),
        (64, "usage".to_owned())
    );
    // Without a home nothing is remembered, and nothing fails.
    let homeless = run(
        fleet
            .cli_command(&top)?
            .env_remove("XDG_STATE_HOME")
            .env_remove("HOME")
            .args(["session", "create"]),
        b"",
    )?;
    assert_eq!(homeless.code, Some(0), "{homeless:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_show_what_runs_first_and_hide_what_has_ended() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let _node = fleet.node("node", &[ONE]).await?;
    let here = fleet.control_plane.world.directory().to_owned();
    let cli = |arguments: &[&str]| fleet.cli(&here, arguments);
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(fleet.session(ONE).await?.session_id);
    }
    for id in &ids[2..] {
        fleet
            .client
            .sessions()
            .end_session(*id, &SessionEnd::default())
            .await?;
    }
    let listed = |arguments: &[&str]| -> Result<Vec<String>> {
        let list = cli(&[&["session", "list", "--output", "json"], arguments].concat())?.json()?;
        let items = list["items"].as_array().context("items")?.clone();
        Ok(items
            .iter()
            .map(|item| item["session_id"].as_str().unwrap_or_default().to_owned())
            .collect())
    };
    let id = |number: usize| ids[number].to_string();
    assert_eq!(listed(&[])?, [id(1), id(0)]);
    assert_eq!(listed(&["--all"])?, [id(1), id(0), id(3), id(2)]);
    assert_eq!(listed(&["--state", "ended"])?, [id(3), id(2)]);
    assert_eq!(listed(&["--limit", "1"])?, [id(1)]);
    assert_eq!(listed(&["--all", "--limit", "3"])?, [id(1), id(0), id(3)]);
    let cut = cli(&["session", "list", "--limit", "1"])?;
    assert!(cut.stderr.contains("--limit"), "{cut:?}");
    assert!(cli(&["session", "list", "--limit", "2"])?.stderr.is_empty());
    for bad in ["0", "100001", "x"] {
        assert_eq!(
            cli(&["session", "list", "--limit", bad])?.failure(),
            (64, "usage".to_owned())
        );
    }

    let sleeping = fleet
        .job(
            ONE,
            &format!("sleep 600; echo {}", "long ".repeat(100)),
            Retry::Never,
        )
        .await?;
    let ended = fleet.job(ONE, "echo brief", Retry::Never).await?;
    fleet
        .wait_for_job(sleeping, cynode_api::JobState::InProgress)
        .await?;
    fleet
        .wait_for_job(ended, cynode_api::JobState::Completed)
        .await?;
    let jobs = cli(&["job", "list"])?.success()?;
    assert!(
        jobs.contains(&sleeping.to_string())
            && jobs.contains("sh -c sleep 600; echo long")
            && jobs.contains('…')
            && !jobs.contains(&ended.to_string()),
        "{jobs}"
    );
    let all = cli(&["job", "list", "--all"])?.success()?;
    let place = |id: &str| all.find(id).with_context(|| format!("{id} in {all}"));
    assert!(
        place(&sleeping.to_string())? < place(&ended.to_string())?,
        "{all}"
    );
    assert!(all.contains("sh -c echo brief"), "{all}");
    let shown = cli(&["job", "show", &ended.to_string(), "--output", "json"])?.json()?;
    assert_eq!(shown["command"], json!(["sh", "-c", "echo brief"]));

    // On a terminal, rows fit and ids are short; elsewhere and with --wide, they are whole.
    for (columns, arguments) in [
        (60, &["session", "list"][..]),
        (70, &["job", "list", "--all"]),
    ] {
        let printed = at_terminal(&fleet, &here, columns, arguments)?;
        assert!(printed.lines().count() >= 3, "{printed}");
        assert!(
            printed.lines().all(|line| line.chars().count() <= columns),
            "{printed}"
        );
        let shown = if arguments[0] == "job" {
            ended.to_string()
        } else {
            id(1)
        };
        assert!(
            printed.contains(&shown[28..]) && !printed.contains(&shown),
            "{printed}"
        );
    }
    let wide = at_terminal(&fleet, &here, 60, &["session", "list", "--wide"])?;
    assert!(wide.contains(&id(1)), "{wide}");
    Ok(())
}

/// What a command prints on a terminal with so many columns.
fn at_terminal(
    fleet: &SimulatedFleet,
    directory: &Path,
    columns: usize,
    arguments: &[&str],
) -> Result<String> {
    const SCRIPT: &str = r#"
import fcntl, os, pty, struct, sys, termios
pid, fd = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, int(sys.argv[1]), 0, 0))
    os.execv(sys.argv[2], sys.argv[2:])
while True:
    try:
        piece = os.read(fd, 65536)
    except OSError:
        break
    if not piece:
        break
    os.write(1, piece)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;
    let model = fleet.cli_command(directory)?;
    let mut command = Command::new("python3");
    for (name, value) in model.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let printed = run(
        command
            .args(["-c", SCRIPT, &columns.to_string()])
            .arg(model.get_program())
            .args(arguments)
            .current_dir(directory),
        b"",
    )?
    .success()?;
    Ok(printed.replace("\r\n", "\n"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_detached_command_is_read_attached_to_and_ended() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let _node = fleet.node("node", &[ONE]).await?;
    let here = fleet.control_plane.world.directory().to_owned();
    let cli = |arguments: &[&str]| fleet.cli(&here, arguments);
    cli(&["session", "create"])?.success()?;
    let none = cli(&["session", "logs"])?;
    assert_eq!(none.failure(), (64, "exec_not_found".to_owned()));
    let first = cli(&[
        "session",
        "exec",
        "--detach",
        "--",
        "sh",
        "-c",
        "echo one; exit 3",
    ])?
    .success()?;
    let first = first.trim_end();
    cynode_tests::eventually("it has ended", TIMEOUT, async || {
        Ok(cli(&["session", "attach", ".", first])?.code == Some(3))
    })
    .await?;
    assert_eq!(cli(&["session", "logs"])?.success()?, "one\n");
    let second = cli(&[
        "session",
        "exec",
        "--detach",
        "--",
        "sh",
        "-c",
        "echo two; sleep 600",
    ])?
    .success()?;
    let second = second.trim_end();
    cynode_tests::eventually("it prints", TIMEOUT, async || {
        Ok(cli(&["session", "logs"])?.text() == "two\n")
    })
    .await?;
    for (exec, printed) in [
        (first, "one\n"),
        (&first[26..], "one\n"),
        (&second[26..], "two\n"),
    ] {
        assert_eq!(
            cli(&["session", "logs", ".", exec])?.success()?,
            printed,
            "{exec}"
        );
    }
    let page = cli(&["session", "logs", "--output", "json", ".", second])?.json()?;
    assert_eq!(page["chunks"][0]["data"], "two\n");

    cli(&["session", "kill", "--signal", "KILL"])?.success()?;
    let attached = cli(&["session", "attach", ".", second])?;
    assert_eq!(
        (attached.code, attached.text().as_str()),
        (Some(137), "two\n")
    );
    assert_eq!(cli(&["session", "logs", "-f"])?.success()?, "two\n");
    let nothing = cli(&["session", "kill"])?;
    assert_eq!(nothing.failure(), (64, "exec_not_found".to_owned()));
    cli(&["session", "kill", "--all"])?.success()?;
    assert_eq!(
        cli(&["session", "kill", "--signal", "NOPE"])?.failure(),
        (64, "usage".to_owned())
    );

    // A lone time is that of this directory's session.
    for (arguments, hours) in [
        (&["3h"][..], 3),
        (&[".", "4h"], 4),
        (&["5h", "--idle", "1h"], 5),
    ] {
        let extended = cli(&[&["session", "extend"], arguments].concat())?;
        ensure!(extended.code == Some(0), "{extended:?}");
        let shown = cli(&["session", "show", "--output", "json"])?.json()?;
        let left = time::OffsetDateTime::parse(
            shown["expires_at"].as_str().context("a time")?,
            &time::format_description::well_known::Rfc3339,
        )? - time::OffsetDateTime::now_utc();
        ensure!(
            (left - time::Duration::hours(hours)).abs() < time::Duration::minutes(5),
            "{arguments:?}: {left}"
        );
    }
    let timeless = cli(&["session", "extend", "."])?;
    assert_eq!(timeless.failure(), (64, "usage".to_owned()));
    let before = cli(&["session", "show", "--output", "json"])?.json()?["expires_at"].clone();
    let extended = cli(&["session", "extend", "--lifetime", "50h", "--idle", "2h"])?;
    assert!(
        extended.code == Some(0) && extended.stderr.contains("50h")
            || extended.stderr.contains("2d"),
        "{extended:?}"
    );
    let after = cli(&["session", "show", "--output", "json"])?.json()?["expires_at"].clone();
    assert!(after.as_str() > before.as_str(), "{before} {after}");
    assert_eq!(
        cli(&["session", "extend"])?.failure(),
        (64, "usage".to_owned())
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn projects_users_and_groups_have_commands() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let here = fleet.control_plane.world.directory().to_owned();
    let cli = |arguments: &[&str]| fleet.cli(&here, arguments);
    let json = |arguments: &[&str]| cli(&[arguments, &["--output", "json"]].concat())?.json();
    let ann = cli(&["user", "create", "ann"])?.success()?;
    cli(&["user", "create", "root", "--admin"])?.success()?;
    let ann = ann.trim_end();
    for text in ["ann", &ann[26..]] {
        assert_eq!(json(&["user", "show", text])?["id"], ann, "{text}");
    }
    // A name takes precedence over a part of an id.
    let part = &ann[26..30];
    let odd = cli(&["user", "create", part])?.success()?;
    assert_eq!(json(&["user", "show", part])?["id"], odd.trim_end());
    let list = cli(&["user", "list"])?.success()?;
    assert!(
        list.starts_with("USER") && list.contains("administrator") && list.contains("ann"),
        "{list}"
    );
    cli(&[
        "group", "create", "crew", "--member", "ann", "--member", "root",
    ])?
    .success()?;
    assert_eq!(
        json(&["group", "show", "crew"])?["members"],
        json!(["ann", "root"])
    );
    assert!(cli(&["group", "list"])?.success()?.contains("ann,root"));
    let project = cli(&[
        "project", "create", "Big", "--slug", "big", "--scope", "all",
    ])?
    .success()?;
    cli(&["project", "update", "big", "--name", "Bigger"])?.success()?;
    let shown = json(&["project", "show", "Bigger"])?;
    assert_eq!(
        (&shown["id"], &shown["scope"], &shown["slug"]),
        (&json!(project.trim_end()), &json!("all"), &json!("big"))
    );
    assert!(cli(&["project", "list"])?.success()?.contains("Bigger"));
    for missing in [
        ["user", "show", "nobody"],
        ["group", "show", "none"],
        ["project", "show", "none"],
    ] {
        assert_eq!(
            cli(&missing)?.failure(),
            (64, "not_found".to_owned()),
            "{missing:?}"
        );
    }
    assert_eq!(
        cli(&["user", "create", "ann"])?.failure(),
        (64, "already_exists".to_owned())
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_is_removed_unless_something_uses_it() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let _node = fleet
        .node("node", &[ONE, "localhost/cynode/mine:1"])
        .await?;
    let here = fleet.control_plane.world.directory().to_owned();
    let cli = |arguments: &[&str]| fleet.cli(&here, arguments);
    for version in ["1", "2"] {
        let reference = format!("localhost/cynode/mine:{version}");
        cli(&["image", "add", &reference, "--allow"])?.success()?;
    }
    let session = cli(&["session", "create", "--image", "localhost/cynode/mine:1"])?.success()?;
    for arguments in [
        &["image", "remove", "mine"][..],
        &["image", "remove", "localhost/cynode/mine:1"],
    ] {
        let used = cli(arguments)?;
        assert_eq!(used.failure(), (64, "image_in_use".to_owned()));
        assert!(used.stderr.contains("1 live sessions"), "{used:?}");
    }
    cli(&["image", "remove", "mine", "--version", "2"])?.success()?;
    let versions = cli(&["image", "show", "mine", "--output", "json"])?.json()?["versions"].clone();
    assert!(
        matches!(versions.as_array().map(Vec::as_slice), Some([one]) if one["version"] == "1"),
        "{versions}"
    );
    cli(&["session", "end", session.trim_end()])?.success()?;
    cli(&["image", "remove", "mine"])?.success()?;
    assert_eq!(
        cli(&["image", "show", "mine"])?.failure(),
        (64, "not_found".to_owned())
    );
    // What used it is still shown.
    assert_eq!(cli(&["session", "show", session.trim_end()])?.code, Some(0));
    let seeded = cli(&["image", "remove", "one"])?;
    assert_eq!(seeded.failure(), (64, "image_in_use".to_owned()));
    assert!(seeded.stderr.contains("image deny"), "{seeded:?}");

    cli(&["image", "add", "localhost/cynode/absent:1", "--allow"])?.success()?;
    let job = cli(&[
        "run",
        "--detach",
        "--image",
        "localhost/cynode/absent:1",
        "--",
        "true",
    ])?
    .success()?;
    assert_eq!(
        cli(&["image", "remove", "absent"])?.failure(),
        (64, "image_in_use".to_owned())
    );
    cli(&["job", "stop", job.trim_end()])?.success()?;
    cli(&["image", "remove", "absent"])?.success()?;
    Ok(())
}
