//! Compares the checkpoints in the table with those in the file outside the database.
//!
//! A checkpoint counts only if its signature is valid, wherever it was found: one that the table
//! lost still counts if the file has it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    problems::{ProblemKind, Problems},
    stream::{SignedHead, Stream, Witness},
};
use crate::{Checkpoint, Hash, Head, MalformedCheckpoint, PublicKey, SignedCheckpoint};

/// The newest valid checkpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newest {
    number: u64,
    pub(super) at: Option<OffsetDateTime>,
    pub(super) cursor: i64,
    pub(super) truncated: u64,
}

impl Default for Newest {
    /// Without a checkpoint, no record is older than it.
    fn default() -> Self {
        Self {
            number: 0,
            at: None,
            cursor: i64::MIN,
            truncated: 0,
        }
    }
}

/// A full checkpoint at the beginning of the table: earlier ones were removed.
#[derive(Debug)]
struct FirstFull {
    truncated: u64,
    streams: BTreeSet<Uuid>,
}

#[derive(Debug, Default)]
struct StreamClaims {
    heads: Vec<SignedHead>,
    cut: Option<Head>,
}

#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    count: u64,
    /// Valid checkpoints of the table.
    table: BTreeMap<u64, Hash>,
    /// Numbers of the table without a valid checkpoint.
    bad: BTreeSet<u64>,
    /// The number of the last row, and the lowest valid checkpoint if that is full.
    last: Option<u64>,
    first_full: Option<FirstFull>,
    /// Valid checkpoints of the file that the table has not shown (yet).
    only_in_file: BTreeMap<u64, Hash>,
    lines: u64,
    /// The last valid checkpoint of the file, and the numbers of those that don't follow their
    /// predecessor there.
    last_in_file: Option<(u64, Hash)>,
    breaks: Vec<u64>,
    /// A malformed line of the file. It is harmless as the last line: a crash can leave it.
    malformed_line: Option<String>,
    newest: Newest,
    /// The newest full checkpoint.
    full: Option<u64>,
    claims: HashMap<Uuid, StreamClaims>,
}

impl Checkpoints {
    pub(super) const fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn add_from_table(
        &mut self,
        row_number: u64,
        signed: &SignedCheckpoint,
        key: &PublicKey,
        problems: &mut Problems,
    ) {
        self.count += 1;
        let number = signed.checkpoint.number;
        let in_order = self.last.is_none_or(|last| last < row_number);
        self.last = self.last.max(Some(row_number));
        if !signed.verify(key) {
            self.bad.extend([row_number, number]);
            problems.add_for_checkpoint(
                ProblemKind::SignatureBad,
                Some(row_number),
                format!("checkpoint {row_number} has an invalid signature"),
            );
            return;
        }
        if row_number != number {
            self.bad.insert(row_number);
            problems.add_for_checkpoint(
                ProblemKind::CheckpointChanged,
                Some(row_number),
                format!("the row of checkpoint {row_number} holds checkpoint {number}"),
            );
        } else if !in_order {
            problems.add_for_checkpoint(
                ProblemKind::CheckpointChanged,
                Some(number),
                format!("checkpoint {number} is out of order"),
            );
        }
        let before = if number == 1 {
            Some(&Checkpoint::FIRST)
        } else {
            self.table.get(&(number.saturating_sub(1)))
        };
        if before.is_some_and(|before| *before != signed.checkpoint.prev) {
            problems.add_for_checkpoint(
                ProblemKind::CheckpointChanged,
                Some(number),
                format!("checkpoint {number} does not follow the previous one"),
            );
        }
        if self
            .table
            .first_key_value()
            .is_none_or(|(first, _)| number <= *first)
        {
            let Checkpoint {
                full,
                truncated_records,
                heads,
                ..
            } = &signed.checkpoint;
            self.first_full = full.then(|| FirstFull {
                truncated: *truncated_records,
                streams: heads.keys().copied().collect(),
            });
        }
        if self
            .table
            .insert(number, signed.hash)
            .is_some_and(|other| other != signed.hash)
        {
            problems.add_for_checkpoint(
                ProblemKind::CheckpointChanged,
                Some(number),
                format!("there are two checkpoints with number {number}"),
            );
        }
        match self.only_in_file.remove(&number) {
            Some(hash) if hash == signed.hash => {}
            Some(_) => {
                report_difference(number, problems);
                self.add_claims(&signed.checkpoint);
            }
            None => self.add_claims(&signed.checkpoint),
        }
    }

    pub(super) fn add_malformed(
        &mut self,
        row_number: u64,
        error: &MalformedCheckpoint,
        problems: &mut Problems,
    ) {
        self.count += 1;
        self.last = self.last.max(Some(row_number));
        self.bad.insert(row_number);
        problems.add_for_checkpoint(
            ProblemKind::CheckpointChanged,
            Some(row_number),
            format!("checkpoint {row_number} is malformed: {error}"),
        );
    }

    pub(super) fn add_from_file(&mut self, line: &str, key: &PublicKey, problems: &mut Problems) {
        self.lines += 1;
        if let Some(malformed_line) = self.malformed_line.take() {
            problems.add_for_checkpoint(ProblemKind::CheckpointChanged, None, malformed_line);
        }
        if line.trim().is_empty() {
            return;
        }
        let signed = match SignedCheckpoint::parse(line) {
            Ok(signed) => signed,
            Err(error) => {
                self.malformed_line = Some(format!(
                    "line {} of the file outside the database is not a checkpoint: {error}",
                    self.lines
                ));
                return;
            }
        };
        let number = signed.checkpoint.number;
        if !signed.verify(key) {
            problems.add_for_checkpoint(
                ProblemKind::SignatureBad,
                Some(number),
                format!(
                    "line {} of the file outside the database has an invalid signature",
                    self.lines
                ),
            );
            return;
        }
        if self.last_in_file.is_some_and(|(last, hash)| {
            last.checked_add(1) == Some(number) && hash != signed.checkpoint.prev
        }) {
            self.breaks.push(number);
        }
        self.last_in_file = Some((number, signed.hash));
        match self
            .table
            .get(&number)
            .or_else(|| self.only_in_file.get(&number))
        {
            Some(hash) if *hash == signed.hash => {}
            Some(_) => report_difference(number, problems),
            None => {
                self.only_in_file.insert(number, signed.hash);
                self.add_claims(&signed.checkpoint);
            }
        }
    }

