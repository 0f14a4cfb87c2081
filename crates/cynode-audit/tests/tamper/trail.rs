//! Builds trails as writers leave them.

use std::collections::BTreeMap;

use cynode_api::{AuditProblem, AuditVerdict};
use cynode_audit::{
    Chain, Checkpoint, Hash, Head, Link, PublicKey, SignedCheckpoint, SigningKey, Verifier,
    genesis, hash,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use time::{Duration, OffsetDateTime, macros::datetime};
use uuid::Uuid;

const BEGIN: OffsetDateTime = datetime!(2026-01-02 03:04:05.678901 UTC);
/// Cursors leave room for inserted records.
const STEP: i64 = 10;

pub(crate) fn key() -> SigningKey {
    SigningKey::from_seed([7; 32])
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Write {
        stream: usize,
        body: Value,
    },
    Sign {
        full: bool,
    },
    /// Retention removes this many of the stream's records.
    Cut {
        stream: usize,
        records: usize,
    },
}

/// The stored trail.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trail {
    pub(crate) records: Vec<(i64, Link)>,
    pub(crate) table: Vec<SignedCheckpoint>,
    pub(crate) file: Vec<String>,
}

#[derive(Default)]
struct Writer {
    trail: Trail,
    chains: BTreeMap<usize, Chain>,
    moved: BTreeMap<Uuid, Head>,
    cut: BTreeMap<Uuid, Head>,
    all_cuts: BTreeMap<Uuid, Head>,
    truncated: u64,
    clock: i64,
}

impl Writer {
    fn step(&mut self, step: Step) {
        self.clock += 1;
        let at = BEGIN + Duration::milliseconds(self.clock);
        match step {
            Step::Write { stream, body } => {
                let chain = self
                    .chains
                    .entry(stream)
                    .or_insert_with(|| Chain::new(Uuid::from_u128(stream as u128 + 1)));
                let link = chain.append(at, body);
                self.moved.insert(link.stream, chain.head());
                self.trail.records.push((self.clock * STEP, link));
            }
            Step::Sign { full } => {
                let last = self.trail.table.last();
                let living = |heads: &BTreeMap<Uuid, Head>| {
                    let lives = |stream: &Uuid| {
                        self.trail
                            .records
                            .iter()
                            .any(|(_, link)| link.stream == *stream)
                    };
                    heads
                        .iter()
                        .filter(|(stream, _)| lives(stream))
                        .map(|(stream, head)| (*stream, *head))
                        .collect()
                };
                let all = self
                    .chains
                    .values()
                    .map(|chain| (chain.stream(), chain.head()))
                    .collect();
                let checkpoint = Checkpoint {
                    number: last.map_or(1, |last| last.checkpoint.number + 1),
                    at,
                    prev: last.map_or(Checkpoint::FIRST, |last| last.hash),
                    full,
                    cursor: self.clock * STEP,
                    heads: if full {
                        living(&all)
                    } else {
                        std::mem::take(&mut self.moved)
                    },
                    cut: if full {
                        living(&self.all_cuts)
                            .into_iter()
                            .chain(std::mem::take(&mut self.cut))
                            .collect()
                    } else {
                        std::mem::take(&mut self.cut)
                    },
                    truncated_records: self.truncated,
                };
                self.moved.clear();
                let signed = checkpoint.sign(&key());
                self.trail.file.push(signed.to_line());
                self.trail.table.push(signed);
            }
            Step::Cut { stream, records } => {
                let Some(chain) = self.chains.get(&stream) else {
                    return;
                };
                let stream = chain.stream();
                let mut left = records;
                let mut removed = Vec::new();
                self.trail.records.retain(|(_, link)| {
                    let is_cut = link.stream == stream && left > 0;
                    left -= usize::from(is_cut);
                    if is_cut {
                        removed.push(Head {
                            seq: link.seq,
                            hash: link.hash,
                        });
                    }
                    !is_cut
                });
                let Some(last) = removed.last() else { return };
                self.truncated += removed.len() as u64;
                self.cut.insert(stream, *last);
                self.all_cuts.insert(stream, *last);
                // The cut and the checkpoint that names it are one transaction.
                self.step(Step::Sign { full: false });
            }
        }
    }
}

