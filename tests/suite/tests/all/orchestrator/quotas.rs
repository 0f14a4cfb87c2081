//! Quotas: who sets them, what they count, and that nobody evades them.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{SessionEnd, SessionId};
use cynode_tests::{Answer, LARGEST_LIMITS, PROMISED_MEMORY_BYTES, eventually};
use http::Method;
use serde_json::{Value, json};

use super::{
    cluster::text,
    policy::{PolicyFixture, object, refusal},
};

const TIMEOUT: Duration = Duration::from_secs(30);
const SANDBOXES: &str = "quota.sandboxes";
const SECONDS: &str = "quota.cpu_seconds";
const BYTES: &str = "quota.artifact_bytes";
const MEMORY: &str = "quota.sandbox_memory_bytes";
const PROCESSORS: &str = "quota.sandbox_cpus";
const PROCESSES: &str = "quota.sandbox_pids";
const DISK: &str = "quota.sandbox_disk_bytes";
const OPEN_FILES: &str = "quota.sandbox_nofile";

impl PolicyFixture {
    async fn quota(&self, scope: &str, id: &str, key: &str, most: u64) -> Result<()> {
        let answer = self
            .call(
                &self.admin,
                Method::PUT,
                &format!("/v1/preferences/{scope}/{id}/{key}"),
                &json!({"value": most}),
            )
            .await?;
        object(&answer).map(drop)
    }

    async fn request_session(&self, token: &str, body: Value) -> Result<Answer> {
        self.call(token, Method::POST, "/v1/sessions", &body).await
    }

    /// Creates a session, which must fit the quota.
    async fn fits(&self, token: &str, body: Value) -> Result<String> {
        text(&object(&self.request_session(token, body).await?)?["session_id"])
    }

    async fn end(&self, token: &str, session: &str) -> Result<()> {
        object(
            &self
                .call(
                    token,
                    Method::POST,
                    &format!("/v1/sessions/{session}/end"),
                    &json!({}),
                )
                .await?,
        )
        .map(drop)
    }

    async fn put_bytes(&self, token: &str, task: &str, name: &str, size: usize) -> Result<Answer> {
        let url = format!(
            "{}/v1/tasks/{task}/artifacts/{name}",
            self.orchestrator.url()?
        );
        Answer::of(
            reqwest::Client::builder()
                .no_proxy()
                .build()?
                .put(url)
                .bearer_auth(token)
                .body(vec![b'x'; size]),
        )
        .await
    }

    fn count(&self, table: &str) -> Result<String> {
        self.control_plane
            .postgres
            .query(&format!("select count(*) from {table}"))
    }
}

/// Expects a refusal for a quota, with the current usage.
fn exceeded(answer: &Answer, said: &str) -> Result<()> {
    let refused = refusal(answer, 429, "quota_exceeded")?;
    ensure!(
        text(&refused["detail"])?.contains(said),
        "{refused} lacks '{said}'"
    );
    Ok(())
}

