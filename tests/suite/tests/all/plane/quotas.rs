//! Quotas: who sets them, what they count, and that nobody gets past them.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{SessionEnd, SessionId};
use cynode_tests::{Answer, LARGEST, PROMISED_MEMORY_BYTES, eventually};
use http::Method;
use serde_json::{Value, json};

use super::{
    policy::{Ruled, object, refusal},
    small::text,
};

const PATIENCE: Duration = Duration::from_secs(30);
const SANDBOXES: &str = "quota.sandboxes";
const SECONDS: &str = "quota.cpu_seconds";
const BYTES: &str = "quota.artifact_bytes";
const MEMORY: &str = "quota.sandbox_memory_bytes";
const PROCESSORS: &str = "quota.sandbox_cpus";
const PROCESSES: &str = "quota.sandbox_pids";

impl Ruled {
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

    async fn ask_session(&self, token: &str, body: Value) -> Result<Answer> {
        self.call(token, Method::POST, "/v1/sessions", &body).await
    }

    /// A session that fits.
    async fn fits(&self, token: &str, body: Value) -> Result<String> {
        text(&object(&self.ask_session(token, body).await?)?["session_id"])
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
        self.plane
            .postgres
            .ask(&format!("select count(*) from {table}"))
    }
}

/// A refusal for a quota, which says what is used.
fn exceeded(answer: &Answer, said: &str) -> Result<()> {
    let refused = refusal(answer, 429, "quota_exceeded")?;
    ensure!(
        text(&refused["detail"])?.contains(said),
        "{refused} does not say '{said}'"
    );
    Ok(())
}

#[tokio::test]
async fn quotas_are_set_by_administrators_alone_and_are_whole_numbers() -> Result<()> {
    let ruled = Ruled::start().await?;
    let (id, ann) = ruled.user("ann").await?;
    let project = text(
        &ruled
            .make(&ann, "/v1/projects", &json!({"name": "p"}))
            .await?["id"],
    )?;
    let task = text(
        &ruled
            .make(
                &ann,
                "/v1/tasks",
                &json!({"name": "t", "project_id": project}),
            )
            .await?["id"],
    )?;
    let group = text(
        &ruled
            .make(
                &ruled.admin,
                "/v1/groups",
                &json!({"name": "g", "members": ["ann"]}),
            )
            .await?["id"],
    )?;
    let put = async |token: &str, place: &str, value: Value| {
        ruled
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
                &put(&ruled.admin, &format!("{scope}/{of}/{SANDBOXES}"), value).await?,
                400,
                "invalid_request",
            )?;
        }
        object(&put(&ruled.admin, &format!("{scope}/{of}/{SANDBOXES}"), json!(2)).await?)?;
    }
    // What is theirs stays theirs.
    object(&put(&ann, &format!("user/{id}/some.taste"), json!("blue")).await?)?;
    assert_eq!(ruled.count("preferences where key like 'quota.%'")?, "5");
    Ok(())
}

#[tokio::test]
async fn sessions_and_jobs_count_until_they_end_and_one_too_many_leaves_nothing() -> Result<()> {
    let ruled = Ruled::start().await?;
    let (id, ann) = ruled.user("ann").await?;
    ruled.quota("user", &id, SANDBOXES, 2).await?;
    let first = SessionId::generate().to_string();
    ruled.fits(&ann, json!({"session_id": first})).await?;
    let second = ruled.fits(&ann, json!({})).await?;
    let before = (
        ruled.count("sessions")?,
        ruled.count("tasks")?,
        ruled.count("events")?,
    );
    exceeded(
        &ruled.ask_session(&ann, json!({})).await?,
        "quota.sandboxes: the user has 2 and would have 3",
    )?;
    let job = json!({"command": ["sh", "-c", "sleep 77"]});
    exceeded(
        &ruled.call(&ann, Method::POST, "/v1/jobs", &job).await?,
        "the user has 2 and would have 3",
    )?;
    assert_eq!(
        (
            ruled.count("sessions")?,
            ruled.count("tasks")?,
            ruled.count("events")?
        ),
        before,
        "nothing was made"
    );
    assert_eq!(
        (ruled.count("jobs")?, ruled.node.sessions().len()),
        ("0".to_owned(), 2)
    );
    // What is there may be asked for again; others have their own.
    assert_eq!(
        ruled
            .ask_session(&ann, json!({"session_id": first}))
            .await?
            .status,
        200
    );
    ruled.fits(&ruled.admin, json!({})).await?;
    // An end makes room, for a job too.
    ruled.end(&ann, &second).await?;
    let job = text(&ruled.make(&ann, "/v1/jobs", &job).await?["job_id"])?;
    exceeded(&ruled.ask_session(&ann, json!({})).await?, "would have 3")?;
    ruled.node.wake(77);
    let ended = async || Ok(ruled.get(&format!("/v1/jobs/{job}")).await?["state"] == "completed");
    eventually("the job ends", PATIENCE, ended).await?;
    ruled.fits(&ann, json!({})).await?;
    exceeded(&ruled.ask_session(&ann, json!({})).await?, "would have 3")?;
    // More for the user is more at once.
    ruled.quota("user", &id, SANDBOXES, 3).await?;
    ruled.fits(&ann, json!({})).await?;
    exceeded(
        &ruled.ask_session(&ann, json!({})).await?,
        "the user has 3 and would have 4",
    )
}

