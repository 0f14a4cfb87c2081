//! The artifacts of a job: the files in `/job/artifacts` when it ends. They are copied to the node's
//! own directory and kept until the job is acknowledged.
//!
//! Invariants: only regular files are copied, and no link is followed. The agent reads them; the host
//! opens the job directory only when the sandbox is gone, so that no process can change it. The list
//! is written last, so a worker that dies before that starts over.

use std::{
    ffi::CStr,
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::OwnedFd,
    path::PathBuf,
    time::Duration,
};

use cynode_api::{
    Base64Bytes, ErrorCode, FileType, ListRequest, ListResult, artifact_limits,
    file_limits::{MAX_DEPTH, MAX_ENTRIES},
    sba::limits::MAX_ARTIFACTS,
};
use cynode_sba_proto::{ARTIFACTS, FileOp, JOB, Reply};
use cynode_service::{ApiError, files};
use rustix::fs::{
    AtFlags, Dir, FileType as Kind, Mode, OFlags, ResolveFlags, fstat, openat2, statat,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{directory, files::JobFiles};
use crate::{
    journal::blocking,
    sandbox::{REPLY_TIMEOUT, unexpected},
    sessions::Live,
    tree,
};

/// Total size of a job's artifacts.
const MAX_TOTAL_BYTES: u64 = 1 << 30;
/// Length of `jobs/<job_id>/`, below which the orchestrator stores an artifact.
const PREFIX_BYTES: usize = 42;
/// Time for the agent to hash a file before it sends the first byte.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(300);

/// An artifact on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptArtifact {
    /// Relative to `/job/artifacts`.
    pub(crate) path: String,
    pub(crate) size: u64,
    pub(crate) sha256: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArtifactList {
    pub(super) artifacts: Vec<KeptArtifact>,
    /// Number of files that were not kept.
    pub(super) omitted: u64,
}

impl ArtifactList {
    /// Reads the list of a complete collection; `None` if there is none.
    pub(super) fn read(files: &JobFiles) -> io::Result<Option<Self>> {
        let list = files.read_artifact_list()?;
        Ok(list.as_deref().map(serde_json::from_slice).transpose()?)
    }

    /// The list as it appears in the job object.
    pub(super) fn to_json(&self) -> Vec<serde_json::Value> {
        let artifacts = self.artifacts.iter();
        artifacts
            .filter_map(|artifact| serde_json::to_value(artifact).ok())
            .collect()
    }
}

/// Opens an artifact of a job; `None` if it has none at this path.
pub(super) fn open(files: &JobFiles, path: &str) -> io::Result<Option<(KeptArtifact, File)>> {
    let list = ArtifactList::read(files)?.unwrap_or_default();
    let found = list
        .artifacts
        .into_iter()
        .enumerate()
        .find(|(_, artifact)| artifact.path == path);
    let Some((number, artifact)) = found else {
        return Ok(None);
    };
    let file = fs_err::File::open(files.artifacts().join(number.to_string()))?;
    Ok(Some((artifact, file.into_parts().0)))
}

/// A collection of artifacts in progress.
#[derive(Debug)]
struct Collection {
    files: JobFiles,
    staged: PathBuf,
    list: ArtifactList,
    bytes: u64,
}

impl Collection {
    /// Removes the leftovers of an interrupted attempt and starts over.
    fn new(files: &JobFiles) -> io::Result<Self> {
        let staged = files.artifacts().with_extension("new");
        for leftover in [&staged, &files.artifacts()] {
            tree::remove(leftover)?;
        }
        fs_err::create_dir_all(&staged)?;
        Ok(Self {
            files: files.clone(),
            staged,
            list: ArtifactList::default(),
            bytes: 0,
        })
    }

    /// Returns whether the limits allow another file with this path and claimed size.
    fn admits(&self, path: &str, size: u64) -> bool {
        artifact_limits::is_path(path)
            && path.len() + PREFIX_BYTES <= artifact_limits::MAX_PATH
            && self.list.artifacts.len() < MAX_ARTIFACTS
            && self.bytes.saturating_add(size) <= MAX_TOTAL_BYTES
    }

    fn begin(&self) -> io::Result<KeptFile> {
        let path = self.staged.join(self.list.artifacts.len().to_string());
        let file = fs_err::File::create(path)?.into_parts().0;
        Ok(KeptFile {
            file,
            hash: Sha256::new(),
            size: 0,
            left: MAX_TOTAL_BYTES - self.bytes,
        })
    }

    fn keep(&mut self, path: String, (size, sha256): (u64, String)) {
        self.bytes += size;
        self.list
            .artifacts
            .push(KeptArtifact { path, size, sha256 });
    }

    fn finish(self) -> io::Result<ArtifactList> {
        // A file that was started and then rejected.
        let unlisted = self.staged.join(self.list.artifacts.len().to_string());
        drop(fs_err::remove_file(unlisted));
        fs_err::rename(&self.staged, self.files.artifacts())?;
        let json = serde_json::to_vec(&self.list)?;
        files::replace(&self.files.artifact_list(), &json)?;
        Ok(self.list)
    }
}

/// A file of a collection that is being written.
#[derive(Debug)]
struct KeptFile {
    file: File,
    hash: Sha256,
    size: u64,
    /// Bytes that may still be written.
    left: u64,
}

impl KeptFile {
    /// Appends a piece. Returns false if the file exceeds the limit.
    fn push(&mut self, piece: &[u8]) -> io::Result<bool> {
        let length = piece.len() as u64;
        let Some(left) = self.left.checked_sub(length) else {
            return Ok(false);
        };
        self.file.write_all(piece)?;
        self.hash.update(piece);
        (self.size, self.left) = (self.size + length, left);
        Ok(true)
    }

    /// Flushes the file to disk; returns its size and its hash.
    fn store(self) -> io::Result<(u64, String)> {
        self.file.sync_data()?;
        Ok((self.size, hex::encode(self.hash.finalize())))
    }
}

/// A regular file as the agent lists it.
#[derive(Debug)]
struct ListedFile {
    /// The absolute path, as bytes.
    full: Vec<u8>,
    /// The path relative to `/job/artifacts`; `None` if it is not UTF-8.
    path: Option<String>,
    size: u64,
}

/// Copies the artifacts through the agent. Kills all other processes of the sandbox first, so that
/// the files no longer change. Fails only if the agent or the node's disk does.
pub(super) async fn take_by_agent(live: &Live, files: &JobFiles) -> Result<ArtifactList, ApiError> {
    if list(live, files).await?.0.is_empty() {
        return Ok(ArtifactList::default());
    }
    directory::kill_everything(live).await?;
    let (listed, is_truncated) = list(live, files).await?;
    let mut collection = Collection::new(files).map_err(|error| not_stored(&error))?;
    collection.list.omitted += u64::from(is_truncated);
    for file in listed {
        let path = file.path.filter(|path| collection.admits(path, file.size));
        let Some(path) = path else {
            collection.list.omitted += 1;
            continue;
        };
        match take_file(live, &collection, file.full).await? {
            Some(kept) => {
                let stored = blocking(move || kept.store()).await;
                collection.keep(path, stored.map_err(|error| not_stored(&error))?);
            }
            None => collection.list.omitted += 1,
        }
    }
    blocking(move || collection.finish())
        .await
        .map_err(|error| not_stored(&error))
}

fn not_stored(error: &io::Error) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        format!("storing the artifacts of a job: {error}"),
    )
}

