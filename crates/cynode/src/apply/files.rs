//! Files that come out of a sandbox as a tar archive.
//!
//! Each file is staged under a number in one directory; one commit moves all of them into place.

use std::{
    collections::BTreeMap,
    io::{Read, Write as _},
    path::Path,
};

use cynode_archive::{Archive, Entry, Input, Kind, ReadError, Reader, components};
use cynode_patch::{Location, PriorState, Problem, escaped};
use rustix::{fs::fchmod, io::Errno};
use serde::Serialize;

use super::{
    RESERVED_NAME,
    commit::{CommitError, New, PlannedChange, Staging, errno, new_mode},
    is_reserved,
    summary::{repositories, warnings},
    tree::{LocalTree, Stamp, leads_outside},
};

/// Files, directories and links per fetch.
const MAX_ENTRIES: usize = 200_000;
/// Total size of their contents.
const MAX_BYTES: u64 = 4 * 1024 * 1024 * 1024;
/// Total length of their paths.
const MAX_PATH_BYTES: usize = 32 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The archive is malformed, or tries to skip the directory.
    #[error("what came out of the sandbox is refused: {0}")]
    Refused(String),
    #[error("{0}; nothing was changed")]
    TooLarge(String),
    /// Something in the local directory blocks the file.
    #[error("{path}: {reason}; nothing was changed")]
    InTheWay { path: String, reason: String },
    #[error("reading what came out of the sandbox failed")]
    Read(#[source] std::io::Error),
    #[error("reading the directory failed")]
    Directory(#[source] std::io::Error),
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// A file that was fetched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReceivedFile {
    pub path: String,
    /// `create` or `replace`.
    pub operation: &'static str,
    pub size: u64,
    /// Warnings, such as `executable`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<&'static str>,
}

/// An entry that was not fetched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SkippedEntry {
    pub path: String,
    pub reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Received {
    pub files: Vec<ReceivedFile>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_behind: Vec<SkippedEntry>,
}

/// Limits of one archive.
#[derive(Clone, Copy, Debug)]
pub(super) struct FetchLimits {
    pub(super) entries: usize,
    pub(super) bytes: u64,
    pub(super) path_bytes: usize,
}

impl Default for FetchLimits {
    fn default() -> Self {
        Self {
            entries: MAX_ENTRIES,
            bytes: MAX_BYTES,
            path_bytes: MAX_PATH_BYTES,
        }
    }
}

/// Unpacks an archive below `directory`, at `prefix`. Calls `show` with the planned changes before
/// it makes any.
pub fn receive(
    directory: &Path,
    prefix: &[u8],
    archive: impl Read,
    show: impl FnOnce(&Received),
) -> Result<Received, FilesError> {
    receive_within(directory, prefix, archive, FetchLimits::default(), show)
}

pub(super) fn receive_within(
    directory: &Path,
    prefix: &[u8],
    archive: impl Read,
    limits: FetchLimits,
    show: impl FnOnce(&Received),
) -> Result<Received, FilesError> {
    let tree = LocalTree::open(directory).map_err(FilesError::Directory)?;
    let mut receiver = Receiver {
        staging: Staging::new(&tree)?,
        prefix,
        limits,
        staged: BTreeMap::new(),
        entries: 0,
        bytes: 0,
        path_bytes: 0,
        left_behind: Vec::new(),
    };
    let mut archive = Archive::new(ArchiveSource(Reader::new(archive)));
    while let Some(entry) = archive.next_entry()? {
        receiver.entry(&entry, &mut archive)?;
    }
    if receiver.entries == 0 && !archive.has_end_marker() {
        return Err(FilesError::Refused("the archive is empty".to_owned()));
    }
    receiver.finish(&tree, show)
}

/// Adapts the archive reader, so that its errors differ from write errors.
struct ArchiveSource<R>(Reader<R>);

impl<R: Read> Input for ArchiveSource<R> {
    type Error = FilesError;

    fn take(&mut self, limit: usize) -> Result<&[u8], FilesError> {
        self.0.take(limit).map_err(|error| match error {
            ReadError::Archive(error) => error.into(),
            ReadError::Io(error) => FilesError::Read(error),
        })
    }
}

impl From<cynode_archive::Error> for FilesError {
    fn from(error: cynode_archive::Error) -> Self {
        Self::Refused(error.to_string())
    }
}

/// A staged entry.
struct StagedEntry {
    /// Absent for a directory.
    name: Option<String>,
    /// The type and the permissions.
    mode: u32,
    size: u64,
}

struct Receiver<'a> {
    staging: Staging<'a>,
    prefix: &'a [u8],
    limits: FetchLimits,
    staged: BTreeMap<Location, StagedEntry>,
    /// Entries received so far.
    entries: usize,
    bytes: u64,
    path_bytes: usize,
    left_behind: Vec<SkippedEntry>,
}

