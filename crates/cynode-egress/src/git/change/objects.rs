//! Reads objects of a mirror with git, and of a quarantine on top of it.

use std::collections::HashMap;

use bytes::Bytes;
use cynode_patch::MAX_FILE_BYTES;

use super::{
    ChangeError,
    output::{
        self, ObjectHeader, ObjectId, ObjectKind, TreeDifference, TreeEntry, UnexpectedOutput,
    },
};
use crate::git::command::{GitCommand, GitRunner, Mirror};

/// One command on objects. The largest repositories list a million files in a few seconds.
const OBJECTS_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(300);
/// A listing of a tree: about a million files.
const MAX_LISTING_BYTES: u64 = 128 * 1024 * 1024;
/// Contents of a change that are in memory, each side by itself.
pub(crate) const MAX_CONTENT_BYTES: u64 = 128 * 1024 * 1024;
/// Output of a command that prints ids or a few lines.
const MAX_SMALL_OUTPUT_BYTES: u64 = 64 * 1024 * 1024;

/// The objects of a mirror.
#[derive(Clone)]
pub(crate) struct ObjectStore<'a> {
    pub(crate) runner: &'a dyn GitRunner,
    pub(crate) mirror: &'a Mirror,
    /// Where new objects go.
    pub(crate) quarantine: Option<String>,
}

impl ObjectStore<'_> {
    /// Runs a command that dials nobody.
    pub(crate) async fn run(
        &self,
        args: &[&str],
        input: Bytes,
        index: Option<&str>,
        max_output_bytes: u64,
    ) -> Result<Vec<u8>, ChangeError> {
        let output = self
            .runner
            .run(
                self.mirror,
                self.command(args, input, index, max_output_bytes),
            )
            .await?;
        Ok(output.stdout)
    }

    pub(crate) fn command(
        &self,
        args: &[&str],
        input: Bytes,
        index: Option<&str>,
        max_output_bytes: u64,
    ) -> GitCommand {
        GitCommand {
            args: args.iter().map(Into::into).collect(),
            input,
            index: index.map(str::to_owned),
            quarantine: self.quarantine.clone(),
            max_output_bytes,
            timeout: OBJECTS_TIMEOUT,
            remote: None,
        }
    }

    /// Runs a command that prints little.
    pub(crate) async fn run_small(
        &self,
        args: &[&str],
        input: Bytes,
        index: Option<&str>,
    ) -> Result<Vec<u8>, ChangeError> {
        self.run(args, input, index, MAX_SMALL_OUTPUT_BYTES).await
    }

    /// The tree of a commit or tag.
    pub(crate) async fn tree_of(&self, id: ObjectId) -> Result<ObjectId, ChangeError> {
        let name = format!("{id}^{{tree}}");
        let args = ["rev-parse", "--verify", "--end-of-options", &name];
        let printed = self.run_small(&args, Bytes::new(), None).await?;
        Ok(output::single_id(&printed)?)
    }

    /// All files of a commit or tree; with `directories` also its trees.
    pub(crate) async fn list(
        &self,
        id: ObjectId,
        directories: bool,
    ) -> Result<Vec<TreeEntry>, ChangeError> {
        let name = id.to_string();
        let mut args = vec!["ls-tree", "-r", "-z", "--full-tree"];
        if directories {
            args.push("-t");
        }
        args.push(&name);
        let printed = self
            .run(&args, Bytes::new(), None, MAX_LISTING_BYTES)
            .await?;
        let parse = || output::tree_entries(&printed);
        Ok(cynode_service::compute::run(printed.len(), parse).await?)
    }

    /// The differences of two trees or commits; with `directories` also those of their trees.
    pub(crate) async fn differences(
        &self,
        old: ObjectId,
        new: ObjectId,
        directories: bool,
    ) -> Result<Vec<TreeDifference>, ChangeError> {
        let (old, new) = (old.to_string(), new.to_string());
        let mut args = vec![
            "diff-tree",
            "-r",
            "-z",
            "--raw",
            "--no-renames",
            "--no-abbrev",
            "--ignore-submodules=none",
        ];
        if directories {
            args.push("-t");
        }
        args.extend([old.as_str(), new.as_str()]);
        let printed = self
            .run(&args, Bytes::new(), None, MAX_LISTING_BYTES)
            .await?;
        Ok(output::tree_differences(&printed)?)
    }

    /// What the objects are, in the order of the ids; `None` for missing ones.
    pub(crate) async fn headers(
        &self,
        ids: &[ObjectId],
    ) -> Result<Vec<Option<ObjectHeader>>, ChangeError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let args = ["cat-file", "--batch-check"];
        let printed = self.run_small(&args, lines(ids), None).await?;
        let headers = output::object_headers(&printed)?;
        let is_asked = |(header, id): (&Option<ObjectHeader>, &ObjectId)| {
            header.is_none_or(|header| header.id == *id)
        };
        if headers.len() != ids.len() || !headers.iter().zip(ids).all(is_asked) {
            return Err(UnexpectedOutput("other objects than it was asked for").into());
        }
        Ok(headers)
    }

    /// The sizes of blobs. Something else under one of the ids is an error.
    pub(crate) async fn blob_sizes(
        &self,
        ids: &[ObjectId],
    ) -> Result<HashMap<ObjectId, u64>, ChangeError> {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let headers = self.headers(&ids).await?;
        ids.iter()
            .zip(headers)
            .map(|(id, header)| match header {
                Some(ObjectHeader {
                    kind: ObjectKind::Blob,
                    size,
                    ..
                }) => Ok((*id, size)),
                _ => Err(UnexpectedOutput("that a blob is missing").into()),
            })
            .collect()
    }

    /// The contents of those of the blobs that are not too large by themselves; fewer when all
    /// together are more than [`MAX_CONTENT_BYTES`].
    pub(crate) async fn blobs(
        &self,
        sizes: &HashMap<ObjectId, u64>,
    ) -> Result<HashMap<ObjectId, Bytes>, ChangeError> {
        let mut wanted: Vec<(u64, ObjectId)> = sizes
            .iter()
            .filter(|(_, size)| **size <= MAX_FILE_BYTES)
            .map(|(id, size)| (*size, *id))
            .collect();
        wanted.sort_unstable();
        let mut total = 0;
        wanted.retain(|(size, _)| {
            total += size;
            total <= MAX_CONTENT_BYTES
        });
        if wanted.is_empty() {
            return Ok(HashMap::new());
        }
        let ids: Vec<ObjectId> = wanted.iter().map(|(_, id)| *id).collect();
        // A header takes less than a hundred bytes.
        let limit = MAX_CONTENT_BYTES + 128 * ids.len() as u64;
        let args = ["cat-file", "--batch"];
        let printed = Bytes::from(self.run(&args, lines(&ids), None, limit).await?);
        let found = output::object_contents(&printed)?;
        if found.len() != ids.len() {
            return Err(UnexpectedOutput("other objects than it was asked for").into());
        }
        found
            .into_iter()
            .zip(ids)
            .map(|((header, range), id)| {
                if header.id != id || header.kind != ObjectKind::Blob {
                    return Err(UnexpectedOutput("other objects than it was asked for").into());
                }
                Ok((id, printed.slice(range)))
            })
            .collect()
    }
}

fn lines(ids: &[ObjectId]) -> Bytes {
    let mut input = String::with_capacity(ids.len() * 65);
    for id in ids {
        input.push_str(&id.to_string());
        input.push('\n');
    }
    Bytes::from(input)
}