#[tokio::test]
async fn ten_at_once_on_two_orchestrators_never_get_more_than_the_quota() -> Result<()> {
    let ruled = Ruled::start().await?;
    let two = ruled.second().await?;
    let (id, ann) = ruled.user("ann").await?;
    ruled.quota("user", &id, SANDBOXES, 3).await?;
    for round in 0..3 {
        let body = json!({});
        let asked = (0..10).map(|number| {
            let orchestrator = if number % 2 == 0 {
                &ruled.orchestrator
            } else {
                &two
            };
            ruled.call_at(orchestrator, &ann, Method::POST, "/v1/sessions", &body)
        });
        let answers = futures_util::future::try_join_all(asked).await?;
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
            ruled.count("sessions where state = 'running'")?,
            "3",
            "round {round}"
        );
        for answer in made {
            ruled
                .end(&ann, &text(&object(answer)?["session_id"])?)
                .await?;
        }
    }
    let jobs = json!({"command": ["sh", "-c", "sleep 78"]});
    let asked =
        std::iter::repeat_with(|| ruled.call(&ann, Method::POST, "/v1/jobs", &jobs)).take(10);
    let answers = futures_util::future::try_join_all(asked).await?;
    assert_eq!(
        answers.iter().filter(|answer| answer.status < 300).count(),
        3,
        "{answers:?}"
    );
    ruled.node.wake(78);
    Ok(())
}

#[tokio::test]
async fn the_quota_of_a_project_counts_whoever_works_in_it() -> Result<()> {
    let ruled = Ruled::start().await?;
    let (_, ann) = ruled.user("ann").await?;
    let project = text(
        &ruled
            .make(&ann, "/v1/projects", &json!({"name": "p"}))
            .await?["id"],
    )?;
    let task = async |token: &str| {
        text(
            &ruled
                .make(
                    token,
                    "/v1/tasks",
                    &json!({"name": "t", "project_id": project}),
                )
                .await?["id"],
        )
    };
    let (of_ann, of_admin) = (task(&ann).await?, task(&ruled.admin).await?);
    ruled.quota("project", &project, SANDBOXES, 2).await?;
    ruled.quota("project", &project, BYTES, 1_000).await?;
    let first = ruled.fits(&ann, json!({"task_id": of_ann})).await?;
    ruled
        .fits(&ruled.admin, json!({"task_id": of_admin}))
        .await?;
    for (token, task) in [
        (&ann, &of_ann),
        (&ruled.admin, &of_admin),
        (&ruled.admin, &of_ann),
    ] {
        exceeded(
            &ruled.ask_session(token, json!({"task_id": task})).await?,
            "quota.sandboxes: the project has 2 and would have 3",
        )?;
    }
    // Elsewhere nothing is counted.
    ruled.fits(&ann, json!({})).await?;
    ruled.end(&ann, &first).await?;
    ruled.fits(&ruled.admin, json!({"task_id": of_ann})).await?;
    exceeded(
        &ruled.ask_session(&ann, json!({"task_id": of_ann})).await?,
        "the project has 2",
    )?;
    object(&ruled.put_bytes(&ann, &of_ann, "a", 700).await?)?;
    exceeded(
        &ruled.put_bytes(&ruled.admin, &of_admin, "b", 301).await?,
        "quota.artifact_bytes: the project has 1000 and would have 1001",
    )?;
    object(&ruled.put_bytes(&ruled.admin, &of_admin, "b", 300).await?)?;
    // A user's own quota counts beside it.
    let user = ruled
        .plane
        .postgres
        .ask("select id from users where name = 'ann'")?;
    ruled.quota("user", &user, SANDBOXES, 1).await?;
    ruled.quota("project", &project, SANDBOXES, 100).await?;
    exceeded(
        &ruled.ask_session(&ann, json!({"task_id": of_ann})).await?,
        "the user has 1",
    )
}

