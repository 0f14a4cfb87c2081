//! System settings and preferences: typed values by key.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::sba::limits::{MAX_MODEL_BYTES, MAX_MODELS};

/// A known key: the type of its value, and whether it is a system setting or a preference.
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
    /// A list of names of models.
    Models,
    /// A non-negative integer.
    Count,
    /// Validated by the consumer of the setting.
    Special,
}

impl ValueKind {
    /// Validates a value; the error describes the expected type.
    pub fn check(self, value: &Value) -> Result<(), &'static str> {
        match (self, value) {
            (Self::Special, _)
            | (Self::Boolean, Value::Bool(_))
            | (Self::Text, Value::String(_)) => Ok(()),
            (Self::Objects, Value::Array(items)) if items.iter().all(Value::is_object) => Ok(()),
            (Self::Models, Value::Array(items))
                if items.len() <= MAX_MODELS && items.iter().all(is_model) =>
            {
                Ok(())
            }
            (Self::Count, value) if value.as_i64().is_some_and(|number| number >= 0) => Ok(()),
            (Self::Count, _) => Err("must be a whole number that is not negative"),
            (Self::Boolean, _) => Err("must be true or false"),
            (Self::Text, _) => Err("must be a string"),
            (Self::Objects, _) => Err("must be a list of objects"),
            (Self::Models, _) => {
                Err("must be a list of at most 64 names of models of at most 256 bytes")
            }
        }
    }
}

/// Whether a value can be the name of a model.
fn is_model(value: &Value) -> bool {
    value.as_str().is_some_and(is_model_name)
}

/// Whether a text can be the name of a model.
#[must_use]
pub fn is_model_name(name: &str) -> bool {
    (1..=MAX_MODEL_BYTES).contains(&name.len()) && !name.contains(char::is_control)
}

pub const ALLOW_PM_IMAGES: &str = "agents.project_manager.sandbox.allow_add_to_allowed_images";
pub const DEFAULT_IMAGE_KEY: &str = "sandbox.default_image";
/// Concurrent sandboxes.
pub const QUOTA_SANDBOXES: &str = "quota.sandboxes";
/// CPU seconds that sandboxes reserve within 24 hours.
pub const QUOTA_CPU_SECONDS: &str = "quota.cpu_seconds";
/// Memory of one sandbox, in bytes.
pub const QUOTA_SANDBOX_MEMORY_BYTES: &str = "quota.sandbox_memory_bytes";
/// CPUs of one sandbox.
pub const QUOTA_SANDBOX_CPUS: &str = "quota.sandbox_cpus";
/// Processes of one sandbox.
pub const QUOTA_SANDBOX_PIDS: &str = "quota.sandbox_pids";
/// Bytes of disk of one sandbox.
pub const QUOTA_SANDBOX_DISK_BYTES: &str = "quota.sandbox_disk_bytes";
/// Open files of one process of a sandbox.
pub const QUOTA_SANDBOX_NOFILE: &str = "quota.sandbox_nofile";
/// Bytes of artifacts and retained job output.
pub const QUOTA_ARTIFACT_BYTES: &str = "quota.artifact_bytes";
/// Handling of credential shapes in a project. It can be stricter than
/// `orchestrator.secret_shapes`, never laxer.
pub const SECRET_SHAPES: &str = "secrets.shapes";

/// The models that sandboxes may use, by name.
pub const ALLOWED_MODELS: &str = "inference.allowed_models";

/// Keys with a known type. Other keys are allowed and take any value.
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
        name: ALLOWED_MODELS,
        kind: ValueKind::Models,
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
        name: QUOTA_SANDBOX_DISK_BYTES,
        kind: ValueKind::Count,
        is_setting: false,
    },
    Key {
        name: QUOTA_SANDBOX_NOFILE,
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
    /// Fails with 412 unless the value has this revision; 0 means that it does not exist yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_revision: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Setting {
    pub key: String,
    #[schema(value_type = Value)]
    pub value: Value,
    /// Increases with every change.
    pub revision: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub updated_at: OffsetDateTime,
    pub updated_by: String,
}

/// From narrowest to widest.
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
            format!("unknown scope '{text}'; expected one of task, project, user, group, system")
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
