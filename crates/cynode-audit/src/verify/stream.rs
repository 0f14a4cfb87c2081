//! One stream: its chain, the heads that were signed, and what retention cut from it.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::{
    checkpoints::span,
    problems::{Listed, Problems, What},
};
use crate::{Hash, Head, Link, genesis, hash};

/// Gaps of a stream that are remembered in case what is missing comes later. Who makes more of them does not mean order.
const MAX_GAPS: usize = 128;

#[derive(Clone, Copy, Debug)]
pub(super) struct SignedHead {
    pub(super) head: Head,
    pub(super) by: Witness,
}

/// Who says where a stream stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Witness {
    /// `truncated`: how many records retention had removed by then.
    Checkpoint { number: u64, truncated: u64 },
    /// What was signed beside the database while that took no checkpoint.
    Interim { truncated: u64 },
    /// The writer of the stream, which is alive and remembers what it committed.
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
                "the file outside the database has, signed while the database took no checkpoint,",
            ),
            Self::Writer => f.write_str("its writer committed"),
        }
    }
}

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    InOrder,
    Late,
    /// It does not belong to the stream.
    Refused,
}

#[derive(Debug)]
struct Gap {
    /// The last number that is missing.
    to: u64,
    /// The hash that the first missing one stands on.
    before: Option<Hash>,
    /// Of the record after the gap.
    cursor: i64,
}

#[derive(Debug)]
pub(super) struct Stream {
    id: Uuid,
    /// Records up to here were removed by retention.
    cut: u64,
    /// By number, each once; those below `checked` have been passed.
    signed: Vec<SignedHead>,
    checked: usize,
    /// The last number that a checkpoint knows.
    checkpointed: u64,
    /// The last number whose hash is as it was signed.
    good: u64,
    /// The last signed head was not reached as it was signed: what follows is not as it was signed either.
    strayed: bool,
    /// The number of the next record, and the hash that it stands on when that is known.
    next: u64,
    stands_on: Option<Hash>,
    /// What it stands on when the record before was changed alone.
    or_on: Option<Hash>,
    /// What the last record stands on, and its problem when it does not fit.
    last_stands_on: Option<Hash>,
    suspect: Option<Listed>,
    gaps: BTreeMap<u64, Gap>,
    seen: bool,
    /// A record beyond what was signed, or below the cut, has been named.
    named: bool,
}

impl Stream {
    /// A stream that no checkpoint knows.
    pub(super) fn unsigned(id: Uuid) -> Self {
        Self::signed(id, None, Vec::new())
    }

    /// What checkpoints say of a stream.
    pub(super) fn signed(id: Uuid, cut: Option<Head>, mut signed: Vec<SignedHead>) -> Self {
        let cut = cut.unwrap_or_else(|| Head {
            seq: 0,
            hash: genesis(id),
        });
        signed.retain(|signed| signed.head.seq > cut.seq);
        // A checkpoint speaks first of what others say too.
        signed.sort_by_key(|signed| (signed.head.seq, signed.by.checkpoint().unwrap_or(u64::MAX)));
        signed.dedup_by_key(|signed| signed.head);
        let checkpointed = signed
            .iter()
            .rev()
            .find(|signed| signed.by.checkpoint().is_some())
            .map_or(cut.seq, |signed| signed.head.seq);
        Self {
            id,
            cut: cut.seq,
            signed,
            checked: 0,
            checkpointed,
            good: cut.seq,
            strayed: false,
            next: cut.seq.saturating_add(1),
            stands_on: Some(cut.hash),
            or_on: None,
            last_stands_on: None,
            suspect: None,
            gaps: BTreeMap::new(),
            seen: false,
            named: false,
        }
    }

    pub(super) const fn id(&self) -> Uuid {
        self.id
    }

    pub(super) const fn is_seen(&self) -> bool {
        self.seen
    }

    /// The last number that a checkpoint knows, or that retention removed.
    pub(super) const fn last_signed(&self) -> u64 {
        self.checkpointed
    }

    /// `signed_cursor`: no record up to there is beyond a signed head.
    pub(super) fn take(
        &mut self,
        cursor: i64,
        link: &Link,
        signed_cursor: i64,
        problems: &mut Problems,
    ) -> Taken {
        if link.seq <= self.cut {
            if !std::mem::replace(&mut self.named, true) {
                let detail = format!(
                    "retention removed the records of its stream up to number {}",
                    self.cut
                );
                problems.of_record(What::RecordInserted, cursor, link, detail);
            }
            return Taken::Refused;
        }
        if link.seq < self.next {
            return self.take_again(cursor, link, problems);
        }
        self.seen = true;
        if cursor <= signed_cursor
            && link.seq > self.last_signed()
            && !std::mem::replace(&mut self.named, true)
        {
            let detail = match self.last_signed() {
                0 => "it is older than the newest checkpoint, and no checkpoint knows its stream"
                    .to_owned(),
                last => format!(
                    "it is older than the newest checkpoint, which knows its stream up to number {last}"
                ),
            };
            problems.of_record(What::RecordInserted, cursor, link, detail);
        }
        if link.seq > self.next {
            self.skip_to(link.seq, cursor, problems);
        }
        self.follow(cursor, link, problems);
        Taken::InOrder
    }

