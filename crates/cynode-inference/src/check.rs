//! Validates a request against its shape. Reports all violations, and removes unset fields.

use std::collections::BTreeSet;

use cynode_api::document::{JsonValue, Members, Segment, ViolationCode, Violations, get, quote};
use serde_json::Number;

use crate::{
    form::{is_base64, is_image_url, milliseconds_of_number, milliseconds_of_text},
    request::TokenLimits,
    schema,
    shape::{FieldShape, ObjectShape, Shape, TaggedShape},
};

/// Validates a request and returns its fields without the unset ones.
pub(crate) fn checked(
    document: JsonValue,
    shape: &'static ObjectShape,
    limits: TokenLimits,
) -> Result<Members, Violations> {
    let mut checker = Checker {
        limits,
        violations: Violations::none(),
    };
    let JsonValue::Object(members) = document else {
        let message = format!("must be an object, not {}", document.type_name());
        return Err(Violations::single(ViolationCode::WrongType, &[], message));
    };
    let members = checker.object(members, shape, &Path::ROOT);
    if checker.violations.is_empty() {
        Ok(members)
    } else {
        Err(checker.violations)
    }
}

/// The path from the document to a value, as a linked list on the stack.
#[derive(Clone, Copy)]
struct Path<'a> {
    parent: Option<&'a Self>,
    segment: Segment<'a>,
}

impl<'a> Path<'a> {
    /// The document itself; its segment is ignored.
    const ROOT: Self = Self {
        parent: None,
        segment: Segment::Index(0),
    };

    const fn field<'b>(&'b self, name: &'b str) -> Path<'b>
    where
        'a: 'b,
    {
        Path {
            parent: Some(self),
            segment: Segment::Field(name),
        }
    }

    const fn item<'b>(&'b self, index: usize) -> Path<'b>
    where
        'a: 'b,
    {
        Path {
            parent: Some(self),
            segment: Segment::Index(index),
        }
    }

    fn segments(&self) -> Vec<Segment<'a>> {
        let mut segments = Vec::new();
        let mut here = self;
        while let Some(parent) = here.parent {
            segments.push(here.segment);
            here = parent;
        }
        segments.reverse();
        segments
    }
}

struct Checker {
    limits: TokenLimits,
    violations: Violations,
}

impl Checker {
    fn report(&mut self, code: ViolationCode, path: &Path<'_>, message: impl FnOnce() -> String) {
        self.violations.add(code, &path.segments(), message);
    }

    fn invalid(&mut self, path: &Path<'_>, message: impl FnOnce() -> String) {
        self.report(ViolationCode::InvalidValue, path, message);
    }

    /// Validates a value. Returns it as it is forwarded, or `None` if it is not.
    fn value(
        &mut self,
        value: JsonValue,
        shape: &'static Shape,
        path: &Path<'_>,
    ) -> Option<JsonValue> {
        if !shape.fits(&value) {
            let (expected, actual) = (shape.expected(), value.type_name());
            self.report(ViolationCode::WrongType, path, || {
                if matches!(shape, Shape::Unset) {
                    "is not accepted here; leave it out".to_owned()
                } else {
                    format!("must be {expected}, not {actual}")
                }
            });
            return None;
        }
        match (shape, value) {
            (Shape::Unset, _) => None,
            (Shape::OneOf(shapes), value) => {
                let shape = shapes.iter().find(|shape| shape.fits(&value))?;
                self.value(value, shape, path)
            }
            (Shape::Nullable(shape), value) if value != JsonValue::Null => {
                self.value(value, shape, path)
            }
            (Shape::KeepAlive, value) => self.keep_alive(&value, path),
            (Shape::List { items, least, most }, JsonValue::List(list)) => {
                Some(self.list(list, items, *least, *most, path))
            }
            (Shape::Object(shape), JsonValue::Object(members)) => {
                Some(JsonValue::Object(self.object(members, shape, path)))
            }
            (Shape::Tagged(shape), JsonValue::Object(members)) => self.tagged(members, shape, path),
            (_, value) => {
                self.leaf(&value, shape, path);
                Some(value)
            }
        }
    }

