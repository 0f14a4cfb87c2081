//! Verifies one stream: its chain, its signed heads, and its cut by retention.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::{
    checkpoints::span,
    problems::{ProblemId, ProblemKind, Problems},
};
use crate::{Hash, Head, Link, genesis, hash};

/// The number of gaps to remember in case the missing records come later. A stream with more gaps
/// is not merely out of order.
const MAX_GAPS: usize = 128;

#[derive(Clone, Copy, Debug)]
pub(super) struct SignedHead {
    pub(super) head: Head,
    pub(super) witness: Witness,
}

/// The source of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Witness {
    /// `truncated`: the number of records that retention had removed by then.
    Checkpoint { number: u64, truncated: u64 },
    /// Signed to a separate file while the database accepted no checkpoint.
    Interim { truncated: u64 },
    /// The stream's running writer, which remembers what it committed.
    Writer,
}

impl Witness {
    pub(super) const fn checkpoint(self) -> Option<u64> {
        match self {
            Self::Checkpoint { number, .. } => Some(number),
            Self::Interim { .. } | Self::Writer => None,
        }
    }
}

impl std::fmt::Display for Witness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Checkpoint { number, .. } => write!(f, "checkpoint {number} signed"),
            Self::Interim { .. } => f.write_str(
                "the file outside the database has, signed while the database accepted no \
                 checkpoint,",
            ),
            Self::Writer => f.write_str("its writer committed"),
        }
    }
}

/// How a record fits into its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    InOrder,
    Late,
    /// The record does not belong to the stream.
    Refused,
}

#[derive(Debug)]
struct Gap {
    /// The last missing number.
    to: u64,
    /// The previous hash of the first missing record.
    before: Option<Hash>,
    /// The cursor of the record after the gap.
    cursor: i64,
}

#[derive(Debug)]
pub(super) struct Stream {
    id: Uuid,
    /// Retention removed the records up to this number.
    cut: u64,
    /// Distinct, sorted by number. Those below index `checked` have been passed.
    signed: Vec<SignedHead>,
    checked: usize,
    /// The last number that a checkpoint covers.
    checkpointed: u64,
    /// The last number whose hash matches its signed head.
    verified: u64,
    /// The last signed head did not match, so later records can't match what was signed either.
    diverged: bool,
    /// The number of the next record, and its previous hash if that is known.
    next: u64,
    expected_prev: Option<Hash>,
    /// Its previous hash in case only the record before was changed.
    alternative_prev: Option<Hash>,
    /// The previous hash of the last record, and its problem if it does not match.
    last_expected_prev: Option<Hash>,
    suspect: Option<ProblemId>,
    gaps: BTreeMap<u64, Gap>,
    seen: bool,
    /// A record beyond the signed heads, or below the cut, was reported.
    reported: bool,
}

impl Stream {
    /// A stream without signed heads.
    pub(super) fn unsigned(id: Uuid) -> Self {
        Self::signed(id, None, Vec::new())
    }

    /// A stream with the heads and the cut that checkpoints hold.
    pub(super) fn signed(id: Uuid, cut: Option<Head>, mut signed: Vec<SignedHead>) -> Self {
        let cut = cut.unwrap_or_else(|| Head {
            seq: 0,
            hash: genesis(id),
        });
        signed.retain(|signed| signed.head.seq > cut.seq);
        // Of equal heads, the one of a checkpoint comes first and stays.
        signed.sort_by_key(|signed| {
            (
                signed.head.seq,
                signed.witness.checkpoint().unwrap_or(u64::MAX),
            )
        });
        signed.dedup_by_key(|signed| signed.head);
        let checkpointed = signed
            .iter()
            .rev()
            .find(|signed| signed.witness.checkpoint().is_some())
            .map_or(cut.seq, |signed| signed.head.seq);
        Self {
            id,
            cut: cut.seq,
            signed,
            checked: 0,
            checkpointed,
            verified: cut.seq,
            diverged: false,
            next: cut.seq.saturating_add(1),
            expected_prev: Some(cut.hash),
            alternative_prev: None,
            last_expected_prev: None,
            suspect: None,
            gaps: BTreeMap::new(),
            seen: false,
            reported: false,
        }
    }

