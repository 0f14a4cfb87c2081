//! What a changeset does to the files of its base, whatever its format.

use std::collections::BTreeMap;

use bytes::Bytes;
use cynode_api::{PatchReject, PromotionVerdict};
use cynode_patch::escaped;

use super::{
    ChangeError, Conflict, names,
    objects::{MAX_CONTENT_BYTES, ObjectStore},
    output::{MODE_EXECUTABLE, MODE_REGULAR, MODE_SYMLINK, ObjectId, TreeEntry},
    rules::MAX_CHANGED_FILES,
};

/// The files of the base, without directories.
#[derive(Debug)]
pub(crate) struct BaseFiles {
    pub(crate) commit: ObjectId,
    files: BTreeMap<Vec<u8>, (u32, ObjectId)>,
}

impl BaseFiles {
    pub(crate) async fn read(
        store: &ObjectStore<'_>,
        commit: ObjectId,
    ) -> Result<Self, ChangeError> {
        Ok(Self::new(commit, store.list(commit, false).await?))
    }

    pub(crate) fn new(commit: ObjectId, entries: Vec<TreeEntry>) -> Self {
        let files = entries
            .into_iter()
            .map(|entry| (entry.path, (entry.mode, entry.id)))
            .collect();
        Self { commit, files }
    }

    pub(crate) fn get(&self, path: &[u8]) -> Option<(u32, ObjectId)> {
        self.files.get(path).copied()
    }

    /// The files below a directory.
    pub(crate) fn below<'a>(&'a self, path: &[u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let prefix = [path, b"/"].concat();
        self.files
            .range(prefix.clone()..)
            .map(|(path, _)| path.as_slice())
            .take_while(move |path| path.starts_with(&prefix))
    }

    /// A file, link or submodule in the place of one of the path's directories.
    pub(crate) fn above<'a>(&self, path: &'a [u8]) -> Option<(&'a [u8], u32)> {
        directories(path).find_map(|above| Some((above, self.get(above)?.0)))
    }
}

/// The directories of a path, from the topmost.
fn directories(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b'/')
        .map(|(end, _)| &path[..end])
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileMode {
    Regular,
    Executable,
    Symlink,
}

impl FileMode {
    pub(crate) const fn bits(self) -> u32 {
        match self {
            Self::Regular => MODE_REGULAR,
            Self::Executable => MODE_EXECUTABLE,
            Self::Symlink => MODE_SYMLINK,
        }
    }

