//! Refuses messages with a name that occurs twice in one object: serde_json keeps the last value,
//! and another parser may keep the first.

use std::{collections::HashSet, fmt};

use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

/// Characters of a name that the message repeats.
const SHOWN_NAME_CHARACTERS: usize = 64;

/// The name that occurs twice in an object of a JSON text, if any. What is not JSON is left to its
/// parser.
pub(super) fn duplicate_name(text: &[u8]) -> Option<String> {
    let mut found = None;
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    // Fails at a duplicate, and where the text is not JSON.
    drop(NameCheck(&mut found).deserialize(&mut deserializer));
    found
}

/// Reads a value and keeps nothing but the names of the objects around it.
struct NameCheck<'a>(&'a mut Option<String>);

impl<'de> DeserializeSeed<'de> for NameCheck<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for NameCheck<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(NameCheck(&mut *self.0))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<(), A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = object.next_key::<String>()? {
            if names.contains(&name) {
                let shown: String = name.chars().take(SHOWN_NAME_CHARACTERS).collect();
                *self.0 = Some(cynode_audit::escape_line(&shown));
                object.next_value::<IgnoredAny>()?;
                return Err(A::Error::custom("a duplicate"));
            }
            names.insert(name);
            object.next_value_seed(NameCheck(&mut *self.0))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_occurs_twice_in_one_object_is_found_at_any_depth() {
        for (text, expected) in [
            (r#"{"a":1,"b":2}"#, None),
            (
                r#"{"a":{"x":1},"b":{"x":1.5},"c":[{"x":null},{"x":"a"}]}"#,
                None,
            ),
            (r#"{"a":1,"a":1}"#, Some("a")),
            (
                r#"{"params":{"arguments":{"path":"x","path":"y"}}}"#,
                Some("path"),
            ),
            (
                r#"{"a":[true,{"e\n":1,"b":-2,"e\u000a":{}}]}"#,
                Some("e\\n"),
            ),
            ("not json", None),
            (r#"{"a":1,"#, None),
            ("", None),
        ] {
            assert_eq!(
                duplicate_name(text.as_bytes()).as_deref(),
                expected,
                "{text}"
            );
        }
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(duplicate_name(deep.as_bytes()), None);
    }
}
