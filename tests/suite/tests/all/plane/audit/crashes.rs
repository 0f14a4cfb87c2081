//! An orchestrator that dies leaves calls without an outcome. Another finds out what became of them, by asking the node.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    AuditBody, AuditKind, AuditResult, CallId, CallState, ErrorCode, ExecId, ExecState, NodeState,
    SessionId, UserSessionCreate,
};
use cynode_client::{AuditFilter, PutOptions, UserClient};
use cynode_tests::{
    IMAGE, Options, Plane, Relay, RunningOrchestrator, RunningWorker, eventually, sh,
};
use rustix::process::Signal;
use serde_json::json;
use time::OffsetDateTime;

use super::{PATIENCE, Told, intact, of_action, sha256, told};
use crate::plane::{faults::small, stack::kill};

/// A worker that is reached by a way that can be closed, and that finds an orchestrator again wherever it comes back.
struct Stack {
    worker: RunningWorker,
    orchestrator: RunningOrchestrator,
    /// From the orchestrator to the node, and from the node to the control plane.
    way: Relay,
    back: Relay,
    settings: Vec<(&'static str, String)>,
    plane: Plane,
}

impl Stack {
    async fn start() -> Result<Self> {
        let plane = Plane::new().await?;
        let key = plane
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
        let orchestrator = begin(&plane, &settings).await?;
        let (way, back) = (Relay::new().await?, Relay::new().await?);
        back.lead_to(&orchestrator.control_url()?)?;
        let options = Options::default()
            .set("orchestrator_url", &format!("{:?}", back.url()))
            .set("api_url", &format!("{:?}", way.url()))
            .set("registration_key_file", &format!("{key:?}"));
        let worker = plane.world.worker(&options).await?;
        way.lead_to(&worker.url()?)?;
        let stack = Self {
            worker,
            orchestrator,
            way,
            back,
            settings,
            plane,
        };
        let client = stack.client()?;
        eventually("the node is ready", PATIENCE, async || {
            Ok(client
                .nodes()
                .await?
                .iter()
                .any(|node| node.state == NodeState::Ready))
        })
        .await?;
        // Of calls that came to it later than some seconds after its start, a node knows for certain that they did not.
        let node = stack.worker.client()?;
        let is_old = async || {
            let since = node
                .call_state(CallId::generate())
                .await?
                .remembered_since
                .context("it says since when it remembers")?;
            Ok(OffsetDateTime::now_utc() - since > time::Duration::seconds(6))
        };
        eventually("the node remembers long enough", PATIENCE, is_old).await?;
        Ok(stack)
    }

    fn client(&self) -> Result<UserClient> {
        self.orchestrator.client()
    }

    async fn session(&self) -> Result<SessionId> {
        let request = UserSessionCreate {
            limits: Some(small()),
            ..Default::default()
        };
        Ok(self
            .client()?
            .sessions()
            .create_user_session(&request)
            .await?
            .session_id)
    }

