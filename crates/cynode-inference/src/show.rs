//! Filters the description of one model, and the version of a server.

use cynode_api::document::{JsonValue, Members, ViolationCode, Violations, get};

use crate::{
    limits::{MAX_LISTED_ITEMS, MAX_LISTED_TEXT_BYTES},
    list::{DETAILS, Kept, Locality, kept, kept_value, locality, read_object, written},
    refusal::Refusal,
};

/// An answer to `POST /api/show`.
///
/// The server's answer also has the licence, the template, the system prompt and the Modelfile,
/// which names paths of the server. None of them is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct ShownModel {
    pub locality: Locality,
    shown: Members,
}

const SHOWN: &[(&str, Kept)] = &[
    ("modified_at", Kept::Text),
    ("details", Kept::Object(DETAILS)),
    ("capabilities", Kept::Texts),
];

impl ShownModel {
    pub fn read(json: &[u8]) -> Result<Self, Refusal> {
        let members = read_object(json)
            .map_err(|violations| Refusal::unreadable("description of a model", &violations))?;
        let mut shown = kept(&members, SHOWN);
        if let Some(JsonValue::Object(info)) = get(&members, "model_info") {
            let mut sizes = Members::new();
            for (name, value) in info {
                let kept = info_kind(name).and_then(|kind| kept_value(value, kind));
                if let Some(value) = kept
                    && get(&sizes, name).is_none()
                    && sizes.len() < MAX_LISTED_ITEMS
                {
                    sizes.push((name.clone(), value));
                }
            }
            shown.push(("model_info".to_owned(), JsonValue::Object(sizes)));
        }
        Ok(Self {
            locality: locality(&members),
            shown,
        })
    }

    /// The filtered answer, as a sandbox receives it.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        written(self.shown.clone())
    }
}

/// The type of a `model_info` field that is kept. Sizes are prefixed with the architecture, such as
/// `llama.context_length`.
fn info_kind(name: &str) -> Option<Kept> {
    match name.split_once('.')? {
        ("general", "architecture") => Some(Kept::Text),
        ("general", "parameter_count") => Some(Kept::Integer),
        (architecture, "context_length" | "embedding_length")
            if name.len() <= MAX_LISTED_TEXT_BYTES
                && architecture
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-')) =>
        {
            Some(Kept::Integer)
        }
        _ => None,
    }
}

/// Filters an answer to `GET /api/version`.
pub fn server_version(json: &[u8]) -> Result<Vec<u8>, Refusal> {
    let unreadable = |violations| Refusal::unreadable("version", &violations);
    let members = read_object(json).map_err(unreadable)?;
    let shown = kept(&members, &[("version", Kept::Text)]);
    if shown.is_empty() {
        let message = "has no version".to_owned();
        let violations = Violations::single(ViolationCode::InvalidValue, &[], message);
        return Err(unreadable(violations));
    }
    Ok(written(shown))
}
