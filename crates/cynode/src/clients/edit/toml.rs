//! TOML.

use toml_edit::{Array, DocumentMut, InlineTable, Item, Table, TableLike, Value};

use super::{EditError, Spot};
use crate::clients::entry::ConfigValue;

fn document(text: &str) -> Result<DocumentMut, EditError> {
    text.parse()
        .map_err(|error: toml_edit::TomlError| EditError::Syntax(error.message().to_owned()))
}

pub(super) fn parse(text: &str) -> Result<ConfigValue, EditError> {
    Ok(table(document(text)?.as_table()))
}

fn table(table: &dyn TableLike) -> ConfigValue {
    let fields = table.iter().map(|(key, item)| (key.to_owned(), node(item)));
    ConfigValue::Map(fields.collect())
}

fn node(item: &Item) -> ConfigValue {
    match item {
        Item::None => ConfigValue::Word("null".to_owned()),
        Item::Value(value) => scalar(value),
        Item::Table(inner) => table(inner),
        Item::ArrayOfTables(tables) => {
            ConfigValue::List(tables.iter().map(|it| table(it)).collect())
        }
    }
}

fn scalar(value: &Value) -> ConfigValue {
    match value {
        Value::String(text) => ConfigValue::Text(text.value().clone()),
        Value::Integer(number) => ConfigValue::Word(number.value().to_string()),
        Value::Float(number) => ConfigValue::Word(number.value().to_string()),
        Value::Boolean(boolean) => ConfigValue::Word(boolean.value().to_string()),
        Value::Datetime(time) => ConfigValue::Text(time.value().to_string()),
        Value::Array(items) => ConfigValue::List(items.iter().map(scalar).collect()),
        Value::InlineTable(inner) => table(inner),
    }
}

/// A field of an entry. Entries have no tables within tables.
fn value(node: &ConfigValue) -> Option<Value> {
    Some(match node {
        ConfigValue::Text(text) => Value::from(text.as_str()),
        ConfigValue::Word(word) => match word.as_str() {
            "true" => Value::from(true),
            "false" => Value::from(false),
            number => Value::from(number.parse::<i64>().ok()?),
        },
        ConfigValue::List(items) => {
            Value::Array(items.iter().map(value).collect::<Option<Array>>()?)
        }
        ConfigValue::Map(fields) => {
            let mut inner = InlineTable::new();
            for (key, node) in fields {
                inner.insert(key, value(node)?);
            }
            Value::InlineTable(inner)
        }
    })
}

pub(super) fn set(text: &str, spot: Spot<'_>, entry: &ConfigValue) -> Option<String> {
    let mut document = document(text).ok()?;
    let ConfigValue::Map(fields) = entry else {
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
