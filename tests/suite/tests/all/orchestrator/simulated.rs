//! An orchestrator and its nodes: nodes that hang, lose responses, disappear, return and forget.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    AuditBody, AuditKind, AuditResult, CALL_HEADER, CallId, ErrorCode, Event, ExecId, ExecRequest,
    Job, JobCreate, JobId, JobState, NodeKeyCreate, NodeState, Retry, Session, SessionEnd,
    SessionId, SessionState, UserSessionCreate,
};
use cynode_client::{AuditFilter, PutOptions, SessionFilter, UserClient};
use cynode_tests::{ControlPlane, Fault, RunningOrchestrator, SimulatedWorker, eventually, sh};
use http::Method;
use serde_json::json;

const TIMEOUT: Duration = Duration::from_secs(30);
pub(super) const ONE: &str = "localhost/cynode/one:latest";
const TWO: &str = "localhost/cynode/two:latest";

/// An orchestrator with simulated nodes. Unused fields are dropped last.
pub(super) struct SimulatedFleet {
    pub(super) client: UserClient,
    pub(super) orchestrator: RunningOrchestrator,
    pub(super) control_plane: ControlPlane,
}

async fn launch(
    control_plane: &ControlPlane,
    settings: &[(&str, &str)],
) -> Result<RunningOrchestrator> {
    let seeds = format!("[{ONE:?}, {TWO:?}]");
    let defaults = [
        ("seed_images", seeds.as_str()),
        ("default_image", ONE),
        ("heartbeat_seconds", "1"),
    ];
    control_plane
        .orchestrator("", &[&defaults, settings].concat())
        .await
}

impl SimulatedFleet {
    pub(super) async fn start(settings: &[(&str, &str)]) -> Result<Self> {
        Self::start_on(ControlPlane::new().await?, settings).await
    }

    pub(super) async fn start_on(
        control_plane: ControlPlane,
        settings: &[(&str, &str)],
    ) -> Result<Self> {
        let orchestrator = launch(&control_plane, settings).await?;
        Ok(Self {
            client: orchestrator.client()?,
            orchestrator,
            control_plane,
        })
    }

    /// Kills the orchestrator with SIGKILL and starts another one.
    pub(super) async fn kill_and_restart(&mut self, settings: &[(&str, &str)]) -> Result<()> {
        self.orchestrator.kill()?;
        self.orchestrator = launch(&self.control_plane, settings).await?;
        self.client = self.orchestrator.client()?;
        Ok(())
    }

    /// Starts a node and registers it.
    pub(super) async fn node(&self, name: &str, images: &[&str]) -> Result<SimulatedWorker> {
        let node = SimulatedWorker::start(name, images).await?;
        let key = self
            .client
            .create_node_key(&NodeKeyCreate::default())
            .await?
            .psk;
        node.join(&self.orchestrator.control_url()?, &key).await?;
        Ok(node)
    }

    pub(super) async fn job(&self, image: &str, script: &str, retry: Retry) -> Result<JobId> {
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

    pub(super) async fn session(&self, image: &str) -> Result<Session> {
        Ok(self
            .client
            .sessions()
            .create_user_session(&UserSessionCreate {
                image_ref: Some(image.to_owned()),
                ..Default::default()
            })
            .await?)
    }

    pub(super) async fn wait_for_job(&self, id: JobId, state: JobState) -> Result<Job> {
        eventually(&format!("job {id} is {state}"), TIMEOUT, async || {
            Ok(self.client.job(id).await?.state == state)
        })
        .await?;
        Ok(self.client.job(id).await?)
    }

    pub(super) async fn wait_for_session(&self, id: SessionId, state: SessionState) -> Result<()> {
        let reached = async || {
            Ok(self
                .states(|event| event.session_id == Some(id))
                .await?
                .last()
                == Some(&state.to_string()))
        };
        eventually(&format!("session {id} is {state}"), TIMEOUT, reached).await
    }

    /// The states of something in the order of their events.
    async fn states(&self, select: impl Fn(&Event) -> bool) -> Result<Vec<String>> {
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
            states.extend(
                page.items
                    .into_iter()
                    .filter(&select)
                    .map(|event| event.state),
            );
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
            .context("the node is known")?
            .state)
    }
}

