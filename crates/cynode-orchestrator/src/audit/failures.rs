//! Failed authentications, aggregated by source, so that an attacker who tries many tokens is
//! recorded without filling the disk.
//!
//! Invariant: every failure has a record of its own or is in a count. The first failure of a source
//! and its first few tokens are recorded at once; further ones are counted, and the count is
//! recorded once per interval, with all details that identify the source. Memory is bounded;
//! sources that exceed the bound are counted together.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::{AuditBody, AuditDecision, AuditKind, AuditResult, AuditSubject};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio_util::sync::CancellationToken;

use super::Audit;

/// How often counts are recorded.
const INTERVAL: Duration = Duration::from_mins(1);
/// How often due counts are collected.
const TICK: Duration = Duration::from_secs(5);
/// Sources that are counted individually.
const MAX_SOURCES: usize = 64;
/// Tokens of one source that are recorded immediately, until it is forgotten.
const MAX_IMMEDIATE: usize = 4;
/// Tokens and addresses that a count lists. Further ones are only counted.
const MAX_LISTED: usize = 16;

/// The listener or route that received a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EntryPoint {
    UserApi,
    Mcp,
    Metrics,
    Control,
}

impl EntryPoint {
    /// The surface of a path on the user API's port.
    pub(crate) fn of_path(path: &str) -> Self {
        if path == "/mcp" || path.starts_with("/mcp/") {
            Self::Mcp
        } else {
            Self::UserApi
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::UserApi => "user_api",
            Self::Mcp => "mcp",
            Self::Metrics => "metrics",
            Self::Control => "control",
        }
    }

    /// The subject of records for an unknown caller.
    const fn subject(self) -> &'static str {
        match self {
            Self::UserApi | Self::Mcp | Self::Metrics => "nobody",
            Self::Control => "node",
        }
    }
}

/// An invalid token: where it was presented, from which address, and the first bytes of its hash,
/// which identify it without revealing it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    surface: EntryPoint,
    address: Option<IpAddr>,
    token: [u8; 4],
}

impl Failure {
    pub(crate) fn new(surface: EntryPoint, address: Option<IpAddr>, token_hash: &[u8; 32]) -> Self {
        let [a, b, c, d, ..] = *token_hash;
        Self {
            surface,
            address: address.map(|address| address.to_canonical()),
            token: [a, b, c, d],
        }
    }

    /// The record of a single failure.
    pub(crate) fn record(&self) -> AuditBody {
        let mut detail = Map::new();
        if let Some(address) = self.address {
            detail.insert("address".to_owned(), json!(address.to_string()));
        }
        detail.insert("count".to_owned(), json!(1));
        detail.insert("token".to_owned(), json!(hex::encode(self.token)));
        record(self.surface, detail)
    }
}

fn record(surface: EntryPoint, mut detail: Map<String, Value>) -> AuditBody {
    detail.insert("route".to_owned(), json!(surface.as_str()));
    AuditBody {
        call_id: None,
        subject: Some(AuditSubject {
            kind: surface.subject().to_owned(),
            ..AuditSubject::default()
        }),
        decision: Some(AuditDecision::Deny),
        stage: Some("authenticate".to_owned()),
        result: Some(AuditResult::Refused),
        status: Some(401),
        detail,
        ..AuditBody::new(AuditKind::Authentication, "authenticate")
    }
}

/// A source: an IPv4 address, or an IPv6 network, because one machine can use all its addresses.
type Network = Option<IpAddr>;

fn network(address: Option<IpAddr>) -> Network {
    address.map(|address| match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)))
        }
    })
}

/// Counts of distinct values. Beyond the bound the lightest value gives way to a new one and joins
/// the total of the others, so a value with more than its part of all failures is always listed:
/// a source can't hide behind many that each fail once.
#[derive(Debug)]
struct Tally<T> {
    listed: BTreeMap<T, TallyEntry>,
    total: u64,
}

#[derive(Clone, Copy, Debug)]
struct TallyEntry {
    /// How often the value was seen at most; decides which value gives way.
    weight: u64,
    /// How often the value was seen since it is listed.
    count: u64,
}

impl<T> Default for Tally<T> {
    fn default() -> Self {
        Self {
            listed: BTreeMap::new(),
            total: 0,
        }
    }
}

