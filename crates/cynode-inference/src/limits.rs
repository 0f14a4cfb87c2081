//! Bounds of requests to models, and of their answers.

/// The JSON of a request.
pub const MAX_BODY_BYTES: usize = 10 * 1024 * 1024;
/// Values and names in a request.
pub const MAX_BODY_NODES: usize = 100_000;
/// Nesting of objects and lists in a request.
pub const MAX_BODY_DEPTH: usize = 64;
/// The target of a request line.
pub const MAX_TARGET_BYTES: usize = 320;

pub const MAX_MESSAGES: usize = 4_096;
/// Parts of one message.
pub const MAX_PARTS: usize = 256;
/// Images of one message, or of one prompt.
pub const MAX_IMAGES: usize = 32;
pub const MAX_TOOLS: usize = 512;
/// Tool calls of one message.
pub const MAX_TOOL_CALLS: usize = 256;
/// The number of a tool call.
pub const MAX_INDEX: i64 = 1_000_000;
/// Names of tools and participants, ids of tool calls.
pub const MAX_NAME_BYTES: usize = 256;
pub const MAX_STOPS: usize = 16;
pub const MAX_STOP_BYTES: usize = 1_024;
/// Answers to one prompt (`n`).
pub const MAX_CHOICES: i64 = 8;
/// Prompts of one completion.
pub const MAX_PROMPTS: usize = 16;
/// Texts that are embedded at once.
pub const MAX_INPUTS: usize = 2_048;
pub const MAX_DIMENSIONS: i64 = 65_536;
pub const MAX_TOP_LOGPROBS: i64 = 20;

/// Tokens of an answer, unless [`crate::TokenLimits`] say otherwise.
pub const MAX_COMPLETION_TOKENS: u32 = 131_072;
/// Tokens of the context that Ollama allocates, unless [`crate::TokenLimits`] say otherwise.
pub const MAX_CONTEXT_TOKENS: u32 = 131_072;
/// Time for which Ollama keeps a model in memory after a request.
pub const MAX_KEEP_ALIVE_SECONDS: u32 = 300;

/// A list of models, or the description of one.
pub const MAX_LIST_BYTES: usize = 16 * 1024 * 1024;
/// Values and names in it.
pub const MAX_LIST_NODES: usize = 250_000;
/// Nesting of it.
pub const MAX_LIST_DEPTH: usize = 32;
/// Models of a list.
pub const MAX_LISTED_MODELS: usize = 4_096;
/// A text of a list, such as a digest.
pub const MAX_LISTED_TEXT_BYTES: usize = 256;
/// Capabilities or families of a model.
pub const MAX_LISTED_ITEMS: usize = 64;

/// A line or event of a streamed answer.
pub const MAX_LINE_BYTES: u64 = 4 * 1024 * 1024;
/// An answer that is not streamed. Embeddings are the largest.
pub const MAX_DOCUMENT_BYTES: u64 = 256 * 1024 * 1024;
/// Nesting of an answer.
pub const MAX_ANSWER_DEPTH: u32 = 128;

/// Violations that the message of a refusal repeats; the others are counted.
pub const MAX_TOLD_VIOLATIONS: usize = 4;
/// Allowed models that a refusal names; the others are counted.
pub const MAX_TOLD_MODELS: usize = 16;
