//! Helpers for tests of requests.
#![allow(dead_code, reason = "each test program uses a part")]

use cynode_inference::{
    AllowedModels, Endpoint, Refusal, Rules, TokenLimits, Upstream, UpstreamRequest,
};
use serde_json::{Value, json};

pub(crate) fn allowed() -> AllowedModels {
    AllowedModels::new(["m", "llama3.2:latest", "Org/Big-7B"].map(str::to_owned))
}

/// Smaller than the defaults, so that a test can tell them apart.
pub(crate) const LIMITS: TokenLimits = TokenLimits {
    completion_tokens: 1_000,
    context_tokens: 4_096,
    keep_alive_seconds: 60,
};

pub(crate) fn judge_by(
    limits: TokenLimits,
    upstream: Upstream,
    path: &str,
    body: &[u8],
) -> Result<UpstreamRequest, Refusal> {
    let models = allowed();
    let rules = Rules {
        models: &models,
        limits,
        upstream,
    };
    let method = if body.is_empty() { "GET" } else { "POST" };
    rules.judge(&Endpoint::find(method, path)?, body)
}

pub(crate) fn judge(path: &str, body: &[u8]) -> Result<UpstreamRequest, Refusal> {
    judge_by(LIMITS, Upstream::Local, path, body)
}

/// The forwarded body.
pub(crate) fn forwarded(path: &str, body: &str) -> String {
    match judge(path, body.as_bytes()) {
        Ok(request) => String::from_utf8(request.body.expect("a body")).expect("text"),
        Err(refusal) => panic!("{path} {body}: {refusal}"),
    }
}

pub(crate) const CHAT: &str = "/api/chat";
pub(crate) const GENERATE: &str = "/api/generate";
pub(crate) const EMBED: &str = "/api/embed";
pub(crate) const EMBEDDINGS: &str = "/api/embeddings";
pub(crate) const SHOW: &str = "/api/show";
pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const CHAT_COMPLETIONS: &str = "/v1/chat/completions";
pub(crate) const TEXT_EMBEDDINGS: &str = "/v1/embeddings";

/// The smallest valid body of each endpoint that takes one.
pub(crate) fn smallest(path: &str) -> Value {
    match path {
        CHAT => json!({"model": "m", "messages": []}),
        GENERATE | EMBEDDINGS | COMPLETIONS => json!({"model": "m", "prompt": "hi"}),
        EMBED | TEXT_EMBEDDINGS => json!({"model": "m", "input": "hi"}),
        SHOW => json!({"model": "m"}),
        CHAT_COMPLETIONS => json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        _ => panic!("{path} takes no body"),
    }
}

pub(crate) const WITH_BODY: &[&str] = &[
    CHAT,
    GENERATE,
    EMBED,
    EMBEDDINGS,
    SHOW,
    COMPLETIONS,
    CHAT_COMPLETIONS,
    TEXT_EMBEDDINGS,
];

/// A valid body in which one field is added or replaced.
pub(crate) fn with(path: &str, field: &str, value: Value) -> String {
    let mut body = smallest(path);
    body[field] = value;
    body.to_string()
}
