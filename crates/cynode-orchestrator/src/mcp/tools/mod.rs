//! The tools: their audience, arguments, results, and the requests that they become.
//!
//! Invariants: a tool has effects only through routes of the user API, so that the gate authorizes
//! and records them like any other call. Arguments are parsed strictly before anything else
//! happens.

mod argument_errors;
mod artifacts;
mod coding;
mod git;
mod later;
mod sandbox;
mod sessions;
mod work;
mod workspace;

use std::sync::{Arc, LazyLock};

use cynode_api::TokenKind;
use cynode_service::{ApiError, edge};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{
    plan::{OwnSession, Plan},
    schema,
};

/// The kinds of callers that may use a tool. Users may use what project managers may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Audience {
    pub(crate) managers: bool,
    pub(crate) analysts: bool,
    pub(crate) sandboxes: bool,
}

pub(crate) const MANAGERS: Audience = Audience {
    managers: true,
    analysts: false,
    sandboxes: false,
};
pub(crate) const AGENTS: Audience = Audience {
    analysts: true,
    ..MANAGERS
};
pub(crate) const ALL: Audience = Audience {
    sandboxes: true,
    ..AGENTS
};

impl Audience {
    pub(crate) const fn includes(self, kind: TokenKind) -> bool {
        match kind {
            TokenKind::User | TokenKind::ProjectManager => self.managers,
            TokenKind::ProjectAnalyst => self.analysts,
            TokenKind::Sandbox => self.sandboxes,
        }
    }
}

/// The arguments of a tool. They are turned into its plan.
pub(crate) trait Arguments: DeserializeOwned + ToSchema {
    fn into_plan(self) -> Result<Plan, ApiError>;
}

/// The arguments of a tool on `/mcp/coding`. The task is that of the token, and so is the session
/// unless the arguments name one.
pub(crate) trait CodingArguments: DeserializeOwned + ToSchema {
    fn into_plan(self, own: OwnSession) -> Result<Plan, ApiError>;
}

/// The effect of a tool, as it is declared to clients in the tool list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolEffect {
    /// Changes nothing.
    ReadOnly,
    /// Only adds something.
    Additive,
    /// May overwrite or end something.
    Destructive,
}

pub(crate) struct Tool {
    pub(crate) name: &'static str,
    pub(crate) description: &'static str,
    pub(crate) audience: Audience,
    pub(crate) effect: ToolEffect,
    /// The system setting that must be true.
    pub(crate) enabled_by: Option<&'static str>,
    pub(crate) input: Arc<Map<String, Value>>,
    pub(crate) output: Arc<Map<String, Value>>,
    parse_into_plan: fn(&[u8], Option<OwnSession>) -> Result<Plan, ApiError>,
    parse: argument_errors::Parse,
}

impl std::fmt::Debug for Tool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tool")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Tool {
    fn new<A: Arguments, O: ToSchema>(
        name: &'static str,
        audience: Audience,
        effect: ToolEffect,
        description: &'static str,
    ) -> Self {
        let parse_into_plan =
            |arguments: &[u8], _: Option<OwnSession>| edge::parse::<A>(arguments)?.into_plan();
        let parse = |arguments: &[u8]| edge::parse::<A>(arguments).map(drop);
        Self {
            name,
            description,
            audience,
            effect,
            enabled_by: None,
            input: Arc::new(schema::of::<A>()),
            output: Arc::new(schema::of::<O>()),
            parse_into_plan,
            parse,
        }
    }

    /// A tool of `/mcp/coding`.
    fn coding<A: CodingArguments>(
        name: &'static str,
        effect: ToolEffect,
        description: &'static str,
    ) -> Self {
        let parse_into_plan = |arguments: &[u8], own: Option<OwnSession>| {
            let own = own.ok_or_else(|| ApiError::invalid("the token has no session"))?;
            edge::parse::<A>(arguments)?.into_plan(own)
        };
        let parse = |arguments: &[u8]| edge::parse::<A>(arguments).map(drop);
        Self {
            name,
            description,
            audience: MANAGERS,
            effect,
            enabled_by: None,
            input: Arc::new(schema::of::<A>()),
            output: Arc::new(Map::new()),
            parse_into_plan,
            parse,
        }
    }

    /// Makes the tool depend on a system setting.
    fn enabled_by(self, setting: &'static str) -> Self {
        Self {
            enabled_by: Some(setting),
            ..self
        }
    }

    /// Parses the arguments into the plan of a call. Tools of `/mcp/coding` need the session of
    /// the caller's token.
    pub(crate) fn plan(
        &self,
        arguments: &Map<String, Value>,
        own: Option<OwnSession>,
    ) -> Result<Plan, ApiError> {
        let bytes =
            serde_json::to_vec(arguments).map_err(|error| ApiError::invalid(error.to_string()))?;
        (self.parse_into_plan)(&bytes, own).map_err(|error| {
            if (self.parse)(&bytes).is_err() {
                argument_errors::all(&self.input, self.parse, arguments, error)
            } else {
                error
            }
        })
    }

    /// The name for clients that do not support dots.
    pub(crate) fn underscored(&self) -> String {
        self.name.replace('.', "_")
    }
}

