//! An orchestrator and the nodes that it gives work to: those that hang, lose answers, go away, come back and forget.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    AuditBody, AuditKind, AuditResult, CALL_HEADER, CallId, ErrorCode, Event, ExecId, ExecRequest,
    Job, JobCreate, JobId, JobState, NodeKeyCreate, NodeState, Retry, Session, SessionEnd,
    SessionId, SessionState, UserSessionCreate,
};
use cynode_client::{AuditFilter, PutOptions, SessionFilter, UserClient};
use cynode_tests::{Fault, Plane, RunningOrchestrator, SimulatedWorker, eventually, sh};
use http::Method;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(30);
const ONE: &str = "localhost/cynode/one:latest";
const TWO: &str = "localhost/cynode/two:latest";

/// An orchestrator whose nodes are simulated. What is not used is dropped last.
struct Fleet {
    client: UserClient,
    orchestrator: RunningOrchestrator,
    plane: Plane,
}

impl Fleet {
    async fn start(settings: &[(&str, &str)]) -> Result<Self> {
        let plane = Plane::new().await?;
        let seeds = format!("[{ONE:?}, {TWO:?}]");
        let defaults = [
            ("seed_images", seeds.as_str()),
            ("default_image", ONE),
            ("heartbeat_seconds", "1"),
        ];
        let orchestrator = plane
            .orchestrator("", &[&defaults, settings].concat())
            .await?;
        Ok(Self {
            client: orchestrator.client()?,
            orchestrator,
            plane,
        })
    }

    /// A node that has registered.
    async fn node(&self, name: &str, images: &[&str]) -> Result<SimulatedWorker> {
        let node = SimulatedWorker::start(name, images).await?;
        let key = self
            .client
            .create_node_key(&NodeKeyCreate::default())
            .await?
            .psk;
        node.join(&self.orchestrator.control_url()?, &key).await?;
        Ok(node)
    }

    async fn job(&self, image: &str, script: &str, retry: Retry) -> Result<JobId> {
        let command = ["sh", "-c", script].map(str::to_owned).to_vec();
        Ok(self
            .client
            .create_job(&JobCreate {
                image_ref: Some(image.to_owned()),
                command,
                retry: Some(retry),
                ..Default::default()
            })
            .await?
            .job_id)
    }

    async fn session(&self, image: &str) -> Result<Session> {
        Ok(self
            .client
            .sessions()
            .create_user_session(&UserSessionCreate {
                image_ref: Some(image.to_owned()),
                ..Default::default()
            })
            .await?)
    }

    async fn until(&self, id: JobId, state: JobState) -> Result<Job> {
        eventually(&format!("job {id} is {state}"), PATIENCE, async || {
            Ok(self.client.job(id).await?.state == state)
        })
        .await?;
        Ok(self.client.job(id).await?)
    }

    async fn session_until(&self, id: SessionId, state: SessionState) -> Result<()> {
        let reached = async || {
            Ok(self
                .states(|event| event.session_id == Some(id))
                .await?
                .last()
                == Some(&state.to_string()))
        };
        eventually(&format!("session {id} is {state}"), PATIENCE, reached).await
    }

    /// The states that were told of something, in their order.
    async fn states(&self, of: impl Fn(&Event) -> bool) -> Result<Vec<String>> {
        let (mut states, mut cursor) = (Vec::new(), 0);
        loop {
            let page = self.client.events(cursor, None, Duration::ZERO).await?;
            if page.items.is_empty() {
                return Ok(states);
            }
            ensure!(
                page.items
                    .iter()
                    .map(|event| event.cursor)
                    .eq(cursor + 1..=page.next_cursor),
                "{page:?}"
            );
            states.extend(page.items.into_iter().filter(&of).map(|event| event.state));
            cursor = page.next_cursor;
        }
    }

    async fn node_state(&self, node: &SimulatedWorker) -> Result<NodeState> {
        Ok(self
            .client
            .nodes()
            .await?
            .into_iter()
            .find(|known| known.id == node.node_id())
            .context("it is known")?
            .state)
    }
}