#[tokio::test]
async fn quotas_are_set_by_administrators_alone_and_are_whole_numbers() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (id, ann) = fixture.user("ann").await?;
    let project = text(
        &fixture
            .make(&ann, "/v1/projects", &json!({"name": "p"}))
            .await?["id"],
    )?;
    let task = text(
        &fixture
            .make(
                &ann,
                "/v1/tasks",
                &json!({"name": "t", "project_id": project}),
            )
            .await?["id"],
    )?;
    let group = text(
        &fixture
            .make(
                &fixture.admin,
                "/v1/groups",
                &json!({"name": "g", "members": ["ann"]}),
            )
            .await?["id"],
    )?;
    let put = async |token: &str, place: &str, value: Value| {
        fixture
            .call(
                token,
                Method::PUT,
                &format!("/v1/preferences/{place}"),
                &json!({"value": value}),
            )
            .await
    };
    for (scope, of) in [
        ("user", &id),
        ("project", &project),
        ("task", &task),
        ("group", &group),
        ("system", &id),
    ] {
        for key in [
            SANDBOXES,
            SECONDS,
            BYTES,
            MEMORY,
            PROCESSORS,
            PROCESSES,
            "quota.to-come",
        ] {
            let place = format!("{scope}/{of}/{key}");
            let refused = refusal(
                &put(&ann, &place, json!(1_000)).await?,
                403,
                "denied_by_policy",
            )
            .with_context(|| place.clone())?;
            assert_eq!(
                refused["rules"],
                json!(["default/preferences-of-administrators"]),
                "{place}"
            );
        }
        for value in [
            json!(-1),
            json!(1.5),
            json!("3"),
            json!(null),
            json!([1]),
            json!(true),
        ] {
            refusal(
                &put(&fixture.admin, &format!("{scope}/{of}/{SANDBOXES}"), value).await?,
                400,
                "invalid_request",
            )?;
        }
        object(
            &put(
                &fixture.admin,
                &format!("{scope}/{of}/{SANDBOXES}"),
                json!(2),
            )
            .await?,
        )?;
    }
    // Existing sessions are unaffected.
    object(&put(&ann, &format!("user/{id}/some.taste"), json!("blue")).await?)?;
    assert_eq!(fixture.count("preferences where key like 'quota.%'")?, "5");
    Ok(())
}

#[tokio::test]
async fn sessions_and_jobs_count_until_they_end_and_one_too_many_leaves_nothing() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (id, ann) = fixture.user("ann").await?;
    fixture.quota("user", &id, SANDBOXES, 2).await?;
    let first = SessionId::generate().to_string();
    fixture.fits(&ann, json!({"session_id": first})).await?;
    let second = fixture.fits(&ann, json!({})).await?;
    let before = (
        fixture.count("sessions")?,
        fixture.count("tasks")?,
        fixture.count("events")?,
    );
    exceeded(
        &fixture.request_session(&ann, json!({})).await?,
        "quota.sandboxes: the user has 2 and would have 3",
    )?;
    let job = json!({"command": ["sh", "-c", "sleep 77"]});
    exceeded(
        &fixture.call(&ann, Method::POST, "/v1/jobs", &job).await?,
        "the user has 2 and would have 3",
    )?;
    assert_eq!(
        (
            fixture.count("sessions")?,
            fixture.count("tasks")?,
            fixture.count("events")?
        ),
        before,
        "a refused call created something"
    );
    assert_eq!(
        (fixture.count("jobs")?, fixture.node.sessions().len()),
        ("0".to_owned(), 2)
    );
    // An existing session may be requested again; others have their own quota.
    assert_eq!(
        fixture
            .request_session(&ann, json!({"session_id": first}))
            .await?
            .status,
        200
    );
    fixture.fits(&fixture.admin, json!({})).await?;
    // An end frees quota, for a job too.
    fixture.end(&ann, &second).await?;
    let job = text(&fixture.make(&ann, "/v1/jobs", &job).await?["job_id"])?;
    exceeded(
        &fixture.request_session(&ann, json!({})).await?,
        "would have 3",
    )?;
    fixture.node.finish_sleeps(77);
    let ended = async || Ok(fixture.get(&format!("/v1/jobs/{job}")).await?["state"] == "completed");
    eventually("the job ends", TIMEOUT, ended).await?;
    fixture.fits(&ann, json!({})).await?;
    exceeded(
        &fixture.request_session(&ann, json!({})).await?,
        "would have 3",
    )?;
    // A larger quota applies at once.
    fixture.quota("user", &id, SANDBOXES, 3).await?;
    fixture.fits(&ann, json!({})).await?;
    exceeded(
        &fixture.request_session(&ann, json!({})).await?,
        "the user has 3 and would have 4",
    )
}