impl Receiver<'_> {
    fn entry<R: Read>(
        &mut self,
        entry: &Entry,
        archive: &mut Archive<ArchiveSource<R>>,
    ) -> Result<(), FilesError> {
        let path = [self.prefix, b"/", &entry.path].concat();
        self.entries += 1;
        self.path_bytes += path.len();
        self.bytes = self.bytes.saturating_add(entry.size);
        self.check_limits()?;
        let parts: Vec<&[u8]> = components(&path).collect();
        if parts.is_empty() {
            // The workspace itself.
            return Ok(());
        }
        let joined = parts.join(&b'/');
        let location = match Location::parse(&joined) {
            Ok(location) => location,
            Err(reason) => {
                self.skip(&joined, reason);
                return Ok(());
            }
        };
        if is_reserved(&location) {
            self.skip(&joined, RESERVED_NAME);
            return Ok(());
        }
        let name = format!("new-{}", self.entries);
        let (mode, name) = match entry.kind {
            Kind::Directory => (0o040_000, None),
            Kind::File => {
                self.write(&name, entry, archive)
                    .map_err(|error| with_location(error, &location))?;
                (0o100_000 | entry.mode & 0o777, Some(name))
            }
            Kind::Symlink if leads_outside(&location, &entry.link) => {
                self.skip(&joined, "the link leads out of the directory");
                return Ok(());
            }
            Kind::Symlink => {
                let linked = self.staging.link(&name, &entry.link);
                linked.map_err(|errno| unchanged_error(errno, &location))?;
                (0o120_000, Some(name))
            }
            Kind::HardLink | Kind::Special => {
                self.skip(&joined, "it is a hard link, a device or a pipe");
                return Ok(());
            }
        };
        let staged = StagedEntry {
            name,
            mode,
            size: entry.size,
        };
        let is_directory = entry.kind == Kind::Directory;
        match self.staged.insert(location, staged) {
            Some(earlier) if !is_directory || earlier.name.is_some() => Err(FilesError::Refused(
                format!("the archive has {} twice", escaped(&joined)),
            )),
            _ => Ok(()),
        }
    }

    fn check_limits(&self) -> Result<(), FilesError> {
        let FetchLimits {
            entries,
            bytes,
            path_bytes,
        } = self.limits;
        let too_large = |what: String| Err(FilesError::TooLarge(what));
        if self.entries > entries {
            return too_large(format!("there are more than {entries} files to fetch"));
        }
        if self.bytes > bytes {
            return too_large(format!("the files to fetch have more than {bytes} bytes"));
        }
        if self.path_bytes > path_bytes {
            return too_large(format!(
                "the names of the files to fetch have more than {path_bytes} bytes"
            ));
        }
        Ok(())
    }

    fn skip(&mut self, path: &[u8], reason: &'static str) {
        self.left_behind.push(SkippedEntry {
            path: String::from_utf8_lossy(path).into_owned(),
            reason,
        });
    }

    fn write<R: Read>(
        &self,
        name: &str,
        entry: &Entry,
        archive: &mut Archive<ArchiveSource<R>>,
    ) -> Result<(), WriteError> {
        let mut file = self.staging.create(name).map_err(WriteError::Write)?;
        let mut failure = None;
        let read = archive.read(|piece| {
            file.write_all(piece).map_err(|error| {
                failure = Some(errno(&error));
                FilesError::Read(error)
            })
        });
        match (read, failure) {
            (_, Some(errno)) => Err(WriteError::Write(errno)),
            (Err(error), None) => Err(WriteError::Archive(error)),
            (Ok(()), None) => fchmod(&file, new_mode(entry.mode)).map_err(WriteError::Write),
        }
    }

    fn finish(
        self,
        tree: &LocalTree,
        show: impl FnOnce(&Received),
    ) -> Result<Received, FilesError> {
        let mut states = Vec::with_capacity(self.staged.len());
        let mut above: Option<(&Location, bool)> = None;
        for (location, staged) in &self.staged {
            // The archive reader rejects entries below a symlink, but not entries below a file.
            if let Some((file, true)) = above
                && file.is_above(location)
            {
                return Err(FilesError::Refused(format!(
                    "{} is below a file of the archive",
                    escaped(location.as_bytes())
                )));
            }
            above = Some((location, staged.name.is_some()));
            states.push(prior_state(tree, location, staged)?);
        }
        let received = Received {
            files: self.summary(&states),
            left_behind: self.left_behind,
        };
        show(&received);
        let changes: Vec<PlannedChange<'_>> = self
            .staged
            .iter()
            .zip(&states)
            .map(|((location, staged), before)| PlannedChange {
                location,
                before,
                new: Some(staged.name.as_deref().map_or(New::Directory, New::Staged)),
            })
            .collect();
        self.staging.commit(&changes)?;
        Ok(received)
    }

    fn summary(&self, states: &[PriorState<Stamp>]) -> Vec<ReceivedFile> {
        let created = self.staged.keys().map(Location::as_bytes);
        let repositories = repositories(created);
        self.staged
            .iter()
            .zip(states)
            .filter(|((_, staged), _)| staged.name.is_some())
            .map(|((location, staged), before)| ReceivedFile {
                path: String::from_utf8_lossy(location.as_bytes()).into_owned(),
                operation: if matches!(before, PriorState::Nothing) {
                    "create"
                } else {
                    "replace"
                },
                size: staged.size,
                warnings: warnings(location.as_bytes(), Some(staged.mode), &repositories),
            })
            .collect()
    }
}

