//! Shapes of the requests of OpenAI's API, which providers and most model servers accept.
//!
//! Servers extend the API in different ways. A field is listed only if at least two of OpenAI, vLLM,
//! llama.cpp and Ollama interpret it alike, and none of them fetches, stores or loads anything for
//! it.

use cynode_api::document::{JsonValue, get};

use crate::{
    limits::{
        MAX_CHOICES, MAX_DIMENSIONS, MAX_INDEX, MAX_INPUTS, MAX_MESSAGES, MAX_NAME_BYTES,
        MAX_PARTS, MAX_PROMPTS, MAX_TOOL_CALLS, MAX_TOOLS, MAX_TOP_LOGPROBS,
    },
    shape::{
        ANY_INTEGER, NAME, ObjectShape, STOP_OR_STOPS, Shape, TEXT, TaggedShape, list, object,
        optional, required,
    },
};

pub(crate) const CHAT_COMPLETION: ObjectShape = ObjectShape {
    name: "a chat completion",
    fields: &[
        required("model", &NAME),
        required("messages", &list(&MESSAGE, 1, MAX_MESSAGES)),
        optional("stream", &Shape::Boolean),
        optional("stream_options", &STREAM_OPTIONS),
        optional("max_tokens", &Shape::CompletionTokens),
        optional("max_completion_tokens", &Shape::CompletionTokens),
        optional("n", &CHOICES),
        optional("temperature", &TEMPERATURE),
        optional("top_p", &UNIT),
        optional("frequency_penalty", &PENALTY),
        optional("presence_penalty", &PENALTY),
        optional("seed", &ANY_INTEGER),
        optional("stop", &STOP_OR_STOPS),
        optional("logprobs", &Shape::Boolean),
        optional("top_logprobs", &Shape::Integer(0, MAX_TOP_LOGPROBS)),
        optional("response_format", &Shape::Tagged(&RESPONSE_FORMAT)),
        optional("tools", &list(&TOOL, 0, MAX_TOOLS)),
        optional("tool_choice", &TOOL_CHOICE),
        optional("parallel_tool_calls", &Shape::Boolean),
        optional(
            "reasoning_effort",
            &Shape::Choice(&["none", "minimal", "low", "medium", "high", "xhigh", "max"]),
        ),
        optional("verbosity", &Shape::Choice(&["low", "medium", "high"])),
    ],
    rule: Some(|members| {
        if get(members, "max_tokens").is_some() && get(members, "max_completion_tokens").is_some() {
            return Some((
                "max_tokens",
                "is the older name of max_completion_tokens; send one",
            ));
        }
        stream_rule(members)
    }),
};

pub(crate) const COMPLETION: ObjectShape = ObjectShape {
    name: "a completion",
    fields: &[
        required("model", &NAME),
        required(
            "prompt",
            &Shape::OneOf(&[TEXT, list(&TEXT, 1, MAX_PROMPTS)]),
        ),
        optional("stream", &Shape::Boolean),
        optional("stream_options", &STREAM_OPTIONS),
        optional("max_tokens", &Shape::CompletionTokens),
        optional("n", &CHOICES),
        optional("echo", &Shape::Boolean),
        optional("temperature", &TEMPERATURE),
        optional("top_p", &UNIT),
        optional("frequency_penalty", &PENALTY),
        optional("presence_penalty", &PENALTY),
        optional("seed", &ANY_INTEGER),
        optional("stop", &STOP_OR_STOPS),
        optional("logprobs", &Shape::Integer(0, MAX_TOP_LOGPROBS)),
        optional("suffix", &Shape::Unset),
    ],
    rule: Some(stream_rule),
};

pub(crate) const EMBEDDINGS: ObjectShape = object(
    "a request for embeddings",
    &[
        required("model", &NAME),
        required("input", &Shape::OneOf(&[TEXT, list(&TEXT, 1, MAX_INPUTS)])),
        optional("encoding_format", &Shape::Choice(&["float", "base64"])),
        optional("dimensions", &Shape::Integer(1, MAX_DIMENSIONS)),
    ],
);

const CHOICES: Shape = Shape::Integer(1, MAX_CHOICES);
const TEMPERATURE: Shape = Shape::Number(0.0, 2.0);
const UNIT: Shape = Shape::Number(0.0, 1.0);
const PENALTY: Shape = Shape::Number(-2.0, 2.0);

const STREAM_OPTIONS: Shape = Shape::Object(&object(
    "stream options",
    &[optional("include_usage", &Shape::Boolean)],
));

fn stream_rule(members: &[(String, JsonValue)]) -> Option<(&'static str, &'static str)> {
    let streams = get(members, "stream") == Some(&JsonValue::Boolean(true));
    (get(members, "stream_options").is_some() && !streams)
        .then_some(("stream_options", "needs stream: true"))
}

