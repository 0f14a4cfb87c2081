//! Sample records.

use cynode_api::{
    AuditBody, AuditDecision, AuditKind, AuditRecord, AuditResult, AuditSubject, ExecId, SessionId,
    TaskId, TokenId, UserId,
};
use serde_json::{Map, Value};
use time::{Duration, macros::datetime};
use uuid::Uuid;

pub(crate) fn subject(kind: &str, name: &str) -> AuditSubject {
    AuditSubject {
        kind: kind.to_owned(),
        name: Some(name.to_owned()),
        user_id: Some(UserId::from_uuid(Uuid::from_u128(0xa))),
        token_id: Some(TokenId::from_uuid(Uuid::from_u128(0xb))),
        ..AuditSubject::default()
    }
}

fn detail(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        other => panic!("a detail is an object, not {other}"),
    }
}

pub(crate) fn intent(action: &str, call: u128, members: Value) -> AuditBody {
    AuditBody {
        call_id: Some(Uuid::from_u128(call)),
        request_id: Some(format!("r-{call}")),
        subject: Some(subject("user", "ada")),
        task_id: Some(TaskId::from_uuid(Uuid::from_u128(0xc))),
        session_id: Some(SessionId::from_uuid(Uuid::from_u128(0xd))),
        exec_id: action
            .ends_with("exec")
            .then(|| ExecId::from_uuid(Uuid::from_u128(0xe))),
        decision: Some(AuditDecision::Allow),
        rules: vec!["default/owners".to_owned()],
        detail: detail(members),
        ..AuditBody::new(AuditKind::Intent, action)
    }
}

pub(crate) fn outcome(action: &str, call: u128, result: AuditResult, members: Value) -> AuditBody {
    AuditBody {
        kind: AuditKind::Outcome,
        decision: None,
        rules: Vec::new(),
        result: Some(result),
        status: Some(if result == AuditResult::Done {
            200
        } else {
            422
        }),
        ..intent(action, call, members)
    }
}

pub(crate) fn event(kind: AuditKind, action: &str, members: Value) -> AuditBody {
    AuditBody {
        detail: detail(members),
        ..AuditBody::new(kind, action)
    }
}

/// Records with these bodies, 1.234 seconds apart.
pub(crate) fn records(bodies: Vec<AuditBody>) -> Vec<AuditRecord> {
    let record = |(body, number): (AuditBody, i64)| AuditRecord {
        cursor: number,
        stream: Uuid::from_u128(0xf),
        seq: number.unsigned_abs(),
        at: datetime!(2026-01-02 03:04:05 UTC) + Duration::milliseconds(1_234 * number),
        body,
        hash: "5f".repeat(32),
    };
    bodies.into_iter().zip(1..).map(record).collect()
}
