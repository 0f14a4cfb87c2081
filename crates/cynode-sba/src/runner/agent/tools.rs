//! The tools of an agent: what models are told of them, and how their calls are read.
//!
//! Invariant: a call is read as strictly as a step of a job, by the same code. What is wrong with
//! one is told to the model, and nothing runs.

use cynode_api::{
    SearchRequest,
    sba::{Step, StepResult, StreamEncoding},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    super::{result::bounded_to, todo::TodoList},
    dialogue::middle_cut,
};

/// `tools.json` has the name, the description and the parameters of each.
const TOOLS: &str = include_str!("tools.json");
/// The deadline of a command, unless the model names one.
const COMMAND_SECONDS: u64 = 600;
/// What is read of a file, unless the model asks for more: what it gets to see.
const READ_BYTES: u64 = 15 * 1024;
/// Matches of a search, unless the model asks for more.
const DEFAULT_MATCHES: u32 = 100;
/// What the model gets to see of one result. All of it is in the result of the step.
const MAX_RESULT_BYTES: usize = 16 * 1024;
/// What is wrong with a call.
const MAX_FAULT_BYTES: usize = 2 * 1024;

/// A call that can be carried out.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ToolCall {
    Step(Box<Step>),
    Search(SearchRequest),
    Todo(TodoChange),
    Finish(Finish),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TodoChange {
    Add { title: String },
    Complete { id: u64 },
    Split { id: u64, parts: Vec<String> },
    Reorder { ids: Vec<u64> },
}

/// What the model says of the job at its end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Finish {
    pub(super) summary: String,
    #[serde(default)]
    pub(super) criteria: Vec<Claim>,
}

