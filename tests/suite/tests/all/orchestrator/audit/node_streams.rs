//! Records that nodes write by themselves: merged once, without gaps, and only what a node may say.

use std::{collections::BTreeSet, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    AuditDecision, AuditRecord, AuditResult, NodeAuditBatch, NodeId, SessionId, TaskId,
};
use cynode_client::AuditFilter;
use cynode_tests::{Answer, SimulatedWorker, eventually, sh};
use cynode_worker::audit::{
    AuditedSandbox, DecisionOutcome, ModelCall, ModelUsage, NodeAction, NodeDecision, NodeTrail,
    ProxyTarget, SandboxOwner,
};
use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use uuid::Uuid;

use super::{TIMEOUT, assert_trail_intact, records, request, verdict, wait_until_signed};
use crate::orchestrator::{
    nodes::{Fleet, session_with_labels},
    simulated::{ONE, SimulatedFleet},
};

fn denial(session_id: SessionId, task_id: TaskId, host: &str) -> NodeDecision {
    NodeDecision {
        sandbox: AuditedSandbox {
            owner: SandboxOwner::Session(session_id),
            task_id,
        },
        action: NodeAction::ProxyDenied(ProxyTarget {
            host: host.to_owned(),
            port: 443,
            rule: "default/deny-all".to_owned(),
        }),
        outcome: DecisionOutcome::Denied {
            code: "denied_by_policy".to_owned(),
        },
    }
}

/// A model call and its end.
fn model_call(session_id: SessionId, task_id: TaskId, model: &str) -> [NodeDecision; 2] {
    let call = ModelCall {
        call: Uuid::now_v7(),
        model: model.to_owned(),
        endpoint: "/v1/chat/completions".to_owned(),
    };
    let usage = ModelUsage {
        prompt_tokens: Some(12),
        completion_tokens: Some(34),
        duration: Duration::from_millis(56),
        status: Some(200),
    };
    let sandbox = AuditedSandbox {
        owner: SandboxOwner::Session(session_id),
        task_id,
    };
    [
        NodeDecision {
            sandbox,
            action: NodeAction::ModelRequest(call.clone()),
            outcome: DecisionOutcome::Allowed,
        },
        NodeDecision {
            sandbox,
            action: NodeAction::ModelOutcome { call, usage },
            outcome: DecisionOutcome::Done,
        },
    ]
}

/// A simulated node with a session, and a trail that a real node would write.
struct Node {
    fleet: SimulatedFleet,
    worker: SimulatedWorker,
    session_id: SessionId,
    task_id: TaskId,
    trail: NodeTrail,
}

impl Node {
    async fn start() -> Result<Self> {
        let fleet = SimulatedFleet::start(&[]).await?;
        let worker = fleet.node("node", &[ONE]).await?;
        let session = fleet.session(ONE).await?;
        let trail = open(&fleet, "trail", worker.node_id())?;
        Ok(Self {
            session_id: session.session_id,
            task_id: session.task_id,
            fleet,
            worker,
            trail,
        })
    }

    async fn deny(&self, host: &str) -> Result<()> {
        let decision = denial(self.session_id, self.task_id, host);
        Ok(self.trail.record(decision).await?)
    }

    async fn batch(&self) -> Result<NodeAuditBatch> {
        self.trail.next_batch().await?.context("a batch")
    }

    async fn send(&self, batch: &NodeAuditBatch) -> Result<(u16, Value)> {
        send(&self.fleet, &self.worker.tokens().0, &json!(batch)).await
    }

    /// Sends and acknowledges everything.
    async fn ship(&self) -> Result<()> {
        while let Some(batch) = self.trail.next_batch().await? {
            let (status, answer) = self.send(&batch).await?;
            ensure!(status == 200, "{status}: {answer}");
            let next = answer["next"].as_u64().context("a number")?;
            ensure!(self.trail.acknowledge(batch.stream, next).await?);
        }
        Ok(())
    }

    async fn merged(&self) -> Result<Vec<AuditRecord>> {
        merged(&self.fleet.client, self.session_id).await
    }
}

fn open(fleet: &SimulatedFleet, name: &str, node: NodeId) -> Result<NodeTrail> {
    let directory = fleet.control_plane.world.directory().join(name);
    Ok(NodeTrail::open(directory, node)?)
}

