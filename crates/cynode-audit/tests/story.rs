//! Stories as people read them.

mod common;

use common::{event, intent, outcome, records, subject};
use cynode_api::{AuditBody, AuditDecision, AuditKind, AuditResult, AuditSubject};
use cynode_audit::{StoryCommands, headline, story};
use proptest::prelude::*;
use serde_json::{Value, json};

fn denied(action: &str, call: u128, rules: &[&str], detail: Value) -> AuditBody {
    AuditBody {
        decision: Some(AuditDecision::Deny),
        stage: Some("policy".to_owned()),
        rules: rules.iter().map(|rule| (*rule).to_owned()).collect(),
        ..intent(action, call, detail)
    }
}

fn descriptions(bodies: Vec<AuditBody>) -> Vec<String> {
    story(&records(bodies))
        .lines
        .into_iter()
        .map(|line| line.what)
        .collect()
}

#[test]
fn the_story_of_a_session_lists_calls_in_order_with_outcomes() {
    let agent = AuditBody {
        subject: Some(subject("project_manager", "ada")),
        ..intent(
            "session.exec",
            2,
            json!({"argv": ["sleep", "99"], "timeout_ms": 5000}),
        )
    };
    let bodies = vec![
        intent("session.create", 1, json!({})),
        outcome("session.create", 1, AuditResult::Done, json!({})),
        agent,
        intent("session.exec", 3, json!({"argv": ["make", "test"]})),
        outcome(
            "session.exec",
            3,
            AuditResult::Done,
            json!({"exit_code": 2, "duration_ms": 1200, "bytes": {"stdout": 4000, "stderr": 100}}),
        ),
        outcome(
            "session.exec",
            2,
            AuditResult::Done,
            json!({"timed_out": true, "signal": "KILL", "duration_ms": 5000}),
        ),
        intent("file.write", 4, json!({"path": "/workspace/a.py"})),
        outcome(
            "file.write",
            4,
            AuditResult::Done,
            json!({"changes": [{"path": "/workspace/a.py", "sha256_before": "ab12ffff", "sha256_after": "cd34ffff"}]}),
        ),
        denied(
            "file.read",
            5,
            &["default/no-etc"],
            json!({"path": "/etc/x"}),
        ),
        event(AuditKind::Event, "session.state", json!({"state": "ended"})),
        intent("artifact.put", 6, json!({"path": "out.tar"})),
        outcome("artifact.put", 6, AuditResult::Done, json!({})),
        intent("session.exec", 7, json!({"argv": ["true"]})),
    ];
    insta::with_settings!({ omit_expression => true }, { insta::assert_snapshot!(story(&records(bodies)).to_text()) });
}

#[test]
fn each_way_a_command_ends_has_its_own_text() {
    let end = |result: AuditResult, code: Option<&str>, detail: Value| {
        let outcome = AuditBody {
            code: code.map(ToOwned::to_owned),
            ..outcome("session.exec", 1, result, detail)
        };
        descriptions(vec![
            intent(
                "session.exec",
                1,
                json!({"argv": ["x"], "background": true}),
            ),
            outcome,
        ])
        .remove(0)
    };
    assert_eq!(
        end(
            AuditResult::Done,
            None,
            json!({"exit_code": 0, "duration_ms": 7})
        ),
        "exec  x → exit 0 (7 ms)"
    );
    assert_eq!(
        end(AuditResult::Done, None, json!({"signal": "KILL"})),
        "exec  x → killed by KILL"
    );
    assert_eq!(
        end(
            AuditResult::Done,
            None,
            json!({"oom_killed": true, "signal": "KILL"})
        ),
        "exec  x → out of memory"
    );
    assert_eq!(
        end(AuditResult::Done, None, json!({})),
        "exec  x → in the background"
    );
    assert_eq!(
        end(AuditResult::Failed, Some("exec_failed"), json!({})),
        "exec  x → failed: exec_failed"
    );
    assert_eq!(
        end(AuditResult::NotStarted, None, json!({})),
        "exec  x → not started"
    );
    assert_eq!(
        end(AuditResult::Unknown, None, json!({})),
        "exec  x → outcome unknown"
    );
}

