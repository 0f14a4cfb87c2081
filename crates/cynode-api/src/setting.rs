//! System settings and preferences: values by key, with the type that the key has.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

/// A known key: its type, its default, and whether it is a setting of the system or a preference.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    pub name: &'static str,
    pub kind: ValueKind,
    pub is_setting: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    Boolean,
    Text,
    /// A list of objects.
    Objects,
    /// A whole number, not negative.
    Count,
    /// The consumer of the setting validates it.
    Special,
}

impl ValueKind {
    /// Says what is wrong with a value, when something is.
    pub fn check(self, value: &Value) -> Result<(), &'static str> {
        match (self, value) {
            (Self::Special, _)
            | (Self::Boolean, Value::Bool(_))
            | (Self::Text, Value::String(_)) => Ok(()),
            (Self::Objects, Value::Array(items)) if items.iter().all(Value::is_object) => Ok(()),
            (Self::Count, value) if value.as_i64().is_some_and(|number| number >= 0) => Ok(()),
            (Self::Count, _) => Err("must be a whole number that is not negative"),
            (Self::Boolean, _) => Err("must be true or false"),
            (Self::Text, _) => Err("must be a string"),
            (Self::Objects, _) => Err("must be a list of objects"),
        }
    }
}

pub const ALLOW_PM_IMAGES: &str = "agents.project_manager.sandbox.allow_add_to_allowed_images";
pub const DEFAULT_IMAGE_KEY: &str = "sandbox.default_image";
/// Sandboxes at once.
pub const QUOTA_SANDBOXES: &str = "quota.sandboxes";
/// Processor seconds that sandboxes reserve within 24 hours.
pub const QUOTA_CPU_SECONDS: &str = "quota.cpu_seconds";
/// Bytes of memory of one sandbox.
pub const QUOTA_SANDBOX_MEMORY_BYTES: &str = "quota.sandbox_memory_bytes";
/// Processors of one sandbox.
pub const QUOTA_SANDBOX_CPUS: &str = "quota.sandbox_cpus";
/// Processes of one sandbox.
pub const QUOTA_SANDBOX_PIDS: &str = "quota.sandbox_pids";
/// Bytes of artifacts and of the output of jobs that are kept.
pub const QUOTA_ARTIFACT_BYTES: &str = "quota.artifact_bytes";
/// How shapes of credentials are treated in a project: stricter than `orchestrator.secret_shapes`, never laxer.
pub const SECRET_SHAPES: &str = "secrets.shapes";

/// The keys whose type is known. Others may be used and take any value.
pub const KEYS: &[Key] = &[
    Key {
        name: ALLOW_PM_IMAGES,
        kind: ValueKind::Boolean,
        is_setting: true,
    },
    Key {
        name: DEFAULT_IMAGE_KEY,
        kind: ValueKind::Text,
        is_setting: true,
    },
    Key {
        name: "sandbox_images.registries",
        kind: ValueKind::Objects,
        is_setting: false,
    },
    Key {
        name: "sandbox_images.registry.mode",
        kind: ValueKind::Text,
        is_setting: false,
    },
    Key {
        name: "sandbox_images.nodes.prefer_cached_images",
        kind: ValueKind::Boolean,
        is_setting: false,
    },
    Key {
        name: "sandbox_images.allow_public_internet",
        kind: ValueKind::Boolean,
        is_setting: false,
    },
    Key {
        name: "sandbox_images.require_digest_pinning",
        kind: ValueKind::Boolean,
        is_setting: false,
    },
    Key {
        name: "agents.sandbox_agent.additional_context",
        kind: ValueKind::Text,
        is_setting: false,
    },
    Key {
        name: SECRET_SHAPES,
        kind: ValueKind::Special,
        is_setting: false,
    },
    Key {
        name: QUOTA_SANDBOXES,
        kind: ValueKind::Count,
        is_setting: false,
    },
    Key {
        name: QUOTA_CPU_SECONDS,
        kind: ValueKind::Count,
        is_setting: false,
    },
    Key {
        name: QUOTA_SANDBOX_MEMORY_BYTES,
        kind: ValueKind::Count,
        is_setting: false,
    },
    Key {
        name: QUOTA_SANDBOX_CPUS,
        kind: ValueKind::Count,
        is_setting: false,
    },
    Key {
        name: QUOTA_SANDBOX_PIDS,
        kind: ValueKind::Count,
        is_setting: false,
    },
    Key {
        name: QUOTA_ARTIFACT_BYTES,
        kind: ValueKind::Count,
        is_setting: false,
    },
];

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ValuePut {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    #[schema(value_type = Value)]
    pub value: Value,
    /// Refused with 412 unless the value's revision is this one; 0 means that there is none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_revision: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Setting {
    pub key: String,
    #[schema(value_type = Value)]
    pub value: Value,
    /// Rises with every change.
    pub revision: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
    pub updated_by: String,
}

/// From the narrowest to the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PreferenceScope {
    Task,
    Project,
    User,
    Group,
    System,
}

impl PreferenceScope {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Task => "task",
            Self::Project => "project",
            Self::User => "user",
            Self::Group => "group",
            Self::System => "system",
        }
    }
}

impl std::str::FromStr for PreferenceScope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_value(text.into()).map_err(|_| {
            format!("unknown scope '{text}'; known are task, project, user, group, system")
        })
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Preference {
    pub scope: PreferenceScope,
    /// The all-zero id for `system`.
    pub scope_id: Uuid,
    pub key: String,
    #[schema(value_type = Value)]
    pub value: Value,
    pub revision: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
    pub updated_by: String,
}