async fn send(fleet: &SimulatedFleet, token: &str, batch: &Value) -> Result<(u16, Value)> {
    let http = reqwest::Client::builder()
        .no_proxy()
        .timeout(TIMEOUT)
        .build()?;
    let url = format!("{}/v1/nodes/audit:batch", fleet.orchestrator.control_url()?);
    let answer = Answer::of(http.post(url).bearer_auth(token).json(batch)).await?;
    Ok((answer.status, serde_json::from_slice(&answer.body)?))
}

/// The records of a session that a node wrote.
async fn merged(
    client: &cynode_client::UserClient,
    session_id: SessionId,
) -> Result<Vec<AuditRecord>> {
    let filter = AuditFilter {
        session: Some(session_id),
        ..Default::default()
    };
    let mut found = records(client, &filter).await?;
    found.retain(|record| {
        record
            .body
            .subject
            .as_ref()
            .is_some_and(|subject| subject.kind == "sandbox" && subject.node_id.is_some())
    });
    Ok(found)
}

fn hosts(records: &[AuditRecord]) -> Vec<String> {
    let host = |record: &AuditRecord| Some(record.body.detail.get("host")?.as_str()?.to_owned());
    records.iter().filter_map(host).collect()
}

#[tokio::test]
// invariant: audit-trail
async fn a_batch_of_a_node_is_merged_once_and_signed_like_other_records() -> Result<()> {
    let node = Node::start().await?;
    node.deny("a.example").await?;
    for decision in model_call(node.session_id, node.task_id, "small") {
        node.trail.record(decision).await?;
    }
    let batch = node.batch().await?;
    for _ in 0..3 {
        let (status, answer) = node.send(&batch).await?;
        ensure!(status == 200 && answer["next"] == 5, "{status}: {answer}");
    }
    node.ship().await?;
    node.deny("b.example").await?;
    node.ship().await?;
    // Another process of the node writes another stream.
    let second = open(&node.fleet, "second", node.worker.node_id())?;
    second
        .record(denial(node.session_id, node.task_id, "c.example"))
        .await?;
    let batch = second.next_batch().await?.context("a batch")?;
    ensure!(node.send(&batch).await?.0 == 200);

    let found = node.merged().await?;
    assert_eq!(hosts(&found), ["a.example", "b.example", "c.example"]);
    let actions: Vec<&str> = found
        .iter()
        .map(|record| record.body.action.as_str())
        .collect();
    assert_eq!(
        actions,
        [
            "proxy.connect",
            "model.call",
            "model.ended",
            "proxy.connect",
            "proxy.connect"
        ]
    );
    let ended = &found[2].body;
    assert_eq!(
        (
            ended.result,
            ended.status,
            &ended.detail["completion_tokens"]
        ),
        (Some(AuditResult::Done), Some(200), &json!(34))
    );
    assert_eq!(found[0].body.decision, Some(AuditDecision::Deny));
    wait_until_signed(&node.fleet.control_plane, &node.fleet.orchestrator).await?;
    assert_trail_intact(&node.fleet.client).await?;
    Ok(())
}

#[tokio::test]
async fn a_gap_or_another_chain_is_refused_with_the_position_that_is_expected() -> Result<()> {
    let node = Node::start().await?;
    for host in ["a.example", "b.example", "c.example"] {
        node.deny(host).await?;
    }
    let batch = node.batch().await?;
    let part = |from: usize, to: usize| NodeAuditBatch {
        records: batch.records[from..to].to_vec(),
        ..batch.clone()
    };
    let (status, problem) = node.send(&part(1, 4)).await?;
    assert_eq!(
        (status, &problem["code"], &problem["expected"]),
        (409, &json!("audit_out_of_order"), &json!(1))
    );
    assert_eq!(node.send(&part(0, 2)).await?.0, 200);
    let (status, problem) = node.send(&part(3, 4)).await?;
    assert_eq!((status, &problem["expected"]), (409, &json!(3)));

    // A record that is not what was chained.
    let mut changed = part(2, 4);
    changed.records[0].body["detail"]["host"] = json!("other.example");
    let (status, problem) = node.send(&changed).await?;
    assert_eq!((status, &problem["expected"]), (409, &Value::Null));
    let mut forged = batch.clone();
    forged.records[1].hash = "ab".repeat(32);
    let (status, problem) = node.send(&forged).await?;
    assert_eq!((status, &problem["expected"]), (409, &Value::Null));

    for malformed in [
        json!({"stream": batch.stream, "records": []}),
        json!({"stream": "x", "records": batch.records}),
        json!({"stream": batch.stream, "records": [batch.records[0], batch.records[2]]}),
        json!({"stream": batch.stream, "records": batch.records, "weather": 1}),
    ] {
        let (status, problem) = send(&node.fleet, &node.worker.tokens().0, &malformed).await?;
        assert_eq!(status, 400, "{problem}");
    }
    node.ship().await?;
    assert_eq!(
        hosts(&node.merged().await?),
        ["a.example", "b.example", "c.example"]
    );
    assert_trail_intact(&node.fleet.client).await?;
    Ok(())
}

