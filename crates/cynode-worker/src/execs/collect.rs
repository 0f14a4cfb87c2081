//! Collects the output of a foreground exec for its answer: all of it within the limit, otherwise
//! the head and the tail.
//!
//! Invariant: a stream takes at most `MAX_IN_MEMORY_BYTES` of memory, whatever limit the caller
//! requested. Longer output spills to an unnamed file. The files of a session share a budget;
//! output beyond it is truncated.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use cynode_api::{Stream, Truncated};

/// Longer streams spill to a file.
const MAX_IN_MEMORY_BYTES: usize = 64 * 1024;

/// The directory and the byte budget of a session's spilled output.
#[derive(Debug)]
pub(crate) struct SpillSpace {
    directory: PathBuf,
    left: AtomicU64,
}

impl SpillSpace {
    pub(crate) fn new(directory: PathBuf, bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            directory,
            left: AtomicU64::new(bytes),
        })
    }

    fn take(&self, bytes: u64) -> io::Result<()> {
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(bytes)
            });
        taken
            .map(drop)
            .map_err(|_| io::Error::other("the session's spilled output exceeds its budget"))
    }
}

/// A file that holds the head of a stream, followed by its tail in a ring.
#[derive(Debug)]
pub(crate) struct RingFile {
    file: File,
    extent: AtomicU64,
    spill_space: Arc<SpillSpace>,
}

impl RingFile {
    fn create(spill_space: &Arc<SpillSpace>) -> io::Result<Self> {
        Ok(Self {
            file: tempfile::tempfile_in(&spill_space.directory)?,
            extent: AtomicU64::new(0),
            spill_space: Arc::clone(spill_space),
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let (before, end) = (
            self.extent.load(Ordering::Relaxed),
            offset + data.len() as u64,
        );
        if end > before {
            self.spill_space.take(end - before)?;
            self.extent.store(end, Ordering::Relaxed);
        }
        self.file.write_all_at(data, offset)
    }
}

impl Drop for RingFile {
    fn drop(&mut self) {
        self.spill_space
            .left
            .fetch_add(*self.extent.get_mut(), Ordering::Relaxed);
    }
}

#[derive(Debug)]
enum StreamStore {
    Memory { head: Vec<u8>, tail: VecDeque<u8> },
    File(Arc<RingFile>),
}

#[derive(Debug)]
struct StreamCollector {
    limit: usize,
    store: StreamStore,
    total: u64,
    /// Length of the head that was stored before a write failed.
    cut_at: Option<u64>,
    spill_space: Arc<SpillSpace>,
}

impl StreamCollector {
    fn new(limit: usize, spill_space: Arc<SpillSpace>) -> Self {
        Self {
            limit,
            store: StreamStore::Memory {
                head: Vec::new(),
                tail: VecDeque::new(),
            },
            total: 0,
            cut_at: None,
            spill_space,
        }
    }

    const fn head(&self) -> usize {
        self.limit.div_ceil(2)
    }

    fn push(&mut self, data: &[u8]) {
        let at = self.total;
        self.total += data.len() as u64;
        if self.cut_at.is_some() {
            return;
        }
        let kept = self.total.min(self.limit as u64);
        if kept > MAX_IN_MEMORY_BYTES as u64
            && let Err(error) = self.spill(at, data)
        {
            tracing::warn!(%error, "Failed to spill a command's output; truncating it.");
            self.cut_at = Some(at.min(self.head() as u64));
        } else if kept <= MAX_IN_MEMORY_BYTES as u64 {
            self.push_to_memory(data);
        }
    }

    fn push_to_memory(&mut self, data: &[u8]) {
        let (max_head, limit) = (self.head(), self.limit);
        let StreamStore::Memory { head, tail } = &mut self.store else {
            return;
        };
        let (first, rest) = data.split_at(data.len().min(max_head - head.len()));
        head.extend_from_slice(first);
        let max_tail = limit - max_head;
        let rest = &rest[rest.len().saturating_sub(max_tail)..];
        let excess = (tail.len() + rest.len()).saturating_sub(max_tail);
        tail.drain(..excess.min(tail.len()));
        tail.extend(rest);
    }

    /// Writes a piece to the file at its position in the stream, after moving the in-memory part
    /// there.
    fn spill(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        let ring = match &mut self.store {
            StreamStore::File(ring) => Arc::clone(ring),
            StreamStore::Memory { head, tail } => {
                let ring = RingFile::create(&self.spill_space)?;
                ring.write(0, head)?;
                ring.write(head.len() as u64, tail.make_contiguous())?;
                let ring = Arc::new(ring);
                self.store = StreamStore::File(Arc::clone(&ring));
                ring
            }
        };
        let (head, tail) = (self.head() as u64, (self.limit - self.head()) as u64);
        let (mut at, mut rest) = (at, data);
        // Only the end of a piece longer than the ring remains in it.
        let behind = (at + rest.len() as u64).saturating_sub(tail).max(head);
        while !rest.is_empty() {
            let (offset, room) = if at < head {
                (at, head - at)
            } else if at < behind {
                let skipped = usize::try_from(behind - at)
                    .unwrap_or(usize::MAX)
                    .min(rest.len());
                (at, rest) = (at + skipped as u64, &rest[skipped..]);
                continue;
            } else {
                let position = (at - head) % tail;
                (head + position, tail - position)
            };
            let length = usize::try_from(room).unwrap_or(usize::MAX).min(rest.len());
            ring.write(offset, &rest[..length])?;
            (at, rest) = (at + length as u64, &rest[length..]);
        }
        Ok(())
    }

    fn collected(&self) -> CollectedStream {
        let (limit, head) = (self.limit as u64, self.head() as u64);
        let length = self.cut_at.unwrap_or_else(|| self.total.min(limit));
        match &self.store {
            StreamStore::Memory { head, tail } => CollectedStream::Memory(
                head.iter()
                    .chain(tail)
                    .copied()
                    .take(usize::try_from(length).unwrap_or(usize::MAX))
                    .collect(),
            ),
            StreamStore::File(ring) => {
                let tail_start = if self.total > limit && self.cut_at.is_none() {
                    (self.total - head) % (limit - head)
                } else {
                    0
                };
                CollectedStream::File {
                    ring: Arc::clone(ring),
                    length,
                    head,
                    limit,
                    tail_start,
                }
            }
        }
    }

    fn is_cut(&self) -> bool {
        self.cut_at.is_some() || self.total > self.limit as u64
    }
}

/// The collected output of one stream.
#[derive(Clone, Debug)]
pub(crate) enum CollectedStream {
    Memory(Vec<u8>),
    File {
        ring: Arc<RingFile>,
        length: u64,
        head: u64,
        limit: u64,
        /// Offset in the ring at which the tail begins.
        tail_start: u64,
    },
}

impl CollectedStream {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::File { length, .. } => *length,
        }
    }

