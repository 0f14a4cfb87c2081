//! Requests: which are forwarded, and in which form.

use std::fmt;

use cynode_api::document::{Bounds, JsonValue, Members, Violations, get};

use crate::{
    check::checked,
    endpoint::{Endpoint, is_model_path},
    limits::{
        MAX_BODY_BYTES, MAX_BODY_DEPTH, MAX_BODY_NODES, MAX_COMPLETION_TOKENS, MAX_CONTEXT_TOKENS,
        MAX_KEEP_ALIVE_SECONDS,
    },
    models::AllowedModels,
    ollama, openai,
    refusal::{Refusal, RefusalCode},
    scan::AnswerFormat,
    shape::ObjectShape,
};

/// What a request may ask for at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimits {
    /// Tokens of one answer.
    pub completion_tokens: u32,
    /// Tokens of the context that Ollama allocates.
    pub context_tokens: u32,
    /// The time for which Ollama keeps a model in memory after a request.
    pub keep_alive_seconds: u32,
}

impl Default for TokenLimits {
    fn default() -> Self {
        Self {
            completion_tokens: MAX_COMPLETION_TOKENS,
            context_tokens: MAX_CONTEXT_TOKENS,
            keep_alive_seconds: MAX_KEEP_ALIVE_SECONDS,
        }
    }
}

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upstream {
    /// A model server of the node. Some know `max_tokens` only and ignore the newer
    /// `max_completion_tokens`, so the limit is sent under the older name.
    Local,
    /// A provider, which may refuse the older name.
    Provider,
}

/// What one sandbox may do.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    pub models: &'a AllowedModels,
    pub limits: TokenLimits,
    pub upstream: Upstream,
}

/// A request as the server receives it.
#[derive(Clone, PartialEq, Eq)]
pub struct UpstreamRequest {
    pub endpoint: Endpoint,
    /// The model, under the name that the list of allowed models has for it.
    pub model: Option<String>,
    /// Written anew. A GET has none.
    pub body: Option<Vec<u8>>,
    pub answer: AnswerFormat,
    /// Whether the client asked for the usage of a stream. Otherwise it may not expect the chunk
    /// with empty `choices` that it gets.
    pub asks_for_usage: bool,
    /// Tokens that all answers to this request can have together. Nothing is known when the
    /// request leaves it to the server.
    pub most_completion_tokens: Option<u64>,
}

/// Without the body, which must not get into a log.
impl fmt::Debug for UpstreamRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamRequest")
            .field("endpoint", &self.endpoint)
            .field("model", &self.model)
            .field("body_bytes", &self.body.as_ref().map(Vec::len))
            .field("answer", &self.answer)
            .finish_non_exhaustive()
    }
}

impl Rules<'_> {
    /// Judges a request by its endpoint and its whole body.
    pub fn judge(&self, endpoint: &Endpoint, body: &[u8]) -> Result<UpstreamRequest, Refusal> {
        match self.members(endpoint, body)? {
            Some(members) => self.with_body(endpoint, members),
            None => self.without_body(endpoint),
        }
    }

    /// The fields of a valid body.
    fn members(&self, endpoint: &Endpoint, body: &[u8]) -> Result<Option<Members>, Refusal> {
        let Some(shape) = shape(endpoint) else {
            return if body.is_empty() {
                Ok(None)
            } else {
                let message = format!("{} takes no body", endpoint.path());
                Err(Refusal::new(RefusalCode::InvalidRequest, message))
            };
        };
        let read = || -> Result<Members, Violations> {
            checked(JsonValue::read(body, BOUNDS)?, shape, self.limits)
        };
        read()
            .map(Some)
            .map_err(|violations| Refusal::of_violations(&violations))
    }

    fn without_body(&self, endpoint: &Endpoint) -> Result<UpstreamRequest, Refusal> {
        let (endpoint, model) = match endpoint {
            Endpoint::Model(id) => {
                let model = self.models.require(id)?.to_owned();
                // The entry was written by people and need not fit into a path.
                let id = if is_model_path(&model) { &model } else { id };
                (Endpoint::Model(id.clone()), Some(model))
            }
            other => (other.clone(), None),
        };
        Ok(UpstreamRequest {
            endpoint,
            model,
            body: None,
            answer: AnswerFormat::Json,
            asks_for_usage: false,
            most_completion_tokens: Some(0),
        })
    }

    fn with_body(
        &self,
        endpoint: &Endpoint,
        mut members: Members,
    ) -> Result<UpstreamRequest, Refusal> {
        let Some(JsonValue::Text(name)) = get(&members, "model") else {
            let message = "model: is missing";
            return Err(Refusal::new(RefusalCode::InvalidRequest, message));
        };
        let model = self.models.require(name)?.to_owned();
        set(&mut members, "model", JsonValue::Text(model.clone()));
        let mut asks_for_usage = false;
        let (answer, most_completion_tokens) = match endpoint {
            Endpoint::Chat | Endpoint::Generate => {
                let tokens = limited_options(&mut members, self.limits);
                let streams = get(&members, "stream") != Some(&JsonValue::Boolean(false));
                let answer = if streams {
                    AnswerFormat::Lines
                } else {
                    AnswerFormat::Json
                };
                (answer, Some(tokens))
            }
            Endpoint::ChatCompletions | Endpoint::Completions => {
                if self.upstream == Upstream::Local {
                    rename(&mut members, "max_completion_tokens", "max_tokens");
                }
                let streams = get(&members, "stream") == Some(&JsonValue::Boolean(true));
                asks_for_usage = streams && includes_usage(&members);
                if streams {
                    let include = ("include_usage".to_owned(), JsonValue::Boolean(true));
                    set(
                        &mut members,
                        "stream_options",
                        JsonValue::Object(vec![include]),
                    );
                }
                let answer = if streams {
                    AnswerFormat::Events
                } else {
                    AnswerFormat::Json
                };
                (answer, completion_tokens(&members))
            }
            _ => (AnswerFormat::Json, Some(0)),
        };
        let body = serde_json::to_vec(&JsonValue::Object(members))
            .expect("a value with text keys serialises");
        Ok(UpstreamRequest {
            endpoint: endpoint.clone(),
            model: Some(model),
            body: Some(body),
            answer,
            asks_for_usage,
            most_completion_tokens,
        })
    }
}

