//! Checks the JSON Schemas of tools and answers.
//!
//! Validators and grammar compilers of model servers resolve references, some of them over the
//! network. A reference must therefore point into the schema itself, and no subschema may set a base
//! address that would make such a reference point to another document.

/// Addresses of the dialects that `$schema` may name.
const DIALECTS: &[&str] = &[
    "http://json-schema.org/schema",
    "http://json-schema.org/draft-04/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-07/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
];

/// Checks a string in a schema. Returns the fault, if any.
pub(crate) fn fault(name: &str, text: &str) -> Option<&'static str> {
    match name {
        "$ref" | "$dynamicRef" | "$recursiveRef" if !text.starts_with('#') => {
            Some("must refer to a part of the same schema, such as #/$defs/x")
        }
        "$id" | "id" if text.contains(':') || text.starts_with('/') => {
            Some("must not be a URL; leave it out")
        }
        "$schema" if !DIALECTS.contains(&text.strip_suffix('#').unwrap_or(text)) => {
            Some("is not a known dialect of JSON Schema; leave it out")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_lead_into_the_schema_itself() {
        for (name, text) in [
            ("$ref", "#"),
            ("$ref", "#/$defs/x"),
            ("$dynamicRef", "#node"),
            ("$id", "point"),
            ("id", "point"),
            ("$schema", "http://json-schema.org/draft-07/schema#"),
            ("$schema", "https://json-schema.org/draft/2020-12/schema"),
            ("description", "see https://example.com"),
            ("format", "uri"),
        ] {
            assert_eq!(fault(name, text), None, "{name} {text}");
        }
        for (name, text) in [
            ("$ref", ""),
            ("$ref", "https://example.com/x.json"),
            ("$ref", "http://169.254.169.254/#/x"),
            ("$ref", "file:///etc/passwd"),
            ("$ref", "x.json"),
            ("$ref", " #/x"),
            ("$dynamicRef", "https://example.com/x"),
            ("$recursiveRef", "x"),
            ("$id", "https://example.com/x"),
            ("$id", "//example.com/x"),
            ("id", "file:/etc/passwd"),
            ("id", "/etc/passwd"),
            ("$schema", ""),
            ("$schema", "https://example.com/schema"),
            (
                "$schema",
                "https://json-schema.org.example.com/draft/2020-12/schema",
            ),
        ] {
            assert!(fault(name, text).is_some(), "{name} {text}");
        }
    }
}
