//! The stored output of one exec: numbered pieces in segment files, of which the newest 16 MiB are
//! retained.
//!
//! Invariants: a piece is in the file before the agent is acknowledged, so a worker crash loses
//! nothing; segments are dropped only from the front. Writes are small and go through the page
//! cache, so they run on the async thread.

use std::{
    io::{self, BufReader, Read, Write as _},
    path::{Path, PathBuf},
};

use cynode_api::{ExecId, Stream, exec_limits::KEPT_PER_EXEC};

/// Four full segments and the one being written retain at least 16 MiB.
const SEGMENT_BYTES: u64 = KEPT_PER_EXEC / 4;
const HEADER_BYTES: usize = 21;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) seq: u64,
    pub(crate) at_ms: u64,
    pub(crate) stream: Stream,
    pub(crate) data: Vec<u8>,
}

#[derive(Debug)]
struct SpoolSegment {
    first_seq: u64,
    bytes: u64,
    path: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Spool {
    directory: PathBuf,
    exec_id: ExecId,
    segments: Vec<SpoolSegment>,
    current: Option<fs_err::File>,
    last_seq: u64,
}

impl Spool {
    pub(crate) const fn new(directory: PathBuf, exec_id: ExecId) -> Self {
        Self {
            directory,
            exec_id,
            segments: Vec::new(),
            current: None,
            last_seq: 0,
        }
    }

