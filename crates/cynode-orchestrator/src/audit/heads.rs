//! The heads of this process's streams, from its own memory, and how long they have been unsigned.
//!
//! Invariant: nothing here is read back from the database, which may be tampered with or may hang.
//! So a head that this process committed is signed and verified unchanged, and a missing checkpoint
//! is noticed.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_audit::Head;
use parking_lot::Mutex;
use uuid::Uuid;

/// How long records may wait for a checkpoint: ten times the usual interval.
pub(crate) const OVERDUE: Duration = Duration::from_secs(10);
/// Streams to remember. A process writes to two; one that is considered dead starts others.
const MAX_STREAMS: usize = 1_024;

/// The heads of this process's streams. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnHeads(Arc<Mutex<Heads>>);

#[derive(Debug, Default)]
struct Heads {
    /// By stream id, and so by age.
    newest: BTreeMap<Uuid, Head>,
    unsigned_since: Option<Instant>,
}

/// The state when a signing round began.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    at: Instant,
    heads: BTreeMap<Uuid, Head>,
}

impl OwnHeads {
    /// Records the newest committed head of a stream.
    pub(crate) fn committed(&self, stream: Uuid, head: Head) {
        let mut heads = self.0.lock();
        heads.newest.insert(stream, head);
        heads.unsigned_since.get_or_insert_with(Instant::now);
        if heads.newest.len() > MAX_STREAMS {
            heads.newest.pop_first();
        }
    }

    pub(crate) fn newest(&self) -> BTreeMap<Uuid, Head> {
        self.0.lock().newest.clone()
    }

    pub(crate) fn mark(&self) -> Mark {
        Mark {
            at: Instant::now(),
            heads: self.newest(),
        }
    }

    /// Records how far streams are signed by checkpoints that are also in the file. `live` are the
    /// streams that are still written to.
    pub(crate) fn signed(&self, signed: &HashMap<Uuid, u64>, mark: &Mark, live: &[Uuid]) {
        let covers =
            |stream: &Uuid, head: &Head| signed.get(stream).is_some_and(|seq| *seq >= head.seq);
        let mut heads = self.0.lock();
        heads
            .newest
            .retain(|stream, head| live.contains(stream) || !covers(stream, head));
        if heads
            .newest
            .iter()
            .all(|(stream, head)| covers(stream, head))
        {
            heads.unsigned_since = None;
        } else if mark.heads.iter().all(|(stream, head)| covers(stream, head)) {
            // The remaining records were committed after the mark.
            heads.unsigned_since = heads.unsigned_since.max(Some(mark.at));
        }
    }

    /// How long the oldest unsigned record of this process has been committed.
    pub(crate) fn unsigned_for(&self) -> Option<Duration> {
        self.0.lock().unsigned_since.map(|since| since.elapsed())
    }

    /// Like `unsigned_for`, if it exceeds the limit.
    pub(crate) fn overdue(&self) -> Option<Duration> {
        self.unsigned_for().filter(|age| *age > OVERDUE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(seq: u64) -> Head {
        Head { seq, hash: [0; 32] }
    }

    fn age(heads: &OwnHeads, seconds: u64) {
        heads.0.lock().unsigned_since = Instant::now().checked_sub(Duration::from_secs(seconds));
    }

    #[test]
    fn a_checkpoint_is_overdue_when_records_wait_for_longer_than_the_limit() {
        let heads = OwnHeads::default();
        assert_eq!(
            (heads.unsigned_for(), heads.overdue()),
            (None, None),
            "an empty trail has unsigned records"
        );
        let stream = Uuid::now_v7();
        heads.committed(stream, head(1));
        assert!(heads.unsigned_for().is_some() && heads.overdue().is_none());
        age(&heads, OVERDUE.as_secs() - 1);
        assert!(heads.overdue().is_none());
        age(&heads, OVERDUE.as_secs() + 1);
        // Later records do not reset the age of the oldest one.
        heads.committed(stream, head(2));
        assert!(heads.overdue().is_some());

        // A checkpoint that signs less does not count.
        let mark = heads.mark();
        heads.signed(&HashMap::from([(stream, 1)]), &mark, &[stream]);
        assert!(heads.overdue().is_some());
        // A checkpoint of all records at the mark leaves the later ones.
        heads.committed(stream, head(3));
        heads.signed(&HashMap::from([(stream, 2)]), &mark, &[stream]);
        assert!(heads.unsigned_for().is_some() && heads.overdue().is_none());
        heads.signed(&HashMap::from([(stream, 3)]), &heads.mark(), &[stream]);
        assert_eq!(heads.unsigned_for(), None);
    }

    #[test]
    fn ended_streams_are_kept_until_signed_and_bounded_in_number() {
        let heads = OwnHeads::default();
        let streams: Vec<Uuid> = (0..MAX_STREAMS as u128 + 5).map(Uuid::from_u128).collect();
        let (old, live) = (streams[0], streams[1]);
        heads.committed(old, head(5));
        heads.committed(live, head(1));
        heads.signed(
            &HashMap::from([(old, 4), (live, 1)]),
            &heads.mark(),
            &[live],
        );
        assert_eq!(
            heads.newest().len(),
            2,
            "a stream was forgotten before its end was signed"
        );
        heads.signed(
            &HashMap::from([(old, 5), (live, 1)]),
            &heads.mark(),
            &[live],
        );
        assert_eq!(heads.newest(), BTreeMap::from([(live, head(1))]));
        for stream in &streams {
            heads.committed(*stream, head(1));
        }
        assert_eq!(heads.newest().len(), MAX_STREAMS);
    }
}
