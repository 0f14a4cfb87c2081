//! GitLab.

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::json;

use super::{Forge, ForgeError, PullDraft, PullRequest, client::ForgeClient};

pub(super) struct GitlabForge(pub(super) ForgeClient);

#[derive(Debug, Deserialize)]
struct MergeRequest {
    iid: u64,
    #[serde(default)]
    web_url: Option<String>,
    #[serde(default)]
    state: Option<String>,
    #[serde(default)]
    source_branch: String,
    #[serde(default)]
    target_branch: String,
    /// Another one for a fork's merge request.
    #[serde(default)]
    source_project_id: Option<u64>,
    #[serde(default)]
    target_project_id: Option<u64>,
}

impl GitlabForge {
    fn path(&self) -> String {
        format!("/projects/{}/merge_requests", self.0.api.encoded_project())
    }
}

#[async_trait]
impl Forge for GitlabForge {
    async fn find_open(
        &self,
        branch: &str,
        target: &str,
    ) -> Result<Option<PullRequest>, ForgeError> {
        let query = [
            ("state", "opened"),
            ("source_branch", branch),
            ("target_branch", target),
            ("per_page", "20"),
        ];
        let found: Vec<MergeRequest> = self.0.get(&self.path(), &query).await?;
        let is_ours = |request: &&MergeRequest| {
            request
                .state
                .as_deref()
                .is_none_or(|state| state == "opened")
                && request.source_branch == branch
                && request.target_branch == target
                && request.source_project_id == request.target_project_id
        };
        let pull =
            |request: &MergeRequest| self.0.api.pull(request.iid, request.web_url.as_deref());
        Ok(found.iter().find(is_ours).map(pull))
    }

    async fn create(&self, draft: &PullDraft<'_>) -> Result<PullRequest, ForgeError> {
        let title = if draft.draft {
            format!("Draft: {}", draft.title)
        } else {
            draft.title.to_owned()
        };
        let body = json!({
            "title": title,
            "description": draft.body,
            "source_branch": draft.branch,
            "target_branch": draft.target,
        });
        let created: MergeRequest = self.0.post(&self.path(), &body).await?;
        Ok(self.0.api.pull(created.iid, created.web_url.as_deref()))
    }
}