#[tokio::test]
async fn a_node_that_hangs_holds_up_nobody_else() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let (hung, good) = (
        fleet.node("hung", &[ONE]).await?,
        fleet.node("good", &[TWO]).await?,
    );
    fleet.session(ONE).await?;
    let other = fleet.session(TWO).await?.session_id;
    // It goes on saying that it is alive.
    hung.plan("", usize::MAX, Fault::Hang);
    // More than an orchestrator brings forward at once.
    let mut stuck = Vec::new();
    for _ in 0..40 {
        stuck.push(fleet.job(ONE, "echo late", Retry::Never).await?);
    }
    eventually("it is asked", PATIENCE, async || {
        Ok(hung.calls().iter().any(|call| call.ends_with("jobs:run")))
    })
    .await?;

    for number in 0..3 {
        let id = fleet
            .job(TWO, &format!("echo {number}"), Retry::Never)
            .await?;
        assert_eq!(
            fleet.until(id, JobState::Completed).await?.output.stdout,
            format!("{number}\n")
        );
    }
    let session = fleet.session(TWO).await?.session_id;
    assert_eq!(
        fleet
            .client
            .sessions()
            .exec(session, &sh("echo hi"))
            .await?
            .stdout,
        "hi\n"
    );
    assert_eq!(
        fleet
            .client
            .sessions()
            .end_session(session, &SessionEnd::default())
            .await?
            .state,
        SessionState::Ended
    );
    // What happens on the other node without a call is noticed.
    good.client()?
        .end_session(other, &SessionEnd::default())
        .await?;
    fleet.session_until(other, SessionState::Ended).await?;
    assert_eq!(fleet.node_state(&hung).await?, NodeState::Ready);

    hung.mend();
    for id in stuck {
        fleet.until(id, JobState::Completed).await?;
        assert_eq!(hung.starts(id), 1);
    }
    Ok(())
}

#[tokio::test]
async fn what_a_node_was_asked_for_is_done_once_though_answers_are_lost() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    let own = node.client()?;
    for fault in [Fault::DropBefore, Fault::DropAfter] {
        for (call, times) in [
            ("POST /v1/worker/jobs:run", 2),
            ("GET /v1/worker/jobs/", 1),
            ("/output", 1),
            ("/ack", 1),
        ] {
            node.plan(call, times, fault);
        }
        let id = fleet.job(ONE, "echo once; exit 3", Retry::Never).await?;
        let job = fleet.until(id, JobState::Failed).await?;
        assert_eq!(
            (
                job.exit_code,
                job.output.stdout.as_str(),
                job.reported_by.as_str(),
                node.starts(id)
            ),
            (Some(3), "once\n", "worker", 1),
            "{fault:?}"
        );
        eventually("it is acknowledged", PATIENCE, async || {
            Ok(own.job(id).await?.acknowledged)
        })
        .await?;
        let states = fleet.states(|event| event.job_id == Some(id)).await?;
        let states: Vec<&str> = states
            .iter()
            .map(String::as_str)
            .filter(|state| *state != "in_progress")
            .collect();
        assert_eq!(states, ["accepted", "failed"], "{fault:?}");
        node.mend();

        node.plan("POST /v1/worker/sessions", 2, fault);
        let body = UserSessionCreate {
            session_id: Some(SessionId::generate()),
            ..Default::default()
        };
        let id = body.session_id.expect("it has one");
        let refused = fleet
            .client
            .sessions()
            .create_user_session(&body)
            .await
            .expect_err("its node did not answer");
        assert_eq!(refused.status(), Some(503), "{refused:?}");
        fleet.session_until(id, SessionState::Running).await?;
        assert_eq!(
            fleet
                .client
                .sessions()
                .create_user_session(&body)
                .await?
                .state,
            SessionState::Running
        );
        node.plan("/end", 1, fault);
        let ending = fleet
            .client
            .sessions()
            .end_session(id, &SessionEnd::default())
            .await;
        ensure!(
            ending.as_ref().is_ok_and(|session| matches!(
                session.state,
                SessionState::Ending | SessionState::Ended
            )),
            "{ending:?}"
        );
        fleet.session_until(id, SessionState::Ended).await?;
        let states = fleet.states(|event| event.session_id == Some(id)).await?;
        assert_eq!(
            states,
            ["creating", "running", "ending", "ended"],
            "{fault:?}"
        );
        assert_eq!(
            node.sessions()
                .iter()
                .filter(|session| session.session_id == id)
                .count(),
            1
        );
        node.mend();
    }
    Ok(())
}

