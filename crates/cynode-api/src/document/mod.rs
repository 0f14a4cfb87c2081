//! A JSON reader that keeps duplicate fields, so that they can be reported with their path.
//!
//! Formats that refuse duplicate and unknown fields are read with it: jobs of `cynode-sba` and
//! requests to model servers.
//!
//! Invariant: reading stops as soon as a text exceeds its bounds, so the values of a text never
//! take more memory than the bounds allow.

use std::{cell::Cell, fmt};

use serde::{
    Serialize, Serializer,
    de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Number, Value};

pub(crate) mod violation;

pub use violation::{
    MAX_SHOWN_NAME, MAX_VIOLATIONS, Segment, Violation, ViolationCode, Violations, quote,
};

#[derive(Clone, Debug, PartialEq)]
pub enum JsonValue {
    Null,
    Boolean(bool),
    Number(Number),
    Text(String),
    List(Vec<Self>),
    Object(Members),
}

/// The fields of an object, in the order of the text.
pub type Members = Vec<(String, JsonValue)>;

/// Bounds of one text.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Size of the text. For a value that is already parsed, size of its strings and names.
    pub bytes: usize,
    /// Number of values and names.
    pub nodes: usize,
    /// Nesting of objects and lists. serde_json reads at most 127 levels.
    pub depth: usize,
}

impl JsonValue {
    pub fn read(text: &[u8], bounds: Bounds) -> Result<Self, Violations> {
        if text.len() > bounds.bytes {
            return Err(Overrun::Bytes.violation(bounds));
        }
        let mut deserializer = serde_json::Deserializer::from_slice(text);
        let value = Self::from_deserializer(&mut deserializer, bounds)?;
        match deserializer.end() {
            Ok(()) => Ok(value),
            Err(error) => Err(not_json(&error)),
        }
    }

    pub fn from_deserializer<'de, D>(deserializer: D, bounds: Bounds) -> Result<Self, Violations>
    where
        D: Deserializer<'de>,
    {
        let budget = Budget {
            bytes: Cell::new(bounds.bytes),
            nodes: Cell::new(bounds.nodes),
            overrun: Cell::new(None),
        };
        let reader = Reader {
            budget: &budget,
            depth: bounds.depth,
        };
        reader
            .deserialize(deserializer)
            .map_err(|error| match budget.overrun.get() {
                Some(overrun) => overrun.violation(bounds),
                None => not_json(&error),
            })
    }

    /// Converts to a `serde_json` value. The last of duplicate fields wins.
    #[must_use]
    pub fn into_value(self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Boolean(value) => Value::Bool(value),
            Self::Number(value) => Value::Number(value),
            Self::Text(value) => Value::String(value),
            Self::List(items) => items.into_iter().map(Self::into_value).collect(),
            Self::Object(members) => Value::Object(into_map(members)),
        }
    }

    /// The type of the value, with its article.
    #[must_use]
    pub const fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Boolean(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }
}

/// Keeps duplicate fields and the order of fields.
impl Serialize for JsonValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Boolean(value) => serializer.serialize_bool(*value),
            Self::Number(value) => value.serialize(serializer),
            Self::Text(value) => serializer.serialize_str(value),
            Self::List(items) => serializer.collect_seq(items),
            Self::Object(members) => {
                serializer.collect_map(members.iter().map(|(name, value)| (name, value)))
            }
        }
    }
}

/// The value of a field. Of duplicate fields, the first.
#[must_use]
pub fn get<'a>(members: &'a [(String, JsonValue)], name: &str) -> Option<&'a JsonValue> {
    members
        .iter()
        .find(|(member, _)| member == name)
        .map(|(_, value)| value)
}

pub(crate) fn into_map(members: Members) -> Map<String, Value> {
    let value = |(name, value): (String, JsonValue)| (name, value.into_value());
    members.into_iter().map(value).collect()
}

fn not_json(error: &dyn fmt::Display) -> Violations {
    Violations::single(ViolationCode::Syntax, &[], format!("is not JSON: {error}"))
}

#[derive(Clone, Copy, Debug)]
enum Overrun {
    Bytes,
    Nodes,
    Depth,
}

impl Overrun {
    fn violation(self, bounds: Bounds) -> Violations {
        let (code, message) = match self {
            Self::Bytes => (
                ViolationCode::TooLarge,
                format!("has more than {} bytes", bounds.bytes),
            ),
            Self::Nodes => (
                ViolationCode::TooLarge,
                format!("contains more than {} values and names", bounds.nodes),
            ),
            Self::Depth => (
                ViolationCode::TooDeep,
                format!("is nested deeper than {} levels", bounds.depth),
            ),
        };
        Violations::single(code, &[], message)
    }
}

/// The remaining budget.
struct Budget {
    bytes: Cell<usize>,
    nodes: Cell<usize>,
    overrun: Cell<Option<Overrun>>,
}

impl Budget {
    fn spend<E: serde::de::Error>(&self, bytes: usize) -> Result<(), E> {
        self.take(&self.nodes, 1, Overrun::Nodes)?;
        self.take(&self.bytes, bytes, Overrun::Bytes)
    }

