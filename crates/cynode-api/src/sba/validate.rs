//! Compares a document with its shape and reports every difference.

use std::collections::BTreeSet;

use serde_json::Number;

pub(super) use super::document::get;
use super::{
    document::{JsonValue, Members},
    shape::{ObjectShape, Shape, Text},
    version::ProtocolVersion,
    violation::{Segment, ViolationCode, Violations, quote},
};

pub(super) struct Validator<'a> {
    /// The version that the document names.
    version: ProtocolVersion,
    path: Vec<Segment<'a>>,
    violations: Violations,
}

/// Every difference between a document and its shape.
pub(super) fn validate(
    document: &JsonValue,
    shape: &'static ObjectShape,
    version: ProtocolVersion,
) -> Result<(), Violations> {
    let mut validator = Validator {
        version,
        path: Vec::new(),
        violations: Violations::none(),
    };
    validator.object(document, shape);
    if validator.violations.is_empty() {
        Ok(())
    } else {
        Err(validator.violations)
    }
}

impl<'a> Validator<'a> {
    pub(super) fn invalid(&mut self, message: impl FnOnce() -> String) {
        self.report(ViolationCode::InvalidValue, message);
    }

    /// Goes on with a value that the current one contains.
    pub(super) fn at(&mut self, segment: Segment<'a>, check: impl FnOnce(&mut Self)) {
        self.path.push(segment);
        check(self);
        self.path.pop();
    }

    fn report(&mut self, code: ViolationCode, message: impl FnOnce() -> String) {
        self.violations.add(code, &self.path, message);
    }

    fn wrong_type(&mut self, expected: &'static str, value: &JsonValue) {
        let actual = value.type_name();
        self.report(ViolationCode::WrongType, || {
            format!("must be {expected}, not {actual}")
        });
    }

    fn value(&mut self, value: &'a JsonValue, shape: &'static Shape) {
        match shape {
            Shape::Any => self.any(value),
            Shape::Boolean => {
                if !matches!(value, JsonValue::Boolean(_)) {
                    self.wrong_type("true or false", value);
                }
            }
            Shape::Text(shape) => match value {
                JsonValue::Text(text) => self.text(text, *shape),
                _ => self.wrong_type("a string", value),
            },
            Shape::Integer(least, most) => match value {
                JsonValue::Number(number) => self.whole(number, *least, *most),
                _ => self.wrong_type("a whole number", value),
            },
            Shape::Choice(choices) => match value {
                JsonValue::Text(text) => self.choice(text, choices),
                _ => self.wrong_type("a string", value),
            },
            Shape::List { items, least, most } => match value {
                JsonValue::List(list) => self.list(list, items, *least, *most),
                _ => self.wrong_type("a list", value),
            },
            Shape::Map {
                names,
                values,
                most,
            } => match value {
                JsonValue::Object(members) => self.map(members, *names, values, *most),
                _ => self.wrong_type("an object", value),
            },
            Shape::FreeObject | Shape::DependsOn { .. } => match value {
                JsonValue::Object(_) => self.any(value),
                _ => self.wrong_type("an object", value),
            },
            Shape::Object(shape) => self.object(value, shape),
            Shape::Nullable(shape) => {
                if *value != JsonValue::Null {
                    self.value(value, shape);
                }
            }
            Shape::TextOr(text_shape, object_shape) => match value {
                JsonValue::Text(text) => self.text(text, *text_shape),
                JsonValue::Object(_) => self.object(value, object_shape),
                _ => self.wrong_type("a string or an object", value),
            },
        }
    }

    fn choice(&mut self, text: &str, choices: &[&str]) {
        if !choices.contains(&text) {
            self.invalid(|| format!("{} is not one of {}", quote(text), choices.join(", ")));
        }
    }

    fn text(&mut self, text: &str, shape: Text) {
        if text.len() > shape.most {
            self.invalid(|| format!("has {} bytes; at most {}", text.len(), shape.most));
        } else if let Some(fault) = shape.form.fault(text) {
            self.invalid(|| fault.to_owned());
        } else if text.len() < shape.least {
            self.invalid(|| "must not be empty".to_owned());
        }
    }

    fn whole(&mut self, number: &Number, least: i64, most: i64) {
        if number.is_f64() {
            self.report(ViolationCode::WrongType, || {
                "must be a whole number, without fraction and exponent".to_owned()
            });
        } else if number
            .as_i64()
            .is_none_or(|number| number < least || number > most)
        {
            self.invalid(|| format!("{number} is not between {least} and {most}"));
        }
    }

