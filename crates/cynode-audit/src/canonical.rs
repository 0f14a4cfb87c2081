//! Canonical JSON: equal values have equal text and therefore equal hashes, whatever stored them.

use std::borrow::Cow;

use serde_json::{Map, Value};

/// Values nested deeper are not chained: many JSON parsers refuse them.
const MAX_DEPTH: usize = 64;

/// The reason why a value has no canonical text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotChainable {
    #[error("a number is not a 64-bit integer")]
    Number,
    #[error("the value is nested too deeply")]
    Depth,
}

/// Sorts members by name at every level, omits whitespace and allows only integers. Never relies on
/// the map's own order: any crate can enable serde_json's `preserve_order`.
pub fn canonical(value: &Value) -> Result<String, NotChainable> {
    let mut out = Vec::with_capacity(512);
    write(value, 0, &mut out)?;
    Ok(String::from_utf8(out).expect("JSON is UTF-8"))
}

pub(crate) fn write(value: &Value, depth: usize, out: &mut Vec<u8>) -> Result<(), NotChainable> {
    if depth > MAX_DEPTH {
        return Err(NotChainable::Depth);
    }
    match value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Bool(true) => out.extend_from_slice(b"true"),
        Value::Bool(false) => out.extend_from_slice(b"false"),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => out.extend_from_slice(number.to_string().as_bytes()),
            (None, Some(number)) => out.extend_from_slice(number.to_string().as_bytes()),
            (None, None) => return Err(NotChainable::Number),
        },
        Value::String(text) => string(text, out),
        Value::Array(items) => {
            out.push(b'[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                write(item, depth + 1, out)?;
            }
            out.push(b']');
        }
        Value::Object(members) => {
            out.push(b'{');
            if members.keys().is_sorted() {
                write_members(members.iter(), depth, out)?;
            } else {
                let mut members: Vec<(&String, &Value)> = members.iter().collect();
                members.sort_unstable_by_key(|(name, _)| *name);
                write_members(members.into_iter(), depth, out)?;
            }
            out.push(b'}');
        }
    }
    Ok(())
}

fn write_members<'a>(
    members: impl Iterator<Item = (&'a String, &'a Value)>,
    depth: usize,
    out: &mut Vec<u8>,
) -> Result<(), NotChainable> {
    for (index, (name, member)) in members.enumerate() {
        if index > 0 {
            out.push(b',');
        }
        string(name, out);
        out.push(b':');
        write(member, depth + 1, out)?;
    }
    Ok(())
}

fn string(text: &str, out: &mut Vec<u8>) {
    if text
        .bytes()
        .all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\')
    {
        out.push(b'"');
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
        return;
    }
    serde_json::to_writer(out, text).expect("writing a string to memory does not fail");
}

/// Replaces what can't be chained or stored unchanged, so that no record is lost because of what a
/// caller put into it: a number that is not an integer becomes text, NUL, which PostgreSQL refuses,
/// becomes its picture, and values nested too deeply are dropped.
pub(crate) fn sanitize(value: Value) -> Value {
    sanitize_at(value, 0)
}

fn sanitize_at(value: Value, depth: usize) -> Value {
    match value {
        Value::Array(_) | Value::Object(_) if depth == MAX_DEPTH => {
            Value::from("(nested too deeply)")
        }
        Value::Number(number) if number.as_u64().is_none() && number.as_i64().is_none() => {
            Value::from(number.to_string())
        }
        Value::String(text) => Value::from(sanitize_text(text)),
        Value::Array(items) => items
            .into_iter()
            .map(|item| sanitize_at(item, depth + 1))
            .collect(),
        Value::Object(members) => Value::Object(
            members
                .into_iter()
                .map(|(name, member)| (sanitize_text(name), sanitize_at(member, depth + 1)))
                .collect::<Map<_, _>>(),
        ),
        other => other,
    }
}

fn sanitize_text(text: String) -> String {
    match without_nul(&text) {
        Cow::Borrowed(_) => text,
        Cow::Owned(sanitized) => sanitized,
    }
}

fn without_nul(text: &str) -> Cow<'_, str> {
    if text.contains('\0') {
        Cow::Owned(text.replace('\0', "\u{2400}"))
    } else {
        Cow::Borrowed(text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn strings_are_written_as_serde_json_writes_them() {
        for code in 0..=0x3000 {
            let text = format!(
                "a{}",
                char::from_u32(code).expect("there are no surrogates in this range")
            );
            assert_eq!(
                canonical(&Value::from(text.as_str())),
                Ok(serde_json::to_string(&text).expect("text serializes"))
            );
        }
    }

    #[test]
    fn members_are_sorted_at_every_level_and_nothing_is_added() {
        let value = json!({
            "b": [1, {"z": null, "a": "ü\n\"\u{1}"}],
            "a": {"é": true, "e": -1},
            "": u64::MAX,
        });
        assert_eq!(
            canonical(&value).expect("canonical"),
            r#"{"":18446744073709551615,"a":{"e":-1,"é":true},"b":[1,{"a":"ü\n\"\u0001","z":null}]}"#
        );
    }

    #[test]
    fn a_number_that_is_not_an_integer_is_refused() {
        for value in [json!(1.5), json!([{"a": 1e300}]), json!(-0.0), json!(1.0)] {
            assert_eq!(canonical(&value), Err(NotChainable::Number), "{value}");
        }
    }

    #[test]
    fn values_that_stores_refuse_are_sanitized() {
        let mut deep = json!(1);
        for _ in 0..200 {
            deep = json!([deep]);
        }
        assert_eq!(canonical(&json!({"a": deep})), Err(NotChainable::Depth));
        let sanitized = sanitize(json!({"a\0": 1.5, "b": ["x\0y"], "c": deep}));
        assert_eq!(
            (&sanitized["a\u{2400}"], &sanitized["b"]),
            (&json!("1.5"), &json!(["x\u{2400}y"]))
        );
        let text = canonical(&sanitized).expect("canonical after sanitizing");
        assert_eq!(
            serde_json::from_str::<Value>(&text).expect("valid JSON"),
            sanitized
        );
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((".*", inner), 0..6)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn sanitizing_is_idempotent_and_the_result_round_trips(value in values()) {
            let sanitized = sanitize(value);
            prop_assert_eq!(&sanitize(sanitized.clone()), &sanitized);
            let text = canonical(&sanitized).expect("sanitized values are canonical");
            let read: Value = serde_json::from_str(&text).expect("canonical text is JSON");
            prop_assert_eq!(&read, &sanitized);
            prop_assert_eq!(canonical(&read).expect("still canonical"), text);
        }
    }
}
