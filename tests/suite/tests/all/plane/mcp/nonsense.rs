//! Whatever a tool is called with, it answers: with a result, or with a refusal that says what to do.

use anyhow::{Result, ensure};
use cynode_tests::Random;
use serde_json::{Value, json};

use super::{Agent, create, task};
use crate::plane::{
    audit::intact,
    small::{Small, text},
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

/// What calls are made of.
struct Nonsense {
    random: Random,
    /// Ids of things that are there.
    ids: Vec<String>,
}

impl Nonsense {
    fn one<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[usize::try_from(self.random.below(of.len() as u64)).unwrap_or(0)]
    }

    fn chance(&mut self, of: u64) -> bool {
        self.random.below(of) == 0
    }

    fn text(&mut self) -> Value {
        let ids: Vec<String> = self.ids.clone();
        match self.random.below(8) {
            0..4 => json!(ids[usize::try_from(self.random.below(ids.len() as u64)).unwrap_or(0)]),
            4 => json!("x".repeat(usize::try_from(self.random.below(70_000)).unwrap_or(0))),
            _ => json!(self.one(WORDS)),
        }
    }

    /// Something of another kind than was asked for.
    fn other(&mut self) -> Value {
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

    /// A value that may fit a schema.
    fn value(&mut self, name: &str, schema: &Value, root: &Value) -> Value {
        if self.chance(12) {
            return self.other();
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
            // Nobody waits for long.
            "integer" | "number" if name == "wait_ms" => json!(self.random.below(3)),
            "integer" | "number" => json!(
                NUMBERS[usize::try_from(self.random.below(NUMBERS.len() as u64)).unwrap_or(0)]
            ),
            "boolean" => json!(self.chance(2)),
            "string" => self.text(),
            _ => self.other(),
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
            members.insert("unknown".to_owned(), self.other());
        }
        Value::Object(members)
    }
}

#[tokio::test]
async fn whatever_a_tool_is_called_with_it_answers() -> Result<()> {
    let mut small = Small::start().await?;
    let admin = small.orchestrator.token()?;
    let task = task(&small, &admin, "nonsense").await?;
    let agent = Agent::of(&small, &admin, "project_manager", &[&task]).await?;
    let session = text(&agent.done("sandbox.session.create", create(&task)).await?["session_id"])?;
    let mut nonsense = Nonsense {
        random: Random::usual(20_260_102),
        ids: vec![task.clone(), task.clone(), session],
    };
    let (mut results, mut refusals) = (0, 0);
    for tool in agent.tools().await? {
        let name = text(&tool["name"])?;
        for _ in 0..ROUNDS {
            let schema = &tool["inputSchema"];
            let mut arguments = nonsense.object(schema, schema);
            // Mostly for the task that it may work on, or nothing would come further.
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
    intact(&small.orchestrator.client()?).await?;
    small.worker.shut_down().await
}
