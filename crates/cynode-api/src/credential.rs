//! Credentials of upstream services. A value goes in and never comes out.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{CredentialId, ProjectId};

pub mod credential_limits {
    /// Shorter secrets can't be told from ordinary words when input is scanned for them.
    pub const MIN_SECRET_BYTES: usize = 12;
    pub const MAX_SECRET_BYTES: usize = 16 * 1024;
    pub const MAX_USERNAME_BYTES: usize = 256;
    pub const MAX_NAME_BYTES: usize = 64;
    pub const MAX_URL_BYTES: usize = 2_048;
}

/// The egress role that may open a credential.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EgressRole {
    #[default]
    Git,
}

impl EgressRole {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Git => "git",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CredentialCreate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub project_id: ProjectId,
    /// Unique within the project: `[a-z0-9][a-z0-9._-]*`, at most 64 bytes.
    pub name: String,
    #[serde(default)]
    pub role: EgressRole,
    /// Where the credential is valid: `https://host[:port][/path/prefix]`. The role presents it
    /// nowhere else.
    pub url: String,
    /// The user name of basic authentication; `x-access-token` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// A password or token, 12 bytes to 16 KiB. Never returned.
    #[schema(write_only)]
    pub secret: String,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CredentialRotate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    #[schema(write_only)]
    pub secret: String,
}

/// What is known of a credential. The value is sealed to the role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Credential {
    pub id: CredentialId,
    pub project_id: ProjectId,
    pub name: String,
    pub role: EgressRole,
    pub url: String,
    /// The id of the public key that the value is sealed to.
    pub key_id: String,
    pub created_by: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub rotated_at: OffsetDateTime,
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        with = "time::serde::rfc3339::option"
    )]
    pub disabled_at: Option<OffsetDateTime>,
}

impl std::fmt::Debug for CredentialCreate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CredentialCreate")
            .field("name", &self.name)
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for CredentialRotate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CredentialRotate").finish_non_exhaustive()
    }
}