/// A message. All roles share one shape, because servers ignore the fields of other roles. The fields
/// after `tool_call_id` are those of answers, which clients send back unchanged.
const MESSAGE: Shape = Shape::Object(&object(
    "a message",
    &[
        required(
            "role",
            &Shape::Choice(&["system", "developer", "user", "assistant", "tool"]),
        ),
        optional("content", &Shape::Nullable(&CONTENT)),
        optional("name", &NAME),
        optional("tool_calls", &list(&TOOL_CALL, 0, MAX_TOOL_CALLS)),
        optional("tool_call_id", &NAME),
        optional("refusal", &TEXT),
        optional("reasoning", &TEXT),
        optional("reasoning_content", &TEXT),
        optional("annotations", &Shape::Unset),
        optional("audio", &Shape::Unset),
        optional("function_call", &Shape::Unset),
    ],
));

const CONTENT: Shape = Shape::OneOf(&[TEXT, list(&Shape::Tagged(&PART), 0, MAX_PARTS)]);

const TYPE: Shape = Shape::Text(MAX_NAME_BYTES);

const PART: TaggedShape = TaggedShape {
    tag: "type",
    variants: &[
        (
            "text",
            &object(
                "a part with text",
                &[required("type", &TYPE), required("text", &TEXT)],
            ),
        ),
        (
            "refusal",
            &object(
                "a part with a refusal",
                &[required("type", &TYPE), required("refusal", &TEXT)],
            ),
        ),
        (
            "image_url",
            &object(
                "a part with an image",
                &[required("type", &TYPE), required("image_url", &IMAGE)],
            ),
        ),
        (
            "input_audio",
            &object(
                "a part with audio",
                &[required("type", &TYPE), required("input_audio", &AUDIO)],
            ),
        ),
    ],
    reason: "servers fetch or keep what other parts name",
};

const IMAGE: Shape = Shape::Object(&object(
    "an image",
    &[
        required("url", &Shape::ImageUrl),
        optional("detail", &Shape::Choice(&["auto", "low", "high"])),
    ],
));

const AUDIO: Shape = Shape::Object(&object(
    "audio",
    &[
        required("data", &Shape::Base64),
        required("format", &Shape::Choice(&["wav", "mp3"])),
    ],
));

const TOOL_CALL: Shape = Shape::Tagged(&TaggedShape {
    tag: "type",
    variants: &[(
        "function",
        &object(
            "a tool call",
            &[
                required("id", &NAME),
                required("type", &TYPE),
                required(
                    "function",
                    &Shape::Object(&object(
                        "a called function",
                        &[required("name", &NAME), required("arguments", &TEXT)],
                    )),
                ),
                optional("index", &Shape::Integer(0, MAX_INDEX)),
            ],
        ),
    )],
    reason: "other calls are of tools that servers run",
});

const TOOL: Shape = Shape::Tagged(&TaggedShape {
    tag: "type",
    variants: &[(
        "function",
        &object(
            "a tool",
            &[
                required("type", &TYPE),
                required(
                    "function",
                    &Shape::Object(&object(
                        "a function",
                        &[
                            required("name", &NAME),
                            optional("description", &TEXT),
                            optional("parameters", &Shape::Schema),
                            optional("strict", &Shape::Boolean),
                        ],
                    )),
                ),
            ],
        ),
    )],
    reason: "servers run other tools themselves",
});

const TOOL_CHOICE: Shape = Shape::OneOf(&[
    Shape::Choice(&["none", "auto", "required"]),
    Shape::Tagged(&TaggedShape {
        tag: "type",
        variants: &[(
            "function",
            &object(
                "a choice of a tool",
                &[
                    required("type", &TYPE),
                    required(
                        "function",
                        &Shape::Object(&object("a chosen function", &[required("name", &NAME)])),
                    ),
                ],
            ),
        )],
        reason: "servers run other tools themselves",
    }),
]);

const RESPONSE_FORMAT: TaggedShape = TaggedShape {
    tag: "type",
    variants: &[
        ("text", &FORMAT_WITHOUT_SCHEMA),
        ("json_object", &FORMAT_WITHOUT_SCHEMA),
        (
            "json_schema",
            &object(
                "a format with a schema",
                &[
                    required("type", &TYPE),
                    required(
                        "json_schema",
                        &Shape::Object(&object(
                            "a named schema",
                            &[
                                required("name", &NAME),
                                optional("description", &TEXT),
                                optional("schema", &Shape::Schema),
                                optional("strict", &Shape::Boolean),
                            ],
                        )),
                    ),
                ],
            ),
        ),
    ],
    reason: "servers read others differently",
};

const FORMAT_WITHOUT_SCHEMA: ObjectShape = object("a format", &[required("type", &TYPE)]);
