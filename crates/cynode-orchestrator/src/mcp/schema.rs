//! JSON schemas of what tools take and answer, from the same types that read and make it.

use std::sync::LazyLock;

use serde_json::{Map, Value};
use utoipa::{ToSchema, openapi::RefOr};

const COMPONENTS: &str = "#/components/schemas/";

/// The schemas of the user API. A type that holds another by a parameter does not name that one itself.
static DESCRIBED: LazyLock<Value> = LazyLock::new(|| {
    let mut schemas = crate::api::openapi()["components"]["schemas"].take();
    tidy(&mut schemas);
    schemas
});

/// The schema of a type, with all that it names below `$defs`.
pub(crate) fn of<T: ToSchema>() -> Map<String, Value> {
    let mut named = Vec::new();
    T::schemas(&mut named);
    let mut root = object(&T::schema());
    let mut needed = references(&Value::Object(root.clone()));
    let mut definitions = Map::new();
    while let Some(name) = needed.pop() {
        if definitions.contains_key(&name) {
            continue;
        }
        let found = named
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, found)| Value::Object(object(found)));
        let Some(found) = found.or_else(|| DESCRIBED.get(&name).cloned()) else {
            continue;
        };
        needed.extend(references(&found));
        definitions.insert(name, found);
    }
    root.insert("type".to_owned(), "object".into());
    if !definitions.is_empty() {
        root.insert("$defs".to_owned(), Value::Object(definitions));
    }
    root
}

fn object(schema: &RefOr<utoipa::openapi::Schema>) -> Map<String, Value> {
    let mut value = serde_json::to_value(schema).unwrap_or_default();
    tidy(&mut value);
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

/// References lead to `$defs`; an example is no part of a schema. What one of several shapes allows, another may too: a command that
/// has ended also has an id, as one has that has only begun.
fn tidy(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.remove("example");
            if let Some(shapes) = members.remove("oneOf") {
                members.insert("anyOf".to_owned(), shapes);
            }
            for (name, member) in members {
                match member {
                    Value::String(text) if name == "$ref" => {
                        *text = text.replace(COMPONENTS, "#/$defs/")
                    }
                    _ => tidy(member),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

fn references(value: &Value) -> Vec<String> {
    match value {
        Value::Object(members) => members
            .iter()
            .flat_map(|(name, member)| match member {
                Value::String(text) if name == "$ref" => text
                    .strip_prefix("#/$defs/")
                    .map(str::to_owned)
                    .into_iter()
                    .collect(),
                _ => references(member),
            })
            .collect(),
        Value::Array(items) => items.iter().flat_map(references).collect(),
        _ => Vec::new(),
    }
}
