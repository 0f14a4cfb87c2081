//! Merges a run of checkpoints into one full checkpoint.

use std::collections::BTreeMap;

use crate::{Checkpoint, Hash, PublicKey, SignedCheckpoint};

/// The reason why checkpoints can't be folded: they are not as they were signed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FoldError {
    #[error("checkpoint {0} is malformed or its signature is invalid")]
    Bad(u64),
    #[error("checkpoint {0} does not follow the previous one")]
    Gap(u64),
}

/// An unsigned checkpoint, with the number and hash of the newest checkpoint that it replaces.
pub type Folded = (Checkpoint, (u64, Hash));

/// Merges the checkpoints of `lines` into a full one, to be signed as the next checkpoint. Returns
/// `None` for fewer than two checkpoints.
///
/// The result derives only from signed data, so tampering with a stream stays detectable.
pub fn fold<'a>(
    lines: impl IntoIterator<Item = (u64, &'a str)>,
    key: &PublicKey,
) -> Result<Option<Folded>, FoldError> {
    let (mut heads, mut cut) = (BTreeMap::new(), BTreeMap::new());
    let mut newest: Option<SignedCheckpoint> = None;
    let mut count = 0;
    for (number, line) in lines {
        let signed = SignedCheckpoint::parse(line)
            .ok()
            .filter(|signed| signed.checkpoint.number == number && signed.verify(key))
            .ok_or(FoldError::Bad(number))?;
        let follows = match &newest {
            Some(before) => {
                before.checkpoint.number + 1 == number && before.hash == signed.checkpoint.prev
            }
            None => {
                signed.checkpoint.full || number == 1 && signed.checkpoint.prev == Checkpoint::FIRST
            }
        };
        if !follows {
            return Err(FoldError::Gap(number));
        }
        if signed.checkpoint.full {
            heads.clear();
            cut.clear();
        }
        heads.extend(signed.checkpoint.heads.clone());
        cut.extend(signed.checkpoint.cut.clone());
        newest = Some(signed);
        count += 1;
    }
    let Some(newest) = newest.filter(|_| count > 1) else {
        return Ok(None);
    };
    let Checkpoint {
        number,
        at,
        cursor,
        truncated_records,
        ..
    } = newest.checkpoint;
    let folded = Checkpoint {
        number: number + 1,
        at,
        prev: newest.hash,
        full: true,
        cursor,
        heads,
        cut,
        truncated_records,
    };
    Ok(Some((folded, (number, newest.hash))))
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;
    use uuid::Uuid;

    use super::*;
    use crate::{Head, SigningKey};

    fn head(seq: u64) -> Head {
        Head {
            seq,
            hash: [u8::try_from(seq).expect("small"); 32],
        }
    }

    /// Streams and their sequence numbers.
    type Places<'a> = &'a [(u128, u64)];

    fn chain(key: &SigningKey, all: &[(bool, Places<'_>, Places<'_>)]) -> Vec<(u64, String)> {
        let heads_of = |pairs: Places<'_>| {
            pairs
                .iter()
                .map(|(stream, seq)| (Uuid::from_u128(*stream), head(*seq)))
                .collect()
        };
        let (mut prev, mut lines) = (Checkpoint::FIRST, Vec::new());
        for (number, (full, heads, cut)) in (1..).zip(all) {
            let checkpoint = Checkpoint {
                number,
                at: datetime!(2026-01-02 03:04:05 UTC),
                prev,
                full: *full,
                cursor: 10 * i64::try_from(number).expect("small"),
                heads: heads_of(heads),
                cut: heads_of(cut),
                truncated_records: 0,
            };
            let signed = checkpoint.sign(key);
            prev = signed.hash;
            lines.push((number, signed.to_line()));
        }
        lines
    }

    fn folded(lines: &[(u64, String)], key: &SigningKey) -> Result<Option<Folded>, FoldError> {
        fold(
            lines.iter().map(|(number, line)| (*number, line.as_str())),
            &key.public(),
        )
    }

    #[test]
    // invariant: audit-trail
    fn a_folded_checkpoint_has_the_newest_head_of_every_stream() {
        let key = SigningKey::from_seed([1; 32]);
        let lines = chain(
            &key,
            &[
                (false, &[(1, 1), (2, 5)], &[]),
                (false, &[(1, 3)], &[]),
                (false, &[(3, 1)], &[]),
            ],
        );
        let (checkpoint, (number, hash)) = folded(&lines, &key).expect("whole").expect("three");
        assert_eq!(
            (
                checkpoint.number,
                checkpoint.full,
                checkpoint.cursor,
                checkpoint.prev,
                number
            ),
            (4, true, 30, hash, 3)
        );
        let expected =
            [(1, 3), (2, 5), (3, 1)].map(|(stream, seq)| (Uuid::from_u128(stream), head(seq)));
        assert_eq!(checkpoint.heads, BTreeMap::from(expected));
        // Folding the result again together with a later checkpoint.
        let mut next = vec![(4, checkpoint.clone().sign(&key).to_line())];
        assert_eq!(folded(&next, &key), Ok(None));
        let signed = SignedCheckpoint::parse(&next[0].1).expect("a line");
        let later = Checkpoint {
            number: 5,
            prev: signed.hash,
            full: false,
            heads: BTreeMap::from([(Uuid::from_u128(1), head(9))]),
            ..checkpoint
        };
        next.push((5, later.sign(&key).to_line()));
        let (again, _) = folded(&next, &key).expect("whole").expect("two");
        assert_eq!(
            (
                again.number,
                again.heads[&Uuid::from_u128(1)],
                again.heads.len()
            ),
            (6, head(9), 3)
        );
    }

    #[test]
    fn a_folded_checkpoint_keeps_removals_and_cuts() {
        let key = SigningKey::from_seed([1; 32]);
        let lines = chain(
            &key,
            &[
                (false, &[(1, 1), (2, 5)], &[]),
                (true, &[(2, 5)], &[(2, 3)]),
                (false, &[(2, 6)], &[]),
            ],
        );
        let (checkpoint, _) = folded(&lines, &key).expect("whole").expect("three");
        let two = Uuid::from_u128(2);
        assert_eq!(
            (checkpoint.heads, checkpoint.cut),
            (
                BTreeMap::from([(two, head(6))]),
                BTreeMap::from([(two, head(3))])
            )
        );
    }

    #[test]
    // invariant: audit-trail
    fn checkpoints_with_a_gap_or_a_bad_signature_are_not_folded() {
        let key = SigningKey::from_seed([1; 32]);
        let lines = chain(
            &key,
            &[
                (false, &[(1, 1)], &[]),
                (false, &[(1, 2)], &[]),
                (false, &[(1, 3)], &[]),
            ],
        );
        let without = |left_out: usize| {
            lines
                .iter()
                .enumerate()
                .filter(|(at, _)| *at != left_out)
                .map(|(_, line)| line.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(folded(&without(0), &key).err(), Some(FoldError::Gap(2)));
        assert_eq!(folded(&without(1), &key).err(), Some(FoldError::Gap(3)));
        let foreign = chain(&SigningKey::from_seed([2; 32]), &[(false, &[(1, 9)], &[])]);
        let mut forged = lines.clone();
        forged[0] = foreign[0].clone();
        assert_eq!(folded(&forged, &key).err(), Some(FoldError::Bad(1)));
        let mut moved = lines.clone();
        moved[1].1 = lines[0].1.clone();
        assert_eq!(folded(&moved, &key).err(), Some(FoldError::Bad(2)));
        let mut other = lines;
        other[1].1 = chain(&key, &[(false, &[(1, 7)], &[]), (false, &[(1, 8)], &[])])[1]
            .1
            .clone();
        assert_eq!(folded(&other, &key).err(), Some(FoldError::Gap(2)));
    }
}
