//! Reports all errors in the arguments of a tool at once, so that an agent can fix them in one
//! turn.

use cynode_service::ApiError;
use serde_json::{Map, Value};

/// The number of arguments of one kind that an error names.
const MAX_NAMED: usize = 16;
/// Names are truncated to this many characters, because callers choose them freely.
const MAX_NAME: usize = 32;

/// Parses arguments and returns the first error.
pub(super) type Parse = fn(&[u8]) -> Result<(), ApiError>;

/// All errors in arguments that `parse` refused with `first`.
pub(super) fn all(
    schema: &Map<String, Value>,
    parse: Parse,
    arguments: &Map<String, Value>,
    first: ApiError,
) -> ApiError {
    let names = |key: &str| {
        schema
            .get(key)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect::<Vec<_>>()
    };
    let known: Vec<&str> = schema
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(Map::keys)
        .map(String::as_str)
        .collect();
    let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
    let missing: Vec<&str> = names("required")
        .into_iter()
        .filter(|name| !arguments.contains_key(*name))
        .collect();
    let unknown: Vec<&str> = arguments
        .keys()
        .map(String::as_str)
        .filter(|name| is_closed && !known.contains(name))
        .collect();
    let wrong: Vec<String> = arguments
        .iter()
        .filter(|(name, _)| known.contains(&name.as_str()))
        .filter_map(|(name, value)| wrong(parse, name, value))
        .collect();
    let mut errors = Vec::new();
    if !missing.is_empty() {
        errors.push(format!("missing: {}", listed(&missing)));
    }
    if !unknown.is_empty() {
        errors.push(format!(
            "unknown: {} (known: {})",
            listed(&unknown),
            known.join(", ")
        ));
    }
    errors.extend(wrong.iter().take(MAX_NAMED).cloned());
    if errors.is_empty() {
        first
    } else {
        ApiError::invalid(errors.join("; "))
    }
}

/// The error in one argument, which is parsed alone: the other arguments are then reported as
/// missing, which does not count.
fn wrong(parse: Parse, name: &str, value: &Value) -> Option<String> {
    let alone = Map::from_iter([(name.to_owned(), value.clone())]);
    let error = parse(&serde_json::to_vec(&alone).ok()?).err()?;
    let detail = error.into_problem().detail;
    if detail.starts_with("missing field") {
        return None;
    }
    // The line and column refer to a serialization that the caller has never seen.
    Some(
        detail
            .rsplit_once(" at line ")
            .map_or(detail.clone(), |(words, _)| words.to_owned()),
    )
}

fn listed(names: &[&str]) -> String {
    let mut words: Vec<String> = names
        .iter()
        .take(MAX_NAMED)
        .map(|name| name.chars().take(MAX_NAME).collect())
        .collect();
    if names.len() > MAX_NAMED {
        words.push(format!("and {} more", names.len() - MAX_NAMED));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::mcp::tools;

    fn detail(tool: &str, arguments: Value) -> String {
        let Value::Object(arguments) = arguments else {
            panic!("arguments are an object")
        };
        tools::find(tools::all(), tool, false)
            .expect("a tool")
            .plan(&arguments, None)
            .expect_err("wrong arguments")
            .into_problem()
            .detail
    }

    #[test]
    fn every_tool_names_all_missing_arguments_at_once() {
        for tool in tools::all() {
            let required: Vec<&str> = tool
                .input
                .get("required")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect();
            if required.is_empty() {
                continue;
            }
            let detail = detail(tool.name, json!({}));
            assert_eq!(
                detail,
                format!("missing: {}", required.join(", ")),
                "{}",
                tool.name
            );
        }
    }

    #[test]
    fn missing_unknown_and_wrong_arguments_are_named_together() {
        let detail = detail(
            "sandbox.session.exec",
            json!({"task_id": "x", "argv": "ls", "timeout_ms": -1, "colour": 1, "cwd": "."}),
        );
        assert!(
            detail.starts_with("missing: session_id, env; unknown: colour (known: "),
            "{detail}"
        );
        for wrong in [
            "task_id: ",
            "argv: invalid type",
            "timeout_ms: invalid value",
        ] {
            assert!(detail.contains(wrong), "{wrong} is missing in {detail}");
        }
        assert!(
            !detail.contains("at line") && !detail.contains("cwd:"),
            "{detail}"
        );
    }

    #[test]
    fn the_path_inside_an_argument_is_named() {
        let arguments = json!({
            "task_id": "01890000-0000-7000-8000-000000000001", "session_id": "new",
            "image_ref": "default", "workspace_ref": "new",
            "constraints": {"limits": {"memory_bytes": "much"}},
        });
        let detail = detail("sandbox.session.create", arguments);
        assert!(
            detail.starts_with("constraints.limits.memory_bytes: invalid type"),
            "{detail}"
        );
    }

    #[test]
    fn named_arguments_are_bounded() {
        let many = |count: usize| -> Value {
            (0..count)
                .map(|number| (format!("x{number}{}", "y".repeat(200)), json!(1)))
                .collect::<Map<_, _>>()
                .into()
        };
        let detail_of = |count| detail("help.list", many(count));
        assert!(!detail_of(MAX_NAMED).contains("more"));
        let detail = detail_of(MAX_NAMED + 3);
        assert!(
            detail.contains("and 3 more")
                && !detail.contains(&"y".repeat(MAX_NAME))
                && detail.len() < 1_200,
            "{detail}"
        );
    }
}
