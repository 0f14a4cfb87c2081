//! What earlier applications of a session's changes did to a directory.
//!
//! The changes of a session count from its beginning, so those that were applied come again with
//! the next ones. A file that is as it was left then is first taken back, in memory, to what it was
//! before.

use std::collections::BTreeMap;

use cynode_api::Base64Bytes;
use cynode_patch::{File, Kind, Location, PriorState, Problem, TreeNode};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::tree::{LocalTree, Stamp};

/// Contents of files that one record keeps, together. What a directory with more was changed by
/// conflicts with itself when it comes again.
pub(super) const MAX_KEPT_BYTES: usize = 64 * 1024 * 1024;

/// The files that were changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Earlier {
    files: Vec<EarlierFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct EarlierFile {
    path: Base64Bytes,
    /// What it was before; absent if there was none.
    before: Option<Kept>,
    /// What it became; absent if it was deleted.
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

/// Whether two files are the same to git.
pub(super) fn is_same(one: Option<&File>, other: Option<&File>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => {
            executable(one) == executable(other) && one.bytes == other.bytes
        }
        _ => false,
    }
}

/// A file that is taken back to what it was before.
#[derive(Debug)]
pub(super) struct TakenBack {
    /// What the directory has.
    pub(super) state: PriorState<Stamp>,
    pub(super) actual: Option<File>,
    /// What it counts as.
    pub(super) before: Option<File>,
}

impl Earlier {
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The files that are as they were left.
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
                // Something else is there now.
                Ok(TreeNode::Directory(_)) | Err(Problem::Reject(_)) => continue,
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

    /// Records changes of files: what each was, and what it became. `None` if they take too much
    /// room.
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