    fn take<E: serde::de::Error>(
        &self,
        left: &Cell<usize>,
        amount: usize,
        overrun: Overrun,
    ) -> Result<(), E> {
        match left.get().checked_sub(amount) {
            Some(rest) => {
                left.set(rest);
                Ok(())
            }
            None => Err(self.exceeded(overrun)),
        }
    }

    fn exceeded<E: serde::de::Error>(&self, overrun: Overrun) -> E {
        self.overrun.set(Some(overrun));
        E::custom("exceeds a bound")
    }
}

#[derive(Clone, Copy)]
struct Reader<'a> {
    budget: &'a Budget,
    /// Remaining nesting levels.
    depth: usize,
}

impl Reader<'_> {
    fn nested<E: serde::de::Error>(self) -> Result<Self, E> {
        match self.depth.checked_sub(1) {
            Some(depth) => Ok(Self { depth, ..self }),
            None => Err(self.budget.exceeded(Overrun::Depth)),
        }
    }

    fn scalar<E: serde::de::Error>(self, value: JsonValue) -> Result<JsonValue, E> {
        self.budget.spend(0)?;
        Ok(value)
    }
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = JsonValue;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonValue, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = JsonValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<JsonValue, E> {
        self.scalar(JsonValue::Null)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<JsonValue, E> {
        self.scalar(JsonValue::Boolean(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<JsonValue, E> {
        self.scalar(JsonValue::Number(value.into()))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<JsonValue, E> {
        self.scalar(JsonValue::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<JsonValue, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("a number is not finite"))?;
        self.scalar(JsonValue::Number(number))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<JsonValue, E> {
        self.visit_string(text.to_owned())
    }

    fn visit_string<E: serde::de::Error>(self, text: String) -> Result<JsonValue, E> {
        self.budget.spend(text.len())?;
        Ok(JsonValue::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<JsonValue, A::Error> {
        self.budget.spend(0)?;
        let nested = self.nested()?;
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(nested)? {
            items.push(item);
        }
        Ok(JsonValue::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonValue, A::Error> {
        self.budget.spend(0)?;
        let nested = self.nested()?;
        let mut members = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            self.budget.spend(name.len())?;
            members.push((name, map.next_value_seed(nested)?));
        }
        Ok(JsonValue::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Bounds = Bounds {
        bytes: 40,
        nodes: 6,
        depth: 64,
    };
    const LARGE: Bounds = Bounds {
        bytes: 1_000,
        nodes: 1_000,
        depth: 64,
    };

    fn code(text: &str) -> Option<ViolationCode> {
        JsonValue::read(text.as_bytes(), SMALL)
            .err()
            .map(|violations| violations.errors[0].code)
    }

    #[test]
    fn a_text_may_reach_its_bounds_and_not_exceed_them() {
        assert_eq!(code("[0,1,2,3,4]"), None);
        assert_eq!(code("[0,1,2,3,4,5]"), Some(ViolationCode::TooLarge));
        assert_eq!(code(r#"{"a":0,"b":1}"#), None);
        assert_eq!(
            code(r#"{"a":0,"b":1,"c":2}"#),
            Some(ViolationCode::TooLarge)
        );
        assert_eq!(code(&format!("\"{}\"", "x".repeat(38))), None);
        assert_eq!(
            code(&format!("\"{}\"", "x".repeat(39))),
            Some(ViolationCode::TooLarge)
        );
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let read = |depth| JsonValue::read(nested(depth).as_bytes(), LARGE);
        assert!(read(LARGE.depth).is_ok());
        let error = read(LARGE.depth + 1).expect_err("too deep");
        assert_eq!(error.errors[0].code, ViolationCode::TooDeep);
    }

    #[test]
    fn a_value_that_was_parsed_before_has_the_same_bounds() {
        let read = |value: Value| JsonValue::from_deserializer(value, SMALL);
        assert!(read(Value::from("x".repeat(40))).is_ok());
        let error = read(Value::from("x".repeat(41))).expect_err("too large");
        assert_eq!(error.errors[0].code, ViolationCode::TooLarge);
    }

    #[test]
    fn duplicate_fields_are_kept_in_order() {
        let value = JsonValue::read(br#"{"b":null,"a":[true],"b":-1.5}"#, LARGE);
        let Ok(JsonValue::Object(members)) = value else {
            panic!("{value:?}")
        };
        let names: Vec<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["b", "a", "b"]);
    }

    #[test]
    fn a_value_is_written_as_it_was_read() {
        let text = r#"{"b":null,"a":[true,"\u0000\"é"],"b":-1.5,"":{},"n":18446744073709551615}"#;
        let value = JsonValue::read(text.as_bytes(), LARGE).expect("valid");
        assert_eq!(serde_json::to_string(&value).expect("serialised"), text);
    }

    #[test]
    fn text_that_is_not_json_is_a_syntax_error() {
        for text in [
            "",
            " ",
            "{",
            "{}{}",
            "{'a':1}",
            "[1,]",
            "NaN",
            "1e999",
            "\"\\ud800\"",
            "\u{feff}{}",
            "// x\n{}",
            "01",
        ] {
            assert_eq!(code(text), Some(ViolationCode::Syntax), "{text}");
        }
        let error = JsonValue::read(b"\"\xff\"", LARGE).expect_err("not UTF-8");
        assert_eq!(error.errors[0].code, ViolationCode::Syntax);
    }
}