static TOOLS: LazyLock<Vec<Tool>> = LazyLock::new(|| {
    let mut tools = Vec::new();
    tools.extend(sessions::tools());
    tools.extend(workspace::tools());
    tools.extend(sandbox::tools());
    tools.extend(artifacts::tools());
    tools.extend(work::tools());
    tools.extend(git::tools());
    tools.extend(later::tools());
    tools
});

static CODING_TOOLS: LazyLock<Vec<Tool>> = LazyLock::new(coding::tools);

/// All tools of `/mcp` in listing order.
pub(crate) fn all() -> &'static [Tool] {
    &TOOLS
}

/// The tools of `/mcp/coding` in listing order.
pub(crate) fn for_coding() -> &'static [Tool] {
    &CODING_TOOLS
}

pub(crate) fn find(tools: &'static [Tool], name: &str, underscored: bool) -> Option<&'static Tool> {
    tools.iter().find(|tool| {
        if underscored {
            tool.underscored() == name
        } else {
            tool.name == name
        }
    })
}

/// Rewrites the names of tools in a text to the client's spelling.
pub(crate) fn spelled(text: &str, underscored: bool) -> String {
    let mut text = text.to_owned();
    if underscored {
        // Long names first: one may begin with another.
        let mut names: Vec<&Tool> = all()
            .iter()
            .filter(|tool| text.contains(tool.name))
            .collect();
        names.sort_by_key(|tool| std::cmp::Reverse(tool.name.len()));
        for tool in names {
            text = text.replace(tool.name, &tool.underscored());
        }
    }
    text
}

pub(crate) use coding::DEFAULT_OUTPUT as CODING_OUTPUT;
pub(crate) use workspace::MAX_READ;

/// Defines argument structs that refuse unknown fields.
macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident { $($(#[$detail:meta])* $field:ident: $type:ty,)* })*) => { $(
        #[derive(Debug, serde::Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields)]
        $(#[$doc])*
        pub(crate) struct $name { $($(#[$detail])* pub(crate) $field: $type,)* }
    )* };
}
pub(crate) use arguments;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Every reference in a schema.
    fn references(value: &Value) -> Vec<&str> {
        match value {
            Value::Object(members) => members
                .iter()
                .flat_map(|(name, member)| {
                    member
                        .as_str()
                        .filter(|_| name == "$ref")
                        .map_or_else(|| references(member), |to| vec![to])
                })
                .collect(),
            Value::Array(items) => items.iter().flat_map(references).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn every_reference_in_a_schema_is_defined() {
        for tool in all().iter().chain(for_coding()) {
            for schema in [&tool.input, &tool.output] {
                let schema = Value::Object((**schema).clone());
                for to in references(&schema) {
                    let pointer = to.strip_prefix('#').expect("a place in the same schema");
                    assert!(
                        schema.pointer(pointer).is_some(),
                        "{}: {to} is undefined",
                        tool.name
                    );
                }
            }
        }
    }

    #[test]
    fn every_tool_has_a_name_of_its_own_with_and_without_dots() {
        let names: HashSet<&str> = all().iter().map(|tool| tool.name).collect();
        let underscored: HashSet<String> = all().iter().map(Tool::underscored).collect();
        assert_eq!((names.len(), underscored.len()), (all().len(), all().len()));
        assert!(underscored.iter().all(|name| {
            name.len() <= 64
                && name
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        }));
    }

    #[test]
    // invariant: api-boundaries
    fn the_list_of_tools_matches_its_snapshot() {
        let audience = |tool: &Tool| {
            let named = [
                (tool.audience.managers, "pm"),
                (tool.audience.analysts, "pa"),
                (tool.audience.sandboxes, "sandbox"),
            ];
            named
                .into_iter()
                .filter(|(is, _)| *is)
                .map(|(_, name)| name)
                .collect::<Vec<_>>()
                .join(" ")
        };
        let takes = |tool: &Tool| {
            let required = |name: &str| {
                tool.input
                    .get("required")
                    .and_then(Value::as_array)
                    .is_some_and(|names| names.iter().any(|required| required == name))
            };
            let names = tool
                .input
                .get("properties")
                .and_then(Value::as_object)
                .into_iter()
                .flat_map(Map::keys);
            names
                .map(|name| {
                    if required(name) {
                        name.clone()
                    } else {
                        format!("{name}?")
                    }
                })
                .collect::<Vec<_>>()
                .join(", ")
        };
        let lines = |tools: &[Tool]| {
            tools
                .iter()
                .map(|tool| format!("{} {{{}}}: {}", tool.name, takes(tool), audience(tool)))
                .collect::<Vec<String>>()
                .join("\n")
        };
        insta::assert_snapshot!(lines(all()));
        insta::assert_snapshot!(
            "the_list_of_coding_tools_matches_its_snapshot",
            lines(for_coding())
        );
    }

    #[test]
    fn names_in_texts_are_spelled_as_the_client_does() {
        let text = "sandbox.session.exec, then sandbox.exec or help.get";
        assert_eq!(spelled(text, false), text);
        assert_eq!(
            spelled(text, true),
            "sandbox_session_exec, then sandbox_exec or help_get"
        );
    }
}
