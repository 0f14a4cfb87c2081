use std::time::Duration;

use cynode_api::{ErrorCode, JobId, SessionId, TaskId};
use serde_json::Value;

use super::*;

struct World {
    directory: tempfile::TempDir,
    node: NodeId,
}

impl World {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().expect("a directory"),
            node: NodeId::generate(),
        }
    }

    fn open(&self) -> NodeTrail {
        NodeTrail::open(self.directory.path().join("audit"), self.node).expect("opens")
    }
}

fn sandbox() -> AuditedSandbox {
    AuditedSandbox {
        owner: SandboxOwner::Session(SessionId::generate()),
        task_id: TaskId::generate(),
    }
}

fn denial(sandbox: AuditedSandbox, host: &str) -> NodeDecision {
    NodeDecision {
        sandbox,
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

fn call(sandbox: AuditedSandbox, model: &str, outcome: DecisionOutcome) -> NodeDecision {
    let call = ModelCall {
        call: Uuid::now_v7(),
        model: model.to_owned(),
        endpoint: "/v1/chat/completions".to_owned(),
    };
    NodeDecision {
        sandbox,
        action: NodeAction::ModelRequest(call),
        outcome,
    }
}

/// All records that wait, and acknowledges them.
async fn ship(trail: &NodeTrail) -> Vec<Value> {
    let mut bodies = Vec::new();
    while let Some(batch) = trail.next_batch().await.expect("readable") {
        let last = batch.records.last().expect("not empty").seq;
        bodies.extend(batch.records.into_iter().map(|record| record.body));
        assert!(
            trail
                .acknowledge(batch.stream, last + 1)
                .await
                .expect("stored")
        );
    }
    bodies
}

fn with_action<'a>(bodies: &'a [Value], action: &str) -> Vec<&'a Value> {
    bodies
        .iter()
        .filter(|body| body["action"] == action)
        .collect()
}

fn counted(bodies: &[Value]) -> u64 {
    bodies
        .iter()
        .filter_map(|body| body.pointer("/detail/count").and_then(Value::as_u64))
        .sum()
}

#[tokio::test]
async fn a_recorded_decision_survives_without_a_clean_stop() {
    let world = World::new();
    let (trail, sandbox) = (world.open(), sandbox());
    trail
        .record(denial(sandbox, "example.com"))
        .await
        .expect("recorded");
    let allowed = call(sandbox, "small", DecisionOutcome::Allowed);
    trail.record(allowed.clone()).await.expect("recorded");
    // As after kill -9: what another process finds on the disk.
    let bodies = ship(&world.open()).await;
    drop(trail);
    assert_eq!(bodies.len(), 3, "{bodies:?}");
    let denied = with_action(&bodies, "proxy.connect")[0];
    assert_eq!(
        (&denied["decision"], &denied["resource"], &denied["rules"]),
        (
            &Value::from("deny"),
            &Value::from("example.com:443"),
            &serde_json::json!(["default/deny-all"])
        )
    );
    let called = with_action(&bodies, "model.call")[0];
    assert_eq!(called["detail"]["model"], "small");
    assert_eq!(called["subject"]["node_id"], world.node.to_string());
}

#[tokio::test]
async fn repeats_of_a_denial_become_one_record_and_a_count() {
    let world = World::new();
    let (trail, one, other) = (world.open(), sandbox(), sandbox());
    for _ in 0..1_000 {
        trail
            .record(denial(one, "a.example"))
            .await
            .expect("recorded");
    }
    trail
        .record(denial(one, "b.example"))
        .await
        .expect("recorded");
    trail
        .record(denial(other, "a.example"))
        .await
        .expect("recorded");
    trail.flush().await;
    let bodies = ship(&trail).await;
    assert_eq!(with_action(&bodies, "proxy.connect").len(), 4, "{bodies:?}");
    assert_eq!(counted(&bodies), 999);
    // Effects are recorded one by one.
    for _ in 0..3 {
        let allowed = call(one, "small", DecisionOutcome::Allowed);
        trail.record(allowed).await.expect("recorded");
    }
    assert_eq!(with_action(&ship(&trail).await, "model.call").len(), 3);
}

