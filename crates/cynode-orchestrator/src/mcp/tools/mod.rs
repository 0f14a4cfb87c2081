//! The tools: who may use each, what it takes, what it answers, and the call that it becomes.
//!
//! What must stay true: a tool that does something does it by a route of the user API, so that the gate decides and records it like
//! everybody's call. What a tool takes is read strictly, before anything else happens.

mod flaws;
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

use super::{plan::Plan, schema};

/// Which kinds of callers a tool is for. People may use what managers may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct For {
    pub(crate) managers: bool,
    pub(crate) analysts: bool,
    pub(crate) sandboxes: bool,
}

pub(crate) const MANAGERS: For = For {
    managers: true,
    analysts: false,
    sandboxes: false,
};
pub(crate) const AGENTS: For = For {
    analysts: true,
    ..MANAGERS
};
pub(crate) const ALL: For = For {
    sandboxes: true,
    ..AGENTS
};

impl For {
    pub(crate) const fn has(self, kind: TokenKind) -> bool {
        match kind {
            TokenKind::User | TokenKind::ProjectManager => self.managers,
            TokenKind::ProjectAnalyst => self.analysts,
            TokenKind::Sandbox => self.sandboxes,
        }
    }
}

/// What is taken by a tool, and the plan that is made of it.
pub(crate) trait Arguments: DeserializeOwned + ToSchema {
    fn plan(self) -> Result<Plan, ApiError>;
}

/// What clients may think of a tool before they call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Changes nothing.
    Reads,
    /// Adds, and takes nothing away.
    Adds,
    /// May overwrite or end something.
    Changes,
}

pub(crate) struct Tool {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) for_whom: For,
    pub(crate) kind: Kind,
    /// A system setting that must be true.
    pub(crate) enabled_by: Option<&'static str>,
    pub(crate) input: Arc<Map<String, Value>>,
    pub(crate) output: Arc<Map<String, Value>>,
    plan: fn(&[u8]) -> Result<Plan, ApiError>,
    read: flaws::Read,
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
        for_whom: For,
        kind: Kind,
        about: &'static str,
    ) -> Self {
        let plan = |arguments: &[u8]| edge::parse::<A>(arguments)?.plan();
        let read = |arguments: &[u8]| edge::parse::<A>(arguments).map(drop);
        Self {
            name,
            about,
            for_whom,
            kind,
            enabled_by: None,
            input: Arc::new(schema::of::<A>()),
            output: Arc::new(schema::of::<O>()),
            plan,
            read,
        }
    }

    /// Only while a setting of the system is true.
    fn while_enabled(self, setting: &'static str) -> Self {
        Self {
            enabled_by: Some(setting),
            ..self
        }
    }

    /// Reads what it is called with.
    pub(crate) fn plan(&self, arguments: &Map<String, Value>) -> Result<Plan, ApiError> {
        let bytes =
            serde_json::to_vec(arguments).map_err(|error| ApiError::invalid(error.to_string()))?;
        (self.plan)(&bytes).map_err(|error| {
            if (self.read)(&bytes).is_err() {
                flaws::all(&self.input, self.read, arguments, error)
            } else {
                error
            }
        })
    }

    /// Its name for clients whose names have no dots.
    pub(crate) fn underscored(&self) -> String {
        self.name.replace('.', "_")
    }
}

static TOOLS: LazyLock<Vec<Tool>> = LazyLock::new(|| {
    let mut tools = Vec::new();
    tools.extend(sessions::tools());
    tools.extend(workspace::tools());
    tools.extend(sandbox::tools());
    tools.extend(work::tools());
    tools.extend(later::tools());
    tools
});

/// All tools, in the order in which they are listed.
pub(crate) fn all() -> &'static [Tool] {
    &TOOLS
}

/// The tool of a name, as a caller says it.
pub(crate) fn find(name: &str, underscored: bool) -> Option<&'static Tool> {
    all().iter().find(|tool| {
        if underscored {
            tool.underscored() == name
        } else {
            tool.name == name
        }
    })
}

macro_rules! arguments {
    ($($(#[$about:meta])* $name:ident { $($(#[$detail:meta])* $field:ident: $type:ty,)* })*) => { $(
        #[derive(Debug, serde::Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields)]
        $(#[$about])*
        pub(crate) struct $name { $($(#[$detail])* pub(crate) $field: $type,)* }
    )* };
}
pub(crate) use arguments;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Every place that a schema leads to, below it.
    fn leads(value: &Value) -> Vec<&str> {
        match value {
            Value::Object(members) => members
                .iter()
                .flat_map(|(name, member)| {
                    member
                        .as_str()
                        .filter(|_| name == "$ref")
                        .map_or_else(|| leads(member), |to| vec![to])
                })
                .collect(),
            Value::Array(items) => items.iter().flat_map(leads).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn every_schema_is_whole() {
        for tool in all() {
            for schema in [&tool.input, &tool.output] {
                let schema = Value::Object((**schema).clone());
                for to in leads(&schema) {
                    let pointer = to.strip_prefix('#').expect("a place in the same schema");
                    assert!(
                        schema.pointer(pointer).is_some(),
                        "{}: {to} leads nowhere",
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
    fn the_list_of_tools_changes_only_when_somebody_means_it() {
        let who = |tool: &Tool| {
            let named = [
                (tool.for_whom.managers, "pm"),
                (tool.for_whom.analysts, "pa"),
                (tool.for_whom.sandboxes, "sandbox"),
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
        let lines: Vec<String> = all()
            .iter()
            .map(|tool| format!("{} {{{}}}: {}", tool.name, takes(tool), who(tool)))
            .collect();
        insta::assert_snapshot!(lines.join("\n"));
    }
}
