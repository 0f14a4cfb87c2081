//! What the model has said and what it was told, and the messages of the next prompt.
//!
//! Invariants: the system message is in every prompt, whole; what follows it fits into the window,
//! unless the window is too small for the last turn: then that is cut. The newest turns are kept as
//! they were, in three quarters of the room; older ones lose the middle of their texts, and the
//! oldest are left out. Tool calls and their results come in pairs, and their arguments are JSON
//! objects, as servers demand.

use serde_json::{Map, Value, json};

use super::window::Window;

/// A text of an old turn.
const OLD_TEXT_BYTES: usize = 400;
/// Turns that are remembered as they were.
const MAX_WHOLE_TURNS: usize = 32;
/// What JSON adds to a text.
const MESSAGE_OVERHEAD_BYTES: usize = 80;

const BEGIN: &str = "Begin to work on the job.";

/// A tool call and what came of it.
#[derive(Clone, Debug)]
pub(super) struct AnsweredCall {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: Map<String, Value>,
    pub(super) result: String,
}

/// What the model said at one time, and the answer to it.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    pub(super) text: String,
    pub(super) calls: Vec<AnsweredCall>,
    /// Said to a model that called no tool.
    pub(super) reply: Option<String>,
}

#[derive(Debug)]
pub(super) struct Dialogue {
    system: String,
    /// What the model has to know of an earlier runner.
    earlier: Option<String>,
    turns: Vec<Turn>,
    /// What prompts may take, and what of it is for turns in any case.
    window_bytes: usize,
    min_history_bytes: usize,
}

impl Turn {
    /// The turn with texts of at most this length.
    fn shortened(&self, limit: usize) -> Self {
        let calls = self.calls.iter().map(|call| AnsweredCall {
            arguments: call
                .arguments
                .iter()
                .map(|(name, value)| (name.clone(), short_value(value, limit)))
                .collect(),
            result: middle_cut(&call.result, limit),
            ..call.clone()
        });
        Self {
            text: middle_cut(&self.text, limit),
            calls: calls.collect(),
            reply: self.reply.as_ref().map(|reply| middle_cut(reply, limit)),
        }
    }

    fn messages(&self) -> Vec<Value> {
        let mut first = json!({"role": "assistant", "content": self.text});
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|call| {
                let arguments = Value::from(call.arguments.clone()).to_string();
                let function = json!({"name": call.name, "arguments": arguments});
                json!({"id": call.id, "type": "function", "function": function})
            });
            first["tool_calls"] = calls.collect();
        }
        let results = self
            .calls
            .iter()
            .map(|call| json!({"role": "tool", "tool_call_id": call.id, "content": call.result}));
        let reply = self
            .reply
            .iter()
            .map(|reply| json!({"role": "user", "content": reply}));
        std::iter::once(first).chain(results).chain(reply).collect()
    }

    fn texts(&self) -> usize {
        let arguments: usize = self.calls.iter().map(|call| call.arguments.len() + 1).sum();
        arguments + 1 + usize::from(self.reply.is_some())
    }
}

fn bytes_of(messages: &[Value]) -> usize {
    let bytes = messages.iter().map(|message| message.to_string().len());
    bytes.sum::<usize>() + messages.len() * MESSAGE_OVERHEAD_BYTES
}

impl Dialogue {
    pub(super) fn new(system: String, earlier: Option<String>, window: Window) -> Self {
        Self {
            system,
            earlier,
            turns: Vec::new(),
            window_bytes: window.prompt_bytes(),
            min_history_bytes: window.min_history_bytes(),
        }
    }

    pub(super) fn add(&mut self, turn: Turn) {
        self.turns.push(turn);
        // No prompt has room for large turns that are older.
        if let Some(at) = self.turns.len().checked_sub(MAX_WHOLE_TURNS + 1) {
            self.turns[at] = self.turns[at].shortened(OLD_TEXT_BYTES);
        }
    }

    /// The messages of the next prompt; `state` is what is true now.
    pub(super) fn messages(&self, state: &str) -> Vec<Value> {
        let (kept, left_out) = self.fitting(state);
        let mut begin = self.earlier.as_deref().unwrap_or(BEGIN).to_owned();
        if left_out > 0 {
            begin += "\n(";
            begin += &left_out.to_string();
            begin += " earlier turns are left out here.)";
        }
        let mut messages = vec![
            json!({"role": "system", "content": self.system}),
            json!({"role": "user", "content": begin}),
        ];
        messages.extend(kept);
        // Some models take only one message of a user at a time.
        match messages.last_mut() {
            Some(last) if last["role"] == "user" => {
                let text = last["content"].as_str().unwrap_or_default();
                last["content"] = format!("{text}\n\n{state}").into();
            }
            _ => messages.push(json!({"role": "user", "content": state})),
        }
        messages
    }

    /// The messages of the turns that fit into the window, and the number of those that don't.
    fn fitting(&self, state: &str) -> (Vec<Value>, usize) {
        let earlier = self.earlier.as_ref().map_or(0, String::len);
        let fixed = self.system.len() + state.len() + earlier;
        let mut room = self
            .window_bytes
            .saturating_sub(fixed)
            .max(self.min_history_bytes);
        let mut whole_room = room - room / 4;
        let mut kept: Vec<Vec<Value>> = Vec::new();
        let mut is_old = false;
        for turn in self.turns.iter().rev() {
            let is_last = kept.is_empty();
            let limit = if is_last { room } else { whole_room };
            let whole = (!is_old).then(|| turn.messages());
            let messages = match whole.filter(|messages| bytes_of(messages) <= limit) {
                Some(messages) => messages,
                // Escapes may double a text.
                None if is_last => turn.shortened(room / (2 * turn.texts())).messages(),
                None => {
                    is_old = true;
                    turn.shortened(OLD_TEXT_BYTES).messages()
                }
            };
            let bytes = bytes_of(&messages);
            if bytes > room && !is_last {
                break;
            }
            room = room.saturating_sub(bytes);
            whole_room = whole_room.saturating_sub(bytes);
            kept.push(messages);
        }
        let left_out = self.turns.len() - kept.len();
        (kept.into_iter().rev().flatten().collect(), left_out)
    }
}

