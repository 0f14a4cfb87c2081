//! Unpacks a tar stream from a sandbox into a local directory. The archive is hostile input.
//!
//! Invariants: no entry writes outside the target directory. [`cynode_archive`] refuses absolute
//! paths, `..` and paths below a link of the same archive, as the gate and the agent do; the tree
//! walks every path from the target's descriptor, one component at a time, and never follows a
//! symbolic link. Links that point outside, hard links and special files are skipped and reported.
//! Nothing in a `.git` directory, in any spelling, is written: git runs programs that are named
//! there.
//! Files get only permission bits that the umask allows: no setuid, no owner. No archive makes
//! memory grow beyond the bounds of `cynode_archive` and [`MAX_DIRECTORY_BYTES`].

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    io::{self, Read, Write as _},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
};

use cynode_archive::{Archive, Input, Kind, ReadError, Reader, components};
use cynode_patch::spells_git;
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, fchmod, mkdirat, openat, statat, symlinkat, unlinkat},
    io::Errno,
};

/// Skipped entries that are reported by name; the rest is only counted.
const MAX_SKIPPED_NAMES: usize = 50;
/// Directories on the way to an entry. An agent exports no deeper tree.
const MAX_DEPTH: usize = 256;
/// Memory for the paths of created directories, whose modes are set last.
const MAX_DIRECTORY_BYTES: usize = 64 * 1024 * 1024;
/// Memory for a created directory beside its path.
const DIRECTORY_OVERHEAD: usize = 64;

#[derive(Debug, Default)]
pub struct Unpacked {
    pub files: u64,
    /// The first skipped entries, each with its reason.
    pub skipped: Vec<String>,
    pub skipped_count: u64,
    /// The first `.git` directories and files, which are left out on purpose.
    pub git_directories: BTreeSet<Vec<u8>>,
}

impl Unpacked {
    /// Leaves out an entry at or below `.git`.
    fn leave_out(&mut self, git: Vec<u8>) {
        if self.git_directories.len() < MAX_SKIPPED_NAMES {
            self.git_directories.insert(git);
        }
    }

    fn skip(&mut self, name: &[u8], reason: &str) {
        self.skipped_count += 1;
        if self.skipped.len() < MAX_SKIPPED_NAMES {
            self.skipped
                .push(format!("{}: {reason}", String::from_utf8_lossy(name)));
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The archive is malformed, ambiguous, or tries to leave the target.
    #[error("the archive is refused: {0}")]
    Refused(#[from] cynode_archive::Error),
    #[error(
        "the entry '{}' is more than {MAX_DEPTH} directories deep",
        shown(.0)
    )]
    TooDeep(Vec<u8>),
    #[error(
        "the archive creates too many directories: their paths take more than {} MiB",
        MAX_DIRECTORY_BYTES >> 20
    )]
    TooManyDirectories,
    #[error("{}: {source}", String::from_utf8_lossy(.name))]
    Write { name: Vec<u8>, source: io::Error },
    #[error("can't read the archive: {0}")]
    Read(io::Error),
    #[error("{0}")]
    Target(io::Error),
}

/// The first bytes of a path, which may have thousands.
fn shown(path: &[u8]) -> String {
    let start = &path[..path.len().min(64)];
    let dots = if start.len() < path.len() { "…" } else { "" };
    format!("{}{dots}", start.escape_ascii())
}

fn refused(path: &[u8], problem: &'static str) -> Error {
    Error::Refused(cynode_archive::Error::Entry {
        path: path.to_vec(),
        problem,
    })
}

/// The archive's bytes, with errors that keep reading apart from writing.
struct UnpackSource<R>(Reader<R>);

impl<R: Read> Input for UnpackSource<R> {
    type Error = Error;

    fn take(&mut self, limit: usize) -> Result<&[u8], Error> {
        self.0.take(limit).map_err(|error| match error {
            ReadError::Archive(error) => Error::Refused(error),
            ReadError::Io(error) => Error::Read(error),
        })
    }
}