#[tokio::test]
async fn a_node_speaks_only_for_itself_and_its_own_sandboxes() -> Result<()> {
    let node = Node::start().await?;
    let key = node
        .fleet
        .client
        .create_node_key(&cynode_api::NodeKeyCreate::default())
        .await?
        .psk;
    let other = SimulatedWorker::start("other", &[]).await?;
    other
        .join(&node.fleet.orchestrator.control_url()?, &key)
        .await?;

    // The other node about this node's session.
    let foreign = open(&node.fleet, "foreign", other.node_id())?;
    foreign
        .record(denial(node.session_id, node.task_id, "a.example"))
        .await?;
    let batch = foreign.next_batch().await?.context("a batch")?;
    let (status, problem) = send(&node.fleet, &other.tokens().0, &json!(batch)).await?;
    assert_eq!(
        (status, &problem["code"], &problem["refused"][0]["seq"]),
        (422, &json!("audit_refused"), &json!(2)),
        "{problem}"
    );
    // A session of another task, and one that is nowhere.
    node.trail
        .record(denial(node.session_id, TaskId::generate(), "b.example"))
        .await?;
    node.trail
        .record(denial(SessionId::generate(), node.task_id, "c.example"))
        .await?;
    let (status, problem) = node.send(&node.batch().await?).await?;
    assert_eq!(status, 422);
    assert_eq!(
        problem["refused"].as_array().map(Vec::len),
        Some(2),
        "{problem}"
    );

    // A stream that belongs to another node: as a whole, and continued.
    let honest = open(&node.fleet, "honest", node.worker.node_id())?;
    honest
        .record(denial(node.session_id, node.task_id, "d.example"))
        .await?;
    let batch = honest.next_batch().await?.context("a batch")?;
    assert_eq!(node.send(&batch).await?.0, 200);
    let taken_over = send(&node.fleet, &other.tokens().0, &json!(batch)).await?;
    assert!([403, 422].contains(&taken_over.0), "{taken_over:?}");
    // And with no node's token.
    for token in ["x", &node.fleet.orchestrator.token()?] {
        assert_eq!(send(&node.fleet, token, &json!(batch)).await?.0, 401);
    }
    assert_eq!(hosts(&node.merged().await?), ["d.example"]);
    assert_trail_intact(&node.fleet.client).await?;
    Ok(())
}

#[tokio::test]
// invariant: audit-trail
async fn tampering_with_a_nodes_records_is_found() -> Result<()> {
    let node = Node::start().await?;
    for host in ["a.example", "b.example", "c.example"] {
        node.deny(host).await?;
    }
    let stream = node.batch().await?.stream;
    node.ship().await?;
    wait_until_signed(&node.fleet.control_plane, &node.fleet.orchestrator).await?;
    assert_trail_intact(&node.fleet.client).await?;
    node.fleet.control_plane.postgres.query(&format!(
        "update audit_events set body = jsonb_set(body, '{{detail,host}}', '\"x.example\"') where stream = '{stream}' and seq = 3"
    ))?;
    let found = verdict(&node.fleet.client).await?;
    assert!(
        found.problems.iter().any(|problem| {
            problem.what == "record_changed"
                && problem.stream == Some(stream)
                && problem.seq == Some(3)
        }),
        "{found:#?}"
    );
    node.fleet.control_plane.postgres.query(&format!(
        "delete from audit_events where stream = '{stream}' and seq >= 3"
    ))?;
    let found = verdict(&node.fleet.client).await?;
    assert!(
        found
            .problems
            .iter()
            .any(|problem| problem.what == "tail_missing" && problem.stream == Some(stream)),
        "{found:#?}"
    );
    Ok(())
}

