//! The streams of one writer on disk, below a directory of its own.
//!
//! Each start of the writer that records anything opens a new stream. Streams are shipped in the
//! order of their ordinals, each from its first to its last record; `position.json` says how far
//! the orchestrator has acknowledged them, and files below that are deleted.
//!
//! Invariant: a record is in the index, and can be shipped, only after it is durable. What a crash
//! left after the last durable record is cut off, and nothing is appended to an earlier process's
//! stream.

mod rebase;
mod recover;
mod segment;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    io::{self, Write as _},
    ops::RangeInclusive,
    path::PathBuf,
};

use cynode_api::{
    AuditBody, AuditKind, AuditSubject, NODE_STREAM_ACTION, NodeAuditBatch, node_audit_limits,
};
use cynode_audit::{Chain, Link};
use cynode_service::files;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use time::OffsetDateTime;
use uuid::Uuid;

use self::segment::{Header, Segment};
use crate::Charge;

/// A segment that is longer gets no more records.
const MAX_SEGMENT_BYTES: u64 = 1024 * 1024;
/// What a record takes in the backlog beyond its body.
const RECORD_OVERHEAD: u64 = 256;
/// What JSON around the records of a batch may take.
const BATCH_OVERHEAD: usize = 1024;

/// How far the orchestrator has acknowledged the streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Position {
    /// Streams before this one are acknowledged.
    ordinal: u64,
    /// Of this stream, the records up to this one.
    acknowledged: u64,
}

/// A record that is not acknowledged.
#[derive(Clone, Copy, Debug)]
struct Pending<O> {
    owner: Option<O>,
    cost: u64,
    at: OffsetDateTime,
}

#[derive(Debug)]
struct StoredStream<O> {
    ordinal: u64,
    id: Uuid,
    is_rebased: bool,
    /// By number, without gaps.
    segments: VecDeque<Segment>,
    /// The last `pending.len()` records of the stream.
    pending: VecDeque<Pending<O>>,
}

/// The stream that this process writes. It is the last one.
#[derive(Debug)]
struct Active {
    file: fs_err::File,
    chain: Chain,
    /// The file may hold something after its last durable record.
    is_dirty: bool,
}

/// Unacknowledged records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backlog {
    pub(crate) records: u64,
    pub(crate) bytes: u64,
    pub(crate) oldest: Option<OffsetDateTime>,
}

/// Who is charged for a stored record.
pub(crate) type OwnerOf<O> = fn(&Value) -> Option<O>;

#[derive(Debug)]
pub(crate) struct Store<O> {
    directory: PathBuf,
    /// The subject of the records that the writer makes about itself.
    writer: AuditSubject,
    owner_of: OwnerOf<O>,
    position: Position,
    streams: VecDeque<StoredStream<O>>,
    active: Option<Active>,
    /// Where the orchestrator wants the first stream to continue, if it lost what it acknowledged.
    resend_from: Option<u64>,
    /// Damaged files were set aside; the next stream says so.
    has_lost: bool,
}

/// What a record takes in the backlog.
pub fn cost(body: &Value) -> u64 {
    let length = cynode_audit::canonical(body).map_or(0, |text| text.len());
    length as u64 + RECORD_OVERHEAD
}

fn pending<O>(link: &Link, owner_of: OwnerOf<O>) -> Pending<O> {
    Pending {
        owner: owner_of(&link.body),
        cost: cost(&link.body),
        at: link.at,
    }
}

impl<O> StoredStream<O> {
    fn last(&self) -> u64 {
        self.segments.back().map_or(0, |segment| segment.last.seq)
    }

    /// The number of the first record that is still in a file.
    fn first_held(&self) -> u64 {
        let before = self
            .segments
            .front()
            .map_or(0, |segment| segment.before.seq);
        before + 1
    }
}

impl<O: Copy> Store<O> {
    /// The records of a batch, oldest first; `None` if all are acknowledged.
    pub(crate) fn next_batch(&mut self) -> io::Result<Option<NodeAuditBatch>> {
        self.finish_streams()?;
        let Some(stream) = self.streams.front() else {
            return Ok(None);
        };
        let next = self
            .resend_from
            .unwrap_or(self.position.acknowledged + 1)
            .max(stream.first_held());
        let segment = stream
            .segments
            .iter()
            .find(|segment| segment.before.seq < next && next <= segment.last.seq);
        let Some(segment) = segment else {
            return Ok(None);
        };
        let records = segment.read(
            next,
            node_audit_limits::MAX_RECORDS,
            node_audit_limits::MAX_BATCH_BYTES - BATCH_OVERHEAD,
        )?;
        Ok(Some(NodeAuditBatch {
            version: Some(cynode_api::API_VERSION),
            stream: stream.id,
            records,
        }))
    }

