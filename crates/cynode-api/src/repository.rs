//! Git repositories that administrators register for a project, and the rules for what is
//! promoted to them.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{CredentialId, ProjectId, RepositoryId};

pub mod repository_limits {
    pub const MAX_NAME_BYTES: usize = 64;
    pub const MAX_URL_BYTES: usize = 2_048;
    pub const MAX_CA_BYTES: usize = 64 * 1024;
    /// Globs in one list of a rule.
    pub const MAX_GLOBS: usize = 256;
    pub const MAX_GLOB_BYTES: usize = 1_024;
    pub const MAX_ADDRESSES: usize = 64;
    pub const MAX_CHECKS: usize = 16;
    pub const MAX_REF_BYTES: usize = 255;
    /// Repositories of all projects together.
    pub const MAX_REPOSITORIES: usize = 1_000;
}

/// Whether a text can name a repository or a credential: `[a-z0-9][a-z0-9._-]*`. Ids are such texts.
#[must_use]
pub fn is_repository_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= repository_limits::MAX_NAME_BYTES
        && text.bytes().next().is_some_and(is_plain)
        && text
            .bytes()
            .all(|byte| is_plain(byte) || matches!(byte, b'.' | b'_' | b'-'))
}

/// Whether a text can name a branch, a tag or a commit, as `git check-ref-format` says.
#[must_use]
pub fn is_git_reference(text: &str) -> bool {
    let is_component =
        |part: &str| !part.is_empty() && !part.starts_with('.') && !part.ends_with(".lock");
    !text.is_empty()
        && text.len() <= repository_limits::MAX_REF_BYTES
        && !text.starts_with('-')
        && !text.ends_with('.')
        && text != "@"
        && !text.contains("..")
        && !text.contains("@{")
        && !text
            .chars()
            .any(|c| c.is_control() || c == ' ' || "~^:?*[\\".contains(c))
        && text.split('/').all(is_component)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ForgeKind {
    Github,
    Gitlab,
    /// Gitea and Forgejo.
    Gitea,
    /// Git over HTTPS without pull requests.
    Git,
}

impl ForgeKind {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Github => "github",
            Self::Gitlab => "gitlab",
            Self::Gitea => "gitea",
            Self::Git => "git",
        }
    }
}

/// Addresses that are not public, and that the role may nevertheless dial for this repository's
/// host. Loopback, link-local, metadata addresses and CyNode's own listeners stay refused, except
/// loopback on a named port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AllowedAddress {
    /// `10.1.0.0/16`, `fd00::/8` or a single address.
    pub cidr: String,
    pub port: u16,
}

/// What may be promoted to a repository. Globs match whole paths below the repository's root:
/// `*` stays within a component, `**` crosses them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RepositoryRules {
    /// Paths that a change may touch; all when empty.
    pub allow_paths: Vec<String>,
    /// Paths that no change may touch. A denial wins.
    pub deny_paths: Vec<String>,
    /// Sensitive files that a change may touch all the same: CI definitions, `CODEOWNERS`,
    /// `.gitmodules`, `.gitattributes` and others ([docs/git.md]).
    pub allow_sensitive: Vec<String>,
    /// Paths at which content that looks like a credential may be promoted.
    pub allow_flagged: Vec<String>,
    /// Whether a change may create or change symbolic links.
    pub allow_symlinks: bool,
    /// Whether a change may make a file executable.
    pub allow_executables: bool,
    /// Branches that are never pushed to, besides the default branch.
    pub protected_branches: Vec<String>,
    /// Files in one change; 1,000 when absent.
    pub max_files: Option<u32>,
    /// Bytes of one file; 10 MiB when absent.
    pub max_file_bytes: Option<u64>,
    /// Bytes of all changed files together; 50 MiB when absent.
    pub max_change_bytes: Option<u64>,
    /// A person must approve each promotion before it is pushed.
    pub require_approval: bool,
    /// Open pull requests as drafts, where the forge has them.
    pub draft: bool,
}

/// A command that must succeed in a fresh sandbox with the commit before it is pushed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RepositoryCheck {
    pub name: String,
    pub argv: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_ref: Option<String>,
    /// 600 when absent; at most 3,600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RepositoryCreate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    pub project_id: ProjectId,
    /// Unique within the project: `[a-z0-9][a-z0-9._-]*`, at most 64 bytes.
    pub name: String,
    pub provider: ForgeKind,
    /// `https://host[:port]/path`, without credentials, query or fragment.
    pub url: String,
    /// The forge's API; derived from `url` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential_id: Option<CredentialId>,
    /// Asked from the repository when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_branch: Option<String>,
    /// PEM certificates that sign the host's certificate. Nobody else is then trusted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<AllowedAddress>,
    #[serde(default)]
    pub rules: RepositoryRules,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<RepositoryCheck>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Repository {
    pub id: RepositoryId,
    pub project_id: ProjectId,
    pub name: String,
    pub provider: ForgeKind,
    pub url: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential_id: Option<CredentialId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_branch: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    #[serde(default)]
    pub addresses: Vec<AllowedAddress>,
    #[serde(default)]
    pub rules: RepositoryRules,
    #[serde(default)]
    pub checks: Vec<RepositoryCheck>,
    /// Changes with the rules, checks, URL and credential. An approval names it.
    pub revision: i64,
    pub created_by: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_repositories_and_references_hold_nothing_that_git_or_a_path_misreads() {
        for name in [
            "site",
            "a.b_c-d",
            "0",
            "01890000-0000-7000-8000-000000000001",
        ] {
            assert!(is_repository_name(name), "{name}");
        }
        let long = "a".repeat(repository_limits::MAX_NAME_BYTES + 1);
        for text in ["", ".a", "-a", "A", "a/b", "a b", "a@b", "\u{e9}", &long] {
            assert!(!is_repository_name(text), "{text}");
        }
        for name in [
            "main",
            "release/1.0",
            "v1.2.3",
            "feature/a@b",
            "\u{e9}t\u{e9}",
        ] {
            assert!(is_git_reference(name), "{name}");
        }
        let long = "a".repeat(repository_limits::MAX_REF_BYTES + 1);
        for text in [
            "", "-x", "a..b", "a b", "a~1", "a^", "a:b", "a?", "a*", "a[", "a\\b", "@", "a@{1}",
            "/a", "a/", "a//b", ".a", "a/.b", "a.lock", "a.", "a\nb", &long,
        ] {
            assert!(!is_git_reference(text), "{text}");
        }
    }
}
