//! The checkpoints of the table and of the file outside, held against one another.
//!
//! What a checkpoint says counts only when its signature is good, wherever it was found: a checkpoint that the table lost
//! still speaks from the file.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    problems::{Problems, What},
    stream::{SignedHead, Stream, Witness},
};
use crate::{Checkpoint, Hash, Head, MalformedCheckpoint, PublicKey, Signed};

/// What the newest good checkpoint says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newest {
    number: u64,
    pub(super) at: Option<OffsetDateTime>,
    pub(super) cursor: i64,
    pub(super) truncated: u64,
}

impl Default for Newest {
    /// There is no checkpoint: no record is older than it.
    fn default() -> Self {
        Self {
            number: 0,
            at: None,
            cursor: i64::MIN,
            truncated: 0,
        }
    }
}

/// What a table begins with that holds no checkpoint before.
#[derive(Debug)]
struct FirstFull {
    truncated: u64,
    streams: BTreeSet<Uuid>,
}

#[derive(Debug, Default)]
struct Said {
    heads: Vec<SignedHead>,
    cut: Option<Head>,
}

#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    count: u64,
    /// The good ones of the table.
    table: BTreeMap<u64, Hash>,
    /// Numbers in the table under which nothing good is kept.
    bad: BTreeSet<u64>,
    /// The number that was fed last, and what the lowest good one says if it is full.
    last: Option<u64>,
    first_full: Option<FirstFull>,
    /// Good ones of the file that the table has not shown (yet).
    only_in_file: BTreeMap<u64, Hash>,
    lines: u64,
    /// The last good one of the file, and those that do not stand on the one before them there.
    last_in_file: Option<(u64, Hash)>,
    breaks: Vec<u64>,
    /// A line of the file that can't be read; harmless when none follows, for then it is what a crash left.
    torn: Option<String>,
    newest: Newest,
    /// The newest full one.
    full: Option<u64>,
    said: HashMap<Uuid, Said>,
}

