//! Tampering with checkpoints.

use cynode_audit::{SignedCheckpoint, SigningKey, Verifier};
use proptest::{prelude::*, sample::Index};
use serde_json::json;

use crate::trail::{Step, Trail, key, only_problem, sealed, trails};

/// The verdict if the table holds these lines, by number.
fn with_lines(trail: &Trail, lines: &[(u64, String)]) -> cynode_api::AuditVerdict {
    let mut verifier = Verifier::new(key().public());
    for (number, line) in lines {
        verifier.checkpoint_line(*number, line);
    }
    for line in &trail.file {
        verifier.witness(line);
    }
    for (cursor, link) in &trail.records {
        verifier.record(*cursor, link);
    }
    verifier.finish()
}

fn lines(trail: &Trail) -> Vec<(u64, String)> {
    trail
        .table
        .iter()
        .map(|signed| (signed.checkpoint.number, signed.to_line()))
        .collect()
}

proptest! {
    #[test]
    fn checkpoint_lines_verify_in_either_order(trail in trails()) {
        prop_assert!(with_lines(&trail, &lines(&trail)).intact);
        let mut verifier = Verifier::new(key().public());
        trail.file.iter().for_each(|line| verifier.witness(line));
        trail.table.iter().for_each(|signed| verifier.checkpoint(signed));
        trail.records.iter().for_each(|(cursor, link)| verifier.record(*cursor, link));
        let verdict = verifier.finish();
        prop_assert!(verdict.intact, "{:#?}", verdict.problems);
    }

    #[test]
    fn a_removed_checkpoint_is_found_by_the_file_and_its_heads_still_count(
        trail in sealed(),
        which in any::<Index>(),
    ) {
        let mut trail = trail;
        let which = which.index(trail.table.len());
        let number = trail.table.remove(which).checkpoint.number;
        let verdict = trail.verify();
        if which == 0
            && trail
                .table
                .first()
                .is_some_and(|first| first.checkpoint.full)
        {
            prop_assert!(
                verdict.intact,
                "a full checkpoint did not replace those before it: {:#?}",
                verdict.problems
            );
        } else {
            let problem = only_problem(&verdict);
            prop_assert_eq!(
                (problem.what.as_str(), problem.checkpoint),
                ("checkpoint_missing", Some(number))
            );
        }
        if which == trail.table.len() {
            trail.records.clear();
            prop_assert!(
                trail
                    .verify()
                    .problems
                    .iter()
                    .any(|problem| problem.what == "stream_missing")
            );
        }
    }

    #[test]
    fn a_checkpoint_removed_from_the_middle_is_found_without_the_file(
        trail in sealed(),
        which in any::<Index>(),
    ) {
        prop_assume!(trail.table.len() > 2);
        let mut trail = trail;
        trail.file.clear();
        let which = 1 + which.index(trail.table.len() - 2);
        let number = trail.table.remove(which).checkpoint.number;
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (problem.what.as_str(), problem.checkpoint),
            ("checkpoint_missing", Some(number))
        );
    }

    #[test]
    fn all_checkpoints_removed_is_one_problem(trail in sealed()) {
        let mut trail = trail;
        let count = trail.table.len();
        trail.table.clear();
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (problem.what.as_str(), problem.checkpoint),
            ("checkpoint_missing", Some(1))
        );
        prop_assert!(
            count == 1
                || problem
                    .detail
                    .ends_with(&format!("checkpoints 1 to {count}")),
            "{}",
            problem.detail
        );
    }

    #[test]
    fn a_byte_of_a_checkpoint_that_was_changed_is_found(
        trail in sealed(),
        which in any::<Index>(),
        at in any::<Index>(),
        byte in 0x20..0x7fu8,
    ) {
        let mut lines = lines(&trail);
        let which = which.index(lines.len());
        let (number, line) = &mut lines[which];
        let mut bytes = line.clone().into_bytes();
        let at = at.index(bytes.len());
        prop_assume!(bytes[at] != byte);
        bytes[at] = byte;
        *line = String::from_utf8(bytes).expect("it is ASCII");
        let number = *number;
        let verdict = with_lines(&trail, &lines);
        let problem = only_problem(&verdict);
        prop_assert!(
            ["signature_bad", "checkpoint_changed"].contains(&problem.what.as_str()),
            "{problem:?}"
        );
        prop_assert_eq!(problem.checkpoint, Some(number));
    }

    #[test]
    fn a_checkpoint_signed_with_another_key_is_found(trail in sealed(), which in any::<Index>()) {
        let mut trail = trail;
        let which = which.index(trail.table.len());
        let checkpoint = trail.table[which].checkpoint.clone();
        let number = checkpoint.number;
        trail.table[which] = checkpoint.sign(&SigningKey::from_seed([9; 32]));
        let verdict = trail.verify();
        let problem = only_problem(&verdict);
        prop_assert_eq!(
            (problem.what.as_str(), problem.checkpoint),
            ("signature_bad", Some(number))
        );
    }

    #[test]
    fn two_swapped_checkpoints_are_found(
        trail in sealed(),
        one in any::<Index>(),
        other in any::<Index>(),
    ) {
        let (one, other) = (one.index(trail.table.len()), other.index(trail.table.len()));
        prop_assume!(one != other);
        let mut lines = lines(&trail);
        let line = lines[one].1.clone();
        lines[one].1 = lines[other].1.clone();
        lines[other].1 = line;
        let verdict = with_lines(&trail, &lines);
        let mut named: Vec<u64> = verdict
            .problems
            .iter()
            .filter(|problem| problem.what == "checkpoint_changed")
            .filter_map(|problem| problem.checkpoint)
            .collect();
        named.sort_unstable();
        let mut expected = vec![lines[one].0, lines[other].0];
        expected.sort_unstable();
        prop_assert_eq!(named, expected);

        let mut trail = trail;
        trail.table.swap(one, other);
        prop_assert!(
            trail
                .verify()
                .problems
                .iter()
                .any(|problem| problem.what == "checkpoint_changed")
        );
    }

    #[test]
    fn another_history_signed_by_the_same_key_contradicts_the_file(
        trail in sealed(),
        which in any::<Index>(),
    ) {
        let mut trail = trail;
        let which = which.index(trail.table.len());
        let mut checkpoint = trail.table[which].checkpoint.clone();
        checkpoint.cursor -= 1;
        let number = checkpoint.number;
        trail.table[which] = checkpoint.sign(&key());
        let verdict = trail.verify();
        prop_assert!(
            verdict
                .problems
                .iter()
                .any(|problem| problem.what == "checkpoint_changed"
                    && problem.checkpoint == Some(number)),
            "{:#?}",
            verdict.problems
        );
    }
}