/// The node's directory with its streams.
fn audit_directory(state: &Path) -> std::path::PathBuf {
    state.join("worker/audit")
}

/// Records are durable when the worker dies before it has shipped them, and it dies while it ships.
// part of: ISC-20
#[tokio::test]
// invariant: nothing-lost
async fn a_worker_that_is_killed_between_record_and_shipping_loses_and_doubles_nothing()
-> Result<()> {
    const ROUNDS: usize = 3;
    const RECORDS: usize = 1_500;
    let fleet = Fleet::new().await?;
    let mut worker = fleet.node("node-1").await?;
    let client = fleet.orchestrator.client()?;
    let session = client
        .sessions()
        .create_user_session(&session_with_labels(&[]))
        .await?;
    let node = session.node_id;
    let directory = audit_directory(&fleet.control_plane.world.state_dir());
    let mut expected = BTreeSet::new();
    for round in 0..ROUNDS {
        worker.kill()?;
        // What a process has recorded when it dies: nobody has shipped it.
        let trail = NodeTrail::open(directory.clone(), node)?;
        let names: Vec<String> = (0..RECORDS)
            .map(|number| format!("model-{round}-{number}"))
            .collect();
        let decisions = names.iter().map(|name| {
            let [call, _] = model_call(session.session_id, session.task_id, name);
            trail.record(call)
        });
        for (outcome, name) in futures_util::future::join_all(decisions)
            .await
            .into_iter()
            .zip(&names)
        {
            // Beyond its share of the backlog the sandbox is refused.
            if outcome.is_ok() {
                expected.insert(name.clone());
            }
        }
        drop(trail);
        let options = fleet.options("node-1", &fleet.orchestrator.control_url()?);
        worker = fleet.control_plane.world.worker(&options).await?;
        // Killed again at different points of the shipping.
        let stored = || -> Result<u64> {
            let count = fleet
                .control_plane
                .postgres
                .query("select count(*) from audit_events where action = 'model.call'")?;
            Ok(count.parse()?)
        };
        let some = (expected.len() * (round + 1) / (ROUNDS + 1)) as u64;
        eventually("some records are shipped", TIMEOUT, async || {
            Ok(stored()? >= some)
        })
        .await?;
    }
    worker.signal(Signal::KILL)?;
    worker.wait(TIMEOUT).await?;
    let options = fleet.options("node-1", &fleet.orchestrator.control_url()?);
    let _worker = fleet.control_plane.world.worker(&options).await?;
    let models = async || -> Result<Vec<String>> {
        let mut found = merged(&client, session.session_id).await?;
        // The worker adds the ends of calls that nobody saw end.
        found.retain(|record| record.body.action == "model.call");
        let model =
            |record: &AuditRecord| Some(record.body.detail.get("model")?.as_str()?.to_owned());
        Ok(found.iter().filter_map(model).collect())
    };
    eventually("everything is shipped", TIMEOUT, async || {
        Ok(models().await?.len() >= expected.len())
    })
    .await?;
    let found = models().await?;
    let distinct: BTreeSet<String> = found.iter().cloned().collect();
    assert_eq!(found.len(), distinct.len(), "records were doubled");
    assert_eq!(distinct, expected, "records were lost");
    ensure!(expected.len() > RECORDS, "{} records", expected.len());
    assert_trail_intact(&client).await?;
    Ok(())
}