impl Checkpoints {
    pub(super) const fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn of_table(
        &mut self,
        kept_as: u64,
        signed: &Signed,
        key: &PublicKey,
        problems: &mut Problems,
    ) {
        self.count += 1;
        let number = signed.checkpoint.number;
        let in_order = self.last.is_none_or(|last| last < kept_as);
        self.last = self.last.max(Some(kept_as));
        if !signed.verify(key) {
            self.bad.extend([kept_as, number]);
            problems.of_checkpoint(
                What::SignatureBad,
                Some(kept_as),
                format!("the signature of checkpoint {kept_as} does not fit what it says"),
            );
            return;
        }
        if kept_as != number {
            self.bad.insert(kept_as);
            problems.of_checkpoint(
                What::CheckpointChanged,
                Some(kept_as),
                format!("what is kept as checkpoint {kept_as} is checkpoint {number}"),
            );
        } else if !in_order {
            problems.of_checkpoint(
                What::CheckpointChanged,
                Some(number),
                format!("checkpoint {number} is not in its place"),
            );
        }
        let before = if number == 1 {
            Some(&Checkpoint::FIRST)
        } else {
            self.table.get(&(number.saturating_sub(1)))
        };
        if before.is_some_and(|before| *before != signed.checkpoint.prev) {
            problems.of_checkpoint(
                What::CheckpointChanged,
                Some(number),
                format!("checkpoint {number} does not stand on the one before it"),
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
            problems.of_checkpoint(
                What::CheckpointChanged,
                Some(number),
                format!("there are two checkpoints {number}"),
            );
        }
        match self.only_in_file.remove(&number) {
            Some(hash) if hash == signed.hash => {}
            Some(_) => {
                differs(number, problems);
                self.learn(&signed.checkpoint);
            }
            None => self.learn(&signed.checkpoint),
        }
    }

    pub(super) fn unreadable(
        &mut self,
        kept_as: u64,
        error: &MalformedCheckpoint,
        problems: &mut Problems,
    ) {
        self.count += 1;
        self.last = self.last.max(Some(kept_as));
        self.bad.insert(kept_as);
        problems.of_checkpoint(
            What::CheckpointChanged,
            Some(kept_as),
            format!("checkpoint {kept_as} can't be read: {error}"),
        );
    }

    pub(super) fn of_file(&mut self, line: &str, key: &PublicKey, problems: &mut Problems) {
        self.lines += 1;
        if let Some(torn) = self.torn.take() {
            problems.of_checkpoint(What::CheckpointChanged, None, torn);
        }
        if line.trim().is_empty() {
            return;
        }
        let signed = match Signed::parse(line) {
            Ok(signed) => signed,
            Err(error) => {
                self.torn = Some(format!(
                    "line {} of the file outside the database is not a checkpoint: {error}",
                    self.lines
                ));
                return;
            }
        };
        let number = signed.checkpoint.number;
        if !signed.verify(key) {
            problems.of_checkpoint(
                What::SignatureBad,
                Some(number),
                format!("the signature in line {} of the file outside the database does not fit what it says", self.lines),
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
            Some(_) => differs(number, problems),
            None => {
                self.only_in_file.insert(number, signed.hash);
                self.learn(&signed.checkpoint);
            }
        }
    }

    fn learn(&mut self, checkpoint: &Checkpoint) {
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
            let by = Witness::Checkpoint {
                number: checkpoint.number,
                truncated: checkpoint.truncated_records,
            };
            let signed = SignedHead { head: *head, by };
            self.said.entry(*stream).or_default().heads.push(signed);
        }
        for (stream, head) in &checkpoint.cut {
            let cut = &mut self.said.entry(*stream).or_default().cut;
            if cut.is_none_or(|cut| cut.seq < head.seq) {
                *cut = Some(*head);
            }
        }
    }

    /// Takes what somebody beside the checkpoints says of the streams.
    pub(super) fn hear(&mut self, heads: &BTreeMap<Uuid, Head>, by: Witness) {
        for (stream, head) in heads {
            self.said
                .entry(*stream)
                .or_default()
                .heads
                .push(SignedHead { head: *head, by });
        }
    }

    /// Says what is missing, and what all that is signed says of each stream.
    pub(super) fn settle(&mut self, problems: &mut Problems) -> (Newest, HashMap<Uuid, Stream>) {
        let first = self.table.first_key_value().map(|(number, _)| *number);
        let mut expected = match first {
            // A full one stands for all that were before it.
            Some(first) if self.first_full.is_some() => first,
            _ => 1,
        };
        for number in self.table.keys() {
            self.missing(
                expected,
                *number,
                "the table of checkpoints lacks",
                problems,
            );
            expected = number.saturating_add(1);
        }
        if let Some((last, _)) = self.only_in_file.last_key_value() {
            // Up to the newest of the table the gaps have been named.
            let from = self
                .only_in_file
                .range(expected..)
                .next()
                .map_or(u64::MAX, |(number, _)| *number);
            self.missing(
                from,
                last.saturating_add(1),
                "the file outside the database has what the table lacks:",
                problems,
            );
        }
        // Where the table has both, they were held against each other.
        for number in self
            .breaks
            .iter()
            .filter(|number| first.is_some_and(|first| **number <= first))
        {
            problems.of_checkpoint(
                What::CheckpointChanged,
                Some(*number),
                format!("checkpoint {number} does not stand on the one before it in the file outside the database"),
            );
        }
        // Where a checkpoint is missing, heads are: then nobody can say which records no checkpoint knows.
        let from = self.full.unwrap_or(1);
        let known = self.table.range(from..).count() + self.only_in_file.range(from..).count();
        if known as u64 <= self.newest.number.saturating_sub(from) {
            self.newest.cursor = i64::MIN;
        }
        let since = first.unwrap_or(0);
        let counts = |id: &Uuid, signed: &SignedHead| match (&self.first_full, signed.by) {
            // What was signed before the table begins speaks from the file, but of what retention removed since.
            (Some(full), Witness::Checkpoint { number, truncated }) => {
                number >= since || truncated == full.truncated || full.streams.contains(id)
            }
            (Some(full), Witness::Interim { truncated }) => {
                truncated == full.truncated || full.streams.contains(id)
            }
            (_, Witness::Writer) | (None, _) => true,
        };
        let said = std::mem::take(&mut self.said);
        let streams = said.into_iter().map(|(id, said)| {
            let heads = said
                .heads
                .into_iter()
                .filter(|signed| counts(&id, signed))
                .collect();
            (id, Stream::signed(id, said.cut, heads))
        });
        (self.newest, streams.collect())
    }

    /// Names the numbers from `from` until `until` under which the table has nothing, not even something bad.
    fn missing(&self, from: u64, until: u64, lacks: &str, problems: &mut Problems) {
        let mut from = from;
        while from < until {
            let bad = self.bad.range(from..until).next().copied();
            let end = bad.unwrap_or(until);
            if from < end {
                problems.of_checkpoint(
                    What::CheckpointMissing,
                    Some(from),
                    format!("{lacks} {}", span("checkpoint", from, end - 1)),
                );
            }
            from = end.saturating_add(1);
        }
    }
}

fn differs(number: u64, problems: &mut Problems) {
    problems.of_checkpoint(
        What::CheckpointChanged,
        Some(number),
        format!("checkpoint {number} is not the one in the file outside the database"),
    );
}

pub(super) fn span(what: &str, from: u64, to: u64) -> String {
    if from == to {
        format!("{what} {from}")
    } else {
        format!("{what}s {from} to {to}")
    }
}
