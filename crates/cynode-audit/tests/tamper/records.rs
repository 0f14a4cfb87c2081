//! Tampering with records.

use cynode_audit::{Link, SigningKey, hash};
use proptest::{prelude::*, sample::Index};
use serde_json::{Value, json};
use time::Duration;
use uuid::Uuid;

use crate::trail::{Step, Trail, key, only_problem, reports, sealed, trails};

proptest! {
    #[test]
    fn an_untouched_trail_is_intact(trail in trails()) {
        let verdict = trail.verify();
        prop_assert!(verdict.intact, "{:#?}", verdict.problems);
        prop_assert_eq!(verdict.records, trail.records.len() as u64);
        prop_assert_eq!(verdict.checkpoints, trail.table.len() as u64);
        prop_assert_eq!(
            verdict.last_signed_at,
            trail.table.last().map(|signed| signed.checkpoint.at)
        );
        prop_assert_eq!(
            verdict.truncated,
            trail
                .table
                .last()
                .map_or(0, |signed| signed.checkpoint.truncated_records)
        );
    }

    #[test]
    // invariant: audit-trail
    fn a_changed_byte_of_a_body_is_one_problem_that_names_the_record(
        trail in trails(),
        place in any::<Index>(),
        at in any::<Index>(),
        byte in 0x20..0x7fu8,
    ) {
        prop_assume!(!trail.records.is_empty());
        let mut trail = trail;
        let at_place = place.index(trail.records.len());
        let (cursor, link) = trail.records[at_place].clone();
        let mut text = link.body.to_string().into_bytes();
        let at = at.index(text.len());
        text[at] = byte;
        let Ok(changed) = serde_json::from_slice::<Value>(&text) else {
            return Ok(());
        };
        prop_assume!(changed != link.body);
        trail.records[at_place].1.body = changed;
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (
                problem.what.as_str(),
                problem.stream,
                problem.seq,
                problem.cursor
            ),
            (
                "record_changed",
                Some(link.stream),
                Some(link.seq),
                Some(cursor)
            )
        );
    }

    #[test]
    fn a_changed_time_is_found(trail in trails(), place in any::<Index>(), by in 1..1_000_000i64) {
        prop_assume!(!trail.records.is_empty());
        let mut trail = trail;
        let place = place.index(trail.records.len());
        let link = &mut trail.records[place].1;
        link.at += Duration::microseconds(by);
        let (stream, seq) = (link.stream, link.seq);
        let verdict = trail.verify();
        prop_assert!(
            reports(&verdict, "record_changed", stream, seq) && verdict.problems.len() == 1,
            "{:#?}",
            verdict.problems
        );
    }

    #[test]
    fn a_changed_hash_is_found_at_its_record(
        trail in trails(),
        place in any::<Index>(),
        at in 0..32usize,
        bit in 0..8u8,
    ) {
        prop_assume!(!trail.records.is_empty());
        let mut trail = trail;
        let place = place.index(trail.records.len());
        let link = &mut trail.records[place].1;
        link.hash[at] ^= 1 << bit;
        let (stream, seq) = (link.stream, link.seq);
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (problem.what.as_str(), problem.stream, problem.seq),
            ("record_changed", Some(stream), Some(seq))
        );
    }

    #[test]
    fn a_record_changed_with_its_hash_is_found_there_or_at_its_successor(
        trail in sealed(),
        place in any::<Index>(),
    ) {
        let mut trail = trail;
        let place = place.index(trail.records.len());
        let stream = trail.records[place].1.stream;
        let before = trail
            .places(stream)
            .into_iter()
            .rfind(|other| *other < place)
            .map_or_else(
                || cynode_audit::genesis(stream),
                |other| trail.records[other].1.hash,
            );
        let link = &mut trail.records[place].1;
        link.body = json!({"action": "something else"});
        link.hash = hash(&before, stream, link.seq, link.at, &link.body);
        let seq = link.seq;
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (problem.what.as_str(), problem.stream),
            ("record_changed", Some(stream))
        );
        let expected = if trail.signed(stream).contains(&seq) {
            seq
        } else {
            seq + 1
        };
        prop_assert_eq!(problem.seq, Some(expected));
        prop_assert!(
            expected == seq
                || problem
                    .detail
                    .contains(&format!("or record {seq} with its hash")),
            "{}",
            problem.detail
        );
    }

    #[test]
    // invariant: audit-trail
    fn a_rechained_stream_is_found_by_the_first_later_signed_head(
        trail in sealed(),
        place in any::<Index>(),
    ) {
        let mut trail = trail;
        let place = place.index(trail.records.len());
        let (stream, seq) = (trail.records[place].1.stream, trail.records[place].1.seq);
        trail.records[place].1.body = json!({"action": "something else"});
        trail.rechain(stream, place);
        let signed = trail.signed(stream);
        let head = *signed
            .iter()
            .find(|head| **head >= seq)
            .expect("the trail is sealed");
        let good = signed
            .iter()
            .rfind(|head| **head < seq)
            .copied()
            .unwrap_or(0);
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (problem.what.as_str(), problem.stream, problem.seq),
            ("record_changed", Some(stream), Some(head))
        );
        prop_assert!(problem.checkpoint.is_some());
        let range = if good + 1 == head {
            format!("record {head} is")
        } else {
            format!("records {} to {head} are", good + 1)
        };
        prop_assert!(
            problem.detail.starts_with(&range),
            "{} / {}",
            problem.detail,
            range
        );
    }

    #[test]
    fn removed_records_are_found(trail in sealed(), from in any::<Index>(), count in 1..4usize) {
        let mut trail = trail;
        let from = from.index(trail.records.len());
        let stream = trail.records[from].1.stream;
        let places = trail.places(stream);
        let begin = places.iter().position(|place| *place == from).expect("it is there");
        let gone = &places[begin..places.len().min(begin + count)];
        let seq = trail.records[from].1.seq;
        for place in gone.iter().rev() {
            trail.records.remove(*place);
        }
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(problem.stream, Some(stream));
        if gone.len() == places.len() {
            prop_assert_eq!((problem.what.as_str(), problem.seq), ("stream_missing", None));
        } else if begin + gone.len() == places.len() {
            prop_assert_eq!((problem.what.as_str(), problem.seq), ("tail_missing", Some(seq)));
        } else {
            prop_assert_eq!((problem.what.as_str(), problem.seq), ("record_missing", Some(seq)));
        }
    }

    #[test]
    fn a_record_removed_from_a_renumbered_and_rechained_stream_is_found(
        trail in sealed(),
        place in any::<Index>(),
    ) {
        let mut trail = trail;
        let place = place.index(trail.records.len());
        let stream = trail.records[place].1.stream;
        trail.records.remove(place);
        for later in trail
            .places(stream)
            .into_iter()
            .filter(|later| *later >= place)
        {
            trail.records[later].1.seq -= 1;
        }
        trail.rechain(stream, place);
        let verdict = trail.verify();
        prop_assert!(
            !verdict.intact
                && verdict
                    .problems
                    .iter()
                    .all(|problem| problem.stream == Some(stream)),
            "{:#?}",
            verdict.problems
        );
    }

    #[test]
    fn an_inserted_record_is_found_anywhere(
        trail in sealed(),
        after in any::<Index>(),
        number in any::<Index>(),
        chained in any::<bool>(),
    ) {
        let mut trail = trail;
        let after = after.index(trail.records.len());
        let (cursor, stream) = (trail.records[after].0 + 1, trail.records[after].1.stream);
        let places = trail.places(stream);
        let like = trail.records[*number.get(&places)].1.clone();
        let body = json!({"action": "forged"});
        let before = trail
            .places(stream)
            .into_iter()
            .rfind(|place| trail.records[*place].1.seq < like.seq)
            .map(|place| trail.records[place].1.hash);
        let prev = before.unwrap_or_else(|| cynode_audit::genesis(stream));
        let forged = if chained {
            hash(&prev, stream, like.seq, like.at, &body)
        } else {
            [3; 32]
        };
        trail.records.insert(
            after + 1,
            (
                cursor,
                Link {
                    body,
                    hash: forged,
                    ..like.clone()
                },
            ),
        );
        let verdict = trail.verify();
        prop_assert!(!verdict.intact);
        prop_assert!(
            verdict
                .problems
                .iter()
                .all(|problem| problem.stream == Some(stream)),
            "{:#?}",
            verdict.problems
        );
        prop_assert!(
            verdict.problems.iter().any(|problem| problem
                .seq
                .is_some_and(|seq| seq == like.seq || seq == like.seq + 1)),
            "{:#?}",
            verdict.problems
        );
    }

    #[test]
    fn a_record_inserted_under_an_existing_number_is_one_problem(
        trail in sealed(),
        place in any::<Index>(),
    ) {
        let mut trail = trail;
        let place = place.index(trail.records.len());
        let (cursor, link) = trail.records[place].clone();
        let forged = Link {
            body: json!({"action": "forged"}),
            hash: [3; 32],
            ..link.clone()
        };
        trail.records.insert(place, (cursor - 1, forged));
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (problem.what.as_str(), problem.seq, problem.cursor),
            ("record_inserted", Some(link.seq), Some(cursor - 1))
        );
    }

    #[test]
    fn a_record_appended_to_a_stream_below_the_last_checkpoint_is_found(trail in sealed()) {
        let mut trail = trail;
        let stream = trail.records[0].1.stream;
        let last = trail.records[*trail.places(stream).last().expect("it has records")].clone();
        let (seq, body) = (last.1.seq + 1, json!({"action": "forged"}));
        let hash = hash(&last.1.hash, stream, seq, last.1.at, &body);
        trail.records.push((
            last.0 + 1,
            Link {
                seq,
                body,
                hash,
                ..last.1
            },
        ));
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (problem.what.as_str(), problem.seq, problem.cursor),
            ("record_inserted", Some(seq), Some(last.0 + 1))
        );
    }

    #[test]
    fn a_stream_inserted_below_the_last_checkpoint_is_found(
        trail in sealed(),
        at in any::<Index>(),
        length in 1..5i64,
    ) {
        let mut trail = trail;
        let cursor = trail.records[at.index(trail.records.len())].0;
        let mut chain = cynode_audit::Chain::new(Uuid::from_u128(99));
        for number in 0..length {
            let link = chain.append(trail.records[0].1.at, json!({"action": "forged"}));
            trail.records.push((cursor + 1 + number, link));
        }
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (problem.what.as_str(), problem.stream, problem.seq),
            ("record_inserted", Some(chain.stream()), Some(1))
        );
    }

    #[test]
    // invariant: audit-trail
    fn a_removed_stream_is_found(trail in sealed(), place in any::<Index>()) {
        let mut trail = trail;
        let stream = place.get(&trail.records).1.stream;
        trail.records.retain(|(_, link)| link.stream != stream);
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!((problem.what.as_str(), problem.stream), ("stream_missing", Some(stream)));
    }

    #[test]
    fn two_swapped_records_of_a_stream_are_found(
        trail in trails(),
        one in any::<Index>(),
        other in any::<Index>(),
    ) {
        prop_assume!(!trail.records.is_empty());
        let mut trail = trail;
        let stream = one.get(&trail.records).1.stream;
        let places = trail.places(stream);
        let (one, other) = (one.index(trail.records.len()), *other.get(&places));
        prop_assume!(one != other);
        let (low, high) = (one.min(other), one.max(other));
        let cursor = trail.records[low].0;
        trail.records[low].0 = trail.records[high].0;
        trail.records[high].0 = cursor;
        let late = trail.records[low].1.seq;
        let verdict = trail.verify();
        prop_assert!(
            reports(&verdict, "order_changed", stream, late),
            "{:#?}",
            verdict.problems
        );
        prop_assert!(
            verdict
                .problems
                .iter()
                .all(|problem| problem.what != "record_missing"),
            "{:#?}",
            verdict.problems
        );
    }

    #[test]
    fn two_records_with_swapped_bodies_are_both_named(
        trail in trails(),
        one in any::<Index>(),
        other in any::<Index>(),
    ) {
        prop_assume!(!trail.records.is_empty());
        let mut trail = trail;
        let (one, other) = (
            one.index(trail.records.len()),
            other.index(trail.records.len()),
        );
        let (first, second) = (trail.records[one].1.clone(), trail.records[other].1.clone());
        prop_assume!(first.body != second.body);
        trail.records[one].1.body = second.body;
        trail.records[other].1.body = first.body;
        let verdict = trail.verify();
        prop_assert!(
            reports(&verdict, "record_changed", first.stream, first.seq)
                && reports(&verdict, "record_changed", second.stream, second.seq)
        );
        prop_assert_eq!(verdict.problems.len(), 2);
    }

    #[test]
    fn another_key_makes_every_checkpoint_bad(trail in sealed()) {
        let verdict = trail.verify_with(&SigningKey::from_seed([8; 32]).public());
        prop_assert!(
            verdict
                .problems
                .iter()
                .any(|problem| problem.what == "signature_bad" && problem.checkpoint == Some(1))
        );
    }
}

