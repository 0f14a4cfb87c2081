//! Detects and reports records that were changed, removed, added or reordered.
//!
//! Invariants: an untouched trail is intact; verification continues after a broken record from the
//! stored hash, so that one changed row is one problem and not a thousand; memory grows with
//! streams, signed heads and open calls, not with records.

mod calls;
mod checkpoints;
mod problems;
mod stream;

use std::collections::{BTreeMap, HashMap};

use cynode_api::AuditVerdict;
use serde_json::Value;
use time::OffsetDateTime;
use uuid::Uuid;

use self::{
    calls::Calls,
    checkpoints::{Checkpoints, Newest},
    problems::{ProblemKind, Problems},
    stream::{Placement, Stream, Witness},
};
use crate::{Head, Link, PublicKey, SignedCheckpoint};

/// Search columns that a database derives from a record's body, with their paths in the body.
pub const DERIVED_COLUMNS: &[(&str, &[&str])] = &[
    ("kind", &["kind"]),
    ("action", &["action"]),
    ("call_id", &["call_id"]),
    ("subject", &["subject", "name"]),
    ("project_id", &["project_id"]),
    ("task_id", &["task_id"]),
    ("session_id", &["session_id"]),
    ("job_id", &["job_id"]),
    ("decision", &["decision"]),
];

/// Records after the last checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsigned {
    pub records: u64,
    /// The oldest time among them.
    pub since: OffsetDateTime,
    /// The newest cursor among them.
    pub last_cursor: i64,
}

/// Verifies a trail. Takes all checkpoints by number and all lines of the file outside the
/// database, in either order, then all records in cursor order.
#[derive(Debug)]
pub struct Verifier {
    key: PublicKey,
    checkpoints: Checkpoints,
    /// Set when the first record arrives.
    newest: Option<Newest>,
    streams: HashMap<Uuid, Stream>,
    calls: Calls,
    problems: Problems,
    records: u64,
    last_cursor: Option<i64>,
    /// The newest cursor that was ever assigned.
    end: Option<i64>,
    unsigned: Option<Unsigned>,
}

impl Verifier {
    #[must_use]
    pub fn new(key: PublicKey) -> Self {
        Self {
            key,
            checkpoints: Checkpoints::default(),
            newest: None,
            streams: HashMap::new(),
            calls: Calls::default(),
            problems: Problems::default(),
            records: 0,
            last_cursor: None,
            end: None,
            unsigned: None,
        }
    }

    /// Sets the newest cursor that was ever assigned: records beyond it were inserted.
    pub const fn ends_at(&mut self, cursor: i64) {
        self.end = Some(cursor);
    }

    /// Adds the next checkpoint of the table.
    pub fn checkpoint(&mut self, signed: &SignedCheckpoint) {
        debug_assert!(
            self.newest.is_none(),
            "a checkpoint was added after records"
        );
        self.checkpoints.add_from_table(
            signed.checkpoint.number,
            signed,
            &self.key,
            &mut self.problems,
        );
    }

    /// Adds the next checkpoint of the table as its line, with the number of its row.
    pub fn checkpoint_line(&mut self, number: u64, line: &str) {
        debug_assert!(
            self.newest.is_none(),
            "a checkpoint was added after records"
        );
        match SignedCheckpoint::parse(line) {
            Ok(signed) => {
                self.checkpoints
                    .add_from_table(number, &signed, &self.key, &mut self.problems);
            }
            Err(error) => self
                .checkpoints
                .add_malformed(number, &error, &mut self.problems),
        }
    }

    /// Adds the next line of the file outside the database. Its checkpoints must be in the table
    /// too, and equal. The file may lack checkpoints, may be older than a table that begins with a
    /// full one, and its last line may be incomplete.
    pub fn witness(&mut self, line: &str) {
        debug_assert!(
            self.newest.is_none(),
            "a checkpoint was added after records"
        );
        self.checkpoints
            .add_from_file(line, &self.key, &mut self.problems);
    }

    /// Adds the heads that running writers have committed, independent of the database. Pass only
    /// heads committed before the records are read.
    pub fn writers(&mut self, heads: &BTreeMap<Uuid, Head>) {
        debug_assert!(
            self.newest.is_none(),
            "heads of writers were added after records"
        );
        self.checkpoints.add_heads(heads, Witness::Writer);
    }

    /// Adds a line that was signed to a separate file while the database accepted no checkpoint. It
    /// is not part of the checkpoint chain, but its heads count.
    pub fn interim(&mut self, line: &str) {
        debug_assert!(
            self.newest.is_none(),
            "interim heads were added after records"
        );
        match SignedCheckpoint::parse(line) {
            Ok(signed) if signed.verify(&self.key) => {
                self.checkpoints.add_heads(
                    &signed.checkpoint.heads,
                    Witness::Interim {
                        truncated: signed.checkpoint.truncated_records,
                    },
                );
            }
            Ok(_) => self.problems.add_for_checkpoint(
                ProblemKind::SignatureBad,
                None,
                "the file of interim heads has an invalid signature".to_owned(),
            ),
            Err(error) => self.problems.add_for_checkpoint(
                ProblemKind::CheckpointChanged,
                None,
                format!("the file of interim heads is malformed: {error}"),
            ),
        }
    }

