//! TOML.

use toml_edit::{Array, DocumentMut, InlineTable, Item, Table, TableLike, Value};

use super::{EditError, Spot};
use crate::clients::entry::Node;

fn document(text: &str) -> Result<DocumentMut, EditError> {
    text.parse()
        .map_err(|error: toml_edit::TomlError| EditError::Syntax(error.message().to_owned()))
}

pub(super) fn parse(text: &str) -> Result<Node, EditError> {
    Ok(table(document(text)?.as_table()))
}

fn table(table: &dyn TableLike) -> Node {
    let fields = table.iter().map(|(key, item)| (key.to_owned(), node(item)));
    Node::Map(fields.collect())
}

fn node(item: &Item) -> Node {
    match item {
        Item::None => Node::Word("null".to_owned()),
        Item::Value(value) => scalar(value),
        Item::Table(inner) => table(inner),
        Item::ArrayOfTables(tables) => Node::List(tables.iter().map(|it| table(it)).collect()),
    }
}

fn scalar(value: &Value) -> Node {
    match value {
        Value::String(text) => Node::Text(text.value().clone()),
        Value::Integer(number) => Node::Word(number.value().to_string()),
        Value::Float(number) => Node::Word(number.value().to_string()),
        Value::Boolean(boolean) => Node::Word(boolean.value().to_string()),
        Value::Datetime(time) => Node::Text(time.value().to_string()),
        Value::Array(items) => Node::List(items.iter().map(scalar).collect()),
        Value::InlineTable(inner) => table(inner),
    }
}

/// A field of an entry. Entries have no tables within tables.
fn value(node: &Node) -> Option<Value> {
    Some(match node {
        Node::Text(text) => Value::from(text.as_str()),
        Node::Word(word) => match word.as_str() {
            "true" => Value::from(true),
            "false" => Value::from(false),
            number => Value::from(number.parse::<i64>().ok()?),
        },
        Node::List(items) => Value::Array(items.iter().map(value).collect::<Option<Array>>()?),
        Node::Map(fields) => {
            let mut inner = InlineTable::new();
            for (key, node) in fields {
                inner.insert(key, value(node)?);
            }
            Value::InlineTable(inner)
        }
    })
}

pub(super) fn set(text: &str, spot: Spot<'_>, entry: &Node) -> Option<String> {
    let mut document = document(text).ok()?;
    let Node::Map(fields) = entry else {
        return None;
    };
    let mut map: &mut dyn TableLike = document.as_table_mut();
    for key in spot.keys {
        // A table without keys of its own has no header.
        let mut made = Table::new();
        made.set_implicit(true);
        map = map
            .entry(key)
            .or_insert(Item::Table(made))
            .as_table_like_mut()?;
    }
    // The fields of a known entry keep their place.
    let is_table = map.get(spot.name).is_some_and(Item::is_table_like);
    if !is_table {
        map.insert(spot.name, Item::Table(Table::new()));
    }
    let known = map.get_mut(spot.name)?.as_table_like_mut()?;
    let superfluous: Vec<String> = known
        .iter()
        .map(|(key, _)| key.to_owned())
        .filter(|key| entry.get(key).is_none())
        .collect();
    for key in superfluous {
        known.remove(&key);
    }
    for (key, field) in fields {
        known.insert(key, Item::Value(value(field)?));
    }
    Some(document.to_string())
}

pub(super) fn remove(text: &str, spot: Spot<'_>) -> Option<String> {
    let mut document = document(text).ok()?;
    let mut map: &mut dyn TableLike = document.as_table_mut();
    for key in spot.keys {
        map = map.get_mut(key)?.as_table_like_mut()?;
    }
    map.remove(spot.name)?;
    Some(document.to_string())
}
