//! Policies: texts of rules that say who may do what, and the question of what they would say.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{JobId, LimitsRequest, ProjectId, SessionId, TaskId, TokenId, TokenKind};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Policy {
    pub id: String,
    /// The rules, in Cedar.
    pub text: String,
    /// Rises with every change.
    pub revision: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
    pub updated_by: String,
    /// It came with CyNode and nobody has changed it.
    pub is_default: bool,
    pub rules: Vec<PolicyRule>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRule {
    /// As decisions and the audit name it: `<policy>/<rule>`.
    pub name: String,
    /// `permit` or `forbid`.
    pub effect: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyPut {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub text: String,
    /// Refused with 412 unless the policy's revision is this one; 0 means that there is none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_revision: Option<i64>,
}

/// What would be decided. Nothing is done and nothing is changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyTest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// The user's name or id; the caller when this and `token_id` are absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_id: Option<TokenId>,
    pub action: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project_id: Option<ProjectId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_id: Option<TaskId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    /// The image that is used or changed, or in which a session or a job is to run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// The network policy that a session or a job asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// Whether a session asks for terminals.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pty: bool,
    /// The limits that a session or a job asks for.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::session::object_only"
    )]
    pub limits: Option<LimitsRequest>,
    /// What kind of token is to be made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_kind: Option<TokenKind>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyVerdict {
    pub allowed: bool,
    /// The rules that decided; none when it was denied because nothing permits it.
    #[serde(default)]
    pub rules: Vec<String>,
    /// Rules that could not be evaluated, and so did not count.
    #[serde(default)]
    pub errors: Vec<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_misspelt_question_is_refused() {
        assert!(
            serde_json::from_value::<PolicyTest>(json!({"action": "file.read", "pth": "/etc"}))
                .is_err()
        );
        assert!(serde_json::from_value::<PolicyPut>(json!({"text": "", "if_revison": 1})).is_err());
    }

    #[test]
    fn a_question_says_only_what_it_asks() {
        let test = PolicyTest {
            user: Some("ada".into()),
            action: "file.read".into(),
            path: Some("/etc".into()),
            ..PolicyTest::default()
        };
        assert_eq!(
            serde_json::to_value(&test).expect("questions serialise"),
            json!({"user": "ada", "action": "file.read", "path": "/etc"})
        );
    }
}
