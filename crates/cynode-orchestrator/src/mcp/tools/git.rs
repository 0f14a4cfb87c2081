//! `git.*`: a change of a task on its way to a branch and a pull request. All of them are the same
//! promotion, which each drives to its stage.

use cynode_api::{ArtifactId, ChangesetFormat, Promotion, PromotionCreate, PromotionStage, TaskId};
use cynode_service::ApiError;
use http::Method;

use super::{Arguments, MANAGERS, Tool, ToolEffect, arguments};
use crate::mcp::plan::{ApiRequest, Plan};

/// How long a call waits for its stage. Repeated, it waits on.
const WAIT: &str = "wait=50";

pub(super) fn tools() -> Vec<Tool> {
    vec![
        Tool::new::<Validate, Promotion>(
            "git.repo.validate",
            MANAGERS,
            ToolEffect::ReadOnly,
            "Dry run: build the commit of a changeset and check it against the repository's rules. \
             Nothing is kept.",
        ),
        Tool::new::<Apply, Promotion>(
            "git.changeset.apply",
            MANAGERS,
            ToolEffect::Additive,
            "Apply a changeset, an artifact of the task, to its base. Begins the promotion that \
             the other git tools continue.",
        ),
        Tool::new::<Branch, Promotion>(
            "git.branch.create",
            MANAGERS,
            ToolEffect::Additive,
            "Name the branch cynode/<task>/<branch> of a changeset and build its commit. git.push \
             pushes it.",
        ),
        Tool::new::<Commit, Promotion>(
            "git.commit.create",
            MANAGERS,
            ToolEffect::Additive,
            "Build the commit of a changeset. Nothing is pushed yet.",
        ),
        Tool::new::<Push, Promotion>(
            "git.push",
            MANAGERS,
            ToolEffect::Additive,
            "Push the commit of a changeset to its branch, after the repository's checks and \
             approval. A state of awaiting_approval means that a person must decide first.",
        ),
        Tool::new::<Open, Promotion>(
            "git.pr.create",
            MANAGERS,
            ToolEffect::Additive,
            "Push the commit of a changeset and open its pull request.",
        ),
        Tool::new::<Promote, Promotion>(
            "git.promote",
            MANAGERS,
            ToolEffect::Additive,
            "Turn a changeset into a pull request: apply, commit, check, push, open. Answers when \
             it is done, has failed, waits for a person, or after 50 s; repeat it to wait on.",
        ),
    ]
}

macro_rules! git_tools {
    ($($name:ident => $until:expr, $dry_run:literal;)*) => { $(
        arguments! {
            $name {
                task_id: TaskId,
                /// The name or id of a repository of the task's project.
                repository: String,
                /// The id of an artifact of the task, such as that of
                /// sandbox.workspace.export_patch.
                #[schema(value_type = String)]
                changeset: ArtifactId,
                /// `patch` by default.
                format: Option<ChangesetFormat>,
                /// The commit that the changeset was made against; by default the commit that its
                /// session was seeded from.
                base: Option<String>,
                /// The branch to merge into; the default branch when absent.
                target: Option<String>,
                /// The last part of the branch `cynode/<task>/<branch>`. Name it in every call
                /// about the changeset, or in none.
                branch: Option<String>,
                /// The commit message; the title when absent.
                message: Option<String>,
                /// Of the pull request.
                title: Option<String>,
                body: Option<String>,
            }
        }

        impl Arguments for $name {
            fn into_plan(self) -> Result<Plan, ApiError> {
                let Self {
                    task_id, repository, changeset, format, base, target, branch, message, title,
                    body,
                } = self;
                plan(PromotionCreate {
                    version: None,
                    task_id,
                    repository,
                    changeset,
                    format: format.unwrap_or_default(),
                    base,
                    target,
                    branch: Some(branch.unwrap_or_else(|| format!("changeset-{changeset}"))),
                    title: title.unwrap_or_else(|| title_of(message.as_deref(), task_id)),
                    message,
                    body,
                    until: $until,
                    dry_run: $dry_run,
                })
            }
        }
    )* };
}

git_tools! {
    Validate => PromotionStage::Applied, true;
    Apply => PromotionStage::Applied, false;
    Branch => PromotionStage::Committed, false;
    Commit => PromotionStage::Committed, false;
    Push => PromotionStage::Pushed, false;
    Open => PromotionStage::Opened, false;
    Promote => PromotionStage::Opened, false;
}

fn plan(body: PromotionCreate) -> Result<Plan, ApiError> {
    let task = body.task_id;
    Ok(Plan::Request(
        ApiRequest::new(Method::POST, "/v1/promotions", task)
            .header("prefer", Some(WAIT))?
            .json(&body)?,
    ))
}

/// The first line of the message, or the task.
fn title_of(message: Option<&str>, task: TaskId) -> String {
    let line = message.and_then(|message| message.lines().find(|line| !line.trim().is_empty()));
    line.map_or_else(
        || format!("Changes of task {task}"),
        |line| line.trim().chars().take(72).collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_is_the_first_line_of_the_message() {
        let task = TaskId::generate();
        assert_eq!(title_of(Some("\n Fix it \n\nwhy"), task), "Fix it");
        assert_eq!(
            title_of(Some(" \n"), task),
            format!("Changes of task {task}")
        );
        assert_eq!(title_of(None, task), format!("Changes of task {task}"));
    }
}
