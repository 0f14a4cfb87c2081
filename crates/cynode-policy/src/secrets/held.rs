//! Secrets that the system holds, known by keyed hashes alone.
//!
//! A fingerprint that rolls over the bytes finds the places where a secret could be; only there is the whole hashed. The key is the
//! process's own: what is in memory here helps nobody to find a secret, or to make bytes that take long to look at.

use std::fmt;

use aws_lc_rs::hmac;

use super::encoded;

/// How many bytes of a secret its fingerprint is of. What is shorter is too likely to be an ordinary word.
const WINDOW: usize = 12;
/// How often a byte has been rotated when it leaves the window: once for each byte that came after it.
const ROTATIONS: u32 = 12;
/// A place is looked at more closely when this many bits of its fingerprint are those of a secret's.
const FILTER_BITS: u32 = 16;

/// The secrets to look for, in whatever they stand in: any place counts, and so does base64.
pub struct Held {
    key: hmac::Key,
    /// What each byte adds to a fingerprint when it comes into the window.
    enters: Box<[u64; 256]>,
    /// What is taken away again when it leaves.
    leaves: Box<[u64; 256]>,
    /// Sorted by fingerprint.
    secrets: Vec<Secret>,
    filter: Vec<u64>,
    longest: usize,
}

struct Secret {
    what: &'static str,
    fingerprint: u64,
    /// Where in the secret the window of its fingerprint is.
    offset: usize,
    length: usize,
    tag: hmac::Tag,
}

impl Held {
    /// The key should be random and live no longer than the process.
    #[must_use]
    pub fn new(key: [u8; 32]) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        let mut enters = Box::new([0; 256]);
        for (number, value) in (0_u64..).zip(enters.iter_mut()) {
            // Eight bytes are never a secret: these are longer.
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

    /// Holds a secret, without the blanks around it, and how it looks inside base64. False when it is shorter than 12 bytes: then it
    /// is not held, because it would be found everywhere.
    #[must_use = "a secret that is too short is not looked for"]
    pub fn add(&mut self, what: &'static str, secret: &[u8]) -> bool {
        let secret = secret.trim_ascii();
        if secret.len() < WINDOW {
            return false;
        }
        self.add_form(what, secret);
        for form in encoded::all_encodings(secret) {
            self.add_form(what, &form);
        }
        self.secrets.sort_by_key(|secret| secret.fingerprint);
        true
    }

    /// The window lies in the middle: how a secret begins is often the same for all of its kind, and then known to everybody.
    fn add_form(&mut self, what: &'static str, form: &[u8]) {
        let offset = (form.len() - WINDOW) / 2;
        let fingerprint = self.fingerprint(&form[offset..offset + WINDOW]);
        let (word, bit) = filter_place(fingerprint);
        self.filter[word] |= bit;
        self.longest = self.longest.max(form.len());
        self.secrets.push(Secret {
            what,
            fingerprint,
            offset,
            length: form.len(),
            tag: hmac::sign(&self.key, form),
        });
    }

    /// The longest form of a secret.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    pub(super) fn find(&self, bytes: &[u8]) -> Option<&'static str> {
        if self.secrets.is_empty() || bytes.len() < WINDOW {
            return None;
        }
        let (first, rest) = bytes.split_at(WINDOW);
        let mut fingerprint = self.fingerprint(first);
        for (start, (leaving, entering)) in bytes.iter().zip(rest).enumerate() {
            if self.is_likely(fingerprint)
                && let Some(what) = self.whole_at(bytes, start, fingerprint)
            {
                return Some(what);
            }
            fingerprint = fingerprint.rotate_left(1)
                ^ self.enters[usize::from(*entering)]
                ^ self.leaves[usize::from(*leaving)];
        }
        self.whole_at(bytes, rest.len(), fingerprint)
    }

    fn is_likely(&self, fingerprint: u64) -> bool {
        let (word, bit) = filter_place(fingerprint);
        self.filter[word] & bit != 0
    }

    /// The secret whose window starts here, when all of it is there.
    fn whole_at(&self, bytes: &[u8], window: usize, fingerprint: u64) -> Option<&'static str> {
        let first = self
            .secrets
            .partition_point(|secret| secret.fingerprint < fingerprint);
        let alike = self.secrets[first..]
            .iter()
            .take_while(|secret| secret.fingerprint == fingerprint);
        let mut whole = alike.filter(|secret| {
            let Some(start) = window.checked_sub(secret.offset) else {
                return false;
            };
            let Some(bytes) = bytes.get(start..start + secret.length) else {
                return false;
            };
            hmac::verify(&self.key, bytes, secret.tag.as_ref()).is_ok()
        });
        whole.next().map(|secret| secret.what)
    }

    fn fingerprint(&self, window: &[u8]) -> u64 {
        window.iter().fold(0, |fingerprint: u64, byte| {
            fingerprint.rotate_left(1) ^ self.enters[usize::from(*byte)]
        })
    }
}

/// Without the key.
impl fmt::Debug for Held {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Held")
            .field("forms", &self.secrets.len())
            .finish_non_exhaustive()
    }
}

fn filter_place(fingerprint: u64) -> (usize, u64) {
    let place = fingerprint >> (u64::BITS - FILTER_BITS);
    (
        usize::try_from(place >> 6).unwrap_or_default(),
        1 << (place & 63),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is quick about it: nearly every place is passed over by one look at the filter.
    #[test]
    fn few_places_are_looked_at_closely() {
        let mut held = Held::new([7; 32]);
        assert!(held.add("a secret", b"of no particular kind"));
        assert!(
            held.secrets
                .iter()
                .all(|secret| held.is_likely(secret.fingerprint))
        );
        let text: Vec<u8> = (0_u32..20_000).flat_map(u32::to_be_bytes).collect();
        let likely = text
            .windows(WINDOW)
            .filter(|window| held.is_likely(held.fingerprint(window)))
            .count();
        assert!(likely < 100, "{likely} of {}", text.len());
    }
}