impl<T: Ord + Copy> Tally<T> {
    fn add(&mut self, one: T) {
        self.total += 1;
        if let Some(entry) = self.listed.get_mut(&one) {
            entry.weight += 1;
            entry.count += 1;
            return;
        }
        let mut weight = 1;
        if self.listed.len() >= MAX_LISTED
            && let Some((lightest, entry)) =
                self.listed.iter().min_by_key(|(_, entry)| entry.weight)
        {
            weight += entry.weight;
            let lightest = *lightest;
            self.listed.remove(&lightest);
        }
        self.listed.insert(one, TallyEntry { weight, count: 1 });
    }

    /// Lists what was counted, and how often, in the detail of a record.
    fn insert_into(
        &self,
        name: &str,
        item_name: &str,
        text: impl Fn(&T) -> String,
        detail: &mut Map<String, Value>,
    ) {
        let listed: Vec<Value> = self
            .listed
            .iter()
            .map(|(one, entry)| json!({item_name: text(one), "count": entry.count}))
            .collect();
        detail.insert(name.to_owned(), listed.into());
        let others = self.total - self.listed.values().map(|entry| entry.count).sum::<u64>();
        if others > 0 {
            detail.insert(format!("other_{name}"), json!(others));
        }
    }
}

/// Failures since the last record.
#[derive(Debug, Default)]
struct Count {
    count: u64,
    first: Option<OffsetDateTime>,
    last: Option<OffsetDateTime>,
    tokens: Tally<[u8; 4]>,
    addresses: Tally<Network>,
}

impl Count {
    fn add(&mut self, failure: &Failure) {
        let now = OffsetDateTime::now_utc();
        self.count += 1;
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.tokens.add(failure.token);
        self.addresses.add(failure.address);
    }

    fn record(&self, surface: EntryPoint, network: Option<Network>) -> AuditBody {
        let text = |address: &Network| {
            address.map_or_else(|| "unknown".to_owned(), |address| address.to_string())
        };
        let time = |time: Option<OffsetDateTime>| time.and_then(|time| time.format(&Rfc3339).ok());
        let mut detail = Map::new();
        detail.insert("count".to_owned(), json!(self.count));
        detail.insert("first_at".to_owned(), json!(time(self.first)));
        detail.insert("last_at".to_owned(), json!(time(self.last)));
        self.tokens
            .insert_into("tokens", "token", |token| hex::encode(token), &mut detail);
        match network {
            Some(_) if self.addresses.listed.len() == 1 => {
                let address = self.addresses.listed.keys().next().map(text);
                detail.insert("address".to_owned(), json!(address));
            }
            Some(network) => {
                detail.insert(
                    "address".to_owned(),
                    json!(format!("{}/64", text(&network))),
                );
                self.addresses
                    .insert_into("addresses", "address", text, &mut detail);
            }
            // Sources beyond the bound.
            None => self
                .addresses
                .insert_into("addresses", "address", text, &mut detail),
        }
        record(surface, detail)
    }
}

#[derive(Debug)]
struct Source {
    since: Instant,
    /// Tokens that were recorded immediately.
    immediate: Vec<[u8; 4]>,
    counted: Count,
}

#[derive(Debug, Default)]
struct Sources {
    known: BTreeMap<(EntryPoint, Network), Source>,
    /// Sources beyond the bound, by surface.
    others: BTreeMap<EntryPoint, (Instant, Count)>,
}

/// The failures of this process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failures(Arc<Mutex<Sources>>);

impl Failures {
    /// Adds a failure. Returns whether it must be recorded immediately; otherwise it is counted.
    #[must_use]
    pub(crate) fn add(&self, failure: &Failure, now: Instant) -> bool {
        let mut sources = self.0.lock();
        let key = (failure.surface, network(failure.address));
        if !sources.known.contains_key(&key) && sources.known.len() >= MAX_SOURCES {
            let (_, counted) = sources
                .others
                .entry(failure.surface)
                .or_insert_with(|| (now, Count::default()));
            counted.add(failure);
            return false;
        }
        let source = sources.known.entry(key).or_insert_with(|| Source {
            since: now,
            immediate: Vec::new(),
            counted: Count::default(),
        });
        if source.immediate.contains(&failure.token) || source.immediate.len() >= MAX_IMMEDIATE {
            source.counted.add(failure);
            return false;
        }
        source.immediate.push(failure.token);
        true
    }

    /// Counts a failure that could not be recorded immediately after all.
    pub(crate) fn count(&self, failure: &Failure) {
        if let Some(source) = self
            .0
            .lock()
            .known
            .get_mut(&(failure.surface, network(failure.address)))
        {
            source.counted.add(failure);
        }
    }

