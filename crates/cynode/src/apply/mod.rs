//! Applies a patch or files from a sandbox to a local directory.
//!
//! Both are hostile input. Invariants: no symbolic link is followed; nothing outside of the
//! directory, and nothing below `.git` in any spelling, is read or written; no file gets a set-id
//! bit; no new link leads outside; all changes are made or none.

mod commit;
mod earlier;
mod files;
mod summary;
mod tree;

use std::path::{Path, PathBuf};

use cynode_patch::{
    File, Location, Patch, Plan, PlanError, PriorState, Problem, Reject, Tree as _, TreeNode,
};

pub use self::{
    commit::CommitError,
    earlier::Earlier,
    files::{FilesError, Received, ReceivedFile, receive},
    summary::{FileSummary, Summary, rank},
};
use self::{
    commit::{New, PlannedChange, STAGING, Staging},
    earlier::is_same,
    tree::{LocalTree, Stamp},
};

/// The reason to refuse a path that begins like a staging directory.
const RESERVED_NAME: &str = "the name is reserved for changes that are being made";
/// Leading components to strip from the paths of a patch: `a/` and `b/`.
const STRIP: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the patch is invalid: {0}")]
    Invalid(#[from] cynode_patch::Error),
    #[error("the patch is too large: {0}")]
    TooLarge(String),
    #[error("the patch does not fit the files in this directory")]
    Rejected {
        rejects: Vec<Reject>,
        /// The list is truncated.
        is_cut: bool,
    },
    #[error("reading the directory failed")]
    Read(#[source] std::io::Error),
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// A patch that applies to a directory, not yet applied.
pub struct Prepared {
    tree: LocalTree,
    plan: Plan<Stamp>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").finish_non_exhaustive()
    }
}

/// Parses a patch from a sandbox. An empty patch means that nothing changed.
pub fn parse(patch: &[u8]) -> Result<Patch<'_>, Error> {
    if patch.is_empty() {
        return Ok(Patch::default());
    }
    Ok(Patch::parse(patch, STRIP)?)
}

/// Plans a patch for a directory without changing it. Changes that were applied earlier count as
/// reverted.
pub fn prepare(directory: &Path, patch: &Patch<'_>, earlier: &Earlier) -> Result<Prepared, Error> {
    let mut tree = LocalTree::open(directory).map_err(Error::Read)?;
    tree.taken_back = earlier.take_back(&tree).map_err(Error::Read)?;
    let plan = cynode_patch::plan(&tree, patch).map_err(|error| match error {
        PlanError::TooLarge(message) => Error::TooLarge(message),
        PlanError::Tree(error) => Error::Read(error),
    })?;
    let mut rejects = plan.rejects.clone();
    rejects.extend(tree::links_outside(&plan));
    rejects.extend(reserved_names(&plan));
    if !rejects.is_empty() {
        return Err(Error::Rejected {
            rejects,
            is_cut: plan.rejects_truncated,
        });
    }
    Ok(Prepared { tree, plan })
}

/// Makes a reject for each change below a name of staging directories: [`leftovers`] would report
/// it as what an interrupted command left behind.
fn reserved_names(plan: &Plan<Stamp>) -> impl Iterator<Item = Reject> {
    plan.entries
        .iter()
        .filter(|(location, entry)| entry.changed && is_reserved(location))
        .map(|(location, _)| {
            Reject::of_file(location.as_bytes().to_vec(), RESERVED_NAME.to_owned())
        })
}

fn is_reserved(location: &Location) -> bool {
    let prefix = location.as_bytes().get(..STAGING.len());
    prefix.is_some_and(|prefix| prefix.eq_ignore_ascii_case(STAGING.as_bytes()))
}

impl Prepared {
    /// Changes the files. After an error they are unchanged, unless the error says otherwise.
    /// Returns the record for the next application.
    pub fn commit(self) -> Result<Option<Earlier>, Error> {
        let record = self.record();
        let changes = self.changes();
        if !changes.is_empty() {
            Staging::new(&self.tree)?.commit(&changes)?;
        }
        Ok(record)
    }

    /// Describes the changes that [`Self::commit`] makes: all of them, and no others.
    pub fn summary(&self, patch: &Patch<'_>) -> Result<Summary, Error> {
        summary::of_changes(self, patch)
    }

    /// The file as it is in the directory.
    fn actual(&self, location: &Location) -> Result<Option<File>, Error> {
        if let Some(file) = self.tree.taken_back.get(location) {
            return Ok(file.actual.clone());
        }
        match self.tree.load_actual(location) {
            Ok(TreeNode::File(_, file)) => Ok(Some(file)),
            Ok(_) | Err(Problem::Reject(_)) => Ok(None),
            Err(Problem::Failure(error)) => Err(Error::Read(error)),
        }
    }

    fn unplanned(&self) -> impl Iterator<Item = (&Location, Option<&File>)> {
        let is_planned =
            |location: &Location| self.plan.entries.get(location).is_some_and(|it| it.changed);
        self.tree
            .taken_back
            .iter()
            .filter(move |(location, _)| !is_planned(location))
            .map(|(location, file)| (location, file.before.as_ref()))
    }

    /// The changes to make, ordered by location.
    fn changes(&self) -> Vec<PlannedChange<'_>> {
        let planned = self
            .plan
            .entries
            .iter()
            .filter(|(_, entry)| entry.changed)
            .map(|(location, entry)| (location, &entry.before, entry.now.as_ref()));
        let restored = self
            .unplanned()
            .map(|(location, before)| (location, &PriorState::Nothing, before));
        let mut changes: Vec<PlannedChange<'_>> = planned
            .chain(restored)
            .filter_map(|(location, before, now)| {
                let before = match self.tree.taken_back.get(location) {
                    Some(file) if is_same(file.actual.as_ref(), now) => return None,
                    Some(file) => &file.state,
                    None => before,
                };
                Some(PlannedChange {
                    location,
                    before,
                    new: now.map(New::Content),
                })
            })
            .collect();
        changes.sort_by_key(|change| change.location);
        changes
    }

    fn record(&self) -> Option<Earlier> {
        let entries = self.plan.entries.iter();
        let changed = entries.filter(|(_, entry)| entry.changed);
        Earlier::record(changed.map(|(location, entry)| {
            let before = match self.tree.load(location) {
                Ok(TreeNode::File(_, file)) => Some(file),
                _ => None,
            };
            (location, before, entry.now.as_ref())
        }))
    }
}

/// Finds the staging directories of interrupted commands, which hold old files.
pub fn leftovers(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs_err::read_dir(directory) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(STAGING))
        .map(|entry| entry.path())
        .collect()
}

#[cfg(test)]
mod file_tests;
#[cfg(test)]
mod tests;