    /// Passes over streams that are acknowledged to their end and get no more records.
    fn finish_streams(&mut self) -> io::Result<()> {
        loop {
            let is_active = self.active.is_some() && self.streams.len() == 1;
            let Some(first) = self.streams.front() else {
                return Ok(());
            };
            let resends = self.resend_from.is_some_and(|from| from <= first.last());
            if is_active || resends || self.position.acknowledged < first.last() {
                return Ok(());
            }
            let next = self.streams.get(1).map(|stream| stream.ordinal);
            self.store_position(Position {
                ordinal: next.unwrap_or(first.ordinal + 1),
                acknowledged: 0,
            })?;
            self.resend_from = None;
            for segment in self
                .streams
                .pop_front()
                .into_iter()
                .flat_map(|s| s.segments)
            {
                remove(&segment);
            }
        }
    }

    /// The orchestrator has all records of a stream before `next`. Returns what left the backlog;
    /// `None` if the stream has no such record.
    pub(crate) fn acknowledge(
        &mut self,
        stream: Uuid,
        next: u64,
    ) -> io::Result<Option<Vec<Charge<O>>>> {
        let Some(first) = self.streams.front().filter(|first| first.id == stream) else {
            return Ok(Some(Vec::new()));
        };
        let acknowledged = next.saturating_sub(1);
        if acknowledged > first.last() {
            return Ok(None);
        }
        self.resend_from = self.resend_from.and(Some(next));
        if acknowledged <= self.position.acknowledged {
            return Ok(Some(Vec::new()));
        }
        self.resend_from = None;
        self.store_position(Position {
            acknowledged,
            ..self.position
        })?;
        let is_active = self.active.is_some() && self.streams.len() == 1;
        let Some(first) = self.streams.front_mut() else {
            return Ok(Some(Vec::new()));
        };
        let left = usize::try_from(first.last() - acknowledged).unwrap_or(usize::MAX);
        let passed = first.pending.len().saturating_sub(left);
        let released = first
            .pending
            .drain(..passed)
            .map(|pending| (pending.owner, pending.cost))
            .collect();
        let kept = usize::from(is_active);
        while first.segments.len() > kept
            && first.segments[0].last.seq <= acknowledged
            && let Some(segment) = first.segments.pop_front()
        {
            remove(&segment);
        }
        self.finish_streams()?;
        Ok(Some(released))
    }

    /// The numbers of a stream's records that are not acknowledged, if the stream is the one that is
    /// shipped.
    pub(crate) fn unacknowledged(&self, stream: Uuid) -> Option<RangeInclusive<u64>> {
        let first = self.streams.front().filter(|first| first.id == stream)?;
        Some(self.position.acknowledged + 1..=first.last())
    }

    /// Goes back to a record that the orchestrator misses. Returns false if it is no longer held,
    /// or never existed.
    pub(crate) fn resend(&mut self, stream: Uuid, from: u64) -> bool {
        let held = self.streams.front().is_some_and(|first| {
            first.id == stream && (first.first_held()..=first.last()).contains(&from)
        });
        if held {
            self.resend_from = Some(from);
        }
        held
    }

    /// Drops the oldest segment of a trail that is shipped nowhere, once it takes more than `max`
    /// bytes.
    pub(crate) fn drop_oldest(&mut self, max: u64) -> io::Result<Vec<Charge<O>>> {
        let mut released = Vec::new();
        while self.backlog().bytes > max {
            let Some(first) = self.streams.front() else {
                break;
            };
            let Some(segment) = first.segments.front() else {
                break;
            };
            let is_last = self.streams.len() == 1 && first.segments.len() == 1;
            if is_last && self.active.is_some() {
                break;
            }
            let (stream, next) = (first.id, segment.last.seq + 1);
            let dropped = self.acknowledge(stream, next)?.unwrap_or_default();
            if dropped.is_empty() {
                break;
            }
            released.extend(dropped);
        }
        Ok(released)
    }

    pub(crate) fn backlog(&self) -> Backlog {
        let mut backlog = Backlog::default();
        for pending in self.streams.iter().flat_map(|stream| &stream.pending) {
            backlog.records += 1;
            backlog.bytes += pending.cost;
        }
        backlog.oldest = self
            .streams
            .iter()
            .find_map(|stream| stream.pending.front())
            .map(|pending| pending.at);
        backlog
    }

    /// Each unacknowledged record.
    pub(crate) fn pending(&self) -> impl Iterator<Item = Charge<O>> {
        self.streams
            .iter()
            .flat_map(|stream| &stream.pending)
            .map(|pending| (pending.owner, pending.cost))
    }

    fn store_position(&mut self, position: Position) -> io::Result<()> {
        files::replace(
            &self.directory.join("position.json"),
            &serde_json::to_vec(&position)?,
        )?;
        segment::sync_directory(&self.directory)?;
        self.position = position;
        Ok(())
    }