/// Refused records become records of the node, and do not keep others from being shipped; so does
/// an orchestrator whose database was restored.
#[tokio::test]
async fn a_worker_goes_on_when_the_orchestrator_refuses_or_has_lost_records() -> Result<()> {
    let fleet = Fleet::new().await?;
    let mut worker = fleet.node("node-1").await?;
    let options = fleet.options("node-1", &fleet.orchestrator.control_url()?);
    let client = fleet.orchestrator.client()?;
    let session = client
        .sessions()
        .create_user_session(&session_with_labels(&[]))
        .await?;
    let id = session.session_id;
    let directory = audit_directory(&fleet.control_plane.world.state_dir());
    worker.kill()?;
    let trail = NodeTrail::open(directory.clone(), session.node_id)?;
    for (session_id, host) in [
        (id, "a.example"),
        (SessionId::generate(), "foreign.example"),
        (id, "b.example"),
    ] {
        trail
            .record(denial(session_id, session.task_id, host))
            .await?;
    }
    drop(trail);
    let mut worker = fleet.control_plane.world.worker(&options).await?;
    let all = async || -> Result<Vec<String>> { Ok(hosts(&merged(&client, id).await?)) };
    eventually("what is not refused is shipped", TIMEOUT, async || {
        Ok(all().await?.len() == 2)
    })
    .await?;
    let refused = super::records_of_action(&client, "audit.refused").await?;
    assert_eq!(refused.len(), 1);
    assert_eq!(
        refused[0].body.detail["record"]["body"]["detail"]["host"],
        "foreign.example"
    );
    assert!(refused[0].body.session_id.is_none());

    // The database forgets the stream; the node has deleted what was acknowledged.
    worker.kill()?;
    let trail = NodeTrail::open(directory, session.node_id)?;
    for host in ["c.example", "d.example"] {
        trail.record(denial(id, session.task_id, host)).await?;
    }
    let batch = trail.next_batch().await?.context("a batch")?;
    trail.acknowledge(batch.stream, 3).await?;
    drop(trail);
    let _worker = fleet.control_plane.world.worker(&options).await?;
    eventually("the rest is shipped", TIMEOUT, async || {
        Ok(all().await?.contains(&"d.example".to_owned()))
    })
    .await?;
    assert_trail_intact(&client).await?;
    Ok(())
}

/// The denials of a sandbox's proxy arrive, although its worker dies right after the answer.
#[tokio::test]
// invariant: nothing-lost
async fn a_denial_that_a_sandbox_saw_is_in_the_trail_although_its_worker_was_killed() -> Result<()>
{
    const ROUNDS: usize = 3;
    let fleet = Fleet::new().await?;
    let mut worker = fleet.node("node-1").await?;
    let options = fleet.options("node-1", &fleet.orchestrator.control_url()?);
    let client = fleet.orchestrator.client()?;
    let session = client
        .sessions()
        .create_user_session(&session_with_labels(&[]))
        .await?;
    let mut expected = Vec::new();
    for round in 0..ROUNDS {
        let host = format!("round-{round}.example");
        let ask = format!(
            "printf 'CONNECT {host}:443 HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n' \
             | timeout 20 nc 127.0.0.1 3128"
        );
        let denied = async || {
            let printed = client.sessions().exec(session.session_id, &sh(&ask)).await;
            Ok(printed.is_ok_and(|printed| printed.stdout.contains("egress_denied")))
        };
        eventually("the proxy answers", TIMEOUT, denied).await?;
        worker.kill()?;
        expected.push(host);
        worker = fleet.control_plane.world.worker(&options).await?;
    }
    let seen = async || -> Result<BTreeSet<String>> {
        let found = merged(&client, session.session_id).await?;
        Ok(hosts(&found).into_iter().collect())
    };
    eventually("all denials are shipped", TIMEOUT, async || {
        let seen = seen().await?;
        Ok(expected.iter().all(|host| seen.contains(host)))
    })
    .await?;
    assert_trail_intact(&client).await?;
    Ok(())
}

#[tokio::test]
async fn a_story_and_the_command_line_show_what_the_node_decided() -> Result<()> {
    let node = Node::start().await?;
    node.deny("a.example").await?;
    node.ship().await?;
    let path = format!("/v1/audit?session_id={}", node.session_id);
    let token = node.fleet.orchestrator.token()?;
    let answer = Answer::of(request(
        &node.fleet.orchestrator,
        &token,
        Method::GET,
        &path,
    )?)
    .await?;
    let page: cynode_api::AuditPage = serde_json::from_slice(&answer.body)?;
    let shown = crate::cli::run(
        crate::cli::cynode(&node.fleet.control_plane.world)?
            .env("CYNODE_URL", node.fleet.orchestrator.url()?)
            .env("CYNODE_TOKEN", &token)
            .args(["audit", "show", &node.session_id.to_string()]),
        b"",
    )?;
    assert!(
        shown.text().contains("proxy.connect a.example:443")
            && shown.text().contains("default/deny-all"),
        "{shown:?} {page:?}"
    );
    Ok(())
}
