//! The tool sets of the gateway, one per address: their tools, and how these are named and listed.

use std::sync::Arc;

use rmcp::model::{Tool as ListedTool, ToolAnnotations};
use serde_json::Value;

use super::{
    schema,
    tools::{self, Tool, ToolEffect},
};

/// A set of tools that an address serves, with its spelling of their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolSet {
    /// `/mcp`: every tool of the caller.
    Full { underscored: bool },
    /// `/mcp/coding`.
    Coding,
}

impl ToolSet {
    pub(super) const fn is_coding(self) -> bool {
        matches!(self, Self::Coding)
    }

    pub(super) const fn underscored(self) -> bool {
        matches!(self, Self::Coding | Self::Full { underscored: true })
    }

    pub(super) fn tools(self) -> &'static [Tool] {
        match self {
            Self::Full { .. } => tools::all(),
            Self::Coding => tools::for_coding(),
        }
    }

    pub(super) fn find(self, name: &str) -> Option<&'static Tool> {
        tools::find(self.tools(), name, self.underscored())
    }

    /// Rewrites the names of tools in a text to the spelling of this address.
    pub(super) fn spelled(self, text: &str) -> String {
        tools::spelled(text, self.underscored())
    }

    /// Rewrites the names of tools in all strings of an answer.
    pub(super) fn spelled_in(self, answer: Value) -> Value {
        match answer {
            Value::String(text) => Value::String(self.spelled(&text)),
            Value::Array(items) => items
                .into_iter()
                .map(|item| self.spelled_in(item))
                .collect(),
            Value::Object(members) => members
                .into_iter()
                .map(|(name, member)| (name, self.spelled_in(member)))
                .collect(),
            other => other,
        }
    }

    /// The instructions that clients pass on to models.
    pub(super) fn instructions(self) -> String {
        self.spelled(match self {
            Self::Full { .. } => {
                "Sandboxes for agents: sessions, commands, files, artifacts. Call help.list first."
            }
            Self::Coding => {
                "A Linux sandbox of your own with a workspace at /workspace that stays between \
                 calls. Just call sandbox.session.exec or a file tool: the first call makes the \
                 session. help.get tells more."
            }
        })
    }

    /// A tool as it is listed to clients.
    pub(super) fn listed(self, tool: &Tool) -> ListedTool {
        let name = if self.underscored() {
            tool.underscored()
        } else {
            tool.name.to_owned()
        };
        if self.is_coding() {
            let listed = ListedTool::new(
                name,
                tool.description,
                Arc::new(schema::compact(&tool.input)),
            );
            return if tool.effect == ToolEffect::ReadOnly {
                listed.with_annotations(ToolAnnotations::new().read_only(true))
            } else {
                listed
            };
        }
        let annotations = ToolAnnotations::new()
            .read_only(tool.effect == ToolEffect::ReadOnly)
            .destructive(tool.effect == ToolEffect::Destructive)
            .open_world(false);
        ListedTool::new(
            name,
            self.spelled(tool.description),
            Arc::clone(&tool.input),
        )
        .with_raw_output_schema(Arc::clone(&tool.output))
        .with_annotations(annotations)
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::{CacheScope, ListToolsResult};

    use super::*;

    fn list(surface: ToolSet) -> ListToolsResult {
        let tools = surface.tools().iter().map(|tool| surface.listed(tool));
        ListToolsResult::with_all_items(tools.collect()).with_cache_scope(CacheScope::Private)
    }

    #[test]
    // invariant: bounded
    fn the_lists_of_tools_have_known_sizes() {
        let size = |surface| {
            let list = serde_json::to_string(&list(surface)).expect("JSON");
            list.chars().count()
        };
        assert!(size(ToolSet::Coding) <= 8_000, "{}", size(ToolSet::Coding));
        let lines: Vec<String> = [
            ("/mcp", ToolSet::Full { underscored: false }),
            ("/mcp?names=underscore", ToolSet::Full { underscored: true }),
            ("/mcp/coding", ToolSet::Coding),
        ]
        .into_iter()
        .map(|(path, surface)| {
            let count = surface.tools().len();
            format!("{path}: {count} tools, {} characters", size(surface))
        })
        .collect();
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn the_short_list_has_no_output_schemas_and_no_dotted_names() {
        for tool in list(ToolSet::Coding).tools {
            let tool = serde_json::to_value(tool).expect("JSON");
            assert!(tool.get("outputSchema").is_none(), "{tool}");
            assert!(!tool["name"].as_str().unwrap_or_default().contains('.'));
            assert!(!tool.to_string().contains("task_id"), "{tool}");
            assert!(!tool.to_string().contains("null"), "{tool}");
            assert!(!tool.to_string().contains("$ref"), "{tool}");
        }
    }
}