#[tokio::test]
async fn a_session_that_was_seen_while_it_was_made_runs_when_its_caller_hears_so() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    node.hold_creates(true);
    let seen = async {
        let listed = async || {
            Ok(fleet
                .client
                .sessions()
                .list_sessions(&SessionFilter::default())
                .await?
                .iter()
                .any(|session| session.state == SessionState::Creating))
        };
        eventually("it is seen", PATIENCE, listed).await?;
        node.hold_creates(false);
        anyhow::Ok(())
    };
    let (made, seen) = tokio::join!(fleet.session(ONE), seen);
    seen?;
    let session = made?;
    assert_eq!(session.state, SessionState::Running);
    assert_eq!(
        fleet
            .client
            .sessions()
            .exec(session.session_id, &sh("echo at once"))
            .await?
            .stdout,
        "at once\n"
    );
    assert_eq!(
        fleet
            .states(|event| event.session_id == Some(session.session_id))
            .await?,
        ["creating", "running"]
    );
    Ok(())
}

#[tokio::test]
async fn a_node_without_room_is_passed_over_and_asked_again() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let node = fleet.node("full", &[ONE]).await?;
    for code in [
        ErrorCode::NoCapacity,
        ErrorCode::NoSpace,
        ErrorCode::RuntimeUnavailable,
    ] {
        node.plan("POST /v1/worker/jobs:run", 1, Fault::Refuse(code));
    }
    let id = fleet.job(ONE, "echo done", Retry::Never).await?;
    fleet.until(id, JobState::Completed).await?;
    assert_eq!(
        (
            node.starts(id),
            node.calls()
                .iter()
                .filter(|call| call.ends_with("jobs:run"))
                .count()
        ),
        (1, 4)
    );
    // A refusal that will not pass is the job's end.
    node.plan(
        "POST /v1/worker/jobs:run",
        1,
        Fault::Refuse(ErrorCode::LimitUnenforceable),
    );
    let id = fleet.job(ONE, "echo never", Retry::Never).await?;
    let job = fleet.until(id, JobState::Failed).await?;
    assert_eq!(
        (
            job.error.map(|error| error.code).as_deref(),
            node.starts(id)
        ),
        (Some("limit_unenforceable"), 0)
    );
    Ok(())
}

