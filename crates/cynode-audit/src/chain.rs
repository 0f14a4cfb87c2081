//! The hash chain of records.

use cynode_api::{AuditRecord, NodeAuditRecord};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;

use crate::{canonical, hash_text};

/// A SHA-256 digest.
pub type Hash = [u8; 32];

/// Domain separation: no other hash of this system starts with these bytes.
const RECORD: &[u8] = b"cynode audit record 1\0";
const GENESIS: &[u8] = b"cynode audit stream 1\0";

/// Hashes the previous hash, the stream, the sequence number, the time in microseconds and the
/// canonical JSON of the body.
///
/// A body without canonical text gets a hash that no chained record has: [`Chain::append`] never
/// lets one in.
#[must_use]
pub fn hash(prev: &Hash, stream: Uuid, seq: u64, at: OffsetDateTime, body: &Value) -> Hash {
    let mut input = Vec::with_capacity(1024);
    input.extend_from_slice(RECORD);
    input.extend_from_slice(prev);
    input.extend_from_slice(stream.as_bytes());
    input.extend_from_slice(&seq.to_be_bytes());
    input.extend_from_slice(&microseconds(at).to_be_bytes());
    let place = input.len();
    if canonical::write(body, 0, &mut input).is_err() {
        input.truncate(place);
        input.push(0);
    }
    Sha256::digest(&input).into()
}

/// The previous hash of a stream's first record.
#[must_use]
pub fn genesis(stream: Uuid) -> Hash {
    Sha256::new()
        .chain_update(GENESIS)
        .chain_update(stream.as_bytes())
        .finalize()
        .into()
}

fn microseconds(at: OffsetDateTime) -> i128 {
    at.unix_timestamp_nanos().div_euclid(1_000)
}

/// A record in its chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    pub stream: Uuid,
    pub seq: u64,
    pub at: OffsetDateTime,
    pub body: Value,
    pub hash: Hash,
}

/// The reason why a value is not an audit record.
#[derive(Debug, thiserror::Error)]
pub enum MalformedRecord {
    #[error("the record is not an object")]
    NotAnObject,
    #[error("'{0}' is missing or malformed")]
    Member(&'static str),
    #[error("the body is malformed: {0}")]
    Body(#[from] serde_json::Error),
}

impl Link {
    /// The record as the API shows it.
    pub fn to_record(&self, cursor: i64) -> Result<AuditRecord, MalformedRecord> {
        Ok(AuditRecord {
            cursor,
            stream: self.stream,
            seq: self.seq,
            at: self.at,
            body: serde_json::from_value(self.body.clone())?,
            hash: hex::encode(self.hash),
        })
    }

    /// The record as a node stores and sends it; its stream is named once for many records.
    #[must_use]
    pub fn to_node_record(&self) -> NodeAuditRecord {
        NodeAuditRecord {
            seq: self.seq,
            at: self.at,
            body: self.body.clone(),
            hash: hex::encode(self.hash),
        }
    }

    /// Parses a record that a node stored or sent. Its hash is not verified; see
    /// [`Chain::follow`].
    pub fn from_node_record(
        stream: Uuid,
        record: NodeAuditRecord,
    ) -> Result<Self, MalformedRecord> {
        let hash = hash_text::decode(&record.hash).ok_or(MalformedRecord::Member("hash"))?;
        // A store keeps microseconds, and hashes cover no more.
        if !record.at.nanosecond().is_multiple_of(1_000) {
            return Err(MalformedRecord::Member("at"));
        }
        Ok(Self {
            stream,
            seq: record.seq,
            at: record.at,
            body: record.body,
            hash,
        })
    }

    /// Parses a record as the API shows it, with its cursor. All members other than its position
    /// belong to the body, known or not.
    pub fn from_record(record: Value) -> Result<(i64, Self), MalformedRecord> {
        let Value::Object(mut body) = record else {
            return Err(MalformedRecord::NotAnObject);
        };
        let mut take = |name: &'static str| body.remove(name).ok_or(MalformedRecord::Member(name));
        let (cursor, stream, seq, at, hash) = (
            take("cursor")?,
            take("stream")?,
            take("seq")?,
            take("at")?,
            take("hash")?,
        );
        let link = Self {
            stream: stream
                .as_str()
                .and_then(|text| Uuid::parse_str(text).ok())
                .ok_or(MalformedRecord::Member("stream"))?,
            seq: seq.as_u64().ok_or(MalformedRecord::Member("seq"))?,
            at: at
                .as_str()
                .and_then(|text| OffsetDateTime::parse(text, &Rfc3339).ok())
                .ok_or(MalformedRecord::Member("at"))?,
            body: Value::Object(body),
            hash: hash
                .as_str()
                .and_then(hash_text::decode)
                .ok_or(MalformedRecord::Member("hash"))?,
        };
        Ok((
            cursor.as_i64().ok_or(MalformedRecord::Member("cursor"))?,
            link,
        ))
    }
}

/// The newest record of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    pub seq: u64,
    #[serde(with = "hash_text::json")]
    pub hash: Hash,
}

/// One writer's stream.
#[derive(Clone, Debug)]
pub struct Chain {
    stream: Uuid,
    head: Head,
}

impl Chain {
    #[must_use]
    pub fn new(stream: Uuid) -> Self {
        Self {
            stream,
            head: Head {
                seq: 0,
                hash: genesis(stream),
            },
        }
    }

