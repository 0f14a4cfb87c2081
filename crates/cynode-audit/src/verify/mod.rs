//! Finds what was changed, removed, added or moved in a trail, and names it.
//!
//! What must stay true: a trail that nobody touched is intact; verification goes on after a broken record, standing on the
//! hash that is stored there, so that one changed row is one problem and not a thousand; and memory grows with
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
    problems::{Problems, What},
    stream::{Stream, Taken, Witness},
};
use crate::{Head, Link, PublicKey, Signed};

/// Columns that a database derives from a record's body, to find records by, and where in the body each comes from.
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

/// Records that come after the last checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsigned {
    pub records: u64,
    /// The oldest time among them.
    pub since: OffsetDateTime,
    /// The newest cursor among them.
    pub last_cursor: i64,
}

/// Fed with all checkpoints by number and the lines of the file outside the database, in either order, then with all
/// records in the order of their cursors.
#[derive(Debug)]
pub struct Verifier {
    key: PublicKey,
    checkpoints: Checkpoints,
    /// Known once the first record comes.
    newest: Option<Newest>,
    streams: HashMap<Uuid, Stream>,
    calls: Calls,
    problems: Problems,
    records: u64,
    last_cursor: Option<i64>,
    /// The newest cursor that was ever given out.
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

    /// The newest cursor that was given out: a record beyond it was put there by somebody else.
    pub const fn ends_at(&mut self, cursor: i64) {
        self.end = Some(cursor);
    }

    /// The next checkpoint of the table.
    pub fn checkpoint(&mut self, signed: &Signed) {
        debug_assert!(self.newest.is_none(), "checkpoints come before records");
        self.checkpoints.of_table(
            signed.checkpoint.number,
            signed,
            &self.key,
            &mut self.problems,
        );
    }

    /// The next checkpoint of the table as its line, and the number under which it is kept.
    pub fn checkpoint_line(&mut self, number: u64, line: &str) {
        debug_assert!(self.newest.is_none(), "checkpoints come before records");
        match Signed::parse(line) {
            Ok(signed) => self
                .checkpoints
                .of_table(number, &signed, &self.key, &mut self.problems),
            Err(error) => self
                .checkpoints
                .unreadable(number, &error, &mut self.problems),
        }
    }

    /// The next line of the file outside the database. What is there must be in the table too, and equal; the file may lack
    /// checkpoints, may be older than a table that begins with a full one, and its last line may be torn.
    pub fn witness(&mut self, line: &str) {
        debug_assert!(self.newest.is_none(), "checkpoints come before records");
        self.checkpoints
            .of_file(line, &self.key, &mut self.problems);
    }

    /// Where living writers know that their streams stand, whatever the database says. Only what was committed before the records
    /// are read.
    pub fn writers(&mut self, heads: &BTreeMap<Uuid, Head>) {
        debug_assert!(
            self.newest.is_none(),
            "what writers know comes before records"
        );
        self.checkpoints.hear(heads, Witness::Writer);
    }

    /// A line that was signed beside the database while that took no checkpoint. It has no place among the checkpoints, and
    /// says where streams stood all the same.
    pub fn interim(&mut self, line: &str) {
        debug_assert!(
            self.newest.is_none(),
            "what was signed comes before records"
        );
        match Signed::parse(line) {
            Ok(signed) if signed.verify(&self.key) => {
                self.checkpoints.hear(
                    &signed.checkpoint.heads,
                    Witness::Interim {
                        truncated: signed.checkpoint.truncated_records,
                    },
                );
            }
            Ok(_) => self.problems.of_checkpoint(
                What::SignatureBad,
                None,
                "the signature in the file of heads does not fit what it says".to_owned(),
            ),
            Err(error) => self.problems.of_checkpoint(
                What::CheckpointChanged,
                None,
                format!("the file of heads can't be read: {error}"),
            ),
        }
    }

    /// The columns of the record that came last, as they are stored, in the order of [`DERIVED_COLUMNS`].
    pub fn columns(&mut self, cursor: i64, link: &Link, stored: &[Option<String>]) {
        let differ: Vec<&str> = DERIVED_COLUMNS
            .iter()
            .zip(stored)
            .filter(|((_, path), stored)| !is_derived(&link.body, path, stored.as_deref()))
            .map(|((name, _), _)| *name)
            .collect();
        if !differ.is_empty() {
            let detail = format!(
                "its {} not what its body says, so a search by it misses the record",
                match differ.as_slice() {
                    [one] => format!("column {one} is"),
                    all => format!("columns {} are", all.join(", ")),
                }
            );
            self.problems
                .of_record(What::ColumnChanged, cursor, link, detail);
        }
    }

    /// A table of the trail that is not as it was made.
    pub fn table(&mut self, detail: String) {
        self.problems
            .of_checkpoint(What::TableChanged, None, detail);
    }

    /// What comes after the last checkpoint, as far as records have come.
    #[must_use]
    pub const fn unsigned(&self) -> Option<Unsigned> {
        self.unsigned
    }

    /// Records wait for a checkpoint for longer than they may.
    pub fn overdue(&mut self, seconds: i64) {
        let records = self.unsigned.map_or(0, |unsigned| unsigned.records);
        let detail = format!(
            "{records} {} after the last checkpoint, which is overdue: nothing was signed for {seconds} s. What is not signed can be removed unnoticed. Look in the orchestrator's log for why, and whether somebody holds a lock on the tables of the audit trail",
            if records == 1 {
                "record comes"
            } else {
                "records come"
            }
        );
        self.problems
            .of_checkpoint(What::CheckpointOverdue, None, detail);
    }

    /// The next record.
    pub fn record(&mut self, cursor: i64, link: &Link) {
        let newest = self.settle();
        self.records += 1;
        let stream = self
            .streams
            .entry(link.stream)
            .or_insert_with(|| Stream::unsigned(link.stream));
        let taken = stream.take(cursor, link, newest.cursor, &mut self.problems);
        if taken != Taken::Refused && link.seq > stream.last_signed() {
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
        if taken == Taken::InOrder && self.last_cursor.is_some_and(|last| last >= cursor) {
            self.problems.of_record(
                What::OrderChanged,
                cursor,
                link,
                "its cursor does not follow the one before it".to_owned(),
            );
        }
        if taken != Taken::Refused && self.end.is_some_and(|end| end < cursor) {
            self.problems.of_record(
                What::RecordInserted,
                cursor,
                link,
                "its cursor was never given out".to_owned(),
            );
        }
        self.last_cursor = self.last_cursor.max(Some(cursor));
        if taken != Taken::Refused {
            self.calls
                .take(cursor, link, newest.truncated > 0, &mut self.problems);
        }
    }

    #[must_use]
    pub fn finish(mut self) -> AuditVerdict {
        let newest = self.settle();
        let mut streams: Vec<Stream> = self.streams.into_values().collect();
        streams.sort_unstable_by_key(Stream::id);
        let seen = streams.iter().filter(|stream| stream.is_seen()).count();
        for stream in streams {
            stream.finish(&mut self.problems);
        }
        let (problems, more_problems) = self.problems.into_parts();
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

    /// All checkpoints are there: says what is missing among them and what they say of the streams.
    fn settle(&mut self) -> Newest {
        if let Some(newest) = self.newest {
            return newest;
        }
        let (newest, streams) = self.checkpoints.settle(&mut self.problems);
        self.streams = streams;
        *self.newest.insert(newest)
    }
}

/// Whether a column holds what the body has at that place.
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