#[tokio::test]
// invariant: quotas
async fn ten_at_once_on_two_orchestrators_never_get_more_than_the_quota() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let two = fixture.second().await?;
    let (id, ann) = fixture.user("ann").await?;
    fixture.quota("user", &id, SANDBOXES, 3).await?;
    for round in 0..3 {
        let body = json!({});
        let calls = (0..10).map(|number| {
            let orchestrator = if number % 2 == 0 {
                &fixture.orchestrator
            } else {
                &two
            };
            fixture.call_at(orchestrator, &ann, Method::POST, "/v1/sessions", &body)
        });
        let answers = futures_util::future::try_join_all(calls).await?;
        let (made, refused): (Vec<&Answer>, Vec<&Answer>) =
            answers.iter().partition(|answer| answer.status < 300);
        assert_eq!(
            (made.len(), refused.len()),
            (3, 7),
            "round {round}: {answers:?}"
        );
        refused
            .into_iter()
            .try_for_each(|answer| exceeded(answer, "would have 4"))?;
        assert_eq!(
            fixture.count("sessions where state = 'running'")?,
            "3",
            "round {round}"
        );
        for answer in made {
            fixture
                .end(&ann, &text(&object(answer)?["session_id"])?)
                .await?;
        }
    }
    let jobs = json!({"command": ["sh", "-c", "sleep 78"]});
    let calls =
        std::iter::repeat_with(|| fixture.call(&ann, Method::POST, "/v1/jobs", &jobs)).take(10);
    let answers = futures_util::future::try_join_all(calls).await?;
    assert_eq!(
        answers.iter().filter(|answer| answer.status < 300).count(),
        3,
        "{answers:?}"
    );
    fixture.node.finish_sleeps(78);
    Ok(())
}

#[tokio::test]
// invariant: quotas
async fn the_quota_of_a_project_counts_whoever_works_in_it() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (_, ann) = fixture.user("ann").await?;
    let project = text(
        &fixture
            .make(&ann, "/v1/projects", &json!({"name": "p"}))
            .await?["id"],
    )?;
    let task = async |token: &str| {
        text(
            &fixture
                .make(
                    token,
                    "/v1/tasks",
                    &json!({"name": "t", "project_id": project}),
                )
                .await?["id"],
        )
    };
    let (of_ann, of_admin) = (task(&ann).await?, task(&fixture.admin).await?);
    fixture.quota("project", &project, SANDBOXES, 2).await?;
    fixture.quota("project", &project, BYTES, 1_000).await?;
    let first = fixture.fits(&ann, json!({"task_id": of_ann})).await?;
    fixture
        .fits(&fixture.admin, json!({"task_id": of_admin}))
        .await?;
    for (token, task) in [
        (&ann, &of_ann),
        (&fixture.admin, &of_admin),
        (&fixture.admin, &of_ann),
    ] {
        exceeded(
            &fixture
                .request_session(token, json!({"task_id": task}))
                .await?,
            "quota.sandboxes: the project has 2 and would have 3",
        )?;
    }
    // Outside the project nothing counts.
    fixture.fits(&ann, json!({})).await?;
    fixture.end(&ann, &first).await?;
    fixture
        .fits(&fixture.admin, json!({"task_id": of_ann}))
        .await?;
    exceeded(
        &fixture
            .request_session(&ann, json!({"task_id": of_ann}))
            .await?,
        "the project has 2",
    )?;
    object(&fixture.put_bytes(&ann, &of_ann, "a", 700).await?)?;
    exceeded(
        &fixture
            .put_bytes(&fixture.admin, &of_admin, "b", 301)
            .await?,
        "quota.artifact_bytes: the project has 1000 and would have 1001",
    )?;
    object(
        &fixture
            .put_bytes(&fixture.admin, &of_admin, "b", 300)
            .await?,
    )?;
    // The user's own quota applies in addition.
    let user = fixture
        .control_plane
        .postgres
        .query("select id from users where name = 'ann'")?;
    fixture.quota("user", &user, SANDBOXES, 1).await?;
    fixture.quota("project", &project, SANDBOXES, 100).await?;
    exceeded(
        &fixture
            .request_session(&ann, json!({"task_id": of_ann}))
            .await?,
        "the user has 1",
    )
}