    async fn begin_again(&mut self) -> Result<()> {
        self.orchestrator = begin(&self.plane, &self.settings).await?;
        self.back.lead_to(&self.orchestrator.control_url()?)
    }
}

async fn begin(plane: &Plane, settings: &[(&'static str, String)]) -> Result<RunningOrchestrator> {
    let settings: Vec<(&str, &str)> = settings
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect();
    plane.orchestrator("", &settings).await
}

/// The one call of an action in a session, when it has an outcome.
async fn closed(client: &UserClient, session: SessionId, action: &str) -> Result<Told> {
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
    eventually(&format!("{action} has its outcome"), PATIENCE, async || {
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
    told(client, &call_id.to_string()).await
}

async fn all_closed(client: &UserClient) -> Result<()> {
    eventually("no call is open", PATIENCE, async || {
        Ok(super::verdict(client).await?.open == 0)
    })
    .await?;
    intact(client).await.map(drop)
}

// proves: ISC-22
#[tokio::test]
async fn a_command_that_ran_while_the_orchestrator_was_killed_is_closed_with_how_it_ended()
-> Result<()> {
    let mut stack = Stack::start().await?;
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
    eventually("it runs", PATIENCE, runs).await?;
    stack.orchestrator.kill()?;
    let answer = caller.await?;
    ensure!(answer.is_err(), "nobody answered: {answer:?}");
    // It ends while nobody is there to see it.
    let mut open = sh("until [ -p gate ]; do :; done; echo open > gate");
    open.exec_id = Some(ExecId::generate());
    node.exec(session, &open).await?;
    let ended = async || Ok(node.get_exec(session, exec_id).await?.state == ExecState::Exited);
    eventually("it has ended", PATIENCE, ended).await?;
    stack.begin_again().await?;

    let client = stack.client()?;
    let Told { intent, outcome } = closed(&client, session, "session.exec").await?;
    assert_ne!(intent.stream, outcome.stream, "another process wrote it");
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
    all_closed(&client).await?;
    stack.worker.shut_down().await
}

// proves: ISC-22
#[tokio::test]
async fn a_call_that_the_node_answered_when_nobody_listened_is_closed_by_what_the_node_remembers()
-> Result<()> {
    let mut stack = Stack::start().await?;
    let (client, node) = (stack.client()?, stack.worker.client()?);
    let session = stack.session().await?;
    let mut request = sh("mkfifo gate; cat gate; wc -c");
    (request.background, request.stdin_open) = (true, true);
    let exec_id = client
        .sessions()
        .exec_background(session, &request)
        .await?
        .exec_id;
    // More than fits into a pipe: the call goes on until the command reads.
    let input = vec![b'x'; 1 << 20];
    let written = input.clone();
    let caller = tokio::spawn(async move {
        client
            .sessions()
            .write_stdin(session, exec_id, written, true)
            .await
    });
    let intent = "select call_id from audit_events where action = 'exec.stdin' and kind = 'intent'";
    eventually("its intent is there", PATIENCE, async || {
        Ok(!stack.plane.postgres.ask(intent)?.is_empty())
    })
    .await?;
    let call_id: CallId = stack.plane.postgres.ask(intent)?.parse()?;
    let is = async |state: CallState| Ok(node.call_state(call_id).await?.state == state);
    eventually("the node is at it", PATIENCE, async || {
        is(CallState::Running).await
    })
    .await?;
    // From now on the orchestrator hears nothing, and nobody notices.
    kill(stack.orchestrator.pid(), Signal::STOP)?;
    node.exec(
        session,
        &sh("until [ -p gate ]; do :; done; echo open > gate"),
    )
    .await?;
    eventually("the node has answered", PATIENCE, async || {
        is(CallState::Answered).await
    })
    .await?;
    stack.orchestrator.kill()?;
    let answer = caller.await?;
    ensure!(answer.is_err(), "nobody answered: {answer:?}");
    stack.begin_again().await?;

    let client = stack.client()?;
    let Told { intent, outcome } = closed(&client, session, "exec.stdin").await?;
    assert_ne!(intent.stream, outcome.stream, "another process wrote it");
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
    // And the command, which was in the background, is told to its end.
    eventually("its end is told", PATIENCE, async || {
        Ok(!of_action(&client, "exec.ended").await?.is_empty())
    })
    .await?;
    assert_eq!(
        of_action(&client, "exec.ended").await?[0].body.detail["sha256"]["stdout"],
        json!(sha256("open\n1048576\n"))
    );
    all_closed(&client).await?;
    stack.worker.shut_down().await
}

// proves: ISC-22
#[tokio::test]
async fn calls_that_never_came_to_the_node_are_closed_as_not_started_before_and_after_a_crash()
-> Result<()> {
    let mut stack = Stack::start().await?;
    let client = stack.client()?;
    let session = stack.session().await?;
    client.sessions().exec(session, &sh("true")).await?;

    // The one who took the call asks until the node answers.
    stack.way.cut();
    let refused = client.sessions().exec(session, &sh("touch one")).await;
    ensure!(
        refused
            .as_ref()
            .is_err_and(|error| error.is(ErrorCode::NodeUnreachable)),
        "{refused:?}"
    );
    stack.way.lead_to(&stack.worker.url()?)?;
    let left = async || {
        Ok(of_action(&client, "session.exec")
            .await?
            .iter()
            .filter(|record| record.body.kind == AuditKind::Outcome)
            .count()
            == 2)
    };
    eventually("both commands have their outcome", PATIENCE, left).await?;
    let last = of_action(&client, "session.exec")
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

    // And another one does when that one is gone.
    stack.way.cut();
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
    stack.way.lead_to(&stack.worker.url()?)?;
    stack.begin_again().await?;
    let client = stack.client()?;
    let Told { intent, outcome } = closed(&client, session, "file.write").await?;
    assert_ne!(intent.stream, outcome.stream, "another process wrote it");
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
    assert_eq!(listed().await?.stdout, "", "nothing was begun");
    all_closed(&client).await?;
    stack.worker.shut_down().await
}

#[tokio::test]
async fn what_was_done_here_and_cut_off_is_closed_by_whether_it_is_there() -> Result<()> {
    let mut stack = Stack::start().await?;
    let client = stack.client()?;
    // Sessions are asked for, and the orchestrator dies in the midst of them.
    let callers: Vec<_> = (0..6)
        .map(|_| {
            let (client, session_id) = (client.clone(), SessionId::generate());
            tokio::spawn(async move {
                let request = UserSessionCreate {
                    session_id: Some(session_id),
                    limits: Some(small()),
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
    let begun = async || {
        Ok(stack.plane.postgres.ask(
            "select count(*) from audit_events where action = 'session.create' and kind = 'intent'",
        )? != "0")
    };
    eventually("one was begun", PATIENCE, begun).await?;
    stack.orchestrator.kill()?;
    let mut asked = Vec::new();
    for caller in callers {
        asked.push(caller.await?);
    }
    stack.begin_again().await?;
    let client = stack.client()?;
    all_closed(&client).await?;
    for (id, is_answered) in asked {
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
        let is_there = stack.plane.postgres.ask(&format!(
            "select count(*) from sessions where session_id = '{id}'"
        ))? == "1";
        let intents = found.len() - outcomes.len();
        ensure!(intents == outcomes.len() && intents <= 1, "{found:#?}");
        ensure!(
            !is_answered || outcomes.len() == 1,
            "what was answered is told"
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
    let clean = async || Ok(stack.plane.world.containers()?.is_empty());
    eventually("no container is left", Duration::from_secs(120), clean).await?;
    stack.worker.shut_down().await
}
