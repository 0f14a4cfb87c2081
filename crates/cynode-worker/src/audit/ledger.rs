//! Who takes how much of the backlog, and which decisions are repeats.
//!
//! Invariants: a sandbox takes at most its share of the backlog, so that it can refuse nobody but
//! itself. Beyond the share, a number of distinct denials and a rate of them, what it tried is
//! counted without names. Effects are never merely counted: without a record they are refused.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use cynode_api::{AuditBody, AuditDecision, NodeId};
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    RecordError,
    decision::{AuditedSandbox, DecisionOutcome, NodeDecision, RepeatKey, SandboxOwner},
    store::{Released, cost},
};

/// Unshipped records of one sandbox, in bytes.
const MAX_SHARE_BYTES: u64 = 1024 * 1024;
/// Unshipped records of the node, in bytes.
pub(super) const MAX_BACKLOG_BYTES: u64 = 256 * 1024 * 1024;
/// Distinct denials of one sandbox within an interval. The others are counted together.
const MAX_DISTINCT_DENIALS: usize = 64;
/// Records with names of denials of one sandbox, and of their repeats: a burst, then one after each
/// interval, however fast they are shipped.
const NAMES_BURST: u32 = 1_000;
const NAMES_INTERVAL: Duration = Duration::from_secs(2);
/// How long repeats of a denial are counted before the count is recorded.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);
/// The first interval after which the count without names is recorded, and the longest.
const FIRST_FOLD: Duration = Duration::from_secs(1);
const MAX_FOLD: Duration = Duration::from_secs(3_600);

/// Repeats since the last record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Count {
    count: u64,
    first_at: OffsetDateTime,
    last_at: OffsetDateTime,
}

impl Count {
    fn add(count: &mut Option<Self>, at: OffsetDateTime, number: u64) {
        let counted = count.get_or_insert(Self {
            count: 0,
            first_at: at,
            last_at: at,
        });
        counted.count = counted.count.saturating_add(number);
        counted.last_at = counted.last_at.max(at);
    }

    fn describe(self, body: &mut AuditBody) {
        let text = |at: OffsetDateTime| json!(at.format(&Rfc3339).unwrap_or_default());
        body.detail.extend([
            ("count".to_owned(), json!(self.count)),
            ("first_at".to_owned(), text(self.first_at)),
            ("last_at".to_owned(), text(self.last_at)),
        ]);
    }
}

#[derive(Debug)]
struct Repeats {
    body: AuditBody,
    count: Option<Count>,
    due: Instant,
}

/// What is counted without names.
#[derive(Debug)]
struct Folded {
    count: Option<Count>,
    actions: BTreeMap<String, u64>,
    due: Instant,
    interval: Duration,
}

#[derive(Debug, Default)]
struct Account {
    sandbox: Option<AuditedSandbox>,
    bytes: u64,
    names: NamesRate,
    repeats: HashMap<RepeatKey, Repeats>,
    folded: Option<Folded>,
}

/// When the records with names so far would have come at the steady rate.
#[derive(Clone, Copy, Debug, Default)]
struct NamesRate(Option<Instant>);

impl NamesRate {
    /// Returns whether there may be another record now, and counts it.
    fn take(&mut self, now: Instant) -> bool {
        let next = self.0.map_or(now, |at| at.max(now)) + NAMES_INTERVAL;
        let is_early = next > now + NAMES_INTERVAL * NAMES_BURST;
        if !is_early {
            self.0 = Some(next);
        }
        !is_early
    }

    fn is_whole(self, now: Instant) -> bool {
        self.0.is_none_or(|at| at <= now)
    }
}

/// A record that waits to be written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NewRecord {
    pub(super) body: Value,
    pub(super) owner: SandboxOwner,
    pub(super) cost: u64,
    /// The number of decisions that it stands for.
    pub(super) counts: u64,
    pub(super) key: Option<RepeatKey>,
}

