//! Policies: rules for who may do what, and dry runs of their decisions.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{JobId, LimitsRequest, ProjectId, SessionId, TaskId, TokenId, TokenKind};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Policy {
    pub id: String,
    /// The rules, in Cedar.
    pub text: String,
    /// Increases with every change.
    pub revision: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
    pub updated_by: String,
    /// The policy is part of CyNode and unmodified.
    pub is_default: bool,
    pub rules: Vec<PolicyRule>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRule {
    /// The name in decisions and audit records: `<policy>/<rule>`.
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
    /// Fails with 412 unless the policy has this revision; 0 means that it does not exist yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_revision: Option<i64>,
}

/// Asks for a decision without any effect.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyTest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// The user's name or id; the caller if this and `token_id` are absent.
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
    /// The image that is used or changed, or that a session or job would run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// The network policy that a session or job requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// Whether a session requests terminals.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pty: bool,
    /// The limits that a session or job requests.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::session::object_only"
    )]
    pub limits: Option<LimitsRequest>,
    /// The kind of token to create.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_kind: Option<TokenKind>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyVerdict {
    pub allowed: bool,
    /// The rules that decided; empty if no rule permits the action.
    #[serde(default)]
    pub rules: Vec<String>,
    /// Rules that failed to evaluate. Any such failure denies the call.
    #[serde(default)]
    pub errors: Vec<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_policy_test_with_an_unknown_field_is_refused() {
        assert!(
            serde_json::from_value::<PolicyTest>(json!({"action": "file.read", "pth": "/etc"}))
                .is_err()
        );
        assert!(serde_json::from_value::<PolicyPut>(json!({"text": "", "if_revison": 1})).is_err());
    }

    #[test]
    fn a_policy_test_omits_absent_fields() {
        let test = PolicyTest {
            user: Some("ada".into()),
            action: "file.read".into(),
            path: Some("/etc".into()),
            ..PolicyTest::default()
        };
        assert_eq!(
            serde_json::to_value(&test).expect("a policy test serialises"),
            json!({"user": "ada", "action": "file.read", "path": "/etc"})
        );
    }
}
