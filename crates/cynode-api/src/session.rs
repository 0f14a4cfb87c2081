//! Sessions: long-lived sandboxes.

use std::{collections::BTreeMap, marker::PhantomData};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{
    ArtifactId, NodeId, RepositoryId, SeedNotes, SessionId, TaskId, WorkspaceId, is_git_reference,
    is_repository_name,
};

/// Bounds and defaults of session requests.
pub mod session_limits {
    pub const DEFAULT_LIFETIME_SECONDS: u64 = 86_400;
    pub const MAX_LIFETIME_SECONDS: u64 = 30 * 86_400;
    pub const DEFAULT_IDLE_SECONDS: u64 = 1_800;
    pub const MAX_ENV: usize = 256;
    pub const MAX_ENV_BYTES: usize = 128 * 1024;
    pub const MAX_LABELS: usize = 64;
    pub const MAX_LABEL_BYTES: usize = 1_024;
    pub const MAX_REASON_BYTES: usize = 1_024;
    pub const MIN_MEMORY_BYTES: u64 = 16 * 1024 * 1024;
    pub const MIN_PIDS: u32 = 8;
    pub const MIN_NOFILE: u64 = 64;
    pub const MIN_DISK_BYTES: u64 = 16 * 1024 * 1024;
    pub const MIN_NAME: usize = 3;
    pub const MAX_NAME: usize = 63;
}

/// Returns whether a text is a valid session name: a-z, 0-9 and '-', with a hyphen that is neither
/// first nor last. A name of only hex digits and hyphens is invalid: it would look like part of an id.
#[must_use]
pub fn is_session_name(text: &str) -> bool {
    use session_limits::{MAX_NAME, MIN_NAME};
    (MIN_NAME..=MAX_NAME).contains(&text.len())
        && text
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        && text.contains('-')
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text.bytes().any(|byte| matches!(byte, b'g'..=b'z'))
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionCreate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub task_id: TaskId,
    pub session_id: SessionId,
    /// An image loaded on the node, or `default`.
    pub image_ref: String,
    /// The required image: its digest, or its id if it was loaded by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "new")]
    pub workspace_ref: Option<WorkspaceRef>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(
        default,
        deserialize_with = "object_only",
        skip_serializing_if = "Option::is_none"
    )]
    pub limits: Option<LimitsRequest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_lifetime_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty_allowed: Option<bool>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The models that the sandbox may use. Orchestrators set it from the preference
    /// `inference.allowed_models`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed_models: Vec<String>,
}

impl SessionCreate {
    /// The minimal request: defaults for all optional fields.
    #[must_use]
    pub fn new(task_id: TaskId, session_id: SessionId, image_ref: impl Into<String>) -> Self {
        Self {
            version: Some(crate::API_VERSION),
            task_id,
            session_id,
            image_ref: image_ref.into(),
            image_digest: None,
            workspace_ref: None,
            env: BTreeMap::new(),
            limits: None,
            network_policy: None,
            max_lifetime_seconds: None,
            idle_timeout_seconds: None,
            pty_allowed: None,
            labels: BTreeMap::new(),
            allowed_models: Vec::new(),
        }
    }
}

/// A session as users request it; absent fields have defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UserSessionCreate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// 3 to 63 characters of a-z, 0-9 and '-', with a hyphen that is neither first nor last, and at
    /// least one letter from g to z. Unique among the owner's live sessions. Generated if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "brave-otter")]
    pub name: Option<String>,
    /// A new task is created if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_id: Option<TaskId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_ref: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "new")]
    pub workspace_ref: Option<WorkspaceRef>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(
        default,
        deserialize_with = "object_only",
        skip_serializing_if = "Option::is_none"
    )]
    pub limits: Option<LimitsRequest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_lifetime_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty_allowed: Option<bool>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Labels that the node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_labels: BTreeMap<String, String>,
    /// With `workspace_ref: "git:…"`, the commits of history to bring; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_depth: Option<u32>,
}

/// The source of a session's files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WorkspaceRef {
    #[default]
    New,
    /// The retained workspace of an earlier session of the same task.
    Workspace(WorkspaceId),
    /// A new workspace with the contents of an artifact, a tar archive.
    Artifact(ArtifactId),
    /// A new workspace with a registered repository. Orchestrators resolve it to an artifact;
    /// workers refuse it.
    Git {
        /// The name or id of the repository.
        repository: String,
        /// A branch, tag or commit; the default branch when absent.
        reference: Option<String>,
    },
}

impl WorkspaceRef {
    /// Returns whether the session gets a new workspace instead of a retained one.
    #[must_use]
    pub const fn is_new_workspace(&self) -> bool {
        !matches!(self, Self::Workspace(_))
    }
}

