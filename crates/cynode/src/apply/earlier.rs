//! A record of the changes of a session that were already applied to a directory.
//!
//! A session's patch always starts from its beginning, so it includes the changes that were applied
//! earlier. A file that is unchanged since then is first reverted in memory to its original
//! content, so that the new patch applies.

use std::collections::BTreeMap;

use cynode_api::Base64Bytes;
use cynode_patch::{File, Kind, Location, PriorState, Problem, TreeNode};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::tree::{LocalTree, Stamp};

/// Total size of the file contents in one record. Without a record, a repeated change conflicts
/// with itself.
pub(super) const MAX_KEPT_BYTES: usize = 64 * 1024 * 1024;

/// The changed files, by path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Earlier {
    files: Vec<EarlierFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct EarlierFile {
    path: Base64Bytes,
    /// The original file; absent if there was none.
    before: Option<Kept>,
    /// The file as it was applied; absent if it was deleted.
    after: Option<Version>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    /// Absent for a symbolic link.
    mode: Option<u32>,
    content: Base64Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Version {
    /// Absent for a symbolic link.
    executable: Option<bool>,
    sha256: String,
}

impl Kept {
    fn of(file: &File) -> Self {
        Self {
            mode: match file.kind {
                Kind::Regular(mode) => Some(mode),
                Kind::Symlink => None,
            },
            content: Base64Bytes(file.bytes.clone()),
        }
    }

    fn file(&self) -> File {
        File {
            kind: self
                .mode
                .map_or(Kind::Symlink, |mode| Kind::Regular(mode & 0o777)),
            bytes: self.content.0.clone(),
        }
    }
}

impl Version {
    fn of(file: &File) -> Self {
        Self {
            executable: executable(file),
            sha256: hex::encode(Sha256::digest(&file.bytes)),
        }
    }
}

fn executable(file: &File) -> Option<bool> {
    match file.kind {
        Kind::Regular(mode) => Some(mode & 0o111 != 0),
        Kind::Symlink => None,
    }
}

/// Returns whether two files are equal to git.
pub(super) fn is_same(one: Option<&File>, other: Option<&File>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => {
            executable(one) == executable(other) && one.bytes == other.bytes
        }
        _ => false,
    }
}

/// A file that counts as reverted to its original state.
#[derive(Debug)]
pub(super) struct TakenBack {
    /// The current state in the directory.
    pub(super) state: PriorState<Stamp>,
    pub(super) actual: Option<File>,
    /// The original state, on which the patch is planned.
    pub(super) before: Option<File>,
}

impl Earlier {
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Splits off the files whose paths `keep` does not accept.
    pub fn split_off(&mut self, keep: impl Fn(&[u8]) -> bool) -> Self {
        let is_kept = |file: &EarlierFile| keep(&file.path.0);
        let (kept, files) = std::mem::take(&mut self.files)
            .into_iter()
            .partition(is_kept);
        self.files = kept;
        Self { files }
    }

    /// Adds files that an application left out.
    pub fn append(&mut self, other: Self) {
        self.files.extend(other.files);
    }

    /// Returns the files that are unchanged since they were applied.
    pub(super) fn take_back(
        &self,
        tree: &LocalTree,
    ) -> Result<BTreeMap<Location, TakenBack>, std::io::Error> {
        let mut found = BTreeMap::new();
        for file in &self.files {
            let Ok(location) = Location::parse(&file.path.0) else {
                continue;
            };
            let (state, actual) = match tree.load_actual(&location) {
                Ok(TreeNode::Nothing) => (PriorState::Nothing, None),
                Ok(TreeNode::File(stamp, actual)) => (PriorState::File(stamp), Some(actual)),
                // A deleted file may have been replaced by a directory.
                Ok(TreeNode::Directory(stamp)) => (PriorState::Directory(stamp), None),
                // The location now has another type of entry.
                Err(Problem::Reject(_)) => continue,
                Err(Problem::Failure(error)) => return Err(error),
            };
            if actual.as_ref().map(Version::of) == file.after {
                let before = file.before.as_ref().map(Kept::file);
                let taken_back = TakenBack {
                    state,
                    actual,
                    before,
                };
                found.insert(location, taken_back);
            }
        }
        Ok(found)
    }

    /// Records the original and the new state of each changed file; `None` if they are too large.
    pub(super) fn record<'a>(
        changes: impl Iterator<Item = (&'a Location, Option<File>, Option<&'a File>)>,
    ) -> Option<Self> {
        let mut bytes = 0;
        let mut files = Vec::new();
        for (location, before, after) in changes {
            bytes += before.as_ref().map_or(0, |file| file.bytes.len());
            if bytes > MAX_KEPT_BYTES {
                return None;
            }
            files.push(EarlierFile {
                path: Base64Bytes(location.as_bytes().to_vec()),
                before: before.as_ref().map(Kept::of),
                after: after.map(Version::of),
            });
        }
        Some(Self { files })
    }
}