#[tokio::test]
async fn the_work_of_a_lost_node_follows_its_rule_and_what_comes_back_is_told_once() -> Result<()> {
    let fleet = Fleet::start(&[("node_lost_after", "4")]).await?;
    let (first, second) = (
        fleet.node("first", &[ONE]).await?,
        fleet.node("second", &[ONE]).await?,
    );
    fleet.client.drain_node(second.node_id(), true).await?;
    let never = fleet
        .job(ONE, "echo begun; sleep 601; echo done", Retry::Never)
        .await?;
    let again = fleet
        .job(ONE, "echo begun; sleep 602; echo done", Retry::OnNodeLoss)
        .await?;
    let session = fleet.session(ONE).await?.session_id;
    for id in [never, again] {
        fleet.until(id, JobState::InProgress).await?;
    }
    fleet.client.drain_node(second.node_id(), false).await?;

    first.cut_off(true);
    let lost = fleet.until(never, JobState::Failed).await?;
    assert_eq!(
        (
            lost.error.map(|error| error.code).as_deref(),
            lost.reported_by.as_str(),
            lost.late_result
        ),
        (Some("node_lost"), "orchestrator", None)
    );
    eventually("it runs elsewhere", PATIENCE, async || {
        Ok(fleet.client.job(again).await?.node_id == Some(second.node_id()))
    })
    .await?;
    fleet.until(again, JobState::InProgress).await?;
    fleet.session_until(session, SessionState::Lost).await?;
    assert_eq!(fleet.node_state(&first).await?, NodeState::Lost);

    // One ends where nobody hears it; the other is still at it when the node comes back.
    first.wake(601);
    eventually("it ends there", PATIENCE, async || {
        Ok(first
            .calls()
            .iter()
            .any(|call| call.contains(&never.to_string())))
    })
    .await?;
    first.cut_off(false);
    let kept = async || Ok(fleet.client.job(never).await?.late_result.is_some());
    eventually("its result is kept", PATIENCE, kept).await?;
    let job = fleet.client.job(never).await?;
    let late = job.late_result.context("it was just there")?;
    assert_eq!(
        (job.state, &late["state"], &late["stdout"]),
        (
            JobState::Failed,
            &json!("completed"),
            &json!("begun\ndone\n")
        )
    );
    let own = first.client()?;
    let stopped = async || {
        Ok(own
            .job(again)
            .await
            .is_ok_and(|job| job.state == JobState::Canceled && job.acknowledged))
    };
    eventually("what went elsewhere is stopped here", PATIENCE, stopped).await?;
    eventually("it is acknowledged", PATIENCE, async || {
        Ok(own.job(never).await?.acknowledged)
    })
    .await?;
    fleet.session_until(session, SessionState::Running).await?;
    assert_eq!(
        fleet
            .client
            .sessions()
            .exec(session, &sh("echo back"))
            .await?
            .stdout,
        "back\n"
    );

    second.wake(602);
    let job = fleet.until(again, JobState::Completed).await?;
    assert_eq!(
        (job.node_id, job.output.stdout.as_str()),
        (Some(second.node_id()), "begun\ndone\n")
    );
    assert_eq!(
        (
            first.starts(never),
            first.starts(again),
            second.starts(never),
            second.starts(again)
        ),
        (1, 1, 0, 1)
    );
    assert_eq!(
        fleet.states(|event| event.job_id == Some(never)).await?,
        ["accepted", "in_progress", "failed"]
    );
    assert_eq!(
        fleet.states(|event| event.job_id == Some(again)).await?,
        [
            "accepted",
            "in_progress",
            "accepted",
            "in_progress",
            "completed"
        ]
    );
    assert_eq!(
        fleet
            .states(|event| event.session_id == Some(session))
            .await?,
        ["creating", "running", "lost", "running"]
    );
    Ok(())
}

#[tokio::test]
async fn what_ended_while_a_node_was_away_for_a_moment_is_delivered() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    let id = fleet.job(ONE, "sleep 600; echo done", Retry::Never).await?;
    fleet.until(id, JobState::InProgress).await?;
    node.cut_off(true);
    node.wake(600);
    eventually("it is not heard of", PATIENCE, async || {
        Ok(fleet.node_state(&node).await? == NodeState::Unreachable)
    })
    .await?;
    assert_eq!(fleet.client.job(id).await?.state, JobState::InProgress);
    let waiting = fleet.job(ONE, "echo after", Retry::Never).await?;
    node.cut_off(false);
    assert_eq!(
        fleet.until(id, JobState::Completed).await?.output.stdout,
        "done\n"
    );
    fleet.until(waiting, JobState::Completed).await?;
    assert_eq!(
        fleet.states(|event| event.job_id == Some(id)).await?,
        ["accepted", "in_progress", "completed"]
    );
    assert_eq!((node.starts(id), node.starts(waiting)), (1, 1));
    Ok(())
}

