//! Brings a local directory in: packs it and uploads it as an artifact of a task, which becomes the
//! workspace of a session or a job.
//!
//! Files that hold secrets stay out. They are named, so that nobody wonders where they are. What
//! holds a secret is decided by the scanner of `cynode-policy`; the gate scans what is sent again.

mod git;
mod pack;
mod select;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use cynode_api::{ArtifactId, TaskId, artifact_limits};
use cynode_client::UserClient;
use cynode_policy::{HeldSecrets, Scanner};
use serde::Serialize;
use uuid::Uuid;

use self::select::{Bounds, Selection};
use crate::{
    archive::{self, PieceWriter},
    failure::Failure,
    output::{self, Progress},
    sanitize,
    session::transfer::{body, feed, join_transfer, local_failure, print_flagged},
};

/// Files, directories and links of a directory that is brought in.
const MAX_ENTRIES: usize = 200_000;
/// Entries that were left out and are named.
const MAX_NAMED: usize = 50;

#[derive(Clone, Debug, Default)]
pub struct BringOptions {
    /// Leave out what git ignores. `.git` itself comes in.
    pub gitignore: bool,
}

/// An entry that was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Relative to the directory. Characters that a terminal would not show are escaped.
    pub path: String,
    pub reason: String,
}

impl Skipped {
    fn new(path: &Path, reason: impl Into<String>) -> Self {
        Self {
            path: sanitize::line(&path.to_string_lossy()),
            reason: reason.into(),
        }
    }
}

/// A directory that was uploaded.
#[derive(Clone, Debug)]
pub struct Brought {
    pub artifact: ArtifactId,
    /// Files and links.
    pub files: u64,
    /// The size of their contents.
    pub bytes: u64,
    pub skipped: Vec<Skipped>,
}

/// Uploads a directory as an artifact of a task, for `workspace_ref: artifact:<id>`. Names what
/// stays out on stderr.
pub async fn bring(
    client: &UserClient,
    task: TaskId,
    directory: &Path,
    options: &BringOptions,
) -> Result<Brought, Failure> {
    let root = root(directory)?;
    let progress = Progress::start("reading the directory");
    let listed = if options.gitignore {
        Some(git::list(&root).await?)
    } else {
        None
    };
    // Only shapes are known here: the secrets that the system holds are the gate's to find.
    let scanner = Scanner::new(HeldSecrets::new([0; 32]), true);
    let selection = {
        let scanner = scanner.clone();
        blocking(move || Selection::new(&root, listed, &scanner, Bounds::default())).await??
    };
    drop(progress);
    let progress = Progress::of_total("copying", Some(selection.archive_bytes));
    let (sender, receiver) = archive::channel();
    let packer = tokio::task::spawn_blocking(move || {
        feed(PieceWriter::new(sender), |writer| {
            pack::pack(selection, &scanner, writer)
        })
    });
    let path = format!("workspaces/{}.tar", Uuid::now_v7());
    let sent = client
        .put_artifact(
            task,
            &path,
            Some("application/x-tar"),
            body(receiver, progress),
        )
        .await;
    let (packed, artifact) = join_transfer(packer.await, sent)?;
    print_skipped(&packed.skipped);
    print_flagged(&artifact.flags);
    Ok(Brought {
        artifact: artifact.id,
        files: packed.files,
        bytes: packed.bytes,
        skipped: packed.skipped,
    })
}

/// The directory, without links on the way.
pub fn root(directory: &Path) -> Result<PathBuf, Failure> {
    let root = fs_err::canonicalize(directory).map_err(|error| local_failure(&error))?;
    if root.is_dir() {
        Ok(root)
    } else {
        Err(Failure::usage(format!(
            "{} is not a directory",
            sanitize::line(&directory.to_string_lossy())
        )))
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Failure::internal(error.to_string()))
}

fn print_skipped(skipped: &[Skipped]) {
    for Skipped { path, reason } in skipped.iter().take(MAX_NAMED) {
        output::message(&format!("cynode: left out {path}: {reason}"));
    }
    let more = skipped.len().saturating_sub(MAX_NAMED);
    if more > 0 {
        output::message(&format!("cynode: left out {more} more"));
    }
}

fn too_large(message: String) -> Failure {
    Failure::new(crate::failure::USAGE, "too_large", message).remedy(
        "Leave out what git ignores with --gitignore, bring a smaller directory in, or copy parts \
         of it into the session with 'cynode session cp -r'.",
    )
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            entries: MAX_ENTRIES,
            bytes: artifact_limits::MAX_BYTES,
        }
    }
}
