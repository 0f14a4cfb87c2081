//! Generates the JSON Schema of jobs from the shape that the parser uses.

use serde_json::{Map, Value, json};

use super::{
    job_shape::JOB,
    shape::{ObjectShape, Shape, Text},
};

/// Collects the schemas of named objects, so that each object is defined once and then referenced.
#[derive(Default)]
struct Generator {
    definitions: Map<String, Value>,
}

impl Generator {
    fn value(&mut self, shape: &Shape) -> Value {
        match shape {
            Shape::Any => json!({}),
            Shape::Boolean => json!({"type": "boolean"}),
            Shape::Text(text) => text_schema(*text),
            Shape::Integer(least, most) => {
                json!({"type": "integer", "minimum": least, "maximum": most})
            }
            Shape::Choice(choices) => json!({"type": "string", "enum": choices}),
            Shape::List { items, least, most } => {
                let mut schema =
                    json!({"type": "array", "items": self.value(items), "maxItems": most});
                if *least > 0 {
                    schema["minItems"] = json!(least);
                }
                schema
            }
            Shape::Map {
                names,
                values,
                most,
            } => json!({
                "type": "object",
                "propertyNames": text_schema(*names),
                "additionalProperties": self.value(values),
                "maxProperties": most,
            }),
            Shape::FreeObject | Shape::DependsOn { .. } => json!({"type": "object"}),
            Shape::Object(object) => self.reference(object),
            Shape::Nullable(shape) => json!({"anyOf": [{"type": "null"}, self.value(shape)]}),
            Shape::TextOr(text, object) => {
                json!({"anyOf": [text_schema(*text), self.reference(object)]})
            }
        }
    }

    fn reference(&mut self, object: &'static ObjectShape) -> Value {
        let name = object
            .name
            .trim_start_matches("a ")
            .trim_start_matches("an ")
            .replace(' ', "_");
        if !self.definitions.contains_key(&name) {
            let schema = self.object(object);
            self.definitions.insert(name.clone(), schema);
        }
        json!({"$ref": format!("#/$defs/{name}")})
    }

    fn object(&mut self, object: &'static ObjectShape) -> Value {
        let (mut properties, mut variants) = (Map::new(), Vec::new());
        for field in object.fields {
            let mut schema = self.value(field.shape);
            schema["description"] = json!(field.about);
            properties.insert(field.name.to_owned(), schema);
            if let Shape::DependsOn {
                field: selector,
                variants: shapes,
            } = field.shape
            {
                for (name, shape) in *shapes {
                    variants.push(json!({
                        "if": {"properties": {*selector: {"const": name}}, "required": [selector]},
                        "then": {"properties": {field.name: self.value(shape)}},
                    }));
                }
            }
        }
        let required: Vec<&str> = object
            .fields
            .iter()
            .filter(|field| field.is_required)
            .map(|field| field.name)
            .collect();
        let mut schema = json!({
            "type": "object",
            "properties": properties,
            "additionalProperties": object.is_open,
        });
        if !required.is_empty() {
            schema["required"] = json!(required);
        }
        if !variants.is_empty() {
            schema["allOf"] = json!(variants);
        }
        if let Some(rule) = object.rule.as_ref().and_then(|rule| rule.schema) {
            let rule: Map<String, Value> = serde_json::from_str(rule).expect("a schema");
            for (keyword, value) in rule {
                assert!(schema.get(&keyword).is_none(), "{keyword} is there twice");
                schema[keyword] = value;
            }
        }
        schema
    }
}

/// JSON Schema counts characters and the parser counts bytes, so the schema accepts longer texts.
fn text_schema(text: Text) -> Value {
    let mut schema = json!({"type": "string", "maxLength": text.most});
    if text.least > 0 {
        schema["minLength"] = json!(text.least);
    }
    if let Some(pattern) = text.form.pattern() {
        schema["pattern"] = json!(pattern);
    }
    schema
}

fn generated() -> String {
    let mut generator = Generator::default();
    let mut schema = generator.object(&JOB);
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["$id"] = json!("urn:cynode:schema:job:1");
    schema["title"] = json!("A job that cynode-sba runs");
    schema["$defs"] = Value::Object(generator.definitions);
    // Another crate of the build may enable serde_json's `preserve_order`.
    schema.sort_all_objects();
    let mut text = serde_json::to_string_pretty(&schema).expect("a schema serialises");
    text.push('\n');
    text
}

#[test]
fn the_schema_that_is_checked_in_is_the_generated_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/sba/job.schema.json");
    if std::env::var_os("CYNODE_REGENERATE").is_some() {
        #[expect(clippy::disallowed_methods, reason = "this crate has no fs_err")]
        std::fs::write(path, generated()).expect("the schema is written");
        return;
    }
    assert!(
        super::JOB_SCHEMA == generated(),
        "{path} is out of date. Remedy: CYNODE_REGENERATE=1 cargo nextest run -p cynode-api schema"
    );
}