#[tokio::test]
async fn a_job_that_may_run_once_is_not_run_again_on_a_node_that_forgot_it() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    let never = fleet.job(ONE, "sleep 600", Retry::Never).await?;
    let again = fleet.job(ONE, "sleep 600", Retry::OnNodeLoss).await?;
    let session = fleet.session(ONE).await?.session_id;
    for id in [never, again] {
        fleet.until(id, JobState::InProgress).await?;
    }
    node.forget();
    let lost = fleet.until(never, JobState::Failed).await?;
    assert_eq!(
        (
            lost.error.map(|error| error.code).as_deref(),
            lost.reported_by.as_str()
        ),
        (Some("node_lost"), "orchestrator")
    );
    fleet.session_until(session, SessionState::Lost).await?;
    node.wake(600);
    fleet.until(again, JobState::Completed).await?;
    assert_eq!((node.starts(never), node.starts(again)), (1, 2));
    Ok(())
}

#[tokio::test]
async fn a_drained_node_keeps_what_it_has_and_gets_nothing_new() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let (old, new) = (
        fleet.node("old", &[ONE]).await?,
        fleet.node("new", &[ONE, TWO]).await?,
    );
    fleet.client.drain_node(new.node_id(), true).await?;
    let running = fleet.job(ONE, "sleep 600; echo kept", Retry::Never).await?;
    let session = fleet.session(ONE).await?;
    fleet.until(running, JobState::InProgress).await?;
    assert_eq!((old.starts(running), session.node_id), (1, old.node_id()));
    // Nobody may take this one.
    let waiting = fleet.job(TWO, "echo at last", Retry::Never).await?;
    let refused = fleet
        .client
        .sessions()
        .create_user_session(&UserSessionCreate {
            image_ref: Some(TWO.to_owned()),
            ..Default::default()
        })
        .await;
    ensure!(
        refused
            .as_ref()
            .is_err_and(|error| error.is(ErrorCode::NoCapacity)),
        "{refused:?}"
    );

    assert_eq!(
        fleet.client.drain_node(old.node_id(), true).await?.state,
        NodeState::Draining
    );
    assert_eq!(
        fleet.client.drain_node(new.node_id(), false).await?.state,
        NodeState::Ready
    );
    for _ in 0..3 {
        let id = fleet.job(ONE, "echo new", Retry::Never).await?;
        assert_eq!(
            fleet.until(id, JobState::Completed).await?.node_id,
            Some(new.node_id())
        );
        assert_eq!(fleet.session(ONE).await?.node_id, new.node_id());
    }
    fleet.until(waiting, JobState::Completed).await?;
    assert_eq!(
        fleet
            .client
            .sessions()
            .exec(session.session_id, &sh("echo still"))
            .await?
            .stdout,
        "still\n"
    );
    old.wake(600);
    let job = fleet.until(running, JobState::Completed).await?;
    assert_eq!(
        (job.node_id, job.output.stdout.as_str()),
        (Some(old.node_id()), "kept\n")
    );
    Ok(())
}

#[tokio::test]
async fn nodes_pull_a_changed_configuration_and_say_that_they_have_it() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE, TWO]).await?;
    assert_eq!(node.config().default_image.as_deref(), Some(ONE));
    let revision = fleet
        .client
        .put_setting("sandbox.default_image", json!(TWO))
        .await?
        .revision;
    let acknowledged = async || {
        Ok(fleet
            .client
            .nodes()
            .await?
            .iter()
            .all(|node| node.config_revision == revision))
    };
    eventually("it says that it has it", PATIENCE, acknowledged).await?;
    assert_eq!(
        (
            node.config().default_image.as_deref(),
            node.config().revision
        ),
        (Some(TWO), revision)
    );
    assert_eq!(
        fleet
            .client
            .sessions()
            .create_user_session(&UserSessionCreate::default())
            .await?
            .image_ref,
        TWO
    );
    Ok(())
}