    pub(crate) const fn is_in_memory(&self) -> bool {
        matches!(self, Self::Memory(_))
    }

    /// Reads at most `max` bytes from an offset.
    pub(crate) fn read(&self, from: u64, max: usize) -> io::Result<Vec<u8>> {
        let left = usize::try_from(self.len().saturating_sub(from))
            .unwrap_or(usize::MAX)
            .min(max);
        let (ring, head, limit, tail_start) = match self {
            Self::Memory(bytes) => {
                let from = usize::try_from(from).unwrap_or(usize::MAX).min(bytes.len());
                return Ok(bytes[from..from + left].to_vec());
            }
            Self::File {
                ring,
                head,
                limit,
                tail_start,
                ..
            } => (ring, *head, *limit, *tail_start),
        };
        let mut bytes = vec![0; left];
        let (mut at, mut done) = (from, 0);
        while done < left {
            let (offset, room) = if at < head {
                (at, head - at)
            } else {
                let position = (tail_start + at - head) % (limit - head);
                (head + position, limit - head - position)
            };
            let length = usize::try_from(room).unwrap_or(usize::MAX).min(left - done);
            ring.file
                .read_exact_at(&mut bytes[done..done + length], offset)?;
            (at, done) = (at + length as u64, done + length);
        }
        Ok(bytes)
    }