#[tokio::test]
async fn a_node_that_hangs_delays_nobody_else() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let (hung, good) = (
        fleet.node("hung", &[ONE]).await?,
        fleet.node("good", &[TWO]).await?,
    );
    fleet.session(ONE).await?;
    let other = fleet.session(TWO).await?.session_id;
    // The node keeps sending heartbeats.
    hung.plan("", usize::MAX, Fault::Hang);
    // More than an orchestrator drives at once.
    let mut stuck = Vec::new();
    for _ in 0..40 {
        stuck.push(fleet.job(ONE, "echo late", Retry::Never).await?);
    }
    eventually("the node receives a call", TIMEOUT, async || {
        Ok(hung.calls().iter().any(|call| call.ends_with("jobs:run")))
    })
    .await?;

    for number in 0..3 {
        let id = fleet
            .job(TWO, &format!("echo {number}"), Retry::Never)
            .await?;
        assert_eq!(
            fleet
                .wait_for_job(id, JobState::Completed)
                .await?
                .output
                .stdout,
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
    // Changes on the other node are noticed without a call.
    good.client()?
        .end_session(other, &SessionEnd::default())
        .await?;
    fleet.wait_for_session(other, SessionState::Ended).await?;
    assert_eq!(fleet.node_state(&hung).await?, NodeState::Ready);

    hung.clear_faults();
    for id in stuck {
        fleet.wait_for_job(id, JobState::Completed).await?;
        assert_eq!(hung.starts(id), 1);
    }
    Ok(())
}

#[tokio::test]
async fn a_request_to_a_node_runs_once_though_responses_are_lost() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
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
        let job = fleet.wait_for_job(id, JobState::Failed).await?;
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
        eventually("the job is acknowledged", TIMEOUT, async || {
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
        node.clear_faults();

        node.plan("POST /v1/worker/sessions", 2, fault);
        let body = UserSessionCreate {
            session_id: Some(SessionId::generate()),
            ..Default::default()
        };
        let id = body.session_id.expect("the request has an id");
        let refused = fleet
            .client
            .sessions()
            .create_user_session(&body)
            .await
            .expect_err("the node did not respond");
        assert_eq!(refused.status(), Some(503), "{refused:?}");
        fleet.wait_for_session(id, SessionState::Running).await?;
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
        fleet.wait_for_session(id, SessionState::Ended).await?;
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
        node.clear_faults();
    }
    Ok(())
}

#[tokio::test]
// invariant: control-plane
async fn a_session_seen_during_its_creation_runs_when_the_create_call_returns() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
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
        eventually("the session is listed", TIMEOUT, listed).await?;
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
async fn a_node_without_capacity_is_skipped_and_tried_again() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let node = fleet.node("full", &[ONE]).await?;
    for code in [
        ErrorCode::NoCapacity,
        ErrorCode::NoSpace,
        ErrorCode::RuntimeUnavailable,
    ] {
        node.plan("POST /v1/worker/jobs:run", 1, Fault::Refuse(code));
    }
    let id = fleet.job(ONE, "echo done", Retry::Never).await?;
    fleet.wait_for_job(id, JobState::Completed).await?;
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
    // A permanent refusal ends the job.
    node.plan(
        "POST /v1/worker/jobs:run",
        1,
        Fault::Refuse(ErrorCode::LimitUnenforceable),
    );
    let id = fleet.job(ONE, "echo never", Retry::Never).await?;
    let job = fleet.wait_for_job(id, JobState::Failed).await?;
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
// invariant: exactly-once
async fn jobs_of_a_lost_node_follow_their_retry_rule_and_late_results_are_reported_once()
-> Result<()> {
    let fleet = SimulatedFleet::start(&[("node_lost_after", "4")]).await?;
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
        fleet.wait_for_job(id, JobState::InProgress).await?;
    }
    fleet.client.drain_node(second.node_id(), false).await?;

    first.cut_off(true);
    let lost = fleet.wait_for_job(never, JobState::Failed).await?;
    assert_eq!(
        (
            lost.error.map(|error| error.code).as_deref(),
            lost.reported_by.as_str(),
            lost.late_result
        ),
        (Some("node_lost"), "orchestrator", None)
    );
    eventually("the job runs on the other node", TIMEOUT, async || {
        Ok(fleet.client.job(again).await?.node_id == Some(second.node_id()))
    })
    .await?;
    fleet.wait_for_job(again, JobState::InProgress).await?;
    fleet.wait_for_session(session, SessionState::Lost).await?;
    assert_eq!(fleet.node_state(&first).await?, NodeState::Lost);

    // One job ends unseen; the other still runs when the node returns.
    first.finish_sleeps(601);
    eventually("the job ends on its node", TIMEOUT, async || {
        Ok(first
            .calls()
            .iter()
            .any(|call| call.contains(&never.to_string())))
    })
    .await?;
    first.cut_off(false);
    let kept = async || Ok(fleet.client.job(never).await?.late_result.is_some());
    eventually("the late result is kept", TIMEOUT, kept).await?;
    let job = fleet.client.job(never).await?;
    let late = job.late_result.context("the late result was just seen")?;
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
    eventually(
        "the reassigned job is stopped on its old node",
        TIMEOUT,
        stopped,
    )
    .await?;
    eventually("the job is acknowledged", TIMEOUT, async || {
        Ok(own.job(never).await?.acknowledged)
    })
    .await?;
    fleet
        .wait_for_session(session, SessionState::Running)
        .await?;
    assert_eq!(
        fleet
            .client
            .sessions()
            .exec(session, &sh("echo back"))
            .await?
            .stdout,
        "back\n"
    );

    second.finish_sleeps(602);
    let job = fleet.wait_for_job(again, JobState::Completed).await?;
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
async fn results_of_a_brief_disconnection_are_delivered() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    let id = fleet.job(ONE, "sleep 600; echo done", Retry::Never).await?;
    fleet.wait_for_job(id, JobState::InProgress).await?;
    node.cut_off(true);
    node.finish_sleeps(600);
    eventually("the node is unreachable", TIMEOUT, async || {
        Ok(fleet.node_state(&node).await? == NodeState::Unreachable)
    })
    .await?;
    assert_eq!(fleet.client.job(id).await?.state, JobState::InProgress);
    let waiting = fleet.job(ONE, "echo after", Retry::Never).await?;
    node.cut_off(false);
    assert_eq!(
        fleet
            .wait_for_job(id, JobState::Completed)
            .await?
            .output
            .stdout,
        "done\n"
    );
    fleet.wait_for_job(waiting, JobState::Completed).await?;
    assert_eq!(
        fleet.states(|event| event.job_id == Some(id)).await?,
        ["accepted", "in_progress", "completed"]
    );
    assert_eq!((node.starts(id), node.starts(waiting)), (1, 1));
    Ok(())
}