#[tokio::test]
// invariant: quotas
async fn the_narrowest_quota_applies_and_zero_allows_none() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (id, ann) = fixture.user("ann").await?;
    let (_, ben) = fixture.user("ben").await?;
    let mut groups = Vec::new();
    for (name, members) in [("g", json!(["ann"])), ("h", json!(["ann"]))] {
        groups.push(text(
            &fixture
                .make(
                    &fixture.admin,
                    "/v1/groups",
                    &json!({"name": name, "members": members}),
                )
                .await?["id"],
        )?);
    }
    fixture.quota("system", "all", SANDBOXES, 1).await?;
    for token in [&ann, &ben] {
        fixture.fits(token, json!({})).await?;
        exceeded(
            &fixture.request_session(token, json!({})).await?,
            "the user has 1 and would have 2",
        )?;
    }
    // Of several groups, the smallest quota applies.
    fixture.quota("group", &groups[0], SANDBOXES, 3).await?;
    fixture.quota("group", &groups[1], SANDBOXES, 2).await?;
    fixture.fits(&ann, json!({})).await?;
    exceeded(
        &fixture.request_session(&ann, json!({})).await?,
        "the user has 2 and would have 3",
    )?;
    exceeded(
        &fixture.request_session(&ben, json!({})).await?,
        "the user has 1 and would have 2",
    )?;
    fixture.quota("user", &id, SANDBOXES, 3).await?;
    fixture.fits(&ann, json!({})).await?;
    exceeded(
        &fixture.request_session(&ann, json!({})).await?,
        "the user has 3 and would have 4",
    )?;
    let (nobody, cyd) = fixture.user("cyd").await?;
    for (key, scope) in [(SANDBOXES, "user"), (BYTES, "user")] {
        fixture.quota(scope, &nobody, key, 0).await?;
    }
    exceeded(
        &fixture.request_session(&cyd, json!({})).await?,
        "the user has 0 and would have 1",
    )?;
    exceeded(
        &fixture
            .call(
                &cyd,
                Method::POST,
                "/v1/jobs",
                &json!({"command": ["true"]}),
            )
            .await?,
        "the user has 0 and would have 1",
    )?;
    let task = fixture.task(&cyd).await?;
    exceeded(
        &fixture.put_bytes(&cyd, &task, "a", 1).await?,
        "the user has 0 and would have 1",
    )
}

#[tokio::test]
async fn every_version_of_an_artifact_counts_and_an_excess_is_not_stored() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (id, ann) = fixture.user("ann").await?;
    let (task, other) = (fixture.task(&ann).await?, fixture.task(&ann).await?);
    fixture.quota("user", &id, BYTES, 1_000).await?;
    object(&fixture.put_bytes(&ann, &task, "a", 600).await?)?;
    exceeded(
        &fixture.put_bytes(&ann, &task, "a", 401).await?,
        "quota.artifact_bytes: the user has 1000 and would have 1001",
    )?;
    exceeded(
        &fixture.put_bytes(&ann, &other, "b", 500).await?,
        "would have 1100",
    )?;
    // An upload on behalf of a user counts against the user's quota.
    exceeded(
        &fixture.put_bytes(&fixture.admin, &task, "c", 500).await?,
        "would have 1100",
    )?;
    assert_eq!(fixture.count("artifacts")?, "1");
    assert_eq!(
        fixture
            .get(&format!("/v1/artifacts?task_id={other}"))
            .await?["items"],
        json!([])
    );
    object(&fixture.put_bytes(&ann, &task, "a", 200).await?)?;
    let calls = (0..6).map(|number| {
        let (fixture, ann, task) = (&fixture, &ann, if number % 2 == 0 { &task } else { &other });
        async move {
            fixture
                .put_bytes(ann, task, &format!("at-once-{number}"), 100)
                .await
        }
    });
    let answers = futures_util::future::try_join_all(calls).await?;
    assert_eq!(
        answers.iter().filter(|answer| answer.status == 201).count(),
        2,
        "{answers:?}"
    );
    assert_eq!(
        fixture
            .control_plane
            .postgres
            .query("select sum(size) from artifacts")?,
        "1000"
    );
    object(&fixture.put_bytes(&ann, &task, "empty", 0).await?).map(drop)
}