    pub(super) const fn id(&self) -> Uuid {
        self.id
    }

    pub(super) const fn is_seen(&self) -> bool {
        self.seen
    }

    /// The last number that a checkpoint covers or that retention removed.
    pub(super) const fn last_signed(&self) -> u64 {
        self.checkpointed
    }

    /// Adds a record. Checkpoints cover every record with a cursor up to `signed_cursor`.
    pub(super) fn take(
        &mut self,
        cursor: i64,
        link: &Link,
        signed_cursor: i64,
        problems: &mut Problems,
    ) -> Placement {
        if link.seq <= self.cut {
            if !std::mem::replace(&mut self.reported, true) {
                let detail = format!(
                    "retention removed the records of its stream up to number {}",
                    self.cut
                );
                problems.add_for_record(ProblemKind::RecordInserted, cursor, link, detail);
            }
            return Placement::Refused;
        }
        if link.seq < self.next {
            return self.take_passed_number(cursor, link, problems);
        }
        self.seen = true;
        if cursor <= signed_cursor
            && link.seq > self.last_signed()
            && !std::mem::replace(&mut self.reported, true)
        {
            let detail = match self.last_signed() {
                0 => "it is older than the newest checkpoint, and no checkpoint covers its stream"
                    .to_owned(),
                last => format!(
                    "it is older than the newest checkpoint, which covers its stream up to number \
                     {last}"
                ),
            };
            problems.add_for_record(ProblemKind::RecordInserted, cursor, link, detail);
        }
        if link.seq > self.next {
            self.open_gap(link.seq, cursor, problems);
        }
        self.follow(cursor, link, problems);
        Placement::InOrder
    }

    /// Records a gap, and takes the previous hash of the record after it from a signed head, if
    /// there is one.
    fn open_gap(&mut self, seq: u64, cursor: i64, problems: &mut Problems) {
        let gap = Gap {
            to: seq - 1,
            before: self.expected_prev,
            cursor,
        };
        if self.gaps.len() < MAX_GAPS {
            self.gaps.insert(self.next, gap);
        } else {
            self.missing(self.next, &gap, problems);
        }
        (self.expected_prev, self.alternative_prev) = (None, None);
        while let Some(signed) = self
            .signed
            .get(self.checked)
            .filter(|signed| signed.head.seq < seq)
        {
            if signed.head.seq == seq - 1 {
                self.expected_prev = Some(signed.head.hash);
            }
            self.checked += 1;
        }
    }

    fn follow(&mut self, cursor: i64, link: &Link, problems: &mut Problems) {
        let computed = self.expected_prev.map(|before| hash_after(before, link));
        let fits = computed.is_none_or(|computed| computed == link.hash)
            || self
                .alternative_prev
                .is_some_and(|before| hash_after(before, link) == link.hash);
        self.suspect = None;
        self.last_expected_prev = self.expected_prev;
        self.alternative_prev = None;
        if !fits {
            let detail = if self.verified.saturating_add(1) == link.seq {
                "its hash does not match".to_owned()
            } else {
                format!(
                    "its hash does not match: it was changed, or record {} with its hash",
                    link.seq - 1
                )
            };
            self.suspect =
                problems.add_for_record(ProblemKind::RecordChanged, cursor, link, detail);
            self.alternative_prev = computed;
        }
        self.expected_prev = Some(link.hash);
        self.next = link.seq.saturating_add(1);
        while let Some(signed) = self
            .signed
            .get(self.checked)
            .filter(|signed| signed.head.seq == link.seq)
            .copied()
        {
            self.checked += 1;
            self.compare_with_signed(signed, cursor, link, fits, problems);
        }
    }

    fn compare_with_signed(
        &mut self,
        signed: SignedHead,
        cursor: i64,
        link: &Link,
        fits: bool,
        problems: &mut Problems,
    ) {
        if signed.head.hash == link.hash {
            self.verified = link.seq;
            self.diverged = false;
            return;
        }
        // The hash was changed together with the record. If later records were not changed, they
        // follow the signed hash.
        self.alternative_prev = Some(signed.head.hash);
        if fits && !self.diverged {
            let detail = format!(
                "{} not what {}",
                span_with_verb(self.verified.saturating_add(1), link.seq),
                signed.witness
            );
            problems.add_at(
                ProblemKind::RecordChanged,
                self.id,
                Some(link.seq),
                Some(cursor),
                signed.witness.checkpoint(),
                detail,
            );
        }
        self.diverged = true;
    }

