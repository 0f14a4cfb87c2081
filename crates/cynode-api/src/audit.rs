//! The audit trail: calls, the decisions about them and their outcomes.
//!
//! Record bodies are chained and signed. A hash covers the stored JSON, never these types, so that
//! a record with members unknown to this version still verifies. Bodies never contain env values,
//! stdin or file contents, only names, sizes and hashes.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{ExecId, JobId, NodeId, ProjectId, SessionId, TaskId, TokenId, UserId};

/// The version in record bodies.
pub const AUDIT_VERSION: u32 = 1;

/// The most problems that a verdict lists.
pub const MAX_AUDIT_PROBLEMS: usize = 100;

macro_rules! string_enums {
    ($(
        $(#[$doc:meta])*
        $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),* $(,)? }
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[derive(Serialize, Deserialize, ToSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$variant_doc])* $variant),* }

        impl $name {
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),* }
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => {
                        let known = [$($word),*].join(", ");
                        Err(format!("unknown value '{text}'; expected one of {known}"))
                    }
                }
            }
        }
    )*};
}

string_enums! {
    /// The kind of a record.
    AuditKind {
        /// Written before an action takes effect, or when it is denied.
        Intent = "intent",
        /// The outcome of an intent. Written before the response.
        Outcome = "outcome",
        /// An event that no API call caused.
        Event = "event",
        Authentication = "authentication",
        /// A writer started or ended its stream.
        Stream = "stream",
    }

    AuditDecision {
        Allow = "allow",
        Deny = "deny",
    }

    AuditResult {
        Done = "done",
        Failed = "failed",
        Refused = "refused",
        NotStarted = "not_started",
        /// The outcome can't be determined any more.
        Unknown = "unknown",
    }
}

impl AuditResult {
    /// The result that an HTTP status implies.
    #[must_use]
    pub const fn from_status(status: u16) -> Self {
        match status {
            100..400 => Self::Done,
            400..500 => Self::Refused,
            _ => Self::Failed,
        }
    }
}

/// Who acted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditSubject {
    /// `user`, `project_manager`, `project_analyst`, `sandbox`, `node`, `egress`, `system` or
    /// `nobody`.
    pub kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<UserId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_id: Option<TokenId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_id: Option<NodeId>,
    /// Of an egress role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<Uuid>,
}

/// The content of a record, without its position, time and hash.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AuditBody {
    pub version: u32,
    pub kind: AuditKind,
    /// `session.exec`, `file.write`, `token.create`, …
    pub action: String,
    /// Shared by an intent and its outcome.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_id: Option<Uuid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<AuditSubject>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project_id: Option<ProjectId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_id: Option<TaskId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_id: Option<JobId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec_id: Option<ExecId>,
    /// The affected resource: `artifact:…`, `token:…`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<AuditDecision>,
    /// The stage of checks that made the decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<String>,
    /// The policy rules that decided.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<AuditResult>,
    /// The HTTP status of the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The error code of the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Details of the action. All numbers are integers.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schema(value_type = Object)]
    pub detail: Map<String, Value>,
}

