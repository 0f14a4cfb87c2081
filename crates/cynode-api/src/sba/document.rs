//! JSON as it was written: duplicate fields are kept, so that they can be reported with their path.
//!
//! Invariant: reading stops as soon as a text exceeds its bounds, so the values of a text never
//! take more memory than the bounds allow.

use std::{cell::Cell, fmt};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::{
    limits::{MAX_DEPTH, MAX_JOB_BYTES, MAX_JOB_NODES, MAX_RESULT_BYTES, MAX_RESULT_NODES},
    violation::{ViolationCode, Violations},
};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum JsonValue {
    Null,
    Boolean(bool),
    Number(Number),
    Text(String),
    List(Vec<Self>),
    Object(Members),
}

/// The fields of an object, in the order of the text.
pub(super) type Members = Vec<(String, JsonValue)>;

/// Bounds of one text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Of the text; of a value that was parsed before, of its strings and names.
    pub(super) bytes: usize,
    pub(super) nodes: usize,
}

impl Bounds {
    pub(super) const JOB: Self = Self {
        bytes: MAX_JOB_BYTES,
        nodes: MAX_JOB_NODES,
    };
    pub(super) const RESULT: Self = Self {
        bytes: MAX_RESULT_BYTES,
        nodes: MAX_RESULT_NODES,
    };
}

impl JsonValue {
    pub(super) fn read(text: &[u8], bounds: Bounds) -> Result<Self, Violations> {
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

    pub(super) fn from_deserializer<'de, D>(
        deserializer: D,
        bounds: Bounds,
    ) -> Result<Self, Violations>
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
            depth: MAX_DEPTH,
        };
        reader
            .deserialize(deserializer)
            .map_err(|error| match budget.overrun.get() {
                Some(overrun) => overrun.violation(bounds),
                None => not_json(&error),
            })
    }

    /// The value, in which the last of duplicate fields wins.
    pub(super) fn into_value(self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Boolean(value) => Value::Bool(value),
            Self::Number(value) => Value::Number(value),
            Self::Text(value) => Value::String(value),
            Self::List(items) => items.into_iter().map(Self::into_value).collect(),
            Self::Object(members) => Value::Object(into_map(members)),
        }
    }
}

pub(super) fn into_map(members: Members) -> Map<String, Value> {
    let value = |(name, value): (String, JsonValue)| (name, value.into_value());
    members.into_iter().map(value).collect()
}

fn not_json(error: &dyn fmt::Display) -> Violations {
    Violations::only(ViolationCode::Syntax, &[], format!("is not JSON: {error}"))
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
                format!("is nested deeper than {MAX_DEPTH} levels"),
            ),
        };
        Violations::only(code, &[], message)
    }
}

/// What is left of the bounds.
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
    /// Levels that a value here may have.
    depth: usize,
}

impl Reader<'_> {
    fn inner<E: serde::de::Error>(self) -> Result<Self, E> {
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
        let inner = self.inner()?;
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(inner)? {
            items.push(item);
        }
        Ok(JsonValue::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonValue, A::Error> {
        self.budget.spend(0)?;
        let inner = self.inner()?;
        let mut members = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            self.budget.spend(name.len())?;
            members.push((name, map.next_value_seed(inner)?));
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
        let read = |depth| JsonValue::read(nested(depth).as_bytes(), Bounds::JOB);
        assert!(read(MAX_DEPTH).is_ok());
        let error = read(MAX_DEPTH + 1).expect_err("too deep");
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
        let value = JsonValue::read(br#"{"b":null,"a":[true],"b":-1.5}"#, Bounds::JOB);
        let Ok(JsonValue::Object(members)) = value else {
            panic!("{value:?}")
        };
        let names: Vec<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["b", "a", "b"]);
    }

    #[test]
    fn what_is_not_json_is_a_syntax_error() {
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
        let error = JsonValue::read(b"\"\xff\"", Bounds::JOB).expect_err("not UTF-8");
        assert_eq!(error.errors[0].code, ViolationCode::Syntax);
    }
}