#[tokio::test]
async fn processor_time_of_the_last_day_counts_whether_a_session_has_ended_or_not() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (id, ann) = fixture.user("ann").await?;
    let limits = json!({"limits": {"cpus": 2.0}});
    let session = fixture.fits(&ann, limits.clone()).await?;
    fixture.quota("user", &id, SECONDS, 1_000).await?;
    fixture.fits(&ann, limits.clone()).await?;
    let age = |hours: u32| {
        fixture.control_plane.postgres.query(&format!(
            "update sessions set created_at = now() - \
             interval '{hours} hours' where session_id = '{session}'"
        ))
    };
    // Two CPUs for an hour.
    age(1)?;
    exceeded(
        &fixture.request_session(&ann, limits.clone()).await?,
        "quota.cpu_seconds: the user has 1000 and would have 7",
    )?;
    exceeded(
        &fixture
            .call(
                &ann,
                Method::POST,
                "/v1/jobs",
                &json!({"command": ["true"]}),
            )
            .await?,
        "quota.cpu_seconds",
    )?;
    fixture.end(&ann, &session).await?;
    exceeded(
        &fixture.request_session(&ann, limits.clone()).await?,
        "would have 7",
    )?;
    fixture.quota("user", &id, SECONDS, 8_000).await?;
    fixture.fits(&ann, limits.clone()).await?;
    // Usage older than a day is dropped, and of earlier starts only the last day counts.
    age(100)?;
    exceeded(
        &fixture.request_session(&ann, limits.clone()).await?,
        "would have 17",
    )?;
    fixture.control_plane.postgres.query(&format!(
        "update sessions set updated_at = now() - \
         interval '30 hours' where session_id = '{session}'"
    ))?;
    fixture.fits(&ann, limits).await.map(drop)
}

#[tokio::test]
async fn a_quota_of_no_processor_time_allows_no_sandbox() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (id, ann) = fixture.user("ann").await?;
    fixture.quota("user", &id, SECONDS, 0).await?;
    exceeded(
        &fixture.request_session(&ann, json!({})).await?,
        "quota.cpu_seconds",
    )
}

#[tokio::test]
async fn a_session_that_is_resumed_counts_again() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (id, ann) = fixture.user("ann").await?;
    fixture.quota("user", &id, SANDBOXES, 1).await?;
    let session = fixture.fits(&ann, json!({})).await?;
    // The session ends without a call, as by its lifetime.
    let end = SessionEnd {
        workspace: Some(cynode_api::WorkspaceDisposal::Keep),
        ..SessionEnd::default()
    };
    fixture
        .node
        .client()?
        .end_session(session.parse()?, &end)
        .await?;
    let ended =
        async || Ok(fixture.get(&format!("/v1/sessions/{session}")).await?["state"] == "ended");
    eventually("the end is known", TIMEOUT, ended).await?;
    let other = fixture.fits(&ann, json!({})).await?;
    let resume = async || {
        fixture
            .call(
                &ann,
                Method::POST,
                &format!("/v1/sessions/{session}/resume"),
                &json!({}),
            )
            .await
    };
    exceeded(&resume().await?, "the user has 1 and would have 2")?;
    assert_eq!(
        fixture.get(&format!("/v1/sessions/{session}")).await?["state"],
        "ended"
    );
    fixture.end(&ann, &other).await?;
    assert_eq!(object(&resume().await?)?["state"], "running");
    Ok(())
}

