//! The gateway: what agents can do by tools, and what they can't.

mod callers;
mod clients;
mod nonsense;
mod work;

use anyhow::{Context as _, Result, ensure};
use cynode_tests::Answer;
use http::Method;
use serde_json::{Value, json};

use super::small::{Small, session, text};

/// The revision of the protocol that the requests of these tests speak.
const REVISION: &str = "2025-06-18";

/// An agent with a token.
struct Agent<'a> {
    small: &'a Small,
    token: String,
    path: &'static str,
}

impl<'a> Agent<'a> {
    fn new(small: &'a Small, token: &str) -> Self {
        Self {
            small,
            token: token.to_owned(),
            path: "/mcp",
        }
    }

    /// One that has a token of its own, for tasks.
    async fn of(small: &'a Small, owner: &str, kind: &str, tasks: &[&str]) -> Result<Self> {
        let made = small
            .make(
                owner,
                "/v1/tokens",
                &json!({"kind": kind, "task_ids": tasks}),
            )
            .await?;
        Ok(Self::new(small, &text(&made["token"])?))
    }

    /// The answer to a request, whole.
    async fn ask(&self, method: &str, params: &Value) -> Result<Value> {
        let request = self
            .small
            .request_by(&self.token, Method::POST, self.path)?;
        let request = request
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", REVISION);
        let answer = Answer::of(
            request.json(&json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})),
        )
        .await?;
        ensure!(
            answer.status == 200,
            "{method}: {} {}",
            answer.status,
            String::from_utf8_lossy(&answer.body)
        );
        Ok(serde_json::from_slice(&answer.body)?)
    }

    /// The names of the tools that it is shown.
    async fn tools(&self) -> Result<Vec<Value>> {
        let answer = self.ask("tools/list", &json!({})).await?;
        answer["result"]["tools"]
            .as_array()
            .cloned()
            .with_context(|| format!("{answer}"))
    }

    async fn names(&self) -> Result<Vec<String>> {
        self.tools()
            .await?
            .iter()
            .map(|tool| text(&tool["name"]))
            .collect()
    }

    async fn call(&self, tool: &str, arguments: Value) -> Result<Value> {
        self.ask("tools/call", &json!({"name": tool, "arguments": arguments}))
            .await
    }

    /// What a call that goes well answers.
    async fn done(&self, tool: &str, arguments: Value) -> Result<Value> {
        let answer = self.call(tool, arguments).await?;
        let result = &answer["result"];
        ensure!(result["isError"] == false, "{tool}: {answer}");
        let words = text(&result["content"][0]["text"])?;
        ensure!(
            words.len() <= 8_192 && !words.is_empty(),
            "{tool} told {} bytes",
            words.len()
        );
        Ok(result["structuredContent"].clone())
    }

    /// The code and the stage of a refusal.
    async fn refused(&self, tool: &str, arguments: Value) -> Result<(String, String)> {
        let answer = self.call(tool, arguments).await?;
        let failure = &answer["result"]["structuredContent"];
        ensure!(answer["result"]["isError"] == true, "{tool}: {answer}");
        for member in ["message", "remedy", "request_id"] {
            ensure!(
                failure[member]
                    .as_str()
                    .is_some_and(|text| !text.is_empty()),
                "{tool}: no {member} in {failure}"
            );
        }
        Ok((text(&failure["code"])?, text(&failure["stage"])?))
    }

    /// Fails unless a tool seems not to be there.
    async fn unknown(&self, tool: &str, arguments: Value) -> Result<()> {
        let answer = self.call(tool, arguments).await?;
        ensure!(
            answer["error"]["code"] == -32602 && answer["error"]["message"] == "unknown_tool",
            "{tool}: {answer}"
        );
        Ok(())
    }
}

async fn task(small: &Small, owner: &str, name: &str) -> Result<String> {
    text(
        &small
            .make(owner, "/v1/tasks", &json!({"name": name}))
            .await?["id"],
    )
}

/// What makes a small session.
fn create(task: &str) -> Value {
    json!({"task_id": task, "session_id": "new", "image_ref": "default", "workspace_ref": "new", "constraints": session()})
}

/// What runs a command.
fn exec(task: &str, session: &str, script: &str) -> Value {
    json!({"task_id": task, "session_id": session, "argv": ["sh", "-c", script], "timeout_ms": 20_000, "cwd": ".", "env": {}})
}

/// Arguments, and more of them.
fn with(mut arguments: Value, more: &Value) -> Value {
    arguments
        .as_object_mut()
        .into_iter()
        .for_each(|members| members.extend(more.as_object().cloned().unwrap_or_default()));
    arguments
}