    /// Validates a value that is forwarded unchanged.
    fn leaf(&mut self, value: &JsonValue, shape: &Shape, path: &Path<'_>) {
        match (shape, value) {
            (Shape::Text(most), JsonValue::Text(text)) if text.len() > *most => {
                self.invalid(path, || format!("has {} bytes; at most {most}", text.len()));
            }
            (Shape::Choice(choices), JsonValue::Text(text))
                if !choices.contains(&text.as_str()) =>
            {
                self.invalid(path, || {
                    format!("{} is not one of {}", quote(text), choices.join(", "))
                });
            }
            (Shape::Base64, JsonValue::Text(text)) if !is_base64(text) => {
                self.invalid(path, || "must be base64 with padding".to_owned());
            }
            (Shape::ImageUrl, JsonValue::Text(text)) if !is_image_url(text) => {
                self.invalid(path, || {
                    "must be data:image/png;base64,... (or jpeg, webp, gif): servers would fetch \
                     another URL"
                        .to_owned()
                });
            }
            (Shape::Integer(least, most), JsonValue::Number(number)) => {
                self.whole(number, *least, *most, path);
            }
            (Shape::CompletionTokens, JsonValue::Number(number)) => {
                self.whole(number, 1, self.limits.completion_tokens.into(), path);
            }
            (Shape::ContextTokens, JsonValue::Number(number)) => {
                self.whole(number, 1, self.limits.context_tokens.into(), path);
            }
            (Shape::Number(least, most), JsonValue::Number(number)) => {
                let is_within = number
                    .as_f64()
                    .is_some_and(|number| (*least..=*most).contains(&number));
                if !is_within {
                    self.invalid(path, || {
                        format!("{number} is not between {least} and {most}")
                    });
                }
            }
            (Shape::Schema, value) => self.schema(value, path),
            (Shape::AnyObject, value) => self.unique_below(value, path),
            _ => {}
        }
    }

    fn whole(&mut self, number: &Number, least: i64, most: i64, path: &Path<'_>) {
        if number.is_f64() {
            self.report(ViolationCode::WrongType, path, || {
                "must be a whole number, without fraction and exponent".to_owned()
            });
        } else if number
            .as_i64()
            .is_none_or(|number| number < least || number > most)
        {
            self.invalid(path, || {
                format!("{number} is not between {least} and {most}")
            });
        }
    }

    /// Validates a duration. Returns it in whole seconds, rounded up.
    fn keep_alive(&mut self, value: &JsonValue, path: &Path<'_>) -> Option<JsonValue> {
        let milliseconds = match value {
            JsonValue::Number(number) => milliseconds_of_number(number),
            JsonValue::Text(text) => milliseconds_of_text(text),
            _ => None,
        };
        let most = u64::from(self.limits.keep_alive_seconds);
        match milliseconds {
            Some(milliseconds) if (1_000..=most * 1_000).contains(&milliseconds) => {
                Some(JsonValue::Number(milliseconds.div_ceil(1_000).into()))
            }
            _ => {
                self.invalid(path, || {
                    format!("must be a duration between 1s and {most}s")
                });
                None
            }
        }
    }

    fn list(
        &mut self,
        list: Vec<JsonValue>,
        items: &'static Shape,
        least: usize,
        most: usize,
        path: &Path<'_>,
    ) -> JsonValue {
        if list.len() < least {
            self.invalid(path, || "must not be empty".to_owned());
        }
        if list.len() > most {
            self.invalid(path, || format!("has {} items; at most {most}", list.len()));
        }
        let checked = list
            .into_iter()
            .enumerate()
            .filter_map(|(index, item)| self.value(item, items, &path.item(index)))
            .collect();
        JsonValue::List(checked)
    }

    fn tagged(
        &mut self,
        members: Members,
        shape: &'static TaggedShape,
        path: &Path<'_>,
    ) -> Option<JsonValue> {
        let variant = match get(&members, shape.tag) {
            Some(JsonValue::Text(tag)) => {
                let variant = shape.variants.iter().find(|(variant, _)| variant == tag);
                if variant.is_none() {
                    self.invalid(&path.field(shape.tag), || {
                        let names: Vec<&str> =
                            shape.variants.iter().map(|(name, _)| *name).collect();
                        format!(
                            "{} is not accepted, only {}: {}",
                            quote(tag),
                            names.join(", "),
                            shape.reason
                        )
                    });
                }
                variant
            }
            Some(other) => {
                let actual = other.type_name();
                self.report(ViolationCode::WrongType, &path.field(shape.tag), || {
                    format!("must be a string, not {actual}")
                });
                None
            }
            None => {
                self.missing(shape.tag, path);
                None
            }
        };
        let (_, variant) = variant?;
        Some(JsonValue::Object(self.object(members, variant, path)))
    }