    fn list(&mut self, list: &'a [JsonValue], items: &'static Shape, least: usize, most: usize) {
        if list.len() < least {
            self.invalid(|| "must not be empty".to_owned());
        }
        if list.len() > most {
            self.invalid(|| format!("has {} items; at most {most}", list.len()));
        }
        for (index, item) in list.iter().enumerate() {
            self.at(Segment::Index(index), |inner| inner.value(item, items));
        }
    }

    fn map(&mut self, members: &'a Members, names: Text, values: &'static Shape, most: usize) {
        if members.len() > most {
            self.invalid(|| format!("has {} fields; at most {most}", members.len()));
        }
        self.unique_fields(members);
        for (name, value) in members {
            self.at(Segment::Field(name), |inner| {
                inner.text(name, names);
                inner.value(value, values);
            });
        }
    }

    /// Reports duplicate fields at any depth.
    fn any(&mut self, value: &'a JsonValue) {
        match value {
            JsonValue::List(list) => {
                for (index, item) in list.iter().enumerate() {
                    self.at(Segment::Index(index), |inner| inner.any(item));
                }
            }
            JsonValue::Object(members) => {
                self.unique_fields(members);
                for (name, value) in members {
                    self.at(Segment::Field(name), |inner| inner.any(value));
                }
            }
            JsonValue::Null | JsonValue::Boolean(_) | JsonValue::Number(_) | JsonValue::Text(_) => {
            }
        }
    }

    /// Whether no field is given twice; reports each that is.
    fn unique_fields(&mut self, members: &'a Members) -> bool {
        let mut are_unique = true;
        let mut seen = BTreeSet::new();
        for (name, _) in members {
            if !seen.insert(name.as_str()) {
                are_unique = false;
                self.at(Segment::Field(name), |inner| {
                    inner.report(ViolationCode::DuplicateField, || {
                        "is given twice".to_owned()
                    });
                });
            }
        }
        are_unique
    }

    fn object(&mut self, value: &'a JsonValue, shape: &'static ObjectShape) {
        let JsonValue::Object(members) = value else {
            return self.wrong_type("an object", value);
        };
        let are_unique = self.unique_fields(members);
        // Once per object: a hostile one repeats its fields.
        let fields: Vec<(&str, &Shape)> = shape
            .fields
            .iter()
            .map(|field| (field.name, resolved(field.shape, members)))
            .collect();
        for (name, value) in members {
            let field = fields.iter().find(|(field, _)| field == name);
            self.at(Segment::Field(name), |inner| {
                if let Some((_, shape)) = field {
                    inner.value(value, shape);
                    return;
                }
                if !shape.is_open {
                    inner.unknown(shape);
                }
                inner.any(value);
            });
        }
        for field in shape.fields.iter().filter(|field| field.is_required) {
            if get(members, field.name).is_none() {
                self.at(Segment::Field(field.name), |inner| {
                    inner.report(ViolationCode::MissingField, || "is missing".to_owned());
                });
            }
        }
        // With a field given twice, it is open which one a rule should judge.
        if let Some(rule) = shape.rule.as_ref().filter(|_| are_unique) {
            (rule.check)(members, self);
        }
    }

    fn unknown(&mut self, shape: &'static ObjectShape) {
        let (version, current) = (self.version, ProtocolVersion::CURRENT);
        self.report(ViolationCode::UnknownField, || {
            let fields: Vec<&str> = shape.fields.iter().map(|field| field.name).collect();
            let known = format!(
                "unknown field of {}, which has {}",
                shape.name,
                fields.join(", ")
            );
            if version > current {
                format!("{known}; protocol_version is {version}, known here is {current}")
            } else {
                format!("{known}; protocol_version is {version}")
            }
        });
    }
}

/// The shape of a value that may depend on another field. Without a known variant only duplicate
/// fields are reported: the other field is wrong.
fn resolved(shape: &'static Shape, members: &Members) -> &'static Shape {
    let Shape::DependsOn { field, variants } = shape else {
        return shape;
    };
    let Some(JsonValue::Text(name)) = get(members, field) else {
        return shape;
    };
    variants
        .iter()
        .find(|(variant, _)| variant == name)
        .map_or(shape, |(_, variant)| variant)
}