#[tokio::test]
// invariant: exactly-once
async fn a_job_that_may_run_once_is_not_run_again_on_a_node_that_forgot_it() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    let never = fleet.job(ONE, "sleep 600", Retry::Never).await?;
    let again = fleet.job(ONE, "sleep 600", Retry::OnNodeLoss).await?;
    let session = fleet.session(ONE).await?.session_id;
    for id in [never, again] {
        fleet.wait_for_job(id, JobState::InProgress).await?;
    }
    node.lose_disk();
    let lost = fleet.wait_for_job(never, JobState::Failed).await?;
    assert_eq!(
        (
            lost.error.map(|error| error.code).as_deref(),
            lost.reported_by.as_str()
        ),
        (Some("node_lost"), "orchestrator")
    );
    fleet.wait_for_session(session, SessionState::Lost).await?;
    node.finish_sleeps(600);
    fleet.wait_for_job(again, JobState::Completed).await?;
    assert_eq!((node.starts(never), node.starts(again)), (1, 2));
    Ok(())
}

#[tokio::test]
async fn a_drained_node_keeps_what_it_has_and_gets_nothing_new() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let (old, new) = (
        fleet.node("old", &[ONE]).await?,
        fleet.node("new", &[ONE, TWO]).await?,
    );
    fleet.client.drain_node(new.node_id(), true).await?;
    let running = fleet.job(ONE, "sleep 600; echo kept", Retry::Never).await?;
    let session = fleet.session(ONE).await?;
    fleet.wait_for_job(running, JobState::InProgress).await?;
    assert_eq!((old.starts(running), session.node_id), (1, old.node_id()));
    // No node may take this one.
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
            fleet.wait_for_job(id, JobState::Completed).await?.node_id,
            Some(new.node_id())
        );
        assert_eq!(fleet.session(ONE).await?.node_id, new.node_id());
    }
    fleet.wait_for_job(waiting, JobState::Completed).await?;
    assert_eq!(
        fleet
            .client
            .sessions()
            .exec(session.session_id, &sh("echo still"))
            .await?
            .stdout,
        "still\n"
    );
    old.finish_sleeps(600);
    let job = fleet.wait_for_job(running, JobState::Completed).await?;
    assert_eq!(
        (job.node_id, job.output.stdout.as_str()),
        (Some(old.node_id()), "kept\n")
    );
    Ok(())
}

