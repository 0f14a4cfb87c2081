//! Finds what was changed, removed, added or moved in a trail, and names it.
//!
//! What must stay true: a trail that nobody touched is intact; verification goes on after a broken record, standing on the
//! hash that is stored there, so that one changed row is one problem and not a thousand; and memory grows with
//! streams, signed heads and open calls, not with records.

mod calls;
mod checkpoints;
mod problems;
mod stream;

use std::collections::HashMap;

use cynode_api::AuditVerdict;
use uuid::Uuid;

use self::{
    calls::Calls,
    checkpoints::{Checkpoints, Newest},
    problems::{Problems, What},
    stream::{Stream, Taken},
};
use crate::{Link, PublicKey, Signed};

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
        }
    }

    /// The newest cursor that was given out: a record beyond it was put there by somebody else.
    pub const fn ends_at(&mut self, cursor: i64) {
        self.end = Some(cursor);
    }

    /// The next checkpoint of the table.
    pub fn checkpoint(&mut self, signed: &Signed) {
        debug_assert!(self.newest.is_none(), "checkpoints come before records");
        self.checkpoints.of_table(signed.checkpoint.number, signed, &self.key, &mut self.problems);
    }

    /// The next checkpoint of the table as its line, and the number under which it is kept.
    pub fn checkpoint_line(&mut self, number: u64, line: &str) {
        debug_assert!(self.newest.is_none(), "checkpoints come before records");
        match Signed::parse(line) {
            Ok(signed) => self.checkpoints.of_table(number, &signed, &self.key, &mut self.problems),
            Err(error) => self.checkpoints.unreadable(number, &error, &mut self.problems),
        }
    }

    /// The next line of the file outside the database. What is there must be in the table too, and equal; the file may lack
    /// checkpoints, may be older than a table that begins with a full one, and its last line may be torn.
    pub fn witness(&mut self, line: &str) {
        debug_assert!(self.newest.is_none(), "checkpoints come before records");
        self.checkpoints.of_file(line, &self.key, &mut self.problems);
    }

    /// The next record.
    pub fn record(&mut self, cursor: i64, link: &Link) {
        let newest = self.settle();
        self.records += 1;
        let stream = self.streams.entry(link.stream).or_insert_with(|| Stream::unsigned(link.stream));
        let taken = stream.take(cursor, link, newest.cursor, &mut self.problems);
        if taken == Taken::InOrder && self.last_cursor.is_some_and(|last| last >= cursor) {
            self.problems.of_record(What::OrderChanged, cursor, link, "its cursor does not follow the one before it".to_owned());
        }
        if taken != Taken::Refused && self.end.is_some_and(|end| end < cursor) {
            self.problems.of_record(What::RecordInserted, cursor, link, "its cursor was never given out".to_owned());
        }
        self.last_cursor = self.last_cursor.max(Some(cursor));
        if taken != Taken::Refused {
            self.calls.take(cursor, link, newest.truncated > 0, &mut self.problems);
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
