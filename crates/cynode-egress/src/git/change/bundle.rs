//! Bundles: packs with the agent's own commits, of which only the last one's tree is used.
//!
//! A bundle's tree may name objects that the bundle does not contain, and the mirror has those of
//! all branches. Invariant: each object of the tree, and each object that the pack builds on, is in
//! the pack itself or reachable from the base. Otherwise a bundle that names a blob of another
//! branch by its id would publish a file that its author can't read.
//!
//! The objects stay in quarantine: the contents of changed files are written again, like those of
//! other formats.

use std::collections::HashSet;

use bytes::Bytes;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::{
    ChangeError,
    edits::{BaseFiles, EditedFile, Edits, FileMode},
    objects::ObjectStore,
    output::{self, MODE_TREE, ObjectId, TreeDifference, UnexpectedOutput},
    rules::MAX_CHANGED_FILES,
};
use crate::git::command::GitError;

/// The lines before the pack.
const MAX_BUNDLE_HEADER_BYTES: usize = 64 * 1024;
/// Commits that a bundle says it builds on.
const MAX_PREREQUISITES: usize = 256;
/// Objects of the base's history that are listed to find one.
const MAX_HISTORY_BYTES: u64 = 4 * 1024 * 1024 * 1024;

/// The lines before a bundle's pack.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BundleHeader {
    pub(super) prerequisites: Vec<ObjectId>,
    pub(super) head: ObjectId,
    /// Where the pack begins.
    pub(super) length: usize,
}

fn invalid(problem: &str) -> ChangeError {
    ChangeError::Invalid(format!("the bundle is invalid: {problem}"))
}

pub(super) async fn edits(
    store: &ObjectStore<'_>,
    base: &BaseFiles,
    bundle: &Bytes,
) -> Result<Edits, ChangeError> {
    let header = header(bundle)?;
    if header.head.hash_bytes() != base.commit.hash_bytes() {
        return Err(invalid("it has another hash than the repository"));
    }
    let known = store.headers(&header.prerequisites).await?;
    if let Some((missing, _)) = header
        .prerequisites
        .iter()
        .zip(known)
        .find(|(_, header)| header.is_none())
    {
        return Err(invalid(&format!(
            "it builds on the commit {missing}, which the repository does not have"
        )));
    }
    let pack = bundle.slice(header.length..);
    let brought = index(store, &pack).await?;
    if !brought.own.contains(&header.head) {
        return Err(invalid("it does not contain its head"));
    }
    let tree = store.tree_of(header.head).await?;
    let differences = store.differences(base.commit, tree, true).await?;
    let mut foreign: HashSet<ObjectId> = differences
        .iter()
        .filter_map(|difference| difference.new)
        .filter(|(mode, _)| *mode != output::MODE_GITLINK)
        .map(|(_, id)| id)
        .chain([tree])
        .chain(brought.completed.iter().copied())
        .filter(|id| !brought.own.contains(id))
        .collect();
    drop_reachable(store, base, &mut foreign).await?;
    if let Some(id) = foreign.iter().min() {
        return Err(invalid(&format!(
            "its tree needs the object {id}, which is neither in the bundle nor in the history of \
             the base"
        )));
    }
    changed_files(store, differences).await
}

/// Reads the header. A bundle must have one head and no filter.
pub(super) fn header(bundle: &[u8]) -> Result<BundleHeader, ChangeError> {
    let beginning = &bundle[..bundle.len().min(MAX_BUNDLE_HEADER_BYTES)];
    let mut lines = beginning.split_inclusive(|byte| *byte == b'\n');
    let is_version_3 = match lines.next() {
        Some(b"# v2 git bundle\n") => false,
        Some(b"# v3 git bundle\n") => true,
        _ => return Err(invalid("it is not a git bundle of version 2 or 3")),
    };
    let mut length = b"# v2 git bundle\n".len();
    let (mut prerequisites, mut heads) = (Vec::new(), Vec::new());
    let id_of = |text: &[u8]| {
        let id = text.split(|byte| *byte == b' ').next().unwrap_or_default();
        std::str::from_utf8(id)
            .ok()
            .and_then(ObjectId::parse)
            .ok_or_else(|| invalid("a line of its header has no object id"))
    };
    for line in lines {
        let Some(text) = line.strip_suffix(b"\n") else {
            break;
        };
        length += line.len();
        match text {
            [] => {
                let [head] = heads.as_slice() else {
                    return Err(invalid("it does not have exactly one head"));
                };
                return Ok(BundleHeader {
                    prerequisites,
                    head: *head,
                    length,
                });
            }
            [b'@', capability @ ..] if is_version_3 => {
                if !capability.starts_with(b"object-format=") {
                    return Err(invalid("it has a filter or an unknown capability"));
                }
            }
            [b'-', rest @ ..] => prerequisites.push(id_of(rest)?),
            text => heads.push(id_of(text)?),
        }
        if prerequisites.len() > MAX_PREREQUISITES {
            return Err(invalid(&format!(
                "it builds on more than {MAX_PREREQUISITES} commits"
            )));
        }
    }
    Err(invalid("its header is incomplete or too long"))
}

/// The objects of a pack.
struct BroughtObjects {
    own: HashSet<ObjectId>,
    /// Objects of the mirror that the pack builds on.
    completed: Vec<ObjectId>,
}

