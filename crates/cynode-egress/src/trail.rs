//! The role's own audit stream, kept on disk until an orchestrator has merged it.
//!
//! Invariant: a record names this role and its instance as the subject, a task, and no call, user or
//! node, so that it can only be read as what the role itself did.

use std::{io, path::PathBuf};

use async_trait::async_trait;
use cynode_api::{
    AuditBody, AuditKind, AuditResult, AuditSubject, EGRESS_SUBJECT, EgressAuditBatch,
    EgressAuditVerdict, node_audit_limits,
};
use cynode_trail::{Conclusion, TotalLedger, Trail, TrailMetrics, TrailSettings, Verdict};
use serde_json::{Map, Value, json};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::audit::{AuditSink, NotRecorded, RoleOutcome, RoleRecord};

/// Records that wait for the orchestrator, in bytes. Beyond it, what needs a record is refused.
const MAX_BACKLOG_BYTES: u64 = 256 * 1024 * 1024;
/// A name or a text in a record, as JSON.
const MAX_TEXT_BYTES: usize = 256;
/// The rules that a record lists.
const MAX_RULES: usize = 8;
/// The detail of a record as JSON. A record that is refused must fit into another one, with the
/// reason.
const MAX_DETAIL_BYTES: usize = 3 * 1024;
const _: () = assert!(MAX_DETAIL_BYTES * 2 < node_audit_limits::MAX_BODY_BYTES);

const METRICS: TrailMetrics = TrailMetrics {
    backlog_records: "cynode_egress_audit_backlog_records",
    backlog_bytes: "cynode_egress_audit_backlog_bytes",
    lag_seconds: "cynode_egress_audit_lag_seconds",
    refused: "cynode_egress_audit_refused_total",
};

/// The handle of a role's trail. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct RoleTrail {
    trail: Trail<TotalLedger>,
    role: &'static str,
    instance: Uuid,
}

impl RoleTrail {
    /// Opens the trail of a role below a directory. `instance` is the role's, whatever process runs
    /// it.
    pub(crate) fn open(directory: PathBuf, role: &'static str, instance: Uuid) -> io::Result<Self> {
        let settings = TrailSettings {
            directory,
            writer: subject(role, instance),
            name: "this role",
            thread: "egress-audit",
            metrics: METRICS,
            keep_bytes: None,
        };
        Ok(Self {
            trail: Trail::open(settings, TotalLedger::new(MAX_BACKLOG_BYTES))?,
            role,
            instance,
        })
    }

    /// Why the role should take no new work: its records have waited too long.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.trail.check()
    }

    /// Writes everything that is queued.
    pub(crate) async fn flush(&self) {
        self.trail.flush().await;
    }

    /// Waits until a record was stored since this was last called.
    pub(crate) async fn stored(&self) {
        self.trail.stored().await;
    }

    /// The oldest records that are not acknowledged.
    pub(crate) async fn next_batch(&self) -> io::Result<Option<EgressAuditBatch>> {
        let batch = self.trail.next_batch().await?;
        Ok(batch.map(|batch| EgressAuditBatch {
            version: cynode_api::API_VERSION,
            role: self.role.to_owned(),
            instance: self.instance,
            stream: batch.stream,
            records: batch.records,
        }))
    }

    /// Acts on what an orchestrator says to a batch.
    pub(crate) async fn conclude(
        &self,
        stream: Uuid,
        verdict: EgressAuditVerdict,
    ) -> io::Result<Conclusion> {
        let (verdict, problem) = match verdict {
            EgressAuditVerdict::Stored { next } => (Verdict::Stored { next }, None),
            EgressAuditVerdict::OutOfOrder { expected } => (
                Verdict::OutOfOrder { expected },
                Some("the orchestrator expects other records".to_owned()),
            ),
            EgressAuditVerdict::Refused { records } => {
                let first = records.first().map(|refusal| refusal.reason.clone());
                let refused = records.into_iter().map(|one| (one.seq, one.reason));
                (
                    Verdict::Refused(refused.collect()),
                    first.map(|reason| format!("the orchestrator refuses records: {reason}")),
                )
            }
        };
        self.trail.set_problem(problem);
        self.trail.conclude(stream, verdict).await
    }

    /// The body of a record.
    fn body(&self, record: &RoleRecord) -> AuditBody {
        let mut body = AuditBody::new(AuditKind::Event, record.action.as_str());
        body.subject = Some(subject(self.role, self.instance));
        body.task_id = Some(record.task_id);
        body.session_id = record.session_id;
        body.resource = Some(format!("repository:{}", bounded(&record.repository)));
        body.decision = record.outcome.decision();
        let rules = record.rules.iter().take(MAX_RULES);
        body.rules = rules.map(|rule| bounded(rule)).collect();
        let stage = match &record.outcome {
            RoleOutcome::Allowed => "intent",
            RoleOutcome::Denied { code } => {
                body.result = Some(AuditResult::Refused);
                body.code = Some(bounded(code));
                "intent"
            }
            RoleOutcome::Ended { result, code } => {
                body.result = Some(*result);
                body.code = code.as_deref().map(bounded);
                "outcome"
            }
        };
        body.detail = bounded_detail(&record.detail);
        let ids = [
            ("call", record.call_id.map(|id| id.to_string())),
            ("promotion", record.promotion_id.map(|id| id.to_string())),
            ("operation", Some(record.operation.to_string())),
            ("stage", Some(stage.to_owned())),
        ];
        let ids = ids
            .into_iter()
            .filter_map(|(name, id)| Some((name.to_owned(), json!(id?))));
        body.detail.extend(ids);
        body
    }
}