const BOUNDS: Bounds = Bounds {
    bytes: MAX_BODY_BYTES,
    nodes: MAX_BODY_NODES,
    depth: MAX_BODY_DEPTH,
};

pub(crate) fn shape(endpoint: &Endpoint) -> Option<&'static ObjectShape> {
    match endpoint {
        Endpoint::Show => Some(&ollama::SHOW),
        Endpoint::Chat => Some(&ollama::CHAT),
        Endpoint::Generate => Some(&ollama::GENERATE),
        Endpoint::Embed => Some(&ollama::EMBED),
        Endpoint::Embeddings => Some(&ollama::EMBEDDINGS),
        Endpoint::ChatCompletions => Some(&openai::CHAT_COMPLETION),
        Endpoint::Completions => Some(&openai::COMPLETION),
        Endpoint::TextEmbeddings => Some(&openai::EMBEDDINGS),
        Endpoint::Tags | Endpoint::Version | Endpoint::Models | Endpoint::Model(_) => None,
    }
}

fn set(members: &mut Members, name: &str, value: JsonValue) {
    match members.iter_mut().find(|(member, _)| member == name) {
        Some((_, old)) => *old = value,
        None => members.push((name.to_owned(), value)),
    }
}

fn rename(members: &mut Members, from: &str, to: &str) {
    for (name, _) in members {
        if name == from {
            to.clone_into(name);
        }
    }
}

/// Sets `num_predict` if the request does not: Ollama's default is no limit.
fn limited_options(members: &mut Members, limits: TokenLimits) -> u64 {
    let at = members.iter().position(|(name, _)| name == "options");
    let mut options = match at.map(|at| members.remove(at)) {
        Some((_, JsonValue::Object(options))) => options,
        _ => Members::new(),
    };
    let tokens = number(&options, "num_predict").unwrap_or_else(|| {
        let tokens = limits.completion_tokens;
        set(
            &mut options,
            "num_predict",
            JsonValue::Number(tokens.into()),
        );
        tokens.into()
    });
    set(members, "options", JsonValue::Object(options));
    tokens
}

fn number(members: &Members, name: &str) -> Option<u64> {
    match get(members, name) {
        Some(JsonValue::Number(number)) => number.as_u64(),
        _ => None,
    }
}

fn includes_usage(members: &Members) -> bool {
    match get(members, "stream_options") {
        Some(JsonValue::Object(options)) => {
            get(options, "include_usage") == Some(&JsonValue::Boolean(true))
        }
        _ => false,
    }
}

/// The tokens of all choices for all prompts together.
fn completion_tokens(members: &Members) -> Option<u64> {
    let each =
        number(members, "max_completion_tokens").or_else(|| number(members, "max_tokens"))?;
    let prompts = match get(members, "prompt") {
        Some(JsonValue::List(prompts)) => prompts.len() as u64,
        _ => 1,
    };
    let choices = number(members, "n").unwrap_or(1);
    Some(each.saturating_mul(choices).saturating_mul(prompts))
}