#[test]
// invariant: audit-trail
fn the_removal_of_unsigned_records_is_found_only_inside_the_chain() {
    // A documented limit, not a goal: see the crate's documentation.
    let write = |body: Value| Step::Write { stream: 0, body };
    let mut trail = Trail::write(vec![
        write(json!({"n": 1})),
        Step::Sign { full: false },
        write(json!({"n": 2})),
        write(json!({"n": 3})),
    ]);
    trail.records.pop();
    assert!(trail.verify().intact);
    trail.records.remove(0);
    assert_eq!(only_problem(&trail.verify()).what, "record_missing");
}

#[test]
fn a_chained_number_that_is_not_an_integer_is_found() {
    let mut trail = Trail::write(vec![
        Step::Write {
            stream: 0,
            body: json!({"n": 1}),
        },
        Step::Sign { full: false },
    ]);
    trail.records[0].1.body = json!({"n": 1.0});
    assert_eq!(only_problem(&trail.verify()).what, "record_changed");
}

#[test]
fn cursors_that_do_not_rise_are_found() {
    let steps = (0..4)
        .map(|stream| Step::Write {
            stream,
            body: json!({}),
        })
        .collect();
    let trail = Trail::write(steps);
    let mut verifier = cynode_audit::Verifier::new(key().public());
    for (cursor, (_, link)) in [1, 3, 2, 4].into_iter().zip(&trail.records) {
        verifier.record(cursor, link);
    }
    let verdict = verifier.finish();
    assert_eq!(
        (
            only_problem(&verdict).what.as_str(),
            only_problem(&verdict).cursor
        ),
        ("order_changed", Some(2))
    );
}

