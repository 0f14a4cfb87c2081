//! The endpoints of model servers that a sandbox may use.
//!
//! Invariant: a target is compared byte by byte, without decoding. Nothing that a server could
//! read as another path passes: no query, no percent-encoding, no dot segment, no trailing slash.

use cynode_api::document::quote;

use crate::{
    limits::MAX_TARGET_BYTES,
    refusal::{Refusal, RefusalCode},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `GET /api/tags` (Ollama): lists the models.
    Tags,
    /// `GET /api/version` (Ollama): returns the version of the server.
    Version,
    /// `POST /api/show` (Ollama): describes one model.
    Show,
    /// `POST /api/chat` (Ollama): generates the next message of a conversation.
    Chat,
    /// `POST /api/generate` (Ollama): completes a prompt.
    Generate,
    /// `POST /api/embed` (Ollama): embeds one or several texts.
    OllamaEmbed,
    /// `POST /api/embeddings` (Ollama): embeds one text. The predecessor of `/api/embed`.
    OllamaEmbeddings,
    /// `POST /v1/chat/completions` (OpenAI): generates the next message of a conversation.
    ChatCompletions,
    /// `POST /v1/completions` (OpenAI): completes a prompt.
    Completions,
    /// `POST /v1/embeddings` (OpenAI): embeds one or several texts.
    OpenAiEmbeddings,
    /// `GET /v1/models` (OpenAI): lists the models.
    Models,
    /// `GET /v1/models/{id}` (OpenAI): describes one model.
    Model(String),
}

/// Prefix of the paths of [`Endpoint::Model`].
const MODEL_PREFIX: &str = "/v1/models/";

impl Endpoint {
    /// Every endpoint but [`Endpoint::Model`].
    pub const FIXED: &'static [Self] = &[
        Self::Tags,
        Self::Version,
        Self::Show,
        Self::Chat,
        Self::Generate,
        Self::OllamaEmbed,
        Self::OllamaEmbeddings,
        Self::ChatCompletions,
        Self::Completions,
        Self::OpenAiEmbeddings,
        Self::Models,
    ];

    /// Finds the endpoint for a method and an undecoded request target.
    pub fn find(method: &str, target: &str) -> Result<Self, Refusal> {
        let fixed = Self::FIXED
            .iter()
            .find(|endpoint| endpoint.path() == target)
            .cloned();
        let model = || {
            let id = target.strip_prefix(MODEL_PREFIX)?;
            (target.len() <= MAX_TARGET_BYTES && is_model_path(id))
                .then(|| Self::Model(id.to_owned()))
        };
        let endpoint = fixed.or_else(model).ok_or_else(|| {
            let target = quote(target);
            Refusal::new(
                RefusalCode::NotFound,
                format!("{target} is not an endpoint that sandboxes may use"),
            )
        })?;
        if method == endpoint.method() {
            Ok(endpoint)
        } else {
            Err(Refusal::new(
                RefusalCode::MethodNotAllowed,
                format!("{} takes {} only", endpoint.path(), endpoint.method()),
            ))
        }
    }

    #[must_use]
    pub const fn method(&self) -> &'static str {
        match self {
            Self::Tags | Self::Version | Self::Models | Self::Model(_) => "GET",
            Self::Show
            | Self::Chat
            | Self::Generate
            | Self::OllamaEmbed
            | Self::OllamaEmbeddings
            | Self::ChatCompletions
            | Self::Completions
            | Self::OpenAiEmbeddings => "POST",
        }
    }

    #[must_use]
    pub fn path(&self) -> String {
        let path = match self {
            Self::Tags => "/api/tags",
            Self::Version => "/api/version",
            Self::Show => "/api/show",
            Self::Chat => "/api/chat",
            Self::Generate => "/api/generate",
            Self::OllamaEmbed => "/api/embed",
            Self::OllamaEmbeddings => "/api/embeddings",
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::OpenAiEmbeddings => "/v1/embeddings",
            Self::Models => "/v1/models",
            Self::Model(id) => return format!("{MODEL_PREFIX}{id}"),
        };
        path.to_owned()
    }

    /// Returns whether the endpoint belongs to OpenAI's API instead of Ollama's.
    #[must_use]
    pub const fn is_openai(&self) -> bool {
        matches!(
            self,
            Self::ChatCompletions
                | Self::Completions
                | Self::OpenAiEmbeddings
                | Self::Models
                | Self::Model(_)
        )
    }

    /// Returns whether a model computes the answer. The other endpoints describe the server, and
    /// their answers are filtered.
    #[must_use]
    pub const fn runs_model(&self) -> bool {
        !matches!(
            self,
            Self::Tags | Self::Version | Self::Show | Self::Models | Self::Model(_)
        )
    }
}

