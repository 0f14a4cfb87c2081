//! Renders audit records for people: one line per call, in order, and a summary.
//!
//! Text chosen by a sandbox or a caller (arguments, paths, names) has its control characters
//! escaped: reading the audit trail must not drive a terminal, nor may a name reverse the direction
//! of a line.

mod describe;
mod text;

use std::collections::{BTreeSet, HashMap};

use cynode_api::{AuditDecision, AuditKind, AuditRecord, AuditResult};
use serde::Serialize;
use serde_json::Value;
use time::OffsetDateTime;
use uuid::Uuid;

pub(crate) use self::text::quoted;
pub use self::text::{is_hidden, shown as escape_line};
use crate::action::{TargetKind, Verb, target_kind, verb};

/// The number of names that a summary lists.
const MAX_NAMES: usize = 100;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Story {
    pub lines: Vec<StoryLine>,
    pub summary: StorySummary,
}

/// A call with its outcome, or an event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoryLine {
    pub cursor: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    pub who: String,
    pub what: String,
    pub action: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<Uuid>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decision: Option<AuditDecision>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<AuditResult>,
    /// The call has no outcome yet.
    pub open: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StorySummary {
    #[serde(with = "time::serde::rfc3339::option")]
    pub from: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub to: Option<OffsetDateTime>,
    pub actors: Vec<String>,
    pub commands: StoryCommands,
    /// Files written, moved or deleted, in the order of their first change.
    pub files: Vec<String>,
    /// The number of files left out of `files`.
    pub more_files: u64,
    pub artifacts: Vec<String>,
    pub more_artifacts: u64,
    pub denials: u64,
    /// Calls without an outcome.
    pub open: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoryCommands {
    pub count: u64,
    /// Commands that exited with another code than 0 or did not start, without those that timed
    /// out.
    pub failed: u64,
    pub timed_out: u64,
}

/// An intent, its outcome, or both.
#[derive(Clone, Copy, Debug)]
struct Call<'a> {
    intent: Option<&'a AuditRecord>,
    outcome: Option<&'a AuditRecord>,
}

impl<'a> Call<'a> {
    fn first(&self) -> &'a AuditRecord {
        self.intent
            .or(self.outcome)
            .expect("a call has an intent or an outcome")
    }

    /// A member of the outcome's detail, else of the intent's.
    fn get(&self, name: &str) -> Option<&'a Value> {
        [self.outcome, self.intent]
            .into_iter()
            .flatten()
            .find_map(|record| record.body.detail.get(name))
            .filter(|value| !value.is_null())
    }

    fn text(&self, name: &str) -> Option<&'a str> {
        self.get(name).and_then(Value::as_str)
    }

    fn is_true(&self, name: &str) -> bool {
        self.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    fn result(&self) -> Option<AuditResult> {
        [self.outcome, self.intent]
            .into_iter()
            .flatten()
            .find_map(|record| record.body.result)
    }

    fn decision(&self) -> Option<AuditDecision> {
        [self.intent, self.outcome]
            .into_iter()
            .flatten()
            .find_map(|record| record.body.decision)
    }

    fn code(&self) -> Option<&'a str> {
        [self.outcome, self.intent]
            .into_iter()
            .flatten()
            .find_map(|record| record.body.code.as_deref())
    }

    fn is_denied(&self) -> bool {
        self.decision() == Some(AuditDecision::Deny)
    }

    fn is_open(&self) -> bool {
        self.first().body.kind == AuditKind::Intent
            && self.outcome.is_none()
            && !self.is_denied()
            && self.result().is_none()
    }

    fn changes(&self) -> &'a [Value] {
        self.get("changes")
            .and_then(Value::as_array)
            .map_or(&[], Vec::as_slice)
    }
}

/// Describes one record in one line, without its time.
#[must_use]
pub fn headline(record: &AuditRecord) -> String {
    describe::headline(record)
}