impl std::fmt::Display for WorkspaceRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::New => f.write_str("new"),
            Self::Workspace(id) => write!(f, "workspace:{id}"),
            Self::Artifact(id) => write!(f, "artifact:{id}"),
            Self::Git {
                repository,
                reference: Some(reference),
            } => write!(f, "git:{repository}@{reference}"),
            Self::Git {
                repository,
                reference: None,
            } => write!(f, "git:{repository}"),
        }
    }
}

impl std::str::FromStr for WorkspaceRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "new" {
            return Ok(Self::New);
        }
        let found = match text.split_once(':') {
            Some(("workspace", id)) => id.parse().ok().map(Self::Workspace),
            Some(("artifact", id)) => id.parse().ok().map(Self::Artifact),
            Some(("git", place)) => git_ref(place),
            _ => None,
        };
        found.ok_or_else(|| {
            "workspace_ref must be 'new', 'workspace:<uuid>', 'artifact:<uuid>' or \
             'git:<repository>[@<ref>]'"
                .to_owned()
        })
    }
}

/// A repository and a reference in it, both without what git or a path could misread.
fn git_ref(place: &str) -> Option<WorkspaceRef> {
    let (repository, reference) = match place.split_once('@') {
        Some((repository, reference)) => (repository, Some(reference)),
        None => (place, None),
    };
    if !is_repository_name(repository) || !reference.is_none_or(is_git_reference) {
        return None;
    }
    Some(WorkspaceRef::Git {
        repository: repository.to_owned(),
        reference: reference.map(str::to_owned),
    })
}

impl Serialize for WorkspaceRef {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WorkspaceRef {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        std::borrow::Cow::<'de, str>::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitsRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nofile: Option<u64>,
}

impl LimitsRequest {
    /// Fills in the defaults. A smaller node may grant less.
    #[must_use]
    pub fn or_default(self) -> Limits {
        let default = Limits::default();
        Limits {
            memory_bytes: self.memory_bytes.unwrap_or(default.memory_bytes),
            cpus: self.cpus.unwrap_or(default.cpus),
            pids: self.pids.unwrap_or(default.pids),
            disk_bytes: self.disk_bytes.unwrap_or(default.disk_bytes),
            nofile: self.nofile.unwrap_or(default.nofile),
        }
    }
}

/// Accepts only an object: serde would also accept a list and read it as the fields in order.
pub(crate) fn object_only<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    struct Object<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
        type Value = Option<T>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_none<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_some<D: Deserializer<'de>>(
            self,
            deserializer: D,
        ) -> Result<Self::Value, D::Error> {
            deserializer.deserialize_map(self)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map)).map(Some)
        }
    }

    deserializer.deserialize_option(Object(PhantomData))
}

/// The limits in force.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// Memory, without swap.
    pub memory_bytes: u64,
    pub cpus: f64,
    pub pids: u32,
    pub disk_bytes: u64,
    pub nofile: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory_bytes: 2 << 30,
            cpus: 1.0,
            pids: 512,
            disk_bytes: 10 << 30,
            nofile: 1024,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkPolicy {
    None,
    /// Only what policy allows, through proxies. There are no proxies yet, so nothing is reachable.
    #[default]
    Restricted,
}

/// A limit or isolation that this host does not enforce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Unenforced {
    Memory,
    Cpus,
    Pids,
    Disk,
    Nofile,
    Userns,
    IdRange,
}

impl std::fmt::Display for Unenforced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Cpus => "cpus",
            Self::Pids => "pids",
            Self::Disk => "disk",
            Self::Nofile => "nofile",
            Self::Userns => "userns",
            Self::IdRange => "id_range",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SessionState {
    Creating,
    Running,
    Ending,
    Ended,
    Failed,
    /// The container is gone, usually after a reboot; `resume` creates a new one.
    Lost,
}

impl std::fmt::Display for SessionState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Ending => "ending",
            Self::Ended => "ended",
            Self::Failed => "failed",
            Self::Lost => "lost",
        })
    }
}

