//! One file of a stream: a header, then one record per line.
//!
//! Invariant: of a file that was cut off or damaged at any byte, exactly the records before that
//! byte are read, because each record's hash covers its predecessor.

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use cynode_api::NodeAuditRecord;
use cynode_audit::{Chain, Hash, Head, Link};
use fs_err::os::unix::fs::OpenOptionsExt as _;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The first line of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    pub(super) stream: Uuid,
    /// The position of the stream among the writer's, which are shipped in this order.
    pub(super) ordinal: u64,
    /// The record before the first one of this segment.
    pub(super) before: Head,
    /// The stream repeats records of earlier ones. It counts once `position.json` names it.
    pub(super) is_rebased: bool,
}

/// A segment whose records are all durable.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) path: PathBuf,
    pub(super) before: Head,
    /// The last record; `before` if there is none.
    pub(super) last: Head,
    /// The length up to the end of the last record.
    pub(super) bytes: u64,
}

/// What a segment holds.
pub(super) struct Contents {
    pub(super) header: Header,
    pub(super) segment: Segment,
    pub(super) links: Vec<Link>,
    /// The file continues with something else than a record.
    pub(super) is_torn: bool,
}

pub(super) fn path(directory: &Path, ordinal: u64, before: u64) -> PathBuf {
    directory.join(format!("{ordinal:010}-{:020}.jsonl", before + 1))
}

/// The ordinal and first number in a segment's name.
pub(super) fn parse_name(name: &str) -> Option<(u64, u64)> {
    let (ordinal, first) = name.strip_suffix(".jsonl")?.split_once('-')?;
    Some((ordinal.parse().ok()?, first.parse().ok()?))
}

/// Makes creations and removals in a directory durable.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    fs_err::File::open(directory)?.sync_all()
}

impl Segment {
    /// Creates a segment, durably.
    pub(super) fn create(directory: &Path, header: &Header) -> io::Result<(Self, fs_err::File)> {
        let path = path(directory, header.ordinal, header.before.seq);
        let mut line = serde_json::to_vec(header)?;
        line.push(b'\n');
        let create = || {
            let mut file = fs_err::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)?;
            file.write_all(&line)?;
            file.sync_data()?;
            sync_directory(directory)?;
            io::Result::Ok(file)
        };
        let file = create().inspect_err(|_| drop(fs_err::remove_file(&path)))?;
        let segment = Self {
            path,
            before: header.before,
            last: header.before,
            bytes: line.len() as u64,
        };
        Ok((segment, file))
    }

    /// Reads a segment up to the first byte that is not part of a valid record. `None` if it has no
    /// valid header.
    pub(super) fn open(path: &Path) -> io::Result<Option<Contents>> {
        let bytes = fs_err::read(path)?;
        let mut lines = Lines {
            bytes: &bytes,
            end: 0,
        };
        let header = lines.next().and_then(|line| {
            serde_json::from_slice::<Header>(line)
                .ok()
                .filter(|header| header.before.seq < u64::MAX)
        });
        let Some(header) = header else {
            return Ok(None);
        };
        let mut end = lines.end;
        let mut chain = Chain::resume(header.stream, header.before);
        let mut links = Vec::new();
        while let Some(line) = lines.next() {
            let Some(link) = parse(header.stream, line).filter(|link| chain.follow(link)) else {
                break;
            };
            links.push(link);
            end = lines.end;
        }
        let segment = Self {
            path: path.to_owned(),
            before: header.before,
            last: chain.head(),
            bytes: end as u64,
        };
        Ok(Some(Contents {
            header,
            segment,
            links,
            is_torn: end < bytes.len(),
        }))
    }

    /// The records from a number on, up to a number of records and bytes, but at least one.
    pub(super) fn read(
        &self,
        from: u64,
        max_records: usize,
        max_bytes: usize,
    ) -> io::Result<Vec<NodeAuditRecord>> {
        let bytes = fs_err::read(&self.path)?;
        let length = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        let bytes = bytes.get(..length).ok_or(io::ErrorKind::UnexpectedEof)?;
        let lines = Lines { bytes, end: 0 };
        let skip = usize::try_from(from - self.before.seq).unwrap_or(usize::MAX);
        let (mut total, mut records) = (0, Vec::new());
        for line in lines.skip(skip).take(max_records) {
            total += line.len();
            if total > max_bytes && !records.is_empty() {
                break;
            }
            records.push(serde_json::from_slice(line)?);
        }
        Ok(records)
    }
}

fn parse(stream: Uuid, line: &[u8]) -> Option<Link> {
    let record = serde_json::from_slice(line).ok()?;
    Link::from_node_record(stream, record).ok()
}

/// A record's line.
pub(super) fn line(link: &Link) -> Vec<u8> {
    let mut line = serde_json::to_vec(&link.to_node_record()).expect("a record serializes");
    line.push(b'\n');
    line
}

/// Complete lines, without their newline.
struct Lines<'a> {
    bytes: &'a [u8],
    /// Where the next line begins.
    end: usize,
}

impl<'a> Iterator for Lines<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<Self::Item> {
        let rest = &self.bytes[self.end..];
        let length = memchr::memchr(b'\n', rest)?;
        self.end += length + 1;
        Some(&rest[..length])
    }
}

/// The head before a stream's first record.
pub(super) fn start(stream: Uuid) -> Head {
    let hash: Hash = cynode_audit::genesis(stream);
    Head { seq: 0, hash }
}
