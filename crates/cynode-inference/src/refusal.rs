//! Refusals: the error responses to requests that are not forwarded.

use std::fmt::Write as _;

use cynode_api::document::{ViolationCode, Violations};
use serde_json::json;

use crate::limits::MAX_SHOWN_VIOLATIONS;

/// Stable codes. A code never changes its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// The model is not in the allowed models of the job or session.
    ModelNotAllowed,
    /// No server serves the model, or its answer can't be read.
    InferenceUnavailable,
    InvalidRequest,
    TooLarge,
    /// The sandbox, or the node, has as many requests in flight as it may.
    TooManyRequests,
    /// The node can't record the request, so it must not leave.
    AuditUnavailable,
    /// The sandbox has used its share of the node's records.
    AuditBacklogFull,
    /// The path is not one of the endpoints.
    NotFound,
    MethodNotAllowed,
}

impl RefusalCode {
    pub const ALL: &'static [Self] = &[
        Self::ModelNotAllowed,
        Self::InferenceUnavailable,
        Self::InvalidRequest,
        Self::TooLarge,
        Self::TooManyRequests,
        Self::AuditUnavailable,
        Self::AuditBacklogFull,
        Self::NotFound,
        Self::MethodNotAllowed,
    ];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ModelNotAllowed => "model_not_allowed",
            Self::InferenceUnavailable => "inference_unavailable",
            Self::InvalidRequest => "invalid_request",
            Self::TooLarge => "too_large",
            Self::TooManyRequests => "too_many_requests",
            Self::AuditUnavailable => "audit_unavailable",
            Self::AuditBacklogFull => "audit_backlog_full",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
        }
    }

    /// The HTTP status.
    #[must_use]
    pub const fn status(self) -> u16 {
        match self {
            Self::ModelNotAllowed => 403,
            Self::InferenceUnavailable | Self::AuditUnavailable | Self::AuditBacklogFull => 503,
            Self::InvalidRequest => 400,
            Self::TooLarge => 413,
            Self::TooManyRequests => 429,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
        }
    }

    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::ModelNotAllowed => {
                "Use a model that GET /api/tags or GET /v1/models lists, or ask for this one to be \
                 allowed: inference.allowed_models of the job or session."
            }
            Self::InferenceUnavailable => {
                "Try again later; 'cynode doctor' on the node shows its model server."
            }
            Self::InvalidRequest => "Correct the request as the message says.",
            Self::TooLarge => "Send less; the message names the limit.",
            Self::TooManyRequests => "Wait for the answers to earlier requests.",
            Self::AuditUnavailable => {
                "Try again later; the operator of the node finds the cause in the worker's log."
            }
            Self::AuditBacklogFull => "Try again once the node has reached its orchestrator.",
            Self::NotFound | Self::MethodNotAllowed => {
                "Use GET /api/tags, /api/version, /v1/models, or POST /api/show, /api/chat, \
                 /api/generate, /api/embed, /api/embeddings, /v1/chat/completions, \
                 /v1/completions, /v1/embeddings, without a query."
            }
        }
    }
}

/// A refused request. The message is printable ASCII of bounded length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub code: RefusalCode,
    pub message: String,
}

impl Refusal {
    #[must_use]
    pub fn new(code: RefusalCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// The HTTP status.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.code.status()
    }

    /// The JSON body of the response. `error` repeats the message where clients of Ollama and of
    /// OpenAI expect it.
    #[must_use]
    pub fn body(&self, request_id: &str) -> Vec<u8> {
        json!({
            "code": self.code.as_str(),
            "message": self.message,
            "error": self.message,
            "remedy": self.code.remedy(),
            "request_id": request_id,
        })
        .to_string()
        .into_bytes()
    }

    /// A refusal of an invalid body.
    pub(crate) fn of_violations(violations: &Violations) -> Self {
        let is_too_large = violations
            .errors
            .iter()
            .any(|error| error.code == ViolationCode::TooLarge);
        let told: Vec<String> = violations
            .errors
            .iter()
            .take(MAX_SHOWN_VIOLATIONS)
            .map(ToString::to_string)
            .collect();
        let mut message = told.join("; ");
        let others = violations.errors.len() - told.len() + violations.omitted;
        if others > 0 {
            write!(message, "; and {others} more").expect("writing to a string succeeds");
        }
        let code = if is_too_large {
            RefusalCode::TooLarge
        } else {
            RefusalCode::InvalidRequest
        };
        Self::new(code, message)
    }

    /// A refusal because the server's answer can't be parsed.
    pub(crate) fn unreadable(what: &str, violations: &Violations) -> Self {
        Self::new(
            RefusalCode::InferenceUnavailable,
            format!("the model server's {what} can't be read: {violations}"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_names_code_message_and_remedy_where_programs_look_for_them() {
        for code in RefusalCode::ALL {
            let refusal = Refusal::new(*code, "a \"reason\"");
            let body: serde_json::Value =
                serde_json::from_slice(&refusal.body("01936f3e")).expect("JSON");
            assert_eq!(body["code"], code.as_str());
            assert_eq!(body["message"], "a \"reason\"");
            assert_eq!(body["error"], body["message"]);
            assert_eq!(body["remedy"], code.remedy());
            assert_eq!(body["request_id"], "01936f3e");
            assert!((400..600).contains(&refusal.status()));
        }
    }

    #[test]
    fn a_refusal_repeats_a_few_violations_and_counts_the_others() {
        let mut violations = Violations::none();
        for _ in 0..100 {
            violations.add(ViolationCode::WrongType, &[], || "is wrong".to_owned());
        }
        let refusal = Refusal::of_violations(&violations);
        assert_eq!(refusal.message.matches("is wrong").count(), 4);
        assert!(refusal.message.ends_with("; and 96 more"), "{refusal}");
    }
}