impl AuditBody {
    #[must_use]
    pub fn new(kind: AuditKind, action: impl Into<String>) -> Self {
        Self {
            version: AUDIT_VERSION,
            kind,
            action: action.into(),
            call_id: None,
            request_id: None,
            subject: None,
            project_id: None,
            task_id: None,
            session_id: None,
            job_id: None,
            exec_id: None,
            resource: None,
            decision: None,
            stage: None,
            rules: Vec::new(),
            result: None,
            status: None,
            code: None,
            detail: Map::new(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AuditRecord {
    /// Increases with each record, across all streams.
    pub cursor: i64,
    /// Identifies one run of a writing process.
    pub stream: Uuid,
    /// The number of the record in its stream, starting at 1.
    pub seq: u64,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    #[serde(flatten)]
    pub body: AuditBody,
    /// SHA-256 in hexadecimal, over this record and the hash of its predecessor in the stream.
    pub hash: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AuditPage {
    pub items: Vec<AuditRecord>,
    /// Pass this as `after` to get the next page.
    pub next_cursor: i64,
    /// The page reached its size limit before `limit`: continue at `next_cursor`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

/// The retained checkpoints, each a signed line and its signature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditCheckpoints {
    pub items: Vec<String>,
    /// `ed25519:` and the public key in base64url.
    pub key: String,
}

/// A line of the response to a verification. The verdict comes last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum AuditVerifyLine {
    Progress { checked: u64, of: u64 },
    Verdict { verdict: AuditVerdict },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditVerdict {
    pub intact: bool,
    pub records: u64,
    pub streams: u64,
    pub checkpoints: u64,
    /// Total records removed by retention.
    pub truncated: u64,
    /// Intents without an outcome.
    pub open: u64,
    /// Records after the last checkpoint: chained, but not signed yet.
    #[serde(default)]
    pub unsigned: u64,
    /// When the oldest unsigned record was made.
    #[serde(
        default,
        with = "time::serde::rfc3339::option",
        skip_serializing_if = "Option::is_none"
    )]
    pub unsigned_since: Option<OffsetDateTime>,
    #[serde(
        default,
        with = "time::serde::rfc3339::option",
        skip_serializing_if = "Option::is_none"
    )]
    pub last_signed_at: Option<OffsetDateTime>,
    /// The key that verified the checkpoints.
    pub key: String,
    pub problems: Vec<AuditProblem>,
    /// More problems were found than are listed.
    pub more_problems: bool,
}

/// One integrity problem and its location.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditProblem {
    /// `record_changed`, `record_missing`, `record_inserted`, `order_changed`, `stream_missing`,
    /// `checkpoint_missing`, `checkpoint_changed`, `checkpoint_overdue`, `signature_bad`,
    /// `tail_missing`, `intent_doubled`, `outcome_doubled`, `outcome_without_intent`,
    /// `column_changed`, `table_changed`.
    pub what: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<Uuid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<u64>,
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn full() -> AuditBody {
        AuditBody {
            call_id: Some(Uuid::now_v7()),
            request_id: Some("r-1".into()),
            subject: Some(AuditSubject {
                kind: "user".into(),
                name: Some("ada".into()),
                user_id: Some(UserId::generate()),
                token_id: Some(TokenId::generate()),
                node_id: None,
                instance: None,
            }),
            project_id: Some(ProjectId::generate()),
            task_id: Some(TaskId::generate()),
            session_id: Some(SessionId::generate()),
            job_id: Some(JobId::generate()),
            exec_id: Some(ExecId::generate()),
            resource: Some("artifact:1".into()),
            decision: Some(AuditDecision::Deny),
            stage: Some("policy".into()),
            rules: vec!["default/no-etc".into()],
            result: Some(AuditResult::NotStarted),
            status: Some(403),
            code: Some("denied_by_policy".into()),
            detail: Map::from_iter([
                ("argv".to_owned(), json!(["make", "\u{1b}[2J"])),
                ("bytes".to_owned(), json!({"stdout": u64::MAX})),
            ]),
            ..AuditBody::new(AuditKind::Intent, "session.exec")
        }
    }

    #[test]
    fn bodies_round_trip() {
        for body in [full(), AuditBody::new(AuditKind::Stream, "stream.begin")] {
            let value = serde_json::to_value(&body).expect("bodies serialise");
            assert_eq!(
                serde_json::from_value::<AuditBody>(value).expect("bodies parse"),
                body
            );
        }
    }

    #[test]
    fn absent_members_are_omitted() {
        let value = serde_json::to_value(AuditBody::new(AuditKind::Event, "node.lost"))
            .expect("bodies serialise");
        assert_eq!(
            value,
            json!({"version": 1, "kind": "event", "action": "node.lost"})
        );
    }

    #[test]
    fn records_flatten_body_and_round_trip() {
        let at =
            OffsetDateTime::from_unix_timestamp_nanos(1_750_000_000_123_456_000).expect("a time");
        let record = AuditRecord {
            cursor: 7,
            stream: Uuid::now_v7(),
            seq: u64::MAX,
            at,
            body: full(),
            hash: "00".repeat(32),
        };
        let value = serde_json::to_value(&record).expect("records serialise");
        assert_eq!(
            (
                value["kind"].as_str(),
                value["seq"].as_u64(),
                value.get("body")
            ),
            (Some("intent"), Some(u64::MAX), None)
        );
        assert_eq!(
            serde_json::from_str::<AuditRecord>(&value.to_string()).expect("records parse"),
            record
        );
    }

    #[test]
    fn unknown_members_are_ignored() {
        let value =
            json!({"version": 2, "kind": "event", "action": "node.lost", "weather": "rain"});
        assert_eq!(
            serde_json::from_value::<AuditBody>(value)
                .expect("bodies parse")
                .version,
            2
        );
    }

    #[test]
    fn progress_and_verdict_lines_parse() {
        let line: AuditVerifyLine =
            serde_json::from_value(json!({"checked": 3, "of": 9})).expect("progress parses");
        assert_eq!(line, AuditVerifyLine::Progress { checked: 3, of: 9 });
        let line = serde_json::from_value(json!({"verdict": {
            "intact": true, "records": 9, "streams": 1, "checkpoints": 2, "truncated": 0,
            "open": 0, "key": "ed25519:", "problems": [], "more_problems": false,
        }}));
        assert!(matches!(
            line.expect("verdicts parse"),
            AuditVerifyLine::Verdict { verdict }
                if verdict.intact && verdict.last_signed_at.is_none()
        ));
    }

    #[test]
    fn enum_strings_round_trip() {
        for kind in [
            AuditKind::Intent,
            AuditKind::Outcome,
            AuditKind::Event,
            AuditKind::Authentication,
            AuditKind::Stream,
        ] {
            assert_eq!(
                (
                    serde_json::to_value(kind).expect("words serialise"),
                    kind.as_str().parse()
                ),
                (json!(kind.as_str()), Ok(kind))
            );
        }
        assert!(
            "NotStarted"
                .parse::<AuditResult>()
                .is_err_and(|error| error.contains("not_started"))
        );
    }
}
