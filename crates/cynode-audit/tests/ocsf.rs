//! Each kind of record as an OCSF event.

mod common;

use common::{event, intent, outcome, records, subject};
use cynode_api::{AuditBody, AuditDecision, AuditKind, AuditResult, NodeId};
use cynode_audit::ocsf;
use serde_json::{Value, json};
use uuid::Uuid;

/// The order of members depends on the build: any crate can enable serde_json's `preserve_order`.
macro_rules! snapshot {
    ($event:expr) => {
        insta::with_settings!({ sort_maps => true, omit_expression => true }, { insta::assert_json_snapshot!($event) })
    };
}

fn event_of(body: AuditBody) -> Value {
    ocsf(&records(vec![body])[0])
}

#[test]
fn an_exec_intent_is_a_process_event() {
    snapshot!(event_of(intent(
        "session.exec",
        1,
        json!({"argv": ["/usr/bin/make", "test all", "\u{1b}[2J"], "cwd": "/workspace", "env": ["CI"], "timeout_ms": 1000})
    )));
}

#[test]
fn an_exec_outcome_has_its_exit() {
    let detail = json!({"exit_code": 2, "signal": null, "timed_out": false, "duration_ms": 1200, "bytes": {"stdout": 4000, "stderr": 100}});
    snapshot!(event_of(outcome(
        "session.exec",
        1,
        AuditResult::Done,
        detail
    )));
}

#[test]
fn a_file_write_has_its_hashes() {
    let detail = json!({"changes": [{"path": "/workspace/a.py", "sha256_before": "ab".repeat(32), "sha256_after": "cd".repeat(32)}]});
    snapshot!(event_of(outcome(
        "file.write",
        2,
        AuditResult::Done,
        detail
    )));
}

#[test]
fn a_denied_read_has_its_rules() {
    let body = AuditBody {
        decision: Some(AuditDecision::Deny),
        stage: Some("policy".to_owned()),
        rules: vec!["default/no-etc".to_owned(), "team/no-secrets".to_owned()],
        result: Some(AuditResult::Refused),
        status: Some(403),
        code: Some("denied_by_policy".to_owned()),
        ..intent("file.read", 3, json!({"path": "/etc/shadow"}))
    };
    snapshot!(event_of(body));
}

#[test]
fn a_created_token_is_listed_as_a_resource() {
    let body = AuditBody {
        resource: Some("token:9".to_owned()),
        ..outcome(
            "token.create",
            4,
            AuditResult::Done,
            json!({"kind": "sandbox"}),
        )
    };
    snapshot!(event_of(body));
}

#[test]
fn an_unknown_caller_is_a_failed_authentication() {
    let body = AuditBody {
        decision: Some(AuditDecision::Deny),
        subject: Some(cynode_api::AuditSubject {
            kind: "nobody".to_owned(),
            ..cynode_api::AuditSubject::default()
        }),
        code: Some("unauthorized".to_owned()),
        status: Some(401),
        ..event(
            AuditKind::Authentication,
            "authenticate",
            json!({"address": "192.0.2.1", "count": 1, "route": "user_api", "token": "00000007"}),
        )
    };
    snapshot!(event_of(body));
}

#[test]
fn a_node_event_has_the_node_as_actor() {
    let body = AuditBody {
        subject: Some(cynode_api::AuditSubject {
            node_id: Some(NodeId::from_uuid(Uuid::from_u128(7))),
            user_id: None,
            token_id: None,
            ..subject("node", "n1")
        }),
        ..event(AuditKind::Event, "session.state", json!({"state": "lost"}))
    };
    snapshot!(event_of(body));
}

#[test]
fn a_stream_record_is_an_api_event() {
    snapshot!(event_of(event(
        AuditKind::Stream,
        "stream.begin",
        json!({"version": "0.1.0"})
    )));
}

#[test]
fn every_event_has_the_fields_that_ocsf_requires() {
    let bodies = [
        intent("session.exec", 1, json!({})),
        outcome(
            "files:patch",
            2,
            AuditResult::Failed,
            json!({"changes": []}),
        ),
        intent("file.move", 3, json!({"from": "/a", "to": "/b/"})),
        intent("weather", 4, json!({"changes": "not a list"})),
        event(
            AuditKind::Event,
            "",
            json!({"argv": "not a list", "path": 7}),
        ),
    ];
    for body in bodies {
        let event = event_of(body);
        for name in [
            "activity_id",
            "category_uid",
            "class_uid",
            "type_uid",
            "severity_id",
            "time",
            "status_id",
        ] {
            assert!(event[name].is_i64(), "{name} in {event}");
        }
        assert_eq!(
            event["type_uid"],
            event["class_uid"].as_u64().expect("a number") * 100
                + event["activity_id"].as_u64().expect("a number")
        );
        assert_eq!(
            event["category_uid"],
            event["class_uid"].as_u64().expect("a number") / 1000
        );
        assert!(
            event["metadata"]["version"].is_string()
                && event["metadata"]["product"]["vendor_name"].is_string()
        );
        assert!(event["actor"]["user"]["type_id"].is_i64());
        let required: &[&str] = match event["class_uid"].as_u64() {
            Some(1001) => &["file", "device"],
            Some(1007) => &["process", "device"],
            _ => &["api", "src_endpoint"],
        };
        assert!(
            required.iter().all(|name| event[*name].is_object()),
            "{event}"
        );
    }
}