#[async_trait]
impl AuditSink for RoleTrail {
    async fn record(&self, record: RoleRecord) -> Result<(), NotRecorded> {
        let body = self.body(&record);
        let body = serde_json::to_value(body).expect("a body serializes");
        let is_outcome = matches!(record.outcome, RoleOutcome::Ended { .. });
        let admitted = self
            .trail
            .with_ledger(|ledger| ledger.admit(body, is_outcome));
        let Some(admitted) = admitted else {
            self.trail.count_refusal();
            return Err(NotRecorded);
        };
        let permits_effect = matches!(record.outcome, RoleOutcome::Allowed);
        self.trail
            .write(OffsetDateTime::now_utc(), admitted, permits_effect)
            .await
            .map_err(|_| NotRecorded)
    }
}

fn subject(role: &str, instance: Uuid) -> AuditSubject {
    AuditSubject {
        kind: EGRESS_SUBJECT.to_owned(),
        name: Some(role.to_owned()),
        instance: Some(instance),
        ..AuditSubject::default()
    }
}

/// A text that somebody else chose, cut to a bounded length.
fn bounded(text: &str) -> String {
    let mut length = 0;
    let mut kept: String = text
        .chars()
        .take_while(|character| {
            length += match character {
                '"' | '\\' => 2,
                '\0'..='\x1f' => 6,
                character => character.len_utf8(),
            };
            length <= MAX_TEXT_BYTES
        })
        .collect();
    if kept.len() < text.len() {
        kept.push('…');
    }
    kept
}

/// The members that fit, with texts cut; says if some are left out.
fn bounded_detail(detail: &Map<String, Value>) -> Map<String, Value> {
    let mut kept = Map::new();
    let mut length = 0;
    for (name, value) in detail {
        let value = match value {
            Value::String(text) => json!(bounded(text)),
            value => value.clone(),
        };
        length += name.len() + value.to_string().len();
        if length > MAX_DETAIL_BYTES {
            kept.insert("truncated".to_owned(), json!(true));
            break;
        }
        kept.insert(name.clone(), value);
    }
    kept
}

#[cfg(test)]
mod tests {
    use cynode_api::{EGRESS_GIT_ACTIONS, NODE_REFUSED_ACTION, NodeAuditRefusal, TaskId};
    use cynode_trail::Ledger as _;

    use super::*;
    use crate::audit::RoleAction;

    struct World {
        directory: tempfile::TempDir,
        instance: Uuid,
    }

    impl World {
        fn new() -> Self {
            Self {
                directory: tempfile::tempdir().expect("a directory"),
                instance: Uuid::now_v7(),
            }
        }

        fn open(&self) -> RoleTrail {
            let directory = self.directory.path().join("audit");
            RoleTrail::open(directory, "git", self.instance).expect("opens")
        }
    }

    fn push(outcome: RoleOutcome) -> RoleRecord {
        RoleRecord {
            action: RoleAction::Push,
            operation: Uuid::now_v7(),
            task_id: TaskId::generate(),
            session_id: None,
            promotion_id: None,
            call_id: None,
            repository: "web".to_owned(),
            outcome,
            rules: vec!["repositories/default".to_owned()],
            detail: Map::new(),
        }
    }

