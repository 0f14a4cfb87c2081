//! Records after the last checkpoint: they are counted, and a running writer still vouches for
//! them.

use std::collections::BTreeMap;

use cynode_api::AuditVerdict;
use cynode_audit::{Checkpoint, DERIVED_COLUMNS, Head, Verifier};
use serde_json::{Value, json};
use time::macros::datetime;
use uuid::Uuid;

use crate::trail::{Step, Trail, key, only_problem, reports};

const STREAM: Uuid = Uuid::from_u128(1);

/// A source of heads other than checkpoints, and how it is added to the verifier.
type Source<'a> = (&'a str, Box<dyn Fn(&mut Verifier) + 'a>);

fn write(number: u64) -> Step {
    Step::Write {
        stream: 0,
        body: json!({"version": 1, "kind": "event", "action": "x", "detail": {"n": number}}),
    }
}

/// Three records, a checkpoint, and three more.
fn trail() -> Trail {
    Trail::write(
        [1, 2, 3]
            .map(write)
            .into_iter()
            .chain([Step::Sign { full: false }])
            .chain([4, 5, 6].map(write))
            .collect(),
    )
}

fn head(trail: &Trail) -> BTreeMap<Uuid, Head> {
    let (_, last) = trail.records.last().expect("records");
    BTreeMap::from([(
        STREAM,
        Head {
            seq: last.seq,
            hash: last.hash,
        },
    )])
}

/// The verdict with an additional source of heads.
fn verify(trail: &Trail, add_source: impl FnOnce(&mut Verifier)) -> AuditVerdict {
    let mut verifier = Verifier::new(key().public());
    trail
        .table
        .iter()
        .for_each(|signed| verifier.checkpoint(signed));
    add_source(&mut verifier);
    trail
        .records
        .iter()
        .for_each(|(cursor, link)| verifier.record(*cursor, link));
    verifier.finish()
}

fn interim(heads: &BTreeMap<Uuid, Head>) -> String {
    let at = datetime!(2026-01-02 03:05:00 UTC);
    let (prev, heads) = (Checkpoint::FIRST, heads.clone());
    Checkpoint {
        number: 0,
        at,
        prev,
        full: false,
        cursor: 0,
        heads,
        cut: BTreeMap::new(),
        truncated_records: 0,
    }
    .sign(&key())
    .to_line()
}

#[test]
fn records_after_the_last_checkpoint_are_counted() {
    let verdict = trail().verify();
    assert_eq!(
        (verdict.intact, verdict.unsigned, verdict.unsigned_since),
        (true, 3, Some(trail().records[3].1.at))
    );
    let sealed = Trail::write(vec![write(1), Step::Sign { full: true }]).verify();
    assert_eq!((sealed.unsigned, sealed.unsigned_since), (0, None));
    let bare = Trail {
        table: Vec::new(),
        file: Vec::new(),
        ..trail()
    }
    .verify();
    assert_eq!((bare.intact, bare.unsigned), (true, 6));
}

#[test]
fn missing_unsigned_records_are_found_by_the_writers_heads_and_the_file() {
    let whole = trail();
    let (heads, line) = (head(&whole), interim(&head(&whole)));
    let witnesses: [Source<'_>; 2] = [
        (
            "its writer committed",
            Box::new(|verifier| verifier.writers(&heads)),
        ),
        (
            "the file outside",
            Box::new(|verifier| verifier.interim(&line)),
        ),
    ];
    for (who, add_source) in &witnesses {
        let verdict = verify(&whole, add_source);
        assert!(
            verdict.intact && verdict.unsigned == 3,
            "{who}: not intact with three unsigned records: {verdict:?}"
        );

        let mut cut = whole.clone();
        cut.records.truncate(4);
        assert!(
            cut.verify().intact,
            "the checkpoint covers the removed records"
        );
        let found = verify(&cut, add_source);
        let problem = only_problem(&found);
        assert_eq!(
            (
                problem.what.as_str(),
                problem.stream,
                problem.seq,
                problem.checkpoint
            ),
            ("tail_missing", Some(STREAM), Some(5), None)
        );
        assert!(problem.detail.contains(who), "{problem:?}");

        let mut forged = whole.clone();
        forged.records[4].1.body = json!({"version": 1, "kind": "event", "action": "harmless"});
        forged.rechain(STREAM, 4);
        assert!(forged.verify().intact);
        assert!(reports(
            &verify(&forged, add_source),
            "record_changed",
            STREAM,
            6
        ));
    }
}