#[tokio::test]
async fn a_key_that_is_good_once_admits_one_node() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let control = fleet.orchestrator.control_url()?;
    let key = fleet
        .client
        .create_node_key(&NodeKeyCreate::default())
        .await?
        .psk;
    let (first, second) = (
        SimulatedWorker::start("first", &[ONE]).await?,
        SimulatedWorker::start("second", &[ONE]).await?,
    );
    first.join(&control, &key).await?;
    let refused = second
        .join(&control, &key)
        .await
        .expect_err("the key is used up");
    ensure!(format!("{refused:#}").contains("401"), "{refused:#}");
    ensure!(
        second.join(&control, "made-up").await.is_err(),
        "a key that nobody made"
    );
    assert_eq!(
        fleet
            .client
            .nodes()
            .await?
            .iter()
            .map(|node| node.id)
            .collect::<Vec<_>>(),
        [first.node_id()]
    );
    let reusable = fleet
        .client
        .create_node_key(&NodeKeyCreate {
            reusable: true,
            ..Default::default()
        })
        .await?
        .psk;
    second.join(&control, &reusable).await?;
    SimulatedWorker::start("third", &[ONE])
        .await?
        .join(&control, &reusable)
        .await?;
    assert_eq!(fleet.client.nodes().await?.len(), 3);
    assert_eq!(
        fleet
            .plane
            .postgres
            .ask("select count(*) from node_keys where used_by is not null")?,
        "2"
    );
    Ok(())
}

#[tokio::test]
async fn calls_go_on_while_tokens_change() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    let session = fleet.session(ONE).await?.session_id;
    let before = node.tokens();
    let epoch = || fleet.plane.postgres.ask("select token_epoch from nodes");
    assert_eq!(epoch()?, "1");
    fleet
        .plane
        .postgres
        .ask("update nodes set tokens_rotated_at = now() - interval '2 days'")?;
    let changed = async || {
        fleet
            .client
            .sessions()
            .exec(
                session,
                &ExecRequest {
                    exec_id: None,
                    ..sh("echo on")
                },
            )
            .await?;
        Ok(epoch()? == "2")
    };
    eventually("the node has shown its new token", PATIENCE, changed).await?;
    let after = node.tokens();
    ensure!(
        before.0 != after.0 && before.1 != after.1,
        "both are others now"
    );
    for _ in 0..50 {
        fleet
            .client
            .sessions()
            .exec(session, &sh("echo on"))
            .await?;
    }
    let http = reqwest::Client::builder().no_proxy().build()?;
    let beat = async |token: &str| -> Result<u16> {
        let request = http
            .post(format!(
                "{}/v1/nodes/heartbeat",
                fleet.orchestrator.control_url()?
            ))
            .bearer_auth(token);
        Ok(request
            .json(&json!({ "running_sandboxes": 0 }))
            .send()
            .await?
            .status()
            .as_u16())
    };
    assert_eq!((beat(&before.0).await?, beat(&after.0).await?), (401, 200));
    let id = fleet.job(ONE, "echo done", Retry::Never).await?;
    fleet.until(id, JobState::Completed).await?;
    Ok(())
}

#[tokio::test]
async fn what_has_ended_does_not_come_back_when_its_request_comes_late() -> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    node.plan(
        "POST /v1/worker/sessions",
        1,
        Fault::Slow(Duration::from_secs(3)),
    );
    let body = UserSessionCreate {
        session_id: Some(SessionId::generate()),
        ..Default::default()
    };
    let id = body.session_id.expect("it has one");
    let sessions = fleet.client.sessions();
    let end = async {
        eventually("it is written down", PATIENCE, async || {
            Ok(sessions.get_session(id).await.is_ok())
        })
        .await?;
        Ok::<_, anyhow::Error>(sessions.end_session(id, &SessionEnd::default()).await?)
    };
    let (made, ended) = tokio::join!(sessions.create_user_session(&body), end);
    assert_eq!(ended?.state, SessionState::Ended);
    assert!(
        made.is_ok_and(|session| session.state == SessionState::Ended),
        "the caller is told that it has ended"
    );
    let gone = async || {
        Ok(node
            .sessions()
            .iter()
            .any(|session| session.session_id == id && session.state == SessionState::Ended))
    };
    eventually("it is ended there too", PATIENCE, gone).await?;
    assert_eq!(sessions.get_session(id).await?.state, SessionState::Ended);
    assert_eq!(
        fleet.states(|event| event.session_id == Some(id)).await?,
        ["creating", "ending", "ended"]
    );
    Ok(())
}