#[tokio::test]
// invariant: quotas
async fn quotas_bound_the_size_of_one_sandbox() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (id, ann) = fixture.user("ann").await?;
    let project = text(
        &fixture
            .make(&ann, "/v1/projects", &json!({"name": "p"}))
            .await?["id"],
    )?;
    let task = text(
        &fixture
            .make(
                &ann,
                "/v1/tasks",
                &json!({"name": "t", "project_id": project}),
            )
            .await?["id"],
    )?;
    let gib = 1_u64 << 30;
    for (key, most) in [(MEMORY, gib), (PROCESSORS, 1), (PROCESSES, 100)] {
        fixture.quota("user", &id, key, most).await?;
    }
    for (key, most) in [(DISK, gib), (OPEN_FILES, 512)] {
        fixture.quota("user", &id, key, most).await?;
    }
    let limits = |memory: u64, cpus: f64, pids: u32| json!({"limits": {"memory_bytes": memory, "cpus": cpus, "pids": pids, "disk_bytes": gib, "nofile": 512}});
    let with = |field: &str, value: u64| {
        let mut body = limits(gib, 1.0, 100);
        body["limits"][field] = value.into();
        body
    };
    let first = fixture.fits(&ann, limits(gib, 1.0, 100)).await?;
    for (body, said) in [
        (
            limits(gib + 1, 1.0, 100),
            format!(
                "quota.sandbox_memory_bytes: a sandbox of the user has at most {gib}, and would \
                 have {}",
                gib + 1
            ),
        ),
        (
            limits(gib, 1.01, 100),
            "quota.sandbox_cpus: a sandbox of the user has at most 1, and would have 1.01"
                .to_owned(),
        ),
        (
            limits(gib, 1.0, 101),
            "quota.sandbox_pids: a sandbox of the user has at most 100, and would have 101"
                .to_owned(),
        ),
        (
            with("disk_bytes", gib + 1),
            format!(
                "quota.sandbox_disk_bytes: a sandbox of the user has at most {gib}, and would have {}",
                gib + 1
            ),
        ),
        (
            with("nofile", 513),
            "quota.sandbox_nofile: a sandbox of the user has at most 512, and would have 513"
                .to_owned(),
        ),
        // Defaults count as if they were requested.
        (
            json!({"limits": {"disk_bytes": gib, "nofile": 512}}),
            format!(
                "quota.sandbox_memory_bytes: a sandbox of the user has at most {gib}, and would \
                 have {}",
                2 * gib
            ),
        ),
    ] {
        exceeded(&fixture.request_session(&ann, body.clone()).await?, &said)?;
        let mut job = body;
        job["command"] = json!(["true"]);
        exceeded(
            &fixture.call(&ann, Method::POST, "/v1/jobs", &job).await?,
            &said,
        )?;
    }
    // A project's quota applies in addition, to everybody who works there.
    fixture.quota("project", &project, PROCESSES, 50).await?;
    let within =
        |pids: u32| json!({"task_id": task, "limits": {"memory_bytes": 16 << 20, "pids": pids}});
    exceeded(
        &fixture.request_session(&fixture.admin, within(51)).await?,
        "quota.sandbox_pids: a sandbox of the project has at most 50, and would have 51",
    )?;
    fixture.fits(&fixture.admin, within(50)).await?;
    // A resumed session counts with its original size.
    let end = SessionEnd {
        workspace: Some(cynode_api::WorkspaceDisposal::Keep),
        ..SessionEnd::default()
    };
    fixture
        .node
        .client()?
        .end_session(first.parse()?, &end)
        .await?;
    let ended =
        async || Ok(fixture.get(&format!("/v1/sessions/{first}")).await?["state"] == "ended");
    eventually("the end is known", TIMEOUT, ended).await?;
    let resume = async || {
        fixture
            .call(
                &ann,
                Method::POST,
                &format!("/v1/sessions/{first}/resume"),
                &json!({}),
            )
            .await
    };
    fixture.quota("user", &id, PROCESSES, 99).await?;
    exceeded(
        &resume().await?,
        "a sandbox of the user has at most 99, and would have 100",
    )?;
    fixture.quota("user", &id, PROCESSES, 100).await?;
    assert_eq!(object(&resume().await?)?["state"], "running");
    Ok(())
}

