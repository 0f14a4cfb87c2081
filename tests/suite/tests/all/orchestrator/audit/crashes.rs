//! An orchestrator that dies leaves calls without an outcome. Another one determines their outcome
//! by asking the node.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    AuditBody, AuditKind, AuditResult, CallId, CallState, ErrorCode, ExecId, ExecState, NodeState,
    SessionId, UserSessionCreate,
};
use cynode_client::{AuditFilter, PutOptions, UserClient};
use cynode_tests::{
    ControlPlane, IMAGE, Options, Relay, RunningOrchestrator, RunningWorker, eventually, sh,
};
use rustix::process::Signal;
use serde_json::json;
use time::OffsetDateTime;

use super::{CallRecord, TIMEOUT, assert_trail_intact, call_record, records_of_action, sha256};
use crate::orchestrator::{faults::small_limits, stack::kill};

/// A worker behind relays that can be cut, and that finds a restarted orchestrator at any address.
struct RelayedStack {
    worker: RunningWorker,
    orchestrator: RunningOrchestrator,
    /// From the orchestrator to the node, and from the node to the control plane.
    to_node: Relay,
    to_orchestrator: Relay,
    settings: Vec<(&'static str, String)>,
    control_plane: ControlPlane,
}

impl RelayedStack {
    async fn start() -> Result<Self> {
        let control_plane = ControlPlane::new().await?;
        let key = control_plane
            .world
            .directory()
            .join("registration.key")
            .display()
            .to_string();
        let settings = vec![
            ("registration_key_file", key.clone()),
            ("seed_images", format!("[{IMAGE:?}]")),
            ("heartbeat_seconds", "1".to_owned()),
        ];
        let orchestrator = start_orchestrator(&control_plane, &settings).await?;
        let (to_node, to_orchestrator) = (Relay::new().await?, Relay::new().await?);
        to_orchestrator.route_to(&orchestrator.control_url()?)?;
        let options = Options::default()
            .set("orchestrator_url", &format!("{:?}", to_orchestrator.url()))
            .set("api_url", &format!("{:?}", to_node.url()))
            .set("registration_key_file", &format!("{key:?}"));
        let worker = control_plane.world.worker(&options).await?;
        to_node.route_to(&worker.url()?)?;
        let stack = Self {
            worker,
            orchestrator,
            to_node,
            to_orchestrator,
            settings,
            control_plane,
        };
        let client = stack.client()?;
        eventually("the node is ready", TIMEOUT, async || {
            Ok(client
                .nodes()
                .await?
                .iter()
                .any(|node| node.state == NodeState::Ready))
        })
        .await?;
        // A node can rule out a call only if it would have arrived some seconds after the node's
        // start.
        let node = stack.worker.client()?;
        let is_old = async || {
            let since = node
                .call_state(CallId::generate())
                .await?
                .remembered_since
                .context("the response has `remembered_since`")?;
            Ok(OffsetDateTime::now_utc() - since > time::Duration::seconds(6))
        };
        eventually("the node remembers long enough", TIMEOUT, is_old).await?;
        Ok(stack)
    }

    fn client(&self) -> Result<UserClient> {
        self.orchestrator.client()
    }

    async fn session(&self) -> Result<SessionId> {
        let request = UserSessionCreate {
            limits: Some(small_limits()),
            ..Default::default()
        };
        Ok(self
            .client()?
            .sessions()
            .create_user_session(&request)
            .await?
            .session_id)
    }

