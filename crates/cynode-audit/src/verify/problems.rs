//! What was found, as much of it as a person can read.

use cynode_api::{AuditProblem, MAX_AUDIT_PROBLEMS};
use uuid::Uuid;

use crate::Link;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    RecordChanged,
    RecordMissing,
    RecordInserted,
    OrderChanged,
    StreamMissing,
    CheckpointMissing,
    CheckpointChanged,
    CheckpointOverdue,
    SignatureBad,
    TailMissing,
    IntentDoubled,
    OutcomeDoubled,
    OutcomeWithoutIntent,
    ColumnChanged,
    TableChanged,
}

impl What {
    const fn code(self) -> &'static str {
        match self {
            Self::RecordChanged => "record_changed",
            Self::RecordMissing => "record_missing",
            Self::RecordInserted => "record_inserted",
            Self::OrderChanged => "order_changed",
            Self::StreamMissing => "stream_missing",
            Self::CheckpointMissing => "checkpoint_missing",
            Self::CheckpointChanged => "checkpoint_changed",
            Self::CheckpointOverdue => "checkpoint_overdue",
            Self::SignatureBad => "signature_bad",
            Self::TailMissing => "tail_missing",
            Self::IntentDoubled => "intent_doubled",
            Self::OutcomeDoubled => "outcome_doubled",
            Self::OutcomeWithoutIntent => "outcome_without_intent",
            Self::ColumnChanged => "column_changed",
            Self::TableChanged => "table_changed",
        }
    }
}

/// A problem that is listed and may still turn out to be another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listed(usize);

#[derive(Debug, Default)]
pub(super) struct Problems {
    listed: Vec<AuditProblem>,
    more: bool,
}

impl Problems {
    fn add(&mut self, problem: AuditProblem) -> Option<Listed> {
        if self.listed.len() >= MAX_AUDIT_PROBLEMS {
            self.more = true;
            return None;
        }
        self.listed.push(problem);
        Some(Listed(self.listed.len() - 1))
    }

    pub(super) fn of_checkpoint(&mut self, what: What, number: Option<u64>, detail: String) {
        self.add(AuditProblem {
            what: what.code().to_owned(),
            stream: None,
            seq: None,
            cursor: None,
            checkpoint: number,
            detail,
        });
    }

    pub(super) fn of_record(
        &mut self,
        what: What,
        cursor: i64,
        link: &Link,
        detail: String,
    ) -> Option<Listed> {
        self.at(
            what,
            link.stream,
            Some(link.seq),
            Some(cursor),
            None,
            detail,
        )
    }

    pub(super) fn at(
        &mut self,
        what: What,
        stream: Uuid,
        seq: Option<u64>,
        cursor: Option<i64>,
        checkpoint: Option<u64>,
        detail: String,
    ) -> Option<Listed> {
        self.add(AuditProblem {
            what: what.code().to_owned(),
            stream: Some(stream),
            seq,
            cursor,
            checkpoint,
            detail,
        })
    }

    /// It turned out to be something else.
    pub(super) fn amend(&mut self, listed: Option<Listed>, what: What, detail: &str) {
        if let Some(problem) = listed.and_then(|Listed(place)| self.listed.get_mut(place)) {
            what.code().clone_into(&mut problem.what);
            detail.clone_into(&mut problem.detail);
        }
    }

    /// What is about checkpoints first, then in the order of the records.
    pub(super) fn into_parts(mut self) -> (Vec<AuditProblem>, bool) {
        self.listed
            .sort_by_key(|problem| (problem.stream.is_some(), problem.cursor.unwrap_or(i64::MAX)));
        (self.listed, self.more)
    }
}
