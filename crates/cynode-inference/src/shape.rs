//! Shapes: the types and bounds of the fields of a request. The tables are in `ollama` and `openai`.

use cynode_api::document::JsonValue;

use crate::limits::{MAX_BODY_BYTES, MAX_NAME_BYTES, MAX_STOP_BYTES, MAX_STOPS};

#[derive(Debug)]
pub(crate) enum Shape {
    Boolean,
    /// A string of at most this many bytes.
    Text(usize),
    /// An integer between two bounds, inclusive.
    Integer(i64, i64),
    Number(f64, f64),
    Choice(&'static [&'static str]),
    List {
        items: &'static Self,
        least: usize,
        most: usize,
    },
    Object(&'static ObjectShape),
    /// An object whose shape depends on one of its fields.
    Tagged(&'static TaggedShape),
    /// A value or null. Null is forwarded here; everywhere else it counts as an absent field.
    Nullable(&'static Self),
    /// One of several shapes that differ in their JSON type.
    OneOf(&'static [Self]),
    /// A JSON Schema without references to other documents.
    Schema,
    /// Any object. Only for data that servers pass on to the model without interpreting it.
    AnyObject,
    Base64,
    ImageUrl,
    /// A number of tokens of the answer, within the sandbox's limits.
    CompletionTokens,
    /// A number of tokens of the context, within the sandbox's limits.
    ContextTokens,
    /// The time for which Ollama keeps the model in memory, within the sandbox's limits.
    KeepAlive,
    /// A field that must be unset: null, false, or an empty string, list or object. Not forwarded.
    Unset,
}

#[derive(Debug)]
pub(crate) struct ObjectShape {
    /// The name in error messages, with its article.
    pub(crate) name: &'static str,
    pub(crate) fields: &'static [FieldShape],
    /// A rule between fields. Returns the field at fault and the reason.
    pub(crate) rule: Option<Rule>,
}

type Rule = fn(&[(String, JsonValue)]) -> Option<(&'static str, &'static str)>;

#[derive(Debug)]
pub(crate) struct TaggedShape {
    /// The field that selects the variant.
    pub(crate) tag: &'static str,
    pub(crate) variants: &'static [(&'static str, &'static ObjectShape)],
    /// Why other variants are refused.
    pub(crate) reason: &'static str,
}

#[derive(Debug)]
pub(crate) struct FieldShape {
    pub(crate) name: &'static str,
    pub(crate) is_required: bool,
    pub(crate) shape: &'static Shape,
}

impl Shape {
    /// Returns whether a value has the right JSON type.
    pub(crate) fn fits(&self, value: &JsonValue) -> bool {
        match self {
            Self::Boolean => matches!(value, JsonValue::Boolean(_)),
            Self::Text(_) | Self::Choice(_) | Self::Base64 | Self::ImageUrl => {
                matches!(value, JsonValue::Text(_))
            }
            Self::Integer(..) | Self::Number(..) | Self::CompletionTokens | Self::ContextTokens => {
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

    /// The expected type in error messages, with its article.
    pub(crate) fn expected(&self) -> String {
        match self {
            Self::Boolean => "true or false".to_owned(),
            Self::Text(_) | Self::Choice(_) | Self::Base64 | Self::ImageUrl => {
                "a string".to_owned()
            }
            Self::Integer(..) | Self::CompletionTokens | Self::ContextTokens => {
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

pub(crate) const fn required(name: &'static str, shape: &'static Shape) -> FieldShape {
    FieldShape {
        name,
        is_required: true,
        shape,
    }
}

pub(crate) const fn optional(name: &'static str, shape: &'static Shape) -> FieldShape {
    FieldShape {
        name,
        is_required: false,
        shape,
    }
}

pub(crate) const fn list(items: &'static Shape, least: usize, most: usize) -> Shape {
    Shape::List { items, least, most }
}

pub(crate) const fn object(name: &'static str, fields: &'static [FieldShape]) -> ObjectShape {
    ObjectShape {
        name,
        fields,
        rule: None,
    }
}

/// A string without a bound of its own: the size of the request bounds it.
pub(crate) const TEXT: Shape = Shape::Text(MAX_BODY_BYTES);
pub(crate) const NAME: Shape = Shape::Text(MAX_NAME_BYTES);
pub(crate) const ANY_INTEGER: Shape = Shape::Integer(i64::MIN, i64::MAX);
const STOP: Shape = Shape::Text(MAX_STOP_BYTES);
/// Strings at which the model stops.
pub(crate) const STOPS: Shape = list(&STOP, 0, MAX_STOPS);
pub(crate) const STOP_OR_STOPS: Shape = Shape::OneOf(&[STOP, STOPS]);
