//! Records removed by retention, and records removed by tampering.

use proptest::{prelude::*, sample::Index};
use serde_json::json;
use uuid::Uuid;

use crate::trail::{Step, Trail, only_problem, reports, sealed};

fn write(stream: usize, count: u32) -> Vec<Step> {
    (0..count)
        .map(|n| Step::Write {
            stream,
            body: json!({"n": n}),
        })
        .collect()
}

/// Two streams of ten records; the first four of the first stream are cut.
fn cut() -> Trail {
    let mut steps = write(0, 10);
    steps.extend(write(1, 10));
    steps.extend([
        Step::Sign { full: false },
        Step::Cut {
            stream: 0,
            records: 4,
        },
        Step::Sign { full: true },
    ]);
    Trail::write(steps)
}

#[test]
// invariant: audit-trail
fn records_removed_by_retention_are_counted_and_no_problem() {
    let verdict = cut().verify();
    assert!(
        verdict.intact && verdict.truncated == 4 && verdict.records == 16,
        "{verdict:?}"
    );
}

#[test]
fn a_stream_may_be_cut_again_and_completely() {
    let mut steps = write(0, 10);
    steps.extend([
        Step::Sign { full: false },
        Step::Cut {
            stream: 0,
            records: 4,
        },
        Step::Cut {
            stream: 0,
            records: 6,
        },
    ]);
    steps.extend(write(1, 3));
    steps.push(Step::Sign { full: true });
    let trail = Trail::write(steps);
    let verdict = trail.verify();
    assert!(
        verdict.intact && verdict.truncated == 10 && verdict.streams == 1,
        "{verdict:?}"
    );
    // The full checkpoint doesn't cover the removed stream and need not.
    let mut pruned = trail.clone();
    pruned.table.drain(..pruned.table.len() - 1);
    assert!(pruned.verify().intact);
    pruned.file.clear();
    assert!(pruned.verify().intact);
}

#[test]
fn a_full_checkpoint_carries_the_cuts_when_those_before_it_are_gone() {
    let mut trail = cut();
    trail.table.drain(..trail.table.len() - 1);
    trail.file.clear();
    assert!(trail.verify().intact, "{:#?}", trail.verify().problems);
}

#[test]
fn a_removed_record_that_reappears_is_found() {
    let whole = Trail::write(write(0, 10));
    let mut trail = cut();
    trail.records.insert(0, whole.records[2].clone());
    let verdict = trail.verify();
    assert_eq!(
        (
            only_problem(&verdict).what.as_str(),
            only_problem(&verdict).seq
        ),
        ("record_inserted", Some(3))
    );
}

#[test]
fn an_outcome_may_outlive_its_intent() {
    let call = json!(Uuid::from_u128(5));
    let steps = vec![
        Step::Write {
            stream: 0,
            body: json!({"kind": "intent", "call_id": call}),
        },
        Step::Write {
            stream: 0,
            body: json!({"kind": "outcome", "call_id": call}),
        },
        Step::Sign { full: false },
        Step::Cut {
            stream: 0,
            records: 1,
        },
    ];
    assert!(Trail::write(steps).verify().intact);
}

proptest! {
    #[test]
    // invariant: audit-trail
    fn records_missing_beyond_the_cut_are_found(more in 1..6usize) {
        let mut trail = cut();
        trail.records.drain(..more);
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!((problem.what.as_str(), problem.seq), ("record_missing", Some(5)));
    }

    #[test]
    fn a_missing_beginning_that_no_checkpoint_cut_is_found(
        trail in sealed(),
        place in any::<Index>(),
        count in 1..4usize,
    ) {
        let mut trail = trail;
        let stream = place.get(&trail.records).1.stream;
        let places = trail.places(stream);
        prop_assume!(places.len() > count);
        for place in places[..count].iter().rev() {
            trail.records.remove(*place);
        }
        let verdict = trail.verify();
        prop_assert!(
            reports(&verdict, "record_missing", stream, 1) && verdict.problems.len() == 1,
            "{:#?}",
            verdict.problems
        );
    }
}