#[tokio::test]
async fn a_caller_who_names_internal_headers_away_and_hangs_up_is_recorded_by_what_the_node_did()
-> Result<()> {
    let fleet = Fleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    let id = fleet.session(ONE).await?.session_id;
    let sessions = fleet.client.sessions();
    let hostile = |method: Method, path: &str| {
        let request = sessions
            .request(method, &format!("/v1/sessions/{id}{path}"))
            .header("connection", "keep-alive, X-Cynode-Call, X-Cynode-Result");
        request.header(CALL_HEADER, CallId::generate().to_string())
    };
    let outcome = async |action: &str| -> Result<AuditBody> {
        let filter = AuditFilter {
            session: Some(id),
            action: Some(action.to_owned()),
            ..Default::default()
        };
        let find = async || -> Result<Option<AuditBody>> {
            let records = super::audit::records(&fleet.client, &filter).await?;
            Ok(records
                .into_iter()
                .map(|record| record.body)
                .find(|body| body.kind == AuditKind::Outcome))
        };
        eventually(&format!("{action} has its outcome"), PATIENCE, async || {
            Ok(find().await?.is_some())
        })
        .await?;
        find().await?.context("it was there")
    };

    // The file is gone, and the answer is lost.
    sessions
        .put_file(id, "gone".as_ref(), "text", &PutOptions::default())
        .await?;
    node.plan("DELETE /v1/worker/sessions", 1, Fault::DropAfter);
    let answer = hostile(Method::DELETE, "/files?path=gone").send().await?;
    ensure!(answer.status() == 503, "{answer:?}");
    let deleted = outcome("file.delete").await?;
    assert_eq!(
        (deleted.result, deleted.status, &deleted.detail["found_out"]),
        (
            Some(AuditResult::Done),
            Some(204),
            &json!("the node remembers it")
        )
    );
    assert_eq!(
        deleted.detail["changes"][0]["path"],
        json!("gone"),
        "{deleted:?}"
    );

    // The command runs, and its caller hangs up.
    let exec_id = ExecId::generate();
    let mut request = sh("sleep 7; echo done");
    request.exec_id = Some(exec_id);
    let caller = tokio::spawn(hostile(Method::POST, "/exec").json(&request).send());
    let own = node.client()?;
    eventually("it runs", PATIENCE, async || {
        Ok(own.get_exec(id, exec_id).await.is_ok())
    })
    .await?;
    caller.abort();
    ensure!(
        caller.await.is_err_and(|error| error.is_cancelled()),
        "its caller waits no longer"
    );
    node.wake(7);
    let ran = outcome("session.exec").await?;
    assert_eq!(
        (ran.result, ran.exec_id),
        (Some(AuditResult::Done), Some(exec_id)),
        "{ran:?}"
    );

    // The node knows the call by the gate's id, which the answer has too, and not by the caller's.
    let answer = hostile(Method::PUT, "/files?path=new")
        .body("text")
        .send()
        .await?;
    let call_id: uuid::Uuid = answer.headers()[CALL_HEADER].to_str()?.parse()?;
    let filter = AuditFilter {
        call: Some(call_id.to_string()),
        ..Default::default()
    };
    let made = super::audit::records(&fleet.client, &filter).await?;
    ensure!(
        made.len() == 2 && made[1].body.result == Some(AuditResult::Done),
        "{made:?}"
    );
    assert_eq!(
        own.call_state(CallId::from_uuid(call_id)).await?.state,
        cynode_api::CallState::Answered
    );
    Ok(())
}
