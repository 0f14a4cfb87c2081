//! Turns a changeset into one commit on its base, and inspects commits before they are pushed.
//!
//! Each format is reduced to [`edits::Edits`], contents by path, from which the role writes the
//! blobs, the tree and the commit itself. Rules are applied to what the objects then show
//! ([`difference::TreeChange`]), never to what a changeset says of itself; the same inspection
//! runs again on the commit that is pushed.
//!
//! Invariant: nothing of a changeset but the contents of changed files reaches the mirror, and
//! nothing of other branches reaches a commit.

mod branch;
mod bundle;
mod commit;
pub(crate) mod defuse;
mod difference;
mod edits;
mod files;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod inspect;
mod lines;
mod names;
mod objects;
mod output;
mod patch;
mod rules;
#[cfg(test)]
mod tests;
mod tree;

use bytes::Bytes;
use cynode_api::{ChangesetFormat, PatchReject, PromotionId, PromotionVerdict, TaskId};
use serde::Serialize;
use uuid::Uuid;

// Branches of targets; those that are pushed are stricter.
pub(crate) use cynode_api::is_git_reference as is_branch_name;

pub(crate) use self::{
    branch::BranchNames,
    commit::CommitText,
    difference::TreeChange,
    inspect::{Inspection, Inspector},
    output::{ObjectId, RemoteRef, UnexpectedOutput, remote_refs, tree_entries},
    rules::{RuleError, RuleSet},
};
use self::{
    edits::{BaseFiles, Edits},
    objects::ObjectStore,
};
use super::command::{GitError, GitRunner, Mirror};

/// A changeset to build, whose size the caller has bounded.
#[derive(Clone, Debug)]
pub(crate) struct ChangeRequest<'a> {
    pub(crate) format: ChangesetFormat,
    pub(crate) bytes: Bytes,
    /// A commit that the mirror has.
    pub(crate) base: ObjectId,
    pub(crate) commit: CommitText<'a>,
}

/// A commit in the mirror, to which no ref points.
#[derive(Debug)]
pub(crate) struct BuiltChange {
    pub(crate) commit: ObjectId,
    pub(crate) tree: ObjectId,
    pub(crate) change: TreeChange,
}

/// Why a changeset does not apply to its base, for a model to repair.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Conflict {
    /// The commit that the changeset was applied to.
    pub(crate) base: String,
    pub(crate) rejects: Vec<RejectedChange>,
    /// More was rejected than is listed.
    pub(crate) truncated: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RejectedChange {
    #[serde(flatten)]
    pub(crate) reject: PatchReject,
    /// The blob that the base has at the path.
    pub(crate) current: Option<String>,
}

impl Conflict {
    fn new(base: &BaseFiles, rejects: Vec<PatchReject>, truncated: bool) -> Self {
        let with_current = |reject: PatchReject| RejectedChange {
            current: base
                .get(reject.path.as_bytes())
                .map(|(_, id)| id.to_string()),
            reject,
        };
        Self {
            base: base.commit.to_string(),
            rejects: rejects.into_iter().map(with_current).collect(),
            truncated,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ChangeError {
    /// Not of its format.
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    TooLarge(String),
    #[error("the changeset does not apply to the base in {} places", .0.rejects.len())]
    Conflict(Box<Conflict>),
    /// Names that no rule can admit.
    #[error("the changeset has {} paths that are never promoted", .0.len())]
    Refused(Vec<PromotionVerdict>),
    #[error("the changeset changes nothing")]
    Empty,
    #[error("{0} is not a commit that was built for this promotion and base")]
    ForeignCommit(ObjectId),
    #[error("running git failed")]
    Git(#[from] GitError),
    #[error("reading the output of git failed")]
    Output(#[from] UnexpectedOutput),
}

impl From<Conflict> for ChangeError {
    fn from(conflict: Conflict) -> Self {
        Self::Conflict(Box::new(conflict))
    }
}

/// Builds the commit of a changeset. The same request gives the same commit.
pub(crate) async fn build(
    runner: &dyn GitRunner,
    mirror: &Mirror,
    request: &ChangeRequest<'_>,
) -> Result<BuiltChange, ChangeError> {
    let operation = format!("build-{}", Uuid::new_v4().simple());
    let store = ObjectStore {
        runner,
        mirror,
        quarantine: Some(operation.clone()),
    };
    let result = build_in(&store, &operation, request).await;
    let result = match result {
        Ok(built) => runner
            .accept(mirror, &operation)
            .await
            .map(|()| built)
            .map_err(ChangeError::from),
        Err(error) => Err(error),
    };
    runner.forget(mirror, &operation).await;
    result
}

async fn build_in(
    store: &ObjectStore<'_>,
    operation: &str,
    request: &ChangeRequest<'_>,
) -> Result<BuiltChange, ChangeError> {
    let base = BaseFiles::read(store, request.base).await?;
    let edits = edits(store, operation, &base, request).await?;
    edits.check_names()?;
    edits.check_placement(&base)?;
    if edits.is_empty() {
        return Err(ChangeError::Empty);
    }
    let tree = tree::write(store, &base, &edits, operation).await?;
    if tree == store.tree_of(request.base).await? {
        return Err(ChangeError::Empty);
    }
    let text = request.commit.render(tree, request.base);
    let commit = tree::write_commit(store, text).await?;
    let change = TreeChange::read(store, request.base, commit).await?;
    Ok(BuiltChange {
        commit,
        tree,
        change,
    })
}

async fn edits(
    store: &ObjectStore<'_>,
    operation: &str,
    base: &BaseFiles,
    request: &ChangeRequest<'_>,
) -> Result<Edits, ChangeError> {
    match request.format {
        ChangesetFormat::Patch => patch::edits(store, base, &request.bytes).await,
        ChangesetFormat::Files => files::edits(base, &request.bytes).await,
        ChangesetFormat::Bundle => {
            // Its objects never leave their own quarantine.
            let quarantine = format!("{operation}-bundle");
            let apart = ObjectStore {
                quarantine: Some(quarantine.clone()),
                ..store.clone()
            };
            let edits = bundle::edits(&apart, base, &request.bytes).await;
            store.runner.forget(store.mirror, &quarantine).await;
            edits
        }
    }
}

/// Reads a commit back from the mirror, to inspect it again before it is pushed.
pub(crate) async fn read_built(
    runner: &dyn GitRunner,
    mirror: &Mirror,
    commit: ObjectId,
    base: ObjectId,
    task: TaskId,
    promotion: PromotionId,
) -> Result<BuiltChange, ChangeError> {
    let store = ObjectStore {
        runner,
        mirror,
        quarantine: None,
    };
    let tree = commit::check_commit(&store, commit, base, task, promotion).await?;
    let change = TreeChange::read(&store, base, commit).await?;
    Ok(BuiltChange {
        commit,
        tree,
        change,
    })
}