    pub(crate) fn whole(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Memory(bytes) => Ok(bytes),
            Self::File { length, .. } => {
                self.read(0, usize::try_from(length).unwrap_or(usize::MAX))
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Collector {
    stdout: StreamCollector,
    stderr: StreamCollector,
}

impl Collector {
    pub(crate) fn new(limit: u64, spill_space: &Arc<SpillSpace>) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Self {
            stdout: StreamCollector::new(limit, Arc::clone(spill_space)),
            stderr: StreamCollector::new(limit, Arc::clone(spill_space)),
        }
    }

    pub(crate) fn push(&mut self, stream: Stream, data: &[u8]) {
        match stream {
            Stream::Stdout => self.stdout.push(data),
            Stream::Stderr => self.stderr.push(data),
        }
    }

    /// Both streams, and whether each is truncated.
    pub(crate) fn finish(&self) -> (CollectedStream, CollectedStream, Truncated) {
        (
            self.stdout.collected(),
            self.stderr.collected(),
            Truncated {
                stdout: self.stdout.is_cut(),
                stderr: self.stderr.is_cut(),
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spill_space(bytes: u64) -> (tempfile::TempDir, Arc<SpillSpace>) {
        let directory = tempfile::tempdir().expect("a directory");
        let spill_space = SpillSpace::new(directory.path().to_owned(), bytes);
        (directory, spill_space)
    }

    #[test]
    fn the_middle_is_dropped_and_both_ends_are_retained() {
        let (_directory, spill_space) = spill_space(0);
        for piece in [1, 3, 7, 100] {
            let mut collector = Collector::new(10, &spill_space);
            let input: Vec<u8> = (0..100).collect();
            for part in input.chunks(piece) {
                collector.push(Stream::Stdout, part);
            }
            let (stdout, stderr, truncated) = collector.finish();
            assert_eq!(
                stdout.whole().expect("read"),
                [0, 1, 2, 3, 4, 95, 96, 97, 98, 99]
            );
            assert!(truncated.stdout && !truncated.stderr && stderr.len() == 0);
        }
    }

    #[test]
    fn output_that_fits_is_whole() {
        let (_directory, spill_space) = spill_space(0);
        let mut collector = Collector::new(10, &spill_space);
        collector.push(Stream::Stderr, b"0123456");
        collector.push(Stream::Stderr, b"789");
        let (stdout, stderr, truncated) = collector.finish();
        assert_eq!(
            (stdout.len(), stderr.whole().expect("read"), truncated),
            (0, b"0123456789".to_vec(), Truncated::default())
        );
    }

    #[test]
    fn long_output_is_the_same_in_a_file_as_in_memory() {
        let (_directory, spill_space) = spill_space(1 << 30);
        for limit in [
            MAX_IN_MEMORY_BYTES - 1,
            MAX_IN_MEMORY_BYTES,
            MAX_IN_MEMORY_BYTES + 1,
            2 * MAX_IN_MEMORY_BYTES + 1,
            300_000,
        ] {
            for total in [
                limit - 1,
                limit,
                limit + 1,
                2 * limit,
                3 * limit + 12_345,
                10 * limit,
            ] {
                for piece in [7_919, 65_536, 1_000_000] {
                    let input: Vec<u8> = (0..total)
                        .map(|n| u8::try_from(n % 251).expect("a byte"))
                        .collect();
                    let mut collector = Collector::new(limit as u64, &spill_space);
                    for part in input.chunks(piece) {
                        collector.push(Stream::Stdout, part);
                    }
                    let (stdout, _, truncated) = collector.finish();
                    let mut expected = input[..total.min(limit)].to_vec();
                    if total > limit {
                        expected =
                            [&input[..limit.div_ceil(2)], &input[total - limit / 2..]].concat();
                    }
                    assert_eq!(truncated.stdout, total > limit);
                    assert_eq!(
                        stdout.is_in_memory(),
                        expected.len() <= MAX_IN_MEMORY_BYTES,
                        "{limit} {total}"
                    );
                    let pieces: Vec<u8> = (0..)
                        .map(|n| stdout.read(n * 50_000, 50_000).expect("read"))
                        .take_while(|piece| !piece.is_empty())
                        .flatten()
                        .collect();
                    assert!(
                        pieces == expected,
                        "{limit} {total} {piece}: reading in pieces differs"
                    );
                    assert!(
                        stdout.whole().expect("read") == expected,
                        "{limit} {total} {piece}"
                    );
                }
            }
        }
        assert_eq!(
            spill_space.left.load(Ordering::Relaxed),
            1 << 30,
            "part of the budget was not released"
        );
    }

    #[test]
    fn output_beyond_the_budget_is_reported_as_truncated() {
        let (_directory, spill_space) = spill_space(200_000);
        let mut collector = Collector::new(1 << 20, &spill_space);
        for _ in 0..10 {
            collector.push(Stream::Stdout, &b"x".repeat(50_000));
            collector.push(Stream::Stderr, b"y");
        }
        let (stdout, stderr, truncated) = collector.finish();
        assert!(truncated.stdout && !truncated.stderr);
        assert!(
            stdout.len() >= 100_000 && stdout.len() <= 200_000,
            "{}",
            stdout.len()
        );
        let length = stdout.len();
        let whole = stdout.whole().expect("read");
        assert!(whole.iter().all(|byte| *byte == b'x') && whole.len() as u64 == length);
        assert_eq!(stderr.whole().expect("read"), b"y".repeat(10));
    }
}
