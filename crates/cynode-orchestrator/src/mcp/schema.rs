//! JSON schemas of the arguments and results of tools, from the types that parse and build them.

use std::sync::LazyLock;

use serde_json::{Map, Value};
use utoipa::{ToSchema, openapi::RefOr};

const COMPONENTS: &str = "#/components/schemas/";

/// The schemas of the user API. Generic types do not list the schemas of their parameters, which
/// are therefore looked up here.
static API_SCHEMAS: LazyLock<Value> = LazyLock::new(|| {
    let mut schemas = crate::api::openapi()["components"]["schemas"].take();
    normalize(&mut schemas);
    schemas
});

/// The schema of a type, with everything that it references below `$defs`.
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
        let definition = named
            .iter()
            .find(|(candidate, _)| *candidate == name)
            .map(|(_, schema)| Value::Object(object(schema)));
        let Some(definition) = definition.or_else(|| API_SCHEMAS.get(&name).cloned()) else {
            continue;
        };
        needed.extend(references(&definition));
        definitions.insert(name, definition);
    }
    root.insert("type".to_owned(), "object".into());
    if !definitions.is_empty() {
        root.insert("$defs".to_owned(), Value::Object(definitions));
    }
    root
}

/// The schema in fewer words, for models: without formats, bounds and null, which the parser
/// checks.
pub(crate) fn compact(schema: &Map<String, Value>) -> Map<String, Value> {
    let mut schema = Value::Object(schema.clone());
    shorten(&mut schema);
    match schema {
        Value::Object(mut members) => {
            members.remove("additionalProperties");
            members
        }
        _ => Map::new(),
    }
}

fn shorten(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for name in ["format", "minimum", "propertyNames"] {
                // A property may have such a name; then it is an object.
                if members.get(name).is_some_and(|member| !member.is_object())
                    || name == "propertyNames"
                {
                    members.remove(name);
                }
            }
            if let Some(Value::Array(types)) = members.get_mut("type") {
                types.retain(|name| name != "null");
                if let [one] = types.as_slice() {
                    let one = one.clone();
                    members.insert("type".to_owned(), one);
                }
            }
            members.values_mut().for_each(shorten);
        }
        Value::Array(items) => items.iter_mut().for_each(shorten),
        _ => {}
    }
}

fn object(schema: &RefOr<utoipa::openapi::Schema>) -> Map<String, Value> {
    let mut value = serde_json::to_value(schema).unwrap_or_default();
    normalize(&mut value);
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

/// Points references to `$defs`, removes examples, and turns `oneOf` into `anyOf`, because
/// alternatives overlap: a finished command has an id, as an accepted one has.
fn normalize(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.remove("example");
            if let Some(shapes) = members.remove("oneOf") {
                members.insert("anyOf".to_owned(), shapes);
            }
            for (name, member) in members {
                match member {
                    Value::String(text) if name == "$ref" => {
                        *text = text.replace(COMPONENTS, "#/$defs/");
                    }
                    _ => normalize(member),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(normalize),
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