    /// Takes a record whose number was passed already: it comes late, or is a duplicate.
    fn take_passed_number(
        &mut self,
        cursor: i64,
        link: &Link,
        problems: &mut Problems,
    ) -> Placement {
        let gap = self
            .gaps
            .range(..=link.seq)
            .next_back()
            .filter(|(_, gap)| gap.to >= link.seq)
            .map(|(from, _)| *from);
        if let Some((from, gap)) = gap.and_then(|from| Some((from, self.gaps.remove(&from)?))) {
            problems.add_for_record(
                ProblemKind::OrderChanged,
                cursor,
                link,
                "it comes after records with higher numbers".to_owned(),
            );
            if from == link.seq
                && gap
                    .before
                    .is_some_and(|before| hash_after(before, link) != link.hash)
            {
                problems.add_for_record(
                    ProblemKind::RecordChanged,
                    cursor,
                    link,
                    "its hash does not match".to_owned(),
                );
            }
            if link.seq < gap.to {
                self.gaps.insert(
                    link.seq + 1,
                    Gap {
                        to: gap.to,
                        before: Some(link.hash),
                        cursor: gap.cursor,
                    },
                );
            }
            if from < link.seq {
                self.gaps.insert(
                    from,
                    Gap {
                        to: link.seq - 1,
                        ..gap
                    },
                );
            }
            return Placement::Late;
        }
        let detail = "there is another record with its number";
        if link.seq.checked_add(1) == Some(self.next)
            && self
                .last_expected_prev
                .is_some_and(|before| hash_after(before, link) == link.hash)
        {
            if self.suspect.is_some() {
                // This is the genuine record: the mismatching one was inserted before it.
                problems.amend(self.suspect.take(), ProblemKind::RecordInserted, detail);
                self.expected_prev = Some(link.hash);
                self.alternative_prev = None;
                self.diverged = self.signed[..self.checked].last().is_some_and(|signed| {
                    signed.head.seq == link.seq && signed.head.hash != link.hash
                });
                return Placement::Late;
            }
            self.alternative_prev = Some(link.hash);
        }
        problems.add_for_record(ProblemKind::RecordInserted, cursor, link, detail.to_owned());
        Placement::Refused
    }

    fn missing(&self, from: u64, gap: &Gap, problems: &mut Problems) {
        let detail = format!("{} missing", span_with_verb(from, gap.to));
        problems.add_at(
            ProblemKind::RecordMissing,
            self.id,
            Some(from),
            Some(gap.cursor),
            None,
            detail,
        );
    }

    pub(super) fn finish(self, problems: &mut Problems) {
        for (from, gap) in &self.gaps {
            self.missing(*from, gap, problems);
        }
        let Some(last) = self.signed.last().filter(|last| last.head.seq >= self.next) else {
            return;
        };
        let (detail, checkpoint) = (
            format!("{} the stream up to number {}", last.witness, last.head.seq),
            last.witness.checkpoint(),
        );
        if self.seen {
            let detail = format!(
                "{} missing: {detail}",
                span_with_verb(self.next, last.head.seq)
            );
            problems.add_at(
                ProblemKind::TailMissing,
                self.id,
                Some(self.next),
                None,
                checkpoint,
                detail,
            );
        } else {
            problems.add_at(
                ProblemKind::StreamMissing,
                self.id,
                None,
                None,
                checkpoint,
                format!("all of its records are missing: {detail}"),
            );
        }
    }
}

fn hash_after(before: Hash, link: &Link) -> Hash {
    hash(&before, link.stream, link.seq, link.at, &link.body)
}

fn span_with_verb(from: u64, to: u64) -> String {
    format!(
        "{} {}",
        span("record", from, to),
        if from == to { "is" } else { "are" }
    )
}
