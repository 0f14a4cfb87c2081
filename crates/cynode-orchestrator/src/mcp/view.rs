//! How a call is shown to its client: the names that the client uses, the size of the text, and the
//! call that continues where a result was cut.

use serde_json::{Map, Value};

use super::{
    surface::Surface,
    tools::{MAX_READ, Tool},
};

/// The longest text, unless a call on `/mcp/coding` asks for more.
pub(crate) const MAX_TEXT: usize = 8 * 1024;
/// Room for what a text says about a result.
const NOTES: usize = 1_024;
/// The bytes of text that one entry of a listing or one match may take.
const LINE: usize = 256;

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
    surface: Surface,
    pub(super) tool: &'static str,
    arguments: Map<String, Value>,
    /// The longest text.
    pub(super) limit: usize,
    /// The call asks for more than fits the default text.
    pub(super) asks_for_more: bool,
}

impl View {
    /// A call whose tool is not known.
    pub(super) fn unknown(surface: Surface) -> Self {
        Self {
            surface,
            tool: "",
            arguments: Map::new(),
            limit: MAX_TEXT,
            asks_for_more: false,
        }
    }

    pub(super) fn new(surface: Surface, tool: &Tool, arguments: &Map<String, Value>) -> Self {
        let number = |name: &str| {
            let number = arguments.get(name).and_then(Value::as_u64);
            number.map(|number| usize::try_from(number).unwrap_or(usize::MAX))
        };
        let bytes = number("max_bytes").or(number("tail_bytes"));
        let streams = number("max_output_bytes").map(|bytes| bytes.saturating_mul(2));
        let lines = number("max_entries").or(number("max_results"));
        let asked = bytes
            .or(streams)
            .or(lines.map(|lines| lines.saturating_mul(LINE)));
        let most = usize::try_from(2 * MAX_READ).unwrap_or(usize::MAX);
        // On `/mcp` the text stays short whatever is asked for: the structure has the rest.
        let limit = match asked {
            Some(asked) if surface.is_coding() => MAX_TEXT.max(asked.min(most) + NOTES),
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
            asks_for_more: asked.is_some(),
        }
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.arguments.get(name).and_then(Value::as_u64)
    }

    pub(super) const fn is_coding(&self) -> bool {
        self.surface.is_coding()
    }

    /// A call of a tool as this client would write it, in the same session.
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
