//! JSON, with comments and trailing commas.

use jsonc_parser::{
    ParseOptions,
    ast::Value,
    cst::{CstInputValue, CstNode, CstObject, CstRootNode},
    parse_to_ast,
};

use super::{EditError, Spot};
use crate::clients::entry::ConfigValue;

/// What clients read: no other liberties than comments and trailing commas.
const OPTIONS: ParseOptions = ParseOptions {
    allow_comments: true,
    allow_loose_object_property_names: false,
    allow_trailing_commas: true,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

pub(super) fn parse(text: &str) -> Result<ConfigValue, EditError> {
    let parsed = parse_to_ast(text, &jsonc_parser::CollectOptions::default(), &OPTIONS)
        .map_err(|error| EditError::Syntax(error.to_string()))?;
    // A file that has comments only.
    Ok(parsed
        .value
        .map_or_else(|| ConfigValue::Map(Vec::new()), node))
}

fn node(value: Value<'_>) -> ConfigValue {
    match value {
        Value::StringLit(string) => ConfigValue::Text(string.value.into_owned()),
        Value::NumberLit(number) => ConfigValue::Word(number.value.to_owned()),
        Value::BooleanLit(boolean) => ConfigValue::Word(boolean.value.to_string()),
        Value::NullKeyword(_) => ConfigValue::Word("null".to_owned()),
        Value::Array(array) => ConfigValue::List(array.elements.into_iter().map(node).collect()),
        Value::Object(object) => ConfigValue::Map(
            object
                .properties
                .into_iter()
                .map(|property| (property.name.into_string(), node(property.value)))
                .collect(),
        ),
    }
}

fn input(node: &ConfigValue) -> CstInputValue {
    match node {
        ConfigValue::Text(text) => CstInputValue::String(text.clone()),
        ConfigValue::Word(word) => match word.as_str() {
            "true" => CstInputValue::Bool(true),
            "false" => CstInputValue::Bool(false),
            "null" => CstInputValue::Null,
            number => CstInputValue::Number(number.to_owned()),
        },
        ConfigValue::List(items) => CstInputValue::Array(items.iter().map(input).collect()),
        ConfigValue::Map(fields) => CstInputValue::Object(
            fields
                .iter()
                .map(|(key, node)| (key.clone(), input(node)))
                .collect(),
        ),
    }
}

/// The map below a key, which is made if there is none.
fn object(parent: &CstObject, key: &str) -> Option<CstObject> {
    match parent.get(key).and_then(|property| property.value()) {
        None | Some(CstNode::Leaf(jsonc_parser::cst::CstLeafNode::NullKeyword(_))) => {
            Some(parent.object_value_or_set(key))
        }
        Some(value) => value.as_object(),
    }
}

pub(super) fn set(text: &str, spot: Spot<'_>, entry: &ConfigValue) -> Option<String> {
    if text.trim().is_empty() {
        let mut root = ConfigValue::Map(Vec::new());
        root.set(spot.keys, spot.name, Some(entry));
        return Some(pretty(&root) + "\n");
    }
    let root = CstRootNode::parse(text, &OPTIONS).ok()?;
    let mut map = root.object_value_or_create()?;
    for key in spot.keys {
        map = object(&map, key)?;
    }
    match map.get(spot.name) {
        Some(property) => property.set_value(input(entry)),
        None => drop(map.append(spot.name, input(entry))),
    }
    Some(root.to_string())
}

pub(super) fn remove(text: &str, spot: Spot<'_>) -> Option<String> {
    let root = CstRootNode::parse(text, &OPTIONS).ok()?;
    let mut map = root.object_value()?;
    for key in spot.keys {
        map = map.object_value(key)?;
    }
    map.get(spot.name)?.remove();
    Some(root.to_string())
}

/// Indented text, in the order of the fields.
pub(super) fn pretty(node: &ConfigValue) -> String {
    fn write(node: &ConfigValue, indent: usize, text: &mut String) {
        let margin = |indent: usize| "  ".repeat(indent);
        match node {
            ConfigValue::Text(value) => {
                text.push_str(&serde_json::Value::from(value.as_str()).to_string());
            }
            ConfigValue::Word(word) => text.push_str(word),
            ConfigValue::List(items) => {
                text.push('[');
                for (number, item) in items.iter().enumerate() {
                    text.push_str(if number == 0 { "" } else { ", " });
                    write(item, indent, text);
                }
                text.push(']');
            }
            ConfigValue::Map(fields) if fields.is_empty() => text.push_str("{}"),
            ConfigValue::Map(fields) => {
                text.push('{');
                for (number, (key, value)) in fields.iter().enumerate() {
                    text.push_str(if number == 0 { "\n" } else { ",\n" });
                    text.push_str(&margin(indent + 1));
                    text.push_str(&serde_json::Value::from(key.as_str()).to_string());
                    text.push_str(": ");
                    write(value, indent + 1, text);
                }
                text.push('\n');
                text.push_str(&margin(indent));
                text.push('}');
            }
        }
    }
    let mut text = String::new();
    write(node, 0, &mut text);
    text
}