/// What happens to a decision.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "most decisions need a record")]
pub(super) enum Admission {
    /// It needs a record.
    Record(NewRecord),
    /// It is counted.
    Counted,
    Refused(RecordError),
}

#[derive(Debug)]
pub(super) struct Ledger {
    node_id: NodeId,
    accounts: HashMap<SandboxOwner, Account>,
    total: u64,
    /// Shares don't count in a trail that drops its oldest records.
    has_shares: bool,
}

impl Ledger {
    pub(super) fn new(
        node_id: NodeId,
        has_shares: bool,
        pending: impl Iterator<Item = Released>,
    ) -> Self {
        let mut ledger = Self {
            node_id,
            accounts: HashMap::new(),
            total: 0,
            has_shares,
        };
        ledger.charge(pending);
        ledger
    }

    fn charge(&mut self, pending: impl Iterator<Item = Released>) {
        for (owner, cost) in pending {
            self.total += cost;
            if let Some(owner) = owner {
                self.accounts.entry(owner).or_default().bytes += cost;
            }
        }
    }

    /// Admits a decision, and charges its record to its sandbox.
    pub(super) fn admit(
        &mut self,
        decision: &NodeDecision,
        at: OffsetDateTime,
        now: Instant,
    ) -> Admission {
        let body = decision.body(self.node_id);
        let key = decision.repeat_key(&body);
        let value = serde_json::to_value(&body).expect("a body serializes");
        let cost = cost(&value);
        let owner = decision.sandbox.owner;
        let is_full = self.has_shares && self.total + cost > MAX_BACKLOG_BYTES;
        let account = self.accounts.entry(owner).or_default();
        account.sandbox = Some(decision.sandbox);
        if let Some(repeats) = key.as_ref().and_then(|key| account.repeats.get_mut(key)) {
            Count::add(&mut repeats.count, at, 1);
            return Admission::Counted;
        }
        let exceeds_share = self.has_shares && account.bytes + cost > MAX_SHARE_BYTES;
        let is_crowded = key.is_some()
            && (account.repeats.len() >= MAX_DISTINCT_DENIALS || !account.names.take(now));
        // An outcome belongs to an effect that was admitted, which bounds their number.
        let is_outcome = matches!(
            decision.outcome,
            DecisionOutcome::Done | DecisionOutcome::Failed { .. }
        );
        if !is_outcome && (is_full || exceeds_share || is_crowded) {
            account.fold(decision.action.name(), at, now, 1);
            return if !decision.permits_effect() {
                Admission::Counted
            } else if exceeds_share {
                Admission::Refused(RecordError::ShareUsed)
            } else {
                Admission::Refused(RecordError::Unavailable)
            };
        }
        if let Some(key) = &key {
            let repeats = Repeats {
                body,
                count: None,
                due: now + REPEAT_INTERVAL,
            };
            account.repeats.insert(key.clone(), repeats);
        }
        account.bytes += cost;
        self.total += cost;
        Admission::Record(NewRecord {
            body: value,
            owner,
            cost,
            counts: 1,
            key,
        })
    }

    /// Records left the backlog.
    pub(super) fn release(&mut self, released: impl IntoIterator<Item = Released>) {
        for (owner, cost) in released {
            self.total = self.total.saturating_sub(cost);
            if let Some(account) = owner.and_then(|owner| self.accounts.get_mut(&owner)) {
                account.bytes = account.bytes.saturating_sub(cost);
            }
        }
    }

    /// The backlog was chained anew.
    pub(super) fn replace(
        &mut self,
        before: impl IntoIterator<Item = Released>,
        after: impl Iterator<Item = Released>,
    ) {
        self.release(before);
        self.charge(after);
    }