/// What the model says of an acceptance criterion.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Claim {
    pub(super) index: u64,
    pub(super) is_met: bool,
    #[serde(default)]
    pub(super) detail: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddArguments {
    title: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CompleteArguments {
    id: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SplitArguments {
    id: u64,
    parts: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReorderArguments {
    ids: Vec<u64>,
}

/// The tools as a request lists them.
pub(super) fn definitions() -> Value {
    let tools: Vec<Value> = serde_json::from_str(TOOLS).unwrap_or_default();
    tools
        .into_iter()
        .map(|tool| json!({"type": "function", "function": tool}))
        .collect()
}

/// Reads the arguments of a call, as the model wrote them.
pub(super) fn arguments(text: &str) -> Result<Map<String, Value>, String> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_str(text)
        .map_err(|error| format!("the arguments are not a JSON object: {error}"))
}

impl ToolCall {
    /// Reads a call; the error is for the model.
    pub(super) fn read(name: &str, arguments: &Map<String, Value>) -> Result<Self, String> {
        let read = match name {
            "run_command" | "write_file" | "read_file" | "apply_unified_diff" | "list_tree" => {
                step(name, arguments.clone()).map(|step| Self::Step(Box::new(step)))
            }
            "search" => parsed(arguments).map(|mut request: SearchRequest| {
                request.max_results.get_or_insert(DEFAULT_MATCHES);
                Self::Search(request)
            }),
            "todo_add" => parsed(arguments)
                .map(|AddArguments { title }| Self::Todo(TodoChange::Add { title })),
            "todo_complete" => parsed(arguments)
                .map(|CompleteArguments { id }| Self::Todo(TodoChange::Complete { id })),
            "todo_split" => parsed(arguments)
                .map(|SplitArguments { id, parts }| Self::Todo(TodoChange::Split { id, parts })),
            "todo_reorder" => parsed(arguments)
                .map(|ReorderArguments { ids }| Self::Todo(TodoChange::Reorder { ids })),
            "finish" => parsed(arguments).map(Self::Finish),
            _ => Err(format!("there is no tool {name:?}")),
        };
        read.map_err(|fault| bounded_to(&fault, MAX_FAULT_BYTES))
    }
}

fn step(name: &str, mut arguments: Map<String, Value>) -> Result<Step, String> {
    // The deadline belongs to the step, not to its arguments.
    let timeout = (name == "run_command").then(|| {
        let given = arguments.remove("timeout_seconds");
        given.unwrap_or_else(|| COMMAND_SECONDS.into())
    });
    if name == "read_file" {
        arguments
            .entry("max_bytes")
            .or_insert_with(|| READ_BYTES.into());
    }
    let mut step = json!({"type": name, "args": arguments});
    if let Some(timeout) = timeout {
        step["timeout_seconds"] = timeout;
    }
    let json = step.to_string();
    Step::parse(json.as_bytes()).map_err(|violations| violations.to_string())
}

fn parsed<T: for<'de> Deserialize<'de>>(arguments: &Map<String, Value>) -> Result<T, String> {
    T::deserialize(arguments).map_err(|error| error.to_string())
}

impl TodoChange {
    /// Changes the list; returns what to tell the model.
    pub(super) fn apply(self, list: &mut TodoList) -> Result<String, String> {
        let done = |()| "done".to_owned();
        let changed = match self {
            Self::Add { title } => list.add(&title).map(|id| format!("added as {id}")),
            Self::Complete { id } => list.complete(id).map(done),
            Self::Split { id, parts } => {
                let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
                list.split(id, &parts)
                    .map(|ids| format!("split into {ids:?}"))
            }
            Self::Reorder { ids } => list.reorder(&ids).map(done),
        };
        changed.map_err(|error| error.to_string())
    }
}

/// What the model gets to see of a step.
pub(super) fn described(result: &StepResult) -> String {
    let mut parts = Vec::new();
    if let Some(error) = &result.error {
        parts.push(format!("error: {error}"));
    } else if let Some(code) = result.exit_code {
        parts.push(format!("the command exited with {code}"));
    }
    let half = MAX_RESULT_BYTES / 2;
    let encoding = match result.encoding {
        StreamEncoding::Utf8 => "",
        StreamEncoding::Base64 => " (base64)",
    };
    for (name, stream) in [("stdout", &result.stdout), ("stderr", &result.stderr)] {
        if let Some(text) = stream.as_deref().filter(|text| !text.is_empty()) {
            parts.push(format!("{name}{encoding}:\n{}", middle_cut(text, half)));
        }
    }
    match &result.output {
        Some(Value::Object(output)) => {
            let mut output = output.clone();
            let content = output.remove("content");
            parts.push(middle_cut(&Value::Object(output).to_string(), half));
            if let Some(content) = content.as_ref().and_then(Value::as_str) {
                parts.push(middle_cut(content, MAX_RESULT_BYTES));
            }
        }
        Some(output) => parts.push(output.to_string()),
        None => {}
    }
    middle_cut(&parts.join("\n"), MAX_RESULT_BYTES)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn read(name: &str, arguments: &Value) -> Result<ToolCall, String> {
        ToolCall::read(name, arguments.as_object().expect("an object"))
    }

    #[test]
    fn every_tool_is_described_and_read() {
        let tools = definitions();
        let tools = tools.as_array().expect("a list");
        let mut names = BTreeSet::new();
        for tool in tools {
            let function = &tool["function"];
            let name = function["name"].as_str().expect("a name");
            let unknown = read(name, &json!({"unknown": 1})).expect_err("refused");
            assert!(!unknown.contains("no tool"), "{name}: {unknown}");
            assert!(function["description"].is_string(), "{name}");
            for required in function["parameters"]["required"]
                .as_array()
                .into_iter()
                .flatten()
            {
                let required = required.as_str().expect("a name");
                let missing = read(name, &json!({})).expect_err("refused");
                assert!(!missing.is_empty(), "{name}: {required}");
                assert!(function["parameters"]["properties"][required].is_object());
            }
            names.insert(name);
        }
        assert_eq!(names.len(), 11);
        assert!(
            read("rm", &json!({}))
                .expect_err("refused")
                .contains("no tool \"rm\"")
        );
    }

    #[test]
    fn the_calls_are_read_as_strictly_as_steps() {
        let ToolCall::Step(step) = read("run_command", &json!({"argv": ["ls"]})).expect("valid")
        else {
            panic!("a step")
        };
        assert_eq!(step.timeout_seconds, Some(COMMAND_SECONDS));
        let own = json!({"argv": ["ls"], "timeout_seconds": 3});
        let ToolCall::Step(step) = read("run_command", &own).expect("valid") else {
            panic!("a step")
        };
        assert_eq!(step.timeout_seconds, Some(3));
        for (name, arguments, place) in [
            ("run_command", json!({"argv": "ls"}), "args.argv"),
            (
                "run_command",
                json!({"argv": ["ls"], "timeout_seconds": 0}),
                "timeout_seconds",
            ),
            ("write_file", json!({"path": "x"}), "content"),
            (
                "read_file",
                json!({"path": "x", "timeout_seconds": 3}),
                "timeout_seconds",
            ),
            (
                "read_file",
                json!({"path": "x", "start_line": 3, "end_line": 2}),
                "end_line",
            ),
            ("search", json!({"pattern": "x", "depth": 2}), "depth"),
            ("todo_split", json!({"id": -1, "parts": []}), "-1"),
            (
                "finish",
                json!({"summary": "x", "criteria": [{"index": 0}]}),
                "is_met",
            ),
        ] {
            let fault = read(name, &arguments).expect_err("refused");
            assert!(fault.contains(place), "{name}: {fault}");
        }
        let long = json!({"x".repeat(100_000): 1, "path": "x"});
        assert!(read("read_file", &long).expect_err("refused").len() <= MAX_FAULT_BYTES);
    }

    #[test]
    fn arguments_are_one_object() {
        assert!(arguments(" ").is_ok_and(|arguments| arguments.is_empty()));
        assert!(arguments("{\"a\": 1}").is_ok());
        for bad in [
            "{",
            "[]",
            "null",
            "{} {}",
            "{}, \"timeout_seconds\": 1",
            "ls -l",
        ] {
            assert!(arguments(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_model_sees_both_ends_of_a_long_result() {
        let json = json!({
            "index": 0, "type": "run_command", "status": "failure", "exit_code": 3,
            "error": "the command exited with 3", "stdout": format!("begin{}end", "x".repeat(99_999)),
            "stderr": "why",
        });
        let result = StepResult::parse(json.to_string().as_bytes()).expect("valid");
        let text = described(&result);
        assert!(
            text.len() <= MAX_RESULT_BYTES && text.starts_with("error: the command exited with 3")
        );
        assert!(
            ["begin", "end", "left out", "stderr:\nwhy"]
                .iter()
                .all(|part| text.contains(part))
        );
        let json = json!({
            "index": 0, "type": "read_file", "status": "success",
            "output": {"path": "f", "content": "line\n", "size": 5},
        });
        let result = StepResult::parse(json.to_string().as_bytes()).expect("valid");
        assert_eq!(described(&result), "{\"path\":\"f\",\"size\":5}\nline\n");
    }
}