    fn add_claims(&mut self, checkpoint: &Checkpoint) {
        if checkpoint.number >= self.newest.number {
            self.newest = Newest {
                number: checkpoint.number,
                at: Some(checkpoint.at),
                cursor: checkpoint.cursor,
                truncated: checkpoint.truncated_records,
            };
        }
        if checkpoint.full {
            self.full = self.full.max(Some(checkpoint.number));
        }
        for (stream, head) in &checkpoint.heads {
            let witness = Witness::Checkpoint {
                number: checkpoint.number,
                truncated: checkpoint.truncated_records,
            };
            let signed = SignedHead {
                head: *head,
                witness,
            };
            self.claims.entry(*stream).or_default().heads.push(signed);
        }
        for (stream, head) in &checkpoint.cut {
            let cut = &mut self.claims.entry(*stream).or_default().cut;
            if cut.is_none_or(|cut| cut.seq < head.seq) {
                *cut = Some(*head);
            }
        }
    }

    /// Adds heads that no checkpoint signed.
    pub(super) fn add_heads(&mut self, heads: &BTreeMap<Uuid, Head>, witness: Witness) {
        for (stream, head) in heads {
            self.claims
                .entry(*stream)
                .or_default()
                .heads
                .push(SignedHead {
                    head: *head,
                    witness,
                });
        }
    }

    /// Reports missing checkpoints, and returns the newest one and all streams with their signed
    /// heads.
    pub(super) fn evaluate(&mut self, problems: &mut Problems) -> (Newest, HashMap<Uuid, Stream>) {
        let first = self.table.first_key_value().map(|(number, _)| *number);
        let mut expected = match first {
            // A full checkpoint replaces all earlier ones.
            Some(first) if self.first_full.is_some() => first,
            _ => 1,
        };
        for number in self.table.keys() {
            self.missing(expected, *number, "the checkpoint table lacks", problems);
            expected = number.saturating_add(1);
        }
        if let Some((last, _)) = self.only_in_file.last_key_value() {
            // Gaps up to the newest checkpoint of the table were reported above.
            let from = self
                .only_in_file
                .range(expected..)
                .next()
                .map_or(u64::MAX, |(number, _)| *number);
            self.missing(
                from,
                last.saturating_add(1),
                "the table lacks, but the file outside the database has,",
                problems,
            );
        }
        // If the table has both, they were compared there.
        for number in self
            .breaks
            .iter()
            .filter(|number| first.is_some_and(|first| **number <= first))
        {
            problems.add_for_checkpoint(
                ProblemKind::CheckpointChanged,
                Some(*number),
                format!(
                    "checkpoint {number} does not follow the previous one in the file outside \
                     the database"
                ),
            );
        }
        // A missing checkpoint may have had heads, so records beyond the known heads can't be
        // called inserted.
        let from = self.full.unwrap_or(1);
        let known = self.table.range(from..).count() + self.only_in_file.range(from..).count();
        if known as u64 <= self.newest.number.saturating_sub(from) {
            self.newest.cursor = i64::MIN;
        }
        let since = first.unwrap_or(0);
        let counts = |id: &Uuid, signed: &SignedHead| match (&self.first_full, signed.witness) {
            // Older heads from the file count, unless retention may have removed their records
            // since.
            (Some(full), Witness::Checkpoint { number, truncated }) => {
                number >= since || truncated == full.truncated || full.streams.contains(id)
            }
            (Some(full), Witness::Interim { truncated }) => {
                truncated == full.truncated || full.streams.contains(id)
            }
            (_, Witness::Writer) | (None, _) => true,
        };
        let claims = std::mem::take(&mut self.claims);
        let streams = claims.into_iter().map(|(id, claims)| {
            let heads = claims
                .heads
                .into_iter()
                .filter(|signed| counts(&id, signed))
                .collect();
            (id, Stream::signed(id, claims.cut, heads))
        });
        (self.newest, streams.collect())
    }

    /// Reports the numbers from `from` until `until` for which the table has no row, not even an
    /// invalid one.
    fn missing(&self, from: u64, until: u64, lacks: &str, problems: &mut Problems) {
        let mut from = from;
        while from < until {
            let bad = self.bad.range(from..until).next().copied();
            let end = bad.unwrap_or(until);
            if from < end {
                problems.add_for_checkpoint(
                    ProblemKind::CheckpointMissing,
                    Some(from),
                    format!("{lacks} {}", span("checkpoint", from, end - 1)),
                );
            }
            from = end.saturating_add(1);
        }
    }
}

fn report_difference(number: u64, problems: &mut Problems) {
    problems.add_for_checkpoint(
        ProblemKind::CheckpointChanged,
        Some(number),
        format!("checkpoint {number} differs from the one in the file outside the database"),
    );
}

pub(super) fn span(noun: &str, from: u64, to: u64) -> String {
    if from == to {
        format!("{noun} {from}")
    } else {
        format!("{noun}s {from} to {to}")
    }
}