    /// A record was not written. Its decisions are counted without names.
    pub(super) fn not_written(&mut self, record: &NewRecord, at: OffsetDateTime, now: Instant) {
        self.release([(Some(record.owner), record.cost)]);
        let Some(account) = self.accounts.get_mut(&record.owner) else {
            return;
        };
        let repeats = record
            .key
            .as_ref()
            .and_then(|key| account.repeats.remove(key));
        let counted = repeats.and_then(|repeats| repeats.count);
        let number = record.counts + counted.map_or(0, |count| count.count);
        let action = record.body.get("action").and_then(Value::as_str);
        account.fold(action.unwrap_or_default(), at, now, number);
    }

    /// The counts whose interval is over; all of them if `all`.
    pub(super) fn due(&mut self, now: Instant, all: bool) -> Vec<NewRecord> {
        let (node_id, has_shares) = (self.node_id, self.has_shares);
        let mut records = Vec::new();
        for (owner, account) in &mut self.accounts {
            let mut room = if has_shares {
                MAX_SHARE_BYTES.saturating_sub(account.bytes)
            } else {
                u64::MAX
            };
            let (mut folds, mut names) = (Vec::new(), account.names);
            account.repeats.retain(|_, repeats| {
                if now < repeats.due && !all {
                    return true;
                }
                let Some(count) = repeats.count.take() else {
                    return false;
                };
                repeats.due = now + REPEAT_INTERVAL;
                let mut body = repeats.body.clone();
                count.describe(&mut body);
                let record = NewRecord::new(&body, *owner, count.count);
                if record.cost > room || !names.take(now) {
                    folds.push((body.action, count));
                    return false;
                }
                room -= record.cost;
                records.push(record);
                true
            });
            account.names = names;
            for (action, count) in folds {
                account.fold(&action, count.first_at, now, count.count);
            }
            records.extend(account.folded_record(node_id, *owner, now, all));
        }
        self.accounts.retain(|_, account| !account.is_idle(now));
        for record in &records {
            self.charge([(Some(record.owner), record.cost)].into_iter());
        }
        records
    }

    pub(super) const fn total(&self) -> u64 {
        self.total
    }
}

impl NewRecord {
    fn new(body: &AuditBody, owner: SandboxOwner, counts: u64) -> Self {
        let body = serde_json::to_value(body).expect("a body serializes");
        Self {
            cost: cost(&body),
            body,
            owner,
            counts,
            key: None,
        }
    }
}

impl Account {
    fn is_idle(&self, now: Instant) -> bool {
        let has_records = self.bytes > 0 || !self.repeats.is_empty() || self.folded.is_some();
        !has_records && self.names.is_whole(now)
    }

    fn fold(&mut self, action: &str, at: OffsetDateTime, now: Instant, number: u64) {
        let folded = self.folded.get_or_insert_with(|| Folded {
            count: None,
            actions: BTreeMap::new(),
            due: now + FIRST_FOLD,
            interval: FIRST_FOLD,
        });
        Count::add(&mut folded.count, at, number);
        let counted = folded.actions.entry(action.to_owned()).or_default();
        *counted = counted.saturating_add(number);
    }

    /// The count without names, if it is due. The interval grows while there is something to count,
    /// so that these records, which the share does not bound, stay few.
    fn folded_record(
        &mut self,
        node_id: NodeId,
        owner: SandboxOwner,
        now: Instant,
        all: bool,
    ) -> Option<NewRecord> {
        let sandbox = self.sandbox?;
        let folded = self.folded.as_mut()?;
        if now < folded.due && !all {
            return None;
        }
        let Some(count) = folded.count.take() else {
            self.folded = None;
            return None;
        };
        folded.interval = (folded.interval * 2).min(MAX_FOLD);
        folded.due = now + folded.interval;
        let mut body = sandbox.body(node_id, "audit.folded");
        body.decision = Some(AuditDecision::Deny);
        count.describe(&mut body);
        let actions = json!(std::mem::take(&mut folded.actions));
        body.detail.insert("actions".to_owned(), actions);
        Some(NewRecord::new(&body, owner, count.count))
    }
}