    fn object(
        &mut self,
        members: Members,
        shape: &'static ObjectShape,
        path: &Path<'_>,
    ) -> Members {
        self.unique(&members, path);
        for field in shape.fields.iter().filter(|field| field.is_required) {
            if get(&members, field.name).is_none() {
                self.missing(field.name, path);
            }
        }
        let mut checked = Vec::with_capacity(members.len().min(shape.fields.len()));
        for (name, value) in members {
            let here = path.field(&name);
            let Some(field) = shape.fields.iter().find(|field| field.name == name) else {
                self.report(ViolationCode::UnknownField, &here, || unknown(&name, shape));
                continue;
            };
            if value == JsonValue::Null && !keeps_null(field) {
                continue;
            }
            if let Some(value) = self.value(value, field.shape, &here) {
                checked.push((name, value));
            }
        }
        if let Some((name, message)) = shape.rule.and_then(|rule| rule(&checked)) {
            self.invalid(&path.field(name), || message.to_owned());
        }
        checked
    }

    fn missing(&mut self, name: &str, path: &Path<'_>) {
        self.report(ViolationCode::MissingField, &path.field(name), || {
            "is missing".to_owned()
        });
    }

    /// Reports duplicate fields.
    fn unique(&mut self, members: &Members, path: &Path<'_>) {
        let mut seen = BTreeSet::new();
        for (name, _) in members {
            if !seen.insert(name.as_str()) {
                self.report(ViolationCode::DuplicateField, &path.field(name), || {
                    "is given twice".to_owned()
                });
            }
        }
    }

    /// Reports duplicate fields at any depth.
    fn unique_below(&mut self, value: &JsonValue, path: &Path<'_>) {
        match value {
            JsonValue::List(list) => {
                for (index, item) in list.iter().enumerate() {
                    self.unique_below(item, &path.item(index));
                }
            }
            JsonValue::Object(members) => {
                self.unique(members, path);
                for (name, value) in members {
                    self.unique_below(value, &path.field(name));
                }
            }
            _ => {}
        }
    }

    fn schema(&mut self, value: &JsonValue, path: &Path<'_>) {
        match value {
            JsonValue::List(list) => {
                for (index, item) in list.iter().enumerate() {
                    self.schema(item, &path.item(index));
                }
            }
            JsonValue::Object(members) => {
                self.unique(members, path);
                for (name, value) in members {
                    let here = path.field(name);
                    if let JsonValue::Text(text) = value
                        && let Some(fault) = schema::fault(name, text)
                    {
                        self.invalid(&here, || fault.to_owned());
                    }
                    self.schema(value, &here);
                }
            }
            _ => {}
        }
    }
}

fn keeps_null(field: &FieldShape) -> bool {
    field.is_required || matches!(field.shape, Shape::Nullable(_))
}

/// The reason why an unknown field is refused.
fn unknown(name: &str, shape: &ObjectShape) -> String {
    let reason = match name {
        "store" | "metadata" | "previous_response_id" | "conversation" | "prompt_cache_key" => {
            "it makes a provider keep data"
        }
        "service_tier" | "best_of" | "user" | "safety_identifier" => {
            "the operator of the node decides it"
        }
        "web_search_options" | "plugins" | "mcp_servers" => "it makes a server use the network",
        "template" | "raw" | "context" | "suffix" | "from" | "adapters" | "chat_template" => {
            "it replaces parts of the model"
        }
        "file" | "file_id" | "file_url" | "video_url" | "audio_url" => {
            "it makes a server fetch or read something"
        }
        _ => {
            let fields: Vec<&str> = shape.fields.iter().map(|field| field.name).collect();
            return format!(
                "unknown field of {}, which has {}",
                shape.name,
                fields.join(", ")
            );
        }
    };
    format!("is not accepted: {reason}")
}
