//! What decides, beside the trail, which records are written and who is charged for them.

use std::{fmt, time::Instant};

use serde_json::Value;
use time::OffsetDateTime;

use crate::cost;

/// Who is charged for a record, if anybody is, and what it takes in the backlog.
pub type Charge<O> = (Option<O>, u64);

/// A record that a ledger has admitted, and that waits to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct NewRecord<O, C> {
    pub body: Value,
    pub owner: Option<O>,
    pub cost: u64,
    /// What the ledger needs to take the record back.
    pub claim: C,
}

/// A record of a ledger.
pub type Admitted<L> = NewRecord<<L as Ledger>::Owner, <L as Ledger>::Claim>;

/// Accounts for the records that wait for the orchestrator.
///
/// A ledger is locked briefly, and after the store where both are needed, so it does no I/O.
pub trait Ledger: fmt::Debug + Sized + Send + 'static {
    type Owner: Copy + fmt::Debug + Send + 'static;
    type Claim: Send + 'static;

    /// Who is charged for a stored record.
    fn owner_of(body: &Value) -> Option<Self::Owner>;

    /// Records joined the backlog without being admitted: those that a restart found.
    fn charge(&mut self, records: impl Iterator<Item = Charge<Self::Owner>>);

    /// Records left the backlog.
    fn release(&mut self, records: impl IntoIterator<Item = Charge<Self::Owner>>);

    /// An admitted record was not written, and what it stood for has no effect.
    fn not_written(&mut self, record: &Admitted<Self>, at: OffsetDateTime, now: Instant);

    /// The counts that are due, already charged; all of them if `all`.
    fn due(&mut self, now: Instant, all: bool) -> Vec<Admitted<Self>>;

    /// What all waiting records take.
    fn total(&self) -> u64;
}

/// Bounds the backlog as a whole, for writers whose records nobody is charged for.
#[derive(Debug)]
pub struct TotalLedger {
    max_bytes: u64,
    total: u64,
}

impl TotalLedger {
    #[must_use]
    pub const fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            total: 0,
        }
    }

    /// Admits a record if there is room for it. `is_outcome`: it belongs to an effect that was
    /// admitted, so there are only so many, and it is taken in any case.
    pub fn admit(&mut self, body: Value, is_outcome: bool) -> Option<Admitted<Self>> {
        let cost = cost(&body);
        if !is_outcome && self.total + cost > self.max_bytes {
            return None;
        }
        self.total += cost;
        Some(NewRecord {
            body,
            owner: None,
            cost,
            claim: (),
        })
    }
}

impl Ledger for TotalLedger {
    type Owner = ();
    type Claim = ();

    fn owner_of(_: &Value) -> Option<()> {
        None
    }

    fn charge(&mut self, records: impl Iterator<Item = Charge<()>>) {
        self.total += records.map(|(_, cost)| cost).sum::<u64>();
    }

    fn release(&mut self, records: impl IntoIterator<Item = Charge<()>>) {
        let released: u64 = records.into_iter().map(|(_, cost)| cost).sum();
        self.total = self.total.saturating_sub(released);
    }

    fn not_written(&mut self, record: &Admitted<Self>, _: OffsetDateTime, _: Instant) {
        self.release([(None, record.cost)]);
    }

    /// Nothing is counted.
    fn due(&mut self, _: Instant, _: bool) -> Vec<Admitted<Self>> {
        Vec::new()
    }

    fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_full_backlog_refuses_effects_but_not_the_outcomes_of_earlier_ones() {
        let mut ledger = TotalLedger::new(1_000);
        while ledger.admit(json!({}), false).is_some() {}
        assert!(ledger.total() <= 1_000);
        let outcome = ledger.admit(json!({}), true).expect("admitted");
        assert!(ledger.total() > 1_000);
        ledger.not_written(&outcome, OffsetDateTime::now_utc(), Instant::now());
        assert!(ledger.total() <= 1_000);
    }
}