fn three() -> Trail {
    let write = |n: u32| Step::Write {
        stream: 0,
        body: json!({"n": n}),
    };
    Trail::write(vec![
        write(1),
        Step::Sign { full: false },
        write(2),
        Step::Sign { full: false },
        write(3),
        Step::Sign { full: true },
    ])
}

#[test]
fn a_table_that_begins_with_a_full_checkpoint_needs_none_before_it() {
    let mut trail = three();
    trail.table.drain(..2);
    assert!(trail.verify().intact);
    trail.file.drain(..1);
    assert!(trail.verify().intact);
}

#[test]
fn a_table_that_begins_with_a_partial_checkpoint_lacks_earlier_ones() {
    let mut trail = three();
    trail.table.remove(0);
    for file in [trail.file.clone(), Vec::new()] {
        trail.file = file;
        assert_eq!(
            (
                only_problem(&trail.verify()).what.as_str(),
                only_problem(&trail.verify()).checkpoint
            ),
            ("checkpoint_missing", Some(1))
        );
    }
}

#[test]
fn the_file_may_lack_checkpoints_and_its_last_line_may_be_torn() {
    let mut trail = three();
    trail.file.remove(1);
    let half = trail.file[1].len() / 2;
    trail.file[1].truncate(half);
    assert!(trail.verify().intact);
    trail.file.insert(0, String::new());
    assert!(trail.verify().intact);
}