#[tokio::test]
async fn the_narrowest_quota_counts_and_nought_means_none() -> Result<()> {
    let ruled = Ruled::start().await?;
    let (id, ann) = ruled.user("ann").await?;
    let (_, ben) = ruled.user("ben").await?;
    let mut groups = Vec::new();
    for (name, members) in [("g", json!(["ann"])), ("h", json!(["ann"]))] {
        groups.push(text(
            &ruled
                .make(
                    &ruled.admin,
                    "/v1/groups",
                    &json!({"name": name, "members": members}),
                )
                .await?["id"],
        )?);
    }
    ruled.quota("system", "all", SANDBOXES, 1).await?;
    for token in [&ann, &ben] {
        ruled.fits(token, json!({})).await?;
        exceeded(
            &ruled.ask_session(token, json!({})).await?,
            "the user has 1 and would have 2",
        )?;
    }
    // Of several groups the smallest.
    ruled.quota("group", &groups[0], SANDBOXES, 3).await?;
    ruled.quota("group", &groups[1], SANDBOXES, 2).await?;
    ruled.fits(&ann, json!({})).await?;
    exceeded(
        &ruled.ask_session(&ann, json!({})).await?,
        "the user has 2 and would have 3",
    )?;
    exceeded(
        &ruled.ask_session(&ben, json!({})).await?,
        "the user has 1 and would have 2",
    )?;
    ruled.quota("user", &id, SANDBOXES, 3).await?;
    ruled.fits(&ann, json!({})).await?;
    exceeded(
        &ruled.ask_session(&ann, json!({})).await?,
        "the user has 3 and would have 4",
    )?;
    let (nobody, cyd) = ruled.user("cyd").await?;
    for (key, scope) in [(SANDBOXES, "user"), (BYTES, "user")] {
        ruled.quota(scope, &nobody, key, 0).await?;
    }
    exceeded(
        &ruled.ask_session(&cyd, json!({})).await?,
        "the user has 0 and would have 1",
    )?;
    exceeded(
        &ruled
            .call(
                &cyd,
                Method::POST,
                "/v1/jobs",
                &json!({"command": ["true"]}),
            )
            .await?,
        "the user has 0 and would have 1",
    )?;
    let task = ruled.task(&cyd).await?;
    exceeded(
        &ruled.put_bytes(&cyd, &task, "a", 1).await?,
        "the user has 0 and would have 1",
    )
}

#[tokio::test]
async fn bytes_of_artifacts_count_in_every_version_and_what_is_too_much_is_not_kept() -> Result<()>
{
    let ruled = Ruled::start().await?;
    let (id, ann) = ruled.user("ann").await?;
    let (task, other) = (ruled.task(&ann).await?, ruled.task(&ann).await?);
    ruled.quota("user", &id, BYTES, 1_000).await?;
    object(&ruled.put_bytes(&ann, &task, "a", 600).await?)?;
    exceeded(
        &ruled.put_bytes(&ann, &task, "a", 401).await?,
        "quota.artifact_bytes: the user has 1000 and would have 1001",
    )?;
    exceeded(
        &ruled.put_bytes(&ann, &other, "b", 500).await?,
        "would have 1100",
    )?;
    // Who puts it for them uses up theirs.
    exceeded(
        &ruled.put_bytes(&ruled.admin, &task, "c", 500).await?,
        "would have 1100",
    )?;
    assert_eq!(ruled.count("artifacts")?, "1");
    assert_eq!(
        ruled.get(&format!("/v1/artifacts?task_id={other}")).await?["items"],
        json!([])
    );
    object(&ruled.put_bytes(&ann, &task, "a", 200).await?)?;
    let asked = (0..6).map(|number| {
        let (ruled, ann, task) = (&ruled, &ann, if number % 2 == 0 { &task } else { &other });
        async move {
            ruled
                .put_bytes(ann, task, &format!("at-once-{number}"), 100)
                .await
        }
    });
    let answers = futures_util::future::try_join_all(asked).await?;
    assert_eq!(
        answers.iter().filter(|answer| answer.status == 201).count(),
        2,
        "{answers:?}"
    );
    assert_eq!(
        ruled
            .plane
            .postgres
            .ask("select sum(size) from artifacts")?,
        "1000"
    );
    object(&ruled.put_bytes(&ann, &task, "empty", 0).await?).map(drop)
}