/// Unpacks below `target`, which is created if it is missing. No file or directory gets permissions
/// in `umask`. Calls `progress` with the size of each file.
pub fn unpack(
    from: impl Read,
    target: &Path,
    umask: Mode,
    mut progress: impl FnMut(u64),
) -> Result<Unpacked, Error> {
    let mut tree = Tree::open(target, umask)?;
    let mut unpacked = Unpacked::default();
    let mut archive = Archive::new(UnpackSource(Reader::new(from)));
    let mut is_empty = true;
    while let Some(entry) = archive.next_entry()? {
        is_empty = false;
        let name = &entry.path;
        let path: Vec<&[u8]> = components(name).collect();
        if let Some(depth) = path.iter().position(|part| spells_git(part)) {
            unpacked.leave_out(path[..=depth].join(&b'/'));
            continue;
        }
        let mode = Mode::from_bits_truncate(entry.mode);
        match entry.kind {
            Kind::Directory => tree.directory(&path, mode, name)?,
            Kind::File => {
                tree.file(&path, mode, &mut archive, name)?;
                unpacked.files += 1;
                progress(entry.size);
            }
            Kind::Symlink => match check_link_target(&entry.link, path.len()) {
                Ok(()) => tree.symlink(&path, &entry.link, name)?,
                Err(reason) => unpacked.skip(name, reason),
            },
            Kind::HardLink => unpacked.skip(name, "hard link"),
            Kind::Special => unpacked.skip(name, "not a file, directory or link"),
        }
    }
    if is_empty && !archive.has_end_marker() {
        return Err(cynode_archive::Error::Archive("is empty").into());
    }
    tree.finish()?;
    Ok(unpacked)
}

/// Checks that a link at this depth (1 is in the root) points below the root, whatever other links
/// exist. `..` may only come first: after a name, which may itself be a link, it can lead anywhere.
fn check_link_target(target: &[u8], depth: usize) -> Result<(), &'static str> {
    if target.starts_with(b"/") {
        return Err("link to an absolute path");
    }
    let mut ups = 0;
    let mut after_name = false;
    for part in components(target) {
        if spells_git(part) {
            return Err("link to a .git directory");
        } else if part != b".." {
            after_name = true;
        } else if after_name {
            return Err("link with '..' in the middle");
        } else {
            ups += 1;
        }
    }
    // A link in the root has depth 1 and may not go up.
    if ups < depth {
        Ok(())
    } else {
        Err("link out of the directory")
    }
}

/// The target directory.
struct Tree {
    root: OwnedFd,
    umask: Mode,
    /// Modes of created directories. They are set last: a read-only directory can't be filled.
    modes: BTreeMap<Vec<u8>, Mode>,
    /// Memory that `modes` takes.
    directory_bytes: usize,
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

impl Tree {
    fn open(target: &Path, umask: Mode) -> Result<Self, Error> {
        let mut modes = BTreeMap::new();
        match fs_err::create_dir(target) {
            Ok(()) => drop(modes.insert(Vec::new(), Mode::from_bits_truncate(0o755))),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Error::Target(error)),
        }
        // The target itself may be a link: the user named it.
        let root = openat(
            CWD,
            target,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|error| {
            Error::Target(io::Error::other(format!(
                "{}: {}",
                target.display(),
                io::Error::from(error)
            )))
        })?;
        Ok(Self {
            root,
            umask,
            modes,
            directory_bytes: 0,
        })
    }

