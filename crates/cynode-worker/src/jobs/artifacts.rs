//! The artifacts of a job: files that it left in `/job/artifacts`, kept on the node until the job is
//! acknowledged.
//!
//! Invariants: only regular files are taken, and no link is followed. They come through the agent,
//! or from the disk once the sandbox is gone; the host opens nothing that a live sandbox can change.
//! The list is written last, so a worker that dies before starts over.

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

/// All artifacts of a job together.
const MAX_TOTAL_BYTES: u64 = 1 << 30;
/// The orchestrator stores an artifact below `jobs/<job_id>/`.
const PREFIX_BYTES: usize = 42;
/// How long the agent may take to hash a file before it sends the first byte.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(300);

/// An artifact on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptArtifact {
    /// Relative to the directory of artifacts.
    pub(crate) path: String,
    pub(crate) size: u64,
    pub(crate) sha256: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArtifactList {
    pub(super) artifacts: Vec<KeptArtifact>,
    /// Files that were not kept.
    pub(super) omitted: u64,
}

impl ArtifactList {
    /// The list of artifacts that were kept completely, if they were.
    pub(super) fn read(files: &JobFiles) -> io::Result<Option<Self>> {
        let list = files.read_artifact_list()?;
        Ok(list.as_deref().map(serde_json::from_slice).transpose()?)
    }

    /// The members of the job object.
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

/// Artifacts while they are taken.
#[derive(Debug)]
struct Collection {
    files: JobFiles,
    staged: PathBuf,
    list: ArtifactList,
    bytes: u64,
}

impl Collection {
    /// Starts over after an attempt that a crash interrupted.
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

    /// Returns whether another file may be kept, by its path and what it says about its size.
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
        self.list.artifacts.push(KeptArtifact { path, size, sha256 });
    }

    fn finish(self) -> io::Result<ArtifactList> {
        // A file that was begun and not kept.
        let unlisted = self.staged.join(self.list.artifacts.len().to_string());
        drop(fs_err::remove_file(unlisted));
        fs_err::rename(&self.staged, self.files.artifacts())?;
        let json = serde_json::to_vec(&self.list)?;
        files::replace(&self.files.artifact_list(), &json)?;
        Ok(self.list)
    }
}

/// A file of a collection while it is written.
#[derive(Debug)]
struct KeptFile {
    file: File,
    hash: Sha256,
    size: u64,
    /// What may still be written.
    left: u64,
}

impl KeptFile {
    /// Returns false if the file turns out to be larger than what may be kept.
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

    /// Makes the file survive a crash of the host; returns its size and its hash.
    fn store(self) -> io::Result<(u64, String)> {
        self.file.sync_data()?;
        Ok((self.size, hex::encode(self.hash.finalize())))
    }
}

/// A regular file as the agent lists it.
#[derive(Debug)]
struct ListedFile {
    /// Absolute, as bytes.
    full: Vec<u8>,
    /// Relative to the directory of artifacts; `None` if it is not UTF-8.
    path: Option<String>,
    size: u64,
}

/// Takes the artifacts through the agent. Everything else in the sandbox is killed first, so that
/// nothing changes meanwhile. An error is the agent's or the disk's.
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

/// The regular files below the directory of artifacts, and whether there are more than are listed.
/// Lists from the directory above, because links are followed only in the listed path itself.
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
        // A sandbox of an earlier version has no such directory.
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

/// Takes one file; `None` if it can't be read, or is larger than it was listed.
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

/// Takes the artifacts from the job directory of a sandbox that is gone.
pub(super) fn take_from_disk(job: &OwnedFd, files: &JobFiles) -> io::Result<ArtifactList> {
    let name = ARTIFACTS.rsplit('/').next().unwrap_or_default();
    let top = match open_directory(job, name) {
        Ok(top) => top,
        // The job removed it, or put something else in its place.
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

/// Regular files below a directory, and the number of those whose paths can't be listed.
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

/// The type of an entry on a file system that does not list it.
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

/// No link, mount or `..` leads out of the directory.
const CONFINED: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Opens a directory below another one.
pub(crate) fn open_directory(at: &OwnedFd, path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat2(at, path, flags, Mode::empty(), CONFINED)?)
}

/// Opens a regular file below a directory. Nothing that could block is opened.
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
