//! Applies a patch that came out of a sandbox to a local directory.
//!
//! The patch is hostile. Invariants: no symbolic link is followed, nothing outside of the directory
//! is read or written, nothing below `.git` in any spelling is touched, no file gets a set-id bit,
//! no new link leads outside, and the patch applies as a whole or not at all.

mod commit;
mod summary;
mod tree;

use std::path::Path;

use cynode_patch::{Patch, Plan, PlanError, Reject};

use self::tree::{LocalTree, Stamp};
pub use self::{commit::CommitError, summary::Summary};

/// Components that a patch made in a sandbox has before its paths: `a/` and `b/`.
const STRIP: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the patch is invalid: {0}")]
    Invalid(#[from] cynode_patch::Error),
    #[error("the patch is too large: {0}")]
    TooLarge(String),
    #[error("the patch does not fit the files in this directory")]
    Rejected(Vec<Reject>),
    #[error("reading the directory failed")]
    Read(#[source] std::io::Error),
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// A patch that fits a directory and has not changed it yet.
pub struct Prepared {
    tree: LocalTree,
    plan: Plan<Stamp>,
    pub summary: Summary,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared")
            .field("summary", &self.summary)
            .finish_non_exhaustive()
    }
}

/// Checks a patch against a directory, without changing it.
pub fn prepare(directory: &Path, patch: &[u8]) -> Result<Prepared, Error> {
    let patch = Patch::parse(patch, STRIP)?;
    let tree = LocalTree::open(directory).map_err(Error::Read)?;
    let plan = cynode_patch::plan(&tree, &patch).map_err(|error| match error {
        PlanError::TooLarge(message) => Error::TooLarge(message),
        PlanError::Tree(error) => Error::Read(error),
    })?;
    let mut rejects = plan.rejects.clone();
    rejects.extend(tree::links_outside(&plan));
    if !rejects.is_empty() {
        return Err(Error::Rejected(rejects));
    }
    let summary = Summary::new(&patch, &plan);
    Ok(Prepared {
        tree,
        plan,
        summary,
    })
}

impl Prepared {
    /// Changes the files. After an error they are as before, unless the error says otherwise.
    pub fn commit(self) -> Result<(), Error> {
        Ok(commit::commit(&self.tree, &self.plan)?)
    }
}

#[cfg(test)]
mod tests;