    /// Opens a directory of the tree and creates missing ones on the way.
    fn walk(&mut self, path: &[&[u8]], name: &[u8]) -> Result<OwnedFd, Error> {
        if path.len() > MAX_DEPTH {
            return Err(Error::TooDeep(name.to_vec()));
        }
        let mut at = self.root.try_clone().map_err(Error::Target)?;
        for (index, part) in path.iter().enumerate() {
            let part = OsStr::from_bytes(part);
            at = match openat(&at, part, DIRECTORY, Mode::empty()) {
                Ok(next) => next,
                Err(Errno::NOENT) => {
                    self.remember(path[..=index].join(&b'/'))?;
                    mkdirat(&at, part, Mode::RWXU).map_err(|error| write_error(name, error))?;
                    openat(&at, part, DIRECTORY, Mode::empty())
                        .map_err(|error| write_error(name, error))?
                }
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    return Err(refused(
                        name,
                        "leads through something that is not a directory",
                    ));
                }
                Err(error) => return Err(write_error(name, error)),
            };
        }
        Ok(at)
    }

    /// Remembers a directory that is about to be created, with the mode that it has without an
    /// entry of its own.
    fn remember(&mut self, path: Vec<u8>) -> Result<(), Error> {
        self.directory_bytes += path.len() + DIRECTORY_OVERHEAD;
        if self.directory_bytes > MAX_DIRECTORY_BYTES {
            return Err(Error::TooManyDirectories);
        }
        self.modes.insert(path, Mode::from_bits_truncate(0o755));
        Ok(())
    }

    fn directory(&mut self, path: &[&[u8]], mode: Mode, name: &[u8]) -> Result<(), Error> {
        self.walk(path, name)?;
        // A directory that existed before keeps its mode.
        if let Some(created) = self.modes.get_mut(&path.join(&b'/')) {
            *created = mode;
        }
        Ok(())
    }

    /// Makes room for a new entry: opens its directory and unlinks a file or link in its place.
    fn make_room<'a>(
        &mut self,
        path: &[&'a [u8]],
        name: &[u8],
    ) -> Result<(OwnedFd, &'a OsStr), Error> {
        let (last, parents) = path
            .split_last()
            .ok_or_else(|| refused(name, "has no name"))?;
        let parent = self.walk(parents, name)?;
        let last = OsStr::from_bytes(last);
        match unlinkat(&parent, last, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM)
                if statat(&parent, last, AtFlags::SYMLINK_NOFOLLOW).is_ok() =>
            {
                return Err(Error::Write {
                    name: name.to_vec(),
                    source: io::Error::other("a directory is in the way"),
                });
            }
            Err(error) => return Err(write_error(name, error)),
        }
        Ok((parent, last))
    }

    fn file(
        &mut self,
        path: &[&[u8]],
        mode: Mode,
        archive: &mut Archive<UnpackSource<impl Read>>,
        name: &[u8],
    ) -> Result<(), Error> {
        let (parent, last) = self.make_room(path, name)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&parent, last, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| write_error(name, error))?;
        let mut file = std::fs::File::from(file);
        archive.read(|piece| {
            file.write_all(piece).map_err(|source| Error::Write {
                name: name.to_vec(),
                source,
            })
        })?;
        fchmod(&file, mode.difference(self.umask)).map_err(|error| write_error(name, error))
    }

    fn symlink(&mut self, path: &[&[u8]], target: &[u8], name: &[u8]) -> Result<(), Error> {
        let (parent, last) = self.make_room(path, name)?;
        symlinkat(OsStr::from_bytes(target), &parent, last)
            .map_err(|error| write_error(name, error))
    }

    /// Sets the modes of created directories, the deepest first. The directories on the way to one
    /// stay open for the next: all that begin with the same path are neighbours in the map, so no
    /// directory is opened more than twice.
    fn finish(self) -> Result<(), Error> {
        let mut open: Vec<(Vec<u8>, OwnedFd)> = Vec::new();
        for (path, mode) in self.modes.into_iter().rev() {
            let parts: Vec<&[u8]> = components(&path).collect();
            let shared = open
                .iter()
                .zip(&parts)
                .take_while(|((name, _), part)| name == *part)
                .count();
            open.truncate(shared);
            for part in &parts[shared..] {
                let at = open.last().map_or(&self.root, |(_, directory)| directory);
                let next = openat(at, OsStr::from_bytes(part), DIRECTORY, Mode::empty())
                    .map_err(|error| write_error(&path, error))?;
                open.push((part.to_vec(), next));
            }
            let directory = open.last().map_or(&self.root, |(_, directory)| directory);
            fchmod(directory, mode.difference(self.umask))
                .map_err(|error| write_error(&path, error))?;
        }
        Ok(())
    }
}

fn write_error(name: &[u8], error: Errno) -> Error {
    Error::Write {
        name: name.to_vec(),
        source: error.into(),
    }
}
