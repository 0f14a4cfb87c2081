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
    assert_eq!(bodies.len(), 5, "{bodies:?}");
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
    // Nobody saw the end of the call.
    let ended = with_action(&bodies, "model.ended")[0];
    assert_eq!(ended["code"], "interrupted");
    for pointer in ["/detail/call", "/session_id", "/task_id", "/resource"] {
        assert_eq!(ended.pointer(pointer), called.pointer(pointer), "{pointer}");
    }
}

fn end(decision: NodeDecision) -> NodeDecision {
    let NodeAction::ModelRequest(call) = decision.action else {
        panic!("no call")
    };
    let usage = ModelUsage::default();
    NodeDecision {
        action: NodeAction::ModelOutcome { call, usage },
        outcome: DecisionOutcome::Done,
        ..decision
    }
}

#[tokio::test]
async fn a_call_that_a_dead_process_left_open_is_ended_once_even_if_its_record_is_shipped() {
    let world = World::new();
    let (trail, sandbox) = (world.open(), sandbox());
    let whole = call(sandbox, "whole", DecisionOutcome::Allowed);
    trail.record(whole.clone()).await.expect("recorded");
    trail.record(end(whole)).await.expect("recorded");
    let open = call(sandbox, "open", DecisionOutcome::Allowed);
    trail.record(open).await.expect("recorded");
    assert_eq!(with_action(&ship(&trail).await, "model.call").len(), 2);
    drop(trail);
    let mut ended = Vec::new();
    for _ in 0..3 {
        ended.extend(ship(&world.open()).await);
    }
    let ended = with_action(&ended, "model.ended");
    assert_eq!(ended.len(), 1, "{ended:?}");
    assert_eq!(
        (&ended[0]["detail"]["model"], &ended[0]["code"]),
        (&Value::from("open"), &Value::from("interrupted"))
    );
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
    let ended = call(greedy, "small", DecisionOutcome::Allowed);
    trail
        .record(end(ended))
        .await
        .expect("the outcome is refused");
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

/// Everything is shipped at once, so no share bounds what is recorded.
#[test]
fn denials_of_a_sandbox_are_recorded_at_a_rate_however_fast_they_are_shipped() {
    const SECONDS: u64 = 3_600;
    let mut ledger = Ledger::new(NodeId::generate(), true, std::iter::empty());
    let (sandbox, began) = (sandbox(), Instant::now());
    let mut records = Vec::new();
    for second in 0..SECONDS {
        let (at, now) = (
            OffsetDateTime::now_utc(),
            began + Duration::from_secs(second),
        );
        for number in 0..20 {
            // Half of them repeat.
            let name = if number < 10 {
                second * 20 + number
            } else {
                number
            };
            let decision = denial(sandbox, &format!("{name}.example"));
            if let Admission::Record(record) = ledger.admit(&decision, at, now) {
                records.push(record);
            }
        }
        records.extend(ledger.due(now, false));
        let released = records
            .iter()
            .map(|record| (Some(record.owner), record.cost));
        ledger.release(released.collect::<Vec<_>>());
    }
    assert!(records.len() < 3_000, "{} records", records.len());
    records.extend(ledger.due(began + Duration::from_secs(SECONDS), true));
    let counted: u64 = records.iter().map(|record| record.counts).sum();
    assert_eq!(counted, SECONDS * 20);
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
