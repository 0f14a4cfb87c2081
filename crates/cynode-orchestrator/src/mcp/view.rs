//! The presentation of one call to its client: the spelling of tool names, the size limit of the
//! text, and the call that continues a truncated result.

use serde_json::{Map, Value};

use super::{
    surface::ToolSet,
    tools::{MAX_READ, Tool},
};

/// Default size limit of a text. Calls on `/mcp/coding` can raise it.
pub(crate) const MAX_TEXT: usize = 8 * 1024;
/// Extra space for notes about a result.
const NOTE_BYTES: usize = 1_024;
/// Estimated bytes of text per listed entry or search match.
const LINE_BYTES: usize = 256;

/// The arguments that a continuation repeats.
const REPEATED: [&str; 18] = [
    "task_id",
    "session_id",
    "job_id",
    "exec_id",
    "path",
    "id",
    "start_line",
    "end_line",
    "max_bytes",
    "max_output_bytes",
    "after_seq",
    "tail_bytes",
    "depth",
    "max_entries",
    "pattern",
    "glob",
    "context_lines",
    "max_results",
];

#[derive(Debug)]
pub(crate) struct View {
    surface: ToolSet,
    pub(super) tool: &'static str,
    arguments: Map<String, Value>,
    /// Size limit of the text.
    pub(super) limit: usize,
    /// The call sets its own size limit.
    pub(super) has_own_limit: bool,
}

impl View {
    /// A call whose tool is not known.
    pub(super) fn unknown(surface: ToolSet) -> Self {
        Self {
            surface,
            tool: "",
            arguments: Map::new(),
            limit: MAX_TEXT,
            has_own_limit: false,
        }
    }

    pub(super) fn new(surface: ToolSet, tool: &Tool, arguments: &Map<String, Value>) -> Self {
        let number = |name: &str| {
            let number = arguments.get(name).and_then(Value::as_u64);
            number.map(|number| usize::try_from(number).unwrap_or(usize::MAX))
        };
        let bytes = number("max_bytes").or(number("tail_bytes"));
        let streams = number("max_output_bytes").map(|bytes| bytes.saturating_mul(2));
        let lines = number("max_entries").or(number("max_results"));
        let requested = bytes
            .or(streams)
            .or(lines.map(|lines| lines.saturating_mul(LINE_BYTES)));
        let max = usize::try_from(2 * MAX_READ).unwrap_or(usize::MAX);
        // On `/mcp` the text stays short whatever is requested for: the structure has the rest.
        let limit = match requested {
            Some(requested) if surface.is_coding() => MAX_TEXT.max(requested.min(max) + NOTE_BYTES),
            _ => MAX_TEXT,
        };
        let arguments = REPEATED
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), arguments.get(*name)?.clone())))
            .collect();
        Self {
            surface,
            tool: tool.name,
            arguments,
            limit,
            has_own_limit: requested.is_some(),
        }
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.arguments.get(name).and_then(Value::as_u64)
    }

    pub(super) const fn is_coding(&self) -> bool {
        self.surface.is_coding()
    }

    /// Formats a call of a tool in the same session, as the client would write it.
    pub(super) fn call(&self, tool: &str, repeated: &[&str], more: &[(&str, Value)]) -> String {
        let mut arguments = Map::new();
        for name in ["task_id", "session_id", "job_id"].iter().chain(repeated) {
            if let Some(value) = self.arguments.get(*name) {
                arguments.insert((*name).to_owned(), value.clone());
            }
        }
        for (name, value) in more {
            arguments.insert((*name).to_owned(), value.clone());
        }
        format!(
            "{} {}",
            self.surface.spelled(tool),
            Value::Object(arguments)
        )
    }

    /// The tool that reads the output of a command which this call ran or read.
    pub(super) fn output_tool(&self) -> &'static str {
        if matches!(self.tool, "sandbox.exec" | "sandbox.stream_logs") {
            "sandbox.stream_logs"
        } else {
            "sandbox.session.output"
        }
    }
}