    /// Appends records to this process's stream. They are durable when this returns; after an error
    /// none of them is.
    pub(crate) fn append(&mut self, records: Vec<(OffsetDateTime, Value)>) -> io::Result<()> {
        if self.active.is_none() {
            let details = [("lost_records", json!(true))];
            let details = details.into_iter().filter(|_| self.has_lost).collect();
            self.start_stream(details)?;
            self.has_lost = false;
        }
        self.rotate()?;
        let (Some(active), Some(stream)) = (&mut self.active, self.streams.back_mut()) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let Some(segment) = stream.segments.back_mut() else {
            return Err(io::ErrorKind::NotFound.into());
        };
        if active.is_dirty {
            clean(active, segment)?;
        }
        let mut chain = active.chain.clone();
        let links: Vec<Link> = records
            .into_iter()
            .map(|(at, body)| chain.append(at, body))
            .collect();
        let bytes: Vec<u8> = links.iter().flat_map(segment::line).collect();
        active.is_dirty = true;
        let written = active
            .file
            .write_all(&bytes)
            .and_then(|()| active.file.sync_data());
        if let Err(error) = written {
            drop(clean(active, segment));
            return Err(error);
        }
        active.is_dirty = false;
        active.chain = chain;
        segment.bytes += bytes.len() as u64;
        segment.last = active.chain.head();
        let owner_of = self.owner_of;
        let added = links.iter().map(|link| pending(link, owner_of));
        stream.pending.extend(added);
        Ok(())
    }

    /// Opens this process's stream with its first record.
    fn start_stream(&mut self, details: Vec<(&str, Value)>) -> io::Result<()> {
        let last = self.streams.back();
        let ordinal = last.map_or(self.position.ordinal, |stream| stream.ordinal) + 1;
        if self.streams.is_empty() {
            self.store_position(Position {
                ordinal,
                acknowledged: 0,
            })?;
        }
        let id = Uuid::now_v7();
        let (mut segment, mut file) = Segment::create(
            &self.directory,
            &Header {
                stream: id,
                ordinal,
                before: segment::start(id),
                is_rebased: false,
            },
        )?;
        let mut chain = Chain::new(id);
        let link = chain.append(OffsetDateTime::now_utc(), self.first_record(details));
        let line = segment::line(&link);
        let written = file.write_all(&line).and_then(|()| file.sync_data());
        if let Err(error) = written {
            drop(fs_err::remove_file(&segment.path));
            return Err(error);
        }
        segment.bytes += line.len() as u64;
        segment.last = chain.head();
        self.streams.push_back(StoredStream {
            ordinal,
            id,
            is_rebased: false,
            segments: VecDeque::from([segment]),
            pending: VecDeque::from([pending(&link, self.owner_of)]),
        });
        self.active = Some(Active {
            file,
            chain,
            is_dirty: false,
        });
        Ok(())
    }

    /// The record that identifies the writer.
    fn first_record(&self, details: Vec<(&str, Value)>) -> Value {
        let mut body = AuditBody::new(AuditKind::Stream, NODE_STREAM_ACTION);
        body.subject = Some(self.writer.clone());
        body.detail
            .insert("version".to_owned(), json!(env!("CARGO_PKG_VERSION")));
        let details = details
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value));
        body.detail.extend(details);
        serde_json::to_value(body).expect("a body serializes")
    }

    /// Starts another segment once the last one is long.
    fn rotate(&mut self) -> io::Result<()> {
        let (Some(active), Some(stream)) = (&mut self.active, self.streams.back_mut()) else {
            return Ok(());
        };
        let Some(last) = stream.segments.back_mut() else {
            return Ok(());
        };
        if last.bytes < MAX_SEGMENT_BYTES {
            return Ok(());
        }
        if active.is_dirty {
            clean(active, last)?;
        }
        let header = Header {
            stream: stream.id,
            ordinal: stream.ordinal,
            before: active.chain.head(),
            is_rebased: stream.is_rebased,
        };
        let (segment, file) = Segment::create(&self.directory, &header)?;
        stream.segments.push_back(segment);
        active.file = file;
        Ok(())
    }
}

/// Cuts off what a failed write left.
fn clean(active: &mut Active, segment: &Segment) -> io::Result<()> {
    use std::io::Seek as _;
    active.file.set_len(segment.bytes)?;
    active.file.seek(io::SeekFrom::Start(segment.bytes))?;
    active.file.sync_data()?;
    active.is_dirty = false;
    Ok(())
}

/// Removes an acknowledged file. If that fails, the next start does.
fn remove(segment: &Segment) {
    if let Err(error) = fs_err::remove_file(&segment.path) {
        tracing::debug!(%error, "An acknowledged file of the audit trail was not removed.");
    }
}
