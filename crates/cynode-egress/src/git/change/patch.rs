//! Patches: unified diffs, applied to blobs of the base by the parser and planner that also apply
//! them in sandboxes.

use std::{collections::HashMap, convert::Infallible};

use bytes::Bytes;
use cynode_api::PatchReject;
use cynode_patch::{
    Entry, File, Kind, Location, MAX_FILE_BYTES, Patch, PlanError, Problem, Reject, Tree, TreeNode,
    escaped,
};

use super::{
    ChangeError, Conflict,
    edits::{BaseFiles, EditedFile, Edits, FileMode, refuse_names, whole_file},
    objects::{MAX_CONTENT_BYTES, ObjectStore},
    output::{MODE_EXECUTABLE, MODE_GITLINK, MODE_SYMLINK, ObjectId},
};

/// `a/` and `b/`, as git writes them.
const STRIPPED_COMPONENTS: u32 = 1;

pub(super) async fn edits(
    store: &ObjectStore<'_>,
    base: &BaseFiles,
    diff: &[u8],
) -> Result<Edits, ChangeError> {
    let patch =
        cynode_service::compute::run(diff.len(), || Patch::parse(diff, STRIPPED_COMPONENTS))
            .await
            .map_err(|error| ChangeError::Invalid(format!("the patch is invalid: {error}")))?;
    refuse_names(patch.paths())?;
    let contents = touched_contents(store, base, &patch).await?;
    let size: usize = contents.values().map(Bytes::len).sum();
    let tree = PatchedTree { base, contents };
    let planned =
        cynode_service::compute::run(diff.len() + size, || cynode_patch::plan(&tree, &patch)).await;
    let plan = match planned {
        Ok(plan) => plan,
        Err(PlanError::TooLarge(message)) => return Err(ChangeError::TooLarge(message)),
        Err(PlanError::Tree(never)) => match never {},
    };
    if !plan.rejects.is_empty() {
        let rejects = plan.rejects.into_iter().map(reject).collect();
        return Err(Conflict::new(base, rejects, plan.rejects_truncated).into());
    }
    let mut edits = Edits::default();
    for (location, Entry { now, changed, .. }) in plan.entries {
        if changed {
            edits.add(location.as_bytes().to_vec(), now.map(edited))?;
        }
    }
    Ok(edits)
}

/// The contents of all files of the base that the patch names.
async fn touched_contents(
    store: &ObjectStore<'_>,
    base: &BaseFiles,
    patch: &Patch<'_>,
) -> Result<HashMap<ObjectId, Bytes>, ChangeError> {
    let ids: Vec<ObjectId> = patch
        .paths()
        .into_iter()
        .filter_map(|path| base.get(path))
        .filter(|(mode, _)| *mode != MODE_GITLINK)
        .map(|(_, id)| id)
        .collect();
    let sizes = store.blob_sizes(&ids).await?;
    let readable = sizes.values().filter(|size| **size <= MAX_FILE_BYTES);
    if readable.sum::<u64>() > MAX_CONTENT_BYTES {
        return Err(ChangeError::TooLarge(format!(
            "the files that the patch touches have more than {MAX_CONTENT_BYTES} bytes in total"
        )));
    }
    store.blobs(&sizes).await
}

fn edited(file: File) -> EditedFile {
    EditedFile {
        mode: match file.kind {
            Kind::Symlink => FileMode::Symlink,
            Kind::Regular(bits) if bits & 0o111 != 0 => FileMode::Executable,
            Kind::Regular(_) => FileMode::Regular,
        },
        content: Bytes::from(file.bytes),
    }
}

fn reject(reject: Reject) -> PatchReject {
    PatchReject {
        hunk: reject.hunk,
        line: reject.line,
        expected: reject.expected,
        found: reject.found,
        ..whole_file(&reject.path, reject.reason)
    }
}

/// The base as a tree to patch. Links are not followed: git writes diffs of what a tree has.
struct PatchedTree<'a> {
    base: &'a BaseFiles,
    contents: HashMap<ObjectId, Bytes>,
}

type TreeResult<T> = Result<T, Problem<Infallible>>;

impl Tree for PatchedTree<'_> {
    type Stamp = ();
    type Failure = Infallible;

    fn locate(&self, path: &Location) -> TreeResult<Location> {
        let Some((above, mode)) = self.base.above(path.as_bytes()) else {
            return Ok(path.clone());
        };
        let what = match mode {
            MODE_SYMLINK => "a symbolic link",
            MODE_GITLINK => "a submodule",
            _ => "a file",
        };
        Err(Problem::Reject(format!(
            "the path is below '{}', which is {what}",
            escaped(above)
        )))
    }

    fn load(&self, location: &Location) -> TreeResult<TreeNode<()>> {
        let Some((mode, id)) = self.base.get(location.as_bytes()) else {
            let mut below = self.base.below(location.as_bytes());
            return Ok(below
                .next()
                .map_or(TreeNode::Nothing, |_| TreeNode::Directory(())));
        };
        let kind = match mode {
            MODE_GITLINK => return Err(Problem::Reject("the path is a submodule".to_owned())),
            MODE_SYMLINK => Kind::Symlink,
            MODE_EXECUTABLE => Kind::Regular(0o755),
            _ => Kind::Regular(0o644),
        };
        let Some(content) = self.contents.get(&id) else {
            return Err(Problem::Reject(format!(
                "the file has more than {MAX_FILE_BYTES} bytes"
            )));
        };
        Ok(TreeNode::File(
            (),
            File {
                kind,
                bytes: content.to_vec(),
            },
        ))
    }

    fn files_below(&self, directory: &Location, limit: usize) -> TreeResult<Vec<Location>> {
        self.base
            .below(directory.as_bytes())
            .take(limit.saturating_add(1))
            .map(|path| Location::parse(path).map_err(|reason| Problem::Reject(reason.to_owned())))
            .collect()
    }

    /// Nobody reads the digests of this plan: the ids of git's objects say more.
    fn digest(&self, _bytes: &[u8]) -> String {
        String::new()
    }
}