    #[tokio::test]
    async fn a_decision_and_its_outcome_survive_without_a_clean_stop() {
        let world = World::new();
        let trail = world.open();
        let intent = push(RoleOutcome::Allowed)
            .with("branch", "cynode/1/fix")
            .with("commit", "0123");
        trail.record(intent.clone()).await.expect("recorded");
        let outcome = intent.ended(AuditResult::Done, None);
        trail.record(outcome).await.expect("recorded");
        // As after kill -9: what another process finds on the disk.
        let batch = world.open().next_batch().await.expect("readable");
        drop(trail);
        let batch = batch.expect("records");
        assert_eq!(
            (batch.role.as_str(), batch.instance),
            ("git", world.instance)
        );
        let bodies: Vec<&Value> = batch.records.iter().map(|record| &record.body).collect();
        assert_eq!(bodies.len(), 3, "{bodies:?}");
        let expected = json!({
            "kind": "egress", "name": "git", "instance": world.instance,
        });
        assert!(bodies.iter().all(|body| body["subject"] == expected));
        assert_eq!(bodies[1]["decision"], "allow");
        assert_eq!(bodies[1]["resource"], "repository:web");
        assert_eq!(bodies[1]["detail"]["stage"], "intent");
        assert_eq!(bodies[2]["result"], "done");
        assert_eq!(bodies[2]["detail"]["stage"], "outcome");
        assert_eq!(
            bodies[1]["detail"]["operation"],
            bodies[2]["detail"]["operation"]
        );
        assert_eq!(bodies[2]["detail"]["branch"], "cynode/1/fix");
    }

    #[tokio::test]
    async fn a_record_fits_whatever_a_caller_names() {
        let world = World::new();
        let trail = world.open();
        let code = "\u{1}".repeat(100_000);
        let mut record = push(RoleOutcome::Denied { code });
        record.repository = "ü".repeat(100_000);
        record.rules = vec!["\"".repeat(1_000); 1_000];
        for number in 0..1_000 {
            record = record.with(&format!("name-{number}"), "\u{1}".repeat(1_000));
        }
        trail.record(record).await.expect("recorded");
        let batch = trail.next_batch().await.expect("readable").expect("some");
        let body = &batch.records[1].body;
        assert_eq!(body["detail"]["truncated"], true);
        assert_eq!(body["detail"]["stage"], "intent");
        let refusal = NodeAuditRefusal {
            seq: 2,
            reason: "its session or job is not this node's, or not of that task".to_owned(),
        };
        let verdict = EgressAuditVerdict::Refused {
            records: vec![refusal],
        };
        let concluded = trail.conclude(batch.stream, verdict).await;
        assert_eq!(concluded.expect("stored"), Conclusion::Rebased);
        let batch = trail.next_batch().await.expect("readable").expect("some");
        let refused = &batch.records[1].body;
        assert_eq!(refused["detail"]["record"]["body"], *body);
        let length = refused.to_string().len();
        assert!(length < node_audit_limits::MAX_BODY_BYTES, "{length}");
    }

    #[tokio::test]
    async fn a_refused_record_becomes_one_of_the_role_and_the_rest_goes_on() {
        let world = World::new();
        let trail = world.open();
        for _ in 0..2 {
            trail
                .record(push(RoleOutcome::Allowed))
                .await
                .expect("recorded");
        }
        let batch = trail.next_batch().await.expect("readable").expect("some");
        let refusal = NodeAuditRefusal {
            seq: 2,
            reason: "it is foreign".to_owned(),
        };
        let verdict = EgressAuditVerdict::Refused {
            records: vec![refusal],
        };
        let concluded = trail.conclude(batch.stream, verdict).await;
        assert_eq!(concluded.expect("stored"), Conclusion::Rebased);
        let again = trail.next_batch().await.expect("readable").expect("some");
        assert_ne!(again.stream, batch.stream);
        let refused = &again.records[1].body;
        assert_eq!(refused["action"], NODE_REFUSED_ACTION);
        assert_eq!(refused["subject"]["instance"], world.instance.to_string());
        let next = again.records.len() as u64 + 1;
        let verdict = EgressAuditVerdict::Stored { next };
        trail.conclude(again.stream, verdict).await.expect("stored");
        assert_eq!(trail.next_batch().await.expect("readable"), None);
        assert_eq!(trail.trail.with_ledger(|ledger| ledger.total()), 0);
    }

    #[test]
    fn every_action_is_one_that_orchestrators_accept() {
        for action in [
            RoleAction::Fetch,
            RoleAction::Commit,
            RoleAction::Push,
            RoleAction::PullRequest,
        ] {
            assert!(EGRESS_GIT_ACTIONS.contains(&action.as_str()));
        }
    }
}