/// Renders records, which must be in cursor order.
#[must_use]
pub fn story(records: &[AuditRecord]) -> Story {
    let mut calls: Vec<Call<'_>> = Vec::new();
    let mut open: HashMap<Uuid, usize> = HashMap::new();
    for record in records {
        let call_id = record.body.call_id;
        let intent_index = (record.body.kind == AuditKind::Outcome)
            .then(|| call_id.and_then(|call| open.remove(&call)))
            .flatten();
        if let Some(index) = intent_index {
            calls[index].outcome = Some(record);
            continue;
        }
        if let (AuditKind::Intent, Some(call)) = (record.body.kind, call_id) {
            open.insert(call, calls.len());
        }
        let is_outcome = record.body.kind == AuditKind::Outcome;
        calls.push(Call {
            intent: (!is_outcome).then_some(record),
            outcome: is_outcome.then_some(record),
        });
    }
    let lines = calls.iter().map(line).collect();
    Story {
        lines,
        summary: summary(records, &calls),
    }
}

fn line(call: &Call<'_>) -> StoryLine {
    let first = call.first();
    StoryLine {
        cursor: first.cursor,
        at: first.at,
        who: describe::actor(first.body.subject.as_ref()),
        what: describe::summary(call),
        action: text::shown(&first.body.action),
        call_id: first.body.call_id,
        decision: call.decision(),
        result: call.result(),
        open: call.is_open(),
    }
}

fn summary(records: &[AuditRecord], calls: &[Call<'_>]) -> StorySummary {
    let mut summary = StorySummary {
        from: records.first().map(|record| record.at),
        to: records.last().map(|record| record.at),
        ..StorySummary::default()
    };
    let (mut actors, mut files, mut artifacts) =
        (Names::default(), Names::default(), Names::default());
    for call in calls {
        let body = &call.first().body;
        if let Some(subject) = &body.subject {
            actors.add(&describe::actor(Some(subject)));
        }
        summary.open += u64::from(call.is_open());
        if call.is_denied() {
            summary.denials += 1;
            continue;
        }
        let is_done = call.result() == Some(AuditResult::Done);
        match target_kind(body) {
            TargetKind::Exec => command(call, &mut summary.commands),
            TargetKind::File if !call.changes().is_empty() => {
                call.changes()
                    .iter()
                    .filter_map(|change| change.get("path").and_then(Value::as_str))
                    .for_each(|path| files.add(&text::shown(path)));
            }
            TargetKind::File
                if is_done && !matches!(verb(&body.action), Verb::Read | Verb::Other) =>
            {
                ["path", "from", "to"]
                    .into_iter()
                    .filter_map(|name| call.text(name))
                    .for_each(|path| files.add(&text::shown(path)));
            }
            TargetKind::Artifact
                if is_done && !matches!(verb(&body.action), Verb::Read | Verb::Other) =>
            {
                let name = call.text("path").or(body.resource.as_deref()).or_else(|| {
                    call.outcome
                        .and_then(|outcome| outcome.body.resource.as_deref())
                });
                artifacts.add(&text::shown(name.unwrap_or("(unnamed)")));
            }
            _ => {}
        }
    }
    summary.actors = actors.listed;
    (summary.files, summary.more_files) = (files.listed, files.more);
    (summary.artifacts, summary.more_artifacts) = (artifacts.listed, artifacts.more);
    summary
}

fn command(call: &Call<'_>, commands: &mut StoryCommands) {
    commands.count += 1;
    let ended_well = call
        .get("exit_code")
        .is_none_or(|code| code.as_i64() == Some(0))
        && call.get("signal").is_none();
    if call.is_true("timed_out") {
        commands.timed_out += 1;
    } else if !ended_well
        || call.is_true("oom_killed")
        || matches!(
            call.result(),
            Some(AuditResult::Failed | AuditResult::NotStarted | AuditResult::Refused)
        )
    {
        commands.failed += 1;
    }
}

/// Distinct names, up to a limit.
#[derive(Debug, Default)]
struct Names {
    listed: Vec<String>,
    seen: BTreeSet<String>,
    more: u64,
}

impl Names {
    fn add(&mut self, name: &str) {
        if !self.seen.insert(name.to_owned()) {
            return;
        }
        if self.listed.len() < MAX_NAMES {
            self.listed.push(name.to_owned());
        } else {
            self.more += 1;
        }
    }
}