#[tokio::test]
async fn processor_time_of_the_last_day_counts_whether_a_session_has_ended_or_not() -> Result<()> {
    let ruled = Ruled::start().await?;
    let (id, ann) = ruled.user("ann").await?;
    let limits = json!({"limits": {"cpus": 2.0}});
    let session = ruled.fits(&ann, limits.clone()).await?;
    ruled.quota("user", &id, SECONDS, 1_000).await?;
    ruled.fits(&ann, limits.clone()).await?;
    let age = |hours: u32| {
        ruled.plane.postgres.ask(&format!("update sessions set created_at = now() - interval '{hours} hours' where session_id = '{session}'"))
    };
    // Two processors for an hour.
    age(1)?;
    exceeded(
        &ruled.ask_session(&ann, limits.clone()).await?,
        "quota.cpu_seconds: the user has 1000 and would have 7",
    )?;
    exceeded(
        &ruled
            .call(
                &ann,
                Method::POST,
                "/v1/jobs",
                &json!({"command": ["true"]}),
            )
            .await?,
        "quota.cpu_seconds",
    )?;
    ruled.end(&ann, &session).await?;
    exceeded(
        &ruled.ask_session(&ann, limits.clone()).await?,
        "would have 7",
    )?;
    ruled.quota("user", &id, SECONDS, 8_000).await?;
    ruled.fits(&ann, limits.clone()).await?;
    // What was longer ago than a day is forgotten, and of what began before that only the day counts.
    age(100)?;
    exceeded(
        &ruled.ask_session(&ann, limits.clone()).await?,
        "would have 17",
    )?;
    ruled.plane.postgres.ask(&format!("update sessions set updated_at = now() - interval '30 hours' where session_id = '{session}'"))?;
    ruled.fits(&ann, limits).await.map(drop)
}

#[tokio::test]
async fn no_processor_time_means_no_sandbox() -> Result<()> {
    let ruled = Ruled::start().await?;
    let (id, ann) = ruled.user("ann").await?;
    ruled.quota("user", &id, SECONDS, 0).await?;
    exceeded(
        &ruled.ask_session(&ann, json!({})).await?,
        "quota.cpu_seconds",
    )
}

#[tokio::test]
async fn a_session_that_is_resumed_counts_again() -> Result<()> {
    let ruled = Ruled::start().await?;
    let (id, ann) = ruled.user("ann").await?;
    ruled.quota("user", &id, SANDBOXES, 1).await?;
    let session = ruled.fits(&ann, json!({})).await?;
    // By itself, as when its time is over.
    let end = SessionEnd {
        workspace: Some(cynode_api::WorkspaceDisposal::Keep),
        ..SessionEnd::default()
    };
    ruled
        .node
        .client()?
        .end_session(session.parse()?, &end)
        .await?;
    let ended =
        async || Ok(ruled.get(&format!("/v1/sessions/{session}")).await?["state"] == "ended");
    eventually("its end is known", PATIENCE, ended).await?;
    let other = ruled.fits(&ann, json!({})).await?;
    let resume = async || {
        ruled
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
        ruled.get(&format!("/v1/sessions/{session}")).await?["state"],
        "ended"
    );
    ruled.end(&ann, &other).await?;
    assert_eq!(object(&resume().await?)?["state"], "running");
    Ok(())
}