#[tokio::test]
// invariant: node-memory
async fn limits_that_no_node_grants_are_refused_and_promised_memory_is_bounded() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let memory = LARGEST_LIMITS.memory_bytes;
    let job = |memory: u64| {
        json!({
            "limits": {"memory_bytes": memory, "cpus": 2, "pids": 4_096},
            "command": ["true"]
        })
    };
    let session = |memory: u64| json!({"limits": {"memory_bytes": memory}});
    fixture.fits(&fixture.admin, session(memory)).await?;
    fixture
        .completed(&text(
            &fixture
                .make(&fixture.admin, "/v1/jobs", &job(memory))
                .await?["job_id"],
        )?)
        .await?;
    let before = (
        fixture.count("sessions")?,
        fixture.count("jobs")?,
        fixture.count("tasks")?,
    );
    for beyond in [memory + 1, 1 << 45] {
        let calls = [
            fixture
                .request_session(&fixture.admin, session(beyond))
                .await?,
            fixture
                .call(&fixture.admin, Method::POST, "/v1/jobs", &job(beyond))
                .await?,
        ];
        for answer in &calls {
            let detail = text(&refusal(answer, 422, "limit_unenforceable")?["detail"])?;
            ensure!(
                detail.contains("limits.memory_bytes: ")
                    && detail
                        .contains(&format!("gives a sandbox at most {memory} bytes of memory")),
                "{detail}"
            );
        }
    }
    let disk = LARGEST_LIMITS.disk_bytes.map(|bytes| bytes + 1);
    for (limit, value) in [
        ("cpus", json!(2.5)),
        ("pids", json!(4_097)),
        ("disk_bytes", json!(disk)),
    ] {
        let refused = refusal(
            &fixture
                .request_session(&fixture.admin, json!({"limits": {limit: value}}))
                .await?,
            422,
            "limit_unenforceable",
        )?;
        ensure!(
            text(&refused["detail"])?.starts_with(&format!("limits.{limit}: ")),
            "{refused}"
        );
    }
    assert_eq!(
        (
            fixture.count("sessions")?,
            fixture.count("jobs")?,
            fixture.count("tasks")?
        ),
        before,
        "a refused call created something"
    );
    // Nothing is placed beyond the sum of limits, although it would fit alone.
    let promised = PROMISED_MEMORY_BYTES - memory;
    fixture.control_plane.postgres.query(&format!(
        "update sessions set object = jsonb_set(object, \
         '{{limits,memory_bytes}}', '{promised}') where state = 'running'"
    ))?;
    fixture.fits(&fixture.admin, session(memory)).await?;
    let full = refusal(
        &fixture
            .request_session(&fixture.admin, session(16 << 20))
            .await?,
        503,
        "no_capacity",
    )?;
    ensure!(
        text(&full["detail"])?.contains("has promised its memory"),
        "{full}"
    );
    Ok(())
}

impl PolicyFixture {
    /// A finished job.
    async fn completed(&self, job: &str) -> Result<Value> {
        let ended =
            async || Ok(self.get(&format!("/v1/jobs/{job}")).await?["state"] == "completed");
        eventually("the job ends", TIMEOUT, ended).await?;
        self.get(&format!("/v1/jobs/{job}")).await
    }

    /// A finished job that wrote this many bytes.
    async fn writes(&self, token: &str, task: &str, letters: usize) -> Result<Value> {
        let command = json!([
            "sh",
            "-c",
            if letters == 0 {
                "exit 0".to_owned()
            } else {
                format!("echo {}", "x".repeat(letters))
            }
        ]);
        self.completed(&text(
            &self
                .make(
                    token,
                    "/v1/jobs",
                    &json!({"task_id": task, "command": command}),
                )
                .await?["job_id"],
        )?)
        .await
    }