#[test]
fn heads_signed_by_another_key_are_ignored() {
    let other = cynode_audit::SigningKey::from_seed([8; 32]);
    let mut forged = head(&trail());
    for head in forged.values_mut() {
        head.seq = 9;
    }
    let line = Checkpoint {
        number: 0,
        at: datetime!(2026-01-02 03:05:00 UTC),
        prev: Checkpoint::FIRST,
        full: false,
        cursor: 0,
        heads: forged,
        cut: BTreeMap::new(),
        truncated_records: 0,
    };
    let verdict = verify(&trail(), |verifier| {
        verifier.interim(&line.sign(&other).to_line());
    });
    assert_eq!(only_problem(&verdict).what, "signature_bad");
    assert_eq!(
        only_problem(&verify(&trail(), |verifier| verifier.interim("nothing"))).what,
        "checkpoint_changed"
    );
}

#[test]
fn an_overdue_checkpoint_is_a_problem() {
    let trail = trail();
    let mut verifier = Verifier::new(key().public());
    trail
        .table
        .iter()
        .for_each(|signed| verifier.checkpoint(signed));
    trail
        .records
        .iter()
        .for_each(|(cursor, link)| verifier.record(*cursor, link));
    let unsigned = verifier.unsigned().expect("some come after it");
    assert_eq!(
        (unsigned.records, unsigned.since, unsigned.last_cursor),
        (3, trail.records[3].1.at, trail.records[5].0)
    );
    verifier.overdue(60);
    let verdict = verifier.finish();
    let problem = only_problem(&verdict);
    assert_eq!(problem.what, "checkpoint_overdue");
    assert!(
        problem
            .detail
            .starts_with("3 records come after the last checkpoint"),
        "{problem:?}"
    );
}

#[test]
fn a_column_that_contradicts_the_body_is_a_problem_that_names_both() {
    let id = Uuid::now_v7().to_string();
    let body = json!({"version": 1, "kind": "intent", "action": "session.exec", "call_id": id, "subject": {"kind": "user", "name": "ada"}, "session_id": id.to_uppercase()});
    let trail = Trail::write(vec![Step::Write { stream: 0, body }]);
    let (cursor, link) = &trail.records[0];
    let stored: Vec<Option<String>> = DERIVED_COLUMNS
        .iter()
        .map(|(_, path)| {
            path.iter()
                .try_fold(&link.body, |value, name| value.get(name))
                .and_then(Value::as_str)
                .map(str::to_lowercase)
        })
        .collect();
    let found = |change: &dyn Fn(&mut Vec<Option<String>>)| {
        let mut stored = stored.clone();
        change(&mut stored);
        let mut verifier = Verifier::new(key().public());
        verifier.record(*cursor, link);
        verifier.columns(*cursor, link, &stored);
        verifier.finish()
    };
    assert!(found(&|_| ()).intact);
    for (at, (name, _)) in DERIVED_COLUMNS.iter().enumerate() {
        let other = |stored: &mut Vec<Option<String>>| {
            stored[at] = if stored[at].is_some() {
                None
            } else {
                Some(id.clone())
            }
        };
        let verdict = found(&other);
        let problem = only_problem(&verdict);
        assert_eq!(
            (problem.what.as_str(), problem.seq, problem.cursor),
            ("column_changed", Some(1), Some(*cursor))
        );
        assert!(
            problem
                .detail
                .starts_with(&format!("its column {name} is not")),
            "{problem:?}"
        );
        assert_eq!(
            only_problem(&found(&|stored| stored[at] = Some("other".to_owned()))).what,
            "column_changed",
            "{name}"
        );
    }
}
