//! The MCP gateway: what agents can and can't do with tools.

mod bridge;
mod callers;
mod clients;
mod coding;
mod jobs;
mod nonsense;
mod work;

use anyhow::{Context as _, Result, ensure};
use cynode_tests::Answer;
use http::Method;
use serde_json::{Value, json};

use super::cluster::{Cluster, session, text};

/// The protocol revision of these tests' requests.
const REVISION: &str = "2025-06-18";

/// An agent with a token.
pub(super) struct McpAgent<'a> {
    cluster: &'a Cluster,
    token: String,
    path: &'static str,
}

impl<'a> McpAgent<'a> {
    fn new(cluster: &'a Cluster, token: &str) -> Self {
        Self {
            cluster,
            token: token.to_owned(),
            path: "/mcp",
        }
    }

    /// An agent with its own token for some tasks.
    pub(super) async fn with_token_for(
        cluster: &'a Cluster,
        owner: &str,
        kind: &str,
        tasks: &[&str],
    ) -> Result<Self> {
        let made = cluster
            .make(
                owner,
                "/v1/tokens",
                &json!({"kind": kind, "task_ids": tasks}),
            )
            .await?;
        Ok(Self::new(cluster, &text(&made["token"])?))
    }

    /// Sends a JSON-RPC request and returns the response.
    async fn rpc(&self, method: &str, params: &Value) -> Result<Value> {
        let request = self
            .cluster
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

    /// The tools that the agent sees.
    async fn tools(&self) -> Result<Vec<Value>> {
        let answer = self.rpc("tools/list", &json!({})).await?;
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

    pub(super) async fn call(&self, tool: &str, arguments: Value) -> Result<Value> {
        self.rpc("tools/call", &json!({"name": tool, "arguments": arguments}))
            .await
    }

    /// Calls a tool, which must succeed, and returns its result.
    pub(super) async fn call_ok(&self, tool: &str, arguments: Value) -> Result<Value> {
        let answer = self.call(tool, arguments).await?;
        let result = &answer["result"];
        ensure!(result["isError"] == false, "{tool}: {answer}");
        let words = text(&result["content"][0]["text"])?;
        ensure!(
            words.len() <= 8_192 && !words.is_empty(),
            "{tool} returned {} bytes of text",
            words.len()
        );
        Ok(result["structuredContent"].clone())
    }

    /// Calls a tool, which must be refused, and returns the code and the stage.
    async fn call_refused(&self, tool: &str, arguments: Value) -> Result<(String, String)> {
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

    /// Fails unless the tool seems not to exist.
    async fn assert_unknown(&self, tool: &str, arguments: Value) -> Result<()> {
        let answer = self.call(tool, arguments).await?;
        ensure!(
            answer["error"]["code"] == -32602 && answer["error"]["message"] == "unknown_tool",
            "{tool}: {answer}"
        );
        Ok(())
    }
}

async fn task(cluster: &Cluster, owner: &str, name: &str) -> Result<String> {
    text(
        &cluster
            .make(owner, "/v1/tasks", &json!({"name": name}))
            .await?["id"],
    )
}

/// Arguments that create a small session.
fn create(task: &str) -> Value {
    json!({
        "task_id": task,
        "session_id": "new",
        "image_ref": "default",
        "workspace_ref": "new",
        "constraints": session()
    })
}

/// Arguments that run a command.
fn exec(task: &str, session: &str, script: &str) -> Value {
    json!({
        "task_id": task,
        "session_id": session,
        "argv": ["sh", "-c", script],
        "timeout_ms": 20_000,
        "cwd": ".",
        "env": {}
    })
}

/// Merges more arguments.
fn merge(mut arguments: Value, more: &Value) -> Value {
    arguments
        .as_object_mut()
        .into_iter()
        .for_each(|members| members.extend(more.as_object().cloned().unwrap_or_default()));
    arguments
}