impl std::str::FromStr for SessionState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_value(text.into()).map_err(|_| {
            format!(
                "unknown state '{text}'; expected one of creating, running, ending, ended, \
                 failed, lost"
            )
        })
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    pub session_id: SessionId,
    /// Present only in responses of an orchestrator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub task_id: TaskId,
    pub state: SessionState,
    pub end_reason: Option<String>,
    pub image_ref: String,
    pub image_digest: Option<String>,
    pub workspace_id: WorkspaceId,
    pub node_id: NodeId,
    /// Whether the sandbox came from the warm pool.
    pub warm: bool,
    pub limits: Limits,
    pub unenforced: Vec<Unenforced>,
    pub network_policy: NetworkPolicy,
    pub pty_allowed: bool,
    pub labels: BTreeMap<String, String>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub expires_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub idle_expires_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option")]
    pub ended_at: Option<OffsetDateTime>,
    pub create_duration_ms: Option<u64>,
    pub running_execs: u32,
    /// The repository that the workspace was seeded from. Like the two fields below, present only
    /// in responses of an orchestrator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository_id: Option<RepositoryId>,
    /// The commit that the workspace was seeded from. Exports are made against it by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_commit: Option<String>,
    /// What the seed does not contain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed_notes: Option<SeedNotes>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionPatch {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_lifetime_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceDisposal {
    #[default]
    Delete,
    Keep,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionEnd {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<WorkspaceDisposal>,
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Pass this as `cursor` to get the next page; absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_ref_is_new_or_names_a_workspace() {
        let id = WorkspaceId::generate();
        assert_eq!("new".parse(), Ok(WorkspaceRef::New));
        assert_eq!(
            format!("workspace:{id}").parse(),
            Ok(WorkspaceRef::Workspace(id))
        );
        let id = ArtifactId::generate();
        assert_eq!(
            format!("artifact:{id}").parse(),
            Ok(WorkspaceRef::Artifact(id))
        );
        assert_eq!(
            WorkspaceRef::Artifact(id).to_string(),
            format!("artifact:{id}")
        );
        for (text, repository, reference) in [
            ("git:site", "site", None),
            ("git:site@main", "site", Some("main")),
            ("git:site@feature/a@b", "site", Some("feature/a@b")),
        ] {
            let expected = WorkspaceRef::Git {
                repository: repository.to_owned(),
                reference: reference.map(str::to_owned),
            };
            assert_eq!(text.parse(), Ok(expected.clone()));
            assert_eq!(expected.to_string(), text);
        }
        for text in [
            "git:",
            "git:@main",
            "git:site@",
            "git:site@-x",
            "git:Site",
            "git:a/b",
        ] {
            assert!(text.parse::<WorkspaceRef>().is_err(), "{text}");
        }
        assert!("workspace:nonsense".parse::<WorkspaceRef>().is_err());
        assert!("/etc".parse::<WorkspaceRef>().is_err());
    }

    #[test]
    fn a_name_has_a_hyphen_and_can_not_be_a_part_of_an_id() {
        let longest = format!("a-{}", "z".repeat(session_limits::MAX_NAME - 2));
        for name in ["brave-otter", "g-1", "a-z", "x--y", &longest] {
            assert!(is_session_name(name), "{name}");
        }
        let too_long = format!("{longest}z");
        for text in [
            "",
            "ab",
            "a-",
            "-z",
            "otter",
            "a-b",
            "dead-beef",
            "01890000-0000",
            "Brave-otter",
            "brave_otter",
            "brave otter",
            "brave-\u{f6}tter",
            "-brave-otter",
            "brave-otter-",
            &too_long,
        ] {
            assert!(!is_session_name(text), "{text}");
        }
    }

    #[test]
    fn an_unknown_field_in_a_request_is_refused() {
        let body = format!(
            r#"{{"task_id":"{}","session_id":"{}","image_ref":"default","memory":1}}"#,
            TaskId::generate(),
            SessionId::generate()
        );
        let error = serde_json::from_str::<SessionCreate>(&body).expect_err("unknown field");
        assert!(error.to_string().contains("memory"), "{error}");
    }

    #[test]
    fn limits_are_an_object_and_not_a_list() {
        let body = |limits: &str| {
            format!(
                r#"{{"task_id":"{}","session_id":"{}","image_ref":"default","limits":{limits}}}"#,
                TaskId::generate(),
                SessionId::generate()
            )
        };
        assert!(serde_json::from_str::<SessionCreate>(&body("[1,2,3,4,5]")).is_err());
        assert!(
            serde_json::from_str::<SessionCreate>(&body(r#"{"pids":20,"pid":3}"#))
                .expect_err("unknown")
                .to_string()
                .contains("pid")
        );
        assert_eq!(
            serde_json::from_str::<SessionCreate>(&body(r#"{"pids":20}"#))
                .expect("valid")
                .limits
                .and_then(|limits| limits.pids),
            Some(20)
        );
        assert_eq!(
            serde_json::from_str::<SessionCreate>(&body("null"))
                .expect("valid")
                .limits,
            None
        );
    }
}