#[tokio::test]
async fn one_sandbox_is_no_larger_than_the_quota_says() -> Result<()> {
    let ruled = Ruled::start().await?;
    let (id, ann) = ruled.user("ann").await?;
    let project = text(
        &ruled
            .make(&ann, "/v1/projects", &json!({"name": "p"}))
            .await?["id"],
    )?;
    let task = text(
        &ruled
            .make(
                &ann,
                "/v1/tasks",
                &json!({"name": "t", "project_id": project}),
            )
            .await?["id"],
    )?;
    let gib = 1_u64 << 30;
    for (key, most) in [(MEMORY, gib), (PROCESSORS, 1), (PROCESSES, 100)] {
        ruled.quota("user", &id, key, most).await?;
    }
    let limits = |memory: u64, cpus: f64, pids: u32| json!({"limits": {"memory_bytes": memory, "cpus": cpus, "pids": pids}});
    let first = ruled.fits(&ann, limits(gib, 1.0, 100)).await?;
    for (body, said) in [
        (
            limits(gib + 1, 1.0, 100),
            format!(
                "quota.sandbox_memory_bytes: a sandbox of the user has at most {gib}, and would have {}",
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
        // The default counts as if it were asked for.
        (
            json!({}),
            format!(
                "quota.sandbox_memory_bytes: a sandbox of the user has at most {gib}, and would have {}",
                2 * gib
            ),
        ),
    ] {
        exceeded(&ruled.ask_session(&ann, body.clone()).await?, &said)?;
        let mut job = body;
        job["command"] = json!(["true"]);
        exceeded(
            &ruled.call(&ann, Method::POST, "/v1/jobs", &job).await?,
            &said,
        )?;
    }
    // A project's counts beside it, for whoever works there.
    ruled.quota("project", &project, PROCESSES, 50).await?;
    let within =
        |pids: u32| json!({"task_id": task, "limits": {"memory_bytes": 16 << 20, "pids": pids}});
    exceeded(
        &ruled.ask_session(&ruled.admin, within(51)).await?,
        "quota.sandbox_pids: a sandbox of the project has at most 50, and would have 51",
    )?;
    ruled.fits(&ruled.admin, within(50)).await?;
    // What is resumed is as large as it was.
    let end = SessionEnd {
        workspace: Some(cynode_api::WorkspaceDisposal::Keep),
        ..SessionEnd::default()
    };
    ruled
        .node
        .client()?
        .end_session(first.parse()?, &end)
        .await?;
    let ended = async || Ok(ruled.get(&format!("/v1/sessions/{first}")).await?["state"] == "ended");
    eventually("its end is known", PATIENCE, ended).await?;
    let resume = async || {
        ruled
            .call(
                &ann,
                Method::POST,
                &format!("/v1/sessions/{first}/resume"),
                &json!({}),
            )
            .await
    };
    ruled.quota("user", &id, PROCESSES, 99).await?;
    exceeded(
        &resume().await?,
        "a sandbox of the user has at most 99, and would have 100",
    )?;
    ruled.quota("user", &id, PROCESSES, 100).await?;
    assert_eq!(object(&resume().await?)?["state"], "running");
    Ok(())
}

#[tokio::test]
async fn limits_that_no_node_gives_are_refused_and_what_nodes_promise_is_bounded() -> Result<()> {
    let ruled = Ruled::start().await?;
    let memory = LARGEST.memory_bytes;
    let job = |memory: u64| json!({"limits": {"memory_bytes": memory, "cpus": 2, "pids": 4_096}, "command": ["true"]});
    let session = |memory: u64| json!({"limits": {"memory_bytes": memory}});
    ruled.fits(&ruled.admin, session(memory)).await?;
    ruled
        .completed(&text(
            &ruled.make(&ruled.admin, "/v1/jobs", &job(memory)).await?["job_id"],
        )?)
        .await?;
    let before = (
        ruled.count("sessions")?,
        ruled.count("jobs")?,
        ruled.count("tasks")?,
    );
    for beyond in [memory + 1, 1 << 45] {
        let asked = [
            ruled.ask_session(&ruled.admin, session(beyond)).await?,
            ruled
                .call(&ruled.admin, Method::POST, "/v1/jobs", &job(beyond))
                .await?,
        ];
        for answer in &asked {
            let detail = text(&refusal(answer, 422, "limit_unenforceable")?["detail"])?;
            ensure!(
                detail.contains("limits.memory_bytes: ")
                    && detail
                        .contains(&format!("gives a sandbox at most {memory} bytes of memory")),
                "{detail}"
            );
        }
    }
    for (limit, value) in [("cpus", json!(2.5)), ("pids", json!(4_097))] {
        let refused = refusal(
            &ruled
                .ask_session(&ruled.admin, json!({"limits": {limit: value}}))
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
            ruled.count("sessions")?,
            ruled.count("jobs")?,
            ruled.count("tasks")?
        ),
        before,
        "nothing was made"
    );
    // Nothing is placed beyond what limits may add up to, though by itself it would fit.
    let promised = PROMISED_MEMORY_BYTES - memory;
    ruled.plane.postgres.ask(&format!("update sessions set object = jsonb_set(object, '{{limits,memory_bytes}}', '{promised}') where state = 'running'"))?;
    ruled.fits(&ruled.admin, session(memory)).await?;
    let full = refusal(
        &ruled.ask_session(&ruled.admin, session(16 << 20)).await?,
        503,
        "no_capacity",
    )?;
    ensure!(
        text(&full["detail"])?.contains("has promised its memory"),
        "{full}"
    );
    Ok(())
}

impl Ruled {
    /// A job at its end.
    async fn completed(&self, job: &str) -> Result<Value> {
        let ended =
            async || Ok(self.get(&format!("/v1/jobs/{job}")).await?["state"] == "completed");
        eventually("the job ends", PATIENCE, ended).await?;
        self.get(&format!("/v1/jobs/{job}")).await
    }

    /// A job that writes so many letters, at its end.
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
            .plane
            .postgres
            .ask("select coalesce(sum(output_bytes), 0) from jobs")?
            .parse()?)
    }
}

