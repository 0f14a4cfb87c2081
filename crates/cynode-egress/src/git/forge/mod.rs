//! Pull requests at forges: looked up by branch first, then created.
//!
//! Invariants: a request goes only to the checked addresses of the forge's API, with a credential
//! that is for that forge; redirects are not followed; an answer is bounded, parsed leniently and
//! believed in nothing but numbers and states.

mod api;
mod client;
mod gitea;
mod github;
mod gitlab;
#[cfg(test)]
mod tests;

use std::{net::IpAddr, time::Duration};

use async_trait::async_trait;
use cynode_api::{CredentialPlaintext, ForgeKind};

pub(crate) use self::api::{ForgeApi, ForgeUrlError};
use self::client::ForgeClient;

/// A pull request that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PullRequest {
    pub(crate) number: u64,
    pub(crate) url: String,
}

/// A pull request to open. Its texts are defused.
#[derive(Clone, Debug)]
pub(crate) struct PullDraft<'a> {
    pub(crate) branch: &'a str,
    pub(crate) target: &'a str,
    pub(crate) title: &'a str,
    pub(crate) body: &'a str,
    /// Not ready for review, where the forge has that.
    pub(crate) draft: bool,
}

/// The pull request of a branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenedPull {
    pub(crate) pull: PullRequest,
    /// False when it was open already.
    pub(crate) created: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ForgeError {
    #[error("the forge has no pull requests")]
    Unsupported,
    #[error("the credential is not for this forge")]
    ForeignCredential,
    /// 401 or 403.
    #[error("the forge refused the credential: {0}")]
    Unauthorized(String),
    /// Also what a forge answers for a private repository that the credential can't read.
    #[error("the forge does not know the repository or the branch")]
    NotFound,
    /// 400, 409 or 422.
    #[error("the forge refused the request: {0}")]
    Validation(String),
    #[error("the forge limits the rate of requests")]
    RateLimited { retry_after: Option<Duration> },
    #[error("the forge redirected the request, which is not followed")]
    Redirected,
    /// No answer, an incomplete one, or 5xx.
    #[error("the forge can't be reached: {0}")]
    Unreachable(String),
    #[error("the answer of the forge is not understood: {0}")]
    Answer(String),
    #[error("the HTTP client can't be built: {0}")]
    Client(String),
}

/// The part of a forge's API that the role uses.
#[async_trait]
pub(crate) trait Forge: Send + Sync {
    /// Finds the open pull request of a branch of the repository itself, not of a fork.
    async fn find_open(
        &self,
        branch: &str,
        target: &str,
    ) -> Result<Option<PullRequest>, ForgeError>;

    async fn create(&self, draft: &PullDraft<'_>) -> Result<PullRequest, ForgeError>;
}

/// Connects to the API with the checked addresses of its host.
pub(crate) fn connect(
    api: ForgeApi,
    addresses: &[IpAddr],
    ca: Option<&str>,
    credential: &CredentialPlaintext,
) -> Result<Box<dyn Forge>, ForgeError> {
    if !api.accepts(credential) {
        return Err(ForgeError::ForeignCredential);
    }
    let kind = api.kind;
    let client = ForgeClient::new(api, addresses, ca, &credential.secret)?;
    match kind {
        ForgeKind::Github => Ok(Box::new(github::GithubForge(client))),
        ForgeKind::Gitlab => Ok(Box::new(gitlab::GitlabForge(client))),
        ForgeKind::Gitea => Ok(Box::new(gitea::GiteaForge(client))),
        ForgeKind::Git => Err(ForgeError::Unsupported),
    }
}

/// Opens the pull request of a branch unless it is open.
pub(crate) async fn open_pull(
    forge: &dyn Forge,
    draft: &PullDraft<'_>,
) -> Result<OpenedPull, ForgeError> {
    if let Some(pull) = forge.find_open(draft.branch, draft.target).await? {
        return Ok(OpenedPull {
            pull,
            created: false,
        });
    }
    match forge.create(draft).await {
        Ok(pull) => Ok(OpenedPull {
            pull,
            created: true,
        }),
        // Somebody else, or an earlier request whose answer was lost, may have opened it since.
        Err(refused @ ForgeError::Validation(_)) => {
            match forge.find_open(draft.branch, draft.target).await {
                Ok(Some(pull)) => Ok(OpenedPull {
                    pull,
                    created: false,
                }),
                _ => Err(refused),
            }
        }
        Err(error) => Err(error),
    }
}