/// Indexes a pack in quarantine. git adds the objects that the pack's deltas build on at its end.
async fn index(store: &ObjectStore<'_>, pack: &Bytes) -> Result<BroughtObjects, ChangeError> {
    // Objects after so many were added by git.
    let count = match pack.get(..12) {
        Some([b'P', b'A', b'C', b'K', _, _, _, _, count @ ..]) => {
            let count = <[u8; 4]>::try_from(count).unwrap_or_default();
            usize::try_from(u32::from_be_bytes(count)).unwrap_or(usize::MAX)
        }
        _ => return Err(invalid("it has no pack")),
    };
    let limit = format!("--max-input-size={}", pack.len());
    let args = ["index-pack", "--strict", "--fix-thin", "--stdin", &limit];
    let printed = match store.run_small(&args, pack.clone(), None).await {
        Err(ChangeError::Git(GitError::Exit { stderr, .. })) => {
            return Err(invalid(&format!(
                "its pack was refused: {}",
                cynode_patch::escaped(stderr.trim().as_bytes())
            )));
        }
        result => result?,
    };
    // git prints what it read beyond the pack.
    let mut printed = printed.splitn(2, |byte| *byte == b'\n');
    let name = printed
        .next()
        .and_then(|line| line.strip_prefix(b"pack\t"))
        .ok_or(UnexpectedOutput("no name of a pack"))?;
    if printed.next().is_none_or(|rest| !rest.is_empty()) {
        return Err(invalid("data follows its pack"));
    }
    let path = format!("objects/pack/pack-{}.idx", output::single_id(name)?);
    // In the quarantine.
    let printed = store
        .run_small(&["rev-parse", "--git-path", &path], Bytes::new(), None)
        .await?;
    let path = std::str::from_utf8(printed.trim_ascii_end())
        .map_err(|_| UnexpectedOutput("a path that is not UTF-8"))?;
    let printed = store
        .run_small(&["verify-pack", "-v", path], Bytes::new(), None)
        .await?;
    let mut objects = output::packed_objects(&printed)?;
    objects.sort_unstable_by_key(|object| object.offset);
    let mut own: Vec<ObjectId> = objects.into_iter().map(|object| object.id).collect();
    let completed = own.split_off(count.min(own.len()));
    Ok(BroughtObjects {
        own: own.into_iter().collect(),
        completed,
    })
}

/// Drops the objects that are reachable from the base: first those of its tree, then those of its
/// history.
async fn drop_reachable(
    store: &ObjectStore<'_>,
    base: &BaseFiles,
    wanted: &mut HashSet<ObjectId>,
) -> Result<(), ChangeError> {
    if wanted.is_empty() {
        return Ok(());
    }
    wanted.remove(&store.tree_of(base.commit).await?);
    for entry in store.list(base.commit, true).await? {
        if entry.mode == MODE_TREE || FileMode::from_bits(entry.mode).is_some() {
            wanted.remove(&entry.id);
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    let id = base.commit.to_string();
    let args = ["rev-list", "--objects", "--no-object-names", &id];
    let command = store.command(&args, Bytes::new(), None, MAX_HISTORY_BYTES);
    let stream = store.runner.stream(store.mirror, command).await?;
    let mut lines = BufReader::new(stream.stdout);
    let mut line = String::new();
    loop {
        line.clear();
        let read = lines.read_line(&mut line).await;
        if read.map_err(|error| GitError::Unavailable(error.to_string()))? == 0 {
            break;
        }
        let id =
            ObjectId::parse(line.trim_end()).ok_or(UnexpectedOutput("an invalid object id"))?;
        if wanted.remove(&id) && wanted.is_empty() {
            return Ok(());
        }
    }
    // An incomplete listing proves nothing: what it lacks stays wanted.
    stream
        .ended
        .await
        .map_err(|_| GitError::Unavailable("it ended".to_owned()))??;
    Ok(())
}

async fn changed_files(
    store: &ObjectStore<'_>,
    differences: Vec<TreeDifference>,
) -> Result<Edits, ChangeError> {
    let is_tree = |side: Option<(u32, ObjectId)>| side.is_none_or(|(mode, _)| mode == MODE_TREE);
    // A file whose place a directory takes is deleted.
    let mut deleted = Vec::new();
    let mut written = Vec::new();
    for TreeDifference { old, new, path } in differences {
        match new {
            Some((MODE_TREE, _)) | None if is_tree(old) => {}
            Some((MODE_TREE, _)) | None => deleted.push(path),
            Some((mode, id)) => {
                let Some(mode) = FileMode::from_bits(mode) else {
                    return Err(invalid(&format!(
                        "'{}' has the mode {mode:06o}; only files and symbolic links are promoted",
                        cynode_patch::escaped(&path)
                    )));
                };
                written.push((path, mode, id));
            }
        }
    }
    if (written.len() + deleted.len()) as u64 > MAX_CHANGED_FILES {
        return Err(ChangeError::TooLarge(format!(
            "the changeset has more than {MAX_CHANGED_FILES} files"
        )));
    }
    let ids: Vec<ObjectId> = written.iter().map(|(_, _, id)| *id).collect();
    let sizes = store.blob_sizes(&ids).await?;
    let contents = store.blobs(&sizes).await?;
    let mut edits = Edits::default();
    for path in deleted {
        edits.add(path, None)?;
    }
    for (path, mode, id) in written {
        let Some(content) = contents.get(&id).cloned() else {
            return Err(ChangeError::TooLarge(format!(
                "'{}' is too large, or the changed files are together",
                cynode_patch::escaped(&path)
            )));
        };
        edits.add(path, Some(EditedFile { mode, content }))?;
    }
    Ok(edits)
}