fn short_value(value: &Value, limit: usize) -> Value {
    match value {
        Value::String(text) => middle_cut(text, limit).into(),
        Value::Array(_) | Value::Object(_) => {
            let text = value.to_string();
            if text.len() <= limit {
                value.clone()
            } else {
                middle_cut(&text, limit).into()
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

/// A text of at most about this length: its beginning and its end.
pub(super) fn middle_cut(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let head = text.floor_char_boundary(limit / 2);
    let tail = text.ceil_char_boundary(text.len() - limit / 2);
    let left_out = tail - head;
    format!(
        "{}\n[… {left_out} bytes left out …]\n{}",
        &text[..head],
        &text[tail..]
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn call(argument: usize, result: usize) -> AnsweredCall {
        AnsweredCall {
            id: "call_1".to_owned(),
            name: "write_file".to_owned(),
            arguments: Map::from_iter([("content".to_owned(), "a".repeat(argument).into())]),
            result: "r".repeat(result),
        }
    }

    fn dialogue(window_bytes: usize, turns: Vec<Turn>) -> Dialogue {
        Dialogue {
            turns,
            window_bytes,
            ..Dialogue::new("the context".to_owned(), None, Window::new(None, None))
        }
    }

    fn roles(messages: &[Value]) -> Vec<&str> {
        messages
            .iter()
            .filter_map(|message| message["role"].as_str())
            .collect()
    }

    #[test]
    fn a_prompt_has_context_history_and_state_in_turns_that_models_take() {
        let mut talk = dialogue(100_000, Vec::new());
        assert_eq!(roles(&talk.messages("state")), ["system", "user"]);
        assert_eq!(
            talk.messages("state")[1]["content"],
            format!("{BEGIN}\n\nstate")
        );
        let calls = vec![call(1, 1), call(1, 1)];
        talk.add(Turn {
            calls,
            ..Turn::default()
        });
        let expected = ["system", "user", "assistant", "tool", "tool", "user"];
        assert_eq!(roles(&talk.messages("state")), expected);
        talk.add(Turn {
            reply: Some("go on".to_owned()),
            ..Turn::default()
        });
        let messages = talk.messages("state");
        let expected = [
            "system",
            "user",
            "assistant",
            "tool",
            "tool",
            "assistant",
            "user",
        ];
        assert_eq!(roles(&messages), expected);
        assert_eq!(messages[6]["content"], "go on\n\nstate");
        assert!(messages[5].get("tool_calls").is_none());
        assert_eq!(
            messages[2]["tool_calls"][1]["function"]["arguments"],
            "{\"content\":\"a\"}"
        );
    }

    #[test]
    fn old_turns_are_shortened_then_left_out_and_the_newest_stays() {
        let turns = vec![
            Turn {
                calls: vec![call(10, 8_000)],
                ..Turn::default()
            };
            40
        ];
        let messages = dialogue(0, turns).messages("state");
        let results: Vec<usize> = messages
            .iter()
            .filter(|message| message["role"] == "tool")
            .map(|message| message["content"].as_str().expect("text").len())
            .collect();
        assert!(results.len() > 5 && results.len() < 40);
        assert_eq!(results[results.len() - 2..], [8_000, 8_000]);
        assert!(
            results[..results.len() - 2]
                .iter()
                .all(|length| *length < 500),
            "{results:?}"
        );
        let begin = messages[1]["content"].as_str().expect("text");
        assert!(begin.contains("earlier turns are left out"), "{begin}");
    }

    proptest! {
        #[test]
        fn a_prompt_fits_and_has_the_whole_context(
            sizes in proptest::collection::vec(
                proptest::collection::vec((0_usize..60_000, 0_usize..60_000), 0..5), 0..12),
            context in 0_usize..200_000,
        ) {
            let turns = sizes.into_iter().map(|sizes| Turn {
                calls: sizes.into_iter().map(|(argument, result)| call(argument, result)).collect(),
                ..Turn::default()
            });
            let mut talk = dialogue(98_304, turns.collect());
            talk.system = "c".repeat(context);
            let messages = talk.messages("state");
            prop_assert_eq!(messages[0]["content"].as_str(), Some(talk.system.as_str()));
            let last = messages.last().expect("a message")["content"].as_str().expect("text");
            prop_assert!(last.ends_with("state"));
            let history = bytes_of(&messages) - context;
            let room = talk.window_bytes.saturating_sub(context).max(talk.min_history_bytes);
            prop_assert!(history <= room + 4_000, "{history} of {room}");
        }

        #[test]
        fn a_cut_text_keeps_both_ends(text in "[aä\n]{0,400}", limit in 8_usize..300) {
            let cut = middle_cut(&text, limit);
            prop_assert!(cut.len() <= limit + 60);
            prop_assert!(text.len() > limit || cut == text);
        }
    }
}
