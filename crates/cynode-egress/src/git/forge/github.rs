//! GitHub and GitHub Enterprise Server.

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::json;

use super::{Forge, ForgeError, PullDraft, PullRequest, client::ForgeClient};

pub(super) struct GithubForge(pub(super) ForgeClient);

/// A pull request of GitHub, Gitea or Forgejo.
#[derive(Debug, Deserialize)]
pub(super) struct ListedPull {
    pub(super) number: u64,
    #[serde(default)]
    html_url: Option<String>,
    #[serde(default)]
    state: Option<String>,
    head: PullSide,
    base: PullSide,
}

#[derive(Debug, Deserialize)]
struct PullSide {
    #[serde(rename = "ref")]
    name: String,
    /// Absent when the fork was deleted.
    #[serde(default)]
    repo: Option<PullRepository>,
}

#[derive(Debug, Deserialize)]
struct PullRepository {
    full_name: String,
}

impl ListedPull {
    pub(super) fn url(&self) -> Option<&str> {
        self.html_url.as_deref()
    }

    /// Whether it is open and leads from a branch of the project itself to the target.
    pub(super) fn is_of(&self, project: &str, branch: &str, target: &str) -> bool {
        let is_project = |side: &PullSide| {
            side.repo
                .as_ref()
                .is_some_and(|repo| repo.full_name.eq_ignore_ascii_case(project))
        };
        self.state.as_deref().is_none_or(|state| state == "open")
            && self.head.name == branch
            && self.base.name == target
            && is_project(&self.head)
    }
}

#[async_trait]
impl Forge for GithubForge {
    async fn find_open(
        &self,
        branch: &str,
        target: &str,
    ) -> Result<Option<PullRequest>, ForgeError> {
        let api = &self.0.api;
        let head = format!("{}:{branch}", api.owner());
        let query = [
            ("state", "open"),
            ("head", head.as_str()),
            ("base", target),
            ("per_page", "10"),
        ];
        let path = format!("/repos/{}/pulls", api.project);
        let pulls: Vec<ListedPull> = self.0.get(&path, &query).await?;
        // GitHub ignores filters that it does not understand.
        let found = pulls
            .iter()
            .find(|pull| pull.is_of(&api.project, branch, target));
        Ok(found.map(|pull| api.pull(pull.number, pull.url())))
    }

    async fn create(&self, draft: &PullDraft<'_>) -> Result<PullRequest, ForgeError> {
        let api = &self.0.api;
        let path = format!("/repos/{}/pulls", api.project);
        let body = |is_draft: bool| {
            json!({
                "title": draft.title,
                "body": draft.body,
                "head": draft.branch,
                "base": draft.target,
                "draft": is_draft,
                "maintainer_can_modify": false,
            })
        };
        let pull: Created = match self.0.post(&path, &body(draft.draft)).await {
            // Some plans have no drafts for private repositories.
            Err(ForgeError::Validation(message))
                if draft.draft && message.to_lowercase().contains("draft") =>
            {
                self.0.post(&path, &body(false)).await?
            }
            result => result?,
        };
        Ok(api.pull(pull.number, pull.html_url.as_deref()))
    }
}

/// The answer to a creation, of GitHub, Gitea or Forgejo.
#[derive(Debug, Deserialize)]
pub(super) struct Created {
    pub(super) number: u64,
    #[serde(default)]
    pub(super) html_url: Option<String>,
}
