//! The shape of a request: what each field may hold. The tables are in `ollama` and `openai`.

use cynode_api::document::JsonValue;

use crate::limits::{MAX_BODY_BYTES, MAX_NAME_BYTES, MAX_STOP_BYTES, MAX_STOPS};

#[derive(Debug)]
pub(crate) enum Shape {
    Boolean,
    /// A text of so many bytes.
    Text(usize),
    /// A whole number between two others.
    Whole(i64, i64),
    Number(f64, f64),
    Choice(&'static [&'static str]),
    List {
        items: &'static Self,
        least: usize,
        most: usize,
    },
    Object(&'static ObjectShape),
    /// An object whose fields depend on one of them.
    Tagged(&'static TaggedShape),
    /// Null stays in the request. Elsewhere null is an absent field.
    Nullable(&'static Self),
    /// Alternatives that differ in their JSON type.
    OneOf(&'static [Self]),
    /// A JSON Schema without references to other documents.
    Schema,
    /// An object that may hold anything. Only for data that servers pass on to the model.
    AnyObject,
    Base64,
    ImageUrl,
    /// Tokens of an answer, within the limits of the sandbox.
    CompletionTokens,
    /// Tokens of a context, within the limits of the sandbox.
    ContextTokens,
    /// The time for which Ollama keeps the model, within the limits of the sandbox.
    KeepAlive,
    /// Null, false, or an empty text, list or object: clients send unused fields so. Not sent on.
    Unset,
}

#[derive(Debug)]
pub(crate) struct ObjectShape {
    /// With its article, as errors call it.
    pub(crate) name: &'static str,
    pub(crate) fields: &'static [Field],
    /// What must hold between the fields: the field at fault, and why.
    pub(crate) rule: Option<Rule>,
}

type Rule = fn(&[(String, JsonValue)]) -> Option<(&'static str, &'static str)>;

#[derive(Debug)]
pub(crate) struct TaggedShape {
    /// The field that decides.
    pub(crate) tag: &'static str,
    pub(crate) variants: &'static [(&'static str, &'static ObjectShape)],
    /// Why there are no others.
    pub(crate) reason: &'static str,
}

#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) is_required: bool,
    pub(crate) shape: &'static Shape,
}

impl Shape {
    /// Whether a value has a JSON type that fits.
    pub(crate) fn fits(&self, value: &JsonValue) -> bool {
        match self {
            Self::Boolean => matches!(value, JsonValue::Boolean(_)),
            Self::Text(_) | Self::Choice(_) | Self::Base64 | Self::ImageUrl => {
                matches!(value, JsonValue::Text(_))
            }
            Self::Whole(..) | Self::Number(..) | Self::CompletionTokens | Self::ContextTokens => {
                matches!(value, JsonValue::Number(_))
            }
            Self::KeepAlive => matches!(value, JsonValue::Number(_) | JsonValue::Text(_)),
            Self::List { .. } => matches!(value, JsonValue::List(_)),
            Self::Object(_) | Self::Tagged(_) | Self::Schema | Self::AnyObject => {
                matches!(value, JsonValue::Object(_))
            }
            Self::Nullable(shape) => *value == JsonValue::Null || shape.fits(value),
            Self::OneOf(shapes) => shapes.iter().any(|shape| shape.fits(value)),
            Self::Unset => match value {
                JsonValue::Null | JsonValue::Boolean(false) => true,
                JsonValue::Boolean(true) | JsonValue::Number(_) => false,
                JsonValue::Text(text) => text.is_empty(),
                JsonValue::List(items) => items.is_empty(),
                JsonValue::Object(members) => members.is_empty(),
            },
        }
    }

    /// What a value must be, with its article.
    pub(crate) fn expected(&self) -> String {
        match self {
            Self::Boolean => "true or false".to_owned(),
            Self::Text(_) | Self::Choice(_) | Self::Base64 | Self::ImageUrl => {
                "a string".to_owned()
            }
            Self::Whole(..) | Self::CompletionTokens | Self::ContextTokens => {
                "a whole number".to_owned()
            }
            Self::Number(..) => "a number".to_owned(),
            Self::KeepAlive => "a number of seconds or a duration".to_owned(),
            Self::List { .. } => "a list".to_owned(),
            Self::Object(_) | Self::Tagged(_) | Self::Schema | Self::AnyObject => {
                "an object".to_owned()
            }
            Self::Nullable(shape) => format!("{} or null", shape.expected()),
            Self::OneOf(shapes) => {
                let expected: Vec<String> = shapes.iter().map(Self::expected).collect();
                expected.join(" or ")
            }
            Self::Unset => "absent".to_owned(),
        }
    }
}

pub(crate) const fn required(name: &'static str, shape: &'static Shape) -> Field {
    Field {
        name,
        is_required: true,
        shape,
    }
}

pub(crate) const fn optional(name: &'static str, shape: &'static Shape) -> Field {
    Field {
        name,
        is_required: false,
        shape,
    }
}

pub(crate) const fn list(items: &'static Shape, least: usize, most: usize) -> Shape {
    Shape::List { items, least, most }
}

pub(crate) const fn object(name: &'static str, fields: &'static [Field]) -> ObjectShape {
    ObjectShape {
        name,
        fields,
        rule: None,
    }
}

/// A text that is bounded by the request only.
pub(crate) const TEXT: Shape = Shape::Text(MAX_BODY_BYTES);
pub(crate) const NAME: Shape = Shape::Text(MAX_NAME_BYTES);
pub(crate) const ANY_WHOLE: Shape = Shape::Whole(i64::MIN, i64::MAX);
const STOP: Shape = Shape::Text(MAX_STOP_BYTES);
/// Texts at which the model stops.
pub(crate) const STOPS: Shape = list(&STOP, 0, MAX_STOPS);
pub(crate) const STOP_OR_STOPS: Shape = Shape::OneOf(&[STOP, STOPS]);