    /// Recovers the segments of an earlier worker process. A piece truncated by a crash is removed:
    /// the agent still has it.
    pub(crate) fn recover(directory: PathBuf, exec_id: ExecId) -> io::Result<Self> {
        let mut spool = Self::new(directory, exec_id);
        let prefix = format!("{exec_id}.");
        let mut found: Vec<u64> = match fs_err::read_dir(&spool.directory) {
            Ok(entries) => entries
                .filter_map(|entry| {
                    entry
                        .ok()?
                        .file_name()
                        .to_str()?
                        .strip_prefix(&prefix)?
                        .parse()
                        .ok()
                })
                .collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        found.sort_unstable();
        for first_seq in found {
            let path = spool.path(first_seq);
            let mut file = open(&path)?;
            let length = fs_err::metadata(&path)?.len();
            let mut whole = 0;
            while let Some((header, data_bytes)) = read_header(&mut file)? {
                let end = whole + HEADER_BYTES as u64 + data_bytes;
                let due = if whole == 0 {
                    first_seq
                } else {
                    spool.last_seq.saturating_add(1)
                };
                // Truncated or corrupt: a sequence number from a bad disk must not be trusted.
                if end > length || header.seq != due || due == u64::MAX {
                    break;
                }
                file.seek_relative(i64::try_from(data_bytes).unwrap_or(i64::MAX))?;
                whole = end;
                spool.last_seq = header.seq;
            }
            fs_err::OpenOptions::new()
                .write(true)
                .open(&path)?
                .set_len(whole)?;
            if whole == 0 {
                remove(&path);
                continue;
            }
            spool.segments.push(SpoolSegment {
                first_seq,
                bytes: whole,
                path,
            });
        }
        Ok(spool)
    }

    fn path(&self, first_seq: u64) -> PathBuf {
        self.directory.join(format!("{}.{first_seq}", self.exec_id))
    }

    pub(crate) fn last_seq(&self) -> u64 {
        self.last_seq
    }

    /// The first piece that is still kept; one past the last when there is none.
    pub(crate) fn first_seq(&self) -> u64 {
        self.segments
            .first()
            .map_or(self.last_seq + 1, |segment| segment.first_seq)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    pub(crate) fn append(&mut self, piece: &Piece) -> io::Result<()> {
        let full = self
            .segments
            .last()
            .is_none_or(|segment| segment.bytes >= SEGMENT_BYTES);
        if full || self.current.is_none() {
            let first_seq = if full {
                piece.seq
            } else {
                self.segments
                    .last()
                    .map_or(piece.seq, |segment| segment.first_seq)
            };
            let path = self.path(first_seq);
            self.current = Some(
                fs_err::OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(&path)?,
            );
            if full {
                self.segments.push(SpoolSegment {
                    first_seq,
                    bytes: 0,
                    path,
                });
            }
        }
        let mut record = Vec::with_capacity(HEADER_BYTES + piece.data.len());
        record.extend_from_slice(&piece.seq.to_le_bytes());
        record.extend_from_slice(&piece.at_ms.to_le_bytes());
        record.push(u8::from(piece.stream == Stream::Stderr));
        record.extend_from_slice(
            &u32::try_from(piece.data.len())
                .unwrap_or(u32::MAX)
                .to_le_bytes(),
        );
        record.extend_from_slice(&piece.data);
        if let (Some(file), Some(segment)) = (&mut self.current, self.segments.last_mut()) {
            if let Err(error) = file.write_all(&record) {
                // Remove the partial record, or it would be read as a piece.
                drop(file.set_len(segment.bytes));
                return Err(error);
            }
            segment.bytes += record.len() as u64;
        }
        self.last_seq = piece.seq;
        Ok(())
    }

    /// The sequence number up to which the oldest segment can be dropped, if the rest retains
    /// enough. The caller drops it once no attached reader needs it.
    pub(crate) fn droppable(&self) -> Option<u64> {
        let oldest = self.segments.first()?;
        (self.segments.len() > 1 && self.bytes() - oldest.bytes >= KEPT_PER_EXEC)
            .then(|| self.segments[1].first_seq)
    }

    pub(crate) fn drop_oldest(&mut self) {
        if self.segments.len() > 1 {
            remove(&self.segments.remove(0).path);
        }
    }

    /// Closes the file: nothing more is written.
    pub(crate) fn close(&mut self) {
        self.current = None;
    }

    /// Removes all stored output.
    pub(crate) fn clear(&mut self) {
        self.current = None;
        for segment in self.segments.drain(..) {
            remove(&segment.path);
        }
    }

    /// A reader at the first kept piece after `seq`.
    pub(crate) fn read_after(&self, seq: u64) -> SpoolReader {
        SpoolReader {
            next_seq: seq.saturating_add(1).max(self.first_seq()),
            file: None,
        }
    }

    /// The sequence number before the newest pieces that hold at least `tail_bytes`.
    pub(crate) fn before_tail(&self, tail_bytes: u64) -> io::Result<u64> {
        let mut bytes = 0;
        for segment in self.segments.iter().rev() {
            let mut file = open(&segment.path)?;
            let mut sizes = Vec::new();
            while let Some((header, data_bytes)) = read_header(&mut file)? {
                file.seek_relative(i64::try_from(data_bytes).unwrap_or(i64::MAX))?;
                sizes.push((header.seq, data_bytes));
            }
            for (seq, size) in sizes.into_iter().rev() {
                if bytes >= tail_bytes {
                    return Ok(seq);
                }
                bytes += size;
            }
        }
        Ok(if bytes == 0 {
            self.last_seq
        } else {
            self.first_seq() - 1
        })
    }

    fn segment_of(&self, seq: u64) -> Option<&SpoolSegment> {
        self.segments
            .iter()
            .rev()
            .find(|segment| segment.first_seq <= seq)
    }
}

fn open(path: &Path) -> io::Result<BufReader<fs_err::File>> {
    Ok(BufReader::with_capacity(
        64 * 1024,
        fs_err::File::open(path)?,
    ))
}

fn remove(path: &Path) {
    if let Err(error) = fs_err::remove_file(path) {
        tracing::warn!(%error, "Failed to remove stored output.");
    }
}

/// A position in a spool. Has its own file handle, so that reads don't interfere with appends.
#[derive(Debug)]
pub(crate) struct SpoolReader {
    next_seq: u64,
    file: Option<(u64, BufReader<fs_err::File>)>,
}

impl SpoolReader {
    pub(crate) fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// The next piece, or `None` if there is none yet.
    pub(crate) fn next(&mut self, spool: &Spool) -> io::Result<Option<Piece>> {
        loop {
            if self.next_seq > spool.last_seq {
                return Ok(None);
            }
            self.next_seq = self.next_seq.max(spool.first_seq());
            let Some(segment) = spool.segment_of(self.next_seq) else {
                return Ok(None);
            };
            let file = match &mut self.file {
                Some((first_seq, file)) if *first_seq == segment.first_seq => file,
                _ => {
                    &mut self
                        .file
                        .insert((segment.first_seq, open(&segment.path)?))
                        .1
                }
            };
            let Some((header, data_bytes)) = read_header(file)? else {
                // End of the segment although the piece should be in it: reopen it next time.
                self.file = None;
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the stored output has a gap",
                ));
            };
            if header.seq < self.next_seq {
                file.seek_relative(i64::try_from(data_bytes).unwrap_or(i64::MAX))?;
                continue;
            }
            let mut data = vec![0; usize::try_from(data_bytes).unwrap_or(0)];
            file.read_exact(&mut data)?;
            self.next_seq = header.seq.saturating_add(1);
            return Ok(Some(Piece { data, ..header }));
        }
    }
}

/// Reads a record's header as a piece without data, and the length of its data. `None` at the end
/// of the file or in a truncated header.
fn read_header(file: &mut impl Read) -> io::Result<Option<(Piece, u64)>> {
    let mut header = [0; HEADER_BYTES];
    let mut filled = 0;
    while filled < HEADER_BYTES {
        match file.read(&mut header[filled..])? {
            0 => return Ok(None),
            count => filled += count,
        }
    }
    let number = |range: std::ops::Range<usize>| {
        header[range]
            .iter()
            .rev()
            .fold(0_u64, |value, byte| value << 8 | u64::from(*byte))
    };
    let stream = if header[16] == 0 {
        Stream::Stdout
    } else {
        Stream::Stderr
    };
    Ok(Some((
        Piece {
            seq: number(0..8),
            at_ms: number(8..16),
            stream,
            data: Vec::new(),
        },
        number(17..21),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(seq: u64, size: usize) -> Piece {
        Piece {
            seq,
            at_ms: seq * 10,
            stream: if seq.is_multiple_of(3) {
                Stream::Stderr
            } else {
                Stream::Stdout
            },
            data: vec![u8::try_from(seq % 251).unwrap_or(0); size],
        }
    }

    fn all(spool: &Spool, after: u64) -> Vec<Piece> {
        let mut reader = spool.read_after(after);
        std::iter::from_fn(|| reader.next(spool).expect("readable")).collect()
    }

    #[test]
    fn stored_output_is_readable_from_any_position() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut spool = Spool::new(directory.path().to_owned(), ExecId::generate());
        let pieces: Vec<Piece> = (1..=50)
            .map(|seq| piece(seq, usize::try_from(seq).unwrap_or(0) * 7))
            .collect();
        for piece in &pieces {
            spool.append(piece).expect("appends");
        }
        for after in [0, 1, 17, 49, 50, 99] {
            assert_eq!(
                all(&spool, after),
                pieces
                    .iter()
                    .filter(|piece| piece.seq > after)
                    .cloned()
                    .collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn the_tail_begins_at_a_chunk_and_has_at_least_the_requested_bytes() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut spool = Spool::new(directory.path().to_owned(), ExecId::generate());
        assert_eq!(spool.before_tail(10).expect("reads"), 0);
        for seq in 1..=10 {
            spool.append(&piece(seq, 10)).expect("appends");
        }
        for (requested, before) in [(0, 10), (1, 9), (10, 9), (11, 8), (95, 0), (1_000, 0)] {
            assert_eq!(
                spool.before_tail(requested).expect("reads"),
                before,
                "{requested}"
            );
        }
    }

    #[test]
    fn only_the_newest_output_is_retained_and_at_least_the_promised_amount() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut spool = Spool::new(directory.path().to_owned(), ExecId::generate());
        for seq in 1..=600 {
            spool.append(&piece(seq, 64 * 1024)).expect("appends");
            while spool.droppable().is_some() {
                spool.drop_oldest();
            }
        }
        assert!(
            spool.bytes() >= KEPT_PER_EXEC && spool.bytes() < KEPT_PER_EXEC + 2 * SEGMENT_BYTES,
            "{}",
            spool.bytes()
        );
        let retained = all(&spool, 0);
        assert_eq!(
            retained.first().map(|piece| piece.seq),
            Some(spool.first_seq())
        );
        assert!(
            retained
                .windows(2)
                .all(|pair| pair[1].seq == pair[0].seq + 1)
        );
        assert_eq!(retained.last().map(|piece| piece.seq), Some(600));
    }

    /// A spool of three pieces of 100 bytes, and its file.
    fn three_pieces() -> (tempfile::TempDir, ExecId, PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        let id = ExecId::generate();
        let mut spool = Spool::new(directory.path().to_owned(), id);
        for seq in 1..=3 {
            spool.append(&piece(seq, 100)).expect("appends");
        }
        let path = directory.path().join(format!("{id}.1"));
        (directory, id, path)
    }

    #[test]
    fn corrupt_sequence_numbers_are_not_trusted() {
        let (directory, id, path) = three_pieces();
        let good = fs_err::read(&path).expect("there");
        for (place, last) in [
            (0, 0),
            (HEADER_BYTES + 100, 1),
            (2 * (HEADER_BYTES + 100), 2),
        ] {
            let mut bad = good.clone();
            bad[place..place + 8].fill(0xff);
            fs_err::write(&path, &bad).expect("writes");
            let mut recovered = Spool::recover(directory.path().to_owned(), id).expect("recovers");
            assert_eq!(recovered.last_seq(), last);
            for seq in last + 1..=3 {
                recovered.append(&piece(seq, 100)).expect("appends");
            }
            assert_eq!(
                all(&recovered, 0),
                (1..=3).map(|seq| piece(seq, 100)).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn a_piece_truncated_by_a_crash_is_removed_and_can_be_rewritten() {
        let (directory, id, path) = three_pieces();
        let length = fs_err::metadata(&path).expect("there").len();
        for cut in [1, 50, 100, 110] {
            fs_err::OpenOptions::new()
                .write(true)
                .open(&path)
                .expect("opens")
                .set_len(length - cut)
                .expect("cuts");
            let mut recovered = Spool::recover(directory.path().to_owned(), id).expect("recovers");
            assert_eq!(recovered.last_seq(), 2);
            recovered.append(&piece(3, 100)).expect("appends");
            assert_eq!(
                all(&recovered, 0),
                (1..=3).map(|seq| piece(seq, 100)).collect::<Vec<_>>()
            );
        }
    }
}
