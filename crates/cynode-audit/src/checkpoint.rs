//! Signed snapshots of the heads of all streams.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Hash, Head, PublicKey, SigningKey, hash_text};

/// Domain separation from anything else that the key might ever sign.
const CHECKPOINT: &[u8] = b"cynode audit checkpoint 1\0";

/// The heads of streams at one time. Checkpoints are chained by number and hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// Counts from 1.
    pub number: u64,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    /// The hash of the previous checkpoint; [`Checkpoint::FIRST`] for the first.
    #[serde(with = "hash_text::json")]
    pub prev: Hash,
    /// Holds all streams that still have records, with their cuts, and not only those that
    /// advanced. Earlier checkpoints may be removed.
    pub full: bool,
    /// Every record with a cursor up to this one is covered by a head here or in an earlier
    /// checkpoint.
    pub cursor: i64,
    /// The streams that advanced since the previous checkpoint.
    pub heads: BTreeMap<Uuid, Head>,
    /// Streams from which retention removed the records up to and including this head.
    pub cut: BTreeMap<Uuid, Head>,
    /// Total number of records that retention has removed.
    pub truncated_records: u64,
}

impl Checkpoint {
    /// The previous hash of the first checkpoint.
    pub const FIRST: Hash = [0; 32];

    #[must_use]
    pub fn sign(self, key: &SigningKey) -> SignedCheckpoint {
        let text = serde_json::to_string(&self).expect("a checkpoint serializes");
        let message = message(&text);
        SignedCheckpoint {
            checkpoint: self,
            hash: Sha256::digest(&message).into(),
            signature: key.sign(&message),
            text,
        }
    }
}

fn message(text: &str) -> Vec<u8> {
    [CHECKPOINT, text.as_bytes()].concat()
}

/// A checkpoint with the exact text that was signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedCheckpoint {
    pub checkpoint: Checkpoint,
    pub hash: Hash,
    pub signature: Vec<u8>,
    text: String,
}

/// The reason why a line is not a checkpoint. Parsing does not verify the signature.
#[derive(Debug, thiserror::Error)]
pub enum MalformedCheckpoint {
    #[error("the line is malformed: {0}")]
    Line(serde_json::Error),
    #[error("the signed text is malformed: {0}")]
    Checkpoint(serde_json::Error),
    #[error("the signature is not base64url")]
    Signature,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// JSON as a string, so that the signed text stays the same byte for byte.
    checkpoint: String,
    signature: String,
}

impl SignedCheckpoint {
    /// One line of JSON, without a trailing newline.
    #[must_use]
    pub fn to_line(&self) -> String {
        let line = Line {
            checkpoint: self.text.clone(),
            signature: URL_SAFE_NO_PAD.encode(&self.signature),
        };
        serde_json::to_string(&line).expect("a line serializes")
    }

    pub fn parse(line: &str) -> Result<Self, MalformedCheckpoint> {
        let line: Line = serde_json::from_str(line).map_err(MalformedCheckpoint::Line)?;
        let checkpoint =
            serde_json::from_str(&line.checkpoint).map_err(MalformedCheckpoint::Checkpoint)?;
        let signature = URL_SAFE_NO_PAD
            .decode(line.signature)
            .map_err(|_| MalformedCheckpoint::Signature)?;
        Ok(Self {
            checkpoint,
            hash: Sha256::digest(message(&line.checkpoint)).into(),
            signature,
            text: line.checkpoint,
        })
    }

    /// Whether the key signed exactly this checkpoint.
    #[must_use]
    pub fn verify(&self, key: &PublicKey) -> bool {
        let message = message(&self.text);
        let matches_signed_text = || {
            serde_json::from_str::<Checkpoint>(&self.text)
                .is_ok_and(|signed| signed == self.checkpoint)
        };
        self.hash == Hash::from(Sha256::digest(&message))
            && matches_signed_text()
            && key.verify(&message, &self.signature)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use time::macros::datetime;

    use super::*;
    use crate::genesis;

    fn checkpoint() -> Checkpoint {
        let stream = Uuid::from_u128(7);
        Checkpoint {
            number: 3,
            at: datetime!(2026-01-02 03:04:05.678901234 UTC),
            prev: [9; 32],
            full: true,
            cursor: 40,
            heads: BTreeMap::from([
                (
                    stream,
                    Head {
                        seq: u64::MAX,
                        hash: genesis(stream),
                    },
                ),
                (
                    Uuid::nil(),
                    Head {
                        seq: 1,
                        hash: [1; 32],
                    },
                ),
            ]),
            cut: BTreeMap::from([(
                stream,
                Head {
                    seq: 5,
                    hash: [5; 32],
                },
            )]),
            truncated_records: 5,
        }
    }

    #[test]
    fn a_signed_checkpoint_round_trips_as_one_line() {
        let key = SigningKey::from_seed([1; 32]);
        let signed = checkpoint().sign(&key);
        let line = signed.to_line();
        assert!(!line.contains('\n'));
        let read = SignedCheckpoint::parse(&line).expect("a checkpoint");
        assert_eq!(read, signed);
        assert!(
            read.verify(&key.public()) && !read.verify(&SigningKey::from_seed([2; 32]).public())
        );
    }

    #[test]
    fn a_checkpoint_changed_in_memory_does_not_verify() {
        let key = SigningKey::from_seed([1; 32]);
        let mut signed = checkpoint().sign(&key);
        signed.checkpoint.truncated_records += 1;
        assert!(!signed.verify(&key.public()));
        let mut signed = checkpoint().sign(&key);
        signed.hash[0] ^= 1;
        assert!(!signed.verify(&key.public()));
    }

    proptest! {
        #[test]
        fn a_line_with_a_changed_byte_does_not_verify(
            place in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let key = SigningKey::from_seed([1; 32]);
            let line = checkpoint().sign(&key).to_line();
            let mut bytes = line.clone().into_bytes();
            let place = place.index(bytes.len());
            prop_assume!(bytes[place] != byte);
            bytes[place] = byte;
            let survives = String::from_utf8(bytes)
                .ok()
                .and_then(|line| SignedCheckpoint::parse(&line).ok())
                .is_some_and(|signed| signed.verify(&key.public()));
            prop_assert!(!survives);
        }
    }
}
