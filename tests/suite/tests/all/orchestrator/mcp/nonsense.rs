//! Whatever its arguments, a tool responds with a result, or with a refusal and a remedy.

use anyhow::{Result, ensure};
use cynode_tests::Random;
use serde_json::{Value, json};

use super::{McpAgent, create, task};
use crate::orchestrator::{
    audit::assert_trail_intact,
    cluster::{Cluster, text},
};

const ROUNDS: u64 = 6;
const WORDS: &[&str] = &[
    "",
    "a",
    "a/b",
    "..",
    "/",
    "/workspace/x",
    "%2e%2e%2f",
    "?x=1&y#z",
    "a\u{0}b",
    "ü\u{202e}\n",
    "default",
    "new",
    "-1",
    "true",
    "cyn_x",
    "*",
    "[",
    "(?",
];
const NUMBERS: &[i64] = &[0, 1, 2, -1, 1_000, 1_048_577, 4_294_967_296, i64::MAX];

/// A generator of calls.
struct Nonsense {
    random: Random,
    /// Ids of existing things.
    ids: Vec<String>,
}

impl Nonsense {
    fn pick<'a, T: ?Sized>(&mut self, options: &[&'a T]) -> &'a T {
        options[usize::try_from(self.random.below(options.len() as u64)).unwrap_or(0)]
    }

    fn chance(&mut self, bound: u64) -> bool {
        self.random.below(bound) == 0
    }

    fn text(&mut self) -> Value {
        let ids: Vec<String> = self.ids.clone();
        match self.random.below(8) {
            0..4 => json!(ids[usize::try_from(self.random.below(ids.len() as u64)).unwrap_or(0)]),
            4 => json!("x".repeat(usize::try_from(self.random.below(70_000)).unwrap_or(0))),
            _ => json!(self.pick(WORDS)),
        }
    }

    /// A value of another type than requested.
    fn value_of_another_type(&mut self) -> Value {
        let kinds = [
            json!(null),
            json!([]),
            json!({}),
            json!(1.5),
            json!("x"),
            json!(true),
            json!([[[]]]),
        ];
        kinds[usize::try_from(self.random.below(kinds.len() as u64)).unwrap_or(0)].clone()
    }

    /// A value that may match a schema.
    fn value(&mut self, name: &str, schema: &Value, root: &Value) -> Value {
        if self.chance(12) {
            return self.value_of_another_type();
        }
        if let Some(to) = schema["$ref"].as_str() {
            let found = to
                .strip_prefix('#')
                .and_then(|pointer| root.pointer(pointer))
                .cloned()
                .unwrap_or_default();
            return self.value(name, &found, root);
        }
        for several in ["anyOf", "allOf"] {
            if let Some(shapes) = schema[several].as_array() {
                let chosen = shapes
                    [usize::try_from(self.random.below(shapes.len() as u64)).unwrap_or(0)]
                .clone();
                return self.value(name, &chosen, root);
            }
        }
        if let Some(values) = schema["enum"].as_array() {
            return values[usize::try_from(self.random.below(values.len() as u64)).unwrap_or(0)]
                .clone();
        }
        let kind = schema["type"]
            .as_str()
            .or_else(|| schema["type"][0].as_str())
            .unwrap_or_default();
        match kind {
            "object" => self.object(schema, root),
            "array" => (0..self.random.below(3))
                .map(|_| self.value(name, &schema["items"], root))
                .collect(),
            // Long waits would stall the test.
            "integer" | "number" if name == "wait_ms" => json!(self.random.below(3)),
            "integer" | "number" => json!(
                NUMBERS[usize::try_from(self.random.below(NUMBERS.len() as u64)).unwrap_or(0)]
            ),
            "boolean" => json!(self.chance(2)),
            "string" => self.text(),
            _ => self.value_of_another_type(),
        }
    }

    fn object(&mut self, schema: &Value, root: &Value) -> Value {
        let mut members = serde_json::Map::new();
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            let required = schema["required"]
                .as_array()
                .is_some_and(|names| names.iter().any(|required| required == name.as_str()));
            let wanted = if required {
                !self.chance(20)
            } else {
                self.chance(2)
            };
            if wanted {
                members.insert(name.clone(), self.value(name, property, root));
            }
        }
        if self.chance(15) {
            members.insert("unknown".to_owned(), self.value_of_another_type());
        }
        Value::Object(members)
    }
}

#[tokio::test]
async fn a_tool_responds_to_any_arguments() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let task = task(&cluster, &admin, "nonsense").await?;
    let agent = McpAgent::with_token_for(&cluster, &admin, "project_manager", &[&task]).await?;
    let session = text(
        &agent
            .call_ok("sandbox.session.create", create(&task))
            .await?["session_id"],
    )?;
    let mut nonsense = Nonsense {
        random: Random::with_default_seed(20_260_102),
        ids: vec![task.clone(), task.clone(), session],
    };
    let (mut results, mut refusals) = (0, 0);
    for tool in agent.tools().await? {
        let name = text(&tool["name"])?;
        for _ in 0..ROUNDS {
            let schema = &tool["inputSchema"];
            let mut arguments = nonsense.object(schema, schema);
            // Mostly the agent's own task: otherwise no call would pass the first check.
            if arguments.get("task_id").is_some() && !nonsense.chance(8) {
                arguments["task_id"] = json!(task);
            }
            let answer = agent.call(&name, arguments.clone()).await?;
            let result = &answer["result"];
            ensure!(result.is_object(), "{name} {arguments}: {answer}");
            if result["isError"] == true {
                let failure = &result["structuredContent"];
                ensure!(
                    failure["code"] != "internal"
                        && failure["remedy"]
                            .as_str()
                            .is_some_and(|remedy| !remedy.is_empty()),
                    "{name} {arguments}: {failure}"
                );
                refusals += 1;
            } else {
                results += 1;
            }
        }
    }
    ensure!(
        results > 20 && refusals > 50,
        "{results} results, {refusals} refusals"
    );
    assert_trail_intact(&cluster.orchestrator.client()?).await?;
    cluster.worker.shut_down().await
}