    /// Continues a stream after its current head.
    #[must_use]
    pub const fn resume(stream: Uuid, head: Head) -> Self {
        Self { stream, head }
    }

    /// Appends a record. Store the returned link, not the arguments: the time is rounded down to
    /// microseconds, and values that a store can't hold are replaced (a number that is not an
    /// integer by its text).
    pub fn append(&mut self, at: OffsetDateTime, body: Value) -> Link {
        let at = OffsetDateTime::from_unix_timestamp_nanos(microseconds(at) * 1_000)
            .expect("a time rounded down to microseconds is a time");
        let body = canonical::sanitize(body);
        let seq = self.head.seq + 1;
        let hash = hash(&self.head.hash, self.stream, seq, at, &body);
        self.head = Head { seq, hash };
        Link {
            stream: self.stream,
            seq,
            at,
            body,
            hash,
        }
    }

    /// Advances to a record that was chained elsewhere. Returns false, and stays, if the record is
    /// not the next one or its hash does not match.
    #[must_use]
    pub fn follow(&mut self, link: &Link) -> bool {
        let follows = link.stream == self.stream
            && self.head.seq.checked_add(1) == Some(link.seq)
            && hash(&self.head.hash, self.stream, link.seq, link.at, &link.body) == link.hash;
        if follows {
            self.head = Head {
                seq: link.seq,
                hash: link.hash,
            };
        }
        follows
    }

    /// The newest record; number 0 and the stream's [`genesis`] if there is none.
    #[must_use]
    pub const fn head(&self) -> Head {
        self.head
    }