#[test]
fn file_changes_show_the_hashes_before_and_after() {
    let write = |changes: Value| {
        descriptions(vec![outcome(
            "file.write",
            1,
            AuditResult::Done,
            json!({"changes": changes}),
        )])
        .remove(0)
    };
    assert_eq!(
        write(json!([{"path": "a", "sha256_after": "0123456"}])),
        "write a (new, sha256 0123…)"
    );
    assert_eq!(
        write(json!([{"path": "a", "sha256_before": "0123456"}])),
        "write a (sha256 0123… → gone)"
    );
    assert_eq!(
        write(json!([{"path": "a b"}, {"path": "c"}])),
        "write 2 files: 'a b', c"
    );
    let many: Vec<Value> = (0..9).map(|n| json!({"path": format!("f{n}")})).collect();
    assert_eq!(
        write(json!(many)),
        "write 9 files: f0, f1, f2, f3, f4, and 4 more"
    );
    assert_eq!(
        descriptions(vec![intent(
            "file.move",
            1,
            json!({"from": "/a", "to": "/b"})
        )]),
        ["move /a → /b → no outcome yet"]
    );
}

#[test]
fn a_denial_names_its_rules_or_its_stage() {
    assert_eq!(
        descriptions(vec![denied(
            "file.read",
            1,
            &["default/no-etc"],
            json!({"path": "/etc/x"})
        )]),
        ["denied file.read /etc/x by rule default/no-etc"]
    );
    assert_eq!(
        descriptions(vec![denied(
            "session.exec",
            1,
            &["a", "b"],
            json!({"argv": ["rm", "-rf", "/ x"]})
        )]),
        ["denied session.exec rm -rf '/ x' by rules a, b"]
    );
    assert_eq!(
        descriptions(vec![denied("token.create", 1, &[], json!({}))]),
        ["denied token.create at stage policy"]
    );
}

#[test]
fn each_record_has_a_headline() {
    let lines: Vec<String> = records(vec![
        intent("session.exec", 1, json!({"argv": ["make", "test"]})),
        outcome(
            "session.exec",
            1,
            AuditResult::Done,
            json!({"exit_code": 2}),
        ),
        denied("file.read", 2, &[], json!({"path": "/etc/x"})),
        outcome(
            "file.write",
            3,
            AuditResult::Failed,
            json!({"changes": [{"path": "a", "sha256_after": "0123456"}]}),
        ),
        event(AuditKind::Event, "session.state", json!({"state": "lost"})),
    ])
    .iter()
    .map(headline)
    .collect();
    assert_eq!(
        lines,
        [
            "intent  ada  session.exec make test → allowed by rule default/owners",
            "outcome  ada  session.exec → exit 2",
            "intent  ada  file.read /etc/x → denied at stage policy",
            "outcome  ada  file.write a (new, sha256 0123…) → failed",
            "event  system  session.state lost",
        ]
    );
}

#[test]
fn commands_are_counted_by_how_they_ended() {
    let mut bodies = Vec::new();
    for (call, detail) in [
        (1, json!({"exit_code": 0})),
        (2, json!({"exit_code": 1})),
        (3, json!({"signal": "TERM"})),
        (4, json!({"timed_out": true, "signal": "KILL"})),
    ] {
        bodies.extend([
            intent("session.exec", call, json!({"argv": ["x"]})),
            outcome("session.exec", call, AuditResult::Done, detail),
        ]);
    }
    bodies.push(denied("session.exec", 5, &[], json!({"argv": ["x"]})));
    bodies.push(intent("session.exec", 6, json!({"argv": ["x"]})));
    let summary = story(&records(bodies)).summary;
    assert_eq!(
        summary.commands,
        StoryCommands {
            count: 5,
            failed: 2,
            timed_out: 1
        }
    );
    assert_eq!(
        (summary.denials, summary.open, summary.actors),
        (1, 1, vec!["ada".to_owned()])
    );
}

#[test]
fn a_long_list_of_files_is_capped_and_each_is_named_once() {
    let touch = |n: u32| {
        outcome(
            "file.write",
            u128::from(n),
            AuditResult::Done,
            json!({"changes": [{"path": format!("f{}", n % 150)}]}),
        )
    };
    let summary = story(&records((0..300).map(touch).collect())).summary;
    assert_eq!((summary.files.len(), summary.more_files), (100, 50));
}

#[test]
fn an_empty_trail_says_so() {
    assert_eq!(story(&[]).to_text(), "Nothing is recorded.\n");
}

#[test]
fn an_outcome_without_an_intent_has_a_line() {
    assert_eq!(
        descriptions(vec![outcome(
            "session.exec",
            1,
            AuditResult::Done,
            json!({"exit_code": 1})
        )]),
        ["exec  (unknown command) → exit 1"]
    );
}

