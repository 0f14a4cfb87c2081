//! Gitea and Forgejo.

use async_trait::async_trait;
use serde_json::json;

use super::{
    Forge, ForgeError, PullDraft, PullRequest,
    client::ForgeClient,
    github::{Created, ListedPull},
};

/// Pull requests of one page, and pages. Neither forge filters by branch in all of its versions;
/// the newest come first, and a promotion looks for its own soon after it was opened.
const PAGE: usize = 50;
const MAX_PAGES: usize = 20;

pub(super) struct GiteaForge(pub(super) ForgeClient);

impl GiteaForge {
    fn path(&self) -> String {
        format!("/repos/{}/pulls", self.0.api.project)
    }
}

#[async_trait]
impl Forge for GiteaForge {
    async fn find_open(
        &self,
        branch: &str,
        target: &str,
    ) -> Result<Option<PullRequest>, ForgeError> {
        let api = &self.0.api;
        let limit = PAGE.to_string();
        for page in 1..=MAX_PAGES {
            let page = page.to_string();
            let query = [
                ("state", "open"),
                ("page", page.as_str()),
                ("limit", limit.as_str()),
            ];
            let pulls: Vec<ListedPull> = self.0.get(&self.path(), &query).await?;
            let found = pulls
                .iter()
                .find(|pull| pull.is_of(&api.project, branch, target));
            if let Some(pull) = found {
                return Ok(Some(api.pull(pull.number, pull.url())));
            }
            // A server may have smaller pages than asked for, so only an empty one is the last.
            if pulls.is_empty() {
                break;
            }
        }
        Ok(None)
    }

    async fn create(&self, draft: &PullDraft<'_>) -> Result<PullRequest, ForgeError> {
        let title = if draft.draft {
            format!("WIP: {}", draft.title)
        } else {
            draft.title.to_owned()
        };
        let body = json!({
            "title": title,
            "body": draft.body,
            "head": draft.branch,
            "base": draft.target,
        });
        let created: Created = self.0.post(&self.path(), &body).await?;
        Ok(self.0.api.pull(created.number, created.html_url.as_deref()))
    }
}
