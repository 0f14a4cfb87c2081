//! Validates requests and builds the ones that are forwarded.

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

/// Limits on what one request may ask for.
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

/// The kind of server that receives a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upstream {
    /// A model server of the node. Some of them ignore the newer `max_completion_tokens`, so the limit
    /// is sent as `max_tokens`.
    Local,
    /// A provider, which may refuse `max_tokens`.
    Provider,
}

/// The rules for the requests of one sandbox.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    pub models: &'a AllowedModels,
    pub limits: TokenLimits,
    pub upstream: Upstream,
}

/// A request as it is forwarded to the server.
#[derive(Clone, PartialEq, Eq)]
pub struct UpstreamRequest {
    pub endpoint: Endpoint,
    /// The name of the model in the list of allowed models.
    pub model: Option<String>,
    /// Serialized from the parsed request. `None` for a GET.
    pub body: Option<Vec<u8>>,
    pub answer: AnswerFormat,
    /// The client asked for the usage of a stream. If not, it may not expect the chunk with empty
    /// `choices`, which is sent in any case.
    pub asks_for_usage: bool,
    /// Upper bound of the tokens of all answers to this request; `None` if the request sets no limit.
    pub most_completion_tokens: Option<u64>,
}

/// Omits the body, which must not be logged.
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
    /// Validates a request by its endpoint and its complete body.
    pub fn judge(&self, endpoint: &Endpoint, body: &[u8]) -> Result<UpstreamRequest, Refusal> {
        match self.members(endpoint, body)? {
            Some(members) => self.with_body(endpoint, members),
            None => self.without_body(endpoint),
        }
    }

    /// Parses and validates the body; `None` for an endpoint without one.
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
                // The operator wrote the entry, so it may contain characters that a path can't.
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
        Endpoint::OllamaEmbed => Some(&ollama::EMBED),
        Endpoint::OllamaEmbeddings => Some(&ollama::EMBEDDINGS),
        Endpoint::ChatCompletions => Some(&openai::CHAT_COMPLETION),
        Endpoint::Completions => Some(&openai::COMPLETION),
        Endpoint::OpenAiEmbeddings => Some(&openai::EMBEDDINGS),
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

/// Sets `num_predict` unless the request does, because Ollama's default is unlimited. Returns it.
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

/// The limit on the tokens of all choices for all prompts together.
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
