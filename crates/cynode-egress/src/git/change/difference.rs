//! A change as its objects show it: the only description of it that rules are applied to.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use cynode_api::PromotedFile;
use cynode_patch::escaped;

use super::{
    ChangeError,
    lines::{LineDelta, delta},
    names,
    objects::ObjectStore,
    output::{MODE_GITLINK, MODE_SYMLINK, ObjectId, TreeDifference, TreeEntry},
    rules::MAX_CHANGED_FILES,
};

/// One side of a changed path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion {
    pub(crate) mode: u32,
    pub(crate) id: ObjectId,
    /// Zero for a submodule.
    pub(crate) size: u64,
}

#[derive(Debug)]
pub(crate) struct ChangedEntry {
    pub(crate) path: Vec<u8>,
    pub(crate) old: Option<FileVersion>,
    pub(crate) new: Option<FileVersion>,
    pub(crate) lines: LineDelta,
    /// The contents; `None` also for those that are too large to be read.
    pub(crate) old_content: Option<Bytes>,
    pub(crate) new_content: Option<Bytes>,
    /// Another path of the new tree that some file systems take for this one.
    pub(crate) collides_with: Option<Vec<u8>>,
}

/// The differences of two trees, with what rules need of the new one.
#[derive(Debug)]
pub(crate) struct TreeChange {
    pub(crate) entries: Vec<ChangedEntry>,
    /// The symbolic links of the new tree.
    pub(crate) links: HashSet<Vec<u8>>,
}

impl TreeChange {
    /// Reads what leads from one commit or tree to another.
    pub(crate) async fn read(
        store: &ObjectStore<'_>,
        base: ObjectId,
        new: ObjectId,
    ) -> Result<Self, ChangeError> {
        let differences = store.differences(base, new, false).await?;
        if differences.len() as u64 > MAX_CHANGED_FILES {
            return Err(ChangeError::TooLarge(format!(
                "the change has {} files; at most {MAX_CHANGED_FILES} are promoted at once",
                differences.len()
            )));
        }
        let files = store.list(new, false).await?;
        let ids = |side: fn(&TreeDifference) -> Option<(u32, ObjectId)>| -> Vec<ObjectId> {
            let blobs = differences.iter().filter_map(side);
            blobs
                .filter(|(mode, _)| *mode != MODE_GITLINK)
                .map(|(_, id)| id)
                .collect()
        };
        let old_sizes = store.blob_sizes(&ids(|difference| difference.old)).await?;
        let new_sizes = store.blob_sizes(&ids(|difference| difference.new)).await?;
        let old = Versions {
            contents: store.blobs(&old_sizes).await?,
            sizes: old_sizes,
        };
        let new = Versions {
            contents: store.blobs(&new_sizes).await?,
            sizes: new_sizes,
        };
        let work = old.bytes() + new.bytes() + files.len() * 64;
        Ok(cynode_service::compute::run(work, || join(differences, &files, &old, &new)).await)
    }

    /// The files as answers list them.
    pub(crate) fn files(&self) -> impl Iterator<Item = PromotedFile> {
        self.entries.iter().map(|entry| {
            let shown = entry.new.or(entry.old);
            PromotedFile {
                path: escaped(&entry.path),
                operation: match (entry.old, entry.new) {
                    (None, _) => "create",
                    (Some(_), Some(_)) => "modify",
                    (Some(_), None) => "delete",
                }
                .to_owned(),
                mode: shown.map_or_else(String::new, |shown| format!("{:06o}", shown.mode)),
                size: entry.new.map_or(0, |new| new.size),
                added_lines: entry.lines.added_lines,
                removed_lines: entry.lines.removed_lines,
            }
        })
    }

    /// The size of all contents in memory.
    pub(crate) fn content_bytes(&self) -> usize {
        let sides = self
            .entries
            .iter()
            .flat_map(|entry| [&entry.old_content, &entry.new_content]);
        sides.flatten().map(Bytes::len).sum()
    }
}

/// The blobs of one side.
struct Versions {
    sizes: HashMap<ObjectId, u64>,
    contents: HashMap<ObjectId, Bytes>,
}

impl Versions {
    fn bytes(&self) -> usize {
        self.contents.values().map(Bytes::len).sum()
    }

    fn version(&self, side: Option<(u32, ObjectId)>) -> Option<FileVersion> {
        side.map(|(mode, id)| FileVersion {
            mode,
            id,
            size: self.sizes.get(&id).copied().unwrap_or(0),
        })
    }

    fn content(&self, side: Option<(u32, ObjectId)>) -> Option<Bytes> {
        self.contents.get(&side?.1).cloned()
    }
}

fn join(
    differences: Vec<TreeDifference>,
    files: &[TreeEntry],
    old: &Versions,
    new: &Versions,
) -> TreeChange {
    let created = differences
        .iter()
        .filter(|difference| difference.old.is_none())
        .map(|difference| difference.path.as_slice());
    let tree = files.iter().map(|entry| entry.path.as_slice());
    let mut collisions: HashMap<Vec<u8>, Vec<u8>> = names::collisions(created, tree)
        .into_iter()
        .map(|(path, other)| (path.to_vec(), other))
        .collect();
    let entries = differences
        .into_iter()
        .map(|difference| {
            let (old_content, new_content) =
                (old.content(difference.old), new.content(difference.new));
            ChangedEntry {
                old: old.version(difference.old),
                new: new.version(difference.new),
                lines: delta(
                    old_content.as_deref().unwrap_or_default(),
                    new_content.as_deref().unwrap_or_default(),
                ),
                old_content,
                new_content,
                collides_with: collisions.remove(&difference.path),
                path: difference.path,
            }
        })
        .collect();
    let links = files
        .iter()
        .filter(|entry| entry.mode == MODE_SYMLINK)
        .map(|entry| entry.path.clone())
        .collect();
    TreeChange { entries, links }
}
