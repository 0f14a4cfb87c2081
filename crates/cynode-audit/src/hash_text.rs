//! Hashes in hexadecimal.

use crate::Hash;

/// Accepts lowercase digits only, so that a hash has exactly one spelling.
pub(crate) fn decode(text: &str) -> Option<Hash> {
    if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return None;
    }
    let mut hash = Hash::default();
    hex::decode_to_slice(text, &mut hash).ok()?;
    Some(hash)
}

/// Serializes a hash as a hexadecimal string.
pub(crate) mod json {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    use crate::Hash;

    pub(crate) fn serialize<S: Serializer>(hash: &Hash, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(hash))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Hash, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        super::decode(&text)
            .ok_or_else(|| D::Error::custom("a hash must be 64 lowercase hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_parses_only_in_lowercase_hexadecimal() {
        let hash: Hash = std::array::from_fn(|index| u8::try_from(index * 8).expect("below 256"));
        let text = hex::encode(hash);
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
