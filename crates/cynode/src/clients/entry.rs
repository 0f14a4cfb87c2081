//! An entry of a client's configuration, before it is text, and the tree that a file is read as.

use serde_json::{Map, Value, json};

use super::table::Shape;

/// What a field of an entry holds.
#[derive(Clone, Copy, Debug)]
pub enum Field {
    Text(&'static str),
    Texts(&'static [&'static str]),
    Number(i64),
    Yes,
    /// The name of the entry.
    Name,
    /// The bridge program.
    Program,
    Arguments,
    /// The bridge and its arguments in one list.
    CommandLine,
    /// The bridge's environment variables; absent if there are none.
    Environment,
    Url,
    Headers,
}

/// The content of an entry, independent of the client's format.
#[derive(Clone, Debug)]
pub struct EntrySpec {
    pub name: String,
    pub program: String,
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    /// The address of the gateway, and a token for it.
    pub http: Option<(String, String)>,
}

/// A value in a configuration file. Maps keep their order and duplicate keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConfigValue {
    /// A string, or a date.
    Text(String),
    /// Any other value, in its original spelling.
    Word(String),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

impl EntrySpec {
    /// An entry with a name only, to be removed.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            program: String::new(),
            arguments: Vec::new(),
            environment: Vec::new(),
            http: None,
        }
    }

    /// The entry in the shape of a client.
    pub fn entry(&self, shape: Shape) -> ConfigValue {
        let fields = shape
            .iter()
            .map(|(key, field)| ((*key).to_owned(), self.node(*field)))
            .filter(|(_, node)| !node.is_empty_map());
        ConfigValue::Map(fields.collect())
    }

    fn node(&self, field: Field) -> ConfigValue {
        let text = |text: &str| ConfigValue::Text(text.to_owned());
        let texts =
            |texts: &mut dyn Iterator<Item = &str>| ConfigValue::List(texts.map(text).collect());
        let (url, token) = self.http.clone().unwrap_or_default();
        match field {
            Field::Text(fixed) => text(fixed),
            Field::Texts(fixed) => texts(&mut fixed.iter().copied()),
            Field::Number(number) => ConfigValue::Word(number.to_string()),
            Field::Yes => ConfigValue::Word("true".to_owned()),
            Field::Name => text(&self.name),
            Field::Program => text(&self.program),
            Field::Arguments => texts(&mut self.arguments.iter().map(String::as_str)),
            Field::CommandLine => {
                let program = std::iter::once(self.program.as_str());
                texts(&mut program.chain(self.arguments.iter().map(String::as_str)))
            }
            Field::Environment => ConfigValue::Map(
                self.environment
                    .iter()
                    .map(|(name, value)| (name.clone(), text(value)))
                    .collect(),
            ),
            Field::Url => ConfigValue::Text(url),
            Field::Headers => ConfigValue::Map(vec![(
                "Authorization".to_owned(),
                ConfigValue::Text(format!("Bearer {token}")),
            )]),
        }
    }
}

impl ConfigValue {
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Map(fields) => fields
                .iter()
                .find(|(name, _)| name == key)
                .map(|(_, node)| node),
            _ => None,
        }
    }

    pub fn at(&self, keys: &[&str]) -> Option<&Self> {
        keys.iter().try_fold(self, |node, key| node.get(key))
    }

    pub fn is_empty_map(&self) -> bool {
        matches!(self, Self::Map(fields) if fields.is_empty())
    }

    /// Sets the entry of a map, which is made if need be. `None` removes it.
    pub fn set(&mut self, keys: &[&str], name: &str, entry: Option<&Self>) {
        let Self::Map(fields) = self else { return };
        let Some((key, rest)) = keys.split_first() else {
            let known = fields.iter().position(|(key, _)| key == name);
            match (known, entry) {
                (Some(at), Some(entry)) => fields[at].1 = entry.clone(),
                (Some(at), None) => drop(fields.remove(at)),
                (None, Some(entry)) => fields.push((name.to_owned(), entry.clone())),
                (None, None) => {}
            }
            return;
        };
        if !fields.iter().any(|(name, _)| name == key) {
            if entry.is_none() {
                return;
            }
            fields.push(((*key).to_owned(), Self::Map(Vec::new())));
        }
        if let Some((_, inner)) = fields.iter_mut().find(|(name, _)| name == key) {
            inner.set(rest, name, entry);
        }
    }

    /// The tree without the order of maps.
    pub fn sorted(mut self) -> Self {
        self.sort();
        self
    }

    fn sort(&mut self) {
        match self {
            Self::Map(fields) => {
                for (_, node) in fields.iter_mut() {
                    node.sort();
                }
                fields.sort();
            }
            Self::List(items) => items.iter_mut().for_each(Self::sort),
            Self::Text(_) | Self::Word(_) => {}
        }
    }

    /// The tree with every scalar as text, for formats whose reader does not tell them apart.
    pub fn textual(self) -> Self {
        match self {
            Self::Word(word) => Self::Text(word),
            Self::List(items) => Self::List(items.into_iter().map(Self::textual).collect()),
            Self::Map(fields) => {
                let textual = |(key, node): (String, Self)| (key, node.textual());
                Self::Map(fields.into_iter().map(textual).collect())
            }
            Self::Text(text) => Self::Text(text),
        }
    }

    /// For `--output json`.
    pub fn value(&self) -> Value {
        match self {
            Self::Text(text) => json!(text),
            Self::Word(word) => serde_json::from_str(word).unwrap_or_else(|_| json!(word)),
            Self::List(items) => items.iter().map(Self::value).collect(),
            Self::Map(fields) => {
                let fields = fields.iter().map(|(key, node)| (key.clone(), node.value()));
                Value::Object(fields.collect::<Map<_, _>>())
            }
        }
    }
}
