//! Uploads a local directory: packs it and stores it as an artifact of a task, which becomes the
//! workspace of a session or a job.
//!
//! Files that contain secrets are skipped and reported by name. The scanner of `cynode-policy`
//! finds them; the gate scans the upload again.

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

use self::select::{Selection, UploadLimits};
use crate::{
    archive::{self, PieceWriter},
    failure::Failure,
    output::{self, Progress},
    sanitize,
    session::transfer::{body, feed, join_transfer, local_failure, print_flagged},
};

/// Files, directories and links per upload.
const MAX_ENTRIES: usize = 200_000;
/// Skipped entries that are reported by name.
const MAX_NAMED: usize = 50;

#[derive(Clone, Debug, Default)]
pub struct BringOptions {
    /// Skip files that git ignores. `.git` itself is uploaded.
    pub gitignore: bool,
}

/// An entry that was not uploaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Relative to the directory. Unprintable characters are escaped.
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

/// An uploaded directory.
#[derive(Clone, Debug)]
pub struct UploadedDirectory {
    pub artifact: ArtifactId,
    /// Number of files and links.
    pub files: u64,
    /// Total size of their contents.
    pub bytes: u64,
    pub skipped: Vec<Skipped>,
}

/// Uploads a directory as an artifact of a task, for `workspace_ref: artifact:<id>`. Reports
/// skipped entries on stderr.
pub async fn upload(
    client: &UserClient,
    task: TaskId,
    directory: &Path,
    options: &BringOptions,
) -> Result<UploadedDirectory, Failure> {
    let root = root(directory)?;
    let progress = Progress::start("reading the directory");
    let listed = if options.gitignore {
        Some(git::list(&root).await?)
    } else {
        None
    };
    // This scan knows only the shapes of secrets. The secrets that the system holds are known to
    // the gate, which scans again.
    let scanner = Scanner::new(HeldSecrets::new([0; 32]), true);
    let selection = {
        let scanner = scanner.clone();
        blocking(move || Selection::new(&root, listed, &scanner, UploadLimits::default())).await??
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
    Ok(UploadedDirectory {
        artifact: artifact.id,
        files: packed.files,
        bytes: packed.bytes,
        skipped: packed.skipped,
    })
}

/// The canonical path of the directory, without links.
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

impl Default for UploadLimits {
    fn default() -> Self {
        Self {
            entries: MAX_ENTRIES,
            bytes: artifact_limits::MAX_BYTES,
        }
    }
}