/// Returns whether a model id is safe as the end of a path: no server can decode it into another
/// path.
pub(crate) fn is_model_path(id: &str) -> bool {
    id.split('/').all(|segment| {
        !segment.is_empty()
            && !segment.starts_with('.')
            && segment
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"._-:@+".contains(&byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_is_found_by_its_own_method_and_path_only() {
        let model = Endpoint::Model("library/llama3.2:latest".to_owned());
        for endpoint in Endpoint::FIXED.iter().chain([&model]) {
            let path = endpoint.path();
            assert_eq!(
                Endpoint::find(endpoint.method(), &path).as_ref(),
                Ok(endpoint)
            );
            for method in [
                "GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "post", "",
            ] {
                if method != endpoint.method() {
                    let refusal = Endpoint::find(method, &path).expect_err("refused");
                    assert_eq!(
                        refusal.code,
                        RefusalCode::MethodNotAllowed,
                        "{method} {path}"
                    );
                }
            }
        }
    }

    #[test]
    fn other_paths_of_model_servers_are_refused() {
        for path in [
            "",
            "/",
            "*",
            "/api/pull",
            "/api/push",
            "/api/create",
            "/api/copy",
            "/api/delete",
            "/api/blobs/sha256:29fdb92e57cf0827ded04ae6461b5931d01fa595843f55d36f5b275a52087dd2",
            "/api/ps",
            "/api/me",
            "/api/signout",
            "/api/status",
            "/api/experimental/web_search",
            "/api/experimental/web_fetch",
            "/v1/responses",
            "/v1/messages",
            "/v1/files",
            "/v1/audio/transcriptions",
            "/v1/images/generations",
            "/v1/fine_tuning/jobs",
            "/v1/load_lora_adapter",
            "/tokenize",
            "/slots",
            "/props",
            "/metrics",
        ] {
            for method in ["GET", "POST"] {
                let refusal = Endpoint::find(method, path).expect_err(path);
                assert_eq!(refusal.code, RefusalCode::NotFound, "{method} {path}");
            }
        }
    }

    #[test]
    fn a_target_that_a_server_could_read_as_another_path_is_refused() {
        for target in [
            "/api/tags/",
            "/api/tags?",
            "/api/tags?name=x",
            "/api/tags#x",
            "/api/tags ",
            " /api/tags",
            "/api//tags",
            "//api/tags",
            "/./api/tags",
            "/api/../api/tags",
            "/api/pull/../tags",
            "/api/tags;x=1",
            "/API/tags",
            "/api/Tags",
            "/api/%74ags",
            "/api%2ftags",
            "/api/tags%00",
            "/api/tags\0",
            "/api\\tags",
            "api/tags",
            "http://localhost:11434/api/tags",
            "/v1/models/",
            "/v1/models//x",
            "/v1/models/x/",
            "/v1/models/.",
            "/v1/models/..",
            "/v1/models/../chat",
            "/v1/models/x/../y",
            "/v1/models/x/./y",
            "/v1/models/.x",
            "/v1/models/%2e%2e/x",
            "/v1/models/x%2fy",
            "/v1/models/x?y",
            "/v1/models/x#y",
            "/v1/models/x y",
            "/v1/models/x;y",
            "/v1/models/x\\y",
            "/v1/models/\u{e9}",
            "/v1/models/x\n",
        ] {
            let refusal = Endpoint::find("GET", target).expect_err(target);
            assert_eq!(refusal.code, RefusalCode::NotFound, "{target}");
            assert!(refusal.message.is_ascii());
        }
    }

    #[test]
    fn the_length_of_a_target_is_bounded() {
        let target = |length: usize| {
            let id = "x".repeat(length - MODEL_PREFIX.len());
            Endpoint::find("GET", &format!("{MODEL_PREFIX}{id}"))
        };
        assert!(target(MAX_TARGET_BYTES).is_ok());
        assert!(target(MAX_TARGET_BYTES + 1).is_err());
    }
}