#[tokio::test]
async fn a_sandbox_that_uses_up_its_share_refuses_only_itself() {
    let world = World::new();
    let (trail, greedy, modest) = (world.open(), sandbox(), sandbox());
    let mut accepted = 0;
    let refused = loop {
        let calls = (0..100)
            .map(|_| trail.record(call(greedy, &"m".repeat(200), DecisionOutcome::Allowed)));
        let outcomes = futures_util::future::join_all(calls).await;
        accepted += outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        if let Some(error) = outcomes.into_iter().find_map(Result::err) {
            break error;
        }
        assert!(accepted < 10_000, "nothing bounds the share");
    };
    assert_eq!(refused, RecordError::ShareUsed);
    assert_eq!(refused.code(), "audit_backlog_full");
    // Names fold into a count; a denial has no effect, so it stands.
    for host in 0..50 {
        let denied = denial(greedy, &format!("{host}.example"));
        trail.record(denied).await.expect("counted");
    }
    trail
        .record(call(modest, "small", DecisionOutcome::Allowed))
        .await
        .expect("another sandbox is refused");
    // An outcome belongs to an effect that was let through.
    let mut ended = call(greedy, "small", DecisionOutcome::Done);
    if let NodeAction::ModelRequest(call) = ended.action {
        let usage = ModelUsage::default();
        ended.action = NodeAction::ModelOutcome { call, usage };
    }
    trail.record(ended).await.expect("the outcome is refused");
    trail.flush().await;
    let bodies = ship(&trail).await;
    assert_eq!(with_action(&bodies, "model.call").len(), accepted + 1);
    assert_eq!(
        with_action(&bodies, "proxy.connect").len(),
        0,
        "names were kept"
    );
    let folded = with_action(&bodies, "audit.folded");
    assert!(!folded.is_empty());
    let count = |action: &str| -> u64 {
        let counts = folded
            .iter()
            .map(|body| body["detail"]["actions"][action].as_u64());
        counts.map(Option::unwrap_or_default).sum()
    };
    assert_eq!(count("proxy.connect"), 50);
    assert!(count("model.call") > 0, "what was refused is not counted");
    // Shipped records make room again.
    trail
        .record(call(greedy, "small", DecisionOutcome::Allowed))
        .await
        .expect("there is room again");
}

#[tokio::test]
async fn the_share_is_used_up_after_a_restart_too() {
    let world = World::new();
    let greedy = sandbox();
    let fill = async |trail: &NodeTrail| -> usize {
        let mut accepted = 0;
        while trail
            .record(call(greedy, &"m".repeat(250), DecisionOutcome::Allowed))
            .await
            .is_ok()
        {
            accepted += 1;
            assert!(accepted < 10_000);
        }
        accepted
    };
    let trail = world.open();
    assert!(fill(&trail).await > 100);
    drop(trail);
    assert_eq!(fill(&world.open()).await, 0);
}

#[tokio::test]
async fn many_distinct_denials_of_a_sandbox_are_counted_without_names() {
    let world = World::new();
    let (trail, sandbox) = (world.open(), sandbox());
    for host in 0..500 {
        let denied = denial(sandbox, &format!("{host}.example"));
        trail.record(denied).await.expect("recorded");
    }
    trail.flush().await;
    let bodies = ship(&trail).await;
    let named = with_action(&bodies, "proxy.connect").len();
    assert!(named < 100, "{named} names");
    assert_eq!(named as u64 + counted(&bodies), 500);
}

#[tokio::test]
async fn a_node_without_an_orchestrator_keeps_the_newest_records() {
    let world = World::new();
    let directory = world.directory.path().join("audit");
    let trail = NodeTrail::open_local(directory, world.node).expect("opens");
    let job = AuditedSandbox {
        owner: SandboxOwner::Job(JobId::generate()),
        task_id: TaskId::generate(),
    };
    // More than a share.
    for _ in 0..20 {
        let calls =
            (0..100).map(|_| trail.record(call(job, &"m".repeat(200), DecisionOutcome::Allowed)));
        for outcome in futures_util::future::join_all(calls).await {
            outcome.expect("recorded");
        }
    }
    assert_eq!(trail.check(), Ok(()));
}

#[tokio::test]
async fn without_a_disk_effects_are_refused() {
    let world = World::new();
    let trail = world.open();
    fs_err::remove_dir_all(world.directory.path().join("audit")).expect("removed");
    let sandbox = sandbox();
    assert_eq!(
        trail
            .record(call(sandbox, "small", DecisionOutcome::Allowed))
            .await,
        Err(RecordError::Unavailable)
    );
    assert_eq!(
        RecordError::Unavailable.code(),
        ErrorCode::AuditUnavailable.as_str()
    );
    fs_err::create_dir(world.directory.path().join("audit")).expect("created");
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let allowed = call(sandbox, "small", DecisionOutcome::Allowed);
        match trail.record(allowed).await {
            Ok(()) => break,
            Err(_) => assert!(tokio::time::Instant::now() < deadline, "never again"),
        }
    }
}