/// Lists the regular files below `/job/artifacts`; true if the list is truncated. Lists `/job`
/// itself, because a listing follows links in its own path but not below it.
async fn list(live: &Live, files: &JobFiles) -> Result<(Vec<ListedFile>, bool), ApiError> {
    let request = ListRequest {
        path: Some(JOB.to_owned()),
        depth: Some(MAX_DEPTH),
        max_entries: Some(MAX_ENTRIES),
        hidden: Some(true),
        ..ListRequest::default()
    };
    let mut channel = directory::open(live, FileOp::List { request }).await?;
    let spool = files.directory().parent().unwrap_or(files.directory());
    let body = channel.body::<ListResult>(REPLY_TIMEOUT, spool).await;
    let ListResult { entries, truncated } = match body {
        Ok(body) => body.value,
        // Sandboxes of earlier versions have no job directory.
        Err(error) if error.is(ErrorCode::NotFound) => return Ok((Vec::new(), false)),
        Err(error) => return Err(error),
    };
    let below = format!("{ARTIFACTS}/");
    let file = |entry: cynode_api::FileEntry| {
        let relative = entry.path.strip_prefix(&below)?.to_owned();
        if entry.kind != FileType::File {
            return None;
        }
        let is_text = entry.path_b64.is_none();
        Some(ListedFile {
            full: entry
                .path_b64
                .map_or_else(|| entry.path.into_bytes(), |bytes| bytes.0),
            path: is_text.then_some(relative),
            size: entry.size,
        })
    };
    Ok((entries.into_iter().filter_map(file).collect(), truncated))
}

