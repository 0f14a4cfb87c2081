//! Shapes of the requests of Ollama's own API.
//!
//! Fields that replace parts of a model (`template`, `raw`, `suffix`, `context`) must be unset:
//! Ollama's own client sends them empty. `system` is accepted, because a sandbox could send the same
//! text as a message. Options that decide how the node's hardware is used are refused: they are the
//! operator's.

use crate::{
    limits::{
        MAX_CONTEXT_TOKENS, MAX_DIMENSIONS, MAX_IMAGES, MAX_INDEX, MAX_INPUTS, MAX_MESSAGES,
        MAX_NAME_BYTES, MAX_TOOL_CALLS, MAX_TOOLS, MAX_TOP_LOGPROBS,
    },
    shape::{
        ANY_INTEGER, NAME, ObjectShape, STOPS, Shape, TEXT, TaggedShape, list, object, optional,
        required,
    },
};

pub(crate) const SHOW: ObjectShape = object(
    "a request for a model's description",
    &[
        required("model", &NAME),
        optional("name", &Shape::Unset),
        optional("system", &Shape::Unset),
        optional("template", &Shape::Unset),
        optional("verbose", &Shape::Unset),
        optional("options", &Shape::Unset),
    ],
);

pub(crate) const CHAT: ObjectShape = object(
    "a chat",
    &[
        required("model", &NAME),
        required("messages", &list(&MESSAGE, 0, MAX_MESSAGES)),
        optional("tools", &list(&TOOL, 0, MAX_TOOLS)),
        optional("stream", &Shape::Boolean),
        optional("format", &FORMAT),
        optional("options", &OPTIONS),
        optional("keep_alive", &Shape::KeepAlive),
        optional("think", &THINK),
        optional("truncate", &Shape::Boolean),
        optional("shift", &Shape::Boolean),
        optional("logprobs", &Shape::Boolean),
        optional("top_logprobs", &Shape::Integer(0, MAX_TOP_LOGPROBS)),
    ],
);

pub(crate) const GENERATE: ObjectShape = object(
    "a request for text",
    &[
        required("model", &NAME),
        required("prompt", &TEXT),
        optional("system", &TEXT),
        optional("images", &IMAGES),
        optional("stream", &Shape::Boolean),
        optional("format", &FORMAT),
        optional("options", &OPTIONS),
        optional("keep_alive", &Shape::KeepAlive),
        optional("think", &THINK),
        optional("truncate", &Shape::Boolean),
        optional("shift", &Shape::Boolean),
        optional("logprobs", &Shape::Boolean),
        optional("top_logprobs", &Shape::Integer(0, MAX_TOP_LOGPROBS)),
        optional("template", &Shape::Unset),
        optional("raw", &Shape::Unset),
        optional("suffix", &Shape::Unset),
        optional("context", &Shape::Unset),
    ],
);

pub(crate) const EMBED: ObjectShape = object(
    "a request for embeddings",
    &[
        required("model", &NAME),
        required("input", &Shape::OneOf(&[TEXT, list(&TEXT, 1, MAX_INPUTS)])),
        optional("truncate", &Shape::Boolean),
        optional("dimensions", &Shape::Integer(1, MAX_DIMENSIONS)),
        optional("options", &OPTIONS),
        optional("keep_alive", &Shape::KeepAlive),
    ],
);

pub(crate) const EMBEDDINGS: ObjectShape = object(
    "a request for an embedding",
    &[
        required("model", &NAME),
        required("prompt", &TEXT),
        optional("options", &OPTIONS),
        optional("keep_alive", &Shape::KeepAlive),
    ],
);

const OPTIONS: Shape = Shape::Object(&object(
    "options",
    &[
        optional("num_ctx", &Shape::ContextTokens),
        optional("num_predict", &Shape::CompletionTokens),
        optional("num_keep", &TOKENS),
        optional("repeat_last_n", &TOKENS),
        optional("seed", &ANY_INTEGER),
        optional("temperature", &Shape::Number(0.0, 10.0)),
        optional("top_k", &Shape::Integer(0, 1_000_000)),
        optional("top_p", &Shape::Number(0.0, 1.0)),
        optional("min_p", &Shape::Number(0.0, 1.0)),
        optional("typical_p", &Shape::Number(0.0, 1.0)),
        optional("repeat_penalty", &Shape::Number(0.0, 10.0)),
        optional("presence_penalty", &Shape::Number(-10.0, 10.0)),
        optional("frequency_penalty", &Shape::Number(-10.0, 10.0)),
        optional("stop", &STOPS),
    ],
));

/// A number of tokens. -1 stands for the whole context.
const TOKENS: Shape = Shape::Integer(-1, MAX_CONTEXT_TOKENS as i64);

const THINK: Shape = Shape::OneOf(&[
    Shape::Boolean,
    Shape::Choice(&["low", "medium", "high", "max"]),
]);

const FORMAT: Shape = Shape::OneOf(&[Shape::Choice(&["", "json"]), Shape::Schema]);

const IMAGES: Shape = list(&Shape::Base64, 0, MAX_IMAGES);

const MESSAGE: Shape = Shape::Object(&object(
    "a message",
    &[
        required(
            "role",
            &Shape::Choice(&["system", "user", "assistant", "tool"]),
        ),
        optional("content", &TEXT),
        optional("thinking", &TEXT),
        optional("images", &IMAGES),
        optional("tool_calls", &list(&TOOL_CALL, 0, MAX_TOOL_CALLS)),
        optional("tool_name", &NAME),
        optional("tool_call_id", &NAME),
    ],
));

const TOOL_CALL: Shape = Shape::Object(&object(
    "a tool call",
    &[
        optional("id", &NAME),
        optional("type", &Shape::Choice(&["function"])),
        required(
            "function",
            &Shape::Object(&object(
                "a called function",
                &[
                    required("name", &NAME),
                    required("arguments", &Shape::AnyObject),
                    optional("index", &Shape::Integer(0, MAX_INDEX)),
                ],
            )),
        ),
    ],
));

const TOOL: Shape = Shape::Tagged(&TaggedShape {
    tag: "type",
    variants: &[(
        "function",
        &object(
            "a tool",
            &[
                required("type", &Shape::Text(MAX_NAME_BYTES)),
                required(
                    "function",
                    &Shape::Object(&object(
                        "a function",
                        &[
                            required("name", &NAME),
                            optional("description", &TEXT),
                            optional("parameters", &Shape::Schema),
                        ],
                    )),
                ),
            ],
        ),
    )],
    reason: "servers run other tools themselves",
});