    #[must_use]
    pub const fn stream(&self) -> Uuid {
        self.stream
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use time::{Duration, macros::datetime};

    use super::*;

    const AT: OffsetDateTime = datetime!(2026-01-02 03:04:05.678901234 UTC);

    #[test]
    fn a_hash_depends_on_every_part() {
        let (prev, stream, body) = ([7; 32], Uuid::from_u128(1), json!({"a": 1}));
        let hashes = [
            hash(&prev, stream, 1, AT, &body),
            hash(&[8; 32], stream, 1, AT, &body),
            hash(&prev, Uuid::from_u128(2), 1, AT, &body),
            hash(&prev, stream, 2, AT, &body),
            hash(&prev, stream, 1, AT + Duration::MICROSECOND, &body),
            hash(&prev, stream, 1, AT, &json!({"a": "1"})),
            hash(&prev, stream, 1, AT, &json!({"a": 1.5})),
            genesis(stream),
        ];
        let distinct: std::collections::BTreeSet<Hash> = hashes.into_iter().collect();
        assert_eq!(distinct.len(), hashes.len());
    }

    #[test]
    // invariant: api-boundaries
    fn the_hash_of_a_known_record_is_stable() {
        let hash = hash(
            &genesis(Uuid::nil()),
            Uuid::nil(),
            1,
            datetime!(2026-01-02 03:04:05.678901 UTC),
            &json!({"version": 1, "kind": "event"}),
        );
        assert_eq!(
            hex::encode(hash),
            "53fde44a1370b984d07787e4671636b5daf8511035d02a872b48bd3517998a2e"
        );
    }

    #[test]
    fn a_chain_numbers_from_one_and_rounds_the_time_down() {
        let mut chain = Chain::new(Uuid::now_v7());
        assert_eq!(
            chain.head(),
            Head {
                seq: 0,
                hash: genesis(chain.stream())
            }
        );
        let first = chain.append(AT, json!({"duration": 0.25}));
        let second = chain.append(datetime!(1969-12-31 23:59:59.9999999 UTC), json!({}));
        assert_eq!((first.seq, second.seq), (1, 2));
        assert_eq!(
            (first.at, second.at),
            (
                datetime!(2026-01-02 03:04:05.678901 UTC),
                datetime!(1969-12-31 23:59:59.999999 UTC)
            )
        );
        assert_eq!(first.body, json!({"duration": "0.25"}));
        assert_eq!(
            second.hash,
            hash(&first.hash, chain.stream(), 2, second.at, &json!({}))
        );
        assert_eq!(
            chain.head(),
            Head {
                seq: 2,
                hash: second.hash
            }
        );
    }

    #[test]
    fn a_record_round_trips_with_its_unknown_members() {
        let mut chain = Chain::new(Uuid::now_v7());
        let link = chain.append(
            AT,
            json!({"version": 1, "kind": "event", "action": "node.lost", "detail": {"n": 1}}),
        );
        let shown =
            serde_json::to_value(link.to_record(9).expect("a record")).expect("records serialize");
        assert_eq!(
            Link::from_record(shown).expect("a record"),
            (9, link.clone())
        );

        let unknown = chain.append(AT, json!({"version": 2, "kind": "weather", "mood": [1]}));
        let mut value = unknown.body.clone();
        value["cursor"] = 10.into();
        value["stream"] = chain.stream().to_string().into();
        value["seq"] = 2.into();
        value["at"] = unknown.at.format(&Rfc3339).expect("a time").into();
        value["hash"] = hex::encode(unknown.hash).into();
        let (_, read) = Link::from_record(value).expect("a record");
        assert_eq!(
            hash(&link.hash, read.stream, read.seq, read.at, &read.body),
            unknown.hash
        );
    }

    #[test]
    fn a_node_record_round_trips_and_follows_only_its_predecessor() {
        let mut chain = Chain::new(Uuid::now_v7());
        let start = chain.clone();
        let links = [
            chain.append(AT, json!({"a": 1})),
            chain.append(AT, json!({"a": 2})),
        ];
        let sent: Vec<Link> = links
            .iter()
            .map(|link| {
                let text = serde_json::to_string(&link.to_node_record()).expect("serializes");
                let record = serde_json::from_str(&text).expect("parses");
                Link::from_node_record(chain.stream(), record).expect("a record")
            })
            .collect();
        assert_eq!(sent, links);
        let mut reader = start.clone();
        assert!(!reader.follow(&sent[1]), "a record was skipped");
        assert!(reader.follow(&sent[0]) && reader.follow(&sent[1]));
        assert!(!reader.follow(&sent[1]), "a record followed itself");
        assert_eq!(reader.head(), chain.head());
        let changed = Link {
            body: json!({"a": 3}),
            ..sent[0].clone()
        };
        assert!(!start.clone().follow(&changed), "a changed record followed");
        let precise = NodeAuditRecord {
            at: AT,
            ..links[0].to_node_record()
        };
        assert!(Link::from_node_record(chain.stream(), precise).is_err());
    }

    #[test]
    fn a_malformed_record_is_refused() {
        for (value, expected) in [
            (json!([]), "the record is not an object"),
            (json!({"cursor": 1}), "'stream' is missing or malformed"),
            (
                json!({"cursor": 1, "stream": "x", "seq": 1, "at": "", "hash": ""}),
                "'stream' is missing or malformed",
            ),
            (
                json!({"cursor": 1, "stream": Uuid::nil(), "seq": -1, "at": "", "hash": ""}),
                "'seq' is missing or malformed",
            ),
        ] {
            assert_eq!(
                Link::from_record(value)
                    .expect_err("not a record")
                    .to_string(),
                expected
            );
        }
    }
}
