//! The answer of a model, put together from the pieces that its server streams.
//!
//! Invariants: everything that is kept is bounded; what a server adds to the format is ignored, and
//! what does not fit it makes the answer invalid.

use serde::Deserialize;
use serde_json::Value;

/// The text of an answer.
const MAX_TEXT_BYTES: usize = 256 * 1024;
/// The names and arguments of all its tool calls.
const MAX_CALL_BYTES: usize = 2 * 1024 * 1024;
const MAX_CALLS: usize = 64;
/// A message of the server, in characters.
const MAX_SHOWN_MESSAGE: usize = 500;

/// A tool call, as the model wrote it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestedCall {
    index: u64,
    /// The server's name for the call, which tells calls of one index apart.
    id: String,
    pub(crate) name: String,
    /// JSON, if the model wrote JSON.
    pub(crate) arguments: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenCount {
    pub(crate) prompt: u64,
    pub(crate) completion: u64,
}

impl TokenCount {
    pub(crate) const fn total(self) -> u64 {
        self.prompt.saturating_add(self.completion)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) calls: Vec<RequestedCall>,
    /// As the server counts them.
    pub(crate) tokens: Option<TokenCount>,
    /// The server says that the answer is complete.
    has_ended: bool,
    /// The answer reached its limit of tokens.
    pub(crate) is_cut: bool,
    call_bytes: usize,
}

/// Why an answer is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum InvalidAnswer {
    NotAnEvent,
    TooLong,
    /// The stream ended before the answer.
    Incomplete,
    /// The server reported an error in the stream.
    Reported(String),
}

impl std::fmt::Display for InvalidAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotAnEvent => f.write_str("the answer is not one of a chat completion"),
            Self::TooLong => f.write_str("the answer is too long"),
            Self::Incomplete => f.write_str("the answer ended too early"),
            Self::Reported(message) => write!(f, "the server reported: {message}"),
        }
    }
}

#[derive(Deserialize)]
struct Chunk {
    choices: Option<Vec<Choice>>,
    usage: Option<Value>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Deserialize)]
struct CallDelta {
    index: Option<u64>,
    id: Option<String>,
    function: Option<FunctionDelta>,
}

#[derive(Deserialize)]
struct FunctionDelta {
    name: Option<String>,
    arguments: Option<String>,
}