    /// `None` for modes that no changeset may have.
    pub(crate) const fn from_bits(mode: u32) -> Option<Self> {
        match mode {
            MODE_REGULAR => Some(Self::Regular),
            MODE_EXECUTABLE => Some(Self::Executable),
            MODE_SYMLINK => Some(Self::Symlink),
            _ => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EditedFile {
    pub(crate) mode: FileMode,
    /// The target of a symbolic link.
    pub(crate) content: Bytes,
}

/// New versions by path; `None` deletes.
#[derive(Debug, Default)]
pub(crate) struct Edits {
    files: BTreeMap<Vec<u8>, Option<EditedFile>>,
    bytes: u64,
}

impl Edits {
    /// Adds an edit. Says whether the path had none yet.
    pub(crate) fn add(
        &mut self,
        path: Vec<u8>,
        file: Option<EditedFile>,
    ) -> Result<bool, ChangeError> {
        self.bytes += file.as_ref().map_or(0, |file| file.content.len() as u64);
        if self.bytes > MAX_CONTENT_BYTES {
            return Err(ChangeError::TooLarge(format!(
                "the changed files have more than {MAX_CONTENT_BYTES} bytes in total"
            )));
        }
        let is_new = self.files.insert(path, file).is_none();
        if self.files.len() as u64 > MAX_CHANGED_FILES {
            return Err(ChangeError::TooLarge(format!(
                "the changeset has more than {MAX_CHANGED_FILES} files"
            )));
        }
        Ok(is_new)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], Option<&EditedFile>)> {
        self.files
            .iter()
            .map(|(path, file)| (path.as_slice(), file.as_ref()))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Refuses names that no rule can admit, before git sees them.
    pub(crate) fn check_names(&self) -> Result<(), ChangeError> {
        refuse_names(self.files.keys().map(Vec::as_slice))
    }

    /// Finds files in the place of directories and directories in the place of files. git would
    /// silently delete the one for the other.
    pub(crate) fn check_placement(&self, base: &BaseFiles) -> Result<(), ChangeError> {
        let is_file_after = |path: &[u8]| match self.files.get(path) {
            Some(edit) => edit.is_some(),
            None => base.get(path).is_some(),
        };
        let mut rejects = Vec::new();
        for (path, file) in &self.files {
            if file.is_none() {
                continue;
            }
            if let Some(above) = directories(path).find(|above| is_file_after(above)) {
                rejects.push(whole_file(
                    path,
                    format!("'{}' is a file, not a directory", escaped(above)),
                ));
            }
            let remaining = base.below(path).find(|below| is_file_after(below));
            if let Some(below) = remaining {
                rejects.push(whole_file(
                    path,
                    format!(
                        "the path is a directory, and the changeset does not delete '{}' in it",
                        escaped(below)
                    ),
                ));
            }
        }
        if rejects.is_empty() {
            Ok(())
        } else {
            Err(Conflict::new(base, rejects, false).into())
        }
    }
}

/// Rejects a whole file.
pub(crate) fn whole_file(path: &[u8], reason: String) -> PatchReject {
    PatchReject {
        path: escaped(path),
        hunk: None,
        line: None,
        reason,
        expected: Vec::new(),
        found: Vec::new(),
    }
}

/// Refuses names that no rule can admit.
pub(crate) fn refuse_names<'a>(
    paths: impl IntoIterator<Item = &'a [u8]>,
) -> Result<(), ChangeError> {
    let verdicts: Vec<PromotionVerdict> = paths
        .into_iter()
        .filter_map(|path| {
            Some(PromotionVerdict {
                rule: "paths".to_owned(),
                allowed: false,
                path: Some(escaped(path)),
                reason: names::check(path).err()?,
            })
        })
        .collect();
    if verdicts.is_empty() {
        Ok(())
    } else {
        Err(ChangeError::Refused(verdicts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(paths: &[&str]) -> BaseFiles {
        let id = ObjectId::parse(&"1".repeat(40)).expect("an id");
        let entry = |path: &&str| TreeEntry {
            mode: MODE_REGULAR,
            id,
            path: path.as_bytes().to_vec(),
        };
        BaseFiles::new(id, paths.iter().map(entry).collect())
    }

    fn placed(base: &BaseFiles, edits: &[(&str, bool)]) -> bool {
        let mut all = Edits::default();
        for (path, is_write) in edits {
            let file = is_write.then(|| EditedFile {
                mode: FileMode::Regular,
                content: Bytes::new(),
            });
            all.add(path.as_bytes().to_vec(), file)
                .expect("within bounds");
        }
        all.check_placement(base).is_ok()
    }

    #[test]
    fn a_file_and_a_directory_never_share_a_place() {
        let base = base(&["a/b", "a/c", "d", "e-f", "e/g"]);
        assert!(!placed(&base, &[("a", true)]));
        assert!(!placed(&base, &[("a", true), ("a/b", false)]));
        assert!(placed(
            &base,
            &[("a", true), ("a/b", false), ("a/c", false)]
        ));
        assert!(!placed(&base, &[("d/x", true)]));
        assert!(placed(&base, &[("d/x", true), ("d", false)]));
        assert!(!placed(&base, &[("n", true), ("n/m", true)]));
        assert!(placed(
            &base,
            &[("a/b", true), ("e-g", true), ("e/h", true)]
        ));
    }
}