    async fn restart_orchestrator(&mut self) -> Result<()> {
        self.orchestrator = start_orchestrator(&self.control_plane, &self.settings).await?;
        self.to_orchestrator
            .route_to(&self.orchestrator.control_url()?)
    }
}

async fn start_orchestrator(
    control_plane: &ControlPlane,
    settings: &[(&'static str, String)],
) -> Result<RunningOrchestrator> {
    let settings: Vec<(&str, &str)> = settings
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect();
    control_plane.orchestrator("", &settings).await
}

/// Waits for the outcome of the only call of an action in a session.
async fn wait_for_outcome(
    client: &UserClient,
    session: SessionId,
    action: &str,
) -> Result<CallRecord> {
    let filter = AuditFilter {
        session: Some(session),
        action: Some(action.to_owned()),
        ..Default::default()
    };
    let find = async || -> Result<Vec<AuditBody>> {
        Ok(super::records(client, &filter)
            .await?
            .into_iter()
            .map(|record| record.body)
            .collect())
    };
    eventually(&format!("{action} has its outcome"), TIMEOUT, async || {
        Ok(find()
            .await?
            .iter()
            .any(|body| body.kind == AuditKind::Outcome))
    })
    .await?;
    let call_id = find()
        .await?
        .first()
        .and_then(|body| body.call_id)
        .context("the call has an id")?;
    call_record(client, &call_id.to_string()).await
}

async fn wait_until_all_closed(client: &UserClient) -> Result<()> {
    eventually("no call is open", TIMEOUT, async || {
        Ok(super::verdict(client).await?.open == 0)
    })
    .await?;
    assert_trail_intact(client).await.map(drop)
}

// part of: ISC-22
#[tokio::test]
// invariant: intent-and-outcome
async fn a_command_that_outlives_its_orchestrator_is_closed_with_its_outcome() -> Result<()> {
    let mut stack = RelayedStack::start().await?;
    let (client, node) = (stack.client()?, stack.worker.client()?);
    let session = stack.session().await?;
    let exec_id = ExecId::generate();
    let mut request = sh("mkfifo gate; cat gate; printf told; exit 7");
    request.exec_id = Some(exec_id);
    let caller = tokio::spawn(async move { client.sessions().exec(session, &request).await });
    let runs = async || {
        Ok(node
            .get_exec(session, exec_id)
            .await
            .is_ok_and(|exec| exec.state == ExecState::Running))
    };
    eventually("the command runs", TIMEOUT, runs).await?;
    stack.orchestrator.kill()?;
    let answer = caller.await?;
    ensure!(answer.is_err(), "the call was answered: {answer:?}");
    // The command ends while no orchestrator runs.
    let mut open = sh("until [ -p gate ]; do :; done; echo open > gate");
    open.exec_id = Some(ExecId::generate());
    node.exec(session, &open).await?;
    let ended = async || Ok(node.get_exec(session, exec_id).await?.state == ExecState::Exited);
    eventually("the command has ended", TIMEOUT, ended).await?;
    stack.restart_orchestrator().await?;

    let client = stack.client()?;
    let CallRecord { intent, outcome } = wait_for_outcome(&client, session, "session.exec").await?;
    assert_ne!(
        intent.stream, outcome.stream,
        "the process that crashed wrote the outcome"
    );
    assert_eq!(
        (outcome.body.result, outcome.body.exec_id),
        (Some(AuditResult::Done), Some(exec_id))
    );
    assert_eq!(
        json!([
            outcome.body.detail["exit_code"],
            outcome.body.detail["found_out"]
        ]),
        json!([7, "the node has it"])
    );
    assert_eq!(
        outcome.body.detail["sha256"]["stdout"],
        json!(sha256("open\ntold"))
    );
    wait_until_all_closed(&client).await?;
    stack.worker.shut_down().await
}

// part of: ISC-22
#[tokio::test]
async fn a_call_whose_response_was_lost_is_closed_by_the_nodes_call_record() -> Result<()> {
    let mut stack = RelayedStack::start().await?;
    let (client, node) = (stack.client()?, stack.worker.client()?);
    let session = stack.session().await?;
    let mut request = sh("mkfifo gate; cat gate; wc -c");
    (request.background, request.stdin_open) = (true, true);
    let exec_id = client
        .sessions()
        .exec_background(session, &request)
        .await?
        .exec_id;
    // More than a pipe holds: the call stays open until the command reads.
    let input = vec![b'x'; 1 << 20];
    let written = input.clone();
    let caller = tokio::spawn(async move {
        client
            .sessions()
            .write_stdin(session, exec_id, written, true)
            .await
    });
    let intent = "select call_id from audit_events where action = 'exec.stdin' and kind = 'intent'";
    eventually("the intent is recorded", TIMEOUT, async || {
        Ok(!stack.control_plane.postgres.query(intent)?.is_empty())
    })
    .await?;
    let call_id: CallId = stack.control_plane.postgres.query(intent)?.parse()?;
    let is = async |state: CallState| Ok(node.call_state(call_id).await?.state == state);
    eventually("the node executes the call", TIMEOUT, async || {
        is(CallState::Running).await
    })
    .await?;
    // From now on the orchestrator receives nothing, and doesn't notice.
    kill(stack.orchestrator.pid(), Signal::STOP)?;
    node.exec(
        session,
        &sh("until [ -p gate ]; do :; done; echo open > gate"),
    )
    .await?;
    eventually("the node has answered", TIMEOUT, async || {
        is(CallState::Answered).await
    })
    .await?;
    stack.orchestrator.kill()?;
    let answer = caller.await?;
    ensure!(answer.is_err(), "the call was answered: {answer:?}");
    stack.restart_orchestrator().await?;

    let client = stack.client()?;
    let CallRecord { intent, outcome } = wait_for_outcome(&client, session, "exec.stdin").await?;
    assert_ne!(
        intent.stream, outcome.stream,
        "the process that crashed wrote the outcome"
    );
    assert_eq!(
        (outcome.body.result, outcome.body.exec_id),
        (Some(AuditResult::Done), Some(exec_id))
    );
    let detail = &outcome.body.detail;
    assert_eq!(
        json!([
            detail["found_out"],
            detail["bytes"]["stdin"],
            detail["sha256"]["stdin"]
        ]),
        json!(["the node remembers it", 1 << 20, sha256(&input)])
    );
    // The end of the background command is recorded too.
    eventually("the end is recorded", TIMEOUT, async || {
        Ok(!records_of_action(&client, "exec.ended").await?.is_empty())
    })
    .await?;
    assert_eq!(
        records_of_action(&client, "exec.ended").await?[0]
            .body
            .detail["sha256"]["stdout"],
        json!(sha256("open\n1048576\n"))
    );
    wait_until_all_closed(&client).await?;
    stack.worker.shut_down().await
}

// part of: ISC-22
#[tokio::test]
// invariant: intent-and-outcome
async fn calls_that_never_reached_the_node_are_closed_as_not_started_before_and_after_a_crash()
-> Result<()> {
    let mut stack = RelayedStack::start().await?;
    let client = stack.client()?;
    let session = stack.session().await?;
    client.sessions().exec(session, &sh("true")).await?;

    // The orchestrator that made the call retries until the node responds.
    stack.to_node.cut();
    let refused = client.sessions().exec(session, &sh("touch one")).await;
    ensure!(
        refused
            .as_ref()
            .is_err_and(|error| error.is(ErrorCode::NodeUnreachable)),
        "{refused:?}"
    );
    stack.to_node.route_to(&stack.worker.url()?)?;
    let left = async || {
        Ok(records_of_action(&client, "session.exec")
            .await?
            .iter()
            .filter(|record| record.body.kind == AuditKind::Outcome)
            .count()
            == 2)
    };
    eventually("both commands have their outcome", TIMEOUT, left).await?;
    let last = records_of_action(&client, "session.exec")
        .await?
        .pop()
        .context("there are records")?;
    assert_eq!(
        (last.body.result, last.body.exec_id.is_some()),
        (Some(AuditResult::NotStarted), true),
        "{last:?}"
    );
    assert_eq!(
        last.body.detail["found_out"],
        json!("it never came to the node")
    );

    // Another orchestrator takes over when the first is gone.
    stack.to_node.cut();
    let put = client
        .sessions()
        .put_file(session, "two".as_ref(), "text", &PutOptions::default())
        .await;
    ensure!(
        put.as_ref()
            .is_err_and(|error| error.is(ErrorCode::NodeUnreachable)),
        "{put:?}"
    );
    stack.orchestrator.kill()?;
    stack.to_node.route_to(&stack.worker.url()?)?;
    stack.restart_orchestrator().await?;
    let client = stack.client()?;
    let CallRecord { intent, outcome } = wait_for_outcome(&client, session, "file.write").await?;
    assert_ne!(
        intent.stream, outcome.stream,
        "the process that crashed wrote the outcome"
    );
    assert_eq!(
        (outcome.body.result, &outcome.body.detail["found_out"]),
        (
            Some(AuditResult::NotStarted),
            &json!("it never came to the node")
        )
    );
    let listed = async || client.sessions().exec(session, &sh("ls")).await;
    eventually(
        "the node is called again",
        Duration::from_secs(60),
        async || Ok(listed().await.is_ok()),
    )
    .await?;
    assert_eq!(listed().await?.stdout, "", "a command was started");
    wait_until_all_closed(&client).await?;
    stack.worker.shut_down().await
}

#[tokio::test]
// invariant: intent-and-outcome
async fn an_interrupted_local_call_is_closed_by_whether_its_effect_exists() -> Result<()> {
    let mut stack = RelayedStack::start().await?;
    let client = stack.client()?;
    // The orchestrator dies while sessions are being created.
    let callers: Vec<_> = (0..6)
        .map(|_| {
            let (client, session_id) = (client.clone(), SessionId::generate());
            tokio::spawn(async move {
                let request = UserSessionCreate {
                    session_id: Some(session_id),
                    limits: Some(small_limits()),
                    ..Default::default()
                };
                (
                    session_id,
                    client
                        .sessions()
                        .create_user_session(&request)
                        .await
                        .is_ok(),
                )
            })
        })
        .collect();
    let started = async || {
        Ok(stack.control_plane.postgres.query(
            "select count(*) from audit_events where action = 'session.create' and kind = 'intent'",
        )? != "0")
    };
    eventually("a call was started", TIMEOUT, started).await?;
    stack.orchestrator.kill()?;
    let mut responses = Vec::new();
    for caller in callers {
        responses.push(caller.await?);
    }
    stack.restart_orchestrator().await?;
    let client = stack.client()?;
    wait_until_all_closed(&client).await?;
    for (id, is_answered) in responses {
        let filter = AuditFilter {
            session: Some(id),
            action: Some("session.create".to_owned()),
            ..Default::default()
        };
        let found = super::records(&client, &filter).await?;
        let outcomes: Vec<_> = found
            .iter()
            .filter(|record| record.body.kind == AuditKind::Outcome)
            .collect();
        let is_there = stack.control_plane.postgres.query(&format!(
            "select count(*) from sessions where session_id = '{id}'"
        ))? == "1";
        let intents = found.len() - outcomes.len();
        ensure!(intents == outcomes.len() && intents <= 1, "{found:#?}");
        ensure!(
            !is_answered || outcomes.len() == 1,
            "the response has no outcome"
        );
        let result = outcomes.first().and_then(|record| record.body.result);
        let expected = if is_there {
            Some(AuditResult::Done)
        } else {
            result.filter(|result| *result != AuditResult::Done)
        };
        ensure!(result == expected, "{is_there}: {found:#?}");
    }
    let sessions = client
        .sessions()
        .list_sessions(&cynode_client::SessionFilter::default())
        .await?;
    for session in sessions {
        client
            .sessions()
            .end_session(session.session_id, &cynode_api::SessionEnd::default())
            .await?;
    }
    let clean = async || Ok(stack.control_plane.world.containers()?.is_empty());
    eventually("no container is left", Duration::from_secs(120), clean).await?;
    stack.worker.shut_down().await
}
