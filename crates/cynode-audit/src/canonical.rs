//! One spelling for each JSON value, so that equal values have equal hashes whatever stored them.

use std::borrow::Cow;

use serde_json::{Map, Value};

/// Deeper than this nothing is chained: readers of JSON refuse what is nested much deeper.
const MAX_DEPTH: usize = 64;

/// Why a value has no canonical spelling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotChainable {
    #[error("a number is not an integer of 64 bits")]
    Number,
    #[error("it is nested too deeply")]
    Depth,
}

/// Members sorted by name at every level, no spaces, integers only. The map's own order is never trusted: any crate can
/// switch serde_json to keep the order of insertion.
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

/// What can be chained and comes back from any store as it went in: a record must not be lost because of what a caller
/// put into it. Numbers that are not integers become text, NUL, which PostgreSQL refuses, becomes its picture, and what is
/// nested too deeply is left out.
pub(crate) fn fit(value: Value) -> Value {
    fit_at(value, 0)
}

fn fit_at(value: Value, depth: usize) -> Value {
    match value {
        Value::Array(_) | Value::Object(_) if depth == MAX_DEPTH => {
            Value::from("(nested too deeply)")
        }
        Value::Number(number) if number.as_u64().is_none() && number.as_i64().is_none() => {
            Value::from(number.to_string())
        }
        Value::String(text) => Value::from(fit_text(text)),
        Value::Array(items) => items
            .into_iter()
            .map(|item| fit_at(item, depth + 1))
            .collect(),
        Value::Object(members) => Value::Object(
            members
                .into_iter()
                .map(|(name, member)| (fit_text(name), fit_at(member, depth + 1)))
                .collect::<Map<_, _>>(),
        ),
        other => other,
    }
}

fn fit_text(text: String) -> String {
    match without_nul(&text) {
        Cow::Borrowed(_) => text,
        Cow::Owned(fitting) => fitting,
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
            let text = format!("a{}", char::from_u32(code).expect("no surrogate is below"));
            assert_eq!(
                canonical(&Value::from(text.as_str())),
                Ok(serde_json::to_string(&text).expect("text serialises"))
            );
        }
    }

    #[test]
    fn members_are_sorted_at_every_level_and_nothing_is_added() {
        let value = json!({"b": [1, {"z": null, "a": "ü\n\"\u{1}"}], "a": {"é": true, "e": -1}, "": u64::MAX});
        assert_eq!(
            canonical(&value).expect("it is canonical"),
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
    fn what_no_store_takes_is_made_fit() {
        let mut deep = json!(1);
        for _ in 0..200 {
            deep = json!([deep]);
        }
        assert_eq!(canonical(&json!({"a": deep})), Err(NotChainable::Depth));
        let fitting = fit(json!({"a\0": 1.5, "b": ["x\0y"], "c": deep}));
        assert_eq!(
            (&fitting["a\u{2400}"], &fitting["b"]),
            (&json!("1.5"), &json!(["x\u{2400}y"]))
        );
        let text = canonical(&fitting).expect("it is canonical now");
        assert_eq!(
            serde_json::from_str::<Value>(&text).expect("it can be read"),
            fitting
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
        fn what_is_fit_stays_as_it_is_and_reads_back_as_itself(value in values()) {
            let fitting = fit(value);
            prop_assert_eq!(&fit(fitting.clone()), &fitting);
            let text = canonical(&fitting).expect("what fits is canonical");
            let read: Value = serde_json::from_str(&text).expect("canonical text is JSON");
            prop_assert_eq!(&read, &fitting);
            prop_assert_eq!(canonical(&read).expect("it still is"), text);
        }
    }
}