#[test]
fn a_verdict_lists_the_first_hundred_of_a_thousand_problems() {
    let mut trail = Trail::write(
        (0..1_000)
            .map(|n| Step::Write {
                stream: 0,
                body: json!({"n": n}),
            })
            .collect(),
    );
    for (_, link) in &mut trail.records {
        link.body = json!({});
    }
    let verdict = trail.verify();
    assert!(!verdict.intact && verdict.more_problems && verdict.problems.len() == 100);
    let trail = Trail::write(
        (0..1_000)
            .map(|n| Step::Write {
                stream: 0,
                body: json!({"n": n}),
            })
            .collect(),
    );
    let mut sparse = trail.clone();
    sparse.records.retain(|(_, link)| link.seq % 2 == 0);
    let verdict = sparse.verify();
    assert!(
        verdict.more_problems
            && verdict
                .problems
                .iter()
                .all(|problem| problem.what == "record_missing")
    );
}

#[test]
fn absurd_numbers_do_no_harm() {
    let mut trail = Trail::write(vec![
        Step::Write {
            stream: 0,
            body: json!({}),
        },
        Step::Write {
            stream: 0,
            body: json!({}),
        },
    ]);
    trail.records[1].1.seq = u64::MAX;
    let mut zero = trail.records[0].clone();
    zero.1.seq = 0;
    zero.0 = i64::MAX;
    trail.records.push(zero);
    let verdict = trail.verify();
    assert_eq!(
        verdict
            .problems
            .iter()
            .map(|problem| problem.what.as_str())
            .collect::<Vec<_>>(),
        ["record_missing", "record_inserted"]
    );
}