/// Copies one file; `None` if it can't be read, or exceeds the limit.
async fn take_file(
    live: &Live,
    collection: &Collection,
    full: Vec<u8>,
) -> Result<Option<KeptFile>, ApiError> {
    let op = FileOp::Read {
        path: Base64Bytes(full),
        start: 0,
        end: None,
    };
    let mut channel = directory::open(live, op).await?;
    match channel.reply(FIRST_BYTE_TIMEOUT).await {
        Ok(Reply::Stat(_)) => {}
        Ok(other) => return Err(unexpected(&format!("{other:?}"))),
        Err(error) if error.is(ErrorCode::AgentUnavailable) => return Err(error),
        Err(_) => return Ok(None),
    }
    let mut kept = collection.begin().map_err(|error| not_stored(&error))?;
    loop {
        match channel.data(REPLY_TIMEOUT).await {
            Ok(Some(piece)) => {
                if !kept.push(&piece).map_err(|error| not_stored(&error))? {
                    return Ok(None);
                }
            }
            Ok(None) => return Ok(Some(kept)),
            Err(error) if error.is(ErrorCode::AgentUnavailable) => return Err(error),
            Err(_) => return Ok(None),
        }
    }
}

/// Copies the artifacts from the job directory of a sandbox that is gone.
pub(super) fn take_from_disk(job: &OwnedFd, files: &JobFiles) -> io::Result<ArtifactList> {
    let name = ARTIFACTS.rsplit('/').next().unwrap_or_default();
    let top = match open_directory(job, name) {
        Ok(top) => top,
        // The job removed the directory, or replaced it with something else.
        Err(error) if is_absent(&error) => return Ok(ArtifactList::default()),
        Err(error) => return Err(error),
    };
    let (mut found, mut omitted) = walk(&top)?;
    if found.is_empty() && omitted == 0 {
        return Ok(ArtifactList::default());
    }
    found.sort_unstable();
    let mut collection = Collection::new(files)?;
    for path in found {
        let Ok(file) = open_beneath(&top, &path) else {
            omitted += 1;
            continue;
        };
        let size = u64::try_from(fstat(&file)?.st_size).unwrap_or(u64::MAX);
        if !collection.admits(&path, size) {
            omitted += 1;
            continue;
        }
        match copy(file, collection.begin()?)? {
            Some(kept) => collection.keep(path, kept.store()?),
            None => omitted += 1,
        }
    }
    collection.list.omitted = omitted;
    collection.finish()
}

fn copy(mut file: File, mut kept: KeptFile) -> io::Result<Option<KeptFile>> {
    let mut buffer = vec![0; 256 * 1024];
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(Some(kept));
        }
        if !kept.push(&buffer[..count])? {
            return Ok(None);
        }
    }
}

/// Lists the regular files below a directory, and counts those that can't be listed.
fn walk(top: &OwnedFd) -> io::Result<(Vec<String>, u64)> {
    let (mut found, mut omitted, mut seen) = (Vec::new(), 0, 0);
    let mut directories = vec![(".".to_owned(), 0)];
    while let Some((directory, depth)) = directories.pop() {
        let opened = match open_directory(top, &directory) {
            Ok(opened) => opened,
            Err(error) if is_absent(&error) => continue,
            Err(error) => return Err(error),
        };
        for entry in Dir::new(opened)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            seen += 1;
            if seen > MAX_ENTRIES {
                return Ok((found, omitted + 1));
            }
            let kind = match entry.file_type() {
                Kind::Unknown => kind_of(top, &directory, name)?,
                known => known,
            };
            let path = name.to_str().map(|name| match directory.as_str() {
                "." => name.to_owned(),
                directory => format!("{directory}/{name}"),
            });
            match (kind, path) {
                (Kind::Directory, Ok(path)) if depth < MAX_DEPTH => {
                    directories.push((path, depth + 1));
                }
                (Kind::RegularFile, Ok(path)) => found.push(path),
                (Kind::Directory | Kind::RegularFile, _) => omitted += 1,
                _ => {}
            }
        }
    }
    Ok((found, omitted))
}

/// The type of an entry, for file systems whose directory entries lack it.
fn kind_of(top: &OwnedFd, directory: &str, name: &CStr) -> io::Result<Kind> {
    let directory = open_directory(top, directory)?;
    let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(Kind::from_raw_mode(stat.st_mode))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        rustix::io::Errno::from_io_error(error),
        Some(
            rustix::io::Errno::NOENT
                | rustix::io::Errno::NOTDIR
                | rustix::io::Errno::LOOP
                | rustix::io::Errno::XDEV
        )
    )
}

/// Opening fails if the path has a link or crosses a mount, and if it leads out of the directory.
const CONFINED: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Opens a directory below another one.
pub(crate) fn open_directory(at: &OwnedFd, path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat2(at, path, flags, Mode::empty(), CONFINED)?)
}

/// Opens a regular file below a directory. Does not block, even on a pipe.
pub(super) fn open_beneath(at: &OwnedFd, path: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = openat2(at, path, flags, Mode::empty(), CONFINED)?;
    if Kind::from_raw_mode(fstat(&opened)?.st_mode) == Kind::RegularFile {
        Ok(File::from(opened))
    } else {
        Err(io::Error::other("not a regular file"))
    }
}

#[cfg(test)]
mod tests;