/// The current content at a location; an error if it can't be replaced.
fn prior_state(
    tree: &LocalTree,
    location: &Location,
    staged: &StagedEntry,
) -> Result<PriorState<Stamp>, FilesError> {
    let in_the_way = |reason: &str| {
        Err(FilesError::InTheWay {
            path: escaped(location.as_bytes()),
            reason: reason.to_owned(),
        })
    };
    let is_directory = staged.name.is_none();
    match tree.prior_state(location) {
        // An existing directory is merged into, so nothing is replaced.
        Ok(PriorState::Directory(_)) if is_directory => Ok(PriorState::Nothing),
        Ok(PriorState::Directory(_)) => in_the_way("there is a directory"),
        Ok(PriorState::File(_)) if is_directory => in_the_way("there is a file or a link"),
        Ok(state) => Ok(state),
        Err(Problem::Reject(reason)) => in_the_way(&reason),
        Err(Problem::Failure(error)) => Err(FilesError::Directory(error)),
    }
}

enum WriteError {
    Archive(FilesError),
    Write(Errno),
}

fn with_location(error: WriteError, location: &Location) -> FilesError {
    match error {
        WriteError::Archive(error) => error,
        WriteError::Write(errno) => unchanged_error(errno, location),
    }
}

fn unchanged_error(source: Errno, location: &Location) -> FilesError {
    CommitError::Unchanged {
        path: escaped(location.as_bytes()),
        source,
    }
    .into()
}
