//! Detects secrets that the system holds, by keyed hashes only.
//!
//! A rolling fingerprint finds candidate positions; only there is the whole secret hashed. Only the
//! system's own processes have the key, so that nobody can craft input that is slow to scan.
//! Secrets whose values are not kept anywhere are held by their forms, which outlive the process.

use std::fmt;

use aws_lc_rs::hmac;
use serde::{Deserialize, Serialize};

use super::encoded;

/// The length of a fingerprint's window. Shorter secrets are too likely to be ordinary words.
const WINDOW_BYTES: usize = 12;
/// How often a byte's value has been rotated when the byte leaves the window: once per later byte.
const ROTATIONS: u32 = 12;
/// The number of fingerprint bits that the filter compares.
const FILTER_BITS: u32 = 16;

/// The secrets to detect, at any offset, in plain text and in base64.
#[derive(Clone)]
pub struct HeldSecrets {
    key: hmac::Key,
    /// By byte: the value that is XORed into the fingerprint when the byte enters the window.
    enters: Box<[u64; 256]>,
    /// By byte: the value that removes it again when it leaves.
    leaves: Box<[u64; 256]>,
    /// Sorted by fingerprint.
    secrets: Vec<Secret>,
    filter: Vec<u64>,
    longest: usize,
}

#[derive(Clone)]
struct Secret {
    kind: &'static str,
    form: HeldForm,
}

/// One form of a secret: its keyed hash, and what finds the places to compare it with. Says nothing
/// about the secret to whoever lacks the key, except its length.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldForm {
    fingerprint: u64,
    /// The offset of the fingerprint's window in the secret.
    offset: usize,
    length: usize,
    tag: Vec<u8>,
}

/// Omits the hash.
impl fmt::Debug for HeldForm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("HeldForm")
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl HeldSecrets {
    /// The key must be secret: whoever has it can compare guesses with the hashes.
    #[must_use]
    pub fn new(key: [u8; 32]) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        let mut enters = Box::new([0; 256]);
        for (number, value) in (0_u64..).zip(enters.iter_mut()) {
            // Can't collide with a secret's tag: secrets are longer than eight bytes.
            let tag = hmac::sign(&key, &number.to_be_bytes());
            *value = tag
                .as_ref()
                .iter()
                .take(8)
                .fold(0, |value, byte| value << 8 | u64::from(*byte));
        }
        let leaves = Box::new(enters.map(|value| value.rotate_left(ROTATIONS)));
        Self {
            key,
            enters,
            leaves,
            secrets: Vec::new(),
            filter: vec![0; 1 << (FILTER_BITS - 6)],
            longest: 0,
        }
    }

    /// Adds a secret, without surrounding whitespace, and its base64 forms. Returns false for a
    /// secret shorter than 12 bytes: it is not added, because it would match everywhere.
    #[must_use = "a secret that is too short is not detected"]
    pub fn add(&mut self, kind: &'static str, secret: &[u8]) -> bool {
        let Some(forms) = self.forms(secret) else {
            return false;
        };
        self.add_forms(kind, forms);
        true
    }

    /// The forms of a secret, from which it can be held again without its value. `None` for a
    /// secret shorter than 12 bytes.
    #[must_use]
    pub fn forms(&self, secret: &[u8]) -> Option<Vec<HeldForm>> {
        let secret = secret.trim_ascii();
        if secret.len() < WINDOW_BYTES {
            return None;
        }
        let encodings = encoded::all_encodings(secret);
        let encodings = encodings.iter().map(|form| self.form(form));
        Some(
            std::iter::once(self.form(secret))
                .chain(encodings)
                .collect(),
        )
    }

    /// Adds a secret by its forms, which must have been made with the same key.
    pub fn add_forms(&mut self, kind: &'static str, forms: impl IntoIterator<Item = HeldForm>) {
        for form in forms {
            let (word, bit) = filter_position(form.fingerprint);
            self.filter[word] |= bit;
            self.longest = self.longest.max(form.length);
            self.secrets.push(Secret { kind, form });
        }
        self.secrets.sort_by_key(|secret| secret.form.fingerprint);
    }

    /// The window lies in the middle, because secrets of one kind often share a well-known prefix.
    fn form(&self, form: &[u8]) -> HeldForm {
        let offset = (form.len() - WINDOW_BYTES) / 2;
        HeldForm {
            fingerprint: self.fingerprint(&form[offset..offset + WINDOW_BYTES]),
            offset,
            length: form.len(),
            tag: hmac::sign(&self.key, form).as_ref().to_vec(),
        }
    }

    /// The length of the longest form of a secret.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    pub(super) fn find(&self, bytes: &[u8]) -> Option<&'static str> {
        if self.secrets.is_empty() || bytes.len() < WINDOW_BYTES {
            return None;
        }
        let (first, rest) = bytes.split_at(WINDOW_BYTES);
        let mut fingerprint = self.fingerprint(first);
        for (start, (leaving, entering)) in bytes.iter().zip(rest).enumerate() {
            if self.is_likely(fingerprint)
                && let Some(kind) = self.match_at(bytes, start, fingerprint)
            {
                return Some(kind);
            }
            fingerprint = fingerprint.rotate_left(1)
                ^ self.enters[usize::from(*entering)]
                ^ self.leaves[usize::from(*leaving)];
        }
        self.match_at(bytes, rest.len(), fingerprint)
    }

    fn is_likely(&self, fingerprint: u64) -> bool {
        let (word, bit) = filter_position(fingerprint);
        self.filter[word] & bit != 0
    }

    /// The secret whose window starts here, if all of its bytes match.
    fn match_at(&self, bytes: &[u8], window: usize, fingerprint: u64) -> Option<&'static str> {
        let first = self
            .secrets
            .partition_point(|secret| secret.form.fingerprint < fingerprint);
        let candidates = self.secrets[first..]
            .iter()
            .take_while(|secret| secret.form.fingerprint == fingerprint);
        let mut matches = candidates.filter(|Secret { form, .. }| {
            let Some(start) = window.checked_sub(form.offset) else {
                return false;
            };
            let Some(bytes) = bytes.get(start..start.saturating_add(form.length)) else {
                return false;
            };
            hmac::verify(&self.key, bytes, &form.tag).is_ok()
        });
        matches.next().map(|secret| secret.kind)
    }

    fn fingerprint(&self, window: &[u8]) -> u64 {
        window.iter().fold(0, |fingerprint: u64, byte| {
            fingerprint.rotate_left(1) ^ self.enters[usize::from(*byte)]
        })
    }
}

/// Omits the key.
impl fmt::Debug for HeldSecrets {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("HeldSecrets")
            .field("forms", &self.secrets.len())
            .finish_non_exhaustive()
    }
}

fn filter_position(fingerprint: u64) -> (usize, u64) {
    let place = fingerprint >> (u64::BITS - FILTER_BITS);
    (
        usize::try_from(place >> 6).unwrap_or_default(),
        1 << (place & 63),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scanning is fast because the filter rejects nearly every position.
    #[test]
    fn the_filter_rejects_nearly_every_position() {
        let mut held = HeldSecrets::new([7; 32]);
        assert!(held.add("a secret", b"of no particular kind"));
        assert!(
            held.secrets
                .iter()
                .all(|secret| held.is_likely(secret.form.fingerprint))
        );
        let text: Vec<u8> = (0_u32..20_000).flat_map(u32::to_be_bytes).collect();
        let likely = text
            .windows(WINDOW_BYTES)
            .filter(|window| held.is_likely(held.fingerprint(window)))
            .count();
        assert!(likely < 100, "{likely} of {}", text.len());
    }
}