#[tokio::test]
async fn nodes_pull_a_changed_configuration_and_confirm_it() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
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
    eventually("the node reports the image", TIMEOUT, acknowledged).await?;
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
async fn a_single_use_key_admits_one_node() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
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
        .expect_err("the key is spent");
    ensure!(format!("{refused:#}").contains("401"), "{refused:#}");
    ensure!(
        second.join(&control, "made-up").await.is_err(),
        "an unknown key was accepted"
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
            .control_plane
            .postgres
            .query("select count(*) from node_keys where used_by is not null")?,
        "2"
    );
    Ok(())
}

#[tokio::test]
async fn calls_continue_while_tokens_change() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let node = fleet.node("node", &[ONE]).await?;
    let session = fleet.session(ONE).await?.session_id;
    let before = node.tokens();
    let epoch = || {
        fleet
            .control_plane
            .postgres
            .query("select token_epoch from nodes")
    };
    assert_eq!(epoch()?, "1");
    fleet
        .control_plane
        .postgres
        .query("update nodes set tokens_rotated_at = now() - interval '2 days'")?;
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
    eventually("the node has shown its new token", TIMEOUT, changed).await?;
    let after = node.tokens();
    ensure!(
        before.0 != after.0 && before.1 != after.1,
        "a token was not rotated"
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
    fleet.wait_for_job(id, JobState::Completed).await?;
    Ok(())
}

#[tokio::test]
// invariant: control-plane
async fn a_late_request_does_not_revive_an_ended_session() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
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
    let id = body.session_id.expect("the request has an id");
    let sessions = fleet.client.sessions();
    let end = async {
        eventually("the session is recorded", TIMEOUT, async || {
            Ok(sessions.get_session(id).await.is_ok())
        })
        .await?;
        Ok::<_, anyhow::Error>(sessions.end_session(id, &SessionEnd::default()).await?)
    };
    let (made, ended) = tokio::join!(sessions.create_user_session(&body), end);
    assert_eq!(ended?.state, SessionState::Ended);
    assert!(
        made.is_ok_and(|session| session.state == SessionState::Ended),
        "the caller did not learn of the end"
    );
    let gone = async || {
        Ok(node
            .sessions()
            .iter()
            .any(|session| session.session_id == id && session.state == SessionState::Ended))
    };
    eventually("the session ends on the node too", TIMEOUT, gone).await?;
    assert_eq!(sessions.get_session(id).await?.state, SessionState::Ended);
    assert_eq!(
        fleet.states(|event| event.session_id == Some(id)).await?,
        ["creating", "ending", "ended"]
    );
    Ok(())
}

#[tokio::test]
async fn a_caller_that_strips_internal_headers_and_disconnects_is_recorded_by_the_nodes_outcome()
-> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
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
        eventually(&format!("{action} has its outcome"), TIMEOUT, async || {
            Ok(find().await?.is_some())
        })
        .await?;
        find().await?.context("the record was just seen")
    };

    // The file is deleted, and the response is lost.
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

    // The command runs, and its caller disconnects.
    let exec_id = ExecId::generate();
    let mut request = sh("sleep 7; echo done");
    request.exec_id = Some(exec_id);
    let caller = tokio::spawn(hostile(Method::POST, "/exec").json(&request).send());
    let own = node.client()?;
    eventually("the command runs", TIMEOUT, async || {
        Ok(own.get_exec(id, exec_id).await.is_ok())
    })
    .await?;
    caller.abort();
    ensure!(
        caller.await.is_err_and(|error| error.is_cancelled()),
        "the caller got a response"
    );
    node.finish_sleeps(7);
    let ran = outcome("session.exec").await?;
    assert_eq!(
        (ran.result, ran.exec_id),
        (Some(AuditResult::Done), Some(exec_id)),
        "{ran:?}"
    );

    // The node knows the call by the gate's id, which the response also carries, not by the
    // caller's.
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
