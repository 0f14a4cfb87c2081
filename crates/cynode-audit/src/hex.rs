//! Hashes as text.

use crate::Hash;

pub(crate) fn encode(hash: &Hash) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    hash.iter()
        .flat_map(|byte| {
            [
                DIGITS[usize::from(byte >> 4)],
                DIGITS[usize::from(byte & 15)],
            ]
        })
        .map(char::from)
        .collect()
}

/// Only what [`encode`] writes: a hash has one spelling.
pub(crate) fn decode(text: &str) -> Option<Hash> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let mut hash = Hash::default();
    if pairs.len() != hash.len() || !rest.is_empty() {
        return None;
    }
    for (byte, [high, low]) in hash.iter_mut().zip(pairs) {
        *byte = (digit(*high)? << 4) | digit(*low)?;
    }
    Some(hash)
}

/// A hash as a member of JSON.
pub(crate) mod json {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    use crate::Hash;

    pub(crate) fn serialize<S: Serializer>(hash: &Hash, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::encode(hash))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Hash, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        super::decode(&text)
            .ok_or_else(|| D::Error::custom("a hash must be 64 small hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_reads_as_it_was_written_and_in_no_other_way() {
        let hash: Hash = std::array::from_fn(|index| u8::try_from(index * 8).expect("below 256"));
        let text = encode(&hash);
        assert_eq!(decode(&text), Some(hash));
        for other in [
            text.to_uppercase(),
            text[1..].to_owned(),
            format!("{text}0"),
            format!("{text}00"),
            text.replace('0', "g"),
            "ü".repeat(32),
        ] {
            assert_eq!(decode(&other), None, "{other}");
        }
    }
}
