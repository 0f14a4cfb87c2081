//! The configuration of the inference path, `worker.inference`.

use std::net::IpAddr;

use cynode_api::ModelServerKind;
use cynode_inference::limits::MAX_BODY_BYTES;
use cynode_service::ConfigError;
use serde::Deserialize;

/// What `context_tokens` may be.
const MIN_CONTEXT_TOKENS: u64 = 1_024;
const MAX_CONTEXT_TOKENS: u64 = 1_048_576;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InferenceConfig {
    /// The model server that sandboxes may use (`http://127.0.0.1:11434`). Default: none.
    pub url: Option<String>,
    /// Its API. Default: detected.
    pub kind: Option<ModelServerKind>,
    /// Allows a model server that others than this machine can reach.
    pub allow_beyond_loopback: bool,
    /// The tokens of prompt and answer that the server makes room for (Ollama's `num_ctx`,
    /// llama.cpp's `n_ctx`), which agents of jobs keep to. Default: what the server says of its
    /// models, at most 32,768 for the prompt.
    pub context_tokens: Option<u64>,
    /// Requests of all sandboxes at once. A quarter of them is for sandboxes that have none.
    pub max_requests: usize,
    /// Requests of one sandbox at once.
    pub max_requests_per_sandbox: usize,
    /// The largest request of a sandbox.
    pub max_body_bytes: usize,
    /// How long the model server may take to begin its answer; loading a model takes minutes.
    pub first_byte_seconds: u64,
    /// The longest pause in an answer.
    pub idle_seconds: u64,
    /// The longest time for one answer.
    pub request_seconds: u64,
}

impl Default for InferenceConfig {
    fn default() -> Self {
        Self {
            url: None,
            kind: None,
            allow_beyond_loopback: false,
            context_tokens: None,
            max_requests: 64,
            max_requests_per_sandbox: 4,
            max_body_bytes: MAX_BODY_BYTES,
            first_byte_seconds: 300,
            idle_seconds: 120,
            request_seconds: 1_800,
        }
    }
}

impl InferenceConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let bad = |key: &str, message: String| {
            Err(ConfigError::Value {
                key: format!("worker.inference.{key}"),
                message,
            })
        };
        for (key, value, most) in [
            ("max_requests", self.max_requests as u64, 10_000),
            (
                "max_requests_per_sandbox",
                self.max_requests_per_sandbox as u64,
                self.max_requests as u64,
            ),
            (
                "max_body_bytes",
                self.max_body_bytes as u64,
                MAX_BODY_BYTES as u64,
            ),
            ("first_byte_seconds", self.first_byte_seconds, 86_400),
            ("idle_seconds", self.idle_seconds, 86_400),
            ("request_seconds", self.request_seconds, 86_400),
        ] {
            if !(1..=most).contains(&value) {
                return bad(key, format!("must be between 1 and {most}"));
            }
        }
        if let Some(tokens) = self.context_tokens
            && !(MIN_CONTEXT_TOKENS..=MAX_CONTEXT_TOKENS).contains(&tokens)
        {
            let (least, most) = (MIN_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS);
            return bad(
                "context_tokens",
                format!("must be between {least} and {most}"),
            );
        }
        let Some(url) = &self.url else { return Ok(()) };
        let host = match server_url(url) {
            Ok(parsed) => parsed.host_str().unwrap_or_default().to_owned(),
            Err(message) => return bad("url", message.to_owned()),
        };
        if !self.allow_beyond_loopback && !is_loopback(&host) {
            return bad(
                "url",
                format!(
                    "{host} is beyond loopback: prompts and answers would leave this machine; set \
                     worker.inference.allow_beyond_loopback = true to allow it"
                ),
            );
        }
        Ok(())
    }
}

/// The address of a model server, without anything that could change the paths of endpoints.
pub(super) fn server_url(url: &str) -> Result<reqwest::Url, &'static str> {
    let parsed: reqwest::Url = url
        .parse()
        .map_err(|_| "must be a URL such as http://127.0.0.1:11434")?;
    if !matches!(parsed.scheme(), "http" | "https") || parsed.host_str().is_none() {
        return Err("must begin with http:// or https://");
    }
    if !parsed.username().is_empty() || parsed.password().is_some() {
        return Err("must not contain credentials");
    }
    if parsed.path() != "/" || parsed.query().is_some() || parsed.fragment().is_some() {
        return Err("must have no path: endpoints begin with /api or /v1");
    }
    Ok(parsed)
}

/// Whether a host of a URL is the loopback interface.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host
            .trim_matches(['[', ']'])
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(config: &InferenceConfig) -> Option<String> {
        config.check().err().map(|error| error.to_string())
    }

    fn at(url: &str) -> InferenceConfig {
        InferenceConfig {
            url: Some(url.to_owned()),
            ..InferenceConfig::default()
        }
    }

    #[test]
    fn a_server_beyond_loopback_must_be_allowed_by_name() {
        assert_eq!(refusal(&InferenceConfig::default()), None);
        for url in [
            "http://127.0.0.1:11434",
            "http://127.1.2.3:1",
            "http://localhost:11434/",
            "http://[::1]:11434",
        ] {
            assert_eq!(refusal(&at(url)), None, "{url}");
        }
        for url in [
            "http://192.168.1.5:11434",
            "http://0.0.0.0:11434",
            "http://[::]:11434",
            "http://localhost.example.com:11434",
            "http://models.lan",
        ] {
            let refused = refusal(&at(url)).expect(url);
            assert!(
                refused.contains("worker.inference.allow_beyond_loopback = true"),
                "{refused}"
            );
            let allowed = InferenceConfig {
                allow_beyond_loopback: true,
                ..at(url)
            };
            assert_eq!(refusal(&allowed), None, "{url}");
        }
    }

    #[test]
    fn an_address_that_is_none_and_bounds_out_of_range_are_refused() {
        for url in [
            "",
            "127.0.0.1:11434",
            "ftp://127.0.0.1",
            "http://127.0.0.1:11434/v1",
            "http://127.0.0.1:11434/?x",
            "http://user:secret@127.0.0.1:11434",
        ] {
            let refused = refusal(&at(url)).expect(url);
            assert!(refused.contains("worker.inference.url"), "{refused}");
        }
        let no_time = InferenceConfig {
            idle_seconds: 0,
            ..InferenceConfig::default()
        };
        assert!(refusal(&no_time).is_some());
        let more_than_all = InferenceConfig {
            max_requests_per_sandbox: 65,
            ..InferenceConfig::default()
        };
        assert!(refusal(&more_than_all).is_some());
        for tokens in [MIN_CONTEXT_TOKENS - 1, MAX_CONTEXT_TOKENS + 1] {
            let window = InferenceConfig {
                context_tokens: Some(tokens),
                ..InferenceConfig::default()
            };
            let refused = refusal(&window).expect("out of range");
            assert!(
                refused.contains("worker.inference.context_tokens"),
                "{refused}"
            );
        }
    }
}
