//! Collects problems, at most `MAX_AUDIT_PROBLEMS` of them.

use cynode_api::{AuditProblem, MAX_AUDIT_PROBLEMS};
use uuid::Uuid;

use crate::Link;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProblemKind {
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

impl ProblemKind {
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

/// The index of a listed problem, which later records may reclassify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProblemId(usize);

#[derive(Debug, Default)]
pub(super) struct Problems {
    listed: Vec<AuditProblem>,
    more: bool,
}

impl Problems {
    fn add(&mut self, problem: AuditProblem) -> Option<ProblemId> {
        if self.listed.len() >= MAX_AUDIT_PROBLEMS {
            self.more = true;
            return None;
        }
        self.listed.push(problem);
        Some(ProblemId(self.listed.len() - 1))
    }

    pub(super) fn add_for_checkpoint(
        &mut self,
        kind: ProblemKind,
        number: Option<u64>,
        detail: String,
    ) {
        self.add(AuditProblem {
            what: kind.code().to_owned(),
            stream: None,
            seq: None,
            cursor: None,
            checkpoint: number,
            detail,
        });
    }

    pub(super) fn add_for_record(
        &mut self,
        kind: ProblemKind,
        cursor: i64,
        link: &Link,
        detail: String,
    ) -> Option<ProblemId> {
        self.add_at(
            kind,
            link.stream,
            Some(link.seq),
            Some(cursor),
            None,
            detail,
        )
    }

    pub(super) fn add_at(
        &mut self,
        kind: ProblemKind,
        stream: Uuid,
        seq: Option<u64>,
        cursor: Option<i64>,
        checkpoint: Option<u64>,
        detail: String,
    ) -> Option<ProblemId> {
        self.add(AuditProblem {
            what: kind.code().to_owned(),
            stream: Some(stream),
            seq,
            cursor,
            checkpoint,
            detail,
        })
    }

    /// Reclassifies a problem, if it is listed.
    pub(super) fn amend(&mut self, id: Option<ProblemId>, kind: ProblemKind, detail: &str) {
        if let Some(problem) = id.and_then(|ProblemId(index)| self.listed.get_mut(index)) {
            kind.code().clone_into(&mut problem.what);
            detail.clone_into(&mut problem.detail);
        }
    }

    /// The problems, those of checkpoints first, then those of records in cursor order, and whether
    /// there were more.
    pub(super) fn into_sorted(mut self) -> (Vec<AuditProblem>, bool) {
        self.listed
            .sort_by_key(|problem| (problem.stream.is_some(), problem.cursor.unwrap_or(i64::MAX)));
        (self.listed, self.more)
    }
}
