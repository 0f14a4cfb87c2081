//! Chains the backlog anew when the orchestrator can't take it as it is: because the orchestrator
//! has lost what it acknowledged, or refuses a record.
//!
//! Invariant: no record is dropped. A refused record stays as a record of the writer, with the
//! original in its detail, so that it is attributed to no session or job. Until `position.json`
//! names the new stream, the old files count.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Write as _},
};

use cynode_api::{AuditBody, AuditKind, NODE_REFUSED_ACTION, NODE_STREAM_ACTION, NodeAuditRecord};
use cynode_audit::Chain;
use serde_json::{Value, json};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    Active, MAX_SEGMENT_BYTES, Pending, Position, Store, StoredStream, pending, remove,
    segment::{self, Header, Segment},
};

/// The new stream while it is written.
struct Draft<O> {
    ordinal: u64,
    chain: Chain,
    file: fs_err::File,
    segments: VecDeque<Segment>,
    pending: VecDeque<Pending<O>>,
    buffer: Vec<u8>,
}

impl<O: Copy> Store<O> {
    /// Moves all unacknowledged records into a new stream. `refused` are records of the first
    /// stream, with the reasons.
    pub(crate) fn rebase(
        &mut self,
        reason: &str,
        refused: &BTreeMap<u64, String>,
    ) -> io::Result<()> {
        let Some(first) = self.streams.front() else {
            return Ok(());
        };
        let continues = json!({"stream": first.id, "acknowledged": self.position.acknowledged});
        let details = vec![("continues", continues), ("reason", json!(reason))];
        let mut draft = self.draft()?;
        let copied = self.copy(&mut draft, details, refused);
        let stored = copied.and_then(|()| {
            self.store_position(Position {
                ordinal: draft.ordinal,
                acknowledged: 0,
            })
        });
        if let Err(error) = stored {
            draft.segments.iter().for_each(remove);
            return Err(error);
        }
        let stream = StoredStream {
            ordinal: draft.ordinal,
            id: draft.chain.stream(),
            is_rebased: true,
            segments: draft.segments,
            pending: draft.pending,
        };
        let old = std::mem::replace(&mut self.streams, VecDeque::from([stream]));
        self.active = Some(Active {
            file: draft.file,
            chain: draft.chain,
            is_dirty: false,
        });
        self.resend_from = None;
        old.iter()
            .flat_map(|stream| &stream.segments)
            .for_each(remove);
        Ok(())
    }

    fn draft(&self) -> io::Result<Draft<O>> {
        let ordinal = self.streams.back().map_or(0, |stream| stream.ordinal) + 1;
        let id = Uuid::now_v7();
        let header = Header {
            stream: id,
            ordinal,
            before: segment::start(id),
            is_rebased: true,
        };
        let (segment, file) = Segment::create(&self.directory, &header)?;
        Ok(Draft {
            ordinal,
            chain: Chain::new(id),
            file,
            segments: VecDeque::from([segment]),
            pending: VecDeque::new(),
            buffer: Vec::new(),
        })
    }

    fn copy(
        &self,
        draft: &mut Draft<O>,
        details: Vec<(&str, Value)>,
        refused: &BTreeMap<u64, String>,
    ) -> io::Result<()> {
        let writer = serde_json::to_value(&self.writer)?;
        draft.add(self, OffsetDateTime::now_utc(), self.first_record(details))?;
        for (index, stream) in self.streams.iter().enumerate() {
            let acknowledged = if index == 0 {
                self.position.acknowledged
            } else {
                0
            };
            for segment in &stream.segments {
                let from = segment.before.seq.max(acknowledged) + 1;
                if from > segment.last.seq {
                    continue;
                }
                for record in segment.read(from, usize::MAX, usize::MAX)? {
                    let reason = refused.get(&record.seq).filter(|_| index == 0);
                    let action = record.body.get("action").and_then(Value::as_str);
                    match (reason, action) {
                        // Refused again and again, these would fill the trail.
                        (Some(reason), Some(NODE_REFUSED_ACTION | NODE_STREAM_ACTION))
                            if record.body.get("subject") == Some(&writer) =>
                        {
                            return Err(io::Error::other(format!(
                                "the orchestrator refuses the writer's own records: {reason}"
                            )));
                        }
                        // The new stream has its own first record.
                        (None, Some(NODE_STREAM_ACTION)) => {}
                        (Some(reason), _) => {
                            let body = self.refused_record(stream.id, record, reason);
                            draft.add(self, OffsetDateTime::now_utc(), body)?;
                        }
                        (None, _) => draft.add(self, record.at, record.body)?,
                    }
                }
            }
        }
        draft.flush()
    }

    /// A refused record, attributed to the writer alone.
    fn refused_record(&self, stream: Uuid, record: NodeAuditRecord, reason: &str) -> Value {
        let mut body = AuditBody::new(AuditKind::Event, NODE_REFUSED_ACTION);
        body.subject = Some(self.writer.clone());
        body.detail = [
            ("reason".to_owned(), json!(reason)),
            ("stream".to_owned(), json!(stream)),
            ("record".to_owned(), json!(record)),
        ]
        .into_iter()
        .collect();
        serde_json::to_value(body).expect("a body serializes")
    }
}

impl<O: Copy> Draft<O> {
    fn add(&mut self, store: &Store<O>, at: OffsetDateTime, body: Value) -> io::Result<()> {
        let is_full = self
            .segments
            .back()
            .is_none_or(|last| last.bytes + self.buffer.len() as u64 >= MAX_SEGMENT_BYTES);
        if is_full {
            self.flush()?;
            let header = Header {
                stream: self.chain.stream(),
                ordinal: self.ordinal,
                before: self.chain.head(),
                is_rebased: true,
            };
            let (segment, file) = Segment::create(&store.directory, &header)?;
            self.file = file;
            self.segments.push_back(segment);
        }
        let link = self.chain.append(at, body);
        self.buffer.extend(segment::line(&link));
        self.pending.push_back(pending(&link, store.owner_of));
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all(&self.buffer)?;
        self.file.sync_data()?;
        if let Some(last) = self.segments.back_mut() {
            last.bytes += self.buffer.len() as u64;
            last.last = self.chain.head();
        }
        self.buffer.clear();
        Ok(())
    }
}
