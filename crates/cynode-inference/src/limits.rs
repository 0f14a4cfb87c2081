//! Bounds of requests to models, and of their answers.

/// Size of the JSON of a request.
pub const MAX_BODY_BYTES: usize = 10 * 1024 * 1024;
/// Values and names in a request.
pub const MAX_BODY_NODES: usize = 100_000;
/// Nesting depth of objects and lists in a request.
pub const MAX_BODY_DEPTH: usize = 64;
/// Length of the target of a request line.
pub const MAX_TARGET_BYTES: usize = 320;

pub const MAX_MESSAGES: usize = 4_096;
/// Parts of one message.
pub const MAX_PARTS: usize = 256;
/// Images of one message, or of one prompt.
pub const MAX_IMAGES: usize = 32;
pub const MAX_TOOLS: usize = 512;
/// Tool calls of one message.
pub const MAX_TOOL_CALLS: usize = 256;
/// Largest index of a tool call.
pub const MAX_INDEX: i64 = 1_000_000;
/// Length of names of tools and participants, and of ids of tool calls.
pub const MAX_NAME_BYTES: usize = 256;
pub const MAX_STOPS: usize = 16;
pub const MAX_STOP_BYTES: usize = 1_024;
/// Answers to one prompt (`n`).
pub const MAX_CHOICES: i64 = 8;
/// Prompts of one completion.
pub const MAX_PROMPTS: usize = 16;
/// Texts per embedding request.
pub const MAX_INPUTS: usize = 2_048;
pub const MAX_DIMENSIONS: i64 = 65_536;
pub const MAX_TOP_LOGPROBS: i64 = 20;

/// Default limit on the tokens of an answer; see [`crate::TokenLimits`].
pub const MAX_COMPLETION_TOKENS: u32 = 131_072;
/// Default limit on the tokens of the context that Ollama allocates; see [`crate::TokenLimits`].
pub const MAX_CONTEXT_TOKENS: u32 = 131_072;
/// Default limit on the time for which Ollama keeps a model in memory after a request.
pub const MAX_KEEP_ALIVE_SECONDS: u32 = 300;

/// Size of a list of models, or of the description of one model.
pub const MAX_LIST_BYTES: usize = 16 * 1024 * 1024;
/// Values and names in a list or description of models.
pub const MAX_LIST_NODES: usize = 250_000;
/// Nesting depth of a list or description of models.
pub const MAX_LIST_DEPTH: usize = 32;
/// Models per list.
pub const MAX_LISTED_MODELS: usize = 4_096;
/// Length of a string in a list of models, such as a digest.
pub const MAX_LISTED_TEXT_BYTES: usize = 256;
/// Capabilities or families per model.
pub const MAX_LISTED_ITEMS: usize = 64;

/// Length of a line or event of a streamed answer.
pub const MAX_LINE_BYTES: u64 = 4 * 1024 * 1024;
/// Size of an answer that is not streamed. Embeddings are the largest.
pub const MAX_DOCUMENT_BYTES: u64 = 256 * 1024 * 1024;
/// Nesting depth of an answer.
pub const MAX_ANSWER_DEPTH: u32 = 128;

/// Violations in the message of a refusal; the others are counted.
pub const MAX_SHOWN_VIOLATIONS: usize = 4;
/// Allowed models in the message of a refusal; the others are counted.
pub const MAX_SHOWN_MODELS: usize = 16;