#[test]
fn hostile_text_is_escaped_for_the_terminal() {
    let evil = "\u{1b}]0;owned\u{7}\u{9b}2J\r\n\u{202e}txt.\0\u{200b}";
    let body = AuditBody {
        subject: Some(subject("user", evil)),
        code: Some(evil.to_owned()),
        resource: Some(evil.to_owned()),
        rules: vec![evil.to_owned()],
        stage: Some(evil.to_owned()),
        ..intent(
            evil,
            1,
            json!({"argv": [evil], "path": evil, "changes": [{"path": evil, "sha256_after": evil}], "state": evil, "signal": evil}),
        )
    };
    let mut bodies = vec![body.clone()];
    for action in ["session.exec", "file.write", "artifact.put", evil] {
        for kind in [AuditKind::Intent, AuditKind::Outcome, AuditKind::Event] {
            for decision in [None, Some(AuditDecision::Deny)] {
                bodies.push(AuditBody {
                    kind,
                    decision,
                    action: action.to_owned(),
                    result: Some(AuditResult::Failed),
                    ..body.clone()
                });
            }
        }
    }
    let records = records(bodies);
    let text = story(&records).to_text() + &records.iter().map(headline).collect::<String>();
    let harmless = |character: char| {
        character == '\n' || !(character.is_control() || "\u{202e}\u{200b}".contains(character))
    };
    assert!(text.chars().all(harmless), "{text:?}");
    assert!(text.contains("\\x1b]0;owned"));
}

proptest! {
    #[test]
    fn stories_have_no_control_characters_whatever_the_detail(
        argv in prop::collection::vec("(?s).*", 0..4),
        path in "(?s).*",
        number in any::<i64>(),
        action in "(?s).*",
    ) {
        let detail = json!({"argv": argv, "path": path, "exit_code": number, "duration_ms": number, "bytes": {"stdout": u64::MAX, "stderr": u64::MAX}, "changes": [path, {"path": number}]});
        let bodies = vec![
            intent("session.exec", 1, detail.clone()),
            outcome("session.exec", 1, AuditResult::Done, detail.clone()),
            intent("file.write", 2, detail.clone()),
            intent(&action, 3, detail),
        ];
        let story = story(&records(bodies));
        prop_assert_eq!(story.lines.len(), 3);
        let text = story.to_text();
        prop_assert!(
            text.chars()
                .all(|character| character == '\n' || !character.is_control()),
            "{:?}",
            text
        );
        prop_assert!(
            story
                .lines
                .iter()
                .all(|line| !line.what.contains('\n') && line.what.chars().count() < 700)
        );
        prop_assert!(serde_json::to_string(&story).is_ok());
    }
}

#[test]
fn an_egress_role_says_what_it_decided_and_what_came_of_it() {
    let push = |decision: Option<AuditDecision>, result: Option<AuditResult>| AuditBody {
        subject: Some(AuditSubject {
            kind: "egress".to_owned(),
            name: Some("git".to_owned()),
            ..AuditSubject::default()
        }),
        resource: Some("repository:web".to_owned()),
        decision,
        result,
        ..event(
            AuditKind::Event,
            "git.push",
            json!({"branch": "cynode/1/fix\u{1b}[2J", "commit": "0123456789abcdef0123"}),
        )
    };
    let denied = AuditBody {
        rules: vec!["repositories/no-ci".to_owned()],
        code: Some("path_refused".to_owned()),
        ..push(Some(AuditDecision::Deny), Some(AuditResult::Refused))
    };
    let bodies = vec![
        push(Some(AuditDecision::Allow), None),
        push(None, Some(AuditResult::Done)),
        push(None, Some(AuditResult::Unknown)),
        denied,
    ];
    let lines: Vec<String> = records(bodies).iter().map(headline).collect();
    let push = "event  egress(git)  git.push repository:web (cynode/1/fix\\x1b[2J, 0123456789ab)";
    assert_eq!(
        lines,
        [
            format!("{push} → allowed"),
            format!("{push} → done"),
            format!("{push} → outcome unknown"),
            format!("{push} → denied by rule repositories/no-ci"),
        ]
    );
    let fetch = &story(&records(vec![AuditBody {
        subject: Some(AuditSubject {
            kind: "egress".to_owned(),
            name: Some("git".to_owned()),
            ..AuditSubject::default()
        }),
        result: Some(AuditResult::Done),
        ..event(AuditKind::Event, "git.fetch", json!({}))
    }]))
    .lines[0];
    assert_eq!(fetch.who, "egress(git)");
    assert_eq!(fetch.what, "git.fetch → done");
}