impl Trail {
    pub(crate) fn write(steps: Vec<Step>) -> Self {
        let mut writer = Writer::default();
        for step in steps {
            writer.step(step);
        }
        writer.trail
    }

    pub(crate) fn verify(&self) -> AuditVerdict {
        self.verify_with(&key().public())
    }

    pub(crate) fn verify_with(&self, key: &PublicKey) -> AuditVerdict {
        let mut verifier = Verifier::new(*key);
        for signed in &self.table {
            verifier.checkpoint(signed);
        }
        for line in &self.file {
            verifier.witness(line);
        }
        let mut records: Vec<&(i64, Link)> = self.records.iter().collect();
        records.sort_by_key(|(cursor, _)| *cursor);
        for (cursor, link) in records {
            verifier.record(*cursor, link);
        }
        verifier.finish()
    }

    /// The sequence numbers of the stream's signed heads.
    pub(crate) fn signed(&self, stream: Uuid) -> Vec<u64> {
        self.table
            .iter()
            .filter_map(|signed| signed.checkpoint.heads.get(&stream))
            .map(|head| head.seq)
            .collect()
    }

    /// Indexes of the stream's records.
    pub(crate) fn places(&self, stream: Uuid) -> Vec<usize> {
        (0..self.records.len())
            .filter(|place| self.records[*place].1.stream == stream)
            .collect()
    }

    /// Recomputes the stream's hashes from `from` on, as an attacker who knows the algorithm can.
    pub(crate) fn rechain(&mut self, stream: Uuid, from: usize) {
        let mut before: Option<Hash> = None;
        for place in self.places(stream) {
            let link = &self.records[place].1;
            if place >= from {
                let prev = before.unwrap_or_else(|| genesis(stream));
                self.records[place].1.hash = hash(&prev, stream, link.seq, link.at, &link.body);
            }
            before = Some(self.records[place].1.hash);
        }
    }
}

fn bodies() -> impl Strategy<Value = Value> {
    ("[a-z]{1,8}", any::<u32>(), ".{0,12}").prop_map(
        |(action, number, text)| json!({"version": 1, "kind": "event", "action": action, "detail": {"n": number, "text": text, "list": [true, null]}}),
    )
}

fn steps(cuts: u32) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        20 => (0..4usize, bodies()).prop_map(|(stream, body)| Step::Write { stream, body }),
        3 => any::<bool>().prop_map(|full| Step::Sign { full }),
        cuts => (0..4usize, 1..6usize).prop_map(|(stream, records)| Step::Cut { stream, records }),
    ];
    prop::collection::vec(step, 1..80)
}

/// A trail at any point in time.
pub(crate) fn trails() -> impl Strategy<Value = Trail> {
    steps(2).prop_map(Trail::write)
}

/// A trail that begins with some records, was never cut, and ends with a checkpoint.
pub(crate) fn sealed() -> impl Strategy<Value = Trail> {
    (
        prop::collection::vec(bodies(), 3..6),
        steps(0),
        any::<bool>(),
    )
        .prop_map(|(bodies, mut steps, full)| {
            let mut all: Vec<Step> = bodies
                .into_iter()
                .map(|body| Step::Write { stream: 0, body })
                .collect();
            all.append(&mut steps);
            all.push(Step::Sign { full });
            Trail::write(all)
        })
}

/// The only problem of a verdict.
pub(crate) fn only_problem(verdict: &AuditVerdict) -> &AuditProblem {
    assert!(!verdict.intact, "no problem was reported");
    assert_eq!(
        verdict.problems.len(),
        1,
        "expected one problem: {:#?}",
        verdict.problems
    );
    &verdict.problems[0]
}

/// Whether the verdict reports this problem for this record.
pub(crate) fn reports(verdict: &AuditVerdict, code: &str, stream: Uuid, seq: u64) -> bool {
    !verdict.intact
        && verdict.problems.iter().any(|problem| {
            problem.what == code && problem.stream == Some(stream) && problem.seq == Some(seq)
        })
}
