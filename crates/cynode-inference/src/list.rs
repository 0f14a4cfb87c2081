//! Filters the lists of models that servers return.
//!
//! Only known fields of known types are kept, each bounded. Models that a sandbox may not use, and
//! the server's files and hosts, are removed.

use cynode_api::{
    document::{Bounds, JsonValue, Members, ViolationCode, Violations, get},
    sba::limits::MAX_MODEL_BYTES,
};

use crate::{
    limits::{
        MAX_LIST_BYTES, MAX_LIST_DEPTH, MAX_LIST_NODES, MAX_LISTED_ITEMS, MAX_LISTED_MODELS,
        MAX_LISTED_TEXT_BYTES,
    },
    models::{AllowedModels, same_model},
    refusal::Refusal,
};

pub(crate) const LIST_BOUNDS: Bounds = Bounds {
    bytes: MAX_LIST_BYTES,
    nodes: MAX_LIST_NODES,
    depth: MAX_LIST_DEPTH,
};

/// Where a model runs, as its server reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locality {
    Local,
    /// On another host: requests to the model leave the node.
    External,
    /// Not reported: OpenAI's API has no field for it.
    Unknown,
}

/// A model in a server's list.
#[derive(Clone, Debug, PartialEq)]
pub struct ServedModel {
    /// The server's name of the model.
    pub name: String,
    pub locality: Locality,
    /// The fields that a sandbox sees.
    shown: Members,
}

/// The models of a server.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelList {
    pub models: Vec<ServedModel>,
    is_openai: bool,
}

impl ModelList {
    /// Reads an answer to `GET /api/tags`.
    pub fn read_tags(json: &[u8]) -> Result<Self, Refusal> {
        Self::read(json, "models", tagged).map(|models| Self {
            models,
            is_openai: false,
        })
    }

    /// Reads an answer to `GET /v1/models`.
    pub fn read_models(json: &[u8]) -> Result<Self, Refusal> {
        Self::read(json, "data", listed).map(|models| Self {
            models,
            is_openai: true,
        })
    }

    /// Reads the list in a field. Skips entries without a valid name.
    fn read(
        json: &[u8],
        field: &str,
        model: fn(&Members) -> Option<ServedModel>,
    ) -> Result<Vec<ServedModel>, Refusal> {
        let unreadable = |violations| Refusal::unreadable("list of models", &violations);
        let members = read_object(json).map_err(unreadable)?;
        let entries = match get(&members, field) {
            Some(JsonValue::List(entries)) if entries.len() <= MAX_LISTED_MODELS => entries,
            // Ollama lists no models as null.
            None | Some(JsonValue::Null) => return Ok(Vec::new()),
            Some(_) => {
                let message = format!("{field} must be a list of at most {MAX_LISTED_MODELS}");
                return Err(unreadable(Violations::single(
                    ViolationCode::InvalidValue,
                    &[],
                    message,
                )));
            }
        };
        let models = entries.iter().filter_map(|entry| match entry {
            JsonValue::Object(members) => model(members),
            _ => None,
        });
        Ok(models.collect())
    }

    /// Finds the model that an entry of the allowed list names.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&ServedModel> {
        let exact = self.models.iter().find(|model| model.name == name);
        exact.or_else(|| {
            self.models
                .iter()
                .find(|model| same_model(&model.name, name))
        })
    }

    /// Removes the models that a sandbox may not use.
    pub fn retain_allowed(&mut self, allowed: &AllowedModels) {
        self.models
            .retain(|model| allowed.find(&model.name).is_some());
    }

    /// Removes the models that run on another host.
    pub fn remove_external(&mut self) {
        self.models
            .retain(|model| model.locality != Locality::External);
    }

    /// The filtered answer, as a sandbox receives it.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        let models = self
            .models
            .iter()
            .map(|model| JsonValue::Object(model.shown.clone()))
            .collect();
        let models = JsonValue::List(models);
        written(if self.is_openai {
            vec![
                ("object".to_owned(), text("list")),
                ("data".to_owned(), models),
            ]
        } else {
            vec![("models".to_owned(), models)]
        })
    }
}

impl ServedModel {
    /// Reads an answer to `GET /v1/models/{id}`.
    pub fn read(json: &[u8]) -> Result<Self, Refusal> {
        let invalid =
            || Violations::single(ViolationCode::InvalidValue, &[], "has no id".to_owned());
        read_object(json)
            .and_then(|members| listed(&members).ok_or_else(invalid))
            .map_err(|violations| Refusal::unreadable("model", &violations))
    }

    /// The filtered answer, as a sandbox receives it.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        written(self.shown.clone())
    }
}

