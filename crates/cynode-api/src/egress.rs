//! The HTTP API of the git egress role, which orchestrators call with the role's token.
//!
//! The role keeps its own copy of policies, repositories and sealed credentials. Calls name ids;
//! what they say about paths or branches is never believed, only checked.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    Base64Bytes, CallId, ChangesetFormat, CredentialId, ProjectId, PromotedFile, PromotionId,
    PromotionVerdict, Repository, RepositoryId, SessionId, TaskId,
};

pub mod egress_limits {
    /// Of one push of rules.
    pub const MAX_STATE_BYTES: usize = 16 * 1024 * 1024;
    /// Rules older than this permit nothing.
    pub const MAX_STATE_AGE_SECONDS: u64 = 10;
    /// A seed's archive, uncompressed.
    pub const MAX_SEED_BYTES: u64 = 4 * 1024 * 1024 * 1024;
}

/// `GET /v1/egress`: what the role is, and the key to seal credentials to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressInfo {
    pub version: u32,
    /// `git`.
    pub role: String,
    pub key_id: String,
    /// An X25519 public key.
    pub public_key: Base64Bytes,
    /// Identifies the role in its audit stream; kept across restarts.
    pub instance: Uuid,
}

/// `PUT /v1/egress/state`: replaces the role's copy. Idempotent, and repeated every few seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressState {
    pub version: u32,
    /// Rises with every change. A lower one than the role has is refused.
    pub revision: i64,
    pub policies: Vec<EgressPolicy>,
    pub repositories: Vec<Repository>,
    pub credentials: Vec<SealedCredential>,
    /// Addresses of CyNode's own listeners, `ip:port`: never dialled.
    #[serde(default)]
    pub own_listeners: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressPolicy {
    pub id: String,
    pub text: String,
}

/// A credential as the orchestrator stores it. Only the role can open it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SealedCredential {
    pub id: CredentialId,
    pub key_id: String,
    /// HPKE (RFC 9180) with X25519, HKDF-SHA256 and ChaCha20-Poly1305: the encapsulated key.
    pub encapsulated: Base64Bytes,
    /// The plaintext is [`CredentialPlaintext`]; the associated data is the id.
    pub ciphertext: Base64Bytes,
}

/// What is sealed. The role uses the secret nowhere but here, whatever the database says.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CredentialPlaintext {
    pub version: u32,
    pub project_id: ProjectId,
    /// `https`.
    pub scheme: String,
    pub host: String,
    pub port: u16,
    /// Begins with a slash; matches whole components.
    pub path_prefix: String,
    pub username: String,
    pub secret: String,
}

/// On whose behalf the role acts. Policies are evaluated with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressCall {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    pub principal: EgressPrincipal,
    pub task_id: TaskId,
    pub project_id: ProjectId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promotion_id: Option<PromotionId>,
    pub repository_id: RepositoryId,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum EgressPrincipal {
    User {
        id: Uuid,
        name: String,
        admin: bool,
        groups: Vec<String>,
    },
    Agent {
        token: Uuid,
        /// `project_manager` or `project_analyst`.
        role: String,
        user: Uuid,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        project: Option<Uuid>,
        tasks: Vec<Uuid>,
    },
}

/// `POST /v1/egress/git/resolve`: the commit of a ref, asked at the remote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GitResolve {
    pub version: u32,
    pub call: EgressCall,
    /// A branch, tag or advertised commit; the default branch when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GitResolved {
    pub commit: String,
    /// `refs/heads/main`.
    pub reference: String,
    pub default_branch: String,
}

/// `POST /v1/egress/git/seeds`: answers a tar of a checkout with its `.git`. The body ends early
/// only when something failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GitSeed {
    pub version: u32,
    pub call: EgressCall,
    /// As `resolve` returned them.
    pub reference: String,
    pub commit: String,
    /// Commits of history; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
}

/// The header of a seed's response: a [`SeedNotes`] as JSON.
pub const SEED_NOTES_HEADER: &str = "x-cynode-seed";

/// What a seed does not contain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SeedNotes {
    pub submodules: Vec<String>,
    pub submodules_total: u64,
    pub lfs_files: Vec<String>,
    pub lfs_files_total: u64,
}

/// `POST /v1/egress/git/commits`: a form with the part `request`, this as JSON, and the part
/// `changeset`. Builds the commit; the same request gives the same commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GitCommit {
    pub version: u32,
    pub call: EgressCall,
    pub format: ChangesetFormat,
    pub sha256: String,
    pub base: String,
    pub target: String,
    /// The whole name: `cynode/<task>/…`.
    pub branch: String,
    pub message: String,
    /// The author's name; the address is derived.
    pub author: String,
    /// Seconds since 1970, so that a repeated build gives the same commit.
    pub at: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GitCommitted {
    pub commit: String,
    pub tree: String,
    pub base: String,
    pub files: Vec<PromotedFile>,
    pub files_total: u64,
    /// Every rule that was asked. The commit may be pushed only if all allow it.
    pub verdicts: Vec<PromotionVerdict>,
    pub allowed: bool,
    /// The revision of the repository's rules that were applied.
    pub revision: i64,
}

/// `POST /v1/egress/git/pushes`. Inspects the commit again. Repeating it pushes nothing twice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GitPush {
    pub version: u32,
    pub call: EgressCall,
    pub base: String,
    pub target: String,
    pub branch: String,
    pub commit: String,
    /// The rules that checks and approval were given for.
    pub revision: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GitPushed {
    pub branch: String,
    pub commit: String,
    /// False when the branch was there already, with this commit.
    pub pushed: bool,
}

/// `POST /v1/egress/git/pulls`. Looks for a pull request of the branch first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GitPull {
    pub version: u32,
    pub call: EgressCall,
    pub target: String,
    pub branch: String,
    pub commit: String,
    pub title: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GitPulled {
    pub url: String,
    pub number: u64,
    pub created: bool,
}

impl std::fmt::Debug for CredentialPlaintext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CredentialPlaintext")
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}
