//! JSON objects that name a member twice. Types refuse doubled fields by themselves, but a map would keep the last one.

use std::{collections::BTreeSet, fmt};

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Says which member is named twice, when one is. What is no JSON is not its business.
pub(crate) fn doubled(bytes: &[u8]) -> Option<String> {
    let error = serde_json::from_slice::<Checked>(bytes).err()?;
    error.is_data().then(|| error.to_string())
}

/// Any value in which no object names a member twice.
struct Checked;

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Check)
    }
}

struct Check;

impl<'de> Visitor<'de> for Check {
    type Value = Checked;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_unit<E: Error>(self) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Checked, A::Error> {
        while list.next_element::<Checked>()?.is_some() {}
        Ok(Checked)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Checked, A::Error> {
        let mut names = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            map.next_value::<Checked>()?;
            if let Some(name) = names.replace(name) {
                return Err(A::Error::custom(format_args!("{name:?} is named twice")));
            }
        }
        Ok(Checked)
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
            assert_eq!(doubled(good.as_bytes()), None, "{good}");
        }
        for bad in [
            r#"{"a":1,"a":1}"#,
            r#"{"x":{"a":1,"\u0061":2}}"#,
            r#"[[{"b":1,"a":{},"a":{}}]]"#,
        ] {
            assert!(
                doubled(bad.as_bytes()).is_some_and(|text| text.contains("\"a\" is named twice")),
                "{bad}"
            );
        }
    }
}