/// An entry of `/api/tags`.
fn tagged(members: &Members) -> Option<ServedModel> {
    let name = name(members, "name").or_else(|| name(members, "model"))?;
    // Both fields must hold the same name, or the entry could pass the filter by either one.
    if get(members, "model").is_some_and(|model| *model != text(name)) {
        return None;
    }
    let mut shown = vec![
        ("name".to_owned(), text(name)),
        ("model".to_owned(), text(name)),
    ];
    shown.extend(kept(members, TAG));
    Some(ServedModel {
        name: name.to_owned(),
        locality: locality(members),
        shown,
    })
}

/// An entry of `/v1/models`.
fn listed(members: &Members) -> Option<ServedModel> {
    let name = name(members, "id")?;
    let mut shown = vec![
        ("id".to_owned(), text(name)),
        ("object".to_owned(), text("model")),
    ];
    shown.extend(kept(members, MODEL));
    Some(ServedModel {
        name: name.to_owned(),
        locality: Locality::Unknown,
        shown,
    })
}

fn name<'a>(members: &'a Members, field: &str) -> Option<&'a str> {
    match get(members, field) {
        Some(JsonValue::Text(name)) if !name.is_empty() && name.len() <= MAX_MODEL_BYTES => {
            (!name.contains(char::is_control)).then_some(name)
        }
        _ => None,
    }
}

/// Reads where a model runs: Ollama sets one or both of two fields if it runs on another host.
pub(crate) fn locality(members: &Members) -> Locality {
    let is_external = members.iter().any(|(name, value)| {
        matches!(name.as_str(), "remote_host" | "remote_model")
            && !matches!(value, JsonValue::Null)
            && *value != text("")
    });
    if is_external {
        Locality::External
    } else {
        Locality::Local
    }
}

/// The type of a field that is kept.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kept {
    Text,
    Integer,
    Texts,
    Object(&'static [(&'static str, Self)]),
}

const TAG: &[(&str, Kept)] = &[
    ("modified_at", Kept::Text),
    ("size", Kept::Integer),
    ("digest", Kept::Text),
    ("details", Kept::Object(DETAILS)),
    ("capabilities", Kept::Texts),
];

pub(crate) const DETAILS: &[(&str, Kept)] = &[
    ("format", Kept::Text),
    ("family", Kept::Text),
    ("families", Kept::Texts),
    ("parameter_size", Kept::Text),
    ("quantization_level", Kept::Text),
    ("context_length", Kept::Integer),
    ("embedding_length", Kept::Integer),
];

/// The kept fields of a model. `max_model_len` is vLLM's size of the context.
const MODEL: &[(&str, Kept)] = &[
    ("created", Kept::Integer),
    ("owned_by", Kept::Text),
    ("max_model_len", Kept::Integer),
];

/// Keeps the fields that a table lists, if they have the right type and are within the bounds.
pub(crate) fn kept(members: &Members, table: &[(&str, Kept)]) -> Members {
    let fields = table.iter().filter_map(|(name, kind)| {
        let value = kept_value(get(members, name)?, *kind)?;
        Some(((*name).to_owned(), value))
    });
    fields.collect()
}

pub(crate) fn kept_value(value: &JsonValue, kind: Kept) -> Option<JsonValue> {
    match (kind, value) {
        (Kept::Text, JsonValue::Text(value))
            if value.len() <= MAX_LISTED_TEXT_BYTES && !value.contains(char::is_control) =>
        {
            Some(text(value))
        }
        (Kept::Integer, JsonValue::Number(number)) if number.is_u64() => {
            Some(JsonValue::Number(number.clone()))
        }
        (Kept::Texts, JsonValue::List(items)) if items.len() <= MAX_LISTED_ITEMS => {
            let items = items.iter().filter_map(|item| kept_value(item, Kept::Text));
            Some(JsonValue::List(items.collect()))
        }
        (Kept::Object(table), JsonValue::Object(members)) => {
            Some(JsonValue::Object(kept(members, table)))
        }
        _ => None,
    }
}

pub(crate) fn read_object(json: &[u8]) -> Result<Members, Violations> {
    match JsonValue::read(json, LIST_BOUNDS)? {
        JsonValue::Object(members) => Ok(members),
        other => {
            let message = format!("must be an object, not {}", other.type_name());
            Err(Violations::single(ViolationCode::WrongType, &[], message))
        }
    }
}

pub(crate) fn text(text: &str) -> JsonValue {
    JsonValue::Text(text.to_owned())
}

pub(crate) fn written(members: Members) -> Vec<u8> {
    serde_json::to_vec(&JsonValue::Object(members)).expect("a value with text keys serialises")
}