    /// Notes that what lies between is missing, and finds what the record after it stands on, if that was signed.
    fn skip_to(&mut self, seq: u64, cursor: i64, problems: &mut Problems) {
        let gap = Gap {
            to: seq - 1,
            before: self.stands_on,
            cursor,
        };
        if self.gaps.len() < MAX_GAPS {
            self.gaps.insert(self.next, gap);
        } else {
            self.missing(self.next, &gap, problems);
        }
        (self.stands_on, self.or_on) = (None, None);
        while let Some(signed) = self
            .signed
            .get(self.checked)
            .filter(|signed| signed.head.seq < seq)
        {
            if signed.head.seq == seq - 1 {
                self.stands_on = Some(signed.head.hash);
            }
            self.checked += 1;
        }
    }

    fn follow(&mut self, cursor: i64, link: &Link, problems: &mut Problems) {
        let computed = self.stands_on.map(|before| hash_on(before, link));
        let fits = computed.is_none_or(|computed| computed == link.hash)
            || self
                .or_on
                .is_some_and(|before| hash_on(before, link) == link.hash);
        self.suspect = None;
        self.last_stands_on = self.stands_on;
        self.or_on = None;
        if !fits {
            let detail = if self.good.saturating_add(1) == link.seq {
                "it does not fit its hash".to_owned()
            } else {
                format!(
                    "it does not fit its hash and the record before it: it was changed, or record {} with its hash",
                    link.seq - 1
                )
            };
            self.suspect = problems.of_record(What::RecordChanged, cursor, link, detail);
            self.or_on = computed;
        }
        self.stands_on = Some(link.hash);
        self.next = link.seq.saturating_add(1);
        while let Some(signed) = self
            .signed
            .get(self.checked)
            .filter(|signed| signed.head.seq == link.seq)
            .copied()
        {
            self.checked += 1;
            self.hold_against(signed, cursor, link, fits, problems);
        }
    }

    fn hold_against(
        &mut self,
        signed: SignedHead,
        cursor: i64,
        link: &Link,
        fits: bool,
        problems: &mut Problems,
    ) {
        if signed.head.hash == link.hash {
            self.good = link.seq;
            self.strayed = false;
            return;
        }
        // Whoever changed the hash too is found here; when nothing after it was changed, the rest stands on what was signed.
        self.or_on = Some(signed.head.hash);
        if fits && !self.strayed {
            let detail = format!(
                "{} not what {}",
                are(self.good.saturating_add(1), link.seq),
                signed.by
            );
            problems.at(
                What::RecordChanged,
                self.id,
                Some(link.seq),
                Some(cursor),
                signed.by.checkpoint(),
                detail,
            );
        }
        self.strayed = true;
    }

    /// A number that has been passed: it comes late, or for the second time.
    fn take_again(&mut self, cursor: i64, link: &Link, problems: &mut Problems) -> Taken {
        let gap = self
            .gaps
            .range(..=link.seq)
            .next_back()
            .filter(|(_, gap)| gap.to >= link.seq)
            .map(|(from, _)| *from);
        if let Some((from, gap)) = gap.and_then(|from| Some((from, self.gaps.remove(&from)?))) {
            problems.of_record(
                What::OrderChanged,
                cursor,
                link,
                "it comes after records with higher numbers".to_owned(),
            );
            if from == link.seq
                && gap
                    .before
                    .is_some_and(|before| hash_on(before, link) != link.hash)
            {
                problems.of_record(
                    What::RecordChanged,
                    cursor,
                    link,
                    "it does not fit its hash".to_owned(),
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
            return Taken::Late;
        }
        let detail = "there is another record with its number";
        if link.seq.checked_add(1) == Some(self.next)
            && self
                .last_stands_on
                .is_some_and(|before| hash_on(before, link) == link.hash)
        {
            if self.suspect.is_some() {
                // This is the true one: the one that did not fit had been put before it.
                problems.amend(self.suspect.take(), What::RecordInserted, detail);
                self.stands_on = Some(link.hash);
                self.or_on = None;
                self.strayed = self.signed[..self.checked].last().is_some_and(|signed| {
                    signed.head.seq == link.seq && signed.head.hash != link.hash
                });
                return Taken::Late;
            }
            self.or_on = Some(link.hash);
        }
        problems.of_record(What::RecordInserted, cursor, link, detail.to_owned());
        Taken::Refused
    }

    fn missing(&self, from: u64, gap: &Gap, problems: &mut Problems) {
        let detail = format!("{} not there", are(from, gap.to));
        problems.at(
            What::RecordMissing,
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
            format!("{} the stream up to number {}", last.by, last.head.seq),
            last.by.checkpoint(),
        );
        if self.seen {
            let detail = format!("{} not there: {detail}", are(self.next, last.head.seq));
            problems.at(
                What::TailMissing,
                self.id,
                Some(self.next),
                None,
                checkpoint,
                detail,
            );
        } else {
            problems.at(
                What::StreamMissing,
                self.id,
                None,
                None,
                checkpoint,
                format!("none of its records is there: {detail}"),
            );
        }
    }
}

fn hash_on(before: Hash, link: &Link) -> Hash {
    hash(&before, link.stream, link.seq, link.at, &link.body)
}

fn are(from: u64, to: u64) -> String {
    format!(
        "{} {}",
        span("record", from, to),
        if from == to { "is" } else { "are" }
    )
}
