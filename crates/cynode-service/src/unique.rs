//! Duplicate members in JSON objects. Derived types reject duplicate fields, but a map would keep
//! the last one.

use std::{collections::BTreeSet, fmt};

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// The first duplicate member, if any. Ignores texts that are not JSON.
pub(crate) fn duplicate_member(bytes: &[u8]) -> Option<String> {
    let error = serde_json::from_slice::<UniqueMembers>(bytes).err()?;
    error.is_data().then(|| error.to_string())
}

/// Any value without duplicate members.
struct UniqueMembers;

impl<'de> Deserialize<'de> for UniqueMembers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueMembersVisitor)
    }
}

struct UniqueMembersVisitor;

impl<'de> Visitor<'de> for UniqueMembersVisitor {
    type Value = UniqueMembers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<UniqueMembers, E> {
        Ok(UniqueMembers)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<UniqueMembers, E> {
        Ok(UniqueMembers)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<UniqueMembers, E> {
        Ok(UniqueMembers)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<UniqueMembers, E> {
        Ok(UniqueMembers)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<UniqueMembers, E> {
        Ok(UniqueMembers)
    }

    fn visit_unit<E: Error>(self) -> Result<UniqueMembers, E> {
        Ok(UniqueMembers)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<UniqueMembers, A::Error> {
        while list.next_element::<UniqueMembers>()?.is_some() {}
        Ok(UniqueMembers)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMembers, A::Error> {
        let mut names = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            map.next_value::<UniqueMembers>()?;
            if let Some(name) = names.replace(name) {
                return Err(A::Error::custom(format_args!("{name:?} is named twice")));
            }
        }
        Ok(UniqueMembers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_named_twice_is_found_at_any_depth() {
        for good in [
            "{}",
            r#"{"a":1,"b":{"a":[true,null,1.5,-1,"x"]}}"#,
            r#"[{"a":1},{"a":2}]"#,
            "broken",
        ] {
            assert_eq!(duplicate_member(good.as_bytes()), None, "{good}");
        }
        for bad in [
            r#"{"a":1,"a":1}"#,
            r#"{"x":{"a":1,"\u0061":2}}"#,
            r#"[[{"b":1,"a":{},"a":{}}]]"#,
        ] {
            assert!(
                duplicate_member(bad.as_bytes())
                    .is_some_and(|text| text.contains("\"a\" is named twice")),
                "{bad}"
            );
        }
    }
}
