//! The output of a foreground exec's answer: within the limit all of it, over it the start and the end.
//!
//! What must stay true: a stream takes at most `IN_MEMORY` of the worker's memory, whatever limit its caller asked for. More is in
//! a file without a name, and the files of a session have a budget; output that finds no room there is cut.

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

/// What a stream may take in memory.
const IN_MEMORY: usize = 64 * 1024;

/// Where the output of a session's commands goes that is too long for memory.
#[derive(Debug)]
pub(crate) struct Overflow {
    directory: PathBuf,
    left: AtomicU64,
}

impl Overflow {
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
            .map_err(|_| io::Error::other("the session's answers take too much room"))
    }
}

/// A file that holds the start of a stream, and after it the end in a ring.
#[derive(Debug)]
pub(crate) struct Ring {
    file: File,
    extent: AtomicU64,
    overflow: Arc<Overflow>,
}

impl Ring {
    fn create(overflow: &Arc<Overflow>) -> io::Result<Self> {
        Ok(Self {
            file: tempfile::tempfile_in(&overflow.directory)?,
            extent: AtomicU64::new(0),
            overflow: Arc::clone(overflow),
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let (before, end) = (
            self.extent.load(Ordering::Relaxed),
            offset + data.len() as u64,
        );
        if end > before {
            self.overflow.take(end - before)?;
            self.extent.store(end, Ordering::Relaxed);
        }
        self.file.write_all_at(data, offset)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.overflow
            .left
            .fetch_add(*self.extent.get_mut(), Ordering::Relaxed);
    }
}

#[derive(Debug)]
enum Store {
    Memory { head: Vec<u8>, tail: VecDeque<u8> },
    File(Arc<Ring>),
}

#[derive(Debug)]
struct Half {
    limit: usize,
    store: Store,
    total: u64,
    /// How much of the start is there, since something could not be kept.
    cut_at: Option<u64>,
    overflow: Arc<Overflow>,
}

impl Half {
    fn new(limit: usize, overflow: Arc<Overflow>) -> Self {
        Self {
            limit,
            store: Store::Memory {
                head: Vec::new(),
                tail: VecDeque::new(),
            },
            total: 0,
            cut_at: None,
            overflow,
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
        if kept > IN_MEMORY as u64
            && let Err(error) = self.spill(at, data)
        {
            tracing::warn!(%error, "The output of a command could not be kept for its answer, and is cut.");
            self.cut_at = Some(at.min(self.head() as u64));
        } else if kept <= IN_MEMORY as u64 {
            self.push_to_memory(data);
        }
    }

    fn push_to_memory(&mut self, data: &[u8]) {
        let (most_head, limit) = (self.head(), self.limit);
        let Store::Memory { head, tail } = &mut self.store else {
            return;
        };
        let (first, rest) = data.split_at(data.len().min(most_head - head.len()));
        head.extend_from_slice(first);
        let most_tail = limit - most_head;
        let rest = &rest[rest.len().saturating_sub(most_tail)..];
        let excess = (tail.len() + rest.len()).saturating_sub(most_tail);
        tail.drain(..excess.min(tail.len()));
        tail.extend(rest);
    }

    /// Writes what came at a place of the stream to the file. What was in memory till then goes there first.
    fn spill(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        let ring = match &mut self.store {
            Store::File(ring) => Arc::clone(ring),
            Store::Memory { head, tail } => {
                let ring = Ring::create(&self.overflow)?;
                ring.write(0, head)?;
                ring.write(head.len() as u64, tail.make_contiguous())?;
                let ring = Arc::new(ring);
                self.store = Store::File(Arc::clone(&ring));
                ring
            }
        };
        let (head, tail) = (self.head() as u64, (self.limit - self.head()) as u64);
        let (mut at, mut rest) = (at, data);
        // Of what is longer than the ring, only the end is left in it.
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
                let place = (at - head) % tail;
                (head + place, tail - place)
            };
            let length = usize::try_from(room).unwrap_or(usize::MAX).min(rest.len());
            ring.write(offset, &rest[..length])?;
            (at, rest) = (at + length as u64, &rest[length..]);
        }
        Ok(())
    }

    fn kept(&self) -> Kept {
        let (limit, head) = (self.limit as u64, self.head() as u64);
        let length = self.cut_at.unwrap_or_else(|| self.total.min(limit));
        match &self.store {
            Store::Memory { head, tail } => Kept::Memory(
                head.iter()
                    .chain(tail)
                    .copied()
                    .take(usize::try_from(length).unwrap_or(usize::MAX))
                    .collect(),
            ),
            Store::File(ring) => {
                let turned = if self.total > limit && self.cut_at.is_none() {
                    (self.total - head) % (limit - head)
                } else {
                    0
                };
                Kept::File {
                    ring: Arc::clone(ring),
                    length,
                    head,
                    limit,
                    turned,
                }
            }
        }
    }

    fn is_cut(&self) -> bool {
        self.cut_at.is_some() || self.total > self.limit as u64
    }
}

/// A stream of an answer.
#[derive(Clone, Debug)]
pub(crate) enum Kept {
    Memory(Vec<u8>),
    File {
        ring: Arc<Ring>,
        length: u64,
        head: u64,
        limit: u64,
        /// Where in the ring the end begins.
        turned: u64,
    },
}

impl Kept {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::File { length, .. } => *length,
        }
    }

    pub(crate) const fn is_in_memory(&self) -> bool {
        matches!(self, Self::Memory(_))
    }

    /// The bytes from a place on, at most so many.
    pub(crate) fn read(&self, from: u64, most: usize) -> io::Result<Vec<u8>> {
        let left = usize::try_from(self.len().saturating_sub(from))
            .unwrap_or(usize::MAX)
            .min(most);
        let (ring, head, limit, turned) = match self {
            Self::Memory(bytes) => {
                let from = usize::try_from(from).unwrap_or(usize::MAX).min(bytes.len());
                return Ok(bytes[from..from + left].to_vec());
            }
            Self::File {
                ring,
                head,
                limit,
                turned,
                ..
            } => (ring, *head, *limit, *turned),
        };
        let mut bytes = vec![0; left];
        let (mut at, mut done) = (from, 0);
        while done < left {
            let (offset, room) = if at < head {
                (at, head - at)
            } else {
                let place = (turned + at - head) % (limit - head);
                (head + place, limit - head - place)
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
    stdout: Half,
    stderr: Half,
}

impl Collector {
    pub(crate) fn new(limit: u64, overflow: &Arc<Overflow>) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Self {
            stdout: Half::new(limit, Arc::clone(overflow)),
            stderr: Half::new(limit, Arc::clone(overflow)),
        }
    }

    pub(crate) fn push(&mut self, stream: Stream, data: &[u8]) {
        match stream {
            Stream::Stdout => self.stdout.push(data),
            Stream::Stderr => self.stderr.push(data),
        }
    }

    /// Both streams and whether each was cut.
    pub(crate) fn finish(&self) -> (Kept, Kept, Truncated) {
        (
            self.stdout.kept(),
            self.stderr.kept(),
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

    fn overflow(bytes: u64) -> (tempfile::TempDir, Arc<Overflow>) {
        let directory = tempfile::tempdir().expect("a directory");
        let overflow = Overflow::new(directory.path().to_owned(), bytes);
        (directory, overflow)
    }

    #[test]
    fn the_middle_is_cut_and_the_ends_are_kept() {
        let (_directory, overflow) = overflow(0);
        for piece in [1, 3, 7, 100] {
            let mut collector = Collector::new(10, &overflow);
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
        let (_directory, overflow) = overflow(0);
        let mut collector = Collector::new(10, &overflow);
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
        let (_directory, overflow) = overflow(1 << 30);
        for limit in [
            IN_MEMORY - 1,
            IN_MEMORY,
            IN_MEMORY + 1,
            2 * IN_MEMORY + 1,
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
                    let mut collector = Collector::new(limit as u64, &overflow);
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
                        expected.len() <= IN_MEMORY,
                        "{limit} {total}"
                    );
                    let pieces: Vec<u8> = (0..)
                        .map(|n| stdout.read(n * 50_000, 50_000).expect("read"))
                        .take_while(|piece| !piece.is_empty())
                        .flatten()
                        .collect();
                    assert!(pieces == expected, "{limit} {total} {piece}: in pieces");
                    assert!(
                        stdout.whole().expect("read") == expected,
                        "{limit} {total} {piece}"
                    );
                }
            }
        }
        assert_eq!(
            overflow.left.load(Ordering::Relaxed),
            1 << 30,
            "all room was given back"
        );
    }

    #[test]
    fn output_that_finds_no_room_is_cut_and_says_so() {
        let (_directory, overflow) = overflow(200_000);
        let mut collector = Collector::new(1 << 20, &overflow);
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