    /// The records that are due. A source that was silent for an interval is forgotten.
    pub(crate) fn due(&self, now: Instant) -> Vec<AuditBody> {
        self.take(
            |since| now.saturating_duration_since(since) >= INTERVAL,
            now,
        )
    }

    /// The records of all remaining counts.
    pub(crate) fn rest(&self) -> Vec<AuditBody> {
        self.take(|_| true, Instant::now())
    }

    fn take(&self, is_due: impl Fn(Instant) -> bool, now: Instant) -> Vec<AuditBody> {
        let mut sources = self.0.lock();
        let mut records = Vec::new();
        sources.known.retain(|(surface, network), source| {
            if !is_due(source.since) {
                return true;
            }
            let has_failed = source.counted.count > 0;
            if has_failed {
                records.push(std::mem::take(&mut source.counted).record(*surface, Some(*network)));
            }
            source.since = now;
            has_failed
        });
        sources.others.retain(|surface, (since, counted)| {
            let is_over = is_due(*since);
            if is_over {
                records.push(counted.record(*surface, None));
            }
            !is_over
        });
        records
    }
}

/// Records counts until the orchestrator has answered all calls.
pub(crate) async fn keep(failures: Failures, audit: Audit, closing: CancellationToken) {
    while closing
        .run_until_cancelled(tokio::time::sleep(TICK))
        .await
        .is_some()
    {
        // While the trail accepts no records, counting continues.
        if audit.is_full() {
            continue;
        }
        for body in failures.due(Instant::now()) {
            audit.enqueue_detached(body);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn failure(surface: EntryPoint, address: &str, token: u32) -> Failure {
        let mut hash = [0; 32];
        hash[..4].copy_from_slice(&token.to_be_bytes());
        Failure::new(surface, address.parse().ok(), &hash)
    }

    fn counted(records: &[AuditBody]) -> u64 {
        records
            .iter()
            .filter_map(|body| body.detail["count"].as_u64())
            .sum()
    }

    #[test]
    fn a_source_is_recorded_at_once_and_then_once_per_interval_with_what_identifies_it() {
        let (failures, begin) = (Failures::default(), Instant::now());
        let one = failure(EntryPoint::UserApi, "192.0.2.1", 7);
        assert!(failures.add(&one, begin));
        assert_eq!(
            Value::Object(one.record().detail),
            json!({"address": "192.0.2.1", "count": 1, "route": "user_api", "token": "00000007"})
        );
        for _ in 0..1_000 {
            assert!(!failures.add(&one, begin));
        }
        assert!(
            failures
                .due(begin + INTERVAL.saturating_sub(Duration::from_millis(1)))
                .is_empty()
        );
        let records = failures.due(begin + INTERVAL);
        let [body] = &records[..] else {
            panic!("{records:?}")
        };
        assert_eq!(
            (body.kind, body.action.as_str(), body.decision),
            (
                AuditKind::Authentication,
                "authenticate",
                Some(AuditDecision::Deny)
            )
        );
        assert_eq!(
            (
                &body.detail["address"],
                &body.detail["count"],
                &body.detail["route"]
            ),
            (&json!("192.0.2.1"), &json!(1_000), &json!("user_api"))
        );
        assert_eq!(
            body.detail["tokens"],
            json!([{"token": "00000007", "count": 1_000}])
        );
        let times: Vec<OffsetDateTime> = ["first_at", "last_at"]
            .iter()
            .map(|name| {
                OffsetDateTime::parse(body.detail[*name].as_str().expect("a time"), &Rfc3339)
                    .expect("a time")
            })
            .collect();
        assert!(times[0] <= times[1] && times[1] <= OffsetDateTime::now_utc());
        // After a silent interval the source is forgotten, and its next failure is a first one
        // again.
        assert!(failures.due(begin + 2 * INTERVAL).is_empty());
        assert!(failures.add(&one, begin + 2 * INTERVAL));
        assert!(failures.rest().is_empty(), "a failure was counted twice");
    }

    #[test]
    fn the_first_tokens_of_a_source_are_recorded_at_once_and_further_ones_listed_up_to_the_limit() {
        let (failures, now) = (Failures::default(), Instant::now());
        let immediate = (0..100)
            .filter(|token| failures.add(&failure(EntryPoint::Mcp, "192.0.2.1", *token), now))
            .count();
        assert_eq!(immediate, MAX_IMMEDIATE);
        let records = failures.rest();
        let [body] = &records[..] else {
            panic!("{records:?}")
        };
        assert_eq!(
            body.detail["tokens"].as_array().map(Vec::len),
            Some(MAX_LISTED)
        );
        let others = body.detail["other_tokens"].as_u64().expect("others");
        assert_eq!(
            (body.detail["count"].as_u64(), others),
            (
                Some(100 - MAX_IMMEDIATE as u64),
                100 - (MAX_IMMEDIATE + MAX_LISTED) as u64
            )
        );
    }

    #[test]
    fn many_sources_take_bounded_memory_and_all_are_recorded() {
        let (failures, now) = (Failures::default(), Instant::now());
        let mut immediate = 0;
        for number in 0..1_000_u32 {
            for _ in 0..3 {
                immediate += u64::from(failures.add(
                    &failure(
                        EntryPoint::Control,
                        &std::net::Ipv4Addr::from_bits(number).to_string(),
                        number,
                    ),
                    now,
                ));
            }
        }
        assert_eq!(
            (immediate, failures.0.lock().known.len()),
            (MAX_SOURCES as u64, MAX_SOURCES)
        );
        let records = failures.due(now + INTERVAL);
        assert_eq!(records.len(), MAX_SOURCES + 1);
        assert_eq!(
            immediate + counted(&records),
            3_000,
            "a failure is in no record"
        );
        let rest = records
            .last()
            .expect("a record of the sources beyond the bound");
        assert_eq!(
            rest.detail["addresses"].as_array().map(Vec::len),
            Some(MAX_LISTED)
        );
        assert_eq!(
            rest.detail["other_addresses"].as_u64(),
            Some(3 * (1_000 - MAX_SOURCES as u64 - MAX_LISTED as u64))
        );
        assert_eq!(
            rest.subject.as_ref().map(|subject| subject.kind.as_str()),
            Some("node")
        );
        assert!(failures.rest().is_empty());
    }

    #[test]
    fn a_source_can_not_hide_behind_many_that_fail_once() {
        let (failures, now) = (Failures::default(), Instant::now());
        let one = |number: u32| {
            let address = Ipv4Addr::from_bits(0x0a00_0000 + number).to_string();
            let _immediate = failures.add(&failure(EntryPoint::UserApi, &address, number), now);
        };
        (0..200).for_each(one);
        for number in 0..60 {
            let hidden = failure(EntryPoint::UserApi, "192.0.2.1", number);
            assert!(!failures.add(&hidden, now), "the table is full");
            one(1_000 + number);
        }
        let records = failures.rest();
        let overflow = records
            .iter()
            .find_map(|record| record.detail.get("addresses"))
            .expect("the sources beyond the bound");
        let found = overflow
            .as_array()
            .and_then(|listed| listed.iter().find(|one| one["address"] == "192.0.2.1"))
            .and_then(|one| one["count"].as_u64());
        assert!(found.is_some_and(|count| count >= 50), "{overflow}");
    }

    #[test]
    fn an_ipv6_network_is_one_source_and_its_addresses_are_listed() {
        let (failures, now) = (Failures::default(), Instant::now());
        assert!(failures.add(&failure(EntryPoint::UserApi, "2001:db8::1", 1), now));
        for last in 1..=3 {
            assert!(!failures.add(
                &failure(EntryPoint::UserApi, &format!("2001:db8::{last}"), 1),
                now
            ));
        }
        // Another network, another surface, and an address in another notation.
        assert!(failures.add(&failure(EntryPoint::UserApi, "2001:db8:0:1::1", 1), now));
        assert!(failures.add(&failure(EntryPoint::Mcp, "2001:db8::1", 1), now));
        assert!(failures.add(&failure(EntryPoint::UserApi, "192.0.2.9", 1), now));
        assert!(!failures.add(&failure(EntryPoint::UserApi, "::ffff:192.0.2.9", 1), now));
        let records = failures.rest();
        let of = |address: &str| {
            records
                .iter()
                .find(|body| body.detail["address"] == address)
                .unwrap_or_else(|| panic!("{address}: {records:?}"))
        };
        assert_eq!(
            of("2001:db8::/64").detail["addresses"]
                .as_array()
                .map(Vec::len),
            Some(3)
        );
        assert_eq!(counted(&records), 4);
        assert_eq!(of("192.0.2.9").detail["count"], json!(1));
    }

    #[test]
    fn a_failure_that_could_not_be_written_is_counted() {
        let (failures, now) = (Failures::default(), Instant::now());
        let one = failure(EntryPoint::UserApi, "192.0.2.1", 1);
        assert!(failures.add(&one, now));
        failures.count(&one);
        assert_eq!(counted(&failures.rest()), 1);
    }
}