/// A trail of intents and outcomes.
fn calls(calls: &[(&str, u128, &str)]) -> Trail {
    let body = |(kind, call, decision): &(&str, u128, &str)| json!({"kind": kind, "call_id": Uuid::from_u128(*call), "decision": decision});
    Trail::write(
        calls
            .iter()
            .map(|call| Step::Write {
                stream: call.1 as usize % 2,
                body: body(call),
            })
            .collect(),
    )
}

#[test]
fn intents_without_outcomes_are_counted_as_open() {
    let verdict = calls(&[
        ("intent", 1, "allow"),
        ("intent", 2, "allow"),
        ("outcome", 1, ""),
        ("intent", 3, "deny"),
    ])
    .verify();
    assert!(verdict.intact && verdict.open == 1, "{verdict:?}");
    let verdict = calls(&[("intent", 3, "deny"), ("outcome", 3, "")]).verify();
    assert!(verdict.intact && verdict.open == 0, "{verdict:?}");
}

#[test]
fn an_outcome_belongs_to_exactly_one_intent() {
    for (list, what) in [
        (&[("outcome", 1, "")][..], "outcome_without_intent"),
        (
            &[
                ("intent", 1, "allow"),
                ("outcome", 1, ""),
                ("outcome", 1, ""),
            ],
            "outcome_doubled",
        ),
        (
            &[
                ("intent", 1, "deny"),
                ("outcome", 1, ""),
                ("outcome", 1, ""),
            ],
            "outcome_doubled",
        ),
        (
            &[
                ("intent", 1, "allow"),
                ("intent", 1, "allow"),
                ("outcome", 1, ""),
            ],
            "intent_doubled",
        ),
        (
            &[
                ("intent", 1, "allow"),
                ("outcome", 1, ""),
                ("intent", 1, "allow"),
            ],
            "intent_doubled",
        ),
    ] {
        let verdict = calls(list).verify();
        assert_eq!(only_problem(&verdict).what, what, "{list:?}");
    }
}