#[test]
fn a_line_of_the_file_that_was_damaged_is_found() {
    let mut trail = three();
    trail.file[1].truncate(20);
    assert!(
        only_problem(&trail.verify())
            .detail
            .starts_with("line 2 of the file outside the database is not a checkpoint")
    );
    let mut trail = three();
    trail.file[1] = SignedCheckpoint::parse(&trail.file[1])
        .expect("it is a checkpoint")
        .checkpoint
        .sign(&SigningKey::from_seed([1; 32]))
        .to_line();
    assert_eq!(
        (
            only_problem(&trail.verify()).what.as_str(),
            only_problem(&trail.verify()).checkpoint
        ),
        ("signature_bad", Some(2))
    );
}

#[test]
fn a_database_restored_to_an_earlier_state_is_found() {
    let mut trail = three();
    trail.table.truncate(1);
    trail.records.truncate(1);
    let verdict = trail.verify();
    let found: Vec<&str> = verdict
        .problems
        .iter()
        .map(|problem| problem.what.as_str())
        .collect();
    assert_eq!(found, ["checkpoint_missing", "tail_missing"]);
    assert!(
        verdict.problems[0].detail.ends_with("checkpoints 2 to 3"),
        "{}",
        verdict.problems[0].detail
    );
}

#[test]
fn an_empty_trail_is_intact() {
    let verdict = Trail::default().verify();
    assert!(verdict.intact && verdict.records == 0 && verdict.last_signed_at.is_none());
}

#[test]
fn a_checkpoint_replaced_before_folding_is_found_by_the_file() {
    let mut trail = three();
    let mut other = trail.table[0].checkpoint.clone();
    other.at += time::Duration::SECOND;
    trail.file[0] = other.sign(&key()).to_line();
    trail.table.drain(..2);
    assert_eq!(
        (
            only_problem(&trail.verify()).what.as_str(),
            only_problem(&trail.verify()).checkpoint
        ),
        ("checkpoint_changed", Some(2))
    );
}

#[test]
fn checkpoints_older_than_the_table_still_count_from_the_file() {
    let write = |n: u32| Step::Write {
        stream: 0,
        body: json!({"n": n}),
    };
    let sign = |full| Step::Sign { full };
    let ours = Trail::write(vec![write(1), sign(false), write(2), sign(false)]);
    // The database was restored to the first checkpoint, continued differently, and folded
    // everything, while the holder of this file was away.
    let mut other = Trail::write(vec![
        write(1),
        sign(false),
        write(7),
        sign(false),
        write(8),
        sign(false),
        write(9),
        sign(true),
    ]);
    other.table.drain(..3);
    other.file.clone_from(&ours.file);
    assert!(
        other
            .verify()
            .problems
            .iter()
            .any(|problem| problem.what == "record_changed" && problem.seq == Some(2)),
        "{:#?}",
        other.verify().problems
    );
    // A stream that was removed entirely.
    let mut gone = Trail::write(vec![
        Step::Write {
            stream: 1,
            body: json!({}),
        },
        sign(false),
        Step::Write {
            stream: 1,
            body: json!({}),
        },
        sign(true),
    ]);
    gone.table.drain(..1);
    gone.file.clone_from(&ours.file);
    assert!(
        gone.verify()
            .problems
            .iter()
            .any(|problem| problem.what == "stream_missing"),
        "{:#?}",
        gone.verify().problems
    );
}

#[test]
fn a_record_beyond_all_cursors_that_were_given_out_is_found() {
    let trail = three();
    let mut foreign = cynode_audit::Chain::new(uuid::Uuid::from_u128(99));
    let link = foreign.append(trail.records[0].1.at, json!({"kind": "event"}));
    let verdict = |end: i64| {
        let mut verifier = Verifier::new(key().public());
        verifier.ends_at(end);
        trail
            .table
            .iter()
            .for_each(|signed| verifier.checkpoint(signed));
        trail
            .records
            .iter()
            .for_each(|(cursor, link)| verifier.record(*cursor, link));
        verifier.record(i64::MAX, &link);
        verifier.finish()
    };
    assert!(verdict(i64::MAX).intact);
    let last = trail.records.last().expect("records").0;
    assert_eq!(
        (
            only_problem(&verdict(last)).what.as_str(),
            only_problem(&verdict(last)).cursor
        ),
        ("record_inserted", Some(i64::MAX))
    );
}
