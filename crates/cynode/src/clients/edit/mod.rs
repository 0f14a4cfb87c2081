//! Sets or removes one entry of a configuration file, and keeps the rest of its text.
//!
//! Invariant: what an edit yields is read again, and differs from what was there in that entry
//! only. Otherwise the file is left alone.

mod json;
mod toml;
mod yaml;

use super::{
    entry::ConfigValue,
    table::{ConfigFormat, Place},
};

/// Where the entry belongs in a file.
#[derive(Clone, Copy, Debug)]
pub struct Spot<'a> {
    pub format: ConfigFormat,
    pub keys: &'a [&'a str],
    pub name: &'a str,
}

/// Why a file is not edited.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    #[error("it can't be read: {0}")]
    Syntax(String),
    #[error("{0} is not a map there")]
    NotAMap(String),
    #[error("{0} occurs twice there")]
    Twice(String),
    #[error("its form is not one that can be edited without touching more than the entry")]
    Form,
}

impl<'a> Spot<'a> {
    /// The spot in a file with this text.
    pub fn of(place: &'a Place, name: &'a str, text: &str) -> Self {
        let spot = |keys| Self {
            format: place.format,
            keys,
            name,
        };
        match place.other_keys {
            // An entry could have that name, too.
            Some(keys)
                if spot(keys)
                    .parent(text)
                    .is_ok_and(|map| map.is_some_and(|map| map.get("type").is_none())) =>
            {
                spot(keys)
            }
            _ => spot(place.keys),
        }
    }

    /// The map that holds the entries, if the file has it.
    fn parent(&self, text: &str) -> Result<Option<ConfigValue>, EditError> {
        Ok(self.parse(text)?.at(self.keys).cloned())
    }

    fn parse(&self, text: &str) -> Result<ConfigValue, EditError> {
        if text.trim().is_empty() {
            return Ok(ConfigValue::Map(Vec::new()));
        }
        match self.format {
            ConfigFormat::Json => json::parse(text),
            ConfigFormat::Toml => toml::parse(text),
            ConfigFormat::Yaml => yaml::parse(text),
        }
    }

    /// Parses the text, and checks that the entry has one place in it.
    fn parse_checked(&self, text: &str) -> Result<ConfigValue, EditError> {
        let root = self.parse(text)?;
        let mut node = Some(&root);
        for key in self.keys.iter().chain([&self.name]) {
            let Some(current) = node else { break };
            let ConfigValue::Map(fields) = current else {
                return Err(EditError::NotAMap(self.path_to(key)));
            };
            if fields.iter().filter(|(name, _)| name == key).count() > 1 {
                return Err(EditError::Twice(format!("'{key}'")));
            }
            node = current.get(key);
            // A key without a value counts as an empty map.
            if *key != self.name && node.is_some_and(is_null) {
                break;
            }
        }
        Ok(root)
    }

    /// The name of the map that should have a key.
    fn path_to(&self, key: &str) -> String {
        let above: Vec<&str> = self
            .keys
            .iter()
            .copied()
            .take_while(|other| *other != key)
            .collect();
        if above.is_empty() {
            "the whole file".to_owned()
        } else {
            format!("'{}'", above.join("."))
        }
    }

    /// The entry that a file has.
    pub fn entry(&self, text: &str) -> Result<Option<ConfigValue>, EditError> {
        Ok(self
            .parse_checked(text)?
            .at(self.keys)
            .and_then(|parent| parent.get(self.name))
            .cloned())
    }

    pub fn has(&self, text: &str, entry: &ConfigValue) -> Result<bool, EditError> {
        let known = self.entry(text)?.map(|known| self.comparable(known));
        Ok(known == Some(self.comparable(entry.clone())))
    }

    fn comparable(&self, node: ConfigValue) -> ConfigValue {
        let node = match self.format {
            ConfigFormat::Json | ConfigFormat::Toml => node,
            ConfigFormat::Yaml => node.textual(),
        };
        node.sorted()
    }

    /// The text with the entry.
    pub fn set(&self, text: &str, entry: &ConfigValue) -> Result<String, EditError> {
        let mut expected = self.parse_checked(text)?;
        let edited = match self.format {
            ConfigFormat::Json => json::set(text, *self, entry),
            ConfigFormat::Toml => toml::set(text, *self, entry),
            ConfigFormat::Yaml => yaml::set(text, *self, entry),
        }
        .ok_or(EditError::Form)?;
        let edited = with_line_ends_of(text, edited);
        drop_nulls(&mut expected, self.keys);
        expected.set(self.keys, self.name, Some(entry));
        self.verified(expected, edited)
    }

    /// The text without the entry; `None` if it has none.
    pub fn remove(&self, text: &str) -> Result<Option<String>, EditError> {
        if self.entry(text)?.is_none() {
            return Ok(None);
        }
        let mut expected = self.parse_checked(text)?;
        let edited = match self.format {
            ConfigFormat::Json => json::remove(text, *self),
            ConfigFormat::Toml => toml::remove(text, *self),
            ConfigFormat::Yaml => yaml::remove(text, *self),
        }
        .ok_or(EditError::Form)?;
        let edited = with_line_ends_of(text, edited);
        expected.set(self.keys, self.name, None);
        // A table of TOML exists only while it has something.
        if self.format == ConfigFormat::Toml
            && expected
                .at(self.keys)
                .is_some_and(ConfigValue::is_empty_map)
            && let Some((last, above)) = self.keys.split_last()
        {
            let mut without = expected.clone();
            without.set(above, last, None);
            if self.verified(without.clone(), edited.clone()).is_ok() {
                return Ok(Some(edited));
            }
        }
        self.verified(expected, edited).map(Some)
    }

    fn verified(&self, expected: ConfigValue, edited: String) -> Result<String, EditError> {
        let found = self.parse(&edited).map_err(|_| EditError::Form)?;
        if self.comparable(found) == self.comparable(expected) {
            Ok(edited)
        } else {
            Err(EditError::Form)
        }
    }
}

/// The edited text with the line ends of the original, if all of them are CRLF.
fn with_line_ends_of(original: &str, edited: String) -> String {
    let all = original.matches('\n').count();
    if all == 0 || original.matches("\r\n").count() != all {
        return edited;
    }
    edited.replace("\r\n", "\n").replace('\n', "\r\n")
}

/// Whether a key has no value.
fn is_null(node: &ConfigValue) -> bool {
    matches!(node, ConfigValue::Word(word) if word == "null")
}

/// Replaces a key without a value by an empty map.
fn drop_nulls(root: &mut ConfigValue, keys: &[&str]) {
    let Some((key, rest)) = keys.split_first() else {
        return;
    };
    if let ConfigValue::Map(fields) = root
        && let Some((_, node)) = fields.iter_mut().find(|(name, _)| name == key)
    {
        if is_null(node) {
            *node = ConfigValue::Map(Vec::new());
        }
        drop_nulls(node, rest);
    }
}