impl Answer {
    /// Adds the data of one event.
    pub(crate) fn add(&mut self, event: &[u8]) -> Result<(), InvalidAnswer> {
        if event == b"[DONE]" {
            self.has_ended = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(event).map_err(|_| InvalidAnswer::NotAnEvent)?;
        if let Some(error) = chunk.error {
            return Err(InvalidAnswer::Reported(message_of(&error)));
        }
        if let Some(usage) = &chunk.usage {
            let count = |name: &str| usage[name].as_u64();
            if let (Some(prompt), Some(completion)) =
                (count("prompt_tokens"), count("completion_tokens"))
            {
                self.tokens = Some(TokenCount { prompt, completion });
            }
        }
        // There is one choice: no request asks for more.
        let Some(choice) = chunk.choices.into_iter().flatten().next() else {
            return Ok(());
        };
        if let Some(delta) = choice.delta {
            self.add_delta(delta)?;
        }
        if let Some(reason) = choice.finish_reason {
            self.has_ended = true;
            self.is_cut = reason == "length";
        }
        Ok(())
    }

    fn add_delta(&mut self, delta: Delta) -> Result<(), InvalidAnswer> {
        self.text.push_str(&delta.content.unwrap_or_default());
        for call in delta.tool_calls.into_iter().flatten() {
            self.add_call(call);
        }
        let is_bounded = self.text.len() <= MAX_TEXT_BYTES
            && self.calls.len() <= MAX_CALLS
            && self.call_bytes <= MAX_CALL_BYTES;
        if is_bounded {
            Ok(())
        } else {
            Err(InvalidAnswer::TooLong)
        }
    }

    fn add_call(&mut self, delta: CallDelta) {
        let id = delta.id.unwrap_or_default();
        let function = delta.function;
        let (name, arguments) = function.map_or_else(Default::default, |function| {
            (
                function.name.unwrap_or_default(),
                function.arguments.unwrap_or_default(),
            )
        });
        self.call_bytes += id.len() + name.len() + arguments.len();
        // Some servers give every call the index 0, but ids of their own.
        let index = delta.index;
        let last = self.calls.iter_mut().rev().find(|call| {
            index.is_none_or(|index| call.index == index) && (id.is_empty() || call.id == id)
        });
        let is_whole = index.is_none() && !name.is_empty() && id.is_empty();
        match last.filter(|_| !is_whole) {
            Some(call) => {
                call.name.push_str(&name);
                call.arguments.push_str(&arguments);
            }
            None => self.calls.push(RequestedCall {
                index: index.unwrap_or(self.calls.len() as u64),
                id,
                name,
                arguments,
            }),
        }
    }

    /// The answer at the end of its stream.
    pub(crate) fn finished(self) -> Result<Self, InvalidAnswer> {
        if self.has_ended {
            Ok(self)
        } else {
            Err(InvalidAnswer::Incomplete)
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.text.len() + self.call_bytes
    }

    /// Whether the stream may end here.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn is_bounded(&self) -> bool {
        self.text.len() <= MAX_TEXT_BYTES
            && self.calls.len() <= MAX_CALLS
            && self.call_bytes <= MAX_CALL_BYTES
    }
}

/// What a server says of an error: in OpenAI's form, in Ollama's, or in its own.
pub(crate) fn message_of(error: &Value) -> String {
    let texts = [
        &error["message"],
        &error["error"]["message"],
        &error["error"],
        error,
    ];
    let text = texts.into_iter().find_map(Value::as_str);
    let text = text.map_or_else(|| error.to_string(), str::to_owned);
    shown(&text)
}

/// Text of a server that is safe to repeat.
pub(crate) fn shown(text: &str) -> String {
    let characters = text.trim().chars().take(MAX_SHOWN_MESSAGE);
    characters
        .map(|character| {
            if character.is_control() {
                ' '
            } else {
                character
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(events: &[Value]) -> Result<Answer, InvalidAnswer> {
        let mut answer = Answer::default();
        for event in events {
            answer.add(event.to_string().as_bytes())?;
        }
        answer.finished()
    }

    fn delta(delta: &Value) -> Value {
        json!({"choices": [{"index": 0, "delta": delta}], "usage": null})
    }

    fn end(reason: &str) -> Value {
        json!({"choices": [{"delta": {}, "finish_reason": reason}]})
    }

    fn calls(answer: &Answer) -> Vec<(&str, &str)> {
        let calls = answer.calls.iter();
        calls
            .map(|call| (call.name.as_str(), call.arguments.as_str()))
            .collect()
    }

    #[test]
    fn text_and_calls_are_put_together_from_their_pieces() {
        let call = |index: u64, id: &str, name: &str, arguments: &str| {
            let function = json!({"name": name, "arguments": arguments});
            delta(&json!({"tool_calls": [{"index": index, "id": id, "function": function}]}))
        };
        let more = |index: u64, arguments: &str| {
            let function = json!({"arguments": arguments});
            delta(&json!({"content": null, "tool_calls": [{"index": index, "function": function}]}))
        };
        let found = answer(&[
            delta(&json!({"role": "assistant", "content": "I "})),
            delta(&json!({"content": "run", "reasoning": "x"})),
            call(0, "a", "run_command", "{\"argv\":"),
            call(1, "b", "read_file", ""),
            more(0, "[\"ls\"]}"),
            more(1, "{}"),
            end("tool_calls"),
            json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}),
        ])
        .expect("an answer");
        assert_eq!(found.text, "I run");
        let expected = [("run_command", "{\"argv\":[\"ls\"]}"), ("read_file", "{}")];
        assert_eq!(calls(&found), expected);
        assert_eq!(found.tokens.map(TokenCount::total), Some(10));
        // As Ollama numbers them.
        let found = answer(&[
            call(0, "a", "x", "{}"),
            call(0, "b", "y", "{}"),
            end("stop"),
        ]);
        assert_eq!(
            calls(&found.expect("an answer")),
            [("x", "{}"), ("y", "{}")]
        );
        let whole = |name: &str| {
            delta(&json!({"tool_calls": [{"function": {"name": name, "arguments": "{}"}}]}))
        };
        let found = answer(&[whole("x"), whole("x"), end("stop")]);
        assert_eq!(
            calls(&found.expect("an answer")),
            [("x", "{}"), ("x", "{}")]
        );
    }

    #[test]
    fn an_answer_without_its_end_is_invalid() {
        let text = delta(&json!({"content": "x"}));
        assert_eq!(
            answer(std::slice::from_ref(&text)),
            Err(InvalidAnswer::Incomplete)
        );
        assert!(answer(&[text.clone(), end("length")]).is_ok_and(|answer| answer.is_cut));
        let mut done = Answer::default();
        done.add(text.to_string().as_bytes()).expect("valid");
        done.add(b"[DONE]").expect("valid");
        assert!(done.finished().is_ok());
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        for bad in [
            "",
            "x",
            "[]",
            "{\"choices\": 1}",
            "{\"choices\": [{\"delta\": []}]}",
        ] {
            let mut answer = Answer::default();
            let refused = answer.add(bad.as_bytes());
            assert!(refused.is_err() || bad == "[]", "{bad}");
        }
        let reported = |error: &Value| answer(&[json!({"error": error})]).expect_err("an error");
        assert_eq!(
            reported(&json!("no\nroom")),
            InvalidAnswer::Reported("no room".to_owned())
        );
        let error = json!({"message": "busy", "type": "x"});
        assert_eq!(reported(&error), InvalidAnswer::Reported("busy".to_owned()));
        let long = delta(&json!({"content": "x".repeat(MAX_TEXT_BYTES + 1)}));
        assert_eq!(answer(&[long]), Err(InvalidAnswer::TooLong));
        let many: Vec<Value> = (0..=MAX_CALLS)
            .map(|_| json!({"function": {"name": "x"}}))
            .collect();
        assert_eq!(
            answer(&[delta(&json!({"tool_calls": many}))]),
            Err(InvalidAnswer::TooLong)
        );
    }
}