#[tokio::test]
async fn output_of_jobs_counts_with_artifacts_and_what_is_too_much_is_not_kept() -> Result<()> {
    let ruled = Ruled::start().await?;
    let (id, ann) = ruled.user("ann").await?;
    let task = ruled.task(&ann).await?;
    let whole = ruled.writes(&ann, &task, 1_000).await?;
    assert_eq!(
        (&whole["truncated_by"], text(&whole["stdout"])?.len()),
        (&Value::Null, 1_001)
    );
    let used = ruled.output_bytes()?;
    ensure!(
        used > 2_000,
        "the streams and the whole output count: {used}"
    );
    // What is left fits; one byte more does not.
    ruled.quota("user", &id, BYTES, used + 10).await?;
    exceeded(
        &ruled.put_bytes(&ann, &task, "a", 11).await?,
        &format!("the user has {} and would have {}", used + 10, used + 11),
    )?;
    object(&ruled.put_bytes(&ann, &task, "a", 10).await?)?;

    // A second one like it does not fit: it ends as it would have, and says what is not kept and why.
    let none = ruled.writes(&ann, &task, 1_000).await?;
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
    assert_eq!(ruled.output_bytes()?, used);
    // With room for its streams these are kept, and are its output.
    ruled.quota("user", &id, BYTES, used + 10 + 1_001).await?;
    let streams = ruled.writes(&ann, &task, 1_000).await?;
    assert_eq!(
        (
            text(&streams["stdout"])?.len(),
            &streams["truncated"]["stdout"]
        ),
        (1_001, &json!(false))
    );
    ensure!(streams["truncated_by"].is_string(), "{streams}");
    let page = ruled
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
    assert_eq!(ruled.output_bytes()?, used + 1_001);
    // One byte less, and they are not.
    ruled.quota("user", &id, BYTES, used + 10 + 2_001).await?;
    assert_eq!(
        text(&ruled.writes(&ann, &task, 1_000).await?["stdout"])?,
        ""
    );
    ruled.quota("user", &id, BYTES, 10 * used).await?;
    assert_eq!(
        ruled.writes(&ann, &task, 1_000).await?["truncated_by"],
        Value::Null
    );
    // One that writes nothing loses nothing.
    ruled.quota("user", &id, BYTES, 0).await?;
    assert_eq!(
        ruled.writes(&ann, &task, 0).await?["truncated_by"],
        Value::Null
    );
    // Nothing that was refused is left in the store: two whole outputs and an artifact are.
    let count = |place: &str| -> Result<usize> {
        let found = std::process::Command::new("find")
            .arg(ruled.orchestrator.state_dir().join("artifacts").join(place))
            .args(["-type", "f"])
            .output()?;
        Ok(String::from_utf8_lossy(&found.stdout).lines().count())
    };
    assert_eq!((count("sha256")?, count("incoming")?), (3, 0));
    Ok(())
}