    fn output_bytes(&self) -> Result<u64> {
        Ok(self
            .control_plane
            .postgres
            .query("select coalesce(sum(output_bytes), 0) from jobs")?
            .parse()?)
    }
}

#[tokio::test]
// invariant: quotas
async fn the_output_of_jobs_counts_with_artifacts_and_an_excess_is_not_stored() -> Result<()> {
    let fixture = PolicyFixture::start().await?;
    let (id, ann) = fixture.user("ann").await?;
    let task = fixture.task(&ann).await?;
    let whole = fixture.writes(&ann, &task, 1_000).await?;
    assert_eq!(
        (&whole["truncated_by"], text(&whole["stdout"])?.len()),
        (&Value::Null, 1_001)
    );
    let used = fixture.output_bytes()?;
    ensure!(used > 2_000, "not all output was counted: {used}");
    // The rest fits; one byte more doesn't.
    fixture.quota("user", &id, BYTES, used + 10).await?;
    exceeded(
        &fixture.put_bytes(&ann, &task, "a", 11).await?,
        &format!("the user has {} and would have {}", used + 10, used + 11),
    )?;
    object(&fixture.put_bytes(&ann, &task, "a", 10).await?)?;

    // A second one doesn't fit: it ends normally, and reports which output was dropped and why.
    let none = fixture.writes(&ann, &task, 1_000).await?;
    assert_eq!(
        (
            &none["exit_code"],
            text(&none["stdout"])?.as_str(),
            &none["truncated"]
        ),
        (&json!(0), "", &json!({"stdout": true, "stderr": false}))
    );
    ensure!(
        text(&none["truncated_by"])?
            .starts_with(&format!("quota.artifact_bytes: the user has {}", used + 10)),
        "{none}"
    );
    assert_eq!(fixture.output_bytes()?, used);
    // With room for its streams, they are kept as its output.
    fixture.quota("user", &id, BYTES, used + 10 + 1_001).await?;
    let streams = fixture.writes(&ann, &task, 1_000).await?;
    assert_eq!(
        (
            text(&streams["stdout"])?.len(),
            &streams["truncated"]["stdout"]
        ),
        (1_001, &json!(false))
    );
    ensure!(streams["truncated_by"].is_string(), "{streams}");
    let page = fixture
        .get(&format!("/v1/jobs/{}/output", text(&streams["job_id"])?))
        .await?;
    assert_eq!(
        (
            &page["chunks"][0]["data"],
            &page["exit"]["exit_code"],
            &page["next_seq"]
        ),
        (&streams["stdout"], &json!(0), &json!(1))
    );
    assert_eq!(fixture.output_bytes()?, used + 1_001);
    // One byte less, and they are dropped.
    fixture.quota("user", &id, BYTES, used + 10 + 2_001).await?;
    assert_eq!(
        text(&fixture.writes(&ann, &task, 1_000).await?["stdout"])?,
        ""
    );
    fixture.quota("user", &id, BYTES, 10 * used).await?;
    assert_eq!(
        fixture.writes(&ann, &task, 1_000).await?["truncated_by"],
        Value::Null
    );
    // A job without output loses nothing.
    fixture.quota("user", &id, BYTES, 0).await?;
    assert_eq!(
        fixture.writes(&ann, &task, 0).await?["truncated_by"],
        Value::Null
    );
    // Nothing refused is left in the store: two whole outputs and an artifact are.
    let count = |place: &str| -> Result<usize> {
        let found = std::process::Command::new("find")
            .arg(
                fixture
                    .orchestrator
                    .state_dir()
                    .join("artifacts")
                    .join(place),
            )
            .args(["-type", "f"])
            .output()?;
        Ok(String::from_utf8_lossy(&found.stdout).lines().count())
    };
    assert_eq!((count("sha256")?, count("incoming")?), (3, 0));
    Ok(())
}