    /// Compares the stored search columns of the last record with its body, in the order of
    /// [`DERIVED_COLUMNS`].
    pub fn columns(&mut self, cursor: i64, link: &Link, stored: &[Option<String>]) {
        let differ: Vec<&str> = DERIVED_COLUMNS
            .iter()
            .zip(stored)
            .filter(|((_, path), stored)| !is_derived(&link.body, path, stored.as_deref()))
            .map(|((name, _), _)| *name)
            .collect();
        if !differ.is_empty() {
            let detail = format!(
                "its {} not what its body says, so searches miss the record",
                match differ.as_slice() {
                    [one] => format!("column {one} is"),
                    all => format!("columns {} are", all.join(", ")),
                }
            );
            self.problems
                .add_for_record(ProblemKind::ColumnChanged, cursor, link, detail);
        }
    }

    /// Reports a table of the trail whose definition was changed.
    pub fn table(&mut self, detail: String) {
        self.problems
            .add_for_checkpoint(ProblemKind::TableChanged, None, detail);
    }

    /// The records after the last checkpoint, so far.
    #[must_use]
    pub const fn unsigned(&self) -> Option<Unsigned> {
        self.unsigned
    }

    /// Reports that records have been waiting too long for a checkpoint.
    pub fn overdue(&mut self, seconds: i64) {
        let records = self.unsigned.map_or(0, |unsigned| unsigned.records);
        let detail = format!(
            "{records} {} after the last checkpoint, which is overdue: nothing was signed for \
             {seconds} s. Unsigned records can be removed undetected. See the orchestrator's log \
             for the cause, and check for locks on the audit tables",
            if records == 1 {
                "record comes"
            } else {
                "records come"
            }
        );
        self.problems
            .add_for_checkpoint(ProblemKind::CheckpointOverdue, None, detail);
    }

    /// Adds the next record.
    pub fn record(&mut self, cursor: i64, link: &Link) {
        let newest = self.evaluate();
        self.records += 1;
        let stream = self
            .streams
            .entry(link.stream)
            .or_insert_with(|| Stream::unsigned(link.stream));
        let placement = stream.take(cursor, link, newest.cursor, &mut self.problems);
        if placement != Placement::Refused && link.seq > stream.last_signed() {
            let before = self.unsigned.unwrap_or(Unsigned {
                records: 0,
                since: link.at,
                last_cursor: cursor,
            });
            self.unsigned = Some(Unsigned {
                records: before.records + 1,
                since: before.since.min(link.at),
                last_cursor: before.last_cursor.max(cursor),
            });
        }
        if placement == Placement::InOrder && self.last_cursor.is_some_and(|last| last >= cursor) {
            self.problems.add_for_record(
                ProblemKind::OrderChanged,
                cursor,
                link,
                "its cursor is not higher than the previous one".to_owned(),
            );
        }
        if placement != Placement::Refused && self.end.is_some_and(|end| end < cursor) {
            self.problems.add_for_record(
                ProblemKind::RecordInserted,
                cursor,
                link,
                "its cursor was never assigned".to_owned(),
            );
        }
        self.last_cursor = self.last_cursor.max(Some(cursor));
        if placement != Placement::Refused {
            self.calls
                .take(cursor, link, newest.truncated > 0, &mut self.problems);
        }
    }

    #[must_use]
    pub fn finish(mut self) -> AuditVerdict {
        let newest = self.evaluate();
        let mut streams: Vec<Stream> = self.streams.into_values().collect();
        streams.sort_unstable_by_key(Stream::id);
        let seen = streams.iter().filter(|stream| stream.is_seen()).count();
        for stream in streams {
            stream.finish(&mut self.problems);
        }
        let (problems, more_problems) = self.problems.into_sorted();
        AuditVerdict {
            intact: problems.is_empty(),
            records: self.records,
            streams: seen as u64,
            checkpoints: self.checkpoints.count(),
            truncated: newest.truncated,
            open: self.calls.open(),
            unsigned: self.unsigned.map_or(0, |unsigned| unsigned.records),
            unsigned_since: self.unsigned.map(|unsigned| unsigned.since),
            last_signed_at: newest.at,
            key: self.key.to_text(),
            problems,
            more_problems,
        }
    }

    /// Evaluates the checkpoints, once all have been added.
    fn evaluate(&mut self) -> Newest {
        if let Some(newest) = self.newest {
            return newest;
        }
        let (newest, streams) = self.checkpoints.evaluate(&mut self.problems);
        self.streams = streams;
        *self.newest.insert(newest)
    }
}

/// Whether a column holds the value at `path` in the body.
fn is_derived(body: &Value, path: &[&str], stored: Option<&str>) -> bool {
    let value = path
        .iter()
        .try_fold(body, |value, name| value.get(name))
        .filter(|value| !value.is_null());
    match (value, stored) {
        (None, None) => true,
        (Some(Value::String(text)), Some(stored)) => text == stored || is_same_id(text, stored),
        (Some(other), Some(stored)) => {
            serde_json::to_string(other).is_ok_and(|text| text == stored)
        }
        (None, Some(_)) | (Some(_), None) => false,
    }
}

fn is_same_id(one: &str, other: &str) -> bool {
    Uuid::parse_str(one)
        .ok()
        .zip(Uuid::parse_str(other).ok())
        .is_some_and(|(one, other)| one == other)
}
